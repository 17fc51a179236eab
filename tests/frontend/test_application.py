"""The ASGI application around the handlers: the straight way of POSTs, and Starlette's for all else."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from radixrt.frontend.http.auth import Application, headers_of


class Broken:
    """A response that fails when it has begun."""

    async def __call__(self, scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("while it streams")


async def fine(request):
    headers = headers_of(request)
    return PlainTextResponse(headers[b"x-name"] + "!" + headers.get(b"x-none", ""))


async def crashes(request):
    raise RuntimeError("before it begins")


async def breaks(request):
    return Broken()


@contextlib.asynccontextmanager
async def lifespan(app):
    yield


POSTS = {"/fine": fine, "/crashes": crashes, "/breaks": breaks}
APP = Application(POSTS, [Route("/page", fine), Route("/page-crashes", crashes)], lifespan)


def ask(method: str, path: str) -> tuple[list[dict], BaseException | None]:
    """(what was sent, what the server would log)."""
    sent = []

    async def main() -> None:
        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            sent.append(message)

        headers = [(b"x-name", b"first"), (b"x-name", b"second")]
        scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}
        await APP(scope, receive, send)

    try:
        asyncio.run(main())
    except RuntimeError as problem:
        return sent, problem
    return sent, None


@pytest.mark.parametrize(("method", "path"), [("POST", "/fine"), ("GET", "/page")])
def test_handlers_answer(method, path):
    (start, body), problem = ask(method, path)
    assert (start["status"], body["body"], problem) == (200, b"first!", None)


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/fine", 405), ("POST", "/page", 405), ("POST", "/", 404)]
)
def test_what_is_not_served(method, path, status):
    (start, body), problem = ask(method, path)
    assert (start["status"], problem) == (status, None) and json.loads(body["body"])["error"]["message"]


@pytest.mark.parametrize(("method", "path"), [("POST", "/crashes"), ("GET", "/page-crashes")])
def test_a_crash_is_answered_and_told_to_the_server(method, path):
    (start, body), problem = ask(method, path)
    assert start["status"] == 500 and "its log says why" in json.loads(body["body"])["error"]["message"]
    assert str(problem) == "before it begins"


def test_a_crash_in_a_stream_ends_it():
    sent, problem = ask("POST", "/breaks")
    assert [message["type"] for message in sent] == ["http.response.start"] and str(problem) == "while it streams"
