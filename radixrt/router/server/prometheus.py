"""Prometheus metrics, computed from the report and the router's state at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from radixrt.messages import Load
from radixrt.report.causes import Misses
from radixrt.report.report import Report
from radixrt.report.workers import MAX_GONE_WORKERS, WorkerState
from radixrt.router.core.core import RouterCore
from radixrt.router.server.peer_metrics import peer_metrics, shows


def render(report: Report, core: RouterCore, tenant: str | None = None, peers: bool = True) -> str:
    """The metrics in Prometheus' text format. With `tenant`, only those with a tenant label, of that tenant, and the
    number of its sequences in flight. LoRA adapters that were unloaded are left out. Counters of workers that have gone
    are shown for an hour, for at most the last hundred. `peers`: what other servers have, by their names as well."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(report, core, tenant, peers))
    return generate_latest(registry).decode()


class _Collector(Collector):
    def __init__(self, report: Report, core: RouterCore, tenant: str | None, peers: bool) -> None:
        self._report = report
        self._core = core
        self._tenant = tenant
        self._peers = peers

    def collect(self) -> Iterator[Metric]:
        yield self._in_flight()
        yield from self._tokens()
        yield from self._latencies()
        yield from self._sessions()
        yield from self._hints()
        if self._tenant is None:
            yield from self._requests()
            yield from self._workers()
        if self._peers:
            yield from peer_metrics(self._report, self._core, self._tenant)

    def _in_flight(self) -> Metric:
        core = self._core
        count = core.runs_in_flight if self._tenant is None else core.runs_of(self._tenant)
        return GaugeMetricFamily("radixrt_sequences_in_flight", "Sequences placed or waiting for a worker.", count)

    def _shows(self, tenant: str, model: str) -> bool:
        return shows(self._core, self._tenant, tenant, model)

    def _requests(self) -> Iterator[Metric]:
        counters = self._core.counters
        outcomes = CounterMetricFamily("radixrt_requests", "Requests by how they ended.", labels=["outcome"])
        for outcome in ("finished", "cancelled", "failed", "refused"):
            outcomes.add_metric([outcome], getattr(counters, outcome))
        yield outcomes
        for name, text in (
            ("redispatched", "Sequences that were continued by another worker."),
            ("workers_lost", "Workers that left or were lost."),
            ("workers_stuck", "Of workers_lost, those that were heard, but made no progress."),
            ("snapshots", "Resyncs requested from workers because the index had missed cache events."),
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
        labels = ["tenant", "model"]
        families = {
            name: CounterMetricFamily(f"radixrt_{metric}", text, labels=labels)
            for name, metric, text in (
                ("prompt_tokens", "prompt_tokens", "Prompt tokens."),
                ("hit_tokens", "cached_prompt_tokens", "Prompt tokens whose KV was reused."),
                ("bound_tokens", "infinite_cache_tokens", "Hits that an infinite cache would have given."),
                ("generated_tokens", "generated_tokens", "Tokens generated."),
            )
        }
        misses = CounterMetricFamily(
            "radixrt_missed_prompt_tokens", "Prompt tokens computed, by cause.", labels=[*labels, "cause"]
        )
        for (tenant, model), tally in self._report.by_tenant_and_model().items():
            if not self._shows(tenant, model):
                continue
            for name, family in families.items():
                family.add_metric([tenant, model], getattr(tally, name))
            for cause, count in zip(Misses._fields, tally.misses, strict=True):
                misses.add_metric([tenant, model, cause], count)
        yield from families.values()
        yield misses

    def _hints(self) -> Iterator[Metric]:
        hints = CounterMetricFamily(
            "radixrt_cache_hints", "Hints to the cache by what became of them.", labels=["tenant", "verb", "result"]
        )
        tokens = CounterMetricFamily(
            "radixrt_cache_hint_tokens", "Tokens for which hints were done.", labels=["tenant", "verb"]
        )
        for family, counts in ((hints, self._report.hints), (tokens, self._report.hint_tokens)):
            for labels, count in counts.items():
                if self._tenant in (None, labels[0]):
                    family.add_metric(labels, count)
        yield from (hints, tokens)

    def _latencies(self) -> Iterator[Metric]:
        families = {
            name: HistogramMetricFamily(f"radixrt_{metric}_seconds", text, labels=["tenant", "model"])
            for name, metric, text in (
                ("first", "time_to_first_token", "From the arrival of a sequence at the router to its first token."),
                ("each", "time_per_output_token", "Mean of a sequence for each token after its first."),
                ("whole", "sequence", "From the arrival of a sequence at the router to its last token."),
            )
        }
        for (tenant, model), latency in self._report.latencies.items():
            if self._shows(tenant, model):
                for name, family in families.items():
                    histogram = getattr(latency, name)
                    family.add_metric([tenant, model], [*histogram.buckets()], histogram.total)
        yield from families.values()

    def _sessions(self) -> Iterator[Metric]:
        text = "Answers in chat prompts that kept the token ids that were generated."
        kept = CounterMetricFamily("radixrt_session_kept_turns", text, labels=["tenant"])
        text = "Answers in chat prompts whose generated token ids could not be used."
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
                ("ended", "pauses", "Pauses of sessions for a tool that ended."),
                ("dropped", "dropped_pauses", "Pauses after which the session was not resumed."),
                ("seconds", "paused_seconds", "Duration of the pauses that ended."),
                ("tokens", "resumed_tokens", "Tokens of sessions when they were resumed."),
                ("kept_tokens", "resumed_cached_tokens", "Of resumed_tokens, those that were still cached."),
            )
        }
        for tenant, waits in self._report.waits.items():
            if self._tenant in (None, tenant):
                now.add_metric([tenant], waits.now)
                for name, family in families.items():
                    family.add_metric([tenant], getattr(waits, name))
        yield from (now, *families.values())

    def _workers(self) -> Iterator[Metric]:
        serving = {worker.name for worker in self._core.workers}
        yield GaugeMetricFamily("radixrt_workers", "Serving workers.", len(serving))
        text = "1 while the server takes no new requests."
        yield GaugeMetricFamily("radixrt_draining", text, self._core.drains.server)
        yield from self._progress()
        gauges = {
            name: GaugeMetricFamily(f"radixrt_worker_{metric}", text, labels=["worker"])
            for name, metric, text in (
                ("running", "running_requests", "Running sequences."),
                ("waiting", "waiting_requests", "Waiting sequences."),
                ("queued_tokens", "queued_tokens", "Tokens to compute until all sequences decode."),
                ("kept_tokens", "kept_tokens", "Tokens of ended requests that are leased for a follow-up request."),
                ("host_tokens", "host_tokens", "Tokens whose pages are in host memory."),
                ("disk_tokens", "disk_tokens", "Tokens whose pages are on disk."),
                ("disk_bytes", "disk_bytes", "Bytes of all that is in the folder for pages on disk."),
            )
        }
        pages = GaugeMetricFamily("radixrt_worker_pages", "KV pages by state.", labels=["worker", "state"])
        counters = {
            name: CounterMetricFamily(f"radixrt_worker_{name}", text, labels=["worker"])
            for name, text in (
                ("evicted_tokens", "Tokens evicted from the cache."),
                ("preemptions", "Sequences preempted because pages ran out."),
                ("steps", "Steps computed."),
                ("plain_keys", "Tokens whose K and V decodes attended to, in a layer."),
                ("read_keys", "Of plain_keys, those read from memory: a prefix shared in a batch is read once."),
                ("busy_seconds", "Seconds that the device spent on steps."),
                ("forced_tokens", "Generated tokens that a grammar forced, and that were not sampled."),
                ("drafted_tokens", "Tokens that were drafted and verified."),
                ("accepted_tokens", "Of drafted_tokens, those that were accepted."),
                ("fetched_tokens", "Tokens whose pages came back from host memory."),
                ("disk_hits", "Requests for which pages were read from disk."),
                ("disk_read_tokens", "Tokens whose pages were read from disk."),
                ("disk_read_bytes", "Bytes read from disk."),
                ("disk_read_seconds", "Seconds from requests' arrival to when their pages were read from disk."),
                ("disk_saved_seconds", "Seconds that computing what was read would have taken longer."),
                ("disk_written_tokens", "Tokens whose pages were written to disk."),
                ("disk_written_bytes", "Bytes written to disk."),
                ("disk_lost_tokens", "Tokens whose pages had gone from memory before they were written to disk."),
                ("disk_evicted_tokens", "Tokens whose pages were removed from disk to make room."),
                ("disk_early_tokens", "Of disk_evicted_tokens, those that were asked for within ten minutes."),
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
        yield from self._failures()

    def _failures(self) -> Iterator[Metric]:
        text = "1 while a worker that keeps failing gets probes only, as long as others serve."
        aside = GaugeMetricFamily("radixrt_worker_set_aside", text, labels=["worker"])
        for worker in self._core.workers:
            aside.add_metric([worker.name], worker.record.set_aside)
        yield aside

    def _progress(self) -> Iterator[Metric]:
        workers = self._core.workers
        text = "For how long a worker has had work, and no step has ended."
        stalled = GaugeMetricFamily("radixrt_worker_stalled_seconds", text, labels=["worker"])
        text = "1 while a worker gets no new sequences, as it is to leave."
        draining = GaugeMetricFamily("radixrt_worker_draining", text, labels=["worker"])
        for worker in workers:
            stalled.add_metric([worker.name], worker.stalled)
            draining.add_metric([worker.name], workers.is_closed(worker.name))
        for worker in workers.lost():
            if worker.stuck:
                stalled.add_metric([worker.name], worker.stalled)
        yield from (stalled, draining)

    def _states(self, serving: set[str]) -> dict[str, WorkerState]:
        """States of serving workers and of the last `MAX_GONE_WORKERS` that have gone, so that the final values of
        their counters are scraped."""
        states = self._report.workers
        gone = [name for name in states if name not in serving]
        hidden = set(gone[:-MAX_GONE_WORKERS])
        return {name: state for name, state in states.items() if name not in hidden}

    @staticmethod
    def _add_gauges(name: str, load: Load, gauges: dict[str, GaugeMetricFamily], pages: GaugeMetricFamily) -> None:
        for gauge, family in gauges.items():
            family.add_metric([name], getattr(load, gauge))
        leased = load.total_pages - load.free_pages - load.evictable_pages
        for state, count in (("free", load.free_pages), ("evictable", load.evictable_pages), ("leased", leased)):
            pages.add_metric([name, state], count)
