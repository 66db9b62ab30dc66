"""Runs configs of a shape: on the GPU, and in a process that can be ended when a config hangs it."""

from __future__ import annotations

import os
import platform
import re
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tkv.errors import DeviceError, TkvError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from tkv.tune.configs import AttentionConfig
    from tkv.tune.model import Shape
    from tkv.tune.problem import Problem
    from tkv.tune.tables import Compiled, Run
    from tkv.tune.timing import Timer

# Seconds that a process may take to start, and that are allowed on top of a call's own limit for its answer to arrive.
START_LIMIT = 180.0
# Of the free memory of the GPU, what a cache may take.
MEMORY_SHARE = 0.7
# Captured calls that are kept: each holds memory for its partial results.
MAX_REPLAYS = 6
METHOD = "CUDA graph between events, cold L2, warm clocks; median of interleaved rounds"


class Failed(Exception):
    """A config, or the default of a shape, that cannot be measured.

    Attributes:
        kind: one of ``tkv.tune.blocklist.KINDS``, or ``"start"``: not even the runner came up.
        reason: what happened.
        is_fatal: the runner lost its state; `Runner.open` brings it back.
    """

    def __init__(self, kind: str, reason: str, is_fatal: bool = False) -> None:
        super().__init__(kind, reason, is_fatal)
        self.kind, self.reason, self.is_fatal = kind, reason, is_fatal

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


class Runner(Protocol):
    """What the tuner needs: each call raises `Failed` if it cannot be done, and none takes much longer than its limit in seconds."""

    def open(self, shape: Shape, limit: float) -> AttentionConfig:
        """Make the tensors of a shape and run its default, whose output counts as right; gives the default."""
        ...

    def prepare(self, configs: Sequence[AttentionConfig], limit: float) -> None:
        """Compile configs in parallel; one that does not compile is left to `check`."""
        ...

    def check(self, config: AttentionConfig, limit: float) -> None:
        """Run a config; `Failed` with "wrong output" if its output is not the default's."""
        ...

    def time(self, config: AttentionConfig, limit: float) -> list[float]:
        """Microseconds of each of several runs."""
        ...

    def compiled(self, config: AttentionConfig, limit: float) -> Compiled | None:
        """What compiling a config gave, where that can be read."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...


class GpuRunner:
    """Runs configs in this process; limits are not kept.

    Args:
        device: the GPU; the current one if None.
        timer: a :class:`tkv.tune.timing.CudaTimer` if None.
        workers: threads that compile.
    """

    def __init__(self, device: str | None = None, timer: Timer | None = None, workers: int | None = None) -> None:
        import torch

        from tkv.tune.timing import CudaTimer

        self.timer = timer or CudaTimer(device)
        self.device = torch.device(device or "cuda")
        if self.device.index is not None:
            # Compiling asks for the current one.
            torch.cuda.set_device(self.device)
        self.workers = workers or os.cpu_count() or 1
        self.problem: Problem | None = None
        self.wanted: tuple[torch.Tensor, ...] = ()
        # Of the configs that were timed last, for capturing a call takes longer than timing it.
        self.replays: dict[AttentionConfig, Callable[[], Any]] = {}

    def open(self, shape: Shape, limit: float = 0.0) -> AttentionConfig:
        """See `Runner.open`; also fails where the cache would take too much of the GPU's memory."""
        import torch

        from tkv.tune.problem import build, cache_bytes

        self.close()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            free, needed = torch.cuda.mem_get_info(self.device)[0], cache_bytes(shape)
            if needed > MEMORY_SHARE * free:
                raise Failed("launch", f"its cache needs {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
        self.problem = _guarded(partial(build, shape, self.device))
        self.wanted = _guarded(partial(self.problem.run, self.problem.default, poison=True))
        self._wait()
        return self.problem.default

    def prepare(self, configs: Sequence[AttentionConfig], limit: float = 0.0) -> None:
        """See `Runner.prepare`."""
        from triton import AsyncCompileMode

        backend = self._backend()
        with ThreadPoolExecutor(self.workers) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for config in configs:
                try:
                    for launch in self._opened.launches(config)[0]:
                        launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options(backend))
                except Exception:
                    # `check` compiles it again and says what is wrong.
                    continue

    def check(self, config: AttentionConfig, limit: float = 0.0) -> None:
        """See `Runner.check`."""
        got = _guarded(partial(self._opened.run, config, poison=True))
        self._wait()
        wrong = self._opened.mismatch(got, self.wanted)
        if wrong is not None:
            raise Failed("wrong output", wrong)

    def time(self, config: AttentionConfig, limit: float = 0.0) -> list[float]:
        """See `Runner.time`."""
        replay = self.replays.pop(config, None) or _guarded(partial(self.timer.captured, partial(self._opened.run, config)))
        self.replays[config] = replay
        if len(self.replays) > MAX_REPLAYS:
            del self.replays[next(iter(self.replays))]
        return _guarded(partial(self.timer.measure, replay, quick=True))

    def compiled(self, config: AttentionConfig, limit: float = 0.0) -> Compiled | None:
        """See `Runner.compiled`."""
        from tkv.ops.launch import arch_name

        launch = self._opened.launches(config)[0][1 if self._opened.options.mask is not None else 0]
        kernel = launch.kernel.warmup(*launch.args, grid=launch.grid, **launch.options(self._backend()))
        return compiled_of(kernel, arch_name(self.device), config.num_warps)

    def close(self) -> None:
        """See `Runner.close`."""
        self.problem, self.wanted = None, ()
        self.replays.clear()

    @property
    def _opened(self) -> Problem:
        if self.problem is None:
            raise Failed("launch", "no shape is open; open comes first")
        return self.problem

    def _backend(self) -> str:
        import torch

        return "hip" if torch.version.hip else "cuda"

    def _wait(self) -> None:
        import torch

        if self.device.type == "cuda":
            _guarded(partial(torch.cuda.synchronize, self.device))


def _guarded(call: Callable[[], Any]) -> Any:
    """Call, with what can go wrong as `Failed`. After an error of the GPU itself its process can do nothing any more."""
    import torch
    from triton.errors import TritonError

    try:
        return call()
    except TkvError as error:
        raise Failed("launch", str(error)) from error
    except torch.OutOfMemoryError as error:
        raise Failed("launch", str(error)) from error
    except TritonError as error:
        raise Failed("compile", f"{type(error).__name__}: {error}") from error
    except RuntimeError as error:
        is_compiler = "PassManager" in str(error) or "ptxas" in str(error)
        raise Failed("compile" if is_compiler else "launch", str(error), is_fatal=not is_compiler) from error


def compiled_of(kernel: Any, arch: str, num_warps: int) -> Compiled:
    """What Triton's compiled kernel needs, from its machine code."""
    import triton

    from tkv.tune.arch import arch as arch_facts
    from tkv.tune.limits import ctas_per_sm
    from tkv.tune.machine_code import amd_usage, nvidia_usage
    from tkv.tune.tables import Compiled

    usage = nvidia_usage(kernel.asm["cubin"]) if "cubin" in kernel.asm else amd_usage(kernel.asm["amdgcn"])
    shared = kernel.metadata.shared
    ctas = ctas_per_sm(arch_facts(arch), usage.registers, shared, num_warps)
    return Compiled(triton.__version__, usage.registers, usage.spills, shared, ctas)


class WatchedRunner:
    """A runner in a process of its own. One that does not answer in time is killed, and the next `open` starts another.

    Args:
        factory: makes the runner there: a function that can be pickled, ``functools.partial(GpuRunner, device)``.
        start_limit: seconds until the runner has to be there.
        context: how the process starts; ``"fork"`` only where this one has not used a GPU.
    """

    def __init__(self, factory: Callable[[], Runner], start_limit: float = START_LIMIT, context: str = "spawn") -> None:
        self.factory, self.start_limit, self.context = factory, start_limit, context
        self.process: Any = None
        self.connection: Connection | None = None

    def open(self, shape: Shape, limit: float) -> AttentionConfig:
        """See `Runner.open`."""
        if self.process is None:
            self._start()
        return self._ask("open", shape, limit=limit)

    def prepare(self, configs: Sequence[AttentionConfig], limit: float) -> None:
        """See `Runner.prepare`."""
        self._ask("prepare", list(configs), limit=limit)

    def check(self, config: AttentionConfig, limit: float) -> None:
        """See `Runner.check`."""
        self._ask("check", config, limit=limit)

    def time(self, config: AttentionConfig, limit: float) -> list[float]:
        """See `Runner.time`."""
        return self._ask("time", config, limit=limit)

    def compiled(self, config: AttentionConfig, limit: float) -> Compiled | None:
        """See `Runner.compiled`."""
        return self._ask("compiled", config, limit=limit)

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
        if self.connection is not None:
            self.connection.close()
        self.process = self.connection = None

    def _start(self) -> None:
        context = get_context(self.context)
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.factory), daemon=True)  # type: ignore[attr-defined]
        self.process.start()
        theirs.close()
        self._answer(self.connection, self.start_limit, "start")

    def _ask(self, name: str, *args: Any, limit: float) -> Any:
        if self.connection is None:
            raise Failed("crash", "the runner was lost; open comes first", is_fatal=True)
        self.connection.send((name, args, limit))
        return self._answer(self.connection, limit, name)

    def _answer(self, connection: Connection, limit: float, name: str) -> Any:
        process = self.process
        try:
            if not connection.poll(limit):
                self.close()
                raise Failed("hang", f"{name}: no answer within {limit:.3g} s", is_fatal=True)
            answer, *rest = connection.recv()
        except (EOFError, OSError):
            process.join(5)
            code = process.exitcode
            self.close()
            raise Failed("crash", f"{name}: the process ended with {code}", is_fatal=True) from None
        if answer == "done":
            return rest[0]
        failure = Failed(*rest)
        if failure.is_fatal:
            self.close()
        raise failure


def _serve(connection: Connection, factory: Callable[[], Runner]) -> None:
    """Answer the calls of a `WatchedRunner` until it is gone. Ctrl-C is its business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        runner = factory()
    except Exception as error:
        connection.send(("failed", "start", f"{type(error).__name__}: {error}", True))
        return
    connection.send(("done", None))
    while True:
        try:
            name, args, limit = connection.recv()
        except EOFError:
            return
        try:
            answer: tuple[Any, ...] = ("done", getattr(runner, name)(*args, limit))
        except Failed as failure:
            answer = ("failed", failure.kind, failure.reason, failure.is_fatal)
        except Exception as error:
            answer = ("failed", "launch", f"{type(error).__name__}: {error}", True)
        connection.send(answer)


def describe_run(device: Any = None) -> Run:
    """The header of a run of measuring on a GPU, its noise yet 0.

    Raises:
        DeviceError: torch sees no GPU.
    """
    import torch
    import triton

    from tkv.tune.tables import Run

    if not torch.cuda.is_available():
        raise DeviceError("torch sees no GPU on this machine: there is nothing to measure on")
    properties = torch.cuda.get_device_properties(device)
    return Run(
        device=properties.name,
        sms=properties.multi_processor_count,
        driver=driver_version(),
        triton=triton.__version__,
        torch=torch.__version__,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        method=METHOD,
        noise=0.0,
    )


def driver_version() -> str | None:
    """The version of the GPU's driver, or None where it is not told."""
    for path, pattern in (("/proc/driver/nvidia/version", r"Kernel Module.*?\s(\d+\.[\d.]+)"), ("/sys/module/amdgpu/version", r"(\S+)")):
        try:
            match = re.search(pattern, Path(path).read_text(encoding="utf-8"))
        except OSError:
            continue
        if match:
            return match[1]
    return f"kernel {platform.release()}" if Path("/dev/kfd").exists() else None
