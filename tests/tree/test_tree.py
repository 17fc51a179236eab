"""The tree by hand: what each call promises, what it refuses, what it costs in memory."""

from __future__ import annotations

import contextlib
import random
from array import array

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from radixrt.tree import OwnerTree, RadixTree, common_length


def ints(*values: int) -> array:
    return array("i", values)


def as_list(raw: bytes) -> list[int]:
    return np.frombuffer(raw, np.int32).tolist()


def test_match_gives_the_longest_prefix_and_its_values():
    tree = RadixTree()
    tree.insert("a", ints(1, 2, 3, 4), ints(10, 20, 30, 40))
    match = tree.match("a", ints(1, 2, 9))
    assert (match.length, match.namespace, as_list(match.values())) == (2, "a", [10, 20])
    assert tree.match("a", ints(1, 2, 3, 4, 5)).length == 4
    assert tree.match("a", ints(1, 2, 3, 4), limit=3).length == 3
    assert tree.match("b", ints(1, 2)).length == 0, "namespaces never share"
    assert tree.match("a", ints()).length == 0


def test_match_does_not_mutate():
    tree = RadixTree(events=True)
    tree.insert("", ints(1, 2, 3, 4), ints(1, 2, 3, 4))
    tree.insert("", ints(5, 6), ints(5, 6))
    tree.drain_events()
    before = (tree.nodes, tree.leaves, tree.tokens, tree.snapshot())
    for _ in range(5):
        tree.match("", ints(1, 2, 9))
    assert (tree.nodes, tree.leaves, tree.tokens, tree.snapshot()) == before
    assert sorted(as_list(tree.evict(2))) == [3, 4], "matching is no use: 1 2 3 4 is still the oldest"


def test_insert_hands_duplicates_back():
    tree = RadixTree()
    assert tree.insert("", ints(1, 2, 3), ints(10, 20, 30)) == 0
    assert tree.insert("", ints(1, 2, 7, 8), ints(11, 21, 70, 80)) == 2
    assert as_list(tree.match("", ints(1, 2, 7, 8)).values()) == [10, 20, 70, 80]
    assert tree.insert("", ints(1, 2, 3), ints(12, 22, 32)) == 3


def test_pages_are_whole():
    tree = RadixTree(page_size=4)
    tree.insert("", ints(*range(8)), ints(7, 8))
    assert tree.match("", ints(*range(7))).length == 4
    assert tree.insert("", ints(0, 1, 2, 3, 4, 5, 9, 9), ints(1, 2)) == 4, "pages that differ inside are two"
    with pytest.raises(ValueError, match="page"):
        tree.insert("", ints(1, 2, 3), ints(1))
    with pytest.raises(ValueError):
        tree.insert("", ints(1, 2, 3, 4), ints(1, 2))


def test_a_lease_pins_its_path():
    tree = RadixTree()
    tree.insert("", ints(1, 2, 3, 4), ints(1, 2, 3, 4))
    with tree.lease(tree.match("", ints(1, 2))) as lease:
        assert (lease.length, tree.leased_tokens, tree.evictable_tokens) == (2, 2, 2)
        assert sorted(as_list(tree.evict(100))) == [3, 4]
        assert as_list(lease.values()) == [1, 2]
    assert tree.leased_tokens == 0
    assert sorted(as_list(tree.evict(100))) == [1, 2]
    with pytest.raises(ValueError):
        lease.release()


def test_what_only_some_leases_hold():
    tree = RadixTree()
    tree.insert("", ints(1, 2, 3, 4), ints(1, 2, 3, 4))
    tree.insert("", ints(1, 2, 5), ints(1, 2, 5))
    lease = {path: tree.lease(tree.match("", ints(*map(int, path)))) for path in ("1234", "123", "125", "9")}
    assert tree.held_only_by([]) == tree.held_only_by([lease["123"]]) == tree.held_only_by([lease["9"]]) == 0
    assert tree.held_only_by([lease["1234"]]) == tree.held_only_by([lease["1234"]] * 2) == 1
    assert tree.held_only_by([lease["1234"], lease["123"]]) == 2
    assert tree.held_only_by(iter(lease.values())) == tree.leased_tokens == 5
    tree.check()


def test_a_lease_grows():
    tree = RadixTree()
    lease = tree.lease(tree.match("", ints()))
    assert tree.insert(lease, ints(1, 2), ints(1, 2)) == 0 and lease.length == 2
    tree.insert("", ints(1, 2, 3, 4, 5), ints(9, 9, 3, 4, 5))
    assert lease.extend_match(ints(3, 4, 8)) == 2 and lease.length == 4
    assert as_list(lease.values()) == [1, 2, 3, 4] and as_list(lease.values(1, 3)) == [2, 3]
    assert as_list(tree.evict(100)) == [5]


def test_a_stale_match_cannot_be_leased():
    tree = RadixTree()
    tree.insert("", ints(1, 2, 3), ints(1, 2, 3))
    match = tree.match("", ints(1, 2, 3))
    tree.evict(1)
    with pytest.raises(ValueError):
        tree.lease(match)


def test_a_match_of_a_namespace_that_has_gone_is_stale():
    """Its memory may be another namespace's by then."""
    tree = RadixTree()
    lease = tree.lease(tree.match("a", ints()))
    match = tree.match("a", ints(1, 2))
    lease.release()
    others = [tree.lease(tree.match(name, ints())) for name in "bcd"]
    with pytest.raises(ValueError, match="stale"):
        tree.lease(match)
    tree.check()
    assert [other.namespace for other in others] == ["b", "c", "d"]


def test_the_least_recently_used_leaf_loses_its_tail():
    tree = RadixTree()
    tree.insert("", ints(*range(100, 150)), ints(*range(100, 150)))
    tree.insert("", ints(*range(200, 250)), ints(*range(200, 250)))
    assert sorted(as_list(tree.evict(10))) == list(range(140, 150))
    assert tree.match("", ints(*range(100, 150))).length == 40
    assert tree.match("", ints(*range(200, 250))).length == 50


def test_touching_a_path_touches_what_is_above_it():
    tree = RadixTree()
    tree.insert("", ints(1, 2, 3), ints(1, 2, 3))
    tree.insert("", ints(1, 2, 4), ints(1, 2, 4))
    tree.insert("", ints(9), ints(9))
    tree.lease(tree.match("", ints(1, 2, 3))).release()
    assert as_list(tree.evict(1)) == [4] and as_list(tree.evict(1)) == [9] and as_list(tree.evict(1)) == [3]


def test_forget_spares_what_others_use():
    tree = RadixTree()
    tree.insert("", ints(1, 2, 3, 4), ints(1, 2, 3, 4))
    tree.insert("", ints(1, 2, 7), ints(1, 2, 7))
    assert sorted(as_list(tree.forget("", ints(1, 2, 3, 4), 1))) == [3, 4]
    assert tree.match("", ints(1, 2, 7)).length == 3
    lease = tree.lease(tree.match("", ints(1, 2, 7)))
    assert tree.forget("", ints(1, 2, 7), 0) == b""
    lease.release()


def test_clear_needs_no_lease():
    tree = RadixTree()
    tree.insert("", ints(1, 2), ints(1, 2))
    lease = tree.lease(tree.match("", ints(1)))
    with pytest.raises(ValueError):
        tree.clear()
    lease.release()
    assert sorted(as_list(tree.clear())) == [1, 2] and tree.tokens == 0


@pytest.mark.parametrize("tokens", [np.zeros(3, np.int64), np.zeros((2, 2), np.int32), "abc", [1, 2], b"abc", None])
def test_tokens_of_another_kind_are_refused(tokens):
    with pytest.raises((TypeError, ValueError, BufferError)):
        RadixTree().match("", tokens)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError):
        RadixTree(0)
    with pytest.raises(ValueError):
        RadixTree().evict(-1)
    with pytest.raises(TypeError):
        RadixTree().insert(7, ints(1), ints(1))
    other = RadixTree()
    lease = other.lease(other.match("", ints()))
    with pytest.raises(ValueError):
        RadixTree().insert(lease, ints(1), ints(1))
    with pytest.raises(ValueError, match="another tree"):
        RadixTree().held_only_by([lease])
    for leases in (7, [7], [[]]):
        with pytest.raises(TypeError):
            other.held_only_by(leases)
    lease.release()
    with pytest.raises(ValueError, match="released"):
        other.held_only_by([lease])


def test_a_tree_outlived_by_its_leases():
    tree = RadixTree()
    tree.insert("", ints(1, 2), ints(1, 2))
    lease = tree.lease(tree.match("", ints(1, 2)))
    match = tree.match("", ints(1))
    del tree
    assert as_list(lease.values()) == [1, 2] and as_list(match.values()) == [1]
    lease.release()


def test_memory_is_at_most_17_bytes_a_token_on_long_runs():
    rng = np.random.default_rng(0)
    tree = RadixTree(events=False)
    for _ in range(20):
        ids = rng.integers(0, 128_000, 20_000, dtype=np.int32)
        tree.insert("", ids, ids)
    history = rng.integers(0, 128_000, 6000, dtype=np.int32)
    for _ in range(40):  # a conversation that grows, each turn resent
        history = np.concatenate([history, rng.integers(0, 128_000, 800, dtype=np.int32)])
        tree.insert("chat", history, history)
    assert tree.memory_bytes / tree.tokens < 17


def test_costs_do_not_grow_with_what_is_not_touched():
    """Node counts, not clocks: evicting a few tokens of many leaves, leasing deep paths."""
    tree = RadixTree()
    rng = np.random.default_rng(1)
    for ids in rng.integers(0, 1000, (3000, 20), dtype=np.int32):
        tree.insert("", ids, ids)
    before = tree.leaves
    assert len(as_list(tree.evict(40))) >= 40
    assert before - tree.leaves <= 3


def test_a_path_that_is_taken_away_leaves_a_run_its_node():
    """An owner's paths and runs should not be of the same tokens; where they are, nothing dangles."""
    owners = OwnerTree()
    owners.store(0, "", 1, 0, 0, 0, ints(1, 2, 3))
    owners.remove("", ints(1, 2, 3), 0)
    owners.check()
    assert owners.match("", ints(1, 2, 3)) == [] and owners.tokens == 3
    owners.store(0, "", 1, 3, 0, 0, ints(4))
    owners.cut(0, 1, 0)
    owners.check()
    assert owners.tokens == 0


def test_what_a_run_grows_by_is_nobody_elses():
    owners = OwnerTree()
    owners.store(0, "", 1, 0, 0, 0, ints(1, 2))
    owners.add("", ints(1, 2), 1)
    owners.store(0, "", 2, 0, 1, 2, ints(5))
    owners.store(0, "", 1, 2, 0, 0, ints(3))
    assert dict(owners.match("", ints(1, 2, 3))) == {0: 3, 1: 2}
    owners.cut(0, 2, 0)
    owners.store(0, "", 1, 3, 0, 0, ints(4))
    assert dict(owners.match("", ints(1, 2, 3, 4))) == {0: 4, 1: 2} and owners.tokens == owners.nodes + 2 == 4
    owners.check()


def test_owners_are_counted():
    owners = OwnerTree()
    owners.add("", ints(1, 2, 3), 0)
    owners.add("", ints(1, 2), 1)
    owners.add("", ints(1, 2), 1)
    assert dict(owners.match("", ints(1, 2, 3, 4))) == {0: 3, 1: 2}
    owners.remove("", ints(1, 2), 1)
    assert dict(owners.match("", ints(1, 2, 3))) == {0: 3, 1: 2}
    owners.remove("", ints(1, 2), 1)
    assert dict(owners.match("", ints(1, 2, 3))) == {0: 3}
    owners.remove_owner(0)
    assert owners.match("", ints(1, 2, 3)) == [] and owners.tokens == 0


def test_a_policy_orders_evictions():
    """`policy(last_use, length, tokens, uses, priority) -> int`: leaves with the smallest key go first."""
    paths = [ints(1), ints(2, 2), ints(3, 3, 3)]

    def evicted(policy) -> list[int]:
        tree = RadixTree(policy=policy)
        for path in paths:
            tree.insert("", path, path)
        return [as_list(tree.evict(1))[0] for _ in range(3)]

    assert evicted(None) == [1, 2, 2]
    assert evicted(lambda last_use, length, *_: last_use) == [1, 2, 2]
    assert evicted(lambda last_use, length, *_: -last_use) == [3, 3, 3]


def test_a_policy_sees_a_leaf_as_it_is_now():
    """When it has lost its tail, and when a split has made it shorter or the split's end longer."""
    tree = RadixTree(policy=lambda last_use, length, *_: -length)
    long, other = ints(*range(100, 200)), ints(*range(200, 260))
    for path in (long, other):
        tree.insert("", path, path)

    def evicted(tokens: int) -> list[int]:
        tree.check()
        return as_list(tree.evict(tokens))

    assert evicted(90) == list(range(110, 200))
    assert evicted(5) == list(range(255, 260)), "the other is the longest by now"
    branch = ints(*other[:50], 7)
    for path in (branch, other[:55]):
        tree.insert("", path, path)
    assert evicted(2) == [108, 109], "5 tokens of the other may go, and 10 of this one"
    assert as_list(tree.forget("", branch, 50)) == [7]
    assert evicted(2) == [253, 254]


@pytest.mark.parametrize("within", ["check", "clear", "evict"])
def test_a_policy_leaves_its_tree_alone(within):
    """Nor does it by the check that asks it again."""

    def policy(*_: int) -> int:
        found.append(within)
        with contextlib.suppress(RuntimeError):
            tree.check()
        return tree.evict(1) if within == "evict" else getattr(tree, within)()

    found: list[str] = []
    tree = RadixTree(policy=policy)
    with pytest.raises(RuntimeError, match="must not change its tree"):
        tree.insert("", ints(1, 2, 3), ints(1, 2, 3))
    assert found


def test_what_a_policy_raises_comes_out():
    def policy(*_: int) -> int:
        raise LookupError("no policy")

    tree = RadixTree(policy=policy)
    with pytest.raises(LookupError):
        tree.insert("", ints(1), ints(1))
    with pytest.raises(LookupError), tree.lease(tree.match("", ints(1))):
        pass


def test_a_tree_without_values():
    tree = RadixTree(values=False)
    assert tree.insert("", ints(1, 2, 3)) == 0 and tree.insert("", ints(1, 2, 4), None) == 2
    assert tree.match("", ints(1, 2, 4, 5)).length == 3 and tree.tokens == 4
    assert tree.evict(2) == b"" and tree.tokens == 2 and tree.values() == b""
    tree.check()
    with pytest.raises(ValueError, match="holds none"):
        tree.match("", ints(1)).values()
    with pytest.raises(ValueError, match="holds no values"):
        tree.insert("", ints(1), ints(1))
    with pytest.raises(ValueError, match="missing"):
        RadixTree().insert("", ints(1))


@given(st.lists(st.integers(0, 2), max_size=80), st.lists(st.integers(0, 2), max_size=80), st.integers(0, 80))
def test_the_length_that_two_paths_have_in_common(one, other, same):
    one, other = ints(*one[:same], *one), ints(*one[:same], *other)
    length = common_length(one, other.tobytes())
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]


@given(st.integers(0, 1400), st.integers(0, 700), st.integers(0, 700))
@example(1400, 255, 256)
@example(1400, 511, 512)
def test_the_length_that_long_paths_have_in_common(size, first, second):
    """Of which as much is compared at once as there is."""
    one = array("i", range(size))
    other = array("i", [-1 if i in (first, first + second) else i for i in range(size)])
    assert common_length(one, other) == common_length(other.tobytes(), one) == min(first, size)


def test_what_has_nothing_in_common_with_a_path():
    assert common_length(b"", ints(1)) == 0
    with pytest.raises(ValueError):
        common_length(b"123", ints(1))
    with pytest.raises(TypeError):
        common_length(ints(1))


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_version_is_a_state_of_all_matches(page_size):
    rng = random.Random(page_size)
    tree, leases, seen = RadixTree(page_size), [], {}
    paths = [array("i", [rng.randrange(3) for _ in range(4 * rng.randrange(1, 6))]) for _ in range(40)]
    same = 0
    for _ in range(3000):
        path = rng.choice(paths)
        match rng.randrange(6):
            case 0:
                tree.insert("n", path, array("i", range(len(path) // page_size)))
            case 1:
                tree.evict(rng.randrange(12))
            case 2:
                leases.append(tree.lease(tree.match("n", path)))
            case 3 if leases:
                leases.pop(rng.randrange(len(leases))).release()
            case 4:
                tree.forget("n", path, rng.randrange(8))
            case 5 if leases:
                rng.choice(leases).extend_match(path)
        lengths = [tree.match("n", path).length for path in paths]
        same += tree.version in seen
        assert seen.setdefault(tree.version, lengths) == lengths
    assert 100 < same < 2900


@pytest.mark.parametrize("page_size", [1, 2])
def test_values_of_a_match_from_a_token_on(page_size: int) -> None:
    tree, path = RadixTree(page_size), np.arange(8, dtype=np.int32)
    tree.insert("", path, np.arange(8 // page_size, dtype=np.int32))
    tree.insert("", np.append(path[:4], path[:4] + 9), np.arange(8 // page_size, dtype=np.int32))
    match = tree.match("", path)
    for start in range(0, 9, page_size):
        assert np.frombuffer(match.values(start), np.int32).tolist() == [*range(start // page_size, 8 // page_size)]
    for wrong in (9, 10, *([3] if page_size == 2 else [])):
        with pytest.raises(ValueError, match="whole pages"):
            match.values(wrong)


def test_what_cannot_be_evicted_into() -> None:
    tree = RadixTree(2)
    tree.insert("", np.zeros(4, np.int32), np.zeros(2, np.int32))
    for there, wanted in ((tree, 2), (RadixTree(1), 2), (RadixTree(2, values=False), 2), (RadixTree(2), 0)):
        with pytest.raises(ValueError, match="evict_into"):
            tree.evict_into(there, wanted)
    with pytest.raises(TypeError):
        tree.evict_into(None, 2)
    with pytest.raises(ValueError, match="values"):
        RadixTree(2, values=False).evict_used(1)
    assert RadixTree(2).evict_into(tree, 2) is None


def test_a_tree_may_go_before_its_twin() -> None:
    tree, there = RadixTree(1), RadixTree(1)
    path = np.arange(9, dtype=np.int32)
    for survivor in (tree, there):
        tree.insert("", path, path)
        lease, ids, _ = tree.evict_into(there, 4)
        lease.release()
        if survivor is tree:
            del there, lease
            there = RadixTree(1)
        else:
            del tree, lease
        survivor.check()
        assert survivor.match("", path).length == 5
        survivor.evict(9)
        assert not survivor.tokens
