"""Attention of new query rows over paged keys, and over new keys beside them: decode, prefill and the levels of a cascade."""

import triton
import triton.language as tl

from tkv.kernels.tiles import codec
from tkv.kernels.tiles.attend import attend_source, change_units, in_score_unit, score_unit, start, true_numbers
from tkv.kernels.tiles.rows import (
    load_position,
    load_query,
    ragged_program,
    row_offsets,
    rows_of,
    stacked_program,
    store_pieces,
    uniform_program,
)
from tkv.kernels.tiles.softmax import add_sink, lse_of
from tkv.kernels.tiles.visibility import keys_before, positions_of, rows_of_tree, span_of_rows, span_of_tree, view_of


@triton.jit
def split_of(tiles, max_splits, min_tiles):
    """(tiles of a split, number of splits) of rows with that many tiles to visit.

    Their own number decides; a split is longer than `min_tiles` where fewer than `max_splits` could not cover them.
    """
    per_split = tl.maximum(tl.cdiv(tiles, max_splits), min_tiles)
    return per_split, tl.cdiv(tiles, per_split)


@triton.jit
def load_starts(lengths, seqs, q_len, IS_RAGGED: tl.constexpr):
    """(number of keys, position of key 0, position of query row 0) of sequences."""
    num_keys = load_position(lengths.keys_ptr + seqs)
    kv_start = num_keys * 0
    if lengths.kv_start_ptr is not None:
        kv_start = load_position(lengths.kv_start_ptr + seqs)
    q_start = num_keys + kv_start
    if not IS_RAGGED:
        q_start -= q_len
    if lengths.q_start_ptr is not None:
        q_start = load_position(lengths.q_start_ptr + seqs)
    return num_keys, kv_start, q_start


@triton.jit
def tiles_of(num_keys, kv_start, skip, span, limits, ATTEND: tl.constexpr):
    """Visits of all parts of a source of keys."""
    PARTS: tl.constexpr = ATTEND.PARTS
    tiles = num_keys * 0
    for part in tl.static_range(PARTS):
        tiles += view_of(num_keys, kv_start, skip, span, limits, part + PARTS - 1, ATTEND)[1][3]
    return tiles


@triton.jit
def turns_of(positions, bounds, kv_start, limits, PART: tl.constexpr, ATTEND: tl.constexpr):
    """(how far rows are rotated, [BLOCK_M], what is taken off keys' positions for their rotation).

    Without a window (PART 0) both rotate by their positions. Else they do so as in a cache of the sink tokens and one window: for the
    sink tokens (1) rows stand at its end at most; in windows (2) only differences matter, here from the last key that some row sees.
    """
    if PART == 0:
        return positions, 0
    elif PART == 1:
        return tl.minimum(positions, limits.sinks + (limits.window - 1)), 0
    else:
        base = positions_of(bounds[3] - 1, kv_start, limits.pinned, ATTEND.HAS_PINNED)
        return positions - base, base


# Sizes that change from step to step: a new one must not compile a new kernel.
_CHANGING = ["table_stride", "part_stride", "part_lse_stride", "num_pages", "table_width", "num_seqs", "num_rows", "rest_end"]
_CHANGING += ["num_tiles", "max_splits", "min_tiles", "split_q_len", "split_tiles", "zero"]


@triton.jit(do_not_specialize=_CHANGING)
def attention_kernel(
    q_ptr, cache, fresh, page_table_ptr, lengths, cu_seqlens_ptr, level, tree, alibi_slopes_ptr, sink_logits_ptr, rope, results, parts,
    q_strides, table_stride, part_stride, part_lse_stride,
    num_pages, table_width, num_seqs, num_rows, rest_end, num_kv_heads, group, q_len, num_tiles,
    max_splits, min_tiles, split_q_len, split_tiles,
    scale, limits, zero,
    BLOCK_M: tl.constexpr, ROWS: tl.constexpr, ADD_NEW: tl.constexpr, ATTEND: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    FRESH: tl.constexpr, FRESH_K: tl.constexpr, FRESH_V: tl.constexpr, ROPE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows (see `tiles.rows`) of one sequence or group and KV head, over one split of their keys.

    Without splits the rows' results are final. Else they are parts, [split, ...], which `merge_kernel` joins; of ragged rows only
    sequences of up to `split_q_len` are split. With `fresh`, keys and values [row, head, dim] beside the cached ones are attended to too.
    `zero` is 0, which the compiler does not know: what it is added to is computed again behind a loop instead of kept in registers.
    """
    # Which rows, and which split of their keys.
    if ROWS == "uniform":
        seq, row_tile, head, split, first_row, num_new = uniform_program(num_tiles, num_kv_heads, q_len)
        num_rows = q_len
    elif ROWS == "stacked":
        seq, row_tile, head, split, first_row, members = stacked_program(
            cu_seqlens_ptr, num_seqs, num_rows, num_kv_heads, q_len * group, BLOCK_M
        )
        num_rows = members * q_len
        num_new = q_len
    else:
        seq, row_tile, head, split, first_row, num_new = ragged_program(
            cu_seqlens_ptr, num_seqs, num_rows, rest_end, num_tiles, num_kv_heads, group, max_splits, split_q_len, split_tiles, BLOCK_M
        )
        num_rows = num_new
    if row_tile * BLOCK_M >= num_rows * group:
        return
    rows, in_rows, q_rows, q_heads = rows_of(row_tile, num_rows, head, group, BLOCK_M)

    # Where they stand, and which keys they see.
    skip = seq * 0
    if ROWS == "stacked":
        members_ptr = level.members_ptr + first_row
        first_row = 0
        seqs = tl.load(members_ptr + q_rows // q_len)
        q_rows = q_rows % q_len
        _, _, q_start = load_starts(lengths, seqs, q_len, False)
        num_keys = load_position(level.group_lens_ptr + seq)
        kv_start = load_position(level.group_starts_ptr + seq)
        # One row of each sequence says how far it is covered.
        tl.store(level.cover_ptr + seqs, kv_start + num_keys, mask=in_rows & (q_rows + rows % group + head + split == 0))
    else:
        seqs = tl.minimum(seq, num_seqs - 1)
        num_keys, kv_start, q_start = load_starts(lengths, seqs, num_new, ROWS == "ragged")
        if ADD_NEW:
            num_keys += num_new
        if ROWS == "ragged":
            num_keys = tl.where(seq < num_seqs, num_keys, 0)
        if level.cover_ptr is not None:
            cover = load_position(level.cover_ptr + seqs)
            skip = tl.maximum(keys_before(cover, kv_start, limits.pinned, ATTEND.HAS_PINNED), 0)
    num_keys = tl.maximum(tl.minimum(num_keys, table_width * ATTEND.PAGE_SIZE), 0)
    q_starts = tl.zeros([BLOCK_M], tl.int32) + q_start
    positions = q_starts + q_rows
    tree_rows = (tree.mask_ptr, rows, tree.depth_ptr, rows, q_starts, num_new)
    if ATTEND.HAS_TREE:
        tree_row = tl.minimum(q_rows, tree.depth_stride - 1)
        mask_rows = row_offsets(tree.strides, seqs, tree_row, head)
        positions, tree_rows = rows_of_tree(tree, mask_rows, seqs, tree_row, q_starts, num_new)
        span = span_of_tree(q_starts, positions, in_rows, num_new, limits.window, ATTEND.HAS_WINDOW)
    elif ROWS == "stacked":
        span = span_of_rows(positions, in_rows)
    else:
        first = q_start + row_tile * BLOCK_M // group
        last = q_start + tl.minimum((row_tile * BLOCK_M + BLOCK_M - 1) // group, num_new - 1)
        span = (first, last, first, last)
    tiles = tiles_of(num_keys, kv_start, skip, span, limits, ATTEND)
    if fresh.k.ptr is not None:
        num_fresh = tl.where(seq < num_seqs, num_new, 0)
        tiles += tiles_of(num_fresh, q_start, 0, span, limits, FRESH)

    begin = tiles * 0
    stop = tiles
    part_rows = num_rows * group
    if parts.out_ptr is not None:
        if ROWS == "ragged":
            is_part = (num_new <= split_q_len) & (seq < num_seqs)
            max_splits = tl.where(is_part, max_splits, 1)
            part_rows = tl.where(is_part, part_rows, 0)
        per_split, num_splits = split_of(tiles, max_splits, min_tiles)
        begin = split * per_split
        stop = tl.minimum(begin + per_split, tiles)
        if (split >= num_splits) & (part_rows > 0):
            nothing = tl.full([BLOCK_M], -float("inf"), tl.float32)
            part_lse_ptr = parts.lse_ptr + split.to(tl.int64) * part_lse_stride
            tl.store(part_lse_ptr + row_offsets(parts.lse_strides, seqs, q_rows, q_heads), nothing, mask=rows < part_rows)
            return

    slopes = tl.zeros([BLOCK_M], tl.float32)
    if ATTEND.HAS_ALIBI:
        slopes = tl.load(alibi_slopes_ptr + q_heads, mask=in_rows, other=0.0)
    q_row_ptrs = q_ptr + row_offsets(q_strides, seqs, first_row + q_rows, q_heads)
    kv_head = head.to(tl.int64)
    table_row = page_table_ptr + seq.to(tl.int64) * table_stride
    PARTS: tl.constexpr = ATTEND.PARTS
    state = start(BLOCK_M, V)
    raw_scale = tl.full([BLOCK_M], 1.0, tl.float32)
    done = 0
    for part in tl.static_range(PARTS):
        bounds, visits, full = view_of(num_keys, kv_start, skip, span, limits, part + PARTS - 1, ATTEND)
        turns, base = turns_of(positions, bounds, kv_start, limits, part + PARTS - 1, ATTEND)
        q, q_sum, new_scale = load_query(q_row_ptrs, in_rows, scale, cache.k, kv_head, turns, rope, ATTEND.DTYPE, K, ROPE, TARGET)
        if part > 0:
            state = in_score_unit(state, raw_scale, new_scale, ATTEND)
        raw_scale = new_scale
        state = attend_source(
            state, q, q_sum, raw_scale, positions, slopes, tree_rows, cache, table_row, num_pages,
            kv_head, kv_start, bounds, visits, full, limits, (rope, base),
            tl.maximum(begin - done, 0), tl.minimum(stop - done, visits[3]), ATTEND, K, V, ROPE, TARGET,
        )  # fmt: skip
        done += visits[3]
    v_unit = codec.unit(V, TARGET) * tl.full([], 1.0, tl.float32)
    if V.SCALE == "tensor":
        v_unit *= tl.load(cache.v.scale_ptr)
    elif V.SCALE == "head":
        v_unit *= tl.load(cache.v.scale_ptr + kv_head * cache.v.scale_strides.head)
    if fresh.k.ptr is not None:
        for part in tl.static_range(PARTS):
            bounds, visits, full = view_of(num_fresh + zero, q_start, 0, span, limits, part + PARTS - 1, FRESH)
            turns, base = turns_of(positions, bounds, q_start, limits, part + PARTS - 1, FRESH)
            if K.CODE != "native" or V.CODE != "native" or ROPE.DIM > 0:
                rows, in_rows, q_rows, q_heads = rows_of(row_tile - zero, num_rows, head, group, BLOCK_M)
                q_row_ptrs = q_ptr + row_offsets(q_strides, seqs, first_row + q_rows, q_heads)
                q, q_sum, new_scale = load_query(
                    q_row_ptrs, in_rows, scale, fresh.k, kv_head, turns, rope, FRESH.DTYPE, FRESH_K, ROPE, TARGET
                )
                if part == 0:
                    ratio = score_unit(raw_scale, ATTEND) / score_unit(new_scale, ATTEND)
                    state = change_units(state, ratio, v_unit, cache.v, kv_head, V)
                else:
                    state = in_score_unit(state, raw_scale, new_scale, FRESH)
                raw_scale = new_scale
                v_unit = tl.full([], 1.0, tl.float32)
            state = attend_source(
                state, q, q_sum, raw_scale, positions, slopes, tree_rows, fresh, first_row.to(tl.int64), num_pages,
                kv_head, q_start, bounds, visits, full, limits, (rope, base),
                tl.maximum(begin - done, 0), stop - done, FRESH, FRESH_K, FRESH_V, ROPE, TARGET,
            )  # fmt: skip
            done += visits[3]

    best, total, acc, unit, _, added = state
    rows, in_rows, q_rows, q_heads = rows_of(row_tile + zero, num_rows, head, group, BLOCK_M)
    if ROWS == "stacked":
        seqs = tl.load(members_ptr + q_rows // q_len)
        q_rows = q_rows % q_len
    lse = lse_of(best, total, score_unit(raw_scale, ATTEND), ATTEND.LIFT)
    per_total = 1.0 / tl.where(total != 0, total, 1.0)
    acc = true_numbers(acc, unit * v_unit * per_total, added * per_total, cache.v, kv_head, FRESH_V)
    shrink = tl.full([BLOCK_M], 1.0, tl.float32)
    if parts.out_ptr is not None:
        # head_dim is a multiple of 8, and so is what lies between parts.
        part_ptr = parts.out_ptr + tl.multiple_of(split.to(tl.int64) * part_stride, 8)
        store_pieces(part_ptr + row_offsets(parts.out_strides, seqs, q_rows, q_heads), acc, shrink, rows < part_rows, FRESH_V, TARGET)
        part_lse_ptr = parts.lse_ptr + split.to(tl.int64) * part_lse_stride
        tl.store(part_lse_ptr + row_offsets(parts.lse_strides, seqs, q_rows, q_heads), lse, mask=rows < part_rows)
        in_rows = in_rows & (rows >= part_rows)
    if results.out_ptr is not None:
        if sink_logits_ptr is not None:
            lse, shrink = add_sink(lse, tl.load(sink_logits_ptr + q_heads, mask=in_rows, other=0.0).to(tl.float32))
        out_offsets = row_offsets(results.out_strides, seqs, first_row + q_rows, q_heads)
        store_pieces(results.out_ptr + out_offsets, acc, shrink, in_rows, FRESH_V, TARGET)
        if results.lse_ptr is not None:
            tl.store(results.lse_ptr + row_offsets(results.lse_strides, seqs, first_row + q_rows, q_heads), lse, mask=in_rows)
