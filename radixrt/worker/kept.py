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
from dataclasses import dataclass

from radixrt.tree import Lease
from radixrt.worker.request import Request

SECONDS = 5.0
"""For which a context is kept: most tools have answered by then."""
MOST = 256
"""Contexts that are kept, or remembered; each costs a look at a request that comes."""
LEAST = 0.25
"""Of those that ended lately, the part that must have come back for contexts to be kept."""
_WEIGHT = 1 / 32
_TAIL = 64
"""Bytes of a prompt that are compared before all of it is."""


@dataclass(slots=True, eq=False)
class _Ended:
    """`prompt` is int32 bytes; without a lease it is only remembered. `next` is the request that goes on from it."""

    tenant: str
    namespace: str
    prompt: bytes
    until: float
    lease: Lease | None
    next: int | None = None

    def release(self) -> bool:
        """Whether it held anything."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.release()
        return lease is not None


class Kept:
    """The contexts that are kept of one tree."""

    def __init__(self) -> None:
        self.returning = 0.5
        """The part of those that ended, while others waited, that came back in time; of late."""
        self._ended: deque[_Ended] = deque()
        """In the order in which they expire."""

    def __bool__(self) -> bool:
        return bool(self._ended)

    def keep(self, request: Request, lease: Lease) -> None:
        """A request has ended, and others wait: take over its lease."""
        if len(self._ended) >= MOST:
            self._forget(self._ended.popleft())
        prompt = request.tokens[: request.prompt_len].tobytes()
        ended = _Ended(request.tenant, request.namespace, prompt, time.monotonic() + SECONDS, lease)
        if self.returning < LEAST:
            ended.release()
        self._ended.append(ended)

    def come(self, request: Request) -> None:
        """A request comes: it may go on from one that has ended."""
        if not self._ended:
            return
        tokens = memoryview(request.tokens).cast("B")
        for ended in self._ended:
            size = len(ended.prompt)
            if (
                ended.next is None
                and size < len(tokens)
                and tokens[max(0, size - _TAIL) : size] == ended.prompt[-_TAIL:]
                and tokens[:size] == ended.prompt
                and ended.namespace == request.namespace
            ):
                ended.next, ended.until = request.id, time.monotonic() + SECONDS
                self._ended.remove(ended)
                self._ended.append(ended)
                self.returning += _WEIGHT * (1 - self.returning)
                return

    def admitted(self, request: Request) -> None:
        """A request runs, and has its own lease of what it goes on from."""
        for ended in self._ended:
            if ended.next == request.id:
                ended.release()
                self._ended.remove(ended)
                return

    def expire(self) -> None:
        """Let go what has been kept for long enough."""
        now = time.monotonic()
        while self._ended and self._ended[0].until <= now:
            self._forget(self._ended.popleft())

    def tokens(self, spared: str | None = None) -> int:
        """Of the contexts that are kept, but for the tenant `spared`; what several share counts for each."""
        return sum(e.lease.length for e in self._ended if e.lease is not None and e.tenant != spared)

    def release_oldest(self, spared: str | None = None) -> bool:
        """Make the context evictable that has been kept for the longest time, of those that are not of the tenant
        `spared`. False if there is none."""
        return any(ended.tenant != spared and ended.release() for ended in self._ended)

    def clear(self) -> None:
        """Keep nothing."""
        for ended in self._ended:
            ended.release()
        self._ended.clear()

    def _forget(self, ended: _Ended) -> None:
        ended.release()
        if ended.next is None:
            self.returning -= _WEIGHT * self.returning
