"""write_kv with rope: keys are rotated in float32 and then encoded, values are not."""

import pytest
import torch
from caches import FORMATS, MORE_FORMATS, empty_cache, fits, kind_id
from problems import test_device

import tkv
from tkv import reference
from tkv.errors import RangeError, ShapeError, UnsupportedError

DEVICE = test_device()
DIMS = [(64, 64), (96, 24), (80, 2)]
WRITABLE = [
    pytest.param(kind, *dims, id=f"{kind_id(kind)}-{dims[0]}-{dims[1]}")
    for kind in (*FORMATS, *MORE_FORMATS)
    for dims in DIMS
    if "page_channel" not in str(kind) and fits(kind, dims[0], 16)
]


@pytest.mark.parametrize(("kind", "dim", "rotary_dim"), WRITABLE)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
def test_what_is_stored_is_what_rotating_before_would_store(kind, dim, rotary_dim, interleaved):
    rng = torch.Generator().manual_seed(dim)
    k, v = (torch.randn(9, 2, dim, generator=rng).to(DEVICE) for _ in range(2))
    rope = tkv.Rope.of(50, rotary_dim, theta=30.0, interleaved=interleaved, device=DEVICE)
    slots = torch.tensor([3, 4, -1, 30, 31, 0, 17, 18, 1], device=DEVICE)
    positions = torch.tensor([0, 1, 1000, 7, 49, 12, 3, 2, 1000], device=DEVICE)
    ours, theirs = (empty_cache(kind, "nhd", 2, 16, 2, dim, device=DEVICE) for _ in range(2))
    tkv.write_kv(k, v, ours, slots, rope=rope, positions=positions)
    reference.write_kv(k, v, theirs, slots, rope=rope, positions=positions)
    table, keys = torch.tensor([0, 1], device=DEVICE), slots[slots >= 0]
    (got_k, got_v), (want_k, want_v) = reference.gather(ours, table, keys), reference.gather(theirs, table, keys)
    assert torch.equal(got_v, want_v)
    # Numbers a hair apart may be rounded to neighbours: one step of the format, scales included.
    per_scale = 1 + max(1, dim // 32)
    step = {"fp32": 2.0**-21, "fp16": 2.0**-10, "bf16": 2.0**-7, "fp8_e4m3": 2.0**-3, "fp8_e5m2": 2.0**-2, "int8": 2.0**-6, "int4": 2.0**-2}
    allowed = step[ours.k_format.dtype] * want_k.abs().amax(-1, keepdim=True) * 1.01
    wrong = (got_k - want_k).abs() > 2.0**-11 * want_k.abs() + 1e-6
    assert bool(((got_k - want_k).abs() <= allowed).all())
    assert int(wrong.sum()) <= per_scale * 4 + (want_k.numel() if ours.k_format.is_native else want_k.numel() // 20)


def test_a_rotation_comes_with_positions_and_both_fit(monkeypatch):
    cache, rope = tkv.KVCache.empty(1, 16, 2, 32, "fp32", device=DEVICE), tkv.Rope.of(8, 32, device=DEVICE)
    k, slots = torch.zeros(2, 2, 32, device=DEVICE), torch.tensor([0, -1], device=DEVICE)
    for more in ({"rope": rope}, {"positions": slots}):
        with pytest.raises(UnsupportedError, match="positions: expected with rope, and rope with positions"):
            tkv.write_kv(k, k, cache, slots, **more)
    with pytest.raises(ShapeError, match=r"positions: expected shape \[2\], got \[1\]"):
        tkv.write_kv(k, k, cache, slots, rope=rope, positions=slots[:1])
    with pytest.raises(ShapeError, match="rope: expected tables for at most head_dim"):
        tkv.write_kv(k, k, cache, slots, rope=tkv.Rope.of(8, 64, device=DEVICE), positions=slots)
    shared = tkv.KVCache(cache.k, cache.k[..., :16])
    with pytest.raises(UnsupportedError, match="rope: v is a view of k"):
        tkv.write_kv(k, k[..., :16].contiguous(), shared, slots, rope=rope, positions=slots)
    monkeypatch.setenv("TKV_CHECK", "1")
    tkv.write_kv(k, k, cache, slots, rope=rope, positions=torch.tensor([7, 99], device=DEVICE))
    with pytest.raises(RangeError, match=r"positions: expected 0 to 7, rope's rows, got 8 at \[0\]"):
        tkv.write_kv(k, k, cache, slots, rope=rope, positions=torch.tensor([8, 0], device=DEVICE))
