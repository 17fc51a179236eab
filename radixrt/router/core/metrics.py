"""The router's counters, and what it passes to the hit-rate report for each run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from radixrt.messages import Load, SessionFacts
from radixrt.report.causes import Misses
from radixrt.report.evictions import Eviction
from radixrt.report.recent import MAX_NAME_CHARS, Ended
from radixrt.router.core.request import RunState
from radixrt.router.placement.index import Cut

if TYPE_CHECKING:
    from radixrt.report import Report


@dataclass(slots=True)
class Counters:
    """Sums since start. `drift_tokens` sums |predicted - actual| hits over runs."""

    requests: int = 0
    refused: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    redispatched: int = 0
    workers_lost: int = 0
    workers_stuck: int = 0
    snapshots: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    predicted_tokens: int = 0
    drift_tokens: int = 0


class Recorder:
    """Updates the counters, and the report if there is one."""

    def __init__(self, report: Report | None, counters: Counters) -> None:
        self._report = report
        self._counters = counters

    def arrived(self, run: RunState) -> None:
        if self._report:
            run.ideal = self._report.arrived(run.request.namespace.key, run.prompt, run.request.namespace.tenant)

    def session(self, tenant: str, facts: SessionFacts) -> None:
        if self._report and (facts.kept or facts.dropped):
            self._report.session(tenant, facts)

    def load(self, worker: str, load: Load) -> None:
        if self._report:
            self._report.load(worker, load)

    def first_token(self, run: RunState) -> None:
        if self._report:
            self._report.began(run.request.namespace.tenant, run.request.namespace.model, run.first_at - run.arrived_at)

    def finished(self, run: RunState) -> None:
        """A run has ended by itself, at a stop string, or by length."""
        if self._report and run.emitted:
            first, last = run.first_at - run.arrived_at, run.last_at - run.arrived_at
            self._report.took(run.request.namespace.tenant, run.request.namespace.model, first, last, len(run.emitted))

    def failed(self, tenant: str, worker: str, text: str) -> None:
        """See `Recent.failed`."""
        if self._report:
            self._report.recent.failed(tenant, worker, text)

    def tick(self) -> None:
        """To be called about once a second."""
        if self._report:
            self._report.date_uses()

    def evicted(self, worker: str, parts: list[Cut], newest: RunState | None, now: float) -> None:
        """A worker has removed parts of its cache; `newest`: the run that it was sent last."""
        if self._report:
            tenant = newest.request.namespace.tenant if newest else ""
            program = newest.request.origin.program[:MAX_NAME_CHARS] if newest else ""
            for part in parts:
                self._report.recent.evictions.add(Eviction(now, worker, *part, tenant, program))

    def ended(self, run: RunState, end: str) -> None:
        """A run has ended, for the reason `end`. Its tokens count if at least its prompt was computed."""
        computed = run.started or bool(run.emitted)
        if computed:
            self._count(run)
        if self._report:
            self._keep(self._report, run, end, self._sum(self._report, run) if computed else None)

    def _count(self, run: RunState) -> None:
        counters = self._counters
        counters.prompt_tokens += run.prompt_len
        counters.generated_tokens += len(run.emitted)
        counters.cached_tokens += run.cached
        counters.predicted_tokens += run.hit
        counters.drift_tokens += abs(run.hit - run.cached)

    def _sum(self, report: Report, run: RunState) -> Misses:
        request = run.request
        if request.resumed and run.index == 0:
            tokens = min(request.resumed.tokens, run.reusable)
            report.resumed(request.namespace.tenant, tokens, min(run.cached, tokens))
        return report.finished(
            namespace=request.namespace.key,
            tenant=request.namespace.tenant,
            origin=request.origin,
            worker=run.worker_name,
            page_size=run.worker.info.page_size if run.worker else 1,
            prompt=run.prompt,
            generated=run.emitted.tobytes(),
            reusable_tokens=run.reusable,
            cached_tokens=run.cached,
            bound_tokens=run.ideal,
            predicted_tokens=run.hit,
            best_tokens=run.best_hit,
            model=request.namespace.model,
        )

    @staticmethod
    def _keep(report: Report, run: RunState, end: str, misses: Misses | None) -> None:
        namespace = run.request.namespace
        report.recent.ended(
            Ended(
                id=run.name,
                index=run.index,
                namespace=namespace.key,
                tenant=namespace.tenant,
                program=run.request.origin.program[:MAX_NAME_CHARS],
                model=namespace.model,
                worker=run.worker_name,
                end=end,
                prompt=run.prompt_len,
                hit=run.cached,
                bound=run.ideal if misses is None else run.prompt_len - misses.never_seen - misses.logits,
                generated=len(run.emitted),
                arrived=run.arrived_at,
                first=run.first_at - run.arrived_at if run.emitted else None,
                misses=misses,
                ids=run.prompt,
                answer=run.emitted.tobytes(),
            )
        )
