"""Attention mass of cached keys, one sequence after the other."""

from __future__ import annotations

import math

import torch

from tkv.cache import KVCache
from tkv.reference.attention import look, products, rotated_products
from tkv.reference.storage import gather
from tkv.rope import Rope


def key_scores(
    q: torch.Tensor,
    cache: KVCache,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    lse: torch.Tensor,
    *,
    reduce: str = "sum",
    cu_seqlens: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    window: int | None = None,
    sinks: int = 0,
    kv_start: torch.Tensor | None = None,
    q_start: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    pinned: int = 0,
    rope: Rope | None = None,
) -> torch.Tensor:
    """The mass that this call adds, as :func:`tkv.key_scores`.

    Args:
        q, cache, page_table, seq_lens, lse, reduce, ...: as there.

    Returns:
        ``[num_pages, page_size, num_kv_heads]`` float64; NaN where no row sees a key.

    Example:
        >>> cache = KVCache(torch.zeros(2, 4, 1, 16), torch.ones(2, 4, 1, 16))
        >>> scores = key_scores(torch.ones(1, 1, 16), cache, torch.tensor([[1]]), torch.tensor([2]), torch.tensor([[2.0]]).log())
        >>> scores[1, :, 0].round(decimals=6).tolist()
        [0.5, 0.5, nan, nan]
    """
    if cu_seqlens is None:
        rows = q.unsqueeze(1) if q.dim() == 3 else q
        cu_seqlens = torch.arange(rows.shape[0] + 1) * rows.shape[1]
        q, lse = rows.flatten(0, 1), lse.reshape(-1, lse.shape[-1])
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    group = q.shape[1] // cache.num_kv_heads
    out = torch.full((cache.num_pages, cache.page_size, cache.num_kv_heads), torch.nan, dtype=torch.float64, device=q.device)
    for seq, num_keys in enumerate(seq_lens.clamp(0, page_table.shape[1] * cache.page_size).tolist()):
        own = slice(int(cu_seqlens[seq]), int(cu_seqlens[seq + 1]))
        count = own.stop - own.start
        if not count:
            continue
        start = 0 if kv_start is None else int(kv_start[seq])
        first = int(seq_lens[seq]) + start - count if q_start is None else int(q_start[seq])
        keys = torch.arange(num_keys, device=q.device)
        tree = None if mask is None else mask[seq]
        seen, distance = look(first, count, keys + start * (keys >= pinned), window, sinks, tree)
        pages = page_table[seq, keys // cache.page_size]
        some = seen.any(0) & (pages >= 0) & (pages < cache.num_pages)
        keys, seen, distance = keys[some], seen[:, some], distance[:, some]
        k, _ = gather(cache, page_table[seq], keys)
        if rope is None:
            x, _ = products(q[own], k)
        else:
            q_positions = first + (torch.arange(count, device=q.device) if tree is None else tree[:count, :count].sum(1) - 1)
            x, _ = rotated_products(q[own], k, q_positions, q_positions[0] - distance[0], rope, window, sinks)
        x = scale * x
        if softcap is not None:
            x = softcap * torch.tanh(x / softcap)
        if alibi_slopes is not None:
            x = x - alibi_slopes.double()[None, :, None] * distance.double()[:, None, :]
        p = torch.exp(x - lse[own].double()[..., None]).masked_fill(~seen[:, None, :], 0.0).unflatten(1, (-1, group))
        mass = {"sum": p.sum(2), "mean": p.mean(2), "max": p.amax(2)}[reduce].sum(0)
        out[page_table[seq, keys // cache.page_size].long(), keys % cache.page_size] = mass.T
    return out
