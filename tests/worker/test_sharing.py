"""Sharing found in a tree: every key of every request is in one segment or its own."""

from __future__ import annotations

import random
from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.tree import RadixTree
from radixrt.worker.execution.prefix_sharing import Cost, find_sharing, path_before, with_sharers


class Leased:
    """As a Request: a lease, a row, a position."""

    def __init__(self, row: int, lease: object, length: int, position: int) -> None:
        self.row, self.lease, self.length, self.position = row, lease, length, position
        self.tree: object = None


def pages_of(request: Leased) -> list[int]:
    """What its row of the page table shows: the tree's pages, then its own."""
    shared = array("i", request.lease.values()).tolist()
    own = [10_000_000 + request.row * 10_000 + i for i in range(request.position + 100 - len(shared))]
    return shared + own


@st.composite
def leased_batches(draw) -> list[Leased]:
    """Requests on random trees: depth 1 to 6, fan-out 1 to 8, ragged lengths."""
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    tree = RadixTree()
    requests: list[Leased] = []
    fresh = iter(range(1, 1 << 30))

    def grow(prefix: list[int], depth: int) -> None:
        for _ in range(rng.randint(1, 8 if depth < 2 else 3)):
            path = prefix + [next(fresh) for _ in range(rng.choice([1, 3, 40, 120]))]
            if depth < 6 and rng.random() < 0.5 and len(requests) < 40:
                grow(path, depth + 1)
            elif len(requests) < 60:
                for _ in range(rng.randint(1, 3)):
                    lease = tree.lease(tree.match("", array("i", path)))
                    rest = array("i", path[lease.length :])
                    tree.insert(lease, rest, array("i", [next(fresh) for _ in rest]))
                    requests.append(Leased(len(requests), lease, len(path), len(path) + rng.randint(0, 50)))

    grow([], 1)
    rng.shuffle(requests)
    return requests


COST = st.builds(Cost, st.just(10), st.sampled_from([1, 50, 500]), st.sampled_from([1, 4, 32]))


@settings(deadline=None, max_examples=200)
@given(leased_batches(), COST)
def test_every_key_is_in_one_place(batch, cost):
    sharing = find_sharing([r.lease.path() for r in batch], cost)
    assert sorted(sharing.order.tolist()) == list(range(len(batch)))
    covered = [[] for _ in batch]
    for begin, end, first, count in sharing.segments.tolist():
        members = sharing.order[first : first + count].tolist()
        assert count >= 2 and begin < end
        pages = pages_of(batch[members[0]])[begin:end]
        for member in members:
            assert pages_of(batch[member])[begin:end] == pages, "they do not share it"
            assert end <= batch[member].lease.length
            covered[member] += range(begin, end)
    for keys, own in zip(covered, sharing.own.tolist(), strict=True):
        assert sorted(keys) == list(range(own))
    naive = sum(len(keys) for keys in covered) - sum(e - b for b, e, _, _ in sharing.segments.tolist())
    assert sharing.saved_keys == naive


@settings(deadline=None, max_examples=100)
@given(leased_batches(), COST, st.randoms())
def test_what_nodes_are_called_changes_nothing(batch, cost, random):
    """They are called by where they lie in memory: what rounds by the order would never be computed again."""
    paths = [r.lease.path() for r in batch]
    names = sorted({name for path in paths for name, _ in path})
    others = dict(zip(names, random.sample(range(1, 1 << 40), len(names)), strict=True))
    one = find_sharing(paths, cost)
    other = find_sharing([tuple((others[name], end) for name, end in path) for path in paths], cost)
    for a, b in ((one.order, other.order), (one.segments, other.segments), (one.own, other.own)):
        assert a.tolist() == b.tolist()


@settings(deadline=None, max_examples=100)
@given(leased_batches())
def test_with_no_cost_all_that_is_shared_is_read_once(batch):
    sharing = find_sharing([r.lease.path() for r in batch], Cost(1 << 20, 1, 1 << 20))
    pages = {page for r in batch for page in pages_of(r)[: r.lease.length]}
    read = sum(r.lease.length for r in batch) - sharing.saved_keys
    assert read == len(pages)


def test_a_chain_is_one_segment_and_what_does_not_pay_is_folded():
    cost = Cost(key_bytes=10, partial_bytes=100, tile=32)
    long_ = [((1, 100), (2, 150), (i, 200)) for i in (3, 4)]
    assert find_sharing(long_, cost).segments.tolist() == [[0, 150, 0, 2]]
    short = [((1, 100), (2, 110), (3, 110 + i)) for i in (1,)] * 2 + [((1, 100), (5, 130))] * 2
    found = find_sharing(short, cost)
    assert found.segments.tolist() == [[0, 100, 0, 4]] and found.own.tolist() == [100] * 4
    assert found.saved_keys == 300
    assert find_sharing([(), ()], cost).own.tolist() == [0, 0]


@settings(deadline=None, max_examples=100)
@given(leased_batches(), COST)
def test_those_under_a_segment(batch, cost):
    found = find_sharing([r.lease.path() for r in batch], cost)
    chosen, alone = with_sharers(found)
    members = {int(r) for _, _, first, count in found.segments for r in found.order[first : first + count]}
    assert chosen.tolist() == sorted(members)
    assert alone.own.tolist() == found.own[chosen].tolist()
    for (b, e, first, count), (b2, e2, first2, count2) in zip(found.segments, alone.segments, strict=True):
        assert (b, e, count) == (b2, e2, count2)
        before, after = found.order[first : first + count], chosen[alone.order[first2 : first2 + count2]]
        assert before.tolist() == after.tolist()


def test_a_conversation_that_branches_at_each_of_its_turns_is_deep():
    path = tuple((turn, 20 * turn) for turn in range(1, 3001))
    found = find_sharing([path, path, path[:2000]], Cost(10, 1, 32))
    assert found.segments.tolist() == [[0, 40_000, 0, 3], [40_000, 60_000, 1, 2]]
    assert found.own.tolist() == [60_000, 60_000, 40_000]


def test_a_path_ends_before_the_next_token():
    path = ((1, 10), (2, 25), (3, 40))
    assert path_before(path, 40) == path_before(path, 99) == path
    assert path_before(path, 25) == path[:2] and path_before(path, 0) == ()
    assert path_before(path, 17) == path_before(((1, 10), (2, 25)), 17) != path_before(path, 16)
    assert path_before(path, 17)[0] == path[0] and path_before(path, 17)[1][1] == 17
    assert path_before(path, 17)[1][0] not in (1, 2, 3), "who has all of node 2 shares no more than 17 tokens of it"
