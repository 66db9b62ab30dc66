"""Windows, sink tokens, learned sinks, and calls that cover a part of a sequence."""

import math

import pytest
import torch
import triton
import triton.language as tl
from bounds import assert_close_to_reference
from caches import FORMATS
from hypothesis import given
from hypothesis import strategies as st
from problems import Problem, build, effort, looking_at, test_device

import tkv
from tkv.kernels.args import Limits
from tkv.kernels.tiles.visibility import view_of
from tkv.tune.configs import AttentionConfig

DEVICE = test_device()
SMALL = AttentionConfig(16, 16, 4, 1)
SPLIT = AttentionConfig(16, 16, 4, 1, 16)


def spiky(key, score):
    """Values that say which key they came from, and one key with a score of its own beside zeros."""

    def edit(q, k, v):
        q[:] = 1.0
        k[:] = 0.0
        k[key] = score / k.shape[-1] ** 0.5
        v[:] = torch.arange(1.0, len(v) + 1)[:, None, None]

    return edit


def by_hand(visible, key, score):
    """out and lse of `spiky`."""
    weights = {j: math.exp(score) if j == key else 1.0 for j in visible}
    total = sum(weights.values())
    return sum(w * (j + 1) for j, w in weights.items()) / total, math.log(total)


@pytest.mark.parametrize("sinks", [0, 1, 4])
@pytest.mark.parametrize("window", [1, 4, 15, 16, 17, 31])
@pytest.mark.parametrize("config", [SMALL, SPLIT], ids=["whole", "split"])
def test_a_key_is_seen_exactly_while_it_is_in_the_window_or_a_sink(config, window, sinks):
    n, score = 50, 9.0
    for distance in (window - 1, window, window + 1):
        key = n - 1 - distance
        visible = [j for j in range(n) if n - 1 - j < window or j < sinks]
        # What must not be seen would win if it were.
        edit = spiky(key, score if key in visible else 60.0)
        problem = build("fp32", [n], 16, dim=16, edit=edit, window=window, sinks=sinks, launch={"config": config})
        out, lse = problem.check()
        expected, expected_lse = by_hand(visible, key, score)
        assert out[0, 0].tolist() == pytest.approx([expected] * 16, rel=1e-5)
        assert lse.item() == pytest.approx(expected_lse, abs=1e-5)


@pytest.mark.parametrize("q_len", [2, 3, 20])
def test_each_row_of_a_block_has_a_window_of_its_own(q_len):
    n, window, score = 40, 5, 7.0
    for key in (n - window - 2, n - window, n - 3):
        problem = build("fp32", [n], 16, dim=16, q_len=q_len, edit=spiky(key, score), window=window, sinks=1, launch={"config": SMALL})
        out, _ = problem.check()
        for row in range(q_len):
            p = n - q_len + row
            expected, _ = by_hand([j for j in range(p + 1) if p - j < window or j < 1], key, score)
            assert out[0, row, 0, 0].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("sinks", [0, 1, 3, 16, 20])
def test_sinks_stay_visible_and_what_lies_between_them_and_the_window_is_not(sinks):
    for n in (5, 20, 60):
        build("fp8_e4m3/token_head", [n], 16, 1, 2, 16, torch.float16, window=6, sinks=sinks, spike=8.0, launch={"config": SMALL}).check()


def test_a_window_longer_than_the_sequence_changes_nothing():
    problem = build("bf16", [33, 5], 16, 1, 2, 32)
    out, lse = problem.check()
    for window, sinks in ((33, 0), (34, 2), (2**31, 5), (10**12, 10**12), (1, 33)):
        again, lse_again = problem.check(window=window, sinks=sinks)
        torch.testing.assert_close((again.float(), lse_again), (out.float(), lse), rtol=1e-2, atol=1e-5)


def test_sinks_without_a_window_change_nothing():
    problem = build("fp32", [33, 5], 16, 1, 2, 32)
    assert torch.equal(problem.run(sinks=7)[0], problem.run()[0])


def with_parts(problem, cuts):
    """The problem as one problem a part: parts begin at the cuts, which are multiples of the page size."""
    lens = problem.seq_lens.tolist()
    rows = problem.q.shape[1] if problem.q.dim() == 4 else 1
    starts = problem.options.get("kv_start", torch.zeros_like(problem.seq_lens))
    q_start = problem.options.get("q_start", problem.seq_lens + starts - rows)
    parts = []
    for begin, end in zip([0, *cuts], [*cuts, None], strict=True):
        page = begin // problem.cache.page_size
        table = problem.page_table[:, page : None if end is None else end // problem.cache.page_size]
        part_lens = [max(0, min(n, end if end is not None else n) - begin) for n in lens]
        options = {**problem.options, "kv_start": starts + begin, "q_start": q_start}
        if parts:
            options.pop("sink_logits", None)
        seq_lens = torch.tensor(part_lens, dtype=problem.seq_lens.dtype, device=DEVICE)
        parts.append(Problem(problem.q, problem.cache, table, seq_lens, options, problem.launch, v_size=problem.v_size))
    return parts


@st.composite
def cut_problems(draw):
    kind = draw(st.sampled_from(FORMATS))
    page_size = draw(st.sampled_from([1, 3, 16]))
    lens = draw(st.lists(st.integers(0, 60), min_size=1, max_size=2))
    q_len = draw(st.sampled_from([None, 2, 5]))
    options = {}
    if draw(st.booleans()):
        options |= {"window": draw(st.integers(1, 40)), "sinks": draw(st.sampled_from([0, 2, 4, 20]))}
    if draw(st.booleans()):
        options["alibi_slopes"] = [0.5, 0.0625]
    if draw(st.booleans()):
        options["sink_logits"] = [1.0, -2.0]
    if draw(st.booleans()):
        options["kv_start"] = [draw(st.sampled_from([0, 3, 40])) for _ in lens]
    count = draw(st.integers(1, 3))
    cuts = sorted(page_size * draw(st.integers(0, 60 // page_size)) for _ in range(count))
    config = draw(st.sampled_from([None, SMALL, SPLIT]))
    seed = draw(st.integers(0, 2**31))
    return build(kind, lens, page_size, 1, 2, 32, q_len=q_len, seed=seed, spike=8.0, launch={"config": config}, **options), cuts


@effort(30)
@given(cut_problems())
def test_parts_of_a_sequence_merge_into_the_whole(case):
    problem, cuts = case
    outs, lses = [], []
    for part in with_parts(problem, cuts):
        out = torch.empty(part.q.shape, dtype=torch.float32, device=DEVICE)
        _, lse = part.check(out=out)
        outs.append(out)
        lses.append(lse)
    merged, lse = tkv.merge_states(outs, lses)
    assert_close_to_reference(merged, lse, problem.truth, problem.q.dtype, problem.v_size)


def test_a_part_before_the_query_is_seen_whole_and_one_behind_it_not_at_all():
    before = build("fp32", [20], 16, 1, 1, 16, kv_start=[5], q_start=[1000])
    _, lse = before.check()
    assert lse.item() == pytest.approx(build("fp32", [20], 16, 1, 1, 16).check()[1].item(), abs=1e-5)
    out, lse = build("fp32", [20], 16, 1, 1, 16, kv_start=[50], q_start=[49]).check()
    assert not out.any() and lse.item() == -torch.inf
    _, lse = build("fp32", [20], 16, 1, 1, 16, kv_start=[50], q_start=[50], scale=0.0).check()
    assert lse.item() == pytest.approx(0.0, abs=1e-6), "a query at the position of the first key sees it alone"


def test_sinks_are_positions_so_a_later_part_has_none():
    options = {"window": 3, "sinks": 8, "q_start": [100], "scale": 0.0}
    for start, visible in ((0, 8), (5, 3), (8, 0), (90, 2), (98, 3), (99, 2)):
        _, lse = build("fp32", [10], 16, 1, 1, 16, kv_start=[start], launch={"config": SMALL}, **options).check()
        count = sum(1 for p in range(start, start + 10) if p <= 100 and (100 - p < 3 or p < 8))
        assert start != 0 or count == visible
        assert lse.item() == pytest.approx(math.log(count), abs=1e-5) if count else lse.item() == -torch.inf


@pytest.mark.parametrize("config", [SMALL, SPLIT], ids=["whole", "split"])
def test_a_learned_sink_joins_the_denominator_once(config):
    logits = [1.0, -3.0, 40.0, -torch.inf]
    problem = build("fp32", [50, 0], 16, 2, 2, 16, scale=0.0, sink_logits=logits, launch={"config": config})
    out, lse = problem.check()
    plain, _ = problem.check_without("sink_logits")
    for head, logit in enumerate(logits):
        share = 50 / (50 + math.exp(logit))
        torch.testing.assert_close(out[0, head], plain[0, head] * share, rtol=1e-5, atol=1e-6)
        assert lse[0, head].item() == pytest.approx(math.log(50 + math.exp(logit)), abs=1e-5)
        assert lse[1, head].item() == logit, "of an empty sequence the sink is all there is"
    assert not out[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_learned_sinks_may_have_any_float_dtype(dtype):
    logits = torch.tensor([0.5, 2.25], dtype=dtype, device=DEVICE)
    build("fp16", [20], 16, 1, 2, 16, torch.float16, sink_logits=logits).check()


def test_alibi_counts_from_positions_and_not_from_the_keys_of_the_part():
    # One key a part: its score is minus the slope times how far it lies behind the query.
    for start, position in ((0, 7), (5, 7), (7, 7), (10**6, 10**6 + 3)):
        problem = build("fp32", [1], 16, 1, 2, 16, kv_start=[start], q_start=[position], alibi_slopes=[0.5, 0.25], scale=0.0)
        _, lse = problem.check()
        assert lse[0].tolist() == pytest.approx([-0.5 * (position - start), -0.25 * (position - start)], rel=1e-6, abs=1e-6)


@triton.jit
def count_tiles_kernel(lens_ptr, out_ptr, q_len, limits, ATTEND: tl.constexpr):
    num_keys = tl.load(lens_ptr + tl.program_id(0))
    first, last = num_keys - q_len, num_keys - 1
    _, visits, _ = view_of(num_keys, num_keys * 0, num_keys * 0, (first, last, first, last), limits, 0, ATTEND)
    tl.store(out_ptr + tl.program_id(0), visits[3])


@pytest.mark.parametrize(("window", "sinks", "q_len"), [(100, 4, 1), (1, 0, 1), (64, 64, 5), (17, 1, 64)])
def test_the_tiles_that_are_visited_do_not_grow_with_the_context(window, sinks, q_len):
    lens = torch.tensor([1000, 10_000, 123_457, 10**6, 2**30], dtype=torch.int32, device=DEVICE)
    out = torch.zeros_like(lens)
    count_tiles_kernel[(len(lens),)](lens, out, q_len, Limits(0.0, window, sinks, 0), looking_at(16, True))
    at_most = -(-sinks // 16) + -(-(window + q_len - 1) // 16) + 1
    assert int(out.max()) <= at_most and int(out.min()) >= at_most - 1


def test_pages_left_of_the_window_are_not_followed():
    # Over a long table, nearly every page would be out of the cache's memory.
    problem = build("fp16", [900], 16, 1, 2, 16, torch.float16, window=20, sinks=2, seed=1, spike=9.0)
    problem.page_table[0, 1:50] = 2**30
    problem.check()
