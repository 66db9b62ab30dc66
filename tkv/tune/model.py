"""A model of how long an attention kernel takes, from its machine code and the GPU's data sheet. It ranks configs; no GPU is needed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from tkv.errors import RangeError, UnsupportedError
from tkv.ops.launch import padded
from tkv.tune.analysis import UNITS, TileCost, attention_config, bytes_per_cycle, dims_of, tile_cost, token_bytes
from tkv.tune.arch import Part
from tkv.tune.compile import Report
from tkv.tune.configs import MAX_SCRATCH_BYTES, AttentionConfig, deterministic_plan, split_plan
from tkv.tune.keys import OP_KINDS
from tkv.tune.limits import report_problems

# Of the data sheet's bandwidth, what a plain copy reaches.
BANDWIDTH_SHARE = 0.9
# Bytes that one SM takes in a cycle, however few others ask.
SM_BYTES_PER_CYCLE = 64
LAUNCH_US = 2.0
# Waits for memory one after the other, before a program's first tile and behind its last one.
START_LATENCIES = 4
# A second kernel on the same stream begins when the first has ended.
MERGE_LAUNCH_US = 1.5
MERGE_CTAS_PER_SM = 32


@dataclass(frozen=True)
class Shape:
    """A call of an op: what its time depends on.

    Attributes:
        op: a public function with tunables, one of ``tkv.tune.keys.OP_KINDS``.
        num_seqs: sequences of the batch; of `shared_prefix_decode` those that share the keys.
        q_len: query rows of a sequence.
        kv_len: keys of a sequence, new ones included; of `shared_prefix_decode` the keys that all share.
        num_q_heads, num_kv_heads, head_dim, v_head_dim: of a layer.
        dtype: of q, ``"bf16"``, ``"fp16"`` or ``"fp32"``.
        format: of the cache, or of K and of V with a ``+`` between.
        page_size: keys of a page.
        flags: options that the kernel is compiled for, as in :class:`tkv.tune.keys.Key`.
        window: keys that a row sees, where ``flags`` has ``"window"``.
        deterministic: results do not depend on the batch, which fixes the splits.

    Raises:
        RangeError: a size below 1, more query rows than keys, or heads that do not fit each other.
        UnsupportedError: an op without tunables.

    Example:
        >>> Shape("paged_decode", 64, 1, 8192, 32, 8, 128, 128).group
        4
    """

    op: str
    num_seqs: int
    q_len: int
    kv_len: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str = "bf16"
    format: str = "bf16"
    page_size: int = 16
    flags: tuple[str, ...] = ()
    window: int | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.op not in OP_KINDS:
            raise UnsupportedError(f"op: expected {', '.join(OP_KINDS)}, got {self.op!r}")
        for name in ("num_seqs", "q_len", "kv_len", "num_q_heads", "num_kv_heads", "head_dim", "v_head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise RangeError(f"{name}: expected at least 1, got {getattr(self, name)!r}")
        if self.num_q_heads % self.num_kv_heads:
            raise RangeError(f"num_q_heads: expected a multiple of num_kv_heads ({self.num_kv_heads}), got {self.num_q_heads}")
        if self.op == "prefix_prefill" and self.q_len > self.kv_len:
            raise RangeError(f"q_len: expected at most kv_len ({self.kv_len}), which has new tokens too, got {self.q_len}")

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def rows(self) -> int:
        """Query rows x heads of a group that share keys."""
        return self.q_len * self.group * (self.num_seqs if self.op == "shared_prefix_decode" else 1)

    @property
    def visible(self) -> int:
        """Keys that the rows of a sequence visit."""
        return self.kv_len if self.window is None else min(self.kv_len, self.window + self.q_len - 1)


class Plan(NamedTuple):
    """What a launch does.

    Attributes:
        ctas: programs that have work.
        tiles: turns of the main loop of all of them together.
        longest: turns of the longest one.
        splits: parts of each row's keys; 0 where the result is final without a merge.
        parts: partial results, rows x heads x splits.
        merges: programs of the merge, and the parts that each of them looks at.
        bytes: of keys and values that have to come from DRAM, each once.
    """

    ctas: int
    tiles: int
    longest: int
    splits: int
    parts: int
    merges: tuple[int, int]
    bytes: float


@dataclass(frozen=True)
class Prediction:
    """What `predict` says.

    Attributes:
        us: microseconds of the whole call; infinite where the kernel cannot run.
        bounds: microseconds that each unit of ``tkv.tune.analysis.UNITS`` would take alone, and of "start" (first loads of each wave of
            programs), "merge" and "launch".
        bound: the largest of them.
        splits: parts that each row's keys are cut into.
        waves: programs over those that the GPU holds at a time.
        ctas_per_sm: that an SM holds.
        unknown: units whose rates the part does not tell; they bound nothing.
    """

    us: float
    bounds: dict[str, float]
    bound: str
    splits: int
    waves: float
    ctas_per_sm: int
    unknown: tuple[str, ...]


def predict(report: Report, shape: Shape, part: Part) -> Prediction:
    """How long a call takes whose kernel compiled to this report.

    The launch is planned with the rules of the op itself (`tkv.tune.configs`). Its programs run in waves of ``SMs * CTAs per SM``; a
    wave takes, for each turn of the main loop,

        max(memory, issue slots, tensor cores, exp unit, shared memory)

    of `tkv.tune.analysis`, with as many programs on an SM as the wave puts there, so the last wave may be a quick one, or the only one
    leaves SMs idle. To it come the first loads of each wave, writing, reading and merging partial results, and launches.

    Assumptions:

    - every sequence is as long as the shape says, and nothing is in L2 before (a layer's keys were read one model step ago);
    - DRAM gives 90 % of the data sheet's bandwidth; an SM takes at most 64 bytes a cycle; keys that several tiles of rows read come from
      DRAM once, and partial results go to DRAM and back once;
    - a tile asked for ahead arrives after `Arch.latency_cycles`, so an SM draws at most ``bytes in flight / latency``; a loop without
      stages waits for each tile and computes with nothing on the way;
    - units overlap perfectly: a turn takes as long as its busiest unit. What programs do outside of the main loop takes the latency of
      four loads; tiles with masks cost as much as those without;
    - spilled registers cost what their loads and stores cost in the loop, which is too little: whoever chooses leaves such kernels out;
    - a launch takes 2 microseconds, a merge behind it 1.5, and clocks are the nominal ones.

    So it is good for ranking configs of one kernel on one part, and for telling what bounds it; absolute times are off by tens of percent.

    Args:
        report: of the op's kernel (`OP_KINDS`), compiled for the part's architecture, or for one of its family.
        shape: the call.
        part: the GPU.

    Returns:
        A :class:`Prediction`.

    Raises:
        UnsupportedError: the report is of another op, of no attention function or did not compile; or the part's clock, or what an SM of
            its architecture holds, is not known.

    Example:
        >>> from tkv.tune.arch import reference_part
        >>> from tkv.tune.compile import Case
        >>> report = Report(Case("decode"), "sm90", "3.7.1", registers=128, shared=65536, config=AttentionConfig(16, 64, 4, 2),
        ...                 num_warps=4, num_stages=2, loop={"HMMA": 64, "IMAD": 300})
        >>> found = predict(report, Shape("paged_decode", 64, 1, 8192, 64, 8, 128, 128), reference_part("sm90"))
        >>> found.bound, round(found.us / 100)
        ('memory', 7)
    """
    tile, config = tile_cost(report, part), attention_config(report)
    if OP_KINDS[shape.op] != report.case.op.replace("_cached", ""):
        raise UnsupportedError(f"report: of {report.case.op}, shape: of {shape.op}, whose kernel is that of {OP_KINDS[shape.op]}")
    if part.clock_mhz is None or tile.ctas_per_sm is None:
        missing = "clock" if part.clock_mhz is None else "registers and warps of an SM"
        raise UnsupportedError(f"part: nothing can be predicted for {part.name}, whose {missing} are not known")
    plan = plan_of(config, shape, part.sms, token_bytes(report.case))
    cannot = tile.ctas_per_sm == 0 or any("spills" not in problem for problem in report_problems(report))
    if cannot:
        return Prediction(math.inf, {}, "does not fit", max(1, plan.splits), math.inf, 0, ())

    cycles, of_units = _run(tile, plan, part, tile.ctas_per_sm)
    bounds = {unit: alone / part.clock_mhz for unit, alone in of_units.items()}
    bounds["merge"] = _merge(plan, report, part, (tile.latency or 0) / part.clock_mhz)
    bounds["launch"] = LAUNCH_US
    us = cycles / part.clock_mhz + bounds["merge"] + LAUNCH_US
    return Prediction(
        us=us,
        bounds=bounds,
        bound=max(bounds, key=bounds.__getitem__),
        splits=max(1, plan.splits),
        waves=plan.ctas / (part.sms * tile.ctas_per_sm),
        ctas_per_sm=tile.ctas_per_sm,
        unknown=tuple(unit for unit in UNITS if unit not in bounds),
    )


def _run(tile: TileCost, plan: Plan, part: Part, ctas_per_sm: int) -> tuple[float, dict[str, float]]:
    """(cycles of the attention kernel, cycles of each unit alone)."""
    turns = plan.tiles / plan.ctas
    dram = bytes_per_cycle(part)
    # Of the bytes of all tiles, those that come from DRAM.
    share = plan.bytes / (plan.tiles * tile.bytes)
    start = START_LATENCIES * (tile.latency or 0)
    total, alone = 0.0, dict.fromkeys(("start",), 0.0)
    full, rest = divmod(plan.ctas, part.sms * ctas_per_sm)
    for count, ctas in ((full, part.sms * ctas_per_sm), (1, rest)):
        if not count or not ctas:
            continue
        resident = -(-ctas // part.sms)
        busy = tile.busy(resident)
        busy["memory"] = max(tile.waiting(), resident * tile.bytes / SM_BYTES_PER_CYCLE)
        if dram is not None:
            busy["memory"] = max(busy["memory"], ctas * tile.bytes * share / (BANDWIDTH_SHARE * dram))
        for unit, cycles in busy.items():
            alone[unit] = alone.get(unit, 0.0) + count * turns * cycles
        alone["start"] += count * start
        total += count * (turns * max(busy.values()) + start)
    # The longest program alone on its SM: where work is uneven, nothing ends before it.
    busy = tile.busy(1)
    total = max(total, plan.longest * max(*busy.values(), tile.waiting(), tile.bytes / SM_BYTES_PER_CYCLE) + start)
    if part.gbps is None:
        alone.pop("memory", None)
    return total, alone


def _merge(plan: Plan, report: Report, part: Part, latency_us: float) -> float:
    """Microseconds of writing partial results, and of the kernel that joins them."""
    if not plan.splits:
        return 0.0
    v_dim = dims_of(report.case)[1]
    moved = 2 * plan.parts * (v_dim + 1) * 4
    us = 0.0 if part.gbps is None else moved / (BANDWIDTH_SHARE * part.gbps * 1e3)
    programs, parts = plan.merges
    turns = -(-parts // max(1, min(16, 2048 // padded(v_dim))))
    waves = -(-programs // (part.sms * MERGE_CTAS_PER_SM))
    return us + MERGE_LAUNCH_US + waves * (turns + 2) * latency_us


def plan_of(config: AttentionConfig, shape: Shape, sms: int, bytes_of_token: float) -> Plan:
    """What the op launches for a shape, by its own rules; see ``plan_decode``, ``plan_prefill``, ``plan_cascade`` and ``plan_scores``.

    Args:
        config: the launch's config.
        shape: the call.
        sms: of the GPU.
        bytes_of_token: of one KV head, as the kernel reads it.

    Example:
        >>> shape = Shape("paged_decode", 1, 1, 32768, 32, 8, 128, 128)
        >>> plan_of(AttentionConfig(16, 64, 4, 2), shape, sms=132, bytes_of_token=512)[:4]
        (512, 4096, 8, 64)
    """
    rows, heads, keys = shape.rows, shape.num_kv_heads, shape.visible
    row_tiles, key_tiles = -(-rows // config.block_m), -(-keys // config.block_n)
    seqs = 1 if shape.op == "shared_prefix_decode" else shape.num_seqs
    loaded = seqs * heads * keys * bytes_of_token
    if shape.op == "key_scores":
        # Programs share a sequence's keys; each goes over all rows for its own.
        programs = min(key_tiles, max(1, -(-16 * sms // (seqs * heads))))
        longest = -(-key_tiles // programs) * row_tiles
        return Plan(seqs * heads * programs, seqs * heads * key_tiles * row_tiles, longest, 0, 0, (0, 0), loaded)

    row_bytes = shape.num_q_heads * (shape.v_head_dim + 1) * 4
    seq_bytes, scratch = shape.q_len * row_bytes, MAX_SCRATCH_BYTES
    launched, split_rows = seqs * row_tiles, shape.q_len
    if shape.op == "prefix_prefill":
        launched = shape.num_seqs * shape.q_len * shape.group // config.block_m + shape.num_seqs + 1
        if launched * heads >= sms or shape.deterministic:
            split_rows = max(1, config.block_m // shape.group)
        split_rows = max(1, min(split_rows, shape.q_len, scratch // (8 * shape.num_seqs * row_bytes)))
    elif shape.op == "shared_prefix_decode":
        launched, scratch = rows // config.block_m + 1, scratch // 2
    if shape.deterministic:
        splits, per_split, _ = deterministic_plan(config, keys, split_rows * row_bytes, scratch)
    else:
        part_bytes = shape.num_seqs * (split_rows * row_bytes if shape.op == "prefix_prefill" else seq_bytes)
        splits, per_split = split_plan(config, launched * heads, keys, sms, part_bytes, scratch)
    is_split = (splits > 1 or shape.deterministic) and shape.q_len <= split_rows

    ctas = tiles = longest = parts = 0
    for row_tile in range(row_tiles):
        of_tile = key_tiles
        if shape.op == "prefix_prefill" and shape.window is None:
            # Rows see the keys up to their own.
            last = min((row_tile * config.block_m + config.block_m - 1) // shape.group, shape.q_len - 1)
            of_tile = -(-(shape.kv_len - shape.q_len + last + 1) // config.block_n)
        per_cta = max(-(-of_tile // splits), per_split) if is_split else of_tile
        used = -(-of_tile // per_cta)
        ctas, tiles, longest = ctas + used, tiles + of_tile, max(longest, per_cta)
        parts += min(config.block_m, rows - row_tile * config.block_m) * used
    if is_split or shape.op == "shared_prefix_decode":
        merges = (shape.num_seqs * shape.q_len * shape.num_q_heads, splits)
        most = max(1, -(-key_tiles // max(-(-key_tiles // splits), per_split)))
        return Plan(ctas * seqs * heads, tiles * seqs * heads, longest, most, parts * seqs * heads, merges, loaded)
    return Plan(ctas * seqs * heads, tiles * seqs * heads, longest, 0, 0, (0, 0), loaded)
