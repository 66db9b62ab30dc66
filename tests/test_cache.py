"""KVCache and KVFormat: what is inferred, what is viewed, how large it is."""

import copy
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
EVERY = supported_formats()
BITS = {"fp32": 32, "fp16": 16, "bf16": 16, "fp8_e4m3": 8, "fp8_e5m2": 8, "int8": 8, "int4": 4}


def statics(name):
    """Static scales for K and V, where a format cannot do without."""
    return {"k_scale": 0.5, "v_scale": 0.25} if KVFormat.parse(name).is_static else {}


def partner(name):
    """A format for V beside a K of that name."""
    return "int4/token_head" if "page_channel" in name else name


def test_every_format_has_one_name():
    assert len(set(EVERY)) == len(EVERY) and set(FORMATS) < set(EVERY)
    for name in EVERY:
        assert str(KVFormat.parse(name)) == name
        assert KVFormat.parse(KVFormat.parse(name)) == KVFormat.parse(name)
        assert pickle.loads(pickle.dumps(KVFormat.parse(name))) == KVFormat.parse(name)


def test_what_a_format_says_about_itself():
    assert [KVFormat.parse(name).is_native for name in FORMATS] == [True, True, True, False, False, False]
    assert [KVFormat.parse(name).is_dynamic for name in FORMATS] == [False, False, False, False, True, True]
    shapes = {
        "bf16": None,
        "fp8_e4m3/tensor": (),
        "fp8_e5m2/head": (2,),
        "int8/channel": (2, 64),
        "int8/token_head": (5, 16, 2),
        "int8/group32": (5, 16, 2, 2),
        "int4/token_head": (5, 16, 2, 2),
        "int4/group64": (5, 16, 2, 1, 2),
        "int8/page_channel": (5, 2, 64, 2),
        "int4/page_channel": (5, 2, 64, 2),
    }
    for name, shape in shapes.items():
        assert KVFormat.parse(name).scale_shape(5, 16, 2, 64) == shape, name
        halves = shape is not None and (len(shape) > 3 or "int4" in name)
        assert KVFormat.parse(name).scale_dtype == (torch.float16 if halves else torch.float32), name


@pytest.mark.parametrize(
    "name",
    ["", "float16", "fp8", "fp8_e4m3/", "fp8_e4m3/tokens", "int8/token_head/x", "BF16", "/tensor", "fp16/tensor", "int8"]
    + ["int4/tensor", "int4/channel", "fp8_e4m3/channel", "fp8_e5m2/group32", "int8/group", "int8/group16", "int4/group128", "int8/head32"],
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


@pytest.mark.parametrize("name", EVERY)
def test_the_format_is_inferred_from_dtype_and_scales(name):
    pair = name, partner(name)
    cache = empty_cache(pair, "nhd", 2, 32, 3, 64, device=DEVICE)
    again = KVCache(cache.k, cache.v, cache.k_scale, cache.v_scale)
    assert (str(again.k_format), str(again.v_format)) == pair
    assert infer(cache.k, cache.k_scale, "k") == KVFormat.parse(name)


@pytest.mark.parametrize("name", EVERY)
def test_sizes_in_bytes(name):
    kind = KVFormat.parse(name)
    data = 7 * 16 * 2 * 64 * BITS[kind.dtype] // 8
    pair = 2 if kind.is_asymmetric else 1
    scales = {
        None: 0, "tensor": 4, "head": 2 * 4, "channel": 2 * 64 * 4, "token_head": 7 * 16 * 2 * 4, "page_channel": 7 * 2 * 64 * 4,
        "group": 7 * 16 * 2 * (64 // (kind.group_size or 1)) * 2 * pair,
    }[kind.scale]  # fmt: skip
    other = KVFormat.parse("bf16")
    cache = KVCache.empty(7, 16, 2, 64, (name, "bf16"), device=DEVICE, k_scale=0.5 if kind.is_static else None)
    assert cache.nbytes == KVCache.nbytes_for(7, 16, 2, 64, (name, "bf16")) == data + scales + 7 * 16 * 2 * 64 * 2
    dynamic = scales if kind.is_dynamic else 0
    assert cache.bytes_per_token * 7 * 16 == data + dynamic + other.bytes_per_page(16, 2, 64) * 7
    assert cache.num_slots == 7 * 16
    assert KVCache.nbytes_for(10**9, 16, 1, 64, (name, "bf16")) > 2**34, "no allocation happens"
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
    data, values = (torch.zeros(2, 4, 1, 16, device=DEVICE).to(torch.float8_e4m3fn) for _ in "kv")
    assert KVCache(data, values).k_scale.item() == 1.0
    cache = KVCache(data, values, 0.5, 2)
    assert (cache.k_scale.item(), cache.v_scale.item()) == (0.5, 2.0) and cache.v_scale.dtype == torch.float32
    mine = torch.tensor(0.25, device=DEVICE)
    assert KVCache(data, values, mine).k_scale.data_ptr() == mine.data_ptr(), "a tensor stays the caller's, to be set later"
    assert KVCache(data, values, mine.view(1)).k_scale.shape == ()
    assert KVCache.empty(1, 1, 1, 16, "fp8_e4m3/tensor", k_scale=0.125, device=DEVICE).k_scale.item() == 0.125
    for wrong in (0, -1.0, float("nan"), float("inf")):
        with pytest.raises(RangeError, match="v_scale: expected a positive number"):
            KVCache(data, values, 1.0, wrong)


def test_scales_have_strides_of_their_own():
    data = torch.zeros(2, 4, 3, 16, dtype=torch.int8, device=DEVICE)
    heads_first = torch.ones(2, 3, 4, device=DEVICE).transpose(1, 2)
    cache = KVCache(data, data, heads_first, heads_first)
    assert cache.k_scale.stride() == (12, 1, 4) and cache.k_scale.data_ptr() == heads_first.data_ptr()


def test_scales_of_heads_and_channels_may_be_a_number_for_all():
    cache = KVCache.empty(1, 16, 3, 32, ("int8/channel", "fp8_e5m2/head"), k_scale=0.5, device=DEVICE)
    assert cache.k_scale.shape == (3, 32) and cache.v_scale.tolist() == [1.0, 1.0, 1.0] and bool((cache.k_scale == 0.5).all())


@pytest.mark.parametrize("scale", ["tensor", "head", "channel"])
def test_static_int8_without_scales_is_refused(scale):
    with pytest.raises(UnsupportedError, match=f"k_scale: int8/{scale} needs calibrated scales"):
        KVCache.empty(1, 16, 1, 32, f"int8/{scale}")
    with pytest.raises(UnsupportedError, match=r"v_scale: .* needs calibrated scales"):
        KVCache.empty(1, 16, 1, 32, f"int8/{scale}", k_scale=1.0)
    data = torch.zeros(1, 16, 1, 32, dtype=torch.int8)
    with pytest.raises(UnsupportedError, match="k_scale: int8/tensor needs calibrated scales"):
        KVCache(data, data.clone())


def test_scales_that_kernels_cannot_read_are_refused():
    data = torch.zeros(2, 16, 2, 32, dtype=torch.uint8)
    good = torch.zeros(2, 16, 2, 2, dtype=torch.float16)
    apart = torch.zeros(2, 16, 2, 2, 2, dtype=torch.float16)[..., 0]
    odd = torch.zeros(2 * 16 * 2 * 2 + 1, dtype=torch.float16)[1:].view(2, 16, 2, 2)
    for bad, message in ((apart, "last 1 dimensions contiguous"), (odd, "even strides and offset")):
        with pytest.raises(ShapeError, match=f"k_scale: .*{message}"):
            KVCache(data, data.clone(), bad, good)
    groups = torch.zeros(2, 16, 4, 2, dtype=torch.float16).transpose(2, 3)
    with pytest.raises(ShapeError, match=r"v_scale: .*contiguous"):
        KVCache(*torch.zeros(2, 2, 16, 2, 128, dtype=torch.int8), groups.contiguous(), groups, "int8/group32")
    with pytest.raises(DTypeError, match=r"k_scale: int4/token_head needs torch.float16, got torch.float32"):
        KVCache(data, data.clone(), good.float(), good, "int4/token_head")
    with pytest.raises(UnsupportedError, match="k_scale: no int8 format has such scales"):
        KVCache(data.to(torch.int8), data.to(torch.int8), torch.zeros(3, 3), torch.zeros(3, 3))


def test_v_may_be_a_view_of_k_and_has_its_scales():
    k = torch.zeros(3, 16, 1, 576, dtype=torch.bfloat16, device=DEVICE)
    cache = KVCache(k, k[..., :512])
    assert cache.v_is_k and (cache.head_dim, cache.v_head_dim) == (576, 512) and cache.nbytes == k.numel() * 2
    assert cache.bytes_per_token == 576 * 2
    assert not KVCache(k, k[..., 64:]).v_is_k and not KVCache(k, k[..., :512].clone()).v_is_k
    codes, scale = k.to(torch.int8), torch.ones(3, 16, 1, device=DEVICE)
    for given in (None, scale):
        cache = KVCache(codes, codes[..., :512], scale, given)
        assert cache.v_is_k and str(cache.v_format) == "int8/token_head" and cache.bytes_per_token == 580
    fp8 = k.to(torch.float8_e4m3fn)
    assert KVCache(fp8, fp8[..., :512], 0.5).v_scale.item() == 0.5 and KVCache(fp8, fp8[..., :512], 0.5, 0.5).v_is_k
    # Two readings of the same codes: nothing that could be written.
    for cache in (KVCache(codes, codes[..., :512], scale, scale.clone()), KVCache(fp8, fp8[..., :512], 0.5, 0.25)):
        assert cache.shares_memory and not cache.v_is_k
        with pytest.raises(UnsupportedError, match="cache: v is a view of k with scales of its own"):
            tkv.write_kv(
                *(torch.zeros(1, 1, dim, device=DEVICE) for dim in (576, 512)), cache, torch.zeros(1, dtype=torch.int64, device=DEVICE)
            )
    nibbles, pair = torch.zeros(3, 16, 1, 32, dtype=torch.uint8), torch.zeros(3, 16, 1, 2, dtype=torch.float16)
    assert KVCache(nibbles, nibbles, pair).v_is_k
    with pytest.raises(UnsupportedError, match="v: cannot be a view of some dims of k in int4/token_head"):
        KVCache(nibbles, nibbles[..., :16], pair)


@pytest.mark.parametrize("head_dim", [16, 24, 80, 256, 264, 576])
def test_head_dims_that_are_supported(head_dim):
    cache = KVCache.empty(1, 1, 1, head_dim, ("int8/token_head", "fp16"), v_head_dim=head_dim + 8 if head_dim < 570 else 16, device=DEVICE)
    assert cache.head_dim == head_dim != cache.v_head_dim


@pytest.mark.parametrize("head_dim", [8, 20, 100, 584])
def test_head_dims_that_are_not(head_dim):
    with pytest.raises(UnsupportedError, match=f"head_dim: expected a multiple of 8 from 16 to 576, got {head_dim}"):
        KVCache.empty(1, 1, 1, head_dim)
    with pytest.raises(UnsupportedError, match="head_dim"):
        KVCache.nbytes_for(1, 1, 1, head_dim)


@pytest.mark.parametrize(
    ("name", "page_size", "head_dim", "message"),
    [
        ("int4/token_head", 16, 24, "head_dim: int4/token_head needs a multiple of 16, got 24"),
        ("int4/group32", 16, 80, "head_dim: int4/group32 needs a multiple of 32, got 80"),
        ("int8/group64", 16, 96, "head_dim: int8/group64 needs a multiple of 64, got 96"),
        ("int8/page_channel", 8, 64, "page_size: int8/page_channel needs a power of two of at least 16, got 8"),
        ("int4/page_channel", 48, 64, "page_size: int4/page_channel needs a power of two of at least 16, got 48"),
    ],
)
def test_geometries_that_a_format_cannot_hold_are_refused(name, page_size, head_dim, message):
    with pytest.raises(UnsupportedError, match=message):
        KVCache.empty(1, page_size, 1, head_dim, (name, "bf16"))
    with pytest.raises(UnsupportedError, match="format: int4/page_channel is for K"):
        KVCache.empty(1, 16, 1, 64, "int4/page_channel")


def test_the_version_and_the_public_names():
    assert tkv.__version__.count(".") == 2
    assert all(hasattr(tkv, name) for name in tkv.__all__)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "int8/token_head", "int4/group32"])
def test_a_used_cache_can_be_pickled_and_saved(kind, tmp_path):
    cache = empty_cache(kind, "nhd", 2, 4, 1, 32, device=DEVICE)
    rng = torch.Generator().manual_seed(1)
    table, lens, slots = (torch.tensor(x, device=DEVICE) for x in ([[1, 0]], [6], [4, 5, 6, 7, 0, 1]))
    rows = [torch.randn(6, 1, 32, generator=rng).to(DEVICE) for _ in range(4)]
    tkv.write_kv(rows[0], rows[1], cache, slots)
    tkv.gather_window(cache, table, lens, window=None)
    tkv.paged_decode(torch.zeros(1, 1, 32, device=DEVICE), cache, table, lens)
    torch.save(cache, tmp_path / "cache.pt")
    for again in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache), torch.load(tmp_path / "cache.pt", weights_only=False)):
        tkv.write_kv(rows[2], rows[3], again, slots)
        k, v, *_ = tkv.gather_window(again, table, lens, window=None, dtype=torch.float32)
        assert bool(((k[:6] - rows[2]).abs() < 0.6).all()) and bool(((v[:6] - rows[3]).abs() < 0.6).all())
    old, *_ = tkv.gather_window(cache, table, lens, window=None, dtype=torch.float32)
    assert bool(((old[:6] - rows[0]).abs() < 0.6).all()), "the first is as it was"


def test_v_is_a_view_of_k_after_pickling_too():
    k = torch.zeros(2, 4, 1, 64, dtype=torch.int8, device=DEVICE)
    cache = KVCache(k, k[..., :32], torch.ones(2, 4, 1, device=DEVICE))
    for used in (False, True):
        again = pickle.loads(pickle.dumps(cache))
        assert again.v_is_k and again.v.data_ptr() == again.k.data_ptr() and again.v_scale is again.k_scale
        tkv.write_kv(torch.ones(1, 1, 64, device=DEVICE), torch.zeros(1, 1, 32, device=DEVICE), again, torch.tensor([5], device=DEVICE))
        assert again.v[1, 1].unique().tolist() == [127]
        cache = again if used else cache


def test_static_scales_that_are_no_scales_are_found_on_request(monkeypatch):
    cache = KVCache.empty(1, 16, 2, 32, "int8/head", k_scale=torch.tensor([0.5, -0.5], device=DEVICE), v_scale=1.0, device=DEVICE)
    table, lens = torch.zeros(1, 1, dtype=torch.int32, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    monkeypatch.setenv("TKV_CHECK", "1")
    with pytest.raises(RangeError, match=r"cache.k_scale: expected positive numbers .* got \[0.5, -0.5\]"):
        tkv.gather_window(cache, table, lens, window=1)
