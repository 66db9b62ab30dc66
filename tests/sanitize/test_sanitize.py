"""A handful of launches through Triton's real frontend, with every access checked for its bounds and every pair of programs for races."""

import pytest
import torch
import triton
import triton.language as tl
from problems import FORMATS, bits, build, empty_cache, test_device

import tkv
from tkv import reference
from tkv.kernels.args import PagedKV, Stored, TokenStrides
from tkv.tune.configs import AttentionConfig

pytestmark = pytest.mark.sanitize

DEVICE = test_device()
WHOLE = AttentionConfig(16, 16, 4, 1)
SPLITS = AttentionConfig(16, 16, 4, 1, 16)


@pytest.mark.parametrize("kind", FORMATS)
def test_decoding_reads_and_writes_within_bounds(kind):
    q_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}.get(kind, torch.float16)
    build(kind, [21, 0], 3, 1, 2, 24, q_dtype, layout="wide", launch={"config": WHOLE}).check()


def test_windows_sinks_and_blocks_of_queries():
    build("int8/token_head", [40], 16, 1, 2, 16, torch.float16, 3, window=9, sinks=2, launch={"config": WHOLE}).check()


def test_splits_and_their_reduction():
    build("fp8_e4m3/token_head", [40, 5], 16, 2, 1, 16, torch.float16, sink_logits=[1.0, 0.0], launch={"config": SPLITS}).check()
    build("fp32", [33], 16, 1, 1, 16, window=20, softcap=5.0, alibi_slopes=[0.5], launch={"config": SPLITS}).check()


def test_hints_and_lengths_that_lie():
    problem = build("fp16", [40, 33], 16, 1, 1, 16, torch.float16, launch={"config": SPLITS, "max_seq_len": 1})
    problem.check()
    problem.seq_lens[0] = 2**31 - 1
    problem.page_table[1, 0] = 2**30
    problem.run()


@pytest.mark.parametrize("kind", ["bf16", "fp8_e4m3/tensor", "fp8_e4m3/token_head", "int8/token_head"])
def test_writing_stays_in_its_slots(kind):
    k, v = (torch.randn(4, 3, 24, generator=torch.Generator().manual_seed(seed)).to(DEVICE) for seed in (1, 2))
    slots = torch.tensor([7, -1, 2, 2**31 - 1], dtype=torch.int32, device=DEVICE)
    caches = [empty_cache(kind, "wide", 2, 4, 3, 24, device=DEVICE) for _ in range(2)]
    tkv.write_kv(k, v, caches[0], slots)
    reference.write_kv(k, v, caches[1], slots)
    for a, b in ((caches[0].k, caches[1].k), (caches[0].v, caches[1].v), (caches[0].k_scale, caches[1].k_scale)):
        assert a is None or torch.equal(bits(a), bits(b))


def test_copying_pages():
    src, dst = (empty_cache("int8/token_head", layout, 2, 3, 3, 24, device=DEVICE) for layout in ("nhd", "hnd"))
    src.k.fill_(5)
    src.k_scale.fill_(2.0)
    tkv.copy_pages(src, dst, torch.tensor([1, 0, 2], device=DEVICE), torch.tensor([0, -1, 1], device=DEVICE))
    assert bool((dst.k[0] == 5).all() and (dst.k_scale[0] == 2).all() and (dst.k[1] != 5).all())


def test_merging_parts():
    outs, lses = torch.randn(3, 2, 24, device=DEVICE), torch.randn(3, 2, device=DEVICE)
    lses[1, 0] = -torch.inf
    outs[1, 0] = torch.nan
    out, lse = tkv.merge_states(outs, lses)
    ref, ref_lse = reference.merge_states(outs, lses)
    torch.testing.assert_close((out.double(), lse.double()), (ref, ref_lse), rtol=1e-5, atol=1e-5)


@triton.jit
def beyond_kernel(cache, out_ptr, BEYOND: tl.constexpr):
    lanes = tl.arange(0, 16)
    tl.store(out_ptr + lanes, tl.load(cache.v.ptr + lanes + BEYOND).to(tl.float32))


@triton.jit
def race_kernel(out_ptr):
    tl.store(out_ptr, tl.program_id(0))


def fault_of(launch):
    """What a launch is stopped for, and the message. The checker runs as the main module, so its error cannot be imported by name."""
    with pytest.raises(Exception, match="launch") as caught:
        launch()
    assert type(caught.value).__name__ == "KernelFault"
    return caught.value.fault.kind, str(caught.value)


def test_the_checker_finds_an_access_beyond_a_cache_and_a_race():
    """Also of pointers that a kernel gets inside of a tuple: else the tests above would prove little."""
    strides = TokenStrides(64, 16, 16)
    k, v = (torch.zeros(2, 4, 1, 16, device=DEVICE) for _ in "kv")
    cache = PagedKV(Stored(k, strides, None, strides), Stored(v, strides, None, strides))
    out = torch.zeros(16, device=DEVICE)
    beyond_kernel[(1,)](cache, out, 112)
    kind, message = fault_of(lambda: beyond_kernel[(1,)](cache, out, 113))
    assert kind == "oob_read" and "1 element(s) past the end" in message and "cache" in message
    kind, _ = fault_of(lambda: race_kernel[(2,)](torch.zeros(1, dtype=torch.int32, device=DEVICE)))
    assert kind == "race"
