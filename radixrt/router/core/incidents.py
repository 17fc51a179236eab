"""What is known of the failures of workers: a record for each process, and the incidents that are not decided yet (see
`failures`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

log = logging.getLogger("radixrt.router")

BLAME_WEIGHT = 0.25
"""Weight of the latest outcome in `Record.share`."""
MAX_FAILED_SHARE = 0.5
"""A worker with a larger share is set aside: three failures in a row do, for one that had none."""
MIN_FAILED_SHARE = 0.25
"""With a smaller share it serves again."""
MAX_FAILED_IN_ROW = 8
"""So many requests that fail on a worker, one after the other and nothing else, set it aside even if no other worker
serves them either."""
CLEAN_SHARE = 0.1
"""Below this share a worker's earlier failures are forgotten."""
FAILURE_HALF_LIFE = 10.0
"""Seconds after which a failure counts half in placement, while its worker is not set aside."""
MIN_PROBE_SECONDS = 1.0
"""Time from the first failure that is blamed on a worker to its first probe, and to the next one; it doubles with each
probe of a worker that is set aside. After a success the next one comes at once."""
MAX_PROBE_SECONDS = 60.0


class Record:
    """What is known of the failures of a worker's process. It is kept while the process is lost or joins again."""

    __slots__ = (
        "failed_at", "in_row", "incidents", "name", "probe_at", "probe_seconds", "request", "served", "set_aside",
        "share", "undecided",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.incidents = 0
        """Since it joined, whoever was at fault."""
        self.undecided = 0
        """Incidents that may yet be blamed on it."""
        self.share = 0.0
        """Moving average over its runs and incidents, in [0, 1]: how many it has failed. A run that ends well counts 0,
        an incident that is blamed on it 1."""
        self.in_row = 0
        """Incidents of different requests since the worker last gave a token, without those that fail where others do
        not."""
        self.served = False
        """Whether a run has ended well there since the last incident."""
        self.request: object = None
        """Identifies the request of the last incident."""
        self.failed_at = 0.0
        """Time of the last incident."""
        self.set_aside = False
        self.probe_at = 0.0
        """When it may get its next probe, if it is a suspect."""
        self.probe_seconds = MIN_PROBE_SECONDS
        """Time from the next probe to the one after it."""

    @property
    def suspect(self) -> bool:
        """Whether it gets probes."""
        return self.share > 0.0 or self.set_aside

    def failed_share(self, now: float) -> float:
        """The share of runs that it is expected to fail, for placement:

        recent = share * 2 ** -((now - failed_at) / FAILURE_HALF_LIFE)      or while it is set aside
                 max(share, MAX_FAILED_SHARE)
        result = 1 - (1 - recent) * (1 - BLAME_WEIGHT) ** undecided         each counts as if it were blamed
        """
        if not self.incidents:
            return 0.0
        if self.set_aside:
            recent = max(self.share, MAX_FAILED_SHARE)
        else:
            recent = self.share * 0.5 ** ((now - self.failed_at) / FAILURE_HALF_LIFE)
        return 1 - (1 - recent) * (1 - BLAME_WEIGHT) ** self.undecided

    def failed(self, request: object, now: float, *, gave_tokens: bool) -> None:
        """Requests have failed there, among them one that `request` identifies; `gave_tokens`: to others since the
        last time."""
        self.incidents += 1
        self.undecided += 1
        if gave_tokens:
            self.in_row = 0
        self.in_row += gave_tokens or request != self.request
        self.request, self.failed_at, self.served = request, now, False
        self._set_aside(now)

    def excuse(self) -> None:
        """An incident cannot be blamed on the worker."""
        self.undecided -= 1

    def blame(self, now: float) -> None:
        """An incident is to be blamed on the worker."""
        self.undecided -= 1
        if not self.suspect:
            self.probe(now)
        self.share += (1 - self.share) * BLAME_WEIGHT
        self._set_aside(now)

    def succeeded(self) -> None:
        """A run has ended well there."""
        if not self.incidents:
            return
        self.share *= 1 - BLAME_WEIGHT
        self.in_row, self.served = 0, True
        if self.share < CLEAN_SHARE:
            self.share, self.probe_seconds = 0.0, MIN_PROBE_SECONDS
        self.probe_at = 0.0
        if self.set_aside and self.share < MIN_FAILED_SHARE:
            self.set_aside = False
            log.info("worker %s serves again: it has answered its probes", self.name)

    def is_due(self, now: float) -> bool:
        """Whether it is to get a probe."""
        return self.suspect and now >= self.probe_at

    def probe(self, now: float) -> None:
        """It gets a probe now, or has begun to fail and gets its first one later."""
        self.probe_at = now + self.probe_seconds
        if self.set_aside:
            self.probe_seconds = min(2 * self.probe_seconds, MAX_PROBE_SECONDS)

    def _set_aside(self, now: float) -> None:
        """Set it aside if it has failed too many."""
        if not self.set_aside and (self.share > MAX_FAILED_SHARE or self.in_row >= MAX_FAILED_IN_ROW):
            self.set_aside = True
            self.probe_at = now + self.probe_seconds
            log.warning("worker %s is set aside: it keeps failing requests", self.name)


class Failed(Protocol):
    """A run that a worker failed."""

    @property
    def request(self) -> object: ...


class Incident:
    """Runs that a worker failed at once. `open`: those of them that have neither made progress elsewhere nor ended."""

    __slots__ = ("excused", "gave_tokens", "open", "record", "together")

    def __init__(self, record: Record, runs: Sequence[Failed], *, gave_tokens: bool) -> None:
        self.record = record
        self.open = set(runs)
        self.together = len(runs) > 1
        self.gave_tokens = gave_tokens
        """Whether the worker had given tokens to others, since it last failed any."""
        self.excused = False
        """Whether a run that has ended may have caused it."""

    def is_doubtful(self, run: Failed) -> bool:
        """Whether another request than that of `run` may have caused it: so it is if `run` has gone on since then."""
        if self.excused or (self.together and run not in self.open):
            return True
        return any(other.request is not run.request for other in self.open)

    def settle(self, run: Failed, now: float) -> None:
        """A run has made progress elsewhere, or ended. After the last one it is clear whether the worker is to
        blame."""
        self.open.discard(run)
        if not self.open and self.excused:
            self.record.excuse()
        elif not self.open:
            self.record.blame(now)
