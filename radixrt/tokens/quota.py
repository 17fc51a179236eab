"""Sizes of the parts of a shared memory by tenant, and which tenant has to give up memory when it is full."""

from __future__ import annotations

import heapq

SPARE = 16
"""Entries of the heap that may be out of date, beside one for each tenant."""


class Shares:
    """Sizes by tenant. The tenant with most gives up first, so that a burst of one tenant does not cost another its
    part: as a switch drops from its longest queue (McKenney, Stochastic Fairness Queueing, 1990).

    A heap has an entry for each tenant that is at least its size; `largest` corrects entries at the top that are too
    large. Both methods take amortised O(log n) for n tenants.
    """

    def __init__(self) -> None:
        self.total = 0
        self._sizes: dict[str, int] = {}
        self._recorded: dict[str, int] = {}
        """The size in each tenant's entry of the heap; entries with other sizes are out of date."""
        self._heap: list[tuple[int, str]] = []

    def __getitem__(self, tenant: str) -> int:
        return self._sizes.get(tenant, 0)

    def add(self, tenant: str, size: int) -> None:
        """Add to a tenant's size; `size` may be negative."""
        self.total += size
        now = self._sizes.get(tenant, 0) + size
        if now == 0:
            self._sizes.pop(tenant, None)
            self._recorded.pop(tenant, None)
            return
        self._sizes[tenant] = now
        if now > self._recorded.get(tenant, 0):
            self._push(tenant, now)

    def largest(self) -> str:
        """The tenant with the largest size. Raises IndexError if there are none."""
        while True:
            size, tenant = -self._heap[0][0], self._heap[0][1]
            if self._recorded.get(tenant) != size:
                heapq.heappop(self._heap)
            elif (now := self._sizes[tenant]) == size:
                return tenant
            else:
                heapq.heappop(self._heap)
                self._push(tenant, now)

    def _push(self, tenant: str, size: int) -> None:
        self._recorded[tenant] = size
        if len(self._heap) < 2 * len(self._recorded) + SPARE:
            heapq.heappush(self._heap, (-size, tenant))
        else:
            self._heap = [(-said, one) for one, said in self._recorded.items()]
            heapq.heapify(self._heap)

    def check(self) -> None:
        """Assert that sizes add up, and that every tenant's entry is in the heap and large enough."""
        assert self.total == sum(self._sizes.values()) and min(self._sizes.values(), default=1) > 0, "sizes add up"
        assert self._recorded.keys() == self._sizes.keys(), "an entry for each tenant"
        for tenant, said in self._recorded.items():
            assert (-said, tenant) in self._heap and said >= self._sizes[tenant], "which says at least what he has"
