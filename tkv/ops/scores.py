"""key_scores: how much attention each cached key got."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tkv.cache import KVCache
from tkv.errors import RangeError, ShapeError, UnsupportedError
from tkv.kernels.args import Lengths, TokenStrides
from tkv.ops.attention import (
    Options,
    check_options,
    check_queries,
    check_table,
    check_visible,
    config_for,
    kernel_for,
    row_strides,
    tree_of,
)
from tkv.ops.checks import FLOATS, INTEGERS, check_cache, check_flag, check_int, check_ragged, check_tensor, checks_on
from tkv.ops.launch import Launch, arch_name, check_launchable, interpreting, num_sms, paged_words, rope_args
from tkv.ops.library import operator
from tkv.rope import Rope
from tkv.tune.configs import AttentionConfig
from tkv.tune.keys import MAX_SCORE_ROWS

REDUCTIONS = ("sum", "mean", "max")


def _traced(call: Callable[[dict[str, Any]], Any], values: dict[str, Any]) -> torch.Tensor:
    out = _scores(values["cache"]) if values["out"] is None else values["out"]
    call({**values, "out": out})
    return out


@operator(mutates=("out",), needs=("out",), traced=_traced)
def key_scores(
    q: torch.Tensor,
    cache: KVCache,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    lse: torch.Tensor,
    *,
    reduce: str = "sum",
    accumulate: bool = True,
    out: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_q_len: int | None = None,
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
    config: AttentionConfig | dict[str, Any] | None = None,
) -> torch.Tensor:
    """Attention mass of every cached key: what H2O, SnapKV, TOVA and their like rank tokens by.

    ``score[j, h] = sum over query rows i of reduce over the heads g of KV head h of exp(x[i, g, j] - lse[i, g])``, with x as in
    `paged_decode`: the probabilities of the very call that gave `lse`, if it had the same options. Those of one row and head add up to 1,
    less what a learned sink has. K is read once; V is not.

    Scores live in a paged buffer of their own, ``out[page, row, head]`` belonging to the key in that slot, and `compact_kv` moves them with
    the keys. A slot that is written anew still has the score of its last key: set ``out.view(-1, num_kv_heads)[slot_mapping] = 0`` beside
    `write_kv`. Pages in which two sequences of a call see keys would get the sum of one of them only: fork before.

    Args:
        q: ``[num_seqs, num_q_heads, head_dim]`` or ``[num_seqs, q_len, num_q_heads, head_dim]`` (any q_len), the newest tokens of each
            sequence; or ragged ``[total_tokens, num_q_heads, head_dim]`` with `cu_seqlens`. Dtypes as in `paged_decode`.
        cache: the keys, the new tokens' too.
        page_table: ``[num_seqs, max_pages]`` int32 or int64.
        seq_lens: ``[num_seqs]`` int32 or int64, keys of each sequence, the new tokens included.
        lse: float32, q's shape without head_dim: the natural-log LSE of the rows over all their keys.
        reduce: ``"sum"``, ``"mean"`` or ``"max"`` over the heads of a group.
        accumulate: add to what `out` has; else the keys that some row sees get the mass of this call alone. Other keys keep what they have.
        out: ``[num_pages, page_size, num_kv_heads]`` float32, any strides; zeros if None.
        cu_seqlens: ``[num_seqs + 1]`` int32 or int64: the rows of ragged queries.
        max_q_len: a hint for the most rows of a sequence, as `prefix_prefill` has it. All rows of a sequence are one program's here,
            and scores do not depend on the batch: the launch is the same with any.
        scale, softcap, alibi_slopes, window, sinks, kv_start, q_start, mask, pinned, rope, max_seq_len: as in `paged_decode`.
        config: launch parameters, as in `paged_decode`; keys are not split.
        sink_logits: taken for the sake of equal options: a learned sink is in `lse` already.

    Returns:
        `out`.

    Raises:
        ShapeError, DTypeError, DeviceError, RangeError: the named argument does not fit.
        UnsupportedError: a combination of dtypes, or a `reduce`, that there is no kernel for.

    Example:
        >>> cache = KVCache.empty(num_pages=4, page_size=16, num_kv_heads=2, head_dim=64, format="fp32")
        >>> cache.k.normal_(), cache.v.normal_()[0, 0, 0, 0].shape  # doctest: +ELLIPSIS
        (tensor(...), torch.Size([]))
        >>> import tkv
        >>> q, table, lens = torch.randn(1, 8, 64), torch.tensor([[3, 1]]), torch.tensor([20])
        >>> _, lse = tkv.paged_decode(q, cache, table, lens, return_lse=True)
        >>> scores = key_scores(q, cache, table, lens, lse)
        >>> scores.shape, [round(mass, 4) for mass in scores.sum((0, 1)).tolist()]      # four query heads for each KV head
        (torch.Size([4, 16, 2]), [4.0, 4.0])
    """
    check_cache(cache)
    device = cache.device
    is_ragged = cu_seqlens is not None
    rows = ("total_tokens",) if is_ragged else ("num_seqs", "q_len")[: 2 if isinstance(q, torch.Tensor) and q.dim() == 4 else 1]
    check_tensor("q", q, (*rows, "num_q_heads", cache.head_dim), FLOATS, device)
    check_queries(q, cache)
    num_seqs: int | str = "num_seqs" if is_ragged else q.shape[0]
    check_table(page_table, num_seqs, cache.page_size, device)
    num_seqs = page_table.shape[0]
    check_tensor("seq_lens", seq_lens, (num_seqs,), INTEGERS, device)
    check_tensor("lse", lse, tuple(q.shape[:-1]), (torch.float32,), device)
    if reduce not in REDUCTIONS:
        raise UnsupportedError(f"reduce: expected {', '.join(REDUCTIONS)}, got {reduce!r}")
    check_flag("accumulate", accumulate)
    if cu_seqlens is not None:
        check_tensor("cu_seqlens", cu_seqlens, (num_seqs + 1,), INTEGERS, device)
    q_len = q.shape[1] if q.dim() == 4 else q.shape[0] if is_ragged else 1
    options = check_options(
        cache, num_seqs, q.shape[-2], min(q_len, 128), scale, softcap, alibi_slopes, window, sinks, sink_logits, kv_start, q_start, mask,
        pinned, rope,
    )  # fmt: skip
    if mask is not None and not is_ragged and mask.shape[1] < q_len:
        raise ShapeError(f"mask: expected at least {q_len} tokens, q's, got {list(mask.shape)}")
    for name, hint in (("max_q_len", max_q_len), ("max_seq_len", max_seq_len)):
        if hint is not None:
            check_int(name, hint, 0)
    shape = (cache.num_pages, cache.page_size, cache.num_kv_heads)
    if out is not None:
        check_tensor("out", out, shape, (torch.float32,), device, contiguous_last=False)
    if config is not None:
        config = AttentionConfig.of(config)
    check_launchable(device)
    if checks_on():
        _check_values(q, cache, page_table, seq_lens, cu_seqlens, options)
    if out is None:
        out = _scores(cache)
    if q.shape[0] and num_seqs and page_table.shape[1]:
        for launch in plan_scores(
            q, cache, page_table, seq_lens, lse, out, arch_name(device), interpreting(), options, reduce=reduce, accumulate=accumulate,
            cu_seqlens=cu_seqlens, max_seq_len=max_seq_len, config=config,
        ):  # fmt: skip
            launch.run(device)
    return out


def _scores(cache: KVCache) -> torch.Tensor:
    return torch.zeros(cache.num_pages, cache.page_size, cache.num_kv_heads, dtype=torch.float32, device=cache.device)


def plan_scores(
    q: torch.Tensor,
    cache: KVCache,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    lse: torch.Tensor,
    out: torch.Tensor,
    arch: str,
    interpret: bool,
    options: Options,
    *,
    reduce: str = "sum",
    accumulate: bool = True,
    cu_seqlens: torch.Tensor | None = None,
    max_seq_len: int | None = None,
    config: AttentionConfig | None = None,
) -> list[Launch]:
    """The launches behind `key_scores`: one, and what a tree mask needs. Arguments as there, checked."""
    from tkv.kernels.scores import scores_kernel

    if q.dim() == 3 and cu_seqlens is None:
        q, lse = q.unsqueeze(1), lse.unsqueeze(1)
    num_seqs, num_kv_heads, group = page_table.shape[0], cache.num_kv_heads, q.shape[-2] // cache.num_kv_heads
    q_len = q.shape[1] if cu_seqlens is None else q.shape[0]
    # Of ragged rows any sequence may have many: with another tile for other batches sums would be rounded otherwise.
    rows = group * (MAX_SCORE_ROWS if cu_seqlens is not None else min(q_len, MAX_SCORE_ROWS))
    config = config or config_for("key_scores", q, cache, options, arch, rows, None)
    heads = 1 << (group - 1).bit_length()
    block_m = max(config.block_m, heads)
    kernel = kernel_for(q.dtype, cache, options, config, arch, interpret)
    capacity = page_table.shape[1] * cache.page_size
    tiles = -(-max(1, capacity if max_seq_len is None else min(capacity, max_seq_len)) // config.block_n)
    # A tile is a few microseconds of work: a program takes several where there are more than fill the GPU some times.
    num_programs = min(tiles, max(1, -(-16 * num_sms(q.device) // (num_seqs * num_kv_heads))))
    tree, launches = tree_of(options, q_len, cu_seqlens)
    rope, rotary = rope_args(options.rope)
    lse_strides = row_strides(lse.unsqueeze(-1))
    launches.append(
        Launch(
            scores_kernel,
            (num_seqs * num_kv_heads, num_programs),
            (q, paged_words(cache), page_table, Lengths(seq_lens, options.kv_start, options.q_start), cu_seqlens, tree)
            + (options.alibi_slopes, lse, rope, out, row_strides(q), lse_strides, TokenStrides(*out.stride()), page_table.stride(0))
            + (cache.num_pages, page_table.shape[1], q.shape[0], num_kv_heads, group, q_len, num_programs, options.scale, options.limits)
            + (block_m, heads, cu_seqlens is not None, reduce, accumulate, kernel.attend, kernel.k, rotary, kernel.target),
            num_warps=config.num_warps,
            num_stages=1,
            max_registers=config.max_registers,
        )
    )
    return launches


def _check_values(
    q: torch.Tensor, cache: KVCache, page_table: torch.Tensor, seq_lens: torch.Tensor, cu_seqlens: torch.Tensor | None, options: Options
) -> None:
    """Synchronous: what only the device can see."""
    if cu_seqlens is not None:
        check_ragged("cu_seqlens", cu_seqlens, q.shape[0])
        q_lens = cu_seqlens.diff()
        if options.mask is not None and bool((q_lens > options.mask.shape[1]).any()):
            raise ShapeError(f"mask: expected at least {int(q_lens.max())} tokens, got {list(options.mask.shape)}")
    else:
        q_lens = torch.full_like(seq_lens, q.shape[1] if q.dim() == 4 else 1)
    starts = torch.zeros_like(seq_lens) if options.kv_start is None else options.kv_start
    first = seq_lens + starts - q_lens if options.q_start is None else options.q_start
    check_visible("seq_lens", page_table, seq_lens, first, first + q_lens - 1, options, cache)
    used = torch.arange(page_table.shape[1], device=page_table.device) * cache.page_size < seq_lens[:, None]
    pages = page_table[used & (page_table >= 0)]
    if pages.unique().numel() < pages.numel():
        raise RangeError("page_table: expected pages of one sequence each, got pages that come twice; fork before scores are kept")
