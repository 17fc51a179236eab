"""Code that routes share: keys and origins in headers, JSON, and errors in the format of their API."""

from __future__ import annotations

import base64
import functools
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from radixrt.frontend.http.anthropic_errors import REQUEST_ID as ANTHROPIC_REQUEST_ID
from radixrt.frontend.http.anthropic_errors import AnthropicError
from radixrt.frontend.http.codec import encode
from radixrt.frontend.http.errors import ApiError
from radixrt.frontend.http.ollama_errors import OLLAMA_PATH, OllamaError
from radixrt.frontend.http.unread import UNREAD
from radixrt.messages import Origin

VERSION = "/v1"
MESSAGES_PATH = "/v1/messages"
"""The path of Anthropic's API: below it errors are sent in its format."""
DEPTH_DIGITS = 9
TRACEPARENT_CHARS = 128
"""More than a traceparent of today has (55): later versions of the format may be longer."""
REQUEST_ID = "x-request-id"
"""The header in which OpenAI's clients expect the id."""
HEADERS = "radixrt.headers"
"""A key of a scope: see `headers_of`."""
Handler = Callable[[Request], Awaitable[Any]]
"""Returns a response, which is an ASGI application itself."""
KeyedHandler = Callable[[Request, str], Awaitable[Any]]
"""A Handler that also gets the caller's API key."""
LOGIN = """This page needs an API key: reload it, and give the key as the password. The user name does not matter.
The key of --admin-api-key shows all tenants, a tenant's key its own figures.
"""
"""What a browser shows whose user gave none."""


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(data), status, headers, "application/json")


def headers_of(request: Request) -> dict[bytes, str]:
    """See `headers_in`."""
    return headers_in(request.scope)


def headers_in(scope: Scope) -> dict[bytes, str]:
    """The first value of each header, by its lower-case name; read once for a request. Clients send UTF-8 or, as the
    protocol used to specify, Latin-1."""
    found = scope.get(HEADERS)
    if found is None:
        found = scope[HEADERS] = {}
        for name, value in reversed(scope["headers"]):
            try:
                found[name] = value.decode()
            except UnicodeDecodeError:
                found[name] = value.decode("latin-1")
    return found


def key_of(request: Request) -> str:
    """The caller's API key; "" without one. Anthropic's clients may send both headers, one of them empty. Browsers that
    were asked for it (`with_login`) send it as a password. They do so whichever page makes them, so that it only counts
    for what changes nothing."""
    headers = headers_of(request)
    scheme, _, key = headers.get(b"authorization", "").partition(" ")
    found = key.strip() if scheme.lower() == "bearer" else ""
    if scheme.lower() == "basic" and request.method in ("GET", "HEAD"):
        found = _password(key)
    return found or headers.get(b"x-api-key", "")


def _password(credentials: str) -> str:
    """That of Basic credentials (RFC 7617); "" if they are none."""
    try:
        return base64.b64decode(credentials.strip(), validate=True).decode().partition(":")[2]
    except ValueError:
        return ""


def wants_page(request: Request) -> bool:
    """Whether a browser asks, for a page to show."""
    return "text/html" in headers_of(request).get(b"accept", "")


def with_login(handler: Handler) -> Handler:
    """Let browsers ask their users for a key where the `handler` of a page wants one. Other clients get its error."""

    async def asking(request: Request) -> Any:
        response = await handler(request)
        if response.status_code != 401 or not wants_page(request):
            return response
        return PlainTextResponse(LOGIN, 401, {"www-authenticate": 'Basic realm="radixrt", charset="UTF-8"'})

    return asking


def count_for(request: Request, tenant: str) -> None:
    """From now on, what waits on the request's connection counts as a tenant's."""
    claim = request.scope.get("extensions", {}).get(UNREAD)
    if claim is not None and claim.tenant != tenant:
        claim.move(tenant)


def origin_of(request: Request) -> Origin:
    """Program, branch and fork depth from headers, for the report, and the caller's span, for traces."""
    headers = headers_of(request)
    depth = headers.get(b"x-radixrt-depth") or "0"
    if not (depth.isascii() and depth.isdigit() and len(depth) <= DEPTH_DIGITS):
        raise ApiError(400, f"x-radixrt-depth: expected a number of at most {DEPTH_DIGITS} digits", "x-radixrt-depth")
    span = headers.get(b"traceparent", "")
    return Origin(
        headers.get(b"x-radixrt-program", ""),
        headers.get(b"x-radixrt-branch", ""),
        int(depth),
        span if len(span) <= TRACEPARENT_CHARS else "",
    )


def told(path: str, error: ApiError) -> ApiError:
    """The error in the format of the API that a path belongs to."""
    if path.startswith(MESSAGES_PATH):
        return AnthropicError.wrap(error)
    return OllamaError.wrap(error) if path.startswith(OLLAMA_PATH) else error


def _other_base(path: str, known: Collection[str]) -> str:
    """What to say of an unknown path if it is a known one with VERSION once too often or too seldom: some clients add
    it to their base URL, and others do not."""
    if path.startswith(VERSION * 2) and (meant := path.removeprefix(VERSION)) in known:
        return f"; for {meant} the client's base URL must not end with {VERSION}"
    if (meant := VERSION + path) in known:
        return f"; for {meant} the client's base URL must end with {VERSION}"
    return ""


async def on_http_error(request: Request, error: HTTPException, known: Collection[str]) -> Response:
    """`known`: the paths that are served."""
    path = request.url.path
    messages = {404: f"no such route: {path}{_other_base(path, known)}", 405: f"{request.method} is not served here"}
    problem = told(request.url.path, ApiError(error.status_code, messages.get(error.status_code, str(error.detail))))
    return Response(problem.body(), error.status_code, error.headers, "application/json")


async def on_crash(request: Request, error: Exception) -> Response:
    problem = told(request.url.path, ApiError(500, "the server failed on this request; its log says why"))
    return Response(problem.body(), 500, media_type="application/json")


def for_pages(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Allow web pages of `origins` ("*": any) to call the application (CORS). Without origins it is unchanged: a page
    that somebody visits must not be able to use a server on their machine."""
    if not origins:
        return app
    exposed = (ANTHROPIC_REQUEST_ID, REQUEST_ID, "retry-after")
    return CORSMiddleware(app, origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed)


class Application:
    """The ASGI application. POST requests to the paths in `posts`, the most frequent ones, go directly to their
    handlers; all others go through Starlette, which takes about 20 µs more."""

    def __init__(self, posts: dict[str, Handler], others: list[Route], lifespan: Lifespan[Starlette]) -> None:
        routes = [Route(path, handler, methods=["POST"]) for path, handler in posts.items()] + others
        known = {route.path for route in routes}
        handlers: dict[Any, Callable[[Request, Any], Awaitable[Response]]]
        handlers = {HTTPException: functools.partial(on_http_error, known=known), Exception: on_crash}
        self._posts = posts
        self._starlette = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._posts.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if handler is None:
            await self._starlette(scope, receive, send)
            return
        started = False

        def start(message: Message) -> Awaitable[None]:
            nonlocal started
            started = True
            return send(message)

        request = Request(scope, receive)
        try:
            response = await handler(request)
            await response(scope, receive, start)
        except Exception as error:
            if not started:
                response = await on_crash(request, error)
                await response(scope, receive, send)
            raise  # the server logs it
