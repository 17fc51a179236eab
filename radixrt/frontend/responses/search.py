"""`tool_search` of the Responses API: a client finds tools for the model. Every error names the field.

tool_search_call     -> a call of the function `tool_search`
tool_search_output   -> its result: the definitions of the tools found. They can be called from then on, also if the
                        request's `tools` do not have them
both, of a server    -> nothing: no server searches here, so that all tools are shown
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from radixrt.formats.deferred import definition, found_text
from radixrt.formats.tools import tool_use
from radixrt.frontend.http.errors import refuse
from radixrt.frontend.responses.tools import SEARCH, Listed, field_in, functions_in
from radixrt.tokens.errors import FieldError

Item = dict[str, Any]
Message = dict[str, Any]
SEARCH_ITEMS = ("tool_search_call", "tool_search_output")
FOUND = "found_tools"
"""The key of the tools found, in the message of a result. Chat templates do not get it."""


def by_server(item: Item) -> bool:
    """Whether a search was done by a server. Its items have no id of a call."""
    return (item.get("execution") or ("client" if item.get("call_id") else "server")) != "client"


def search_arguments(field: str, item: Item) -> str:
    """The arguments of a call, as JSON. A text is what the model wrote instead of an object."""
    given = item.get("arguments")
    if isinstance(given, str):
        return given
    try:
        return json.dumps({} if given is None else given, ensure_ascii=False)
    except RecursionError:
        refuse(f"{field}.arguments", "is nested too deeply")


def search_output(field: str, item: Item) -> str:
    """What a result says."""
    tools = item.get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        refuse(f"{field}.tools", "must be a list of objects")
    found = [*{one.name: one for one in functions_in(f"{field}.tools", tools)}.values()]
    nested = [one.nested() for one in found]
    try:
        tool_use(nested, None, None)
    except FieldError as error:
        place = field_in(found, error.field)
        raise FieldError(place, place + str(error).removeprefix(error.field)) from None
    return found_text([definition(one.field, tool) for one, tool in zip(found, nested, strict=True)])


def with_found(tools: Sequence[Listed], messages: Iterable[Message]) -> list[Listed]:
    """The tools of a request, and the last definitions of others that searches in `messages` have found."""
    known = {tool.name for tool in tools}
    found = {
        tool.name: tool
        for message in messages
        for tool in functions_in("input.tools", message.get(FOUND) or [])
        if tool.name not in known
    }
    return [*tools, *found.values()]


def visible(tools: Sequence[Listed]) -> list[Listed]:
    """The tools of a request that the prompt lists: all of them if nothing can find the deferred ones."""
    searched = any(tool.tool["type"] == SEARCH for tool in tools)
    return [tool for tool in tools if not (searched and tool.deferred)]


def rendered(messages: Sequence[Message]) -> list[Message]:
    """The messages for a chat template."""
    return [
        {key: message[key] for key in message if key != FOUND} if FOUND in message else message for message in messages
    ]
