"""Read the tokens in the windows of sequences back from their pages, decoded."""

import triton
import triton.language as tl

from tkv.kernels.tiles.store import read_rows


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


@triton.jit(do_not_specialize=["num_seqs", "num_rows", "longest", "steps", "num_pages", "table_stride", "table_width", "window", "sinks"])
def gather_kernel(
    cache, page_table_ptr, lens_ptr, cu_lens_ptr, k_out_ptr, v_out_ptr, positions_ptr, kv_start_ptr,
    table_stride, k_out_strides, v_out_strides,
    num_seqs, num_rows, longest, steps, num_pages, table_width, num_kv_heads, window, sinks,
    PAGE_SIZE: tl.constexpr, BLOCK_R: tl.constexpr, DENSE: tl.constexpr, ALL: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_R rows of K and of V, a row being one head of one token of the output.

    Sequence s has the tokens of its first `sinks` and last `window` positions, each once. Packed ones begin at ``cu_lens[s]``; DENSE
    ones have `longest` rows each. What is left over becomes 0 with position -1.
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
    keys, num_kept, kv_start = kept_keys(index, seqs, lens_ptr, kv_start_ptr, table_width * PAGE_SIZE, window, sinks, ALL)
    kept = mask & (index < num_kept)
    pages = tl.load(page_table_ptr + seqs * table_stride + keys // PAGE_SIZE, mask=kept, other=-1).to(tl.int64)
    exists = kept & (pages >= 0) & (pages < num_pages)
    page_rows = keys % PAGE_SIZE
    tl.store(positions_ptr + tokens, tl.where(kept, keys + kv_start, -1).to(tl.int32), mask=mask & (heads == 0))
    k_rows = k_out_ptr + (tokens * k_out_strides.token + heads * k_out_strides.head)
    v_rows = v_out_ptr + (tokens * v_out_strides.token + heads * v_out_strides.head)
    read_rows(k_rows, cache.k, heads, pages, page_rows, mask, exists, K, TARGET)
    read_rows(v_rows, cache.v, heads, pages, page_rows, mask, exists, V, TARGET)


@triton.jit
def kept_keys(index, seqs, lens_ptr, kv_start_ptr, capacity, window, sinks, ALL: tl.constexpr):
    """(logical key at each place of what is kept of its sequence, number of keys that are kept, position of key 0), int64."""
    lens = tl.minimum(tl.maximum(tl.load(lens_ptr + seqs).to(tl.int64), 0), capacity)
    kv_start = lens * 0
    if kv_start_ptr is not None:
        kv_start = tl.load(kv_start_ptr + seqs).to(tl.int64)
    if ALL:
        return index, lens, kv_start
    else:
        sink_end = tl.minimum(tl.maximum(sinks - kv_start, 0), lens)
        begin = tl.maximum(lens - window, sink_end)
        return tl.where(index < sink_end, index, index - sink_end + begin), sink_end + lens - begin, kv_start
