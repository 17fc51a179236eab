"""Who is served when several tenants want more than a worker has."""

from __future__ import annotations

import random

import pytest

from radixrt.messages import Run, Sampling
from radixrt.worker.request import Request
from radixrt.worker.scheduler.queue import (
    ANSWER,
    MAX_SECONDS,
    OTHERS,
    OVERTAKING,
    OVERTAKING_WITHOUT_ROOM,
    REFRESHED,
    VirtualTokenCounter,
    Waiting,
)
from tests.worker.engine import Clock
from tests.worker.test_simulation import Bench, overlaps  # noqa: F401


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr("radixrt.worker.scheduler.queue.time", found := Clock())
    return found


def prompt(number: int, length: int) -> list[int]:
    return [3 + number % 500] + [(number * 7 + i) % 900 + 3 for i in range(length - 1)]


def steps_until(bench: Bench, id: int, most: int = 1000) -> int:
    """Steps until a request has its first token."""
    for step in range(1, most):
        bench.step()
        if bench.tokens[id]:
            return step
    raise AssertionError("it never comes")


@pytest.mark.parametrize("namespace", ["b", "b\nmodel\nsalt"])
def test_a_flood_of_one_tenant_does_not_hold_up_another(namespace):
    """A small request is computed next, where it would be the last; its tenant is the first line of its namespace."""
    bench = Bench(pages=4000, chunk=32, rows=8, max_len=128)
    for id in range(100):
        bench.add(id, prompt(id, 60), 4, namespace="a")
    for _ in range(10):
        bench.step()
    bench.add(1000, prompt(1000, 20), 4, namespace=namespace)
    bench.add(1001, prompt(1001, 20), 4, namespace="a\nmodel\nsalt")
    assert steps_until(bench, 1000) <= 8, "a row must become free, nothing else"
    assert not bench.tokens[1001]
    bench.drain()
    assert not bench.scheduler._counter._requests and not bench.scheduler._counter._tokens


def test_a_long_prompt_does_not_hold_up_another_tenant():
    bench = Bench(pages=4000, chunk=8, rows=4, max_len=900)
    bench.add(1, prompt(1, 800), 2, namespace="a")
    for _ in range(5):
        bench.step()
    bench.add(2, prompt(2, 6), 2, namespace="b")
    assert steps_until(bench, 2) <= 3
    assert not bench.tokens[1]
    bench.drain()


def test_long_prompts_of_two_tenants_take_turns():
    bench = Bench(pages=4000, chunk=8, rows=4, max_len=900)
    first = bench.add(1, prompt(1, 400), 2, namespace="a")
    for _ in range(10):
        bench.step()
    second = bench.add(2, prompt(2, 400), 2, namespace="b")
    begun = first.computed
    for _ in range(40):
        bench.step()
    assert abs((first.computed - begun) - second.computed) <= begun + 2 * 8
    assert second.computed > 100
    bench.drain()


def test_nobody_saves_up():
    """A tenant that comes late is served as the others are from then on; it does not catch up on what they had."""
    bench = Bench(pages=8000, chunk=16, rows=4, max_len=128)
    for id in range(200):
        bench.add(id, prompt(id, 40), 1, namespace="a")
    for _ in range(200):
        bench.step()
    before = len(bench.finish)
    for id in range(1000, 1100):
        bench.add(id, prompt(id, 40), 1, namespace="b")
    for _ in range(120):
        bench.step()
    mine = sum(id >= 1000 for id in bench.finish)
    theirs = len(bench.finish) - before - mine
    assert mine > 10
    assert abs(mine - theirs) <= 4
    bench.drain()


def test_who_was_here_first_is_not_made_to_pay_for_it():
    """A tenant was served for long, and has nothing queued when another floods: what it asks for then comes next."""
    bench = Bench(pages=8000, chunk=32, rows=6, max_len=900)
    bench.add(1, prompt(1, 20), 800, namespace="a")  # it is always here
    for id in range(10, 60):
        bench.add(id, prompt(id, 40), 1, namespace="a")
    while bench.scheduler.num_waiting or bench.scheduler.running.prefilling:
        bench.step()
    for id in range(1000, 1100):
        bench.add(id, prompt(id, 40), 1, namespace="b")
    for _ in range(5):
        bench.step()
    bench.add(2, prompt(2, 40), 1, namespace="a")
    assert steps_until(bench, 2) <= 8
    bench.drain()


def test_what_is_generated_counts():
    """Who makes two answers at a time is served twice as much as who makes one."""
    bench = Bench(pages=8000, chunk=64, rows=4, max_len=400)
    for id, namespace in ((1, "a"), (2, "a"), (3, "b")):
        bench.add(id, prompt(id, 10), 300, namespace=namespace)
    for _ in range(50):
        bench.step()
    counter = bench.scheduler._counter
    assert counter.of("a") == 2 * counter.of("b")
    assert 50 < counter.of("b") < 70
    bench.drain()


def test_one_tenant_alone_is_not_counted_between():
    bench = Bench(pages=400, chunk=16, rows=4, max_len=128)
    for id in range(20):
        bench.add(id, prompt(id, 30), 3, namespace="a\nx" if id % 2 else "a\ny")
    assert not bench.scheduler._counter.several
    bench.drain()


@pytest.mark.parametrize("seed", range(4))
def test_any_load_of_many_tenants_ends(seed):
    """With few pages and rows, aborted at random; nobody is counted afterwards."""
    rng = random.Random(seed)
    bench = Bench(rng.choice([40, 120]), 1, rng.choice([5, 24]), rng.choice([2, 4]), max_len=60)
    for id in range(80):
        bench.add(id, prompt(rng.randrange(9), rng.randint(1, 30)), rng.randint(1, 8), namespace=rng.choice("abcde"))
        if rng.random() < 0.2:
            bench.scheduler.abort(rng.randint(0, id))
        for _ in range(rng.randint(0, 3)):
            bench.step()
    bench.drain()
    assert not bench.scheduler._counter._requests and not bench.scheduler._counter._tokens
    assert not bench.scheduler._waiting.tokens and not len(bench.scheduler._waiting)


def test_the_virtual_token_counter():
    counter = VirtualTokenCounter()
    counter.add_request("a")
    counter.count_prompt("a", 50)
    assert not counter.several
    counter.add_request("b")
    assert counter.several
    counter.raise_to("b", 30)
    counter.raise_to("b", 20)
    counter.count_decoded("b")
    assert (counter.of("a"), counter.of("b"), counter.last) == (50, 31, 50)
    counter.add_request("a")
    counter.remove_request("a")
    assert counter.of("a") == 50
    counter.remove_request("a")
    assert not counter.several
    counter.add_request("a")
    assert counter.of("a") == 0


def test_who_fails_is_not_counted_any_more():
    """While it runs, and while it waits."""
    bench = Bench(pages=400, chunk=16, rows=2, max_len=128)
    for id, namespace in enumerate("abc"):
        bench.add(id, prompt(id, 30), 3, namespace=namespace)
    scheduler = bench.scheduler
    scheduler.fail(scheduler.plan(), "out of memory")
    assert len(scheduler._counter._requests) == scheduler.num_running + scheduler.num_waiting
    bench.drain()
    assert not scheduler._counter._requests


def test_what_was_forced_is_not_made_to_wait():
    """Tokens that a grammar forced are few, and come before those of tenants who were served less."""
    bench = Bench(pages=4000, chunk=16, rows=4, max_len=400)
    bench.overlaps = bench.runner.overlaps = False
    forced = bench.add(1, prompt(1, 30), 60, namespace="a")
    bench.add(2, prompt(2, 200), 1, namespace="b")
    while not bench.scheduler.running.decoding:
        bench.step()
    forced.extend([5, 6, 7])
    bench.scheduler.running.remove(forced)
    bench.scheduler.running.prefilling.insert(0, forced)
    bench.scheduler._counter.raise_to("a", 10_000)
    bench.add(3, prompt(3, 40), 1, namespace="c")
    plan = bench.scheduler.plan()
    assert [r.id for r in plan.requests][0] == 1


class Hits:
    """A cache that holds what it is told to, of requests by id."""

    def __init__(self) -> None:
        self.of: dict[int, int] = {}
        self.tree = self
        self.version = 0
        self.requests = self.prefixes = self

    def hit(self, request: Request) -> int:
        return self.of.get(request.id, 0)


def asked(id: int, length: int, arrival: int = 0, namespace: str = "a", priority: int = 0) -> Request:
    ids = bytes(4 * length)
    run = Run(id=id, namespace=namespace, ids=ids, prompt_len=length, sampling=Sampling(), priority=priority)
    request = Request(run, length + 9, frozenset())
    request.age = arrival, id, id
    return request


def queue_of(cache: Hits, *requests: Request) -> Waiting:
    counter = VirtualTokenCounter()
    waiting = Waiting(cache, counter)
    for request in requests:
        counter.add_request(request.tenant)
        waiting.add(request)
    return waiting


@pytest.mark.parametrize("priorities", [[0], [-1, 0, 0, 5]], ids=["equal", "priorities"])
@pytest.mark.parametrize("seed", range(5))
def test_the_order_is_that_of_its_definition(seed, priorities):
    """Against one that looks at all of them, of the lowest priority value: the oldest if it was overtaken by so many
    times what it needs, else who misses the fewest tokens; what the cache holds changes, requests gain tokens, leave,
    and come back."""
    rng = random.Random(seed)
    cache, here, clock, overtaken = Hits(), {}, 0, {}
    first = lambda: min(here.values(), key=lambda r: (r.priority, r.age))  # noqa: E731
    waiting = queue_of(cache)
    waiting._counter.add_request("a")
    for id in range(300):
        clock += rng.randint(0, 3)
        cache.of[id] = rng.choice([0, 0, 5, 9, 15])
        here[id] = asked(id, rng.choice([10, 16, 30]), clock, priority=rng.choice(priorities))
        cache.of[id] = min(cache.of[id], here[id].total - 1)
        waiting.add(here[id])
        overtaken.setdefault(first().id, 0)
        for other in rng.sample(sorted(here), min(len(here), 2)):
            if rng.random() < 0.3:
                waiting.remove(here[other])
                overtaken.pop(other, None)
                request = here.pop(other)
                if here:
                    overtaken.setdefault(first().id, 0)
                if rng.random() < 0.5:
                    waiting.add(request)
                    here[other] = request
                    overtaken.setdefault(first().id, 0)
            elif rng.random() < 0.3:
                here[other].extend([1])
                waiting.tokens += 1
        cache.version += 1
        for other in rng.sample(sorted(here), min(len(here), 3)):
            cache.of[other] = rng.randrange(here[other].total)
        for request in here.values():  # in the end all are looked up; here, at once
            waiting._look_up(waiting._queues["a"], request)
        while here and rng.random() < 0.6:
            oldest = first()
            needs = waiting._queues["a"]._needs
            most = min(needs, key=lambda id: (here[id].priority, needs[id], here[id].age))
            due = overtaken[oldest.id] >= OVERTAKING * (oldest.total - oldest.hit + ANSWER)
            expected = [oldest, here[most]] if due and oldest.id != most else [oldest if due else here[most]]
            assert list(waiting.candidates()) == expected
            taken = rng.choice(expected)
            for id in overtaken if taken is not oldest else ():
                overtaken[id] += taken.total - taken.hit + ANSWER
            overtaken.pop(taken.id, None)
            waiting.take(taken)
            del here[taken.id]
            if here:
                overtaken.setdefault(first().id, 0)
        assert len(waiting) == len(here) and waiting.tokens == sum(r.total - r.hit for r in here.values())


def test_what_is_missing_counts_by_powers_of_two():
    """And not what a prompt has in all."""
    missing = [1, 2, 3, 4, 7, 64, 127, 128]
    cache = Hits()
    requests = [asked(id, tokens + 50, 100 - id) for id, tokens in enumerate(missing)]
    cache.of = dict.fromkeys(range(len(missing)), 50)
    waiting = queue_of(cache, *requests)
    assert [waiting._queues["a"]._needs[id] for id in range(len(missing))] == [1, 2, 2, 3, 3, 7, 7, 8]
    order = []
    while waiting:
        order.append(waiting._queues["a"].least_missing.id)
        waiting.remove(requests[order[-1]])
    assert order == [0, 2, 1, 4, 3, 6, 5, 7], "of likes the older"


def test_those_of_other_tenants_are_tried_too():
    """In turn, of each the one that misses least; how long a tenant has waited counts, whoever was served instead."""
    cache = Hits()
    cache.of = {3: 9, 5: 40}
    asks = [(0, 10, "a"), (1, 10, "b"), (2, 40, "c"), (3, 10, "c"), (4, 40, "d"), (5, 50, "d")]
    requests = [asked(id, length, id, tenant) for id, length, tenant in asks]
    waiting = queue_of(cache, *requests)
    for tenant, served in (("a", 1), ("b", 50), ("c", 40), ("d", 30)):
        waiting._counter.count_decoded(tenant, served)
    waiting._queues["c"]._overtaking_tokens = 10**6
    assert [r.id for r in waiting.candidates()] == [0, 5, 3, 1]
    for _ in range(OVERTAKING_WITHOUT_ROOM + 1):  # 65 of the 74 tokens that it needs with an answer, each
        waiting.take(requests[3], [requests[0], requests[5]])
        waiting.add(requests[3])
        assert not waiting.has_waited(requests[0])
    before = waiting._queues["d"]._overtaking_tokens
    waiting.take(requests[5], [requests[0], requests[4]])
    assert waiting._queues["d"]._overtaking_tokens == before + 10 + ANSWER, "once"
    assert waiting.has_waited(requests[0]) and not waiting.has_waited(requests[1])


def test_of_many_tenants_not_all_are_tried():
    requests = [asked(id, 10, id, str(id)) for id in range(OTHERS + 9)]
    assert [r.id for r in queue_of(Hits(), *requests).candidates()] == [*range(OTHERS + 1)]


def test_what_is_not_cached_any_more_is_not_first():
    """It is looked up before it is taken; so are those that come first then."""
    cache = Hits()
    cache.of = {1: 9, 2: 8, 3: 7}
    waiting = queue_of(cache, *(asked(id, 10, id) for id in range(4)))
    assert [r.id for r in waiting.candidates()] == [1]
    cache.of, cache.version = {3: 7}, 1
    assert [r.id for r in waiting.candidates()] == [3]


def test_only_the_oldest_has_waited():
    waiting = queue_of(Hits(), *(requests := [asked(id, 10, id) for id in range(3)]))
    assert not any(map(waiting.has_waited, requests))
    waiting._queues["a"]._overtaking_tokens = 10**6
    assert [waiting.has_waited(r) for r in requests] == [True, False, False]


def test_an_older_one_that_comes_back_does_not_begin_anew_for_who_was_overtaken():
    """It was sent back to wait for want of pages: the next behind it has waited for as long as it has."""
    older, oldest, other = (asked(id, 10, id) for id in range(3))
    cache = Hits()
    cache.of = {0: 9, 2: 9}
    waiting = queue_of(cache, oldest, other)
    for _ in range(OVERTAKING):
        assert [r.id for r in waiting.candidates()] == [2]
        waiting.add(older)
        waiting.take(other)
        waiting.take(older)
        waiting.add(other)
    assert [r.id for r in waiting.candidates()] == [2], "65 of the 74 that it needs, each"
    waiting.add(older)
    waiting.take(other)
    assert [r.id for r in waiting.candidates()] == [0], "which was overtaken once"
    waiting.take(older)
    waiting.add(other)
    assert [r.id for r in waiting.candidates()] == [1, 2]
    waiting.take(oldest)
    assert [r.id for r in waiting.candidates()] == [2] and not waiting.has_waited(other)


def test_the_oldest_is_overtaken_once_and_for_so_long_at_most(clock):
    """However many tokens it needs: its turn comes, and what is kept goes for it."""
    cache = Hits()
    cache.of = {2: 9_999}
    waiting = queue_of(cache, *(requests := [asked(id, 10_000, id) for id in range(3)]))
    clock.now = MAX_SECONDS - 1
    assert [r.id for r in waiting.candidates()] == [2]
    waiting._queues["a"]._overtaking_tokens = 9_000 + ANSWER
    clock.now += 1
    assert [r.id for r in waiting.candidates()] == [2], "not by as much as it needs"
    waiting._queues["a"]._overtaking_tokens += 1_000
    clock.now -= 1
    assert [r.id for r in waiting.candidates()] == [2]
    clock.now += 1
    assert [r.id for r in waiting.candidates()] == [0, 2]
    assert [waiting.has_waited(r) for r in requests] == [True, False, False]
    waiting.take(requests[0])
    assert [r.id for r in waiting.candidates()] == [2], "from when it is the oldest"
    waiting._queues["a"]._overtaking_tokens += 10_000 + ANSWER
    assert [r.id for r in waiting.candidates()] == [2]
    clock.now += MAX_SECONDS
    assert [r.id for r in waiting.candidates()] == [1, 2]


def test_few_are_looked_up_in_a_step_however_many_wait():
    cache = Hits()
    waiting = queue_of(cache, *(asked(id, 10, id) for id in range(500)))
    looked = []
    cache.hit = lambda request: looked.append(request.id) or 0
    for step in range(1, 100):
        cache.version, before = step, len(looked)
        waiting.refresh(step)
        list(waiting.candidates())
        assert len(looked) - before <= 3 * REFRESHED
    assert len(set(looked)) == 500, "all of them in turn"


def test_an_oldest_that_needs_many_pages_is_not_overtaken_for_ever():
    """Small hits would fit in what becomes free, all the time."""
    bench = Bench(pages=100, chunk=50, rows=8, max_len=128)
    bench.add(0, [7] * 10, 1)
    bench.drain()
    rng, last = random.Random(0), 0
    for step in range(600):
        if len(bench.tokens) - len(bench.finish) < 10:
            last += 1
            bench.add(last, [*[7] * 10, last], rng.randint(5, 20))
        if step == 20:
            bench.add(10_000, [9] * 80, 1)
        bench.step()
        if 10_000 in bench.finish:
            break
    assert 10_000 in bench.finish
    bench.drain()


def test_lower_priority_values_come_first_in_a_tenants_queue_however_old_and_short_the_others_are():
    """Those of others are not even tried for the room that the first cannot have yet."""
    waiting = queue_of(Hits(), asked(1, 10, 0, priority=1), asked(2, 10, 1), asked(3, 900, 9, priority=-1))
    order = []
    while waiting:
        (request,) = waiting.candidates()
        order.append(request.id)
        waiting.take(request)
    assert order == [3, 2, 1]


def test_priorities_get_no_tenant_ahead_of_another():
    """Two tenants with equal work share what is served equally, although all of one's requests are urgent and the
    other's are not; and the other's first comes next after one of the former's, as without priorities."""
    bench = Bench(pages=4000, chunk=32, rows=4, max_len=128)
    for id in range(100):
        bench.add(id, prompt(id, 60), 1, namespace="a", priority=-100)
    for id in range(100, 200):
        bench.add(id, prompt(id, 60), 1, namespace="b", priority=100)
    for _ in range(100):
        bench.step()
    served = [sum(low <= id < low + 100 for id in bench.finish) for low in (0, 100)]
    assert min(served) > 10 and abs(served[0] - served[1]) <= 2
    bench.drain()
