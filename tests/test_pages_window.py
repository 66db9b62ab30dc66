"""CacheManager with a window: what is dropped, what is kept for prompts, and memory that stays flat."""

import numpy as np
import pytest
import torch
from served import manage, serve, state

from tkv.errors import DTypeError, OutOfPages, RangeError, UnsupportedError
from tkv.pages import CacheManager, PagePool


def bound(size, window, sinks, new):
    return -(-(sinks + window + new - 1) // size) + 2


# Bounded memory


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(("size", "window", "sinks"), [(1, 1, 0), (3, 7, 4), (16, 5, 17), (16, 33, 1), (3, 2, 0)])
def test_sequences_that_generate_without_end_stay_within_their_pages(size, window, sinks, prefix_cache):
    rng = np.random.default_rng(size)
    news = np.array([1, 1, 2, 5])
    pool = PagePool(sum(bound(size, window, sinks, new) for new in news.tolist()))
    manager = CacheManager(pool, size, window=window, sinks=sinks, prefix_cache=prefix_cache)
    seqs = [manager.add([0]) for _ in news]
    for step in range(2000):
        ids = rng.integers(0, 3, news.sum())
        batch = manager.step(seqs, ids, counts=news)
        assert all(manager.pages(seq).size <= bound(size, window, sinks, new) for seq, new in zip(seqs, news.tolist()))
        assert batch.page_table.shape[1] <= bound(size, window, sinks, 5) and batch.positions[0] == step
    ledger, index = manager._ledger, manager._ledger.index
    assert ledger.table.shape == (8, max(8, ledger.table.shape[1])) and ledger.table.shape[1] <= 2 * bound(size, window, sinks, 5) + 8
    assert all(chain is None or len(chain) <= ledger.table.shape[1] + 1 for chain in ledger.chains)
    assert max(map(len, (index._page_of, index._parent, index._hash, index._children, index._idle))) <= pool.num_pages
    assert len(ledger._open) <= len(seqs)
    assert [manager.length(seq) for seq in seqs] == (2000 * news).tolist()
    for seq in seqs:
        manager.free(seq)
    manager.clear()
    assert pool.num_free == pool.num_pages


def test_chains_stay_short_while_the_pool_is_large():
    manager = manage(num_pages=2000, page_size=2, window=4, sinks=3)
    seq = manager.add([0])
    for token in range(3000):
        manager.step({seq: [token]})
    # The root, two pinned pages, the last page that was dropped, two whole pages of the window.
    assert len(manager._ledger.chains[manager._ledger.row(seq)]) <= 6
    assert manager.match(range(3001)) == 3000
    manager.truncate(seq, 2999)
    manager.step({seq: [7, 8, 9]})
    manager.free(seq)
    assert manager.match([*range(2999), 7, 8, 9, 10]) == 3002


def test_a_long_prompt_at_once_is_dropped_by_the_next_step():
    manager = manage(num_pages=32, page_size=4, window=6, sinks=2)
    seq, _ = serve(manager, list(range(100)))
    assert manager.held(seq) == 100
    batch = manager.step([seq], tokens=[], counts=[0])
    # The next token, at position 100, sees 95 and later ones: of page 23, which starts at 92, and 24.
    assert batch.page_table.tolist() == [[0, 23, 24]] and batch.kv_start.tolist() == [88] and batch.pinned == 4
    assert batch.seq_lens.tolist() == batch.prefix_lens.tolist() == [12] and batch.max_seq_len == 12
    batch = manager.step({seq: [100]})
    assert batch.positions.tolist() == [100] and batch.seq_lens.tolist() == [13] and batch.prefix_lens.tolist() == [12]
    assert (manager.length(seq), manager.held(seq)) == (101, 13)
    assert manager.tokens(seq).tolist() == [*range(4), *range(92, 101)]


def test_a_step_can_write_on_pages_that_it_drops():
    manager = manage(num_pages=3, page_size=2, window=2)
    seq, _ = serve(manager, [1, 2, 3, 4, 5, 6])
    batch = manager.step({seq: [7, 8]})
    assert batch.page_table.shape == (1, 2) and batch.page_table[0, 0] == 2 and batch.page_table[0, 1] in (0, 1)
    assert manager.match([1, 2, 3, 4, 5, 6, 7]) in (0, 2)


def test_too_few_pages_drop_nothing():
    manager = manage(num_pages=5, page_size=2, window=2)
    seq, _ = serve(manager, [1, 2, 3, 4, 5, 6])
    twin = manager.fork(seq)
    serve(manager, [9])
    before = state(manager), manager.held(seq), manager.held(twin)
    with pytest.raises(OutOfPages, match="needs 4 pages for 8 tokens of 1 sequences, 1 of 5 are free and 0 cached"):
        manager.step({seq: [7] * 8})
    assert (state(manager), manager.held(seq), manager.held(twin)) == before
    # When both let go of the first two pages there is room.
    with pytest.raises(OutOfPages, match="are free and 0 cached and 2 become free"):
        manager.step({seq: [7] * 8, twin: []})
    assert (state(manager), manager.held(seq), manager.held(twin)) == before
    assert manager.step({seq: [7] * 6, twin: []}).kv_start.tolist() == [4, 4]


def test_a_pool_that_fails_drops_nothing(monkeypatch):
    manager = manage(num_pages=8, page_size=2, window=2, prefix_cache=False)
    seq, _ = serve(manager, [1, 2, 3, 4])
    before = state(manager), manager.held(seq)

    def fail(count):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(manager.pool, "allocate", fail)
        with pytest.raises(MemoryError):
            manager.step({seq: [5] * 5})
    assert (state(manager), manager.held(seq)) == before
    assert manager.step({seq: [5]}).kv_start.tolist() == [2]


def test_drafts_of_the_last_step_can_always_be_rejected():
    manager = manage(num_pages=64, page_size=3, window=5, sinks=1)
    seq, _ = serve(manager, [0])
    for length in range(1, 60):
        manager.step([seq], counts=[9])
        manager.truncate(seq, length)
        assert manager.step({seq: [length]}).positions.tolist() == [length]


def test_what_a_next_token_needs_cannot_be_brought_back():
    manager = manage(num_pages=64, page_size=4, window=6, sinks=2)
    seq, _ = serve(manager, list(range(30)))
    manager.step({seq: [30]})  # sees 25 and later ones: the first page behind the pinned one starts at 24
    before = state(manager)
    with pytest.raises(
        RangeError, match="length: expected 29 or more, or at most the 4 pinned tokens, got 28: of sequence 0 tokens before"
    ):
        manager.truncate(seq, 28)
    assert state(manager) == before
    manager.truncate(seq, 29)
    assert manager.step({seq: [7]}).positions.tolist() == [29]
    # What is pinned was never dropped; from there on the sequence is computed anew.
    manager.truncate(seq, 3)
    batch = manager.step({seq: [3, 4, 5]})
    assert batch.kv_start.tolist() == [0] and batch.positions.tolist() == [3, 4, 5] and batch.seq_lens.tolist() == [6]
    assert manager.match([0, 1, 2, 3, 4, 5, 6]) == 6
    # Of its former life no position is out of reach any more.
    manager.truncate(seq, 5)
    assert manager.tokens(seq).tolist() == [0, 1, 2, 3, 4]


# Prompts


def test_a_prompt_that_is_found_holds_what_its_next_token_sees():
    manager = manage(num_pages=40, page_size=4, window=6, sinks=2)
    manager.free(serve(manager, list(range(100)))[0])
    seq = manager.add([*range(99), 0, 0])
    assert manager.length(seq) == 99
    # 94 and later ones, and the sinks.
    assert manager.pages(seq).tolist() == [0, 23, 24] and manager.held(seq) == 4 + 7
    assert manager.stats().pages_cached == 22
    batch = manager.step({seq: [0]})
    assert batch.copies.shape == (1, 2) and batch.kv_start.tolist() == [88] and batch.positions.tolist() == [99]


def test_pages_in_the_middle_that_are_given_up_end_the_prefix_there():
    manager = manage(num_pages=10, page_size=2, window=2)
    seq, _ = serve(manager, list(range(12)))
    manager.step({seq: [12]})  # holds page 5 and the one of 12; 0 to 4 are cached
    assert manager.match(range(13)) == 12
    serve(manager, [50] * 8)  # takes the last of them, and 10 and 11 are not found without 8 and 9
    assert manager.match(range(13)) == 8 and manager.tokens(seq).tolist() == [10, 11, 12]
    manager.step({seq: [13, 14]})
    assert manager.match(range(15)) == 8
    # Computed again, it is found again.
    for one in manager.seqs:
        manager.free(one)
    manager.free(serve(manager, list(range(12)))[0])
    assert manager.match(range(13)) == 12


def test_a_prompt_that_is_found_keeps_the_middle_of_its_prefix():
    manager = manage(num_pages=10, page_size=2, window=2)
    for first in (0, 100):
        manager.free(serve(manager, list(range(first, first + 8)))[0])
    seq = manager.add(range(9))
    assert manager.pages(seq).tolist() == [3]
    manager.step({seq: [8]})
    serve(manager, [50] * 6)
    assert manager.match(range(9)) == 8 and manager.match(range(100, 109)) == 4


def test_ids_of_tokens_that_were_dropped_are_taken_and_the_sequence_is_not_found():
    manager = manage(num_pages=40, page_size=2, window=3, sinks=1)
    seq = manager.add([0])
    for _ in range(12):
        manager.step([seq], counts=[1])
    assert manager.tokens(seq).tolist() == [-1] * 6
    with pytest.raises(RangeError, match="has 12 tokens without ids, got 13"):
        manager.identify(seq, range(13))
    manager.identify(seq, range(9))
    assert manager.tokens(seq).tolist() == [0, 1, 8, -1, -1, -1]
    manager.identify(seq, [9, 10, 11])
    manager.step({seq: [12]})
    assert manager.tokens(seq).tolist() == [0, 1, 10, 11, 12] and manager.match(range(14)) == 0


def test_ids_that_come_a_step_late_are_in_time_for_the_prefix():
    manager = manage(num_pages=40, page_size=2, window=3)
    seq = manager.add([0])
    for token in range(20):
        manager.step([seq], counts=[1])
        manager.identify(seq, [token])
    assert manager.match(range(21)) == 20


# Batches


def test_without_a_window_nothing_is_dropped():
    manager = manage(sinks=3)
    batch = manager.step({manager.add([1, 2]): [1, 2], manager.add([3]): [3]})
    assert batch.kv_start.tolist() == [0, 0] and batch.kv_start.dtype == np.int32 and batch.pinned == 0
    assert batch.tensors().kv_start.dtype == torch.int32


def test_sequences_of_a_batch_are_dropped_each_by_its_own_length():
    manager = manage(num_pages=64, page_size=2, window=4, sinks=1)
    seqs = [serve(manager, [i] * (1 + 5 * i))[0] for i in range(5)]
    batch = manager.step(seqs, tokens=[9] * 8, counts=[1, 0, 2, 0, 5])
    # Lengths 1, 6, 11, 16, 21; tokens behind the pinned two that no next one sees: of 0, 3, 8, 13, 18 without these whole pages.
    assert batch.kv_start.tolist() == [0, 0, 6, 10, 16]
    assert batch.seq_lens.tolist() == [2, 6, 7, 6, 10] and batch.prefix_lens.tolist() == [1, 6, 5, 6, 5]
    assert batch.positions.tolist() == [1, 11, 12, 21, 22, 23, 24, 25] and batch.tensors().kv_start.tolist() == [0, 0, 6, 10, 16]


# Misuse


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"window": 0}, RangeError, "window: expected at least 1, got 0"),
        ({"window": 1.5}, DTypeError, "window: expected an int, got 1.5"),
        ({"window": 4, "sinks": -1}, RangeError, "sinks: expected at least 0, got -1"),
        ({"window": 4, "tail_pool": PagePool(8)}, UnsupportedError, "window: cannot be had together with tail_pool"),
    ],
)
def test_windows_that_do_not_exist_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        CacheManager(PagePool(8), 4, **options)
