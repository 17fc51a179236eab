"""Passes bytes from callbacks on the event loop to the one coroutine that sends them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from radixrt.frontend.http.errors import ApiError
from radixrt.frontend.http.unread import Claim

log = logging.getLogger("radixrt.frontend")

MAX_BACKLOG = 4 << 20
"""The most bytes, in two chunks or more, that wait for a client that does not read; beyond, its request is
cancelled."""
CLAIM_BYTES = 64 << 10
"""What waits counts as the tenant's in steps of so many bytes."""


class Disconnected(Exception):
    """The client has disconnected."""


class Outbox:
    """Callbacks put bytes here, and one coroutine takes and sends them."""

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self.finished = False
        self.refusal: ApiError | None = None
        """The error that the content already describes, whose status and headers the stream then gets."""
        self.held = False
        """Whether the content must not be sent yet."""
        self.settled: Callable[[], Awaitable[None]] | None = None
        """Waits until all front ends know the answer; its end is not sent before."""
        self._out: list[bytes] = []
        self._backlog = 0
        self._allowed = min(CLAIM_BYTES, MAX_BACKLOG)
        """How large the backlog may become before it is claimed."""
        self.claim: Claim | None = None
        """What waits on the connection; None if that is not counted."""
        self._sending = False
        """Whether the last part that was taken is still being sent."""
        self._waiter: asyncio.Future[None] | None = None

    def put(self, chunk: bytes) -> None:
        """Put bytes to be sent. If there are too many while the client does not read, it counts as disconnected."""
        self._backlog += len(chunk)
        if self._sending and self._out and self._backlog > self._allowed and not self._claim_more():
            return
        self._out.append(chunk)
        self.wake()

    def _claim_more(self) -> bool:
        """Count the backlog as bytes that wait. False if it is too large: the request is cancelled."""
        if self._backlog > MAX_BACKLOG:
            log.warning("a client does not read its answer: cancelled, %.1f MB waited", self._backlog / 1e6)
            self.fail(Disconnected())
            return False
        self._allowed = min(self._backlog + CLAIM_BYTES, MAX_BACKLOG)
        if self.claim is not None:
            self.claim.queue(self._backlog)
        return True

    def wake(self) -> None:
        """Wake the coroutine that awaits `changed`."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, problem: Exception) -> None:
        """End with a problem. The work is cancelled at once, since the sending coroutine may be blocked in a send."""
        if self.failure is None and not self.finished:
            self.failure = problem
            self.cancel()
            self.wake()

    def cancel(self) -> None:
        """Cancel what is not finished at the router."""

    def changed(self) -> asyncio.Future[None]:
        """To be awaited: done at the next `wake`. Raises `failure` if there is one."""
        if self.failure:
            raise self._taken_failure()
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    def _taken_failure(self) -> Exception:
        """Take the failure. It must not stay here: once raised, its traceback refers to this object, a reference
        cycle."""
        failure, self.failure, self.finished = self.failure, None, True
        return failure  # type: ignore[return-value]

    async def complete(self) -> None:
        """Wait until everything is there. Raises ApiError, Disconnected."""
        while not self.finished:
            await self.changed()
        if self.settled is not None:
            await self.settled()

    async def part(self) -> bytes | None:
        """Wait for bytes to send, and take them all; None after the last. Raises ApiError, Disconnected."""
        self._sending = False
        while self.failure or self.held or not self._out:
            if self.finished and not self.failure:
                return None
            await self.changed()
        if self.finished and self.settled is not None:
            await self.settled()
        self._sending = True
        out, self._out, self._backlog = self._out, [], 0
        if self.claim is not None and self.claim.queued:
            self._allowed = min(CLAIM_BYTES, MAX_BACKLOG)
            self.claim.queue(0)
        return out[0] if len(out) == 1 else b"".join(out)
