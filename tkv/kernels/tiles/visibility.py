"""Which keys a query sees: positions to tile ranges and masks.

Logical key j of a call has position ``kv_start + j``; a query at position p sees it iff ``position <= p`` and, with a window,
``p - position < window or position < sinks``. A *span* is what the query rows of positions first..last see between them:

    end          keys from here on are seen by no row
    window_from  keys before this one are left of every row's window ...
    sink_end     ... and only those before this one are still seen, as sink tokens
    sink_tiles   tiles [0, sink_tiles) hold the sink tokens
    window_tile  tiles from window_tile on hold the windows
    tiles        tiles to visit in all: *visit* i is tile i, or from sink_tiles on tile i - sink_tiles + window_tile
"""

import triton
import triton.language as tl


@triton.jit
def span_of(num_keys, kv_start, first, last, window, sinks, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The span of query rows at positions first..last over a sequence's keys 0..num_keys - 1."""
    end = tl.maximum(tl.minimum(num_keys, last - kv_start + 1), 0)
    if HAS_WINDOW:
        window_from = tl.minimum(tl.maximum(first - window + 1 - kv_start, 0), end)
        sink_end = tl.minimum(tl.maximum(sinks - kv_start, 0), window_from)
    else:
        window_from = end * 0
        sink_end = end * 0
    sink_tiles = tl.cdiv(sink_end, BLOCK_N)
    window_tile = tl.maximum(window_from // BLOCK_N, sink_tiles)
    in_windows = tl.maximum(tl.cdiv(end, BLOCK_N) - window_tile, 0)
    tiles = sink_tiles + tl.where(window_from < end, in_windows, 0)
    return (end, window_from, sink_end, sink_tiles, window_tile, tiles)


@triton.jit
def tile_of(visit, span):
    """The tile of a visit."""
    return tl.where(visit < span[3], visit, visit - span[3] + span[4])


@triton.jit
def full_tiles(num_keys, kv_start, first, BLOCK_N: tl.constexpr):
    """How many leading tiles hold only keys that all rows from position `first` on see, without a window; they need no mask."""
    return tl.maximum(tl.minimum(num_keys, first - kv_start + 1), 0) // BLOCK_N


@triton.jit
def seen_keys(keys, span):
    """Which keys some row of the span sees, [BLOCK_N]."""
    return (keys < span[0]) & ((keys >= span[1]) | (keys < span[2]))


@triton.jit
def seen_by_rows(key_positions, positions, window, sinks, HAS_WINDOW: tl.constexpr):
    """Which keys each row sees, as far as positions say, [BLOCK_M, BLOCK_N]."""
    distance = positions[:, None] - key_positions[None, :]
    seen = distance >= 0
    if HAS_WINDOW:
        seen = seen & ((distance < window) | (key_positions < sinks)[None, :])
    return seen
