"""A blocking ZMQ connection for a thread: of a worker, or to query the router."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Self

import zmq

from radixrt.wire.monitor import Monitor
from radixrt.wire.sockets import NOW, WRITABLE, connect, connect_again, is_readable, open_socket, plain_send

PATIENCE_SECONDS = 0.1
"""A blocked send checks `stopped` this often."""


class Link:
    """A blocking connection for one thread (ZMQ sockets are not thread-safe: each thread needs its own).

    `identity` is a name that is sent to the peer; a RouterSocket ignores it. Once `stopped` is set, by any thread,
    sends do not block any more. A `monitored` link knows when its connection has broken (not on inproc).
    """

    def __init__(
        self,
        address: str,
        identity: bytes | None = None,
        *,
        send_timeout: float = 10.0,
        stopped: threading.Event | None = None,
        monitored: bool = False,
    ) -> None:
        self._address = address
        self._send_timeout = send_timeout
        self._stopped = stopped or threading.Event()
        self._socket = open_socket(zmq.DEALER)
        if identity is not None:
            self._socket.identity = identity
        self._monitor = Monitor(self._socket, address) if monitored else None
        self._breaks = 0
        try:
            connect(self._socket, address)
        except BaseException:
            self.close()
            raise
        self._send = plain_send(self._socket)

    def send(self, payload: bytes) -> None:
        """Queue a message. If the queue is full, because the router does not read or ZMQ has given up connecting, wait
        up to `send_timeout` seconds; then drop all queued messages, connect anew, and raise TimeoutError."""
        try:
            self._send(payload, NOW)
        except zmq.Again:
            self._send_blocking(payload)

    def _send_blocking(self, payload: bytes) -> None:
        deadline = time.monotonic() + self._send_timeout
        while not self._stopped.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                self._connect_again()
                break
            zmq.zmq_poll([(self._socket, WRITABLE)], round(1000 * min(left, PATIENCE_SECONDS)))
            with contextlib.suppress(zmq.Again):
                self._send(payload, NOW)
                return
        raise TimeoutError("the router does not read")

    def _connect_again(self) -> None:
        if not self._address.startswith("inproc:"):
            self._socket.immediate = True  # from now on, messages are queued only if there is a connection
            connect_again(self._socket, self._address)

    def recv(self, timeout: float | None = None) -> bytes | None:
        """The next message; None if there is none within `timeout` seconds (None: no limit)."""
        if timeout is None:
            milliseconds = -1
        else:
            milliseconds = max(1, round(timeout * 1000)) if timeout else 0
        return self._socket.recv(NOW) if is_readable(self._socket, milliseconds) else None

    def broke(self) -> bool:
        """Whether the connection has broken since the last call; always False unless `monitored`. ZMQ reconnects by
        itself, but messages in transit, in either direction, are lost."""
        if self._monitor is None:
            return False
        self._monitor.read_events(time.monotonic())
        before, self._breaks = self._breaks, self._monitor.breaks
        return before != self._breaks

    def drain(self) -> list[bytes]:
        """All messages that have arrived, without waiting."""
        messages = []
        while (message := self.recv(0)) is not None:
            messages.append(message)
        return messages

    def close(self, linger: float = 0.0) -> None:
        """Disconnect. Messages that were not sent yet are sent for up to `linger` seconds. Idempotent."""
        if not self._socket.closed:
            if self._monitor is not None:
                self._monitor.close()
            self._socket.close(round(linger * 1000))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()
