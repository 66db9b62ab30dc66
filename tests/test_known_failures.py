"""Where kernels of this kind are known to have failed: one small input with the right value for each class."""

import math

import pytest
import torch
from bounds import assert_close_to_reference
from caches import empty_cache, poison_
from problems import build, test_device

import tkv
from tkv import reference
from tkv.tune.configs import AttentionConfig, split_plan

DEVICE = test_device()
WHOLE = AttentionConfig(16, 16, 4, 1)
SPLITS = AttentionConfig(16, 16, 4, 1, 16)
INF = torch.inf


def numbered(q, k, v):
    """Equal scores, and values that say which key they came from: key j holds j + 1."""
    k[:] = 0.0
    v[:] = torch.arange(1.0, len(v) + 1)[:, None, None]


def mean_of(*keys):
    return sum(key + 1 for key in keys) / len(keys)


def ones(*shape, dtype=torch.float32):
    return torch.ones(*shape, dtype=dtype, device=DEVICE)


@pytest.mark.parametrize("config", [WHOLE, SPLITS], ids=["whole", "splits"])
def test_an_empty_sequence_in_a_batch(config):
    out, lse = build("fp32", [5, 0, 7], dim=16, edit=numbered, launch={"config": config}).run()
    assert out[:, 0, 0].tolist() == pytest.approx([3.0, 0.0, 4.0])
    assert lse[:, 0].tolist() == pytest.approx([math.log(5), -INF, math.log(7)])


@pytest.mark.parametrize("config", [WHOLE, SPLITS], ids=["whole", "splits"])
def test_every_path_writes_its_output(config):
    # Windows that end before the keys do, queries before the keys, empty sequences: nothing is seen, and zeros are written.
    problem = build("fp16", [40, 0, 33], 16, 1, 2, 16, torch.float16, 2, window=3, q_start=[500, 0, -5], launch={"config": config})
    out = torch.full((3, 2, 2, 16), torch.nan, dtype=torch.float16, device=DEVICE)
    _, lse = problem.run(out=out)
    assert not out.any() and bool((lse == -INF).all())


def test_more_query_rows_than_keys():
    out, lse = build("fp32", [2], dim=16, q_len=3, edit=numbered).run()
    assert out[0, :, 0, 0].tolist() == pytest.approx([0.0, 1.0, 1.5])
    assert lse[0, :, 0].tolist() == pytest.approx([-INF, 0.0, math.log(2)])


def test_a_merge_of_two_empty_states():
    out, lse = tkv.merge_states([ones(1, 16), ones(1, 16)], [ones(1) * -INF, ones(1) * -INF])
    assert not out.any() and lse.item() == -INF


def test_a_merge_with_nan_in_an_empty_side():
    for order in (0, 1):
        outs, lses = [ones(1, 16) * 1.7, ones(1, 16) * torch.nan], [ones(1) * 0.3, ones(1) * -INF]
        if order:
            outs, lses = outs[::-1], lses[::-1]
        out, lse = tkv.merge_states(outs, lses)
        assert torch.equal(out, ones(1, 16) * 1.7) and lse.item() == ones(1).mul(0.3).item()


@pytest.mark.parametrize("score", [-6e4, -1e6])
def test_scores_below_any_finite_mask(score):
    def edit(q, k, v):
        numbered(q, k, v)
        q[:] = 1.0
        k[:] = score / 4
        k[3] = (score + 20) / 4

    # 16 terms of score / 4 / 4: all scores are far below -50000, and key 3 has the largest.
    out, lse = build("fp32", [20], dim=16, edit=edit, scale=0.25).run()
    assert out[0, 0, 0].item() == pytest.approx(4.0, rel=1e-4)
    assert lse.item() == pytest.approx(score + 20, rel=1e-5)


@pytest.mark.parametrize("kind", ["bf16", "fp8_e4m3/token_head", "int8/token_head"])
def test_unwritten_slots_of_the_last_page(kind):
    cache = empty_cache(kind, "nhd", 5, 16, 1, 16, device=DEVICE)
    x = torch.arange(1.0, 34.0, device=DEVICE)[:, None, None].repeat(1, 1, 16)
    tkv.write_kv(x * 0, x, cache, torch.arange(16, 49, device=DEVICE))
    q = ones(1, 1, 16, dtype=torch.bfloat16)
    for config in (WHOLE, SPLITS):
        args = q, cache, torch.tensor([[1, 2, 3]], device=DEVICE), torch.tensor([33], device=DEVICE)
        out, lse = tkv.paged_decode(*args, return_lse=True, config=config)
        assert out[0, 0].float().tolist() == pytest.approx([17.0] * 16, rel=1e-2)
        assert lse.item() == pytest.approx(math.log(33), abs=1e-5)


@pytest.mark.parametrize("config", [WHOLE, SPLITS], ids=["whole", "splits"])
def test_slots_left_of_the_window_hold_nan(config):
    for kind in ("fp32", "int8/token_head"):
        problem = build(kind, [40], 16, dim=16, edit=numbered, window=8, q_dtype=torch.float32, launch={"config": config})
        if kind == "fp32":
            page = int(problem.page_table[0, 1])
            assert bool(problem.cache.k.flatten(0, 1)[16 * page : 16 * page + 16].isnan().all()), "the page before the window is poisoned"
        out, lse = problem.run()
        assert out[0, 0, 0].item() == pytest.approx(mean_of(*range(32, 40)), rel=2e-3)
        assert lse.item() == pytest.approx(math.log(8), abs=1e-5)


@pytest.mark.parametrize(("key", "seen"), [(5, False), (6, True), (9, True)])
def test_a_window_is_off_by_one_on_neither_side(key, seen):
    def edit(q, k, v):
        numbered(q, k, v)
        q[:] = 1.0
        k[key] = 5.0

    problem = build("fp32", [10], 4, dim=16, edit=edit, window=4)
    if not seen:
        # The builder left a slot that nobody sees poisoned: here it must hold a key that would win if it were seen.
        page = int(problem.page_table[0, 1].clamp(0, problem.cache.num_pages - 1))
        problem.page_table[0, 1] = page
        problem.cache.k[page, 1], problem.cache.v[page, 1] = 5.0, 6.0
    out, _ = problem.run()
    expected = key + 1 if seen else mean_of(6, 7, 8, 9)
    assert out[0, 0, 0].item() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("window", [None, 4])
def test_empty_splits_are_merged(window):
    for split_len in (None, 16):
        config = AttentionConfig(16, 16, 4, 1, split_len)
        # A long table makes many splits; every sequence needs only some of them.
        problem = build("fp32", [*range(1, 9), 250], 16, dim=16, edit=numbered, window=window, launch={"config": config})
        out, lse = problem.run()
        for seq, n in enumerate([*range(1, 9), 250]):
            keys = range(n if window is None else min(n, window))
            assert lse[seq, 0].item() == pytest.approx(math.log(len(keys)), abs=1e-5)
            assert out[seq, 0, 0].item() == pytest.approx(mean_of(*(n - 1 - j for j in keys)), rel=1e-5)


def test_heads_of_a_sliced_tensor():
    problem = build("fp32", [20, 3], 16, 2, 2, 16, launch={"config": SPLITS})
    wide_q = poison_(torch.empty(2, 9, 24, device=DEVICE))
    wide_q[:, 3:7, 4:20] = problem.q
    wide_out = poison_(torch.empty(2, 9, 24, device=DEVICE))
    problem.q = wide_q[:, 3:7, 4:20]
    problem.check(out=wide_out[:, 3:7, 4:20])
    outs = torch.stack([wide_out, wide_out])[:, :, 3:7, 4:20]
    merged, lse = tkv.merge_states(outs, torch.zeros(2, 2, 6, device=DEVICE)[:, :, 1:5])
    torch.testing.assert_close(merged, wide_out[:, 3:7, 4:20])
    torch.testing.assert_close(lse, torch.full((2, 4), math.log(2.0), device=DEVICE))


@pytest.mark.parametrize("layout", ["interleaved", "layers"])
def test_k_and_v_in_one_buffer(layout):
    for kind in ("bf16", "int8/token_head"):
        build(kind, [35, 4], 16, 2, 2, 16, layout=layout).check()


def test_the_strides_of_v_differ_from_those_of_k():
    problem = build("fp8_e4m3/token_head", [35, 4], 16, 3, 1, 16, layout="mixed")
    assert problem.cache.k.stride() != problem.cache.v.stride()
    problem.check()


@pytest.mark.gpu
def test_rows_of_queries_and_outputs_lie_beyond_32_bits():
    # For K, V and their scales a buffer of just over 2 GiB is written and read where writing is tested, without a GPU too.
    rows = 2**31 // (64 * 8) + 2
    q = torch.zeros(rows, 8, 64, dtype=torch.float16, device=DEVICE)
    q[-1] = 1
    cache = tkv.KVCache(torch.zeros(1, 16, 8, 64, dtype=torch.float16, device=DEVICE), ones(1, 16, 8, 64, dtype=torch.float16) * 2)
    lens = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    lens[-1] = 3
    out = tkv.paged_decode(q, cache, torch.zeros(rows, 1, dtype=torch.int32, device=DEVICE), lens)
    assert bool((out[-1] == 2).all()) and not out[:-1].any()


@pytest.mark.parametrize("head_dim", [80, 96, 112, 160, 192])
def test_head_dims_that_are_no_power_of_two(head_dim):
    for kind in ("fp16", "fp8_e4m3/token_head"):
        build(kind, [20], 16, 1, 2, head_dim, torch.float16, spike=6.0, layout="wide").check()


def test_a_group_above_the_tile():
    build("bf16", [40, 3], 16, 1, 48, 16, launch={"config": WHOLE}).check()
    build("bf16", [40, 3], 16, 1, 48, 16, q_len=3, launch={"config": AttentionConfig(16, 32, 4, 1)}).check()


def test_scales_are_never_dropped():
    codes = torch.full((2, 4, 2, 16), 2.0, device=DEVICE).to(torch.float8_e4m3fn)
    q = ones(1, 2, 16)
    table, lens = torch.tensor([[1]], device=DEVICE), torch.tensor([3], device=DEVICE)
    out, lse = tkv.paged_decode(q, tkv.KVCache(codes, codes, 0.5, 0.25), table, lens, return_lse=True)
    assert out.unique().tolist() == [0.5]
    assert lse[0].tolist() == pytest.approx([16 * 2 * 0.5 / 4 + math.log(3)] * 2)
    # Different in every head and token.
    scale = torch.arange(1.0, 17.0, device=DEVICE).view(2, 4, 2) / 8
    cache = tkv.KVCache(codes, codes, scale, scale.flip(1))
    out, lse = tkv.paged_decode(q, cache, table, lens, return_lse=True)
    for head in range(2):
        x = [16 * 2 * scale[1, row, head].item() / 4 for row in range(3)]
        total = sum(map(math.exp, x))
        assert lse[0, head].item() == pytest.approx(math.log(total), rel=1e-5)
        expected = sum(math.exp(s) * 2 * scale[1, 3 - row, head].item() for row, s in enumerate(x)) / total
        assert out[0, head, 0].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["fp8_e4m3/token_head", "int8/token_head"])
@pytest.mark.parametrize("value", [0.7, -3.0, 0.0, 1e-20, 1e6])
def test_a_constant_vector_and_a_zero_vector_come_back(kind, value):
    cache = empty_cache(kind, "nhd", 1, 4, 1, 16, device=DEVICE)
    x = ones(1, 1, 16) * value
    tkv.write_kv(x, x, cache, torch.tensor([2], device=DEVICE))
    read = reference.dequantize(cache.v[0, 2], cache.v_scale[0, 2], cache.v_format)
    assert read.flatten().tolist() == pytest.approx([x[0, 0, 0].item()] * 16, rel=1e-6)
    # And through attention, as the one key that is visible.
    table, lens, start = (torch.tensor(t, device=DEVICE) for t in ([[0]], [3], [2]))
    out = tkv.paged_decode(ones(1, 1, 16), cache, table, lens, window=1, q_start=start)
    assert out.flatten().tolist() == pytest.approx([x[0, 0, 0].item()] * 16, rel=1e-5)


def test_what_is_too_large_saturates_and_changes_no_other_token():
    cache = empty_cache("fp8_e4m3/tensor", "nhd", 1, 4, 1, 16, 0.5, 0.5, device=DEVICE)
    x = ones(3, 1, 16)
    x[1] = 1e6
    tkv.write_kv(x, -x, cache, torch.tensor([0, 1, 2], device=DEVICE))
    assert reference.dequantize(cache.k[0, :3], cache.k_scale, cache.k_format)[:, 0, 0].tolist() == [1.0, 224.0, 1.0]
    assert reference.dequantize(cache.v[0, :3], cache.v_scale, cache.v_format)[:, 0, 0].tolist() == [-1.0, -224.0, -1.0]


def test_a_static_scale_that_was_never_set_is_one():
    codes = ones(1, 4, 1, 16).to(torch.float8_e4m3fn)
    for cache in (tkv.KVCache(codes, codes), tkv.KVCache.empty(1, 4, 1, 16, "fp8_e4m3/tensor", device=DEVICE)):
        assert cache.k_scale.item() == 1.0 and cache.v_scale.item() == 1.0


def test_scales_that_are_there_are_not_overwritten_at_first_use():
    problem = build("int8/token_head", [5], dim=16, q_dtype=torch.float32)
    before = problem.cache.k_scale.clone()
    problem.check()
    torch.testing.assert_close(problem.cache.k_scale, before, rtol=0, atol=0, equal_nan=True)
    slot = 16 * int(problem.page_table[0, 0]) + 5
    tkv.write_kv(ones(1, 1, 16), ones(1, 1, 16), problem.cache, torch.tensor([slot], device=DEVICE))
    before.view(-1)[slot] = problem.cache.k_scale.view(-1)[slot]
    torch.testing.assert_close(problem.cache.k_scale, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("config", [WHOLE, SPLITS], ids=["whole", "splits"])
def test_a_learned_sink_is_in_the_denominator(config):
    out, lse = build("fp32", [33], dim=16, edit=numbered, sink_logits=[2.0], launch={"config": config}).run()
    denominator = 33 + math.exp(2)
    assert out[0, 0, 0].item() == pytest.approx(17 * 33 / denominator, rel=1e-5)
    assert lse.item() == pytest.approx(math.log(denominator), rel=1e-5)


@pytest.mark.parametrize("config", [WHOLE, SPLITS], ids=["whole", "splits"])
@pytest.mark.parametrize(
    "option",
    [{"window": 7}, {"window": 7, "sinks": 3}, {"softcap": 1.0}, {"alibi_slopes": [1.0, 0.5]}, {"sink_logits": [3.0, 1.0]}, {"scale": 0.9}]
    + [{"kv_start": [9], "alibi_slopes": [1.0, 0.5], "q_start": [60]}, {"q_start": [20]}],
    ids=lambda option: "+".join(option),
)
def test_no_option_is_ignored_on_any_path(config, option):
    for kind, q_len in (("fp32", None), ("int8/token_head", 2)):
        problem = build(kind, [40], 16, 1, 2, 16, torch.float32, q_len, q_scale=3.0, launch={"config": config}, **option)
        problem.check()
        plain = build(kind, [40], 16, 1, 2, 16, torch.float32, q_len, q_scale=3.0)
        assert (problem.truth[1].cpu() - plain.truth[1].cpu()).abs().max() > 0.01, "the option matters"


def test_a_sequence_among_others_gives_what_it_gives_alone():
    many = build("fp16", [30, 77, 0, 16, 1], 16, 2, 2, 16, torch.float16, launch={"config": SPLITS})
    out, lse = many.run()
    for seq in range(5):
        args = many.q[seq : seq + 1], many.cache, many.page_table[seq : seq + 1], many.seq_lens[seq : seq + 1]
        alone, lse_alone = tkv.paged_decode(*args, return_lse=True, config=SPLITS)
        torch.testing.assert_close((out[seq], lse[seq]), (alone[0], lse_alone[0]), rtol=2e-3, atol=2e-3)
    again, _ = many.run()
    assert torch.equal(out, again), "and the same bits when run again"


def test_one_long_sequence_in_a_large_batch_does_not_run_on_one_multiprocessor():
    config = AttentionConfig(16, 64, 4, 2)
    splits, tiles = split_plan(config, num_programs=36 * 8, max_keys=220_000, num_sms=132, part_bytes=36 * 64 * 129 * 4)
    assert splits >= 50 and splits * tiles * 64 >= 220_000


@pytest.mark.parametrize("q_len", [2, 5, 8])
def test_speculative_rows_are_packed_and_split_like_decode(q_len):
    problem = build("fp8_e4m3/token_head", [90, 12], 16, 1, 2, 16, torch.float16, q_len, spike=9.0, launch={"config": SPLITS})
    whole, _ = problem.check(config=WHOLE)
    out, _ = problem.check()
    torch.testing.assert_close(out, whole, rtol=4e-3, atol=4e-3)


def test_large_pages_and_heads_have_a_legal_default():
    build("fp32", [70], 2048, 1, 2, 256).check()
    build("bf16", [70], 2048, 1, 2, 256).check()


def test_values_of_small_amplitude_in_an_8_bit_cache_are_not_folded_into_half_precision_probabilities():
    config = AttentionConfig(16, 512, 4, 1)
    problem = build("int8/token_head", [4096], 64, 1, 1, 16, torch.float16, v_amplitude=1e-3, launch={"config": config})
    out, lse = problem.run(out=torch.empty(1, 1, 16, device=DEVICE))
    assert_close_to_reference(out, lse, problem.truth, torch.float16)
    size = problem.truth[2].cpu()
    assert bool(((out.cpu() - problem.truth[0].cpu()).abs() <= 4e-4 * size).all())


def test_fp32_is_not_computed_in_tf32():
    def edit(q, k, v):
        # 1 + 2^-12 needs more bits than TF32 has: cut, all scores would be 64.
        q[:] = 1.0
        k[:] = 1.0
        k[3] = 1.0 + 2.0**-12
        v[:] = torch.arange(float(len(v)))[:, None, None]

    _, lse = build("fp32", [4], dim=64, edit=edit, scale=64.0).run()
    assert lse.item() == pytest.approx(64 * 64 + math.log(math.exp(1) + 3), abs=5e-3)


@pytest.mark.parametrize("config", [WHOLE, SPLITS, None], ids=["whole", "splits", "default"])
def test_a_hint_smaller_than_the_truth(config):
    build("fp32", [500], 16, dim=16, spike=6.0, launch={"config": config, "max_seq_len": 1}).check()


def test_positions_of_a_partial_result():
    # The second page of a sequence of 32 whose query stands at 30, with a window of 20: it sees keys 16 to 30 of the page.
    out, lse = build("fp32", [16], 16, dim=16, edit=numbered, kv_start=[16], q_start=[30], window=20).run()
    assert out[0, 0, 0].item() == pytest.approx(mean_of(*range(15)), rel=1e-5) and lse.item() == pytest.approx(math.log(15), abs=1e-5)
    # The first page: keys 11 to 15.
    out, lse = build("fp32", [16], 16, dim=16, edit=numbered, kv_start=[0], q_start=[30], window=20).run()
    assert out[0, 0, 0].item() == pytest.approx(mean_of(*range(11, 16)), rel=1e-5) and lse.item() == pytest.approx(math.log(5), abs=1e-5)


def test_a_key_that_is_not_finite_reaches_no_row_that_does_not_see_it():
    problem = build("fp32", [20], 16, dim=16, q_len=3, edit=numbered)
    clean, _ = problem.run()
    page = int(problem.page_table[0, 1])
    for bad in (torch.nan, INF, -INF):
        problem.cache.k[page, 3] = bad  # key 19, which only the last row sees
        out, lse = problem.run()
        assert torch.equal(out[0, :2], clean[0, :2]) and bool(lse[0, :2].isfinite().all())
