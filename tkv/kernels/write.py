"""Write new keys and values into their slots, rotated and quantised on the way."""

import triton
import triton.language as tl

from tkv.kernels.tiles.store import write_rows


@triton.jit(do_not_specialize=["slot_stride", "position_stride", "num_rows", "num_slots"])
def write_kernel(
    k_ptr, v_ptr, cache, slot_mapping_ptr, positions_ptr, rope,
    k_strides, v_strides, slot_stride, position_stride,
    num_rows, num_slots, num_kv_heads,
    PAGE_SIZE: tl.constexpr, BLOCK_R: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, V_IS_K: tl.constexpr, ROPE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_R rows of K and of V, a row being one head of one token. Slots outside of the cache are skipped."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    tokens = rows // num_kv_heads
    heads = rows % num_kv_heads
    slots = tl.load(slot_mapping_ptr + tokens * slot_stride, mask=rows < num_rows, other=-1).to(tl.int64)
    mask = (slots >= 0) & (slots < num_slots)
    pages = slots // PAGE_SIZE
    page_rows = slots % PAGE_SIZE
    turns = page_rows
    if ROPE.DIM > 0:
        turns = tl.load(positions_ptr + tokens * position_stride, mask=mask, other=0)
        turns = tl.minimum(tl.maximum(turns, 0), rope.num_rows).to(tl.int32)
    k_rows = k_ptr + (tokens * k_strides.token + heads * k_strides.head)
    write_rows(k_rows, cache.k, heads, pages, page_rows, mask, turns, rope, K, ROPE.DIM > 0, ROPE, TARGET)
    if not V_IS_K:
        v_rows = v_ptr + (tokens * v_strides.token + heads * v_strides.head)
        write_rows(v_rows, cache.v, heads, pages, page_rows, mask, turns, rope, V, False, ROPE, TARGET)
