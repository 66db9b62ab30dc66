"""KVCache and KVFormat: what is inferred, what is viewed, how large it is."""

import pickle
import re

import pytest
import torch
from caches import FORMATS, LAYOUTS, empty_cache
from problems import test_device

import tkv
from tkv import KVCache, KVFormat
from tkv.errors import DTypeError, RangeError, ShapeError, UnsupportedError
from tkv.formats import infer, parse_pair, supported_formats

DEVICE = test_device()
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3/tensor": 1, "fp8_e4m3/token_head": 1, "int8/token_head": 1}


def test_the_formats_of_this_version():
    assert supported_formats() == list(FORMATS)
    for name in FORMATS:
        assert str(KVFormat.parse(name)) == name
        assert KVFormat.parse(KVFormat.parse(name)) == KVFormat.parse(name)
        assert pickle.loads(pickle.dumps(KVFormat.parse(name))) == KVFormat.parse(name)


def test_what_a_format_says_about_itself():
    assert [KVFormat.parse(name).is_native for name in FORMATS] == [True, True, True, False, False, False]
    assert [KVFormat.parse(name).is_dynamic for name in FORMATS] == [False, False, False, False, True, True]
    assert KVFormat("int8", "token_head").scale_shape(5, 16, 2) == (5, 16, 2)
    assert KVFormat("fp8_e4m3", "tensor").scale_shape(5, 16, 2) == ()
    assert KVFormat("bf16").scale_shape(5, 16, 2) is None


@pytest.mark.parametrize(
    "name",
    ["int4/group32", "int8/channel", "int8/tensor", "fp8_e5m2/tensor", "int8/group32", "fp8_e4m3/head", "fp8_e4m3/token_head32"],
)
def test_formats_of_later_versions_are_refused_by_name(name):
    with pytest.raises(UnsupportedError, match="not in this version"):
        KVFormat.parse(name)


@pytest.mark.parametrize(
    "name", ["", "float16", "fp8", "fp8_e4m3/", "fp8_e4m3/tokens", "int8/token_head/x", "BF16", "/tensor", "fp16/tensor", "int8"]
)
def test_what_is_no_format_is_refused(name):
    with pytest.raises(UnsupportedError, match="format: "):
        KVFormat.parse(name)
    with pytest.raises(UnsupportedError, match="format: "):
        KVCache.empty(1, 1, 1, 16, name)


def test_a_pair_of_formats_is_one_of_k_and_one_of_v():
    assert parse_pair(("int8/token_head", KVFormat("bf16"))) == (KVFormat("int8", "token_head"), KVFormat("bf16"))
    for wrong in (("bf16",), ("bf16",) * 3, 8, None, {"k": "bf16"}):
        with pytest.raises(DTypeError, match="format"):
            parse_pair(wrong)


@pytest.mark.parametrize("name", FORMATS)
def test_the_format_is_inferred_from_dtype_and_scales(name):
    cache = empty_cache(name, "nhd", 2, 4, 3, 32, device=DEVICE)
    again = KVCache(cache.k, cache.v, cache.k_scale, cache.v_scale)
    assert (str(again.k_format), str(again.v_format)) == (name, name)
    assert infer(cache.k, cache.k_scale, "k") == KVFormat.parse(name)


@pytest.mark.parametrize("name", FORMATS)
def test_sizes_in_bytes(name):
    data, scales = 7 * 16 * 2 * 48 * BYTES[name], 7 * 16 * 2 * 4 if name.endswith("token_head") else 4 if name.endswith("tensor") else 0
    cache = KVCache.empty(7, 16, 2, 48, name, device=DEVICE)
    assert cache.nbytes == KVCache.nbytes_for(7, 16, 2, 48, name) == 2 * (data + scales)
    assert cache.bytes_per_token == 2 * 2 * (48 * BYTES[name] + (4 if name.endswith("token_head") else 0))
    assert cache.num_slots == 7 * 16
    assert KVCache.nbytes_for(10**9, 1, 1, 16, name) > 2**34, "no allocation happens"
    assert name in repr(cache) and f"{cache.nbytes:,}" in repr(cache)


def test_a_new_cache_is_on_the_device_and_in_the_shape_asked_for():
    cache = KVCache.empty(3, 5, 2, 24, "fp8_e4m3/token_head", device="meta")
    assert cache.k.shape == cache.v.shape == (3, 5, 2, 24) and cache.k.is_meta and cache.v_scale.shape == (3, 5, 2)
    assert (cache.num_pages, cache.page_size, cache.num_kv_heads, cache.head_dim, cache.v_head_dim) == (3, 5, 2, 24, 24)
    assert not cache.is_native and KVCache.empty(0, 16, 1, 256, device=DEVICE).is_native
    assert KVCache.empty(1, 1, 1, 16, ("fp16", KVFormat("fp16")), v_head_dim=16, device=DEVICE).k.dtype == torch.float16


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["bf16", "int8/token_head"])
def test_a_cache_is_a_view_of_the_callers_tensors(name, layout):
    cache = empty_cache(name, layout, 3, 4, 2, 32, device=DEVICE)
    for t in (cache.k, cache.v):
        number = torch.full((), 3.0, device=DEVICE).to(t.dtype)
        t[2, 3, 1, 31] = number
    again = KVCache(cache.k, cache.v, cache.k_scale, cache.v_scale)
    for a, b in ((again.k, cache.k), (again.v, cache.v), (again.k_scale, cache.k_scale)):
        if a is not None:
            assert a.data_ptr() == b.data_ptr()
            assert all(x == y for x, y, size in zip(a.stride(), b.stride(), a.shape) if size > 1)
    words, whole = again.words[0], again.bytes[0]
    assert words.data_ptr() == whole.data_ptr() == cache.k.data_ptr()
    if name == "bf16":
        assert words is again.k and whole is again.k
    else:
        assert words.dtype == torch.int16 and words.shape == (3, 4, 2, 16) and whole.dtype == torch.uint8
        # The number 3 in the high byte, above the poison of an unwritten slot.
        assert words[2, 3, 1, 15].item() == 3 * 256 + 0x80


def test_fp8_may_come_as_its_bytes():
    data = torch.zeros(2, 4, 1, 16, dtype=torch.uint8, device=DEVICE)
    cache = KVCache(data, data.clone(), format="fp8_e4m3/tensor")
    assert cache.k.dtype == torch.float8_e4m3fn and cache.k.data_ptr() == data.data_ptr()
    with pytest.raises(DTypeError, match=r"k: torch\.uint8 does not say"):
        KVCache(data, data)
    with pytest.raises(DTypeError, match=r"k: int8/token_head is stored as torch.int8, got torch.uint8"):
        KVCache(data, data, format="int8/token_head")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_fnuz_numbers_are_refused_by_name(dtype):
    data = torch.zeros(2, 4, 1, 16, dtype=torch.uint8).view(dtype)
    with pytest.raises(UnsupportedError, match=re.escape(f"k: {dtype} holds FNUZ numbers")):
        KVCache(data, data)
    with pytest.raises(DTypeError, match=r"stored as torch\.float8_e4m3fn"):
        KVCache(data, data, format="fp8_e4m3/tensor")


def test_8_bit_caches_are_read_as_16_bit_words_and_need_even_strides():
    odd_offset = torch.zeros(2 * 4 * 16 + 1, dtype=torch.int8, device=DEVICE)[1:].view(2, 4, 1, 16)
    odd_stride = torch.zeros(2, 4, 1, 17, dtype=torch.int8, device=DEVICE)[..., :16]
    fine = torch.zeros(2, 4, 1, 16, dtype=torch.int8, device=DEVICE)
    scale = torch.ones(2, 4, 1, device=DEVICE)
    for bad in (odd_offset, odd_stride):
        with pytest.raises(ShapeError, match=r"k: .* needs even strides and offset"):
            KVCache(bad, fine, scale, scale)
        with pytest.raises(ShapeError, match=r"v: .* needs even strides and offset"):
            KVCache(fine, bad, scale, scale)
    # The stride of a dimension of size 1 is never used: here that of the heads is odd.
    single = torch.zeros(2 * 4 * 16, dtype=torch.int8, device=DEVICE).as_strided((2, 4, 1, 16), (64, 16, 7, 1))
    assert KVCache(single, fine, scale, scale).words[0].shape == (2, 4, 1, 8)
    # 16-bit numbers are read as they are.
    native = torch.zeros(2, 4, 1, 17, dtype=torch.float16, device=DEVICE)[..., 1:]
    assert KVCache(native, native).k.storage_offset() == 1


def test_static_scales_may_be_numbers_or_tensors_or_left_out():
    data = torch.zeros(2, 4, 1, 16, device=DEVICE).to(torch.float8_e4m3fn)
    assert KVCache(data, data).k_scale.item() == 1.0
    cache = KVCache(data, data, 0.5, 2)
    assert (cache.k_scale.item(), cache.v_scale.item()) == (0.5, 2.0) and cache.v_scale.dtype == torch.float32
    mine = torch.tensor(0.25, device=DEVICE)
    assert KVCache(data, data, mine).k_scale.data_ptr() == mine.data_ptr(), "a tensor stays the caller's, to be set later"
    assert KVCache(data, data, mine.view(1)).k_scale.shape == ()
    assert KVCache.empty(1, 1, 1, 16, "fp8_e4m3/tensor", k_scale=0.125, device=DEVICE).k_scale.item() == 0.125
    for wrong in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(RangeError, match="v_scale: expected a positive number"):
            KVCache(data, data, 1.0, wrong)


def test_scales_have_strides_of_their_own():
    data = torch.zeros(2, 4, 3, 16, dtype=torch.int8, device=DEVICE)
    heads_first = torch.ones(2, 3, 4, device=DEVICE).transpose(1, 2)
    cache = KVCache(data, data, heads_first, heads_first)
    assert cache.k_scale.stride() == (12, 1, 4) and cache.k_scale.data_ptr() == heads_first.data_ptr()


@pytest.mark.parametrize("head_dim", [16, 24, 80, 256])
def test_head_dims_that_are_supported(head_dim):
    assert KVCache.empty(1, 1, 1, head_dim, "int8/token_head", device=DEVICE).head_dim == head_dim


@pytest.mark.parametrize("head_dim", [8, 20, 100, 264, 576])
def test_head_dims_that_are_not(head_dim):
    with pytest.raises(UnsupportedError, match=f"head_dim: expected a multiple of 8 from 16 to 256, got {head_dim}"):
        KVCache.empty(1, 1, 1, head_dim)
    with pytest.raises(UnsupportedError, match="head_dim"):
        KVCache.nbytes_for(1, 1, 1, head_dim)


def test_the_version_and_the_public_names():
    assert tkv.__version__.count(".") == 2
    assert all(hasattr(tkv, name) for name in tkv.__all__)
