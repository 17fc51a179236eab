"""The pages of a device: which are free. It knows nothing of trees, requests or what pages hold."""

from __future__ import annotations

import numpy as np


class OutOfPages(Exception):
    """No page is free and none can be evicted, even after pins and retained contexts were released."""


class PagePool:
    """`num_pages` pages. Page 0 is the null page: it is never allocated, and what is written there is never read."""

    def __init__(self, num_pages: int) -> None:
        self.total = num_pages - 1
        self.num_free = self.total
        self._free = np.arange(num_pages - 1, 0, -1, dtype=np.int32)

    def allocate(self, count: int) -> np.ndarray:
        """Take `count` of the free pages, int32[count]; there must be as many. A view, valid until pages are freed."""
        self.num_free -= count
        return self._free[self.num_free : self.num_free + count]

    def free(self, pages: np.ndarray) -> None:
        """Give pages back. The last one is allocated first."""
        self._free[self.num_free : self.num_free + len(pages)] = pages
        self.num_free += len(pages)

    def check(self, *others: np.ndarray) -> None:
        """Assert that every page is free or in exactly one of `others`."""
        pages = np.sort(np.concatenate([self._free[: self.num_free], *others]))
        assert np.array_equal(pages, np.arange(1, self.total + 1)), "every page is in exactly one place"
