"""shared_prefix_decode against the reference of whole sequences and against paged_decode: any tree, and what a search might miss."""

import itertools
from dataclasses import replace

import pytest
import torch
from caches import FORMATS, bits, poison_, q_dtypes
from hypothesis import given
from hypothesis import strategies as st
from problems import effort
from trees import Tree, branches, grow, trees

import tkv
from tkv.errors import ShapeError
from tkv.tune import configs
from tkv.tune.configs import AttentionConfig

SMALL = {"config": AttentionConfig(16, 32, 4, 1), "level_config": AttentionConfig(16, 32, 4, 1)}
SPLITS = {"config": AttentionConfig(16, 16, 4, 1, 16), "level_config": AttentionConfig(16, 16, 4, 1, 32)}
LARGE = {"config": AttentionConfig(16, 128, 4, 1), "level_config": AttentionConfig(128, 128, 4, 1)}
# System prompt, few-shot blocks, conversations: sequences end below each of them, or have nothing in common.
THREE = {"paths": [(0, 1, 3), (0, 1, 3), (0, 1), (0, 2), (0, 2), (0,), ()], "own": [5, 9, 3, 17, 0, 20, 33]}


@pytest.fixture(autouse=True)
def every_level_pays(monkeypatch):
    """Also one of few keys, or of groups of one."""
    monkeypatch.setattr("tkv.ops.cascade.MIN_KEYS_SAVED", 0)


def check_both(problem, **more):
    """Right by the reference, and the same as paged_decode in float32. Gives (out, lse)."""
    got = problem.check(**more)
    for part, plain in zip(got, problem.plain()):
        torch.testing.assert_close(part, plain, rtol=1e-5, atol=1e-5)
    return got


@pytest.mark.parametrize("kind", FORMATS)
def test_any_tree_agrees_with_the_reference(kind):
    @effort(4)
    @given(problem=trees(kind), where=st.sampled_from([None, "float32", "view"]))
    def search(problem, where):
        before = [bits(t) for t in problem.inputs]
        if where is None:
            problem.check()
        else:
            dtype = torch.float32 if where == "float32" else problem.q.dtype
            buffer = poison_(torch.empty(*problem.q.shape[:-1], problem.cache.v_head_dim + 8, dtype=dtype, device=problem.q.device))
            untouched = bits(buffer[..., -8:])
            out, _ = problem.check(out=buffer[..., :-8])
            assert out.data_ptr() == buffer.data_ptr()
            assert torch.equal(bits(buffer[..., -8:]), untouched)
        assert all(torch.equal(bits(t), old) for t, old in zip(problem.inputs, before)), "an input was modified"

    search()


GRID = list(itertools.product([12, 17], [128, 512, 2048], [17, 37], [8, 16], [1, 16]))


@pytest.mark.parametrize(
    ("batch", "shared", "unique", "heads", "page_size"),
    [case if case in [(12, 128, 17, 8, 16), (17, 128, 37, 8, 1)] else pytest.param(*case, marks=pytest.mark.deep) for case in GRID],
)
def test_a_shared_prompt_gives_what_plain_decode_gives(batch, shared, unique, heads, page_size, monkeypatch):
    monkeypatch.setattr("tkv.ops.cascade.MIN_KEYS_SAVED", configs.MIN_KEYS_SAVED)
    problem = grow(
        "fp32", [shared], [(0,)] * batch, [unique] * batch, page_size, heads // 8, 8, 16, seed=heads + batch, spike=6.0, launch=LARGE
    )
    assert [(level.max_group, level.max_len) for level in problem.levels] == [(batch, shared)]
    check_both(problem)


@pytest.mark.deep
@pytest.mark.parametrize(("batch", "shared", "unique", "heads", "page_size"), GRID[::5])
def test_a_shared_prompt_is_right_in_the_launch_that_is_chosen_by_default(batch, shared, unique, heads, page_size):
    for kind, q_dtype in (("bf16", torch.bfloat16), ("int8/token_head", torch.float16)):
        grow(kind, [shared], [(0,)] * batch, [unique] * batch, page_size, heads // 4, 4, 64, q_dtype, spike=6.0).check()


@pytest.mark.parametrize(
    ("apart", "nodes", "page_size"), [(False, [32, 16, 48, 32], 16), (False, [30, 9, 6, 12], 3), (True, [41, 7, 32, 13], 16)]
)
def test_three_levels(apart, nodes, page_size):
    problem = grow("fp32", nodes, **THREE, page_size=page_size, apart=apart, spike=7.0, launch=SMALL)
    assert [level.seqs.sort()[0].tolist() for level in problem.levels] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4], [0, 1]]
    check_both(problem)


@pytest.mark.parametrize("apart", [False, True])
def test_fewer_levels_than_there_are_leave_more_to_the_sequences(apart):
    for count in (0, 1, 2) if apart else (1,):
        problem = grow("fp32", [32, 16, 9, 20], **THREE, apart=apart, taken=count, launch=SMALL)
        problem.check(levels=problem.levels[:count])


def test_a_group_of_one():
    check_both(grow("fp32", [30, 20, 17], [(0,), (0,), (1,), (0, 2)], [4, 9, 3, 1], apart=True, group=3, launch=SMALL))
    grow("fp32", [30, 20], [(0,), (1,)], [4, 9], apart=True, q_len=2, launch=SPLITS).check()


def test_a_level_need_not_have_every_sequence():
    # Sequences that a level leaves out, at its front, between others and behind; one that only an inner level has; one without a key.
    paths = [(), (0, 1), (None, 2), (0,), (0, 1), (), (None, 2), (0, None, 3)]
    grow("fp32", [19, 33, 40, 8], paths, [30, 4, 9, 3, 0, 0, 5, 2], apart=True, launch=SMALL).check()


def test_a_level_may_have_groups_without_sequences_and_without_keys():
    problem = grow("fp32", [35, 0], [(0,), (0,), (1,)], [4, 9, 20], apart=True, group=2, launch=SMALL)
    (level,) = problem.levels
    assert level.lens.tolist() == [35, 0]
    problem.check()
    ends, table = level.cu_seqs.tolist(), poison_(level.page_table[:1].clone())
    for at in (0, 1, 2):
        empty = replace(
            level,
            page_table=torch.cat([level.page_table[:at], table, level.page_table[at:]]),
            lens=torch.cat([level.lens[:at], level.lens.new_tensor([7]), level.lens[at:]]),
            starts=torch.cat([level.starts[:at], level.starts.new_tensor([0]), level.starts[at:]]),
            cu_seqs=level.cu_seqs.new_tensor([*ends[: at + 1], *ends[at:]]),
        )
        problem.check(levels=[empty])


def test_a_sequence_may_be_covered_as_a_whole():
    problem = grow("fp32", [32, 21], [(0, 1), (0, 1), (0,)], [0, 0, 0], group=2, launch=SMALL)
    assert [level.lens.tolist() for level in problem.levels] == [[32], [16], [5]]
    check_both(problem)


def test_a_page_that_one_sequence_has_filled_further_is_shared_up_to_the_end_of_the_other():
    problem = grow("fp32", [27], [(0,), (0,)], [0, 3], launch=SMALL)
    assert torch.equal(problem.page_table[0], problem.page_table[1])
    assert [level.lens.tolist() for level in problem.levels] == [[16], [11]]
    check_both(problem)


@pytest.mark.parametrize("q_len", [1, 2, 3, 4, 5])
def test_every_row_sees_the_keys_up_to_itself(q_len):
    # New tokens that are shared: rows of the two sequences stand at different keys of the level.
    grow("fp32", [37 + q_len], [(0,), (0,), ()], [0, 2, 20], q_len=q_len, group=2, apart=True, spike=9.0, launch=SMALL).check()
    grow("fp16", [16, 16], [(0, 1), (0, 1), (0,)], [0, 3, 6], q_len=q_len, group=2, spike=9.0, launch=SPLITS).check()


@pytest.mark.parametrize(("window", "size"), [(None, 5), (None, 9), (4, 5), (20, 9)])
def test_a_tree_of_new_tokens(window, size):
    trees = [[None, 0, 0, 1, 1], [None, 0, 1, 2, 3], [None, None, 1, 0, 3]]
    mask = torch.stack([branches(parents, size) for parents in trees]).tolist()
    # The tokens of the first are keys of the level, of the second some are, and for the third they are its own.
    paths, options = [(0,), (0,), (0,)], {"window": window, "sinks": 2, "mask": mask}
    grow("fp32", [30], paths, [0, 3, 8], q_len=5, group=2, apart=True, spike=9.0, launch=SMALL, **options).check()


def test_trees_may_stand_anywhere_in_a_level():
    # Between the tokens of the two trees lie whole tiles, which only the rows of one see.
    mask = torch.stack([branches(parents, 3) for parents in ([None, 0, 0], [None, None, 1])]).tolist()
    for options in ({}, {"window": 45, "sinks": 1}):
        grow("fp32", [80], [(0,), (0,)], [5, 9], q_len=3, q_start=[20, 60], apart=True, mask=mask, launch=SPLITS, **options).check()


# The first sequence has 40 shared keys and 5 of its own.
@pytest.mark.parametrize(
    ("window", "sinks"), [(3, 0), (5, 0), (6, 2), (12, 3), (30, 17), (44, 0), (44, 1), (45, 0), (1000, 2), (2, 41)]
)
def test_a_level_with_a_window(window, sinks):
    problem = grow("fp32", [40], [(0,), (0,)], [5, 20], apart=True, window=window, sinks=sinks, spike=7.0, launch=SPLITS)
    (check_both if sinks == 3 else Tree.check)(problem)


@pytest.mark.parametrize(("window", "sinks"), [(3, 0), (12, 3), (40, 17)])
def test_windows_and_sinks_reach_into_several_levels_from_several_rows(window, sinks):
    paths, kind = [(0, 1), (0, 1), (0, 2)], "fp8_e4m3/token_head"
    grow(kind, [14, 9, 20], paths, [5, 12, 1], q_len=3, apart=True, window=window, sinks=sinks, launch=SMALL).check()


@pytest.mark.parametrize("apart", [False, True])
def test_positions_of_parts_of_sequences(apart):
    paths, own = [(0,), (0,), (1,), (1,)], [5, 20, 0, 3]
    options = {"alibi_slopes": [0.5, 0.125], "group": 2, "apart": apart, "launch": SMALL}
    grow("fp32", [32, 16], paths, own, kv_start=[7, 7, 1000, 1000], window=25, sinks=40, **options).check()
    # Rows before the keys, among those of the level, and far behind.
    grow("fp32", [32, 16], paths, own, kv_start=[7, 7, 0, 0], q_start=[-3, 20, 16, 16], q_len=2, window=25, sinks=40, **options).check()
    grow("fp32", [32, 16], paths, own, kv_start=[7, 7, 0, 0], q_start=[3, 38, 500, 8], **options).check()


def test_sequences_that_share_pages_at_different_positions_share_no_level():
    problem = grow("fp32", [32], [(0,)] * 4, [5, 9, 3, 1], kv_start=[0, 16, 16, 5], window=30, launch=SMALL)
    assert [level.seqs.tolist() for level in problem.levels] == [[1, 2]]
    check_both(problem)


@pytest.mark.parametrize(
    "option",
    [{"softcap": 1.0}, {"alibi_slopes": [1.0, 0.5]}, {"sink_logits": [3.0, 1.0]}, {"scale": 0.9}, {"window": 7, "sinks": 3}],
    ids=lambda option: "+".join(option),
)
def test_no_option_is_ignored(option):
    for kind, q_len in (("fp32", None), ("int8/token_head", 2)):
        args = {"q_dtype": torch.float32, "q_len": q_len, "q_scale": 3.0, "apart": True, "launch": SPLITS if q_len else SMALL}
        problem = grow(kind, [37], [(0,), (0,)], [4, 9], group=2, **args, **option)
        problem.check()
        plain = grow(kind, [37], [(0,), (0,)], [4, 9], group=2, **args)
        assert (problem.truth[1].cpu() - plain.truth[1].cpu()).abs().max() > 0.01, "the option matters"


@pytest.mark.parametrize("kind", FORMATS)
def test_every_dtype_of_q_is_taken_on_every_format(kind):
    for q_dtype in q_dtypes(kind):
        problem = grow(kind, [40], [(0,), (0,)], [5, 9], 16, 2, 2, 24, q_dtype, apart=True, spike=7.0, v_mix=1.0, k_scale=0.5, v_scale=4.0)
        out, _ = problem.check(**LARGE)
        assert out.dtype == q_dtype


@pytest.mark.parametrize("group", [*range(1, 9), 128])
def test_heads_of_a_group_are_rows_of_the_level(group):
    # Groups of the level that end within a tile and at its end, of one tile and of several.
    paths, own, block_m = ([(0,), (1,), (0,)], [4, 2, 9], 16) if group <= 8 else ([(0,), (0,)], [4, 2], 128)
    launch = {"config": AttentionConfig(min(block_m, 64), 32, 4, 1), "level_config": AttentionConfig(block_m, 32, 4, 1)}
    grow("fp16", [21, 18], paths, own, 3, 2 if group < 3 else 1, group, apart=True, launch=launch).check()


@pytest.mark.parametrize("kind", ["fp32", "int8/token_head"])
def test_splits_give_what_one_split_gives(kind):
    problem = grow(kind, [90, 33], [(0, 1), (0, 1), (0,)], [1, 40, 17], q_dtype=torch.float32, apart=True, spike=6.0, launch=LARGE)
    whole = problem.check()
    for own, of_levels in ((None, 32), (32, 16)):
        split = {"config": AttentionConfig(16, 16, 4, 1, own), "level_config": AttentionConfig(16, 16, 4, 1, of_levels)}
        torch.testing.assert_close(problem.check(**split), whole, rtol=1e-5, atol=1e-5)


def test_a_hint_cannot_make_a_result_wrong():
    problem = grow("fp16", [60, 20], [(0, 1), (0, 1)], [40, 0], apart=True, launch=SPLITS)
    for hint in (0, 70, 2**40):
        problem.check(max_seq_len=hint)
    default = {"config": None, "level_config": None}
    for max_group, max_len, launch in ((1, 0, SPLITS), (2, 33, SPLITS), (10**6, 100, SPLITS), (1, 1, default)):
        levels = [replace(level, max_group=max_group, max_len=max_len) for level in problem.levels]
        problem.check(levels=levels, **launch)


def test_out_is_returned_and_may_be_float32_and_strided(device):
    problem = grow("fp16", [40], [(0,), (0,)], [5, 9], group=2, q_dtype=torch.float16, launch=SMALL)
    buffer = torch.full((2, 3, 4, 24), 77.0, device=device)
    got, _ = problem.check(out=buffer[:, 1, 1:3, 8:])
    assert got.data_ptr() == buffer[:, 1, 1:3, 8:].data_ptr()
    assert not torch.equal(got, got.half().float()), "what float16 would lose is kept"
    got[:] = 77.0
    assert bool((buffer == 77.0).all())


def test_the_lse_is_not_written_unless_asked_for():
    problem = grow("bf16", [40], [(0,), (0,)], [5, 9], launch=SMALL)
    out, _ = problem.check()
    alone = problem.run(return_lse=False)
    assert torch.is_tensor(alone) and torch.equal(alone, out)


@pytest.mark.parametrize(("dtype", "num_seqs"), [(torch.uint8, 3), (torch.float32, 3), (torch.float32, 4)])
def test_a_workspace_holds_the_partial_results(dtype, num_seqs, device):
    problem = grow("fp16", [20, 16], [(0, 1)] * num_seqs, [5, 17, 9, 1][:num_seqs], apart=True, launch=SPLITS)
    # A partial result of each of two levels and of the rest, each of a row of 16 numbers and an LSE.
    need = 3 * num_seqs * 17 * 4
    size = torch.empty(0, dtype=dtype).element_size()
    for more in (0, size, 3 * need):
        buffer = poison_(torch.empty(need + more + 128, dtype=torch.uint8, device=device))
        around = bits(buffer[:64]), bits(buffer[64 + need + more :])
        problem.check(workspace=buffer[64 : 64 + (need + more) // size * size].view(dtype))
        assert torch.equal(bits(buffer[:64]), around[0]) and torch.equal(bits(buffer[64 + need + more :]), around[1])
    for less in (size, need):
        workspace = torch.empty((need - less) // size, dtype=dtype, device=device)
        with pytest.raises(ShapeError, match=f"workspace: expected at least {need} bytes, got {need - less}"):
            problem.run(workspace=workspace)


def same_bits(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("q_len", [None, 2])
def test_no_level_is_plain_decode(q_len, device):
    problem = grow("bf16", [32], [(0,), (0,)], [5, 9], group=2, q_len=q_len, sink_logits=[1.0, -2.0])
    for levels in ([], ()):
        assert same_bits(problem.check(levels=levels), problem.plain())
    cache, nothing = problem.cache, torch.zeros(0, dtype=torch.int32, device=device)
    out, lse = tkv.shared_prefix_decode(problem.q[:0], cache, [], problem.page_table[:0], nothing, return_lse=True)
    assert out.shape == problem.q[:0].shape and lse.shape == out.shape[:-1]


# Members and keys of the groups of each level, and how many levels pay: keys that the largest group saves are 1024 or more.
@pytest.mark.parametrize(
    ("nodes", "paths", "taken"),
    [
        ([511], [(0,)] * 3, 0),
        ([512], [(0,)] * 3, 1),
        ([1024], [(0,)] * 2, 1),
        ([1023], [(0,)] * 2, 0),
        ([4000], [(0,)], 0),
        # An inner level that does not pay is read with the rest, an outer one before one that pays is not.
        ([512, 30], [(0, 1), (0, 1), (0,)], 1),
        ([30, 1024], [(0, 1), (0, 1)], 2),
        # Of the largest group and of the longest one.
        ([10, 512], [(0,), (0,), (0,), (1,), (1,)], 1),
    ],
)
def test_levels_behind_the_last_one_that_pays_are_read_as_part_of_the_sequences(nodes, paths, taken, monkeypatch):
    assert configs.MIN_KEYS_SAVED == 1024
    monkeypatch.setattr("tkv.ops.cascade.MIN_KEYS_SAVED", configs.MIN_KEYS_SAVED)
    launch = {"config": AttentionConfig(16, 512, 4, 1), "level_config": AttentionConfig(16, 512, 4, 1)}
    problem = grow("fp16", nodes, paths, [5, 9, 3, 1, 2][: len(paths)], 64, apart=True, taken=taken, launch=launch)
    got = problem.check()
    if not taken:
        assert same_bits(got, problem.plain())


@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_that_a_level_covers_are_not_read_through_the_table_of_the_sequences(page_size):
    problem = grow("bf16", [48, 16], [(0, 1), (0, 1), (0,)], [5, 9, 20], page_size, group=2, launch=SMALL)
    expected = problem.check()
    garbage = problem.page_table.clone()
    garbage[:, : 48 // page_size] = torch.tensor([2**31 - 1, -1, -(2**31)], dtype=torch.int32, device=garbage.device)[:, None]
    garbage[:2, 48 // page_size : 64 // page_size] = 10**6
    # Also not where they lead to a page that exists.
    poison = problem.cache.k.flatten(1).isnan().all(1).nonzero()[0].int()
    for entry in (garbage, garbage.where((garbage >= 0) & (garbage < problem.cache.num_pages), poison)):
        problem.page_table = entry
        assert same_bits(problem.run(), expected)


@pytest.mark.parametrize(("kind", "q_dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("int8/token_head", torch.float16)])
def test_a_row_of_nan_reaches_no_other_row(kind, q_dtype):
    problem = grow(kind, [40], [(0,), (0,), (0,)], [5, 9, 3], 16, 1, 2, 16, q_dtype, 2, apart=True, launch=SMALL)
    expected = problem.check()
    problem.q[1, 0] = torch.nan
    for part, old in zip(problem.run(), expected):
        assert bool(part[1, 0].isnan().all())
        part[1, 0] = old[1, 0]
        assert torch.equal(part, old)


@pytest.mark.parametrize("kind", ["fp32", "int8/token_head"])
def test_a_result_does_not_depend_on_what_the_neighbours_contain(kind):
    problem = grow(kind, [32], [(0,), (0,), (0,)], [25, 9, 30], q_dtype=torch.float32, launch=SMALL)
    out, lse = problem.check()
    for seq in (0, 2):
        pages = problem.page_table[seq, 2 : -(-int(problem.seq_lens[seq]) // 16)].long()
        for t in (problem.cache.k, problem.cache.v, problem.cache.k_scale, problem.cache.v_scale):
            if t is not None:
                t[pages] = poison_(t[pages].clone())
    again, lse_again = problem.run()
    assert torch.equal(out[1], again[1]) and torch.equal(lse[1], lse_again[1])


def test_keys_between_the_windows_of_a_group_may_hold_nan():
    # Rows at 10 and 40 of one tile see keys 5 to 10 and 35 to 40: no row sees those between.
    for kind in ("fp32", "int8/token_head"):
        grow(kind, [48], [(0,), (0,)], [5, 9], q_dtype=torch.float32, window=6, q_start=[10, 40], launch=LARGE).check()
