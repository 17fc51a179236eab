"""Traces of requests in OpenTelemetry's form: one span for each, sent to a collector by a thread of its own.

    arrival --queue--> a worker has begun with it --prefill--> first token --decode--> last token

The queue is the router's and the worker's. Attributes have the names of OpenTelemetry's conventions for generative AI
or, of times, of vLLM's; others begin with `radixrt.`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from radixrt.router.core.request import Request, RunState
from radixrt.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.util.types import AttributeValue

SPAN = "llm_request"
EXPORT_SECONDS = 5
"""How long a collector may take to answer."""
NANO = 1_000_000_000


def make_exporter(endpoint: str) -> SpanExporter:
    """Sends spans to `endpoint` as OTLP over HTTP. Raises ImportError without the extra `otel`."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS)


class Traces:
    """Makes spans for a collector at `endpoint`; which ones are kept, and how many are sent at once, is as the
    variables OTEL_... of the environment say. Raises ValueError if OpenTelemetry is not installed."""

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            exporter = make_exporter(endpoint)
        except ImportError as error:
            raise ValueError(f"--otlp-traces-endpoint: pip install 'radixrt[otel]' ({error})") from error
        ours = Resource.create({SERVICE_NAME: "radixrt", SERVICE_VERSION: __version__})
        self._provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("radixrt.router", __version__)
        self._context = TraceContextTextMapPropagator()
        self._kind = SpanKind.SERVER

    def ended(self, request: Request, well: bool) -> None:
        """A request has ended, `well` if its last choice did so by itself. Its span is a child of the caller's."""
        end, runs = time.monotonic(), request.runs
        since_epoch = time.time_ns() - int(end * NANO)
        began = min(run.arrived_at for run in runs)
        caller = request.origin.traceparent
        span = self._tracer.start_span(
            SPAN,
            self._context.extract({"traceparent": caller}) if caller else None,
            self._kind,
            dict(_attributes(request, well)) | dict(_seconds(runs, began, end)),
            start_time=since_epoch + int(began * NANO),
        )
        span.end(since_epoch + int(end * NANO))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _attributes(request: Request, well: bool) -> Iterator[tuple[str, AttributeValue]]:
    runs, first = request.runs, request.runs[0]
    yield "gen_ai.request.id", str(request.id)
    yield "gen_ai.request.model", request.namespace.model
    yield "gen_ai.request.n", len(runs)
    if first.sampling.max_tokens is not None and request.bounded:
        yield "gen_ai.request.max_tokens", first.sampling.max_tokens
    yield "gen_ai.request.temperature", first.sampling.temperature
    yield "gen_ai.request.top_p", first.sampling.top_p
    yield "gen_ai.usage.input_tokens", sum(run.prompt_len for run in runs)
    yield "gen_ai.usage.output_tokens", sum(len(run.emitted) for run in runs)
    yield "gen_ai.usage.cache_read.input_tokens", sum(run.cached for run in runs)
    yield "radixrt.infinite_cache_tokens", sum(run.ideal for run in runs)
    yield "radixrt.completed", well
    yield "radixrt.tenant", request.namespace.tenant
    yield "radixrt.workers", sorted({run.served_by for run in runs if run.served_by})
    for name, value in (("program", request.origin.program), ("branch", request.origin.branch)):
        if value:
            yield f"radixrt.{name}", value


def _seconds(runs: list[RunState], began: float, end: float) -> Iterator[tuple[str, AttributeValue]]:
    """Of several choices: until the first one begins, and until the last one ends."""
    yield "gen_ai.latency.e2e", end - began
    started = [run for run in runs if run.emitted]
    if started:
        queue = min(run.sent_at + run.queued for run in started) - began
        first = min(run.first_at for run in started) - began
        yield "gen_ai.latency.time_in_queue", queue
        yield "gen_ai.latency.time_to_first_token", first
        yield "gen_ai.latency.time_in_model_prefill", max(0.0, first - queue)
        yield "gen_ai.latency.time_in_model_decode", max(run.last_at for run in started) - began - first
