"""shared_prefix_decode under the checker: levels that are launched one after the other, each with splits, the rest, and their merge."""

from dataclasses import replace

import pytest
import torch
from caches import FORMATS, q_dtypes
from checked import (
    ALL_OPTIONS,
    OPTIONS,
    SPLITS,
    WHOLE,
    chain_and_forks,
    dense,
    far_off,
    lied,
    lies_of,
    only_written_in,
    stays_inside,
    tight,
    tight_level,
    view_for_out,
    workspace_of,
)
from trees import grow

pytestmark = pytest.mark.sanitize

# Three levels: one group of five sequences, then groups of two, of which one goes on; one sequence that shares nothing.
NODES, PATHS, OWN = [32, 7, 16, 20], [(0, 1, 3), (0, 1, 3), (0, 1), (0, 2), (0, 2), ()], [5, 9, 0, 17, 3, 21]
# Two levels of which one leaves sequences out, and a group of one.
FORKED = {"nodes": [21, 40, 6], "paths": [(0,), (0, 1), (0, 1), (2,)], "own": [4, 18, 0, 1]}

# page_size, kv_heads, group, head_dim, q_len, layout, config, level_config: rows of a group in one tile and in several.
SHAPES = {
    "page1": (1, 1, 3, 24, None, "wide", WHOLE, WHOLE),
    "page3": (3, 2, 1, 40, 3, "interleaved", SPLITS, WHOLE),
    "page16": (16, 1, 5, 16, 2, "nhd", SPLITS, SPLITS),
    "page32-inside": (32, 1, 6, 48, None, "hnd", WHOLE, SPLITS),
}


@pytest.fixture(autouse=True)
def every_level_pays(monkeypatch):
    """Also one of few keys."""
    monkeypatch.setattr("tkv.ops.cascade.MIN_KEYS_SAVED", 0)


def forked(kind="fp16", q_len=2, page_size=16, **options):
    """Sequences of two heads whose levels are made by hand. Rows of a group see different keys: what some of them see is no poison."""
    problem = grow(kind, **FORKED, page_size=page_size, group=2, q_dtype=torch.float16, q_len=q_len, apart=True, strict=False, **options)
    return tight(problem, config=SPLITS, level_config=SPLITS)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(kind, list(SHAPES)[i % 4]) for i, kind in enumerate(FORMATS)] + [("fp16", "page16"), ("int8/token_head", "page3")],
)
def test_every_format_on_three_levels(kind, shape, checker):
    page_size, kv_heads, group, dim, q_len, layout, config, level_config = SHAPES[shape]
    dtypes = sorted(q_dtypes(kind), key=str)
    q_dtype = dtypes[list(SHAPES).index(shape) % len(dtypes)]
    problem = grow(kind, NODES, PATHS, OWN, page_size, kv_heads, group, dim, q_dtype, q_len, layout=layout, apart=True)
    assert len(problem.levels) == 3
    before = checker.launches
    tight(problem, config=config, level_config=level_config).check()
    assert checker.launches - before == 5


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "plain"])
def test_every_option(name):
    options = {"kv_start": {"kv_start": [3, 3, 3, 3]}, "q_start": {"q_start": [50, 79, 80, 5]}}.get(name, OPTIONS[name])
    forked("int8/token_head", **options).check()


@pytest.mark.parametrize(("kind", "q_len", "page_size"), [("fp16", None, 16), ("fp8_e4m3/tensor", 3, 3)])
def test_all_options_together(kind, q_len, page_size):
    forked(kind, q_len, page_size, **{**ALL_OPTIONS, "kv_start": [3, 3, 3, 3], "q_start": [50, 70, 60, 40]}).check()


@pytest.mark.parametrize(("size", "options"), [(5, {}), (8, {"window": 30, "sinks": 3, "alibi_slopes": [0.5, 0.0]})])
def test_trees_of_new_tokens(size, options, checker):
    problem = forked(q_len=5, mask=chain_and_forks(4, size).cpu(), **options)
    before = checker.launches
    problem.check()
    assert checker.launches - before == 5


def test_levels_that_are_found_and_levels_that_do_not_pay(monkeypatch, checker):
    problem = tight(grow("bf16", NODES, PATHS, OWN, 16, 1, 2, 16, torch.bfloat16), config=WHOLE, level_config=WHOLE)
    for saved, launches in ((0, 4), (10**6, 1)):
        monkeypatch.setattr("tkv.ops.cascade.MIN_KEYS_SAVED", saved)
        before = checker.launches
        problem.check()
        assert checker.launches - before == launches


@pytest.mark.parametrize("hint", [0, 1, 39, 100])
def test_hints_that_lie(hint):
    problem = forked()
    for levels in (problem.levels, [replace(level, max_len=hint, max_group=hint) for level in problem.levels]):
        replace(problem, levels=levels).check(max_seq_len=hint)


def test_every_size_of_a_workspace():
    problem = forked()
    one_part = 4 * 2 * 2 * (16 + 1) * 4
    for size in (3 * one_part, 6 * one_part + 5, 50 * one_part):
        problem.check(workspace=workspace_of(problem, size))


def test_results_in_a_view_of_a_wider_tensor_and_in_float32():
    problem = forked()
    for dtype in (torch.float16, torch.float32):
        whole, view = view_for_out(problem.q, dtype)
        problem.check(out=view)
        assert only_written_in(whole, view)


def test_launches_as_they_are_without_a_config():
    tight(grow("fp16", [130], [(0,)] * 3, [5, 70, 1], 16, 1, 3, 64, torch.float16, index_dtype=torch.int64)).check()


@pytest.mark.parametrize("keys", [0, 7, 2**31 - 1])
def test_groups_of_no_sequences_and_groups_of_no_keys(keys):
    """A group without sequences may say of its keys what it likes; one without keys leaves them to its sequences."""
    problem = grow("fp16", [32, 20], [(0,), (0,), (1,), (1,)], [5, 9, 0, 3], 16, 1, 2, 16, apart=True)
    problem = tight(problem, config=WHOLE, level_config=SPLITS)
    (level,) = problem.levels
    table, lens, starts, cu_seqs = level.page_table, level.lens, level.starts, level.cu_seqs
    nobody = replace(
        level,
        page_table=torch.cat([table[:1], torch.full_like(table, 2**30), table[1:]]),
        lens=torch.cat([lens[:1], torch.full_like(lens, keys), lens[1:]]),
        starts=torch.cat([starts[:1], starts, starts[1:]]),
        cu_seqs=torch.cat([cu_seqs[:2], cu_seqs[1:2], cu_seqs[1:]]),
    )
    assert nobody.cu_seqs.tolist() == [0, 2, 2, 2, 4]
    replace(problem, levels=[tight_level(nobody)]).check()
    # The sequences' own table has what the levels leave to them in `whole_table` only.
    nothing = replace(level, lens=torch.zeros_like(lens))
    replace(problem, levels=[nothing], page_table=problem.whole_table).check()


@pytest.mark.parametrize(("dtype", "page_size"), [(torch.int32, 16), (torch.int64, 3)])
def test_wrong_numbers_lead_nowhere_and_harm_no_other_group(dtype, page_size):
    lies = lies_of(dtype)
    paths = [(group,) for group in range(len(lies) + 1) for _ in range(2)] + [()]
    nodes, own = [37] * (len(lies) + 1), [4] * len(paths)
    problem = grow("int8/token_head", nodes, paths, own, page_size, 1, 2, 16, torch.float16, apart=True, index_dtype=dtype)
    problem = tight(problem, config=WHOLE, level_config=SPLITS)
    out, lse = problem.check()
    honest = slice(2 * len(lies), None)
    (level,) = problem.levels
    levels = [replace(level, **{name: lied(getattr(level, name), lies)}) for name in ("lens", "page_table", "starts")]
    wrong = [replace(problem, levels=[level]) for level in levels]
    per_seq = [lie for lie in lies for _ in range(2)]
    wrong += [replace(problem, **{name: lied(getattr(problem, name), per_seq)}) for name in ("seq_lens", "page_table")]
    for problem in wrong:
        other, other_lse = problem.run()
        assert torch.equal(other[honest], out[honest]) and torch.equal(other_lse[honest], lse[honest])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_wrong_starts_of_groups_lead_nowhere(dtype):
    problem = grow("fp16", [32, 20], [(0,), (0,), (1,), (1,)], [5, 9, 0, 3], 16, 1, 3, 16, torch.float16, apart=True, index_dtype=dtype)
    problem = tight(problem, config=WHOLE, level_config=SPLITS)
    problem.check()
    (level,) = problem.levels
    for at in range(3):
        for lie in far_off(dtype):
            wrong = dense(level.cu_seqs)
            wrong[at] = lie
            stays_inside(replace(problem, levels=[replace(level, cu_seqs=wrong)]).run)
