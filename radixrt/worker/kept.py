"""Contexts of requests that have ended, kept for a moment from those that wait: who asked often asks again.

An agent's next turn comes when its client has read the answer and a tool has run. Where contexts are more than the
cache holds, what it left is by then just what can be evicted, since all else is leased by those that run: whoever is
admitted in between takes it, and the next turn computes all of it anew, at the expense of somebody else's.

    ends --keep--> leased here --come--> waits --admitted--> leased by the next turn
                        |                  |
                        +---- after SECONDS, or when pages run out ----> evictable like all the rest

Only while others wait, and while enough of them come back.
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
"""For which a context is kept: most tools have answered by then."""
MOST = 256
"""Contexts that are kept, or remembered; each costs a look at a request that comes."""
OVERLAP = 4
"""Of all that are remembered: their tokens, by those that the tree may hold."""
LEAST = 0.25
"""Of those that ended lately, the part that must have come back for contexts to be kept."""
_WEIGHT = 1 / 32
_TAIL = 64
"""Bytes of a prompt that are compared before all of it is."""
_OWNER = 0


@dataclass(slots=True, eq=False)
class _Ended:
    """`ids` are int32 bytes, `prompt` of them the prompt's; without a lease it is only remembered. `next` are the
    numbers of requests that wait and go on from it. It is `counted` when it is known of its prompt whether somebody has
    gone on from it: of several answers, one is enough."""

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
    """The contexts that are kept of one tree, which may hold `room` tokens."""

    def __init__(self, room: int) -> None:
        self.returning = LEAST - 0.01
        """The part of those that ended, while others waited, that came back in time; of late."""
        self._most_bytes = TOKEN_BYTES * OVERLAP * room
        self._bytes = 0
        self._ended: deque[_Ended] = deque()
        """In the order in which they expire."""
        self._paths: dict[str, OwnerTree] = {}
        """By tenant, what is leased here; where contexts overlap, once."""

    def __bool__(self) -> bool:
        return bool(self._ended)

    @property
    def by_tenant(self) -> dict[str, int]:
        """Tokens that are leased here for each that has any."""
        return {tenant: paths.tokens for tenant, paths in self._paths.items()}

    def tokens(self) -> int:
        """Tokens that are leased here; where tenants have the same, for each."""
        return sum(paths.tokens for paths in self._paths.values())

    def keep(self, request: Request, lease: Lease) -> None:
        """A request has ended, and others wait: take over its lease."""
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
        """A request comes: it may go on from one that has ended; if from several, from that with the longest prompt,
        and of several answers to it from that which it agrees with for the longest."""
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
        """A request runs, and has its own lease of what it goes on from."""
        for ended in self._ended:
            if request.number in ended.next:
                ended.next.remove(request.number)
                return None if ended.next else self._remove(ended)

    def left(self, request: Request) -> None:
        """A request does not wait any more, and has not run: another may go on from where it would have."""
        for ended in self._ended:
            ended.next.discard(request.number)

    def expire(self) -> None:
        """Let go what has been kept for long enough."""
        now = time.monotonic()
        while self._ended and self._ended[0].until <= now:
            ended = self._ended[0]
            if not ended.counted:
                self.returning -= _WEIGHT * self.returning
                self._count(ended)
            self._remove(ended)

    def release_oldest(self) -> bool:
        """Make the context evictable that would expire first. False if there is none."""
        return any(map(self._release, self._ended))

    def leases(self, spared: frozenset[str] = frozenset()) -> list[Lease]:
        """Of all contexts that are kept, but for those of tenants that are `spared`; the oldest first."""
        return [one.lease for one in self._ended if one.lease is not None and one.tenant not in spared]

    def release_until(self, enough: Callable[[], bool], leases: Sequence[Lease]) -> None:
        """Make the contexts of these leases evictable, the oldest first, until it is `enough`."""
        going = set(leases)
        for ended in self._ended:
            if ended.lease in going and not enough():
                self._release(ended)

    def release_along(self, namespace: str, ids: bytes, keep: int) -> None:
        """Make evictable what ends on a path, beyond its first `keep` tokens, or behind it."""
        for ended in self._ended:
            if ended.lease is not None and ended.namespace == namespace:
                if ends_along(ended.ids[: TOKEN_BYTES * ended.lease.length], ids, keep):
                    self._release(ended)

    def clear(self) -> None:
        """Keep nothing."""
        while self._ended:
            self._remove(self._ended[0])

    def _count(self, ended: _Ended) -> None:
        """It is known of its prompt whether somebody has gone on from it."""
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
        """Whether it held anything."""
        lease, ended.lease = ended.lease, None
        if lease is None:
            return False
        paths = self._paths[ended.tenant]
        paths.remove(ended.namespace, ended.ids[: TOKEN_BYTES * lease.length], _OWNER)
        if not paths.tokens:
            del self._paths[ended.tenant]
        lease.release()
        return True
