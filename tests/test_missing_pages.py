"""Pages that a table names and the cache does not have: their keys are skipped, wherever they stand, and nothing else is read for them."""

import pytest
import torch
from problems import test_device

from tkv import KVCache, paged_decode, prefix_prefill, write_kv
from tkv.ops import attention

DEVICE = test_device()
KINDS = ("fp32", "fp16", "int8/token_head", "int4/group32")


def cache_with(kind: str, page_size: int, num_pages: int, num_keys: int) -> KVCache:
    """A cache whose page 0 is poison, with keys in pages 1.. in order."""
    generator = torch.Generator().manual_seed(page_size)
    cache = KVCache.empty(num_pages, page_size, 2, 32, kind, device=DEVICE)
    k, v = (torch.randn(num_keys, 2, 32, generator=generator).to(DEVICE) for _ in range(2))
    k[num_keys // 3] *= 4.0
    slots = page_size + torch.arange(num_keys, device=DEVICE)
    write_kv(k, v, cache, slots)
    for data in (cache.k, cache.v):
        data[0] = float("nan") if data.is_floating_point() else 127
    for scale in (cache.k_scale, cache.v_scale):
        if scale is not None:
            scale[0] = float("nan")
    return cache


@pytest.fixture(params=["registers for all loads", "few registers"])
def any_target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets whose loop masks its loads, and those where missing pages are noticed behind it."""
    few = request.param == "few registers"
    target_for = attention.target_for
    monkeypatch.setattr(attention, "target_for", lambda *args: target_for(*args)._replace(FEW_REGISTERS=few))


@pytest.mark.usefixtures("any_target")
@pytest.mark.parametrize(
    ("page_size", "lost", "missing"),
    [(16, (0,), -1), (16, (3, 4, 18), 40), (128, (1,), 2**31 - 1), (128, (0, 2), -(2**31)), (1, (5, 255), -1)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_missing_pages_are_skipped(kind: str, page_size: int, lost: tuple[int, ...], missing: int) -> None:
    length = 300
    num_pages = -(-length // page_size)
    cache = cache_with(kind, page_size, num_pages + 1, length)
    table = torch.arange(1, num_pages + 1, dtype=torch.int32, device=DEVICE)
    q = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float16 if kind == "fp16" else torch.float32)
    broken = table.clone()
    broken[list(lost)] = missing
    kept = torch.tensor([page for page in range(num_pages) if page not in lost])
    # A last page that is not full stands behind all others.
    left = length - sum(min(page_size, length - page * page_size) for page in lost)
    config = dict(block_m=16, block_n=64 if page_size != 128 else 128, num_warps=4, num_stages=2)
    got, got_lse = paged_decode(
        q, cache, broken[None], torch.tensor([length], device=DEVICE), return_lse=True, config=config
    )  # fmt: skip
    out, lse = paged_decode(q, cache, table[kept][None], torch.tensor([left], device=DEVICE), return_lse=True, config=config)
    assert torch.isfinite(out).all()
    bound = 2e-3 if kind == "fp16" else 2e-5
    torch.testing.assert_close(got, out, atol=bound, rtol=bound)
    torch.testing.assert_close(got_lse, lse, atol=bound, rtol=bound)


def test_new_keys_are_seen_behind_a_missing_page() -> None:
    cache = cache_with("fp32", 16, 12, 160)
    table = torch.arange(1, 11, dtype=torch.int32, device=DEVICE)
    broken = table.clone()
    broken[2] = 12
    kept = [page for page in range(10) if page != 2]
    new = [torch.randn(20, heads, 32, generator=torch.Generator().manual_seed(heads)).to(DEVICE) for heads in (4, 2, 2)]
    cu_seqlens = torch.tensor([0, 20], device=DEVICE)
    config = dict(block_m=16, block_n=64, num_warps=4, num_stages=2)
    got, out = (
        prefix_prefill(*new, cache, pages[None], torch.tensor([len(pages) * 16], device=DEVICE), cu_seqlens, max_q_len=20, config=config)
        for pages in (broken, table[kept])
    )
    torch.testing.assert_close(got, out, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", ["fp32", "int8/token_head"])
def test_a_cache_without_pages_is_not_read(kind: str) -> None:
    cache = KVCache.empty(0, 16, 2, 32, kind, device=DEVICE)
    q = torch.randn(2, 4, 32, device=DEVICE)
    out, lse = paged_decode(
        q, cache, torch.full((2, 20), -1, device=DEVICE), torch.tensor([300, 64], device=DEVICE), return_lse=True
    )  # fmt: skip
    assert not out.any() and (lse == float("-inf")).all()
