"""Which configuration a call gets: the order of sources, what may take part, and that serving calls look nothing up twice."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from problems import build

import tkv
from tkv.errors import UnsupportedError
from tkv.ops.attention import Options, config_for, default_config
from tkv.ops.cascade import plan_cascade
from tkv.ops.decode import plan_decode
from tkv.ops.prefill import plan_prefill
from tkv.ops.scores import plan_scores
from tkv.tune import select, tables
from tkv.tune.arch import ARCHS
from tkv.tune.configs import AttentionConfig
from tkv.tune.keys import OP_KINDS, Key, key_of, programs_of
from tkv.tune.select import Coverage, choose, coverage, explain
from tkv.tune.tables import Bucket, Compiled, Entry, Run, Table, dump, table_path
from tkv.tune.versions import installed_triton

COMPILED = Compiled(str(installed_triton()), registers=168, spills=0, shared=70000, ctas_per_sm=3)
KEY = Key(64, 64, "fp16", "fp16", 16, 16)
A, B, C = (AttentionConfig(16, 16 * n, 4, 1) for n in (1, 2, 4))
RUN = Run("H100 SXM", 132, None, "3.9.0", "2.13.0", "2026-11-02", "cold L2", 0.8)


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """Two folders of tables instead of what tkv has: its own and the user's."""
    own, users = tmp_path / "own", tmp_path / "users"
    users.mkdir()
    monkeypatch.setattr(select, "configs_dir", lambda: own)
    monkeypatch.setenv(select.CONFIG_DIR, str(users))
    select.forget()
    yield own, users
    select.forget()


def entry(config, work=None, keys=None, match=KEY, compiled=COMPILED):
    return Entry(match, Bucket(work, keys), config, "modelled", None if config is None else compiled)


def write(folder, *entries, arch="sm90", op="paged_decode", **more):
    dump(Table.make(op, arch, entries, **more), table_path(folder, arch, op))
    select.forget()


def chosen(key=KEY, arch="sm90", programs=100, keys=1000, op="paged_decode"):
    return choose(op, arch, key, programs, 100, keys, default_config(op, arch, key))


def default(key=KEY, arch="sm90", op="paged_decode"):
    return default_config(op, arch, key)


def test_the_users_table_comes_first_then_the_architectures_then_the_default(folders):
    own, users = folders
    assert chosen() == default()
    write(own, entry(A))
    assert chosen() == A
    write(users, entry(B))
    assert chosen() == B
    write(users, entry(B, match=KEY._replace(page=1)))
    assert chosen() == A


def test_a_table_of_the_family_stands_in_for_a_missing_one_nearest_first(folders):
    own, _ = folders
    write(own, entry(A), arch="sm86")
    write(own, entry(B), arch="sm89")
    assert [chosen(arch=arch) for arch in ("sm121", "sm120", "sm89", "sm86", "sm80")] == [B, B, B, A, default(arch="sm80")]
    write(own, entry(C), arch="sm120")
    assert [chosen(arch=arch) for arch in ("sm121", "sm120", "sm89")] == [C, C, B]
    # A key that the architecture's own table leaves out is best served by the default.
    write(own, entry(C, match=KEY._replace(page=1)), arch="sm120")
    assert chosen(arch="sm120") == default(arch="sm120")


def test_only_the_very_key_matches(folders):
    own, _ = folders
    write(own, entry(A))
    others = {"head_dim": 128, "v_head_dim": 32, "dtype": "fp32", "format": "int8/token_head", "rows": 32, "page": 64}
    for key in [KEY._replace(**{name: value}) for name, value in others.items()] + [
        KEY._replace(flags=(flag,)) for flag in ("rope", "tree")
    ]:
        assert chosen(key) == default(key) != A
    assert chosen(op="key_scores") == default(op="key_scores")


def test_the_first_bucket_that_holds_the_work_is_taken_bounds_included(folders):
    own, _ = folders
    write(own, entry(A, 1.0, 4096), entry(B, 1.0), entry(None, 2.0), entry(C))
    sizes = {(100, 4096): A, (100, 4097): B, (101, 1): default(), (200, 10**6): default(), (201, 1): C}
    assert {size: chosen(programs=size[0], keys=size[1]) for size in sizes} == sizes


@pytest.mark.parametrize(
    "config, compiled, reason",
    [
        (AttentionConfig(16, 512, 4, 4), COMPILED, "bytes of shared memory for tiles in flight, sm86 has 101376"),
        (A, replace(COMPILED, shared=101377), "needs 101377 bytes of shared memory, sm86 has 101376"),
        (AttentionConfig(128, 512, 1, 1), COMPILED, "registers a thread"),
    ],
)
def test_what_cannot_run_on_the_architecture_is_passed_over_and_said_so(folders, config, compiled, reason):
    own, users = folders
    key = KEY._replace(head_dim=128, v_head_dim=128)
    write(own, entry(B, match=key), arch="sm86")
    write(users, entry(config, 1.0, match=key, compiled=compiled), entry(C, match=key), arch="sm86")
    assert [chosen(key, "sm86", programs) for programs in (100, 101)] == [B, C]
    rows = explain("paged_decode", key, "sm86", work=1.0)
    assert [row.outcome for row in rows] == ["no match", "rejected", "chosen", "matched"]
    assert reason in rows[1].reason and rows[1].config == config


@pytest.mark.parametrize(
    "content",
    [b'{"schema": 99}', b"", b'{"op": "\xff"}', b"[" * 100_000, b"9" * 5000, None],
    ids=["schema", "empty", "no text", "deep", "digits", "folder"],
)
def test_a_table_that_is_wrong_is_logged_once_in_one_line_and_ignored(folders, caplog, content):
    own, users = folders
    write(own, entry(A))
    path = table_path(users, "sm90", "paged_decode")
    path.parent.mkdir(parents=True)
    path.mkdir() if content is None else path.write_bytes(content)
    with caplog.at_level(logging.WARNING, "tkv"):
        assert [chosen(), chosen(KEY._replace(page=1)), chosen()] == [A, default(KEY._replace(page=1)), A]
    assert len(caplog.records) == 1 and str(path) in caplog.text and "\n" not in caplog.records[0].getMessage()


def test_what_another_triton_makes_of_a_kernel_is_no_reason_to_choose_it_but_a_measurement_is(folders):
    own, _ = folders
    old = replace(COMPILED, triton="0.1.0")
    write(own, entry(A, compiled=old))
    assert chosen() == default()
    row = explain("paged_decode", KEY, "sm90")[2]
    assert (row.outcome, row.config) == ("rejected", A)
    assert row.reason == f"modelled from what Triton 0.1.0 makes of the kernel, {installed_triton()} is installed"
    write(own, Entry(KEY, Bucket(), A, "measured", old, 12.5, 0), runs=[RUN])
    assert chosen() == A
    near = ".".join([*str(installed_triton()).split(".")[:2], "99"])
    write(own, entry(A, compiled=replace(COMPILED, triton=near)))
    assert chosen() == A


def test_a_table_that_is_missing_is_logged_once_below_warnings(folders, caplog):
    with caplog.at_level(logging.DEBUG, "tkv"):
        for _ in range(3):
            assert chosen(arch="sm80") == default(arch="sm80")
    assert sorted(record.levelname for record in caplog.records) == ["INFO", "INFO"]
    assert all(str(table_path(folder, "sm80", "paged_decode")) in caplog.text for folder in folders)


def test_a_folder_of_the_user_that_does_not_exist_is_logged_once_and_ignored(folders, caplog, monkeypatch):
    own, _ = folders
    write(own, entry(A))
    monkeypatch.setenv(select.CONFIG_DIR, "/nowhere")
    select.forget()
    assert [chosen(), chosen(op="key_scores")] == [A, default(op="key_scores")]
    assert [record.getMessage() for record in caplog.records] == ["TKV_CONFIG_DIR is ignored: there is no folder /nowhere"]
    assert explain("paged_decode", KEY, "sm90")[1].reason == "there is no folder /nowhere"


class Reads:
    """Counts tables read."""

    def __init__(self, monkeypatch):
        self.count, load = 0, tables.load

        def counted(path):
            self.count += 1
            return load(path)

        monkeypatch.setattr(tables, "load", counted)


def test_a_serving_call_reads_no_table_and_looks_nothing_up_that_an_earlier_one_has(folders, monkeypatch):
    own, _ = folders
    write(own, entry(A, None, 100), entry(B))
    reads = Reads(monkeypatch)
    problem = build("fp16", [40, 3], 16, 1, 2, 64)
    first = problem.run()
    # One table of each folder.
    assert (reads.count, select.choices.cache_info().misses) == (2, 1)
    longer = build("fp16", [70, 3, 30], 16, 1, 2, 64)
    for call in (problem.run, problem.run, lambda: problem.run(max_seq_len=10**6), longer.run):
        call()
    assert (reads.count, select.choices.cache_info().misses) == (2, 1)
    assert torch.equal(first[0], problem.run()[0])
    build("fp16", [40], 16, 1, 2, 64, window=9).run()
    assert (reads.count, select.choices.cache_info().misses) == (2, 2)


def test_a_config_of_the_call_asks_nobody(folders, monkeypatch):
    reads = Reads(monkeypatch)
    build("fp16", [40], 16, 1, 2, 64).run(config=A)
    assert (reads.count, select.choices.cache_info().misses) == (0, 0)


def meta(dim=64, dtype=torch.float16, page_size=16, seqs=4, heads=8, **more):
    cache = tkv.KVCache.empty(64, page_size, 2, dim, "fp16", device="meta")
    q = torch.empty(seqs, 1, heads, dim, dtype=dtype, device="meta")
    table = torch.empty(seqs, 32, dtype=torch.int32, device="meta")
    return q, cache, table, torch.empty(seqs, dtype=torch.int32, device="meta"), Options(scale=0.1, **more)


def tile_of(launch):
    return next(arg.BLOCK_N for arg in launch.args if hasattr(arg, "BLOCK_N")), launch.num_warps


def test_every_function_takes_its_own_table_and_its_own_size_of_work(folders):
    own, _ = folders
    q, cache, table, lens, options = meta()
    out, lse, ragged = torch.empty_like(q), torch.empty(q.shape[:-1], device="meta"), torch.empty(5, dtype=torch.int32, device="meta")
    few = [AttentionConfig(16, 16, warps, 1) for warps in (1, 2, 8, 16)]
    # 132 SMs: 4 sequences x 2 heads decode; a level of 4 x 4 rows in one tile; 400 tokens x 4 heads in tiles of 128 rows.
    works = {"paged_decode": 8, "shared_prefix_decode": 2, "prefix_prefill": 2 * 13, "key_scores": 8}
    keys = {op: KEY._replace(rows=128) if op == "prefix_prefill" else KEY for op in OP_KINDS}
    for op, config in zip(OP_KINDS, few):
        open_bucket = config if op == "key_scores" else C
        write(own, entry(config, works[op] / 132, match=keys[op]), entry(open_bucket, match=keys[op]), op=op)
    level = tkv.SharedLevel(table[:1], lens[:1], lens[:1], ragged[:2], lens, 4, 512)
    tokens, token_lse = torch.empty(400, 8, 64, dtype=torch.float16, device="meta"), torch.empty(400, 8, device="meta")
    new = torch.empty(400, 2, 64, dtype=torch.float16, device="meta")

    def launches(**sizes):
        target = ("sm90", False, options)
        return {
            "paged_decode": plan_decode(q, cache, table, lens, out, lse, *target, **sizes)[0],
            "shared_prefix_decode": plan_cascade(q, cache, [level], table, lens, out, lse, *target)[0],
            "prefix_prefill": plan_prefill(tokens, (new, new), cache, table, lens, ragged, tokens, token_lse, *target, max_q_len=100)[0],
            "key_scores": plan_scores(q, cache, table, lens, lse, torch.empty(64, 16, 2, device="meta"), *target)[0],
        }

    found = launches()
    assert {op: tile_of(launch) for op, launch in found.items()} == {op: (16, config.num_warps) for op, config in zip(OP_KINDS, few)}
    for op, config in zip(OP_KINDS, few):
        if op != "key_scores":
            write(own, entry(config, works[op] / 132 - 1e-6, match=keys[op]), entry(C, match=keys[op]), op=op)
    assert [tile_of(launch)[0] for op, launch in launches().items() if op != "key_scores"] == [64, 64, 64]


def test_keys_that_count_are_those_that_a_window_and_a_hint_leave(folders):
    own, _ = folders
    windowed = KEY._replace(flags=("window",))
    write(own, entry(A, None, 100), entry(C), entry(B, None, 50, match=windowed), entry(C, match=windowed))
    q, cache, table, lens, options = meta()
    out = torch.empty_like(q)

    def block_n(options, **hint):
        return tile_of(plan_decode(q, cache, table, lens, out, None, "sm90", False, options, **hint)[0])[0]

    assert [block_n(options, max_seq_len=n) for n in (100, 101, None)] == [16, 64, 64]
    assert [block_n(Options(scale=0.1, window=w)) for w in (50, 51)] == [32, 64]
    assert block_n(Options(scale=0.1, window=60), max_seq_len=50) == 32


def test_explain_parses_no_table_again(folders, monkeypatch):
    own, _ = folders
    write(own, entry(A))
    reads = Reads(monkeypatch)
    for _ in range(2):
        assert [row.outcome for row in explain("paged_decode", KEY, "sm90")] == ["no match", "no match", "chosen", "matched"]
    # One table of each folder.
    assert reads.count == 2


@pytest.mark.parametrize("name", ["x" * 300, __file__])
def test_a_folder_of_the_user_that_cannot_be_one_is_ignored(folders, monkeypatch, name):
    own, _ = folders
    write(own, entry(A))
    monkeypatch.setenv(select.CONFIG_DIR, name)
    assert chosen() == A


@pytest.mark.parametrize("op", ["paged_decode", "prefix_prefill"])
def test_deterministic_results_have_the_config_of_the_open_bucket_whatever_the_batch(folders, op):
    own, _ = folders
    key = KEY._replace(rows=128) if op == "prefix_prefill" else KEY
    tuned = AttentionConfig(16, 32, 8, 1, 64)
    write(own, entry(A, 10.0, match=key), entry(tuned, match=key), op=op)
    for seqs in (1, 4, 2000):
        q, cache, table, lens, options = meta(seqs=seqs)
        out, target = torch.empty_like(q), ("sm90", False, options)
        for hint in (None, 1):
            if op == "paged_decode":
                launch = plan_decode(q, cache, table, lens, out, None, *target, deterministic=True, max_seq_len=hint)[0]
            else:
                cu_seqlens = torch.empty(seqs + 1, dtype=torch.int32, device="meta")
                args = (q[:, 0], None, cache, table, lens, cu_seqlens, out[:, 0], None, *target)
                launch = plan_prefill(*args, deterministic=True, max_seq_len=hint, max_q_len=hint)[0]
            assert tile_of(launch) == (32, 8)


def test_a_deterministic_result_is_the_same_bits_in_any_batch_with_a_table(folders):
    own, _ = folders
    write(own, entry(AttentionConfig(16, 16, 4, 1, 32), 0.02), entry(AttentionConfig(16, 32, 4, 1, 32)))
    problem = build("fp16", [150, 33, 7, 60], 16, 2, 2, 64)
    whole = problem.check(deterministic=True)
    for seq in range(4):
        rows = slice(seq, seq + 1)
        args = (problem.q[rows], problem.cache, problem.page_table[rows], problem.seq_lens[rows])
        out, lse = tkv.paged_decode(*args, deterministic=True, return_lse=True)
        assert torch.equal(out, whole[0][rows]) and torch.equal(lse, whole[1][rows])


def test_calls_with_a_table_compute_what_they_should(folders):
    own, _ = folders
    write(own, entry(AttentionConfig(32, 16, 8, 1, 16), 0.01), entry(B))
    for lens in ([40, 3], [9] * 5):
        problem = build("fp16", lens, 16, 1, 2, 64)
        problem.check()
        assert problem.options == {} and key_of(torch.float16, problem.cache, Options(scale=1.0), 2) == KEY


def test_explain_says_of_every_source_what_became_of_it(folders):
    own, users = folders
    stale = Compiled("0.1", 168, 0, 70000, 3)
    write(users, entry(A, 1.0, 100), entry(B, 1.0), entry(None), entry(A, match=KEY._replace(page=1)))
    measured = Entry(KEY, Bucket(), B, "measured", stale, 12.5, 0)
    write(own, measured, runs=[RUN], source="0" * 64)
    rows = explain("paged_decode", KEY, "sm90", work=1.0, keys=100)
    files = [str(table_path(folder, "sm90", "paged_decode")) for folder in (users, own)]
    assert [(row.source, row.outcome, row.origin) for row in rows] == [
        ("config=", "no match", ""),
        (files[0], "chosen", "modelled"),
        (files[1], "matched", "measured"),
        ("default", "matched", "analytic"),
    ]
    assert rows[1].reason == "bucket work <= 1, keys <= 100" and (rows[2].us, rows[2].triton) == (12.5, "0.1")
    assert rows[2].stale.startswith("the kernel has changed; compiled by Triton 0.1, here is ")
    # The bucket where the default is best is chosen for its own sake.
    rows = explain("paged_decode", KEY, "sm90")
    assert [(row.outcome, row.config) for row in rows[1:]] == [("chosen", default()), ("matched", B), ("matched", default())]
    rows = explain("paged_decode", KEY, "sm90", config={"block_m": 16, "block_n": 32, "num_warps": 4, "num_stages": 1})
    assert [row.outcome for row in rows] == ["chosen", "matched", "matched", "matched"]
    rows = explain("paged_decode", KEY, "sm90", config=AttentionConfig(128, 512, 1, 1))
    assert rows[0].outcome == "chosen" and rows[0].reason.startswith("cannot run: needs at least 2304 registers a thread")
    rows = explain("paged_decode", KEY._replace(rows=32), "sm90")
    assert rows[1].reason == f"no entry for {KEY._replace(rows=32).name}; 2 keys of these dims and this format, 2 in all"
    assert [row.outcome for row in rows] == ["no match", "no match", "no match", "chosen"]


def test_explain_agrees_with_what_a_call_gets(folders, monkeypatch):
    own, _ = folders
    monkeypatch.delenv(select.CONFIG_DIR)
    write(own, entry(A, 0.05, 100), entry(B, 0.05), entry(C))
    q, cache, _, _, options = meta()
    for seqs, keys in ((1, 100), (3, 101), (4, 1)):
        size = programs_of("paged_decode", seqs, 2, 4), keys
        got = config_for("paged_decode", q, cache, options, "sm90", 4, size)
        rows = explain("paged_decode", KEY, "sm90", work=size[0] / 132, keys=keys)
        assert [row.config for row in rows if row.outcome == "chosen"] == [got]
        assert rows[1].reason == "not set"


def test_explain_refuses_what_does_not_exist():
    with pytest.raises(UnsupportedError, match="op: expected paged_decode"):
        explain("write_kv", KEY, "sm90")
    with pytest.raises(UnsupportedError, match="unknown arch 'sm70'"):
        explain("paged_decode", KEY, "sm70")


def test_coverage_counts_every_table_and_names_what_is_missing_or_wrong(folders):
    own, _ = folders
    int8 = KEY._replace(format="int8/token_head")
    old = Compiled("0.1", 168, 0, 70000, 3)
    write(own, entry(A), entry(B, match=int8, compiled=old), Entry(int8._replace(page=1), Bucket(), C, "measured", old, 2.0, 0), runs=[RUN])
    write(own, entry(A), arch="sm100", source="0" * 64)
    broken = table_path(own, "sm80", "key_scores")
    broken.parent.mkdir()
    broken.write_text("{")
    found = coverage(own)
    assert all(isinstance(row, Coverage) for row in found)
    rows = {(row.arch, row.op, row.format): row for row in found}
    counts = {key: (row.entries, row.measured, row.modelled) for key, row in rows.items() if row.entries}
    assert counts == {
        ("sm90", "paged_decode", "fp16"): (1, 0, 1),
        ("sm90", "paged_decode", "int8/token_head"): (2, 1, 1),
        ("sm100", "paged_decode", "fp16"): (1, 0, 1),
    }
    assert len(rows) == len(ARCHS) * len(OP_KINDS) + 1
    assert rows["sm90", "paged_decode", "int8/token_head"].triton == ("0.1",)
    assert "compiled by Triton 0.1" in rows["sm90", "paged_decode", "int8/token_head"].stale
    assert "the kernel has changed" in rows["sm100", "paged_decode", "fp16"].stale
    assert rows["sm103", "paged_decode", ""].problem == "no table, that of sm100 stands in"
    assert rows["sm86", "paged_decode", ""].problem == "no table"
    assert str(broken) in rows["sm80", "key_scores", ""].problem


def test_importing_tkv_reads_no_table_and_imports_no_triton():
    code = "import sys, tkv; from tkv.tune import select; print('triton' in sys.modules, select._read.cache_info().misses)"
    environment = {**os.environ, "PYTHONPATH": str(Path(tkv.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["False", "0"]


def test_the_tables_that_tkv_has_are_valid(monkeypatch):
    monkeypatch.undo()
    from tkv.tune.arch import configs_dir

    for path in configs_dir().glob("*/*.json"):
        assert json.loads(path.read_text())["entries"] == [] or tables.load(path).entries
