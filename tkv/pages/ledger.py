"""What a CacheManager does to its sequences and to its index, on arguments that were checked."""

from __future__ import annotations

import numpy as np

from tkv.errors import OutOfPages, RangeError
from tkv.pages.batch import Batch, check_growth
from tkv.pages.leaving import Leaving
from tkv.pages.prefix import UNKNOWN, PrefixIndex, common_length, page_hash
from tkv.pages.sequences import Sequences, pages_of, ranges


class Ledger(Sequences):
    """Sequences whose pages are owned through an index. All that can fail comes before the first change.

    Attributes:
        pinned: so many tokens at the start of a sequence, whole pages, are dropped by no step.
    """

    def __init__(
        self, index: PrefixIndex, prefix_cache: bool, partial_tokens: int | None, window: int | None = None, sinks: int = 0
    ) -> None:
        super().__init__()
        self.index = index
        self.size = index.page_size
        self.prefix_cache = prefix_cache
        # A whole page is no part of a page.
        self.partial_tokens = self.size if partial_tokens is None else partial_tokens
        self.window = window
        self.pinned = 0 if window is None else -(-sinks // self.size) * self.size
        self.num_copies = self.num_conversions = 0

    def length(self, row: int) -> int:
        """A row's tokens, dropped ones included."""
        return int(self.lens[row] + self.gone[row])

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Tokens of each row, dropped ones included."""
        return self.lens[rows] + self.gone[rows]

    def held(self, row: int) -> int:
        """A row's tokens that are in its pages."""
        return int(self.lens[row])

    def pages(self, row: int) -> np.ndarray:
        """A copy of a row's pages."""
        return self.table[row, : -(-int(self.lens[row]) // self.size)].copy()

    def tail_pages(self, row: int) -> np.ndarray:
        """None: all pages are of one pool."""
        return np.zeros(0, np.int32)

    def ids_of(self, row: int) -> np.ndarray:
        """A row's tokens that are in its pages, UNKNOWN from the first that was not given."""
        known, gone = int(self.known[row]), int(self.gone[row])
        tokens = self.index.tokens[self.pages(row)].reshape(-1)[: self.lens[row]]
        tokens[known if known <= self.pinned else max(self.pinned, known - gone) :] = UNKNOWN
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
            candidates = np.concatenate([np.array(known, np.int64), self._tails(rows, length - self.gone[rows])])
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
        """A sequence with what is known of a prompt, less what has left its window, and how much that is."""
        pages, length, chain = self.match(ids, root)
        gone = int(self.out_of_reach(np.asarray(length)))
        begin = self.pinned // self.size
        end = begin + gone // self.size
        held = np.delete(pages, slice(begin, end))
        self.reserve(1, held.size)
        self.index.hold(held)
        if gone:
            self.index.touch(pages[begin:end][::-1])
            del chain[begin + 1 : end]
        first = self.pinned + gone if gone else 0
        return self.add(held, length - gone, length, chain if self.prefix_cache else None, gone, first), length

    def fork(self, seq: int) -> int:
        """A second sequence on the pages of one."""
        row = self.row(seq)
        pages, chain = self.pages(row), self.chains[row]
        self.reserve(1, pages.size)
        self.index.hold(pages)
        lens, known, gone, first = (int(array[row]) for array in (self.lens, self.known, self.gone, self.first))
        return self.add(pages, lens, known, None if chain is None else chain.copy(), gone, first)

    def step(self, names: np.ndarray, ids: np.ndarray | None, new: np.ndarray) -> Batch:
        """Extend each sequence by so many tokens, or none of them."""
        rows, index = self.rows_of(names), self.index
        before = self.lens[rows]
        check_growth(names, self.lengths(rows), self.known[rows], ids, new)
        due, left, grown = self.ahead(rows, new)
        copied, taken, missing = self.part(rows, before, new, grown, left)
        if missing > 0:
            available = index.num_available + left.ends.size
            become = f" and {left.ends.size:,} become free" if left.ends.size else ""
            raise OutOfPages(
                f"needs {available + missing:,} pages for {new.sum():,} tokens of {rows.size:,} sequences, "
                f"{index.pool.num_free:,} of {index.pool.num_pages:,} are free and {index.num_idle:,} cached{become}",
                needed=available + missing,
                available=available,
                held=self.num_kept(rows, due, copied),
                total=index.pool.num_pages,
            )
        self.reserve(0, int(pages_of(before - due * self.size + new, self.size).max(initial=0)))
        pages = left.take(copied.size + grown)
        if left.pages.size:
            self.drop(rows, due)
            left.release()
        return self.extend(names, rows, ids, new, copied, taken, pages)

    def missing(self, names: np.ndarray, new: np.ndarray) -> tuple[int, int]:
        """Pages that such a step needs beside those that it frees itself: of the pool, and of that of tails."""
        rows = self.rows_of(names)
        check_growth(names, self.lengths(rows), self.known[rows], None, new)
        _, left, grown = self.ahead(rows, new)
        return max(self.index.num_available + self.part(rows, self.lens[rows], new, grown, left)[2], 0), 0

    def ahead(self, rows: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, Leaving, int]:
        """How many pages each row of a step drops before it gets so many tokens, those pages, and how many pages more all fill."""
        held, gone = self.lens[rows], self.gone[rows]
        due = np.maximum(self.out_of_reach(held + gone) - gone, 0) // self.size
        left = Leaving(self.index, self.table[np.repeat(rows, due), ranges(np.full_like(due, self.pinned // self.size), due)])
        return due, left, int((pages_of(held + new, self.size) - pages_of(held, self.size)).sum())

    def num_kept(self, rows: np.ndarray, due: np.ndarray, copied: np.ndarray) -> int:
        """How many pages the rows of a step go on with: not those that they drop, and not those that they get a copy of."""
        begin, lens, places = self.pinned // self.size, self.lens[rows], np.arange(self.table.shape[1])
        kept = (places < pages_of(lens, self.size)[:, None]) & ((places < begin) | (places >= begin + due[:, None]))
        kept[copied, lens[copied] // self.size] = False
        return np.unique(self.table[rows][kept]).size

    def out_of_reach(self, lens: np.ndarray) -> np.ndarray:
        """How many tokens behind the pinned ones, whole pages, no token that comes after so many can see."""
        return lens * 0 if self.window is None else np.maximum(lens - self.window + 1 - self.pinned, 0) // self.size * self.size

    def drop(self, rows: np.ndarray, due: np.ndarray) -> None:
        """Drop so many whole pages behind the pinned ones of each row, which are released by others."""
        begin = self.pinned // self.size
        for row, count in zip(rows[due > 0].tolist(), due[due > 0].tolist()):
            chain, first = self.chains[row], self.pinned + int(self.gone[row]) + count * self.size
            self.first[row] = first
            if chain is None:
                continue
            if self.known[row] < first:
                # Tokens without ids are gone, and with them the names of all pages behind.
                self.chains[row] = None
                self.reopen(row)
            else:
                # That of the last page that was dropped stays: the next one is named by it.
                del chain[begin + 1 : begin + count + (self.gone[row] > 0)]
        self.drop_pages(rows, begin, due, self.size)
        self.gone[rows] += due * self.size

    def extend(
        self, names: np.ndarray, rows: np.ndarray, ids: np.ndarray | None, new: np.ndarray, copied: np.ndarray, taken: np.ndarray,
        pages: np.ndarray,
    ) -> Batch:  # fmt: skip
        """Extend each row by so many tokens, on pages that were taken for it. Nothing in here fails."""
        size, before, gone = self.size, self.lens[rows], self.gone[rows]
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
        places = ranges(before, new)
        # A copy: later calls change the table, and what was handed out stays.
        page_table = self.table[rows, :width]
        written = page_table[np.repeat(np.arange(rows.size), new), places // size].astype(np.int64)
        self.index.tokens[written, places % size] = UNKNOWN if ids is None else ids
        batch = Batch(
            seqs=names,
            page_table=page_table,
            seq_lens=after.astype(np.int32),
            prefix_lens=before.astype(np.int32),
            cu_seqlens=cu_seqlens,
            slot_mapping=written * size + places % size,
            positions=places + np.repeat(gone, new),
            # After an eviction keys have no positions.
            kv_start=np.zeros(rows.size, np.int32) if self.window is None else gone.astype(np.int32),
            copies=np.stack([sources, targets], 1),
            copy_lens=(before[copied] % size).astype(np.int32),
            filled=page_table[np.repeat(np.arange(rows.size), done - whole), ranges(whole, done - whole)],
            max_q_len=int(new.max(initial=0)),
            max_seq_len=int(after.max(initial=0)),
            pinned=self.pinned,
        )
        self.lens[rows] = after
        if ids is not None:
            self.known[rows[new > 0]] = (after + gone)[new > 0]
            for row in rows[done > whole].tolist():
                self.publish(row)
        return batch

    def identify(self, seq: int, ids: np.ndarray) -> None:
        """Fill in the ids of a sequence's first unknown tokens."""
        row = self.row(seq)
        pages, offsets, held = self.unknown_slots(seq, ids)
        self.index.tokens[pages, offsets] = held
        self.known[row] += ids.size
        self.publish(row)

    def unknown_slots(self, seq: int, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pages, offsets and ids of a sequence's first unknown tokens, those that are in its pages, if they may have these ids."""
        row = self.row(seq)
        known, length, gone = int(self.known[row]), self.length(row), int(self.gone[row])
        if ids.size > length - known:
            raise RangeError(f"tokens: sequence {seq} has {length - known} tokens without ids, got {ids.size}")
        positions = np.arange(known, known + ids.size)
        held = (positions < self.pinned) | (positions >= self.first[row])
        places = np.where(positions < self.pinned, positions, positions - gone)[held]
        pages, offsets, ids = self.table[row, places // self.size], places % self.size, ids[held]
        there = self.index.tokens[pages, offsets]
        if np.any((there != UNKNOWN) & (there != ids)):
            raise RangeError(f"tokens: a sequence that shares pages with {seq} has given other ids for the same tokens")
        return pages, offsets, ids

    def truncate(self, names: np.ndarray, rows: np.ndarray, lens: np.ndarray) -> None:
        """Drop the last tokens of each row, and what nobody else has of them, as one by one; or nothing of any."""
        cut = lens < self.lengths(rows)
        names, rows, lens = names[cut], rows[cut], lens[cut]
        self.check_cuts(names, rows, lens)
        # Of the pinned tokens none is dropped, whatever was dropped behind them.
        gone = np.where(lens > self.pinned, self.gone[rows], 0)
        held = lens - gone
        whole, ended = held // self.size, pages_of(held, self.size) < pages_of(self.lens[rows], self.size)
        if ended.any() or self.index.claims[self.table[rows, whole]].any():
            self.cut_pages(rows, held)
        self.lens[rows], self.gone[rows], self.first[rows] = held, gone, np.where(gone, self.first[rows], 0)
        self.known[rows] = np.minimum(lens, self.known[rows])
        for row, count in zip(rows.tolist(), (whole + 1 + (gone > 0)).tolist()):
            chain = self.chains[row]
            if chain is not None and len(chain) > count:
                del chain[count:]
                self.reopen(row)

    def cut_pages(self, rows: np.ndarray, held: np.ndarray) -> None:
        """Let go of what the pages of each row hold behind so many tokens, which are fewer than it has."""
        index, size = self.index, self.size
        # From the one that the cut is in, the last of a row first, as they are to be evicted.
        whole, last = held // size, pages_of(self.lens[rows], size)
        users, places = np.repeat(rows, last - whole), np.repeat(whole + last - 1, last - whole) - ranges(whole, last - whole)
        pages, ends = self.table[users, places], places * size >= np.repeat(held, last - whole)
        left = dict(zip(pages.tolist(), index.holders(pages).tolist()))
        for at in np.flatnonzero(index.claims[pages]).tolist():
            page = int(pages[at])
            if left[page] == 1 and not index.has_children(page):
                index.forget(page)
            left[page] -= bool(ends[at])
        self.table[users[ends], places[ends]] = -1
        index.release(pages[ends])

    def check_cuts(self, names: np.ndarray, rows: np.ndarray, lens: np.ndarray) -> None:
        """Whether sequences can be cut to these lengths.

        Raises:
            RangeError: keys of a sequence's last tokens would not be there.
        """
        first, window = self.first[rows], self.window
        wrong = lens < first if window is None else (first > 0) & (self.pinned < lens) & (lens < first + window - 1)
        if not wrong.any():
            return
        at = int(np.argmax(wrong))
        if window is None:
            raise RangeError(
                f"length: expected {first[at]} or more, got {lens[at]}: sequence {names[at]} was evicted from when it had {first[at]} "
                f"tokens, and a cut cannot tell which of those are left"
            )
        raise RangeError(
            f"length: expected {first[at] + window - 1} or more, or at most the {self.pinned} pinned tokens, got {lens[at]}: of sequence "
            f"{names[at]} tokens before position {first[at]} left the window of {window} and were dropped; a next one needs them"
        )

    def free(self, seq: int) -> None:
        """End a sequence and keep what it leaves, its last page too."""
        row = self.row(seq)
        pages, chain = self.pages(row), self.chains[row]
        whole, part = divmod(int(self.known[row]), self.size)
        # A last page that others have as well is found through them.
        if chain is not None and part >= self.partial_tokens and self.is_found(chain):
            page = pages[whole - int(self.gone[row]) // self.size]
            if self.index.holders(page) == 1:
                self.index.keep_part(chain[-1], int(page), part)
        self.remove(seq, pages.size)
        self.index.release(pages[::-1])

    def clear(self) -> None:
        """Take all out of the index, and keep out of it what lives now."""
        self.index.clear()
        for row in self.rows.tolist():
            self.chains[row] = None
            self.reopen(row)

    def is_found(self, chain: list[bytes]) -> bool:
        """Whether a prompt could find what follows on a chain."""
        return len(chain) == 1 or self.index.find(chain[-1]) is not None

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

    def part(
        self, rows: np.ndarray, before: np.ndarray, new: np.ndarray, grown: int, left: Leaving | None = None
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Who writes into a page that others need: who gets a copy, who takes the page over, and how many pages are missing.

        A page of several sequences has to be copied by all of them but the last. One that only the index has a claim on is copied while
        there is room, and taken from the index when there is none: a sequence never needs more pages than its tokens fill.
        """
        writers = np.flatnonzero((new > 0) & (before % self.size > 0))
        pages = self._tails(rows[writers], before[writers])
        owners, claimed = self.index.holders(pages), self.index.claims[pages] > before[writers] % self.size
        if left is not None:
            owners = owners - left.times(pages)
        must, may, others = [], [], dict(zip(pages.tolist(), owners.tolist()))
        for i in np.flatnonzero((owners > 1) | claimed).tolist():
            page = int(pages[i])
            if others[page] > 1:
                others[page] -= 1
                must.append(writers[i])
            elif claimed[i]:
                may.append(writers[i])
        room = self.index.num_available + (0 if left is None else left.ends.size) - grown - len(must)
        copied = must + may[: max(room, 0)]
        return np.array(copied, np.int64), np.array(may[max(room, 0) :], np.int64), -room

    def publish(self, row: int) -> None:
        """Index a row's pages that have become whole; where the index has their like, the row uses that one from now on."""
        chain = self.chains[row]
        if chain is None:
            return
        # Of all pages that were dropped the chain has one name.
        gone = int(self.gone[row])
        begin, end = len(chain) - 1 - (gone > 0), (int(self.known[row]) - gone) // self.size
        if begin == end:
            return
        if not self.is_found(chain):
            self.chains[row] = None
            self.reopen(row)
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
