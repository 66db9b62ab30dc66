"""write_kv, copy_pages and merge_states under the checker."""

import pytest
import torch
from caches import FORMATS, LAYOUTS, bits, empty_cache, poison_
from checked import DEVICE, dense

import tkv
from tkv import reference

pytestmark = pytest.mark.sanitize

FLOATS = (torch.float16, torch.float32, torch.bfloat16)
OUTSIDE = {torch.int32: [-1, -(2**31), 2**31 - 1], torch.int64: [-1, -(2**62), 2**62, 2**32 + 2]}


def new_rows(tokens, heads, dim, dtype=torch.float32):
    rng = torch.Generator().manual_seed(tokens)
    return [torch.randn(tokens, heads, dim, generator=rng).to(dtype).to(DEVICE) for _ in range(2)]


def indices(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def tensors(cache):
    return [t for t in (cache.k, cache.v, cache.k_scale, cache.v_scale) if t is not None and t.dim()]


def check_write(kind, k, v, slots, page_size=4, pages=2, layout="nhd"):
    """Write by the kernel and by the reference, each into a cache full of poison: then they are the same."""
    caches = [empty_cache(kind, layout, pages, page_size, k.shape[1], k.shape[2], device=DEVICE) for _ in range(2)]
    tkv.write_kv(k, v, caches[0], slots)
    reference.write_kv(k, v, caches[1], slots)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*map(tensors, caches)))


@pytest.mark.parametrize("kind", FORMATS)
def test_writing_stays_in_its_slots(kind):
    i = FORMATS.index(kind)
    for page_size, dim, heads in ((1, 24, 3), (3, 40, 1), (16, 16, 2)):
        slots = indices([2, 7, 0, *OUTSIDE[torch.int32], 8])
        check_write(kind, *new_rows(7, heads, dim, FLOATS[i % 3]), slots, page_size, -(-9 // page_size), LAYOUTS[i % len(LAYOUTS)])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_no_slot_beyond_the_cache_is_written(dtype):
    outside = [8, 9, 100, *OUTSIDE[dtype]]
    check_write("fp8_e4m3/token_head", *new_rows(len(outside) + 1, 1, 16), indices([*outside, 5], dtype))


def test_more_rows_than_a_program_has_in_views_of_wider_tensors():
    """128 rows of 16 numbers are a program's."""
    k, v = new_rows(60, 3, 16)
    wide = poison_(torch.empty(60, 8, 16, device=DEVICE))
    wide[:, :3], wide[:, 4:7] = k, v
    apart = poison_(torch.empty(3, 60, 24, device=DEVICE)).transpose(0, 1)[..., :16]
    apart.copy_(v)
    slots = torch.randperm(64, generator=torch.Generator().manual_seed(0))[:60].to(DEVICE)
    every_other = torch.stack([slots, torch.full_like(slots, 2**40)], dim=1)[:, 0]
    check_write("int8/token_head", wide[:, :3], wide[:, 4:7], every_other, 16, 4)
    check_write("bf16", wide[:, :3], apart, slots.int(), 16, 4, "interleaved")


def filled(kind, layout, pages, page_size, heads, dim, seed):
    """A cache of numbers that are all distinct from page to page."""
    cache = empty_cache(kind, layout, pages, page_size, heads, dim, device=DEVICE)
    k, v = new_rows(pages * page_size + seed, heads, dim)
    reference.write_kv(k[seed:], v[seed:], cache, torch.arange(pages * page_size))
    return cache


def pages_of(cache, page):
    return torch.cat([bits(t[page].contiguous()) for t in tensors(cache)])


@pytest.mark.parametrize("kind", FORMATS)
def test_copying_stays_in_its_pages(kind):
    i = FORMATS.index(kind)
    page_size, heads, dim = ((1, 3, 24), (3, 2, 40), (16, 9, 16))[i % 3]
    for dtype in (torch.int32, torch.int64):
        src = filled(kind, LAYOUTS[i % len(LAYOUTS)], 3, page_size, heads, dim, 0)
        dst = filled(kind, LAYOUTS[(i + 3) % len(LAYOUTS)], 5, page_size, heads, dim, 1)
        before = [pages_of(dst, page) for page in range(5)]
        outside = OUTSIDE[dtype]
        pairs = [(2, 4), (3, 0), (1, 5), (0, 1), *((x, 2) for x in outside), *((2, x) for x in outside)]
        tkv.copy_pages(src, dst, *(indices(pages, dtype) for pages in zip(*pairs)))
        for page in range(5):
            assert torch.equal(pages_of(dst, page), pages_of(src, {4: 2, 1: 0}[page]) if page in (1, 4) else before[page])


def test_copying_within_a_cache_by_every_other_of_some_numbers():
    cache = filled("fp16", "layers", 6, 3, 2, 24, 0)
    expected = [pages_of(cache, page) for page in (0, 0, 2, 5, 4, 5)]
    pairs = torch.tensor([[0, 1], [5, 3]], device=DEVICE)
    tkv.copy_pages(cache, cache, pages := pairs[:, 0], pairs[:, 1])
    assert pages.stride() == (2,)
    assert all(torch.equal(pages_of(cache, page), bits) for page, bits in enumerate(expected))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("parts", "rows", "dim"), [(1, (3,), 24), (3, (2, 3), 16), (37, (2,), 40)])
def test_merging_parts_some_of_which_are_empty(parts, rows, dim, dtype):
    rng = torch.Generator().manual_seed(parts)
    outs, lses = torch.randn(parts, *rows, dim, generator=rng), 3 * torch.randn(parts, *rows, generator=rng)
    empty = torch.rand(parts, *rows, generator=rng) < 0.3
    empty[:, 0] = True
    outs[empty], lses[empty] = torch.nan, -torch.inf
    outs, lses = outs.to(dtype).to(DEVICE), lses.to(DEVICE)
    out, lse = tkv.merge_states(outs, lses)
    ref, ref_lse = reference.merge_states(outs, lses)
    assert out.dtype == dtype
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close((out.double(), lse.double()), (ref, ref_lse), rtol=tolerance, atol=tolerance)


def test_merging_views_with_room_between_rows_and_parts():
    wide = torch.randn(3, 5, 2, 40, device=DEVICE)
    outs, lses = wide[:, 1:4, :, 8:32], torch.randn(5, 2, 3, device=DEVICE).transpose(0, 2)[..., 1:4].transpose(1, 2)
    assert outs.shape[:-1] == lses.shape and not lses.is_contiguous()
    got, apart = tkv.merge_states(outs, lses), tkv.merge_states(list(dense(outs)), list(dense(lses)))
    assert all(torch.equal(a, b) for a, b in zip(got, apart))
