"""A simulated worker: its cache is a radix tree, and each token is a function of the one before and the position."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field

from radixrt.messages import (
    Abort,
    Cleared,
    Load,
    Output,
    Register,
    Removed,
    Resync,
    Run,
    StepDone,
    Stored,
    ToWorker,
)

EVENTS = {"stored": Stored, "removed": Removed, "cleared": Cleared}


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def next_token(last: int, position: int) -> int:
    return (last * 1103515245 + position * 12345 + 7) % 50_000


def continuation(prompt: bytes, count: int) -> list[int]:
    """The tokens that every worker generates after `prompt`."""
    tokens = list(array("i", prompt))
    for _ in range(count):
        tokens.append(next_token(tokens[-1], len(tokens)))
    return tokens[len(prompt) // 4 :]


def register(name: str, pid: int = 1, **changes) -> Register:
    fields = {"model": "m", "max_model_len": 4096, "page_size": 1, "total_pages": 100_000, "max_running": 64}
    return Register(name=name, pid=pid, **(fields | changes))


@dataclass
class Sequence:
    run: Run
    tokens: list[int]
    cached: int
    computed: bool = False


@dataclass
class SimWorker:
    """A worker that is driven by `obey` and `step`. `tree` is a RadixTree(events=True), or None for a worker without a
    cache and events."""

    name: str
    tree: object = None
    pool: int = 2000
    sequences: dict[int, Sequence] = field(default_factory=dict)
    asked_resync: bool = False
    seq: int = 0
    newest_run: int = 0

    def obey(self, order: ToWorker) -> None:
        match order:
            case Run():
                assert order.id not in self.sequences
                self.newest_run = order.id
                self.sequences[order.id] = Sequence(order, list(array("i", order.ids)), self._hit(order))
            case Abort():
                for run_id in order.ids:
                    self.sequences.pop(run_id, None)
            case Resync():
                self.asked_resync = True

    def _hit(self, run: Run) -> int:
        limit = min(len(run.ids) // 4 - 1, run.prompt_len)
        if self.tree is None:
            return 0
        return min(self.tree.match(run.namespace, run.ids, limit).length, limit)

    def step(self, rng: random.Random) -> StepDone:
        """Run a step, in which each sequence generates 0, 1 or 3 tokens, or gets a part of its scores."""
        outputs = [o for s in list(self.sequences.values()) if (o := self._advance(s, rng)) is not None]
        rates = {"prefill_rate": 10_000.0, "step_seconds": 0.01}
        load = Load(running=len(self.sequences), free_pages=self.pool, newest_run=self.newest_run, **rates)
        return self._message(outputs, load)

    def _advance(self, sequence: Sequence, rng: random.Random) -> Output | None:
        run, tokens = sequence.run, sequence.tokens
        if run.score_from is not None:
            scores = [float(t) for t in tokens[run.score_from :]]
            if not sequence.computed:
                sequence.computed = True
                return Output(run.id, [], None, sequence.cached, None, scores[:2])
            del self.sequences[run.id]
            return Output(run.id, [], "length", sequence.cached, None, scores[2:])
        fresh = []
        for _ in range(rng.choice((0, 1, 1, 3))):
            if len(tokens) - run.prompt_len < run.sampling.max_tokens:
                fresh.append(next_token(tokens[-1], len(tokens)))
                tokens.append(fresh[-1])
        done = len(tokens) - run.prompt_len >= run.sampling.max_tokens
        if done:
            del self.sequences[run.id]
        self._cache(sequence)
        if not fresh and not done:
            return None
        return Output(run.id, fresh, "length" if done else None, sequence.cached)

    def _cache(self, sequence: Sequence) -> None:
        if self.tree is None:
            return
        tokens = ids(*sequence.tokens[:-1])
        self.tree.insert(sequence.run.namespace, tokens, tokens)
        if self.tree.tokens > self.pool:
            self.tree.evict(self.tree.tokens - self.pool // 2)

    def _message(self, outputs: list[Output], load: Load) -> StepDone:
        events = [EVENTS[kind](*rest) for kind, *rest in self.tree.drain_events()] if self.tree is not None else []
        seq, self.seq = self.seq, self.seq + len(events)
        if self.asked_resync and self.tree is not None:
            self.asked_resync = False
            events = [EVENTS[kind](*rest) for kind, *rest in self.tree.snapshot()]
            return StepDone(outputs, load, self.seq, events, resync=True)
        return StepDone(outputs, load, seq, events)
