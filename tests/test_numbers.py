"""The contract of numbers where it is hardest to keep: amplitudes, huge scores, many small probabilities, every dtype."""

import math

import pytest
import torch
from bounds import assert_close_to_reference
from caches import FORMATS, q_dtypes
from problems import build

from tkv.tune.configs import AttentionConfig

SMALL = AttentionConfig(16, 16, 4, 1)
SPLIT = AttentionConfig(16, 16, 4, 1, 32)
DYNAMIC = ("fp8_e4m3/token_head", "int8/token_head")


def low_precision(kind):
    """The cheapest dtype of q that a format takes."""
    return q_dtypes(kind)[-1] if "/" not in kind else torch.float16


@pytest.mark.parametrize("amplitude", [1e-4, 1e-2, 1e4])
@pytest.mark.parametrize("kind", FORMATS)
def test_values_of_any_amplitude(kind, amplitude):
    static = {"v_scale": amplitude / 100} if kind == "fp8_e4m3/tensor" else {}
    for q_dtype in {low_precision(kind), torch.float32}:
        build(kind, [70], 16, 1, 2, 32, q_dtype, v_amplitude=amplitude / 4, spike=4.0, launch={"config": SMALL}, **static).check()


@pytest.mark.parametrize("config", [SMALL, SPLIT, None], ids=["tiles", "splits", "default"])
@pytest.mark.parametrize("kind", ["bf16", *DYNAMIC])
def test_amplitudes_that_differ_by_ten_thousand_within_a_tile(kind, config):
    for seed in (1, 2):
        problem = build(kind, [70], 16, 1, 2, 32, low_precision(kind), v_amplitude=100.0, v_mix=4.0, seed=seed, launch={"config": config})
        # Without the allowance for probabilities that float16 cannot hold: here it can hold all of them.
        out, lse = problem.run()
        assert_close_to_reference(out, lse, problem.truth, problem.q.dtype)


@pytest.mark.parametrize("kind", DYNAMIC)
@pytest.mark.parametrize("first", [1e4, 1e-12], ids=["falling", "rising"])
def test_amplitudes_that_differ_by_far_more_from_tile_to_tile(kind, first):
    """Tiles of 16 keys: large values with no weight beside small ones with all of it, in either order."""
    for score in (-60.0, 0.0):

        def edit(q, k, v, score=score):
            q[:] = 1.0
            k[:] = 0.0
            large, small = (slice(0, 16), slice(16, 32)) if first > 1 else (slice(16, 32), slice(0, 16))
            k[large] = score / k.shape[-1] ** 0.5
            v[large] *= 1e4
            v[small] *= 1e-12

        problem = build(kind, [32], 16, 1, 1, 16, torch.float16, edit=edit, launch={"config": SMALL})
        out, lse = problem.run(out=torch.empty(1, 1, 16, dtype=torch.float32, device=problem.q.device))
        assert_close_to_reference(out, lse, problem.truth, torch.float16)


def test_a_tile_of_zero_values_among_others():
    def edit(q, k, v):
        v[16:32] = 0.0

    for kind in ("fp16", *DYNAMIC):
        build(kind, [60], 16, 1, 2, 16, torch.float16, edit=edit, launch={"config": SMALL}).check()
    for kind in DYNAMIC:
        out, _ = build(kind, [20], 16, 1, 1, 16, torch.float16, v_amplitude=0.0, launch={"config": SMALL}).check()
        assert not out.any()


@pytest.mark.parametrize("kind", ["fp8_e4m3/tensor", *DYNAMIC])
@pytest.mark.parametrize(
    ("q_dtype", "q_scale"), [(torch.float16, 1.6e4), (torch.bfloat16, 1e5), (torch.float32, 1e5), (torch.bfloat16, 1e-7)]
)
def test_queries_of_any_magnitude_on_8_bit_caches(kind, q_dtype, q_scale):
    # The scale brings the scores back to where a softmax is soft.
    out, _ = build(kind, [40, 3], 16, 2, 2, 64, q_dtype, q_scale=q_scale, scale=0.1 / q_scale, launch={"config": SMALL}).check()
    assert out.float().abs().max() > 0.01
    build(kind, [40, 3], 16, 2, 2, 64, q_dtype, q_scale=q_scale, launch={"config": SMALL}).check()


def test_rows_of_one_tile_have_magnitudes_of_their_own():
    def edit(q, k, v):
        q *= torch.tensor([1e-6, 1.0, 3e3, 0.0])[:, None].to(q.dtype)

    for q_dtype in (torch.bfloat16, torch.float32):
        problem = build("int8/token_head", [40], 16, 1, 4, 32, q_dtype, edit=edit, launch={"config": SMALL})
        assert problem.q[0, 3].abs().max() == 0
        problem.check()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("size", [1e3, 1e6, 1e12, 1e20])
def test_scores_of_any_size_never_give_nan(kind, size):
    for q_dtype in q_dtypes(kind):
        if q_dtype == torch.float16 and size > 1e6:
            continue
        q_scale = min(size, 1e4) if q_dtype == torch.float16 else size
        problem = build(kind, [50, 0, 1], 16, 1, 2, 32, q_dtype, q_len=2, q_scale=q_scale, launch={"config": SPLIT})
        out, lse = problem.run()
        assert not out.isnan().any() and not lse.isnan().any()
        # A mean of values, whatever the weights.
        top = problem.v_size.max() / 50
        assert bool((out.abs() <= top * 1.01).all())
        if size <= 1e6:
            problem.check()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "int8/token_head"])
def test_scores_far_from_zero_are_told_apart(kind, sign):
    """All scores about +-1e5, one larger by 16 than the others: beyond any finite number that could stand for a mask."""

    def edit(q, k, v):
        q[:] = sign * 256.0
        k[:] = 96.0
        k[17, :, 0] += sign * 1.0
        v[:] = torch.arange(float(len(v)))[:, None, None]

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(kind, torch.float16)
    problem = build(kind, [40], 16, 1, 1, 16, dtype, edit=edit, scale=1 / 4, v_scale=1.0, launch={"config": SMALL})
    out, lse = problem.check()
    if kind != "int8/token_head":
        assert out.float().sub(17).abs().max() < 0.1 * 17
        assert lse.item() == pytest.approx(sign * 96 * 256 * 4 + 64, rel=1e-6)


@pytest.mark.parametrize("kind", ["fp16", "fp8_e4m3/token_head", "int8/token_head", "bf16", "fp32"])
def test_many_small_probabilities_add_up(kind):
    """One key of weight 1 and value 0 beside 300 of weight e^-14 and value 1: float16 holds those only when they are lifted."""

    def edit(q, k, v):
        q[:] = 1.0
        k[:] = 0.0
        k[7] = 14.0 / k.shape[-1] ** 0.5
        v[:] = 1.0
        v[7] = 0.0

    for config in (SMALL, None):
        dtype = q_dtypes(kind)[-1] if kind == "bf16" else q_dtypes(kind)[0] if kind == "fp32" else torch.float16
        problem = build(kind, [301], 16, 1, 1, 16, dtype, edit=edit, launch={"config": config})
        out, lse = problem.run(out=torch.empty(1, 1, 16, dtype=torch.float32, device=problem.q.device))
        assert_close_to_reference(out, lse, problem.truth, dtype)
        assert out[0, 0, 0].item() == pytest.approx(300 * math.exp(-14), rel=0.02)


def test_fp32_queries_are_computed_in_fp32():
    """Products need all 24 bits: in TF32, or with numbers cut to 16 bits, the scores would be off by 1e-3 of their size."""
    for kind in FORMATS:
        problem = build(kind, [40], 16, 1, 4, 64, torch.float32, spike=10.0, q_scale=3.0)
        out, lse = problem.run()
        worst = assert_close_to_reference(out, lse, problem.truth, torch.float32)
        assert worst < 1
        assert (out - out.half().float()).abs().max() > 1e-6


def test_bf16_numbers_are_multiplied_as_numbers():
    # As integers, the bits of these would give about 16256 * 16256.
    def edit(q, k, v):
        q[:] = 1.0
        k[:] = 1.0
        v[:] = torch.tensor([1.0, -2.0])[torch.arange(len(v)) % 2][:, None, None]

    out, lse = build("bf16", [6], 16, 1, 1, 64, torch.bfloat16, edit=edit).check()
    assert out.unique().tolist() == [-0.5]
    assert lse.item() == pytest.approx(8 + math.log(6), abs=1e-4)


@pytest.mark.parametrize("softcap", [1.0, 20.0, 1e4])
def test_softcap_bends_scores_of_every_size(softcap):
    for q_scale in (1e-3, 1.0, 100.0):
        build("fp32", [30], 16, 1, 2, 32, q_scale=q_scale, softcap=softcap, spike=6.0, launch={"config": SMALL}).check()
        build("int8/token_head", [30], 16, 1, 2, 32, torch.float16, q_scale=q_scale, softcap=softcap, launch={"config": SMALL}).check()


def test_static_scales_reach_scores_and_values():
    problem = build("fp8_e4m3/tensor", [30], 16, 1, 2, 32, torch.float32, k_scale=1.0, v_scale=1.0)
    out, lse = problem.check()
    problem.cache.v_scale.fill_(3.0)
    torch.testing.assert_close(problem.run(), (3 * out, lse), rtol=1e-5, atol=1e-5)
    problem.cache.k_scale.fill_(4.0)
    torch.testing.assert_close(problem.run(scale=0.25 / math.sqrt(32)), (3 * out, lse), rtol=1e-5, atol=1e-5)
    assert (problem.run()[1] - lse).abs().max() > 0.1
