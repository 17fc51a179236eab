"""Requests that wait beside the queue until what the disk has of their paths is in host memory: others pass them. They
wait for a bounded time, and compute what has not come by then."""

from __future__ import annotations

import time

from radixrt.worker.cache.disk_policy import longest_wait
from radixrt.worker.cache.page_cache import PageCache
from radixrt.worker.request import Request
from radixrt.worker.scheduler.queue import Waiting


class Fetching:
    """The requests of one scheduler that wait in this way. They are parked in `waiting`."""

    def __init__(self, cache: PageCache, waiting: Waiting) -> None:
        self._cache = cache
        self._waiting = waiting
        self._seats: dict[int, tuple[Request, int, float]] = {}
        """By `Request.number`: (request, what it waits for, until when)."""

    def __len__(self) -> int:
        return len(self._seats)

    def begin(self, request: Request) -> bool:
        """Let a request that has come wait, if something is brought to memory for it. Whether it is."""
        if not self._fetch(request, None):
            return False
        self._waiting.park(request)
        return True

    def _fetch(self, request: Request, until: float | None) -> bool:
        tier, hit = self._cache.tier, self._cache.requests.hit(request)
        fetch = tier.prefetch(request.namespace, request.tokens, request.reusable, hit)
        if fetch:
            until = until or time.monotonic() + longest_wait(request.reusable - hit, hit, tier.prefill_cost)
            self._seats[request.number] = request, fetch, until
        return fetch > 0

    def settle(self) -> None:
        """Let those queue that need not wait any more."""
        arrived = set(self._cache.tier.fetched())
        if not self._seats:
            return
        now = time.monotonic()
        for number, (request, fetch, until) in list(self._seats.items()):
            if request.finished:  # its client has gone
                del self._seats[number]
            elif fetch in arrived or now > until:
                del self._seats[number]
                if now > until:
                    self._cache.tier.stop_waiting(fetch)
                elif self._fetch(request, until):  # it waited for another's, and lacks more
                    continue
                self._waiting.remove(request)
                self._waiting.add(request)
