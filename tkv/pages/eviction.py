"""What has to be moved when sequences keep only some of their tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tkv.errors import OutOfPages, RangeError
from tkv.pages.ledger import Ledger
from tkv.pages.prefix import UNKNOWN
from tkv.pages.sequences import pages_of, ranges
from tkv.pages.tensors import as_tensors


@dataclass(frozen=True, eq=False)
class EvictionTensors:
    """An :class:`Eviction` as tensors on a device, under the names that ``tkv.compact_kv`` has for them."""

    page_table: torch.Tensor
    seq_lens: torch.Tensor
    keep_lens: torch.Tensor
    dst_page_table: torch.Tensor


@dataclass(frozen=True, eq=False)
class Eviction:
    """Where the tokens that sequences keep are, and where they go.

    In every layer, before the manager's next :meth:`step` or :meth:`evict` (which may hand out the pages that become free):
    ``tkv.compact_kv(cache, page_table, keep, keep_lens, dst_page_table=dst_page_table)`` moves the j-th token that a sequence and head
    keeps to place j of `dst_page_table`. A page of `dst_page_table` that is one of `page_table` is at the same place in both, so that
    tokens moved in ascending order overwrite none that is still to be moved; no other sequence has it. A sequence that keeps all its
    tokens has the same pages in both, which others may share: nothing moves.

    Attributes:
        seqs: ``[num_seqs]`` int64, the sequences, in the order of the call.
        page_table: ``[num_seqs, width]`` int32, the pages that they had, -1 behind them.
        seq_lens: ``[num_seqs]`` int32, tokens in these.
        keep_lens: ``[num_seqs]`` int32, how many each keeps.
        dst_page_table: ``[num_seqs, dst_width]`` int32, the pages that they have now, -1 behind them.
        max_seq_len, max_keep_len: the largest of `seq_lens` and of `keep_lens`.

    Example:
        >>> from tkv.pages import CacheManager, PagePool
        >>> manager = CacheManager(PagePool(8), page_size=4)
        >>> a = manager.add(range(10))
        >>> batch = manager.step({a: range(10)})
        >>> b = manager.fork(a)
        >>> eviction = manager.evict([a], [5])                     # the fork needs the old pages
        >>> eviction.page_table.tolist(), eviction.dst_page_table.tolist()
        ([[0, 1, 2]], [[3, 4]])
    """

    seqs: np.ndarray
    page_table: np.ndarray
    seq_lens: np.ndarray
    keep_lens: np.ndarray
    dst_page_table: np.ndarray
    max_seq_len: int
    max_keep_len: int

    def tensors(self, device: torch.device | str | None = None) -> EvictionTensors:
        """The arrays as tensors, those that ``tkv.compact_kv`` takes.

        Args:
            device: where; on the CPU (None) they share the arrays' memory. On a GPU: see :meth:`Batch.tensors`.

        Returns:
            The tensors.

        Example:
            >>> from tkv.pages import CacheManager, PagePool
            >>> manager = CacheManager(PagePool(8), page_size=4)
            >>> batch = manager.step({manager.add(range(10)): range(10)})
            >>> manager.evict([0], [5]).tensors().dst_page_table
            tensor([[0, 1]], dtype=torch.int32)
        """
        return EvictionTensors(**as_tensors(self, EvictionTensors, device))


def evict(ledger: Ledger, names: np.ndarray, lens: np.ndarray) -> Eviction:
    """Leave each sequence room for so many of its tokens, or change none of them.

    Raises:
        OutOfPages: pages for what cannot stay in its place are too few.
        RangeError: a sequence has fewer tokens.
    """
    rows, index, size = ledger.rows_of(names), ledger.index, ledger.size
    held = ledger.lens[rows]
    if np.any(lens > held):
        at = int(np.argmax(lens > held))
        raise RangeError(f"lengths: expected at most {held[at]}, what sequence {names[at]} holds, got {lens[at]}")
    old, new = pages_of(held, size), pages_of(lens, size)
    page_table = ledger.table[rows, : old.max(initial=0)]
    targets = page_table[:, : new.max(initial=0)].copy()
    targets[np.arange(targets.shape[1]) >= new[:, None]] = -1

    cut = lens < held
    old, new = old * cut, new * cut
    every = np.arange(rows.size)
    users, places = np.repeat(every, old), ranges(np.zeros_like(old), old)
    pages = page_table[users, places]
    alone, stays = index.holders(pages) == 1, places < np.repeat(new, old)
    moves = stays & ~alone
    count = int(moves.sum())
    if count > index.num_available:
        targets[users[moves], places[moves]] = -1
        raise OutOfPages(
            f"needs {count:,} pages for tokens of {rows.size:,} sequences that share theirs, {index.pool.num_free:,} of "
            f"{index.pool.num_pages:,} are free and {index.num_idle:,} cached",
            needed=count,
            available=index.num_available,
            held=np.unique(targets[targets >= 0]).size,
            total=index.pool.num_pages,
        )
    targets[users[moves], places[moves]] = index.take(count)

    # From here on nothing fails.
    for page in pages[alone].tolist():
        if index.claims[page]:
            index.forget(page)
    index.tokens[targets[np.repeat(every, new), ranges(np.zeros_like(new), new)]] = UNKNOWN
    ledger.table[rows[users], places] = -1
    ledger.table[rows[cut], : targets.shape[1]] = targets[cut]
    index.release(pages[moves | ~stays][::-1])
    ledger.first[rows[cut]] = (held + ledger.gone[rows])[cut]
    ledger.gone[rows] += held - lens
    ledger.lens[rows] = lens
    for row in rows[cut].tolist():
        ledger.chains[row] = None
        ledger.reopen(row)
    return Eviction(
        seqs=names,
        page_table=page_table,
        seq_lens=held.astype(np.int32),
        keep_lens=lens.astype(np.int32),
        dst_page_table=targets,
        max_seq_len=int(held.max(initial=0)),
        max_keep_len=int(lens.max(initial=0)),
    )
