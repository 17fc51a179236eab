"""The report as a page."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from radixrt import cli
from radixrt.messages import Origin
from radixrt.report import Report, page, to_html
from tests.report.test_report import finish

OPEN = {"meta", "!doctype"}


class Page(HTMLParser):
    """Text by tag; tags must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))
        if tag not in OPEN:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.open[-1], data))

    def of(self, tag: str) -> list[str]:
        return [text for where, text in self.texts if where == tag]


@pytest.fixture
def report():
    """Ten prompt tokens of two tenants, three of them hit, where four could have been."""
    found = Report(1000)
    finish(found, (1, 2, 3, 4, 5), 0, tenant="acme", origin=Origin(program="plan"), out=(7, 8))
    finish(found, (1, 2, 3, 4, 6), 3, tenant="<script>alert(1)</script>", origin=Origin(program="a & b", depth=2))
    return found.to_json()


def test_figures_of_the_report(report):
    found = Page(to_html(report))
    tiles = dict(zip(found.of("dt"), found.of("dd"), strict=True))
    assert tiles["hit rate"] == "30.0%" and tiles["prompt tokens"] == "10" and tiles["requests"] == "2"
    key = "".join(found.of("span"))
    assert "reused 3 (30.0%)" in key and "never seen before" in key
    widths = [a["style"] for tag, a in found.attributes if tag == "b"]
    assert "width:60.00%" in widths and "width:0.00%" in widths
    marks = [a["style"] for tag, a in found.attributes if tag == "u"]
    assert "left:calc(80.00% - 1px)" in marks


def test_names_are_text(report):
    text = to_html(report)
    assert "<script" not in text
    cells = Page(text).of("td")
    assert "<script>alert(1)</script>" in cells and "program a & b, fork depth 2" in cells


def test_models_are_shown_if_there_are_several():
    found = Report(1000)
    finish(found, (1, 2, 3), 0, model="m")
    assert "Models" not in to_html(found.to_json())
    finish(found, (1, 2, 3), 0, model="<b>")
    text = to_html(found.to_json())
    assert "<b>" not in text.replace("<b style", "") and {"m", "<b>"} <= set(Page(text).of("td"))


def test_texts_that_change_are_text(report):
    row = {"tenant": "<i>", "requests": 9, "lost_tokens": 900, "at": 3, "length": 2, "masked": False}
    shown = row | {"before": "id <x>", "values": ["<1>", "2"], "after": "</pre>&"}
    hidden = row | {"before": None, "values": None, "after": None, "masked": True}
    found = Page(to_html(report | {"volatile": [shown, hidden]}))
    assert found.of("mark") == ["<1>", "2"]
    assert "".join(found.of("pre")) == "…id <x> | </pre>&…"
    assert any("cache_salt" in text for text in found.of("p"))


def test_nothing_yet():
    assert "No prompt has come in yet." in Page(to_html(Report(1000).to_json())).of("p")


def test_a_report_of_one_tenant(report):
    assert Page(to_html(report | {"tenant": "<t>"})).of("h1") == ["Cache-hit-rate report of <t>"]


def test_long_tables_are_cut(report, monkeypatch):
    monkeypatch.setattr(page, "SHOWN", 1)
    found = Page(to_html(report))
    assert "and 1 more, which the JSON has" in found.of("p")


def test_a_page_that_comes_anew(report):
    refresh = [a["content"] for tag, a in Page(to_html(report, 10)).attributes if a.get("http-equiv") == "refresh"]
    assert refresh == ["10"]
    assert "http-equiv" not in to_html(report)


def test_the_command_writes_it(tmp_path, monkeypatch, report):
    class Known:
        def __init__(self, *_args, **_settings): ...

        def __enter__(self):
            return self

        def __exit__(self, *_exc): ...

        def report(self):
            return report

    monkeypatch.setattr("radixrt.client.Client", Known)
    assert cli.main(["report", "--html", str(tmp_path / "r.html")]) == 0
    assert Path(tmp_path / "r.html").read_text() == to_html(report)
