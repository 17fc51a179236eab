"""What usage says of thoughts, in the words of each API."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import anthropic
import pytest

from radixrt.formats.message import AssistantMessage
from radixrt.formats.parsing import Content, Reasoning
from radixrt.frontend.generate.reasoning import reasoning_tokens
from tests.frontend.scripted import Model, scripted

THOUGHT = "<think>\nHm, let me see.\n</think>"
SAID = THOUGHT + "\n\nIt is so."


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Iterator[Model]:
    with scripted("thinking", tmp_path_factory.mktemp("thinking")) as model:
        yield model


def bounds(model: Model) -> range:
    """How many tokens the thought of SAID may be: up to its last word, with or without the line feed and the mark."""
    with_mark = len(model.tokenizer.encode(THOUGHT, False))
    return range(len(model.tokenizer.encode(THOUGHT.removesuffix("\n</think>"), False)), with_mark + 1)


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_of_a_chat(model, stream):
    def details(*texts: str, **fields):
        if not stream:
            return model.chat(*texts, **fields).usage.completion_tokens_details
        *_, last = model.chat(*texts, stream=True, stream_options={"include_usage": True}, **fields)
        return last.usage.completion_tokens_details

    alone = details(SAID).reasoning_tokens
    assert alone in bounds(model)
    assert details(SAID, SAID, n=2).reasoning_tokens == 2 * alone
    assert details(SAID, stop=["so"]).reasoning_tokens == alone
    assert details("It is so.").reasoning_tokens == 0


def test_thinking_of_a_message(model):
    asked = {"model": "m", "max_tokens": 400, "messages": [{"role": "user", "content": "hello"}]}
    with anthropic.Anthropic(base_url=model.url, api_key="any", max_retries=0) as client:
        for text, expected in ((SAID, bounds(model)), ("It is so.", range(1))):
            model.says(text)
            whole = client.messages.create(**asked).usage
            model.says(text)
            with client.messages.stream(**asked) as stream:
                kinds = {event.type: event for event in stream}
            assert whole.output_tokens_details.thinking_tokens in expected
            assert kinds["message_delta"].usage.output_tokens_details == whole.output_tokens_details


class Letters:
    """A tokenizer of which each token is a letter."""

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


def test_thoughts_between_which_something_is_said():
    message = AssistantMessage()
    for piece in (Reasoning("a "), Reasoning("b"), Content("x"), Reasoning("c"), Content("yyyy")):
        message.add(piece)
    assert message.thoughts == ["a b", "c"]
    ids = array("i", list(b"<a b>x<c>yyyy")).tobytes()
    assert reasoning_tokens(Letters(), message.thoughts, ids) == len("<a b>x<c")
    assert reasoning_tokens(Letters(), message.thoughts, ids[: 4 * 3]) == 3, "no more than there are"
    assert reasoning_tokens(None, message.thoughts, ids) == reasoning_tokens(Letters(), [], ids) == 0
