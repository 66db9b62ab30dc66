"""What a compiled attention kernel's main loop asks of an SM, and which unit it waits for."""

from __future__ import annotations

from dataclasses import dataclass

from tkv.errors import UnsupportedError
from tkv.formats import KVFormat, parse_pair
from tkv.tune.arch import Arch, Part, reference_part
from tkv.tune.arch import arch as arch_facts
from tkv.tune.compile import Case, Report
from tkv.tune.configs import AttentionConfig
from tkv.tune.limits import ctas_per_sm, least_in_flight

UNITS = ("memory", "issue slots", "tensor cores", "exp unit", "shared memory")
# Warps that keep one issue slot busy: each waits for what it issued a cycle or more before.
WARPS_PER_SLOT = {"cuda": 2, "hip": 8}
# On AMD instructions of these classes go another way than vector arithmetic, in the same cycle.
_OWN_PORT = ("matrix", "shared", "global", "control", "scalar")
# Matrix instructions that take an operand from shared memory, and how many warps share each.
_FROM_SHARED = ("HGMMA", "UTCHMMA")
# What instructions of a single warp reach of the matrix units of architectures that have larger ones.
SINGLE_WARP_SHARE = {"sm90": 0.5, "sm100": 0.5, "sm103": 0.5}


@dataclass(frozen=True)
class TileCost:
    """What one program's turn of the main loop, a tile of block_m rows and block_n keys, asks of its SM. None is unknown.

    Attributes:
        ctas_per_sm: programs that an SM holds.
        num_warps, issue_slots, full_warps: of a program; of the SM; the warps that fill its slots.
        issued: instructions that take an issue slot, of all warps.
        cycles: of "tensor cores", "exp unit" and "shared memory", those that are known.
        bytes: of keys and values, from DRAM.
        in_flight: tiles asked for ahead of the one that is computed with.
        latency: cycles from asking for a tile to having it.
    """

    ctas_per_sm: int | None
    num_warps: int
    issue_slots: int | None
    full_warps: int
    issued: int | None
    cycles: dict[str, float]
    bytes: float
    in_flight: int
    latency: int | None

    def busy(self, ctas: int) -> dict[str, float]:
        """Cycles a tile of each program, of the units of an SM that holds `ctas` programs, memory left out."""
        busy = {unit: ctas * cycles for unit, cycles in self.cycles.items()}
        if self.issued is not None and self.issue_slots is not None:
            share = min(1.0, ctas * self.num_warps / self.full_warps)
            busy["issue slots"] = ctas * self.issued / (self.issue_slots * share)
        return busy

    def waiting(self) -> float:
        """Cycles a tile that a program cannot be faster than, for what it waits for: latency, shared by the tiles in flight."""
        if self.latency is None:
            return 0.0
        # Without a pipeline it waits for each tile, and computes with nothing on the way.
        return self.latency / self.in_flight if self.in_flight else self.latency + max(self.busy(1).values(), default=0.0)


@dataclass(frozen=True)
class Analysis:
    """A kernel's main loop on an SM full of its programs. Cycles and instructions are those of an SM for one unit of work.

    Attributes:
        per: the unit of work, ``"token"`` (of one KV head: decode and scores) or ``"row and key"`` (prefill and levels of a cascade).
        ctas_per_sm: programs that an SM holds; None if unknown.
        instructions: warp instructions, by `tkv.tune.machine_code.class_of`; empty without a loop of matrix instructions.
        bytes: of keys and values.
        bytes_in_flight: that an SM's programs have asked for ahead; None if unknown.
        bytes_needed: in flight, for an SM to draw its share of the bandwidth; None if unknown.
        cycles: of each of `UNITS` that is known.
        bound: the unit with most cycles; None if none is known.
        unknown: the units that are not.

    """

    per: str
    ctas_per_sm: int | None
    instructions: dict[str, float]
    bytes: float
    bytes_in_flight: float | None
    bytes_needed: float | None
    cycles: dict[str, float]
    bound: str | None
    unknown: tuple[str, ...]

    @property
    def num_instructions(self) -> float:
        """Warp instructions, of all classes."""
        return sum(self.instructions.values())


def analyse(report: Report, part: Part | None = None) -> Analysis:
    """Count what a kernel's main loop costs, and find what bounds it.

    Cycles of a unit of work, on an SM that holds as many programs as fit:

    - memory: ``bytes / (bandwidth / SMs / clock)``, or the latency of DRAM over the tiles in flight where that is more;
    - issue slots: ``instructions / slots``, more where there are too few warps to fill them (`WARPS_PER_SLOT`);
    - tensor cores: ``2 * (head_dim + v_head_dim)`` operations a row and key, rows of the tile that are padding included, at the part's
      16-bit rate; instructions of a single warp at `SINGLE_WARP_SHARE` of it;
    - exp unit: results of exponentials and reciprocals, over the unit's rate;
    - shared memory: bytes that loads, stores and shuffles move, and operands that matrix instructions take from it, over its rate.

    Args:
        report: of an attention function's kernel.
        part: the GPU; `tkv.tune.arch.reference_part` of the report's architecture if None.

    Returns:
        An :class:`Analysis`.

    Raises:
        UnsupportedError: the kernel did not compile, or is not one of attention's.
    """
    part = part or reference_part(report.arch)
    tile, config = tile_cost(report, part), attention_config(report)
    is_decode = report.case.op in ("decode", "scores")
    work = config.block_n if is_decode else config.block_m * config.block_n
    ctas = tile.ctas_per_sm or None
    cycles: dict[str, float] = {}
    if ctas is not None:
        cycles = {unit: busy / (ctas * work) for unit, busy in tile.busy(ctas).items()}
        if tile.latency is not None:
            cycles["memory"] = tile.waiting() / (ctas * work)
    needed, dram = None, bytes_per_cycle(part)
    if part is not None and dram is not None:
        per_cycle = dram / part.sms
        cycles["memory"] = max(cycles.get("memory", 0.0), tile.bytes / per_cycle / work)
        needed = None if tile.latency is None else per_cycle * tile.latency
    known = {unit: cycles[unit] for unit in UNITS if unit in cycles}
    return Analysis(
        per="token" if is_decode else "row and key",
        ctas_per_sm=tile.ctas_per_sm,
        instructions={kind: count * config.num_warps / work for kind, count in report.classes.items()},
        bytes=tile.bytes / work,
        bytes_in_flight=None if ctas is None else ctas * tile.in_flight * tile.bytes,
        bytes_needed=needed,
        cycles=known,
        bound=max(known, key=known.__getitem__) if known else None,
        unknown=tuple(unit for unit in UNITS if unit not in known),
    )


def attention_config(report: Report) -> AttentionConfig:
    """The config of an attention function's compiled kernel.

    Raises:
        UnsupportedError: the kernel did not compile, or is not one of attention's.
    """
    if report.error or report.config is None:
        reason = f"does not compile: {report.error}" if report.error else "is no attention function's"
        raise UnsupportedError(f"report: the kernel of {report.case.name} on {report.arch} {reason}")
    return report.config


def tile_cost(report: Report, part: Part | None) -> TileCost:
    """The costs of one turn of a kernel's main loop; see `analyse`."""
    facts, case, config, classes = arch_facts(report.arch), report.case, attention_config(report), report.classes
    k_dim, v_dim = dims_of(case)
    cycles: dict[str, float] = {}
    issued = None
    if report.loop:
        issued = config.num_warps * sum(count for kind, count in classes.items() if facts.backend == "cuda" or kind not in _OWN_PORT)
        if facts.exp_per_cycle is not None:
            cycles["exp unit"] = config.num_warps * facts.warp_size * classes["exp"] / facts.exp_per_cycle
        if facts.shared_bytes_per_cycle is not None:
            cycles["shared memory"] = _shared_bytes(report, facts, k_dim + v_dim) / facts.shared_bytes_per_cycle
        if part is not None and part.bf16_tflops is not None and part.clock_mhz is not None:
            share = 1.0 if any(name in report.loop for name in _FROM_SHARED) else SINGLE_WARP_SHARE.get(report.arch, 1.0)
            per_cycle = part.bf16_tflops * 1e6 / (part.sms * part.clock_mhz)
            cycles["tensor cores"] = 2 * config.block_m * config.block_n * (k_dim + v_dim) / (per_cycle * share)
    slots = facts.issue_slots
    return TileCost(
        ctas_per_sm=ctas_per_sm(facts, report.registers, report.shared, config.num_warps),
        num_warps=config.num_warps,
        issue_slots=slots,
        full_warps=WARPS_PER_SLOT[facts.backend] * (slots or 1),
        issued=issued,
        cycles=cycles,
        bytes=config.block_n * token_bytes(case),
        in_flight=tiles_in_flight(report),
        latency=facts.latency_cycles,
    )


def tiles_in_flight(report: Report) -> int:
    """Tiles that a kernel has asked for ahead of the one that it computes with.

    Where a tile lies in one page, as many as its shared memory holds and its stages allow: how the compiler shares stages out between
    page ids and keys differs. Else `least_in_flight`.

    Example:
        >>> from tkv.tune.configs import AttentionConfig
        >>> config = AttentionConfig(16, 64, num_warps=4, num_stages=3)
        >>> [tiles_in_flight(Report(Case("decode", page_size=64), "sm90", "3.7.1", shared=size, config=config)) for size in (38912, 71680)]
        [1, 2]
    """
    config, case = attention_config(report), report.case
    least = least_in_flight(config.num_stages)
    if config.num_stages == 1 or case.page_size % config.block_n:
        return least
    k, v = _formats(case)
    row = k.stored_dim(case.head_dim) * k.torch_dtype.itemsize
    if not case.shared and case.op != "scores":
        row += v.stored_dim(case.v_head_dim or case.head_dim) * v.torch_dtype.itemsize
    return min(config.num_stages - 1, max(least, report.shared // (config.block_n * row)))


def _shared_bytes(report: Report, facts: Arch, dims: int) -> float:
    """Bytes that a turn of the loop moves from and to shared memory."""
    config, loop = attention_config(report), report.loop or {}
    moved = float(config.num_warps * report.loop_shared_bytes)
    operand = config.block_n * dims * 2
    if "HGMMA" in loop:
        # Four warps read the operand once.
        moved += operand * max(1, config.num_warps // 4)
    elif "UTCHMMA" in loop:
        moved += operand + config.block_m * dims * 2
    return moved


def dims_of(case: Case) -> tuple[int, int]:
    """(dims of q @ k, dims of p @ v) that a case's kernel multiplies; scores have no second product."""
    return case.head_dim, 0 if case.op == "scores" else case.v_head_dim or case.head_dim


def token_bytes(case: Case) -> float:
    """Bytes of one token of one KV head that a case's kernel reads, dynamic scales included.

    Example:
        >>> token_bytes(Case("decode", format="int8/token_head")), token_bytes(Case("scores")), token_bytes(Case("level", head_dim=64))
        (264, 256, 256)
    """
    k, v = _formats(case)
    size = k.bytes_per_token(1, case.head_dim, case.page_size)
    return size if case.shared or case.op == "scores" else size + v.bytes_per_token(1, case.v_head_dim or case.head_dim, case.page_size)


def _formats(case: Case) -> tuple[KVFormat, KVFormat]:
    return parse_pair(case.format.split("+") if "+" in case.format else case.format)


def bytes_per_cycle(part: Part | None) -> float | None:
    """Bytes that DRAM gives in a cycle of the SMs' clock; None where the bandwidth or the clock is not known."""
    return None if part is None or part.gbps is None or part.clock_mhz is None else part.gbps * 1e3 / part.clock_mhz
