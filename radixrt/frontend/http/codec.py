"""JSON of requests and answers."""

from __future__ import annotations

import functools
import json
import re
from typing import Any, TypeVar

import msgspec

from radixrt.frontend.http.errors import ApiError
from radixrt.messages.surrogates import NO_TEXT, surrogate_field

encode = msgspec.json.Encoder().encode
T = TypeVar("T")


@functools.cache
def _lenient(decoder: msgspec.json.Decoder[Any]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(decoder.type, strict=False)


def _surrogate(body: bytes, within: str) -> str | None:
    """The field of a text with a lone surrogate, if a body is JSON but for that."""
    if not re.search(rb"\\u[dD][89a-fA-F]", body):
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    field = surrogate_field(value)
    return None if field is None else f"{within}{'' if field.startswith('[') or not within else '.'}{field}"


def parse(decoder: msgspec.json.Decoder[T], body: bytes | msgspec.Raw, within: str = "") -> T:
    """Decode a body, or the part of one in the field `within`. Raises ApiError (400) that names an invalid field.

    Numbers and booleans may be in other types with the same value, as clients that compute them send 4096.0, and as
    vLLM and SGLang take them."""
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError:
            return _lenient(decoder).decode(body)
    except msgspec.ValidationError as problem:
        text = str(problem)
        path = re.search(r"required field `([^`]*)`", text) or re.search(r" - at `\$\.?([^`]*)`$", text)
        field = within + (path[1] if path else "")
        raise ApiError(400, text, re.sub(r"\[\.\.\.\].*", "", field)) from None
    except msgspec.DecodeError as problem:
        if (lone := _surrogate(bytes(body), within)) is not None:
            raise ApiError(400, f"{lone}: {NO_TEXT}", lone) from None
        raise ApiError(400, f"the body is not JSON: {problem}", within) from None
    except UnicodeDecodeError as problem:
        raise ApiError(400, f"the body is not UTF-8: {problem}", within) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", within) from None
