"""Copy whole pages, numbers and scales as they are stored."""

import triton
import triton.language as tl

from tkv.kernels.tiles.paging import load_pair, offsets_of


@triton.jit
def copy_rows(
    src, dst, src_page, dst_page, tokens, heads, mask,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, SCALES: tl.constexpr, BLOCK_S: tl.constexpr, BY_PAGE: tl.constexpr,
):  # fmt: skip
    """Rows, each a head of a token of a page, [BLOCK_R]: DIM elements and SCALES words of scales; those of a page go with its token 0."""
    dims = tl.arange(0, BLOCK_D)
    in_row = mask[:, None] & (dims < DIM)[None, :]
    src_rows = src.ptr + (offsets_of(src_page, tokens, src.strides) + heads * src.strides.head)
    dst_rows = dst.ptr + (offsets_of(dst_page, tokens, dst.strides) + heads * dst.strides.head)
    tl.store(dst_rows[:, None] + dims[None, :], tl.load(src_rows[:, None] + dims[None, :], mask=in_row), mask=in_row)
    if SCALES > 0:
        words = tl.arange(0, BLOCK_S)
        if BY_PAGE:
            mask = mask & (tokens == 0)
        in_scales = mask[:, None] & (words < SCALES)[None, :]
        src_scales = src.scale_ptr + (offsets_of(src_page, tokens, src.scale_strides) + heads * src.scale_strides.head)
        dst_scales = dst.scale_ptr + (offsets_of(dst_page, tokens, dst.scale_strides) + heads * dst.scale_strides.head)
        tl.store(dst_scales[:, None] + words[None, :], tl.load(src_scales[:, None] + words[None, :], mask=in_scales), mask=in_scales)


@triton.jit(do_not_specialize=["src_num_pages", "dst_num_pages"])
def copy_kernel(
    src, dst, src_pages_ptr, dst_pages_ptr,
    src_pages_stride, dst_pages_stride,
    src_num_pages, dst_num_pages, num_kv_heads,
    PAGE_SIZE: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
    K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, BLOCK_S: tl.constexpr, BY_PAGE: tl.constexpr, WITH_V: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_R rows of K and V of one pair of pages. A pair with a page outside of its cache is skipped."""
    src_page, dst_page, exists = load_pair(
        src_pages_ptr, dst_pages_ptr, src_pages_stride, dst_pages_stride, src_num_pages, dst_num_pages
    )
    if not exists:
        return
    rows = tl.program_id(1).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    tokens = rows // num_kv_heads
    heads = rows % num_kv_heads
    mask = tokens < PAGE_SIZE
    copy_rows(src.k, dst.k, src_page, dst_page, tokens, heads, mask, K_DIM, BLOCK_D, K_SCALES, BLOCK_S, BY_PAGE)
    if WITH_V:
        copy_rows(src.v, dst.v, src_page, dst_page, tokens, heads, mask, V_DIM, BLOCK_D, V_SCALES, BLOCK_S, False)
