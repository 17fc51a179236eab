"""Pins: leases, without a running request, that protect prefixes from eviction for a time after their request has
ended.

    request --want--> ... runs ... --settle--> pin --expired, or its pages are needed--> evictable

Pins are best effort. A tenant's pins hold at most its share of the pool, and the pins of all tenants twice that. When
pages run out, pins are released, least recently used first, before a running request is preempted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from radixrt.messages import TOKEN_BYTES, Run, tenant_of
from radixrt.tree import Lease, OwnerTree, RadixTree
from radixrt.worker.cache.recurrent_states import AnyStates, NoStates

TENANTS = 2
"""The pins of all tenants together may hold this many times the share of one."""
MAX_PINS = 256
"""The most pins of a tenant: each is compared with every request that pins."""
MAX_OVERLAP = 64
"""The most tokens of the paths of a tenant's pins, as a multiple of what these may hold: of each, the whole path is in
memory."""
_OWNER = 0
Key = tuple[str, bytes, int]
"""(namespace, path, name) of a pin; by its name an Unpin releases it, and 0 is for the pins of requests."""


def ends_along(path: bytes, other: bytes, keep: int) -> bool:
    """Whether one of two paths is a prefix of the other, and their common part is longer than `keep` tokens. Paths are
    int32 bytes."""
    both = min(len(path), len(other))
    return both > keep * TOKEN_BYTES and path[:both] == other[:both]


@dataclass(slots=True)
class Pin:
    """A pinned path; `ids` are int32 bytes, `seconds` how long each use extends it, `until` when it expires."""

    namespace: str
    ids: bytes
    seconds: float
    until: float
    lease: Lease
    priority: int = 0
    """See `priorities`; 0 for pins."""
    page: int = 0
    """Page whose checkpoint of the recurrent state is protected (see `RecurrentStatePool.pin`)."""


class Pins:
    """The pins of one tree. `share` is the part of `total_pages` that a tenant's pins may hold. Times are in seconds of
    any monotonic clock."""

    def __init__(self, tree: RadixTree, total_pages: int, share: float, states: AnyStates | None = None) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"max_pinned_share: must be in [0, 1], not {share}")
        self.tenant_tokens = int(total_pages * share) * tree.page_size
        """The most that a tenant's pins may hold."""
        self.all_tokens = min(TENANTS * self.tenant_tokens, total_pages * tree.page_size)
        self._tree = tree
        self._states = NoStates() if states is None else states
        self._wanted: dict[int, Run] = {}
        self._pins: dict[Key, Pin] = {}
        """Sorted by last use."""
        self._paths: dict[str, OwnerTree] = {}
        """What pins hold, by tenant; overlaps count once."""
        self._lengths: Counter[str] = Counter()
        """Tokens of the paths of each tenant's pins; overlaps count each time."""
        self._next_expiry = float("inf")

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def idle(self) -> bool:
        """Whether there are no pins and no running request wants one."""
        return not self._pins and not self._wanted

    def tokens(self, tenant: str) -> int:
        """Tokens that a tenant's pins hold."""
        return self._paths[tenant].tokens if tenant in self._paths else 0

    # ------------------------------------------------------------ requests

    def want(self, run: Run) -> None:
        """Remember a request that asks for pins, until it ends."""
        if run.pin and self.tenant_tokens:
            self._wanted[run.id] = run

    def settle(self, run_id: int, now: float) -> None:
        """A request has ended: pin what it asked for, as far as the tree holds it, and renew the pins that it used."""
        run = self._wanted.pop(run_id, None)
        if run is None:
            return
        self._renew(run, now)
        for tokens, seconds in sorted(run.pin):
            self.add(run.namespace, run.ids[: tokens * TOKEN_BYTES], seconds, now)

    def drop(self, run_id: int) -> None:
        """A request was refused or has failed: forget what it asked for."""
        self._wanted.pop(run_id, None)

    def _renew(self, run: Run, now: float) -> None:
        for key in self._used(run):
            pin = self._pins[key] = self._pins.pop(key)
            pin.until = max(pin.until, now + pin.seconds)

    def _used(self, run: Run) -> list[Key]:
        """The pins whose paths are prefixes of a request's tokens."""
        return [key for key in self._pins if key[0] == run.namespace and run.ids.startswith(key[1])]

    # ------------------------------------------------------------ pins

    def add(self, namespace: str, ids: bytes, seconds: float, now: float, name: int = 0, priority: int = 0) -> int:
        """Pin a path as far as the tree holds it and the tenant's share allows; older pins are released to make room.
        Returns how many tokens it holds."""
        ids = ids[: self.tenant_tokens * TOKEN_BYTES]
        lease = self._tree.lease(self._tree.match(namespace, ids))
        key, until = (namespace, ids[: lease.length * TOKEN_BYTES], name), now + seconds
        if not lease.length:
            lease.release()
            return 0
        if (before := self._pins.get(key)) is not None:
            until = max(until, before.until)
            self._release(key)
        self._hold(key, Pin(namespace, key[1], seconds, until, lease, priority))
        self._make_room(tenant_of(namespace))
        return lease.length if key in self._pins else 0

    def _hold(self, key: Key, pin: Pin) -> None:
        pin.page = self._states.pin(np.frombuffer(pin.lease.values(), np.int32))
        self._pins[key] = pin
        self._next_expiry = min(self._next_expiry, pin.until)
        tenant = tenant_of(pin.namespace)
        self._paths.setdefault(tenant, OwnerTree()).add(pin.namespace, pin.ids, _OWNER)
        self._lengths[tenant] += pin.lease.length

    def _make_room(self, tenant: str) -> None:
        keys = self._of(tenant)
        count = len(keys)
        for key in self._going(keys):
            few = count <= MAX_PINS and self._lengths[tenant] <= MAX_OVERLAP * self.tenant_tokens
            if few and self.tokens(tenant) <= self.tenant_tokens:
                break
            self._release(key)
            count -= 1
        while sum(paths.tokens for paths in self._paths.values()) > self.all_tokens:
            self.release_oldest()

    def _of(self, tenant: str) -> list[Key]:
        """A tenant's pins, sorted by last use."""
        return [key for key in self._pins if tenant_of(key[0]) == tenant]

    def _going(self, keys: list[Key]) -> list[Key]:
        """Of a tenant's pins, sorted by last use, those that may go for its last one, in that order."""
        return keys[:-1]

    def expire(self, now: float) -> None:
        """Release the pins whose time has passed."""
        if now < self._next_expiry:
            return
        for key in [key for key, pin in self._pins.items() if pin.until <= now]:
            self._release(key)
        self._next_expiry = min((pin.until for pin in self._pins.values()), default=float("inf"))

    def release(self, name: int) -> None:
        """Release the pin of that name, if it still exists."""
        for key in [key for key in self._pins if key[2] == name]:
            self._release(key)

    def release_along(self, namespace: str, ids: bytes, keep: int) -> None:
        """Release the pins that a removal of a path beyond its first `keep` tokens concerns (see `ends_along`)."""
        for key in [key for key in self._pins if key[0] == namespace and ends_along(key[1], ids, keep)]:
            self._release(key)

    def release_tenant(self, tenant: str) -> None:
        """Release all pins of a tenant, and forget what its running requests asked for."""
        for key in self._of(tenant):
            self._release(key)
        for id in [id for id, run in self._wanted.items() if tenant_of(run.namespace) == tenant]:
            del self._wanted[id]

    def release_oldest(self) -> bool:
        """Release the least recently used pin; False if there is none."""
        key = next(iter(self._pins), None)
        if key is not None:
            self._release(key)
        return key is not None

    def clear(self) -> None:
        """Release all pins."""
        while self.release_oldest():
            pass

    def _release(self, key: Key) -> None:
        pin = self._pins.pop(key)
        length = pin.lease.length
        pin.lease.release()
        self._states.unpin(pin.page)
        tenant = tenant_of(pin.namespace)
        self._paths[tenant].remove(pin.namespace, pin.ids, _OWNER)
        self._lengths[tenant] -= length
        if not self._paths[tenant].tokens:
            del self._paths[tenant], self._lengths[tenant]

    def check(self) -> None:
        """Assert that pins hold what they say, and no more than they may."""
        tenants = {tenant_of(pin.namespace) for pin in self._pins.values()}
        assert tenants == self._paths.keys() == self._lengths.keys(), "tenants with pins are known"
        assert sum(self.tokens(tenant) for tenant in tenants) <= self.all_tokens, "all pins are bounded"
        for tenant in tenants:
            pins = [pin for pin in self._pins.values() if tenant_of(pin.namespace) == tenant]
            held = {(p.namespace, p.ids[:n]) for p in pins for n in range(TOKEN_BYTES, len(p.ids) + 1, TOKEN_BYTES)}
            assert len(held) == self.tokens(tenant) <= self.tenant_tokens, "a tenant's pins are counted, and bounded"
            assert len(pins) <= MAX_PINS, "a tenant's pins are few"
            assert self._lengths[tenant] == sum(len(pin.ids) // TOKEN_BYTES for pin in pins), "so are their paths"
            assert self._lengths[tenant] <= MAX_OVERLAP * self.tenant_tokens, "and bounded"
        for pin in self._pins.values():
            assert pin.lease.length == len(pin.ids) // TOKEN_BYTES, "a pin leases its path"
            assert pin.until >= self._next_expiry, "no pin is forgotten"
