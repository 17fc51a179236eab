"""Who is computed next beside those that decode: one that runs and is behind, or one that waited and has room now."""

from __future__ import annotations

from radixrt.worker.cache import PageCache
from radixrt.worker.request import Request
from radixrt.worker.running import Running
from radixrt.worker.waiting import VirtualTokenCounter, Waiting

SHARE = 0.25
"""Of the pool: while those that run have no more, others are admitted at the expense of what is kept."""


class Admission:
    """Of one scheduler."""

    def __init__(self, cache: PageCache, running: Running, waiting: Waiting, counter: VirtualTokenCounter) -> None:
        self._cache = cache
        self._running = running
        self._waiting = waiting
        self._counter = counter
        self._in_vain: set[tuple[int, str | None]] = set()
        """Requests for which all that is kept, but of a tenant, is not enough, until somebody leaves."""
        self._departures = 0

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
        for request in self._waiting.first():
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
        else:
            return None
        self._cache.kept.admitted(request)
        self._waiting.take(request)
        request.admissions += 1
        if request.admissions == 1:
            request.cached_tokens = min(request.computed, request.came)
        self._running.behind.append(request)
        return request

    def _has_room(self, request: Request, pages: int) -> bool:
        """Whether so many pages can be taken for a request. What is kept of other tenants goes for it, and of its own
        if little runs, or if it has waited for long."""
        cache, kept = self._cache, self._cache.kept
        if cache.can_take(pages):
            return True
        running = cache.leased_pages - kept.tokens() // cache.page_size
        any_goes = running < SHARE * cache.total_pages or self._waiting.has_waited(request)
        spared = None if any_goes else request.tenant
        if not self._would_have_room(pages, spared):
            return False
        if self._departures != self._running.departures:
            self._departures = self._running.departures
            self._in_vain.clear()
        if (request.id, spared) in self._in_vain:
            return False
        if kept.release_until(lambda: cache.can_take(pages), cache.tree, spared):
            return True
        self._in_vain.add((request.id, spared))
        return False

    def _would_have_room(self, pages: int, spared: str | None = None) -> bool:
        """Whether so many could be taken, about, if only what is kept of the tenant `spared` were."""
        return self._cache.can_take(pages - self._cache.kept.tokens(spared) // self._cache.page_size)
