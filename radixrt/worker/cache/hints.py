"""Does what clients ask of the cache (`messages.CacheVerb`), for paths of tokens, and says what became of it.

    CacheHint, or a request that ends --> Hints --pin--------------> Pins
                                                --retain-----------> Priorities, of the device and of the tier below
                                                --demote, prefetch-> PrefixCache <-> the tier below
                                                --share------------> a store that other workers read
                                                --delete-----------> all of them

Integers only. Each hint costs time in proportion to its path, and moves at most a tenant's share of the pages. How many
a tenant may give is for the router to say.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from radixrt.messages import TOKEN_BYTES, CacheAction, CacheResult, Output, Run, tenant_of
from radixrt.worker.cache.prefix_cache import PrefixCache
from radixrt.worker.cache.tier import Tier

MAX_COMING, COMING_SECONDS = 64, 60.0
"""The most paths that are read from further below, and for how long each is waited for."""
MAX_SECONDS = 86_400.0
"""Of a pin or a retention."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a hint: for `tokens` tokens it is as its verb says."""

    result: CacheResult
    tokens: int = 0
    reason: str = ""


@dataclass(slots=True)
class Coming:
    """A path that is being read to the tier below, and is to go on to the device."""

    namespace: str
    path: bytes
    version: int
    """Of the tier below, when it was last looked at."""
    until: float
    """When nobody waits for it any more."""


class Hints:
    """The hints for one cache."""

    def __init__(self, prefixes: PrefixCache, tier: Tier) -> None:
        self._prefixes = prefixes
        self._tier = tier
        self._size = prefixes.page_size
        self._wanted: dict[int, tuple[Run, list[int]]] = {}
        """Requests with hints for when they have ended, and the tokens that they have generated so far."""
        self._coming: list[Coming] = []
        self.leaving: set[str] = set()
        """Tenants whose cache is deleted as far as running requests allow, as these end."""

    # ------------------------------------------------------------ requests

    def want(self, run: Run) -> None:
        """Remember a request that has hints, until it ends."""
        if run.cache:
            self._wanted[run.id] = run, []

    def take(self, outputs: Iterable[Output], now: float) -> None:
        """Requests have gained tokens, or have ended."""
        if not self._wanted:
            return
        for output in outputs:
            if output.finish == "error":
                self._wanted.pop(output.id, None)
            elif (known := self._wanted.get(output.id)) is not None:
                known[1].extend(output.tokens)
                if output.finish is not None:
                    self.settle(output.id, now)

    def settle(self, run_id: int, now: float) -> None:
        """A request has ended: do with its tokens what it asked for."""
        run, generated = self._wanted.pop(run_id, (None, []))
        if run is not None:
            ids = run.ids + array("i", generated).tobytes()
            for action in run.cache:
                self.act(run.namespace, ids, action, now)

    def drop(self, run_id: int) -> None:
        """A request was refused or has failed: forget what it asked for."""
        self._wanted.pop(run_id, None)

    # ------------------------------------------------------------ hints

    def act(self, namespace: str, ids: bytes, action: CacheAction, now: float) -> Outcome:
        """Do what an action says with a path, int32 bytes; `now` is a monotonic clock's."""
        total = len(ids) // TOKEN_BYTES
        start = action.token_start
        stop = total if action.token_end is None else min(action.token_end, total)
        if action.verb == "delete":
            return Outcome("refused", reason="what is deleted is all of a tenant's")
        if start >= stop:
            return Outcome("refused", reason="the range of tokens is empty")
        path = ids[: stop * TOKEN_BYTES]
        if self._reach(namespace, path, deep=True) <= start:
            return Outcome("missing")
        seconds = MAX_SECONDS if action.seconds is None else min(action.seconds, MAX_SECONDS)
        match action.verb:
            case "pin":
                return self._judged(*self._pin(namespace, path, seconds, now), start, stop)
            case "retain":
                return self._judged(*self._retain(namespace, path, action.priority, seconds, now), start, stop)
            case "demote":
                return self._demote(namespace, path, start, stop)
            case "prefetch":
                return self._prefetch(namespace, path, start, stop)
            case "share":
                return self._share(namespace, path, start, stop)

    def delete(self, tenant: str, runs: bool) -> Outcome:
        """Remove all that a tenant has. If it has requests here (`runs`), what these lease goes as they end."""
        for id in [id for id, (run, _) in self._wanted.items() if tenant_of(run.namespace) == tenant]:
            del self._wanted[id]
        before = self._prefixes.cached_tokens
        self._prefixes.delete(tenant)
        if runs:
            self.leaving.add(tenant)
        tokens = max(0, before - self._prefixes.cached_tokens)
        return (
            Outcome("deferred", tokens, "running requests hold some of it until they end")
            if runs
            else Outcome("done", tokens)
        )

    def go_on_deleting(self, has_requests: Callable[[str], bool]) -> None:
        """Requests have ended: remove more of the tenants that are to be deleted. `has_requests` tells of a tenant
        whether it has any here."""
        for tenant in list(self.leaving):
            self._prefixes.delete(tenant)
            if not has_requests(tenant):
                self.leaving.discard(tenant)

    # ------------------------------------------------------------ verbs

    def _pin(self, namespace: str, path: bytes, seconds: float, now: float) -> tuple[int, str]:
        """Returns how many tokens of the path are pinned, and why there are no more."""
        pins, name = self._prefixes.pins, _name(namespace, path)
        self._prefixes.prefetch(namespace, path, pins.tenant_tokens)
        pins.release(name)
        held, known = pins.add(namespace, path, seconds, now, name), self._reach(namespace, path)
        return held, "" if held == known else f"a tenant's pins hold {pins.tenant_tokens} tokens at most"

    def _retain(self, namespace: str, path: bytes, priority: int, seconds: float, now: float) -> tuple[int, str]:
        priorities, name = self._prefixes.priorities, _name(namespace, path)
        priorities.expire(now)
        priorities.release(name)
        here = priorities.add(namespace, path, seconds, now, name, priority)
        below = self._tier.retain(namespace, path, priority, seconds, now, name)
        if here == self._prefixes.on_device(namespace, path):
            here = min(self._reach(namespace, path), max(here, below))
        most, known = priorities.tenant_tokens, self._reach(namespace, path)
        return here, "" if here == known else f"a tenant's retained paths hold {most} tokens at most"

    def _demote(self, namespace: str, path: bytes, start: int, stop: int) -> Outcome:
        if not self._tier.keeps:
            return Outcome("refused", reason="there is no tier below the device")
        self._prefixes.pins.release(_name(namespace, path))
        self._prefixes.demote(namespace, path, start)
        left, reach = self._prefixes.on_device(namespace, path), self._reach(namespace, path)
        tokens = max(0, reach - max(left, start))
        if left <= start and reach > start:
            return self._judged(reach, "", start, stop)
        why = "others use it, or go on from it" if left > start else "there was no room below"
        return Outcome("clipped" if tokens else "refused", tokens, why)

    def _prefetch(self, namespace: str, path: bytes, start: int, stop: int) -> Outcome:
        reach = self._reach(namespace, path)
        here = self._bring(namespace, path)
        if len(self._coming) < MAX_COMING and self._tier.prefetch(namespace, path, stop, reach):
            self._coming.append(Coming(namespace, path, self._tier.version, time.monotonic() + COMING_SECONDS))
            return Outcome("deferred", max(0, here - start), "it is being read")
        return self._judged(here, "there was no room" if here < reach else "", start, stop)

    def _bring(self, namespace: str, path: bytes) -> int:
        """Copy to the device what is in host memory. Returns how many tokens of the path the device has then."""
        return self._prefixes.prefetch(namespace, path, self._prefixes.pins.tenant_tokens)

    def go_on_prefetching(self) -> None:
        """Copy to the device what has come from further below."""
        now, version = time.monotonic(), self._tier.version
        for one in list(self._coming):
            if one.version != version:
                one.version = version
                reach = self._reach(one.namespace, one.path)
                if self._prefixes.on_device(one.namespace, one.path) < reach:
                    self._bring(one.namespace, one.path)
                if reach >= self._reach(one.namespace, one.path, deep=True):
                    one.until = now
            if now >= one.until:
                self._coming.remove(one)

    def _share(self, namespace: str, path: bytes, start: int, stop: int) -> Outcome:
        there = self._tier.share(namespace, path)
        if there is None:
            return Outcome("refused", reason="workers share no store on disk")
        if there < self._reach(namespace, path) // self._size * self._size:
            return Outcome("deferred", max(0, there - start), "it is being written")
        return self._judged(there, "", start, stop)

    def _judged(self, upto: int, why: str, start: int, stop: int) -> Outcome:
        """The outcome if the first `upto` tokens of a path are as asked for, of the range [start, stop)."""
        tokens = max(0, upto - start)
        if upto >= (stop - 1) // self._size * self._size:
            return Outcome("done", tokens)
        if not tokens:
            return Outcome("refused", reason=why)
        return Outcome("clipped", tokens, why or "no more of it is cached")

    def _reach(self, namespace: str, path: bytes, deep: bool = False) -> int:
        """Tokens of a path that are cached, on the device or below; if `deep`, also what has to come to the tier below
        before."""
        reach = self._tier.deep_reach if deep else self._tier.reach
        return reach(namespace, path, self._prefixes.on_device(namespace, path))


def _name(namespace: str, path: bytes) -> int:
    """The name of a path's pin and retention: a later hint for the same path takes the place of the former. Negative,
    as others give names that are not."""
    return -1 - abs(hash((namespace, path)))
