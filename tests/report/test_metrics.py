"""Metrics of a router that serves simulated workers, and its report beside its counters."""

from __future__ import annotations

import json
from array import array

import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixrt.cli import main
from radixrt.client import Client, ServerError
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig
from radixrt.launch import LocalStack, free_tcp_address
from radixrt.messages import Load, Origin, Register, Sampling
from radixrt.report import Report, to_text
from radixrt.report.metrics import render
from radixrt.router.core import RouterCore

SHORT = Sampling(max_tokens=4)
PAGE_STATES = ("free", "evictable", "leased")


def stack(workers: int = 2, page_size: int = 1, **router) -> LocalStack:
    worker = WorkerConfig(served_model_name="m", fake="0,0", page_size=page_size)
    return LocalStack(StackConfig(RouterConfig(tokenizer="none", **router), worker, FrontendConfig(), workers=workers))


def samples(text: str) -> dict[tuple, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name, *sorted(sample.labels.items())] = sample.value
    return found


@pytest.mark.parametrize("page_size", [1, 16])
def test_report_metrics_and_replies_agree(page_size):
    trunk = list(range(10, 210))
    with stack(page_size=page_size) as running, Client(running.address) as client:
        hits = 0
        for i in range(6):
            usage = client.generate([*trunk, i + 500], SHORT, origin=Origin("agent", str(i), i % 2)).usage
            hits += usage.cached_tokens
        with pytest.raises(ServerError):
            client.generate([], SHORT)
        scored = client.score(trunk, [[5, 6], [7]])
        hits += scored.usage.cached_tokens
        report, metrics = client.report(), samples(client.metrics())
    total = report["total"]
    assert total["requests"] == 8 and total["hit_tokens"] == hits > 1000
    assert total["prompt_tokens"] == 6 * 201 + 2 * 200 + 3
    assert total["prompt_tokens"] - total["hit_tokens"] == sum(total["misses"].values())
    assert total["hit_tokens"] <= total["bound_tokens"]
    assert total["misses"]["logits"] == 6 + (2 + 1) + (1 + 1)
    tenant = ("tenant", "default")
    assert metrics["radixrt_prompt_tokens_total", tenant] == total["prompt_tokens"]
    assert metrics["radixrt_cached_prompt_tokens_total", tenant] == hits
    assert metrics["radixrt_infinite_cache_tokens_total", tenant] == total["bound_tokens"]
    assert metrics["radixrt_requests_total", ("outcome", "finished")] == 7
    assert metrics["radixrt_requests_total", ("outcome", "refused")] == 1
    assert metrics["radixrt_workers",] == 2
    missed = sum(value for name, value in metrics.items() if name[0] == "radixrt_missed_prompt_tokens_total")
    assert missed == sum(total["misses"].values())
    served = [row for row in report["workers"] if row["requests"]]
    assert sum(row["requests"] for row in served) == 8 and all("used_pages" in row for row in served)
    assert {(row["program"], row["depth"]) for row in report["programs"]} == {("agent", 0), ("agent", 1), ("", 0)}
    assert "program agent, fork depth 1" in to_text(report)


def test_a_key_sees_its_tenant():
    with stack(1, api_key=("a:key-a", "b:key-b")) as running:
        with Client(running.address, api_key="key-a") as client:
            client.generate(array("i", [5, 6, 7]).tolist(), SHORT)
        with Client(running.address, api_key="key-b") as client:
            assert client.generate([5, 6, 7], SHORT).usage.cached_tokens == 0, "tenants never share"
            assert [row["tenant"] for row in client.report()["tenants"]] == ["b"]
            metrics = client.metrics()
            assert 'tenant="b"' in metrics and 'tenant="a"' not in metrics
            assert samples(metrics)["radixrt_requests_total", ("outcome", "finished")] == 2
        with Client(running.address, api_key="wrong") as client:
            for ask in (client.report, client.metrics):
                with pytest.raises(ServerError) as caught:
                    ask()
                assert caught.value.code == 401


def test_the_command(capsys):
    with stack(1, api_key=("a:key-a",), client_address=free_tcp_address()) as running:
        with Client(running.address, api_key="key-a") as client:
            client.generate([5, 6, 7], SHORT, origin=Origin("agent"))
        where = ["report", "--url", running.address, "--api-key"]
        assert main([*where, "key-a"]) == 0
        assert "program agent" in capsys.readouterr().out
        assert main([*where, "key-a", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["total"]["requests"] == 1
        assert main([*where, "wrong"]) == 1
        assert capsys.readouterr() == ("", "radixrt report: unknown API key (401)\n")


def test_names_are_escaped_and_only_serving_workers_have_loads():
    report, core = Report(1000), RouterCore(RouterConfig())
    name = 'w"\\\n1'
    core.register(Register(name=name, model="m", max_model_len=9, page_size=1, total_pages=9, max_running=1), 0.0)
    for worker in (name, "gone"):
        report.load(worker, Load(running=3, waiting=2, free_pages=4, evictable_pages=1, total_pages=9, steps=7))
    found = samples(render(report, core))
    assert found["radixrt_worker_running_requests", ("worker", name)] == 3
    assert found["radixrt_worker_waiting_requests", ("worker", name)] == 2
    states = {state: found["radixrt_worker_pages", ("state", state), ("worker", name)] for state in PAGE_STATES}
    assert states == {"free": 4, "evictable": 1, "leased": 4}
    assert ("radixrt_worker_running_requests", ("worker", "gone")) not in found
    assert found["radixrt_worker_steps_total", ("worker", "gone")] == 7, "a sum never goes back"
