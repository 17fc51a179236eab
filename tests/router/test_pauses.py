"""Pauses in the core: who is to keep what, and until when."""

from __future__ import annotations

import itertools

import pytest
from sim_workers import ids, register

from radixrt.config import RouterConfig
from radixrt.messages import (
    Abort,
    Delta,
    Generate,
    Load,
    Namespace,
    Output,
    Pin,
    Run,
    Sampling,
    StepDone,
    Stored,
    TokenPrompt,
    Unpin,
)
from radixrt.report import Report, to_html, to_text
from radixrt.router.core import tool_waits
from radixrt.router.core.core import RouterCore
from radixrt.router.core.effects import Order
from radixrt.router.programs.state_store import Key
from radixrt.router.server.streams import _Choice, _whole
from radixrt.tokens import OutputProcessor

NS = Namespace("n")
STATE = Key("default", "s" * 16, 1)
SAID = ids(*range(1, 9))


@pytest.fixture
def core() -> RouterCore:
    """Two workers, of which w1 holds all of what was said and w0 its first half."""
    core = RouterCore(RouterConfig(pause_seconds=60.0), Report(1000))
    for name, held in (("w0", SAID[:16]), ("w1", SAID)):
        core.register(register(name), 0.0)
        core.step(name, StepDone([], Load(), 0, [Stored(NS.key, 1, 0, 0, 0, held)]), 0.0)
    return core


@pytest.fixture(autouse=True)
def numbered(monkeypatch):
    """Pauses are called 1, 2, 3."""
    monkeypatch.setattr(tool_waits, "fresh_numbers", lambda: itertools.count(1))


def waits(core: RouterCore) -> dict:
    return core._recorder._report.to_json()["pauses"]


@pytest.mark.parametrize("asked, kept", [(None, 60.0), (5.0, 5.0), (500.0, 60.0)])
def test_the_worker_that_holds_most_keeps_it(core, asked, kept):
    (order,) = core.pause(STATE, NS, SAID, asked, 1.0)
    assert order == Order("w1", Pin(1, NS.key, SAID, kept)) and len(core.pauses) == 1
    assert core.pause(STATE._replace(number=2), Namespace("other"), SAID, None, 1.0) == [], "nobody holds it"
    assert core.resume(STATE, 3.0) == [Order("w1", Unpin(1))] and core.resume(STATE, 3.0) == []
    assert waits(core)["now"] == 1 and waits(core)["seconds"] == 2.0


def submit(core: RouterCore) -> Run:
    message = Generate(id=1, prompt=TokenPrompt(SAID), sampling=Sampling(max_tokens=2))
    (order,) = core.submit(b"c", message, 2.0, STATE, resumes=True)
    return order


def test_it_is_kept_until_the_request_that_goes_on_has_begun(core):
    core.pause(STATE, NS, SAID, None, 1.0)
    order = submit(core)
    assert len(core.pauses) == 0
    effects = core.step(order.name, StepDone([Output(order.message.id, [9], None, 6)], Load()), 2.1)
    assert Order("w1", Unpin(1)) in effects
    effects = core.step(order.name, StepDone([Output(order.message.id, [9], "length", 6)], Load()), 2.2)
    assert not any(isinstance(effect, Order) for effect in effects)
    assert waits(core) == {"now": 0, "ended": 1, "dropped": 0, "seconds": 1.0, "tokens": 7, "kept_tokens": 6}
    text = to_text(core._recorder._report.to_json())
    assert "tools: 0 sessions wait, 1 waited 1.0 s; 6 of 7 tokens were cached when they went on (85.7%)" in text


def test_a_request_that_is_cancelled_lets_go(core):
    core.pause(STATE, NS, SAID, None, 1.0)
    order = submit(core)
    effects = core.cancel(b"c", 1)
    assert effects == [Order(order.name, Abort([order.message.id])), Order("w1", Unpin(1))]


def test_a_scope_that_has_ended_and_one_that_is_never_heard_of_again(core):
    for number in (1, 1, 2):
        core.pause(STATE._replace(number=number), NS, SAID, None, 1.0)
    core.pause(STATE._replace(scope="t" * 16), NS, SAID, None, 1.0)
    assert len(core.pauses.forget("default", STATE.scope)) == 3 and len(core.pauses) == 1
    assert core.pauses.expire(1.0 + tool_waits.LONGEST_SECONDS) == []
    assert core.pauses.expire(2.0 + tool_waits.LONGEST_SECONDS) == [Order("w1", Unpin(4))] and len(core.pauses) == 0
    found = waits(core)
    assert (found["now"], found["ended"], found["dropped"], found["seconds"]) == (0, 0, 4, 0.0), "nobody went on"
    for words in to_text(core._recorder._report.to_json()), to_html(core._recorder._report.to_json()):
        assert "4 did not go on" in words


def test_each_of_a_state_ends_when_its_own_time_has_passed(core):
    """Others that pause there do not keep it."""
    for now in (1.0, 1000.0):
        core.pause(STATE, NS, SAID, None, now)
    assert core.pauses.expire(2.0 + tool_waits.LONGEST_SECONDS) == [Order("w1", Unpin(1))] and len(core.pauses) == 1
    assert core.pauses.expire(1001.0 + tool_waits.LONGEST_SECONDS) == [Order("w1", Unpin(2))] and len(core.pauses) == 0


def test_there_are_only_so_many(core, monkeypatch):
    monkeypatch.setattr(tool_waits, "MAX_PAUSES", 3)
    for number in (1, 1, 2):
        core.pause(STATE._replace(number=number), NS, SAID, None, 1.0)
    effects = core.pause(STATE._replace(number=3), NS, SAID, None, 2.0)
    assert effects == [Order("w1", Unpin(2)), Order("w1", Pin(4, NS.key, SAID, 60.0))] and len(core.pauses) == 3
    assert waits(core)["now"] == 3 and waits(core)["dropped"] == 1


def test_who_has_most_pauses_gives(core, monkeypatch):
    monkeypatch.setattr(tool_waits, "MAX_PAUSES", 8)
    other = Key("other", STATE.scope, 1)
    core.pause(other, Namespace("o"), SAID, None, 1.0)
    for number in range(20):
        core.pause(STATE._replace(number=number), NS, SAID, None, 2.0)
        assert len(core.pauses) == min(number + 2, 8) and core.pauses.waiting(other) == 1
        core.pauses._shares.check()
    for number in range(20):
        core.pause(other._replace(number=number), Namespace("o"), SAID, None, 3.0)
        assert len(core.pauses) == 8 and sum(core.pauses.waiting(STATE._replace(number=n)) for n in range(20)) >= 3
    assert core.pauses.end(other._replace(number=19), 3.0) and not core.pauses.end(STATE._replace(number=12), 3.0)
    core.pauses._shares.check()


def test_a_request_that_is_refused_goes_on_all_the_same(core):
    core.pause(STATE, NS, SAID, None, 1.0)
    message = Generate(id=1, prompt=TokenPrompt(SAID), sampling=Sampling(temperature=-1.0))
    refusal, unpin = core.submit(b"c", message, 2.0, STATE, resumes=True)
    assert refusal.message.code == 400 and unpin == Order("w1", Unpin(1)) and len(core.pauses) == 0


@pytest.mark.parametrize("finish", ["stop", "length", "abort", "error"])
def test_an_answer_is_kept_if_it_ended_well(finish):
    kept, choice = [], _Choice(OutputProcessor(None, Sampling(), gathers=True), False, None)
    last = Delta(1, 0, b"5678", finish=finish, stop=7)
    for delta in (Delta(1, 0, b"1234"), last):
        choice.output.take(delta)
    assert _whole(choice, last, lambda whole: kept.append((whole.ids, whole.text, whole.stop))) is last
    assert kept == ([(b"12345678", "", 7)] if finish in ("stop", "length") else [])
