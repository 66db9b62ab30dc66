"""Heads of a rank under tensor parallelism."""

from __future__ import annotations

import torch

import tkv
from tkv.errors import RangeError, UnsupportedError
from tkv.ops.checks import check_cache, check_int


def q_heads(num_q_heads: int, rank: int, world_size: int) -> slice:
    """The query heads of a rank, of q, out, LSE, ``alibi_slopes`` and ``sink_logits``.

    Args:
        num_q_heads: of the model, a multiple of `world_size`.
        rank, world_size: of the tensor-parallel group.

    Returns:
        A slice of the heads.

    Raises:
        UnsupportedError: the heads do not divide by `world_size`.
        DTypeError, RangeError: an argument is no int, or outside its range.

    Example:
        >>> q_heads(32, rank=1, world_size=4)
        slice(8, 16, None)
    """
    _check_rank(rank, world_size)
    if check_int("num_q_heads", num_q_heads, 1) % world_size:
        raise UnsupportedError(f"num_q_heads: expected a multiple of world_size ({world_size}), got {num_q_heads}")
    count = num_q_heads // world_size
    return slice(rank * count, (rank + 1) * count)


def kv_heads(num_kv_heads: int, rank: int, world_size: int) -> slice:
    """The KV heads that a rank's query heads read: some each, or one that ``world_size / num_kv_heads`` ranks have copies of.

    Args:
        num_kv_heads: of the model; it divides by `world_size`, or `world_size` by it.
        rank, world_size: of the tensor-parallel group.

    Returns:
        A slice of the heads.

    Raises:
        UnsupportedError: neither divides by the other.
        DTypeError, RangeError: an argument is no int, or outside its range.

    Example:
        >>> kv_heads(8, rank=1, world_size=4), kv_heads(2, rank=1, world_size=4)
        (slice(2, 4, None), slice(0, 1, None))
    """
    _check_rank(rank, world_size)
    if check_int("num_kv_heads", num_kv_heads, 1) % world_size and world_size % num_kv_heads:
        raise UnsupportedError(f"num_kv_heads: expected a multiple or a divisor of world_size ({world_size}), got {num_kv_heads}")
    first = rank * num_kv_heads // world_size
    return slice(first, first + max(1, num_kv_heads // world_size))


def shard_heads(cache: tkv.KVCache, rank: int, world_size: int) -> tkv.KVCache:
    """A rank's heads of a cache, as views of its tensors: what is written through one is read through the other.

    K, V and scales that differ from head to head are sliced by `kv_heads`; query heads that go with them are `q_heads`. Attention with
    the shard gives the rank's heads of the result, which need no merging.

    Args:
        cache: of all heads, in any format.
        rank, world_size: of the tensor-parallel group.

    Returns:
        The cache of the rank.

    Raises:
        UnsupportedError: the KV heads neither divide `world_size` nor are divided by it.
        DTypeError, RangeError: an argument has the wrong type or is outside its range.

    Example:
        >>> shard_heads(tkv.KVCache.empty(4, 16, 8, 64, format="int8/token_head"), rank=1, world_size=4)
        KVCache(int8/token_head, 4 pages of 16 tokens, 2 KV heads of 64, 17,408 bytes)
    """
    heads = kv_heads(check_cache(cache).num_kv_heads, rank, world_size)

    def of_scale(scale: torch.Tensor | None, kind: tkv.KVFormat) -> torch.Tensor | None:
        if scale is None or kind.scale == "tensor":
            return scale
        return scale[heads] if kind.is_static else scale[:, heads] if kind.scale == "page_channel" else scale[:, :, heads]

    k_scale, v_scale = of_scale(cache.k_scale, cache.k_format), of_scale(cache.v_scale, cache.v_format)
    return tkv.KVCache(cache.k[:, :, heads], cache.v[:, :, heads], k_scale, v_scale, format=(cache.k_format, cache.v_format))


def _check_rank(rank: int, world_size: int) -> None:
    check_int("world_size", world_size, 1)
    if check_int("rank", rank, 0) >= world_size:
        raise RangeError(f"rank: expected 0 to {world_size - 1}, got {rank}")
