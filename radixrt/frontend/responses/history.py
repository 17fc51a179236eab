"""Input items of the Responses API as a chat template takes them: OpenAI's messages. Every refusal names the field.

reasoning, message (assistant), function_call, ...   one answer   -> one assistant message
function_call_output                                              -> a tool message
message (user, system, developer)                                 -> a message
items of tools that OpenAI runs                                   -> calls and their results, by `hosted`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixrt.frontend.errors import refuse
from radixrt.frontend.responses.hosted import CALLS, OUTPUTS, REFUSED, WHOLE, Call, error, string

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
    history.end()
    if not history.messages and not before:
        refuse("input", "holds nothing for a model to read")
    return history.messages


class _History:
    def __init__(self, before: Sequence[Message]) -> None:
        self.messages: list[Message] = []
        self._before = len(before)
        self._calls = {call["id"] for message in before for call in message.get("tool_calls") or ()}
        self._asked: dict[str, Call] = {}
        """Calls that a user was asked to approve, by the ids of the questions."""
        self._approved: dict[str, str] = {}
        """Fields of approvals whose calls have not come, by the same ids."""
        self._answer: Message | None = None
        """The assistant's message that the next item may belong to."""
        self._last = ""
        """The kind of the item before, of those that are told."""

    def add(self, field: str, item: Item) -> None:
        kind = item.get("type", "message")
        if not isinstance(kind, str):
            refuse(f"{field}.type", "must be a string")
        if kind in WHOLE:
            self._approved.pop(str(item.get("approval_request_id")), None)
            if (call := WHOLE[kind](field, item)) is None:
                return
            self._whole(call)
        elif kind in CALLS:
            self._call(string(field, item, "call_id", empty=False), CALLS[kind](field, item))
        elif kind in OUTPUTS or kind in ("function_call_output", "custom_tool_call_output"):
            self._result(field, kind, item)
        elif kind in REFUSED:
            name, why = REFUSED[kind]
            refuse(f"{field}.{name}", why)
        else:
            match kind:
                case "message":
                    self._message(field, item)
                case "reasoning":
                    self._reasoning(field, item)
                case "mcp_approval_request":
                    self._asked[string(field, item, "id")] = CALLS["function_call"](field, item)
                    return
                case "mcp_approval_response":
                    self._approval(field, item)
                case _:
                    refuse(f"{field}.type", f"{kind!r} is not served")
        self._last = kind

    def end(self) -> None:
        """All items have come."""
        for field in self._approved.values():
            refuse(field, "tools of MCP servers are not called here")

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

    def _call(self, call_id: str, call: Call) -> None:
        if self._answer is None:
            self._begin()
        function = {"name": call.name, "arguments": call.arguments}
        self._answer.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        self._calls.add(call_id)

    def _result(self, field: str, kind: str, item: Item) -> None:
        call_id = item.get("call_id")
        if call_id is None and kind == "local_shell_call_output":
            call_id = item.get("id")
        if not isinstance(call_id, str):
            refuse(f"{field}.call_id", "must be the id of the call that this answers")
        if call_id not in self._calls:
            refuse(f"{field}.call_id", f"no item before this one is a call with the id {call_id!r}")
        said = OUTPUTS[kind](field, item) if kind in OUTPUTS else _content(f"{field}.output", item.get("output"))
        self._put({"role": "tool", "tool_call_id": call_id, "content": said})

    def _whole(self, call: Call) -> None:
        """A call and its result. Its id is a number of nine digits: Mistral's templates take no other ids than such."""
        call_id = f"{self._before + len(self.messages):09}"
        self._call(call_id, call)
        self._put({"role": "tool", "tool_call_id": call_id, "content": call.result})

    def _approval(self, field: str, item: Item) -> None:
        """A call that is not approved has come to nothing, of which the model is told; one that is comes later."""
        if (asked := self._asked.pop(str(item.get("approval_request_id")), None)) is None:
            refuse(f"{field}.approval_request_id", "no item before this one asks for an approval by this id")
        if not isinstance(item.get("approve"), bool):
            refuse(f"{field}.approve", "must be true or false")
        if item["approve"]:
            self._approved[item["approval_request_id"]] = f"{field}.approve"
            return
        why = f": {item['reason']}" if item.get("reason") else ""
        self._whole(Call(asked.name, asked.arguments, error(f"the call was not approved{why}")))

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
