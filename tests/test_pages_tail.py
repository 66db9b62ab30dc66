"""CacheManager with a pool for tails: what is converted and when, what prompts find, what can be undone."""

import numpy as np
import pytest
from served import serve
from tails import aged, everything, manage

from tkv.errors import RangeError
from tkv.pages import TailBatch

# Conversions


@pytest.mark.parametrize("tail_len", range(1, 10))
def test_every_new_token_sees_the_newest_keys_as_they_were_written(tail_len):
    manager = manage(tail_len=tail_len)
    seq = manager.add([])
    for length in range(40):
        batch = manager.step({seq: [length]})
        # Converted as soon as a page has none of the newest `tail_len` tokens, the new one included.
        assert batch.seq_lens[0] == max(0, (length + 1 - tail_len) // 4 * 4)
        assert batch.seq_lens[0] + batch.tail_lens[0] == length + 1 and batch.tail_lens[0] >= min(tail_len, length + 1)
        assert len(batch.tail_page_table[0]) == manager.tail_pool.num_used == -(-batch.tail_lens[0] // 4)


def test_the_first_of_many_new_tokens_sees_the_newest_keys_as_they_were_written_too():
    manager = manage(tail_len=5)
    seq, _ = serve(manager, list(range(9)))
    batch = manager.step({seq: list(range(9, 21))})
    assert batch.prefix_lens.tolist() == [9] and batch.seq_lens.tolist() == [4] and batch.tail_lens.tolist() == [17]


def test_drafts_convert_nothing_that_their_rejection_would_need():
    manager = manage(tail_len=4)
    seq, _ = aged(manager, list(range(11)))
    before = manager.pages(seq).size
    manager.append(seq, count=30)
    assert manager.pages(seq).size == before + 1 == 2
    manager.truncate(seq, 12)
    assert manager.length(seq) == 12 and manager.tail_pages(seq).size == 1


def test_a_step_says_which_pages_are_converted_and_where_all_keys_are():
    manager = manage(tail_len=4)
    seq, _ = serve(manager, list(range(10)))
    batch = manager.step({seq: [10]})
    assert isinstance(batch, TailBatch)
    assert batch.conversions.tolist() == [[0, 0]] and batch.conversions.dtype == np.int32
    assert batch.page_table.tolist() == [[0]] and batch.seq_lens.tolist() == batch.kv_start.tolist() == [4]
    assert batch.tail_page_table.tolist() == [[1, 2]] and batch.tail_lens.tolist() == [7]
    assert batch.slot_mapping.tolist() == [10] and batch.positions.tolist() == [10] and batch.prefix_lens.tolist() == [10]
    assert (batch.max_q_len, batch.max_seq_len, batch.max_tail_len) == (1, 4, 7)
    assert manager.stats().conversions == 1


def test_a_page_that_is_converted_may_be_written_in_the_same_step():
    manager = manage(num_tail=3, tail_len=4)
    seq, _ = serve(manager, list(range(12)))
    batch = manager.step({seq: [12, 13]})
    # The tail's pool is full: without those pages there would be no room.
    assert batch.conversions[:, 0].tolist() == [0, 1] and set(batch.tail_page_table[0]) <= {0, 1, 2}
    assert batch.slot_mapping.tolist() == [4 * batch.tail_page_table[0, -1], 4 * batch.tail_page_table[0, -1] + 1]
    assert batch.tail_page_table[0, -1] in (0, 1)


def test_a_long_prompt_is_converted_by_the_step_after_it():
    manager = manage(tail_len=4)
    seq = manager.add(range(50))
    batch = manager.step({seq: range(50)})
    assert batch.conversions.shape == (0, 2) and batch.page_table.shape == (1, 0) and batch.tail_lens.tolist() == [50]
    batch = manager.step({seq: [50]})
    assert len(batch.conversions) == 11 and batch.page_table.shape == (1, 11) and manager.tail_pool.num_used == 2


def test_a_step_without_new_tokens_converts():
    manager = manage(tail_len=4)
    seq, _ = serve(manager, list(range(12)))
    batch = manager.step({seq: []})
    assert len(batch.conversions) == 2 and batch.slot_mapping.size == 0 and batch.tail_lens.tolist() == [4]
    assert manager.step({seq: []}).conversions.size == 0


def test_only_sequences_of_the_step_are_converted():
    manager = manage(tail_len=4)
    a, _ = serve(manager, list(range(12)))
    b, _ = serve(manager, list(range(100, 112)))
    batch = manager.step({b: [9]})
    assert len(batch.conversions) == 2 and manager.pages(a).size == 0 and manager.tail_pages(a).tolist() == [0, 1, 2]


# Forks


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_page_that_sequences_of_a_step_share_is_converted_once(told, prefix_cache):
    manager = manage(tail_len=4, prefix_cache=prefix_cache)
    a = manager.add([])
    manager.append(a, list(range(10))) if told else manager.append(a, count=10)
    b, c = manager.fork(a), manager.fork(a)
    batch = manager.step([a, b, c], counts=[1, 1, 1])
    assert batch.conversions.tolist() == [[0, 0]] and batch.page_table.tolist() == [[0], [0], [0]]
    assert manager.pool.refs[0] == 3 + (told and prefix_cache) and manager.stats().pages_shared == 1
    # The page that is not whole is copied for two of them; that which was converted is free to be one of the copies.
    assert batch.copies[:, 0].tolist() == [2, 2] and 0 in batch.copies[:, 1] and manager.tail_pool.num_used == 1 + 3
    manager.free(a)
    manager.free(b)
    assert manager.pages(c).tolist() == [0] and manager.pool.refs[0] == 1 + (told and prefix_cache)


def test_a_fork_that_comes_later_takes_the_page_that_was_made_before():
    manager = manage(tail_len=4)
    a, _ = serve(manager, list(range(10)))
    b = manager.fork(a)
    manager.step({a: [10]})
    assert manager.pages(b).size == 0 and manager.tail_pages(b).tolist() == [0, 1, 2]
    batch = manager.step({b: [11]})
    assert batch.conversions.size == 0 and batch.page_table.tolist() == [manager.pages(a).tolist()]
    assert manager.tail_pool.refs[0] == 0


def test_a_fork_without_ids_that_comes_later_converts_its_page_itself():
    manager = manage(tail_len=4)
    a = manager.add([])
    manager.append(a, count=10)
    b = manager.fork(a)
    manager.append(a, count=1)
    assert manager.tail_pool.refs[0] == 1
    assert manager.append(b, count=1).conversions.tolist() == [[0, 1]] and manager.tail_pool.refs[0] == 0
    # Identified, they share the first one.
    manager.identify(a, list(range(4)))
    manager.identify(b, list(range(4)))
    assert manager.pages(a).tolist() == manager.pages(b).tolist() == [0] and manager.pool.num_used == 1


def test_a_shared_page_of_the_tail_is_copied_by_who_writes_it():
    manager = manage(tail_len=4)
    a, _ = serve(manager, [1, 2])
    b = manager.fork(a)
    batch = manager.step([a, b], tokens=[3, 4])
    assert batch.copies.tolist() == [[0, 1]] and batch.copy_lens.tolist() == [2] and batch.tail_page_table.tolist() == [[1], [0]]


def test_a_page_is_converted_for_one_and_copied_for_another():
    manager = manage(tail_len=1)
    a, _ = serve(manager, [1, 2, 3, 4])
    b = manager.fork(a)
    manager.truncate(b, 3)
    batch = manager.step([a, b], tokens=[5, 9])
    # Both read page 0, so nothing may be written there in this step.
    assert batch.conversions.tolist() == [[0, 0]] and batch.copies[:, 0].tolist() == [0] and batch.copy_lens.tolist() == [3]
    assert 0 not in batch.tail_page_table and manager.tail_pool.refs[0] == 0


def test_equal_prompts_of_a_step_are_converted_once():
    manager = manage(tail_len=4)
    prompt = list(range(10))
    a, b = manager.add(prompt), manager.add(prompt)
    manager.step({a: prompt, b: prompt})
    batch = manager.step([a, b], tokens=[20, 30])
    assert batch.conversions.tolist() == [[0, 0]] and batch.page_table.tolist() == [[0], [0]] and manager.tail_pool.num_used == 4


@pytest.mark.parametrize("known", [0, 2, 4, 6])
def test_tokens_without_ids_are_not_taken_for_each_other(known):
    manager = manage(tail_len=1)
    seqs = [manager.add([]) for _ in range(2)]
    if known:
        manager.step(seqs, tokens=[*range(known)] * 2, counts=[known] * 2)
    manager.step(seqs, counts=[13 - known] * 2)
    batch = manager.step(seqs, counts=[0, 0])
    assert manager.stats().conversions == 6 - known // 4
    assert not set(batch.page_table[0, known // 4 :]) & set(batch.page_table[1, known // 4 :])
    manager.identify(seqs[0], range(known, 8))
    manager.identify(seqs[1], range(known, 7))
    assert manager.tokens(seqs[1]).tolist() == [*range(7), *[-1] * 6] and manager.match(range(20)) == 8


def test_known_tokens_behind_unknown_ones_have_no_name():
    manager = manage(tail_len=1)
    a, b = manager.add([]), manager.add([])
    manager.step([a, b], counts=[5, 5])
    manager.step([a, b], counts=[0, 0])
    # Of each the first page is converted without ids; then all of what follows is told.
    manager.identify(a, range(5))
    manager.identify(b, [9, 9, 9, 9, 4])
    batch = manager.step({a: [5, 6, 7, 8], b: [5, 6, 7, 8]})
    batch = manager.step([a, b], counts=[0, 0])
    assert len(batch.conversions) == 2 and not set(batch.page_table[0]) & set(batch.page_table[1])


# What prompts find


def test_a_prompt_finds_whole_converted_pages_and_nothing_of_a_tail():
    manager = manage(tail_len=4)
    seq, _ = aged(manager, list(range(14)))
    assert manager.match(range(20)) == 8 and manager.pages(seq).size == 2
    second = manager.add(range(20))
    batch = manager.step({second: range(8, 20)})
    assert batch.page_table.tolist() == [manager.pages(seq).tolist()] and batch.prefix_lens.tolist() == [8]
    assert batch.tail_lens.tolist() == [12] and batch.positions.tolist() == list(range(8, 20)) and batch.copies.size == 0
    # A page that is to be converted later and is there by then is not made again.
    assert len(manager.step([seq, second], tokens=[14, 20]).conversions) == 2 and manager.pages(second).size == 4


def test_no_part_of_a_page_is_found():
    manager = manage(tail_len=1, partial_tokens=1)
    aged(manager, list(range(9)))
    assert manager.match([0, 1, 2, 3, 4, 5, 6, 99, 99]) == 4


@pytest.mark.parametrize("length", [4, 5, 8, 9])
def test_a_prompt_is_never_found_as_a_whole(length):
    manager = manage(tail_len=1)
    aged(manager, list(range(20)))
    assert manager.length(manager.add(range(length))) == (length - 1) // 4 * 4


def test_a_freed_sequence_leaves_what_was_converted():
    manager = manage(tail_len=4)
    seq, _ = aged(manager, list(range(14)))
    manager.free(seq)
    assert manager.tail_pool.num_used == 0 and manager.stats().pages_cached == 2 and manager.match(range(14)) == 8


def test_other_keys_find_nothing():
    manager = manage(tail_len=4)
    aged(manager, list(range(14)), extra_keys="a")
    assert manager.match(range(14)) == 0 and manager.match(range(14), extra_keys="a") == 8
    other, _ = serve(manager, list(range(14)), extra_keys="b")
    assert len(manager.step({other: []}).conversions) == 2


def test_after_clear_what_lives_goes_on_and_is_not_found():
    manager = manage(tail_len=4)
    seq, _ = aged(manager, list(range(14)))
    manager.clear()
    batch = manager.step({seq: [14, 15, 16, 17]})
    assert batch.seq_lens.tolist() == [8] and manager.step({seq: [18]}).seq_lens.tolist() == [12]
    assert manager.match(range(14)) == 0


def test_cached_pages_are_evicted_for_conversions_from_the_end_of_a_chain():
    manager = manage(num_pages=4, tail_len=1)
    manager.free(aged(manager, list(range(13)))[0])
    aged(manager, [7] * 5)
    aged(manager, [8] * 5)
    assert manager.match(range(13)) == 8 and manager.stats().evictions == 1


# Truncation


def test_a_tail_is_cut_anywhere():
    manager = manage(tail_len=4)
    seq, _ = aged(manager, list(range(14)))
    manager.truncate(seq, 9)
    assert manager.tokens(seq).tolist() == list(range(9)) and manager.pages(seq).size == 2 and manager.tail_pages(seq).size == 1
    batch = manager.step({seq: [20]})
    assert batch.tail_lens.tolist() == [2] and batch.seq_lens.tolist() == [8]
    manager.truncate(seq, 8)
    assert manager.tail_pages(seq).size == 0 and manager.step({seq: [5]}).positions.tolist() == [8]


@pytest.mark.parametrize("length", [0, 4, 8])
def test_whole_converted_pages_are_dropped(length):
    manager = manage(tail_len=4)
    seq, _ = aged(manager, list(range(18)))
    manager.truncate(seq, length)
    assert manager.length(seq) == length and manager.pages(seq).size == length // 4 == manager.pool.num_used
    assert manager.tail_pool.num_used == 0 and manager.match(range(18)) == length
    # The next tokens are in the tail, fewer than `tail_len` as yet.
    batch = manager.step({seq: [50]})
    assert batch.seq_lens.tolist() == [length] and batch.tail_lens.tolist() == [1]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 11])
def test_a_converted_page_cannot_be_cut(length):
    manager = manage(tail_len=4)
    seq, _ = aged(manager, list(range(18)))
    before = everything(manager)
    message = "length: expected 12 or more, or a multiple of the page size 4, got"
    with pytest.raises(RangeError, match=f"{message} {length}: .* converted pages, which cannot be written on"):
        manager.truncate(seq, length)
    assert everything(manager) == before


def test_dropped_pages_stay_with_a_fork():
    manager = manage(tail_len=4)
    a, _ = aged(manager, list(range(18)))
    b = manager.fork(a)
    manager.truncate(b, 4)
    assert manager.tokens(a).tolist() == list(range(18)) and manager.match(range(18)) == 12


# Ids that come later


def test_tokens_in_both_parts_are_identified_in_order():
    manager = manage(tail_len=4)
    seq = manager.add([])
    manager.append(seq, count=10)
    manager.step([seq], counts=[0])
    assert manager.pages(seq).size == 1 and manager.tokens(seq).tolist() == [-1] * 10
    with pytest.raises(RangeError, match="sequence 0 has 10 tokens without ids, got 11"):
        manager.identify(seq, range(11))
    manager.identify(seq, range(3))
    assert manager.tokens(seq).tolist() == [0, 1, 2, *[-1] * 7] and manager.match(range(9)) == 0
    with pytest.raises(RangeError, match="sequence 0 has tokens without ids"):
        manager.step({seq: [1]})
    manager.identify(seq, range(3, 10))
    assert manager.tokens(seq).tolist() == list(range(10)) and manager.match(range(9)) == 4
    manager.step({seq: [10, 11, 12]})
    assert manager.tokens(seq).tolist() == list(range(13))


def test_what_is_known_of_a_tail_stays_known_where_it_goes():
    manager = manage(tail_len=4)
    seq, _ = serve(manager, list(range(10)))
    manager.append(seq, count=3)
    assert manager.tokens(seq).tolist() == [*range(10), -1, -1, -1] and manager.pages(seq).size == 1
    manager.identify(seq, [10, 11, 12])
    assert manager.tokens(seq).tolist() == list(range(13))


def test_ids_that_contradict_a_fork_in_the_tail_are_refused():
    manager = manage(tail_len=4)
    a = manager.add([])
    manager.append(a, count=10)
    manager.step([a], counts=[0])
    b = manager.fork(a)
    manager.identify(a, range(10))
    before = everything(manager)
    with pytest.raises(RangeError, match="other ids for the same tokens"):
        manager.identify(b, [*range(9), 77])
    with pytest.raises(RangeError, match="other ids for the same tokens"):
        manager.identify(b, [77])
    assert everything(manager) == before
