"""The loads that workers report, with counters summed over restarts, also for workers that have gone recently."""

from __future__ import annotations

import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from radixrt.messages import Load

GONE_SECONDS = 60.0
"""A worker that has reported no step for this long counts as gone."""
KEPT_SECONDS = 3600.0
"""The state of a worker is forgotten after this long without a step. If it comes back before, its sums continue."""
MAX_GONE_WORKERS = 100
"""The most gone workers whose states are kept. Their names may never return: by default each process has a new one."""
MAX_FORGOTTEN_WORKERS = 10_000
"""The most forgotten workers whose last counters are kept, so that one that returns is not counted twice."""
SUMMED = (
    "evicted_tokens", "preemptions", "steps", "plain_keys", "read_keys", "busy_seconds", "forced_tokens",
    "drafted_tokens", "accepted_tokens", "fetched_tokens", "disk_hits", "disk_read_tokens", "disk_read_bytes",
    "disk_read_seconds", "disk_saved_seconds", "disk_written_tokens", "disk_written_bytes", "disk_lost_tokens",
    "disk_evicted_tokens", "disk_early_tokens",
)  # fmt: skip
"""The fields of a Load that count since the worker's start."""
_summed = operator.attrgetter(*SUMMED)


@dataclass(slots=True)
class WorkerState:
    """The latest load of a worker name, and the counters of earlier processes of that name."""

    load: Load = Load()
    heard: float = 0.0
    """When `load` arrived."""
    before: tuple[float, ...] = (0,) * len(SUMMED)
    """Final counters of the earlier processes, summed; in the order of SUMMED."""

    def update(self, load: Load, now: float) -> None:
        """Take a newer load. If its `steps` is smaller, the worker was restarted, and all counters began at 0."""
        if load.steps < self.load.steps:
            self.before = tuple(self.sums.values())
        self.load, self.heard = load, now

    @property
    def sums(self) -> dict[str, float]:
        """Counters by name, summed over all processes of the worker."""
        return dict(zip(SUMMED, map(operator.add, self.before, _summed(self.load)), strict=True))

    def to_json(self) -> dict[str, Any]:
        load = self.load
        return {
            "total_pages": load.total_pages,
            "used_pages": load.total_pages - load.free_pages,
            "free_pages": load.free_pages,
            "evictable_pages": load.evictable_pages,
            "host_tokens": load.host_tokens,
            "disk_tokens": load.disk_tokens,
            "disk_bytes": load.disk_bytes,
        } | self.sums


class Workers:
    """The states of workers, and the sums of those that were forgotten."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.states: dict[str, WorkerState] = {}
        """By name, least recently heard first. Must not be modified from outside."""
        self.forgotten = WorkerState()
        """Sums over all forgotten workers, in `before`."""
        self._last: OrderedDict[str, Load] = OrderedDict()
        """Last loads of forgotten workers."""

    def load(self, name: str, load: Load) -> None:
        """Take a worker's newest load."""
        state = self.states.pop(name, None) or self._new_state(name, load)
        state.update(load, self._clock())
        self.states[name] = state

    def _new_state(self, name: str, load: Load) -> WorkerState:
        """The state of a worker that is new or was forgotten. If it is still the process that was forgotten, its last
        counters are in `forgotten` already, and are subtracted."""
        last = self._last.pop(name, None)
        if last is None or load.steps < last.steps:
            return WorkerState()
        return WorkerState(before=tuple(-count for count in _summed(last)))

    def forget(self) -> set[str]:
        """Forget workers that have been gone for KEPT_SECONDS, and those gone longest beyond MAX_GONE_WORKERS. Returns
        their names."""
        now = self._clock()
        gone = list(itertools.takewhile(lambda name: now - self.states[name].heard > GONE_SECONDS, self.states))
        excess = len(gone) - MAX_GONE_WORKERS
        names = {name for i, name in enumerate(gone) if i < excess or now - self.states[name].heard > KEPT_SECONDS}
        for name in names:
            state = self.states.pop(name)
            self.forgotten.before = tuple(map(operator.add, self.forgotten.before, state.sums.values()))
            self._last[name] = state.load
        while len(self._last) > MAX_FORGOTTEN_WORKERS:
            self._last.popitem(last=False)
        return names
