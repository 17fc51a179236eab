"""The order of eviction by rates of return."""

from __future__ import annotations

import random

import pytest

from radixrt.tree import RadixTree
from tests.tree.test_stateful import ints

EDGES = [0.0, 1.0, 4.0, 16.0]
RATES = [[4.0, 3.0, 2.0, 1.0], [1.5, 6.0, 2.5, 0.5], [0.1, 0.2, 9.0, 0.3]]


def flat() -> list[float]:
    return [rate for row in RATES for rate in row]


def leaves(tree: RadixTree, count: int) -> list[int]:
    return [int.from_bytes(tree.evict(1)[:4], "little") for _ in range(count)]


def rate_of(kind: int, age: float) -> float:
    return RATES[kind][max(step for step, edge in enumerate(EDGES) if edge <= age)]


@pytest.mark.parametrize("seed", range(20))
def test_leaves_go_in_the_order_of_their_rates_at_that_time(seed: int) -> None:
    rng = random.Random(seed)
    tree, now, held = RadixTree(events=True), 0.0, {}
    tree.set_returns(EDGES, flat())
    for turn in range(1, 200):
        now += rng.choice((0.0, 0.25, 1.0, 3.0))
        tree.advance(now)
        match rng.randrange(4):
            case 0 | 1:
                tree.insert("n", ints([turn, turn]), ints([turn, turn]))
                held[turn] = [0, now, turn]
            case 2 if held:
                leaf = rng.choice(list(held))
                held[leaf][:2] = kind, since = rng.randrange(3), now - rng.choice((0.0, 2.0, 10.0))
                assert tree.mark("n", ints([leaf, leaf]), kind, since)
            case 3 if held:
                first = min(held, key=lambda leaf: (rate_of(held[leaf][0], now - held[leaf][1]), held[leaf][2]))
                assert leaves(tree, 2) == [first, first]
                del held[first]
        tree.check()


def test_without_rates_what_is_known_changes_nothing() -> None:
    tree = RadixTree()
    for leaf in range(5):
        tree.advance(leaf)
        tree.insert("n", ints([leaf]), ints([leaf]))
        tree.mark("n", ints([leaf]), 7 - leaf, 100.0 - leaf)
    assert leaves(tree, 5) == [0, 1, 2, 3, 4]


def test_a_parent_goes_on_as_what_it_was_last_used_for() -> None:
    tree = RadixTree()
    tree.set_returns(EDGES, flat())
    tree.insert("n", ints([1]), ints([1]))
    with tree.lease(tree.match("n", ints([1]))) as lease:
        tree.insert(lease, ints([2]), ints([2]))
    tree.mark("n", ints([1, 2]), 2, 0.0)
    tree.insert("n", ints([3]), ints([3]))
    assert leaves(tree, 2) == [2, 1], "kind 2 is worth less than kind 0, at first"
    tree.check()


def test_what_is_evicted_into_another_tree_keeps_its_kind() -> None:
    tree, there = RadixTree(), RadixTree()
    for one in (tree, there):
        one.set_returns(EDGES, flat())
    for leaf in (1, 2):
        tree.insert("n", ints([leaf]), ints([leaf]))
    tree.mark("n", ints([1]), 2, 0.0)
    for _ in range(2):
        place, ids, values = tree.evict_into(there, 1)
        there.insert(place, ids, values)
        place.release()
    for one in (tree, there):
        one.advance(5.0)
        one.check()
    assert leaves(there, 2) == [2, 1], "at that age kind 2 is worth most"


@pytest.mark.parametrize(
    ("edges", "rates"),
    [([], []), ([1.0], [1.0]), ([0.0, 0.0], [1.0, 1.0]), ([0.0, 1.0], [1.0]), ([0.0], []), ([0.0], [float("nan")])],
)
def test_rates_that_make_no_sense_are_refused(edges: list[float], rates: list[float]) -> None:
    with pytest.raises(ValueError, match="edges|rates"):
        RadixTree().set_returns(edges, rates)


def test_a_tree_with_a_policy_takes_no_rates() -> None:
    with pytest.raises(ValueError, match="policy"):
        RadixTree(policy=lambda *_: 0).set_returns([0.0], [1.0])


def test_what_does_not_end_there_is_not_marked() -> None:
    tree = RadixTree()
    tree.insert("n", ints([1, 2, 3]), ints([1, 2, 3]))
    assert not tree.mark("n", ints([1, 2]), 1, 0.0)
    assert not tree.mark("other", ints([1]), 1, 0.0)
    assert tree.mark("n", ints([1, 2, 3, 4]), 1, 0.0), "what comes after the node is not known any more"


def test_times_are_numbers() -> None:
    tree = RadixTree()
    for time in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="now"):
            tree.advance(time)
        with pytest.raises(ValueError, match="since"):
            tree.mark("n", ints([1]), 1, time)
