"""gpt-oss' channels: how answers in them are read, by every API, and what sessions make of a template that drops
thoughts."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.formats.output import Formats, probe_text
from radixrt.formats.parsing import (
    CallArguments,
    CallStart,
    Content,
    Function,
    Harmony,
    OutputParser,
    Reasoning,
    tool_format,
)
from radixrt.formats.structured import constraint
from radixrt.formats.tools import NO_TOOLS, tool_use
from radixrt.messages import NO_TENANT, ChatPrompt
from radixrt.tokens import Sessions, load_tokenizer
from tests.frontend.scripted import HARMONY, MARKS, Model, gathered, joined, make_family, scripted

NAMES = frozenset({"f", "weather"})
PARIS = '{"city": "Paris"}'
THOUGHT = "<|channel|>analysis<|message|>Let me think.<|end|><|start|>assistant"
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{PARIS}<|call|>"
ANSWER = "<|channel|>final<|message|>It is sunny.<|return|>"
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TIME = {"type": "function", "function": {"name": "time"}}


def parse(*cuts: str, names=NAMES, hidden=frozenset(MARKS), form: Harmony | None = None) -> list:
    parser = OutputParser(form or Harmony(), names, hidden=hidden, new_id=str)
    return joined([piece for cut in cuts for piece in parser.push(cut)] + parser.finish())


def called(name: str, arguments: str, index: int = 0) -> list:
    return [CallStart(index, "", name), CallArguments(index, arguments)]


THINKS = Reasoning("Let me think.")
FOUND = [
    (THOUGHT + ANSWER, [THINKS, Content("It is sunny.")]),
    (THOUGHT + CALL, [THINKS, *called("weather", PARIS)]),
    (ANSWER, [Content("It is sunny.")]),
    (CALL, called("weather", PARIS)),
    (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", called("f", "{}")),
    (" to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}", called("f", "{}")),
    ("<|channel|>commentary to=functions.f<|message|>{}<|call|>", called("f", "{}")),
    ("<|channel|>commentary to=f <|constrain|>json<|message|>\n{}<|call|>", called("f", "{}")),
    ("<|channel|>commentary to=functions.f <|constrain|>json<|message|> <|call|>", called("f", "{}")),
    ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{oops<|call|>", called("f", "{oops")),
    ("<|channel|>analysis<|message|>cut \n", [Reasoning("cut \n")]),
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", [Reasoning("1 + 1")]),
    (
        f"<|channel|>commentary<|message|>I shall look.<|end|><|start|>assistant{CALL}",
        [Content("I shall look."), *called("weather", PARIS)],
    ),
    (
        f"<|channel|>commentary<|message|>First.<|end|>\n<|start|>assistant{THOUGHT}{ANSWER}",
        [Content("First."), THINKS, Content("\n\nIt is sunny.")],
    ),
    (f"{CALL}<|start|>functions.weather to=assistant<|message|>made up", called("weather", PARIS)),
    (
        f"{CALL.removesuffix('<|call|>')}<|end|><|start|>assistant{CALL}",
        called("weather", PARIS) + called("weather", PARIS, 1),
    ),
    ("Just text, to=be or <not>, \n", [Content("Just text, to=be or <not>, \n")]),
    ("to=be or not to be", [Content("to=be or not to be")]),
    ("<|channel|>final", [Content("final")]),
    ("<|channel|>final what is this<|message|>x", [Content("final what is thisx")]),
    ("<|message|>no channel<|end|>", [Content("no channel")]),
    (f"{THOUGHT}plain", [THINKS, Content("plain")]),
    ("", []),
    (THOUGHT, [THINKS]),
]


@pytest.mark.parametrize(("text", "expected"), FOUND)
def test_what_is_found(text, expected):
    assert parse(text) == expected
    assert parse(*text) == expected


def test_marks_that_are_no_special_tokens_show_where_they_say_nothing():
    assert parse("a <|message|> b", hidden=frozenset()) == [Content("a <|message|> b")]


def test_without_tools_there_are_no_calls():
    assert parse(THOUGHT + CALL, names=frozenset()) == [THINKS, Content(PARIS)]


def test_thoughts_may_be_content():
    assert parse(THOUGHT + ANSWER, form=Harmony(thoughts=False)) == [Content("Let me think.\n\nIt is sunny.")]


@pytest.mark.parametrize(
    ("prompt", "partial", "text", "expected"),
    [
        ("<|end|><|start|>assistant", False, ANSWER, [Content("It is sunny.")]),
        ("<|start|>assistant<|channel|>analysis<|message|>", False, f"a<|end|><|start|>assistant{ANSWER}",
         [Reasoning("a"), Content("It is sunny.")]),
        ("<|start|>assistant<|channel|>analysis", False, "<|message|>a", [Reasoning("a")]),
        ("<|start|>assistant<|channel|>final<|message|>It", True, " is.<|return|>", [Content(" is.")]),
        ("far from any mark", True, " is.<|return|>", [Content(" is.")]),
        ("no mark at all", False, ANSWER, [Content("It is sunny.")]),
    ],
)  # fmt: skip
def test_where_a_prompt_ends(prompt, partial, text, expected):
    assert parse(text, form=Harmony().after(prompt, partial)) == expected


PARTS = [*MARKS, "analysis", "final", "commentary", " to=functions.f", " to=", "json", " ", "\n", "text", '{"a": 1}',
         "assistant", THOUGHT, CALL, ANSWER, "<|", "é"]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from(PARTS), max_size=12),
    st.sampled_from([frozenset(), frozenset(MARKS)]),
    st.sampled_from(["", "<|channel|>analysis<|message|>", "<|channel|>"]),
    st.randoms(use_true_random=False),
)
def test_cuts_do_not_matter(parts, hidden, opened, rng: random.Random):
    text, form = "".join(parts), Harmony(opened=opened)
    whole = parse(text, hidden=hidden, form=form)
    assert parse(*text, hidden=hidden, form=form) == whole
    places = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 6)))
    cuts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert parse(*cuts, hidden=hidden, form=form) == whole


def test_thoughts_and_arguments_come_as_they_are_written():
    parser = OutputParser(Harmony(), NAMES, hidden=frozenset(MARKS), new_id=str)
    assert parser.push("<|channel|>analysis<|mess") == []
    assert parser.push("age|>Let") == [Reasoning("Let")]
    assert parser.push(" me") == [Reasoning(" me")]
    assert parser.push("<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json") == []
    assert parser.push('<|message|>{"a') == [CallStart(0, "", "f"), CallArguments(0, '{"a')]
    assert parser.push('": 1}') == [CallArguments(0, '": 1}')]


# ---------------------------------------------------------------- which format, and what it forces


def test_the_published_template_shows_it(tmp_path, shared_data):
    file = shared_data / "tokenizers" / "gpt-oss" / "chat_template.jinja"
    tokenizer = load_tokenizer(make_family(tmp_path, "plain"), str(file))
    assert isinstance(tool_format("auto", probe_text(tokenizer)), Harmony)
    assert Formats(tokenizer).reasoning is None, "it is the calls' format that reads them"


@pytest.mark.parametrize(
    ("tools", "reasoning", "expected"),
    [
        ("auto", "auto", [THINKS, *called("weather", PARIS)]),
        ("openai", "openai_gptoss", [THINKS, *called("weather", PARIS)]),
        ("gpt-oss", "gpt-oss", [THINKS, *called("weather", PARIS)]),
        ("none", "auto", [THINKS, Content(PARIS)]),
        ("auto", "none", [Content("Let me think."), *called("weather", PARIS)]),
    ],
)
def test_parsers_by_name(tmp_path, tools, reasoning, expected):
    tokenizer = load_tokenizer(make_family(tmp_path, "harmony"))
    formats = Formats(tokenizer, tools, reasoning)
    prompt = array("i", tokenizer.encode("<|start|>assistant", False)).tobytes()
    output = formats.output(prompt, False, True, tool_use([WEATHER], None, None), None)
    assert output.hidden_marks == frozenset(MARKS)
    parser = OutputParser(output.tools, output.use.functions, hidden=output.hidden_marks, new_id=str)
    assert joined(parser.push(THOUGHT + CALL) + parser.finish()) == expected


def accepts(form: dict[str, Any], text: str) -> bool:
    xgrammar = pytest.importorskip("xgrammar")
    from xgrammar.testing import _is_grammar_accept_string

    return _is_grammar_accept_string(
        xgrammar.Grammar.from_structural_tag({"type": "structural_tag", "format": form}), text
    )


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
OPEN_CALL, OPEN_ANSWER = CALL.removesuffix("<|call|>"), ANSWER.removesuffix("<|return|>")


@pytest.mark.parametrize("more", [[], [Function("f", {"type": "object"})]])
def test_what_is_forced_is_what_is_parsed(more):
    """The token that ends an answer is the model's to choose, and no text."""
    functions = [Function("weather", CITY), *more]
    forced, free = Harmony().forced(functions, True), Harmony().free(functions, True)
    before = " to=functions.weather<|channel|>commentary json<|message|>"
    for form in (forced, free):
        assert accepts(form, OPEN_CALL) and accepts(form, THOUGHT + OPEN_CALL)
        assert not accepts(form, OPEN_CALL.replace('"Paris"', "1"))
        assert not accepts(form, OPEN_CALL.replace("weather", "time"))
        assert not accepts(form, OPEN_CALL + OPEN_CALL), "a call is the last that is said"
    assert accepts(free, OPEN_ANSWER) and accepts(free, before + PARIS) and not accepts(free, before + "{}")
    assert not accepts(forced, OPEN_ANSWER) and not accepts(forced, THOUGHT + OPEN_ANSWER)
    thinking = Harmony(opened="<|channel|>analysis<|message|>").forced(functions, True)
    assert accepts(thinking, THOUGHT.removeprefix("<|channel|>analysis<|message|>") + OPEN_CALL)
    assert not accepts(thinking, OPEN_CALL)


def test_a_text_that_must_be_json():
    form = Harmony().with_text({"type": "json_schema", "json_schema": CITY})
    said = f"<|channel|>final<|message|>{PARIS}"
    assert accepts(form, said) and accepts(form, THOUGHT + said)
    assert not accepts(form, PARIS) and not accepts(form, "<|channel|>final<|message|>[]")
    going_on = Harmony().after("<|start|>assistant<|channel|>final<|message|>", True)
    assert accepts(going_on.with_text({"type": "json_schema", "json_schema": CITY}), PARIS)


def test_a_schema_beside_tools(tmp_path):
    """Either a call, or a final message that follows it; without tools the message alone."""
    tokenizer = load_tokenizer(make_family(tmp_path, "harmony"))
    wanted = constraint({"response_format": {"type": "json_object"}})
    prompt = array("i", tokenizer.encode("<|start|>assistant", False)).tobytes()
    for use, calls in ((tool_use([WEATHER], None, None), True), (NO_TOOLS, False)):
        grammar = Formats(tokenizer).output(prompt, False, True, use, wanted).grammar
        form = json.loads(grammar.text)["format"]
        assert accepts(form, THOUGHT + "<|channel|>final<|message|>{}") and accepts(form, OPEN_CALL) == calls
        assert not accepts(form, OPEN_ANSWER)


# ---------------------------------------------------------------- over HTTP


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Iterator[Model]:
    with scripted("harmony", tmp_path_factory.mktemp("harmony")) as model:
        # As generation_config.json has them.
        model.script.eos_ids |= {model.tokenizer.token_id(mark) for mark in ("<|return|>", "<|call|>")}
        yield model


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tools", [None, [WEATHER, TIME]])
def test_an_answer(model, stream, tools):
    answer = model.chat(THOUGHT + ANSWER, stream=stream, **({"tools": tools} if tools else {}))
    if stream:
        messages, ends = gathered(answer)
        message, end = messages[0], ends[0]
        found = message["reasoning_content"], message["content"], message["tool_calls"]
    else:
        message, end = answer.choices[0].message, answer.choices[0].finish_reason
        found = message.reasoning_content, message.content, message.tool_calls or []
    assert (found, end) == (("Let me think.", "It is sunny.", []), "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_a_call(model, stream):
    answer = model.chat(THOUGHT + CALL, stream=stream, tools=[WEATHER, TIME])
    if stream:
        messages, ends = gathered(answer)
        assert [tuple(call[1:]) for call in messages[0]["tool_calls"]] == [("weather", PARIS)]
        assert messages[0]["reasoning_content"] == "Let me think." and ends == {0: "tool_calls"}
    else:
        choice = answer.choices[0]
        assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [("weather", PARIS)]
        assert choice.message.reasoning_content == "Let me think." and choice.finish_reason == "tool_calls"
        assert choice.message.content is None


@pytest.mark.parametrize("stream", [False, True])
def test_responses(model, stream):
    model.says(THOUGHT + CALL)
    tools = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
    found = model.client.responses.create(model="m", input="Paris?", tools=tools, stream=stream)
    response = list(found)[-1].response if stream else found
    thoughts, call = response.output
    assert thoughts.type == "reasoning" and thoughts.content[0].text == "Let me think."
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", PARIS)
    model.says(THOUGHT + ANSWER)
    assert model.client.responses.create(model="m", input="Paris?").output_text == "It is sunny."


@pytest.mark.parametrize("stream", [False, True])
def test_messages(model, stream):
    fields = {"model": "m", "max_tokens": 200, "messages": [{"role": "user", "content": "Paris?"}]}
    fields["tools"] = [{"name": "weather", "input_schema": {"type": "object"}}]
    fields["thinking"] = {"type": "enabled", "budget_tokens": 100}
    with anthropic.Anthropic(base_url=model.url, api_key="any", max_retries=0) as client:
        model.says(THOUGHT + CALL)
        if stream:
            with client.messages.stream(**fields) as events:
                found = events.get_final_message()
        else:
            found = client.messages.create(**fields)
    thoughts, call = found.content
    assert (thoughts.type, thoughts.thinking, found.stop_reason) == ("thinking", "Let me think.", "tool_use")
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Paris"})


def test_a_loop_of_tools_hits_to_the_last_token(model):
    """The template writes a call's header in another way than the model does."""
    messages: list[Any] = [{"role": "user", "content": "How is Paris?"}]
    length = 0
    for turn in range(3):
        text = THOUGHT.replace("think", f"think {turn}") + CALL.replace("Paris", f"Paris {turn}")
        answer = model.chat(text, messages=messages, tools=[WEATHER])
        if turn:
            cached = answer.usage.prompt_tokens_details.cached_tokens
            assert cached == length, f"turn {turn}"
            assert answer.model_extra["radixrt"]["session"]["kept_turns"] == turn
        request, _, message, ids = model.answers[0]
        length = len(request.prompt.ids) // 4 + len(ids) - 1
        # As a client sends it back: arguments written anew, no thoughts.
        call = message["tool_calls"][0]
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), indent=1)
        messages += [{"role": "assistant", "content": None, "tool_calls": [call]},
                     {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]  # fmt: skip


class Loop:
    """A loop of tools through one API; a client sends what it got, with or without the thoughts."""

    def __init__(self, model: Model, question: str, echoes: bool) -> None:
        self.model, self.echoes = model, echoes
        self.history: list[Any] = [{"role": "user", "content": question}]

    def ask(self, text: str) -> int:
        """The model generates `text`; the history goes on with the answer, the result of its call, and a question if
        it has none. Returns how many tokens of the prompt were cached."""
        self.model.says(text)
        cached, answer, call_id = self.asked()
        self.history += answer + [self.result(call_id) if call_id else {"role": "user", "content": "And then?"}]
        return cached

    def asked(self) -> tuple[int, list[Any], str]:
        answer = self.model.client.chat.completions.create(model="m", messages=self.history, tools=[WEATHER])
        message = answer.choices[0].message.model_dump(exclude_none=True)
        if not self.echoes:
            message.pop("reasoning_content", None)
        call_id = message["tool_calls"][0]["id"] if "tool_calls" in message else ""
        return answer.usage.prompt_tokens_details.cached_tokens, [message], call_id

    def result(self, call_id: str) -> Any:
        return {"role": "tool", "tool_call_id": call_id, "content": "sunny"}


class MessagesLoop(Loop):
    def asked(self) -> tuple[int, list[Any], str]:
        tools = [{"name": "weather", "input_schema": {"type": "object"}}]
        fields = {"thinking": {"type": "enabled", "budget_tokens": 100}, "model": "m", "max_tokens": 200}
        with anthropic.Anthropic(base_url=self.model.url, api_key="any", max_retries=0) as client:
            answer = client.messages.create(messages=self.history, tools=tools, **fields)
        content = [part for part in answer.content if self.echoes or part.type != "thinking"]
        call_id = next((part.id for part in content if part.type == "tool_use"), "")
        return answer.usage.cache_read_input_tokens, [{"role": "assistant", "content": content}], call_id

    def result(self, call_id: str) -> Any:
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": "sunny"}]}


class ResponsesLoop(Loop):
    def asked(self) -> tuple[int, list[Any], str]:
        tools = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
        answer = self.model.client.responses.create(model="m", input=self.history, tools=tools)
        items = [item.model_dump(exclude_none=True) for item in answer.output]
        items = [item for item in items if self.echoes or item["type"] != "reasoning"]
        call_id = next((item["call_id"] for item in items if item["type"] == "function_call"), "")
        return answer.usage.input_tokens_details.cached_tokens, items, call_id

    def result(self, call_id: str) -> Any:
        return {"type": "function_call_output", "call_id": call_id, "output": "sunny"}


@pytest.mark.parametrize("echoes", [True, False], ids=["thinking comes back", "thinking stays away"])
@pytest.mark.parametrize("channel", ["commentary", "final"])
@pytest.mark.parametrize("loop", [Loop, MessagesLoop, ResponsesLoop], ids=["chat", "messages", "responses"])
def test_thoughts_and_text_before_a_call_hit_to_the_last_token(model, loop, channel, echoes):
    """The template can write only one of them, and writes the text as thoughts: the prompt has both, as generated."""
    talk = loop(model, f"{loop.__name__}, {channel}, {echoes}?", echoes)
    said = f"<|channel|>{channel}<|message|>I look.<|end|><|start|>assistant"
    talk.ask(THOUGHT + said + CALL)
    turns = [THOUGHT + CALL, THOUGHT + said + THOUGHT + said + CALL, said + CALL, THOUGHT + ANSWER]
    if loop is ResponsesLoop:  # the second text would be an item of its own, which is read as another answer
        del turns[1]
    for text in turns:
        request, _, _, ids = model.answers[0]
        whole = [*memoryview(request.prompt.ids).cast("i"), *ids]
        assert talk.ask(text) == len(whole) - 1
        assert [*memoryview(model.answers[0][0].prompt.ids).cast("i")][: len(whole)] == whole
    talk.ask(THOUGHT + ANSWER)
    last = model.tokenizer.decode([*memoryview(model.answers[0][0].prompt.ids).cast("i")], False)
    assert "think" not in last and "I look" not in last and "It is sunny." in last, "all is dropped with the answer"


def test_log_probabilities_of_two_messages(model):
    """The empty line between them is said by no token."""
    told = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + ANSWER
    (choice,) = model.chat(told, tools=[WEATHER], logprobs=True).choices
    assert choice.message.content == "I look.\n\nIt is sunny."
    assert b"".join(bytes(one.bytes) for one in choice.logprobs.content) == b"I look.It is sunny."
    parts = [part for chunk in model.chat(told, tools=[WEATHER], logprobs=True, stream=True) for part in chunk.choices]
    assert [one for part in parts if part.logprobs for one in part.logprobs.content] == choice.logprobs.content


def test_a_call_ends_an_answer_also_where_the_checkpoint_forgets_it(model):
    model.script.eos_ids -= {model.tokenizer.token_id("<|call|>")}
    try:
        answer = model.chat(f"{THOUGHT}{CALL}{'<|start|>functions.weather and so on ' * 999}", tools=[WEATHER])
    finally:
        model.script.eos_ids |= {model.tokenizer.token_id("<|call|>")}
    (choice,) = answer.choices
    assert len(choice.message.tool_calls) == 1 and choice.message.content is None
    assert choice.finish_reason == "tool_calls"
    assert answer.usage.completion_tokens == len(model.tokenizer.encode(THOUGHT + CALL, False)), "the work ends, too"


# ---------------------------------------------------------------- sessions


class Talk:
    """A chat with a model whose answers end as gpt-oss' do."""

    def __init__(self, folder, keep: bool, template: str = "") -> None:
        self.tokenizer = load_tokenizer(make_family(folder, "harmony"), template)
        self.sessions = Sessions(self.tokenizer, keep_thinking=keep, least_tokens=1)
        self.messages: list[dict[str, Any]] = []
        self.tools: list[Any] = [WEATHER]
        self.ids: list[bytes] = []
        """Of each answer, with its prompt."""

    def ask(self, *messages: dict[str, Any]):
        self.messages += messages
        self.encoded = self.sessions.encode_chat(NO_TENANT, ChatPrompt(list(self.messages), self.tools))
        return self.encoded

    def answer(self, text: str, message: dict[str, Any], echoed: dict[str, Any] | None = None) -> None:
        generated = array("i", self.tokenizer.encode(text, False)).tobytes()
        self.sessions.remember(self.encoded, message, generated)
        self.ids.append(self.encoded.ids + generated)
        self.messages.append(echoed or message)

    def shown(self) -> str:
        return self.tokenizer.decode(memoryview(self.encoded.ids).cast("i").tolist(), False)


def called_message(**more: Any) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": PARIS}}
    return {"role": "assistant", "content": None, "tool_calls": [call]} | more


USER, TOOL = {"role": "user", "content": "Paris?"}, {"role": "tool", "tool_call_id": "c", "content": "sunny"}
THINKING = {"reasoning_content": "Let me think."}


@pytest.mark.parametrize("echoes", [True, False], ids=["thinking comes back", "thinking stays away"])
@pytest.mark.parametrize("keep", [False, True])
def test_thoughts_stay_in_a_loop_and_go_with_its_answer(tmp_path, keep, echoes):
    talk = Talk(tmp_path, keep)
    more = THINKING if echoes else {}
    talk.ask(USER)
    talk.answer(THOUGHT + CALL, called_message(**THINKING), called_message(**more))
    assert talk.ask(TOOL).ids.startswith(talk.ids[-1]) and not talk.encoded.dropped
    assert talk.encoded.respelled == ("message 1: the template writes its white space, JSON or headers in another way",)
    final = {"role": "assistant", "content": "It is sunny."}
    talk.answer(THOUGHT + ANSWER, final | THINKING, final | more)
    encoded = talk.ask(USER)
    if keep:
        assert encoded.ids.startswith(talk.ids[-1][:-4]), "but for <|return|>, for which the template has <|end|>"
        assert encoded.respelled == tuple(
            f"message {i}: its thinking is kept, which the template drops" for i in (1, 3)
        )
        assert talk.shown().count("Let me think.") == 2 and not encoded.dropped
    else:
        assert [one[:2] for one in encoded.dropped] == [(1, "thinking"), (3, "thinking")]
        assert talk.shown() == encoded.text and "think" not in encoded.text
    assert talk.shown().count("<|channel|>final<|message|>It is sunny.<|end|>") == 1
    # The next turn is a loop of its own, and hits again.
    talk.answer(THOUGHT + CALL, called_message(**THINKING), called_message(**more))
    assert talk.ask(TOOL).ids.startswith(talk.ids[-1])


@pytest.mark.parametrize("keep", [False, True])
def test_the_published_template_drops_thoughts(tmp_path, shared_data, keep):
    """(The version at hand takes no tool calls as OpenAI writes them.)"""
    talk = Talk(tmp_path, keep, str(shared_data / "tokenizers" / "gpt-oss" / "chat_template.jinja"))
    tool = {"name": "weather", "description": "Of a city.", "parameters": {"type": "object", "properties": {}}}
    talk.tools = [{"type": "function", "function": tool}]
    for turn in range(3):
        encoded = talk.ask(USER)
        if turn and keep:
            assert encoded.ids.startswith(talk.ids[-1][:-4]) and not encoded.dropped
        elif turn:
            assert [one[:2] for one in encoded.dropped] == [(2 * i + 1, "thinking") for i in range(turn)]
            assert talk.shown() == encoded.text and "Let me think" not in encoded.text
        answer = {"role": "assistant", "content": "It is sunny."}
        talk.answer(THOUGHT + ANSWER, answer | THINKING, answer)


def test_an_answer_without_thoughts_hits(tmp_path):
    talk = Talk(tmp_path, False)
    talk.ask(USER)
    talk.answer(ANSWER, {"role": "assistant", "content": "It is sunny."})
    assert talk.ask(USER).ids.startswith(talk.ids[-1][:-4]) and not talk.encoded.dropped


def test_text_and_thoughts_beside_a_call_are_no_reason_to_refuse(tmp_path):
    """The template does refuse both; of an unknown answer the thoughts go then."""
    talk = Talk(tmp_path, False)
    talk.ask(USER, called_message(content="One moment.", **THINKING), TOOL)
    assert "One moment." in talk.shown() and "think" not in talk.shown()


@pytest.mark.parametrize("changed", ["text", "call"])
@pytest.mark.parametrize("template", ["", "published"])
def test_text_and_thoughts_that_were_generated_stay_unless_the_client_changes_them(
    tmp_path, request, template, changed
):
    if template:
        template = str(request.getfixturevalue("shared_data") / "chat_templates" / "openai-gpt-oss-120b.jinja")
    talk = Talk(tmp_path, False, template)
    talk.tools[0]["function"]["description"] = "Of a city."
    talk.ask(USER)
    said = "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
    talk.answer(
        THOUGHT + said + CALL, called_message(content="One moment.", **THINKING), called_message(content="One moment.")
    )
    encoded = talk.ask(TOOL)
    assert encoded.ids.startswith(talk.ids[-1]) and not encoded.dropped
    assert encoded.respelled == ("message 1: the template writes its text as thoughts, and its thoughts nowhere",)
    assert talk.ask().ids == encoded.ids
    talk.messages[1] = json.loads(json.dumps(talk.messages[1]).replace(*CHANGES[changed]))
    assert not talk.ask().kept_turns and talk.shown() == talk.encoded.text and "think" not in talk.encoded.text


def test_thoughts_stay_away_from_a_template_that_never_writes_them(tmp_path):
    """Though it writes the text before a call as thoughts."""
    (tmp_path / "chat.jinja").write_text(HARMONY.replace("(m.content or m.thinking)", "m.content"))
    talk = Talk(tmp_path, False, str(tmp_path / "chat.jinja"))
    talk.ask(USER)
    said = "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
    talk.answer(THOUGHT + said + CALL, called_message(content="One moment."))
    assert "One moment." in talk.ask(TOOL).text
    assert not talk.encoded.kept_turns and talk.shown() == talk.encoded.text


CHANGES = {"text": ("One moment.", "Wait."), "call": ("Paris", "Rome")}


def test_another_call_is_another(tmp_path):
    """What a client changes of a call is in the prompt."""
    talk = Talk(tmp_path, True)
    talk.ask(USER)
    talk.answer(THOUGHT + CALL, called_message(**THINKING))
    talk.messages[-1] = json.loads(json.dumps(talk.messages[-1]).replace("Paris", "Rome"))
    assert "Rome" in talk.ask(TOOL).text and "Rome" in talk.shown() and not talk.encoded.kept_turns


def test_the_template_of_these_tests_is_in_the_manner_of_the_published_one():
    assert all(mark in HARMONY for mark in MARKS if mark not in ("<|constrain|>", "<|return|>"))
