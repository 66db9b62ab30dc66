"""Tables without a GPU: which configs are tried, when one wins, and how sizes become buckets."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tkv.errors import UnsupportedError
from tkv.ops.attention import default_config
from tkv.tune import ARCHS, offline
from tkv.tune.arch import parts
from tkv.tune.cases import launch_of
from tkv.tune.compile import Case, Report
from tkv.tune.configs import AttentionConfig
from tkv.tune.keys import OP_KINDS, Key, key_case, key_of_shape, size_of_shape
from tkv.tune.offline import MAX_TIME, buckets_of, candidates, entries_of, keys_of, problems, shapes_for, tune_offline
from tkv.tune.select import choose, forget
from tkv.tune.store import Store
from tkv.tune.tables import Bucket, Table, dump, dumps, table_path

H100 = next(part for part in parts() if part.name == "H100 SXM")
KEY = Key(128, 128, "bf16", "bf16", rows=16, page=16)
DEFAULT, OTHER, THIRD = (AttentionConfig(16, block_n, 4, 2) for block_n in (64, 32, 128))


def report(config: AttentionConfig, instructions: int, **more: Any) -> Report:
    """A decode kernel with so many instructions a tile."""
    known: dict[str, Any] = {"registers": 128, "shared": 40 << 10, "loop": {"HMMA": 32, "IMAD": instructions}}
    return Report(key_case("paged_decode", KEY), "sm90", "3.7.1", config=config, num_warps=4, num_stages=2, **{**known, **more})


@pytest.mark.parametrize("op", OP_KINDS)
@pytest.mark.parametrize("arch", ["sm80", "sm90", "sm100", "sm120", "gfx942", "gfx1201"])
def test_candidates_are_few_and_legal_and_begin_with_the_default(op: str, arch: str) -> None:
    for key in keys_of(op):
        found = candidates(op, key, arch)
        default = default_config(op, arch, key)
        assert found[0] == (default if op != "key_scores" else replace(default, num_stages=1))
        assert 2 <= len(found) <= 6 and len(set(found)) == len(found)
        for config in found[1:]:
            assert problems(config, arch, key) == [] and config.block_m <= key.rows and config.split_len is None
        wide = candidates(op, key, arch, wide=True)
        assert set(found) <= set(wide) and len(wide) > len(found) and wide[0] == found[0]


def test_every_key_is_that_of_its_case_and_of_its_shapes() -> None:
    for op in OP_KINDS:
        keys = keys_of(op)
        assert len(set(keys)) == len(keys)
        for key in keys:
            launch_of(key_case(op, key), "sm90")
            assert [key_of_shape(shape) for shape in shapes_for(op, key)] == [key] * len(shapes_for(op, key))


def test_sizes_of_shapes_are_a_grid() -> None:
    for op in OP_KINDS:
        for key in keys_of(op):
            sizes = [size_of_shape(shape, 132) for shape in shapes_for(op, key)]
            works, lengths = {work for work, _ in sizes}, {keys for _, keys in sizes}
            assert len(set(sizes)) == len(sizes) == len(works) * len(lengths)


def test_what_beats_the_default_everywhere_is_one_open_entry() -> None:
    (entry,) = entries_of("paged_decode", KEY, [report(DEFAULT, 9000), report(OTHER, 900)], H100)
    assert (entry.match, entry.bucket, entry.config, entry.origin) == (KEY, Bucket(), OTHER, "modelled")
    assert entry.compiled is not None and (entry.compiled.registers, entry.compiled.ctas_per_sm) == (128, 4)


def test_where_nothing_beats_the_default_by_five_percent_there_is_no_entry() -> None:
    slow = report(DEFAULT, 9000)
    assert entries_of("paged_decode", KEY, [slow, replace(slow, config=THIRD)], H100) != [], "half the instructions a key"
    assert entries_of("paged_decode", KEY, [slow], H100) == []
    assert entries_of("paged_decode", KEY, [slow, report(OTHER, 4450)], H100) == []


@pytest.mark.parametrize("fault", [{"spills": 4}, {"shared": 240 << 10}, {"error": "CompilationError"}, {"loop": {}}])
def test_a_config_that_spills_or_cannot_run_never_wins(fault: dict[str, Any]) -> None:
    assert entries_of("paged_decode", KEY, [report(DEFAULT, 9000), report(OTHER, 10, **fault)], H100) == []


def test_a_default_that_spills_is_no_reason_to_take_what_is_slower() -> None:
    assert entries_of("paged_decode", KEY, [report(DEFAULT, 900, spills=8), report(OTHER, 9000)], H100) == []


def test_a_default_that_does_not_compile_gives_no_entry() -> None:
    assert entries_of("paged_decode", KEY, [report(DEFAULT, 1, error="no"), report(OTHER, 900)], H100) == []


@pytest.mark.parametrize(
    ("other", "third", "winners"),
    [
        ([80.0, 80.5], [80.5, 80.0], [1, 1]),
        ([80.0, 96.0], [85.0, 85.0], [2, 2]),
        ([80.0, 96.0], [96.0, 94.0], [1, 0]),
        ([95.1, 94.9], [96.0, 96.0], [0, 1]),
        ([100.0, 99.0], [96.0, 120.0], [0, 0]),
    ],
)
def test_the_config_that_saves_most_has_the_sizes_where_it_is_faster(other: list[float], third: list[float], winners: list[int]) -> None:
    assert offline._winners([[100.0, 100.0], other, third]) == winners and MAX_TIME == 0.95


def test_buckets_hold_every_size_and_their_own() -> None:
    sizes = [(work, keys) for work in (0.06, 1.0, 8.0) for keys in (1024, 8192, 65536)]
    winners = [1, 1, 2, 1, 1, 2, 0, 3, 3]
    found = buckets_of(sizes, winners)
    assert [(bucket.name, winner) for bucket, winner in found] == [
        ("work <= 2.83, keys <= 23170", 1), ("work <= 2.83", 2), ("keys <= 2896", 0), ("any", 3),
    ]  # fmt: skip
    for size, winner in zip(sizes, winners, strict=True):
        assert next(chosen for bucket, chosen in found if bucket.holds(*size)) == winner
    assert buckets_of(sizes, [5] * 9) == [(Bucket(), 5)]


def fake_compiler(monkeypatch: pytest.MonkeyPatch, fast: AttentionConfig) -> list[Any]:
    """Every kernel is slow but those of one config."""
    seen: list[Any] = []

    def compile_all(jobs: list[Any], workers: int | None = None, store: object = None) -> Iterator[Report]:
        for case, arch, config in jobs:
            seen.append((case, arch, config))
            loop = {"HMMA": 32, "IMAD": 500 if config == fast else 9000}
            yield Report(case, arch, "3.7.1", 128, 0, 20 << 10, config, config.num_warps, config.num_stages, loop)

    monkeypatch.setattr(offline, "compile_all", compile_all)
    return seen


def test_a_table_gives_the_winner_to_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    default, fast = candidates("paged_decode", KEY, "sm90")[:2]
    seen, steps = fake_compiler(monkeypatch, fast), []
    (table,) = tune_offline("sm90", ["paged_decode"], progress=lambda *step: steps.append(step), keys=[KEY])
    assert isinstance(table, Table) and [entry.config for entry in table.entries] == [fast] and "modelled" in dumps(table)
    assert [config for _, _, config in seen] == candidates("paged_decode", KEY, "sm90")
    assert steps == [(done, len(seen)) for done in range(len(seen) + 1)]
    monkeypatch.setattr("tkv.tune.select.installed_triton", lambda: "3.7.0")
    monkeypatch.setenv("TKV_CONFIG_DIR", str(tmp_path))
    dump(table, table_path(tmp_path, "sm90", "paged_decode"))
    forget()
    assert choose("paged_decode", "sm90", KEY, 8, 132, 4096, default) == fast
    assert choose("paged_decode", "sm90", KEY._replace(page=1), 8, 132, 4096, default) == default


def test_all_ops_have_tables_and_keys_that_an_op_does_not_take_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fake_compiler(monkeypatch, DEFAULT)
    wrong = Key(72, 72, "bf16", "int4/group32", rows=16, page=16)
    tables = tune_offline("sm80", keys=[wrong, KEY._replace(rows=128)])
    assert [table.op for table in tables] == list(OP_KINDS) and {case.op for case, *_ in seen} == set(OP_KINDS.values())
    assert all(case.head_dim == 128 for case, *_ in seen)


def test_an_architecture_without_a_known_part_has_no_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fake_compiler(monkeypatch, DEFAULT)
    monkeypatch.setattr("tkv.tune.offline.reference_part", lambda name: None)
    assert [table.entries for table in tune_offline("gfx1100")] == [()] * 4 and not seen


def test_a_related_architecture_tries_only_what_won_on_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = candidates("paged_decode", KEY, "sm100")[1]
    fake_compiler(monkeypatch, fast)
    tables = tune_offline("sm100", ["paged_decode"], keys=[KEY])
    seen = fake_compiler(monkeypatch, fast)
    other = KEY._replace(rows=32)
    (table,) = tune_offline("sm103", ["paged_decode"], keys=[KEY, other], like=tables)
    default = candidates("paged_decode", KEY, "sm103")[0]
    assert [config for _, _, config in seen] == [default, fast] and table.entries[-1].config == fast


def test_sm103_is_modelled_by_the_part_of_its_family(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = candidates("paged_decode", KEY, "sm103")[1]
    seen = fake_compiler(monkeypatch, fast)
    (table,) = tune_offline("sm103", ["paged_decode"], keys=[KEY])
    assert table.arch == "sm103" and {arch for _, arch, _ in seen} == {"sm103"} and table.entries[-1].config == fast


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="sm70"):
        tune_offline("sm70")
    with pytest.raises(UnsupportedError, match="op: expected paged_decode"):
        tune_offline("sm90", ["decode"])
    with pytest.raises(UnsupportedError, match="op: expected paged_decode"):
        candidates("decode", KEY, "sm90")


def test_every_architecture_has_candidates_for_every_key() -> None:
    counts = {arch: sum(len(candidates(op, key, arch)) for op in OP_KINDS for key in keys_of(op)) for arch in ARCHS}
    assert all(250 < count < 550 for count in counts.values()), counts


@pytest.mark.compile
def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, store = Key(64, 64, "bf16", "bf16", rows=16, page=16), Store(tmp_path)

    def interrupt(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune_offline("sm90", ["paged_decode"], progress=interrupt, store=store, workers=1, keys=[key])
    assert len(list(tmp_path.rglob("*.gz"))) >= 2
    first = tune_offline("sm90", ["paged_decode"], store=store, workers=1, keys=[key])
    assert len(list(tmp_path.rglob("*.gz"))) == len(candidates("paged_decode", key, "sm90"))
    monkeypatch.setattr("tkv.tune.compile._pool", lambda workers: pytest.fail("compiles again"))
    assert tune_offline("sm90", ["paged_decode"], store=store, keys=[key]) == first
    assert all(entry.compiled is None or entry.compiled.spills == 0 for entry in first[0].entries)
    assert not any(math.isinf(entry.bucket.work or 0) for entry in first[0].entries)


def test_a_case_of_a_key_is_what_is_compiled() -> None:
    assert key_case("paged_decode", KEY) == Case("decode")


def test_key_scores_get_one_config_for_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    key = keys_of("key_scores")[0]
    fast = candidates("key_scores", key, "sm90")[1]
    fake_compiler(monkeypatch, fast)
    (table,) = tune_offline("sm90", ["key_scores"], keys=[key])
    assert [(entry.bucket, entry.config) for entry in table.entries] == [(Bucket(None, None), fast)]
