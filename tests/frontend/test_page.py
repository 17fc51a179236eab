"""The page at `/` as it is sent. What it does is tested in a browser: tests/page."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from radixrt.config import FrontendConfig, WorkerConfig
from radixrt.frontend.http.info_routes import InfoRoutes
from radixrt.version import __version__

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture(scope="module")
def client():
    with TestClient(Starlette(routes=InfoRoutes(lambda key: None).routes(lambda h: h, lambda h: h))) as client:
        yield client


@pytest.fixture(scope="module")
def page(client):
    return client.get("/", headers=BROWSER)


@pytest.mark.parametrize("accept", ["*/*", "application/json", ""])
def test_programs_get_the_version(client, accept):
    answer = client.get("/", headers={"accept": accept})
    assert answer.json() == {"version": __version__} and answer.headers["vary"] == "accept"
    assert client.head("/", headers={"accept": accept}).status_code == 200


def test_browsers_get_the_page(client, page):
    assert page.headers["content-type"] == "text/html; charset=utf-8" and page.text.startswith("<!doctype html>")
    assert client.head("/", headers=BROWSER).headers["content-type"] == page.headers["content-type"]


def test_the_policy_allows_the_page_its_own_parts_and_this_server_only(page):
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        parts = re.findall(f"<{tag}>(.*?)</{tag}>", page.text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts]
        assert policy[directive] == " ".join(f"'sha256-{digest}'" for digest in digests) and len(parts) == 1
    assert not re.search(r"<[^>]+ (?:style|on\w+)=", page.text)


def test_the_page_loads_nothing_and_writes_no_html(page):
    assert re.findall(r"""(?:src|href)=["']?(?!#|data:)[^"' >]+|url\(|@import|\bimport\(""", page.text) == []
    assert set(re.findall(r"https?://[^\s\"'`]+", page.text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", page.text)


def test_flags_that_the_page_names_exist(page):
    flags = {name[2:].replace("-", "_") for name in re.findall(r"--[a-z]+(?:-[a-z]+)+", page.text)}
    fields = {field.name for config in (FrontendConfig, WorkerConfig) for field in dataclasses.fields(config)}
    assert len(flags) > 2 and flags <= fields


def test_the_page_is_small(client, page):
    sent = client.get("/", headers=BROWSER | {"accept-encoding": "gzip"})
    assert sent.headers["content-encoding"] == "gzip" and sent.text == page.text
    assert int(sent.headers["content-length"]) < 30_000


def test_clients_without_gzip_get_the_page_too(client, page):
    plain = client.get("/", headers=BROWSER | {"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers and plain.content == page.content
