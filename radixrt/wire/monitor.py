"""Tracks a socket's connection by ZMQ's monitor events, and connects again where ZMQ gives up."""

from __future__ import annotations

import zmq
from zmq.utils.monitor import recv_monitor_message

from radixrt.wire.sockets import connect_again, is_readable

IDLE_SECONDS = 1.0
"""A socket that ZMQ has not tried to connect for this long is connected again. ZMQ retries by itself, several times a
second, but not if the handshake failed because only one side has a CURVE key."""


class Monitor:
    """The state of the connection of `socket`, which is to be connected to `address`. There are no events on inproc."""

    def __init__(self, socket: zmq.Socket, address: str) -> None:
        self._socket, self._address = socket, address
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
        self._events = socket.get_monitor_socket(events)
        self.connected = False
        self.breaks = 0
        """How often an established connection has broken."""
        self.refused: float | None = None
        """When a connection was last refused: the peer did not accept the key, or is not a router."""
        self._idle: float | None = None
        """When the last connection ended, unless ZMQ has tried to connect since."""

    @property
    def fd(self) -> int:
        """A file descriptor that becomes readable when there are events."""
        return self._events.FD

    @property
    def is_idle(self) -> bool:
        """Whether `look` is to be called after IDLE_SECONDS even if there are no events."""
        return self._idle is not None

    def look(self, now: float) -> bool:
        """Read the events, and connect again if ZMQ has given up. Returns whether a connection has broken, was refused,
        or was made again since the last call."""
        broken = self.read_events(now)
        if self._idle is not None and now - self._idle >= IDLE_SECONDS:
            self._idle = None
            connect_again(self._socket, self._address)
            broken = True
        return broken

    def read_events(self, now: float) -> bool:
        """Read the events so far. Returns whether a connection has broken or was refused."""
        broken = False
        while is_readable(self._events):
            event = recv_monitor_message(self._events)["event"]
            if event == zmq.EVENT_DISCONNECTED:
                broken = True
                self.breaks += self.connected
                self.refused = self.refused if self.connected else now
            self._idle = now if event == zmq.EVENT_DISCONNECTED else None
            self.connected = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
        return broken

    def close(self) -> None:
        """To be called before the monitored socket is closed."""
        self._socket.disable_monitor()
        self._events.close(0)
