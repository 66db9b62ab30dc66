"""The inner loop of attention: the online softmax of a block of query rows over tiles of a paged sequence.

Rows come as pieces of q (see `pieces`), and so goes the accumulator. Scores are raw (see `softmax`): `rows_scale` takes them to log2.
"""

import triton
import triton.language as tl

from tkv.kernels.tiles.dots import dot, round_to
from tkv.kernels.tiles.load import load_channels, load_keys, load_pieces, load_token_scales
from tkv.kernels.tiles.paging import locate, locate_all, none_missing
from tkv.kernels.tiles.pieces import natural, piece_dims, zeros
from tkv.kernels.tiles.softmax import LOG2_E, softmax_step
from tkv.kernels.tiles.visibility import depths_of_new_keys, in_window, place_new_keys, positions_of, seen_keys, tile_of


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
def added_by(weights, p, scales, minima, unit):
    """What the minima of a tile of V add to every dim, [BLOCK_M]: sum p * minimum. `weights` are p * scale / unit, rounded.

    V is ``scale * code + minimum``, and the two may nearly cancel. So a minimum is weighed by the same rounded numbers as the codes, but
    where it is so large that they cannot: there their scale may be too small a part of the unit, or 0.
    """
    close = tl.abs(minima) < 16.0 * scales
    minima = tl.where(close, minima / tl.where(close, scales, 1.0) * unit, minima)
    return tl.sum(tl.where(close[None, :], weights.to(tl.float32), p) * minima[None, :], axis=1)


@triton.jit
def start(BLOCK_M: tl.constexpr, V: tl.constexpr):
    """The state before the first tile: (best, total, accumulator, unit of the accumulator, its largest so far, what to add to all dims)."""
    best = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # Nothing is summed yet, so any unit may follow; only a V whose scales change it starts below all of them.
    unit = tl.full([], 1.1754943508222875e-38 if V.SCALE == "token_head" and V.FOLDED else 1.0, tl.float32)
    return best, total, zeros(BLOCK_M, V), unit, unit, tl.zeros([BLOCK_M], tl.float32)


@triton.jit
def score_tile(
    q, q_sum, rows_scale, positions, slopes, tree, source, where, num_pages, head, kv_start, bounds, limits, turn, first_key,
    MASKED: tl.constexpr, ATTEND: tl.constexpr, K: tl.constexpr, ROPE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """Raw scores of the tile of keys from `first_key` on, [BLOCK_M, BLOCK_N], -inf where a row does not see a key.

    Also what takes them to log2 units, which keys some row sees, where they are, which pages are missing, and the first run of
    K's words.
    """
    K_PIECES: tl.constexpr = K.RUNS * K.PLANES
    LOADS_MASKED: tl.constexpr = MASKED or TARGET.FEW_REGISTERS
    keys = first_key + tl.arange(0, ATTEND.BLOCK_N)
    seen = tl.full([ATTEND.BLOCK_N], True, tl.int1)
    if MASKED:
        seen = seen_keys(keys, bounds)
    if LOADS_MASKED:
        pages, rows, seen = locate(first_key, seen, where, num_pages, ATTEND.PAGE_SIZE, ATTEND.BLOCK_N)
        missing = none_missing(ATTEND.PAGE_SIZE, ATTEND.BLOCK_N)
    else:
        pages, rows, missing = locate_all(first_key, where, num_pages, ATTEND.PAGE_SIZE, ATTEND.BLOCK_N)
    key_positions = positions_of(keys, kv_start, limits.pinned, ATTEND.HAS_PINNED)
    rope, base = turn
    turns = key_positions
    if ROPE.DIM > 0:
        if ATTEND.HAS_TREE:
            turns = depths_of_new_keys(key_positions, tree)
        turns = turns - base

    of_keys = seen if LOADS_MASKED else None
    k, words = load_keys(source.k, pages, rows, head, of_keys, num_pages, turns, rope, ATTEND.DTYPE, K, ROPE, TARGET)
    x = tl.full([positions.shape[0], ATTEND.BLOCK_N], 0.0, tl.float32)
    for piece in tl.static_range(K_PIECES):
        x = dot(q[piece], k[piece], x, TARGET)
    if K.SCALE == "token_head" and K.FOLDED:
        k_scales, k_minima = load_token_scales(source.k, pages, rows, head, of_keys, K)
        x = x * k_scales[None, :]
        if K.ASYMMETRIC:
            x = x + q_sum[:, None] * k_minima[None, :]

    key_positions = key_positions[None, :]
    visible = seen[None, :]
    if MASKED and not ATTEND.ONE_POSITION:
        if ATTEND.HAS_TREE:
            key_positions, allowed = place_new_keys(key_positions, tree)
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
    if LOADS_MASKED:
        x = tl.where(visible, x, -float("inf"))
    return x, scale, seen, pages, rows, missing, words


@triton.jit
def attend_tiles(
    state, q, q_sum, rows_scale, positions, slopes, tree, source, where, num_pages, head, kv_start, bounds, visits, limits, turn,
    first, last, gap_at, gap,
    MASKED: tl.constexpr, ATTEND: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROPE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """The state after visits first..last - 1 of a source of keys, or from `gap_at` on those `gap` later; and which pages were missing.

    Args: q: pieces [BLOCK_M, words]; q_sum, rows_scale, positions, slopes: [BLOCK_M]; head: int64; bounds, visits, tree: see
    `visibility`; source, where: see `locate`; turn: tables of the rotation, and what is taken off keys' positions before; MASKED: some
    row does not see some key of some visit, or a page may be missing; otherwise there is no gap.
    """
    V_PIECES: tl.constexpr = V.RUNS * V.PLANES
    best, total, acc, unit, peak, added = state
    any_missing = none_missing(ATTEND.PAGE_SIZE, ATTEND.BLOCK_N)
    # With masks there are a few tiles at the ends: nothing to keep in flight for.
    for visit in tl.range(first, last, num_stages=1 if MASKED else None):
        if MASKED:
            first_key = tile_of(visit + tl.where(visit >= gap_at, gap, 0), visits) * ATTEND.BLOCK_N
        else:
            first_key = (visit + (visits[2] - visits[1])) * ATTEND.BLOCK_N
        x, scale, seen, pages, rows, missing, words = score_tile(
            q, q_sum, rows_scale, positions, slopes, tree, source, where, num_pages, head, kv_start, bounds, limits, turn, first_key,
            MASKED, ATTEND, K, ROPE, TARGET,
        )  # fmt: skip
        any_missing = any_missing | missing
        p, decay, best, total = softmax_step(x, best, total, scale, ATTEND.LIFT)

        if ATTEND.V_IS_K:
            words = tl.trans(words)
        else:
            words = None
        of_keys = seen if MASKED or TARGET.FEW_REGISTERS else None
        v, _ = load_pieces(source.v, words, pages, rows, head, of_keys, num_pages, False, ATTEND.P_DTYPE, V, TARGET)
        if V.SCALE == "token_head" and V.FOLDED:
            # Scales ride on p, in units of about the tile's largest, so that p stays within fp16; a power of two loses no bit.
            v_scales, v_minima = load_token_scales(source.v, pages, rows, head, of_keys, V)
            new_unit, peak = unit_for(v_scales, unit, peak)
            weights = round_to(p * (v_scales * (1.0 / new_unit))[None, :], ATTEND.P_DTYPE, TARGET)
            if V.ASYMMETRIC:
                added = added * decay + added_by(weights, p, v_scales, v_minima, new_unit)
            decay = decay * (unit * (1.0 / new_unit))
            unit = new_unit
        else:
            weights = round_to(p, ATTEND.P_DTYPE, TARGET)
        sums = ()
        for piece in tl.static_range(V_PIECES):
            sums = sums + (dot(weights, v[piece], acc[piece] * decay[:, None], TARGET),)
        acc = sums
    return (best, total, acc, unit, peak, added), any_missing


@triton.jit
def started_again(is_void, state, BLOCK_M: tl.constexpr, V: tl.constexpr):
    """The state before the first tile if what was summed is void, else the state as it is."""
    V_PIECES: tl.constexpr = V.RUNS * V.PLANES
    best, total, acc, unit, peak, added = state
    best_0, total_0, acc_0, unit_0, peak_0, added_0 = start(BLOCK_M, V)
    sums = ()
    for piece in tl.static_range(V_PIECES):
        sums = sums + (tl.where(is_void, acc_0[piece], acc[piece]),)
    best, total, added = tl.where(is_void, best_0, best), tl.where(is_void, total_0, total), tl.where(is_void, added_0, added)
    return best, total, sums, tl.where(is_void, unit_0, unit), tl.where(is_void, peak_0, peak), added


@triton.jit
def attend_source(
    state, q, q_sum, rows_scale, positions, slopes, tree, source, where, num_pages, head, kv_start, bounds, visits, full, limits, turn,
    first, last,
    ATTEND: tl.constexpr, K: tl.constexpr, V: tl.constexpr, ROPE: tl.constexpr, TARGET: tl.constexpr,
):  # fmt: skip
    """The state after visits first..last - 1: the full ones without masks, then what is left of them on either side.

    Of paged keys the state before is that of `start`: where a page is missing, all is done again with masks. With few registers masks are
    there to begin with, for loads that depend on them are not all in flight at once.
    """
    last = tl.maximum(last, first)
    if ROPE.DIM > 0:
        # Masks are little beside the rotation: one loop compiles in half the time.
        state, _ = attend_tiles(
            state, q, q_sum, rows_scale, positions, slopes, tree, source, where, num_pages, head, kv_start, bounds, visits, limits,
            turn, first, last, 0, 0, True, ATTEND, K, V, ROPE, TARGET,
        )  # fmt: skip
        return state
    full_from = tl.minimum(tl.maximum(full[0], first), last)
    full_to = tl.minimum(tl.maximum(full[1], full_from), last)
    CAN_MISS: tl.constexpr = ATTEND.PAGE_SIZE != 0 and not TARGET.FEW_REGISTERS
    if CAN_MISS:
        full_to = tl.where(num_pages > 0, full_to, full_from)
    state, missing = attend_tiles(
        state, q, q_sum, rows_scale, positions, slopes, tree, source, where, num_pages, head, kv_start, bounds, visits, limits,
        turn, full_from, full_to, 0, 0, False, ATTEND, K, V, ROPE, TARGET,
    )  # fmt: skip
    gap = full_to - full_from
    if CAN_MISS:
        is_void = (missing if ATTEND.PAGE_SIZE % ATTEND.BLOCK_N == 0 else tl.max(missing, axis=0)) > 0
        state = started_again(is_void, state, positions.shape[0], V)
        gap = tl.where(is_void, 0, gap)
    state, _ = attend_tiles(
        state, q, q_sum, rows_scale, positions, slopes, tree, source, where, num_pages, head, kv_start, bounds, visits, limits,
        turn, first, last - gap, full_from, gap, True, ATTEND, K, V, ROPE, TARGET,
    )  # fmt: skip
    return state


@triton.jit
def score_unit(rows_scale, ATTEND: tl.constexpr):
    """What takes the maxima of a state to log2 units: softcap and ALiBi have done it before."""
    if ATTEND.HAS_SOFTCAP or ATTEND.HAS_ALIBI:
        return tl.full([rows_scale.shape[0]], 1.0, tl.float32)
    else:
        return rows_scale


@triton.jit
def true_numbers(acc, factor, added, stored, head, V: tl.constexpr):
    """Pieces of an accumulator times `factor`, with what scales of V were left out of it."""
    V_PIECES: tl.constexpr = V.RUNS * V.PLANES
    pieces = ()
    for piece in tl.static_range(V_PIECES):
        numbers = acc[piece] * factor[:, None]
        if V.SCALE == "channel":
            dims, in_row = piece_dims(piece, V)
            numbers = numbers * load_channels(stored, head, dims, in_row)[None, :]
        if V.ASYMMETRIC and V.SCALE == "token_head" and V.FOLDED:
            numbers = numbers + added[:, None]
        pieces = pieces + (numbers,)
    return pieces


@triton.jit
def change_units(state, ratio, v_unit, stored, head, V: tl.constexpr):
    """A state as one of native keys and values: in true numbers, 8-bit dims in their order, maxima times `ratio`."""
    best, total, acc, unit, _, added = state
    acc = true_numbers(acc, tl.zeros_like(best) + unit * v_unit, added, stored, head, V)
    one = tl.full([], 1.0, tl.float32)
    return best * ratio, total, natural(acc, V), one, one, tl.zeros_like(added)


@triton.jit
def in_score_unit(state, rows_scale, new_rows_scale, ATTEND: tl.constexpr):
    """A state whose raw scores are from now on those of another q, which another scale takes to log2 units."""
    best, total, acc, unit, peak, added = state
    return best * (score_unit(rows_scale, ATTEND) / score_unit(new_rows_scale, ATTEND)), total, acc, unit, peak, added
