"""compact_kv, rotate_keys and rotation in write_kv and gather_window at their edges: order, lies, sharing, single positions."""

import pytest
import torch
from caches import bits, empty_cache
from problems import test_device

import tkv
from tkv import Rope, reference
from tkv.errors import DTypeError, RangeError, ShapeError

DEVICE = test_device()


def integers(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def noisy(kind, layout, pages, page_size, heads, dim, v_dim=None):
    """A cache and scores of random bytes, NaN among them, and its tensors that are not static scales."""
    cache = empty_cache(kind, layout, pages, page_size, heads, dim, device=DEVICE, v_dim=v_dim)
    scores = torch.empty(heads, pages, page_size + 1, device=DEVICE).permute(1, 2, 0)[:, 1:]
    scales = ((cache.k_scale, cache.k_format), (cache.v_scale, cache.v_format))
    tensors = [cache.k, cache.v, *(scale for scale, form in scales if form.is_dynamic), scores]
    rng = torch.Generator().manual_seed(0)
    for tensor in tensors:
        noise = torch.randint(0, 256, (tensor.numel() * tensor.element_size(),), generator=rng, dtype=torch.uint8)
        tensor.copy_(noise.view(tensor.dtype).view(tensor.shape))
    return cache, scores, tensors


def moved(old, table, keep, lens, dst):
    """A tensor of tokens after compaction, key by key; what leads out of it is skipped."""
    new, (pages, size) = old.clone(), old.shape[:2]
    for seq, length in enumerate(lens.tolist()):
        for head, keys in enumerate(keep[seq].expand(old.shape[2], -1).tolist()):
            for place, key in enumerate(keys[: max(length, 0)]):
                if 0 <= key < table.shape[1] * size and place < dst.shape[1] * size:
                    src, target = int(table[seq, key // size]), int(dst[seq, place // size])
                    if 0 <= src < pages and 0 <= target < pages:
                        new[target, place % size, head] = old[src, key % size, head]
    return new


def check_moves(kind, layout, pages, page_size, heads, dim, table, keep, lens, dst=None, v_dim=None):
    cache, scores, tensors = noisy(kind, layout, pages, page_size, heads, dim, v_dim)
    want = [moved(tensor, table, keep, lens, table if dst is None else dst) for tensor in tensors]
    tkv.compact_kv(cache, table, keep, lens, scores=scores, dst_page_table=dst)
    assert all(torch.equal(bits(got), bits(expected)) for got, expected in zip(tensors, want))


@pytest.mark.parametrize("kind", ["bf16", "int4/token_head"])
def test_more_keys_than_a_program_moves_at_once_move_in_order(kind):
    """256 keys go at once, and the second block goes to where the first has been."""
    rng = torch.Generator().manual_seed(0)
    lens, keep = [520, 300], torch.full((2, 2, 530), -1)
    for seq, head in ((0, 0), (0, 1), (1, 0), (1, 1)):
        keep[seq, head, : lens[seq]] = torch.randperm(700, generator=rng)[: lens[seq]].sort().values
    table = torch.randperm(90, generator=rng)[:88].view(2, 44)
    check_moves(kind, "hnd", 90, 16, 2, 16, table.to(DEVICE), keep.to(DEVICE), integers(lens))


def test_one_list_of_keys_serves_all_heads():
    keep = integers([[[0, 4, 5, 8]], [[1, 2, 2**31 - 1, 7]]])
    for kind in ("fp16", "int8/token_head"):
        check_moves(kind, "hnd", 4, 3, 3, 24, integers([[2, 0, 1], [3, -1, -1]]), keep, integers([4, 2]))


def test_keys_and_values_of_other_formats_and_sizes():
    keep, table = integers([[[1, 4, 6], [0, 5, 6]]], torch.int64), integers([[3, 1]], torch.int64)
    check_moves(("int8/channel", "int4/token_head"), "hnd", 4, 4, 2, 96, table, keep, integers([3]), v_dim=32)
    check_moves(("fp32", "fp8_e5m2/token_head"), "wide", 4, 4, 2, 80, table, keep, integers([3]), integers([[0]]), v_dim=24)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_what_leads_out_of_the_cache_is_skipped(dtype):
    far = 2**31 - 1 if dtype == torch.int32 else 2**62
    table, dst = integers([[1, far, 0], [3, 2, -1]], dtype), integers([[4, 5], [far, 2]], dtype)
    keep = integers([[[0, 3, 4, 7]], [[-1, 2, 4, far]]], dtype)
    for lens in ([4, 4], [4, -5], [4, 0]):
        for kind in ("fp32", "int4/token_head"):
            check_moves(kind, "layers", 6, 3, 1, 16, table, keep, integers(lens, dtype), dst)
            check_moves(kind, "layers", 6, 3, 1, 16, table, keep, integers(lens, dtype))
    check_moves("fp32", "nhd", 6, 3, 1, 16, table, keep, integers([far, 2], dtype), dst)


def test_nothing_to_move():
    cache, scores, tensors = noisy("int8/token_head", "nhd", 3, 4, 2, 16)
    before = [bits(tensor) for tensor in tensors]
    table, keep, lens = integers([[2, 0]]), integers([[[3, 5], [1, 2]]]), integers([2])
    tkv.compact_kv(cache, table[:0], keep[:0], lens[:0], scores=scores)
    tkv.compact_kv(cache, table, keep[..., :0], lens * 0, scores=scores)
    tkv.compact_kv(cache, table, keep, lens * 0, scores=scores)
    tkv.compact_kv(cache, table[:, :0], keep, lens, scores=scores)
    tkv.compact_kv(cache, table, keep, lens, scores=scores, dst_page_table=table[:, :0])
    tkv.compact_kv(tkv.KVCache.empty(0, 4, 2, 16, "fp16", device=DEVICE), table, keep, lens)
    assert all(torch.equal(bits(tensor), old) for tensor, old in zip(tensors, before))


def compact(**changes):
    """A call that is right, with some arguments changed."""
    arguments = {
        "page_table": integers([[0, 1], [2, 3]]),
        "keep": integers([[[0, 3, 6], [1, 2, 7]], [[0, 1, 2], [4, 5, 6]]]),
        "keep_lens": integers([3, 3]),
    }
    tkv.compact_kv(tkv.KVCache.empty(4, 4, 2, 16, "fp16", device=DEVICE), **(arguments | changes))


WRONG = {
    "a table that is a list": (DTypeError, "page_table: expected a torch.Tensor", {"page_table": [[0]]}),
    "keep of other sequences": (ShapeError, r"keep: expected shape \[2, num_kv_heads, K\]", {"keep": integers([[[0]]])}),
    "a strided keep": (ShapeError, "keep: the last dimension must be contiguous", {"keep": integers([[[0, 1, 2, 3]]] * 2)[..., ::2]}),
    "lens of floats": (DTypeError, r"keep_lens: expected torch\.int32", {"keep_lens": torch.zeros(2, device=DEVICE)}),
    "scores in fp16": (DTypeError, r"scores: expected torch\.float32", {"scores": torch.zeros(4, 4, 2, device=DEVICE).half()}),
    "other destinations": (ShapeError, r"dst_page_table: expected shape \[2, max_pages\]", {"dst_page_table": integers([[0]])}),
}
SEEN = {
    "a negative length": ("keep_lens: expected 0 to 3, .* got -1 for sequence 0", {"keep_lens": integers([-1, 3])}),
    "no room": ("keep_lens: expected 0 to 0", {"dst_page_table": integers([[], []])}),
    "a negative key": ("keep: expected keys from 0 to 7, got -1 for sequence 0", {"keep": integers([[[-1, 1, 3]], [[0, 1, 2]]])}),
    "a page beyond": ("page_table: expected pages from 0 to 3 where keys stay, got 4", {"page_table": integers([[0, 4], [2, 3]])}),
    "a destination beyond": ("dst_page_table: expected pages from 0 to 3 .* got -1", {"dst_page_table": integers([[0], [-1]])}),
    "a page that another reads": ("page 2 is written for sequence 1 and used by sequence 0", {"page_table": integers([[0, 2], [2, 3]])}),
    "a page that was written for another": (
        "page 0 is written for sequence 0 and used by sequence 1",
        {"page_table": integers([[0, 1], [2, 0]]), "dst_page_table": integers([[0], [3]])},
    ),
    "a page that two write": (
        "page 3 is written for sequence 1 and used by sequence 0",
        {"keep": integers([[[0, 1, 2]]] * 2), "dst_page_table": integers([[3], [3]])},
    ),
    "a page at two places": (
        "dst_page_table: expected every page at one place, got one at two for sequence 0",
        {"keep": integers([[[1, 2, 3, 4, 5, 6]]] * 2), "keep_lens": integers([6, 0]), "dst_page_table": integers([[3, 3], [2, 1]])},
    ),
    "a page that is still read": ("page 1 at place 0 .* is written before its keys have moved", {"dst_page_table": integers([[1], [2]])}),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_argument(name):
    error, message, changes = WRONG[name]
    with pytest.raises(error, match=message):
        compact(**changes)


@pytest.mark.parametrize("name", SEEN)
def test_what_only_the_device_sees_is_checked_on_request(name, monkeypatch):
    message, changes = SEEN[name]
    compact(**changes)
    monkeypatch.setenv("TKV_CHECK", "1")
    with pytest.raises(RangeError, match=message):
        compact(**changes)


def test_what_is_right_passes_the_checks(monkeypatch):
    monkeypatch.setenv("TKV_CHECK", "1")
    compact()
    # Both read a page that neither writes; a sequence that keeps all its keys may share them.
    compact(page_table=integers([[0, 1], [0, 1]]), dst_page_table=integers([[2], [3]]))
    compact(page_table=integers([[0, 1], [0, 1]]), keep=torch.arange(8, device=DEVICE).expand(2, 1, 8), keep_lens=integers([8, 5]))
    compact(page_table=integers([[0, -1], [2, 99]]), keep=integers([[[0, 3, 9]], [[1, 2, -1]]]), keep_lens=integers([2, 2]))


def test_keys_with_scales_of_pages_stay_in_whole_pages(monkeypatch):
    monkeypatch.setenv("TKV_CHECK", "1")
    cache = tkv.KVCache.empty(4, 16, 1, 32, ("int8/page_channel", "fp16"), device=DEVICE)
    table, pages = integers([[0, 1, 2]]), torch.arange(48, dtype=torch.int32, device=DEVICE).view(3, 16)
    tkv.compact_kv(cache, table, torch.cat([pages[0], pages[2]])[None, None], integers([32]))
    patched = torch.cat([pages[0][:15], pages[2][15:]])
    for keep, length in ((torch.cat([pages[0], pages[2]]), 24), (pages.flatten()[8:40], 32), (patched, 16)):
        with pytest.raises(RangeError, match="keep: expected whole pages of 16 keys"):
            tkv.compact_kv(cache, table, keep[None, None].contiguous(), integers([length]))


def right_angles(rows=4):
    """A right angle a position."""
    angles = torch.arange(rows, device=DEVICE)[:, None] * (torch.pi / 2)
    return Rope(angles.cos().round(), angles.sin().round())


def test_each_new_token_has_its_own_position():
    k = torch.zeros(6, 2, 16, device=DEVICE)
    k[:, :, 0] = torch.arange(1.0, 7.0, device=DEVICE)[:, None]
    cache = empty_cache("fp32", "nhd", 2, 4, 2, 16, device=DEVICE)
    every_other = integers([[3, -9], [2, -9], [1, -9], [0, -9], [2**40, -9], [-(2**40), -9]], torch.int64)[:, 0]
    tkv.write_kv(k, k, cache, torch.arange(6, device=DEVICE), rope=right_angles(), positions=every_other)
    # Past the last row the last one counts, and below the first the first.
    assert cache.k.flatten(0, 1)[:6, 1, :2].tolist() == [[0, -1], [-2, 0], [0, 3], [4, 0], [0, -5], [6, 0]]
    assert torch.equal(cache.v.flatten(0, 1)[:6], k)


def test_a_bad_number_stays_in_its_pair():
    k, v = torch.randn(2, 3, 2, 32, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    clean, spoiled = (empty_cache("fp32", "nhd", 1, 4, 2, 32, device=DEVICE) for _ in range(2))
    slots = torch.arange(3, device=DEVICE)
    options = {"rope": Rope.of(9, 24, device=DEVICE), "positions": integers([3, 4, 8])}
    tkv.write_kv(k, v, clean, slots, **options)
    k[1, 0, 5] = k[2, 1, 30] = torch.inf
    tkv.write_kv(k, v, spoiled, slots, **options)
    assert (spoiled.k != clean.k)[0, :3].nonzero().tolist() == [[1, 0, 5], [1, 0, 17], [2, 1, 30]]
    assert spoiled.k[0, 2, 1, 30] == torch.inf


def test_keys_that_are_read_from_a_window_turn_by_their_place():
    k = torch.zeros(2, 4, 1, 16, device=DEVICE)
    k[..., 0] = 1.0
    table, lens = integers([[0, 1]]), integers([7])
    turned, v, positions, _ = tkv.gather_window(tkv.KVCache(k, k.clone()), table, lens, window=3, sinks=1, rope=right_angles())
    assert turned[:, 0, :2].tolist() == [[1, 0], [0, 1], [-1, 0], [0, -1]] and positions.tolist() == [0, 4, 5, 6]
    assert v[:, 0, 0].tolist() == [1.0] * 4


def test_positions_decide_what_is_kept_where_pinned_pages_are_far_from_the_others():
    """Keys 0 to 3 stand at 0 to 3, the others from 24 on: the last of 10 keys at 29, of 3 at 2."""
    cache, starts = tkv.KVCache.empty(3, 4, 1, 16, "fp32", device=DEVICE), integers([20, 20])
    for window, sinks, first, second in (
        (2, 2, [0, 1, 28, 29], [0, 1, 2]),
        (5, 0, [25, 26, 27, 28, 29], [0, 1, 2]),
        (2, 26, [0, 1, 2, 3, 24, 25, 28, 29], [0, 1, 2]),
        (28, 1, [0, 2, 3, 24, 25, 26, 27, 28, 29], [0, 1, 2]),
        (1, 0, [29], [2]),
        (0, 3, [0, 1, 2], [0, 1, 2]),
    ):
        *_, positions, cu_lens = tkv.gather_window(
            cache, integers([[2, 0, 1], [2, 0, 1]]), integers([10, 3]), window=window, sinks=sinks, kv_start=starts, pinned=4
        )
        assert [positions[cu_lens[i] : cu_lens[i + 1]].tolist() for i in range(2)] == [first, second]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_keys_turn_as_far_as_the_tables_go_and_only_in_the_cache(dtype):
    far, rope = (2**31 - 1 if dtype == torch.int32 else 2**62), Rope.of(8, 16, theta=30.0, device=DEVICE)
    raw = torch.randn(3, 4, 2, 16, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    table, lens = integers([[2, far, -1], [3, 1, -far]], dtype), integers([far, 6], dtype)
    # Positions may have any strides; the table has room for twelve keys.
    new = integers([[7, 8, -7, far, 1, 1], [1, 1, 1, 1, -far, 3]], dtype).t().contiguous().t()
    cache = tkv.KVCache(raw.clone(), raw.clone())
    tkv.rotate_keys(cache, table, lens, new * 0, new, rope)
    want = raw.double()
    want[2] = reference.rotate(raw[2], torch.tensor([7, 7, -7, 7], device=DEVICE), rope)
    want[1, :2] = reference.rotate(raw[1, :2], torch.tensor([-7, 3], device=DEVICE), rope)
    torch.testing.assert_close(cache.k.double(), want, rtol=0, atol=2e-6)
    assert torch.equal(cache.k[0], raw[0]) and torch.equal(cache.k[1, 2:], raw[1, 2:]) and torch.equal(cache.v, raw)
    before = bits(cache.k)
    tkv.rotate_keys(cache, table, -lens, new * 0, new, rope)
    tkv.rotate_keys(cache, table[:, :0], lens, new * 0, new, rope)
    tkv.rotate_keys(cache, table, lens, new[:, :0], new[:, :0], rope)
    tkv.rotate_keys(cache, table[:0], lens[:0], new[:0], new[:0], rope)
    assert torch.equal(bits(cache.k), before)


def test_quantised_values_beside_native_keys_stay():
    cache = empty_cache(("fp16", "int4/token_head"), "nhd", 2, 4, 2, 32, device=DEVICE)
    raw = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(2)).to(DEVICE).half()
    cache.k[:] = raw.unflatten(0, (2, 4))
    before, old, rope = bits(cache.v), integers([list(range(8))]), Rope.of(9, 32, device=DEVICE)
    tkv.rotate_keys(cache, integers([[0, 1]]), integers([8]), old, old + 3, rope)
    want = reference.rotate(raw, torch.full((8,), 3, device=DEVICE), rope)
    torch.testing.assert_close(cache.k.flatten(0, 1).double(), want, rtol=2.0**-10, atol=4e-6)
    assert torch.equal(bits(cache.v), before)


def test_lengths_and_pages_of_turned_keys_are_checked_on_request(monkeypatch):
    monkeypatch.setenv("TKV_CHECK", "1")
    cache, rope = tkv.KVCache.empty(3, 4, 1, 16, "fp32", device=DEVICE), Rope.of(8, 16, device=DEVICE)
    old = integers([[0] * 8] * 2)
    tkv.rotate_keys(cache, integers([[0, 9], [2, 9]]), integers([8, 6]), old, old + 7, rope)
    tkv.rotate_keys(cache, integers([[0, 1], [2, 1]]), integers([8, 4]), old, old - 7, rope)
    for length in (9, -1):
        with pytest.raises(RangeError, match=f"seq_lens: expected 0 to 8 keys .* got {length} for sequence 1"):
            tkv.rotate_keys(cache, integers([[0, 1], [2, -1]]), integers([8, length]), old, old + 1, rope)
    with pytest.raises(RangeError, match="pages that come twice"):
        tkv.rotate_keys(cache, integers([[0, 1], [2, 1]]), integers([8, 5]), old, old + 1, rope)
