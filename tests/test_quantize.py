"""quantize_pages: whole pages go into another format as the reference puts them there, and nothing else changes."""

import pytest
import torch
from caches import FORMATS, LAYOUTS, MORE_FORMATS, bits, empty_cache, kind_id
from problems import build, test_device
from test_write import assert_same, hard_rows

import tkv
from tkv import reference
from tkv.errors import DeviceError, RangeError, ShapeError, UnsupportedError

DEVICE = test_device()
BY_PAGE = [("int4/page_channel", "int4/group32"), ("int8/page_channel", "int8/token_head")]


def native(dtype, layout="nhd", pages=3, page_size=16, heads=2, dim=64, v_dim=None, seed=0):
    """A native cache of numbers in every slot."""
    cache = empty_cache(dtype, layout, pages, page_size, heads, dim, device=DEVICE, v_dim=v_dim)
    rng = torch.Generator().manual_seed(seed)
    for data in (cache.k, cache.v):
        data.copy_(torch.randn(data.shape, generator=rng) * 3 - 1)
    return cache


def check(src, kind, layout, src_pages, dst_pages, index=torch.int32, pages=5):
    """Quantise by the kernel and by the reference, into caches full of poison; gives the kernel's."""
    made = [
        empty_cache(kind, layout, pages, src.page_size, src.num_kv_heads, src.head_dim, device=DEVICE, v_dim=src.v_head_dim)
        for _ in range(2)
    ]
    before = [bits(t) for t in (src.k, src.v)]
    pairs = [torch.tensor(p, dtype=index, device=DEVICE) for p in (src_pages, dst_pages)]
    tkv.quantize_pages(src, made[0], *pairs)
    reference.quantize_pages(src, made[1], *pairs)
    for name in ("k", "v", "k_scale", "v_scale"):
        assert_same(getattr(made[0], name), getattr(made[1], name), f"{kind} {name}")
    assert all(torch.equal(bits(t), old) for t, old in zip((src.k, src.v), before)), "the source was modified"
    return made[0]


@pytest.mark.parametrize("kind", [*FORMATS, *MORE_FORMATS], ids=kind_id)
def test_every_format(kind):
    for dtype, page_size in (("fp32", 16), ("bf16", 32)):
        check(native(dtype, page_size=page_size), kind, "nhd", [2, 0], [1, 4])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", [*BY_PAGE, "int8/group32"], ids=kind_id)
def test_layouts_of_either_side(kind, layout):
    check(native("fp16", layout, dim=96, v_dim=32), kind, "wide" if layout == "nhd" else "nhd", [1], [3], torch.int64)
    check(native("fp16", dim=32), kind, layout, [1], [3])


@pytest.mark.parametrize("page_size", [16, 32, 128, 256])
@pytest.mark.parametrize(("dim", "heads"), [(64, 1), (192, 2), (128, 3)])
def test_channels_of_pages_of_any_size(page_size, dim, heads):
    for kind in BY_PAGE:
        check(native("bf16", pages=1, page_size=page_size, heads=heads, dim=dim), kind, "hnd", [0], [2], pages=3)


def test_a_pair_with_a_page_outside_is_skipped():
    for kind in (BY_PAGE[0], "int4/token_head"):
        check(native("fp32"), kind, "nhd", [-1, 3, 1, 2, 0], [0, 1, 5, -1, 2])
        check(native("fp32"), kind, "nhd", [], [])


@pytest.mark.parametrize("kind", BY_PAGE, ids=kind_id)
def test_numbers_that_are_hard_to_store(kind):
    """The rows of test_write as channels: of 64 tokens, in pages."""
    rows = torch.stack([*hard_rows(64).values()])
    dim = len(rows) // 16 * 16
    x = rows[:dim].T.reshape(1, 64, 1, dim).contiguous().to(DEVICE)
    if kind[1].endswith("group32") and dim % 32:
        x = x[..., : dim // 32 * 32]
    cache = check(tkv.KVCache(x, -x), kind, "nhd", [0], [1])
    table, lens = torch.tensor([[1]], device=DEVICE), torch.tensor([64], device=DEVICE)
    k, *_ = tkv.gather_window(cache, table, lens, window=None)
    assert bool(k.isfinite().all()), "a code of a finite number decodes to a finite one"


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", BY_PAGE, ids=kind_id)
def test_a_bad_number_changes_no_other_token_and_no_other_channel(kind, bad):
    clean = native("fp32")
    expected = check(clean, kind, "nhd", [1], [0])
    clean.k[1, 5, 0, 7] = bad
    # The number that it takes the place of was neither the least nor the largest.
    got = check(clean, kind, "nhd", [1], [0])
    table, lens = torch.tensor([[0]], device=DEVICE), torch.tensor([16], device=DEVICE)
    (k, *_), (old, *_) = (tkv.gather_window(cache, table, lens, window=None) for cache in (got, expected))
    others = torch.ones_like(k, dtype=torch.bool)
    others[:, 0, 7] = False
    assert torch.equal(k[others], old[others]) and bool(k.isfinite().all())


def test_a_constant_channel_comes_back_exactly():
    src = native("fp32")
    src.k[:, :, :, ::3] = torch.arange(22, device=DEVICE) * 0.25 - 2
    cache = check(src, BY_PAGE[0], "nhd", [0], [0])
    k, *_ = tkv.gather_window(cache, torch.tensor([[0]], device=DEVICE), torch.tensor([16], device=DEVICE), window=None)
    assert torch.equal(k[..., ::3], src.k[0, ..., ::3])


@pytest.mark.parametrize("q_dtype", [torch.float32, torch.float16])
def test_attention_over_old_quantised_and_new_native_tokens(q_dtype):
    """KIVI by hand: the two calls joined by merge_states are attention over both caches."""
    kind = BY_PAGE[0]
    tail = "fp16" if q_dtype == torch.float16 else "fp32"
    problem = build(kind, (96, 32), 32, 1, 2, 64, q_dtype, q_start=[129, 36], spike=5.0)
    rest = build(tail, (34, 5), 16, 1, 2, 64, q_dtype, kv_start=[96, 32], q_start=[129, 36])
    rest.q = problem.q
    parts = [part.check(out=torch.empty(problem.q.shape, device=DEVICE)) for part in (problem, rest)]
    out, lse = tkv.merge_states([out for out, _ in parts], [lse for _, lse in parts])
    truths = [part.truth for part in (problem, rest)]
    expected, expected_lse = reference.merge_states(torch.stack([t[0] for t in truths]), torch.stack([t[1] for t in truths]))
    bound = 2e-3 if q_dtype == torch.float16 else 1e-5
    torch.testing.assert_close(out.double(), expected, rtol=10 * bound, atol=bound)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-4)


def test_errors_name_the_argument(monkeypatch):
    src, pages = native("fp32"), torch.tensor([0, 1], device=DEVICE)
    dst = tkv.KVCache.empty(4, 16, 2, 64, "int8/token_head", device=DEVICE)
    with pytest.raises(UnsupportedError, match="src: expected a native cache, got int8/token_head"):
        tkv.quantize_pages(dst, dst, pages, pages)
    for shape, name in (((4, 8, 2, 64), "page_size"), ((4, 16, 1, 64), "num_kv_heads"), ((4, 16, 2, 32), "head_dim")):
        with pytest.raises(UnsupportedError, match=f"dst: expected the {name} of src"):
            tkv.quantize_pages(src, tkv.KVCache.empty(*shape, "int8/token_head", device=DEVICE), pages, pages)
    with pytest.raises(DeviceError, match="dst: expected the device of src"):
        tkv.quantize_pages(src, tkv.KVCache.empty(4, 16, 2, 64, "int8/token_head", device="meta"), pages, pages)
    with pytest.raises(ShapeError, match="dst_pages: expected shape"):
        tkv.quantize_pages(src, dst, pages, pages[:1])
    monkeypatch.setenv("TKV_CHECK", "1")
    with pytest.raises(RangeError, match="src_pages: expected pages from -1 to 2"):
        tkv.quantize_pages(src, dst, pages + 2, pages)
    with pytest.raises(RangeError, match="dst_pages: expected every page at most once"):
        tkv.quantize_pages(src, dst, pages, pages * 0)
