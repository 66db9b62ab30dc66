"""rotate_keys: cached keys to other positions."""

from __future__ import annotations

import torch

from tkv.cache import KVCache
from tkv.errors import RangeError, UnsupportedError
from tkv.kernels.args import NewStrides
from tkv.ops.attention import check_table
from tkv.ops.checks import INTEGERS, check_cache, check_rope, check_tensor, checks_on
from tkv.ops.launch import Launch, arch_name, check_launchable, interpreting, padded, paged_words, rope_args, target_for
from tkv.ops.library import operator
from tkv.rope import Rope


@operator(mutates=("cache",))
def rotate_keys(
    cache: KVCache, page_table: torch.Tensor, seq_lens: torch.Tensor, old_pos: torch.Tensor, new_pos: torch.Tensor, rope: Rope
) -> None:
    """Turn keys that were rotated at ``old_pos`` to ``new_pos``, in place: ``k' = R(new_pos - old_pos) k``.

    Only native caches: each call rounds once to the cache's dtype, and quantised keys would degrade with every call. There, keep keys
    unrotated and rotate at read (``rope=`` of the attention functions).

    Args:
        cache: native K.
        page_table: ``[num_seqs, max_pages]`` int32 or int64. Pages belong to one sequence each; one that is not in the cache is skipped.
        seq_lens: ``[num_seqs]`` int32 or int64, keys of each sequence.
        old_pos: ``[num_seqs, L]`` int32 or int64, of logical keys 0 to L - 1, in any order; keys from L on stay as they are.
        new_pos: likewise. A key whose position does not change keeps every bit.
        rope: tables with rows for the largest difference; past the last row the last one counts. A constant factor in them (YaRN's,
            ``cos[0]``, not 0) is in the keys already, and stays there once.

    Raises:
        ShapeError, DTypeError, DeviceError: the named argument does not fit.
        UnsupportedError: quantised keys, or V is a view of K.
        RangeError: under ``TKV_CHECK=1``: a length past the table, a difference past the tables of rope, or a page of two sequences.

    Example:
        >>> cache = KVCache(torch.ones(1, 4, 1, 16), torch.ones(1, 4, 1, 16))
        >>> rope = Rope(torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]]))                # a right angle a position
        >>> rotate_keys(cache, torch.tensor([[0]]), torch.tensor([2]), torch.tensor([[3, 4]]), torch.tensor([[3, 5]]), rope)
        >>> cache.k[0, :3, 0, :2].tolist()
        [[1.0, 1.0], [-1.0, 1.0], [1.0, 1.0]]
    """
    check_cache(cache)
    if not cache.k_format.is_native:
        raise UnsupportedError(
            f"cache: expected native keys, got {cache.k_format}: rotating quantised keys again and again degrades them; "
            "keep them unrotated and pass rope= to attention"
        )
    if cache.shares_memory:
        raise UnsupportedError("cache: v is a view of k and would be rotated with it")
    check_rope(rope, cache)
    num_seqs = page_table.shape[0] if isinstance(page_table, torch.Tensor) and page_table.dim() else "num_seqs"
    check_table(page_table, num_seqs, cache.page_size, cache.device)
    check_tensor("seq_lens", seq_lens, (num_seqs,), INTEGERS, cache.device)
    check_tensor("old_pos", old_pos, (num_seqs, "L"), INTEGERS, cache.device, contiguous_last=False)
    check_tensor("new_pos", new_pos, tuple(old_pos.shape), INTEGERS, cache.device, contiguous_last=False)
    check_launchable(cache.device)
    if checks_on():
        _check_values(cache, page_table, seq_lens, old_pos, new_pos, rope)
    if old_pos.numel() and page_table.shape[1]:
        plan_rotate(cache, page_table, seq_lens, old_pos, new_pos, rope, arch_name(cache.device), interpreting()).run(cache.device)


def plan_rotate(
    cache: KVCache, page_table: torch.Tensor, seq_lens: torch.Tensor, old_pos: torch.Tensor, new_pos: torch.Tensor, rope: Rope, arch: str,
    interpret: bool = False,
) -> Launch:  # fmt: skip
    """The launch behind `rotate_keys`."""
    from tkv.kernels.rotate import rotate_kernel

    num_seqs, num_positions = old_pos.shape
    block_d = padded(rope.rotary_dim)
    # 8 numbers a thread.
    block_r = max(1, 1024 // block_d)
    tables, rotary = rope_args(rope)
    return Launch(
        rotate_kernel,
        (num_seqs, -(-num_positions * cache.num_kv_heads // block_r)),
        (paged_words(cache).k, page_table, seq_lens, old_pos, new_pos, tables, NewStrides(*old_pos.stride()), NewStrides(*new_pos.stride()))
        + (page_table.stride(0), cache.num_pages, page_table.shape[1], num_positions, cache.num_kv_heads)
        + (cache.page_size, block_r, block_d, rotary, target_for(arch, interpret)),
        num_warps=4,
        num_stages=1,
    )


def _check_values(
    cache: KVCache, page_table: torch.Tensor, seq_lens: torch.Tensor, old_pos: torch.Tensor, new_pos: torch.Tensor, rope: Rope
) -> None:
    """Synchronous: what only the device can see."""
    capacity = page_table.shape[1] * cache.page_size
    wrong = (seq_lens < 0) | (seq_lens > capacity)
    if bool(wrong.any()):
        seq = int(wrong.nonzero()[0])
        raise RangeError(f"seq_lens: expected 0 to {capacity} keys (table width x page_size), got {int(seq_lens[seq])} for sequence {seq}")
    there = torch.arange(old_pos.shape[1], device=old_pos.device) < seq_lens[:, None]
    turns = (new_pos.long() - old_pos.long()).abs() * there
    if bool((turns >= rope.num_rows).any()):
        raise RangeError(f"rope: expected tables for differences up to {int(turns.max())}, got {rope.num_rows} rows")
    lens = seq_lens.clamp_max(old_pos.shape[1])
    used = page_table[torch.arange(page_table.shape[1], device=page_table.device) * cache.page_size < lens[:, None]]
    used = used[(used >= 0) & (used < cache.num_pages)]
    if used.unique().numel() < used.numel():
        raise RangeError("page_table: expected pages of one sequence each, got pages that come twice")
