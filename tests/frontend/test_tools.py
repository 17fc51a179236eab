"""Tools and reasoning over HTTP, by OpenAI's client: a scripted model says what a real one might."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator

import openai
import pytest

from radixrt.config import FrontendConfig
from radixrt.formats.message import AssistantMessage
from radixrt.formats.parsing import CallArguments, CallStart
from radixrt.frontend.http.errors import ApiError
from radixrt.frontend.openai.history import checked_messages
from radixrt.frontend.server import make_server
from radixrt.router.core.ended_runs import EndedRuns
from radixrt.tokens import TextService
from tests.frontend.scripted import Model, gathered, scripted

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]
ALLOWED = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "time"}}]}
STRICT = {"type": "function", "function": WEATHER["function"] | {"strict": True}}

PARIS, ROME = '{"city": "Paris"}', '{"city": "Rome }"}'
CALLS = {
    "hermes": (
        f'One moment.\n<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "weather", "arguments": {ROME}}}\n</tool_call>'
    ),
    "llama": f'{{"name": "weather", "parameters": {PARIS}}}; {{"name": "weather", "parameters": {ROME}}}',
    "mistral": (
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}, {{"name": "weather", "arguments": {ROME}}}]'
    ),
}


ONE_CALL = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>',
    "llama": f'{{"name": "weather", "parameters": {PARIS}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}]',
}


@pytest.fixture(scope="module", params=CALLS)
def family(request, tmp_path_factory) -> Iterator[tuple[str, Model]]:
    with scripted(request.param, tmp_path_factory.mktemp(request.param)) as model:
        yield request.param, model


@pytest.fixture(scope="module")
def hermes(tmp_path_factory) -> Iterator[Model]:
    with scripted("hermes", tmp_path_factory.mktemp("hermes")) as model:
        yield model


@pytest.fixture(scope="module")
def thinking(tmp_path_factory) -> Iterator[Model]:
    with scripted("thinking", tmp_path_factory.mktemp("thinking")) as model:
        yield model


def calls_of(message) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]


# ---------------------------------------------------------------- every family


def test_calls_whole(family):
    name, model = family
    choice = model.chat(CALLS[name], tools=TOOLS).choices[0]
    assert calls_of(choice.message) == [("weather", PARIS), ("weather", ROME)]
    assert choice.message.content == ("One moment." if name == "hermes" else None)
    assert choice.finish_reason == "tool_calls" and not hasattr(choice.message, "reasoning_content")
    form = r"[0-9A-Za-z]{9}" if name == "mistral" else r"call_[0-9a-f]{24}"
    ids = [call.id for call in choice.message.tool_calls]
    assert len(set(ids)) == 2 and all(re.fullmatch(form, i) for i in ids)
    assert all(call.type == "function" for call in choice.message.tool_calls)


def test_calls_streamed(family):
    name, model = family
    messages, ends = gathered(model.chat(CALLS[name], tools=TOOLS, stream=True))
    assert ends == {0: "tool_calls"}
    assert [tuple(call[1:]) for call in messages[0]["tool_calls"]] == [("weather", PARIS), ("weather", ROME)]
    assert messages[0]["content"] == ("One moment." if name == "hermes" else "")
    parts = [c.choices[0].delta for c in model.chat(CALLS[name], tools=TOOLS, stream=True)]
    assert sum(bool(delta.tool_calls) for delta in parts) > 8, "arguments come in pieces"


def test_the_router_is_told_which_tool_is_called(family, monkeypatch):
    name, model = family
    told = threading.Event()
    names = []

    def called(self, client, request_id, index, tool):
        names.append(tool)
        told.set()
        return []

    monkeypatch.setattr(EndedRuns, "called", called)
    model.chat(CALLS[name], tools=TOOLS)
    assert told.wait(10) and names == ["weather"]


def test_the_helper_of_the_client_gathers_them_as_well(family):
    name, model = family
    model.says(CALLS[name])
    with model.client.chat.completions.stream(model="m", messages=[{"role": "user", "content": "x"}], tools=TOOLS) as s:
        choice = s.get_final_completion().choices[0]
    assert calls_of(choice.message) == [("weather", PARIS), ("weather", ROME)]


def test_plain_text_with_tools(family):
    _, model = family
    text = "No tool needed: 1 < 2, [1], {2} \n"
    choice = model.chat(text, tools=TOOLS).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    messages, ends = gathered(model.chat(text, tools=TOOLS, stream=True))
    assert messages[0]["content"] == text and ends == {0: "stop"}


def test_only_one_call_where_they_are_not_parallel(family):
    name, model = family
    for stream in (False, True):
        answer = model.chat(CALLS[name], tools=TOOLS, parallel_tool_calls=False, stream=stream)
        if stream:
            messages, ends = gathered(answer)
            assert len(messages[0]["tool_calls"]) == 1 and ends == {0: "tool_calls"}
        else:
            assert calls_of(answer.choices[0].message) == [("weather", PARIS)]
            assert answer.choices[0].finish_reason == "tool_calls"
            assert answer.usage.completion_tokens < len(model.tokenizer.encode(CALLS[name])) - 5
        assert model.answers == [], "its ids say more than the message"


def test_an_answer_is_a_next_turn_s_history(family):
    name, model = family
    call = CALLS[name].split("; ")[0]
    first = model.chat(call, tools=TOOLS).choices[0].message
    results = [{"role": "tool", "tool_call_id": c.id, "content": "sunny"} for c in first.tool_calls]
    history = [{"role": "user", "content": "hello"}, first.model_dump(exclude_none=True), *results]
    model.chat("It is sunny.", messages=history, tools=TOOLS)
    (_, prompt, message, _) = model.answers[0]
    assert PARIS in model.tokenizer.apply_chat(prompt), "an object in the template, not a string"
    assert prompt.messages[1]["tool_calls"][0]["function"]["arguments"] == PARIS
    assert message == {"role": "assistant", "content": "It is sunny."}


def test_arguments_in_a_history_may_be_an_object(family):
    """As other libraries and data sets have them: the prompt is the same, and so is what the session makes of it."""
    name, model = family
    first = model.chat(CALLS[name].split("; ")[0], tools=TOOLS).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in first.tool_calls]
    found = []
    for form in (str, json.loads):
        said = first.model_dump(exclude_none=True)
        for call in said["tool_calls"]:
            call["function"]["arguments"] = form(call["function"]["arguments"])
        history = [{"role": "user", "content": "hello"}, said, *results]
        found.append(model.chat("It is sunny.", messages=history, tools=TOOLS, extra_body={"return_token_ids": True}))
    assert found[0].prompt_token_ids == found[1].prompt_token_ids
    assert found[0].radixrt["session"] == found[1].radixrt["session"]


BROKEN = ('{"city": "Par', "null", "", None, ["Paris"], 7, "absent")
"""Arguments that models write or clients send, and that are no object."""


def test_arguments_in_a_history_may_be_anything(family):
    """A call that was cut, or one of another server, must not end the session."""
    name, model = family
    results = [{"role": "tool", "tool_call_id": "abcdefghi", "content": "sunny"}]
    for arguments in BROKEN:
        function = {"name": "weather", "arguments": arguments}
        if arguments == "absent":
            del function["arguments"]
        call = {"id": "abcdefghi", "type": "function", "function": function}
        history = [{"role": "user", "content": "hello"}, {"role": "assistant", "tool_calls": [call]}, *results]
        assert model.chat("It is sunny.", messages=history, tools=TOOLS).choices[0].message.content == "It is sunny."
        shown = model.tokenizer.apply_chat(model.answers[0][1])
        assert "sunny" in shown and ("Par" in shown or "Par" not in str(arguments)), name


def calling(arguments: object) -> dict[str, object]:
    """An answer without text that calls a function."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def test_how_arguments_that_are_an_object_are_written():
    """Like those that models write. Decoders allow nearly as much nesting as this does."""
    assert checked_messages([calling({"city": "Zürich", "days": [1]})]) == [calling('{"city": "Zürich", "days": [1]}')]
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ApiError, match="nested too deeply") as caught:
        checked_messages([calling({"city": deep})])
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize("message", [calling("{}"), {"role": "assistant", "content": None, "reasoning_content": "Hm."}])
def test_null_beside_calls_or_thoughts_stays_null(message):
    """Some templates tell null from an empty text."""
    assert checked_messages([message]) == [message]


def test_special_tokens_do_not_show(family):
    name, model = family
    text = "<|endoftext|>Well<|im_start|>, {no} call"
    for stream in (False, True):
        answer = model.chat(text, tools=TOOLS, stream=stream)
        said = gathered(answer)[0][0]["content"] if stream else answer.choices[0].message.content
        assert said == "Well, {no} call"
    marks = {"hermes": "", "llama": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
    assert model.chat(marks[name] + "print(1)", tools=TOOLS).choices[0].message.content == "print(1)"


def test_forced_calls(family):
    """The worker follows the grammar, so that what is scripted passes it, and what the fake draws is a call."""
    name, model = family
    begins = {
        "hermes": '<tool_call>\n{"name": "weather", "arguments": ',
        "llama": '{"name": "weather", "parameters": ',
        "mistral": '{"name": "weather", "arguments": ',
    }
    for choice, stops in (("required", False), ({"type": "function", "function": {"name": "weather"}}, True)):
        text = CALLS[name].removeprefix("One moment.\n") if not stops else ONE_CALL[name]
        found = model.chat(text, tools=TOOLS, tool_choice=choice).choices[0]
        assert calls_of(found.message) == [("weather", PARIS), ("weather", ROME)][: 1 if stops else 2]
        assert (found.finish_reason, found.message.content) == ("tool_calls", None)
        kind, tag = model.grammar
        form = tag["format"]["content"] if name == "mistral" else tag["format"]
        assert kind == "structural_tag" and form["type"] == "tags_with_separator"
        assert form["at_least_one"] is True and form["stop_after_first"] is stops
        assert form["tags"][0]["begin"] == begins[name] and form["tags"][0]["content"]["json_schema"] == CITY
        assert len(form["tags"]) == (1 if stops else 2)
        drawn = model.chat(tools=TOOLS, tool_choice=choice, max_tokens=100).choices[0].message
        assert drawn.content is None and drawn.tool_calls[0].function.name in ("weather", "time")


def test_the_grammar_of_free_calls(family):
    name, model = family
    model.chat(CALLS[name], tools=TOOLS)
    assert model.grammar is None
    loose = {"type": "function", "function": {"name": "loose", "parameters": CITY}}
    found = model.chat(CALLS[name], tools=[STRICT, loose]).choices[0].message
    assert len(found.tool_calls) == 2
    kind, tag = model.grammar
    assert (kind, tag["format"]["type"]) == ("structural_tag", "triggered_tags")
    tags = tag["format"]["tags"][0]["content"]["tags"] if name == "mistral" else tag["format"]["tags"]
    assert [t["content"]["json_schema"] for t in tags] == [CITY, {"type": "object"}]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools(family, mode):
    """The answer may call these alone; the template is shown all, so that the prompt stays what it was."""
    name, model = family
    choice = {"type": "allowed_tools", "allowed_tools": ALLOWED | {"mode": mode}}
    call = ONE_CALL[name].replace("weather", "time")
    found = model.chat(call, tools=TOOLS, tool_choice=choice).choices[0].message
    assert calls_of(found) == [("time", PARIS)]
    prompts = [model.answers[0][0].prompt.ids]
    form = model.grammar[1]["format"]
    if mode == "auto":
        assert form["type"] == "triggered_tags"
    form = form["tags"][0]["content"] if name == "mistral" and mode == "auto" else form
    form = form["content"] if name == "mistral" and mode == "required" else form
    assert len(form["tags"]) == 1 and '"time"' in form["tags"][0]["begin"]
    if mode == "required":
        assert model.chat(tools=TOOLS, tool_choice=choice, max_tokens=100).choices[0].message.tool_calls
    model.chat(call, tools=TOOLS)
    assert model.answers[0][0].prompt.ids == prompts[0]


# ---------------------------------------------------------------- one is enough


def test_several_choices(hermes):
    texts = ['<tool_call>{"name": "time", "arguments": {}}</tool_call>', "No call."]
    choices = hermes.chat(*texts, tools=TOOLS, n=2).choices
    assert sorted(c.finish_reason for c in choices) == ["stop", "tool_calls"]
    messages, ends = gathered(hermes.chat(*texts, tools=TOOLS, n=2, stream=True))
    assert sorted(ends.values()) == ["stop", "tool_calls"]
    assert sorted(m["content"] for m in messages.values()) == ["", "No call."]
    assert sorted(len(m["tool_calls"]) for m in messages.values()) == [0, 1]


def test_a_malformed_call_is_content(hermes):
    text = 'Hm <tool_call>{"name": weather}</tool_call> well'
    choice = hermes.chat(text, tools=TOOLS).choices[0]
    assert (choice.message.content, choice.finish_reason) == (text, "stop")
    assert gathered(hermes.chat(text, tools=TOOLS, stream=True))[0][0]["content"] == text


def test_without_tools_nothing_is_a_call(hermes):
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        choice = hermes.chat(CALLS["hermes"], **fields).choices[0]
        assert choice.message.content == CALLS["hermes"] and choice.message.tool_calls is None


def test_a_call_cut_for_length(hermes):
    for stream in (False, True):
        answer = hermes.chat(CALLS["hermes"], tools=TOOLS, max_tokens=50, stream=stream)
        if stream:
            messages, ends = gathered(answer)
            name, arguments = messages[0]["tool_calls"][0][1:]
            assert ends == {0: "length"}
        else:
            (name, arguments), *_ = calls_of(answer.choices[0].message)
            assert answer.choices[0].finish_reason == "length"
        assert name == "weather" and PARIS.startswith(arguments) and arguments


def test_a_stop_string_before_a_call(hermes):
    choice = hermes.chat(CALLS["hermes"], tools=TOOLS, stop="<tool_call>").choices[0]
    assert (choice.message.content.strip(), choice.message.tool_calls) == ("One moment.", None)
    assert choice.finish_reason == "stop" and hermes.answers == []


@pytest.mark.parametrize(
    "text", [CALLS["hermes"], "plain enough", "", PARIS, f"<think>\nYes, or no.</think>\n\nYes. {PARIS}"]
)
@pytest.mark.parametrize("tools", [{}, {"tools": TOOLS}])
@pytest.mark.parametrize("name", ["hermes", "thinking"])
def test_log_probabilities_are_of_the_content_alone(name, text, tools, request):
    """Not of thoughts, calls and marks, and of what ends it; the same in a stream."""
    model, fields = request.getfixturevalue(name), {"logprobs": True, "top_logprobs": 1} | tools
    (choice,) = model.chat(text, **fields).choices
    told = choice.logprobs.content
    assert b"".join(bytes(one.bytes) for one in told).decode().strip() == (choice.message.content or "").strip()
    assert all(len(one.top_logprobs) == 1 for one in told)
    parts = [c.choices[0] for c in model.chat(text, stream=True, **fields)]
    assert [one for part in parts if part.logprobs for one in part.logprobs.content] == told
    assert all(part.delta.content for part in parts if part.logprobs and part.logprobs.content)


@pytest.mark.parametrize(
    ("stop", "finish", "arguments"), [("Par", "stop", '{"city": "'), ("</tool_call>", "tool_calls", PARIS)]
)
def test_a_call_that_a_stop_string_cuts_is_none_to_be_made(hermes, stop, finish, arguments):
    (choice,) = hermes.chat(ONE_CALL["hermes"], tools=TOOLS, stop=stop).choices
    assert (choice.finish_reason, calls_of(choice.message)) == (finish, [("weather", arguments)])
    _, ends = gathered(hermes.chat(ONE_CALL["hermes"], tools=TOOLS, stop=stop, stream=True))
    assert ends == {0: finish}


def test_a_stop_string_in_thoughts_does_not_end_an_answer(thinking):
    """Thoughts often hold what the answer will: "Observation:", or the beginning of the next question."""
    text = "<think>\nThen STOP comes.</think>\n\nYes. STOP it"
    message = thinking.chat(text, stop="STOP").choices[0].message
    assert (message.reasoning_content, message.content) == ("Then STOP comes.", "Yes. ")
    messages, ends = gathered(thinking.chat(text, stop="STOP", stream=True))
    assert (messages[0]["reasoning_content"], messages[0]["content"]) == ("Then STOP comes.", "Yes. ")
    assert ends == {0: "stop"}


def test_a_call_in_thoughts_that_are_not_closed_is_called(thinking):
    text = f"<think>\nI need it.\n{ONE_CALL['hermes']}"
    choice = thinking.chat(text, tools=TOOLS).choices[0]
    assert (choice.message.reasoning_content, choice.finish_reason) == ("I need it.", "tool_calls")
    assert calls_of(choice.message) == [("weather", PARIS)]
    messages, ends = gathered(thinking.chat(text, tools=TOOLS, stream=True))
    assert [tuple(call[1:]) for call in messages[0]["tool_calls"]] == [("weather", PARIS)]
    assert (messages[0]["reasoning_content"], ends) == ("I need it.", {0: "tool_calls"})


@pytest.mark.parametrize("stream", [False, True])
def test_who_sends_tools_to_a_model_whose_calls_are_not_parsed_is_told(hermes, stream, tmp_path):
    def warning(model, **fields):
        model.says("Yes.")
        create = model.client.with_raw_response.chat.completions.create
        messages = [{"role": "user", "content": "hello"}]
        return create(model="m", messages=messages, stream=stream, **fields).headers.get("x-radixrt-warning")

    assert warning(hermes, tools=TOOLS) is None
    with scripted("plain", tmp_path, tool_call_parser="none") as plain:
        assert warning(plain) is None
        assert "format of the model's tool calls is not known" in warning(plain, tools=TOOLS)


def test_a_call_that_the_model_wrote_badly_is_one(hermes):
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"\n</tool_call>'
    choice = hermes.chat(text, tools=TOOLS).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls[0].function.name) == ("tool_calls", "weather")
    assert hermes.chat(text, tools=TOOLS, stop="never").choices[0].finish_reason == "tool_calls"


def test_arguments_without_an_end_are_cut():
    message = AssistantMessage()
    message.add(CallStart(0, "id", "f"))
    for text, cut in (("", True), ("{}", False), ("[" * 100_000, True)):
        message.add(CallArguments(0, text))
        assert message.cut == cut


@pytest.mark.parametrize("tools", [{}, {"tools": TOOLS}])
def test_log_probabilities_end_where_a_stop_string_begins(hermes, tools):
    choice = hermes.chat("One, two, STOP, three", stop="STOP", logprobs=True, **tools).choices[0]
    said = b"".join(bytes(one.bytes) for one in choice.logprobs.content).decode()
    assert choice.message.content == "One, two, " and said.rstrip("S") == "One, two, "


@pytest.mark.parametrize("tools", [{}, {"tools": TOOLS}])
def test_log_probabilities_around_what_is_not_shown(hermes, tools):
    """A special token within a text is none of it."""
    choice = hermes.chat("One, <|endoftext|>two.", stop="STOP", logprobs=True, **tools).choices[0]
    said = b"".join(bytes(one.bytes) for one in choice.logprobs.content)
    assert choice.message.content == "One, two." and said == b"One, two."


def test_tokens_begin_where_they_do_also_while_their_text_is_held(hermes):
    """For it may be a part of a stop string."""
    fields = {"model": "m", "prompt": "hello", "logprobs": 0, "stop": "the", "max_tokens": 99}
    hermes.says("stop at most, or not")
    whole = hermes.client.completions.create(**fields).choices[0].logprobs.text_offset
    hermes.says("stop at most, or not")
    chunks = [c.choices[0].logprobs for c in hermes.client.completions.create(stream=True, **fields)]
    assert [place for found in chunks if found for place in found.text_offset] == whole


def test_what_the_session_is_told(hermes):
    for stream in (False, True):
        answer = hermes.chat(CALLS["hermes"], tools=TOOLS, stream=stream)
        list(answer)
        ((request, prompt, message, ids),) = hermes.answers
        assert ids == [*hermes.tokenizer.encode(CALLS["hermes"], False), 2]
        assert [c["function"]["name"] for c in message["tool_calls"]] == ["weather", "weather"]
        assert message["content"] == "One moment." and message["role"] == "assistant"
        assert prompt.tools == TOOLS and request.api_key == "any"
        rendered = hermes.tokenizer.encode(hermes.tokenizer.apply_chat(prompt), False)
        assert memoryview(request.prompt.ids).cast("i").tolist() == rendered


def test_calls_of_a_model_whose_template_writes_none_are_hermes(tmp_path):
    with scripted("plain", tmp_path) as model:
        message = model.chat(CALLS["hermes"], tools=TOOLS).choices[0].message
        results = [{"role": "tool", "tool_call_id": call.id, "content": "fine"} for call in message.tool_calls]
        messages = [{"role": "user", "content": "hello"}, message.model_dump(exclude_none=True), *results]
        answer = model.chat("Good.", messages=messages, tools=TOOLS)
        assert answer.model_extra["radixrt"]["session"]["kept_turns"] == 1
        _, prompt, _, _ = model.answers[0]
        assert model.tokenizer.apply_chat(prompt).count("<tool_call>") == len(results) == 2


def test_a_model_without_a_format_is_made_to_write_plain_json(tmp_path):
    with scripted("plain", tmp_path, tool_call_parser="none") as model:
        text = f'{{"name": "weather", "parameters": {PARIS}}}'
        choice = model.chat(text, tools=TOOLS, tool_choice="required").choices[0]
        assert calls_of(choice.message) == [("weather", PARIS)]
        assert model.grammar[1]["format"]["tags"][0]["begin"] == '{"name": "weather", "parameters": '
        assert model.chat(text, tools=TOOLS).choices[0].message.content == text


def test_parsers_can_be_named(tmp_path):
    with scripted("plain", tmp_path, tool_call_parser="hermes", reasoning_parser="qwen3") as model:
        message = model.chat("<think>Hm</think>" + CALLS["hermes"], tools=TOOLS).choices[0].message
        assert len(message.tool_calls) == 2 and message.reasoning_content == "Hm"
    with pytest.raises(ValueError, match="--tool-call-parser 'nope'"):
        make_server(FrontendConfig(tool_call_parser="nope"), TextService.none())


# ---------------------------------------------------------------- reasoning


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "arguments", "reasoning", "content"),
    [
        ("<think>\nLet me see.\n</think>\n\nYes.", {}, "Let me see.", "Yes."),
        ("Let me see.\n</think>\n\nYes.", {"opens": True}, "Let me see.", "Yes."),
        ("<think>Yes.", {"closes": True}, "", "<think>Yes."),
        ("Yes.", {}, "", "Yes."),
    ],
)
def test_reasoning(thinking, text, arguments, reasoning, content, stream):
    extra = {"chat_template_kwargs": arguments}
    answer = thinking.chat(text, extra_body=extra, stream=stream)
    if stream:
        message = gathered(answer)[0][0]
        assert (message["reasoning_content"], message["content"]) == (reasoning, content)
    else:
        message = answer.choices[0].message
        assert (getattr(message, "reasoning_content", ""), message.content) == (reasoning, content)
    assert thinking.answers[0][2].get("reasoning_content", "") == reasoning


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
def test_reasoning_that_is_left_out_of_the_answer(thinking, logprobs, stream):
    """It counts as before, and sessions know the whole answer."""
    extra = {"include_reasoning": False, "return_token_ids": True}
    text = "<think>\nLet me see.\n</think>\n\nYes."
    answer = thinking.chat(text, extra_body=extra, stream=stream, logprobs=logprobs)
    if stream:
        chunks = list(answer)
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert not any(hasattr(delta, "reasoning_content") for delta in deltas)
        assert "".join(delta.content or "" for delta in deltas) == "Yes."
        ids = [id for chunk in chunks for id in getattr(chunk.choices[0], "token_ids", None) or []]
        likely = [one.token for chunk in chunks if chunk.choices[0].logprobs
                  for one in chunk.choices[0].logprobs.content]  # fmt: skip
    else:
        choice = answer.choices[0]
        assert not hasattr(choice.message, "reasoning_content") and choice.message.content == "Yes."
        assert answer.usage.completion_tokens_details.reasoning_tokens > 3
        ids, likely = choice.token_ids, [one.token for one in choice.logprobs.content] if logprobs else []
    assert thinking.tokenizer.decode(ids).startswith(text)
    assert "".join(likely).strip() == ("Yes." if logprobs else "")
    assert thinking.answers[0][2]["reasoning_content"] == "Let me see."


def test_reasoning_then_calls(thinking):
    messages, ends = gathered(thinking.chat(f"<think>\nHm\n</think>\n\n{CALLS['hermes']}", tools=TOOLS, stream=True))
    assert messages[0]["reasoning_content"] == "Hm" and messages[0]["content"] == "One moment."
    assert len(messages[0]["tool_calls"]) == 2 and ends == {0: "tool_calls"}


def test_a_model_thinks_before_what_it_is_forced_to_say(thinking):
    json_object = {"response_format": {"type": "json_object"}}
    message = thinking.chat("<think>a</think>{}", **json_object).choices[0].message
    assert (message.reasoning_content, message.content) == ("a", "{}")
    optional, answer = thinking.grammar[1]["format"]["elements"]
    assert optional["type"] == "optional" and answer == {"type": "json_schema", "json_schema": {"type": "object"}}
    message = thinking.chat("a</think>\n\n{}", **json_object, extra_body=_template(opens=True)).choices[0].message
    assert (message.reasoning_content, message.content) == ("a", "{}")
    thoughts, _ = thinking.grammar[1]["format"]["elements"]
    assert (thoughts["elements"][0]["begin"], thoughts["elements"][0]["end"]) == ("", "</think>")
    assert thinking.chat("{}", **json_object, extra_body=_template(closes=True)).choices[0].message.content == "{}"
    assert thinking.grammar == ("json_schema", {"type": "object"})
    thinking.chat(f"<think>a</think>\n{ONE_CALL['hermes']}", tools=TOOLS, tool_choice="required")
    assert thinking.grammar[1]["format"]["elements"][1]["type"] == "tags_with_separator"
    thinking.chat(ONE_CALL["hermes"], tools=TOOLS, tool_choice="required", extra_body=_template(closes=True))
    assert thinking.grammar[1]["format"]["type"] == "tags_with_separator"


def _template(**arguments: bool) -> dict:
    return {"chat_template_kwargs": arguments}


@pytest.mark.parametrize("effort", ["none", "low"])
def test_effort_is_for_the_template(thinking, effort):
    thinking.chat("Hm.", reasoning_effort=effort, extra_body=_template(opens=True), verbosity="low")
    thinks = effort != "none"
    told = {"enable_thinking": thinks, "thinking": thinks, "reasoning_effort": effort}
    assert thinking.answers[-1][1].template_args == told | {"opens": True}
    thinking.chat("Hm.", extra_body={"reasoning": {"effort": effort, "enabled": None}})
    assert thinking.answers[-1][1].template_args == told
    thinking.chat("Hm.", extra_body={"reasoning": {"enabled": thinks}})
    assert thinking.answers[-1][1].template_args == {"enable_thinking": thinks, "thinking": thinks}
    for nothing in ({}, {"reasoning": None}, {"reasoning": {}}):
        thinking.chat("Hm.", extra_body=nothing)
        assert thinking.answers[-1][1].template_args == {}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_an_answer_that_was_cut_in_its_thoughts(thinking, name):
    """vLLM and SGLang give such an answer no content, and clients send it back like this."""
    for content in ({"content": None}, {}, {"content": ""}):
        answer = {"role": "assistant", name: "Hm", "tool_calls": None} | content
        thinking.chat("So.", messages=[{"role": "user", "content": "x"}, answer])
        told = thinking.answers[0][1].messages[1]
        assert (told.get("content") or "", told[name]) == ("", "Hm")


def test_refusals_in_a_history_are_what_was_said(hermes):
    """As OpenAI's own models write them: beside the content, or as a part of it."""
    part = {"type": "refusal", "refusal": "No."}
    answers = [
        ({"content": None, "refusal": "No."}, "No."),
        ({"refusal": "No."}, "No."),
        ({"content": [{"type": "text", "text": "Well. "}, part]}, "Well. No."),
        ({"content": "Yes.", "refusal": None}, "Yes."),
    ]
    for answer, expected in answers:
        hermes.chat("So.", messages=[{"role": "user", "content": "x"}, {"role": "assistant"} | answer])
        (told, *_) = hermes.answers[0][1].messages[1:]
        content = told["content"]
        assert (content if isinstance(content, str) else "".join(p["text"] for p in content)) == expected


# ---------------------------------------------------------------- refusals


def function(**fields) -> list[dict]:
    return [{"type": "function", "function": {"name": "f"} | fields}]


def turns(*messages: dict) -> dict:
    return {"messages": [{"role": "user", "content": "x"}, *messages]}


def called(**fields) -> dict:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {"role": "assistant", "content": None, "tool_calls": [call | fields]}


NO_IMAGE = {"type": "text", "text": "[image: this model reads text only]"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
READ = {"role": "tool", "tool_call_id": "a", "content": [IMAGE]}
MORE = {"role": "user", "content": "Go on."}
SHOWN = {"role": "user", "content": [{"type": "text", "text": "y"}, IMAGE]}


@pytest.mark.parametrize("added", [[READ], [READ, SHOWN], [READ, {"role": "assistant", "content": "z"}, SHOWN, MORE]])
def test_images_that_a_tool_has_read_are_named_in_their_place(hermes, added):
    """Those that the agent shows behind its result, and those of earlier questions, as well."""
    before = [SHOWN, called(), *added]
    first = hermes.chat("So it is.", tools=TOOLS, messages=before)
    told = hermes.answers[-1][1].messages
    contents = [message["content"] for message in before]
    assert [message["content"] for message in told] == [
        [NO_IMAGE if part is IMAGE else part for part in content] if isinstance(content, list) else content
        for content in contents
    ]
    after = [*before, {"role": "assistant", "content": "So it is."}, MORE]
    again = hermes.chat("Yes.", tools=TOOLS, messages=after)
    assert again.usage.prompt_tokens_details.cached_tokens >= first.usage.total_tokens - 1


PARAMETERS = "tools[0].function.parameters"
BAD = [
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": function(name=None)}, "tools[0].function.name"),
    ({"tools": function(name="")}, "tools[0].function.name"),
    ({"tools": function(description=3)}, "tools[0].function.description"),
    ({"tools": function(strict="yes")}, "tools[0].function.strict"),
    ({"tools": function() + function()}, "tools[1].function.name"),
    ({"tools": function(parameters=[])}, PARAMETERS),
    ({"tools": function(parameters={"type": "string"})}, PARAMETERS + ".type"),
    ({"tools": function(parameters={"properties": []}, strict=True)}, PARAMETERS + ".properties"),
    (
        {"tools": function(parameters={"properties": {"a": {"type": "text"}}}, strict=True)},
        PARAMETERS + ".properties.a.type",
    ),
    ({"tools": function(parameters={"properties": {"a": 1}}, strict=True)}, PARAMETERS + ".properties.a"),
    ({"tools": function(parameters={"required": "a"}, strict=True)}, PARAMETERS + ".required"),
    ({"tools": function(parameters={"anyOf": [{"items": 3}]}, strict=True)}, PARAMETERS + ".anyOf[0].items"),
    ({"tools": "weather"}, "tools"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice.type"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED | {"mode": "none"}}},
        "tool_choice.allowed_tools.mode",
    ),
    (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED | {"tools": []}}},
        "tool_choice.allowed_tools.tools",
    ),
    (
        {"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}},
        "tool_choice.allowed_tools.tools[0].function.name",
    ),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
    ({"extra_body": {"reasoning": {"effort": "extreme"}}}, "reasoning.effort"),
    ({"reasoning_effort": "low", "extra_body": {"reasoning": {"effort": "high"}}}, "reasoning.effort"),
    ({"extra_body": {"reasoning": {"enabled": "yes"}}}, "reasoning.enabled"),
    ({"verbosity": "short"}, "verbosity"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"function_call": {"name": "f"}}, "function_call"),
    (turns({"role": "wizard", "content": "x"}), "messages[1].role"),
    (turns({"content": "x"}), "messages[1].role"),
    (turns({"role": "function", "name": "f", "content": "x"}), "messages[1].role"),
    (turns({"role": "user"}), "messages[1].content"),
    (turns({"role": "user", "content": 3}), "messages[1].content"),
    (turns({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}), "messages[1].content[0].type"),
    (turns(called(), READ, {"role": "assistant", "content": "z"}, SHOWN), "messages[4].content[1].type"),
    (turns(SHOWN, {"role": "assistant", "content": "It is"}), "messages[1].content[1].type"),
    (turns({"role": "system", "content": [IMAGE]}), "messages[1].content[0].type"),
    (turns({"role": "assistant", "content": "x", "reasoning_content": 3}), "messages[1].reasoning_content"),
    (turns({"role": "assistant", "content": "x", "refusal": 3}), "messages[1].refusal"),
    (turns({"role": "assistant", "content": [{"type": "refusal"}]}), "messages[1].content[0].refusal"),
    (turns({"role": "user", "content": [{"type": "refusal", "refusal": "No."}]}), "messages[1].content[0].type"),
    (turns({"role": "tool", "content": "x"}), "messages[1].tool_call_id"),
    (turns({"role": "tool", "content": "x", "tool_call_id": "a"}), "messages[1].tool_call_id"),
    (turns(called(), {"role": "tool", "content": "x", "tool_call_id": "b"}), "messages[2].tool_call_id"),
    (turns(called(), {"role": "tool", "tool_call_id": "a"}), "messages[2].content"),
    (turns({"role": "assistant", "tool_calls": "f"}), "messages[1].tool_calls"),
    (turns({"role": "assistant", "tool_calls": ["f"]}), "messages[1].tool_calls[0]"),
    (turns(called(type="tool")), "messages[1].tool_calls[0].type"),
    (turns(called(id=None)), "messages[1].tool_calls[0].id"),
    (turns(called(function=None)), "messages[1].tool_calls[0].function"),
    (turns(called(function={"arguments": "{}"})), "messages[1].tool_calls[0].function.name"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=[f"{p}-{i}" for i, (_, p) in enumerate(BAD)])
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_name_the_field(hermes, fields, param, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        hermes.chat("never", stream=stream, **fields)
    assert caught.value.param == param, caught.value.body
    assert caught.value.type == "invalid_request_error" and param.split(".")[0].split("[")[0] in caught.value.message


def test_a_schema_that_cannot_be_compiled(hermes):
    pytest.importorskip("xgrammar")
    broken = function(parameters={"properties": {"a": {"$ref": "#/nowhere"}}}, strict=True)
    for fields in ({}, {"tool_choice": "required"}):
        with pytest.raises(openai.BadRequestError) as caught:
            hermes.chat("never", tools=[*broken, TIME], **fields)
        assert caught.value.param == PARAMETERS


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_enforced_of_a_tool_is_told(hermes, stream):
    """Unless the tool is strict: then it is refused."""
    pytest.importorskip("xgrammar")
    schema = {"type": "object", "properties": {"é\n": {"type": "integer", "not": {"const": 1}}}, "required": ["é\n"]}
    hermes.says("x")
    create = hermes.client.chat.completions.with_raw_response.create
    fields = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": stream, "max_tokens": 1}
    told = create(tools=function(parameters=schema), tool_choice="required", **fields).headers
    assert told["x-radixrt-warning"] == r"not enforced: tools[0].function.parameters#/properties/\xe9\n/not"
    assert '"not"' not in json.dumps(hermes.grammar)
    hermes.says("x")
    assert "x-radixrt-warning" not in create(tools=function(parameters=schema), **fields).headers
    with pytest.raises(openai.BadRequestError) as caught:
        hermes.chat("never", tools=function(parameters=schema, strict=True), stream=stream)
    assert caught.value.param == PARAMETERS and "/not cannot be enforced" in caught.value.message


def test_what_is_accepted_without_effect(hermes):
    plain = hermes.chat("Yes.")
    extra = {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "user": "u", "prompt_cache_key": "k"}
    again = hermes.chat("Yes.", max_completion_tokens=50, **extra)
    assert again.choices[0].message.content == "Yes." == plain.choices[0].message.content
    developer = hermes.chat("Yes.", messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}])
    assert developer.choices[0].message.content == "Yes."
    assert [m["role"] for m in hermes.answers[0][1].messages] == ["system", "user"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    hermes.chat("Yes.", messages=parts)
    assert "a\nb" in hermes.tokenizer.apply_chat(hermes.answers[0][1])
