"""Metrics of a router that serves simulated workers, and its report beside its counters."""

from __future__ import annotations

import json
from array import array
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixrt.cli import main
from radixrt.client import Client, ServerError
from radixrt.client.local import LocalStack
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig
from radixrt.messages import Adapter, Load, Origin, Register, Sampling, StepDone
from radixrt.process.ports import free_tcp_address
from radixrt.report import Report, to_text
from radixrt.report.workers import GONE_SECONDS, KEPT_SECONDS, MAX_GONE_WORKERS
from radixrt.router.core.core import RouterCore
from radixrt.router.server.prometheus import render
from tests.waiting import eventually

SHORT = Sampling(max_tokens=4)
PAGE_STATES = ("free", "evictable", "leased")


def stack(workers: int = 2, page_size: int = 1, fake: str = "0,0", **router) -> LocalStack:
    worker = WorkerConfig(served_model_name="m", fake=fake, page_size=page_size)
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
    labels = ("model", "m"), ("tenant", "default")
    assert metrics["radixrt_prompt_tokens_total", *labels] == total["prompt_tokens"]
    assert metrics["radixrt_cached_prompt_tokens_total", *labels] == hits
    assert metrics["radixrt_infinite_cache_tokens_total", *labels] == total["bound_tokens"]
    assert metrics["radixrt_requests_total", ("outcome", "finished")] == 7
    assert metrics["radixrt_requests_total", ("outcome", "refused")] == 1
    assert metrics["radixrt_workers",] == 2
    missed = sum(value for name, value in metrics.items() if name[0] == "radixrt_missed_prompt_tokens_total")
    assert missed == sum(total["misses"].values())
    served = [row for row in report["workers"] if row["requests"]]
    assert sum(row["requests"] for row in served) == 8 and all("used_pages" in row for row in served)
    assert {(row["program"], row["depth"]) for row in report["programs"]} == {("agent", 0), ("agent", 1), ("", 0)}
    assert "program agent, fork depth 1" in to_text(report)


def test_a_key_sees_its_tenant_and_the_admins_key_everything():
    with stack(1, api_key=("a:key-a", "b:key-b"), admin_api_key="root") as running:
        with Client(running.address, api_key="key-a") as client:
            client.generate(array("i", [5, 6, 7]).tolist(), SHORT)
        with Client(running.address, api_key="key-b") as client:
            assert client.generate([5, 6, 7], SHORT).usage.cached_tokens == 0, "tenants never share"
            assert [row["tenant"] for row in client.report()["tenants"]] == ["b"]
            found = samples(client.metrics())
            assert found["radixrt_generated_tokens_total", ("model", "m"), ("tenant", "b")] == 4
            others = [name for name, *labels in found if ("tenant", "b") not in labels]
            assert others == ["radixrt_sequences_in_flight"], "of others, and of all, nothing"
            health = client.health()
            assert health["runs_in_flight"] == 0 and health["workers"][0]["model"] == "m"
            assert not {"counters", "index_tokens"} & set(health) and "running" not in health["workers"][0]
        with Client(running.address, api_key="root") as client:
            assert [row["tenant"] for row in client.report()["tenants"]] == ["a", "b"]
            found = samples(client.metrics())
            assert {value for name in found for label, value in name[1:] if label == "tenant"} == {"a", "b"}
            assert found["radixrt_requests_total", ("outcome", "finished")] == 2 and found["radixrt_workers",] == 1
            assert client.health()["counters"]["finished"] == 2
            client.clear_cache()
        for key in ("", "wrong"):
            with Client(running.address, api_key=key) as client:
                health = client.health()
                public = {"serving", "draining", "stuck", "max_model_len", "workers"}
                assert set(health) == public, "enough to wait for the workers"
                assert health["serving"] and len(health["workers"]) == 1
                for ask in (client.report, client.metrics, client.clear_cache):
                    with pytest.raises(ServerError) as caught:
                        ask()
                    assert caught.value.code == 401


def families(text: str) -> dict[str, str]:
    """The types of metrics by name."""
    return {family.name: family.type for family in text_string_to_metric_families(text)}


def test_names_of_vllm_and_sglang_count_the_same():
    trunk = list(range(10, 110))
    with stack(1, fake="0,0.01", page_size=4) as running, Client(running.address) as client:
        for i in range(4):
            client.generate([*trunk, i + 500], Sampling(max_tokens=5, ignore_eos=True))
            if i == 2:
                client.clear_cache()  # so that an infinite cache would have had more
        stream = client.stream(trunk, Sampling(max_tokens=1000, ignore_eos=True))
        next(stream)

        def running_now() -> str:
            text = client.metrics()
            (count,) = (value for name, value in samples(text).items() if name[0] == "vllm:num_requests_running")
            return text if count else ""

        text = eventually(running_now)
        stream.close()
    found, types = samples(text), families(text)
    (worker,) = (labels for name, *labels in found if name == "vllm:num_requests_running")
    labels = ("model_name", "m"), ("tenant", "default")
    own = ("model", "m"), ("tenant", "default")
    for name, ours in {
        "vllm:prompt_tokens_total": "radixrt_prompt_tokens_total",
        "vllm:prefix_cache_queries_total": "radixrt_prompt_tokens_total",
        "vllm:prefix_cache_hits_total": "radixrt_cached_prompt_tokens_total",
        "vllm:generation_tokens_total": "radixrt_generated_tokens_total",
        "sglang:prompt_tokens_total": "radixrt_prompt_tokens_total",
        "sglang:cached_tokens_total": "radixrt_cached_prompt_tokens_total",
        "sglang:generation_tokens_total": "radixrt_generated_tokens_total",
        "vllm:time_to_first_token_seconds_sum": "radixrt_time_to_first_token_seconds_sum",
        "sglang:e2e_request_latency_seconds_count": "radixrt_sequence_seconds_count",
        "vllm:request_time_per_output_token_seconds_count": "radixrt_time_per_output_token_seconds_count",
    }.items():
        assert found[name, *labels] == found[ours, *own] > 0, name
        assert types[name.removesuffix("_total").removesuffix("_sum").removesuffix("_count")] in (
            "counter",
            "histogram",
        )
    assert found["vllm:inter_token_latency_seconds_count", *labels] == 4 * 4, "of each token but the first"
    for name in ("vllm:num_requests_running", "sglang:num_running_reqs"):
        assert found[name, *worker] == 1 and types[name] == "gauge"
    for name in ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "sglang:hicache_host_total_tokens"):
        assert found[name, *worker] == 0 and types[name] == "gauge"
    usage, total = found["vllm:kv_cache_usage_perc", *worker], found["sglang:max_total_num_tokens", *worker]
    assert usage == found["sglang:token_usage", *worker]
    assert usage * total == pytest.approx(found["sglang:num_used_tokens", *worker]) and 0 < usage < 1
    for name in ("vllm:num_preemptions", "sglang:num_retracted_reqs", "vllm:spec_decode_num_accepted_tokens"):
        assert found[name + "_total", *worker] == 0 and types[name] == "counter"
    assert found["sglang:num_requests_total",] == 4


def test_names_of_vllm_and_sglang_can_be_left_out():
    with stack(1, peer_metrics=False) as running, Client(running.address) as client:
        assert {name.split("_")[0] for name in families(client.metrics())} == {"radixrt"}


def test_a_worker_says_how_much_host_memory_holds():
    core = RouterCore(RouterConfig())
    sizes = {"max_model_len": 9, "page_size": 1, "total_pages": 9, "max_running": 1}
    core.register(Register(name="w", model="m", host_tokens=640, **sizes), 0.0)
    core.step("w", StepDone([], load=Load(steps=1, host_tokens=16)), 0.0)
    found = samples(render(Report(1000), core))
    labels = ("engine", "w"), ("model_name", "m")
    assert found["sglang:hicache_host_used_tokens", *labels] == 16
    assert found["sglang:hicache_host_total_tokens", *labels] == 640


def test_a_tenants_health_has_its_own_sequences_alone():
    with stack(1, fake="0,0.05", api_key=("a:key-a", "b:key-b")) as running:
        with Client(running.address, api_key="key-a") as one, Client(running.address, api_key="key-b") as other:
            stream = one.stream([5, 6, 7], Sampling(max_tokens=1000, ignore_eos=True))
            next(stream)
            assert (one.health()["runs_in_flight"], other.health()["runs_in_flight"]) == (1, 0)
            in_flight = [samples(client.metrics())["radixrt_sequences_in_flight",] for client in (one, other)]
            assert in_flight == [1, 0]
            stream.close()


def test_there_are_no_series_of_unloaded_adapters():
    report, core = Report(1000), RouterCore(RouterConfig())
    core.register(Register(name="w", model="m", max_model_len=9, page_size=1, total_pages=9, max_running=1), 0.0)
    served = ["m", "kept", *(f"adapter-{i}" for i in range(300))]
    for version, model in enumerate(served, 1):
        core.workers.want(Adapter(model, version, "/folder"))
        report.finished(
            namespace=model, tenant="t", origin=Origin(), worker="w", page_size=1, prompt=bytes(8), generated=bytes(4),
            reusable_tokens=0, cached_tokens=0, bound_tokens=0, predicted_tokens=0, best_tokens=0, model=model,
        )  # fmt: skip
        report.took("t", model, 0.1, 0.2, 2)

    def shown() -> set[str]:
        names = ("model", "model_name")
        return {value for name in samples(render(report, core)) for label, value in name[1:] if label in names}

    assert shown() == set(served)
    for model in served[2:]:
        core.workers.want(Adapter(model, 1000, ""))
    assert shown() == {"m", "kept"} and len(render(report, core).splitlines()) < 600
    core.workers.want(Adapter("adapter-7", 2000, "/folder"))
    found = samples(render(report, core))
    assert found["radixrt_prompt_tokens_total", ("model", "adapter-7"), ("tenant", "t")] == 2, "sums go on"


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
    load = Load(running=3, waiting=2, free_pages=4, evictable_pages=1, total_pages=9, steps=7, kept_tokens=5)
    for worker in (name, "gone"):
        report.load(worker, load)
    found = samples(render(report, core))
    assert found["radixrt_worker_running_requests", ("worker", name)] == 3
    assert found["radixrt_worker_waiting_requests", ("worker", name)] == 2
    assert found["radixrt_worker_kept_tokens", ("worker", name)] == 5
    states = {state: found["radixrt_worker_pages", ("state", state), ("worker", name)] for state in PAGE_STATES}
    assert states == {"free": 4, "evictable": 1, "leased": 4}
    assert ("radixrt_worker_running_requests", ("worker", "gone")) not in found
    assert found["radixrt_worker_steps_total", ("worker", "gone")] == 7, "a sum never goes back"


# ---------------------------------------------------------------- workers that come and go


class Fleet:
    """Workers of a router whose clock the test has; each step counts ten tokens that were evicted."""

    def __init__(self) -> None:
        self.now = 0.0
        self.report = Report(1000, lambda: self.now)
        self.core = RouterCore(RouterConfig(), self.report)
        self._steps: Counter[str] = Counter()
        self._before: dict[tuple, float] = {}

    def join(self, name: str) -> None:
        self.core.register(
            Register(name=name, model="m", max_model_len=9, page_size=1, total_pages=9, max_running=1), self.now
        )
        self._steps[name] = 0

    def step(self, name: str) -> None:
        self._steps[name] += 1
        load = Load(free_pages=9, total_pages=9, steps=self._steps[name], evicted_tokens=10 * self._steps[name])
        self.core.step(name, StepDone([], load), self.now)

    def scrape(self) -> dict[str, int]:
        """Lines of each worker. No sum of what is shown has gone back."""
        found = samples(render(self.report, self.core))
        for name, value in found.items():
            if "_worker_" in name[0] and name[0].endswith("_total"):
                assert value >= self._before.get(name, 0.0)
        self._before = found
        return Counter(dict(labels)["worker"] for _, *labels in found if "worker" in dict(labels))


@pytest.mark.parametrize("seconds", [0.01, 1.0, 45.0])
@pytest.mark.parametrize("leaves", [True, False], ids=["left", "lost"])
def test_a_thousand_workers_come_and_go(seconds, leaves):
    fleet = Fleet()
    fleet.join("stays")
    for number in range(1000):
        name = f"host-{number}"
        fleet.join(name)
        for who in (name, name, "stays"):
            fleet.step(who)
        if number % 50 == 49:
            assert len(fleet.scrape()) <= 2 + MAX_GONE_WORKERS
        if leaves:
            fleet.core.leave(name, fleet.now)
        else:
            fleet.core.lose([name], fleet.now)
        fleet.now += seconds
    lines = fleet.scrape()
    assert lines["stays"] == 20 + 13 and lines["host-999"] == 20, "all is shown of who serves, sums of who is gone"
    assert len(lines) == 1 + min(MAX_GONE_WORKERS, KEPT_SECONDS / seconds)
    assert sum(row["steps"] for row in fleet.report.to_json()["workers"]) == 3 * 1000, "the report forgets no sum"
    fleet.now += GONE_SECONDS
    fleet.join("new")
    fleet.step("new")
    assert len(fleet.report.workers) <= 2 + MAX_GONE_WORKERS, "nor is much more kept than is shown"
    names = {row["worker"] for row in fleet.report.to_json()["workers"]}
    assert names >= {"(other)", "new"} and len(names) <= 3 + MAX_GONE_WORKERS
    assert fleet.scrape()["new"] == 20 + 13


@pytest.mark.parametrize("told", [[(100, 100), (161, 161), (200, 200)], [(100, 100), (40, 140), (70, 170)]])
def test_a_worker_that_was_forgotten_and_is_back_is_counted_once(told):
    """Its counters go on where they were, or fall, if it began anew."""
    fleet = Fleet()
    for steps, total in told:
        fleet.report.load("w", Load(steps=steps))
        assert sum(row["steps"] for row in fleet.report.to_json()["workers"]) == total
        fleet.now += 2 * KEPT_SECONDS
        assert not fleet.report.workers


def test_workers_that_nobody_asks_for_are_forgotten():
    fleet = Fleet()
    for number in range(1000):
        fleet.report.load(f"w{number}", Load(steps=1))
        fleet.now += 1.0
    assert len(fleet.report._workers.states) <= MAX_GONE_WORKERS + GONE_SECONDS + 2


def test_all_that_serve_are_shown():
    fleet = Fleet()
    names = [f"host-{number}" for number in range(3 * MAX_GONE_WORKERS)]
    for _ in range(2):
        for name in names:
            fleet.join(name)
            fleet.step(name)
            fleet.step(name)
        fleet.now += 1.0
    fleet.join("new")
    fleet.step("new")
    assert fleet.scrape() == dict.fromkeys([*names, "new"], 20 + 13)
    assert {state.sums["steps"] for state in fleet.report.workers.values()} == {1, 4}


def test_a_worker_that_comes_back_goes_on_where_it_was():
    fleet = Fleet()
    for incarnation in range(1, 4):
        fleet.join("w")
        fleet.step("w")
        fleet.step("w")
        assert fleet.scrape()["w"] == 20 + 13
        assert fleet.report.workers["w"].sums["evicted_tokens"] == 20 * incarnation
        fleet.core.leave("w", fleet.now)
        fleet.now += KEPT_SECONDS / 2
        assert fleet.scrape()["w"] == 20
    fleet.now += KEPT_SECONDS
    assert not fleet.scrape()


def test_what_forgotten_workers_had_done_stays_in_the_report():
    fleet = Fleet()
    for number in range(3):
        fleet.report.load(f"w{number}", Load(steps=1))
        fleet.report.arrived("n", bytes(8))
        fleet.report.finished(
            namespace="n", tenant="t", origin=Origin(), worker=f"w{number}", page_size=1, prompt=bytes(8),
            generated=bytes(4), reusable_tokens=1, cached_tokens=0, bound_tokens=0, predicted_tokens=0, best_tokens=0,
        )  # fmt: skip
    before = fleet.report.to_json()
    fleet.now += KEPT_SECONDS + 1.0
    fleet.report.load("w2", Load(steps=2))
    after = fleet.report.to_json()
    rows = [(row["worker"], row["requests"], row["steps"]) for row in after["workers"]]
    assert rows == [("(other)", 2, 2), ("w2", 1, 2)]
    assert after["total"] == before["total"] and after["tenants"] == before["tenants"]
    assert "worker (other)" in to_text(after)
