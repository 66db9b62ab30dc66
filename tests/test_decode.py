"""paged_decode against the reference: any problem, and the cases that a search might miss."""

import math

import pytest
import torch
from bounds import assert_close_to_reference
from caches import FORMATS, LAYOUTS, bits, poison_, q_dtypes
from hypothesis import given
from hypothesis import strategies as st
from problems import build, effort, problems

import tkv
from tkv import reference
from tkv.tune.configs import AttentionConfig, split_plan

SMALL = AttentionConfig(16, 16, 4, 1)


def splits(split_len, block_n=16):
    """A launch of many splits."""
    return AttentionConfig(16, block_n, 4, 1, split_len)


@pytest.mark.parametrize("kind", FORMATS)
def test_any_problem_agrees_with_the_reference(kind):
    @effort(22)
    @given(problem=problems(kind), where=st.sampled_from([None, None, "float32", "view"]))
    def search(problem, where):
        inputs = [t for t in (problem.q, problem.cache.k, problem.cache.v, problem.cache.k_scale, problem.page_table) if t is not None]
        before = [bits(t) for t in inputs]
        if where is None:
            problem.check()
        else:
            dtype = torch.float32 if where == "float32" else problem.q.dtype
            buffer = poison_(torch.empty(*problem.q.shape[:-1], problem.cache.v_head_dim + 8, dtype=dtype, device=problem.q.device))
            untouched = bits(buffer[..., -8:])
            out, _ = problem.check(out=buffer[..., :-8])
            assert out.data_ptr() == buffer.data_ptr()
            assert torch.equal(bits(buffer[..., -8:]), untouched)
        assert all(torch.equal(bits(t), old) for t, old in zip(inputs, before)), "an input was modified"

    search()


@pytest.mark.deep
def test_any_problem_of_any_format_agrees_with_the_reference():
    @effort(100)
    @given(problem=problems())
    def search(problem):
        problem.check()

    search()


def test_the_reference_is_the_attention_of_pytorch(device):
    problem = build("fp32", [33], 16, 2, 3, 64, q_len=4)
    k, v = reference.gather(problem.cache, problem.page_table[0], torch.arange(33, device=device))
    q = problem.q[0].double().transpose(0, 1)
    mask = torch.arange(33, device=device)[None, :] <= torch.arange(29, 33, device=device)[:, None]
    k, v = (t.transpose(0, 1).repeat_interleave(3, 0) for t in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(problem.truth[0][0], expected.transpose(0, 1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("q_len", [1, 2, 3, 8, 17, 64])
def test_every_row_of_a_block_of_queries_sees_the_keys_up_to_itself(q_len):
    for kind, split_len in (("fp16", None), ("fp8_e4m3/token_head", 48)):
        group = 2 if q_len < 64 else 1
        build(kind, [q_len + 6, 3], 16, 1, group, 32, q_len=q_len, spike=12.0, launch={"config": splits(split_len)}).check()


def test_a_block_of_one_query_row_is_a_query_without_a_block():
    problem = build("bf16", [40, 7], 16, 2, 3, 64, spike=8.0)
    out, lse = problem.check()
    block = tkv.paged_decode(problem.q[:, None], problem.cache, problem.page_table, problem.seq_lens, return_lse=True)
    assert torch.equal(block[0][:, 0], out) and torch.equal(block[1][:, 0], lse)


@pytest.mark.parametrize("group", [1, 3, 5, 16, 17, 48, 128])
def test_each_query_head_reads_the_kv_head_of_its_group(group):
    # K and V of the heads differ in every number, so that one wrong head is an error far above any rounding.
    build("fp32", [21], 3, 2, group, 16, launch={"config": SMALL}).check()
    build("int8/token_head", [21], 16, 1 if group > 17 else 2, group, 16, torch.float16, launch={"config": splits(16)}).check()


def test_many_query_heads_share_one_kv_head():
    for group in (48, 71, 128):
        build("fp16", [50, 0, 17], 16, 1, group, 64, torch.float16, spike=10.0).check()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["bf16", "fp8_e4m3/token_head", "int8/token_head"])
def test_strides_of_every_layout_are_honoured(layout, kind):
    build(kind, [35, 16, 1], 16, 3, 2, 24, layout=layout, v_mix=1.0).check()


@pytest.mark.parametrize("hint", [0, 1, 15, 16, 100, 10**9, 2**40])
def test_a_hint_of_the_longest_sequence_cannot_make_a_result_wrong(hint):
    build("fp32", [150, 0, 90, 1], 16, 1, 2, 16, launch={"config": splits(32), "max_seq_len": hint}).check()


def test_splits_give_what_one_split_gives():
    for kind in ("fp32", "int8/token_head"):
        problem = build(kind, [1, 2, 17, 96, 0, 161], 16, 1, 1, 32, torch.float32, spike=6.0)
        whole, whole_lse = problem.check(config=splits(512, 32))
        for split_len in (32, 64, 96):
            out, lse = problem.check(config=splits(split_len, 32))
            torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(lse, whole_lse, rtol=1e-5, atol=1e-5)


def test_one_long_sequence_among_short_ones_is_spread_over_splits():
    lens = [3, 900, 0, 1]
    problem = build("fp16", lens, 64, 1, 4, 32, torch.float16, spike=9.0)
    problem.check()
    sixty_four = AttentionConfig(16, 64, 4, 1)
    for count, tiles in (split_plan(sixty_four, len(lens), 900, 132, 4096), split_plan(sixty_four, 36, 220_000, 132, 4096)):
        assert count > 3 and count * tiles * 64 >= 900


def test_there_are_more_parts_than_one_step_of_the_reduction_takes():
    build("fp32", [16 * 19 + 3], 16, 1, 1, 16, spike=5.0, launch={"config": splits(16)}).check()


def test_an_empty_batch_gives_empty_results(device):
    cache = tkv.KVCache.empty(2, 16, 2, 64, "fp16", device=device)
    q = torch.zeros(0, 4, 64, dtype=torch.float16, device=device)
    out, lse = tkv.paged_decode(q, cache, _ints([], device).reshape(0, 3), _ints([], device), return_lse=True)
    assert out.shape == (0, 4, 64) and lse.shape == (0, 4)


def test_a_table_of_no_pages_sees_nothing(device):
    problem = build("bf16", [0, 0], 16, 2, 2, 64, sink_logits=[1.0, 2.0, 3.0, 4.0])
    assert problem.page_table.shape == (2, 0)
    out, lse = problem.check()
    assert torch.equal(out, torch.zeros_like(out)) and torch.equal(lse, torch.tensor([1.0, 2.0, 3.0, 4.0], device=device).expand(2, 4))


def test_a_cache_of_no_pages_sees_nothing(device):
    cache = tkv.KVCache.empty(0, 16, 1, 64, "fp16", device=device)
    q = torch.ones(1, 2, 64, dtype=torch.float16, device=device)
    out, lse = tkv.paged_decode(q, cache, _ints([[0, 3]], device), _ints([20], device), return_lse=True)
    assert not out.any() and bool((lse == -torch.inf).all())


@pytest.mark.parametrize("page_size", [3, 16, 64])
def test_pages_outside_of_the_cache_are_skipped(page_size):
    problem = build("fp16", [70, 50], page_size, 1, 2, 16, torch.float16, launch={"config": splits(32)})
    problem.page_table[0, 0] = problem.cache.num_pages
    problem.page_table[1, -1] = -1
    problem.page_table[1, 0] = 2**31 - 1
    problem.check()


def test_lengths_beyond_the_table_are_cut_to_it():
    problem = build("fp32", [40, 32], 16, 1, 2, 16)
    # By default the last key is the query's own: with a longer length the query stands further on, and sees all that is there.
    problem.seq_lens[0] = 48
    problem.cache.k.nan_to_num_(0.5)
    problem.cache.v.nan_to_num_(0.25)
    whole = problem.run()
    problem.seq_lens[0] = 1000
    problem.seq_lens[1] = 2**31 - 1
    out, lse = problem.check()
    assert torch.equal(out[0], whole[0][0]) and torch.equal(lse[0], whole[1][0])


def test_negative_lengths_are_empty_sequences():
    problem = build("fp32", [20, 20], 16, 1, 1, 16)
    problem.seq_lens[0] = -3
    out, lse = problem.check()
    assert not out[0].any() and lse[0].item() == -torch.inf


def test_tables_and_lengths_may_be_32_or_64_bits_wide():
    narrow, wide = (
        build(
            "int8/token_head", [45, 3, 0], 16, 2, 2, 32, torch.float16, index_dtype=dtype,
            kv_start=[0, 7, 2], q_start=[44, 9, 1], window=20, sinks=2,
        )
        for dtype in (torch.int32, torch.int64)
    )  # fmt: skip
    wide.page_table.masked_fill_(wide.page_table > 10**9, 2**62)
    for a, b in zip(narrow.check(), wide.check()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_result_does_not_depend_on_what_the_neighbours_contain(kind):
    problem = build(kind, [30, 40, 25], 16, 2, 2, 32, launch={"config": splits(16)})
    out, lse = problem.check()
    for seq in (0, 2):
        pages = problem.page_table[seq, : -(-int(problem.seq_lens[seq]) // 16)].long()
        for t in (problem.cache.k, problem.cache.v, problem.cache.k_scale, problem.cache.v_scale):
            if t is not None and t.dim() > 0:
                t[pages] = poison_(t[pages].clone())
    again, lse_again = problem.run()
    assert torch.equal(out[1], again[1]) and torch.equal(lse[1], lse_again[1])


def test_the_lse_is_not_written_unless_asked_for():
    problem = build("bf16", [30, 0], 16, 1, 2, 64)
    out, lse = problem.check()
    alone = tkv.paged_decode(problem.q, problem.cache, problem.page_table, problem.seq_lens)
    assert torch.is_tensor(alone) and torch.equal(alone, out) and lse.dtype == torch.float32


def test_out_is_returned_and_may_be_float32(device):
    problem = build("fp16", [30, 5], 16, 1, 4, 64, torch.float16)
    out = poison_(torch.empty(2, 4, 64, device=device))
    got, _ = problem.check(out=out)
    assert got is out
    # What float16 outputs lose by being rounded, a float32 one keeps.
    assert not torch.equal(out, out.half().float())


def test_a_slice_of_a_wider_output_is_filled_and_its_surroundings_are_not(device):
    for split_len in (None, 16):
        problem = build("fp32", [30, 5], 16, 2, 2, 16, launch={"config": splits(split_len)})
        buffer = torch.full((2, 3, 6, 20), 77.0, device=device)
        problem.check(out=buffer[:, 1, 1:5, 2:18])
        buffer[:, 1, 1:5, 2:18] = 77.0
        assert bool((buffer == 77.0).all())


def test_a_config_may_be_a_dict():
    problem = build("fp16", [60], 16, 1, 2, 64, torch.float16)
    a = problem.check(config={"block_m": 16, "block_n": 32, "num_warps": 4, "num_stages": 1, "split_len": 32})
    b = problem.check(config=AttentionConfig(16, 32, 4, 1, 32))
    assert torch.equal(a[0], b[0])


def test_the_scale_is_one_over_the_root_of_head_dim_unless_given():
    for head_dim in (16, 80):
        problem = build("fp32", [20], 16, 1, 2, head_dim)
        assert torch.equal(problem.run()[0], problem.run(scale=1 / math.sqrt(head_dim))[0])
    problem = build("fp32", [20], 16, 1, 2, 16, scale=0.0)
    _, lse = problem.check()
    assert lse[0, 0].item() == pytest.approx(math.log(20), abs=1e-5)


def test_options_work_together_in_splits():
    for kind, q_dtype in (("bf16", torch.bfloat16), ("fp8_e4m3/tensor", torch.float16), ("int8/token_head", torch.float32)):
        build(
            kind, [70, 0, 33], 16, 2, 2, 32, q_dtype, 2, k_scale=0.5, v_scale=4.0, window=40, sinks=3, softcap=20.0,
            alibi_slopes=[0.5, 0.0, 0.25, 0.125], sink_logits=[1.0, -1.0, 0.0, 3.0], kv_start=[5, 0, 100], spike=15.0,
            launch={"config": splits(32)},
        ).check()  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
def test_every_dtype_of_q_is_taken_on_every_format(kind):
    for q_dtype in q_dtypes(kind):
        out, _ = build(kind, [37, 2], 16, 2, 2, 40, q_dtype, spike=7.0).check()
        assert out.dtype == q_dtype


def test_the_bound_notices_one_wrong_number():
    problem = build("fp32", [20], 16, 1, 2, 16)
    out, lse = problem.run()
    wrong = out.clone()
    wrong[0, 1, 3] += 1e-4
    with pytest.raises(AssertionError, match=r"out\(0, 1, 3\)"):
        assert_close_to_reference(wrong, lse, problem.truth, torch.float32)
    with pytest.raises(AssertionError, match="lse"):
        assert_close_to_reference(out, lse + 1e-3, problem.truth, torch.float32)


def _ints(values, device):
    return torch.tensor(values, dtype=torch.int32, device=device)
