"""What is not served exactly is refused, with the reason."""

import importlib
import pickle
import re
import sys
from functools import partial

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="4.57")

from test_transformers import CACHE, DEVICE, SIZES, assert_close, build, forward, generate, models, prompts  # noqa: E402, F401

import tkv  # noqa: E402
from tkv import errors  # noqa: E402
from tkv.integrations.transformers import TkvCache, use_tkv  # noqa: E402

H2O = dict(policy=partial(tkv.policies.h2o, heavy=2, recent=2), budget=4)


def refused(match, error=errors.UnsupportedError):
    return pytest.raises(error, match=match)


@pytest.mark.parametrize(
    "options,error,match",
    [
        (dict(sinks=2), errors.UnsupportedError, "sinks: without a window"),
        (dict(window=0), errors.RangeError, "window"),
        (dict(page_size=0), errors.RangeError, "page_size"),
        (dict(page_size=2.0), errors.DTypeError, "page_size"),
        (dict(max_pages=0), errors.RangeError, "max_pages"),
        (dict(policy=H2O["policy"]), errors.UnsupportedError, "budget: expected with policy"),
        (dict(budget=4), errors.UnsupportedError, "budget: expected with policy"),
        (dict(policy="h2o", budget=4), errors.DTypeError, "policy: expected a function"),
        (dict(**H2O, window=9), errors.UnsupportedError, "policy: .* no common positions"),
        (dict(**H2O, policy_scores="first"), errors.RangeError, "policy_scores"),
        (dict(format="int8/channel"), errors.UnsupportedError, "scales: .* calibrated"),
        (dict(format=("int4/page_channel", "int4/group32")), errors.UnsupportedError, "format: .* page at a time"),
        (dict(format="fp7"), errors.UnsupportedError, "fp7"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_and_the_model_stays_as_it_is(models, options, error, match):  # noqa: F811
    with refused(match, error):
        use_tkv(models("llama"), **options)
    assert models("llama").config._attn_implementation == "eager"


def test_evictions_and_windows_of_a_model_exclude_each_other(models):  # noqa: F811
    for kind in ("mistral", "gemma3"):
        with refused("policy: .* the model's window of 5"):
            use_tkv(models(kind), **H2O)


def test_sinks_outside_of_a_smaller_window_of_the_model_are_refused(models):  # noqa: F811
    with refused("window: with sinks, expected at least the model's own window, 5"):
        use_tkv(models("mistral"), window=4, sinks=1)


def other_models():
    sizes = {**SIZES, "attn_implementation": None}
    for name, own, match in [
        ("Bloom", {}, "AttentionInterface"),
        ("Falcon", dict(alibi=True), "AttentionInterface"),
        ("Mamba", {}, "AttentionInterface"),
        ("Llama", dict(attention_chunk_size=4), "chunked attention"),
        ("Llama", dict(layer_types=["full_attention", "linear_attention"]), "linear_attention"),
        ("Llama", dict(use_bidirectional_attention=True), "bidirectional"),
        ("Llama", dict(num_kv_shared_layers=1), "share keys"),
    ]:
        yield name, {**sizes, **own}, match


@pytest.mark.parametrize("name,config,match", list(other_models()))
def test_models_that_attend_in_other_ways_are_refused(name, config, match):
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**config))
    with refused(match):
        use_tkv(model)


def test_encoders_and_models_of_images_are_refused():
    small = dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=50)
    bart = transformers.BartForConditionalGeneration(
        transformers.BartConfig(**small, encoder_attention_heads=2, decoder_attention_heads=2)
    )  # fmt: skip
    with refused("model: BartForConditionalGeneration has an encoder"):
        use_tkv(bart)
    text = {**SIZES, "attn_implementation": None, "head_dim": 16}
    vision = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    gemma = transformers.Gemma3ForConditionalGeneration(transformers.Gemma3Config(text_config=text, vision_config=vision))
    with refused("more than text"):
        use_tkv(gemma)
    with refused("model: expected a PreTrainedModel", errors.DTypeError):
        use_tkv(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("kind", ["static", "offloaded", "quantized", "paged"])
def test_other_kinds_of_cache_are_refused(models, kind):  # noqa: F811
    with use_tkv(models("llama")), refused(f"cache_implementation: .*'{kind}'"):
        generate(models("llama"), prompts(1, 4), cache_implementation=kind)


def test_a_cache_of_another_class_is_refused_and_a_tkv_cache_without_tkv(models):  # noqa: F811
    model = models("llama")
    with use_tkv(model) as used:
        with refused(f"{CACHE}: expected a TkvCache.*got DynamicCache"):
            forward(model, prompts(1, 4), transformers.DynamicCache())
        cache = used.new_cache()
    assert isinstance(cache, TkvCache)
    with refused("cache: a TkvCache works in a model after use_tkv"):
        forward(model, prompts(1, 4), cache)


def test_the_attention_function_alone_is_refused(models):  # noqa: F811
    model = models("llama")
    use_tkv(model).restore()
    model.set_attn_implementation("tkv")
    try:
        with refused("attn_implementation: 'tkv' works in a model after use_tkv"):
            forward(model, prompts(1, 4))
    finally:
        model.set_attn_implementation("eager")


def test_another_attention_function_under_a_tkv_cache_is_noticed(models):  # noqa: F811
    model = models("llama")
    with use_tkv(model):
        model.set_attn_implementation("eager")
        with pytest.raises((errors.UnsupportedError, RuntimeError)):
            forward(model, prompts(1, 4))


def test_masks_that_are_not_padding_are_refused(models):  # noqa: F811
    model, ids = models("llama"), prompts(2, 5)
    with use_tkv(model, page_size=4):
        with refused(r"attention_mask: .*\[2, 1, 5, 5\]"):
            forward(model, ids, attention_mask=torch.ones(2, 1, 5, 5, device=DEVICE).tril())
        with refused("position_ids: .* packed sequences"):
            forward(model, ids, position_ids=torch.tensor([[0, 1, 2, 0, 1]] * 2, device=DEVICE), use_cache=False)
        with refused(re.escape("attention_mask: expected [2, 5]"), errors.ShapeError):
            forward(model, ids, attention_mask=torch.ones(2, 4, device=DEVICE))
        _, cache = forward(model, ids)
        with refused("cannot be masked, or unmasked, later"):
            forward(model, ids[:, :1], cache, attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1]] * 2, device=DEVICE))


def test_a_pass_that_is_refused_before_it_starts_leaves_the_cache_as_it_was(models):  # noqa: F811
    model, ids = models("llama"), prompts(2, 5)
    expected, _ = forward(model, ids)
    with use_tkv(model, page_size=4):
        _, cache = forward(model, ids[:, :3])
        with refused("batch of 2", errors.ShapeError):
            forward(model, prompts(3, 2), cache)
        with refused("attention_mask: expected", errors.ShapeError):
            forward(model, ids[:, 3:], cache, attention_mask=torch.ones(2, 2, device=DEVICE))
        assert cache.length == 3
        assert_close(forward(model, ids[:, 3:], cache)[0], expected[:, 3:])


def test_a_cache_that_a_failed_pass_left_behind_is_refused(models, monkeypatch):  # noqa: F811
    model = models("llama")
    with use_tkv(model, page_size=4):
        _, cache = forward(model, prompts(2, 3))
        with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
            broken.setattr(model.model.layers[1].mlp, "forward", lambda x: (_ for _ in ()).throw(KeyboardInterrupt))
            forward(model, prompts(2, 1), cache)
        with refused("cache: an earlier forward pass with it did not finish"):
            forward(model, prompts(2, 1), cache)
        # Others are not touched by that.
        forward(model, prompts(2, 3))


def test_padding_between_tokens_is_refused_where_a_window_leaves_it_behind(models):  # noqa: F811
    mask = torch.tensor([[1, 1, 0, 1, 1, 1]], device=DEVICE)
    with use_tkv(models("mistral")), refused("attention_mask: padding between tokens"):
        forward(models("mistral"), prompts(1, 6), attention_mask=mask)


def test_weights_and_gradients_and_dropout_are_refused():
    model = build("llama", attention_dropout=0.5)
    with use_tkv(model, page_size=4):
        with refused("output_attentions"):
            forward(model, prompts(1, 3), output_attentions=True)
        model.train()
        with refused("dropout: expected 0, got 0.5"):
            forward(model, prompts(1, 3))
        model.eval().requires_grad_(True)
        logits, _ = forward(model, prompts(1, 3))
        with refused("backward"):
            logits.sum().backward()


def test_beams_and_drafts_cannot_be_had_with_a_policy(models):  # noqa: F811
    model = models("llama")
    with use_tkv(model, page_size=4, **H2O):
        with refused("policy: sequences that share pages"):
            generate(model, prompts(1, 4), num_beams=3)
        _, cache = forward(model, prompts(1, 6))
        assert not cache.is_croppable
        with refused("crop: tokens that a policy evicted"):
            cache.crop(-1)


def test_a_policy_that_keeps_too_few_is_refused(models):  # noqa: F811
    policy = lambda scores, lens: tkv.policies.streaming(lens, scores.shape[1], scores.shape[2], sinks=1, window=2)
    with use_tkv(models("llama"), page_size=4, policy=policy, budget=4), refused("policy: expected keep of"):
        forward(models("llama"), prompts(1, 6))


def test_scales_of_all_layers_are_needed(models):  # noqa: F811
    with use_tkv(models("llama"), format="fp8_e4m3/tensor", scales={0: (1.0, 1.0)}), refused("scales: none for layer 1"):
        forward(models("llama"), prompts(1, 3))


def test_older_versions_of_transformers_are_refused(monkeypatch):
    # Which is not always the module that was imported first: transformers replaces itself.
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.56.2")
    monkeypatch.delitem(sys.modules, "tkv.integrations.transformers")
    with refused("transformers: expected version 4.57 or newer, got 4.56.2"):
        importlib.import_module("tkv.integrations.transformers")


def test_a_model_that_uses_tkv_is_saved_without_it_and_not_pickled(models, tmp_path):  # noqa: F811
    with use_tkv(models("llama")):
        models("llama").save_pretrained(tmp_path)
        with refused("model: .* cannot be pickled; call restore"):
            pickle.dumps(models("llama"))
    assert "tkv" not in (tmp_path / "config.json").read_text()


def test_a_cache_of_a_model_with_other_layers_is_refused(models):  # noqa: F811
    deeper = build("llama", num_hidden_layers=3)
    with use_tkv(models("llama")) as used, use_tkv(deeper), refused(f"{CACHE}: expected one of 3 layers", errors.ShapeError):
        forward(deeper, prompts(1, 4), used.new_cache())
