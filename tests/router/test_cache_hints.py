"""Hints to the cache in the core and before it: which worker gets them, what is answered, and what a flood costs."""

from __future__ import annotations

import pytest
from sim_workers import ids, register

from radixrt.config import RouterConfig
from radixrt.messages import CacheAction, CacheHint, CacheHinted, Info, Load, Namespace, StepDone, Stored
from radixrt.report import Report
from radixrt.router.core.cache_hints import overall
from radixrt.router.core.core import RouterCore
from radixrt.router.core.effects import Order, Reply
from radixrt.router.server.cache_control import longest
from radixrt.tokens.quota import BURST_SECONDS, TOKENS_PER_SECOND, Budget

NS = Namespace("n", "m")
PATH = ids(*range(1, 9))


@pytest.fixture
def core() -> RouterCore:
    """Two workers, of which w1 holds all of the path and w0 its first half."""
    core = RouterCore(RouterConfig(), Report(1000))
    for name, held in (("w0", PATH[:16]), ("w1", PATH)):
        core.register(register(name), 0.0)
        core.step(name, StepDone([], Load(), 0, [Stored(NS.key, 1, 0, 0, 0, held)]), 0.0)
    return core


def ask(core: RouterCore, verb: str, path: bytes = PATH, now: float = 0.0, tail: int = 0, **fields) -> list:
    return core.hints.ask(b"c", 7, [(NS, path)], CacheAction(verb, **fields), now, tail)


def answer(effects: list) -> dict:
    ((client, message),) = [effect for effect in effects if isinstance(effect, Reply)]
    assert client == b"c" and isinstance(message, Info) and message.id == 7
    return message.data


def only(effects: list) -> tuple[str, CacheHint]:
    (order,) = effects
    assert isinstance(order, Order)
    return order


def test_the_worker_that_holds_most_is_told_and_its_answer_passed_on(core):
    name, hint = only(ask(core, "retain", priority=9, seconds=5.0))
    assert (name, hint.namespace, hint.ids, hint.action.priority) == ("w1", NS.key, PATH, 9)
    found = answer(core.hinted("w1", CacheHinted(hint.id, "clipped", 5, 50, "why"), 0.0))
    assert found == {"result": "clipped", "tokens": 5, "bytes": 50, "worker": "w1", "reason": "why"}
    assert core.hinted("w1", CacheHinted(hint.id, "done"), 0.0) == [], "once"


def test_prefetch_may_name_a_worker(core):
    assert only(ask(core, "prefetch"))[0] == "w1"
    assert only(ask(core, "prefetch", destination="w0"))[0] == "w0"
    assert "no worker" in answer(ask(core, "prefetch", destination="w9"))["reason"]


def test_what_nobody_holds_is_missing_at_once(core):
    assert answer(ask(core, "pin", ids(77, 78)))["result"] == "missing"
    assert answer(ask(core, "pin", token_start=8))["result"] == "missing"
    assert answer(core.hints.ask(b"c", 7, [], CacheAction("pin"), 0.0))["result"] == "missing"


def test_shared_paths_are_written_by_one_and_fetched_by_the_other(core):
    name, hint = only(ask(core, "share", destination="w0"))
    assert (name, hint.action.verb) == ("w1", "share")
    name, fetch = only(core.hinted("w1", CacheHinted(hint.id, "done", 8), 0.0))
    assert (name, fetch.action.verb, fetch.ids) == ("w0", "prefetch", PATH)
    assert answer(core.hinted("w0", CacheHinted(fetch.id, "done", 8), 0.0))["worker"] == "w0"


def test_what_is_still_being_written_is_fetched_later(core):
    _, hint = only(ask(core, "share", destination="w0"))
    assert answer(core.hinted("w1", CacheHinted(hint.id, "deferred"), 0.0))["result"] == "deferred"
    assert core.hints.tick(1.0) == []
    name, fetch = only(core.hints.tick(10.0))
    assert (name, fetch.action.verb) == ("w0", "prefetch")
    assert core.hinted("w0", CacheHinted(fetch.id, "done"), 10.0) == [] and core.hints.tick(20.0) == []


def test_who_has_it_already_need_not_be_sent_it(core):
    name, hint = only(ask(core, "share", destination="w1"))
    assert (name, hint.action.verb) == ("w1", "prefetch")


def test_a_worker_that_does_not_answer_is_not_waited_for(core):
    _, hint = only(ask(core, "demote"))
    assert core.hints.tick(4.0) == []
    assert answer(core.hints.tick(5.0))["result"] == "deferred"
    assert core.hinted("w1", CacheHinted(hint.id, "done"), 6.0) == [] and not len(core.hints)


def test_a_client_that_has_gone_is_not_told(core):
    _, hint = only(ask(core, "demote"))
    core.drop_client(b"c")
    assert core.hinted("w1", CacheHinted(hint.id, "done"), 1.0) == [] and not len(core.hints)


def test_what_a_template_writes_after_an_answer_need_not_be_cached(core):
    longer = PATH + ids(50, 51, 52)
    assert only(ask(core, "pin", longer, tail=5))[1].ids == PATH
    assert only(ask(core, "pin", longer, tail=2))[1].ids == longer[: 4 * 9]
    assert only(ask(core, "pin", longer))[1].ids == longer


@pytest.mark.parametrize(("verb", "most"), [("pin", 3600.0), ("retain", 86_400.0)])
def test_times_are_clipped(core, verb, most):
    for seconds, result in ((None, "done"), (most, "done"), (most + 1, "clipped")):
        _, hint = only(ask(core, verb, seconds=seconds))
        assert hint.action.seconds == most
        assert answer(core.hinted("w1", CacheHinted(hint.id, "done", 8), 0.0))["result"] == result


def test_all_workers_delete_and_one_that_is_lost_when_it_comes_back(core):
    core.lose(["w0"], 0.0)
    name, hint = only(core.hints.delete(b"c", 7, "n", 0.0))
    assert (name, hint.action.verb, Namespace.of(hint.namespace).tenant) == ("w1", "delete", "n")
    found = answer(core.hinted("w1", CacheHinted(hint.id, "done", 8), 0.0))
    assert (found["result"], found["tokens"]) == ("deferred", 8) and "comes back" in found["reason"]
    orders = [effect for effect in core.heartbeat("w0", 1.0) if isinstance(effect.message, CacheHint)]
    assert only(orders)[1].action.verb == "delete"
    assert core._joined("w0", 2.0) == []


def test_several_results_are_one():
    assert overall(["done", "done"]) == "done" and overall(["done", "missing"]) == "clipped"
    assert overall(["refused", "missing"]) == "refused" and overall(["missing"]) == "missing"
    assert overall(["done", "deferred"]) == "deferred"


def test_of_paths_that_continue_each_other_the_longest_count():
    one, other, apart = (NS, PATH[:8]), (NS, PATH), (Namespace("n", "x"), PATH[:8])
    assert longest([one, other, apart]) == [other, apart] and longest([]) == []
    assert longest([other, other]) == [other]


def test_a_tenant_has_a_budget_of_its_own():
    budget = Budget()
    most = TOKENS_PER_SECOND * BURST_SECONDS
    assert budget.take("a", most - 1, 0.0) == 0.0 and budget.take("a", most, 0.0) == 0.0, "the last one may be large"
    wait = budget.take("a", 1, 0.0)
    assert wait == pytest.approx(most / TOKENS_PER_SECOND, rel=0.01)
    assert budget.take("b", 1, 0.0) == 0.0
    assert budget.take("a", 1, wait + 0.1) == 0.0
    budget.charge("b", most, 0.0)
    assert budget.take("b", 1, 0.0) > 0
