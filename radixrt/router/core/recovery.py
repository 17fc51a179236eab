"""Where runs go on that their worker fails, or serves no longer.

a worker fails runs                   -> to workers that have not failed them, until all have (`failures`)
a worker is lost, or leaves           -> to any other, but a run that has lost MAX_LOSSES of them ends
a worker lives, and makes no progress -> likewise; those that may be the cause, one after the other (`suspects`)
"""

from __future__ import annotations

from collections.abc import Callable

from radixrt.messages import Output
from radixrt.router.core.dispatch import Dispatcher
from radixrt.router.core.effects import Effect
from radixrt.router.core.metrics import Counters
from radixrt.router.core.request import RunState
from radixrt.router.core.suspects import Suspects
from radixrt.router.core.worker import Worker

MAX_LOSSES = 3
"""A run is taken for the cause, and fails, after this many of its workers were lost for good
(`Worker.crash_exonerated`)."""
FAILED = "the worker failed on this request"
LOST = f"{MAX_LOSSES} workers were lost while they served this request"
HUNG = "workers hang on this request"


class Recovery:
    """`end(run, reason)` ends a run that cannot go on, with its request, and returns messages to send."""

    def __init__(
        self, dispatcher: Dispatcher, counters: Counters, end: Callable[[RunState, str], list[Effect]]
    ) -> None:
        self._dispatcher = dispatcher
        self._counters = counters
        self._end = end
        self._suspects = Suspects()

    def __len__(self) -> int:
        """Runs that wait to be tried, which the dispatcher does not have."""
        return len(self._suspects)

    def drop(self, run: RunState) -> None:
        """Forget a run that has ended."""
        self._suspects.drop(run)

    def failed(self, worker: Worker, failed: list[tuple[RunState, Output]], now: float) -> list[Effect]:
        """A worker has failed runs in one step: they go on elsewhere, or end."""
        for run, output in failed:
            run.problem = output.error or FAILED
        runs = [run for run, _ in failed if not run.finished]  # an invalid field may have ended a request of several
        if not runs:
            return []
        effects, ending = self._dispatcher.retry(worker, runs, now)
        self._counters.redispatched += len(set(runs) - set(ending))
        return effects + self._end_all(ending)

    def lost(self, orphans: list[int], now: float, *, hung: bool = False) -> list[Effect]:
        """A worker no longer serves runs, by id: they are dispatched again, or end. `hung`: it lives, and does not get
        on."""
        effects: list[Effect] = []
        for run in self._dispatcher.reclaim(orphans):
            if run.finished:
                continue
            if hung and self._suspects.is_guilty(run):
                effects += self._end(run, HUNG)
            elif sum(not worker.crash_exonerated for worker in run.losses) >= MAX_LOSSES:
                effects += self._end(run, LOST)
            else:
                self._counters.redispatched += 1
                if not hung or not self._suspects.take(run):
                    effects += self._dispatcher.send(run, now)
        return effects + self._try_next(now)

    def tick(self, now: float) -> list[Effect]:
        """Send runs that wait until others have gone on, or have failed. To be called after each step of a worker, and
        about once a second."""
        effects: list[Effect] = []
        if self._dispatcher.held:
            effects, ending = self._dispatcher.release(now)
            effects += self._end_all(ending)
        return effects + self._try_next(now) if self._suspects else effects

    def _try_next(self, now: float) -> list[Effect]:
        """Send the next run that may make its worker hang, if none is tried now."""
        run = self._suspects.next()
        return [] if run is None else self._dispatcher.send(run, now)

    def _end_all(self, runs: list[RunState]) -> list[Effect]:
        """End runs that all workers have failed; another choice of its request may have ended one already."""
        return [effect for run in runs if not run.finished for effect in self._end(run, run.problem)]
