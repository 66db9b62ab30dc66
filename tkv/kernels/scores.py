"""The attention mass of cached keys: what H2O and its family rank tokens by."""

import triton
import triton.language as tl

from tkv.kernels.attention import load_starts, turns_of
from tkv.kernels.tiles.attend import score_tile, score_unit
from tkv.kernels.tiles.paging import locate, offsets_of
from tkv.kernels.tiles.rows import between, load_query, row_offsets
from tkv.kernels.tiles.softmax import LOG2_E
from tkv.kernels.tiles.visibility import rows_of_tree, seen_keys, span_of_tree, view_of


@triton.jit
def reduce_rows(p, REDUCE: tl.constexpr, GROUP: tl.constexpr):
    """Probabilities [rows x GROUP, keys] to one number a key: over the heads of a group as REDUCE says, then summed over rows."""
    if REDUCE == "max":
        ROWS: tl.constexpr = p.shape[0] // GROUP
        return tl.sum(tl.max(tl.reshape(p, [ROWS, GROUP, p.shape[1]]), axis=1), axis=0)
    else:
        return tl.sum(p, axis=0)


@triton.jit
def mass_of(
    q_row_ptrs, in_rows, positions, slopes, lse, tree, cache, table_row, num_pages, head, kv_start, bounds, scale, limits, rope, first_key,
    REDUCE: tl.constexpr, GROUP: tl.constexpr, PART: tl.constexpr, ATTEND: tl.constexpr, K: tl.constexpr, ROPE: tl.constexpr,
    TARGET: tl.constexpr,
):  # fmt: skip
    """(what a block of rows gives to the keys from `first_key` on, which of them some row sees), [BLOCK_N]."""
    turns, base = turns_of(positions, bounds, kv_start, limits, PART, ATTEND)
    q, q_sum, raw_scale = load_query(q_row_ptrs, in_rows, scale, cache.k, head, turns, rope, ATTEND.DTYPE, K, ROPE, TARGET)
    x, _, seen, _, _, _, _ = score_tile(
        q, q_sum, raw_scale, positions, slopes, tree, cache, table_row, num_pages, head, kv_start, bounds, limits, (rope, base), first_key,
        True, ATTEND, K, ROPE, TARGET,
    )  # fmt: skip
    # A row that sees nothing has no mass to give; its LSE is -inf.
    lse = tl.where(lse == -float("inf"), float("inf"), lse)
    p = tl.exp2(x * score_unit(raw_scale, ATTEND)[:, None] - (lse * LOG2_E)[:, None])
    return reduce_rows(tl.where(in_rows[:, None], p, 0.0), REDUCE, GROUP), seen


@triton.jit(do_not_specialize=["table_stride", "num_pages", "table_width", "num_rows", "num_programs"])
def scores_kernel(
    q_ptr, cache, page_table_ptr, lengths, cu_seqlens_ptr, tree, alibi_slopes_ptr, lse_ptr, rope, scores_ptr,
    q_strides, lse_strides, scores_strides, table_stride,
    num_pages, table_width, num_rows, num_kv_heads, group, q_len, num_programs,
    scale, limits,
    BLOCK_M: tl.constexpr, GROUP: tl.constexpr, IS_RAGGED: tl.constexpr, REDUCE: tl.constexpr, ACCUMULATE: tl.constexpr,
    ATTEND: tl.constexpr, K: tl.constexpr, ROPE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """One program: every `num_programs`-th tile of keys of one sequence and KV head, under all of its query rows.

    ``exp(score - lse)`` is what a key has of a row's attention. Rows of a block are query rows x GROUP heads, a power of two of at least
    the group.
    """
    head = tl.program_id(0) % num_kv_heads
    seq = tl.program_id(0) // num_kv_heads
    first_row = 0
    num_new = q_len
    if IS_RAGGED:
        first_row, num_new = between(tl.load(cu_seqlens_ptr + seq), tl.load(cu_seqlens_ptr + seq + 1), num_rows)
    num_keys, kv_start, q_start = load_starts(lengths, seq, num_new, False)
    num_keys = tl.maximum(tl.minimum(num_keys, table_width * ATTEND.PAGE_SIZE), 0)
    kv_head = head.to(tl.int64)
    table_row = page_table_ptr + seq.to(tl.int64) * table_stride
    PARTS: tl.constexpr = ATTEND.PARTS
    for tile in range(tl.program_id(1), tl.cdiv(num_keys, ATTEND.BLOCK_N), num_programs):
        first_key = tile * ATTEND.BLOCK_N
        keys = first_key + tl.arange(0, ATTEND.BLOCK_N)
        mass = tl.full([ATTEND.BLOCK_N], 0.0, tl.float32)
        visible = keys < 0
        for block in range(0, tl.cdiv(num_new * GROUP, BLOCK_M)):
            rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
            in_rows = (rows // GROUP < num_new) & (rows % GROUP < group)
            q_rows = tl.minimum(rows // GROUP, num_new - 1)
            q_heads = head * group + tl.minimum(rows % GROUP, group - 1)
            q_starts = tl.zeros([BLOCK_M], tl.int32) + q_start
            positions = q_starts + q_rows
            tree_rows = (tree.mask_ptr, rows, tree.depth_ptr, rows, q_starts, num_new)
            if ATTEND.HAS_TREE:
                tree_row = tl.minimum(q_rows, tree.depth_stride - 1)
                mask_rows = row_offsets(tree.strides, seq, tree_row, head)
                positions, tree_rows = rows_of_tree(tree, mask_rows, seq, tree_row, q_starts, num_new)
                span = span_of_tree(q_starts, positions, in_rows, num_new, limits.window, ATTEND.HAS_WINDOW)
            else:
                last = q_start + tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, num_new - 1)
                span = (q_start + block * BLOCK_M // GROUP, last, last, last)
            slopes = tl.zeros([BLOCK_M], tl.float32)
            if ATTEND.HAS_ALIBI:
                slopes = tl.load(alibi_slopes_ptr + q_heads, mask=in_rows, other=0.0)
            lse = tl.load(lse_ptr + row_offsets(lse_strides, seq, first_row + q_rows, q_heads), mask=in_rows, other=float("inf"))
            q_row_ptrs = q_ptr + row_offsets(q_strides, seq, first_row + q_rows, q_heads)
            for part in tl.static_range(PARTS):
                bounds, _, _ = view_of(num_keys, kv_start, 0, span, limits, part + PARTS - 1, ATTEND)
                if tl.max(seen_keys(keys, bounds).to(tl.int32), axis=0) > 0:
                    of_rows, seen = mass_of(
                        q_row_ptrs, in_rows, positions, slopes, lse, tree_rows, cache, table_row, num_pages, kv_head, kv_start, bounds,
                        scale, limits, rope, first_key, REDUCE, GROUP, part + PARTS - 1, ATTEND, K, ROPE, TARGET,
                    )  # fmt: skip
                    mass += of_rows
                    visible = visible | seen
        if REDUCE == "mean":
            mass = mass / group
        # Pages of keys that no row sees are not followed.
        if tl.max(visible.to(tl.int32), axis=0) > 0:
            pages, page_rows, exists = locate(first_key, visible, table_row, num_pages, ATTEND.PAGE_SIZE, ATTEND.BLOCK_N)
            out = scores_ptr + offsets_of(pages, page_rows, scores_strides) + kv_head * scores_strides.head
            if ACCUMULATE:
                mass += tl.load(out, mask=exists, other=0.0)
            tl.store(out, mass, mask=exists)
