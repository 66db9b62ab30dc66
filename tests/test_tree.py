"""Tree attention among the new tokens (`mask=`) of paged_decode and prefix_prefill."""

import math

import pytest
import torch
from caches import FORMATS, poison_
from hypothesis import given, seed
from problems import effort, test_device
from ragged import TREES, build, ragged_problems, tree_of_parents

import tkv
from tkv import reference
from tkv.errors import DeviceError, DTypeError, ShapeError
from tkv.ops.attention import Options, tree_of
from tkv.tune.configs import AttentionConfig

DEVICE = test_device()
SMALL = AttentionConfig(16, 16, 4, 1)
SPLIT = AttentionConfig(16, 16, 4, 1, 16)
#     0 - 1 - 3 - 5
#       \ 2 - 4      6 stands alone
PARENTS = [-1, 0, 0, 1, 2, 3, -1]


def both(problem, **more):
    """[(problem, out, lse)] of the ops that can solve a problem, each within the bounds."""
    solved = [(problem, *problem.check(**more))]
    if problem.k is None:
        solved.append((problem.decode(), *problem.decode().check(**more)))
    return solved


@pytest.mark.parametrize("kind", FORMATS)
def test_any_tree_of_ragged_new_tokens_agrees_with_the_reference(kind):
    @seed(FORMATS.index(kind))
    @effort(4)
    @given(problem=ragged_problems(kind, trees=TREES))
    def search(problem):
        problem.check()

    search()


@pytest.mark.parametrize("kind", FORMATS)
def test_any_tree_of_cached_new_tokens_is_decoded_as_it_is_prefilled(kind):
    @seed(FORMATS.index(kind))
    @effort(3)
    @given(problem=ragged_problems(kind, trees=TREES, uniform=True))
    def search(problem):
        both(problem)

    search()


def numbered(q, k, v):
    """Equal scores, and values that say which key they came from: key j holds j + 1."""
    k[:] = 0.0
    v[:] = torch.arange(1.0, len(v) + 1)[:, None, None]


@pytest.mark.parametrize("config", [SMALL, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize(("prefix", "fresh"), [(30, True), (30, False), (31, False), (32, False)])
def test_a_token_sees_the_prefix_and_its_own_branch(prefix, fresh, config):
    branches = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 1, 3, 5], [6]]
    tree = [tree_of_parents(PARENTS)]
    assert [row.nonzero().flatten().tolist() for row in tree[0]] == branches
    problem = build("fp32", [7], [prefix], 16, 1, 1, 16, fresh=fresh, tree=tree, room=4, edit=numbered, launch={"config": config})
    for _, out, lse in both(problem):
        for row, branch in enumerate(branches):
            keys = [*range(prefix), *(prefix + i for i in branch)]
            assert out.reshape(7, 16)[row].tolist() == pytest.approx([sum(key + 1 for key in keys) / len(keys)] * 16, rel=1e-5)
            assert lse.flatten()[row].item() == pytest.approx(math.log(len(keys)), abs=1e-5)


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "cached"])
def test_window_sinks_and_distance_count_along_the_branch(fresh):
    prefix, window, sinks, slope = 20, 4, 2, 0.5
    depths = [0, 1, 1, 2, 2, 3, 0]
    options = {"window": window, "sinks": sinks, "alibi_slopes": [slope], "scale": 0.0}
    problem = build("fp32", [7], [prefix], 16, 1, 1, 16, fresh=fresh, tree=[tree_of_parents(PARENTS)], launch={"config": SMALL}, **options)
    for _, _, lse in both(problem):
        for row, depth in enumerate(depths):
            position = prefix + depth
            seen = [j for j in range(prefix) if position - j < window or j < sinks]
            branch = [prefix + depths[i] for i in range(7) if tree_of_parents(PARENTS)[row, i] and depth - depths[i] < window]
            total = sum(math.exp(-slope * (position - j)) for j in (*seen, *branch))
            assert lse.flatten()[row].item() == pytest.approx(math.log(total), abs=1e-5)


def test_a_branch_longer_than_the_window_does_not_see_its_root():
    for fresh in (True, False):
        problem = build("fp32", [40], [20], 16, 1, 1, 16, fresh=fresh, tree="chain", window=3, edit=numbered, launch={"config": SMALL})
        for _, out, _ in both(problem):
            expected = [20 + row for row in range(40)]
            assert out.reshape(40, 16)[:, 0].tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["fp32", "int8/token_head"])
def test_a_chain_is_what_there_is_without_a_mask(kind):
    options = {"window": 25, "sinks": 2, "softcap": 20.0, "alibi_slopes": [0.25, 0.5], "sink_logits": [1.0, -1.0]}
    for fresh, more in ((True, options), (False, {}), (False, options)):
        launch = {"config": SMALL}
        problem = build(kind, [10, 10], [33, 0], 16, 1, 2, 16, torch.float32, fresh=fresh, tree="chain", room=3, launch=launch, **more)
        plain = problem.change(options={name: value for name, value in problem.options.items() if name != "mask"})
        for _, out, lse in both(problem):
            plain.compare(out.reshape(problem.q.shape), lse.reshape(problem.q.shape[:2]))


def test_masks_of_one_token_change_nothing():
    for fresh in (True, False):
        for room in (0, 5):
            problem = build("bf16", [1, 1], [33, 0], 16, 1, 2, 16, fresh=fresh, tree="tree", room=room, window=9, launch={"config": SPLIT})
            for solved, out, lse in both(problem):
                plain = build("bf16", [1, 1], [33, 0], 16, 1, 2, 16, fresh=fresh, tree=None, window=9, launch={"config": SPLIT})
                assert solved.options["mask"].shape[1] == 1 + room
                plain.compare(out.reshape(problem.q.shape), lse.reshape(problem.q.shape[:2]))
    decode = build("bf16", [1, 1], [33, 0], 16, 1, 2, 16, fresh=False, tree="tree").decode()
    out, lse = decode.check()
    flat = tkv.paged_decode(decode.q[:, 0], decode.cache, decode.page_table, decode.seq_lens, return_lse=True, **decode.options)
    assert torch.equal(flat[0], out[:, 0]) and torch.equal(flat[1], lse[:, 0])


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "cached"])
def test_what_lies_beyond_the_new_tokens_of_a_mask_does_not_matter(fresh):
    problem = build("fp32", [5, 20, 0, 9], [20, 3, 7, 0], 16, 1, 2, 16, fresh=fresh, tree="tree", room=12, tail=2, launch={"config": SMALL})
    results = [problem.check()]
    for seq, n in enumerate(problem.q_lens):
        # Set before, clear now.
        assert bool(problem.options["mask"][seq, n:].all() and problem.options["mask"][seq, :, n:].all())
        problem.options["mask"][seq, n:] = False
        problem.options["mask"][seq, :, n:] = False
    results.append(problem.check())
    assert all(torch.equal(a, b) for a, b in zip(*results))


def test_tokens_that_see_each_other_stand_at_one_position():
    n, prefix = 18, 21
    options = {"window": 6, "alibi_slopes": [0.5], "scale": 0.0}
    problem = build("fp32", [n], [prefix], 16, 1, 1, 16, fresh=False, tree="full", launch={"config": SMALL}, **options)
    for _, _, lse in both(problem):
        # All n of them are at distance 0; the prefix ends 18 before, outside of the window.
        assert lse.flatten().tolist() == pytest.approx([math.log(n)] * n, abs=1e-5)


@pytest.mark.parametrize("config", [SMALL, AttentionConfig(32, 16, 4, 1, 32)], ids=["whole", "split"])
def test_trees_larger_than_a_tile_of_rows_and_keys(config):
    for kind, fresh in (("fp32", True), ("fp8_e4m3/token_head", False)):
        launch, window = {"config": config}, {"window": 20, "sinks": 1}
        both(build(kind, [36, 36], [13, 0], 3, 1, 1, 16, fresh=fresh, tree="tree", room=1, spike=8.0, launch=launch, **window))


@pytest.mark.parametrize("tree", ["tree", "any"])
def test_a_sequence_in_parts_that_cut_through_its_new_tokens(tree):
    options = {"window": 20, "sinks": 3, "alibi_slopes": [0.5, 0.0625], "sink_logits": [1.0, -1.0], "kv_start": [0, 100]}
    whole = build("fp32", [12, 12], [25, 9], 8, 1, 2, 16, fresh=False, tree=tree, room=2, launch={"config": SMALL}, **options)
    q_start = whole.prefix_lens + whole.options["kv_start"]
    outs, lses = [], []
    for first, last in ((0, 8), (8, 16), (16, 32), (32, 40)):
        part = {**whole.options, "q_start": q_start, "kv_start": whole.options["kv_start"] + first}
        if first:
            part.pop("sink_logits")
        lens = ((whole.prefix_lens + 12).clamp(max=last) - first).clamp(min=0)
        problem = whole.change(page_table=whole.page_table[:, first // 8 : last // 8], prefix_lens=lens, options=part)
        solved = both(problem)
        outs.append(solved[0][1])
        lses.append(solved[0][2])
    whole.compare(*tkv.merge_states(outs, lses))
    fresh = build("fp32", [12, 12], [25, 9], 8, 1, 2, 16, fresh=True, tree=tree, launch={"config": SMALL}, **options)
    alone = {**fresh.options, "q_start": q_start}
    first = fresh.change(k=None, v=None, options={name: value for name, value in alone.items() if name != "sink_logits"})
    last = fresh.change(page_table=fresh.page_table[:, :0], prefix_lens=fresh.prefix_lens * 0, options=alone)
    parts = [first.check(), last.check()]
    fresh.compare(*tkv.merge_states([out for out, _ in parts], [lse for _, lse in parts]))


@pytest.mark.parametrize("config", [SMALL, SPLIT], ids=["whole", "split"])
def test_slots_that_no_branch_sees_may_hold_nan(config):
    # Rows reach no further than 3 behind the prefix, though there are 7: what a chain would not see any more, some of them do.
    tree, launch = [tree_of_parents(PARENTS)], {"config": config}
    problem = build("fp32", [7], [40], 1, 1, 1, 16, fresh=False, tree=tree, window=8, edit=numbered, launch=launch)
    slots = problem.cache.k[:, 0, 0, 0][problem.page_table[0].clamp(0, problem.cache.num_pages - 1).long()]
    assert not slots[33:].isnan().any(), "the root sees the last 7 of the prefix and itself"
    for _, out, lse in both(problem):
        assert lse.flatten()[0].item() == pytest.approx(math.log(8), abs=1e-5)
        assert out.reshape(7, 16)[0, 0].item() == pytest.approx(sum(range(34, 42)) / 8, rel=1e-5)
    problem.page_table[0, :33] = 2**31 - 1
    both(problem)
    pages = torch.ones(problem.cache.num_pages, dtype=torch.bool)
    pages[problem.page_table[0, 33:].long().cpu()] = False
    for data in (problem.cache.k, problem.cache.v):
        data[pages.to(DEVICE)] = torch.nan
    both(problem)


@pytest.mark.parametrize("kind", ["fp32", "fp8_e4m3/token_head"])
def test_trees_that_no_batch_and_no_hint_can_change(kind):
    problem = build(kind, [6, 6], [40, 33], 16, 1, 2, 16, fresh=False, tree="tree", launch={"config": SPLIT, "deterministic": True})
    out, lse = problem.check()
    decoded, decoded_lse = problem.decode().check()
    for seq in range(2):
        part, rows = problem.select([seq]), slice(6 * seq, 6 * seq + 6)
        again, lse_again = part.run(max_q_len=1, max_seq_len=1)
        assert torch.equal(again, out[rows]) and torch.equal(lse_again, lse[rows])
        again, lse_again = part.decode().run(max_seq_len=1)
        assert torch.equal(again[0], decoded[seq]) and torch.equal(lse_again[0], decoded_lse[seq])


def test_depths_of_more_tokens_than_one_step_counts():
    n, room = 1030, 7
    mask = torch.zeros(1, n + room, n + room, dtype=torch.bool, device=DEVICE)
    mask[:, :n, :n] = reference.visible(torch.arange(n), torch.arange(n), window=1020, sinks=3)
    mask[:, n:] = mask[:, :, n:] = True
    tree, launches = tree_of(Options(scale=1.0, mask=mask), n)
    for launch in launches:
        launch.run(DEVICE)
    assert torch.equal(tree.depth_ptr[0, :n].cpu(), mask[0, :n, :n].sum(1).int().cpu() - 1)


def masks(*shape, dtype=torch.bool, device=DEVICE):
    return torch.ones(*shape, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (lambda: [[True]], DTypeError, "mask: expected a torch.Tensor, got list"),
        (lambda: masks(2, 4, 4, dtype=torch.uint8), DTypeError, "mask: expected torch.bool, got torch.uint8"),
        (lambda: masks(2, 4, 4, dtype=torch.float32), DTypeError, "mask: expected torch.bool, got torch.float32"),
        (lambda: masks(4, 4), ShapeError, r"mask: expected shape \[2, M, M\], got \[4, 4\]"),
        (lambda: masks(1, 4, 4), ShapeError, r"mask: expected shape \[2, M, M\], got \[1, 4, 4\]"),
        (lambda: masks(2, 4, 5), ShapeError, r"mask: expected shape \[2, M, M\] with M at least 1, got \[2, 4, 5\]"),
        (lambda: masks(2, 0, 0), ShapeError, r"mask: expected shape \[2, M, M\] with M at least 1, got \[2, 0, 0\]"),
        (lambda: masks(2, 4, 8)[..., ::2], ShapeError, "mask: the last dimension must be contiguous"),
        (lambda: masks(2, 4, 4, device="meta"), DeviceError, "mask: expected device .* got meta"),
    ],
)
def test_other_masks_are_refused(mask, error, message):
    problem = build("fp32", [4, 4], [5, 0], fresh=False)
    for op in (problem, problem.decode()):
        with pytest.raises(error, match=message):
            op.run(mask=mask())


def test_masks_smaller_than_the_new_tokens_are_refused_where_the_host_can_see_it():
    problem = build("fp32", [4, 4], [5, 0], fresh=False).decode()
    with pytest.raises(ShapeError, match=r"mask: expected at least 4 tokens, q's, got \[2, 3, 3\]"):
        problem.run(mask=masks(2, 3, 3))


def test_the_mask_is_not_modified_and_its_strides_are_honoured():
    problem = build("fp32", [6, 3], [10, 0], fresh=True, tree="tree", room=1, launch={"config": SMALL})
    mask = problem.options["mask"]
    assert not mask.is_contiguous()
    before = mask.clone()
    out, _ = problem.check()
    assert torch.equal(mask, before)
    spread = poison_(masks(7, 9, 2, 11))[:, :, 1].transpose(0, 1)[:2, :, :7]
    spread = spread[:, :7]
    spread[:] = mask
    assert torch.equal(problem.run(mask=spread)[0], out)
