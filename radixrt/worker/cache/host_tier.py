"""The tier in the CPU's memory: pages and, if the model has recurrent states, checkpoints of these (see
`host_recurrent_states`). What is evicted from the device is offloaded, and onloaded when a request needs it, which
takes a small part of the time of computing it again. Integers only.

A second radix tree has the slot in host memory of every page that was copied; 0: that page was not, so far.

    on the device    [ a b c d e f ]                    evicted from the leaves upwards
    in this tier     [ a b c d e f | g h i j ]
                       0 0 0 0 3 4   5 6 7 8            what was copied back stays here, too

Slots are freed in the order of the eviction policy, leaves first. A request's hit is what the device has, and then
what the host has without a gap.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from radixrt.messages import TOKEN_BYTES
from radixrt.messages.namespace import namespaces_of
from radixrt.tree import Lease, RadixTree
from radixrt.worker.cache.eviction import POLICIES
from radixrt.worker.cache.host_recurrent_states import HostRecurrentStatePool, NoHostStates
from radixrt.worker.cache.page_pool import PagePool
from radixrt.worker.cache.priorities import Priorities
from radixrt.worker.cache.tier import Event, Tier, Tokens
from radixrt.worker.plan import Moves

MIN_EVICTED_SHARE = 1 / 256
"""At least this share of the device's pages is evicted at a time: a few large copies are faster than many small ones.
"""


class HostTier(Tier):
    """`num_slots` slots of a page each, of which slot 0 is never used, and those of `states`, if the model has any; a
    `Tier` below a device with `device_pages` pages. `policy` is one of `eviction.POLICIES`; `retained_share` see
    `Pins`. With `events` the tree records its changes for the router's index, as runs with negative numbers: to the
    router the device and the host are one cache."""

    keeps = True

    def __init__(
        self,
        num_slots: int,
        page_size: int,
        events: bool = True,
        states: HostRecurrentStatePool | None = None,
        device_pages: int = 0,
        policy: str = "lru",
        retained_share: float = 0.25,
    ) -> None:
        self.states = NoHostStates() if states is None else states
        self.lost_pages = 0
        """Pages that were evicted from this tier, or did not fit here, since start."""
        self.onloaded_pages = 0
        self.tree = RadixTree(page_size, policy=POLICIES[policy], events=events)
        self._page_size = page_size
        self._least = int(MIN_EVICTED_SHARE * device_pages) * page_size
        """Tokens that are evicted at a time, at least."""
        self._slots = PagePool(num_slots)
        self._priorities = Priorities(self.tree, self._slots.total, retained_share)
        self._offloaded: list[tuple[np.ndarray, np.ndarray]] = []
        """(pages, slots) to be copied before the next step."""
        self._onloaded: list[tuple[np.ndarray, np.ndarray]] = []
        """(slots, pages) to be copied before the next step, after `_offloaded`."""
        self._held: list[Lease] = []
        """Of what is to be copied back: until the step is planned, its slots must not be reused."""
        self._loose = np.zeros(num_slots, dtype=bool)
        """Which slots are lent to the tier below, for what comes from there or goes there: they are not in the tree."""
        self._changes = 0
        """How often slots may have been set of pages that the tree knew already, which does not change its version."""

    @property
    def version(self) -> int:
        """Changes whenever `reach`, or a state, may be another."""
        return self.tree.version + self._changes + self.states.version

    @property
    def used_pages(self) -> int:
        return self._slots.total - self._slots.num_free

    # ------------------------------------------------------------ from the device

    def evict(self, tree: RadixTree, tokens: int) -> np.ndarray:
        gone, left = [], max(tokens, self._least)
        while left > 0 and (found := tree.evict_into(self.tree, left)) is not None:
            place, ids, values = found
            gone.append(pages := np.frombuffer(values, np.int32))
            self.store(place, ids, pages)
            place.release()
            left -= len(pages) * self._page_size
        return np.concatenate(gone)

    def store(self, place: Lease, ids: bytes, pages: np.ndarray) -> None:
        """Copy `pages` here, which are evicted from the device: those of the tokens `ids`, int32, that follow the path
        of `place`, a lease of this tier's tree that is extended by them. What is here already is not copied, and what
        there is no slot for is lost."""
        self._changes += 1
        start = place.length
        known = place.extend_match(ids) // self._page_size
        slots = np.zeros(len(pages), dtype=np.int32)
        if known:
            slots[:known] = np.frombuffer(place.values(start), np.int32)
            lacking = np.flatnonzero(slots == 0)
            pages = pages[lacking]
        room = self._make_room(len(pages))
        self.lost_pages += len(pages) - room
        if not room:
            return
        taken = self._slots.allocate(room)[::-1].copy()
        self._offloaded.append((pages[:room], taken))
        if not known:
            slots = taken
        else:
            slots[lacking[:room]] = taken
            slots = slots[: max(known, int(lacking[room - 1]) + 1)]
            place.assign(start, slots[:known])
        if len(slots) > known:
            size = self._page_size * TOKEN_BYTES
            self.tree.insert(place, memoryview(ids)[known * size : len(slots) * size], slots[known:])

    def _make_room(self, count: int) -> int:
        """Free slots until there are `count`, if possible. Returns how many of these there are."""
        if self._slots.num_free < count:
            self._priorities.expire(time.monotonic())
        while self._slots.num_free < count:
            if gone := self._free(self.tree.evict_used(count - self._slots.num_free)):
                self.lost_pages += gone
            elif not self._priorities.loosen():
                break
        self._priorities.fasten()
        return min(count, self._slots.num_free)

    def _free(self, values: bytes) -> int:
        """Free the slots among the values of what was removed. Returns how many."""
        slots = np.frombuffer(values, np.int32)
        slots = slots[slots > 0]
        self._slots.free(slots[::-1])  # so that they are taken in this order again: copies of a range are one copy
        return len(slots)

    def offload(self, namespace: str, path: bytes, pages: np.ndarray) -> None:
        at = len(path) - len(pages) * self._page_size * TOKEN_BYTES
        with self.tree.lease(self.tree.match(namespace, path[:at])) as place:
            gap = path[place.length * TOKEN_BYTES : at]
            self.tree.insert(place, gap, np.zeros(len(gap) // (self._page_size * TOKEN_BYTES), dtype=np.int32))
            self.store(place, path[at:], pages)

    # ------------------------------------------------------------ what clients ask for

    def deep_reach(self, namespace: str, tokens: Tokens, start: int) -> int:
        return self.reach(namespace, tokens, start)

    def retain(self, namespace: str, path: bytes, priority: int, seconds: float, now: float, name: int) -> int:
        self._priorities.expire(now)
        if (known := self._priorities.named(name)).startswith(path):
            path = known  # the device has lost more of it before
        self._priorities.release(name)
        return self._priorities.add(namespace, path, seconds, now, name, priority)

    def release(self, name: int) -> None:
        self._priorities.release(name)

    def share(self, namespace: str, path: bytes) -> None:
        return None  # other workers cannot read this memory

    def delete(self, tenant: str) -> None:
        self._priorities.release_tenant(tenant)
        self._free(self.tree.remove_namespaces(namespaces_of(tenant)))
        self.states.delete(tenant)

    # ------------------------------------------------------------ to the device

    def reach(self, namespace: str, tokens: Tokens, start: int) -> int:
        return start + len(self._slots_after(namespace, tokens, start)) * self._page_size

    def hold(self, namespace: str, tokens: Tokens, start: int) -> np.ndarray:
        slots = self._slots_after(namespace, tokens, start)
        if len(slots):
            stop = start + len(slots) * self._page_size
            self._held.append(self.tree.lease(self.tree.match(namespace, tokens, stop)))
        return slots

    def deepest_state(self, namespace: str, tokens: Tokens, most: int) -> tuple[int, int]:
        return self.states.deepest(namespace, tokens, most)

    def hold_state(self, slot: int) -> None:
        self.states.hold(slot)

    def _slots_after(self, namespace: str, tokens: Tokens, start: int) -> np.ndarray:
        match = self.tree.match(namespace, tokens)
        if match.length <= start:
            return np.zeros(0, dtype=np.int32)
        slots = np.frombuffer(match.values(start), np.int32)
        return slots if slots.all() else slots[: int(np.argmin(slots != 0))]

    def onload(self, slots: np.ndarray, pages: np.ndarray) -> None:
        self._onloaded.append((slots, pages.copy()))
        self.onloaded_pages += len(slots)

    # ------------------------------------------------------------ to and from the tier below

    @property
    def total(self) -> int:
        return self._slots.total

    def lend(self, count: int) -> np.ndarray:
        """Up to `count` slots, int32, that the tree does not have, until they come back by `adopt` or `take_back`.
        Copies to them that are still to be made are dropped: nobody needs them any more."""
        room = self._make_room(count)
        taken = self._slots.allocate(room)[::-1].copy()
        self._loose[taken] = True
        if self._offloaded:
            parts = [(pages, slots, ~np.isin(slots, taken)) for pages, slots in self._offloaded]
            self._offloaded = [(pages[kept], slots[kept]) for pages, slots, kept in parts if kept.any()]
        return taken

    def copy_out(self, pages: np.ndarray, slots: np.ndarray) -> None:
        """Copy pages of the device, which stay there, to lent slots before the next step."""
        self._offloaded.append((pages.copy(), slots))

    def take_back(self, slots: np.ndarray) -> None:
        """Lent slots are free again."""
        self._loose[slots] = False
        self._slots.free(slots[::-1])

    def adopt(self, namespace: str, ids: bytes, slots: np.ndarray) -> None:
        """Lent slots have the pages of a path, of tokens `ids`; of a page that is not among them: 0. What is here
        already stays, and its lent slot is free again."""
        self._changes += 1
        with self.tree.lease(self.tree.match(namespace, ids)) as place:
            known = place.length // self._page_size
            here = np.frombuffer(place.values(), np.int32)
            lent = slots[:known]
            self.take_back(lent[(lent > 0) & (here > 0)])
            self._loose[slots] = False
            place.assign(0, np.where(here > 0, here, lent))
            if len(slots) > known:
                self.tree.insert(place, memoryview(ids)[known * self._page_size * TOKEN_BYTES :], slots[known:])

    # ------------------------------------------------------------ both

    def drain(self) -> Moves | None:
        moves = Moves(_joined(self._offloaded), _joined(self._onloaded), *self.states.drain())
        self._drop_copies()
        return None if moves.is_empty else moves

    @property
    def is_onloading(self) -> bool:
        """Whether pages or states of the device are still to be filled before the next step."""
        return bool(self._onloaded) or self.states.is_onloading

    @property
    def is_offloading(self) -> bool:
        """Whether there are copies to host memory to be made."""
        return bool(self._offloaded) or self.states.is_offloading

    def reset(self) -> bool:
        filling = self.is_onloading
        self._drop_copies()
        self.states.drain()
        self.clear()
        return filling

    def _drop_copies(self) -> None:
        self._offloaded, self._onloaded = [], []
        for lease in self._held:
            lease.release()
        self._held = []

    def forget(self, namespace: str, path: Tokens, keep: int) -> None:
        self._priorities.release_along(
            namespace, np.asarray(path).tobytes() if not isinstance(path, bytes) else path, keep
        )
        self._free(self.tree.forget(namespace, path, keep))
        self.states.forget(namespace, path, keep)

    def clear(self) -> None:
        self._priorities.clear()
        self._free(self.tree.evict(self.tree.evictable_tokens))
        self.states.clear()

    # ------------------------------------------------------------ events

    def drain_events(self) -> list[Event]:
        """As those of `PrefixCache`."""
        return [*_renumbered(self.tree.drain_events()), *self.states.drain_events()]

    def resync_events(self) -> list[Event]:
        """As those of `PrefixCache`, to follow those of the device's tree."""
        stored = self.tree.snapshot()[1:]  # the first one empties the index
        return [*_renumbered(stored), *self.states.resync_events()]

    def check(self) -> None:
        """Assert that every slot is free, in the tree or lent, once."""
        self.tree.check()
        self._priorities.check()
        used = np.frombuffer(self.tree.values(), np.int32)
        self._slots.check(used[used > 0], np.flatnonzero(self._loose))
        self.states.check()

    def check_lent(self, slots: list[np.ndarray]) -> None:
        """Assert that these are the slots that are lent."""
        lent = np.sort(np.concatenate([np.zeros(0, np.int32), *slots]))
        assert np.array_equal(lent, np.flatnonzero(self._loose)), "free + leased + evictable + lent = total"


def _joined(pairs: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """int32[2, N]: (from, to) of all copies. What is copied to may have been given away and reused since, so of several
    copies to one place the last one counts."""
    if not pairs:
        return np.zeros((2, 0), dtype=np.int32)
    found = np.stack([np.concatenate(side) for side in zip(*pairs, strict=True)])
    _, last = np.unique(found[1, ::-1], return_index=True)
    return found[:, np.sort(found.shape[1] - 1 - last)]


def _renumbered(events: list[Event]) -> Iterator[Event]:
    for event in events:
        match event:
            case ("stored", namespace, run, at, parent, parent_at, ids):
                yield "stored", namespace, -run, at, -parent, parent_at, ids
            case ("removed", run, keep):
                yield "removed", -run, keep
