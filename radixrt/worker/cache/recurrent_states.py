"""The slots of the state pool, for models with recurrent layers (linear attention, Mamba-2): there, what a request
reads of its prefix is one state of fixed size, not pages.

    slots:   0 null | free | live, of a running request | a checkpoint: the state after the last token of a page

                  restore: copied before the step        save: copied after the step, or
    checkpoint  ------------------------------->  live  ---stored within the step--->  checkpoint
                                                  |------ the request leaves: no copy ------>

Where tokens are drafted (see `ngram`), the state after each of them is stored in a slot of its own, and the one
after the accepted ones becomes the live one, without a copy:

    slots of a draft:   live  ->  d1  ->  d2  ->  d3        d1 is accepted: its slot is the live one now,
    tokens                  t       d1      d2     d3       and the others are free

A page of the tree is in exactly one prefix, so a page names the checkpoint of the prefix that ends with it. Whoever
matches a path in the tree can go on from the deepest of its pages that has a checkpoint, and has to compute the tokens
after that again, although their KV is in pages. When a page leaves the tree, so does its checkpoint. When slots are
short, one checkpoint goes after the other (see `checkpoint_order`). With host memory for checkpoints, those that go
although they are valid are copied there, and back into the live state of a request that needs them (see
`host_recurrent_states`).

The copies of a plan can be done in any order, or at once: no slot is written twice, and none that is read is written.
Integers only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from radixrt.messages.digests import prefix_digest
from radixrt.tree import Match
from radixrt.worker.cache.checkpoint_order import CheckpointOrder
from radixrt.worker.cache.host_recurrent_states import UNKNOWN, HostRecurrentStatePool, NoHostStates, Prefix
from radixrt.worker.cache.tier import Event
from radixrt.worker.plan import StateWork

BLOCK = 4096
"""Pages that are searched at once, from the end of a path: most hits end near there."""

Path = tuple[str, memoryview]
"""(namespace, int32 ids) of the prefix that ends with a page."""
NO_PATH: Path = ("", memoryview(b""))
DRAFT_SHARE = 4
"""Drafts may have one of so many slots at a time: those of the least recently used checkpoints if none is free."""


class RecurrentStatePool:
    """`num_states` slots, the null slot 0 included, for the prefixes that end with one of `num_pages` pages. With
    `events`, changes are recorded for the router's index. Checkpoints that have to go are copied to `host`, if
    given."""

    def __init__(
        self,
        num_states: int,
        num_pages: int,
        events: bool = False,
        host: HostRecurrentStatePool | None = None,
        page_size: int = 1,
    ) -> None:
        if num_states < 2:
            raise ValueError(f"max_mamba_cache_size: {num_states - 1} states, at least 1")
        self.total = num_states - 1
        self.version = 0
        """Changes whenever another prefix has a checkpoint that can be read, or one has none any more."""
        self.evicted = 0
        self._of_page = np.zeros(num_pages, dtype=np.int32)
        """Slot of each page's checkpoint; 0: it has none."""
        self._pages: dict[int, int] = {}
        """The page of each checkpoint's slot."""
        self._order = CheckpointOrder()
        """The same slots."""
        self._spent: dict[int, int] = {}
        """For the plan that is made: the slot that is spent because this live slot goes on from it."""
        self._host = NoHostStates() if host is None else host
        self._page_size = page_size
        self._free = list(range(num_states - 1, 0, -1))
        self._live: set[int] = set()
        self._drafted: dict[int, list[int]] = {}
        """The slots of the states after the drafted tokens that follow each live state, in order."""
        self._pinned: Counter[int] = Counter()
        """Pages whose checkpoints go only if a request needs a slot and there are no others: by how many pins."""
        self._restores: dict[int, int] = {}
        """For the plan that is made: source of each slot that is written before the step; 0: zeros."""
        self._saves: dict[int, int] = {}
        """For the plan that is made: source of each slot that is written by the step or after it."""
        self._within: dict[int, int] = {}
        """Of these, the slots that are written by the step: after how many of the request's tokens of the step."""
        self._prefixes: dict[int, Prefix] = {}
        """With `events`: the prefix of each checkpoint's slot."""
        self._events: list[Event] | None = [] if events else None

    def __len__(self) -> int:
        """Number of checkpoints."""
        return len(self._pages)

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def has_room(self) -> bool:
        """Whether another request can have a live state."""
        return bool(self._free) or self._oldest(pinned_too=True) > 0

    @property
    def drafted(self) -> int:
        """The slots that drafts have now."""
        return sum(map(len, self._drafted.values()))

    @property
    def draftable(self) -> int:
        """The most slots that drafts may have now in addition to those they have."""
        there = len(self._free) + max(0, len(self._pages) - len(self._pinned))
        return min(self.total // DRAFT_SHARE - self.drafted, there)

    # ------------------------------------------------------------ look-ups

    def deepest(self, pages: np.ndarray) -> int:
        """How many of the pages of a path, from the root, the deepest checkpoint covers; 0 if there is none.
        Checkpoints that the plan being made saves do not count: no request of the same step can read them."""
        for stop in range(len(pages), 0, -BLOCK):
            start = max(0, stop - BLOCK)
            for place in np.flatnonzero(self._of_page[pages[start:stop]])[::-1].tolist():
                if int(self._of_page[pages[start + place]]) not in self._saves:
                    return start + place + 1
        return 0

    def covered(self, pages: np.ndarray, most: int) -> int:
        """How many tokens, at most `most`, of a path of pages its deepest checkpoint covers."""
        return self.deepest(pages[: most // self._page_size]) * self._page_size

    def covered_of(self, match: Match, most: int) -> int:
        """The same of a path in the tree."""
        return self.covered(np.frombuffer(match.values(), np.int32), most)

    def along(self, pages: np.ndarray) -> list[tuple[int, int]]:
        """(number of pages, slot) of the checkpoints of a path that can be read and are not spent (see
        `CheckpointOrder`)."""
        slots = self._of_page[pages]
        found = [(place + 1, int(slots[place])) for place in np.flatnonzero(slots).tolist()]
        return [(count, slot) for count, slot in found if slot not in self._saves and not self._order.is_spent(slot)]

    # ------------------------------------------------------------ pins

    def pin(self, pages: np.ndarray) -> int:
        """Protect the deepest checkpoint of a path. Returns its page, for `unpin`; 0 if there is none, or if half
        of all slots are protected already."""
        depth = self.deepest(pages)
        page = int(pages[depth - 1]) if depth else 0
        if not page or (page not in self._pinned and len(self._pinned) >= self.total // 2):
            return 0
        self._pinned[page] += 1
        return page

    def unpin(self, page: int) -> None:
        """Undo one `pin`."""
        if page:
            self._pinned[page] -= 1
            if not self._pinned[page]:
                del self._pinned[page]

    # ------------------------------------------------------------ a request's state

    def begin(self, page: int) -> int:
        """A live slot, with the state of a page's checkpoint, or with zeros if `page` is 0. `has_room` must be true."""
        source = int(self._of_page[page]) if page else 0
        slot = self._allocate(source, pinned_too=True)
        if not slot:  # the only checkpoint that could be evicted is the one to begin with
            self._lose(source)
            self._free.remove(source)
            slot = source
        else:
            self._restores[slot] = source
            self._use(source, slot)
        self._live.add(slot)
        return slot

    def restore(self, slot: int, page: int) -> None:
        """Let a live state go on from a page's checkpoint."""
        self._forgo(slot)
        self._restores[slot] = source = int(self._of_page[page])
        self._use(source, slot)

    def onload(self, slot: int, held: int) -> None:
        """Let a live state go on from a checkpoint in host memory, which is held there."""
        self._forgo(slot)
        self._host.onload(held, slot)

    def save(self, slot: int, page: int, within: int = 0, path: Path = NO_PATH) -> bool:
        """Take a checkpoint of a live state for a page, with which `path` ends, as it is after the step, or after
        `within` of the request's tokens of the step. False if there is no slot for it."""
        if self._of_page[page]:
            self._order.touch(int(self._of_page[page]))
            return True
        copy = self._allocate()
        if not copy:
            return False
        self._saves[copy] = slot
        if within:
            self._within[copy] = within
        self._register(copy, page, path)
        return True

    def draft(self, slot: int, count: int) -> list[int]:
        """Slots for the states after each of `count` drafted tokens that follow a live state; fewer if there are no
        more (see `draftable`). They stay until `accept` or `end`."""
        slots: list[int] = []
        most = min(count, self.draftable)
        while len(slots) < most and (one := self._allocate()):
            slots.append(one)
        if slots:
            self._drafted[slot] = slots
        return slots

    def accept(self, slot: int, count: int) -> int:
        """The first `count` drafted tokens that follow a live state are right. Returns the slot of the state after
        them, which is live now; the other slots are free."""
        slots = [slot, *self._drafted.pop(slot)]
        now = slots.pop(count)
        self._live.remove(slot)
        self._live.add(now)
        self._free += slots
        return now

    def end(self, slot: int, page: int = 0, path: Path = NO_PATH) -> None:
        """A live state is not written any more. It becomes the checkpoint of `page`, with which `path` ends, unless
        that has one or is 0, or the state has not come back from host memory yet. Drafted tokens that follow it are
        forgotten."""
        self._live.remove(slot)
        self._free += self._drafted.pop(slot, [])
        if self._forgo(slot):
            page = 0
        if not page or self._of_page[page]:
            self._order.touch(int(self._of_page[page]))
            self._free.append(slot)
        else:
            self._register(slot, page, path, last=True)

    def evict(self, pages: np.ndarray) -> None:
        """These pages leave the tree although they, and their checkpoints, are valid. Those that the plan being made
        takes are not taken."""
        for slot in self._slots_of(pages):
            if slot not in self._saves:
                self._lose(slot)
        self.drop(pages)

    def drop(self, pages: np.ndarray) -> None:
        """Drop the checkpoints of pages that have left the tree, or whose checkpoints are not valid."""
        for slot in self._slots_of(pages):
            self._saves.pop(slot, None)
            self._within.pop(slot, None)
            self._unregister(slot)

    def drop_all(self) -> None:
        """Drop all checkpoints: some of them may be of states that did not come back from host memory."""
        self.drop(np.array(list(self._pages.values()), dtype=np.int64))

    def _slots_of(self, pages: np.ndarray) -> list[int]:
        slots = self._of_page[pages]
        return slots[slots > 0].tolist()

    def _forgo(self, slot: int) -> bool:
        """The plan being made does not restore a live slot, if it was to. Returns whether that was from host memory."""
        if self._restores.pop(slot, None) and slot in self._spent:
            self._order.take_back(self._spent.pop(slot))
        return self._host.forgo(slot)

    # ------------------------------------------------------------ events

    def drain_events(self) -> list[Event]:
        """The changes since the last call."""
        events, self._events = self._events or [], [] if self._events is not None else None
        return events

    def resync_events(self) -> list[Event]:
        """All checkpoints on the device, as events; those that were not drained are dropped."""
        self.drain_events()
        return [("saved", slot, *prefix) for slot, prefix in self._prefixes.items()]

    # ------------------------------------------------------------ slots

    def work(self, slots: np.ndarray, runs: Sequence[int] | np.ndarray = ()) -> StateWork:
        """What the plan being made does with the states: those of its entries, and copies. See StateWork."""
        restores, saves, within = self.drain()
        return StateWork(np.asarray(slots, np.int32), restores, saves, within, np.asarray(runs, np.int32))

    def drain(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The copies before the step and those after it, each int32[2, N]: (from, to). And `StateWork.within`."""
        after = {to: slot for to, slot in self._saves.items() if to not in self._within}
        restores, saves = (
            np.array([[*copies.values()], [*copies]], dtype=np.int32) for copies in (self._restores, after)
        )
        passed = [[self._saves[to] for to in self._within], [*self._within.values()], [*self._within]]
        within = np.array(passed, dtype=np.int32)
        self.version += len(self._saves) > 0
        self._restores.clear()
        self._saves.clear()
        self._within.clear()
        self._spent.clear()
        return restores, saves, within

    def _oldest(self, spared: int = 0, pinned_too: bool = False) -> int:
        """The least recently used checkpoint that the plan being made neither reads nor writes, if possible none that
        is pinned; 0 if there is none."""
        busy = {spared, *self._restores.values(), *self._saves}
        first = 0
        for slot in self._order:
            if slot not in busy:
                if self._pages[slot] not in self._pinned:
                    return slot
                first = first or slot
        return first if pinned_too else 0

    def _allocate(self, spared: int = 0, pinned_too: bool = False) -> int:
        """A free slot, or that of the oldest checkpoint but `spared`; 0 if there is none."""
        if not self._free:
            oldest = self._oldest(spared, pinned_too)
            if not oldest:
                return 0
            self._lose(oldest)
            self.evicted += 1
        return self._free.pop()

    def _use(self, source: int, slot: int) -> None:
        """A live slot goes on from a checkpoint, or from nothing (0)."""
        if self._order.go_on(source):
            self._spent[slot] = source

    def _lose(self, slot: int) -> None:
        """A checkpoint that is valid goes, to host memory if there is any."""
        order, prefix = self._order, self._prefixes.get(slot, UNKNOWN)
        self._host.store(slot, prefix, order.is_last(slot), order.is_spent(slot))
        self._unregister(slot)

    def _register(self, slot: int, page: int, path: Path, last: bool = False) -> None:
        self._of_page[page] = slot
        self._pages[slot] = page
        self._order.add(slot, last)
        self.version += 1
        self._host.name(slot, *path)
        if self._events is not None:
            self._prefixes[slot] = prefix = len(path[1]), prefix_digest(*path)
            self._events.append(("saved", slot, *prefix))

    def _unregister(self, slot: int) -> None:
        self._of_page[self._pages.pop(slot)] = 0
        self._order.remove(slot)
        self._host.unname(slot)
        self._free.append(slot)
        self.version += 1
        if self._events is not None:
            del self._prefixes[slot]
            self._events.append(("dropped", slot))

    def check(self, running: list[int], tree_pages: np.ndarray) -> None:
        """Assert that every slot is in exactly one place, `running` being those of running requests, and that every
        checkpoint is of one of `tree_pages`."""
        assert sorted(running) == sorted(self._live), "each running request has a live state"
        drafted = [slot for slots in self._drafted.values() for slot in slots]
        places = sorted([*self._free, *self._live, *self._pages, *drafted])
        assert places == list(range(1, self.total + 1)), "live + drafted + checkpoints + free = total"
        assert set(self._drafted) <= self._live and self.drafted <= self.total // DRAFT_SHARE
        pages = list(self._pages.values())
        assert np.isin(pages, tree_pages).all(), "each checkpoint is of a page of the tree"
        assert self._of_page[pages].tolist() == list(self._pages), "each checkpoint is found by its page"
        assert np.count_nonzero(self._of_page) == len(pages), "and by no other"
        assert not set(self._restores) & set(self._restores.values()), "no slot is both read and written before a step"
        assert set(self._order) == set(self._pages), "each checkpoint has its place in the order"
        self._host.check_named(set(self._pages))
        assert set(self._restores) <= self._live and set(self._saves.values()) <= self._live
        assert set(self._within) <= set(self._saves)


class NoStates:
    """In the place of RecurrentStatePool for models without recurrent states: a request can go on after any token whose
    KV is cached, and drafted tokens need no slots."""

    version = total = live = evicted = drafted = 0
    draftable = 1 << 30
    has_room = True
    free = 1

    def covered(self, pages: np.ndarray, most: int) -> int:
        return most

    def covered_of(self, match: Match, most: int) -> int:
        return most

    def along(self, pages: np.ndarray) -> list[tuple[int, int]]:
        return []

    def pin(self, pages: np.ndarray) -> int:
        return 0

    def begin(self, page: int) -> int:
        return 0

    def save(self, slot: int, page: int, within: int = 0, path: Path = NO_PATH) -> bool:
        return False

    def draft(self, slot: int, count: int) -> list[int]:
        return []

    def accept(self, slot: int, count: int) -> int:
        return slot

    def end(self, slot: int, page: int = 0, path: Path = NO_PATH) -> None:
        pass

    def evict(self, pages: np.ndarray) -> None:
        pass

    def drop(self, pages: np.ndarray) -> None:
        pass

    def work(self, slots: np.ndarray, runs: Sequence[int] | np.ndarray = ()) -> StateWork:
        return StateWork.nothing()

    def drain_events(self) -> list[Event]:
        return []

    def resync_events(self) -> list[Event]:
        return []

    def _nothing(self, *_: object, **__: object) -> None:
        pass

    unpin = restore = onload = drop_all = check = _nothing


AnyStates = RecurrentStatePool | NoStates
