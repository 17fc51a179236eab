"""What the workers say of themselves: of all that serve, and of the last that are gone."""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from radixrt.messages import Load

GONE_SECONDS = 60.0
"""After which a worker that has told no step is taken to be gone."""
KEPT_SECONDS = 3600.0
"""For which one that is gone is remembered: its sums go on if it comes back."""
MOST_GONE = 100
"""Workers that are gone and remembered. Names need not come back: by default each process has one of its own."""
MOST_FORGOTTEN = 10_000
"""Workers whose last counters are known after that, so that what they count if they are back adds to it."""
SUMMED = (
    "evicted_tokens", "preemptions", "steps", "plain_keys", "read_keys", "busy_seconds", "forced_tokens",
    "drafted_tokens", "accepted_tokens",
)  # fmt: skip
"""Counters of a Load."""
_summed = operator.attrgetter(*SUMMED)


@dataclass(slots=True)
class WorkerState:
    """A worker's latest load, when it came, and what the lives before this one had counted when they ended."""

    load: Load = Load()
    heard: float = 0.0
    before: tuple[float, ...] = (0,) * len(SUMMED)

    def update(self, load: Load, now: float) -> None:
        """Take a newer load, one a step. Steps that fell have begun anew, and all else with them."""
        if load.steps < self.load.steps:
            self.before = tuple(self.sums.values())
        self.load, self.heard = load, now

    @property
    def sums(self) -> dict[str, float]:
        """Its counters, over all its lives."""
        return dict(zip(SUMMED, map(operator.add, self.before, _summed(self.load)), strict=True))

    def to_json(self) -> dict[str, Any]:
        load = self.load
        return {
            "total_pages": load.total_pages,
            "used_pages": load.total_pages - load.free_pages,
            "free_pages": load.free_pages,
            "evictable_pages": load.evictable_pages,
        } | self.sums


class Workers:
    """Their states by name, and the sums of those that are forgotten."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.states: dict[str, WorkerState] = {}
        """Who was heard last comes last. To be read."""
        self.forgotten = WorkerState()
        self._last: OrderedDict[str, Load] = OrderedDict()
        """Of those that are forgotten."""

    def load(self, name: str, load: Load) -> None:
        state = self.states.pop(name, None) or self._back(name, load)
        state.update(load, self._clock())
        self.states[name] = state

    def _back(self, name: str, load: Load) -> WorkerState:
        """The state of one that is new, or was forgotten: in the same life its counters are counted up to there."""
        last = self._last.pop(name, None)
        if last is None or load.steps < last.steps:
            return WorkerState()
        return WorkerState(before=tuple(-count for count in _summed(last)))

    def forget(self) -> set[str]:
        """Drop those gone longest: their names."""
        now = self._clock()
        gone = list(itertools.takewhile(lambda name: now - self.states[name].heard > GONE_SECONDS, self.states))
        excess = len(gone) - MOST_GONE
        names = {name for i, name in enumerate(gone) if i < excess or now - self.states[name].heard > KEPT_SECONDS}
        for name in names:
            state = self.states.pop(name)
            self.forgotten.before = tuple(map(operator.add, self.forgotten.before, state.sums.values()))
            self._last[name] = state.load
        while len(self._last) > MOST_FORGOTTEN:
            self._last.popitem(last=False)
        return names
