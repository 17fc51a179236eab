"""Which prefixes are cached, and in which pages: the radix tree of the device, with the tiers below it.

    pages:   free | in the tree (leased, by requests, pins or `retained`, or evictable) | private to a running request

It alone takes pages from the pool, and evicts if none is free. What is evicted goes to the tier below (see `tier`). A
page's checkpoint of the recurrent state, if the model has any, goes with it (see `recurrent_states`).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

import numpy as np

from radixrt.messages import TOKEN_BYTES
from radixrt.messages.namespace import namespaces_of
from radixrt.tree import Lease, RadixTree
from radixrt.worker.cache.eviction import POLICIES
from radixrt.worker.cache.page_pool import OutOfPages, PagePool
from radixrt.worker.cache.pins import Pins
from radixrt.worker.cache.priorities import Priorities
from radixrt.worker.cache.recurrent_states import AnyStates
from radixrt.worker.cache.retention import RetainedContexts
from radixrt.worker.cache.return_order import ReturnOrder
from radixrt.worker.cache.tier import Event, Tier, Tokens


def int32(raw: bytes) -> np.ndarray:
    return np.frombuffer(raw, dtype=np.int32)


class PrefixCache:
    """The prefixes in the pages of one pool, of `page_size` tokens each. With `events` the tree records its changes for
    the router's index. `policy` is one of `eviction.POLICIES`; `pinned_share` see `Pins`."""

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        states: AnyStates,
        tier: Tier,
        *,
        policy: str = "lru",
        events: bool = True,
        pinned_share: float = 0.25,
    ) -> None:
        self.page_size = page_size
        self.tree = RadixTree(page_size, policy=POLICIES[policy], events=events)
        self.pins = Pins(self.tree, pool.total, pinned_share, states)
        self.priorities = Priorities(self.tree, pool.total, pinned_share, states)
        self.retained = RetainedContexts(pool.total * page_size)
        self.order: ReturnOrder | None = None
        """With the policy `returns`, what sets the order of eviction; set by `PageCache`."""
        self._pool = pool
        self._states = states
        self._tier = tier

    # ------------------------------------------------------------ look-ups

    @property
    def version(self) -> int:
        """Changes whenever `find` may find something else."""
        return self.tree.version + self._states.version + self._tier.version

    @property
    def leased_pages(self) -> int:
        """Pages of the tree that leases pin."""
        return self.tree.leased_tokens // self.page_size

    @property
    def evictable_pages(self) -> int:
        """Pages of the tree that no lease pins."""
        return self.tree.evictable_tokens // self.page_size

    @property
    def retained_pages(self) -> int:
        """Pages of the tree that only retention by priority protects: they can be evicted as well."""
        return self.held_only_by(self.priorities.leases) if len(self.priorities) else 0

    def find(self, namespace: str, tokens: Tokens, reusable: int) -> tuple[int, int]:
        """How many leading `tokens` have their KV in the tree or in the tier below; and how many, at most `reusable`,
        need not be computed: with recurrent states, those up to the deepest state checkpoint."""
        match = self.tree.match(namespace, tokens)
        known = self._tier.reach(namespace, tokens, match.length)
        most = min(known, reusable)
        covered = self._states.covered_of(match, most)
        return known, max(covered, self._tier.deepest_state(namespace, tokens, most)[0])

    @property
    def cached_tokens(self) -> int:
        """Tokens whose KV is on the device or below; those that are in several places count for each."""
        return self.tree.tokens + self._tier.used_pages * self.page_size

    def on_device(self, namespace: str, tokens: Tokens) -> int:
        """How many leading `tokens` have their KV on the device."""
        return self.tree.match(namespace, tokens).length

    def held_only_by(self, leases: Sequence[Lease]) -> int:
        """Pages that would become evictable if all these leases were released."""
        return self.tree.held_only_by(leases) // self.page_size

    # ------------------------------------------------------------ paths

    def lease(self, namespace: str, tokens: Tokens, priority: int) -> Lease:
        """Lease what the tree has of a path, for a request of that priority (see `Request`)."""
        return self.tree.lease(self.tree.match(namespace, tokens), -priority)

    def publish(self, lease: Lease, path: memoryview, pages: np.ndarray) -> np.ndarray:
        """Extend a lease by `path`, whole pages of tokens, whose KV is or will be in `pages`. Those of which the tree
        has others already are freed. Returns these others, int32; they come first."""
        start = lease.length
        present = self.tree.insert(lease, path, pages)
        if not present:
            return pages[:0]
        self.free(pages[: present // self.page_size])
        return int32(lease.values(start, start + present))

    def forget(self, namespace: str, path: array[int], keep: int = 0) -> None:
        """Remove a path beyond its first `keep` tokens, here and below, except what running requests lease, and all
        state checkpoints there. Pins and retained contexts there are released."""
        self.pins.release_along(namespace, path.tobytes(), keep)
        self.retained.release_along(namespace, path.tobytes(), keep)
        self.priorities.release_along(namespace, path.tobytes(), keep)
        self._states.drop(int32(self.tree.match(namespace, path).values())[keep // self.page_size :])
        self._tier.forget(namespace, path, keep)
        self.free(int32(self.tree.forget(namespace, path, keep)))

    def demote(self, namespace: str, path: bytes, keep: int) -> None:
        """Evict the tokens of a path, int32 bytes, beyond its first `keep` to the tier below, except what is leased or
        has other continuations. What is retained there by priority is retained below then."""
        self.priorities.loosen_along(namespace, path)
        known = self.tree.match(namespace, path)
        pages, path = int32(known.values()), path[: known.length * TOKEN_BYTES]
        gone = len(self.tree.forget(namespace, path, keep)) // TOKEN_BYTES
        if gone:
            pages = pages[-gone:].copy()
            self._tier.offload(namespace, path, pages)
            self._states.evict(pages)
            self.free(pages)
        self._fasten(time.monotonic())

    def prefetch(self, namespace: str, path: bytes, most: int) -> int:
        """Copy back, before the next step, up to `most` tokens of a path, int32 bytes, that the tier below holds, as
        far as there is room without what leases protect. Returns how many of its tokens the tree has then."""
        with self.tree.lease(self.tree.match(namespace, path)) as lease:
            start, size = lease.length, self.page_size
            slots = self._tier.hold(namespace, path, start)
            room = self._pool.num_free + self.evictable_pages
            slots = slots[: max(0, min(most // size, room))]
            if len(slots):
                pages = self.allocate(len(slots)).copy()
                self._tier.onload(slots, pages)
                stop = start + len(slots) * size
                self.publish(lease, memoryview(path)[start * TOKEN_BYTES : stop * TOKEN_BYTES], pages)
            return lease.length

    def delete(self, tenant: str) -> None:
        """Remove all that a tenant has, here and below, except what running requests lease."""
        self.pins.release_tenant(tenant)
        self.priorities.release_tenant(tenant)
        self.retained.release_tenant(tenant)
        if self.order is not None:
            self.order.delete(tenant)
        self.free(int32(self.tree.remove_namespaces(namespaces_of(tenant))))
        self._tier.delete(tenant)

    def clear(self) -> None:
        """Empty the tree, except for what running requests and pins hold, and the tier below."""
        self.retained.clear()
        self.priorities.clear()
        self._tier.clear()
        self.free(int32(self.tree.evict(self.tree.evictable_tokens)))

    # ------------------------------------------------------------ pages

    def can_allocate(self, count: int) -> bool:
        """Whether that many pages are free or can be evicted without releasing pins or retained contexts."""
        free = self._pool.num_free
        if count <= free or count <= (free := free + self.evictable_pages):
            return True
        return count <= free + self.retained_pages

    def allocate(self, count: int) -> np.ndarray:
        """Take `count` pages, int32, evicting if needed. Raises OutOfPages, and takes none, if there are too few. The
        result is a view, valid until pages are freed."""
        if count > self._pool.num_free:
            self._make_room(count)
        return self._pool.allocate(count)

    def _make_room(self, count: int) -> None:
        while not self.can_allocate(count):
            if not self.retained.release_oldest() and not self.pins.release_oldest():
                raise OutOfPages
        self._evict((count - self._pool.num_free) * self.page_size)

    def _evict(self, tokens: int) -> None:
        """Evict so many tokens, those that are retained by priority last."""
        self.priorities.expire(now := time.monotonic())
        if self.order is not None:
            self.order.before_eviction(now)
        while tokens > 0:
            if evictable := self.tree.evictable_tokens:
                pages = self._tier.evict(self.tree, min(tokens, evictable))
                tokens -= len(pages) * self.page_size
                self._states.evict(pages)
                self.free(pages)
            elif not self.priorities.loosen():
                break
        self._fasten(now)

    def _fasten(self, now: float) -> None:
        for name, lost in self.priorities.fasten():
            self._tier.retain(lost.namespace, lost.ids, lost.priority, lost.until - now, now, name)

    def free(self, pages: np.ndarray) -> None:
        """Give pages back that are not in the tree any more, with their state checkpoints."""
        self._states.drop(pages)
        self._pool.free(pages)

    # ------------------------------------------------------------ events

    def drain_events(self) -> list[Event]:
        """What has changed since the last call, here and below, as events for the router's index."""
        events = self.tree.drain_events()
        events += self._states.drain_events()
        events += self._tier.drain_events()
        return events

    def resync_events(self) -> list[Event]:
        """All that is cached, as events; those that were not drained are dropped."""
        return [*self.tree.snapshot(), *self._states.resync_events(), *self._tier.resync_events()]

    # ------------------------------------------------------------ invariants

    def check(self) -> np.ndarray:
        """Assert all invariants of the tree, its pins and the tier below. Returns the tree's pages, int32."""
        self.tree.check()
        self.pins.check()
        self.priorities.check()
        self._tier.check()
        return int32(self.tree.values())
