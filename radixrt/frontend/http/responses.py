"""JSON responses, as ASGI sends them."""

from __future__ import annotations

from starlette.types import Send

from radixrt.frontend.http.errors import ApiError


async def send_body(send: Send, status: int, body: bytes, headers: dict[str, str]) -> None:
    """A JSON response."""
    lines = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    lines += [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(send: Send, error: ApiError) -> None:
    await send_body(send, error.status, error.body(), error.headers())
