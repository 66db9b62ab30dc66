"""A transformers model whose attention reads and writes tkv's paged cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from tkv import KVCache, paged_decode, write_kv
from tkv.errors import UnsupportedError

NAME = "tkv"


@dataclass(frozen=True)
class Step:
    """One forward pass: which sequences get how many new tokens, and where these go. Every layer uses the same pages."""

    caches: list[KVCache]
    slots: torch.Tensor  # [num_seqs * q_len] int64, of the new tokens
    page_table: torch.Tensor  # [num_seqs, max_pages] int32, -1 behind a sequence's pages
    seq_lens: torch.Tensor  # [num_seqs] int32, the new tokens included
    positions: torch.Tensor  # [num_seqs, q_len] int64, of the new tokens
    max_seq_len: int
    is_prefill: bool  # nothing was cached before
    config: dict[str, int] | None  # of paged_decode
    on_layer: Callable[[int, int], None] | None  # progress: (layer, layers)


@dataclass
class PagedModel:
    """The paged cache of all layers of a model, and the pages of each sequence.

    Pages are handed out one at a time, as a sequence grows, in a random order: logical and physical pages differ, as they do in a
    server that has run for a while.

    Args:
        model: a model of transformers; its configuration says how large the cache is.
        format: the cache's format, such as ``"int8/token_head"``.
        num_pages: pages of the pool.
        page_size: tokens of a page.
        tile: ``(rows, keys)`` of a tile of `paged_decode`, or None for tkv's own choice.
        on_layer: called with (layer, number of layers) before each layer's attention.
    """

    model: Any
    format: str
    num_pages: int
    page_size: int = 16
    tile: tuple[int, int] | None = None
    on_layer: Callable[[int, int], None] | None = None
    lens: list[int] = field(default_factory=list)
    pages: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        config, device = self.model.config, self.model.device
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (self.num_pages, self.page_size, config.num_key_value_heads, dim)
        self.caches = [KVCache.empty(*shape, self.format, device=device) for _ in range(config.num_hidden_layers)]
        self.free = random.Random(0).sample(range(self.num_pages), self.num_pages)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token takes in all layers, K, V and scales."""
        return sum(cache.bytes_per_token for cache in self.caches)

    @property
    def pages_used(self) -> int:
        """Pages that hold tokens (of one layer; every layer has as many)."""
        return sum(map(len, self.pages))

    @property
    def unused_slots(self) -> int:
        """Slots behind the newest token in the last page of each sequence."""
        return self.pages_used * self.page_size - sum(self.lens)

    def add_sequence(self) -> int:
        """A new, empty sequence; returns its number."""
        self.lens.append(0)
        self.pages.append([])
        return len(self.lens) - 1

    def forward(self, seqs: Sequence[int], ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """Run the model on new tokens of some sequences, equally many of each, and keep their K and V.

        Args:
            seqs: the sequences, each at most once.
            ids: the new tokens of each.

        Returns:
            The logits of the new tokens, ``[num_seqs, q_len, vocabulary]``.

        Raises:
            UnsupportedError: some of the sequences are empty and others are not; or over 64 new tokens of a sequence that is not empty.
            RuntimeError: no page is free.
        """
        step = self._step(seqs, len(ids[0]))
        with torch.no_grad(), attention_by_tkv(self.model):
            tokens = torch.tensor(ids, device=step.slots.device)
            logits: torch.Tensor = self.model(input_ids=tokens, position_ids=step.positions, use_cache=False, paged=step).logits
        return logits

    def _step(self, seqs: Sequence[int], q_len: int) -> Step:
        device = self.caches[0].device
        starts = [self.lens[seq] for seq in seqs]
        if any(starts) and not all(starts):
            raise UnsupportedError("a step either begins sequences or goes on with them, got some of both")
        for seq in seqs:
            self.lens[seq] += q_len
            while len(self.pages[seq]) * self.page_size < self.lens[seq]:
                if not self.free:
                    raise RuntimeError(f"all {self.num_pages} pages are in use")
                self.pages[seq].append(self.free.pop())
        width = max(len(self.pages[seq]) for seq in seqs)
        page_table = torch.tensor([self.pages[seq] + [-1] * (width - len(self.pages[seq])) for seq in seqs], dtype=torch.int32)
        positions = torch.tensor(starts)[:, None] + torch.arange(q_len)
        slots = page_table.gather(1, positions // self.page_size) * self.page_size + positions % self.page_size
        lens = [self.lens[seq] for seq in seqs]
        group = self.model.config.num_attention_heads // self.model.config.num_key_value_heads
        return Step(
            caches=self.caches,
            slots=slots.flatten().to(device),
            page_table=page_table.to(device),
            seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            positions=positions.to(device),
            max_seq_len=max(lens),
            is_prefill=not any(starts),
            config=None if self.tile is None else _config(*self.tile, rows=q_len * group),
            on_layer=self.on_layer,
        )


@contextmanager
def attention_by_tkv(model: Any) -> Iterator[None]:
    """Replace the model's attention by `paged_attention`; its own comes back at the end."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, paged_attention)
    # Without a mask function of the same name transformers builds no mask at all, and one that was passed would be lost without a word.
    AttentionMaskInterface.register(NAME, padding_mask)
    own = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(own)


def padding_mask(*args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor | None:
    """The mask function of transformers: hands the caller's mask on as it is; causality follows from positions."""
    return attention_mask


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: Step,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of transformers: new keys and values go into the pages, queries read all of theirs from there.

    A prefill, where all keys are new, is computed by torch.

    Args:
        module: the layer's attention module; ``module.layer_idx`` chooses the cache.
        query: ``[num_seqs, num_q_heads, q_len, head_dim]``, rotated.
        key, value: ``[num_seqs, num_kv_heads, q_len, head_dim]``, of the new tokens only, keys rotated.
        attention_mask: must be None: sequences are told apart by their pages, not padded.
        paged: the step, as passed to the model's forward.
        scaling: factor of the scores.
        dropout: must be 0.
        options: what else transformers passes; what would change the result is refused.

    Returns:
        The attention's output ``[num_seqs, q_len, num_q_heads, head_dim]``, and None for the weights.

    Raises:
        UnsupportedError: an option that is not computed here.
    """
    refused = [name for name in ("sliding_window", "softcap", "s_aux") if options.get(name) is not None]
    if attention_mask is not None or dropout or refused:
        raise UnsupportedError(f"attention without mask and dropout only, got {', '.join(refused) or 'a mask or dropout'}")
    if paged.on_layer is not None:
        paged.on_layer(module.layer_idx, len(paged.caches))
    cache = paged.caches[module.layer_idx]
    new_k, new_v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (key, value))
    write_kv(new_k, new_v, cache, paged.slots)
    if paged.is_prefill:
        new = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
        return new.transpose(1, 2), None
    out = paged_decode(
        query.transpose(1, 2), cache, paged.page_table, paged.seq_lens,
        scale=scaling, max_seq_len=paged.max_seq_len, config=paged.config,
    )  # fmt: skip
    return cast("torch.Tensor", out), None


def _config(rows_at_most: int, keys: int, rows: int) -> dict[str, int]:
    return dict(block_m=min(rows_at_most, max(16, 1 << (rows - 1).bit_length())), block_n=keys, num_warps=4, num_stages=2)
