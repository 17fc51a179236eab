"""Chats as text, turn by turn: what `template.jinja` writes, without Jinja, and with what the assistant says marked."""

from __future__ import annotations

from typing import Any

from training.nano.tasks import Example, Message

BOS, END = "<s>", "<|end|>"
ROLES = ("system", "user", "assistant", "tool")
MARKS = {role: f"<|{role}|>" for role in ROLES}

Turn = tuple[str, str]
"""A role and all text of its turn, without marks."""


def turns_of(example: Example) -> list[Turn]:
    """The whole chat of an example, its gold answers included."""
    return chat_turns(example.messages + example.gold, example.tools)


def chat_turns(messages: list[Message], tools: list[dict[str, Any]] | None) -> list[Turn]:
    turns = [(message["role"], _body(message)) for message in messages]
    if tools:
        listed = "\n".join(["Tools:", *(_tool_line(tool["function"]) for tool in tools)])
        if turns and turns[0][0] == "system":
            turns[0] = ("system", f"{turns[0][1]}\n{listed}")
        else:
            turns.insert(0, ("system", listed))
    return turns


def text_of(turns: list[Turn]) -> str:
    return BOS + "".join(f"{MARKS[role]}{text}{END}" for role, text in turns)


def _body(message: Message) -> str:
    parts = [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls") or []:
        function = call["function"]
        parts.append(
            f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {function["arguments"]}}}\n</tool_call>'
        )
    return "\n".join(parts)


def _tool_line(function: dict[str, Any]) -> str:
    properties = function["parameters"]["properties"]
    arguments = ", ".join(f"{key}: {value['type']}" for key, value in properties.items())
    return f"{function['name']}({arguments}): {function['description']}"
