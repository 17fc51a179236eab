"""The waiting requests, in one queue per tenant.

Between tenants, the one that was served least comes first (the virtual token counter of arXiv 2401.00588): whatever one
tenant sends, another's request waits only for what is being computed, never for what is queued. A tenant that had
nothing waiting starts at the count of the least-served tenant that waits or, if none waits, of the tenant whose prompt
was computed last. So no tenant saves up credit by being idle, and none is put behind a newcomer for its past use.

Within a tenant, requests of the lowest `priority` value come first: others are not tried while one of them waits. What
runs is not interrupted, and what is said above of tenants does not depend on it.

Among requests of one priority, the one with the fewest missing (uncached) tokens comes first. An agent's next turn is
only cheap while its context is cached: each time another request takes pages before it, some of that context may have
to be computed again, and then everybody waits longer. Where the agents' contexts together exceed the cache, order of
arrival is the worst: each agent gets its turn just after its context was evicted (bench/placement.py, "by arrival").
Missing tokens are compared by powers of two, and among equals the older request comes first.

To rule out starvation among these, the oldest request may be overtaken only by a fixed multiple of the tokens that it
needs itself, however many hits there are and however long the queue is. For a prompt that nearly fills the pool that
would take minutes, so after MAX_SECONDS the multiple is 1.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from heapq import nsmallest

from radixrt.worker.cache.page_cache import PageCache
from radixrt.worker.request import Age, Request

REFRESHED = 16
"""The most waiting requests whose hit is looked up again in each step, and again for each candidate: this bounds the
cost of a long queue."""
OVERTAKING = 3
"""The most tokens, answers included, by which others may overtake the oldest request, as a multiple of its own."""
OVERTAKING_WITHOUT_ROOM = 15
"""The same multiple while the oldest would fit only if retained contexts were released; beyond it, they are."""
MAX_SECONDS = 30.0
"""When a request has been the oldest for this long, both multiples are 1. At 40,000 tokens a second that concerns
prompts of 100,000 tokens and more."""
ANSWER = 64
"""The cost of an answer, roughly, as the number of prompt tokens that take the device as long."""
MAX_GROUPS = 1024
"""Groups whose arrival is remembered; a group is complete within seconds."""
OTHERS = 16
"""Other tenants whose requests are tried when there is no room for the request of the tenant whose turn it is."""


class Arrivals:
    """When requests arrived. All requests of a group count as having arrived with its first."""

    def __init__(self) -> None:
        self._groups: dict[int, tuple[int, int]] = {}
        """For each recent group, when its first request arrived, and that request's id."""

    def record(self, request: Request, clock: int) -> None:
        """Set the age of a request that arrives at `clock`, in tokens scheduled so far."""
        first, group = (clock, request.id), request.group
        if group:
            while len(self._groups) >= MAX_GROUPS and group not in self._groups:
                del self._groups[next(iter(self._groups))]
            first = self._groups.setdefault(group, first)
        request.age = *first, request.id


class _Queue:
    """One tenant's requests, by priority, and in each by age and by need. The oldest is that of the first priority."""

    def __init__(self) -> None:
        self.by_age: list[tuple[int, Age, Request]] = []
        self._by_need: list[tuple[int, int, Age, Request]] = []
        self._needs: dict[int, int] = {}
        """By request id, the need by which it is sorted: a request may gain tokens while it waits."""
        self._overtaking_tokens = 0
        """Total cost of the requests so far that were served before the one that was the oldest then."""
        self._since: dict[int, tuple[int, float]] = {}
        """By request id, for each request that is or has been the oldest: `_overtaking_tokens` when it became the
        oldest, and the time in seconds. The entry stays when an older request returns after a preemption."""

    def __len__(self) -> int:
        return len(self.by_age)

    @property
    def oldest(self) -> Request:
        return self.by_age[0][2]

    @property
    def next(self) -> Request:
        return self.oldest if self.is_due(OVERTAKING) else self.least_missing

    @property
    def least_missing(self) -> Request:
        return self._by_need[0][3]

    def is_due(self, times: int) -> bool:
        """Whether the oldest request has been overtaken by `times` its cost or, after MAX_SECONDS, by its cost."""
        oldest = self.oldest
        tokens_before, since = self._since[oldest.id]
        overtaken, cost = self._overtaking_tokens - tokens_before, _cost(oldest)
        return overtaken >= times * cost or (overtaken >= cost and time.monotonic() - since >= MAX_SECONDS)

    def add(self, request: Request) -> None:
        insort(self.by_age, (request.priority, request.age, request))
        self._note_oldest()
        self._enter(request)

    def remove(self, request: Request) -> None:
        del self.by_age[bisect_left(self.by_age, (request.priority, request.age))]
        self._since.pop(request.id, None)
        self._note_oldest()
        self._leave(request)

    def move(self, request: Request) -> None:
        """Update the place of a request whose hit has changed."""
        self._leave(request)
        self._enter(request)

    def serve(self, request: Request) -> None:
        """Remove a request that was admitted."""
        if request is not self.oldest:
            self._overtaking_tokens += _cost(request)
        self.remove(request)

    def overtaken(self, request: Request) -> None:
        """Count a request of another tenant that was admitted although it was this tenant's turn."""
        self._overtaking_tokens += _cost(request)

    def _note_oldest(self) -> None:
        if self.by_age and (oldest := self.oldest.id) not in self._since:
            self._since[oldest] = self._overtaking_tokens, time.monotonic()

    def _enter(self, request: Request) -> None:
        self._needs[request.id] = need = request.missing.bit_length()
        insort(self._by_need, (request.priority, need, request.age, request))

    def _leave(self, request: Request) -> None:
        place = request.priority, self._needs.pop(request.id), request.age
        del self._by_need[bisect_left(self._by_need, place)]


def _cost(request: Request) -> int:
    return request.missing + ANSWER


class VirtualTokenCounter:
    """Counts the tokens computed for each tenant that has requests here."""

    def __init__(self) -> None:
        self.last = 0
        """The count of the tenant whose prompt was computed last."""
        self._tokens: dict[str, int] = {}
        self._requests: dict[str, int] = {}

    @property
    def several(self) -> bool:
        """Whether more than one tenant has requests."""
        return len(self._requests) > 1

    def has(self, tenant: str) -> bool:
        """Whether a tenant has requests."""
        return tenant in self._requests

    def add_request(self, tenant: str) -> None:
        """A tenant has a new request."""
        self._requests[tenant] = self._requests.get(tenant, 0) + 1
        self._tokens.setdefault(tenant, 0)

    def remove_request(self, tenant: str) -> None:
        """A request of a tenant has ended. The count of a tenant without requests is dropped."""
        self._requests[tenant] -= 1
        if not self._requests[tenant]:
            del self._requests[tenant], self._tokens[tenant]

    def count_prompt(self, tenant: str, tokens: int) -> None:
        """Count computed prompt tokens."""
        self._tokens[tenant] += tokens
        self.last = self._tokens[tenant]

    def count_decoded(self, tenant: str, tokens: int = 1) -> None:
        """Count decoded tokens."""
        self._tokens[tenant] += tokens

    def of(self, tenant: str) -> int:
        return self._tokens[tenant]

    def raise_to(self, tenant: str, least: int) -> None:
        """Raise a tenant's count to `least` if it is lower."""
        self._tokens[tenant] = max(self._tokens[tenant], least)


class Waiting:
    """The waiting requests of all tenants, in the order that the module describes. Before a request is added here,
    `counter.add_request` must have been called for it."""

    def __init__(self, cache: PageCache, counter: VirtualTokenCounter) -> None:
        self.tokens = 0
        """Missing tokens of all waiting requests, as of their last look-up."""
        self._cache = cache
        self._counter = counter
        self._queues: dict[str, _Queue] = {}
        """By tenant; empty queues are removed."""
        self._refreshed, self._step = 0, -1
        self.parked: dict[int, Request] = {}
        """Requests beside the queues, by id, until they can go on: see `structured.sit_out`."""

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __iter__(self) -> Iterator[Request]:
        return (request for queue in self._queues.values() for *_, request in queue.by_age)

    def add(self, request: Request) -> None:
        tenant = request.tenant
        if tenant not in self._queues:
            self._counter.raise_to(tenant, min(map(self._counter.of, self._queues), default=self._counter.last))
            self._queues[tenant] = _Queue()
        request.hit, request.hit_version = self._cache.requests.hit(request), self._cache.prefixes.version
        self.tokens += request.missing
        self._queues[tenant].add(request)

    def take(self, request: Request, passed: Sequence[Request] = ()) -> None:
        """Remove a request that was admitted. Those in `passed` were candidates before it, but did not fit."""
        self._queues[request.tenant].serve(request)
        for tenant in {other.tenant for other in passed} - {request.tenant}:
            self._queues[tenant].overtaken(request)
        self._removed(request)

    def park(self, request: Request) -> None:
        """Add a request beside the queues."""
        self.parked[request.id] = request

    def remove(self, request: Request) -> None:
        """Remove a request that was aborted or failed, or is parked."""
        if self.parked.pop(request.id, None) is not None:
            return
        self._queues[request.tenant].remove(request)
        self._removed(request)

    def _removed(self, request: Request) -> None:
        self.tokens -= request.missing
        if not self._queues[request.tenant].by_age:
            del self._queues[request.tenant]

    @property
    def tenant(self) -> str | None:
        """The tenant whose turn it is; None if nothing waits."""
        if len(self._queues) < 2:
            return next(iter(self._queues), None)
        return min(self._queues, key=self._turn)

    def candidates(self) -> Iterator[Request]:
        """The requests to try, in order: the next one of the tenant whose turn it is; if that one was chosen for its
        age, also the one of that tenant with the fewest missing tokens; then, for up to OTHERS other tenants, least
        served first, the request with the fewest missing tokens."""
        tenant = self.tenant
        assert tenant is not None
        queue = self._queues[tenant]
        for _ in range(REFRESHED):
            request = queue.next
            if not self._look_up(queue, request):
                break  # its place is up to date; if its hit has changed, another request may come before it
        yield request
        if queue.is_due(OVERTAKING) and (other := self._least_missing(queue)) is not request:
            yield other
        others = (one for one in self._queues if one != tenant)
        for tenant in nsmallest(OTHERS, others, self._turn):
            yield self._least_missing(self._queues[tenant])

    def _least_missing(self, queue: _Queue) -> Request:
        for _ in range(REFRESHED):
            request = queue.least_missing
            if not self._look_up(queue, request):
                break
        return request

    def _turn(self, tenant: str) -> tuple[int, Age]:
        """Sort key: it is the turn of the tenant with the smallest."""
        return self._counter.of(tenant), self._queues[tenant].oldest.age

    def has_waited(self, request: Request) -> bool:
        """Whether a request is its tenant's oldest and has been overtaken so often that retained contexts are released
        for it (OVERTAKING_WITHOUT_ROOM)."""
        queue = self._queues[request.tenant]
        return queue.oldest is request and queue.is_due(OVERTAKING_WITHOUT_ROOM)

    def refresh(self, step: int) -> None:
        """Look up the hits of some requests again, in turn; at most once a step. The tree changes while they wait."""
        if step == self._step:
            return
        self._step, total = step, len(self)
        for _ in range(min(REFRESHED, total)):
            self._refreshed = index = (self._refreshed + 1) % total
            for queue in self._queues.values():
                if index < len(queue):
                    break
                index -= len(queue)
            self._look_up(queue, queue.by_age[index][2])

    def note_gain(self, request: Request) -> None:
        """A request has gained tokens while it waits: its hit may be longer now."""
        request.hit_version = -1

    def _look_up(self, queue: _Queue, request: Request) -> bool:
        """Look up a request's hit again, and update its place in the queue. True if the hit changed."""
        version = self._cache.prefixes.version
        if request.hit_version == version:
            return False
        hit, request.hit_version = self._cache.requests.hit(request), version
        if hit == request.hit:
            return False
        self.tokens -= hit - request.hit
        request.hit = hit
        queue.move(request)
        return True
