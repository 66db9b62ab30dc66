"""Attention by torch to keys and values that came back from a cache, each query seeing those that a mask names."""

from __future__ import annotations

from typing import Any

import torch

from tkv import Rope
from tkv.demo.model import head_dim


def scores_of(q: torch.Tensor, k: torch.Tensor, scale: float | None) -> torch.Tensor:
    """Scores of the heads of each group: ``scale * q.k``, in float32.

    Args:
        q: ``[num_seqs, q_len, num_q_heads, head_dim]``.
        k: ``[num_seqs, num_keys, num_kv_heads, head_dim]``.
        scale: ``1 / sqrt(head_dim)`` if None.

    Returns:
        ``[num_seqs, num_kv_heads, group, q_len, num_keys]``.
    """
    grouped = q.float().unflatten(2, (k.shape[2], -1)).permute(0, 2, 3, 1, 4)
    return grouped @ k.float().permute(0, 2, 3, 1)[:, :, None] * (q.shape[-1] ** -0.5 if scale is None else scale)


def attend(scores: torch.Tensor, v: torch.Tensor, visible: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention from scores.

    Args:
        scores: ``[num_seqs, num_kv_heads, group, q_len, num_keys]`` float32.
        v: ``[num_seqs, num_keys, num_kv_heads, head_dim]``.
        visible: ``[num_seqs, q_len, num_keys]`` bool; each query sees a key at least.

    Returns:
        out ``[num_seqs, q_len, num_q_heads, head_dim]``, and the natural-log LSE ``[num_seqs, q_len, num_q_heads]``; float32.
    """
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ v.float().transpose(1, 2)[:, :, None]
    return out.permute(0, 3, 1, 2, 4).flatten(2, 3), lse.permute(0, 3, 1, 2).flatten(2, 3)


def streaming_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, rope: Rope, window: int, sinks: int,
    scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Attention to sink tokens and a window, with positions inside the cache.

    A query at position p sees the key at j if ``j <= p`` and (``j < sinks`` or ``p - j < window``). In the cache, a key of the window is
    ``p - j`` places before the query; the query itself is in place ``min(p, sinks + window - 1)``, a sink token in place j.

    Args:
        q, k, v: ``[num_seqs, q_len or num_keys, heads, head_dim]``, unrotated.
        rows: ``[num_seqs, q_len]`` positions of the queries.
        keys: ``[num_seqs, num_keys]`` positions of the keys, negative for none.
        rope: tables of ``sinks + window + q_len`` rows at least.
        window, sinks: how many tokens.
        scale: factor of the scores.

    Returns:
        ``[num_seqs, q_len, num_q_heads, head_dim]`` float32.
    """
    is_sink = (keys >= 0) & (keys < sinks)
    # Only differences count: from the first key that a query can have in its window.
    base = rows[:, :1] - (window - 1)
    turned_k = rotated(k, torch.where(is_sink, keys, (keys - base).clamp_min(0)), rope)
    near = scores_of(rotated(q, rows - base, rope), turned_k, scale)
    far = scores_of(rotated(q, rows.clamp_max(sinks + window - 1), rope), turned_k, scale)
    distance = rows[:, :, None] - keys[:, None, :]
    visible = (keys[:, None, :] >= 0) & (distance >= 0) & (is_sink[:, None, :] | (distance < window))
    return attend(torch.where(is_sink[:, None, None, None, :], far, near), v, visible)[0]


def rotated(x: torch.Tensor, positions: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Vectors ``[..., heads, head_dim]`` rotated by positions ``[...]``, in float32; pairs are dims i and i + head_dim / 2."""
    cos, sin = (table[positions.long()].unsqueeze(-2) for table in (rope.cos, rope.sin))
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rope_of(model: Any, num_rows: int) -> Rope:
    """The tables of a model's own rotary embedding, for positions 0 to ``num_rows - 1``."""
    positions = torch.arange(num_rows, device=model.device)[None]
    cos, sin = model.model.rotary_emb(torch.zeros(1, device=model.device), positions)
    half = head_dim(model.config) // 2
    return Rope(cos[0, :, :half].float(), sin[0, :, :half].float())
