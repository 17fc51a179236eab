"""Converts system blocks and messages of Anthropic's API to OpenAI's messages, for the chat template.

user       [tool_result, ..., text, ...]     -> a `tool` message for each result, then one `user` message
assistant  [thinking, text, tool_use, ...]   -> one message with reasoning_content, content and tool_calls
           [..., server_tool_use, web_search_tool_result, ...], by `hosted`
                                             -> one with that call, its `tool` message, then one of what follows

Consecutive messages of the same role are merged. Every error names the field.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from radixrt.frontend.anthropic.blocks import (
    CHANGE,
    Block,
    blocks,
    check_text_only,
    checked_kind,
    result_content,
    string,
    system_content,
    text_content,
    text_of,
    to_json,
)
from radixrt.frontend.anthropic.hosted import CALLS, NOTHING, RESULTS, Hosted
from radixrt.frontend.anthropic.references import References
from radixrt.frontend.anthropic.tools import template_id
from radixrt.frontend.generate.arguments import INVALID_JSON, arguments_text, written_arguments
from radixrt.frontend.generate.media import asking
from radixrt.frontend.http.errors import one_of, refuse

Message = dict[str, Any]
ROLES = ("user", "assistant", "system")
USER_BLOCKS = ("text", "tool_result")
ASSISTANT_BLOCKS = ("text", "tool_use", "thinking", "redacted_thinking", *CALLS, *RESULTS, *NOTHING)


class History:
    """The `messages` of a request, for the template. `changed` is one of its blocks (by identity) that is made
    longer; `tools` are those of the request, for results that refer to them."""

    def __init__(
        self,
        system: str | list[Block] | None,
        messages: list[Message],
        changed: Block | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> None:
        self.messages: list[Message] = []
        self.partial = False
        """Whether the answer continues the last message, which is the assistant's."""
        self._changed = changed
        self._references = References(tools, changed)
        self._hosted = Hosted(self._references, changed)
        self._open: dict[str, str] = {}
        """Calls whose results must come next: name by id."""
        if not messages:
            refuse("messages", "at least one message is required")
        _check_text_only(system, messages)
        if system and (content := system_content(system, changed)):
            self.messages.append({"role": "system", "content": content})
        groups = [*_groups(messages)]
        for number, (role, found) in enumerate(groups):
            if role == "assistant":
                self._assistant(found, last=number == len(groups) - 1)
            else:
                self._user(role, found)
        if self._open:
            self._refuse_open(len(messages) - 1)

    def _user(self, role: str, found: list[tuple[str, Block]]) -> None:
        rest: list[tuple[str, Block]] = []
        for field, block in found:
            kind = checked_kind(field, block, USER_BLOCKS if role == "user" else ("text",))
            if kind == "tool_result":
                self.messages.append(self._result(field, block))
            else:
                rest.append((field, block))
        if self._open and role == "user":
            self._refuse_open(_index(found[0][0]) - 1)
        if rest:
            self.messages.append({"role": role, "content": text_content(rest, self._changed)})

    def _result(self, field: str, block: Block) -> Message:
        shown = string(field, block, "tool_use_id")
        if shown not in self._open:
            refuse(f"{field}.tool_use_id", f"the message before has no tool_use block {shown!r} without its result")
        name = self._open.pop(shown)
        said = result_content(field, block, self._changed, self._references.expanded)
        return {"role": "tool", "tool_call_id": template_id(shown), "name": name, "content": said}

    def _assistant(self, found: list[tuple[str, Block]], last: bool) -> None:
        text, thoughts, calls, begun = "", "", [], len(self.messages)
        for field, block in found:
            match checked_kind(field, block, ASSISTANT_BLOCKS):
                case "text":
                    text += text_of(field, block, self._changed)
                case "thinking":
                    thoughts += string(field, block, "thinking")
                case "tool_use":
                    calls.append(self._call(field, block))
                case kind if kind in CALLS:
                    self._hosted.call(field, block)
                case kind if kind in RESULTS and (pair := self._hosted.result(field, block)):
                    self.messages += [_answer(text, thoughts, [pair[0]]), pair[1]]
                    text, thoughts = "", ""
        if calls or (not last and (text or thoughts or len(self.messages) == begun)):
            self.messages.append(_answer(text, thoughts, calls))
        elif text:
            if text != text.rstrip():
                refuse("messages", "the last message, of the assistant, cannot end with white space")
            self.messages.append(_answer(text, thoughts, calls))
            self.partial = True

    def _call(self, field: str, block: Block) -> dict[str, Any]:
        shown, name = string(field, block, "id"), string(field, block, "name")
        given = block.get("input")
        if shown in self._open:
            refuse(f"{field}.id", f"there are two tool_use blocks {shown!r}")
        self._open[shown] = name
        if not isinstance(given, dict):  # an agent that keeps what the model wrote
            given = {} if given is None else {INVALID_JSON: arguments_text(f"{field}.input", given)}
        if block is self._changed:
            given = given | {CHANGE: CHANGE}
        broken = written_arguments(given)
        arguments = to_json(f"{field}.input", given) if broken is None else broken
        return {"id": template_id(shown), "type": "function", "function": {"name": name, "arguments": arguments}}

    def _refuse_open(self, index: int) -> None:
        ids = ", ".join(self._open)
        refuse(f"messages.{index}", f"tool_use blocks without a tool_result right in the next message: {ids}")


def _answer(text: str, thoughts: str, calls: list[dict[str, Any]]) -> Message:
    message: Message = {"role": "assistant", "content": text or (None if calls else "")}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return message


def _check_text_only(system: str | list[Block] | None, messages: list[Message]) -> None:
    """Raise ApiError (400) for images in instructions, and in what a user asks."""
    check_text_only("system", system)
    question = asking([_speaker(message) for message in messages])
    for i, message in enumerate(messages):
        if i == question or message.get("role") == "system":
            check_text_only(f"messages.{i}.content", message.get("content"))


def _speaker(message: Message) -> Any:
    """The role of a message; "tool" if it has results."""
    role, content = message.get("role"), message.get("content")
    if role != "user" or not isinstance(content, list):
        return role
    return "tool" if any(isinstance(block, dict) and block.get("type") == "tool_result" for block in content) else role


def _groups(messages: list[Message]) -> Iterator[tuple[str, list[tuple[str, Block]]]]:
    """(role, blocks) of messages, consecutive ones of the same role together."""
    role = ""
    found: list[tuple[str, Block]] = []
    for i, message in enumerate(messages):
        one_of(message.get("role"), ROLES, f"messages.{i}.role")
        if "content" not in message:
            refuse(f"messages.{i}.content", "is missing")
        own = [*blocks(f"messages.{i}.content", message["content"])]
        if message["content"] in ("", []) and message["role"] != "assistant":
            refuse(f"messages.{i}.content", "must not be empty")
        if not own:  # an answer without content, as replies may be, sent back
            own = [(f"messages.{i}.content", {"type": "text", "text": ""})]
        if message["role"] != role and found:
            yield role, found
            found = []
        role = message["role"]
        found += own
    if found:
        yield role, found


def _index(field: str) -> int:
    """The index of the message that a field is in."""
    return int(field.split(".")[1])
