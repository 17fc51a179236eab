"""The documents name tests and files that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()


def test_each_promise_names_tests_that_there_are():
    rows = re.findall(r"^\| (?!promise|failure).*", PAGE, re.MULTILINE)
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, test in named:
            assert f"def {test}(" in (ROOT / file).read_text(), (file, test)


PAGES = ("docs/architecture.md", "docs/guarantees.md", "docs/compatibility.md", "CONTRIBUTING.md", "CHANGELOG.md")


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_tests_and_files_that_there_are(page: str):
    path = ROOT / page
    text = path.read_text()
    for file, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text):
        assert f"def {test}" in (ROOT / file).read_text(), (file, test)
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (path.parent / link).exists(), link
