"""Rewrites chats for templates that expect another form, refuse a chat, or leave something out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NamedTuple

Message = dict[str, Any]


class Style(NamedTuple):
    """How tool calls are written: the text before them, between two, and after the last."""

    before: str
    between: str
    behind: str
    python: bool = False
    """Whether a call is written in Python syntax, not as JSON."""


STYLES: dict[str, Style] = {
    "<tool_call>": Style("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
    "<|/tool|>": Style("<|tool_call|>[", ", ", "]<|/tool_call|>"),
    "<|tool_call|>": Style("<|tool_call|>[", ", ", "]"),
    "List of tools: ": Style("<|tool_call_start|>[", ", ", "]<|tool_call_end|>", python=True),
}
"""The styles of templates that do not write tool calls (SmolLM3's, Phi-4-mini's, Granite 3's, LFM2's), by a string that
the template contains."""

MAX_PARSED = 1 << 16
"""The most values of a call's arguments that are parsed: to Python objects, with the GIL held all the while."""
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
WITH_TOOLS = "You are a helpful assistant with some tools."
"""The system message for a chat without one, from Phi-4-mini's model card."""


def ways(messages: list[Message]) -> Iterator[list[Message]]:
    """The chat unchanged, and then forms that a template may accept if it refuses that: "" for content that is None, no
    thinking in messages with text and calls, each call in a message of its own, and combinations of these."""
    yield messages
    found = [messages]
    for rewrite in (_with_text, _without_thoughts, _one_call_each):
        for other in [rewrite(way) for way in found]:
            if other not in found:
                found.append(other)
                yield other


def _with_text(messages: list[Message]) -> list[Message]:
    """Replace content that is None by "": some templates for DeepSeek-R1 search it without a test."""
    return [{**message, "content": ""} if message.get("content", "") is None else message for message in messages]


def _without_thoughts(messages: list[Message]) -> list[Message]:
    """Remove thinking from messages with text and calls, which gpt-oss' template refuses."""
    return [
        {key: value for key, value in message.items() if key not in REASONING_KEYS}
        if message.get("content") and message.get("tool_calls")
        else message
        for message in messages
    ]


def _one_call_each(messages: list[Message]) -> list[Message]:
    """Split messages with several calls into one for each call, followed by its result; Llama's template refuses
    others.

    A result belongs to a call by its id, or by its position if it has none."""
    found: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            found.append(message)
            continue
        results = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        for number, call in enumerate(calls):
            said = {"role": message["role"], "content": message.get("content") and ""} if number else message
            found.append({**said, "tool_calls": [call]})
            if result := _result_of(call, results):
                found.append(results.pop(results.index(result)))
        found += results
    return found


def _result_of(call: Any, results: list[Message]) -> Message | None:
    id = call.get("id") if isinstance(call, dict) else None
    named = (result for result in results if result.get("tool_call_id", id) == id)
    return next(named, None)


def values_in(arguments: str) -> int:
    """The most values that JSON may hold, one for each object, list and comma; known without parsing it."""
    return sum(map(arguments.count, "[{,"))


def is_parsed(arguments: str) -> bool:
    """Whether arguments of a call are few enough to be parsed. Others stay a string."""
    return len(arguments) <= MAX_PARSED or values_in(arguments) <= MAX_PARSED


def functions_of(tools: list[Message]) -> list[Any]:
    """The functions of tools, as some templates expect them."""
    return [tool.get("function", tool) for tool in tools]


def told_functions(tools: list[Message]) -> dict[str, str]:
    """Variables of Firefunction's template, which has no `tools`."""
    functions = json.dumps(functions_of(tools), ensure_ascii=False, indent=4)
    return {"functions": functions, "datetime": datetime.now().strftime("%Y-%m-%d")}


def with_tools(messages: list[Message], tools: list[Message]) -> list[Message]:
    """Add the tools, as JSON, to the system message, where Phi-4-mini's template reads them."""
    first = messages[0] if messages[0]["role"] == "system" else {"role": "system", "content": WITH_TOOLS}
    rest = messages[1:] if messages[0]["role"] == "system" else messages
    return [{**first, "tools": json.dumps(functions_of(tools), ensure_ascii=False)}, *rest]


def style_of(source: str) -> Style | None:
    """The style for a template that mentions calls but does not write them; None for other templates."""
    return next((style for mark, style in STYLES.items() if mark in source), None)


def with_calls(message: Message, style: Style) -> Message:
    """An answer with its calls as text, as the model writes them: otherwise it would not see its own calls."""
    write = _in_python if style.python else _written
    functions = [call.get("function", {}) for call in message["tool_calls"] if isinstance(call, dict)]
    calls = style.between.join(map(write, functions))
    return {**message, "content": f"{message.get('content') or ''}{style.before}{calls}{style.behind}"}


def _written(function: Message) -> str:
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{{"name": {json.dumps(function.get("name"), ensure_ascii=False)}, "arguments": {text}}}'


def _in_python(function: Message) -> str:
    """f(a="text", b=[1, None]). Arguments that are no object stay what they are."""
    arguments: Any = function.get("arguments") or {}
    if isinstance(arguments, str) and is_parsed(arguments):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if isinstance(arguments, dict):
        arguments = ", ".join(
            f"{name}={json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)}"
            for name, value in arguments.items()
        )
    return f"{function.get('name')}({arguments})"
