"""gather_window in full: pinned pages, rotation on the way out, numbers as they are stored."""

import pytest
import torch
from caches import FORMATS, MORE_FORMATS, bits, kind_id
from hypothesis import given
from hypothesis import strategies as st
from problems import build, effort, test_device
from test_gather import check

import tkv
from tkv.errors import RangeError, ShapeError, UnsupportedError

DEVICE = test_device()


@effort(60)
@given(st.data())
def test_pinned_pages_and_what_follows_after_a_gap(data):
    draw = data.draw
    page_size = draw(st.sampled_from([1, 4, 16]))
    lens = draw(st.lists(st.integers(0, 60), min_size=1, max_size=3))
    problem = build("fp32", lens, page_size, 2, 1, 16, seed=draw(st.integers(0, 99)))
    starts = [draw(st.sampled_from([0, 0, 1, 7, 16, 10**6])) for _ in lens]
    kv_start = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    window, sinks = draw(st.one_of(st.none(), st.integers(0, 70))), draw(st.sampled_from([0, 1, 4, 20, 100]))
    check(problem, window, sinks, draw(st.booleans()), kv_start, pinned=page_size * draw(st.integers(0, 5)))


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("kind", [*FORMATS, *MORE_FORMATS], ids=kind_id)
def test_keys_are_rotated_by_their_place_in_what_is_kept(kind, interleaved):
    problem = build(kind, (70, 0, 5, 33), 32, 2, 1, 64, seed=2)
    for rotary_dim, window, sinks in ((64, 20, 3), (22, None, 0)):
        rope = tkv.Rope.of(80, rotary_dim, theta=50.0, interleaved=interleaved, device=DEVICE)
        check(problem, window, sinks, rope=rope)


@pytest.mark.parametrize("kind", [kind for kind in (*FORMATS, *MORE_FORMATS) if "page_channel" not in str(kind)], ids=kind_id)
@pytest.mark.parametrize("dense", [False, True])
def test_numbers_come_as_they_are_stored_with_their_scales(kind, dense):
    problem = build(kind, (70, 0, 5, 33), 32, 2, 1, 64, layout="hnd", seed=2)
    cache, table, lens = problem.cache, problem.page_table, problem.seq_lens
    options = {"window": 9, "sinks": 3, "dense": dense}
    k, v, positions, cu_lens, k_scale, v_scale = tkv.gather_window(cache, table, lens, dequantize=False, **options)
    _, _, expected_positions, expected_lens = tkv.gather_window(cache, table, lens, **options)
    assert torch.equal(positions, expected_positions) and torch.equal(cu_lens, expected_lens)
    for got, scales, data, of_cache, form in (
        (k, k_scale, cache.k, cache.k_scale, cache.k_format),
        (v, v_scale, cache.v, cache.v_scale, cache.v_format),
    ):
        assert got.dtype == data.dtype
        if form.is_native:
            assert scales is None
        elif form.is_static:
            assert scales is of_cache
        pairs = [(got, data)] + ([(scales, of_cache)] if form.is_dynamic else [])
        for seq in range(len(lens)):
            count = int(cu_lens[seq + 1] - cu_lens[seq])
            at = (seq, slice(0, count)) if dense else slice(int(cu_lens[seq]), int(cu_lens[seq + 1]))
            where = positions[at].long()
            for rows, paged in pairs:
                assert torch.equal(bits(rows[at]), bits(paged[table[seq, where // 32].long(), where % 32]))
        left = positions < 0
        assert not any(bits(rows[left]).any() for rows, _ in pairs)


def test_what_cannot_be_given_is_refused():
    problem = build("int8/token_head", (20,), 16, 1, 1, 32)
    args = (problem.cache, problem.page_table, problem.seq_lens)
    rope = tkv.Rope.of(8, 32, device=DEVICE)
    with pytest.raises(UnsupportedError, match="dtype: numbers are given as they are stored"):
        tkv.gather_window(*args, window=3, dequantize=False, dtype=torch.float16)
    with pytest.raises(UnsupportedError, match="rope: numbers are given as they are stored"):
        tkv.gather_window(*args, window=3, dequantize=False, rope=rope)
    with pytest.raises(ShapeError, match="rope: expected tables of sinks"):
        tkv.gather_window(*args, window=9, rope=rope)
    with pytest.raises(RangeError, match="pinned: expected whole pages of 16 keys, got 3"):
        tkv.gather_window(*args, window=3, pinned=3)
    by_page = build(("int8/page_channel", "int8/token_head"), (20,), 16, 1, 1, 32)
    with pytest.raises(UnsupportedError, match="belong to pages"):
        tkv.gather_window(by_page.cache, by_page.page_table, by_page.seq_lens, window=3, dequantize=False)
