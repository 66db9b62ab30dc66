"""Bounded memory as an engine runs it: windows, H2O and its family, step by step against plain PyTorch."""

import pytest
import torch
from problems import test_device

import tkv
from tkv import policies
from tkv.pages import CacheManager, PagePool

DEVICE = test_device()
HEADS, GROUP, DIM, SIZE = 2, 2, 16, 4


class Engine:
    """One layer: random queries, keys and values of each token, in a paged cache under a manager."""

    def __init__(self, num_pages, kind="fp32", seed=0, **manager):
        self.manager = CacheManager(PagePool(num_pages), SIZE, prefix_cache=False, **manager)
        self.cache = tkv.KVCache.empty(num_pages, SIZE, HEADS, DIM, kind, device=DEVICE)
        self.scores = torch.full((num_pages, SIZE, HEADS), 1e9, device=DEVICE)
        self.rng = torch.Generator().manual_seed(seed)

    def tokens(self, count):
        """(q, k, v) of new tokens. Some keys are much alike queries, so that attention has favourites."""
        q, k, v = (torch.randn(count, heads, DIM, generator=self.rng) for heads in (HEADS * GROUP, HEADS, HEADS))
        return 2 * q.to(DEVICE), 2 * k.to(DEVICE), v.to(DEVICE)

    def step(self, seqs, count, **options):
        """`count` new tokens for each sequence: the batch, their q, k, v, and (out, lse) [sequence, token, head, ...]."""
        batch = self.manager.step(seqs, counts=[count] * len(seqs)).tensors(DEVICE)
        q, k, v = self.tokens(len(seqs) * count)
        tkv.write_kv(k, v, self.cache, batch.slot_mapping)
        self.scores.view(-1, HEADS)[batch.slot_mapping] = 0.0
        q = q.view(len(seqs), count, HEADS * GROUP, DIM)
        result = tkv.paged_decode(q, self.cache, batch.page_table, batch.seq_lens, return_lse=True, **options)
        return batch, q, k.view(len(seqs), count, HEADS, DIM), v.view(len(seqs), count, HEADS, DIM), result

    def evict(self, seqs, policy):
        """Score-based eviction by a policy from (dense scores, lengths) to (keep, keep_lens) with a budget known on the host."""
        lens = [self.manager.held(seq) for seq in seqs]
        batch = self.manager.evict(seqs, [min(n, policy.budget) for n in lens]).tensors(DEVICE)
        dense = policies.dense_scores(self.scores, batch.page_table, batch.seq_lens)
        keep, keep_lens = policy(dense, batch.seq_lens)
        assert torch.equal(keep_lens, batch.keep_lens)
        tkv.compact_kv(self.cache, batch.page_table, keep, keep_lens, scores=self.scores, dst_page_table=batch.dst_page_table)
        return keep, keep_lens


class H2O:
    """A policy with its budget."""

    def __init__(self, heavy, recent):
        self.heavy, self.recent, self.budget = heavy, recent, heavy + recent

    def __call__(self, scores, lens):
        return policies.h2o(scores, lens, self.heavy, self.recent)


def test_h2o_keeps_what_a_brute_force_h2o_keeps_at_every_step_of_a_generation():
    engine, policy = Engine(24), H2O(5, 4)
    seqs = [engine.manager.add([0]) for _ in range(2)]
    # Of each sequence and head: (position, k, v, score) of the keys that stay.
    kept = [[[] for _ in range(HEADS)] for _ in seqs]
    for step in range(30):
        count = 6 if step == 0 else 1 + (step % 7 == 3)
        batch, q, k, v, (out, lse) = engine.step(seqs, count)
        tkv.key_scores(q, engine.cache, batch.page_table, batch.seq_lens, lse, out=engine.scores)
        first = int(batch.positions[0])
        for s in range(len(seqs)):
            for h in range(HEADS):
                mine = kept[s][h]
                mine += [[first + i, k[s, i, h], v[s, i, h], 0.0] for i in range(count)]
                keys, values = (torch.stack([entry[j] for entry in mine]).double() for j in (1, 2))
                for i in range(count):
                    visible = len(mine) - count + i + 1
                    for g in range(GROUP):
                        p = (q[s, i, h * GROUP + g].double() @ keys[:visible].T / DIM**0.5).softmax(-1)
                        for entry, share in zip(mine, p.tolist()):
                            entry[3] += share
                        torch.testing.assert_close(out[s, i, h * GROUP + g].double(), p @ values[:visible], rtol=0, atol=2e-5)
        old = [[[entry[0] for entry in head] for head in seq] for seq in kept]
        keep, keep_lens = engine.evict(seqs, policy)
        for s in range(len(seqs)):
            for h in range(HEADS):
                mine = kept[s][h]
                if len(mine) > policy.budget:
                    past = mine[: -policy.recent]
                    heavy = sorted(range(len(past)), key=lambda i: (-past[i][3], i))[: policy.heavy]
                    kept[s][h] = [past[i] for i in sorted(heavy)] + mine[-policy.recent :]
                of_kernel = [old[s][h][i] for i in keep[s, h, : int(keep_lens[s])].tolist()]
                assert of_kernel == [entry[0] for entry in kept[s][h]], f"step {step}"
        assert all(engine.manager.held(seq) <= policy.budget for seq in seqs)


def policies_of(budget):
    """Every policy with that budget, from (scores, lens, keys) to (keep, keep_lens)."""
    half = budget // 2
    return {
        "h2o": lambda s, n, k: policies.h2o(s, n, half, budget - half),
        "snapkv": lambda s, n, k: policies.snapkv(s, n, budget, half),
        "tova": lambda s, n, k: policies.tova(s, n, budget),
        "key_norm": lambda s, n, k: policies.key_norm(k, n, budget),
        "streaming": lambda s, n, k: policies.streaming(n, HEADS, s.shape[2], 4, budget - 4),
        "random": lambda s, n, k: policies.random(n, HEADS, s.shape[2], budget, half),
    }


@pytest.mark.parametrize("name", sorted(policies_of(8)))
@pytest.mark.parametrize("budget", [21, 22, 1000])
def test_a_budget_of_the_whole_length_changes_no_bit(name, budget):
    engine = Engine(16, "int8/token_head")
    seqs = [engine.manager.add([0]) for _ in range(2)]
    batch, q, _, _, (_, lse) = engine.step(seqs, 21)
    tkv.key_scores(q, engine.cache, batch.page_table, batch.seq_lens, lse, out=engine.scores)
    before = [x.clone() for x in (engine.cache.k, engine.cache.v, engine.cache.k_scale, engine.cache.v_scale, engine.scores)]
    result = tkv.paged_decode(q, engine.cache, batch.page_table, batch.seq_lens)
    dense = policies.dense_scores(engine.scores, batch.page_table, batch.seq_lens)
    keys, *_ = tkv.gather_window(engine.cache, batch.page_table, batch.seq_lens, window=None, dense=True)
    keep, keep_lens = policies_of(budget)[name](dense, batch.seq_lens, keys)
    assert keep_lens.tolist() == [21, 21]
    tkv.compact_kv(engine.cache, batch.page_table, keep, keep_lens, scores=engine.scores)
    after = (engine.cache.k, engine.cache.v, engine.cache.k_scale, engine.cache.v_scale, engine.scores)
    assert all(torch.equal(x.nan_to_num(7e9), y.nan_to_num(7e9)) for x, y in zip(before, after))
    assert torch.equal(tkv.paged_decode(q, engine.cache, batch.page_table, keep_lens), result)


@pytest.mark.parametrize("kind", ["fp32", "int8/token_head"])
def test_a_hundred_cycles_in_a_window_are_as_right_as_the_first(kind):
    window, sinks, steps = 10, 3, 110
    options = {"window": window, "sinks": sinks, "rope": tkv.Rope.of(sinks + window + 256, DIM, theta=100.0, device=DEVICE)}
    held = -(-(sinks + window + 2) // SIZE) + 2
    engine = Engine(2 * held, kind, window=window, sinks=sinks)
    whole = tkv.KVCache.empty(2 * steps, SIZE, HEADS, DIM, kind, device=DEVICE)
    seqs = [engine.manager.add([0]) for _ in range(2)]
    tables = torch.arange(2 * steps, device=DEVICE).view(2, steps)
    for step in range(steps):
        count = 1 + 2 * (step % 3 == 1)
        batch = engine.manager.step(seqs, counts=[count] * 2)
        on_device = batch.tensors(DEVICE)
        q, k, v = engine.tokens(2 * count)
        tkv.write_kv(k, v, engine.cache, on_device.slot_mapping)
        rows = torch.arange(2, device=DEVICE).repeat_interleave(count)
        tkv.write_kv(k, v, whole, tables[rows, on_device.positions // SIZE] * SIZE + on_device.positions % SIZE)
        assert batch.page_table.shape[1] <= held
        q = q.view(2, count, HEADS * GROUP, DIM)
        where = {"kv_start": on_device.kv_start, "pinned": batch.pinned}
        got = tkv.paged_decode(q, engine.cache, on_device.page_table, on_device.seq_lens, **where, **options)
        lens = on_device.positions[count - 1 :: count] + 1
        expected = tkv.paged_decode(q, whole, tables, lens, **options)
        # The same keys in other tiles: nothing drifts.
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5 if kind == "fp32" else 2e-5)
        kept = tkv.gather_window(engine.cache, on_device.page_table, on_device.seq_lens, window=window, sinks=sinks, **where)
        again = tkv.gather_window(whole, tables, lens, window=window, sinks=sinks)
        count_kept = int(again[3][-1])
        assert torch.equal(kept[3], again[3])
        assert all(torch.equal(x[:count_kept], y[:count_kept]) for x, y in zip(kept[:3], again[:3]))
    for seq in seqs:
        engine.manager.free(seq)
    assert engine.manager.pool.num_free == engine.manager.pool.num_pages


def test_a_hundred_cycles_of_eviction_lose_no_page_and_no_key():
    engine, policy = Engine(20, "fp16"), H2O(6, 5)
    seqs = [engine.manager.add([0]) for _ in range(3)]
    for step in range(100):
        count = 1 + step % 3
        batch, q, _, _, (_, lse) = engine.step(seqs, count)
        assert batch.positions.view(3, -1)[0].tolist() == [int(batch.positions[0]) + i for i in range(count)]
        assert engine.manager.length(seqs[0]) == int(batch.positions[count - 1]) + 1
        tkv.key_scores(q, engine.cache, batch.page_table, batch.seq_lens, lse, out=engine.scores)
        engine.evict(seqs, policy)
        dense = policies.dense_scores(engine.scores, batch.page_table, batch.seq_lens.clamp_max(policy.budget))
        assert bool((dense < 1e6).all()), "no score of a key that went"
    for seq in seqs:
        engine.manager.free(seq)
    assert engine.manager.pool.num_free == engine.manager.pool.num_pages
