"""merge_states: join partial results of attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tkv.errors import DTypeError, ShapeError
from tkv.ops.attention import launch_merge, results_of
from tkv.ops.checks import FLOATS, check_tensor
from tkv.ops.launch import Launch, arch_name, check_launchable, interpreting, target_for
from tkv.ops.library import operator


def _fake(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.empty(part[0].shape, dtype=part[0].dtype, device=part[0].device) for part in (outs, lses)]


def _traced(call: Callable[[dict[str, Any]], list[torch.Tensor]], values: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = call(values)
    return out, lse


@operator(fake=_fake, traced=_traced)
def merge_states(
    outs: torch.Tensor | Sequence[torch.Tensor], lses: torch.Tensor | Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint sets of keys into attention over their union.

    ``s = ln sum_i exp(s_i)``, ``v = sum_i exp(s_i - s) v_i`` (recursive attention). Associative and commutative; a part with
    ``lse = -inf`` is neutral, whatever its ``out`` holds.

    Args:
        outs: partial outputs, ``[parts, ..., head_dim]``, or a sequence of ``[..., head_dim]``; float32, float16 or bfloat16.
        lses: their natural-log LSE, float32, ``outs``'s shape without the last dimension.

    Returns:
        ``out [..., head_dim]`` in the dtype of ``outs``, and ``lse [...]`` float32; 0 and -inf where every part is empty.

    Raises:
        ShapeError: there is no part, or shapes do not fit each other.
        DTypeError, DeviceError: a tensor's dtype or device does not fit.

    Example:
        >>> out, lse = merge_states([torch.full((1, 16), 1.0), torch.full((1, 16), 3.0)], [torch.zeros(1), torch.zeros(1)])
        >>> out[0, 0].item(), round(lse.item(), 4)
        (2.0, 0.6931)
    """
    outs, lses = _stacked("outs", outs), _stacked("lses", lses)
    if outs.dim() < 2:
        raise ShapeError(f"outs: expected [parts, ..., head_dim], got {list(outs.shape)}")
    if outs.shape[0] == 0 or outs.shape[-1] == 0:
        raise ShapeError(f"outs: expected at least one part and a head_dim of at least 1, got {list(outs.shape)}")
    check_tensor("outs", outs, tuple(outs.shape), FLOATS, outs.device, contiguous_last=False)
    check_tensor("lses", lses, tuple(outs.shape[:-1]), (torch.float32,), outs.device, contiguous_last=False)
    check_launchable(outs.device)
    out = torch.empty(outs.shape[1:], dtype=outs.dtype, device=outs.device)
    lse = torch.empty(outs.shape[1:-1], dtype=torch.float32, device=outs.device)
    if lse.numel():
        plan_merge(outs, lses, out, lse, arch_name(outs.device), interpreting()).run(outs.device)
    return out, lse


def plan_merge(outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, arch: str, interpret: bool = False) -> Launch:
    """The launch behind `merge_states`: its rows are those of one sequence, of one head each."""
    parts, dim = outs.shape[0], outs.shape[-1]
    outs, lses = outs.reshape(parts, 1, -1, 1, dim), lses.reshape(parts, 1, -1, 1)
    if outs.stride(-1) != 1:
        outs = outs.contiguous()
    rows = outs.shape[2]
    results = results_of(out.reshape(1, rows, 1, dim), lse.reshape(1, rows, 1))
    return launch_merge((outs, lses), results, target_for(arch, interpret), rows)


def _stacked(name: str, states: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    if isinstance(states, torch.Tensor):
        return states
    if not isinstance(states, list | tuple) or not all(isinstance(part, torch.Tensor) for part in states):
        raise DTypeError(f"{name}: expected a tensor or a sequence of tensors, got {type(states).__name__}")
    if not states:
        raise ShapeError(f"{name}: expected at least one part, got none")
    first = states[0]
    for i, part in enumerate(states):
        check_tensor(f"{name}[{i}]", part, tuple(first.shape), (first.dtype,), first.device, contiguous_last=False)
    return torch.stack(list(states))
