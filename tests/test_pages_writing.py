"""CacheManager: forks, copies, truncation, and tokens whose ids come later."""


import pytest
from served import manage, serve, state

from tkv.errors import RangeError

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
