"""kivi_decode and kivi_prefill: attention over sequences whose old keys are in one cache and whose newest are in another."""

from __future__ import annotations

from typing import Any

import torch

from tkv.cache import KVCache
from tkv.errors import UnsupportedError
from tkv.ops.attention import check_table, launch_merge, results_of
from tkv.ops.checks import FLOATS, INTEGERS, check_cache, check_tensor
from tkv.ops.decode import paged_decode
from tkv.ops.launch import arch_name, interpreting, target_for
from tkv.ops.library import operator
from tkv.ops.outputs import check_outputs, outputs, traced_attention
from tkv.ops.prefill import prefix_prefill


@operator(mutates=("out", "lse", "workspace"), needs=("out",), omits=("return_lse",), traced=traced_attention)
def kivi_decode(
    q: torch.Tensor,
    cache: KVCache,
    tail: KVCache,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    tail_page_table: torch.Tensor,
    tail_lens: torch.Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    window: int | None = None,
    sinks: int = 0,
    sink_logits: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    max_seq_len: int | None = None,
    max_tail_len: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    deterministic: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of up to 64 new query rows of each sequence over its first keys in one cache and all others in a second.

    A sequence's keys 0 to ``seq_len - 1`` are in `cache`, the ``tail_len`` after them, the new tokens' last, in `tail`; query row i
    stands at ``seq_len + tail_len - q_len + i``. It is `paged_decode` of each part, with ``q_start``, and with ``kv_start = seq_lens``
    for the tail, joined as by `merge_states`: the same as one `paged_decode` over all keys. Nothing is read back from the device.

    Args:
        q: ``[num_seqs, num_q_heads, head_dim]``, or ``[num_seqs, q_len, num_q_heads, head_dim]``, in a dtype that both caches take.
        cache: old keys and values, in any format.
        tail: the others, in any format; its heads and dims are those of `cache`, its page_size need not be.
        page_table: ``[num_seqs, max_pages]`` int32 or int64, pages of `cache`.
        seq_lens: ``[num_seqs]`` int32 or int64, keys in them; 0 is allowed, and no multiple of the page size is needed.
        tail_page_table: ``[num_seqs, max_tail_pages]`` int32 or int64, pages of `tail`.
        tail_lens: ``[num_seqs]`` int32 or int64, keys in them, the new tokens included.
        scale, softcap, alibi_slopes, window, sinks, sink_logits, mask: as in `paged_decode`, by positions in the whole sequence.
        max_seq_len, max_tail_len: hints for the longest of `seq_lens` and of `tail_lens`, to size the launches.
        return_lse: also return the LSE.
        out: where to write: q's shape with V's head_dim, in q's dtype or float32, last dimension contiguous.
        lse: where to write the LSE: ``[*out.shape[:-1]]`` float32, any strides; implies `return_lse`.
        workspace, deterministic: as in `paged_decode`, for both parts.

    Returns:
        ``out`` in q's dtype (or the given tensor); with ``return_lse`` or ``lse`` also ``lse``, float32, out's shape without the last
        dimension, natural logarithm.

    Raises:
        ShapeError, DTypeError, DeviceError, RangeError: the named argument does not fit.
        UnsupportedError: a combination of dtypes, or a size, that there is no kernel for; or the caches' heads differ.

    Example:
        >>> import tkv
        >>> cache = KVCache.empty(num_pages=4, page_size=16, num_kv_heads=2, head_dim=64, format="int8/token_head")
        >>> tail = KVCache.empty(num_pages=4, page_size=16, num_kv_heads=2, head_dim=64, format="fp16")
        >>> k, v = torch.randn(2, 35, 2, 64, dtype=torch.float16)             # 32 old tokens, and 3 in the tail
        >>> tkv.write_kv(k[:32], v[:32], cache, torch.arange(32))
        >>> tkv.write_kv(k[32:], v[32:], tail, torch.arange(3))
        >>> q = torch.randn(1, 8, 64, dtype=torch.float16)
        >>> kivi_decode(q, cache, tail, torch.tensor([[0, 1]]), torch.tensor([32]), torch.tensor([[0]]), torch.tensor([3])).shape
        torch.Size([1, 8, 64])
    """
    _check(q, cache, tail, seq_lens, tail_page_table, tail_lens, return_lse, out, lse)
    options: dict[str, Any] = dict(
        scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, window=window, sinks=sinks, mask=mask, workspace=workspace,
        deterministic=deterministic,
    )  # fmt: skip
    q_start = seq_lens + tail_lens - (q.shape[1] if q.dim() == 4 else 1)
    parts, lses = _parts(q, cache)
    paged_decode(q, cache, page_table, seq_lens, q_start=q_start, max_seq_len=max_seq_len, out=parts[0], lse=lses[0], **options)
    paged_decode(
        q, tail, tail_page_table, tail_lens, q_start=q_start, kv_start=seq_lens, max_seq_len=max_tail_len, out=parts[1], lse=lses[1],
        sink_logits=sink_logits, **options,
    )  # fmt: skip
    return _join(parts, lses, *outputs(q, cache, out, lse, return_lse))


@operator(mutates=("out", "lse", "workspace"), needs=("out",), omits=("return_lse",), traced=traced_attention)
def kivi_prefill(
    q: torch.Tensor,
    cache: KVCache,
    tail: KVCache,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    tail_page_table: torch.Tensor,
    tail_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    window: int | None = None,
    sinks: int = 0,
    sink_logits: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    max_q_len: int | None = None,
    max_seq_len: int | None = None,
    max_tail_len: int | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    deterministic: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of any number of new tokens of each sequence, which are in its tail already, over its keys in two caches.

    As `kivi_decode`, with ragged queries: it is `prefix_prefill` with ``k=v=None`` of each part, over the ``seq_lens`` keys in `cache`
    with ``q_start``, and over the tail with ``kv_start = seq_lens``, joined as by `merge_states`.

    Args:
        q: ``[total_tokens, num_q_heads, head_dim]``, in a dtype that both caches take.
        cache, tail, page_table, seq_lens, tail_page_table, tail_lens: as in `kivi_decode`.
        cu_seqlens: ``[num_seqs + 1]`` int32 or int64, where each sequence's new tokens start in `q`, as in `prefix_prefill`.
        scale, softcap, alibi_slopes, window, sinks, sink_logits, mask: as in `prefix_prefill`, by positions in the whole sequence.
        max_q_len, max_seq_len, max_tail_len: hints for the most new tokens of a sequence and the longest of `seq_lens` and `tail_lens`.
        return_lse, out, lse, workspace, deterministic: as in `prefix_prefill`.

    Returns:
        ``out`` ``[total_tokens, num_q_heads, v_head_dim]`` in q's dtype (or the given tensor); with ``return_lse`` or ``lse`` also ``lse``,
        ``[total_tokens, num_q_heads]`` float32, natural logarithm. Rows of no sequence are 0 and -inf.

    Raises:
        ShapeError, DTypeError, DeviceError, RangeError, UnsupportedError: as for `kivi_decode`.

    Example:
        >>> import tkv
        >>> cache = KVCache.empty(num_pages=4, page_size=16, num_kv_heads=2, head_dim=64, format="int8/token_head")
        >>> tail = KVCache.empty(num_pages=4, page_size=16, num_kv_heads=2, head_dim=64, format="fp16")
        >>> k, v = torch.randn(2, 40, 2, 64, dtype=torch.float16)             # 32 old tokens, 3 in the tail and 5 new ones
        >>> tkv.write_kv(k[:32], v[:32], cache, torch.arange(32))
        >>> tkv.write_kv(k[32:], v[32:], tail, torch.arange(8))
        >>> q, new = torch.randn(5, 8, 64, dtype=torch.float16), torch.tensor([0, 5])
        >>> kivi_prefill(q, cache, tail, torch.tensor([[0, 1]]), torch.tensor([32]), torch.tensor([[0]]), torch.tensor([8]), new).shape
        torch.Size([5, 8, 64])
    """
    _check(q, cache, tail, seq_lens, tail_page_table, tail_lens, return_lse, out, lse, ragged=True)
    check_tensor("cu_seqlens", cu_seqlens, (seq_lens.shape[0] + 1,), INTEGERS, cache.device)
    options: dict[str, Any] = dict(
        scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, window=window, sinks=sinks, mask=mask, workspace=workspace,
        deterministic=deterministic, max_q_len=max_q_len,
    )  # fmt: skip
    prefix_lens = tail_lens - cu_seqlens.diff()
    parts, lses = _parts(q, cache)
    prefix_prefill(
        q, None, None, cache, page_table, seq_lens, cu_seqlens, q_start=seq_lens + prefix_lens, max_seq_len=max_seq_len,
        out=parts[0], lse=lses[0], **options,
    )  # fmt: skip
    prefix_prefill(
        q, None, None, tail, tail_page_table, prefix_lens, cu_seqlens, kv_start=seq_lens, max_seq_len=max_tail_len, out=parts[1],
        lse=lses[1], sink_logits=sink_logits, **options,
    )  # fmt: skip
    return _join(parts, lses, *outputs(q, cache, out, lse, return_lse))


def _check(
    q: torch.Tensor, cache: KVCache, tail: KVCache, seq_lens: torch.Tensor, tail_page_table: torch.Tensor, tail_lens: torch.Tensor,
    return_lse: bool, out: torch.Tensor | None, lse: torch.Tensor | None, *, ragged: bool = False,
) -> None:  # fmt: skip
    """What the calls of the parts do not check, or would name otherwise."""
    check_cache(cache)
    check_cache(tail, "tail")
    for name in ("num_kv_heads", "head_dim", "v_head_dim"):
        if getattr(tail, name) != getattr(cache, name):
            raise UnsupportedError(f"tail: expected the {name} of cache, {getattr(cache, name)}, got {getattr(tail, name)}")
    if ragged:
        check_tensor("q", q, ("total_tokens", "num_q_heads", cache.head_dim), FLOATS, cache.device)
        check_tensor("seq_lens", seq_lens, ("num_seqs",), INTEGERS, cache.device)
    else:
        rows = ("num_seqs", "q_len") if isinstance(q, torch.Tensor) and q.dim() == 4 else ("num_seqs",)
        check_tensor("q", q, (*rows, "num_q_heads", cache.head_dim), FLOATS, cache.device)
        check_tensor("seq_lens", seq_lens, (q.shape[0],), INTEGERS, cache.device)
    check_table(tail_page_table, seq_lens.shape[0], tail.page_size, cache.device, "tail_page_table")
    check_tensor("tail_lens", tail_lens, tuple(seq_lens.shape), INTEGERS, cache.device)
    check_outputs(q, cache, out, lse, return_lse)


def _parts(q: torch.Tensor, cache: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for the out and the LSE of both parts."""
    shape = (2, *q.shape[:-1])
    return (
        torch.empty(*shape, cache.v_head_dim, dtype=torch.float32, device=q.device),
        torch.empty(shape, dtype=torch.float32, device=q.device),
    )


def _join(
    parts: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Merge the parts into out and lse."""
    if lses.numel():
        states, results = (parts, lses), (out, lse)
        if out.dim() == 3:
            # As rows of a single sequence.
            states, results = (parts[:, None], lses[:, None]), (out[None], None if lse is None else lse[None])
        target = target_for(arch_name(out.device), interpreting())
        launch_merge(states, results_of(*results), target, results[0].shape[1]).run(out.device)
    return out if lse is None else (out, lse)
