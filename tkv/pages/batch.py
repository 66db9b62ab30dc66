"""What a CacheManager takes and gives: token ids, the batch of a step, statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import torch

from tkv.errors import DTypeError, RangeError, ShapeError
from tkv.ops.checks import MAX_POSITION
from tkv.pages.tensors import as_tensors

Ints = Sequence[int] | np.ndarray | torch.Tensor


@dataclass(frozen=True, eq=False)
class BatchTensors:
    """A :class:`Batch` as tensors on a device, under the names that tkv's functions have for them.

    `seqs` and the numbers are those of the :class:`Batch`, on the host: what is filled up is not counted.
    """

    seqs: np.ndarray
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    prefix_lens: torch.Tensor
    cu_seqlens: torch.Tensor
    slot_mapping: torch.Tensor
    positions: torch.Tensor
    kv_start: torch.Tensor
    copies: torch.Tensor
    filled: torch.Tensor
    num_tokens: int
    q_len: int | None
    max_q_len: int
    max_seq_len: int
    pinned: int


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """What the engine has to compute in one step, and to do to every layer's cache.

    In this order, for each layer: apply `copies` (all reads before any write, or one after the other: no page is both source and
    destination), write the new keys and values to `slot_mapping`, attend. Steps run in the order in which they were handed out.

    Attributes:
        seqs: ``[num_seqs]`` int64, the sequences, in the order of the call.
        page_table: ``[num_seqs, width]`` int32, as wide as the longest sequence needs; -1 behind a sequence's pages.
        seq_lens: ``[num_seqs]`` int32, tokens of each sequence that are in its pages, the new ones included.
        prefix_lens: ``[num_seqs]`` int32, without the new ones.
        cu_seqlens: ``[num_seqs + 1]`` int32, where each sequence's new tokens start among all new tokens.
        slot_mapping: ``[num_tokens]`` int64, ``page * page_size + offset`` of each new token. No slot comes twice, and its page belongs to
            no other sequence.
        positions: ``[num_tokens]`` int64, the place of each new token in its sequence, tokens that were dropped included.
        kv_start: ``[num_seqs]`` int32, tokens behind the pinned ones that left the window and were dropped: key j of `page_table` is that
            of position j where ``j < pinned``, else of ``j + kv_start``. 0 without a window.
        copies: ``[num_copies, 2]`` int32, (source, destination) pages.
        copy_lens: ``[num_copies]`` int32, how many leading tokens of each copied page matter; a whole page may be copied.
        filled: ``[num_filled]`` int32, pages whose last slot this step writes.
        max_q_len, max_seq_len: the largest number of new tokens, and of `seq_lens`: hints for launches.
        pinned: the manager's: so many tokens at the start of a sequence, whole pages, are never dropped.
        num_tokens: all new tokens.
        q_len: the number of new tokens of each sequence where all get equally many, as when they decode; else None.

    Example:
        >>> from tkv.pages import CacheManager, PagePool
        >>> manager = CacheManager(PagePool(8), page_size=4)
        >>> seq = manager.add([1, 2, 3])
        >>> batch = manager.step({seq: [1, 2, 3]})
        >>> twin = manager.fork(seq)
        >>> batch = manager.step([seq, twin], tokens=[7, 8])
        >>> batch.copies.tolist(), batch.slot_mapping.tolist(), batch.filled.tolist()
        ([[0, 1]], [7, 3], [1, 0])
    """

    seqs: np.ndarray
    page_table: np.ndarray
    seq_lens: np.ndarray
    prefix_lens: np.ndarray
    cu_seqlens: np.ndarray
    slot_mapping: np.ndarray
    positions: np.ndarray
    kv_start: np.ndarray
    copies: np.ndarray
    copy_lens: np.ndarray
    filled: np.ndarray
    max_q_len: int
    max_seq_len: int
    pinned: int

    def __repr__(self) -> str:
        lists = [f"{len(getattr(self, name)):,} {name}" for name in ("copies", "filled", "conversions") if hasattr(self, name)]
        hints = f"max_q_len {self.max_q_len:,}, max_seq_len {self.max_seq_len:,}"
        return f"{type(self).__name__}({self.num_tokens:,} new tokens of {self.seqs.size:,} sequences, {hints}, {', '.join(lists)})"

    @property
    def num_tokens(self) -> int:
        return self.slot_mapping.size

    @property
    def q_len(self) -> int | None:
        return self.max_q_len if self.max_q_len * self.seqs.size == self.num_tokens else None

    def tensors(
        self, device: torch.device | str | None = None, *, num_seqs: int | None = None, num_tokens: int | None = None,
        width: int | None = None,
    ) -> BatchTensors:  # fmt: skip
        """The arrays as tensors, those that the functions take.

        On a GPU they are views of one buffer, which is copied there on the current stream while the host goes on.

        A CUDA graph needs the same shapes in every step: with the sizes below the tensors are filled up with sequences that have no
        tokens, and tokens that are written nowhere (slots and pages -1). The functions take them as they are; in results their rows are
        0. `copies` and `filled` are not filled up: copy the pages before the graph is replayed. ::

            sizes = dict(num_seqs=64, num_tokens=64, width=512)    # up to 64 sequences of 512 pages, one new token each
            static = batch.tensors(device, **sizes)
            with torch.cuda.graph(graph):                          # for each layer, after a warm-up on another stream:
                tkv.write_kv(k, v, cache, static.slot_mapping)
                tkv.paged_decode(q, cache, static.page_table, static.seq_lens, max_seq_len=512 * page_size, out=out)

            now = manager.step(seqs, tokens).tensors(device, **sizes)
            tkv.copy_pages(cache, cache, *now.copies.unbind(1))
            for name in ("page_table", "seq_lens", "slot_mapping"):
                getattr(static, name).copy_(getattr(now, name))
            graph.replay()                                         # out[: len(now.seqs)] is what is new

        Args:
            device: where; on the CPU (None) they share the arrays' memory.
            num_seqs, num_tokens, width: how many sequences and new tokens there are to be, and columns of `page_table`, at least those
                of the batch; None: as many as it has.

        Returns:
            The tensors.

        Raises:
            RangeError, DTypeError: a size is smaller than the batch's, or no int.

        Example:
            >>> from tkv.pages import CacheManager, PagePool
            >>> manager = CacheManager(PagePool(8), page_size=4)
            >>> step = manager.step({manager.add([5, 6, 7]): [5, 6, 7]})
            >>> batch = step.tensors()
            >>> batch.page_table, batch.seq_lens, batch.slot_mapping, batch.q_len
            (tensor([[0]], dtype=torch.int32), tensor([3], dtype=torch.int32), tensor([0, 1, 2]), 3)
            >>> batch = step.tensors(num_seqs=2, num_tokens=4, width=2)
            >>> batch.page_table.tolist(), batch.seq_lens.tolist(), batch.cu_seqlens.tolist(), batch.slot_mapping.tolist()
            ([[0, -1], [-1, -1]], [3, 0], [0, 3, 3], [0, 1, 2, -1])
        """
        sizes = {"num_seqs": num_seqs, "num_tokens": num_tokens, "width": width}
        return BatchTensors(**as_tensors(self, BatchTensors, device, **sizes))


@dataclass(frozen=True, eq=False)
class TailBatchTensors(BatchTensors):
    """A :class:`TailBatch` as tensors on a device, under the names that :func:`kivi_decode` and :func:`kivi_prefill` have for them.

    `kv_start` is that of the tails: the position of each one's first token.
    """

    tail_page_table: torch.Tensor
    tail_lens: torch.Tensor
    conversions: torch.Tensor
    max_tail_len: int


@dataclass(frozen=True, eq=False, repr=False)
class TailBatch(Batch):
    """A :class:`Batch` of a manager with a `tail_pool`: each sequence is in two caches, the newest tokens in the tail's.

    In this order, for each layer:

    1. convert: ``tkv.quantize_pages(tail_cache, cache, conversions[:, 0], conversions[:, 1])``,
    2. apply `copies` to the tail's cache,
    3. write the new keys and values to `slot_mapping` of the tail's cache,
    4. attend, as :func:`kivi_decode` and :func:`kivi_prefill` do.

    A page of the tail that is converted may be copied to, or written, in the same step: so conversions come first. What they read was
    written by earlier steps, and what they write is read from this step's attention on.

    Attributes:
        page_table: ``[num_seqs, width]`` int32, each sequence's converted pages, -1 behind them.
        seq_lens: ``[num_seqs]`` int32, tokens in them: the first of each sequence, whole pages.
        prefix_lens: ``[num_seqs]`` int32, tokens of each sequence in both parts without the new ones: ``q_start``.
        slot_mapping: ``[num_tokens]`` int64, slots of the tail's cache.
        kv_start: ``[num_seqs]`` int32, the position of each tail's first token: `seq_lens`.
        copies, copy_lens, filled: of the tail's cache.
        max_seq_len: the largest of `seq_lens`.
        tail_page_table: ``[num_seqs, tail_width]`` int32, pages of the tail's cache with each sequence's other tokens, -1 behind them.
        tail_lens: ``[num_seqs]`` int32, tokens in them, the new ones included.
        conversions: ``[num_conversions, 2]`` int32, (page of the tail's cache, page of the cache). No page comes twice.
        max_tail_len: the largest of `tail_lens`.

    Example:
        >>> from tkv.pages import CacheManager, PagePool
        >>> manager = CacheManager(PagePool(8), page_size=4, tail_pool=PagePool(8), tail_len=4)
        >>> seq = manager.add(range(10))
        >>> batch = manager.step({seq: range(10)})
        >>> batch.seq_lens.tolist(), batch.tail_page_table.tolist(), batch.tail_lens.tolist()
        ([0], [[0, 1, 2]], [10])
        >>> batch = manager.step({seq: [10]})                      # of the second page token 7 is among the newest four
        >>> batch.conversions.tolist(), batch.page_table.tolist(), batch.tail_page_table.tolist(), batch.kv_start.tolist()
        ([[0, 0]], [[0]], [[1, 2]], [4])
    """

    tail_page_table: np.ndarray
    tail_lens: np.ndarray
    conversions: np.ndarray
    max_tail_len: int

    def tensors(
        self, device: torch.device | str | None = None, *, num_seqs: int | None = None, num_tokens: int | None = None,
        width: int | None = None, tail_width: int | None = None,
    ) -> TailBatchTensors:  # fmt: skip
        """The arrays as tensors, those that the functions take.

        Args:
            device, num_seqs, num_tokens, width: see :meth:`Batch.tensors`. `conversions` are not filled up either.
            tail_width: how many columns `tail_page_table` is to have, at least its own; None: as many.

        Returns:
            The tensors.

        Raises:
            RangeError, DTypeError: a size is smaller than the batch's, or no int.

        Example:
            >>> from tkv.pages import CacheManager, PagePool
            >>> manager = CacheManager(PagePool(8), page_size=4, tail_pool=PagePool(8), tail_len=4)
            >>> manager.step({manager.add([5, 6]): [5, 6]}).tensors().tail_lens
            tensor([2], dtype=torch.int32)
        """
        sizes = {"num_seqs": num_seqs, "num_tokens": num_tokens, "width": width, "tail_width": tail_width}
        return TailBatchTensors(**as_tensors(self, TailBatchTensors, device, **sizes))


@dataclass(frozen=True)
class CacheStats:
    """A manager's statistics, since it was made and at the moment.

    Attributes:
        prompts: sequences that were added.
        hits: those of them that found at least one token in the cache.
        tokens_asked: tokens of the prompts.
        tokens_saved: those of them that were found, and need not be computed.
        evictions: cached pages that were given up for new ones.
        copies: pages that were copied.
        pages_used: pages that sequences use, each counted once.
        pages_shared: those of them that several sequences use.
        pages_cached: pages that no sequence uses, kept for prompts to come.
        pages_free: pages that hold nothing.
        waste: slots without a token in the pages that sequences use.
        conversions: pages of tails that were converted.

    With a `tail_pool`, `waste` and `copies` are the tails', and the numbers of pages are those of `pool`.

    Example:
        >>> from tkv.pages import CacheManager, PagePool
        >>> manager = CacheManager(PagePool(8), page_size=4)
        >>> batch = manager.step({manager.add([1, 2, 3]): [1, 2, 3]})
        >>> seq = manager.add([1, 2, 3, 4])
        >>> stats = manager.stats()
        >>> stats.tokens_saved, stats.tokens_asked, stats.pages_shared
        (3, 7, 1)
    """

    prompts: int
    hits: int
    tokens_asked: int
    tokens_saved: int
    evictions: int
    copies: int
    pages_used: int
    pages_shared: int
    pages_cached: int
    pages_free: int
    waste: int
    conversions: int = 0


def as_ids(name: str, values: Ints | int, *, low: int | None = 0) -> np.ndarray:
    """A 1-D int64 array of integers of at least `low`.

    Raises:
        DTypeError, ShapeError, RangeError: they are something else.
    """
    if isinstance(values, torch.Tensor) and values.device.type != "cpu":
        raise DTypeError(f"{name}: expected integers on the host, got a tensor on {values.device}; call .cpu()")
    if isinstance(values, str | bytes | Mapping | Set) or not (hasattr(values, "__len__") or hasattr(values, "__array__")):
        raise DTypeError(f"{name}: expected a list of integers, got {values!r}")
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise DTypeError(f"{name}: expected a list of integers ({error})") from error
    if array.ndim != 1:
        raise ShapeError(f"{name}: expected one dimension, got shape {list(array.shape)}")
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu" or (array.dtype == np.uint64 and array.max() >= 2**63):
        raise DTypeError(f"{name}: expected integers of up to 63 bits, got {array.dtype}")
    if low is not None and array.min() < low:
        raise RangeError(f"{name}: expected {low} or more, got {array.min()} at [{int(array.argmin())}]")
    return np.ascontiguousarray(array, np.int64)


def is_one(seq: int | Ints) -> TypeGuard[int]:
    """Whether this is meant as one sequence, not several."""
    return isinstance(seq, str | bytes) or not hasattr(seq, "__len__")


def as_work(seqs: Mapping[int, Ints] | Ints, tokens: Ints | None, counts: Ints | None) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """What a step is asked for: sequences, ids of their new tokens or None, and how many each gets.

    Raises:
        DTypeError, ShapeError, RangeError: the arguments do not fit together.
    """
    if isinstance(seqs, Mapping):
        if tokens is not None or counts is not None:
            raise DTypeError("tokens: a mapping has the tokens with it; leave out tokens and counts")
        parts = [as_ids("tokens", part) for part in seqs.values()]
        new = np.array([part.size for part in parts], np.int64)
        return as_ids("seqs", list(seqs), low=None), np.concatenate(parts) if parts else np.zeros(0, np.int64), new
    names = as_ids("seqs", seqs, low=None)
    if tokens is None and counts is None and names.size:
        raise DTypeError("tokens: expected the ids of the new tokens, or counts of tokens whose ids are not known")
    ids = None if tokens is None else as_ids("tokens", tokens)
    new = np.ones(names.size, np.int64) if counts is None else as_ids("counts", counts)
    if new.size != names.size:
        raise ShapeError(f"counts: expected {names.size}, one for each sequence, got {new.size}")
    if ids is not None and ids.size != new.sum():
        raise ShapeError(f"tokens: expected {new.sum()} ids for {names.size} sequences, got {ids.size}")
    return names, ids, new


def check_growth(names: np.ndarray, before: np.ndarray, known: np.ndarray, ids: np.ndarray | None, new: np.ndarray) -> None:
    """Whether sequences of these lengths and known tokens can have so many more.

    Raises:
        RangeError: one would be too long, or ids are given behind tokens without ids.
    """
    after = before + new
    if after.size and after.max() > MAX_POSITION:
        raise RangeError(f"tokens: expected sequences of at most {MAX_POSITION} tokens, got {after.max()}")
    if ids is not None and np.any((known < before) & (new > 0)):
        seq = names[np.argmax((known < before) & (new > 0))]
        raise RangeError(f"tokens: sequence {seq} has tokens without ids; call identify first, or give counts alone")
