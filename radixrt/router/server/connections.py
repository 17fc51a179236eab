"""Connections to workers, by name, and to clients, by identity; and what waits to be sent to them."""

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
from radixrt.messages import Abort, ClientReply, ClientRequest, Deltas, Error, Stop, Unknown
from radixrt.router.server.backlogs import MARK_BYTES, Backlogs
from radixrt.tokens.errors import FieldError
from radixrt.wire.sockets import HIGH_WATER

log = logging.getLogger("radixrt.router")

MAX_BATCH_MESSAGES = 4
"""Messages to workers are sent in batches of up to this many, since waking ZMQ's thread for each message costs more
than everything else about it, on both sides. The first message of a turn of the event loop is sent at once, the others
at its end."""


MAX_REFUSED_WORKERS = 256
"""The most workers for which the time of the last Unknown message is remembered."""
REFUSED_SECONDS = 5.0
"""After this time a worker that still has not registered gets another Unknown: the message, or the reply, was lost with
a connection."""

NOTHING = wire.encode(Abort([]))

MAX_OWED_ERRORS = 4 * HIGH_WATER
"""The most requests for which a client is owed an Error; beyond that the oldest are dropped."""
NOT_READ = "the client did not read its replies: cancelled"
FULL = "too many bytes of earlier replies wait for this client: it is to read them first"


class WorkerConnections:
    """Connections to workers. `lost` is called at the end of a turn of the event loop with the names of the workers
    that queued messages could not reach."""

    def __init__(self, socket: wire.RouterSocket, lost: Callable[[list[str]], None]) -> None:
        self._socket = socket
        self._lost = lost
        self._identities: dict[str, bytes] = {}
        self._names: dict[bytes, str] = {}
        self._waiting: list[tuple[str, bytes]] | None = None
        """Queued messages, (name of the worker, payload); None before the first message of a turn."""
        self._refused: dict[bytes, float] = {}
        """When each worker last got an Unknown, by `time.monotonic`."""

    def name(self, identity: bytes) -> str | None:
        """The name of the worker with an identity."""
        return self._names.get(identity)

    def bind(self, name: str, identity: bytes) -> None:
        """The worker of that name has this identity from now on."""
        self.unbind(name)
        self._refused.pop(identity, None)
        self._identities[name], self._names[identity] = identity, name

    def unbind(self, name: str) -> None:
        """No worker has that name now; messages queued for it are dropped."""
        if (identity := self._identities.pop(name, None)) is not None:
            self._names.pop(identity, None)
            self._waiting = self._waiting and [one for one in self._waiting if one[0] != name]

    def prune(self, known: Callable[[str], bool]) -> None:
        """Forget the workers that are not `known` any more."""
        for name in [name for name in self._identities if not known(name)]:
            self.unbind(name)

    def refuse(self, identity: bytes) -> None:
        """Send Unknown to a worker, so that it registers; at most once in REFUSED_SECONDS."""
        now = time.monotonic()
        if now < self._refused.get(identity, -math.inf) + REFUSED_SECONDS:
            return
        self._refused.pop(identity, None)
        with contextlib.suppress(wire.PeerGone):
            self._socket.send(identity, wire.encode(Unknown()))
            self._refused[identity] = now
            if len(self._refused) > MAX_REFUSED_WORKERS:
                del self._refused[next(iter(self._refused))]

    def is_there(self, name: str) -> bool:
        """Whether the worker of that name is connected: it gets a message that asks nothing of it."""
        identity = self._identities.get(name)
        with contextlib.suppress(wire.PeerGone):
            return identity is not None and (self._socket.send(identity, NOTHING) or True)
        return False

    def dismiss(self, identity: bytes, reason: str) -> None:
        """Send Stop to a worker that must not serve."""
        with contextlib.suppress(wire.PeerGone):
            self._socket.send(identity, wire.encode(Stop(reason)))

    def send(self, name: str, message: Any) -> list[str]:
        """Send a message to a worker, or queue it until the end of this turn. Returns the names of workers that could
        not be reached."""
        payload = wire.encode(message)
        if self._waiting is None:
            self._waiting = []
            asyncio.get_running_loop().call_soon(self._end_turn)
            return [] if self._reaches(name, payload) else [name]
        self._waiting.append((name, payload))
        return self.flush() if len(self._waiting) >= MAX_BATCH_MESSAGES else []

    def flush(self) -> list[str]:
        """Send all queued messages. Returns the names of workers that could not be reached; their other messages are
        dropped."""
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


class ClientConnections:
    """Connections to clients, of a socket or on this event loop. `tenant` returns the tenant of a key, or raises
    FieldError.

    A client that does not read, for which too many messages wait, is owed an Error for each of its unanswered requests:
    those in flight, and those whose last message it did not receive. If too many bytes wait (`backlogs`), it gets an
    Error in place of a reply, and is disconnected if it still does not read."""

    def __init__(self, tenant: Callable[[str], str]) -> None:
        self.socket: wire.RouterSocket | None = None
        """None before the router listens."""
        self._tenant = tenant
        self._backlogs = Backlogs()
        self._attached: dict[bytes, Callable[[ClientReply], None]] = {}
        self._owed: dict[bytes, dict[int, None]] = {}
        """Ids of requests for which a client is owed an Error, in order."""

    def attach(self, deliver: Callable[[ClientReply], None]) -> bytes:
        """Add a client on this event loop, and return its identity. `deliver` is called for each message, but never
        within `send`."""
        identity = b"here" + secrets.token_bytes(16)  # no peer of a socket can have this identity
        self._attached[identity] = deliver
        return identity

    def heard(self, client: bytes, message: ClientRequest) -> None:
        """A client of the socket has sent a message: what waits for it counts as its tenant's."""
        key = getattr(message, "api_key", None)
        backlog = self._backlogs.of(client)
        if key is None or key == backlog.key:
            return
        try:
            tenant = self._tenant(key)
        except FieldError:
            return
        backlog.tenant = tenant if backlog.key is None or backlog.tenant == tenant else None
        backlog.key = key

    def send(self, client: bytes, message: ClientReply, in_flight: Callable[[bytes], Iterable[int]]) -> bool:
        """Send a message. False if the client has disconnected or does not read. In the latter case it is owed Errors
        for the requests that are `in_flight` of it, and for those that this message would have ended."""
        if (deliver := self._attached.get(client)) is not None:
            asyncio.get_running_loop().call_soon(deliver, message)
            return True
        assert self.socket is not None
        try:
            if self._queue(self.socket, client, message):
                return True
        except wire.PeerGone:
            self._owed.pop(client, None)
            return False
        if client not in self._owed:
            log.warning("a client does not read its replies: its requests are cancelled")
        owed = self._owed.setdefault(client, {})
        owed.update(dict.fromkeys([*in_flight(client), *_ended(message)]))
        while len(owed) > MAX_OWED_ERRORS:
            del owed[next(iter(owed))]
        return False

    def _queue(self, socket: wire.RouterSocket, client: bytes, message: ClientReply) -> bool:
        """Queue a message, or an Error in its place if too many bytes wait. False if the queue is full."""
        payload, backlog = wire.encode(message), self._backlogs.of(client)
        size = backlog.unmarked + len(payload)
        if size < MARK_BYTES:
            backlog.unmarked = size
            return socket.send(client, payload)
        if not self._backlogs.admits(client, backlog, size):
            backlog.exceeded = True
            if not isinstance(message, Deltas):  # those of streams are small, and cannot be replaced
                return socket.send(client, wire.encode(Error(message.id, 503, FULL, retry_after=1.0)))
        left = socket.send_marked(client, payload)
        if left is not None:
            backlog.mark(size, left)
        return left is not None

    def disconnect_stalled(self) -> list[bytes]:
        """Disconnect the clients that do not read. Returns them. What waits for them counts until it is dropped."""
        assert self.socket is not None
        gone = []
        for client, backlog in self._backlogs.stalled():
            with contextlib.suppress(wire.PeerGone):
                if not self.socket.disconnect(client):
                    continue
                whose = f" of tenant {backlog.tenant}" if backlog.tenant else ""
                log.warning("a client%s does not read: disconnected, %.1f MB waited", whose, backlog.waiting / 1e6)
            backlog.gone = True
            gone.append(client)
        for client in gone:
            self._owed.pop(client, None)
        return gone

    def send_owed(self) -> None:
        """Send the owed Errors to clients that read again."""
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
    """Ids of the requests that a message ends, or of which it ends a choice."""
    if isinstance(message, Deltas):
        return [delta.id for delta in message.items if delta.finish is not None]
    return [] if message.id is None else [message.id]
