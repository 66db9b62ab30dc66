"""Bytes of K and V that kernels load, counted load by load: what sequences share is read once for all of them."""

import math
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from caches import empty_cache, encode_rows

import tkv
from tkv.demo import loads
from tkv.demo.interpreter import quick_interpreter
from tkv.demo.loads import count_loads
from tkv.errors import DeviceError, UnsupportedError
from tkv.kernels.tiles import load as tile_loads
from tkv.ops import cascade

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled: nothing is counted")

KINDS = ("fp32", "bf16", "fp8_e4m3/tensor", "int8/token_head")
CONFIG = dict(block_m=16, block_n=128, num_warps=4, num_stages=1)
WIDE = {**CONFIG, "block_m": 32}


@pytest.fixture(autouse=True)
def quickly():
    with quick_interpreter():
        yield


@dataclass
class Batch:
    """Sequences that share a prefix, in a cache that holds nothing else but poison."""

    q: torch.Tensor
    cache: tkv.KVCache
    page_table: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def levels(self):
        return tkv.find_shared_levels(self.page_table, self.seq_lens, self.cache.page_size)

    def shared(self, levels=None, config=CONFIG, level_config=CONFIG, **options):
        """(out, what was counted) with the prefix as a level."""
        levels = self.levels if levels is None else levels
        options |= dict(config=config, level_config=level_config)
        with count_loads(self.cache.k, self.cache.v) as counted:
            out = tkv.shared_prefix_decode(self.q, self.cache, levels, self.page_table, self.seq_lens, **options)
        return out, counted

    def plain(self, config=CONFIG, **options):
        """(out, what was counted) of each sequence for itself."""
        with count_loads(self.cache.k, self.cache.v) as counted:
            out = tkv.paged_decode(self.q, self.cache, self.page_table, self.seq_lens, config=config, **options)
        return out, counted


def batch(kind, prefix, suffixes, kv_heads=1, group=2, dim=16, q_len=1, page_size=16):
    """`prefix`, whole pages of it, and so many more keys of each sequence."""
    rng = torch.Generator().manual_seed(prefix)
    shared, own = prefix // page_size, [-(-length // page_size) for length in suffixes]
    order = torch.randperm(shared + sum(own) + 2, generator=rng).tolist()
    form = tkv.KVFormat.parse(kind)
    cache = empty_cache(kind, "nhd", len(order), page_size, kv_heads, dim)
    table = torch.full((len(suffixes), shared + max(own)), 2**31 - 1, dtype=torch.int32)
    table[:, :shared] = torch.tensor([order.pop() for _ in range(shared)])
    for seq, count in enumerate(own):
        table[seq, shared : shared + count] = torch.tensor([order.pop() for _ in range(count)])
    lens = torch.tensor([prefix + length for length in suffixes], dtype=torch.int32)
    for seq, length in enumerate(lens.tolist()):
        keys = torch.arange(prefix if seq else 0, length)
        for data, scales in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
            codes, dynamic = encode_rows(torch.randn(len(keys), kv_heads, dim, generator=rng), form, scales)
            at = table[seq].long()[keys // page_size], keys % page_size
            data[at] = codes
            if dynamic is not None:
                scales[at] = dynamic
    q = torch.randn(len(suffixes), q_len, kv_heads * group, dim, generator=rng).to(torch.bfloat16 if kind == "bf16" else torch.float32)
    return Batch(q, cache, table, lens)


def bytes_of(cache, keys):
    """What K and V of so many keys take, of all KV heads, without scales."""
    return keys * sum(data.element_size() * data.shape[2] * data.shape[3] for data in (cache.k, cache.v))


def assert_reads(counted, cache, keys):
    """So many keys were read for each KV head, within 5 %."""
    expected = bytes_of(cache, keys)
    assert abs(counted.bytes - expected) <= 0.05 * expected, f"{counted.bytes} bytes were read, expected {expected}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("prefix", "suffixes", "kv_heads", "group", "q_len"),
    [(320, [37, 5, 16, 1, 60], 2, 3, 1), (1040, [33, 9], 1, 8, 2), (160, [3, 1, 4, 1, 5, 9, 2, 6], 1, 4, 1)],
)
def test_a_shared_prefix_is_read_once_for_all_sequences_and_by_plain_decode_once_for_each(kind, prefix, suffixes, kv_heads, group, q_len):
    sequences = batch(kind, prefix, suffixes, kv_heads, group, q_len=q_len)
    out, counted = sequences.shared(level_config=WIDE)
    assert_reads(counted, sequences.cache, prefix + sum(suffixes))
    expected, counted = sequences.plain()
    assert_reads(counted, sequences.cache, len(suffixes) * prefix + sum(suffixes))
    tolerance = 1e-2 if kind == "bf16" else 1e-5
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


def test_the_default_configs_read_a_shared_prefix_once_too():
    for group in (1, 8):
        sequences = batch("fp32", 528, [7, 30, 12], group=group)
        _, counted = sequences.shared(config=None, level_config=None)
        assert_reads(counted, sequences.cache, 528 + 49)


def test_two_levels_are_each_read_once_for_their_groups(monkeypatch):
    sequences = batch("fp32", 400, [100, 90, 80, 70], group=4)
    # The first two go on together for 80 keys more.
    sequences.page_table[1, 25:30] = sequences.page_table[0, 25:30]
    levels = sequences.levels
    assert [level.lens.tolist() for level in levels[:2]] == [[400], [80]]
    monkeypatch.setattr(cascade, "MIN_KEYS_SAVED", 1)
    _, counted = sequences.shared(levels[:2])
    assert_reads(counted, sequences.cache, 400 + 80 + 20 + 10 + 80 + 70)
    _, counted = sequences.shared([])
    assert_reads(counted, sequences.cache, 4 * 400 + 100 + 90 + 80 + 70)


@pytest.mark.parametrize(("block_m", "times"), [(16, 3), (32, 2), (64, 1)])
def test_more_rows_than_a_tile_holds_read_the_prefix_once_a_tile(block_m, times):
    suffixes = [5, 20, 11, 7, 1, 2]
    sequences = batch("fp32", 272, [length + 1 for length in suffixes], group=4, q_len=2)
    _, counted = sequences.shared(level_config={**CONFIG, "block_m": block_m})
    assert times == math.ceil(6 * 4 * 2 / block_m)
    assert_reads(counted, sequences.cache, times * 272 + sum(suffixes) + 6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("q_lens", "group", "block_m", "split_len"), [((33, 0, 5), 3, 32, 1024), ((40,), 1, 16, None)])
def test_prefill_reads_the_prefix_once_for_every_tile_of_rows(kind, q_lens, group, block_m, split_len):
    prefix = 208
    sequences = batch(kind, prefix, [1] * len(q_lens), kv_heads=2, group=group)
    cu_seqlens = torch.tensor([0, *q_lens]).cumsum(0)
    rng, dtype = torch.Generator().manual_seed(1), sequences.q.dtype
    q, k, v = (torch.randn(sum(q_lens), heads, 16, generator=rng).to(dtype) for heads in (2 * group, 2, 2))
    with count_loads(sequences.cache.k, sequences.cache.v) as cached, count_loads(k, v) as fresh:
        tkv.prefix_prefill(
            q, k, v, sequences.cache, sequences.page_table, torch.full_like(sequences.seq_lens, prefix), cu_seqlens,
            config={**CONFIG, "block_m": block_m, "split_len": split_len},
        )  # fmt: skip
    tiles = [math.ceil(length * group / block_m) for length in q_lens]
    assert_reads(cached, sequences.cache, sum(tiles) * prefix)
    # Of the new keys, those up to the last row of the tile.
    keys = sum(min(length, ((tile + 1) * block_m - 1) // group + 1) for length, count in zip(q_lens, tiles) for tile in range(count))
    assert fresh.bytes == keys * (k[0].nbytes + v[0].nbytes)


@pytest.mark.parametrize("kind", ["fp32", "int8/token_head"])
def test_with_a_window_bytes_do_not_grow_with_the_context(kind):
    window, sinks, own = 100, 3, 20
    for context in (304, 1040):
        sequences = batch(kind, context, [own] * 5, q_len=2)
        options = dict(window=window, sinks=sinks)
        _, counted = sequences.plain(**options)
        assert_reads(counted, sequences.cache, 5 * (window + 1 + sinks))
        _, counted = sequences.shared(level_config=WIDE, **options)
        assert_reads(counted, sequences.cache, window + 1 - own + sinks + 5 * own)

        new = torch.randn(2, 40, 1, 16)
        with count_loads(sequences.cache.k, sequences.cache.v) as counted:
            tkv.prefix_prefill(
                new.expand(-1, -1, 2, -1)[0].contiguous(), new[0], new[1], sequences.cache, sequences.page_table[:1],
                torch.tensor([context]), torch.tensor([0, 40]), config=CONFIG, **options,
            )  # fmt: skip
        # Tiles of 16 rows, two heads: their first tokens are 0, 8, 16, 24 and 32.
        assert_reads(counted, sequences.cache, sum(window - 1 - first + sinks for first in range(0, 40, 8)))


def twice_launched(monkeypatch):
    """The level's launch runs twice."""
    monkeypatch.setattr(cascade, "run_all", lambda launches, device: [launch.run(device) for launch in [launches[0], *launches]])


def twice_loaded(monkeypatch):
    """The kernel loads each tile of keys again."""
    load = tile_loads.load_columns

    def load_columns(*args):
        load(*args)
        return load(*args)

    monkeypatch.setattr(tile_loads, "load_columns", load_columns)


@pytest.mark.parametrize("plant", [twice_launched, twice_loaded])
def test_a_planted_second_read_is_found(plant, monkeypatch):
    sequences = batch("fp32", 320, [37, 5, 16, 1, 60], kv_heads=2, group=3)
    out, counted = sequences.shared()
    assert_reads(counted, sequences.cache, 320 + 119)
    plant(monkeypatch)
    again, counted = sequences.shared()
    assert torch.equal(out, again), "only the bytes tell"
    with pytest.raises(AssertionError, match="bytes were read"):
        assert_reads(counted, sequences.cache, 320 + 119)


@triton.jit
def load_some(ptr, other_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.load(ptr)
    tl.load(ptr + offsets, mask=offsets < n, other=0.0)
    tl.load(other_ptr + offsets)


def test_lanes_that_are_read_count_and_no_others():
    x, other = torch.zeros(64), torch.zeros(16, dtype=torch.int16)
    with count_loads(x) as counted, count_loads(other) as others, count_loads(x[8:], x[10:12]) as part, count_loads(x[::2]) as every_second:
        load_some[(2,)](x, other, 11, 16)
    assert counted.bytes == 2 * (1 + 11) * 4
    assert others.bytes == 2 * 16 * 2
    assert part.bytes == 2 * 3 * 4
    assert every_second.bytes == 2 * (1 + 6) * 4
    load_some[(1,)](x, other, 11, 16)
    assert counted.bytes == 2 * (1 + 11) * 4, "counted after the end"


@pytest.mark.parametrize("layout", ["interleaved", "inline", "hnd"])
def test_neighbours_in_memory_do_not_count(layout):
    cache = empty_cache("int8/token_head", layout, 2, 16, 2, 16)
    x = torch.randn(20, 2, 16)
    tkv.write_kv(x, x, cache, torch.arange(20))
    args = torch.randn(1, 2, 16), cache, torch.tensor([[0, 1]]), torch.tensor([20])
    with count_loads(cache.k) as k, count_loads(cache.v) as v, count_loads(cache.k_scale, cache.v_scale) as scales:
        tkv.paged_decode(*args)
    assert k.bytes == v.bytes == 20 * 2 * 16
    assert scales.bytes == 2 * 20 * 2 * 4


def test_loads_are_as_before_after_an_error():
    from triton.runtime.interpreter import interpreter_builder

    with pytest.raises(KeyError), count_loads(torch.zeros(3)), count_loads(torch.zeros(3)):
        raise KeyError
    assert "create_masked_load" not in vars(interpreter_builder)


def test_what_cannot_be_counted_is_refused(monkeypatch):
    with pytest.raises(DeviceError, match="got one on meta"), count_loads(torch.empty(3, device="meta")):
        pass
    monkeypatch.setattr(loads, "interpreting", lambda: False)
    with pytest.raises(UnsupportedError, match="TRITON_INTERPRET=1 before Triton is imported"), count_loads(torch.zeros(3)):
        pass
