"""CacheManager with a pool for tails: room in either pool, batches, statistics and misuse."""

import re

import pytest
import torch
from served import serve
from tails import aged, everything, manage

from tkv.errors import DTypeError, OutOfPages, RangeError
from tkv.pages import CacheManager, PagePool, TailBatch

# Room


def test_too_few_pages_of_the_pool_leave_everything_as_it_was():
    manager = manage(num_pages=3, tail_len=1)
    manager.free(aged(manager, [9] * 5)[0])
    a, _ = serve(manager, list(range(13)))
    b, _ = serve(manager, list(range(50, 55)))
    before = everything(manager)
    message = "pool: needs 4 pages for tokens that leave the tails of 2 sequences, 2 of 3 are free and 1 cached"
    with pytest.raises(OutOfPages, match=message):
        manager.step({a: [1], b: [2]})
    assert everything(manager) == before
    assert len(manager.step({a: [1]}).conversions) == 3


def test_too_few_pages_of_the_tail_leave_everything_as_it_was():
    manager = manage(num_tail=5, tail_len=4)
    a, _ = serve(manager, list(range(10)))
    b = manager.fork(a)
    before = everything(manager)
    message = "tail_pool: needs 4 pages for 15 tokens of 2 sequences, 2 of 5 are free and 1 become free"
    with pytest.raises(OutOfPages, match=re.escape(message)):
        manager.step({a: [1], b: list(range(14))})
    assert everything(manager) == before
    assert manager.step({a: [1], b: [2] * 4}).tail_lens.tolist() == [7, 10]


def test_a_cached_page_that_is_taken_over_is_no_room_for_another():
    manager = manage(num_pages=2, tail_len=1)
    a, _ = serve(manager, list(range(5)))
    # Computed twice: the second one is still in its tail when the first goes.
    b, _ = serve(manager, list(range(5)))
    c, _ = serve(manager, list(range(60, 69)))
    manager.step({a: []})
    manager.free(a)
    assert manager.stats().pages_cached == 1
    before = everything(manager)
    with pytest.raises(OutOfPages, match=r"needs 2 pages .* 1 of 2 are free and 0 cached"):
        manager.step({b: [], c: []})
    assert everything(manager) == before
    manager.truncate(c, 5)
    batch = manager.step({b: [], c: []})
    assert batch.page_table.tolist() == [[0], [1]] and batch.conversions[:, 1].tolist() == [1]


@pytest.mark.parametrize("pool", ["pool", "tail_pool"])
def test_a_pool_that_fails_leaves_every_sequence_usable(pool, monkeypatch):
    manager = manage(num_tail=8, tail_len=4)
    a, _ = aged(manager, list(range(14)))
    manager.free(a)
    a, _ = serve(manager, list(range(20, 34)))
    b = manager.add(range(6))
    manager.step({b: range(4, 6)})
    # What b is about to take over is cached.
    c = manager.add([*range(4)])
    manager.step({c: range(9)})
    before = everything(manager)

    def fail(count):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(getattr(manager, pool), "allocate", fail)
        with pytest.raises(MemoryError):
            manager.step({a: [7] * 9, b: [], c: [1]})
    assert everything(manager)[1:3] == before[1:3] and everything(manager)[0][:2] == before[0][:2]
    batch = manager.step({a: [7] * 9, b: [], c: [1]})
    assert batch.seq_lens.tolist() == [8, 4, 4] and batch.page_table[2, 0] == batch.page_table[1, 0]


# Batches, statistics, misuse


def test_tensors_have_the_names_and_dtypes_that_the_functions_take():
    manager = manage(tail_len=4)
    seq, _ = serve(manager, list(range(10)))
    tensors = manager.step({seq: [10]}).tensors("cpu")
    names = "page_table seq_lens kv_start prefix_lens cu_seqlens tail_page_table tail_lens conversions copies"
    for name in names.split():
        assert getattr(tensors, name).dtype == torch.int32, name
    assert tensors.slot_mapping.dtype == tensors.positions.dtype == torch.int64
    assert tensors.kv_start.tolist() == [4] and tensors.tail_lens.tolist() == [7] and tensors.conversions.tolist() == [[0, 0]]
    assert manager.step({seq: [11]}).tensors("meta").tail_page_table.device.type == "meta"


def test_a_batch_stays_as_it_was_handed_out():
    manager = manage(tail_len=4)
    seq, _ = serve(manager, list(range(10)))
    batch = manager.step({seq: [10]})
    manager.free(seq)
    aged(manager, [9] * 20)
    assert batch.page_table.tolist() == [[0]] and batch.tail_page_table.tolist() == [[1, 2]] and batch.conversions.tolist() == [[0, 0]]


def test_an_empty_batch():
    batch = manage().step({})
    assert batch.page_table.shape == batch.tail_page_table.shape == (0, 0) and batch.conversions.shape == (0, 2)
    assert batch.tensors().tail_lens.shape == (0,)


def test_statistics():
    manager = manage(num_pages=8, tail_len=4)
    a, _ = aged(manager, list(range(14)))
    b, _ = serve(manager, list(range(9)))
    manager.fork(b)
    stats = manager.stats()
    assert (stats.prompts, stats.hits, stats.tokens_asked, stats.tokens_saved) == (2, 1, 23, 8)
    assert (stats.pages_used, stats.pages_shared, stats.pages_cached, stats.pages_free) == (2, 2, 0, 6)
    assert (stats.conversions, stats.copies, stats.waste) == (2, 0, 2 + 3)
    assert manager.num_available == 6 and manager.pages(a).size == 2


def test_without_a_pool_for_tails_there_are_none():
    manager = CacheManager(PagePool(8), 4)
    seq, _ = serve(manager, [1, 2, 3])
    assert manager.tail_pages(seq).size == 0 and manager.stats().conversions == 0 and not isinstance(manager.step({}), TailBatch)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: CacheManager(m.pool, 4, tail_pool=8), DTypeError, "tail_pool: expected a tkv.PagePool or None, got int"),
        (lambda m: CacheManager(m.pool, 4, tail_pool=m.pool), RangeError, "tail_pool: expected a pool of its own"),
        (lambda m: CacheManager(m.pool, 4, tail_pool=m.tail_pool, tail_len=0), RangeError, "tail_len: expected at least 1, got 0"),
        (lambda m: CacheManager(m.pool, 4, tail_pool=m.tail_pool, tail_len=4.0), DTypeError, "tail_len: expected an int"),
        (lambda m: m.tail_pages(7), RangeError, "got 7, which was never added"),
        (lambda m: m.free(7), RangeError, "got 7, which was never added"),
        (lambda m: m.fork(1), RangeError, "got 1, which has been freed"),
        (lambda m: m.truncate(0, 19), RangeError, "length: expected 0 to 18"),
        (lambda m: m.step([0, 0], tokens=[5, 5]), RangeError, r"seqs: expected each sequence once, got \[0, 0\]"),
        (lambda m: m.step([0], counts=[2**31]), RangeError, "tokens: expected sequences of at most 1073741824 tokens"),
        (lambda m: m.identify(0, [1]), RangeError, "sequence 0 has 0 tokens without ids, got 1"),
    ],
)
def test_misuse_raises_and_changes_nothing(call, error, message):
    manager = manage()
    aged(manager, list(range(18)))
    manager.free(serve(manager, [1, 2, 0])[0])
    before = everything(manager)
    with pytest.raises(error, match=message):
        call(manager)
    assert everything(manager) == before
