"""How many bytes wait for clients that do not read: in the buffers of their connections, and to be written to them.

Each connection has a limit of its own (`outbox.MAX_BACKLOG`) and a timeout (`protocol`), but a tenant may have any
number of connections.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("radixrt.frontend")

UNREAD = "radixrt.unread"
"""A key of a scope's `extensions`: the Claim of its connection."""
MAX_TENANT_UNREAD_BYTES = 128 << 20
"""The most bytes that wait on all connections of a tenant. Beyond that the one with most is closed, unless it is the
only one."""


class Claim:
    """The bytes that wait on one connection. `size` returns those in its buffer now, `close` closes it."""

    __slots__ = ("_close", "_size", "_unread", "buffered", "queued", "tenant")

    def __init__(self, unread: Unread, size: Callable[[], int], close: Callable[[], object]) -> None:
        self._unread = unread
        self._size = size
        self._close = close
        self.tenant = ""
        """Of the request that is being answered."""
        self.buffered = self.queued = 0
        """Bytes in the connection's buffer when last looked at, and those that are to be written after them."""

    @property
    def total(self) -> int:
        return self.buffered + self.queued

    def look(self) -> None:
        """The connection's buffer is full, or empty again."""
        self._unread.change(self, self._size(), self.queued)

    def queue(self, size: int) -> None:
        """So many bytes wait for the buffer to be empty."""
        self._unread.change(self, self.buffered, size)

    def move(self, tenant: str) -> None:
        """The next request on the connection is of another tenant."""
        buffered, queued = self.buffered, self.queued
        self._unread.change(self, 0, 0)
        self.tenant = tenant
        self._unread.change(self, buffered, queued)

    def end(self) -> None:
        """The connection is closed."""
        self._unread.change(self, 0, 0)
        self._unread, self._size, self._close = Unread(), _nothing, _nothing  # they refer back to the connection

    def drop(self, waiting: int) -> None:
        """Close the connection, as the client does not read what waits."""
        whose = f" of tenant {self.tenant}" if self.tenant else ""
        log.warning("a client%s does not read its answers: disconnected, %.1f MB waited", whose, waiting / 1e6)
        self._close()


class Unread:
    """The claims of all connections for which bytes wait."""

    def __init__(self) -> None:
        self._claims: dict[str, set[Claim]] = {}
        """By tenant."""
        self._totals: dict[str, int] = {}

    def change(self, claim: Claim, buffered: int, queued: int) -> None:
        """Set what waits on a connection. May close it, or another one of its tenant."""
        if not claim.total and not buffered and not queued:
            return
        own = self._claims.setdefault(claim.tenant, set())
        self._add(claim, buffered, queued)
        if self._totals.get(claim.tenant, 0) > MAX_TENANT_UNREAD_BYTES and len(own) > 1:
            self._reduce(claim.tenant, own)

    def total(self, tenant: str) -> int:
        """The bytes that wait for a tenant's clients."""
        return self._totals.get(tenant, 0)

    def _add(self, claim: Claim, buffered: int, queued: int) -> None:
        tenant, own = claim.tenant, self._claims[claim.tenant]
        total = self._totals.get(tenant, 0) + buffered + queued - claim.total
        claim.buffered, claim.queued = buffered, queued
        if claim.total:
            own.add(claim)
        else:
            own.discard(claim)
        self._totals[tenant] = total
        if not own:
            del self._claims[tenant], self._totals[tenant]

    def _reduce(self, tenant: str, own: set[Claim]) -> None:
        """Close connections of a tenant until what waits is within the limit."""
        for claim in list(own):
            self._add(claim, claim._size(), claim.queued)
        while self._totals.get(tenant, 0) > MAX_TENANT_UNREAD_BYTES and len(own) > 1:
            most = max(own, key=lambda claim: claim.total)
            most.drop(most.total)
            self._add(most, 0, 0)


def _nothing() -> int:
    return 0
