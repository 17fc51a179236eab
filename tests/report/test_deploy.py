"""The dashboard and the alerts in deploy/ are about metrics, and labels, that there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from radixrt.client import Client
from radixrt.messages import Sampling
from radixrt.report.causes import Misses
from tests.report.test_metrics import stack

DEPLOY = Path(__file__).parents[2] / "deploy"
SERIES = re.compile(r"(radixrt_\w+)(?:\{([^}]*)\})?")


@pytest.fixture(scope="module")
def families() -> dict[str, set[str]]:
    """By name of a series, its labels; those of families without samples are left out."""
    with stack(1) as running, Client(running.address) as client:
        client.generate([5, 6, 7], Sampling(max_tokens=4))
        text = client.metrics()
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        found[family.name + ("_total" if family.type == "counter" else "")] = set()
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def expressions(value: object) -> Iterator[str]:
    """All that is PromQL in the dashboard."""
    if isinstance(value, dict):
        yield from (
            one for name, one in value.items() if name in ("expr", "query", "definition") and isinstance(one, str)
        )
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from expressions(one)


def rules() -> list[dict[str, object]]:
    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, object]:
    return json.loads((DEPLOY / "grafana/dashboard.json").read_text())


def test_every_metric_that_is_shown_or_watched_exists(families):
    named = [text for text in [*expressions(dashboard()), *(rule["expr"] for rule in rules())] if "radixrt_" in text]
    assert len(named) > 50
    for text in named:
        for name, selector in SERIES.findall(text):
            assert name in families, text
            labels = set(re.findall(r"(\w+)[=!]", selector)) | set(re.findall(r"by \((\w+)\) \(rate\(" + name, text))
            assert not families[name] or labels <= families[name] | {"instance"}, text


def test_panels_have_places_of_their_own():
    taken = set()
    for panel in dashboard()["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells


def test_alerts_are_complete_and_name_causes_that_there_are():
    found = rules()
    assert len({rule["alert"] for rule in found}) == len(found)
    for rule in found:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert rule["expr"].count("(") == rule["expr"].count(")")
        for cause in re.findall(r'cause="(\w+)"', rule["expr"]):
            assert cause in Misses._fields


def test_one_job_with_the_admins_key_scrapes_everything():
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert (job["metrics_path"], job["authorization"]["type"]) == ("/metrics", "Bearer")
    assert all((DEPLOY / "prometheus" / name).is_file() for name in config["rule_files"])
    assert 'up{job="radixrt"}' in rules()[0]["expr"] and job["job_name"] == "radixrt"
