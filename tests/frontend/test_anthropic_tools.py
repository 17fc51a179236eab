"""Tools of Anthropic's: histories with those that it ran, those that are left out, those that it defines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from radixrt.formats.tools import read_parameters
from radixrt.frontend.anthropic.blocks import to_json
from radixrt.frontend.anthropic.defined import DEFINED
from radixrt.frontend.anthropic.tools import shown_id, template_id
from radixrt.frontend.http.errors import ApiError
from tests.frontend.scripted import scripted
from tests.frontend.test_anthropic import (
    EPHEMERAL,
    HELLO,
    IMAGE,
    NO_IMAGE,
    NO_PDF,
    PARIS,
    PDF,
    TIME,
    TOOLS,
    WEATHER,
    Speaker,
    total,
)

Block = dict[str, Any]
WEB = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}


@pytest.fixture(scope="module")
def hermes(tmp_path_factory) -> Iterator[Speaker]:
    with scripted("hermes", tmp_path_factory.mktemp("hermes")) as model, Speaker(model) as speaker:
        yield speaker


def text(said: str) -> Block:
    return {"type": "text", "text": said}


def call(id: str = "srvtoolu_1", name: str = "web_search", **given: Any) -> Block:
    return {"type": "server_tool_use", "id": id, "name": name, "input": given}


def result(kind: str, content: Any, id: str = "srvtoolu_1", **fields: Any) -> Block:
    return {"type": f"{kind}_tool_result", "tool_use_id": id, "content": content} | fields


def own(id: str = "toolu_9", **fields: Any) -> Block:
    return {"type": "tool_use", "id": id, "name": "time", "input": {}} | fields


def given(*ids: str) -> list[Block]:
    return [{"type": "tool_result", "tool_use_id": id, "content": "noon"} for id in ids]


PAGE = {"type": "web_search_result", "url": "http://m", "title": "Mill", "encrypted_content": "x", "page_age": None}
TOLD = '[{"type":"web_search_result","url":"http://m","title":"Mill"}]'
FOUND = result("web_search", [PAGE])


def turns(*contents: Any) -> list[Block]:
    """What the user, who begins, and the assistant say in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def rendered(speaker: Speaker, *contents: Any, **fields: Any) -> list[Block]:
    speaker.ask("Yes.", messages=turns(*contents), **{"tools": TOOLS} | fields)
    return speaker.prompt.messages


def outline(messages: list[Block]) -> list[Any]:
    """Of each message its role, what it says, and whom it calls."""
    calls = [[c["function"]["name"] for c in m.get("tool_calls", [])] for m in messages]
    return [(m["role"], m["content"], *names) for m, names in zip(messages, calls, strict=True)]


# ---------------------------------------------------------------- histories


def test_an_answer_goes_on_behind_each_result(hermes):
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    again = [call("srvtoolu_2", query="b"), result("web_search", [], "srvtoolu_2")]
    messages = rendered(
        hermes, "mill?", [thought, text("Let me "), text("look."), call(query="a"), FOUND, *again, text("So.")], "And?"
    )
    assert outline(messages) == [
        ("user", "mill?"), ("assistant", "Let me look.", "web_search"), ("tool", TOLD),
        ("assistant", None, "web_search"), ("tool", "[]"), ("assistant", "So."), ("user", "And?"),
    ]  # fmt: skip
    first, second = messages[1]["tool_calls"][0], messages[3]["tool_calls"][0]
    assert messages[1]["reasoning_content"] == "Hm." and "reasoning_content" not in messages[3] | messages[5]
    assert [json.loads(c["function"]["arguments"]) for c in (first, second)] == [{"query": "a"}, {"query": "b"}]
    assert (messages[2]["tool_call_id"], messages[2]["name"]) == (first["id"], "web_search") and first != second
    assert first["id"] != second["id"] == messages[4]["tool_call_id"]


def test_the_clients_own_calls_stay_last(hermes):
    messages = rendered(hermes, "mill?", [text("a"), own(), call(), FOUND, text("b"), own("toolu_8")],
                        [*given("toolu_9", "toolu_8"), text("c")])  # fmt: skip
    assert outline(messages) == [
        ("user", "mill?"), ("assistant", "a", "web_search"), ("tool", TOLD), ("assistant", "b", "time", "time"),
        ("tool", "noon"), ("tool", "noon"), ("user", "c"),
    ]  # fmt: skip
    assert [c["id"] for c in messages[3]["tool_calls"]] == [m["tool_call_id"] for m in messages[4:6]]


def test_a_result_that_comes_later(hermes):
    """In programmatic calling: code that Anthropic runs waits for a function that the client runs."""
    ran = {"type": "code_execution_result", "stdout": "3", "stderr": "", "return_code": 0, "content": []}
    code = call("srvtoolu_c", "code_execution", code="time()")
    asked = own(caller={"type": "code_execution_20250825", "tool_id": "srvtoolu_c"})
    before = ["hi", [text("a"), code, asked], given("toolu_9")]
    told = [("user", "hi"), ("assistant", "a", "time"), ("tool", "noon")]
    assert outline(rendered(hermes, *before)) == told
    later = [result("code_execution", ran, "srvtoolu_c"), text("b")]
    assert outline(rendered(hermes, *before, later, "c")) == [
        *told, ("assistant", None, "code_execution"), ("tool", json.dumps(ran, separators=(",", ":"))),
        ("assistant", "b"), ("user", "c"),
    ]  # fmt: skip


def test_an_answer_that_paused(hermes):
    """The two messages of it are one; and without the second the call has come to nothing."""
    pause = {"role": "assistant", "content": [text("a"), call()]}
    hermes.ask("Yes.", messages=[*HELLO, pause, {"role": "assistant", "content": [FOUND, text("b")]}, *HELLO])
    assert [m["role"] for m in hermes.prompt.messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert outline(rendered(hermes, "hi", [text("a"), call()], "c"))[1:] == [("assistant", "a"), ("user", "c")]
    assert outline(rendered(hermes, "hi", [call()], "c"))[1:] == [("assistant", ""), ("user", "c")]
    assert rendered(hermes, "hi", [text("a"), call()])[1:] == [{"role": "assistant", "content": "a"}]
    assert hermes.prompt.partial


def test_a_history_that_ends_with_a_result(hermes):
    messages = rendered(hermes, "mill?", [text("a"), call(), FOUND])
    assert outline(messages)[1:] == [("assistant", "a", "web_search"), ("tool", TOLD)] and not hermes.prompt.partial
    shown = hermes.model.tokenizer.apply_chat(hermes.prompt)
    assert shown.endswith(f"tool\n{TOLD}<|im_end|>\n<|im_start|>assistant\n")
    rendered(hermes, "mill?", [call(), FOUND, text("The mill")])
    assert outline(hermes.prompt.messages)[-1] == ("assistant", "The mill") and hermes.prompt.partial
    assert outline(rendered(hermes, "mill?", [call(), FOUND], "And?"))[2:] == [("tool", TOLD), ("user", "And?")]


FETCHED = {"type": "web_fetch_result", "url": "http://m", "retrieved_at": "now"}
DOCUMENT = {"type": "document", "title": "Mill", "source": {"type": "text", "media_type": "text/plain", "data": "Old."}}
RAN = {"type": "bash_code_execution_result", "stdout": "a\n", "stderr": "", "return_code": 0, "content": []}
VIEWED = {"type": "text_editor_code_execution_view_result", "file_type": "text", "content": "é", "num_lines": None}
SECRET = {"type": "encrypted_code_execution_result", "encrypted_stdout": "x", "stderr": "", "return_code": 1}


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (FOUND, TOLD),
        (result("web_search", {"type": "web_search_tool_result_error", "error_code": "max_uses_exceeded"}),
         "Error: max_uses_exceeded"),
        (result("web_fetch", FETCHED | {"content": DOCUMENT}), "http://m\nMill\nOld."),
        (result("web_fetch", {"type": "web_fetch_tool_result_error", "error_code": "url_not_allowed"}),
         "Error: url_not_allowed"),
        (result("bash_code_execution", RAN),
         '{"type":"bash_code_execution_result","stdout":"a\\n","stderr":"","return_code":0,"content":[]}'),
        (result("web_fetch", FETCHED | {"content": PDF}), f"http://m\n{NO_PDF['text']}"),
        (result("bash_code_execution", {"type": "bash_code_execution_result", "content": [IMAGE]}),
         json.dumps({"type": "bash_code_execution_result", "content": [NO_IMAGE]}, separators=(",", ":"))),
        (result("text_editor_code_execution", VIEWED | {"file_type": "image"}), NO_IMAGE["text"]),
        (result("text_editor_code_execution", VIEWED | {"file_type": "pdf"}), "[pdf: this model reads text only]"),
        (result("text_editor_code_execution", VIEWED),
         '{"type":"text_editor_code_execution_view_result","file_type":"text","content":"é"}'),
        (result("code_execution", SECRET), '{"type":"encrypted_code_execution_result","stderr":"","return_code":1}'),
        (result("tool_search", {"type": "tool_search_tool_result_error", "error_code": "unavailable"}),
         "Error: unavailable"),
        (result("advisor", {"type": "advisor_result", "text": "Do."}), '{"type":"advisor_result","text":"Do."}'),
    ],
)  # fmt: skip
def test_what_results_say(hermes, told, said):
    assert rendered(hermes, "hi", [call(), told])[-1]["content"] == said


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"content": "7"}, "7"),
        ({"content": [text("7")], "is_error": False}, "7"),
        ({"content": [text("7"), text("8")]}, [text("7"), text("8")]),
        ({"content": [text("it fell")], "is_error": True}, "Error: it fell"),
        ({}, ""),
    ],
)
def test_tools_of_mcp_servers(hermes, fields, said):
    """They are called as Responses calls those of a namespace."""
    rolled = {"type": "mcp_tool_use", "id": "mcptoolu_1", "name": "roll", "server_name": "dice", "input": {"n": 2}}
    told = {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_1"} | fields
    listing = {"type": "mcp_tool_listing", "mcp_server_name": "dice", "tools": []}
    messages = rendered(hermes, "hi", [listing, rolled, {"type": "fallback"}, told])
    assert outline(messages)[1:] == [("assistant", None, "dice__roll"), ("tool", said)]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"n": 2}'


REFERENCE = {"type": "tool_reference", "tool_name": "time"}


def test_searches_of_anthropics_tell_nothing(hermes):
    """Of tools that are all shown: the answer stays one."""
    found = result("tool_search", {"type": "tool_search_tool_search_result", "tool_references": [REFERENCE]})
    messages = rendered(hermes, "hi", [text("a"), call(name="tool_search_tool_regex"), found, text("b"), own()],
                        given("toolu_9"))  # fmt: skip
    assert outline(messages)[1:] == [("assistant", "ab", "time"), ("tool", "noon")]


@pytest.mark.parametrize("family", ["mistral", "mistral_v11"])
def test_ids_from_elsewhere_suit_mistral(tmp_path, family):
    with scripted(family, tmp_path) as model, Speaker(model) as mistral:
        ids = ("srvtoolu_01A09q90qw90lq917835lq9", "toolu_01B09q90qw90lq917835lq9")
        content = [call(ids[0]), FOUND | {"tool_use_id": ids[0]}, own(ids[1])]
        messages = rendered(mistral, "hi", content, given(ids[1]))
        (first,), (second,) = messages[1]["tool_calls"], messages[3]["tool_calls"]
        assert [m["tool_call_id"] for m in messages if m["role"] == "tool"] == [first["id"], second["id"]]
        assert all(re.fullmatch("[0-9a-f]{9}", c["id"]) for c in (first, second)) and first["id"] != second["id"]


@pytest.mark.parametrize("id", ["call_" + "0a" * 12, "idOfCall0", "functions.weather:0"])
def test_ids_of_models_lead_back(id):
    assert template_id(shown_id(id)) == id


def test_count_tokens(hermes):
    fields = {"messages": turns("hi", [call(), FOUND, text("a")], "b"), "tools": [WEB, *TOOLS], "model": "m"}
    assert hermes.client.messages.count_tokens(**fields).input_tokens == total(hermes.ask("Yes.", **fields).usage)
    fields["messages"][1]["content"].pop(0)
    with pytest.raises(anthropic.BadRequestError, match="messages.1.content.0.tool_use_id"):
        hermes.client.messages.count_tokens(**fields)


def ends(speaker: Speaker) -> list[str]:
    """With what the breakpoints of the latest request end."""
    request = speaker.model.answers[0][0]
    ids = memoryview(request.prompt.ids).cast("i").tolist()
    return [speaker.model.tokenizer.decode(ids[:tokens], False)[-24:] for tokens, _ in request.pin]


def test_breakpoints(hermes):
    marked = {"cache_control": EPHEMERAL}
    rolled = {"type": "mcp_tool_use", "id": "m", "name": "roll", "server_name": "dice", "input": {"n": 2}}
    told = {"type": "mcp_tool_result", "tool_use_id": "m", "content": [text("six") | marked, text("one")]}
    rendered(hermes, "hi", [call(query="mill") | marked, FOUND | marked, rolled, told | marked, text("b")], "c")
    within, behind, first, last = ends(hermes)
    assert within.endswith('"query": "mill"') and behind.endswith('"title":"Mill"}]')
    assert first.endswith("six") and last.endswith("six\none")


def test_blocks_that_tell_nothing_have_no_breakpoints(hermes):
    marked = {"cache_control": EPHEMERAL}
    found = result("tool_search", {"type": "tool_search_tool_search_result", "tool_references": []})
    rendered(hermes, "hi", [call() | marked, found | marked, call() | marked, text("b")], "c")
    assert ends(hermes) == []


def said(*content: Any) -> dict[str, Any]:
    return {"messages": turns("hi", list(content))}


def told(kind: str, content: Any) -> dict[str, Any]:
    return said(call(), result(kind, content))


MCP = {"type": "mcp_tool_use", "id": "srvtoolu_1", "name": "roll", "server_name": "dice", "input": {}}
UPLOAD = {"type": "container_upload", "file_id": "f"}
BAD = [
    (said(FOUND), "messages.1.content.0.tool_use_id"),
    (said(call(), FOUND, FOUND), "messages.1.content.2.tool_use_id"),
    (said(own(), result("web_search", [], "toolu_9")), "messages.1.content.1.tool_use_id"),
    (said(call(), {"type": "web_search_tool_result"}), "messages.1.content.1.tool_use_id"),
    (said(call(), call()), "messages.1.content.1.id"),
    (said(call() | {"id": 1}), "messages.1.content.0.id"),
    (said(call() | {"name": None}), "messages.1.content.0.name"),
    (said(call() | {"input": "x"}), "messages.1.content.0.input"),
    (said(MCP | {"server_name": None}), "messages.1.content.0.server_name"),
    (said({"type": "compaction", "content": "x"}), "messages.1.content.0.type"),
    (told("web_search", None), "messages.1.content.1.content"),
    (told("web_search", "x"), "messages.1.content.1.content"),
    (told("web_search", ["x"]), "messages.1.content.1.content"),
    (told("web_search", {"type": "web_search_tool_result_error"}), "messages.1.content.1.content.error_code"),
    (told("web_search", [{"type": "web_search_result", "encrypted_content": "x"}]), "messages.1.content.1.content"),
    (told("advisor", {"type": "advisor_redacted_result", "encrypted_content": "x"}), "messages.1.content.1.content"),
    (told("web_fetch", FETCHED), "messages.1.content.1.content.content"),
    (told("web_fetch", FETCHED | {"content": DOCUMENT, "url": 3}), "messages.1.content.1.content.url"),
    (said(MCP, result("mcp", "x", is_error="no")), "messages.1.content.1.is_error"),
    ({"messages": turns([UPLOAD])}, "messages.0.content.0.type"),
    ({"messages": turns([call()])}, "messages.0.content.0.type"),
    ({"messages": turns([FOUND])}, "messages.0.content.0.type"),
    ({"tools": [WEB]}, "tools.0.type"),
    ({"tools": [WEB, WEB], "tool_choice": {"type": "none"}}, "tools.0.type"),
    ({"tools": [WEB, TIME, {"name": "f", "input_schema": []}]}, "tools.2.input_schema"),
    ({"tools": [WEB, TIME, TIME]}, "tools.2.name"),
    ({"tools": [TIME, WEB | {"type": "web_search"}]}, "tools.1.type"),
    ({"tools": [TIME, {"type": "computer_20250124", "name": "computer"}]}, "tools.1.type"),
    ({"tools": [TIME, {"type": "mcp_toolset", "mcp_server_name": "dice"}]}, "tools.1.type"),
    ({"tools": [TIME, {"type": ["bash_20250124"], "name": "bash"}]}, "tools.1.type"),
    ({"tools": [WEB, TIME], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice.name"),
    ({"tools": [WEB, {"type": "bash_20250124", "name": "shell"}]}, "tools.1.name"),
    ({"tools": [{"type": "text_editor_20250728", "name": "str_replace_editor"}]}, "tools.0.name"),
    ({"tools": [{"type": "memory_20250818", "name": "memory", "strict": "yes"}]}, "tools.0.strict"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}, {"name": "bash", "input_schema": {}}]}, "tools.1.name"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "field"), BAD, ids=[f"{field}-{i}" for i, (_, field) in enumerate(BAD)])
def test_refusals_name_the_field(hermes, fields, field):
    with pytest.raises(anthropic.BadRequestError) as caught:
        hermes.ask("never", **fields)
    assert caught.value.body["error"]["message"].startswith(field + ":"), caught.value.body


def test_results_that_are_nested_too_deeply(hermes):
    """Refused by their field, however deep a reader of JSON goes."""
    for depth in (200, 450, 700, 900):
        deep = json.loads("[" * depth + "]" * depth)
        try:
            rendered(hermes, "hi", [call(), result("code_execution", RAN | {"content": deep})])
        except anthropic.BadRequestError as refused:
            assert "messages.1.content.1.content: is nested too deeply" in str(refused)


# ---------------------------------------------------------------- tools


HOSTED = [
    "web_search_20250305", "web_search_20260209", "web_fetch_20250910", "code_execution_20250522",
    "code_execution_20250825", "tool_search_tool_regex_20251119", "tool_search_tool_bm25_20251119",
    "tool_search_tool_bm25",
]  # fmt: skip


@pytest.mark.parametrize("kind", HOSTED)
def test_tools_that_anthropic_runs_are_left_out(hermes, kind):
    tools = [{"type": kind, "name": re.sub(r"_\d+$", "", kind)}, *TOOLS]
    message = hermes.both(PARIS, tools=tools)
    assert [block.name for block in message.content] == ["weather"]
    assert [tool["function"]["name"] for tool in hermes.prompt.tools] == ["weather", "time"]


def test_breakpoints_of_tools_beside_those_left_out(hermes):
    marked = {"cache_control": EPHEMERAL}
    hermes.ask("Yes.", tools=[WEB | marked, WEATHER | marked, WEB, TIME | marked])
    first, second = ends(hermes)
    assert '"required": ["city"]' in first and '{"type": "object"' in second
    hermes.ask("Yes.", tools=[{"type": "bash_20250124", "name": "bash"} | marked, TIME])
    (end,) = ends(hermes)
    assert "e shell anew" in end


@pytest.mark.parametrize("kind", DEFINED)
def test_tools_that_anthropic_defines(hermes, kind):
    """Functions with a schema, of whose properties all that are needed always are required."""
    name = DEFINED[kind].name
    arguments = {"command": "view", "path": "/a"}
    said = f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    message = hermes.both(said, tools=[{"type": kind, "name": name}])
    assert [(b.type, b.name, b.input) for b in message.content] == [("tool_use", name, arguments)]
    (shown,) = hermes.prompt.tools
    function = shown["function"]
    assert (function["name"], shown["type"]) == (name, "function") and function["description"]
    read_parameters("parameters", function["parameters"], strict=True)
    assert set(function["parameters"].get("required", ())) <= {"command", "path"}
    assert all(one["description"] for one in function["parameters"]["properties"].values())


EDITS = {"command", "path", "view_range", "file_text", "old_str", "new_str", "insert_line"}


@pytest.mark.parametrize(
    ("kind", "name", "commands", "properties", "required"),
    [
        ("bash_20241022", "bash", "", {"command", "restart"}, []),
        ("bash_20250124", "bash", "", {"command", "restart"}, []),
        ("text_editor_20241022", "str_replace_editor", "view create str_replace insert undo_edit", EDITS, ["path"]),
        ("text_editor_20250124", "str_replace_editor", "view create str_replace insert undo_edit", EDITS, ["path"]),
        ("text_editor_20250429", "str_replace_based_edit_tool", "view create str_replace insert", EDITS, ["path"]),
        ("text_editor_20250728", "str_replace_based_edit_tool", "view create str_replace insert",
         EDITS | {"insert_text"}, ["path"]),
        ("memory_20250818", "memory", "view create str_replace insert delete rename",
         EDITS | {"insert_text", "old_path", "new_path"}, []),
    ],
)  # fmt: skip
def test_what_anthropic_defines(kind, name, commands, properties, required):
    tool = DEFINED[kind]
    assert (tool.name, tool.schema["properties"].keys()) == (name, properties)
    assert tool.schema["properties"]["command"].get("enum", []) == commands.split()
    assert tool.schema.get("required", []) == (["command", *required] if commands else [])
    inserts = tool.schema["properties"].get("new_str", {}).get("description", "")
    assert ("insert" in inserts) is (properties == EDITS) and ("undo" in tool.description) is ("undo" in commands)


def test_a_defined_tool_is_forced(hermes):
    pytest.importorskip("xgrammar")
    text = '<tool_call>\n{"name": "memory", "arguments": {"command": "view", "path": "/memories"}}\n</tool_call>'
    tools = [WEB, {"type": "memory_20250818", "name": "memory", "strict": True}, TIME]
    message = hermes.both(text, tools=tools, tool_choice={"type": "tool", "name": "memory"})
    assert message.content[0].input == {"command": "view", "path": "/memories"}
    assert "rename" in json.dumps(hermes.model.grammar) and message.stop_reason == "tool_use"


# ---------------------------------------------------------------- tools that are deferred


SEARCH = {"name": "search", "description": "Finds tools", "input_schema": {"type": "object"}}
SEARCHES = '<tool_call>\n{"name": "search", "arguments": {"query": "weather"}}\n</tool_call>'
LATER = [WEATHER | {"defer_loading": True}, TIME | {"defer_loading": True}]
WEATHER_REFERENCE = REFERENCE | {"tool_name": "weather"}
WEATHER_TOLD = json.dumps({"name": "weather", "description": "Of a city", "parameters": WEATHER["input_schema"]})
TIME_TOLD = '{"name": "time", "parameters": {"type": "object"}}'
NOW = "These functions can be called now:"


def names(speaker: Speaker) -> list[str]:
    return [tool["function"]["name"] for tool in speaker.prompt.tools]


def ids(speaker: Speaker) -> list[int]:
    """Those of the latest prompt."""
    return memoryview(speaker.model.answers[-1][0].prompt.ids).cast("i").tolist()


@pytest.mark.parametrize("later", [LATER, LATER[:1]], ids=["listed-from-the-start", "listed-when-found"])
def test_a_tool_is_searched_and_used(hermes, later):
    """The second prompt is the first one, its answer and what was found; only that is computed."""
    first = hermes.both(SEARCHES, tools=[SEARCH, *(later if later is LATER else [])])
    prompt, answered = ids(hermes), hermes.model.answers[-1][3]
    assert names(hermes) == ["search"] and first.stop_reason == "tool_use"
    found = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": [WEATHER_REFERENCE]}
    history = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": [found]}]
    second = hermes.ask(PARIS, tools=[SEARCH, *later], messages=history)
    assert names(hermes) == ["search"]
    assert hermes.prompt.messages[-1]["content"] == f"{NOW}\n{WEATHER_TOLD}"
    kept = len(prompt) + len(answered) - 1
    assert ids(hermes)[:kept] == (prompt + answered)[:kept] and second.usage.cache_read_input_tokens >= kept
    (used,) = second.content
    assert (used.type, used.name, used.input) == ("tool_use", "weather", {"city": "Paris"})


@pytest.mark.parametrize(
    ("tools", "shown"),
    [
        ([SEARCH, *LATER], ["search"]),
        (LATER, ["weather", "time"]),
        ([{"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}, TIME, LATER[0]],
         ["time", "weather"]),
        ([TIME | {"defer_loading": False}, {"type": "bash_20250124", "name": "bash", "defer_loading": True}], ["time"]),
    ],
    ids=["deferred", "all-are-deferred", "anthropic-would-search", "defined"],
)  # fmt: skip
def test_deferred_tools_are_hidden_where_others_are_not(hermes, tools, shown):
    """All are shown if nothing could find them: Anthropic's search is not run here."""
    hermes.ask("Yes.", tools=tools)
    assert names(hermes) == shown


def found_by(content: list[Any], tools: Any = (SEARCH, *LATER), **fields: Any) -> dict[str, Any]:
    """A request after a search whose result is `content`."""
    result = {"type": "tool_result", "tool_use_id": "toolu_9", "content": content}
    return {"messages": turns("hi", [own(name="search")], [result | fields]), "tools": [*tools]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([REFERENCE, WEATHER_REFERENCE], f"{NOW}\n{TIME_TOLD}\n{WEATHER_TOLD}"),
        ([text("Two."), REFERENCE, text("Use it."), REFERENCE],
         [text(one) for one in ("Two.", f"{NOW}\n{TIME_TOLD}", "Use it.", f"{NOW}\n{TIME_TOLD}")]),
        ([REFERENCE | {"tool_name": "read"}], f"{NOW}\nread: is not available any more"),
        ([], ""),
    ],
)  # fmt: skip
def test_what_a_search_has_found(hermes, content, said):
    """Definitions in JSON, one a line; a tool may be gone since."""
    hermes.ask("Yes.", **found_by(content))
    assert hermes.prompt.messages[-1]["content"] == said


def test_what_anthropics_search_has_found_of_deferred_tools(hermes):
    found = result("tool_search", {"type": "tool_search_tool_search_result", "tool_references": [REFERENCE]})
    messages = rendered(hermes, "hi", [call(name="tool_search_tool_regex"), found, text("b")], "c",
                        tools=[SEARCH, *LATER])  # fmt: skip
    assert outline(messages)[1:3] == [("assistant", None, "tool_search_tool_regex"), ("tool", f"{NOW}\n{TIME_TOLD}")]
    found["content"] = {"type": "tool_search_tool_search_result", "tool_references": [{"type": "tool_reference"}]}
    with pytest.raises(anthropic.BadRequestError, match=r"1\.content\.1\.content\.tool_references\.0\.tool_name"):
        rendered(hermes, "hi", [call(name="tool_search_tool_regex"), found])


def test_a_deferred_tool_is_forced(hermes):
    pytest.importorskip("xgrammar")
    message = hermes.both(PARIS, tools=[SEARCH, *LATER], tool_choice={"type": "tool", "name": "weather"})
    assert message.content[0].name == "weather" and '"city"' in json.dumps(hermes.model.grammar)
    assert names(hermes) == ["search"]


def test_breakpoints_of_what_was_found(hermes):
    marked = {"cache_control": EPHEMERAL}
    hermes.ask("Yes.", **found_by([REFERENCE | marked, WEATHER_REFERENCE], [SEARCH | marked, LATER[0] | marked, TIME]))
    listed, told = ends(hermes)
    assert '{"type": "object"' in listed and told.endswith(TIME_TOLD[-24:])


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tools": [SEARCH, TIME | {"defer_loading": "yes"}]}, "tools.1.defer_loading"),
        ({"tools": [SEARCH, {"type": "bash_20250124", "name": "bash", "defer_loading": 1}]}, "tools.1.defer_loading"),
        (found_by([REFERENCE | {"tool_name": 5}]), "messages.2.content.0.content.0.tool_name"),
        ({"messages": turns([REFERENCE])}, "messages.0.content.0.type"),
    ],
)  # fmt: skip
def test_refusals_of_deferred_tools_name_the_field(hermes, fields, field):
    with pytest.raises(anthropic.BadRequestError) as caught:
        hermes.ask("never", **fields)
    assert caught.value.body["error"]["message"].startswith(field + ":"), caught.value.body


def test_what_is_nested_too_deeply_is_refused():
    value: dict[str, Any] = {}
    for _ in range(100_000):
        value = {"a": value}
    with pytest.raises(ApiError, match="nested too deeply") as caught:
        to_json("messages.1.content.0.input", value)
    assert (caught.value.status, caught.value.param) == (400, "messages.1.content.0.input")
