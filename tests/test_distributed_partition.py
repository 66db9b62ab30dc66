"""Partition says which rank holds which position, and every position has one."""

import pytest
import torch

from tkv.errors import DTypeError, RangeError, ShapeError
from tkv.integrations.distributed import Partition

PARTITIONS = {
    "even": Partition.even([100, 0, 33, 16], world_size=3, page_size=16),
    "by capacity": Partition.by_capacity(4, world_size=3, capacity=20),
    "by hand": Partition([[0, 5, 5], [0, 0, 0], [0, 1, 40], [0, 200, 201]]),
    "one rank": Partition.by_capacity(4, world_size=1, capacity=1),
}


@pytest.mark.parametrize("partition", PARTITIONS.values(), ids=PARTITIONS)
@pytest.mark.parametrize("lens", [[100, 0, 33, 16], [137, 1, 40, 17], [3, 2, 1, 0]], ids=str)
def test_every_token_is_written_on_one_rank_in_a_slot_of_its_own(partition, lens):
    page_size, rng = 4, torch.Generator().manual_seed(1)
    new_lens = [min(n, 1 + 12 * seq) for seq, n in enumerate(lens)]
    world_size = len(partition.starts[0])
    owners = torch.zeros(sum(new_lens), dtype=torch.int64)
    held = torch.zeros(4, dtype=torch.int64)
    for rank in range(world_size):
        seq_lens, kv_start = partition.seq_lens(rank, lens), partition.kv_start(rank)
        held += seq_lens
        table = torch.randperm(4 * 40, generator=rng).view(4, 40)
        # Pages that hold nothing may be anything.
        table[torch.arange(40)[None] >= (seq_lens[:, None] + page_size - 1) // page_size] = -1
        slots = partition.slot_mapping(rank, lens, new_lens, table, page_size)
        assert slots.dtype == torch.int64 and seq_lens.dtype == kv_start.dtype == torch.int32
        owners += slots >= 0
        tokens = [(seq, p) for seq, n in enumerate(lens) for p in range(n - new_lens[seq], n)]
        for (seq, position), slot in zip(tokens, slots.tolist()):
            key = position - int(kv_start[seq])
            assert (slot >= 0) == (0 <= key < int(seq_lens[seq]))
            if slot >= 0:
                assert slot == int(table[seq, key // page_size]) * page_size + key % page_size
    assert owners.eq(1).all()
    assert held.tolist() == lens


def test_even_runs_are_whole_pages_and_differ_by_one_at_most():
    partition = Partition.even([161, 16, 0], world_size=4, page_size=16)
    pages = [-(-n // 16) for n in (161, 16, 0)]
    for seq, starts in enumerate(partition.starts):
        runs = [(end - start) / 16 for start, end in zip(starts, [*starts[1:], pages[seq] * 16])]
        assert all(run == int(run) for run in runs) and max(runs) - min(runs) <= 1


def test_what_is_no_partition_is_refused():
    for call, error, message in (
        (lambda: Partition([[0, 4], [0]]), ShapeError, r"starts: expected one start a rank for every sequence, got \[2, 1\]"),
        (lambda: Partition([[]]), ShapeError, r"starts: expected one start a rank for every sequence, got \[0\]"),
        (lambda: Partition([[1, 4]]), RangeError, r"starts: expected to rise from 0, got \(1, 4\)"),
        (lambda: Partition([[0, 4, 3]]), RangeError, r"starts: expected to rise from 0, got \(0, 4, 3\)"),
        (lambda: Partition([[0, 4.5]]), DTypeError, "starts: expected an int, got 4.5"),
        (lambda: Partition.even([4], 0, 16), RangeError, "world_size: expected at least 1, got 0"),
        (lambda: Partition.even([-1], 2, 16), RangeError, "lens: expected at least 0, got -1"),
        (lambda: Partition.by_capacity(2, 2, 0), RangeError, "capacity: expected at least 1, got 0"),
    ):
        with pytest.raises(error, match=message):
            call()
    partition = Partition.even([40], 2, 16)
    table = torch.tensor([[3]])
    for call, error, message in (
        (lambda: partition.kv_start(2), RangeError, "rank: expected 0 to 1, got 2"),
        (lambda: partition.seq_lens(0, [4, 5]), ShapeError, "lens: expected 1 lengths, one a sequence, got 2"),
        (lambda: partition.slot_mapping(1, [40], [3], table, 16), RangeError, r"expected 2 pages of sequence 0 on rank 1, got \[3\]"),
        (
            lambda: partition.slot_mapping(0, [3], [3], table * 0 - 1, 16),
            RangeError,
            "expected 1 pages of sequence 0 on rank 0, got \\[-1\\]",
        ),
    ):
        with pytest.raises(error, match=message):
            call()
