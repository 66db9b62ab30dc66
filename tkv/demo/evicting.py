"""A model whose paged cache evicts keys: several policies in one batch, each with its own sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from tkv import CacheManager, KVCache, PagePool, compact_kv, copy_pages, gather_window, key_scores, paged_decode
from tkv.demo.attention import Step, attention_by_tkv, empty_caches
from tkv.demo.gathered import attend, scores_of
from tkv.demo.interpreter import quick_interpreter
from tkv.demo.through_cache import few_programs
from tkv.ops import compact as ops_compact
from tkv.ops.launch import Launch, interpreting
from tkv.pages import BatchTensors
from tkv.policies import Kept, dense_scores
from tkv.tune.configs import AttentionConfig

PAGE_SIZE = 16


@dataclass(frozen=True)
class Policy:
    """How to choose the keys that stay.

    Args:
        name: what tables call it.
        choose: of scores ``[num_seqs, num_kv_heads, width]``, keys ``[num_seqs, width, num_kv_heads, head_dim]`` and lengths, one of
            `tkv.policies`.
        newest: how many of the newest queries' attention the scores are, None for that of all so far; 0 for no scores.
    """

    name: str
    choose: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Kept]
    newest: int | None = 0


class EvictingModel:
    """A model and the pages of sequences of equal length, in all its layers, with the attention mass of their keys.

    Args:
        model: of transformers.
        chosen: the policies; those without scores come last.
        num_seqs: sequences of each policy, side by side in the batch.
        budget: the most keys of a sequence.
        on_layer: called with (layer, number of layers) before each layer's attention.
    """

    def __init__(
        self, model: Any, chosen: Sequence[Policy], num_seqs: int, budget: int, on_layer: Callable[[int, int], None] | None = None
    ) -> None:
        self.model, self.chosen, self.num_seqs, self.budget, self.on_layer = model, chosen, num_seqs, budget, on_layer
        num_pages = len(chosen) * num_seqs * -(-budget // PAGE_SIZE)
        self.manager = CacheManager(PagePool(num_pages), PAGE_SIZE, prefix_cache=False)
        self.seqs = [self.manager.add([]) for _ in range(len(chosen) * num_seqs)]
        native = str(model.dtype).removeprefix("torch.").replace("float", "fp").replace("bfp", "bf")
        self.caches = empty_caches(model, native, num_pages, PAGE_SIZE)
        shape = (num_pages, PAGE_SIZE, self.caches[0].num_kv_heads)
        self.scores = [torch.zeros(shape, device=model.device) for _ in self.caches]
        self.most_pages = 0
        # Of the kernels' attention from torch's, as a part of the largest number.
        self.difference = 0.0

    @torch.no_grad()
    def read(self, ids: torch.Tensor, keeps: int | None) -> torch.Tensor:
        """Run the model on new tokens, all of which see what the cache has and those before them; then evict.

        Args:
            ids: ``[num_seqs of all policies, num_tokens]``.
            keeps: how many keys of each sequence stay; None: all, and the kernels' attention is compared with torch's.

        Returns:
            The last hidden states, ``[num_seqs of all policies, num_tokens, hidden_size]``.
        """
        batch = self.manager.step(self.seqs, counts=[ids.shape[1]] * len(self.seqs))
        tensors = batch.tensors(ids.device)
        self.most_pages = max(self.most_pages, batch.page_table.shape[1])
        keep: list[torch.Tensor] = []
        positions = tensors.positions.view(ids.shape)
        attending = partial(self._attend, tensors, batch.max_seq_len, None if keeps is None else keep)
        step = Step(self.caches, tensors.slot_mapping, positions, attending, self.on_layer)
        with ExitStack() as stack:
            if interpreting():
                stack.enter_context(quick_interpreter())
                stack.enter_context(few_programs())
                stack.enter_context(whole_rows())
            for cache in self.caches:
                copy_pages(cache, cache, *tensors.copies.unbind(1))
            with attention_by_tkv(self.model):
                output = self.model.model(input_ids=ids, position_ids=positions, use_cache=False, paged=step)
            if keeps is not None:
                self._evict(keep, keeps)
        return cast("torch.Tensor", output.last_hidden_state)

    def _evict(self, keep: list[torch.Tensor], keeps: int) -> None:
        """Move what stays to the first pages of each sequence, in every layer; the manager takes the others back."""
        eviction = self.manager.evict(self.seqs, [keeps] * len(self.seqs)).tensors(keep[0].device)
        for cache, kept, scores in zip(self.caches, keep, self.scores):
            compact_kv(
                cache, eviction.page_table, kept, eviction.keep_lens, scores=scores, dst_page_table=eviction.dst_page_table
            )

    def _attend(
        self, batch: BatchTensors, num_keys: int, keep: list[torch.Tensor] | None, cache: KVCache, q: torch.Tensor, k: torch.Tensor,
        v: torch.Tensor, scale: float | None,
    ) -> torch.Tensor:  # fmt: skip
        keys, values, _, _ = gather_window(cache, batch.page_table, batch.seq_lens, window=None, dense=True)
        order, first = torch.arange(num_keys, device=q.device), num_keys - q.shape[1]
        visible = (order <= order[first:, None]).expand(len(q), -1, -1)
        out, lse = attend(scores_of(q, keys[:, :num_keys], scale), values[:, :num_keys], visible)
        if keep is None:
            self._compare(batch, cache, q, out, scale)
        else:
            masses = self._masses(batch, cache, q, lse, scale)
            parts = (x.split(self.num_seqs) for x in (masses, keys, batch.seq_lens))
            keep.append(torch.cat([policy.choose(*part)[0] for policy, *part in zip(self.chosen, *parts)]))
        return out.to(q.dtype)

    def _masses(
        self, batch: BatchTensors, cache: KVCache, q: torch.Tensor, lse: torch.Tensor, scale: float | None
    ) -> torch.Tensor:  # fmt: skip
        """Attention mass of each key from the queries that its policy looks at, ``[num_seqs, num_kv_heads, width]``."""
        scores = next(scores for scores, other in zip(self.scores, self.caches) if other is cache)
        # New keys have none yet, whatever was in their slots; and some policies forget what older queries saw.
        scores.view(-1, scores.shape[-1])[batch.slot_mapping] = 0
        rows = [q.shape[1] if policy.newest is None else min(policy.newest, q.shape[1]) for policy in self.chosen]
        for policy, table in zip(self.chosen, batch.page_table.split(self.num_seqs)):
            if policy.newest:
                scores[table[table >= 0].long()] = 0
        count = sum(map(bool, rows)) * self.num_seqs
        counts = torch.tensor(rows).repeat_interleave(self.num_seqs)[:count].tolist()
        newest_q, newest_lse = (torch.cat([x[seq, -n:] for seq, n in enumerate(counts)]) for x in (q, lse))
        starts = torch.nn.functional.pad(torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32), (1, 0)).to(q.device)
        key_scores(
            newest_q, cache, batch.page_table[:count], batch.seq_lens[:count], newest_lse, out=scores, cu_seqlens=starts,
            max_q_len=max(counts), scale=scale, config=self._config(),
        )  # fmt: skip
        return dense_scores(scores, batch.page_table, batch.seq_lens)

    def _compare(
        self, batch: BatchTensors, cache: KVCache, q: torch.Tensor, out: torch.Tensor, scale: float | None
    ) -> None:  # fmt: skip
        """The newest query of a sequence of each policy by tkv's kernel."""
        some = slice(None, None, self.num_seqs)
        newest, table, lens = (x.contiguous() for x in (q[some, -1], batch.page_table[some], batch.seq_lens[some]))
        got = paged_decode(newest, cache, table, lens, scale=scale, config=self._config())
        expected = out[some, -1]
        difference = (cast("torch.Tensor", got).float() - expected).abs().max() / expected.abs().max()
        self.difference = max(self.difference, float(difference))

    def _config(self) -> AttentionConfig | None:
        """Tiles for Triton's interpreter, which pays for each and less for its size: all keys in one."""
        if not interpreting():
            return None
        return AttentionConfig(128, max(16, 1 << (self.budget - 1).bit_length()), num_warps=4, num_stages=1, split_len=2**20)


@contextmanager
def whole_rows() -> Iterator[None]:
    """Let a program of `compact_kv` move whole rows while the context is open."""
    own_plan = ops_compact.plan_compact
    ops_compact.plan_compact = lambda *args: [with_whole_rows(launch) for launch in own_plan(*args)]
    try:
        yield
    finally:
        ops_compact.plan_compact = own_plan


def with_whole_rows(launch: Launch) -> Launch:
    """The launch of `compact_kv` with a program for all words of a row, not for a block of them."""
    values = dict(zip(launch.kernel.arg_names, launch.args))
    count = len(values["WORDS"])
    values["BLOCKS"] = tuple(1 << (words - 1).bit_length() for words in values["WORDS"])
    values["FIRST_PARTS"] = tuple(range(count + 1))
    return replace(launch, grid=(*launch.grid[:-1], count), args=tuple(values.values()))
