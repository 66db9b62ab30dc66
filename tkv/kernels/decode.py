"""Attention of a few new query rows of each sequence over its paged keys, split over their length."""

import triton
import triton.language as tl

from tkv.kernels.tiles import codec
from tkv.kernels.tiles.attend import attend_tiles, start
from tkv.kernels.tiles.dots import round_to
from tkv.kernels.tiles.softmax import LOG2_E, add_sink, lse_of, merge_step
from tkv.kernels.tiles.visibility import full_tiles, span_of


@triton.jit
def load_position(ptr):
    """A length or position as int32, cut to +-2^30: sums of two stay within int32."""
    return tl.minimum(tl.maximum(tl.load(ptr), -1073741824), 1073741823).to(tl.int32)


@triton.jit
def load_lengths(seq, seq_lens_ptr, kv_start_ptr, q_start_ptr, q_len, table_width, PAGE_SIZE: tl.constexpr):
    """(number of keys, position of key 0, position of query row 0) of a sequence; keys beyond the table do not exist."""
    seq_len = load_position(seq_lens_ptr + seq)
    kv_start = seq_len * 0
    if kv_start_ptr is not None:
        kv_start = load_position(kv_start_ptr + seq)
    q_start = seq_len + kv_start - q_len
    if q_start_ptr is not None:
        q_start = load_position(q_start_ptr + seq)
    return tl.maximum(tl.minimum(seq_len, table_width * PAGE_SIZE), 0), kv_start, q_start


@triton.jit
def split_of(tiles, max_splits, min_tiles):
    """(tiles of a split, number of splits) of a sequence with that many tiles to visit.

    Its own length decides; a split is longer than `min_tiles` where fewer than `max_splits` could not cover the sequence.
    """
    per_split = tl.maximum(tl.cdiv(tiles, max_splits), min_tiles)
    return per_split, tl.cdiv(tiles, per_split)


@triton.jit
def load_query(
    q_ptr, in_rows, scale, k_scale_ptr,
    DTYPE: tl.constexpr, K: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Planes of q in the dots' dtype, and what takes their raw scores to log2 units, [BLOCK_M].

    For an 8-bit cache q is computed with in fp16: each row is brought to [2^14, 2^15) by a power of two, which loses nothing.
    """
    factor = (tl.zeros([in_rows.shape[0]], tl.float32) + scale).to(tl.float32) * (LOG2_E * codec.unit(K, TARGET))
    if K.SCALE == "tensor":
        factor = factor * tl.load(k_scale_ptr)
    if K.PLANES == 1:
        dims = codec.plane_dims(0, K)
        q = tl.load(q_ptr[:, None] + dims[None, :], mask=in_rows[:, None] & (dims < K.DIM)[None, :], other=0.0)
        return (q.to(DTYPE),), tl.maximum(factor, 1.2e-38)
    else:
        low = codec.plane_dims(0, K)
        high = codec.plane_dims(1, K)
        q_low = tl.load(q_ptr[:, None] + low[None, :], mask=in_rows[:, None] & (low < K.DIM)[None, :], other=0.0).to(tl.float32)
        q_high = tl.load(q_ptr[:, None] + high[None, :], mask=in_rows[:, None] & (high < K.DIM)[None, :], other=0.0).to(tl.float32)
        if DTYPE == tl.float16:
            largest = tl.maximum(tl.max(tl.abs(q_low), axis=1), tl.max(tl.abs(q_high), axis=1))
            exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
            up = ((254 - exponent) << 23).to(tl.float32, bitcast=True)  # 2^-exponent
            q_low = q_low * up[:, None] * 16384.0
            q_high = q_high * up[:, None] * 16384.0
            factor = factor * (exponent << 23).to(tl.float32, bitcast=True) * (1.0 / 16384.0)
        return (q_low.to(DTYPE), q_high.to(DTYPE)), tl.maximum(factor, 1.2e-38)


# Sizes that change from step to step: a new one must not compile a new kernel.
_CHANGING = ["table_stride", "table_width", "num_pages", "split_stride", "lse_split_stride", "max_splits", "min_tiles"]


@triton.jit(do_not_specialize=_CHANGING)
def decode_kernel(
    q_ptr, cache, page_table_ptr, seq_lens_ptr, kv_start_ptr, q_start_ptr, alibi_slopes_ptr, sink_logits_ptr, out_ptr, lse_ptr,
    q_strides, table_stride, out_strides, split_stride, lse_strides, lse_split_stride,
    num_pages, table_width, num_kv_heads, group, q_len, row_tiles, max_splits, min_tiles,
    scale, limits,
    BLOCK_M: tl.constexpr, IS_SPLIT: tl.constexpr, ATTEND: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows (query rows x heads of a group) of one sequence and KV head, over one split of its keys.

    Without splits the results are final; else they are partial, one out and lse for each split, and `reduce_kernel` follows.
    """
    row_tile = tl.program_id(0) % row_tiles
    head = (tl.program_id(0) // row_tiles % num_kv_heads).to(tl.int64)
    seq = (tl.program_id(0) // row_tiles // num_kv_heads).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)

    num_keys, kv_start, q_start = load_lengths(
        seq, seq_lens_ptr, kv_start_ptr, q_start_ptr, q_len, table_width, ATTEND.PAGE_SIZE
    )
    last = q_start + q_len - 1
    span = span_of(
        num_keys, kv_start, q_start, last, limits.window, limits.sinks, ATTEND.BLOCK_N, ATTEND.HAS_WINDOW
    )
    per_split, num_splits = split_of(span[5], max_splits, min_tiles)
    if IS_SPLIT:
        if split >= num_splits:
            return

    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < q_len * group
    q_rows = tl.minimum(rows // group, q_len - 1)
    q_heads = head * group + rows % group
    positions = q_start + q_rows
    slopes = tl.zeros([BLOCK_M], tl.float32)
    if ATTEND.HAS_ALIBI:
        slopes = tl.load(alibi_slopes_ptr + q_heads, mask=in_rows, other=0.0)
    q, rows_scale = load_query(
        q_ptr + seq * q_strides.seq + (q_rows.to(tl.int64) * q_strides.row + q_heads * q_strides.head),
        in_rows, scale, cache.k.scale_ptr, ATTEND.DTYPE, K, TARGET,
    )  # fmt: skip

    begin = tl.program_id(1) * per_split
    stop = tl.minimum(begin + per_split, span[5])
    masked_from = begin
    table_ptr = page_table_ptr + seq * table_stride
    state = start(BLOCK_M, V)
    if not ATTEND.HAS_WINDOW:
        # All but the last tiles are seen whole by every row. A window has few tiles, and both its ends are masked.
        first_row = row_tile * BLOCK_M // group
        masked_from = tl.minimum(tl.maximum(full_tiles(num_keys, kv_start, q_start + first_row, ATTEND.BLOCK_N), begin), stop)
        state = attend_tiles(
            state, q, rows_scale, positions, slopes, cache, table_ptr, num_pages, head, kv_start, span, limits, begin, masked_from,
            False, ATTEND, K, V, TARGET,
        )  # fmt: skip
    state = attend_tiles(
        state, q, rows_scale, positions, slopes, cache, table_ptr, num_pages, head, kv_start, span, limits, masked_from, stop,
        True, ATTEND, K, V, TARGET,
    )  # fmt: skip

    best, total, acc, unit, _ = state
    if ATTEND.HAS_SOFTCAP or ATTEND.HAS_ALIBI:
        rows_scale = tl.full([BLOCK_M], 1.0, tl.float32)
    lse = lse_of(best, total, rows_scale, ATTEND.LIFT)
    factor = unit * codec.unit(V, TARGET) / tl.where(total != 0, total, 1.0)
    if V.SCALE == "tensor":
        factor = factor * tl.load(cache.v.scale_ptr)
    if not IS_SPLIT:
        if sink_logits_ptr is not None:
            lse, shrink = add_sink(lse, tl.load(sink_logits_ptr + q_heads, mask=in_rows, other=0.0).to(tl.float32))
            factor = factor * shrink
    q_rows = q_rows.to(tl.int64)
    # head_dim is a multiple of 8, and so is what lies between splits.
    out_split = out_ptr + tl.multiple_of(split * split_stride, 8)
    out_rows = out_split + seq * out_strides.seq + (q_rows * out_strides.row + q_heads * out_strides.head)
    V_PLANES: tl.constexpr = V.PLANES
    for plane in tl.static_range(V_PLANES):
        dims = codec.plane_dims(plane, V)
        out = round_to(acc[plane] * factor[:, None], out_ptr.dtype.element_ty, TARGET)
        tl.store(out_rows[:, None] + dims[None, :], out, mask=in_rows[:, None] & (dims < V.DIM)[None, :])
    if lse_ptr is not None:
        lse_rows = lse_ptr + split * lse_split_stride + seq * lse_strides.seq + (q_rows * lse_strides.row + q_heads * lse_strides.head)
        tl.store(lse_rows, lse, mask=in_rows)


@triton.jit(do_not_specialize=["table_width", "split_stride", "lse_split_stride", "max_splits", "min_tiles"])
def reduce_kernel(
    part_ptr, part_lse_ptr, seq_lens_ptr, kv_start_ptr, q_start_ptr, sink_logits_ptr, out_ptr, lse_ptr,
    part_strides, split_stride, part_lse_strides, lse_split_stride, out_strides, lse_strides,
    table_width, num_q_heads, q_len, max_splits, min_tiles, limits,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_PARTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """One program: the partial results of one query row and head merged. It reads the splits that `decode_kernel` wrote."""
    head = (tl.program_id(0) % num_q_heads).to(tl.int64)
    row = (tl.program_id(0) // num_q_heads % q_len).to(tl.int64)
    seq = (tl.program_id(0) // num_q_heads // q_len).to(tl.int64)
    num_keys, kv_start, q_start = load_lengths(seq, seq_lens_ptr, kv_start_ptr, q_start_ptr, q_len, table_width, PAGE_SIZE)
    span = span_of(
        num_keys, kv_start, q_start, q_start + q_len - 1, limits.window, limits.sinks, BLOCK_N, HAS_WINDOW
    )
    num_splits = split_of(span[5], max_splits, min_tiles)[1]

    dims = tl.arange(0, BLOCK_D)
    in_dims = dims < DIM
    part_row = part_ptr + seq * part_strides.seq + row * part_strides.row + head * part_strides.head
    part_lse_row = part_lse_ptr + seq * part_lse_strides.seq + row * part_lse_strides.row + head * part_lse_strides.head
    best = tl.full([], -float("inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, num_splits, BLOCK_PARTS):
        parts = (first + tl.arange(0, BLOCK_PARTS)).to(tl.int64)
        lse = tl.load(part_lse_row + parts * lse_split_stride, mask=parts < num_splits, other=-float("inf"))
        outs = part_row + (tl.multiple_of(parts * split_stride, 8)[:, None] + dims[None, :])
        best, total, acc = merge_step(outs, in_dims, lse, best, total, acc)

    safe_total = tl.where(total != 0, total, 1.0)
    lse = tl.where(total != 0, best + tl.log(safe_total), -float("inf"))
    out = acc / safe_total
    if sink_logits_ptr is not None:
        lse, shrink = add_sink(lse, tl.load(sink_logits_ptr + head).to(tl.float32))
        out = out * shrink
    out_row = out_ptr + seq * out_strides.seq + row * out_strides.row + head * out_strides.head
    tl.store(out_row + dims, round_to(out, out_ptr.dtype.element_ty, TARGET), mask=in_dims)
    if lse_ptr is not None:
        tl.store(lse_ptr + seq * lse_strides.seq + row * lse_strides.row + head * lse_strides.head, lse)
