"""Random changes of LoRA adapters while workers come, go, are slow, and fail: what must hold whatever happens."""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from sim_workers import ids, register

from radixrt.config import RouterConfig
from radixrt.messages import (
    Abort,
    Adapter,
    AdapterLoaded,
    ChangeAdapter,
    Error,
    Generate,
    Info,
    Load,
    LoadAdapter,
    Output,
    Run,
    Sampling,
    StepDone,
    TokenPrompt,
    UnloadAdapter,
)
from radixrt.router.core.core import RouterCore
from radixrt.router.core.effects import Order

MOST = 2
NAMES = ("a", "b", "c")


@dataclass
class Worker:
    """A worker as `AdapterSlots` is: MOST + 1 slots, orders one after the other, each when its turn comes."""

    name: str
    orders: deque = field(default_factory=deque)
    loaded: dict[tuple[str, int], Adapter] = field(default_factory=dict)
    runs: dict[int, tuple[str, int]] = field(default_factory=dict)
    leaving: set[tuple[str, int]] = field(default_factory=set)
    waiting: deque[Adapter] = field(default_factory=deque)

    def obey(self) -> None:
        """Take the next order. Asserts that a run's adapter is there when it arrives."""
        match self.orders.popleft():
            case Run(id=id, adapter=adapter, version=version):
                if adapter:
                    assert (adapter, version) in self.loaded, f"{self.name} was asked for what it does not have"
                self.runs[id] = adapter, version
            case Abort(ids=gone):
                for id in gone:
                    self.runs.pop(id, None)
            case UnloadAdapter(name=name, version=version):
                if self.loaded.pop((name, version), None):
                    self.leaving.add((name, version))
            case LoadAdapter(adapter=adapter):
                if adapter not in self.waiting:
                    self.waiting.append(adapter)

    def load(self, fails: bool) -> AdapterLoaded | None:
        """Load the next adapter if there is a slot."""
        self.leaving &= set(self.runs.values())
        adapter = self.waiting[0]
        key = adapter.name, adapter.version
        full = len(self.loaded) + len(self.leaving) > MOST
        if full and self.leaving and key not in self.loaded:
            return None
        self.waiting.popleft()
        if (full or fails) and key not in self.loaded:
            return AdapterLoaded(adapter, "no slot is free" if full else "it failed")
        self.loaded[key] = adapter
        return AdapterLoaded(adapter)


class Simulation:
    def __init__(self, seed: int, fails: float) -> None:
        self.rng, self.fails = random.Random(seed), fails
        self.core = RouterCore(RouterConfig(allow_runtime_lora_updating=True))
        self.workers: dict[str, Worker] = {}
        self.numbers, self.now = itertools.count(1), 0.0
        self.asked: dict[int, str] = {}
        """Changes and requests that have no last reply yet."""
        self.submitted: list[int] = []

    def perform(self, effects) -> None:
        for effect in effects:
            if isinstance(effect, Order):
                if effect.name in self.workers:
                    self.workers[effect.name].orders.append(effect.message)
            elif isinstance(effect.message, Error | Info):
                assert self.asked.pop(effect.message.id), "a second reply"
            else:
                for delta in effect.message.items:
                    if delta.finish:
                        assert self.asked.pop(delta.id)

    def join(self) -> None:
        name = f"w{next(self.numbers)}" if self.rng.random() < 0.5 else self.rng.choice(["w-a", "w-b"])
        if name in self.workers or len(self.workers) == 3:
            return
        first = Adapter("a")
        self.workers[name] = Worker(name, loaded={("a", 0): first})
        info = register(name, pid=next(self.numbers), adapters=[first], max_loras=MOST)
        self.perform(self.core.register(info, self.now))

    def die(self) -> None:
        if self.workers:
            name = self.rng.choice(sorted(self.workers))
            del self.workers[name]
            self.perform(self.core.leave(name, self.now))

    def come_and_go(self) -> None:
        """A worker is not heard for a while. What was sent to it still arrives."""
        if self.workers:
            name = self.rng.choice(sorted(self.workers))
            self.perform(self.core.lose([name], self.now))
            if self.rng.random() < 0.5:
                self.change()
            self.perform(self.core.heartbeat(name, self.now))

    def change(self) -> None:
        id, load = next(self.numbers), self.rng.random() < 0.7
        self.asked[id] = "change"
        message = ChangeAdapter(id=id, name=self.rng.choice(NAMES), path="/x" if load else "", in_place=True)
        self.perform(self.core.change_adapter(b"admin", message, int(self.now)))

    def submit(self) -> None:
        id = next(self.numbers)
        self.asked[id] = "request"
        sampling = Sampling(max_tokens=4, seed=1)
        model = self.rng.choice((*NAMES, ""))
        message = Generate(id=id, prompt=TokenPrompt(ids(id, 2)), sampling=sampling, model=model, text=False)
        self.perform(self.core.submit(b"c", message, self.now))

    def work(self, worker: Worker) -> None:
        what = self.rng.random()
        if worker.orders and what < 0.5:
            worker.obey()
        elif worker.waiting and what < 0.8:
            if (answer := worker.load(self.rng.random() < self.fails)) is not None:
                self.perform(self.core.adapter_loaded(worker.name, answer, self.now))
        elif worker.runs:
            id = self.rng.choice(sorted(worker.runs))
            del worker.runs[id]
            self.perform(self.core.step(worker.name, StepDone([Output(id, [7], "stop")], Load()), self.now))

    def step(self) -> None:
        self.now += self.rng.random() * 0.2
        event = self.rng.random()
        for at, act in ((0.02, self.join), (0.03, self.die), (0.04, self.come_and_go), (0.1, self.change)):
            if event < at:
                return act()
        if event < 0.25:
            return self.submit()
        if event < 0.28:
            return self.perform(self.core.tick(self.now))
        if self.workers:
            self.work(self.rng.choice(list(self.workers.values())))

    def settle(self) -> None:
        """Nothing happens any more, and nothing fails: everything that was asked is done."""
        self.fails = 0.0
        self.join()
        for _ in range(200):
            self.now += 1.0
            for worker in self.workers.values():
                self.perform(self.core.heartbeat(worker.name, self.now))
                for _ in range(8):
                    self.work(worker)
            self.perform(self.core.tick(self.now))


@pytest.mark.parametrize("fails", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens(seed, fails):
    simulation = Simulation(seed, fails)
    for _ in range(3000):
        simulation.step()
    simulation.settle()
    assert simulation.workers and not simulation.asked, "each change and each request has its one reply"
    wanted = simulation.core.workers.wanted
    for worker in simulation.workers.values():
        for name, version in worker.loaded:
            assert version == simulation.core.workers.version(name), "nothing is left of former versions"
        assert len(worker.loaded) <= MOST
        known = {(a.name, a.version) for a in wanted.values() if a.path}
        assert known <= worker.loaded.keys(), "what could not be loaded was tried again"
        (member,) = [m for m in simulation.core.workers if m.name == worker.name]
        assert member.adapters == worker.loaded.keys(), "the router knows what it has"
