"""paged_decode through Triton's real frontend, with every access checked for its bounds and every pair of programs for races."""

from dataclasses import replace

import pytest
import torch
from caches import FORMATS, q_dtypes
from checked import (
    ACROSS,
    ALL_OPTIONS,
    OPTIONS,
    SPLITS,
    WHOLE,
    bytes_of_a_sequence,
    chain_and_forks,
    empty_of,
    lied,
    lies_of,
    only_written_in,
    tight,
    view_for_out,
    workspace_of,
)
from problems import build

pytestmark = pytest.mark.sanitize

# page_size, kv_heads, group, head_dim, q_len, layout, config: tiles of many pages, of one, and inside of one; rows of one tile and of two.
SHAPES = {
    "page1": (1, 2, 3, 24, None, "wide", WHOLE),
    "page3": (3, 1, 8, 40, 3, "interleaved", SPLITS),
    "page16": (16, 2, 1, 16, None, "nhd", SPLITS),
    "page16-across": (16, 1, 5, 72, 2, "inline", ACROSS),
    "page32-inside": (32, 1, 17, 48, None, "hnd", WHOLE),
}


@pytest.mark.parametrize(("kind", "shape"), [(kind, shape) for i, kind in enumerate(FORMATS) for shape in list(SHAPES)[i % 2 :: 2]])
def test_every_format_on_kinds_of_tiles(kind, shape):
    page_size, kv_heads, group, dim, q_len, layout, config = SHAPES[shape]
    dtypes = sorted(q_dtypes(kind), key=str)
    q_dtype = dtypes[list(SHAPES).index(shape) % len(dtypes)]
    problem = build(kind, [37, 0, 5], page_size, kv_heads, group, dim, q_dtype, q_len, layout)
    tight(problem, config=config).check()


@pytest.mark.parametrize(
    ("kind", "q_len", "config", "name"),
    [("int8/token_head", 3, SPLITS, name) for name in OPTIONS]
    + [("bf16", None, WHOLE, name) for name in ("plain", "sinks", "softcap", "alibi")],
)
def test_every_option_with_several_rows_and_with_one(kind, q_len, config, name):
    tight(build(kind, [40, 17, 0], 16, 1, 2, 16, torch.bfloat16, q_len, **OPTIONS[name]), config=config).check()


@pytest.mark.parametrize(("kind", "page_size", "q_len"), [("fp32", 3, None), ("fp8_e4m3/token_head", 16, 9)])
def test_all_options_together(kind, page_size, q_len):
    tight(build(kind, [40, 17, 0], page_size, 1, 2, 24, torch.float32, q_len, **ALL_OPTIONS), config=SPLITS).check()


@pytest.mark.parametrize(("size", "options"), [(9, {}), (11, ALL_OPTIONS)])
def test_trees_of_new_tokens_in_masks_as_large_as_they_are_and_larger(size, options):
    problem = build("fp16", [40, 17, 0], 3, 1, 2, 16, torch.float16, 9, mask=chain_and_forks(3, size), **options)
    tight(problem, config=SPLITS).check()


def test_a_mask_that_sequences_share():
    mask = chain_and_forks(1, 9).expand(3, 9, 9)
    build("fp16", [40, 17, 9], 3, 1, 2, 16, torch.float16, 9, window=5, mask=mask, launch={"config": WHOLE}).check()


def splits_problem():
    return tight(build("fp16", [40, 33, 0], 16, 1, 2, 16, torch.float16, 2), config=SPLITS)


@pytest.mark.parametrize("hint", [0, 1, 39, 41, 10**9])
def test_hints_that_lie(hint):
    splits_problem().check(max_seq_len=hint)
    tight(build("fp16", [40, 33, 0], 16, 1, 2, 16, torch.float16, 2, window=20), config=SPLITS).check(max_seq_len=hint)


def test_every_size_of_a_workspace(checker):
    problem = splits_problem()
    one_split = 3 * 2 * 2 * (16 + 1) * 4
    for size, launches in ((0, 1), (2 * one_split - 1, 1), (2 * one_split, 2), (2 * one_split + 7, 2), (9 * one_split, 2)):
        before = checker.launches
        problem.check(workspace=workspace_of(problem, size))
        assert checker.launches - before == launches
    problem.check(workspace=torch.empty(3 * one_split // 4, device=problem.q.device))


@pytest.mark.parametrize("config", [WHOLE, SPLITS])
def test_results_in_a_view_of_a_wider_tensor_and_in_float32(config):
    problem = splits_problem()
    for dtype in (torch.float16, torch.float32):
        whole, view = view_for_out(problem.q, dtype)
        problem.check(out=view, config=config)
        assert only_written_in(whole, view)


def test_deterministic_in_one_launch_and_in_several(checker):
    problem = build("fp8_e4m3/tensor", [70, 0, 33], 16, 1, 2, 16, torch.float16, 2, kv_start=[1, 2, 3], mask=chain_and_forks(3, 2))
    problem = tight(problem, config=SPLITS)
    before = checker.launches
    out, lse = problem.check(deterministic=True)
    assert checker.launches - before == 3
    for at_once, launches in ((2, 6), (1, 9)):
        workspace = workspace_of(problem, at_once * bytes_of_a_sequence(problem))
        before = checker.launches
        again, lse_again = problem.run(deterministic=True, workspace=workspace)
        assert checker.launches - before == launches
        assert torch.equal(out, again) and torch.equal(lse, lse_again)


def test_launches_as_they_are_without_a_config():
    for kind, q_len in (("fp16", None), ("int8/token_head", 4)):
        tight(build(kind, [300, 17], 16, 1, 3, 64, torch.float16, q_len, index_dtype=torch.int64)).check()


@pytest.mark.parametrize("page_size", [3, 16])
def test_sequences_tables_and_caches_of_nothing(page_size):
    for config in (WHOLE, SPLITS):
        problem = tight(build("fp16", [0, 0], page_size, 1, 2, 16, torch.float16, 2), config=config)
        assert problem.page_table.shape == (2, 0)
        problem.check()
        problem.seq_lens += 7
        problem.run()
    problem = tight(build("fp16", [5, 20], page_size, 1, 2, 16, torch.float16, 2), config=SPLITS)
    problem.cache = empty_of("fp16", 0, page_size, 1, 16)
    out, lse = problem.check()
    assert not out.any() and bool((lse == -torch.inf).all())


@pytest.mark.parametrize(("dtype", "page_size", "options"), [
    (torch.int32, 3, {}), (torch.int64, 16, {}),
    (torch.int32, 16, {"window": 7, "sinks": 2, "kv_start": [3] * 9, "q_start": [40] * 9}),
    (torch.int64, 3, {"kv_start": [3] * 9, "q_start": [40] * 9}),
])  # fmt: skip
def test_wrong_numbers_lead_nowhere_and_harm_no_other_sequence(dtype, page_size, options):
    problem = tight(build("int8/token_head", [40] * 9, page_size, 1, 2, 16, torch.float16, 2, index_dtype=dtype, **options), config=SPLITS)
    out, lse = problem.check()
    lies = lies_of(dtype)
    for name in ("seq_lens", "page_table", *(name for name in ("kv_start", "q_start") if name in options)):
        given = problem.options.get(name, getattr(problem, name, None))
        wrong = lied(given, lies)
        if name in options:
            other, other_lse = problem.run(**{name: wrong})
        elif name == "seq_lens":
            other, other_lse = replace(problem, seq_lens=wrong).run()
        else:
            # The keys of such a page are left out.
            other, other_lse = replace(problem, page_table=wrong, _truth=None).check()
        assert torch.equal(other[len(lies) :], out[len(lies) :]) and torch.equal(other_lse[len(lies) :], lse[len(lies) :])
