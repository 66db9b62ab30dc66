"""Logical keys of a paged sequence to offsets in its cache. Offsets are int64 before anything is multiplied."""

import triton
import triton.language as tl


@triton.jit
def locate(first_key, seen, table_ptr, num_pages, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages and rows in them of the keys from first_key on, and which of the seen keys exist, [BLOCK_N] each.

    `first_key` is a multiple of BLOCK_N and the tile holds a seen key. A page id outside of the cache is skipped.
    """
    if PAGE_SIZE % BLOCK_N == 0:
        # The whole tile lies in one page.
        page = tl.load(table_ptr + first_key // PAGE_SIZE)
        pages = tl.zeros([BLOCK_N], tl.int64) + page
        rows = first_key % PAGE_SIZE + tl.arange(0, BLOCK_N)
    else:
        keys = first_key + tl.arange(0, BLOCK_N)
        pages = tl.load(table_ptr + keys // PAGE_SIZE, mask=seen, other=-1).to(tl.int64)
        rows = keys % PAGE_SIZE
    seen = seen & (pages >= 0) & (pages < num_pages)
    return pages, rows.to(tl.int64), seen


@triton.jit
def offsets_of(pages, rows, strides):
    """Offsets of tokens in a paged tensor, [BLOCK_N] int64, without the head."""
    return pages * strides.page + rows * strides.token
