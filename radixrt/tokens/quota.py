"""What tenants may have of what they share: memory, where the tenant with most has to give up some when it is full; and
work that is not a request, which has a rate."""

from __future__ import annotations

import heapq

TOKENS_PER_SECOND, BURST_SECONDS = 200_000, 10
"""What a tenant may ask for, in tokens, beside its requests: as much at once as comes in so many seconds."""
MIN_HINT_TOKENS = 256
"""The fewest tokens that a hint to the cache counts for."""
BYTES_PER_TOKEN = 4
"""Of text that is not encoded yet, about."""
MAX_BUCKETS = 4096
"""Tenants whose buckets are remembered."""
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


class Budget:
    """How much work a tenant may ask for: a bucket of tokens for each, which fills at a rate. Times are in seconds of
    any monotonic clock."""

    def __init__(self, rate: float = TOKENS_PER_SECOND, burst: float = BURST_SECONDS) -> None:
        self._rate = rate
        self._most = rate * burst
        self._left: dict[str, tuple[float, float]] = {}
        """(tokens, when) by tenant; those with full buckets are left out."""

    def take(self, tenant: str, tokens: int, now: float) -> float:
        """Take tokens out of a tenant's bucket, which may leave a debt. Returns 0.0; or after how many seconds it may
        ask again, and takes none, if there is a debt."""
        left = self._now(tenant, now)
        if left <= 0:
            return max((1.0 - left) / self._rate, 1e-3)
        self.charge(tenant, tokens, now)
        return 0.0

    def charge(self, tenant: str, tokens: int, now: float) -> None:
        """Take tokens out of a tenant's bucket, whatever is in it; negative: give some back."""
        self._left[tenant] = min(self._most, self._now(tenant, now) - tokens), now
        if len(self._left) > MAX_BUCKETS:
            full = [one for one in self._left if self._now(one, now) >= self._most]
            for one in full or [next(iter(self._left))]:
                del self._left[one]

    def _now(self, tenant: str, now: float) -> float:
        left, since = self._left.get(tenant, (self._most, now))
        return min(self._most, left + self._rate * (now - since))
