"""Compiled reports on disk: found again, whole, by all that they depend on and nothing else."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tkv.errors import UnsupportedError
from tkv.tune import store as store_module
from tkv.tune.compile import DIED, Case, Report, _Compiler, compile_all
from tkv.tune.configs import AttentionConfig
from tkv.tune.store import Store, cache_dir

CONFIG = AttentionConfig(16, 64, 4, 2, split_len=512, max_registers=255)
REPORT = Report(
    Case("decode", head_dim=64, v_head_dim=32, window=True), "sm90", "3.7.1", registers=101, spills=8, shared=70000, config=CONFIG,
    num_warps=4, num_stages=2, loop={"HMMA": 64, "LDSM": 3}, loop_shared_bytes=96, loop_global_bytes=32,
    code=("LDG", "HMMA", "EXIT"), tf32=True,
)  # fmt: skip


@pytest.mark.parametrize("report", [REPORT, Report(Case("merge"), "gfx942", "3.7.1", error="CompilationError: at 1:2\n\u00e9")])
def test_a_report_comes_back_as_it_was(tmp_path: Path, report: Report) -> None:
    Store(tmp_path).put("ab12", report)
    assert Store(tmp_path).get("ab12") == report
    assert Store(tmp_path).get("ab13") is None
    assert not list(tmp_path.rglob(".*")), "a temporary file is left"


@pytest.mark.parametrize("content", [b"", b"{}", b"half of", None])
def test_a_file_that_cannot_be_read_is_a_miss(tmp_path: Path, content: bytes | None) -> None:
    store = Store(tmp_path)
    store.put("ab12", REPORT)
    file = next(tmp_path.rglob("*.gz"))
    file.write_bytes(file.read_bytes()[:-20] if content is None else content)
    assert store.get("ab12") is None
    store.put("ab12", REPORT)
    assert store.get("ab12") == REPORT


def test_a_file_of_other_fields_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    monkeypatch.setattr(store_module, "asdict", lambda report: {"case": {"op": "merge"}, "registers": 3})
    store.put("ab12", REPORT)
    assert store.get("ab12") is None


def test_a_key_depends_on_all_that_decides_what_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, case = Store(tmp_path), Case("decode", head_dim=64)
    keys = [store.key(case, "sm90")]
    keys += [
        store.key(replace(case, **{name: value}), "sm90") for name, value in (("format", "int8/tensor"), ("op", "scores"), ("group", 4))
    ]
    keys += [store.key(case, arch) for arch in ("sm80", "gfx942")]
    keys += [store.key(case, "sm90", replace(CONFIG, **{name: 4}) if name else CONFIG) for name in ("", "num_stages")]
    keys += [store.key(case, "sm90", replace(CONFIG, block_n=32)), store.key(case, "sm90", replace(CONFIG, split_len=None))]
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    keys.append(store.key(case, "sm90"))
    monkeypatch.undo()
    monkeypatch.setattr(store_module, "_sources", lambda: "other kernels")
    keys.append(store.key(case, "sm90"))
    assert len(set(keys)) == len(keys) == 12


def test_a_config_that_the_op_takes_anyway_has_the_key_of_none(tmp_path: Path) -> None:
    store, case = Store(tmp_path), Case("decode", head_dim=64)
    default = AttentionConfig(16, 128, 4, 2, max_registers=255)
    assert store.key(case, "sm90", default) == store.key(case, "sm90")
    with pytest.raises(UnsupportedError, match="merge has no tunables"):
        store.key(Case("merge"), "sm90", default)


def test_a_key_is_the_same_in_another_process(tmp_path: Path) -> None:
    code = "from tkv.tune.store import Store; from tkv.tune.compile import Case; print(Store('x').key(Case('level', alibi=True), 'sm80'))"
    seen = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert seen == Store(tmp_path).key(Case("level", alibi=True), "sm80") + "\n"


def test_the_folder_is_named_by_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TKV_CACHE_DIR", str(tmp_path))
    assert cache_dir() == tmp_path and Store().folder == tmp_path / "reports"
    monkeypatch.delenv("TKV_CACHE_DIR")
    monkeypatch.setenv("HOME", "/somewhere")
    assert cache_dir() == Path("/somewhere/.cache/tkv")


@pytest.mark.compile
def test_what_is_stored_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, config = Store(tmp_path), AttentionConfig(16, 32, 2, 2, split_len=256)
    jobs = [(Case("merge"), "sm90"), (Case("decode", head_dim=64), "sm90", config), (Case("level", head_dim=64), "sm80", config)]
    first = list(compile_all(jobs, workers=1, store=store))
    assert [(report.error, report.registers > 0, report.config) for report in first] == [
        ("", True, used) for used in (None, config, config)
    ]
    tile = 32 * 2 * 64 * 2
    assert tile <= first[1].loop_global_bytes * 2 < 1.25 * tile, "a turn of the loop loads one tile of K and V, and its page ids"
    monkeypatch.setattr("tkv.tune.compile._pool", lambda workers: pytest.fail("compiles again"))
    seen: list[Report] = []
    assert list(compile_all(jobs[::-1], workers=1, store=store, progress=seen.append)) == first[::-1] == seen


def _report_or_die(case: Case, *rest: object) -> Report:
    import os

    if case.op == "copy":
        os._exit(1)
    return Report(case, "sm90", "3.7.1", registers=case.head_dim)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_job_that_ends_the_compiler_is_reported_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    store = Store(tmp_path)
    jobs = [(Case(op, head_dim=dim), "sm90") for op, dim in (("merge", 64), ("merge", 128), ("copy", 64), ("merge", 256), ("write", 64))]
    monkeypatch.setattr("tkv.tune.compile.report", _report_or_die)
    found = list(compile_all(jobs, workers, store=store))
    assert [(report.error, report.registers) for report in found] == [("", 64), ("", 128), (DIED, 0), ("", 256), ("", 64)]
    assert [store.get(store.key(*job)) is not None for job in jobs] == [True, True, False, True, True]
    assert [report.registers for report in compile_all(jobs, workers, store=store)] == [64, 128, 0, 256, 64]


def test_a_kernel_that_is_asked_for_twice_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tkv.tune.compile.report", _report_or_die)
    submitted: list[str] = []
    submit = _Compiler.submit
    monkeypatch.setattr(_Compiler, "submit", lambda self, job, key: submitted.append(key) or submit(self, job, key))
    assert len(list(compile_all([(Case("merge"), "sm90")] * 3, 1, store=Store(tmp_path)))) == 3
    assert len(submitted) == 1


def test_what_was_done_before_an_interrupt_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tkv.tune.compile.report", _report_or_die)
    store, jobs = Store(tmp_path), [(Case("merge", head_dim=dim), "sm90") for dim in (64, 128)]

    def interrupt(report: Report) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(compile_all(jobs, 1, interrupt, store))
    assert store.get(store.key(*jobs[0])) is not None


def test_a_wrong_job_raises_as_it_would_without_processes() -> None:
    with pytest.raises(UnsupportedError, match="merge has no tunables"):
        list(compile_all([(Case("merge"), "sm90", CONFIG)], workers=1))
