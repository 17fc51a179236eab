"""Values that front ends share through the router, which keeps them (`radixrt.router.server.kv_store`)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b

import msgspec

from radixrt.client import ServerError
from radixrt.client.transports import Answer, RouterTransport
from radixrt.messages import Info, Namespace, Recall, Share

_encode = msgspec.msgpack.Encoder().encode

TOUCH_SECONDS = 300.0
SECONDS = 1.0
"""How long to wait for the router; after that, values count as unknown."""


class SharedStore:
    """`transport` returns the transport, which is opened only after this object is created."""

    def __init__(self, transport: Callable[[], RouterTransport]) -> None:
        self._transport = transport
        self._sent = self._taken = 0
        """Numbers of Share messages that were sent, and that the router has handled, in order."""
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._touched: set[bytes] = set()
        self._touched_until = 0.0

    def share(self, entries: Sequence[tuple[bytes, bytes | None]], api_key: str) -> None:
        """Store values for all front ends, or remove them (None). `settled` waits until that is done."""
        try:
            self._transport().submit(Share(id=0, entries=list(entries), api_key=api_key), self._took)
        except ServerError:  # the router does not read; what is not shared will be computed again
            return
        self._sent += 1

    def touch(self, keys: Sequence[bytes], api_key: str) -> None:
        """These keys were used. The router is told seldom: it need not know exactly when."""
        if (now := time.monotonic()) >= self._touched_until:
            self._touched, self._touched_until = set(), now + TOUCH_SECONDS
        if used := [key for key in keys if key not in self._touched]:
            self._touched.update(used)
            with contextlib.suppress(ServerError):
                self._transport().submit(Share(id=0, entries=[], used=used, api_key=api_key), lambda _: None)

    def _took(self, _: Answer) -> None:
        self._taken += 1
        while self._waiting and self._waiting[0][0] <= self._taken:
            waiter = self._waiting.popleft()[1]
            if not waiter.done():
                waiter.set_result(None)

    async def settled(self) -> None:
        """Wait until the router has stored everything shared so far, or does not answer in time."""
        if self._taken >= self._sent:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._sent, waiter))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(waiter, SECONDS)

    async def recall(self, keys: Sequence[bytes], api_key: str) -> list[bytes | None]:
        """The values of some keys; None for unknown ones, and for all if the router does not answer in time."""
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def take(answer: Answer) -> None:
            if not answered.done():
                answered.set_result(answer)

        nothing: list[bytes | None] = [None] * len(keys)
        try:
            self._transport().submit(Recall(id=0, keys=list(keys), api_key=api_key), take)
            answer = await asyncio.wait_for(answered, SECONDS)
        except (ServerError, TimeoutError):
            return nothing
        return answer.data if isinstance(answer, Info) else nothing


def key_of(kind: str, namespace: Namespace, name: str) -> bytes:
    """The key of a value that all processes name in the same way."""
    return blake2b(_encode((kind, namespace.key, name)), digest_size=16).digest()
