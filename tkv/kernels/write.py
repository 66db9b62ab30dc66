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
    x_ptr, x_strides, stored, tokens, heads, pages, page_rows, mask,
    BLOCK_D: tl.constexpr, STORAGE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Encode rows, each a head of a token, and store them with their scales. All but x are [BLOCK_R]."""
    dims = tl.arange(0, BLOCK_D)
    in_row = mask[:, None] & (dims < STORAGE.DIM)[None, :]
    x = tl.load(x_ptr + (tokens * x_strides.token + heads * x_strides.head)[:, None] + dims[None, :], mask=in_row, other=0.0)
    x = x.to(tl.float32)  # [BLOCK_R, BLOCK_D]
    rows = stored.ptr + (offsets_of(pages, page_rows, stored.strides) + heads * stored.strides.head)
    if STORAGE.SCALE == "none":
        tl.store(rows[:, None] + dims[None, :], round_to(x, stored.ptr.dtype.element_ty, TARGET), mask=in_row)
    else:
        if STORAGE.SCALE == "tensor":
            scales = tl.full([heads.shape[0]], 0.0, tl.float32) + tl.load(stored.scale_ptr)
        else:
            tl.static_assert(STORAGE.SCALE == "token_head")
            scales = tl.div_rn(largest_finite(x), tl.full([heads.shape[0]], codec.largest_code(STORAGE), tl.float32))
            scale_rows = stored.scale_ptr + (offsets_of(pages, page_rows, stored.scale_strides) + heads * stored.scale_strides.head)
            tl.store(scale_rows, scales, mask=mask)
        scales = tl.where(scales > 0, scales, 1.0)
        codes = codec.encode(tl.div_rn(x, tl.broadcast_to(scales[:, None], x.shape)), STORAGE)
        tl.store(rows[:, None] + dims[None, :], codes, mask=in_row)


@triton.jit(do_not_specialize=["slot_stride", "num_rows", "num_slots"])
def write_kernel(
    k_ptr, v_ptr, cache, slot_mapping_ptr,
    k_strides, v_strides, slot_stride,
    num_rows, num_slots, num_kv_heads,
    PAGE_SIZE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_R rows of K and of V, a row being one head of one token. Slots outside of the cache are skipped."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    tokens = rows // num_kv_heads
    heads = rows % num_kv_heads
    slots = tl.load(slot_mapping_ptr + tokens * slot_stride, mask=rows < num_rows, other=-1).to(tl.int64)
    mask = (slots >= 0) & (slots < num_slots)
    pages = slots // PAGE_SIZE
    page_rows = slots % PAGE_SIZE
    write_rows(k_ptr, k_strides, cache.k, tokens, heads, pages, page_rows, mask, BLOCK_D, K, TARGET)
    write_rows(v_ptr, v_strides, cache.v, tokens, heads, pages, page_rows, mask, BLOCK_D, V, TARGET)
