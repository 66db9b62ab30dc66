"""A transformers model whose attention reads and writes tkv's paged cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch

from tkv import (
    CacheManager,
    KVCache,
    PagePool,
    SharedLevel,
    copy_pages,
    find_shared_levels,
    paged_decode,
    prefix_prefill,
    shared_prefix_decode,
    write_kv,
)
from tkv.demo.loads import count_loads
from tkv.errors import UnsupportedError
from tkv.ops.cascade import paying
from tkv.pages import Batch, BatchTensors

NAME = "tkv"


@dataclass(frozen=True)
class Step:
    """One forward pass: where new keys and values go, and how queries attend. The same in every layer.

    Its tokens stand as the model has them, [rows, q_len]: a row a sequence, or all sequences one after the other in a single row.
    """

    caches: list[KVCache]
    slots: torch.Tensor  # [rows * q_len] int64
    positions: torch.Tensor  # [rows, q_len] int64
    # Of a layer's cache, q, k and v [rows, q_len, heads, head_dim] and the factor of the scores.
    attend: Callable[[KVCache, torch.Tensor, torch.Tensor, torch.Tensor, float | None], torch.Tensor]
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
        self.caches = empty_caches(self.model, self.format, self.num_pages, self.page_size)
        self.free = random.Random(0).sample(range(self.num_pages), self.num_pages)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a token takes in all layers, K, V and scales."""
        return round(sum(cache.bytes_per_token for cache in self.caches))

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
        return _forward(self.model, torch.tensor(ids, device=step.slots.device), step)

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
        decode = partial(
            _decode,
            page_table=page_table.to(device),
            seq_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            max_seq_len=max(lens),
            config=None if self.tile is None else _config(*self.tile, rows=q_len * group),
        )
        return Step(
            caches=self.caches,
            slots=slots.flatten().to(device),
            positions=positions.to(device),
            attend=decode if any(starts) else _attend_to_new,
            on_layer=self.on_layer,
        )


@dataclass
class Reads:
    """Bytes of K and V that kernels loaded in decoding, all layers together.

    Attributes:
        shared: by `shared_prefix_decode`.
        plain: by `paged_decode`, on the same queries.
        difference: the largest of a number in their results.
    """

    shared: int = 0
    plain: int = 0
    difference: float = 0.0


@dataclass
class ServedModel:
    """A model that serves sequences of a `tkv.CacheManager`: what their prompts share is computed, stored and read once.

    Args:
        model, format, num_pages, page_size, on_layer: as of `PagedModel`.
        tile_keys: keys of a tile of all attention, or None for tkv's own choice of launches.
    """

    model: Any
    format: str
    num_pages: int
    page_size: int = 16
    tile_keys: int | None = None
    on_layer: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        self.caches = empty_caches(self.model, self.format, self.num_pages, self.page_size)
        self.manager = CacheManager(PagePool(self.num_pages), self.page_size)
        self.group = self.model.config.num_attention_heads // self.model.config.num_key_value_heads
        # Keys of each level that the newest step read once for several sequences.
        self.shared_keys: tuple[int, ...] = ()

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> torch.Tensor:
        """Compute so many more tokens of each sequence, on what it has in the cache, by `prefix_prefill`.

        Args:
            prompts: new tokens of each sequence.

        Returns:
            The logits after the last token of each, ``[num_seqs, vocabulary]``.
        """
        batch = self.manager.step({seq: list(ids) for seq, ids in prompts.items()})
        tensors = batch.tensors(self.caches[0].device)
        config = self._config(batch.max_q_len * self.group)
        return self._run(batch, tensors, [*prompts.values()], partial(_prefill, batch=batch, tensors=tensors, config=config))

    def decode(self, seqs: Sequence[int], newest: Sequence[int], reads: Reads | None = None) -> torch.Tensor:
        """Compute one more token of each sequence, all in a batch, by `shared_prefix_decode`.

        Args:
            seqs: the sequences.
            newest: the token of each.
            reads: where to add what was loaded, in the interpreter; `paged_decode` then runs too, for comparison.

        Returns:
            The logits after it, ``[num_seqs, vocabulary]``.
        """
        batch = self.manager.step(seqs, tokens=newest)
        tensors = batch.tensors(self.caches[0].device)
        levels = [level.to(self.caches[0].device) for level in find_shared_levels(batch.page_table, batch.seq_lens, self.page_size)]
        self.shared_keys = tuple(level.max_len for level in paying(levels))
        attend = partial(
            _decode_shared,
            batch=batch,
            tensors=tensors,
            levels=levels,
            config=self._config(self.group),
            level_config=self._config(len(seqs) * self.group),
            reads=reads,
        )
        return self._run(batch, tensors, [[token] for token in newest], attend)

    def _config(self, rows: int) -> dict[str, int] | None:
        # Without splits: a GPU is filled by them, the interpreter pays for each.
        return None if self.tile_keys is None else _config(128, self.tile_keys, rows) | {"split_len": 2**20}

    def _run(self, batch: Batch, tensors: BatchTensors, ids: Sequence[Sequence[int]], attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        for cache in self.caches:
            copy_pages(cache, cache, *tensors.copies.unbind(1))
        step = Step(self.caches, tensors.slot_mapping, tensors.positions[None], attend, self.on_layer)
        tokens = torch.tensor([[token for sequence in ids for token in sequence]], device=self.caches[0].device)
        return _forward(self.model, tokens, step, logits_to_keep=tensors.cu_seqlens[1:].long() - 1)[0]


def empty_caches(model: Any, format: str, num_pages: int, page_size: int) -> list[KVCache]:
    """An empty cache for each layer of a model.

    Args:
        model: of transformers.
        format, num_pages, page_size: of the caches.
    """
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (num_pages, page_size, config.num_key_value_heads, dim)
    return [KVCache.empty(*shape, format, device=model.device) for _ in range(config.num_hidden_layers)]


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
    """The attention function of transformers: new keys and values go into the pages, queries attend as the step says.

    Args:
        module: the layer's attention module; ``module.layer_idx`` chooses the cache.
        query: ``[rows, num_q_heads, q_len, head_dim]``, rotated.
        key, value: ``[rows, num_kv_heads, q_len, head_dim]``, of the new tokens only, keys rotated.
        attention_mask: must be None: sequences are told apart by their pages, not padded.
        paged: the step, as passed to the model's forward.
        scaling: factor of the scores.
        dropout: must be 0.
        options: what else transformers passes; what would change the result is refused.

    Returns:
        The attention's output ``[rows, q_len, num_q_heads, head_dim]``, and None for the weights.

    Raises:
        UnsupportedError: an option that is not computed here.
    """
    refused = [name for name in ("sliding_window", "softcap", "s_aux") if options.get(name) is not None]
    if attention_mask is not None or dropout or refused:
        raise UnsupportedError(f"attention without mask and dropout only, got {', '.join(refused) or 'a mask or dropout'}")
    if paged.on_layer is not None:
        paged.on_layer(module.layer_idx, len(paged.caches))
    cache = paged.caches[module.layer_idx]
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    write_kv(k.flatten(0, 1), v.flatten(0, 1), cache, paged.slots)
    return paged.attend(cache, q, k, v, scaling), None


def _forward(model: Any, ids: torch.Tensor, step: Step, **options: Any) -> torch.Tensor:
    with torch.no_grad(), attention_by_tkv(model):
        logits: torch.Tensor = model(input_ids=ids, position_ids=step.positions, use_cache=False, paged=step, **options).logits
    return logits


def _attend_to_new(cache: KVCache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
    """By torch: a prefill, where all keys are new."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)


def _decode(
    cache: KVCache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, *,
    page_table: torch.Tensor, seq_lens: torch.Tensor, max_seq_len: int, config: dict[str, int] | None,
) -> torch.Tensor:  # fmt: skip
    """A row is a sequence, whose new keys are in its pages."""
    return cast("torch.Tensor", paged_decode(q, cache, page_table, seq_lens, scale=scale, max_seq_len=max_seq_len, config=config))


def _prefill(
    cache: KVCache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, *,
    batch: Batch, tensors: BatchTensors, config: dict[str, int] | None,
) -> torch.Tensor:  # fmt: skip
    """All sequences in one row: prefixes from their pages, new keys as they are."""
    out = prefix_prefill(
        q[0], k[0], v[0], cache, tensors.page_table, tensors.prefix_lens, tensors.cu_seqlens,
        scale=scale, max_q_len=batch.max_q_len, max_seq_len=batch.max_seq_len, config=config,
    )  # fmt: skip
    return cast("torch.Tensor", out)[None]


def _decode_shared(
    cache: KVCache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, *,
    batch: Batch, tensors: BatchTensors, levels: list[SharedLevel], config: dict[str, int] | None, level_config: dict[str, int] | None,
    reads: Reads | None,
) -> torch.Tensor:  # fmt: skip
    """All sequences in one row, a token each, whose new keys are in their pages."""
    of_sequences = tensors.page_table, tensors.seq_lens
    options: dict[str, Any] = dict(scale=scale, max_seq_len=batch.max_seq_len, config=config)

    def shared() -> torch.Tensor:
        return cast("torch.Tensor", shared_prefix_decode(q[0], cache, levels, *of_sequences, level_config=level_config, **options))

    if reads is None:
        return shared()[None]
    with count_loads(cache.k, cache.v) as counted:
        out = shared()
    reads.shared += counted.bytes
    with count_loads(cache.k, cache.v) as counted:
        plain = cast("torch.Tensor", paged_decode(q[0], cache, *of_sequences, **options))
    reads.plain += counted.bytes
    reads.difference = max(reads.difference, float((out - plain).abs().max()))
    return out[None]


def _config(rows_at_most: int, keys: int, rows: int) -> dict[str, int]:
    return dict(block_m=min(rows_at_most, max(16, 1 << (rows - 1).bit_length())), block_n=keys, num_warps=4, num_stages=2)
