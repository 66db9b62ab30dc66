"""What tkv takes from vLLM: names, and the shapes that come with them. What a release of vLLM may move is here and nowhere else."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

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
    )
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
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
}

if VERSION.split("+")[0].split(".")[:2] != TRIED.split("."):
    logging.getLogger(__name__).warning("tkv's backend was tried with vLLM %s only; this is %s", TRIED, VERSION)


def split_kv(kv_cache: torch.Tensor, num_kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V as views of vLLM's cache.

    Args:
        kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_dim]`` with any strides, K and V of a token side by side.
        num_kv_heads, head_dim: of the layer.

    Returns:
        Two views, ``[num_blocks, block_size, num_kv_heads, head_dim]``.

    Raises:
        ShapeError: the tensor is not of that shape.
    """
    if kv_cache.dim() != 4 or kv_cache.shape[1] != num_kv_heads or kv_cache.shape[3] != 2 * head_dim:
        raise ShapeError(
            f"kv_cache: expected [num_blocks, {num_kv_heads}, block_size, {2 * head_dim}], K and V side by side, as vLLM {TRIED} has it, "
            f"got {list(kv_cache.shape)} from vLLM {VERSION}"
        )
    tokens_first = kv_cache.transpose(1, 2)
    return tokens_first[..., :head_dim], tokens_first[..., head_dim:]


__all__ = [
    "FORMATS",
    "TRIED",
    "VERSION",
    "AttentionBackend",
    "AttentionCGSupport",
    "AttentionImpl",
    "AttentionMetadataBuilder",
    "AttentionType",
    "CommonAttentionMetadata",
    "FullAttentionSpec",
    "MultipleOf",
    "SlidingWindowSpec",
    "VllmConfig",
    "get_current_vllm_config_or_none",
    "split_kv",
]
