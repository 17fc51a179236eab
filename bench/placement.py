"""Placement in simulated time: the router's state machine and complete workers with a fake runner, whose steps take
about as long as those of an 8B model on an H200. There are no sockets, and results do not depend on the machine.

    python -m bench.placement [--seeds 2] [--quick] [--states 60] [--host 600000] [--loads chats,trees]

Requests arrive at random times, at a rate that keeps four workers busy for 70 to 100% of the time (bursts: for half of
it); only agents send their next request as soon as they have an answer. The router's choice is compared with: most
hits, unless that worker has 1.5 times as many requests as the mean (as cache-aware routers do); fewest requests; and
round robin. `infinite` is the hit rate of one cache of unlimited size.

With `--states`, each worker has so many recurrent states, as for a model with linear attention, and the router's choice
is compared with the same by all cached tokens, whether they can be continued or not. With `--host`, each worker has
host memory for so many tokens, which are copied back at some 50 GB/s. It is compared with one that keeps contexts for
their next turns all the same, and with one without host memory. With both, host memory has as many states for its
tokens as the device, and it is compared with one without.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import logging
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.common import save, table
from radixrt.config import RouterConfig, WorkerConfig
from radixrt.messages import Deltas, Generate, Register, Sampling, TokenPrompt
from radixrt.router.core.core import RouterCore
from radixrt.router.core.effects import Effect, Order
from radixrt.router.placement import cost
from radixrt.router.placement.cost import Candidate
from radixrt.router.placement.index import StateCheckpoints
from radixrt.tree import RadixTree
from radixrt.worker import loop
from radixrt.worker.cache import page_cache, prefix_cache, retention
from radixrt.worker.cache.eviction import RETURNS
from radixrt.worker.execution import fake_runner
from radixrt.worker.execution.fake_runner import FakeRunner
from radixrt.worker.loop import Identity, Worker
from radixrt.worker.scheduler import finish, queue, scheduler
from radixrt.worker.scheduler.scheduler import Limits
from radixrt.worker.setup import most_running

WORKERS, CACHE, BUDGET, ROWS = 4, 300_000, 8192, 256
PREFILL_RATE, DECODE_SECONDS, EACH_SECONDS = 40_000.0, 0.0043, 0.00003
FETCH_RATE = 750_000.0
LINK_SECONDS = 0.0003
VOCAB = 32_000
TENANTS = 6
THINK_SECONDS = 2.0


class Clock:
    """Simulated time, in place of the module `time`. It is advanced by events, and by the steps of workers."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeLink:
    """A worker's link to the router, with messages as objects."""

    def __init__(self) -> None:
        self.inbox: list[Any] = []
        self.outbox: list[Any] = []

    def send(self, message: Any) -> None:
        self.outbox.append(message)

    def recv(self, timeout: float | None) -> Any:
        return self.inbox.pop(0) if self.inbox else None

    def broke(self) -> bool:
        return False

    def close(self) -> None: ...


@dataclass
class Asked:
    """A request and its results. Times are in seconds of simulated time."""

    ids: np.ndarray
    begun: float
    infinite: int
    """Its hit in a cache of unlimited size."""
    first: float | None = None
    """When the first token arrived."""
    ended: float = 0.0
    cached: int = 0
    generated: list[bytes] = field(default_factory=list)
    then: Callable[[np.ndarray], None] | None = None
    """Called with the prompt followed by the answer."""


class Fleet:
    """A router with its workers; a simulation of discrete events."""

    def __init__(
        self, clock: Clock, seed: int, states: int = 0, host: int = 0, cache: int = CACHE, longest: int = 60_000
    ) -> None:
        """`cache` and `host` are tokens of each worker, `longest` is the most tokens of a request."""
        self._states, self._host, self._cache, self._longest = states, host, cache, longest
        self.clock, self.asked, self.rng = clock, {}, np.random.default_rng(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers, self._ids = itertools.count(), itertools.count(1)
        self._all = RadixTree(1)
        keys = tuple(f"t{tenant}:{tenant}" for tenant in range(TENANTS))
        config = RouterConfig(max_queued_requests=1 << 20, worker_timeout=1e9, api_key=keys)
        self.core = RouterCore(config, rng=random.Random(seed))
        self._workers = {f"w{n}": self._join(f"w{n}") for n in range(WORKERS)}
        self._busy = dict.fromkeys(self._workers, False)

    def _join(self, name: str) -> Worker:
        runner = FakeRunner(
            self._cache + 1,
            1,
            VOCAB,
            prefill_rate=PREFILL_RATE,
            decode_step=DECODE_SECONDS,
            decode_each=EACH_SECONDS,
            overlaps=True,
            num_states=self._states and self._states + 1,
            num_host_pages=self._host and self._host + 1,
            num_host_states=self._states * self._host // CACHE and self._states * self._host // CACHE + 1,
            fetch_rate=FETCH_RATE,
        )
        rows = most_running(WorkerConfig(max_num_seqs=ROWS), runner)
        worker = Worker(
            runner, Identity(name, "m"), FakeLink, limits=Limits(BUDGET, rows), max_model_len=self._longest,
            eviction_policy=_policy[0],
        )  # fmt: skip
        worker._link = FakeLink()
        self.core.register(worker._registration, 0.0)
        worker._joined = True
        return worker

    def at(self, when: float, work: Callable[[], None]) -> None:
        """Schedule an event."""
        heapq.heappush(self._events, (when, next(self._numbers), work))

    def run(self) -> None:
        """Run all events, in order of time."""
        while self._events:
            when, _, work = heapq.heappop(self._events)
            self.clock.now = when
            work()

    def ask(
        self, ids: np.ndarray, tokens: int, then: Callable[[np.ndarray], None] | None = None, tenant: int = 0
    ) -> None:
        known = min(self._all.match("", ids).length, len(ids) - 1)
        self._all.insert("", ids, ids)
        number = next(self._ids)
        self.asked[number] = Asked(ids, self.clock.now, known, then=then)
        sampling = Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        prompt, key = TokenPrompt(ids.tobytes()), str(tenant)
        message = Generate(id=number, prompt=prompt, sampling=sampling, stream=True, text=False, api_key=key)
        self._perform(self.core.submit("", message, self.clock.now))

    def _perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Order):
                self.at(self.clock.now + LINK_SECONDS, lambda e=effect: self._deliver(e.name, e.message))
            else:
                assert isinstance(effect.message, Deltas), effect.message
                for delta in effect.message.items:
                    self._take(delta)

    def _take(self, delta: Any) -> None:
        asked = self.asked[delta.id]
        asked.generated.append(delta.ids)
        if delta.ids and asked.first is None:
            asked.first = self.clock.now
        if delta.finish:
            asked.cached, asked.ended = delta.usage.cached_tokens, self.clock.now
            whole = np.concatenate([asked.ids, np.frombuffer(b"".join(asked.generated), np.int32)])
            self._all.insert("", whole[:-1], whole[:-1])
            if asked.then is not None:
                asked.then(whole)

    def _deliver(self, name: str, message: Any) -> None:
        self._workers[name]._link.inbox.append(message)
        if not self._busy[name]:
            self._turn(name)

    def _turn(self, name: str) -> None:
        """Run one iteration of a worker's loop, which advances the clock to its end."""
        worker, link = self._workers[name], self._workers[name]._link
        self._busy[name] = True
        worker._receive()
        outputs = worker._step()
        worker._reply(outputs)
        for message in link.outbox:
            assert not isinstance(message, Register)
            then = self.clock.now + LINK_SECONDS
            self.at(then, lambda m=message: self._perform(self.core.step(name, m, self.clock.now)))
        link.outbox.clear()
        self.at(self.clock.now, lambda: self._end_turn(name))

    def _end_turn(self, name: str) -> None:
        """End a worker's iteration, and begin the next one if there is work. Only now does it receive messages that
        were delivered meanwhile."""
        worker = self._workers[name]
        self._busy[name] = bool(worker.scheduler.has_work or worker._inflight or worker._link.inbox)
        if self._busy[name]:
            self._turn(name)


# ---------------------------------------------------------------- loads


def tokens(fleet: Fleet, low: int, high: int | None = None) -> np.ndarray:
    count = low if high is None else int(fleet.rng.integers(low, high))
    return fleet.rng.integers(3, VOCAB, count, dtype=np.int32)


def chats(fleet: Fleet) -> Callable[[], None]:
    """Conversations of ten turns; more of them than fit in all caches."""

    def turn(history: np.ndarray, left: int) -> None:
        def then(whole: np.ndarray) -> None:
            if left:
                think = fleet.rng.exponential(THINK_SECONDS)
                fleet.at(fleet.clock.now + think, lambda: turn(whole, left - 1))

        new = tokens(fleet, 200, 2000) if len(history) else tokens(fleet, 1000, 4000)
        fleet.ask(np.concatenate([history, new]), int(fleet.rng.integers(16, 64)), then)

    return lambda: turn(np.empty(0, np.int32), 9)


def tenants(fleet: Fleet) -> Callable[[], None]:
    """Twenty system prompts of 2,000 to 10,000 tokens, some of which are used much more often than others."""
    prompts = [tokens(fleet, 2000, 10_000) for _ in range(20)]
    weights = 1 / np.arange(1, 21) ** 1.1

    def one() -> None:
        prompt = prompts[fleet.rng.choice(20, p=weights / weights.sum())]
        fleet.ask(np.concatenate([prompt, tokens(fleet, 100, 1200)]), 40)

    return one


def trunk(fleet: Fleet) -> Callable[[], None]:
    """Prompts that share 16,000 tokens, followed by few or many of their own."""
    shared = tokens(fleet, 16_000)

    def one() -> None:
        tail = tokens(fleet, 50, 300) if fleet.rng.random() < 0.7 else tokens(fleet, 1000, 6000)
        fleet.ask(np.concatenate([shared, tail]), int(fleet.rng.integers(8, 48)))

    return one


def trees(fleet: Fleet) -> Callable[[], None]:
    """Trees of thought on a prompt of 6,000 tokens: eight branches at once, three levels deep."""

    def fork(prefix: np.ndarray, depth: int) -> None:
        ended: list[np.ndarray] = []

        def then(whole: np.ndarray) -> None:
            ended.append(whole)
            if len(ended) == 8 and depth > 1:
                fork(ended[fleet.rng.integers(8)], depth - 1)

        for _ in range(8):
            fleet.ask(np.concatenate([prefix, tokens(fleet, 30, 400)]), int(fleet.rng.integers(32, 96)), then)

    return lambda: fork(tokens(fleet, 6000), 3)


def documents(fleet: Fleet) -> Callable[[], None]:
    """An instruction, followed by two of 500 documents of 2,000 tokens."""
    instruction, known = tokens(fleet, 500), [tokens(fleet, 2000) for _ in range(500)]

    def one() -> None:
        first, second = fleet.rng.choice(500, 2, replace=False)
        parts = [instruction, known[first], known[second], tokens(fleet, 100)]
        fleet.ask(np.concatenate(parts), int(fleet.rng.integers(16, 64)))

    return one


def bursts(fleet: Fleet) -> Callable[[], None]:
    """Sixty-four requests at once that share 8,000 new tokens."""

    def burst() -> None:
        shared = tokens(fleet, 8000)
        for _ in range(64):
            fleet.ask(np.concatenate([shared, tokens(fleet, 128)]), 64)

    return burst


def agents(fleet: Fleet, apart: bool = False) -> Callable[[], None]:
    """Agents with one of six system prompts, each of eight turns without pauses: each appends the answer and a tool's
    result. If `apart`, each system prompt belongs to another tenant."""
    kinds = [tokens(fleet, 6000) for _ in range(TENANTS)]
    numbers = itertools.count()

    def turn(tenant: int, history: np.ndarray, left: int) -> None:
        if left:
            prompt = np.concatenate([history, tokens(fleet, 300, 900)])
            fleet.ask(prompt, 96, lambda whole: turn(tenant, whole, left - 1), tenant if apart else 0)

    def begin() -> None:
        kind = next(numbers) % TENANTS
        turn(kind, kinds[kind], 8)

    return begin


def askers(fleet: Fleet) -> Callable[[], None]:
    """Clients that each ask five questions, one after the other, after a shared prefix of 16,000 tokens, and get long
    answers."""
    shared = tokens(fleet, 16_000)

    def one(left: int) -> None:
        if left:
            fleet.ask(np.concatenate([shared, tokens(fleet, 128)]), 256, lambda _whole: one(left - 1))

    return lambda: one(5)


def strangers(fleet: Fleet) -> Callable[[], None]:
    """Prompts of about 3,000 tokens that share nothing, at a rate beyond what the workers can serve."""
    return lambda: fleet.ask(tokens(fleet, 2000, 4000), 200)


LOADS: dict[str, tuple[Callable[[Fleet], Callable[[], None]], int, float]] = {
    "chats": (chats, 240, 5.2),
    "tenants": (tenants, 2400, 85.0),
    "trunk": (trunk, 2400, 80.0),
    "trees": (trees, 120, 4.6),
    "documents": (documents, 1600, 34.0),
    "bursts": (bursts, 40, 1.0),
    "128 agents": (agents, 128, 512.0),
    "256 agents": (agents, 256, 512.0),
    "512 agents": (agents, 512, 512.0),
    "512 agents of six tenants": (partial(agents, apart=True), 512, 512.0),
    "strangers": (strangers, 2400, 2400.0),
    "64 askers": (askers, 64, 128.0),
}
"""By name: (what arrives, how many times, how often per second)."""


# ---------------------------------------------------------------- choices

Choice = Callable[..., tuple[Candidate, float]]
"""A function with the signature of `cost.place`."""


def fewest(_tokens: int, workers: list[Candidate], *_: Any) -> tuple[Candidate, float]:
    return min(workers, key=lambda w: (w.requests, w.queued_tokens, w.worker)), 0.0


def most_hits(tokens: int, workers: list[Candidate], *_: Any) -> tuple[Candidate, float]:
    best = max(workers, key=lambda w: (w.hit_tokens, -w.requests))
    crowded = best.requests > 1.5 * sum(w.requests for w in workers) / len(workers) + 1
    return fewest(tokens, workers) if crowded or not best.hit_tokens else (best, 0.0)


def in_turn() -> Choice:
    numbers = itertools.count()
    return lambda _tokens, workers, *_: (workers[next(numbers) % len(workers)], 0.0)


BY_ARRIVAL = "by arrival"
CHOICES: dict[str, Callable[[], Choice]] = {
    "radixrt": lambda: cost.place,
    BY_ARRIVAL: lambda: cost.place,
    "most hits": lambda: most_hits,
    "fewest requests": lambda: fewest,
    "in turn": in_turn,
}


BY_CACHED = "by cached tokens"
NO_HOST, CONTEXTS_KEPT = "no host memory", "contexts kept"
BY_RETURNS, BY_RETURNS_NO_HOST = "evicted by returns", "by returns, no host memory"
_policy = ["lru"]
"""`eviction.POLICIES` of the workers."""
WITH_STATES = dict.fromkeys(("radixrt", BY_CACHED), CHOICES["radixrt"])
WITH_HOST = dict.fromkeys(("radixrt", BY_RETURNS, CONTEXTS_KEPT, NO_HOST, BY_RETURNS_NO_HOST), CHOICES["radixrt"])
WITH_BOTH = dict.fromkeys(("radixrt", NO_HOST), CHOICES["radixrt"])


@contextmanager
def simulated(choice: str) -> Iterator[Clock]:
    """Simulated time, in which requests are placed by a choice, or scheduled as it says."""
    clock = Clock()
    plain = patch.multiple(loop, time=clock, _decode=lambda message: message, _encode=lambda message: message)
    with ExitStack() as patches:
        timed = fake_runner, retention, queue, scheduler, finish, prefix_cache
        for one in (plain, *(patch.object(module, "time", clock) for module in timed)):
            patches.enter_context(one)
        patches.enter_context(patch.object(cost, "place", (CHOICES | WITH_STATES | WITH_HOST)[choice]()))
        if choice == BY_ARRIVAL:
            patches.enter_context(patch.object(queue, "OVERTAKING", 0))
            patches.enter_context(patch.object(retention, "MIN_CONTINUATION_RATE", 2.0))  # nothing is kept
        if choice in (BY_RETURNS, BY_RETURNS_NO_HOST):
            patches.enter_context(patch.object(sys.modules[__name__], "_policy", [RETURNS]))
        if choice == CONTEXTS_KEPT:
            patches.enter_context(patch.object(page_cache, "KEPT", 1e9))
        if choice == BY_CACHED:
            patches.enter_context(patch.object(StateCheckpoints, "deepest", lambda self, digests, most: most))
        yield clock


def measure(load: str, choice: str, seed: int, scale: float, states: int = 0, host: int = 0) -> dict[str, float]:
    """Run a load. Returns results of the last three quarters of its requests."""
    make, times, rate = LOADS[load]
    with simulated(choice) as clock:
        fleet = Fleet(clock, seed, states, 0 if choice in (NO_HOST, BY_RETURNS_NO_HOST) else host)
        one, when = make(fleet), 0.0
        for _ in range(max(4, int(times * scale))):
            when += fleet.rng.gamma(0.5, 2 / rate)
            fleet.at(when, one)
        fleet.run()
    return results(fleet)


def results(fleet: Fleet) -> dict[str, float]:
    """Of the last three quarters of a fleet's requests, but tokens per second of all."""
    found = list(fleet.asked.values())
    assert all(asked.first is not None for asked in found), "a request was not answered"
    assert not fleet.core.counters.redispatched, "a worker's messages arrived in another order than it sent them"
    warm = found[len(found) // 4 :]
    prompts, waits = sum(len(a.ids) for a in warm), np.array([a.first - a.begun for a in warm]) * 1e3
    answers = sum(len(ids) for a in found for ids in a.generated) // 4
    return {
        "hits": sum(a.cached for a in warm) / prompts,
        "infinite": sum(a.infinite for a in warm) / prompts,
        "p50_ms": float(np.quantile(waits, 0.5)),
        "p99_ms": float(np.quantile(waits, 0.99)),
        "answer_ms": float(np.mean([a.ended - a.begun for a in warm])) * 1e3,
        "tokens_s": answers / max(a.ended for a in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="runs of each load, over which results are averaged")
    parser.add_argument("--quick", action="store_true", help="little of each load, to see that it runs")
    parser.add_argument("--states", type=int, default=0, help="recurrent states of each worker; 0: it has none")
    parser.add_argument("--host", type=int, default=0, help="tokens that the host memory of each worker holds")
    parser.add_argument("--loads", default=",".join(LOADS), help="comma-separated; not all: nothing is saved")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # each worker says that it has few states
    rows = []
    both = args.states and args.host
    choices = WITH_BOTH if both else WITH_HOST if args.host else WITH_STATES if args.states else CHOICES
    for load, choice in itertools.product(args.loads.split(","), choices):
        seeds = range(1 if args.quick else args.seeds)
        found = [measure(load, choice, seed, 0.02 if args.quick else 1.0, args.states, args.host) for seed in seeds]
        means = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
        rows.append({"load": load, "choice": choice} | means)
        print(rows[-1], flush=True)
    print(table(rows))
    if not args.quick and args.loads.split(",") == list(LOADS):
        name, more = ("placement_states", {"states": args.states}) if args.states else ("placement", {})
        if args.host:
            name, more = "placement_host_states" if both else "placement_host", more | {"host": args.host}
        save(name, rows, workers=WORKERS, cache=CACHE, seeds=args.seeds, **more)


if __name__ == "__main__":
    main()
