"""Tools whose schemas are not quite JSON Schema, as agents and MCP servers send them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from radixrt.client import Client, ServerError
from radixrt.messages import ChatPrompt, Sampling
from radixrt.tokens.chat import ChatTemplates
from tests.frontend.scripted import Model, scripted

CITY = {"type": "string", "description": "what"}


def taking(schema: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"city": schema}, "required": ["city"]} | fields


HARMLESS = {
    "a null default": taking(CITY | {"default": None, "title": None}),
    "a null description": taking({"type": "string", "description": None}),
    "a list of one type": taking(CITY, type=["object"]),
}
MALFORMED = {
    "#/properties/city/enum": taking(CITY | {"enum": None}),
    "#/properties/city/items": taking({"type": "array", "items": None}),
    "#/properties/city/required": taking(CITY | {"required": True}),
    "#/properties/city/type": taking(CITY | {"type": "string | null"}),
    "#/properties/city/additionalProperties": taking({"type": "object", "additionalProperties": None}),
    "#/properties/city/anyOf/1": taking({"anyOf": [{"type": "string"}, None]}),
    "#/properties/city": taking("string"),
    "#/required": taking(CITY, required=None),
    "#/properties": {"type": "object", "properties": None},
    "#/type": taking(CITY, type="any"),
}
"""By the JSON pointer to what is left out."""
TYPES = [
    taking(CITY | {"type": kind}) for kind in ("float", "int", "dict", "list", "file", 3, None, [], ["string", {}])
]
OTHERS = [
    {"properties": {"city": CITY}}, {"type": "object", "properties": []}, taking(CITY, type=["object", "null"]),
    {"type": "object", "properties": [{"name": "city"}]}, taking({"type": "string", "description": 3}),
]  # fmt: skip
CALL = '<tool_call>\n{"name": "f", "arguments": {"city": "x"}}\n</tool_call>'
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def hermes(tmp_path_factory) -> Iterator[Model]:
    with scripted("hermes", tmp_path_factory.mktemp("hermes")) as model:
        yield model


def asked(api: str, schema: Any, strict: bool, forced: bool) -> tuple[str, dict[str, Any], str]:
    """(path, body, field of the schema)."""
    own = {"name": "f", "strict": strict}
    body = {"model": "m", "max_tokens": 100}
    match api:
        case "chat":
            tool = {"type": "function", "function": own | {"parameters": schema}}
            choice = {"tool_choice": "required"} if forced else {}
            return "v1/chat/completions", body | choice | {"messages": HELLO, "tools": [tool]}, TOOL
        case "messages":
            choice = {"tool_choice": {"type": "any"}} if forced else {}
            tools = {"tools": [own | {"input_schema": schema}]}
            return "v1/messages", body | choice | {"messages": HELLO} | tools, "tools.0.input_schema"
        case "responses":
            tools = {"tools": [own | {"type": "function", "parameters": schema}]}
            choice = {"tool_choice": "required"} if forced else {}
            return (
                "v1/responses",
                {"model": "m", "input": "hello", "max_output_tokens": 100} | choice | tools,
                "tools[0].parameters",
            )
    tools = {"tools": [{"type": "function", "function": own | {"parameters": schema}}]}
    return "api/chat", {"model": "m", "messages": HELLO, "stream": False} | tools, TOOL


TOOL = "tools[0].function.parameters"
APIS = ("chat", "messages", "responses", "ollama")


def post(model: Model, api: str, schema: Any, strict: bool = False, forced: bool = False) -> tuple[httpx.Response, str]:
    path, body, field = asked(api, schema, strict, forced)
    model.says(*[CALL][forced:])  # what is forced is drawn
    return httpx.post(f"{model.url}/{path}", json=body), field


@pytest.mark.parametrize("api", APIS)
def test_a_tool_that_is_not_strict_is_served_and_what_is_left_out_is_told(hermes, api):
    for place, schema in MALFORMED.items():
        for forced in (False, True)[: 1 if api == "ollama" else 2]:
            answer, field = post(hermes, api, schema, forced=forced)
            assert answer.status_code == 200 and '"f"' in answer.text, answer.text
            assert answer.headers["x-radixrt-warning"] == f"malformed, and left out: {field}{place}"
            assert hermes.answers[0][1].tools[0]["function"]["parameters"] == schema, "the template gets the client's"


@pytest.mark.parametrize("api", APIS)
def test_a_strict_one_is_refused_by_the_field(hermes, api):
    for place, schema in MALFORMED.items():
        answer, field = post(hermes, api, schema, strict=True)
        dotted = place.removeprefix("#").replace("/1", ".1" if api == "messages" else "[1]").replace("/", ".")
        assert answer.status_code == 400 and f"{field}{dotted}: must be " in answer.text, answer.text


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_well_formed_is_served_without_a_word(hermes, strict):
    for schema in HARMLESS.values():
        answer, _ = post(hermes, "chat", schema, strict, forced=True)
        assert answer.status_code == 200 and "x-radixrt-warning" not in answer.headers


def test_arguments_follow_the_rest_of_the_schema(hermes):
    schema = taking(CITY | {"enum": ["x"]}, required=None) | {"additionalProperties": False}
    answer, _ = post(hermes, "chat", schema, forced=True)
    assert "malformed" in answer.headers["x-radixrt-warning"]
    kept = json.dumps(hermes.grammar)
    assert '"enum": ["x"]' in kept and '"additionalProperties": false' in kept and '"required"' not in kept


def test_all_that_clients_send_is_served(hermes):
    for schema in (*TYPES, *OTHERS):
        for forced in (False, True):
            assert post(hermes, "chat", schema, forced=forced)[0].status_code == 200, schema


def test_native_clients_send_them_as_well(hermes):
    with Client(hermes.router) as client:
        for schema in (*MALFORMED.values(), *TYPES, *OTHERS):
            function = {"name": "f", "parameters": schema}
            hermes.says(CALL)
            answer = client.generate(ChatPrompt(HELLO, [{"type": "function", "function": function}]), Sampling())
            assert [call.name for call in answer.tool_calls] == ["f"], schema
        strict = [{"type": "function", "function": function | {"strict": True, "parameters": taking("string")}}]
        with pytest.raises(ServerError, match=r"parameters\.properties\.city"):
            client.generate(ChatPrompt(HELLO, strict), Sampling())


def test_published_templates_show_tools_with_such_schemas(shared_data):
    """Those that do not take them get what is well-formed of them."""
    for path in sorted((shared_data / "chat_templates").glob("*.jinja")):
        templates = ChatTemplates({"default": path.read_text(encoding="utf-8")}, {"bos_token": "<s>", "eos_token": "e"})
        for schema in (*HARMLESS.values(), *MALFORMED.values(), *TYPES, *OTHERS):
            tools = [{"type": "function", "function": {"name": "bash", "description": "x", "parameters": schema}}]
            assert "bash" in templates.render(ChatPrompt(HELLO, tools)), (path.name, schema)
