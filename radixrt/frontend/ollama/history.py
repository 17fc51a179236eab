"""Converts messages of Ollama's API to OpenAI's, for the chat template. Every error names the field.

Calls need no ids there, and many clients drop them: those without one are numbered, so that the same conversation has
the same ids in each of its turns. A tool's result belongs to the call that its tool_call_id names, or to the first one
without a result, of the tool that tool_name names if it does.
"""

from __future__ import annotations

from typing import Any

from radixrt.frontend.generate.arguments import arguments_text, written_arguments
from radixrt.frontend.generate.media import SYSTEM, asking, placeholder
from radixrt.frontend.http.errors import one_of, refuse

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")


def call_id(name: str, number: int) -> str:
    """The id of a conversation's call number `number`, from 0, in the form that Kimi's models write."""
    return f"functions.{name}:{number}"


def num_calls(messages: list[Message]) -> int:
    """The number of calls in a conversation, which need not be valid."""
    found = (message.get("tool_calls") for message in messages)
    return sum(len(calls) for calls in found if isinstance(calls, list))


class History:
    """The `messages` of a request, for the template."""

    def __init__(self, messages: list[Message]) -> None:
        self.messages: list[Message] = []
        self._number = 0
        self._ids: set[str] = set()
        self._waiting: dict[str, str] = {}
        """The names of calls without a result, by their ids."""
        question = asking([message.get("role") for message in messages])
        for i, message in enumerate(messages):
            field = f"messages[{i}]"
            role = one_of(message.get("role"), ROLES, f"{field}.role")
            content = _content(field, message, refuses=i == question or role in SYSTEM)
            if role == "assistant":
                self._answer(field, message, content)
            elif role == "tool":
                self._result(field, message, content)
            else:
                self.messages.append({"role": role, "content": content})

    @property
    def partial(self) -> bool:
        """Whether the answer continues the last message."""
        last = self.messages[-1]
        return last["role"] == "assistant" and bool(last["content"]) and not last.get("tool_calls")

    def _answer(self, field: str, message: Message, content: str) -> None:
        thoughts, calls = message.get("thinking"), message.get("tool_calls")
        if not isinstance(thoughts, str | None):
            refuse(f"{field}.thinking", "must be a string")
        if not isinstance(calls, list | None):
            refuse(f"{field}.tool_calls", "must be a list")
        self._waiting.clear()
        answer: Message = {"role": "assistant", "content": content}
        if thoughts:
            answer["reasoning_content"] = thoughts
        if calls:
            answer["tool_calls"] = [self._call(f"{field}.tool_calls[{j}]", call) for j, call in enumerate(calls)]
        self.messages.append(answer)

    def _call(self, field: str, call: Any) -> Message:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            refuse(f"{field}.function", "must be an object with a name and arguments")
        name, arguments = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not name:
            refuse(f"{field}.function.name", "must be a string that is not empty")
        written = written_arguments(arguments) if isinstance(arguments, dict) else None
        if written is None:
            written = arguments_text(f"{field}.function.arguments", arguments)
        own = call.get("id")
        if not isinstance(own, str) or not own or own in self._ids:
            own = call_id(name, self._number)
        self._number += 1
        self._ids.add(own)
        self._waiting[own] = name
        return {"id": own, "type": "function", "function": {"name": name, "arguments": written}}

    def _result(self, field: str, message: Message, content: str) -> None:
        given, name = message.get("tool_call_id"), message.get("tool_name") or message.get("name")
        if not self._waiting:
            refuse(field, "no message before this one has a tool call without a result")
        named = [one for one, called in self._waiting.items() if given == one or called == name]
        own = given if given in named else (named or [*self._waiting])[0]
        name = self._waiting.pop(own)
        self.messages.append({"role": "tool", "tool_call_id": own, "name": name, "content": content})


def _content(field: str, message: Message, refuses: bool) -> str:
    """The text of a message, after its images, which are named in their place unless that `refuses` them."""
    content, images = message.get("content"), message.get("images")
    if content is None and message["role"] == "assistant":
        content = ""
    if not isinstance(content, str):
        refuse(f"{field}.content", "must be a string")
    if not isinstance(images, list | None):
        refuse(f"{field}.images", "must be a list")
    if images and refuses:
        refuse(f"{field}.images", "are not served: this model reads text only")
    return "\n".join([placeholder("image")] * len(images or ()) + [content] * bool(content or not images))
