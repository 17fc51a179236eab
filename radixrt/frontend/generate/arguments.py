"""The arguments of calls, as text and as objects, for the APIs that have either."""

from __future__ import annotations

import json
from typing import Any

from radixrt.frontend.http.errors import refuse

INVALID_JSON = "INVALID_JSON"
"""The only key of an object in the place of arguments that are none; its value is what the model wrote."""


def arguments_text(field: str, arguments: Any) -> str:
    """The arguments of a call as text, as the model wrote them, which need not be JSON."""
    if isinstance(arguments, str):
        return arguments
    try:
        return "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    except RecursionError:
        refuse(field, "is nested too deeply")


def arguments_object(text: str) -> dict[str, Any]:
    """The arguments of a call as an object. Those that are none, because they were cut or the model made an error, are
    in it under INVALID_JSON."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {INVALID_JSON: text}


def written_arguments(arguments: dict[str, Any]) -> str | None:
    """What the model wrote, if an object is one of `arguments_object` for no object."""
    written = arguments.get(INVALID_JSON) if len(arguments) == 1 else None
    return written if isinstance(written, str) else None
