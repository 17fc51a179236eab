"""What a task is: a chat to go on with, its tools, and a checker that sees what the model finally says and calls."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Call = tuple[str, dict[str, Any]]
"""A tool's name and its arguments."""


def no_tools(name: str, arguments: dict[str, Any]) -> str:
    return f"error: no tool {name}"


@dataclass(frozen=True, slots=True)
class Example:
    """messages: the prompt, OpenAI's form. tools: OpenAI's form. gold: what comes after the prompt: the assistant's
    turns, the tools' replies, in training also further turns of the user. schema: for `response_format`. choices: for
    `select`, labels of which the answer is one. tag: how hard ("2048" tokens of context, "2" steps).

    `run_tool(name, arguments)` gives a tool's reply as text, "error: ..." to a call that does not fit.
    `check(text, calls)` says whether the last answer's text and all calls made, in order, are right.
    """

    kind: str
    tag: str
    messages: list[Message]
    gold: list[Message]
    check: Callable[[str, Sequence[Call]], bool]
    tools: list[dict[str, Any]] | None = None
    run_tool: Callable[[str, dict[str, Any]], str] = no_tools
    schema: dict[str, Any] | None = None
    choices: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        """The same for two examples exactly if a model is asked the same."""
        asked = json.dumps([self.messages, self.tools, self.schema], sort_keys=True)
        return hashlib.blake2b(asked.encode(), digest_size=12).hexdigest()

    def gold_result(self) -> tuple[str, list[Call]]:
        """What `check` must accept."""
        calls = [call for message in self.gold for call in calls_of(message)]
        return self.gold[-1]["content"] or "", calls


def calls_of(message: Message) -> list[Call]:
    """The calls of an assistant's message."""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def system(text: str) -> list[Message]:
    return [{"role": "system", "content": text}] if text else []


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def calls(*made: Call, first: int = 0) -> Message:
    """An assistant's turn of calls, whose ids count from `first`."""
    listed = [
        {"id": f"call_{first + i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(made)
    ]
    return {"role": "assistant", "content": None, "tool_calls": listed}


def replies(text: str, index: int = 0) -> Message:
    """A tool's reply to the call of id `index`."""
    return {"role": "tool", "tool_call_id": f"call_{index}", "content": text}


def tool(name: str, description: str, arguments: dict[str, str]) -> dict[str, Any]:
    """A tool, its arguments and their JSON types; all are required."""
    properties = {key: {"type": kind} for key, kind in arguments.items()}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def mentions(text: str, value: str) -> bool:
    """Whether `value` stands in `text` as a word of its own."""
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None


def numbers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"(?<![\w.])-?\d+(?![\w])", text)]
