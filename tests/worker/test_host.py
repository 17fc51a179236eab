"""Evicted pages in host memory: the checking fake runner compares every KV slot that is read with its prefix."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from radixrt.messages import TOKEN_BYTES
from radixrt.worker import status
from radixrt.worker.cache.host_tier import HostTier
from radixrt.worker.plan import Plan
from tests.worker.test_simulation import Bench, alone, overlaps, random_prompt  # noqa: F401
from tests.worker.test_states import Mirror


def ids(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def store(host: HostTier, namespace: str, path: bytes, keep: int, pages: np.ndarray) -> None:
    """Store `pages`, of one token each, of all but the first `keep` tokens of a path."""
    with host.tree.lease(host.tree.match(namespace, path[: keep * TOKEN_BYTES])) as place:
        gap = path[place.length * TOKEN_BYTES : keep * TOKEN_BYTES]
        host.tree.insert(place, gap, bytes(len(gap)))
        host.store(place, path[keep * TOKEN_BYTES :], pages)


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
    assert bench.cache.requests.hit(bench.add(90, prompts[0], 1)) == 40
    bench.drain()
    computed = bench.runner.computed_tokens
    for id, prompt in enumerate(prompts, 10):
        bench.add(id, [*prompt, 99], 4)
        bench.drain()
        assert bench.tokens[id] == alone([*prompt, 99], 4)
        assert bench.cached[id] == len(prompt) - len(prompt) % page_size
    extra = len(prompts[0]) % page_size + 1 + 3
    assert bench.runner.computed_tokens - computed == len(prompts) * extra
    host, none = bench.cache.tier, {"compiling": 0, "inflight": None, "newest_run": 0}
    load = status.load(bench.scheduler, bench.cache, bench.runner, status.Rates(), **none)
    assert load.evicted_tokens == 0 and load.fetched_tokens == host.onloaded_pages * page_size > 0
    assert load.host_tokens == host.used_pages * page_size > 0


def test_two_who_need_the_same_fetch_it_once() -> None:
    bench = Bench(pages=60, chunk=64, host=1000)
    prompt = fill(bench, 0)
    fill(bench, 1)
    bench.add(10, [*prompt, 98], 2)
    bench.add(11, [*prompt, 99], 2)
    bench.drain()
    assert bench.cached[10] == bench.cached[11] == len(prompt)
    assert bench.cache.tier.onloaded_pages <= len(prompt)


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
    stored = bench.cache.tier.used_pages
    fill(bench, 2)
    assert bench.cache.tier.used_pages <= stored + len(prompt), "only what the second prompt has"


def test_a_gap_ends_what_can_be_fetched() -> None:
    host = HostTier(100, 1)
    store(host, "", ids(1, 2, 3, 4, 5), 3, np.array([14, 15], np.int32))
    assert host.reach("", ids(1, 2, 3, 4, 5, 6), 3) == 5
    assert host.reach("", ids(1, 2, 3, 4, 5, 6), 2) == 2
    store(host, "", ids(1, 2, 3), 1, np.array([12, 13], np.int32))
    assert host.reach("", ids(1, 2, 3, 4, 5, 6), 1) == 5
    assert host.reach("", ids(1, 2, 3, 4, 5, 6), 0) == 0
    assert host.reach("other", ids(1, 2, 3, 4, 5), 1) == 1
    moves = host.drain()
    assert moves.offload[0].tolist() == [14, 15, 12, 13] and host.drain() is None
    host.check()


def test_slots_that_are_held_are_not_reused_before_the_step() -> None:
    host = HostTier(4, 1)
    store(host, "", ids(1, 2, 3), 0, np.array([11, 12, 13], np.int32))
    held = host.hold("", ids(1, 2, 3), 0)
    store(host, "", ids(7, 8), 0, np.array([17, 18], np.int32))
    assert host.lost_pages == 2 and host.reach("", ids(7, 8), 0) == 0
    host.onload(held, np.array([21, 22, 23], np.int32))
    moves = host.drain()
    assert sorted(moves.offload[0].tolist()) == [11, 12, 13] and moves.onload.tolist() == [held.tolist(), [21, 22, 23]]
    store(host, "", ids(7, 8), 0, np.array([17, 18], np.int32))
    assert host.reach("", ids(7, 8), 0) == 2
    host.check()


def test_a_slot_that_is_reused_in_a_step_gets_what_it_holds_last() -> None:
    host = HostTier(2, 1)
    store(host, "", ids(1), 0, np.array([11], np.int32))
    store(host, "", ids(2), 0, np.array([12], np.int32))
    assert host.drain().offload.tolist() == [[12], [1]]


def test_a_failed_step_leaves_nothing_in_host_memory() -> None:
    bench = Bench(pages=60, chunk=64, host=1000)
    prompt = fill(bench, 0)
    fill(bench, 1)
    bench.add(10, [*prompt, 99], 4)
    plan = bench.plan()
    assert plan.moves is not None and plan.moves.onload.size
    bench.scheduler.fail(plan, "broken")
    bench.cache.check()
    assert bench.cache.tier.used_pages == 0
    assert bench.cache.prefixes.tree.match("", ids(*prompt)).length == 0, "its pages were not filled"


def test_an_emptied_cache_is_empty_on_the_host_as_well() -> None:
    bench = Bench(pages=60, chunk=64, host=1000)
    prompt = fill(bench, 0)
    fill(bench, 1)
    assert bench.cache.tier.used_pages > 0
    bench.cache.clear()
    bench.cache.check()
    assert bench.cache.tier.used_pages == 0
    bench.add(10, [*prompt, 99], 1)
    bench.drain()
    assert bench.cached[10] == 0


def test_the_copy_of_a_long_context_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its chunk comes a step later, if the step has other work, but not many prompt tokens."""
    monkeypatch.setattr("radixrt.worker.scheduler.scheduler.MIN_FETCHED_TOKENS", 20)
    monkeypatch.setattr("radixrt.worker.scheduler.scheduler.MAX_OTHER_TOKENS", 10)
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
        at = next(n for n, plan in enumerate(plans) if plan.moves is not None and plan.moves.onload.size)
        return [{request.id for request in plan.requests} for plan in plans[at : at + 2]], plans[at].needs_onload

    bench.add(9, [7, 8, 9], 30)
    bench.step()
    assert asked(10, prompts[0]) == ([{9}, {9, 10}], False)
    assert asked(11, prompts[1]) == ([{11}, {11}], True), "there is nothing else to do"


def test_the_copy_is_waited_for_beside_many_prompt_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixrt.worker.scheduler.scheduler.MIN_FETCHED_TOKENS", 20)
    monkeypatch.setattr("radixrt.worker.scheduler.scheduler.MAX_OTHER_TOKENS", 10)
    bench = Bench(pages=200, chunk=64, host=1000)
    prompts = [fill(bench, id) for id in range(6)]
    bench.add(9, [*range(200, 300)], 1)
    bench.step()
    bench.add(10, [*prompts[0], 99], 1)
    plan = bench.plan()
    assert [request.id for request in plan.requests] == [9, 10]
    assert plan.moves.onload.size and plan.needs_onload


@pytest.mark.parametrize("tokens", [5, 45])
def test_copies_take_a_part_of_a_step(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixrt.worker.scheduler.scheduler.FETCHED", 2)
    bench = Bench(pages=120, chunk=40, host=1000)
    prompts = [fill(bench, id) for id in range(4)]
    bench.add(10, [*prompts[0], *range(200, 200 + tokens)], 1)
    bench.add(11, [*range(300, 350)], 1)
    plan = bench.plan()
    fetched, own = plan.moves.onload.shape[1], min(tokens, 40 - plan.moves.onload.shape[1] // 2)
    assert fetched > 20 and plan.counts.tolist() == [own, 40 - fetched // 2 - own][: 1 + (tokens == 5)]


@pytest.mark.parametrize("host", [0, 20, 1000])
def test_contexts_are_kept_where_little_fits_in_host_memory(host: int) -> None:
    bench = Bench(pages=100, chunk=64, rows=1, host=host)
    bench.cache.retained.continuation_rate = 1.0
    for id in range(3):
        bench.add(id, [id + 100, *range(3, 30)], 2)
    while 0 not in bench.finish:
        bench.step()
    assert bool(bench.cache.retained.tokens()) == (host < 25)
    bench.drain()


def test_what_was_held_in_vain_is_not_held_any_longer() -> None:
    """There were no pages to copy it to, and nothing else is copied before the step."""
    host = HostTier(10, 1)
    store(host, "", ids(1, 2, 3), 0, np.array([11, 12, 13], np.int32))
    host.drain()
    assert len(host.hold("", ids(1, 2, 3), 0)) == 3 and host.tree.leased_tokens == 3
    assert host.drain() is None
    assert host.tree.leased_tokens == 0


def test_a_page_that_is_taken_twice_in_a_step_gets_what_the_last_one_needs() -> None:
    """Who it was copied back for was sent back to wait, and lost it to another one."""
    host = HostTier(10, 1)
    for first in (1, 5):
        store(host, "", ids(first, 2), 0, np.array([first, 2], np.int32))
    host.drain()
    host.onload(host.hold("", ids(5, 2), 0), np.array([21, 22], np.int32))
    host.onload(slots := host.hold("", ids(1, 2), 0), np.array([22, 23], np.int32))
    held, to = host.drain().onload.tolist()
    assert to == [21, 22, 23] and held[1:] == slots.tolist()


def test_of_what_does_not_fit_the_beginning_is_stored() -> None:
    host = HostTier(3, 1)
    store(host, "", ids(1, 2, 3, 4, 5), 1, np.array([12, 13, 14, 15], np.int32))
    assert host.reach("", ids(1, 2, 3, 4, 5), 1) == 3 and host.lost_pages == 2
    assert host.drain().offload[0].tolist() == [12, 13]


def test_slots_are_taken_in_order_again() -> None:
    """Slots that follow each other are one copy."""
    host = HostTier(9, 1)
    for n in range(4):
        store(host, "", ids(10 * n, 1, 2, 3), 0, np.arange(11, 15, dtype=np.int32))
        slots = host.drain().offload[1]
        assert (np.diff(slots) == 1).all()


def test_what_is_copied_back_does_not_change_with_the_table() -> None:
    host = HostTier(9, 1)
    store(host, "", ids(1), 0, np.array([11], np.int32))
    table = np.array([21], np.int32)
    host.onload(host.hold("", ids(1), 0), table)
    table[:] = 99  # the row is another request's
    assert host.drain().onload[1].tolist() == [21]


def test_what_a_request_has_computed_itself_is_not_copied_back() -> None:
    """Generated tokens are in no tree before it ends, but another one may have generated them, too."""
    bench = Bench(host=100)
    request = bench.add(0, [5, 6, 7, 8], 20)
    for _ in range(8):
        bench.step()
    length, computed = request.lease.length, request.computed
    assert computed > length + 2
    store(bench.cache.tier, "", request.tokens[: length + 2].tobytes(), length, np.array([1, 2], np.int32))
    assert bench.cache.requests.onload(request) == 0 and request.computed == computed


def test_of_a_request_that_failed_nothing_stays_in_host_memory() -> None:
    bench = Bench(pages=60, chunk=64, host=1000)
    prompt = fill(bench, 0)
    fill(bench, 1)
    bench.add(10, [*prompt, 99], 4)
    plan = bench.plan()
    result = bench.runner.launch(plan)()
    result.failed[0] = "not finite"
    bench.scheduler.apply(plan, result)
    bench.cache.check()
    assert bench.cache.tier.tree.match("", ids(*prompt)).length == 0
    bench.add(11, [*prompt, 99], 4)
    bench.drain()
    assert bench.cached[11] == 0 and bench.tokens[11] == alone([*prompt, 99], 4)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_many_pages_are_evicted_at_a_time(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixrt.worker.cache.host_tier.MIN_EVICTED_SHARE", share)
    bench = Bench(pages=60, chunk=64, host=1000)
    fill(bench, 0)
    bench.add(1, [*range(200, 220)], 1)
    bench.step()  # one page is missing
    assert bench.cache.tier.used_pages == (30 if share else 1)


def test_what_can_be_had_changes_with_the_version() -> None:
    """Also where a gap is filled, which the tree takes no notice of; and where a path is forgotten."""
    host = HostTier(10, 1)
    seen, path = [], ids(1, 2, 3)
    for change in (
        lambda: store(host, "", path, 2, np.array([13], np.int32)),
        lambda: store(host, "", path[:8], 0, np.array([11, 12], np.int32)),
        lambda: host.forget("", path, 1),
        host.clear,
    ):
        change()
        seen.append((host.version, host.reach("", path, 0)))
    assert [reach for _, reach in seen] == [0, 3, 1, 0]
    assert len({version for version, _ in seen}) == 4


def test_only_evictions_lose_pages() -> None:
    host = HostTier(4, 1)
    store(host, "", ids(1, 2, 3), 0, np.array([11, 12, 13], np.int32))
    host.forget("", ids(1, 2, 3), 2)
    host.clear()
    assert host.lost_pages == 0 and host.used_pages == 0
    for n in (1, 4):
        store(host, "", ids(n, n + 1, n + 2), 0, np.array([11, 12, 13], np.int32))
    assert host.lost_pages == 3
    host.check()


@pytest.mark.parametrize("end", ["fail behind", "abort", "preempt", "pin"])
def test_nobody_finds_what_a_failed_step_was_to_copy_back(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request for which it copies is not in the failed step, and may be in the one behind it, or gone."""
    monkeypatch.setattr("radixrt.worker.scheduler.scheduler.MIN_FETCHED_TOKENS", 20)
    bench = Bench(pages=90, chunk=64, host=1000)
    prompts = [fill(bench, id) for id in range(3)]
    bench.add(9, [7, 8, 9], 30)
    bench.step()
    bench.add(10, [*prompts[0], 99], 2)
    plan = bench.plan()
    assert plan.moves.onload.size and [request.id for request in plan.requests] == [9]
    if end == "fail behind":
        bench.scheduler.fail(bench.plan(), "broken")
    elif end == "preempt":
        assert bench.scheduler._preempt(bench.scheduler.requests_of(plan)).id == 10
    else:
        bench.scheduler.abort(10)
    if end == "pin":
        bench.cache.pins.add("", ids(*prompts[0]), 10.0, 0.0, 1)
    bench.scheduler.fail(plan, "broken")
    bench.cache.check()
    assert bench.cache.prefixes.tree.match("", ids(*prompts[0])).length == 0
    assert bench.cache.tier.used_pages == 0 and not bench.cache.pins


def test_copies_that_no_step_has_made_are_dropped_with_a_failed_one() -> None:
    bench = Bench(pages=60, chunk=64, host=1000)
    prompt = fill(bench, 0)
    fill(bench, 1)
    bench.add(5, [7, 8, 9], 4)
    plan = bench.plan()
    request = bench.add(10, [*prompt, 99], 4)
    bench.scheduler.running.prefilling.append(request)  # as if it was planned for, and then there was no step
    bench.scheduler._waiting.take(request, [])
    bench.cache.requests.admit(request)
    assert bench.cache.requests.onload(request) > 0 and bench.cache.tier.is_onloading
    bench.scheduler.fail(plan, "broken")
    assert not bench.cache.tier.is_onloading and bench.cache.tier.tree.leased_tokens == 0
    assert bench.cache.prefixes.tree.match("", ids(*prompt)).length == 0
    bench.drain()
    assert bench.tokens[10] == alone([*prompt, 99], 4) and bench.cached[10] == 0


def test_who_decodes_after_a_copy_that_failed_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was preempted, so that all but its last token comes back: it is behind no more, and not in the step."""
    monkeypatch.setattr("radixrt.worker.scheduler.scheduler.MIN_FETCHED_TOKENS", 20)
    bench = Bench(pages=90, chunk=64, host=1000)
    prompt = [100, *range(3, 43)]
    request = bench.add(10, prompt, 10)
    while len(bench.tokens[10]) < 4:
        bench.step()
    while bench.inflight:
        bench.finish_step(*bench.inflight)
        bench.inflight = None
    bench.scheduler._preempt()
    bench.scheduler._waiting.remove(request)
    for id in range(2):
        bench.add(id, [id + 101, *range(3, 43)], 1)
        while id not in bench.finish:
            bench.step()
    bench.add(9, [7, 8, 9], 30)
    bench.step()
    bench.scheduler._waiting.add(request)
    bench.add(11, [6, 5, 4], 1)
    plan = bench.plan()
    assert plan.moves.onload.size and request.info not in plan.requests and request in bench.scheduler.running.decoding
    bench.scheduler.fail(plan, "broken")
    assert request.row < 0
    bench.inflight = None
    bench.drain()
    assert bench.tokens[10] == alone(prompt, 10)


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
        mirror.tell(lost=rng.random() < 0.1, resync=rng.random() < 0.1)
        for trunk, namespace in itertools.product((*trunks, prompt), "ab"):
            path = np.array(trunk, np.int32)
            device = cache.prefixes.tree.match(namespace, path).length
            reach = cache.tier.reach(namespace, path, device)
            predicted = mirror.index.match(namespace, path.tobytes()).get(0, 0)
            assert predicted - predicted % page_size == reach
            found += reach > device
    assert found > 10
    bench.drain()


def test_a_slot_below_many_pages_that_have_none_is_evicted_at_once() -> None:
    host = HostTier(3, 1)
    path = np.arange(50_000, dtype=np.int32).tobytes()
    store(host, "", path, 49_998, np.array([1, 2], np.int32))
    host.drain_events()
    store(host, "", ids(-1, -2), 0, np.array([3, 4], np.int32))
    ends = [event for event in host.drain_events() if event[0] == "removed"]
    assert len(ends) == 1 and host.reach("", ids(-1, -2), 0) == 2
    host.check()
