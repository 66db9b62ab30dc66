"""The attention backend: vLLM's batches and its paged cache, handed to tkv's kernels as they are."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

import tkv
from tkv.errors import UnsupportedError
from tkv.integrations.vllm import interface as vllm
from tkv.tune.configs import MAX_SCRATCH_BYTES

MAX_DECODE_LEN = 64


@dataclass
class TkvMetadata:
    """One batch: where each sequence's new tokens and cached keys are."""

    num_tokens: int
    # New tokens of each sequence where all have as many, else 0.
    uniform_len: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    # Cached keys before the new ones; None where all sequences have as many new ones.
    prefix_lens: torch.Tensor | None
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class TkvMetadataBuilder(vllm.AttentionMetadataBuilder[TkvMetadata]):
    """Makes a batch's `TkvMetadata` from vLLM's, without waiting for the device."""

    supports_update_block_table = True

    @classmethod
    def get_cudagraph_support(cls, vllm_config: vllm.VllmConfig, kv_cache_spec: Any) -> vllm.AttentionCGSupport:
        """Batches that `tkv.paged_decode` takes: others have another kernel, and lengths that are computed anew for each batch."""
        support = vllm.AttentionCGSupport
        fits = vllm.max_decode_query_len(vllm_config) <= MAX_DECODE_LEN
        return support.UNIFORM_BATCH if fits else support.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: vllm.VllmConfig, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # Chunks of local attention come as sequences of their own.
        served = vllm.FullAttentionSpec, vllm.SlidingWindowSpec, vllm.ChunkedLocalAttentionSpec
        if type(kv_cache_spec) not in served:
            raise UnsupportedError(
                f"kv_cache_spec: tkv serves full, sliding-window and chunked local attention, got {type(kv_cache_spec).__name__} "
                f"for {layer_names[0]}"
            )
        if kv_cache_spec.head_size_v != kv_cache_spec.head_size:
            dims = kv_cache_spec.head_size, kv_cache_spec.head_size_v
            raise UnsupportedError(f"head_size_v: expected {dims[0]}, as the keys have it, got {dims[1]} for {layer_names[0]}")
        if getattr(kv_cache_spec, "non_causal", False):
            raise UnsupportedError(f"non_causal: tkv's attention is causal, and tokens of {layer_names[0]} see later ones")
        check_device(device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: vllm.CommonAttentionMetadata, fast_build: bool = False
    ) -> TkvMetadata:
        """The batch that vLLM describes."""
        batch = common_attn_metadata
        if batch.causal is not True:
            raise UnsupportedError("causal: tkv's attention is causal, and this batch asks for tokens that see later ones")
        longest = int(batch.max_query_len)
        uniform_len = uniform_query_len(batch.query_start_loc_cpu.numpy(), batch.num_actual_tokens, longest)
        return TkvMetadata(
            num_tokens=batch.num_actual_tokens,
            uniform_len=uniform_len,
            max_query_len=longest,
            max_seq_len=int(batch.max_seq_len),
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            prefix_lens=None if uniform_len else batch.compute_num_computed_tokens(),
            block_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping,
        )

    def update_block_table(self, metadata: TkvMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor) -> TkvMetadata:
        """The same batch in the pages of another group of layers."""
        metadata = copy.copy(metadata)
        metadata.block_table, metadata.slot_mapping = blk_table, slot_mapping
        return metadata


def check_device(device: torch.device) -> None:
    """Write nothing: if kernels cannot be launched on the device, that is said before the first request.

    Raises:
        DeviceError: with what to set.
    """
    cache, none = tkv.KVCache.empty(1, 16, 1, 16, device=device), torch.empty(0, 1, 16, device=device)
    tkv.write_kv(none, none, cache, torch.empty(0, dtype=torch.int64, device=device))


def uniform_query_len(starts: np.ndarray, num_tokens: int, longest: int) -> int:
    """The number of new tokens that each sequence has, where `tkv.paged_decode` can take the batch, else 0.

    Args:
        starts: ``[num_seqs + 1]``, where each sequence's new tokens begin; sequences at the end that only fill up a CUDA graph have none.
        num_tokens: tokens of the batch, those that only fill up included.
        longest: new tokens of the longest sequence.
    """
    num_seqs = len(starts) - 1
    if not 1 <= longest <= MAX_DECODE_LEN or num_tokens != num_seqs * longest or starts[-1] % longest:
        return 0
    return longest if np.array_equal(starts, np.minimum(np.arange(num_seqs + 1) * longest, starts[-1])) else 0


class TkvImpl(vllm.AttentionImpl[TkvMetadata]):
    """Attention of one layer.

    Args:
        num_heads, num_kv_heads: query and KV heads of this worker.
        head_size: dims of a head, a multiple of 8 from 16 to 576.
        scale: factor of the scores.
        alibi_slopes: one a query head.
        sliding_window: visible keys, the token itself included.
        kv_cache_dtype: one of `interface.FORMATS`.
        logits_soft_cap: bound of the scores; None or 0 for none.
        attn_type: must be "decoder".
        kv_sharing_target_layer_name: the layer whose cache this one reads; vLLM then writes nothing here.
        sinks: ``[num_heads]`` learned sinks.

    Raises:
        UnsupportedError: the model asks for what tkv does not compute exactly; the message names it.
    """

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None, alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None, kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
        attn_type: str = vllm.AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None, **extra: Any,
    ) -> None:  # fmt: skip
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.window = sliding_window
        self.softcap = logits_soft_cap or None
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks = sinks
        self._refuse(attn_type, kv_sharing_target_layer_name, extra)
        # The layer's cache and what it was made of. vLLM empties an attribute of this name when it frees the memory.
        self._k_scale_cache: tuple[tkv.KVCache, torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def _refuse(self, attn_type: str, shared_with: str | None, extra: dict[str, Any]) -> None:
        config = vllm.get_current_vllm_config_or_none()
        model = None if config is None else config.model_config
        if attn_type != vllm.AttentionType.DECODER:
            raise UnsupportedError(f"attn_type: tkv serves decoder self-attention, got {str(getattr(attn_type, 'value', attn_type))!r}")
        if self.kv_cache_dtype not in vllm.FORMATS:
            raise UnsupportedError(f"kv_cache_dtype: tkv serves {', '.join(vllm.FORMATS)} in vLLM, got {self.kv_cache_dtype!r}")
        native = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(self.kv_cache_dtype)
        if native is not None and model is not None and model.dtype not in (native, torch.float32):
            raise UnsupportedError(f"kv_cache_dtype: a model in {model.dtype} needs 'auto' or a quantised one, got {self.kv_cache_dtype!r}")
        if shared_with is not None and (vllm.FORMATS[self.kv_cache_dtype] or "").endswith("/tensor"):
            raise UnsupportedError(f"kv_cache_dtype: an fp8 cache shared with {shared_with} has the scales of that layer, unknown here")
        if self.dcp_world_size > 1 or self.pcp_world_size > 1:
            raise UnsupportedError(
                f"context parallelism: tkv serves 1 rank a cache in vLLM, got decode {self.dcp_world_size}, prefill {self.pcp_world_size}"
            )
        if model is not None and model.is_mm_prefix_lm:
            raise UnsupportedError("model: its image tokens see later ones (a multimodal prefix), and tkv's attention is causal")
        if model is not None and model.rswa_window is not None:
            raise UnsupportedError(f"rswa_window: a window that keeps the whole prompt is not served, got {model.rswa_window}")
        given = {name: value for name, value in extra.items() if value not in (None, False, -1)}
        if given:
            raise UnsupportedError(f"{', '.join(given)}: unknown to tkv's attention, got {given}")

    def cache_of(self, layer: Any, kv_cache: torch.Tensor) -> tkv.KVCache:
        """The layer's cache: views of vLLM's tensor, made again only where vLLM has made another one."""
        k_static, v_static = layer._k_scale, layer._v_scale
        made = self._k_scale_cache
        if made is None or made[1] is not kv_cache or made[2] is not k_static or made[3] is not v_static:
            kind = vllm.FORMATS[self.kv_cache_dtype] or ""
            k, v, k_scale, v_scale = vllm.split_kv(kv_cache, self.num_kv_heads, self.head_size, kind.endswith("/token_head"))
            if kind.endswith("/tensor"):
                k_scale, v_scale = k_static, v_static
            made = self._k_scale_cache = tkv.KVCache(k, v, k_scale, v_scale, format=kind or None), kv_cache, k_static, v_static
            if self.alibi_slopes is not None:
                self.alibi_slopes = self.alibi_slopes.to(kv_cache.device)
        return made[0]

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store new keys and values ``[num_tokens, num_kv_heads, head_size]`` in their slots; tokens with slot -1 are skipped."""
        num_tokens = slot_mapping.shape[0]
        tkv.write_kv(key[:num_tokens], value[:num_tokens], self.cache_of(layer, kv_cache), slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: TkvMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of ``query [num_tokens, num_heads, head_size]`` over the cache, in which the new keys are already, into `output`."""
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("output_scale: tkv writes its output in the query's dtype, and this call asks for a quantised one")
        if attn_metadata is None:
            # A run that measures memory, of which the cache will get the rest: what a call may take for partial results is counted too.
            torch.empty(MAX_SCRATCH_BYTES, dtype=torch.uint8, device=output.device)
            return output.zero_()
        batch, cache = attn_metadata, self.cache_of(layer, kv_cache)
        options: dict[str, Any] = {
            "scale": self.scale, "softcap": self.softcap, "alibi_slopes": self.alibi_slopes, "window": self.window,
            "sink_logits": self.sinks, "max_seq_len": batch.max_seq_len,
        }  # fmt: skip
        q, out = query[: batch.num_tokens], output[: batch.num_tokens]
        if batch.prefix_lens is None:
            if batch.uniform_len > 1:
                q, out = q.unflatten(0, (-1, batch.uniform_len)), out.unflatten(0, (-1, batch.uniform_len))
            tkv.paged_decode(q, cache, batch.block_table, batch.seq_lens, out=out, **options)
        else:
            tkv.prefix_prefill(
                q, None, None, cache, batch.block_table, batch.prefix_lens, batch.query_start_loc, max_q_len=batch.max_query_len,
                out=out, **options,
            )  # fmt: skip
        return output


class TkvBackend(vllm.AttentionBackend):
    """tkv as vLLM sees it: what it serves, and the classes that do it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(vllm.FORMATS)
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's enumeration that out-of-tree backends have."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TkvImpl]:
        """A layer's attention."""
        return TkvImpl

    @staticmethod
    def get_builder_cls() -> type[TkvMetadataBuilder]:
        """A batch's metadata."""
        return TkvMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """A layer's cache with room for the scales that its format has."""
        return vllm.with_inline_scales(spec)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | vllm.MultipleOf]:
        """Any page size works; whole tiles are read faster."""
        return [vllm.MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Multiples of 8 from 16 to 576."""
        return head_size % 8 == 0 and 16 <= head_size <= 576

    @classmethod
    def supports_sink(cls) -> bool:
        """Learned sinks are part of the softmax."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Only the window's pages are read."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """The host's lengths choose the kernel."""
        return False


class RefusedMLABackend(TkvBackend):
    """Multi-head latent attention on a CPU, where nobody asks a backend before whether it has it."""

    @staticmethod
    def get_impl_cls() -> type[TkvImpl]:
        """Refuses."""
        raise UnsupportedError("use_mla: multi-head latent attention is not served; unset TKV_VLLM for this model")
