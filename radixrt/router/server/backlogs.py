"""How many bytes wait for each client of a socket, and which clients do not read.

ZMQ limits its queues by messages, and does not tell what they hold. But it tells when it is done with a message: so
every MARK_BYTES one is a mark, and once it is done with, so are the bytes before it. They are then in the kernel's
buffers, a few MB for each connection, or were read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

MARK_BYTES = 256 << 10
"""A mark is sent after so many bytes. Less than this may wait uncounted."""
MAX_UNREAD_BYTES = 64 << 20
"""The most bytes that wait for a client; a single message may have more."""
MAX_TENANT_UNREAD_BYTES = 128 << 20
"""The most bytes that wait for all clients of a tenant. Beyond that only a small message is sent, to one for which
nothing waits."""
STALLED_SECONDS = 5.0
"""A client for which more would wait does not read if nothing has left for so long."""
UNREAD_SECONDS = 20.0
"""Nor does one for which anything waits, if nothing of it has left for so long. Less than the time after which its
connection is closed anyway (`wire.event_loop.UNREAD_MILLISECONDS`)."""
IDLE_SECONDS = 600.0
"""A client for which nothing waits is forgotten after so long without a message to it."""

Left = Callable[[], bool]
"""Whether a message has left."""


class Backlog:
    """What waits for one client."""

    __slots__ = ("exceeded", "gone", "key", "marks", "moved", "tenant", "unmarked", "waiting")

    def __init__(self) -> None:
        self.key: str | None = None
        """The API key of its messages; None before the first."""
        self.tenant: str | None = None
        """None as well if it has used keys of several tenants, as a front end does."""
        self.unmarked = 0
        """Bytes since the last mark."""
        self.marks: deque[tuple[int, Left]] = deque()
        """Bytes up to each mark that has not left yet, since the one before."""
        self.waiting = 0
        """Their sum."""
        self.moved = time.monotonic()
        """When something left last, or began to wait."""
        self.exceeded = False
        """Whether a message was refused since something waits."""
        self.gone = False
        """Whether the client was disconnected."""

    def mark(self, size: int, left: Left) -> None:
        """A mark was sent, with `size` bytes up to it."""
        if not self.marks:
            self.moved = time.monotonic()
        self.marks.append((size, left))
        self.waiting += size
        self.unmarked = 0

    def settle(self) -> None:
        """Forget what has left."""
        while self.marks and self.marks[0][1]():
            self.waiting -= self.marks.popleft()[0]
            self.moved = time.monotonic()
            self.exceeded = self.exceeded and bool(self.marks)

    def is_stalled(self, now: float) -> bool:
        """Whether the client does not read."""
        return (
            bool(self.marks)
            and not self.gone
            and now - self.moved > (STALLED_SECONDS if self.exceeded else UNREAD_SECONDS)
        )


class Backlogs:
    """The backlogs of all clients of a socket."""

    def __init__(self) -> None:
        self._all: dict[bytes, Backlog] = {}
        self._waiting: dict[bytes, Backlog] = {}
        """Those with marks that had not left when they were last looked at."""

    def of(self, client: bytes) -> Backlog:
        """The backlog of a client."""
        found = self._all.get(client)
        if found is None:
            found = self._all[client] = Backlog()
        return found

    def admits(self, client: bytes, backlog: Backlog, size: int) -> bool:
        """Whether `size` more bytes may wait for a client."""
        self._settle()
        waiting = backlog.waiting
        if waiting and waiting + size > MAX_UNREAD_BYTES:
            return False
        self._waiting[client] = backlog
        total = sum(one.waiting for one in self._waiting.values() if one.tenant == backlog.tenant)
        small = not waiting and size < 2 * MARK_BYTES
        return small or not total or total + size <= MAX_TENANT_UNREAD_BYTES

    def stalled(self) -> Iterator[tuple[bytes, Backlog]]:
        """The clients that do not read. Forgets those that have been idle for long."""
        self._settle()
        now = time.monotonic()
        for client, backlog in list(self._waiting.items()):
            if backlog.is_stalled(now):
                yield client, backlog
        for client in [
            one for one, it in self._all.items() if not it.marks and (it.gone or now - it.moved > IDLE_SECONDS)
        ]:
            del self._all[client]

    def _settle(self) -> None:
        for client, backlog in list(self._waiting.items()):
            backlog.settle()
            if not backlog.marks:
                del self._waiting[client]
