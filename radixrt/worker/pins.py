"""Prefixes that stay in the cache for a time after their request has ended, by leases that nobody runs on.

    request --want--> ... runs ... --settle--> pin --expire, or whatever needs its pages--> evictable like all the rest

A pin is a promise for when pages are plenty: a tenant's pins hold at most their share of the pool, all tenants' twice
that, and when pages run out pins go before a running request must. The oldest use goes first.
"""

from __future__ import annotations

from dataclasses import dataclass

from radixrt.messages import TOKEN_BYTES, Run, tenant_of
from radixrt.tree import Lease, OwnerTree, RadixTree

TENANTS = 2
"""Shares that the pins of all tenants may hold together."""
MAX_PINS = 256
"""Of a tenant: each costs a look at a request that pins."""
_OWNER = 0
Key = tuple[str, bytes, int]
"""Namespace, path, and the name of a pin that somebody may release; 0 for those of requests."""


def ends_along(path: bytes, other: bytes, keep: int) -> bool:
    """Whether a path ends on another one, beyond its first `keep` tokens, or goes on from all of it; int32 bytes."""
    both = min(len(path), len(other))
    return both > keep * TOKEN_BYTES and path[:both] == other[:both]


@dataclass(slots=True)
class Pin:
    """`ids` are its path's, int32 bytes."""

    namespace: str
    ids: bytes
    seconds: float
    until: float
    lease: Lease


class Pins:
    """The pins of one tree. `share` is the part of `total_pages` that a tenant's may hold; times are in seconds, of any
    clock that does not go back."""

    def __init__(self, tree: RadixTree, total_pages: int, share: float) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"max_pinned_share: must be in [0, 1], not {share}")
        self.tenant_tokens = int(total_pages * share) * tree.page_size
        """The most that a tenant's pins may hold."""
        self.all_tokens = min(TENANTS * self.tenant_tokens, total_pages * tree.page_size)
        self._tree = tree
        self._wanted: dict[int, Run] = {}
        self._pins: dict[Key, Pin] = {}
        """The latest used last."""
        self._paths: dict[str, OwnerTree] = {}
        """By tenant: what its pins hold, where they overlap once."""
        self._next = float("inf")

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def idle(self) -> bool:
        """There is none, and nobody wants one."""
        return not self._pins and not self._wanted

    def tokens(self, tenant: str) -> int:
        """Tokens that a tenant's pins hold."""
        return self._paths[tenant].tokens if tenant in self._paths else 0

    # ------------------------------------------------------------ requests

    def want(self, run: Run) -> None:
        """A request comes; if it wants pins, it is remembered until it ends."""
        if run.pin and self.tenant_tokens:
            self._wanted[run.id] = run

    def settle(self, run_id: int, now: float) -> None:
        """A request has ended: pin what it wanted, as far as it is in the tree, and renew what it has used."""
        run = self._wanted.pop(run_id, None)
        if run is None:
            return
        self._renew(run, now)
        for tokens, seconds in sorted(run.pin):
            self.add(run.namespace, run.ids[: tokens * TOKEN_BYTES], seconds, now)

    def drop(self, run_id: int) -> None:
        """A request was refused, or has failed."""
        self._wanted.pop(run_id, None)

    def _renew(self, run: Run, now: float) -> None:
        for key in self._used(run):
            pin = self._pins[key] = self._pins.pop(key)
            pin.until = max(pin.until, now + pin.seconds)

    def _used(self, run: Run) -> list[Key]:
        """The pins that a request's tokens begin with."""
        return [key for key in self._pins if key[0] == run.namespace and run.ids.startswith(key[1])]

    # ------------------------------------------------------------ pins

    def add(self, namespace: str, ids: bytes, seconds: float, now: float, name: int = 0) -> None:
        """Pin a path, as much of it as is in the tree and as a tenant may have; older pins make room."""
        ids = ids[: self.tenant_tokens * TOKEN_BYTES]
        lease = self._tree.lease(self._tree.match(namespace, ids))
        ids = ids[: lease.length * TOKEN_BYTES]
        if not ids:
            lease.release()
            return
        key, until = (namespace, ids, name), now + seconds
        if (before := self._pins.get(key)) is not None:
            until = max(until, before.until)
            self._release(key)
        self._pins[key] = Pin(namespace, ids, seconds, until, lease)
        self._next = min(self._next, until)
        tenant = tenant_of(namespace)
        self._paths.setdefault(tenant, OwnerTree()).add(namespace, ids, _OWNER)
        self._make_room(tenant)

    def _make_room(self, tenant: str) -> None:
        own = [key for key in self._pins if tenant_of(key[0]) == tenant]
        count = len(own)
        for key in own[:-1]:
            if self.tokens(tenant) <= self.tenant_tokens and count <= MAX_PINS:
                break
            self._release(key)
            count -= 1
        while sum(paths.tokens for paths in self._paths.values()) > self.all_tokens:
            self.release_oldest()

    def expire(self, now: float) -> None:
        """Release the pins whose time has passed."""
        if now < self._next:
            return
        for key in [key for key, pin in self._pins.items() if pin.until <= now]:
            self._release(key)
        self._next = min((pin.until for pin in self._pins.values()), default=float("inf"))

    def release(self, name: int) -> None:
        """Release the pin of a name, if it is still there."""
        for key in [key for key in self._pins if key[2] == name]:
            self._release(key)

    def release_along(self, namespace: str, ids: bytes, keep: int) -> None:
        """Release the pins that end on a path, beyond its first `keep` tokens, or behind it."""
        for key in [key for key in self._pins if key[0] == namespace and ends_along(key[1], ids, keep)]:
            self._release(key)

    def release_oldest(self) -> bool:
        """Release the pin whose use is the longest ago; False without one."""
        key = next(iter(self._pins), None)
        if key is not None:
            self._release(key)
        return key is not None

    def _release(self, key: Key) -> None:
        pin = self._pins.pop(key)
        pin.lease.release()
        tenant = tenant_of(pin.namespace)
        self._paths[tenant].remove(pin.namespace, pin.ids, _OWNER)
        if not self._paths[tenant].tokens:
            del self._paths[tenant]

    def check(self) -> None:
        """Assert that pins hold what they say, and no more than they may."""
        tenants = {tenant_of(pin.namespace) for pin in self._pins.values()}
        assert tenants == self._paths.keys(), "tenants with pins are known"
        assert sum(self.tokens(tenant) for tenant in tenants) <= self.all_tokens, "all pins are bounded"
        for tenant in tenants:
            pins = [pin for pin in self._pins.values() if tenant_of(pin.namespace) == tenant]
            held = {(p.namespace, p.ids[:n]) for p in pins for n in range(TOKEN_BYTES, len(p.ids) + 1, TOKEN_BYTES)}
            assert len(held) == self.tokens(tenant) <= self.tenant_tokens, "a tenant's pins are counted, and bounded"
            assert len(pins) <= MAX_PINS, "a tenant's pins are few"
        for pin in self._pins.values():
            assert pin.lease.length == len(pin.ids) // TOKEN_BYTES, "a pin leases its path"
            assert pin.until >= self._next, "no pin is forgotten"
