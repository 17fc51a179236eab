"""System blocks and messages of Anthropic's API as a chat template takes them: OpenAI's messages.

user       [tool_result, ..., text, ...]     -> a `tool` message for each result, then one `user` message
assistant  [thinking, text, tool_use, ...]   -> one message with reasoning_content, content and tool_calls

Messages of one role that follow each other are one. Every refusal names the field.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from radixrt.frontend.anthropic.tools import template_id
from radixrt.frontend.errors import refuse

Block = dict[str, Any]
Message = dict[str, Any]
ROLES = ("user", "assistant", "system")
USER_BLOCKS = ("text", "tool_result")
ASSISTANT_BLOCKS = ("text", "tool_use", "thinking", "redacted_thinking")
CHANGE = "\ufdd0"
"""A noncharacter, which no text has: what is put behind a block to see where the prompt changes."""
INVALID_JSON = "INVALID_JSON"
"""The one key of a call's input whose arguments are not the JSON of an object; its value is what the model wrote."""


class History:
    """`messages` of a request, for the template. `changed` is one of its blocks, by identity, that is made longer."""

    def __init__(self, system: str | list[Block] | None, messages: list[Message], changed: Block | None = None) -> None:
        self.messages: list[Message] = []
        self.partial = False
        """The last message, the assistant's, is to go on."""
        self._changed = changed
        self._open: dict[str, str] = {}
        """Calls that want their results now: name by id."""
        if not messages:
            refuse("messages", "at least one message is required")
        if system and (content := self._text_content([*blocks("system", system)])):
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
            kind = _checked_kind(field, block, USER_BLOCKS if role == "user" else ("text",))
            if kind == "tool_result":
                self.messages.append(self._result(field, block))
            else:
                rest.append((field, block))
        if self._open and role == "user":
            self._refuse_open(_index(found[0][0]) - 1)
        if rest:
            self.messages.append({"role": role, "content": self._text_content(rest)})

    def _result(self, field: str, block: Block) -> Message:
        shown = _string(field, block, "tool_use_id")
        if shown not in self._open:
            refuse(f"{field}.tool_use_id", f"the message before has no tool_use block {shown!r} without its result")
        name = self._open.pop(shown)
        content = block.get("content")
        parts = [*blocks(f"{field}.content", content)] if content is not None else []
        for path, part in parts:
            _checked_kind(path, part, ("text",))
        said = self._text_content(parts)
        if block is self._changed:
            said = _longer(said)
        if not isinstance(block.get("is_error"), bool | None):
            refuse(f"{field}.is_error", "must be true or false")
        if block.get("is_error"):  # templates have no other way to say so
            said = _prefixed("Error: ", said)
        return {"role": "tool", "tool_call_id": template_id(shown), "name": name, "content": said}

    def _assistant(self, found: list[tuple[str, Block]], last: bool) -> None:
        text, thoughts, calls = "", "", []
        for field, block in found:
            match _checked_kind(field, block, ASSISTANT_BLOCKS):
                case "text":
                    text += self._text(field, block)
                case "thinking":
                    thoughts += _string(field, block, "thinking")
                case "tool_use":
                    calls.append(self._call(field, block))
        message: Message = {"role": "assistant", "content": text or (None if calls else "")}
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls:
            message["tool_calls"] = calls
        if not last or calls:
            self.messages.append(message)
        elif text:
            if text != text.rstrip():
                refuse("messages", "the last message, of the assistant, cannot end with white space")
            self.messages.append(message)
            self.partial = True

    def _call(self, field: str, block: Block) -> dict[str, Any]:
        shown, name = _string(field, block, "id"), _string(field, block, "name")
        given = block.get("input")
        if not isinstance(given, dict):
            refuse(f"{field}.input", "must be an object")
        if shown in self._open:
            refuse(f"{field}.id", f"there are two tool_use blocks {shown!r}")
        self._open[shown] = name
        if block is self._changed:
            given = given | {CHANGE: CHANGE}
        broken = given.get(INVALID_JSON) if len(given) == 1 else None
        arguments = broken if isinstance(broken, str) else json.dumps(given, ensure_ascii=False)
        return {"id": template_id(shown), "type": "function", "function": {"name": name, "arguments": arguments}}

    def _text_content(self, parts: list[tuple[str, Block]]) -> str | list[Block]:
        """A text, or a list where there are several: templates join them in their own way."""
        for field, part in parts:
            _checked_kind(field, part, ("text",))
        texts = [self._text(field, part) for field, part in parts]
        return "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]

    def _text(self, field: str, block: Block) -> str:
        text = _string(field, block, "text") if block["type"] == "text" else _document(field, block)
        return text + CHANGE if block is self._changed else text

    def _refuse_open(self, index: int) -> None:
        ids = ", ".join(self._open)
        refuse(f"messages.{index}", f"tool_use blocks without a tool_result right in the next message: {ids}")


def blocks(field: str, content: Any) -> Iterator[tuple[str, Block]]:
    """The blocks of a content, each with its field; a text is one block."""
    if isinstance(content, str):
        yield field, {"type": "text", "text": content}
        return
    if not isinstance(content, list):
        refuse(field, "must be a text or a list of blocks")
    for i, block in enumerate(content):
        if not isinstance(block, dict):
            refuse(f"{field}.{i}", "must be an object with a type")
        yield f"{field}.{i}", block


def _groups(messages: list[Message]) -> Iterator[tuple[str, list[tuple[str, Block]]]]:
    """(role, its blocks) of messages, neighbours of one role together."""
    role, found = "", []
    for i, message in enumerate(messages):
        if message.get("role") not in ROLES:
            refuse(f"messages.{i}.role", f"must be one of {', '.join(ROLES)}, not {message.get('role')!r}")
        if "content" not in message:
            refuse(f"messages.{i}.content", "is missing")
        own = [*blocks(f"messages.{i}.content", message["content"])]
        empty = not own or message["content"] == ""
        if empty and not (message["role"] == "assistant" and i == len(messages) - 1):
            refuse(f"messages.{i}.content", "must not be empty")
        if message["role"] != role and found:
            yield role, found
            found = []
        role = message["role"]
        found += own
    if found:
        yield role, found


def _index(field: str) -> int:
    """Of the message that a field is in."""
    return int(field.split(".")[1])


def _document(field: str, block: Block) -> str:
    """What a document of text, or a search result, says: behind its title, and what else is told of it."""
    about = [_string(field, block, name) for name in ("title", "context", "source") if isinstance(block.get(name), str)]
    place, content = f"{field}.content", block.get("content")
    if block["type"] == "document":
        name = "data" if block["source"]["type"] == "text" else "content"
        place, content = f"{field}.source.{name}", block["source"].get(name)
    texts = []
    for path, part in blocks(place, content):
        _checked_kind(path, part, ("text",))
        texts.append(_string(path, part, "text"))
    return "\n".join([*about, *texts])


def _is_text(block: Block) -> bool:
    """Whether it is a document that is text, or a search result."""
    source = block.get("source")
    if block.get("type") == "document":
        return isinstance(source, dict) and source.get("type") in ("text", "content")
    return block.get("type") == "search_result"


def _checked_kind(field: str, block: Block, kinds: tuple[str, ...]) -> str:
    kind = block.get("type")
    if "text" in kinds and _is_text(block):
        return "text"
    if kind in ("image", "document"):
        refuse(f"{field}.type", f"{kind} blocks are not served: this model reads text only")
    if kind not in kinds:
        refuse(f"{field}.type", f"must be one of {', '.join(kinds)} here, not {kind!r}")
    return kind


def _string(field: str, block: Block, name: str) -> str:
    if not isinstance(block.get(name), str):
        refuse(f"{field}.{name}", "must be a string")
    return block[name]


def _longer(content: str | list[Block]) -> str | list[Block]:
    if isinstance(content, str):
        return content + CHANGE
    return [*content[:-1], content[-1] | {"text": content[-1]["text"] + CHANGE}]


def _prefixed(prefix: str, content: str | list[Block]) -> str | list[Block]:
    if isinstance(content, str):
        return prefix + content
    return [content[0] | {"text": prefix + content[0]["text"]}, *content[1:]]
