"""Rotary position embedding in plain PyTorch."""

from __future__ import annotations

import torch

from tkv.rope import Rope


def rotate(x: torch.Tensor, turns: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Vectors rotated by so many positions, backwards where that is negative; see :class:`tkv.Rope`.

    Args:
        x: ``[..., heads, head_dim]``.
        turns: ``[...]`` integers; rows of the tables are found by their magnitude, the last row for those past it.
        rope: the tables.

    Returns:
        float64, x's shape.

    Example:
        >>> rope = Rope(torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]]))                # a right angle a position
        >>> rotate(torch.tensor([[[3.0, 4.0, 5.0]]] * 2), torch.tensor([1, -1]), rope).tolist()
        [[[-4.0, 3.0, 5.0]], [[4.0, -3.0, 5.0]]]
    """
    rows = turns.long().abs().clamp_max(rope.num_rows - 1)
    cos, sin = (table.double()[rows].unsqueeze(-2) for table in (rope.cos, rope.sin))
    sin = torch.where((turns < 0)[..., None, None], -sin, sin)
    x = x.double()
    turned, rest = x[..., : rope.rotary_dim], x[..., rope.rotary_dim :]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if rope.interleaved else turned.chunk(2, -1)
    pairs = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pairs, -1).flatten(-2) if rope.interleaved else torch.cat(pairs, -1)
    return torch.cat([turned, rest], -1)
