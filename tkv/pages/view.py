"""What a CacheManager can be asked; nothing in here changes one."""

from __future__ import annotations

import numpy as np

from tkv.errors import ShapeError
from tkv.ops.checks import check_int
from tkv.pages.batch import CacheStats, Ints, as_ids, is_one
from tkv.pages.ledger import Ledger
from tkv.pages.pool import PagePool
from tkv.pages.prefix import ExtraKeys, root_hash
from tkv.pages.tail import TailLedger


class ManagerView:
    """The questions to a :class:`CacheManager`."""

    pool: PagePool
    _ledger: Ledger | TailLedger
    _prompts: int
    _hits: int
    _asked: int
    _saved: int

    @property
    def seqs(self) -> list[int]:
        """The living sequences, oldest first."""
        return self._ledger.names

    @property
    def num_available(self) -> int:
        """Pages of `pool` that steps can still take: free ones and those that are only cached."""
        return self._ledger.index.num_available

    def length(self, seq: int) -> int:
        """Tokens of a sequence, those included whose keys were dropped since or evicted: the position of its next token.

        Raises:
            RangeError, DTypeError: there is no such sequence.

        Example:
            >>> from tkv.pages import CacheManager, PagePool
            >>> manager = CacheManager(PagePool(8), page_size=4)
            >>> manager.length(manager.add([1, 2, 3]))             # none is computed yet
            0
        """
        return self._ledger.length(self._ledger.row(seq))

    def lengths(self, seqs: Ints) -> np.ndarray:
        """:meth:`length` of several sequences: ``[num_seqs]`` int64.

        Raises:
            RangeError, DTypeError, ShapeError: no such sequence, or one that comes twice.

        Example:
            >>> from tkv.pages import CacheManager, PagePool
            >>> manager = CacheManager(PagePool(8), page_size=4)
            >>> batch = manager.step({manager.add([1, 2]): [1, 2], manager.add([3]): [3]})
            >>> manager.lengths([1, 0]).tolist()
            [1, 2]
        """
        return self._ledger.lengths(self._ledger.rows_of(as_ids("seqs", seqs, low=None)))

    def held(self, seq: int) -> int:
        """Tokens of a sequence whose keys and values are in its pages: less than :meth:`length` once some left its window or were evicted.

        Raises:
            RangeError, DTypeError: there is no such sequence.

        Example:
            >>> from tkv.pages import CacheManager, PagePool
            >>> manager = CacheManager(PagePool(8), page_size=4, window=4)
            >>> seq = manager.add(range(10))
            >>> batch = manager.step({seq: range(10)})             # its first tokens see the first keys
            >>> batch = manager.step({seq: [10]})
            >>> manager.length(seq), manager.held(seq)
            (11, 7)
        """
        return self._ledger.held(self._ledger.row(seq))

    def pages(self, seq: int) -> np.ndarray:
        """``[num_pages]`` int32, a sequence's pages of `pool` in order, those of its tail not included: a copy.

        Raises:
            RangeError, DTypeError: there is no such sequence.

        Example:
            >>> from tkv.pages import CacheManager, PagePool
            >>> manager = CacheManager(PagePool(8), page_size=4)
            >>> batch = manager.step({manager.add([1, 2, 3, 4, 5]): [1, 2, 3, 4, 5]})
            >>> manager.pages(0).tolist()
            [0, 1]
        """
        return self._ledger.pages(self._ledger.row(seq))

    def tail_pages(self, seq: int) -> np.ndarray:
        """``[num_pages]`` int32, the pages of a sequence's tail in order: a copy. Without `tail_pool` there are none.

        Raises:
            RangeError, DTypeError: there is no such sequence.

        Example:
            >>> from tkv.pages import CacheManager, PagePool
            >>> manager = CacheManager(PagePool(8), page_size=4, tail_pool=PagePool(8))
            >>> batch = manager.step({manager.add([1, 2, 3, 4, 5]): [1, 2, 3, 4, 5]})
            >>> manager.pages(0).tolist(), manager.tail_pages(0).tolist()
            ([], [0, 1])
        """
        return self._ledger.tail_pages(self._ledger.row(seq))

    def tokens(self, seq: int) -> np.ndarray:
        """``[held]`` int64, ids of the tokens that are in a sequence's pages, -1 where they were not given, or are no longer known since
        each head kept others.

        Raises:
            RangeError, DTypeError: there is no such sequence.

        Example:
            >>> from tkv.pages import CacheManager, PagePool
            >>> manager = CacheManager(PagePool(8), page_size=4)
            >>> batch = manager.step({manager.add([1, 2]): [1, 2]})
            >>> manager.tokens(0).tolist()
            [1, 2]
        """
        return self._ledger.ids_of(self._ledger.row(seq))

    def match(self, tokens: Ints, *, extra_keys: ExtraKeys = None) -> int:
        """How many tokens of a prompt :meth:`add` would find now. Nothing changes.

        Args:
            tokens, extra_keys: as for :meth:`add`.

        Returns:
            The number of leading tokens, at most ``len(tokens) - 1``.

        Raises:
            DTypeError, ShapeError, RangeError: as for :meth:`add`.

        Example:
            >>> from tkv.pages import CacheManager, PagePool
            >>> manager = CacheManager(PagePool(8), page_size=4)
            >>> batch = manager.step({manager.add([1, 2, 3]): [1, 2, 3]})
            >>> manager.match([1, 2, 3])
            2
        """
        return self._ledger.match(as_ids("tokens", tokens), root_hash(extra_keys))[1]

    def missing(self, seqs: int | Ints, counts: int | Ints) -> int:
        """Pages of `pool` that a :meth:`step` has to find for so many new tokens. It can where :attr:`num_available` is as large.

        Pages to copy shared ones to are counted, and those that leave the sequences' windows in the same step are not: they are used first.
        With `tail_pool` it is pages that the step converts to; :meth:`tail_missing` then asks for the rest.

        Args:
            seqs: the sequence, or ``[num_seqs]`` different ones, of one step.
            counts: how many new tokens it gets; of several, ``[num_seqs]``.

        Raises:
            RangeError, DTypeError, ShapeError: as for :meth:`step`.

        Example:
            >>> from tkv.pages import CacheManager, PagePool
            >>> manager = CacheManager(PagePool(8), page_size=4)
            >>> seq = manager.add([1, 2, 3, 4, 5, 6])
            >>> manager.missing(seq, 6), manager.num_available     # room for it
            (2, 8)
            >>> batch = manager.step({seq: [1, 2, 3, 4, 5, 6]})
            >>> manager.missing(seq, 2), manager.missing([seq, manager.fork(seq)], [2, 3])
            (0, 2)
        """
        return self._missing(seqs, counts)[0]

    def tail_missing(self, seqs: int | Ints, counts: int | Ints) -> int:
        """Pages of `tail_pool` that a :meth:`step` has to find for so many new tokens: it can where ``tail_pool.num_free`` is as large.

        Pages that the step converts are used first, and not counted. Without `tail_pool` it is 0.

        Args:
            seqs, counts: as for :meth:`missing`.

        Raises:
            RangeError, DTypeError, ShapeError: as for :meth:`step`.

        Example:
            >>> from tkv.pages import CacheManager, PagePool
            >>> manager = CacheManager(PagePool(8), page_size=4, tail_pool=PagePool(8), tail_len=4)
            >>> seq = manager.add(range(10))
            >>> manager.missing(seq, 10), manager.tail_missing(seq, 10)
            (0, 3)
            >>> batch = manager.step({seq: range(10)})
            >>> manager.missing(seq, 1), manager.tail_missing(seq, 1)
            (1, 0)
        """
        return self._missing(seqs, counts)[1]

    def _missing(self, seqs: int | Ints, counts: int | Ints) -> tuple[int, int]:
        names = as_ids("seqs", [seqs] if is_one(seqs) else seqs, low=None)
        new = np.array([check_int("counts", counts, 0)]) if is_one(seqs) else as_ids("counts", counts)
        if new.size != names.size:
            raise ShapeError(f"counts: expected {names.size}, one for each sequence, got {new.size}")
        return self._ledger.missing(names, new)

    def stats(self) -> CacheStats:
        """Statistics: hits, tokens saved, pages by their use, evictions, waste.

        Example:
            >>> from tkv.pages import CacheManager, PagePool
            >>> manager = CacheManager(PagePool(8), page_size=4)
            >>> batch = manager.step({manager.add([1, 2, 3]): [1, 2, 3]})
            >>> stats = manager.stats()
            >>> stats.tokens_asked, stats.pages_used, stats.waste
            (3, 1, 1)
        """
        ledger = self._ledger
        holders = ledger.index.holders(np.arange(self.pool.num_pages))
        return CacheStats(
            prompts=self._prompts,
            hits=self._hits,
            tokens_asked=self._asked,
            tokens_saved=self._saved,
            evictions=ledger.index.num_evicted,
            copies=ledger.num_copies,
            pages_used=int(np.count_nonzero(holders > 0)),
            pages_shared=int(np.count_nonzero(holders > 1)),
            pages_cached=ledger.index.num_idle,
            pages_free=self.pool.num_free,
            waste=ledger.waste(),
            conversions=ledger.num_conversions,
        )
