"""Prometheus metrics, read from the report and the router's state at the moment they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from radixrt.messages import Load
from radixrt.report.causes import Misses
from radixrt.report.report import Report
from radixrt.report.workers import MOST_GONE, WorkerState

if TYPE_CHECKING:
    from radixrt.router.core import RouterCore


def render(report: Report, core: RouterCore, tenant: str | None = None) -> str:
    """The metrics in Prometheus' text format. Those with tenants are of one alone where one is named; sums over all
    that name nobody, and the workers' loads, are shown always. The sums of workers that are gone are shown for an hour,
    of the last hundred."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(report, core, tenant))
    return generate_latest(registry).decode()


class _Collector(Collector):
    def __init__(self, report: Report, core: RouterCore, tenant: str | None) -> None:
        self._report = report
        self._core = core
        self._tenant = tenant

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._tokens()
        yield from self._sessions()
        yield from self._workers()

    def _requests(self) -> Iterator[Metric]:
        counters = self._core.counters
        outcomes = CounterMetricFamily("radixrt_requests", "Requests by how they ended.", labels=["outcome"])
        for outcome in ("finished", "cancelled", "failed", "refused"):
            outcomes.add_metric([outcome], getattr(counters, outcome))
        yield outcomes
        yield GaugeMetricFamily(
            "radixrt_sequences_in_flight", "Sequences placed or waiting for a worker.", self._core.runs_in_flight
        )
        for name, text in (
            ("redispatched", "Sequences that went on at another worker."),
            ("workers_lost", "Workers that left or were lost."),
            ("snapshots", "Snapshots asked of workers to mend the index."),
        ):
            yield CounterMetricFamily(f"radixrt_{name}", text, getattr(counters, name))
        yield CounterMetricFamily(
            "radixrt_index_predicted_tokens", "Hits that the index predicted.", counters.predicted_tokens
        )
        yield CounterMetricFamily(
            "radixrt_index_drift_tokens", "Sum of |predicted - actual| hits.", counters.drift_tokens
        )
        yield GaugeMetricFamily("radixrt_index_tokens", "Distinct tokens in the index.", self._core.index.tokens)

    def _tokens(self) -> Iterator[Metric]:
        families = {
            "prompt_tokens": CounterMetricFamily("radixrt_prompt_tokens", "Prompt tokens.", labels=["tenant"]),
            "hit_tokens": CounterMetricFamily(
                "radixrt_cached_prompt_tokens", "Prompt tokens whose KV was reused.", labels=["tenant"]
            ),
            "bound_tokens": CounterMetricFamily(
                "radixrt_infinite_cache_tokens", "Hits that an infinite cache would have given.", labels=["tenant"]
            ),
            "generated_tokens": CounterMetricFamily("radixrt_generated_tokens", "Tokens drawn.", labels=["tenant"]),
        }
        misses = CounterMetricFamily(
            "radixrt_missed_prompt_tokens", "Prompt tokens computed, by cause.", labels=["tenant", "cause"]
        )
        for tenant, tally in self._report.by_tenant().items():
            if self._tenant not in (None, tenant):
                continue
            for name, family in families.items():
                family.add_metric([tenant], getattr(tally, name))
            for cause, count in zip(Misses._fields, tally.misses, strict=True):
                misses.add_metric([tenant, cause], count)
        yield from families.values()
        yield misses

    def _sessions(self) -> Iterator[Metric]:
        text = "Answers in chats that are spelled by the ids that were generated."
        kept = CounterMetricFamily("radixrt_session_kept_turns", text, labels=["tenant"])
        text = "Answers in chats of which generated ids were lost."
        dropped = CounterMetricFamily("radixrt_session_dropped_turns", text, labels=["tenant", "cause"])
        for tenant, counts in self._report.sessions.items():
            if self._tenant in (None, tenant):
                kept.add_metric([tenant], counts["kept_turns"])
                for cause, count in counts["dropped_turns"].items():
                    dropped.add_metric([tenant, cause], count)
        yield from (kept, dropped)
        yield from self._pauses()

    def _pauses(self) -> Iterator[Metric]:
        now = GaugeMetricFamily("radixrt_paused_sessions", "Sessions that wait for a tool.", labels=["tenant"])
        families = {
            name: CounterMetricFamily(f"radixrt_{metric}", text, labels=["tenant"])
            for name, metric, text in (
                ("ended", "pauses", "Sessions that waited for a tool."),
                ("dropped", "dropped_pauses", "Sessions that did not go on from a pause that is over."),
                ("seconds", "paused_seconds", "Seconds that they waited."),
                ("tokens", "resumed_tokens", "Tokens that they had when they went on."),
                ("kept_tokens", "resumed_cached_tokens", "Of them, those that were still cached."),
            )
        }
        for tenant, waits in self._report.waits.items():
            if self._tenant in (None, tenant):
                now.add_metric([tenant], waits.now)
                for name, family in families.items():
                    family.add_metric([tenant], getattr(waits, name))
        yield from (now, *families.values())

    def _workers(self) -> Iterator[Metric]:
        serving = {member.name for member in self._core.members}
        yield GaugeMetricFamily("radixrt_workers", "Workers that serve.", len(serving))
        gauges = {
            name: GaugeMetricFamily(f"radixrt_worker_{metric}", text, labels=["worker"])
            for name, metric, text in (
                ("running", "running_requests", "Sequences that run."),
                ("waiting", "waiting_requests", "Sequences that wait."),
                ("queued_tokens", "queued_tokens", "Tokens to be computed before all have caught up."),
                ("kept_tokens", "kept_tokens", "Tokens leased for a moment for those who go on from ended requests."),
            )
        }
        pages = GaugeMetricFamily("radixrt_worker_pages", "KV pages by state.", labels=["worker", "state"])
        counters = {
            name: CounterMetricFamily(f"radixrt_worker_{name}", text, labels=["worker"])
            for name, text in (
                ("evicted_tokens", "Tokens evicted from the cache."),
                ("preemptions", "Sequences sent back to wait for want of pages."),
                ("steps", "Steps computed."),
                ("plain_keys", "Tokens whose K and V decodes attended to, in a layer."),
                ("read_keys", "Of them, those read from memory: what a batch shares is read once."),
                ("busy_seconds", "Seconds that the device spent on steps."),
                ("forced_tokens", "Generated tokens that a grammar forced, and that were not drawn."),
                ("drafted_tokens", "Tokens that were guessed by what stood before, and computed."),
                ("accepted_tokens", "Of them, those that were right."),
            )
        }
        for name, state in self._states(serving).items():
            for counter, count in state.sums.items():
                counters[counter].add_metric([name], count)
            if name in serving:
                self._add_gauges(name, state.load, gauges, pages)
        yield from gauges.values()
        yield pages
        yield from counters.values()

    def _states(self, serving: set[str]) -> dict[str, WorkerState]:
        """Of those that serve, and of the last that are gone: a sum that was scraped once more is not lost."""
        states = self._report.workers
        gone = [name for name in states if name not in serving]
        hidden = set(gone[:-MOST_GONE])
        return {name: state for name, state in states.items() if name not in hidden}

    @staticmethod
    def _add_gauges(name: str, load: Load, gauges: dict[str, GaugeMetricFamily], pages: GaugeMetricFamily) -> None:
        for gauge, family in gauges.items():
            family.add_metric([name], getattr(load, gauge))
        leased = load.total_pages - load.free_pages - load.evictable_pages
        for state, count in (("free", load.free_pages), ("evictable", load.evictable_pages), ("leased", leased)):
            pages.add_metric([name, state], count)
