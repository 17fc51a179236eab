"""Random operations against the slow oracle, with every invariant checked after every step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from radixrt.tree import OwnerTree, RadixTree
from radixrt.worker.cache.eviction import POLICIES
from tests.tree.oracle import UNUSED, NaiveCache, NaiveOwners

STEPS = settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
names = st.sampled_from(["a", "b"])
tokens = st.lists(st.integers(0, 2), max_size=20)


def ints(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def as_list(raw: bytes) -> list[int]:
    return np.frombuffer(raw, np.int32).tolist()


class Mirror:
    """A cache's paths rebuilt from its events alone."""

    def __init__(self) -> None:
        self.runs: dict[int, tuple[str, int, int, list[int]]] = {}

    def apply(self, events: list[tuple]) -> None:
        for event in events:
            match event:
                case ("cleared",):
                    self.runs.clear()
                case ("removed", run, 0):
                    del self.runs[run]
                case ("removed", run, keep):
                    del self.runs[run][3][keep:]
                case ("stored", namespace, run, at, parent, parent_at, ids):
                    if at == 0:
                        self.runs[run] = (namespace, parent, parent_at, [])
                    assert len(self.runs[run][3]) == at
                    self.runs[run][3].extend(as_list(ids))

    def path(self, run: int, length: int) -> tuple[int, ...]:
        if run == 0:
            return ()
        _, parent, parent_at, own = self.runs[run]
        return (*self.path(parent, parent_at), *own[:length])

    def pages(self, page_size: int) -> set[tuple[str, tuple[int, ...]]]:
        return {
            (namespace, self.path(run, end))
            for run, (namespace, _, _, own) in self.runs.items()
            for end in range(page_size, len(own) + 1, page_size)
        }


class CacheMachine(RuleBasedStateMachine):
    page_size = 1
    order = "lru"
    policy = None
    """One that the oracle does not know, in the place of `order`."""

    @initialize()
    def begin(self) -> None:
        policy = POLICIES[self.order]
        self.tree = RadixTree(self.page_size, policy=self.policy or policy, events=True)
        self.oracle = NaiveCache(self.page_size, self.order)
        self.there = RadixTree(self.page_size, policy=policy, events=True)
        self.there_oracle = NaiveCache(self.page_size, self.order)
        self.mirror, self.there_mirror = Mirror(), Mirror()
        self.priorities: dict[object, int] = {}
        self.leases: list[tuple] = []
        self.kept: tuple | None = None
        self.next_value = 1

    def whole(self, path: list[int]) -> tuple[int, ...]:
        return tuple(path[: len(path) // self.page_size * self.page_size])

    def new_values(self, path: tuple[int, ...]) -> list[int]:
        count = len(path) // self.page_size
        self.next_value += count
        return list(range(self.next_value - count, self.next_value))

    @rule(name=names, path=tokens, limit=st.none() | st.integers(0, 20))
    def match(self, name: str, path: list[int], limit: int | None) -> None:
        found = self.tree.match(name, ints(path), limit)
        held = self.oracle.match(name, tuple(path[:limit]))
        assert found.length == len(held)
        assert as_list(found.values()) == self.oracle.values(name, held)

    @rule(name=names, path=tokens)
    def insert(self, name: str, path: list[int]) -> None:
        whole = self.whole(path)
        values = self.new_values(whole)
        assert self.tree.insert(name, ints(whole), ints(values)) == self.oracle.insert(name, whole, values)

    @rule(name=names, path=tokens, priority=st.none() | st.integers(-2, 2))
    def lease(self, name: str, path: list[int], priority: int | None) -> None:
        lease = self.tree.lease(self.tree.match(name, ints(path)), priority)
        self.leased(lease, name, path, priority)

    def leased(self, lease: object, name: str, path: list[int], priority: int | None = None) -> None:
        held = self.oracle.match(name, tuple(path))
        assert lease.length == len(held)
        self.oracle.touch(name, held)
        self.priorities[lease] = priority = UNUSED[1] if priority is None else priority
        self.oracle.use(name, held, 0, 1, priority)
        self.oracle.leases[name, held] += 1
        self.leases.append((lease, name, held))

    @rule(name=names, path=tokens)
    def keep_match(self, name: str, path: list[int]) -> None:
        self.kept = self.tree.match(name, ints(path)), self.tree.version, name, path

    @precondition(lambda self: self.kept)
    @rule()
    def lease_kept_match(self) -> None:
        """Meanwhile the tree is as it was, or the match is refused."""
        (match, version, name, path), self.kept = self.kept, None
        if version == self.tree.version:
            self.leased(self.tree.lease(match), name, path)
        else:
            with pytest.raises(ValueError, match="stale"):
                self.tree.lease(match)

    def take(self, pick: int) -> tuple:
        return self.leases.pop(pick % len(self.leases))

    def moved(self, lease: object, name: str, old: tuple[int, ...], new: tuple[int, ...]) -> None:
        self.oracle.leases[name, old] -= 1
        self.oracle.leases = +self.oracle.leases
        self.oracle.leases[name, new] += 1
        self.leases.append((lease, name, new))
        self.oracle.use(name, new, len(old), 1, self.priorities[lease])
        assert lease.length == len(new)
        assert as_list(lease.values()) == self.oracle.values(name, new)

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 99), path=tokens)
    def insert_below_lease(self, pick: int, path: list[int]) -> None:
        lease, name, held = self.take(pick)
        whole = self.whole(path)
        values = self.new_values(whole)
        all_values = self.oracle.values(name, held) + values
        present = self.oracle.insert(name, held + whole, all_values) if whole else len(held)
        assert self.tree.insert(lease, ints(whole), ints(values)) == present - len(held)
        self.moved(lease, name, held, held + whole)

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 99), path=tokens)
    def extend_match(self, pick: int, path: list[int]) -> None:
        lease, name, held = self.take(pick)
        further = self.oracle.match(name, held + tuple(path))
        assert lease.extend_match(ints(path)) == len(further) - len(held)
        if further != held:
            self.oracle.touch(name, further)
        self.moved(lease, name, held, further)

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 99), withdraws=st.booleans())
    def release(self, pick: int, withdraws: bool) -> None:
        lease, name, held = self.take(pick)
        if withdraws:
            self.oracle.use(name, held, 0, -1, UNUSED[1])
            lease.withdraw()
        else:
            lease.release()
        self.oracle.leases[name, held] -= 1
        self.oracle.leases = +self.oracle.leases

    @rule(picks=st.sets(st.integers(0, 99)))
    def held_only_by(self, picks: set[int]) -> None:
        some = {pick % len(self.leases) for pick in picks} if self.leases else set()
        before = self.oracle.leased()
        others = [(name, held) for index, (_, name, held) in enumerate(self.leases) if index not in some]
        freed = before - {(name, prefix) for name, path in others for prefix in self.oracle.prefixes(path)}
        assert self.tree.held_only_by(self.leases[i][0] for i in some) == len(freed) * self.page_size

    @rule(count=st.integers(0, 30))
    def evict(self, count: int) -> None:
        freed = sorted(as_list(self.tree.evict(count)))
        assert freed == sorted(self.oracle.take(freed) if self.policy else self.oracle.evict(count))

    @rule(wanted=st.integers(1, 9), stores=st.booleans())
    def evict_into(self, wanted: int, stores: bool) -> None:
        """One leaf goes on in another tree, or is lost there."""
        paths = {page[0]: key for key, page in self.oracle.pages.items()}
        used = {page[0]: page[2:] for page in self.oracle.pages.values()}
        found = self.tree.evict_into(self.there, wanted)
        if found is None:
            assert not self.oracle.evict(1)
            return
        lease, ids, values = found[0], tuple(as_list(found[1])), as_list(found[2])
        freed = self.oracle.take(values) if self.policy else self.oracle.evict(len(ids))
        assert sorted(values) == sorted(freed) and 0 < len(ids) < wanted + self.page_size
        name, path = paths[values[-1]]
        keep = len(path) - len(ids)
        assert (lease.namespace, lease.length, ids) == (name, keep, path[keep:])
        self.there_oracle.insert(name, path[:keep], [0] * (keep // self.page_size))
        assert as_list(lease.values()) == self.there_oracle.values(name, path[:keep])
        if stores:
            self.there_oracle.insert(name, path, [0] * (keep // self.page_size) + values)
            self.there_oracle.use(name, path, keep, *used[values[-1]])
            self.there.insert(lease, ints(ids), ints(values))
        lease.release()

    @rule(name=names, path=tokens)
    def insert_there(self, name: str, path: list[int]) -> None:
        whole = self.whole(path)
        values = self.new_values(whole)
        assert self.there.insert(name, ints(whole), ints(values)) == self.there_oracle.insert(name, whole, values)

    @rule(count=st.integers(0, 9))
    def evict_there(self, count: int) -> None:
        assert sorted(as_list(self.there.evict(count))) == sorted(self.there_oracle.evict(count))

    @rule(count=st.integers(1, 5))
    def evict_used_there(self, count: int) -> None:
        freed = as_list(self.there.evict_used(count))
        assert sorted(freed) == sorted(self.there_oracle.evict(len(freed) * self.page_size))
        used = sum(value != 0 for value in freed)
        assert used == count or (used < count and not self.there_oracle.pages)

    @rule(name=names, path=tokens, keep=st.integers(0, 20))
    def forget_there(self, name: str, path: list[int], keep: int) -> None:
        whole = self.whole(path)
        freed = as_list(self.there.forget(name, ints(whole), keep))
        assert sorted(freed) == sorted(self.there_oracle.forget(name, whole, keep))

    @rule()
    def clear_there(self) -> None:
        assert len(as_list(self.there.clear())) == len(self.there_oracle.pages)
        self.there_oracle.pages.clear()

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 99), first=st.integers(0, 20), count=st.integers(0, 20))
    def assign(self, pick: int, first: int, count: int) -> None:
        lease, name, held = self.leases[pick % len(self.leases)]
        size, before = self.page_size, self.tree.version
        ends = range((first + 1) * size, len(held) + 1, size)[:count]
        values = self.new_values(held[: len(ends) * size])
        lease.assign(min(first * size, len(held)), ints(values))
        for end, value in zip(ends, values, strict=True):
            self.oracle.pages[name, held[:end]][0] = value
        assert as_list(lease.values()) == self.oracle.values(name, held)
        assert self.tree.version == before

    @rule(name=names, path=tokens, keep=st.integers(0, 20))
    def forget(self, name: str, path: list[int], keep: int) -> None:
        whole = self.whole(path)
        freed = as_list(self.tree.forget(name, ints(whole), keep))
        assert sorted(freed) == sorted(self.oracle.forget(name, whole, keep))

    @rule(prefix=st.sampled_from(["a", "b", "", "ab"]))
    def remove_namespaces(self, prefix: str) -> None:
        freed = as_list(self.tree.remove_namespaces(prefix))
        assert sorted(freed) == sorted(self.oracle.remove_namespaces(prefix))

    @precondition(lambda self: not self.leases)
    @rule()
    def clear(self) -> None:
        assert sorted(as_list(self.tree.clear())) == sorted(page[0] for page in self.oracle.pages.values())
        self.oracle.pages.clear()

    @invariant()
    def holds(self) -> None:
        self.tree.check()
        size = self.page_size
        assert self.tree.tokens == len(self.oracle.pages) * size
        assert self.tree.leased_tokens == len(self.oracle.leased()) * size
        assert self.tree.evictable_tokens == self.tree.tokens - self.tree.leased_tokens
        self.there.check()
        self.there_mirror.apply(self.there.drain_events())
        assert self.there_mirror.pages(size) == set(self.there_oracle.pages)
        self.mirror.apply(self.tree.drain_events())
        fresh = Mirror()
        fresh.apply(self.tree.snapshot())
        assert self.mirror.pages(size) == fresh.pages(size) == set(self.oracle.pages)


@pytest.mark.parametrize(
    ("page_size", "order"),
    [*((size, "lru") for size in (1, 2, 3, 16)), *((size, order) for size in (1, 3) for order in ("lfu", "priority"))],
)
def test_cache_equals_oracle(page_size: int, order: str) -> None:
    machine = type(f"Pages{page_size}", (CacheMachine,), {"page_size": page_size, "order": order})
    machine.TestCase.settings = STEPS
    machine.TestCase().runTest()


def test_with_a_policy_all_else_is_the_same() -> None:
    """`check` asks whether each leaf has the place that the policy gives it now."""

    class ByLength(CacheMachine):
        page_size = 2
        policy = staticmethod(lambda last_use, length, *others: (length, *others)[last_use % 4])

    ByLength.TestCase.settings = STEPS
    ByLength.TestCase().runTest()


class OwnersMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.tree = OwnerTree()
        self.oracle = NaiveOwners()

    owners = st.integers(0, 3)
    claimants, tellers = st.integers(0, 1), st.integers(2, 3)  # of paths, of runs
    runs = st.integers(1, 4)

    @rule(name=names, path=tokens, owner=claimants)
    def add(self, name: str, path: list[int], owner: int) -> None:
        self.tree.add(name, ints(path), owner)
        self.oracle.add(name, tuple(path), owner)

    @rule(owner=claimants, teller=tellers, run=runs)
    def add_path_of_run(self, owner: int, teller: int, run: int) -> None:
        name, path, _ = self.oracle.runs.get((teller, run), ("a", (), 0))
        self.add(name, list(path), owner)

    @rule(name=names, path=tokens, owner=claimants)
    def remove(self, name: str, path: list[int], owner: int) -> None:
        self.tree.remove(name, ints(path), owner)
        self.oracle.remove(name, tuple(path), owner)

    @rule(owner=tellers, name=names, run=runs, parent=runs, back=st.integers(-1, 4), ids=tokens)
    def store(self, owner: int, name: str, run: int, parent: int, back: int, ids: list[int]) -> None:
        """A run is new, and begins so many tokens before the end of another, or at the root."""
        _, path, above = self.oracle.runs.get((owner, parent), ("", (), 0))
        parent_at = max(0, len(path) - above - back)
        self._tell(owner, name, run, 0, parent, parent_at, ids)

    @rule(owner=tellers, run=runs, off=st.sampled_from([0, 0, 0, 0, 1]), ids=tokens)
    def grow(self, owner: int, run: int, off: int, ids: list[int]) -> None:
        """A run goes on, at its end or, `off`, beyond it."""
        name, path, above = self.oracle.runs.get((owner, run), ("a", (), 0))
        self._tell(owner, name, run, len(path) - above + off, 0, 0, ids)

    def _tell(self, owner: int, name: str, run: int, at: int, parent: int, parent_at: int, ids: list[int]) -> None:
        if self.oracle.store(owner, name, run, at, parent, parent_at, tuple(ids)):
            self.tree.store(owner, name, run, at, parent, parent_at, ints(ids))
        else:
            with pytest.raises(ValueError):
                self.tree.store(owner, name, run, at, parent, parent_at, ints(ids))

    @rule(owner=tellers, run=runs, keep=st.integers(0, 4))
    def cut(self, owner: int, run: int, keep: int) -> None:
        _, path, above = self.oracle.runs.get((owner, run), ("", (), 0))
        name = self.oracle.runs[owner, run][0] if (owner, run) in self.oracle.runs else ""
        if self.oracle.cut(owner, run, keep):
            removed = path[above + keep :]
            told, depth, length, first = self.tree.cut(owner, run, keep)
            assert (told, depth, length) == (name, above + keep, len(removed))
            assert as_list(first) == list(removed[: len(first) // 4]) and bool(first) == bool(removed)
        else:
            with pytest.raises(ValueError):
                self.tree.cut(owner, run, keep)

    @rule(owner=owners)
    def remove_owner(self, owner: int) -> None:
        self.tree.remove_owner(owner)
        self.oracle.remove_owner(owner)

    @rule(name=names, path=tokens)
    def match(self, name: str, path: list[int]) -> None:
        assert dict(self.tree.match(name, ints(path))) == self.oracle.match(name, tuple(path))

    @invariant()
    def holds(self) -> None:
        self.tree.check()
        assert self.tree.tokens == len(self.oracle.counts)
        for name, path, _ in self.oracle.runs.values():
            self.match(name, list(path))

    @invariant()
    def outlines_all_nodes(self) -> None:
        total, rows = self.tree.icicle("", 1000, RadixTree(), None, 0)
        assert total == self.tree.tokens == sum(row[4] for row in rows) and len(rows) == self.tree.nodes
        paths, below = [], [row[4] for row in rows]
        for run, end, parent, depth, length, _, _, left_out, _, owners, name in rows:
            *told, first, last, held = self.tree.edge("", 100, run, end)
            assert told == [name, depth, length] and first == last and held == owners and not left_out
            paths.append((paths[parent] if parent >= 0 else ()) + tuple(as_list(first)))
            assert len(paths[-1]) == depth + length and set(owners) == set(self.oracle.counts[name, paths[-1]])
        for i in reversed(range(len(rows))):
            assert rows[i][5] == below[i]
            if (parent := rows[i][2]) >= 0:
                below[parent] += below[i]
        assert sum(self.tree.namespaces().values()) == total


def test_owners_equal_oracle() -> None:
    OwnersMachine.TestCase.settings = STEPS
    OwnersMachine.TestCase().runTest()
