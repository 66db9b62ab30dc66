"""The inner loop of attention: the online softmax of a block of query rows over tiles of a paged sequence.

Rows come as planes of q (see `codec`), and so goes the accumulator. Scores are raw (see `softmax`): `rows_scale` takes them to log2.
"""

import triton
import triton.language as tl

from tkv.kernels.tiles import codec
from tkv.kernels.tiles.dots import dot, round_to
from tkv.kernels.tiles.paging import locate, offsets_of
from tkv.kernels.tiles.softmax import LOG2_E, softmax_step
from tkv.kernels.tiles.visibility import in_window, place_new_keys, seen_keys, tile_of


@triton.jit
def tanh(x):
    """tanh within a few units of the last place of float32: a polynomial near 0, where the quotient would cancel."""
    square = x * x
    near = x * (1.0 + square * (-0.33333334 + square * (0.13333334 + square * (-0.053968254 + square * 0.021869488))))
    t = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    far = (1.0 - t) / (1.0 + t)
    return tl.where(square < 0.0625, near, tl.where(x < 0, -far, far))


@triton.jit
def power_of_two_from(x):
    """The least power of two that is at least x, for x of 0 (gives 0) to 2^126 (and for more)."""
    bits = (x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return tl.minimum(bits, 0x7E800000).to(tl.float32, bitcast=True)


@triton.jit
def unit_for(scales, unit, peak):
    """(unit for a tile of V with these scales, largest unit so far), [] each, powers of two.

    About the tile's largest scale; at least 2^-64 of the largest so far, so that what is summed cannot overflow in the new unit.
    """
    largest = tl.max(scales, axis=0)
    new_unit = tl.maximum(power_of_two_from(largest), peak * 5.421010862427522e-20)
    new_unit = tl.where(largest > 0, new_unit, unit)
    return new_unit, tl.maximum(new_unit, peak)


@triton.jit
def load_words(stored, offsets, head, seen, TRANSPOSED: tl.constexpr, STORAGE: tl.constexpr):
    """Words of a tile of keys: [BLOCK_N, WIDTH], or [WIDTH, BLOCK_N]; 0 for keys that are not seen."""
    # Strides such as 40 words are no multiple of 16, so the compiler has to be told that rows are aligned.
    ALIGN: tl.constexpr = STORAGE.ALIGN
    base = stored.ptr + tl.multiple_of(head * stored.strides.head, ALIGN)
    offsets = tl.multiple_of(offsets, ALIGN)
    words = tl.arange(0, STORAGE.WIDTH)
    in_row = words < STORAGE.DIM // STORAGE.PLANES
    if TRANSPOSED:
        return tl.load(base + (words[:, None] + offsets[None, :]), mask=in_row[:, None] & seen[None, :], other=0)
    else:
        return tl.load(base + (offsets[:, None] + words[None, :]), mask=seen[:, None] & in_row[None, :], other=0)


@triton.jit
def load_scales(stored, pages, rows, head, seen):
    """Scales of a tile of keys, [BLOCK_N] float32; 0 for keys that are not seen."""
    base = stored.scale_ptr + head * stored.scale_strides.head
    return tl.load(base + offsets_of(pages, rows, stored.scale_strides), mask=seen, other=0.0)


@triton.jit
def accumulate(acc, decay, p, v, STORAGE: tl.constexpr, TARGET: tl.constexpr):
    """acc * decay + p @ v, plane by plane."""
    if STORAGE.PLANES == 1:
        return (dot(p, v[0], acc[0] * decay[:, None], TARGET),)
    else:
        return (dot(p, v[0], acc[0] * decay[:, None], TARGET), dot(p, v[1], acc[1] * decay[:, None], TARGET))


@triton.jit
def start(BLOCK_M: tl.constexpr, V: tl.constexpr):
    """The state before the first tile: (best, total, accumulator planes, unit of the accumulator, its largest so far)."""
    best = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # Nothing is summed yet, so any unit may follow; only a V whose scales change it starts below all of them.
    unit = tl.full([], 1.1754943508222875e-38 if V.SCALE == "token_head" else 1.0, tl.float32)
    if V.PLANES == 1:
        return best, total, (tl.full([BLOCK_M, V.WIDTH], 0.0, tl.float32),), unit, unit
    else:
        zeros = tl.full([BLOCK_M, V.WIDTH], 0.0, tl.float32)
        return best, total, (zeros, zeros), unit, unit


@triton.jit
def attend_tiles(
    state, q, rows_scale, positions, slopes, tree, source, where, num_pages, head, kv_start, bounds, visits, limits,
    first, last, gap_at, gap,
    MASKED: tl.constexpr, ATTEND: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """The state after visits first..last - 1 of a source of keys, or from `gap_at` on those `gap` later.

    Args: q: planes [BLOCK_M, K.WIDTH]; rows_scale, positions, slopes: [BLOCK_M]; head: int64; bounds, visits, tree: see `visibility`;
    source, where: see `locate`; MASKED: some row does not see some key of some visit; otherwise there is no gap.
    """
    K_PLANES: tl.constexpr = K.PLANES
    best, total, acc, unit, peak = state
    # With masks there are a few tiles at the ends: nothing to keep in flight for.
    for visit in tl.range(first, last, num_stages=1 if MASKED else None):
        if MASKED:
            first_key = tile_of(visit + tl.where(visit >= gap_at, gap, 0), visits) * ATTEND.BLOCK_N
        else:
            first_key = (visit + (visits[2] - visits[1])) * ATTEND.BLOCK_N
        keys = first_key + tl.arange(0, ATTEND.BLOCK_N)
        if MASKED:
            seen = seen_keys(keys, bounds)
        else:
            seen = tl.full([ATTEND.BLOCK_N], True, tl.int1)
        pages, rows, seen = locate(first_key, seen, where, num_pages, ATTEND.PAGE_SIZE, ATTEND.BLOCK_N)

        words = load_words(source.k, offsets_of(pages, rows, source.k.strides), head, seen, True, K)
        k = codec.unpack(words, ATTEND.DTYPE, K, TARGET)  # planes [K.WIDTH, BLOCK_N]
        x = tl.full([positions.shape[0], ATTEND.BLOCK_N], 0.0, tl.float32)
        for plane in tl.static_range(K_PLANES):
            x = dot(q[plane], k[plane], x, TARGET)
        if K.SCALE == "token_head":
            x = x * load_scales(source.k, pages, rows, head, seen)[None, :]

        visible = seen[None, :]
        key_positions = (keys + kv_start)[None, :]
        if MASKED and not ATTEND.ONE_POSITION:
            if ATTEND.HAS_TREE:
                key_positions, allowed = place_new_keys(keys + kv_start, tree)
                visible = visible & allowed
            else:
                visible = visible & (positions[:, None] >= key_positions)
            if ATTEND.HAS_WINDOW:
                visible = visible & in_window(positions[:, None] - key_positions, key_positions, limits.window, limits.sinks)
                # Windows of rows that stand far apart leave keys between them, which may hold anything.
                seen = seen & (tl.max(visible.to(tl.int32), axis=0) > 0)
        scale = rows_scale
        if ATTEND.HAS_SOFTCAP or ATTEND.HAS_ALIBI:
            x = x * rows_scale[:, None]
            if ATTEND.HAS_SOFTCAP:
                x = limits.softcap * LOG2_E * tanh(x / (limits.softcap * LOG2_E))
            if ATTEND.HAS_ALIBI:
                x = x - slopes[:, None] * LOG2_E * (positions[:, None] - key_positions).to(tl.float32)
            scale = tl.full([positions.shape[0]], 1.0, tl.float32)
        if MASKED or ATTEND.PAGE_SIZE != 0:
            x = tl.where(visible, x, -float("inf"))
        p, decay, best, total = softmax_step(x, best, total, scale, ATTEND.LIFT, K.SCALE == "token_head")

        words = load_words(source.v, offsets_of(pages, rows, source.v.strides), head, seen, False, V)
        v = codec.unpack(words, ATTEND.DTYPE, V, TARGET)  # planes [BLOCK_N, V.WIDTH]
        if V.SCALE == "token_head":
            # Scales ride on p, in units of about the tile's largest, so that p stays within fp16; a power of two loses no bit.
            scales = load_scales(source.v, pages, rows, head, seen)
            new_unit, peak = unit_for(scales, unit, peak)
            p = p * (scales * (1.0 / new_unit))[None, :]
            decay = decay * (unit * (1.0 / new_unit))
            unit = new_unit
        acc = accumulate(acc, decay, round_to(p, ATTEND.DTYPE, TARGET), v, V, TARGET)
    return best, total, acc, unit, peak


@triton.jit
def attend_source(
    state, q, rows_scale, positions, slopes, tree, source, where, num_pages, head, kv_start, bounds, visits, full, limits, first, last,
    ATTEND: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """The state after visits first..last - 1: the full ones without masks, then what is left of them on either side."""
    last = tl.maximum(last, first)
    full_from = tl.minimum(tl.maximum(full[0], first), last)
    full_to = tl.minimum(tl.maximum(full[1], full_from), last)
    state = attend_tiles(
        state, q, rows_scale, positions, slopes, tree, source, where, num_pages, head, kv_start, bounds, visits, limits,
        full_from, full_to, 0, 0, False, ATTEND, K, V, TARGET,
    )  # fmt: skip
    gap = full_to - full_from
    return attend_tiles(
        state, q, rows_scale, positions, slopes, tree, source, where, num_pages, head, kv_start, bounds, visits, limits,
        first, last - gap, full_from, gap, True, ATTEND, K, V, TARGET,
    )  # fmt: skip


@triton.jit
def score_unit(rows_scale, ATTEND: tl.constexpr):
    """What takes the maxima of a state to log2 units: softcap and ALiBi have done it before."""
    if ATTEND.HAS_SOFTCAP or ATTEND.HAS_ALIBI:
        return tl.full([rows_scale.shape[0]], 1.0, tl.float32)
    else:
        return rows_scale


@triton.jit
def change_units(state, ratio, v_unit, V: tl.constexpr):
    """A state as one of native keys and values: dims in their order, V in units of 1, maxima times `ratio`."""
    best, total, acc, unit, _ = state
    one = tl.full([], 1.0, tl.float32)
    return best * ratio, total, (codec.natural(acc, V) * (unit * v_unit),), one, one
