"""Rotation at read, pinned pages and key_scores under the checker."""

import pytest
import torch
from caches import q_dtypes
from checked import DEVICE, SPLITS, WHOLE, dense, lied, lies_of, tight
from problems import build
from ragged import build as build_ragged

import tkv
from tkv import reference

pytestmark = pytest.mark.sanitize

KINDS = ["bf16", "fp8_e4m3/token_head", "int8/channel", "int4/group32", "int4/token_head"]


def tables(rows, dim, interleaved=False):
    """Tables with nothing around them."""
    rope = tkv.Rope.of(rows, dim, theta=100.0, interleaved=interleaved, device=DEVICE)
    return tkv.Rope(dense(rope.cos), dense(rope.sin), interleaved)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_every_kind_are_rotated_within_their_tables(kind):
    options = {"window": 9, "sinks": 3, "rope": tables(14, 20)} if KINDS.index(kind) % 2 else {"rope": tables(40, 32, True)}
    tight(build(kind, [37, 0, 5], 16, 2, 2, 32, q_dtypes(kind)[0], 3, **options), config=SPLITS).check()


def test_new_keys_are_rotated_beside_cached_ones():
    options = {"window": 12, "sinks": 2, "rope": tables(20, 16)}
    tight(build_ragged("int8/token_head", [3, 1, 0], [20, 0, 5], 16, 1, 2, 32, **options), config=WHOLE).check()


@pytest.mark.parametrize("window", [None, 9])
def test_pinned_pages_stand_before_a_gap(window):
    options = {"window": window, "sinks": 4} if window else {}
    tight(build("fp16", [37, 5], 16, 1, 3, 32, torch.float16, 2, kv_start=[64, 0], pinned=16, **options), config=SPLITS).check()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_scores_stay_in_their_slots(kind, reduce):
    options = {"window": 11, "sinks": 2, "rope": tables(20, 32)} if reduce == "max" else {"softcap": 5.0}
    problem = tight(build(kind, [37, 0, 5], 16, 2, 3, 32, q_dtypes(kind)[-1], 2, **options))
    _, lse = problem.run()
    args = (problem.q, problem.cache, problem.page_table, problem.seq_lens, dense(lse))
    scores = torch.zeros(problem.cache.num_pages, 16, 2, device=DEVICE)
    tkv.key_scores(*args, reduce=reduce, out=scores, **problem.options)
    expected = reference.key_scores(*args, reduce=reduce, **problem.options).nan_to_num(0.0)
    torch.testing.assert_close(scores.double(), expected, rtol=2e-2, atol=1e-3)


def test_lengths_and_pages_that_lie_score_nothing_outside():
    problem = tight(build("int8/token_head", [40, 17, 5, 9], 16, 1, 2, 32, torch.float16, 2))
    lse = torch.zeros(4, 2, 2, device=DEVICE)
    lens, table = problem.seq_lens, problem.page_table
    for first in range(0, len(lies_of(lens.dtype)), 4):
        lies = lies_of(lens.dtype)[first : first + 4]
        tkv.key_scores(problem.q, problem.cache, table, lied(lens, lies), lse)
        tkv.key_scores(problem.q, problem.cache, lied(table, lies), lens, lse)
