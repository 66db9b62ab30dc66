"""All constraints of a config, stated once: those known before compiling, and with a report those known after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tkv.tune.arch import Arch
from tkv.tune.arch import arch as arch_facts
from tkv.tune.configs import AttentionConfig

if TYPE_CHECKING:
    from tkv.tune.compile import Report

MAX_THREADS = 1024
# 32-bit registers that one thread can name; on gfx9 accumulation registers included.
THREAD_REGISTERS = {"cuda": 255, "hip": 512}
# Registers are given to a warp, on AMD to a lane of a wave, in multiples of so many.
WARP_GRANULE, LANE_GRANULE = 256, 8
SHARED_GRANULE = 128
# Accumulators of these lie in tensor memory where a tile has rows enough.
TENSOR_MEMORY, TENSOR_MEMORY_ROWS = ("sm100", "sm103"), 64


def problems_of(
    config: AttentionConfig,
    arch: str,
    head_dim: int,
    compute_bits: int,
    *,
    v_head_dim: int | None = None,
    bits: int | None = None,
    shared: bool = False,
    report: Report | None = None,
) -> list[str]:
    """Why a config cannot run, or must not, on an architecture.

    Before compiling: threads and warps of a program; registers that `num_warps` x `max_registers` ask for; the accumulator and the scores
    of a tile, ``block_m * (v_head_dim + block_n)`` float32 numbers over the program's threads, in registers; `least_in_flight` tiles, of
    ``block_n * (head_dim + v_head_dim) * bits / 8`` bytes each, in shared memory. Both sizes are less than what a compiled kernel takes: a
    config without problems may still have some with its report.

    Args:
        config: what is asked about.
        arch: a name of ``tkv.tune.arch.ARCHS``.
        head_dim: of K.
        compute_bits: of the dots' operands, 16 or 32.
        v_head_dim: of V; head_dim if None.
        bits: of a stored number; compute_bits if None.
        shared: V is a view of K, and loaded with it.
        report: of this config, compiled; adds failure to compile, shared memory, spills, registers of all warps.

    Returns:
        One sentence a problem; empty where there is none.

    Raises:
        UnsupportedError: no such architecture.

    Example:
        >>> problems_of(AttentionConfig(16, 128, 4, 2), "sm90", head_dim=128, compute_bits=16)
        []
        >>> problems_of(AttentionConfig(16, 512, 4, 4), "sm86", head_dim=128, compute_bits=16)
        ['needs at least 262144 bytes of shared memory for tiles in flight, sm86 has 101376']
    """
    facts = arch_facts(arch)
    v_dim, stored = v_head_dim or head_dim, bits or compute_bits
    threads = config.num_warps * facts.warp_size
    problems = []
    if threads > MAX_THREADS:
        problems.append(f"num_warps: {config.num_warps} of {facts.warp_size} threads are more than {MAX_THREADS} of a program")
    if facts.warps_per_sm is not None and config.num_warps > facts.warps_per_sm:
        problems.append(f"num_warps: {config.num_warps} warps, an SM of {arch} has {facts.warps_per_sm}")

    most = THREAD_REGISTERS[facts.backend]
    if config.max_registers is not None:
        if facts.backend != "cuda":
            problems.append(f"max_registers: only NVIDIA's compiler takes it, not that of {arch}")
        else:
            most = config.max_registers
            problems += _register_problems(facts, most, config.num_warps)
    numbers = config.block_n if arch in TENSOR_MEMORY and config.block_m >= TENSOR_MEMORY_ROWS else v_dim + config.block_n
    held = config.block_m * numbers // threads
    if held > most:
        problems.append(f"needs at least {held} registers a thread for accumulator and scores, {arch} has {most}")

    row = head_dim if shared else head_dim + v_dim
    in_flight = least_in_flight(config.num_stages) * config.block_n * row * stored // 8
    if in_flight > facts.shared_per_block:
        problems.append(f"needs at least {in_flight} bytes of shared memory for tiles in flight, {arch} has {facts.shared_per_block}")
    return problems if report is None else problems + report_problems(report)


def least_in_flight(num_stages: int) -> int:
    """Tiles of keys and values that Triton's pipeline asks for ahead of the one that is computed with, at least.

    Page ids are loaded before the keys that they lead to, and each of the two loads takes half of the stages. Where ids are not loaded in
    the loop it is all of them.

    Example:
        >>> [least_in_flight(stages) for stages in (1, 2, 3, 4, 5)]
        [0, 1, 1, 1, 2]
    """
    return 0 if num_stages == 1 else max(1, (num_stages - 1) // 2)


def report_problems(report: Report) -> list[str]:
    """The part of `problems_of` that is known after compiling; of a kernel without a config too.

    Example:
        >>> from tkv.tune.compile import Case, Report
        >>> report_problems(Report(Case("decode"), "sm90", "3.7.1", registers=255, spills=8, shared=300000, num_warps=4))
        ['needs 300000 bytes of shared memory, sm90 has 232448', 'spills 8 bytes a thread']
    """
    if report.error:
        return [f"does not compile: {report.error}"]
    facts = arch_facts(report.arch)
    problems = []
    if report.shared > facts.shared_per_block:
        problems.append(f"needs {report.shared} bytes of shared memory, {report.arch} has {facts.shared_per_block}")
    if report.spills:
        problems.append(f"spills {report.spills} {'bytes a thread' if facts.backend == 'cuda' else 'registers'}")
    return problems + _register_problems(facts, report.registers, report.num_warps)


def _register_problems(facts: Arch, registers: int, num_warps: int) -> list[str]:
    """A program's registers, against those of an SM."""
    if facts.registers_per_sm is None:
        return []
    needed = num_warps * registers_of_warp(facts, registers)
    if needed <= facts.registers_per_sm:
        return []
    return [f"needs {needed} registers ({num_warps} warps of {registers} a thread), an SM of {facts.name} has {facts.registers_per_sm}"]


def registers_of_warp(facts: Arch, registers: int) -> int:
    """What a warp takes of an SM's registers, with so many a thread.

    Example:
        >>> registers_of_warp(arch_facts("sm90"), 65), registers_of_warp(arch_facts("gfx942"), 65)
        (2304, 4608)
    """
    if facts.backend == "cuda":
        return -(-registers * facts.warp_size // WARP_GRANULE) * WARP_GRANULE
    return -(-registers // LANE_GRANULE) * LANE_GRANULE * facts.warp_size


def ctas_per_sm(facts: Arch, registers: int, shared: int, num_warps: int) -> int | None:
    """Programs that an SM holds at a time: by registers, shared memory, warps and the most that it may hold; None where one is unknown.

    Registers are shared out by the four parts of an SM, each of which runs every fourth warp of a program.

    Args:
        facts: of the architecture.
        registers: of a thread.
        shared: bytes of shared memory of a program.
        num_warps: of a program.

    Example:
        >>> ctas_per_sm(arch_facts("sm90"), registers=168, shared=65536, num_warps=4)
        3
        >>> ctas_per_sm(arch_facts("gfx942"), registers=128, shared=16384, num_warps=4)
        4
    """
    if facts.registers_per_sm is None or facts.warps_per_sm is None:
        return None
    warps_of_part = facts.registers_per_sm // 4 // max(registers_of_warp(facts, registers), 1)
    if facts.backend == "hip":
        warps_of_part = min(warps_of_part, facts.warps_per_sm // 4)
    by_registers = 4 * warps_of_part // num_warps
    taken = -(-shared // SHARED_GRANULE) * SHARED_GRANULE + facts.shared_reserved
    by_shared = facts.shared_per_sm // taken if taken else by_registers
    limits = [by_registers, by_shared, facts.warps_per_sm // num_warps]
    return min(limits if facts.ctas_per_sm is None else [*limits, facts.ctas_per_sm])
