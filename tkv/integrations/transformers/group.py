"""Layers that see the same keys: their pages, and what a forward pass is for all of them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from tkv.errors import UnsupportedError
from tkv.integrations.transformers.layout import Layout
from tkv.pages import CacheManager, PagePool
from tkv.pages.tensors import to_device

# A limit without memory behind it: caches grow with the pages that are used.
MANY_PAGES = 1 << 20


@dataclass(frozen=True, eq=False)
class Step:
    """One forward pass for tkv's functions: tensors on a device, and numbers.

    A sequence of its own, behind the others, is each row of padding that sees tokens: it sees its sequence's keys, and is none.

    Attributes:
        page_table, seq_lens, q_start, cu_seqlens, kv_start: as ``tkv.prefix_prefill`` takes them; kv_start None without a window.
        slots: ``[batch * q_len]``, where each row's key goes; -1 for padding.
        token_slots: ``[num_tokens]``, without padding.
        rows: rows of the flattened batch in the order of the call; None if they are all of them in theirs.
        copies: ``[num_copies, 2]``, pages to copy before; None if there are none.
        with_tokens: sequences that have new tokens, and
        last_rows: the last of these, in the order of the call.
        num_seqs, num_tokens: without rows of padding.
        max_q_len, max_seq_len, pinned: as the functions take them.
        is_decode: one token of every sequence.
    """

    page_table: torch.Tensor
    seq_lens: torch.Tensor
    q_start: torch.Tensor
    cu_seqlens: torch.Tensor
    kv_start: torch.Tensor | None
    slots: torch.Tensor
    token_slots: torch.Tensor
    rows: torch.Tensor | None
    copies: torch.Tensor | None
    with_tokens: torch.Tensor
    last_rows: torch.Tensor
    num_seqs: int
    num_tokens: int
    max_q_len: int
    max_seq_len: int
    pinned: int
    is_decode: bool

    def to(self, device: torch.device) -> Step:
        """The same with its tensors on a device."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        moved: dict[str, Any] = to_device({name: value.numpy() for name, value in values if isinstance(value, torch.Tensor)}, device)
        return replace(self, **moved)


class Group:
    """The page tables of layers with the same window.

    Args:
        window, sinks: what their tokens see.
        page_size: tokens of a page.
        max_pages: the most pages of a layer, or None.
        max_tokens: columns that generation will not pass, or None.
    """

    def __init__(self, window: int | None, sinks: int, page_size: int, max_pages: int | None, max_tokens: int | None) -> None:
        self.window, self.sinks = window, sinks
        self.pool = PagePool(MANY_PAGES if max_pages is None else max_pages)
        self.manager = CacheManager(self.pool, page_size, window=window, sinks=sinks if window is not None else 0, prefix_cache=False)
        self.max_tokens = max_tokens
        self.seqs: list[int] = []
        self.layers: list[int] = []
        # Pages that the layers' caches have, or are to grow to.
        self.capacity = 0
        self.layout: Layout | None = None
        self.waiting: set[int] = set()
        self._steps: dict[torch.device, Step] = {}

    def step(self, layout: Layout, device: torch.device) -> Step:
        """What a forward pass is for these layers: worked out by the first of them, on the host, and moved to each device once.

        Raises:
            OutOfPages: `max_pages` are too few.
            UnsupportedError: padding between tokens, and a window that does not see both sides of it.
        """
        if self.layout is not layout:
            self._steps = {torch.device("cpu"): self._next(layout)}
            self.layout, self.waiting = layout, set(self.layers)
        if device not in self._steps:
            self._steps[device] = self._steps[torch.device("cpu")].to(device)
        return self._steps[device]

    def done(self, layer_idx: int) -> None:
        """A layer has stored its keys."""
        self.waiting.discard(layer_idx)

    def truncate(self, lost: np.ndarray) -> None:
        """Drop the last tokens of each sequence."""
        self.manager.truncate(self.seqs, self.manager.lengths(self.seqs) - lost)

    def select(self, rows: list[int]) -> None:
        """Sequences in a new order; what comes twice shares its pages."""
        taken: set[int] = set()
        seqs = []
        for row in rows:
            seqs.append(self.manager.fork(self.seqs[row]) if row in taken else self.seqs[row])
            taken.add(row)
        for row, seq in enumerate(self.seqs):
            if row not in taken:
                self.manager.free(seq)
        self.seqs = seqs

    def _next(self, layout: Layout) -> Step:
        if not self.seqs:
            self.seqs = [self.manager.add([]) for _ in range(layout.batch)]
        if self.window is not None and np.any(layout.has_gap & (layout.extent > self.window)):
            raise UnsupportedError(
                f"attention_mask: padding between tokens is not served beyond a window, {self.window}; pad prompts on the left"
            )
        before = self.manager.lengths(self.seqs)
        batch = self.manager.step(self.seqs, counts=layout.counts)
        self._grow(layout.batch)
        slots, rows = batch.slot_mapping, None
        page_table, seq_lens, q_start, kv_start = batch.page_table, batch.seq_lens, before, batch.kv_start
        lens = layout.counts
        if layout.tokens is not None:
            slots = np.full(layout.batch * layout.q_len, -1)
            slots[layout.tokens] = batch.slot_mapping
            rows = np.concatenate([layout.tokens, layout.pads])
            seqs = np.concatenate([np.arange(layout.batch), layout.pad_seqs])
            page_table, kv_start = page_table[seqs], kv_start[seqs]
            pad_lens = np.minimum(layout.pad_keys, np.maximum(layout.pad_keys - kv_start[layout.batch :], batch.pinned))
            seq_lens = np.concatenate([seq_lens, pad_lens])
            q_start = np.concatenate([before, layout.pad_positions])
            lens = np.concatenate([layout.counts, np.ones_like(layout.pads)])
        ends = batch.cu_seqlens[1:].astype(np.int64)
        with_tokens = np.flatnonzero(layout.counts)
        return Step(
            page_table=_ints(page_table),
            seq_lens=_ints(seq_lens),
            q_start=_ints(q_start),
            cu_seqlens=_ints(np.concatenate([[0], lens.cumsum()])),
            kv_start=None if self.window is None else _ints(kv_start),
            slots=torch.from_numpy(slots),
            token_slots=torch.from_numpy(batch.slot_mapping),
            rows=None if rows is None else torch.from_numpy(rows),
            copies=torch.from_numpy(batch.copies) if batch.copies.size else None,
            with_tokens=torch.from_numpy(with_tokens),
            last_rows=torch.from_numpy(ends[with_tokens] - 1),
            num_seqs=layout.batch,
            num_tokens=int(layout.counts.sum()),
            max_q_len=max(1, batch.max_q_len),
            max_seq_len=batch.max_seq_len,
            pinned=batch.pinned,
            is_decode=layout.q_len == 1 and layout.tokens is None,
        )

    def _grow(self, num_seqs: int) -> None:
        """Room for the pages that were handed out: by half, so that copying stays cheap, but not beyond what generation can use."""
        needed = self.pool.peak_used
        if needed <= self.capacity:
            return
        room = max(needed, self.capacity + self.capacity // 2)
        if self.max_tokens is not None:
            room = min(room, num_seqs * -(-self.max_tokens // self.manager.page_size))
        self.capacity = min(max(room, needed), self.pool.num_pages)


def _ints(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.int32))
