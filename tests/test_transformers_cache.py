"""What a TkvCache holds: formats, windows, evictions, beams, bytes. References in plain torch."""

import gc
import weakref
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers", minversion="4.57")

from test_transformers import CACHE, DEVICE, PAGE_SIZE, assert_close, build, forward, generate, models, padded, prompts  # noqa: E402, F401
from transformers.masking_utils import AttentionMaskInterface, eager_mask  # noqa: E402

import tkv  # noqa: E402
from tkv import errors  # noqa: E402
from tkv.integrations.transformers import use_tkv  # noqa: E402
from tkv.policies import h2o, streaming, tova  # noqa: E402


def in_pieces(model, ids, pieces, mask=None, cache=None):
    """Logits of all columns from forward passes of so many columns each, and the cache."""
    logits, end = [], 0
    for count in pieces:
        start, end = end, end + count
        own, cache = forward(model, ids[:, start:end], cache, attention_mask=None if mask is None else mask[:, :end], use_cache=True)
        logits.append(own)
    assert end == ids.shape[1]
    return torch.cat(logits, 1), cache


def visible(columns, window=None, sinks=0):
    """``[columns, columns]``: which keys a row sees."""
    rows, keys = torch.arange(columns)[:, None], torch.arange(columns)
    seen = keys <= rows
    return seen if window is None else seen & ((rows - keys < window) | (keys < sinks))


def with_mask(model, ids, seen):
    """Logits of the model's own attention under a mask."""
    bias = torch.zeros(1, 1, *seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min).to(DEVICE)
    mask = bias.expand(ids.shape[0], 1, -1, -1)
    kinds = set(getattr(model.config, "layer_types", None) or [])
    return forward(model, ids, attention_mask={kind: mask for kind in kinds} if len(kinds) > 1 else mask, use_cache=False)[0]


@settings(max_examples=6)
@given(data=st.data())
def test_any_padding_in_any_pieces_gives_the_logits_of_the_models_own_attention(data):
    kind = data.draw(st.sampled_from(["llama", "mistral"]))
    model = build(kind)
    columns, batch = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    if kind == "llama":
        # Also padding between tokens.
        bits = data.draw(st.lists(st.integers(0, 1), min_size=batch * columns, max_size=batch * columns))
        mask = torch.tensor(bits, device=DEVICE).view(batch, columns)
        seen = mask.cumsum(1) > 0
    else:
        mask = padded(data.draw(st.lists(st.integers(1, columns), min_size=batch, max_size=batch)), columns, "left")
        seen = mask > 0
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, columns - 1)), max_size=3)) - {columns})
    pieces = [b - a for a, b in zip([0, *cuts], [*cuts, columns])]
    ids = prompts(batch, columns, seed=columns)
    expected, _ = in_pieces(model, ids, pieces, mask)
    with use_tkv(model, page_size=data.draw(st.sampled_from([1, 3, 16]))):
        ours, cache = in_pieces(model, ids, pieces, mask)
    assert cache.length == columns
    held = [cache.groups[None if kind == "llama" else 5].manager.length(seq) for seq in next(iter(cache.groups.values())).seqs]
    assert held == mask.sum(1).tolist(), "padding is not stored"
    if bool(seen.any()):
        assert_close(ours[seen], expected[seen])


def test_rows_of_padding_that_a_window_still_reaches_are_computed_too(models):  # noqa: F811
    ids, mask = prompts(2, 9), padded([9, 4], 9, "right")
    expected, _ = forward(models("mistral"), ids, attention_mask=mask)
    with use_tkv(models("mistral"), page_size=PAGE_SIZE):
        ours, _ = forward(models("mistral"), ids, attention_mask=mask)
    # The window of 5 sees tokens 0 to 3 from columns up to 7.
    assert_close(ours[:, :8], expected[:, :8])
    assert bool(ours[:, 8].isfinite().all())


def roundtrip(format, scales):
    """An attention function that sees keys and values as the format gives them back."""

    def attend(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
        batch, heads, length, dim = key.shape
        k_scale, v_scale = scales[module.layer_idx] if scales else (None, None)
        cache = tkv.KVCache.empty(batch, length, heads, dim, format, device=DEVICE, k_scale=k_scale, v_scale=v_scale)
        tkv.write_kv(
            key.transpose(1, 2).flatten(0, 1), value.transpose(1, 2).flatten(0, 1), cache, torch.arange(batch * length, device=DEVICE)
        )
        table, lens = torch.arange(batch, device=DEVICE)[:, None], torch.full((batch,), length, device=DEVICE)
        k, v, *_ = tkv.gather_window(cache, table, lens, window=None, dense=True, dequantize=True, dtype=torch.float32)
        key, value = (x.transpose(1, 2).repeat_interleave(query.shape[1] // heads, 1) for x in (k, v))
        weights = (query @ key.transpose(2, 3) * scaling + attention_mask).softmax(-1)
        return (weights @ value).transpose(1, 2), weights

    return attend


@pytest.mark.parametrize(
    "format", ["int8/token_head", "fp8_e4m3/tensor", "int4/group32", "int8/channel", ("fp8_e5m2/head", "int4/token_head")]
)
def test_a_quantised_cache_computes_what_its_numbers_say(format):
    model, ids = build("llama", head_dim=32), prompts(2, 7)
    names = [str(kind) for kind in (format if isinstance(format, tuple) else (format, format))]
    scales = None
    if "int8/channel" in names:
        scales = tkv.calibrate([cache_pairs(model, ids)], format)
    elif "fp8_e4m3/tensor" in names:
        scales = {0: (0.02, 0.03), 1: (0.01, 0.04)}
    transformers.AttentionInterface.register("roundtrip", roundtrip(format, scales))
    AttentionMaskInterface.register("roundtrip", eager_mask)
    plain, _ = forward(model, ids)
    model.set_attn_implementation("roundtrip")
    expected, _ = forward(model, ids, use_cache=False)
    with use_tkv(model, format=format, scales=scales, page_size=PAGE_SIZE):
        ours, cache = in_pieces(model, ids, [4, 1, 1, 1])
    effect = float((expected - plain).abs().max())
    assert effect > 1e-3, "the format changes nothing, so the test shows nothing"
    # A number in the middle between two codes may go either way, as its last bit depends on the order of sums.
    assert float((ours - expected).abs().max()) <= max(0.02 * effect, 5e-5 * float(expected.abs().max()))
    assert [str(cache.layers[0].kv.k_format), str(cache.layers[0].kv.v_format)] == names
    assert cache.nbytes == sum(layer.kv.nbytes for layer in cache.layers)


def cache_pairs(model, ids):
    """Keys and values of each layer, [tokens, heads, dim]."""
    _, cache = forward(model, ids, use_cache=True)
    return [(layer.keys.transpose(1, 2).flatten(0, 1), layer.values.transpose(1, 2).flatten(0, 1)) for layer in cache.layers]


@pytest.mark.parametrize("window,sinks", [(5, 0), (6, 3)])
def test_a_window_with_sinks_sees_the_first_and_the_last_tokens_and_frees_the_others(models, window, sinks):  # noqa: F811
    model, ids = models("llama"), prompts(2, 30)
    expected = with_mask(model, ids, visible(30, window, sinks))
    with use_tkv(model, page_size=2, window=window, sinks=sinks):
        ours, cache = in_pieces(model, ids, [7, 4, 3] + [1] * 16)
        at_once, _ = forward(model, ids, use_cache=False)
    assert_close(ours, expected)
    assert_close(at_once, expected)
    bound = 2 * (-(-(sinks + window + 1 - 1) // 2) + 2)
    assert cache.num_pages <= bound
    # Seven tokens at once, as the prompt was, need a little more.
    assert cache.layers[0].kv.num_pages <= 2 * (-(-(sinks + window + 7 - 1) // 2) + 2) < 2 * 15


def test_the_windows_of_left_padded_sequences_begin_at_their_own_tokens(models):  # noqa: F811
    model, ids, short = models("llama"), prompts(2, 14), 9
    mask = padded([14, short], 14, "left")
    alone = with_mask(model, ids[1:, -short:], visible(short, 4, 2))
    with use_tkv(model, page_size=2, window=4, sinks=2):
        # By hand, positions are the caller's.
        positions = (mask.cumsum(1) - 1).clamp_min(0)
        ours, _ = forward(model, ids, attention_mask=mask, position_ids=positions)
    assert_close(ours[1:, -short:], alone)


@pytest.mark.parametrize("asked,seen", [(3, 3), (5, 5), (9, 5)])
def test_of_the_models_window_and_the_users_the_smaller_one_counts(models, asked, seen):  # noqa: F811
    model, ids = models("mistral"), prompts(1, 12)
    expected = with_mask(model, ids, visible(12, seen))
    with use_tkv(model, page_size=2, window=asked):
        ours, _ = in_pieces(model, ids, [5, 1, 6])
    assert_close(ours, expected)


def test_sinks_are_for_layers_without_a_window_of_their_own(models):  # noqa: F811
    model, ids = models("gemma3"), prompts(1, 14)
    with use_tkv(model, page_size=2, window=6, sinks=2):
        _, cache = in_pieces(model, ids, [9, 5])
    kinds = {own: (group.window, group.sinks, group.layers) for own, group in cache.groups.items()}
    assert kinds == {5: (5, 0, [0]), None: (6, 2, [1])}


def held_keys(cache, layer_idx):
    """The keys in a layer's pages, [num_seqs, width, heads, dim]."""
    group, kv = cache.layers[layer_idx].group, cache.layers[layer_idx].kv
    pages = [group.manager.pages(seq) for seq in group.seqs]
    table = torch.from_numpy(np.stack([np.pad(ids, (0, max(map(len, pages)) - len(ids)), constant_values=-1) for ids in pages])).to(DEVICE)
    lens = torch.tensor([group.manager.held(seq) for seq in group.seqs], device=DEVICE)
    return tkv.gather_window(kv, table, lens, window=None, dense=True)[0], table, lens


def weights_of(model, ids, mask=None):
    """Attention mass of keys in each layer, [batch, kv_heads, q_len, columns], summed over the heads of a group; and the keys."""
    out = model(ids, attention_mask=mask, output_attentions=True, use_cache=True)
    return [weights.unflatten(1, (2, -1)).sum(2) for weights in out.attentions], [layer.keys for layer in out[CACHE].layers]


def scores_of(cache, layer_idx):
    _, table, lens = held_keys(cache, layer_idx)
    return tkv.policies.dense_scores(cache.layers[layer_idx].scores, table, lens)


def test_scores_are_the_attention_that_each_key_got(models):  # noqa: F811
    model, ids = models("llama"), prompts(2, 10)
    mask = torch.cat([padded([6], 10, "left"), padded([6], 10, "right")])
    weights, _ = weights_of(model, ids, mask)
    with use_tkv(model, page_size=PAGE_SIZE, policy=partial(h2o, heavy=40, recent=10), budget=50):
        _, cache = in_pieces(model, ids, [6, 3, 1], mask)
    for layer_idx, own in enumerate(weights):
        scores = scores_of(cache, layer_idx)
        # Rows of padding give nothing, though those on the right see keys.
        assert torch.allclose(scores[0, :, :6], own[0, :, 4:, 4:].sum(1), atol=1e-4)
        assert torch.allclose(scores[1, :, :6], own[1, :, :6, :6].sum(1), atol=1e-4)


def test_a_new_token_in_the_slot_of_an_evicted_one_begins_without_its_score(models):  # noqa: F811
    model, ids = models("llama"), prompts(1, 10)
    with use_tkv(model, page_size=PAGE_SIZE, policy=partial(h2o, heavy=2, recent=2), budget=4):
        _, cache = forward(model, ids[:, :9])
        before = [scores_of(cache, layer_idx).sum(2) for layer_idx in range(2)]
        cache.settings = replace(cache.settings, budget=100)
        forward(model, ids[:, 9:], cache)
    for layer_idx, kept in enumerate(before):
        # One query of each of the two heads of a group, and each has one to give.
        assert torch.allclose(scores_of(cache, layer_idx).sum(2), kept + 2, atol=1e-4)


@pytest.mark.parametrize("policy,which", [(partial(h2o, heavy=3, recent=2), "sum"), (partial(tova, budget=5), "last")])
def test_a_policy_keeps_in_each_layer_and_head_what_the_attention_says(models, policy, which):  # noqa: F811
    model, ids = models("llama"), prompts(2, 11)
    weights, keys = weights_of(model, ids)
    with use_tkv(model, page_size=PAGE_SIZE, policy=policy, budget=5, policy_scores=which):
        _, cache = forward(model, ids)
        assert cache.length == 11 and cache.num_pages == 4
        for layer_idx, (own, key) in enumerate(zip(weights, keys)):
            scores = own.sum(2) if which == "sum" else own[:, :, -1]
            keep, _ = policy(scores.contiguous(), torch.tensor([11, 11], device=DEVICE))
            expected = key.gather(2, keep.long()[..., None].expand(-1, -1, -1, key.shape[3]))
            held, _, lens = held_keys(cache, layer_idx)
            assert lens.tolist() == [5, 5]
            assert torch.allclose(held[:, :5].transpose(1, 2), expected, atol=1e-5)


def test_attention_after_evictions_is_over_what_was_kept(models):  # noqa: F811
    model, ids = models("llama"), prompts(1, 16)
    policy = lambda scores, lens: streaming(lens, scores.shape[1], scores.shape[2], sinks=2, window=4)
    # The prompt sees itself; each token after it two sinks, the last four before it, and itself.
    seen = visible(16, 5, 2)
    seen[:9] = visible(16)[:9]
    expected = with_mask(model, ids, seen)
    with use_tkv(model, page_size=PAGE_SIZE, policy=policy, budget=6):
        ours, cache = in_pieces(model, ids, [9] + [1] * 7)
    assert_close(ours, expected)
    assert cache.num_pages == 2 and cache.length == 16


def test_a_policy_with_room_for_all_changes_nothing(models):  # noqa: F811
    expected = generate(models("llama"), prompts(2, 6), padded([6, 4], 6, "left"), tokens=4)
    with use_tkv(models("llama"), page_size=PAGE_SIZE, policy=partial(h2o, heavy=20, recent=20), budget=40):
        ours = generate(models("llama"), prompts(2, 6), padded([6, 4], 6, "left"), tokens=4)
    assert ours.sequences.tolist() == expected.sequences.tolist()


def test_beams_share_their_pages_until_they_write(models):  # noqa: F811
    model, ids = models("llama"), prompts(2, 6)
    with use_tkv(model, page_size=PAGE_SIZE):
        _, cache = forward(model, ids)
        cache.batch_repeat_interleave(2)
        assert cache.num_pages == 4, "two pages a prompt, shared"
        ends = prompts(4, 2, seed=4)
        whole = torch.cat([ids.repeat_interleave(2, 0), ends], 1)
        ours, _ = forward(model, ends[:, :1], cache)
        cache.reorder_cache(torch.tensor([3, 0, 0, 2], device=DEVICE))
        again, _ = forward(model, ends[:, 1:], cache)
        assert cache.num_pages == 2 + 4, "a whole page a prompt, and a last one each"
        cache.batch_select_indices(torch.tensor([1]))
        assert cache.num_pages == 2
        cache.reset()
        assert cache.num_pages == cache.length == cache.nbytes == 0
    assert_close(ours[:, 0], forward(model, whole)[0][:, 6])
    order = [3, 0, 0, 2]
    assert_close(again[:, 0], forward(model, torch.cat([whole[order, :7], ends[:, 1:]], 1))[0][:, 7])


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_cropped_columns_are_forgotten(models, kind):  # noqa: F811
    model, ids, other = models(kind), prompts(2, 9), prompts(2, 3, seed=6)
    # What is cropped is padding too where no window minds.
    mask = padded([9, 7], 9, "right" if kind == "llama" else "left")
    ones = mask.new_ones(2, 3)
    expected, _ = in_pieces(model, torch.cat([ids[:, :6], other], 1), [9], torch.cat([mask[:, :6], ones], 1))
    for crop in (-3, 6):
        with use_tkv(model, page_size=PAGE_SIZE):
            _, cache = in_pieces(model, ids, [4, 5], mask)
            cache.crop(crop)
            cache.crop(100)
            assert cache.length == 6
            ours, _ = forward(model, other, cache, attention_mask=torch.cat([mask[:, :6], ones], 1))
        assert_close(ours, expected[:, 6:])


def test_memory_grows_with_the_tokens_and_not_beyond_what_generation_asked_for(models):  # noqa: F811
    model = models("llama")
    with use_tkv(model, page_size=2):
        _, cache = in_pieces(model, prompts(2, 12), [3] + [1] * 9)
        assert [layer.kv.num_pages for layer in cache.layers] == [13, 13], "4, 6, 9, 13 pages: by half"
        # Half more than 6 pages were 9, but the last token's key is in column 7.
        assert generate(model, prompts(2, 3), tokens=6)[CACHE].layers[0].kv.num_pages == 8


def test_when_pages_run_out_it_is_told_and_the_cache_is_spent(models):  # noqa: F811
    model = models("llama")
    with use_tkv(model, page_size=2, max_pages=3):
        _, cache = forward(model, prompts(1, 6))
        with pytest.raises(errors.OutOfPages):
            forward(model, prompts(1, 1), cache)
        with pytest.raises(errors.UnsupportedError, match="did not finish"):
            forward(model, prompts(1, 1), cache)


def test_memory_is_given_back_as_soon_as_nobody_has_the_cache(models):  # noqa: F811
    gc.collect()
    gc.disable()
    try:
        with use_tkv(models("gemma3"), page_size=PAGE_SIZE):
            _, cache = forward(models("gemma3"), prompts(1, 5))
            generate(models("gemma3"), prompts(1, 3), tokens=2)
        pages = weakref.ref(cache.layers[0].kv.k)
        del cache
        assert pages() is None
    finally:
        gc.enable()
