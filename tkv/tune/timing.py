"""Microseconds of GPU work: cold caches, warm clocks, and quantiles instead of one number.

Between two runs a buffer larger than all caches of the part is written, so that each run reads its keys from memory, as a decoding step
of an engine does. A call is replayed as a CUDA graph where it can be captured: the host's time stays out of the measurement.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from tkv.errors import ShapeError
from tkv.tune.arch import part_of_device

if TYPE_CHECKING:
    import torch

    from tkv.tune.arch import Part

# Runs of a first look and of a careful one; long ones are cut by the time that they may take.
QUICK_RUNS, QUICK_SECONDS = 12, 0.15
FULL_RUNS, FULL_SECONDS = 40, 0.5
# Clocks rise within this time of load.
WARM_SECONDS = 0.2
STABLE = 0.02


class Timer(Protocol):
    """What the tuner needs of a clock."""

    def captured(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """The same work as `call`, with as little of the host's time as can be."""
        ...

    def measure(self, call: Callable[[], Any], quick: bool = False) -> list[float]:
        """Microseconds of each of several runs of `call`; fewer runs if `quick`."""
        ...


@dataclass(frozen=True)
class Times:
    """Quantiles of measured times, in microseconds.

    Attributes:
        p20, p50, p80: quantiles, interpolated between runs.
        runs: how many there were.

    Example:
        >>> Times.of([4.0, 1.0, 2.0, 3.0, 5.0])
        Times(p20=1.8, p50=3.0, p80=4.2, runs=5)
    """

    p20: float
    p50: float
    p80: float
    runs: int

    @classmethod
    def of(cls, times: Sequence[float]) -> Times:
        """The quantiles of some times.

        Raises:
            ShapeError: there are none.
        """
        if not times:
            raise ShapeError("times: expected at least one run, got none")
        return cls(quantile(times, 0.2), quantile(times, 0.5), quantile(times, 0.8), len(times))


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile, q from 0 to 1, linear between neighbours.

    Example:
        >>> quantile([10.0, 30.0, 20.0], 0.75)
        25.0
    """
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return round(ordered[low] + (at - low) * (ordered[high] - ordered[low]), 6)


def flush_bytes(part: Part) -> int:
    """Bytes to write so that nothing of a run is left in any cache: twice L2 and L3, at least 64 MiB.

    Example:
        >>> from tkv.tune.arch import parts
        >>> {part.name: flush_bytes(part) >> 20 for part in parts() if part.name in ("H100 SXM", "MI300X", "A10G")}
        {'A10G': 64, 'H100 SXM': 100, 'MI300X': 576}
    """
    return max(int(2 * (part.l2_mb + (part.l3_mb or 0))), 64) << 20


def is_stable(last: float, now: float) -> bool:
    """Whether two batches of runs took the same time, within 2 %.

    Example:
        >>> is_stable(100.0, 101.0), is_stable(100.0, 90.0)
        (True, False)
    """
    return abs(now - last) <= STABLE * min(last, now)


def runs_within(one_run_us: float, runs: int, seconds: float) -> int:
    """How many runs, at least 3 and at most `runs`, take no longer than `seconds`.

    Example:
        >>> runs_within(100.0, 40, 0.5), runs_within(50_000.0, 40, 0.5), runs_within(10**6, 40, 0.5)
        (40, 10, 3)
    """
    return max(3, min(runs, int(seconds * 1e6 / max(one_run_us, 1e-3))))


class CudaTimer:
    """Times a call on a GPU: warm clocks, a cold cache before each run, events around it.

    Args:
        device: the GPU; the current one if None.

    Raises:
        DeviceError: there is no such GPU.

    The time of an empty graph, a few microseconds, is part of each result. All runs are queued before the first is waited for, so the
    host's own time hides behind the writing of the buffer.
    """

    def __init__(self, device: int | str | torch.device | None = None) -> None:
        import torch

        part = part_of_device(device)
        index = device if isinstance(device, int) else torch.cuda.current_device() if device is None else torch.device(device).index or 0
        self.device = torch.device("cuda", index)
        self.buffer = torch.empty(flush_bytes(part) // 4, dtype=torch.int32, device=self.device)

    def captured(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """A replay of `call` as a CUDA graph, or `call` itself where it cannot be captured. It is called once before."""
        import torch

        with torch.cuda.device(self.device):
            call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    call()
            except RuntimeError:
                torch.cuda.synchronize()
                return call
        return graph.replay

    def measure(self, call: Callable[[], Any], quick: bool = False) -> list[float]:
        """Microseconds of each run of `call`.

        Args:
            call: puts work on the current stream, without waiting for it; best what `captured` gives.
            quick: fewer runs, and only a short warming up.

        Returns:
            One time a run: 12 or 40 of them, fewer where they would take more than 0.15 or 0.5 seconds.
        """
        import torch

        with torch.cuda.device(self.device):
            one = self._warm(call, WARM_SECONDS / 10 if quick else WARM_SECONDS)
            runs, seconds = (QUICK_RUNS, QUICK_SECONDS) if quick else (FULL_RUNS, FULL_SECONDS)
            return self._timed(call, runs_within(one, runs, seconds), cold=True)

    def _warm(self, call: Callable[[], Any], seconds: float) -> float:
        """Work until times are stable, at most so long; gives the time of a run with a warm cache."""
        end = time.perf_counter() + seconds
        last, now = math.inf, min(self._timed(call, 3, cold=False))
        while time.perf_counter() < end and not is_stable(last, now):
            last, now = now, quantile(self._timed(call, runs_within(now, 16, seconds / 8), cold=False), 0.5)
        return now

    def _timed(self, call: Callable[[], Any], runs: int, cold: bool) -> list[float]:
        import torch

        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
        for _ in range(4):
            # The host gets ahead of the GPU here and stays there.
            self.buffer.fill_(1)
        for start, end in events:
            if cold:
                self.buffer.zero_()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in events]
