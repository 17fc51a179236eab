"""Runs that may have made their worker hang. They are tried elsewhere one after the other, so that the one that does it
hangs alone, and not with all those that were with it.

    its worker hangs -> it had no token there: it waits -> tried -> a token comes: the next one is tried
                                                                 -> this worker hangs, too: it fails
                     -> it had some: sent at once; if that worker hangs as well, before another token, it waits as above
"""

from __future__ import annotations

from radixrt.router.core.request import RunState

MIN_HANGS = 2
"""A run that is tried alone fails when so many of its workers have hung."""


class Suspects:
    """The runs that wait to be tried, in order, and the one that is."""

    def __init__(self) -> None:
        self._waiting: dict[RunState, None] = {}
        self._tried: RunState | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, run: RunState) -> bool:
        """Take a run whose worker hangs; False if it is to be sent at once."""
        if run.started:
            return False
        self._waiting[run] = None
        return True

    def is_guilty(self, run: RunState) -> bool:
        """Whether a run whose worker hangs is the cause."""
        hangs = sum(not worker.crash_exonerated for worker in run.losses)
        return run is self._tried and not run.started and hangs >= MIN_HANGS

    def drop(self, run: RunState) -> None:
        """Forget a run that has ended."""
        self._waiting.pop(run, None)
        if run is self._tried:
            self._tried = None

    def next(self) -> RunState | None:
        """The run that is to be tried now, if any."""
        tried = self._tried
        if not self._waiting or (tried is not None and not tried.started and tried not in self._waiting):
            return None
        run = self._tried = next(iter(self._waiting))
        del self._waiting[run]
        return run
