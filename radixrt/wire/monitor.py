"""What becomes of a socket's connection, as ZMQ tells it; and making it anew where ZMQ gives up."""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message

from radixrt.wire.sockets import connect_again, is_readable

IDLE_SECONDS = 1.0
"""After which a connection that nobody tries to make is made anew. ZMQ tries again by itself, several times a second,
but not where the other side speaks otherwise: it wants a key and there is none, or takes none."""


class Monitor:
    """Of a socket that is to be connected to `address`. On inproc nothing is told."""

    def __init__(self, socket: zmq.Socket, address: str) -> None:
        self._of, self._address = socket, address
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        self._socket = socket.get_monitor_socket(events)
        self.connected = False
        self.breaks = 0
        """How often an established connection has broken."""
        self.refused: float | None = None
        """When somebody was there last who did not take the key, or was no router."""
        self._idle: float | None = None
        """Since when nobody tries."""

    @property
    def fd(self) -> int:
        """Readable when there is something to look at."""
        return self._socket.FD

    @property
    def is_idle(self) -> bool:
        """Whether to look again after IDLE_SECONDS, whatever comes."""
        return self._idle is not None

    def look(self, now: float) -> bool:
        """Take in what has happened: whether a connection has broken, was refused, or has been made anew since the last
        look."""
        broken = self.take_in(now)
        if self._idle is not None and now - self._idle >= IDLE_SECONDS:
            self._idle = None
            connect_again(self._of, self._address)
            broken = True
        return broken

    def take_in(self, now: float) -> bool:
        """Read the events so far. Returns whether a connection has broken or was refused."""
        broken = False
        while is_readable(self._socket):
            event = recv_monitor_message(self._socket)["event"]
            if event == zmq.EVENT_DISCONNECTED:
                broken = True
                self.breaks += self.connected
                self.refused = self.refused if self.connected else now
            self._idle = now if event == zmq.EVENT_DISCONNECTED else None
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return broken

    def close(self) -> None:
        """Before its socket."""
        self._of.disable_monitor()
        self._socket.close(0)
