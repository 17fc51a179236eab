"""Pins: what they keep, for how long, how much, and that they never stand in a request's way."""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace

import numpy as np
import pytest

from radixrt.messages import Run, Sampling
from radixrt.worker.cache.page_cache import PageCache
from tests.worker.test_simulation import Bench

A, B = "a\nm\n", "b\nm\n"


class Pinning(Bench):
    """A bench whose requests may pin, as the worker's loop does it; `now` is its clock."""

    now = 0.0

    def pinning(self, id: int, prompt: list[int], pin: list[tuple[int, float]], namespace: str = A, **extra) -> None:
        ids = np.array(prompt, dtype=np.int32).tobytes()
        run = Run(id=id, namespace=namespace, ids=ids, prompt_len=len(prompt), sampling=Sampling(), pin=pin)
        self.add(id, prompt, namespace=namespace, **extra)
        self.cache.pins.want(run)

    def step(self) -> int:
        computed = super().step()
        for id in self.finish:
            self.cache.pins.settle(id, self.now)
        self.cache.pins.expire(self.now)
        self.cache.check()
        return computed

    def until_idle(self) -> None:
        while self.step() or self.scheduler.has_work:
            pass

    def ask(self, id: int, prompt: list[int], pin: list[tuple[int, float]] = (), namespace: str = A) -> int:
        """Run one request alone; its hit."""
        self.pinning(id, prompt, list(pin), namespace, max_tokens=2)
        self.until_idle()
        return self.cached[id]

    def flood(self, first: int, count: int = 8) -> None:
        """Requests that together need the whole pool several times over."""
        for n in range(first, first + count):
            self.ask(n, [n] * 100, namespace=B)


PROMPT = list(range(3, 43))


def test_a_pin_outlives_a_flood_until_its_time():
    bench = Pinning()
    bench.ask(1, PROMPT, [(30, 300.0)])
    bench.now = 299.0
    bench.flood(100)
    assert bench.cache.prefixes.tree.match(A, np.array(PROMPT, dtype=np.int32)).length == 30, "and not a token more"
    assert bench.cache.pins.tokens("a") == bench.cache.leased_pages == 30
    bench.now = 300.0
    bench.flood(200)
    assert bench.cache.leased_pages == 0 and not len(bench.cache.pins)
    assert bench.ask(2, PROMPT) == 0


def test_paths_of_pins_that_overlap_are_bounded_together(monkeypatch):
    """The oldest go, although all of them hold no more than a path."""
    monkeypatch.setattr("radixrt.worker.cache.pins.MAX_OVERLAP", 3)
    bench = Pinning()
    pins = bench.cache.pins
    for n in range(20):
        bench.ask(n, PROMPT, [(20 + n, 300.0)])
    assert pins.tokens("a") == 39 and 39 + 38 + 37 + 36 == 3 * pins.tenant_tokens
    assert len(pins) == 4
    assert bench.ask(30, [5] * 40, [(40, 300.0)], namespace=B) == 0 and pins.tokens("b") == 40


def test_a_hit_renews_a_pin():
    bench = Pinning()
    bench.ask(1, PROMPT, [(30, 300.0)])
    bench.now = 200.0
    assert bench.ask(2, [*PROMPT, 7, 8], [(40, 300.0)]) == 40
    bench.now = 450.0
    bench.step()
    assert len(bench.cache.pins) == 2
    bench.now = 500.0
    bench.step()
    assert not len(bench.cache.pins)


def test_the_longer_time_counts():
    bench = Pinning()
    bench.ask(1, PROMPT, [(30, 3600.0)])
    bench.ask(2, PROMPT, [(30, 300.0)])
    bench.now = 301.0
    bench.step()
    assert bench.cache.pins.tokens("a") == 30


def test_a_request_that_goes_on_elsewhere_renews_nothing():
    bench = Pinning()
    bench.ask(1, PROMPT, [(30, 300.0)])
    bench.now = 200.0
    bench.ask(2, [*PROMPT[:29], 99, 98], [(5, 300.0)])
    bench.ask(3, PROMPT, [(5, 300.0)], B)
    bench.now = 300.0
    bench.step()
    assert bench.cache.pins.tokens("a") == 5


def test_what_pins_share_counts_once():
    bench = Pinning()
    bench.ask(1, PROMPT, [(20, 300.0), (30, 3600.0), (40, 300.0)])
    assert (len(bench.cache.pins), bench.cache.pins.tokens("a")) == (3, 40)
    bench.now = 300.0
    bench.step()
    assert (len(bench.cache.pins), bench.cache.pins.tokens("a")) == (1, 30)


def test_the_share_of_a_tenant():
    """50 of 200 pages: the oldest go first; a prefix that is longer is pinned as far as it may be."""
    bench = Pinning()
    for id, first in ((1, 100), (2, 200), (3, 300)):
        bench.ask(id, [first] * 20, [(20, 300.0)])
    bench.ask(4, [100] * 20 + [5], [(20, 300.0)])
    bench.ask(5, [400] * 20, [(20, 300.0)], B)
    assert (bench.cache.pins.tokens("a"), bench.cache.pins.tokens("b")) == (40, 20)
    bench.flood(1000)
    hits = [bench.cache.prefixes.tree.match(A, np.full(20, first, np.int32)).length for first in (100, 200, 300)]
    assert hits == [20, 0, 20], "the second was used the longest ago"
    bench.ask(6, list(range(500, 580)), [(80, 300.0)])
    assert bench.cache.pins.tokens("a") == 50


def test_the_share_of_all_tenants():
    bench = Pinning()
    for n in range(6):
        bench.ask(n, [n + 3] * 50, [(50, 300.0)], f"{n}\nm\n")
    assert [bench.cache.pins.tokens(str(n)) for n in range(6)] == [0, 0, 0, 0, 50, 50]


def test_pins_go_before_a_request_has_to():
    bench = Pinning(rows=2)
    bench.ask(1, [9] * 50, [(50, 300.0)])
    # 60 pages each when they come, 100 when they end: together they need every page.
    for n in (2, 3):
        bench.add(n, [n] * 60, max_tokens=40)
    bench.until_idle()
    assert bench.scheduler.preemptions == 0 and not len(bench.cache.pins)
    assert all(len(bench.tokens[n]) == 40 for n in (2, 3))


def test_a_request_as_large_as_the_pool():
    bench = Pinning(pages=120)
    bench.ask(1, [9] * 30, [(30, 300.0)])
    bench.add(2, [7] * 100, max_tokens=20)
    bench.until_idle()
    assert len(bench.tokens[2]) == 20


def test_pins_stay_where_others_can_go():
    bench = Pinning()
    bench.ask(1, [9] * 50, [(50, 300.0)])
    bench.flood(100)
    assert bench.cache.pins.tokens("a") == 50


def test_what_is_forgotten_is_pinned_no_more():
    bench = Pinning()
    bench.ask(1, PROMPT, [(30, 300.0)])
    bench.ask(2, [50] * 20, [(20, 300.0)])
    request = SimpleNamespace(namespace=A, tokens=array("i", PROMPT + bench.tokens[1]))
    bench.cache.requests.forget(request, 41, 30)
    assert bench.cache.pins.tokens("a") == 50, "what is pinned ends before it"
    bench.cache.requests.forget(request, 29, 29)
    assert bench.cache.pins.tokens("a") == 50, "there is nothing beyond it"
    bench.cache.requests.forget(request, 41, 29)
    assert bench.cache.pins.tokens("a") == 20
    assert bench.cache.prefixes.tree.match(A, np.array(PROMPT, dtype=np.int32)).length == 29
    bench.cache.check()


def test_what_only_begins_alike_stays_pinned():
    """Nobody could forget what it has in common with the path."""
    bench = Pinning()
    bench.ask(1, PROMPT, [(30, 300.0)])
    bench.ask(2, [*PROMPT[:10], *[50] * 20], [(15, 300.0)])
    bench.ask(3, PROMPT[:10], [(10, 300.0)])
    bench.ask(4, [*PROMPT, *[51] * 10], [(45, 300.0)])
    assert len(bench.cache.pins) == 4
    bench.cache.requests.forget(SimpleNamespace(namespace=A, tokens=array("i", PROMPT)), 40)
    assert bench.cache.pins.tokens("a") == 15 and len(bench.cache.pins) == 1
    bench.cache.check()


def test_what_a_request_was_to_compute_is_not_pinned_after_its_step_has_failed():
    bench = Pinning(chunk=100)
    bench.pinning(1, PROMPT, [(20, 300.0)], max_tokens=2)
    plan = bench.scheduler.plan()
    bench.scheduler.abort(1)
    bench.cache.pins.settle(1, 0.0)
    assert bench.cache.pins.tokens("a") == 20
    bench.scheduler.fail(plan, "out of memory")
    assert bench.cache.pins.tokens("a") == 0 and bench.cache.prefixes.tree.tokens == 0
    bench.cache.check()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_shares_at_the_ends(share):
    bench = Pinning()
    bench.cache = PageCache(201, 1, 4, 128, max_pinned_share=share)
    assert bench.cache.pins.tenant_tokens == 200 * share
    with pytest.raises(ValueError, match="max_pinned_share"):
        PageCache(201, 1, 4, 128, max_pinned_share=1.1)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_random_loads(seed, page_size):
    """Accounts are exact after every step, whatever is pinned, dropped, renewed and evicted; all requests end with what
    they would have said alone, as the bench checks."""
    rng = random.Random(seed)
    bench = Pinning(pages=200 // page_size, page_size=page_size)
    trunks = [[rng.randrange(3, 900) for _ in range(60)] for _ in range(5)]
    most = 0
    for id in range(120):
        trunk = rng.choice(trunks)
        prompt = trunk[: rng.randrange(1, 60)] + [rng.randrange(3, 900) for _ in range(rng.randrange(8))]
        pin = [(rng.randint(1, len(prompt)), rng.choice([5.0, 60.0])) for _ in range(rng.randrange(4))]
        bench.pinning(id, prompt, pin, f"{rng.randrange(3)}\nm\n", max_tokens=rng.randrange(1, 20))
        for _ in range(rng.randrange(12)):
            bench.now += rng.random()
            if rng.random() < 0.05:
                victim = rng.randrange(id + 1)
                if bench.scheduler.abort(victim):
                    bench.cache.pins.settle(victim, bench.now)
            bench.step()
            most = max(most, len(bench.cache.pins))
    bench.until_idle()
    assert most > 8
    bench.cache.pins.expire(bench.now + 61)
    bench.cache.check()
    assert (bench.cache.leased_pages, len(bench.cache.pins), bench.scheduler.num_running) == (0, 0, 0)
