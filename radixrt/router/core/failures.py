"""Who is at fault when a worker fails a run: the worker, the run, or another run of the same step.

    a run fails on a worker -> it goes to one that has not failed it
                                 it makes progress there -> the worker was at fault
                                 all workers fail it     -> the run was: it ends with an error, and no worker is blamed
                                 its client ends it      -> nobody knows

All runs that a worker fails at once are one incident, which counts once: one of them may have caused it. It is blamed
on the worker only when all of them have made progress elsewhere. So that they do, each is tried where no other
suspect is (`needs_trial`). Invalid fields of requests are no failures.

A worker that was at fault gets a run as a probe now and then, by which its share of failures is known. One that keeps
failing is set aside: while others can serve it gets nothing but the probes.
"""

from __future__ import annotations

from collections.abc import Sequence

from radixrt.router.core.incidents import Incident, Record
from radixrt.router.core.request import RunState
from radixrt.router.core.worker import Worker

MAX_TRIES = 16
"""How often workers may fail a run before it ends, of however many there are."""
MAX_FREE_TRIES = 3
"""After so many failures together with others a run is sent only where no other such run is, so that those that are not
the cause part from it."""


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
