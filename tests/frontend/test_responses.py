"""OpenAI's Responses API, by its own client: a scripted model says what a real one might."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from radixrt.formats.parsing import CallArguments, CallStart, Content, Reasoning
from radixrt.frontend.generate.logprobs import Tokens
from radixrt.frontend.http.errors import ApiError
from radixrt.frontend.responses.exchange import ResponseExchange
from radixrt.frontend.responses.history import messages_of
from radixrt.frontend.responses.items import page
from radixrt.frontend.responses.replies import ResponseReply
from radixrt.frontend.responses.schema import Create
from radixrt.frontend.responses.store import ResponseStore
from radixrt.messages import Error, Namespace, TokenLogprob, Usage
from tests.frontend.scripted import Model, scripted
from tests.frontend.test_sessions import odd, sequences

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "Of a city", "parameters": CITY}
TOOLS = [WEATHER, {"type": "function", "name": "time"}]
NAMED = {"type": "function", "name": "time"}
SH = {"type": "custom", "name": "shell", "description": "Runs a line", "format": {"type": "text"}}
READ = {"type": "function", "name": "read", "parameters": CITY | {"additionalProperties": False}}
FILES = {"type": "namespace", "name": "mcp__files", "description": "Files", "tools": [READ]}
ONLY_TIME = {"type": "allowed_tools", "mode": "auto", "tools": [NAMED]}
PARIS = '<tool_call>\n{"name": "weather", "arguments": {"city":  "Paris"}}\n</tool_call>'
ROME = PARIS.replace("Paris", "Rome")
LOOKUP = {"type": "tool_search_call", "call_id": "s", "arguments": {"query": "mill"}}
FOUND_FILES = {"type": "tool_search_output", "call_id": "s", "execution": None, "tools": [FILES]}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Iterator[Model]:
    with scripted("hermes", tmp_path_factory.mktemp("hermes"), api_key=("a:key-a", "b:key-b")) as model:
        yield model


@pytest.fixture(scope="module")
def thinking(tmp_path_factory) -> Iterator[Model]:
    with scripted("thinking", tmp_path_factory.mktemp("thinking")) as model:
        yield model


def ask(model: Model, *texts: str, key: str = "key-a", **fields: Any) -> Any:
    """The response when the model writes `texts` in odd tokens."""
    model.script.texts = deque(odd(model, text) for text in texts)
    model.script.samplings.clear()
    return model.client.with_options(api_key=key).responses.create(**({"model": "m", "input": "hello"} | fields))


def rendered(model: Model) -> list[dict[str, Any]]:
    """The chat of the latest request."""
    return model.answers[-1][1].messages


def rendered_tools(model: Model) -> list[dict[str, Any]]:
    return model.answers[-1][1].tools


def refused(model: Model, field: str, **fields: Any) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(model, **fields)
    assert caught.value.param == field, caught.value
    return caught.value


# ---------------------------------------------------------------- whole


def test_text(model):
    response = ask(model, "Hello to you.", instructions="Be kind.", metadata={"a": "b"}, max_output_tokens=100)
    assert response.output_text == "Hello to you." and response.status == "completed"
    (item,) = response.output
    assert (item.type, item.role, item.status, item.content[0].annotations) == ("message", "assistant", "completed", [])
    assert rendered(model) == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hello"}]
    assert (response.instructions, response.metadata, response.max_output_tokens) == ("Be kind.", {"a": "b"}, 100)
    assert response.error is None and response.incomplete_details is None and response.object == "response"
    usage = response.usage
    assert usage.output_tokens == len(odd(model, "Hello to you.")) + 1
    assert usage.input_tokens + usage.output_tokens == usage.total_tokens
    assert usage.input_tokens_details.cached_tokens >= 0 and usage.output_tokens_details.reasoning_tokens == 0
    again = ask(model, "Hello to you.", instructions="Be kind.")
    assert again.usage.input_tokens_details.cached_tokens == again.usage.input_tokens - 1


def test_cut_for_length(model):
    response = ask(model, "A long story about it.", max_output_tokens=4)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete" and response.usage.output_tokens == 4


def test_calls(model):
    response = ask(model, f"One moment.\n{PARIS}\n{ROME}", tools=TOOLS)
    message, *calls = response.output
    assert message.content[0].text == "One moment." and [c.type for c in calls] == ["function_call"] * 2
    assert [(c.name, c.arguments, c.status) for c in calls] == [
        ("weather", '{"city":  "Paris"}', "completed"), ("weather", '{"city":  "Rome"}', "completed")
    ]  # fmt: skip
    assert len({c.id for c in calls} | {c.call_id for c in calls}) == 4
    shown = model.answers[-1][1].tools
    assert shown[0] == {"type": "function", "function": {k: WEATHER[k] for k in ("name", "description", "parameters")}}
    one = ask(model, f"{PARIS}\n{ROME}", tools=TOOLS, parallel_tool_calls=False)
    assert len(one.output) == 1 and one.status == "completed"


@pytest.mark.parametrize(("choice", "names"), [("required", 2), ({"type": "function", "name": "weather"}, 1)])
def test_forced_calls(model, choice, names):
    pytest.importorskip("xgrammar")
    response = ask(model, PARIS, tools=TOOLS, tool_choice=choice)
    assert response.output[0].name == "weather"
    assert len(model.grammar[1]["format"]["tags"]) == names
    assert ask(model, PARIS, tools=TOOLS, tool_choice="none").output_text == PARIS


def test_some_of_the_tools(model):
    pytest.importorskip("xgrammar")
    call = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    response = ask(model, call, tools=TOOLS, tool_choice=ONLY_TIME)
    assert response.output[0].name == "time" and response.tool_choice.to_dict() == ONLY_TIME
    assert len(model.grammar[1]["format"]["tags"]) == 1
    assert len(rendered_tools(model)) == 2


def test_tools_are_strict_where_they_say_so(model):
    """Not by default, as at OpenAI: a grammar would hold a model to patterns and formats that were meant as hints."""
    pytest.importorskip("xgrammar")
    closed = CITY | {"additionalProperties": False}
    for strict, held in ((True, True), (False, False), (None, False)):
        ask(model, "Nothing to call.", tools=[WEATHER | {"parameters": closed, "strict": strict}])
        assert (model.grammar is not None) is held and ("city" in str(model.grammar)) is held
    ask(model, "Nothing to call.", tools=[WEATHER | {"parameters": closed}])
    assert model.grammar is None


def test_formats(model):
    pytest.importorskip("xgrammar")
    ask(model, "{}", text={"format": {"type": "json_object"}})
    assert model.grammar == ("json_schema", {"type": "object"})
    form = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
    response = ask(model, '{"city": "Paris"}', text={"format": form})
    assert model.grammar == ("json_schema", CITY) and response.text.format.name == "city"
    ask(model, "Hi.", text={"format": {"type": "text"}})
    assert model.grammar is None


def test_sampling(model):
    ask(model, "Hi.", temperature=0.25, top_p=0.5, max_output_tokens=7)
    (sampling,) = model.script.samplings
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.25, 0.5, 7)


# ---------------------------------------------------------------- streams


def test_a_stream_of_text(model):
    events = list(ask(model, "Well, hello.", stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"
    ]  # fmt: skip
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert len(kinds) == 8 + len(deltas) and len(deltas) > 3
    assert "".join(event.delta for event in deltas) == events[-4].text == events[-1].response.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert {event.item_id for event in deltas} == {events[2].item.id} == {events[-1].response.output[0].id}
    assert events[0].response.status == "in_progress" and events[0].response.output == []
    assert events[0].response.id == events[-1].response.id and events[-1].response.usage.output_tokens > 3
    cut = list(ask(model, "Well, hello.", stream=True, max_output_tokens=3))
    assert cut[-1].type == "response.incomplete" and cut[-2].item.status == "incomplete"


def test_a_stream_of_calls(model):
    events = list(ask(model, f"One moment.\n{PARIS}\n{ROME}", tools=TOOLS, stream=True))
    calls = [e for e in events if e.type.startswith("response.function_call_arguments")]
    done = [e for e in calls if e.type.endswith("done")]
    assert [(e.output_index, e.arguments) for e in done] == [(1, '{"city":  "Paris"}'), (2, '{"city":  "Rome"}')]
    for end in done:
        deltas = [e.delta for e in calls if e.output_index == end.output_index and e.type.endswith("delta")]
        assert "".join(deltas) == end.arguments and len(deltas) > 1
    added = [e.item for e in events if e.type == "response.output_item.added"]
    assert [item.type for item in added] == ["message", "function_call", "function_call"]
    finished = [e.item for e in events if e.type == "response.output_item.done"]
    assert finished == events[-1].response.output
    assert [item.id for item in added] == [item.id for item in finished]


def test_an_error_in_the_middle_of_a_stream(model, monkeypatch):
    """It is an event, the last one, and nothing is kept."""
    take, taken = ResponseExchange._take, []

    def failing(self: ResponseExchange, first: int, on_answer: Any, answer: Any) -> None:
        taken.append(answer)
        take(self, first, on_answer, Error(0, 503, "the worker was lost") if len(taken) == 4 else answer)

    monkeypatch.setattr(ResponseExchange, "_take", failing)
    events = list(ask(model, "It is a sunny day, and warm.", stream=True))
    assert (events[-1].type, events[-1].message, events[-1].code) == ("error", "the worker was lost", "503")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-2].type == "response.output_text.delta"
    monkeypatch.undo()
    refused(model, "previous_response_id", previous_response_id=events[0].response.id)


def test_the_helper_of_the_client(model):
    model.script.texts = deque([odd(model, f"One moment.\n{PARIS}")])
    client = model.client.with_options(api_key="key-a")
    with client.responses.stream(model="m", input="hello", tools=[WEATHER | {"strict": False}]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    assert final.output_text == "One moment." and final.output[1].name == "weather"


def test_thoughts(thinking):
    text = "<think>\nHm, let me see.\n</think>\n\nIt is so."
    response = ask(thinking, text)
    thought, message = response.output
    assert thought.type == "reasoning" and thought.content[0].text == "Hm, let me see." and thought.summary == []
    assert message.content[0].text == "It is so."
    tokens = response.usage.output_tokens_details.reasoning_tokens
    assert len(odd(thinking, text[: text.index("\n</think>")])) - 1 <= tokens < response.usage.output_tokens - 4
    events = list(ask(thinking, text, stream=True))
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds[:8] == ["response.created", "response.in_progress", "response.output_item.added",
                         "response.content_part.added", "response.reasoning_text.delta", "response.reasoning_text.done",
                         "response.content_part.done", "response.output_item.done"]  # fmt: skip
    assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "Hm, let me see."
    assert [e.output_index for e in events if e.type == "response.output_item.done"] == [0, 1]


def test_thinking_as_told(thinking):
    ask(thinking, "Hm.", reasoning={"effort": "none"})
    assert thinking.answers[-1][1].template_args["enable_thinking"] is False
    ask(thinking, "Hm.", reasoning={"effort": "low", "summary": "auto"})
    assert thinking.answers[-1][1].template_args == {
        "enable_thinking": True,
        "thinking": True,
        "reasoning_effort": "low",
    }


# ---------------------------------------------------------------- histories


@pytest.mark.parametrize("stream", [False, True])
def test_a_chain_needs_no_history(model, stream):
    """Each response names the one before; the prompts hit all of the turn before, to the last token computed."""

    def final(answer: Any) -> Any:
        return list(answer)[-1].response if stream else answer

    model.answers.clear()
    first = final(ask(model, f"Let me see.\n{PARIS}", tools=TOOLS, stream=stream, input=f"Paris? {stream}"))
    result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "sunny"}
    fields = {"tools": TOOLS, "stream": stream}
    second = final(ask(model, "It is sunny.", input=[result], previous_response_id=first.id, **fields))
    assert second.usage.input_tokens_details.cached_tokens == len(sequences(model)[0])
    third = final(ask(model, "Rain.", input="Tomorrow?", previous_response_id=second.id, **fields))
    assert third.usage.input_tokens_details.cached_tokens == len(sequences(model)[1])
    assert third.model_extra["radixrt"]["session"]["kept_turns"] == 2
    assert [m["role"] for m in rendered(model)] == ["user", "assistant", "tool", "assistant", "user"]
    assert third.previous_response_id == second.id
    other = final(ask(model, "Snow.", input="And then?", previous_response_id=second.id, **fields))
    assert other.usage.input_tokens_details.cached_tokens >= len(sequences(model)[1]), "a chain may fork"


def test_input_tokens_are_those_of_the_prompt(thinking):
    """Counted before they are sent: the same fields make the same prompt, history included."""

    def counted(**fields: Any) -> int:
        client = thinking.client.with_options(api_key="key-a")
        return client.responses.input_tokens.count(model="m", **fields).input_tokens

    items = [{"role": "user", "content": [{"type": "input_text", "text": "Paris, or Rome?"}]}]
    fields = {"input": items, "tools": TOOLS, "instructions": "Be brief.", "reasoning": {"effort": "low"}}
    first = ask(thinking, "Paris.", **fields)
    assert counted(**fields) == first.usage.input_tokens > counted(input=items)
    more = {"input": "Sure?", "previous_response_id": first.id}
    assert counted(**more) == ask(thinking, "Yes.", **more).usage.input_tokens > counted(input="Sure?")
    named = {"input": [{"type": "item_reference", "id": first.output[0].id}, *items]}
    assert counted(**named) == ask(thinking, "Yes.", **named).usage.input_tokens
    assert counted(input="x " * 9000) > 8192, "more than a prompt may have"
    for wrong, field in (({"input": [{"role": "wizard"}]}, "input[0].role"), ({"input": []}, "input")):
        with pytest.raises(openai.BadRequestError) as caught:
            counted(**wrong)
        assert caught.value.param == field


def test_instructions_are_not_carried_over(model):
    first = ask(model, "Yes, they are.", instructions="Be brief.")
    ask(model, "No.", previous_response_id=first.id, instructions="Be long.", input="Really?")
    assert [m["content"] for m in rendered(model)] == ["Be long.", "hello", "Yes, they are.", "Really?"]


def test_items_sent_back_are_the_same_conversation(thinking):
    """Without `previous_response_id` the output comes back as input, and hits as well."""
    thinking.answers.clear()
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Paris?"}]}]
    first = ask(thinking, f"<think>\nHm.\n</think>\n\nLet me see. {PARIS}", tools=TOOLS, input=items, store=False)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    items += [item.to_dict() for item in first.output]
    items.append({"type": "function_call_output", "call_id": first.output[-1].call_id,
                  "output": [{"type": "input_text", "text": "sunny"}]})  # fmt: skip
    second = ask(thinking, "Sunny.", tools=TOOLS, input=items)
    assert rendered(thinking)[1] == thinking.answers[0][2]
    assert second.usage.input_tokens_details.cached_tokens == len(sequences(thinking)[0])


def test_items_become_messages():
    def text(role: str, words: str) -> dict[str, Any]:
        return {"role": role, "content": words}

    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "x"}
    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    hidden = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "s"}]}
    made = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    both = {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}
    found = messages_of([text("developer", "d"), both, hidden, thought, text("assistant", "a"), call, output,
                         text("assistant", "b"), text("assistant", "c")])  # fmt: skip
    assert found == [
        text("system", "d"),
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
        text("assistant", "b"),
        text("assistant", "c"),
    ]
    before = [{"role": "assistant", "content": None, "tool_calls": [made]}]
    assert messages_of([output], before) == found[3:4]
    with pytest.raises(ApiError, match=r"input\[0\].call_id"):
        messages_of([output])


# ---------------------------------------------------------------- items of tools that OpenAI runs

WORDS = {"role": "user", "content": "go on"}
NAMED_IMAGE = "[image: this model reads text only]"
SHELL = {"type": "exec", "command": ["ls"], "env": {}, "user": None}
RAN = [{"stdout": "a.py\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}]
PATCH = {"type": "delete_file", "path": "a.py"}
SEARCH = {"type": "search", "query": "mill", "queries": ["mill"]}
FOUND = {"file_id": "f", "filename": "a.md", "text": "4817", "score": 0.5, "attributes": None}
ASKED = {"type": "mcp_approval_request", "id": "m1", "server_label": "s", "name": "roll", "arguments": "{}"}
ROLLED = {"type": "mcp_call", "id": "m2", "server_label": "s", "name": "roll", "arguments": '{"n": 2}'}


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "id": "i1", "status": "completed"} | fields


CODE = item("code_interpreter_call", code="1+1", container_id="k", outputs=[{"type": "logs", "logs": "2"}])


@pytest.mark.parametrize(
    ("items", "name", "arguments", "result"),
    [
        ([item("custom_tool_call", call_id="c", name="sh", input='ls "é"'),
          {"type": "custom_tool_call_output", "call_id": "c", "output": "a.py"}], "sh", {"input": 'ls "é"'}, "a.py"),
        ([item("custom_tool_call", call_id="c", name="sh", input="ls"), {"type": "custom_tool_call_output",
          "call_id": "c", "output": [{"type": "input_text", "text": "a.py"}]}], "sh", {"input": "ls"}, "a.py"),
        ([item("local_shell_call", call_id="c", action=SHELL), item("local_shell_call_output", id="c", output="a")],
         "local_shell", {"type": "exec", "command": ["ls"], "env": {}}, "a"),
        ([item("local_shell_call", call_id="c", id="lsh_1", action=SHELL),
          item("local_shell_call_output", id="lsh_1", output="a")],
         "local_shell", {"type": "exec", "command": ["ls"], "env": {}}, "a"),
        ([item("local_shell_call", call_id="c", action=SHELL),
          {"type": "function_call_output", "call_id": "c", "output": "a"}],
         "local_shell", {"type": "exec", "command": ["ls"], "env": {}}, "a"),
        ([item("shell_call", call_id="c", action={"commands": ["ls"], "timeout_ms": None}),
          item("shell_call_output", call_id="c", output=RAN)], "shell", {"commands": ["ls"]}, RAN),
        ([item("apply_patch_call", call_id="c", operation=PATCH),
          item("apply_patch_call_output", call_id="c", status="failed", output="no such file")],
         "apply_patch", PATCH, "failed: no such file"),
        ([item("apply_patch_call", call_id="c", operation=PATCH), item("apply_patch_call_output", call_id="c")],
         "apply_patch", PATCH, "completed"),
        ([item("program", call_id="c", code="f()", fingerprint="x"), item("program_output", call_id="c", result="3")],
         "program", {"code": "f()"}, "3"),
        ([item("web_search_call", action=SEARCH | {"sources": [{"type": "url", "url": "http://m"}]})],
         "web_search", SEARCH, [{"type": "url", "url": "http://m"}]),
        ([item("file_search_call", queries=["mill"], results=[FOUND])],
         "file_search", {"queries": ["mill"]}, [{k: v for k, v in FOUND.items() if v is not None}]),
        ([CODE], "code_interpreter", {"code": "1+1"}, "2"),
        ([CODE | {"outputs": []}], "code_interpreter", {"code": "1+1"}, ""),
        ([ROLLED | {"output": "7"}], "roll", {"n": 2}, "7"),
        ([CODE | {"outputs": [*CODE["outputs"], {"type": "image", "url": "x"}]}],
         "code_interpreter", {"code": "1+1"}, "2" + NAMED_IMAGE),
        ([item("image_generation_call", result="aGk=", revised_prompt="A mill")],
         "image_generation", {"prompt": "A mill"}, NAMED_IMAGE),
        ([ROLLED | {"error": "it fell"}], "roll", {"n": 2}, "Error: it fell"),
        ([ROLLED | {"error": {"type": "http_error", "code": 500, "message": "down"}}], "roll", {"n": 2}, "Error: down"),
        ([ROLLED | {"error": {"type": "mcp_tool_execution_error", "content": [{"text": "x"}]}}],
         "roll", {"n": 2}, 'Error: [{"text": "x"}]'),
        ([ASKED, {"type": "mcp_approval_response", "approval_request_id": "m1", "approve": True},
          ROLLED | {"approval_request_id": "m1", "output": "7"}], "roll", {"n": 2}, "7"),
        ([ASKED, {"type": "mcp_approval_response", "approval_request_id": "m1", "approve": False, "reason": "no"}],
         "roll", {}, "Error: the call was not approved: no"),
    ],
)  # fmt: skip
def test_calls_of_a_conversation_begun_elsewhere(model, items, name, arguments, result):
    """As a call and its result, which go back to the server as any others."""
    first = ask(model, "So it is.", input=[WORDS, *items, WORDS])
    user, answer, told, again = rendered(model)
    (call,) = answer["tool_calls"]
    assert user == again == WORDS and answer["content"] is None
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (name, arguments)
    assert (told["role"], told["tool_call_id"]) == ("tool", call["id"])
    assert (json.loads(told["content"]) if isinstance(result, list) else told["content"]) == result
    ask(model, "Yes.", input=[WORDS], previous_response_id=first.id)
    assert rendered(model)[:4] == [user, answer, told, again]


IMAGE, NO_IMAGE = {"type": "input_image", "image_url": "x"}, {"type": "text", "text": NAMED_IMAGE}
FILE, NO_FILE = {"type": "input_file", "file_id": "f"}, {"type": "text", "text": "[file: this model reads text only]"}
VIEWED = {"type": "function_call_output", "call_id": "c", "output": [IMAGE]}
VIEW = item("function_call", call_id="c", name="view_image", arguments="{}")


@pytest.mark.parametrize(
    ("added", "shown"),
    [
        ([VIEWED], [NAMED_IMAGE]),
        ([VIEWED | {"output": [{"type": "input_text", "text": "x"}, IMAGE, FILE]}],
         [[{"type": "text", "text": "x"}, NO_IMAGE, NO_FILE]]),
        ([VIEWED | {"output": "x"}, {"role": "user", "content": [IMAGE]}], ["x", NAMED_IMAGE]),
        ([VIEWED | {"output": "x"}, {"role": "user", "content": [FILE]}, WORDS], ["x", NO_FILE["text"], "go on"]),
    ],
)  # fmt: skip
def test_images_that_a_tool_has_read_are_named_in_their_place(model, added, shown):
    """So the session goes on, also from where it is stored; a user's own question is refused."""
    asked = {"role": "user", "content": [IMAGE]}
    first = ask(model, "So it is.", input=[asked, VIEW, *added])
    told = rendered(model)
    assert [told[0]["content"], *(message["content"] for message in told[2:])] == [NAMED_IMAGE, *shown]
    again = ask(model, "Yes.", input=[WORDS], previous_response_id=first.id)
    assert rendered(model)[: len(told)] == told
    assert again.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
    refused(model, "input[0].content[0].type", input=[asked], previous_response_id=first.id)


@pytest.mark.parametrize(
    "left",
    [
        item("web_search_call", action=SEARCH),
        item("web_search_call"),
        item("file_search_call", queries=["mill"], results=None),
        CODE | {"outputs": None},
        CODE | {"code": None},
        ROLLED | {"output": None, "error": None},
        ASKED,
        item("mcp_list_tools", server_label="s", tools=[{"name": "roll", "input_schema": {}}]),
        item("image_generation_call", status="failed", result=None),
        item("tool_search_call", arguments={"paths": ["a"]}),
        item("tool_search_output", tools=[WEATHER], execution="server"),
    ],
)
def test_items_that_carry_nothing_are_left_out(thinking, left):
    """Also from within an answer, which stays one."""
    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"role": "assistant", "content": "It is so."}
    ask(thinking, "Yes.", input=[WORDS, thought, left, thought, said, WORDS])
    assert rendered(thinking) == [WORDS, {"role": "assistant", "content": "It is so.", "reasoning_content": "hmhm"},
                                  WORDS]  # fmt: skip


def test_each_call_has_an_id_of_its_own(model):
    """Of nine digits, over the turns of a chain as well."""
    first = ask(model, "Yes.", input=[WORDS, CODE, CODE, WORDS])
    ask(model, "Yes.", input=[WORDS, CODE, WORDS], previous_response_id=first.id)
    ids = [call["id"] for message in rendered(model) for call in message.get("tool_calls", ())]
    assert len({*ids}) == 3 and all(len(id) == 9 and id.isdecimal() for id in ids)
    results = [message["tool_call_id"] for message in rendered(model) if message["role"] == "tool"]
    assert results == ids


def test_an_answer_with_calls_of_several_kinds(model):
    call = {"type": "function_call", "call_id": "f", "name": "time", "arguments": "{}"}
    custom = item("custom_tool_call", call_id="c", name="sh", input="ls")
    outputs = [{"type": "custom_tool_call_output", "call_id": "c", "output": "a.py"},
               {"type": "function_call_output", "call_id": "f", "output": "noon"}]  # fmt: skip
    said = {"role": "assistant", "content": "Let me see."}
    ask(model, "Yes.", input=[WORDS, said, call, custom, *outputs])
    _, answer, one, other = rendered(model)
    assert answer["content"] == "Let me see." and [c["id"] for c in answer["tool_calls"]] == ["f", "c"]
    assert (one["content"], other["content"]) == ("a.py", "noon")


def told(items: list[dict[str, Any]]) -> list[Any]:
    """The messages of items in short: a call by its name, a result by the name of its call and what it is."""
    names, found = {}, []
    for message in messages_of(items):
        calls = message.get("tool_calls", [])
        names |= {call["id"]: call["function"]["name"] for call in calls}
        if message["role"] == "tool":
            found.append((names[message["tool_call_id"]], message["content"]))
        else:
            said = [message[name] for name in ("reasoning_content", "content") if message.get(name)]
            found.append([*said, *(call["function"]["name"] for call in calls)])
    return found


A, B = [{"type": "function_call", "call_id": name, "name": name, "arguments": "{}"} for name in "AB"]
RESULT_A, RESULT_B = [{"type": "function_call_output", "call_id": name, "output": name.lower()} for name in "AB"]
M = {"type": "mcp_call", "id": "m2", "server_label": "s", "name": "M", "arguments": "{}", "output": "m"}
N = M | {"id": "m3", "name": "N", "output": "n"}
SAID = {"role": "assistant", "content": "Let me see."}
THOUGHT = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
TOLD_A, TOLD_B, TOLD_M, TOLD_N = (("A", "a"), ("B", "b"), ("M", "m"), ("N", "n"))


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([A, M, B, RESULT_A, RESULT_B], [["M"], TOLD_M, ["A", "B"], TOLD_A, TOLD_B]),
        ([A, M, RESULT_A], [["M"], TOLD_M, ["A"], TOLD_A]),
        ([A, M, N, B, RESULT_B, RESULT_A], [["M"], TOLD_M, ["N"], TOLD_N, ["A", "B"], TOLD_B, TOLD_A]),
        ([A, M, B, N, RESULT_A, RESULT_B], [["M"], TOLD_M, ["N"], TOLD_N, ["A", "B"], TOLD_A, TOLD_B]),
        ([THOUGHT, SAID, A, M, N, RESULT_A],
         [["hm", "Let me see.", "M"], TOLD_M, ["N"], TOLD_N, ["A"], TOLD_A]),
        ([A, M, SAID, SAID, B, RESULT_A, RESULT_B],
         [["M"], TOLD_M, ["Let me see.Let me see.", "A", "B"], TOLD_A, TOLD_B]),
        ([A, M, THOUGHT, B, RESULT_A, RESULT_B], [["M"], TOLD_M, ["hm", "A", "B"], TOLD_A, TOLD_B]),
        ([A, B, RESULT_A, M, RESULT_B], [["M"], TOLD_M, ["A", "B"], TOLD_A, TOLD_B]),
        ([A, ASKED, RESULT_A, M], [["A"], TOLD_A, ["M"], TOLD_M]),
        ([A, RESULT_A, M, B, RESULT_B], [["A"], TOLD_A, ["M"], TOLD_M, ["B"], TOLD_B]),
        ([A, RESULT_A, B, M, RESULT_B], [["A"], TOLD_A, ["M"], TOLD_M, ["B"], TOLD_B]),
        ([SAID, M, N, A, RESULT_A], [["Let me see.", "M"], TOLD_M, ["N"], TOLD_N, ["A"], TOLD_A]),
        ([A, RESULT_A, B, RESULT_B], [["A"], TOLD_A, ["B"], TOLD_B]),
        ([A, B, RESULT_B, RESULT_A], [["A", "B"], TOLD_B, TOLD_A]),
        ([B, A, RESULT_A, SAID, M], [["B", "A"], TOLD_A, ["Let me see.", "M"], TOLD_M]),
        ([A, WORDS, M], [["A"], ["go on"], ["M"], TOLD_M]),
    ],
)  # fmt: skip
def test_a_call_with_its_result_goes_before_calls_that_wait_for_theirs(items, expected):
    """So that results follow the answer that asked for them."""
    assert told([WORDS, *items, WORDS]) == [["go on"], *expected, ["go on"]]


def test_ids_of_calls_are_not_those_that_a_client_gave():
    """Before, later, in a turn before; as many are taken as there are."""

    def call(number: int) -> list[dict[str, Any]]:
        return [A | {"call_id": f"{number:09}"}, RESULT_A | {"call_id": f"{number:09}"}]

    def ids(messages: list[dict[str, Any]]) -> list[str]:
        return [call["id"] for message in messages for call in message.get("tool_calls", ())]

    first = messages_of([*call(2), M, *call(0), N, *call(4), *call(5)])
    assert ids(first) == [f"{n:09}" for n in (2, 3, 0, 6, 4, 5)]
    assert ids(messages_of([M, M], first)) == ["000000012", "000000014"]
    assert ids(messages_of([M, M], messages_of(call(2)))) == ["000000003", "000000004"]
    assert ids(messages_of([M, M, *call(0), *call(1), *call(2)]))[:2] == ["000000003", "000000004"]


NEVER = {"type": "mcp_approval_response", "approval_request_id": "m1", "approve": True}


@pytest.mark.parametrize(
    "items",
    [
        [NEVER, M | {"approval_request_id": "m1"}],
        [NEVER, M | {"approval_request_id": None}],
        [NEVER, M],
        [NEVER, M | {"approval_request_id": ["m1"]}],
        [NEVER, NEVER, M],
        [NEVER, M, NEVER],
        [NEVER, M, ASKED, NEVER],
        [NEVER, NEVER | {"approve": False}, M],
        [NEVER, M | {"output": None}, M],
    ],
)
def test_a_call_that_was_approved_needs_no_id_of_the_approval(items):
    assert told([ASKED, *items]) == [["M"], TOLD_M]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (SAID, [["Let me see."]]),
        (THOUGHT, [["hm"]]),
        (THOUGHT | {"content": None, "encrypted_content": "x"}, []),
        (A, [["A"]]),
        (M | {"output": None}, []),
        (item("program", call_id="c", code="f()"), [["program"]]),
    ],
)
def test_an_approval_is_dropped_where_the_model_has_gone_on(after, expected):
    """Without the call that was approved, which has come to nothing that is told."""
    assert told([ASKED, NEVER, after, WORDS]) == [*expected, ["go on"]]


def test_a_refusal_counts_once():
    no = NEVER | {"approve": False}
    assert told([A, ASKED, no, no, NEVER, RESULT_A]) == [["roll"], ("roll", "Error: the call was not approved"), ["A"],
                                                         TOLD_A]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "items"),
    [
        ("[0].type", [item("computer_call", call_id="c", action={"type": "click", "x": 1, "y": 2})]),
        ("[0].output", [{"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}}]),
        ("[0].outputs[1].type", [CODE | {"outputs": [*CODE["outputs"], {"type": "files", "files": []}]}]),
        ("[0].outputs", [CODE | {"outputs": "2"}]),
        ("[0].action", [item("web_search_call", action="mill")]),
        ("[0].action.sources", [item("web_search_call", action=SEARCH | {"sources": ["x"]})]),
        ("[0].results", [item("file_search_call", queries=[], results={})]),
        ("[0].output", [ROLLED | {"output": 7}]),
        ("[0].encrypted_content", [{"type": "compaction", "encrypted_content": "x"}]),
        ("[0].tools", [{"type": "additional_tools", "role": "developer", "tools": [WEATHER]}]),
        ("[0].call_id", [item("tool_search_output", tools=[WEATHER], execution="client")]),
        ("[0].call_id", [item("tool_search_call", arguments={}, execution="client")]),
        ("[1].tools", [LOOKUP, FOUND_FILES | {"tools": None}]),
        ("[1].tools[0].name", [LOOKUP, FOUND_FILES | {"tools": [{"type": "function", "name": ""}]}]),
        ("[1].tools[0].type", [LOOKUP, FOUND_FILES | {"tools": [{"type": "telepathy"}]}]),
        ("[1].tools[1].tools[0].parameters", [LOOKUP, FOUND_FILES | {
            "tools": [WEATHER, FILES | {"tools": [READ | {"parameters": "x"}]}]}]),
        ("[0].type", [{"type": "configuration_update", "reasoning": {"effort": "low"}}]),
        ("[0].type", [{"type": "compaction_trigger"}]),
        ("[0].input", [item("custom_tool_call", call_id="c", name="sh", input={"a": 1})]),
        ("[0].call_id", [item("custom_tool_call", name="sh", input="ls")]),
        ("[0].name", [item("custom_tool_call", call_id="c", name="", input="ls")]),
        ("[0].call_id", [{"type": "custom_tool_call_output", "call_id": "c", "output": "x"}]),
        ("[1].output[0].type", [item("custom_tool_call", call_id="c", name="sh", input="ls"), {
            "type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "telepathy"}]}]),
        ("[0].action", [item("shell_call", call_id="c", action="ls")]),
        ("[1].output", [item("shell_call", call_id="c", action={"commands": []}),
                        item("shell_call_output", call_id="c", output="x")]),
        ("[1].call_id", [item("shell_call", call_id="c", action={"commands": []}),
                         item("shell_call_output", call_id="i1", output=RAN)]),
        ("[0].operation", [item("apply_patch_call", call_id="c")]),
        ("[1].approve", [ASKED, NEVER]),
        ("[1].approve", [ASKED, NEVER, item("mcp_list_tools", server_label="s", tools=[])]),
        ("[2].approve", [ASKED, ASKED | {"id": "m0"}, NEVER, NEVER | {"approval_request_id": "m0", "approve": False}]),
        ("[4].approve", [ASKED, ASKED | {"id": "m0"}, NEVER | {"approval_request_id": "m0"}, ROLLED, NEVER]),
        ("[1].approve", [ASKED, NEVER | {"approve": "yes"}]),
        ("[0].approval_request_id", [NEVER]),
        ("[1].approval_request_id", [ASKED | {"id": "None"}, {"type": NEVER["type"], "approve": True}]),
        ("[1].approval_request_id", [ASKED, NEVER | {"approval_request_id": ["m1"]}]),
        ("[0].id", [ASKED | {"id": 1}]),
    ],
)  # fmt: skip
def test_items_that_cannot_be_told_are_refused(model, field, items):
    refused(model, f"input{field}", input=[*items, WORDS])


def test_items_nested_too_deeply(model):
    """Python 3.12 reads more within each other than 3.11 does, and than its own functions walk through."""
    for depth, field in ((600, "input[0]"), (100_000, "input.action.commands")):
        call = json.dumps(item("shell_call", call_id="c", action={"commands": 0}))
        text = f'{{"model": "m", "input": [{call.replace("0", "[" * depth + "]" * depth)}, {json.dumps(WORDS)}]}}'
        model.says("Yes.")
        answer = httpx.post(model.url + "/v1/responses", content=text, headers={"x-api-key": "key-a"})
        assert answer.status_code == 400 or (answer.status_code, depth) == (200, 600), answer.text
        assert answer.status_code == 200 or answer.json()["error"]["param"] == field
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "[" * 2000}
    assert ask(model, "Yes.", input=[call, WORDS]).output_text == "Yes.", "a model may have written it"


# ---------------------------------------------------------------- what is kept


def test_what_a_response_answered_to(model):
    """Of all its chain, by pages; given again it is the same prompt."""
    said = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    first = ask(model, f"Hm.\n{PARIS}", input=said, tools=TOOLS)
    call = first.output[1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    last = ask(model, "Bye.", input=[result], previous_response_id=first.id, tools=TOOLS)
    prompt = rendered(model)
    items = model.client.with_options(api_key="key-a").responses.input_items
    found = items.list(last.id, order="asc").data
    assert [(m.role, m.content[0].type, m.content[0].text) for m in found[:3]] == [
        ("system", "input_text", "Be brief."), ("user", "input_text", "Hello"), ("assistant", "output_text", "Hm.")
    ]  # fmt: skip
    assert (found[3].call_id, found[3].name, found[3].arguments) == (call.call_id, call.name, call.arguments)
    assert (found[4].call_id, found[4].output) == (call.call_id, "sunny")
    assert len({item.id for item in found}) == 5 and all(item.status == "completed" for item in found)
    assert [*items.list(last.id)] == found[::-1] == [*items.list(last.id, limit=2)], "page by page"
    assert items.list(last.id, limit=2, after=found[3].id).data == found[1:3][::-1]
    ask(model, "Bye.", input=[item.model_dump(exclude={"id", "status"}) for item in found], tools=TOOLS)
    assert rendered(model) == prompt
    for query in ({"limit": 0}, {"limit": 101}, {"limit": "9" * 5000}, {"order": "up"}, {"after": "msg_1"}):
        with pytest.raises(openai.BadRequestError, match=next(iter(query))):
            items.list(last.id, **query)
    with pytest.raises(openai.NotFoundError):
        items.list("resp_0")


def test_items_of_thoughts():
    message = {"role": "assistant", "content": None, "reasoning_content": "Hm", "tool_calls": []}
    found = page("r", [message, {"role": "user", "content": [{"type": "text", "text": "a"}] * 2}], {"order": "asc"})
    thoughts, said = found["data"]
    assert (thoughts["type"], thoughts["content"][0]["text"], len(said["content"])) == ("reasoning", "Hm", 2)
    assert page("r", [], {})["first_id"] is None


def test_get_and_delete(model):
    client = model.client.with_options(api_key="key-a")
    made = ask(model, "Keep this for me.")
    assert client.responses.retrieve(made.id) == made
    stranger = model.client.with_options(api_key="key-b")
    for gone in (lambda: stranger.responses.retrieve(made.id), lambda: stranger.responses.delete(made.id)):
        with pytest.raises(openai.NotFoundError):
            gone()
    child = ask(model, "I stay.", previous_response_id=made.id)
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)
    refused(model, "previous_response_id", previous_response_id=made.id)
    ask(model, "Go on.", previous_response_id=child.id)
    assert [m["content"] for m in rendered(model)] == ["hello", "Keep this for me.", "hello", "I stay.", "hello"]


def test_a_response_of_another_is_unknown(model):
    made = ask(model, "Mine.", extra_body={"cache_salt": "s"})
    unknown = refused(model, "previous_response_id", previous_response_id="resp_none")
    for key, salt in (("key-b", "s"), ("key-b", ""), ("key-a", ""), ("key-a", "t")):
        fields = {"key": key, "extra_body": {"cache_salt": salt}, "previous_response_id": made.id}
        error = refused(model, "previous_response_id", **fields)
        assert error.message.replace(made.id, "resp_none") == unknown.message and error.code == unknown.code
    ask(model, "Yes.", previous_response_id=made.id, extra_body={"cache_salt": "s"})


def test_not_stored(model):
    made = ask(model, "Forget what I say.", store=False)
    assert made.store is False
    refused(model, "previous_response_id", previous_response_id=made.id)


def test_the_store_is_bounded():
    store = ResponseStore(10_000)
    said = {"role": "user", "content": "x" * 1000}
    for i in range(100):
        store.put(Namespace("a"), f"a{i}", b"body", (), [said])
        assert store.num_bytes <= 10_000
    assert store.get(Namespace("a"), "a99") and not store.get(Namespace("a"), "a80")
    assert not store.get(Namespace("b"), "a99")
    assert [m["content"] for m in store.get(Namespace("a"), "a99").messages] == ["x" * 1000]
    store.get(Namespace("a"), "a95")
    for i in range(100, 107):
        store.put(Namespace("a"), f"a{i}", b"body", (), [said])
    assert store.get(Namespace("a"), "a95") and not store.get(Namespace("a"), "a96"), "what is used stays"


def test_a_tenant_that_fills_the_store_loses_his_own():
    """However many salts he uses, and however long the others have been quiet."""
    store = ResponseStore(20_000)
    said = {"role": "user", "content": "x" * 1000}
    quiet = [(Namespace(tenant, salt=f"{salt}"), f"{tenant}{salt}") for tenant in "bc" for salt in range(2)]
    for namespace, response_id in quiet:
        store.put(namespace, response_id, b"", (), [said])
    for i in range(100):
        store.put(Namespace("a", salt=f"salt{i}"), f"a{i}", b"", (), [said])
        assert store.num_bytes <= 20_000
    assert all(store.get(*name) for name in quiet)
    newest, older, oldest = (Namespace("a", salt=f"salt{i}") for i in (99, 80, 0))
    assert store.get(newest, "a99") and not store.get(older, "a80")
    for other in (oldest, Namespace("a"), Namespace("b", salt="salt99")):
        assert not store.get(other, "a99"), "of another namespace"
    store.put(Namespace("d"), "huge", b"y" * 30_000, (), [said])
    assert all(store.get(*name) for name in quiet) and not store.get(Namespace("d"), "huge"), "too large for the store"
    for i in range(85, 100):
        store.delete(Namespace("a", salt=f"salt{i}"), f"a{i}")
    for name in quiet:
        assert store.delete(*name)
    assert store.num_bytes == 0


def test_a_chain_costs_its_turns_once():
    store = ResponseStore(1 << 20)
    turns: tuple = ()
    for i in range(20):
        store.put(Namespace("a"), f"r{i}", b"", turns, [{"role": "user", "content": "x" * 1000}])
        turns = store.get(Namespace("a"), f"r{i}").turns
    assert 20_000 < store.num_bytes < 45_000 and len(turns) == 20
    for i in range(19):
        assert store.delete(Namespace("a"), f"r{i}")
    assert store.num_bytes > 20_000, "the last one holds all of its chain"
    assert store.delete(Namespace("a"), "r19") and store.num_bytes == 0 and not store.delete(Namespace("a"), "r19")


# ---------------------------------------------------------------- items by their ids


def test_items_that_are_named_stand_for_themselves(model):
    """A call, its result, and an answer, from two responses: the chat is that of the items sent whole."""
    called = ask(model, "Let me see. " + PARIS, tools=TOOLS)
    text, call = called.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    hello, thanks = ({"role": "user", "content": content} for content in ("hello", "thanks"))
    answered = ask(model, "It rains.", tools=TOOLS, input=[hello, text.to_dict(), call.to_dict(), result])
    whole = [hello, text.to_dict(), call.to_dict(), result, answered.output[0].to_dict(), thanks]
    ask(model, "Bye.", tools=TOOLS, input=whole)
    expected, hits = rendered(model), model.answers[-1][0].prompt.ids
    named = [{"type": "item_reference", "id": item.id} for item in (text, call)] + [{"id": answered.output[0].id}]
    ask(model, "Bye.", tools=TOOLS, input=[hello, *named[:2], result, named[2], thanks])
    assert rendered(model) == expected and model.answers[-1][0].prompt.ids == hits
    assert expected[1]["tool_calls"][0]["function"]["name"] == "weather"


def test_thoughts_by_their_id(thinking):
    first = ask(thinking, "<think>\nhm\n</think>\n\nHello.")
    thought, message = first.output
    again = [
        {"role": "user", "content": "hello"},
        {"id": thought.id},
        {"id": message.id},
        {"role": "user", "content": "so"},
    ]
    ask(thinking, "Fine.", input=again)
    (_, answer, _) = rendered(thinking)
    assert (answer["reasoning_content"].strip(), answer["content"]) == ("hm", "Hello.")


@pytest.mark.parametrize(
    "change", [lambda id: id[:-1] + "1", lambda id: id[:-1] + "x", lambda id: "rs" + id[3:], str.upper]
)
def test_an_item_that_is_not_there(model, change):
    (item,) = ask(model, "Hello.").output
    with pytest.raises(openai.NotFoundError) as caught:
        ask(model, input=[{"type": "item_reference", "id": change(item.id)}])
    assert caught.value.param == "input[0].id"


def test_an_item_of_another_tenant_or_one_not_kept_is_not_there(model):
    for fields, key in (({}, "key-b"), ({"store": False}, "key-a"), ({"extra_body": {"cache_salt": "s"}}, "key-a")):
        (item,) = ask(model, "Hello.", **fields).output
        with pytest.raises(openai.NotFoundError):
            ask(model, key=key, input=[{"type": "item_reference", "id": item.id}])
    with pytest.raises(openai.NotFoundError):
        ask(model, input=[{"type": "item_reference"}])


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("input", {"input": []}),
        ("input", {"input": None}),
        ("input", {"input": [{"type": "web_search_call", "id": "x"}], "instructions": "Be kind."}),
        ("input[0].type", {"input": [{"type": "telepathy_call", "id": "x"}]}),
        ("input[0].type", {"input": [{"type": ["message"]}]}),
        ("input[0].role", {"input": [{"role": "wizard", "content": "x"}]}),
        ("input[0].content", {"input": [{"role": "user"}]}),
        ("input[0].content[1].type", {"input": [{"role": "user", "content": [
            {"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": "x"}]}]}),
        ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": ["input_text"]}]}]}),
        ("input[0].call_id", {"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}),
        ("input[0].name", {"input": [{"type": "function_call", "call_id": "x", "arguments": "{}"}]}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tools[1].type", {"tools": [WEATHER, {"type": "mcp", "server_label": "x"}]}),
        ("tools[1].name", {"tools": [WEATHER, {"type": "namespace", "tools": [NAMED]}]}),
        ("tools[1].tools", {"tools": [WEATHER, {"type": "namespace", "name": "a"}]}),
        ("tools[1].tools[0].type", {"tools": [WEATHER, FILES | {"tools": [{"type": "web_search"}]}]}),
        ("tools[0].name", {"tools": [{"type": "custom"}]}),
        ("tools[0].format.type", {"tools": [SH | {"format": {"type": "json"}}]}),
        ("tools[0].format.type", {"tools": [SH | {"format": "text"}]}),
        ("tools[0].format.syntax", {"tools": [SH | {"format": {"type": "grammar", "definition": "x"}}]}),
        ("tools[0].format.syntax", {"tools": [SH | {"format": {"type": "grammar", "syntax": ["lark"]}}]}),
        ("tools[0].format.definition", {"tools": [SH | {"format": {"type": "grammar", "syntax": "lark"}}]}),
        ("tools[1].tools[0].format.definition", {"tools": [WEATHER, FILES | {"tools": [
            SH | {"format": {"type": "grammar", "syntax": "regex", "definition": 3}}]}]}),
        ("tools[0].description", {"tools": [SH | {"description": 3}]}),
        ("tools[0].description", {"tools": [SH | {"description": 3, "format": {
            "type": "grammar", "syntax": "lark", "definition": "x"}}]}),
        ("tools[1].tools[0].name", {"tools": [WEATHER, FILES | {"tools": [{"type": "function"}]}]}),
        ("tools[2].parameters", {"tools": [{"type": "web_search"}, FILES, NAMED | {"parameters": "x"}]}),
        ("tools[1].tools[1].name", {"tools": [WEATHER, FILES | {"tools": [NAMED, NAMED]}]}),
        ("tool_choice.name", {"tools": [FILES], "tool_choice": {"type": "function", "name": "read"}}),
        ("tools[0].name", {"tools": [{"type": "function", "name": ""}]}),
        ("tools[0].parameters.type", {"tools": [WEATHER | {"parameters": {"type": "string"}}]}),
        ("tools[1].name", {"tools": [WEATHER, WEATHER]}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice.name", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}),
        ("tool_choice.type", {"tools": TOOLS, "tool_choice": {"type": "file_search"}}),
        ("tool_choice.mode", {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": [NAMED]}}),
        ("tool_choice.tools[0].name", {"tools": [WEATHER], "tool_choice": ONLY_TIME}),
        ("text.format.type", {"text": {"format": {"type": "xml"}}}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
        ("text.verbosity", {"text": {"verbosity": "short"}}),
        ("truncation", {"truncation": "middle"}),
        ("background", {"background": True}),
        ("conversation", {"conversation": "conv_1"}),
        ("top_logprobs", {"top_logprobs": 300}),
        ("reasoning.effort", {"reasoning": {"effort": "extreme"}}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("temperature", {"temperature": -1}),
        ("top_p", {"top_p": 2}),
        ("input", {"input": "x " * 9000}),
        ("input", {"input": "x " * 9000, "truncation": "auto"}),
        ("metadata", {"metadata": {"a": 1}}),
    ],
)  # fmt: skip
def test_refusals_name_the_field(model, field, fields):
    for stream in (False, True):
        refused(model, field, stream=stream, **fields)


INCLUDE = ["message.output_text.logprobs"]


@pytest.mark.parametrize(("fields", "tops"), [({"include": INCLUDE}, 0), ({"include": INCLUDE, "top_logprobs": 1}, 1),
                                              ({"top_logprobs": 1}, 1)])  # fmt: skip
@pytest.mark.parametrize("text", ["plain enough, and naïve — 日本", f"Let me see.\n{PARIS}", "a < b, <tool> is none"])
def test_log_probabilities(model, text, fields, tops):
    """Of the tokens of the message, those of a call left out; the same in a stream."""
    whole = ask(model, text, tools=TOOLS, **fields)
    (part,) = whole.output[0].content
    told = part.logprobs
    assert b"".join(bytes(one.bytes) for one in told).strip() == part.text.encode()
    assert all(one.logprob < 0 and len(one.top_logprobs) == tops for one in told)
    assert whole.model_dump()["top_logprobs"] == fields.get("top_logprobs", 0)
    events = list(ask(model, text, tools=TOOLS, stream=True, **fields))
    deltas = [one for e in events if e.type == "response.output_text.delta" for one in e.logprobs]
    (done,) = (e for e in events if e.type == "response.output_text.done")
    opened = next(e for e in events if e.type == "response.content_part.added")
    streamed, closed, expected = ([(one.token, one.logprob) for one in each] for each in (deltas, done.logprobs, told))
    assert streamed == closed == expected
    assert opened.part.logprobs == [] and events[-1].response.output[0].content[0].logprobs == told


def test_log_probabilities_of_a_long_message(model):
    """Whose text comes all at once."""
    whole = ask(model, "to be, or not to be; " * 40 + "no", tools=TOOLS, include=INCLUDE).output[0].content[0]
    assert b"".join(bytes(one.bytes) for one in whole.logprobs).strip() == whole.text.encode()


def test_log_probabilities_around_what_is_not_shown(thinking):
    """A special token within a text is none of it."""
    thinking.says("One, <|endoftext|>two.")
    whole = thinking.client.responses.create(model="m", input="hello", include=INCLUDE).output[0].content[0]
    assert whole.text == "One, two." and b"".join(bytes(one.bytes) for one in whole.logprobs) == b"One, two."


def tokens_of(*texts: bytes) -> tuple[Tokens, list[TokenLogprob]]:
    return Tokens(SimpleNamespace(token_bytes=texts.__getitem__)), [TokenLogprob(i, 0.0) for i in range(len(texts))]


SAID = [  # tokens, texts, which tokens begin to say each
    ((b"Yes", b".\n\n", b"The"), ["Yes", ".", "\n\nThe"], [[0], [1], [2]]),
    ((b" (<", b"b", b">)"), [" (", "<b", ">)"], [[0], [1], [2]]),
    ((b"a", b".\n", b"x", b"x", b" y"), ["a", ".", "\nx", "x", " y"], [[0], [1], [2], [3], [4]]),
    ((b"</think>", b"h", b"i"), ["h", "i"], [[1], [2]]),
    ((b" they",), ["th", "ey"], [[0], []]),
    ((b"\xff", b"x", b"x"), ["\ufffdx", "x"], [[0, 1], [2]]),
    ((b"\xc3", b"\xaf", b""), ["\u00ef"], [[0, 1]]),
    ((b"say", b"<m>", b"{1}", b"on"), ["say", "other", "on"], [[0], [], [3]]),
    ((b"<aX>X<", b"X"), ["X"], [[1]]),
    ((b"a\n", b"\n"), ["a", "\n", "\n"], [[0], [], [1]]),
]


@pytest.mark.parametrize(("said", "texts", "told"), SAID)
def test_tokens_that_begin_to_say_a_text(said, texts, told):
    tokens, found = tokens_of(*said)
    tokens.add(found)
    assert [[one.token for one in tokens.take(text)] for text in texts] == told
    assert not Tokens(None).take("x")


@pytest.mark.parametrize(("said", "texts", "told"), [case for case in SAID if len(case[0]) == len(case[1])])
def test_tokens_that_come_with_their_texts(said, texts, told):
    tokens, found = tokens_of(*said)
    for token, text, expected in zip(found, texts, told, strict=True):
        tokens.add([token])
        assert [one.token for one in tokens.take(text)] == expected


def test_tokens_of_content_are_not_those_of_thoughts_that_say_the_same():
    tokens, found = tokens_of(b"<think>", b"Yes", b"</think>", b"{}", b"Yes")
    tokens.add(found)
    pieces = Reasoning("Yes"), CallStart(0, "id", "f"), CallArguments(0, "{}"), Content("Yes")
    assert [tokens.of(piece) for piece in pieces] == [None, None, None, [found[4]]]


def test_tokens_are_told_with_the_text_that_they_say():
    """A mark that has the text in it says none; half a character, or a half of what a parser held, comes later."""
    texts = {1: b"</think>", 2: b"h", 3: b"\xc3", 4: b"\xaf", 5: b" they", 6: b"<", 7: b"b", 8: b"<end>"}
    asked = Create(input="x")
    asked.follow([])
    asked.sampling({})
    tokenizer = SimpleNamespace(token_bytes=texts.get, token_text=repr, special_ids=frozenset())
    reply = ResponseReply("m", tokenizer, asked)

    def told(pieces: list[str], *tokens: int) -> list[list[str]]:
        found = [TokenLogprob(token, -1.0, []) for token in tokens]
        events = reply.add([Content(text) for text in pieces], found)
        return [[one["token"] for one in e["logprobs"]] for e in events if e["type"].endswith("text.delta")]

    assert told(["h"], 1, 2) == [["2"]]
    assert told([], 3) == [] and told(["ï"], 4) == [["3", "4"]]
    assert told(["th"], 5) == [["5"]] and told(["ey"]) == [[]]
    assert told([], 6) == [] and told(["<b"], 7) == [["6", "7"]]
    assert told(["h", "b"], 2, 7, 8) == [["2"], ["7"]]
    (part,) = reply.finish(False, Usage(), b"")[1]["output"][0]["content"]
    assert [one["token"] for one in part["logprobs"]] == ["2", "3", "4", "5", "6", "7", "2", "7"]


def test_log_probabilities_of_thoughts_are_not_told(thinking):
    answer = ask(thinking, "<think>\nto be or not\n</think>\n\nt is it", include=INCLUDE)
    thought, message = answer.output
    (part,) = message.content
    assert part.text == "t is it" and "not" in thought.content[0].text
    assert b"".join(bytes(one.bytes) for one in part.logprobs).strip() == b"t is it"
    assert ask(thinking, "<think>\nx\n</think>\n\ny").output[1].content[0].logprobs == []


def test_schemas_that_cannot_be_compiled(model):
    pytest.importorskip("xgrammar")
    bad = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
    form = {"type": "json_schema", "name": "x", "schema": bad}
    refused(model, "text.format.schema", text={"format": form})
    refused(model, "tools[0].parameters", tools=[WEATHER | {"parameters": bad, "strict": True}])


def test_harmless_fields(model):
    response = ask(
        model, "Hi.", user="u", prompt_cache_key="k", truncation="disabled", background=False, service_tier="auto",
        include=["reasoning.encrypted_content"], safety_identifier="s", reasoning={"summary": "auto"},
        text={"verbosity": "low"},
    )  # fmt: skip
    assert response.output_text == "Hi." and response.user == "u" and response.truncation == "disabled"
    assert ask(model, "Hi.", truncation="auto").truncation == "auto"


# ---------------------------------------------------------------- namespaces, and tools that OpenAI runs


READS = '<tool_call>\n{"name": "mcp__files__read", "arguments": {"city": "Paris"}}\n</tool_call>'
CODEX = [{"type": "web_search", "external_web_access": False}, FILES, WEATHER]
"""In the manner of Codex."""


def test_functions_of_a_namespace(model):
    response = ask(model, READS, tools=CODEX)
    assert [tool["function"]["name"] for tool in rendered_tools(model)] == ["mcp__files__read", "weather"]
    (call,) = response.output
    assert (call.type, call.name, call.namespace, call.arguments) == (
        "function_call", "read", "mcp__files", '{"city": "Paris"}',
    )  # fmt: skip
    assert response.to_dict()["tools"] == [FILES, WEATHER]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "mill"}
    for before in ({"previous_response_id": response.id}, {}):
        items = [output] if before else [{"role": "user", "content": "hello"}, call.to_dict(), output]
        again = ask(model, "Fine.", input=items, tools=CODEX, **before)
        assert again.output_text == "Fine."
        assert rendered(model)[1]["tool_calls"][0]["function"]["name"] == "mcp__files__read"
        assert again.usage.input_tokens_details.cached_tokens > response.usage.input_tokens


def test_functions_of_a_namespace_streamed(model):
    events = list(ask(model, READS + READS, tools=CODEX, stream=True))
    items = [e.item for e in events if e.type in ("response.output_item.added", "response.output_item.done")]
    assert {(item.name, item.namespace) for item in items} == {("read", "mcp__files")} and len(items) == 4
    assert {e.name for e in events if e.type == "response.function_call_arguments.done"} == {"read"}
    assert [item.namespace for item in events[-1].response.output] == ["mcp__files"] * 2


def test_a_function_of_a_namespace_is_chosen(model):
    choice = {"type": "function", "name": "read", "namespace": "mcp__files"}
    response = ask(model, READS, tools=CODEX, tool_choice=choice)
    assert response.output[0].name == "read"
    assert "mcp__files__read" in json.dumps(model.grammar) and "weather" not in json.dumps(model.grammar)


def test_names_of_calls_without_a_namespace(model):
    assert "namespace" not in ask(model, PARIS, tools=[WEATHER]).output[0].to_dict()


LINE = '<tool_call>\n{"name": "shell", "arguments": {"input": "ls \\"a b\\""}}\n</tool_call>'


@pytest.mark.parametrize("tools", [[SH, WEATHER], [{"type": "namespace", "name": "x", "tools": [SH]}]])
def test_custom_tools(model, tools):
    space = {"namespace": "x"} if len(tools) == 1 else {}
    line = LINE.replace("shell", "x__shell") if space else LINE
    response = ask(model, line, tools=tools)
    (call,) = response.output
    assert (call.type, call.name, call.namespace, call.input) == (
        "custom_tool_call", "shell", space.get("namespace"), 'ls "a b"',
    )  # fmt: skip
    assert [tool for tool in response.to_dict()["tools"] if tool["type"] != "function"] == tools[:1]
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "none"}
    again = ask(model, "Fine.", input=[{"role": "user", "content": "hello"}, call.to_dict(), output], tools=tools)
    assert again.usage.input_tokens_details.cached_tokens > response.usage.input_tokens
    choice = {"type": "custom", "name": "shell"} | space
    *_, given, done, _item, last = ask(model, line, tools=tools, tool_choice=choice, stream=True)
    assert (given.type, given.delta) == ("response.custom_tool_call_input.delta", 'ls "a b"')
    assert (done.type, done.input) == ("response.custom_tool_call_input.done", 'ls "a b"')
    assert last.response.output[0].input == 'ls "a b"'


def test_input_items_of_custom_tools_and_namespaces(model):
    """As the client has them, so that they can be sent again."""
    tools = [SH, FILES]
    first = ask(model, READS + LINE, tools=tools)
    outputs = [
        {"type": kind, "call_id": call.call_id, "output": "none"}
        for kind, call in zip(("function_call_output", "custom_tool_call_output"), first.output, strict=True)
    ]
    last = ask(model, "Fine.", input=outputs, previous_response_id=first.id, tools=tools)
    prompt = rendered(model)
    items = model.client.with_options(api_key="key-a").responses.input_items
    _, *found = [item.to_dict() for item in items.list(last.id, order="asc")]
    for item, given in zip(found, [*(call.to_dict() for call in first.output), *outputs], strict=True):
        assert item | {"id": given.get("id"), "status": given.get("status")} == {"id": None, "status": None} | given
    ask(model, "Fine.", input=[{"role": "user", "content": "hello"}, *found], tools=tools)
    assert rendered(model) == prompt


@pytest.mark.parametrize(("syntax", "shown"), [("lark", "grammar in the syntax of Lark"), ("regex", "expression")])
@pytest.mark.parametrize("about", ["Runs a line", None])
def test_the_grammar_of_a_custom_tool_is_shown(model, syntax, shown, about):
    """Codex' apply_patch has one."""
    tool = SH | {
        "description": about,
        "format": {"type": "grammar", "syntax": syntax, "definition": 'start: "ls" /.*/'},
    }
    response = ask(model, LINE, tools=[tool])
    assert response.output[0].input == 'ls "a b"' and response.to_dict()["tools"] == [tool]
    (function,) = [tool["function"] for tool in rendered_tools(model)]
    assert function["parameters"] == {
        "type": "object",
        "properties": {"input": {"type": "string"}},
        "required": ["input"],
    }
    assert function["description"].startswith(about or "The input must")
    assert shown in function["description"] and function["description"].endswith(':\nstart: "ls" /.*/')


def test_a_custom_tool_whose_input_is_cut(model):
    response = ask(model, LINE[: LINE.index(" b")], tools=[SH])
    assert response.output[0].type == "custom_tool_call" and "ls" in response.output[0].input


def test_arguments_that_cannot_be_read(model):
    """Nested too deeply for a reader of JSON, or with half a character: as the model wrote them, whole and streamed."""
    for value in (1300 * "[" + 1300 * "]", r'"\ud800"'):
        for tool in (SH, WEATHER):
            text = f'<tool_call>\n{{"name": "{tool["name"]}", "arguments": {{"input": {value}}}}}\n</tool_call>'
            (call,) = ask(model, text, tools=[tool], max_output_tokens=4000).output
            assert value in (call.input if tool is SH else call.arguments)
            last = list(ask(model, text, tools=[tool], max_output_tokens=4000, stream=True))[-1]
            assert last.type == "response.completed"
            if tool is WEATHER:
                output = {"type": "function_call_output", "call_id": call.call_id, "output": "none"}
                items = [{"role": "user", "content": "hello"}, call.to_dict(), output]
                assert ask(model, "Fine.", input=items, tools=[tool]).output_text == "Fine."


@pytest.mark.parametrize("arguments", ['{"city": "Par', "null", None, ["Paris"], {"city": "Paris"}, "absent"])
def test_arguments_of_a_call_may_be_anything(model, arguments):
    """As an agent keeps them of a call that was cut."""
    call = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": arguments}
    if arguments == "absent":
        del call["arguments"]
    output = {"type": "function_call_output", "call_id": "c1", "output": "sunny"}
    items = [{"role": "user", "content": "hello"}, call, output, {"role": "developer", "content": "Be brief."}]
    assert ask(model, "Fine.", input=items, tools=[WEATHER], instructions="Be kind.").output_text == "Fine."
    shown = model.tokenizer.apply_chat(model.answers[-1][1])
    assert shown.index("Be kind.") < shown.index("sunny") < shown.index("Be brief.")
    assert "Par" in shown or "Par" not in str(arguments)


def test_a_choice_among_tools_that_are_left_out(model):
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}, NAMED]}
    tools = [{"type": "web_search"}, *TOOLS]
    assert ask(model, "No.", tools=tools, tool_choice=allowed).output_text == "No."
    refused(model, "tool_choice.tools[0].type", tools=tools, tool_choice=allowed | {"tools": [{"type": "web_search"}]})
    refused(model, "tool_choice.namespace", tools=TOOLS, tool_choice=NAMED | {"namespace": 5})
    refused(model, "tools[1].tools", tools=[{"type": "web_search"}, FILES | {"tools": []}])


# ---------------------------------------------------------------- tools that are deferred


BY_CLIENT = {"type": "tool_search", "execution": "client", "description": "Finds tools", "parameters": CITY}
SEARCHES = '<tool_call>\n{"name": "tool_search", "arguments": {"city": "Paris"}}\n</tool_call>'
LATER = [FILES | {"tools": [READ | {"defer_loading": True}]}, SH | {"defer_loading": True}, WEATHER]
NOW = "These functions can be called now:"
READ_TOLD = json.dumps({"name": "mcp__files__read", "parameters": READ["parameters"]})


def prompt_ids(model: Model) -> list[int]:
    return memoryview(model.answers[-1][0].prompt.ids).cast("i").tolist()


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.parametrize("tools", [[BY_CLIENT, WEATHER], [BY_CLIENT, *LATER]], ids=["found-only", "listed-too"])
def test_a_tool_is_searched_and_used(model, tools, chained):
    """Each prompt is the one before, its answer and what is new; only that is computed."""
    first = ask(model, SEARCHES, tools=tools)
    (search,) = first.output
    assert (search.type, search.execution, search.arguments) == ("tool_search_call", "client", {"city": "Paris"})
    before, answer, shown = prompt_ids(model), model.answers[-1][3], rendered_tools(model)
    assert [tool["function"]["name"] for tool in shown] == ["tool_search", "weather"]
    found = {"type": "tool_search_output", "call_id": search.call_id, "status": "completed", "execution": "client",
             "tools": LATER[:1]}  # fmt: skip
    history = [{"role": "user", "content": "hello"}, search.to_dict(), found]
    more = {"input": [found], "previous_response_id": first.id} if chained else {"input": history}
    second = ask(model, READS, tools=tools, **more)
    assert rendered(model)[-1] == {"role": "tool", "tool_call_id": search.call_id, "content": f"{NOW}\n{READ_TOLD}"}
    kept = len(before) + len(answer) - 1
    assert rendered_tools(model) == shown and prompt_ids(model)[:kept] == (before + answer)[:kept]
    assert second.usage.input_tokens_details.cached_tokens >= kept
    (used,) = second.output
    assert (used.type, used.namespace, used.name) == ("function_call", "mcp__files", "read")
    output = {"type": "function_call_output", "call_id": used.call_id, "output": "mill"}
    history += [used.to_dict(), output]
    more = {"input": [output], "previous_response_id": second.id} if chained else {"input": history}
    third = ask(model, READS, tools=tools, **more)
    assert third.output[0].namespace == "mcp__files", "also later"
    assert third.usage.input_tokens_details.cached_tokens > second.usage.input_tokens


def test_a_search_streamed(model):
    """As an item that is complete at once; and as the model wrote it, if it is cut."""
    events = list(ask(model, SEARCHES, tools=[BY_CLIENT], stream=True))
    kinds = [e.type for e in events if e.type not in ("response.created", "response.in_progress")]
    assert kinds == ["response.output_item.added", "response.output_item.done", "response.completed"]
    (added, done) = (e.item for e in events if e.type.startswith("response.output_item"))
    assert (added.id, added.arguments, done.arguments) == (done.id, {}, {"city": "Paris"})
    assert events[-1].response.output[0].to_dict() == done.to_dict()
    (cut,) = ask(model, SEARCHES[:58], tools=[BY_CLIENT]).output
    assert cut.arguments == '{"city": '
    ask(model, "Yes.", input=[WORDS, cut.to_dict(), FOUND_FILES | {"call_id": cut.call_id}, WORDS], tools=[BY_CLIENT])
    assert rendered(model)[1]["tool_calls"][0]["function"]["name"] == "tool_search"


def test_input_items_of_searches(model):
    """As the client has them, so that they can be sent again."""
    first = ask(model, SEARCHES, tools=[BY_CLIENT])
    found = FOUND_FILES | {"call_id": first.output[0].call_id, "execution": "client"}
    second = ask(model, READS, input=[found], previous_response_id=first.id, tools=[BY_CLIENT])
    output = {"type": "function_call_output", "call_id": second.output[0].call_id, "output": "mill"}
    last = ask(model, "Fine.", input=[output], previous_response_id=second.id, tools=[BY_CLIENT])
    prompt = rendered(model)
    items = model.client.with_options(api_key="key-a").responses.input_items
    listed = [item.to_dict() for item in items.list(last.id, order="asc")]
    for item, given in zip(listed[1:], [first.output[0].to_dict(), found, second.output[0].to_dict(), output],
                           strict=True):  # fmt: skip
        assert item | {"id": given.get("id"), "status": given.get("status")} == {"id": None, "status": None} | given
    ask(model, "Fine.", input=listed, tools=[BY_CLIENT])
    assert rendered(model) == prompt


@pytest.mark.parametrize("search", [{"type": "tool_search"}, {"type": "tool_search", "execution": "server"}, None])
def test_deferred_tools_are_shown_if_the_client_does_not_search(model, search):
    response = ask(model, READS, tools=[*filter(None, [search]), *LATER])
    assert [t["function"]["name"] for t in rendered_tools(model)] == ["mcp__files__read", "shell", "weather"]
    assert response.output[0].name == "read" and response.to_dict()["tools"] == LATER


def test_what_a_search_has_found(model):
    """Definitions in JSON, one a line; the last one of a name counts."""
    again = READ | {"parameters": {"type": "object"}}
    found = [FOUND_FILES | {"tools": [SH, WEATHER, {"type": "web_search"}, READ]}, FOUND_FILES | {"tools": [again]}]
    items = [WORDS, LOOKUP, found[0], LOOKUP | {"call_id": "t"}, found[1] | {"call_id": "t"}]
    ask(model, "Yes.", input=items, tools=[BY_CLIENT, WEATHER | {"description": "Here"}])
    _, _, first, _, second = [message["content"] for message in rendered(model)]
    told = [json.loads(line) for line in first.splitlines()[1:]]
    assert [one["name"] for one in told] == ["shell", "weather", "read"] and first.startswith(NOW)
    assert told[1] == {name: WEATHER[name] for name in ("name", "description", "parameters")}
    assert second == NOW + '\n{"name": "read", "parameters": {"type": "object"}}'
    nothing = FOUND_FILES | {"tools": []}
    ask(
        model,
        "Yes.",
        input=[WORDS, LOOKUP | {"arguments": None}, nothing],
        tools=[{"type": "tool_search", "execution": "client"}],
    )
    assert rendered(model)[-1]["content"] == "No functions were found."
    assert rendered(model)[-2]["tool_calls"][0]["function"]["arguments"] == "{}"
    (search,) = rendered_tools(model)
    assert search["function"]["description"] and search["function"]["parameters"]["required"] == ["query"]


def test_a_deferred_tool_or_the_search_is_forced(model):
    pytest.importorskip("xgrammar")
    choice = {"type": "function", "name": "read", "namespace": "mcp__files"}
    assert ask(model, READS, tools=[BY_CLIENT, *LATER], tool_choice=choice).output[0].name == "read"
    assert len(rendered_tools(model)) == 2
    (call,) = ask(model, SEARCHES, tools=[BY_CLIENT, *LATER], tool_choice={"type": "tool_search"}).output
    assert call.type == "tool_search_call" and "mcp__files" not in json.dumps(model.grammar)
    refused(model, "tools[1].tools[0].defer_loading",
            tools=[BY_CLIENT, FILES | {"tools": [READ | {"defer_loading": "yes"}]}])  # fmt: skip
