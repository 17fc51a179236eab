"""Errors in the format of OpenAI's API."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from typing import NoReturn

import msgspec

from radixrt.client.transports import ServerError
from radixrt.messages import Error
from radixrt.tokens.errors import FieldError

_encode = msgspec.json.Encoder().encode
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An HTTP error. `param` names the invalid field of the request; `retry_after` is in seconds."""

    def __init__(
        self, status: int, message: str, param: str = "", code: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @classmethod
    def of(cls, error: Error, names: dict[str, str] | None = None) -> ApiError:
        """Make an ApiError of a router's Error. `names` maps its fields to the caller's names."""
        field, _, rest = error.field.partition("[")
        own = (names or {}).get(field, field)
        message = re.sub(rf"^{re.escape(field)}(?=:? )", lambda _: own, error.message)
        code = error.reason or ("model_not_found" if error.code == 404 else None)
        return cls(error.code, message, own + (f"[{rest}" if rest else ""), code, error.retry_after)

    def body(self) -> bytes:
        kind = _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": kind, "param": self.param or None, "code": self.code}
        return _encode({"error": error})

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"retry-after": str(max(1, math.ceil(self.retry_after)))}


def api_error(problem: Exception, names: dict[str, str] | None = None) -> ApiError:
    """The ApiError for a problem. `names` maps fields to the caller's names."""
    match problem:
        case FieldError():
            return ApiError.of(Error(None, 400, str(problem), problem.field, reason=problem.reason), names)
        case ServerError():
            return ApiError.of(problem.error(), names)
    assert isinstance(problem, ApiError)
    return problem


def refuse(field: str, message: str) -> NoReturn:
    """Raise ApiError (400) for an invalid `field` of the request."""
    raise ApiError(400, f"{field}: {message}", field)


def one_of(value: object, choices: Collection[str], field: str) -> str:
    """Return a value; raises ApiError (400) unless it is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        refuse(field, f"must be one of {', '.join(choices)}, not {value!r}")
    return value
