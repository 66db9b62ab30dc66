"""What a step gives back before it takes: pages that left the windows of its sequences."""

from __future__ import annotations

import numpy as np

from tkv.pages.prefix import PrefixIndex


class Leaving:
    """Pages that rows of a step let go of, each as often as rows do, before the step takes others.

    Attributes:
        ends: those of them that nobody else has.
    """

    def __init__(self, index: PrefixIndex, pages: np.ndarray) -> None:
        self.index, self.pages = index, pages
        self.ends = pages
        if pages.size:
            self._pages, self._times = np.unique(pages, return_counts=True)
            self.ends = self._pages[index.holders(self._pages) == self._times]

    def times(self, pages: np.ndarray) -> np.ndarray | int:
        """How often each of other pages is among them."""
        if not self.pages.size:
            return 0
        at = np.minimum(np.searchsorted(self._pages, pages), self._pages.size - 1)
        return np.where(self._pages[at] == pages, self._times[at], 0)

    def take(self, count: int) -> np.ndarray:
        """So many pages to write: those that become free first, and cached ones of these last."""
        index = self.index
        claimed = index.claims[self.ends] > 0
        reused = self.ends[~claimed][:count].tolist()
        for page in self.ends[claimed].tolist():
            if count - len(reused) <= index.num_available:
                break
            if index.claims[page]:
                index.forget(page)
            reused.append(page)
        fresh = index.take(count - len(reused))
        index.pool.share(reused)
        return np.concatenate([np.array(reused, np.int32), fresh])

    def release(self) -> None:
        """Let go of them."""
        self.index.let_go(self.pages[::-1])
