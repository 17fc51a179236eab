"""Workers that live and make no progress, workers that are to leave, and a server that is about to end."""

from __future__ import annotations

import pytest
from sim_workers import continuation, ids, register
from stack import stack
from test_core import PROMPT, core_with, error, generate, only_run, step

from radixrt.config import RouterConfig
from radixrt.messages import (
    Abort,
    Ask,
    Deltas,
    DrainWorker,
    Error,
    Generate,
    Info,
    Output,
    Resync,
    Run,
    Sampling,
    Score,
    Stop,
    TokenPrompt,
)
from radixrt.report import Report
from radixrt.requests.validate import Refused
from radixrt.router.core.core import RouterCore
from radixrt.router.core.effects import Order, Reply
from radixrt.router.core.recovery import MAX_LOSSES
from radixrt.router.core.suspects import MIN_HANGS
from radixrt.router.programs.state_store import ProgramStateStore
from radixrt.router.server import status
from radixrt.router.server.prometheus import render
from tests.waiting import eventually


def runs(effects) -> list[tuple[str, Run]]:
    return [(e.name, e.message) for e in effects if isinstance(e, Order) and isinstance(e.message, Run)]


def stops(effects) -> list[tuple[str, bool]]:
    return [(e.name, e.message.restart) for e in effects if isinstance(e, Order) and isinstance(e.message, Stop)]


def health(core: RouterCore) -> dict:
    return status.health(core, ProgramStateStore(1 << 20))


# ---------------------------------------------------------------- workers that make no progress


def test_a_stuck_worker_is_taken_out_and_its_streams_go_on():
    core = core_with(register("w0"), register("w1"))
    name, run = only_run(core.submit(b"c", generate(), 1.0))
    core.step(name, step(Output(run.id, tokens=[11])), 2.0)
    assert core.heartbeat(name, 12.0, 9.0, False) == [], "it may still end"
    (other, moved) = only_run(core.heartbeat(name, 13.0, 11.0, True))
    assert other != name and moved.ids == ids(5, 6, 7, 8, 11) and moved.id != run.id
    assert core.heartbeat(name, 14.0, 12.0, True) == [], "it is out"
    assert [n for n, _ in runs(core.submit(b"c", generate(2), 15.0))] == [other]
    assert health(core)["stuck"] == [name] and health(core)["serving"]
    assert core.counters.workers_stuck == 1


def test_a_step_that_ends_at_last_brings_the_worker_back():
    core = core_with(register("w0"), register("w1"))
    name, run = only_run(core.submit(b"c", generate(), 1.0))
    core.heartbeat(name, 13.0, 11.0, True)
    effects = core.step(name, step(Output(run.id, tokens=[11])), 20.0)
    assert [e.message for e in effects if e.name == name] == [Abort([run.id]), Resync()]
    assert core.heartbeat(name, 21.0, 0.0, False) == [] and health(core)["stuck"] == []
    assert {w["name"] for w in health(core)["workers"]} == {"w0", "w1"}


def test_the_only_worker_of_a_model_stays_until_it_is_replaced():
    core = core_with(register("w0"), register("w1", model="other"))
    name, _ = only_run(core.submit(b"c", generate(model="m"), 1.0))
    assert core.heartbeat(name, 13.0, 11.0, True) == []
    core.heartbeat("w1", 13.0, 11.0, True)
    found = health(core)
    assert not found["serving"] and len(found["workers"]) == 2 and found["stuck"] == ["w0", "w1"]
    core.register(register("w2"), 14.0)
    assert only_run(core.heartbeat(name, 15.0, 13.0, True))[0] == "w2"


def test_a_request_that_makes_its_workers_hang_is_given_up():
    """It does not take down all of them, one after the other."""
    core = core_with(*(register(f"w{n}") for n in range(4)))
    effects, tried = core.submit(b"c", generate(), 1.0), []
    for n in range(MIN_HANGS):
        name, _ = only_run(effects)
        tried.append(name)
        effects = core.heartbeat(name, 13.0 + n, 11.0, True)
    assert len(set(tried)) == MIN_HANGS and error(effects).code == 500
    assert len(core.workers) == 2 and core.runs_in_flight == 0


def test_those_that_were_with_it_do_not_hang_again():
    """What has begun is sent at once, the others are tried one after the other, until the one that does it is alone."""
    core = core_with(register("w0"), register("w1", max_model_len=8), register("w2", max_model_len=8))
    sent = {id: only_run(core.submit(b"c", big(id), 1.0)) for id in range(1, 6)}
    assert {name for name, _ in sent.values()} == {"w0"}, "the others have too little room"
    core.register(register("w1"), 2.0)
    core.register(register("w2"), 2.0)
    core.step("w0", step(Output(sent[1][1].id, tokens=[11])), 2.0)
    begun, tried = runs(core.heartbeat("w0", 13.0, 11.0, True))
    assert begun[1].ids[-4:] == ids(11) and core.runs_in_flight == 5
    core.cancel(b"c", 3)
    hangs = None
    for id in (2, 4):
        if id == 2:  # it makes progress
            effects = core.step(tried[0], step(Output(tried[1].id, tokens=[12])), 14.0)
            (tried,) = runs(effects)
        else:
            hangs = tried
    effects = core.heartbeat(hangs[0], 25.0, 11.0, True)
    failed = [e.message.id for e in effects if isinstance(e, Reply) and isinstance(e.message, Error)]
    assert failed == [4] and all(name != hangs[0] for name, _ in runs(effects))
    assert core.runs_in_flight == 3, "1, 2 and 5 go on"
    assert len(core.workers) == 1


def big(id: int) -> Generate:
    return generate(id, ids(*range(5, 14)))


def test_slow_workers_that_come_back_are_no_losses():
    core = core_with(*(register(f"w{n}") for n in range(2)))
    effects = core.submit(b"c", generate(), 1.0)
    for n in range(2 * MAX_LOSSES):
        name, run = only_run(effects)
        effects = core.heartbeat(name, 13.0 + n, 11.0, True)
        core.step(name, step(), 13.5 + n)
        core.heartbeat(name, 13.6 + n, 0.0, False)
    assert runs(effects)


def test_progress_is_a_metric():
    core, report = core_with(register("w0"), register("w1")), Report(1000)
    core.heartbeat("w0", 3.0, 2.5, False)
    core.heartbeat("w1", 13.0, 11.0, True)
    text = render(report, core)
    assert 'radixrt_worker_stalled_seconds{worker="w0"} 2.5' in text
    assert 'radixrt_worker_stalled_seconds{worker="w1"} 11.0' in text, "also of one that is out"
    assert "radixrt_workers_stuck_total 1.0" in text and "radixrt_draining 0.0" in text


# ---------------------------------------------------------------- workers that are to leave


def ask(core: RouterCore, worker: str, now: float, **fields):
    return core.drains.ask(b"admin", DrainWorker(id=9, worker=worker, **fields), now)


def test_a_drained_worker_finishes_and_leaves():
    core = core_with(register("w0"), register("w1"))
    name, run = only_run(core.submit(b"c", generate(), 1.0))
    other = {"w0": "w1", "w1": "w0"}[name]
    assert ask(core, name, 2.0) == []
    for id in range(2, 12):
        assert only_run(core.submit(b"c", generate(id), 2.0))[0] == other
    assert stops(core.tick(3.0)) == []
    core.step(name, step(Output(run.id, tokens=[1], finish="stop")), 4.0)
    assert stops(core.tick(5.0)) == [(name, False)]
    assert stops(core.tick(6.0)) == [] and stops(core.tick(10.5)) == [(name, False)], "the message may have been lost"
    assert core.leave(name, 11.0, planned=True) == [Reply(b"admin", Info(9, {"worker": name, "restart": False}))]


def test_what_takes_too_long_goes_on_elsewhere():
    core = core_with(register("w0"), register("w1"), shutdown_timeout=20.0)
    name, run = only_run(core.submit(b"c", generate(), 1.0))
    core.step(name, step(Output(run.id, tokens=[11])), 1.5)
    ask(core, name, 2.0, restart=True)
    core.heartbeat("w0", 21.0)
    core.heartbeat("w1", 21.0)
    assert stops(core.tick(21.0)) == [] and stops(core.tick(22.5)) == [(name, True)]
    effects = core.leave(name, 23.0, planned=True)
    ((other, moved),) = runs(effects)
    assert other != name and moved.ids == ids(5, 6, 7, 8, 11)
    assert effects[-1] == Reply(b"admin", Info(9, {"worker": name, "restart": True}))


def test_an_idle_worker_leaves_at_once_and_a_new_process_of_its_name_serves():
    core = core_with(register("w0", pid=1))
    assert stops(ask(core, "w0", 2.0, restart=True)) == [("w0", True)]
    assert runs(core.submit(b"c", generate(), 2.5)) == [], "it waits for the next one"
    core.leave("w0", 3.0, planned=True)
    assert len(runs(core.register(register("w0", pid=2), 4.0))) == 1
    assert not health(core)["workers"][0]["draining"]


def test_a_worker_that_is_told_to_stop_says_so_and_drains():
    core = core_with(register("w0"), register("w1"))
    name, run = only_run(core.submit(b"c", generate(), 1.0))
    assert core.drains.told(name, 2.0) == []
    assert [w["draining"] for w in health(core)["workers"] if w["name"] == name] == [True]
    core.step(name, step(Output(run.id, tokens=[1], finish="stop")), 4.0)
    assert stops(core.tick(5.0)) == [(name, False)]
    assert stops(core.drains.told("w0" if name == "w1" else "w1", 6.0)) != []


def test_a_worker_that_joins_again_still_drains():
    """Its connection broke, or it was silent for a while."""
    core = core_with(register("w0", pid=1), register("w1", pid=1))
    name, run = only_run(core.submit(b"c", generate(), 1.0))
    ask(core, name, 2.0)
    ((other, _),) = runs(core.register(register(name, pid=1), 3.0))
    assert other != name and stops(core.tick(4.0)) == [(name, False)]
    for id in range(10, 16):
        assert only_run(core.submit(b"c", generate(id), 4.5))[0] == other
    core.lose([name], 5.0)
    core.heartbeat(name, 6.0)
    assert only_run(core.submit(b"c", generate(2), 7.0))[0] == other


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [({"worker": "w7"}, 404, "worker"), ({"worker": "w0"}, 409, "worker")],
    ids=["unknown", "the only one"],
)
def test_what_cannot_be_drained(fields, code, field):
    with pytest.raises(Refused) as caught:
        core_with(register("w0")).drains.ask(b"c", DrainWorker(id=1, **fields), 1.0)
    assert (caught.value.code, caught.value.field) == (code, field)


@pytest.mark.parametrize(
    ("config", "key", "admin_only", "code"),
    [
        ({"api_key": ("t:k",), "admin_api_key": "a"}, "k", False, 403),
        ({"api_key": ("t:k",), "admin_api_key": "a"}, "", False, 401),
        ({"api_key": ("t:k",)}, "k", False, 403),
        ({}, "", True, 401),
        ({"api_key": ("t:k",), "admin_api_key": "a"}, "a", False, None),
        ({}, "", False, None),
    ],
)
def test_who_may_drain_a_worker(config, key, admin_only, code):
    core = RouterCore(RouterConfig(**config))
    for name in ("w0", "w1"):
        core.register(register(name), 0.0)
    message = DrainWorker(id=1, worker="w0", api_key=key, admin_only=admin_only)
    if code is None:
        assert stops(core.drains.ask(b"c", message, 1.0)) == [("w0", False)]
        return
    with pytest.raises(Refused) as caught:
        core.drains.ask(b"c", message, 1.0)
    assert caught.value.code == code


# ---------------------------------------------------------------- a server that is about to end


def test_a_draining_server_finishes_what_it_has_and_takes_nothing_new():
    with stack(workers=2, pace=0.005) as (router, _, client):
        assert router.server.idle
        client.send(generate(1, sampling=Sampling(max_tokens=60, seed=3)))
        first = client.receive()
        assert first.items[0].ids and not router.server.idle
        router.server.drain()
        scored = Score(id=3, prompt=TokenPrompt(PROMPT), choices=[TokenPrompt(PROMPT)])
        client.send(generate(2), scored, Ask(id=4, what="health"))
        refused, tokens, finished = {}, first.items[0].ids, False
        while not finished or len(refused) < 3:
            message = client.receive()
            if isinstance(message, Deltas):
                (delta,) = message.items
                tokens, finished = tokens + delta.ids, delta.finish is not None
            else:
                refused[message.id] = message
        assert tokens == ids(*continuation(PROMPT, 60)), "as if nothing had happened"
        assert [(refused[n].code, refused[n].retry_after > 0) for n in (2, 3)] == [(503, True)] * 2
        assert "draining" in refused[2].message and refused[4].data["draining"]
        eventually(lambda: router.server.idle)
