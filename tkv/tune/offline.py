"""Tuning without a GPU: candidates are compiled, and a model says where one of them beats the analytic default."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

from tkv.errors import RangeError, TkvError
from tkv.ops.attention import compute_dtypes, default_config
from tkv.tune.analysis import analyse
from tkv.tune.arch import Part, reference_part
from tkv.tune.arch import arch as arch_facts
from tkv.tune.cases import DTYPES, NUM_KV_HEADS, launch_of
from tkv.tune.compile import Report, compile_all
from tkv.tune.configs import AttentionConfig
from tkv.tune.keys import OP_KINDS, Key, check_op, key_case, size_of_shape
from tkv.tune.limits import ctas_per_sm, problems_of, report_problems
from tkv.tune.model import Shape, predict
from tkv.tune.tables import Bucket, Compiled, Entry, Table

if TYPE_CHECKING:
    from tkv.tune.store import Store

# A modelled config must take at most so much of the default's time.
MAX_TIME = 0.95
# Of the default's warp instructions for the same work: what a model overlooks costs instructions first.
MAX_INSTRUCTIONS = 1.1

# A kernel takes seconds to compile: the classes of decode that are met most have all formats, the others one of each kind.
FORMATS = ("bf16", "fp16", "fp8_e4m3/tensor", "fp8_e4m3/token_head", "int8/token_head", "int4/token_head", "int4/group32")
MAIN_FORMATS = ("bf16", "fp8_e4m3/tensor", "int8/token_head", "int4/group32")
LATENT_FORMATS = ("bf16", "fp8_e4m3/tensor", "fp8_e4m3/token_head")
DIMS = ((64, 64), (128, 128), (256, 256))
UNEVEN, LATENT = (192, 128), (576, 512)
# (dims, formats, rows, page) of each op's keys.
CLASSES: dict[str, tuple[tuple[tuple[tuple[int, int], ...], tuple[str, ...], int, int], ...]] = {
    "paged_decode": (((*DIMS, UNEVEN), FORMATS, 16, 16), (DIMS[:2], MAIN_FORMATS, 16, 64), (DIMS, MAIN_FORMATS, 32, 16)),
    "prefix_prefill": ((DIMS, MAIN_FORMATS, 128, 16),),
    "shared_prefix_decode": ((DIMS, MAIN_FORMATS, 128, 16),),
    "key_scores": ((DIMS, MAIN_FORMATS, 128, 16),),
}
# Sequences and keys of the calls that a table's buckets are made of.
BATCHES = {"paged_decode": (1, 16, 128), "prefix_prefill": (1, 8), "shared_prefix_decode": (16, 128), "key_scores": (1, 16)}
LENGTHS = {"paged_decode": (1024, 8192, 65536), "prefix_prefill": (2048, 16384), "shared_prefix_decode": (2048, 16384)}
LENGTHS["key_scores"] = LENGTHS["prefix_prefill"]
CHUNK = 2048


def keys_of(op: str) -> list[Key]:
    """The keys that tuning without a GPU makes entries for.

    Args:
        op: one of ``tkv.tune.keys.OP_KINDS``.

    Returns:
        Head dims 64, 128 and 256 x formats x the row and page classes of `CLASSES`, for decode also 192/128 and latent attention.

    Raises:
        UnsupportedError: an op without tunables.

    Example:
        >>> len(keys_of("paged_decode")), len(keys_of("prefix_prefill")), keys_of("prefix_prefill")[0].name
        (54, 12, 'd64 bf16 bf16 r128 p16')
    """
    check_op(op)
    found = [
        Key(*both, "fp16" if kind == "fp16" else "bf16", kind, rows, page)
        for dims, kinds, rows, page in CLASSES[op]
        for both in dims
        for kind in kinds
    ]
    if op == "paged_decode":
        found += [Key(*LATENT, "bf16", kind, rows, 64, ("shared",)) for kind in LATENT_FORMATS for rows in (16, 128)]
    return found


def candidates(op: str, key: Key, arch: str, wide: bool = False) -> list[AttentionConfig]:
    """Configs that are worth trying for a key.

    Args:
        op: one of ``tkv.tune.keys.OP_KINDS``.
        key: of the calls.
        arch: the architecture.
        wide: all neighbours of the default in every direction, for measuring; else five at most, for each costs a second to compile.

    Returns:
        Configs without `problems_of`, each once, the analytic default first, then those that differ least from it.

    Raises:
        UnsupportedError: an op without tunables, or an unknown architecture.

    Example:
        >>> found = candidates("paged_decode", Key(128, 128, "bf16", "bf16", rows=16, page=16), "sm90")
        >>> [(config.block_n, config.num_warps, config.num_stages) for config in found]
        [(128, 4, 2), (64, 4, 2), (128, 2, 2), (64, 2, 2), (256, 4, 2)]
    """
    check_op(op)
    default = default_config(op, arch, key)
    if op == "key_scores":
        # Its loop has no pipeline.
        default = replace(default, num_stages=1)
    moves: Iterable[tuple[float, float, float, int]] = _DECODE_MOVES if op in ("paged_decode", "key_scores") else _PREFILL_MOVES
    if wide:
        grid = product((1, 0.5, 2), (1, 0.5, 2, 4), (1, 0.5, 2), (0, 1, 2, 3, -1))
        moves = sorted(grid, key=lambda move: sum(abs(math.log2(factor)) for factor in move[:3]) + abs(move[3]))
    found = [default]
    for block_m, block_n, num_warps, stages in moves:
        try:
            config = replace(
                default,
                block_m=int(default.block_m * block_m),
                block_n=int(default.block_n * block_n),
                num_warps=int(default.num_warps * num_warps),
                num_stages=1 if op == "key_scores" else default.num_stages + stages,
            )
        except RangeError:
            continue
        if config not in found and config.block_m <= key.rows and not problems(config, arch, key):
            found.append(config)
    return found


# (block_m, block_n, num_warps: factors; num_stages: what is added), most promising first.
_DECODE_MOVES = ((1, 0.5, 1, 0), (1, 1, 0.5, 0), (1, 0.5, 0.5, 0), (1, 2, 1, 0))
_PREFILL_MOVES = ((1, 0.5, 1, 0), (0.5, 1, 0.5, 0), (1, 1, 0.5, 0), (1, 2, 1, 0))


def problems(config: AttentionConfig, arch: str, key: Key) -> list[str]:
    """`problems_of` a config for a key, before it is compiled."""
    bits = min(4 if kind.dtype == "int4" else 8 * kind.torch_dtype.itemsize for kind in key.formats)
    compute = 8 * max(dtype.itemsize for dtype in compute_dtypes(DTYPES[key.dtype], key.formats, arch))
    shared = "shared" in key.flags
    return problems_of(config, arch, key.head_dim, compute, v_head_dim=key.v_head_dim, bits=bits, shared=shared)


def shapes_for(op: str, key: Key) -> list[Shape]:
    """Calls with this key, from one sequence to many and from short to long: what the buckets of its entries are made of.

    Example:
        >>> [(shape.num_seqs, shape.kv_len) for shape in shapes_for("prefix_prefill", Key(64, 64, "bf16", "bf16", rows=128, page=16))]
        [(1, 2048), (1, 16384), (8, 2048), (8, 16384)]
    """
    case = key_case(op, key)
    heads = 1 if "shared" in key.flags else NUM_KV_HEADS
    q_len = CHUNK if op == "prefix_prefill" and case.q_len * case.group > key.rows else case.q_len
    group = case.group if op != "shared_prefix_decode" else max(1, key.rows // min(BATCHES[op]))
    return [
        Shape(
            op, num_seqs, q_len, kv_len, heads * group, heads, key.head_dim, key.v_head_dim, key.dtype, key.format, key.page, key.flags
        )
        for num_seqs in BATCHES[op]
        for kv_len in LENGTHS[op]
    ]  # fmt: skip


@dataclass(frozen=True)
class _Trial:
    """A key and what its candidates compiled to, the default's report first."""

    key: Key
    configs: list[AttentionConfig]
    reports: list[Report]


def tune_offline(
    arch: str,
    ops: Iterable[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    store: Store | None = None,
    workers: int | None = None,
    keys: Iterable[Key] | None = None,
    part: Part | None = None,
    like: Iterable[Table] = (),
) -> list[Table]:
    """Tables of what a model says, for an architecture without a GPU of it.

    Every key's candidates are compiled, and `tkv.tune.model.predict` gives their times for `shapes_for` the key. A config that does not
    compile, does not fit or spills never wins, nor does one whose loop has over 110 % of the default's instructions. Of the others one,
    which saves most over all sizes, has those sizes where it takes at most 95 % of the default's time. Neighbouring sizes with the same
    config are one bucket; keys where the default is best everywhere have no entry.

    Args:
        arch: the architecture.
        ops: of ``tkv.tune.keys.OP_KINDS``; all if None.
        progress: called with (kernels done, all kernels) before the first and after each.
        store: of compiled kernels: an interrupted run goes on where it was.
        workers: processes that compile; one a core if None.
        keys: those to make entries for, that an op has; `keys_of` it if None.
        part: the GPU that is modelled; `tkv.tune.arch.reference_part` if None.
        like: tables of a related architecture; where there are some, only configs that won there are tried, on the keys where they did.

    Returns:
        A table for each op. They have no entries where no part of the architecture or its family is known.

    Raises:
        UnsupportedError: an unknown architecture or op.
    """
    arch_facts(arch)
    ops = tuple(OP_KINDS) if ops is None else tuple(ops)
    for op in ops:
        check_op(op)
    part = part or reference_part(arch)
    wanted = None if keys is None else tuple(keys)
    proven = proven_by(like)
    trials = {op: [_Trial(key, _tried(op, key, arch, proven), []) for key in _legal(op, arch, wanted)] if part else [] for op in ops}
    jobs = [(key_case(op, trial.key), arch, config) for op in ops for trial in trials[op] for config in trial.configs]
    places = [trial for op in ops for trial in trials[op] for _ in trial.configs]
    if progress is not None:
        progress(0, len(jobs))
    for done, (trial, report) in enumerate(zip(places, compile_all(jobs, workers, store=store), strict=True), 1):
        trial.reports.append(report)
        if progress is not None:
            progress(done, len(jobs))
    return [
        Table.make(op, arch, [entry for trial in trials[op] if part for entry in entries_of(op, trial.key, trial.reports, part)])
        for op in ops
    ]


def proven_by(tables: Iterable[Table]) -> dict[tuple[str, Key], list[AttentionConfig]] | None:
    """The configs of tables by function and key, each once; None without tables."""
    found: dict[tuple[str, Key], list[AttentionConfig]] = {}
    tables = list(tables)
    for table in tables:
        for entry in table.entries:
            configs = found.setdefault((table.op, entry.match), [])
            if entry.config is not None and entry.config not in configs:
                configs.append(entry.config)
    return found if tables else None


def _tried(op: str, key: Key, arch: str, proven: dict[tuple[str, Key], list[AttentionConfig]] | None) -> list[AttentionConfig]:
    """The default and what is tried against it; nothing where nothing else is."""
    if proven is None:
        return candidates(op, key, arch)
    default = default_config(op, arch, key)
    others = [config for config in proven.get((op, key), ()) if config != default and not problems(config, arch, key)]
    return [default, *others] if others else []


def _legal(op: str, arch: str, keys: Sequence[Key] | None) -> Iterator[Key]:
    """Keys that the op takes on the architecture."""
    for key in keys_of(op) if keys is None else keys:
        try:
            launch_of(key_case(op, key), arch)
        except TkvError:
            continue
        yield key


def entries_of(op: str, key: Key, reports: Sequence[Report], part: Part) -> list[Entry]:
    """The entries of one key.

    Args:
        op: one of ``tkv.tune.keys.OP_KINDS``.
        key: the key.
        reports: of its candidates, compiled for an architecture; that of the default comes first.
        part: the GPU that is modelled.

    Returns:
        Entries whose buckets hold every size, ``config`` None where the default is best; none if it is so everywhere.
    """
    shapes = shapes_for(op, key)
    if not reports or reports[0].error or not reports[0].loop:
        return []
    most = MAX_INSTRUCTIONS * analyse(reports[0], part).num_instructions
    usable = [reports[0], *(report for report in reports[1:] if not report_problems(report) and report.loop)]
    usable = [report for report in usable if report is reports[0] or analyse(report, part).num_instructions <= most]
    times = [[predict(report, shape, part).us for shape in shapes] for report in usable]
    if op == "key_scores":
        # One config for all batches: that of the geometric mean of all sizes.
        shapes, times = shapes[-1:], [[math.exp(sum(map(math.log, of_config)) / len(of_config))] for of_config in times]
    winners = _winners(times)
    if not any(winners):
        return []
    sizes = [size_of_shape(shape, part.sms) for shape in shapes]
    return [_entry(key, bucket, usable[winner] if winner else None) for bucket, winner in buckets_of(sizes, winners)]


def _winners(times: list[list[float]]) -> list[int]:
    """The config of each size: the default, 0, or the one that saves most over all sizes, where it is 5 % faster.

    One config beside the default keeps tables small, and checking them quick.
    """

    def saved(n: int) -> float:
        return sum(math.log(default / us) for us, default in zip(times[n], times[0], strict=True) if us <= MAX_TIME * default)

    best = max(range(1, len(times)), key=saved, default=0)
    return [best if us <= MAX_TIME * default else 0 for us, default in zip(times[best], times[0], strict=True)]


def _entry(key: Key, bucket: Bucket, report: Report | None) -> Entry:
    if report is None:
        return Entry(key, bucket, None, "modelled", None)
    ctas = ctas_per_sm(arch_facts(report.arch), report.registers, report.shared, report.num_warps)
    return Entry(key, bucket, report.config, "modelled", Compiled(report.triton, report.registers, report.spills, report.shared, ctas))


def buckets_of(sizes: Sequence[tuple[float, int]], winners: Sequence[int]) -> list[tuple[Bucket, int]]:
    """Buckets around sizes, each with its winner.

    Args:
        sizes: (work per SM, keys), every work with every number of keys.
        winners: of each size.

    Returns:
        Buckets in order, bounds half-way between one size and the next by factors, the last ones open; equal neighbours are one.

    Example:
        >>> [(bucket.name, winner) for bucket, winner in buckets_of([(1, 100), (1, 400), (4, 100), (4, 400)], [0, 1, 2, 2])]
        [('work <= 2, keys <= 200', 0), ('work <= 2', 1), ('any', 2)]
    """
    of_size = dict(zip(sizes, winners, strict=True))
    works, lengths = sorted({work for work, _ in sizes}), sorted({keys for _, keys in sizes})
    rows: list[tuple[float, list[tuple[int | None, int]]]] = []
    for work in works:
        row = [(keys, of_size[work, keys]) for keys in lengths]
        cut = [
            (None if after is None else math.isqrt(keys * after[0]), winner)
            for (keys, winner), after in zip(row, [*row[1:], None], strict=True)
            if after is None or after[1] != winner
        ]
        if rows and rows[-1][1] == cut:
            rows.pop()
        rows.append((work, cut))
    found = []
    for (work, cut), higher in zip(rows, [*rows[1:], None], strict=True):
        # Between the last work of this row and the first of the next; three digits keep a table readable.
        bound = None if higher is None else float(f"{math.sqrt(work * works[works.index(work) + 1]):.3g}")
        found += [(Bucket(bound, keys), winner) for keys, winner in cut]
    return found
