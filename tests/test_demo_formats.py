"""The demo of formats, on a tiny random Llama: attention to what a cache gives back, the plot, goals and exit statuses."""

import math
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the demo's packages are not installed: pip install 'tkv[demo]'")

import tkv  # noqa: E402
from tkv.demo import DemoError, decode, formats, model  # noqa: E402
from tkv.demo.formats import KIVI, Checked, Measured, goals_of  # noqa: E402
from tkv.demo.formats_plot import Point, best, draw_plot, spread  # noqa: E402
from tkv.demo.page_map import check_png  # noqa: E402
from tkv.demo.through_cache import CachedModel, Scheme, attend, by_folded_pages, few_programs, old_keys  # noqa: E402
from tkv.formats import supported_formats  # noqa: E402

SIZES = dict(vocab_size=256, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture
def llama(device):
    return model.random_llama(**SIZES).requires_grad_(False).to(device)


@pytest.fixture
def ids(device):
    return torch.randint(256, (2, 96), generator=torch.Generator().manual_seed(1)).to(device)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def logits(llama, hidden):
    return llama.lm_head(hidden)


@pytest.mark.parametrize(
    "scheme", [Scheme("fp32", "fp32"), Scheme("fp32", "fp32", newest=3), Scheme("int4/page_channel", "fp32", newest=96)]
)
def test_a_cache_that_changes_no_number_gives_the_models_own_logits(llama, ids, scheme):
    hidden = CachedModel(llama, scheme, *ids.shape).by_torch(ids)
    own = torch.stack([decode.own_logits(llama, tuple(row.tolist())) for row in ids])
    torch.testing.assert_close(logits(llama, hidden), own, atol=1e-4, rtol=0)
    assert llama.config._attn_implementation == "sdpa"


def test_old_keys_are_those_of_whole_pages_without_any_of_the_newest():
    for newest in (1, 5, 32, 40):
        old = old_keys(100, newest)
        for query in range(100):
            native = min(key for key in range(query + 1) if not old[query, key])
            assert native % 32 == 0 and old[query].sum() == native
            # A page more would take one of the newest tokens with it.
            assert query + 1 - native >= min(newest, query + 1) and query + 1 - (native + 32) < newest


def test_attention_takes_old_keys_from_the_cache_and_the_others_as_they_were_made():
    tokens, newest = 70, 9
    q, k, v, read_k, read_v = (numbers(2, tokens, heads, 16, seed=seed) for seed, heads in enumerate((4, 2, 2, 2, 2)))
    out = attend(q, (read_k, read_v), (k, v), old_keys(tokens, newest), scale=0.3)
    for query in (0, 8, 39, 40, 41, 69):
        count = max(0, (query + 1 - newest) // 32 * 32)
        keys = torch.cat([read_k[:, :count], k[:, count : query + 1]], 1).repeat_interleave(2, dim=2).double()
        values = torch.cat([read_v[:, :count], v[:, count : query + 1]], 1).repeat_interleave(2, dim=2).double()
        p = (0.3 * torch.einsum("bhd,bjhd->bhj", q[:, query].double(), keys)).softmax(-1)
        torch.testing.assert_close(out[:, query].double(), torch.einsum("bhj,bjhd->bhd", p, values), atol=1e-5, rtol=0)
    assert (attend(q, (read_k, read_v), (k, v), None, 0.3) - out)[:, 50:].abs().max() > 0.1


def test_folded_pages_hold_the_numbers_of_pages(device):
    k, v = (numbers(2, 64, 3, 64, seed=seed).to(device) for seed in (3, 4))
    pages = torch.arange(4, device=device)
    native = tkv.KVCache(k.view(4, 32, 3, 64), v.view(4, 32, 3, 64))
    cache = tkv.KVCache.empty(4, 32, 3, 64, ("int4/page_channel", "fp32"), device=device)
    tkv.quantize_pages(native, cache, pages, pages)
    expected = tkv.gather_window(cache, pages.view(2, 2), torch.tensor([64, 64], device=device), window=None, dense=True)[0]
    # Three pages are side by side, and two of the second row's are empty.
    assert torch.equal(by_folded_pages(k, "int4/page_channel"), expected)
    assert 1e-2 < (expected - k).abs().max() < 0.5


def test_few_programs_write_and_read_the_same(device):
    k, v = (numbers(70, 2, 64, seed=seed).to(device) for seed in (5, 6))
    slots = torch.randperm(96, generator=torch.Generator().manual_seed(7))[:70].to(device)

    def through(format):
        cache = tkv.KVCache.empty(3, 32, 2, 64, format, device=device)
        for tensor in (cache.k, cache.v, cache.k_scale, cache.v_scale):
            tensor.zero_()
        tkv.write_kv(k, v, cache, slots)
        table, lens = torch.tensor([[2, 0, 1]], device=device), torch.tensor([96], device=device)
        return [cache.k, cache.v_scale, *tkv.gather_window(cache, table, lens, window=None)[:2]]

    for format in ("int8/group32", "int4/token_head"):
        expected = through(format)
        with few_programs():
            got = through(format)
        assert all(torch.equal(a, b) for a, b in zip(got, expected)) and expected[2].abs().max() > 1


@pytest.mark.parametrize(
    "scheme", [Scheme("int8/token_head", "int8/token_head"), Scheme(*KIVI, newest=1), Scheme("fp32", "fp32", newest=2)]
)
def test_kernels_on_the_same_pages_give_the_same_logits(llama, ids, scheme):
    cached = CachedModel(llama, scheme, 2, 40, keeps=True)
    expected = logits(llama, cached.by_torch(ids[:, :40]))
    before = [(cache.k.clone(), cache.v.clone()) for cache in cached.stored]
    got = logits(llama, cached.by_kernels(ids[:, :40]))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    bits = torch.uint8
    assert all(
        torch.equal(a.view(bits), b.view(bits)) for cache, kept in zip(cached.stored, before) for a, b in zip((cache.k, cache.v), kept)
    )
    own = torch.stack([decode.own_logits(llama, tuple(row.tolist())) for row in ids[:, :40]])
    assert (got - own).abs().max() > 1e-3 or scheme.k == "fp32"


def test_bytes_of_a_token_are_those_of_the_caches(llama):
    for scheme in (Scheme("fp8_e5m2/head", "fp8_e5m2/head"), Scheme(*KIVI)):
        cached = CachedModel(llama, scheme, 1, 32)
        assert scheme.bytes_per_token(llama.config) == sum(cache.bytes_per_token for cache in cached.stored)
    assert Scheme(*KIVI).bytes_per_token(llama.config) == 2 * 2 * (16 + 4 + 16 + 4)


def test_every_format_is_measured():
    for dtype in ("fp32", "bf16"):
        found = formats.schemes(dtype)
        assert len(set(found)) == len(found) and len({scheme.name for scheme in found}) == len(found)
        assert {"fp32", dtype} | {kind for scheme in found for kind in (scheme.k, scheme.v)} == set(supported_formats())
    assert {scheme.scales for scheme in found if scheme.k.startswith("fp8_e4m3/t")} == {"1.0", "calibrated", ""}


LOSSES = torch.tensor([[1.0, 2.0, 3.0], [2.0, 5.0, 2.0]], dtype=torch.float64)
OWN = Measured(Scheme("fp32", "fp32"), LOSSES, 100.0, "a model")


def seen(scheme, first, second):
    """A scheme whose perplexities exceed those of OWN by so many percent."""
    more = torch.tensor([[first], [second]], dtype=torch.float64).div(100).log1p()
    return Measured(scheme, LOSSES + more, 50.0, "a model")


def test_goals_are_over_both_texts():
    measured = [
        seen(Scheme("fp8_e4m3/token_head", "fp8_e4m3/token_head"), 1.6, 1.3),
        seen(Scheme("int8/token_head", "int8/token_head"), 0.4, 0.7),
        seen(Scheme("int8/group32", "int8/group32"), -0.1, 0.2),
        seen(Scheme("int4/token_head", "int4/token_head"), 4.0, 6.0),
        seen(Scheme("int4/token_head", "int4/token_head", newest=128), -1.0, -1.0),
        seen(Scheme(*KIVI, newest=128), 2.0, 2.9),
        seen(Scheme(*KIVI), 2.5, 2.6),
    ]
    assert [goal.reached for goal in goals_of(measured, OWN)] == [True, False, True, True, False, False]
    assert goals_of(measured, OWN)[1].seen == "+0.55 % (+0.40, +0.70)"
    assert measured[0].perplexities[:2] == pytest.approx([math.exp(2) * 1.016, math.exp(3) * 1.013])
    assert measured[0].perplexities[2] == pytest.approx(math.exp(2.5) * math.sqrt(1.016 * 1.013))


def test_the_error_of_an_excess_is_that_of_a_mean_of_differences():
    noise = torch.tensor([[0.1, -0.1, 0.1], [-0.1, 0.1, -0.1]], dtype=torch.float64)
    result = Measured(Scheme("fp16", "fp16"), LOSSES + 0.02 + noise, 50.0, "a model")
    # Standard deviation of six numbers +-0.1, with five degrees of freedom, over the root of six.
    assert result.error(OWN) == pytest.approx(100 * 0.1 * math.sqrt(6 / 5) / math.sqrt(6))
    assert result.excess(OWN)[-1] == pytest.approx(100 * math.expm1(0.02))


def test_a_difference_that_rounding_does_not_explain_is_told():
    result = Checked(Scheme(*KIVI, newest=1), difference=0.004, largest=30.0, same_choices=40, positions=40)
    assert not result.agrees("fp32") and result.agrees("bf16")
    assert replace(result, difference=0.002).agrees("fp32")
    assert not replace(result, difference=math.nan).agrees("bf16")


def test_calibration_is_on_other_text():
    texts, calibration = formats.read_texts(model.load_tokenizer(None))
    assert [len(text) for text in texts] == [formats.TOKENS] * 2 and formats.TOKENS % 32 == 0
    assert not {bytes(text)[:40] for text in texts} & {bytes(text)[:40] for text in calibration}
    assert bytes(texts[0]).startswith(b"A Python program") and bytes(texts[1]).startswith(b'"""Text wrapping')


@pytest.fixture
def small_scenario(monkeypatch, tmp_path):
    """The scenario on a tiny model, few formats and short texts, in an empty folder."""
    monkeypatch.setattr(formats, "find_gguf", lambda: (None, "there is none"))
    monkeypatch.setattr(formats, "load_model", lambda path, dtype, device: model.random_llama(**SIZES).to(device, dtype))
    kept = ["fp16", "fp8_e4m3/tensor", "int8/channel", "int4/token_head"]
    chosen = [scheme for scheme in formats.schemes("fp32") if scheme.k in kept] + [Scheme(*KIVI, newest=20)]
    monkeypatch.setattr(formats, "schemes", lambda dtype: chosen)
    for name, value in dict(TOKENS=64, CALIBRATION_TOKENS=48, CHECKED_TOKENS=34, CHECKED=(Scheme(*KIVI, newest=1),)).items():
        monkeypatch.setattr(formats, name, value)
    monkeypatch.chdir(tmp_path)
    for cached in (formats._model, formats._observed):
        cached.cache_clear()
    yield tmp_path
    for cached in (formats._model, formats._observed):
        cached.cache_clear()


def test_scenario_with_a_random_model(small_scenario, capsys):
    pytest.importorskip("matplotlib")
    assert formats.run("fp32", workers=1) == 0
    out, err = capsys.readouterr()
    assert "NO PRETRAINED MODEL: there is none" in out and "Goals" not in out
    rows = re.findall(r"^(\S.*?)  +([\d,]+)  +(\d+\.\d+)  +(\d+\.\d+)  +(\d+\.\d+)  +([-+]\d+\.\d+) %  +\d+\.\d+$", out, re.M)
    assert len(rows) == 7 and rows[0][0] == "fp16" and {row[0] for row in rows} >= {"fp8_e4m3/tensor (1.0)", "int4/token_head"}
    sizes = [int(row[1].replace(",", "")) for row in rows]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 2 * 2 * 2 * 32 * 2
    assert "int4/page_channel + int4/group32, newest 20 native" in out and "33 of 33" in out
    assert re.search(r"^unquantised, own attention +1,024 ", out, re.M)
    assert f"As a picture: {small_scenario / 'tkv-formats.png'}" in out
    assert (small_scenario / "tkv-formats.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert "int8/channel (calibrated): calibrating" in err and "own attention: likelihoods" in err


def test_logits_that_differ_fail_the_scenario(small_scenario, capsys, monkeypatch):
    by_kernels = CachedModel.by_kernels
    monkeypatch.setattr(CachedModel, "by_kernels", lambda self, ids: by_kernels(self, ids) * 1.01)
    monkeypatch.setattr(formats, "schemes", lambda dtype: [Scheme("fp16", "fp16")])
    assert formats.run("fp32", workers=1, out=small_scenario / "other.png") == 1
    assert "by more than rounding explains: int4/page_channel + int4/group32, newest 1 native" in capsys.readouterr().out


def test_without_matplotlib_there_is_the_table(small_scenario, capsys, monkeypatch):
    find_spec = formats.importlib.util.find_spec
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    monkeypatch.setattr(formats, "schemes", lambda dtype: [Scheme("fp16", "fp16")])
    monkeypatch.setattr(formats, "CHECKED", ())
    assert formats.run("fp32", workers=1) == 0
    out = capsys.readouterr().out
    assert "matplotlib is not installed" in out and "pip install 'tkv[demo]'" in out and not list(small_scenario.iterdir())


def test_paths_of_plots_are_refused_before_the_work(small_scenario, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(formats, "find_gguf", lambda: pytest.fail("the work has begun"))
    (small_scenario / "folder.png").mkdir()
    for path in (small_scenario / "none" / "plot.png", small_scenario / "folder.png"):
        with pytest.raises(DemoError, match="name another file with --out"):
            formats.run("fp32", out=path)
    with pytest.raises(DemoError, match=r"ends in \.png"):
        check_png(small_scenario / "plot.svg", "plot")
    check_png(small_scenario / "new.png", "plot")
    assert not (small_scenario / "new.png").exists()


POINTS = [
    Point("bf16", "bf16", 2048, 0.01, 10.001),
    Point("int8/head", "int8", 1024, 0.2, 10.02),
    Point("fp8_e4m3/head", "fp8_e4m3", 1024, 0.2, 10.02),
    Point("int4/token_head", "int4", 600, 20.0, 12.0),
    Point("int4/token_head", "int4", 600, -0.05, 9.995, newest=128),
]


def test_the_plot_has_a_colour_for_each_kind_of_number(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    from tkv.demo.formats_plot import STYLES

    path = tmp_path / "plot.png"

    def pixels(kind):
        return ((torch.from_numpy(imread(path)[..., :3]) - torch.tensor(to_rgb(STYLES[kind][0]))).abs().amax(-1) < 0.01).sum().item()

    draw_plot(POINTS, "a title", "of what", path)
    assert min(pixels(kind) for kind in ("native", "int8", "fp8_e4m3", "int4")) > 100
    assert pixels("fp8_e5m2") < 20
    with pytest.raises(DemoError, match="cannot be written"):
        draw_plot(POINTS, "a title", "of what", tmp_path / "none" / "plot.png")


def test_labels_keep_their_distance_and_order():
    heights = [0.0, 0.0, 0.01, 0.5, 0.98, 0.99, 1.0]
    placed = spread(heights, 0.04)
    assert all(b - a >= 0.04 - 1e-9 for a, b in pairwise(placed)) and placed[-1] <= 1.0
    assert placed[3] == pytest.approx(0.5, abs=0.04)


def test_the_best_are_those_that_none_beats():
    assert [point.name for point in best(POINTS[:4])] == ["int4/token_head", "int8/head", "bf16"]
