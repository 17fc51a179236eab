"""Which adapter gets which slot, and when: with a runner that only notes what it is told."""

from __future__ import annotations

import threading

import pytest

from radixrt.messages import Adapter
from radixrt.worker import lora_slots
from radixrt.worker.lora_slots import AdapterSlots
from tests.waiting import eventually


class Notes:
    """A runner that has put adapters into slots."""

    disk = None

    def __init__(self) -> None:
        self.slots: dict[int, str] = {}
        self.may_read = threading.Event()
        self.may_read.set()

    def read_adapter(self, module):
        assert self.may_read.wait(10)
        if module.path == "broken":
            raise ValueError(f"--lora-modules {module.name}: there is no folder broken")
        if module.path == "verbose":
            raise ValueError("sql: " + "no " * 1000)
        return module.path

    def put_adapter(self, slot, module, adapter):
        if adapter == "misshapen":
            raise ValueError(f"--lora-modules {module.name}: its rank is 99")
        if adapter == "cursed":
            raise RuntimeError("the device said no")
        self.slots[slot] = adapter


@pytest.fixture
def runner():
    return Notes()


@pytest.fixture
def slots(runner):
    """One adapter from the start, and room for one more, and for a replacement."""
    found = AdapterSlots(runner, ["first"], 3)
    yield found
    found.close()


def load(slots: AdapterSlots, *adapter, used=()):
    """Loads it, and returns the error, or None while it waits for a slot."""
    slots.load(Adapter(*adapter))
    eventually(lambda: not slots or slots._loading[-1][1].done())
    return take(slots, used)


def take(slots: AdapterSlots, used=()):
    return slots.take().error if slots.is_ready(lambda: set(used)) else None


def test_a_new_adapter_gets_a_free_slot(slots, runner):
    assert load(slots, "sql", 5, "folder") == ""
    assert slots.numbers == {("first", 0): 0, ("sql", 5): 1} and runner.slots == {1: "folder"}
    assert slots.loaded == [Adapter("first"), Adapter("sql", 5, "folder")]
    assert not slots, "nothing is being loaded"


def test_versions_stand_beside_each_other_until_the_former_is_unloaded(slots, runner):
    load(slots, "sql", 5, "old")
    load(slots, "sql", 6, "new")
    assert slots.numbers[("sql", 5)] == 1 and slots.numbers[("sql", 6)] == 2
    slots.unload("sql", 5)
    assert ("sql", 5) not in slots.numbers
    assert load(slots, "sql", 7, "newest") == "" and runner.slots == {1: "newest", 2: "new"}


def test_a_slot_is_not_overwritten_while_a_request_has_it(slots, runner):
    load(slots, "sql", 5, "old")
    load(slots, "sql", 6, "new")
    slots.unload("sql", 5)
    assert load(slots, "sql", 7, "newest", used={-1, 1}) is None and slots
    assert take(slots, {1}) is None and runner.slots[1] == "old"
    assert take(slots, {-1, 0, 2}) == "" and runner.slots[1] == "newest"


def test_without_a_slot_that_will_be_free_it_is_refused(slots, runner):
    load(slots, "a", 1, "a")
    load(slots, "b", 2, "b")
    assert load(slots, "c", 3, "c") == "c: no slot is free"
    assert "c" not in runner.slots.values() and len(slots.numbers) == 3


@pytest.mark.parametrize("again", [False, True])
def test_an_answer_that_needs_no_slot_does_not_wait_for_one(slots, runner, again):
    """Requests can keep one for long."""
    load(slots, "a", 1, "a")
    load(slots, "b", 2, "b")
    slots.unload("first", 0)
    if again:
        assert load(slots, "a", 1, "a", used={0}) == ""
    else:
        assert load(slots, "c", 3, "broken", used={0}) == "c: there is no folder broken"
    assert load(slots, "c", 4, "c", used={0}) is None


@pytest.mark.parametrize(
    ("path", "error"),
    [("broken", "sql: there is no folder broken"), ("misshapen", "sql: its rank is 99"),
     ("cursed", "sql: the device said no"), ("verbose", "sql: " + "no " * 330 + "no...")],
)  # fmt: skip
def test_what_cannot_be_loaded_leaves_its_slot_free(slots, runner, path, error):
    assert load(slots, "sql", 5, path) == error
    assert load(slots, "sql", 6, "folder") == "" and slots.numbers[("sql", 6)] == 1


def test_what_is_loaded_or_being_loaded_is_not_read_again(slots, runner):
    runner.may_read.clear()
    slots.load(Adapter("sql", 5, "folder"))
    slots.load(Adapter("sql", 5, "folder"))
    assert len(slots._loading) == 1 and not slots.is_ready(set)
    runner.may_read.set()
    assert load(slots, "sql", 5, "folder") == ""
    assert load(slots, "sql", 5, "folder") == "", "the router had missed the reply"
    assert slots.numbers == {("first", 0): 0, ("sql", 5): 1}


def test_an_adapter_of_the_start_can_go(slots):
    slots.unload("first", 0)
    slots.unload("first", 0)
    assert slots.loaded == []
    for number in range(3):
        assert load(slots, f"a{number}", 1, "folder") == ""
    assert sorted(slots.numbers.values()) == [0, 1, 2]


def test_without_slots_nothing_is_loaded(runner):
    slots = AdapterSlots(runner, ["first"], 0)
    assert load(slots, "sql", 5, "folder") == "sql: no slot is free"
    slots.close()


def test_files_that_cannot_be_read_do_not_keep_others_waiting(slots, runner, monkeypatch):
    """A network's file system may not answer: that is given up after a while, and the worker serves on."""
    runner.may_read.clear()
    slots.load(Adapter("lost", 1, "nfs"))
    slots.load(Adapter("sql", 2, "sql"))
    assert not slots.is_ready(set)
    monkeypatch.setattr(lora_slots, "READ_SECONDS", 60.0)
    slots._read_until = 0.0
    found = slots.take() if slots.is_ready(set) else None
    assert found.adapter.name == "lost" and found.error == "lost: reading it took more than 60 s"
    runner.may_read.set()
    eventually(lambda: slots.is_ready(set))
    found = slots.take()
    assert (found.adapter.name, found.error) == ("sql", "") and set(runner.slots.values()) == {"sql"}
