"""Sessions over HTTP and ZMQ: what a client sends back as text hits to the last token that was computed."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Iterator
from typing import Any

import anthropic
import numpy as np
import pytest

from radixrt.client import Client, token_bytes
from radixrt.config import FrontendConfig, RouterConfig
from radixrt.messages import ChatPrompt, DropReason
from radixrt.tokens import Encoded, TextService, load_tokenizer
from radixrt.tokens.chat_history import Conversations, facts
from radixrt.tokens.spelling import Dropped
from tests.frontend.scripted import FAMILIES, HERMES, Model, make_chat, make_family, scripted, scripted_chat

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather",  "arguments": {"city": "Paris", "days": 2.0}}\n</tool_call>'
FORGETS = HERMES.replace("{{ m.content or '' }}", "{{ (m.content or '').split('</think>')[-1].strip() }}")
"""A template that drops thinking, and white space around answers."""


def odd(model: Model, text: str) -> list[int]:
    """Ids of a text that no encoding of it gives."""
    ids = [i for at in range(0, len(text), 3) for i in model.tokenizer.encode_continuation(text[at : at + 3])]
    assert len(text) < 16 or ids != model.tokenizer.encode_continuation(text)
    return ids


def ask(model: Model, messages: list[dict[str, Any]], *texts: str, key: str = "any", **fields: Any) -> Any:
    """The answer when the model writes `texts` in odd tokens."""
    model.script.texts = deque(odd(model, text) for text in texts)
    client = model.client.with_options(api_key=key)
    return client.chat.completions.create(model="m", messages=messages, **fields)


def sequences(model: Model) -> list[np.ndarray]:
    """Prompt and answer of all choices since the start, in order, less their last token, which was not computed."""
    return [
        np.concatenate([np.frombuffer(request.prompt.ids, "<i4"), np.array(ids[:-1], "<i4")])
        for request, _, _, ids in model.answers
    ]


def common(one: np.ndarray, other: np.ndarray) -> int:
    size = min(len(one), len(other))
    differ = np.flatnonzero(one[:size] != other[:size])
    return int(differ[0]) if differ.size else size


def cached(answer: Any) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def hermes(tmp_path_factory) -> Iterator[Model]:
    with scripted("hermes", tmp_path_factory.mktemp("hermes"), api_key=("a:key-a", "b:key-b")) as model:
        model.client.api_key = "key-a"
        yield model


@pytest.fixture(scope="module", params=[False, True], ids=["as the template", "keep_thinking"])
def forgetful(request, tmp_path_factory) -> Iterator[tuple[bool, Model]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FAMILIES, "forgets", (FORGETS, ()))
        with scripted("forgets", tmp_path_factory.mktemp("f"), keep_thinking=request.param,
                      reasoning_parser="deepseek_r1") as model:  # fmt: skip
            yield request.param, model


def echoed(message: Any) -> dict[str, Any]:
    """A message as a client sends it back that has read its arguments and writes them anew."""
    found = message.model_dump(exclude_none=True)
    for call in found.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        assert list(arguments) == ["city", "days"]
        call["function"]["arguments"] = json.dumps({"days": 2, "city": arguments["city"]}, indent=1)
    return found


# ---------------------------------------------------------------- OpenAI's API


@pytest.mark.parametrize("n", [1, 2])
def test_three_turns_with_a_call(hermes, n):
    """Of n answers any may be the one that the conversation goes on with."""
    hermes.answers.clear()
    fields = {"tools": [WEATHER], "key": "key-a", "n": n}
    messages = [user(f"How is Paris? ({n})")]
    texts = [f"Let me see. {CALL}", f"One moment please. {CALL}"][:n]
    first = ask(hermes, messages, *texts, **fields)
    chosen = first.choices[-1].message
    messages += [echoed(chosen), {"role": "tool", "tool_call_id": chosen.tool_calls[0].id, "content": "sunny"}]
    second = ask(hermes, messages, "It is sunny in Paris.", "Sunny, it is, in Paris.", **fields)
    said = {tuple(message["tool_calls"][0]["id"]): i for i, (_, _, message, _) in enumerate(hermes.answers[:n])}
    before = sequences(hermes)[said[tuple(chosen.tool_calls[0].id)]]
    assert cached(second) == len(before) and second.usage.prompt_tokens > len(before)
    assert second.model_extra["radixrt"]["session"]["kept_turns"] == 1
    messages += [echoed(second.choices[-1].message), user("And tomorrow?")]
    third = ask(hermes, messages, "Rain will come.", "Rain, I fear, will come.", **fields)
    content = second.choices[-1].message.content
    before = next(s for s, a in zip(sequences(hermes), hermes.answers, strict=True) if a[2]["content"] == content)
    assert cached(third) == len(before)
    assert third.model_extra["radixrt"]["session"]["kept_turns"] == 2
    assert "dropped" not in third.model_extra["radixrt"]["session"]


def test_streams_are_remembered_and_say_so(hermes):
    hermes.answers.clear()
    messages = [user("Streamed?")]
    assert not hasattr(list(ask(hermes, messages, "Yes, it is.", key="key-a", stream=True))[-1], "session")
    messages += [{"role": "assistant", "content": "Yes, it is."}, user("Sure?")]
    chunks = list(ask(hermes, messages, "Quite.", key="key-a", stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == len(sequences(hermes)[0])
    for chunk in chunks[-2:]:
        assert chunk.model_extra["radixrt"]["session"] == {"kept_turns": 1}


def test_other_keys_and_salts_never_share(hermes):
    messages = [user("Whose?")]
    ask(hermes, messages, "This is mine alone.", key="key-a", extra_body={"cache_salt": "s"})
    messages += [{"role": "assistant", "content": "This is mine alone."}, user("Really?")]
    for key, salt in (("key-b", "s"), ("key-a", ""), ("key-a", "t")):
        answer = ask(hermes, messages, "No.", key=key, extra_body={"cache_salt": salt})
        assert "session" not in answer.model_extra["radixrt"], (key, salt)
    answer = ask(hermes, messages, "Yes.", key="key-a", extra_body={"cache_salt": "s"})
    assert answer.model_extra["radixrt"]["session"] == {"kept_turns": 1}


def test_tenants_and_salts_do_not_run_together(tmp_path):
    with TextService(load_tokenizer(make_family(tmp_path, "hermes"))) as text:
        talks = Conversations(text, FrontendConfig())

        def encode(chat: ChatPrompt, tenant: str, salt: str) -> Encoded:
            return asyncio.run(talks.encode(chat, tenant, salt))

        encoded = encode(ChatPrompt([user("x")]), "a", 'b", "c')
        talks.remember(encoded, {"role": "assistant", "content": "y"}, token_bytes(text.tokenizer.encode("y")))
        chat = ChatPrompt([user("x"), {"role": "assistant", "content": "y"}, user("z")])
        assert encode(chat, "a", 'b", "c').kept_turns == 1
        assert encode(chat, 'a", "b', "c").kept_turns == encode(chat, "ab", '", "c').kept_turns == 0
        encoded = encode(ChatPrompt([user("x")]), "a", "b\nc")
        talks.remember(encoded, {"role": "assistant", "content": "y"}, token_bytes(text.tokenizer.encode("y")))
        assert encode(chat, "a", "b\nc").kept_turns == 1 and encode(chat, "a\nb", "c").kept_turns == 0


def test_answers_cut_at_a_stop_string_are_not_remembered(hermes):
    messages = [user("Count.")]
    answer = ask(hermes, messages, "one then two then three", key="key-a", stop=[" then three"])
    messages += [echoed(answer.choices[0].message), user("Go on.")]
    again = ask(hermes, messages, "five", key="key-a")
    assert answer.choices[0].message.content == "one then two" and "session" not in again.model_extra["radixrt"]


def test_a_template_that_drops_thinking(forgetful):
    """Without keep_thinking the hit ends where the template leaves something out, and the reply says so."""
    keeps, model = forgetful
    model.answers.clear()
    messages = [user("Think.")]
    first = ask(model, messages, "<think>\nHm, hm, hm.\n</think>\n\nI have thought about it.").choices[0].message
    assert first.reasoning_content == "Hm, hm, hm."
    messages += [{"role": "assistant", "content": first.content}, user("And now?")]
    second = ask(model, messages, "Nothing more.")
    whole = sequences(model)[0]
    session = second.model_extra["radixrt"]["session"]
    if keeps:
        assert cached(second) == len(whole) and session["kept_turns"] == 1
        assert session["respelled"] == ["message 1: its thinking is kept, which the template drops"]
    else:
        prompt = len(model.answers[0][0].prompt.ids) // 4
        assert cached(second) <= prompt < len(whole)
        assert session == {"kept_turns": 0, "dropped": ["message 1: the template drops its thinking"]}


def test_thinking_that_was_left_out_of_the_answer_is_kept_all_the_same(forgetful):
    keeps, model = forgetful
    model.answers.clear()
    messages = [user("Think again.")]
    first = (
        ask(model, messages, "<think>\nHm, hm.\n</think>\n\nDone.", extra_body={"include_reasoning": False})
        .choices[0]
        .message
    )
    assert not hasattr(first, "reasoning_content")
    messages += [echoed(first), user("And now?")]
    second = ask(model, messages, "Nothing more.")
    assert second.model_extra["radixrt"]["session"]["kept_turns"] == keeps
    if keeps:
        assert cached(second) == len(sequences(model)[0])


def test_the_report_and_the_metrics_sum_up(forgetful):
    keeps, model = forgetful
    ask(model, [user("Sum.")], "<think>\nHm.\n</think>\n\nI sum up.")
    turns = [user("Sum."), {"role": "assistant", "content": "I sum up."}, user("Yes?")]

    def sums() -> dict[str, Any]:
        return model.client.get("/report", cast_to=object)["sessions"]

    before = sums()
    ask(model, turns, "Yes.")
    after = sums()
    assert after["kept_turns"] - before["kept_turns"] == after["respelled_turns"] - before["respelled_turns"] == keeps
    dropped = [found["dropped_turns"].get("thinking", 0) for found in (before, after)]
    assert dropped[1] - dropped[0] == (not keeps)
    metrics = model.client._client.get(model.url + "/metrics").text
    assert f'radixrt_session_kept_turns_total{{tenant="default"}} {after["kept_turns"]}.0' in metrics
    if not keeps:
        line = f'radixrt_session_dropped_turns_total{{cause="thinking",tenant="default"}} {dropped[1]}.0'
        assert line in metrics


def test_dropped_answers_are_counted_by_reason_whatever_their_notes_say():
    dropped = tuple(Dropped(i, reason, "the template drops its thinking") for i, reason in enumerate(DropReason))
    found = facts(Encoded(b"", "", 2, ("message 1: x",), dropped))
    assert (found.kept, found.respelled) == (2, 1)
    assert found.dropped == {"thinking": 1, "opening": 1, "rewritten": 1, "not_found": 1}


def test_sessions_turned_off(tmp_path):
    with scripted("hermes", tmp_path, session_tokens=0) as model:
        ask(model, [user("Off?")], "Yes, they are off.")
        turns = [user("Off?"), {"role": "assistant", "content": "Yes, they are off."}, user("Sure?")]
        answer = ask(model, turns, "Sure.")
        assert "session" not in answer.model_extra["radixrt"] and cached(answer) < len(sequences(model)[0])


# ---------------------------------------------------------------- the other ways in


def test_anthropic(hermes):
    hermes.answers.clear()
    tools = [{"name": "weather", "input_schema": {"type": "object"}}]
    messages: list[Any] = [user("How is Rome?")]
    with anthropic.Anthropic(base_url=hermes.url, api_key="key-a", max_retries=0) as client:
        fields = {"model": "m", "max_tokens": 200, "tools": tools}
        hermes.script.texts = deque([odd(hermes, f"Let me see. {CALL}")])
        first = client.messages.create(messages=messages, **fields)
        result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "sunny"}
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        hermes.script.texts = deque([odd(hermes, "It is sunny.")])
        second = client.messages.create(messages=messages, **fields)
        counted = client.messages.count_tokens(model="m", messages=messages, tools=tools)
    assert second.usage.cache_read_input_tokens == len(sequences(hermes)[0])
    assert second.model_extra["radixrt"]["session"]["kept_turns"] == 1
    assert counted.input_tokens == second.usage.input_tokens + second.usage.cache_read_input_tokens


HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
QWEN_CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(("name", "call"), [("Qwen-Qwen3-0.6B", HERMES_CALL), ("Qwen3.5-4B", QWEN_CALL)])
def test_published_templates_over_messages(shared_data, tmp_path, name, call, thinks):
    """Without `thinking` the prompt ends with an empty thought, which the template drops later: nothing is computed
    again. Of white space before a call, the template writes another."""
    folder = make_chat(tmp_path, (shared_data / "chat_templates" / f"{name}.jinja").read_text(), ())
    tools = [{"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}]
    fields: Any = {"model": "m", "max_tokens": 200, "tools": tools}
    thought = ""
    if thinks:
        fields["thinking"] = {"type": "enabled", "budget_tokens": 100}
        thought = "Hm.\n</think>\n\n" if name == "Qwen3.5-4B" else "<think>\nHm.\n</think>\n\n"
    messages: list[Any] = [user("How is Paris?")]
    with (
        scripted_chat(folder) as model,
        anthropic.Anthropic(base_url=model.url, api_key="any", max_retries=0) as client,
    ):
        for text in (f"I look.\n{call}", f"\n{call}", "It is sunny.", "Rain.", "More rain."):
            model.script.texts = deque([odd(model, thought + text)])
            answer = client.messages.create(messages=messages, **fields)
            if len(messages) > 1 and not (thinks and messages[-1] == user("And then?")):
                assert answer.usage.cache_read_input_tokens == len(sequences(model)[-2]), text
            messages.append({"role": "assistant", "content": answer.content})
            called = [part.id for part in answer.content if part.type == "tool_use"]
            results = [{"type": "tool_result", "tool_use_id": id, "content": "sunny"} for id in called]
            messages.append(user(results or "And then?"))
    assert answer.model_extra["radixrt"]["session"]["kept_turns"] == (0 if thinks else 4)


@pytest.mark.parametrize("streams", [False, True])
def test_zmq(hermes, streams):
    with Client(hermes.router, api_key="key-a") as client:
        messages = [user(f"Over ZMQ? {streams}")]
        hermes.script.texts = deque([odd(hermes, "Yes, over ZMQ."), odd(hermes, "And again.")])
        if streams:
            parts = list(client.stream(ChatPrompt(messages)))
            text, first = "".join(part.text for part in parts), parts[-1].usage
        else:
            done = client.generate(ChatPrompt(messages))
            text, first = done.text, done.usage
        assert text == "Yes, over ZMQ."
        messages += [{"role": "assistant", "content": text}, user("Again?")]
        second = client.generate(ChatPrompt(messages)).usage
        assert second.cached_tokens == first.prompt_tokens + first.completion_tokens - 1
        assert RouterConfig().session_tokens == FrontendConfig().session_tokens == 4_000_000
