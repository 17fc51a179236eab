"""Requests that wait for their grammar. Grammars are compiled in threads, while the loop serves other requests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

from radixrt.worker.grammar import Compiled, Grammars
from radixrt.worker.matching import Matcher
from radixrt.worker.request import Request

POLL_SECONDS = 0.001
"""How often an idle loop checks whether a grammar is compiled."""
LIMIT_SECONDS = 60.0
"""The longest that a request waits for its grammar before it fails."""


class Compiling:
    """The waiting requests, by id. Times are in seconds of any monotonic clock."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._waiting: dict[int, tuple[Request, Future[Compiled], float]] = {}
        """(request, its grammar, when it times out), by request id."""

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
        """Add a request that has a grammar; its id must be new."""
        compiled = self._grammars.get(request.sampling.grammar)
        self._waiting[request.id] = request, compiled, now + LIMIT_SECONDS

    def drop(self, id: int) -> bool:
        """Drop a request; False if it is not waiting here."""
        return self._waiting.pop(id, None) is not None

    def clear(self) -> None:
        self._waiting.clear()

    def take(self, now: float) -> list[tuple[Request, ValueError | None]]:
        """Remove the requests whose grammar is ready, which now have their matcher, and those whose grammar failed or
        timed out, with the error."""
        taken = []
        for id, (request, compiled, deadline) in list(self._waiting.items()):
            if compiled.done() or now > deadline:
                del self._waiting[id]
                taken.append((request, _set_matcher(request, compiled)))
        return taken


def _set_matcher(request: Request, compiled: Future[Compiled]) -> ValueError | None:
    if not compiled.done():
        return ValueError(f"grammar: it could not be compiled within {LIMIT_SECONDS:.0f} s")
    try:
        request.matcher = Matcher(compiled.result(), request)
    except ValueError as error:
        return error
    return None
