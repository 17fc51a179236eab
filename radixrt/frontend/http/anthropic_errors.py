"""Errors in the format of Anthropic's API."""

from __future__ import annotations

import re
import uuid
from typing import Any

import msgspec

from radixrt.frontend.http.errors import ApiError

_encode = msgspec.json.Encoder().encode
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
NO_THREADS = "thread_unsupported_request"
"""The code of an error after which Anthropic's client sends the whole conversation, without `thread`."""
REQUEST_ID = "request-id"
"""The header with a request's id, for the client's log."""


def new_request_id() -> str:
    return f"req_{uuid.uuid4().hex[:24]}"


class AnthropicError(ApiError):
    """An ApiError in Anthropic's format: its message begins with the field, as in `messages.0.content`."""

    request_id = ""

    @classmethod
    def wrap(cls, error: ApiError) -> AnthropicError:
        """The same error in Anthropic's format."""
        field = dotted(error.param)
        message = error.message.removeprefix(error.param).lstrip(": ") if error.param else error.message
        told = cls(error.status, f"{field}: {message}" if field else message, field, error.code, error.retry_after)
        told.request_id = new_request_id()
        return told

    def data(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "api_error")
        error: dict[str, Any] = {"type": kind, "message": self.message}
        if self.code == NO_THREADS:
            error["details"] = {"error_code": self.code}
        return {"type": "error", "error": error, "request_id": self.request_id or None}

    def body(self) -> bytes:
        return _encode(self.data())

    def headers(self) -> dict[str, str]:
        return super().headers() | ({REQUEST_ID: self.request_id} if self.request_id else {})


def dotted(field: str) -> str:
    """A field as Anthropic writes it: `tools[0].parameters` is `tools.0.input_schema`."""
    field = re.sub(r"\[(\d+)\]", r".\1", field)
    return re.sub(r"^(tools\.\d+)\.parameters\b", r"\1.input_schema", field)
