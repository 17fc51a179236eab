"""Snapshots of recurrent states: the accounting under random loads, and who goes on from where. The fake runner checks
that each request goes on from the state of its own prefix."""

from __future__ import annotations

import random

import pytest

from radixrt.worker import branching
from tests.worker.test_simulation import Bench, alone, overlaps  # noqa: F401


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots at nearly every branching point."""
    monkeypatch.setattr(branching, "LEAST", 2)
    monkeypatch.setattr(branching, "TAIL", 2)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("pages", [24, 48, 400])
@pytest.mark.parametrize("seed", range(12))
def test_random_load(seed: int, pages: int, page_size: int, often: None) -> None:
    rng = random.Random(seed)
    pages, states = max(pages // page_size, 16), rng.choice([1, 2, 5, 40])
    chunk, rows = rng.choice([5, 16, 64]), rng.choice([1, 3, 8])
    bench = Bench(pages, page_size, chunk, rows, max_len=60, states=states)
    trunks = [[rng.randint(3, 9) for _ in range(30)] for _ in range(3)]
    expected: dict[int, list[int]] = {}
    aborted = set()
    room = min(bench.cache.total_pages * page_size, 60)
    for id in range(60):
        prompt = rng.choice(trunks)[: rng.randint(0, 30)] + [rng.randint(3, 9) for _ in range(rng.randint(1, 12))]
        want = rng.randint(0, 10)
        if len(prompt) + want > room:
            continue
        more = {"score_from": rng.randint(1, len(prompt))} if rng.random() < 0.1 else {}
        more |= {"pin": [(rng.randint(1, len(prompt)), 1.0)]} if rng.random() < 0.1 else {}
        bench.add(id, prompt, want, namespace=rng.choice(["", "b"]), **more)
        expected[id] = alone(prompt, want)
        for _ in range(rng.randint(0, 3)):
            bench.step()
        if rng.random() < 0.1 and bench.scheduler.abort(victim := rng.choice(list(expected))):
            aborted.add(victim)
            bench.cache.check()
    bench.drain()
    assert bench.cache.leased_pages == 0 and bench.cache.states.live == 0
    for id, tokens in expected.items():
        if id in aborted:
            assert bench.tokens[id] == tokens[: len(bench.tokens[id])]
        else:
            assert (bench.tokens[id], bench.finish[id]) == (tokens, "length")
