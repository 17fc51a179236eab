"""Requests that wait for their grammar: it is compiled beside the loop, which goes on with the others."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

from radixrt.worker.grammar import Compiled, Grammars
from radixrt.worker.matching import Matcher
from radixrt.worker.request import Request

LOOK_SECONDS = 0.001
"""Between looks at what is compiled, when there is nothing else to do."""
LIMIT_SECONDS = 60.0
"""That a request waits for its grammar."""


class Compiling:
    """By the ids of requests. Times are in seconds, of any clock that does not go back."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._waiting: dict[int, tuple[Request, Future[Compiled], float]] = {}
        """Until when, too."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[int]:
        return iter(self._waiting)

    @property
    def queued_tokens(self) -> int:
        """Tokens of all that wait."""
        return sum(request.total for request, _, _ in self._waiting.values())

    def __contains__(self, id: int) -> bool:
        return id in self._waiting

    def add(self, request: Request, now: float) -> None:
        """A request with a grammar comes; its id is not among those that wait."""
        compiled = self._grammars.get(request.sampling.grammar)
        self._waiting[request.id] = request, compiled, now + LIMIT_SECONDS

    def drop(self, id: int) -> bool:
        """Nobody wants a request any more; False if it does not wait here."""
        return self._waiting.pop(id, None) is not None

    def clear(self) -> None:
        self._waiting.clear()

    def take(self, now: float) -> list[tuple[Request, ValueError | None]]:
        """Requests that wait no longer: they have their matcher, or the error says why they get none."""
        taken = []
        for id, (request, compiled, until) in list(self._waiting.items()):
            if compiled.done() or now > until:
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
