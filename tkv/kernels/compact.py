"""Move the keys that stay in a cache to the first places of their sequence, as they are stored."""

import triton
import triton.language as tl

from tkv.kernels.tiles.paging import offsets_of


@triton.jit
def find_slots(keys, exists, page_table_ptr, num_keys, num_pages, PAGE_SIZE: tl.constexpr):
    """(pages, rows in them, which of the keys have a slot), int64 but the last; `num_keys` is what the table has room for."""
    exists = exists & (keys >= 0) & (keys < num_keys)
    pages = tl.load(page_table_ptr + keys // PAGE_SIZE, mask=exists, other=-1).to(tl.int64)
    return pages, keys % PAGE_SIZE, exists & (pages >= 0) & (pages < num_pages)


@triton.jit
def move_rows(
    row_ptr, keep_ptr, src_table_ptr, dst_table_ptr,
    strides, num_kept, num_src_keys, num_dst_keys, num_pages, words, in_row,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BY_PAGE: tl.constexpr,
):  # fmt: skip
    """Move some words of the keys that one sequence and head keep; those BY_PAGE go with the first key of a page."""
    for first in range(0, num_kept, BLOCK_N):
        places = first + tl.arange(0, BLOCK_N).to(tl.int64)
        exists = places < num_kept
        if BY_PAGE:
            exists = exists & (places % PAGE_SIZE == 0)
        keys = tl.load(keep_ptr + places, mask=exists, other=-1).to(tl.int64)
        src_pages, src_rows, in_src = find_slots(keys, exists, src_table_ptr, num_src_keys, num_pages, PAGE_SIZE)
        dst_pages, dst_rows, in_dst = find_slots(places, exists, dst_table_ptr, num_dst_keys, num_pages, PAGE_SIZE)
        moves = in_src & in_dst & ((src_pages != dst_pages) | (src_rows != dst_rows))
        mask = moves[:, None] & in_row[None, :]
        src_rows = row_ptr + offsets_of(src_pages, src_rows, strides)
        dst_rows = row_ptr + offsets_of(dst_pages, dst_rows, strides)
        numbers = tl.load(src_rows[:, None] + words[None, :], mask=mask)
        # A key moves down or stays, so later blocks read nothing that this one overwrites, but its own warps do.
        tl.debug_barrier()
        tl.store(dst_rows[:, None] + words[None, :], numbers, mask=mask)


@triton.jit(do_not_specialize=["src_table_stride", "dst_table_stride", "keep_stride", "max_kept", "src_width", "dst_width", "num_pages"])
def compact_kernel(
    ptrs, keep_ptr, keep_lens_ptr, src_table_ptr, dst_table_ptr,
    strides, keep_stride, keep_head_stride, src_table_stride, dst_table_stride,
    max_kept, src_width, dst_width, num_pages,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr, BLOCKS: tl.constexpr, FIRST_PARTS: tl.constexpr, BY_PAGE: tl.constexpr,
):  # fmt: skip
    """One program: a block of the words of one of the tensors, of one sequence and KV head, for every key that is kept.

    `ptrs` and `strides` are of the tensors, in words; their rows have WORDS, cut in BLOCKS of them for programs from FIRST_PARTS on.
    """
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    num_src_keys = src_width.to(tl.int64) * PAGE_SIZE
    num_dst_keys = dst_width.to(tl.int64) * PAGE_SIZE
    num_kept = tl.minimum(tl.load(keep_lens_ptr + seq).to(tl.int64), tl.minimum(max_kept, num_dst_keys))
    for i in tl.static_range(len(WORDS)):
        if (part >= FIRST_PARTS[i]) & (part < FIRST_PARTS[i + 1]):
            words = (part - FIRST_PARTS[i]) * BLOCKS[i] + tl.arange(0, BLOCKS[i])
            move_rows(
                ptrs[i] + head * strides[i].head, keep_ptr + (seq * keep_stride + head * keep_head_stride),
                src_table_ptr + seq * src_table_stride, dst_table_ptr + seq * dst_table_stride,
                strides[i], num_kept, num_src_keys, num_dst_keys, num_pages, words, words < WORDS[i],
                PAGE_SIZE, BLOCK_N, BY_PAGE[i],
            )  # fmt: skip
