"""Checkpoints of recurrent states in host memory, beside pages. The fake runner checks that each request goes on from
the state of its own prefix, and reads its own KV."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from radixrt.worker import status
from radixrt.worker.cache.checkpoint_order import CheckpointOrder
from radixrt.worker.cache.host_recurrent_states import HostRecurrentStatePool
from radixrt.worker.cache.host_tier import HostTier
from radixrt.worker.cache.page_cache import PageCache
from radixrt.worker.cache.recurrent_states import RecurrentStatePool
from radixrt.worker.plan import STATE_TOKENS, Plan
from radixrt.worker.scheduler import state_checkpoints
from tests.worker.test_host_faults import load
from tests.worker.test_simulation import Bench, alone, overlaps, random_prompt  # noqa: F401
from tests.worker.test_states import TRUNK, Mirror, often, run  # noqa: F401


def path(*tokens: int) -> memoryview:
    return memoryview(np.array(tokens, np.int32))


def bench_of(states: int = 3, host_states: int = 100, **sizes: int) -> Bench:
    settings = {"pages": 4000, "chunk": 512, "rows": 8, "max_len": 2000, "host": 20_000} | sizes
    return Bench(**settings, states=states, host_states=host_states)


def text(first: int, length: int = 300) -> list[int]:
    """A prompt that shares nothing with others, and whose marks are few."""
    return [first, *range(20, 20 + length - 1)]


# ---------------------------------------------------------------- what requests find


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_conversation_goes_on_from_host_memory(page_size: int) -> None:
    """The device has few states and few pages; without host memory all is computed again, with it almost nothing."""
    computed = {}
    for host in (0, 20_000 // page_size):
        bench = bench_of(3, host and 100, pages=800 // page_size, page_size=page_size, host=host)
        histories = [text(1000 + n) for n in range(6)]
        for turn in range(4):
            for n, history in enumerate(histories):
                bench.add(10 * turn + n, history, 8)
                bench.drain()
                said = bench.tokens[10 * turn + n]
                assert said == alone(history, 8)
                histories[n] = [*history, *said, *range(900, 920)]
        computed[host > 0] = bench.runner.computed_tokens
    prompts = sum(len(text(1000)) + 28 * turn for turn in range(4)) * 6
    assert computed[False] >= prompts
    # An answer that does not fill its last page leaves no checkpoint, and the prompt's own may be MIN_CHECKPOINT_TOKENS
    # tokens earlier.
    again = 0 if page_size == 1 else state_checkpoints.TAIL + state_checkpoints.MIN_CHECKPOINT_TOKENS
    assert computed[True] <= 6 * (len(text(1000)) + 8 + 3 * (28 + again))


def test_a_state_comes_back_to_pages_that_are_on_the_device() -> None:
    bench = bench_of(states=2)
    run(bench, text(1))
    run(bench, text(2))
    run(bench, text(3))
    assert run(bench, [*text(1), 7, 8]) == [300]
    assert bench.cache.tier.states.onloaded == 1 and bench.cache.tier.onloaded_pages == 0


def test_only_pages_up_to_the_state_come_back() -> None:
    """Tokens after it are computed again, whatever is cached of them."""
    bench = bench_of(states=3, pages=800)
    run(bench, text(1))
    for n in range(2, 6):
        run(bench, text(n))
    assert bench.cache.prefixes.tree.match("", np.array(text(1), np.int32)).length == 0
    before = bench.cache.tier.onloaded_pages
    assert run(bench, [*text(1)[:290], 7, 8]) == [284]
    assert bench.cache.tier.onloaded_pages == before + 284


def test_a_state_is_of_no_use_without_pages() -> None:
    bench = bench_of(states=3, pages=800, host=50)
    for n in range(1, 6):
        run(bench, text(n))
    host = bench.cache.tier.states
    assert host.deepest("", path(*text(1)), 300) == (300, host.deepest("", path(*text(1)), 300)[1])
    assert run(bench, [*text(1), 7]) == [0] and host.onloaded == 0


def test_namespaces_do_not_share_states() -> None:
    bench = bench_of(states=2)
    run(bench, text(1), namespace="a")
    run(bench, text(2), text(3), namespace="a")
    assert bench.cache.tier.states.deepest("a", path(*text(1)), 300)[0] == 300
    assert bench.cache.tier.states.deepest("b", path(*text(1)), 300) == (0, 0)
    assert run(bench, [*text(1), 7], namespace="b") == [0]


def test_the_deeper_of_two_checkpoints_counts() -> None:
    """On the device or on the host."""
    for rounds, found in ((1, 300), (2, 300)):
        bench = bench_of(states=2)
        run(bench, text(1))
        for n in range(2, 2 + rounds):
            run(bench, text(n))
        request = bench.add(50, [*text(1), 7], 1)
        assert bench.cache.prefixes.find("", request.tokens, request.reusable) == (300, found)
        bench.drain()
        assert bench.cached[50] == found


def test_preempted_requests_resume_from_host_memory() -> None:
    for host in (False, True):
        bench = bench_of(5, 50 if host else 0, pages=700, rows=2, host=5000 if host else 0)
        a, b = TRUNK[:300], [5] * 250
        bench.add(0, a, 150)
        bench.add(1, b, 150)
        bench.drain()
        assert bench.scheduler.preemptions > 0
        assert bench.tokens == {0: alone(a, 150), 1: alone(b, 150)}
        if host:
            assert bench.runner.computed_tokens <= 550 + 300, "nothing was computed twice"


def test_marks_are_set_by_what_both_have() -> None:
    """A third prompt hits where the second left the first, also if nothing of that was on the device any more. Where
    the device's part ends, nobody branched."""
    bench = bench_of(states=8, pages=800)
    run(bench, TRUNK[:300] + [1] * 100)
    for n in range(2, 4):
        run(bench, text(n))
    request = bench.add(50, TRUNK[:300] + [2] * 100, 1)
    assert bench.cache.prefixes.tree.match("", np.array(TRUNK, np.int32)).length not in (0, 300, 400)
    bench.plan()
    assert request.checkpoints == [300, 400 - state_checkpoints.TAIL]


def test_marks_begin_after_the_state_that_comes_back() -> None:
    bench = bench_of(states=2)
    run(bench, text(1))
    run(bench, text(2))
    run(bench, text(3))
    request = bench.add(
        50, [*text(1), *range(state_checkpoints.MIN_CHECKPOINT_TOKENS // 2)], 1, pin=[(200, 60.0), (310, 60.0)]
    )
    plan = bench.plan()
    assert plan.starts.tolist() == [300] and request.checkpoints == []


# ---------------------------------------------------------------- copies


def plans_of(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    plans: list[Plan] = []
    launch = bench.runner.launch
    monkeypatch.setattr(bench.runner, "launch", lambda plan: plans.append(plan) or launch(plan))
    return plans


def test_what_is_there_already_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of(states=2)
    plans = plans_of(bench, monkeypatch)
    run(bench, text(1))
    for n in range(2, 4):
        run(bench, text(n))
    run(bench, [*text(1), 7])
    assert sum(plan.moves.states_onload.shape[1] for plan in plans if plan.moves) == 1
    copied = [plan.moves.states_offload.shape[1] for plan in plans if plan.moves]
    bench.cache.states.evict(np.arange(1, 4001))
    bench.cache.states.evict(np.arange(1, 4001))
    moves = bench.cache.tier.drain()
    assert moves.states_offload.shape[1] <= 2 and sum(copied) >= 4
    assert bench.cache.tier.drain() is None


def test_a_state_is_not_waited_for_beside_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of(states=4)
    plans = plans_of(bench, monkeypatch)
    run(bench, text(1))
    for n in range(2, 5):
        run(bench, text(n))
    bench.add(9, [7, 8, 9], 30)
    bench.step()

    def asked(id: int, prompt: list[int]) -> tuple[list[set[int]], bool]:
        del plans[:]
        bench.add(id, prompt, 2)
        while id not in bench.finish:
            bench.step()
        assert bench.tokens[id] == alone(prompt, 2) and bench.cached[id] == 300
        at = next(n for n, plan in enumerate(plans) if plan.moves and plan.moves.states_onload.size)
        return [{request.id for request in plan.requests} for plan in plans[at : at + 2]], plans[at].needs_onload

    assert asked(50, [*text(1), 7]) == ([{9}, {9, 50}], False)
    bench.drain()
    for n in range(2, 5):
        run(bench, text(n))
    assert asked(80, [*text(1), 8]) == ([{80}, {80}], True), "there is nothing else to do"


def test_a_state_takes_a_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixrt.worker.scheduler.scheduler.FETCHED", STATE_TOKENS // 10)
    bench = bench_of(states=3, chunk=40)
    for n in range(1, 5):
        run(bench, text(n))
    bench.add(50, [*text(1), *range(200, 260)], 1)
    assert bench.plan().counts.tolist() == [30]


def test_who_is_sent_back_before_its_state_has_come_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy is not made, and it waits with the same hit. The step before has ended, so all is as if nothing was."""
    bench = bench_of(states=3)
    for n in range(1, 4):
        run(bench, text(n))
    host, states = bench.cache.tier.states, bench.cache.states
    order, before = list(host._order), len(states)
    request = bench.add(50, [*text(1), 7], 1)
    bench.cache.requests.admit(request)
    assert bench.cache.requests.onload(request) == STATE_TOKENS and request.computed == 300 and host.is_onloading
    bench.cache.requests.retire(request)
    assert not host.is_onloading and host.onloaded == 0 and request.computed == 0
    bench.cache.check()
    moves = bench.cache.tier.drain()
    assert (moves is None or not moves.fills) and len(states) <= before
    assert sorted(host._order)[: len(order)] == sorted(order) and bench.cache.requests.hit(request) == 300
    bench.drain()
    assert bench.tokens[50] == alone([*text(1), 7], 1) and bench.cached[50] == 300


def test_who_is_not_admitted_copies_nothing_back() -> None:
    bench = bench_of(states=2)
    for n in range(1, 4):
        run(bench, text(n))
    bench.cache.tier.drain()
    request = bench.add(50, [*text(1), 7], 1)
    for _ in range(3):
        bench.cache.requests.admit(request)
        bench.cache.requests.withdraw(request)
    moves = bench.cache.tier.drain()
    assert moves is None or not moves.fills
    bench.cache.check()
    bench.drain()
    assert bench.cached[50] == 300


def test_what_is_not_taken_yet_is_not_copied() -> None:
    """The page of a checkpoint goes before the step that takes it."""
    host = HostRecurrentStatePool(5, 1)
    states = RecurrentStatePool(5, 10, host=host)
    slot = states.begin(0)
    for page, within in ((1, 0), (2, 3)):
        states.save(slot, page, within, ("", path(page)))
    states.evict(np.array([1, 2]))
    assert states.drain()[1].size == 0 and host.drain()[0].size == 0 and not len(host) and not host._tree.tokens
    states.save(slot, 1, 0, ("", path(1)))
    saved = states.drain()[1][1].tolist()
    states.evict(np.array([1, 2]))
    assert host.drain()[0].tolist() == [saved, [1]]


def test_a_state_that_has_to_go_while_another_comes_back() -> None:
    """The only slot of the device is that of the request; the slot of the host is held."""
    bench = bench_of(states=1, host_states=2)
    run(bench, text(1))
    run(bench, text(2))
    run(bench, text(3))
    assert run(bench, [*text(2), 7]) == [300]
    assert run(bench, [*text(3), 7]) == [300]


def test_who_is_admitted_does_not_lose_the_state_that_its_hit_counts_on() -> None:
    """Its live state takes the slot of a checkpoint, which goes to host memory: not in place of the one that comes
    back, although that was used longest ago."""
    bench = bench_of(states=1, host_states=1)
    run(bench, text(1))
    run(bench, text(2))
    request = bench.add(50, [*text(1), 7], 1)
    assert bench.cache.states.free == 0 and request.hit == 300
    bench.drain()
    assert bench.cached[50] == 300 and bench.cache.tier.states.lost == 1


# ---------------------------------------------------------------- which go


def store(host: HostRecurrentStatePool, *tokens: int, source: int = 1, **order: bool) -> None:
    host.name(source, "", path(*tokens))
    host.store(source, (len(tokens), 0), **order)


def test_the_least_recently_used_goes_first() -> None:
    host = HostRecurrentStatePool(4, 1)
    for n in range(1, 4):
        store(host, n, n, source=10 + n)
    assert host.drain()[0].tolist() == [[11, 12, 13], [1, 2, 3]]
    host.hold(1)
    host.onload(1, 20)
    assert host.drain()[1].tolist() == [[1], [20]]
    store(host, 4)
    assert [host.deepest("", path(n, n, 9), 3)[0] for n in (1, 2, 3)] == [2, 0, 2]
    assert host.deepest("", path(4, 9), 3)[0] == 1 and host.lost == 1
    host.check()


def test_one_that_goes_from_the_device_again_is_used_by_that() -> None:
    host = HostRecurrentStatePool(4, 1)
    for n in (1, 2, 3, 1, 4):
        store(host, n)
    assert [host.deepest("", path(n), 1)[0] for n in (1, 2, 3, 4)] == [1, 0, 1, 1]
    assert host.drain()[0].shape == (2, 3), "the slot of one that is gone gets another, and 1 is copied once"


def test_the_last_of_a_conversation_goes_first_once_another_has_gone_on_from_it() -> None:
    for last in (False, True):
        host = HostRecurrentStatePool(4, 1)
        for n in range(1, 4):
            store(host, n, last=last)
        host.hold(2)
        host.onload(2, 20)
        host.drain()
        store(host, 4)
        gone = [n for n in (1, 2, 3) if not host.deepest("", path(n), 1)[0]]
        assert gone == [2 if last else 1]


def test_one_that_nobody_went_on_from_after_all_stays() -> None:
    host = HostRecurrentStatePool(4, 1)
    for n in range(1, 4):
        store(host, n, last=True)
    host.hold(2)
    host.onload(2, 20)
    assert host.forgo(20) and not host.forgo(20) and host.onloaded == 0
    assert host.drain()[1].size == 0
    store(host, 4)
    assert [host.deepest("", path(n), 1)[0] for n in (1, 2, 3)] == [0, 1, 1]


def test_what_one_step_went_on_from_is_not_taken_back_in_another() -> None:
    host = HostRecurrentStatePool(4, 1)
    for n, last in ((1, True), (2, False), (3, False)):
        store(host, n, last=last)
    for slot in (1, 2):
        host.hold(slot)
        host.onload(slot, 20)
        if slot == 1:
            host.drain()
    assert host.forgo(20)
    store(host, 4)
    assert [host.deepest("", path(n), 1)[0] for n in (1, 2, 3)] == [0, 1, 1]


def test_what_is_used_again_is_a_branching_point() -> None:
    order = CheckpointOrder()
    for slot in (1, 2, 3):
        order.add(slot, last=True)
    assert order.go_on(2) and list(order) == [2, 1, 3] and order.is_spent(2) and not order.is_last(2)
    assert not order.go_on(2) and list(order) == [1, 3, 2] and not order.is_spent(2)
    assert order.go_on(1)
    order.take_back(1)
    assert list(order) == [3, 2, 1] and order.is_last(1) and not order.is_spent(1)
    order.touch(3)
    assert list(order) == [2, 1, 3] and order.is_last(3)
    order.remove(1)
    order.touch(1)
    order.take_back(1)
    assert list(order) == [2, 3] and 1 not in order and not order.go_on(1)


def test_a_spent_one_takes_a_free_slot_only() -> None:
    host = HostRecurrentStatePool(3, 1)
    store(host, 1, spent=True)
    store(host, 2)
    store(host, 3, spent=True)
    assert [host.deepest("", path(n), 1)[0] for n in (1, 2, 3)] == [1, 1, 0] and host.lost == 1
    store(host, 3)
    assert [host.deepest("", path(n), 1)[0] for n in (1, 2, 3)] == [0, 1, 1]
    host.check()


def test_slots_that_are_held_are_not_reused_before_the_step() -> None:
    host = HostRecurrentStatePool(2, 1)
    store(host, 1, source=11)
    host.hold(1)
    host.onload(1, 20)
    store(host, 2, source=12)
    assert host.lost == 1 and host.deepest("", path(2), 1) == (0, 0)
    out, back = host.drain()
    assert out.tolist() == [[11], [1]] and back.tolist() == [[1], [20]]
    store(host, 2, source=12)
    assert host.drain()[0].tolist() == [[12], [1]]
    host.check()


@pytest.mark.parametrize("remove", ["clear", "forget"])
def test_what_is_removed_before_it_was_copied_back_is_not_overwritten(remove: str) -> None:
    """Nothing else was to be computed, so that there was no step, and then the cache was emptied, or it was of a
    request that failed."""
    host = HostRecurrentStatePool(2, 1)
    store(host, 1, source=11)
    host.hold(1)
    host.onload(1, 20)
    host.clear() if remove == "clear" else host.forget("", path(1), 0)
    store(host, 2, source=12)
    out, back = host.drain()
    assert out.tolist() == [[11], [1]] and back.tolist() == [[1], [20]]
    assert not len(host) and host.lost == 1
    store(host, 2, source=12)
    assert host.drain()[0].tolist() == [[12], [1]]
    host.check()


def test_a_slot_that_is_reused_in_a_step_gets_what_it_holds_last() -> None:
    host = HostRecurrentStatePool(2, 1)
    store(host, 1, source=11)
    store(host, 2, source=12)
    assert host.drain()[0].tolist() == [[12], [1]]


def test_paths_are_remembered_while_there_is_a_checkpoint() -> None:
    host = HostRecurrentStatePool(3, 4)
    host.name(5, "", path(*range(8)))
    store(host, *range(4))
    host.check()
    assert host.deepest("", path(*range(12)), 12)[0] == 4 and host.deepest("", path(*range(12)), 3)[0] == 0
    host.store(5, (8, 0))
    assert host.deepest("", path(*range(12)), 12)[0] == 8 and host.deepest("", path(*range(12)), 7)[0] == 4
    host.forget("", path(*range(8)), 4)
    assert host.deepest("", path(*range(12)), 12)[0] == 4 and len(host) == 1
    host.forget("", path(*range(8)), 3)
    assert len(host) == 0 and host._tree.tokens == 0 and host.drain()[0].size == 0
    host.check()


def test_the_version_changes_with_what_can_be_had() -> None:
    host, seen = HostRecurrentStatePool(3, 1), []
    for change in (
        lambda: store(host, 1),
        lambda: store(host, 1, 2),
        lambda: host.forget("", path(1, 2), 1),
        host.clear,
    ):
        change()
        seen.append((host.version, host.deepest("", path(1, 2), 2)[0]))
    assert [found for _, found in seen] == [1, 2, 1, 0] and len({version for version, _ in seen}) == 4


def test_what_the_index_hears_of() -> None:
    """Slots are numbered after the device's. A list of all there is has what was not told yet."""
    host = HostRecurrentStatePool(3, 1, events=True, first=10)
    store(host, 7, 8)
    store(host, 9)
    host.forget("", path(9), 0)
    assert host.drain_events() == [("saved", 11, 2, 0), ("saved", 12, 1, 0), ("dropped", 12)]
    store(host, 9)
    assert host.resync_events() == [("saved", 11, 2, 0), ("saved", 12, 1, 0)] and host.drain_events() == []


def test_both_or_none() -> None:
    for states, pages, host_states in ((3, 10, 0), (0, 10, 3), (3, 0, 3)):
        with pytest.raises(ValueError, match="num_host_states"):
            PageCache(10, 1, 1, 10, num_states=states, num_host_pages=pages, num_host_states=host_states)
    with pytest.raises(ValueError, match="0 recurrent states, at least 1"):
        PageCache(10, 1, 1, 10, num_states=3, num_host_pages=9, num_host_states=1)


# ---------------------------------------------------------------- what is invalid


def test_an_emptied_cache_has_no_states_on_the_host() -> None:
    bench = bench_of(states=2)
    run(bench, text(1), text(2), text(3))
    assert len(bench.cache.tier.states)
    bench.cache.clear()
    bench.cache.check()
    assert len(bench.cache.tier.states) == 0 and run(bench, [*text(1), 7]) == [0]


def test_of_a_request_that_failed_no_state_stays_on_the_host() -> None:
    bench = bench_of(states=2)
    for n in range(1, 4):
        run(bench, text(n))
    others = len(bench.cache.tier.states)
    bench.add(50, [*text(1), 7], 4)
    plan = bench.plan()
    result = bench.runner.launch(plan)()
    result.failed[0] = "not finite"
    bench.scheduler.apply(plan, result)
    bench.cache.check()
    assert bench.cache.tier.states.deepest("", path(*text(1)), 300) == (0, 0)
    assert 0 < len(bench.cache.tier.states) < others + 2
    assert run(bench, [*text(1), 7]) == [0]


@pytest.mark.parametrize("end", ["run", "fail behind", "abort", "preempt"])
def test_nobody_finds_a_state_that_a_failed_step_was_to_copy_back(end: str) -> None:
    """The request for which it is copied is not in the failed step, and may be in the one behind it, or gone; another
    one has its pages."""
    bench = bench_of(states=7, rows=4)
    run(bench, text(1))
    for n in range(2, 6):
        run(bench, text(n))
    bench.cache.states.evict(np.arange(1, 4001))
    bench.cache.states.work([])
    bench.cache.tier.drain()
    holder = bench.cache.prefixes.tree.lease(bench.cache.prefixes.tree.match("", path(*text(1))))
    bench.add(9, [7, 8, 9], 30)
    bench.step()
    bench.add(10, [*text(1), 99], 2)
    plan = bench.plan()
    assert plan.moves.states_onload.size and [request.id for request in plan.requests] == [9]
    if end == "fail behind":
        bench.scheduler.fail(bench.plan(), "broken")
    elif end == "preempt":
        assert bench.scheduler._preempt(bench.scheduler.requests_of(plan)).id == 10
    elif end == "abort":
        bench.scheduler.abort(10)
    bench.scheduler.fail(plan, "broken")
    bench.cache.check()
    assert len(bench.cache.tier.states) == len(bench.cache.states) == 0, "the pages are there, and no state of them"
    assert holder.length == 300
    holder.release()
    bench.inflight = None
    bench.drain()
    assert (10 in bench.finish) == (end in ("run", "preempt")), "it waited again"


def test_nothing_is_copied_after_a_reset() -> None:
    host = HostTier(5, 1, states=HostRecurrentStatePool(3, 1))
    store(host.states, 1)
    host.states.hold(1)
    host.states.onload(1, 20)
    assert host.is_onloading
    host.reset()
    assert not host.is_onloading and host.drain() is None and len(host.states) == 0


def test_copies_that_no_step_has_made_are_dropped_with_a_failed_one() -> None:
    bench = bench_of(states=3)
    for n in range(1, 4):
        run(bench, text(n))
    bench.add(5, [7, 8, 9], 4)
    plan = bench.plan()
    request = bench.add(50, [*text(1), 99], 4)
    bench.scheduler.running.prefilling.append(request)  # as if it was planned for, and then there was no step
    bench.scheduler._waiting.take(request, [])
    bench.cache.requests.admit(request)
    assert bench.cache.requests.onload(request) and bench.cache.tier.is_onloading
    bench.scheduler.fail(plan, "broken")
    assert not bench.cache.tier.is_onloading and not bench.cache.tier.states._offloaded and not len(bench.cache.states)
    bench.inflight = None
    bench.drain()
    assert bench.tokens[50] == alone([*text(1), 99], 4) and bench.cached[50] == 0


def test_a_state_that_goes_with_a_failed_step_is_not_kept() -> None:
    bench = bench_of(states=2)
    run(bench, text(1))
    bench.add(50, text(2), 1)
    plan = bench.plan()
    assert plan.moves.states_offload.size and not plan.moves.fills
    bench.scheduler.fail(plan, "broken")
    bench.cache.check()
    assert len(bench.cache.tier.states) == 0 and run(bench, [*text(2), 7]) == [0]


# ---------------------------------------------------------------- random loads


@pytest.mark.parametrize("host_states", [1, pytest.param(4, marks=pytest.mark.slow), 100])
@pytest.mark.parametrize("states", [1, 3, 8])
@pytest.mark.parametrize(("page_size", "pages", "host"), [(1, 40, 1000), (1, 90, 50), (4, 120, 1000)])
def test_random_faults(
    page_size: int,
    pages: int,
    host: int,
    states: int,
    host_states: int,
    monkeypatch: pytest.MonkeyPatch,
    often: None,  # noqa: F811
) -> None:
    seed = states * host_states + page_size
    rng = random.Random(seed)
    monkeypatch.setattr("radixrt.worker.scheduler.scheduler.MIN_FETCHED_TOKENS", rng.choice([1, 10, 512, 100_000]))
    monkeypatch.setattr("radixrt.worker.scheduler.scheduler.MAX_OTHER_TOKENS", rng.choice([1, 10, 2048]))
    monkeypatch.setattr("radixrt.worker.scheduler.plan_builder.MAX_SCORED_TOKENS", 10)
    faults = rng.choice([0.0, 0.03, 0.1])
    bench, expected = load(seed, page_size, pages, host, faults, states=states, host_states=host_states)
    for id, tokens in expected.items():
        found = bench.tokens[id]
        assert found == tokens[: len(found)], "what comes out is what it gives alone"
        assert bench.finish.get(id) != "length" or found == tokens
    assert bench.cache.states.live == 0 and not bench.cache.tier.states.is_onloading


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("page_size", [1, 4])
def test_to_the_index_device_and_host_are_one_cache(seed: int, page_size: int, often: None) -> None:  # noqa: F811
    rng = random.Random(seed)
    states, host_states = rng.choice([2, 4]), rng.choice([2, 40])
    bench = Bench(
        96 // page_size, page_size, rng.choice([16, 64]), 4, max_len=60, host=5000, states=states,
        host_states=host_states,
    )  # fmt: skip
    register = status.registration(status.Identity("w", "m"), bench.runner, bench.cache, bench.scheduler.limits, 60)
    assert register.num_states == states + 1 + host_states
    mirror, found = Mirror(bench, register.num_states), 0
    trunks = [[rng.randint(3, 9) for _ in range(30)] for _ in range(3)]
    for id in range(60):
        prompt = random_prompt(rng, trunks)
        bench.add(id, prompt, rng.randint(1, 6), namespace=rng.choice("ab"))
        for _ in range(rng.randint(0, 6)):
            bench.step()
        if rng.random() < 0.03:
            bench.cache.clear()
        mirror.tell(lost=rng.random() < 0.1, resync=rng.random() < 0.1)
        for probe, namespace in itertools.product((prompt, *trunks), "ab"):
            found += mirror.check(probe, namespace, len(probe) - rng.randint(0, 2))
    assert found > 100 and (bench.cache.tier.states.onloaded or host_states == 2)
