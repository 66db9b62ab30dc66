"""Read the tokens in the windows of sequences back from their pages, decoded or as they are stored."""

import triton
import triton.language as tl

from tkv.kernels.tiles.paging import offsets_of
from tkv.kernels.tiles.store import copy_words, read_rows
from tkv.kernels.tiles.visibility import keys_before, positions_of


@triton.jit
def sequences_of(rows, cu_lens_ptr, num_seqs, steps):
    """The sequence of each row of a packed buffer, `num_seqs` for those behind the last one. `steps` is at least log2(num_seqs + 1)."""
    low = rows * 0
    high = low + num_seqs
    for _ in range(steps):
        middle = (low + high + 1) // 2
        starts = tl.load(cu_lens_ptr + middle).to(tl.int64) <= rows
        low = tl.where(starts, middle, low)
        high = tl.where(starts, high, middle - 1)
    return low


@triton.jit
def kept_keys(index, seqs, lens_ptr, kv_start_ptr, capacity, window, sinks, pinned, ALL: tl.constexpr):
    """(logical key at each place of what is kept of its sequence, number of keys that are kept, position of the key), int64."""
    lens = tl.minimum(tl.maximum(tl.load(lens_ptr + seqs).to(tl.int64), 0), capacity)
    kv_start = lens * 0
    if kv_start_ptr is not None:
        kv_start = tl.load(kv_start_ptr + seqs).to(tl.int64)
    if ALL:
        keys, count = index, lens
    else:
        behind = positions_of(lens - 1, kv_start, pinned, True) + 1
        sink_end = tl.minimum(tl.maximum(keys_before(sinks, kv_start, pinned, True), 0), lens)
        begin = tl.minimum(tl.maximum(keys_before(behind - window, kv_start, pinned, True), sink_end), lens)
        keys, count = tl.where(index < sink_end, index, index - sink_end + begin), sink_end + lens - begin
    return keys, count, positions_of(keys, kv_start, pinned, True)


_CHANGING = ["num_seqs", "num_rows", "longest", "steps", "num_pages", "table_stride", "table_width", "window", "sinks", "pinned"]


@triton.jit(do_not_specialize=_CHANGING)
def gather_kernel(
    cache, page_table_ptr, lens_ptr, cu_lens_ptr, k_out, v_out, positions_ptr, kv_start_ptr, rope,
    table_stride, num_seqs, num_rows, longest, steps, num_pages, table_width, num_kv_heads, window, sinks, pinned,
    PAGE_SIZE: tl.constexpr, BLOCK_R: tl.constexpr, DENSE: tl.constexpr, ALL: tl.constexpr, AS_STORED: tl.constexpr,
    K_SCALES: tl.constexpr, V_SCALES: tl.constexpr, BLOCK_S: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, ROPE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_R rows of K and of V, a row being one head of one token of the output.

    Sequence s has its keys at the first `sinks` and at the last `window` positions, each once. Packed ones begin at ``cu_lens[s]``; DENSE
    ones have `longest` rows each. What is left over becomes 0 with position -1. AS_STORED: stored elements and their scales.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    tokens = rows // num_kv_heads
    heads = rows % num_kv_heads
    mask = tokens < num_rows
    if DENSE:
        seqs = tl.minimum(tokens // longest, num_seqs - 1)
        index = tokens % longest
    else:
        seqs = sequences_of(tl.where(mask, tokens, 0), cu_lens_ptr, num_seqs, steps)
        # Behind the last sequence stands what no sequence has.
        index = tl.where(seqs < num_seqs, tokens - tl.load(cu_lens_ptr + seqs).to(tl.int64), 1073741824)
        seqs = tl.minimum(seqs, num_seqs - 1)
    keys, num_kept, positions = kept_keys(index, seqs, lens_ptr, kv_start_ptr, table_width * PAGE_SIZE, window, sinks, pinned, ALL)
    kept = mask & (index < num_kept)
    pages = tl.load(page_table_ptr + seqs * table_stride + keys // PAGE_SIZE, mask=kept, other=-1).to(tl.int64)
    exists = kept & (pages >= 0) & (pages < num_pages)
    page_rows = keys % PAGE_SIZE
    tl.store(positions_ptr + tokens, tl.where(kept, positions, -1).to(tl.int32), mask=mask & (heads == 0))
    k_rows = k_out.ptr + (tokens * k_out.strides.token + heads * k_out.strides.head)
    v_rows = v_out.ptr + (tokens * v_out.strides.token + heads * v_out.strides.head)
    if AS_STORED:
        copy_row(k_rows, k_out, cache.k, tokens, heads, pages, page_rows, mask, exists, K_SCALES, BLOCK_S, K)
        copy_row(v_rows, v_out, cache.v, tokens, heads, pages, page_rows, mask, exists, V_SCALES, BLOCK_S, V)
    else:
        # Inside of a window a key is rotated by its place in what is kept.
        turns = tl.where(kept, positions if ALL else index, 0).to(tl.int32)
        read_rows(k_rows, cache.k, heads, pages, page_rows, mask, exists, turns, rope, K, ROPE.DIM > 0, ROPE, TARGET)
        read_rows(v_rows, cache.v, heads, pages, page_rows, mask, exists, turns, rope, V, False, ROPE, TARGET)


@triton.jit
def copy_row(
    out_rows, out, stored, tokens, heads, pages, page_rows, mask, exists, SCALES: tl.constexpr, BLOCK_S: tl.constexpr, STORAGE: tl.constexpr
):
    """Rows as they are stored, with the SCALES words of scales that belong to each."""
    src = stored.ptr + (offsets_of(pages, page_rows, stored.strides) + heads * stored.strides.head)
    copy_words(src, out_rows, mask, exists, STORAGE.DIM // STORAGE.PLANES, STORAGE.WIDTH)
    if SCALES > 0:
        src = stored.scale_ptr + (offsets_of(pages, page_rows, stored.scale_strides) + heads * stored.scale_strides.head)
        dst = out.scale_ptr + (tokens * out.scale_strides.token + heads * out.scale_strides.head)
        copy_words(src, dst, mask, exists, SCALES, BLOCK_S)
