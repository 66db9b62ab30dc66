"""PagePool and CacheManager: what is shared, copied, kept, evicted and refused."""

import itertools
import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import effort

from tkv.errors import DTypeError, OutOfPages, RangeError, ShapeError, TkvError
from tkv.pages import CacheManager, PagePool
from tkv.pages.prefix import encode_keys, page_hash, root_hash


def manage(num_pages=32, page_size=4, **options):
    return CacheManager(PagePool(num_pages), page_size, **options)


def serve(manager, prompt, **options):
    """A sequence whose whole prompt is computed, and how much of it was found."""
    seq = manager.add(prompt, **options)
    found = manager.length(seq)
    manager.step({seq: prompt[found:]})
    return seq, found


def state(manager):
    """All that a call that raises must leave as it was."""
    index = manager._ledger.index
    sequences = [(seq, manager.pages(seq).tolist(), manager.tokens(seq).tolist()) for seq in manager.seqs]
    return sequences, manager.pool.refs.tolist(), manager.pool.num_free, index.claims.tolist(), list(index._idle), manager.stats()


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


# Forks and copies


def test_forks_share_pages_until_they_write():
    manager = manage()
    a, _ = serve(manager, [1, 2, 3, 4, 5])
    b, c = manager.fork(a), manager.fork(a)
    assert manager.pool.refs[1] == 3 and manager.stats().pages_shared == 2
    batch = manager.step([a, b, c], tokens=[6, 7, 8])
    # Two get copies, the last has the page to itself by then.
    assert batch.copies.tolist() == [[1, 2], [1, 3]] and batch.copy_lens.tolist() == [1, 1]
    assert batch.page_table.tolist() == [[0, 2], [0, 3], [0, 1]]
    assert [manager.tokens(seq).tolist()[4:] for seq in (a, b, c)] == [[5, 6], [5, 7], [5, 8]]
    assert manager.step([a, b, c], tokens=[1, 1, 1]).copies.size == 0


def test_a_fork_at_the_end_of_a_page_needs_no_copy():
    manager = manage()
    a, _ = serve(manager, [1, 2, 3, 4])
    b = manager.fork(a)
    assert manager.step([a, b], tokens=[5, 6]).copies.size == 0


def test_a_sequence_in_a_step_without_new_tokens_copies_nothing():
    manager = manage()
    a, _ = serve(manager, [1, 2, 3])
    b = manager.fork(a)
    batch = manager.step({a: [], b: []})
    assert batch.copies.size == 0 and batch.slot_mapping.size == 0 and batch.cu_seqlens.tolist() == [0, 0, 0]
    assert batch.page_table.tolist() == [[0], [0]] and batch.max_q_len == 0


def test_forks_that_go_on_alike_share_again_when_the_page_is_full():
    manager = manage()
    a, _ = serve(manager, [1, 2, 3])
    b = manager.fork(a)
    manager.step([a, b], tokens=[4, 4])
    assert manager.pages(a).tolist() == manager.pages(b).tolist() and manager.pool.num_used == 1


# Truncation


def test_rejected_drafts_make_room_for_others_in_the_same_slots():
    manager = manage()
    seq, _ = serve(manager, [1, 2, 3])
    drafted = manager.step({seq: [4, 5, 6, 7, 8, 9]})
    manager.truncate(seq, 5)
    assert manager.pages(seq).size == 2 and manager.pool.num_used == 2
    batch = manager.step({seq: [10]})
    assert batch.slot_mapping[0] == drafted.slot_mapping[2] and batch.copies.size == 0
    assert manager.tokens(seq).tolist() == [1, 2, 3, 4, 5, 10]


def test_rejected_drafts_are_not_found():
    manager = manage()
    seq, _ = serve(manager, [1, 2, 3])
    manager.step({seq: [4, 5, 6, 7, 8, 9]})
    manager.truncate(seq, 2)
    assert manager.match([1, 2, 3, 4, 5, 6]) == 2
    manager.step({seq: [0, 0, 0]})
    assert manager.match([1, 2, 3, 4, 5, 6]) == 2 and manager.match([1, 2, 0, 0, 0, 0]) == 5


def test_truncating_into_a_page_that_others_have_leaves_it_to_them():
    manager = manage()
    a, _ = serve(manager, [1, 2, 3, 4, 5, 6, 7, 8])
    b = manager.fork(a)
    manager.truncate(b, 6)
    assert manager.match([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8
    batch = manager.step({b: [0]})
    assert batch.copies.tolist() == [[1, 2]] and batch.copy_lens.tolist() == [2]
    assert manager.tokens(a).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert manager.match([1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8 and manager.match([1, 2, 3, 4, 5, 6, 0, 9]) == 7


def test_truncating_into_a_page_that_cached_ones_follow_leaves_it_in_the_cache():
    manager = manage()
    manager.free(serve(manager, list(range(12)))[0])
    seq = manager.add([*range(8), 99])
    manager.truncate(seq, 6)
    assert manager.match(list(range(13))) == 12
    assert manager.step({seq: [0]}).copies.tolist() == [[1, 3]]
    assert manager.match(list(range(13))) == 12


def test_truncating_to_nothing_gives_all_pages_back():
    manager = manage()
    seq, _ = serve(manager, list(range(10)))
    manager.truncate(seq, 0)
    assert manager.pool.num_used == 0 and manager.length(seq) == 0
    assert manager.step({seq: [1]}).prefix_lens.tolist() == [0]


def test_a_fork_is_not_cut_with_its_origin():
    manager = manage()
    a, _ = serve(manager, list(range(10)))
    b = manager.fork(a)
    manager.truncate(a, 1)
    assert manager.tokens(b).tolist() == list(range(10)) and manager.match(list(range(11))) == 10


def test_the_last_of_a_forks_writes_without_a_copy():
    manager = manage()
    a, _ = serve(manager, [1, 2, 3, 4, 5, 6])
    b = manager.fork(a)
    manager.truncate(b, 5)
    manager.free(a)
    assert manager.step({b: [0]}).copies.size == 0


# Tokens without ids


def test_tokens_without_ids_are_found_once_they_are_identified():
    manager = manage()
    seq = manager.add([1, 2, 3])
    manager.step({seq: [1, 2, 3]})
    batch = manager.step([seq], counts=[3])
    assert batch.slot_mapping.tolist() == [3, 4, 5] and batch.filled.tolist() == [0]
    assert manager.tokens(seq).tolist() == [1, 2, 3, -1, -1, -1] and manager.match([1, 2, 3, 4, 5]) == 3
    manager.identify(seq, [4, 5])
    assert manager.match([1, 2, 3, 4, 5, 6, 7]) == 5
    with pytest.raises(RangeError, match=r"sequence 0 has tokens without ids; call identify first"):
        manager.step({seq: [7]})
    manager.identify(seq, [6])
    assert manager.match([1, 2, 3, 4, 5, 6, 7]) == 6


def test_the_accepted_path_of_a_tree_is_named_after_the_rest_was_cut():
    manager = manage()
    seq, _ = serve(manager, [1, 2])
    manager.append(seq, count=7)
    manager.truncate(seq, 5)
    manager.identify(seq, [3, 4, 5])
    assert manager.tokens(seq).tolist() == [1, 2, 3, 4, 5] and manager.match([1, 2, 3, 4, 5, 6]) == 5


def test_a_sequence_with_unknown_tokens_is_kept_as_far_as_they_are_known():
    manager = manage()
    seq, _ = serve(manager, [1, 2, 3, 4, 5])
    manager.append(seq, count=6)
    manager.free(seq)
    assert manager.match([1, 2, 3, 4, 5, 0, 0]) == 5 and manager.stats().pages_cached == 2


def test_ids_that_contradict_a_fork_are_refused():
    manager = manage()
    a = manager.add([])
    manager.append(a, count=3)
    b = manager.fork(a)
    manager.identify(a, [1, 2, 3])
    before = state(manager)
    with pytest.raises(RangeError, match="other ids for the same tokens"):
        manager.identify(b, [1, 9])
    assert state(manager) == before
    manager.identify(b, [1, 2])
    assert manager.tokens(b).tolist() == [1, 2, -1]


def test_slots_that_are_used_again_forget_their_ids():
    manager = manage()
    seq, _ = serve(manager, [1, 2, 3])
    manager.truncate(seq, 1)
    manager.append(seq, count=2)
    manager.identify(seq, [8, 9])
    assert manager.tokens(seq).tolist() == [1, 8, 9]


def test_pages_identified_late_do_not_outlive_the_way_to_them():
    # A page follows in the index on a page that its last owner never had.
    manager = manage(num_pages=4, page_size=2, partial_tokens=None)
    a = manager.add([])
    manager.append(a, count=4)
    b = manager.fork(a)
    other, _ = serve(manager, [1, 2])
    manager.identify(a, [1, 2, 3, 4])
    assert manager.pages(a).tolist() == [2, 1] and manager.pages(b).tolist() == [0, 1]
    manager.free(other)
    manager.free(a)
    assert manager.match([1, 2, 3, 4, 5]) == 4
    late, _ = serve(manager, [7, 7, 7, 7])
    assert manager.match([1, 2, 3, 4, 5]) == 0 and manager.stats().evictions == 1
    assert manager._ledger.index.claims.tolist() == [0, 0, 2, 2]
    manager.identify(b, [1, 2, 3, 4])
    assert manager.match([1, 2, 3, 4, 5]) == 4
    manager.free(late)
    manager.free(b)
    assert manager.stats().pages_cached == 4


def test_a_page_that_is_freed_late_is_evicted_before_those_it_follows_on():
    manager = manage(num_pages=4, page_size=2, partial_tokens=None)
    a = manager.add([])
    manager.append(a, count=4)
    b = manager.fork(a)
    other, _ = serve(manager, [1, 2])
    manager.identify(a, [1, 2, 3, 4])
    for seq in (other, a, b):
        manager.free(seq)
    serve(manager, [7] * 6)
    assert manager.match([1, 2, 3, 4, 5]) == 2


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


def test_an_empty_batch():
    batch = manage().step({})
    assert batch.page_table.shape == (0, 0) and batch.cu_seqlens.tolist() == [0] and batch.tensors().slot_mapping.shape == (0,)


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
