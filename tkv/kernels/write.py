"""Write new keys and values into their slots, quantised on the way."""

import triton
import triton.language as tl

from tkv.kernels.tiles.store import write_rows


@triton.jit(do_not_specialize=["slot_stride", "num_rows", "num_slots"])
def write_kernel(
    k_ptr, v_ptr, cache, slot_mapping_ptr,
    k_strides, v_strides, slot_stride,
    num_rows, num_slots, num_kv_heads,
    PAGE_SIZE: tl.constexpr, BLOCK_R: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, V_IS_K: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_R rows of K and of V, a row being one head of one token. Slots outside of the cache are skipped."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    tokens = rows // num_kv_heads
    heads = rows % num_kv_heads
    slots = tl.load(slot_mapping_ptr + tokens * slot_stride, mask=rows < num_rows, other=-1).to(tl.int64)
    mask = (slots >= 0) & (slots < num_slots)
    pages = slots // PAGE_SIZE
    page_rows = slots % PAGE_SIZE
    write_rows(k_ptr + (tokens * k_strides.token + heads * k_strides.head), cache.k, heads, pages, page_rows, mask, K, TARGET)
    if not V_IS_K:
        write_rows(v_ptr + (tokens * v_strides.token + heads * v_strides.head), cache.v, heads, pages, page_rows, mask, V, TARGET)
