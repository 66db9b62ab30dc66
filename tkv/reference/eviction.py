"""Keys that move in the cache, or turn in it."""

from __future__ import annotations

import torch

from tkv.cache import KVCache
from tkv.reference.rope import rotate
from tkv.rope import Rope


def compact_kv(
    cache: KVCache,
    page_table: torch.Tensor,
    keep: torch.Tensor,
    keep_lens: torch.Tensor,
    *,
    scores: torch.Tensor | None = None,
    dst_page_table: torch.Tensor | None = None,
) -> None:
    """Move kept keys to the front, as :func:`tkv.compact_kv`.

    Args:
        cache, page_table, keep, keep_lens, scores, dst_page_table: as there.

    Example:
        >>> cache = KVCache(torch.arange(4.0).view(1, 4, 1, 1).repeat(1, 1, 1, 16), torch.zeros(1, 4, 1, 16))
        >>> compact_kv(cache, torch.tensor([[0]]), torch.tensor([[[1, 3]]]), torch.tensor([2]))
        >>> cache.k[0, :, 0, 0].tolist()
        [1.0, 3.0, 2.0, 3.0]
    """
    dst_page_table = page_table if dst_page_table is None else dst_page_table
    size = cache.page_size
    by_token = [] if scores is None else [scores]
    by_page: list[torch.Tensor] = []
    for data, scale, kind in [(cache.k, cache.k_scale, cache.k_format), (cache.v, cache.v_scale, cache.v_format)][: 2 - cache.v_is_k]:
        by_token.append(data)
        if scale is not None and kind.is_dynamic:
            (by_page if kind.scale == "page_channel" else by_token).append(scale)
    for tensor in by_token:
        old = tensor.clone()
        for seq, head, place, key in _moves(keep, keep_lens, cache.num_kv_heads):
            tensor[dst_page_table[seq, place // size], place % size, head] = old[page_table[seq, key // size], key % size, head]
    for tensor in by_page:
        old = tensor.clone()
        for seq, head, place, key in _moves(keep, keep_lens, cache.num_kv_heads):
            tensor[dst_page_table[seq, place // size], head] = old[page_table[seq, key // size], head]


def _moves(keep: torch.Tensor, keep_lens: torch.Tensor, num_heads: int) -> list[tuple[int, int, int, int]]:
    """(sequence, head, new place, logical key) of every kept key."""
    lists = keep.expand(-1, num_heads, -1).tolist()
    return [
        (seq, head, place, key)
        for seq, count in enumerate(keep_lens.tolist())
        for head in range(num_heads)
        for place, key in enumerate(lists[seq][head][:count])
    ]


def rotate_keys(
    cache: KVCache, page_table: torch.Tensor, seq_lens: torch.Tensor, old_pos: torch.Tensor, new_pos: torch.Tensor, rope: Rope
) -> None:
    """Turn cached keys to other positions, as :func:`tkv.rotate_keys`.

    Args:
        cache, page_table, seq_lens, old_pos, new_pos, rope: as there.

    Example:
        >>> cache = KVCache(torch.ones(1, 4, 1, 16), torch.ones(1, 4, 1, 16))
        >>> rope = Rope(torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]]))
        >>> rotate_keys(cache, torch.tensor([[0]]), torch.tensor([1]), torch.tensor([[1]]), torch.tensor([[0]]), rope)
        >>> cache.k[0, 0, 0, :2].tolist()
        [1.0, -1.0]
    """
    factor = rope.cos[0].double()
    for seq, length in enumerate(seq_lens.clamp(0, old_pos.shape[1]).tolist()):
        for key in range(length):
            turn = new_pos[seq, key].long() - old_pos[seq, key].long()
            page = int(page_table[seq, key // cache.page_size])
            if turn and 0 <= page < cache.num_pages:
                k = rotate(cache.k[page, key % cache.page_size], turn, rope)
                pairs = factor.repeat_interleave(2) if rope.interleaved else factor.repeat(2)
                k[..., : rope.rotary_dim] /= pairs
                cache.k[page, key % cache.page_size] = k.to(cache.k.dtype)
