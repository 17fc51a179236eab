"""What every route of the application shares: keys and origins in headers, and errors in the format of its API."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from radixrt.client import ServerError
from radixrt.frontend.anthropic.errors import AnthropicError
from radixrt.frontend.errors import ApiError
from radixrt.messages import Error, Origin
from radixrt.router.errors import FieldError

MESSAGES_PATH = "/v1/messages"
"""Of Anthropic's API: below it errors are told in its format."""
DEPTH_DIGITS = 9


def key_of(request: Request) -> str:
    """The caller's API key; "" without one."""
    headers = request.headers
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def origin_of(request: Request) -> Origin:
    """Program, branch and fork depth from headers, for the report."""
    headers = request.headers
    depth = headers.get("x-radixrt-depth", "0")
    if not (depth.isascii() and depth.isdigit() and len(depth) <= DEPTH_DIGITS):
        raise ApiError(400, f"x-radixrt-depth: expected a number of at most {DEPTH_DIGITS} digits", "x-radixrt-depth")
    return Origin(headers.get("x-radixrt-program", ""), headers.get("x-radixrt-branch", ""), int(depth))


def api_error(problem: Exception, names: dict[str, str] | None = None) -> ApiError:
    """The same problem as the answer to a caller who calls fields by `names`."""
    match problem:
        case FieldError():
            return ApiError.of(Error(None, 400, str(problem), problem.field), names)
        case ServerError():
            error = Error(None, problem.code, problem.message, problem.field, problem.retry_after)
            return ApiError.of(error, names)
    assert isinstance(problem, ApiError)
    return problem


def _told(request: Request, error: ApiError) -> ApiError:
    """The error in the format of the API that the route is of."""
    return AnthropicError.wrap(error) if request.url.path.startswith(MESSAGES_PATH) else error


async def on_http_error(request: Request, error: HTTPException) -> Response:
    messages = {404: f"no such route: {request.url.path}", 405: f"{request.method} is not served here"}
    problem = _told(request, ApiError(error.status_code, messages.get(error.status_code, str(error.detail))))
    return Response(problem.body(), error.status_code, error.headers, "application/json")


async def on_crash(request: Request, error: Exception) -> Response:
    problem = _told(request, ApiError(500, "the server failed on this request; its log says why"))
    return Response(problem.body(), 500, media_type="application/json")
