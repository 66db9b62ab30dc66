"""Write new keys and values into their slots, quantised on the way."""

import triton
import triton.language as tl

from tkv.kernels.tiles import codec
from tkv.kernels.tiles.dots import round_to
from tkv.kernels.tiles.paging import offsets_of


@triton.jit
def largest_finite(x):
    """Largest finite magnitude of each row, so that one bad value does not change the others."""
    magnitude = tl.abs(x)
    return tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), axis=1)


@triton.jit
def write_rows(
    x_ptr, x_strides, stored, token, page, row, heads, in_heads,
    BLOCK_D: tl.constexpr, STORAGE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Encode the heads of one token, [BLOCK_H, BLOCK_D], and store them with their scales."""
    dims = tl.arange(0, BLOCK_D)
    mask = in_heads[:, None] & (dims < STORAGE.DIM)[None, :]
    x = tl.load(x_ptr + token * x_strides.token + (heads * x_strides.head)[:, None] + dims[None, :], mask=mask, other=0.0)
    x = x.to(tl.float32)
    target = stored.ptr + offsets_of(page, row, stored.strides) + (heads * stored.strides.head)[:, None] + dims[None, :]
    if STORAGE.SCALE == "none":
        tl.store(target, round_to(x, stored.ptr.dtype.element_ty, TARGET), mask=mask)
    else:
        if STORAGE.SCALE == "tensor":
            scale = tl.load(stored.scale_ptr) + tl.zeros([heads.shape[0]], tl.float32)
        else:
            tl.static_assert(STORAGE.SCALE == "token_head")
            scale = tl.div_rn(largest_finite(x), tl.full([heads.shape[0]], codec.largest_code(STORAGE), tl.float32))
            scale_target = stored.scale_ptr + offsets_of(page, row, stored.scale_strides) + heads * stored.scale_strides.head
            tl.store(scale_target, scale, mask=in_heads)
        scale = tl.where(scale > 0, scale, 1.0)
        tl.store(target, codec.encode(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)), STORAGE), mask=mask)


@triton.jit
def write_kernel(
    k_ptr, v_ptr, cache, slot_mapping_ptr,
    k_strides, v_strides, slot_stride,
    num_slots, num_kv_heads,
    PAGE_SIZE: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_H heads of K and V of one token. Slots outside of the cache are skipped."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token * slot_stride).to(tl.int64)
    if slot < 0 or slot >= num_slots:
        return
    page = slot // PAGE_SIZE
    row = slot % PAGE_SIZE
    heads = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    in_heads = heads < num_kv_heads
    write_rows(k_ptr, k_strides, cache.k, token, page, row, heads, in_heads, BLOCK_D, K, TARGET)
    write_rows(v_ptr, v_strides, cache.v, token, page, row, heads, in_heads, BLOCK_D, V, TARGET)
