"""Sequences in two parts: whole old pages in one cache, the newest tokens in another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tkv.errors import OutOfPages, RangeError
from tkv.pages.batch import TailBatch, check_growth
from tkv.pages.ledger import Ledger
from tkv.pages.pool import PagePool
from tkv.pages.prefix import PrefixIndex, page_hash
from tkv.pages.sequences import pages_of, ranges


@dataclass(frozen=True)
class Aging:
    """The first pages of tails that a step converts.

    Attributes:
        due: how many of each row.
        sources: these pages, row by row.
        targets: where each goes: a page that is there already, or ``~i`` for the one that the i-th conversion makes.
        converted: the pages of tails that are converted.
        spare: pages that nobody has once they are converted, which the same step may write.
        num_adopted: pages of targets that are there already, in the cache alone.
    """

    due: np.ndarray
    sources: np.ndarray
    targets: np.ndarray
    converted: np.ndarray
    spare: np.ndarray
    num_adopted: int


class TailLedger:
    """A :class:`Ledger` whose sequences' first tokens are in whole pages of `old`, which has the index, and whose rest is in `tail`.

    Both have the same sequences, added and removed in the same order, so that a sequence has one number and one row in both. Positions in
    `tail` count from its first token. All that can fail comes before the first change.
    """

    def __init__(self, index: PrefixIndex, tail_pool: PagePool, tail_len: int, prefix_cache: bool) -> None:
        # No part of a page is long enough to match: a page that is not written to can be shared as a whole only.
        self.old = Ledger(index, prefix_cache, index.page_size + 1)
        self.tail = Ledger(PrefixIndex(tail_pool, index.page_size), False, None)
        self.index = index
        self.size = index.page_size
        self.tail_len = tail_len
        self.num_conversions = 0

    @property
    def names(self) -> list[int]:
        """The living sequences, oldest first."""
        return self.old.names

    @property
    def num_copies(self) -> int:
        """Pages that were copied."""
        return self.tail.num_copies

    def row(self, seq: int) -> int:
        """A sequence's row in both parts."""
        return self.old.row(seq)

    def rows_of(self, names: np.ndarray) -> np.ndarray:
        """The rows of different sequences in both parts."""
        return self.old.rows_of(names)

    def length(self, row: int) -> int:
        """A row's tokens."""
        return self.old.length(row) + self.tail.length(row)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Tokens of each row."""
        return self.old.lengths(rows) + self.tail.lengths(rows)

    def held(self, row: int) -> int:
        """A row's tokens: all of them are in its pages."""
        return self.length(row)

    def pages(self, row: int) -> np.ndarray:
        """A copy of a row's old pages."""
        return self.old.pages(row)

    def tail_pages(self, row: int) -> np.ndarray:
        """A copy of the pages of a row's tail."""
        return self.tail.pages(row)

    def ids_of(self, row: int) -> np.ndarray:
        """A row's tokens, UNKNOWN from the first that was not given."""
        return np.concatenate([self.old.ids_of(row), self.tail.ids_of(row)])

    def match(self, ids: np.ndarray, root: bytes) -> tuple[np.ndarray, int, list[bytes]]:
        """The old pages that hold the longest known part of a prompt, how many tokens that is, and their hashes."""
        return self.old.match(ids, root)

    def start(self, ids: np.ndarray, root: bytes) -> tuple[int, int]:
        """A sequence with what is known of a prompt and an empty tail, and how much that is."""
        self.tail.reserve(1, 0)
        found = self.old.start(ids, root)
        self.tail.add(np.zeros(0, np.int32), 0, 0, None)
        return found

    def fork(self, seq: int) -> int:
        """A second sequence on the pages of one."""
        self.tail.reserve(1, self.tail.pages(self.row(seq)).size)
        self.old.fork(seq)
        return self.tail.fork(seq)

    def step(self, names: np.ndarray, ids: np.ndarray | None, new: np.ndarray) -> TailBatch:
        """Extend each sequence by so many tokens and convert what is old enough, or nothing of it."""
        old, tail, size = self.old, self.tail, self.size
        rows = self.rows_of(names)
        cut, rest = old.lens[rows], tail.lens[rows]
        before, known = cut + rest, old.known[rows] + tail.known[rows]
        check_growth(names, before, known, ids, new)
        aging, pool, grown = self._ahead(rows, new), tail.index.pool, tail.ahead(rows, new)[2]
        due, sources, targets, converted, spare = aging.due, aging.sources, aging.targets, aging.converted, aging.spare
        adopted, users, places = targets[targets >= 0], np.repeat(rows, due), ranges(np.zeros_like(due), due)
        if converted.size > old.index.num_available - aging.num_adopted:
            idle = old.index.num_idle - aging.num_adopted
            raise OutOfPages(
                f"pool: needs {converted.size:,} pages for tokens that leave the tails of {rows.size:,} sequences, "
                f"{old.index.pool.num_free:,} of {old.index.pool.num_pages:,} are free and {idle:,} cached",
                needed=converted.size,
                available=old.index.pool.num_free + idle,
                held=np.union1d(adopted, np.concatenate([old.pages(row) for row in rows.tolist()])).size,
                total=old.index.pool.num_pages,
            )
        copied, taken, missing = tail.part(rows, rest, new, grown)
        if missing > spare.size:
            raise OutOfPages(
                f"tail_pool: needs {pool.num_free + missing:,} pages for {new.sum():,} tokens of {rows.size:,} sequences, "
                f"{pool.num_free:,} of {pool.num_pages:,} are free and {spare.size:,} become free",
                needed=pool.num_free + missing,
                available=pool.num_free + spare.size,
                held=tail.num_kept(rows, due, copied),
                total=pool.num_pages,
            )
        width = int((cut // size + due).max(initial=0))
        old.reserve(0, width)
        tail.reserve(0, int(pages_of(rest - due * size + new, size).max(initial=0)))
        needed = copied.size + grown
        reused, fresh = spare[:needed], np.zeros(0, np.int32)
        # Held first, so that they are not evicted to make room.
        old.index.hold(adopted)
        try:
            fresh = pool.allocate(needed - reused.size)
            made = old.index.take(converted.size)
        except BaseException:
            pool.release(fresh)
            old.index.release(adopted)
            raise

        # From here on nothing fails.
        fill = targets < 0
        targets[fill] = made[~targets[fill]]
        old.index.hold(targets[fill])
        old.index.release(made)
        old.index.tokens[made] = tail.index.tokens[converted]
        old.table[users, cut.repeat(due) // size + places] = targets
        old.lens[rows] = cut + due * size
        old.known[rows] = np.minimum(known, old.lens[rows])
        tail.known[rows] = known - old.known[rows]
        pool.share(reused)
        pool.release(sources)
        tail.drop_pages(rows, 0, due, size)
        self.num_conversions += made.size

        # A copy: later calls change the table, and what was handed out stays.
        page_table, lens = old.table[rows, :width], old.lens[rows].astype(np.int32)
        written = tail.extend(names, rows, ids, new, copied, taken, np.concatenate([reused, fresh]))
        for row in rows[due > 0].tolist():
            old.publish(row)
        return TailBatch(
            seqs=names,
            page_table=page_table,
            seq_lens=lens,
            prefix_lens=before.astype(np.int32),
            cu_seqlens=written.cu_seqlens,
            slot_mapping=written.slot_mapping,
            positions=ranges(before, new),
            kv_start=lens,
            copies=written.copies,
            copy_lens=written.copy_lens,
            filled=written.filled,
            max_q_len=written.max_q_len,
            max_seq_len=width * size,
            pinned=0,
            tail_page_table=written.page_table,
            tail_lens=written.seq_lens,
            conversions=np.stack([converted, made], 1),
            max_tail_len=written.max_seq_len,
        )

    def missing(self, names: np.ndarray, new: np.ndarray) -> tuple[int, int]:
        """Pages that such a step needs beside those that it frees itself: of the pool, and of that of tails."""
        rows, tail = self.rows_of(names), self.tail
        check_growth(names, self.lengths(rows), self.old.known[rows] + tail.known[rows], None, new)
        aging, grown = self._ahead(rows, new), tail.ahead(rows, new)[2]
        more = tail.index.num_available + tail.part(rows, tail.lens[rows], new, grown)[2] - aging.spare.size
        return aging.converted.size + aging.num_adopted, max(more, 0)

    def identify(self, seq: int, ids: np.ndarray) -> None:
        """Fill in the ids of a sequence's first unknown tokens."""
        row = self.row(seq)
        here = int(self.old.lens[row] - self.old.known[row])
        unknown = here + int(self.tail.lens[row] - self.tail.known[row])
        if ids.size > unknown:
            raise RangeError(f"tokens: sequence {seq} has {unknown} tokens without ids, got {ids.size}")
        self.tail.unknown_slots(seq, ids[here:])
        self.old.identify(seq, ids[:here])
        self.tail.identify(seq, ids[here:])

    def truncate(self, names: np.ndarray, rows: np.ndarray, lens: np.ndarray) -> None:
        """Drop the last tokens of each row, and what nobody else has of them: any of the tail, whole pages of what is older."""
        cut = self.old.lens[rows]
        wrong = (lens < cut) & (lens % self.size > 0)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise RangeError(
                f"length: expected {cut[at]} or more, or a multiple of the page size {self.size}, got {lens[at]}: the first {cut[at]} "
                f"tokens of sequence {names[at]} are in converted pages, which cannot be written on"
            )
        self.tail.truncate(names, rows, np.maximum(lens - cut, 0))
        self.old.truncate(names, rows, np.minimum(lens, cut))

    def free(self, seq: int) -> None:
        """End a sequence and keep its old pages."""
        self.old.free(seq)
        self.tail.free(seq)

    def clear(self) -> None:
        """Take all out of the index, and keep out of it what lives now."""
        self.old.clear()

    def waste(self) -> int:
        """Slots without a token in pages of tails."""
        return self.tail.waste()

    def _ahead(self, rows: np.ndarray, new: np.ndarray) -> Aging:
        """What a step that gives each row so many tokens converts. Nothing changes."""
        cut, rest, size = self.old.lens[rows], self.tail.lens[rows], self.size
        # Every new token sees at least `tail_len` keys of the tail, itself included.
        due = np.maximum((cut + rest + np.minimum(new, 1) - self.tail_len) // size - cut // size, 0)
        sources = self.tail.table[np.repeat(rows, due), ranges(np.zeros_like(due), due)]
        targets, converted = self._targets(rows, due)
        adopted = self.index.holders(np.unique(targets[targets >= 0])) == 0
        leaving, times = np.unique(sources, return_counts=True)
        spare = leaving[self.tail.index.pool.refs[leaving] == times]
        return Aging(due, sources, targets, converted, spare, int(np.count_nonzero(adopted)))

    def _targets(self, rows: np.ndarray, due: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where the first pages of these rows' tails go.

        A page that several of the rows share is converted once; one whose tokens the index has, or another of these pages has, with the
        same ones before them, is not converted at all.

        Returns:
            A page for each in turn, ``~i`` where it is the one that the i-th conversion makes; and the pages that are converted.
        """
        targets: list[int] = []
        converted: list[int] = []
        chosen: dict[int | bytes, int] = {}
        for row, count in zip(rows[due > 0].tolist(), due[due > 0].tolist()):
            chain, known = self.old.chains[row], int(self.tail.known[row]) // self.size
            # Where an id is known, those of all tokens before it are, so that the chain reaches to the tail.
            name = None if chain is None else chain[-1]
            for i, page in enumerate(self.tail.table[row, :count].tolist()):
                name = page_hash(name, self.tail.index.tokens[page]) if name is not None and i < known else None
                target = chosen.get(page)
                if target is None and name is not None:
                    target = chosen.get(name, self.index.find(name))
                if target is None:
                    target = ~len(converted)
                    converted.append(page)
                chosen[page] = target
                if name is not None:
                    chosen[name] = target
                targets.append(target)
        return np.array(targets, np.int32), np.array(converted, np.int32)
