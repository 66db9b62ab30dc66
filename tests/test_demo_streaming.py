"""The demo of streaming, on a tiny random Llama: attention at positions inside the cache, flat memory, tables and exit statuses."""

import re

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the demo's packages are not installed: pip install 'tkv[demo]'")

import tkv  # noqa: E402
from tkv.demo import DemoError, decode, model, streaming  # noqa: E402
from tkv.demo.gathered import attend, rope_of, scores_of, streaming_attention  # noqa: E402
from tkv.demo.streaming import Decoded, Read, Scheme, chunk_ends  # noqa: E402
from tkv.demo.streaming_plot import STYLES, Curve, draw_curves  # noqa: E402
from tkv.demo.windowed import StreamingModel  # noqa: E402

SIZES = dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture
def llama(device):
    return model.random_llama(**SIZES).requires_grad_(False).to(device)


@pytest.fixture
def ids(device):
    return torch.randint(256, (150,), generator=torch.Generator().manual_seed(1)).to(device)


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_chunks(cached, ids, size, by="by_torch"):
    return torch.cat([getattr(cached, by)(cached.step(chunk), chunk) for chunk in ids.split(size)])


def test_attention_from_scores_is_softmax_over_what_is_visible():
    q, k, v = numbers(2, 3, 4, 16), numbers(2, 9, 2, 16, seed=1), numbers(2, 9, 2, 24, seed=2)
    visible = numbers(2, 3, 9, seed=3) > 0
    visible[..., 4] = True
    out, lse = attend(scores_of(q, k, None), v, visible)
    assert out.shape == (2, 3, 4, 24) and lse.shape == (2, 3, 4)
    for seq, row, head in ((0, 0, 0), (1, 2, 3), (0, 1, 2)):
        seen = visible[seq, row]
        x = k[seq, seen, head // 2].double() @ q[seq, row, head].double() / 4
        torch.testing.assert_close(lse[seq, row, head].double(), x.logsumexp(0), atol=1e-5, rtol=0)
        torch.testing.assert_close(out[seq, row, head].double(), x.softmax(0) @ v[seq, seen, head // 2].double(), atol=1e-5, rtol=0)


def test_positions_are_places_in_the_cache():
    sinks, window, first, count = 3, 7, 20, 6
    rope = tkv.Rope.of(64, 16, theta=50.0)
    q, k, v = (numbers(1, rows, heads, 16, seed=heads) for rows, heads in ((count, 4), (26, 2), (26, 1)))
    v = v.expand(-1, -1, 2, -1)
    for begin in (first, 0, 4):
        rows = torch.arange(begin, begin + count)
        # What is gathered: sink tokens, the windows of all queries, and a row of nothing.
        held = [j for j in range(begin + count) if j < sinks or j > begin - window]
        keys = torch.tensor([[*held, -1]])
        out = streaming_attention(q, k[:, keys[0]], v[:, keys[0]], rows[None], keys, rope, window, sinks)
        for i, p in enumerate(rows.tolist()):
            cached = [j for j in range(p + 1) if j < sinks or p - j < window]
            places = torch.arange(len(cached))
            turned_k = tkv.reference.rotate(k[0, cached], places, rope)
            turned_q = tkv.reference.rotate(q[0, i], torch.tensor(len(cached) - 1), rope)
            for head in range(4):
                p_of = (turned_k[:, head // 2] @ turned_q[head] / 4).softmax(0)
                torch.testing.assert_close(out[0, i, head].double(), p_of @ v[0, cached, head // 2].double(), atol=1e-5, rtol=0)


def test_the_tables_are_those_of_the_model(llama):
    rope = rope_of(llama, 40)
    expected = tkv.Rope.of(40, 16, theta=llama.config.rope_parameters["rope_theta"], device=llama.device)
    torch.testing.assert_close(rope.cos, expected.cos, atol=1e-5, rtol=0)
    torch.testing.assert_close(rope.sin, expected.sin, atol=1e-5, rtol=0)


@pytest.mark.parametrize("chunk", [37, 128])
def test_a_window_as_long_as_the_text_gives_the_models_own_logits(llama, ids, chunk):
    hidden = by_chunks(StreamingModel(llama, 200, 4, 128), ids, chunk)
    torch.testing.assert_close(llama.lm_head(hidden), decode.own_logits(llama, tuple(ids.tolist())), atol=1e-4, rtol=0)


def test_a_window_without_sinks_is_a_band_of_the_models_own_attention(llama, ids):
    order = torch.arange(len(ids), device=ids.device)
    distance = order[:, None] - order
    band = ((distance >= 0) & (distance < 20))[None, None]
    expected = llama(input_ids=ids[None], attention_mask=band, use_cache=False).logits[0]
    hidden = by_chunks(StreamingModel(llama, 20, 0, 128), ids, 48)
    torch.testing.assert_close(llama.lm_head(hidden), expected, atol=1e-4, rtol=0)


def test_chunks_do_not_matter_and_the_kernel_computes_the_same(llama, ids):
    expected = by_chunks(StreamingModel(llama, 21, 4, 128), ids[:80], 80)
    pieces = by_chunks(StreamingModel(llama, 21, 4, 128), ids[:80], 13)
    torch.testing.assert_close(pieces, expected, atol=1e-4, rtol=0)
    kernels = by_chunks(StreamingModel(llama, 21, 4, 128), ids[:80], 16, "by_kernels")
    torch.testing.assert_close(kernels, expected, atol=1e-4, rtol=0)
    # Sinks and the window both count.
    assert (by_chunks(StreamingModel(llama, 21, 0, 128), ids[:80], 80) - expected).abs().max() > 1e-2
    assert (by_chunks(StreamingModel(llama, 40, 4, 128), ids[:80], 80) - expected).abs().max() > 1e-2


def test_pages_stay_few_however_long_the_text_is(llama, ids):
    cached = StreamingModel(llama, 21, 4, 16)
    held = []
    for chunk in ids.split(16):
        cached.step(chunk)
        held.append(cached.pages_held)
    # A page of sinks, what 16 tokens and the window before them take, and one that ends in the middle.
    assert max(held) <= 1 + -(-(20 + 16) // 16) + 1 and len(ids) // 16 > 2 * max(held)


def test_perplexity_is_that_of_the_tokens_named():
    losses = torch.arange(1.0, 10.0).double()
    read = Read(Scheme("full cache"), losses, (), (), None, 1, "a model")
    # The token at position p has the p-th loss; position 0 has none.
    assert read.perplexity(0, 3) == pytest.approx(torch.tensor([1.0, 2.0]).mean().exp().item())
    assert read.perplexity(7, 10) == pytest.approx(torch.tensor(8.0).exp().item())
    assert read.perplexity(7, 11) is None
    assert chunk_ends(300) == [128, 256, 300] and chunk_ends(256) == [128, 256]


@pytest.fixture
def small_scenario(monkeypatch, tmp_path):
    """The scenario on a tiny model and a short text that is longer than its context, in an empty folder."""
    monkeypatch.setattr(streaming, "find_gguf", lambda: (None, "there is none"))
    sizes = {**SIZES, "max_position_embeddings": 200}
    monkeypatch.setattr(streaming, "load_model", lambda path, dtype, device: model.random_llama(**sizes).to(device, dtype))
    small = dict(TOKENS=240, STRETCH=100, BUDGET=40, CHUNK=48, GENERATED=4, DECODED=2)
    for name, value in small.items():
        monkeypatch.setattr(streaming, name, value)
    monkeypatch.chdir(tmp_path)
    streaming._model.cache_clear()
    yield tmp_path
    streaming._model.cache_clear()


def test_scenario_with_a_random_model(small_scenario, capsys):
    pytest.importorskip("matplotlib")
    assert streaming.run("fp32", workers=1) == 0
    out, err = capsys.readouterr()
    assert "NO PRETRAINED MODEL: there is none" in out
    rows = re.findall(r"^(\d+ to \d+|all up to \d+) +([\d.]+) +([\d.]+) +([\d.]+|-)$", out, re.M)
    assert [row[0] for row in rows] == ["1 to 100", "101 to 200", "201 to 240", "all up to 200"]
    assert [row[3] == "-" for row in rows] == [False, False, True, False]
    llama = model.random_llama(**SIZES, max_position_embeddings=200)
    ids = streaming.read_text(model.load_tokenizer(None))
    expected = torch.nn.functional.cross_entropy(decode.own_logits(llama, ids)[100 - 1 : 199], torch.tensor(ids[100:200])).exp()
    assert float(rows[1][3]) == pytest.approx(float(expected), abs=0.011)
    ratios = re.search(r"^of full cache's +([\d.]+) +([\d.]+) +1.000$", out, re.M)
    assert float(ratios[1]) == pytest.approx(float(rows[3][1]) / float(rows[3][3]), abs=2e-3) and ratios[1] != "1.000"
    assert "largest difference of a logit" in out and "same likeliest token 2 of 2: agrees" in out
    assert out.count("Likeliest next 4 tokens") == 2
    pages = re.findall(r"^ +(\d+|most) +(\d+) \(\S+ MiB\) +(\d+) \(\S+ MiB\) +(\d+) \(\S+ MiB\)$", out, re.M)
    assert [row[0] for row in pages] == ["100", "200", "240", "most"] and pages[-1][3] == "15" and int(pages[-1][1]) <= 8
    assert f"As a picture: {small_scenario / 'tkv-streaming.png'}" in out
    assert (small_scenario / "tkv-streaming.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert "full cache: 200 tokens at once" in err


def test_logits_that_differ_fail_the_scenario(small_scenario, capsys, monkeypatch):
    by_kernels = StreamingModel.by_kernels
    monkeypatch.setattr(StreamingModel, "by_kernels", lambda self, batch, ids: by_kernels(self, batch, ids) * 1.01)
    monkeypatch.setattr(streaming, "schemes", lambda: [Scheme("4 sinks + window of 20", 20, 4)])
    assert streaming.run("fp32", workers=1, out=small_scenario / "other.png") == 1
    assert "DOES NOT AGREE" in capsys.readouterr().out


def test_a_difference_is_measured_against_the_largest_logit():
    assert Decoded(1e-3, 20.0, 1, 1).agrees("fp32") and not Decoded(1e-3, 5.0, 1, 1).agrees("fp32")
    assert not Decoded(float("nan"), 20.0, 1, 1).agrees("fp32")


def test_paths_of_pictures_are_refused_before_the_work(small_scenario, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(streaming, "find_gguf", lambda: pytest.fail("the work has begun"))
    with pytest.raises(DemoError, match="name another file with --out"):
        streaming.run("fp32", out=small_scenario / "none" / "plot.png")


def test_the_picture_has_a_colour_for_each_curve(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    curves = [Curve(name, ((100, 20.0 + i), (200, 18.0 + 9 * i)), ((100, 5 + 8 * i), (200, 9 + 8 * i))) for i, name in enumerate("abc")]
    path = tmp_path / "picture.png"
    draw_curves(curves, "a title", path)
    image = torch.from_numpy(imread(path)[..., :3])
    for colour, _ in STYLES:
        assert ((image - torch.tensor(to_rgb(colour))).abs().amax(-1) < 0.01).sum() > 200
    with pytest.raises(DemoError, match="cannot be written"):
        draw_curves(curves, "a title", tmp_path / "none" / "picture.png")
