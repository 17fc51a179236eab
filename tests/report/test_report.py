"""The hit-rate report: causes by table, sums by a naive oracle, what a tenant sees."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.messages import Load, Origin
from radixrt.report import Report, to_text
from radixrt.report.causes import Misses, explain
from radixrt.report.report import MOST_DEPTH, MOST_PROGRAMS, OTHER


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def finish(report: Report, prompt: tuple[int, ...], cached: int, *, out=(), best=None, page_size=1, **changes) -> int:
    """A request as the router reports it; what the infinite cache held."""
    bound = report.arrived("n", ids(*prompt))
    fields = {
        "namespace": "n",
        "tenant": "t",
        "origin": Origin(),
        "worker": "w",
        "page_size": page_size,
        "ids": ids(*prompt, *out),
        "prompt_tokens": len(prompt),
        "reusable_tokens": len(prompt) - 1,
        "cached_tokens": cached,
        "bound_tokens": bound,
        "best_tokens": cached if best is None else best,
    }
    report.finished(**(fields | changes))
    return bound


@pytest.mark.parametrize(
    ("prompt", "hit", "reusable", "bound", "best", "page", "expected"),
    [
        (100, 0, 99, 0, 0, 1, Misses(never_seen=99, logits=1)),
        (100, 99, 99, 100, 99, 1, Misses(logits=1)),
        (100, 60, 99, 80, 60, 1, Misses(never_seen=19, evicted=20, logits=1)),
        (100, 60, 99, 80, 70, 1, Misses(never_seen=19, elsewhere=10, evicted=10, logits=1)),
        (100, 64, 99, 80, 64, 16, Misses(never_seen=19, evicted=16, logits=1)),
        (100, 64, 99, 79, 64, 16, Misses(never_seen=20, page_rounding=15, logits=1)),
        (100, 0, 99, 79, 64, 16, Misses(never_seen=20, elsewhere=64, page_rounding=15, logits=1)),
        (100, 50, 59, 100, 50, 1, Misses(evicted=9, logits=41)),
        (100, 70, 99, 20, 10, 1, Misses(never_seen=29, logits=1)),
        (1, 0, 0, 1, 0, 1, Misses(logits=1)),
    ],
)
def test_causes(prompt, hit, reusable, bound, best, page, expected):
    assert explain(prompt, hit, reusable, bound, best, page) == expected


counts = st.integers(0, 300)


@given(st.integers(1, 300), counts, counts, counts, counts, st.integers(1, 32))
def test_causes_sum_to_the_misses(prompt, hit, reusable, bound, best, page):
    reusable = min(reusable, prompt - 1)
    hit = min(hit, reusable)
    misses = explain(prompt, hit, reusable, bound, best, page)
    assert sum(misses) == prompt - hit and min(misses) >= 0


small = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)


@settings(max_examples=200)
@given(st.lists(st.tuples(small, small), max_size=12))
def test_the_bound_is_that_of_an_infinite_cache(requests):
    report, seen = Report(10**6), set()
    for prompt, out in requests:
        held = next((k for k in range(len(prompt), 0, -1) if prompt[:k] in seen), 0)
        assert finish(report, prompt, 0, out=out) == held
        whole = prompt + out
        seen |= {whole[:k] for k in range(1, len(whole) + 1)}
    total = report.to_json()["total"]
    assert total["requests"] == len(requests)
    assert total["prompt_tokens"] == sum(len(p) for p, _ in requests) == sum(total["misses"].values())
    assert total["generated_tokens"] == sum(len(o) for _, o in requests)


def test_sums_by_tenant_program_depth_and_worker():
    report = Report(10**6)
    finish(report, (1, 2, 3, 4), 0, origin=Origin("tot", "", 0))
    finish(report, (1, 2, 3, 5), 3, origin=Origin("tot", "0", 1))
    finish(report, (1, 2, 3, 6), 2, origin=Origin("tot", "1", 1), worker="v")
    finish(report, (1, 2, 3, 7), 3, tenant="u")
    data = report.to_json()
    assert [(r["tenant"], r["hit_tokens"]) for r in data["tenants"]] == [("t", 5), ("u", 3)]
    programs = [(r["program"], r["depth"], r["requests"], r["hit_rate"]) for r in data["programs"]]
    assert programs == [("", 0, 1, 0.75), ("tot", 0, 1, 0.0), ("tot", 1, 2, 0.625)]
    assert [(r["worker"], r["prompt_tokens"]) for r in data["workers"]] == [("v", 4), ("w", 12)]
    assert data["total"]["hit_rate"] == 0.5 and data["total"]["bound_rate"] == 9 / 16


def test_a_tenant_sees_its_own():
    report = Report(10**6)
    finish(report, (1, 2, 3), 0, tenant="a", origin=Origin("secret plan"))
    finish(report, (1, 2, 3), 2, tenant="b")
    report.load("w", Load(total_pages=10))
    data = report.to_json("b")
    assert data["total"]["requests"] == 1 and [r["tenant"] for r in data["tenants"]] == ["b"]
    assert "secret plan" not in str(data) and "total_pages" not in str(data)
    assert report.to_json("nobody")["total"]["requests"] == 0


def test_names_that_callers_choose_are_bounded():
    report = Report(10**6)
    for i in range(MOST_PROGRAMS + 50):
        finish(report, (1, 2), 0, origin=Origin(f"p{i}", "", i * 10))
    data = report.to_json()
    names = {r["program"] for r in data["programs"]}
    assert len(names) == MOST_PROGRAMS + 1 and OTHER in names
    assert max(r["depth"] for r in data["programs"]) == MOST_DEPTH
    assert data["total"]["requests"] == MOST_PROGRAMS + 50


def test_beyond_the_budget_the_bound_is_a_lower_one():
    report = Report(100)
    for i in range(10):
        finish(report, tuple(range(i * 20, i * 20 + 20)), 0)
    data = report.to_json()
    assert data["bound"] == {"tokens": 100, "forgotten": 100}
    assert finish(report, tuple(range(0, 20)), 5) == 0
    assert report.to_json()["total"]["bound_tokens"] == 5, "never less than what was hit"
    assert "lower bound" in to_text(data)


def test_counters_of_a_worker_outlive_it():
    report = Report(100)
    for load in (Load(evicted_tokens=5, steps=9), Load(evicted_tokens=7, steps=12), Load(evicted_tokens=1, steps=2)):
        report.load("w", load)
    row = report.to_json()["workers"][0]
    assert (row["evicted_tokens"], row["steps"]) == (8, 14)


def test_text():
    report = Report(10**6)
    for _ in range(2):
        finish(
            report,
            tuple(range(1000)),
            0,
            out=(7,),
            origin=Origin("a program with a name of more than forty characters", "0", 2),
        )
    finish(report, tuple(range(1000)), 500, best=800)
    report.load("w", Load(total_pages=5000, free_pages=4000, evictable_pages=900, preemptions=3))
    text = to_text(report.to_json())
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100 and not any(line != line.rstrip() for line in lines if line.strip())
    total = next(line for line in lines if line.startswith("total"))
    assert total.split() == ["total", "3", "3,000", "500", "16.7%", "66.6%", "2"]
    assert "fork depth 2" in text and "forty characters" not in text
    assert any(line.split()[-2:] == ["300", "12.0%"] for line in lines if "another worker" in line)
    assert next(line for line in lines if line.startswith("worker w ") and "5,000" in line).split()[2:] == [
        "1,000",
        "5,000",
        "0",
        "3",
        "0",
    ]
    assert to_text(Report(10).to_json()).startswith("Cache-hit-rate report")
