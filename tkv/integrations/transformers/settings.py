"""What use_tkv was asked for, and what that means for a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tkv.errors import UnsupportedError

NATIVE = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

Policy = Callable[[torch.Tensor, torch.Tensor], "tuple[torch.Tensor, torch.Tensor]"]


@dataclass(frozen=True)
class Settings:
    """What :func:`use_tkv` was asked for; see there."""

    format: Any = None
    page_size: int = 16
    window: int | None = None
    sinks: int = 0
    policy: Policy | None = None
    budget: int = 0
    policy_scores: str = "sum"
    scales: Mapping[int, Any] | None = None
    max_pages: int | None = None


def format_of(settings: Settings, dtype: torch.dtype) -> Any:
    """The format of a cache for keys of a dtype.

    Raises:
        UnsupportedError: no format was asked for, and none keeps such numbers as they are.
    """
    if settings.format is not None:
        return settings.format
    if dtype not in NATIVE:
        raise UnsupportedError(f"key: expected float32, float16 or bfloat16, got {dtype}")
    return NATIVE[dtype]


def window_of(own: int | None, settings: Settings) -> tuple[int | None, int]:
    """Window and sinks of a layer that has a window of its own, or none.

    Raises:
        UnsupportedError: the two windows do not make one, or there is a policy too.
    """
    window, sinks = settings.window, settings.sinks
    if own is not None and settings.policy is not None:
        raise UnsupportedError(f"policy: keys that heads chose have no common positions, by which the model's window of {own} goes")
    if own is None or window is None:
        return (window, sinks) if own is None else (own, 0)
    if window >= own:
        return own, 0
    if sinks:
        raise UnsupportedError(
            f"window: with sinks, expected at least the model's own window, {own}, outside of which sinks are not seen; got {window}"
        )
    return window, 0


def scales_of(settings: Settings, layer_idx: int, device: torch.device) -> tuple[Any, Any]:
    """The static scales of a layer.

    Raises:
        UnsupportedError: there are scales, and none of this layer.
    """
    if settings.scales is None:
        return None, None
    if layer_idx not in settings.scales:
        raise UnsupportedError(f"scales: none for layer {layer_idx}")
    k_scale, v_scale = settings.scales[layer_idx]
    return tuple(scale.to(device) if isinstance(scale, torch.Tensor) else scale for scale in (k_scale, v_scale))  # type: ignore[return-value]
