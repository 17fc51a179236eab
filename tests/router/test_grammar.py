"""What is refused before a worker hears of it, and what it costs the router to know."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import get_args

import pytest

from radixrt.messages import Generate, Grammar, GrammarKind, Sampling, TokenPrompt
from radixrt.requests import grammar as module
from radixrt.requests.grammar import MAX_BYTES, MAX_DEPTH, MAX_TEXT, check_aside, check_grammar, is_checked
from radixrt.requests.validate import Refused, check_sampling
from radixrt.router.server.streams import encode, is_encoded
from radixrt.tokens.errors import FieldError

TAG = '{"type": "structural_tag", "format": {"type": "token", "token": "<|im_end|>"}}'


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


def tag(schema: dict) -> dict:
    return {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}


@pytest.mark.parametrize(
    "kind, text",
    [
        ("json", ""),
        ("json_schema", '{"type": "object", "properties": {"größe": {"type": "integer"}}}'),
        ("json_schema", nested(MAX_DEPTH - 1)),
        (
            "json_schema",
            json.dumps({"description": "{99999}" * 9_000, "title": "a" * 50_000, "$comment": "b" * 50_000}),
        ),
        ("json_schema", json.dumps({"properties": {"properties": {"description": "a" * MAX_BYTES}}})),
        ("json_schema", json.dumps({"properties": {"pattern": {"enum": ["{99999}"]}, "description": {}}})),
        ("structural_tag", json.dumps(tag({"properties": {"a": {"description": "{99999}" * 15_000}}}))),
        ("regex", r"[a-zäöü]{2,5}(\d|[^a])*"),
        ("regex", ""),
        ("ebnf", 'root ::= "a" root | "b"'),
        ("structural_tag", TAG),
    ],
)
def test_what_can_be_compiled_passes(kind, text):
    check_grammar(Grammar(kind, text))


@pytest.mark.parametrize(
    "kind, text, said",
    [
        ("json_schema", "{", "the JSON schema is not JSON"),
        ("json_schema", "3", "# must be a schema"),
        ("json_schema", '{"type": "integr"}', "#/type must be of object"),
        ("json_schema", '{"type": "string", "pattern": "(a"}', "#/pattern '(a' cannot be enforced"),
        ("json_schema", '{"$ref": "#/$defs/none"}', "$defs"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "# is satisfied by no value"),
        ("json_schema", nested(MAX_DEPTH), f"{MAX_DEPTH + 1} objects and arrays within each other"),
        ("json_schema", nested(5_000), "the JSON schema "),  # some versions of Python cannot read it
        ("json_schema", '{"type": "string", "pattern": "a{0,20000}"}', "repeat 20000 times in all"),
        ("json_schema", json.dumps({"patternProperties": {"a{20000}": {}}}), "repeat 20000 times in all"),
        ("json_schema", json.dumps({"$ref": "#/default", "default": {"pattern": "a{20000}"}}), "repeat 20000 times"),
        ("json_schema", json.dumps({"properties": {"properties": {"pattern": "a{20000}"}}}), "repeat 20000 times"),
        ("json_schema", json.dumps({"properties": {"title": {"pattern": "a{20000}"}}}), "repeat 20000 times in all"),
        ("structural_tag", json.dumps(tag({"items": [{"pattern": "a{20000}"}]})), "repeat 20000 times in all"),
        (
            "structural_tag",
            json.dumps({"type": "structural_tag", "format": {"type": "grammar", "grammar": "root ::= [a]{20000}"}}),
            "repeat 20000",
        ),
        ("json_schema", json.dumps({"const": {"description": "a" * MAX_BYTES}}), "bytes without descriptions"),
        (
            "json_schema",
            json.dumps({"properties": {"title": {"const": "a" * MAX_BYTES}}}),
            "bytes without descriptions",
        ),
        ("json_schema", json.dumps({"description": "a" * MAX_TEXT}), f"at most {MAX_TEXT} are served"),
        ("regex", "(a", "The parenthesis is not closed"),
        ("regex", "(?=a)b", "Lookahead is not supported"),
        ("regex", "(" * 20_000 + ")" * 20_000, "cannot be compiled"),
        ("regex", "a" * (MAX_BYTES + 1), f"has {MAX_BYTES + 1} bytes"),
        ("regex", "a\0", "U+0000"),
        ("regex", "a\ud800", "not Unicode"),
        ("ebnf", "root ::= other", '"other" is not defined'),
        ("ebnf", "", '"root" is not found'),
        ("structural_tag", "{}", "must have a format field"),
    ],
)
def test_what_cannot_is_refused_and_the_field_named(kind, text, said):
    for _ in range(2):  # the second time from memory
        with pytest.raises(FieldError) as found:
            check_grammar(Grammar(kind, text), "response_format.json_schema")
        assert found.value.field == "response_format.json_schema"
        assert said in str(found.value) and str(found.value).startswith("response_format.json_schema: the ")
        assert "/project/" not in str(found.value) and len(str(found.value)) < 600
    with pytest.raises(Refused) as refused:
        check_sampling(Sampling(grammar=Grammar(kind, text)))
    assert (refused.value.code, refused.value.field) == (400, "grammar")


def test_the_worst_that_is_served_is_parsed_in_a_second():
    level = {"type": "integer"}
    for _ in range(MAX_DEPTH // 2 - 3):
        level = {"type": "object", "properties": {"a": level}}
    wide = {"type": "object", "properties": {f"k{i}": level for i in range(40)}}
    text = json.dumps(wide)
    assert MAX_BYTES * 0.7 < len(text) < MAX_BYTES
    began = time.process_time()
    check_grammar(Grammar("json_schema", text))
    assert time.process_time() - began < 1


def test_what_was_found_is_remembered_within_bounds(monkeypatch):
    calls = []
    monkeypatch.setattr(module, "_parse", lambda grammar: calls.append(grammar) or "")
    monkeypatch.setattr(module, "_found", type(module._found)())
    for _ in range(2):
        for i in range(module.REMEMBERED):
            check_grammar(Grammar("regex", f"r{i}"))
    assert len(calls) == module.REMEMBERED
    check_grammar(Grammar("regex", "one more"))
    assert len(module._found) == module.REMEMBERED


def test_what_is_asked_again_is_remembered_longest(monkeypatch):
    calls = []
    monkeypatch.setattr(module, "_parse", lambda grammar: calls.append(grammar) or "")
    monkeypatch.setattr(module, "_found", type(module._found)())
    for i in range(2 * module.REMEMBERED):
        check_grammar(Grammar("regex", "an agent's own"))
        check_grammar(Grammar("regex", f"r{i}"))
    assert calls.count(Grammar("regex", "an agent's own")) == 1


def test_what_is_too_large_is_not_remembered(monkeypatch):
    """It is soon seen, and many of them would fill the memory."""
    monkeypatch.setattr(module, "_found", type(module._found)())
    grammar = Grammar("regex", "x" * (MAX_TEXT + 1))
    for _ in range(2):
        with pytest.raises(FieldError, match="at most"):
            check_grammar(grammar)
        with pytest.raises(FieldError, match="at most"):
            asyncio.run(check_aside(grammar))
    assert not module._found


def test_every_kind_has_a_name():
    assert module.NAMES.keys() == set(get_args(GrammarKind))


def test_without_xgrammar_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FieldError, match=r"radixrt\[grammar\]"):
        check_grammar(Grammar("regex", "not installed"))
    module._found.pop(("", Grammar("regex", "not installed")))


def test_the_event_loop_goes_on(monkeypatch):
    """A grammar that is new is parsed in a thread; one that is known costs nothing."""
    loop_went_on = threading.Event()
    monkeypatch.setattr(module, "_parse", lambda grammar: "too odd" if loop_went_on.wait(30) else "held up")

    async def main() -> None:
        checking = asyncio.ensure_future(check_aside(Grammar("regex", "slow")))
        await asyncio.sleep(0.01)  # it begins
        loop_went_on.set()
        with pytest.raises(FieldError, match="too odd"):
            await checking

    asyncio.run(main())
    assert is_checked(Grammar("regex", "slow"))
    module._found.pop(("", Grammar("regex", "slow")))


def test_a_request_of_ids_with_a_new_grammar_is_checked_aside():
    request = Generate(id=1, prompt=TokenPrompt(b"\1\0\0\0"), sampling=Sampling(grammar=Grammar("regex", "[new")))
    assert not is_encoded(request)
    with pytest.raises(FieldError, match="regular expression"):
        asyncio.run(encode(request, None))
    assert is_encoded(request), "the core refuses it at once"


@pytest.mark.parametrize(
    "kind, text, repeats",
    [
        ("regex", "(a?){8000}a{8000}", 16000),
        ("regex", "a{2001}", 2001),
        ("regex", "a{0,99999999999}", 999999999),
        ("regex", "a{5000,}", 5000),
        ("ebnf", 'root ::= "a"{1, 1500} [b-c]{501}', 2001),
    ],
)
def test_what_repeats_too_often_is_refused(kind, text, repeats):
    with pytest.raises(FieldError, match=f"repeats {repeats} times in all, at most 2000"):
        check_grammar(Grammar(kind, text))


@pytest.mark.parametrize(
    "kind, text",
    [
        ("regex", r"\{9000}"),
        ("regex", "[{9000}]a{1999}"),
        ("regex", "a{1,129}"),
        ("ebnf", 'root ::= "{9000}" "\\"{9000}" [{9000}] # {9000}'),
    ],
)
def test_what_only_looks_like_repetitions_is_served(kind, text):
    check_grammar(Grammar(kind, text))


def test_a_client_cannot_tell_from_the_time_what_others_have_sent(monkeypatch):
    calls = []
    monkeypatch.setattr(module, "_parse", lambda grammar: calls.append(grammar) or "")
    grammar = Grammar("regex", "a key is 53 letters")
    for owner in ("one", "one", "another", "another"):
        assert is_checked(grammar, owner) == (owner in ("one", "another")[: len(calls)])
        check_grammar(grammar, owner=owner)
    assert len(calls) == 2
    request = Generate(id=1, prompt=TokenPrompt(b"\1\0\0\0"), sampling=Sampling(grammar=grammar), api_key="third")
    assert not is_encoded(request)
    asyncio.run(check_aside(grammar, owner="third"))
    assert is_encoded(request) and len(calls) == 3
