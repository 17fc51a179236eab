"""Contexts of finished requests, protected from eviction for some seconds while other requests wait.

An agent's next turn comes when its client has read the answer and a tool has run. Where contexts exceed the cache, what
the last turn left is by then the first to be evicted, since everything else is leased by running requests: whoever is
admitted in between takes its pages, and the next turn has to compute its context again, at somebody else's expense.

    finished --keep--> leased here --arrived--> next turn waits --admitted--> leased by the next turn
                            |                        |
                            +---- after `seconds`, or when pages run out ----> evictable, and remembered for a while

Contexts are retained only while others wait, only if enough of them are continued, and only if there is little host
memory for evicted pages. For how long is learned from when next turns come: the tools of some agents take milliseconds,
those of others minutes. Each context that is lost makes others wait until it is computed again, meanwhile theirs are
lost, and soon nobody finds anything. If some are kept, these agents go on, and those who wait get their turn by age.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

from radixrt.messages import TOKEN_BYTES
from radixrt.tree import Lease, OwnerTree, common_length
from radixrt.worker.cache.pins import ends_along
from radixrt.worker.request import Request

SECONDS = 5.0, 10.0, 20.0, 40.0, 80.0
"""How long a context may be kept. It is remembered for the last of these."""
COVERED = 0.8
"""Contexts are retained for the first of SECONDS within which this share of next turns comes, of those that come at
all."""
MAX_CONTEXTS = 256
"""The most contexts that are retained or remembered: each is compared with every request that arrives."""
OVERLAP = 4
"""The most tokens of all remembered contexts together, as a multiple of what the tree may hold."""
MIN_CONTINUATION_RATE = 0.25
"""Contexts are retained only if at least this share of recent ones was continued."""
_WEIGHT = 1 / 32
"""Of each context in the moving averages."""
_TAIL = 64
"""Prompts are compared by this many last bytes first, since most differ there."""
_OWNER = 0


@dataclass(slots=True, eq=False)
class _Ended:
    """The context of a finished request.

    ids      its tokens as int32 bytes, of which the first `prompt` bytes are the prompt
    since    when it ended or, if later, when the last request came that continues it
    lease    None if the context is only remembered, and not protected
    next     `Request.number` of the waiting requests that continue it
    counted  whether it is part of `continuation_rate`; several answers to one prompt count once
    came     whether it is part of `seconds`
    """

    tenant: str
    namespace: str
    ids: bytes
    prompt: int
    since: float
    lease: Lease | None = None
    next: set[int] = field(default_factory=set)
    counted: bool = False
    came: bool = False

    def begins(self, ids: bytes) -> bool:
        """Whether a longer prompt, int32 bytes, begins with this one's prompt."""
        size = self.prompt
        tail = max(0, size - _TAIL)
        return size < len(ids) and ids[tail:size] == self.ids[tail:size] and ids.startswith(self.ids[:size])


class RetainedContexts:
    """The retained contexts of one tree, which may hold `room` tokens."""

    def __init__(self, room: int) -> None:
        self.continuation_rate = MIN_CONTINUATION_RATE - 0.01
        """Moving average of the share of contexts that were continued within `seconds`."""
        self.seconds = SECONDS[0]
        """How long contexts are retained."""
        self._coming = [1.0, *[0.0] * (len(SECONDS) - 1)]
        """Moving average of the shares of next turns that came within each of SECONDS, and not within the one before.
        """
        self._max_bytes = TOKEN_BYTES * OVERLAP * room
        self._bytes = 0
        self._ended: deque[_Ended] = deque()
        self._past: deque[_Ended] = deque()
        """Those that are not retained any more. Both are sorted by `since`."""
        self._paths: dict[str, OwnerTree] = {}
        """By tenant, the paths that are leased here; tokens in several paths count once."""

    def __bool__(self) -> bool:
        return bool(self._ended or self._past)

    def _all(self) -> Iterator[_Ended]:
        return chain(self._past, self._ended)

    @property
    def by_tenant(self) -> dict[str, int]:
        """Tokens that are leased here, by tenant; tenants without any are left out."""
        return {tenant: paths.tokens for tenant, paths in self._paths.items()}

    def tokens(self) -> int:
        """Tokens that are leased here, summed over tenants."""
        return sum(paths.tokens for paths in self._paths.values())

    def keep(self, request: Request, lease: Lease) -> None:
        """Take over the lease of a request that has ended while others wait."""
        if not lease.length:
            return lease.release()
        ids = request.tokens[: max(lease.length, request.prompt_len)].tobytes()
        now = time.monotonic()
        ended = _Ended(request.tenant, request.namespace, ids, TOKEN_BYTES * request.prompt_len, now)
        self._lease(ended, ids[: TOKEN_BYTES * lease.length], lease)
        self._ended.append(ended)
        self._bytes += len(ids)
        if self.continuation_rate < MIN_CONTINUATION_RATE:
            self._release(ended)
        while len(self._ended) + len(self._past) > MAX_CONTEXTS or self._bytes > self._max_bytes:
            self._remove(next(self._all()))

    def arrived(self, request: Request) -> None:
        """Record a new request, and extend the context that it continues, if any. Of several, that is the one with the
        longest prompt and, among answers to the same prompt, the one with the longest common prefix."""
        ids, context, longest = b"", None, (0, 0)
        for ended in self._all():
            if ended.namespace != request.namespace:
                continue
            ids = ids or request.tokens.tobytes()
            if ended.prompt >= longest[0] and ended.begins(ids):
                common = ended.prompt, common_length(ended.ids, ids)
                if common > longest:
                    context, longest = ended, common
        if context is None:
            return
        now = time.monotonic()
        if not context.came:
            context.came = True
            self._learn(now - context.since)
        context.next.add(request.number)
        context.since = now
        (self._ended if context in self._ended else self._past).remove(context)
        self._ended.append(context)
        if not context.counted:
            self.continuation_rate += _WEIGHT * (1 - self.continuation_rate)
            self._count(context)

    def _learn(self, seconds: float) -> None:
        """A next turn came so many seconds after the one before had ended."""
        self._coming = [(1 - _WEIGHT) * share for share in self._coming]
        self._coming[min(bisect_left(SECONDS, seconds), len(SECONDS) - 1)] += _WEIGHT
        covered = accumulate(self._coming)
        self.seconds = next(most for most, share in zip(SECONDS, covered, strict=True) if share >= COVERED)

    def admitted(self, request: Request) -> None:
        """A request was admitted, and has a lease of its own: drop the context that it continues."""
        for ended in self._all():
            if request.number in ended.next:
                ended.next.remove(request.number)
                return None if ended.next else self._remove(ended)

    def left(self, request: Request) -> None:
        """A request was aborted while it waited: another may still continue its context."""
        for ended in self._all():
            ended.next.discard(request.number)

    def expire(self) -> None:
        """Release the contexts that have been kept long enough, and drop those that have been remembered so."""
        now = time.monotonic()
        while self._ended and self._ended[0].since + self.seconds <= now:
            ended = self._ended.popleft()
            if not ended.counted:
                self.continuation_rate -= _WEIGHT * self.continuation_rate
                self._count(ended)
            self._release(ended)
            self._past.append(ended)
        while self._past and self._past[0].since + SECONDS[-1] <= now:
            self._remove(self._past[0])

    def release_oldest(self) -> bool:
        """Release the lease of the oldest context. False if there is none."""
        return any(map(self._release, self._ended))

    def leases(self, spared: frozenset[str] = frozenset()) -> list[Lease]:
        """Leases of all contexts, oldest first, except those of `spared` tenants."""
        return [one.lease for one in self._ended if one.lease is not None and one.tenant not in spared]

    def release_until(self, enough: Callable[[], bool], leases: Sequence[Lease]) -> None:
        """Release some of these leases, oldest first, until `enough` returns true."""
        going = set(leases)
        for ended in self._ended:
            if ended.lease in going and not enough():
                self._release(ended)

    def release_along(self, namespace: str, ids: bytes, keep: int) -> None:
        """Release the leases that a removal of a path beyond its first `keep` tokens concerns (see `ends_along`)."""
        for ended in self._ended:
            if ended.lease is not None and ended.namespace == namespace:
                if ends_along(ended.ids[: TOKEN_BYTES * ended.lease.length], ids, keep):
                    self._release(ended)

    def release_tenant(self, tenant: str) -> None:
        """Drop all contexts of a tenant."""
        for ended in [one for one in self._all() if one.tenant == tenant]:
            self._remove(ended)

    def clear(self) -> None:
        """Drop all contexts."""
        while self:
            self._remove(next(self._all()))

    def _count(self, ended: _Ended) -> None:
        """Mark all contexts with the same prompt as counted."""
        for other in self._all():
            if other.namespace == ended.namespace and other.prompt == ended.prompt:
                other.counted = other.counted or other.ids.startswith(ended.ids[: ended.prompt])

    def _remove(self, ended: _Ended) -> None:
        self._release(ended)
        (self._ended if ended in self._ended else self._past).remove(ended)
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
