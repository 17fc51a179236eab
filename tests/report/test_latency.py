"""Latencies: histograms against a count by hand, and what a router whose clock the test has reports."""

from __future__ import annotations

import random

import pytest
from prometheus_client.parser import text_string_to_metric_families

from radixrt.config import RouterConfig
from radixrt.messages import TOKEN_BYTES, Generate, Load, Output, Register, Sampling, Score, StepDone, TokenPrompt
from radixrt.report import Report
from radixrt.report.latency import EACH, FIRST, WHOLE, Histogram
from radixrt.router.core.core import RouterCore
from radixrt.router.server.prometheus import render

PROMPT = TokenPrompt(bytes(range(5 * TOKEN_BYTES)))
KINDS = {"first": "time_to_first_token", "each": "time_per_output_token", "whole": "sequence"}


@pytest.mark.parametrize("bounds", [FIRST, EACH, WHOLE])
def test_buckets_count_all_up_to_their_bound(bounds):
    rng = random.Random(3)
    values = [*bounds, 0.0, *(rng.lognormvariate(-2, 4) for _ in range(500))]
    histogram = Histogram(bounds)
    for value in values:
        histogram.add(value)
    expected = [(str(bound), sum(value <= bound for value in values)) for bound in bounds]
    assert [*histogram.buckets()] == [*expected, ("+Inf", len(values))]
    assert histogram.total == pytest.approx(sum(values))


class Clocked:
    """A router with the worker `w0`, and what it reports."""

    def __init__(self) -> None:
        self.report = Report(1000)
        self.core = RouterCore(RouterConfig(api_key=("a:key-a", "b:key-b")), self.report)
        self.join("w0", 0.0)

    def join(self, name: str, at: float) -> None:
        sizes = {"max_model_len": 99, "page_size": 1, "total_pages": 99, "max_running": 9}
        self.core.register(Register(name=name, model="m", **sizes), at)

    def submit(self, at: float, id: int = 1, key: str = "key-a", **fields) -> list[int]:
        sampling = Sampling(max_tokens=9, seed=1)
        message = Generate(id=id, prompt=PROMPT, sampling=sampling, text=False, api_key=key, **fields)
        return [effect.message.id for effect in self.core.submit(b"c", message, at)]

    def step(self, at: float, *outputs: Output, worker: str = "w0") -> list:
        return self.core.step(worker, StepDone(list(outputs), Load()), at)

    def samples(self, kind: str, tenant: str | None = None) -> dict[tuple[str, str], float]:
        """By suffix of the name (bucket, count, sum), and tenant or bound."""
        found = {}
        for family in text_string_to_metric_families(render(self.report, self.core, tenant)):
            if family.name == f"radixrt_{KINDS[kind]}_seconds":
                assert family.type == "histogram" and family.documentation
                for sample in family.samples:
                    assert sample.labels["model"] == "m"
                    suffix = sample.name.removeprefix(family.name + "_")
                    found[suffix, sample.labels.get("le", sample.labels["tenant"])] = sample.value
        return found

    def sums(self, tenant: str = "a") -> dict[str, tuple[float, float]]:
        """(count, sum) by kind; none for what was never counted."""
        found = {kind: self.samples(kind, tenant) for kind in KINDS}
        return {
            kind: (some["count", tenant], pytest.approx(some["sum", tenant])) for kind, some in found.items() if some
        }


@pytest.mark.parametrize("stream", [True, False])
def test_a_sequence_from_its_arrival_to_its_end(stream):
    at = Clocked()
    (run,) = at.submit(10.0, stream=stream)
    at.step(10.3, Output(run, [7]))
    assert at.sums()["first"] == (1, 0.3) and at.sums()["whole"] == (0, 0.0)
    at.step(10.5, Output(run, [8]))
    at.step(10.8, Output(run, [9, 10]))
    at.step(11.1, Output(run, [11], "length"))
    assert at.sums() == {"first": (1, 0.3), "each": (1, 0.8 / 4), "whole": (1, 1.1)}
    found = at.samples("first")
    assert (found["bucket", "0.2"], found["bucket", "0.5"], found["bucket", "+Inf"]) == (0, 1, 1)


def test_each_choice_is_a_sequence():
    at = Clocked()
    one, other = at.submit(0.0, n=2)
    at.step(0.1, Output(one, [7], "stop"))
    at.step(0.4, Output(other, [7], "stop"))
    assert at.sums() == {"first": (2, 0.5), "each": (0, 0.0), "whole": (2, 0.5)}, "one token alone has no rate"


def test_a_choice_ends_with_the_token_that_completed_a_stop_string():
    """Not when the client says so, nor with those that came meanwhile; equal intervals are taken for granted."""
    for tokens, each in ((1, (0, 0.0)), (2, (1, 1.0)), (3, (1, 1.0)), (4, (1, 1.0)), (None, (1, 1.0))):
        at = Clocked()
        (run,) = at.submit(0.0)
        for time in (2.0, 3.0, 4.0, 5.0):
            at.step(time, Output(run, [7]))
        at.core.end_choice(b"c", 1, 0, tokens)
        assert at.sums() == {"first": (1, 2.0), "each": each, "whole": (1, (tokens or 4) + 1.0)}
    at = Clocked()
    (run,) = at.submit(0.0)
    at.step(2.0, Output(run, [7]))
    at.core.end_choice(b"c", 1, 0, 0)
    assert at.sums() == {"first": (1, 2.0), "each": (0, 0.0), "whole": (0, 0.0)}, "nothing of it is left"


def test_what_was_cancelled_or_failed_is_not_a_duration():
    at = Clocked()
    (run,) = at.submit(0.0)
    at.step(1.0, Output(run, [7]))
    at.core.cancel(b"c", 1)
    (run,) = at.submit(1.0)
    at.core.cancel(b"c", 1)
    (run,) = at.submit(2.0)
    at.step(4.0, Output(run, finish="error", error="no", field="grammar"))
    assert at.sums() == {"first": (1, 1.0), "each": (0, 0.0), "whole": (0, 0.0)}


def test_a_sequence_that_another_worker_continues():
    """Its first token came once."""
    at = Clocked()
    (run,) = at.submit(0.0)
    at.step(0.5, Output(run, [7]))
    at.join("w1", 1.0)
    (order,) = at.core.leave("w0", 2.0)
    at.step(3.0, Output(order.message.id, [8], "length"), worker="w1")
    assert at.sums() == {"first": (1, 0.5), "each": (1, 2.5), "whole": (1, 3.0)}


def test_nothing_is_generated_by_a_score_or_for_no_tokens():
    at = Clocked()
    score = Score(id=1, prompt=PROMPT, choices=[PROMPT], api_key="key-a")
    (order,) = at.core.submit(b"c", score, 0.0)
    at.step(1.0, Output(order.message.id, [], "length", scores=[-1.0] * 5))
    assert at.sums() == {}


def test_a_tenant_sees_its_own():
    at = Clocked()
    (one,), (other,) = at.submit(0.0), at.submit(0.0, 2, "key-b")
    at.step(0.1, Output(one, [7], "stop"), Output(other, [7], "stop"))
    assert {tenant for suffix, tenant in at.samples("first", "b") if suffix == "count"} == {"b"}
    assert {tenant for suffix, tenant in at.samples("first") if suffix == "count"} == {"a", "b"}
