"""CacheManager: what a step will need is told before, and one that did not fit says whether it ever can."""

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lives import KINDS, everything, lived
from problems import effort
from served import manage, serve
from tails import manage as manage_tails

from tkv.errors import DTypeError, OutOfPages, RangeError, ShapeError
from tkv.pages import PagePool


def numbers(error):
    return error.needed, error.available, error.held, error.total


@pytest.mark.parametrize("kind", KINDS)
@effort(60)
@given(size=st.sampled_from([1, 2, 3, 4]), seed=st.integers(0, 2**32), data=st.data())
def test_a_step_fits_if_what_is_missing_is_available(kind, size, seed, data):
    manager = lived(kind, size, seed)
    seqs = data.draw(st.permutations(manager.seqs))[: data.draw(st.integers(1, 6))]
    counts = [data.draw(st.sampled_from([0, 1, 2, 9, 30, 60])) for _ in seqs]
    before = everything(manager)
    missing, tail_missing = manager.missing(seqs, counts), manager.tail_missing(seqs, counts)
    assert everything(manager) == before
    tail_free = manager.tail_pool.num_free if manager.tail_pool else 0
    try:
        manager.step(seqs, counts=counts)
    except OutOfPages as error:
        is_tail = str(error).startswith("tail_pool")
        room, wanted = (tail_free, tail_missing) if is_tail else (manager.num_available, missing)
        assert error.needed - error.available == wanted - room > 0
        assert error.total == (manager.tail_pool if is_tail else manager.pool).num_pages
        never = error.needed + error.held > error.total
        manager.free([seq for seq in manager.seqs if seq not in seqs])
        try:
            manager.step(seqs, counts=counts)
        except OutOfPages as again:
            # The other of two pools may be what it ends at then.
            assert again.needed + again.held > again.total and (never or str(again)[:4] != str(error)[:4])
        else:
            assert not never
    else:
        assert missing <= before[0].pages_free + before[0].pages_cached and tail_missing <= tail_free


def test_what_is_missing_counts_copies_and_not_what_leaves_the_window():
    manager = manage(num_pages=8, page_size=4, window=4)
    seq, _ = serve(manager, range(10))
    assert manager.missing(seq, 0) == manager.missing(seq, 1) == manager.missing([seq], [2]) == 0
    # The first page leaves the window, and is enough for one of the two that are written.
    assert manager.missing(seq, 4) == 0 and manager.missing(seq, 7) == 1
    twin = manager.fork(seq)
    assert manager.missing(seq, 1) == 1 and manager.missing([seq, twin], [1, 1]) == 0
    assert manager.missing([seq, twin], [7, 7]) == 4
    assert manager.missing([], []) == manager.tail_missing(seq, 9) == 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.missing(7, 1), RangeError, "got 7, which was never added"),
        (lambda m: m.missing([0, 0], [1, 1]), RangeError, "expected each sequence once"),
        (lambda m: m.missing([0], [1, 1]), ShapeError, "counts: expected 1, one for each sequence, got 2"),
        (lambda m: m.missing(0, -1), RangeError, "counts: expected at least 0, got -1"),
        (lambda m: m.missing([0], [-1]), RangeError, "counts: expected 0 or more, got -1"),
        (lambda m: m.missing([0], 1), DTypeError, "counts: expected a list of integers, got 1"),
        (lambda m: m.missing(0, [1]), DTypeError, "counts: expected an int"),
        (lambda m: m.missing([0], [2**31]), RangeError, "tokens: expected sequences of at most 1073741824 tokens"),
    ],
)
def test_a_question_about_no_step_is_refused(call, error, message):
    manager = manage()
    serve(manager, [1, 2, 3])
    with pytest.raises(error, match=message):
        call(manager)


def test_out_of_pages_tells_not_now_from_never():
    manager = manage(num_pages=6)
    a, _ = serve(manager, range(8))
    b = manager.add(range(20, 40))
    with pytest.raises(OutOfPages) as refused:
        manager.step({b: range(20, 40)})
    assert numbers(refused.value) == (5, 4, 0, 6)
    with pytest.raises(OutOfPages) as refused:
        manager.step([a], counts=[20])
    assert numbers(refused.value) == (5, 4, 2, 6)


def test_an_eviction_that_does_not_fit_says_what_it_needs():
    manager = manage(num_pages=3)
    a, _ = serve(manager, range(12))
    manager.fork(a)
    with pytest.raises(OutOfPages) as refused:
        manager.evict([a], [7])
    assert numbers(refused.value) == (2, 0, 0, 3)


def test_a_pool_that_has_too_few_says_how_many():
    pool = PagePool(8)
    pool.allocate(3)
    with pytest.raises(OutOfPages) as refused:
        pool.allocate(9)
    assert numbers(refused.value) == (9, 5, 0, 8)


@pytest.mark.parametrize("through", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_the_numbers_of_out_of_pages_outlive_a_way_between_processes(through):
    error = through(OutOfPages("too few", needed=4, available=3, held=2, total=9))
    assert str(error) == "too few" and numbers(error) == (4, 3, 2, 9)


def test_a_page_that_a_fork_has_too_is_no_reason_for_never():
    manager = manage(num_pages=2)
    a, _ = serve(manager, range(7))
    b = manager.fork(a)
    with pytest.raises(OutOfPages) as refused:
        manager.step({a: [7]})
    assert numbers(refused.value) == (1, 0, 1, 2)
    manager.free(b)
    manager.step({a: [7]})


def test_cached_pages_that_a_tail_takes_over_are_no_room():
    manager = manage_tails(num_pages=2, tail_len=1)
    first, second, third = range(9), [*range(4), *range(50, 55)], [*range(4), *range(50, 59)]
    a, b, c = (manager.add(prompt) for prompt in (first, second, third))
    manager.step({a: first, b: second, c: third})
    manager.step({a: []})
    manager.free(a)
    # Two cached pages: the first becomes that of the next sequence, which needs another one, or two.
    assert (manager.missing(b, 0), manager.missing(c, 0), manager.num_available) == (2, 3, 2)
    with pytest.raises(OutOfPages) as refused:
        manager.step({c: []})
    assert numbers(refused.value) == (2, 1, 1, 2)
    manager.step({b: []})
