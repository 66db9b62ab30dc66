"""compact_kv, rotate_keys, and rotation on the way into the cache and out of it, under the checker."""

import pytest
import torch
from caches import FORMATS, LAYOUTS, MORE_FORMATS, bits, empty_cache, kind_id
from checked import DEVICE, lies_of, tight
from problems import build

import tkv
from tkv import Rope, reference

pytestmark = pytest.mark.sanitize

KINDS = (*FORMATS, *MORE_FORMATS)
WRITABLE = [kind for kind in KINDS if "page_channel" not in kind[0]]


def indices(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def layout_of(kind):
    return LAYOUTS[KINDS.index(kind) % len(LAYOUTS)]


def rope_of(rows, dim, interleaved=False):
    return Rope.of(rows, dim, theta=300.0, interleaved=interleaved, device=DEVICE)


def noisy(kind, layout, pages, page_size, heads, dim, seed=0):
    """A cache and scores of random bytes, and its tensors that are not static scales."""
    cache = empty_cache(kind, layout, pages, page_size, heads, dim, device=DEVICE)
    scores = torch.empty(pages, page_size, heads, device=DEVICE)
    scales = ((cache.k_scale, cache.k_format), (cache.v_scale, cache.v_format))
    tensors = [cache.k, cache.v, *(scale for scale, form in scales if form.is_dynamic), scores]
    rng = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        noise = torch.randint(0, 256, (tensor.numel() * tensor.element_size(),), generator=rng, dtype=torch.uint8)
        tensor.copy_(noise.view(tensor.dtype).view(tensor.shape))
    return cache, scores, tensors


def check_compact(kind, layout, page_size, heads, dim, *call, **options):
    sides = [noisy(kind, layout, 6, page_size, heads, dim) for _ in range(2)]
    for compact, (cache, scores, _) in zip((tkv.compact_kv, reference.compact_kv), sides):
        compact(cache, *call, scores=scores, **options)
    for got, want in zip(*(tensors for *_, tensors in sides)):
        assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("kind", KINDS, ids=kind_id)
def test_keys_move_within_their_pages_and_into_others(kind):
    page_size = 16
    table, runs = indices([[3, 0, 5], [1, -1, 2**31 - 1]]), torch.arange(48, device=DEVICE).view(3, 16)
    if "page_channel" in kind[0]:
        keep = torch.stack([torch.cat([runs[0], runs[2]]), torch.cat([runs[1], runs[2]])])[None].repeat(2, 1, 1).int()
        keep_lens = indices([32, 0])
    else:
        keep = torch.stack([runs.flatten()[1::2], runs.flatten()[::2]])[None].repeat(2, 1, 1).int()
        keep_lens = indices([24, 8])
    check_compact(kind, layout_of(kind), page_size, 2, 64, table, keep, keep_lens)
    check_compact(kind, layout_of(kind), page_size, 2, 64, table, keep, keep_lens, dst_page_table=indices([[3, 2], [4, -1]]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_lies_lead_nowhere(dtype):
    for lie in lies_of(dtype):
        table, keep, lens = indices([[1, 0]], dtype), indices([[[0, 2, 3, 5]]], dtype), indices([4], dtype)
        wrong_table, wrong_keep, wrong_lens = indices([[1, lie]], dtype), indices([[[0, lie, 3, 5]]], dtype), indices([lie], dtype)
        for wrong in ((wrong_table, keep, lens), (table, wrong_keep, lens), (table, keep, wrong_lens)):
            cache, scores, _ = noisy("int8/token_head", "nhd", 2, 3, 1, 16)
            tkv.compact_kv(cache, *wrong, scores=scores)
            tkv.compact_kv(cache, *wrong, scores=scores, dst_page_table=indices([[lie, 1]], dtype))
        native, rope, zeros = tkv.KVCache.empty(2, 3, 1, 16, "fp16", device=DEVICE), rope_of(4, 16), indices([[0] * 5], dtype)
        tkv.rotate_keys(native, wrong_table, lens, zeros, zeros + 1, rope)
        tkv.rotate_keys(native, table, wrong_lens, zeros, zeros + 1, rope)
        tkv.rotate_keys(native, table, lens, zeros, zeros + lie, rope)
        k = torch.randn(2, 1, 16, device=DEVICE)
        tkv.write_kv(k, k, native, indices([1, lie], dtype), rope=rope, positions=indices([lie, lie], dtype))
        tkv.gather_window(native, table, lens, window=3, sinks=1, kv_start=wrong_lens, pinned=3, rope=rope)
        tkv.gather_window(native, table, lens, window=None, kv_start=wrong_lens, pinned=3, rope=rope)
        tkv.gather_window(native, wrong_table, wrong_lens, window=3, sinks=1, dequantize=False)


@pytest.mark.parametrize("kind", WRITABLE, ids=kind_id)
def test_keys_are_rotated_on_the_way_in_and_out(kind):
    rng = torch.Generator().manual_seed(1)
    k, v = (torch.randn(3, 3, 64, generator=rng).to(DEVICE) for _ in "kv")
    cache = empty_cache(kind, layout_of(kind), 2, 4, 3, 64, device=DEVICE)
    for rope in (rope_of(9, 64), rope_of(9, 22, True)):
        tkv.write_kv(k, v, cache, indices([5, -1, 0]), rope=rope, positions=indices([8, 99, 4]))
    table, lens = indices([[1, 0], [0, 1]]), indices([6, 1])
    tkv.gather_window(cache, table, lens, window=3, sinks=2, rope=rope_of(5, 64), dense=True)
    tkv.gather_window(cache, table, lens, window=None, rope=rope_of(5, 22, True), kv_start=indices([3, 0]), pinned=4)


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("kind", ["fp16", "fp8_e4m3/tensor", "int8/group32", "int4/token_head", ("bf16", "int8/token_head")], ids=kind_id)
def test_gathering_as_stored_reads_what_is_kept(kind, dense):
    problem = tight(build(kind, (21, 0, 5), 16, 2, 1, 32, layout="hnd"))
    cache, table, lens = problem.cache, problem.page_table, problem.seq_lens
    results = tkv.gather_window(cache, table, lens, window=9, sinks=3, dense=dense, dequantize=False)
    page, row = table[0, 20 // 16].long(), 20 % 16
    assert torch.equal(bits(results[0][(0, 11) if dense else 11]), bits(cache.k[page, row]))


@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16"])
def test_turning_keys_stays_in_their_dims(kind):
    for layout, dim, rope in (("wide", 24, rope_of(50, 24)), ("hnd", 40, rope_of(50, 18, True)), ("interleaved", 48, rope_of(50, 34))):
        cache = empty_cache(kind, layout, 3, 3, 2, dim, device=DEVICE)
        before = bits(cache.v)
        old = indices([[0, 5, 7, 9, 1], [40, 0, 3, 3, 3]])
        tkv.rotate_keys(cache, indices([[2, 0], [1, -1]]), indices([5, 2]), old, indices([[7, 5, 0, 49, 2]] * 2), rope)
        assert torch.equal(bits(cache.v), before)
