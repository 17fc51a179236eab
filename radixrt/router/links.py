"""Who is at the other end: workers by their names, clients by their identities; what waits to be sent to them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable
from typing import Any

from radixrt import wire
from radixrt.messages import ClientReply, Deltas, Error, Stop, Unknown
from radixrt.wire.sockets import HIGH_WATER

log = logging.getLogger("radixrt.router")

MOST_ORDERS = 4
"""For workers, sent together: to wake ZMQ's thread for each message costs more than all else about it, on both sides.
The first of a turn of the event loop goes at once, the others wait for its end, but for no more than so many."""


MOST_REFUSED = 256
"""Workers that are known to have been told that they are unknown; others are told again."""
REFUSED_SECONDS = 5.0
"""Until a worker that still does not register is told again: the message, or the answer, was lost with a connection."""

MOST_OWED = 4 * HIGH_WATER
"""Requests that a client is owed an Error for. One that asks on and on and never reads does not hear of the oldest."""
NOT_READ = "the client did not read its replies: cancelled"


class WorkerLinks:
    """Workers by name. `lost` is told, at the end of a turn, the names of those that what waited could not reach."""

    def __init__(self, socket: wire.RouterSocket, lost: Callable[[list[str]], None]) -> None:
        self._socket = socket
        self._lost = lost
        self._identities: dict[str, bytes] = {}
        self._names: dict[bytes, str] = {}
        self._waiting: list[tuple[str, bytes]] | None = None
        """Messages to the worker called so; None before the first of a turn."""
        self._refused: dict[bytes, float] = {}
        """When each was told, by `time.monotonic`."""

    def name(self, identity: bytes) -> str | None:
        """Of the worker at an identity."""
        return self._names.get(identity)

    def bind(self, name: str, identity: bytes) -> None:
        """A worker called so is at an identity from now on."""
        self.unbind(name)
        self._refused.pop(identity, None)
        self._identities[name], self._names[identity] = identity, name

    def unbind(self, name: str) -> None:
        """Nobody is called so now; what waited for it goes nowhere."""
        if (identity := self._identities.pop(name, None)) is not None:
            self._names.pop(identity, None)
            self._waiting = self._waiting and [one for one in self._waiting if one[0] != name]

    def prune(self, known: Callable[[str], bool]) -> None:
        """Forget workers that are not `known` any more."""
        for name in [name for name in self._identities if not known(name)]:
            self.unbind(name)

    def refuse(self, identity: bytes) -> None:
        """Tell a worker that nobody here knows it; again after REFUSED_SECONDS."""
        now = time.monotonic()
        if now < self._refused.get(identity, -math.inf) + REFUSED_SECONDS:
            return
        self._refused.pop(identity, None)
        with contextlib.suppress(wire.PeerGone):
            self._socket.send(identity, wire.encode(Unknown()))
            self._refused[identity] = now
            if len(self._refused) > MOST_REFUSED:
                del self._refused[next(iter(self._refused))]

    def dismiss(self, identity: bytes, reason: str) -> None:
        """Tell a worker that it must not serve, and why."""
        with contextlib.suppress(wire.PeerGone):
            self._socket.send(identity, wire.encode(Stop(reason)))

    def send(self, name: str, message: Any) -> list[str]:
        """A message to a worker, with others of this turn. Those that cannot be reached, by name."""
        payload = wire.encode(message)
        if self._waiting is None:
            self._waiting = []
            asyncio.get_running_loop().call_soon(self._end_turn)
            return [] if self._reaches(name, payload) else [name]
        self._waiting.append((name, payload))
        return self.flush() if len(self._waiting) >= MOST_ORDERS else []

    def flush(self) -> list[str]:
        """Send all that waits. The workers that cannot be reached, by name, who get none of it."""
        waiting, self._waiting = self._waiting or [], []
        gone: list[str] = []
        for name, payload in waiting:
            if name not in gone and not self._reaches(name, payload):
                gone.append(name)
        return gone

    def _end_turn(self) -> None:
        gone, self._waiting = self.flush(), None
        self._lost(gone)

    def _reaches(self, name: str, payload: bytes) -> bool:
        identity = self._identities.get(name)
        if identity is None:
            return False
        try:
            if self._socket.send(identity, payload):
                return True
            log.warning("worker %s does not read", name)
        except wire.PeerGone:
            log.warning("worker %s has vanished", name)
        return False


class ClientLinks:
    """Clients, of a socket or on this event loop. One that does not read is owed an Error for each of its requests that
    is not answered: those in flight, and those whose last answer it did not take."""

    def __init__(self) -> None:
        self.socket: wire.RouterSocket | None = None
        """None before it listens."""
        self._attached: dict[bytes, Callable[[ClientReply], None]] = {}
        self._owed: dict[bytes, dict[int, None]] = {}
        """Ids of requests, in the order of their Errors."""

    def attach(self, deliver: Callable[[ClientReply], None]) -> bytes:
        """The identity of a client on this event loop; `deliver` is called for each message, never within `send`."""
        identity = b"here" + secrets.token_bytes(16)  # which no peer of a socket can choose to have
        self._attached[identity] = deliver
        return identity

    def send(self, client: bytes, message: ClientReply, in_flight: Callable[[], Iterable[int]]) -> bool:
        """False if the client has vanished or does not read: then it is owed Errors for its requests `in_flight`, and
        for those that this message would have ended."""
        if (deliver := self._attached.get(client)) is not None:
            asyncio.get_running_loop().call_soon(deliver, message)
            return True
        assert self.socket is not None
        try:
            if self.socket.send(client, wire.encode(message)):
                return True
        except wire.PeerGone:
            self._owed.pop(client, None)
            return False
        owed = self._owed.setdefault(client, {})
        owed.update(dict.fromkeys([*in_flight(), *_ended(message)]))
        while len(owed) > MOST_OWED:
            del owed[next(iter(owed))]
        return False

    def pay(self) -> None:
        """Tell clients that read again which requests they lost."""
        assert self.socket is not None
        for client, owed in list(self._owed.items()):
            try:
                for id in list(owed):
                    if not self.socket.send(client, wire.encode(Error(id, 503, NOT_READ))):
                        break
                    del owed[id]
            except wire.PeerGone:
                owed.clear()
            if not owed:
                del self._owed[client]


def _ended(message: ClientReply) -> list[int]:
    """Requests of which a message has the last answer, or that of a choice."""
    if isinstance(message, Deltas):
        return [delta.id for delta in message.items if delta.finish is not None]
    return [] if message.id is None else [message.id]
