"""Which query rows a program computes: rows of a tile are query rows x heads of a group, heads fastest, without gaps.

UNIFORM: every sequence has q_len query rows. RAGGED: sequence s has those from ``cu_seqlens[s]`` to ``cu_seqlens[s + 1]``. STACKED: the
rows of all sequences of a group, which share keys, stand in one block.
"""

import triton
import triton.language as tl

from tkv.kernels.tiles import codec
from tkv.kernels.tiles.dots import round_to
from tkv.kernels.tiles.load import load_channels, turned_unit
from tkv.kernels.tiles.pieces import piece_dims
from tkv.kernels.tiles.rope import load_rotated
from tkv.kernels.tiles.softmax import LOG2_E


@triton.jit
def load_position(ptr):
    """Lengths or positions as int32, cut to +-2^30: sums of two stay within int32."""
    return tl.minimum(tl.maximum(tl.load(ptr), -1073741824), 1073741823).to(tl.int32)


@triton.jit
def find_sequence(tile, starts_ptr, count, rows_each, BLOCK_M: tl.constexpr):
    """(sequence that a tile of rows belongs to, its tile there). Sequence s has `rows_each` rows for each of ``starts[s]..starts[s + 1]``.

    Its tiles begin at ``starts[s] * rows_each // BLOCK_M + s``, which leaves room for the ends of all before it. `count` stands for
    what comes behind the last sequence.
    """
    base = tl.load(starts_ptr).to(tl.int64)
    low = tl.program_id(0) * 0
    high = low + count
    while low < high:
        middle = (low + high + 1) // 2
        begins = ((tl.load(starts_ptr + middle) - base) * rows_each // BLOCK_M + middle) <= tile
        low = tl.where(begins, middle, low)
        high = tl.where(begins, high, middle - 1)
    first = (tl.load(starts_ptr + low) - base) * rows_each // BLOCK_M + low
    # Starts that lie lead to rows that do not exist.
    return low, tl.minimum(tl.maximum(tile - first, 0), 1073741824 // BLOCK_M).to(tl.int32)


@triton.jit
def between(first, end, count):
    """(start, length) of a range, cut to what exists, [] int32."""
    first = tl.minimum(tl.maximum(first, 0), count).to(tl.int32)
    return first, tl.maximum(tl.minimum(tl.maximum(end, 0), count).to(tl.int32) - first, 0)


@triton.jit
def uniform_program(num_tiles, num_kv_heads, q_len):
    """(sequence, tile of its rows, KV head, split, its first row, its number of query rows) of this program."""
    row_tile = tl.program_id(0) % num_tiles
    head = tl.program_id(0) // num_tiles % num_kv_heads
    return tl.program_id(0) // num_tiles // num_kv_heads, row_tile, head, tl.program_id(1), 0, q_len


@triton.jit
def stacked_program(starts_ptr, num_groups, num_members, num_kv_heads, rows_each, BLOCK_M: tl.constexpr):
    """The same for the stacked rows of a group; its first row and number of rows are those of its members."""
    group, row_tile = find_sequence(tl.program_id(0) // num_kv_heads, starts_ptr, num_groups - 1, rows_each, BLOCK_M)
    first, count = between(tl.load(starts_ptr + group), tl.load(starts_ptr + group + 1), num_members)
    return group, row_tile, tl.program_id(0) % num_kv_heads, tl.program_id(1), first, count


@triton.jit
def ragged_program(
    cu_seqlens_ptr, num_seqs, num_rows, rest_end, num_tiles, num_kv_heads, group, max_splits, split_q_len, split_tiles,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The same for ragged rows, `num_rows` in all; those behind the last sequence, up to `rest_end`, are rows of sequence `num_seqs`.

    The first `num_tiles` programs of a head are all tiles, each over its first split. The others are the further splits of sequences of up
    to `split_q_len` rows; for a longer one they have no rows.
    """
    head = tl.program_id(0) % num_kv_heads
    program = tl.program_id(0) // num_kv_heads
    if program < num_tiles:
        # The last rows see most keys: they begin first.
        seq, row_tile = find_sequence(num_tiles - 1 - program, cu_seqlens_ptr, num_seqs, group, BLOCK_M)
        split = program * 0
        longest = program * 0 + 2147483647
    else:
        split = (program - num_tiles) % (max_splits - 1) + 1
        row_tile = (program - num_tiles) // (max_splits - 1) % split_tiles
        seq = (program - num_tiles) // (max_splits - 1) // split_tiles
        longest = program * 0 + split_q_len
    first, q_len = between(tl.load(cu_seqlens_ptr + seq), tl.load(cu_seqlens_ptr + seq + 1, mask=seq < num_seqs, other=rest_end), num_rows)
    return seq, row_tile, head, split, first, tl.where(q_len > longest, 0, q_len)


@triton.jit
def rows_of(row_tile, num_rows, head, group, BLOCK_M: tl.constexpr):
    """(rows of a tile, which of them exist, their query rows, their query heads), [BLOCK_M]."""
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    return rows, rows < num_rows * group, tl.minimum(rows // group, num_rows - 1), head * group + rows % group


@triton.jit
def load_query(
    q_ptr, in_rows, scale, stored, head, turns, rope,
    DTYPE: tl.constexpr, K: tl.constexpr, ROPE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """(pieces of q in the dots' dtype, rotated by `turns` if there is a ROPE; their sum over dims; what takes raw scores to log2 units).

    All are [BLOCK_M]. For a quantised cache q is computed with in fp16: each row is brought to [2^14, 2^15) by a power of two, which
    loses nothing of numbers down to 2^-28 of the largest.
    """
    K_PIECES: tl.constexpr = K.RUNS * K.PLANES
    if ROPE.DIM > 0:
        unit = turned_unit(DTYPE, K)
    else:
        unit = codec.unit(K, TARGET)
    factor = (tl.zeros([in_rows.shape[0]], tl.float32) + scale).to(tl.float32) * (LOG2_E * unit)
    if K.SCALE == "tensor":
        factor = factor * tl.load(stored.scale_ptr)
    elif K.SCALE == "head":
        factor = factor * tl.load(stored.scale_ptr + head * stored.scale_strides.head)
    q = ()
    q_sum = tl.zeros([in_rows.shape[0]], tl.float32)
    largest = q_sum
    for piece in tl.static_range(K_PIECES):
        dims, in_row = piece_dims(piece, K)
        if ROPE.DIM > 0:
            part = load_rotated(q_ptr, dims, in_rows, in_row, turns, rope, True, ROPE)
        else:
            part = tl.load(q_ptr[:, None] + dims[None, :], mask=in_rows[:, None] & in_row[None, :], other=0.0)
        if K.CODE == "native":
            part = round_to(part, DTYPE, TARGET) if ROPE.DIM > 0 else part.to(DTYPE)
        else:
            part = part.to(tl.float32)
            if K.SCALE == "channel" and ROPE.DIM == 0:
                part = part * load_channels(stored, head, dims, in_row)[None, :]
            largest = tl.maximum(largest, tl.max(tl.abs(part), axis=1))
        q = q + (part,)
    if K.CODE != "native":
        up = tl.full([in_rows.shape[0]], 1.0, tl.float32)
        if DTYPE == tl.float16:
            exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 1), 253)
            up = ((254 - exponent) << 23).to(tl.float32, bitcast=True)  # 2^-exponent
            factor = factor * (exponent << 23).to(tl.float32, bitcast=True) * (1.0 / 16384.0)
        scaled = ()
        for piece in tl.static_range(K_PIECES):
            if DTYPE == tl.float16:
                part = (q[piece] * up[:, None] * 16384.0).to(DTYPE)
            else:
                part = q[piece].to(DTYPE)
            if K.ASYMMETRIC and K.FOLDED:
                q_sum = q_sum + tl.sum(part.to(tl.float32), axis=1)
            scaled = scaled + (part,)
        q = scaled
    return q, q_sum, tl.maximum(factor, 1.2e-38)


@triton.jit
def store_pieces(out_rows, pieces, factor, in_rows, V: tl.constexpr, TARGET: tl.constexpr):
    """Write the rows' outputs, `pieces` times `factor`, through pointers to their dim 0."""
    V_PIECES: tl.constexpr = V.RUNS * V.PLANES
    for piece in tl.static_range(V_PIECES):
        dims, in_row = piece_dims(piece, V)
        out = round_to(pieces[piece] * factor[:, None], out_rows.dtype.element_ty, TARGET)
        tl.store(out_rows[:, None] + dims[None, :], out, mask=in_rows[:, None] & in_row[None, :])


@triton.jit
def row_offsets(strides, seqs, rows, heads):
    """Offsets of rows in ``[seq, row, head, ...]``."""
    return seqs.to(tl.int64) * strides.seq + rows.to(tl.int64) * strides.row + heads.to(tl.int64) * strides.head
