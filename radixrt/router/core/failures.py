"""Who is at fault when a worker fails a run: the worker, the run, or another run of the same step.

    a run fails on a worker -> it goes to one that has not failed it
                                 it gets on there        -> the worker was at fault
                                 all workers fail it     -> the run was: it ends with an error, and no worker is blamed
                                 its client ends it      -> nobody knows

All runs that a worker fails at once are one incident, which counts once: one of them may have caused it. It is blamed
on the worker only when all of them have got on elsewhere. So that they do, each is tried where no other suspect is
(`needs_trial`). Invalid fields of requests are no failures.

A worker that was at fault gets a run as a probe now and then, by which its share of failures is known. One that keeps
failing is set aside: while others can serve it gets nothing but the probes.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from radixrt.router.core.request import RunState
    from radixrt.router.core.worker import Worker

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
MAX_TRIES = 16
"""How often workers may fail a run before it ends, of however many there are."""
MAX_FREE_TRIES = 3
"""After so many failures together with others a run is sent only where no other such run is, so that those that are not
the cause part from it."""


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


class Incident:
    """Runs that a worker failed at once. `open`: those of them that have neither got on elsewhere nor ended."""

    __slots__ = ("excused", "gave_tokens", "open", "record", "together")

    def __init__(self, record: Record, runs: Sequence[RunState], *, gave_tokens: bool) -> None:
        self.record = record
        self.open = set(runs)
        self.together = len(runs) > 1
        self.gave_tokens = gave_tokens
        """Whether the worker had given tokens to others, since it last failed any."""
        self.excused = False
        """Whether a run that has ended may have caused it."""

    def is_doubtful(self, run: RunState) -> bool:
        """Whether another request than that of `run` may have caused it: so it is if `run` has got on since then."""
        if self.excused or (self.together and run not in self.open):
            return True
        return any(other.request is not run.request for other in self.open)

    def settle(self, run: RunState, now: float) -> None:
        """A run has got on elsewhere, or ended. If it was the last one, it is clear whether the worker is to blame."""
        self.open.discard(run)
        if not self.open and self.excused:
            self.record.excuse()
        elif not self.open:
            self.record.blame(now)


def note_failures(record: Record, runs: Sequence[RunState], now: float, *, gave_tokens: bool) -> None:
    """A worker has failed `runs` at once. `gave_tokens`: to others, since it last failed any."""
    request, gave_tokens = runs[-1].request, gave_tokens or record.served
    record.failed((request.client, request.id), now, gave_tokens=gave_tokens)
    incident = Incident(record, runs, gave_tokens=gave_tokens)
    for run in runs:
        if run.got_on or (len(runs) > 1 and len(run.emitted) > run.sent):
            run.tries.clear()
        run.sent = len(run.emitted)
        run.tries.append(incident)
        run.incidents.append(incident)


def next_tries(run: RunState, workers: Sequence[Worker]) -> list[Worker]:
    """Those of `workers` that may get a run that some have failed: the ones that have not, or if there are none, those
    where another request of the same step may have been the cause, if they do not fail others as well. No worker, if it
    was tried too often."""
    if len(run.tries) >= MAX_TRIES:
        return []
    tried = {incident.record for incident in run.tries}
    if untried := [worker for worker in workers if worker.record not in tried]:
        return untried
    failed = {incident.record for incident in run.tries if not incident.is_doubtful(run)}
    return [worker for worker in workers if worker.record not in failed and not worker.record.set_aside]


def needs_trial(run: RunState, workers: Sequence[Worker]) -> bool:
    """Whether a run is to be sent where no other suspect is: it may be the cause of others' failures, and it has failed
    on all of `workers` that may get it, or on several."""
    if not any(incident.is_doubtful(run) for incident in run.tries):
        return False
    tried = {incident.record for incident in run.tries}
    return len(run.tries) >= MAX_FREE_TRIES or all(worker.record in tried for worker in workers)


def got_on(run: RunState, now: float) -> None:
    """A run has gained a token, or scores, after its failures."""
    incidents, run.incidents = run.incidents, []
    for incident in incidents:
        incident.settle(run, now)


def ended(run: RunState) -> None:
    """A run has ended without getting on after its failures: it may have caused them. If it failed also where others
    were served, it has."""
    incidents, run.incidents = run.incidents, []
    is_cause = any(incident.gave_tokens for incident in incidents)
    for incident in incidents:
        incident.excused = True
        incident.settle(run, 0.0)
        if is_cause and incident.record.in_row:
            incident.record.in_row -= 1
