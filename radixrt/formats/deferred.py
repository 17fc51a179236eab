"""Tools that are hidden until a search finds them (`defer_loading`).

system: ... the tools that are not deferred          the same in every turn, so that it stays cached
assistant: search("files")
tool: These functions can be called now: {"name": "read", ...}
assistant: read("/a")
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from radixrt.tokens.errors import refuse

FOUND = "These functions can be called now:"
NONE_FOUND = "No functions were found."


def check_deferred(field: str, tool: dict[str, Any]) -> None:
    """Raise FieldError unless the `defer_loading` of a tool is valid; `field` is that of the tool."""
    if not isinstance(tool.get("defer_loading"), bool | None):
        refuse(f"{field}.defer_loading", "must be true or false")


def definition(field: str, tool: dict[str, Any]) -> str:
    """The JSON by which a model gets to know a tool within a conversation. `tool` is in the format of chats."""
    function = tool["function"]
    told = {name: function[name] for name in ("name", "description", "parameters") if name in function}
    try:
        return json.dumps(told, ensure_ascii=False)
    except RecursionError:
        refuse(field, "is nested too deeply")


def found_text(definitions: Sequence[str]) -> str:
    """What the result of a search says."""
    return "\n".join([FOUND, *definitions]) if definitions else NONE_FOUND
