"""tkv tune: arguments, what is measured, what is said, and what an interruption keeps."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tkv.cli import main
from tkv.commands import tune
from tkv.commands.arguments import duration
from tkv.errors import UnsupportedError
from tkv.ops import launch
from tkv.tune import offline
from tkv.tune import tuner as tuning
from tkv.tune.configs import AttentionConfig
from tkv.tune.keys import OP_KINDS, Key
from tkv.tune.results import Result
from tkv.tune.runner import Failed
from tkv.tune.tables import Bucket, Compiled, Entry, Run, Table, dump, load
from tkv.tune.timing import Times

DEFAULT, BEST = AttentionConfig(16, 128, 4, 2), AttentionConfig(16, 64, 4, 3)
KEY = Key(128, 128, "bf16", "bf16", 16, 16)
COMPILED = Compiled("3.7.1", registers=100, spills=0, shared=30000, ctas_per_sm=3)


def result(shape, gain):
    best = BEST if gain else None
    times = Times(*([100.0 - gain] * 3), runs=7) if gain else None
    return Result(shape, DEFAULT, Times(100.0, 100.0, 100.0, runs=7), best, times, None, 1.0, 20, 1, 3, (), 0, "hash")


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A GPU whose tuner finds every other shape 10 % faster, and the arguments that it got."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    calls = []

    def tune(shapes, out, budget_s, *, resume, device, progress, note):
        calls.append(SimpleNamespace(shapes=shapes, out=out, budget=budget_s, resume=resume, device=device))
        results = []
        for i, shape in enumerate(shapes[:-1]):
            results.append(result(shape, 10.0 * (i % 2)))
            progress(shape, results[-1])
        progress(shapes[-1], None)
        note("the last one hangs")
        return SimpleNamespace(arch="sm90", results=results, failures=[(shapes[-1], "hang: no answer")])

    monkeypatch.setattr(tuning, "tune", tune)
    return calls


@pytest.mark.parametrize(("text", "seconds"), [("300s", 300), ("5m", 300), ("1.5h", 5400), ("90", 90), ("2min", 120)])
def test_budgets(text, seconds, measured):
    assert duration(text) == seconds
    assert main(["tune", "--budget", text]) == 0
    assert measured[0].budget == seconds


def test_defaults(measured, capsys):
    assert main(["tune"]) == 0
    (call,) = measured
    assert (call.out, call.budget, call.resume, call.device) == (Path("tkv-tuned"), 300, False, None)
    assert {shape.op for shape in call.shapes} == set(OP_KINDS)
    assert {shape.format for shape in call.shapes} == {"bf16", "fp8_e4m3/tensor", "int8/token_head", "int4/token_head"}
    assert {shape.head_dim for shape in call.shapes} == {64, 128, 256, 576}
    assert len(set(call.shapes)) == len(call.shapes)


def test_arguments_say_what_is_measured(measured, tmp_path, capsys):
    argv = ["--op", "paged_decode", "--shapes", "llama3-8b,gemma2-9b", "--format", "bf16", "--batch", "1,32", "--tokens", "8192"]
    assert main(["tune", *argv, "--page-size", "64", "--out", str(tmp_path), "--resume", "--device", "cuda:1"]) == 0
    (call,) = measured
    assert (call.out, call.resume, call.device) == (tmp_path, True, "cuda:1")
    assert [(shape.head_dim, shape.window, shape.num_seqs) for shape in call.shapes] == [
        (128, None, 1),
        (128, None, 32),
        (256, None, 1),
        (256, None, 32),
        (256, 4096, 1),
        (256, 4096, 32),
    ]
    assert {(shape.kv_len, shape.page_size) for shape in call.shapes} == {(8192, 64)}


def test_results_are_a_table_and_progress_goes_to_stderr(measured, capsys):
    argv = ["--op", "paged_decode", "--shapes", "llama3-8b", "--format", "bf16", "--batch", "1,2,3", "--tokens", "4096"]
    assert main(["tune", *argv]) == 0
    said = capsys.readouterr()
    head, _, first, second, *_, last = said.out.splitlines()
    assert head.split() == "op call batch keys default us best us gain noise % tried failed left config".split()
    assert first.split()[-1] == "default"
    assert "10.0%" in second
    assert second.endswith("block_m=16,block_n=64,num_warps=4,num_stages=3")
    assert last.startswith("2 of 3 shapes measured, 1 failed; TKV_CONFIG_DIR=tkv-tuned uses the tables")
    assert "the last one hangs" in said.err
    assert main(["tune", *argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["best"] and row["best"]["block_n"] for row in found["results"]] == [None, 64]
    assert [failure["reason"] for failure in found["failures"]] == ["hang: no answer"]


@pytest.mark.parametrize("offline", [False, True])
def test_a_folder_that_cannot_be_made_is_said_before_anything_is_done(offline, measured, monkeypatch, capsys, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys.modules["tkv.tune.offline"], "tune_offline", None)
    argv = ["--offline", "--arch", "sm90"] if offline else []
    assert main(["tune", *argv, "--out", "file/tables"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("tkv: --out: cannot make the folder file/tables") and error.endswith(": Not a directory\n")
    assert measured == []


def test_nothing_measured_is_a_failure(measured, capsys):
    assert main(["tune", "--op", "paged_decode", "--shapes", "llama3-8b", "--format", "bf16", "--batch", "1", "--tokens", "64"]) == 1
    assert "0 of 1 shapes measured, 1 failed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (KeyboardInterrupt(), 130, "what was measured is in tkv-tuned; --resume goes on from there\n"),
        (Failed("start", "no CUDA"), 1, "tkv: start: no CUDA\n"),
        (UnsupportedError("unknown arch 'sm75'"), 1, "tkv: unknown arch 'sm75'\n"),
    ],
)
def test_what_ends_a_run(error, status, message, measured, monkeypatch, capsys):
    def tune(*args, **kwargs):
        raise error

    monkeypatch.setattr(tuning, "tune", tune)
    assert main(["tune"]) == status
    assert message in capsys.readouterr().err


def test_without_a_gpu_it_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune"]) == 1
    assert capsys.readouterr().err == "tkv: torch sees no GPU to measure on; `tkv tune --offline --arch sm90` needs none\n"


def test_the_interpreter_is_not_measured(measured, monkeypatch, capsys):
    monkeypatch.setattr(launch, "interpreting", lambda: True)
    assert main(["tune"]) == 1
    assert "unset it" in capsys.readouterr().err
    assert not measured


@pytest.fixture
def modelled(monkeypatch, tmp_path):
    """A model that finds one better config for every function, and the calls that it got."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TKV_CACHE_DIR", str(tmp_path / "cache"))
    calls = []

    def tune_offline(arch, ops, progress, store, workers, part, like):
        calls.append((arch, *ops, workers, part and part.name, *(table.arch for table in like)))
        for done in range(3):
            progress(done, 2)
        num_warps = 8 if arch == "sm90" else 4
        config = AttentionConfig(16, 64, num_warps, 1)
        return [Table.make(ops[0], arch, [Entry(KEY, Bucket(), config, "modelled", COMPILED)])]

    monkeypatch.setattr(offline, "tune_offline", tune_offline)
    return calls


def test_offline_writes_a_table_for_every_architecture_and_function(modelled, tmp_path, capsys):
    assert main(["tune", "--offline", "--arch", "sm90", "--arch", "gfx942", "--workers", "2"]) == 0
    assert modelled == [(arch, op, 2, None) for arch in ("sm90", "gfx942") for op in OP_KINDS]
    assert capsys.readouterr().out.endswith("\n8 of 8 tables written to tkv-tuned\n")
    found = {path.relative_to("tkv-tuned"): load(path) for path in Path("tkv-tuned").rglob("*.json")}
    assert sorted(found) == sorted(Path(arch) / f"{op}.json" for arch in ("sm90", "gfx942") for op in OP_KINDS)
    assert found[Path("sm90/key_scores.json")].entries[0].config.num_warps == 8


def test_offline_for_a_part(modelled, capsys):
    assert main(["tune", "--offline", "--part", "h200", "--op", "key_scores", "--out", "here", "--json"]) == 0
    assert modelled == [("sm90", "key_scores", None, "H200 SXM")]
    found = json.loads(capsys.readouterr().out)
    assert [(table["arch"], table["op"], len(table["entries"])) for table in found["tables"]] == [("sm90", "key_scores", 1)]


def test_offline_keeps_what_was_measured(modelled, capsys):
    path = Path("tkv-tuned/sm90/paged_decode.json")
    run = Run("H100", 132, "570", "3.7.1", "2.13", "2026-01-01", "cold L2", 1.0)
    entries = [
        Entry(KEY, Bucket(), BEST, "measured", COMPILED, us=9.0, run=0),
        Entry(KEY._replace(head_dim=64), Bucket(), BEST, "modelled", COMPILED),
    ]
    dump(Table.make("paged_decode", "sm90", entries, [run]), path)
    assert main(["tune", "--offline", "--arch", "sm90", "--op", "paged_decode"]) == 0
    (entry,) = load(path).entries
    assert (entry.config, entry.origin) == (BEST, "measured")


def test_offline_resumes_behind_tables_of_the_kernel_as_it_is(modelled, capsys):
    argv = ["tune", "--offline", "--arch", "sm90", "--op", "paged_decode", "--op", "key_scores", "--resume"]
    assert main(argv) == 0
    path = Path("tkv-tuned/sm90/key_scores.json")
    table = load(path)
    dump(Table.make(table.op, table.arch, table.entries, source="another kernel"), path)
    modelled.clear()
    assert main(argv) == 0
    assert [op for _, op, *_ in modelled] == ["key_scores"]
    assert main(argv) == 0, "nothing is left to do"


def test_offline_keeps_its_budget_and_what_it_has(modelled, monkeypatch, capsys):
    monkeypatch.setattr(tune.time, "monotonic", lambda: 5.0 * len(modelled))
    assert main(["tune", "--offline", "--arch", "sm90", "--budget", "10s"]) == 0
    assert len(modelled) == 2
    assert [path.name for path in Path("tkv-tuned").rglob("*.json")] == ["paged_decode.json"]
    assert "1 of 4 tables are in tkv-tuned; another run goes on" in capsys.readouterr().err


def test_offline_interrupted_keeps_what_it_has(modelled, monkeypatch, capsys):
    found = offline.tune_offline

    def interrupted(arch, ops, *args, **kwargs):
        if ops == ["key_scores"]:
            raise KeyboardInterrupt
        return found(arch, ops, *args, **kwargs)

    monkeypatch.setattr(offline, "tune_offline", interrupted)
    assert main(["tune", "--offline", "--arch", "sm90"]) == 130
    assert len(list(Path("tkv-tuned").rglob("*.json"))) == 3


def test_offline_stops_at_a_damaged_table_before_it_compiles(modelled, capsys):
    path = Path("tkv-tuned/sm90/key_scores.json")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    assert main(["tune", "--offline", "--arch", "sm90"]) == 1
    assert capsys.readouterr().err.startswith(f"tkv: {path}: no JSON")
    assert not modelled


def test_a_related_architecture_gets_the_tables_of_the_other(modelled, capsys):
    assert main(["tune", "--offline", "--arch", "sm90", "--op", "key_scores"]) == 0
    assert main(["tune", "--offline", "--arch", "sm100", "--op", "key_scores", "--like", "sm90"]) == 0
    assert modelled[-1][-1] == "sm90"
    assert main(["tune", "--offline", "--arch", "sm100", "--op", "key_scores", "--like", "sm80"]) == 1
    assert "sm80" in capsys.readouterr().err


def test_offline_needs_facts_about_a_gpu(modelled, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules["tkv.tune.arch"], "reference_part", lambda name: None)
    assert main(["tune", "--offline", "--arch", "gfx1100"]) == 1
    assert "no GPU of gfx1100 is known well enough to model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "needs --arch"),
        (["--arch", "sm91"], "unknown arch"),
        (["--arch", "sm90", "--part", "b200"], "B200 is sm100"),
        (["--arch", "sm90", "--shapes", "llama3-8b"], "--shapes: not with --offline"),
        (["--arch", "sm90", "--page-size", "16"], "--page-size: not with --offline"),
    ],
)
def test_mistakes_offline_give_one_line(argv, message, modelled, refused):
    assert message in refused("tune", "--offline", *argv)
    assert not modelled


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--budget", "soon"], "such as 300s"),
        (["--budget", "0"], "such as 300s"),
        (["--op", "attention"], "attention"),
        (["--shapes", "llama9"], "expected one of llama3-8b"),
        (["--format", "fp7"], "'fp7'"),
        (["--batch", "1,0"], "at least 1"),
        (["--arch", "sm90"], "--arch: only with --offline"),
        (["--workers", "2"], "--workers: only with --offline"),
        (["--shapes", "mistral-7b", "--tokens", "4096"], "no shapes"),
    ],
)
def test_mistakes_give_one_line(argv, message, measured, refused):
    assert message in refused("tune", *argv)
    assert not measured
