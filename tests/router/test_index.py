"""The mirror of real radix trees, under random mutations, lost messages and late resyncs."""

from __future__ import annotations

import random
from array import array

import pytest
from sim_workers import EVENTS, ids

from radixrt.messages import Cleared, Dropped, Load, Removed, Saved, StepDone, Stored
from radixrt.messages.digests import prefix_digest, prefix_digests
from radixrt.router.placement.index import Index
from radixrt.tree import RadixTree


def step(events, seq, resync=False) -> StepDone:
    return StepDone([], Load(), seq, [EVENTS[kind](*rest) for kind, *rest in events], resync)


def random_tokens(rng: random.Random, page: int) -> array:
    """Short alphabet, so that prefixes are shared, forks abound, and ends fall anywhere."""
    return array("i", [rng.randrange(3) for _ in range(page * rng.randrange(1, 12))])


def mutate(rng: random.Random, tree: RadixTree) -> None:
    namespace = rng.choice("ab")
    if rng.random() < 0.7:
        tokens = random_tokens(rng, tree.page_size)
        tree.insert(namespace, tokens, array("i", range(len(tokens) // tree.page_size)))
    elif rng.random() < 0.98:
        tree.evict(rng.randrange(1, 20))
    else:
        tree.clear()


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("seed", range(8))
def test_the_index_equals_the_trees(seed, page):
    rng = random.Random(seed)
    trees = [RadixTree(page, events=True) for _ in range(3)]
    seqs = [0, 0, 0]
    index = Index()
    for worker in range(3):
        index.add_worker(worker, fresh=True)
    for _ in range(150):
        worker = rng.randrange(3)
        tree = trees[worker]
        for _ in range(rng.randrange(1, 4)):
            mutate(rng, tree)
        events = tree.drain_events()
        seq, seqs[worker] = seqs[worker], seqs[worker] + len(events)
        if events and rng.random() < 0.1:
            continue
        if not index.apply(worker, step(events, seq)):
            assert index.apply(worker, step(tree.snapshot(), seqs[worker], resync=True))
        probe = random_tokens(rng, page)
        hit = index.match("a", probe.tobytes()).get(worker, 0)
        assert hit // page * page == tree.match("a", probe).length
        index._cached.check()
    for worker, tree in enumerate(trees):
        assert index.apply(worker, step(tree.snapshot(), seqs[worker], resync=True))
        for _ in range(30):
            probe = random_tokens(rng, page)
            hit = index.match("b", probe.tobytes()).get(worker, 0)
            assert hit // page * page == tree.match("b", probe).length
    for worker in range(3):
        index.drop_worker(worker)
    assert index.tokens == 0


def test_until_the_resync_comes_a_worker_counts_as_empty():
    index = Index()
    index.add_worker(0, fresh=False)
    stored = [("stored", "a", 1, 0, 0, 0, ids(1, 2))]
    assert index.apply(0, step(stored, 7))
    assert index.match("a", ids(1, 2)) == {}
    assert index.apply(0, step([("cleared",), *stored], 9, resync=True))
    assert index.match("a", ids(1, 2)) == {0: 2}
    assert index.apply(0, step([("removed", 1, 1)], 9))
    assert index.match("a", ids(1, 2)) == {0: 1}


@pytest.mark.parametrize(
    "event",
    [
        Stored("a", 1, 5, 0, 0, ids(9)),
        Stored("a", 1, 0, 0, 0, ids(9)),
        Stored("a", 7, 3, 0, 0, ids(9)),
        Stored("a", 2, 0, 1, 3, ids(9)),
        Stored("a", 2, 0, 8, 1, ids(9)),
        Stored("a", 2, 0, 2, 1, ids(9)),
        Stored("b", 2, 0, 1, 1, ids(9)),
        Stored("a", 2, 0, 0, 0, b""),
        Stored("a", 2, 0, 0, 0, b"123"),
        Stored("a", 2, 0, 1, -1, ids(9)),
        Stored("a", 1 << 63, 0, 0, 0, ids(9)),
        Removed(5, 0),
        Removed(1, 3),
        Saved(1, 2, 3),
        Dropped(1),
    ],
)
def test_an_event_that_fits_nothing_asks_for_a_resync(event):
    index = Index()
    index.add_worker(0, fresh=True)
    assert index.apply(0, StepDone([], Load(), 0, [Stored("a", 1, 0, 0, 0, ids(1, 2))]))
    assert not index.apply(0, StepDone([], Load(), 1, [event]))
    assert index.match("a", ids(1, 2)) == {} and index.tokens == 0


def test_what_is_being_computed_counts_until_it_is():
    index = Index()
    for worker in (0, 1):
        index.add_worker(worker, fresh=True)
    index.computing(0, 5, "a", ids(1, 2, 3))
    index.computing(0, 6, "a", ids(1, 2, 3))
    index.computing(1, 7, "a", ids(1, 9))
    assert index.match("a", ids(1, 2, 3, 4)) == {0: 3, 1: 1}
    index.computed(0, 5)
    assert index.match("a", ids(1, 2, 3, 4)) == {0: 3, 1: 1}
    index.computed(0, 6)
    assert index.match("a", ids(1, 2, 3, 4)) == {1: 1}
    index.drop_worker(1)
    assert index.match("a", ids(1, 2, 3, 4)) == {}


def saved(slot: int, namespace: str, *tokens: int) -> Saved:
    return Saved(slot, len(tokens), prefix_digest(namespace, ids(*tokens)))


def test_a_prefix_of_recurrent_states_counts_up_to_its_last_checkpoint():
    index = Index()
    index.add_worker(0, fresh=True, num_states=4)
    index.add_worker(1, fresh=True)
    stored = [Stored("a", 1, 0, 0, 0, ids(1, 2, 3, 4, 5)), Stored("b", 2, 0, 0, 0, ids(1, 2, 3))]
    for worker in (0, 1):
        assert index.apply(worker, StepDone([], Load(), 0, stored))
    assert index.match("a", ids(1, 2, 3, 4)) == {1: 4}
    states = [saved(1, "a", 1, 2), saved(2, "a", 1, 2, 3, 4), saved(3, "b", 1, 2, 9)]
    assert index.apply(0, StepDone([], Load(), 2, states))
    assert index.match("a", ids(1, 2, 3, 4, 5)) == {0: 4, 1: 5}
    assert index.match("a", ids(1, 2, 3, 4, 5), 3) == {0: 2, 1: 5}
    assert index.match("a", ids(1, 2, 9)) == {0: 2, 1: 2} and index.match("b", ids(1, 2, 9)) == {1: 2}
    index.computing(0, 7, "a", ids(1, 2, 9, 9))
    assert index.match("a", ids(1, 2, 9)) == {0: 3, 1: 2}, "what is computed now leaves a checkpoint where others part"
    assert index.apply(0, StepDone([], Load(), 5, [Dropped(2)]))
    assert index.match("a", ids(1, 2, 3, 4, 5)) == {0: 2, 1: 5}
    assert not index.apply(0, StepDone([], Load(), 6, [saved(4, "a", 1)])), "it has no such slot"
    everything = [Cleared(), *stored, states[1]]
    assert index.apply(0, StepDone([], Load(), 9, everything, resync=True))
    assert index.match("a", ids(1, 2, 3, 4, 5)) == {0: 4, 1: 5}
    index.drop_worker(0)
    index.add_worker(0, fresh=True, num_states=4)
    assert index.apply(0, StepDone([], Load(), 0, stored))
    assert index.match("a", ids(1, 2, 3, 4, 5)) == {1: 5}, "its checkpoints have gone with it"


def test_digests_of_prefixes():
    tokens = ids(*range(3, 500))
    digests = prefix_digests("a", tokens)
    assert [prefix_digest("a", tokens[: 4 * n]) for n in range(498)] == digests.tolist()
    assert len({*digests.tolist(), *prefix_digests("b", tokens).tolist()}) == 2 * 498
    assert prefix_digest("a", ids(3, 4)) != prefix_digest("a", ids(4, 3))
