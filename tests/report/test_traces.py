"""Spans of requests, as a collector gets them."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from radixrt.client import Client
from radixrt.client.local import LocalStack
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.frontend.server import FrontendThread
from radixrt.messages import Origin, Sampling
from radixrt.router.server import traces

memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def exporter(monkeypatch):
    found = memory.InMemorySpanExporter()
    monkeypatch.setattr(traces, "make_exporter", lambda endpoint: found)
    return found


def stack(at_once: int = 8, **settings) -> LocalStack:
    router = RouterConfig(served_model_name="m", tokenizer="none", **settings)
    worker = WorkerConfig(fake="0,0.002", served_model_name="m", max_num_seqs=at_once)
    return LocalStack(StackConfig(router, worker, FrontendConfig(), 1))


def test_a_span_for_each_request_under_the_callers_with_its_times_and_hits(exporter):
    began = time.time_ns()
    with stack(otlp_traces_endpoint="http://collector") as running, Client(running.address) as client:
        for _ in range(2):
            sampling = Sampling(max_tokens=4, ignore_eos=True, temperature=0.5)
            client.generate(list(range(5, 40)), sampling, origin=Origin("agent", "0", 1, CALLER))
        stream = client.stream([5, 6, 7], Sampling(max_tokens=100_000, ignore_eos=True))
        next(stream)
        stream.close()
    cold, warm, cancelled = exporter.get_finished_spans()
    assert {span.name for span in (cold, warm, cancelled)} == {"llm_request"}
    assert format(warm.context.trace_id, "032x") in CALLER and format(warm.parent.span_id, "016x") in CALLER
    assert cancelled.parent is None and cancelled.context.trace_id != warm.context.trace_id
    assert began < warm.start_time < warm.end_time < time.time_ns()

    found = dict(warm.attributes)
    assert {name: value for name, value in found.items() if "latency" not in name} == {
        "gen_ai.request.id": found["gen_ai.request.id"],
        "gen_ai.request.model": "m",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.input_tokens": 35,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 34,
        "radixrt.infinite_cache_tokens": 34,
        "radixrt.completed": True,
        "radixrt.tenant": "default",
        "radixrt.workers": found["radixrt.workers"],
        "radixrt.program": "agent",
        "radixrt.branch": "0",
    }
    assert cold.attributes["gen_ai.usage.cache_read.input_tokens"] == 0
    queue, prefill, decode = (
        found[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    )
    assert queue + prefill == pytest.approx(found["gen_ai.latency.time_to_first_token"])
    assert 0 <= queue < prefill and decode > 0.003
    assert queue + prefill + decode <= found["gen_ai.latency.e2e"]
    assert cancelled.attributes["radixrt.completed"] is False


def test_the_queue_of_a_worker_is_part_of_the_queue(exporter):
    sampling = Sampling(max_tokens=50, ignore_eos=True)
    with stack(1, otlp_traces_endpoint="http://collector") as running, Client(running.address) as client:
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda first: client.generate([first, 6, 7], sampling), (3, 4)))
    first, second = (span.attributes for span in exporter.get_finished_spans())
    whole, queue = first["gen_ai.latency.e2e"], "gen_ai.latency.time_in_queue"
    assert first[queue] < 0.5 * whole < second[queue] < second["gen_ai.latency.e2e"]
    assert second["gen_ai.latency.time_in_model_prefill"] < 0.5 * whole


def test_the_header_of_http_reaches_the_span(exporter):
    body = {"prompt": [5, 6, 7], "max_tokens": 2}
    with stack(otlp_traces_endpoint="http://collector") as running:
        own = FrontendConfig(served_model_name="m", tokenizer="none", router=running.address, port=0)
        frontend = FrontendThread(resolve(own))
        for span in (CALLER, "0" * 200):
            httpx.post(f"{frontend.url}/v1/completions", json=body, headers={"traceparent": span}).raise_for_status()
        frontend.stop()
    of_caller, alone = exporter.get_finished_spans()
    assert format(of_caller.parent.span_id, "016x") in CALLER and alone.parent is None


def test_without_the_extra_it_is_named(monkeypatch):
    def missing(endpoint):
        raise ImportError("No module named 'opentelemetry.exporter'")

    monkeypatch.setattr(traces, "make_exporter", missing)
    with pytest.raises(ValueError, match=r"--otlp-traces-endpoint: pip install 'radixrt\[otel\]'"):
        traces.Traces("http://collector")


def test_by_default_nothing_of_it_is_imported():
    code = "import sys, radixrt.router.server.loop; print([name for name in sys.modules if 'opentelemetry' in name])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
