"""Converts input items of the Responses API to messages for a chat template. Every error names the field.

reasoning, message (assistant), function_call, ...   one answer   -> one assistant message
function_call_output, tool_search_output, ...                     -> a tool message
message (user, system, developer)                                 -> a message
items of tools that OpenAI runs                                   -> calls and their results, by `hosted`, before an
                                                                     answer that waits for results of its own
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixrt.frontend.generate.media import SYSTEM, asking, media_kind, placeholder
from radixrt.frontend.http.errors import one_of, refuse
from radixrt.frontend.responses.hosted import CALLS, OUTPUTS, REFUSED, WHOLE, Call, error, string
from radixrt.frontend.responses.search import FOUND, SEARCH_ITEMS, by_server

Item = dict[str, Any]
Message = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""The key of the text, by the type of a message's part."""


def messages_of(items: str | list[Item], before: Sequence[Message] = ()) -> list[Message]:
    """The messages that `input` adds to those `before` it. Raises ApiError (400) that names an invalid field."""
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
        question = asking([_speaker(item) for item in items])
        self._question = None if question is None else items[question]
        """The user's message that is to be answered: images there are refused, and elsewhere named."""
        self._calls = {call["id"]: call["id"] for message in before for call in message.get("tool_calls") or ()}
        """Ids of calls, by the ids by which outputs may refer to them."""
        self._taken = self._calls.keys() | {id for item in items if isinstance(id := item.get("call_id"), str)}
        """Ids of calls that are in use, also of those in later items."""
        self._number = -1
        """The last number that was used as a new id."""
        self._asked: dict[str, Call | None] = {}
        """Calls that a user was asked to approve, by the ids of the requests; None once they are answered."""
        self._approved: list[str] = []
        """Fields of approvals after which there is no item of the model yet."""
        self._answer: Message | None = None
        """The assistant's message that the next item may belong to."""
        self._place = 0
        """The index of the last answer."""
        self._waiting: set[str] = set()
        """Ids of its calls whose results have not come yet."""
        self._last = ""
        """The kind of the last item that has become a part of a message."""

    def add(self, field: str, item: Item) -> None:
        kind = item.get("type", "message")
        if not isinstance(kind, str):
            refuse(f"{field}.type", "must be a string")
        if _of_model(kind, item):
            self._approved.clear()
        if kind in SEARCH_ITEMS and by_server(item):
            return
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
        """Check the end of the items."""
        for field in self._approved:
            refuse(field, "tools of MCP servers are not called here")

    def _message(self, field: str, item: Item) -> None:
        role = one_of(item.get("role"), ROLES, f"{field}.role")
        names_media = item is not self._question and role not in SYSTEM
        content = _content(f"{field}.content", item.get("content"), names_media)
        if role != "assistant":
            self._waiting.clear()
            self._put({"role": "system" if role == "developer" else role, "content": content})
            return
        answer = self._open(new=self._last == "message")
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        answer["content"] = (answer["content"] or "") + text

    def _reasoning(self, field: str, item: Item) -> None:
        """Reasoning in plain text belongs to the answer that follows. Summaries are left out: they are not the model's
        reasoning."""
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
        said = OUTPUTS[kind](field, item) if kind in OUTPUTS else _content(f"{field}.output", item.get("output"), True)
        self._waiting.discard(call_id)
        self._put(_told(call_id, said) | ({FOUND: item["tools"]} if kind == "tool_search_output" else {}))

    def _whole(self, call: Call) -> None:
        """Insert a call and its result. If an answer waits for results, which must follow it, they are put before it,
        but after that answer's text."""
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
        """A new id of nine digits, as Mistral's templates require. Numbers only go up, whatever ids a client uses."""
        self._number = max(self._number + 1, self._before + len(self.messages))
        while f"{self._number:09}" in self._taken:
            self._number += 1
        return f"{self._number:09}"

    def _approval(self, field: str, item: Item) -> Call | None:
        """An answer to a request for approval; only the first one counts. A call that is not approved is returned, with
        a result that says so; one that is approved comes in a later item."""
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
        """The current answer. A new one if there is none, or if `new` and the current one does not wait for results."""
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
    """Whether the model has written an item. A request for approval is left out, and does not count."""
    if kind == "message":
        return item.get("role") == "assistant"
    return kind.endswith("_call") or kind in ("program", "reasoning")


def _speaker(item: Item) -> Any:
    """The role of an item in a chat; of one that tells nothing, "system"."""
    kind = item.get("type", "message")
    if kind == "message":
        return item.get("role")
    if not isinstance(kind, str):
        return "system"
    return "tool" if kind.endswith("_output") else "assistant" if _of_model(kind, item) else "system"


def _made(call_id: str, call: Call) -> dict[str, Any]:
    """A call in the format of messages."""
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _told(call_id: str, result: str | list[dict[str, str]]) -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": result}


def _content(field: str, content: Any, names_media: bool) -> str | list[dict[str, str]]:
    """A text, or text parts in the format of chat templates. Images are refused, unless `names_media`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse(field, "must be a string or a list of parts")
    parts = []
    for i, part in enumerate(content):
        if not isinstance(part, dict):
            refuse(f"{field}[{i}]", "must be an object")
        if names_media and (media := media_kind(part)):
            parts.append({"type": "text", "text": placeholder(media)})
            continue
        kind = part.get("type")
        if not isinstance(kind, str) or (name := TEXTS.get(kind)) is None:
            refuse(f"{field}[{i}].type", f"{kind!r} is not served, only text is")
        if not isinstance(part.get(name), str):
            refuse(f"{field}[{i}].{name}", "must be a string")
        parts.append({"type": "text", "text": part[name]})
    return parts[0]["text"] if len(parts) == 1 else parts
