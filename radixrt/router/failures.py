"""Who is at fault when a worker fails a run: the worker, the run, or another run of the same step.

    a run fails on a worker -> it goes to one that has not failed it
                                 it gets on there        -> the worker was at fault
                                 all workers fail it     -> the run was: it ends with an error, and no worker is blamed
                                 its client ends it      -> nobody knows

All runs that a worker fails at once are one incident, which counts once: one of them may have caused it. It is blamed
on the worker only when all of them have got on elsewhere. Invalid fields of requests are no failures.

A worker that keeps failing is set aside: it gets no run while others can serve it, except for a probe now and then.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixrt.router.request import RunState

log = logging.getLogger("radixrt.router")

BLAME_WEIGHT = 0.25
"""Weight of the latest outcome in `Record.share`."""
MAX_FAILED_SHARE = 0.5
"""A worker with a larger share is set aside: three failures in a row do, for one that had none."""
MAX_FAILED_IN_ROW = 8
"""So many requests that fail on a worker, one after the other and nothing else, set it aside even if no other worker
serves them either."""
CLEAN_SHARE = 0.1
"""Below this share a worker's earlier failures are forgotten."""
FAILURE_HALF_LIFE = 10.0
"""Seconds after which a failure counts half in placement, while its worker is not set aside."""
MIN_PROBE_SECONDS = 1.0
"""Time until a worker that was set aside gets its first probe; it doubles with each one."""
MAX_PROBE_SECONDS = 60.0


class Record:
    """What is known of the failures of a worker's process. It is kept while the process is lost or joins again."""

    __slots__ = (
        "failed_at", "in_row", "incidents", "name", "probe_at", "probe_seconds", "request", "share", "undecided",
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
        """Incidents of different requests since the worker last gave a token."""
        self.request: object = None
        """Identifies the request of the last incident."""
        self.failed_at = 0.0
        """Time of the last incident."""
        self.probe_at = 0.0
        """When it may get its next probe, if it is set aside."""
        self.probe_seconds = MIN_PROBE_SECONDS
        """Time from the next probe to the one after it."""

    @property
    def set_aside(self) -> bool:
        return self.share > MAX_FAILED_SHARE or self.in_row >= MAX_FAILED_IN_ROW

    def failed_share(self, now: float) -> float:
        """The share of runs that it is expected to fail, for placement:

        recent = share * 2 ** -((now - failed_at) / FAILURE_HALF_LIFE)      `share` itself while it is set aside
        result = 1 - (1 - recent) * (1 - BLAME_WEIGHT) ** undecided         each counts as if it were blamed
        """
        if not self.incidents:
            return 0.0
        share = max(self.share, MAX_FAILED_SHARE) if self.set_aside else self._recent(now)
        return 1 - (1 - share) * (1 - BLAME_WEIGHT) ** self.undecided

    def _recent(self, now: float) -> float:
        return self.share * 0.5 ** ((now - self.failed_at) / FAILURE_HALF_LIFE)

    def failed(self, request: object, now: float, *, gave_tokens: bool) -> None:
        """Requests have failed there, among them one that `request` identifies; `gave_tokens`: to others since the
        last time."""
        before = self.set_aside
        self.incidents += 1
        self.undecided += 1
        if gave_tokens:
            self.in_row = 1
        elif request != self.request:
            self.in_row += 1
        self.request, self.failed_at = request, now
        self._is_worse(before, now)

    def excuse(self) -> None:
        """An incident cannot be blamed on the worker."""
        self.undecided -= 1

    def blame(self, now: float) -> None:
        """An incident is to be blamed on the worker."""
        before = self.set_aside
        self.undecided -= 1
        self.share += (1 - self.share) * BLAME_WEIGHT
        self._is_worse(before, now)

    def succeeded(self) -> None:
        """A run has ended well there."""
        if not self.incidents:
            return
        before = self.set_aside
        self.share *= 1 - BLAME_WEIGHT
        self.in_row = 0
        if self.share < CLEAN_SHARE:
            self.share, self.probe_seconds = 0.0, MIN_PROBE_SECONDS
        if before and not self.set_aside:
            log.info("worker %s is not set aside any more: it serves requests again", self.name)
        self.probe_at = 0.0

    def probe(self, now: float) -> None:
        """It gets a probe now, or was set aside and gets its first one later."""
        self.probe_at = now + self.probe_seconds
        self.probe_seconds = min(2 * self.probe_seconds, MAX_PROBE_SECONDS)

    def _is_worse(self, before: bool, now: float) -> None:
        """It may be set aside now; `before`: it was so already."""
        if self.set_aside and not before:
            self.probe(now)
            log.warning("worker %s is set aside: it keeps failing requests", self.name)


class Incident:
    """Runs that a worker failed at once. `open`: how many of them have neither got on elsewhere nor ended."""

    __slots__ = ("excused", "open", "record")

    def __init__(self, record: Record, open: int) -> None:
        self.record = record
        self.open = open
        self.excused = False
        """Whether one of its runs may have caused it."""


def note_failures(record: Record, runs: Sequence[RunState], now: float, *, gave_tokens: bool) -> None:
    """A worker has failed `runs` at once. `gave_tokens`: to others, since it last failed any."""
    request = runs[-1].request
    record.failed((request.client, request.id), now, gave_tokens=gave_tokens)
    incident = Incident(record, len(runs))
    for run in runs:
        if run.got_on:
            run.failed_by.clear()
            run.in_company = False
        run.sent = len(run.emitted)
        run.failed_by.append(record)
        run.in_company |= len(runs) > 1
        run.incidents.append(incident)


def got_on(run: RunState, now: float) -> None:
    """A run has gained a token, or scores, after its failures."""
    incidents, run.incidents = run.incidents, []
    for incident in incidents:
        incident.open -= 1
        if not incident.open and not incident.excused:
            incident.record.blame(now)
        elif not incident.open:
            incident.record.excuse()


def ended(run: RunState) -> None:
    """A run has ended without getting on after its failures: it may have caused them."""
    incidents, run.incidents = run.incidents, []
    for incident in incidents:
        incident.open -= 1
        incident.excused = True
        if not incident.open:
            incident.record.excuse()
