"""Tables are checked without their GPUs: planted bad entries are found, and what has not changed is sampled."""

import subprocess
from dataclasses import replace

import pytest
import triton

from tkv.errors import UnsupportedError
from tkv.tune import check as checking
from tkv.tune.check import check, compiled_of
from tkv.tune.compile import Report, compile_all
from tkv.tune.configs import AttentionConfig
from tkv.tune.keys import Key, key_case
from tkv.tune.store import Store
from tkv.tune.tables import Bucket, Compiled, Entry, Run, Table, dump, table_path

KEY = Key(64, 64, "bf16", "bf16", 16, 16)
WIDE = KEY._replace(head_dim=128, v_head_dim=128)
GOOD, SPILLING = AttentionConfig(16, 64, 4, 2), AttentionConfig(16, 128, 4, 2, max_registers=40)
# Keys of 128 dims on their way to the matrix unit take 131,072 bytes; with one stage that is known from compiling alone.
LARGE = AttentionConfig(16, 512, 8, 1)
SAYS = Compiled(triton.__version__, registers=96, spills=0, shared=2048, ctas_per_sm=5)
RUN = Run("A10G", 80, None, triton.__version__, "2.13.0", "2026-11-02", "cold L2", 0.8)


def entry(config=GOOD, work=None, keys=None, match=KEY, compiled=SAYS):
    return Entry(match, Bucket(work, keys), config, "modelled", None if config is None else compiled)


def measured(compiled):
    return Entry(KEY, Bucket(), GOOD, "measured", compiled, 3.0, 0)


def write(folder, *entries, arch="sm86", op="paged_decode", **more):
    path = table_path(folder, arch, op)
    dump(Table.make(op, arch, entries, **more), path)
    return path


class Compiler:
    """Stands for the compiler: every kernel is as `SAYS`, but for what a test says of some configs."""

    def __init__(self, monkeypatch):
        self.jobs, self.of = [], {}
        monkeypatch.setattr(checking, "compile_all", self)

    def __call__(self, jobs, workers=None, progress=None, store=None):
        for case, arch, config in jobs:
            self.jobs.append((case, arch, config))
            report = Report(case, arch, SAYS.triton, SAYS.registers, SAYS.spills, SAYS.shared, config, num_warps=config.num_warps)
            yield replace(report, **self.of.get(config, {}))


@pytest.fixture
def compiler(monkeypatch):
    return Compiler(monkeypatch)


@pytest.mark.compile
def test_planted_entries_that_spill_or_need_too_much_shared_memory_are_found(tmp_path):
    store, jobs = Store(tmp_path / "reports"), ((KEY, GOOD), (KEY, SPILLING), (WIDE, LARGE))
    good, spilling, _ = compile_all([(key_case("paged_decode", key), "sm86", config) for key, config in jobs], store=store)
    lies = replace(compiled_of(spilling), spills=0)
    written = entry(GOOD, 1.0, compiled=compiled_of(good)), entry(SPILLING, compiled=lies), entry(LARGE, match=WIDE)
    path = write(tmp_path, *written)
    found = check(folder=tmp_path, strict=True, store=store)
    assert {problem.entry for problem in found} == {2, 3}
    lines = [str(problem) for problem in found]
    assert f"{path}: entry 2 ({KEY.name}; any): spills {spilling.spills} bytes a thread" in lines
    assert any("entry 2" in line and f"compiled says spills 0, now {spilling.spills}" in line for line in lines)
    assert any("entry 3" in line and "bytes of shared memory, sm86 has 101376" in line for line in lines)


def test_a_sound_table_has_no_problems_and_buckets_with_one_kernel_compile_it_once(tmp_path, compiler):
    split = replace(GOOD, split_len=640)
    write(tmp_path, entry(GOOD, 1.0), entry(None, 2.0), entry(split, 3.0), entry(SPILLING), entry(match=KEY._replace(page=1)))
    done = []
    assert check(folder=tmp_path, strict=True, progress=lambda *now: done.append(now)) == []
    assert [config for _, _, config in compiler.jobs] == [GOOD, GOOD, SPILLING]
    assert {case.page_size for case, _, _ in compiler.jobs} == {1, 16}
    assert done == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_a_table_that_is_wrong_or_that_nothing_reads_is_a_problem_and_the_others_are_checked(tmp_path, compiler):
    wrong = write(tmp_path, entry(), arch="sm80")
    wrong.write_text(wrong.read_text().replace('"num_stages"', '"num_ctas"', 2))
    stray, other = table_path(tmp_path, "sm75", "paged_decode"), table_path(tmp_path, "sm80", "write_kv")
    for path in (stray, other):
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    write(tmp_path, entry())
    lines = [str(problem) for problem in check(folder=tmp_path, strict=True)]
    assert len(lines) == 3 and len(compiler.jobs) == 1
    assert lines[0].startswith(f"{stray}: nothing reads it") and lines[2].startswith(f"{other}: nothing reads it")
    assert lines[1].startswith(f"{wrong}: tunables: the kernel has block_m") and "\n" not in "".join(lines)
    assert [str(problem) for problem in check(["sm86"], folder=tmp_path, strict=True)] == []


def test_an_entry_with_an_unknown_tunable_is_a_problem(tmp_path, compiler):
    path = write(tmp_path, entry())
    path.write_text(path.read_text().replace('"num_stages": 2', '"num_stages": 2, "num_ctas": 1'))
    (problem,) = check(folder=tmp_path)
    assert str(problem).startswith(f"{path}: entry 1: config: tunables of paged_decode are block_m")


def test_what_is_known_before_compiling_is_not_compiled(tmp_path, compiler):
    tall = AttentionConfig(128, 512, 1, 1)
    write(tmp_path, entry(tall, 1.0), entry(GOOD, 2.0, compiled=replace(SAYS, spills=8)), entry(compiled=replace(SAYS, shared=101377)))
    found = check(folder=tmp_path, strict=True)
    assert compiler.jobs == [] and [problem.entry for problem in found] == [1, 2, 3]
    assert "registers a thread" in found[0].text
    assert found[1].text == "spills 8, as the table says; a modelled entry must not"
    assert found[2].text == "needs 101377 bytes of shared memory, sm86 has 101376"


def test_a_key_of_no_call_is_a_problem(tmp_path, compiler):
    write(tmp_path, entry(match=KEY._replace(format="int4/group64", head_dim=96, v_head_dim=96)))
    (problem,) = check(folder=tmp_path)
    assert problem.text.startswith("there is no such call: head_dim: ") and compiler.jobs == []


@pytest.mark.parametrize(
    "now, text",
    [
        ({"error": "RuntimeError: no\nregisters"}, "does not compile: RuntimeError: no registers"),
        ({"registers": 95}, f"compiled says registers 96, now 95 (Triton {triton.__version__} on sm86)"),
        ({"shared": 30000}, f"compiled says shared 2048, now 30000; ctas_per_sm 5, now 3 (Triton {triton.__version__} on sm86)"),
    ],
    ids=["fails", "registers", "shared"],
)
def test_a_kernel_that_is_not_what_the_entry_says_is_a_problem(tmp_path, compiler, now, text):
    write(tmp_path, entry(None, 1.0), entry())
    compiler.of[GOOD] = now
    (problem,) = check(folder=tmp_path)
    assert (problem.entry, problem.what, problem.text) == (2, f"{KEY.name}; any", text)


def test_another_triton_may_give_other_numbers_but_must_fit_and_with_strict_not_spill(tmp_path, compiler):
    write(tmp_path, entry(compiled=replace(SAYS, triton="0.1")))
    compiler.of[GOOD] = {"registers": 130, "spills": 16}
    assert check(folder=tmp_path) == []
    assert [problem.text for problem in check(folder=tmp_path, strict=True)] == ["spills 16 bytes a thread"]
    compiler.of[GOOD] = {"shared": 200000}
    assert [problem.text for problem in check(folder=tmp_path)] == ["needs 200000 bytes of shared memory, sm86 has 101376"]


def test_a_measured_entry_may_spill_as_much_as_it_says(tmp_path, compiler):
    write(tmp_path, measured(replace(SAYS, spills=16)), runs=[RUN])
    compiler.of[GOOD] = {"spills": 16}
    assert check(folder=tmp_path, strict=True) == []
    compiler.of[GOOD] = {"spills": 24}
    texts = [problem.text for problem in check(folder=tmp_path)]
    assert texts == ["spills 24 bytes a thread", f"compiled says spills 16, now 24 (Triton {triton.__version__} on sm86)"]


def keys(count):
    return [KEY._replace(head_dim=16 + 8 * i, v_head_dim=16 + 8 * i) for i in range(count)]


def test_of_what_has_not_changed_a_seeded_sample_is_compiled(tmp_path, compiler):
    write(tmp_path, *[entry(match=key) for key in keys(20)])

    def sampled(**options):
        compiler.jobs.clear()
        assert check(folder=tmp_path, **options) == []
        return {case.head_dim for case, _, _ in compiler.jobs}

    first = sampled(sample=5)
    assert len(first) == 5 and sampled(sample=5) == first != sampled(sample=5, seed=1)
    assert len(sampled(strict=True)) == len(sampled(sample=100)) == 20 and sampled(sample=0) == set()


def test_all_entries_of_a_kernel_that_has_changed_are_compiled(tmp_path, compiler):
    write(tmp_path, *[entry(match=key) for key in keys(5)], source="0" * 64)
    write(tmp_path, *[entry(match=key) for key in keys(5)], arch="sm80")
    assert check(folder=tmp_path, sample=0) == []
    assert {arch for _, arch, _ in compiler.jobs} == {"sm86"} and len(compiler.jobs) == 5
    (problem,) = check(folder=tmp_path, strict=True)
    assert (problem.entry, problem.text) == (None, "stale: the kernel has changed since, tune again")


def git(folder, *args):
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    subprocess.run(["git", "-C", str(folder), *identity, *args], check=True, capture_output=True)


def test_what_a_table_did_not_have_at_a_revision_is_compiled(tmp_path, compiler):
    git(tmp_path, "init", "-q")
    write(tmp_path, *[entry(match=key) for key in keys(4)])
    write(tmp_path, entry(), arch="sm80", source="0" * 64)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "tables")
    assert check(["sm86"], folder=tmp_path, since="HEAD", sample=0) == [] and compiler.jobs == []
    write(tmp_path, *[entry(match=key) for key in keys(5)[1:]], entry(SPILLING, match=keys(1)[0]))
    # For the kernel as it is now, and a table that was not there.
    write(tmp_path, entry(), arch="sm80")
    write(tmp_path, entry(), arch="sm90")
    assert check(folder=tmp_path, since="HEAD", sample=0) == []
    assert {(case.head_dim, arch, config) for case, arch, config in compiler.jobs} == {
        (16, "sm86", SPILLING),
        (48, "sm86", GOOD),
        (64, "sm80", GOOD),
        (64, "sm90", GOOD),
    }
    for revision in ("nowhere", "--help"):
        with pytest.raises(UnsupportedError, match=f"since: there is no git revision '{revision}'"):
            check(folder=tmp_path, since=revision)


def test_a_revision_is_wrong_even_where_there_is_no_table(tmp_path):
    with pytest.raises(UnsupportedError, match="since: there is no git revision 'HEAD'"):
        check(folder=tmp_path, since="HEAD")


def test_names_that_do_not_exist_are_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="unknown arch 'sm70'"):
        check(["sm70"], folder=tmp_path)
    with pytest.raises(UnsupportedError, match="op: expected paged_decode"):
        check(ops=["write_kv"], folder=tmp_path)


def test_every_entry_that_tkv_has_is_within_what_is_known_before_compiling(monkeypatch):
    monkeypatch.setattr(checking, "_reports", lambda *_: ())
    assert [str(problem) for problem in check(sample=0)] == []
