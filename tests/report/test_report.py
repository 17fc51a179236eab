"""The hit-rate report: causes by table, sums by a naive oracle, what a tenant sees."""

from __future__ import annotations

import json
from array import array
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.messages import Load, Origin
from radixrt.report import Report, to_text
from radixrt.report.causes import Misses, explain
from radixrt.report.report import MAX_DEPTH, MAX_NAME_CHARS, MAX_PROGRAMS, OTHER, VERSION
from radixrt.report.text import MAX_ROWS, WIDTH


def ids(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def finish(report: Report, prompt: tuple[int, ...], cached: int, *, out=(), namespace="n", **changes) -> int:
    """A request as the router reports it; what the infinite cache held. `predicted` and `best` are `cached` if not
    given."""
    ideal = report.arrived(namespace, ids(*prompt))
    predicted = changes.pop("predicted", cached)
    fields = {
        "namespace": namespace,
        "tenant": "t",
        "origin": Origin(),
        "worker": "w",
        "page_size": 1,
        "prompt": ids(*prompt),
        "generated": ids(*out),
        "reusable_tokens": len(prompt) - 1,
        "cached_tokens": cached,
        "bound_tokens": ideal,
        "predicted_tokens": predicted,
        "best_tokens": changes.pop("best", predicted),
    }
    report.finished(**(fields | changes))
    return ideal


@pytest.mark.parametrize(
    ("prompt", "hit", "reusable", "ideal", "predicted", "best", "page", "expected"),
    [
        (100, 0, 99, 0, 0, 0, 1, Misses(never_seen=99, logits=1)),
        (100, 99, 99, 99, 99, 99, 1, Misses(logits=1)),
        (100, 60, 99, 80, 60, 60, 1, Misses(never_seen=19, evicted=20, logits=1)),
        (100, 60, 99, 80, 60, 70, 1, Misses(never_seen=19, elsewhere=10, evicted=10, logits=1)),
        (100, 0, 99, 80, 70, 70, 1, Misses(never_seen=19, evicted=80, logits=1)),
        (100, 10, 99, 80, 30, 70, 1, Misses(never_seen=19, elsewhere=40, evicted=30, logits=1)),
        (100, 64, 99, 80, 64, 64, 16, Misses(never_seen=19, evicted=16, logits=1)),
        (100, 64, 99, 79, 64, 64, 16, Misses(never_seen=20, page_rounding=15, logits=1)),
        (100, 0, 99, 79, 0, 64, 16, Misses(never_seen=20, elsewhere=64, page_rounding=15, logits=1)),
        (100, 50, 59, 99, 50, 50, 1, Misses(evicted=9, logits=41)),
        (100, 70, 99, 20, 10, 10, 1, Misses(never_seen=29, logits=1)),
        (100, 40, 99, 0, 40, 60, 1, Misses(never_seen=39, elsewhere=20, logits=1)),
        (100, 80, 59, 99, 59, 59, 1, Misses(logits=20)),
        (1, 0, 0, 0, 0, 0, 1, Misses(logits=1)),
    ],
)
def test_causes(prompt, hit, reusable, ideal, predicted, best, page, expected):
    assert expected == explain(
        prompt=prompt, hit=hit, reusable=reusable, ideal=ideal, predicted=predicted, best=best, page_size=page
    )


counts = st.integers(0, 300)


@given(st.integers(1, 300), counts, counts, counts, counts, counts, st.integers(1, 32))
def test_causes_sum_to_the_misses_whatever_is_said(prompt, hit, reusable, ideal, predicted, best, page):
    hit, reusable = min(hit, prompt), min(reusable, prompt - 1)
    misses = explain(
        prompt=prompt, hit=hit, reusable=reusable, ideal=ideal, predicted=predicted, best=best, page_size=page
    )
    assert sum(misses) == prompt - hit and min(misses) >= 0


small = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(tuple)
places = st.tuples(st.sampled_from("ab"), st.sampled_from(["", "p", "q"]), st.integers(0, 2), st.sampled_from("vw"))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(places, small, small, st.integers(0, 8), st.integers(0, 8)), max_size=12))
def test_sums_and_bound_are_those_of_a_naive_count(requests):
    """The oracle: a set of all prefixes seen in each namespace, and a Counter for each line of each group."""
    report, seen = Report(10**6), defaultdict(set)
    lines = {group: defaultdict(Counter) for group in ("total", "tenants", "programs", "workers")}
    for (tenant, program, depth, worker), prompt, out, hit, predicted in requests:
        prefixes = seen[tenant]
        held = next((k for k in range(len(prompt) - 1, 0, -1) if prompt[:k] in prefixes), 0)
        hit, predicted = min(hit, held), min(predicted, held)
        origin = Origin(program, "", depth)
        changes = {"tenant": tenant, "origin": origin, "worker": worker, "namespace": tenant}
        assert finish(report, prompt, hit, out=out, predicted=predicted, **changes) == held
        computed = prompt + out[:-1]
        prefixes |= {computed[:k] for k in range(1, len(computed) + 1)}
        figures = Counter(
            requests=1,
            prompt_tokens=len(prompt),
            hit_tokens=hit,
            bound_tokens=held,
            generated_tokens=len(out),
            drift_tokens=abs(hit - predicted),
        )
        for group, line in zip(lines, ((), (tenant,), (program, depth), (worker,)), strict=True):
            lines[group][line] += figures
    data = report.to_json()
    found = {group: data[group] for group in ("tenants", "programs", "workers")} | {"total": [data["total"]]}
    for group, names in (("total", ()), ("tenants", ("tenant",)), ("programs", ("program", "depth"))):
        rows = {tuple(row[name] for name in names): row for row in found[group]}
        assert rows.keys() == lines[group].keys() or not requests
        for line, expected in lines[group].items():
            assert {name: rows[line][name] for name in expected} == expected
    for row in (row for rows in found.values() for row in rows):
        assert sum(row["misses"].values()) == row["prompt_tokens"] - row["hit_tokens"]


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
    assert data["bound"] == {"exact": True, "tokens": None, "forgotten": None}
    assert "secret plan" not in str(data) and "total_pages" not in str(data)
    assert report.to_json("nobody")["total"]["requests"] == 0


def test_names_that_callers_choose_are_bounded():
    report = Report(10**6)
    for i in range(MAX_PROGRAMS + 50):
        finish(report, (1, 2), 0, origin=Origin(f"p{i}" + "x" * 1000, "", i * 10))
    data = report.to_json()
    names = {r["program"] for r in data["programs"]}
    assert len(names) == MAX_PROGRAMS + 1 and OTHER in names and max(map(len, names)) == MAX_NAME_CHARS
    assert max(r["depth"] for r in data["programs"]) == MAX_DEPTH
    assert data["total"]["requests"] == MAX_PROGRAMS + 50
    text = to_text(data)
    assert len(text.splitlines()) < 50 and f"and {len(data['programs']) - MAX_ROWS} more" in text


def test_lines_are_bounded_also_by_depth():
    report = Report(10**6)
    for i in range(MAX_PROGRAMS):
        for depth in range(4):
            finish(report, (1, 2), 0, origin=Origin(f"p{i}", "", depth))
    assert len(report.to_json()["programs"]) == MAX_PROGRAMS + 4


def test_beyond_the_budget_the_bound_is_a_lower_one():
    report = Report(100)
    for i in range(10):
        finish(report, tuple(range(i * 20, i * 20 + 20)), 0)
    data = report.to_json()
    assert data["bound"] == {"exact": False, "tokens": 100, "forgotten": 100}
    assert finish(report, tuple(range(0, 20)), 5) == 0
    assert report.to_json()["total"]["bound_tokens"] == 5, "never less than what was hit"
    assert "lower bound" in to_text(data)


def test_counters_of_a_worker_outlive_it():
    report = Report(100)
    for load in (
        Load(evicted_tokens=5, steps=9, plain_keys=7, read_keys=3),
        Load(evicted_tokens=7, steps=12, plain_keys=10, read_keys=4),
        Load(evicted_tokens=1, steps=2, plain_keys=1, read_keys=1),
    ):
        report.load("w", load)
    row = report.to_json()["workers"][0]
    assert (row["evicted_tokens"], row["steps"], row["plain_keys"], row["read_keys"]) == (8, 14, 11, 5)
    report.load("w", Load(steps=0))
    report.load("w", Load(evicted_tokens=2, steps=1, busy_seconds=0.5))
    row = report.to_json()["workers"][0]
    assert (row["evicted_tokens"], row["steps"], row["plain_keys"], row["busy_seconds"]) == (10, 15, 11, 0.5)


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
    finish(report, tuple(range(1000)), 500, predicted=510, best=800)
    report.load(
        "w", Load(total_pages=5000, free_pages=4000, evictable_pages=900, preemptions=3, plain_keys=800, read_keys=100)
    )
    text = to_text(report.to_json())
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100 and not any(line != line.rstrip() for line in lines if line.strip())
    total = next(line for line in lines if line.startswith("total"))
    assert total.split() == ["total", "3", "3,000", "500", "16.7%", "66.6%", "2"]
    assert "fork depth 2" in text and "forty characters" not in text
    assert any(line.split()[-2:] == ["290", "11.6%"] for line in lines if "another worker" in line)
    assert "510 hit tokens predicted, off by 10 (0.3%" in text
    assert next(line for line in lines if line.startswith("worker w ") and "5,000" in line).split()[2:] == [
        "5,000",
        "1,000",
        "900",
        "0",
        "3",
        "0",
        "12.5%",
    ]
    assert to_text(Report(10).to_json()).startswith("Cache-hit-rate report")


def test_models_are_shown_if_there_are_several():
    report = Report(10**6)
    finish(report, (1, 2, 3, 4), 0, model="m")
    data = report.to_json()
    assert [row["model"] for row in data["models"]] == ["m"] and "model m" not in to_text(data)
    finish(report, (1, 2, 3, 4), 2, namespace="o", model="sql")
    data = report.to_json()
    assert [(row["model"], row["hit_tokens"]) for row in data["models"]] == [("m", 0), ("sql", 2)]
    assert "model m" in to_text(data) and "model sql" in to_text(data)


def test_names_and_figures_cannot_break_the_table():
    report = Report(10**6)
    origin, worker = Origin("agent\x1b[2J\r\nname\u202e" + "y" * 100, "", 3), "w" * 200
    finish(report, (1, 2, 3), 0, origin=origin, worker=worker)
    report.load(worker, Load(total_pages=10**9, free_pages=1, steps=10**9, evicted_tokens=10**12))
    data = report.to_json()
    for row in (data["total"], *data["tenants"], *data["programs"], *data["workers"]):
        row |= dict.fromkeys(("prompt_tokens", "hit_tokens", "generated_tokens"), 10**9)
    text = to_text(data)
    assert max(map(len, text.splitlines())) <= WIDTH and "1,000,000,000,000" in text
    assert all(c.isprintable() or c == "\n" for c in text)
    line = next(line for line in text.splitlines() if line.startswith("program"))
    assert "depth 3" in line, "the end of a long name stays"


def test_the_json_is_json():
    report = Report(10**6)
    finish(report, (1, 2, 3), 1)
    data = report.to_json()
    assert json.loads(json.dumps(data)) == data and data["version"] == VERSION
    assert to_text(json.loads(json.dumps(data))) == to_text(data)
