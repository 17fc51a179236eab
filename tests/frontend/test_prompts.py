"""Prompts are made ready without a router."""

from __future__ import annotations

import asyncio

import pytest

from radixrt.config import FrontendConfig, resolve
from radixrt.formats.tools import NO_TOOLS
from radixrt.frontend.generate.prepare import Prompts, Ready
from radixrt.frontend.http.errors import ApiError
from radixrt.frontend.openai.schema import Chat, cut_prompt, parse_completion
from radixrt.messages import TextPrompt
from radixrt.tokens import TextService

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def text(folder):
    with TextService.load(resolve(FrontendConfig(model=str(folder)))) as service:
        yield service


def make_prompts(text, **settings) -> Prompts:
    return Prompts(resolve(FrontendConfig(**settings)), text, None, lambda key: key)


def prepare(prompts: Prompts, body, key: str = "k") -> list[Ready]:
    return asyncio.run(prompts.prepare(body, key, NO_TOOLS, body.constraint()))


def test_several_prompts_within_the_room_there_is(text):
    body = parse_completion(*cut_prompt(b'{"prompt": [[1, 2, 3], [4]], "max_tokens": 6}'))
    found = prepare(make_prompts(text, max_model_len=8), body)
    assert [(len(one.encoded.ids), one.sampling.max_tokens) for one in found] == [(12, 5), (4, 6)]
    assert [one.sampling.max_tokens for one in prepare(make_prompts(text), body)] == [6, 6]


def test_no_room_is_told_in_the_words_of_the_api(text):
    body = Chat(messages=HELLO)
    with pytest.raises(ApiError) as refused:
        prepare(make_prompts(text, max_model_len=2), body)
    assert (refused.value.status, refused.value.param) == (400, "messages")
    assert refused.value.code == "context_length_exceeded"


def test_what_is_counted_is_what_is_asked(text):
    prompts, body = make_prompts(text), Chat(messages=HELLO)
    (ready,) = prepare(prompts, body)
    assert asyncio.run(prompts.num_tokens(ready.prompt, "k", body)) == len(ready.encoded.ids) // 4


def test_an_answer_is_remembered_for_the_same_tenant(text):
    prompts = make_prompts(text)
    (ready,) = prepare(prompts, Chat(messages=HELLO))
    said, ids = {"role": "assistant", "content": "Good day."}, text.encode_now(TextPrompt("Good day.", False))
    prompts.remember(ready.encoded, said, ids, "k")
    turn = Chat(messages=[*HELLO, said, *HELLO])
    assert [prepare(prompts, turn, key)[0].encoded.kept_turns for key in ("k", "other")] == [1, 0]
