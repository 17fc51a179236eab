"""Input items of the Responses API as a chat template takes them: OpenAI's messages. Every refusal names the field.

reasoning, message (assistant), function_call, ...   one answer   -> one assistant message
function_call_output                                              -> a tool message
message (user, system, developer)                                 -> a message
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixrt.frontend.errors import refuse

Item = dict[str, Any]
Message = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Where the parts of a message have their text."""


def messages_of(items: str | list[Item], before: Sequence[Message] = ()) -> list[Message]:
    """The messages that `input` adds to those `before` it. ApiError (400) names what is wrong."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not items and not before:
        refuse("input", "is empty: at least one item is needed")
    history = _History(before)
    for i, item in enumerate(items):
        history.add(f"input[{i}]", item)
    return history.messages


class _History:
    def __init__(self, before: Sequence[Message]) -> None:
        self.messages: list[Message] = []
        self._calls = {call["id"] for message in before for call in message.get("tool_calls") or ()}
        self._answer: Message | None = None
        """The assistant's message that the next item may belong to."""
        self._last = ""
        """The kind of the item before."""

    def add(self, field: str, item: Item) -> None:
        kind = item.get("type", "message")
        match kind:
            case "message":
                self._message(field, item)
            case "reasoning":
                self._reasoning(field, item)
            case "function_call":
                self._call(field, item)
            case "function_call_output":
                self._result(field, item)
            case _:
                refuse(f"{field}.type", f"{kind!r} is not served; message, reasoning, function_call and its output are")
        self._last = kind

    def _message(self, field: str, item: Item) -> None:
        role = item.get("role")
        if role not in ROLES:
            refuse(f"{field}.role", f"must be one of {', '.join(ROLES)}, not {role!r}")
        content = _content(f"{field}.content", item.get("content"))
        if role != "assistant":
            self._put({"role": "system" if role == "developer" else role, "content": content})
            return
        if self._answer is None or self._last == "message":
            self._begin()
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        self._answer["content"] = (self._answer["content"] or "") + text

    def _reasoning(self, field: str, item: Item) -> None:
        """Thoughts in plain text belong to the answer that follows; a summary of them is not what was thought."""
        parts = item.get("content")
        if parts is None:
            return
        if not isinstance(parts, list) or not all(
            isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts
        ):
            refuse(f"{field}.content", "must be a list of parts with a text")
        if self._answer is None or self._last != "reasoning":
            self._begin()
        thoughts = self._answer.get("reasoning_content", "") + "".join(part["text"] for part in parts)
        self._answer["reasoning_content"] = thoughts

    def _call(self, field: str, item: Item) -> None:
        for name in ("call_id", "name"):
            if not isinstance(item.get(name), str) or not item[name]:
                refuse(f"{field}.{name}", "must be a string that is not empty")
        if not isinstance(item.get("arguments"), str):
            refuse(f"{field}.arguments", "must be a string, the arguments as JSON")
        if self._answer is None:
            self._begin()
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        self._answer.setdefault("tool_calls", []).append(call)
        self._calls.add(item["call_id"])

    def _result(self, field: str, item: Item) -> None:
        call_id = item.get("call_id")
        if not isinstance(call_id, str):
            refuse(f"{field}.call_id", "must be the id of the call that this answers")
        if call_id not in self._calls:
            refuse(f"{field}.call_id", f"no item before this one is a call with the id {call_id!r}")
        self._put({"role": "tool", "tool_call_id": call_id, "content": _content(f"{field}.output", item.get("output"))})

    def _begin(self) -> None:
        self._answer = {"role": "assistant", "content": None}
        self.messages.append(self._answer)

    def _put(self, message: Message) -> None:
        self._answer = None
        self.messages.append(message)


def _content(field: str, content: Any) -> str | list[dict[str, str]]:
    """A text, or text parts as chat templates know them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse(field, "must be a string or a list of parts")
    parts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict):
            refuse(f"{field}[{i}]", "must be an object")
        if (name := TEXTS.get(part.get("type", ""))) is None:
            refuse(f"{field}[{i}].type", f"{part.get('type')!r} is not served, only text is")
        if not isinstance(part.get(name), str):
            refuse(f"{field}[{i}].{name}", "must be a string")
        parts.append({"type": "text", "text": part[name]})
    return parts[0]["text"] if len(parts) == 1 else parts
