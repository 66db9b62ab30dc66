"""PagePool and what CacheManager finds: references, keys, matching."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import effort
from served import manage, serve

from tkv.errors import DTypeError, OutOfPages, RangeError, TkvError
from tkv.pages import PagePool
from tkv.pages.prefix import encode_keys, page_hash, root_hash

# The pool


def test_pages_are_free_again_when_their_last_reference_goes():
    pool = PagePool(3)
    pages = pool.allocate(3)
    pool.share(pages[:2])
    assert pool.release(pages).tolist() == [2] and pool.refs.tolist() == [1, 1, 0]
    assert (pool.num_free, pool.num_used, pool.num_shared, pool.peak_used) == (1, 2, 0, 3)
    assert pool.release([0, 1]).tolist() == [0, 1] and pool.num_free == 3
    assert sorted(pool.allocate(3).tolist()) == [0, 1, 2]


def test_the_page_freed_last_is_taken_first():
    pool = PagePool(4)
    pool.allocate(4)
    pool.release(1)
    pool.release(3)
    assert pool.allocate(2).tolist() == [3, 1]


def test_a_page_named_twice_gets_and_loses_two_references():
    pool = PagePool(2)
    pool.allocate(1)
    pool.share([0, 0])
    assert pool.refs[0] == 3
    assert pool.release([0, 0, 0]).tolist() == [0]


def test_refs_are_a_view_that_cannot_be_written():
    pool = PagePool(2)
    refs = pool.refs
    pool.allocate(1)
    assert refs[0] == 1
    with pytest.raises(ValueError, match="read-only"):
        refs[0] = 5


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda pool: pool.release(3), RangeError, "page 3 is free; only used pages"),
        (lambda pool: pool.release([0, 3]), RangeError, "page 3 is free"),
        (lambda pool: pool.release([1, 0, 0]), RangeError, "page 0 has 1 references, 2 were to be released"),
        (lambda pool: pool.release([0, 8]), RangeError, "from 0 to 7, got 8"),
        (lambda pool: pool.release(-1), RangeError, "from 0 to 7, got -1"),
        (lambda pool: pool.release([0.0]), DTypeError, r"expected an int or a list of them, got \[0.0\]"),
        (lambda pool: pool.release([True]), DTypeError, "expected an int"),
        (lambda pool: pool.release([[0]]), DTypeError, "expected an int"),
        (lambda pool: pool.share(5), RangeError, "page 5 is free"),
        (lambda pool: pool.share([0, 99]), RangeError, "got 99"),
        (lambda pool: pool.allocate(6), OutOfPages, "needs 6 pages, 5 of 8 are free"),
        (lambda pool: pool.allocate(-1), RangeError, "count: expected at least 0, got -1"),
        (lambda pool: pool.allocate(1.0), DTypeError, "count: expected an int"),
    ],
)
def test_misuse_of_a_pool_raises_and_changes_nothing(call, error, message):
    pool = PagePool(8)
    pool.allocate(3)
    with pytest.raises(error, match=message):
        call(pool)
    assert pool.refs.tolist() == [1, 1, 1, 0, 0, 0, 0, 0] and pool.num_free == 5
    assert pool.allocate(5).tolist() == [3, 4, 5, 6, 7]


def test_out_of_pages_is_a_state_and_not_wrong_input():
    assert issubclass(OutOfPages, TkvError) and issubclass(OutOfPages, RuntimeError) and not issubclass(OutOfPages, ValueError)


def test_a_pool_may_be_empty():
    pool = PagePool(0)
    assert pool.allocate(0).tolist() == pool.release([]).tolist() == []
    with pytest.raises(RangeError, match="num_pages"):
        PagePool(2**31)


# Extra keys


def test_no_two_keys_have_the_same_bytes():
    fields = [None, False, True, 0, 1, -1, 0.0, 1.0, "", "0", "None", b"", b"0", "a", "b", "ab", 255, -256, 256, 2**70]
    keys = [*fields, *((field,) for field in fields), *itertools.product(fields, fields), (("a",), "b"), ("a", ("b",)), (("a", "b"),), ()]
    assert len({encode_keys(key) for key in keys}) == len(keys)
    assert len({root_hash(key) for key in keys}) == len(keys)


keys = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
    lambda inner: st.tuples(inner, inner),
)


@effort(100)
@given(keys, keys)
def test_keys_have_the_same_bytes_only_if_they_are_the_same(a, b):
    # Python takes 0, False and 0.0 for equal; their texts differ.
    assert (encode_keys(a) == encode_keys(b)) == (repr(a) == repr(b))


def test_no_keys_can_stand_for_tokens():
    tokens = np.arange(4)
    assert page_hash(root_hash("a"), tokens) != page_hash(root_hash("b"), tokens)
    assert page_hash(root_hash(None), tokens) not in (root_hash(tokens.tobytes()), page_hash(root_hash(None), tokens[:3]))


def test_prompts_with_other_keys_find_nothing():
    manager = manage()
    every = [None, "", 0, False, (), (None,), ("",), "ab", ("ab",), ("a", "b"), ("", "ab")]
    for key in every:
        assert serve(manager, [1, 2, 3, 4, 5], extra_keys=key)[1] == 0
        manager.free(manager.seqs[0])
    assert all(manager.match([1, 2, 3, 4, 5], extra_keys=key) == 4 for key in every[-3:])


# Matching


def test_a_prompt_finds_whole_pages_and_part_of_the_next():
    manager = manage()
    first, _ = serve(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    second, found = serve(manager, [1, 2, 3, 4, 5, 6, 0, 0])
    assert found == 6
    assert manager.pages(first).tolist() == [0, 1, 2] and manager.pages(second).tolist() == [0, 3]


def test_the_page_that_is_found_in_part_is_copied_before_it_is_written():
    manager = manage()
    serve(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    seq = manager.add([1, 2, 3, 4, 5, 6, 0, 0])
    assert manager.pages(seq).tolist() == [0, 1]
    batch = manager.step({seq: [0, 0]})
    assert batch.copies.tolist() == [[1, 3]] and batch.copy_lens.tolist() == [2] and batch.copies.dtype == np.int32
    assert batch.slot_mapping.tolist() == [14, 15] and batch.filled.tolist() == [3]


@pytest.mark.parametrize("length", range(1, 10))
def test_a_prompt_is_never_found_as_a_whole(length):
    manager = manage()
    prompt = list(range(length))
    serve(manager, prompt)
    seq, found = serve(manager, prompt)
    assert found == length - 1 and manager.tokens(seq).tolist() == prompt


def test_an_empty_prompt_is_a_sequence_without_tokens():
    manager = manage()
    seq, found = serve(manager, [])
    assert found == 0 and manager.pages(seq).size == 0 and manager.tokens(seq).size == 0
    batch = manager.step([seq], tokens=[7])
    assert batch.prefix_lens.tolist() == [0] and batch.seq_lens.tolist() == [1]


def test_the_last_page_of_a_living_sequence_is_found():
    manager = manage()
    first, _ = serve(manager, [1, 2, 3, 4, 5, 6])
    manager.append(first, [7])
    assert manager.match([1, 2, 3, 4, 5, 6, 7, 8]) == 7
    assert manager.match([1, 2, 3, 4, 5, 9]) == 5
    assert manager.match([1, 2, 9]) == 2


def test_the_last_page_of_a_freed_sequence_is_found_and_written_on_without_a_copy():
    manager = manage()
    first, _ = serve(manager, [1, 2, 3, 4, 5, 6])
    manager.free(first)
    second = manager.add([1, 2, 3, 4, 5, 6, 7])
    batch = manager.step({second: [7]})
    assert batch.prefix_lens.tolist() == [6] and batch.copies.size == 0 and batch.page_table.tolist() == [[0, 1]]
    manager.free(second)
    assert manager.match([1, 2, 3, 4, 5, 6, 7, 8]) == 7 and manager.stats().pages_cached == 2


def test_of_a_living_and_a_freed_page_the_one_that_needs_no_copy_is_taken():
    manager = manage()
    ends, goes_on = manager.add([1, 2]), manager.add([1, 2, 9])
    manager.step({ends: [1, 2], goes_on: [1, 2, 9]})
    manager.free(ends)
    seq, found = serve(manager, [1, 2, 7])
    assert found == 2 and manager.pages(seq).tolist() == [0] and manager.stats().copies == 0


def test_of_many_freed_pages_the_one_that_needs_no_copy_is_taken():
    manager = manage()
    prompts = [[1, 2], [1, 2, 5], [1, 2, 6], [1, 2, 8], [1, 2, 9]]
    seqs = [manager.add(prompt) for prompt in prompts]
    manager.step(dict(zip(seqs, prompts)))
    for seq in seqs:
        manager.free(seq)
    assert manager.stats().pages_cached == 5
    seq, found = serve(manager, [1, 2, 7, 0])
    assert found == 2 and manager.pages(seq).tolist() == [0] and manager.stats().copies == 0


def test_the_longest_of_several_matches_is_taken():
    manager = manage(page_size=8)
    for tail in ([9], [3, 9], [3, 4, 5, 9], [3, 4, 9]):
        manager.free(serve(manager, [1, 2, *tail])[0])
    assert manager.match([1, 2, 3, 4, 5, 6]) == 5


def test_what_is_kept_in_part_already_is_not_kept_twice():
    manager = manage(page_size=8)
    manager.free(serve(manager, [1, 2, 3, 4])[0])
    twin = manager.add([1, 2, 3])
    manager.step({twin: [3]})
    manager.free(twin)
    assert manager.stats().pages_cached == 1


def test_prompts_added_before_a_step_are_both_computed_and_share_pages_after_it():
    manager = manage()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    a, b = manager.add(prompt), manager.add(prompt)
    batch = manager.step({a: prompt, b: prompt})
    assert batch.prefix_lens.tolist() == [0, 0]
    # What was handed out is disjoint; from the next step on both read the pages of the first.
    assert not set(batch.page_table[0]) & set(batch.page_table[1])
    assert manager.pages(a)[:2].tolist() == manager.pages(b)[:2].tolist() == batch.page_table[0, :2].tolist()
    assert manager.stats().pages_used == 4 and manager.pool.num_used == 4


def test_nothing_is_found_before_it_was_handed_out():
    manager = manage()
    seq = manager.add([1, 2, 3, 4, 5, 6])
    assert manager.match([1, 2, 3, 4, 5, 6]) == 0
    manager.step({seq: [1, 2, 3]})
    assert manager.match([1, 2, 3, 4, 5, 6]) == 3
    manager.step({seq: [4, 5, 6]})
    assert manager.match([1, 2, 3, 4, 5, 6]) == 5


def test_pages_taken_by_the_token():
    manager = manage(page_size=1)
    serve(manager, [1, 2, 3])
    assert manager.match([1, 2, 3]) == 2 and manager.match([1, 2, 3, 4]) == 3 and manager.match([1, 3]) == 1
    assert manager.stats().copies == 0


def test_partial_tokens_bounds_what_is_worth_a_copy():
    for least, found in ((1, 6), (2, 6), (3, 4), (None, 4)):
        manager = manage(partial_tokens=least)
        serve(manager, [1, 2, 3, 4, 5, 6, 7, 8])
        assert manager.match([1, 2, 3, 4, 5, 6, 0]) == found


def test_without_a_prefix_cache_nothing_is_found_or_kept():
    manager = manage(prefix_cache=False)
    first, _ = serve(manager, [1, 2, 3, 4, 5])
    assert serve(manager, [1, 2, 3, 4, 5])[1] == 0
    manager.free(first)
    assert manager.stats().pages_cached == 0 and manager.pool.num_used == 2


def test_a_match_that_ends_where_the_table_does():
    manager = manage(page_size=1)
    serve(manager, list(range(8)))
    assert manager.match(list(range(10))) == 8


def test_a_page_that_was_written_on_is_free_when_another_has_its_tokens():
    manager = manage()
    manager.free(serve(manager, [1, 2])[0])
    a, b = manager.add([1, 2, 3, 4, 5]), manager.add([1, 2, 3, 4, 9])
    manager.step({b: [3, 4, 9]})
    manager.step({a: [3, 4, 5]})
    assert manager.pages(a)[0] == manager.pages(b)[0] == 1
    assert manager.pool.num_used == 3 and manager.stats().pages_cached == 0


def test_a_forked_sequence_is_found_after_the_first_has_gone():
    manager = manage()
    first, _ = serve(manager, [1, 2, 3, 4, 5, 6])
    manager.fork(first)
    manager.free(first)
    assert manager.match([1, 2, 3, 4, 5, 6, 7]) == 6


def test_clear_forgets_what_is_cached_and_what_lives():
    manager = manage()
    manager.free(serve(manager, [9] * 6)[0])
    seq, _ = serve(manager, [1, 2, 3, 4, 5])
    manager.clear()
    assert manager.match([1, 2, 3, 4, 5, 6]) == manager.match([9] * 6) == 0 and manager.pool.num_used == 2
    manager.step({seq: [6, 7, 8, 9]})
    twin = manager.fork(seq)
    manager.free(seq)
    assert manager.match([1, 2, 3, 4, 5, 6]) == 0
    # With new weights the same prompt is computed anew, and what comes before is not mixed with what came after.
    serve(manager, [1, 2, 3, 4, 5])
    assert manager.match([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 5
    manager.free(twin)
    assert manager.match([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 5
