"""Attention over every way to store a cache: formats, mixed pairs, head dims of K and V, V as a view of K."""

import pytest
import torch
from caches import MORE_FORMATS, kind_id, q_dtypes
from hypothesis import given, seed
from hypothesis import strategies as st
from problems import Problem, build, effort, problems, test_device
from ragged import build as build_ragged
from ragged import ragged_problems
from trees import grow, trees

import tkv
from tkv import reference
from tkv.errors import UnsupportedError
from tkv.tune.configs import AttentionConfig

DEVICE = test_device()
MIXED = ("bf16", "int8/token_head")
SMALL = AttentionConfig(16, 16, 4, 1, 32)
BY_TOKEN = [kind for kind in MORE_FORMATS if "page_channel" not in kind[0]]
BY_PAGE = [kind for kind in MORE_FORMATS if "page_channel" in kind[0]]


@pytest.mark.parametrize("kind", MORE_FORMATS, ids=kind_id)
def test_any_problem_of_decoding_agrees_with_the_reference(kind):
    @seed(MORE_FORMATS.index(kind))
    @effort(3)
    @given(problems(kind))
    def search(problem):
        problem.check()

    search()


@pytest.mark.parametrize("kind", MORE_FORMATS, ids=kind_id)
def test_any_problem_of_prefill_agrees_with_the_reference(kind):
    @seed(MORE_FORMATS.index(kind))
    @effort(2)
    @given(ragged_problems(kind))
    def search(problem):
        problem.check()

    search()


@pytest.mark.parametrize("kind", BY_TOKEN, ids=kind_id)
def test_any_problem_of_shared_prefixes_agrees_with_the_reference(kind):
    @seed(MORE_FORMATS.index(kind))
    @effort(1)
    @given(trees(kind))
    def search(problem):
        problem.check()

    search()


@pytest.mark.parametrize("kind", BY_PAGE, ids=kind_id)
def test_a_shared_prefix_of_whole_pages_is_attended_to_at_once(kind):
    problem = build(kind, (70, 70, 70), 32, 2, 2, 64, torch.float32, layout="hnd", spike=6.0)
    table = problem.page_table.clone()
    table[1:, :2] = table[0, :2]
    levels = tkv.find_shared_levels(table, problem.seq_lens, 32)
    assert len(levels) == 1
    ref = reference.paged_decode(problem.q, problem.cache, table, problem.seq_lens)
    out = tkv.shared_prefix_decode(problem.q, problem.cache, levels, table, problem.seq_lens, config=SMALL, level_config=SMALL)
    torch.testing.assert_close(out.double(), ref[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("q_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int4/token_head", "int4/group32", ("int4/page_channel", "int4/token_head")], ids=kind_id)
def test_numbers_far_from_zero_with_little_between_them(kind, q_dtype):
    """A minimum that is large against its scale, and one that nearly cancels a code: neither loses what is left."""

    def far(q, k, v):
        k[::3] = k[::3] * 1e-3 + 3.0
        v[::2] = v[::2] * 1e-3 - 50.0
        v[1::4] = 7.0
        v[3::4, :, 5] = -30.0

    for page_size in (16, 32):
        build(kind, (75, 20), page_size, 1, 4, 64, q_dtype, edit=far, spike=4.0, launch={"config": SMALL}).check()


@pytest.mark.parametrize("q_dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("outlier", [30.0, 1000.0, 60000.0])
def test_keys_with_a_channel_far_above_the_others_which_the_query_does_not_see(outlier, q_dtype):
    """A minimum of 0.1 beside a scale that is a thousand times as large: it must not lose its bits to it."""
    steps = 0.1 + 6.1e-5 * torch.arange(40.0) % 4

    def channel(q, k, v):
        k[:] = steps[:, None, None].half().float()
        k[:, :, 5] = outlier
        q[:] = (q.abs() * 50 + 350).to(q.dtype)
        q[..., 5] = 0

    build(("int4/token_head", "int8/token_head"), (40,), 16, 1, 2, 64, q_dtype, edit=channel).check()


@pytest.mark.parametrize("kind", [kind for kind in MORE_FORMATS if "bf16" not in kind], ids=kind_id)
def test_queries_of_a_hundred_thousand_do_not_overflow(kind):
    for q_dtype in q_dtypes(kind)[::-1]:
        problem = build(kind, (40, 3), 16, 1, 2, 64, q_dtype, q_scale=1e5 if q_dtype != torch.float16 else 6e4, k_amplitude=1e-2)
        out, lse = problem.check()
        assert bool(out.isfinite().all()) and bool(lse.isfinite().all())


@pytest.mark.parametrize(("dim", "v_dim"), [(192, 128), (64, 128), (72, 40), (320, 64), (576, 512)])
@pytest.mark.parametrize("kind", ["fp32", "fp8_e5m2/head", ("int8/token_head", "int4/token_head"), MIXED], ids=kind_id)
def test_heads_of_k_and_v_may_differ_in_size(kind, dim, v_dim):
    if "int4/token_head" in kind and v_dim % 16:
        v_dim += 8
    small = AttentionConfig(16, 16, 4, 1, 32)
    build(kind, (37, 5), 16, 1, 2, dim, v_dim=v_dim, launch={"config": small}, spike=5.0).check()
    build_ragged(kind, [3, 1], [20, 5], 16, 1, 2, dim, v_dim=v_dim, launch={"config": small}, spike=5.0).check()


@pytest.mark.parametrize("kind", ["int4/token_head", "int4/group32", "int8/group32", "fp8_e5m2/tensor"])
def test_rows_whose_words_are_cut_into_two_runs(kind):
    for dim in (96, 192, 320, 384):
        build(kind, (21, 3), 16, 2, 2, dim, torch.float16, launch={"config": SMALL}, layout="wide").check()


def latent(kind, dim=96, v_dim=64, lens=(37, 5, 64), group=8, q_dtype=torch.float32):
    """Decoding over a cache whose V is a view of its K, as multi-head latent attention has it."""
    rng = torch.Generator().manual_seed(dim)
    form = tkv.KVFormat.parse(kind)
    pages = sum(-(-n // 16) for n in lens) + 1
    k = torch.empty(pages, 16, 1, dim, dtype=form.torch_dtype, device=DEVICE)
    scale = torch.full((pages, 16, 1), torch.nan, device=DEVICE) if form.is_dynamic else 0.5 if form.is_static else None
    cache = tkv.KVCache(k, k[..., :v_dim], scale)
    order, table = torch.randperm(pages, generator=rng).tolist(), torch.full((len(lens), 5), -1, dtype=torch.int32)
    for seq, n in enumerate(lens):
        mine = torch.tensor([order.pop() for _ in range(-(-n // 16))])
        table[seq, : len(mine)] = mine
        slots = (mine[torch.arange(n) // 16] * 16 + torch.arange(n) % 16).to(DEVICE)
        keys = torch.randn(n, 1, dim, generator=rng).to(DEVICE)
        # V is not read: it is K's.
        tkv.write_kv(keys, torch.full((n, 1, v_dim), torch.nan, device=DEVICE), cache, slots)
    q = torch.randn(len(lens), group, dim, generator=rng).to(q_dtype).to(DEVICE)
    return Problem(q, cache, table.to(DEVICE), torch.tensor(lens, dtype=torch.int32, device=DEVICE))


class TestLatent:
    @pytest.mark.parametrize(("dim", "v_dim", "group"), [(96, 64, 8), (192, 128, 3), (96, 80, 1), (64, 64, 20), (576, 512, 16)])
    @pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "fp8_e4m3/tensor", "fp8_e5m2/tensor", "int8/token_head"])
    def test_v_is_a_view_of_k(self, kind, dim, v_dim, group):
        own = tkv.KVFormat.parse(kind).torch_dtype
        q_dtype = own if own.itemsize == 2 else torch.float32 if kind == "fp32" or dim == 192 else torch.bfloat16
        problem = latent(kind, dim, v_dim, group=group, q_dtype=q_dtype)
        assert problem.cache.v_is_k
        for config in (SMALL, None):
            problem.launch["config"] = config
            problem.check()

    @pytest.mark.parametrize("kind", ["bf16", "int8/token_head"])
    def test_k_is_loaded_once(self, kind):
        loads = pytest.importorskip("tkv.demo.loads")
        problem = latent(kind, 192, 128, q_dtype=torch.bfloat16)
        with loads.count_loads(problem.cache.k) as counted:
            problem.run(config=AttentionConfig(16, 16, 4, 1))
        assert counted.bytes == int(problem.seq_lens.sum()) * 192 * problem.cache.k.element_size()

    @pytest.mark.parametrize("kind", ["bf16", "fp8_e4m3/tensor"])
    def test_prefill_and_shared_prefixes(self, kind):
        problem = latent(kind, lens=(40, 40), q_dtype=torch.bfloat16)
        table = problem.page_table.clone()
        table[1, :2] = table[0, :2]
        levels = tkv.find_shared_levels(table, problem.seq_lens, 16)
        ref = reference.paged_decode(problem.q, problem.cache, table, problem.seq_lens)
        shared = {"config": SMALL, "level_config": AttentionConfig(16, 16, 4, 1)}
        out = tkv.shared_prefix_decode(problem.q, problem.cache, levels, table, problem.seq_lens, **shared)
        torch.testing.assert_close(out.double(), ref[0], rtol=2e-2, atol=2e-2)
        cu_seqlens = torch.tensor([0, 1, 2], dtype=torch.int32, device=DEVICE)
        k, v = (torch.randn(2, 1, size, device=DEVICE).bfloat16() for size in (96, 64))
        for new in ((None, None), (k, v)):
            prefix = problem.seq_lens - (1 if new[0] is None else 0)
            args = (problem.q, *new, problem.cache, problem.page_table, prefix, cu_seqlens)
            ref = reference.prefix_prefill(*args)
            torch.testing.assert_close(tkv.prefix_prefill(*args).double(), ref[0], rtol=2e-2, atol=2e-2)


def test_q_fits_both_sides_of_a_mixed_cache():
    q, table, lens = torch.zeros(1, 2, 64), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    for pair in (("bf16", "int8/token_head"), ("int8/token_head", "bf16"), ("bf16", "fp16")):
        cache = tkv.KVCache.empty(1, 16, 1, 64, pair)
        with pytest.raises(UnsupportedError, match="q: a bf16 cache needs q in"):
            tkv.paged_decode(q.half(), cache, table, lens)
        tkv.paged_decode(q.to(DEVICE), tkv.KVCache.empty(1, 16, 1, 64, pair, device=DEVICE), table.to(DEVICE), lens.to(DEVICE))


@pytest.mark.parametrize("kind", ["int8/channel", "fp8_e4m3/head", "int4/group64"])
@given(data=st.data())
@effort(2)
def test_a_result_does_not_depend_on_the_neighbours(kind, data):
    problem = data.draw(problems(kind))
    out, _ = problem.run(deterministic=True)
    alone = slice(0, 1)
    options = {name: x[alone] if name in ("kv_start", "q_start") else x for name, x in problem.options.items()}
    launch = {name: x for name, x in problem.launch.items() if name != "max_seq_len"}
    again = tkv.paged_decode(
        problem.q[alone], problem.cache, problem.page_table[alone], problem.seq_lens[alone], deterministic=True, **options, **launch
    )
    assert torch.equal(out[alone], again)


def test_levels_over_a_mixed_cache():
    for kind in (("int4/token_head", "fp8_e5m2/tensor"), ("bf16", "int8/token_head")):
        grow(kind, (64,), ((0,), (0,), (0,)), (5, 9, 1), dim=64, v_dim=32, group=2, spike=6.0, launch={"level_config": SMALL}).check()
