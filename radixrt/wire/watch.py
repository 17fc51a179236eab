"""Whether a router is there, and what is said of it in the log."""

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
"""After which a router that does not answer is named in the log; again after twice as long each time, up to
MOST_SILENT_SECONDS."""
MOST_SILENT_SECONDS = 600.0
LOOK_SECONDS = 0.5
REFUSED_SECONDS = 3.0
"""For which who has refused a connection is taken to be there: longer than from one try to the next."""


class Watch:
    """A connection to `address` on which nothing is sent: whether somebody is there. For one thread. ValueError for a
    bad address."""

    def __init__(self, address: str) -> None:
        self._socket = open_socket()
        self._monitor = Monitor(self._socket, address)
        try:
            connect(self._socket, address)
        except BaseException:
            self.close()
            raise

    def look(self) -> bool:
        """Whether somebody is there now."""
        self._monitor.look(time.monotonic())
        return self.connected

    @property
    def connected(self) -> bool:
        return self._monitor.connected

    @property
    def refused(self) -> bool:
        """Somebody is there who does not take the key, or is no router."""
        last = self._monitor.refused
        return not self.connected and last is not None and time.monotonic() - last < REFUSED_SECONDS

    def close(self) -> None:
        """Idempotent."""
        if not self._socket.closed:
            self._monitor.close()
            self._socket.close(0)


class Presence:
    """Says in the log when a router is lost or does not answer, and when it does again."""

    def __init__(self, address: str, now: float) -> None:
        self._name = address.partition("#")[0]
        self._connected = self._missed = False
        self._due, self._wait = now + SILENT_SECONDS, SILENT_SECONDS

    def look(self, connected: bool, refused: bool, now: float) -> None:
        if self._connected and not connected:
            self._missed = True
            self._due, self._wait = now + SILENT_SECONDS, SILENT_SECONDS
            log.warning("the router at %s is lost", self._name)
        elif connected and self._missed:
            self._missed = False
            log.info("the router at %s is there", self._name)
        elif not connected and now >= self._due:
            self._missed = True
            self._wait = min(2 * self._wait, MOST_SILENT_SECONDS)
            self._due = now + self._wait
            why = "who listens is no router, or the key after # is wrong or missing" if refused else "nobody answers"
            log.warning("no router at %s: %s", self._name, why)
        self._connected = connected


@contextlib.contextmanager
def watched(router: str) -> Iterator[None]:
    """Inside, a thread says in the log what becomes of the router at an address."""
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
