"""CacheManager: sequences over a pool of pages, and prompts that find what is cached already."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tkv.errors import DTypeError, RangeError, ShapeError, UnsupportedError
from tkv.ops.checks import check_flag, check_int
from tkv.pages.batch import Batch, Ints, as_ids, as_work, is_one
from tkv.pages.eviction import Eviction, evict
from tkv.pages.ledger import Ledger
from tkv.pages.pool import PagePool
from tkv.pages.prefix import ExtraKeys, PrefixIndex, root_hash
from tkv.pages.tail import TailLedger
from tkv.pages.view import ManagerView


class CacheManager(ManagerView):
    """Sequences over the pages of a pool, for all layers whose caches have the same pages and window.

    A sequence is the tokens whose keys and values are in its pages. :meth:`add` starts one with what the cache has of its prompt already,
    :meth:`step` extends a batch of them and says which slots to write; what was written stays to be found by later prompts, also when
    its sequence is freed, until the room is needed (least recently used first, the end of a chain before its start).

    The contract: **what a step hands out is written, in every layer, before the kernels of the next step run**. From the return of
    :meth:`step` on its tokens can be found by prompts; two prompts that are added before either was in a step are both computed, and
    share whole pages afterwards. A step whose kernels fail leaves pages that promise what they do not hold: free its sequences and
    call :meth:`clear`.

    A page is written by the only sequence that has it. Sequences that share a page which one of them is about to write, after a
    :meth:`fork` or a match that ends within a page, part: the step copies the page for the writer.

    Every call that raises leaves all sequences and references as they were. A manager is not safe for several threads at once, and has
    its pools to itself.

    With `window` a sequence holds the pages of its first `sinks` tokens, rounded up to whole pages (`pinned`), and those that new tokens
    see: a step first drops what has left the window. However long it gets, a sequence that takes n tokens a step needs at most
    ``ceil((sinks + window + n - 1) / page_size) + 2`` pages, and a row of `page_table` is no longer; `kv_start` and `pinned` of the batch
    say which positions its keys have, give both to the kernels. Pages that were dropped stay cached while there is room. A prompt that
    finds a prefix holds the same few pages of it. A sequence some of whose tokens were dropped before their ids were given is found by
    no prompt from then on.

    With `tail_pool` every sequence is in two caches, as KIVI has it: its newest tokens in native pages of `tail_pool`, whole pages of older
    ones in pages of `pool`, whose format may be one that is made a page at a time. New tokens go to the tail. A step converts the pages of
    its sequences' tails that are full and older than the newest `tail_len` tokens, and gives them back to `tail_pool`: see
    :class:`TailBatch`. So `tail_pool` needs room for all new tokens of a step beside `tail_len` tokens and a page of each sequence; a long
    prompt comes in chunks, whose pages leave the tail in later steps. A page that several sequences of a step share is converted once, one
    whose like is in `pool` already not at all. Prompts find whole converted pages and nothing of a tail: a freed sequence leaves none
    behind. :meth:`truncate` cuts a tail anywhere, and what was converted between pages only.

    Args:
        pool: the pages.
        page_size: tokens of a page, as in the caches.
        window: how many keys a token sees, its own included, at least 1; None: all before it.
        sinks: with `window`, so many tokens at the start of each sequence stay visible.
        tail_pool: the pages of the tails, or None: each sequence is in pages of `pool` alone.
        tail_len: with `tail_pool`, how many keys at least each new token sees in the tail, itself included, if they were written there; at
            least 1.
        prefix_cache: whether prompts may find pages of others, and pages are kept once their sequences are gone.
        partial_tokens: the fewest tokens of a page that are worth a copy of it when a prompt agrees with the page no further; None: prompts
            match whole pages only, which with `tail_pool` they do anyhow.

    Raises:
        DTypeError, RangeError: an argument is of another type or out of range.
        UnsupportedError: both `window` and `tail_pool`.

    Example:
        >>> manager = CacheManager(PagePool(100), page_size=4)
        >>> first = manager.add([1, 2, 3, 4, 5, 6])
        >>> batch = manager.step({first: [1, 2, 3, 4, 5, 6]})      # now write batch.slot_mapping in every layer, and attend
        >>> prompt = [1, 2, 3, 4, 5, 9, 9]
        >>> second = manager.add(prompt)
        >>> manager.length(second)                                 # of its tokens, five need not be computed
        5
        >>> manager.step({second: prompt[5:]}).copies.tolist()     # page 1 goes on differently: copied first
        [[1, 2]]
        >>> batch = manager.step([first, second], tokens=[7, 8])   # decoding

        >>> manager = CacheManager(PagePool(4), page_size=2, window=3, sinks=1)
        >>> seq = manager.add([1])
        >>> for token in range(1000):
        ...     batch = manager.step({seq: [token]})
        >>> manager.length(seq), manager.held(seq), batch.page_table.shape, batch.kv_start.tolist(), batch.pinned
        (1000, 6, (1, 3), [994], 2)
    """

    def __init__(
        self, pool: PagePool, page_size: int, *, window: int | None = None, sinks: int = 0, tail_pool: PagePool | None = None,
        tail_len: int = 128, prefix_cache: bool = True, partial_tokens: int | None = 1,
    ) -> None:  # fmt: skip
        if not isinstance(pool, PagePool):
            raise DTypeError(f"pool: expected a tkv.PagePool, got {type(pool).__name__}")
        if tail_pool is not None and not isinstance(tail_pool, PagePool):
            raise DTypeError(f"tail_pool: expected a tkv.PagePool or None, got {type(tail_pool).__name__}")
        if tail_pool is pool:
            raise RangeError("tail_pool: expected a pool of its own, for the pages of another cache, got pool")
        if tail_pool is not None and window is not None:
            raise UnsupportedError(
                "window: cannot be had together with tail_pool, whose older tokens all stay visible; leave out one of them"
            )
        self.pool = pool
        self.page_size = check_int("page_size", page_size, 1)
        self.prefix_cache = check_flag("prefix_cache", prefix_cache)
        self.partial_tokens = None if partial_tokens is None else check_int("partial_tokens", partial_tokens, 1)
        self.window = None if window is None else check_int("window", window, 1)
        self.sinks = check_int("sinks", sinks, 0)
        self.tail_pool = tail_pool
        self.tail_len = check_int("tail_len", tail_len, 1)
        index = PrefixIndex(pool, self.page_size)
        self._ledger: Ledger | TailLedger
        if tail_pool is None:
            self._ledger = Ledger(index, self.prefix_cache, self.partial_tokens, self.window, self.sinks)
        else:
            self._ledger = TailLedger(index, tail_pool, self.tail_len, self.prefix_cache)
        self._prompts = self._hits = self._asked = self._saved = 0

    def add(self, tokens: Ints, *, extra_keys: ExtraKeys = None) -> int:
        """Start a sequence with the longest part of a prompt that the cache has.

        Whole pages are shared. A page that the prompt agrees with only in part is shared too, until the step that writes the rest, which
        copies it if others need it. The last token is never taken from the cache: its output has to be computed.

        Args:
            tokens: ``[n]`` ids of the prompt, ints from 0 on: a list, array or tensor on the host. What stands for an image or
                other data needs ids that tell these apart.
            extra_keys: what else the keys and values depend on, such as an adapter's name or a tenant's salt: None, bool, int, float,
                str, bytes, or tuples of such. Only equal ones match, and different ones never collide.

        Returns:
            The sequence's number, which never comes again. Its :meth:`length` says how much was found; give the rest to :meth:`step`,
            ``prompt[manager.length(seq) :]``.
            With a window it holds of these only what the next token sees.

        Raises:
            DTypeError, ShapeError, RangeError: the tokens or keys are of another kind.

        Example:
            >>> manager = CacheManager(PagePool(8), page_size=2)
            >>> batch = manager.step({manager.add([1, 2, 3]): [1, 2, 3]})
            >>> prompt = [1, 2, 3, 4]
            >>> seq = manager.add(prompt)
            >>> batch = manager.step({seq: prompt[manager.length(seq) :]})
            >>> batch.prefix_lens.tolist(), batch.num_tokens
            ([3], 1)
            >>> manager.length(manager.add(prompt, extra_keys="a tenant's salt"))
            0
        """
        ids, root = as_ids("tokens", tokens), root_hash(extra_keys)
        seq, found = self._ledger.start(ids, root)
        self._prompts += 1
        self._hits += found > 0
        self._asked += ids.size
        self._saved += found
        return seq

    def step(self, seqs: Mapping[int, Ints] | Ints, tokens: Ints | None = None, *, counts: Ints | None = None) -> Batch:
        """Extend sequences by new tokens, all of them or none.

        Args:
            seqs: ``[num_seqs]`` different sequences, in the order of the batch; or a mapping from each to its new tokens.
            tokens: ``[num_tokens]`` ids of all new tokens, sequence by sequence.
            counts: ``[num_seqs]`` how many of them each sequence gets, from 0 on; one each if None. Without `tokens`: so many tokens whose
                ids are not known yet (sampled on the device, or a tree of drafts); prompts find them only after :meth:`identify`.

        Returns:
            What to do: see :class:`Batch`; with `tail_pool` a :class:`TailBatch`. Without new tokens a step still drops what left the
            window, or converts; without sequences the batch is empty.

        Raises:
            OutOfPages: free and cached pages, of either pool, are too few. Free or truncate sequences, or step fewer of them.
            RangeError: no such sequence, one that comes twice, tokens of a sequence with unidentified ones, a length above 2^30.
            DTypeError, ShapeError: an argument is of another kind.

        Example:
            >>> manager = CacheManager(PagePool(8), page_size=4)
            >>> a, b = manager.add([1, 2, 3, 4, 5]), manager.add([6])
            >>> batch = manager.step({a: [1, 2, 3, 4, 5], b: [6]})
            >>> batch.cu_seqlens.tolist(), batch.slot_mapping.tolist(), batch.filled.tolist()
            ([0, 5, 6], [0, 1, 2, 3, 4, 8], [0])
            >>> manager.step([a, b], tokens=[10, 11]).slot_mapping.tolist()
            [5, 9]
        """
        return self._ledger.step(*as_work(seqs, tokens, counts))

    def append(self, seq: int, tokens: Ints | None = None, *, count: int | None = None) -> Batch:
        """:meth:`step` of a single sequence.

        Args:
            seq: the sequence.
            tokens: its new tokens, or
            count: how many, if their ids are not known yet.

        Returns:
            What to do: see :class:`Batch`.

        Raises:
            OutOfPages, RangeError, DTypeError, ShapeError: as for :meth:`step`.

        Example:
            >>> manager = CacheManager(PagePool(8), page_size=4)
            >>> manager.append(manager.add([1, 2]), [1, 2]).slot_mapping.tolist()
            [0, 1]
        """
        if (tokens is None) == (count is None):
            raise DTypeError("tokens: expected token ids, or a count of tokens without ids; got both or neither")
        if tokens is None:
            return self.step([seq], counts=[check_int("count", count, 0)])
        return self.step({seq: tokens})

    def identify(self, seq: int, tokens: Ints) -> None:
        """Say which tokens were handed out as a mere count, the oldest first, so that prompts can find them.

        Args:
            seq: the sequence.
            tokens: ids of its first tokens without ids, not more than there are. Keys and values in their slots must be theirs, computed
                with the sequence before them: after a tree of drafts, the accepted path moved together and the rest truncated. Ids of
                tokens that were dropped or evicted meanwhile are to be given too, and are not kept.

        Raises:
            RangeError: there are fewer tokens without ids; or a sequence that shares them has given other ids; or no such sequence.
            DTypeError, ShapeError: the tokens are of another kind.

        Example:
            >>> manager = CacheManager(PagePool(8), page_size=4)
            >>> seq = manager.add([1])
            >>> batch = manager.step([seq], counts=[3])
            >>> manager.identify(seq, [1, 2])
            >>> manager.tokens(seq).tolist()
            [1, 2, -1]
        """
        self._ledger.identify(seq, as_ids("tokens", tokens))

    def fork(self, seq: int) -> int:
        """A second sequence with the same tokens, on the same pages.

        Args:
            seq: the sequence.

        Returns:
            The new sequence's number. A page that is not whole is copied when one of the two goes on.

        Raises:
            RangeError, DTypeError: there is no such sequence.

        Example:
            >>> manager = CacheManager(PagePool(8), page_size=4)
            >>> a = manager.add([1, 2])
            >>> b = (manager.append(a, [1, 2]), manager.fork(a))[1]
            >>> batch = manager.step([a, b], tokens=[3, 4])
            >>> batch.page_table.tolist(), batch.copies.tolist()
            ([[1], [0]], [[0, 1]])
        """
        return self._ledger.fork(seq)

    def truncate(self, seq: int | Ints, length: int | Ints) -> None:
        """Drop the last tokens of a sequence, such as drafts that were rejected, or of several, all of them or none.

        What only this sequence has is forgotten: no prompt finds it any more. Pages that others use, or that cached pages build on, stay.
        Several at once are cut as one after the other would be, in much less time.

        Args:
            seq: the sequence, or ``[num_seqs]`` different ones.
            length: how many tokens stay, from 0 to its length; of several, ``[num_seqs]``.

        Raises:
            RangeError, DTypeError, ShapeError: no such sequence or length; a length within a converted page, which cannot be written on;
                one at which the next token would see tokens that left the window and were dropped (drafts of the last step never need
                that); or one below the length at the last :meth:`evict`.

        Example:
            >>> manager = CacheManager(PagePool(8), page_size=4)
            >>> seq = manager.add([1, 2, 3])
            >>> batch = manager.step({seq: [1, 2, 3, 8, 9]})
            >>> manager.truncate(seq, 3)
            >>> batch = manager.step({seq: [4], manager.add([7]): [7, 8]})
            >>> manager.truncate(batch.seqs, batch.prefix_lens + 1)
            >>> manager.lengths(batch.seqs).tolist()
            [4, 1]
        """
        names, rows = self._rows(seq)
        lens = np.array([check_int("length", length, 0)]) if is_one(seq) else as_ids("length", length)
        if names.size != lens.size:
            raise ShapeError(f"length: expected {names.size}, one for each sequence, got {lens.size}")
        old = self._ledger.lengths(rows)
        if (lens > old).any():
            at = int(np.argmax(lens > old))
            raise RangeError(f"length: expected 0 to {old[at]}, the length of sequence {names[at]}, got {lens[at]}")
        self._ledger.truncate(names, rows, lens)

    def evict(self, seqs: Ints, lengths: Ints) -> Eviction:
        """Make sequences hold fewer tokens, all of them or none; each head chooses which, as ``tkv.compact_kv`` is told.

        The tokens stay in the sequence's own pages. Instead of pages that others use, new ones are taken; what prompts could find of its
        own is forgotten. No prompt finds the sequence from then on. Its new tokens go on at their true positions, :meth:`length` still
        counts all; `seq_lens` and `prefix_lens` of batches count what is held.

        **Run compact_kv in every layer before the next call of** :meth:`step` **or** :meth:`evict`: pages that become free may be handed
        out by these.

        Args:
            seqs: ``[num_seqs]`` different sequences.
            lengths: ``[num_seqs]`` how many tokens each keeps, from 0 to what it holds; if it is all of them, nothing changes.

        Returns:
            What to move: see :class:`Eviction`.

        Raises:
            OutOfPages: free and cached pages are too few for tokens that are in shared pages.
            RangeError: no such sequence, one that comes twice, or it holds fewer tokens.
            DTypeError, ShapeError: an argument is of another kind.
            UnsupportedError: the manager has a `window`, which goes by positions that the keys no longer have, or a `tail_pool`.

        Example:
            >>> manager = CacheManager(PagePool(8), page_size=4)
            >>> seq = manager.add(range(10))
            >>> batch = manager.step({seq: range(10)})
            >>> eviction = manager.evict([seq], [5])               # now compact_kv, in every layer
            >>> batch = manager.step({seq: [10]})
            >>> batch.page_table.tolist(), batch.seq_lens.tolist(), batch.positions.tolist(), batch.slot_mapping.tolist()
            ([[0, 1]], [6], [10], [5])
        """
        if self.window is not None:
            raise UnsupportedError("evict: keys that heads chose have no common positions, by which a window goes; manage without window")
        if isinstance(self._ledger, TailLedger):
            raise UnsupportedError("evict: pages are converted as wholes and cannot be compacted; manage without tail_pool")
        names, lens = as_ids("seqs", seqs, low=None), as_ids("lengths", lengths)
        if names.size != lens.size:
            raise ShapeError(f"lengths: expected {names.size}, one for each sequence, got {lens.size}")
        return evict(self._ledger, names, lens)

    def free(self, seq: int | Ints) -> None:
        """End a sequence, or several, all of them or none. Their pages stay cached, the last one too, until others need them.

        Args:
            seq: the sequence, or ``[num_seqs]`` different ones.

        Raises:
            RangeError, DTypeError, ShapeError: there is no such sequence, or one comes twice.

        Example:
            >>> manager = CacheManager(PagePool(8), page_size=4)
            >>> seq = manager.add([1, 2, 3])
            >>> batch = manager.step({seq: [1, 2, 3]})
            >>> manager.free(seq)
            >>> manager.length(manager.add([1, 2, 3, 4]))
            3
        """
        for name in self._rows(seq)[0].tolist():
            self._ledger.free(name)

    def __repr__(self) -> str:
        index, options = self._ledger.index, ""
        if self.window is not None:
            options = f", window {self.window:,}, sinks {self.sinks:,}"
        if self.tail_pool is not None:
            options = f", tails of {self.tail_len:,} tokens: {self.tail_pool.num_used:,} pages used, {self.tail_pool.num_free:,} free"
        used = self.pool.num_used - index.num_idle
        pages = f"{used:,} used, {index.num_idle:,} cached, {self.pool.num_free:,} free"
        return f"CacheManager({len(self.seqs):,} sequences, pages of {self.page_size:,} tokens: {pages}{options})"

    def _rows(self, seq: int | Ints) -> tuple[np.ndarray, np.ndarray]:
        """The living sequences that one number stands for, or several, and their rows."""
        if is_one(seq):
            return np.array([seq]), np.array([self._ledger.row(seq)])
        names = as_ids("seq", seq, low=None)
        return names, self._ledger.rows_of(names)

    def clear(self) -> None:
        """Forget all that is cached, as when the model's weights have changed. Living sequences go on, but no prompt finds them.

        Example:
            >>> manager = CacheManager(PagePool(8), page_size=4)
            >>> batch = manager.step({manager.add([1, 2, 3]): [1, 2, 3]})
            >>> manager.clear()
            >>> manager.match([1, 2, 3])
            0
        """
        self._ledger.clear()
