"""PagePool: which physical pages are in use, and by how many."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tkv.errors import DTypeError, OutOfPages, RangeError
from tkv.ops.checks import check_int

PageIds = int | Sequence[int] | np.ndarray


class PagePool:
    """The physical pages of a cache, with a reference count each.

    A page is free, or has as many references as it has owners. Every call costs O(1) for each page that it names, whatever the
    size of the pool; a call that raises has changed nothing. A pool is not safe for several threads at once.

    Args:
        num_pages: how many pages there are, as in the caches that the pool speaks for. They are numbered from 0.

    Raises:
        DTypeError, RangeError: ``num_pages`` is not an int from 0 to 2^30.

    Example:
        >>> pool = PagePool(4)
        >>> pages = pool.allocate(2)
        >>> pool.share(pages[0])                                   # a second owner
        >>> pool.release(pages).tolist(), pool.num_free            # page 0 lives on
        ([1], 3)
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = check_int("num_pages", num_pages, 0)
        if num_pages > self.num_pages:
            raise RangeError(f"num_pages: expected at most {self.num_pages}, got {num_pages}")
        self._refs = np.zeros(self.num_pages, np.int32)
        # A stack whose top is its end, so that the page that was freed last, the one most likely still in a cache of the GPU, goes first.
        self._free = np.arange(self.num_pages, dtype=np.int32)[::-1].copy()
        self._num_free = self.num_pages
        self._peak_used = 0

    @property
    def refs(self) -> np.ndarray:
        """``[num_pages]`` int32, the references of each page, 0 if it is free: a read-only view that follows later calls."""
        view = self._refs.view()
        view.flags.writeable = False
        return view

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Pages with an owner."""
        return self.num_pages - self._num_free

    @property
    def num_shared(self) -> int:
        """Pages with more than one owner."""
        return int(np.count_nonzero(self._refs > 1))

    @property
    def peak_used(self) -> int:
        """The largest `num_used` so far."""
        return self._peak_used

    def allocate(self, count: int = 1) -> np.ndarray:
        """Take free pages; each gets one reference.

        Args:
            count: how many, at least 0.

        Returns:
            ``[count]`` int32, their numbers.

        Raises:
            OutOfPages: fewer are free.
            DTypeError, RangeError: ``count`` is not an int from 0 on.

        Example:
            >>> PagePool(4).allocate(3).tolist()
            [0, 1, 2]
        """
        check_int("count", count, 0)
        if count > self._num_free:
            raise OutOfPages(
                f"needs {count:,} pages, {self._num_free:,} of {self.num_pages:,} are free",
                needed=count,
                available=self._num_free,
                total=self.num_pages,
            )
        left = self._num_free - count
        pages = self._free[left : self._num_free][::-1].copy()
        self._refs[pages] = 1
        self._num_free = left
        self._peak_used = max(self._peak_used, self.num_used)
        return pages

    def share(self, pages: PageIds) -> None:
        """Add a reference to each page.

        Args:
            pages: numbers of used pages, one or several; a page that comes twice gets two references.

        Raises:
            RangeError: a page does not exist or is free.
            DTypeError: ``pages`` are not integers.

        Example:
            >>> pool = PagePool(4)
            >>> pool.share(pool.allocate(2))
            >>> pool.refs.tolist()
            [2, 2, 0, 0]
        """
        ids, counts = self._used(pages)
        self._refs[ids] += counts

    def release(self, pages: PageIds) -> np.ndarray:
        """Take a reference from each page; pages without any are free again.

        Args:
            pages: numbers of used pages, one or several; a page that comes twice loses two references.

        Returns:
            int32, the pages that have become free.

        Raises:
            RangeError: a page does not exist, or has fewer references than are taken: it was freed before.
            DTypeError: ``pages`` are not integers.

        Example:
            >>> pool = PagePool(4)
            >>> pool.release(pool.allocate(2)).tolist()
            [0, 1]
        """
        ids, counts = self._used(pages)
        left = self._refs[ids] - counts
        if left.size and left.min() < 0:
            at = int(left.argmin())
            raise RangeError(f"pages: page {ids[at]} has {self._refs[ids[at]]} references, {counts[at]} were to be released")
        self._refs[ids] = left
        freed = ids[left == 0].astype(np.int32)
        self._free[self._num_free : self._num_free + freed.size] = freed[::-1]
        self._num_free += freed.size
        return freed

    def _used(self, pages: PageIds) -> tuple[np.ndarray, np.ndarray]:
        """The distinct pages, all of them used, and how often each was named."""
        ids = np.atleast_1d(np.asarray(pages))
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise DTypeError(f"pages: expected an int or a list of them, got {pages!r}")
        ids = ids.astype(np.int64)
        if ids.size and not (0 <= ids.min() and ids.max() < self.num_pages):
            wrong = ids[(ids < 0) | (ids >= self.num_pages)][0]
            raise RangeError(f"pages: expected numbers from 0 to {self.num_pages - 1}, got {wrong}")
        if ids.size and not self._refs[ids].all():
            raise RangeError(f"pages: page {ids[self._refs[ids] == 0][0]} is free; only used pages can be shared or released")
        if ids.size == 1:
            return ids, np.ones(1, np.int32)
        ids, counts = np.unique(ids, return_counts=True)
        return ids, counts.astype(np.int32)

    def __repr__(self) -> str:
        return f"PagePool({self.num_pages:,} pages, {self.num_free:,} free, {self.num_shared:,} shared)"
