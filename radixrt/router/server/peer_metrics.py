"""The figures that vLLM and SGLang have as well, by their names and types, for dashboards and load generators that know
those. What is counted is what the metrics of `prometheus` count."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from radixrt.report.latency import Latency
from radixrt.report.report import Report, Tally
from radixrt.router.core.core import RouterCore
from radixrt.router.core.worker import Worker

Value = int | float
LABELS = ("model_name", "tenant")
WORKER_LABELS = ("model_name", "engine")
"""`engine` is the name of the worker; vLLM numbers them."""


def peer_metrics(report: Report, core: RouterCore, tenant: str | None) -> Iterator[Metric]:
    """The metrics of all tenants, or those of one of them: tokens and latencies."""
    yield from _tokens(report, core, tenant)
    yield from _latencies(report, core, tenant)
    if tenant is None:
        yield from _requests(core)
        yield from _workers(report, core)


def shows(core: RouterCore, visible: str | None, tenant: str, model: str) -> bool:
    """Whether there are series of a tenant and a model; `visible`: the only tenant that may be seen, None: all."""
    return visible in (None, tenant) and not core.workers.is_unloaded(model)


TOKENS = (
    ("vllm:prompt_tokens", "prompt_tokens", "Prompt tokens."),
    ("vllm:generation_tokens", "generated_tokens", "Tokens generated."),
    ("vllm:prefix_cache_queries", "prompt_tokens", "Prompt tokens that were looked up in the cache."),
    ("vllm:prefix_cache_hits", "hit_tokens", "Prompt tokens whose KV was reused."),
    ("sglang:prompt_tokens", "prompt_tokens", "Prompt tokens."),
    ("sglang:generation_tokens", "generated_tokens", "Tokens generated."),
    ("sglang:cached_tokens", "hit_tokens", "Prompt tokens whose KV was reused."),
)
"""(Name of a counter without _total, field of a Tally, description)."""


def _tokens(report: Report, core: RouterCore, visible: str | None) -> Iterator[Metric]:
    tallies: dict[tuple[str, str], Tally] = report.by_tenant_and_model()
    for name, field, text in TOKENS:
        family = CounterMetricFamily(name, text, labels=LABELS)
        for (tenant, model), tally in tallies.items():
            if shows(core, visible, tenant, model):
                family.add_metric([model, tenant], getattr(tally, field))
        yield family


LATENCIES = (
    ("time_to_first_token_seconds", "first", "vllm sglang", "From the arrival of a sequence to its first token."),
    ("inter_token_latency_seconds", "tokens", "vllm sglang", "Of each token after the first: its sequence's mean."),
    ("request_time_per_output_token_seconds", "each", "vllm", "Mean of a sequence for each token after its first."),
    ("e2e_request_latency_seconds", "whole", "vllm sglang", "From the arrival of a sequence to its last token."),
)
"""(Name of a histogram, field of a Latency, whose it is, description)."""


def _latencies(report: Report, core: RouterCore, visible: str | None) -> Iterator[Metric]:
    latencies: dict[tuple[str, str], Latency] = report.latencies
    for name, field, peers, text in LATENCIES:
        for peer in peers.split():
            family = HistogramMetricFamily(f"{peer}:{name}", text, labels=LABELS)
            for (tenant, model), latency in latencies.items():
                if shows(core, visible, tenant, model):
                    histogram = getattr(latency, field)
                    family.add_metric([model, tenant], [*histogram.buckets()], histogram.total)
            yield family


def _requests(core: RouterCore) -> Iterator[Metric]:
    counters = core.counters
    yield CounterMetricFamily("sglang:num_requests", "Requests that ended by themselves.", counters.finished)
    yield CounterMetricFamily("sglang:num_aborted_requests", "Requests that were cancelled.", counters.cancelled)


def _workers(report: Report, core: RouterCore) -> Iterator[Metric]:
    workers = list(core.workers)
    for names, text, gauge in (
        ("vllm:num_requests_running sglang:num_running_reqs", "Running sequences.", _running),
        ("vllm:num_requests_waiting sglang:num_queue_reqs", "Waiting sequences.", _waiting),
        ("vllm:kv_cache_usage_perc sglang:token_usage", "Share of KV pages that requests hold, 0 to 1.", _usage),
        ("sglang:num_used_tokens", "Tokens in KV pages that requests hold.", _used_tokens),
        ("sglang:max_total_num_tokens", "Tokens that the KV pages can hold.", _total_tokens),
        ("sglang:hicache_host_used_tokens", "Tokens whose pages are in host memory.", _host_tokens),
        ("sglang:hicache_host_total_tokens", "Tokens whose pages host memory can hold.", _host_total),
    ):
        for name in names.split():
            family = GaugeMetricFamily(name, text, labels=WORKER_LABELS)
            for worker in workers:
                family.add_metric([worker.info.model, worker.name], gauge(worker))
            yield family
    for names, text, field in (
        ("vllm:num_preemptions sglang:num_retracted_reqs", "Sequences preempted as pages ran out.", "preemptions"),
        ("vllm:spec_decode_num_draft_tokens", "Tokens that were drafted and verified.", "drafted_tokens"),
        ("vllm:spec_decode_num_accepted_tokens", "Of these, those that were accepted.", "accepted_tokens"),
    ):
        for name in names.split():
            counter = CounterMetricFamily(name, text, labels=WORKER_LABELS)
            for worker in workers:
                if (state := report.workers.get(worker.name)) is not None:
                    counter.add_metric([worker.info.model, worker.name], state.sums[field])
            yield counter


def _running(worker: Worker) -> Value:
    return worker.load.running


def _waiting(worker: Worker) -> Value:
    return worker.load.waiting


def _used_pages(worker: Worker) -> int:
    load = worker.load
    return load.total_pages - load.free_pages - load.evictable_pages


def _usage(worker: Worker) -> Value:
    return _used_pages(worker) / max(1, worker.load.total_pages)


def _used_tokens(worker: Worker) -> Value:
    return _used_pages(worker) * worker.info.page_size


def _total_tokens(worker: Worker) -> Value:
    return worker.load.total_pages * worker.info.page_size


def _host_tokens(worker: Worker) -> Value:
    return worker.load.host_tokens


def _host_total(worker: Worker) -> Value:
    return worker.info.host_tokens
