"""Log-probabilities of prompts, and names of tokens in log-probabilities, as vLLM has them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from radixrt.frontend.openai import exchange
from radixrt.frontend.openai.replies import Reply
from radixrt.messages import TokenLogprob
from radixrt.messages.ranks import RequestInfo
from radixrt.worker.execution.fake_runner import fake_logprob
from tests.frontend.scripted import Model, scripted

PROMPT = "The dog sees a cat."
HELLO = [{"role": "user", "content": "hello"}]
ANSWER = "Yes, a cat."


def likelihoods(request: RequestInfo, token: int) -> TokenLogprob | None:
    """The most likely of a token and some others, which need not include the token."""
    count = request.sampling.logprobs
    if count is None:
        return None
    others = {token, *((3 * token + i) % 500 for i in range(count))}
    ranked = sorted(((other, fake_logprob(other)) for other in others), key=lambda pair: -pair[1])
    return TokenLogprob(token, fake_logprob(token), ranked[:count])


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Iterator[Model]:
    with scripted("hermes", tmp_path_factory.mktemp("hermes")) as model:
        model.script._logprob = likelihoods
        yield model


def ask(model: Model, path: str, **fields: Any) -> dict[str, Any]:
    model.says(*[ANSWER] * fields.get("n", 1))
    answer = httpx.post(f"{model.url}/v1/{path}", json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def complete(model: Model, **fields: Any) -> list[dict[str, Any]]:
    return ask(model, "completions", **{"prompt": PROMPT, "max_tokens": 3} | fields)["choices"]


def check(found: list[dict[str, Any] | None], ids: list[int], count: int) -> None:
    """Whether these are the log-probabilities of a prompt, with `count` alternatives."""
    assert found[0] is None and len(found) == len(ids)
    outside = 0
    for token, row in zip(ids[1:], found[1:], strict=True):
        assert next(iter(row)) == str(token)
        assert all(one["logprob"] == pytest.approx(fake_logprob(int(other))) for other, one in row.items())
        assert all(one["decoded_token"] for one in row.values())
        ranked = sorted((one for one in row.values() if one["rank"]), key=lambda one: -one["logprob"])
        assert [one["rank"] for one in ranked] == list(range(1, count + 1))
        outside += row[str(token)]["rank"] is None
        assert len(row) == count + (row[str(token)]["rank"] is None)
    assert 0 < outside < (len(ids) - 1 if count else len(ids)), "otherwise this tests less than it seems to"


@pytest.mark.parametrize(("own", "of_prompt"), [(None, 0), (None, 3), (0, 2), (2, 0), (1, 3)])
@pytest.mark.parametrize("more", [{}, {"echo": True}, {"n": 2, "stop": "cat"}, {"max_tokens": 0}])
def test_log_probabilities_of_a_prompt(model, own, of_prompt, more):
    """In vLLM's format; what is reported of the answer and of its echo does not depend on it."""
    ids = model.tokenizer.encode(PROMPT, True)
    whole = complete(model, logprobs=own, prompt_logprobs=of_prompt, **more)
    for choice in whole:
        check(choice.pop("prompt_logprobs"), ids, of_prompt)
    assert whole == complete(model, logprobs=own, **more)


def test_log_probabilities_of_several_prompts(model):
    texts = [PROMPT, "A bird."]
    found = complete(model, prompt=texts, n=2, prompt_logprobs=2)
    for choice, text in zip(found, [text for text in texts for _ in range(2)], strict=True):
        check(choice["prompt_logprobs"], model.tokenizer.encode(text, True), 2)


@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 1}, {"n": 2, "stop": "cat"}])
def test_log_probabilities_of_a_chats_prompt(model, fields):
    """They are beside the choices, which share the prompt."""
    whole = ask(model, "chat/completions", messages=HELLO, prompt_logprobs=2, return_token_ids=True, **fields)
    check(whole["prompt_logprobs"], whole["prompt_token_ids"], 2)
    plain = ask(model, "chat/completions", messages=HELLO, return_token_ids=True, **fields)
    assert whole["choices"] == plain["choices"] and "prompt_logprobs" not in plain


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
def test_many_log_probabilities_are_written_in_a_thread(model, monkeypatch, fields):
    """Thousands of tokens with 20 alternatives each take a second, in which other requests go on."""
    threads = []
    written = Reply.body
    monkeypatch.setattr(Reply, "body", lambda *args: threads.append(threading.get_ident()) or written(*args))
    few = complete(model, **fields)
    monkeypatch.setattr(exchange, "MAX_INLINE_LOGPROBS", 3)
    assert complete(model, **fields) == few
    complete(model)
    assert threads[1] != threads[0] == threads[2]


def test_a_token_is_among_its_alternatives(model):
    """As in OpenAI's API: so many of the most likely ones, and the token itself."""
    (choice,) = complete(model, logprobs=2, echo=True)
    found = choice["logprobs"]
    assert found["top_logprobs"][0] is None and found["token_logprobs"][0] is None
    rows = [*zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)][1:]
    assert all(top[token] >= logprob for token, logprob, top in rows)
    assert {len(top) for _, _, top in rows} == {2, 3}
    (choice,) = complete(model, logprobs=0)
    found = choice["logprobs"]
    rows = zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True)
    assert all(top == {token: logprob} for token, logprob, top in rows)


def test_tokens_named_by_their_ids(model):
    """For those who need to know which tokens were sampled, whatever their texts are."""
    by_id = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    (named,), (plain,) = complete(model, logprobs=2, **by_id), complete(model, logprobs=2)
    assert named["logprobs"]["tokens"] == [f"token_id:{token}" for token in named["token_ids"]]
    assert all(name.startswith("token_id:") for top in named["logprobs"]["top_logprobs"] for name in top)
    assert named["logprobs"]["text_offset"] == plain["logprobs"]["text_offset"]


def test_tokens_of_a_chat_named_by_their_ids(model):
    (choice,) = ask(
        model, "chat/completions", messages=HELLO, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True
    )["choices"]
    found = choice["logprobs"]["content"]
    assert [one["token"] for one in found] == [f"token_id:{token}" for token in model.tokenizer.encode(ANSWER, False)]
    assert all(one["top_logprobs"][0]["token"].startswith("token_id:") for one in found)
    assert b"".join(bytes(one["bytes"]) for one in found).decode() == choice["message"]["content"] == ANSWER
