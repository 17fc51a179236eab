"""Which prefixes go first, on the device and in host memory."""

from __future__ import annotations

import numpy as np
import pytest

from radixrt.tree import RadixTree
from radixrt.worker.cache.eviction import POLICIES
from radixrt.worker.cache.host_tier import HostTier
from tests.worker.test_simulation import Bench

TWICE, LATE, OTHER = [10] * 20, [20] * 20, [30] * 20
STAYS = pytest.mark.parametrize(
    ("policy", "priority", "stays"),
    [("lru", 0, LATE), ("lru", -1, LATE), ("lfu", 0, TWICE), ("priority", -1, TWICE), ("priority", 1, LATE)],
)
"""Of two prompts, when there is no room for both: one of `priority` that is used twice, and then one that is used
once."""


def ids(prompt: list[int]) -> np.ndarray:
    return np.array(prompt, np.int32)


def run(bench: Bench, prompt: list[int], priority: int = 0) -> None:
    bench.add(len(bench.finish), prompt, 1, priority=priority)
    bench.drain()


def cached(bench: Bench, prompt: list[int]) -> int:
    return bench.cache.prefixes.find("", ids(prompt), len(prompt))[0]


@STAYS
def test_on_the_device(policy: str, priority: int, stays: list[int]) -> None:
    bench = Bench(pages=45, chunk=64, rows=1, policy=policy)
    for prompt, of in ((TWICE, priority), (TWICE, priority), (LATE, 0), (OTHER, -2)):
        run(bench, prompt, of)
    assert [cached(bench, prompt) == 20 for prompt in (TWICE, LATE)] == [stays is TWICE, stays is LATE]


@STAYS
def test_in_host_memory(policy: str, priority: int, stays: list[int]) -> None:
    device, host = RadixTree(policy=POLICIES[policy]), HostTier(41, 1, policy=policy)
    for prompt, of, uses in ((TWICE, priority, 2), (LATE, 0, 1), (OTHER, -2, 1)):
        device.insert("", ids(prompt), ids(prompt))
        for _ in range(uses):
            device.lease(device.match("", ids(prompt)), -of).release()
        assert len(host.evict(device, 20)) == 20 and device.tokens == 0
        host.check()
    assert [host.reach("", ids(prompt), 0) for prompt in (TWICE, LATE)] == [20 * (stays is TWICE), 20 * (stays is LATE)]


def test_an_admission_that_is_withdrawn_is_no_use() -> None:
    bench = Bench(pages=45, chunk=64, rows=1, policy="lfu")
    for prompt in (TWICE, TWICE, LATE):
        run(bench, prompt)
    waiting = bench.add(9, [*LATE, 5], 1)
    for _ in range(3):
        bench.cache.requests.admit(waiting)
        bench.cache.requests.withdraw(waiting)
    bench.scheduler.abort(9)
    run(bench, OTHER)
    assert cached(bench, TWICE) == 20 > cached(bench, LATE)
