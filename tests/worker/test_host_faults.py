"""Pages in host memory under random loads with faults: steps that fail, requests that fail or are aborted, pins, forks,
drafts, scores, an emptied cache. The checking fake runner compares every KV slot that is read with its prefix."""

from __future__ import annotations

import random

import numpy as np
import pytest

from radixrt.worker.scheduler.scheduler import Scheduler
from tests.worker.engine import draw
from tests.worker.foretold import Prophet
from tests.worker.test_simulation import VOCAB, Bench, alone, overlaps, random_prompt  # noqa: F401


class Rough(Bench):
    """A bench whose steps fail now and then: at launch, when their result is read, or for one request alone."""

    def __init__(self, rng: random.Random, faults: float, *args, drafts: bool = False, **settings) -> None:
        super().__init__(*args, **settings)
        self.rng = rng
        self.faults = faults
        if drafts:
            drafter = Prophet(4, self.overlaps, truth=3, seed=rng.randrange(1 << 30), vocab_size=VOCAB)
            self.scheduler = Scheduler(self.cache, self.scheduler.limits, drafter)
            self.runner.histories = self.scheduler.histories

    def step(self) -> int:
        plan = self.plan()
        self.cache.check()
        finishing, self.inflight = self.inflight, None
        if plan is not None:
            if self.rng.random() < self.faults:
                self._fail(plan)
            else:
                self.inflight = plan, self.runner.launch(plan)
        if finishing:
            self._finish_step(*finishing)
        if self.inflight:
            draw(self.scheduler, self.runner, self.inflight[0])
        if not self.runner.overlaps:
            finishing, self.inflight = self.inflight, None
            if finishing:
                self._finish_step(*finishing)
        return 0 if plan is None else len(plan.tokens)

    def _finish_step(self, plan, wait) -> None:
        if self.rng.random() < self.faults:  # as `Worker._fail`
            behind, self.inflight = self.inflight, None
            if behind is not None:
                self._fail(behind[0])
            self._fail(plan)
            return

        def read():
            result = wait()
            if self.rng.random() < self.faults:
                result.failed[self.rng.randrange(len(plan.requests))] = "not finite"
            return result

        self.finish_step(plan, read)

    def _fail(self, plan) -> None:
        for output in self.scheduler.fail(plan, "broken"):
            self.finish[output.id] = output.finish
        self.cache.check()


def load(
    seed: int, page_size: int, pages: int, host: int, faults: float, **states: int
) -> tuple[Rough, dict[int, list[int]]]:
    """A bench after a random load, and what each request gives alone. `states`: `Bench`'s `states`, `host_states`."""
    rng = random.Random(seed)
    rows = rng.choice([1, 3, 8])
    bench = Rough(
        rng, faults, max(pages // page_size, 16), page_size, rng.choice([5, 16, 64]), rows, max_len=60, host=host,
        drafts=rng.random() < 0.5, **states,
    )  # fmt: skip
    trunks = [[rng.randint(3, 9) for _ in range(30)] for _ in range(3)]
    bench.cache.retained.continuation_rate = 1.0
    expected: dict[int, list[int]] = {}
    room = bench.cache.total_pages * page_size
    now = 0.0
    for id in range(80):
        prompt = random_prompt(rng, trunks)
        want = rng.randint(0, min(10, room - len(prompt)) if room > len(prompt) else 0)
        if len(prompt) + want > min(room, 60):
            continue
        extra = {"group": rng.choice([0, 1, 2])}
        if rng.random() < 0.1:
            extra["score_from"] = rng.randint(1, len(prompt))
        namespace = rng.choice(["", "b"])
        bench.add(id, prompt, want, namespace=namespace, **extra)
        expected[id] = alone(prompt, want)
        for _ in range(rng.randint(0, 4)):
            bench.step()
        now += 1
        chance = rng.random()
        if chance < 0.1:
            bench.scheduler.abort(rng.choice(list(expected)))
        elif chance < 0.15:
            bench.cache.clear()
        elif chance < 0.25:
            ids = np.array(prompt, np.int32).tobytes()
            bench.cache.pins.add(namespace, ids, rng.choice([2.0, 20.0]), now, rng.randint(1, 3))
        bench.cache.pins.expire(now)
        bench.cache.check()
    bench.drain()
    return bench, expected


@pytest.mark.parametrize("host", [1, 10, 100, 1000])
@pytest.mark.parametrize(("page_size", "pages"), [(1, 40), (1, 90), (4, 120), (16, 400)])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_random_faults(seed: int, page_size: int, pages: int, host: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr("radixrt.worker.scheduler.scheduler.MIN_FETCHED_TOKENS", rng.choice([1, 10, 512]))
    monkeypatch.setattr("radixrt.worker.scheduler.scheduler.MAX_OTHER_TOKENS", rng.choice([1, 10, 2048]))
    monkeypatch.setattr("radixrt.worker.scheduler.plan_builder.MAX_SCORED_TOKENS", 10)
    bench, expected = load(seed, page_size, pages, host, rng.choice([0.0, 0.03, 0.1]))
    for id, tokens in expected.items():
        found = bench.tokens[id]
        assert found == tokens[: len(found)], "what comes out is what it gives alone"
        assert bench.finish.get(id) != "length" or found == tokens
    assert bench.cache.tier.tree.leased_tokens == 0, "nothing is held for ever"
