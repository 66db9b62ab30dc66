"""Logical keys of a sequence to offsets in their tensors. Offsets are int64 before anything is multiplied."""

import triton
import triton.language as tl


@triton.jit
def locate(first_key, seen, where, num_pages, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of the keys from first_key on ([BLOCK_N], or [] for all), their rows there and which of the seen ones exist, [BLOCK_N].

    `first_key` is a multiple of BLOCK_N and the tile holds a seen key. A page id outside of the cache is skipped. `where` points to the
    sequence's row of the page table; with PAGE_SIZE 0 the keys are not paged, and `where` is the row of key 0.
    """
    if PAGE_SIZE == 0:
        rows = first_key + tl.arange(0, BLOCK_N)
        return where, rows.to(tl.int64), seen
    else:
        if PAGE_SIZE % BLOCK_N == 0:
            # The whole tile lies in one page.
            pages = tl.load(where + first_key // PAGE_SIZE)
            rows = first_key % PAGE_SIZE + tl.arange(0, BLOCK_N)
            exists = tl.zeros([BLOCK_N], pages.dtype) + pages
        else:
            keys = first_key + tl.arange(0, BLOCK_N)
            pages = tl.load(where + keys // PAGE_SIZE, mask=seen, other=-1)
            rows = keys % PAGE_SIZE
            exists = pages
        return pages.to(tl.int64), rows.to(tl.int64), seen & (exists >= 0) & (exists < num_pages)


@triton.jit
def locate_all(first_key, where, num_pages, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The same for a tile of which every key is seen: (pages, rows, 1 where a page is missing, for which page 0 stands in)."""
    keys = first_key + tl.arange(0, BLOCK_N)
    if PAGE_SIZE == 0:
        return where, keys.to(tl.int64), none_missing(PAGE_SIZE, BLOCK_N)
    else:
        if PAGE_SIZE % BLOCK_N == 0:
            pages = tl.load(where + first_key // PAGE_SIZE)
            rows = first_key % PAGE_SIZE + tl.arange(0, BLOCK_N)
        else:
            pages = tl.load(where + keys // PAGE_SIZE)
            rows = keys % PAGE_SIZE
        exists = (pages >= 0) & (pages < num_pages)
        return tl.where(exists, pages, 0).to(tl.int64), rows.to(tl.int64), tl.where(exists, 0, 1)


@triton.jit
def none_missing(PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """What `locate_all` says of a tile whose pages all exist."""
    if PAGE_SIZE % BLOCK_N == 0:
        return tl.full([], 0, tl.int32)
    else:
        return tl.zeros([BLOCK_N], tl.int32)


@triton.jit
def offsets_of(pages, rows, strides):
    """Offsets of tokens in a paged tensor, [BLOCK_N] int64, without the head."""
    return pages * strides.page + rows * strides.token


@triton.jit
def load_pair(src_pages_ptr, dst_pages_ptr, src_pages_stride, dst_pages_stride, src_num_pages, dst_num_pages):
    """(source page, destination page, whether both exist) of a program's pair."""
    pair = tl.program_id(0).to(tl.int64)
    src_page = tl.load(src_pages_ptr + pair * src_pages_stride).to(tl.int64)
    dst_page = tl.load(dst_pages_ptr + pair * dst_pages_stride).to(tl.int64)
    return src_page, dst_page, (src_page >= 0) & (src_page < src_num_pages) & (dst_page >= 0) & (dst_page < dst_num_pages)
