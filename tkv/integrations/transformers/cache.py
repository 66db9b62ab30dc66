"""TkvCache: a cache of transformers whose keys and values are in tkv's pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

import tkv
from tkv.errors import ShapeError, UnsupportedError
from tkv.integrations.transformers.group import Group, Step
from tkv.integrations.transformers.layout import Columns, Layout
from tkv.integrations.transformers.settings import Policy, Settings, format_of, scales_of, window_of


@dataclass
class Progress:
    """What layers know of their cache, without which they would keep each other alive until the garbage collector comes.

    Attributes:
        length: columns that are cached, padding included.
        is_open: whether a forward pass is under way.
    """

    length: int = 0
    is_open: bool = False


class TkvLayer(CacheLayerMixin):
    """A layer's keys and values; the attention function stores them, when it has the queries too."""

    is_compileable = False
    is_sliding = False

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self.progress = progress
        self.group: Group | None = None
        self.kv: tkv.KVCache | None = None
        self.scores: torch.Tensor | None = None
        self.new: tuple[torch.Tensor, torch.Tensor] | None = None

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: pages are allocated when there are tokens for them."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Hand new keys and values on to the attention function, which stores them.

        Args:
            key_states, value_states: ``[batch, num_kv_heads, q_len, head_dim]``, rotated.

        Returns:
            Both, unchanged: what is cached stays in its pages.
        """
        if not self.progress.is_open:
            raise UnsupportedError("cache: a TkvCache works in a model after use_tkv(model) only")
        self.new = (key_states, value_states)
        return self.new

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        """No mask is made for tkv: only its padding and its window count."""
        return 0, 0

    def get_seq_length(self) -> int:
        """Columns of the batch that are cached, padding included."""
        return self.progress.length

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length


class TkvCache(Cache):
    """The cache of a batch for :func:`use_tkv`, as ``generate`` and a forward pass return it.

    Made by the model, or by ``new_cache`` of :class:`TkvModel`; give it back as ``past_key_values`` (``cache`` from transformers 5.24 on)
    to go on. It counts the columns of the padded batch, as transformers does; its pages hold the tokens alone, and of these the ones that
    a window still sees, or that a policy kept.

    Attributes:
        length: columns that it has seen.
        layers: one for each layer of the model; ``layers[i].kv`` is its :class:`tkv.KVCache`, None before the first forward pass.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from tkv.integrations.transformers import use_tkv
        >>> sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=32)
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
        >>> with use_tkv(model, page_size=4):
        ...     logits, cache = model(torch.tensor([[1, 2, 3, 4, 5]]), return_dict=False)
        >>> cache.length, cache.num_pages, cache.nbytes            # two pages of four tokens, two heads of 16 float32, K and V
        (5, 2, 2048)
    """

    def __init__(self, settings: Settings, num_layers: int, max_tokens: int | None = None) -> None:
        self._progress = Progress()
        super().__init__(layers=[TkvLayer(self._progress) for _ in range(num_layers)])
        self.settings = settings
        # Columns that generation will not pass, so that growing pools need not either.
        self.max_tokens = max_tokens
        # In generate: columns of the prompt; those behind are tokens. None: masks are to be read.
        self.prompt_columns: int | None = None
        self.groups: dict[int | None, Group] = {}
        self._columns: Columns | None = None
        self._layout: Layout | None = None
        self._broken = False

    @property
    def length(self) -> int:
        """Columns of the batch that are cached, padding included."""
        return self._progress.length

    @property
    def num_pages(self) -> int:
        """Pages in use, each counted once for all the layers that share its number."""
        return sum(group.pool.num_used for group in self.groups.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' keys, values and scales as allocated."""
        return sum(layer.kv.nbytes for layer in self.layers if layer.kv is not None)

    @torch.compiler.disable
    def update(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """As transformers has it: a layer's :meth:`TkvLayer.update`."""
        keys, values = super().update(*args, **kwargs)
        return keys, values

    def begin(self, batch: int, q_len: int, mask: np.ndarray | None) -> None:
        """Start a forward pass.

        Args:
            batch, q_len: its shape.
            mask: ``[batch, length + q_len]`` bool on the host, which columns are tokens; None if the new ones are.

        Raises:
            ShapeError, UnsupportedError: it does not go on from what is cached.
        """
        if self._broken or self._layout is not None:
            raise UnsupportedError("cache: an earlier forward pass with it did not finish; make a new one")
        if self._columns is None:
            self._columns = Columns(batch)
        if batch != self._columns.batch:
            raise ShapeError(f"input_ids: expected a batch of {self._columns.batch}, as the cache has, got {batch}")
        self._layout = self._columns.add(q_len, mask)
        self._progress.is_open = True

    def end(self, finished: bool) -> None:
        """End a forward pass; with a policy, evict.

        Args:
            finished: whether the model returned.

        Raises:
            UnsupportedError: some layers did not attend.
        """
        left = [i for i, layer in enumerate(self.layers) if layer.group is None or layer.group.layout is not self._layout]
        self._broken = not finished or bool(left) or any(group.waiting for group in self.groups.values())
        self._layout, self._progress.is_open = None, False
        for layer in self.layers:
            layer.new = None
        if finished and self._broken:
            raise UnsupportedError(f"model: attention of layers {left} did not go through transformers' AttentionInterface and the cache")
        if not self._broken and self._columns is not None:
            self._progress.length = self._columns.length
            if self.settings.policy is not None:
                self._evict(self.settings.policy)

    def attend(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, own_window: int | None, **options: Any
    ) -> torch.Tensor:
        """Store a layer's new keys and values and attend.

        Args:
            layer_idx: the layer.
            query: ``[batch, num_q_heads, q_len, head_dim]``.
            key, value: ``[batch, num_kv_heads, q_len, head_dim]``.
            own_window: the layer's window, by the model.
            options: ``scale``, ``softcap`` and ``sink_logits`` as in ``tkv.paged_decode``.

        Returns:
            ``[batch, q_len, num_q_heads, v_head_dim]``; 0 for padding that sees no token.
        """
        layer, layout = self.layers[layer_idx], self._layout
        if layout is None:
            raise UnsupportedError("cache: keys came outside of a forward pass of the model's decoder")
        if key.shape[0] != layout.batch or key.shape[2] != layout.q_len or query.shape[2] != layout.q_len:
            raise UnsupportedError(
                f"key: expected the {layout.q_len} new tokens of {layout.batch} sequences alone, got shape {list(key.shape)}; "
                "cross-attention and layers that share keys are not served"
            )
        group = self._group(layer_idx, own_window)
        step = group.step(layout, key.device)
        kv = self._pages(group, layer_idx, key, value)
        if step.copies is not None:
            tkv.copy_pages(kv, kv, step.copies[:, 0], step.copies[:, 1])
        tkv.write_kv(key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1), kv, step.slots)
        options.update(window=group.window, sinks=group.sinks, kv_start=step.kv_start, pinned=step.pinned, max_seq_len=step.max_seq_len)
        scores = layer.scores
        if scores is not None:
            scores.view(-1, kv.num_kv_heads)[step.token_slots] = 0
        group.done(layer_idx)
        if step.is_decode:
            return self._decode(query[:, :, 0], kv, step, scores, options)[:, None]
        rows = query.transpose(1, 2).flatten(0, 1)
        q = rows if step.rows is None else rows[step.rows]
        out, lse = tkv.prefix_prefill(
            q, None, None, kv, step.page_table, step.seq_lens, step.cu_seqlens, q_start=step.q_start, max_q_len=step.max_q_len,
            return_lse=True, **options,
        )  # fmt: skip
        if scores is not None:
            self._score(q, lse, kv, step, scores, options)
        if step.rows is not None:
            out = torch.zeros(rows.shape[0], *out.shape[1:], dtype=out.dtype, device=out.device).index_copy(0, step.rows, out)
        return out.unflatten(0, (layout.batch, layout.q_len))

    def release(self, layer_idx: int) -> None:
        """Give back the memory of a layer of a cache that ends with its forward pass."""
        self.layers[layer_idx].kv = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of the batch that are cached, padding included."""
        return self.length

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """No mask is made for tkv: only its padding and its window count."""
        return 0, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No maximum."""
        return -1

    get_max_cache_shape = get_max_length

    @property
    def is_compileable(self) -> bool:
        """Not: pages are handed out on the host."""
        return False

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back; not behind an eviction. Of a window only those of the last forward pass can for certain."""
        return self.settings.policy is None

    def activate_past_recording(self) -> None:
        """Nothing: the last forward pass can be cropped anyhow."""

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last columns, such as drafts that were rejected.

        Args:
            tokens_to_remove: negative: so many columns go; positive: so many stay, if there are more; 0: nothing.

        Raises:
            UnsupportedError: with a policy, which has evicted tokens that those before the cut would need.
            RangeError: a window has dropped what the next token would see.
        """
        # Some versions pass a tensor.
        tokens_to_remove = int(tokens_to_remove)
        length = tokens_to_remove if tokens_to_remove > 0 else self.length + tokens_to_remove
        if tokens_to_remove == 0 or length >= self.length or self._columns is None:
            return
        if self.settings.policy is not None:
            raise UnsupportedError("crop: tokens that a policy evicted do not come back; generate without assistant, or without policy")
        lost = self._columns.crop(max(length, 0))
        self._progress.length = self._columns.length
        self._broken = True
        for group in self.groups.values():
            group.truncate(lost)
        self._broken = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequences in another order, for beam search: page tables change, pages are copied when one of two that share them is written.

        Args:
            beam_idx: ``[batch]``, for each sequence whose keys it goes on from. Read from the device.
        """
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence `repeats` times, on shared pages."""
        if self._columns is not None:
            self._select([row for row in range(self._columns.batch) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only these sequences."""
        if self._columns is not None:
            self._select(torch.arange(self._columns.batch)[indices.cpu()].tolist())

    def reset(self) -> None:
        """Forget everything; the pages are freed."""
        self.groups, self._columns, self._layout, self._broken = {}, None, None, False
        self._progress.length, self._progress.is_open = 0, False
        for layer in self.layers:
            layer.group = layer.kv = layer.scores = layer.new = None

    def _select(self, rows: list[int]) -> None:
        if self._columns is None:
            return
        if self.settings.policy is not None and len(set(rows)) < len(rows):
            raise UnsupportedError("policy: sequences that share pages cannot keep different tokens; use no beam search with a policy")
        self._columns.select(rows)
        for group in self.groups.values():
            group.select(rows)

    def _group(self, layer_idx: int, own_window: int | None) -> Group:
        """The layers with this one's window."""
        layer, settings = self.layers[layer_idx], self.settings
        if layer.group is None and not self.length:
            if own_window not in self.groups:
                window, sinks = window_of(own_window, settings)
                self.groups[own_window] = Group(window, sinks, settings.page_size, settings.max_pages, self.max_tokens)
            layer.group = self.groups[own_window]
            layer.group.layers.append(layer_idx)
        group: Group | None = layer.group
        if group is None or group is not self.groups.get(own_window):
            raise UnsupportedError(f"model: layer {layer_idx} has a window of {own_window} now, and had another one, or none, before")
        return group

    def _pages(self, group: Group, layer_idx: int, key: torch.Tensor, value: torch.Tensor) -> tkv.KVCache:
        """The layer's pages, as many as its group has handed out."""
        layer = self.layers[layer_idx]
        old: tkv.KVCache | None = layer.kv
        if old is not None and old.num_pages >= group.capacity:
            return old
        format = format_of(self.settings, key.dtype)
        k_scale, v_scale = scales_of(self.settings, layer_idx, key.device)
        kv = tkv.KVCache.empty(
            group.capacity, self.settings.page_size, key.shape[1], key.shape[3], format, device=key.device, v_head_dim=value.shape[3],
            k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        if old is not None:
            pages = torch.arange(old.num_pages, device=key.device)
            tkv.copy_pages(old, kv, pages, pages)
        if self.settings.policy is not None:
            scores = torch.zeros(kv.num_pages, kv.page_size, kv.num_kv_heads, device=key.device)
            if layer.scores is not None:
                scores[: layer.scores.shape[0]] = layer.scores
            layer.scores = scores
        layer.kv = kv
        return kv

    def _decode(self, q: torch.Tensor, kv: tkv.KVCache, step: Step, scores: torch.Tensor | None, options: dict[str, Any]) -> torch.Tensor:
        """Attention of one new token of each sequence, ``[batch, num_q_heads, head_dim]``; what it gave each key is scored."""
        if scores is None:
            return tkv.paged_decode(q, kv, step.page_table, step.seq_lens, **options)  # type: ignore[return-value]
        out, lse = tkv.paged_decode(q, kv, step.page_table, step.seq_lens, return_lse=True, **options)
        is_sum = self.settings.policy_scores == "sum"
        tkv.key_scores(q, kv, step.page_table, step.seq_lens, lse, out=scores, accumulate=is_sum, **options)
        return out

    def _score(
        self, q: torch.Tensor, lse: torch.Tensor, kv: tkv.KVCache, step: Step, scores: torch.Tensor, options: dict[str, Any]
    ) -> None:
        """Add what the new tokens gave each key; rows of padding, behind those of tokens, give nothing."""
        if self.settings.policy_scores == "last":
            seqs, last = step.with_tokens, step.last_rows
            tkv.key_scores(q[last], kv, step.page_table[seqs], step.seq_lens[seqs], lse[last], out=scores, accumulate=False, **options)
            return
        count = step.num_seqs
        tkv.key_scores(
            q[: step.num_tokens], kv, step.page_table[:count], step.seq_lens[:count], lse[: step.num_tokens], out=scores,
            cu_seqlens=step.cu_seqlens[: count + 1], **options,
        )  # fmt: skip

    def _evict(self, policy: Policy) -> None:
        """What the policy does not keep goes, in every layer and head its own."""
        budget = self.settings.budget
        for group in self.groups.values():
            held = [group.manager.held(seq) for seq in group.seqs]
            if max(held) <= budget:
                continue
            moves = group.manager.evict(group.seqs, [min(count, budget) for count in held])
            on = {device: moves.tensors(device) for device in {self.layers[i].scores.device for i in group.layers}}
            for layer_idx in group.layers:
                layer = self.layers[layer_idx]
                at = on[layer.scores.device]
                keep, _ = policy(tkv.policies.dense_scores(layer.scores, at.page_table, at.seq_lens), at.seq_lens)
                if keep.dim() != 3 or keep.shape[2] < moves.max_keep_len:
                    raise UnsupportedError(f"policy: expected keep of [num_seqs, num_kv_heads, {budget}], got {list(keep.shape)}")
                tkv.compact_kv(layer.kv, at.page_table, keep, at.keep_lens, scores=layer.scores, dst_page_table=at.dst_page_table)
