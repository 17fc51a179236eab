"""Requests that wait for room, each tenant's in an order of its own.

Between tenants the one that was served least comes first (the virtual token counter of arXiv 2401.00588): whatever one
of them sends, another's request waits for what is being computed, not for what is queued. A tenant that had nothing
waiting is counted from where the least served of those that wait is, or, if none waits, from where the one is whose
prompt was computed last: nobody saves up, and nobody pays for having been here first.

Within a tenant the one comes first that the fewest tokens are missing of: the next turn of an agent whose context is
cached waits while others take that from the cache, and then it costs them all. Where agents' contexts are more than the
cache holds, the order of arrival gives every one back its turn just after its context was evicted (bench/placement.py,
"by arrival"). Fewest is meant roughly, by powers of two, and of likes the older comes first. And who is the oldest may
be overtaken by so many times the tokens that it needs itself, and no more: nobody starves, however many hits there are,
and however long the queue is. Several times what nearly fills the pool takes minutes, though: after some seconds it is
enough to have been overtaken by as much as it needs.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from heapq import nsmallest

from radixrt.worker.cache import PageCache
from radixrt.worker.request import Request

REFRESHED = 16
"""Waiting requests whose hit is looked up anew in a step, and most of those that seem to be next: a long queue costs no
more."""
OVERTAKING = 3
"""Tokens of requests that overtake the oldest, with their answers, at most, for each that the oldest needs."""
OVERTAKING_WITHOUT_ROOM = 15
"""The same while there is only room without what is kept for those who come back: then that goes."""
MOST_SECONDS = 30.0
"""Once is enough, for both, when a request has been the oldest for so long: where a second computes 40,000 tokens, that
is for prompts of 100,000 and more."""
ANSWER = 64
"""Tokens of a prompt that take a device as long as an answer, about."""
MOST_GROUPS = 1024
"""Groups that are remembered; the router ends each within seconds."""
OTHERS = 16
"""Tenants whose requests are tried when that of the one whose turn it is has no room."""

_Age = tuple[int, tuple[int, int]]


class Arrivals:
    """When requests came: those of a group with the first of it."""

    def __init__(self) -> None:
        self._groups: dict[int, tuple[int, int]] = {}
        """When the first of each came, and its id; the latest groups."""

    def come(self, request: Request, clock: int) -> None:
        """A request comes now, at `clock`."""
        first, group = (clock, request.id), request.group
        if group:
            while len(self._groups) >= MOST_GROUPS and group not in self._groups:
                del self._groups[next(iter(self._groups))]
            first = self._groups.setdefault(group, first)
        request.arrival, request.place = first[0], (first[1], request.id)


class _Queue:
    """One tenant's requests, in two orders."""

    def __init__(self) -> None:
        self.by_age: list[tuple[_Age, Request]] = []
        self._by_need: list[tuple[int, _Age, Request]] = []
        self._needs: dict[int, int] = {}
        """By request, what it has its place by: it may gain tokens while it waits."""
        self._served = 0
        """Tokens of requests that were served before the oldest."""
        self._since: dict[int, tuple[int, float]] = {}
        """By request, for who is the oldest, or was until one that is older was sent back to wait: what had been
        `_served` when it began to be, and the time in seconds."""

    def __len__(self) -> int:
        return len(self.by_age)

    @property
    def age(self) -> _Age:
        """Of the oldest."""
        return self.by_age[0][0]

    @property
    def next(self) -> Request:
        return self.by_age[0][1] if self.is_due(OVERTAKING) else self._by_need[0][2]

    @property
    def least_missing(self) -> Request:
        return self._by_need[0][2]

    def is_due(self, times: int) -> bool:
        """Whether the oldest has been overtaken by so many times the tokens that it needs, or once and for long."""
        oldest = self.by_age[0][1]
        served, since = self._since[oldest.id]
        overtaken, cost = self._served - served, _cost(oldest)
        return overtaken >= times * cost or (overtaken >= cost and time.monotonic() - since >= MOST_SECONDS)

    def add(self, request: Request) -> None:
        insort(self.by_age, (_age(request), request))
        self._note_oldest()
        self._enter(request)

    def remove(self, request: Request) -> None:
        del self.by_age[bisect_left(self.by_age, (_age(request),))]
        self._since.pop(request.id, None)
        self._note_oldest()
        self._leave(request)

    def move(self, request: Request) -> None:
        """The cache holds more of it, or less, than before."""
        self._leave(request)
        self._enter(request)

    def serve(self, request: Request) -> None:
        """A request leaves because it will be computed."""
        if request is not self.by_age[0][1]:
            self._served += _cost(request)
        self.remove(request)

    def overtaken(self, request: Request) -> None:
        """One of another tenant is served in place of one of these."""
        self._served += _cost(request)

    def _note_oldest(self) -> None:
        if self.by_age:
            self._since.setdefault(self.by_age[0][1].id, (self._served, time.monotonic()))

    def _enter(self, request: Request) -> None:
        self._needs[request.id] = need = _missing(request).bit_length()
        insort(self._by_need, (need, _age(request), request))

    def _leave(self, request: Request) -> None:
        del self._by_need[bisect_left(self._by_need, (self._needs.pop(request.id), _age(request)))]


def _age(request: Request) -> _Age:
    return request.arrival, request.place


def _missing(request: Request) -> int:
    return request.total - request.hit


def _cost(request: Request) -> int:
    return _missing(request) + ANSWER


class VirtualTokenCounter:
    """Tokens computed for each tenant that has requests here."""

    def __init__(self) -> None:
        self.last = 0
        """Of the tenant whose prompt was computed last."""
        self._tokens: dict[str, int] = {}
        self._requests: dict[str, int] = {}

    @property
    def several(self) -> bool:
        """Whether more than one tenant has requests."""
        return len(self._requests) > 1

    def come(self, tenant: str) -> None:
        """A request of a tenant is here from now on."""
        self._requests[tenant] = self._requests.get(tenant, 0) + 1
        self._tokens.setdefault(tenant, 0)

    def go(self, tenant: str) -> None:
        """It is over."""
        self._requests[tenant] -= 1
        if not self._requests[tenant]:
            del self._requests[tenant], self._tokens[tenant]

    def prompt(self, tenant: str, tokens: int) -> None:
        """So many of a prompt are computed."""
        self._tokens[tenant] += tokens
        self.last = self._tokens[tenant]

    def decode(self, tenant: str, tokens: int = 1) -> None:
        """So many are decoded."""
        self._tokens[tenant] += tokens

    def of(self, tenant: str) -> int:
        return self._tokens[tenant]

    def lift(self, tenant: str, least: int) -> None:
        """Count a tenant as served so much at least."""
        self._tokens[tenant] = max(self._tokens[tenant], least)


class Waiting:
    """See the module. All requests that are added have come to `counter`."""

    def __init__(self, cache: PageCache, counter: VirtualTokenCounter) -> None:
        self.tokens = 0
        """Of all that wait: known, and not in the tree when last looked."""
        self._cache = cache
        self._counter = counter
        self._queues: dict[str, _Queue] = {}
        """By tenant; none is empty."""
        self._refreshed, self._step = 0, -1

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[Request]:
        return (request for queue in self._queues.values() for _, request in queue.by_age)

    def add(self, request: Request) -> None:
        tenant = request.tenant
        if tenant not in self._queues:
            self._counter.lift(tenant, min(map(self._counter.of, self._queues), default=self._counter.last))
            self._queues[tenant] = _Queue()
        request.hit, request.seen = self._cache.hit(request), self._cache.tree.version
        self.tokens += _missing(request)
        self._queues[tenant].add(request)

    def take(self, request: Request, passed: Sequence[Request] = ()) -> None:
        """Remove one that will be computed, though others have `passed` it on for want of room."""
        self._queues[request.tenant].serve(request)
        for tenant in {other.tenant for other in passed} - {request.tenant}:
            self._queues[tenant].overtaken(request)
        self._removed(request)

    def remove(self, request: Request) -> None:
        """Wherever it is in the order."""
        self._queues[request.tenant].remove(request)
        self._removed(request)

    def _removed(self, request: Request) -> None:
        self.tokens -= _missing(request)
        if not self._queues[request.tenant]:
            del self._queues[request.tenant]

    @property
    def tenant(self) -> str | None:
        """Whose request is next."""
        if len(self._queues) < 2:
            return next(iter(self._queues), None)
        return min(self._queues, key=self._turn)

    def candidates(self) -> Iterator[Request]:
        """The one that is next; then, if that is because of its age, the one that would be, if it is another; then
        those of other tenants that the fewest tokens are missing of, of tenants that were served less first."""
        tenant = self.tenant
        assert tenant is not None
        queue = self._queues[tenant]
        for _ in range(REFRESHED):
            request = queue.next
            if not self._look_up(queue, request):
                break  # else others may be before it now
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

    def _turn(self, tenant: str) -> tuple[int, _Age]:
        """Whose it is: the smallest."""
        return self._counter.of(tenant), self._queues[tenant].age

    def has_waited(self, request: Request) -> bool:
        """Whether a request is its tenant's oldest, and has been overtaken for want of room as much as may be."""
        queue = self._queues[request.tenant]
        return queue.by_age[0][1] is request and queue.is_due(OVERTAKING_WITHOUT_ROOM)

    def refresh(self, step: int) -> None:
        """Look up some requests' hits anew, once a step: the tree has changed since they were queued."""
        if step == self._step:
            return
        self._step, total = step, len(self)
        for _ in range(min(REFRESHED, total)):
            self._refreshed = index = (self._refreshed + 1) % total
            for queue in self._queues.values():
                if index < len(queue):
                    break
                index -= len(queue)
            self._look_up(queue, queue.by_age[index][1])

    def _look_up(self, queue: _Queue, request: Request) -> bool:
        """Renew the hit of a request; whether it changed, and with it the request's place in the order."""
        version = self._cache.tree.version
        if request.seen == version:
            return False
        hit, request.seen = self._cache.hit(request), version
        if hit == request.hit:
            return False
        self.tokens -= hit - request.hit
        request.hit = hit
        queue.move(request)
        return True
