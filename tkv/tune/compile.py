"""Compile the very launches that the ops make, for any architecture, on a machine without a GPU, and read what came out.

A launch is compiled with the types, alignments and constants that Triton would see at run time; see `tkv.tune.cases`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from tkv.errors import UnsupportedError
from tkv.kernels.args import Attend
from tkv.ops.launch import Launch
from tkv.tune import machine_code
from tkv.tune.arch import arch as arch_facts
from tkv.tune.cases import ATTENTION, OPS, Case, config_override, launch_of
from tkv.tune.configs import AttentionConfig

if TYPE_CHECKING:
    from tkv.tune.store import Store

__all__ = ["ATTENTION", "OPS", "Case", "Report", "compile_all", "compile_launch", "launch_of", "report"]

DIED = "the compiler's process died"
Job: TypeAlias = "tuple[Case, str] | tuple[Case, str, AttentionConfig | None]"


@dataclass(frozen=True)
class Report:
    """What compiling a case for an architecture gave.

    Attributes:
        case, arch, triton: what was compiled, for what, by which Triton.
        registers, spills: a thread's, see :class:`tkv.tune.machine_code.Usage`.
        shared: bytes of shared memory of a program.
        config: of an attention function's kernel, as it was launched; None for other kernels.
        num_warps, num_stages: of the launch.
        loop: instructions of the main loop, by name, a warp's for one tile of keys; empty without matrix instructions.
        loop_shared_bytes, loop_global_bytes: what they move for a warp from and to shared and global memory.
        code: the names of all instructions of the kernel, in their order.
        tf32: the code multiplies in TF32.
        error: the compiler's message if it failed.
    """

    case: Case
    arch: str
    triton: str
    registers: int = 0
    spills: int = 0
    shared: int = 0
    config: AttentionConfig | None = None
    num_warps: int = 0
    num_stages: int = 0
    loop: dict[str, int] | None = None
    loop_shared_bytes: int = 0
    loop_global_bytes: int = 0
    code: tuple[str, ...] = ()
    tf32: bool = False
    error: str = ""

    @property
    def fits(self) -> bool:
        """It compiled, and its shared memory is within the architecture's limit."""
        return not self.error and self.shared <= arch_facts(self.arch).shared_per_block

    @property
    def loop_matrix(self) -> int:
        """Matrix instructions in the main loop."""
        return self.classes["matrix"]

    @property
    def classes(self) -> Counter[str]:
        """Instructions of the main loop, by `tkv.tune.machine_code.class_of`."""
        found: Counter[str] = Counter()
        for name, count in (self.loop or {}).items():
            found[machine_code.class_of(name)] += count
        return found


def compile_launch(launch: Launch, arch: str) -> Any:
    """Compile a launch for an architecture with Triton's own compiler.

    Args:
        launch: from `launch_of`, or from an op's plan.
        arch: a name of ``tkv.tune.arch.ARCHS``.

    Returns:
        Triton's compiled kernel, not loaded.

    Raises:
        UnsupportedError: the kernels were imported under the interpreter, which has no compiler; use `compile_all`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if type(launch.kernel).__name__ == "InterpretedFunction":
        raise UnsupportedError("the interpreter is on (TRITON_INTERPRET=1) and cannot compile; compile_all does it in other processes")
    facts = arch_facts(arch)
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, (param, value) in enumerate(zip(launch.kernel.params, launch.args, strict=True)):
        if param.is_constexpr:
            signature[param.name], constants[(i,)] = "constexpr", value
        else:
            signature[param.name] = _type_of(value, (i,), constants, attributes, not param.do_not_specialize)
    source = ASTSource(fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(
        source,
        target=GPUTarget(facts.backend, facts.triton_arch, facts.warp_size),
        options=launch.options(facts.backend),
    )


def _type_of(value: Any, path: tuple[int, ...], constants: dict[Any, Any], attributes: dict[Any, Any], specialize: bool) -> Any:
    """The type that Triton gives an argument at a launch; it notes constants and alignments on the way."""
    if isinstance(value, tuple):
        types = [_type_of(item, (*path, i), constants, attributes, specialize) for i, item in enumerate(value)]
        return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
    if value is None or (specialize and isinstance(value, int) and value == 1):
        constants[path] = value
        return "constexpr"
    if isinstance(value, torch.Tensor):
        attributes[path] = [["tt.divisibility", 16]]
        return "*" + _TRITON_TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    if specialize and value % 16 == 0:
        attributes[path] = [["tt.divisibility", 16]]
    return "i32" if -(2**31) <= value < 2**31 else "i64"


_TRITON_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


def report(case: Case, arch: str, config: AttentionConfig | None = None) -> Report:
    """Compile a case for an architecture and read what came out.

    Args:
        case: the op and its shape.
        arch: a name of ``tkv.tune.arch.ARCHS``.
        config: of the case's kernel; the one that the op would take if None.

    Returns:
        A :class:`Report`; a failure of the compiler is in its ``error``.

    Raises:
        UnsupportedError: no such op or architecture, a config for a kernel without tunables, or the interpreter is on.
    """
    import triton

    launch = launch_of(case, arch, **config_override(case, config))
    known = partial(
        Report, case, arch, triton.__version__, config=config_of(launch, config), num_warps=launch.num_warps, num_stages=launch.num_stages
    )
    try:
        kernel = compile_launch(launch, arch)
    except (RuntimeError, triton.TritonError) as error:
        return known(error=_reason(error))
    facts = arch_facts(arch)
    if facts.backend == "cuda":
        usage = machine_code.nvidia_usage(kernel.asm["cubin"])
        instructions = machine_code.nvidia_instructions(kernel.asm["cubin"])
        tf32 = ".tf32" in kernel.asm["ptx"]
    else:
        usage = machine_code.amd_usage(kernel.asm["amdgcn"])
        instructions = machine_code.parse_gcn(kernel.asm["amdgcn"])
        tf32 = "xf32" in kernel.asm["amdgcn"]
    loop = machine_code.main_loop(instructions)
    return known(
        registers=usage.registers,
        spills=usage.spills,
        shared=kernel.metadata.shared,
        loop=dict(machine_code.mix(loop)),
        loop_shared_bytes=facts.warp_size * machine_code.bytes_moved(loop, "shared"),
        loop_global_bytes=facts.warp_size * machine_code.bytes_moved(loop, "global"),
        code=tuple(sys.intern(instruction.name) for instruction in instructions),
        tf32=tf32,
    )


def config_of(launch: Launch, wanted: AttentionConfig | None = None) -> AttentionConfig | None:
    """The config that an attention function's launch came from; None of other launches.

    Args:
        launch: from `launch_of`, or from an op's plan.
        wanted: the config it was made with, whose ``split_len`` a launch does not show.

    Example:
        >>> config_of(launch_of(Case("decode", head_dim=64), "sm90")).block_n
        128
    """
    attend = next((arg for arg in launch.args if isinstance(arg, Attend)), None)
    if attend is None:
        return None
    block_m = next(value for name, value in zip(launch.kernel.arg_names, launch.args, strict=True) if name == "BLOCK_M")
    split_len = None if wanted is None else wanted.split_len
    return AttentionConfig(block_m, attend.BLOCK_N, launch.num_warps, launch.num_stages, split_len, launch.max_registers)


def _reason(error: BaseException) -> str:
    """What the compiler complains about: the first of a chain of errors, each of which quotes a larger piece of source."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"[-500:]


def compile_all(
    jobs: Iterable[Job], workers: int | None = None, progress: Callable[[Report], None] | None = None, store: Store | None = None
) -> Iterator[Report]:
    """Reports of many cases, compiled in worker processes with the interpreter off.

    Args:
        jobs: a case and an architecture each, and where wanted a config of the case's kernel instead of the op's own.
        workers: processes; one a core if None.
        progress: called with every report as it comes.
        store: where reports are looked up first and kept, so that an interrupted run goes on where it was.

    Yields:
        Reports in the order of the jobs. A job that the compiler's process does not survive gives a report with an ``error``, which is
        not kept: the reason may be outside of the process.

    Raises:
        UnsupportedError: as `report`.
    """
    compiler = _Compiler(workers or os.cpu_count() or 1, store)
    results: dict[str, Report | Future[Report]] = {}
    started: list[tuple[Job, str]] = []
    try:
        for job in jobs:
            key = str(len(started)) if store is None else store.key(*job)
            started.append((job, key))
            if key not in results:
                results[key] = (None if store is None else store.get(key)) or compiler.submit(job, key)
        for i, (job, key) in enumerate(started):
            result = results[key]
            try:
                done = result if isinstance(result, Report) else result.result()
            except BrokenProcessPool:
                # The fault may be another job's that ran beside it: alone it shows, and the others begin anew.
                done = compiler.alone(job, key)
                for later, of_later in started[i + 1 :]:
                    if isinstance(broken := results[of_later], Future) and broken.done() and broken.exception():
                        results[of_later] = compiler.submit(later, of_later)
            results[key] = done
            if progress is not None:
                progress(done)
            yield done
    finally:
        compiler.close()


class _Compiler:
    """Processes that compile jobs, started when the first job comes."""

    def __init__(self, workers: int, store: Store | None) -> None:
        self.workers, self.store = workers, store
        self.pool: ProcessPoolExecutor | None = None

    def submit(self, job: Job, key: str) -> Future[Report]:
        """Begin a job. Its report is kept at once, not in the order of the jobs, so that an interrupt loses nothing that is done."""
        if self.pool is None:
            self.pool = _pool(self.workers)
        try:
            future = self.pool.submit(report, *job)
        except BrokenProcessPool as error:
            future = Future()
            future.set_exception(error)
        future.add_done_callback(partial(self._keep, key))
        return future

    def alone(self, job: Job, key: str) -> Report:
        """A job in a process of its own, in place of those that broke."""
        self.close()
        with _pool(1) as pool:
            future = pool.submit(report, *job)
            try:
                done = future.result()
            except BrokenProcessPool:
                import triton

                return Report(job[0], job[1], triton.__version__, error=DIED)
        self._keep(key, future)
        return done

    def close(self) -> None:
        """End the processes; jobs that have not begun never will."""
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)
        self.pool = None

    def _keep(self, key: str, future: Future[Report]) -> None:
        if self.store is not None and not future.cancelled() and future.exception() is None:
            self.store.put(key, future.result())


def _pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_compiler_process)


def _compiler_process() -> None:
    # Ctrl-C is the parent's to act on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
