"""Logs when a router cannot be reached, and when it can again."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from radixrt.wire.monitor import Monitor
from radixrt.wire.sockets import connect, open_socket

log = logging.getLogger("radixrt.roles")

SILENT_SECONDS = 5.0
"""A router that cannot be reached is logged after this long, then again after twice as long each time, up to
MAX_SILENT_SECONDS."""
MAX_SILENT_SECONDS = 600.0
LOOK_SECONDS = 0.5
"""Time between two checks."""
REFUSED_SECONDS = 3.0
"""After a refused connection the peer counts as present for this long, which is longer than between two attempts."""


class Watch:
    """A connection to `address`, on which nothing is sent, to check whether a router listens there. For one thread.
    Raises ValueError for an invalid address."""

    def __init__(self, address: str) -> None:
        self._socket = open_socket()
        self._monitor = Monitor(self._socket, address)
        try:
            connect(self._socket, address)
        except BaseException:
            self.close()
            raise

    def look(self) -> bool:
        """Read the connection's events. Returns whether it is established."""
        self._monitor.look(time.monotonic())
        return self.connected

    @property
    def connected(self) -> bool:
        return self._monitor.connected

    @property
    def refused(self) -> bool:
        """Whether a peer is there that does not accept the key, or is not a router."""
        last = self._monitor.refused
        return not self.connected and last is not None and time.monotonic() - last < REFUSED_SECONDS

    def close(self) -> None:
        """Idempotent."""
        if not self._socket.closed:
            self._monitor.close()
            self._socket.close(0)


class Presence:
    """Logs when a router is lost or cannot be reached, and when it can again."""

    def __init__(self, address: str, now: float) -> None:
        self._name = address.partition("#")[0]
        self._connected = self._missed = False  # missed: the log says that it cannot be reached
        self._due, self._wait = now + SILENT_SECONDS, SILENT_SECONDS

    def look(self, connected: bool, refused: bool, now: float) -> None:
        """Take the state of a `Watch`, and log if it has changed or a warning is due."""
        if self._connected and not connected:
            self._missed = True
            self._due, self._wait = now + SILENT_SECONDS, SILENT_SECONDS
            log.warning("the router at %s is lost", self._name)
        elif connected and self._missed:
            self._missed = False
            log.info("the router at %s is there", self._name)
        elif not connected and now >= self._due:
            self._missed = True
            self._wait = min(2 * self._wait, MAX_SILENT_SECONDS)
            self._due = now + self._wait
            why = "who listens is no router, or the key after # is wrong or missing" if refused else "nobody answers"
            log.warning("no router at %s: %s", self._name, why)
        self._connected = connected


@contextlib.contextmanager
def watched(router: str) -> Iterator[None]:
    """In this context, a thread logs when the router at an address cannot be reached, and when it can again."""
    stopped = threading.Event()

    def watch() -> None:
        link, presence = Watch(router), Presence(router, time.monotonic())
        while not stopped.wait(LOOK_SECONDS):
            presence.look(link.look(), link.refused, time.monotonic())
        link.close()

    thread = threading.Thread(target=watch, name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
