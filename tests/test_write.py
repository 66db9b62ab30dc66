"""write_kv is bit-exact: what it stores is what the reference stores, whatever comes in."""

import ctypes
import mmap

import numpy as np
import pytest
import torch
from caches import LAYOUTS, bits, empty_cache, poison_
from problems import test_device

import tkv
from tkv import reference
from tkv.errors import UnsupportedError
from tkv.formats import supported_formats

DEVICE = test_device()
WRITABLE = [kind for kind in supported_formats() if "page_channel" not in kind]
QUANTIZED = [kind for kind in WRITABLE if "/" in kind]
# Triton's interpreter converts bfloat16 numbers below this to something else, on the way in and on the way out.
LEAST_BF16 = 2.0**-126 if DEVICE.type == "cpu" else 0.0


def new_rows(tokens, heads, dim, dtype=torch.float32, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(tokens, heads, dim, generator=rng).to(dtype).to(DEVICE) for _ in range(2))


def slots_of(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def assert_same(a, b, what):
    """Equal bit for bit, but for the payload of a NaN."""
    if a is None or b is None:
        assert a is b
        return
    numbers_a, numbers_b = a.float(), b.float()
    if a.dtype == torch.bfloat16:
        numbers_a, numbers_b = (t.where(~(numbers_b.abs() < LEAST_BF16), 0.0) for t in (numbers_a, numbers_b))
    same = (numbers_a == numbers_b) & (numbers_a.signbit() == numbers_b.signbit()) | (numbers_a.isnan() & numbers_b.isnan())
    assert same.all(), f"{what}: {(~same).sum().item()} differ, first {a[~same][:4].tolist()}, expected {b[~same][:4].tolist()}"


def check(kind, k, v, slots, page_size=4, pages=4, layout="nhd", **scales):
    """Write by the kernel and by the reference, each into a cache full of poison; the caches are then the same. Gives the kernel's."""
    caches = [empty_cache(kind, layout, pages, page_size, k.shape[1], k.shape[2], **scales, device=DEVICE) for _ in range(2)]
    before = [bits(t) for t in (k, v)]
    tkv.write_kv(k, v, caches[0], slots)
    reference.write_kv(k, v, caches[1], slots)
    for name in ("k", "v", "k_scale", "v_scale"):
        assert_same(getattr(caches[0], name), getattr(caches[1], name), f"{kind} {name}")
    assert all(torch.equal(bits(t), old) for t, old in zip((k, v), before)), "an input was modified"
    return caches[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", WRITABLE)
def test_what_is_stored_is_what_the_reference_stores(kind, dtype):
    scales = {"k_scale": 0.05, "v_scale": 0.3} if kind.startswith("fp8") and tkv.KVFormat.parse(kind).is_static else {}
    for dim in (128, 192 if "group" in kind else 80):
        check(kind, *new_rows(5, 3, dim, dtype), slots_of([9, 0, 15, 3, 7]), **scales)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["bf16", "fp8_e4m3/token_head", "int8/channel", "int8/group32", "int4/token_head", "int4/group32"])
def test_strides_of_every_layout_are_honoured(kind, layout):
    check(kind, *new_rows(3, 2, 32), slots_of([5, 1, 8]), page_size=3, layout=layout)


@pytest.mark.parametrize("heads", [1, 5, 40])
def test_any_number_of_heads_is_written(heads):
    check("int8/token_head", *new_rows(1, heads, 128), slots_of([2]))
    check("fp16", *new_rows(1, heads, 256, torch.bfloat16), slots_of([2]))


def test_what_lies_around_the_cache_is_not_touched():
    buffer = poison_(torch.empty(3, 2, 4, 2, 48, dtype=torch.int8)).to(DEVICE)
    scale = torch.full((2, 3, 4, 4), 5.0, device=DEVICE)
    cache = tkv.KVCache(buffer[:, 0, :, :, 8:40], buffer[:, 1, :, :, 8:40], scale[0, :, :, 1:3], scale[1, :, :, 1:3])
    tkv.write_kv(*new_rows(2, 2, 32), cache, slots_of([4, 11]))
    assert bool((buffer[..., :8] == -128).all()) and bool((buffer[..., 40:] == -128).all())
    assert bool((scale[..., [0, 3]] == 5).all())
    written = torch.zeros(12, dtype=torch.bool)
    written[[4, 11]] = True
    assert torch.equal((buffer[:, 0, :, 0, 8] != -128).flatten().cpu(), written)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_outside_of_the_cache_are_skipped(dtype):
    beyond = 2**31 - 1 if dtype == torch.int32 else 2**40
    for kind in ("fp16", "fp8_e4m3/token_head"):
        cache = check(kind, *new_rows(6, 1, 16), slots_of([-1, 16, 3, beyond, -(2**31), -5], dtype))
        stored = cache.k.float()[:, :, 0, 0].flatten()
        assert (~stored.isnan()).nonzero().flatten().tolist() == [3]


def test_no_tokens_and_no_pages_are_fine():
    check("bf16", *new_rows(0, 2, 16), slots_of([]))
    check("int8/token_head", *new_rows(2, 2, 16), slots_of([0, 5]), pages=0)


def test_slices_of_packed_projections_are_read_in_place():
    qkv = torch.randn(3, (4 + 2 + 2) * 32 + 5, device=DEVICE).to(torch.bfloat16)
    k = qkv[:, 4 * 32 : 6 * 32].unflatten(1, (2, 32))
    v = qkv[:, 6 * 32 : 8 * 32].unflatten(1, (2, 32))
    slots = slots_of([7, 99, 0, 99, 5, 99])[::2]
    cache = check("bf16", k, v, slots)
    assert torch.equal(cache.v[1, 1], v[2])
    check("int8/token_head", k, v, slots)
    heads_first = torch.randn(2, 3, 32, device=DEVICE).transpose(0, 1)
    check("fp8_e4m3/token_head", heads_first, heads_first, slots)


def hard_rows(dim):
    """Rows of numbers that are hard to store, by name."""
    channels = torch.arange(dim)
    noise = torch.sin(channels * 1.7) * 0.1
    rows = {
        "constant": torch.full((dim,), 0.7),
        "zero": torch.zeros(dim),
        "negative zero": torch.full((dim,), -0.0),
        "one-hot": torch.eye(dim)[3] * -5,
        "outlier": torch.linspace(-1, 1, dim).index_fill(0, torch.tensor([7]), 3e4),
        "alternating": torch.tensor([1.0, -1.0]).repeat(dim // 2) * 127,
        "subnormal": torch.linspace(-1e-39, 1e-39, dim),
        "below any scale": torch.full((dim,), 1e-45),
        "below half": torch.linspace(-1e-7, 1e-7, dim),
        "ties": channels / 2 + 0.25,
        "huge": torch.linspace(-1, 1, dim) * 3.4e38,
        "largest halves": torch.linspace(-1, 1, dim) * 65504,
        "beyond halves": torch.linspace(6e4, 7e4, dim),
        "1e6": torch.full((dim,), 1e6),
        "far from zero": torch.linspace(99.9, 100.0, dim),
    }
    return rows | {f"outlier at {at}": torch.where(channels == at, 30.0, noise) for at in range(dim)}


@pytest.mark.parametrize("kind", WRITABLE)
def test_numbers_that_are_hard_to_store(kind):
    dim = 64
    x = torch.stack([*hard_rows(dim).values()])[:, None].expand(-1, 2, -1).to(DEVICE)
    is_fp8 = kind.startswith("fp8") and tkv.KVFormat.parse(kind).is_static
    for scale in (1.0, 0.3) if is_fp8 else (None,):
        scales = {} if scale is None else {"k_scale": scale, "v_scale": scale}
        cache = check(kind, x, x.flip(2).contiguous(), slots_of(list(range(len(x)))), pages=len(x) // 4 + 1, **scales)
        table, lens = torch.arange(cache.num_pages, device=DEVICE)[None], slots_of([len(x)])
        read = tkv.gather_window(cache, table, lens, window=None, dtype=torch.float32)
        assert not read[0].isnan().any() and not read[1].isnan().any(), "nothing but NaN becomes NaN"
        if not cache.is_native:
            assert bool(read[0].isfinite().all()), "a code of a finite number decodes to a finite one"


def allowed_error(x, kind, scale):
    """How far a number that goes through a format may come back: half a step of it, and the rounding of its scales. float64."""
    form, size = tkv.KVFormat.parse(kind), x.double().abs()
    if form.is_native:
        digits, least = {"fp32": (24, 149), "fp16": (11, 25), "bf16": (8, 134)}[form.dtype]
        # Below 2^-126 Triton's interpreter converts bfloat16 wrongly.
        return size * 2.0**-digits + 2.0**-least + (LEAST_BF16 if form.dtype == "bf16" else 0.0)
    if form.is_asymmetric:
        step, minimum = reference.storage._of_dims(scale, form)
        half = step.double() / 2 + minimum.double().abs() * 2.0**-11 + 2.0**-24 + 15 * (step.double() * 2.0**-11 + 2.0**-25)
    else:
        step = reference.storage._of_dims(scale, form)[0].double()
        digits, least = {"int8": (60, 1), "fp8_e4m3": (4, 10), "fp8_e5m2": (3, 17)}[form.dtype]
        half = size * 2.0**-digits + step * 2.0**-least * (1 + 1e-5)
        # The scale itself is rounded, in float16 or as a float32 that may be subnormal.
        half = half + reference.LARGEST[form.dtype] * (step * 2.0**-11 + 2.0**-25 if form.is_rounded else 2.0**-149)
    return half + (size * 2.0**-11 + 2.0**-25 if form.is_rounded else size * 2.0**-22)


@pytest.mark.parametrize("kind", WRITABLE)
def test_what_comes_back_is_within_half_a_step(kind):
    form = tkv.KVFormat.parse(kind)
    rows = {name: row for name, row in hard_rows(64).items() if row.abs().max() < 6e4}
    x = torch.stack([*rows.values()])[:, None].to(DEVICE)
    largest = float(x.abs().max()) / (reference.LARGEST.get(form.dtype) or 1.0)
    scales = {"k_scale": largest, "v_scale": largest} if form.is_static else {}
    if form.is_static:
        scales = {name: torch.full(form.scale_shape(1, 1, 1, 64), value, device=DEVICE) for name, value in scales.items()}
    cache = empty_cache(kind, "nhd", len(x), 1, 1, 64, **scales, device=DEVICE)
    tkv.write_kv(x, -x, cache, slots_of(list(range(len(x)))))
    k, v, *_ = tkv.gather_window(
        cache, torch.arange(len(x), device=DEVICE)[None], slots_of([len(x)]), window=None, dtype=torch.float32
    )
    for got, expected, scale in ((k, x, cache.k_scale), (v, -x, cache.v_scale)):
        error = (got - expected).double().abs()
        scale = scale[:, 0] if form.is_dynamic else scale
        wrong = error > allowed_error(expected, kind, scale)
        at = [*rows][int(wrong.nonzero()[0, 0])] if wrong.any() else ""
        assert not wrong.any(), f"{at}: {error[wrong][:3].tolist()} at {expected[wrong][:3].tolist()}"


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_a_bad_number_changes_no_other_token_and_no_other_head(kind, bad):
    k, v = new_rows(3, 3, 64)
    clean = check(kind, k, v, slots_of([0, 1, 2]))
    k[1, 1, 5] = v[1, 1, 0] = bad
    cache = check(kind, k, v, slots_of([0, 1, 2]))
    for a, b in ((cache.k, clean.k), (cache.v, clean.v), (cache.k_scale, clean.k_scale), (cache.v_scale, clean.v_scale)):
        if a.dim() > 2:
            untouched = torch.ones(3, 3, dtype=torch.bool, device=DEVICE)
            untouched[1, 1] = False
            assert torch.equal(bits(a.flatten(0, 1)[:3][untouched]), bits(b.flatten(0, 1)[:3][untouched]))


@pytest.mark.parametrize("kind", ["fp8_e4m3/token_head", "int8/token_head"])
def test_nan_and_inf_do_not_enter_a_scale(kind):
    k, v = new_rows(1, 1, 16)
    k[0, 0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 5.0])
    k[0, 0, 4:].clamp_(-4, 4)
    cache = check(kind, k, v, slots_of([0]))
    largest = 448 if kind.startswith("fp8") else 127
    assert cache.k_scale[0, 0, 0].item() == np.float32(5.0) / np.float32(largest)
    code = cache.k[0, 0, 0].float().tolist()
    assert code[1:4] == [largest, -largest, largest]
    assert code[0] == 0 if kind.startswith("int8") else np.isnan(code[0])


def every_16_bit_number(dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return x.where(~(x.float().abs() < LEAST_BF16), 0.0) if dtype == torch.bfloat16 else x


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_goes_through_fp8_like_a_saturating_cast(dtype, fp8):
    x = every_16_bit_number(dtype).reshape(1, 256, 256).to(DEVICE)
    kind = "fp8_e4m3/tensor" if fp8 == torch.float8_e4m3fn else "fp8_e5m2/tensor"
    cache = empty_cache(kind, "nhd", 1, 1, 256, 256, 1.0, 1.0, device=DEVICE)
    tkv.write_kv(x, x.flip(2).contiguous(), cache, slots_of([0]))
    largest = torch.finfo(fp8).max
    expected = x[0].float().clamp(-largest, largest).to(fp8).view(torch.uint8)
    finite = ~x[0].isnan()
    for data, want, numbers in ((cache.k, expected, finite), (cache.v, expected.flip(1), finite.flip(1))):
        got = data[0, 0].view(torch.uint8)
        assert torch.equal(got[numbers], want[numbers])
        assert bool(got.view(fp8)[~numbers].isnan().all()), "NaN stays NaN"


@pytest.mark.parametrize("kind", [kind for kind in WRITABLE if tkv.KVFormat.parse(kind).is_dynamic])
def test_every_16_bit_number_goes_through_dynamic_scales(kind):
    # In order, a head holds numbers of one magnitude; shuffled, of all.
    x = every_16_bit_number(torch.bfloat16)
    shuffled = x[torch.randperm(2**16, generator=torch.Generator().manual_seed(1))]
    check(kind, x.reshape(1, 256, 256).to(DEVICE), shuffled.reshape(1, 256, 256).to(DEVICE), slots_of([0]), page_size=1, pages=1)


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
def test_native_formats_round_to_nearest_even(kind):
    low = torch.tensor([0x7FFF, 0x8000, 0x8001, 0x18000, 0x0FFF, 0x1000, 0x1001, 0x3000], dtype=torch.int32)
    x = ((torch.arange(-256, 256, dtype=torch.int32) << 23)[:, None] | low[None, :]).view(torch.float32).reshape(1, 16, 256).to(DEVICE)
    check(kind, x, x, slots_of([0]), page_size=1, pages=1)


@pytest.mark.parametrize("kind", ["int8/token_head", "fp8_e4m3/token_head", "fp8_e4m3/tensor"])
def test_writing_again_is_the_same_and_reading_gives_the_numbers_back(kind):
    k, v = new_rows(4, 2, 64)
    cache = check(kind, k, v, slots_of([0, 1, 2, 3]))
    step = {"int8/token_head": 1 / 254, "fp8_e4m3/token_head": 1 / 16, "fp8_e4m3/tensor": 1 / 16}[kind]
    read = reference.dequantize(cache.k[0], cache.k_scale[0] if cache.k_scale.dim() else cache.k_scale, cache.k_format)
    assert bool(((read - k).abs() <= step * k.abs().amax(-1, keepdim=True) + 1e-3).all())


def test_the_last_page_of_a_cache_beyond_2_gib_is_written_and_read():
    """The offset of a page does not fit 32 bits. The scales of all pages share their memory, and V is a view of K."""
    heads, dim, page_size = 2, 64, 16
    page = page_size * heads * dim
    pages = 2**31 // page + 3
    if DEVICE.type == "cuda":
        buffer = torch.empty(pages * page, dtype=torch.int8, device=DEVICE)
    else:
        memory = mmap.mmap(-1, pages * page)
        buffer = torch.frombuffer((ctypes.c_byte * (pages * page)).from_buffer(memory), dtype=torch.int8)
    data = buffer.view(pages, page_size, heads, dim)
    scale = torch.empty_strided((pages, page_size, heads), (0, heads, 1), device=DEVICE)
    cache = tkv.KVCache(data, data, scale)
    assert (pages - 1) * cache.k.stride(0) > 2**31
    k, _ = new_rows(3, heads, dim)
    first = (pages - 1) * page_size
    tkv.write_kv(k, k, cache, slots_of([first, first + 1, first + 2]))
    expected = reference.encode(k, cache.k_format, reference.scales_of(k, cache.k_format))
    assert torch.equal(data[-1, :3], expected)

    q = torch.randn(1, heads, dim, device=DEVICE)
    table = torch.tensor([[pages - 1]], dtype=torch.int32, device=DEVICE)
    out = tkv.paged_decode(q, cache, table, torch.tensor([3], dtype=torch.int32, device=DEVICE))
    ref, *_ = reference.paged_decode(q, cache, table, torch.tensor([3]))
    torch.testing.assert_close(out.double(), ref, rtol=1e-4, atol=1e-4)


def test_keys_with_scales_of_pages_are_not_written_by_tokens():
    cache = tkv.KVCache.empty(2, 16, 1, 32, ("int4/page_channel", "int4/group32"), device=DEVICE)
    with pytest.raises(UnsupportedError, match="cache: int4/page_channel is filled a page at a time"):
        tkv.write_kv(*new_rows(1, 1, 32), cache, slots_of([0]))


@pytest.mark.parametrize("pair", [("bf16", "int4/group32"), ("int8/channel", "fp8_e5m2/token_head"), ("int4/token_head", "fp32")])
def test_k_and_v_of_different_formats_and_sizes(pair):
    rng = torch.Generator().manual_seed(1)
    k, v = (torch.randn(5, 2, dim, generator=rng).to(DEVICE) for dim in (80, 32))
    caches = [empty_cache(pair, "hnd", 4, 4, 2, 80, device=DEVICE, v_dim=32) for _ in range(2)]
    tkv.write_kv(k, v, caches[0], slots_of([3, 15, -1, 8, 9]))
    reference.write_kv(k, v, caches[1], slots_of([3, 15, -1, 8, 9]))
    for name in ("k", "v", "k_scale", "v_scale"):
        assert_same(getattr(caches[0], name), getattr(caches[1], name), f"{pair} {name}")
