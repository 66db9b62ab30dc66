"""Tiles of cached keys as the pieces (see `pieces`) that attention multiplies: words loaded, unpacked, decoded and rotated."""

import triton
import triton.language as tl

from tkv.kernels.tiles import codec
from tkv.kernels.tiles.dots import round_to
from tkv.kernels.tiles.paging import offsets_of
from tkv.kernels.tiles.pieces import piece_dims, run_words
from tkv.kernels.tiles.rope import load_angles, partner_of


@triton.jit
def load_of_keys(ptrs, seen):
    """A number of each key of a tile, [BLOCK_N]; 0 for keys that are not seen. If `seen` is None, all are."""
    if seen is None:
        return tl.load(ptrs)
    else:
        return tl.load(ptrs, mask=seen, other=0)


@triton.jit
def load_tile(ptrs, seen, in_row, TRANSPOSED: tl.constexpr, IS_WHOLE: tl.constexpr):
    """The same for [BLOCK_N, columns], or transposed; 0 in columns that are not in the row too. IS_WHOLE: all of them are."""
    if seen is None and IS_WHOLE:
        return tl.load(ptrs)
    else:
        mask = in_row[:, None] if TRANSPOSED else in_row[None, :]
        if seen is not None:
            mask = mask & (seen[None, :] if TRANSPOSED else seen[:, None])
        return tl.load(ptrs, mask=mask, other=0)


@triton.jit
def load_columns(stored, offsets, head, seen, columns, in_row, TRANSPOSED: tl.constexpr, STORAGE: tl.constexpr):
    """Words of a tile of keys at some columns."""
    # Strides such as 40 words are no multiple of 16, so the compiler has to be told that rows are aligned.
    ALIGN: tl.constexpr = STORAGE.ALIGN
    IS_WHOLE: tl.constexpr = columns.shape[0] == STORAGE.DIM // STORAGE.PLANES
    base = stored.ptr + tl.multiple_of(head * stored.strides.head, ALIGN)
    offsets = tl.multiple_of(offsets, ALIGN)
    if TRANSPOSED:
        return load_tile(base + (columns[:, None] + offsets[None, :]), seen, in_row, True, IS_WHOLE)
    else:
        return load_tile(base + (offsets[:, None] + columns[None, :]), seen, in_row, False, IS_WHOLE)


@triton.jit
def load_words(stored, offsets, head, seen, RUN: tl.constexpr, TRANSPOSED: tl.constexpr, STORAGE: tl.constexpr):
    """A run of words of a tile of keys."""
    columns = run_words(RUN, STORAGE)
    return load_columns(stored, offsets, head, seen, columns, columns < STORAGE.DIM // STORAGE.PLANES, TRANSPOSED, STORAGE)


@triton.jit
def load_token_scales(stored, pages, rows, head, seen, STORAGE: tl.constexpr):
    """(scales, minima), [BLOCK_N] float32: where they are folded, one a token and head; 0 for keys that are not seen."""
    base = stored.scale_ptr + head * stored.scale_strides.head
    words = load_of_keys(base + offsets_of(pages, rows, stored.scale_strides), seen)
    if STORAGE.ASYMMETRIC:
        scales, minima = codec.split_pair(words)
        return scales.to(tl.float32), minima.to(tl.float32)
    else:
        return words, tl.zeros([words.shape[0]], tl.float32)


@triton.jit
def load_scales(stored, pages, rows, head, seen, num_pages, dims, in_row, TRANSPOSED: tl.constexpr, STORAGE: tl.constexpr):
    """Scale words that go with some dims of a tile of keys, in a shape that broadcasts to it."""
    base = stored.scale_ptr + head * stored.scale_strides.head
    IS_WHOLE: tl.constexpr = dims.shape[0] == STORAGE.DIM // STORAGE.PLANES
    if STORAGE.SCALE == "page_channel":
        if pages.type.is_block():
            return load_tile(base + (dims[:, None] + (pages * stored.scale_strides.page)[None, :]), seen, in_row, True, IS_WHOLE)
        else:
            in_page = in_row & (pages >= 0) & (pages < num_pages)
            return tl.load(base + pages * stored.scale_strides.page + dims, mask=in_page, other=0)[:, None]
    else:
        offsets = base + offsets_of(pages, rows, stored.scale_strides)
        if STORAGE.SCALE == "token_head":
            words = load_of_keys(offsets, seen)
            return words[None, :] if TRANSPOSED else words[:, None]
        elif TRANSPOSED:
            return load_tile(offsets[None, :] + (dims // STORAGE.GROUP)[:, None], seen, in_row, True, IS_WHOLE)
        else:
            return load_tile(offsets[:, None] + (dims // STORAGE.GROUP)[None, :], seen, in_row, False, IS_WHOLE)


@triton.jit
def load_piece_scales(stored, pages, rows, head, seen, num_pages, PIECE: tl.constexpr, TRANSPOSED: tl.constexpr, STORAGE: tl.constexpr):
    """Scale words that go with a piece of a tile of keys, in a shape that broadcasts to it."""
    dims, in_row = piece_dims(PIECE, STORAGE)
    FIRST: tl.constexpr = PIECE * (STORAGE.DIM // 4)
    LAST: tl.constexpr = FIRST + STORAGE.DIM // 4 - 1
    IS_ONE: tl.constexpr = STORAGE.PLANES == 4 and STORAGE.RUNS == 1 and FIRST // STORAGE.GROUP == LAST // STORAGE.GROUP
    if STORAGE.SCALE == "group" and IS_ONE:
        offsets = stored.scale_ptr + head * stored.scale_strides.head + offsets_of(pages, rows, stored.scale_strides)
        words = load_of_keys(offsets + FIRST // STORAGE.GROUP, seen)
        return words[None, :] if TRANSPOSED else words[:, None]
    else:
        return load_scales(stored, pages, rows, head, seen, num_pages, dims, in_row, TRANSPOSED, STORAGE)


@triton.jit
def numbers_of(codes, scale_words, DTYPE: tl.constexpr, STORAGE: tl.constexpr, TARGET: tl.constexpr):
    """A piece of codes as numbers, where scales are not folded."""
    if STORAGE.ASYMMETRIC:
        scales, minima = codec.split_pair(scale_words)
    else:
        scales, minima = scale_words, scale_words
    if STORAGE.SCALE == "token_head":
        return codes.to(tl.float32) * scales.to(tl.float32) + minima.to(tl.float32)
    else:
        return codec.decoded(codes, scales, minima, STORAGE, TARGET).to(DTYPE)


@triton.jit
def load_pieces(
    stored, words, pages, rows, head, seen, num_pages,
    TRANSPOSED: tl.constexpr, DTYPE: tl.constexpr, STORAGE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """(pieces of a tile of keys in DTYPE, the words of its first run). If `words` are not None, they are those words already."""
    PIECES: tl.constexpr = STORAGE.RUNS * STORAGE.PLANES
    RUNS: tl.constexpr = STORAGE.RUNS
    PLANES: tl.constexpr = STORAGE.PLANES
    offsets = offsets_of(pages, rows, stored.strides)
    pieces = ()
    if STORAGE.CODE == "native":
        for piece in tl.static_range(PIECES):
            if words is None or piece > 0:
                dims, in_row = piece_dims(piece, STORAGE)
                tile = load_columns(stored, offsets, head, seen, dims, in_row, TRANSPOSED, STORAGE)
            else:
                tile = words
            if piece == 0:
                words = tile
            pieces = pieces + (tile.to(DTYPE),)
    else:
        for run in tl.static_range(RUNS):
            if words is None or run > 0:
                tile = load_words(stored, offsets, head, seen, run, TRANSPOSED, STORAGE)
            else:
                tile = words
            if run == 0:
                words = tile
            codes = codec.unpack(tile, STORAGE, TARGET)
            for plane in tl.static_range(PLANES):
                if STORAGE.FOLDED:
                    piece = codes[plane].to(DTYPE)
                else:
                    # Both dims of an 8-bit word are in one group.
                    if plane == 0 or PLANES == 4 or STORAGE.SCALE != "group":
                        scale_words = load_piece_scales(
                            stored, pages, rows, head, seen, num_pages, run * PLANES + plane, TRANSPOSED, STORAGE
                        )
                    piece = numbers_of(codes[plane], scale_words, DTYPE, STORAGE, TARGET)
                pieces = pieces + (piece,)
    return pieces, words


@triton.jit
def load_dims(stored, pages, rows, head, seen, num_pages, dims, in_row, STORAGE: tl.constexpr, TARGET: tl.constexpr):
    """Any dims of a tile of keys, [dims, BLOCK_N] float32: codes as `load_pieces` has them where scales are folded, else numbers."""
    offsets = offsets_of(pages, rows, stored.strides)
    if STORAGE.CODE == "native":
        return load_columns(stored, offsets, head, seen, dims, in_row, True, STORAGE).to(tl.float32)
    else:
        WORDS: tl.constexpr = STORAGE.DIM // STORAGE.PLANES
        if STORAGE.PLANES == 4:
            columns, shifts = dims % WORDS, 4 * (dims // WORDS)
        else:
            columns, shifts = dims // 2, 8 * (dims % 2)
        words = load_columns(stored, offsets, head, seen, columns, in_row, True, STORAGE)
        words = words.to(tl.int32) >> shifts[:, None]
        codes = codec.decode(words & (15 if STORAGE.PLANES == 4 else 255), 0, STORAGE) * (1.0 / codec.unit(STORAGE, TARGET))
        if STORAGE.FOLDED:
            return codes
        else:
            scale_words = load_scales(stored, pages, rows, head, seen, num_pages, dims, in_row, True, STORAGE)
            return numbers_of(codes.to(tl.float16), scale_words, tl.float32, STORAGE, TARGET)


@triton.jit
def load_keys(
    stored, pages, rows, head, seen, num_pages, turns, rope,
    DTYPE: tl.constexpr, STORAGE: tl.constexpr, ROPE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """(pieces of a tile of K [words, BLOCK_N] in DTYPE, rotated by `turns` if ROPE is there; the words of its first run)."""
    if ROPE.DIM == 0:
        return load_pieces(stored, None, pages, rows, head, seen, num_pages, True, DTYPE, STORAGE, TARGET)
    else:
        PIECES: tl.constexpr = STORAGE.RUNS * STORAGE.PLANES
        pieces, words = load_pieces(stored, None, pages, rows, head, seen, num_pages, True, tl.float32, STORAGE, TARGET)
        rotated = ()
        for piece in tl.static_range(PIECES):
            dims, in_row = piece_dims(piece, STORAGE)
            partners = partner_of(dims, ROPE)
            in_pair = in_row & (dims < ROPE.DIM)
            own = pieces[piece]
            partner = load_dims(stored, pages, rows, head, seen, num_pages, partners, in_pair, STORAGE, TARGET)
            if STORAGE.SCALE == "channel":
                own = own * load_channels(stored, head, dims, in_row)[:, None]
                partner = partner * load_channels(stored, head, partners, in_pair)[:, None]
            cos, sin = load_angles(rope, dims[:, None], turns[None, :], ROPE)
            turned = (own * cos + partner * sin) * (codec.unit(STORAGE, TARGET) / turned_unit(DTYPE, STORAGE))
            rotated = rotated + (round_to(turned, DTYPE, TARGET),)
        return rotated, words


@triton.jit
def turned_unit(DTYPE: tl.constexpr, STORAGE: tl.constexpr):
    """What rotated keys are divided by, so that float16 holds them: their numbers grow by up to the root of 2 and the tables' factor."""
    if DTYPE != tl.float16 or STORAGE.CODE == "native":
        return 1.0
    elif STORAGE.CODE == "fp8_e4m3":
        return 0.03125
    elif STORAGE.CODE == "int8" and STORAGE.FOLDED:
        return 0.015625
    else:
        return 4.0


@triton.jit
def load_channels(stored, head, dims, in_row):
    """Scales of channels."""
    return tl.load(stored.scale_ptr + head * stored.scale_strides.head + dims, mask=in_row, other=0.0)
