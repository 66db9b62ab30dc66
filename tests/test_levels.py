"""find_shared_levels against its rule, key by key; levels as arguments, and what is wrong with them."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import effort, test_device
from trees import grow

import tkv
from tkv.errors import DeviceError, DTypeError, RangeError, ShapeError, TkvError, UnsupportedError

DEVICE = test_device()
TENSORS = ("page_table", "lens", "starts", "cu_seqs", "seqs")


def groups_of(level):
    """(members, pages, number of keys, position of the first) of each group, all of them lists and ints."""
    ends = level.cu_seqs.tolist()
    members = [level.seqs[first:end].tolist() for first, end in itertools.pairwise(ends)]
    return list(zip(members, level.page_table.tolist(), level.lens.tolist(), level.starts.tolist(), strict=True))


def find(table, lens, page_size, **more):
    """Levels as lists of (members, pages, number of keys, position of the first)."""
    found = tkv.find_shared_levels(torch.tensor(table), torch.tensor(lens), page_size, **more)
    return [
        [(seqs, pages[: -(-num_keys // page_size)], num_keys, start) for seqs, pages, num_keys, start in groups_of(level)]
        for level in found
    ]


def assert_follows_the_rule(levels, table, lens, page_size, kv_start, pinned):
    """The rule, about the sequences of one group of a level (or all at first) and the first key that it does not cover:

    - two sequences *share* that key if it is the same key of the same page and stands at the same position, for both;
    - all that share it and have its page whole form a group of the next level, if they are two or more: it goes on page by page, until
      one of them does not have the next page whole, or another page there, or at a position that does not follow;
    - where fewer than two have it whole, all that share it form a group, if they are two or more: it ends with the shortest of them, and
      none follows.
    """
    lens = [min(max(n, 0), len(table[0]) * page_size) for n in lens]

    def key(seq, index):
        """Where key `index` lies and stands; None if there is none."""
        start = 0 if index < pinned else kv_start[seq]
        return (table[seq][index // page_size], index % page_size, index + start) if index < lens[seq] else None

    def whole(seq, first):
        return lens[seq] >= first + page_size

    before = [(list(range(len(table))), 0)]
    for level in [*levels, None]:
        groups = [] if level is None else groups_of(level)
        group_of, after = {}, []
        for members, pages, count, start in groups:
            assert len(members) > 1 and not group_of.keys() & set(members), "no sequence is twice in a level, and none alone in a group"
            group_of |= dict.fromkeys(members, len(after))
            parent, first = next(entry for entry in before if members[0] in entry[0])
            assert set(members) <= set(parent), "a group is a part of one of the level before"
            assert 0 < count <= min(lens[seq] for seq in members) - first
            for i in range(count):
                for seq in members:
                    assert key(seq, first + i) == (pages[i // page_size], i % page_size, start + i)
            end = first + count
            if all(whole(seq, first) for seq in members):
                assert count % page_size == 0
                following = {key(seq, end) if whole(seq, end) else None for seq in members}
                first_of = following.pop()
                assert following or first_of is None or first_of[2] != start + count, "it could have gone on"
            else:
                assert end == min(lens[seq] for seq in members)
            after.append((members, end))
        for parent, first in before:
            for a in parent:
                sharing = [seq for seq in parent if key(seq, first) is not None and key(seq, first) == key(a, first)]
                having = [seq for seq in sharing if whole(seq, first)]
                expected = having if len(having) > 1 and a in having else sharing if len(having) < 2 else []
                expected = expected if len(expected) > 1 and first % page_size == 0 else []
                together = groups[group_of[a]][0] if a in group_of else []
                assert sorted(together) == expected, f"sequence {a} after {first} keys"
        if level is not None:
            assert groups
            assert level.max_group == max(len(members) for members, *_ in groups)
            assert level.max_len == max(count for *_, count, _ in groups)
            assert level.cu_seqs[0] == 0 and level.cu_seqs[-1] == len(level.seqs)
            assert all(getattr(level, name).dtype == torch.int32 for name in TENSORS)
        before = after


@st.composite
def batches(draw):
    """Tables in which few pages occur, so that many sequences begin alike, and what else says which keys there are."""
    page_size = draw(st.sampled_from([1, 3, 16]))
    num_seqs, width = draw(st.integers(0, 7)), draw(st.integers(0, 5))
    page = st.sampled_from([0, 0, 0, 0, 1, 2])
    table = [[draw(page) for _ in range(width)] for _ in range(num_seqs)]
    near = [n for i in range(width + 1) for n in (i * page_size - 1, i * page_size, i * page_size + 1)]
    lens = [draw(st.one_of(st.integers(0, width * page_size), st.sampled_from([-1, width * page_size + 9, *near]))) for _ in table]
    kv_start = draw(st.one_of(st.none(), st.just([draw(st.sampled_from([0, 0, 0, 5, page_size])) for _ in table])))
    pinned = draw(st.sampled_from([0, 0, page_size, 2 * page_size]))
    for row, n in zip(table, lens, strict=True):
        # Behind the keys of a sequence its table may say anything.
        for i in range(max(-(-n // page_size), 0), width):
            row[i] = draw(st.sampled_from([row[i], -1, 2**31 - 1, -(2**31)]))
    return np.array(table, np.int64).reshape(num_seqs, width), np.array(lens, np.int64), page_size, kv_start, pinned


@effort(400)
@given(batch=batches(), index_dtype=st.sampled_from([torch.int32, torch.int64]), array=st.booleans())
def test_any_batch_has_the_levels_of_the_rule(batch, index_dtype, array):
    table, lens, page_size, kv_start, pinned = batch
    given_table, given_lens, given_start = table, lens, kv_start if kv_start is None else np.array(kv_start, np.int64)
    if not array:
        given_table, given_lens = (torch.from_numpy(x).to(index_dtype) for x in (table, lens))
        given_start = None if kv_start is None else torch.tensor(kv_start, dtype=index_dtype)
    before = [x.tolist() for x in (given_table, given_lens)]
    levels = tkv.find_shared_levels(given_table, given_lens, page_size, kv_start=given_start, pinned=pinned)
    assert [x.tolist() for x in (given_table, given_lens)] == before, "an input was modified"
    if not len(table) or not table.shape[1]:
        assert levels == []
    else:
        assert_follows_the_rule(levels, table.tolist(), lens.tolist(), page_size, kv_start or [0] * len(table), pinned)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_a_tree_of_three_levels(page_size):
    table = [[7, 8, 1, 2, 3], [7, 8, 1, 2, 4], [7, 8, 1, 5, 6], [7, 8, 9, 9, 9], [7, 8, 9, 9, 9], [3, 3, 3, 3, 3]]
    lens = [5 * page_size] * 5 + [5 * page_size]
    lens[4] = 3 * page_size
    assert find(table, lens, page_size) == [
        [([0, 1, 2, 3, 4], [7, 8], 2 * page_size, 0)],
        [([0, 1, 2], [1], page_size, 2 * page_size), ([3, 4], [9], page_size, 2 * page_size)],
        [([0, 1], [2], page_size, 3 * page_size)],
    ]


def test_only_pages_from_the_first_on_are_shared():
    # The same pages further on, or at another place, are read by each sequence for itself.
    assert find([[1, 5, 6], [2, 5, 6], [5, 6, 1]], [48, 48, 48], 16) == []


def test_a_page_that_is_not_full_is_shared_up_to_the_shortest():
    # Whoever has filled it further has the rest of it for itself, also if it is more than one.
    assert find([[1, 2], [1, 2], [1, 2]], [20, 25, 32], 16) == [[([0, 1, 2], [1], 16, 0)], [([0, 1, 2], [2], 4, 16)]]
    # Two that have the page whole do not stop for a third that does not.
    assert find([[1, 2], [1, 2], [1, 2]], [20, 32, 32], 16) == [[([0, 1, 2], [1], 16, 0)], [([1, 2], [2], 16, 16)]]
    assert find([[1], [1]], [5, 3], 16) == [[([0, 1], [1], 3, 0)]]


def test_sequences_that_are_all_the_same_share_all():
    assert find([[4, 2, 9]] * 3, [40, 40, 40], 16) == [[([0, 1, 2], [4, 2], 32, 0)], [([0, 1, 2], [9], 8, 32)]]
    assert find([[4, 2, 9]] * 3, [48, 48, 48], 16) == [[([0, 1, 2], [4, 2, 9], 48, 0)]]


@pytest.mark.parametrize(
    ("table", "lens"), [([], []), ([[]], [0]), ([[], []], [0, 0]), ([[3, 4]], [32]), ([[1, 2], [3, 2]], [32, 32]), ([[1], [1]], [16, 0])]
)
def test_nothing_is_shared_by_none_by_one_or_by_sequences_that_begin_differently(table, lens):
    shape = (len(lens), len(table[0]) if table else 2)
    assert tkv.find_shared_levels(torch.tensor(table, dtype=torch.int32).reshape(shape), torch.tensor(lens, dtype=torch.int32), 16) == []


def test_entries_behind_the_lengths_are_not_compared():
    garbage = [2**31 - 1, -1, 5]
    assert find([[1, g] for g in garbage], [16, 16, 16], 16) == [[([0, 1, 2], [1], 16, 0)]]
    assert find([[1, -7], [1, -7]], [16, 16], 16) == [[([0, 1], [1], 16, 0)]]


def test_lengths_are_cut_to_the_table():
    assert find([[1, 2], [1, 2], [1, 2]], [10**9, 33, -4], 16) == [[([0, 1], [1, 2], 32, 0)]]


def test_positions_that_differ_cut_a_level():
    table, lens = [[1, 2]] * 4, [32] * 4
    assert find(table, lens, 16, kv_start=[7, 0, 7, 3]) == [[([0, 2], [1, 2], 32, 7)]]
    # Pinned pages stand where they stand, whatever the positions behind them are.
    assert find(table, lens, 16, kv_start=[7, 0, 7, 3], pinned=16) == [[([0, 1, 2, 3], [1], 16, 0)], [([0, 2], [2], 16, 23)]]


def test_positions_that_jump_behind_pinned_pages_cut_a_level():
    # One level has keys at consecutive positions, so it ends with the pinned pages although all go on alike.
    assert find([[1, 2, 3]] * 2, [48, 48], 16, kv_start=[5, 5], pinned=16) == [[([0, 1], [1], 16, 0)], [([0, 1], [2, 3], 32, 21)]]
    assert find([[1, 2, 3]] * 2, [48, 48], 16, kv_start=[0, 0], pinned=16) == [[([0, 1], [1, 2, 3], 48, 0)]]
    assert find([[1, 2, 3]] * 2, [48, 48], 16, pinned=32) == [[([0, 1], [1, 2, 3], 48, 0)]]
    assert find([[1, 2, 3]] * 2, [10, 48], 16, kv_start=[5, 9], pinned=16) == [[([0, 1], [1], 10, 0)]]


def test_levels_are_where_the_table_is(device):
    table = torch.tensor([[1, 2], [1, 3]], device=device)
    for level in tkv.find_shared_levels(table, torch.tensor([32, 32], device=device), 16):
        assert all(getattr(level, name).device == table.device for name in TENSORS)
    on_host = tkv.find_shared_levels(table.cpu().numpy(), [32, 32], 16)[0]
    assert all(getattr(on_host, name).device.type == "cpu" for name in TENSORS)


def test_a_level_goes_to_a_device_with_all_of_its_tensors():
    level = tkv.find_shared_levels(torch.tensor([[1, 2], [1, 3]]), torch.tensor([32, 32]), 16)[0]
    moved = level.to("meta", non_blocking=True)
    assert all(getattr(moved, name).device.type == "meta" for name in TENSORS)
    assert all(getattr(moved, name).shape == getattr(level, name).shape for name in TENSORS)
    assert (moved.max_group, moved.max_len) == (level.max_group, level.max_len) == (2, 16)
    assert all(getattr(level, name).device.type == "cpu" for name in TENSORS), "the level itself stays"
    with pytest.raises(dataclasses.FrozenInstanceError):
        level.max_len = 3


TABLE, LENS = torch.tensor([[1, 2], [1, 3]]), torch.tensor([32, 32])


def search(page_table=TABLE, seq_lens=LENS, page_size=16, **more):
    return tkv.find_shared_levels(page_table, seq_lens, page_size, **more)


WRONG_SEARCHES = {
    "one dim": (lambda: search(TABLE[0]), ShapeError, r"page_table: expected 2 dimensions, got shape \[2\]"),
    "lens have two": (lambda: search(seq_lens=LENS[None]), ShapeError, r"seq_lens: expected 1 dimension, got shape \[1, 2\]"),
    "starts have none": (lambda: search(kv_start=0), ShapeError, "kv_start: expected 1 dimension"),
    "floats": (lambda: search(TABLE.float()), DTypeError, "page_table: expected integers, got float32"),
    "lens of floats": (lambda: search(seq_lens=np.ones(2)), DTypeError, "seq_lens: expected integers, got float64"),
    "lens of bools": (lambda: search(seq_lens=LENS > 0), DTypeError, "seq_lens: expected integers, got bool"),
    "starts of floats": (lambda: search(kv_start=[0.0, 1.0]), DTypeError, "kv_start: expected integers"),
    "other lens": (lambda: search(seq_lens=LENS[:1]), ShapeError, r"seq_lens: expected shape \[2\].* got \[1\]"),
    "other starts": (lambda: search(kv_start=[0] * 3), ShapeError, r"kv_start: expected shape \[2\].* got \[3\]"),
    "page of 0": (lambda: search(page_size=0), RangeError, "page_size: expected at least 1, got 0"),
    "page of a float": (lambda: search(page_size=16.0), DTypeError, "page_size: expected an int, got 16.0"),
    "page of a bool": (lambda: search(page_size=True), DTypeError, "page_size: expected an int, got True"),
    "half a page pinned": (lambda: search(pinned=8), RangeError, "pinned: expected whole pages, got 8"),
    "pinned below 0": (lambda: search(pinned=-16), RangeError, "pinned: expected whole pages, got -16"),
    "pinned float": (lambda: search(pinned=16.0), DTypeError, "pinned: expected an int, got 16.0"),
}


@pytest.mark.parametrize("name", WRONG_SEARCHES)
def test_a_wrong_search_says_what_is_wrong(name):
    call, error, message = WRONG_SEARCHES[name]
    with pytest.raises(error, match=message):
        call()


def ints(*values, dtype=torch.int32, device=DEVICE):
    return torch.tensor(values, dtype=dtype, device=device)


def level(**changes):
    """A correct level of two groups, of sequences 0 and 2 and of 1, with some fields changed."""
    fields = {
        "page_table": ints([1, 2], [3, 0]), "lens": ints(20, 16), "starts": ints(0, 0), "cu_seqs": ints(0, 2, 3), "seqs": ints(2, 0, 1),
        "max_group": 2, "max_len": 20,
    }  # fmt: skip
    return tkv.SharedLevel(**{**fields, **changes})


def shared(levels=None, **changes):
    """A correct call of 3 sequences with some arguments changed."""
    args = {
        "q": torch.zeros(3, 4, 16, dtype=torch.float16, device=DEVICE),
        "cache": tkv.KVCache.empty(5, 16, 2, 16, "fp16", device=DEVICE),
        "levels": [level()] if levels is None else levels,
        "page_table": ints([1, 2, 4], [3, 0, 4], [1, 2, 0]),
        "seq_lens": ints(40, 20, 33),
    }
    return tkv.shared_prefix_decode(**{**args, **changes})


NO_GROUPS = level(page_table=ints([1])[:0], lens=ints(), starts=ints(), cu_seqs=ints(0))
SPLIT = {"block_m": 16, "block_n": 16, "num_warps": 4, "num_stages": 1}
WRONG = {
    "levels are none": (lambda: shared({}), DTypeError, "levels: expected a list of tkv.SharedLevel, got dict"),
    "levels are a level": (lambda: shared(level()), DTypeError, "levels: expected a list of tkv.SharedLevel, got SharedLevel"),
    "levels are a tensor": (lambda: shared(ints(1)), DTypeError, "levels: expected a list of tkv.SharedLevel, got Tensor"),
    "levels are an iterator": (lambda: shared(iter([level()])), DTypeError, "levels: expected a list of tkv.SharedLevel"),
    "levels of other things": (lambda: shared([level(), ([1], 16)]), DTypeError, "levels: expected a list of tkv.SharedLevel"),
    "table has one dim": (lambda: shared([level(page_table=ints(1, 2))]), ShapeError, r"levels\[0\].page_table: expected shape"),
    "table of floats": (lambda: shared([level(page_table=ints([1.0], [2.0], dtype=torch.float32))]), DTypeError, r"levels\[0\].page_table"),
    "table is a list": (lambda: shared([level(page_table=[[1], [2]])]), DTypeError, r"levels\[0\].page_table: expected a torch.Tensor"),
    "table is elsewhere": (lambda: shared([level().to("meta")]), DeviceError, r"levels\[0\].page_table: expected device"),
    "table is strided": (lambda: shared([level(page_table=ints([1, 2], [3, 0]).T)]), ShapeError, r"levels\[0\].page_table: the last dim"),
    "lens of others": (lambda: shared([level(), level(lens=ints(1))]), ShapeError, r"levels\[1\].lens: expected shape \[2\], got \[1\]"),
    "lens of floats": (lambda: shared([level(lens=ints(1.0, 2.0, dtype=torch.float32))]), DTypeError, r"levels\[0\].lens: expected"),
    "starts of others": (lambda: shared([level(starts=ints(0, 0, 0))]), ShapeError, r"levels\[0\].starts: expected shape \[2\], got \[3\]"),
    "starts are none": (lambda: shared([level(starts=None)]), DTypeError, r"levels\[0\].starts: expected a torch.Tensor, got NoneType"),
    "cu_seqs too short": (lambda: shared([level(cu_seqs=ints(0, 3))]), ShapeError, r"levels\[0\].cu_seqs: expected shape \[3\], got \[2\]"),
    "cu_seqs are int16": (lambda: shared([level(cu_seqs=ints(0, 2, 3, dtype=torch.int16))]), DTypeError, r"levels\[0\].cu_seqs"),
    "seqs have two dims": (lambda: shared([level(seqs=ints([2, 0, 1]))]), ShapeError, r"levels\[0\].seqs: expected shape \[num_members\]"),
    "seqs are floats": (lambda: shared([level(seqs=ints(2.0, 0.0, 1.0, dtype=torch.float32))]), DTypeError, r"levels\[0\].seqs"),
    "max_group is a tensor": (lambda: shared([level(max_group=ints(2))]), DTypeError, r"levels\[0\].max_group: expected an int"),
    "max_group is negative": (lambda: shared([level(max_group=-1)]), RangeError, r"levels\[0\].max_group: expected at least 0, got -1"),
    "max_len is a float": (lambda: shared([level(max_len=20.0)]), DTypeError, r"levels\[0\].max_len: expected an int, got 20.0"),
    "max_len is negative": (lambda: shared([level(max_len=-1)]), RangeError, r"levels\[0\].max_len: expected at least 0, got -1"),
    "no groups": (lambda: shared([NO_GROUPS]), ShapeError, r"levels\[0\]: expected at least one group .* got 0 and 3"),
    "no sequences": (lambda: shared([level(seqs=ints())]), ShapeError, r"levels\[0\]: .* and one sequence, got 2 and 0"),
    "deterministic": (lambda: shared(deterministic=True), UnsupportedError, "deterministic: how sequences are grouped depends on"),
    "deterministic is 1": (lambda: shared(deterministic=1), DTypeError, "deterministic: expected True or False, got 1"),
    "level_config": (lambda: shared(level_config={**SPLIT, "block_m": 3}), RangeError, "config.block_m: expected a power of two"),
    "level_config misses": (lambda: shared(level_config={"block_m": 16}), UnsupportedError, "missing"),
    "config": (lambda: shared(config={**SPLIT, "stages": 3}), UnsupportedError, "unknown"),
    # What paged_decode checks is checked here.
    "q has two dims": (lambda: shared(q=torch.zeros(3, 16, device=DEVICE)), ShapeError, "q: expected shape"),
    "cache is none": (lambda: shared(cache=None), DTypeError, "cache: expected a tkv.KVCache, got NoneType"),
    "lens of other sequences": (lambda: shared(seq_lens=ints(1, 2)), ShapeError, r"seq_lens: expected shape \[3\], got \[2\]"),
    "window is 0": (lambda: shared(window=0), RangeError, "window: expected at least 1, got 0"),
    "mask is too small": (lambda: shared(mask=torch.ones(3, 0, 0, dtype=torch.bool, device=DEVICE)), ShapeError, "mask: expected shape"),
    "workspace of ints": (lambda: shared(workspace=ints(1)), DTypeError, "workspace: expected torch.uint8 or torch.float32"),
    "out is too small": (lambda: shared(out=torch.zeros(3, 4, 8, dtype=torch.float16, device=DEVICE)), ShapeError, "out: expected shape"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_says_what_is_wrong_before_anything_is_launched(name, monkeypatch):
    call, error, message = WRONG[name]
    monkeypatch.setattr("tkv.ops.cascade.run_all", lambda *_: pytest.fail("something was launched"))
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, TkvError)


WRONG_VALUES = {
    "a sequence too many": ({"seqs": ints(2, 0, 3)}, r"levels\[0\].seqs: expected sequences from 0 to 2, .* got \[2, 0, 3\]"),
    "a sequence below 0": ({"seqs": ints(2, -1, 1)}, r"levels\[0\].seqs: .* got \[2, -1, 1\]"),
    "a sequence twice in a group": ({"seqs": ints(2, 2, 1)}, r"levels\[0\].seqs: .* at most once"),
    "a sequence in two groups": ({"seqs": ints(2, 0, 2)}, r"levels\[0\].seqs: .* at most once"),
    "groups that fall": ({"cu_seqs": ints(0, 3, 2)}, r"levels\[0\].cu_seqs: expected to rise from 0 to at most 3, got \[0, 3, 2\]"),
    "groups that begin late": ({"cu_seqs": ints(1, 2, 3)}, r"levels\[0\].cu_seqs: expected to rise from 0"),
    "groups that end behind the sequences": ({"cu_seqs": ints(0, 2, 4)}, r"levels\[0\].cu_seqs: .* at most 3"),
    "more keys than pages": ({"lens": ints(33, 16)}, r"levels\[0\].lens: expected 0 to 32 keys .* got 33"),
    "fewer keys than none": ({"lens": ints(20, -1)}, r"levels\[0\].lens: expected 0 to 32 keys .* got -1"),
    "a page outside of the cache": ({"page_table": ints([1, 5], [3, 0])}, r"page_table: expected pages from 0 to 4 .* got 5 at \[0, 1\]"),
}


@pytest.fixture
def checks(monkeypatch):
    """Checks that read from the device, and levels that all pay."""
    monkeypatch.setenv("TKV_CHECK", "1")
    monkeypatch.setattr("tkv.ops.cascade.MIN_KEYS_SAVED", 0)


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_values_are_found_where_checks_are_on(name, checks):
    changes, message = WRONG_VALUES[name]
    with pytest.raises(RangeError, match=message):
        shared([level(**changes)])


def test_what_is_right_passes_the_checks(checks):
    for index_dtype in (torch.int32, torch.int64):
        right = level(**{name: getattr(level(), name).to(index_dtype) for name in TENSORS})
        assert shared([right], config=SPLIT, level_config=SPLIT).shape == (3, 4, 16)
    # A group may have no sequence, and a call no level.
    shared((level(cu_seqs=ints(0, 3, 3)),), config=SPLIT, level_config=SPLIT)
    shared([], config=SPLIT)


@pytest.mark.parametrize("options", [{}, {"window": 10}, {"window": 10, "sinks": 2, "q_len": 2}, {"kv_start": [5, 5, 0], "window": 20}])
def test_pages_that_are_not_read_pass_the_checks(options, checks):
    # What levels cover is not in the sequences' tables, and pages left of every window are in none.
    grow("fp32", [50, 33], [(0, 1), (0, 1), ()], [5, 9, 40], apart=True, **options).check(config=SPLIT, level_config=SPLIT)


def test_wrong_arguments_have_their_own_errors_where_checks_are_on(checks):
    for changes in ({"page_table": [[1]]}, {"cache": None}, {"q": None}, {"seq_lens": 3}):
        with pytest.raises(DTypeError, match=f"{next(iter(changes))}: expected a "):
            shared(**changes)
