"""Policies: what each one keeps, key by key, against loops over lists."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import effort, test_device

from tkv import policies
from tkv.errors import DeviceError, DTypeError, RangeError, ShapeError

DEVICE = test_device()
# Few values, so that ties are frequent, and sums of them are exact.
VALUES = [-2.0, 0.0, 0.5, 1.0, 1.0, 3.0, 7.0]
ODD = [-math.inf, math.inf, math.nan]


@st.composite
def problems(draw, values=VALUES):
    """Scores [num_seqs, heads, width] with a few values, and lengths up to the width: NaN, Inf and 99 behind them."""
    width, heads = draw(st.integers(1, 13)), draw(st.integers(1, 3))
    lens = draw(st.lists(st.integers(0, width), min_size=1, max_size=4))
    rows = st.lists(st.sampled_from(values), min_size=width, max_size=width)
    scores = [[draw(rows) for _ in range(heads)] for _ in lens]
    behind = draw(st.sampled_from([math.nan, math.inf, 99.0]))
    scores = [[row[:n] + [behind] * (width - n) for row in of_seq] for of_seq, n in zip(scores, lens)]
    return torch.tensor(scores, device=DEVICE), torch.tensor(lens, device=DEVICE)


def best(scores, budget, recent):
    """The last `recent` keys of a list of scores and the highest of the others, `budget` together."""
    n = len(scores)
    rest = sorted(range(max(n - recent, 0)), key=lambda key: (-(-math.inf if math.isnan(scores[key]) else scores[key]), key))
    last = range(max(n - recent, 0), n)
    return sorted([*rest[: budget - len(last)], *last])


def check(kept, expected, seq_lens, width, budget):
    """keep and keep_lens have the right shapes and the expected keys; whatever follows is no key of the sequence."""
    keep, keep_lens = kept
    assert keep.dtype == keep_lens.dtype == torch.int32 and keep.is_contiguous() and keep.device == seq_lens.device
    assert keep.shape == (len(seq_lens), len(expected[0]), min(budget, width))
    assert keep_lens.tolist() == [min(n, budget) for n in seq_lens.tolist()]
    for seq, (n, of_heads) in enumerate(zip(seq_lens.tolist(), expected)):
        for head, keys in enumerate(of_heads):
            row = keep[seq, head].tolist()
            assert row[: min(n, budget)] == keys
            assert row == sorted(set(row)) and all(n <= key < width for key in row[min(n, budget) :])
            if n <= budget:
                assert keys == list(range(n))


def expect(scores, seq_lens, budget, recent):
    return [[best(row[:n], budget, recent) for row in of_seq] for of_seq, n in zip(scores.tolist(), seq_lens.tolist())]


@given(problems(VALUES + ODD), st.integers(0, 8), st.integers(0, 8))
@effort(150)
def test_h2o_keeps_the_heaviest_and_the_latest(problem, heavy, recent):
    scores, seq_lens = problem
    expected = expect(scores, seq_lens, heavy + recent, recent)
    check(policies.h2o(scores, seq_lens, heavy, recent), expected, seq_lens, scores.shape[-1], heavy + recent)


@given(problems(VALUES + [math.nan]), st.integers(1, 9), st.integers(0, 9), st.sampled_from([1, 3, 5, 7]))
@effort(150)
def test_snapkv_keeps_the_window_and_the_best_neighbourhoods(problem, budget, window, kernel_size):
    scores, seq_lens = problem
    window = min(window, budget)
    pooled = torch.zeros_like(scores)
    for seq, n in enumerate(seq_lens.tolist()):
        if n > window:
            before = scores[seq, :, : n - window].nan_to_num(0.0)
            pool = torch.nn.functional.avg_pool1d(before, kernel_size, stride=1, padding=kernel_size // 2, count_include_pad=True)
            pooled[seq, :, : n - window] = pool
    expected = expect(pooled, seq_lens, budget, window)
    check(policies.snapkv(scores, seq_lens, budget, window, kernel_size), expected, seq_lens, scores.shape[-1], budget)


def test_the_pool_of_snapkv_sees_no_key_of_the_window():
    scores = torch.tensor([[[3.0, 0.0, 0.0, 2.0, 0.0, 0.0, 90.0, 90.0]]], device=DEVICE)
    keep, _ = policies.snapkv(scores, torch.tensor([8], device=DEVICE), budget=4, window=2, kernel_size=3)
    # Means of keys 0 to 5: 1, 1, 2/3, 2/3, 2/3, 0; with the window key 5 would have the best.
    assert keep.tolist() == [[[0, 1, 6, 7]]]


@given(problems(VALUES + ODD), st.integers(1, 9))
@effort(100)
def test_tova_keeps_the_same_keys_for_all_heads(problem, budget):
    scores, seq_lens = problem
    heads, width = scores.shape[1:]
    means = [[sum(column) / heads for column in zip(*of_seq)] for of_seq in scores.tolist()]
    expected = [[best(row[:n], budget, 0)] * heads for row, n in zip(means, seq_lens.tolist())]
    check(policies.tova(scores, seq_lens, budget), expected, seq_lens, width, budget)


@given(problems([0.0, 0.5, 1.0, 2.0, math.nan, math.inf]), st.integers(1, 9), st.sampled_from([torch.float32, torch.float16]))
@effort(100)
def test_key_norm_keeps_the_shortest_keys(problem, budget, dtype):
    lengths, seq_lens = problem
    # Of length 5 times the number, along a direction of its own for each head.
    directions = torch.zeros(lengths.shape[1], 16, device=DEVICE)
    directions[:, 3], directions[:, 7] = 3.0, -4.0
    keys = (lengths[..., None] * directions[None, :, None]).nan_to_num(nan=math.nan, posinf=math.inf, neginf=-math.inf)
    keys = keys.where(directions[None, :, None] != 0, 0.0).transpose(1, 2).to(dtype)
    expected = expect(-lengths, seq_lens, budget, 0)
    check(policies.key_norm(keys, seq_lens, budget), expected, seq_lens, lengths.shape[-1], budget)


@given(problems(), st.integers(0, 8), st.integers(0, 8))
@effort(100)
def test_streaming_keeps_the_first_and_the_last(problem, sinks, window):
    scores, seq_lens = problem
    heads, width = scores.shape[1:]
    expected = []
    for n in seq_lens.tolist():
        keys = [key for key in range(n) if key < sinks or n - key <= window or n <= sinks + window]
        expected.append([keys] * heads)
    check(policies.streaming(seq_lens.int(), heads, width, sinks, window), expected, seq_lens, width, sinks + window)


@given(problems(), st.integers(1, 9), st.integers(0, 9))
@effort(60)
def test_random_keeps_the_latest_and_a_generator_repeats_the_rest(problem, budget, recent):
    scores, seq_lens = problem
    heads, width = scores.shape[1:]
    recent = min(recent, budget)
    keep, keep_lens = (
        policies.random(seq_lens, heads, width, budget, recent, torch.Generator(DEVICE).manual_seed(5))[part] for part in (0, 1)
    )
    found = [[row[: min(n, budget)] for row in of_seq] for of_seq, n in zip(keep.tolist(), seq_lens.tolist())]
    check((keep, keep_lens), found, seq_lens, width, budget)
    for of_seq, n in zip(found, seq_lens.tolist()):
        assert all(set(range(max(n - recent, 0), n)) <= set(row) <= set(range(n)) for row in of_seq)


def test_random_keeps_every_key_equally_often_and_each_head_its_own():
    generator = torch.Generator(DEVICE).manual_seed(3)
    keep, _ = policies.random(torch.full((2000,), 12, device=DEVICE), 2, 12, budget=6, recent=2, generator=generator)
    # Of ten keys four stay: 1600 times of 4000, with a standard deviation of 31.
    counts = torch.bincount(keep.flatten(), minlength=12).tolist()
    assert counts[10:] == [4000, 4000] and all(abs(count - 1600) < 160 for count in counts[:10])
    assert not torch.equal(keep[:, 0], keep[:, 1])


@given(problems(VALUES + ODD), st.data())
@effort(60)
def test_a_sequence_gets_the_same_alone_and_with_more_room(problem, data):
    scores, seq_lens = problem
    seq, budget = data.draw(st.integers(0, len(seq_lens) - 1)), data.draw(st.integers(1, 9))
    n, wider = int(seq_lens[seq]), torch.nn.functional.pad(scores, (0, 5), value=data.draw(st.sampled_from([1e9, math.nan])))
    for policy in (
        lambda scores, lens: policies.h2o(scores, lens, budget - budget // 2, budget // 2),
        lambda scores, lens: policies.snapkv(scores.nan_to_num(posinf=9.0, neginf=-9.0), lens, budget, budget // 2, 3),
        lambda scores, lens: policies.tova(scores, lens, budget),
        lambda scores, lens: policies.key_norm(scores.transpose(1, 2)[..., None], lens, budget),
        lambda scores, lens: policies.streaming(lens, scores.shape[1], scores.shape[2], budget - budget // 2, budget // 2),
    ):
        together, together_lens = policy(scores, seq_lens)
        for case in (scores, wider):
            keep, keep_lens = policy(case[seq : seq + 1], seq_lens[seq : seq + 1])
            assert keep_lens.tolist() == [int(together_lens[seq])] == [min(n, budget)]
            assert torch.equal(keep[0, :, : min(n, budget)], together[seq, :, : min(n, budget)])


def test_dense_scores_follow_the_page_table():
    paged = torch.arange(2.0, 26.0, device=DEVICE).view(4, 3, 2)
    table = torch.tensor([[2, 0, -7], [3, 4, 1], [-1, 7, 2**31 - 1]], dtype=torch.int32, device=DEVICE)
    paged[1] = math.nan
    dense = policies.dense_scores(paged, table, torch.tensor([5, 6, 9], device=DEVICE))
    assert dense.shape == (3, 2, 9) and dense.dtype == torch.float32
    for seq, n in enumerate([5, 6, 9]):
        for key in range(9):
            page = int(table[seq, key // 3])
            expected = paged[page, key % 3].tolist() if key < n and 0 <= page < 4 else [0.0, 0.0]
            assert dense[seq, :, key].tolist() == expected


def test_no_page_no_sequence_and_no_key_are_empty_results():
    lens = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    no_pages = policies.dense_scores(torch.empty(0, 4, 3, device=DEVICE), torch.zeros(2, 1, dtype=torch.int64, device=DEVICE), lens + 2)
    assert no_pages.tolist() == [[[0.0] * 4] * 3] * 2
    scores = policies.dense_scores(torch.empty(5, 4, 3, device=DEVICE), torch.zeros(2, 0, dtype=torch.int64, device=DEVICE), lens)
    assert scores.shape == (2, 3, 0)
    for keep, keep_lens in (policies.snapkv(scores, lens, 3, 1), policies.h2o(scores, lens, 2, 1), policies.streaming(lens, 3, 0, 1, 2)):
        assert keep.shape == (2, 3, 0) and keep_lens.tolist() == [0, 0]
    keep, keep_lens = policies.tova(scores[:0], lens[:0], 3)
    assert keep.shape == (0, 3, 0) and keep_lens.shape == (0,)


def test_the_rules_compile_without_a_graph_break():
    paged = torch.rand(6, 4, 2, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    table, lens = torch.tensor([[5, 1, 0], [2, 3, 4]], device=DEVICE), torch.tensor([11, 3], device=DEVICE)

    def rules(paged, table, lens):
        scores = policies.dense_scores(paged, table, lens)
        keys = scores.transpose(1, 2)[..., None]
        return (
            policies.h2o(scores, lens, 3, 2), policies.snapkv(scores, lens, 5, 2), policies.tova(scores, lens, 4),
            policies.key_norm(keys, lens, 4), policies.streaming(lens, 2, 12, 1, 3),
        )  # fmt: skip

    compiled = torch.compile(rules, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(paged, table, lens), rules(paged, table, lens)):
        assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


SCORES, LENS = torch.zeros(2, 3, 8), torch.tensor([8, 4])


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (DTypeError, "scores: expected a torch.Tensor, got list", lambda: policies.h2o([[0.0]], LENS, 1, 1)),
        (DTypeError, "scores: expected torch.float32 or", lambda: policies.tova(SCORES.double(), LENS, 1)),
        (ShapeError, r"scores: expected shape \[num_seqs, num_kv_heads, width\], got \[3, 8\]", lambda: policies.tova(SCORES[0], LENS, 1)),
        (ShapeError, r"seq_lens: expected shape \[2\], got \[1\]", lambda: policies.snapkv(SCORES, LENS[:1], 4, 2)),
        (DTypeError, "seq_lens: expected torch.int32 or torch.int64, got torch.float32", lambda: policies.h2o(SCORES, LENS.float(), 1, 1)),
        (DeviceError, "seq_lens: expected device cpu", lambda: policies.key_norm(SCORES[..., None], LENS.to("meta"), 1)),
        (RangeError, "heavy: expected at least 0, got -1", lambda: policies.h2o(SCORES, LENS, -1, 1)),
        (DTypeError, "recent: expected an int, got 0.5", lambda: policies.h2o(SCORES, LENS, 1, 0.5)),
        (RangeError, "budget: expected at least 1, got 0", lambda: policies.tova(SCORES, LENS, 0)),
        (RangeError, "window: expected at most the budget, 4, got 5", lambda: policies.snapkv(SCORES, LENS, 4, 5)),
        (RangeError, "kernel_size: expected an odd number of keys, got 4", lambda: policies.snapkv(SCORES, LENS, 4, 2, 4)),
        (RangeError, "recent: expected at most the budget, 2, got 3", lambda: policies.random(LENS, 2, 8, 2, 3)),
        (ShapeError, "keys: expected shape", lambda: policies.key_norm(SCORES, LENS, 1)),
        (RangeError, "num_kv_heads: expected at least 1, got 0", lambda: policies.streaming(LENS, 0, 8, 1, 1)),
        (DTypeError, "width: expected an int, got None", lambda: policies.streaming(LENS, 2, None, 1, 1)),
        (DTypeError, "scores: expected torch.float32", lambda: policies.dense_scores(SCORES.half(), LENS[:, None], LENS)),
        (ShapeError, r"page_table: expected shape \[num_seqs, max_pages\]", lambda: policies.dense_scores(SCORES, LENS, LENS)),
    ],
)
def test_wrong_arguments_are_named(error, message, call):
    with pytest.raises(error, match=message):
        call()
