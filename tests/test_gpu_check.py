"""What is run on a machine with a GPU, without one: perf/gpu_check.sh with fake commands, perf/bench_ops.py with a fake clock."""

import csv
import importlib.util
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tkv.tune.arch import parts
from tkv.tune.shapes import Model
from tkv.tune.timing import Times

SCRIPT = Path(__file__).parents[1] / "perf" / "gpu_check.sh"
STEPS = ("doctor", "tests", "tune", "bench")
FAKE = """#!/usr/bin/env bash
case "$(basename "$0") $*" in make*) step=tests ;; *" doctor "*) step=doctor ;; *" tune "*) step=tune ;; *bench_ops.py*) step=bench ;; esac
echo "$step $(basename "$0") $*" >> "$CALLS"
echo "output of $step with TKV_CONFIG_DIR=${TKV_CONFIG_DIR:-}"
var=FAKE_$step
case "${!var:-0}" in
    wait) trap 'echo interrupted, results are written; exit 130' INT; while :; do sleep 0.05; done ;;
    *) exit "${!var:-0}" ;;
esac
"""


@pytest.fixture
def check(tmp_path):
    """Runs the script with fake commands; gives (exit status, output, calls of this run)."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("make", "python3", "mypython"):
        (tools / name).write_text(FAKE)
        (tools / name).chmod(0o755)
    calls = tmp_path / "calls"

    def start(*args, **env):
        calls.write_text("")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("LIMIT_", "TUNE_", "TEST_", "BENCH_", "TKV_"))}
        env = {**kept, "PATH": f"{tools}:{os.environ['PATH']}", "CALLS": str(calls), **env}
        args = args or (str(tmp_path / "out"),)
        # A shell cannot trap what was ignored when it started, as Ctrl-C is in a process that runs in the background.
        return subprocess.Popen(
            ["bash", SCRIPT, *args], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    def run(*args, **env):
        process = start(*args, **env)
        output = process.communicate(timeout=60)[0]
        return process.returncode, output, calls.read_text().splitlines()

    run.start, run.calls, run.out = start, calls, tmp_path / "out"
    return run


def status(check):
    return {name: (check.out / f"{name}.status").read_text().strip() for name in STEPS if (check.out / f"{name}.status").exists()}


def test_the_steps_run_in_their_order_and_leave_a_status_and_a_log_each(check):
    code, output, calls = check()
    assert code == 0 and [call.split()[0] for call in calls] == list(STEPS)
    doctor, tests, tune, bench = (call.split(" ", 1)[1] for call in calls)
    assert doctor == "python3 -m tkv.cli doctor --gpu"
    assert tests == "make test VENV=none PYTHON=python3 ARGS=-m 'not compile and not packaging'"
    assert tune == f"python3 -m tkv.cli tune --budget 170s --out {check.out}/tables --resume"
    assert bench == f"python3 perf/bench_ops.py --budget 70 --out {check.out}/bench"
    assert status(check) == dict.fromkeys(STEPS, "0")
    assert f"TKV_CONFIG_DIR={check.out}/tables" in (check.out / "bench.log").read_text()
    assert "TKV_CONFIG_DIR=\n" in (check.out / "tests.log").read_text()
    assert [line.split() for line in (check.out / "summary.txt").read_text().splitlines()] == [[name, "passed"] for name in STEPS]
    assert output.count("output of") == 4


def test_arguments_for_the_steps_come_from_variables(check):
    more = {"TUNE_ARGS": "--op key_scores", "TEST_ARGS": "-k decode", "BENCH_ARGS": "--models gemma2-9b"}
    _, _, calls = check(PYTHON="mypython", TUNE_BUDGET="20s", **more)
    assert [call.split()[1] for call in calls] == ["mypython", "make", "mypython", "mypython"]
    assert calls[1].endswith("PYTHON=mypython ARGS=-k decode")
    assert "--budget 20s" in calls[2] and calls[2].endswith("--resume --op key_scores") and calls[3].endswith("--models gemma2-9b")


def test_all_limits_together_are_less_than_ten_minutes():
    text = SCRIPT.read_text()
    limits = [int(text.split(f"LIMIT_{name.upper()}:-")[1].split("}")[0]) for name in STEPS]
    assert len(limits) == 4 and sum(limits) < 600


def test_a_failed_step_does_not_keep_the_others_from_running_and_is_told_at_the_end(check):
    code, output, calls = check(FAKE_tests="2")
    assert code == 1 and [call.split()[0] for call in calls] == list(STEPS)
    assert status(check) == {"doctor": "0", "tests": "2", "tune": "0", "bench": "0"}
    assert output.rstrip().splitlines()[-3] == "tests   FAILED with 2"


def test_called_again_only_what_has_not_passed_runs(check):
    assert check(FAKE_tests="2", FAKE_bench="1")[0] == 1
    code, output, calls = check()
    assert code == 0 and [call.split()[0] for call in calls] == ["tests", "bench"]
    assert "doctor: passed before" in output and "tune: passed before" in output
    code, _, calls = check()
    assert code == 0 and calls == []


def test_a_step_past_its_limit_is_interrupted_then_the_next_one_runs(check):
    code, output, calls = check(FAKE_tune="wait", LIMIT_TUNE="1")
    assert code == 1 and [call.split()[0] for call in calls] == list(STEPS)
    assert "results are written" in (check.out / "tune.log").read_text() and status(check)["tune"] == "124"
    assert "tune    FAILED: its time was over" in output


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_step_keeps_the_others_and_the_next_call_goes_on(check, name):
    process = check.start(FAKE_tune="wait")
    end = time.monotonic() + 20
    while "tune" not in check.calls.read_text() and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(name)
    output = process.communicate(timeout=20)[0]
    assert process.returncode == 130 and "results are written" in (check.out / "tune.log").read_text()
    assert status(check) == {"doctor": "0", "tests": "0"}
    assert "tune    not finished" in output and "bench   not finished" in output
    code, _, calls = check()
    assert code == 0 and [call.split()[0] for call in calls] == ["tune", "bench"]


@pytest.mark.parametrize("args", [("one", "two"), ("--help",)])
def test_without_a_folder_it_says_how_it_is_called(check, args):
    code, output, calls = check(*args)
    assert (code, output, calls) == (2, "usage: bash perf/gpu_check.sh FOLDER\n", [])


@pytest.fixture(scope="module")
def bench():
    """The script as a module, with a model and sizes that the interpreter can run."""
    spec = importlib.util.spec_from_file_location("bench_ops", SCRIPT.with_name("bench_ops.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    sizes = {"decode": ((2, 40),), "prefill": ((1, 20),), "cascade": ((3, 32),), "write": ((5, 1),), "gather": ((2, 40),)}
    model = Model("tiny", layers=2, num_q_heads=2, num_kv_heads=1, head_dim=32, window=24, windowed_layers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "SIZES", sizes)
        patch.setitem(module.MODELS, "tiny", model)
        patch.setattr(module, "WINDOW", 12)
        yield module


class Counting:
    """A timer that runs each call once and says that it took 2 microseconds."""

    def __init__(self):
        self.calls = 0

    def captured(self, call):
        return call

    def measure(self, call, quick=False):
        call()
        self.calls += 1
        return [1.0, 2.0, 3.0]


H100 = next(part for part in parts() if part.name == "H100 SXM")


def test_every_op_is_timed_for_every_format_and_kind_of_layer_and_written_down(bench, device, tmp_path):
    timer, todo = Counting(), list(bench.jobs(bench.OPS, ["tiny"], ["bf16", "int8/token_head"]))
    rows, left = bench.measure(todo, timer, device, H100, seconds=600.0)
    assert left == 0 and timer.calls == len(rows) and {row["op"] for row in rows} == set(bench.OPS)
    # Of the lengths only those of decoding and of the cascade are longer than the window.
    assert [row["note"] for row in rows if row["format"] == "bf16"] == ["", "window 24", "", "", "window 24", "", ""]
    decode = rows[0]
    moved = 2 * 40 * 2 * 32 * 2 + 2 * 2 * (32 + 32) * 2 + 2 * 2 * 4
    assert (decode["us p20"], decode["us p50"], decode["us p80"]) == (1.4, 2.0, 2.6)
    assert decode["GB/s"] == round(moved / 2e3) and decode["config"] == "analytic"
    assert decode["% of bandwidth"] == round(100 * moved / 2e3 / 3350, 1)
    assert all((row["TFLOP/s"] is None) == (row["op"] in ("write", "gather")) for row in rows)

    written = bench.write_out(rows, H100, "a fake GPU", tmp_path / "bench")
    with written[0].open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(rows) and table[0]["measured on"] == "a fake GPU" and table[0]["us p50"] == "2.0"
    if importlib.util.find_spec("matplotlib"):
        assert written[1].read_bytes().startswith(b"\x89PNG")


def test_rows_that_the_time_is_too_short_for_are_counted(bench, device, monkeypatch):
    clock = iter(range(0, 10**6, 4))
    monkeypatch.setattr(bench.time, "monotonic", lambda: float(next(clock)))
    todo = [bench.Job("write", "tiny", "bf16", (5, 1))] * 6
    rows, left = bench.measure(todo, Counting(), device, H100, seconds=20.0)
    assert len(rows) + left == 6 and 1 <= len(rows) <= 2


def test_a_row_that_cannot_be_built_is_told_and_the_others_are_measured(bench, device, capsys):
    bad, good = bench.Job("decode", "tiny", "int4/group64", (2, 40)), bench.Job("decode", "tiny", "bf16", (2, 40))
    rows, _ = bench.measure([bad, good], Counting(), device, H100, seconds=600.0)
    assert {row["format"] for row in rows} == {"bf16"}
    assert "left out, head_dim: int4/group64 needs a multiple of 64, got 32" in capsys.readouterr().err


def test_rates_of_a_part_that_is_not_known_stay_empty(bench):
    call = bench.Call(print, 4000, 0, "fixed")
    row = bench.row_of(bench.Job("write", "tiny", "bf16", (5, 1)), "", call, Times(1.0, 2.0, 3.0, 3), replace(H100, gbps=None))
    assert row["GB/s"] == 2 and row["% of bandwidth"] is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs where there is no GPU")
def test_without_a_gpu_it_says_so_in_one_line(bench, capsys):
    assert bench.main([]) == 2
    assert capsys.readouterr().err == "bench_ops: torch sees no GPU on this machine, and there is nothing to measure without one\n"
