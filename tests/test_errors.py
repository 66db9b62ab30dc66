"""Every argument of every public function is checked before anything is launched, and the message says what was needed."""

# One case a line: a table is read by its columns.
# ruff: noqa: E501

import os
import subprocess
import sys

import pytest
import torch
from problems import test_device

import tkv
from tkv import KVCache
from tkv.errors import DeviceError, DTypeError, RangeError, ShapeError, TkvError, UnsupportedError

DEVICE = test_device()


def zeros(*shape, dtype=torch.float16, device=DEVICE):
    return torch.zeros(*shape, dtype=dtype, device=device)


def ints(*shape, dtype=torch.int32, device=DEVICE):
    return torch.zeros(*shape, dtype=dtype, device=device)


def native():
    return KVCache.empty(4, 16, 2, 64, "fp16", device=DEVICE)


def quantised():
    return KVCache(zeros(4, 16, 2, 64, dtype=torch.int8), zeros(4, 16, 2, 64, dtype=torch.int8), *(zeros(4, 16, 2, dtype=torch.float32) for _ in "kv"))


def decode(cache=None, **changes):
    """A correct call of paged_decode (2 sequences, 4 query heads) with some arguments changed."""
    args = {"q": zeros(2, 4, 64), "cache": native() if cache is None else cache, "page_table": ints(2, 3), "seq_lens": ints(2)}
    return tkv.paged_decode(**{**args, **changes})


def write(cache=None, **changes):
    """A correct call of write_kv (3 tokens) with some arguments changed."""
    args = {"k": zeros(3, 2, 64), "v": zeros(3, 2, 64), "cache": native() if cache is None else cache, "slot_mapping": ints(3)}
    return tkv.write_kv(**{**args, **changes})


def merge(outs=None, lses=None):
    outs = zeros(2, 3, 16, dtype=torch.float32) if outs is None else outs
    return tkv.merge_states(outs, zeros(2, 3, dtype=torch.float32) if lses is None else lses)


def cache(k=None, v=None, *args, **kwargs):
    data = zeros(4, 16, 2, 64)
    return KVCache(data if k is None else k, data if v is None else v, *args, **kwargs)


def config(**changes):
    return {"block_m": 16, "block_n": 64, "num_warps": 4, "num_stages": 1, **changes}


F32, META = torch.float32, "meta"
TOKEN_HEAD = "int8/token_head"
WRONG = {
    # paged_decode
    "decode q is no tensor": (lambda: decode(q=[1.0]), DTypeError, "q: expected a torch.Tensor, got list"),
    "decode q has two dims": (lambda: decode(q=zeros(4, 64)), ShapeError, r"q: expected shape \[num_seqs, num_q_heads, 64\], got \[4, 64\]"),
    "decode q has five dims": (lambda: decode(q=zeros(1, 1, 1, 4, 64)), ShapeError, "q: expected shape"),
    "decode q has another head_dim": (lambda: decode(q=zeros(2, 4, 32)), ShapeError, r"q: .*64\], got \[2, 4, 32\]"),
    "decode q is of integers": (lambda: decode(q=ints(2, 4, 64)), DTypeError, "q: expected torch.float32 or torch.float16 or torch.bfloat16"),
    "decode q is float64": (lambda: decode(q=zeros(2, 4, 64, dtype=torch.float64)), DTypeError, "q: .* got torch.float64"),
    "decode q is elsewhere": (lambda: decode(q=zeros(2, 4, 64, device=META)), DeviceError, "q: expected device .* got meta"),
    "decode q has a strided last dim": (lambda: decode(q=zeros(2, 4, 128)[..., ::2]), ShapeError, "q: the last dimension must be contiguous"),
    "decode q is bf16 on fp16": (lambda: decode(q=zeros(2, 4, 64, dtype=torch.bfloat16)), UnsupportedError, "q: a fp16 cache needs q in torch.float16"),
    "decode q_len is 0": (lambda: decode(q=zeros(2, 0, 4, 64)), UnsupportedError, "q: expected q_len from 1 to 64, got 0"),
    "decode q_len is 65": (lambda: decode(q=zeros(2, 65, 4, 64)), UnsupportedError, "q: expected q_len from 1 to 64, got 65"),
    "decode heads are no multiple": (lambda: decode(q=zeros(2, 3, 64)), UnsupportedError, r"q: expected a multiple of num_kv_heads \(2\) heads.* got 3"),
    "decode has no heads": (lambda: decode(q=zeros(2, 0, 64)), UnsupportedError, "q: expected a multiple of num_kv_heads"),
    "decode group is 129": (lambda: decode(q=zeros(2, 258, 64)), UnsupportedError, "at most 128 for each, got 258"),
    "decode cache is no cache": (lambda: decode(cache=(zeros(1), zeros(1))), DTypeError, "cache: expected a tkv.KVCache, got tuple"),
    "decode table is no tensor": (lambda: decode(page_table=[[0]]), DTypeError, "page_table: expected a torch.Tensor"),
    "decode table has one dim": (lambda: decode(page_table=ints(2)), ShapeError, r"page_table: expected shape \[2, max_pages\], got \[2\]"),
    "decode table has other sequences": (lambda: decode(page_table=ints(3, 3)), ShapeError, r"page_table: expected shape \[2, max_pages\], got \[3, 3\]"),
    "decode table is of floats": (lambda: decode(page_table=zeros(2, 3)), DTypeError, "page_table: expected torch.int32 or torch.int64"),
    "decode table is int16": (lambda: decode(page_table=ints(2, 3, dtype=torch.int16)), DTypeError, "page_table: .* got torch.int16"),
    "decode table is elsewhere": (lambda: decode(page_table=ints(2, 3, device=META)), DeviceError, "page_table: expected device"),
    "decode table has a strided last dim": (lambda: decode(page_table=ints(3, 2).T), ShapeError, "page_table: the last dimension must be contiguous"),
    "decode lens are no tensor": (lambda: decode(seq_lens=[1, 2]), DTypeError, "seq_lens: expected a torch.Tensor"),
    "decode lens are of other sequences": (lambda: decode(seq_lens=ints(3)), ShapeError, r"seq_lens: expected shape \[2\], got \[3\]"),
    "decode lens are of floats": (lambda: decode(seq_lens=zeros(2)), DTypeError, "seq_lens: expected torch.int32 or torch.int64"),
    "decode lens are elsewhere": (lambda: decode(seq_lens=ints(2, device=META)), DeviceError, "seq_lens: expected device"),
    "decode lens are strided": (lambda: decode(seq_lens=ints(4)[::2]), ShapeError, "seq_lens: the last dimension must be contiguous"),
    "decode scale is text": (lambda: decode(scale="1"), DTypeError, "scale: expected a number, got '1'"),
    "decode scale is a bool": (lambda: decode(scale=True), DTypeError, "scale: expected a number"),
    "decode scale is a tensor": (lambda: decode(scale=zeros(1)), DTypeError, "scale: expected a number"),
    "decode scale is negative": (lambda: decode(scale=-0.1), RangeError, "scale: expected a positive number or 0, from 1e-30 to 1e30, got -0.1"),
    "decode scale is nan": (lambda: decode(scale=float("nan")), RangeError, "scale: .* got nan"),
    "decode scale is inf": (lambda: decode(scale=float("inf")), RangeError, "scale: .* got inf"),
    "decode softcap is 0": (lambda: decode(softcap=0), RangeError, "softcap: expected a positive number, from 1e-30 to 1e30, got 0"),
    "decode softcap is beyond float32": (lambda: decode(softcap=1e39), RangeError, "softcap: .* got 1e.39"),
    "decode out shares rows": (lambda: decode(out=zeros(2, 1, 64).expand(2, 4, 64)), ShapeError, "out: rows must not share memory"),
    "cache scale is a bool": (lambda: cache(*quantised_data(torch.float8_e4m3fn), True), DTypeError, "k_scale: expected a number"),
    "cache scale is beyond float32": (lambda: cache(*quantised_data(torch.float8_e4m3fn), 1e39), RangeError, "k_scale: .* got 1e.39"),
    "decode softcap is negative": (lambda: decode(softcap=-1.0), RangeError, "softcap: expected a positive number"),
    "decode softcap is text": (lambda: decode(softcap="no"), DTypeError, "softcap: expected a number"),
    "decode slopes are a list": (lambda: decode(alibi_slopes=[1.0] * 4), DTypeError, "alibi_slopes: expected a torch.Tensor"),
    "decode slopes are of other heads": (lambda: decode(alibi_slopes=zeros(2, dtype=F32)), ShapeError, r"alibi_slopes: expected shape \[4\], got \[2\]"),
    "decode slopes are fp16": (lambda: decode(alibi_slopes=zeros(4)), DTypeError, "alibi_slopes: expected torch.float32, got torch.float16"),
    "decode slopes are elsewhere": (lambda: decode(alibi_slopes=zeros(4, dtype=F32, device=META)), DeviceError, "alibi_slopes: expected device"),
    "decode window is 0": (lambda: decode(window=0), RangeError, "window: expected at least 1, got 0"),
    "decode window is -1": (lambda: decode(window=-1), RangeError, "window: expected at least 1, got -1"),
    "decode window is a float": (lambda: decode(window=4.0), DTypeError, "window: expected an int, got 4.0"),
    "decode window is a pair": (lambda: decode(window=(4, 0)), DTypeError, r"window: expected an int, got \(4, 0\)"),
    "decode sinks are negative": (lambda: decode(sinks=-1), RangeError, "sinks: expected at least 0, got -1"),
    "decode sinks are None": (lambda: decode(sinks=None), DTypeError, "sinks: expected an int, got None"),
    "decode sink_logits are a number": (lambda: decode(sink_logits=1.0), DTypeError, "sink_logits: expected a torch.Tensor"),
    "decode sink_logits have two dims": (lambda: decode(sink_logits=zeros(2, 4)), ShapeError, r"sink_logits: expected shape \[4\], got \[2, 4\]"),
    "decode sink_logits are of integers": (lambda: decode(sink_logits=ints(4)), DTypeError, "sink_logits: expected torch.float32"),
    "decode sink_logits are elsewhere": (lambda: decode(sink_logits=zeros(4, device=META)), DeviceError, "sink_logits: expected device"),
    "decode kv_start is an int": (lambda: decode(kv_start=3), DTypeError, "kv_start: expected a torch.Tensor, got int"),
    "decode kv_start is of other sequences": (lambda: decode(kv_start=ints(3)), ShapeError, r"kv_start: expected shape \[2\], got \[3\]"),
    "decode kv_start is of floats": (lambda: decode(kv_start=zeros(2)), DTypeError, "kv_start: expected torch.int32 or torch.int64"),
    "decode kv_start is elsewhere": (lambda: decode(kv_start=ints(2, device=META)), DeviceError, "kv_start: expected device"),
    "decode q_start is a list": (lambda: decode(q_start=[1, 2]), DTypeError, "q_start: expected a torch.Tensor"),
    "decode q_start has two dims": (lambda: decode(q_start=ints(2, 1)), ShapeError, r"q_start: expected shape \[2\], got \[2, 1\]"),
    "decode q_start is of bools": (lambda: decode(q_start=ints(2, dtype=torch.bool)), DTypeError, "q_start: .* got torch.bool"),
    "decode q_start is elsewhere": (lambda: decode(q_start=ints(2, device=META)), DeviceError, "q_start: expected device"),
    "decode hint is a tensor": (lambda: decode(max_seq_len=ints(1)), DTypeError, "max_seq_len: expected an int"),
    "decode hint is negative": (lambda: decode(max_seq_len=-1), RangeError, "max_seq_len: expected at least 0"),
    "decode return_lse is 1": (lambda: decode(return_lse=1), DTypeError, "return_lse: expected True or False, got 1"),
    "decode out is True": (lambda: decode(out=True), DTypeError, "out: expected a torch.Tensor"),
    "decode out has another shape": (lambda: decode(out=zeros(2, 4, 32)), ShapeError, r"out: expected shape \[2, 4, 64\], got \[2, 4, 32\]"),
    "decode out is bf16 for fp16": (lambda: decode(out=zeros(2, 4, 64, dtype=torch.bfloat16)), DTypeError, "out: .* got torch.bfloat16"),
    "decode out is elsewhere": (lambda: decode(out=zeros(2, 4, 64, device=META)), DeviceError, "out: expected device"),
    "decode out has a strided last dim": (lambda: decode(out=zeros(2, 4, 128)[..., ::2]), ShapeError, "out: the last dimension must be contiguous"),
    "decode config is text": (lambda: decode(config="fast"), DTypeError, "config: expected a AttentionConfig or a dict"),
    "decode config has an unknown field": (lambda: decode(config=config(tile=3)), UnsupportedError, r"config: tunables are .* unknown \['tile'\]"),
    "decode config lacks a field": (lambda: decode(config={"block_m": 16}), UnsupportedError, r"missing \['block_n', 'num_warps', 'num_stages'\]"),
    "decode block_m is 8": (lambda: decode(config=config(block_m=8)), RangeError, "config.block_m: expected a power of two from 16 to 128, got 8"),
    "decode block_n is 48": (lambda: decode(config=config(block_n=48)), RangeError, "config.block_n: expected a power of two"),
    "decode num_warps is 3": (lambda: decode(config=config(num_warps=3)), RangeError, "config.num_warps: expected a power of two"),
    "decode num_warps is text": (lambda: decode(config=config(num_warps="4")), RangeError, "config.num_warps: .* got '4'"),
    "decode num_stages is 0": (lambda: decode(config=config(num_stages=0)), RangeError, "config.num_stages: expected 1 to 8, got 0"),
    "decode split_len is odd": (lambda: decode(config=config(split_len=100)), RangeError, r"config.split_len: expected a multiple of block_n \(64\)"),
    "decode split_len is 0": (lambda: decode(config=config(split_len=0)), RangeError, "config.split_len"),
    "decode max_registers are 7": (lambda: decode(config=config(max_registers=7)), RangeError, "config.max_registers"),
    # write_kv
    "write k is no tensor": (lambda: write(k=None), DTypeError, "k: expected a torch.Tensor, got NoneType"),
    "write k has another shape": (lambda: write(k=zeros(3, 4, 64)), ShapeError, r"k: expected shape \[num_tokens, 2, 64\], got \[3, 4, 64\]"),
    "write k has two dims": (lambda: write(k=zeros(3, 128)), ShapeError, "k: expected shape"),
    "write k is of integers": (lambda: write(k=ints(3, 2, 64)), DTypeError, "k: expected torch.float32 or torch.float16 or torch.bfloat16"),
    "write k is elsewhere": (lambda: write(k=zeros(3, 2, 64, device=META)), DeviceError, "k: expected device"),
    "write k has a strided last dim": (lambda: write(k=zeros(3, 2, 128)[..., ::2]), ShapeError, "k: the last dimension must be contiguous"),
    "write v is no tensor": (lambda: write(v=3), DTypeError, "v: expected a torch.Tensor, got int"),
    "write v has other tokens": (lambda: write(v=zeros(4, 2, 64)), ShapeError, r"v: expected shape \[3, 2, 64\], got \[4, 2, 64\]"),
    "write v is float64": (lambda: write(v=zeros(3, 2, 64, dtype=torch.float64)), DTypeError, "v: .* got torch.float64"),
    "write v is elsewhere": (lambda: write(v=zeros(3, 2, 64, device=META)), DeviceError, "v: expected device"),
    "write v has a strided last dim": (lambda: write(v=zeros(3, 2, 128)[..., ::2]), ShapeError, "v: the last dimension must be contiguous"),
    "write cache is no cache": (lambda: write(cache=zeros(4, 16, 2, 64)), DTypeError, "cache: expected a tkv.KVCache, got Tensor"),
    "write slots are a list": (lambda: write(slot_mapping=[0, 1, 2]), DTypeError, "slot_mapping: expected a torch.Tensor"),
    "write slots are of other tokens": (lambda: write(slot_mapping=ints(2)), ShapeError, r"slot_mapping: expected shape \[3\], got \[2\]"),
    "write slots are of floats": (lambda: write(slot_mapping=zeros(3)), DTypeError, "slot_mapping: expected torch.int32 or torch.int64"),
    "write slots are elsewhere": (lambda: write(slot_mapping=ints(3, device=META)), DeviceError, "slot_mapping: expected device"),
    "write rope alone": (lambda: write(rope=object()), UnsupportedError, "positions: expected with rope, and rope with positions"),
    "write positions alone": (lambda: write(positions=ints(3)), UnsupportedError, "positions: expected with rope, and rope with positions"),
    "write rope is none": (lambda: write(rope=object(), positions=ints(3)), DTypeError, "rope: expected a tkv.Rope, got object"),
    # merge_states
    "merge outs is a number": (lambda: merge(outs=1.0), DTypeError, "outs: expected a tensor or a sequence of tensors, got float"),
    "merge outs holds a number": (lambda: merge(outs=[zeros(3, 16), 1.0]), DTypeError, "outs: expected a tensor or a sequence of tensors"),
    "merge has no parts": (lambda: merge(outs=[], lses=[]), ShapeError, "outs: expected at least one part, got none"),
    "merge has an empty stack": (lambda: merge(zeros(0, 3, 16), zeros(0, 3, dtype=F32)), ShapeError, "outs: expected at least one part"),
    "merge outs have one dim": (lambda: merge(outs=zeros(16)), ShapeError, r"outs: expected \[parts, ..., head_dim\], got \[16\]"),
    "merge outs have no numbers": (lambda: merge(outs=zeros(2, 3, 0)), ShapeError, "head_dim of at least 1"),
    "merge outs differ": (lambda: merge(outs=[zeros(3, 16), zeros(3, 32)]), ShapeError, r"outs\[1\]: expected shape \[3, 16\], got \[3, 32\]"),
    "merge outs differ in dtype": (lambda: merge(outs=[zeros(3, 16), zeros(3, 16, dtype=F32)]), DTypeError, r"outs\[1\]: expected torch.float16"),
    "merge outs differ in device": (lambda: merge(outs=[zeros(3, 16), zeros(3, 16, device=META)]), DeviceError, r"outs\[1\]: expected device"),
    "merge outs are of integers": (lambda: merge(outs=ints(2, 3, 16)), DTypeError, "outs: expected torch.float32"),
    "merge lses are None": (lambda: tkv.merge_states(zeros(2, 3, 16), None), DTypeError, "lses: expected a tensor or a sequence of tensors"),
    "merge lses have another shape": (lambda: merge(lses=zeros(2, 4, dtype=F32)), ShapeError, r"lses: expected shape \[2, 3\], got \[2, 4\]"),
    "merge lses are fp16": (lambda: merge(lses=zeros(2, 3)), DTypeError, "lses: expected torch.float32, got torch.float16"),
    "merge lses are elsewhere": (lambda: merge(lses=zeros(2, 3, dtype=F32, device=META)), DeviceError, "lses: expected device"),
    # KVCache
    "cache k is no tensor": (lambda: cache(k=[0]), DTypeError, "k: expected a torch.Tensor, got list"),
    "cache v is no tensor": (lambda: cache(v="v"), DTypeError, "v: expected a torch.Tensor, got str"),
    "cache k has three dims": (lambda: cache(k=zeros(4, 16, 64)), ShapeError, r"k: expected \[num_pages, page_size, num_kv_heads, head_dim\]"),
    "cache v has five dims": (lambda: cache(v=zeros(1, 4, 16, 2, 64)), ShapeError, r"v: expected \[num_pages"),
    "cache v has other pages": (lambda: cache(v=zeros(5, 16, 2, 64)), ShapeError, "v: expected the pages, tokens and heads of k"),
    "cache v has head_dim 8": (lambda: cache(v=zeros(4, 16, 2, 8)), UnsupportedError, "v_head_dim: expected a multiple of 8 from 16 to 576, got 8"),
    "cache v is elsewhere": (lambda: cache(v=zeros(4, 16, 2, 64, device=META)), DeviceError, "v: expected the device of k, .* got meta"),
    "cache k is float64": (lambda: cache(k=zeros(4, 16, 2, 64, dtype=torch.float64)), DTypeError, "k: torch.float64 does not say how"),
    "cache k is not of its format": (lambda: cache(format="bf16"), DTypeError, "k: bf16 is stored as torch.bfloat16, got torch.float16"),
    "cache head_dim is 20": (lambda: cache(*[zeros(4, 16, 2, 20)] * 2), UnsupportedError, "head_dim: expected a multiple of 8"),
    "cache has no heads": (lambda: cache(*[zeros(4, 16, 0, 64)] * 2), ShapeError, "k: expected at least one token a page and one KV head"),
    "cache has no tokens": (lambda: cache(*[zeros(4, 0, 2, 64)] * 2), ShapeError, "k: expected at least one token a page"),
    "cache k has a strided last dim": (lambda: cache(*[zeros(4, 16, 2, 128)[..., ::2]] * 2), ShapeError, "k: the last dimension must be contiguous"),
    "cache v has a strided last dim": (lambda: cache(v=zeros(4, 16, 2, 128)[..., ::2]), ShapeError, "v: the last dimension must be contiguous"),
    "cache has scales of a native format": (lambda: cache(k_scale=0.5), UnsupportedError, "k_scale: fp16 has no scales; leave it out, got 0.5"),
    "cache lacks dynamic scales": (lambda: cache(*quantised_data(), format=TOKEN_HEAD), DTypeError, r"k_scale: int8/token_head needs a torch.float32 tensor of shape \[4, 16, 2\], got None"),
    "cache of int8 without scales": (lambda: cache(*quantised_data()), UnsupportedError, "k_scale: int8/tensor needs calibrated scales"),
    "cache scales have another shape": (lambda: cache(*quantised_data(), *[zeros(4, 16, 3, dtype=F32)] * 2, format=TOKEN_HEAD), ShapeError, r"k_scale: .*\[4, 16, 2\], got \[4, 16, 3\]"),
    "cache scales are fp16": (lambda: cache(*quantised_data(), *[zeros(4, 16, 2)] * 2, TOKEN_HEAD), DTypeError, "k_scale: int8/token_head needs torch.float32, got torch.float16"),
    "cache scales tell no format": (lambda: cache(*quantised_data(), *[zeros(4, 16, 2)] * 2), UnsupportedError, r"k_scale: no int8 format has such scales for \[4, 16, 2, 64\], got \[4, 16, 2\] of torch.float16"),
    "cache scales are elsewhere": (lambda: cache(*quantised_data(), *[zeros(4, 16, 2, dtype=F32, device=META)] * 2), DeviceError, "k_scale: expected the device of k"),
    "cache v scales are a number": (lambda: cache(*quantised_data(), zeros(4, 16, 2, dtype=F32), 1.0, TOKEN_HEAD), DTypeError, "v_scale: int8/token_head needs"),
    "empty num_pages is negative": (lambda: KVCache.empty(-1, 16, 1, 64), RangeError, "num_pages: expected at least 0, got -1"),
    "empty page_size is 0": (lambda: KVCache.empty(1, 0, 1, 64), RangeError, "page_size: expected at least 1, got 0"),
    "empty num_kv_heads is a float": (lambda: KVCache.empty(1, 1, 2.0, 64), DTypeError, "num_kv_heads: expected an int, got 2.0"),
    "empty head_dim is a bool": (lambda: KVCache.empty(1, 1, 1, True), DTypeError, "head_dim: expected an int"),
    "empty v_head_dim is 584": (lambda: KVCache.empty(1, 1, 1, 64, v_head_dim=584), UnsupportedError, "v_head_dim: .* got 584"),
    "empty format is a number": (lambda: KVCache.empty(1, 1, 1, 64, 16), DTypeError, "format: expected one format or a pair"),
    "write to a view with other scales": (lambda: tkv.write_kv(zeros(1, 2, 64), zeros(1, 2, 64), cache(*[quantised_data()[0]] * 2, *zeros(2, 4, 16, 2, dtype=F32)), ints(1)), UnsupportedError, "cache: v is a view of k with scales of its own"),
    "empty has dynamic scales": (lambda: KVCache.empty(1, 1, 1, 64, TOKEN_HEAD, k_scale=1.0), UnsupportedError, "k_scale: .* writes its scales with the data"),
    "empty has scales of bf16": (lambda: KVCache.empty(1, 1, 1, 64, v_scale=1.0), UnsupportedError, "v_scale: bf16 has no scales"),
    "nbytes_for page_size is text": (lambda: KVCache.nbytes_for(1, "16", 1, 64), DTypeError, "page_size: expected an int, got '16'"),
    "nbytes_for format is unknown": (lambda: KVCache.nbytes_for(1, 16, 1, 64, "fp7"), UnsupportedError, "format: there is no 'fp7'"),
    "format is a number": (lambda: tkv.KVFormat.parse(8), DTypeError, "format: expected a string"),
    "format has a group": (lambda: tkv.KVFormat("int8", "token_head", 32), UnsupportedError, "format: there is no .int8/token_head32"),
}  # fmt: skip


def quantised_data(dtype=torch.int8):
    return [zeros(4, 16, 2, 64).to(dtype)] * 2


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_with_a_reason(name):
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message) as caught:
        call()
    assert isinstance(caught.value, TkvError) and isinstance(caught.value, (ValueError, TypeError))


def test_the_calls_that_the_table_changes_are_right_as_they_are():
    assert decode().shape == (2, 4, 64) and decode(quantised()).shape == (2, 4, 64)
    assert write() is None and write(quantised()) is None
    assert merge()[0].shape == (3, 16)
    assert cache().num_pages == 4 and cache(*quantised_data(), *[zeros(4, 16, 2, dtype=F32)] * 2).num_pages == 4
    assert decode(config=config()).shape == (2, 4, 64)


def test_a_table_of_more_keys_than_positions_is_refused():
    one_page = zeros(16).as_strided((1, 2**30, 1, 16), (0, 0, 0, 1))
    with pytest.raises(RangeError, match=r"page_table: expected at most 2\^30 keys a sequence, got 2 pages"):
        tkv.paged_decode(zeros(2, 1, 16), KVCache(one_page, one_page), ints(2, 2), ints(2))


def test_tensors_on_no_device_are_refused():
    meta = KVCache.empty(4, 16, 2, 64, "fp16", device=META)
    kv = zeros(3, 2, 64, device=META)
    calls = (
        lambda: tkv.paged_decode(zeros(2, 4, 64, device=META), meta, ints(2, 3, device=META), ints(2, device=META)),
        lambda: tkv.write_kv(kv, kv, meta, ints(3, device=META)),
        lambda: tkv.merge_states(zeros(2, 3, 16, device=META), zeros(2, 3, dtype=F32, device=META)),
    )
    for call in calls:
        with pytest.raises(DeviceError, match="tkv launches on CUDA and ROCm devices, got tensors on meta"):
            call()


def run_python(code, **environment):
    env = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "TKV_CHECK")}
    return subprocess.run([sys.executable, "-c", code], env={**env, **environment}, capture_output=True, text=True)


def test_cpu_tensors_without_the_interpreter_get_an_error_that_says_what_to_set():
    code = """
import torch, tkv
cache = tkv.KVCache.empty(2, 16, 1, 16, "fp16", device="cpu")
q, ints = torch.zeros(1, 1, 16, dtype=torch.float16), torch.zeros(1, 1, dtype=torch.int32)
calls = [
    lambda: tkv.paged_decode(q, cache, ints, ints[0]),
    lambda: tkv.write_kv(q, q, cache, ints[0]),
    lambda: tkv.merge_states(q.float(), torch.zeros(1, 1)),
]
for call in calls:
    try:
        call()
    except tkv.errors.DeviceError as error:
        assert "TRITON_INTERPRET=1" in str(error), error
    else:
        raise SystemExit("no error")
"""
    done = run_python(code)
    assert done.returncode == 0, done.stdout + done.stderr


def test_importing_tkv_imports_no_triton_and_touches_no_gpu():
    done = run_python("import sys, tkv, torch; assert 'triton' not in sys.modules; assert not torch.cuda.is_initialized()")
    assert done.returncode == 0, done.stderr


class TestChecksOnRequest:
    """TKV_CHECK=1 reads slots, pages and lengths, and refuses what otherwise is skipped."""

    @pytest.fixture(autouse=True)
    def checks(self, monkeypatch):
        monkeypatch.setenv("TKV_CHECK", "1")

    def table(self, *rows):
        return torch.tensor(rows, dtype=torch.int32, device=DEVICE)

    @pytest.mark.parametrize(("slots", "message"), [([0, 64, 1], r"slots from -1 to 63, got 64 at \[1\]"), ([0, -2, 1], r"got -2 at \[1\]"), ([3, 3, -1], "at most once, got 1 repeated")])  # fmt: skip
    def test_slots(self, slots, message):
        with pytest.raises(RangeError, match=f"slot_mapping: .*{message}"):
            write(slot_mapping=self.table(slots)[0])

    def test_slots_that_are_skipped_may_come_often(self):
        write(slot_mapping=self.table([-1, 5, -1])[0])

    @pytest.mark.parametrize(("lens", "message"), [([49, 1], "got 49 for sequence 0"), ([3, -1], "got -1 for sequence 1")])
    def test_lengths(self, lens, message):
        with pytest.raises(RangeError, match=f"seq_lens: expected 0 to 48 .*{message}"):
            decode(seq_lens=self.table(lens)[0])

    def test_positions(self):
        with pytest.raises(RangeError, match=r"kv_start: expected 0 to 2\^30 - 1, got -5 for sequence 1"):
            decode(kv_start=self.table([0, -5])[0])
        with pytest.raises(RangeError, match=r"q_start: expected .* got 1073741824 for sequence 0"):
            decode(q_start=self.table([2**30, 0])[0])

    @pytest.mark.parametrize(
        ("table", "options", "message"),
        [
            ([[0, 1, 2], [0, 4, 0]], {}, r"got 4 at \[1, 1\]"),
            ([[0, -1, 2], [0, 1, 0]], {}, r"got -1 at \[0, 1\]"),
            ([[9, 1, 2], [0, 1, 2]], {"window": 5, "sinks": 1}, r"got 9 at \[0, 0\]"),
        ],
    )
    def test_pages(self, table, options, message):
        with pytest.raises(RangeError, match=f"page_table: expected pages from 0 to 3 where keys are visible, {message}"):
            decode(page_table=self.table(*table), seq_lens=self.table([40, 20])[0], **options)

    def test_pages_that_no_row_sees_may_be_anything(self):
        decode(page_table=self.table([9, 1, 2], [0, -7, 99]), seq_lens=self.table([48, 16])[0], window=16)
        decode(page_table=self.table([0, 99, 2**31 - 1], [9, 9, 9]), seq_lens=self.table([40, 20])[0], q_start=self.table([15, -1])[0])
        decode(page_table=self.table([9, 1, 2], [9, 1, 2]), seq_lens=self.table([40, 40])[0], window=5, sinks=1, kv_start=self.table([1, 60])[0])
