"""What each tenant has of a memory that all share, and who is to give when it is full."""

from __future__ import annotations

import heapq

SPARE = 16
"""Entries of the heap that may be out of date, beside one for each tenant."""


class Shares:
    """Sizes by tenant. Who has most gives first, so that nobody's burst costs another what is his: as a switch drops
    from its longest queue (McKenney, Stochastic Fairness Queueing, 1990).

    A heap holds for each tenant an entry that says at least what he has; `largest` mends those on top that say too
    much. Both methods take O(log n) of n tenants, amortised.
    """

    def __init__(self) -> None:
        self.total = 0
        self._sizes: dict[str, int] = {}
        self._said: dict[str, int] = {}
        """What a tenant's entry in the heap says; an entry that says something else is out of date."""
        self._heap: list[tuple[int, str]] = []

    def __getitem__(self, tenant: str) -> int:
        return self._sizes.get(tenant, 0)

    def add(self, tenant: str, size: int) -> None:
        """A tenant has so much more, or less."""
        self.total += size
        now = self._sizes.get(tenant, 0) + size
        if now == 0:
            self._sizes.pop(tenant, None)
            self._said.pop(tenant, None)
            return
        self._sizes[tenant] = now
        if now > self._said.get(tenant, 0):
            self._say(tenant, now)

    def largest(self) -> str:
        """The tenant that has most. IndexError if nobody has anything."""
        while True:
            size, tenant = -self._heap[0][0], self._heap[0][1]
            if self._said.get(tenant) != size:
                heapq.heappop(self._heap)
            elif (now := self._sizes[tenant]) == size:
                return tenant
            else:
                heapq.heappop(self._heap)
                self._say(tenant, now)

    def _say(self, tenant: str, size: int) -> None:
        self._said[tenant] = size
        if len(self._heap) < 2 * len(self._said) + SPARE:
            heapq.heappush(self._heap, (-size, tenant))
        else:
            self._heap = [(-said, one) for one, said in self._said.items()]
            heapq.heapify(self._heap)

    def check(self) -> None:
        """Assert that sizes add up, and that every tenant's entry is in the heap and says enough."""
        assert self.total == sum(self._sizes.values()) and min(self._sizes.values(), default=1) > 0, "sizes add up"
        assert self._said.keys() == self._sizes.keys(), "an entry for each tenant"
        for tenant, said in self._said.items():
            assert (-said, tenant) in self._heap and said >= self._sizes[tenant], "which says at least what he has"
