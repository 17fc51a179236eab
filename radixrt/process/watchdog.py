"""Notices a worker whose loop makes no progress: a step that never ends, or anything else that the loop waits for.

The loop counts what it gets done. Another thread looks about once a second, and adds up the time in which nothing was.
Only the time between its own looks counts, so a suspended machine, or a process that gets no processor, is not taken
for one that hangs.

    limit    min(hard, max(MIN_SECONDS, FACTOR * slowest * max(1, tokens / most)))    the router takes the worker out
    restart  min(hard, max(MIN_RESTART_SECONDS, RESTART_FACTOR * limit))              the process ends

`slowest` and `most` are the longest duration and the most tokens of the last WINDOW_STEPS to 2 * WINDOW_STEPS steps,
`tokens` those of the step in flight. Before KNOWN_STEPS steps nothing is known, and both are `hard`: the first steps
may compile kernels for minutes.
"""

from __future__ import annotations

import math

KNOWN_STEPS = 64
WINDOW_STEPS = 512
FACTOR = 20.0
MIN_SECONDS = 10.0
RESTART_FACTOR = 10.0
MIN_RESTART_SECONDS = 120.0
"""Long, as a kernel may be compiled for a kind of request that had not come before, and a restart costs the cache."""
MAX_LOOK_SECONDS = 3.0
"""The most that the time since the last look counts."""


class Watchdog:
    """Progress of one loop. `hard`: seconds after which it hangs whatever was learned; 0: it never does."""

    __slots__ = (
        "_ahead", "_before", "_done", "_hard", "_last_look", "_seen", "_slowest", "_steps", "_tokens", "stalled",
    )  # fmt: skip

    def __init__(self, hard: float = 0.0) -> None:
        self._hard = hard or math.inf
        self._done = 0
        """Counts what the loop gets done."""
        self._steps = 0
        self._slowest: list[float] = [0.0, 0.0]
        """The longest duration, and the most tokens, of the steps of this window."""
        self._before: list[float] = [0.0, 0.0]
        """Those of the window before."""
        self._tokens = self._ahead = 0
        """Tokens of the larger one of the last two steps that were launched, and of the last."""
        self._seen = -1
        """`_done` at the last look."""
        self._last_look: float | None = None
        self.stalled = 0.0
        """Seconds without progress, at the last look."""

    # ------------------------------------------------------------ called by the loop

    def launched(self, tokens: int) -> None:
        """A step begins; the one before it may still run."""
        self._tokens = max(tokens, self._ahead)
        self._ahead = tokens

    def finished(self, tokens: int, seconds: float) -> None:
        """A step has ended."""
        self._done += 1
        self._steps += 1
        slowest = self._slowest
        if seconds > slowest[0]:
            slowest[0] = seconds
        if tokens > slowest[1]:
            slowest[1] = tokens
        if not self._steps % WINDOW_STEPS:
            self._before, self._slowest = slowest, [0.0, 0.0]

    def moved(self) -> None:
        """The loop has got something else done, or has nothing to do."""
        self._done += 1

    # ------------------------------------------------------------ called by another thread

    def look(self, now: float) -> float:
        """Returns `stalled`. To be called about once a second."""
        done = self._done
        if self._last_look is None or done != self._seen:
            self.stalled = 0.0
        else:
            self.stalled += min(now - self._last_look, MAX_LOOK_SECONDS)
        self._seen, self._last_look = done, now
        return self.stalled

    @property
    def limit(self) -> float:
        """Seconds after which a step takes longer than can be expected."""
        if self._steps < KNOWN_STEPS:
            return self._hard
        slowest = max(self._slowest[0], self._before[0])
        most = max(self._slowest[1], self._before[1], 1)
        return min(self._hard, max(MIN_SECONDS, FACTOR * slowest * max(1.0, self._tokens / most)))

    @property
    def stuck(self) -> bool:
        return self.stalled > self.limit

    @property
    def hangs(self) -> bool:
        """Whether the process is to be replaced."""
        if self._steps < KNOWN_STEPS:
            return self.stalled > self._hard
        return self.stalled > min(self._hard, max(MIN_RESTART_SECONDS, RESTART_FACTOR * self.limit))
