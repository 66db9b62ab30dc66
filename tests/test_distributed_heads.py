"""What a rank has of a cache under tensor parallelism: its heads, as views, in every format."""

import pytest
import torch
from bounds import assert_close_to_reference
from caches import bits, kind_id, q_dtypes
from problems import allowance, build, test_device
from ragged import build as build_ragged

import tkv
from tkv.errors import DTypeError, RangeError, UnsupportedError
from tkv.integrations.distributed import kv_heads, q_heads, shard_heads
from tkv.tune.configs import AttentionConfig

DEVICE = test_device()
SMALL = AttentionConfig(16, 16, 4, 1)
# Every place where scales live.
KINDS = (
    "bf16", "fp8_e4m3/tensor", "fp8_e5m2/head", "int8/channel", "fp8_e4m3/token_head", "int8/group32", "int4/token_head", "int4/group64",
    ("int4/page_channel", "int4/group32"), ("fp16", "int8/token_head"),
)  # fmt: skip


def run_shard(problem, rank, world_size, **more):
    """(out, lse) of a rank's heads."""
    heads = q_heads(problem.q.shape[-2], rank, world_size)
    options = {name: x[heads] if name in ("alibi_slopes", "sink_logits") else x for name, x in problem.options.items()}
    shard = shard_heads(problem.cache, rank, world_size)
    args = problem.q[..., heads, :], shard, problem.page_table
    if hasattr(problem, "cu_seqlens"):
        return tkv.prefix_prefill(
            args[0], None, None, *args[1:], problem.prefix_lens, problem.cu_seqlens, return_lse=True, **options, **more
        )
    return tkv.paged_decode(*args, problem.seq_lens, return_lse=True, **options, **more)


@pytest.mark.parametrize("kind", KINDS, ids=kind_id)
def test_the_heads_of_ranks_are_those_of_one_call_bit_for_bit(kind):
    problem = build(kind, [20, 3], 32, 4, 2, 64, q_dtypes(kind)[-1], layout="inline", seed=1, sink_logits=[0.25 * h for h in range(8)])
    whole = problem.check(config=SMALL)
    for world_size in (2, 4):
        parts = [run_shard(problem, rank, world_size, config=SMALL) for rank in range(world_size)]
        for one, of_ranks in zip(whole, zip(*parts)):
            assert torch.equal(torch.cat(of_ranks, 1), one)


@pytest.mark.parametrize("layout", ["nhd", "hnd", "mixed", "interleaved", "layers", "wide"])
@pytest.mark.parametrize("kind", ["bf16", "fp8_e4m3/head", "int8/group32", "int4/token_head"])
def test_a_shard_has_the_memory_of_its_cache_in_every_layout(kind, layout):
    cache = build(kind, [20], 16, 6, 1, 64, layout=layout).cache
    shard = shard_heads(cache, 1, 2)
    assert (shard.num_kv_heads, shard.num_pages, shard.k_format, shard.v_format) == (3, cache.num_pages, cache.k_format, cache.v_format)
    heads = slice(3, 6)
    sides = [(shard.k, cache.k), (shard.v, cache.v)] + ([(shard.k_scale, cache.k_scale)] if cache.k_format.is_dynamic else [])
    for mine, whole in sides:
        assert mine.data_ptr() == whole[:, :, heads].data_ptr() and mine.stride()[:2] == whole.stride()[:2]
        assert torch.equal(bits(mine), bits(whole[:, :, heads]))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "page_channel" not in kind_id(kind)], ids=kind_id)
def test_ranks_write_what_one_call_writes(kind):
    caches = [build(kind, [9], 16, 4, 1, 64, seed=2).cache for _ in range(2)]
    rng = torch.Generator().manual_seed(3)
    k, v = torch.randn(2, 5, 4, 64, generator=rng).to(DEVICE).unbind(0)
    slots = torch.tensor([3, -1, 17, 0, 18]).to(DEVICE)
    tkv.write_kv(k, v, caches[0], slots)
    for rank in range(2):
        tkv.write_kv(k[:, kv_heads(4, rank, 2)], v[:, kv_heads(4, rank, 2)], shard_heads(caches[1], rank, 2), slots)
    for name in ("k", "v", "k_scale", "v_scale"):
        one, other = (getattr(cache, name) for cache in caches)
        assert one is None or torch.equal(bits(one), bits(other))


@pytest.mark.parametrize(("kv", "group", "world_size"), [(1, 6, 2), (1, 6, 3), (2, 4, 4), (2, 4, 8)])
def test_more_ranks_than_heads_have_copies_of_a_head(kv, group, world_size):
    problem = build("int8/token_head", [40, 3], 16, kv, group, 32, seed=4, alibi_slopes=[2.0 ** -(h % 9) for h in range(kv * group)])
    assert [kv_heads(kv, rank, world_size) for rank in range(world_size)] == [
        slice(head, head + 1) for head in range(kv) for _ in range(world_size // kv)
    ]
    parts = [run_shard(problem, rank, world_size) for rank in range(world_size)]
    out, lse = (torch.cat(of_ranks, 1) for of_ranks in zip(*parts))
    assert_close_to_reference(out, lse, problem.truth, problem.q.dtype, **allowance(problem))


def test_prefill_over_the_heads_of_ranks_is_that_of_one_call():
    problem = build_ragged(
        "fp8_e4m3/head", [5, 0, 9], [20, 7, 3], 16, 2, 3, 32, seed=5, fresh=False, sink_logits=[0.5 * h for h in range(6)]
    )
    out, lse = (torch.cat(of_ranks, 1) for of_ranks in zip(*(run_shard(problem, rank, 2, config=SMALL) for rank in range(2))))
    problem.compare(out, lse)
    assert torch.equal(out, problem.run(config=SMALL)[0])


@pytest.mark.parametrize("kind", ["bf16", "fp8_e4m3/head", "int8/token_head"])
def test_v_within_k_stays_within_k(kind):
    form = tkv.KVFormat.parse(kind)
    k = torch.zeros(3, 4, 2, 48, dtype=form.torch_dtype, device=DEVICE)
    shape = form.scale_shape(3, 4, 2, 48)
    scale = None if shape is None else torch.ones(shape, device=DEVICE)
    for shares_scale in (True, False):
        v_scale = scale if shares_scale or scale is None else scale.clone()
        cache = tkv.KVCache(k, k[..., :32], scale, v_scale, format=kind)
        shard = shard_heads(cache, 1, 2)
        assert shard.shares_memory and shard.v_is_k == cache.v_is_k == (shares_scale or scale is None)


def test_each_query_head_is_on_the_rank_that_has_its_keys():
    for num_kv_heads, group, world_size in ((8, 4, 4), (8, 1, 8), (2, 6, 4), (1, 8, 8), (3, 2, 3), (5, 2, 1)):
        for rank in range(world_size):
            mine, keys = q_heads(num_kv_heads * group, rank, world_size), kv_heads(num_kv_heads, rank, world_size)
            count = mine.stop - mine.start
            for i, head in enumerate(range(mine.start, mine.stop)):
                assert head // group == keys.start + i // (count // (keys.stop - keys.start))


def test_heads_that_cannot_be_shared_are_refused():
    cache = tkv.KVCache.empty(1, 16, 6, 16, device=DEVICE)
    for call, error, message in (
        (lambda: shard_heads(cache, 0, 4), UnsupportedError, r"num_kv_heads: expected a multiple or a divisor of world_size \(4\), got 6"),
        (lambda: q_heads(6, 0, 4), UnsupportedError, r"num_q_heads: expected a multiple of world_size \(4\), got 6"),
        (lambda: shard_heads(cache, 2, 2), RangeError, "rank: expected 0 to 1, got 2"),
        (lambda: shard_heads(cache, -1, 2), RangeError, "rank: expected at least 0, got -1"),
        (lambda: shard_heads(cache, 0, 0), RangeError, "world_size: expected at least 1, got 0"),
        (lambda: kv_heads(6, 0.0, 2), DTypeError, "rank: expected an int, got 0.0"),
        (lambda: shard_heads(cache.k, 0, 2), DTypeError, "cache: expected a tkv.KVCache, got Tensor"),
    ):
        with pytest.raises(error, match=message):
            call()
