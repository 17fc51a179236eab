"""docs/compatibility.md says what the tests' tables say."""

from __future__ import annotations

import pytest

pytest.importorskip("langchain_openai")
pytest.importorskip("pydantic_ai")

from tests import compatibility  # noqa: E402

PAGE = compatibility.PAGE.read_text("utf-8")
AGAIN = "run `make compatibility`"


def test_the_page_is_what_the_tables_say() -> None:
    assert compatibility.page(None) == PAGE, AGAIN


def test_the_page_says_how_each_published_template_is_served(shared_data) -> None:
    folder = shared_data / "chat_templates"
    if not folder.is_dir():
        pytest.skip("no published chat templates here")
    assert compatibility.templates_of(PAGE) == compatibility.templates(folder), AGAIN
