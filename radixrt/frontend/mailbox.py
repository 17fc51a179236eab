"""Bytes on their way from callbacks on the event loop to the one coroutine that sends them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from radixrt.frontend.errors import ApiError

MAX_BACKLOG = 4 << 20
"""Bytes, in two chunks or more, that wait for a client that does not read, before its request is cancelled."""


class Disconnected(Exception):
    """The client has left."""


class Mailbox:
    """Where callbacks leave bytes for the one coroutine that sends them."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.finished = False
        self.refusal: ApiError | None = None
        """What is there says so; the status and the headers of its stream do too."""
        self.held = False
        """What is there must not be sent yet."""
        self.settled: Callable[[], Awaitable[None]] | None = None
        """Waits until all front ends know of the answer: its end is not sent before."""
        self._out: list[bytes] = []
        self._backlog = 0
        self._sending = False
        """The part before is not sent yet; until then nobody can take what is there."""
        self._waiter: asyncio.Future[None] | None = None

    def put(self, chunk: bytes) -> None:
        """Leave something to be sent; too much of it while the client does not read, and it counts as gone."""
        self._backlog += len(chunk)
        if self._sending and self._out and self._backlog > MAX_BACKLOG:
            self.fail(Disconnected())
            return
        self._out.append(chunk)
        self.wake()

    def wake(self) -> None:
        """Something has changed."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, problem: Exception) -> None:
        """No more will come. The work is cancelled at once: who waits here may be stuck in a send."""
        if self.failure is None and not self.finished:
            self.failure = problem
            self.cancel()
            self.wake()

    def cancel(self) -> None:
        """Stop what is not finished at the router."""

    async def changed(self) -> None:
        """Return after the next `wake`; raise `failure` if there is one, at once or then."""
        if self.failure:
            raise self._taken_failure()
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
        self._waiter = None

    def _taken_failure(self) -> Exception:
        """Once raised it refers to who waits here, and so to all of this: it must not be kept here as well."""
        failure, self.failure, self.finished = self.failure, None, True
        return failure  # type: ignore[return-value]

    async def complete(self) -> None:
        """Return when all is there. ApiError, Disconnected."""
        while not self.finished:
            await self.changed()
        if self.settled is not None:
            await self.settled()

    async def part(self) -> bytes | None:
        """All that there is to send, at least something; None after the last. ApiError, Disconnected."""
        self._sending = False
        while self.failure or self.held or not self._out:
            if self.finished and not self.failure:
                return None
            await self.changed()
        if self.finished and self.settled is not None:
            await self.settled()
        self._sending = True
        out, self._out, self._backlog = self._out, [], 0
        return out[0] if len(out) == 1 else b"".join(out)
