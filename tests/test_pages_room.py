"""CacheManager: eviction, batches, statistics and misuse."""

import re

import numpy as np
import pytest
import torch
from served import manage, serve, state

from tkv.errors import DTypeError, OutOfPages, RangeError, ShapeError
from tkv.pages import CacheManager, PagePool

# Room


def test_pages_are_evicted_from_the_end_of_the_chain_that_was_used_longest_ago():
    manager = manage(num_pages=8)
    old, new = list(range(12)), list(range(100, 112))
    manager.free(serve(manager, old)[0])
    manager.free(serve(manager, new)[0])
    found = []
    for token in range(200, 206):
        serve(manager, [token] * 4)
        found.append((manager.match([*old, 0]), manager.match([*new, 0])))
    assert found == [(12, 12), (12, 12), (8, 12), (4, 12), (0, 12), (0, 8)]
    assert manager.stats().evictions == 4


def test_a_prompt_that_is_found_is_used_again():
    manager = manage(num_pages=6)
    for first in (0, 100):
        manager.free(serve(manager, list(range(first, first + 12)))[0])
    manager.free(manager.add(list(range(13))))
    serve(manager, [7] * 8)
    assert manager.match(list(range(13))) == 12 and manager.match(list(range(100, 113))) == 4


def test_what_a_sequence_uses_is_not_evicted():
    manager = manage(num_pages=4)
    manager.free(serve(manager, list(range(12)))[0])
    seq = manager.add(list(range(9)))
    serve(manager, [7] * 8)
    assert manager.pages(seq).tolist() == [0, 1] and manager.match(list(range(13))) == 8


def test_too_few_pages_leave_everything_as_it_was():
    manager = manage(num_pages=6)
    manager.free(serve(manager, [9] * 4)[0])
    a, _ = serve(manager, [1, 2, 3, 4, 5])
    b = manager.fork(a)
    c, _ = serve(manager, [6, 6, 6])
    before = state(manager)
    with pytest.raises(OutOfPages, match=re.escape("needs 5 pages for 17 tokens of 3 sequences, 2 of 6 are free and 1 cached")):
        manager.step({a: [1], b: [2], c: [0] * 15})
    assert state(manager) == before
    # The same call for fewer sequences.
    assert manager.step({a: [1], b: [2]}).copies.shape == (1, 2)


def test_out_of_pages_in_the_middle_of_a_prompt_can_be_tried_again():
    manager = manage(num_pages=3)
    a, _ = serve(manager, [1] * 8)
    b = manager.add([2] * 8)
    with pytest.raises(OutOfPages):
        manager.step({a: [1], b: [2] * 8})
    assert manager.length(b) == 0
    manager.free(a)
    assert manager.step({b: [2] * 8}).seq_lens.tolist() == [8]


def test_a_sequence_alone_needs_no_more_pages_than_its_tokens_fill():
    manager = manage(num_pages=2)
    manager.free(serve(manager, [1, 2, 3, 4, 5, 6, 7, 8])[0])
    seq = manager.add([1, 2, 3, 4, 5, 6, 0, 0])
    # The page that parts would be copied if there were a third one.
    batch = manager.step({seq: [0, 0]})
    assert batch.copies.size == 0 and batch.page_table.tolist() == [[0, 1]]
    assert manager.match([1, 2, 3, 4, 5, 6, 7, 8]) == 6 and manager.match([1, 2, 3, 4, 5, 6, 0, 0, 0]) == 8


def test_what_follows_on_a_page_that_is_taken_over_is_evicted_with_it():
    manager = manage(num_pages=3)
    manager.free(serve(manager, list(range(12)))[0])
    seq = manager.add([0, 1, 9, 9])
    manager.step({seq: [9] * 10})
    assert manager.match(list(range(13))) == 2 and manager.stats().pages_cached == 0


def test_a_copy_is_preferred_while_there_is_room():
    manager = manage(num_pages=3)
    manager.free(serve(manager, [1, 2, 3, 4, 5, 6, 7, 8])[0])
    seq = manager.add([1, 2, 3, 4, 5, 6, 0])
    assert manager.step({seq: [0]}).copies.tolist() == [[1, 2]]
    assert manager.match([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8


def test_a_pool_that_fails_leaves_every_sequence_usable(monkeypatch):
    manager = manage(num_pages=4)
    a, _ = serve(manager, [1, 2, 3, 4])
    before = state(manager)

    def fail(count):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(manager.pool, "allocate", fail)
        with pytest.raises(MemoryError):
            manager.step({a: [5]})
    assert state(manager) == before
    assert manager.step({a: [5]}).seq_lens.tolist() == [5]


# Batches


def test_a_batch_has_all_that_the_functions_take():
    manager = manage(num_pages=8)
    a, b, c = manager.add([1] * 6), manager.add([2]), manager.add([3])
    manager.step({a: [1] * 5, b: [2]})
    batch = manager.step([b, a, c], tokens=[7, 8, 9, 9, 9, 9, 9], counts=[2, 5, 0])
    assert batch.seqs.tolist() == [b, a, c]
    assert batch.page_table.tolist() == [[2, -1, -1], [0, 1, 3], [-1, -1, -1]]
    assert batch.seq_lens.tolist() == [3, 10, 0] and batch.prefix_lens.tolist() == [1, 5, 0]
    assert batch.cu_seqlens.tolist() == [0, 2, 7, 7] and batch.positions.tolist() == [1, 2, 5, 6, 7, 8, 9]
    assert batch.slot_mapping.tolist() == [9, 10, 5, 6, 7, 12, 13] and batch.filled.tolist() == [1]
    assert (batch.max_q_len, batch.max_seq_len) == (5, 10)
    assert manager.tokens(b).tolist() == [2, 7, 8]


def test_tensors_have_the_dtypes_that_the_functions_take():
    manager = manage()
    tensors = manager.step({manager.add([1, 2]): [1, 2]}).tensors("cpu")
    assert tensors.page_table.dtype == tensors.seq_lens.dtype == tensors.prefix_lens.dtype == tensors.cu_seqlens.dtype == torch.int32
    assert tensors.slot_mapping.dtype == tensors.positions.dtype == torch.int64
    assert tensors.copies.shape == (0, 2) and tensors.filled.shape == (0,)
    assert manager.step({manager.add([1, 2]): [2]}).tensors("meta").page_table.device.type == "meta"


def test_a_batch_stays_as_it_was_handed_out():
    manager = manage()
    seq, _ = serve(manager, [1, 2, 3])
    batch = manager.step({seq: [4]})
    tables = batch.page_table.copy(), batch.filled.copy()
    manager.free(seq)
    manager.clear()
    serve(manager, [9] * 20)
    assert (batch.page_table == tables[0]).all() and (batch.filled == tables[1]).all()


@pytest.mark.parametrize("args", [({},), ([],), ([], []), (np.zeros(0, np.int64),)])
def test_an_empty_batch(args):
    batch = manage().step(*args)
    assert batch.page_table.shape == (0, 0) and batch.cu_seqlens.tolist() == [0] and batch.tensors().slot_mapping.shape == (0,)


def test_managers_and_batches_tell_in_a_line_what_they_are():
    manager = manage(num_pages=2000, page_size=4)
    manager.free(serve(manager, [1] * 5)[0])
    a, _ = serve(manager, range(5200))
    b = manager.fork(manager.add([9]))
    batch = manager.step({a: [7], b: [9]})
    assert repr(batch) == "Batch(2 new tokens of 2 sequences, max_q_len 1, max_seq_len 5,201, 0 copies, 0 filled)"
    assert repr(manager) == "CacheManager(3 sequences, pages of 4 tokens: 1,302 used, 2 cached, 696 free)"
    assert repr(manage(window=6, sinks=1)) == "CacheManager(0 sequences, pages of 4 tokens: 0 used, 0 cached, 32 free, window 6, sinks 1)"
    with_tails = manage(tail_pool=PagePool(8))
    batch = with_tails.step({with_tails.add([1]): [1]})
    assert repr(batch) == "TailBatch(1 new tokens of 1 sequences, max_q_len 1, max_seq_len 0, 0 copies, 0 filled, 0 conversions)"
    pages = "0 used, 0 cached, 32 free, tails of 128 tokens: 1 pages used, 7 free"
    assert repr(with_tails) == f"CacheManager(1 sequences, pages of 4 tokens: {pages})"


def test_lists_arrays_and_tensors_are_the_same():
    tokens = [1, 2, 3, 4, 5]
    found = []
    for given_as in (list, tuple, np.array, lambda x: np.array(x, np.int32), lambda x: np.array(x, np.uint64)[::1], torch.tensor):
        manager = manage()
        seq = manager.add(given_as(tokens))
        manager.step([seq], tokens=given_as(tokens), counts=given_as([5]))
        found.append(manager.tokens(seq).tolist())
    assert found == [tokens] * 6
    assert manage().add(range(3)) == 0


def test_many_sequences_and_long_ones():
    manager = manage(num_pages=1000, page_size=2)
    seqs = [serve(manager, [i, i, i])[0] for i in range(50)]
    manager.step({seqs[3]: [7] * 999})
    assert manager.pages(seqs[3]).size == 501 and all(manager.tokens(seq).tolist() == [i, i, i] for i, seq in enumerate(seqs) if i != 3)
    for seq in seqs:
        manager.free(seq)
    assert manager.add([1]) == 50 and manager.seqs == [50]


# Statistics


def test_statistics():
    manager = manage(num_pages=8)
    a, _ = serve(manager, [1, 2, 3, 4, 5, 6])
    serve(manager, [1, 2, 3, 4, 5, 0])
    serve(manager, [7])
    manager.free(a)
    stats = manager.stats()
    assert (stats.prompts, stats.hits, stats.tokens_asked, stats.tokens_saved) == (3, 1, 13, 5)
    assert (stats.pages_used, stats.pages_shared, stats.pages_cached, stats.pages_free) == (3, 0, 1, 4)
    assert (stats.evictions, stats.copies, stats.waste) == (0, 1, 2 + 3)
    assert manager.num_available == 5


def test_a_page_that_two_sequences_have_is_wasted_once():
    manager = manage()
    a, _ = serve(manager, [1, 2, 3, 4, 5, 6])
    b = manager.fork(a)
    assert manager.stats().waste == 2
    manager.truncate(b, 5)
    assert manager.stats().waste == 2
    manager.truncate(b, 2)
    assert manager.stats().waste == 2


# Misuse


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.free(7), RangeError, "seq: expected a living sequence, got 7, which was never added"),
        (lambda m: m.free(1), RangeError, "got 1, which has been freed"),
        (lambda m: m.free(True), DTypeError, "seq: expected a sequence's number, got True"),
        (lambda m: m.free("0"), DTypeError, "seq: expected a sequence's number, got '0'"),
        (lambda m: m.fork(1), RangeError, "has been freed"),
        (lambda m: m.length(-1), RangeError, "got -1"),
        (lambda m: m.pages(1), RangeError, "has been freed"),
        (lambda m: m.tokens(1), RangeError, "has been freed"),
        (lambda m: m.identify(1, []), RangeError, "has been freed"),
        (lambda m: m.identify(0, [1]), RangeError, "sequence 0 has 0 tokens without ids, got 1"),
        (lambda m: m.truncate(0, 6), RangeError, "length: expected 0 to 5, the length of sequence 0, got 6"),
        (lambda m: m.truncate(0, -1), RangeError, "length: expected at least 0, got -1"),
        (lambda m: m.truncate(0, 1.0), DTypeError, "length: expected an int, got 1.0"),
        (lambda m: m.add([1.0]), DTypeError, "tokens: expected integers of up to 63 bits, got float64"),
        (lambda m: m.add([True]), DTypeError, "got bool"),
        (lambda m: m.add("abc"), DTypeError, "tokens: expected a list of integers, got 'abc'"),
        (lambda m: m.add(5), DTypeError, "tokens: expected a list of integers, got 5"),
        (lambda m: m.add([[1]]), ShapeError, r"tokens: expected one dimension, got shape \[1, 1\]"),
        (lambda m: m.add([[1], [2, 3]]), DTypeError, "tokens: expected a list of integers"),
        (lambda m: m.add([3, -1]), RangeError, r"tokens: expected 0 or more, got -1 at \[1\]"),
        (lambda m: m.add([2**63]), DTypeError, "63 bits"),
        (lambda m: m.add([2**70]), DTypeError, "tokens: expected"),
        (lambda m: m.add(torch.zeros(2, dtype=torch.int64, device="meta")), DTypeError, "on the host, got a tensor on meta"),
        (lambda m: m.add([1], extra_keys={"a": 1}), DTypeError, "extra_keys: expected .* got dict"),
        (lambda m: m.add([1], extra_keys=("a", {1})), DTypeError, "got set"),
        (lambda m: m.match([-2]), RangeError, "got -2"),
        (lambda m: m.step([0]), DTypeError, "tokens: expected the ids of the new tokens, or counts"),
        (lambda m: m.step({0: 5}), DTypeError, "tokens: expected a list of integers, got 5"),
        (lambda m: m.step({0: [5]}, tokens=[5]), DTypeError, "a mapping has the tokens with it"),
        (lambda m: m.step({0: [5]}, counts=[1]), DTypeError, "a mapping has the tokens with it"),
        (lambda m: m.step({0: [5], 7: [5]}), RangeError, "got 7"),
        (lambda m: m.step([0, 0], tokens=[5, 5]), RangeError, r"seqs: expected each sequence once, got \[0, 0\]"),
        (lambda m: m.step([0], tokens=[5, 5]), ShapeError, "tokens: expected 1 ids for 1 sequences, got 2"),
        (lambda m: m.step([0], tokens=[5], counts=[2]), ShapeError, "tokens: expected 2 ids"),
        (lambda m: m.step([0], tokens=[5], counts=[1, 0]), ShapeError, "counts: expected 1, one for each sequence, got 2"),
        (lambda m: m.step([0], counts=[-1]), RangeError, "counts: expected 0 or more, got -1"),
        (lambda m: m.step([0], counts=[2**31]), RangeError, "tokens: expected sequences of at most 1073741824 tokens"),
        (lambda m: m.step([0], tokens=[-1]), RangeError, "tokens: expected 0 or more"),
        (lambda m: m.step("0", tokens=[1]), DTypeError, "seqs: expected a list of integers"),
        (lambda m: m.append(0), DTypeError, "tokens: expected token ids, or a count"),
        (lambda m: m.append(0, [1], count=1), DTypeError, "tokens: expected token ids, or a count"),
        (lambda m: m.append(0, count=-1), RangeError, "count: expected at least 0"),
        (lambda m: CacheManager(8, 4), DTypeError, "pool: expected a tkv.PagePool, got int"),
        (lambda m: CacheManager(m.pool, 0), RangeError, "page_size: expected at least 1, got 0"),
        (lambda m: CacheManager(m.pool, 4.0), DTypeError, "page_size: expected an int"),
        (lambda m: CacheManager(m.pool, 4, partial_tokens=0), RangeError, "partial_tokens: expected at least 1"),
        (lambda m: CacheManager(m.pool, 4, prefix_cache=1), DTypeError, "prefix_cache: expected True or False, got 1"),
    ],
)
def test_misuse_of_a_manager_raises_and_changes_nothing(call, error, message):
    manager = manage(num_pages=8)
    serve(manager, [1, 2, 3, 4, 5])
    manager.free(serve(manager, [1, 2, 0])[0])
    before = state(manager)
    with pytest.raises(error, match=message):
        call(manager)
    assert state(manager) == before
