"""ZMQ sockets on an asyncio event loop, for the router and its clients."""

from __future__ import annotations

import abc
import asyncio
import errno
import hmac
import time
from collections.abc import Callable
from typing import Any

import zmq

from radixrt.wire.monitor import IDLE_SECONDS, Monitor
from radixrt.wire.sockets import (
    HANDLER,
    NOW,
    NOW_AND_MORE,
    USER,
    ZAP_DOMAIN,
    Key,
    bind,
    connect,
    ignore_identities,
    is_readable,
    open_socket,
    plain_send,
)

_BATCH = 512
"""The most messages that are handled before other callbacks of the event loop run."""
_BATCH_BYTES = 1 << 20
"""The same for their bytes; a message may have more."""

UNREAD_MILLISECONDS = 30_000
"""A TCP connection is closed, and what waits for its peer dropped, if nothing of it was read for so long."""


class PeerGone(ConnectionError):
    """A message could not be sent, because no peer with that identity is connected."""


class _AsyncSocket(abc.ABC):
    """A ZMQ socket on the event loop, without `zmq.asyncio`, whose future per message costs ten times as much.

    ZMQ's file descriptor is edge-triggered: it becomes readable once for any number of messages, and a send may consume
    that edge. So a wake-up receives until the queue is empty, and a send schedules one more such `_drain`.
    """

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket
        self._send = plain_send(socket)
        self._closed = False
        self._loop = asyncio.get_running_loop()
        self._fd = socket.FD
        self._drain_scheduled = False
        self._loop.add_reader(self._fd, self._drain, True)
        self._schedule_drain()

    def _schedule_drain(self) -> None:
        if not self._drain_scheduled:
            self._drain_scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self, woken: bool = False) -> None:
        """Receive all messages. `woken`: called for the file descriptor; then there nearly always is a message, and
        polling for the first one is omitted."""
        self._drain_scheduled = False
        size = 0
        for _ in range(_BATCH):
            if self._closed or not (woken or is_readable(self._socket)):
                return
            woken = False
            try:
                size += self._receive_one()
            except zmq.Again:
                return
            except BaseException:
                # The event loop logs the error. Messages left in the queue would cause no further edge.
                self._schedule_drain()
                raise
            if size > _BATCH_BYTES:
                break
        self._schedule_drain()

    @abc.abstractmethod
    def _receive_one(self) -> int:
        """Receive a message and pass it to the callback. Returns its size. Raises zmq.Again if there is none."""

    def _receive_last(self) -> tuple[bytes, bool]:
        """Receive the rest of a message. Returns (its next frame, whether more frames followed, which are dropped)."""
        first = last = self._socket.recv(NOW, copy=False)
        while last.more:
            last = self._socket.recv(NOW, copy=False)
        return first.bytes, last is not first

    def close(self) -> None:
        """Stop receiving, and drop messages that were not sent yet. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(0)


class RouterSocket(_AsyncSocket):
    """Listens on `address`, on `near`, or on both; `on_message(identity, payload)` is called on the event loop for each
    message.

    `key` is a pair of `wire.keys` for `address`. Who comes to `near` needs the `password`; it costs nothing for each
    message, as a key does, but is for this machine only, and for one socket of a process. Each connection has an
    identity of its own, whatever its peer calls itself: a peer that connects again is another one. If a message does
    not have exactly one frame after the identity, the payload is empty, which is not a valid message. Raises ValueError
    for an invalid address, or one that other machines can reach if there is no key, and OSError if it is in use.
    """

    def __init__(
        self,
        address: str,
        on_message: Callable[[bytes, bytes], None],
        *,
        key: Key | None = None,
        max_bytes: int = -1,
        near: str = "",
        password: str = "",
    ) -> None:
        if not address and not near:
            raise ValueError("a router needs an address to listen on")
        socket = open_socket(zmq.ROUTER)
        socket.router_mandatory = True
        socket.maxmsgsize = max_bytes
        socket.tcp_maxrt = UNREAD_MILLISECONDS
        self._zap: ZapHandler | None = None
        try:
            self.address = bind(socket, address, key) if address else ""
            if near:
                self._zap = ZapHandler(password)
                bind(socket, near, domain=self._zap.domain)
            ignore_identities(socket)
        except (ValueError, OSError):
            if self._zap:
                self._zap.close()
            socket.close(0)
            raise
        self._on_message = on_message
        super().__init__(socket)

    def _receive_one(self) -> int:
        identity = self._socket.recv(NOW)
        payload, more = self._receive_last()
        self._on_message(identity, b"" if more else payload)
        return len(payload)

    def send(self, identity: bytes, payload: bytes) -> bool:
        """Queue a message. Returns False if the peer's queue is full, as it does not read. Raises PeerGone if it has
        disconnected."""
        self._schedule_drain()
        try:
            self._send(identity, NOW_AND_MORE)
            self._send(payload, NOW)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, errno.ECONNRESET):
                raise PeerGone(identity.hex()) from None
            raise
        return True

    def send_marked(self, identity: bytes, payload: bytes) -> Callable[[], bool] | None:
        """As `send`, which costs less. Returns a function that tells whether the message, and so all before it, has
        been sent, read, or dropped with its connection; None if the peer's queue is full."""
        self._schedule_drain()
        frame = zmq.Frame(payload, track=True, copy=False)
        try:
            self._send(identity, NOW_AND_MORE)
            self._send(frame, NOW, False, True)
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, errno.ECONNRESET):
                raise PeerGone(identity.hex()) from None
            raise
        tracker = frame.tracker
        return lambda: tracker.done

    def disconnect(self, identity: bytes) -> bool:
        """Take leave of a peer (see `ignore_identities`): it gets what waits for it, if it reads within
        UNREAD_MILLISECONDS, and then its connection is closed. As `send`: False if that is not possible now, as its
        queue is full; raises PeerGone."""
        return self.send(identity, b"")

    def close(self) -> None:
        """See _AsyncSocket."""
        super().close()
        if self._zap:
            self._zap.close()


class ZapHandler(_AsyncSocket):
    """Answers ZMQ's questions, for all sockets of this process that listen, whether a peer may connect (RFC 27, ZAP):
    to those of its own `domain` if it has the password, to others always. Raises ValueError without a password, and
    OSError if this process has one already."""

    domain = ZAP_DOMAIN + "/near"

    def __init__(self, password: str) -> None:
        if not password:
            raise ValueError("near_address: it needs near_password")
        self._password = password.encode()
        socket = open_socket(zmq.ROUTER)
        try:
            socket.bind(HANDLER)
        except zmq.ZMQError as error:
            socket.close(0)
            raise OSError(error.errno, f"cannot listen on {HANDLER}: {error.strerror}") from None
        super().__init__(socket)

    def _receive_one(self) -> int:
        head, version, request, domain, *rest = self._receive_question()
        allowed = domain != self.domain.encode() or self._is_known(rest)
        answer = (b"200", b"OK", USER) if allowed else (b"400", b"wrong password", b"")
        self._socket.send_multipart([*head, version, request, *answer, b""], NOW)
        self._schedule_drain()
        return 0

    def _receive_question(self) -> Any:
        identity, empty, *frames = self._socket.recv_multipart(NOW)
        return [identity, empty], *frames

    def _is_known(self, rest: list[bytes]) -> bool:
        """Whether the rest of a question, (address, identity, mechanism, credentials), has the password."""
        _address, _identity, mechanism, *credentials = rest
        return mechanism == b"PLAIN" and hmac.compare_digest(credentials[1], self._password)


class DealerSocket(_AsyncSocket):
    """Connects to `address`; `on_message(payload)` is called on the event loop for each message.

    `on_lost()` is called when an established connection breaks (not on inproc): ZMQ connects again by itself, but
    messages in transit are lost. `connected` is known only with `on_lost`. Messages that are sent while there is no
    connection are queued. Raises ValueError for an invalid address.
    """

    def __init__(
        self,
        address: str,
        on_message: Callable[[bytes], None],
        *,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        socket = open_socket(zmq.DEALER)
        self._on_message = on_message
        self._on_lost = on_lost
        self._always = address.startswith("inproc:")
        self._monitor = Monitor(socket, address) if on_lost else None
        try:
            connect(socket, address)
        except BaseException:
            self._close_monitor()
            socket.close(0)
            raise
        super().__init__(socket)
        if self._monitor:
            self._loop.add_reader(self._monitor.fd, self._look)
            self._loop.call_soon(self._look)

    @property
    def connected(self) -> bool:
        return not self._closed and (self._always or (self._monitor is not None and self._monitor.connected))

    def _receive_one(self) -> int:
        payload = self._receive_last()[0]
        self._on_message(payload)
        return len(payload)

    def _look(self) -> None:
        """Handle events of the connection. If ZMQ may have given up connecting, check again later."""
        if self._monitor is None:
            return
        lost = self._monitor.look(time.monotonic())
        if self._monitor.is_idle:
            self._loop.call_later(IDLE_SECONDS, self._look)
        if lost and self._on_lost:
            self._on_lost()

    def send(self, payload: bytes) -> bool:
        """Queue a message. Returns False if the queue is full, as the router does not read."""
        self._schedule_drain()
        try:
            self._send(payload, NOW)
        except zmq.Again:
            return False
        return True

    def _close_monitor(self) -> None:
        if self._monitor:
            self._monitor.close()
            self._monitor = None

    def close(self) -> None:
        """Disconnect, and drop messages that were not sent yet. Idempotent."""
        if not self._closed:
            if self._monitor:
                self._loop.remove_reader(self._monitor.fd)
            self._close_monitor()
        super().close()
