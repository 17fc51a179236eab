"""Workers that fail runs, and runs that fail on workers: who is at fault, and what becomes of both."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from sim_workers import SimWorker, continuation, ids, register

from radixrt.config import RouterConfig
from radixrt.messages import (
    Delta,
    Deltas,
    DrainWorker,
    Error,
    Generate,
    Load,
    Output,
    Run,
    Sampling,
    StepDone,
    TokenPrompt,
)
from radixrt.report import Report
from radixrt.router.core import failures, incidents
from radixrt.router.core.core import RouterCore
from radixrt.router.core.effects import Effect, Order
from radixrt.router.core.incidents import Record
from radixrt.router.core.request import PROGRESS_TOKENS
from radixrt.router.programs.state_store import ProgramStateStore
from radixrt.router.server import status
from radixrt.router.server.prometheus import render
from radixrt.tree import RadixTree


class Cluster:
    """A core and simulated workers, whose messages are delivered at once. `fails(name, run)` says why a worker fails a
    run with an error of its own, and `breaks(name, run)` whether the whole step fails with it."""

    def __init__(self, count: int, fails=lambda name, run: False, breaks=lambda name, run: False) -> None:
        self.core = RouterCore(RouterConfig(max_queued_requests=100_000), rng=random.Random(1))
        self.fails, self.breaks = fails, breaks
        self.now = 1.0
        self.workers = {f"w{n}": SimWorker(f"w{n}", RadixTree(events=True), pool=10_000) for n in range(count)}
        self.got: dict[int, list[Delta]] = {}
        self.errors: dict[int, Error] = {}
        self.placed: Counter[str] = Counter()
        """Runs by worker."""
        self.tries: Counter[int] = Counter()
        """Runs by request."""
        self._rng = random.Random(2)
        for name in self.workers:
            self.core.register(register(name), self.now)

    def ask(self, id: int, prompt: bytes, max_tokens: int = 4, **fields) -> None:
        message = Generate(
            id=id, prompt=TokenPrompt(prompt), sampling=Sampling(max_tokens=max_tokens), text=False, **fields
        )
        self.got[id] = []
        self.perform(self.core.submit(b"c", message, self.now))

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Order):
                if isinstance(effect.message, Run):
                    self.placed[effect.name] += 1
                    self.tries[self.core._dispatcher.in_flight[effect.message.id].request.id] += 1
                if effect.name in self.workers:
                    self.workers[effect.name].obey(effect.message)
            elif isinstance(effect.message, Error):
                assert effect.message.id not in self.errors
                self.errors[effect.message.id] = effect.message
            elif isinstance(effect.message, Deltas):
                for delta in effect.message.items:
                    self.got[delta.id].append(delta)

    def turn(self, seconds: float = 0.01) -> None:
        """Every worker computes a step."""
        self.now += seconds
        for name, worker in list(self.workers.items()):
            runs = [sequence.run for sequence in worker.sequences.values()]
            if any(self.breaks(name, run) for run in runs):
                failed = runs
            else:
                failed = [run for run in runs if self.fails(name, run)]
            for run in failed:
                del worker.sequences[run.id]
            message = worker.step(self._rng)
            message.outputs += [Output(run.id, finish="error", error="the step failed") for run in failed]
            self.perform(self.core.step(name, message, self.now))

    def finish(self, turns: int = 400) -> None:
        while self.core.runs_in_flight and (turns := turns - 1):
            self.turn()
        assert not self.core.runs_in_flight

    def answer(self, id: int) -> list[int]:
        return [token for delta in self.got[id] for token in memoryview(delta.ids).cast("i").tolist()]

    def tokens(self, name: str, run: Run) -> list[int]:
        """Those that a run has now."""
        return self.workers[name].sequences[run.id].tokens

    def set_aside(self) -> set[str]:
        return {member.name for member in self.core.workers if member.record.set_aside}


def is_poison(run: Run) -> bool:
    return run.ids[:4] == ids(666)


def prompt(id: int) -> bytes:
    return ids(1000 + id, 7)


# ---------------------------------------------------------------- the record


def record(outcomes: str, start: float = 0.0) -> Record:
    """The record after some outcomes, one a second: `f` a failure that is blamed on the worker, `x` one that is not,
    `o` one of which nothing is known yet, `s` a success, and `.` nothing."""
    found = Record("w")
    for n, outcome in enumerate(outcomes):
        if outcome in "fxo":
            found.failed(n, start + n, gave_tokens=False)
        if outcome == "f":
            found.blame(start + n)
        elif outcome == "x":
            found.excuse()
        elif outcome == "s":
            found.succeeded()
    return found


@pytest.mark.parametrize(
    ("why", "outcomes", "share", "aside"),
    [
        ("nothing is known of it", "sss", 0.0, False),
        ("one failure", "f", 0.25, False),
        ("it counts less after a success", "fs", 0.25 * 0.75, False),
        ("and nothing after some", "fssss", 0.0, False),
        ("two in a row", "ff", 1 - 0.75**2, False),
        ("three in a row", "fff", 1 - 0.75**3, True),
        ("a success while it is set aside", "fffs", (1 - 0.75**3) * 0.75, True),
        ("and a third one", "fffsss", (1 - 0.75**3) * 0.75**3, False),
        ("it takes more after a long row", "ffffffffsss", (1 - 0.75**8) * 0.75**3, True),
        ("what others were at fault for does not count", "xxxxxxx", 0.0, False),
        ("unless nothing else is seen of it", "xxxxxxxx", 0.0, True),
        ("until something is", "xxxxxxxxs", 0.0, False),
    ],
)
def test_what_becomes_of_a_worker(why, outcomes, share, aside):
    found = record(outcomes)
    assert (found.share, found.set_aside) == (pytest.approx(share), aside), why


@pytest.mark.parametrize(
    ("why", "outcomes", "seconds", "expected"),
    [
        ("nothing is known of it", "sss", 0, 0.0),
        ("a failure just now", "f", 0, 0.25),
        ("a failure of which nothing is known yet counts in full", "o", 0, 0.25),
        ("and so does each", "ooo", 0, 1 - 0.75**3),
        ("with those that are known", "fo", 0, 1 - 0.75 * (1 - 0.25 * 0.5**0.1)),
        ("one that others were at fault for does not", "x", 0, 0.0),
        ("after the half-life it is half", "f", incidents.FAILURE_HALF_LIFE, 0.125),
        ("while it is set aside, time changes nothing", "fff", 1000.0, 1 - 0.75**3),
        ("nor where all fail there", "xxxxxxxx", 1000.0, incidents.MAX_FAILED_SHARE),
    ],
)
def test_the_share_that_placement_sees_is_the_formula(why, outcomes, seconds, expected):
    found = record(outcomes, start=100.0)
    found_at = 100.0 + len(outcomes) - 1 + seconds
    if outcomes == "fo":  # the time since the last failure counts
        found_at, expected = 101.0, 1 - 0.75 * (1 - 0.25)
    assert found.failed_share(found_at) == pytest.approx(expected), why


def test_probes_come_at_doubling_intervals_until_one_succeeds():
    found, times = record("fff"), []
    for tenths in range(2000):
        if (now := tenths / 10) >= found.probe_at:
            found.probe(now)
            times.append(now)
    gaps = [b - a for a, b in zip(times, times[1:], strict=False)]
    assert times[0] == 3.0 and gaps == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    for left in (2, 1, 0):
        found.succeeded()
        assert found.set_aside == bool(left) and found.probe_at == 0.0, "the next one comes at once"
    for _ in range(2):  # it fails again: it is not probed as if for the first time
        found.failed(object(), 300.0, gave_tokens=True)
        found.blame(300.0)
    assert found.set_aside and found.probe_at == 360.0
    for _ in range(9):
        found.succeeded()
    assert found.probe_seconds == incidents.MIN_PROBE_SECONDS


# ---------------------------------------------------------------- bad workers


@pytest.mark.parametrize("emitted", [0, 3])
def test_two_of_four_workers_fail_everything_and_no_request_fails(emitted):
    """They fail fast, so that they always look idle. With `emitted`, only after some tokens."""
    bad = {"w0", "w1"}
    cluster = Cluster(4, lambda name, run: name in bad and len(cluster.tokens(name, run)) >= 3 + emitted)
    for id in range(300):
        cluster.ask(id, prompt(id), max_tokens=8)
        if id % 6 == 0:
            cluster.turn(0.1)
    cluster.finish()
    assert not cluster.errors
    for id in range(300):
        assert cluster.answer(id) == continuation(prompt(id), 8)
    assert cluster.set_aside() == bad
    assert sum(cluster.placed[name] for name in bad) < 30, "they get a few, and then probes"


def test_all_but_one_worker_fail_everything():
    cluster = Cluster(10, lambda name, run: name != "w7")
    for id in range(20):
        cluster.ask(id, prompt(id))
    cluster.finish()
    assert not cluster.errors and cluster.placed["w7"] == 20


def test_a_worker_that_is_repaired_is_found_by_probes_and_serves_again():
    bad = {"w0"}
    cluster = Cluster(2, lambda name, run: name in bad)
    id = 0

    def serve(seconds: float) -> None:
        nonlocal id
        cluster.placed.clear()
        for _ in range(int(seconds * 10)):
            for _ in range(4):
                cluster.ask(id := id + 1, prompt(id))
            cluster.turn(0.1)

    serve(5.0)
    assert cluster.set_aside() == bad
    serve(30.0)
    assert 2 <= cluster.placed["w0"] <= 6, "probes only, and fewer and fewer"
    bad.clear()
    serve(40.0)
    assert not cluster.set_aside()
    serve(5.0)
    assert cluster.placed["w0"] > 60
    cluster.finish()
    assert not cluster.errors


def test_a_worker_that_fails_now_and_then_is_not_set_aside():
    rng = random.Random(3)
    cluster = Cluster(3, lambda name, run: name == "w1" and rng.random() < 0.01)
    for id in range(400):
        cluster.ask(id, prompt(id))
        cluster.turn()
        assert not cluster.set_aside()
    cluster.finish()
    assert not cluster.errors and cluster.placed["w1"] > 40


def test_if_all_are_set_aside_they_serve():
    """Nothing is refused because of that, and each goes on as soon as it can."""
    cluster = Cluster(3, lambda name, run: True)
    for id in range(20):
        cluster.ask(id, prompt(id))
        cluster.turn()
    cluster.finish()
    assert len(cluster.errors) == 20 and len(cluster.set_aside()) == 3
    cluster.fails = lambda name, run: False
    cluster.placed.clear()
    for id in range(20, 120):
        cluster.ask(id, prompt(id))
        if id % 10 == 0:
            cluster.turn()
    cluster.finish()
    assert len(cluster.errors) == 20 and not cluster.set_aside() and min(cluster.placed.values()) > 10


def test_the_least_bad_of_workers_that_are_set_aside_serves():
    cluster = Cluster(3)
    for member, share in zip(cluster.core.workers, (0.9, 0.6, 0.8), strict=True):
        member.record.share, member.record.incidents, member.record.set_aside = share, 9, True
    cluster.ask(1, prompt(1))
    assert cluster.placed == {"w1": 1}


def test_a_single_worker_that_fails_everything_is_shown_and_goes_on():
    cluster = Cluster(1, lambda name, run: True)
    for id in range(9):
        cluster.ask(id, prompt(id))
        cluster.finish()
    assert len(cluster.errors) == 9 and {error.code for error in cluster.errors.values()} == {500}
    (worker,) = status.health(cluster.core, ProgramStateStore(1))["workers"]
    assert worker["set_aside"] and cluster.set_aside() == {"w0"}
    cluster.fails = lambda name, run: False
    cluster.ask(9, prompt(9))
    cluster.finish()
    assert cluster.answer(9) == continuation(prompt(9), 4) and not cluster.set_aside()


def test_what_is_set_aside_is_logged_and_a_metric(caplog):
    cluster = Cluster(2, lambda name, run: name == "w1")
    for id in range(60):
        cluster.ask(id, prompt(id))
        if id % 6 == 0:
            cluster.turn(0.5)
    cluster.finish()
    lines = [record.getMessage() for record in caplog.records if "set aside" in record.getMessage()]
    assert lines == ["worker w1 is set aside: it keeps failing requests"]
    text = render(Report(1000), cluster.core)
    assert 'radixrt_worker_set_aside{worker="w0"} 0.0' in text
    assert 'radixrt_worker_set_aside{worker="w1"} 1.0' in text


def test_a_worker_keeps_its_record_while_it_is_the_same_process():
    core = Cluster(2).core

    def now() -> Record:
        return core.workers.hear("w1", 1.0).record

    first = now()
    core.lose(["w1"], 1.0)
    core.heartbeat("w1", 1.0)
    assert now() is first
    core.register(register("w1"), 1.0)
    assert now() is first
    core.lose(["w1"], 1.0)
    core.register(register("w1"), 1.0)
    assert now() is first
    core.register(register("w1", pid=2), 1.0)
    assert now() is not first


def test_a_worker_without_the_adapter_is_never_tried():
    cluster = Cluster(2, lambda name, run: name == "w0")
    core = cluster.core
    core.register(register("w2", model="other"), 1.0)
    cluster.workers["w2"] = SimWorker("w2")
    for id in range(20):
        cluster.ask(id, prompt(id))
        cluster.turn()
    cluster.finish()
    assert not cluster.errors and cluster.placed["w2"] == 0


# ---------------------------------------------------------------- poison


def test_what_fails_everywhere_ends_after_each_worker_and_blames_none():
    cluster = Cluster(4, lambda name, run: is_poison(run))
    for id in range(40):
        cluster.ask(id, ids(666, id))
        cluster.ask(1000 + id, prompt(id))
        cluster.turn()
        cluster.turn()
    cluster.finish()
    assert set(cluster.errors) == set(range(40))
    assert not cluster.set_aside() and all(m.record.share == 0 == m.record.undecided for m in cluster.core.workers)
    assert all(cluster.answer(1000 + id) == continuation(prompt(id), 4) for id in range(40))


def test_poison_is_tried_on_a_bounded_number_of_workers():
    cluster = Cluster(100, lambda name, run: is_poison(run))
    cluster.ask(1, ids(666, 1))
    cluster.finish()
    assert cluster.errors[1].code == 500 and sum(cluster.placed.values()) == failures.MAX_TRIES
    assert max(cluster.placed.values()) == 1


@pytest.mark.parametrize("count", [1, 2, 4])
def test_poison_that_fails_whole_steps_takes_nobody_along(count):
    """The others of its steps go on; they part from it, even if all workers have failed them together with it."""
    cluster = Cluster(count, breaks=lambda name, run: is_poison(run))
    for id in range(60):
        cluster.ask(id, prompt(id), max_tokens=6)
    cluster.ask(1000, ids(666, 1), max_tokens=6)
    for id in range(60, 90):
        cluster.ask(id, prompt(id), max_tokens=6)
    cluster.finish()
    assert set(cluster.errors) == {1000}
    assert all(cluster.answer(id) == continuation(prompt(id), 6) for id in range(90))
    assert cluster.tries[1000] <= 2 * count + 2
    assert not cluster.set_aside() and all(m.record.share == 0 for m in cluster.core.workers)


def test_a_worker_that_fails_is_blamed_though_clients_send_poison_as_well():
    cluster = Cluster(4, lambda name, run: is_poison(run) or name == "w2")
    for id in range(60):
        cluster.ask(1000 + id, prompt(id))
        if id % 3 == 0:
            cluster.ask(id, ids(666, id))
        if id % 6 == 0:
            cluster.turn()
    cluster.finish()
    assert set(cluster.errors) == set(range(0, 60, 3)) and cluster.set_aside() == {"w2"}


def test_a_client_that_cancels_what_it_has_poisoned_blames_no_worker():
    cluster = Cluster(2, breaks=lambda name, run: is_poison(run))
    for id in range(30):
        cluster.ask(1000 + id, prompt(id), max_tokens=30)
        cluster.ask(id, ids(666, id))
        cluster.turn()
        cluster.perform(cluster.core.cancel(b"c", id))
        cluster.turn()
    cluster.finish()
    assert not cluster.errors and all(m.record.share == 0 for m in cluster.core.workers)


def test_invalid_fields_are_no_failures_of_the_worker():
    cluster = Cluster(2)
    for id in range(20):
        cluster.ask(id, prompt(id))
        (name,) = (name for name, worker in cluster.workers.items() if worker.sequences)
        ((run, _),) = cluster.workers[name].sequences.items()
        del cluster.workers[name].sequences[run]
        refusal = Output(run, finish="error", error="grammar: no", field="grammar")
        cluster.perform(cluster.core.step(name, StepDone([refusal], Load()), cluster.now))
    assert {error.code for error in cluster.errors.values()} == {400}
    assert all(member.record.incidents == 0 for member in cluster.core.workers)


def test_a_choice_with_an_invalid_field_ends_the_others_whatever_became_of_them():
    cluster = Cluster(2)
    cluster.ask(1, prompt(1), n=3)
    ((name, worker),) = ((name, worker) for name, worker in cluster.workers.items() if worker.sequences)
    runs = list(worker.sequences)
    outputs = [Output(run, finish="error", error="no", field="grammar" * (run == runs[-1])) for run in runs]
    worker.sequences.clear()
    cluster.perform(cluster.core.step(name, StepDone(outputs, Load()), cluster.now))
    assert cluster.core.runs_in_flight == 0, "none goes on elsewhere"
    cluster.finish()
    assert cluster.errors[1].code == 400 and all(not worker.sequences for worker in cluster.workers.values())


@pytest.mark.parametrize("count", [1, 3])
def test_where_all_steps_fail_nobody_waits_long_for_an_error(count):
    """There is no use in looking for the cause among the requests."""
    cluster = Cluster(count, breaks=lambda name, run: True)
    for id in range(300):
        cluster.ask(id, prompt(id))
        if id % 3 == 0:
            cluster.turn()
            assert cluster.core.runs_in_flight < 30 * count
    cluster.finish(turns=20)
    assert len(cluster.errors) == 300


def test_choices_of_one_request_end_together():
    """If several of them fail at once, the client gets one error."""
    cluster = Cluster(2, lambda name, run: is_poison(run))
    cluster.ask(1, ids(666, 1), n=3)
    cluster.ask(2, prompt(2), n=3)
    cluster.finish()
    assert set(cluster.errors) == {1} and all(worker.sequences == {} for worker in cluster.workers.values())


# ---------------------------------------------------------------- details


def test_one_request_that_fails_again_and_again_is_not_many():
    found = Record("w")
    for n in range(20):
        found.failed("the same", float(n), gave_tokens=False)
        found.excuse()
    assert found.in_row == 1 and not found.set_aside
    for n in range(20):
        found.failed(n, float(n), gave_tokens=n % 3 == 0)
        found.excuse()
    assert found.in_row <= 3 and not found.set_aside, "it gives tokens between them"


def test_a_worker_that_was_to_blame_once_is_probed():
    found = record("f", start=10.0)
    assert found.probe_at == 10.0 + incidents.MIN_PROBE_SECONDS and found.is_due(11.0) and not found.is_due(10.5)
    assert not record("x").is_due(99.0)


def test_choices_do_not_excuse_each_other():
    cluster = Cluster(2, breaks=lambda name, run: is_poison(run))
    cluster.ask(1, ids(666, 1), n=3)
    cluster.finish()
    assert set(cluster.errors) == {1} and cluster.tries[1] <= 6


def test_a_long_answer_outlives_any_number_of_failures_between_which_it_gets_on():
    cluster = Cluster(2, lambda name, run: len(cluster.tokens(name, run)) >= len(run.ids) // 4 + 20)
    cluster.ask(1, prompt(1), max_tokens=700)
    cluster.finish(turns=3000)
    assert cluster.answer(1) == continuation(prompt(1), 700)


def test_whoever_sends_poison_all_the_time_ends_no_answer_of_others():
    """Between two failures they gain few tokens, but it was never they alone that failed."""
    cluster = Cluster(1, breaks=lambda name, run: is_poison(run))
    for id in range(1000, 1004):
        cluster.ask(id, prompt(id), max_tokens=120)
    for id in range(60):
        cluster.ask(id, ids(666, id))
        cluster.turn()
        cluster.perform(cluster.core.cancel(b"c", id))
        for _ in range(5):
            cluster.turn()
    cluster.finish()
    assert all(cluster.answer(id) == continuation(prompt(id), 120) for id in range(1000, 1004))
    assert min(cluster.tries[id] for id in range(1000, 1004)) > failures.MAX_TRIES


def test_a_run_that_fails_after_many_tokens_is_no_success():
    cluster = Cluster(1, lambda name, run: len(cluster.tokens(name, run)) > 30)
    cluster.ask(1, prompt(1), max_tokens=90)
    cluster.finish()
    (member,) = cluster.core.workers
    assert set(cluster.errors) == {1} and not member.record.served
    cluster.ask(2, prompt(2), max_tokens=90)
    while len(cluster.answer(2)) < PROGRESS_TOKENS:
        cluster.turn()
    cluster.perform(cluster.core.cancel(b"c", 2))
    assert member.record.served, "though its client has left before its end"


def test_a_worker_that_is_set_aside_is_tried_before_a_run_ends():
    cluster = Cluster(3, lambda name, run: name != "w2")
    record = cluster.core.workers.hear("w2", 1.0).record
    record.set_aside, record.share, record.incidents, record.probe_at = True, 0.9, 5, 1e9
    cluster.ask(1, prompt(1))
    cluster.finish()
    assert not cluster.errors and cluster.placed == {"w0": 1, "w1": 1, "w2": 1}


def test_runs_that_are_held_are_in_flight():
    cluster = Cluster(1, breaks=lambda name, run: is_poison(run))
    cluster.ask(1, ids(666, 1))
    for id in (2, 3, 4):
        cluster.ask(id, prompt(id))
    cluster.turn()
    assert cluster.core.runs_in_flight == 4 and len(cluster.workers["w0"].sequences) == 1
    cluster.perform(cluster.core.cancel(b"c", 4))
    assert cluster.core.runs_in_flight == 3
    cluster.finish()
    assert set(cluster.errors) == {1} and not cluster.got[4]


def test_a_run_whose_worker_was_lost_is_no_probe():
    cluster = Cluster(3)
    record = cluster.core.workers.hear("w0", 1.0).record
    record.set_aside, record.share, record.incidents, record.probe_at = True, 0.9, 5, 1e9
    cluster.ask(1, prompt(1))
    record.probe_at = 0.0
    (first,) = cluster.placed
    cluster.perform(cluster.core.leave(first, 2.0))
    assert set(cluster.placed) == {"w1", "w2"}


def test_a_worker_that_is_set_aside_gets_nothing_however_long_others_have_to_wait():
    cluster = Cluster(2)
    record = cluster.core.workers.hear("w0", 1.0).record
    record.set_aside, record.incidents, record.probe_at = True, 9, 1e9
    for id in range(6):
        cluster.ask(id, ids(*range(id, id + 20_000)[:4000], id))
    assert cluster.placed == {"w1": 6}


def test_a_held_run_is_sent_when_the_client_of_the_one_in_trial_has_left():
    cluster = Cluster(1, breaks=lambda name, run: is_poison(run))
    for id, tokens in ((1, ids(666, 1)), (2, prompt(2))):
        cluster.ask(id, tokens)
    cluster.turn()
    ((run, _),) = cluster.workers["w0"].sequences.items()
    cluster.perform(cluster.core.cancel(b"c", cluster.core._dispatcher.in_flight[run].request.id))
    cluster.perform(cluster.core.tick(cluster.now))
    assert len(cluster.workers["w0"].sequences) == cluster.core.runs_in_flight == 1


def test_poison_on_the_only_worker_while_it_drains_takes_nobody_along():
    """The others wait until it serves again."""
    cluster = Cluster(1, breaks=lambda name, run: is_poison(run))
    for id in range(3):
        cluster.ask(id, prompt(id))
    cluster.ask(9, ids(666))
    cluster.perform(cluster.core.drains.ask(b"d", DrainWorker(id=1, worker="w0", restart=True), cluster.now))
    cluster.turn()
    assert not cluster.errors and cluster.core.runs_in_flight == 4
    cluster.perform(cluster.core.leave("w0", cluster.now, planned=True))
    cluster.workers["w0"] = SimWorker("w0", RadixTree(events=True), pool=10_000)
    cluster.perform(cluster.core.register(register("w0", pid=2), cluster.now))
    cluster.finish()
    assert cluster.errors.keys() == {9}
    assert all(cluster.answer(id) == continuation(prompt(id), 4) for id in range(3))
