"""The documents name tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documents import PAGES, ROOT, name_of

PAGE = (ROOT / "docs" / "guarantees.md").read_text()


def test_each_promise_names_tests_that_there_are():
    rows = re.findall(r"^\| (?!promise|failure).*", PAGE, re.MULTILINE)
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, row
        for file, test in named:
            assert f"def {test}(" in (ROOT / file).read_text(), (file, test)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_name_tests_that_there_are(page: Path) -> None:
    for file, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page.read_text()):
        assert f"def {test}" in (ROOT / file).read_text(), (file, test)
