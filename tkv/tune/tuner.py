"""Measure configs on a GPU and keep those that win: a first look at all, then the best against the default in turns.

A config wins if its output is the default's within what numbers allow, and if it is faster than the default by more than 3 % and by more
than twice the noise; otherwise the default stays. What fails or hangs is noted on a blocklist and not tried again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tkv.tune.blocklist import Blocklist
from tkv.tune.configs import AttentionConfig
from tkv.tune.keys import OP_KINDS, Key, kernel_hash, key_of_shape
from tkv.tune.model import Shape
from tkv.tune.results import Result, load_results, save_results, tables_of
from tkv.tune.runner import Failed, GpuRunner, Runner, WatchedRunner, describe_run
from tkv.tune.tables import Compiled, Run, dump, table_path
from tkv.tune.timing import Times, quantile

MIN_GAIN, NOISES = 0.03, 2.0
# A config that looks slower than the default by this factor is not timed again.
HOPELESS = 1.05
# Configs that are compiled at a time, those that are timed again, and how often; with fewer rounds nothing can win.
BATCH, FINALISTS, ROUNDS, MIN_ROUNDS = 16, 4, 7, 4
# Seconds after which a call counts as hanging, and the first guess of what a config takes to compile.
OPEN_LIMIT, PREPARE_LIMIT, COMPILED_LIMIT, STEP_LIMIT, COMPILE_SECONDS = 180.0, 180.0, 20.0, 60.0, 1.0
# A shape gets at least so many seconds: many shapes in a small budget are measured well one after the other, not badly all at once.
MIN_SECONDS = 5.0
RESULTS, BLOCKLIST = "results.json", "blocklist.json"

Candidates = Callable[[str, Key, str], Iterable[AttentionConfig]]


def noise_of(rounds: Sequence[float]) -> float:
    """Spread of repeated times of one launch, as a part of their median: from the 20 % to the 80 % quantile.

    Example:
        >>> noise_of([100.0, 101.0, 99.0, 100.0, 100.0, 150.0]) < 0.02
        True
    """
    return (quantile(rounds, 0.8) - quantile(rounds, 0.2)) / median(rounds)


def winner(default: Sequence[float], others: dict[AttentionConfig, list[float]]) -> AttentionConfig | None:
    """The fastest config that beats the default by more than 3 % and by more than twice the noise of both, or None.

    Args:
        default: medians of the default's rounds, in microseconds.
        others: the same of each candidate, of the same rounds.

    Returns:
        The winner; None where the default stays.

    Example:
        >>> fast, slow = AttentionConfig(16, 64, 4, 3), AttentionConfig(16, 32, 4, 3)
        >>> winner([100.0] * 7, {slow: [98.0] * 7, fast: [90.0] * 7}) == fast
        True
    """
    for config in sorted(others, key=lambda config: median(others[config])):
        gain = 1 - median(others[config]) / median(default)
        if gain > MIN_GAIN and gain > NOISES * max(noise_of(default), noise_of(others[config])):
            return config
    return None


class _OutOfTime(Exception):
    """The budget ended while a config ran."""


@dataclass
class Tuner:
    """Measures shapes one after the other, within a time budget, and writes what it has after each.

    Args:
        runner: runs configs; `tkv.tune.runner.WatchedRunner` on a GPU.
        candidates: configs to try for (op, key, architecture), promising ones first; the default may be among them.
        arch: the architecture.
        run: the header of this run.
        out: a folder: ``results.json``, ``blocklist.json``, and tables as ``<arch>/<op>.json``, so that it can be `TKV_CONFIG_DIR`.
        clock: seconds.
        note: told in a line what went wrong.

    Attributes:
        results: of this run, and with `resume` of those before.
        failures: shapes that could not be measured, with reasons.
    """

    runner: Runner
    candidates: Candidates
    arch: str
    run: Run
    out: Path
    clock: Callable[[], float] = time.monotonic
    note: Callable[[str], None] = lambda text: None
    results: list[Result] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    failures: list[tuple[Shape, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hashes = {op: kernel_hash(op) for op in OP_KINDS}
        self.blocklist = Blocklist(self.out / BLOCKLIST, self.run.triton, self.hashes)
        self.prepare_s, self.open_s = COMPILE_SECONDS, 0.0

    def tune(
        self, shapes: Iterable[Shape], budget_s: float, resume: bool = False, progress: Callable[[Shape, Result | None], None] | None = None
    ) -> list[Result]:
        """Measure shapes until they or the budget end; what is measured is on disk even if this is interrupted.

        Args:
            shapes: in the order of their importance.
            budget_s: seconds for all of them. Time that one leaves over goes to those behind it.
            resume: skip shapes that ``results.json`` has from this GPU, these versions and this kernel, and keep the others' results.
            progress: told each shape and its result: None if it failed, or there was no time for it.

        Returns:
            Results of this run.

        Raises:
            TableError: ``results.json`` is not one, in one line.
            Failed: the runner does not come up at all.
        """
        end = self.clock() + budget_s
        if resume and (self.out / RESULTS).exists():
            self.results, self.runs = load_results(self.out / RESULTS)
        done = {result.shape for result in self.results if self._is_current(result)}
        waiting = deque(shape for shape in dict.fromkeys(shapes) if shape not in done)
        first, self.runs = len(self.results), [*self.runs, self.run]
        try:
            while waiting:
                shape, left = waiting.popleft(), end - self.clock()
                result = None
                if left > self.open_s:
                    result = self._measured(shape, end, len(waiting))
                if result is not None:
                    self.results.append(result)
                    self._write(first)
                if progress is not None:
                    progress(shape, result)
        finally:
            self.runner.close()
        return self.results[first:]

    def _is_current(self, result: Result) -> bool:
        run = self.runs[result.run]
        same = all(getattr(run, name) == getattr(self.run, name) for name in ("device", "sms", "triton", "torch"))
        return same and result.kernel_hash == self.hashes[result.shape.op]

    def _measured(self, shape: Shape, end: float, waiting: int) -> Result | None:
        try:
            return _Turn(self, shape, end).result(waiting)
        except Failed as failure:
            if failure.kind == "start":
                raise
            reason = str(failure)
        except _OutOfTime:
            reason = "the budget ended"
        self.failures.append((shape, reason))
        self.note(f"{shape.op}, {key_of_shape(shape).name}, {shape.num_seqs} x {shape.kv_len} keys: {reason}")
        return None

    def _write(self, first: int) -> None:
        noise = median(result.noise for result in self.results[first:])
        self.runs[-1] = replace(self.run, noise=round(noise, 2))
        save_results(self.out / RESULTS, self.arch, self.results, self.runs)
        for table in tables_of(self.arch, [r for r in self.results if r.kernel_hash == self.hashes[r.shape.op]], self.runs):
            dump(table, table_path(self.out, self.arch, table.op))


class _Turn:
    """One shape's turn of a tuner, which has to end at `end`."""

    def __init__(self, tuner: Tuner, shape: Shape, end: float) -> None:
        self.tuner, self.shape, self.end = tuner, shape, end
        self.key, self.clock, self.runner = key_of_shape(shape), tuner.clock, tuner.runner
        # The slowest of each so far: what the next one is expected to take.
        self.time_s = self.step_s = 0.0
        self.tried = self.failed = 0
        self.is_parallel, self.is_open = True, False

    def result(self, waiting_shapes: int) -> Result:
        """Measure the shape, in its share of the time."""
        default = self._open()
        now = self.clock()
        share = (self.end - now - waiting_shapes * self.tuner.open_s) / (waiting_shapes + 1)
        self.end = min(self.end, now + max(share, MIN_SECONDS))
        looks = {default: self._time(default)}
        self.step_s = max(self.step_s, 2 * self.time_s)
        found = self.tuner.candidates(self.shape.op, self.key, self.tuner.arch)
        waiting = deque(config for config in dict.fromkeys(found) if config != default and not self._is_blocked(config))
        while waiting:
            count = int(self._left() // (self.step_s + self.tuner.prepare_s))
            batch = [waiting.popleft() for _ in range(min(count, BATCH, len(waiting)))]
            if not batch or not self._reopened():
                waiting.extendleft(reversed(batch))
                break
            self._prepare(batch)
            while batch and self._left() >= self.step_s and self._reopened():
                config = batch.pop(0)
                times = self._look(config)
                if times is not None:
                    looks[config] = times
            if batch:
                waiting.extendleft(reversed(batch))
                break
        rounds = self._rounds(default, looks)
        best = winner(rounds[default], {c: rounds[c] for c in rounds if c != default}) if len(rounds[default]) >= MIN_ROUNDS else None
        return Result(
            self.shape, default, Times.of(rounds[default]), best, None if best is None else Times.of(rounds[best]),
            None if best is None else self._compiled(best), round(100 * noise_of(rounds[default]), 2), self.tried, self.failed,
            len(waiting), tuple((config, median(of)) for config, of in rounds.items() if config != default), len(self.tuner.runs) - 1,
            self.tuner.hashes[self.shape.op],
        )  # fmt: skip

    def _left(self) -> float:
        """Seconds for candidates: those of the rounds are kept back."""
        return self.end - self.clock() - ROUNDS * (FINALISTS + 1) * self.time_s

    @property
    def _step_limit(self) -> float:
        """Seconds after which a run counts as hanging; one that compiles first may take longer."""
        return COMPILED_LIMIT if self.is_parallel else STEP_LIMIT

    def _limit(self, limit: float) -> float:
        return max(0.001, min(limit, self.end - self.clock()))

    def _call(self, call: Callable[..., Any], *args: Any, limit: float) -> tuple[Any, float]:
        """A runner's call, and the seconds that it took."""
        start, within = self.clock(), self._limit(limit)
        try:
            return call(*args, within), self.clock() - start
        except Failed as failure:
            self.is_open = self.is_open and not failure.is_fatal
            if failure.kind == "hang" and within < limit:
                raise _OutOfTime from failure
            raise

    def _open(self) -> AttentionConfig:
        default, self.tuner.open_s = self._call(self.runner.open, self.shape, limit=OPEN_LIMIT)
        self.is_open = True
        return default

    def _reopened(self) -> bool:
        """The runner has the shape, again if it was lost; False if there is no time for that."""
        if not self.is_open and self.end - self.clock() > self.tuner.open_s:
            self._open()
        return self.is_open

    def _time(self, config: AttentionConfig) -> float:
        times, seconds = self._call(self.runner.time, config, limit=self._step_limit)
        self.time_s = max(self.time_s, seconds)
        return median(times)

    def _prepare(self, batch: list[AttentionConfig]) -> None:
        if not self.is_parallel:
            return
        start = self.clock()
        try:
            self._call(self.runner.prepare, batch, limit=PREPARE_LIMIT)
        except (Failed, _OutOfTime) as failure:
            # Which of them it was shows when they are compiled one by one.
            self.is_parallel = False
            self.tuner.note(f"{self.key.name}: compiling in parallel failed, {failure}")
        self.tuner.prepare_s = (self.clock() - start) / len(batch)

    def _look(self, config: AttentionConfig) -> float | None:
        """The time of a candidate whose output is right; None if it failed."""
        start = self.clock()
        try:
            self._call(self.runner.check, config, limit=self._step_limit)
            found = self._time(config)
        except Failed as failure:
            self._block(config, failure)
            return None
        except _OutOfTime:
            return None
        self.tried += 1
        self.step_s = max(self.step_s, self.clock() - start)
        return found

    def _rounds(self, default: AttentionConfig, looks: dict[AttentionConfig, float]) -> dict[AttentionConfig, list[float]]:
        """Medians of the default and the best candidates, timed in turns; each round begins with another."""
        others = [config for config in looks if config != default and looks[config] < HOPELESS * looks[default]]
        others = sorted(others, key=lambda config: looks[config])[:FINALISTS]
        rounds: dict[AttentionConfig, list[float]] = {config: [] for config in (default, *others)}
        for turn in range(ROUNDS if others else MIN_ROUNDS):
            order = list(rounds)
            if not self._reopened() or self.end - self.clock() < len(order) * self.time_s:
                break
            first = turn % len(order)
            for config in order[first:] + order[:first]:
                try:
                    if self._reopened():
                        rounds[config].append(self._time(config))
                except (Failed, _OutOfTime) as failure:
                    if isinstance(failure, Failed) and config != default:
                        self._block(config, failure)
                        del rounds[config]
        # Only whole rounds compare under the same conditions.
        count = min(len(of) for of in rounds.values())
        return {config: of[:count] for config, of in rounds.items()} if count else {default: [looks[default]]}

    def _compiled(self, config: AttentionConfig) -> Compiled | None:
        # A moment that the budget always has: without it the winner could not be kept.
        try:
            return self.runner.compiled(config, COMPILED_LIMIT) if self.is_open else None
        except Failed:
            return None

    def _is_blocked(self, config: AttentionConfig) -> bool:
        return self.tuner.blocklist.reason(self.tuner.arch, self.shape.op, self.key, config) is not None

    def _block(self, config: AttentionConfig, failure: Failed) -> None:
        self.failed += 1
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.tuner.blocklist.add(self.tuner.arch, self.shape.op, self.key, config, failure.kind, failure.reason, date)
        self.tuner.note(f"{self.shape.op}, {self.key.name}: {config}: {failure}")


def tune(
    shapes: Iterable[Shape], out: Path, budget_s: float, *, resume: bool = False, device: str | None = None,
    candidates: Candidates | None = None, progress: Callable[[Shape, Result | None], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> Tuner:  # fmt: skip
    """Measure shapes on a GPU of this machine, in a process of its own; see `Tuner`.

    Args:
        shapes, out, budget_s, resume, progress, note: as there.
        device: ``"cuda:1"``; the current GPU if None.
        candidates: configs to try for (op, key, architecture); all of `tkv.tune.offline` if None.

    Returns:
        The tuner, with its results and failures.

    Raises:
        DeviceError: there is no such GPU.
        UnsupportedError: tkv has no kernels for it.
        TableError: a file in `out` is damaged.
        Failed: the measuring process does not come up.
    """
    from tkv.tune.arch import arch_of_device

    run, arch = describe_run(device), arch_of_device(device).name
    if candidates is None:
        from tkv.tune import offline

        candidates = partial(offline.candidates, wide=True)
    tuner = Tuner(WatchedRunner(partial(GpuRunner, device)), candidates, arch, run, out)
    tuner.note = note or tuner.note
    tuner.tune(shapes, budget_s, resume, progress)
    return tuner
