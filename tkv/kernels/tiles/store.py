"""Rows of a cache, each a head of a token: encoded with their scales on the way in, decoded on the way out."""

import triton
import triton.language as tl

from tkv.kernels.tiles import codec
from tkv.kernels.tiles.dots import round_to
from tkv.kernels.tiles.paging import offsets_of
from tkv.kernels.tiles.pieces import piece_dims, run_words
from tkv.kernels.tiles.rope import load_angles, load_rotated, partner_of


@triton.jit
def largest_finite(x, axis: tl.constexpr):
    """Largest finite magnitude along an axis, so that one bad value does not change the others."""
    magnitude = tl.abs(x)
    return tl.max(tl.where(magnitude < float("inf"), magnitude, 0.0), axis=axis)


@triton.jit
def least_finite(x, exists, axis: tl.constexpr):
    """Smallest finite number along an axis, +inf if there is none; largest of -x is the least of x."""
    return tl.min(tl.where(exists & (tl.abs(x) < float("inf")), x, float("inf")), axis=axis)


@triton.jit
def pair_of_range(low, negated_high, STORAGE: tl.constexpr):
    """(scale, minimum) of numbers from `low` to ``-negated_high``, both +inf where there are no finite ones."""
    return codec.pair_for(tl.where(low < float("inf"), low, 0.0), tl.where(negated_high < float("inf"), -negated_high, 0.0), STORAGE)


@triton.jit
def symmetric_scale(largest, STORAGE: tl.constexpr):
    """The scale that brings a largest magnitude to the largest code, in the dtype in which it is stored."""
    scales = tl.div_rn(largest, tl.full(largest.shape, codec.largest_code(STORAGE), tl.float32))
    if STORAGE.SCALE == "group":
        # The largest with which code 127 does not decode to infinity.
        return tl.minimum(scales, 515.5).to(tl.float16)
    else:
        return scales


@triton.jit
def load_row_pieces(x_rows, mask, turns, rope, STORAGE: tl.constexpr, ROTATED: tl.constexpr, ROPE: tl.constexpr):
    """New rows in float32, ROTATED or not, pieces [BLOCK_R, words]."""
    PIECES: tl.constexpr = STORAGE.RUNS * STORAGE.PLANES
    pieces = ()
    for piece in tl.static_range(PIECES):
        dims, in_row = piece_dims(piece, STORAGE)
        pieces = pieces + (load_rotated(x_rows, dims, mask, in_row, turns, rope, ROTATED, ROPE),)
    return pieces


@triton.jit
def row_scales(pieces, mask, STORAGE: tl.constexpr):
    """Dynamic scales (scale, minimum) of rows, one a row: [BLOCK_R]."""
    PIECES: tl.constexpr = STORAGE.RUNS * STORAGE.PLANES
    if STORAGE.ASYMMETRIC:
        low = tl.full([mask.shape[0]], float("inf"), tl.float32)
        negated_high = low
        for piece in tl.static_range(PIECES):
            _, in_row = piece_dims(piece, STORAGE)
            exists = mask[:, None] & in_row[None, :]
            low = tl.minimum(low, least_finite(pieces[piece], exists, 1))
            negated_high = tl.minimum(negated_high, least_finite(-pieces[piece], exists, 1))
        return pair_of_range(low, negated_high, STORAGE)
    else:
        largest = tl.zeros([mask.shape[0]], tl.float32)
        for piece in tl.static_range(PIECES):
            largest = tl.maximum(largest, largest_finite(pieces[piece], 1))
        scales = symmetric_scale(largest, STORAGE)
        return scales, scales


@triton.jit
def store_scales(ptrs, scales, minima, mask, STORAGE: tl.constexpr):
    """Store scales as they are read: with their minima in one word, or alone."""
    if STORAGE.ASYMMETRIC:
        tl.store(ptrs, codec.join_pair(scales, minima), mask=mask)
    else:
        tl.store(ptrs, scales, mask=mask)


@triton.jit
def store_group_scales(x_rows, scale_rows, mask, turns, rope, STORAGE: tl.constexpr, ROTATED: tl.constexpr, ROPE: tl.constexpr):
    """Compute and store the scales of every group of rows. Gives (scales, minima), pieces [BLOCK_R, words] of them."""
    GROUPS: tl.constexpr = STORAGE.DIM // STORAGE.GROUP
    PIECES: tl.constexpr = STORAGE.RUNS * STORAGE.PLANES
    WIDTH: tl.constexpr = STORAGE.WIDTH
    DTYPE: tl.constexpr = tl.float16
    scales = ()
    for _ in tl.static_range(PIECES):
        scales = scales + (tl.zeros([mask.shape[0], WIDTH], DTYPE),)
    minima = scales
    for group in tl.static_range(GROUPS):
        dims = group * STORAGE.GROUP + tl.arange(0, STORAGE.GROUP)
        x = load_rotated(x_rows, dims, mask, dims >= 0, turns, rope, ROTATED, ROPE)
        if STORAGE.ASYMMETRIC:
            scale, minimum = pair_of_range(least_finite(x, mask[:, None], 1), least_finite(-x, mask[:, None], 1), STORAGE)
        else:
            scale = symmetric_scale(largest_finite(x, 1), STORAGE)
            minimum = scale
        store_scales(scale_rows + group, scale, minimum, mask, STORAGE)
        new_scales = ()
        new_minima = ()
        for piece in tl.static_range(PIECES):
            dims_of_piece, _ = piece_dims(piece, STORAGE)
            is_here = (dims_of_piece // STORAGE.GROUP == group)[None, :]
            new_scales = new_scales + (tl.where(is_here, scale[:, None], scales[piece]),)
            new_minima = new_minima + (tl.where(is_here, minimum[:, None], minima[piece]),)
        scales = new_scales
        minima = new_minima
    return scales, minima


@triton.jit
def encode_piece(x, scales, minima, STORAGE: tl.constexpr):
    """Codes of a piece; scales broadcast to it."""
    scales = scales.to(tl.float32)
    if STORAGE.ASYMMETRIC:
        return codec.encode_above(x, scales, minima.to(tl.float32), STORAGE)
    else:
        return codec.encode(tl.div_rn(x, tl.broadcast_to(tl.where(scales > 0, scales, 1.0), x.shape)), STORAGE)


@triton.jit
def write_rows(
    x_rows, stored, heads, pages, page_rows, mask, turns, rope,
    STORAGE: tl.constexpr, ROTATED: tl.constexpr, ROPE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Encode rows, whose dim 0 `x_rows` point to, and store them with their scales. All are [BLOCK_R].

    If they are to be ROTATED, they are so by `turns` before.
    """
    RUNS: tl.constexpr = STORAGE.RUNS
    PLANES: tl.constexpr = STORAGE.PLANES
    rows = stored.ptr + (offsets_of(pages, page_rows, stored.strides) + heads * stored.strides.head)
    scale_rows = stored.scale_ptr
    if STORAGE.SCALE == "token_head" or STORAGE.SCALE == "group":
        scale_rows = stored.scale_ptr + (offsets_of(pages, page_rows, stored.scale_strides) + heads * stored.scale_strides.head)
    pieces = load_row_pieces(x_rows, mask, turns, rope, STORAGE, ROTATED, ROPE)
    if STORAGE.SCALE == "token_head":
        scales, minima = row_scales(pieces, mask, STORAGE)
        store_scales(scale_rows, scales, minima, mask, STORAGE)
    elif STORAGE.SCALE == "group":
        scales, minima = store_group_scales(x_rows, scale_rows, mask, turns, rope, STORAGE, ROTATED, ROPE)
    for run in tl.static_range(RUNS):
        words = run_words(run, STORAGE)
        in_row = mask[:, None] & (words < STORAGE.DIM // STORAGE.PLANES)[None, :]
        codes = ()
        for plane in tl.static_range(PLANES):
            dims, in_dims = piece_dims(run * STORAGE.PLANES + plane, STORAGE)
            x = pieces[run * PLANES + plane]
            if STORAGE.SCALE == "none":
                code = round_to(x, stored.ptr.dtype.element_ty, TARGET)
            elif STORAGE.SCALE == "token_head":
                code = encode_piece(x, scales[:, None], minima[:, None], STORAGE)
            elif STORAGE.SCALE == "group":
                code = encode_piece(x, scales[run * PLANES + plane], minima[run * PLANES + plane], STORAGE)
            else:
                static = static_scales(stored, heads, dims, in_dims, STORAGE)
                code = encode_piece(x, static, static, STORAGE)
            codes = codes + (code,)
        tl.store(rows[:, None] + words[None, :], codec.pack(codes, STORAGE), mask=in_row)


@triton.jit
def static_scales(stored, heads, dims, in_dims, STORAGE: tl.constexpr):
    """Scales of rows that the caller gave, in a shape that broadcasts to [BLOCK_R, dims]."""
    if STORAGE.SCALE == "tensor":
        return tl.load(stored.scale_ptr + heads * 0)[:, None]
    elif STORAGE.SCALE == "head":
        return tl.load(stored.scale_ptr + heads * stored.scale_strides.head)[:, None]
    else:
        tl.static_assert(STORAGE.SCALE == "channel")
        ptrs = stored.scale_ptr + (heads * stored.scale_strides.head)[:, None] + dims[None, :]
        return tl.load(ptrs, mask=(heads >= 0)[:, None] & in_dims[None, :], other=1.0)


@triton.jit
def read_dims(stored, heads, pages, page_rows, dims, mask, in_dims, STORAGE: tl.constexpr, TARGET: tl.constexpr):
    """Any dims of rows, decoded, [BLOCK_R, dims] float32; 0 where `mask` or `in_dims` are not set."""
    exists = mask[:, None] & in_dims[None, :]
    columns = dims
    if STORAGE.PLANES == 4:
        columns = dims % (STORAGE.DIM // 4)
    rows = stored.ptr + (offsets_of(pages, page_rows, stored.strides) + heads * stored.strides.head)
    words = tl.load(rows[:, None] + columns[None, :], mask=exists, other=0)
    if STORAGE.CODE == "native":
        x = words.to(tl.float32)
    else:
        if STORAGE.PLANES == 4:
            words = words.to(tl.int32) >> (4 * (dims // (STORAGE.DIM // 4)))[None, :]
        codes = codec.decode(words, 0, STORAGE)
        if STORAGE.SCALE == "tensor" or STORAGE.SCALE == "head" or STORAGE.SCALE == "channel":
            x = codes * static_scales(stored, heads, dims, in_dims, STORAGE)
        else:
            scale_rows = stored.scale_ptr + (offsets_of(pages, page_rows, stored.scale_strides) + heads * stored.scale_strides.head)
            columns = dims
            if STORAGE.SCALE == "token_head":
                columns = dims * 0
            elif STORAGE.SCALE == "group":
                columns = dims // STORAGE.GROUP
            scales = tl.load(scale_rows[:, None] + columns[None, :], mask=exists, other=0)
            minima = scales
            if STORAGE.ASYMMETRIC:
                scales, minima = codec.split_pair(scales)
            if STORAGE.SCALE == "token_head":
                x = codes * scales.to(tl.float32)
                if STORAGE.ASYMMETRIC:
                    x = x + minima.to(tl.float32)
            else:
                x = codec.decoded(codes.to(tl.float16), scales, minima, STORAGE, TARGET).to(tl.float32)
    return tl.where(exists, x, 0.0)


@triton.jit
def read_rows(
    out_rows, stored, heads, pages, page_rows, mask, exists, turns, rope,
    STORAGE: tl.constexpr, ROTATED: tl.constexpr, ROPE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Decode rows, rotate them by `turns` if they are to be ROTATED, and store them to where `out_rows` point.

    Those of `mask` that do not exist become 0. All are [BLOCK_R].
    """
    PIECES: tl.constexpr = STORAGE.RUNS * STORAGE.PLANES
    DTYPE: tl.constexpr = out_rows.dtype.element_ty
    for piece in tl.static_range(PIECES):
        dims, in_dims = piece_dims(piece, STORAGE)
        x = read_dims(stored, heads, pages, page_rows, dims, exists, in_dims, STORAGE, TARGET)
        if ROTATED:
            in_pair = in_dims & (dims < ROPE.DIM)
            partner = read_dims(stored, heads, pages, page_rows, partner_of(dims, ROPE), exists, in_pair, STORAGE, TARGET)
            cos, sin = load_angles(rope, dims[None, :], turns[:, None], ROPE)
            x = x * cos + partner * sin
        tl.store(out_rows[:, None] + dims[None, :], round_to(x, DTYPE, TARGET), mask=mask[:, None] & in_dims[None, :])


@triton.jit
def copy_words(src_rows, dst_rows, mask, exists, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """COUNT elements of rows as they are, 0 for those of `mask` that do not exist. All are [BLOCK_R]."""
    columns = tl.arange(0, BLOCK)
    in_row = (columns < COUNT)[None, :]
    words = tl.load(src_rows[:, None] + columns[None, :], mask=exists[:, None] & in_row, other=0)
    tl.store(dst_rows[:, None] + columns[None, :], words, mask=mask[:, None] & in_row)
