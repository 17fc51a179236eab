"""What the arguments of calls cost, which are JSON in a string: their values are not counted where messages are."""

from __future__ import annotations

import time

import pytest

from radixrt.messages import NO_TENANT, ChatPrompt
from radixrt.tokens.chain import keys_of
from radixrt.tokens.chat import ChatTemplates
from radixrt.tokens.errors import FieldError
from radixrt.tokens.rewriting import MAX_PARSED
from radixrt.tokens.text import is_short_chat

TEMPLATE = "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }};{% endfor %}"
MANY = '{"a": [' + "[]," * 3_000_000 + "[]]}"


def chat(*arguments: str) -> ChatPrompt:
    calls = [{"id": str(i), "function": {"name": "f", "arguments": one}} for i, one in enumerate(arguments)]
    return ChatPrompt([{"role": "assistant", "content": "", "tool_calls": calls}])


def test_arguments_of_millions_of_values_are_not_parsed() -> None:
    templates = ChatTemplates({"default": TEMPLATE}, {})
    assert templates.render(chat('{"b": [1, 2]}')) == '{"b": [1, 2]};'
    began = time.thread_time()
    with pytest.raises(FieldError, match="arguments of calls hold more than 1048576 values"):
        templates.render(chat(MANY))
    assert len(keys_of(NO_TENANT, chat(MANY))) == 2
    assert time.thread_time() - began < 0.2


def test_arguments_of_too_many_values_stay_a_string() -> None:
    long, many = '{"text": "' + "x" * 4 * MAX_PARSED + '"}', '{"n": [' + "1," * MAX_PARSED + "1]}"
    templates = ChatTemplates({"default": TEMPLATE}, {})
    assert templates.render(chat(long, many)).startswith(long + ';"{')
    assert (
        keys_of(NO_TENANT, chat(many)) == keys_of(NO_TENANT, chat(f" {many} ")) != keys_of(NO_TENANT, chat(many + " 1"))
    )


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "text", "text": "hello " * 200_000}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}] * 4000},
        chat("[" * 200_000).messages[0],
        chat(*["{}"] * 4000).messages[0],
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": {"a": [1] * 200_000}}}]},
    ],
)
def test_parts_and_calls_count_as_text(message: dict) -> None:
    """A chat with many of them is not rendered on the event loop."""
    assert not is_short_chat(ChatPrompt([message]))


def test_tools_and_arguments_of_the_template_count_as_well() -> None:
    hello = [{"role": "user", "content": "hello"}]
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 1000}}
    assert is_short_chat(ChatPrompt(hello, [tool] * 50, template_args={"enable_thinking": True}))
    assert not is_short_chat(ChatPrompt(hello, [tool] * 200))
    assert not is_short_chat(ChatPrompt(hello, template_args={"notes": "x" * 200_000}))
