"""What a CacheManager does to its sequences and to its index, on arguments that were checked."""

from __future__ import annotations

import numpy as np

from tkv.errors import OutOfPages, RangeError
from tkv.ops.checks import MAX_POSITION
from tkv.pages.batch import Batch
from tkv.pages.prefix import UNKNOWN, PrefixIndex, common_length, page_hash
from tkv.pages.sequences import Sequences


class Ledger(Sequences):
    """Sequences whose pages are owned through an index. All that can fail comes before the first change."""

    def __init__(self, index: PrefixIndex, prefix_cache: bool, partial_tokens: int | None) -> None:
        super().__init__()
        self.index = index
        self.size = index.page_size
        self.prefix_cache = prefix_cache
        # A whole page is no part of a page.
        self.partial_tokens = self.size if partial_tokens is None else partial_tokens
        self.num_copies = self.num_conversions = 0

    def length(self, row: int) -> int:
        """A row's tokens."""
        return int(self.lens[row])

    def pages(self, row: int) -> np.ndarray:
        """A copy of a row's pages."""
        return self.table[row, : -(-int(self.lens[row]) // self.size)].copy()

    def tail_pages(self, row: int) -> np.ndarray:
        """None: all pages are of one pool."""
        return np.zeros(0, np.int32)

    def ids_of(self, row: int) -> np.ndarray:
        """A row's tokens, UNKNOWN from the first that was not given."""
        tokens = self.index.tokens[self.pages(row)].reshape(-1)[: self.lens[row]]
        tokens[self.known[row] :] = UNKNOWN
        return tokens

    def match(self, ids: np.ndarray, root: bytes) -> tuple[np.ndarray, int, list[bytes]]:
        """The pages that hold the longest known part of a prompt, how many tokens that is, and the hashes of the whole ones."""
        index, size, limit = self.index, self.size, ids.size - 1
        pages: list[int] = []
        chain = [root]
        for start in range(0, limit - size + 1, size) if self.prefix_cache else ():
            name = page_hash(chain[-1], ids[start : start + size])
            page = index.find(name)
            if page is None:
                break
            pages.append(page)
            chain.append(name)
        length = len(pages) * size
        rest = ids[length : min(length + size, limit)]
        if self.prefix_cache and rest.size >= self.partial_tokens:
            rows, known = self.opened(chain[-1]), index.nearest(chain[-1], rest)
            rows = rows[self.known[rows] > length]
            candidates = np.concatenate([np.array(known, np.int64), self._tails(rows, np.full(rows.size, length))])
            held = np.concatenate([index.claims[known], self.known[rows] - length])
            if candidates.size:
                common = np.minimum(common_length(index.tokens[candidates], rest), held)
                # Of equally long ones a page that ends there can be written on, by its only sequence, without a copy.
                best = int(np.argmax(2 * common + (common == held)))
                if common[best] >= self.partial_tokens:
                    pages.append(int(candidates[best]))
                    length += int(common[best])
        return np.array(pages, np.int32), length, chain

    def start(self, ids: np.ndarray, root: bytes) -> tuple[int, int]:
        """A sequence with what is known of a prompt, and how much that is."""
        pages, length, chain = self.match(ids, root)
        self.reserve(1, pages.size)
        self.index.hold(pages)
        return self.add(pages, length, length, chain if self.prefix_cache else None), length

    def fork(self, seq: int) -> int:
        """A second sequence on the pages of one."""
        row = self.row(seq)
        pages, chain = self.pages(row), self.chains[row]
        self.reserve(1, pages.size)
        self.index.hold(pages)
        return self.add(pages, int(self.lens[row]), int(self.known[row]), None if chain is None else chain.copy())

    def step(self, names: np.ndarray, ids: np.ndarray | None, new: np.ndarray) -> Batch:
        """Extend each sequence by so many tokens, or none of them."""
        rows = self.rows_of(names)
        before = self.lens[rows]
        check_growth(names, before, self.known[rows], ids, new)
        grown = pages_of(before + new, self.size) - pages_of(before, self.size)
        copied, taken, missing = self.part(rows, before, new, int(grown.sum()))
        if missing > 0:
            raise OutOfPages(
                f"needs {self.index.num_available + missing:,} pages for {new.sum():,} tokens of {rows.size:,} sequences, "
                f"{self.index.pool.num_free:,} of {self.index.pool.num_pages:,} are free and {self.index.num_idle:,} cached"
            )
        self.reserve(0, int(pages_of(before + new, self.size).max(initial=0)))
        return self.extend(names, rows, ids, new, copied, taken, self.index.take(copied.size + int(grown.sum())))

    def extend(
        self, names: np.ndarray, rows: np.ndarray, ids: np.ndarray | None, new: np.ndarray, copied: np.ndarray, taken: np.ndarray,
        pages: np.ndarray,
    ) -> Batch:  # fmt: skip
        """Extend each row by so many tokens, on pages that were taken for it. Nothing in here fails."""
        size, before = self.size, self.lens[rows]
        after = before + new
        first, last = pages_of(before, size), pages_of(after, size)
        width, grown = int(last.max(initial=0)), last - first
        sources, targets = self._tails(rows[copied], before[copied]), pages[: copied.size]
        self.index.tokens[targets] = self.index.tokens[sources]
        self.table[rows[copied], before[copied] // size] = targets
        self.index.release(sources)
        self.num_copies += copied.size
        for page in self._tails(rows[taken], before[taken]).tolist():
            if self.index.claims[page]:
                self.index.forget(page)
        self.table[np.repeat(rows, grown), ranges(first, grown)] = pages[copied.size :]

        whole, done = before // size, after // size
        cu_seqlens = np.zeros(rows.size + 1, np.int32)
        np.cumsum(new, out=cu_seqlens[1:])
        positions = ranges(before, new)
        # A copy: later calls change the table, and what was handed out stays.
        page_table = self.table[rows, :width]
        written = page_table[np.repeat(np.arange(rows.size), new), positions // size].astype(np.int64)
        self.index.tokens[written, positions % size] = UNKNOWN if ids is None else ids
        batch = Batch(
            seqs=names,
            page_table=page_table,
            seq_lens=after.astype(np.int32),
            prefix_lens=before.astype(np.int32),
            cu_seqlens=cu_seqlens,
            slot_mapping=written * size + positions % size,
            positions=positions,
            copies=np.stack([sources, targets], 1),
            copy_lens=(before[copied] % size).astype(np.int32),
            filled=page_table[np.repeat(np.arange(rows.size), done - whole), ranges(whole, done - whole)],
            max_q_len=int(new.max(initial=0)),
            max_seq_len=int(after.max(initial=0)),
        )
        self.lens[rows] = after
        if ids is not None:
            self.known[rows[new > 0]] = after[new > 0]
            for row in rows[done > whole].tolist():
                self.publish(row)
        return batch

    def identify(self, seq: int, ids: np.ndarray) -> None:
        """Fill in the ids of a sequence's first unknown tokens."""
        row = self.row(seq)
        slots = self.unknown_slots(seq, ids)
        self.index.tokens[slots] = ids
        self.known[row] += ids.size
        self.publish(row)

    def unknown_slots(self, seq: int, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pages and offsets of a sequence's first unknown tokens, which may have these ids."""
        row = self.row(seq)
        known, length = int(self.known[row]), int(self.lens[row])
        if ids.size > length - known:
            raise RangeError(f"tokens: sequence {seq} has {length - known} tokens without ids, got {ids.size}")
        places = np.arange(known, known + ids.size)
        slots = self.table[row, places // self.size], places % self.size
        there = self.index.tokens[slots]
        if np.any((there != UNKNOWN) & (there != ids)):
            raise RangeError(f"tokens: a sequence that shares pages with {seq} has given other ids for the same tokens")
        return slots

    def truncate(self, seq: int, length: int) -> None:
        """Drop the last tokens, and what nobody else has of them."""
        row, index = self.row(seq), self.index
        if length == self.lens[row]:
            return
        whole, part = divmod(length, self.size)
        pages = self.pages(row)[whole:]
        for page in pages[(index.claims[pages] > 0) & (index.holders(pages) == 1)][::-1].tolist():
            if not index.has_children(page):
                index.forget(page)
        gone = pages[min(part, 1) :]
        self.table[row, whole + min(part, 1) : whole + pages.size] = -1
        self.lens[row] = length
        self.known[row] = min(length, self.known[row])
        chain = self.chains[row]
        if chain is not None:
            del chain[whole + 1 :]
            self.reopen(row)
        index.release(gone[::-1])

    def free(self, seq: int) -> None:
        """End a sequence and keep what it leaves, its last page too."""
        row = self.row(seq)
        pages, chain = self.pages(row), self.chains[row]
        whole, part = divmod(int(self.known[row]), self.size)
        # A last page that others have as well is found through them.
        if chain is not None and part >= self.partial_tokens and self.index.holders(pages[whole]) == 1:
            self.index.keep_part(chain[-1], int(pages[whole]), part)
        self.remove(seq, pages.size)
        self.index.release(pages[::-1])

    def clear(self) -> None:
        """Take all out of the index, and keep out of it what lives now."""
        self.index.clear()
        for row in self.rows.tolist():
            self.chains[row] = None
            self.reopen(row)

    def waste(self) -> int:
        """Slots without a token in pages of sequences; a page of several is as full as the one that has most of it sees it."""
        rows = self.rows
        lens = self.lens[rows]
        unused = np.zeros(self.index.pool.num_pages, np.int64)
        part = lens % self.size
        last = self._tails(rows[part > 0], lens[part > 0])
        unused[last] = self.size
        np.minimum.at(unused, last, self.size - part[part > 0])
        whole = np.arange(self.table.shape[1]) < (lens // self.size)[:, None]
        unused[self.table[rows][whole]] = 0
        return int(unused.sum())

    def _tails(self, rows: np.ndarray, lens: np.ndarray) -> np.ndarray:
        """The pages of these rows that the tokens at these lengths go to."""
        return self.table[rows, lens // self.size]

    def part(self, rows: np.ndarray, before: np.ndarray, new: np.ndarray, grown: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Who writes into a page that others need: who gets a copy, who takes the page over, and how many pages are missing.

        A page of several sequences has to be copied by all of them but the last. One that only the index has a claim on is copied while
        there is room, and taken from the index when there is none: a sequence never needs more pages than its tokens fill.
        """
        writers = np.flatnonzero((new > 0) & (before % self.size > 0))
        pages = self._tails(rows[writers], before[writers])
        owners, claimed = self.index.holders(pages), self.index.claims[pages] > before[writers] % self.size
        must, may, left = [], [], dict(zip(pages.tolist(), owners.tolist()))
        for i in np.flatnonzero((owners > 1) | claimed).tolist():
            page = int(pages[i])
            if left[page] > 1:
                left[page] -= 1
                must.append(writers[i])
            elif claimed[i]:
                may.append(writers[i])
        room = self.index.num_available - grown - len(must)
        copied = must + may[: max(room, 0)]
        return np.array(copied, np.int64), np.array(may[max(room, 0) :], np.int64), -room

    def publish(self, row: int) -> None:
        """Index a row's pages that have become whole; where the index has their like, the row uses that one from now on."""
        chain = self.chains[row]
        if chain is None:
            return
        begin, end = len(chain) - 1, int(self.known[row]) // self.size
        if begin == end:
            return
        pages = self.table[row, begin:end].copy()
        found = self.index.publish(chain, pages)
        self.reopen(row)
        other = np.flatnonzero(found != pages)
        if not other.size:
            return
        self.index.hold(found[other])
        self.table[row, begin + other] = found[other]
        for page in pages[other].tolist():
            if self.index.claims[page]:
                self.index.forget(page)
        self.index.release(pages[other][::-1])


def check_growth(names: np.ndarray, before: np.ndarray, known: np.ndarray, ids: np.ndarray | None, new: np.ndarray) -> None:
    """Whether sequences of these lengths and known tokens can have so many more.

    Raises:
        RangeError: one would be too long, or ids are given behind tokens without ids.
    """
    after = before + new
    if after.size and after.max() > MAX_POSITION:
        raise RangeError(f"tokens: expected sequences of at most {MAX_POSITION} tokens, got {after.max()}")
    if ids is not None and np.any((known < before) & (new > 0)):
        seq = names[np.argmax((known < before) & (new > 0))]
        raise RangeError(f"tokens: sequence {seq} has tokens without ids; call identify first, or give counts alone")


def pages_of(lens: np.ndarray, page_size: int) -> np.ndarray:
    """How many pages tokens fill, the last one in part."""
    return -(-lens // page_size)


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """start, start + 1, ... for each start, as many as its count, one after the other."""
    ends = np.cumsum(counts)
    return np.repeat(starts - ends + counts, counts) + np.arange(ends[-1] if ends.size else 0)
