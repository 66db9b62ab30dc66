"""paged_decode: attention of a few new query rows of each sequence over its paged keys."""

from __future__ import annotations

import math
from typing import Any

import torch

from tkv.cache import KVCache
from tkv.errors import RangeError, ShapeError, UnsupportedError
from tkv.kernels.args import Attend, Limits, RowStrides
from tkv.ops.checks import (
    FLOATS,
    INTEGERS,
    MAX_POSITION,
    check_cache,
    check_flag,
    check_int,
    check_number,
    check_pages,
    check_tensor,
    checks_on,
)
from tkv.ops.launch import (
    FLUSHES_FP16,
    Launch,
    arch_name,
    check_launchable,
    interpreting,
    num_sms,
    padded,
    paged_words,
    storages,
    target_for,
)
from tkv.tune.configs import DecodeConfig, default_decode, deterministic_plan, split_plan

MAX_Q_LEN = 64
MAX_GROUP = 128


def paged_decode(
    q: torch.Tensor,
    cache: KVCache,
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
    max_seq_len: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    deterministic: bool = False,
    config: DecodeConfig | dict[str, Any] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of up to 64 new query rows of each sequence over its keys in a paged cache.

    Query row i at position ``p = q_start + i`` and logical key j at position ``kv_start + j`` have the score
    ``x = softcap(scale * q.k) - slope * (p - position of j)``, with ``softcap(x) = softcap * tanh(x / softcap)``. A key is visible if
    its position is at most p and, with a window, ``p - position < window`` or ``position < sinks``. ``out = sum e^x v / sum e^x`` over
    the visible keys, ``lse = ln sum e^x``; where nothing is visible, 0 and -inf. By ``kv_start`` and ``q_start`` a call may cover a
    part of a sequence; `merge_states` joins the parts. Positions lie below 2^30. The two NaN codes of fp8 may be read as +-480.

    Args:
        q: ``[num_seqs, num_q_heads, head_dim]``, or ``[num_seqs, q_len, num_q_heads, head_dim]`` with q_len from 1 to 64, the newest
            tokens in order. float32 on any cache; float16 or bfloat16 on a native cache of the same dtype, or a quantised cache.
            num_q_heads is a multiple of num_kv_heads; query head h reads KV head ``h // group``, a group being at most 128.
        cache: K and V.
        page_table: ``[num_seqs, max_pages]`` int32 or int64, the physical page of each logical page. Entries that no row can see may be
            anything, and are not followed.
        seq_lens: ``[num_seqs]`` int32 or int64, keys of each sequence that the table covers, the new tokens included; 0 is allowed.
        scale: factor of the scores, 0 or from 1e-30 to 1e30; ``1 / sqrt(head_dim)`` if None.
        softcap: bound of the scores, from 1e-30 to 1e30; None for no bound.
        alibi_slopes: ``[num_q_heads]`` float32.
        window: number of visible keys including the token itself, at least 1; None for all.
        sinks: the first `sinks` positions stay visible outside of the window.
        sink_logits: ``[num_q_heads]`` float32, float16 or bfloat16, finite or -inf: a learned sink, ``e^sink_logit`` joins the
            denominator and the LSE.
            Of several parts that are to be merged, exactly one gets it.
        kv_start: ``[num_seqs]`` int32 or int64, position of each sequence's logical key 0; 0 if None.
        q_start: ``[num_seqs]`` int32 or int64, position of query row 0; ``seq_len + kv_start - q_len`` if None.
        max_seq_len: a hint for the longest of `seq_lens`, to size the launch; the width of the table if None. Never a condition of
            correctness.
        return_lse: also return the LSE.
        out: where to write: q's shape with V's head_dim, in q's dtype or float32, last dimension contiguous.
        deterministic: each sequence's result is the same, bit for bit, alone and in any batch, with any hint and table width. Splits are
            then of one length, and a batch whose partial results would need too much memory runs in several launches.
        config: launch parameters, a :class:`tkv.tune.configs.DecodeConfig` or a dict of its fields; chosen for the device if None.

    Returns:
        ``out`` in q's dtype (or the given tensor); with ``return_lse`` also ``lse``, float32, out's shape without the last dimension,
        natural logarithm.

    Raises:
        ShapeError, DTypeError, DeviceError, RangeError: the named argument does not fit.
        UnsupportedError: a combination of dtypes, or a size, that there is no kernel for.

    Example:
        >>> cache = KVCache.empty(num_pages=4, page_size=16, num_kv_heads=2, head_dim=64, format="fp16")
        >>> kv = torch.randn(2, 5, 2, 64, dtype=torch.float16)
        >>> cache.k[3, :5], cache.v[3, :5] = kv
        >>> q = torch.randn(1, 8, 64, dtype=torch.float16)             # one sequence of 5 tokens, in page 3
        >>> out, lse = paged_decode(q, cache, torch.tensor([[3]]), torch.tensor([5]), return_lse=True)
        >>> out.shape, lse.shape
        (torch.Size([1, 8, 64]), torch.Size([1, 8]))
    """
    check_cache(cache)
    device = cache.device
    rows = ("num_seqs", "q_len") if isinstance(q, torch.Tensor) and q.dim() == 4 else ("num_seqs",)
    check_tensor("q", q, (*rows, "num_q_heads", cache.head_dim), FLOATS, device)
    if cache.is_native and q.dtype not in (torch.float32, cache.k.dtype):
        raise UnsupportedError(f"q: a {cache.k_format} cache needs q in {cache.k.dtype} or torch.float32, got {q.dtype}")
    num_seqs, num_q_heads = q.shape[0], q.shape[-2]
    q_len = q.shape[1] if q.dim() == 4 else 1
    if not 1 <= q_len <= MAX_Q_LEN:
        raise UnsupportedError(f"q: expected q_len from 1 to {MAX_Q_LEN}, got {q_len}")
    group = num_q_heads // cache.num_kv_heads
    if num_q_heads < 1 or num_q_heads % cache.num_kv_heads or group > MAX_GROUP:
        raise UnsupportedError(
            f"q: expected a multiple of num_kv_heads ({cache.num_kv_heads}) heads, at most {MAX_GROUP} for each, got {num_q_heads}"
        )
    check_tensor("page_table", page_table, (num_seqs, "max_pages"), INTEGERS, device)
    check_tensor("seq_lens", seq_lens, (num_seqs,), INTEGERS, device)
    for name, starts in (("kv_start", kv_start), ("q_start", q_start)):
        if starts is not None:
            check_tensor(name, starts, (num_seqs,), INTEGERS, device)
    if alibi_slopes is not None:
        check_tensor("alibi_slopes", alibi_slopes, (num_q_heads,), (torch.float32,), device)
    if sink_logits is not None:
        check_tensor("sink_logits", sink_logits, (num_q_heads,), FLOATS, device)
    scale = 1.0 / math.sqrt(cache.head_dim) if scale is None else check_number("scale", scale, zero=True)
    if softcap is not None:
        softcap = check_number("softcap", softcap, zero=False)
    if window is not None:
        window = check_int("window", window, 1)
    sinks = check_int("sinks", sinks, 0)
    if max_seq_len is not None:
        check_int("max_seq_len", max_seq_len, 0)
    check_flag("return_lse", return_lse)
    check_flag("deterministic", deterministic)
    if out is not None:
        check_tensor("out", out, (*q.shape[:-1], cache.v_head_dim), tuple({q.dtype, torch.float32}), device)
        if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
            raise ShapeError(f"out: rows must not share memory, got strides {out.stride()}")
    if config is not None:
        config = DecodeConfig.of(config)
    if page_table.shape[1] * cache.page_size > MAX_POSITION:
        raise RangeError(f"page_table: expected at most 2^30 keys a sequence, got {page_table.shape[1]} pages of {cache.page_size}")
    check_launchable(device)
    if checks_on():
        check_pages(page_table, seq_lens, kv_start, q_start, q_len, window, sinks, cache)

    if out is None:
        out = torch.empty(*q.shape[:-1], cache.v_head_dim, dtype=q.dtype, device=device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=device) if return_lse else None
    if num_seqs:
        launches = plan_decode(
            q, cache, page_table, seq_lens, out, lse, arch_name(device), interpreting(), scale=scale, softcap=softcap,
            alibi_slopes=alibi_slopes, window=window, sinks=sinks, sink_logits=sink_logits, kv_start=kv_start, q_start=q_start,
            max_seq_len=max_seq_len, deterministic=deterministic, config=config,
        )  # fmt: skip
        for launch in launches:
            launch.run(device)
    return out if lse is None else (out, lse)


def plan_decode(
    q: torch.Tensor,
    cache: KVCache,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    arch: str,
    interpret: bool = False,
    *,
    scale: float,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    window: int | None = None,
    sinks: int = 0,
    sink_logits: torch.Tensor | None = None,
    kv_start: torch.Tensor | None = None,
    q_start: torch.Tensor | None = None,
    max_seq_len: int | None = None,
    deterministic: bool = False,
    config: DecodeConfig | None = None,
) -> list[Launch]:
    """The launches behind `paged_decode`: one, or a split one and its reduction, several times if need be. Arguments as there, checked."""
    from tkv.kernels.decode import decode_kernel, reduce_kernel

    if q.dim() == 3:
        q, out, lse = q.unsqueeze(1), out.unsqueeze(1), None if lse is None else lse.unsqueeze(1)
    num_seqs, q_len, num_q_heads, _ = q.shape
    group = num_q_heads // cache.num_kv_heads
    compute = compute_dtype(q.dtype, cache, arch)
    if config is None:
        config = default_decode(
            arch, max(cache.head_dim, cache.v_head_dim), 8 * cache.k.element_size(), 8 * compute.itemsize, q_len * group, cache.page_size,
            plain=window is None and softcap is None and alibi_slopes is None,
        )  # fmt: skip

    row_tiles = -(-q_len * group // config.block_m)
    num_programs = num_seqs * cache.num_kv_heads * row_tiles
    capacity, seq_bytes = page_table.shape[1] * cache.page_size, q_len * num_q_heads * (cache.v_head_dim + 1) * 4
    if deterministic:
        splits, tiles, at_once = deterministic_plan(config, max_visible(capacity, None, q_len, window, sinks), seq_bytes)
        if num_seqs > at_once:
            launches = []
            for first in range(0, num_seqs, at_once):
                part = slice(first, first + at_once)
                launches += plan_decode(
                    q[part], cache, page_table[part], seq_lens[part], out[part], None if lse is None else lse[part], arch, interpret,
                    scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, window=window, sinks=sinks, sink_logits=sink_logits,
                    kv_start=None if kv_start is None else kv_start[part], q_start=None if q_start is None else q_start[part],
                    deterministic=True, config=config,
                )  # fmt: skip
            return launches
    else:
        keys = max_visible(capacity, max_seq_len, q_len, window, sinks)
        splits, tiles = split_plan(config, num_programs, keys, num_sms(q.device), num_seqs * seq_bytes)
    # One rounding more or less would show, so a deterministic result always goes through the reduction.
    is_split = splits > 1 or deterministic
    k_storage, v_storage = storages(cache)
    target = target_for(arch, interpret)
    limits = Limits(softcap=softcap or 0.0, window=window or 0, sinks=sinks)
    attend = Attend(
        PAGE_SIZE=cache.page_size,
        BLOCK_N=config.block_n,
        DTYPE=triton_dtype(compute),
        LIFT=15 if compute == torch.float16 else 0,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=softcap is not None,
        HAS_ALIBI=alibi_slopes is not None,
        ONE_POSITION=q_len == 1,
    )
    if not is_split:
        parts, part_lse = out.unsqueeze(0), None if lse is None else lse.unsqueeze(0)
    else:
        # Splits come first, so that the other strides do not change with their number.
        parts = torch.empty(splits, num_seqs, q_len, num_q_heads, cache.v_head_dim, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(splits, num_seqs, q_len, num_q_heads, dtype=torch.float32, device=q.device)
    split_stride, *part_strides = parts.stride()[:4]
    lse_split_stride, *part_lse_strides = (0, 0, 0, 0) if part_lse is None else part_lse.stride()
    of_parts = (RowStrides(*part_strides), split_stride, RowStrides(*part_lse_strides), lse_split_stride)
    decode = Launch(
        decode_kernel,
        (num_programs, splits),
        (q, paged_words(cache), page_table, seq_lens, kv_start, q_start, alibi_slopes, sink_logits, parts, part_lse)
        + (RowStrides(*q.stride()[:3]), page_table.stride(0), *of_parts)
        + (cache.num_pages, page_table.shape[1], cache.num_kv_heads, group, q_len, row_tiles, splits, tiles, scale, limits)
        + (config.block_m, is_split, attend, k_storage, v_storage, target),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        max_registers=config.max_registers,
    )
    if not is_split:
        return [decode]
    block_d = padded(cache.v_head_dim)
    reduce = Launch(
        reduce_kernel,
        (num_seqs * q_len * num_q_heads,),
        (parts, part_lse, seq_lens, kv_start, q_start, sink_logits, out, lse)
        + (*of_parts, RowStrides(*out.stride()[:3]), RowStrides(*(lse.stride() if lse is not None else (0, 0, 0))))
        + (page_table.shape[1], num_q_heads, q_len, splits, tiles, limits)
        + (cache.v_head_dim, block_d, max(1, min(16, 2048 // block_d)), cache.page_size, config.block_n, window is not None, target),
        num_warps=1 if block_d <= 128 else 2,
        num_stages=1,
    )
    return [decode, reduce]


def compute_dtype(q_dtype: torch.dtype, cache: KVCache, arch: str) -> torch.dtype:
    """The dtype of the dots' operands: float32 for a float32 q, q's own on a native cache, float16 on a quantised one.

    A native float16 cache may hold subnormal numbers: float32 where the matrix unit would flush them.
    """
    if q_dtype == torch.float32 or (cache.k.dtype == torch.float16 and arch in FLUSHES_FP16):
        return torch.float32
    return q_dtype if cache.is_native else torch.float16


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name of a float dtype."""
    import triton.language as tl

    return {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]


def max_visible(capacity: int, max_seq_len: int | None, q_len: int, window: int | None, sinks: int) -> int:
    """Most keys of a sequence that are visited, as far as the hint says."""
    keys = capacity if max_seq_len is None else min(capacity, max_seq_len)
    return keys if window is None else min(keys, window + q_len - 1 + sinks)
