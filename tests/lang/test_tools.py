"""Tools of clients without a front end and of programs: a scripted model calls, in the formats of many families."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from radixrt import (
    Branch,
    BudgetExceeded,
    Client,
    ProgramError,
    Sampling,
    SyncBranch,
    Tool,
    assistant,
    gen,
    program,
    trace,
    user,
)
from radixrt.client.local import LocalStack
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.messages import ChatPrompt, ToolCall, ToolsSegment
from radixrt.worker import setup
from tests.frontend.scripted import Model, Script, make_family, scripted

QUESTION = [{"role": "user", "content": "How warm is it in Oslo?"}]


def weather(city: str, days: int = 1) -> str:
    """Forecast the weather."""
    return f"{city}: {7 * days} degrees"


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Forecast the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALLS = {
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "llama": '{"name": "weather", "parameters": {"city": "Oslo"}}',
    "mistral_v11": '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Oslo"}',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Oslo"}<|tool_call_end|><|tool_calls_section_end|>',
    "harmony": '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}<|call|>',
    "qwen_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
}


@pytest.fixture(scope="module", params=CALLS)
def family(request, tmp_path_factory) -> Iterator[tuple[str, Model]]:
    with scripted(request.param, tmp_path_factory.mktemp(request.param)) as model:
        yield request.param, model


@pytest.fixture(scope="module")
def thinking(tmp_path_factory) -> Iterator[Model]:
    with scripted("thinking", tmp_path_factory.mktemp("thinking")) as model:
        yield model


def arguments(call: ToolCall) -> tuple[str, object]:
    return call.name, json.loads(call.arguments)


# ---------------------------------------------------------------- clients


@pytest.mark.parametrize("transport", ["zmq", "http"])
def test_a_client_gets_calls_parsed_as_http_does(family, transport):
    name, model = family
    with Client(model.router if transport == "zmq" else model.url) as client:
        model.says(CALLS[name])
        done = client.generate(ChatPrompt(QUESTION, [WEATHER]), Sampling(max_tokens=200))
        model.says(CALLS[name])
        *_, last = client.stream(ChatPrompt(QUESTION, [WEATHER]), Sampling(max_tokens=200))
    assert [arguments(call) for call in done.tool_calls] == [("weather", {"city": "Oslo"})]
    assert (done.content, done.reasoning) == ("", "")
    assert [arguments(call) for call in last.message.tool_calls] == [("weather", {"city": "Oslo"})]
    over_http = model.chat(CALLS[name], tools=[WEATHER]).choices[0].message
    assert [(c.function.name, c.function.arguments) for c in over_http.tool_calls] == [
        (call.name, call.arguments) for call in done.tool_calls
    ]


def test_a_local_client_gets_calls_as_well(tmp_path, monkeypatch):
    with scripted("hermes", tmp_path / "m") as model, Client(f"local:{tmp_path / 'm'}") as client:
        model.says("Let me see. " + CALLS["hermes"])
        done = client.generate(ChatPrompt(QUESTION, [WEATHER]), Sampling(max_tokens=200))
    assert done.content == "Let me see." and [call.name for call in done.tool_calls] == ["weather"]


def test_thoughts_are_apart(thinking):
    with Client(thinking.router) as client:
        thinking.says("<think>\nOslo is cold.\n</think>\n\nIt is cold.", "It is cold.", CALLS["hermes"])
        done = client.generate(QUESTION, Sampling(max_tokens=200))
        plain = client.generate(QUESTION, Sampling(max_tokens=200))
        untold = client.generate(QUESTION, Sampling(max_tokens=200))
    assert (done.content, done.reasoning.strip()) == ("It is cold.", "Oslo is cold.")
    assert done.text.startswith("<think>"), "the text is as the model wrote it"
    assert (plain.content, plain.reasoning, plain.tool_calls) == (plain.text, "", [])
    assert untold.content == untold.text and not untold.tool_calls, "without tools nothing is a call"


def test_what_was_parsed_goes_on_as_it_was_generated(family):
    """In the next prompt all that was generated is found again."""
    name, model = family
    with Client(model.router) as client:
        model.says(CALLS[name], "It is 7 degrees.")
        chat = [*QUESTION]
        done = client.generate(ChatPrompt(chat, [WEATHER]), Sampling(max_tokens=200))
        (call,) = done.tool_calls
        chat += [done.to_openai(), {"role": "tool", "content": "7", "tool_call_id": call.id, "name": call.name}]
        again = client.generate(ChatPrompt(chat, [WEATHER]), Sampling(max_tokens=200))
    assert again.usage.cached_tokens >= done.usage.prompt_tokens + done.usage.completion_tokens - 2


def test_an_invalid_tool_is_named(thinking):
    with Client(thinking.router) as client, pytest.raises(Exception, match=r"tools\[0\]\.function\.name"):
        client.generate(ChatPrompt(QUESTION, [{"type": "function", "function": {}}]), Sampling(max_tokens=5))


def test_a_strict_tool_has_a_grammar(thinking):
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    with Client(thinking.router) as client:
        thinking.says(CALLS["hermes"])
        done = client.generate(ChatPrompt(QUESTION, [strict]), Sampling(max_tokens=200))
        kind, form = thinking.grammar
    assert kind == "structural_tag" and '"weather' in str(form)
    assert [call.name for call in done.tool_calls] == ["weather"]


def test_each_choice_is_parsed(thinking):
    with Client(thinking.router) as client:
        thinking.says(CALLS["hermes"], CALLS["hermes"])
        both = client.generate_n(ChatPrompt(QUESTION, [WEATHER]), 2, Sampling(max_tokens=200))
    assert [[call.name for call in done.tool_calls] for done in both] == [["weather"], ["weather"]]


# ---------------------------------------------------------------- programs


@program
async def agent(s: Branch, tools: list) -> tuple[str, str]:
    s += user("How warm is it in Oslo?")
    value = await s.run_tools("answer", tools, max_tokens=200)
    s += user("Thanks.")
    s += assistant(gen("end", max_tokens=200))
    await s.wait()
    messages = await s.messages()
    assert [one["role"] for one in messages] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] and messages[1]["content"] is None
    return value.content, messages[2]["content"]


@pytest.mark.parametrize("transport", ["zmq", "http"])
def test_a_loop_calls_tools_until_there_is_no_call(family, transport):
    name, model = family
    final = "<|channel|>final<|message|>It is 7 degrees." if name == "harmony" else "It is 7 degrees."
    model.says(CALLS[name], final, final)
    with Client(model.router if transport == "zmq" else model.url) as client, trace() as traced:
        said = agent.run(client, [weather])
    assert said == ("It is 7 degrees.", "Oslo: 7 degrees")
    call, answer, end = (step.usage for step in traced.runs[0].steps if step.kind == "gen")
    reused = answer.cached_tokens - (call.prompt_tokens + call.completion_tokens - 2)
    assert reused >= 0, "the call has the ids that were generated"
    if name != "harmony":  # its last answer has an end that the template does not write again
        assert end.cached_tokens >= answer.prompt_tokens + answer.completion_tokens - 2


def test_a_program_gets_thoughts_apart(thinking):
    @program
    async def thinks(s: Branch) -> list:
        s += user("Is it cold?")
        s += assistant(gen("first", max_tokens=200))
        s += user("Is it?")
        s += assistant(gen("second", max_tokens=200, stream=True))
        return [await s.value("first"), await s.value("second")]

    thinking.says("<think>\nOslo is cold.\n</think>\n\nIt is cold.", "It is.")
    with Client(thinking.router) as client:
        first, second = thinks.run(client)
    assert (first.content, first.reasoning.strip(), second.content) == ("It is cold.", "Oslo is cold.", "It is.")
    assert second.usage.cached_tokens >= first.usage.prompt_tokens + first.usage.completion_tokens - 2


@pytest.fixture(scope="module")
def hermes(tmp_path_factory) -> Iterator[Model]:
    with scripted("hermes", tmp_path_factory.mktemp("hermes")) as model:
        yield model


@pytest.fixture
def client(hermes) -> Iterator[Client]:
    with Client(hermes.router) as client:
        yield client


def calls(*said: tuple[str, str]) -> str:
    return "".join(f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>\n' for name, text in said)


@dataclass
class Place:
    city: str


def results_of(client: Client, tools: list, **options) -> list[str]:
    """What a loop tells the model, by a plain program."""

    @program
    def plain(s: SyncBranch) -> list[str]:
        s += user("Go.")
        s.run_tools("answer", tools, max_tokens=400, **options)
        return [one["content"] for one in s.messages() if one["role"] == "tool"]

    return plain.run(client)


def test_calls_of_one_answer_are_made_at_once_and_appended_in_order(hermes, client):
    there = asyncio.Event()

    async def first(city: str) -> dict:
        await asyncio.wait_for(there.wait(), 5)
        return {"city": city}

    async def second(place: Place) -> str:
        there.set()
        return type(place).__name__ + place.city

    hermes.says(calls(("first", '{"city": "A"}'), ("second", '{"place": {"city": "B"}}')), "Done.")
    assert results_of(client, [first, second]) == ['{"city":"A"}', "PlaceB"]


def test_what_is_wrong_with_a_call_is_told_to_the_model(hermes, client):
    def broken(timeout: int = 0) -> None:
        raise LookupError(f"no luck in {timeout}")

    async def slow() -> None:
        await asyncio.sleep(60)

    hermes.says(
        calls(
            ("weather", '{"town": "Oslo"}'),
            ("broken", '{"timeout": 3}'),
            ("slow", "{}"),
            ("unknown", "{}"),
        ),
        "Done.",
    )
    told = results_of(client, [weather, broken, Tool(slow, timeout=0.05)])
    assert told[0].startswith("error: invalid arguments: Object ")
    assert told[1:3] == ["error: LookupError: no luck in 3", "error: TimeoutError: slow: no result in 0.05 seconds"]
    assert told[3] == "error: there is no tool 'unknown', only weather, broken, slow"


def test_rounds_are_bounded(hermes, client):
    hermes.says(*[CALLS["hermes"]] * 4)
    with pytest.raises(ProgramError, match="'answer': the model still calls tools after 2 rounds"):
        results_of(client, [weather], max_rounds=2)
    assert len(hermes.script.texts) == 1


def test_a_call_that_was_cut_is_not_made(hermes, client):
    @program
    async def cut(s: Branch) -> tuple[str, list[ToolCall]]:
        s += user("Go.")
        value = await s.run_tools("answer", [weather], max_tokens=len(CALLS["hermes"]) // 2)
        return value.finish, value.tool_calls

    hermes.says(CALLS["hermes"])
    finish, made = cut.run(client)
    assert finish == "length" and [call.name for call in made] == ["weather"]


def test_a_budget_ends_the_loop(hermes, client):
    @program
    async def bounded(s: Branch) -> None:
        s += user("Go.")
        with s.budget(seconds=0.2):
            await s.run_tools("answer", [Tool(asyncio.sleep, timeout=9)], max_tokens=200)

    hermes.says(calls(("sleep", '{"delay": 60}')))
    with pytest.raises(BudgetExceeded):
        bounded.run(client)


def test_tools_stay_in_the_chat_and_are_sent_once(hermes, client):
    @program
    async def asks(s: Branch) -> list:
        s += user("Go.")
        s += assistant(gen("first", max_tokens=200, tools=[weather]))
        one, other = s.fork(2)
        for branch, fields in ((one, {}), (other, {"tools": []})):
            branch += user("Again.")
            branch += assistant(gen("again", max_tokens=200, **fields))
        return [await s.value("first"), await one.value("again"), await other.value("again"), one, other]

    hermes.says(*[CALLS["hermes"]] * 3)
    first, again, without, one, other = asks.run(client)
    assert [len(value.tool_calls) for value in (first, again, without)] == [1, 1, 0]
    assert without.content == without.text and without.usage.prompt_tokens < again.usage.prompt_tokens
    declared = [
        sum(isinstance(segment, ToolsSegment) for segment in branch._speaker.history.transcript)
        for branch in (one, other)
    ]
    assert declared == [1, 2]


def test_a_server_that_keeps_no_states_gets_tools_and_calls_again(hermes, client, tmp_path, monkeypatch):
    make_family(tmp_path, "hermes")
    script = Script(vocab_size=512, num_pages=1 << 14)
    monkeypatch.setattr(setup, "make_runner", lambda config: script)
    names = {"model": str(tmp_path), "served_model_name": "m"}
    config = StackConfig(
        resolve(RouterConfig(**names, state_bytes=0)),
        WorkerConfig(**names, fake="0,0", jump_forward=False),
        FrontendConfig(),
    )
    texts = [CALLS["hermes"], "It is 7 degrees.", "Bye."]
    hermes.says(*texts)
    script.texts = hermes.script.texts.copy()
    with LocalStack(config) as stack, Client(stack.address) as other, trace() as traced:
        assert agent.run(other, [weather]) == agent.run(client, [weather])
    forgetful, usual = ([s.usage.prompt_tokens for s in run.steps if s.kind == "gen"] for run in traced.runs)
    assert forgetful == usual


def test_tools_of_a_gen_are_checked():
    def anything(*words: str) -> None: ...
    def opaque(place: Iterator) -> None: ...

    for tools, said in (
        (weather, "gen 'x': tools are several, not one"),
        (WEATHER, "gen 'x': tools are several, not one"),
        (["weather"], "gen 'x': a tool is a function or a dict in OpenAI's format, not str"),
        ([anything], r"gen 'x': tool anything: a model gives arguments by name, and cannot give \*words"),
        ([opaque], "gen 'x': no schema is known of the parameters of tool opaque"),
    ):
        with pytest.raises(TypeError, match=said):
            gen("x", tools=tools)


def test_tools_are_for_chats(client):
    @program
    async def text(s: Branch) -> None:
        s += "How warm is it? "
        s += gen("x", tools=[weather])

    with pytest.raises(ProgramError, match=r"tools are for chats: write assistant\(gen\('x', tools=\.\.\.\)\)"):
        text.run(client)
