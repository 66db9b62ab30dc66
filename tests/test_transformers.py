"""Models of transformers on tkv's pages compute what they compute with their own attention. Small random models, float32."""

import copy
import doctest
import importlib

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="4.57")

import tkv  # noqa: E402
from tkv.integrations.transformers import TkvCache, use_tkv  # noqa: E402
from tkv.integrations.transformers.layout import Columns  # noqa: E402

transformers.logging.set_verbosity_error()

SIZES = dict(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    initializer_range=0.3, bos_token_id=None, eos_token_id=None, pad_token_id=0, attn_implementation="eager",
)  # fmt: skip
# Windows of 5 in every layer, or in every other one.
MODELS = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(head_dim=24)),
    "mistral": ("Mistral", dict(sliding_window=5, head_dim=32)),
    "gemma2": ("Gemma2", dict(sliding_window=5, head_dim=256, query_pre_attn_scalar=64, attn_logit_softcapping=3.0)),
    "gemma3": ("Gemma3", dict(sliding_window=5, head_dim=32, sliding_window_pattern=2)),
    "gpt_oss": ("GptOss", dict(sliding_window=5, head_dim=16, num_local_experts=2, num_experts_per_tok=1)),
    "phi3": ("Phi3", dict(sliding_window=5)),
}
PAGE_SIZE = 4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# What outputs and arguments call the cache.
CACHE = "cache" if tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (5, 24) else "past_key_values"


def build(kind, seed=0, **changes):
    name, own = MODELS[kind]
    config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForCausalLM")(config(**{**SIZES, **own, **changes})).eval().requires_grad_(False)
        for parameter_name, parameter in model.named_parameters():
            if "sinks" in parameter_name:
                # Zeros as initialised, which hide much.
                parameter.normal_(1.0, 1.0)
    model.generation_config.eos_token_id = None
    return model.to(DEVICE)


@pytest.fixture(scope="module")
def models():
    """Built once each: every test leaves its model as it was."""
    built = {}
    return lambda kind: built.setdefault(kind, build(kind))


def prompts(batch, length, seed=1):
    return torch.randint(1, 97, (batch, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def padded(lengths, columns, side):
    mask = torch.ones(len(lengths), columns, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, slice(0, columns - length) if side == "left" else slice(length, columns)] = 0
    return mask.to(DEVICE)


def generate(model, ids, mask=None, tokens=6, seed=7, **options):
    options = {**dict(max_new_tokens=tokens, do_sample=False, return_dict_in_generate=True, output_logits=True), **options}
    torch.manual_seed(seed)
    return model.generate(ids, attention_mask=mask, **options)


def forward(model, ids, cache=None, **kwargs):
    """The logits and the cache, whatever the latter is called in this version."""
    out = model(ids, **({CACHE: cache} if cache is not None else {}), **kwargs)
    return out.logits, out[CACHE] if CACHE in out else None


def assert_close(ours, theirs):
    bound = 5e-5 * float(theirs.abs().max())
    assert float((ours - theirs).abs().max()) <= bound


def assert_generates_the_same(model, *args, **kwargs):
    """Tokens, and the logits of each step; returns our output."""
    theirs = generate(model, *args, **kwargs)
    with use_tkv(model, page_size=PAGE_SIZE):
        ours = generate(model, *args, **kwargs)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    for step, expected in zip(ours.logits, theirs.logits, strict=True):
        assert_close(step, expected)
    return ours


@pytest.mark.parametrize("kind", MODELS)
def test_a_batch_padded_on_the_left_generates_the_same_tokens(models, kind):
    mask = padded([11, 7, 2], 11, "left")
    ours = assert_generates_the_same(models(kind), prompts(3, 11), mask)
    assert isinstance(ours[CACHE], TkvCache)
    assert ours[CACHE].length == 16


def test_a_batch_padded_on_the_right_generates_the_same_tokens(models):
    assert_generates_the_same(models("llama"), prompts(3, 11), padded([11, 7, 2], 11, "right"))


def test_right_padding_is_served_while_a_window_sees_both_sides_of_it(models):
    model = build("mistral", sliding_window=16)
    mask = padded([9, 4], 9, "right")
    assert_generates_the_same(model, prompts(2, 9), mask, tokens=4)


def test_samples_are_the_same_with_the_same_seed(models):
    assert_generates_the_same(
        models("llama"), prompts(1, 6), tokens=5, do_sample=True, num_return_sequences=3, temperature=1.5, top_k=20
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_beam_search_follows_the_same_beams(models, kind):
    mask = padded([6, 3], 6, "left")
    assert_generates_the_same(models(kind), prompts(2, 6), mask, tokens=5, num_beams=2, num_return_sequences=2)


@pytest.mark.skipif(transformers.__version__.startswith("5.0."), reason="its prefill_chunk_size asks for a cache that it did not make")
@pytest.mark.parametrize("kind,side,chunk", [("llama", "right", 4), ("mistral", "left", 3), ("gpt_oss", "left", 1)])
def test_a_prompt_in_chunks_generates_the_same_tokens(models, kind, side, chunk):
    assert_generates_the_same(models(kind), prompts(2, 7), padded([7, 4], 7, side), tokens=2, prefill_chunk_size=chunk)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_conversation_goes_on_from_the_returned_cache(models, kind):
    model, first, more = models(kind), prompts(2, 7), prompts(2, 3, seed=2)
    mask = padded([7, 5], 7, "left")

    def talk():
        before = generate(model, first, mask, tokens=4)
        ids = torch.cat([before.sequences, more], 1)
        return generate(model, ids, torch.cat([mask, mask.new_ones(2, 7)], 1), tokens=3, **{CACHE: before[CACHE]})

    theirs = talk()
    with use_tkv(model, page_size=PAGE_SIZE):
        ours = talk()
    assert ours.sequences.tolist() == theirs.sequences.tolist()


def test_calls_of_generate_do_not_disturb_each_other(models):
    model, long, short = models("llama"), prompts(1, 9), prompts(2, 3, seed=3)
    expected = [generate(model, ids, tokens=3).sequences.tolist() for ids in (long, short, long)]
    with use_tkv(model, page_size=PAGE_SIZE):
        assert [generate(model, ids, tokens=3).sequences.tolist() for ids in (long, short, long)] == expected


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_without_a_cache_the_whole_sequence_is_computed_each_time(models, kind):
    assert_generates_the_same(models(kind), prompts(2, 8), padded([8, 5], 8, "left"), tokens=2, use_cache=False)
    model = models(kind)
    expected, _ = forward(model, prompts(2, 8), use_cache=False)
    with use_tkv(model, page_size=PAGE_SIZE, format="int4/token_head"):
        ours, cache = forward(model, prompts(2, 8), use_cache=False)
    assert_close(ours, expected)
    assert cache is None or not isinstance(cache, TkvCache)


def test_an_assistant_drafts_and_what_is_rejected_is_taken_back(models):
    for kind in ("llama", "mistral"):
        model, assistant, ids = models(kind), build(kind), prompts(1, 6)
        for parameter in assistant.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)).to(DEVICE))
        expected = model.generate(ids, max_new_tokens=10, do_sample=False)
        with use_tkv(model, page_size=PAGE_SIZE), use_tkv(assistant, page_size=PAGE_SIZE):
            ours = model.generate(ids, assistant_model=assistant, max_new_tokens=10, do_sample=False)
        assert ours.tolist() == expected.tolist()


def test_a_cache_can_be_copied_and_both_go_on(models):
    model, start, ends = models("llama"), prompts(1, 6), [prompts(1, 2, seed=8), prompts(1, 2, seed=9)]
    expected = [forward(model, torch.cat([start, end], 1))[0][:, 6:] for end in ends]
    with use_tkv(model, page_size=PAGE_SIZE):
        _, cache = forward(model, start)
        copied = copy.deepcopy(cache)
        for end, logits, own in zip(ends, expected, (cache, copied)):
            assert_close(forward(model, end, own)[0], logits)


def test_a_model_in_bfloat16_is_cached_in_bfloat16(models):
    model = copy.deepcopy(models("llama")).bfloat16()
    expected = generate(models("llama"), prompts(1, 6), tokens=1).logits[0]
    with use_tkv(model, page_size=PAGE_SIZE):
        ours = generate(model, prompts(1, 6), tokens=1)
    assert all(str(layer.kv.k_format) == "bf16" for layer in ours[CACHE].layers)
    # bf16 has 8 bits; a handful of roundings on the way.
    assert float((ours.logits[0].float() - expected).abs().max()) < 0.03 * float(expected.abs().max())


def test_the_model_is_as_it_was_when_tkv_is_gone(models):
    model = models("llama")
    expected, _ = forward(model, prompts(1, 5))
    before = set(model.__dict__)
    first = use_tkv(model, page_size=PAGE_SIZE)
    second = use_tkv(model, page_size=2, format="fp32")
    assert second.new_cache().settings.page_size == 2
    first.restore()
    assert model.config._attn_implementation == "tkv", "the second call is the one that holds"
    second.restore()
    second.restore()
    assert model.config._attn_implementation == "eager" and set(model.__dict__) == before
    assert not model.model._forward_pre_hooks and not model.model._forward_hooks
    assert torch.equal(forward(model, prompts(1, 5))[0], expected)


def test_a_compiled_model_computes_the_same(models):
    model = models("gemma3")
    expected, _ = forward(model, prompts(2, 7))
    with use_tkv(model, page_size=PAGE_SIZE):
        ours = torch.compile(model, backend="eager")(prompts(2, 7)).logits
    torch.compiler.reset()
    assert_close(ours, expected)


def test_the_host_works_once_a_step_and_reads_padding_once_a_prompt(models, monkeypatch):
    steps, reads = [], []
    step, add = tkv.CacheManager.step, Columns.add
    monkeypatch.setattr(tkv.CacheManager, "step", lambda self, *args, **kwargs: (steps.append(1), step(self, *args, **kwargs))[1])
    monkeypatch.setattr(Columns, "add", lambda self, q_len, mask: (reads.append(mask is not None), add(self, q_len, mask))[1])
    with use_tkv(models("llama"), page_size=PAGE_SIZE):
        generate(models("llama"), prompts(2, 5), padded([5, 3], 5, "left"), tokens=6)
    assert len(steps) == 6, "a prompt and five tokens, whatever the number of layers"
    assert reads == [True] + [False] * 5


def test_smollm2_says_the_same_with_its_real_weights():
    from tkv.demo.model import find_gguf, load_model, load_tokenizer

    path, reason = find_gguf()
    if path is None:
        pytest.skip(reason)
    model = load_model(path, torch.float32, torch.device(DEVICE))
    model.generation_config.pad_token_id = 0
    ids = torch.tensor([load_tokenizer(path).encode("The capital of France is")], device=DEVICE)
    assert_generates_the_same(model, ids, tokens=2)


def test_padding_of_other_passes_is_read_while_the_model_generates(models):
    """By hand from within generate, as from another thread."""
    model, other, mask = models("llama"), prompts(2, 8, seed=3), padded([8, 5], 8, "right")

    def by_hand():
        _, cache = forward(model, other[:, :6], attention_mask=mask[:, :6])
        return forward(model, other[:, 6:], cache, attention_mask=mask)[0]

    expected, seen = by_hand(), []
    with use_tkv(model, page_size=PAGE_SIZE):
        generate(model, prompts(1, 3), tokens=2, logits_processor=[lambda ids, logits: (seen.append(by_hand()), logits)[1]])
    assert_close(seen[-1], expected)


def test_a_returned_cache_reads_padding_again_after_generate(models):
    model, more, mask = models("llama"), prompts(2, 4, seed=2), padded([7, 5], 7, "left")
    chunk = torch.cat([mask, mask.new_ones(2, 3), padded([4, 2], 4, "left")], 1)

    def talk():
        before = generate(model, prompts(2, 7), mask, tokens=4)
        return forward(model, more, before[CACHE], attention_mask=chunk)[0][:, -1]

    expected = talk()
    with use_tkv(model, page_size=PAGE_SIZE):
        assert_close(talk(), expected)


def test_a_decoder_serves_the_model_that_asked_last(models):
    model, ids = models("llama"), prompts(1, 5)
    expected, _ = forward(model, ids)
    outer = use_tkv(model, page_size=PAGE_SIZE)
    inner = use_tkv(model.model, page_size=PAGE_SIZE)
    assert_close(forward(model, ids)[0], expected)
    outer.restore()
    assert model.config._attn_implementation == "tkv"
    inner.restore()
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("module", ["cache", "model"])
def test_examples_in_the_documentation_run(module):
    result = doctest.testmod(importlib.import_module(f"tkv.integrations.transformers.{module}"))
    assert result.attempted and not result.failed


def test_a_copy_of_a_model_uses_tkv_by_itself(models):
    model, ids = models("llama"), prompts(1, 6)
    negated = copy.deepcopy(model)
    negated.lm_head.weight.neg_()
    expected = [generate(each, ids, tokens=3).sequences.tolist() for each in (model, negated)]
    with use_tkv(model, page_size=PAGE_SIZE):
        copied = copy.deepcopy(model)
    copied.lm_head.weight.neg_()
    assert copied.config._attn_implementation == "tkv"
    assert [generate(each, ids, tokens=3).sequences.tolist() for each in (model, copied)] == expected


def test_generate_of_the_class_works_as_that_of_the_model(models):
    model, ids, mask = models("llama"), prompts(2, 6), padded([6, 4], 6, "left")
    expected = generate(model, ids, mask, tokens=3).sequences.tolist()
    with use_tkv(model, page_size=PAGE_SIZE):
        ours = type(model).generate(model, ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert ours.tolist() == expected


def test_a_model_around_the_decoder_generates_on_a_cache_that_it_is_given(models):
    model, ids, mask = models("llama"), prompts(2, 6), padded([6, 4], 6, "left")
    expected = generate(model, ids, mask, tokens=3).sequences.tolist()
    with use_tkv(model.model, page_size=PAGE_SIZE) as used:
        ours = generate(model, ids, mask, tokens=3, **{CACHE: used.new_cache()})
    assert ours.sequences.tolist() == expected
