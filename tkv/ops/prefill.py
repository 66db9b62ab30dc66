"""prefix_prefill: attention of many new tokens of each sequence over its cached prefix and over themselves."""

from __future__ import annotations

import math
from typing import Any

import torch

from tkv.cache import KVCache
from tkv.errors import RangeError, ShapeError, UnsupportedError
from tkv.kernels.args import Attend, Lengths, PagedKV, Storage, Stored, TokenStrides
from tkv.ops.attention import (
    Kernel,
    Options,
    Scratch,
    Work,
    check_options,
    check_queries,
    check_table,
    check_visible,
    check_workspace,
    config_for,
    kernel_for,
    launch_attention,
    launch_merge,
    results_of,
    run_all,
    tree_of,
    triton_dtype,
)
from tkv.ops.checks import (
    FLOATS,
    INTEGERS,
    MAX_POSITION,
    check_cache,
    check_flag,
    check_int,
    check_ragged,
    check_tensor,
    checks_on,
)
from tkv.ops.launch import FLUSHES_FP16, Launch, arch_name, check_launchable, interpreting, num_sms
from tkv.ops.library import operator
from tkv.ops.outputs import check_outputs, outputs, traced_attention
from tkv.rope import Rope
from tkv.tune.configs import AttentionConfig, deterministic_plan, split_plan
from tkv.tune.keys import programs_of


@operator(mutates=("out", "lse", "workspace"), needs=("out",), omits=("return_lse",), traced=traced_attention)
def prefix_prefill(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache: KVCache,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
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
    max_q_len: int | None = None,
    max_seq_len: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    deterministic: bool = False,
    config: AttentionConfig | dict[str, Any] | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of any number of new tokens of each sequence over its cached prefix and, causally, over themselves.

    Sequence s has the new tokens from ``cu_seqlens[s]`` to ``cu_seqlens[s + 1]``; token i of them stands at ``q_start + i``. Scores,
    visibility by positions, and results are those of `paged_decode`. The cache holds

    - with k and v: the ``prefix_lens`` tokens before; the new tokens' keys and values come with the call, as computed, not quantised;
    - with ``k=v=None``: the new tokens too, as the logical keys from ``prefix_lens`` on (chunked prefill, mixed batches);
    - with ``k=v=None`` and ``q_start``: the ``prefix_lens`` keys that this call covers, a part of a sequence for `merge_states`.

    Sequences of few new tokens are split over their keys as in decoding, so that a batch may mix both.

    Args:
        q: ``[total_tokens, num_q_heads, head_dim]``. float32 on any cache; float16 or bfloat16 on a native cache of the same dtype, or a
            quantised cache. num_q_heads is a multiple of num_kv_heads, a group being at most 128.
        k: ``[total_tokens, num_kv_heads, head_dim]`` in q's dtype, last dimension contiguous; or None.
        v: ``[total_tokens, num_kv_heads, v_head_dim]`` likewise; None with k.
        cache: keys and values of the prefixes, in any format.
        page_table: ``[num_seqs, max_pages]`` int32 or int64, the physical page of each logical page. Entries that no row can see may be
            anything, and are not followed.
        prefix_lens: ``[num_seqs]`` int32 or int64, cached tokens of each sequence before its new ones; 0 is allowed.
        cu_seqlens: ``[num_seqs + 1]`` int32 or int64, from 0 on and never falling; a sequence may have no new tokens. Rows of q past the
            last one belong to no sequence: they see nothing.
        scale, softcap, alibi_slopes, window, sinks, sink_logits: as in `paged_decode`.
        kv_start: ``[num_seqs]`` int32 or int64, at least 0: the position of logical key j is ``kv_start + j``; 0 if None.
        q_start: ``[num_seqs]`` int32 or int64, position of each sequence's first new token; ``prefix_len + kv_start`` if None.
        pinned, rope: as in `paged_decode`; k comes unrotated too.
        mask: ``[num_seqs, M, M]`` bool, M at least the new tokens of any sequence: tree attention among them, as in `paged_decode`.
        max_q_len: a hint for the most new tokens of a sequence; total_tokens if None. Never a condition of correctness.
        max_seq_len: a hint for the most keys of a sequence, new ones included; by the width of the table if None.
        return_lse: also return the LSE.
        out: where to write: q's shape with V's head_dim, in q's dtype or float32, last dimension contiguous.
        lse: where to write the LSE: ``[*out.shape[:-1]]`` float32, any strides; implies `return_lse`.
        workspace: ``[bytes]`` uint8 or ``[bytes / 4]`` float32: memory for partial results, as in `paged_decode`.
        deterministic: each sequence's result is the same, bit for bit, alone and in any batch, with any hint and table width.
        config: launch parameters, a :class:`tkv.tune.configs.AttentionConfig` or a dict of its fields; chosen for the device if None.

    Returns:
        ``out`` ``[total_tokens, num_q_heads, v_head_dim]`` in q's dtype (or the given tensor); with ``return_lse`` or ``lse`` also ``lse``,
        ``[total_tokens, num_q_heads]`` float32, natural logarithm. Rows of no sequence are 0 and -inf.

    Raises:
        ShapeError, DTypeError, DeviceError, RangeError: the named argument does not fit.
        UnsupportedError: a combination of dtypes, or a size, that there is no kernel for.

    Example:
        >>> cache = KVCache.empty(num_pages=4, page_size=16, num_kv_heads=2, head_dim=64, format="int8/token_head")
        >>> import tkv
        >>> tkv.write_kv(torch.randn(20, 2, 64), torch.randn(20, 2, 64), cache, torch.arange(20))    # a prefix of 20 tokens
        >>> q, k, v = torch.randn(5, 8, 64), torch.randn(5, 2, 64), torch.randn(5, 2, 64)        # 2 + 3 new tokens
        >>> table = torch.tensor([[0, 1], [0, 1]])                     # of two sequences that share it
        >>> prefix_prefill(q, k, v, cache, table, torch.tensor([20, 20]), torch.tensor([0, 2, 5]), max_q_len=3).shape
        torch.Size([5, 8, 64])
    """
    check_cache(cache)
    device = cache.device
    check_tensor("q", q, ("total_tokens", "num_q_heads", cache.head_dim), FLOATS, device)
    group = check_queries(q, cache)
    if (k is None) != (v is None):
        raise UnsupportedError(f"{'k' if k is None else 'v'}: expected a tensor, as {'v' if k is None else 'k'} is one, or None for both")
    if k is not None and v is not None:
        check_tensor("k", k, (q.shape[0], cache.num_kv_heads, cache.head_dim), (q.dtype,), device)
        check_tensor("v", v, (q.shape[0], cache.num_kv_heads, cache.v_head_dim), (q.dtype,), device)
    check_table(page_table, "num_seqs", cache.page_size, device)
    num_seqs = page_table.shape[0]
    check_tensor("prefix_lens", prefix_lens, (num_seqs,), INTEGERS, device)
    check_tensor("cu_seqlens", cu_seqlens, (num_seqs + 1,), INTEGERS, device)
    options = check_options(
        cache, num_seqs, q.shape[1], min(q.shape[0], 128), scale, softcap, alibi_slopes, window, sinks, sink_logits, kv_start, q_start,
        mask, pinned, rope,
    )  # fmt: skip
    for name, hint in (("max_q_len", max_q_len), ("max_seq_len", max_seq_len)):
        if hint is not None:
            check_int(name, hint, 0)
    check_flag("deterministic", deterministic)
    if q.shape[0] * group >= MAX_POSITION:
        raise RangeError(f"q: expected total_tokens x group below 2^30, got {q.shape[0]} x {group}")
    check_outputs(q, cache, out, lse, return_lse)
    if workspace is not None:
        check_workspace(workspace, device)
    if config is not None:
        config = AttentionConfig.of(config)
    check_launchable(device)
    if checks_on():
        _check_values(q, cache, page_table, prefix_lens, cu_seqlens, options, k is None and q_start is None)

    out, lse = outputs(q, cache, out, lse, return_lse)
    if not num_seqs:
        out.zero_()
        if lse is not None:
            lse[:] = -math.inf if sink_logits is None else sink_logits
    elif q.shape[0]:
        launches = plan_prefill(
            q, None if k is None or v is None else (k, v), cache, page_table, prefix_lens, cu_seqlens, out, lse, arch_name(device),
            interpreting(), options, max_q_len=max_q_len, max_seq_len=max_seq_len, workspace=workspace, deterministic=deterministic,
            config=config,
        )  # fmt: skip
        run_all(launches, device)
    return out if lse is None else (out, lse)


def plan_prefill(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor] | None,
    cache: KVCache,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    arch: str,
    interpret: bool,
    options: Options,
    *,
    max_q_len: int | None = None,
    max_seq_len: int | None = None,
    workspace: torch.Tensor | None = None,
    deterministic: bool = False,
    config: AttentionConfig | None = None,
) -> list[Launch]:
    """The launches behind `prefix_prefill`: one, or one with some sequences split and their merge. Arguments as there, checked."""
    num_seqs, total = page_table.shape[0], q.shape[0]
    group, num_kv_heads = q.shape[1] // cache.num_kv_heads, cache.num_kv_heads
    add_new = kv is None and options.q_start is None
    longest = total if max_q_len is None else min(max(max_q_len, 1), total)
    capacity = page_table.shape[1] * cache.page_size + (total if kv is not None else 0)
    if config is None:
        most_rows = MAX_POSITION if deterministic else longest * group
        programs = programs_of("prefix_prefill", num_seqs, num_kv_heads, most_rows, total * group)
        size = programs, options.max_visible(capacity, max_seq_len, longest)
        config = config_for("prefix_prefill", q, cache, options, arch, most_rows, None if deterministic else size)
    kernel = kernel_for(q.dtype, cache, options, config, arch, interpret)
    num_tiles = total * group // config.block_m + num_seqs + 1

    scratch, row_bytes = Scratch(workspace), q.shape[1] * (cache.v_head_dim + 1) * 4
    # In steps that keep strides a multiple of 16, so that no length compiles a kernel of its own.
    step = 16 // math.gcd(16, q.shape[1])
    split_q_len = -(-max(1, config.block_m // group) // step) * step
    at_once = num_seqs
    if deterministic:
        # Cached and new keys, sink tokens and windows each end in a tile of their own.
        keys = options.max_visible(capacity, None, split_q_len) + 5 * config.block_n
        splits, tiles, at_once = deterministic_plan(config, keys, split_q_len * row_bytes, scratch.limit)
        if workspace is not None and splits * split_q_len * row_bytes > scratch.limit:
            raise ShapeError(f"workspace: deterministic needs {splits * split_q_len * row_bytes} bytes a sequence, got {scratch.limit}")
    else:
        num_programs = num_tiles * num_kv_heads
        if num_programs < num_sms(q.device):
            # Too few programs to fill the GPU: longer sequences are split too.
            split_q_len = longest
        # Eight splits of each row should find room.
        split_q_len = max(1, min(split_q_len, longest, scratch.limit // (8 * num_seqs * row_bytes)))
        split_q_len = -(-split_q_len // step) * step
        keys = options.max_visible(capacity, max_seq_len, longest)
        splits, tiles = split_plan(
            config, num_programs, keys, num_sms(q.device), num_seqs * split_q_len * row_bytes, scratch.limit
        )
    is_split = splits > 1 or deterministic
    fresh = None if kv is None else fresh_of(q.dtype, *kv, cache, kernel, arch)
    launches: list[Launch] = []
    for first in range(0, num_seqs, at_once):
        seqs = slice(first, first + at_once)
        count = min(at_once, num_seqs - first)
        rows, own = cu_seqlens[first : first + count + 1], options.of(seqs)
        parts = scratch.states((splits, count, split_q_len, q.shape[1]), cache.v_head_dim, q.device) if is_split else None
        split_tiles = -(-split_q_len * group // config.block_m)
        work = Work(
            "ragged",
            ((num_tiles + count * split_tiles * (splits - 1)) * num_kv_heads,),
            count,
            q_len=0,
            num_tiles=num_tiles,
            num_rows=total,
            # Rows behind the last sequence are written with it.
            rest_end=total if first + count == num_seqs else 0,
            add_new=add_new,
            max_splits=splits,
            min_tiles=tiles,
            split_q_len=split_q_len,
            split_tiles=split_tiles,
        )
        tree, before = tree_of(own, 0, rows)
        lengths, results = Lengths(prefix_lens[seqs], own.kv_start, own.q_start), results_of(out, lse)
        launches += before
        launches.append(
            launch_attention(
                kernel, work, q, cache, page_table[seqs], lengths, own, results, parts, tree=tree, cu_seqlens=rows, fresh=fresh
            )
        )
        if parts is not None:
            merge = launch_merge(
                parts, results, kernel.target, split_q_len, sink_logits=options.sink_logits, cu_seqlens=rows, num_rows=total
            )
            launches.append(merge)
    return launches


def fresh_of(
    q_dtype: torch.dtype, k: torch.Tensor, v: torch.Tensor, cache: KVCache, kernel: Kernel, arch: str
) -> tuple[PagedKV, Attend, Storage, Storage]:
    """New keys and values [token, head, dim] as a source of keys that is not paged, and what the kernel is compiled for there."""
    compute = torch.float32 if q_dtype == torch.float16 and arch in FLUSHES_FP16 else q_dtype
    # Native numbers of a cache are multiplied with the same pieces of q as new ones.
    dtypes = [triton_dtype(compute), triton_dtype(compute)] if not cache.is_native else [kernel.attend.DTYPE, kernel.attend.P_DTYPE]
    attend = kernel.attend._replace(PAGE_SIZE=0, DTYPE=dtypes[0], P_DTYPE=dtypes[1], V_IS_K=False, HAS_PINNED=False, ONE_POSITION=False)
    sources, constants = [], []
    for x, storage in ((k, kernel.k), (v, kernel.v)):
        token, head = x.stride()[:2]
        sources.append(Stored(x, TokenStrides(token, token, head), None, TokenStrides(0, 0, 0)))
        # In the pieces that the accumulator has: both planes of 8-bit words put together, quarters of int4 apart.
        merged = 2 if storage.PLANES == 2 else 1
        constants.append(
            storage._replace(
                CODE="native",
                SCALE="none",
                GROUP=1,
                ASYMMETRIC=False,
                FOLDED=True,
                PLANES=storage.PLANES // merged,
                WIDTH=storage.WIDTH * merged,
                REST=storage.REST * merged,
                ALIGN=math.gcd(16, token, head),
            )
        )
    return PagedKV(*sources), attend, constants[0], constants[1]


def _check_values(
    q: torch.Tensor, cache: KVCache, page_table: torch.Tensor, prefix_lens: torch.Tensor, cu_seqlens: torch.Tensor, options: Options,
    add_new: bool,
) -> None:  # fmt: skip
    """Synchronous: what only the device can see."""
    check_ragged("cu_seqlens", cu_seqlens, q.shape[0])
    q_lens = cu_seqlens.diff()
    if options.mask is not None and bool((q_lens > options.mask.shape[1]).any()):
        raise ShapeError(f"mask: expected at least {int(q_lens.max())} tokens, got {list(options.mask.shape)}")
    starts = torch.zeros_like(prefix_lens) if options.kv_start is None else options.kv_start
    first = prefix_lens + starts if options.q_start is None else options.q_start
    lens = prefix_lens + q_lens if add_new else prefix_lens
    check_visible("prefix_lens", page_table, lens, first, first + q_lens - 1, options, cache)
