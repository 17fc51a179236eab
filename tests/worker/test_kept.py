"""What an agent's turn leaves in the cache is there when its next turn comes, though others wait for pages."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest

from radixrt.messages import Run, Sampling
from radixrt.worker.cache import retention
from radixrt.worker.cache.retention import MAX_CONTEXTS, MIN_CONTINUATION_RATE, OVERLAP, SECONDS, RetainedContexts
from radixrt.worker.request import Request
from radixrt.worker.scheduler.admission import Admission
from radixrt.worker.scheduler.queue import ANSWER, OVERTAKING_WITHOUT_ROOM
from radixrt.worker.scheduler.running import Running
from radixrt.worker.scheduler.state_checkpoints import NoBranching
from tests.worker.engine import Clock
from tests.worker.test_simulation import Bench, overlaps  # noqa: F401

AGENT = [7] * 40
SHORT, *_, LONG = SECONDS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(retention, "time", found := Clock())
    return found


def crowded(stranger: str = "a", needs: int = 50) -> tuple[Bench, list[int]]:
    """An agent's turn has ended; one that goes on for long and what the agent left are all that the pool has, and a
    stranger waits who could have that. Also the agent's next prompt."""
    bench = Bench(pages=100, chunk=200, rows=8, max_len=128)
    bench.cache.retained.continuation_rate = 0.5
    bench.add(0, [8] * 45, 40, namespace="a")
    bench.add(1, AGENT, 2, namespace="a")
    bench.step()
    bench.add(2, [9] * needs, 2, namespace=stranger)
    while 1 not in bench.finish:
        bench.step()
    return bench, [*AGENT, *bench.tokens[1], 5, 6]


def test_the_next_turn_finds_what_the_turn_before_left(clock):
    bench, history = crowded()
    for _ in range(3):
        bench.step()
    assert not bench.tokens[2] and bench.scheduler.num_waiting == 1
    bench.add(3, history, 2, namespace="a")
    bench.drain()
    assert bench.cached[3] >= len(AGENT)
    assert sorted(bench.finish) == [0, 1, 2, 3] and bench.cache.leased_pages == 0


def test_a_cleared_cache_keeps_none(clock):
    bench, history = crowded()
    assert bench.cache.retained.leases()
    bench.cache.clear()
    bench.cache.check()
    assert not bench.cache.retained.leases() and bench.cache.evictable_pages == 0
    bench.add(3, history, 2, namespace="a")
    bench.drain()
    assert bench.cached[3] == 0


def test_without_it_the_stranger_takes_it(clock, monkeypatch):
    monkeypatch.setattr(retention, "MIN_CONTINUATION_RATE", 2.0)
    bench, history = crowded()
    for _ in range(3):
        bench.step()
    assert bench.tokens[2]
    bench.add(3, history, 2, namespace="a")
    bench.drain()
    assert bench.cached[3] < len(AGENT) // 2


def test_it_is_retained_for_a_time(clock):
    bench, _ = crowded()
    clock.now += SHORT - 0.1
    bench.step()
    assert bench.scheduler.num_waiting == 1
    clock.now += 0.2
    bench.step()
    assert bench.scheduler.num_waiting == 0
    assert bench.cache.retained.continuation_rate < 0.5
    bench.drain()


def test_who_comes_back_is_waited_for_longer(clock):
    """It is in the queue, and others are before it."""
    bench, history = crowded()
    clock.now += SHORT - 0.1
    request = bench.add(3, history, 2, namespace="a")
    assert bench.cache.retained.continuation_rate > 0.5
    bench.scheduler._waiting.remove(request)  # as if there were no row for it
    clock.now += SHORT - 0.1
    bench.step()
    assert bench.scheduler.num_waiting == 1 and not bench.tokens[2]
    bench.scheduler._waiting.add(request)
    bench.drain()
    assert bench.cached[3] >= len(AGENT)


def test_a_tenant_that_would_hold_less_need_not_wait_for_it(clock):
    bench, _ = crowded("b", 30)
    bench.step()
    assert bench.scheduler.num_waiting == 0
    bench.drain()


def test_tenants_that_hold_alike_take_nothing_from_each_other(clock):
    """The stranger's request would hold half of what the other tenant does: that one's next turn comes first, by what
    has been kept for it."""
    bench, history = crowded("b", 48)
    for _ in range(3):
        bench.step()
    assert not bench.tokens[2]
    bench.add(3, history, 2, namespace="a")
    bench.step()
    assert bench.scheduler._waiting._queues["b"]._overtaking_tokens == 3 + ANSWER, "by the turn"
    bench.drain()
    assert bench.cached[3] >= len(AGENT) and list(bench.finish).index(3) < list(bench.finish).index(2)
    assert sorted(bench.finish) == [0, 1, 2, 3] and bench.cache.leased_pages == 0


def test_it_goes_before_a_running_request_must(clock):
    bench, _ = crowded()
    assert bench.cache.leased_pages >= 80
    while 0 not in bench.finish:
        bench.step()
    assert len(bench.tokens[0]) == 40 and not bench.scheduler.preemptions
    bench.drain()


def test_little_that_runs_is_joined(clock):
    """Others than an agent's next turn are admitted while the pool is mostly kept."""
    bench = Bench(pages=100, chunk=200, rows=8, max_len=128)
    bench.cache.retained.continuation_rate = 0.5
    bench.add(0, [8] * 20, 60, namespace="a")
    bench.add(1, AGENT, 2, namespace="a")
    bench.step()
    bench.add(2, [9] * 70, 2, namespace="a")
    while 1 not in bench.finish:
        bench.step()
    for _ in range(2):
        bench.step()
    assert bench.scheduler.num_waiting == 0
    bench.drain()


def test_who_was_overtaken_for_long_gets_it(clock):
    bench, _ = crowded(needs=30)
    queue = bench.scheduler._waiting._queues["a"]
    queue._overtaking_tokens = OVERTAKING_WITHOUT_ROOM * (30 + ANSWER) - 1
    bench.step()
    assert bench.scheduler.num_waiting == 1, "its turn has come, but there is no room"
    queue._overtaking_tokens += 1
    bench.step()
    assert bench.scheduler.num_waiting == 0
    bench.drain()


def test_it_is_not_given_up_for_what_has_no_room_all_the_same(clock):
    bench, _ = crowded(needs=58)
    bench.scheduler._waiting._queues["a"]._overtaking_tokens = 10_000
    for _ in range(3):
        bench.step()
    assert bench.scheduler.num_waiting == 1 and bench.cache.retained.tokens() >= len(AGENT)
    bench.drain()


def test_nothing_is_retained_where_nobody_waits(clock):
    bench = Bench()
    bench.add(0, [7] * 20, 2)
    bench.drain()
    assert not bench.cache.retained and bench.cache.leased_pages == 0


def test_nothing_is_retained_when_all_have_gone(clock):
    bench, _ = crowded()
    assert bench.cache.retained
    for id in (0, 2):
        bench.scheduler.abort(id)
    assert not bench.cache.retained
    bench.drain()
    assert bench.cache.leased_pages == 0


def test_scored_texts_are_not_retained(clock):
    """The text of one choice is not gone on from."""
    bench = Bench(pages=100, chunk=200, rows=8, max_len=128)
    bench.add(0, [8] * 45, 40, namespace="a")
    bench.cache.retained.continuation_rate = 0.5
    bench.add(1, AGENT, 0, namespace="a", score_from=30)
    bench.add(2, [9] * 50, 2, namespace="a")
    while 1 not in bench.finish:
        bench.step()
    assert bench.scheduler.num_waiting and not bench.cache.retained
    bench.drain()


class Lease:
    released = False

    def __init__(self, length: int = 5) -> None:
        self.length = length

    def release(self) -> None:
        assert not self.released
        self.released = True


def ended(prompt: list[int], namespace: str = "a") -> Request:
    run = Run(id=1, namespace=namespace, ids=np.array(prompt, np.int32).tobytes(), prompt_len=len(prompt),
              sampling=Sampling())  # fmt: skip
    return Request(run, len(prompt) + 10, frozenset())


def keeping(room: int = 1 << 20) -> RetainedContexts:
    """For requests that come back."""
    found = RetainedContexts(room)
    found.continuation_rate = 0.5
    return found


def test_who_goes_on_from_what(clock):
    found, leases = keeping(), [Lease(5), Lease(30), Lease(30), Lease(30)]
    prompts = [1] * 5, [1] * 29 + [2], [1] * 30, [1] * 29 + [2]
    for lease, prompt, namespace in zip(leases, prompts, "abaa", strict=True):
        found.keep(ended(prompt, namespace), lease)
    assert found.tokens() == 61 and found.by_tenant == {"a": 31, "b": 30}, "the first 29 once"
    for prompt in ([1] * 4, [2] * 28, [3] * 40):  # too short; something else
        found.arrived(ended(prompt))
    assert found.continuation_rate == 0.5
    turn = ended([1] * 29 + [2, 3])
    found.arrived(turn)
    assert found.continuation_rate == pytest.approx(0.5 + 0.5 / 32)
    found.admitted(ended([1] * 29 + [2, 3]))
    assert not any(lease.released for lease in leases)
    found.admitted(turn)
    assert [lease.released for lease in leases] == [False, False, False, True], "the longest, of the same namespace"
    assert found.leases() == leases[:3]
    found.release_until(lambda: leases[1].released, found.leases(frozenset("a")))
    assert found.leases() == [leases[0], leases[2]] and found.by_tenant.keys() == {"a"}
    assert found.leases(frozenset("a")) == []
    assert found.release_oldest() and leases[0].released
    assert found.release_oldest() and leases[2].released and not found.release_oldest()
    assert found.tokens() == 0


def test_no_more_is_let_go_than_is_needed(clock):
    found, leases = keeping(), [Lease() for _ in range(3)]
    for number, lease in enumerate(leases):
        found.keep(ended([number] * 5), lease)
    found.release_until(lambda: True, leases)
    assert not leases[0].released
    found.release_until(lambda: leases[1].released, leases)
    assert [lease.released for lease in leases] == [True, True, False]


class Held:
    """What admission asks of a cache with 100 pages, of which 10 are free; nothing that is released helps."""

    page_size, total_pages, leased_pages, pins = 1, 100, 90, ()

    def __init__(self, **kept: int) -> None:
        self.spared: list[frozenset[str]] = []
        self.retained = self.prefixes = self
        self.by_tenant = kept

    def tokens(self) -> int:
        return sum(self.by_tenant.values())

    def can_allocate(self, pages: int) -> bool:
        return pages <= 10

    def leases(self, spared) -> list[Lease]:
        self.spared.append(spared)
        return []

    def held_only_by(self, leases) -> int:
        return 0


def test_what_was_in_vain_is_tried_again_when_somebody_has_left_or_all_may_go():
    old, cache, running = set(), Held(a=50), Running()
    request = SimpleNamespace(id=1, tenant="a")
    admission = Admission(
        cache, running, SimpleNamespace(has_waited=lambda request: request.id in old), None, NoBranching()
    )
    for _ in range(3):
        assert not admission._has_room(request, 60)
    assert cache.spared == [{"a"}]
    running.departures += 1
    assert not admission._has_room(request, 60) and cache.spared == [{"a"}] * 2
    cache.pins = ("one",)
    assert not admission._has_room(request, 60) and not admission._has_room(request, 59)
    assert cache.spared == [{"a"}] * 4
    old.add(1)
    assert not admission._has_room(request, 60) and cache.spared == [*[{"a"}] * 4, frozenset()]
    assert admission._has_room(request, 10) and not admission._has_room(request, 61) and len(cache.spared) == 5


@pytest.mark.parametrize(
    ("kept", "runs", "spared"),
    [
        ({"a": 60}, {}, ""),  # little runs: all of it goes
        ({"a": 20}, {"c": 1}, "a"),
        ({"b": 30}, {"c": 1}, ""),  # twice what this one would have: 0 and 15
        ({"b": 29}, {"c": 1}, "b"),
        ({"b": 29}, {"c": 3, "b": 1}, ""),
        ({"a": 10, "b": 40}, {"c": 1}, "ab"),  # 10 and 15
        ({"b": 39}, {"a": 1, "c": 9}, "b"),  # a tenth of the 51 that run, and 15
        ({"b": 39}, {"a": 1, "c": 19}, ""),
        ({"b": 20, "d": 30}, {"c": 1}, "b"),
    ],
)
def test_of_whom_nothing_goes(kept, runs, spared):
    """For a request of tenant a that needs 15 pages."""
    cache, running = Held(**kept), Running()
    requests = [SimpleNamespace(tenant=tenant, total=100) for tenant, n in runs.items() for _ in range(n)]
    running.prefilling, running.decoding, running.drafting, running.ending = (requests[i::4] for i in range(4))
    cache.leased_pages = 90 if runs else 60 + 24
    waiting = SimpleNamespace(has_waited=lambda request: False)
    assert not Admission(cache, running, waiting, None, NoBranching())._has_room(SimpleNamespace(id=1, tenant="a"), 15)
    assert cache.spared == [frozenset(spared)]


def test_nothing_is_let_go_in_vain(clock):
    """What is kept is what those that run lease, too: the stranger would not have room without it, and finds that out
    once for each that leaves."""
    bench = Bench(pages=100, chunk=200, rows=8, max_len=128)
    bench.cache.retained.continuation_rate = 0.9
    bench.add(0, [8] * 60, 40, namespace="a")
    bench.add(1, [*[8] * 60, 7], 2, namespace="a")
    bench.step()
    bench.add(2, [9] * 50, 2, namespace="b")
    while 1 not in bench.finish:
        bench.step()
    kept, tried = bench.cache.retained, []
    leased, held = kept.tokens(), bench.cache.prefixes.held_only_by
    bench.cache.prefixes.held_only_by = lambda leases: tried.append(held(leases)) or tried[-1]
    assert leased > 60
    for _ in range(5):
        bench.step()
        assert kept.tokens() == leased and not bench.tokens[2]
        bench.cache.check()
    assert tried == [leased - 60]
    bench.drain()
    assert sorted(bench.finish) == [0, 1, 2] and bench.cache.leased_pages == 0


def test_what_is_evicted_first_is_the_same_after_a_look_in_vain(clock):
    """A context that is kept was used before another one that nobody keeps, and goes before it."""
    bench = Bench(pages=100, chunk=200, rows=8, max_len=128)
    bench.cache.retained.continuation_rate = 0.9
    bench.add(0, [8] * 60, 40, namespace="a")
    bench.add(1, [*[8] * 60, 7, 6, 5], 2, namespace="a")
    bench.step()
    bench.add(2, [9] * 50, 2, namespace="b")
    while 1 not in bench.finish:
        bench.step()
    bench.add(3, [4] * 5, 0, namespace="b", score_from=2)
    while 3 not in bench.finish:
        bench.step()
    tree, kept = bench.cache.prefixes.tree, bench.cache.retained
    assert bench.scheduler.num_waiting == 1 and kept.tokens() > 60
    bench.scheduler._admission._in_vain.clear()
    bench.step()
    assert bench.scheduler.num_waiting == 1 and bench.scheduler._admission._in_vain
    kept.clear()
    freed = tree.evict(2)
    later = tree.match("b", np.array([4] * 5, np.int32)).length
    earlier = tree.match("a", np.array([*[8] * 60, 7, 6, 5, *bench.tokens[1]], np.int32)).length
    assert len(freed) == 8 and later == 5 and earlier < 64


def test_who_came_back_and_waits_is_no_loss(clock):
    found = keeping()
    found.keep(ended([1] * 5), lease := Lease())
    found.arrived(ended([1] * 6))
    before = found.continuation_rate
    clock.now += SHORT
    found.expire()
    assert lease.released and found.continuation_rate == before


def choices(found: RetainedContexts, *answers: list[int]) -> list[Lease]:
    """Several answers to one prompt have ended."""
    leases = []
    for answer in answers:
        request = ended([1] * 5)
        request.extend(answer)
        found.keep(request, Lease(5 + len(answer)))
        leases.append(found._ended[-1].lease)
    return leases


def test_of_several_answers_that_one_is_gone_on_from_that_the_prompt_has(clock):
    """The others stay for those that go on from them."""
    found = keeping()
    leases = choices(found, [2, 3], [2, 4, 4], [2, 5])
    found.arrived(one := ended([1, 1, 1, 1, 1, 2, 4, 4, 9]))
    found.arrived(other := ended([1, 1, 1, 1, 1, 2, 5, 9]))
    found.admitted(one)
    assert [lease.released for lease in leases] == [False, True, False]
    found.admitted(other)
    assert [lease.released for lease in leases] == [False, True, True]


def test_of_several_answers_to_one_prompt_it_is_enough_that_one_is_gone_on_from(clock):
    """What is kept of them is the prompt, most of all; where none is, that is one loss."""
    found = keeping()
    choices(found, *([n, n] for n in range(20, 28)))
    before = found.continuation_rate
    found.arrived(turn := ended([1] * 5 + [23, 23, 9]))
    assert found.continuation_rate == pytest.approx(up := before + (1 - before) / 32)
    found.admitted(turn)
    clock.now += SHORT
    found.expire()
    assert not found.leases() and found.continuation_rate == up
    choices(found, *([n, n] for n in range(20, 28)))
    clock.now += SHORT
    found.expire()
    assert not found.leases() and found.continuation_rate == pytest.approx(up * 31 / 32)


@pytest.mark.parametrize(("prompt", "namespace"), [([1] * 5, "b"), ([2] * 5, "a")])
def test_answers_to_other_prompts_count_for_themselves(clock, prompt, namespace):
    """Of the same length in another namespace, or of other tokens."""
    found = keeping()
    choices(found, [7])
    found.keep(ended(prompt, namespace), Lease())
    before = found.continuation_rate
    found.arrived(ended([1] * 6))
    came = before + (1 - before) / 32
    assert found.continuation_rate == pytest.approx(came)
    clock.now += SHORT
    found.expire()
    assert found.continuation_rate == pytest.approx(came * 31 / 32), "nobody went on from the other"


def test_branches_that_go_on_from_one_context_all_find_it(clock):
    """Nor do they claim what somebody else's next turn goes on from."""
    found = keeping()
    found.keep(ended([1] * 5), system := Lease())
    found.keep(ended([1] * 9), lease := Lease(9))
    before = found.continuation_rate
    turns = [ended([*[1] * 9, n]) for n in range(2, 5)]
    for turn in turns:
        found.arrived(turn)
    assert found.continuation_rate == pytest.approx(before + (1 - before) / 32), "one has come back"
    found.admitted(turns[0])
    found.left(turns[2])
    assert not lease.released
    found.admitted(turns[1])
    assert lease.released and not system.released


def test_another_may_come_in_place_of_one_that_left(clock):
    found = keeping()
    found.keep(ended([1] * 5), lease := Lease())
    for _ in range(2):
        found.arrived(turn := ended([1] * 6))
        found.left(turn)
    assert found.continuation_rate == 0.5 + 0.5 / 32, "once"
    found.arrived(turn := ended([1] * 6))
    found.admitted(turn)
    assert lease.released and not found


def test_where_few_come_back_nothing_is_retained(clock):
    found = keeping()
    for number in range(100):
        found.keep(ended([number] * 5), lease := Lease())
        assert lease.released == (found.continuation_rate < MIN_CONTINUATION_RATE)
        clock.now += SHORT + 1
        found.expire()
        assert lease.released and not found.leases()
    assert found.continuation_rate < MIN_CONTINUATION_RATE
    for number in range(100):
        found.keep(ended([number] * 5), lease := Lease())
        found.arrived(ended([number] * 6))
    assert found.continuation_rate > MIN_CONTINUATION_RATE and not lease.released, (
        "but what would have been is remembered"
    )
    found.clear()
    assert lease.released


def turns(found: RetainedContexts, clock: Clock, delays: list[float]) -> None:
    """Contexts that are continued after so many seconds, one after the other."""
    for number, delay in enumerate(delays):
        found.keep(ended([number] * 5), Lease())
        while delay > 0:
            clock.now += min(delay, 1.0)
            delay -= 1.0
            found.expire()
        found.arrived(turn := ended([number] * 6))
        found.admitted(turn)


@pytest.mark.parametrize(
    ("delays", "seconds"),
    [
        ([0.1] * 100, 5),
        ([15.0] * 100, 20),
        ([0.1, 30.0] * 50, 40),
        ([0.1] * 80 + [30.0] * 2, 5),  # a few that take long are not waited for
        ([70.0] * 100, 80),
        ([70.0] * 100 + [7.0] * 100, 10),
        ([200.0] * 50, 5),  # nobody remembers that
    ],
)
def test_they_are_retained_until_most_next_turns_come(clock, delays, seconds):
    found = keeping()
    turns(found, clock, delays)
    assert found.seconds == seconds
    found.continuation_rate = 0.5
    found.keep(ended([1] * 9), lease := Lease())
    clock.now += seconds - 0.1
    found.expire()
    assert not lease.released
    clock.now += 0.2
    found.expire()
    assert lease.released


def test_where_next_turns_come_late_they_are_retained_all_the_same(clock):
    """At first none comes in time, so that nothing seems to come back."""
    found = RetainedContexts(1000)
    turns(found, clock, [15.0] * 100)
    assert found.continuation_rate > MIN_CONTINUATION_RATE


def test_what_is_not_retained_is_remembered_for_a_while(clock):
    found = keeping()
    found.keep(ended([1] * 5), Lease())
    clock.now += LONG - 0.1
    found.expire()
    assert found and not found.leases()
    clock.now += 0.2
    found.expire()
    assert not found


def remembered(found: RetainedContexts, clock: Clock, *prompts: list[int]) -> None:
    """Contexts that are not retained any more."""
    for prompt in prompts:
        found.keep(ended(prompt), Lease())
    clock.now += found.seconds + 0.1
    found.expire()
    assert found and not found.leases()


def test_one_that_is_only_remembered_is_dropped_by_who_goes_on_from_it(clock):
    found = keeping()
    found.keep(ended([1] * 5), Lease())
    found.arrived(turn := ended([1] * 6))
    remembered(found, clock)  # the next turn still waits
    found.admitted(turn)
    assert not found


def test_of_one_that_is_only_remembered_another_turn_may_come(clock):
    found = keeping()
    found.keep(ended([1] * 5), Lease())
    found.arrived(gone := ended([1] * 6))
    remembered(found, clock)
    found.left(gone)
    found.arrived(turn := ended([1] * 6))
    found.admitted(turn)
    assert not found, "nobody else is expected"


def test_of_several_next_turns_the_first_says_how_long_it_took(clock):
    found = keeping()
    found.keep(ended([1] * 5), Lease())
    for _ in range(50):
        clock.now += SHORT + 1
        found.arrived(ended([1] * 6))
    assert found.seconds == SHORT


def test_those_that_are_not_retained_are_forgotten_first(clock):
    """All together are no more than so many."""
    found = keeping()
    remembered(found, clock, [1] * 5, [2] * 5)
    leases = [Lease() for _ in range(MAX_CONTEXTS - 1)]
    for number, lease in enumerate(leases):
        found.keep(ended([10 + number] * 5), lease)
    assert not any(lease.released for lease in leases)
    for prompt, knows in (([1] * 6, False), ([2] * 6, True)):
        found.arrived(turn := ended(prompt))
        assert any(turn.number in one.next for one in found._all()) == knows


def test_the_first_that_comes_back_is_enough(clock):
    found = RetainedContexts(100)
    found.keep(ended([1] * 5), lease := Lease())
    assert lease.released
    found.arrived(ended([1] * 6))
    found.keep(ended([2] * 5), lease := Lease())
    assert not lease.released


def test_no_more_than_so_many_are_remembered(clock):
    """Nor so many tokens; that says nothing of who comes back."""
    for found, most in ((keeping(), MAX_CONTEXTS), (keeping(50), 10 * OVERLAP)):
        leases = [Lease() for _ in range(most + 2)]
        for number, lease in enumerate(leases):
            found.keep(ended([number] * 5), lease)
        assert [lease.released for lease in leases] == [True, True, *[False] * most]
        assert found.continuation_rate == 0.5 and found.tokens() == 5 * most


def test_nothing_is_retained_that_is_forgotten(clock):
    """Of another prompt, or of what comes before, it is."""
    bench, _ = crowded()
    leased = bench.cache.retained.tokens()
    assert leased >= len(AGENT)
    bench.scheduler._ending.fail_for_good(bench.scheduler._requests[0], "NaN")
    for path, namespace, keep in ((AGENT, "b", 0), (AGENT[:5], "a", 5), ([*AGENT, 99], "a", len(AGENT))):
        bench.cache.prefixes.forget(namespace, np.array(path, np.int32), keep)
        assert bench.cache.retained.tokens() == leased
    bench.cache.prefixes.forget("a", np.array(AGENT, np.int32), 39)
    assert not bench.cache.retained.tokens() and bench.cache.retained, "it is remembered"
    bench.cache.check()
    bench.drain()


def test_who_is_dropped_leaves_nothing_that_is_retained(clock):
    bench, history = crowded()
    bench.add(3, history, 6, namespace="a")
    bench.plan()
    assert bench.scheduler.num_waiting == 1 and not bench.cache.retained
    bench.scheduler.abort(3)
    assert not bench.cache.retained


def test_when_nobody_waits_any_more_all_is_let_go(clock):
    bench, _ = crowded()
    bench.scheduler.abort(2)
    bench.step()
    assert not bench.cache.retained and bench.scheduler.num_running == 1
    bench.drain()


def test_a_next_turn_that_is_dropped_may_come_again(clock):
    bench, history = crowded()
    for id in (3, 4):
        turn = bench.add(id, history, 2, namespace="a")
        assert bench.cache.retained._ended[-1].next == {turn.number}
        bench.scheduler.abort(id)


def check_held(bench: Bench) -> None:
    """What only those that have ended hold, of each tenant: against all prefixes of pages that they lease, one by
    one."""
    page = bench.cache.page_size

    def prefixes(namespace: str, ids: bytes, length: int) -> set[tuple[str, bytes]]:
        return {(namespace, ids[: 4 * n]) for n in range(page, length + 1, page)}

    kept = [e for e in bench.cache.retained._ended if e.lease is not None]
    others = [prefixes(r.namespace, r.tokens.tobytes(), r.lease.length) for r in bench.cache.requests._running.values()]
    for spared in ("", "a", "b"):
        ends = [e for e in kept if e.tenant != spared]
        mine = set().union(*(prefixes(e.namespace, e.ids, e.lease.length) for e in ends))
        held = [prefixes(e.namespace, e.ids, e.lease.length) for e in kept if e.tenant == spared]
        leases = bench.cache.retained.leases(frozenset(spared))
        assert [e.lease for e in ends] == leases
        assert bench.cache.prefixes.held_only_by(leases) == len(mine.difference(*others, *held))


@pytest.mark.parametrize("seed", range(6))
def test_any_load_of_agents_ends(seed, monkeypatch):
    """With few pages and rows, aborted at random, turns that come at once, late, or never; pages add up throughout."""
    monkeypatch.setattr(retention, "time", clock := Clock())
    rng = random.Random(seed)
    bench = Bench(rng.choice([60, 120, 250]), rng.choice([1, 4]), rng.choice([5, 24, 64]), rng.choice([2, 4, 8]))
    agents = [SimpleNamespace(history=[rng.randrange(3, 20)] * rng.randint(1, 20), asked=-1) for _ in range(12)]
    for step in range(400):
        for agent in agents:
            if agent.asked < 0 or (agent.asked in bench.finish and rng.random() < 0.3):
                agent.history += [*bench.tokens.get(agent.asked, []), rng.randrange(3, 900)]
                if len(agent.history) > 45:
                    agent.history = [rng.randrange(3, 20)] * rng.randint(1, 20)
                agent.asked = step * 100 + agents.index(agent)
                bench.add(agent.asked, agent.history, rng.randint(1, 6), namespace=rng.choice("aaab"))
        if rng.random() < 0.05:
            asked = rng.choice(agents).asked
            if bench.scheduler.abort(asked):
                bench.finish[asked] = "aborted"
        clock.now += rng.choice([0.0, 0.1, 2.0, 15.0])
        bench.step()
        if step % 10 == 0:
            check_held(bench)
    bench.drain()
    assert bench.cache.leased_pages == 0 and not bench.cache.retained
