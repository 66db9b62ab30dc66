"""A model that reads a text of any length from the pages of sink tokens and a window."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch

from tkv import CacheManager, KVCache, PagePool, copy_pages, gather_window, paged_decode
from tkv.demo.attention import Step, attention_by_tkv, empty_caches
from tkv.demo.gathered import rope_of, streaming_attention
from tkv.demo.interpreter import quick_interpreter
from tkv.demo.through_cache import few_programs
from tkv.ops.launch import interpreting
from tkv.pages import BatchTensors

PAGE_SIZE = 16
INTERPRETED_CONFIG = dict(block_m=16, block_n=128, num_warps=4, num_stages=2, split_len=2**20)


class StreamingModel:
    """A model and the pages of one sequence in all its layers, that hold unrotated keys of sink tokens and a window.

    Args:
        model: of transformers, with a rotary embedding.
        window: how many of the newest tokens a query sees, itself included.
        sinks: how many of the first tokens it sees besides.
        chunk: the most new tokens of a step.
        on_layer: called with (layer, number of layers) before each layer's attention.
    """

    def __init__(
        self, model: Any, window: int, sinks: int, chunk: int, on_layer: Callable[[int, int], None] | None = None
    ) -> None:  # fmt: skip
        self.model, self.window, self.sinks, self.on_layer = model, window, sinks, on_layer
        # The sink tokens, the window before a chunk and the chunk, and what pages hold besides at both ends.
        num_pages = -(-(sinks + window + chunk - 1) // PAGE_SIZE) + 2
        self.manager = CacheManager(PagePool(num_pages), PAGE_SIZE, window=window, sinks=sinks, prefix_cache=False)
        self.seq = self.manager.add([])
        native = str(model.dtype).removeprefix("torch.").replace("float", "fp").replace("bfp", "bf")
        self.caches = empty_caches(model, native, num_pages, PAGE_SIZE)
        self.rope = rope_of(model, sinks + window + max(chunk, 256))
        self.pinned = 0

    @property
    def pages_held(self) -> int:
        """Pages that the sequence has now; every layer has as many."""
        return len(self.manager.pages(self.seq))

    def step(self, ids: torch.Tensor) -> BatchTensors:
        """Room for new tokens: what left the window before them is dropped."""
        batch = self.manager.step({self.seq: ids})
        self.pinned = batch.pinned
        tensors = batch.tensors(self.model.device)
        for cache in self.caches:
            copy_pages(cache, cache, *tensors.copies.unbind(1))
        return tensors

    def by_torch(self, batch: BatchTensors, ids: torch.Tensor) -> torch.Tensor:
        """Run the model on a step's tokens: tkv writes their K and V and gathers what they see, torch attends.

        Args:
            batch: of the newest step.
            ids: ``[num_tokens]``, its tokens.

        Returns:
            The last hidden states, ``[num_tokens, hidden_size]``.
        """
        return self._run(batch, ids, partial(self._gathered, batch))

    def by_kernels(self, batch: BatchTensors, ids: torch.Tensor) -> torch.Tensor:
        """Likewise, but tkv's decode kernel attends, and rotates queries and keys as it reads them."""
        return self._run(batch, ids, partial(self._decoded, batch))

    @torch.no_grad()
    def _run(self, batch: BatchTensors, ids: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        # The model rotates by nothing at position 0: keys go into the cache as they are.
        positions = torch.zeros_like(batch.positions)[None]
        step = Step(self.caches, batch.slot_mapping, positions, attend, self.on_layer)
        with ExitStack() as stack:
            if interpreting():
                stack.enter_context(quick_interpreter())
                stack.enter_context(few_programs())
            stack.enter_context(attention_by_tkv(self.model))
            output = self.model.model(input_ids=ids[None], position_ids=positions, use_cache=False, paged=step)
        return cast("torch.Tensor", output.last_hidden_state[0])

    def _gathered(
        self, batch: BatchTensors, cache: KVCache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        keys, values, positions, _ = gather_window(
            cache, batch.page_table, batch.seq_lens, window=self.window + q.shape[1] - 1, sinks=self.sinks, dense=True,
            kv_start=batch.kv_start, pinned=self.pinned,
        )  # fmt: skip
        rows = batch.positions[None]
        return streaming_attention(q, keys, values, rows, positions, self.rope, self.window, self.sinks, scale).to(q.dtype)

    def _decoded(
        self, batch: BatchTensors, cache: KVCache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        out = paged_decode(
            q, cache, batch.page_table, batch.seq_lens, scale=scale, window=self.window, sinks=self.sinks, kv_start=batch.kv_start,
            pinned=self.pinned, rope=self.rope, config=INTERPRETED_CONFIG if interpreting() else None,
        )  # fmt: skip
        return cast("torch.Tensor", out)
