"""Input items of the Responses API as a chat template takes them: OpenAI's messages. Every refusal names the field.

reasoning, message (assistant), function_call, ...   one answer   -> one assistant message
function_call_output                                              -> a tool message
message (user, system, developer)                                 -> a message
items of tools that OpenAI runs                                   -> calls and their results, by `hosted`, before an
                                                                     answer that waits for results of its own
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
    history = _History(before, items)
    for i, item in enumerate(items):
        history.add(f"input[{i}]", item)
    history.end()
    if not history.messages and not before:
        refuse("input", "holds nothing for a model to read")
    return history.messages


class _History:
    def __init__(self, before: Sequence[Message], items: Sequence[Item]) -> None:
        self.messages: list[Message] = []
        self._before = len(before)
        self._calls = {call["id"]: call["id"] for message in before for call in message.get("tool_calls") or ()}
        """Their ids, by what an output may call them."""
        self._taken = self._calls.keys() | {id for item in items if isinstance(id := item.get("call_id"), str)}
        """Ids of calls, also of those to come."""
        self._number = -1
        """The latest that is an id of a call given here."""
        self._asked: dict[str, Call | None] = {}
        """Calls that a user was asked to approve, by the ids of the questions; None where he has answered."""
        self._approved: list[str] = []
        """Fields of approvals that nothing of the model has followed."""
        self._answer: Message | None = None
        """The assistant's message that the next item may belong to."""
        self._place = 0
        """Of the latest answer."""
        self._waiting: set[str] = set()
        """Its calls whose results have not come."""
        self._last = ""
        """The kind of the item before, of those that are told."""

    def add(self, field: str, item: Item) -> None:
        kind = item.get("type", "message")
        if not isinstance(kind, str):
            refuse(f"{field}.type", "must be a string")
        if _of_model(kind, item):
            self._approved.clear()
        if kind in WHOLE:
            if (call := WHOLE[kind](field, item)) is None:
                return
            self._whole(call)
        elif kind in CALLS:
            call_id = string(field, item, "call_id", empty=False)
            self._call(call_id, CALLS[kind](field, item))
            if kind == "local_shell_call" and isinstance(item.get("id"), str):
                self._calls.setdefault(item["id"], call_id)
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
                    self._asked.setdefault(string(field, item, "id"), CALLS["function_call"](field, item))
                    return
                case "mcp_approval_response":
                    if (call := self._approval(field, item)) is None:
                        return
                    self._whole(call)
                case _:
                    refuse(f"{field}.type", f"{kind!r} is not served")
        self._last = kind

    def end(self) -> None:
        """All items have come."""
        for field in self._approved:
            refuse(field, "tools of MCP servers are not called here")

    def _message(self, field: str, item: Item) -> None:
        role = item.get("role")
        if role not in ROLES:
            refuse(f"{field}.role", f"must be one of {', '.join(ROLES)}, not {role!r}")
        content = _content(f"{field}.content", item.get("content"))
        if role != "assistant":
            self._waiting.clear()
            self._put({"role": "system" if role == "developer" else role, "content": content})
            return
        answer = self._open(new=self._last == "message")
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        answer["content"] = (answer["content"] or "") + text

    def _reasoning(self, field: str, item: Item) -> None:
        """Thoughts in plain text belong to the answer that follows; a summary of them is not what was thought."""
        parts = item.get("content")
        if parts is None:
            return
        if not isinstance(parts, list) or not all(
            isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts
        ):
            refuse(f"{field}.content", "must be a list of parts with a text")
        answer = self._open(new=self._last != "reasoning")
        answer["reasoning_content"] = answer.get("reasoning_content", "") + "".join(part["text"] for part in parts)

    def _call(self, call_id: str, call: Call) -> None:
        self._open().setdefault("tool_calls", []).append(_made(call_id, call))
        self._calls[call_id] = call_id
        self._waiting.add(call_id)

    def _result(self, field: str, kind: str, item: Item) -> None:
        named = item.get("call_id")
        if named is None and kind == "local_shell_call_output":
            named = item.get("id")
        if not isinstance(named, str):
            refuse(f"{field}.call_id", "must be the id of the call that this answers")
        if (call_id := self._calls.get(named)) is None:
            refuse(f"{field}.call_id", f"no item before this one is a call with the id {named!r}")
        said = OUTPUTS[kind](field, item) if kind in OUTPUTS else _content(f"{field}.output", item.get("output"))
        self._waiting.discard(call_id)
        self._put(_told(call_id, said))

    def _whole(self, call: Call) -> None:
        """A call and its result, before an answer that waits for results: these are to follow it. What that answer
        has said comes first."""
        call_id = self._new_id()
        if not self._waiting:
            self._open()["tool_calls"] = [_made(call_id, call)]
            self._put(_told(call_id, call.result))
            return
        waiting = self.messages[self._place]
        first = waiting | {"tool_calls": [_made(call_id, call)]}
        waiting["content"] = None
        waiting.pop("reasoning_content", None)
        self.messages[self._place : self._place] = first, _told(call_id, call.result)
        self._place += 2

    def _new_id(self) -> str:
        """A number of nine digits: Mistral's templates take no other ids than such. It only goes up, whatever ids a
        client has taken."""
        self._number = max(self._number + 1, self._before + len(self.messages))
        while f"{self._number:09}" in self._taken:
            self._number += 1
        return f"{self._number:09}"

    def _approval(self, field: str, item: Item) -> Call | None:
        """A call that is not approved has come to nothing, of which the model is told; one that is comes later. Only
        the first answer to a question counts."""
        question = string(field, item, "approval_request_id")
        if question not in self._asked:
            refuse(f"{field}.approval_request_id", "no item before this one asks for an approval by this id")
        if not isinstance(item.get("approve"), bool):
            refuse(f"{field}.approve", "must be true or false")
        asked, self._asked[question] = self._asked[question], None
        if asked is None:
            return None
        if item["approve"]:
            self._approved.append(f"{field}.approve")
            return None
        why = f": {item['reason']}" if item.get("reason") else ""
        return Call(asked.name, asked.arguments, error(f"the call was not approved{why}"))

    def _open(self, new: bool = False) -> Message:
        """The answer that goes on; a new one where there is none, or where one is wanted and no results are to follow
        the one there is."""
        if self._answer is None or (new and not self._waiting):
            self._answer = {"role": "assistant", "content": None}
            self._place = len(self.messages)
            self._waiting.clear()
            self.messages.append(self._answer)
        return self._answer

    def _put(self, message: Message) -> None:
        self._answer = None
        self.messages.append(message)


def _of_model(kind: str, item: Item) -> bool:
    """Whether the model has written it. A question for an approval is not told, and does not count."""
    if kind == "message":
        return item.get("role") == "assistant"
    return kind.endswith("_call") or kind in ("program", "reasoning")


def _made(call_id: str, call: Call) -> dict[str, Any]:
    """A call as messages have it."""
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _told(call_id: str, result: str | list[dict[str, str]]) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": result}


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
