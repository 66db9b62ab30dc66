"""Attention over keys that are spread over the ranks of a process group."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

import tkv
from tkv.errors import DTypeError, RangeError, ShapeError, TkvError, UnsupportedError
from tkv.ops.checks import FLOATS, check_cache, check_flag, check_tensor, checks_on

# Options that have to be the same on all ranks; pinned pages, hints and launch parameters need not be.
SHARED_OPTIONS = ("scale", "softcap", "alibi_slopes", "window", "sinks", "mask")


def context_parallel_decode(
    q: torch.Tensor,
    cache: tkv.KVCache,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    kv_start: torch.Tensor,
    q_start: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    scatter_heads: bool = False,
    sink_logits: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    buffer: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`tkv.paged_decode` of sequences whose keys are spread over the ranks of a group.

    Every rank calls it with the same queries and its own keys, and gets the whole result: with ``out_r`` and ``lse_r`` over the keys of
    rank r, ``lse = ln sum_r exp(lse_r)`` and ``out = sum_r exp(lse_r - lse) out_r``. Positions decide what a query sees, so windows, sink
    tokens, ALiBi, rope and trees are exact. All ranks compute the same bits.

    Args:
        q: as in `tkv.paged_decode`, the same on every rank.
        cache: the rank's, of any format and page size.
        page_table: ``[num_seqs, max_pages]`` int32 or int64, the rank's pages of each sequence.
        seq_lens: ``[num_seqs]`` int32 or int64, keys of each sequence that the rank holds; 0 is allowed. The rank that owns the new
            tokens has written them before.
        kv_start: ``[num_seqs]`` int32 or int64, the position of the first of them.
        q_start: ``[num_seqs]`` int32 or int64, the position of query row 0: the same on every rank.
        group: the ranks; the default group if None.
        scatter_heads: each rank gets only its heads of the result, ``q_heads(num_q_heads, rank, world_size)``, by an all-to-all
            instead of an all-gather.
        sink_logits: ``[num_q_heads]`` as in `tkv.paged_decode`, the same on every rank; counted once.
        return_lse: also return the LSE.
        out: where to write: shape of the result, q's dtype or float32, last dimension contiguous.
        buffer: ``[n]`` float32 for what is sent and received; ``2 * m`` numbers with `scatter_heads`, else ``(world_size + 1) * m``, where
            m is query rows x num_q_heads x (v_head_dim + 1). Allocated if None.
        options: scale, softcap, alibi_slopes, window, sinks, mask and rope, the same on every rank; pinned, max_seq_len, workspace,
            deterministic and config of the rank's own call; as in `tkv.paged_decode`.

    Returns:
        ``out`` in q's dtype (or the given tensor), q's shape with V's head_dim; with ``return_lse`` also ``lse``, float32, out's shape
        without the last dimension, natural logarithm.

    Raises:
        ShapeError, DTypeError, DeviceError, RangeError: the named argument does not fit. Under ``TKV_CHECK=1`` also: ranks were called
            with different arguments, hold the same key, or one of them raised.
        UnsupportedError: there is no process group, this process is not in it, or the heads cannot be scattered; and what
            `tkv.paged_decode` does not support.

    Example:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)        # a group of one
        >>> cache = tkv.KVCache.empty(num_pages=4, page_size=16, num_kv_heads=2, head_dim=64, format="fp16")
        >>> tkv.write_kv(torch.randn(20, 2, 64), torch.randn(20, 2, 64), cache, torch.arange(20))
        >>> q, table, lens, zero = torch.randn(1, 8, 64).half(), torch.tensor([[0, 1]]), torch.tensor([20]), torch.tensor([0])
        >>> context_parallel_decode(q, cache, table, lens, kv_start=zero, q_start=lens - 1).shape
        torch.Size([1, 8, 64])
        >>> dist.destroy_process_group()
    """

    def attend(out: torch.Tensor, lse: torch.Tensor, sink_logits: torch.Tensor | None) -> None:
        tkv.paged_decode(
            q, cache, page_table, seq_lens, kv_start=kv_start, q_start=q_start, sink_logits=sink_logits, out=out, lse=lse, **options
        )

    alike = {"q_start": q_start} | {name: options.get(name) for name in SHARED_OPTIONS}
    held = (seq_lens, kv_start, options.get("pinned", 0))
    return _attend(attend, q, cache, held, alike, group, scatter_heads, sink_logits, return_lse, out, buffer)


def context_parallel_prefill(
    q: torch.Tensor,
    cache: tkv.KVCache,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    kv_start: torch.Tensor,
    q_start: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    scatter_heads: bool = False,
    sink_logits: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    buffer: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`tkv.prefix_prefill` of sequences whose keys, the new tokens' too, are spread over the ranks of a group.

    The new tokens' keys and values are in the caches before the call: each rank has written those that it holds
    (`Partition.slot_mapping`). The rest is as in `context_parallel_decode`.

    Args:
        q: ``[total_tokens, num_q_heads, head_dim]`` as in `tkv.prefix_prefill`, the same on every rank.
        cache, page_table: the rank's.
        seq_lens: ``[num_seqs]`` int32 or int64, keys of each sequence that the rank holds, new ones included.
        cu_seqlens: ``[num_seqs + 1]`` int32 or int64, where each sequence's new tokens start in `q`: the same on every rank.
        kv_start, q_start: ``[num_seqs]`` int32 or int64, positions of the rank's first key and of the first new token.
        group, scatter_heads, sink_logits, return_lse, out, buffer: as in `context_parallel_decode`; query rows are total_tokens.
        options: as there, and max_q_len; see `tkv.prefix_prefill`.

    Returns:
        As `tkv.prefix_prefill`; of all heads, or of the rank's with `scatter_heads`.

    Raises:
        ShapeError, DTypeError, DeviceError, RangeError, UnsupportedError: as for `context_parallel_decode`.
    """

    def attend(out: torch.Tensor, lse: torch.Tensor, sink_logits: torch.Tensor | None) -> None:
        tkv.prefix_prefill(
            q, None, None, cache, page_table, seq_lens, cu_seqlens, kv_start=kv_start, q_start=q_start, sink_logits=sink_logits, out=out,
            lse=lse, **options,
        )  # fmt: skip

    alike = {"q_start": q_start, "cu_seqlens": cu_seqlens} | {name: options.get(name) for name in SHARED_OPTIONS}
    held = (seq_lens, kv_start, options.get("pinned", 0))
    return _attend(attend, q, cache, held, alike, group, scatter_heads, sink_logits, return_lse, out, buffer)


def merge_ranks(
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    scatter_heads: bool = False,
    buffer: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`tkv.merge_states` over the ranks of a group: attention over the keys of all from attention over the keys of each.

    For parts that `context_parallel_decode` does not compute: `tkv.shared_prefix_decode` with ``kv_start`` and ``q_start`` and levels
    found among the rank's own pages; a quantised cache and a native tail (KIVI), merged on the rank before; another library's kernel.
    Only one rank may count learned sinks. What `out` holds where `lse` is -inf does not matter.

    Args:
        out: ``[..., num_heads, head_dim]`` float32, the rank's partial result; the shape is the same on every rank.
        lse: ``[..., num_heads]`` float32, its natural-log LSE.
        group, scatter_heads, buffer: as in `context_parallel_decode`; query rows are all dimensions before num_heads.

    Returns:
        out and lse of all keys, float32; of the rank's heads with `scatter_heads`.

    Raises:
        ShapeError, DTypeError, DeviceError, UnsupportedError: the named argument does not fit.
    """
    if not isinstance(out, torch.Tensor) or out.dim() < 2:
        raise ShapeError(f"out: expected a tensor [..., num_heads, head_dim], got {list(getattr(out, 'shape', ())) or repr(out)}")
    check_tensor("out", out, tuple(out.shape), (torch.float32,), out.device, contiguous_last=False)
    check_tensor("lse", lse, tuple(out.shape[:-1]), (torch.float32,), out.device, contiguous_last=False)
    exchange = _Exchange(out.shape, group, scatter_heads, out.device, buffer)
    exchange.out.copy_(out)
    exchange.lse.copy_(lse)
    merged = torch.empty(exchange.shape, dtype=torch.float32, device=out.device)
    return merged, exchange.join(merged)


def gather_heads(q: torch.Tensor, *, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """The heads of all ranks of a group, from some on each: what comes before `context_parallel_decode` under tensor parallelism.

    Args:
        q: ``[..., heads, head_dim]``, this rank's heads; the shape is the same on every rank.
        group: the ranks; the default group if None.

    Returns:
        ``[..., world_size * heads, head_dim]`` with rank 0's heads first: a view with contiguous last dimension.

    Raises:
        ShapeError, UnsupportedError: q has no heads; there is no process group, or this process is not in it.
    """
    _, world_size = _place(group)
    if not isinstance(q, torch.Tensor) or q.dim() < 2:
        raise ShapeError(f"q: expected a tensor [..., heads, head_dim], got {list(getattr(q, 'shape', ())) or repr(q)}")
    *rows, heads, dim = q.shape
    sent = q.reshape(math.prod(rows), heads, dim).transpose(0, 1).contiguous()
    received = torch.empty(world_size * heads, sent.shape[1], dim, dtype=q.dtype, device=q.device)
    _all_gather(received, sent, group)
    return received.transpose(0, 1).view(*rows, world_size * heads, dim)


class _Exchange:
    """One collective that joins partial results: each rank sends [heads, query rows, dim + 1], the LSE behind each row of its result."""

    def __init__(
        self, shape: Sequence[int], group: dist.ProcessGroup | None, scatter_heads: bool, device: torch.device, buffer: torch.Tensor | None
    ) -> None:
        self.group, (self.rank, self.world_size) = group, _place(group)
        self.scatter_heads = check_flag("scatter_heads", scatter_heads)
        *rows, heads, dim = shape
        if scatter_heads and heads % self.world_size:
            raise UnsupportedError(f"scatter_heads: expected a multiple of {self.world_size} heads, the ranks of the group, got {heads}")
        self.heads = heads // self.world_size if scatter_heads else heads
        # Of the result, on this rank.
        self.shape = (*rows, self.heads, dim)
        count = math.prod(rows)
        sent, received = (n * count * (dim + 1) for n in (heads, self.world_size * self.heads))
        if buffer is None:
            buffer = torch.empty(sent + received, dtype=torch.float32, device=device)
        elif check_tensor("buffer", buffer, ("n",), (torch.float32,), device).shape[0] < sent + received:
            raise ShapeError(f"buffer: expected at least {sent + received} numbers, got {buffer.shape[0]}")
        # Heads come first, so that those of a rank are in one piece.
        self.sent = buffer[:sent].view(heads, count, dim + 1)
        self.received = buffer[sent : sent + received].view(self.world_size * self.heads, count, dim + 1)
        # Where this rank's partial result goes.
        part = self.sent.transpose(0, 1).view(*rows, heads, dim + 1)
        self.out, self.lse = part[..., :-1], part[..., -1]

    def join(self, out: torch.Tensor) -> torch.Tensor:
        """Send the rank's result, merge what comes into `out`, and give the merged LSE."""
        count = self.sent.shape[1]
        if count:
            if self.scatter_heads:
                dist.all_to_all_single(self.received, self.sent, group=self.group)
            else:
                _all_gather(self.received, self.sent, self.group)
        states = self.received.view(self.world_size, self.heads, count, -1)
        merged, merged_lse = tkv.merge_states(states[..., :-1], states[..., -1])
        out.copy_(merged.transpose(0, 1).view(self.shape))
        return merged_lse.T.reshape(self.shape[:-1])


def _attend(
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], None], q: torch.Tensor, cache: tkv.KVCache,
    held: tuple[Any, Any, Any], alike: dict[str, Any], group: dist.ProcessGroup | None, scatter_heads: bool,
    sink_logits: torch.Tensor | None, return_lse: bool, out: torch.Tensor | None, buffer: torch.Tensor | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Let `attend` write the rank's partial result, and join it with the others'."""
    rank, _ = _place(group)
    try:
        check_cache(cache)
        rows = ("num_seqs", "q_len") if isinstance(q, torch.Tensor) and q.dim() == 4 else ("rows",)
        check_tensor("q", q, (*rows, "num_q_heads", cache.head_dim), FLOATS, cache.device)
        if sink_logits is not None:
            check_tensor("sink_logits", sink_logits, (q.shape[-2],), FLOATS, cache.device)
        check_flag("return_lse", return_lse)
        exchange = _Exchange((*q.shape[:-1], cache.v_head_dim), group, scatter_heads, q.device, buffer)
        if out is None:
            out = torch.empty(exchange.shape, dtype=q.dtype, device=q.device)
        check_tensor("out", out, exchange.shape, tuple({q.dtype, torch.float32}), q.device)
        attend(exchange.out, exchange.lse, sink_logits if rank == 0 else None)
    except TkvError as error:
        if checks_on():
            _tell(group, str(error))
        raise
    if checks_on():
        alike |= {"q": [*q.shape, str(q.dtype)], "v_head_dim": cache.v_head_dim, "scatter_heads": scatter_heads, "sink_logits": sink_logits}
        _compare(group, alike, held)
    lse = exchange.join(out)
    return (out, lse) if return_lse else out


def _compare(group: dist.ProcessGroup | None, alike: dict[str, Any], held: tuple[Any, Any, Any]) -> None:
    """Synchronous: every rank makes the same call, and no two hold the same key."""
    seq_lens, kv_start, pinned = held
    runs = [((0, min(n, pinned)), (start + pinned, start + n)) for n, start in zip(seq_lens.tolist(), kv_start.tolist())]
    alike = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in alike.items()}
    ranks = _tell(group, (alike, runs))
    for rank, (other, _) in enumerate(ranks):
        for name, value in ranks[0][0].items():
            if other[name] != value:
                raise RangeError(f"{name}: expected the same on every rank, got {value} on rank 0 and {other[name]} on rank {rank}")
    for seq in range(len(runs)):
        taken = sorted((*run, rank) for rank, (_, held_there) in enumerate(ranks) for run in held_there[seq] if run[0] < run[1])
        for (_, end, one), (start, _, other_one) in pairwise(taken):
            if start < end:
                raise RangeError(f"kv_start: ranks {one} and {other_one} both hold the key at position {start} of sequence {seq}")


def _tell(group: dist.ProcessGroup | None, facts: Any) -> list[Any]:
    """What each rank tells; a string is why a rank failed, and fails all."""
    ranks: list[Any] = [None] * _place(group)[1]
    dist.all_gather_object(ranks, facts, group=group)
    for rank, told in enumerate(ranks):
        if isinstance(told, str) and not isinstance(facts, str):
            raise UnsupportedError(f"rank {rank} failed: {told}")
    return ranks


def _all_gather(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    # The name that newer versions of torch have for it.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(received, sent, group=group)


def _place(group: dist.ProcessGroup | int | None) -> tuple[int, int]:
    """This process's rank in the group, and the group's size."""
    if not dist.is_available() or not dist.is_initialized():
        raise UnsupportedError("group: there is no process group; call torch.distributed.init_process_group first")
    # What new_group gives to other processes is an int.
    if group is not None and not isinstance(group, dist.ProcessGroup) and group != dist.GroupMember.NON_GROUP_MEMBER:
        raise DTypeError(f"group: expected a torch.distributed.ProcessGroup, got {group!r}")
    if isinstance(group, int) or (rank := dist.get_rank(group)) < 0:
        raise UnsupportedError("group: this process is not in it")
    return rank, dist.get_world_size(group)
