"""Workers that come and go, by what they are told and what the index holds of them."""

from __future__ import annotations

import random

import pytest
from sim_workers import ids, register

from radixrt.messages import Abort, Load, Resync, StepDone, Stored
from radixrt.router.effects import Order
from radixrt.router.index import Index
from radixrt.router.member import Member, Sent
from radixrt.router.members import FORGET_SECONDS, RESYNC_SECONDS, Members
from radixrt.router.record import Counters

HELD = StepDone([], Load(), 0, [Stored("default\nm\n", 1, 0, 0, 0, ids(5, 6, 7))])


@pytest.fixture
def index():
    return Index()


@pytest.fixture
def counters():
    return Counters()


@pytest.fixture
def members(index, counters):
    return Members(index, counters, timeout=5.0)


def member(members: Members, name: str = "w0"):
    return next(m for m in members if m.name == name)


def queued(member: Member, now: float) -> int:
    return member.candidate(0, now).queued_tokens


def test_what_a_worker_has_to_do_is_what_it_was_told_less_what_it_has_computed_since():
    one = Member(0, register("w0"), 0.0)
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
    one = Member(0, register("w0"), 0.0)
    for run in range(1, 5):
        one.dispatched(run, Sent(10, 10))
    one.update(Load(running=4, newest_run=4), 1.0)
    one.runs.clear()
    one.dispatched(9, Sent(8000, 8000))
    assert queued(one, 1.0) == 8000
    one.update(Load(running=4, newest_run=4), 1.1)
    assert queued(one, 1.1) == 8000, "the worker knows nothing of it yet"


def test_what_its_runs_want():
    one = Member(0, register("w0"), 0.0)
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


def test_with_another_pid_nothing_is_left_of_the_life_before(members, index, counters):
    assert members.register(register("w0", pid=1), 0.0) == ([], [])
    assert members.mirror(member(members), HELD, 0.0) == [] and index.tokens == 3
    member(members).dispatched(7, Sent(10, 10))
    assert members.register(register("w0", pid=2), 1.0) == ([7], [])
    assert index.tokens == 0 and not member(members).runs
    assert members.mirror(member(members), HELD, 1.0) == [], "its events begin anew"
    assert len(members) == 1 and counters.workers_lost == 1


def test_with_the_same_pid_what_it_holds_comes_as_a_resync(members, index, counters):
    members.register(register("w0", pid=1), 0.0)
    member(members).dispatched(7, Sent(10, 10))
    orphans, orders = members.register(register("w0", pid=1), 1.0)
    assert orphans == [7] and orders == [Order("w0", Abort([7])), Order("w0", Resync())]
    number = member(members).number
    assert index.awaits_resync(number)
    assert members.mirror(member(members), HELD, 1.0) == [] and index.tokens == 0, "not before it comes"
    assert members.ask_again(1.0 + RESYNC_SECONDS) == []
    assert members.ask_again(1.1 + RESYNC_SECONDS) == [Order("w0", Resync())] == members.ask_again(99.0)
    snapshot = StepDone([], Load(), 9, HELD.events, resync=True)
    assert members.mirror(member(members), snapshot, 99.0) == [] and index.tokens == 3
    assert members.ask_again(199.0) == [] and counters.snapshots == 3
    assert counters.workers_lost == 0


def test_those_that_left_or_were_lost_are_counted(members, counters):
    for name in ("w0", "w1"):
        members.register(register(name), 0.0)
    members.remove("w0", may_return=False)
    members.remove("w1", may_return=True)
    members.remove("w1", may_return=False)
    assert counters.workers_lost == 2, "each once"


def test_who_serves_keeps_its_name(members):
    """Be the other one on another machine with the same pid. A lost one does not serve."""
    first, second = (register("w0", pid=1, life=life) for life in (1, 2))
    members.register(first, 0.0)
    assert members.is_taken(second) and not members.is_taken(first) and not members.is_taken(register("w1", life=2))
    members.remove("w0", may_return=True)
    assert not members.is_taken(second)
    members.register(second, 1.0)
    assert members.is_taken(first) and not members.is_taken(second)
    members.remove("w0", may_return=True)
    members.revive("w0", 2.0)
    assert members.is_taken(first)
    members.remove("w0", may_return=False)
    assert not members.is_taken(first)


def test_who_speaks_for_a_name(members):
    members.register(register("w0", pid=1, life=5), 0.0)
    for _ in range(2):
        found = [(pid, life) for pid in (0, 1, 2) for life in (0, 5, 6) if members.speaks_for("w0", pid, life)]
        assert found == [(0, 0), (0, 5), (1, 0), (1, 5)]
        members.remove("w0", may_return=True)
    members.remove("w0", may_return=False)
    assert members.speaks_for("w0", 2, 6), "nobody else does"


def test_one_that_is_lost_may_come_back_for_a_time(members):
    members.register(register("w0"), 0.0)
    members.register(register("w1", model="other"), 0.0)
    member(members).dispatched(7, Sent(10, 10))
    assert members.silent(2.0) == [] and members.hear("w1", 4.0) is member(members, "w1")
    assert members.silent(4.4) == [] and members.silent(6.0) == ["w0"]
    assert members.remove("w0", may_return=True) == [7] and members.remove("w0", may_return=True) == []
    assert members.hear("w0", 6.1) is None and members.known("w0") and members.models() == {"m", "other"}
    assert members.revive("w0", 6.2) == [Order("w0", Abort([7])), Order("w0", Resync())]
    assert members.revive("w0", 6.3) == [], "it serves"
    assert not member(members).runs and members.hear("w0", 7.0)
    members.remove("w0", may_return=True)
    members.silent(7.0 + FORGET_SECONDS)
    assert members.known("w0")
    members.silent(7.1 + FORGET_SECONDS)
    assert not members.known("w0") and members.revive("w0", 700.0) == [] and members.models() == {"other"}


def test_one_that_has_left_does_not_come_back(members):
    members.register(register("w0"), 0.0)
    members.remove("w0", may_return=True)
    members.remove("w0", may_return=False)
    assert not members.known("w0") and members.revive("w0", 1.0) == []


def test_while_the_router_was_away_nobody_was_silent(members):
    members.register(register("w0"), 0.0)
    assert members.silent(1.0) == [] and members.silent(100.0) == []
    assert members.silent(102.0) == [] and members.silent(104.0) == [] and members.silent(105.1) == ["w0"]


@pytest.mark.parametrize("seed", range(4))
def test_who_serves_a_model_is_known_at_every_moment(members, seed):
    rng = random.Random(seed)
    for now in range(60):
        name = rng.choice(["w0", "w1", "w2"])
        match rng.randrange(4):
            case 0 | 1:
                facts = {"vocab_size": rng.randrange(3), "max_model_len": rng.randrange(8, 12), "total_pages": 10}
                members.register(register(name, pid=now, model=rng.choice("mn"), **facts), now)
            case 2:
                members.remove(name, may_return=rng.random() < 0.5)
            case 3:
                members.revive(name, now)
        for model in ("m", "n", "nobody's"):
            infos = [m.info for m in members if m.info.model == model]
            found = members.serving(model)
            assert [m.info for m in found.members] == infos
            assert found.vocab_size == max((i.vocab_size for i in infos), default=0)
            assert found.token_limit == max((min(i.max_model_len, i.total_pages) for i in infos), default=0)


def test_a_rate_is_known_after_some_prompts_and_counts_less_while_its_worker_is_idle():
    one = Member(0, register("w0"), 5.0)
    for run, tokens in enumerate((8000, 100, 100, 100, 700, 300)):
        assert not one.candidate(0, 9.0).rate_known, "the longest alone is no measurement"
        one.dispatched(run, Sent(tokens, tokens))
        one.started(run)
        assert one.candidate(0, 9.0).idle_seconds == 0.0
        one.ended(run)
    assert one.candidate(0, 9.0).rate_known and one.candidate(0, 9.0).idle_seconds == 4.0
