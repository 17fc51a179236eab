"""What has happened lately, by tenant: requests that have ended, sums of tokens in short times, failures.

Memory is bounded: a few numbers for each request that is kept, and the prompts of the latest of them.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from radixrt.report.causes import Misses, sentence
from radixrt.report.conversations import Conversation, Conversations, Link
from radixrt.report.evictions import Evictions

KEPT_REQUESTS = 50
"""Requests of a tenant that are kept after their end."""
KEPT_UNSORTED = 512
"""Requests of all tenants that are kept for somebody who looks."""
KEPT_ID_BYTES = 4 << 20
"""The most bytes of the ids of their prompts; those of the oldest are forgotten beyond that."""
POINT_SECONDS = 5.0
KEPT_POINTS = 360
"""Points of a tenant's history: half an hour."""
KEPT_FAILURES = 20
MAX_NAME_CHARS = 120
"""Characters of a program's name that are kept."""


class Ended(msgspec.Struct, kw_only=True, gc=False):
    """A request that has ended, or one choice of it. Lengths are in tokens."""

    id: str
    index: int
    """Of the choice."""
    namespace: str
    tenant: str
    program: str
    model: str
    worker: str
    end: str
    """The reason of its finish, or "cancelled" or "error"."""
    prompt: int
    hit: int
    bound: int
    """What an infinite cache would have hit."""
    generated: int
    arrived: float
    """By the report's clock, as `at`."""
    first: float | None
    """Seconds from its arrival to its first token."""
    misses: Misses | None
    """None: it ended before its prompt was computed."""
    ids: bytes
    """Of its prompt; empty once they are forgotten."""
    answer: bytes
    """The ids that were generated; likewise."""
    at: float = 0.0
    """When it ended; set by `Recent`."""

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "tenant": self.tenant,
            "program": self.program,
            "model": self.model,
            "worker": self.worker,
            "prompt": self.prompt,
            "hit": self.hit,
            "bound": self.bound,
            "generated": self.generated,
            "seconds": self.at - self.arrived,
            "first": self.first,
            "end": self.end,
            "misses": self.misses._asdict() if self.misses else {},
            "why": sentence(self.prompt, self.hit, self.misses) if self.misses else "it ended before it was computed",
        }


class Failure(NamedTuple):
    """`tenant`: whose request has failed; "" if a worker has."""

    at: float
    tenant: str
    worker: str
    text: str


class Recent:
    """See the module. What a request leaves costs a microsecond or two; it is sorted by those who look."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._unsorted: deque[Ended] = deque(maxlen=KEPT_UNSORTED)
        """Oldest first, as all others here."""
        self._ended: dict[str, deque[Ended]] = defaultdict(lambda: deque(maxlen=KEPT_REQUESTS))
        """By tenant."""
        self._with_ids: deque[Ended] = deque()
        """The latest, which have their ids."""
        self._id_bytes = 0
        self._points: dict[str, deque[list[int]]] = defaultdict(lambda: deque(maxlen=KEPT_POINTS))
        """By tenant: [number of the time, prompt tokens, hits, hits of an infinite cache]; none for idle times."""
        self._conversations = Conversations()
        self._failures: deque[Failure] = deque(maxlen=KEPT_FAILURES)
        self.evictions = Evictions()

    # ------------------------------------------------------------ called by the router

    def ended(self, one: Ended) -> None:
        """A request has ended."""
        one.at = self._clock()
        self._unsorted.append(one)
        self._with_ids.append(one)
        self._id_bytes += len(one.ids)
        while self._id_bytes > KEPT_ID_BYTES or len(self._with_ids) > KEPT_UNSORTED:
            old = self._with_ids.popleft()
            self._id_bytes -= len(old.ids)
            old.ids = old.answer = b""
        if one.misses is not None:
            self._count(one)

    def failed(self, tenant: str, worker: str, text: str) -> None:
        """A request of the tenant, or (tenant "") a worker has failed."""
        self._failures.append(Failure(self._clock(), tenant, worker, text))

    def delete(self, tenant: str) -> None:
        """Forget the requests of a tenant; its sums stay."""
        self._sort()
        for one in [one for one in self._with_ids if one.tenant == tenant]:
            self._with_ids.remove(one)
            self._id_bytes -= len(one.ids)
        self._ended.pop(tenant, None)
        self._conversations.delete(tenant)
        self.evictions.delete(tenant)

    def _count(self, one: Ended) -> None:
        points, now = self._points[one.tenant], int(one.at // POINT_SECONDS)
        if not points or points[-1][0] != now:
            points.append([now, 0, 0, 0])
        point = points[-1]
        point[1] += one.prompt
        point[2] += one.hit
        point[3] += one.bound

    def _sort(self) -> None:
        """Sort what has ended since somebody looked."""
        while self._unsorted:
            one = self._unsorted.popleft()
            self._ended[one.tenant].append(one)
            if one.misses is not None and one.ids and not one.index:
                self._conversations.ended(
                    Link.of(one.at, one.namespace, one.tenant, one.program, one.ids, one.hit, one.bound, one.answer)
                )

    # ------------------------------------------------------------ output: of one tenant or (None) of all

    def requests(self, tenant: str | None) -> list[Ended]:
        """The latest KEPT_REQUESTS, newest first."""
        self._sort()
        if tenant is not None:
            return list(reversed(self._ended[tenant])) if tenant in self._ended else []
        merged = sorted(itertools.chain(*self._ended.values()), key=lambda one: one.at, reverse=True)
        return merged[:KEPT_REQUESTS]

    def find(self, tenant: str | None, id: str) -> Ended | None:
        self._sort()
        whose = self._ended.values() if tenant is None else [self._ended[tenant]] if tenant in self._ended else []
        return next((one for kept in whose for one in kept if one.id == id), None)

    def conversations(self, tenant: str | None) -> list[Conversation]:
        """The latest first."""
        self._sort()
        return self._conversations.latest(tenant)

    def failures(self, tenant: str | None) -> Iterator[Failure]:
        """Newest first. A tenant sees those of workers, and of its own requests."""
        return (one for one in reversed(self._failures) if tenant is None or one.tenant in ("", tenant))

    def history(self, tenant: str | None) -> list[list[float]]:
        """[start (by the clock), prompt tokens, hits, hits of an infinite cache] for each POINT_SECONDS since the first
        request, the last KEPT_POINTS at most; the last one has just begun."""
        sums: dict[int, list[int]] = {}
        for name, points in self._points.items():
            for number, *counts in points if tenant in (None, name) else ():
                sums[number] = [a + b for a, b in zip(sums.get(number, (0, 0, 0)), counts, strict=True)]
        last = int(self._clock() // POINT_SECONDS)
        first = max(min(sums, default=last), last - KEPT_POINTS + 1)
        return [[number * POINT_SECONDS, *sums.get(number, (0, 0, 0))] for number in range(first, last + 1)]

    def point(self, tenant: str | None) -> list[float]:
        """The last point of the history."""
        last, sums = int(self._clock() // POINT_SECONDS), [0, 0, 0]
        for name, points in self._points.items():
            if tenant in (None, name) and points and points[-1][0] == last:
                sums = [a + b for a, b in zip(sums, points[-1][1:], strict=True)]
        return [last * POINT_SECONDS, *sums]
