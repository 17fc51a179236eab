"""The slots of the state pool alone, and those of host memory: on a device that does the copies of a plan in any order,
every request and every prefix finds its state."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixrt.worker.cache.host_recurrent_states import HostRecurrentStatePool
from radixrt.worker.cache.recurrent_states import Path, RecurrentStatePool


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def path(page: int) -> Path:
    """A prefix for each page."""
    return "", memoryview(np.array([page], dtype=np.int32))


def saved(states: RecurrentStatePool, page: int) -> None:
    """Let a request begin from nothing and leave a checkpoint for a page."""
    states.end(states.begin(0), page)
    states.drain()


def test_a_checkpoint_that_a_plan_reads_is_not_evicted_by_it() -> None:
    states = RecurrentStatePool(4, 10)
    for page in (1, 2, 3):
        saved(states, page)
    first = states.begin(1)  # takes the slot of 2
    second = states.begin(1)  # takes the slot of 3, although 1 is the oldest of the rest
    assert not states.has_room and not states.save(first, 5), "only what is read or written is left"
    restores, saves, _ = states.drain()
    assert sorted(restores[1].tolist()) == sorted((first, second)) and len(set(restores[0].tolist())) == 1
    assert saves.shape == (2, 0) and states.deepest(pages(1)) == 1 and states.has_room


def test_drafts_take_the_slots_of_checkpoints_that_are_not_pinned() -> None:
    states = RecurrentStatePool(13, 20)
    live = states.begin(0)
    for page in range(1, 12):
        saved(states, page)
    for page in range(1, 7):
        assert states.pin(pages(page)) == page
    assert states.draftable == 3 and len(states.draft(live, 5)) == 3
    states.accept(live, 0)
    for _ in range(3):
        states.begin(0)  # three slots were free
    states.drain()
    assert states.draftable == 2 and len(states.draft(live, 5)) == 2 and states.draftable == 0
    assert all(states.deepest(pages(page)) for page in range(1, 7))


def test_a_checkpoint_whose_page_leaves_before_it_is_taken_is_not_taken() -> None:
    states = RecurrentStatePool(4, 10)
    slot = states.begin(0)
    assert states.save(slot, 5) and states.deepest(pages(5)) == 0
    states.drop(pages(4, 5))
    assert states.drain()[1].shape == (2, 0) and states.deepest(pages(5)) == 0 and states.free == 2


def test_the_only_state_is_copied_before_a_request_goes_on_in_its_slot() -> None:
    host = HostRecurrentStatePool(5, 1)
    states = RecurrentStatePool(2, 10, host=host)
    states.end(states.begin(0), 1, path(1))
    states.drain()
    assert states.begin(1) == 1 and states.drain()[0].size == 0
    assert host.drain()[0].tolist() == [[1], [1]] and host.deepest(*path(1), 1) == (1, 1)


def test_of_two_checkpoints_to_go_on_from_the_later_one_counts() -> None:
    """Others may have computed more by then, here or there. Nobody has gone on from the first one."""
    for fetched_last in (False, True):
        host = HostRecurrentStatePool(5, 1)
        states = RecurrentStatePool(5, 10, host=host)
        for page in (1, 2):
            states.end(states.begin(0), page, path(page))
            states.drain()
        states.evict(pages(1))
        host.drain()
        slot = states.begin(0)
        for fetches in (not fetched_last, fetched_last):
            if fetches:
                host.hold(1)
                states.onload(slot, 1)
            else:
                states.restore(slot, 2)
        restored, (_, back) = states.drain()[0].tolist(), host.drain()
        assert (restored, back.tolist()) == (([[], []], [[1], [slot]]) if fetched_last else ([[2], [slot]], [[], []]))
        spent = states._order.is_spent(2), host._order.is_spent(1)
        assert spent == (not fetched_last, fetched_last)


def test_what_one_plan_went_on_from_is_not_taken_back_in_another() -> None:
    states = RecurrentStatePool(6, 10)
    slot = states.begin(0)
    states.save(slot, 2)
    states.end(slot, 1)
    states.drain()
    slot = states.begin(1)
    states.drain()
    states.restore(slot, 2)
    states.end(slot)
    assert states._order.is_spent(int(states._of_page[1]))


def test_what_a_conversation_has_gone_on_from_replaces_nothing_in_host_memory() -> None:
    for goes_on in (False, True):
        host = HostRecurrentStatePool(2, 1)
        states = RecurrentStatePool(4, 10, host=host)
        for page in (1, 2):
            states.end(states.begin(0), page, path(page))
            states.drain()
        states.evict(pages(1))
        if goes_on:
            states.begin(2)
            states.drain()
        states.evict(pages(2))
        assert host.deepest(*path(1 if goes_on else 2), 1) == (1, 1) and len(host) == 1


def test_checkpoints_are_used_by_restoring_taking_and_leaving() -> None:
    for use in (
        lambda states, _: states.end(states.begin(1)),
        lambda states, slot: (states.restore(slot, 1), states.drain(), states.restore(slot, 1)),
        lambda states, slot: states.save(slot, 1),
        lambda states, slot: states.end(slot, 1),
    ):
        states = RecurrentStatePool(5, 10)
        slot = states.begin(0)
        for page in (1, 2):
            saved(states, page)
        use(states, slot)
        states.drain()
        while states.deepest(pages(2)):
            states.begin(0)
            states.drain()
        assert states.deepest(pages(1)) == 1, "2 went first"


class Slots(RuleBasedStateMachine):
    """A device that does a plan's copies in any order, and what requests and prefixes should find there."""

    @initialize(total=st.sampled_from([1, 2, 3, 4, 6, 9, 12]), memory=st.sampled_from([0, 1, 2, 4]))
    def make(self, total: int, memory: int) -> None:
        self.host = HostRecurrentStatePool(memory + 1, 1) if memory else None
        self.states = RecurrentStatePool(total + 1, 8, host=self.host)
        self.device = [0] * (total + 1)
        self.memory = [0] * (memory + 1)
        self.there: dict[int, int] = {}
        """What the checkpoint in host memory for each page should be, if there is one."""
        self.live: dict[int, int] = {}
        """What the state of each live slot is; slots that begin in this plan included."""
        self.known: dict[int, int] = {}
        """What the checkpoint of each page should be, if there is one."""
        self.coming: dict[int, tuple[int, int]] = {}
        """The pages that are saved in this plan, the slots they are saved from, and after how many tokens; 0: after the
        step."""
        self.drafted: dict[int, list[int]] = {}
        """The slots of drafted tokens that follow each live slot."""
        self.found: dict[int, list[int]] = {}
        """The states after the tokens of the drafts that a step has computed; none computes more until `accept`."""
        self.steps = 0

    @precondition(lambda self: self.states.has_room)
    @rule(page=st.integers(0, 7))
    def begin(self, page: int) -> None:
        page = page if page and self.states.deepest(pages(page)) else 0
        self.live[self.states.begin(page)] = self.known[page] if page else 0

    @precondition(lambda self: set(self.live) - set(self.drafted))
    @rule(data=st.data(), page=st.integers(1, 7), within=st.integers(0, 2))
    def save(self, data: st.DataObject, page: int, within: int) -> None:
        slot = data.draw(st.sampled_from(sorted(set(self.live) - set(self.drafted))))
        if page in self.coming or self.states.deepest(pages(page)):
            return
        if self.states.save(slot, page, within, path(page)):
            self.coming[page] = slot, within

    @precondition(lambda self: set(self.live) - self.saved)
    @rule(data=st.data(), page=st.integers(0, 7))
    def end(self, data: st.DataObject, page: int) -> None:
        slot = data.draw(st.sampled_from(sorted(set(self.live) - self.saved)))
        fresh = page and page not in self.coming and not self.states.deepest(pages(page))
        if self.device[slot] != self.live[slot]:  # not restored yet: it would be of the page that it began with
            fresh, page = False, 0
        self.states.end(slot, page, path(page))
        self.drafted.pop(slot, None)
        self.found.pop(slot, None)
        if fresh:
            self.known[page] = self.live[slot]
        del self.live[slot]

    @precondition(lambda self: set(self.live) - set(self.drafted) - self.saved)
    @rule(data=st.data(), count=st.integers(1, 3))
    def draft(self, data: st.DataObject, count: int) -> None:
        slot = data.draw(st.sampled_from(sorted(set(self.live) - set(self.drafted) - self.saved)))
        room, before = self.states.draftable, len(self.states)
        found = self.states.draft(slot, count)
        assert len(found) <= max(0, min(count, room)) and len(self.states) >= before - len(found)
        if found:
            self.drafted[slot] = found

    @precondition(lambda self: self.found)
    @rule(data=st.data())
    def accept(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.found)))
        slots, found = [slot, *self.drafted.pop(slot)], self.found.pop(slot)
        count = data.draw(st.integers(0, len(slots) - 1))
        assert self.states.accept(slot, count) == slots[count]
        del self.live[slot]
        self.live[slots[count]] = found[count]

    @rule(page=st.integers(1, 7), valid=st.booleans())
    def drop(self, page: int, valid: bool) -> None:
        source = self.states._of_page[page]
        if source in self.states._restores.values():  # its page is leased
            return
        (self.states.evict if valid else self.states.drop)(pages(page))
        self.coming.pop(page, None)

    @precondition(lambda self: set(self.live) - set(self.drafted) - self.saved)
    @rule(data=st.data(), page=st.integers(1, 7))
    def restore(self, data: st.DataObject, page: int) -> None:
        slot = data.draw(st.sampled_from(sorted(set(self.live) - set(self.drafted) - self.saved)))
        if self.states.deepest(pages(page)):
            self.states.restore(slot, page)
            self.live[slot] = self.known[page]

    @precondition(lambda self: self.there and set(self.live) - set(self.drafted) - self.saved)
    @rule(data=st.data())
    def fetch(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(set(self.live) - set(self.drafted) - self.saved)))
        page = data.draw(st.sampled_from(sorted(self.there)))
        held = self.slot_there(page)
        self.host.hold(held)
        self.states.onload(slot, held)
        self.live[slot] = self.there[page]

    @rule(random=st.randoms(use_true_random=False))
    def step(self, random: random.Random) -> None:
        restores, saves, within = self.states.drain()
        before = [(self.device, target, source) for source, target in restores.T.tolist()]
        if self.host is not None:
            leaving, back = self.host.drain()
            for source, target in leaving.T.tolist():
                self.memory[target] = self.device[source]
            before += [(self.memory, target, source) for source, target in back.T.tolist()]
        assert len({target for _, target, _ in before}) == len(before), "no slot is written twice"
        random.shuffle(before)
        for place, target, source in before:
            self.device[target] = place[source] if source else 0
        for page, expected in self.there.items():
            assert self.memory[self.slot_there(page)] == expected
        self.steps += 1
        for slot, expected in self.live.items():
            assert self.device[slot] == expected
            if slot not in self.found:
                self.device[slot] = self.live[slot] = self._after(slot, 0)
        for slot in set(self.drafted) - set(self.found):
            self.found[slot] = [self._after(one, 0) for one in (slot, *self.drafted[slot])]
            for one, state in zip(self.drafted[slot], self.found[slot][1:], strict=True):
                self.device[one] = state
        for slot, tokens, target in within.T.tolist():
            assert slot in self.live
            self.device[target] = self._after(slot, tokens)
        self._copy(saves, random)
        self.known |= {page: self._after(*place) for page, place in self.coming.items()}
        self.coming.clear()

    @property
    def saved(self) -> set[int]:
        """Slots that are saved in this plan."""
        return {slot for slot, _ in self.coming.values()}

    def slot_there(self, page: int) -> int:
        """Of a page's checkpoint in host memory; 0: it has none."""
        return 0 if self.host is None else self.host.deepest(*path(page), 1)[1]

    def _after(self, slot: int, tokens: int) -> int:
        """What this step's state in a live slot is, after so many tokens; 0: after all."""
        return self.steps * 1000 + slot * 10 + tokens

    def _copy(self, copies: np.ndarray, random: random.Random) -> None:
        pairs = list(zip(*copies.tolist(), strict=True))
        random.shuffle(pairs)
        for source, target in pairs:
            self.device[target] = self.device[source] if source else 0

    @invariant()
    def every_checkpoint_is_what_it_should_be(self) -> None:
        if hasattr(self, "states"):
            # What has just come there is what the device had; what was there already is not copied again.
            self.there = {p: self.there.get(p, self.known.get(p, 0)) for p in range(1, 8) if self.slot_there(p)}
            self.states.check(list(self.live), np.arange(1, 8))
            for page in range(1, 8):
                if self.states.deepest(pages(page)):
                    assert self.device[self.states._of_page[page]] == self.known[page]


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
