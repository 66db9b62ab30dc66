"""The parts that every kernel is made of, against brute force: positions to tiles and masks, pages to offsets, dots, codecs."""

import inspect

import numpy as np
import ptx
import pytest
import torch
import triton
import triton.language as tl
from caches import empty_cache
from hypothesis import given
from hypothesis import strategies as st
from problems import effort, looking_at, test_device

import tkv
from tkv import reference
from tkv.formats import supported_formats
from tkv.kernels.args import Limits, Target, TokenStrides
from tkv.kernels.attention import attention_kernel
from tkv.kernels.copy import copy_kernel
from tkv.kernels.gather import gather_kernel
from tkv.kernels.merge import merge_kernel
from tkv.kernels.quantize import quantize_channels_kernel, quantize_kernel
from tkv.kernels.tiles import codec
from tkv.kernels.tiles.attend import power_of_two_from, tanh, unit_for
from tkv.kernels.tiles.dots import dot, round_to
from tkv.kernels.tiles.paging import locate, offsets_of
from tkv.kernels.tiles.visibility import in_window, positions_of, seen_keys, tile_of, view_of
from tkv.kernels.tree import depth_kernel
from tkv.kernels.write import write_kernel
from tkv.ops.attention import triton_dtype
from tkv.ops.launch import arch_name, interpreting, row_storages, storages, target_for

DEVICE = test_device()
TARGET = target_for(arch_name(DEVICE), interpreting())
# Every way to decode: portable integers, for matrix units of either kind.
TARGETS = {Target(TARGET.INTERPRET, True, e4m3, flushes, False) for e4m3, flushes in ((True, False), (False, False), (False, True))}
# Inline PTX too: on a GPU what it can run, else all of it, executed by NumPy.
TARGETS |= {Target(False, False, e4m3, False, False) for e4m3 in ({TARGET.E4M3, False} if not TARGET.INTERPRET else {True, False})}
MAX_TILES = 12
KERNELS = [attention_kernel, merge_kernel, depth_kernel, write_kernel, copy_kernel, gather_kernel]
KERNELS += [quantize_kernel, quantize_channels_kernel]
# One format of each way to code.
CODES = ("fp8_e4m3/tensor", "fp8_e5m2/tensor", "int8/token_head", "int8/page_channel", "int4/token_head", "int4/group32")
assert {kind.split("/")[0] for kind in CODES} == {kind.split("/")[0] for kind in supported_formats() if "/" in kind}


@triton.jit
def visits_kernel(
    args_ptr, counts_ptr, tiles_ptr, seen_ptr, rows_ptr, limits, ROWS: tl.constexpr, PART: tl.constexpr, ATTEND: tl.constexpr
):
    """For ROWS query rows from `first` on: their visits, which of these are full, and both masks of every visit."""
    num_keys = tl.load(args_ptr)
    kv_start = tl.load(args_ptr + 1)
    first = tl.load(args_ptr + 2)
    skip = tl.load(args_ptr + 3)
    last = first + ROWS - 1
    bounds, visits, full = view_of(num_keys, kv_start, skip, (first, last, first, last), limits, PART, ATTEND)
    tl.store(counts_ptr, visits[3])
    tl.store(counts_ptr + 1, full[0])
    tl.store(counts_ptr + 2, full[1])
    lanes = tl.arange(0, ATTEND.BLOCK_N)
    rows = tl.arange(0, ROWS)
    for visit in range(0, visits[3]):
        keys = tile_of(visit, visits) * ATTEND.BLOCK_N + lanes
        tl.store(tiles_ptr + visit, tile_of(visit, visits))
        tl.store(seen_ptr + visit * ATTEND.BLOCK_N + lanes, seen_keys(keys, bounds).to(tl.int8))
        positions = positions_of(keys, kv_start, limits.pinned, ATTEND.HAS_PINNED)[None, :]
        distance = (first + rows)[:, None] - positions
        by_rows = distance >= 0
        if ATTEND.HAS_WINDOW:
            by_rows = by_rows & in_window(distance, positions, limits.window, limits.sinks)
        tl.store(rows_ptr + (visit * ROWS + rows[:, None]) * ATTEND.BLOCK_N + lanes[None, :], by_rows.to(tl.int8))


@st.composite
def views(draw):
    block_n, rows = draw(st.sampled_from([16, 32])), draw(st.sampled_from([1, 2, 4, 16]))
    num_keys = draw(st.integers(0, MAX_TILES * block_n))
    kv_start = draw(st.sampled_from([0, 0, 3, 16, 50, 2**29]))
    first = draw(st.one_of(st.just(num_keys + kv_start - rows), st.integers(kv_start - rows - 2, kv_start + num_keys + 40)))
    skip = draw(st.one_of(st.just(0), st.integers(0, num_keys + 5)))
    window = draw(st.one_of(st.none(), st.integers(1, 80), st.just(2**30)))
    sinks = draw(st.one_of(st.just(0), st.integers(0, 70), st.just(2**30)))
    pinned = draw(st.sampled_from([0, 0, 1, 16, 40]))
    if pinned and draw(st.booleans()):
        first = draw(st.integers(-rows, pinned + 20))
    part = draw(st.sampled_from([0, 1, 2])) if window is not None else 0
    return block_n, rows, num_keys, kv_start, first, skip, window, sinks, pinned, part


@effort(400)
@given(views())
def test_every_visible_key_is_visited_once_and_nothing_else(case):
    block_n, rows, num_keys, kv_start, first, skip, window, sinks, pinned, part = case
    args = torch.tensor([num_keys, kv_start, first, skip], dtype=torch.int32, device=DEVICE)
    counts = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    tiles = torch.full((2 * MAX_TILES,), -1, dtype=torch.int32, device=DEVICE)
    seen = torch.zeros(2 * MAX_TILES, block_n, dtype=torch.int8, device=DEVICE)
    by_rows = torch.zeros(2 * MAX_TILES, rows, block_n, dtype=torch.int8, device=DEVICE)
    limits = Limits(0.0, window or 0, sinks, pinned)
    visits_kernel[(1,)](args, counts, tiles, seen, by_rows, limits, rows, part, looking_at(block_n, window is not None, pinned > 0))

    q_positions = first + torch.arange(rows)
    truth = torch.zeros(rows, MAX_TILES * block_n, dtype=torch.bool)
    k_positions = torch.arange(num_keys)
    k_positions[pinned:] += kv_start
    truth[:, :num_keys] = reference.visible(q_positions, k_positions, window, sinks)
    if part:
        truth[:, :num_keys] &= (k_positions < sinks) == (part == 1)
    truth[:, :skip] = False
    truth = truth.view(rows, MAX_TILES, block_n)
    count, full_from, full_to = counts.tolist()
    visited = tiles[:count].tolist()
    wanted = truth.any(2).any(0).nonzero()[:, 0].tolist()
    assert visited == wanted, "every tile with a visible key once, in order, and no other"
    for visit, tile in enumerate(visited):
        assert torch.equal(seen[visit].bool().cpu(), truth[:, tile].any(0)), f"keys of tile {tile}"
        assert torch.equal((by_rows[visit] & seen[visit]).bool().cpu(), truth[:, tile]), f"rows of tile {tile}"
    assert all(truth[:, visited[visit]].all() for visit in range(full_from, min(full_to, count))), "a full tile needs no mask"
    if window is None or not sinks:
        assert max(min(full_to, count) - full_from, 0) == sum(bool(truth[:, tile].all()) for tile in wanted), "all that are full are known"


@triton.jit
def locate_kernel(table_ptr, pages_ptr, rows_ptr, seen_ptr, first_key, num_keys, num_pages, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    lanes = tl.arange(0, BLOCK_N)
    pages, rows, seen = locate(first_key, first_key + lanes < num_keys, table_ptr, num_pages, PAGE_SIZE, BLOCK_N)
    tl.store(pages_ptr + lanes, pages)
    tl.store(rows_ptr + lanes, rows)
    tl.store(seen_ptr + lanes, seen.to(tl.int8))


@pytest.mark.parametrize("page_size", [1, 3, 16, 32, 64, 528])
def test_keys_are_found_in_their_pages_and_pages_outside_of_the_cache_are_not(page_size):
    num_keys, block_n = 75, 32
    table = (torch.arange(-(-num_keys // page_size)) * 7 % 50).to(torch.int32).to(DEVICE)
    table[-1] = 50
    for first in (0, 32, 64):
        pages, rows = (torch.zeros(block_n, dtype=torch.int64, device=DEVICE) for _ in range(2))
        seen = torch.zeros(block_n, dtype=torch.int8, device=DEVICE)
        locate_kernel[(1,)](table, pages, rows, seen, first, num_keys, 50, page_size, block_n)
        for lane, key in enumerate(range(first, first + block_n)):
            page = table[key // page_size].item() if key < num_keys else -1
            assert seen[lane].item() == (0 <= page < 50)
            if seen[lane]:
                assert (pages[lane].item(), rows[lane].item()) == (page, key % page_size)


@triton.jit
def offsets_kernel(out_ptr, table_ptr, strides, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    lanes = tl.arange(0, BLOCK_N)
    pages, rows, _ = locate(0, lanes >= 0, table_ptr, 2**30, PAGE_SIZE, BLOCK_N)
    tl.store(out_ptr + lanes, offsets_of(pages, rows, strides))


@pytest.mark.parametrize("page_size", [1, 16, 5])
def test_offsets_are_64_bits_wide(page_size):
    strides = TokenStrides(page=3 * 2**24 + 8, token=2**27 + 1, head=64)
    table = torch.tensor([2**20 + i for i in range(16)], dtype=torch.int32, device=DEVICE)
    out = torch.zeros(16, dtype=torch.int64, device=DEVICE)
    offsets_kernel[(1,)](out, table, strides, page_size, 16)
    assert out.tolist() == [(2**20 + i // page_size) * strides.page + i % page_size * strides.token for i in range(16)]


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, TARGET: tl.constexpr):
    i, j = tl.arange(0, 32)[:, None], tl.arange(0, 32)[None, :]
    a, b = tl.load(a_ptr + i * 32 + j), tl.load(b_ptr + i * 32 + j)
    acc = tl.full([32, 32], 1.0, tl.float32)
    tl.store(out_ptr + i * 32 + j, dot(a, b, acc, TARGET))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_dot_is_right_for_every_dtype(dtype):
    # Numbers of many bits and all signs: bf16 bits multiplied as integers, or fp32 cut to TF32, are far off.
    a, b = (torch.randn(32, 32, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE) for seed in (1, 2))
    out = torch.zeros(32, 32, device=DEVICE)
    dot_kernel[(1,)](a, b, out, TARGET)
    size = a.double().abs() @ b.double().abs() + 1
    assert bool(((out.double() - a.double() @ b.double() - 1).abs() <= 2.0**-20 * size).all())


@triton.jit
def map_kernel(x_ptr, out_ptr, num, OP: tl.constexpr, DTYPE: tl.constexpr, TARGET: tl.constexpr):
    """One function of float32 numbers, number by number."""
    i = tl.program_id(0) * 8192 + tl.arange(0, 8192)
    x = tl.load(x_ptr + i, mask=i < num, other=1.0)
    if OP == "round_to":
        y = round_to(x, DTYPE, TARGET)
    elif OP == "round_even":
        y = codec.round_even(x)
    elif OP == "tanh":
        y = tanh(x)
    elif OP == "power_of_two_from":
        y = power_of_two_from(x)
    elif OP == "encode_e4m3":
        y = codec.encode_e4m3(x)
    else:
        y = codec.encode_int8(x)
    tl.store(out_ptr + i, y, mask=i < num)


def mapped(op, x, dtype):
    """A function of `map_kernel` on the CPU."""
    x = x.to(DEVICE)
    out = torch.empty(x.shape, dtype=torch.uint8 if op.startswith("encode") else dtype, device=DEVICE)
    map_kernel[(-(-x.numel() // 8192),)](x, out, x.numel(), op, triton_dtype(dtype), TARGET)
    return out.cpu()


def telling_floats():
    """float32 of every sign, exponent and leading bits, with low bits around ties; Inf and NaN among them."""
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    return (high[:, None] | low[None, :]).flatten().view(torch.float32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_to_nearest_even(dtype):
    x = telling_floats()
    if TARGET.INTERPRET and dtype == torch.bfloat16:
        # Below, the interpreter's own conversion to bfloat16 is wrong.
        x = x.where(~(x.abs() < 2.0**-126), 0.0)
    torch.testing.assert_close(mapped("round_to", x, dtype), x.to(dtype), rtol=0, atol=0, equal_nan=True)


@triton.jit
def encode_fp8_kernel(x_ptr, out_ptr, E4M3: tl.constexpr):
    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    x = tl.load(x_ptr + i)
    if E4M3:
        tl.store(out_ptr + i, codec.encode_fp8(x, 3, 7, 448.0))
    else:
        tl.store(out_ptr + i, codec.encode_fp8(x, 2, 15, 57344.0))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_float_is_encoded_as_fp8_like_a_saturating_cast(dtype):
    x, largest = telling_floats(), torch.finfo(dtype).max
    assert x.numel() % 1024 == 0
    out = torch.empty(x.numel(), dtype=torch.uint8, device=DEVICE)
    encode_fp8_kernel[(x.numel() // 1024,)](x.to(DEVICE), out, dtype == torch.float8_e4m3fn)
    got, expected = out.cpu(), x.clamp(-largest, largest).to(dtype).view(torch.uint8)
    wrong = (got != expected) & ~x.isnan()
    assert not wrong.any(), f"{x[wrong][:4]} gave {got[wrong][:4]}, expected {expected[wrong][:4]}"
    assert bool(got.view(dtype).isnan()[x.isnan()].all())


def test_every_float_is_encoded_as_int8_rounded_and_saturated():
    x = torch.cat([telling_floats(), torch.arange(-1300, 1300) / 10.0])
    assert torch.equal(mapped("encode_int8", x, torch.float32).view(torch.int8), reference.encode(x, tkv.KVFormat.parse("int8/token_head")))


def test_round_even_rounds_ties_to_even():
    x = torch.cat([torch.arange(-600, 600) / 4.0, torch.tensor([2.0**21 + 0.5, -(2.0**21) - 1.5])])
    assert torch.equal(mapped("round_even", x, torch.float32), x.round())


def test_tanh_is_right_to_a_few_units_of_the_last_place():
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0, 1e-30, -1e-6, 0.24999, 0.25001, 50.0, -1e9, 3e38])])
    got, expected = mapped("tanh", x, torch.float32).double(), x.double().tanh()
    assert bool(((got - expected).abs() <= 2.0**-20 * expected.abs()).all())
    assert bool((got.abs() <= 1).all())


def test_the_power_of_two_above_a_scale_is_the_least():
    x = torch.tensor([0.0, 1e-38, 0.75, 1.0, 1.0000001, 3.0, 4.0, 1e30])
    got = mapped("power_of_two_from", x, torch.float32)
    assert got.tolist() == [0.0, 2.0**-126, 1.0, 1.0, 2.0, 4.0, 4.0, 2.0**100]


@triton.jit
def unit_kernel(scales_ptr, out_ptr, unit, peak):
    scales = tl.load(scales_ptr + tl.arange(0, 16))
    new_unit, new_peak = unit_for(scales, tl.zeros([], tl.float32) + unit, tl.zeros([], tl.float32) + peak)
    tl.store(out_ptr, new_unit)
    tl.store(out_ptr + 1, new_peak)


def test_the_unit_of_a_tile_follows_its_largest_scale_but_never_falls_so_far_that_sums_overflow():
    cases = [
        ([0.0] * 16, 4.0, 8.0, [4.0, 8.0]),
        ([0.1] + [1e-9] * 15, 2.0, 2.0, [0.125, 2.0]),
        ([3.0, 5.0] + [0.0] * 14, 0.25, 4.0, [8.0, 8.0]),
        ([1e-30] * 16, 2.0, 2.0, [2.0**-63, 2.0]),
        ([1e-30] * 16, 2.0**-62, 2.0, [2.0**-63, 2.0]),
    ]
    for scales, unit, peak, expected in cases:
        out = torch.zeros(2, device=DEVICE)
        unit_kernel[(1,)](torch.tensor(scales, device=DEVICE), out, unit, peak)
        assert out.tolist() == expected


@triton.jit
def unpack_kernel(words_ptr, out_ptr, SIZE: tl.constexpr, STORAGE: tl.constexpr, TARGET: tl.constexpr):
    PLANES: tl.constexpr = STORAGE.PLANES
    i = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    planes = codec.unpack(tl.load(words_ptr + i), STORAGE, TARGET)
    for plane in tl.static_range(PLANES):
        tl.store(out_ptr + plane * SIZE + i, planes[plane].to(tl.float32) * codec.unit(STORAGE, TARGET))


@triton.jit
def decode_kernel(words_ptr, out_ptr, SIZE: tl.constexpr, STORAGE: tl.constexpr):
    PLANES: tl.constexpr = STORAGE.PLANES
    i = tl.program_id(0) * 256 + tl.arange(0, 256)
    for plane in tl.static_range(PLANES):
        tl.store(out_ptr + plane * SIZE + i, codec.decode(tl.load(words_ptr + i), plane, STORAGE))


@pytest.fixture
def inline_ptx(monkeypatch):
    """Kernels may use inline PTX without a GPU."""
    if TARGET.INTERPRET:
        monkeypatch.setattr(tl, "inline_asm_elementwise", ptx.inline_asm_elementwise)


def codes_in_words(kind, words):
    """What each plane of 16-bit words holds, in float32, by torch alone."""
    kind = tkv.KVFormat.parse(kind)
    if kind.dtype == "int4":
        return torch.stack([(words.int() >> shift & 15).float() for shift in (0, 4, 8, 12)])
    numbers = words.view(kind.torch_dtype).float().view(-1, 2).T
    return numbers + 128 if kind.is_asymmetric else numbers


@pytest.mark.parametrize("target", sorted(TARGETS), ids=lambda t: f"portable={t.PORTABLE}-e4m3={t.E4M3}")
@pytest.mark.parametrize("kind", CODES)
def test_every_word_unpacks_to_all_of_its_numbers(kind, target, inline_ptx):
    words = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    storage, _ = storages(empty_cache((kind, "fp16"), "nhd", 1, 16, 1, 64), torch.float16, torch.float16)
    expected = codes_in_words(kind, words)
    out = torch.empty(expected.shape, device=DEVICE)
    unpack_kernel[(16,)](words.to(DEVICE), out, 2**16, storage, target)
    got, finite = out.cpu(), ~expected.isnan()
    assert torch.equal(got[finite], expected[finite])
    # The bit path reads the two NaN codes of e4m3 as +-480.
    assert bool((got[~finite].isnan() | (got[~finite].abs() == 480)).all())


@pytest.mark.parametrize("kind", CODES)
def test_every_code_decodes_on_the_way_out_of_the_cache(kind):
    storage, _ = row_storages(empty_cache((kind, "fp16"), "nhd", 1, 16, 1, 64))
    if storage.CODE == "int4":
        words = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        expected = codes_in_words(kind, words)
    else:
        words = torch.arange(256, dtype=torch.int32).to(torch.uint8)
        expected = words.view(tkv.KVFormat.parse(kind).torch_dtype).float()[None] + 128 * storage.ASYMMETRIC
    out = torch.empty(expected.shape, device=DEVICE)
    decode_kernel[(len(words) // 256,)](words.to(DEVICE), out, len(words), storage)
    assert torch.equal(out.cpu().nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))


@triton.jit
def decoded_kernel(scales_ptr, out_ptr, CODES: tl.constexpr, BLOCK: tl.constexpr, STORAGE: tl.constexpr, TARGET: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    codes = (i % CODES).to(tl.float16)
    scales, minima = codec.split_pair(tl.load(scales_ptr + i // CODES))
    tl.store(out_ptr + i, codec.decoded(codes, scales, minima, STORAGE, TARGET))


@pytest.mark.parametrize("target", sorted(TARGETS), ids=lambda t: f"portable={t.PORTABLE}-e4m3={t.E4M3}")
@pytest.mark.parametrize(("kind", "codes"), [("int4/page_channel", 16), ("int8/page_channel", 256)])
def test_codes_with_a_scale_and_a_minimum_are_rounded_once(kind, codes, target, inline_ptx):
    rng = torch.Generator().manual_seed(3)
    count = 2**16 // codes
    pairs = torch.stack([10 ** (6 * torch.rand(count, generator=rng) - 5), torch.randn(count, generator=rng) * 30], 1).half()
    # 113 * 145 * 2^-22 is half a step of float16 at 8, and 2^-22 more: rounding to float32 before would lose it.
    pairs[0] = torch.tensor([145 * 2.0**-22, 8 + 2.0**-6])
    storage, _ = storages(empty_cache((kind, "fp16"), "nhd", 1, 16, 1, 64), torch.float16, torch.float16)
    out = torch.empty(2**16, dtype=torch.float16, device=DEVICE)
    decoded_kernel[(16,)](pairs.view(torch.int32).to(DEVICE), out, codes, 4096, storage, target)
    exact = torch.arange(codes) * pairs[:, :1].double() + pairs[:, 1:].double()
    assert torch.equal(out.cpu().view(count, codes), torch.from_numpy(exact.numpy().astype(np.float16)))
    if codes == 256:
        assert out[113].item() == 8 + 2.0**-6 + 2.0**-7


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.fn.__name__)
def test_no_parameter_of_a_kernel_has_a_name_that_the_launcher_uses_itself(kernel):
    """On a GPU such a kernel cannot be launched at all; the interpreter and cross-compiling do not notice."""
    taken = {"options", "grid", "warmup", "num_warps", "num_stages", "num_ctas", "maxnreg"}
    assert not taken & set(inspect.signature(kernel.fn).parameters)
