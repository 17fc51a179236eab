"""Workers that come and go, by what they are told and what the index holds of them."""

from __future__ import annotations

import random

import pytest
from sim_workers import ids, register

from radixrt.messages import Abort, Load, Namespace, Resync, StepDone, Stored
from radixrt.router.core.effects import Order
from radixrt.router.core.metrics import Counters
from radixrt.router.core.worker import Sent, Worker
from radixrt.router.core.workers import FORGET_SECONDS, RESYNC_SECONDS, Workers
from radixrt.router.placement.index import Index

HELD = StepDone([], Load(), 0, [Stored(Namespace("default", "m").key, 1, 0, 0, 0, ids(5, 6, 7))])


@pytest.fixture
def index():
    return Index()


@pytest.fixture
def counters():
    return Counters()


@pytest.fixture
def workers(index, counters):
    return Workers(index, counters, timeout=5.0)


def worker(workers: Workers, name: str = "w0"):
    return next(m for m in workers if m.name == name)


def queued(worker: Worker, now: float) -> int:
    return worker.candidate(0, now).queued_tokens


def test_what_a_worker_has_to_do_is_what_it_was_told_less_what_it_has_computed_since():
    one = Worker(0, register("w0"), 0.0)
    one.dispatched(1, Sent(400, 300))
    assert queued(one, 0.5) == 300
    one.update(Load(running=1, queued_tokens=50, launched_tokens=200, prefill_rate=1000.0, newest_run=1), 1.0)
    assert [queued(one, now) for now in (1.0, 1.1, 2.0)] == [250, 150, 0]
    one.update(Load(running=1, queued_tokens=5000, prefill_rate=1000.0, newest_run=1), 1.0)
    assert [queued(one, now) for now in (2.0, 3.0, 60.0)] == [4000, 3000, 3000], "nor does it go on for ever unheard"
    one.update(Load(running=1, queued_tokens=50, launched_tokens=200, prefill_rate=1000.0, newest_run=1), 1.0)
    one.dispatched(2, Sent(70, 70))
    assert [queued(one, now) for now in (1.1, 2.0)] == [220, 70], "nothing is computed of what it has not seen"
    one.update(Load(running=2, newest_run=2), 3.0)
    assert queued(one, 3.0) == 0


def test_runs_that_were_aborted_hide_no_new_ones():
    one = Worker(0, register("w0"), 0.0)
    for run in range(1, 5):
        one.dispatched(run, Sent(10, 10))
    one.update(Load(running=4, newest_run=4), 1.0)
    one.runs.clear()
    one.dispatched(9, Sent(8000, 8000))
    assert queued(one, 1.0) == 8000
    one.update(Load(running=4, newest_run=4), 1.1)
    assert queued(one, 1.1) == 8000, "the worker knows nothing of it yet"


def test_what_its_runs_want():
    one = Worker(0, register("w0"), 0.0)
    one.dispatched(1, Sent(400, 300))
    one.dispatched(2, Sent(1000, 10))
    assert one.candidate(0, 0.0).wanted_tokens == 1400
    one.started(1)
    one.started(9)
    found = one.candidate(0, 0.0)
    assert found.wanted_tokens == 1000 and found.requests == 2
    size = one.info.page_size
    assert found.total_tokens == one.info.total_pages * size > 0
    one.update(Load(total_pages=100, free_pages=20, evictable_pages=30), 1.0)
    assert one.candidate(0, 1.0).wanted_tokens == 50 * size + 1000
    one.ended(1)
    assert one.candidate(0, 1.0).requests == 1


def test_with_another_pid_nothing_is_left_of_the_incarnation_before(workers, index, counters):
    assert workers.register(register("w0", pid=1), 0.0) == ([], [])
    assert workers.mirror(worker(workers), HELD, 0.0) == [] and index.tokens == 3
    worker(workers).dispatched(7, Sent(10, 10))
    assert workers.register(register("w0", pid=2), 1.0) == ([7], [])
    assert index.tokens == 0 and not worker(workers).runs
    assert workers.mirror(worker(workers), HELD, 1.0) == [], "its events begin anew"
    assert len(workers) == 1 and counters.workers_lost == 1


def test_with_the_same_pid_what_it_holds_comes_as_a_resync(workers, index, counters):
    workers.register(register("w0", pid=1), 0.0)
    worker(workers).dispatched(7, Sent(10, 10))
    orphans, orders = workers.register(register("w0", pid=1), 1.0)
    assert orphans == [7] and orders == [Order("w0", Abort([7])), Order("w0", Resync())]
    number = worker(workers).number
    assert index.awaits_resync(number)
    assert workers.mirror(worker(workers), HELD, 1.0) == [] and index.tokens == 0, "not before it comes"
    assert workers.ask_again(1.0 + RESYNC_SECONDS) == []
    assert workers.ask_again(1.1 + RESYNC_SECONDS) == [Order("w0", Resync())] == workers.ask_again(99.0)
    resync = StepDone([], Load(), 9, HELD.events, resync=True)
    assert workers.mirror(worker(workers), resync, 99.0) == [] and index.tokens == 3
    assert workers.ask_again(199.0) == [] and counters.snapshots == 3
    assert counters.workers_lost == 0


def test_those_that_left_or_were_lost_are_counted(workers, counters):
    for name in ("w0", "w1"):
        workers.register(register(name), 0.0)
    workers.remove("w0", may_return=False)
    workers.remove("w1", may_return=True)
    workers.remove("w1", may_return=False)
    assert counters.workers_lost == 2, "each once"


def test_who_serves_keeps_its_name(workers):
    """Be the other one on another machine with the same pid. A lost one does not serve."""
    first, second = (register("w0", pid=1, incarnation=incarnation) for incarnation in (1, 2))
    workers.register(first, 0.0)
    assert (
        workers.is_taken(second) and not workers.is_taken(first) and not workers.is_taken(register("w1", incarnation=2))
    )
    workers.remove("w0", may_return=True)
    assert not workers.is_taken(second)
    workers.register(second, 1.0)
    assert workers.is_taken(first) and not workers.is_taken(second)
    workers.remove("w0", may_return=True)
    workers.revive("w0", 2.0)
    assert workers.is_taken(first)
    workers.remove("w0", may_return=False)
    assert not workers.is_taken(first)


def test_who_speaks_for_a_name(workers):
    workers.register(register("w0", pid=1, incarnation=5), 0.0)
    for _ in range(2):
        found = [
            (pid, incarnation)
            for pid in (0, 1, 2)
            for incarnation in (0, 5, 6)
            if workers.speaks_for("w0", pid, incarnation)
        ]
        assert found == [(0, 0), (0, 5), (1, 0), (1, 5)]
        workers.remove("w0", may_return=True)
    workers.remove("w0", may_return=False)
    assert workers.speaks_for("w0", 2, 6), "nobody else does"


def test_one_that_is_lost_may_come_back_for_a_time(workers):
    workers.register(register("w0"), 0.0)
    workers.register(register("w1", model="other"), 0.0)
    worker(workers).dispatched(7, Sent(10, 10))
    assert workers.silent(2.0) == [] and workers.hear("w1", 4.0) is worker(workers, "w1")
    assert workers.silent(4.4) == [] and workers.silent(6.0) == ["w0"]
    assert workers.remove("w0", may_return=True) == [7] and workers.remove("w0", may_return=True) == []
    assert workers.hear("w0", 6.1) is None and workers.known("w0") and workers.models() == {"m", "other"}
    assert workers.revive("w0", 6.2) == [Order("w0", Abort([7])), Order("w0", Resync())]
    assert workers.revive("w0", 6.3) == [], "it serves"
    assert not worker(workers).runs and workers.hear("w0", 7.0)
    workers.remove("w0", may_return=True)
    workers.silent(7.0 + FORGET_SECONDS)
    assert workers.known("w0")
    workers.silent(7.1 + FORGET_SECONDS)
    assert not workers.known("w0") and workers.revive("w0", 700.0) == [] and workers.models() == {"other"}


def test_one_that_has_left_does_not_come_back(workers):
    workers.register(register("w0"), 0.0)
    workers.remove("w0", may_return=True)
    workers.remove("w0", may_return=False)
    assert not workers.known("w0") and workers.revive("w0", 1.0) == []


def test_while_the_router_was_away_nobody_was_silent(workers):
    workers.register(register("w0"), 0.0)
    assert workers.silent(1.0) == [] and workers.silent(100.0) == []
    assert workers.silent(102.0) == [] and workers.silent(104.0) == [] and workers.silent(105.1) == ["w0"]


@pytest.mark.parametrize("seed", range(4))
def test_who_serves_a_model_is_known_at_every_moment(workers, seed):
    rng = random.Random(seed)
    for now in range(60):
        name = rng.choice(["w0", "w1", "w2"])
        match rng.randrange(4):
            case 0 | 1:
                facts = {"vocab_size": rng.randrange(3), "max_model_len": rng.randrange(8, 12), "total_pages": 10}
                workers.register(register(name, pid=now, model=rng.choice("mn"), **facts), now)
            case 2:
                workers.remove(name, may_return=rng.random() < 0.5)
            case 3:
                workers.revive(name, now)
        for model in ("m", "n", "nobody's"):
            infos = [m.info for m in workers if m.info.model == model]
            found = workers.serving(model)
            assert [m.info for m in found.workers] == infos
            assert found.vocab_size == max((i.vocab_size for i in infos), default=0)
            assert found.token_limit == max((min(i.max_model_len, i.total_pages) for i in infos), default=0)


def test_a_rate_is_known_after_some_prompts_and_counts_less_while_its_worker_is_idle():
    one = Worker(0, register("w0"), 5.0)
    for run, tokens in enumerate((8000, 100, 100, 100, 700, 300)):
        assert not one.candidate(0, 9.0).rate_known, "the longest alone is no measurement"
        one.dispatched(run, Sent(tokens, tokens))
        one.started(run)
        assert one.candidate(0, 9.0).idle_seconds == 0.0
        one.ended(run)
    assert one.candidate(0, 9.0).rate_known and one.candidate(0, 9.0).idle_seconds == 4.0
