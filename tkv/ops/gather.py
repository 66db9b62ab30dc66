"""gather_window: cached tokens back from their pages, decoded and dense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tkv.cache import KVCache
from tkv.errors import ShapeError, UnsupportedError
from tkv.kernels.args import NewStrides, Rows
from tkv.ops.attention import check_table
from tkv.ops.checks import (
    FLOATS,
    INTEGERS,
    check_cache,
    check_flag,
    check_int,
    check_pages,
    check_pinned,
    check_rope,
    check_tensor,
    checks_on,
)
from tkv.ops.copy import scale_words
from tkv.ops.launch import (
    Launch,
    arch_name,
    check_launchable,
    interpreting,
    padded,
    paged_bytes,
    rope_args,
    row_storages,
    target_for,
)
from tkv.ops.library import operator
from tkv.rope import Rope


def _fake(
    cache: KVCache, page_table: torch.Tensor, window: int | None, sinks: int, dense: bool, dtype: torch.dtype | None, dequantize: bool,
    **rest: Any,
) -> list[torch.Tensor]:  # fmt: skip
    shape = _shape(cache, page_table, window, sinks, dense)
    numbers, scales = _buffers(cache, shape, dtype, dequantize)
    positions = torch.empty(shape, dtype=torch.int32, device=cache.device)
    cu_lens = torch.empty(page_table.shape[0] + 1, dtype=torch.int32, device=cache.device)
    return [*numbers, positions, cu_lens, *(scale for scale in scales if scale is not None)]


def _traced(call: Callable[[dict[str, Any]], list[torch.Tensor]], values: dict[str, Any]) -> tuple[Any, ...]:
    results = call(values)
    if values["dequantize"]:
        return tuple(results)
    cache, of_rows = values["cache"], iter(results[4:])
    scales = ((cache.k_format, cache.k_scale), (cache.v_format, cache.v_scale))
    return *results[:4], *(next(of_rows) if kind.is_dynamic else scale for kind, scale in scales)


@operator(fake=_fake, traced=_traced)
def gather_window(
    cache: KVCache,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    window: int | None,
    sinks: int = 0,
    dense: bool = False,
    kv_start: torch.Tensor | None = None,
    pinned: int = 0,
    dtype: torch.dtype | None = None,
    dequantize: bool = True,
    rope: Rope | None = None,
) -> tuple[Any, ...]:
    """Keys and values of each sequence's sink tokens and last `window` tokens, decoded or as they are stored.

    Of each sequence the keys at positions below `sinks` and those at the last `window` positions, up to its last key's, are given, in
    order and each once. All codes decode right: NaN stays NaN. Nothing is read back from the device, so the buffers have a size that only
    shapes decide: ``rows = min(sinks + window, table width * page_size)`` a sequence.

    Args:
        cache: K and V, of any formats.
        page_table: ``[num_seqs, max_pages]`` int32 or int64.
        seq_lens: ``[num_seqs]`` int32 or int64, keys of each sequence that the table covers.
        window: how many of the last tokens; 0 for none, None for all.
        sinks: how many of the first positions.
        dense: ``[num_seqs, rows, ...]``, each sequence's tokens first; else all sequences' tokens one after the other.
        kv_start: ``[num_seqs]`` int32 or int64: logical key j stands at position ``j + kv_start``; 0 if None.
        pinned: how many of the first logical keys stand at position j all the same, whole pages.
        dtype: of k and v: float32, float16 or bfloat16; that of the cache if None and K and V are native alike, else float32.
        dequantize: False gives numbers as they are stored, with their scales.
        rope: keys in the cache are not rotated; those that are returned are, in float32: by their place in what is kept of their sequence
            (StreamingLLM's positions inside of the cache; the tables have a row for each), with ``window=None`` by their position.

    Returns:
        k ``[num_seqs * rows, num_kv_heads, head_dim]`` and v likewise, or ``[num_seqs, rows, ...]`` with `dense`; positions
        ``[num_seqs * rows]`` or ``[num_seqs, rows]`` int32; cu_lens ``[num_seqs + 1]`` int32: sequence s has
        ``cu_lens[s + 1] - cu_lens[s]`` tokens, and without `dense` they begin at row ``cu_lens[s]``. Rows that are left over are 0 with
        position -1; so are the numbers of a page that is not in the cache. With ``dequantize=False`` k and v have the dtype and the last
        dimension of the cache's tensors, and k_scale and v_scale follow: of ``token_head`` and ``group`` formats the scales of the rows
        (``[num_seqs * rows, num_kv_heads]``, of groups ``[.., groups]``, with minima ``[.., 2]``; 0 in rows that are left over), of static
        ones the cache's own, None of native ones.

    Raises:
        ShapeError, DTypeError, DeviceError, RangeError: the named argument does not fit.
        UnsupportedError: a dtype that numbers cannot be given in; with ``dequantize=False`` a dtype, a rope, or keys whose scales belong to
            pages (``page_channel``).

    Example:
        >>> k = torch.arange(8.0).view(2, 4, 1, 1).repeat(1, 1, 1, 16)            # token t of page p is 4 p + t
        >>> cache = KVCache(k, -k)
        >>> k, v, positions, cu_lens = gather_window(cache, torch.tensor([[1, 0]]), torch.tensor([7]), window=2, sinks=1)
        >>> k[:, 0, 0].tolist(), positions.tolist(), cu_lens.tolist()
        ([4.0, 1.0, 2.0], [0, 5, 6], [0, 3])
    """
    check_cache(cache)
    num_seqs = page_table.shape[0] if isinstance(page_table, torch.Tensor) and page_table.dim() else "num_seqs"
    check_table(page_table, num_seqs, cache.page_size, cache.device)
    check_tensor("seq_lens", seq_lens, (num_seqs,), INTEGERS, cache.device)
    if window is not None:
        window = check_int("window", window, 0)
    sinks = check_int("sinks", sinks, 0)
    check_flag("dense", dense)
    if kv_start is not None:
        check_tensor("kv_start", kv_start, (num_seqs,), INTEGERS, cache.device)
    pinned = check_pinned(pinned, cache.page_size)
    if rope is not None:
        check_rope(rope, cache)
        if window is not None and rope.num_rows < min(sinks + window, page_table.shape[1] * cache.page_size):
            raise ShapeError(f"rope: expected tables of sinks + window = {sinks + window} rows or more, got {rope.num_rows}")
    if not check_flag("dequantize", dequantize):
        for name, given in (("dtype", dtype), ("rope", rope)):
            if given is not None:
                raise UnsupportedError(f"{name}: numbers are given as they are stored with dequantize=False; pass None")
        if cache.k_format.scale == "page_channel":
            raise UnsupportedError(f"dequantize: the scales of {cache.k_format} belong to pages, not to tokens; pass True")
    if dtype is not None and dtype not in FLOATS:
        raise UnsupportedError(f"dtype: expected {', '.join(map(str, FLOATS))}, got {dtype}")
    check_launchable(cache.device)
    if checks_on():
        last = seq_lens - 1 if kv_start is None else seq_lens - 1 + torch.where(seq_lens > pinned, kv_start, 0)
        # A window of 0 and no sinks: no position is at least 2^30 away.
        first, seen = (last, max(window or 0, 0)) if window is not None else (last, None)
        check_pages("seq_lens", page_table, seq_lens, kv_start, first, last, seen, sinks, cache, pinned=pinned)

    capacity = page_table.shape[1] * cache.page_size
    shape = _shape(cache, page_table, window, sinks, dense)
    lens = _kept(seq_lens, kv_start, pinned, capacity, window, sinks)
    cu_lens = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    positions = torch.empty(shape, dtype=torch.int32, device=cache.device)
    numbers, scales = _buffers(cache, shape, dtype, dequantize)
    if positions.numel():
        plan_gather(
            cache, page_table, seq_lens, numbers, scales, positions, cu_lens, arch_name(cache.device), interpreting(),
            window=window, sinks=sinks, kv_start=kv_start, pinned=pinned, dequantize=dequantize, rope=rope,
        ).run(cache.device)  # fmt: skip
    if dequantize:
        return *numbers, positions, cu_lens
    static = zip((cache.k_format, cache.v_format), (cache.k_scale, cache.v_scale), scales, strict=True)
    return *numbers, positions, cu_lens, *(scale if kind.is_static else own for kind, scale, own in static)


def _shape(cache: KVCache, page_table: torch.Tensor, window: int | None, sinks: int, dense: bool) -> tuple[int, ...]:
    """The rows that are given."""
    num_seqs, rows = page_table.shape[0], page_table.shape[1] * cache.page_size
    rows = rows if window is None else min(sinks + window, rows)
    return (num_seqs, rows) if dense else (num_seqs * rows,)


def _buffers(
    cache: KVCache, shape: tuple[int, ...], dtype: torch.dtype | None, dequantize: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Memory for rows of k and v, and for their scales where rows have some."""
    if dtype is None:
        dtype = cache.k.dtype if cache.is_native and cache.k.dtype == cache.v.dtype else torch.float32
    numbers: list[torch.Tensor] = []
    scales: list[torch.Tensor | None] = []
    sides = ((cache.k, cache.k_scale, cache.k_format, cache.head_dim), (cache.v, cache.v_scale, cache.v_format, cache.v_head_dim))
    for data, scale, kind, dim in sides:
        size, own = (dim, dtype) if dequantize else (data.shape[3], data.dtype)
        numbers.append(torch.empty(*shape, cache.num_kv_heads, size, dtype=own, device=cache.device))
        of_rows = None
        if not dequantize and kind.is_dynamic and scale is not None:
            of_rows = torch.empty(*shape, *scale.shape[2:], dtype=scale.dtype, device=cache.device)
        scales.append(of_rows)
    return numbers, scales


def _kept(
    seq_lens: torch.Tensor, kv_start: torch.Tensor | None, pinned: int, capacity: int, window: int | None, sinks: int
) -> torch.Tensor:
    """How many keys of each sequence are given."""
    lens = seq_lens.clamp(0, capacity)
    if window is None:
        return lens
    if kv_start is None:
        sink_end = lens.clamp_max(sinks)
        return sink_end + (lens - sink_end).clamp_max(window)
    behind = lens + torch.where(lens > pinned, kv_start, 0)
    sink_end = (sinks - kv_start).clamp_min(min(sinks, pinned)).minimum(lens)
    first = behind - window
    begin = torch.maximum(first.clamp_max(pinned), first - kv_start).maximum(sink_end).minimum(lens)
    return sink_end + lens - begin


def plan_gather(
    cache: KVCache, page_table: torch.Tensor, seq_lens: torch.Tensor, numbers: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor | None], positions: torch.Tensor, cu_lens: torch.Tensor, arch: str, interpret: bool = False, *,
    window: int | None, sinks: int, kv_start: torch.Tensor | None = None, pinned: int = 0, dequantize: bool = True,
    rope: Rope | None = None,
) -> Launch:  # fmt: skip
    """The launch behind `gather_window`. `numbers` are its k and v, `scales` theirs; they and `positions` are filled."""
    from tkv.kernels.gather import gather_kernel

    # 8 numbers a thread.
    block_r = max(1, 1024 // padded(max(cache.head_dim, cache.v_head_dim)))
    num_seqs, num_rows = page_table.shape[0], positions.numel()
    outs, counts = [], []
    for data, scale, words, kind in zip(numbers, scales, cache.bytes, (cache.k_format, cache.v_format), strict=True):
        if not dequantize and data.dtype != words.dtype:
            data = data.view(words.dtype)
        scale_strides = NewStrides(0, 0)
        if scale is not None:
            # A scale and its minimum are one word.
            scale = scale.view(torch.int32)[..., 0] if kind.is_asymmetric else scale
            scale_strides = NewStrides(*scale.flatten(0, positions.dim() - 1).stride()[:2])
        outs.append(Rows(data, NewStrides(*data.stride()[-3:-1]), scale, scale_strides))
        counts.append(0 if dequantize else scale_words(scale, kind))
    tables, rotary = rope_args(rope)
    return Launch(
        gather_kernel,
        (-(-num_rows * cache.num_kv_heads // block_r),),
        (paged_bytes(cache), page_table, seq_lens, cu_lens, *outs, positions, kv_start, tables, page_table.stride(0), num_seqs, num_rows)
        + (num_rows // num_seqs, num_seqs.bit_length() + 1, cache.num_pages, page_table.shape[1], cache.num_kv_heads, window or 0, sinks)
        + (pinned, cache.page_size, block_r, positions.dim() == 2, window is None, not dequantize, *counts, padded(max(counts)))
        + (*row_storages(cache), rotary, target_for(arch, interpret)),
        num_warps=4,
        num_stages=1,
    )
