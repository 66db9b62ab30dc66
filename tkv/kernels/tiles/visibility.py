"""Which keys a block of query rows sees: positions to ranges of tiles, and masks.

Logical key j of a source has position ``kv_start + j``, or j if it is pinned, ``j < pinned``; a query at position p sees it iff
``position <= p`` and, with a window, ``p - position < window or position < sinks``. Keys before `skip` belong to another call.

*bounds*  (begin, sink_end, window_from, end): some row may see keys of [begin, sink_end), which are sink tokens left of every row's
          window, and of [window_from, end); no row sees another.
*visits*  (sink_tile, sink_tiles, window_tile, tiles): what the loop runs over. Visits 0..sink_tiles - 1 are tiles from sink_tile on, the
          others tiles from window_tile on; there are `tiles` of them.
*full*    (from, to): visits of the second kind that hold only keys that every row sees: they need no mask.
"""

import triton
import triton.language as tl


@triton.jit
def positions_of(keys, kv_start, pinned, HAS_PINNED: tl.constexpr):
    """Positions of logical keys."""
    if HAS_PINNED:
        return keys + tl.where(keys < pinned, 0, kv_start)
    else:
        return keys + kv_start


@triton.jit
def keys_before(position, kv_start, pinned, HAS_PINNED: tl.constexpr):
    """How many logical keys stand before a position, if there are so many; negative for none."""
    if HAS_PINNED:
        return tl.maximum(tl.minimum(position, pinned), position - kv_start)
    else:
        return position - kv_start


@triton.jit
def bounds_of(num_keys, kv_start, skip, first, last, limits, HAS_WINDOW: tl.constexpr, HAS_PINNED: tl.constexpr):
    """The bounds of query rows at positions first..last over keys 0..num_keys - 1."""
    end = tl.maximum(tl.minimum(num_keys, keys_before(last + 1, kv_start, limits.pinned, HAS_PINNED)), 0)
    begin = tl.minimum(skip, end)
    if HAS_WINDOW:
        in_windows = keys_before(first - limits.window + 1, kv_start, limits.pinned, HAS_PINNED)
        window_from = tl.minimum(tl.maximum(in_windows, begin), end)
        sink_end = tl.minimum(tl.maximum(keys_before(limits.sinks, kv_start, limits.pinned, HAS_PINNED), begin), window_from)
    else:
        window_from = begin
        sink_end = begin
    return begin, sink_end, window_from, end


@triton.jit
def visits_of(bounds, BLOCK_N: tl.constexpr):
    """The visits of these bounds."""
    begin, sink_end, window_from, end = bounds
    sink_tile = begin // BLOCK_N
    sink_tiles = tl.where(begin < sink_end, tl.cdiv(sink_end, BLOCK_N) - sink_tile, 0)
    window_tile = tl.maximum(window_from // BLOCK_N, sink_tile + sink_tiles)
    in_windows = tl.where(window_from < end, tl.maximum(tl.cdiv(end, BLOCK_N) - window_tile, 0), 0)
    return sink_tile, sink_tiles, window_tile, sink_tiles + in_windows


@triton.jit
def full_of(
    visits, num_keys, kv_start, skip, first, last, limits, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_PINNED: tl.constexpr
):
    """The full visits of rows at positions first..last."""
    _, sink_tiles, window_tile, _ = visits
    low = skip
    if HAS_WINDOW:
        low = tl.maximum(keys_before(last - limits.window + 1, kv_start, limits.pinned, HAS_PINNED), skip)
    high = tl.maximum(tl.minimum(num_keys, keys_before(first + 1, kv_start, limits.pinned, HAS_PINNED)), 0)
    full_from = tl.maximum(tl.cdiv(low, BLOCK_N) - window_tile, 0) + sink_tiles
    return full_from, tl.maximum(high // BLOCK_N - window_tile + sink_tiles, full_from)


@triton.jit
def tile_of(visit, visits):
    """The tile of a visit."""
    sink_tile, sink_tiles, window_tile, _ = visits
    return visit + tl.where(visit < sink_tiles, sink_tile, window_tile - sink_tiles)


@triton.jit
def seen_keys(keys, bounds):
    """Which keys some row may see, [BLOCK_N]."""
    begin, sink_end, window_from, end = bounds
    return ((keys >= window_from) & (keys < end)) | ((keys >= begin) & (keys < sink_end))


@triton.jit
def in_window(distance, key_positions, window, sinks):
    """Whether keys at that distance from a query are in its window, or sink tokens."""
    return (distance < window) | (key_positions < sinks)


@triton.jit
def rows_of_tree(tree, mask_offsets, seqs, tree_rows, q_starts, num_new):
    """(positions of rows in tree attention, what `place_new_keys` takes of them); a mask may have fewer rows than `num_new`."""
    depth_rows = tl.zeros(tree_rows.shape, tl.int64) + seqs.to(tl.int64) * tree.depth_stride
    positions = q_starts + tl.load(tree.depth_ptr + (depth_rows + tree_rows))
    return positions, (tree.mask_ptr, mask_offsets, tree.depth_ptr, depth_rows, q_starts, tl.minimum(num_new, tree.depth_stride))


@triton.jit
def depths_of_new_keys(key_positions, tree):
    """Positions of a tile's keys in tree attention, for rows of one sequence, [BLOCK_N]; see `place_new_keys`."""
    _, _, depth_ptr, depth_rows, q_starts, num_new = tree
    q_start = tl.max(q_starts, axis=0)
    new = key_positions - q_start
    depth = tl.load(depth_ptr + (tl.max(depth_rows, axis=0) + new), mask=(new >= 0) & (new < num_new), other=0)
    return tl.where(new >= 0, q_start + depth, key_positions)


@triton.jit
def place_new_keys(key_positions, tree):
    """Where each row sees which keys of a tile in tree attention: (their positions, whether the tree lets it), [BLOCK_M, BLOCK_N].

    New key c, the one at position ``q_start + c``, stands at the depth of its branch, and only its descendants see it.
    """
    mask_ptr, mask_rows, depth_ptr, depth_rows, q_starts, num_new = tree
    new = key_positions - q_starts[:, None]
    in_tree = (new >= 0) & (new < num_new)
    allowed = tl.load(mask_ptr + (mask_rows[:, None] + new), mask=in_tree, other=0) != 0
    depth = tl.load(depth_ptr + (depth_rows[:, None] + new), mask=in_tree, other=0)
    positions = tl.where(new >= 0, q_starts[:, None] + depth, key_positions)
    return positions, allowed | (new < 0)


@triton.jit
def span_of_rows(positions, in_rows):
    """The span (see `view_of`) of rows at any positions."""
    first = tl.min(tl.where(in_rows, positions, 2147483647), axis=0)
    last = tl.max(tl.where(in_rows, positions, -2147483648), axis=0)
    return first, last, first, last


@triton.jit
def span_of_tree(q_starts, positions, in_rows, num_new, window, HAS_WINDOW: tl.constexpr):
    """The span of rows of trees: of keys from `q_start` on every one is seen by some row, and none by every row."""
    first_start, last_start, _, _ = span_of_rows(q_starts, in_rows)
    first, last, _, _ = span_of_rows(positions, in_rows)
    if HAS_WINDOW:
        first = tl.minimum(first, first_start + (window - 1))
    return first, last_start + num_new - 1, first_start - 1, last


@triton.jit
def view_of(num_keys, kv_start, skip, span, limits, PART: tl.constexpr, ATTEND: tl.constexpr):
    """(bounds, visits, full) of a block of rows over a source of keys; `span` is (first, last, first_full, last_full).

    Keys are seen by some row as by rows at positions first..last, and by every row as by rows at first_full..last_full.
    PART: 0 for all keys; 1 for the sink tokens alone, 2 for all but them.
    """
    first, last, first_full, last_full = span
    if PART > 0:
        sink_keys = keys_before(limits.sinks, kv_start, limits.pinned, ATTEND.HAS_PINNED)
        if PART == 1:
            num_keys = tl.minimum(num_keys, sink_keys)
        else:
            skip = tl.maximum(sink_keys, skip)
    HAS_WINDOW: tl.constexpr = ATTEND.HAS_WINDOW and PART != 1
    bounds = bounds_of(num_keys, kv_start, skip, first, last, limits, HAS_WINDOW, ATTEND.HAS_PINNED)
    visits = visits_of(bounds, ATTEND.BLOCK_N)
    full = full_of(visits, num_keys, kv_start, skip, first_full, last_full, limits, ATTEND.BLOCK_N, HAS_WINDOW, ATTEND.HAS_PINNED)
    return bounds, visits, full
