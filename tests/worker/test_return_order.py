"""The order of eviction by what contexts wait for."""

from __future__ import annotations

import numpy as np
import pytest

from radixrt.tree import RadixTree
from radixrt.worker.cache.return_order import MAX_ENDED, ReturnOrder


class Cache:
    """A tree of one token a page with its order, and the turns of conversations in it."""

    def __init__(self, room: int = 10_000) -> None:
        self.tree = RadixTree(values=False)
        self.order = ReturnOrder([self.tree], room, grain=1)
        self.turns = 0

    def turn(self, now: float, path: list[int], why: str = "stop", tool: str = "", name: str = "t\n") -> None:
        self.turns += 1
        ids = np.array(path, np.int32)
        self.order.arrived(self.turns, name, ids, now)
        self.tree.insert(name, ids)
        self.order.ended(self.turns, name, ids, why, 1, now)
        if tool:
            self.order.waits_for(self.turns, tool)

    def held(self, *paths: list[int], name: str = "t\n") -> list[int]:
        return [self.tree.match(name, np.array(path, np.int32)).length for path in paths]

    def evict(self, now: float, tokens: int) -> None:
        self.order.before_eviction(now)
        self.tree.evict(tokens)
        self.tree.check()


def taught(cache: Cache, name: str = "t\n") -> float:
    """Conversations drop their thoughts, and return after 2 s if they called `fast`, after 100 s if `slow`."""
    now = 0.0
    for number in range(60):
        tool, seconds = (("fast", 2.0), ("slow", 100.0))[number % 2]
        path = [1000 + number] * 4
        cache.turn(now, [*path, 5, 6], tool=tool, name=name)
        cache.turn(now + seconds, [*path, 1], name=name)
        now += seconds
    return now


def test_who_waits_for_a_slow_tool_goes_before_who_waits_for_a_fast_one() -> None:
    cache = Cache()
    now = taught(cache)
    cache.turn(now, [1] * 50, tool="fast")
    cache.turn(now + 1, [2] * 50, tool="slow")
    cache.evict(now + 1, cache.tree.tokens - 50)
    assert cache.held([1] * 50, [2] * 50) == [50, 0], "although it was used later"


def test_who_should_have_returned_goes_first() -> None:
    cache = Cache()
    now = taught(cache)
    cache.turn(now, [1] * 50, tool="fast")
    cache.turn(now, [2] * 50, tool="slow")
    cache.evict(now + 90, cache.tree.tokens - 50)
    assert cache.held([1] * 50, [2] * 50) == [0, 50]


def test_without_knowledge_the_least_recently_used_goes_first() -> None:
    cache, plain, rng = Cache(), RadixTree(values=False), np.random.default_rng(0)
    for number in range(300):
        path = rng.integers(0, 3, rng.integers(1, 12)).astype(np.int32)
        now = float(number)
        cache.order.before_eviction(now)
        cache.tree.insert("t", path)
        plain.insert("t", path)
        if plain.tokens > 60:
            cache.order.before_eviction(now)
            assert sorted(cache.tree.snapshot()) == sorted(plain.snapshot())
            cache.tree.evict(7)
            plain.evict(7)
            assert sorted(cache.tree.snapshot()) == sorted(plain.snapshot())


def test_what_was_superseded_goes_first() -> None:
    cache = Cache()
    now = taught(cache)
    cache.turn(now, [*[2] * 20, 5, 6, 7], tool="fast")
    cache.turn(now + 0.5, [1] * 50, tool="fast")
    cache.turn(now + 1, [*[2] * 20, 8, 9, 9], tool="fast")  # its template drops what it thought
    cache.evict(now + 1.2, cache.tree.tokens - 50 - 23)
    assert cache.held([1] * 50, [*[2] * 20, 5, 6, 7], [*[2] * 20, 8, 9, 9]) == [50, 20, 23]


def test_a_prompt_that_all_share_does_not_part_conversations() -> None:
    cache = Cache()
    system = [7] * 10
    for number in range(5):
        cache.turn(float(number), [*system, *[20 + number] * 30])
    parted = [context.parted for context in cache.order._contexts.values()]
    assert parted == [True, *[False] * 4], "of the first it is not known that its beginning is shared"


def test_tenants_do_not_learn_from_each_other() -> None:
    cache = Cache()
    taught(cache)
    assert cache.order.times.row("t", ("tool fast",))
    assert not cache.order.times.row("u", ("tool fast",))


def test_of_a_tenant_that_is_deleted_nothing_is_left() -> None:
    cache = Cache()
    for name in ("t\n", "u\n"):
        taught(cache, name)
    cache.order.delete("t")
    assert not cache.order.times.row("t", ("tool fast",))
    assert cache.order.times.row("u", ("tool fast",))
    assert {context.tenant for context in cache.order._contexts.values()} == {"u"}
    assert not cache.order._paths.match("t\n", np.array([1000], np.int32)).length
    assert all(ended.namespace == "u\n" for ended in cache.order._ended.values())
    cache.turn(1e6, [1, 2, 3], tool="fast")


def test_a_late_name_of_a_tool_is_dropped() -> None:
    cache = Cache()
    for number in range(MAX_ENDED + 5):
        cache.turn(float(number), [number] * 3)
    cache.order.waits_for(1, "fast")
    cache.order.waits_for(12345, "fast")
    assert not cache.order.times.row("t", ("tool fast",))
    cache.order.waits_for(MAX_ENDED, "fast")
    assert cache.order.times.row("t", ("tool fast",))


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixrt.worker.cache.return_order.MAX_CONTEXTS", 20)
    cache = Cache(room=10)
    for number in range(200):
        cache.turn(float(number), [number] * 5)
    assert len(cache.order._contexts) <= 20
    assert cache.order._paths.tokens <= 80
    assert not cache.order._running
