"""Contexts of finished requests, kept for a moment while others wait: whoever asked is likely to ask again.

An agent's next turn comes when its client has read the answer and a tool has run. Where contexts exceed the cache, what
the last turn left is by then the first to be evicted, since everything else is leased by running requests: whoever is
admitted in between takes its pages, and the next turn has to compute its context again, at somebody else's expense.

    ends --keep--> leased here --come--> waits --admitted--> leased by the next turn
                        |                  |
                        +---- after SECONDS, or when pages run out ----> evictable like all the rest

Contexts are kept only while others wait, and only if enough of them are continued.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from radixrt.messages import TOKEN_BYTES
from radixrt.tree import Lease, OwnerTree, common_length
from radixrt.worker.pins import ends_along
from radixrt.worker.request import Request

SECONDS = 5.0
"""How long a context is kept; most tools have answered by then."""
MOST = 256
"""The most contexts that are kept or remembered: each is compared with every request that arrives."""
OVERLAP = 4
"""The most tokens of all remembered contexts together, as a multiple of what the tree may hold."""
LEAST = 0.25
"""Contexts are kept if at least this share of recent ones was continued."""
_WEIGHT = 1 / 32
_TAIL = 64
"""Last bytes of a prompt that are compared first, before all of it is."""
_OWNER = 0


@dataclass(slots=True, eq=False)
class _Ended:
    """The context of a finished request. `ids` are int32 bytes, of which the first `prompt` are the prompt's. Without a
    lease it is only remembered. `next` holds the numbers of waiting requests that continue it. It is `counted` once it
    is known whether its prompt was continued; of several answers to one prompt, one continuation is enough."""

    tenant: str
    namespace: str
    ids: bytes
    prompt: int
    until: float
    lease: Lease | None = None
    next: set[int] = field(default_factory=set)
    counted: bool = False

    def begins(self, ids: bytes) -> bool:
        """Whether a longer prompt begins with this one."""
        size = self.prompt
        tail = max(0, size - _TAIL)
        return size < len(ids) and ids[tail:size] == self.ids[tail:size] and ids.startswith(self.ids[:size])


class Kept:
    """The contexts that are kept in one tree, which may hold `room` tokens."""

    def __init__(self, room: int) -> None:
        self.returning = LEAST - 0.01
        """Moving average: the share of contexts, of requests that ended while others waited, that were continued in
        time."""
        self._most_bytes = TOKEN_BYTES * OVERLAP * room
        self._bytes = 0
        self._ended: deque[_Ended] = deque()
        """Sorted by when they expire."""
        self._paths: dict[str, OwnerTree] = {}
        """What is leased here, by tenant; overlaps count once."""

    def __bool__(self) -> bool:
        return bool(self._ended)

    @property
    def by_tenant(self) -> dict[str, int]:
        """Tokens that are leased here, for each tenant that has any."""
        return {tenant: paths.tokens for tenant, paths in self._paths.items()}

    def tokens(self) -> int:
        """Tokens that are leased here; what several tenants have counts for each."""
        return sum(paths.tokens for paths in self._paths.values())

    def keep(self, request: Request, lease: Lease) -> None:
        """Take over the lease of a request that has ended while others wait."""
        if not lease.length:
            return lease.release()
        ids = request.tokens[: max(lease.length, request.prompt_len)].tobytes()
        now = time.monotonic()
        ended = _Ended(request.tenant, request.namespace, ids, TOKEN_BYTES * request.prompt_len, now + SECONDS)
        self._lease(ended, ids[: TOKEN_BYTES * lease.length], lease)
        self._ended.append(ended)
        self._bytes += len(ids)
        if self.returning < LEAST:
            self._release(ended)
        while len(self._ended) > MOST or self._bytes > self._most_bytes:
            self._remove(self._ended[0])

    def come(self, request: Request) -> None:
        """Note that a request arrives, which may continue a context. If it could continue several, it counts for the
        one with the longest prompt and, of several answers to that prompt, for the one it agrees with furthest."""
        ids, found, most = b"", None, (0, 0)
        for ended in self._ended:
            if ended.namespace != request.namespace:
                continue
            ids = ids or request.tokens.tobytes()
            if ended.prompt >= most[0] and ended.begins(ids):
                agrees = ended.prompt, common_length(ended.ids, ids)
                if agrees > most:
                    found, most = ended, agrees
        if found is None:
            return
        found.next.add(request.number)
        found.until = time.monotonic() + SECONDS
        self._ended.remove(found)
        self._ended.append(found)
        if not found.counted:
            self.returning += _WEIGHT * (1 - self.returning)
            self._count(found)

    def admitted(self, request: Request) -> None:
        """Let go the context that a request continues: it runs now and has a lease of its own."""
        for ended in self._ended:
            if request.number in ended.next:
                ended.next.remove(request.number)
                return None if ended.next else self._remove(ended)

    def left(self, request: Request) -> None:
        """Note that a request was dropped while it waited: another may still continue its context."""
        for ended in self._ended:
            ended.next.discard(request.number)

    def expire(self) -> None:
        """Let go the contexts whose time is over."""
        now = time.monotonic()
        while self._ended and self._ended[0].until <= now:
            ended = self._ended[0]
            if not ended.counted:
                self.returning -= _WEIGHT * self.returning
                self._count(ended)
            self._remove(ended)

    def release_oldest(self) -> bool:
        """Make evictable the context that would expire first. False if there is none."""
        return any(map(self._release, self._ended))

    def leases(self, spared: frozenset[str] = frozenset()) -> list[Lease]:
        """Leases of all contexts, oldest first, except those of `spared` tenants."""
        return [one.lease for one in self._ended if one.lease is not None and one.tenant not in spared]

    def release_until(self, enough: Callable[[], bool], leases: Sequence[Lease]) -> None:
        """Make the contexts of these leases evictable, oldest first, until `enough` is true."""
        going = set(leases)
        for ended in self._ended:
            if ended.lease in going and not enough():
                self._release(ended)

    def release_along(self, namespace: str, ids: bytes, keep: int) -> None:
        """Make evictable the contexts that end on a path, beyond its first `keep` tokens, or continue it."""
        for ended in self._ended:
            if ended.lease is not None and ended.namespace == namespace:
                if ends_along(ended.ids[: TOKEN_BYTES * ended.lease.length], ids, keep):
                    self._release(ended)

    def clear(self) -> None:
        """Keep nothing."""
        while self._ended:
            self._remove(self._ended[0])

    def _count(self, ended: _Ended) -> None:
        """Mark all answers to a context's prompt as counted."""
        for other in self._ended:
            if other.namespace == ended.namespace and other.prompt == ended.prompt:
                other.counted = other.counted or other.ids.startswith(ended.ids[: ended.prompt])

    def _remove(self, ended: _Ended) -> None:
        self._release(ended)
        self._ended.remove(ended)
        self._bytes -= len(ended.ids)

    def _lease(self, ended: _Ended, path: bytes, lease: Lease) -> None:
        ended.lease = lease
        self._paths.setdefault(ended.tenant, OwnerTree()).add(ended.namespace, path, _OWNER)

    def _release(self, ended: _Ended) -> bool:
        """Release a context's lease. True if it had one."""
        lease, ended.lease = ended.lease, None
        if lease is None:
            return False
        paths = self._paths[ended.tenant]
        paths.remove(ended.namespace, ended.ids[: TOKEN_BYTES * lease.length], _OWNER)
        if not paths.tokens:
            del self._paths[ended.tenant]
        lease.release()
        return True
