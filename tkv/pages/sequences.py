"""The living sequences of a manager: a row each in arrays, so that a batch is one index."""

from __future__ import annotations

import numpy as np

from tkv.errors import DTypeError, RangeError


class Sequences:
    """Rows of living sequences.

    Attributes:
        table: ``[rows, width]`` int32, the pages of each sequence, -1 behind them.
        lens: ``[rows]`` int64, tokens whose keys and values are in the pages, or are written by a step that was handed out.
        gone: ``[rows]`` int64, tokens that were dropped, so that a token's place in the pages is its position less these.
        first: ``[rows]`` int64, the position from which on that is so and all tokens are in the pages.
        known: ``[rows]`` int64, how many leading tokens have known ids, dropped ones included.
        chains: a row's root hash and the hashes of its whole pages so far, without those of pages that were dropped; None for a row that
            is not to be found by others.
    """

    def __init__(self) -> None:
        self.table = np.full((8, 8), -1, np.int32)
        self.lens = np.zeros(8, np.int64)
        self.gone = np.zeros(8, np.int64)
        self.first = np.zeros(8, np.int64)
        self.known = np.zeros(8, np.int64)
        self.chains: list[list[bytes] | None] = [None] * 8
        self._rows: dict[int, int] = {}
        self._spare = list(range(7, -1, -1))
        self._next = 0
        # By the hash of all whole pages before it, who has a page that the index does not know yet.
        self._open: dict[bytes, dict[int, None]] = {}
        self._open_at: list[bytes | None] = [None] * 8

    @property
    def names(self) -> list[int]:
        """The living sequences, oldest first."""
        return list(self._rows)

    @property
    def rows(self) -> np.ndarray:
        """Their rows."""
        return np.fromiter(self._rows.values(), np.int64, len(self._rows))

    def row(self, seq: int) -> int:
        """A sequence's row.

        Raises:
            DTypeError, RangeError: it is no living sequence.
        """
        if isinstance(seq, bool) or not isinstance(seq, int | np.integer):
            raise DTypeError(f"seq: expected a sequence's number, got {seq!r}")
        try:
            return self._rows[seq]  # type: ignore[index]
        except KeyError:
            state = "has been freed" if 0 <= seq < self._next else "was never added"
            raise RangeError(f"seq: expected a living sequence, got {seq}, which {state}") from None

    def rows_of(self, names: np.ndarray) -> np.ndarray:
        """The rows of different sequences.

        Raises:
            RangeError: one is no living sequence, or comes twice.
        """
        seqs = names.tolist()
        rows = [self._rows.get(seq, -1) for seq in seqs]
        if -1 in rows:
            self.row(seqs[rows.index(-1)])
        if len(set(rows)) < len(rows):
            raise RangeError(f"seqs: expected each sequence once, got {seqs}")
        return np.array(rows, np.int64)

    def reserve(self, rows: int, width: int) -> None:
        """Room for so many more sequences, and tables of that width."""
        old_rows, old_width = self.table.shape
        more = max(old_rows, 8) if len(self._spare) < rows else 0
        wider = max(old_width, width - old_width) if old_width < width else 0
        if not (more or wider):
            return
        # All is made before anything is kept, so that running out of memory changes nothing.
        table = np.full((old_rows + more, old_width + wider), -1, np.int32)
        table[:old_rows, :old_width] = self.table
        arrays = [np.concatenate([array, np.zeros(more, np.int64)]) for array in (self.lens, self.gone, self.first, self.known)]
        self.table, (self.lens, self.gone, self.first, self.known) = table, arrays
        self.chains += [None] * more
        self._open_at += [None] * more
        self._spare += range(old_rows + more - 1, old_rows - 1, -1)

    def add(self, pages: np.ndarray, held: int, known: int, chain: list[bytes] | None, gone: int = 0, first: int = 0) -> int:
        """A new sequence: its number, which never comes again. There must be room."""
        row, seq = self._spare.pop(), self._next
        self._next += 1
        self._rows[seq] = row
        self.table[row, : pages.size] = pages
        self.lens[row], self.gone[row], self.first[row], self.known[row], self.chains[row] = held, gone, first, known, chain
        self.reopen(row)
        return seq

    def drop_pages(self, rows: np.ndarray, begin: int, counts: np.ndarray, page_size: int) -> None:
        """Forget so many whole pages of each row from place `begin` on, and their tokens."""
        rows, counts = rows[counts > 0], counts[counts > 0]
        if not rows.size:
            return
        places = np.arange(-(-int(self.lens[rows].max()) // page_size))
        sources = places + np.where(places < begin, 0, counts[:, None])
        moved = np.take_along_axis(self.table[rows], np.minimum(sources, places.size - 1), 1)
        self.table[rows, : places.size] = np.where(sources < places.size, moved, -1)
        self.lens[rows] -= counts * page_size

    def remove(self, seq: int, num_pages: int) -> None:
        """Forget a sequence."""
        row = self._rows.pop(seq)
        self.chains[row] = None
        self.reopen(row)
        self.table[row, :num_pages] = -1
        self.lens[row] = self.gone[row] = self.first[row] = self.known[row] = 0
        self._spare.append(row)

    def reopen(self, row: int) -> None:
        """After a change of the row's chain: offer the page behind it."""
        chain, before = self.chains[row], self._open_at[row]
        now = chain[-1] if chain else None
        if now == before:
            return
        if before is not None:
            at = self._open[before]
            del at[row]
            if not at:
                del self._open[before]
        if now is not None:
            self._open.setdefault(now, {})[row] = None
        self._open_at[row] = now

    def opened(self, parent: bytes) -> np.ndarray:
        """Rows whose first page that is not in the index follows on the page of that hash."""
        rows = self._open.get(parent, {})
        return np.fromiter(rows, np.int64, len(rows))


def pages_of(lens: np.ndarray, page_size: int) -> np.ndarray:
    """How many pages tokens fill, the last one in part."""
    return -(-lens // page_size)


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """start, start + 1, ... for each start, as many as its count, one after the other."""
    ends = np.cumsum(counts)
    return np.repeat(starts - ends + counts, counts) + np.arange(ends[-1] if ends.size else 0)
