"""prefix_prefill against the reference: any problem, the rows of a chunk by hand, deterministic results, and real sizes."""

import math

import pytest
import torch
from bounds import assert_close_to_reference
from caches import FORMATS, LAYOUTS, bits, poison_, q_dtypes
from hypothesis import given, seed
from hypothesis import strategies as st
from problems import effort, test_device
from ragged import build, ragged_problems

import tkv
from tkv import reference
from tkv.tune import configs
from tkv.tune.configs import AttentionConfig

DEVICE = test_device()
SMALL = AttentionConfig(16, 16, 4, 1)
SPLIT = AttentionConfig(16, 16, 4, 1, 32)


@pytest.mark.parametrize("kind", FORMATS)
def test_any_problem_agrees_with_the_reference(kind):
    @seed(FORMATS.index(kind))
    @effort(8)
    @given(problem=ragged_problems(kind), where=st.sampled_from([None, None, "float32", "view"]), sms=st.sampled_from([1, 132]))
    def search(problem, where, sms):
        tensors = [*problem.args, problem.cache.k, problem.cache.v, problem.cache.k_scale, *problem.options.values()]
        inputs = [t for t in tensors if isinstance(t, torch.Tensor)]
        before = [bits(t) for t in inputs]
        with pytest.MonkeyPatch.context() as patch:
            # On a small GPU only sequences of few rows are split.
            patch.setattr("tkv.ops.prefill.num_sms", lambda device: sms)
            if where is None:
                problem.check()
            else:
                dtype = torch.float32 if where == "float32" else problem.q.dtype
                buffer = poison_(torch.empty(*problem.q.shape[:-1], problem.cache.v_head_dim + 8, dtype=dtype, device=problem.q.device))
                untouched = bits(buffer[..., -8:])
                problem.check(out=buffer[..., :-8])
                assert torch.equal(bits(buffer[..., -8:]), untouched)
        assert all(torch.equal(bits(t), old) for t, old in zip(inputs, before)), "an input was modified"

    search()


@pytest.mark.deep
def test_any_problem_of_any_format_agrees_with_the_reference():
    @effort(40)
    @given(problem=ragged_problems())
    def search(problem):
        problem.check()

    search()


def test_the_reference_is_the_attention_of_pytorch(device):
    for fresh in (True, False):
        problem = build("fp32", [7, 0, 3], [20, 5, 0], 16, 2, 3, 64, fresh=fresh)
        row = 0
        for seq, (rows, prefix) in enumerate(zip([7, 0, 3], [20, 5, 0])):
            k, v = reference.gather(problem.cache, problem.page_table[seq], torch.arange(prefix + (0 if fresh else rows), device=device))
            mine = slice(row, row + rows)
            row += rows
            if fresh:
                k, v = torch.cat([k, problem.k[mine].double()]), torch.cat([v, problem.v[mine].double()])
            mask = torch.arange(prefix + rows, device=device)[None, :] <= torch.arange(prefix, prefix + rows, device=device)[:, None]
            q, k, v = (t.double().transpose(0, 1) for t in (problem.q[mine], k, v))
            k, v = k.repeat_interleave(3, 0), v.repeat_interleave(3, 0)
            expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            torch.testing.assert_close(problem.truth[0][mine], expected.transpose(0, 1), rtol=1e-12, atol=1e-12)


def numbered(q, k, v):
    """Equal scores, and values that say which key they came from: key j holds j + 1."""
    k[:] = 0.0
    v[:] = torch.arange(1.0, len(v) + 1)[:, None, None]


@pytest.mark.parametrize("config", [SMALL, SPLIT, AttentionConfig(32, 64, 4, 1)], ids=["small", "split", "tall"])
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "cached"])
@pytest.mark.parametrize("prefix", [0, 14, 15, 33])
def test_row_i_sees_the_prefix_and_the_new_tokens_up_to_itself(prefix, fresh, config):
    for n in (1, 18, 34) if config is SMALL else (18,):
        out, lse = build("fp32", [n], [prefix], 16, 1, 1, 16, fresh=fresh, edit=numbered, launch={"config": config}).run()
        count = torch.arange(prefix + 1.0, prefix + n + 1, device=out.device)
        torch.testing.assert_close(out[:, 0, 0], (count + 1) / 2, rtol=1e-5, atol=0)
        torch.testing.assert_close(lse[:, 0], count.log(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (5, 3), (16, 0), (33, 3)])
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "cached"])
def test_each_row_has_a_window_of_its_own_over_prefix_and_new_tokens(fresh, window, sinks):
    prefix, n, score = 20, 37, 7.0
    for key in (1, prefix - 1, prefix + 17):

        def edit(q, k, v, key=key):
            numbered(q, k, v)
            q[:] = 1.0
            k[key] = score / k.shape[-1] ** 0.5

        launch = {"config": SMALL}
        out, lse = build("fp32", [n], [prefix], 16, dim=16, fresh=fresh, edit=edit, window=window, sinks=sinks, launch=launch).run()
        for row in range(n):
            p = prefix + row
            weights = {j: math.exp(score) if j == key else 1.0 for j in range(p + 1) if p - j < window or j < sinks}
            total = sum(weights.values())
            assert out[row, 0, 0].item() == pytest.approx(sum(w * (j + 1) for j, w in weights.items()) / total, rel=1e-5)
            assert lse[row, 0].item() == pytest.approx(math.log(total), abs=1e-5)


@pytest.mark.parametrize("group", [1, 3, 5, 16, 48])
def test_tokens_of_a_group_fill_tiles_of_rows_without_gaps(group):
    for fresh in (True, False):
        config = AttentionConfig(32, 16, 4, 1) if fresh else SMALL
        build("fp32", [5, 1, 2], [9, 20, 0], 3, 1 if group > 5 else 2, group, 16, fresh=fresh, launch={"config": config}).check()


def test_chunks_that_end_where_tiles_of_rows_end():
    for group, q_lens in ((1, [16, 0, 32, 15, 17, 1]), (4, [4, 8, 0, 3, 5]), (3, [16, 5, 6, 1])):
        build("fp16", q_lens, [3] * len(q_lens), 16, 1, group, 16, torch.float16, tail=2, spike=8.0, launch={"config": SMALL}).check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["bf16", "int8/token_head"])
def test_strides_of_every_layout_are_honoured(layout, kind):
    build(kind, [5, 10], [20, 1], 16, 3, 2, 24, layout=layout, v_mix=1.0, launch={"config": SMALL}).check()


@pytest.mark.parametrize("head_dim", [16, 80, 120, 256])
def test_head_dims_that_are_no_power_of_two(head_dim):
    for kind in ("bf16", "fp8_e4m3/token_head"):
        build(kind, [20, 1], [20, 40], 16, 1, 2, head_dim, spike=6.0, layout="wide").check()


@pytest.mark.parametrize("kind", FORMATS)
def test_every_dtype_of_q_is_taken_on_every_format(kind):
    for q_dtype in q_dtypes(kind):
        for fresh in (True, False):
            out, _ = build(kind, [3, 2], [0, 17], 16, 1, 2, 40, q_dtype, fresh=fresh, spike=7.0, launch={"config": SMALL}).check()
            assert out.dtype == q_dtype


@pytest.mark.parametrize("kind", ["fp8_e4m3/tensor", "fp8_e4m3/token_head", "int8/token_head"])
@pytest.mark.parametrize(("q_scale", "new_k", "new_v"), [(1.0, 1.0, 1e4), (1e3, 1e-3, 1.0), (1e-3, 1e2, 1e-4)])
def test_scores_and_values_change_their_units_between_a_quantised_prefix_and_new_tokens(kind, q_scale, new_k, new_v):
    for q_dtype, extra in ((torch.bfloat16, {}), (torch.float32, {"softcap": 3.0})):
        build(
            kind, [9, 2], [19, 20], 16, 1, 2, 16, q_dtype, q_scale=q_scale, scale=0.5 / q_scale, new_k=new_k, new_v=new_v, spike=6.0,
            k_scale=0.05, v_scale=3.0, launch={"config": SMALL}, **extra,
        ).check()  # fmt: skip


def test_sink_tokens_in_the_prefix_and_among_the_new_tokens():
    for prefix, kind in ((0, "fp32"), (2, "fp8_e4m3/token_head"), (40, "fp32")):
        for fresh in (True, False):
            build(kind, [40], [prefix], 16, 1, 1, 16, fresh=fresh, window=6, sinks=5, spike=8.0, launch={"config": SMALL}).check()
    build("fp32", [2], [60], 16, 1, 2, 16, window=30, sinks=20, spike=8.0, launch={"config": AttentionConfig(16, 16, 4, 1, 16)}).check()


@pytest.mark.parametrize(("kind", "fresh"), [("fp32", True), ("int8/token_head", True), ("fp8_e4m3/token_head", False)])
def test_a_result_does_not_depend_on_what_the_neighbours_contain(kind, fresh):
    problem = build(kind, [9, 6, 3], [30, 40, 25], 16, 1, 2, 32, fresh=fresh, launch={"config": SPLIT})
    out, lse = problem.check()
    mine = slice(9, 15)
    for t in (problem.q, problem.k, problem.v):
        if t is not None:
            poison_(t[:9])
            poison_(t[15:])
    for seq in (0, 2):
        pages = problem.page_table[seq, :3].long()
        pages = pages[(pages >= 0) & (pages < problem.cache.num_pages)]
        for t in (problem.cache.k, problem.cache.v, problem.cache.k_scale, problem.cache.v_scale):
            if t is not None:
                t[pages] = poison_(t[pages].clone())
    again, lse_again = problem.run()
    assert torch.equal(out[mine], again[mine]) and torch.equal(lse[mine], lse_again[mine])


@pytest.mark.parametrize(("max_q_len", "max_seq_len"), [(0, 0), (3, 10**9), (2**40, 20)])
def test_hints_cannot_make_a_result_wrong(max_q_len, max_seq_len):
    for config in (SPLIT, None):
        problem = build("fp16", [1, 0, 11, 3], [90, 30, 5, 60], 16, 1, 2, 16, torch.float16, tail=1, launch={"config": config})
        problem.check(max_q_len=max_q_len, max_seq_len=max_seq_len)


def test_tables_and_lengths_may_be_32_or_64_bits_wide():
    narrow, wide = (
        build(
            "int8/token_head", [4, 0, 17], [45, 3, 0], 16, 1, 2, 32, torch.float16, index_dtype=dtype,
            kv_start=[0, 7, 2], q_start=[44, 9, 1], window=20, sinks=2, tail=2,
        )
        for dtype in (torch.int32, torch.int64)
    )  # fmt: skip
    wide.page_table.masked_fill_(wide.page_table > 10**9, 2**62)
    for a, b in zip(narrow.check(), wide.check()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("page_size", [3, 16, 64])
def test_pages_outside_of_the_cache_are_skipped(page_size):
    problem = build("fp16", [5, 2], [70, 50], page_size, 1, 2, 16, torch.float16, launch={"config": SPLIT})
    problem.page_table[0, 0] = problem.cache.num_pages
    problem.page_table[1, -1] = -1
    problem.page_table[1, 0] = 2**31 - 1
    problem.check()


@pytest.mark.parametrize("lie", [(0, 9, 4, 12), (0, 5, 100, 200), (3, 4, 5, 6), (0, -5, 20, 9), (0, 2**31 - 1, 0, 12), (-7, 0, 3, 50)])
def test_starts_of_rows_that_lie_reach_nothing_outside_of_the_tensors(lie):
    for config in (SMALL, SPLIT):
        problem = build("fp32", [4, 5, 3], [20, 0, 9], 16, 1, 2, 16, tail=1, launch={"config": config})
        problem.cu_seqlens[:] = torch.tensor(lie)
        buffer = torch.full((100, 2, 16), 77.0, device=DEVICE)
        problem.run(out=buffer[40:53])
        assert bool((buffer[:40] == 77.0).all() and (buffer[53:] == 77.0).all())


def test_prefixes_beyond_the_table_are_cut_to_it():
    problem = build("fp32", [5, 4], [48, 32], 16, 1, 2, 16)
    # The new tokens stand where the length says: behind keys that are not there.
    problem.prefix_lens[:] = torch.tensor([2**31 - 1, -3])
    out, lse = problem.check()
    whole = build("fp32", [5, 4], [48, 0], 16, 1, 2, 16, q_start=[2**30 - 1, -3])
    problem.prefix_lens[:] = torch.tensor([48, 0])
    problem.options = dict(whole.options)
    again = problem.change().check()
    assert torch.equal(again[0], out) and torch.equal(again[1], lse)


SOME = {"window": 50, "sinks": 3, "sink_logits": [0.5, -1.0], "kv_start": [5, 0, 9, 0]}


class TestDeterministic:
    @pytest.mark.parametrize(
        ("kind", "fresh", "options"),
        [("bf16", True, {}), ("int8/token_head", True, SOME), ("fp8_e4m3/token_head", False, SOME)],
        ids=["bf16", "int8", "fp8"],
    )
    def test_alone_among_others_with_any_hint_width_and_order(self, kind, fresh, options):
        launch = {"config": SPLIT, "deterministic": True}
        problem = build(kind, [1, 20, 3, 0], [150, 10, 40, 33], 16, 1, 2, 16, fresh=fresh, tail=1, launch=launch, **options)
        out, lse = problem.check()
        bounds = problem.cu_seqlens.tolist()
        for seqs, width, hints in [
            ([0], 13, {}),
            ([2, 1], 30, {"max_seq_len": 10**6}),
            ([3, 2, 0], 11, {"max_q_len": 0, "max_seq_len": 1}),
        ]:
            part = problem.select(seqs)
            table = poison_(torch.empty(len(seqs), width, dtype=torch.int32, device=DEVICE))
            table[:, : problem.page_table.shape[1]] = part.page_table[:, :width]
            again, lse_again = part.change(page_table=table).run(**hints)
            rows = torch.cat([torch.arange(bounds[s], bounds[s + 1]) for s in seqs])
            assert torch.equal(again, out[rows]) and torch.equal(lse_again, lse[rows])

    @effort(7)
    @given(st.data())
    def test_however_the_splits_of_prefix_new_tokens_sinks_and_window_fall(self, data):
        draw = data.draw
        q_lens, prefix_lens = (draw(st.lists(st.integers(0, most), min_size=2, max_size=2)) for most in (9, 50))
        options = draw(st.sampled_from([{}, {}, {"window": draw(st.integers(1, 40)), "sinks": draw(st.sampled_from([0, 1, 17]))}]))
        block_m, block_n = draw(st.sampled_from([(16, 16), (32, 16), (16, 32)]))
        launch = {"config": AttentionConfig(block_m, block_n, 4, 1, block_n), "deterministic": True}
        page_size, fresh = draw(st.sampled_from([1, 3, 16])), draw(st.booleans())
        problem = build(
            "fp32", [1 + q_lens[0], q_lens[1]], prefix_lens, page_size, 1, draw(st.sampled_from([1, 5])), 16, fresh=fresh,
            tree=draw(st.sampled_from([None, None, "tree", "full"])), tail=draw(st.integers(0, 1)), seed=draw(st.integers(0, 2**31)),
            launch=launch, **options,
        )  # fmt: skip
        out, lse = problem.check()
        # Alone, in a table no wider than it must be, or in a wide one.
        alone, width = problem.select([0]), -(-(prefix_lens[0] + (0 if fresh else 1 + q_lens[0])) // page_size)
        table = poison_(torch.empty(1, width + draw(st.sampled_from([0, 0, 40])), dtype=torch.int32, device=DEVICE))
        table[:, :width] = alone.page_table[:, :width]
        hints = {"max_q_len": draw(st.sampled_from([None, 0, 4, 100])), "max_seq_len": draw(st.sampled_from([None, 0, 10**6]))}
        again, lse_again = alone.change(page_table=table).run(**hints)
        rows = slice(0, 1 + q_lens[0])
        assert torch.equal(again, out[rows]) and torch.equal(lse_again, lse[rows])

    def test_tiles_of_many_rows_have_windows_of_more_keys_than_a_hint_says(self):
        launch = {"config": AttentionConfig(128, 16, 4, 1, 16), "deterministic": True}
        problem = build("fp32", [100], [30], 16, 1, 1, 16, window=17, launch=launch)
        for a, b in zip(problem.check(), problem.run(max_q_len=1)):
            assert torch.equal(a, b)

    def test_with_the_default_config_too(self):
        problem = build("fp16", [1, 3], [1100, 40], 64, 1, 2, 16, torch.float16, launch={"deterministic": True})
        out, lse = problem.check()
        for hint in (1, 10**6):
            again, lse_again = problem.select([0]).run(max_q_len=hint, max_seq_len=hint)
            assert torch.equal(again, out[:1]) and torch.equal(lse_again, lse[:1])

    def test_a_batch_that_needs_too_much_memory_runs_in_several_launches(self, monkeypatch):
        launch = {"config": SPLIT, "deterministic": True}
        more = {"tree": "tree", "sink_logits": [0.5, -1.0], "launch": launch}
        problem = build("fp16", [1, 17, 0, 4], [70, 3, 9, 40], 16, 1, 2, 16, torch.float16, tail=3, **more)
        out, lse = problem.check()
        state = 8 * 2 * 17 * 4
        for room in (1, 12 * state):
            monkeypatch.setattr(configs, "MAX_SCRATCH_BYTES", room)
            again, lse_again = problem.check()
            assert torch.equal(again, out) and torch.equal(lse_again, lse)


# Lengths of (new tokens, keys), as other libraries test them.
REAL_LENS = [(1, 1328), (5, 18), (129, 463)], [(1, 523), (1, 37), (1, 2011)]


def real_problem(lens, heads, head_dim, fresh, window, softcap, kind="bf16"):
    q_lens, prefix_lens = [n for n, _ in lens], [keys - n for n, keys in lens]
    return build(
        kind, q_lens, prefix_lens, 16, heads[1], heads[0] // heads[1], head_dim, torch.bfloat16, fresh=fresh, spike=10.0, new_v=3.0,
        window=window, softcap=softcap,
    )  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize("window", [None, 64, 128, 256])
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "cached"])
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (5, 1)], ids=str)
@pytest.mark.parametrize("lens", REAL_LENS, ids=["mixed", "decode"])
def test_real_lengths_with_every_option(lens, heads, head_dim, fresh, window):
    for softcap in (None, 50.0):
        real_problem(lens, heads, head_dim, fresh, window, softcap).check()


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["fp8_e4m3/token_head", "int8/token_head"])
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "cached"])
@pytest.mark.parametrize("lens", REAL_LENS, ids=["mixed", "decode"])
def test_real_lengths_in_a_quantised_cache(lens, fresh, kind):
    for window, softcap in ((None, None), (64, 50.0), (256, None)):
        real_problem(lens, (8, 2), 128, fresh, window, softcap, kind).check()


@pytest.mark.parametrize(
    ("lens", "heads", "head_dim", "fresh", "window", "softcap"),
    [
        (REAL_LENS[0], (5, 1), 128, True, 64, 50.0),
        (REAL_LENS[1], (8, 2), 256, False, 256, None),
        (REAL_LENS[1], (5, 1), 128, True, None, 50.0),
    ],
)
def test_some_real_lengths(lens, heads, head_dim, fresh, window, softcap):
    real_problem(lens, heads, head_dim, fresh, window, softcap).check()


def test_the_bound_notices_one_wrong_number():
    problem = build("fp32", [4], [10], 16, 1, 2, 16)
    out, lse = problem.run()
    wrong = out.clone()
    wrong[3, 1, 3] += 1e-4
    with pytest.raises(AssertionError, match=r"out\(3, 1, 3\)"):
        assert_close_to_reference(wrong, lse, problem.truth, torch.float32)


def test_the_lse_is_not_written_unless_asked_for():
    problem = build("bf16", [30, 0], [3, 5], 16, 1, 2, 64)
    out, lse = problem.check()
    alone = tkv.prefix_prefill(*problem.args)
    assert torch.is_tensor(alone) and torch.equal(alone, out) and lse.dtype == torch.float32
