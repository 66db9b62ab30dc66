"""write_kv: quantize-on-write."""

from __future__ import annotations

import torch

from tkv.cache import KVCache
from tkv.errors import RangeError, UnsupportedError
from tkv.kernels.args import NewStrides
from tkv.ops.checks import FLOATS, INTEGERS, check_cache, check_rope, check_slots, check_tensor, check_writable, checks_on
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


@operator(mutates=("cache",))
def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    cache: KVCache,
    slot_mapping: torch.Tensor,
    *,
    rope: Rope | None = None,
    positions: torch.Tensor | None = None,
) -> None:
    """Store new keys and values in their slots, encoded in the cache's format.

    A number ``x`` is stored as ``encode(x / scale)``: rounded to nearest even, subnormals kept, saturating, Inf too; NaN stays NaN in
    fp8 and is taken for 0 in integers. Static scales are applied; dynamic ones are computed over the finite numbers of the token's head
    (``token_head``) or of each group of its dims, and are written with the data: the largest magnitude over the largest code. int4
    has a minimum too: ``encode((x - minimum) / scale)`` with ``scale = (maximum - minimum) / 15``, both rounded to float16 before. Native
    formats are cast.

    Args:
        k: ``[num_tokens, num_kv_heads, head_dim]`` float32, float16 or bfloat16, last dimension contiguous, other strides free.
        v: ``[num_tokens, num_kv_heads, v_head_dim]`` likewise; not read where the cache's V is a view of its K.
        cache: where to; its slots are written in place.
        slot_mapping: ``[num_tokens]`` int32 or int64, ``page * page_size + offset`` of each token. -1 skips the token, and so does
            any slot outside of the cache. A slot that comes twice gets one of the two, which one is not defined.
        rope: keys are rotated by it in float32 before they are encoded, in the same pass; needs `positions`.
        positions: ``[num_tokens]`` int32 or int64, rows of the tables, from 0 on; past the last row the last one counts.

    Raises:
        ShapeError, DTypeError, DeviceError: the named argument does not fit.
        UnsupportedError: the cache's keys have scales of pages (``page_channel``); one of ``rope`` and ``positions`` without the other;
            ``rope`` where V is a view of K, which would be rotated with it.
        RangeError: under ``TKV_CHECK=1``: a slot is out of range or comes twice, or a position is not in the tables.

    Example:
        >>> cache = KVCache.empty(4, 16, num_kv_heads=2, head_dim=64, format="int8/token_head")
        >>> k, v = torch.randn(3, 2, 64), torch.randn(3, 2, 64)
        >>> write_kv(k, v, cache, slot_mapping=torch.tensor([5, 6, -1]))
        >>> bool((cache.k[0, 5] * cache.k_scale[0, 5, :, None] - k[0]).abs().max() < 0.02)
        True
    """
    check_cache(cache)
    check_tensor("k", k, ("num_tokens", cache.num_kv_heads, cache.head_dim), FLOATS, cache.device)
    check_tensor("v", v, (k.shape[0], cache.num_kv_heads, cache.v_head_dim), FLOATS, cache.device)
    check_writable(cache)
    if cache.k_format.scale == "page_channel":
        raise UnsupportedError(f"cache: {cache.k_format} is filled a page at a time; write to a native cache and use tkv.quantize_pages")
    check_tensor("slot_mapping", slot_mapping, (k.shape[0],), INTEGERS, cache.device, contiguous_last=False)
    if (rope is None) != (positions is None):
        raise UnsupportedError("positions: expected with rope, and rope with positions; got one of the two")
    if rope is not None and positions is not None:
        check_rope(rope, cache)
        check_tensor("positions", positions, (k.shape[0],), INTEGERS, cache.device, contiguous_last=False)
        if cache.v_is_k:
            raise UnsupportedError("rope: v is a view of k and would be rotated with it; rotate k before, and pass None")
    check_launchable(cache.device)
    if checks_on():
        check_slots("slot_mapping", slot_mapping, cache.num_slots)
        if rope is not None and positions is not None:
            wrong = (slot_mapping >= 0) & ((positions < 0) | (positions >= rope.num_rows))
            if bool(wrong.any()):
                at = int(wrong.nonzero()[0])
                raise RangeError(f"positions: expected 0 to {rope.num_rows - 1}, rope's rows, got {int(positions[at])} at [{at}]")
    if k.shape[0] and cache.num_slots:
        plan_write(k, v, cache, slot_mapping, arch_name(cache.device), interpreting(), rope=rope, positions=positions).run(cache.device)


def plan_write(
    k: torch.Tensor, v: torch.Tensor, cache: KVCache, slot_mapping: torch.Tensor, arch: str, interpret: bool = False, *,
    rope: Rope | None = None, positions: torch.Tensor | None = None,
) -> Launch:  # fmt: skip
    """The launch behind `write_kv`."""
    from tkv.kernels.write import write_kernel

    # 16 numbers a thread; of formats with scales of groups 8, and as many scales.
    numbers = 1024 if "group" in (cache.k_format.scale, cache.v_format.scale) or rope is not None else 2048
    block_r = max(1, numbers // padded(max(cache.head_dim, cache.v_head_dim)))
    num_rows = k.shape[0] * cache.num_kv_heads
    tables, rotary = rope_args(rope)
    return Launch(
        write_kernel,
        (-(-num_rows // block_r),),
        (k, v, paged_bytes(cache), slot_mapping, positions, tables, NewStrides(*k.stride()[:2]), NewStrides(*v.stride()[:2]))
        + (slot_mapping.stride(0), 0 if positions is None else positions.stride(0), num_rows, cache.num_slots, cache.num_kv_heads)
        + (cache.page_size, block_r, *row_storages(cache), cache.v_is_k, rotary, target_for(arch, interpret)),
        num_warps=4,
        num_stages=1,
    )
