"""Decides whose tokens are computed next: a running request's that is prefilling, or a waiting request's that fits."""

from __future__ import annotations

import time
from collections.abc import Sequence

from radixrt.worker.cache.page_cache import PageCache
from radixrt.worker.request import Request
from radixrt.worker.scheduler.queue import VirtualTokenCounter, Waiting
from radixrt.worker.scheduler.running import Running
from radixrt.worker.scheduler.state_checkpoints import Branching, NoBranching

SHORT_TOKENS, SHORT_SHARE = 64, 0.5
"""Forced text of up to so many tokens comes before prompts, as its request generates: keys of JSON for example. All of
a step's takes at most such a share of its budget."""
SHARE = 0.25
"""While running requests hold less than this share of the pool, retained contexts are released to admit more."""
TIMES = 2
"""A tenant's retained contexts are released for another tenant's request if it holds this many times what that tenant
would hold with the request."""


class Admission:
    """Admits the waiting requests of one scheduler."""

    def __init__(
        self,
        cache: PageCache,
        running: Running,
        waiting: Waiting,
        counter: VirtualTokenCounter,
        branching: Branching | NoBranching,
    ) -> None:
        self._cache = cache
        self._running = running
        self._waiting = waiting
        self._counter = counter
        self._branching = branching
        self._in_vain: set[tuple[int, bool, int]] = set()
        """(request id, whether all retained contexts could be released, pages needed) for which releasing them would
        not have made enough room. Cleared when a request leaves or the number of pins changes."""
        self._in_vain_state = (0, 0)
        """(departures, pins) for which `_in_vain` holds."""
        self._short: list[Request] = []
        self._forced: list[Request] = []
        self._prompts: list[Request] = []
        """What is prefilling and not planned in this step yet: a few tokens after generated ones, more, and prompts."""
        self._forced_are_next = True
        self.began: list[tuple[int, float]] = []
        """(id, seconds that it waited) of requests that were admitted for the first time; the worker empties it."""

    def begin(self, prefilling: Sequence[Request], budget: int) -> None:
        """Begin a step of `budget` tokens with the running requests that are prefilling, oldest first."""
        self._short, self._forced, self._prompts = [], [], []
        left = int(SHORT_SHARE * budget)
        for request in prefilling:
            if not request.generated:
                self._prompts.append(request)
            elif request.uncomputed_tokens <= min(SHORT_TOKENS, left):
                self._short.append(request)
                left -= request.uncomputed_tokens
            else:
                self._forced.append(request)

    def next(self, step: int) -> Request | None:
        """The request whose chunk is planned next: one that is prefilling, or a waiting one, which is admitted. None if
        there are no more.

        A few forced tokens come first, as decodes do. Long forced text takes turns with the prompts of its tenant: with
        those that are being computed, or else with those that wait."""
        while self._short:
            if (short := self._short.pop(0)).row >= 0:
                return short
        request = None
        if self._prompts or self._forced:
            self._prompts = [request for request in self._prompts if request.row >= 0]
            self._forced = [request for request in self._forced if request.row >= 0]
            request = self._turn()
        if request is None:
            return self._admit(step) if self._waiting else None
        forced = request in self._forced
        if self._comes_before(request, forced) and (other := self._admit(step)):
            self._forced_are_next = True
            return other
        self._forced_are_next = not forced
        (self._forced if forced else self._prompts).remove(request)
        return request

    def _turn(self) -> Request | None:
        """The request that is prefilling and whose turn it is; None if there is none."""
        first, then = self._prompts, self._forced
        if self._forced_are_next:
            first, then = then, first
        if self._counter.several:
            return min(first + then, key=lambda request: self._counter.of(request.tenant), default=None)
        return next(iter(first or then), None)

    def _comes_before(self, request: Request, forced: bool) -> bool:
        """Whether a waiting request comes before one that is prefilling, as its tenant was served less; or no more, if
        that one is `forced`, and it is the turn of prompts."""
        first = self._waiting.tenant
        if first is None:
            return False
        mine = self._counter.of(request.tenant)
        theirs = self._counter.of(first)
        return theirs < mine or (forced and not self._forced_are_next and theirs <= mine)

    def _admit(self, step: int) -> Request | None:
        """Admit the first waiting request whose tokens all fit beside the running requests."""
        self._waiting.refresh(step)
        if not self._cache.requests.has_row:
            return None
        passed = []
        for request in self._waiting.candidates():
            if request.in_flight_tokens:  # preempted, and the step in flight is still to sample its next token
                return None
            if self._branching.must_wait(request):
                continue
            self._cache.requests.admit(request)
            running = len(self._running)
            pages = self._cache.requests.missing(request) + running
            if not running or self._has_room(request, pages):
                break
            self._cache.requests.withdraw(request)
            if self._waiting.has_waited(request) or not self._would_have_room(pages):
                return None
            passed.append(request)
        else:
            return None
        self._cache.retained.admitted(request)
        self._waiting.take(request, passed)
        self._running.prefilling.append(request)
        self._branching.admitted(request)
        if request.arrived:
            self.began.append((request.id, time.monotonic() - request.arrived))
            request.arrived = 0.0
        return request

    def _has_room(self, request: Request, pages: int) -> bool:
        """Whether `pages` pages can be allocated for a request. Retained contexts are released if that makes enough
        room: those of tenants that hold much more than the request's own tenant, or those of all tenants if little runs
        or the request has waited long enough."""
        cache, retained = self._cache, self._cache.retained
        if cache.prefixes.can_allocate(pages):
            return True
        if not self._would_have_room(pages):
            return False
        running = max(0, cache.leased_pages * cache.page_size - retained.tokens())
        all_goes = running < SHARE * cache.total_pages * cache.page_size or self._waiting.has_waited(request)
        if self._in_vain_state != (state := (self._running.departures, len(cache.pins))):
            self._in_vain_state = state
            self._in_vain.clear()
        if (request.id, all_goes, pages) in self._in_vain:
            return False
        going = retained.leases(frozenset() if all_goes else self._spared(request, pages, running))
        if not cache.prefixes.can_allocate(pages - cache.prefixes.held_only_by(going)):
            self._in_vain.add((request.id, all_goes, pages))
            return False
        retained.release_until(lambda: cache.prefixes.can_allocate(pages), going)
        return True

    def _spared(self, request: Request, pages: int, running: int) -> frozenset[str]:
        """The tenants whose retained contexts are not released for a request; its own is one of them. A tenant holds
        its retained tokens, and a part of the `running` tokens that is proportional to the total length of its running
        requests (shared pages are not attributed to anybody in particular)."""
        retained = self._cache.retained.by_tenant
        totals = self._running.totals()
        each = min(1.0, running / max(1, sum(totals.values())))

        def held(tenant: str) -> float:
            return retained.get(tenant, 0) + each * totals.get(tenant, 0)

        least = TIMES * (held(request.tenant) + pages * self._cache.page_size)
        return frozenset(tenant for tenant in retained if held(tenant) < least)

    def _would_have_room(self, pages: int) -> bool:
        """Whether about that many pages could be allocated if all retained contexts were released."""
        return self._cache.prefixes.can_allocate(pages - self._cache.retained.tokens() // self._cache.page_size)
