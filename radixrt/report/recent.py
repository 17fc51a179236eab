"""What has happened lately, by tenant: requests that have ended, sums of tokens in short times, failures.

Memory is bounded: a few numbers for each request that is kept, and the prompts of the latest of them.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from radixrt.report.causes import Misses, sentence
from radixrt.report.conversations import Conversations
from radixrt.report.evictions import Evictions

KEPT_REQUESTS = 50
"""Requests of a tenant that are kept after their end."""
KEPT_PROMPT_BYTES = 4 << 20
"""The most bytes of the prompts of these requests, of all tenants together; the oldest are dropped beyond that."""
POINT_SECONDS = 5.0
KEPT_POINTS = 360
"""Points of a tenant's history: half an hour."""
KEPT_FAILURES = 20
MAX_NAME_CHARS = 120
"""Characters of a program's name that are kept."""


@dataclass(slots=True)
class Ended:
    """A request that has ended, or one choice of it. Lengths are in tokens."""

    id: str
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
    at: float = 0.0
    """When it ended; set by `Recent`."""

    @property
    def is_further_choice(self) -> bool:
        """Whether it is a choice after the first one of its request."""
        return "." in self.id

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
    """See the module."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended: dict[str, deque[Ended]] = defaultdict(lambda: deque(maxlen=KEPT_REQUESTS))
        """By tenant, oldest first."""
        self._prompts: OrderedDict[str, bytes] = OrderedDict()
        """By id of the request, oldest first."""
        self._prompt_bytes = 0
        self._points: dict[str, deque[list[int]]] = defaultdict(lambda: deque(maxlen=KEPT_POINTS))
        """By tenant: [number of the time, prompt tokens, hits, hits of an infinite cache]; none for idle times."""
        self.conversations = Conversations()
        self.evictions = Evictions()
        self._failures: deque[Failure] = deque(maxlen=KEPT_FAILURES)

    # ------------------------------------------------------------ called by the report and the router

    def ended(self, one: Ended, prompt: bytes) -> None:
        """A request of this prompt has ended."""
        one.at = self._clock()
        kept = self._ended[one.tenant]
        if len(kept) == KEPT_REQUESTS:
            self._prompt_bytes -= len(self._prompts.pop(kept[0].id, b""))
        kept.append(one)
        self._prompts[one.id] = prompt
        self._prompt_bytes += len(prompt)
        while self._prompt_bytes > KEPT_PROMPT_BYTES:
            self._prompt_bytes -= len(self._prompts.popitem(last=False)[1])
        if one.misses:
            self._count(one)
            if not one.is_further_choice:
                turn = one.prompt, one.hit, one.bound
                self.conversations.ended(one.id, one.namespace, one.tenant, one.program, prompt, turn, one.at)

    def failed(self, tenant: str, worker: str, text: str) -> None:
        """A request of the tenant, or (tenant "") a worker has failed."""
        self._failures.append(Failure(self._clock(), tenant, worker, text))

    def _count(self, one: Ended) -> None:
        points, now = self._points[one.tenant], int(one.at // POINT_SECONDS)
        if not points or points[-1][0] != now:
            points.append([now, 0, 0, 0])
        point = points[-1]
        point[1] += one.prompt
        point[2] += one.hit
        point[3] += one.bound

    # ------------------------------------------------------------ output: of one tenant or (None) of all

    def requests(self, tenant: str | None) -> list[Ended]:
        """The latest KEPT_REQUESTS, newest first."""
        if tenant is not None:
            return list(reversed(self._ended[tenant])) if tenant in self._ended else []
        merged = sorted(itertools.chain(*self._ended.values()), key=lambda one: one.at, reverse=True)
        return merged[:KEPT_REQUESTS]

    def find(self, tenant: str | None, id: str) -> Ended | None:
        whose = self._ended.values() if tenant is None else [self._ended[tenant]] if tenant in self._ended else []
        return next((one for kept in whose for one in kept if one.id == id), None)

    def prompt(self, one: Ended) -> bytes | None:
        """The prompt's ids, if they are still kept."""
        return self._prompts.get(one.id)

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
