"""compact_kv: kept keys move to the front bit by bit, with their scales and scores; nothing else changes."""

import pytest
import torch
from caches import FORMATS, LAYOUTS, MORE_FORMATS, bits, kind_id
from hypothesis import given
from hypothesis import strategies as st
from problems import build, effort, test_device

import tkv
from tkv import reference
from tkv.errors import RangeError, ShapeError

DEVICE = test_device()


def copy_of(cache):
    """The same cache in memory of its own."""
    scales = [scale if scale is None or kind.is_static else scale.clone() for scale, kind in _scales(cache)]
    return tkv.KVCache(cache.k.clone(), cache.v.clone(), *scales, format=(cache.k_format, cache.v_format))


def _scales(cache):
    return ((cache.k_scale, cache.k_format), (cache.v_scale, cache.v_format))


def kept(lens, heads, page_size, rng, whole_pages=False):
    """(keep, keep_lens): some keys of each sequence, others for each head."""
    counts, lists = [], []
    for n in lens:
        unit = page_size if whole_pages else 1
        count = int(torch.randint(0, n // unit + 1, (), generator=rng))
        counts.append(count * unit)
        rows = []
        for _ in range(heads):
            chosen = torch.randperm(n // unit, generator=rng)[:count].sort()[0]
            rows.append((chosen[:, None] * unit + torch.arange(unit)).flatten())
        lists.append(rows)
    keep = torch.full((len(lens), heads, max([*counts, 1]) + 2), 2**31 - 1, dtype=torch.int32)
    for seq, rows in enumerate(lists):
        for head, row in enumerate(rows):
            keep[seq, head, : len(row)] = row
    return keep.to(DEVICE), torch.tensor(counts, dtype=torch.int32, device=DEVICE)


def check(kind, lens, page_size, layout="nhd", heads=2, dim=64, seed=0, in_place=None, with_scores=True):
    problem = build(kind, lens, page_size, heads, 1, dim, layout=layout, seed=seed)
    cache, rng = problem.cache, torch.Generator().manual_seed(seed)
    # A table of pages that exist, with room for others.
    pages = torch.randperm(cache.num_pages, generator=rng)
    width = max(-(-max(lens) // page_size), 1)
    table = torch.full((len(lens), width), -1, dtype=torch.int32)
    used = 0
    for seq, n in enumerate(lens):
        count = -(-n // page_size)
        table[seq, :count] = pages[used : used + count]
        used += count
    whole = "page_channel" in str(cache.k_format)
    keep, keep_lens = kept(lens, heads, page_size, rng, whole)
    dst = None
    if in_place is not None:
        bigger = copy_of(cache)
        extra = -(-keep_lens // page_size)
        tensors = (bigger.k, bigger.v, bigger.k_scale, bigger.v_scale)
        grown = [torch.cat([t, t.flip(0)]) if t is not None and t.dim() > 2 else t for t in tensors]
        if any(kind_of.is_static for _, kind_of in _scales(cache)):
            grown[2:] = [cache.k_scale, cache.v_scale]
        half, cache = cache.num_pages, tkv.KVCache(*grown, format=(cache.k_format, cache.v_format))
        dst = table.clone()
        taken = 0
        for seq, moved in enumerate(in_place):
            if not moved:
                dst[seq] = -1
                dst[seq, : int(extra[seq])] = half + torch.arange(taken, taken + int(extra[seq]))
                taken += int(extra[seq])
        dst = dst.to(DEVICE)
    table = table.to(DEVICE)
    scores = torch.rand(cache.num_pages, heads, page_size, generator=rng).to(DEVICE).transpose(1, 2) if with_scores else None
    expected, expected_scores = copy_of(cache), None if scores is None else scores.clone()
    reference.compact_kv(expected, table, keep, keep_lens, scores=expected_scores, dst_page_table=dst)
    tkv.compact_kv(cache, table, keep, keep_lens, scores=scores, dst_page_table=dst)
    for got, want in ((cache.k, expected.k), (cache.v, expected.v), (cache.k_scale, expected.k_scale), (cache.v_scale, expected.v_scale)):
        if got is not None:
            assert torch.equal(bits(got), bits(want))
    if scores is not None:
        assert torch.equal(scores, expected_scores)


@pytest.mark.parametrize("kind", [*FORMATS, *MORE_FORMATS], ids=kind_id)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_format_moves_bit_by_bit(kind, layout):
    check(kind, (70, 0, 5, 96), 32, layout, seed=1)


@effort(60)
@given(st.data())
def test_any_keys_in_place_and_to_other_pages(data):
    draw = data.draw
    kind = draw(st.sampled_from(["fp16", "int8/token_head", "int4/token_head"]))
    lens = draw(st.lists(st.integers(0, 90), min_size=1, max_size=4))
    moved = draw(st.one_of(st.none(), st.lists(st.booleans(), min_size=len(lens), max_size=len(lens))))
    check(
        kind, lens, draw(st.sampled_from([1, 3, 16])), draw(st.sampled_from(LAYOUTS)), draw(st.integers(1, 3)),
        draw(st.sampled_from([32, 96])), draw(st.integers(0, 999)), moved, draw(st.booleans()),
    )  # fmt: skip


def test_keeping_all_keeps_every_bit():
    problem = build("int8/token_head", (40, 17), 16, 2, 1, 64)
    cache, before = problem.cache, copy_of(problem.cache)
    table = torch.arange(cache.num_pages, device=DEVICE)[:5].view(1, 5)
    keep = torch.arange(80, device=DEVICE)[None, None]
    tkv.compact_kv(cache, table, keep, torch.tensor([80], device=DEVICE))
    for got, want in ((cache.k, before.k), (cache.v, before.v), (cache.k_scale, before.k_scale), (cache.v_scale, before.v_scale)):
        assert torch.equal(bits(got), bits(want))


def test_attention_after_it_is_attention_over_what_was_kept():
    rng = torch.Generator().manual_seed(3)
    n, heads = 50, 2
    q, k, v = torch.randn(1, 4, 32, generator=rng), torch.randn(n, heads, 32, generator=rng), torch.randn(n, heads, 32, generator=rng)
    q, k, v = (x.to(DEVICE) for x in (q, k, v))
    cache = tkv.KVCache.empty(4, 16, heads, 32, "fp32", device=DEVICE)
    table, slots = torch.tensor([[2, 0, 3, 1]], device=DEVICE), torch.tensor([2, 0, 3, 1], device=DEVICE)
    slots = slots[torch.arange(n, device=DEVICE) // 16] * 16 + torch.arange(n, device=DEVICE) % 16
    tkv.write_kv(k, v, cache, slots)
    keep = torch.stack([torch.arange(0, 50, 2), torch.arange(25, 50)]).to(DEVICE)[None]
    tkv.compact_kv(cache, table, keep, torch.tensor([25], device=DEVICE))
    got = tkv.paged_decode(q, cache, table, torch.tensor([25], device=DEVICE))
    for head in range(heads):
        of_head = keep[0, head]
        x = q[0, 2 * head : 2 * head + 2] @ k[of_head, head].T / 32**0.5
        torch.testing.assert_close(got[0, 2 * head : 2 * head + 2], x.softmax(-1) @ v[of_head, head], rtol=1e-5, atol=1e-5)


def test_latent_caches_move_once():
    k = torch.randn(3, 16, 1, 48, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    cache, before = tkv.KVCache(k, k[..., :32]), k.clone()
    keep = torch.tensor([[[1, 20, 40]]], device=DEVICE)
    tkv.compact_kv(cache, torch.tensor([[2, 1, 0]], device=DEVICE), keep, torch.tensor([3], device=DEVICE))
    assert torch.equal(k[2, :3, 0], torch.stack([before[2, 1, 0], before[1, 4, 0], before[0, 8, 0]]))
    assert torch.equal(k[2, 3:], before[2, 3:]) and torch.equal(k[:2], before[:2])


def test_what_is_not_in_the_cache_is_skipped():
    k = torch.arange(32.0, device=DEVICE).view(2, 16, 1, 1).repeat(1, 1, 1, 16)
    cache, before = tkv.KVCache(k, -k.clone()), k.clone()
    keep = torch.tensor([[[3, 40, 2**31 - 1]]], dtype=torch.int32, device=DEVICE)
    tkv.compact_kv(cache, torch.tensor([[1, 99]], device=DEVICE), keep, torch.tensor([3], device=DEVICE))
    assert cache.k[1, :3, 0, 0].tolist() == [19.0, 17.0, 18.0] and torch.equal(cache.k[0], before[0])


def test_wrong_arguments_are_named(monkeypatch):
    cache = tkv.KVCache.empty(4, 16, 2, 32, "fp32", device=DEVICE)
    table, lens = torch.tensor([[0, 1], [2, 3]], device=DEVICE), torch.tensor([2, 1], device=DEVICE)
    keep = torch.tensor([[[1, 4]], [[0, 0]]], device=DEVICE)
    with pytest.raises(ShapeError, match=r"keep: expected \[num_seqs, 2 or 1, K\], .* got \[2, 3, 2\]"):
        tkv.compact_kv(cache, table, keep.repeat(1, 3, 1), lens)
    with pytest.raises(ShapeError, match="scores: expected shape"):
        tkv.compact_kv(cache, table, keep, lens, scores=torch.zeros(4, 16, 1, device=DEVICE))
    monkeypatch.setenv("TKV_CHECK", "1")
    tkv.compact_kv(cache, table, keep, lens)
    for wrong, match in (
        (torch.tensor([[[4, 1]], [[0, 0]]]), r"keep: expected keys that ascend, each once, got \[4, 1\] for sequence 0"),
        (torch.tensor([[[1, 32]], [[0, 0]]]), "keep: expected keys from 0 to 31, got 32 for sequence 0"),
        (torch.tensor([[[1, 1]], [[0, 0]]]), r"each once, got \[1, 1\] for sequence 0"),
    ):
        with pytest.raises(RangeError, match=match):
            tkv.compact_kv(cache, table, wrong.to(DEVICE), lens)
    with pytest.raises(RangeError, match="keep_lens: expected 0 to 2"):
        tkv.compact_kv(cache, table, keep, lens + 1)
    with pytest.raises(RangeError, match=r"is written for sequence .* fork before"):
        tkv.compact_kv(cache, torch.tensor([[0, 1], [0, 3]], device=DEVICE), keep, lens)
    by_page = tkv.KVCache.empty(4, 16, 1, 32, ("int8/page_channel", "int8/token_head"), device=DEVICE)
    with pytest.raises(RangeError, match="keep: expected whole pages of 16 keys"):
        tkv.compact_kv(by_page, table, keep, lens)
