"""shared_prefix_decode: decoding in which the keys that sequences share are read once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tkv.cache import KVCache
from tkv.errors import DTypeError, RangeError, ShapeError, UnsupportedError
from tkv.kernels.args import Lengths, Level
from tkv.levels import SharedLevel
from tkv.ops.attention import (
    NO_RESULTS,
    Options,
    Scratch,
    Work,
    check_table,
    check_visible,
    config_for,
    kernel_for,
    launch_attention,
    launch_merge,
    results_of,
    run_all,
    tree_of,
)
from tkv.ops.checks import INTEGERS, check_flag, check_int, check_pages, check_ragged, check_tensor, checks_on
from tkv.ops.decode import check_decode, plan_decode, row_positions
from tkv.ops.launch import Launch, arch_name, interpreting, num_sms
from tkv.ops.library import operator
from tkv.ops.outputs import outputs, traced_attention
from tkv.rope import Rope
from tkv.tune.configs import MIN_KEYS_SAVED, AttentionConfig, split_plan
from tkv.tune.keys import programs_of


@operator(mutates=("out", "lse", "workspace"), needs=("out",), omits=("return_lse",), traced=traced_attention)
def shared_prefix_decode(
    q: torch.Tensor,
    cache: KVCache,
    levels: Sequence[SharedLevel],
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    window: int | None = None,
    sinks: int = 0,
    sink_logits: torch.Tensor | None = None,
    kv_start: torch.Tensor | None = None,
    q_start: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    pinned: int = 0,
    rope: Rope | None = None,
    max_seq_len: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    deterministic: bool = False,
    config: AttentionConfig | dict[str, Any] | None = None,
    level_config: AttentionConfig | dict[str, Any] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`paged_decode` that reads keys which sequences share once a group instead of once a sequence (cascade attention).

    The query rows of a group's sequences are stacked: its keys are read ``ceil(rows / block_m)`` times for each KV head, rows being
    sequences x q_len x heads of a group. What no level covers each sequence reads for itself, and partial results are merged by their
    LSE. Positions decide what a row sees, so windows, sinks, ALiBi and trees are exact. Grouping changes the order of sums only.

    A level pays if its largest group saves 1024 keys or more, ``(max_group - 1) * max_len >= 1024``: levels behind the last one that pays
    are read as part of the sequences, and with none at all the call is `paged_decode`.

    Args:
        q, cache: as in `paged_decode`.
        levels: what is shared, outermost first; see :class:`tkv.SharedLevel` and `tkv.find_shared_levels`.
        page_table, seq_lens: of the whole sequences, as in `paged_decode`. What a level covers is not read through them.
        scale, softcap, alibi_slopes, window, sinks, sink_logits, kv_start, q_start, mask, pinned, rope, max_seq_len, return_lse,
            out, lse: as in `paged_decode`.
        workspace: as in `paged_decode`; it must hold one partial result of each level and one more, at 4 bytes a number.
        deterministic: refused: how sequences are grouped depends on the batch.
        config: launch parameters for what is not shared, level_config: for the levels; each an
            :class:`tkv.tune.configs.AttentionConfig` or a dict of its fields; chosen for the device if None.

    Returns:
        As `paged_decode`.

    Raises:
        ShapeError, DTypeError, DeviceError, RangeError: the named argument does not fit.
        UnsupportedError: ``deterministic``, or what `paged_decode` does not support.

    Example:
        >>> cache = KVCache.empty(num_pages=70, page_size=16, num_kv_heads=2, head_dim=64, format="fp16")
        >>> for part in (cache.k, cache.v): _ = part.normal_()
        >>> table = torch.cat([torch.arange(64).expand(3, 64), torch.tensor([[64], [65], [66]])], dim=1)
        >>> seq_lens = torch.tensor([1030, 1025, 1039])                          # 1024 shared keys, and 6, 1 and 15 more
        >>> import tkv
        >>> levels = tkv.find_shared_levels(table, seq_lens, page_size=16)
        >>> q = torch.randn(3, 8, 64, dtype=torch.float16)
        >>> out = shared_prefix_decode(q, cache, levels, table, seq_lens)
        >>> bool((out - tkv.paged_decode(q, cache, table, seq_lens)).abs().max() < 2e-3)
        True
    """
    if check_flag("deterministic", deterministic):
        raise UnsupportedError("deterministic: how sequences are grouped depends on the batch; use paged_decode")
    options, config = check_decode(
        q, cache, page_table, seq_lens, scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, window=window, sinks=sinks,
        sink_logits=sink_logits, kv_start=kv_start, q_start=q_start, mask=mask, pinned=pinned, rope=rope, max_seq_len=max_seq_len,
        return_lse=return_lse, out=out, lse=lse, workspace=workspace, config=config,
    )  # fmt: skip
    check_levels(levels, cache)
    levels = paying(levels)
    if checks_on():
        first, last = row_positions(q, seq_lens, options)
        cover = check_members(levels, first, last, options, cache)
        check_visible("seq_lens", page_table, seq_lens, first, last, options, cache, cover)
    if level_config is not None:
        level_config = AttentionConfig.of(level_config)
    out, lse = outputs(q, cache, out, lse, return_lse)
    if q.shape[0]:
        arch, interpret = arch_name(q.device), interpreting()
        if levels:
            launches = plan_cascade(
                q, cache, levels, page_table, seq_lens, out, lse, arch, interpret, options, max_seq_len=max_seq_len,
                workspace=workspace, config=config, level_config=level_config,
            )  # fmt: skip
        else:
            launches = plan_decode(
                q, cache, page_table, seq_lens, out, lse, arch, interpret, options, max_seq_len=max_seq_len, workspace=workspace,
                config=config,
            )  # fmt: skip
        run_all(launches, q.device)
    return out if lse is None else (out, lse)


def paying(levels: Sequence[SharedLevel]) -> list[SharedLevel]:
    """The levels up to the last one whose largest group saves `MIN_KEYS_SAVED` keys."""
    count = max((i + 1 for i, level in enumerate(levels) if (level.max_group - 1) * level.max_len >= MIN_KEYS_SAVED), default=0)
    return list(levels[:count])


def plan_cascade(
    q: torch.Tensor,
    cache: KVCache,
    levels: Sequence[SharedLevel],
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    arch: str,
    interpret: bool,
    options: Options,
    *,
    max_seq_len: int | None = None,
    workspace: torch.Tensor | None = None,
    config: AttentionConfig | None = None,
    level_config: AttentionConfig | None = None,
) -> list[Launch]:
    """The launches behind `shared_prefix_decode`: one a level, one for the rest of the sequences, and the merge. Arguments as there."""
    if q.dim() == 3:
        q, out, lse = q.unsqueeze(1), out.unsqueeze(1), None if lse is None else lse.unsqueeze(1)
    num_seqs, q_len, num_q_heads, _ = q.shape
    num_kv_heads, group = cache.num_kv_heads, num_q_heads // cache.num_kv_heads
    sms, part_bytes = num_sms(q.device), num_seqs * q_len * num_q_heads * (cache.v_head_dim + 1) * 4
    scratch = Scratch(workspace)
    if workspace is not None and scratch.limit < (len(levels) + 1) * part_bytes:
        raise ShapeError(f"workspace: expected at least {(len(levels) + 1) * part_bytes} bytes, got {scratch.limit}")
    limit = scratch.limit // (len(levels) + 1)

    # Work and kernel of each level, then of the rest.
    plans, of_levels = [], replace(options, pinned=0)
    for level in levels:
        num_groups, rows = level.page_table.shape[0], level.max_group * q_len * group
        total_rows = level.seqs.shape[0] * q_len * group
        size = programs_of("shared_prefix_decode", num_groups, num_kv_heads, rows, total_rows), level.max_len
        own = level_config or config_for("shared_prefix_decode", q, cache, of_levels, arch, rows, size)
        num_tiles = total_rows // own.block_m + num_groups
        splits, tiles = split_plan(own, num_tiles * num_kv_heads, level.max_len, sms, part_bytes, limit)
        work = Work(
            "stacked", (num_tiles * num_kv_heads, splits), num_groups, q_len, num_tiles, num_rows=level.seqs.shape[0],
            max_splits=splits, min_tiles=tiles,
        )
        plans.append((work, kernel_for(q.dtype, cache, of_levels, own, arch, interpret)))
    keys = options.max_visible(page_table.shape[1] * cache.page_size, max_seq_len, q_len)
    size = programs_of("paged_decode", num_seqs, num_kv_heads, q_len * group), keys
    config = config or config_for("paged_decode", q, cache, options, arch, q_len * group, size)
    row_tiles = -(-q_len * group // config.block_m)
    num_programs = num_seqs * num_kv_heads * row_tiles
    splits, tiles = split_plan(config, num_programs, keys, sms, part_bytes, limit)
    work = Work("uniform", (num_programs, splits), num_seqs, q_len, row_tiles, max_splits=splits, min_tiles=tiles)
    plans.append((work, kernel_for(q.dtype, cache, options, config, arch, interpret, one_position=q_len == 1 and options.mask is None)))

    counts = [work.max_splits for work, _ in plans]
    outs, lses = scratch.states((sum(counts), num_seqs, q_len, num_q_heads), cache.v_head_dim, q.device)
    # A level writes the rows of its own sequences only.
    lses[: -counts[-1]].fill_(-torch.inf)
    cover = torch.zeros(num_seqs, dtype=torch.int32, device=q.device)
    tree, launches = tree_of(options, q_len)
    lengths = Lengths(seq_lens, options.kv_start, options.q_start)
    first = 0
    sources: list[tuple[torch.Tensor, torch.Tensor | None, Level]]
    sources = [(level.page_table, level.cu_seqs, Level(level.seqs, level.lens, level.starts, cover)) for level in levels]
    sources.append((page_table, None, Level(None, None, None, cover)))
    for (work, kernel), (table, cu_seqs, of_level) in zip(plans, sources, strict=True):
        parts = (outs[first : first + work.max_splits], lses[first : first + work.max_splits])
        first += work.max_splits
        launches.append(
            launch_attention(
                kernel, work, q, cache, table, lengths, options, NO_RESULTS, parts, tree=tree, cu_seqlens=cu_seqs, level=of_level
            )
        )
    launches.append(launch_merge((outs, lses), results_of(out, lse), plans[-1][1].target, q_len, sink_logits=options.sink_logits))
    return launches


def check_levels(levels: object, cache: KVCache) -> None:
    """Levels whose tensors fit each other and the cache."""
    if not isinstance(levels, list | tuple) or not all(isinstance(level, SharedLevel) for level in levels):
        raise DTypeError(f"levels: expected a list of tkv.SharedLevel, got {type(levels).__name__}")
    for i, level in enumerate(levels):
        name = f"levels[{i}]"
        check_table(level.page_table, "num_groups", cache.page_size, cache.device, f"{name}.page_table")
        num_groups = level.page_table.shape[0]
        for field, size in (("lens", num_groups), ("starts", num_groups), ("cu_seqs", num_groups + 1), ("seqs", "num_members")):
            check_tensor(f"{name}.{field}", getattr(level, field), (size,), INTEGERS, cache.device)
        check_int(f"{name}.max_group", level.max_group, 0)
        check_int(f"{name}.max_len", level.max_len, 0)
        if not num_groups or not level.seqs.shape[0]:
            raise ShapeError(f"{name}: expected at least one group and one sequence, got {num_groups} and {level.seqs.shape[0]}")


def check_members(
    levels: Sequence[SharedLevel], first: torch.Tensor, last: torch.Tensor, options: Options, cache: KVCache
) -> torch.Tensor:
    """Synchronous: groups of sequences that exist, of pages that exist where their rows, at positions first..last, see them.

    Gives the position up to which each sequence is covered.
    """
    cover = torch.zeros_like(first)
    for i, level in enumerate(levels):
        check_ragged(f"levels[{i}].cu_seqs", level.cu_seqs, level.seqs.shape[0])
        seqs = level.seqs.tolist()
        if any(not 0 <= seq < first.shape[0] for seq in seqs) or len(set(seqs)) < len(seqs):
            raise RangeError(f"levels[{i}].seqs: expected sequences from 0 to {first.shape[0] - 1}, each at most once, got {seqs[:16]}")
        group = torch.arange(level.lens.shape[0], device=first.device).repeat_interleave(level.cu_seqs.diff())
        members, lens, starts = level.seqs[: group.shape[0]].long(), level.lens[group], level.starts[group]
        check_pages(
            f"levels[{i}].lens", level.page_table[group], lens, starts, first[members], last[members], options.window, options.sinks, cache
        )
        cover[members] = (starts + lens).to(cover.dtype)
    return cover
