"""Requests that wait for their grammar. Grammars are compiled in threads, while the loop serves other requests."""

from __future__ import annotations

from collections.abc import Iterator

from radixrt.requests.grammar_errors import explained
from radixrt.worker.request import Request
from radixrt.worker.structured.compile import BadGrammar, Grammars
from radixrt.worker.structured.fair import Job
from radixrt.worker.structured.matcher import Matcher

POLL_SECONDS = 0.001
"""How often an idle loop checks whether a grammar is compiled."""
LIMIT_SECONDS = 60.0
"""The longest that a request waits for its grammar before it fails, and the longest that a grammar may take that others
wait for."""


class Compiling:
    """The waiting requests, by id. Times are in seconds of any monotonic clock."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._waiting: dict[int, tuple[Request, Job, float]] = {}
        """(request, the job that compiles its grammar, when it times out), by request id."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[int]:
        return iter(self._waiting)

    @property
    def queued_tokens(self) -> int:
        """Tokens of all waiting requests."""
        return sum(request.total for request, _, _ in self._waiting.values())

    @property
    def adapters(self) -> set[int]:
        """As `Scheduler.adapters`."""
        return {request.adapter for request, _, _ in self._waiting.values()}

    def __contains__(self, id: int) -> bool:
        return id in self._waiting

    def add(self, request: Request, now: float) -> None:
        """Add a request that has a grammar; its id must be new. Raises BadGrammar if too many of its tenant's grammars
        wait."""
        assert request.sampling.grammar is not None
        job = self._grammars.job(request.sampling.grammar, request.tenant)
        self._waiting[request.id] = request, job, now + LIMIT_SECONDS

    def drop(self, id: int) -> bool:
        """Drop a request, and its grammar if nobody else waits for it; False if the request is not waiting here."""
        request, job, _ = self._waiting.pop(id, (None, None, 0.0))
        if request is None:
            return False
        if request.sampling.grammar is not None and all(other is not job for _, other, _ in self._waiting.values()):
            self._grammars.cancel(request.sampling.grammar, request.tenant)
        return True

    def clear(self) -> None:
        for id in list(self._waiting):
            self.drop(id)

    def take(self, now: float) -> list[tuple[Request, ValueError | None]]:
        """Remove the requests whose grammar is ready, which now have their matcher, and those whose grammar failed or
        timed out, with the error."""
        taken = []
        for id, (request, job, deadline) in list(self._waiting.items()):
            if job.future.done() or now > deadline or job.is_overdue(LIMIT_SECONDS, now):
                self.drop(id)
                taken.append((request, _set_matcher(request, job)))
        return taken


def _set_matcher(request: Request, job: Job) -> ValueError | None:
    if not job.future.done() or job.future.cancelled():
        return BadGrammar(f"grammar: it could not be compiled within {LIMIT_SECONDS:.0f} s")
    try:
        request.matcher = Matcher(job.future.result(), request)
    except ValueError as error:
        return error
    except Exception as error:  # xgrammar does not document its exceptions
        return BadGrammar(f"grammar: {explained(error)}")
    return None
