"""Validates the messages of a chat; every error names the field."""

from __future__ import annotations

from typing import Any

from radixrt.frontend.generate.arguments import arguments_text
from radixrt.frontend.generate.media import SYSTEM, asking, media_kind, placeholder
from radixrt.frontend.http.errors import one_of, refuse

ROLES = ("system", "developer", "user", "assistant", "tool")
THOUGHTS = ("reasoning_content", "reasoning")
"""The fields of an assistant's message that hold its thoughts."""
Message = dict[str, Any]


def checked_messages(messages: list[Message]) -> list[Message]:
    """The messages for a chat template. `developer` becomes `system`, and refusals become text, since templates do not
    know them; images are named in their place, but those that a user asks about are left to be refused. Raises ApiError
    (400) for unknown roles, invalid tool calls, and a tool's result without a call."""
    calls: set[str] = set()
    question = asking([message.get("role") for message in messages])
    messages = [message if i == question else _without_media(message) for i, message in enumerate(messages)]
    messages = [_without_refusal(f"messages[{i}]", _not_null(message)) for i, message in enumerate(messages)]
    for i, message in enumerate(messages):
        field = f"messages[{i}]"
        role = one_of(message.get("role"), ROLES, f"{field}.role")
        _check_content(field, message)
        if role == "assistant":
            calls |= _call_ids(f"{field}.tool_calls", message.get("tool_calls"))
        if role == "tool":
            _check_tool_call_id(f"{field}.tool_call_id", message.get("tool_call_id"), calls)
    return [message | {"role": "system"} if message["role"] == "developer" else message for message in messages]


def _not_null(message: Message) -> Message:
    """An assistant's message whose content is "" if it is null or missing and there is nothing else: an answer that
    other servers have left empty."""
    others = ("tool_calls", "refusal", "function_call", "audio", *THOUGHTS)
    if message.get("role") == "assistant" and message.get("content") is None and not any(map(message.get, others)):
        return message | {"content": ""}
    return message


def _without_media(message: Message) -> Message:
    """A message in which images and files, as parts, have become text, unless it is a system message."""
    content = message.get("content")
    if message.get("role") in SYSTEM or not isinstance(content, list):
        return message
    kinds = [media_kind(part) for part in content]
    if not any(kinds):
        return message
    pairs = zip(content, kinds, strict=True)
    return message | {
        "content": [{"type": "text", "text": placeholder(kind)} if kind else part for part, kind in pairs]
    }


def _without_refusal(field: str, message: Message) -> Message:
    """An assistant's message in which a refusal, as a field or as a part, has become its text."""
    refusal, content = message.get("refusal"), message.get("content")
    if message.get("role") != "assistant":
        return message
    if not isinstance(refusal, str | None):
        refuse(f"{field}.refusal", "must be a string")
    if refusal and not content:
        return message | {"content": refusal}
    if not isinstance(content, list) or not any(map(_refuses, content)):
        return message
    return message | {"content": [_as_text(f"{field}.content[{i}]", part) for i, part in enumerate(content)]}


def _refuses(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "refusal"


def _as_text(field: str, part: Any) -> Any:
    if not _refuses(part):
        return part
    if not isinstance(part.get("refusal"), str):
        refuse(f"{field}.refusal", "must be a string")
    return {"type": "text", "text": part["refusal"]}


def _check_content(field: str, message: Message) -> None:
    content = message.get("content")
    if content is None:
        if message["role"] != "assistant":
            refuse(f"{field}.content", "is missing")
        if not any(map(message.get, ("tool_calls", *THOUGHTS))):  # an answer may be cut in its thoughts
            refuse(f"{field}.content", "is missing, and there are no tool_calls")
    elif not isinstance(content, str | list):
        refuse(f"{field}.content", "must be a string or a list of parts")
    if message["role"] != "assistant":
        return
    for name in THOUGHTS:
        if not isinstance(message.get(name), str | None):
            refuse(f"{field}.{name}", "must be a string")


def _check_tool_call_id(field: str, call_id: Any, calls: set[str]) -> None:
    if not isinstance(call_id, str):
        refuse(field, "must be the id of the call that this answers")
    if call_id not in calls:
        refuse(field, f"no message before this one has a tool call with the id {call_id!r}")


def _call_ids(field: str, calls: Any) -> set[str]:
    if calls is None:
        return set()
    if not isinstance(calls, list):
        refuse(field, "must be a list")
    return {_checked_call(f"{field}[{j}]", call) for j, call in enumerate(calls)}


def _checked_call(field: str, call: Any) -> str:
    """Check a call; returns its id. Arguments that are no string, as in the history of other libraries, become their
    JSON; that of an object if there are none."""
    if not isinstance(call, dict):
        refuse(field, "must be an object")
    if call.get("type", "function") != "function":
        refuse(f"{field}.type", f"must be 'function', not {call['type']!r}")
    if not isinstance(call.get("id"), str) or not call["id"]:
        refuse(f"{field}.id", "must be a string that is not empty")
    function = call.get("function")
    if not isinstance(function, dict):
        refuse(f"{field}.function", "must be an object with a name and arguments")
    if not isinstance(function.get("name"), str) or not function["name"]:
        refuse(f"{field}.function.name", "must be a string that is not empty")
    function["arguments"] = arguments_text(f"{field}.function.arguments", function.get("arguments"))
    return call["id"]
