"""The attention and mask functions that transformers calls, and the forward pass that they belong to."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from tkv.errors import UnsupportedError
from tkv.integrations.transformers.cache import TkvCache

NAME = "tkv"
# Arguments of attention functions that change a result, and what they are; given as None they do not.
REFUSED = {
    "position_bias": "a bias of positions",
    "attention_bias": "a bias of scores",
    "alibi": "ALiBi",
    "head_mask": "a mask of heads",
    "cu_seq_lens_q": "packed sequences",
    "cu_seq_lens_k": "packed sequences",
    "cu_seqlens": "packed sequences",
    "indices": "a choice of keys",
    "block_table": "continuous batching",
}


@dataclass
class Forward:
    """A forward pass of the decoder: its cache, and whether the cache ends with it."""

    owner: object
    cache: TkvCache
    temporary: bool


class _Passes(threading.local):
    def __init__(self) -> None:
        self.stack: list[Forward] = []
        # For each generate that is under way, the caches whose prompt_columns it has set.
        self.generating: list[list[TkvCache]] = []


passes = _Passes()


@torch.compiler.disable
def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over tkv's pages, as transformers' ``AttentionInterface`` calls it.

    Args:
        module: the attention layer.
        query: ``[batch, num_q_heads, q_len, head_dim]``, rotated.
        key, value: ``[batch, num_kv_heads, q_len, head_dim]``, as :class:`TkvCache` handed them on.
        attention_mask: what :func:`mask` made.
        dropout: 0.
        scaling: factor of the scores.
        softcap: their bound, or None.
        s_aux: ``[num_q_heads]`` learned sinks, or None.

    Returns:
        ``[batch, q_len, num_q_heads, v_head_dim]``, and no weights.

    Raises:
        UnsupportedError: something that is not served exactly.
    """
    if not passes.stack:
        raise UnsupportedError("attn_implementation: 'tkv' works in a model after use_tkv(model) only, and in its decoder")
    forward = passes.stack[-1]
    layer_idx = getattr(module, "layer_idx", None)
    if layer_idx is None or layer_idx >= len(forward.cache.layers):
        raise UnsupportedError(f"model: {type(module).__name__} does not say which layer's cache it has")
    if dropout:
        raise UnsupportedError(f"dropout: expected 0, got {dropout}; call model.eval()")
    for name, what in REFUSED.items():
        if kwargs.get(name) is not None:
            raise UnsupportedError(f"{name}: {what} is not served")
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise UnsupportedError(f"is_causal: {type(module).__name__} is not causal; a token sees only what is before it here")
    if s_aux is None and getattr(module, "sinks", None) is not None:
        raise UnsupportedError(f"model: {type(module).__name__} has sinks that it does not tell its attention function")
    if scaling is None and (getattr(module, "scale_attn_by_inverse_layer_idx", False) or not getattr(module, "scale_attn_weights", True)):
        raise UnsupportedError(f"model: {type(module).__name__} scales scores in a way that it does not tell its attention function")
    if not isinstance(attention_mask, torch.Tensor) or not hasattr(attention_mask, "tkv_window"):
        given = "none" if attention_mask is None else f"shape {list(attention_mask.shape)}"
        raise UnsupportedError(f"attention_mask: expected one that transformers.masking_utils made for tkv, got {given}")
    layer = forward.cache.layers[layer_idx]
    if forward.temporary:
        layer.new = (key, value)
    if layer.new is None or layer.new[0] is not key or layer.new[1] is not value:
        raise UnsupportedError(f"model: {type(module).__name__} attends to other keys than those that it gave to the cache")
    layer.new = None
    with torch.no_grad():
        out = forward.cache.attend(
            layer_idx, query, key, value, attention_mask.tkv_window, scale=scaling, softcap=softcap,
            sink_logits=None if s_aux is None else s_aux.detach(),
        )  # fmt: skip
    if forward.temporary:
        forward.cache.release(layer_idx)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
        out = _Forward.apply(out, query, key, value)
    return out, None


@torch.compiler.disable
def mask(
    attention_mask: torch.Tensor | None = None, local_size: int | None = None, allow_is_causal_skip: bool = True, **kwargs: Any
) -> torch.Tensor:
    """What stands for a mask: no numbers, but the window of the layers that get it, as transformers' ``AttentionMaskInterface`` calls it.

    Args:
        attention_mask: ``[batch, columns]``, padding, which the forward pass knows already.
        local_size: the window.
        allow_is_causal_skip: False if the mask is more than causal, a window and padding.

    Returns:
        An empty tensor with the attribute ``tkv_window``.

    Raises:
        UnsupportedError: the mask is another one.
    """
    if not allow_is_causal_skip:
        raise UnsupportedError(
            "attention_mask: tokens see more or less than what is before them: packed sequences (position_ids that restart without a "
            "cache), bidirectional prefixes or blocks are not served"
        )
    stands_for = torch.empty(0)
    stands_for.tkv_window = local_size  # type: ignore[attr-defined]
    return stands_for


class _Forward(torch.autograd.Function):
    """Attention's result in a graph; there is no way back."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise UnsupportedError("backward: tkv is for inference; call restore() to train")


def register() -> None:
    """Make both known to transformers as ``"tkv"``."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
