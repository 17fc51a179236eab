"""Host memory: pages and, if the model has recurrent states, checkpoints of these (see `host_states`). What is evicted
from the device is copied there, and copied back when a request needs it, which takes a small part of the time of
computing it again. Integers only.

A second radix tree has the slot in host memory of every page that was copied; 0: that page was not, so far.

    on the device    [ a b c d e f ]                    evicted from the leaves upwards
    in host memory   [ a b c d e f | g h i j ]
                       0 0 0 0 3 4   5 6 7 8            what was copied back stays here, too

Slots are freed least recently used first, leaves first. A request's hit is what the device has, and then what the
host has without a gap.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np

from radixrt.messages import TOKEN_BYTES
from radixrt.tree import Lease, RadixTree
from radixrt.worker.cache.host_recurrent_states import HostRecurrentStatePool
from radixrt.worker.plan import Moves

_Tokens = array | memoryview | bytes


class HostTier:
    """`num_slots` slots of a page each, of which slot 0 is never used, and those of `states`, if the model has any.
    With `events` the tree records its changes for the router's index, as runs with negative numbers: to the router the
    device and the host are one cache."""

    def __init__(
        self, num_slots: int, page_size: int, events: bool = True, states: HostRecurrentStatePool | None = None
    ) -> None:
        self.total_slots = num_slots - 1
        self.states = states
        self.tree = RadixTree(page_size, events=events)
        self.lost_pages = 0
        """Pages that were evicted from host memory, or did not fit there, since start."""
        self.fetched_pages = 0
        """Pages that were copied back since start."""
        self._page_size = page_size
        self._free = np.arange(num_slots - 1, 0, -1, dtype=np.int32)
        self._num_free = self.total_slots
        self._stored: list[tuple[np.ndarray, np.ndarray]] = []
        """(pages, slots) to be copied before the next step."""
        self._fetched: list[tuple[np.ndarray, np.ndarray]] = []
        """(slots, pages) to be copied before the next step, after `_stored`."""
        self._held: list[Lease] = []
        """Of what is to be copied back: until the step is planned, its slots must not be reused."""
        self._changes = 0
        """How often slots may have been set of pages that the tree knew already, which does not change its version."""

    @property
    def version(self) -> int:
        """Changes whenever `reach`, or a state, may be another."""
        return self.tree.version + self._changes + (self.states.version if self.states is not None else 0)

    @property
    def used_slots(self) -> int:
        return self.total_slots - self._num_free

    # ------------------------------------------------------------ from the device

    def store(self, place: Lease, ids: bytes, pages: np.ndarray) -> None:
        """Copy `pages` here, which are evicted from the device: those of the tokens `ids`, int32, that follow the path
        of `place`, a lease in `tree` that is extended by them. What is here already is not copied, and what there is
        no slot for is lost."""
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
        taken = self._take(room)
        self._stored.append((pages[:room], taken))
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
        if self._num_free < count:
            self.lost_pages += self._give_back(self.tree.evict_used(count - self._num_free))
        return min(count, self._num_free)

    def _take(self, count: int) -> np.ndarray:
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count][::-1].copy()

    def _give_back(self, values: bytes) -> int:
        """Free the slots among the values of what was removed. Returns how many."""
        slots = np.frombuffer(values, np.int32)
        slots = slots[slots > 0][::-1]  # so that they are taken in this order again: copies of a range are one copy
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)
        return len(slots)

    # ------------------------------------------------------------ to the device

    def reach(self, namespace: str, tokens: _Tokens, start: int) -> int:
        """How many leading `tokens` can be had, of which the device has `start`, in whole pages."""
        return start + len(self._slots(namespace, tokens, start)) * self._page_size

    def hold(self, namespace: str, tokens: _Tokens, start: int) -> np.ndarray:
        """int32: the slots of the pages of `tokens` after the first `start`, as far as they are here without a gap.
        They are not reused before the next step."""
        slots = self._slots(namespace, tokens, start)
        if len(slots):
            stop = start + len(slots) * self._page_size
            self._held.append(self.tree.lease(self.tree.match(namespace, tokens, stop)))
        return slots

    def deepest_state(self, namespace: str, tokens: _Tokens, start: int, most: int) -> tuple[int, int]:
        """(tokens, slot) of the deepest checkpoint here that the pages lead to, of which the device has those of
        `start` tokens, after at most `most` tokens; (0, 0) if there is none."""
        return self.states.deepest(namespace, tokens, min(most, self.reach(namespace, tokens, start)))

    def _slots(self, namespace: str, tokens: _Tokens, start: int) -> np.ndarray:
        match = self.tree.match(namespace, tokens)
        if match.length <= start:
            return np.zeros(0, dtype=np.int32)
        slots = np.frombuffer(match.values(start), np.int32)
        return slots if slots.all() else slots[: int(np.argmin(slots != 0))]

    def fetch(self, slots: np.ndarray, pages: np.ndarray) -> None:
        """Copy slots that are held to pages of the device."""
        self._fetched.append((slots, pages.copy()))
        self.fetched_pages += len(slots)

    # ------------------------------------------------------------ both

    def drain(self) -> Moves | None:
        """The copies to be made before the step that is being planned; None if there are none."""
        moves = Moves(
            _joined(self._stored), _joined(self._fetched), *(() if self.states is None else self.states.drain())
        )
        self._drop_copies()
        return None if moves.is_empty else moves

    @property
    def is_fetching(self) -> bool:
        """Whether pages or states of the device are still to be filled before the next step."""
        return bool(self._fetched) or (self.states is not None and self.states.is_fetching)

    def reset(self) -> None:
        """Remove everything, also the copies that are still to be made: a step has failed, and with it its copies."""
        self._drop_copies()
        if self.states is not None:
            self.states.drain()
        self.clear()

    def _drop_copies(self) -> None:
        self._stored, self._fetched = [], []
        for lease in self._held:
            lease.release()
        self._held = []

    def forget(self, namespace: str, path: _Tokens, keep: int) -> None:
        """Remove a path after its first `keep` tokens, except where others go on, and all checkpoints there."""
        self._give_back(self.tree.forget(namespace, path, keep))
        if self.states is not None:
            self.states.forget(namespace, path, keep)

    def clear(self) -> None:
        """Remove everything but pages that are held."""
        self._give_back(self.tree.evict(self.tree.evictable_tokens))
        if self.states is not None:
            self.states.clear()

    # ------------------------------------------------------------ events

    def drain_events(self) -> list[tuple]:
        """As those of `PageCache`."""
        states = [] if self.states is None else self.states.drain_events()
        return [*_renumbered(self.tree.drain_events()), *states]

    def resync_events(self) -> list[tuple]:
        """As those of `PageCache`, to follow those of the device's tree."""
        states = [] if self.states is None else self.states.resync_events()
        return [*_renumbered(self.tree.snapshot()[1:]), *states]  # the tree's first one empties the index

    def check(self) -> None:
        """Assert that every slot is free or in the tree, once."""
        self.tree.check()
        used = np.frombuffer(self.tree.values(), np.int32)
        slots = np.sort(np.concatenate([self._free[: self._num_free], used[used > 0]]))
        assert np.array_equal(slots, np.arange(1, self.total_slots + 1)), "every slot is in exactly one place"
        if self.states is not None:
            self.states.check()


def _joined(pairs: list[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """int32[2, N]: (from, to) of all copies. What is copied to may have been given away and reused since, so of several
    copies to one place the last one counts."""
    if not pairs:
        return np.zeros((2, 0), dtype=np.int32)
    found = np.stack([np.concatenate(side) for side in zip(*pairs, strict=True)])
    _, last = np.unique(found[1, ::-1], return_index=True)
    return found[:, np.sort(found.shape[1] - 1 - last)]


def _renumbered(events: list[tuple]) -> Iterator[tuple]:
    for event in events:
        match event:
            case ("stored", namespace, run, at, parent, parent_at, ids):
                yield "stored", namespace, -run, at, -parent, parent_at, ids
            case ("removed", run, keep):
                yield "removed", -run, keep
