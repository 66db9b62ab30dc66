"""Timing: quantiles, how much is written between runs, when clocks count as warm. The clock itself needs a GPU."""

import subprocess
import sys

import pytest
import torch

from tkv.errors import DeviceError, ShapeError
from tkv.tune import timing
from tkv.tune.arch import parts
from tkv.tune.timing import FULL_RUNS, QUICK_RUNS, CudaTimer, Times, flush_bytes, is_stable, quantile, runs_within


def test_quantiles_lie_between_runs_and_do_not_depend_on_their_order():
    assert Times.of([30.0, 10.0, 20.0]) == Times.of([10.0, 20.0, 30.0]) == Times(p20=14.0, p50=20.0, p80=26.0, runs=3)
    assert Times.of([7.0]) == Times(7.0, 7.0, 7.0, 1)
    assert quantile([4.0, 1.0], 0.0) == 1.0 and quantile([4.0, 1.0], 1.0) == 4.0


def test_no_runs_are_refused():
    with pytest.raises(ShapeError, match="times: expected at least one run"):
        Times.of([])


@pytest.mark.parametrize("part", parts(), ids=lambda part: part.name)
def test_more_is_written_between_runs_than_all_caches_of_the_part_hold(part):
    assert flush_bytes(part) > (part.l2_mb + (part.l3_mb or 0)) * 2**20


def test_clocks_are_warm_when_two_batches_take_the_same_time_within_two_percent():
    assert is_stable(100.0, 98.5) and is_stable(98.5, 100.0)
    assert not is_stable(100.0, 97.0) and not is_stable(float("inf"), 5.0)


def test_long_runs_are_fewer_but_never_less_than_three():
    assert runs_within(10.0, FULL_RUNS, 0.5) == FULL_RUNS
    assert runs_within(0.25e6, FULL_RUNS, 1.0) == 4
    assert runs_within(1e9, FULL_RUNS, 0.5) == 3


class Log(list):
    """Events of a GPU as they are queued, and a buffer that notes when it is written."""

    def event(self, enable_timing):
        assert enable_timing
        return Event(self)

    def fill_(self, value):
        self.append("get ahead")

    def zero_(self):
        self.append("flush")


class Event:
    def __init__(self, log):
        self.log, self.at = log, None

    def record(self):
        self.at = len(self.log)
        self.log.append("event")

    def elapsed_time(self, other):
        return 0.001 * (other.at - self.at)


@pytest.fixture
def timer(monkeypatch):
    """A timer whose GPU is a log."""
    log, timer = Log(), CudaTimer.__new__(CudaTimer)
    timer.buffer = log
    monkeypatch.setattr(torch.cuda, "Event", log.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    return timer


def test_each_run_is_flushed_for_outside_of_its_events_and_nothing_waits_in_between(timer):
    times = timer._timed(lambda: timer.buffer.append("run"), 3, cold=True)
    queued = [entry for entry in timer.buffer if entry != "get ahead"]
    assert queued == ["flush", "event", "run", "event"] * 3 + ["wait"]
    assert times == pytest.approx([2.0, 2.0, 2.0])


def test_warming_up_ends_when_times_are_stable_or_time_is_over(timer, monkeypatch):
    batches, clock = iter([50.0, 40.0, 30.0, 30.1, 10.0]), iter(range(100))
    monkeypatch.setattr(timer, "_timed", lambda call, runs, cold: [next(batches)] * 3)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: 0.01 * next(clock))
    assert timer._warm(None, seconds=10.0) == 30.1
    batches = iter([50.0, 40.0, 30.0, 20.0, 10.0])
    assert timer._warm(None, seconds=0.025) == 30.0


def test_without_a_gpu_the_timer_says_so_and_importing_it_asks_for_none():
    code = """
import torch
def asked(*args): raise SystemExit("asked for a GPU at import")
torch.cuda.get_device_properties = torch.cuda.is_available = torch.cuda.init = torch.cuda._lazy_init = asked
import tkv.tune.timing
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""
    if not torch.cuda.is_available():
        with pytest.raises(DeviceError, match="torch sees no GPU"):
            CudaTimer()


@pytest.mark.gpu
def test_a_gpu_takes_longer_for_more_work():
    timer = CudaTimer()
    small, large = (torch.empty(size << 20, dtype=torch.uint8, device="cuda") for size in (16, 256))
    quick, slow = (Times.of(timer.measure(timer.captured(lambda x=x: x.add_(1)), quick=True)) for x in (small, large))
    assert 2 * quick.p50 < slow.p50 and 3 <= quick.runs <= QUICK_RUNS
