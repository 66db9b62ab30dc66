"""What tkv takes from vLLM: names, and the shapes that come with them. What a release of vLLM may move is here and nowhere else."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.version import __version__ as VERSION

from tkv.errors import ShapeError, UnsupportedError

try:
    from vllm.config import get_current_vllm_config_or_none
    from vllm.v1.attention.backend import (
        AttentionBackend,
        AttentionCGSupport,
        AttentionImpl,
        AttentionMetadataBuilder,
        AttentionType,
        CommonAttentionMetadata,
        MultipleOf,
        max_decode_query_len,
    )
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
except ImportError as error:
    raise UnsupportedError(f"vllm: tkv's backend is written for vLLM 0.32 and does not fit {VERSION}: {error}") from error

if TYPE_CHECKING:
    from vllm.config import VllmConfig

TRIED = "0.32"
# vLLM's kv_cache_dtype -> tkv's format; None is what the tensor's dtype says.
FORMATS = {
    "auto": None,
    "float16": "fp16",
    "bfloat16": "bf16",
    "fp8": "fp8_e4m3/tensor",
    "fp8_e4m3": "fp8_e4m3/tensor",
    "fp8_e5m2": "fp8_e5m2/tensor",
    "int8_per_token_head": "int8/token_head",
    "fp8_per_token_head": "fp8_e4m3/token_head",
}
SCALE_BYTES = 4

if VERSION.split("+")[0].split(".")[:2] != TRIED.split("."):
    logging.getLogger(__name__).warning("tkv's backend was tried with vLLM %s only; this is %s", TRIED, VERSION)


def split_kv(
    kv_cache: torch.Tensor, num_kv_heads: int, head_dim: int, inline_scales: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """K, V and their inline scales as views of vLLM's cache.

    Args:
        kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_dim]`` with any strides, K and V of a token side by side; with
            `inline_scales` ``2 * (head_dim + 4)``, of 1-byte numbers, each followed by its float32 scale.
        num_kv_heads, head_dim: of the layer.
        inline_scales: whether there are scales.

    Returns:
        K and V, ``[num_blocks, block_size, num_kv_heads, head_dim]``, and their scales, the same without the last dimension, or None.

    Raises:
        ShapeError: the tensor is not of that shape.
    """
    width = head_dim + (SCALE_BYTES if inline_scales else 0)
    if kv_cache.dim() != 4 or kv_cache.shape[1] != num_kv_heads or kv_cache.shape[3] != 2 * width:
        raise ShapeError(
            f"kv_cache: expected [num_blocks, {num_kv_heads}, block_size, {2 * width}], K and V side by side, as vLLM {TRIED} has it, "
            f"got {list(kv_cache.shape)} from vLLM {VERSION}"
        )
    k, v = kv_cache.transpose(1, 2).split(width, -1)
    if not inline_scales:
        return k, v, None, None
    k_scale, v_scale = (x[..., head_dim:].view(torch.float32).squeeze(-1) for x in (k, v))
    return k[..., :head_dim], v[..., :head_dim], k_scale, v_scale


def with_inline_scales(spec: Any) -> Any:
    """A layer's spec with the room for a scale behind each token's K and V, where its format has them."""
    if not spec.kv_quant_mode.is_per_token_head or spec.state_content_bytes is not None:
        return spec
    return replace(spec, state_content_bytes=(spec.head_size + spec.head_size_v) * spec.dtype.itemsize + 2 * SCALE_BYTES)


__all__ = [
    "FORMATS",
    "TRIED",
    "VERSION",
    "AttentionBackend",
    "AttentionCGSupport",
    "AttentionImpl",
    "AttentionMetadataBuilder",
    "AttentionType",
    "ChunkedLocalAttentionSpec",
    "CommonAttentionMetadata",
    "FullAttentionSpec",
    "MultipleOf",
    "SlidingWindowSpec",
    "VllmConfig",
    "get_current_vllm_config_or_none",
    "max_decode_query_len",
    "split_kv",
    "with_inline_scales",
]
