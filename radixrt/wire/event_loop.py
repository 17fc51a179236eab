"""Sockets of an asyncio event loop: the router's, and those of its clients."""

from __future__ import annotations

import abc
import asyncio
import errno
import time
from collections.abc import Callable

import zmq

from radixrt.wire.monitor import IDLE_SECONDS, Monitor
from radixrt.wire.sockets import NOW, NOW_AND_MORE, bind, connect, is_readable, open_socket, plain_send

_BATCH = 512
"""Messages handled before other callbacks of the event loop get their turn."""


class PeerGone(ConnectionError):
    """A message could not be sent, because nobody with that identity is connected."""


class _AsyncSocket(abc.ABC):
    """A ZMQ socket on the event loop, without `zmq.asyncio` (a future a message is ten times the price).

    ZMQ's descriptor is edge triggered: it becomes readable once for any number of messages, and a send may
    swallow that edge. So a wake-up drains until nothing is there, and a send schedules one drain for the turn.
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
        """Receive all there is. Who is `woken` by ZMQ finds something nearly always, and does not ask first."""
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
                # The event loop reports it; what is left in the queue would get no edge of its own.
                self._schedule_drain()
                raise
        self._schedule_drain()

    @abc.abstractmethod
    def _receive_one(self) -> None:
        """Take the message that is there and hand it on. zmq.Again if none is."""

    def _receive_last(self) -> tuple[bytes, bool]:
        """The next frame of a message, and whether more came behind it, which are dropped."""
        first = last = self._socket.recv(NOW, copy=False)
        while last.more:
            last = self._socket.recv(NOW, copy=False)
        return first.bytes, last is not first

    def close(self) -> None:
        """Stop receiving and drop what was not sent yet. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(0)


class RouterSocket(_AsyncSocket):
    """Listens on `address`, and on `near` if that is given; `on_message(identity, payload)` is called on the event loop
    for each message.

    `key` is a (secret, public) pair of `load_secret_key`. A message that is not one frame after the identity
    arrives as an empty payload, which decodes as no message. ValueError for a bad address or one that other
    machines reach without a key, OSError when it is taken.
    """

    def __init__(
        self,
        address: str,
        on_message: Callable[[bytes, bytes], None],
        *,
        key: tuple[bytes, bytes] | None = None,
        max_bytes: int = -1,
        near: str = "",
    ) -> None:
        socket = open_socket(zmq.ROUTER)
        socket.router_mandatory = True
        socket.router_handover = True
        socket.maxmsgsize = max_bytes
        try:
            self.address = bind(socket, address, key)
            if near:
                bind(socket, near, key)
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
        """Queue a message. False when the peer does not read and its queue is full; PeerGone when it has vanished."""
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


class DealerSocket(_AsyncSocket):
    """Connects to `address`; `on_message(payload)` is called on the event loop for each message.

    `on_lost()` is called when an established connection breaks: ZMQ connects again by itself, but what was
    under way is lost (not on inproc). With it, `connected` tells whether the other side is there now; what is sent
    without it waits for one. ValueError for a bad address.
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
        """Take in what has become of the connection; look again when it may have to be made anew."""
        if self._monitor is None:
            return
        lost = self._monitor.look(time.monotonic())
        if self._monitor.is_idle:
            self._loop.call_later(IDLE_SECONDS, self._look)
        if lost and self._on_lost:
            self._on_lost()

    def send(self, payload: bytes) -> bool:
        """Queue a message; False when the queue is full because the router does not read."""
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
        """Disconnect, dropping what was not sent yet. Idempotent."""
        if not self._closed:
            if self._monitor:
                self._loop.remove_reader(self._monitor.fd)
            self._close_monitor()
        super().close()
