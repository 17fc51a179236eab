"""ZMQ sockets on an asyncio event loop, for the router and its clients."""

from __future__ import annotations

import abc
import asyncio
import errno
import time
from collections.abc import Callable

import zmq

from radixrt.wire.monitor import IDLE_SECONDS, Monitor
from radixrt.wire.sockets import (
    NOW,
    NOW_AND_MORE,
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
        for _ in range(_BATCH):
            if self._closed or not (woken or is_readable(self._socket)):
                return
            woken = False
            try:
                self._receive_one()
            except zmq.Again:
                return
            except BaseException:
                # The event loop logs the error. Messages left in the queue would cause no further edge.
                self._schedule_drain()
                raise
        self._schedule_drain()

    @abc.abstractmethod
    def _receive_one(self) -> None:
        """Receive a message and pass it to the callback. Raises zmq.Again if there is none."""

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

    `key` and `near_key` are (secret, public) pairs of `wire.keys`, for `address` and for `near`. Each connection has an
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
        near_key: Key | None = None,
    ) -> None:
        if not address and not near:
            raise ValueError("a router needs an address to listen on")
        socket = open_socket(zmq.ROUTER)
        socket.router_mandatory = True
        socket.maxmsgsize = max_bytes
        socket.tcp_maxrt = UNREAD_MILLISECONDS
        try:
            self.address = bind(socket, address, key) if address else ""
            if near:
                bind(socket, near, near_key)
            ignore_identities(socket)
        except (ValueError, OSError):
            socket.close(0)
            raise
        self._on_message = on_message
        super().__init__(socket)

    def _receive_one(self) -> None:
        identity = self._socket.recv(NOW)
        payload, more = self._receive_last()
        self._on_message(identity, b"" if more else payload)

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

    def _receive_one(self) -> None:
        self._on_message(self._receive_last()[0])

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
