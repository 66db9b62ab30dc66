"""Which rows of a padded batch are tokens: what a forward pass is for the cache, on the host."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tkv.errors import ShapeError, UnsupportedError


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Layout:
    """The new columns of a padded batch. Row ``t`` of sequence ``b`` is ``b * q_len + t`` of the flattened batch.

    Attributes:
        batch, q_len: its size.
        counts: ``[batch]`` int64, new tokens of each sequence, padding left out.
        has_gap: ``[batch]`` bool, a token stands behind padding that stands behind a token.
        extent: ``[batch]`` int64, columns from the sequence's first token to the last column.
        tokens: ``[num_tokens]`` int64, rows that are tokens, sequence by sequence; None if all are.
        pads: ``[num_pads]`` int64, rows of padding that see tokens before them.
        pad_seqs: ``[num_pads]`` int64, their sequences.
        pad_keys: ``[num_pads]`` int64, tokens of the sequence that stand before each.
        pad_positions: ``[num_pads]`` int64, columns between each and the sequence's first token.
    """

    batch: int
    q_len: int
    counts: np.ndarray
    has_gap: np.ndarray
    extent: np.ndarray
    tokens: np.ndarray | None = None
    pads: np.ndarray = field(default_factory=_none)
    pad_seqs: np.ndarray = field(default_factory=_none)
    pad_keys: np.ndarray = field(default_factory=_none)
    pad_positions: np.ndarray = field(default_factory=_none)


class Columns:
    """The columns of a padded batch that a cache has seen, and which of them are padding.

    Args:
        batch: number of sequences.
    """

    def __init__(self, batch: int) -> None:
        self.length = 0
        # Columns behind it are tokens in every sequence.
        self._mask = np.ones((batch, 0), bool)
        # Of each sequence: the column of its first token, -1 before there is one; and how many it has.
        self._first = np.full(batch, -1)
        self._count = np.zeros(batch, np.int64)

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self._count.size

    def add(self, q_len: int, mask: np.ndarray | None) -> Layout:
        """Append columns.

        Args:
            q_len: how many.
            mask: ``[batch, length + q_len]`` bool, which columns are tokens, the past ones too; None if the new ones are.

        Returns:
            The new columns.

        Raises:
            ShapeError: a mask of another shape.
            UnsupportedError: the mask says otherwise about the past than masks before.
        """
        old, length = self.length, self.length + q_len
        if mask is not None:
            if mask.shape != (self.batch, length):
                raise ShapeError(
                    f"attention_mask: expected {[self.batch, length]}, a column for each cached and each new token, got {list(mask.shape)}"
                )
            if not np.array_equal(mask[:, :old], self._past(old)):
                raise UnsupportedError("attention_mask: tokens that are in the cache cannot be masked, or unmasked, later")
        self.length = length
        if mask is None or mask[:, old:].all():
            self._first[self._first < 0] = old
            self._count += q_len
            extent = self.length - self._first
            return Layout(self.batch, q_len, np.full(self.batch, q_len), self._count < extent, extent)
        self._mask = mask
        before = mask.cumsum(1)
        self._first = np.where(mask.any(1), mask.argmax(1), -1)
        self._count = before[:, -1]
        new, seen = mask[:, old:], before[:, old:]
        seqs, columns = np.nonzero(~new & (seen > 0))
        last = self.length - mask[:, ::-1].argmax(1)
        return Layout(
            batch=self.batch,
            q_len=q_len,
            counts=new.sum(1),
            has_gap=(self._first >= 0) & (self._count < last - self._first),
            extent=self.length - self._first,
            tokens=np.flatnonzero(new),
            pads=seqs * q_len + columns,
            pad_seqs=seqs,
            pad_keys=seen[seqs, columns],
            pad_positions=columns + old - self._first[seqs],
        )

    def crop(self, length: int) -> np.ndarray:
        """Forget the columns from `length` on; ``[batch]``, how many tokens of each sequence they were."""
        lost = self._past(self.length)[:, length:].sum(1)
        self.length, self._mask = length, self._mask[:, :length]
        self._count = self._count - lost
        self._first[self._first >= length] = -1
        return lost

    def select(self, rows: list[int]) -> None:
        """Sequences in a new order, some maybe several times or not at all."""
        self._mask, self._first, self._count = self._mask[rows], self._first[rows], self._count[rows]

    def _past(self, length: int) -> np.ndarray:
        rest = length - self._mask.shape[1]
        return np.concatenate([self._mask, np.ones((self.batch, rest), bool)], 1) if rest else self._mask
