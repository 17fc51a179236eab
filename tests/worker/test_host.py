"""Evicted pages in host memory: the checking fake runner compares every KV slot that is read with its prefix."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from radixrt.worker.host import HostPages
from radixrt.worker.plan import Plan
from tests.worker.test_simulation import Bench, alone, overlaps, random_prompt  # noqa: F401
from tests.worker.test_states import Mirror


def ids(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def fill(bench: Bench, id: int, length: int = 40) -> list[int]:
    """Run a prompt that nothing shares, which takes up most of the pages; returns it."""
    prompt = [id + 100, *range(3, 3 + length)]
    bench.add(id, prompt, 1)
    bench.drain()
    return prompt


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_was_evicted_is_not_computed_again(page_size: int) -> None:
    bench = Bench(pages=60 // page_size, page_size=page_size, chunk=64, host=1000)
    prompts = [fill(bench, id) for id in range(6)]
    assert bench.cache.hit(bench.add(90, prompts[0], 1)) == 40
    bench.drain()
    computed = bench.runner.computed_tokens
    for id, prompt in enumerate(prompts, 10):
        bench.add(id, [*prompt, 99], 4)
        bench.drain()
        assert bench.tokens[id] == alone([*prompt, 99], 4)
        assert bench.cached[id] == len(prompt) - len(prompt) % page_size
    extra = len(prompts[0]) % page_size + 1 + 3
    assert bench.runner.computed_tokens - computed == len(prompts) * extra
    assert bench.cache.evicted_tokens == 0 and bench.cache.host.fetched_pages > 0


def test_two_who_need_the_same_fetch_it_once() -> None:
    bench = Bench(pages=60, chunk=64, host=1000)
    prompt = fill(bench, 0)
    fill(bench, 1)
    bench.add(10, [*prompt, 98], 2)
    bench.add(11, [*prompt, 99], 2)
    bench.drain()
    assert bench.cached[10] == bench.cached[11] == len(prompt)
    assert bench.cache.host.fetched_pages <= len(prompt)


def test_a_full_host_forgets_what_was_used_least_recently() -> None:
    bench = Bench(pages=60, chunk=64, host=100)
    prompts = [fill(bench, id) for id in range(6)]
    assert bench.cache.evicted_tokens > 0
    for id in (5, 4, 0):
        bench.add(10 + id, [*prompts[id], 99], 1)
        bench.drain()
    assert bench.cached[15] == bench.cached[14] == len(prompts[0])
    assert bench.cached[10] == 0


def test_what_is_not_evicted_twice_is_not_copied_twice() -> None:
    bench = Bench(pages=60, chunk=64, host=1000)
    prompt = fill(bench, 0)
    fill(bench, 1)
    bench.add(10, prompt, 1)
    bench.drain()
    stored = bench.cache.host.used_slots
    fill(bench, 2)
    assert bench.cache.host.used_slots <= stored + len(prompt), "only what the second prompt has"


def test_a_gap_ends_what_can_be_fetched() -> None:
    host = HostPages(100, 1)
    host.store("", ids(1, 2, 3, 4, 5), 3, np.array([14, 15], np.int32))
    assert host.reach("", ids(1, 2, 3, 4, 5, 6), 3) == 5
    assert host.reach("", ids(1, 2, 3, 4, 5, 6), 2) == 2
    host.store("", ids(1, 2, 3), 1, np.array([12, 13], np.int32))
    assert host.reach("", ids(1, 2, 3, 4, 5, 6), 1) == 5
    assert host.reach("", ids(1, 2, 3, 4, 5, 6), 0) == 0
    assert host.reach("other", ids(1, 2, 3, 4, 5), 1) == 1
    moves = host.drain()
    assert moves.out[0].tolist() == [14, 15, 12, 13] and host.drain() is None
    host.check()


def test_slots_that_are_held_are_not_reused_before_the_step() -> None:
    host = HostPages(4, 1)
    host.store("", ids(1, 2, 3), 0, np.array([11, 12, 13], np.int32))
    held = host.hold("", ids(1, 2, 3), 0)
    host.store("", ids(7, 8), 0, np.array([17, 18], np.int32))
    assert host.lost_pages == 2 and host.reach("", ids(7, 8), 0) == 0
    host.fetch(held, np.array([21, 22, 23], np.int32))
    moves = host.drain()
    assert sorted(moves.out[0].tolist()) == [11, 12, 13] and moves.back.tolist() == [held.tolist(), [21, 22, 23]]
    host.store("", ids(7, 8), 0, np.array([17, 18], np.int32))
    assert host.reach("", ids(7, 8), 0) == 2
    host.check()


def test_a_slot_that_is_reused_in_a_step_gets_what_it_holds_last() -> None:
    host = HostPages(2, 1)
    host.store("", ids(1), 0, np.array([11], np.int32))
    host.store("", ids(2), 0, np.array([12], np.int32))
    assert host.drain().out.tolist() == [[12], [1]]


def test_a_failed_step_leaves_nothing_in_host_memory() -> None:
    bench = Bench(pages=60, chunk=64, host=1000)
    prompt = fill(bench, 0)
    fill(bench, 1)
    bench.add(10, [*prompt, 99], 4)
    plan = bench.plan()
    assert plan.moves is not None and plan.moves.back.size
    bench.scheduler.fail(plan, "broken")
    bench.cache.check()
    assert bench.cache.host.used_slots == 0
    assert bench.cache.tree.match("", ids(*prompt)).length == 0, "its pages were not filled"


def test_an_emptied_cache_is_empty_on_the_host_as_well() -> None:
    bench = Bench(pages=60, chunk=64, host=1000)
    prompt = fill(bench, 0)
    fill(bench, 1)
    bench.cache.clear()
    bench.cache.check()
    bench.add(10, [*prompt, 99], 1)
    bench.drain()
    assert bench.cached[10] == 0


def test_the_copy_of_a_long_context_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chunk comes a step later, if the step has other work, but not many prompt tokens."""
    monkeypatch.setattr("radixrt.worker.scheduler.MANY", 20)
    monkeypatch.setattr("radixrt.worker.scheduler.FEW", 10)
    bench = Bench(pages=90, chunk=64, host=1000)
    plans: list[Plan] = []
    launch = bench.runner.launch
    monkeypatch.setattr(bench.runner, "launch", lambda plan: plans.append(plan) or launch(plan))
    prompts = [fill(bench, id) for id in range(3)]

    def asked(id: int, prompt: list[int]) -> tuple[list[set[int]], bool]:
        """The requests of the step that copies the prompt back, and of the one after it; whether the first waits."""
        del plans[:]
        bench.add(id, [*prompt, 99], 2)
        bench.drain()
        assert bench.tokens[id] == alone([*prompt, 99], 2) and bench.cached[id] == len(prompt)
        at = next(n for n, plan in enumerate(plans) if plan.moves is not None and plan.moves.back.size)
        return [{request.id for request in plan.requests} for plan in plans[at : at + 2]], plans[at].needs_back

    bench.add(9, [7, 8, 9], 30)
    bench.step()
    assert asked(10, prompts[0]) == ([{9}, {9, 10}], False)
    assert asked(11, prompts[1]) == ([{11}, {11}], True), "there is nothing else to do"


@pytest.mark.parametrize("host", [0, 20, 1000])
def test_contexts_are_kept_where_little_fits_in_host_memory(host: int) -> None:
    bench = Bench(pages=100, chunk=64, rows=1, host=host)
    bench.cache.kept.returning = 1.0
    for id in range(3):
        bench.add(id, [id + 100, *range(3, 30)], 2)
    while 0 not in bench.finish:
        bench.step()
    assert bool(bench.cache.kept.tokens()) == (host < 25)
    bench.drain()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("page_size", [1, 4])
def test_to_the_index_device_and_host_are_one_cache(seed: int, page_size: int) -> None:
    rng = random.Random(seed)
    bench = Bench(96 // page_size, page_size, rng.choice([16, 64]), 4, max_len=60, host=5000)
    mirror, cache, found = Mirror(bench), bench.cache, 0
    trunks = [[rng.randint(3, 9) for _ in range(30)] for _ in range(3)]
    for id in range(60):
        prompt = random_prompt(rng, trunks)
        bench.add(id, prompt, rng.randint(1, 6), namespace=rng.choice("ab"))
        for _ in range(rng.randint(0, 6)):
            bench.step()
        mirror.tell(lost=rng.random() < 0.1, snapshot=rng.random() < 0.1)
        for trunk, namespace in itertools.product((*trunks, prompt), "ab"):
            path = np.array(trunk, np.int32)
            device = cache.tree.match(namespace, path).length
            reach = cache.host.reach(namespace, path, device)
            predicted = mirror.index.match(namespace, path.tobytes()).get(0, 0)
            assert predicted - predicted % page_size == reach
            found += reach > device
    assert found > 10
    bench.drain()
