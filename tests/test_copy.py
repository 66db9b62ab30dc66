"""copy_pages: whole pages, bit for bit, and nothing else."""

import pytest
import torch
from caches import FORMATS, MORE_FORMATS, bits, empty_cache, kind_id
from problems import test_device

import tkv
from tkv.errors import DeviceError, DTypeError, RangeError, ShapeError, UnsupportedError

DEVICE = test_device()


def filled(kind, layout, pages=5, seed=0, device=DEVICE, page_size=3, dim=24):
    """A cache of numbers that are all distinct from page to page, NaN among them."""
    cache = empty_cache(kind, layout, pages, page_size, 2, dim, device=device)
    rng = torch.Generator().manual_seed(seed)
    for data in cache.bytes:
        noise = torch.randint(0, 256, (*data.shape[:3], data.shape[3] * data.element_size()), generator=rng, dtype=torch.uint8)
        data.copy_(noise.view(data.dtype) if data.element_size() > 1 else noise)
    for scale in (cache.k_scale, cache.v_scale):
        if scale is not None and scale.dim() > 2:
            scale.copy_(torch.rand(scale.shape, generator=rng))
    return cache


def tensors(cache):
    return [t for t in (cache.k, cache.v, cache.k_scale, cache.v_scale) if t is not None and t.dim() > 2]


def pages_of(cache, page):
    return torch.cat([bits(t[page].contiguous()) for t in tensors(cache)])


@pytest.mark.parametrize("kind", [*FORMATS, *MORE_FORMATS], ids=kind_id)
@pytest.mark.parametrize(("src_layout", "dst_layout"), [("nhd", "hnd"), ("interleaved", "wide"), ("layers", "nhd")])
def test_pages_and_scales_are_copied_bit_for_bit_between_layouts(kind, src_layout, dst_layout):
    page_size, dim = (3, 24) if kind in FORMATS else (16, 64)
    src, dst = (filled(kind, *args, page_size=page_size, dim=dim) for args in ((src_layout, 5, 1), (dst_layout, 7, 2)))
    before = [pages_of(dst, page) for page in range(7)]
    tkv.copy_pages(src, dst, torch.tensor([4, 0, -1, 5, 1], device=DEVICE), torch.tensor([2, 6, 0, 1, 7], device=DEVICE))
    for page in range(7):
        expected = pages_of(src, {2: 4, 6: 0}[page]) if page in (2, 6) else before[page]
        assert torch.equal(pages_of(dst, page), expected)


def test_a_page_is_copied_within_its_cache():
    cache = filled("int8/token_head", "nhd")
    tkv.copy_pages(cache, cache, torch.tensor([3], device=DEVICE, dtype=torch.int32), torch.tensor([1], device=DEVICE))
    assert torch.equal(pages_of(cache, 1), pages_of(cache, 3))
    assert not torch.equal(pages_of(cache, 1), pages_of(cache, 2))


def test_no_pairs_are_no_error():
    cache, none = filled("fp16", "nhd"), torch.zeros(0, dtype=torch.int32, device=DEVICE)
    before = pages_of(cache, 0)
    tkv.copy_pages(cache, cache, none, none)
    assert torch.equal(pages_of(cache, 0), before)


@pytest.mark.parametrize("kind", ["bf16", "fp8_e4m3/token_head"])
def test_the_way_between_devices_gives_the_same(kind):
    from tkv.ops.copy import _move

    src, one, other = filled(kind, "nhd", 5, 1), filled(kind, "hnd", 4, 2), filled(kind, "hnd", 4, 2)
    read, written = torch.tensor([4, -1, 2], device=DEVICE), torch.tensor([0, 1, 3], device=DEVICE)
    tkv.copy_pages(src, one, read, written)
    _move(src, other, read, written)
    assert all(torch.equal(pages_of(one, page), pages_of(other, page)) for page in range(4))


@pytest.mark.gpu
def test_pages_go_to_the_host_and_back():
    src, host, back = (filled("int8/token_head", "nhd", 4, seed, place) for seed, place in ((1, DEVICE), (2, "cpu"), (3, DEVICE)))
    tkv.copy_pages(src, host, torch.tensor([3, 1], device=DEVICE), torch.tensor([0, 2]))
    tkv.copy_pages(host, back, torch.tensor([0, 2]), torch.tensor([2, 0], device=DEVICE))
    assert torch.equal(pages_of(back, 2), pages_of(src, 3)) and torch.equal(pages_of(back, 0), pages_of(src, 1))


def test_wrong_arguments_are_refused_with_a_reason():
    cache, pages = filled("bf16", "nhd"), torch.tensor([0], device=DEVICE)
    with pytest.raises(DTypeError, match=r"src: expected a tkv.KVCache, got Tensor"):
        tkv.copy_pages(cache.k, cache, pages, pages)
    with pytest.raises(DTypeError, match=r"dst: expected a tkv.KVCache, got NoneType"):
        tkv.copy_pages(cache, None, pages, pages)
    with pytest.raises(UnsupportedError, match="dst: expected the format of src, bf16 and bf16, got fp16 and fp16"):
        tkv.copy_pages(cache, filled("fp16", "nhd"), pages, pages)
    with pytest.raises(UnsupportedError, match="dst: expected the page_size of src, 3, got 4"):
        tkv.copy_pages(cache, empty_cache("bf16", "nhd", 2, 4, 2, 24, device=DEVICE), pages, pages)
    with pytest.raises(DTypeError, match=r"src_pages: expected torch.int32 or torch.int64"):
        tkv.copy_pages(cache, cache, pages.float(), pages)
    with pytest.raises(ShapeError, match=r"dst_pages: expected shape \[1\], got \[2\]"):
        tkv.copy_pages(cache, cache, pages, torch.tensor([0, 1], device=DEVICE))
    with pytest.raises(DeviceError, match="dst_pages: expected device"):
        tkv.copy_pages(cache, cache, pages, pages.to("meta"))


def test_checks_on_request_find_pages_out_of_range_and_pages_named_twice(monkeypatch):
    monkeypatch.setenv("TKV_CHECK", "1")
    cache = filled("bf16", "nhd")

    def pages(*numbers):
        return torch.tensor(numbers, device=DEVICE)

    with pytest.raises(RangeError, match=r"src_pages: expected pages from -1 to 4, got 5 at \[1\]"):
        tkv.copy_pages(cache, cache, pages(0, 5), pages(1, 2))
    with pytest.raises(RangeError, match="dst_pages: expected every page at most once"):
        tkv.copy_pages(cache, cache, pages(0, 1), pages(3, 3))
    with pytest.raises(RangeError, match="dst_pages: expected no page that src_pages names too"):
        tkv.copy_pages(cache, cache, pages(0, 1), pages(1, 3))
    tkv.copy_pages(cache, filled("bf16", "hnd"), pages(0, -1), pages(1, -1))
