"""One worker: who it is, when it was last heard, what it has to do."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from radixrt.messages import Load, Register
from radixrt.router.placement import Candidate

MOST_SECONDS = 2.0
"""For which a worker that says nothing is taken to compute: it speaks after each step."""
Process = tuple[int, int]
"""Which process a worker is."""


def process(info: Register) -> Process:
    return info.pid, info.life


class Sent(NamedTuple):
    """A run, as it was sent."""

    tokens: int
    uncached: int
    """Those that the worker was expected to compute."""


class Member:
    """One life of one worker. `number` is its owner id in the index, never used for another life."""

    __slots__ = (
        "asked", "blameless", "heard", "info", "load", "next_step", "number", "replaced", "runs", "told", "token_limit",
        "unseen_tokens", "waiting_tokens",
    )  # fmt: skip

    def __init__(self, number: int, info: Register, now: float, replaced: tuple[Process, ...] = ()) -> None:
        self.number = number
        self.info = info
        self.replaced = replaced
        """Those that were called so before it."""
        self.token_limit = min(info.max_model_len, info.total_pages * info.page_size)
        """Tokens the longest sequence may have: by the model, and by what fits the pool."""
        self.heard = now
        self.told = now
        """When `load` came."""
        self.asked = now
        """When a snapshot was asked for last."""
        self.next_step: int | None = 1
        """The number that its next StepDone has if none was lost; None: any."""
        self.blameless = False
        """It was told to leave, or its process has spoken again: nothing that it served has ended it."""
        self.load = Load(free_pages=info.total_pages, total_pages=info.total_pages)
        self.runs: dict[int, Sent] = {}
        """By id, in the order of dispatch."""
        self.waiting_tokens = 0
        """Of runs whose first token has not come."""
        self.unseen_tokens = 0
        """Tokens of dispatched runs that `load` does not count yet."""

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def process(self) -> Process:
        return process(self.info)

    def is_process(self, pid: int, life: int) -> bool:
        """Whether it is the one that says so; 0: any."""
        return pid in (0, self.info.pid) and life in (0, self.info.life)

    def follows(self, number: int) -> bool:
        """Whether its StepDone of that number comes after the one before (0: nobody counts). The next one has to come
        after this."""
        expected, self.next_step = self.next_step, number + 1
        return number == 0 or expected is None or number == expected

    def dispatched(self, run: int, sent: Sent) -> None:
        self.runs[run] = sent
        self.unseen_tokens += sent.uncached
        self.waiting_tokens += sent.tokens

    def started(self, run: int) -> None:
        """Its first token came."""
        if sent := self.runs.get(run):
            self.waiting_tokens -= sent.tokens

    def ended(self, run: int) -> None:
        """After `started`."""
        self.runs.pop(run, None)

    def update(self, load: Load, now: float) -> None:
        """Take a newer load, which counts runs up to the newest that the worker had seen."""
        self.load, self.told = load, now
        unseen = itertools.takewhile(lambda run: run > load.newest_run, reversed(self.runs))
        self.unseen_tokens = sum(self.runs[run].uncached for run in unseen)

    def candidate(self, hit_tokens: int, now: float) -> Candidate:
        """As it is now: what it had to compute when it was heard, less what it has computed since."""
        load, info = self.load, self.info
        computed = int(min(now - self.told, MOST_SECONDS) * load.prefill_rate)
        queued = max(0, load.queued_tokens + load.launched_tokens - computed)
        return Candidate(
            worker=self.number,
            hit_tokens=hit_tokens,
            queued_tokens=queued + self.unseen_tokens,
            requests=len(self.runs),
            max_running=max(1, info.max_running),
            free_tokens=(load.free_pages + load.evictable_pages) * info.page_size,
            prefill_rate=load.prefill_rate,
            step_seconds=load.step_seconds,
            empty_tokens=load.free_pages * info.page_size,
            wanted_tokens=(load.total_pages - load.free_pages - load.evictable_pages) * info.page_size
            + self.waiting_tokens,
            total_tokens=info.total_pages * info.page_size,
        )
