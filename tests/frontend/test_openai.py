"""OpenAI's API, by its own client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import openai
import pytest

from radixrt.frontend.generate.logprobs import Offsets
from radixrt.frontend.openai.replies import Reply
from radixrt.messages import TokenLogprob
from radixrt.worker.execution.fake_runner import EOS
from tests.frontend.conftest import serving

HELLO = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module")
def client(url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as client:
        yield client


def complete(client, prompt="Once upon a time", **fields):
    return client.completions.create(**({"model": "m", "prompt": prompt, "max_tokens": 12, "temperature": 0} | fields))


def chat(client, messages=HELLO, **fields):
    return client.chat.completions.create(**({"model": "m", "messages": messages, "max_tokens": 12} | fields))


def text_of(whole) -> str:
    choice = whole.choices[0]
    return choice.message.content if hasattr(choice, "message") else choice.text


def cached(usage) -> int:
    return usage.prompt_tokens_details.cached_tokens


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "m" and model.max_model_len == 8192
    assert client.models.retrieve("m") == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("some/other")
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("make", [complete, chat])
def test_a_stream_is_the_whole_in_parts(client, make):
    whole = make(client)
    chunks = list(make(client, stream=True))
    choice = whole.choices[0]
    if make is chat:
        assert [c.choices[0].delta.role for c in chunks[:2]] == ["assistant", None]
        text, parts = choice.message.content, [c.choices[0].delta.content or "" for c in chunks]
    else:
        text, parts = choice.text, [c.choices[0].text for c in chunks]
    assert text and "".join(parts) == text and len([p for p in parts if p]) > 3
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({c.id for c in chunks}) == 1 and all(c.usage is None for c in chunks)
    assert whole.usage.completion_tokens == 12


@pytest.mark.parametrize("make", [complete, chat])
def test_usage_ends_a_stream_that_asks_for_it(client, make):
    whole = make(client)
    chunks = list(make(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and all(c.usage is None for c in chunks[:-1])
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, 12)
    assert cached(usage) == usage.prompt_tokens - 1


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("make", [complete, chat])
def test_each_chunk_has_the_usage_so_far_if_asked_for(client, make, include):
    """As in vLLM and SGLang."""
    options = {"include_usage": include, "continuous_usage_stats": True}
    chunks = list(make(client, n=2, stream=True, stream_options=options, logprobs=True if make is chat else 0))
    counted = {0: 0, 1: 0}
    for chunk in chunks[: len(chunks) - include]:
        (choice,), usage = chunk.choices, chunk.usage
        found = choice.logprobs and (choice.logprobs.content if make is chat else choice.logprobs.tokens)
        counted[choice.index] += len(found or ())
        assert usage.completion_tokens == counted[choice.index]
        assert usage.total_tokens - usage.completion_tokens == usage.prompt_tokens > 0
    assert counted == {0: 12, 1: 12}
    assert not include or (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 24)


def test_cached_tokens_are_always_there(client):
    first = complete(client, "a prompt that nobody has sent before")
    again = complete(client, "a prompt that nobody has sent before")
    assert cached(first.usage) == 0
    assert cached(again.usage) == again.usage.prompt_tokens - 1
    assert again.radixrt["worker"].startswith("worker-")


def test_a_second_turn_hits_the_first(client):
    first = chat(client, [{"role": "user", "content": "tell me about the dog " * 10}])
    turn = {"role": "assistant", "content": first.choices[0].message.content}
    messages = [{"role": "user", "content": "tell me about the dog " * 10}, turn, {"role": "user", "content": "more"}]
    assert cached(chat(client, messages).usage) >= first.usage.prompt_tokens - 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_batch_of_prompts_keeps_its_order(client, stream):
    prompts = ["first prompt", "the second", "and a third"]
    alone = [complete(client, p).choices[0].text for p in prompts]
    if stream:
        texts = ["", "", ""]
        for chunk in complete(client, prompts, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        batch = complete(client, prompts)
        texts = [choice.text for choice in batch.choices]
        assert [c.index for c in batch.choices] == [0, 1, 2] and batch.usage.completion_tokens == 36
    assert texts == alone


def test_token_ids_as_prompts(client):
    one = complete(client, [5, 6, 7])
    assert one.usage.prompt_tokens == 3
    two = complete(client, [[5, 6, 7], [8, 9, 10, 11]])
    assert two.choices[0].text == one.choices[0].text and two.usage.prompt_tokens == 7


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("make", [complete, chat])
def test_several_choices(client, make, stream):
    if not stream:
        found = make(client, n=3)
        assert [c.index for c in found.choices] == [0, 1, 2]
        assert found.usage.completion_tokens == 36 and found.usage.prompt_tokens == make(client).usage.prompt_tokens
        return
    chunks = list(make(client, n=3, stream=True))
    ends = [c.choices[0].index for c in chunks if c.choices[0].finish_reason]
    assert sorted(ends) == [0, 1, 2]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens(client, stream):
    whole = complete(client, max_tokens=40).choices[0].text
    stop = whole[9:13]
    expected = whole[: whole.index(stop)]
    if stream:
        chunks = list(complete(client, max_tokens=40, stop=[stop, "never"], stream=True))
        assert "".join(c.choices[0].text for c in chunks) == expected
        assert chunks[-1].choices[0].finish_reason == "stop"
        return
    cut = complete(client, max_tokens=40, stop=stop)
    assert cut.choices[0].text == expected
    assert (cut.choices[0].finish_reason, cut.choices[0].stop_reason) == ("stop", stop)
    assert 0 < cut.usage.completion_tokens <= 40
    kept = complete(client, max_tokens=40, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].text == expected + stop


@pytest.mark.parametrize("stream", [False, True])
def test_usage_ends_with_the_stop_string(client, stream):
    """However far a fast worker has gone on by then: the tokens counted are those whose text was looked at."""
    fields = {"max_tokens": 400, "logprobs": 0}
    whole = complete(client, **fields).choices[0]
    stop = whole.text[9:13]
    end = whole.text.index(stop) + len(stop)
    needed = next(i for i, offset in enumerate([*whole.logprobs.text_offset[1:], 10**9], 1) if offset >= end)
    for _ in range(3):
        if stream:
            *chunks, last = complete(client, stop=stop, stream=True, stream_options={"include_usage": True}, **fields)
            found = sum(len(c.choices[0].logprobs.tokens) for c in chunks if c.choices[0].logprobs)
        else:
            last = complete(client, stop=stop, **fields)
            found = len(last.choices[0].logprobs.tokens)
        assert found == last.usage.completion_tokens
        assert needed <= found <= needed + 2, "more only where a character spans tokens"


TOKEN_IDS = {"extra_body": {"return_token_ids": True}}


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("make", [complete, chat])
def test_token_ids_of_prompt_and_answers(client, url, make, stops):
    """As vLLM reports them, for those who train on answers: whole and streamed, to the token that ended an answer."""
    asked = {"prompt": "Once upon a time"} if make is complete else {"messages": HELLO}
    with httpx.Client(base_url=url) as http:
        prompt = http.post("/tokenize", json=asked).json()["tokens"]
        fields = {"max_tokens": 40, "n": 2, "temperature": 0}
        if stops:
            fields["stop"] = text_of(make(client, **fields))[9:13]
        whole = make(client, **fields, **TOKEN_IDS)
        assert (whole if make is chat else whole.choices[1]).prompt_token_ids == prompt
        found = [choice.token_ids for choice in whole.choices]
        assert sum(len(ids) for ids in found) == whole.usage.completion_tokens
        text = http.post("/detokenize", json={"tokens": found[0]}).json()["prompt"]
    assert text.startswith(text_of(whole)) if stops else text == text_of(whole)
    assert stops == (len(found[0]) < 40)
    streamed, prompts = [[], []], {}
    for chunk in make(client, stream=True, **fields, **TOKEN_IDS):
        (choice,) = chunk.choices
        told = getattr(chunk if make is chat else choice, "prompt_token_ids", None)
        if told is not None:
            assert choice.index not in prompts and not streamed[choice.index]
            prompts[choice.index] = told
        streamed[choice.index] += getattr(choice, "token_ids", None) or []
    assert streamed == found and prompts == {0: prompt, 1: prompt}
    assert not hasattr(make(client).choices[0], "token_ids")


def test_the_last_chunk_says_who_served(client):
    chunks = list(complete(client, "Once upon a time", n=2, stream=True))
    ends = [c for c in chunks if c.choices[0].finish_reason]
    assert len(ends) == 2 and all(c.radixrt["worker"].startswith("worker-") for c in ends)
    assert all(c.radixrt["cached_tokens"] >= 0 for c in ends)


def test_a_stop_token(client):
    ids = [t["token"] for t in logprobs_of(chat(client, logprobs=True))]
    assert len(ids) == 12
    tokens = complete(client, logprobs=0).choices[0].logprobs.tokens
    assert len(tokens) == 12


def logprobs_of(answer) -> list[dict]:
    return [t.model_dump() for t in answer.choices[0].logprobs.content]


def test_log_probabilities_of_a_chat(client):
    found = logprobs_of(chat(client, logprobs=True, top_logprobs=1))
    text = chat(client).choices[0].message.content
    assert b"".join(bytes(t["bytes"]) for t in found).decode("utf-8", "replace") == text
    assert all(t["logprob"] < 0 and len(t["top_logprobs"]) == 1 for t in found)
    streamed = [c.choices[0].logprobs for c in chat(client, logprobs=True, stream=True)]
    assert sum(len(x.content) for x in streamed if x) == 12
    assert chat(client, logprobs=False, top_logprobs=0).choices[0].logprobs is None, "as some clients fill it in"


def test_log_probabilities_of_a_completion(client):
    found = complete(client, logprobs=1).choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == 12
    assert found.text_offset[0] == 0 and found.text_offset == sorted(found.text_offset)


def test_echo(client):
    plain = complete(client, "The dog")
    echoed = complete(client, "The dog", echo=True)
    assert echoed.choices[0].text == "The dog" + plain.choices[0].text
    text = "".join(c.choices[0].text for c in complete(client, "The dog", echo=True, stream=True))
    assert text == echoed.choices[0].text


@pytest.mark.parametrize("prompt", ["The dog sees a cat.", [5, 6, 7, 8, 9, 10]])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_echo_with_log_probabilities(client, prompt, max_tokens):
    """As those who score texts want it: of the prompt, too, but for its first token, in a stream as in one piece."""
    fields = {"echo": True, "logprobs": 1, "max_tokens": max_tokens}
    choice = complete(client, prompt, **fields).choices[0]
    found = choice.logprobs
    size = complete(client, prompt).usage.prompt_tokens
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == size + max_tokens
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None and found.text_offset[0] == 0
    assert all(x < 0 for x in found.token_logprobs[1:])
    for token, logprob, top in list(zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True))[1:]:
        assert top[token] >= logprob and len(top) == 1 + (max(top.values()) > logprob), "the token and the likeliest"
    assert choice.text.startswith(complete(client, prompt, echo=True, max_tokens=0).choices[0].text)
    chunks = [c.choices[0] for c in complete(client, prompt, stream=True, **fields)]
    assert "".join(c.text for c in chunks) == choice.text
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [one for c in chunks if c.logprobs for one in getattr(c.logprobs, name)]
        assert streamed == getattr(found, name), name
    many = complete(client, [prompt, prompt] if isinstance(prompt, str) else prompt, n=2, **fields)
    assert [c.logprobs.token_logprobs[:size] for c in many.choices] == [found.token_logprobs[:size]] * len(many.choices)


@pytest.mark.parametrize("skips", [True, False])
def test_echo_shows_no_special_tokens(client, skips):
    """Whatever becomes of those that are generated."""
    fields = {"echo": True, "logprobs": 0, "extra_body": {"skip_special_tokens": skips}}
    echo = complete(client, [0, 5, 6, 7], max_tokens=0, **fields).choices[0].text
    found = complete(client, [0, 5, 6, 7], max_tokens=3, **fields).choices[0]
    assert found.text.startswith(echo) and found.logprobs.text_offset[1] == 0
    assert found.logprobs.text_offset[4] == len(echo)


@pytest.mark.parametrize("most", [3, 4, 1000])
def test_only_the_end_of_a_prompt(client, most):
    body = {"truncate_prompt_tokens": most, "return_token_ids": True}
    prompts = [[5, 6, 7, 8], [9, 10]]
    for found, ids in zip(complete(client, prompts, extra_body=body).choices, prompts, strict=True):
        assert found.prompt_token_ids == ids[-most:]
        assert found.text == complete(client, ids[-most:]).choices[0].text
    whole = complete(client, "The dog sees a cat.", extra_body={"return_token_ids": True}).choices[0].prompt_token_ids
    echo = complete(client, "The dog sees a cat.", echo=True, max_tokens=0, extra_body=body).choices[0]
    assert echo.prompt_token_ids == whole[-most:] and "The dog sees a cat.".endswith(echo.text)
    assert (echo.text == "The dog sees a cat.") == (most >= len(whole))
    first = chat(client, extra_body=body)
    full = chat(client, extra_body={"return_token_ids": True})
    assert first.prompt_token_ids == full.prompt_token_ids[-most:]
    said = {"role": "assistant", "content": text_of(first)}
    again = chat(client, [*HELLO, said, *HELLO], extra_body={"return_token_ids": True})
    assert again.prompt_token_ids[: len(full.prompt_token_ids)] == full.prompt_token_ids, "the next turn has all of it"


def test_numbers_in_other_types(client):
    """As clients send them that compute them, and as other servers take them."""
    more = {"top_k": "5", "stop_token_ids": [1.0]}
    fields = {"max_tokens": 3.0, "temperature": "0", "seed": 7.0, "echo": "false", "extra_body": more}
    assert complete(client, **fields).usage.completion_tokens == 3
    assert chat(client, max_tokens="3", n=2.0, extra_body={"return_token_ids": "true"}).choices[1].token_ids
    for field, value in (("max_tokens", 3.5), ("max_tokens", True), ("stop", 5), ("echo", "maybe")):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(client, **{field: value})
        assert caught.value.param == field


def test_an_answer_that_another_server_left_empty(client):
    said = {"role": "assistant", "content": None}
    asked = {"return_token_ids": True}
    answers = said, said | {"content": ""}, {"role": "assistant"}
    found = [chat(client, [*HELLO, answer, *HELLO], extra_body=asked).prompt_token_ids for answer in answers]
    assert found[0] == found[1] == found[2]
    elsewhere = said | {"audio": {"id": "audio_1"}}, said | {"function_call": {"name": "f", "arguments": "{}"}}
    for other in ({"role": "user", "content": None}, *elsewhere):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, [*HELLO, other, *HELLO])
        assert caught.value.param == "messages[1].content"


def test_of_alternatives_with_the_same_text_the_likeliest_is_kept():
    """As those that are parts of a character."""
    texts = {1: "\ufffd", 2: "\ufffd", 3: "\ufffd", 9: "x"}
    tokenizer = SimpleNamespace(token_text=texts.__getitem__, token_bytes=lambda _: b"?")
    found = TokenLogprob(2, -3.0, [(9, -0.25), (1, -0.5), (3, -1.0)])
    (top,) = Reply("m", tokenizer).logprobs([found], Offsets(None, frozenset()))["top_logprobs"]
    assert top == {"x": -0.25, "\ufffd": -0.5}


def test_alternatives_of_completions_begin_with_the_likeliest():
    tokenizer = SimpleNamespace(token_text=str, token_bytes=lambda _: b"?")
    for token, logprob, order in ((8, -3.0, "9318"), (3, -1.0, "931")):
        found = TokenLogprob(token, logprob, [(9, -0.25), (3, -1.0), (1, -2.0)])
        (top,) = Reply("m", tokenizer).logprobs([found], Offsets(None, frozenset()))["top_logprobs"]
        assert list(top) == list(order)


@pytest.mark.parametrize("make", [complete, chat])
@pytest.mark.parametrize("stream", [False, True])
def test_what_ended_an_answer(client, make, stream):
    """As in vLLM: what was asked for, not that the model ended its turn or that it is long enough."""

    def ended(**fields):
        answer = make(client, temperature=0, stream=stream, max_tokens=40, **fields)
        last = [*answer][-1].choices[0] if stream else answer.choices[0]
        return last.finish_reason, last.stop_reason

    ids = make(client, temperature=0, max_tokens=40, extra_body={"return_token_ids": True}).choices[0].token_ids
    assert ended() == ("length", None)
    assert ended(extra_body={"stop_token_ids": [ids[5]]}) == ("stop", ids[5])
    text = make(client, temperature=0, max_tokens=40)
    assert ended(stop=[text_of(text)[3:6], "never"]) == ("stop", text_of(text)[3:6])


def test_sampling_parameters_travel(client):
    extra = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "ignore_eos": True}
    extra |= {"stop_token_ids": [9], "cache_salt": "s", "skip_special_tokens": False, "unknown_field": 1}
    found = complete(
        client, seed=3, top_p=0.9, presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"7": 5}, extra_body=extra
    )
    assert found.usage.completion_tokens >= 1


def test_a_cache_salt_is_another_namespace(client):
    text = "salted prompt of some length"
    complete(client, text)
    assert cached(complete(client, text).usage) > 0
    assert cached(complete(client, text, extra_body={"cache_salt": "pepper"}).usage) == 0


def test_continuing_the_last_message(client):
    messages = [*HELLO, {"role": "assistant", "content": "Well, I"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    longer = chat(client, messages, extra_body=extra)
    assert longer.usage.prompt_tokens < chat(client, messages).usage.prompt_tokens


def test_tools_reach_the_template(client):
    tools = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
    assert chat(client, tools=tools).usage.prompt_tokens > chat(client).usage.prompt_tokens + 5


def test_the_async_client(url):
    async def many() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="any", max_retries=0) as client:
            calls = [chat(client, [{"role": "user", "content": "why " * (i % 4 + 1)}]) for i in range(24)]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]

    texts = asyncio.run(many())
    assert all(texts[i] == texts[i % 4] for i in range(24)) and len(set(texts)) > 1


# ---------------------------------------------------------------- refusals


BAD = [
    (complete, {"max_tokens": -1}, 400, "max_tokens"),
    (complete, {"max_tokens": "many"}, 400, "max_tokens"),
    (complete, {"temperature": -0.5}, 400, "temperature"),
    (complete, {"temperature": "hot"}, 400, "temperature"),
    (complete, {"top_p": -0.5}, 400, "top_p"),
    (complete, {"n": 0}, 400, "n"),
    (complete, {"best_of": 3}, 400, "best_of"),
    (complete, {"suffix": "end"}, 400, "suffix"),
    (complete, {"logprobs": 99}, 400, "logprobs"),
    (complete, {"prompt": ""}, 400, "prompt"),
    (complete, {"prompt": []}, 400, "prompt"),
    (complete, {"prompt": [1, -5]}, 400, "prompt"),
    (complete, {"prompt": [1, 99999]}, 400, "prompt"),
    (complete, {"prompt": [1, 1 << 40]}, 400, "prompt"),
    (complete, {"prompt": ["a", 3]}, 400, "prompt"),
    (complete, {"prompt": 7}, 400, "prompt"),
    (complete, {"prompt": [[5], []]}, 400, "prompt"),
    (complete, {"prompt": [5] * 9000}, 400, "prompt"),
    (complete, {"prompt": None}, 400, "prompt"),
    (complete, {"logit_bias": {"x": 1}}, 400, "logit_bias"),
    (complete, {"logit_bias": {"7": 101}}, 400, "logit_bias"),
    (complete, {"stop": [""]}, 400, "stop"),
    (complete, {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    (complete, {"model": "gpt-9"}, 404, "model"),
    (complete, {"extra_body": {"top_k": -7}}, 400, "top_k"),
    (complete, {"extra_body": {"stop_token_ids": [-1]}}, 400, "stop_token_ids"),
    (chat, {"messages": []}, 400, "messages"),
    (chat, {"messages": "hello"}, 400, "messages"),
    (chat, {"messages": [{"role": "user"}]}, 400, "messages"),
    (chat, {"messages": [{"role": "user", "content": "x " * 9000}]}, 400, "messages"),
    (chat, {"max_completion_tokens": -3}, 400, "max_completion_tokens"),
    (chat, {"top_logprobs": 2}, 400, "top_logprobs"),
    (chat, {"tool_choice": "required"}, 400, "tool_choice"),
    (chat, {"response_format": {"type": "json_object"}, "extra_body": {"regex": "a"}}, 400, "regex"),
    (chat, {"functions": [{"name": "f"}]}, 400, "functions"),
    (chat, {"logprobs": True, "top_logprobs": 99}, 400, "top_logprobs"),
    (chat, {"modalities": ["audio"]}, 400, "modalities"),
    (chat, {"extra_body": {"guided_json": {"type": "thing"}}}, 400, "guided_json"),
    (chat, {"extra_body": {"echo": True}}, 400, "echo"),
    (complete, {"extra_body": {"prompt_logprobs": 21}}, 400, "prompt_logprobs"),
    (chat, {"extra_body": {"prompt_logprobs": -1}}, 400, "prompt_logprobs"),
    (complete, {"stream": True, "extra_body": {"prompt_logprobs": 0}}, 400, "prompt_logprobs"),
    (complete, {"logprobs": -1, "extra_body": {"prompt_logprobs": 2}}, 400, "logprobs"),
    (chat, {"logprobs": True, "top_logprobs": -2, "extra_body": {"prompt_logprobs": 2}}, 400, "top_logprobs"),
    (complete, {"max_tokens": "3", "temperature": "warm"}, 400, "temperature"),
    (chat, {"max_tokens": "3", "extra_body": {"top_k": "3000000000"}}, 400, "top_k"),
    (complete, {"max_tokens": "3", "temperature": "nan"}, 400, "temperature"),
    (complete, {"logit_bias": {"5": "nan"}}, 400, "logit_bias"),
    (complete, {"seed": "9223372036854775808"}, 400, "seed"),
    (complete, {"extra_body": {"truncate_prompt_tokens": 0}}, 400, "truncate_prompt_tokens"),
    (chat, {"extra_body": {"chat_template_kwargs": {"tools": []}}}, 400, "chat_template_kwargs"),
    (complete, {"extra_body": {"structured_outputs": {"regex": 3}}}, 400, "structured_outputs.regex"),
    (complete, {"prompt": [True]}, 400, "prompt"),
    (complete, {"prompt": [[1 << 70]]}, 400, "prompt"),
    (complete, {"seed": 1 << 70}, 400, "seed"),
    (complete, {"max_tokens": 1 << 70}, 400, "max_tokens"),
    (complete, {"n": 1 << 70}, 400, "n"),
    (complete, {"extra_body": {"top_k": 10**30}}, 400, "top_k"),
    (complete, {"extra_body": {"stop_token_ids": [1 << 70]}}, 400, "stop_token_ids"),
    (chat, {"model": "gpt-9", "stream": True}, 404, "model"),
    (chat, {"max_tokens": -1, "stream": True}, 400, "max_tokens"),
    (complete, {"temperature": 3.5e38}, 400, "temperature"),
    (chat, {"temperature": 1e300, "stream": True}, 400, "temperature"),
    (complete, {"extra_body": {"repetition_penalty": 1e-38}}, 400, "repetition_penalty"),
    (complete, {"logit_bias": {"7": -1e30}}, 400, "logit_bias"),
    (complete, {"extra_body": {"allowed_token_ids": []}}, 400, "allowed_token_ids"),
    (complete, {"extra_body": {"allowed_token_ids": [512]}}, 400, "allowed_token_ids"),
    (chat, {"extra_body": {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1}}, 400,
     "allowed_token_ids"),
    # only the worker knows that this is eos
    (complete, {"extra_body": {"allowed_token_ids": [EOS], "min_tokens": 1}}, 400, "allowed_token_ids"),
    (chat, {"stream": True, "extra_body": {"allowed_token_ids": [EOS], "min_tokens": 1}}, 400, "allowed_token_ids"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "fields", "code", "param"), BAD, ids=[f"{m.__name__}-{f}"[:60] for m, f, _, _ in BAD])
def test_refusals_name_the_field(client, make, fields, code, param):
    with pytest.raises(openai.APIStatusError) as caught:
        make(client, **fields)
    error = caught.value
    assert error.status_code == code and (error.param or "").split("[")[0] == param, error.body
    assert error.body["message"] and error.body["type"]


def test_keys(folder):
    with serving(folder, api_key=("a:key-a", "b:key-b")) as frontend:

        def ask(key: str):
            with openai.OpenAI(base_url=frontend.url + "/v1", api_key=key, max_retries=0) as client:
                return complete(client, "the same words for both")

        ask("key-a")
        assert cached(ask("key-a").usage) > 0
        assert cached(ask("key-b").usage) == 0, "tenants never share"
        for key in ("wrong", "key-", "key-a "):
            if key.strip() != "key-a":
                with pytest.raises(openai.AuthenticationError):
                    ask(key)


def test_every_answer_has_the_id_of_its_request(client):
    for ask in (complete, chat):
        answer = ask(client)
        assert answer._request_id == answer.id
        stream = ask(client, stream=True)
        assert {chunk.id for chunk in stream} == {stream.response.headers["x-request-id"]}


def test_where_tokens_begin_in_a_text():
    """Special tokens are not in it; a character of several tokens is one."""
    said = [b"<s>", b"a", b"\xf0\x9f", b"\x98\x80", b"b", b"<end>", b"\xff", b"c"]
    tokenizer = SimpleNamespace(token_bytes=said.__getitem__, token_text=lambda i: said[i].decode("utf-8", "replace"))
    tokens = [TokenLogprob(i, -1.0) for i in range(len(said))]

    def found(offsets: Offsets, *parts: list[TokenLogprob]) -> list[int]:
        return [place for part in parts for place in Reply("m", tokenizer).logprobs(part, offsets)["text_offset"]]

    whole = [0, 0, 1, 1, 2, 3, 3, 4]
    assert found(Offsets(tokenizer, {0, 5}), tokens) == whole
    for cut in range(len(said)):
        assert found(Offsets(tokenizer, {0, 5}), tokens[:cut], tokens[cut:]) == whole
    assert found(Offsets(tokenizer, frozenset()), tokens) == [0, 3, 4, 4, 5, 6, 11, 12]
    untold = Reply("m", None).logprobs([TokenLogprob(3, -1.0), TokenLogprob(4, -1.0)], Offsets(None, frozenset()))
    assert untold["text_offset"] == [0, 10]
