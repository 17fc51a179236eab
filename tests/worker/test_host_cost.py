"""What evictions to host memory cost: as much as what is evicted, however long the prefixes above it are."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest

from radixrt.messages import TOKEN_BYTES, Sampling
from radixrt.tree import RadixTree
from radixrt.worker.cache.host_tier import HostTier
from radixrt.worker.execution.fake_runner import FakeRunner
from tests.worker.engine import Engine

SCORED = Sampling(max_tokens=0)
LEAVES, LEAF = 200, 4
"""Texts that part from a long prefix, and the tokens of each after it."""


def forked(prefix: int, every: int = 0) -> Engine:
    """A full device with LEAVES texts that part from a prefix of so many tokens: at its end or, with `every`, each so
    many tokens before the one before. The next plan evicts them all for another prompt."""
    length = prefix + 64
    runner = FakeRunner(prefix + LEAVES * LEAF + 2, 1, 1000, length, num_host_pages=100_000)
    engine = Engine(runner, chunk=1 << 16, rows=LEAVES, max_model_len=length)
    trunk = [3 + n % 490 for n in range(prefix)]
    for n in range(LEAVES):
        common = trunk[: prefix - n * every]
        engine.add([*common, *range(500 + n, 500 + n + LEAF)], SCORED, score_from=len(common))
    engine.finish()
    engine.cache.prefixes.drain_events()
    assert engine.cache.tier.used_pages == 0 and engine.cache.free_pages < LEAVES
    engine.add([7] * LEAVES * LEAF, SCORED)
    return engine


def peak_bytes(engine: Engine) -> int:
    """The most memory that objects of Python take while a step is planned."""
    tracemalloc.start()
    try:
        assert engine.scheduler.plan() is not None
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("every", [0, 20])
def test_an_eviction_copies_what_is_evicted_and_not_what_that_hangs_below(every: int) -> None:
    peaks = []
    for prefix in (8_000, 16_000):
        engine = forked(prefix, every)
        peaks.append(peak_bytes(engine))
        engine.cache.check()
        assert engine.cache.tier.used_pages > LEAVES * (LEAF - 1)
        told = sum(len(event[-1]) for event in engine.cache.prefixes.drain_events() if event[0] == "stored")
        assert told < TOKEN_BYTES * (prefix + 4 * LEAVES * LEAF), "the index is told of the prefix once"
    assert peaks[1] < 1.2 * peaks[0] < 2_000_000


def forked_tree(prefix: int, every: int) -> RadixTree:
    """A path, and LEAVES leaves below it, at its end or, with `every`, each so many tokens before the one before, or
    after it if that is negative. These are evicted first, in this order."""
    tree, trunk = RadixTree(1), np.arange(prefix, dtype=np.int32)
    tree.insert("", trunk, trunk)
    for n in range(LEAVES):
        below = prefix - 1 - (n if every >= 0 else LEAVES - n) * abs(every)
        with tree.lease(tree.match("", trunk, below)) as lease:
            path = np.arange(-LEAF * n - LEAF, -LEAF * n, dtype=np.int32)
            tree.insert(lease, path, path)
    tree.lease(tree.match("", trunk)).release()
    return tree


def long_leaf(length: int) -> RadixTree:
    tree, path = RadixTree(1), np.arange(length + LEAVES * LEAF, dtype=np.int32)
    tree.insert("", path, path)
    return tree


def store_seconds(tree: RadixTree) -> float:
    """To evict LEAF tokens LEAVES times, but the first: with that the path above is inserted in host memory, without
    pages."""
    host, prefix = HostTier(LEAVES * LEAF + 1, 1), tree.tokens - LEAVES * LEAF

    def evict() -> None:
        place, ids, pages = tree.evict_into(host.tree, LEAF)
        host.store(place, ids, np.frombuffer(pages, np.int32))
        place.release()

    evict()
    began = time.thread_time()
    for _ in range(LEAVES - 1):
        evict()
    took = time.thread_time() - began
    assert host.used_pages == LEAVES * LEAF and tree.tokens == prefix
    assert tree.nodes <= 1 + prefix // 4096, "what has no leaves is merged again, but for some"
    tree.check()
    host.check()
    return took


@pytest.mark.parametrize("every", [0, 19, -19])
def test_a_leaf_below_a_long_prefix_takes_as_long_as_one_below_a_short_one(every: int) -> None:
    short, long = (min(store_seconds(forked_tree(n, every)) for _ in range(3)) for n in (4_000, 400_000))
    assert long < 2.5 * short


def test_a_long_leaf_is_evicted_bit_by_bit_as_fast_as_a_short_one() -> None:
    short, long = (min(store_seconds(long_leaf(n)) for _ in range(3)) for n in (4_000, 400_000))
    assert long < 2.5 * short
