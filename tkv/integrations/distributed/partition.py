"""Partition: which keys of its sequences each rank of a group holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from tkv.errors import RangeError, ShapeError
from tkv.ops.checks import check_int


@dataclass(frozen=True)
class Partition:
    """Which positions of its sequences each rank of a group holds.

    Rank r holds the positions of sequence s from ``starts[s][r]`` to before ``starts[s][r + 1]``, and the last rank all from its start on.
    So the owner of a new token follows from its position, and nothing moves when a sequence grows: it fills the run of one rank, then the
    next one's. A rank stores its run from the first row of a page of its own. To balance ranks anew, an engine sends pages from one to
    another, and makes another Partition.

    Args:
        starts: for each sequence as many ints as there are ranks, from 0 on and never falling; equal ones leave a rank nothing.

    Raises:
        DTypeError, RangeError, ShapeError: there is no rank, or `starts` does not hold such numbers.

    Example:
        >>> part = Partition.even([70, 5], world_size=2, page_size=16)                    # 5 pages and 1 page
        >>> part.starts
        ((0, 32), (0, 0))
        >>> part.seq_lens(0, [71, 6]).tolist(), part.seq_lens(1, [71, 6]).tolist()        # a token later
        ([32, 0], [39, 6])
    """

    starts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", tuple(tuple(check_int("starts", start, 0) for start in row) for row in self.starts))
        for row in self.starts:
            if not row or len(row) != len(self.starts[0]):
                raise ShapeError(f"starts: expected one start a rank for every sequence, got {[len(row) for row in self.starts]}")
            if row[0] or any(after < before for before, after in pairwise(row)):
                raise RangeError(f"starts: expected to rise from 0, got {row}")

    @classmethod
    def even(cls, lens: Sequence[int], world_size: int, page_size: int) -> Partition:
        """Sequences of these lengths in runs of whole pages, as equal as they can be; what is appended goes to the last rank.

        Args:
            lens: the length of each sequence.
            world_size, page_size: ints from 1 on.

        Returns:
            The partition.
        """
        world_size, page_size = check_int("world_size", world_size, 1), check_int("page_size", page_size, 1)
        pages = [-(-check_int("lens", n, 0) // page_size) for n in lens]
        return cls(tuple(tuple(page_size * (n * rank // world_size) for rank in range(world_size)) for n in pages))

    @classmethod
    def by_capacity(cls, num_seqs: int, world_size: int, capacity: int) -> Partition:
        """Sequences that fill rank after rank: each rank but the last holds up to `capacity` tokens of a sequence.

        Args:
            num_seqs: of the batch.
            world_size, capacity: ints from 1 on.

        Returns:
            The partition.
        """
        world_size, capacity = check_int("world_size", world_size, 1), check_int("capacity", capacity, 1)
        return cls((tuple(rank * capacity for rank in range(world_size)),) * check_int("num_seqs", num_seqs, 0))

    def seq_lens(self, rank: int, lens: Sequence[int]) -> torch.Tensor:
        """``[num_seqs]`` int32 on the CPU: keys that a rank holds of sequences of these lengths, the new tokens included."""
        runs = [self._run(seq, rank) for seq in range(self._num_seqs(lens))]
        return torch.tensor([max(0, min(n, end) - first) for n, (first, end) in zip(lens, runs)], dtype=torch.int32)

    def kv_start(self, rank: int) -> torch.Tensor:
        """``[num_seqs]`` int32 on the CPU: the position of the first key that a rank holds of each sequence."""
        return torch.tensor([self._run(seq, rank)[0] for seq in range(len(self.starts))], dtype=torch.int32)

    def slot_mapping(
        self, rank: int, lens: Sequence[int], new_lens: Sequence[int], page_table: torch.Tensor, page_size: int
    ) -> torch.Tensor:
        """Where a rank writes new tokens with `tkv.write_kv`; -1 for those that other ranks hold.

        Args:
            rank: in the group.
            lens: the length of each sequence, its new tokens included.
            new_lens: how many of them are new.
            page_table: ``[num_seqs, max_pages]`` integers on the CPU, the rank's pages of each sequence.
            page_size: of the rank's cache.

        Returns:
            ``[sum(new_lens)]`` int64 on the CPU, one sequence after the other.

        Raises:
            RangeError: the table has no page for a token that the rank has to write.
        """
        slots = [torch.empty(0, dtype=torch.int64)]
        for seq in range(self._num_seqs(lens)):
            first, end = self._run(seq, rank)
            positions = torch.arange(lens[seq] - new_lens[seq], lens[seq])
            mine = (positions >= first) & (positions < end)
            keys, pages = positions[mine] - first, page_table[seq].long()
            needed = int(keys[-1]) // page_size + 1 if len(keys) else 0
            if needed > len(pages) or bool((pages[keys // page_size] < 0).any()):
                raise RangeError(f"page_table: expected {needed} pages of sequence {seq} on rank {rank}, got {pages.tolist()[:needed]}")
            slots.append(torch.full_like(positions, -1).masked_scatter_(mine, pages[keys // page_size] * page_size + keys % page_size))
        return torch.cat(slots)

    def _num_seqs(self, lens: Sequence[int]) -> int:
        if len(lens) != len(self.starts):
            raise ShapeError(f"lens: expected {len(self.starts)} lengths, one a sequence, got {len(lens)}")
        return len(lens)

    def _run(self, seq: int, rank: int) -> tuple[int, float]:
        starts = self.starts[seq]
        if not 0 <= check_int("rank", rank, 0) < len(starts):
            raise RangeError(f"rank: expected 0 to {len(starts) - 1}, got {rank}")
        return starts[rank], starts[rank + 1] if rank + 1 < len(starts) else math.inf
