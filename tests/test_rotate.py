"""rotate_keys: cached keys turn to other positions, and nothing else changes."""

import pytest
import torch
from caches import LAYOUTS, bits
from problems import build, test_device

import tkv
from tkv import reference
from tkv.errors import RangeError, ShapeError, UnsupportedError

DEVICE = test_device()


def problem_of(kind="fp32", lens=(40, 0, 7), dim=64, layout="nhd"):
    problem = build(kind, lens, 16, 2, 1, dim, layout=layout, seed=4)
    rng = torch.Generator().manual_seed(1)
    old, new = (torch.randint(0, 30, (len(lens), 35), generator=rng).int().to(DEVICE) for _ in range(2))
    new[:, ::5] = old[:, ::5]
    return problem, old, new


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_keys_turn_by_the_difference(kind, layout, interleaved):
    for dim, rotary_dim, factor in ((64, 64, 1.0), (96, 24, 1.3)):
        problem, old, new = problem_of(kind, dim=dim, layout=layout)
        cache, table, lens = problem.cache, problem.page_table, problem.seq_lens
        tables = tkv.Rope.of(30, rotary_dim, theta=40.0, interleaved=interleaved, device=DEVICE)
        rope = tkv.Rope(tables.cos * factor, tables.sin * factor, interleaved)
        expected = tkv.KVCache(cache.k.clone(), cache.v)
        reference.rotate_keys(expected, table, lens, old, new, rope)
        before, values = cache.k.clone(), cache.v.clone()
        tkv.rotate_keys(cache, table, lens, old, new, rope)
        assert torch.equal(bits(cache.v), bits(values))
        still = torch.ones(before.shape[:2], dtype=torch.bool, device=DEVICE)
        for seq, n in enumerate(lens.tolist()):
            keys = torch.arange(min(n, old.shape[1]), device=DEVICE)
            keys = keys[(new != old)[seq, keys]]
            still[table[seq, keys // 16].long(), keys % 16] = False
        assert 0 < int(still.sum()) < still.numel()
        assert torch.equal(bits(cache.k[still]), bits(before[still])), "what does not turn keeps every bit"
        assert torch.equal(bits(cache.k[..., rotary_dim:]), bits(before[..., rotary_dim:]))
        digits = {"fp32": 21, "fp16": 10, "bf16": 7}[kind]
        got, want = cache.k.double().nan_to_num(0.0), expected.k.double().nan_to_num(0.0)
        finite = want.isfinite() & (want.abs() < 1e4)
        torch.testing.assert_close(got[finite], want[finite], rtol=2.0**-digits, atol=2.0**-20)


def test_there_and_back_is_where_it_was():
    problem, old, new = problem_of()
    cache, table, lens = problem.cache, problem.page_table, problem.seq_lens
    rope, before = tkv.Rope.of(30, 64, device=DEVICE), cache.k.clone()
    for first, second in ((old, new), (new, old)):
        tkv.rotate_keys(cache, table, lens, first, second, rope)
    torch.testing.assert_close(cache.k, before, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_attention_sees_keys_where_they_have_turned_to():
    rng, n = torch.Generator().manual_seed(7), 20
    q, k, v = (torch.randn(count, 1, 32, generator=rng).to(DEVICE) for count in (1, n, n))
    rope, slots = tkv.Rope.of(100, 32, theta=50.0, device=DEVICE), torch.arange(n, device=DEVICE)
    table, lens = torch.tensor([[0, 1]], device=DEVICE), torch.tensor([n], device=DEVICE)
    new = torch.arange(n, device=DEVICE) + 50
    turned, written = (tkv.KVCache.empty(2, 16, 1, 32, "fp32", device=DEVICE) for _ in range(2))
    tkv.write_kv(k, v, turned, slots, rope=rope, positions=slots)
    tkv.rotate_keys(turned, table, lens, slots[None], new[None], rope)
    tkv.write_kv(k, v, written, slots, rope=rope, positions=new)
    torch.testing.assert_close(tkv.paged_decode(q, turned, table, lens), tkv.paged_decode(q, written, table, lens), rtol=0, atol=1e-5)


def test_what_cannot_turn_is_refused(monkeypatch):
    rope = tkv.Rope.of(8, 32, device=DEVICE)
    cache = tkv.KVCache.empty(2, 16, 1, 32, "int8/token_head", device=DEVICE)
    table, lens, pos = (torch.tensor(x, device=DEVICE) for x in ([[0, 0]], [20], [[1] * 20]))
    with pytest.raises(UnsupportedError, match="expected native keys, got int8/token_head: rotating quantised keys"):
        tkv.rotate_keys(cache, table, lens, pos, pos, rope)
    cache = tkv.KVCache.empty(2, 16, 1, 32, "fp32", device=DEVICE)
    with pytest.raises(ShapeError, match="new_pos: expected shape"):
        tkv.rotate_keys(cache, table, lens, pos, pos[:, 1:], rope)
    with pytest.raises(UnsupportedError, match="v is a view of k"):
        tkv.rotate_keys(tkv.KVCache(cache.k, cache.k), table, lens, pos, pos, rope)
    monkeypatch.setenv("TKV_CHECK", "1")
    with pytest.raises(RangeError, match="rope: expected tables for differences up to 9, got 8 rows"):
        tkv.rotate_keys(cache, table, lens, pos, pos + 9, rope)
    with pytest.raises(RangeError, match="pages that come twice"):
        tkv.rotate_keys(cache, table, lens, pos, pos + 1, rope)
