"""Every format under the checker: written, quantised, attended to and gathered; V as a view of K."""

import pytest
import torch
from caches import LAYOUTS, MORE_FORMATS, bits, empty_cache, kind_id
from checked import DEVICE, SPLITS, WHOLE, tight
from problems import build
from ragged import build as build_ragged
from test_formats import latent

import tkv
from tkv import reference

pytestmark = pytest.mark.sanitize

BY_PAGE = [kind for kind in MORE_FORMATS if "page_channel" in kind[0]]
WRITABLE = [kind for kind in MORE_FORMATS if kind not in BY_PAGE]


def layout_of(kind):
    return LAYOUTS[MORE_FORMATS.index(kind) % len(LAYOUTS)]


def tensors(cache):
    return [t for t in (cache.k, cache.v, cache.k_scale, cache.v_scale) if t is not None]


def assert_alike(caches):
    for a, b in zip(*map(tensors, caches)):
        assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("kind", WRITABLE, ids=kind_id)
def test_writing_stays_in_its_slots(kind):
    rng = torch.Generator().manual_seed(1)
    k, v = (torch.randn(4, 3, 64, generator=rng).to(DEVICE) for _ in "kv")
    slots = torch.tensor([5, -1, 8, 0], device=DEVICE)
    caches = [empty_cache(kind, layout_of(kind), 2, 4, 3, 64, device=DEVICE) for _ in range(2)]
    tkv.write_kv(k, v, caches[0], slots)
    reference.write_kv(k, v, caches[1], slots)
    assert_alike(caches)


@pytest.mark.parametrize("kind", MORE_FORMATS, ids=kind_id)
def test_quantising_pages_stays_in_its_pages(kind):
    src = empty_cache("fp32", "wide", 3, 16, 2, 64, device=DEVICE)
    rng = torch.Generator().manual_seed(2)
    for data in (src.k, src.v):
        data.copy_(torch.randn(data.shape, generator=rng))
    caches = [empty_cache(kind, layout_of(kind), 2, 16, 2, 64, device=DEVICE) for _ in range(2)]
    pairs = [torch.tensor(pages, dtype=torch.int32, device=DEVICE) for pages in ([2, 0, 3, 1], [1, 2, 0, -1])]
    tkv.quantize_pages(src, caches[0], *pairs)
    reference.quantize_pages(src, caches[1], *pairs)
    assert_alike(caches)


@pytest.mark.parametrize("kind", MORE_FORMATS, ids=kind_id)
def test_attention_reads_what_is_seen(kind):
    problem = build(kind, (37, 0, 5), 16, 2, 2, 64, layout=layout_of(kind), v_dim=32 if "group64" not in str(kind) else None)
    tight(problem, config=SPLITS).check()
    ragged = build_ragged(kind, [3, 0, 1], [20, 4, 2], 16, 1, 2, 64, layout=layout_of(kind))
    tight(ragged, config=WHOLE).check()


@pytest.mark.parametrize("kind", ["int4/group32", "int8/group32", "int4/token_head"])
def test_rows_of_two_runs(kind):
    tight(build(kind, (20, 5), 16, 1, 2, 384 if "int4" in kind else 192), config=WHOLE).check()


@pytest.mark.parametrize("kind", ["bf16", "fp8_e4m3/tensor", "int8/token_head"])
def test_v_as_a_view_of_k(kind):
    dims = (96, 64) if kind == "bf16" else (192, 128)
    tight(latent(kind, *dims, (20, 5), q_dtype=torch.bfloat16), config=SPLITS).check()
    tight(latent(kind, 96, 80, (20, 5), q_dtype=torch.bfloat16), config=WHOLE).check()


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("kind", ["fp16", "fp8_e4m3/tensor", "int8/channel", "int4/group32", BY_PAGE[0]], ids=kind_id)
def test_gathering_reads_what_is_kept(kind, dense):
    problem = tight(build(kind, (37, 0, 5), 16, 2, 1, 64, layout="hnd"))
    cache, table, lens = problem.cache, problem.page_table, problem.seq_lens
    expected = reference.gather_window(cache, table, lens, window=9, sinks=3)
    k, _, positions, cu_lens = tkv.gather_window(cache, table, lens, window=9, sinks=3, dense=dense, dtype=torch.float32)
    for seq, (of_k, _, of_positions) in enumerate(expected):
        at = (seq, slice(0, len(of_k))) if dense else slice(int(cu_lens[seq]), int(cu_lens[seq + 1]))
        assert positions[at].tolist() == of_positions.tolist()
        torch.testing.assert_close(k[at].double(), of_k, rtol=1e-6, atol=1e-30)
    # Lengths and pages that lie lead nowhere.
    wrong = torch.full_like(table, 2**31 - 1)
    wrong[0] = -7
    tkv.gather_window(cache, wrong, torch.full_like(lens, 2**31 - 1), window=None, dense=dense)
    far = torch.full_like(lens, 2**31 - 1)
    tkv.gather_window(cache, table, torch.full_like(lens, -5), window=2**30, sinks=2**30, kv_start=far, dense=dense)
