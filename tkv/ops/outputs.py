"""Where attention functions write their results: the caller's tensors, or new ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tkv.cache import KVCache
from tkv.errors import ShapeError
from tkv.ops.checks import check_flag, check_tensor


def check_outputs(q: torch.Tensor, cache: KVCache, out: object, lse: object, return_lse: object) -> None:
    """Tensors to write out and LSE to, or None."""
    check_flag("return_lse", return_lse)
    for name, tensor, shape, dtypes in (
        ("out", out, (*q.shape[:-1], cache.v_head_dim), (q.dtype,) if q.dtype == torch.float32 else (q.dtype, torch.float32)),
        ("lse", lse, tuple(q.shape[:-1]), (torch.float32,)),
    ):
        if tensor is None:
            continue
        checked = check_tensor(name, tensor, shape, dtypes, cache.device, contiguous_last=name == "out")
        if any(stride == 0 and size > 1 for size, stride in zip(checked.shape, checked.stride(), strict=True)):
            raise ShapeError(f"{name}: rows must not share memory, got strides {checked.stride()}")


def outputs(
    q: torch.Tensor, cache: KVCache, out: torch.Tensor | None, lse: torch.Tensor | None, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tensors to write to: those given, and new ones for what is wanted."""
    if out is None:
        out = torch.empty(*q.shape[:-1], cache.v_head_dim, dtype=q.dtype, device=q.device)
    if lse is None and return_lse:
        lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    return out, lse


def traced_attention(call: Callable[[dict[str, Any]], Any], values: dict[str, Any]) -> Any:
    """An attention function as `tkv.ops.library` traces it."""
    out, lse = outputs(values["q"], values["cache"], values["out"], values["lse"], values["return_lse"])
    call({**values, "out": out, "lse": lse})
    return out if lse is None else (out, lse)
