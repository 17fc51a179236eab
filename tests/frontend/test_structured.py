"""What a text must be: the fields of OpenAI, vLLM and SGLang, and the grammar that reaches the worker."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

from radixrt.messages import Grammar
from radixrt.requests.grammar import MAX_TEXT
from radixrt.worker.stuck import bad_grammar
from tests.frontend.scripted import Model, scripted

pytest.importorskip("xgrammar")

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b"]}
NAMED = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
OBJECT = ("json_schema", {"type": "object"})
EBNF = 'root ::= "a" | "b"'
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Iterator[Model]:
    with scripted("hermes", tmp_path_factory.mktemp("hermes")) as model:
        yield model


def reached(model: Model, fields: dict, completion: bool):
    if not completion:
        model.chat(max_tokens=1, extra_body=fields)
        return model.grammar
    model.says()
    model.client.completions.create(model="m", prompt="x", max_tokens=1, extra_body=fields)
    return model.grammar


@pytest.mark.parametrize("completion", [False, True])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, OBJECT),
        ({"response_format": NAMED}, ("json_schema", SCHEMA)),
        ({"response_format": TAG}, ("structural_tag", TAG)),
        ({"guided_json": SCHEMA}, ("json_schema", SCHEMA)),
        ({"guided_json": json.dumps(SCHEMA)}, ("json_schema", SCHEMA)),
        ({"json_schema": json.dumps(SCHEMA)}, ("json_schema", SCHEMA)),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_grammar": EBNF}, Grammar("ebnf", EBNF)),
        ({"ebnf": EBNF}, Grammar("ebnf", EBNF)),
        ({"guided_choice": ["yes", 'n"o\n\\']}, Grammar("ebnf", 'root ::= "yes" | "n\\"o\\n\\\\"')),
        ({"structured_outputs": {"json": SCHEMA}}, ("json_schema", SCHEMA)),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
        ({"structured_outputs": {"choice": ["é"]}}, Grammar("ebnf", 'root ::= "é"')),
        ({"structured_outputs": {"grammar": EBNF}}, Grammar("ebnf", EBNF)),
        ({"structured_outputs": {"json_object": True}}, OBJECT),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, ("structural_tag", TAG)),
    ],
)
def test_the_grammar_that_reaches_the_worker(model, fields, expected, completion):
    found = reached(model, fields, completion)
    assert found == expected
    if isinstance(found, tuple) and found[1] == SCHEMA:
        assert list(found[1]["properties"]) == ["b", "a"], "the order is the schema's"


def test_choices_are_what_was_asked_for():
    import xgrammar
    from xgrammar.testing import _is_grammar_accept_string as accepts

    from radixrt.formats.structured import constraint

    choices = ["a", 'b"', "c\\n", "d\n", "é😀", "]", "#", "root ::= x", "\x01"]
    grammar = xgrammar.Grammar.from_ebnf(constraint({"guided_choice": choices}).grammar.text)
    assert all(accepts(grammar, choice) for choice in choices)
    assert not any(accepts(grammar, text) for text in ("", "b", "c\n", "aa", "d"))


def test_calls_or_an_answer_by_schema(model):
    assert model.chat('{"b": 3}', tools=TOOLS, response_format=NAMED).choices[0].message.content == '{"b": 3}'
    kind, tag = model.grammar
    calls, answer = tag["format"]["elements"]
    assert (kind, tag["format"]["type"], calls["type"]) == ("structural_tag", "or", "tags_with_separator")
    assert answer == {"type": "json_schema", "json_schema": SCHEMA}


def test_parse_of_the_client(model):
    from pydantic import BaseModel

    class Answer(BaseModel):
        b: int

    model.says('{"b": 3}')
    messages = [{"role": "user", "content": "x"}]
    found = model.client.chat.completions.parse(model="m", messages=messages, response_format=Answer)
    assert found.choices[0].message.parsed == Answer(b=3)
    assert model.grammar[1]["properties"]["b"]["type"] == "integer"


def test_a_schema_is_enforced_or_refused_and_widened_if_that_is_asked_for(model):
    """Unless `strict` is false: then a header names what is left out."""
    own = SCHEMA | {"dependentRequired": {"a": ["b"]}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": own}}
    with pytest.raises(openai.BadRequestError) as caught:
        model.chat("never", response_format=form)
    assert caught.value.param == "response_format.json_schema.schema"
    assert "#/dependentRequired cannot be enforced" in caught.value.message
    form["json_schema"]["strict"] = False
    model.says('{"b": 3}')
    create = model.client.chat.completions.with_raw_response.create
    told = create(model="m", messages=[{"role": "user", "content": "x"}], response_format=form).headers
    assert told["x-radixrt-warning"] == "not enforced: response_format.json_schema.schema#/dependentRequired"
    assert model.grammar == ("json_schema", SCHEMA)


BAD = [
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "x"}}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": "json"}, "response_format"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": "[" * (MAX_TEXT + 1)}, "guided_json"),
    ({"guided_json": [1]}, "guided_json"),
    ({"guided_json": {"$ref": "#/nowhere"}}, "guided_json"),
    ({"guided_regex": "(("}, "guided_regex"),
    ({"regex": 3}, "regex"),
    ({"ebnf": "root := x"}, "ebnf"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": "yes"}, "guided_choice"),
    ({"guided_choice": ["yes", ""]}, "guided_choice"),
    ({"structured_outputs": 3}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "(("}}, "structured_outputs.regex"),
    ({"response_format": NAMED, "regex": "a"}, "regex"),
    ({"guided_json": SCHEMA, "guided_choice": ["a"]}, "guided_choice"),
    ({"structural_tag": "{}"}, "structural_tag"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=[f"{p}-{i}" for i, (_, p) in enumerate(BAD)])
def test_refusals_name_the_field(model, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        model.chat("never", extra_body=fields)
    assert caught.value.param == param, caught.value.body
    assert caught.value.message


def test_without_xgrammar_it_says_what_to_install(model, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "xgrammar" else find(name, *a))
    with pytest.raises(openai.BadRequestError) as caught:
        model.chat("never", extra_body={"guided_regex": "never seen before"})
    assert caught.value.param == "guided_regex" and "pip install" in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_lets_nothing_come_is_the_request_s_fault(model, monkeypatch, stream):
    """The worker finds out while it answers; the error names the field that has brought the grammar."""
    launch = model.script.launch

    def stuck(plan):
        wait = launch(plan)

        def finish():
            result = wait()
            result.stuck.update(dict.fromkeys(range(len(plan.requests)), bad_grammar("no token can come next")))
            return result

        return finish

    monkeypatch.setattr(model.script, "launch", stuck)
    with pytest.raises(openai.APIError) as caught:
        for _ in model.chat("x", stream=stream, response_format={"type": "json_object"}):
            pass
    assert caught.value.body["message"] == "response_format: no token can come next"
    assert (caught.value.param, caught.value.body["type"]) == ("response_format", "invalid_request_error")
