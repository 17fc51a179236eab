"""The input items of a stored response: the inverse of `history`. Calls are function calls, except those of custom
tools, of functions in namespaces, which have the client's names, and searches for tools."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from radixrt.frontend.http.errors import refuse
from radixrt.frontend.responses.replies import given_to
from radixrt.frontend.responses.search import FOUND, with_found
from radixrt.frontend.responses.tools import Listed

Item = dict[str, Any]
Message = dict[str, Any]
MAX_ITEMS, DEFAULT_ITEMS = 100, 20
"""The largest and the default number of items of a page."""
COMPLETED = {"status": "completed"}
PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
    "custom_tool_call": "ctc_",
    "custom_tool_call_output": "ctco_",
    "tool_search_call": "tsc_",
    "tool_search_output": "tso_",
}
PLACES = uuid.UUID("b5d7f9ae-3a44-4c0f-9d2d-6f2f7d1c8e01")
"""The UUID namespace of item ids, so that an item always has the same id."""


def page(
    response_id: str, messages: Sequence[Message], asked: Mapping[str, str], tools: Sequence[Listed] = ()
) -> dict[str, Any]:
    """A page of the items of chat messages, by the query's `limit`, `order` and `after`. Raises ApiError (400) that
    names an invalid field."""
    known = {tool.name: tool for tool in with_found(tools, messages)}
    custom: set[str] = set()
    items = [item for message in messages for item in _items(message, known, custom)]
    for number, item in enumerate(items):
        item["id"] = PREFIXES[item["type"]] + uuid.uuid5(PLACES, f"{response_id} {number}").hex
    if (order := asked.get("order", "desc")) not in ("asc", "desc"):
        refuse("order", f"must be asc or desc, not {order!r}")
    if order == "desc":
        items.reverse()
    limit = asked.get("limit", f"{DEFAULT_ITEMS}")
    if not limit.isdecimal() or len(limit) > 3 or not 1 <= int(limit) <= MAX_ITEMS:
        refuse("limit", f"must be a number from 1 to {MAX_ITEMS}")
    first = 0
    if (after := asked.get("after")) is not None:
        first = next((n for n, item in enumerate(items, 1) if item["id"] == after), 0)
        if not first:
            refuse("after", f"there is no item {after!r}")
    found = items[first : first + int(limit)]
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {"first_id": None, "last_id": None}
    return {"object": "list", "data": found, "has_more": first + len(found) < len(items)} | ends


def _items(message: Message, tools: Mapping[str, Listed], custom: set[str]) -> Iterator[Item]:
    """The items of a message. `tools` by their names for the model; `custom`: ids of the calls of custom tools so
    far."""
    role, content = message["role"], message.get("content")
    if FOUND in message:
        found = {"execution": "client", "tools": message[FOUND]}
        yield {"type": "tool_search_output", "call_id": message["tool_call_id"]} | found | COMPLETED
        return
    if role == "tool":
        output = content if isinstance(content, str) else _parts("input_text", content)
        kind = "custom_tool_call" if message["tool_call_id"] in custom else "function_call"
        yield {"type": f"{kind}_output", "call_id": message["tool_call_id"], "output": output} | COMPLETED
        return
    if thoughts := message.get("reasoning_content"):
        part = {"type": "reasoning_text", "text": thoughts}
        yield {"type": "reasoning", "summary": [], "content": [part]} | COMPLETED
    if content or role != "assistant":
        kind = "output_text" if role == "assistant" else "input_text"
        yield {"type": "message", "role": role, "content": _parts(kind, content)} | COMPLETED
    for call in message.get("tool_calls") or ():
        item = _call(call, tools.get(call["function"]["name"]))
        if item["type"] == "custom_tool_call":
            custom.add(call["id"])
        yield item


def _call(call: dict[str, Any], tool: Listed | None) -> Item:
    """A call, with the client's names."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    kind, own = (tool.item_kind, tool.own) if tool else ("function_call", {"name": name})
    return {"type": kind, "call_id": call["id"]} | own | given_to(kind, arguments) | COMPLETED


def _parts(kind: str, content: Any) -> list[dict[str, Any]]:
    texts = [content] if isinstance(content, str) else [part["text"] for part in content or ()]
    more: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
    return [{"type": kind, "text": text} | more for text in texts]
