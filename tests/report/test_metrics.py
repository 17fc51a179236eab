"""Metrics of a router that serves simulated workers, and its report beside its counters."""

from __future__ import annotations

from array import array

import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixrt.client import Client, ServerError
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig
from radixrt.launch import LocalStack
from radixrt.messages import Origin, Sampling
from radixrt.report import to_text

SHORT = Sampling(max_tokens=4)


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
        with Client(running.address, api_key="wrong") as client, pytest.raises(ServerError) as caught:
            client.report()
        assert caught.value.code == 401
