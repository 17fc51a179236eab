"""The session of one program run: its states at the server, and the messages about them."""

from __future__ import annotations

import asyncio
import itertools
import secrets

from radixrt.client import AsyncClient
from radixrt.messages import Forget, Fork, Pause, StatePrompt

SCOPE_BYTES = 16
PAUSE_AFTER = 0.02
"""Seconds after which the server is told that a branch waits for a tool: for faster tools the message would cost more
than it saves."""


class Session:
    """The states of a run, in a scope with a random name."""

    __slots__ = ("_client", "_ended", "_numbers", "_untaken", "_used", "scope")

    def __init__(self, client: AsyncClient) -> None:
        self.scope = secrets.token_hex(SCOPE_BYTES)
        self._client = client
        self._numbers = itertools.count(1)
        self._used = self._ended = False
        self._untaken: set[asyncio.Future[None]] = set()
        """Forks and pauses that the server may not have read yet."""

    def number(self) -> int:
        """The number for a new state."""
        self._used = True
        return next(self._numbers)

    def fork(self, prompt: StatePrompt, count: int) -> asyncio.Future[None]:
        """Fork a prompt into `count` branches; done when they may begin."""
        return self._tell(Fork(id=0, prompt=prompt, count=count))

    def pause(self, state: int, seconds: float | None) -> asyncio.Future[None]:
        """Tell the server that a state is not used for a while; done when it may be used again."""
        return self._tell(Pause(id=0, scope=self.scope, state=state, seconds=seconds))

    def end(self) -> None:
        """The run has ended: the server may forget its states."""
        self._ended = True
        self._forget()

    def _tell(self, message: Fork | Pause) -> asyncio.Future[None]:
        taken = self._client.tell(message)
        if not taken.done():
            self._untaken.add(taken)
            taken.add_done_callback(self._take)
        return asyncio.shield(taken)  # a waiting task may be cancelled, the message may not

    def _take(self, taken: asyncio.Future[None]) -> None:
        self._untaken.discard(taken)
        self._forget()

    def _forget(self) -> None:
        """Send Forget once all Forks and Pauses have been read: over HTTP, messages may overtake each other."""
        if self._ended and self._used and not self._untaken:
            self._used = False
            self._client.tell(Forget(id=0, scope=self.scope))
