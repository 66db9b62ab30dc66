"""CacheManager.evict: where kept tokens go, and what a sequence is afterwards."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import effort
from served import manage, serve, state

from tkv.errors import DTypeError, OutOfPages, RangeError, ShapeError, UnsupportedError
from tkv.pages import PagePool


class Cache:
    """Slots that hold keys as an engine's cache would, moved and copied by what the manager says."""

    def __init__(self, manager):
        self.manager, self.size = manager, manager.page_size
        self.slots = [[None] * self.size for _ in range(manager.pool.num_pages)]

    def step(self, new, tokens):
        batch = self.manager.step(new)
        for (source, target), count in zip(batch.copies.tolist(), batch.copy_lens.tolist()):
            self.slots[target] = self.slots[source][:count] + ["stale"] * (self.size - count)
        keys = [key for seq, more in new.items() for key in keys_of(tokens[seq] + more)[len(tokens[seq]) :]]
        assert batch.positions.tolist() == [position for position, _ in keys]
        for key, slot in zip(keys, batch.slot_mapping.tolist()):
            self.slots[slot // self.size][slot % self.size] = key
        return batch

    def compact(self, eviction, keep):
        """Slot by slot in ascending order, all sequences in turn: each read happens after the writes before it."""
        size = self.size
        for i in range(eviction.seqs.size):
            for j, source in enumerate(keep[i]):
                page, target = eviction.page_table[i, source // size], eviction.dst_page_table[i, j // size]
                self.slots[target][j % size] = self.slots[page][source % size]

    def read(self, seq):
        flat = [slot for page in self.manager.pages(seq).tolist() for slot in self.slots[page]]
        return flat[: self.manager.held(seq)]


def keys_of(tokens):
    """A key for each token: they depend on it, its position and all tokens before it."""
    return [(p, tuple(tokens[: p + 1])) for p in range(len(tokens))]


CALLS = ["add", "step", "step", "evict", "evict", "fork", "truncate", "free"]


@effort(150)
@given(
    size=st.sampled_from([1, 3, 16]), num_pages=st.integers(4, 60),
    calls=st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 2**30)), max_size=30),
)  # fmt: skip
def test_kept_tokens_are_found_after_any_calls(size, num_pages, calls):
    manager = manage(num_pages=num_pages, page_size=size)
    # Of each sequence: keys that it holds, all its tokens, and how many it had when it was last evicted from.
    cache, past, tokens, floor = Cache(manager), {}, {}, {}
    for what, number in calls:
        rng, seqs = np.random.default_rng(number), list(past)
        chosen = [seq for seq in seqs if rng.random() < 0.6]
        new = {}
        if what == "add":
            prompt = [number % 2] * int(rng.integers(1, 30))
            seq = manager.add(prompt)
            found = manager.length(seq)
            tokens[seq], past[seq], floor[seq] = prompt[:found], keys_of(prompt[:found]), 0
            new = {seq: prompt[found:]}
        elif what == "step":
            new = {seq: rng.integers(0, 2, rng.integers(0, 7)).tolist() for seq in chosen}
        before = state(manager)
        if new:
            try:
                batch = cache.step(new, tokens)
            except OutOfPages:
                assert state(manager) == before
                continue
            for i, (seq, more) in enumerate(new.items()):
                held = len(past[seq])
                assert (batch.prefix_lens[i], batch.seq_lens[i], batch.kv_start[i]) == (held, held + len(more), 0)
                tokens[seq] = tokens[seq] + more
                past[seq] += keys_of(tokens[seq])[len(tokens[seq]) - len(more) :]
        elif what == "evict":
            lengths = [int(rng.integers(0, len(past[seq]) + 1)) for seq in chosen]
            keep = [sorted(rng.choice(len(past[seq]), n, replace=False).tolist()) for seq, n in zip(chosen, lengths)]
            try:
                eviction = manager.evict(chosen, lengths)
            except OutOfPages:
                assert state(manager) == before
                continue
            assert eviction.keep_lens.tolist() == lengths and eviction.seq_lens.tolist() == [len(past[seq]) for seq in chosen]
            cache.compact(eviction, keep)
            for seq, n, kept in zip(chosen, lengths, keep):
                if n < len(past[seq]):
                    floor[seq] = len(tokens[seq])
                past[seq] = [past[seq][j] for j in kept]
                assert manager.pages(seq).size == -(-n // size)
        elif what == "fork" and seqs:
            twin = manager.fork(seqs[number % len(seqs)])
            past[twin], tokens[twin], floor[twin] = (of[seqs[number % len(seqs)]] for of in (past, tokens, floor))
            past[twin] = list(past[twin])
        elif what == "truncate" and seqs:
            seq = seqs[number % len(seqs)]
            length = max(0, len(tokens[seq]) - int(rng.integers(0, 9)))
            if length < floor[seq]:
                with pytest.raises(RangeError, match="was evicted from"):
                    manager.truncate(seq, length)
                assert state(manager) == before
            else:
                manager.truncate(seq, length)
                del past[seq][len(past[seq]) - (len(tokens[seq]) - length) :]
                tokens[seq] = tokens[seq][:length]
        elif what == "free" and seqs:
            manager.free(seqs[number % len(seqs)])
            del past[seqs[number % len(seqs)]]
        for seq in past:
            assert (manager.length(seq), manager.held(seq), cache.read(seq)) == (len(tokens[seq]), len(past[seq]), past[seq])
    for seq in list(past):
        manager.free(seq)
    manager.clear()
    assert manager.pool.num_free == num_pages


def test_own_pages_are_compacted_in_place_and_the_rest_is_free():
    manager = manage(num_pages=8)
    seq, _ = serve(manager, list(range(18)))
    eviction = manager.evict([seq], [6])
    assert eviction.page_table.tolist() == [[0, 1, 2, 3, 4]] and eviction.dst_page_table.tolist() == [[0, 1]]
    assert (eviction.max_seq_len, eviction.max_keep_len) == (18, 6)
    assert manager.pool.num_free == 6 and manager.match(range(19)) == 0 and manager.stats().pages_cached == 0
    batch = manager.step({seq: [18]})
    assert batch.positions.tolist() == [18] and batch.slot_mapping.tolist() == [6] and batch.kv_start.tolist() == [0]
    assert (batch.prefix_lens.tolist(), batch.seq_lens.tolist()) == ([6], [7])
    assert (manager.length(seq), manager.held(seq), manager.tokens(seq).tolist()) == (19, 7, [-1] * 6 + [18])
    manager.free(seq)
    assert manager.match([*range(18), 18, 0]) == 0 and manager.stats().pages_cached == 0


def test_pages_of_others_stay_as_they_are():
    manager = manage(num_pages=12)
    a, _ = serve(manager, list(range(10)))
    b, _ = serve(manager, [*range(8), 50, 51, 52, 53, 54])
    eviction = manager.evict([b], [9])
    old, new = eviction.page_table[0].tolist(), eviction.dst_page_table[0].tolist()
    assert old[:2] == [0, 1] and old[2] == new[2] and not set(new[:2]) & {0, 1, *old}
    assert manager.match(range(11)) == 10 and manager.pages(a).tolist() == [0, 1, 2]
    assert manager.match([*range(8), 50, 51, 52, 53, 54]) == 8


def test_keeping_all_changes_nothing():
    manager = manage()
    a, _ = serve(manager, list(range(10)))
    b = manager.fork(a)
    before = state(manager)
    eviction = manager.evict([b, a], [10, 10])
    assert state(manager) == before and eviction.page_table.tolist() == eviction.dst_page_table.tolist()
    assert manager.match(range(11)) == 10
    manager.truncate(a, 3)
    assert manager.evict([], []).tensors().dst_page_table.shape == (0, 0)


def test_too_few_pages_evict_nothing():
    manager = manage(num_pages=4)
    a, _ = serve(manager, list(range(10)))
    b = manager.fork(a)
    before = state(manager)
    with pytest.raises(OutOfPages, match="needs 2 pages for tokens of 1 sequences that share theirs, 1 of 4 are free and 0 cached"):
        manager.evict([b], [5])
    assert state(manager) == before
    assert manager.evict([b], [4]).dst_page_table.tolist() == [[3]]


def test_ids_of_evicted_tokens_are_taken_and_not_kept():
    manager = manage()
    seq = manager.add([0])
    manager.step([seq], counts=[6])
    manager.evict([seq], [2])
    manager.step([seq], counts=[2])
    manager.identify(seq, [1, 2, 3, 4, 5, 6, 7])
    assert manager.tokens(seq).tolist() == [-1, -1, 7, -1]
    manager.identify(seq, [8])
    assert manager.step({seq: [9]}).positions.tolist() == [8] and manager.match([*range(1, 10), 0]) == 0


def test_tensors_have_the_dtypes_that_compact_kv_takes():
    manager = manage()
    seq, _ = serve(manager, [1, 2, 3])
    tensors = manager.evict(torch.tensor([seq]), np.array([2])).tensors("cpu")
    assert {getattr(tensors, name).dtype for name in ("page_table", "seq_lens", "keep_lens", "dst_page_table")} == {torch.int32}
    assert (tensors.seq_lens.tolist(), tensors.keep_lens.tolist()) == ([3], [2])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.evict([0], [6]), RangeError, "lengths: expected at most 5, what sequence 0 holds, got 6"),
        (lambda m: m.evict([0], [-1]), RangeError, "lengths: expected 0 or more, got -1"),
        (lambda m: m.evict([0], [1.5]), DTypeError, "lengths: expected integers"),
        (lambda m: m.evict([0], [1, 2]), ShapeError, "lengths: expected 1, one for each sequence, got 2"),
        (lambda m: m.evict([0, 0], [1, 2]), RangeError, "seqs: expected each sequence once"),
        (lambda m: m.evict([7], [1]), RangeError, "seq: expected a living sequence, got 7"),
        (lambda m: manage(window=4).evict([], []), UnsupportedError, "evict: .* manage without window"),
        (lambda m: manage(tail_pool=PagePool(8)).evict([], []), UnsupportedError, "evict: .* manage without tail_pool"),
    ],
)
def test_misuse_of_evict_raises_and_changes_nothing(call, error, message):
    manager = manage()
    serve(manager, [1, 2, 3, 4, 5])
    before = state(manager)
    with pytest.raises(error, match=message):
        call(manager)
    assert state(manager) == before
