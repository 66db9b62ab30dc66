"""Named models, the shapes that they give, and the tensors of a shape."""

from dataclasses import replace

import pytest
import torch

import tkv
from tkv.errors import RangeError, UnsupportedError
from tkv.tune.configs import AttentionConfig
from tkv.tune.keys import OP_KINDS
from tkv.tune.model import Shape
from tkv.tune.problem import SUFFIX, build, cache_bytes
from tkv.tune.shapes import MODELS, Model, shapes_of

SMALL = Model("small", layers=2, num_q_heads=4, num_kv_heads=2, head_dim=32)
CONFIG = AttentionConfig(16, 16, 4, 1, split_len=32)


def small(op, num_seqs=2, kv_len=75, q_len=None, **changes):
    """A shape that the interpreter runs in a moment."""
    q_len = q_len or {"prefix_prefill": 9, "key_scores": 5}.get(op)
    return replace(shapes_of(SMALL, op, [num_seqs], [kv_len], q_len=q_len, dtype="fp32", format="fp32")[0], **changes)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("op", OP_KINDS)
def test_every_model_has_a_problem_of_every_op_whose_key_is_that_of_its_heads(name, op):
    model = MODELS[name]
    shapes = shapes_of(name, op, batches=[2], lengths=[8192])
    assert [shape.window for shape in shapes] == list(model.windows)
    for shape in shapes:
        problem = build(shape, "meta")
        key, group = problem.key, model.num_q_heads // model.num_kv_heads
        assert (key.head_dim, key.v_head_dim) == (model.head_dim, model.v_head_dim or model.head_dim)
        assert ("shared" in key.flags) == model.shares_v and ("softcap" in key.flags) == (model.softcap is not None)
        assert ("window" in key.flags) == (shape.window is not None)
        rows = {"paged_decode": group, "prefix_prefill": 128, "shared_prefix_decode": 2 * group, "key_scores": 32 * group}[op]
        assert key.rows == min(128, max(16, 1 << (rows - 1).bit_length()))
        assert problem.launches(problem.default)[0]


def test_heads_of_the_models_are_those_that_they_are_known_for():
    heads = {name: (model.num_q_heads, model.num_kv_heads, model.head_dim) for name, model in MODELS.items()}
    assert heads["llama3-8b"] == heads["mistral-7b"] == (32, 8, 128)
    assert heads["llama3-70b-tp8"] == (8, 1, 128) and heads["qwen2.5-7b"] == (28, 4, 128) and heads["gemma2-9b"] == (16, 8, 256)
    assert heads["gpt-oss-20b"] == (64, 8, 64) and heads["deepseek-mla"] == (128, 1, 576) and heads["falcon-7b"] == (71, 1, 64)
    assert all(model.num_q_heads % model.num_kv_heads == 0 for model in MODELS.values())


def test_a_layer_with_a_window_has_no_shape_that_is_no_longer_than_it():
    assert [(s.kv_len, s.window) for s in shapes_of("mistral-7b", batches=[1], lengths=[4096, 4097])] == [(4097, 4096)]
    gemma = shapes_of("gemma2-9b", batches=[1], lengths=[1000, 5000])
    assert [(s.kv_len, s.window, s.flags) for s in gemma] == [
        (1000, None, ("softcap",)), (5000, None, ("softcap",)), (5000, 4096, ("softcap", "window")),
    ]  # fmt: skip


def test_shapes_that_would_need_a_very_large_cache_are_left_out():
    assert [s.num_seqs for s in shapes_of("llama3-8b", batches=[1, 64], lengths=[65536], max_tokens=100_000)] == [1]
    assert [s.num_seqs for s in shapes_of("llama3-8b", "shared_prefix_decode", [64], [65536], max_tokens=100_000)] == [64]


def test_unknown_names_and_empty_numbers_are_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"model: expected one of llama3-8b.*got 'llama9'"):
        shapes_of("llama9")
    with pytest.raises(UnsupportedError, match=r"op: expected.*got 'write_kv'"):
        shapes_of("llama3-8b", "write_kv")
    with pytest.raises(RangeError, match="batches: expected numbers of at least 1"):
        shapes_of("llama3-8b", batches=[0, 4])
    with pytest.raises(RangeError, match="q_len: expected 1 to 4"):
        build(replace(small("paged_decode"), q_len=5, kv_len=4), "meta")


@pytest.mark.parametrize(
    ("op", "format", "flags"),
    [
        ("paged_decode", "fp32", ()),
        ("paged_decode", "int8/token_head", ("window",)),
        ("paged_decode", "int4/group32", ("softcap",)),
        ("paged_decode", "fp32", ("pinned", "rope", "window")),
        ("paged_decode", "fp32", ("shared",)),
        ("paged_decode", "int8/channel", ("alibi",)),
        ("paged_decode", "int8/page_channel+int4/group32", ()),
        ("prefix_prefill", "fp8_e4m3/tensor", ()),
        ("prefix_prefill", "fp32", ("tree",)),
        ("shared_prefix_decode", "fp32", ()),
        ("key_scores", "int4/token_head", ()),
        ("key_scores", "fp32", ("window",)),
    ],
)
def test_results_of_two_configs_agree_and_a_damaged_one_is_seen(op, format, flags, device):
    more = {"v_head_dim": 16} if "shared" in flags else {}
    shape = small(op, format=format, flags=flags, window=20 if "window" in flags else None, **more)
    problem = build(shape, device, uneven=True)
    wanted, got = problem.run(replace(problem.default, block_n=16)), problem.run(CONFIG)
    assert problem.mismatch(got, wanted) is None
    for i in range(len(got)):
        for value in (torch.nan, 0.0, 1.2 * float(got[i].flatten()[1])):
            damaged = [x.clone() for x in got]
            damaged[i].flatten()[1] = value
            if float(got[i].flatten()[1]) != value:
                assert "where the default gives" in problem.mismatch(tuple(damaged), wanted)


@pytest.mark.parametrize("op", ("paged_decode", "prefix_prefill"))
def test_the_results_are_those_of_the_public_function_on_the_same_tensors(op, device):
    problem = build(small(op), device, uneven=True)
    args = (problem.cache, problem.page_table, problem.lens)
    if op == "paged_decode":
        out = tkv.paged_decode(problem.q, *args)
    else:
        out = tkv.prefix_prefill(problem.q, *problem.new, *args, problem.cu_seqlens)
    assert torch.allclose(problem.run()[0], out, rtol=1e-4, atol=1e-5)
    assert len(set(problem.lens.tolist())) > 1 and problem.page_table.flatten().unique().numel() == problem.page_table.numel()


def test_a_result_that_leaves_out_the_last_keys_is_seen_in_both_of_its_tensors(device):
    problem = build(small("paged_decode"), device)
    wanted = problem.run()
    problem.lens.sub_(8)
    out, lse = problem.run()
    assert problem.mismatch((out, wanted[1]), wanted).startswith("out")
    assert problem.mismatch((wanted[0], lse), wanted).startswith("lse")


def test_bytes_and_operations_are_those_of_the_keys_that_rows_see():
    decode = build(small("paged_decode", 3, 100), "cpu")
    of_token, of_rows = 2 * 32 * 4 * 2, 3 * 4 * (32 * 4 + 32 * 4 + 4)
    assert decode.bytes_moved == 300 * of_token + of_rows and decode.flops == 300 * 4 * (32 + 32) * 2
    windowed = build(replace(small("paged_decode", 3, 100), window=20, flags=("window",)), "cpu")
    assert windowed.bytes_moved == 60 * of_token + of_rows
    prefill = build(small("prefix_prefill", 1, 100, 10), "cpu")
    assert prefill.visible == (100, sum(range(91, 101)))
    assert prefill.bytes_moved == 90 * of_token + 10 * of_token + 10 * 4 * (32 * 4 + 32 * 4 + 4)
    cascade = build(small("shared_prefix_decode", 3, 96), "cpu")
    assert cascade.visible == (96 + 3 * SUFFIX, 3 * (96 + SUFFIX))
    scores = build(small("key_scores", 1, 100, 5), "cpu")
    assert scores.bytes_moved == 100 * (of_token // 2 + 2 * 4) + 5 * 4 * (32 * 4 + 4)


@pytest.mark.parametrize("op", OP_KINDS)
def test_the_size_of_the_cache_is_known_before_it_is_built(op):
    shape = small(op, kv_len=70, format="int4/group32")
    assert cache_bytes(shape) == build(shape, "meta").cache.nbytes
    assert isinstance(shape, Shape)
