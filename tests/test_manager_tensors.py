"""Batches as tensors: one copy to a device, and shapes that stay the same for a captured graph."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from caches import poison_
from problems import test_device
from served import manage, serve
from tails import aged
from tails import manage as manage_tails

import tkv
from tkv.errors import DTypeError, RangeError
from tkv.pages import kivi_decode, kivi_prefill
from tkv.pages.tensors import ALIGNMENT, pack, unpack

DEVICE = test_device()
HEADS, DIM, SIZE = 2, 16, 4
SIZES = {"num_seqs": 5, "num_tokens": 20, "width": 7}


def served_batches():
    """A manager with a window and sequences that are somewhere in theirs, and two batches of it: ragged, and one token each."""
    manager = manage(num_pages=32, page_size=SIZE, window=6, sinks=2)
    seqs = [serve(manager, list(range(first, first + count)))[0] for first, count in ((0, 11), (20, 3), (40, 8))]
    manager.fork(seqs[1])
    yield manager.step(seqs, counts=[4, 1, 6])
    yield manager.step(seqs, counts=[1, 1, 1])


def values(tensors):
    return {
        field.name: value.tolist() if hasattr(value := getattr(tensors, field.name), "tolist") else value
        for field in dataclasses.fields(tensors)
    }


# Tensors


def test_what_is_packed_comes_out_as_it_was_and_aligned():
    for batch in served_batches():
        arrays = {name: value for name, value in vars(batch).items() if isinstance(value, np.ndarray)}
        buffer = pack(arrays)
        tensors = unpack(buffer, arrays)
        assert list(tensors) == list(arrays)
        for name, array in arrays.items():
            tensor = tensors[name]
            assert torch.equal(tensor, torch.from_numpy(array)) and tensor.dtype == torch.from_numpy(array).dtype and tensor.is_contiguous()
            assert (tensor.data_ptr() - buffer.data_ptr()) % ALIGNMENT == 0
        assert all(tensor.untyped_storage().data_ptr() == buffer.data_ptr() for tensor in tensors.values())


def test_arrays_of_any_layout_can_be_packed():
    arrays = {"a": np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2], "none": np.zeros((0, 2), np.int64), "b": np.arange(6)[::2]}
    found = unpack(pack(arrays), arrays)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {name: array.tolist() for name, array in arrays.items()}
    assert unpack(pack({}), {}) == {}


def test_on_the_cpu_the_arrays_are_shared():
    for batch in served_batches():
        for device in (None, "cpu", torch.device("cpu")):
            tensors = batch.tensors(device)
            assert tensors.slot_mapping.data_ptr() == batch.slot_mapping.ctypes.data


def test_elsewhere_shapes_and_dtypes_are_the_same():
    for batch in served_batches():
        here, there = batch.tensors(**SIZES), batch.tensors("meta", **SIZES)
        for field in dataclasses.fields(here):
            a, b = getattr(here, field.name), getattr(there, field.name)
            if isinstance(a, torch.Tensor):
                assert (a.shape, a.dtype, b.device.type) == (b.shape, b.dtype, "meta"), field.name


@pytest.mark.gpu
def test_a_gpu_gets_all_in_one_copy_that_the_host_does_not_wait_for():
    for batch in served_batches():
        batch.tensors("cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            tensors = batch.tensors("cuda")
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert values(tensors) == values(batch.tensors())
        assert tensors.positions.untyped_storage().data_ptr() == tensors.filled.untyped_storage().data_ptr()


def test_the_numbers_of_the_host_are_with_the_tensors():
    ragged, even = served_batches()
    for batch, num_tokens, q_len in ((ragged, 11, None), (even, 3, 1)):
        assert (batch.num_tokens, batch.q_len) == (num_tokens, q_len)
        for tensors in (batch.tensors(), batch.tensors(**SIZES)):
            for name in ("num_tokens", "q_len", "max_q_len", "max_seq_len", "pinned"):
                assert getattr(tensors, name) == getattr(batch, name)
            assert tensors.seqs.tolist() == batch.seqs.tolist() and tensors.pinned == SIZE
    manager = manage_tails(tail_len=4)
    step = manager.step({aged(manager, range(10))[0]: [1, 2]})
    assert step.tensors().max_tail_len == step.max_tail_len == 8 and step.tensors().q_len == 2
    assert manage().step({}).q_len == manage().step({}).num_tokens == 0


# Filled up


def test_what_is_filled_up_has_no_tokens_and_no_pages():
    batch = next(served_batches())
    plain, full = batch.tensors(), batch.tensors(**SIZES)
    assert torch.equal(full.page_table[:3, : batch.page_table.shape[1]], plain.page_table)
    assert full.page_table.shape == (5, 7) and torch.count_nonzero(full.page_table + 1) == np.count_nonzero(batch.page_table + 1)
    assert full.seq_lens.tolist() == [*batch.seq_lens, 0, 0] and full.prefix_lens.tolist() == [*batch.prefix_lens, 0, 0]
    assert full.kv_start.tolist() == [*batch.kv_start, 0, 0] and full.cu_seqlens.tolist() == [0, 4, 5, 11, 11, 11]
    assert full.slot_mapping.tolist() == [*batch.slot_mapping, *[-1] * 9] and full.positions.tolist() == [*batch.positions, *[0] * 9]
    assert full.copies.tolist() == batch.copies.tolist() != [] and full.filled.tolist() == batch.filled.tolist()
    for name, tensor in vars(full).items():
        assert not isinstance(tensor, torch.Tensor) or tensor.dtype == getattr(plain, name).dtype
    only = batch.tensors(num_tokens=12)
    assert only.slot_mapping.shape == only.positions.shape == (12,) and values(only)["page_table"] == plain.page_table.tolist()
    assert values(batch.tensors(num_seqs=3, num_tokens=11, width=batch.page_table.shape[1])) == values(plain)


def test_a_batch_of_nothing_can_be_filled_up():
    full = manage().step({}).tensors(**SIZES)
    assert full.cu_seqlens.tolist() == [0] * 6 and (full.page_table == -1).all() and full.page_table.shape == (5, 7)


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ({"num_seqs": 2}, RangeError, "num_seqs: expected 3 or more, as this batch has, got 2"),
        ({"num_tokens": 10}, RangeError, "num_tokens: expected 11 or more, as this batch has, got 10"),
        ({"width": 1}, RangeError, "width: expected 4 or more, as this batch has, got 1"),
        ({"width": -1}, RangeError, "width: expected at least 0, got -1"),
        ({"num_seqs": 4.0}, DTypeError, "num_seqs: expected an int, got 4.0"),
    ],
)
def test_a_size_without_room_is_refused(sizes, error, message):
    with pytest.raises(error, match=message):
        next(served_batches()).tensors(**sizes)


def cache_of(pages):
    """A cache whose pages are not to be read before they are written."""
    cache = tkv.KVCache.empty(pages, SIZE, HEADS, DIM, "fp32", device=DEVICE)
    poison_(cache.k), poison_(cache.v)
    return cache


def rows_of(tokens, count, heads, seed):
    """Numbers of each token, NaN in rows that belong to none."""
    rows = torch.randn(tokens, heads, DIM, generator=torch.Generator().manual_seed(seed))
    return torch.cat([rows, rows.new_full((count - tokens, heads, DIM), float("nan"))]).to(DEVICE)


def computed(batch, **sizes):
    """What the functions make of a batch with a window: results of its tokens, and the cache."""
    at, cache = batch.tensors(DEVICE, **sizes), cache_of(32)
    count = at.slot_mapping.numel()
    old = torch.randn(2, 32 * SIZE, HEADS, DIM, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    for i, length in enumerate(batch.prefix_lens):
        places = torch.arange(length)
        slots = torch.from_numpy(batch.page_table[i]).long()[places // SIZE] * SIZE + places % SIZE
        tkv.write_kv(*old[:, slots.to(DEVICE)], cache, slots.to(DEVICE))
    q, k, v = (rows_of(at.num_tokens, count, heads, i) for i, heads in enumerate((2 * HEADS, HEADS, HEADS)))
    where = {"kv_start": at.kv_start, "pinned": at.pinned, "window": 6, "sinks": 2}
    ragged = {"cu_seqlens": at.cu_seqlens, "max_q_len": at.max_q_len, "max_seq_len": at.max_seq_len}
    fresh = tkv.prefix_prefill(q, k, v, cache, at.page_table, at.prefix_lens, return_lse=True, **ragged, **where)
    tkv.write_kv(k, v, cache, at.slot_mapping)
    results = [*fresh, *tkv.prefix_prefill(q, None, None, cache, at.page_table, at.prefix_lens, return_lse=True, **ragged, **where)]
    if at.q_len is not None:
        even = q[: len(at.seq_lens) * at.q_len].unflatten(0, (-1, at.q_len))
        decoded = tkv.paged_decode(even, cache, at.page_table, at.seq_lens, max_seq_len=at.max_seq_len, return_lse=True, **where)
        results += [part.flatten(0, 1) for part in decoded]
    return [part[: at.num_tokens] for part in results], cache, [part[at.num_tokens :] for part in results]


@pytest.mark.parametrize("which", ["ragged", "one token each"])
def test_real_rows_are_the_same_in_a_batch_that_is_filled_up(which):
    batch = next(itertools.islice(served_batches(), which != "ragged", None))
    tokens = 20 if which == "ragged" else 5
    plain, cache, _ = computed(batch)
    full, same, rest = computed(batch, num_seqs=5, num_tokens=tokens, width=7)
    for a, b in zip(plain, full, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)
    assert torch.equal(cache.k.nan_to_num(9e9), same.k.nan_to_num(9e9)) and torch.equal(cache.v.nan_to_num(9e9), same.v.nan_to_num(9e9))
    # Without a key there is nothing, whatever is in the rows.
    assert all((part == (0 if part.dim() == 3 else -torch.inf)).all() for part in rest)


@pytest.mark.parametrize("attend", [kivi_decode, kivi_prefill])
def test_real_rows_are_the_same_with_tails_that_are_filled_up(attend):
    manager = manage_tails(tail_len=4)
    seqs = [aged(manager, range(first, first + count))[0] for first, count in ((0, 11), (20, 3), (40, 14))]
    batch = manager.step(seqs, counts=[2, 2, 2])
    cache, tail = (tkv.KVCache.empty(32, SIZE, HEADS, DIM, "fp32", device=DEVICE) for _ in range(2))
    for part in (cache, tail):
        part.k.copy_(torch.randn(part.k.shape, generator=torch.Generator().manual_seed(3))), part.v.copy_(part.k.flip(0))
    results = []
    for sizes in ({}, {"num_seqs": 5, "num_tokens": 10, "width": 6, "tail_width": 8}):
        at = batch.tensors(DEVICE, **sizes)
        assert at.tail_page_table.shape == ((5, 8) if sizes else batch.tail_page_table.shape) and at.tail_lens.shape == at.seq_lens.shape
        q = rows_of(6, at.slot_mapping.numel(), 2 * HEADS, 5)
        parts = cache, tail, at.page_table, at.seq_lens, at.tail_page_table, at.tail_lens
        if attend is kivi_prefill:
            results.append(attend(q, *parts, at.cu_seqlens, max_q_len=at.max_q_len)[:6])
        else:
            results.append(attend(q.unflatten(0, (-1, at.q_len)), *parts).flatten(0, 1)[:6])
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)
    assert results[0].isfinite().all() and results[0].abs().min() > 0


@pytest.mark.gpu
def test_a_captured_step_decodes_batches_of_any_size():
    manager, cache = manage(num_pages=64, page_size=SIZE), cache_of(64)
    sizes = {"num_seqs": 6, "num_tokens": 6, "width": 8}
    seqs = [manager.add([]) for _ in range(6)]
    static = manager.step([], counts=[]).tensors("cuda", **sizes)
    q, k, v = (torch.zeros(6, heads, DIM, device="cuda") for heads in (2 * HEADS, HEADS, HEADS))

    def attend():
        tkv.write_kv(k, v, cache, static.slot_mapping)
        return tkv.paged_decode(q, cache, static.page_table, static.seq_lens, max_seq_len=8 * SIZE)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    for step in range(24):
        some = seqs[: 1 + step % 6]
        now = manager.step(some, counts=[1] * len(some)).tensors("cuda", **sizes)
        for name in ("page_table", "seq_lens", "slot_mapping"):
            getattr(static, name).copy_(getattr(now, name))
        for i, rows in enumerate((q, k, v)):
            rows.copy_(rows_of(len(some), 6, rows.shape[1], 3 * step + i))
        graph.replay()
        plain = tkv.paged_decode(q[: len(some)], cache, now.page_table[: len(some)], now.seq_lens[: len(some)])
        torch.testing.assert_close(out[: len(some)], plain, rtol=0, atol=1e-5)
