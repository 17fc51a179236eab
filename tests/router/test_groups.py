"""Branches of one fork under load: they are computed together, by one worker, and hold nobody up for long."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from sim_workers import ids, register

from radixrt.config import RouterConfig
from radixrt.messages import Generate, Load, Output, Run, Sampling, StepDone, TokenPrompt
from radixrt.router.core.core import RouterCore
from radixrt.router.placement import fork_groups
from radixrt.router.placement.cost import Candidate
from radixrt.router.placement.fork_groups import Group, Groups
from radixrt.router.programs.state_store import Key
from radixrt.worker.cache.page_cache import PageCache
from radixrt.worker.execution.fake_runner import FakeRunner
from radixrt.worker.request import Request
from radixrt.worker.scheduler.scheduler import Limits, Scheduler

PAGES, CHUNK = 60_000, 256
STATE = Key("default", "s" * 16, 1)
OTHER = 1000
"""Request ids from here on are others'."""


@dataclass
class Engine:
    """A worker's scheduler and cache, behind the core. `order` is the ids of runs as their first token comes."""

    name: str
    order: list[int] = field(default_factory=list)
    computed: int = 0
    seq: int = 0

    def __post_init__(self) -> None:
        self.runner = FakeRunner(PAGES + 1, 1, 50_000, 4096)
        self.cache = PageCache(PAGES + 1, 1, 256, 4096)
        self.scheduler = Scheduler(self.cache, Limits(CHUNK, 256))
        self.runner.bind(self.cache.requests.table)
        self.newest_run = 0

    def obey(self, run: Run) -> None:
        self.newest_run = run.id
        self.scheduler.add(Request(run, run.prompt_len + run.sampling.max_tokens, frozenset()))

    def step(self) -> StepDone:
        outputs: list[Output] = []
        if (plan := self.scheduler.plan()) is not None:
            self.computed += len(plan.tokens)
            outputs = self.scheduler.apply(plan, self.runner.launch(plan)())
        self.order += [output.id for output in outputs if output.tokens and output.id not in self.order]
        self.cache.prefixes.tree.drain_events()
        s = self.scheduler
        room = self.cache.free_pages, 0, PAGES
        counts = s.num_running, s.num_waiting, s.queued_tokens
        load = Load(*counts, *room, 10_000.0, 0.01, newest_run=self.newest_run)
        return StepDone(outputs, load)


class World:
    """A core with two engines; a program's branches come among others' requests."""

    def __init__(self) -> None:
        self.core = RouterCore(RouterConfig(max_queued_requests=100_000))
        self.engines = {name: Engine(name) for name in ("w0", "w1")}
        for name in self.engines:
            self.core.register(register(name, max_running=256, total_pages=PAGES), 0.0)
        self.runs: dict[tuple[str, int], int] = {}
        """(worker, run) -> request."""
        self.rng = random.Random(7)

    def submit(self, id: int, prompt: list[int], now: float, state: Key | None = None) -> str:
        message = Generate(id=id, prompt=TokenPrompt(ids(*prompt)), sampling=Sampling(max_tokens=2, ignore_eos=True))
        (order,) = self.core.submit(b"c", message, now, state)
        self.engines[order.name].obey(order.message)
        self.runs[order.name, order.message.id] = id
        return order.name

    def flood(self, first: int, count: int, now: float) -> None:
        for id in range(first, first + count):
            self.submit(id, self.rng.choices(range(50_000), k=100), now)

    def run(self, now: float) -> list[int]:
        """To the end; requests in the order of their first tokens, by the step at which they came."""
        came = []
        for _ in range(10_000):
            for name, engine in self.engines.items():
                before = len(engine.order)
                self.core.step(name, engine.step(), now)
                came += [self.runs[name, run] for run in engine.order[before:]]
            if not self.core.runs_in_flight:
                return came
        raise AssertionError("no end")


def fork_under_load(world: World, branches: int = 8, flood: int = 40, trunk_tokens: int = 60) -> tuple[set, list[int]]:
    """A fork whose branches come one by one, others' requests between them: the branches' workers, and who was served
    when."""
    world.flood(OTHER, flood, 0.0)
    trunk = world.rng.choices(range(50_000), k=trunk_tokens)
    world.core.groups.open(STATE, branches, 0.0)
    names = set()
    for branch in range(branches):
        own = world.rng.choices(range(50_000), k=20)
        names.add(world.submit(branch, [*trunk, *own], 0.01 * branch, STATE))
        world.flood(OTHER + (branch + 1) * 100, flood, 0.01 * branch)
    return names, world.run(1.0)


def test_branches_of_a_fork_are_served_together_by_one_worker():
    names, came = fork_under_load(World())
    places = [came.index(branch) for branch in range(8)]
    between = [id for id in came[min(places) : max(places)] if id >= OTHER]
    assert len(names) == 1, "their trunk is computed once"
    # The other worker's requests, and what shares a step with the first branches.
    assert len(between) <= 20, (places, len(came))


def test_who_came_before_a_fork_is_served_before_it_and_who_came_after_soon():
    world = World()
    _, came = fork_under_load(world)
    places = [came.index(branch) for branch in range(8)]
    first = [came.index(id) for id in range(OTHER, OTHER + 40)]
    assert sum(place > min(places) for place in first) <= 6, "a fork overtakes nobody that came before it"
    assert came.index(OTHER + 100) < max(places) + 40


def test_what_came_after_the_first_branch_sends_no_other_elsewhere():
    """Its worker's queue has grown by others' requests since, which the branch is queued before."""
    world = World()
    world.core.groups.open(STATE, 3, 0.0)
    names = []
    for branch, state in enumerate((STATE, STATE, None)):
        message = Generate(id=branch, prompt=TokenPrompt(ids(*range(60), 100 + branch)), sampling=Sampling())
        (order,) = world.core.submit(b"c", message, 0.1, state)
        names.append(order.name)
        world.core.step(names[0], StepDone([], Load(waiting=400, queued_tokens=40_000, prefill_rate=10_000.0)), 0.1)
    assert names[0] == names[1] != names[2]


def test_a_worker_as_a_group_sees_it():
    group, there = Group(1, 3, 1.0), Candidate(7, 0, 100, 2, 8, 1000, wanted_tokens=500)
    assert group.at_arrival(there) is there
    group.placed(there, 60)
    later = there._replace(queued_tokens=9000, requests=40, wanted_tokens=9500)
    assert group.at_arrival(later) == there._replace(queued_tokens=160, requests=3, wanted_tokens=560)
    assert group.at_arrival(there) == there, "nor more than there is"


def test_a_group_ends():
    world = World()
    world.core.groups.open(STATE, 2, 0.0)

    def group_of(id: int, now: float, state: Key | None = STATE) -> int:
        message = Generate(id=id, prompt=TokenPrompt(ids(1, 2, id)), sampling=Sampling(max_tokens=2))
        (order,) = world.core.submit(b"c", message, now, state)
        return order.message.group

    first = group_of(1, 0.5)
    assert first and group_of(2, 0.5, None) == 0 and group_of(3, 0.5, STATE._replace(tenant="other")) == 0
    assert group_of(4, 0.5) == first and group_of(5, 0.5) == 0, "so many as the fork has"
    world.core.groups.open(STATE, 2, 1.0)
    assert group_of(6, 1.0 + fork_groups.GROUP_SECONDS + 0.01) == 0, "too late"
    world.core.tick(3.0)
    assert len(world.core.groups) == 0


def test_few_sequences_are_admitted_together():
    forks = Groups()
    forks.open(STATE, 10_000, 0.0)
    joined = [forks.join(STATE, 50, 0.0) for _ in range(5)]
    assert [group is not None for group in joined] == [True, True, False, False, False]
    forks.open(STATE, 1, 0.0)
    forks.open(STATE._replace(number=2), 1, 0.0)
    assert forks.join(STATE._replace(number=2), 1, 0.0) is None, "one alone is no group"


def test_a_worker_remembers_few_groups(monkeypatch):
    monkeypatch.setattr("radixrt.worker.scheduler.queue.MAX_GROUPS", 3)
    engine = Engine("w")
    arrivals = []
    for id, group in enumerate((1, 2, 3, 1, 4, 1, 0)):
        prompt = np.arange(1, 5, dtype=np.int32).tobytes()
        run = Run(id=id, namespace="", ids=prompt, prompt_len=4, sampling=Sampling(max_tokens=1), group=group)
        request = Request(run, 5, frozenset())
        engine.scheduler.add(request)
        engine.scheduler._clock += 10
        arrivals.append(request.age[0])
    assert arrivals == [0, 10, 20, 0, 40, 50, 60]


def test_a_fork_without_end_starves_nobody():
    """Branches of one fork come for ever, more than can be computed; what came after the first of them is served."""
    world = World()
    trunk = world.rng.choices(range(50_000), k=60)
    world.core.groups.open(STATE, 1_000_000, 0.0)
    victims = {999_998, 999_999}
    for turn in range(80):
        now = turn * 0.05
        for branch in range(15):
            world.submit(turn * 100 + branch, [*trunk, *world.rng.choices(range(50_000), k=60)], now, STATE)
        if turn == 1:
            for victim in victims:
                world.submit(victim, world.rng.choices(range(50_000), k=300), now)
        for name, engine in world.engines.items():
            before = len(engine.order)
            world.core.step(name, engine.step(), now)
            victims -= {world.runs[name, run] for run in engine.order[before:]}
        if turn > 1 and not victims:
            return
    raise AssertionError("they wait still")
