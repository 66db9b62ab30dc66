"""Rows of a cache, each a head of a token: encoded with their scales on the way in, decoded on the way out."""

import triton
import triton.language as tl

from tkv.kernels.tiles import codec
from tkv.kernels.tiles.dots import round_to
from tkv.kernels.tiles.paging import offsets_of
from tkv.kernels.tiles.pieces import piece_dims, run_words


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
def load_row_pieces(x_rows, mask, STORAGE: tl.constexpr):
    """New rows in float32, pieces [BLOCK_R, words]."""
    PIECES: tl.constexpr = STORAGE.RUNS * STORAGE.PLANES
    pieces = ()
    for piece in tl.static_range(PIECES):
        dims, in_row = piece_dims(piece, STORAGE)
        x = tl.load(x_rows[:, None] + dims[None, :], mask=mask[:, None] & in_row[None, :], other=0.0)
        pieces = pieces + (x.to(tl.float32),)
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
def store_group_scales(x_rows, scale_rows, mask, STORAGE: tl.constexpr):
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
        x = tl.load(x_rows[:, None] + dims[None, :], mask=mask[:, None], other=0.0).to(tl.float32)
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
def write_rows(x_rows, stored, heads, pages, page_rows, mask, STORAGE: tl.constexpr, TARGET: tl.constexpr):
    """Encode rows, whose dim 0 `x_rows` point to, and store them with their scales. All are [BLOCK_R]."""
    RUNS: tl.constexpr = STORAGE.RUNS
    PLANES: tl.constexpr = STORAGE.PLANES
    rows = stored.ptr + (offsets_of(pages, page_rows, stored.strides) + heads * stored.strides.head)
    scale_rows = stored.scale_ptr
    if STORAGE.SCALE == "token_head" or STORAGE.SCALE == "group":
        scale_rows = stored.scale_ptr + (offsets_of(pages, page_rows, stored.scale_strides) + heads * stored.scale_strides.head)
    pieces = load_row_pieces(x_rows, mask, STORAGE)
    if STORAGE.SCALE == "token_head":
        scales, minima = row_scales(pieces, mask, STORAGE)
        store_scales(scale_rows, scales, minima, mask, STORAGE)
    elif STORAGE.SCALE == "group":
        scales, minima = store_group_scales(x_rows, scale_rows, mask, STORAGE)
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
def read_rows(out_rows, stored, heads, pages, page_rows, mask, exists, STORAGE: tl.constexpr, TARGET: tl.constexpr):
    """Decode rows and store them to where `out_rows` point; those of `mask` that do not exist become 0. All are [BLOCK_R]."""
    RUNS: tl.constexpr = STORAGE.RUNS
    PLANES: tl.constexpr = STORAGE.PLANES
    rows = stored.ptr + (offsets_of(pages, page_rows, stored.strides) + heads * stored.strides.head)
    DTYPE: tl.constexpr = out_rows.dtype.element_ty
    for run in tl.static_range(RUNS):
        columns = run_words(run, STORAGE)
        in_row = exists[:, None] & (columns < STORAGE.DIM // STORAGE.PLANES)[None, :]
        words = tl.load(rows[:, None] + columns[None, :], mask=in_row, other=0)
        for plane in tl.static_range(PLANES):
            dims, in_dims = piece_dims(run * STORAGE.PLANES + plane, STORAGE)
            if STORAGE.CODE == "native":
                x = words.to(tl.float32)
            else:
                codes = codec.decode(words, plane, STORAGE)
                if STORAGE.SCALE == "tensor" or STORAGE.SCALE == "head" or STORAGE.SCALE == "channel":
                    x = codes * static_scales(stored, heads, dims, in_dims, STORAGE)
                else:
                    scale_rows = stored.scale_ptr + (offsets_of(pages, page_rows, stored.scale_strides) + heads * stored.scale_strides.head)
                    columns_of = dims
                    if STORAGE.SCALE == "token_head":
                        columns_of = dims * 0
                    elif STORAGE.SCALE == "group":
                        columns_of = dims // STORAGE.GROUP
                    scales = tl.load(scale_rows[:, None] + columns_of[None, :], mask=exists[:, None] & in_dims[None, :], other=0)
                    minima = scales
                    if STORAGE.ASYMMETRIC:
                        scales, minima = codec.split_pair(scales)
                    if STORAGE.SCALE == "token_head":
                        x = codes * scales.to(tl.float32)
                        if STORAGE.ASYMMETRIC:
                            x = x + minima.to(tl.float32)
                    else:
                        x = codec.decoded(codes.to(tl.float16), scales, minima, STORAGE, TARGET).to(tl.float32)
            x = tl.where(exists[:, None], x, 0.0)
            tl.store(out_rows[:, None] + dims[None, :], round_to(x, DTYPE, TARGET), mask=mask[:, None] & in_dims[None, :])
