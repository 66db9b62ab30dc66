"""compact_kv: evict all keys but some."""

from __future__ import annotations

from itertools import accumulate

import torch

from tkv.cache import KVCache
from tkv.errors import RangeError, ShapeError
from tkv.kernels.args import TokenStrides
from tkv.ops.attention import check_table
from tkv.ops.checks import INTEGERS, check_cache, check_tensor, checks_on
from tkv.ops.launch import Launch, check_launchable, paged_words
from tkv.ops.library import operator


@operator(mutates=("cache", "scores"))
def compact_kv(
    cache: KVCache,
    page_table: torch.Tensor,
    keep: torch.Tensor,
    keep_lens: torch.Tensor,
    *,
    scores: torch.Tensor | None = None,
    dst_page_table: torch.Tensor | None = None,
) -> None:
    """Evict from sequences all keys but those in `keep`: these move, with their values, to the first places of their sequence.

    For each sequence s, KV head h and i below ``keep_lens[s]``, logical key ``keep[s, h, i]`` of `page_table` becomes logical key i of
    `dst_page_table`. K, V, their dynamic scales and `scores` move together, as they are stored, bit for bit; a key that already is where it
    goes is not touched, nor is any slot from ``keep_lens[s]`` on. The new length of a sequence is ``keep_lens[s]``.

    A logical index is then no position any more. Attention stays exact if keys were rotated before they were cached; `window`,
    `alibi_slopes` and `rope` on such a cache see indices instead of positions.

    Args:
        cache: K and V, of any formats; changed in place. Keys of ``page_channel`` formats share scales: whole pages are kept, the same keys
            in their order, and `keep_lens` is a multiple of page_size.
        page_table: ``[num_seqs, max_pages]`` int32 or int64, where keys are.
        keep: ``[num_seqs, num_kv_heads, K]`` int32 or int64, logical keys of each sequence and head, ascending and each once, as
            `tkv.policies` give them; ``[num_seqs, 1, K]`` for all heads alike. Entries from ``keep_lens[s]`` on may be anything. A key
            that is beyond the table or in a page that is not in the cache is skipped, and so is one whose place is.
        keep_lens: ``[num_seqs]`` int32 or int64, how many keys each sequence keeps, at most K.
        scores: ``[num_pages, page_size, num_kv_heads]`` float32, what `key_scores` fills, any strides; changed in place.
        dst_page_table: ``[num_seqs, max_dst_pages]`` int32 or int64, where keys go; None: `page_table`, in place. A page in both stands at
            the same place in both. A page that is written belongs to one sequence: fork before.

    Raises:
        ShapeError, DTypeError, DeviceError, RangeError: the named argument does not fit.
        RangeError: under ``TKV_CHECK=1``: a length, key or page is out of range, keys do not ascend, pages of ``page_channel`` keys are not
            whole, or a page that is written holds another key that is kept.

    Example:
        >>> k = torch.arange(8.0).view(2, 4, 1, 1).repeat(1, 1, 1, 16)            # token t of page p is 4 p + t
        >>> cache = KVCache(k, -k)
        >>> compact_kv(cache, torch.tensor([[1, 0]]), keep=torch.tensor([[[0, 3, 5]]]), keep_lens=torch.tensor([3]))
        >>> cache.k[1, :, 0, 0].tolist()
        [4.0, 7.0, 1.0, 7.0]
    """
    check_cache(cache)
    num_seqs = page_table.shape[0] if isinstance(page_table, torch.Tensor) and page_table.dim() else "num_seqs"
    check_table(page_table, num_seqs, cache.page_size, cache.device)
    check_tensor("keep", keep, (num_seqs, "num_kv_heads", "K"), INTEGERS, cache.device)
    if keep.shape[1] not in (1, cache.num_kv_heads):
        raise ShapeError(f"keep: expected [num_seqs, {cache.num_kv_heads} or 1, K], keys of each KV head or of all, got {list(keep.shape)}")
    check_tensor("keep_lens", keep_lens, (num_seqs,), INTEGERS, cache.device)
    if scores is not None:
        shape = (cache.num_pages, cache.page_size, cache.num_kv_heads)
        check_tensor("scores", scores, shape, (torch.float32,), cache.device, contiguous_last=False)
    if dst_page_table is None:
        dst_page_table = page_table
    check_table(dst_page_table, num_seqs, cache.page_size, cache.device, "dst_page_table")
    check_launchable(cache.device)
    if checks_on():
        _check_moves(cache, page_table, keep, keep_lens, dst_page_table)
    if keep.numel() and cache.num_slots and page_table.shape[1] and dst_page_table.shape[1]:
        for launch in plan_compact(cache, page_table, keep, keep_lens, scores, dst_page_table):
            launch.run(cache.device)


def plan_compact(
    cache: KVCache, page_table: torch.Tensor, keep: torch.Tensor, keep_lens: torch.Tensor, scores: torch.Tensor | None = None,
    dst_page_table: torch.Tensor | None = None,
) -> list[Launch]:  # fmt: skip
    """The launch behind `compact_kv`."""
    from tkv.kernels.compact import compact_kernel

    targets = page_table if dst_page_table is None else dst_page_table
    tensors, strides, words, by_page = zip(*_tensors(cache, scores), strict=True)
    # 64 bytes of a row, or the power of two that holds it: enough programs for a single sequence, and whole sectors of memory.
    blocks = tuple(min(64 // tensor.element_size(), 1 << (count - 1).bit_length()) for tensor, count in zip(tensors, words))
    first_parts = (0, *accumulate(-(-count // block) for count, block in zip(words, blocks)))
    return [
        Launch(
            compact_kernel,
            (page_table.shape[0], cache.num_kv_heads, first_parts[-1]),
            (tensors, keep, keep_lens, page_table, targets, strides, keep.stride(0), keep.stride(1) if keep.shape[1] > 1 else 0)
            + (page_table.stride(0), targets.stride(0), keep.shape[2], page_table.shape[1], targets.shape[1], cache.num_pages)
            + (cache.page_size, 256, words, blocks, first_parts, by_page),
            num_warps=4,
            num_stages=1,
        )
    ]


def _tensors(cache: KVCache, scores: torch.Tensor | None) -> list[tuple[torch.Tensor, TokenStrides, int, bool]]:
    """What moves: tensors of words, their strides, words of a row, and whether these are a page's. What shares memory moves once."""
    moved = []
    paged = paged_words(cache)
    sides = ((paged.k, cache.k_format, True, True), (paged.v, cache.v_format, not cache.shares_memory, not cache.v_is_k))
    for side, kind, has_data, has_scales in sides:
        if has_data:
            moved.append((side.ptr, side.strides, side.ptr.shape[3], False))
        if has_scales and kind.is_dynamic:
            words = 1 if kind.scale == "token_head" else side.scale_ptr.shape[-1]
            moved.append((side.scale_ptr, side.scale_strides, words, kind.scale == "page_channel"))
    if scores is not None:
        moved.append((scores, TokenStrides(*scores.stride()), 1, False))
    return moved


def _check_moves(
    cache: KVCache, page_table: torch.Tensor, keep: torch.Tensor, keep_lens: torch.Tensor, dst_page_table: torch.Tensor
) -> None:
    """Synchronous: keys ascend, they and their places are in the cache, and no key is overwritten before it moves."""
    size = cache.page_size
    room = min(keep.shape[2], dst_page_table.shape[1] * size)
    wrong = (keep_lens < 0) | (keep_lens > room)
    if bool(wrong.any()):
        seq = int(wrong.nonzero()[0])
        raise RangeError(f"keep_lens: expected 0 to {room}, what keep and the table hold, got {int(keep_lens[seq])} for sequence {seq}")
    users: dict[int, int] = {}
    writers: dict[int, int] = {}
    for seq, length in enumerate(keep_lens.tolist()):
        keys = keep[seq, :, :length].long()
        places = torch.arange(length, device=keep.device).expand_as(keys)
        _check_kept(seq, keys, places, page_table.shape[1] * size, size if cache.k_format.scale == "page_channel" else 1)
        src = _pages_of("page_table", page_table[seq], keys // size, cache.num_pages)
        dst = _pages_of("dst_page_table", dst_page_table[seq], places // size, cache.num_pages)
        moves = (src != dst) | (keys % size != places % size)
        # Where in the tables a page is last read, and where it is written.
        last_read = dict(sorted({*zip(src.flatten().tolist(), (keys // size).flatten().tolist())}))
        written = sorted({*zip(dst[moves].tolist(), (places // size)[moves].tolist())})
        if len(dict(written)) < len(written):
            raise RangeError(f"dst_page_table: expected every page at one place, got one at two for sequence {seq}")
        for page, place in written:
            if last_read.get(page, place) > place:
                raise RangeError(f"dst_page_table: page {page} at place {place} of sequence {seq} is written before its keys have moved")
            _check_owner(page, users.get(page, seq), seq)
            writers[page] = seq
        for page in {*src.unique().tolist(), *dst.unique().tolist()}:
            _check_owner(page, seq, writers.get(page, seq))
            users.setdefault(page, seq)


def _check_owner(page: int, user: int, writer: int) -> None:
    """A page that is written for a sequence is used by no other."""
    if user != writer:
        raise RangeError(f"page_table: page {page} is written for sequence {writer} and used by sequence {user}; fork before")


def _check_kept(seq: int, keys: torch.Tensor, places: torch.Tensor, capacity: int, unit: int) -> None:
    """Keys of one sequence ascend within the table, and those of `unit` places are such a run."""
    wrong = (keys < 0) | (keys >= capacity)
    if bool(wrong.any()):
        raise RangeError(f"keep: expected keys from 0 to {capacity - 1}, got {int(keys[wrong][0])} for sequence {seq}")
    falls = (keys.diff() <= 0).any(-1)
    if bool(falls.any()):
        raise RangeError(f"keep: expected keys that ascend, each once, got {keys[falls][0].tolist()[:16]} for sequence {seq}")
    # Runs that ascend and have the right ends are whole.
    ends = keys[:, unit - 1 :: unit] - keys[:, : keys.shape[1] // unit * unit : unit]
    if keys.shape[1] % unit or bool((keys % unit != places % unit).any() or (ends != unit - 1).any()):
        raise RangeError(f"keep: expected whole pages of {unit} keys, whose scales they share, got others for sequence {seq}")


def _pages_of(name: str, table: torch.Tensor, indices: torch.Tensor, num_pages: int) -> torch.Tensor:
    """Pages at some places of a table, which exist."""
    pages = table.long()[indices]
    wrong = (pages < 0) | (pages >= num_pages)
    if bool(wrong.any()):
        raise RangeError(f"{name}: expected pages from 0 to {num_pages - 1} where keys stay, got {int(pages[wrong][0])}")
    return pages
