"""The living sequences of a manager: a row each in arrays, so that a batch is one index."""

from __future__ import annotations

import numpy as np

from tkv.errors import DTypeError, RangeError


class Sequences:
    """Rows of living sequences.

    Attributes:
        table: ``[rows, width]`` int32, the pages of each sequence, -1 behind them.
        lens: ``[rows]`` int64, tokens whose keys and values are in the pages, or are written by a step that was handed out.
        known: ``[rows]`` int64, how many leading tokens have known ids.
        chains: a row's root hash and the hashes of its whole pages so far; None for a row that is not to be found by others.
    """

    def __init__(self) -> None:
        self.table = np.full((8, 8), -1, np.int32)
        self.lens = np.zeros(8, np.int64)
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
        rows = np.array([self.row(seq) for seq in names.tolist()], np.int64)
        if len(set(rows.tolist())) < rows.size:
            raise RangeError(f"seqs: expected each sequence once, got {names.tolist()}")
        return rows

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
        lens, known = (np.concatenate([array, np.zeros(more, np.int64)]) for array in (self.lens, self.known))
        self.table, self.lens, self.known = table, lens, known
        self.chains += [None] * more
        self._open_at += [None] * more
        self._spare += range(old_rows + more - 1, old_rows - 1, -1)

    def add(self, pages: np.ndarray, length: int, known: int, chain: list[bytes] | None) -> int:
        """A new sequence: its number, which never comes again. There must be room."""
        row, seq = self._spare.pop(), self._next
        self._next += 1
        self._rows[seq] = row
        self.table[row, : pages.size] = pages
        self.lens[row], self.known[row], self.chains[row] = length, known, chain
        self.reopen(row)
        return seq

    def drop_first(self, rows: np.ndarray, counts: np.ndarray, page_size: int) -> None:
        """Forget so many whole pages at the start of each row, and their tokens."""
        for row, count in zip(rows[counts > 0].tolist(), counts[counts > 0].tolist()):
            self.table[row, :-count] = self.table[row, count:].copy()
            self.table[row, -count:] = -1
        self.lens[rows] -= counts * page_size

    def remove(self, seq: int, num_pages: int) -> None:
        """Forget a sequence."""
        row = self._rows.pop(seq)
        self.chains[row] = None
        self.reopen(row)
        self.table[row, :num_pages] = -1
        self.lens[row] = self.known[row] = 0
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
