"""Random traffic through the core with simulated workers that may die: the report agrees with the core's counters."""

from __future__ import annotations

import random

import pytest

from radixrt.config import RouterConfig
from radixrt.messages import Generate, Origin, Sampling, Score, TokenPrompt
from radixrt.report import Report, to_text
from radixrt.router.core.core import RouterCore
from radixrt.router.core.effects import Order
from radixrt.tree import RadixTree
from tests.router.sim_workers import SimWorker, ids, register

SUMS = ("requests", "prompt_tokens", "hit_tokens", "bound_tokens", "generated_tokens", "drift_tokens")


class Replay:
    def __init__(self, seed: int, pool: int) -> None:
        self.rng = random.Random(seed)
        self.report = Report(10**6)
        self.core = RouterCore(RouterConfig(api_key=("a:ka", "b:kb")), self.report, rng=self.rng)
        self.workers = {name: SimWorker(name, RadixTree(events=True), pool) for name in ("w0", "w1")}
        self.trunks = [ids(*(self.rng.randrange(9) for _ in range(60))) for _ in range(4)]
        for name in self.workers:
            self.perform(self.core.register(register(name, total_pages=pool), 0.0))

    def perform(self, effects) -> None:
        for effect in effects:
            if isinstance(effect, Order) and effect.name in self.workers:
                self.workers[effect.name].obey(effect.message)

    def submit(self, number: int) -> None:
        rng = self.rng
        tail = ids(*(rng.randrange(3) for _ in range(rng.randrange(1, 12))))
        prompt = TokenPrompt(rng.choice(self.trunks)[: 4 * rng.randrange(61)] + tail)
        common = {
            "id": number,
            "prompt": prompt,
            "origin": Origin(rng.choice(("", "agent")), "", rng.randrange(3)),
            "api_key": rng.choice(("ka", "kb")),
        }
        if rng.random() < 0.2:
            request = Score(choices=[TokenPrompt(ids(*range(1, n))) for n in (2, 4, 5)], **common)
        else:
            request = Generate(sampling=Sampling(max_tokens=rng.randrange(1, 20)), n=rng.choice((1, 1, 3)), **common)
        self.perform(self.core.submit(b"c", request, 0.0))

    def step(self) -> None:
        for name, worker in list(self.workers.items()):
            self.perform(self.core.step(name, worker.step(self.rng), 0.0))

    def run(self, requests: int, *, kill: bool) -> None:
        for number in range(requests):
            self.submit(number)
            if number % 7 == 3:
                self.perform(self.core.cancel(b"c", number - 2))
            if kill and number == requests // 2:
                del self.workers["w1"]
                self.perform(self.core.leave("w1", 0.0))
            if self.rng.random() < 0.7:
                self.step()
        while self.core.runs_in_flight:
            self.step()


@pytest.mark.parametrize(
    ("seed", "pool", "kill"), [(0, 10_000, False), (1, 200, False), (2, 10_000, True), (3, 300, True)]
)
def test_the_report_agrees_with_the_core(seed, pool, kill):
    replay = Replay(seed, pool)
    replay.run(150, kill=kill)
    counters, data = replay.core.counters, replay.report.to_json()
    total = data["total"]
    assert (counters.redispatched > 0) is kill and counters.cancelled > 0 and counters.failed == 0
    for field, name in (
        ("prompt_tokens", "prompt_tokens"),
        ("cached_tokens", "hit_tokens"),
        ("generated_tokens", "generated_tokens"),
        ("predicted_tokens", "predicted_tokens"),
        ("drift_tokens", "drift_tokens"),
    ):
        assert getattr(counters, field) == total[name] > 0
    assert total["hit_tokens"] <= total["bound_tokens"] <= total["prompt_tokens"]
    for group in ("tenants", "programs", "workers"):
        for name in SUMS:
            assert sum(row[name] for row in data[group]) == total[name], (group, name)
    for row in (total, *data["tenants"], *data["programs"], *data["workers"]):
        assert sum(row["misses"].values()) == row["prompt_tokens"] - row["hit_tokens"]
        assert min(row["misses"].values()) >= 0
    assert "tenant a" in to_text(data)


def test_small_pools_show_as_evictions():
    evicted = []
    for pool in (200, 10_000):
        replay = Replay(4, pool)
        replay.run(150, kill=False)
        evicted.append(replay.report.to_json()["total"]["misses"]["evicted"])
    assert evicted[0] > 2 * evicted[1]


def test_what_the_tenants_see_adds_up():
    replay = Replay(5, 10_000)
    replay.run(80, kill=False)
    whole, parts = replay.report.to_json(), [replay.report.to_json(tenant) for tenant in ("a", "b")]
    for name in SUMS:
        assert whole["total"][name] == sum(part["total"][name] for part in parts)
    for part, other in zip(parts, ("tenant b", "tenant a"), strict=True):
        assert other not in to_text(part)
