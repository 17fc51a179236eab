"""Anthropic's Messages API over HTTP, by its own client: a scripted model says what a real one might."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from radixrt.frontend.anthropic.exchange import MessageExchange
from tests.frontend.conftest import serving
from tests.frontend.scripted import Model, scripted

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Of a city", "input_schema": CITY}
TIME = {"name": "time", "input_schema": {"type": "object"}}
TOOLS = [WEATHER, TIME]
PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ROME = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome }"}}\n</tool_call>'
HELLO = [{"role": "user", "content": "hello"}]
EPHEMERAL = {"type": "ephemeral"}


class Speaker:
    """Anthropic's client of a scripted model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.client = anthropic.Anthropic(base_url=model.url, api_key="any", max_retries=0)

    def __enter__(self) -> Speaker:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def ask(self, *texts: str, **fields: Any) -> anthropic.types.Message:
        self.model.says(*texts)
        return self.client.messages.create(**({"model": "m", "max_tokens": 400, "messages": HELLO} | fields))

    def stream(self, *texts: str, **fields: Any) -> list[Any]:
        return list(self.ask(*texts, stream=True, **fields))

    def both(self, *texts: str, **fields: Any) -> anthropic.types.Message:
        """The whole answer, after a look at whether the stream adds up to the same."""
        whole = self.ask(*texts, **fields)
        self.model.says(*texts)
        arguments = {"model": "m", "max_tokens": 400, "messages": HELLO} | fields
        with self.client.messages.stream(**arguments) as stream:
            added = stream.get_final_message()
        assert [_bare(block) for block in added.content] == [_bare(block) for block in whole.content]
        assert (added.stop_reason, added.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
        assert added.usage.output_tokens == whole.usage.output_tokens
        assert total(added.usage) == total(whole.usage)
        return whole

    @property
    def prompt(self) -> Any:
        """The chat that was rendered for the last answer."""
        return self.model.answers[-1][1]


def _bare(block: Any) -> dict:
    return {key: value for key, value in block.to_dict().items() if key not in ("id", "parsed_output")}


def total(usage: Any) -> int:
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


@pytest.fixture(scope="module")
def hermes(tmp_path_factory) -> Iterator[Speaker]:
    with scripted("hermes", tmp_path_factory.mktemp("hermes")) as model, Speaker(model) as speaker:
        yield speaker


@pytest.fixture(scope="module")
def thinking(tmp_path_factory) -> Iterator[Speaker]:
    with scripted("thinking", tmp_path_factory.mktemp("thinking")) as model, Speaker(model) as speaker:
        yield speaker


# ---------------------------------------------------------------- answers


def test_a_text(hermes):
    message = hermes.both("It is sunny.")
    assert [(block.type, block.text) for block in message.content] == [("text", "It is sunny.")]
    assert (message.type, message.role, message.model) == ("message", "assistant", "m")
    assert re.fullmatch("msg_[0-9a-f]{24}", message.id) and message._request_id.startswith("req_")
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    tokenizer = hermes.model.tokenizer
    assert message.usage.output_tokens == len(tokenizer.encode("It is sunny.", False)) + 1
    assert total(message.usage) == len(tokenizer.encode(tokenizer.apply_chat(hermes.prompt), False))


def test_the_events_of_a_stream(thinking):
    events = thinking.stream("<think>\nLet me see.\n</think>\n\nYes. " + PARIS, tools=TOOLS)
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    start = events[0].message
    assert (start.content, start.stop_reason, start.usage.output_tokens) == ([], None, 0)
    assert total(start.usage) == total(events[-2].usage)
    middle = events[1:-2]
    blocks: list[list[Any]] = []
    for event in middle:
        if event.type == "content_block_start":
            blocks.append([])
        assert event.index == len(blocks) - 1
        blocks[-1].append(event)
    expected = [("thinking", {"thinking_delta", "signature_delta"}), ("text", {"text_delta"}),
                ("tool_use", {"input_json_delta"})]  # fmt: skip
    for (first, *deltas, last), (kind, types) in zip(blocks, expected, strict=True):
        assert (first.content_block.type, last.type) == (kind, "content_block_stop")
        assert {event.delta.type for event in deltas} == types
    signatures = [event for event in blocks[0] if event.type == "content_block_delta"][-1]
    assert signatures.delta.type == "signature_delta" and signatures.delta.signature
    arguments = "".join(event.delta.partial_json for event in blocks[2][1:-1])
    assert json.loads(arguments) == {"city": "Paris"} and len(blocks[2]) > 4, "they come in pieces"
    assert blocks[2][0].content_block.input == {}
    assert events[-2].delta.stop_reason == "tool_use" and events[-2].usage.output_tokens > 10


def test_a_stream_as_bytes(hermes):
    """The client forgives much: the names of events and pings are looked at here."""
    hermes.model.says("Yes.")
    body = {"model": "m", "max_tokens": 9, "messages": HELLO, "stream": True}
    answer = httpx.post(hermes.model.url + "/v1/messages", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream") and answer.headers["request-id"]
    parts = [part.split("\n") for part in answer.text.strip().split("\n\n")]
    for name, data in parts:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    names = [name.removeprefix("event: ") for name, _ in parts]
    assert names[:2] == ["message_start", "ping"] and names[-1] == "message_stop"


def test_no_more_room_within_the_front_ends_own_length(tmp_path):
    """Which is not as many tokens as were asked for, whoever has set the limit."""
    with scripted("hermes", tmp_path, max_model_len=40) as model, Speaker(model) as speaker:
        size = total(speaker.ask("Hi.").usage)
        message = speaker.both("It is sunny in Paris, and it is sunny in Rome.")
        assert (message.stop_reason, message.usage.output_tokens) == ("model_context_window_exceeded", 40 - size)
        assert speaker.both("It is sunny in Paris.", max_tokens=3).stop_reason == "max_tokens"


def test_max_tokens(hermes):
    message = hermes.both("It is sunny in Paris.", max_tokens=3)
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)
    assert "It is sunny in Paris.".startswith(message.content[0].text)


def test_stop_sequences(hermes):
    message = hermes.both("one two three four", stop_sequences=["three", "never"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "three")
    assert message.content[0].text == "one two "
    cut = hermes.both(f"Wait. {PARIS} more", tools=TOOLS, stop_sequences=["more"])
    assert (cut.stop_reason, cut.content[-1].type) == ("stop_sequence", "tool_use")


def test_an_answer_that_says_nothing(hermes):
    message = hermes.both("")
    assert (message.content, message.stop_reason) == ([], "end_turn") or message.content


def test_parallel_tools_and_their_results(hermes):
    message = hermes.both(f"One moment.\n{PARIS}\n{ROME}", tools=TOOLS)
    text, paris, rome = message.content
    assert text.text == "One moment." and message.stop_reason == "tool_use"
    assert [(c.type, c.name, c.input) for c in (paris, rome)] == [
        ("tool_use", "weather", {"city": "Paris"}),
        ("tool_use", "weather", {"city": "Rome }"}),
    ]
    assert paris.id.startswith("toolu_") and paris.id != rome.id
    results = [
        {"type": "tool_result", "tool_use_id": paris.id, "content": "sunny"},
        {"type": "tool_result", "tool_use_id": rome.id, "is_error": True,
         "content": [{"type": "text", "text": "no such city"}]},
        {"type": "text", "text": "Well?"},
    ]  # fmt: skip
    turns = [*HELLO, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    answer = hermes.ask("It is sunny in Paris.", tools=TOOLS, messages=turns)
    assert answer.content[0].text == "It is sunny in Paris."
    rendered = hermes.prompt.messages
    assert [m["role"] for m in rendered] == ["user", "assistant", "tool", "tool", "user"]
    ids = [call["id"] for call in rendered[1]["tool_calls"]]
    assert rendered[1]["content"] == "One moment." and all(i.startswith("call_") for i in ids)
    assert [m["tool_call_id"] for m in rendered[2:4]] == ids
    assert [m["content"] for m in rendered[2:]] == ["sunny", "Error: no such city", "Well?"]
    assert answer.usage.cache_read_input_tokens > message.usage.input_tokens / 2


def test_an_answer_comes_back_as_the_session_knows_it(thinking):
    """The history of the next turn is the message that `on_answer` was told of."""
    message = thinking.ask(f"<think>\nHm\n</think>\n\nLet me look. {PARIS}", tools=TOOLS)
    told = thinking.model.answers[0][2]
    result = {"type": "tool_result", "tool_use_id": message.content[-1].id, "content": "sunny"}
    redacted = {"type": "redacted_thinking", "data": "xyz"}
    turns = [*HELLO, {"role": "assistant", "content": [redacted, *message.content]},
             {"role": "user", "content": [result]}]  # fmt: skip
    thinking.ask("Sunny.", tools=TOOLS, messages=turns)
    assert thinking.prompt.messages[1] == told
    assert told["reasoning_content"] == "Hm"


def test_one_call_where_they_are_not_parallel(hermes):
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = hermes.both(f"{PARIS}\n{ROME}", tools=TOOLS, tool_choice=choice)
    assert [block.type for block in message.content] == ["tool_use"] and message.stop_reason == "tool_use"


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any"}, ["weather", "time"]), ({"type": "tool", "name": "time"}, ["time"])],
)
def test_forced_calls(hermes, choice, names):
    pytest.importorskip("xgrammar")
    text = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    message = hermes.both(text, tools=TOOLS, tool_choice=choice)
    assert [(b.type, b.name, b.input) for b in message.content] == [("tool_use", "time", {})]
    tags = hermes.model.grammar[1]["format"]["tags"]
    assert [json.loads(tag["begin"].split("\n")[1] + "{}}")["name"] for tag in tags] == names


def test_no_calls(hermes):
    message = hermes.both(PARIS, tools=TOOLS, tool_choice={"type": "none"})
    assert message.content[0].text == PARIS and hermes.prompt.tools is None


def test_a_call_cut_for_length(hermes):
    size = len(hermes.model.tokenizer.encode(PARIS, False)) - 16
    message = hermes.ask(PARIS, tools=TOOLS, max_tokens=size)
    (call,) = message.content
    assert message.stop_reason == "max_tokens" and '{"city": "Paris"}'.startswith(call.input["INVALID_JSON"])
    events = hermes.stream(PARIS, tools=TOOLS, max_tokens=size)
    assert events[-2].delta.stop_reason == "max_tokens"
    turns = [*HELLO, {"role": "assistant", "content": [call]},
             {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id}]}]  # fmt: skip
    hermes.ask("Well.", tools=TOOLS, messages=turns)
    told = hermes.prompt.messages
    assert told[1]["tool_calls"][0]["function"]["arguments"] == call.input["INVALID_JSON"]
    assert told[2]["content"] == ""


def test_mistral_ids_lead_back(tmp_path):
    with scripted("mistral", tmp_path) as model:
        mistral = Speaker(model)
        message = mistral.both('[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Paris"}}]', tools=TOOLS)
        (call,) = message.content
        assert re.fullmatch("toolu_[0-9A-Za-z]{9}", call.id)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        turns = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        assert mistral.ask("Sunny.", tools=TOOLS, messages=turns).content[0].text == "Sunny."


def test_thinking(thinking):
    thoughts, text = thinking.both("<think>\nLet me see.\n</think>\n\nYes.").content
    assert (thoughts.type, thoughts.thinking, text.text) == ("thinking", "Let me see.", "Yes.")
    assert thoughts.signature
    assert thinking.prompt.template_args["enable_thinking"] is False
    for told in ({"type": "enabled", "budget_tokens": 2000}, {"type": "adaptive"}):
        thinking.ask("Yes.", thinking=told)
        assert thinking.prompt.template_args["enable_thinking"] is True
    thinking.ask("Yes.", thinking={"type": "disabled"})
    assert thinking.prompt.template_args["enable_thinking"] is False


def test_effort_is_for_the_template(thinking):
    config = {"effort": "high"}
    thinking.ask("Yes.", output_config=config, thinking={"type": "adaptive"})
    assert thinking.prompt.template_args == {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
    thinking.ask("Yes.", output_config=config, extra_body={"chat_template_kwargs": {"reasoning_effort": "low"}})
    told = {"enable_thinking": False, "thinking": False, "reasoning_effort": "low"}
    assert thinking.prompt.template_args == told


def test_system_blocks_and_a_prefilled_answer(hermes):
    system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    turns = [*HELLO, {"role": "user", "content": [{"type": "text", "text": "again"}]},
             {"role": "assistant", "content": "The answer is"}]  # fmt: skip
    answer = hermes.both(" four", system=system, messages=turns)
    assert answer.content[0].text == " four"
    text = hermes.model.tokenizer.apply_chat(hermes.prompt)
    assert "system\nBe brief.\nBe kind.<" in text and "user\nhello\nagain<" in text, "neighbours are one"
    assert text.endswith("<|im_start|>assistant\nThe answer is")
    hermes.ask("x", system="Be brief.", messages=[*HELLO, {"role": "assistant", "content": []}])
    assert [m["role"] for m in hermes.prompt.messages] == ["system", "user"]


def test_an_answer_without_content_is_sent_back(hermes):
    """As clients do with what they got; Anthropic's API refuses that."""
    first = hermes.ask("")
    assert first.content == [] and first.stop_reason == "end_turn"
    for content in ([], "", [{"type": "text", "text": ""}]):
        again = hermes.ask("Yes.", messages=[*HELLO, {"role": "assistant", "content": content}, *HELLO])
        assert again.content[0].text == "Yes."
        assert [(m["role"], m["content"]) for m in hermes.prompt.messages] == [
            ("user", "hello"), ("assistant", ""), ("user", "hello"),
        ]  # fmt: skip
        assert again.usage.cache_read_input_tokens >= first.usage.cache_read_input_tokens + first.usage.input_tokens


DOCUMENT = {
    "type": "document",
    "title": "Rivers",
    "source": {"type": "text", "media_type": "text/plain", "data": "The Po."},
}
CUT = {
    "type": "document",
    "source": {"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
}
FOUND = {
    "type": "search_result",
    "source": "https://x.org",
    "title": "Po",
    "content": [{"type": "text", "text": "650 km"}],
}


def test_documents_that_are_text_are_read(hermes):
    """In what a user says, and in what a tool gives."""
    said = [DOCUMENT | {"cache_control": {"type": "ephemeral"}}, CUT, FOUND, {"type": "text", "text": "How long?"}]
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [FOUND]}
    turns = [("user", said), ("assistant", [call]), ("user", [result])]
    hermes.ask("Long.", messages=[{"role": role, "content": content} for role, content in turns], tools=TOOLS)
    user, _, tool = hermes.prompt.messages
    assert [part["text"] for part in user["content"]] == [
        "Rivers\nThe Po.", "a\nb", "Po\nhttps://x.org\n650 km", "How long?"
    ]  # fmt: skip
    assert tool["content"] == "Po\nhttps://x.org\n650 km"


def test_sampling_arrives(hermes):
    extra = {"metadata": {"user_id": "u"}, "service_tier": "auto"}
    hermes.ask("Yes.", extra_body={"temperature": 0.3, "top_p": 0.8, "top_k": 7}, **extra)
    (sampling,) = hermes.model.script.samplings
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.3, 0.8, 7, 400)


def test_structured_output(hermes):
    pytest.importorskip("xgrammar")
    form = {"type": "json_schema", "schema": CITY}
    message = hermes.both('{"city": "Paris"}', output_config={"format": form})
    assert json.loads(message.content[0].text) == {"city": "Paris"}
    assert hermes.model.grammar == ("json_schema", CITY)


# ---------------------------------------------------------------- usage and counting


def test_count_tokens(hermes):
    fields = {"system": "Be brief.", "tools": TOOLS, "messages": HELLO, "model": "m"}
    counted = hermes.client.messages.count_tokens(**fields)
    assert counted.input_tokens == total(hermes.ask("Yes.", **fields).usage)
    less = hermes.client.messages.count_tokens(model="m", messages=HELLO)
    assert 0 < less.input_tokens < counted.input_tokens
    with pytest.raises(anthropic.BadRequestError, match="messages.0.role"):
        hermes.client.messages.count_tokens(model="m", messages=[{"role": "wizard", "content": "x"}])


def words(count: int, what: str) -> str:
    return " ".join(f"{what}{i}" for i in range(count))


def test_usage_without_breakpoints(hermes):
    turns = [{"role": "user", "content": words(50, "plain")}]
    first, again = (hermes.both("Yes.", messages=turns) for _ in range(2))
    usage = again.usage
    assert first.usage.cache_creation_input_tokens == usage.cache_creation_input_tokens == 0
    assert usage.input_tokens == 1, "the last token is always computed"
    assert usage.cache_read_input_tokens == total(first.usage) - 1


@pytest.mark.parametrize("stream", [False, True])
def test_usage_with_breakpoints(hermes, stream):
    """Created is what is new up to the last breakpoint, by the time it is kept; read is what was there; the rest is
    input."""
    what = f"w{stream}"
    hour = EPHEMERAL | {"ttl": "1h"}
    system = [{"type": "text", "text": words(40, "s" + what), "cache_control": hour}]
    turn = {"type": "text", "text": words(30, "t" + what), "cache_control": EPHEMERAL}

    def usage(*more: str) -> Any:
        turns = [{"role": "user", "content": [turn, *({"type": "text", "text": text} for text in more)]}]
        if stream:
            return hermes.stream("Yes.", system=system, messages=turns)[-2].usage
        return hermes.ask("Yes.", system=system, messages=turns).usage

    tokenizer = hermes.model.tokenizer
    upto_system = len(tokenizer.encode(f"<|im_start|>system\n{system[0]['text']}", False))
    upto_turn = len(tokenizer.encode(f"<|im_start|>system\n{system[0]['text']}<|im_end|>\n"
                                     f"<|im_start|>user\n{turn['text']}", False))  # fmt: skip
    shared = len(tokenizer.encode("<|im_start|>system\n", False)) + 3
    cold = usage(words(20, "u"))
    read = cold.cache_read_input_tokens
    assert read <= shared and cold.cache_creation_input_tokens == upto_turn - read
    if not stream:
        created = cold.cache_creation
        assert (created.ephemeral_1h_input_tokens, created.ephemeral_5m_input_tokens) == (
            upto_system - read,
            upto_turn - upto_system,
        )
    warm = usage(words(20, "v"))
    assert warm.cache_creation_input_tokens == 0
    assert upto_turn <= warm.cache_read_input_tokens <= upto_turn + 3
    assert total(warm) == total(cold), "as many words follow"


def test_breakpoints_of_tools_and_results(hermes):
    """The request carries where each ends, in tokens: seen by decoding the prompt up to there."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "time", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "noon", "cache_control": EPHEMERAL}
    turns = [*HELLO, {"role": "assistant", "content": [call | {"cache_control": EPHEMERAL}]},
             {"role": "user", "content": [result, {"type": "text", "text": "so"}]}]  # fmt: skip
    tools = [WEATHER | {"cache_control": EPHEMERAL}, TIME]
    control = {"cache_control": EPHEMERAL | {"ttl": "1h"}}
    hermes.ask("Yes.", tools=tools, messages=turns, extra_body=control)
    request = hermes.model.answers[0][0]
    ids = memoryview(request.prompt.ids).cast("i").tolist()
    ends = [hermes.model.tokenizer.decode(ids[:tokens], False)[-24:] for tokens, _ in request.pin]
    assert '"required": ["city"]' in ends[0] and '"arguments": {' in ends[1]
    assert ends[2].endswith("tool\nnoon") and ends[3].endswith("user\nso")
    assert [seconds for _, seconds in request.pin] == [300.0, 300.0, 300.0, 3600.0]


def test_a_breakpoint_that_the_template_leaves_out_is_none(hermes):
    left_out = {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm", "signature": "x"}]}
    hermes.ask("Yes.", messages=[*HELLO, left_out, *HELLO])
    tool = WEATHER | {"cache_control": EPHEMERAL}
    usage = hermes.ask("Yes.", tools=[tool], tool_choice={"type": "none"}).usage
    assert usage.cache_creation_input_tokens == 0 and hermes.model.answers[0][0].pin == []


# ---------------------------------------------------------------- refusals


def turns(*content: Any) -> dict:
    return {"messages": [{"role": "user", "content": list(content)}]}


def called(*after: Any, **fields: Any) -> dict:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}} | fields
    return {"messages": [*HELLO, {"role": "assistant", "content": [call]}, *after]}


def results(*ids: str, **fields: Any) -> dict:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": i} | fields for i in ids]}


@pytest.mark.parametrize("given", [None, '{"city": "Par', ["Paris"], "absent"])
def test_input_of_a_call_may_be_anything(hermes, given):
    """As an agent keeps it of a call that was cut."""
    history = called(results("a", content="sunny"), input=given)
    if given == "absent":
        del history["messages"][1]["content"][0]["input"]
    assert hermes.ask("It is sunny.", **history).content[0].text == "It is sunny."
    shown = hermes.model.tokenizer.apply_chat(hermes.model.answers[0][1])
    assert "sunny" in shown and ("Par" in shown or "Par" not in str(given))


def test_instructions_after_the_first_question_reach_the_prompt(hermes):
    """As Claude Code sends them: in a turn of their own, which stays where it is."""
    told = {"role": "system", "content": "Skills: none."}
    history = [*HELLO, told]
    first = hermes.ask("Yes.", system="Be kind.", messages=history, tools=[TIME, {"name": "f"}])
    shown = hermes.model.tokenizer.apply_chat(hermes.model.answers[0][1])
    assert shown.index("Be kind.") < shown.index(HELLO[0]["content"]) < shown.index("Skills: none.")
    answer = {"role": "assistant", "content": first.content}
    again = hermes.ask("So.", system="Be kind.", messages=[*history, answer, *HELLO], tools=[TIME, {"name": "f"}])
    before = first.usage.input_tokens + (first.usage.cache_read_input_tokens or 0)
    assert again.usage.cache_read_input_tokens >= before


TEXT = {"type": "text", "text": "x"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "text"}}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}
NO_IMAGE = {"type": "text", "text": "[image: this model reads text only]"}
NO_PDF = {"type": "text", "text": "[document: this model reads text only]"}


@pytest.mark.parametrize(
    ("added", "shown"),
    [
        ([results("a", content=[IMAGE])], [NO_IMAGE["text"]]),
        ([results("a", content=[TEXT, IMAGE])], [[TEXT, NO_IMAGE]]),
        ([results("a", content=[IMAGE], is_error=True)], ["Error: " + NO_IMAGE["text"]]),
        ([results("a", content=[{"type": "search_result", "content": [TEXT, IMAGE]}])], ["x\n" + NO_IMAGE["text"]]),
        ([{"role": "user", "content": [*results("a")["content"], PDF]}], ["", NO_PDF["text"]]),
        ([results("a"), {"role": "user", "content": [TEXT, PDF]}], ["", [TEXT, NO_PDF]]),
        ([results("a"), *turns(IMAGE)["messages"], *turns(TEXT)["messages"]], ["", [NO_IMAGE, TEXT]]),
    ],
)  # fmt: skip
def test_images_that_a_tool_has_read_are_named_in_their_place(hermes, added, shown):
    """Those of a message that is answered, or not the newest, as well: the session goes on."""
    before = [*turns(TEXT, IMAGE)["messages"], *called()["messages"][1:], *added]
    first = hermes.ask("So it is.", tools=TOOLS, messages=before)
    rendered = hermes.prompt.messages
    assert [rendered[0]["content"], *(message["content"] for message in rendered[2:])] == [[TEXT, NO_IMAGE], *shown]
    following = [*before, {"role": "assistant", "content": first.content}, *HELLO]
    usage = hermes.ask("Yes.", tools=TOOLS, messages=following).usage
    assert usage.cache_read_input_tokens >= total(first.usage) + first.usage.output_tokens - 1


def test_a_header_of_claude_code_is_no_part_of_the_prompt(hermes):
    """Its hash changes with each request: without it the prompt is the same, and all of it hits."""
    told, more = "You are an agent. " * 9, {"type": "text", "text": "Be kind.", "cache_control": EPHEMERAL}

    def usage(*systems: Any) -> list[anthropic.types.Usage]:
        return [hermes.ask("Yes.", system=system).usage for system in systems]

    def header(number: int) -> str:
        return f"x-anthropic-billing-header: cc_version=2.1.{number}; cc_entrypoint=cli; cch={number};"

    def in_blocks(number: int) -> list[dict[str, Any]]:
        return [{"type": "text", "text": text} for text in (header(number), told)] + [more]

    for systems, bare in (
        ([in_blocks(n) for n in (1, 2)], in_blocks(0)[1:]),
        ([f"{header(n)}\n\n{told}" for n in (1, 2)], told),
        ([in_blocks(n)[:1] for n in (1, 2)], []),
    ):
        first, *others = usage(*systems, bare)
        for other in others:
            assert other.cache_read_input_tokens == total(other) - 1 == total(first) - 1
    hermes.ask("Yes.", system=f"See {header(1)}")
    assert hermes.prompt.messages[0]["content"] == f"See {header(1)}"


BAD = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"extra_body": {"max_tokens": "many"}}, "max_tokens"),
    ({"extra_body": {"temperature": -1}}, "temperature"),
    ({"extra_body": {"top_p": 1.5}}, "top_p"),
    ({"extra_body": {"top_k": -7}}, "top_k"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"metadata": {"user_id": 3}}, "metadata.user_id"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "user", "content": "x " * 9000}]}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": []}, *HELLO]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages.0.content"),
    ({"messages": [*HELLO, {"role": "assistant", "content": "x "}]}, "messages"),
    (turns("x"), "messages.0.content.0"),
    (turns(TEXT, {"type": "text"}), "messages.0.content.1.text"),
    (turns(TEXT, IMAGE), "messages.0.content.1.type"),
    (turns({"type": "document", "source": {}}), "messages.0.content.0.type"),
    (turns({"type": "document", "source": {"type": "url", "url": "x"}}), "messages.0.content.0.type"),
    (turns({"type": "document", "source": {"type": "text", "data": 3}}), "messages.0.content.0.source.data"),
    (turns({"type": "search_result", "content": [IMAGE]}), "messages.0.content.0.content.0.type"),
    (turns({"type": "server_tool_use"}), "messages.0.content.0.type"),
    (turns({"type": "thinking", "thinking": "x", "signature": ""}), "messages.0.content.0.type"),
    ({"messages": [results("a")]}, "messages.0.content.0.tool_use_id"),
    (called(), "messages.1"),
    (called(*HELLO), "messages.1"),
    (called(results("b")), "messages.2.content.0.tool_use_id"),
    (called(results("a", "a")), "messages.2.content.1.tool_use_id"),
    (called(results("a", is_error="yes")), "messages.2.content.0.is_error"),
    (called(results("a"), name=None), "messages.1.content.0.name"),
    (called(results("a"), {"role": "assistant", "content": "x"}, *turns(IMAGE)["messages"]),
     "messages.4.content.0.type"),
    ({"messages": [*turns(IMAGE)["messages"], {"role": "assistant", "content": "It is"}]}, "messages.0.content.0.type"),
    ({"system": [IMAGE]}, "system.0.type"),
    ({"messages": [{"role": "system", "content": [IMAGE]}, *HELLO]}, "messages.0.content.0.type"),
    ({"system": 3}, "system"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
    ({"tools": [TIME, {"name": "f", "input_schema": 3}]}, "tools.1.input_schema"),
    ({"tools": [{"input_schema": {}}]}, "tools.0.name"),
    ({"tools": [TIME, TIME]}, "tools.1.name"),
    ({"tools": [{"name": "f", "input_schema": SCHEMA, "strict": True}]}, "tools.0.input_schema.properties.a.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "required"}}, "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"thinking": {"type": "deep"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"output_config": {"effort": "little"}}, "output_config.effort"),
    (turns(TEXT | {"cache_control": {"type": "forever"}}), "messages.0.content.0.cache_control.type"),
    (turns(TEXT | {"cache_control": EPHEMERAL | {"ttl": "2h"}}), "messages.0.content.0.cache_control.ttl"),
    (turns(TEXT | {"cache_control": EPHEMERAL | {"ttl": ["5m"]}}), "messages.0.content.0.cache_control.ttl"),
    (turns(*[TEXT | {"cache_control": EPHEMERAL}] * 5), "cache_control"),
    ({"extra_body": {"mcp_servers": [{}]}}, "mcp_servers"),
    ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "field"), BAD, ids=[f"{field}-{i}" for i, (_, field) in enumerate(BAD)])
def test_refusals_name_the_field(hermes, fields, field):
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError) as caught:
            hermes.ask("never", stream=stream, **fields)
        body = caught.value.body
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
        assert body["error"]["message"].startswith(field + ":"), body
        assert body["request_id"] == caught.value.response.headers["request-id"]


def test_a_missing_field_and_no_json(hermes):
    url = hermes.model.url + "/v1/messages"
    for content, said in ((b'{"model": "m", "messages": []}', "max_tokens"), (b"{", "JSON")):
        answer = httpx.post(url, content=content)
        assert answer.status_code == 400 and said in answer.json()["error"]["message"]
    lost = httpx.post(url + "/nowhere", json={})
    assert (lost.status_code, lost.json()["error"]["type"]) == (404, "not_found_error")
    assert httpx.get(url).json()["error"]["type"] == "invalid_request_error"


def test_other_statuses(hermes):
    with pytest.raises(anthropic.NotFoundError) as caught:
        hermes.ask("never", model="claude-9")
    assert caught.value.body["error"]["type"] == "not_found_error"
    assert "claude-9" in caught.value.body["error"]["message"]


def test_a_schema_that_cannot_be_compiled(hermes):
    pytest.importorskip("xgrammar")
    broken = {"name": "f", "input_schema": {"properties": {"a": {"$ref": "#/nowhere"}}}, "strict": True}
    with pytest.raises(anthropic.BadRequestError, match="tools.1.input_schema: "):
        hermes.ask("never", tools=[TIME, broken])


def test_keys(folder):
    with serving(folder, api_key=("a:key-a",), workers=1) as frontend:
        for fields in ({"api_key": "key-a"}, {"auth_token": "key-a", "api_key": None}):
            with anthropic.Anthropic(base_url=frontend.url, max_retries=0, **fields) as client:
                assert client.messages.create(model="m", max_tokens=2, messages=HELLO).usage.output_tokens
        with anthropic.Anthropic(base_url=frontend.url, max_retries=0, api_key="key-b") as client:
            for ask in (client.messages.create, client.messages.stream):
                with pytest.raises(anthropic.AuthenticationError) as caught:
                    with ask(model="m", max_tokens=2, messages=HELLO):
                        pass
                assert caught.value.body["error"]["type"] == "authentication_error"


def test_an_error_in_the_middle_of_a_stream(hermes, monkeypatch):
    """It is an event, the last one; the client raises it."""
    from radixrt.messages import Error

    take = MessageExchange._take
    taken = []

    def failing(self, first, on_answer, answer):
        taken.append(answer)
        take(self, first, on_answer, Error(0, 503, "the worker was lost") if len(taken) == 4 else answer)

    monkeypatch.setattr(MessageExchange, "_take", failing)
    seen = []
    with pytest.raises(anthropic.APIStatusError) as caught:
        for event in hermes.ask(10 * "It is a sunny day in Paris, and warm. ", stream=True):
            seen.append(event.type)
    assert caught.value.body["error"] == {"type": "overloaded_error", "message": "the worker was lost"}
    assert seen[0] == "message_start" and "content_block_delta" in seen and "message_stop" not in seen
    taken.clear()
    monkeypatch.undo()
    assert hermes.ask("Well.").content[0].text == "Well."
