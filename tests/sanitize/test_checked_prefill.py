"""prefix_prefill and its trees under the checker: ragged rows, what comes with the call and what is cached, splits beside whole rows."""

from dataclasses import replace

import pytest
import torch
from caches import FORMATS, poison_, q_dtypes
from checked import (
    ACROSS,
    ALL_OPTIONS,
    OPTIONS,
    SPLITS,
    WHOLE,
    bytes_of_a_sequence,
    dense,
    far_off,
    lied,
    lies_of,
    only_written_in,
    stays_inside,
    tight,
    view_for_out,
    workspace_of,
)
from ragged import build

import tkv
from tkv.tune.configs import AttentionConfig

pytestmark = pytest.mark.sanitize

# page_size, kv_heads, group, head_dim, layout, config. Groups that are no powers of two, and larger than a tile of rows.
SHAPES = {
    "page1": (1, 1, 3, 24, "wide", WHOLE),
    "page3": (3, 2, 1, 40, "interleaved", SPLITS),
    "page16": (16, 1, 20, 16, "nhd", WHOLE),
    "page16-across": (16, 1, 5, 72, "inline", ACROSS),
    "page32-inside": (32, 2, 3, 48, "hnd", SPLITS),
}
# Where the new tokens' keys are: with the call, in the cache, or in none of them.
SOURCES = {"fresh": {"fresh": True}, "cached": {"fresh": False}, "part": {"fresh": False, "q_start": [7, 100, 41, 0]}}
Q_LENS, PREFIX_LENS = [3, 0, 1, 11], [5, 7, 40, 0]
# As OPTIONS, for four sequences.
PER_SEQUENCE = {"kv_start": [3, 0, 100, 1], "q_start": [9, 2, 150, 0]}


def for_four(options):
    return {name: PER_SEQUENCE.get(name, value) for name, value in options.items()}


@pytest.mark.parametrize(
    ("kind", "source", "shape"),
    [(kind, "fresh", list(SHAPES)[i % 5]) for i, kind in enumerate(FORMATS)]
    + [(kind, ("cached", "part")[i % 2], list(SHAPES)[(i + 2) % 5]) for i, kind in enumerate(FORMATS)],
)
def test_every_format_and_every_place_of_the_new_keys(kind, source, shape):
    page_size, kv_heads, group, dim, layout, config = SHAPES[shape]
    dtypes = sorted(q_dtypes(kind), key=str)
    q_dtype = dtypes[list(SHAPES).index(shape) % len(dtypes)]
    problem = build(kind, Q_LENS, PREFIX_LENS, page_size, kv_heads, group, dim, q_dtype, layout, tail=4, **SOURCES[source])
    tight(problem, config=config).check()


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "plain"])
def test_every_option(name):
    fresh, config = name in ("sinks", "softcap", "q_start"), WHOLE if name in ("softcap", "kv_start") else SPLITS
    options = {"fresh": fresh, **for_four(OPTIONS[name])}
    tight(build("fp8_e4m3/token_head", Q_LENS, PREFIX_LENS, 16, 1, 2, 16, torch.float16, tail=2, **options), config=config).check()


@pytest.mark.parametrize(("kind", "fresh"), [("bf16", True), ("int8/token_head", False)])
def test_all_options_together(kind, fresh):
    options = for_four(ALL_OPTIONS)
    tight(build(kind, Q_LENS, PREFIX_LENS, 3, 1, 2, 24, torch.bfloat16, tail=2, fresh=fresh, **options), config=SPLITS).check()


@pytest.mark.parametrize(
    ("fresh", "room", "options"),
    [(True, 0, {"window": 4, "sinks": 2, "alibi_slopes": [0.5, 0.25]}), (False, 0, {"window": 30}), (False, 3, {})],
)
def test_trees_with_more_rows_behind_the_last_sequence_than_a_mask_has(fresh, room, options):
    problem = build("fp16", Q_LENS, PREFIX_LENS, 16, 1, 2, 16, torch.float16, fresh=fresh, tree="tree", room=room, tail=30, **options)
    assert problem.options["mask"].shape[1] == 11 + room
    problem = tight(problem, config=SPLITS)
    problem.check()
    # Sequences of few rows are split, in one launch and in a launch for each sequence.
    out, lse = problem.check(deterministic=True)
    again, lse_again = problem.run(deterministic=True, workspace=workspace_of(problem, bytes_of_a_sequence(problem)))
    assert torch.equal(out, again) and torch.equal(lse, lse_again)


def mixed(**more):
    """A batch of decode rows and chunks, in which some sequences are split and some are not."""
    return tight(build("fp16", [0, 1, 9, 2], [0, 40, 20, 33], 16, 1, 2, 16, torch.float16, tail=3, **more), config=SPLITS)


@pytest.mark.parametrize("fresh", [True, False])
def test_hints_that_lie_decide_which_sequences_are_split(fresh, checker):
    problem = mixed(fresh=fresh)
    for max_q_len in (None, 0, 1, 2, 9, 10**9):
        before = checker.launches
        problem.check(max_q_len=max_q_len)
        assert checker.launches - before == 2
    for max_seq_len in (0, 1, 33, 10**9):
        problem.check(max_q_len=2, max_seq_len=max_seq_len)


def test_every_size_of_a_workspace(checker):
    problem = mixed(window=25)
    # Of two heads, rows are split eight at a time.
    one_split = 4 * 8 * 2 * (16 + 1) * 4
    for size, launches in ((0, 1), (2 * one_split - 1, 1), (2 * one_split, 2), (17 * one_split, 2), (17 * one_split + 3, 2)):
        before = checker.launches
        problem.check(max_q_len=2, workspace=workspace_of(problem, size))
        assert checker.launches - before == launches
    problem.check(max_q_len=2, workspace=torch.empty(17 * one_split // 4, device=problem.q.device))


@pytest.mark.parametrize("fresh", [True, False])
def test_deterministic_in_several_launches_with_empty_sequences_first_and_rows_behind_the_last(fresh, checker):
    problem = mixed(fresh=fresh, kv_start=[9, 1, 0, 4])
    before = checker.launches
    out, lse = problem.check(deterministic=True)
    assert checker.launches - before == 2
    for at_once, launches in ((3, 4), (1, 8)):
        workspace = workspace_of(problem, at_once * bytes_of_a_sequence(problem))
        before = checker.launches
        again, lse_again = problem.run(deterministic=True, workspace=workspace)
        assert checker.launches - before == launches
        assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize("config", [WHOLE, SPLITS])
def test_results_in_a_view_of_a_wider_tensor_and_in_float32(config):
    problem = mixed()
    for dtype in (torch.float16, torch.float32):
        whole, view = view_for_out(problem.q, dtype)
        problem.check(out=view, config=config, max_q_len=2)
        assert only_written_in(whole, view)


def test_q_k_and_v_in_one_tensor():
    problem = mixed()
    qkv = poison_(torch.empty(len(problem.q), 2 + 1 + 1, 16, dtype=torch.float16, device=problem.q.device))
    q, k, v = qkv.split([2, 1, 1], dim=1)
    for view, x in ((q, problem.q), (k, problem.k), (v, problem.v)):
        view.copy_(x)
    replace(problem, q=q, k=k, v=v).check()


def test_launches_as_they_are_without_a_config():
    tight(build("fp16", [20, 1, 0], [30, 70, 9], 16, 1, 3, 32, torch.float16, tail=3, index_dtype=torch.int64)).check()
    tight(build("int8/token_head", [2, 1], [30, 70], 16, 1, 3, 32, torch.bfloat16, fresh=False, index_dtype=torch.int64)).check()


def test_rows_of_sequences_without_keys_and_rows_of_no_sequence():
    problem = tight(build("fp16", [0, 0], [0, 0], 16, 1, 2, 16, torch.float16, tail=20), config=SPLITS)
    assert problem.page_table.shape == (2, 0)
    problem.check()
    tight(build("fp16", [0, 2], [0, 0], 16, 1, 2, 16, torch.float16, fresh=False, q_start=[0, 5]), config=SPLITS).check()
    # A table of no sequences takes no launch, and neither do no rows.
    none = problem.page_table[:0], problem.prefix_lens[:0], problem.cu_seqlens[:1]
    out, lse = tkv.prefix_prefill(problem.q, problem.k, problem.v, problem.cache, *none, return_lse=True)
    assert not out.any() and bool((lse == -torch.inf).all())
    assert tkv.prefix_prefill(problem.q[:0], None, None, problem.cache, *none).shape == (0, 2, 16)


def test_a_tile_of_rows_that_begins_in_the_middle_of_a_token():
    config = AttentionConfig(32, 16, 4, 1, 32)
    tight(build("fp16", [13, 1], [20, 40], 3, 1, 7, 16, torch.float16, window=18, sinks=2), config=config).check()


@pytest.mark.parametrize(("dtype", "page_size", "fresh", "options"), [
    (torch.int32, 16, True, {}), (torch.int64, 3, False, {}),
    (torch.int32, 3, True, {"window": 7, "sinks": 2, "kv_start": [3] * 9, "q_start": [40] * 9}),
    (torch.int64, 16, False, {"kv_start": [3] * 9, "q_start": [40] * 9}),
])  # fmt: skip
def test_wrong_numbers_lead_nowhere_and_harm_no_other_sequence(dtype, page_size, fresh, options):
    problem = build("int8/token_head", [2] * 9, [37] * 9, page_size, 1, 2, 16, torch.float16, fresh=fresh, index_dtype=dtype, **options)
    problem = tight(problem, config=SPLITS)
    out, lse = problem.check()
    lies = lies_of(dtype)
    for name in ("prefix_lens", "page_table", *(name for name in ("kv_start", "q_start") if name in options)):
        wrong = lied(problem.options.get(name, getattr(problem, name, None)), lies)
        if name in options:
            other, other_lse = problem.run(**{name: wrong})
        elif name == "prefix_lens":
            other, other_lse = replace(problem, prefix_lens=wrong).run()
        else:
            # The keys of such a page are left out.
            other, other_lse = replace(problem, page_table=wrong, _truth=None).check()
        honest = slice(2 * len(lies), None)
        assert torch.equal(other[honest], out[honest]) and torch.equal(other_lse[honest], lse[honest])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_wrong_starts_of_sequences_lead_nowhere(dtype):
    problem = build("fp16", [2, 9, 1], [20, 7, 40], 16, 1, 3, 16, torch.float16, tail=2, index_dtype=dtype)
    problem = tight(problem, config=SPLITS, max_q_len=2)
    problem.check()
    for at in range(4):
        for lie in far_off(dtype):
            wrong = dense(problem.cu_seqlens)
            wrong[at] = lie
            stays_inside(replace(problem, cu_seqlens=wrong).run)


def test_cached_keys_that_no_row_sees_are_not_read():
    """The cache holds NaN there; here it is also smaller than the table says."""
    problem = tight(build("fp16", [2, 3], [40, 35], 16, 1, 2, 16, torch.float16, window=5), config=SPLITS)
    table = dense(problem.page_table)
    table[:, 0] = 2**30
    replace(problem, page_table=table).check()
