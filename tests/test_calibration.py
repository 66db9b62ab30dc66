"""Static scales: against all the data at once, however it was cut; in files, by the names of others; and what is wrong with them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import effort, test_device

from tkv.cache import KVCache
from tkv.calibration import Calibrator, calibrate
from tkv.errors import DTypeError, RangeError, ShapeError, UnsupportedError
from tkv.formats import KVFormat

DEVICE = test_device()
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0}
STATIC = ("fp8_e4m3/tensor", "fp8_e4m3/head", "fp8_e5m2/tensor", "fp8_e5m2/head", "int8/tensor", "int8/head", "int8/channel")
METHODS = ("absmax", "percentile", "mse")
HEADS, DIM = 3, 16


def numbers(*shape, seed=0, dtype=torch.float32):
    """Heads and channels of very different sizes, and a heavy tail."""
    torch.manual_seed(seed)
    x = torch.distributions.StudentT(4.0).sample(shape)
    return (x * torch.logspace(-1, 1, HEADS)[:, None] * torch.logspace(0, 2, DIM)).to(DEVICE, dtype)


def groups_of(x, kind):
    """Magnitudes of the numbers that share a scale, in rows, in the order of the flattened scale."""
    x = x.double().abs().cpu().reshape(-1, HEADS, DIM).numpy()
    return {
        "tensor": x.reshape(1, -1),
        "head": x.transpose(1, 0, 2).reshape(HEADS, -1),
        "channel": x.transpose(1, 2, 0).reshape(HEADS * DIM, -1),
    }[KVFormat.parse(kind).scale]


def shape_of(kind):
    return {"tensor": (), "head": (HEADS,), "channel": (HEADS, DIM)}[KVFormat.parse(kind).scale]


def clip_of(scale, kind):
    """The largest magnitude that does not saturate, of each group, in float64."""
    return scale.double().cpu().numpy().reshape(-1) * LARGEST[KVFormat.parse(kind).dtype]


def squared_errors(x, scales, kind):
    """The sum of squared errors of numbers that are stored with a scale, for each of some scales."""
    kind = KVFormat.parse(kind)
    x, scales = torch.as_tensor(x).float(), torch.as_tensor(scales).float().reshape(-1, 1)
    code = (x / scales).clamp(-LARGEST[kind.dtype], LARGEST[kind.dtype])
    code = code.round() if kind.dtype == "int8" else code.to(kind.torch_dtype).float()
    return (x.double() - code.double() * scales).square().sum(1).numpy()


def observed(x, kind, method="absmax", cuts=(), **options):
    """The scale of K after batches that end at the cuts."""
    calibrator = Calibrator(1, (kind, "bf16"), method, **options)
    for part in torch.tensor_split(x, cuts):
        calibrator.update(0, part, None)
    return calibrator.scales(0)[0]


@pytest.mark.parametrize("kind", STATIC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_absmax_is_the_largest_magnitude_over_the_largest_code(kind, dtype):
    x = numbers(101, HEADS, DIM, dtype=dtype)
    scale = observed(x, kind)
    assert scale.dtype == torch.float32 and scale.shape == shape_of(kind) and scale.device == x.device
    expected = groups_of(x.float(), kind).max(1) / LARGEST[KVFormat.parse(kind).dtype]
    assert np.array_equal(scale.cpu().numpy().reshape(-1), expected.astype(np.float32))


@pytest.mark.parametrize("kind", ["fp8_e4m3/tensor", "fp8_e5m2/head", "int8/channel"])
@pytest.mark.parametrize("percentile", [0.5, 50, 99, 99.9, 100])
def test_percentile_is_within_a_512th_of_that_over_all_the_data(kind, percentile):
    x = numbers(1003, HEADS, DIM, seed=1)
    clip = clip_of(observed(x, kind, "percentile", (100, 101, 700), percentile=percentile), kind)
    magnitudes = groups_of(x, kind)
    exact = np.percentile(magnitudes, percentile, axis=1, method="inverted_cdf")
    floor = magnitudes.max(1) * 2.0**-15
    assert (abs(clip - exact) <= np.maximum(exact / 512, floor) + exact * 1e-6).all()
    if percentile == 100:
        assert np.allclose(clip, magnitudes.max(1), rtol=1e-6, atol=0)


def test_percentile_of_bfloat16_numbers_is_exact():
    x = numbers(777, HEADS, DIM, seed=2, dtype=torch.bfloat16)
    clip = clip_of(observed(x, "int8/channel", "percentile", percentile=97), "int8/channel")
    exact = np.percentile(groups_of(x, "int8/channel"), 97, axis=1, method="inverted_cdf")
    assert np.allclose(clip, exact, rtol=1e-6, atol=0)


def test_percentile_is_99_9_by_default_and_passes_over_an_outlier():
    x = numbers(500, HEADS, DIM)
    x[3, 1, 2] = 30000.0
    assert torch.equal(observed(x, "int8/tensor", "percentile"), observed(x, "int8/tensor", "percentile", percentile=99.9))
    assert observed(x, "int8/tensor") * 127 == pytest.approx(30000.0)
    clip = clip_of(observed(x, "int8/tensor", "percentile"), "int8/tensor")[0]
    assert clip == pytest.approx(np.percentile(groups_of(x, "int8/tensor"), 99.9, method="inverted_cdf"), rel=1 / 500)


def test_percentile_under_an_outlier_of_everything_is_2_to_the_minus_15_of_it_at_most():
    x = torch.full((1000, 1, 16), 1e-3, device=DEVICE)
    x[7, 0, 3] = 1e6
    clip = clip_of(observed(x, "fp8_e4m3/tensor", "percentile", percentile=99), "fp8_e4m3/tensor")[0]
    assert 0 < clip <= 1e6 * 2.0**-15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", STATIC)
@pytest.mark.parametrize("shape", ["tail", "normal", "uniform", "outlier", "constant"])
def test_mse_is_within_a_percent_of_the_best_of_a_grid_over_all_the_data(kind, shape, dtype):
    torch.manual_seed(3)
    x = {
        "tail": lambda: numbers(601, HEADS, DIM, seed=3).cpu(),
        "normal": lambda: torch.randn(601, HEADS, DIM),
        "uniform": lambda: torch.rand(601, HEADS, DIM) - 0.5,
        "outlier": lambda: torch.randn(601, HEADS, DIM),
        "constant": lambda: torch.full((601, HEADS, DIM), -3.7),
    }[shape]()
    if shape == "outlier":
        x[5] *= 40
    x = x.to(DEVICE, dtype)
    scale = observed(x, kind, "mse", (77, 300))
    assert scale.shape == shape_of(kind)
    largest = LARGEST[KVFormat.parse(kind).dtype]
    ratios = np.linspace(0.2, 1, 80)
    got = best = 0.0
    # Of the many channels, every tenth.
    for magnitudes, s in list(zip(groups_of(x, kind), scale.reshape(-1).tolist(), strict=True))[::10]:
        errors = squared_errors(magnitudes, np.append(magnitudes.max() / largest * ratios, s), kind)
        got, best = got + errors[-1], best + errors[:-1].min()
    # Float32 numbers, stored without error, are read back with a rounding.
    assert got <= 1.01 * best + 1e-13 * (groups_of(x, kind) ** 2).sum()


def test_mse_clips_an_outlier_of_integers_but_not_of_floats():
    """int8 loses steps to range, and floats hardly do."""
    torch.manual_seed(0)
    x = torch.randn(4000, 1, 16, device=DEVICE)
    x[9, 0, 9] = 100.0
    assert clip_of(observed(x, "int8/tensor", "mse"), "int8/tensor")[0] < 80
    assert clip_of(observed(x, "fp8_e5m2/tensor", "mse"), "fp8_e5m2/tensor")[0] > 95


def test_mse_of_numbers_that_have_codes_is_without_error():
    x = torch.arange(-127, 129, device=DEVICE).clamp(max=127).float().reshape(-1, 1, 16) * 0.25
    assert observed(x, "int8/tensor", "mse").item() == 0.25


@given(
    cuts=st.lists(st.integers(0, 60), max_size=6).map(sorted),
    kind=st.sampled_from(STATIC),
    method=st.sampled_from(METHODS),
    order=st.randoms(use_true_random=False),
)
@effort(40)
def test_scales_do_not_depend_on_the_order_of_tokens_and_where_they_were_cut(cuts, kind, method, order):
    x = numbers(60, HEADS, DIM, seed=4) * torch.logspace(-12, 12, 60, device=DEVICE)[:, None, None]
    rows = list(range(60))
    order.shuffle(rows)
    assert torch.equal(observed(x[rows], kind, method, cuts), observed(x, kind, method))


@pytest.mark.parametrize("kind", ["fp8_e4m3/tensor", "int8/channel"])
def test_histograms_are_the_same_however_the_range_grew_and_count_every_number(kind):
    x = numbers(60, HEADS, DIM, seed=5) * torch.logspace(-20, 18, 60, device=DEVICE)[:, None, None]
    counts = []
    for rows, cuts in ((slice(None), ()), (slice(None), range(1, 60)), (list(range(59, -1, -1)), (13, 14))):
        calibrator = Calibrator(1, kind, "mse")
        for part in torch.tensor_split(x[rows], list(cuts)):
            calibrator.update(0, part, part)
        counts.append(calibrator._seen[0][0].counts)
    assert torch.equal(counts[0], counts[1]) and torch.equal(counts[0], counts[2])
    assert (counts[0].sum(1) == x.numel() // counts[0].shape[0]).all()


def test_large_batches_are_looked_at_in_parts(monkeypatch):
    x = numbers(60, HEADS, DIM)
    whole = [observed(x, "int8/head", method) for method in METHODS]
    monkeypatch.setattr("tkv.calibration.histogram.CHUNK", 7 * HEADS * DIM + 5)
    assert all(torch.equal(observed(x, "int8/head", method), scale) for method, scale in zip(METHODS, whole, strict=True))


def test_memory_does_not_grow_with_tokens():
    calibrator = Calibrator(1, "int8/channel", "percentile")
    sizes = set()
    for n in (1, 1000, 3):
        calibrator.update(0, numbers(n, HEADS, DIM) * n, numbers(n, HEADS, DIM))
        sizes.add(
            sum(t.untyped_storage().nbytes() for state in calibrator._seen[0] for t in vars(state).values() if isinstance(t, torch.Tensor))
        )
    assert sizes == {2 * HEADS * DIM * (4097 * 4 + 4)}


@pytest.mark.parametrize("method", METHODS)
def test_nan_and_inf_do_not_count(method):
    x = numbers(50, HEADS, DIM, seed=6)
    spoiled = torch.cat([x, torch.full_like(x[:3], torch.nan), torch.full_like(x[:1], torch.inf), torch.full_like(x[:2], -torch.inf)])
    for kind in ("fp8_e4m3/tensor", "int8/channel"):
        assert torch.equal(observed(spoiled, kind, method, (2, 51)), observed(x, kind, method))


@pytest.mark.parametrize("method", METHODS)
def test_a_channel_of_zeros_or_of_nan_has_scale_one(method):
    x = numbers(50, HEADS, DIM)
    x[:, 1, 4] = 0.0
    x[:, 2, 0] = torch.nan
    scale = observed(x, "int8/channel", method)
    assert scale[1, 4] == 1.0 and scale[2, 0] == 1.0
    assert ((scale != 1.0).sum() == HEADS * DIM - 2) and (scale > 0).all()


@pytest.mark.parametrize("method", METHODS)
def test_scales_stay_within_what_a_cache_takes(method):
    for size, expected in ((1e-38, 1e-30), (3e38, 1e30)):
        assert observed(torch.full((2, 1, 16), size, device=DEVICE), "fp8_e4m3/tensor", method).item() == pytest.approx(expected)


def test_an_empty_batch_changes_nothing_and_is_no_observation():
    calibrator = Calibrator(1, "int8/head")
    calibrator.update(0, torch.empty(0, HEADS, DIM), torch.empty(0, HEADS, DIM))
    assert calibrator.layers == []
    with pytest.raises(RangeError, match="no tokens of layer 0"):
        calibrator.scales(0)
    x = numbers(5, HEADS, DIM)
    calibrator.update(0, x, x)
    calibrator.update(0, x[:0], x[:0])
    assert torch.equal(calibrator.scales(0)[0], observed(x, "int8/head"))


@pytest.mark.parametrize("kind", ["fp8_e4m3/tensor", "fp8_e4m3/head", "int8/channel"])
@pytest.mark.parametrize("method", METHODS)
def test_layouts_and_leading_dimensions_say_the_same(kind, method):
    x = numbers(2, 4, 5, HEADS, DIM, seed=7)
    expected = observed(x.reshape(-1, HEADS, DIM), kind, method)
    calibrator = Calibrator(2, kind, method)
    calibrator.update(0, x, x)
    calibrator.update(1, x.transpose(-3, -2), x.transpose(-3, -2), layout="hnd")
    for layer in (0, 1):
        assert all(torch.equal(scale, expected) for scale in calibrator.scales(layer))
    one = Calibrator(1, kind, method)
    one.update(0, x[0, 0, 0], x[0, 0, 0])
    assert torch.equal(one.scales(0)[0], observed(x[0, 0, :1], kind, method))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_masked_tokens_do_not_count(method, dtype):
    x = numbers(2, 7, HEADS, DIM, seed=8)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]], device=DEVICE)
    expected = observed(x[mask.bool()], "int8/head", method)
    spoiled = x.masked_fill(~mask.bool()[..., None, None], 1e9)
    calibrator = Calibrator(2, "int8/head", method)
    calibrator.update(0, spoiled, spoiled, mask=mask.to(dtype))
    calibrator.update(1, spoiled.transpose(1, 2), spoiled.transpose(1, 2), layout="hnd", mask=mask.to(dtype))
    for layer in (0, 1):
        assert torch.equal(calibrator.scales(layer)[0], expected)


def test_k_and_v_have_scales_of_their_own_kind_and_layers_of_their_own():
    k, v = numbers(9, HEADS, DIM), numbers(9, HEADS, DIM, seed=1)
    calibrator = Calibrator(2, ("int8/channel", "fp8_e5m2/head"))
    calibrator.update(0, k, v)
    calibrator.update(1, 2 * k, 4 * v)
    first, second = calibrator.scales(0), calibrator.scales(1)
    assert first[0].shape == (HEADS, DIM) and first[1].shape == (HEADS,)
    assert torch.equal(second[0], 2 * first[0]) and torch.equal(second[1], 4 * first[1])
    assert torch.equal(first[1], observed(v, "fp8_e5m2/head"))


def test_heads_of_k_and_v_may_be_of_different_dims():
    calibrator = Calibrator(1, "int8/channel", "mse")
    calibrator.update(0, torch.ones(5, 2, 24), torch.ones(5, 2, 16))
    assert [tuple(scale.shape) for scale in calibrator.scales(0)] == [(2, 24), (2, 16)]


@pytest.mark.parametrize("other", ["bf16", "int8/token_head", "fp8_e4m3/token_head"])
def test_a_side_without_static_scales_has_none_and_is_not_looked_at(other):
    x = numbers(9, HEADS, DIM)
    calibrator = Calibrator(1, (other, "int8/head"))
    calibrator.update(0, None, x)
    calibrator.update(0, "anything", x)
    k_scale, v_scale = calibrator.scales(0)
    assert k_scale is None and torch.equal(v_scale, observed(x, "int8/head"))


@pytest.mark.parametrize("kind", STATIC)
def test_scales_go_straight_into_a_cache(kind):
    x = numbers(9, HEADS, DIM)
    calibrator = Calibrator(1, kind)
    calibrator.update(0, x, 3 * x)
    k_scale, v_scale = calibrator.scales(0)
    cache = KVCache.empty(2, 16, HEADS, DIM, format=kind, device=DEVICE, k_scale=k_scale, v_scale=v_scale)
    assert torch.equal(cache.k_scale, k_scale) and torch.equal(cache.v_scale, v_scale)
    assert str(cache.k_format) == kind


@pytest.mark.parametrize("method", METHODS)
def test_batches_in_and_out_of_inference_mode_and_with_gradients_go_together(method):
    # The second part is smaller, so that no range has to grow.
    x = torch.cat([numbers(5, HEADS, DIM), numbers(5, HEADS, DIM) / 2])
    calibrator = Calibrator(1, "int8/head", method)
    with torch.inference_mode():
        calibrator.update(0, x[:5] * 1, x[:5] * 1)
        assert torch.equal(calibrator.scales(0)[0], observed(x[:5], "int8/head", method))
    tracked = x[5:].clone().requires_grad_()
    calibrator.update(0, tracked * 1, tracked * 1)
    scale = calibrator.scales(0)[0]
    assert not scale.requires_grad and torch.equal(scale, observed(x, "int8/head", method))


def test_the_callers_tensors_are_not_changed():
    x = numbers(20, HEADS, DIM)
    x[3] = torch.nan
    k, v = x.clone(), x.clone()
    mask = torch.ones(20, dtype=torch.bool, device=DEVICE)
    Calibrator(1, "int8/channel", "mse").update(0, k, v, mask=mask)
    assert torch.equal(k.view(torch.int32), x.view(torch.int32)) and torch.equal(v.view(torch.int32), x.view(torch.int32)) and mask.all()


def test_absmax_asks_the_device_for_no_number(monkeypatch):
    x = numbers(20, HEADS, DIM)
    calibrator = Calibrator(1, "int8/head")

    def refuse(*args):
        raise AssertionError("waits for the device")

    for name in ("item", "tolist", "__bool__", "__int__", "__float__", "cpu", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    calibrator.update(0, x, x, mask=torch.ones(20, device=DEVICE))
    calibrator.update(0, x, x)


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_update_never_waits_for_the_gpu(method):
    x = numbers(200, HEADS, DIM)
    mask = torch.ones(200, dtype=torch.int64, device=DEVICE)
    calibrator = Calibrator(1, "int8/channel", method)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for factor in (1.0, 100.0, 0.1):
            calibrator.update(0, x * factor, x * factor, mask=mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(calibrator.scales(0)[0].cpu(), observed(torch.cat([x, x * 100.0, x * 0.1]).cpu(), "int8/channel", method))


def fake_cache(*layers):
    return SimpleNamespace(layers=[SimpleNamespace(keys=k, values=v, **more) for k, v, more in layers])


def test_a_cache_of_transformers_is_observed_without_its_padding():
    transformers = pytest.importorskip("transformers")
    k, v = numbers(2, 7, HEADS, DIM, seed=1).transpose(1, 2), numbers(2, 7, HEADS, DIM, seed=2).transpose(1, 2)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]], device=DEVICE)
    k, v = (x.masked_fill(~mask.bool()[:, None, :, None], 1e9) for x in (k, v))
    cache = transformers.DynamicCache()
    for layer in range(2):
        cache.update(k * (layer + 1), v, layer)
    calibrator = Calibrator(2, "int8/head")
    calibrator.update_cache(cache, attention_mask=mask)
    seen = k.transpose(1, 2)[mask.bool()]
    assert torch.equal(calibrator.scales(0)[0], observed(seen, "int8/head"))
    assert torch.equal(calibrator.scales(1)[0], observed(2 * seen, "int8/head"))
    assert torch.equal(calibrator.scales(1)[1], observed(v.transpose(1, 2)[mask.bool()], "int8/head"))


def test_a_cache_may_have_layers_without_keys_and_layers_of_a_window():
    x = numbers(1, 6, HEADS, DIM).transpose(1, 2)
    mask = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1]], device=DEVICE)
    whole = torch.cat([torch.full_like(x[:, :, :2], 1e9), x], 2)
    cache = fake_cache((whole, whole, {}), (None, None, {}), (x, x, {"is_sliding": True}))
    calibrator = Calibrator(3, "int8/head")
    calibrator.update_cache(cache, mask)
    assert calibrator.layers == [0, 2]
    for layer in (0, 2):
        assert torch.equal(calibrator.scales(layer)[0], observed(x[0, :, 2:].transpose(0, 1), "int8/head"))
    with pytest.raises(RangeError, match="no tokens of layer 1"):
        calibrator.scales(1)
    with pytest.raises(ShapeError, match=r"mask: expected the tokens of k and v, \[1, 6\], got \[1, 8\]"):
        calibrator.update_cache(fake_cache((x, x, {"is_sliding": False})), mask)
    with pytest.raises(DTypeError, match="past_key_values: expected a cache"):
        calibrator.update_cache([(x, x)])


def test_calibrate_takes_pairs_lists_dicts_and_caches():
    x, y = numbers(9, HEADS, DIM), numbers(9, HEADS, DIM, seed=1)
    expected = {}
    for layer, (k, v) in enumerate([(x, y), (y, x)]):
        expected[layer] = observed(k, "int8/head", "mse"), observed(v, "int8/head", "mse")

    def same(scales, layers):
        assert list(scales) == layers
        for layer in layers:
            assert all(torch.equal(a, b) for a, b in zip(scales[layer], expected[layer], strict=True))

    same(calibrate(((x[n : n + 3], y[n : n + 3]) for n in (0, 3, 6)), "int8/head", "mse"), [0])
    same(calibrate([[(x[:4], y[:4]), (y[:4], x[:4])], [(x[4:], y[4:]), (y[4:], x[4:])]], "int8/head", "mse"), [0, 1])
    same(calibrate([{1: (y[:4], x[:4])}, {0: (x, y), 1: (y[4:], x[4:])}], "int8/head", "mse"), [0, 1])
    hx, hy = x.transpose(0, 1)[None], y.transpose(0, 1)[None]
    same(calibrate([fake_cache((hx, hy, {}), (hy, hx, {}))], "int8/head", "mse"), [0, 1])
    same(calibrate([(hx, hy)], "int8/head", "mse", layout="hnd"), [0])
    percentile = calibrate([(x, y)], "int8/head", "percentile", percentile=80)[0][0]
    assert torch.equal(percentile, observed(x, "int8/head", "percentile", percentile=80))


def test_calibrate_says_what_it_cannot_take():
    x = numbers(9, HEADS, DIM)
    with pytest.raises(RangeError, match="batches: no tokens came"):
        calibrate([], "int8/head")
    with pytest.raises(DTypeError, match="batches: expected pairs"):
        calibrate([x], "int8/head")
    with pytest.raises(DTypeError, match=r"expected a pair .* for layer 1, got int"):
        calibrate([[(x, x), 3]], "int8/head")


@pytest.mark.parametrize(
    ("error", "message", "make"),
    [
        (UnsupportedError, "have no static scales", lambda: Calibrator(1, "int8/token_head")),
        (UnsupportedError, "have no static scales", lambda: Calibrator(1, ("bf16", "fp16"))),
        (UnsupportedError, "format: .*fp8_e4m3/tensr", lambda: Calibrator(1, "fp8_e4m3/tensr")),
        (UnsupportedError, "format: .*fp8_e4m3/channel", lambda: Calibrator(1, "fp8_e4m3/channel")),
        (UnsupportedError, "method: expected one of absmax, percentile, mse, got 'max'", lambda: Calibrator(1, "int8/head", "max")),
        (UnsupportedError, "percentile: only method 'percentile'", lambda: Calibrator(1, "int8/head", "mse", percentile=99)),
        (RangeError, "percentile: expected percent above 0", lambda: Calibrator(1, "int8/head", "percentile", percentile=0)),
        (RangeError, "percentile: expected percent", lambda: Calibrator(1, "int8/head", "percentile", percentile=float("nan"))),
        (DTypeError, "percentile: expected a number", lambda: Calibrator(1, "int8/head", "percentile", percentile="99")),
        (RangeError, "num_layers: expected at least 1, got 0", lambda: Calibrator(0, "int8/head")),
        (DTypeError, "num_layers: expected an int, got True", lambda: Calibrator(True, "int8/head")),
    ],
)
def test_wrong_calibrators_are_refused(error, message, make):
    with pytest.raises(error, match=message):
        make()


def test_wrong_batches_are_refused_and_change_nothing():
    x = numbers(4, HEADS, DIM)
    calibrator = Calibrator(2, "int8/head")
    calibrator.update(0, x, x)
    before = calibrator.scales(0)[0].clone()
    big = 1000 * x
    cases = [
        (RangeError, r"layer: expected 0 to 1, got 2", lambda: calibrator.update(2, big, big)),
        (DTypeError, r"layer: expected an int, got '0'", lambda: calibrator.update("0", big, big)),
        (DTypeError, r"v: expected a torch.Tensor, got NoneType", lambda: calibrator.update(0, big, None)),
        (DTypeError, r"k: expected floating point numbers, got torch.int64", lambda: calibrator.update(0, big.long(), big)),
        (ShapeError, r"v: expected the tokens and heads of k, \[4, 3\], got \[3, 3\]", lambda: calibrator.update(0, big, big[:3])),
        (
            ShapeError,
            r"k: earlier batches of layer 0 have 3 heads of 16, got 2 of 16",
            lambda: calibrator.update(0, big[:, :2], big[:, :2]),
        ),
        (ShapeError, r"v: earlier batches of layer 0", lambda: calibrator.update(0, big, big[..., :8])),
        (
            ShapeError,
            r"k: layout 'nhd' needs \[\.\.\., num_kv_heads, head_dim\], got shape \[16\]",
            lambda: calibrator.update(0, big[0, 0], big[0, 0]),
        ),
        (ShapeError, r"k: layout 'hnd' needs", lambda: calibrator.update(0, big[0], big[0], layout="hnd")),
        (ShapeError, r"k: expected at least one head", lambda: calibrator.update(1, big[:, :0], big[:, :0])),
        (UnsupportedError, r"layout: expected 'nhd' or 'hnd', got 'bhsd'", lambda: calibrator.update(0, big, big, layout="bhsd")),
        (
            ShapeError,
            r"mask: expected the tokens of k and v, \[4\], got \[4, 1\]",
            lambda: calibrator.update(0, big, big, mask=torch.ones(4, 1)),
        ),
        (DTypeError, r"mask: expected a torch.Tensor, got list", lambda: calibrator.update(0, big, big, mask=[1, 1, 1, 1])),
        (RangeError, r"layer: no tokens of layer 1 were observed", lambda: calibrator.scales(1)),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()
    assert torch.equal(calibrator.scales(0)[0], before) and calibrator.layers == [0]


def test_a_layer_of_which_nothing_finite_was_seen_is_named():
    calibrator = Calibrator(1, "int8/head")
    calibrator.update(0, torch.ones(2, 1, 16), torch.full((2, 1, 16), torch.nan))
    with pytest.raises(RangeError, match="no finite number of V of layer 0"):
        calibrator.scales(0)
