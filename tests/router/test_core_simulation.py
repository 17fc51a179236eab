"""The core among workers that die, fall silent, come back, delay and lose connections: every stream must be what one
worker gives."""

from __future__ import annotations

import random
from array import array
from collections import defaultdict

import pytest
from sim_workers import SimWorker, continuation, ids, register

from radixrt.config import RouterConfig
from radixrt.messages import (
    Deltas,
    Error,
    Generate,
    Output,
    Register,
    Run,
    Sampling,
    Score,
    Scored,
    StepDone,
    TokenPrompt,
)
from radixrt.router.core.core import RouterCore
from radixrt.router.core.effects import Effect, Reply
from radixrt.tree import RadixTree


class World:
    """Clients, workers and the core, with queues in between that may lag but keep their order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.core = RouterCore(RouterConfig(max_queued_requests=10_000), rng=self.rng)
        self.workers: dict[str, SimWorker] = {}
        self.infos: dict[str, Register] = {}
        self.muted: dict[str, float] = {}
        self.to_router: dict[str, list] = defaultdict(list)
        self.numbers: dict[str, int] = {}
        """Of the StepDone that a worker has sent last."""
        self.sent: dict[tuple[bytes, int], Generate | Score] = {}
        self.got: dict[tuple[bytes, int, int], list] = defaultdict(list)
        self.ended: set[tuple[bytes, int, int]] = set()
        self.scored: dict[tuple[bytes, int], Scored] = {}
        self.cancelled: set[tuple[bytes, int]] = set()
        self.errors: list[Error] = []
        self.lives = 0
        self.loses = 0.1
        """Share of the messages without outputs."""
        self.fresh = False
        """Whether prompts share nothing."""
        self.cached: dict[tuple[bytes, int, int], int] = {}

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Reply):
                self.receive(effect.client, effect.message)
            elif effect.name in self.workers:
                self.workers[effect.name].obey(effect.message)

    def receive(self, client: bytes, message) -> None:
        match message:
            case Deltas(items):
                for delta in items:
                    key = (client, delta.id, delta.index)
                    assert key not in self.ended, "a delta after the last one"
                    assert (client, delta.id) not in self.cancelled, "a delta after the cancel"
                    self.got[key] += array("i", delta.ids)
                    if delta.finish:
                        self.ended.add(key)
                        assert delta.usage.completion_tokens == len(self.got[key])
                        assert 0 <= delta.usage.cached_tokens < delta.usage.prompt_tokens
                        self.cached[key] = delta.usage.cached_tokens
            case Scored():
                self.scored[client, message.id] = message
            case Error():
                self.errors.append(message)

    def start_worker(self) -> None:
        name = f"w{self.rng.randrange(4)}"
        if name in self.workers:
            return
        self.lives += 1
        self.to_router[name].clear()
        self.workers[name] = SimWorker(name, RadixTree(events=True), pool=400)
        self.infos[name], self.numbers[name] = register(name, pid=self.lives, total_pages=400), 0
        self.perform(self.core.register(self.infos[name], self.now))

    def kill_worker(self) -> None:
        if len(self.workers) < 2:
            return
        name = self.rng.choice(list(self.workers))
        del self.workers[name]
        if self.rng.random() < 0.5:
            self.perform(self.core.leave(name, self.now))

    def mute_worker(self) -> None:
        if len(self.workers) > 1:
            self.muted[self.rng.choice(list(self.workers))] = self.now + 8

    def cut_wire(self) -> None:
        """A connection breaks: of what its worker has said the oldest is lost, be it that the newest arrives. It joins
        again, without its requests."""
        name = self.rng.choice(list(self.workers))
        queue = self.to_router[name]
        del queue[: self.rng.randrange(len(queue) + 1)]
        self.workers[name].sequences.clear()
        self.numbers[name] = 0
        queue.append(self.infos[name])

    def submit(self) -> None:
        if not len(self.core.workers):  # all that are left are silent: a request would be refused at once
            return
        rng = self.rng
        client, id = rng.choice((b"a", b"b", b"c")), len(self.sent)
        prompt = ids(
            *([100 + id] * self.fresh),
            *([rng.randrange(3)] * rng.randrange(1, 40)),
            *(rng.randrange(4) for _ in range(rng.randrange(1, 9))),
        )
        if rng.random() < 0.15:
            choices = [TokenPrompt(ids(*range(1, rng.randrange(2, 6)))) for _ in range(3)]
            request = Score(id=id, prompt=TokenPrompt(prompt), choices=choices)
        else:
            sampling = Sampling(max_tokens=rng.randrange(1, 25))
            request = Generate(
                id=id, prompt=TokenPrompt(prompt), sampling=sampling, n=rng.choice((1, 1, 3)), stream=rng.random() < 0.7
            )
        self.sent[client, id] = request
        self.perform(self.core.submit(client, request, self.now))

    def cancel(self) -> None:
        client, id = self.rng.choice(list(self.sent)[-4:])
        if isinstance(self.sent[client, id], Generate):
            self.cancelled.add((client, id))
            self.perform(self.core.cancel(client, id))

    def step(self, name: str, worker: SimWorker) -> StepDone:
        return worker.step(self.rng)

    def turn(self) -> None:
        """A quarter of a second: workers step, messages arrive or lag, one of them may be lost on the way."""
        self.now += 0.25
        for name, worker in list(self.workers.items()):
            message = self.step(name, worker)
            message.number = self.numbers[name] = self.numbers[name] + 1
            self.to_router[name].append(message)
        for name in list(self.to_router):
            if self.now < self.muted.get(name, 0):
                continue
            queue = self.to_router[name]
            for _ in range(self.rng.randrange(len(queue) + 1) if name in self.workers else len(queue)):
                message = queue.pop(0)
                if isinstance(message, Register):
                    if message is self.infos[name]:  # and not of a life before, with which it was lost
                        self.perform(self.core.register(message, self.now))
                    continue
                if not message.outputs and self.rng.random() < self.loses:
                    continue
                self.perform(self.core.step(name, message, self.now))
        if self.now % 1 == 0:
            for name in self.workers:
                if self.now >= self.muted.get(name, 0):
                    self.perform(self.core.heartbeat(name, self.now))
            self.perform(self.core.tick(self.now))


@pytest.mark.parametrize("seed", range(12))
def test_every_stream_is_what_one_worker_would_have_given(seed, monkeypatch):
    monkeypatch.setattr("radixrt.router.core.recovery.MAX_LOSSES", 1000)
    world = World(seed)
    world.start_worker()
    for _ in range(220):
        for action, chance in (
            (world.submit, 0.6),
            (world.start_worker, 0.2),
            (world.kill_worker, 0.05),
            (world.mute_worker, 0.02),
            (world.cut_wire, 0.03),
        ):
            if world.rng.random() < chance:
                action()
        if world.sent and world.rng.random() < 0.1:
            world.cancel()
        world.turn()
    for _ in range(200):
        world.start_worker()
        world.turn()
    assert world.errors == []
    check_answers(world)
    assert world.core.runs_in_flight == 0
    counters = world.core.counters
    assert counters.redispatched > 0 and counters.workers_lost > 0 and counters.cached_tokens > 0
    check_nothing_is_left(world)


@pytest.mark.parametrize("seed", range(6))
def test_a_request_never_hits_what_it_has_computed_itself(seed, monkeypatch):
    """Its prompt is new: however often its workers are lost with what they have computed of it, and come back, nothing
    of it was cached."""
    monkeypatch.setattr("radixrt.router.core.recovery.MAX_LOSSES", 1000)
    world = World(seed)
    world.fresh = True
    for _ in range(3):
        world.start_worker()
    for _ in range(100):
        for action, chance in ((world.submit, 0.8), (world.start_worker, 0.2), (world.mute_worker, 0.1)):
            if world.rng.random() < chance:
                action()
        if world.rng.random() < 0.1:
            world.cut_wire()
        world.turn()
    for _ in range(60):
        world.start_worker()
        world.turn()
    check_answers(world)
    assert world.core.counters.redispatched > 20
    assert {cached for (_, _, index), cached in world.cached.items() if index == 0} == {0}


class Failing(World):
    """Two of four workers fail most of what they get; one of the others is always there. Some requests are poison, by
    which a worker fails all its requests."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.poison: set[tuple[bytes, int]] = set()
        self.fresh = True

    def kill_worker(self) -> None:
        kept = self.workers.pop("w1")
        super().kill_worker()
        self.workers["w1"] = kept

    def mute_worker(self) -> None:
        super().mute_worker()
        self.muted.pop("w1", None)

    def submit(self) -> None:
        before = set(self.sent)
        super().submit()
        for key in set(self.sent) - before:
            if self.rng.random() < 0.05:
                self.poison.add(key)

    def step(self, name: str, worker: SimWorker) -> StepDone:
        poison = {100 + id for _, id in self.poison}
        failed: list[int] = []
        if any(sequence.tokens[0] in poison for sequence in worker.sequences.values()):
            failed = list(worker.sequences)
        elif name in ("w0", "w2"):
            failed = [run for run in worker.sequences if self.rng.random() < 0.6]
        for run in failed:
            del worker.sequences[run]
        message = super().step(name, worker)
        message.outputs += [Output(run, finish="error", error="the step failed") for run in failed]
        return message


@pytest.mark.parametrize("seed", range(6))
def test_among_bad_workers_and_poison_all_other_requests_end_well(seed, monkeypatch):
    monkeypatch.setattr("radixrt.router.core.recovery.MAX_LOSSES", 1000)
    world = Failing(seed)
    while len(world.workers) < 4:
        world.start_worker()
    for _ in range(150):
        for action, chance in (
            (world.submit, 0.8),
            (world.start_worker, 0.3),
            (world.kill_worker, 0.03),
            (world.mute_worker, 0.02),
            (world.cut_wire, 0.02),
        ):
            if world.rng.random() < chance:
                action()
        if world.sent and world.rng.random() < 0.05:
            world.cancel()
        world.turn()
    for _ in range(200):
        world.start_worker()
        world.turn()
    poison = {id for _, id in world.poison}
    failed = {error.id for error in world.errors}
    assert world.poison and failed <= poison, failed - poison
    check_answers(world)
    check_nothing_is_left(world)
    records = {member.name: member.record for member in world.core.workers}
    assert all(record.undecided == 0 for record in records.values())
    assert not records["w1"].set_aside and not records["w3"].set_aside


def check_answers(world: World) -> None:
    failed = {error.id for error in world.errors}
    for (client, id), request in world.sent.items():
        if (client, id) in world.cancelled or id in failed:
            continue
        if isinstance(request, Score):
            expected = [[float(t) for t in array("i", choice.ids)] for choice in request.choices]
            assert world.scored[client, id].logprobs == expected
        else:
            expected = continuation(request.prompt.ids, request.sampling.max_tokens)
            for index in range(request.n):
                assert world.got[client, id, index] == expected
                assert (client, id, index) in world.ended


def check_nothing_is_left(world: World) -> None:
    """What requests leave behind in the core, once they are over: nothing."""
    core = world.core
    assert core._requests == {} and core.runs_in_flight == 0
    assert core.index._computing.tokens == 0
    assert all(member.runs == {} and member.waiting_tokens == 0 for member in core.workers)
    assert all(worker.sequences == {} for worker in world.workers.values())


def test_placement_keeps_prefixes_together_and_predictions_true():
    """Two workers, many conversations that grow: with nothing dying, nearly every prediction is right."""
    world = World(1)
    world.loses = 0.0
    world.core.register(register("w0"), 0.0)
    world.core.register(register("w1"), 0.0)
    for name in ("w0", "w1"):
        world.workers[name], world.numbers[name] = SimWorker(name, RadixTree(events=True), pool=100_000), 0
    rng = random.Random(2)
    histories = [[rng.randrange(50_000) for _ in range(300)] for _ in range(10)]
    for turn in range(6):
        for number, history in enumerate(histories):
            id = turn * 100 + number
            request = Generate(id=id, prompt=TokenPrompt(ids(*history)), sampling=Sampling(max_tokens=20), stream=False)
            world.perform(world.core.submit(b"c", request, world.now))
        while world.core.runs_in_flight:
            world.turn()
        for number, history in enumerate(histories):
            history += world.got[b"c", turn * 100 + number, 0]
            history += [rng.randrange(50_000) for _ in range(30)]
    counters = world.core.counters
    assert counters.drift_tokens <= 0.02 * counters.predicted_tokens
    assert counters.cached_tokens > 0.6 * counters.prompt_tokens


def test_a_burst_on_one_new_prefix_goes_where_it_is_computed():
    world = World(3)
    world.core.register(register("w0", max_running=256), 0.0)
    world.core.register(register("w1", max_running=256), 0.0)
    trunk = ids(*range(2000))
    names = set()
    for branch in range(5):
        effects = world.core.submit(b"c", Generate(id=branch, prompt=TokenPrompt(trunk + ids(branch))), 0.0)
        names |= {effect.name for effect in effects if isinstance(effect.message, Run)}
    assert len(names) == 1
