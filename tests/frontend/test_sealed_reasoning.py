"""Reasoning that a client of the Responses API keeps as `encrypted_content`, as Codex does, and sends back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.frontend.scripted import Model, scripted
from tests.frontend.test_sessions import sequences

KEYS = ("a:key-a", "a:key-a2", "b:key-b")
INCLUDE = ["reasoning.encrypted_content"]
THOUGHT, SAID = "Hm, let me see: 東京 🙂.", "It is so."
TEXT = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"
QUESTION = {"role": "user", "content": "Is it so?"}
MORE = {"role": "user", "content": "Sure?"}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Iterator[list[Model]]:
    """Two servers that keep no answers and share nothing but their configuration, like one before and after a
    restart."""
    options: dict[str, Any] = {"api_key": KEYS, "session_tokens": 0}
    with (
        scripted("thinking", tmp_path_factory.mktemp("one"), **options) as one,
        scripted("thinking", tmp_path_factory.mktemp("other"), **options) as other,
    ):
        yield [one, other]


def ask(model: Model, *items: Any, text: str = TEXT, key: str = "key-a", **fields: Any) -> Any:
    model.says(text)
    create = model.client.with_options(api_key=key).responses.create
    return create(**{"model": "m", "input": list(items), "store": False, "include": INCLUDE} | fields)


def hidden(response: Any) -> list[dict[str, Any]]:
    """A response's items as a client sends them back that keeps no reasoning in plain text."""
    thought, message = (item.to_dict() for item in response.output)
    return [{name: thought[name] for name in ("type", "id", "encrypted_content")} | {"summary": []}, message]


def restored(model: Model) -> str | None:
    """The reasoning of the chat's first answer in the latest prompt."""
    return model.answers[-1][1].messages[1].get("reasoning_content")


@pytest.mark.parametrize("streams", [False, True])
def test_reasoning_that_was_kept_by_the_client_hits_all_that_was_computed(models, streams):
    question = QUESTION | {"content": f"Is it so? {streams}"}
    response = ask(models[0], question, stream=streams)
    if streams:
        events = {event.type: event for event in response}
        response = events["response.completed"].response
        closed = [event for event in ask(models[0], question, stream=True) if event.type == "response.output_item.done"]
        assert closed[0].item.encrypted_content == response.output[0].encrypted_content
    assert response.output[0].content[0].text == THOUGHT and response.output[1].content[0].text == SAID
    before = sequences(models[0])[-1]
    for number, model in enumerate(models):
        following = ask(model, question, *hidden(response), MORE, text=SAID)
        assert restored(model) == THOUGHT
        assert sequences(model)[-1][: len(before)].tolist() == before.tolist()
        assert number or following.usage.input_tokens_details.cached_tokens == len(before)


def test_it_is_there_only_if_it_is_asked_for(models):
    for include in ([], None, ["message.output_text.logprobs"]):
        response = ask(models[0], QUESTION, include=include)
        assert "encrypted_content" not in response.output[0].to_dict()
    assert "encrypted_content" not in ask(models[0], QUESTION).output[1].to_dict()


def test_reasoning_of_a_key_is_that_of_its_tenant_and_salt(models):
    items = hidden(ask(models[0], QUESTION))
    salted = hidden(ask(models[0], QUESTION, extra_body={"cache_salt": "s"}))
    for key, sent, salt, own in (
        ("key-a2", items, "", True),
        ("key-b", items, "", False),
        ("key-a", items, "s", False),
        ("key-a", salted, "s", True),
        ("key-a", salted, "", False),
        ("key-b", salted, "s", False),
    ):
        ask(models[0], QUESTION, *sent, MORE, key=key, text=SAID, extra_body={"cache_salt": salt})
        assert restored(models[0]) == (THOUGHT if own else None), (key, salt)


def test_what_was_not_sealed_here_is_left_out(models):
    thought, message = hidden(ask(models[0], QUESTION))
    sealed = thought["encrypted_content"]
    middle = len(sealed) // 2
    other = "A" if sealed[middle] != "A" else "B"
    damaged = [sealed[:-4], sealed[:-1], sealed[4:], sealed[:middle] + other + sealed[middle + 1 :], sealed + "AAAA"]
    for content in (*damaged, "gAAAAABo1uX", "", "é", "rr1.", None):
        ask(models[0], QUESTION, thought | {"encrypted_content": content}, message, MORE, text=SAID)
        assert restored(models[0]) is None, content
    for content in (5, {}, [sealed]):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(models[0], QUESTION, thought | {"encrypted_content": content}, message, MORE, text=SAID)
        assert caught.value.param == "input[1].encrypted_content"


def test_reasoning_in_plain_text_goes_before(models):
    thought, message = hidden(ask(models[0], QUESTION))
    plain = thought | {"content": [{"type": "reasoning_text", "text": "Mine."}]}
    ask(models[0], QUESTION, plain, message, MORE, text=SAID)
    assert restored(models[0]) == "Mine."
    ask(models[0], QUESTION, thought | {"content": []}, message, MORE, text=SAID)
    assert restored(models[0]) == THOUGHT


def test_prompts_are_counted_with_it(models):
    response = ask(models[0], QUESTION)
    items = [QUESTION, *hidden(response), MORE]
    count = models[0].client.with_options(api_key="key-a").responses.input_tokens.count
    tokens = count(model="m", input=items).input_tokens
    assert tokens == ask(models[0], *items, text=SAID).usage.input_tokens
    assert tokens > count(model="m", input=[QUESTION, *items[2:]]).input_tokens
