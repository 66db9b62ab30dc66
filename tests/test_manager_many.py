"""CacheManager: calls for many sequences at once leave what the same calls one by one leave."""

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lives import KINDS, everything, lived
from problems import effort
from served import manage, serve

from tkv.errors import DTypeError, RangeError, ShapeError, TkvError


@pytest.mark.parametrize("kind", KINDS)
@effort(40)
@given(size=st.sampled_from([1, 2, 3, 4]), seed=st.integers(0, 2**32), data=st.data())
def test_sequences_cut_at_once_are_left_as_if_cut_one_by_one(kind, size, seed, data):
    together, apart = lived(kind, size, seed), lived(kind, size, seed)
    before = everything(together)
    assert before == everything(apart)
    seqs = data.draw(st.permutations(together.seqs))[: data.draw(st.integers(0, 30))]
    lengths = [max(0, together.length(seq) - data.draw(st.sampled_from([0, 1, 1, 2, 3, 5, 9, 40]))) for seq in seqs]
    error = None
    for seq, length in zip(seqs, lengths):
        try:
            apart.truncate(seq, length)
        except RangeError as refused:
            error = error or refused
    if error is None:
        together.truncate(seqs, lengths)
        assert everything(together) == everything(apart)
    else:
        # The first that cannot be cut is named, and none is.
        with pytest.raises(RangeError) as refused:
            together.truncate(seqs, lengths)
        assert str(refused.value) == str(error) and everything(together) == before


def test_sequences_freed_at_once_are_left_as_if_freed_one_by_one():
    for kind, seed in itertools.product(KINDS, range(10)):
        together, apart = lived(kind, 3, seed), lived(kind, 3, seed)
        seqs = random.Random(seed).sample(together.seqs, len(together.seqs) // 2 + 1)
        together.free(seqs)
        for seq in seqs:
            apart.free(seq)
        assert everything(together) == everything(apart)


@pytest.mark.parametrize("given_as", [list, tuple, np.array, torch.tensor, lambda x: np.array(x, np.int32)])
def test_many_sequences_may_be_given_in_any_array(given_as):
    manager = manage()
    a, b, c = (serve(manager, [i] * (3 + i))[0] for i in range(3))
    manager.truncate(given_as([c, a]), given_as([4, 0]))
    assert manager.lengths(given_as([a, b, c])).tolist() == [0, 4, 4] and manager.lengths([]).tolist() == []
    manager.truncate([], [])
    manager.free(given_as([c, a]))
    manager.free([])
    assert manager.seqs == [b]


def test_drafts_of_a_batch_are_cut_by_what_it_says():
    manager = manage(num_pages=64)
    seqs = [serve(manager, list(range(first, first + 7)))[0] for first in range(0, 40, 10)]
    for _ in range(5):
        batch = manager.step(seqs, counts=[3] * 4)
        manager.truncate(batch.seqs, batch.prefix_lens + [1, 2, 3, 1])
    assert manager.lengths(seqs).tolist() == [12, 17, 22, 12] and manager.stats().pages_used == 3 + 5 + 6 + 3


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.truncate([0, 7], [1, 1]), RangeError, "seq: expected a living sequence, got 7, which was never added"),
        (lambda m: m.truncate([0, 1, 0], [1, 1, 1]), RangeError, r"seqs: expected each sequence once, got \[0, 1, 0\]"),
        (lambda m: m.truncate([0, 1], [1, 7]), RangeError, "length: expected 0 to 6, the length of sequence 1, got 7"),
        (lambda m: m.truncate([0, 1], [1, -1]), RangeError, r"length: expected 0 or more, got -1 at \[1\]"),
        (lambda m: m.truncate([0, 1], [1]), ShapeError, "length: expected 2, one for each sequence, got 1"),
        (lambda m: m.truncate([0, 1], 1), DTypeError, "length: expected a list of integers, got 1"),
        (lambda m: m.truncate(0, [1]), DTypeError, r"length: expected an int, got \[1\]"),
        (lambda m: m.truncate([0, 1.0], [1, 1]), DTypeError, "seq: expected integers of up to 63 bits, got float64"),
        (lambda m: m.truncate([0, 1], [1, 2**70]), DTypeError, "length: expected integers of up to 63 bits"),
        (lambda m: m.truncate(0, 2**70), RangeError, "length: expected 0 to 5"),
        (lambda m: m.free([0, 2]), RangeError, "seq: expected a living sequence, got 2, which has been freed"),
        (lambda m: m.free([1, 1]), RangeError, "expected each sequence once"),
        (lambda m: m.free([[0]]), ShapeError, "seq: expected one dimension"),
        (lambda m: m.free({0: 1}), DTypeError, "seq: expected a list of integers"),
        (lambda m: m.free([True]), DTypeError, "got bool"),
        (lambda m: m.lengths([0, 2]), RangeError, "got 2, which has been freed"),
        (lambda m: m.lengths(0), DTypeError, "seqs: expected a list of integers, got 0"),
    ],
)
def test_a_wrong_entry_changes_nothing_of_the_others(call, error, message):
    manager = manage(num_pages=8)
    for prompt in ([1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 9], [7]):
        serve(manager, prompt)
    manager.free(2)
    before = everything(manager)
    with pytest.raises(error, match=message):
        call(manager)
    assert issubclass(error, TkvError) and everything(manager) == before
