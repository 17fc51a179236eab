"""Who is computed next beside those that decode: one that runs and is behind, or one that waited and has room now."""

from __future__ import annotations

from radixrt.worker.cache import PageCache
from radixrt.worker.request import Request
from radixrt.worker.running import Running
from radixrt.worker.waiting import VirtualTokenCounter, Waiting

SHARE = 0.25
"""Of the pool: while those that run have no more, others are admitted at the expense of what is kept."""
TIMES = 2
"""What is kept of a tenant goes for another one's request if the tenant holds so many times what that one would."""


class Admission:
    """Of one scheduler."""

    def __init__(self, cache: PageCache, running: Running, waiting: Waiting, counter: VirtualTokenCounter) -> None:
        self._cache = cache
        self._running = running
        self._waiting = waiting
        self._counter = counter
        self._in_vain: set[tuple[int, bool, int]] = set()
        """Requests for which too little goes of what is kept, whether that was all of it, and the pages that they need;
        until somebody leaves, or pins change."""
        self._seen = (0, 0)

    def next(self, behind: list[Request], step: int) -> Request | None:
        """Whose chunk is planned next: of those that run and are `behind`, of which it is taken, or one that waited;
        None if there is no more."""
        behind[:] = [request for request in behind if request.row >= 0]
        if not behind:
            return self._admit(step) if self._waiting else None
        at = 0
        if self._counter.several:
            # What a grammar forced is few tokens, and is not made to wait.
            at = min(range(len(behind)), key=lambda i: (not behind[i].generated, self._counter.of(behind[i].tenant)))
            if not behind[at].generated and self._comes_before(behind[at].tenant) and (request := self._admit(step)):
                return request
        return behind.pop(at)

    def _comes_before(self, tenant: str) -> bool:
        """Whether a tenant that was served less waits."""
        first = self._waiting.tenant
        return first is not None and self._counter.of(first) < self._counter.of(tenant)

    def _admit(self, step: int) -> Request | None:
        """Take a waiting request on a row, if there is room for all of it beside those that run."""
        self._waiting.refresh(step)
        if not self._cache.has_row:
            return None
        passed = []
        for request in self._waiting.candidates():
            if request.pending:  # preempted while its token was being drawn: that comes with the step that runs
                return None
            self._cache.admit(request)
            missing = -(-request.total // self._cache.page_size) - int(self._cache.held[request.row])
            pages = missing + len(self._running)
            if not self._running or self._has_room(request, pages):
                break
            self._cache.withdraw(request)
            if self._waiting.has_waited(request) or not self._would_have_room(pages):
                return None
            passed.append(request)
        else:
            return None
        self._cache.kept.admitted(request)
        self._waiting.take(request, passed)
        self._running.behind.append(request)
        return request

    def _has_room(self, request: Request, pages: int) -> bool:
        """Whether so many pages can be taken for a request. What is kept goes for it, but not of its own tenant, nor of
        one that holds little; all of it if little runs, or if the request has waited for long."""
        cache, kept = self._cache, self._cache.kept
        if cache.can_take(pages):
            return True
        if not self._would_have_room(pages):
            return False
        running = max(0, cache.leased_pages * cache.page_size - kept.tokens())
        all_goes = running < SHARE * cache.total_pages * cache.page_size or self._waiting.has_waited(request)
        if self._seen != (seen := (self._running.departures, len(cache.pins))):
            self._seen = seen
            self._in_vain.clear()
        if (request.id, all_goes, pages) in self._in_vain:
            return False
        going = kept.leases(frozenset() if all_goes else self._spared(request, pages, running))
        if not cache.can_take(pages - cache.held_only_by(going)):
            self._in_vain.add((request.id, all_goes, pages))
            return False
        kept.release_until(lambda: cache.can_take(pages), going)
        return True

    def _spared(self, request: Request, pages: int, running: int) -> frozenset[str]:
        """The tenants of which nothing goes for a request, its own among them. A tenant holds what is kept of it, and
        of the `running` tokens, whoever shares them, as many as its requests have of all that run."""
        kept = self._cache.kept.by_tenant
        totals = self._running.totals()
        each = min(1.0, running / max(1, sum(totals.values())))

        def held(tenant: str) -> float:
            return kept.get(tenant, 0) + each * totals.get(tenant, 0)

        least = TIMES * (held(request.tenant) + pages * self._cache.page_size)
        return frozenset(tenant for tenant in kept if held(tenant) < least)

    def _would_have_room(self, pages: int) -> bool:
        """Whether so many could be taken, about, if nothing were kept."""
        return self._cache.can_take(pages - self._cache.kept.tokens() // self._cache.page_size)
