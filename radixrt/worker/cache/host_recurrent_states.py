"""Checkpoints of recurrent states in host memory. One that goes from the device although it is valid is copied to a
slot here, and copied from there into the live state of a request that needs it. Integers only.

    checkpoint on the device  --goes: copied before the step-->  slot here  --copied before the step-->  live state

A tree has a path for each checkpoint, on the device or here, and the slot at its end; so a checkpoint is found by its
very tokens and namespace. Each path is leased, and what no lease holds any more is removed.

    tokens   [ a b c d e f ]    the state after c is in slot 3, the one after f on the device alone
    slots      0 0 3 0 0 0

What was copied back stays here, too. When slots are short, they go in the order of `checkpoint_order`.
"""

from __future__ import annotations

import numpy as np

from radixrt.messages import TOKEN_BYTES, tenant_of
from radixrt.tree import Lease, RadixTree
from radixrt.worker.cache.checkpoint_order import CheckpointOrder
from radixrt.worker.cache.tier import Event, Tokens

Prefix = tuple[int, int]
"""(number of tokens, their digest) of a prefix, for the router's index (see `messages.digests`)."""
UNKNOWN: Prefix = (0, 0)


class HostRecurrentStatePool:
    """`num_slots` slots of a checkpoint each, of which slot 0 does not exist, for prefixes of whole pages. With
    `events`, changes are recorded for the router's index, which knows these slots by their numbers plus `first`."""

    def __init__(self, num_slots: int, page_size: int, events: bool = False, first: int = 0) -> None:
        if num_slots < 2:
            raise ValueError(f"host memory: {num_slots - 1} recurrent states, at least 1")
        self.total = num_slots - 1
        self.version = 0
        """Changes whenever another prefix has a checkpoint here, or one has none any more."""
        self.lost = 0
        """Checkpoints that have gone from host memory, or did not fit there, since start."""
        self.onloaded = 0
        """Checkpoints that were copied back since start."""
        self._page_size = page_size
        self._first = first
        self._tree = RadixTree(page_size)
        self._named: dict[int, Lease] = {}
        """The paths of checkpoints on the device, by their slots there."""
        self._names: dict[int, Lease] = {}
        """The path of each slot's checkpoint."""
        self._prefixes: dict[int, Prefix] = {}
        self._order = CheckpointOrder()
        self._free = list(range(self.total, 0, -1))
        self._held: set[int] = set()
        """Slots that are not reused before the next step: they are to be copied back."""
        self._leaving: list[int] = []
        """Of these, the ones whose checkpoint was removed all the same. They are free after the step."""
        self._offloaded: dict[int, int] = {}
        """For the plan that is made: the slot of the device that is copied to each slot here before the step."""
        self._onloaded: dict[int, int] = {}
        """For the plan that is made: the slot that is copied to each live slot, after that."""
        self._spent: dict[int, int] = {}
        """For the plan that is made: the slot that is spent because this live slot goes on from it."""
        self._lent: set[int] = set()
        """Slots that are lent to the tier below, for what comes from there or goes there."""
        self._events: list[Event] | None = [] if events else None

    def __len__(self) -> int:
        """Number of checkpoints."""
        return len(self._names)

    # ------------------------------------------------------------ names

    def name(self, source: int, namespace: str, ids: memoryview) -> None:
        """The slot `source` of the device has the checkpoint of a prefix, int32 `ids`, until `store` or `unname`."""
        name = self._tree.lease(self._tree.match(namespace, ids))
        rest = ids[name.length :]
        self._tree.insert(name, rest, np.zeros(len(rest) // self._page_size, dtype=np.int32))
        self._named[source] = name

    def unname(self, source: int) -> None:
        """The checkpoint in that slot is gone from the device, if it has not been stored."""
        if (name := self._named.pop(source, None)) is not None:
            self._release(name)

    def _release(self, name: Lease) -> None:
        name.release()
        self._tree.evict(self._tree.tokens)  # as much as that: what no name holds

    # ------------------------------------------------------------ from the device

    def store(self, source: int, prefix: Prefix, last: bool = False, spent: bool = False) -> None:
        """Copy a checkpoint here that goes from its slot on the device, `source`, with its place in the order (see
        `CheckpointOrder`). What is here already is not copied. One that is spent is copied to a free slot only."""
        name = self._named.pop(source)
        end = name.length - self._page_size
        slot = int(np.frombuffer(name.values(end), np.int32)[0])
        if slot:
            self._order.add(slot, last, spent)
            return self._release(name)
        if not self._free and not spent:
            self._evict_oldest()
        if not self._free:
            self.lost += 1
            return self._release(name)
        slot = self._free.pop()
        name.assign(end, np.array([slot], dtype=np.int32))
        self._names[slot], self._prefixes[slot] = name, prefix
        self._order.add(slot, last, spent)
        self._offloaded[slot] = source
        self.version += 1
        if self._events is not None:
            self._events.append(("saved", self._first + slot, *prefix))

    def _evict_oldest(self) -> None:
        """Remove the checkpoint that goes first and is not held, if there is one."""
        oldest = next((slot for slot in self._order if slot not in self._held), 0)
        if oldest:
            self._remove(oldest)
            self.lost += 1

    def _remove(self, slot: int) -> None:
        name = self._names.pop(slot)
        name.assign(name.length - self._page_size, np.zeros(1, dtype=np.int32))
        self._release(name)
        del self._prefixes[slot]
        self._order.remove(slot)
        if slot in self._held:
            self._leaving.append(slot)
        else:
            self._offloaded.pop(slot, None)
            self._free.append(slot)
        self.version += 1
        if self._events is not None:
            self._events.append(("dropped", self._first + slot))

    # ------------------------------------------------------------ to the device

    def deepest(self, namespace: str, tokens: Tokens, most: int) -> tuple[int, int]:
        """(tokens, slot) of the longest prefix of `tokens`, of at most `most`, that has a checkpoint here; (0, 0) if
        none has."""
        if not self._names:
            return 0, 0
        slots = np.frombuffer(self._tree.match(namespace, tokens, most).values(), np.int32)
        found = np.flatnonzero(slots != 0)  # of bools that is fast where there are few
        return ((int(found[-1]) + 1) * self._page_size, int(slots[found[-1]])) if len(found) else (0, 0)

    def hold(self, slot: int) -> None:
        """Do not reuse a slot before the next step."""
        self._held.add(slot)

    def onload(self, slot: int, live: int) -> None:
        """Copy the checkpoint of a slot, which is held, to a live slot of the device."""
        self._onloaded[live] = slot
        self.onloaded += 1
        if self._order.go_on(slot):
            self._spent[live] = slot

    def forgo(self, live: int) -> bool:
        """Do not copy a checkpoint to a live slot before the next step, if that was to be done. Whether it was."""
        if self._onloaded.pop(live, None) is None:
            return False
        self.onloaded -= 1
        if live in self._spent:
            self._order.take_back(self._spent.pop(live))
        return True

    # ------------------------------------------------------------ to and from the tier below

    @property
    def lent(self) -> int:
        """Slots that are lent."""
        return len(self._lent)

    def lend(self) -> int:
        """A slot that has no checkpoint, until it comes back by `adopt` or `take_back`; 0 if there is none."""
        if not self._free:
            self._evict_oldest()
        if not self._free:
            return 0
        self._lent.add(slot := self._free.pop())
        return slot

    def copy_out(self, source: int, slot: int) -> None:
        """Copy a checkpoint of the device, which stays there, to a lent slot before the next step."""
        self._offloaded[slot] = source

    def take_back(self, slot: int) -> None:
        """A lent slot is free again."""
        self._lent.remove(slot)
        self._offloaded.pop(slot, None)
        self._free.append(slot)

    def adopt(self, namespace: str, ids: bytes, prefix: Prefix, slot: int) -> None:
        """A lent slot has the checkpoint of the path `ids`. If there is one here already, that stays."""
        name = self._tree.lease(self._tree.match(namespace, ids))
        rest = memoryview(ids)[name.length * TOKEN_BYTES :]
        self._tree.insert(name, rest, np.zeros(len(rest) // TOKEN_BYTES // self._page_size, dtype=np.int32))
        end = name.length - self._page_size
        if np.frombuffer(name.values(end), np.int32)[0]:
            self._release(name)
            return self.take_back(slot)
        self._lent.remove(slot)
        name.assign(end, np.array([slot], dtype=np.int32))
        self._names[slot], self._prefixes[slot] = name, prefix
        self._order.add(slot, last=True)
        self.version += 1
        if self._events is not None:
            self._events.append(("saved", self._first + slot, *prefix))

    # ------------------------------------------------------------ both

    @property
    def is_onloading(self) -> bool:
        """Whether live states are still to be filled before the next step."""
        return bool(self._onloaded)

    @property
    def is_offloading(self) -> bool:
        """Whether there are copies to host memory to be made."""
        return bool(self._offloaded)

    def drain(self) -> tuple[np.ndarray, np.ndarray]:
        """The copies to be made before the step that is being planned: `Moves.states_offload` and
        `Moves.states_onload`."""
        offloaded = np.array([[*self._offloaded.values()], [*self._offloaded]], dtype=np.int32)
        onloaded = np.array([[*self._onloaded.values()], [*self._onloaded]], dtype=np.int32)
        self._offloaded.clear()
        self._onloaded.clear()
        self._spent.clear()
        self._held.clear()
        self._free += self._leaving
        self._leaving.clear()
        return offloaded, onloaded

    def clear(self) -> None:
        """Remove all checkpoints."""
        for slot in list(self._names):
            self._remove(slot)

    def forget(self, namespace: str, path: Tokens, keep: int) -> None:
        """Remove the checkpoints of a path after its first `keep` tokens: they are not valid."""
        slots = np.frombuffer(self._tree.match(namespace, path).values(), np.int32)[keep // self._page_size :]
        for slot in slots[slots > 0].tolist():
            self._remove(slot)

    def delete(self, tenant: str) -> None:
        """Remove the checkpoints of a tenant."""
        for slot in [slot for slot, name in self._names.items() if tenant_of(name.namespace) == tenant]:
            self._remove(slot)

    # ------------------------------------------------------------ events

    def drain_events(self) -> list[Event]:
        """The changes since the last call."""
        events, self._events = self._events or [], [] if self._events is not None else None
        return events

    def resync_events(self) -> list[Event]:
        """All checkpoints here, as events; those that were not drained are dropped."""
        self.drain_events()
        return [("saved", self._first + slot, *prefix) for slot, prefix in self._prefixes.items()]

    def check_named(self, sources: set[int]) -> None:
        """Assert that these are the slots of the device that have checkpoints."""
        assert self._named.keys() == sources, "host memory knows each of them"

    def check(self) -> None:
        """Assert that every slot is free or at the end of its path, and that nothing else is in the tree. Not while a
        step is planned."""
        self._tree.check()
        places = sorted([*self._free, *self._leaving, *self._names, *self._lent])
        assert places == list(range(1, self.total + 1)), "every slot is in one place"
        assert set(self._order) == set(self._names) == set(self._prefixes)
        for slot, name in self._names.items():
            ends = np.frombuffer(name.values(name.length - self._page_size), np.int32)
            assert ends.tolist() == [slot], "a path ends with its slot"
        slots = np.frombuffer(self._tree.values(), np.int32)
        assert sorted(slots[slots > 0].tolist()) == sorted(self._names), "no other has one"
        assert not self._tree.evictable_tokens, "every path is that of a checkpoint"
        assert self._lent.isdisjoint(self._held), "no lent slot is copied from"
        assert not self._onloaded, "all that is to come back was planned"


class NoHostStates:
    """In the place of HostRecurrentStatePool where there are none: what it is to keep is lost."""

    version = total = onloaded = lost = 0
    is_onloading = is_offloading = False

    def __len__(self) -> int:
        return 0

    def deepest(self, namespace: str, tokens: Tokens, most: int) -> tuple[int, int]:
        return 0, 0

    def onload(self, slot: int, live: int) -> None:
        raise LookupError("no state is here")

    def forgo(self, live: int) -> bool:
        return False

    def drain(self) -> tuple[()]:
        return ()

    def drain_events(self) -> list[Event]:
        return []

    def resync_events(self) -> list[Event]:
        return []

    def _nothing(self, *_: object, **__: object) -> None:
        pass

    name = unname = store = hold = take_back = clear = forget = delete = check_named = check = _nothing
