"""The order of eviction by what each context waits for, and how long such contexts took to return.

    arrived --> the context that it continues has returned: its time is learned, and what is left of it beside the new
                path (dropped thoughts, another answer) is superseded
    ended   --> it waits for somebody: a person, or a tool, of which the front end says the name

Contexts are found by their tokens, in a tree of paths that outlives what is cached. All that is kept is bounded.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from radixrt.messages import tenant_of
from radixrt.messages.namespace import namespaces_of
from radixrt.tree import RadixTree
from radixrt.worker.cache.return_times import EDGES, LONGEST_SECONDS, Kind, ReturnTimes, Wait
from radixrt.worker.cache.tier import Tokens

GRAIN = 16
"""Tokens in which paths are compared, at least."""
MAX_CONTEXTS = 16_384
"""Contexts whose returns are awaited. Of the oldest it is not known then whether they return."""
MAX_ENDED = 64
"""Requests that have ended last, of which it may still be said what they wait for."""
OVERLAP = 8
"""Tokens of the paths that are known, as a multiple of what the cache holds."""
CONTINUES = 0.5
"""A request that shares at least this much of a context's tokens continues it. One that shares less begins anew beside
it, as after a compaction, or for a subagent."""
RUNNING, SUPERSEDED, BRANCHED = "running", "superseded", "branched"
_PACE = 0.3
"""Weight of the last turn in the pace of a conversation."""


@dataclass(slots=True)
class _Context:
    """One turn of a conversation; `pace`, seconds between its turns, is 0 for the first. The first `shared` tokens it
    has in common with others: who has no more than these does not come from it. `running` counts from its arrival on;
    `waiting`, of that `kind`, from when it ended or a request branched off it."""

    tenant: str
    tokens: int
    pace: float
    shared: int
    kind: Kind
    running: Wait
    waiting: Wait | None = None

    @property
    def since(self) -> float:
        return (self.waiting or self.running).since

    @property
    def parted(self) -> bool:
        """Whether its conversation goes on elsewhere, so that it waits for nobody."""
        return self.kind in ((BRANCHED,), (SUPERSEDED,))


@dataclass(slots=True)
class _Ended:
    """What has ended just now: the number of its context, and its path, int32 bytes."""

    number: int
    namespace: str
    ids: bytes


class ReturnOrder:
    """Marks contexts in `trees`, those of the device and of host memory, which together hold `room` tokens. Paths are
    compared in pieces of `grain` tokens. Requests are named by their ids; times are seconds of one clock."""

    def __init__(self, trees: Sequence[RadixTree], room: int, grain: int = GRAIN) -> None:
        self.times = ReturnTimes()
        self._trees = trees
        self._grain = grain
        self._paths = RadixTree(grain)
        self._max_tokens = OVERLAP * room
        self._contexts: OrderedDict[int, _Context] = OrderedDict()
        """Those that run, or whose return is awaited, in order of arrival, by their values in `_paths`."""
        self._last = 0
        self._running: dict[int, int] = {}
        self._ended: OrderedDict[int, _Ended] = OrderedDict()

    def arrived(self, id: int, namespace: str, tokens: Tokens, now: float) -> None:
        """A request has arrived; nothing of it is inserted yet."""
        for tree in self._trees:
            tree.advance(now)
        self._expire(now)
        ids = np.frombuffer(tokens, np.int32)
        match = self._paths.match(namespace, ids)
        before, at = None, match.length
        if at:
            number = int(np.frombuffer(match.values(at - self._grain), np.int32)[0])
            before = self._contexts.get(number)
        pace, shared, tenant = 0.0, at, tenant_of(namespace)
        if before is not None and at <= before.shared:
            before = None
        if before is not None and at >= CONTINUES * before.tokens:
            shared = before.shared
            if not before.parted:
                pace = _mean(before.pace, max(1.0, now - before.running.since))
            self.times.returned(before.running, now)
            if before.waiting is not None:
                self.times.returned(before.waiting, now)
            if at < before.tokens - self._grain:
                self._wait(before, (SUPERSEDED,), now)
                self._mark_beside(namespace, ids, at, before.kind, tenant, now)
            else:
                del self._contexts[number]
        elif before is not None and not before.parted:
            before.running.open = False
            self._wait(before, (BRANCHED,), now)
            self._mark_beside(namespace, ids, at, before.kind, tenant, now)
        kind: Kind = RUNNING, _step(pace)
        context = _Context(tenant, len(ids), pace, shared, kind, self.times.wait(tenant, kind, now))
        self._running[id] = self._remember(namespace, ids, context)

    def released(self, id: int, namespace: str, tokens: Tokens) -> None:
        """Nothing leases what a request has found or computed, although it runs."""
        self._mark(self._running[id], namespace, tokens)

    def ended(self, id: int, namespace: str, tokens: Tokens, why: str, generated: int, now: float) -> None:
        """A request has ended: its tokens, as far as they are cached; how many were generated; and `why`, such as
        "stop"."""
        number = self._running.pop(id, 0)
        context = self._contexts.get(number)
        if context is None or context.parted:
            return
        self._wait(context, (why, _step(context.pace) // 2, generated.bit_length()), now)
        self._mark(number, namespace, tokens)
        self._ended[id] = _Ended(number, namespace, np.frombuffer(tokens, np.int32).tobytes())
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def waits_for(self, id: int, name: str) -> None:
        """A request, which has ended just now, has called a tool of that name."""
        if (ended := self._ended.pop(id, None)) is None or (context := self._contexts.get(ended.number)) is None:
            return
        if not context.parted:
            self._wait(context, (f"tool {name}", *context.kind[1:]), context.since)
            self._mark(ended.number, ended.namespace, ended.ids)

    def delete(self, tenant: str) -> None:
        """Forget all that is known of a tenant."""
        for number in [number for number, context in self._contexts.items() if context.tenant == tenant]:
            self._forget(number)
        for id in [id for id, ended in self._ended.items() if tenant_of(ended.namespace) == tenant]:
            del self._ended[id]
        self._paths.remove_namespaces(namespaces_of(tenant))
        self.times.delete(tenant)

    def before_eviction(self, now: float) -> None:
        """Bring the order of all trees up to date."""
        if self.times.has_news:
            rates = self.times.rates().ravel().tolist()
            for tree in self._trees:
                tree.set_returns(EDGES, rates)
        for tree in self._trees:
            tree.advance(now)

    # ------------------------------------------------------------ contexts

    def _remember(self, namespace: str, tokens: np.ndarray, context: _Context) -> int:
        self._last = number = self._last % (2**31 - 2) + 1
        whole = len(tokens) - len(tokens) % self._grain
        with self._paths.lease(self._paths.match(namespace, tokens[:whole])) as lease:
            known = lease.length
            lease.assign(0, np.full(known // self._grain, number, np.int32))
            self._paths.insert(lease, tokens[known:whole], np.full((whole - known) // self._grain, number, np.int32))
        self._contexts[number] = context
        if len(self._contexts) > MAX_CONTEXTS:
            self._forget(next(iter(self._contexts)))
        if self._paths.tokens > self._max_tokens:
            self._paths.evict(self._paths.tokens - self._max_tokens)
        return number

    def _expire(self, now: float) -> None:
        self.times.advance(now)
        while self._contexts:
            number, context = next(iter(self._contexts.items()))
            if context.running.since + LONGEST_SECONDS > now:
                return
            self._forget(number)

    def _forget(self, number: int) -> None:
        context = self._contexts.pop(number)
        context.running.open = False
        if context.waiting is not None:
            context.waiting.open = False

    def _wait(self, context: _Context, kind: Kind, since: float) -> None:
        if context.waiting is not None:
            context.waiting.open = False
        context.kind = kind
        context.waiting = self.times.wait(context.tenant, kind, since)

    # ------------------------------------------------------------ marks

    def _mark(self, number: int, namespace: str, tokens: Tokens) -> None:
        if (context := self._contexts.get(number)) is not None:
            row = self.times.row(context.tenant, context.kind)
            for tree in self._trees:
                tree.mark(namespace, tokens, row, context.since)

    def _mark_beside(self, namespace: str, tokens: np.ndarray, at: int, kind: Kind, tenant: str, now: float) -> None:
        """Mark what follows the first `at` tokens of a path on the latest other path."""
        row = self.times.row(tenant, kind)
        for tree in self._trees:
            found = min(at, tree.match(namespace, tokens).length)
            if other := tree.continuation(namespace, tokens, found, len(tokens) + self._max_tokens):
                tree.mark(namespace, tokens[:found].tobytes() + other, row, now)


def _mean(pace: float, seconds: float) -> float:
    return seconds if not pace else math.exp(_PACE * math.log(seconds) + (1 - _PACE) * math.log(pace))


def _step(seconds: float) -> int:
    return int(seconds).bit_length()
