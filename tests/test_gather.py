"""gather_window: what is kept of each sequence, in order, decoded, and nothing else."""

import pytest
import torch
from caches import FORMATS, LAYOUTS, MORE_FORMATS, bits, fits, kind_id
from hypothesis import given
from hypothesis import strategies as st
from problems import build, effort, test_device

import tkv
from tkv import reference
from tkv.errors import DTypeError, RangeError, ShapeError, UnsupportedError

DEVICE = test_device()


def check(problem, window, sinks, dense=False, kv_start=None, dtype=torch.float32, pinned=0, rope=None):
    """Gather from a problem's cache by the kernel and by the reference: the same tokens, and nothing but zeros behind them."""
    cache, table, lens = problem.cache, problem.page_table, problem.seq_lens
    expected = reference.gather_window(cache, table, lens, window=window, sinks=sinks, kv_start=kv_start, pinned=pinned, rope=rope)
    k, v, positions, cu_lens = tkv.gather_window(
        cache, table, lens, window=window, sinks=sinks, dense=dense, kv_start=kv_start, dtype=dtype, pinned=pinned, rope=rope
    )
    capacity = table.shape[1] * cache.page_size
    rows = capacity if window is None else min(sinks + window, capacity)
    assert k.shape == ((len(lens), rows) if dense else (len(lens) * rows,)) + (cache.num_kv_heads, cache.head_dim)
    assert cu_lens.tolist() == torch.tensor([0, *(len(part[2]) for part in expected)]).cumsum(0).tolist()
    left = torch.ones(positions.shape, dtype=torch.bool, device=DEVICE)
    for seq, (of_k, of_v, of_positions) in enumerate(expected):
        at = (seq, slice(0, len(of_k))) if dense else slice(int(cu_lens[seq]), int(cu_lens[seq + 1]))
        left[at] = False
        assert positions[at].tolist() == of_positions.tolist()
        for got, want in ((k[at], of_k), (v[at], of_v)):
            # Decoded in float32 and rounded once more.
            digits = {torch.float32: 23, torch.float16: 11, torch.bfloat16: 8}[dtype]
            rounding = 2.0**-25 if dtype == torch.float16 else 1e-37
            if rope is not None:
                # Two products of float32, which may cancel.
                rounding += 2.0**-22 * want.abs().max().item() if want.numel() else 0.0
            torch.testing.assert_close(got.double(), want, rtol=1.01 * 2.0**-digits, atol=rounding)
    assert bool((positions[left] == -1).all()) and not k[left].any() and not v[left].any()


@pytest.mark.parametrize("kind", [*FORMATS, *MORE_FORMATS], ids=kind_id)
def test_all_tokens_of_every_format(kind):
    problem = build(kind, (70, 0, 5, 33), 32, 2, 1, 64, v_dim=128, seed=2)
    check(problem, None, 0)
    check(problem, 9, 3, dense=True, dtype=torch.float16)


@given(st.data())
@effort(40)
def test_any_window_and_sinks(data):
    draw = data.draw
    kind = draw(st.sampled_from(["fp32", "int8/token_head", "int4/group32"]))
    page_size = draw(st.sampled_from([1, 3, 16]))
    lens = draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    dim = draw(st.sampled_from([16, 24, 32, 96]))
    dim = dim if fits(kind, dim, page_size) else 32
    heads, layout, seed = draw(st.integers(1, 3)), draw(st.sampled_from(LAYOUTS)), draw(st.integers(0, 99))
    problem = build(kind, lens, page_size, heads, 1, dim, layout=layout, seed=seed)
    starts = draw(st.one_of(st.none(), st.lists(st.integers(0, 20), min_size=len(lens), max_size=len(lens))))
    kv_start = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    window = draw(st.one_of(st.none(), st.integers(0, 50)))
    check(problem, window, draw(st.integers(0, 50)), draw(st.booleans()), kv_start, draw(st.sampled_from([torch.float32, torch.bfloat16])))


def test_sinks_and_window_that_overlap_give_each_token_once():
    problem = build("fp32", (10, 3), 4, 1, 1, 16)
    for window, sinks in ((10, 10), (8, 4), (6, 4), (5, 4), (0, 4), (4, 0), (0, 0), (100, 100)):
        check(problem, window, sinks)
        check(problem, window, sinks, dense=True)


def test_every_code_comes_back_right():
    codes = torch.arange(256, dtype=torch.int32, device=DEVICE).to(torch.uint8).view(1, 1, 1, 256)
    table, lens = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), torch.ones(1, dtype=torch.int32, device=DEVICE)
    for kind in ("fp8_e4m3/tensor", "fp8_e5m2/tensor"):
        cache = tkv.KVCache(codes, codes.clone(), 0.5, 3.0, format=kind)
        k, v, *_ = tkv.gather_window(cache, table, lens, window=1)
        expected = codes[0].view(tkv.KVFormat.parse(kind).torch_dtype).float()
        for got, scale in ((k, 0.5), (v, 3.0)):
            assert torch.equal(bits(got.nan_to_num(nan=7.0)), bits((expected * scale).nan_to_num(nan=7.0))), kind
            assert torch.equal(got.isnan(), expected.isnan())


def test_pages_outside_of_the_cache_are_not_followed():
    cache = tkv.KVCache(torch.ones(2, 4, 1, 16, device=DEVICE), torch.ones(2, 4, 1, 16, device=DEVICE))
    table = torch.tensor([[1, 2, -1, 2**31 - 1]], dtype=torch.int32, device=DEVICE)
    k, _, positions, _ = tkv.gather_window(cache, table, torch.tensor([16], device=DEVICE), window=None)
    assert k[:, 0, 0].tolist() == [1.0] * 4 + [0.0] * 12 and positions.tolist() == list(range(16))


def test_nothing_to_gather():
    cache = tkv.KVCache.empty(2, 4, 1, 16, device=DEVICE)
    for num_seqs, width in ((0, 3), (2, 0), (0, 0)):
        table = torch.zeros(num_seqs, width, dtype=torch.int32, device=DEVICE)
        k, _, positions, cu_lens = tkv.gather_window(cache, table, torch.zeros(num_seqs, dtype=torch.int32, device=DEVICE), window=3)
        assert k.numel() == positions.numel() == 0 and cu_lens.tolist() == [0] * (num_seqs + 1)


def test_lengths_that_lie_are_cut():
    problem = build("fp32", (10, 3), 4, 1, 1, 16)
    problem.seq_lens = torch.tensor([-5, 2**31 - 1], dtype=torch.int32, device=DEVICE)
    k, _, positions, cu_lens = tkv.gather_window(problem.cache, problem.page_table, problem.seq_lens, window=2, sinks=1)
    assert cu_lens.tolist() == [0, 0, 3] and positions.tolist() == [0, 10, 11, -1, -1, -1]
    assert not k[3:].any()


def test_errors_name_the_argument(monkeypatch):
    cache = tkv.KVCache.empty(2, 4, 1, 16, device=DEVICE)
    table, lens = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE), torch.ones(1, dtype=torch.int32, device=DEVICE)
    cases = [
        (RangeError, "window: expected at least 0", {"window": -1}),
        (RangeError, "sinks: expected at least 0", {"window": 1, "sinks": -1}),
        (DTypeError, "dense: expected True or False", {"window": 1, "dense": 1}),
        (UnsupportedError, "dtype: expected torch.float32", {"window": 1, "dtype": torch.int8}),
        (ShapeError, "kv_start: expected shape", {"window": 1, "kv_start": lens[:0]}),
        (DTypeError, "window: expected an int", {"window": 1.5}),
    ]
    for error, message, options in cases:
        with pytest.raises(error, match=message):
            tkv.gather_window(cache, table, lens, **options)
    with pytest.raises(DTypeError, match=r"page_table: expected a torch\.Tensor"):
        tkv.gather_window(cache, [[0]], lens, window=1)
    with pytest.raises(ShapeError, match="seq_lens: expected shape"):
        tkv.gather_window(cache, table, lens[:0], window=1)
    monkeypatch.setenv("TKV_CHECK", "1")
    with pytest.raises(RangeError, match="seq_lens: expected 0 to 8 keys"):
        tkv.gather_window(cache, table, lens * 9, window=1)
    bad = torch.tensor([[7, 1]], dtype=torch.int32, device=DEVICE)
    with pytest.raises(RangeError, match="page_table: expected pages from 0 to 1"):
        tkv.gather_window(cache, bad, lens * 8, window=None)
    tkv.gather_window(cache, bad, lens * 8, window=4)
    tkv.gather_window(cache, bad, lens * 8, window=0)
