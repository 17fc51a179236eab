"""Arguments of strict tools in every form of a call: what a grammar admits is valid, as jsonschema judges what is read;
what is valid is admitted."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest

from radixrt.formats.parsing import CallArguments, Function, OutputParser
from radixrt.formats.parsing.dsml import Dsml
from radixrt.formats.parsing.gemma import Gemma
from radixrt.formats.parsing.glm import Glm
from radixrt.formats.parsing.hermes import Hermes
from radixrt.formats.parsing.hunyuan import Hunyuan
from radixrt.formats.parsing.minimax import MiniMax
from radixrt.formats.parsing.olmo import Olmo
from radixrt.formats.parsing.pythonic import LFM2, Pythonic
from radixrt.formats.parsing.qwen_coder import SEED, QwenCoder
from radixrt.messages import Grammar
from radixrt.requests.schemas.ebnf import compilable
from radixrt.requests.schemas.inexact import Inexact
from tests.frontend.scripted import scripted

xgrammar = pytest.importorskip("xgrammar")

Write = Callable[[dict[str, Any]], str]


def tagged(argument: str, around: str) -> Write:
    """How a call is written whose arguments stand between tags: `argument` with (name, value)."""

    def write(arguments: dict[str, Any]) -> str:
        texts = [(name, one if isinstance(one, str) else json.dumps(one)) for name, one in arguments.items()]
        return around % "".join(argument % pair for pair in texts)

    return write


def dsml(arguments: dict[str, Any]) -> str:
    parts = [
        f'<｜DSML｜parameter name="{name}" string="{str(isinstance(one, str)).lower()}">'
        f"{one if isinstance(one, str) else json.dumps(one)}</｜DSML｜parameter>\n"
        for name, one in arguments.items()
    ]
    calls = f'<｜DSML｜invoke name="f">\n{"".join(parts)}</｜DSML｜invoke>'
    return f"\n\n<｜DSML｜function_calls>\n{calls}\n</｜DSML｜function_calls>"


def python(around: str) -> Write:
    return lambda arguments: around % ", ".join(f"{name}={json.dumps(one)}" for name, one in arguments.items())


def gemma(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case list():
            return f"[{','.join(map(gemma, value))}]"
        case dict():
            return f"{{{','.join(f'{name}:{gemma(one)}' for name, one in value.items())}}}"
    return json.dumps(value)


FORMATS: dict[str, tuple[Any, Write]] = {
    "hermes": (
        Hermes(),
        lambda arguments: f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(arguments)}}}\n</tool_call>',
    ),
    "glm": (
        Glm(),
        tagged("<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n", "<tool_call>f\n%s</tool_call>"),
    ),
    "qwen_coder": (
        QwenCoder(),
        tagged("<parameter=%s>\n%s\n</parameter>\n", "<tool_call>\n<function=f>\n%s</function>\n</tool_call>"),
    ),
    "seed": (
        QwenCoder(SEED, False),
        tagged("<parameter=%s>%s</parameter>\n", "<seed:tool_call>\n<function=f>\n%s</function>\n</seed:tool_call>"),
    ),
    "minimax": (
        MiniMax(),
        tagged(
            '<parameter name="%s">%s</parameter>\n',
            '<minimax:tool_call>\n<invoke name="f">\n%s</invoke>\n</minimax:tool_call>',
        ),
    ),
    "hunyuan": (
        Hunyuan(":x"),
        tagged(
            "<arg_key:x>%s</arg_key:x>\n<arg_value:x>%s</arg_value:x>\n",
            "<tool_calls:x>\n<tool_call:x>f<tool_sep:x>\n%s</tool_call:x>\n</tool_calls:x>",
        ),
    ),
    "dsml": (Dsml(), dsml),
    "olmo": (Olmo(), python("<function_calls>f(%s)</function_calls>")),
    "lfm2": (Pythonic(LFM2), python("<|tool_call_start|>[f(%s)]<|tool_call_end|>")),
    "gemma": (Gemma(), lambda arguments: f"<|tool_call>call:f{gemma(arguments)}<tool_call|>"),
}
"""A format, and how a model that follows it writes a call of `f`."""

INTEGER, XY = {"type": "integer"}, {"x": {"type": "integer"}, "y": {"type": "string"}}
NULL = {"type": "null"}
VALUES: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "type": (INTEGER, [0, -5], ["a", 0.5, None, [1]]),
    "types": ({"type": ["string", "null"]}, ["", "a b", "5", None], [["a"]]),
    "string": ({"type": "string"}, ["", "a\nb", "5", "null", "a </b> c", "[1]"], []),
    "boolean": ({"type": "boolean"}, [True, False], ["yes", 1]),
    "pattern": ({"type": "string", "pattern": "^[ab]+$"}, ["ab"], ["", "abc", "ab "]),
    "pattern, anywhere": ({"type": "string", "pattern": "a"}, ["xay"], ["xy"]),
    "minLength": ({"type": "string", "minLength": 2}, ["é\n", "abc"], ["a", ""]),
    "maxLength": ({"type": "string", "maxLength": 2}, ["", "é\n"], ["abc", "ab "]),
    "maxLength, long": ({"type": "string", "maxLength": 300}, ["\n" * 300, "a</b>" * 60], ["a" * 301]),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
    "format": ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", " 2024-02-29"]),
    "format, xgrammar's": ({"type": "string", "format": "email"}, ["a.b@c.de"], ["a", '"a@b.de"']),
    "minimum": ({"type": "integer", "minimum": 5}, [5, 77], [4, -5]),
    "exclusiveMaximum": ({"type": "number", "exclusiveMaximum": 1, "minimum": 0}, [0, 0.5], [1, 1.5, -1]),
    "multipleOf": ({"type": "integer", "multipleOf": 4}, [4, 96], [6]),
    "items": ({"type": "array", "items": INTEGER}, [[], [1, 2]], [["a"], [1, None]]),
    "minItems": ({"type": "array", "items": INTEGER, "minItems": 2}, [[1, 2], [1, 2, 3]], [[], [1]]),
    "maxItems": ({"type": "array", "items": INTEGER, "maxItems": 1}, [[], [1]], [[1, 2]]),
    "uniqueItems": (
        {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
        [[], ["b", "a"]],
        [["a", "a"]],
    ),
    "prefixItems": (
        {"type": "array", "prefixItems": [INTEGER, {"type": "string"}], "items": False},
        [[], [1], [1, "a"]],
        [["a"], [1, 2], [1, "a", 3]],
    ),
    "contains": ({"type": "array", "contains": NULL, "maxItems": 1}, [[None]], [[], [1]]),
    "enum": ({"enum": ["a", "b c", None]}, ["a", "b c"], ["c", "A", 1]),
    "const": ({"const": 5}, [5], [6, "a"]),
    "anyOf": ({"anyOf": [{"type": "integer", "minimum": 3}, NULL]}, [3, None], [2, "a"]),
    "oneOf": ({"oneOf": [{"type": "integer", "maximum": 3}, {"type": "boolean"}]}, [3, True], [4, "a"]),
    "allOf": ({"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 3}]}, ["ab"], ["a", "abcd"]),
    "$ref": ({"$ref": "#/$defs/short"}, ["ab"], ["abc"]),
    "required": ({"type": "object", "properties": XY, "required": ["y"]}, [{"y": "a"}], [{}, {"x": 1}]),
    "properties": ({"type": "object", "properties": XY}, [{}, {"x": 1, "y": "a"}], [{"x": "a"}, {"z": 1}]),
    "additionalProperties": ({"type": "object", "additionalProperties": INTEGER}, [{}, {"q": 1}], [{"q": "a"}]),
    "minProperties": ({"type": "object", "properties": XY, "minProperties": 1}, [{"x": 1}], [{}]),
    "maxProperties": (
        {"type": "object", "additionalProperties": INTEGER, "maxProperties": 1},
        [{}, {"q": 1}],
        [{"q": 1, "r": 2}],
    ),
    "dependentRequired": ({"type": "object", "properties": XY, "dependentRequired": {"x": ["y"]}}, [], [{"x": 1}]),
    "patternProperties": ({"type": "object", "patternProperties": {"^x": INTEGER}}, [], [{"x": "a"}]),
    "not": (INTEGER | {"not": {"const": 5}}, [], [5]),
}
"""Schemas of an argument, by what they are about, with valid and invalid values of it."""
TOP: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "dependentRequired": ({"properties": XY, "dependentRequired": {"x": ["y"]}}, [], [{"x": 1}]),
    "additionalProperties": ({"properties": XY, "additionalProperties": INTEGER}, [{"x": 1, "z": 2}], [{"x": "a"}]),
    "minProperties": ({"properties": XY, "minProperties": 1}, [{"x": 1}, {"y": "a"}], [{}]),
    "maxProperties": ({"properties": XY, "maxProperties": 1}, [], [{"x": 1, "y": "a"}]),
    "patternProperties": ({"patternProperties": {"^x": INTEGER}, "additionalProperties": False}, [], [{"y": 1}]),
    "propertyNames": ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INTEGER}, [{"a": 1}], [{"c": 1}]),
    "oneOf": ({"properties": XY, "oneOf": [{"required": ["x"]}, {"required": ["y"]}]}, [{"x": 1}], [{}]),
    "$ref": ({"$ref": "#/$defs/object"}, [{"x": 1}], [{}, {"x": 4}]),
    "if": ({"properties": XY, "if": {"required": ["x"]}, "then": {"required": ["y"]}}, [], [{"x": 1}]),
    "allOf": (
        {"allOf": [{"properties": {"x": INTEGER}, "required": ["x"]}, {"properties": {"y": {"maxLength": 1}}}]},
        [],
        [{}, {"x": 1, "y": "abc"}],
    ),
}
"""The same for the whole schema."""
DEFINED = {
    "short": {"type": "string", "maxLength": 2},
    "object": {"type": "object", "properties": {"x": {"type": "integer", "maximum": 3}}, "required": ["x"]},
}

INFO = xgrammar.TokenizerInfo([bytes([i]) for i in range(256)] + [b""], stop_token_ids=[256])
COMPILER = xgrammar.GrammarCompiler(INFO)


def cases() -> list[tuple[str, dict[str, Any], list[Any], list[Any]]]:
    found = []
    for name, (schema, right, wrong) in VALUES.items():
        whole = {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": DEFINED}
        found.append((name, whole, [{"a": one} for one in right], [{"a": one} for one in wrong]))
    for name, (schema, right, wrong) in TOP.items():
        found.append((f"top {name}", {"type": "object", "$defs": DEFINED} | schema, right, wrong))
    return found


def compiled(form: Any, schema: dict[str, Any]) -> Any:
    tag = {"type": "structural_tag", "format": form.forced([Function("f", schema)], False)}
    return COMPILER.compile_structural_tag(compilable(Grammar("structural_tag", json.dumps(tag)), any_space=True))


def admits(grammar: Any, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(grammar)
    return matcher.accept_string(text) and matcher.accept_token(256)


def read(form: Any, text: str, schema: dict[str, Any]) -> Any:
    parser = OutputParser(form, {"f": schema})
    pieces = parser.push(text) + parser.finish()
    return json.loads("".join(piece.text for piece in pieces if isinstance(piece, CallArguments)))


ENDS = [b'"', b'<|"|>', b"</parameter>\n", b"\n</parameter>\n", b"</arg_value>\n", b"</arg_value:x>\n"]
ENDS.append("</｜DSML｜parameter>\n".encode())
LIKELY = frozenset(b"abx05,}])>-{[truefalsn")


def drawn(grammar: Any, rng: random.Random) -> str | None:
    """A text that the grammar admits, byte by byte at random; None if that does not come to an end."""
    matcher = xgrammar.GrammarMatcher(grammar, max_rollback_tokens=-1)
    mask, text = xgrammar.allocate_token_bitmask(1, 257), b""
    while len(text) < 700:
        matcher.fill_next_token_bitmask(mask)
        may = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[:257]
        if may[256]:
            return text.decode()
        bytes_ = [int(byte) for byte in np.flatnonzero(may[:128])] or [int(np.flatnonzero(may)[0])]
        ends = [end for end in ENDS if may[end[0]]] if rng.random() < 0.3 else []
        one = next((end for end in ends if matcher.accept_string(end)), b"")
        if not one:
            likely = [byte for byte in bytes_ if byte in LIKELY]
            one = bytes([rng.choice(likely if likely and rng.random() < 0.9 else bytes_)])
            assert matcher.accept_string(one)
        text += one
    return None


@pytest.mark.parametrize("name", FORMATS)
def test_a_strict_schema_is_enforced_or_refused(name):
    form, write = FORMATS[name]
    rng, refused = random.Random(1), set()
    for case, schema, right, wrong in cases():
        try:
            grammar = compiled(form, schema)
        except Inexact:
            refused.add(case)
            continue
        judge = jsonschema.Draft202012Validator(schema)
        for one in right:
            assert admits(grammar, write(one)), (case, one)
            assert read(form, write(one), schema) == one, (case, one)
        for one in wrong:
            assert not admits(grammar, write(one)) or judge.is_valid(read(form, write(one), schema)), (case, one)
        for text in filter(None, (drawn(grammar, rng) for _ in range(5))):
            assert judge.is_valid(read(form, text, schema)), (case, text)
    unserved = {"dependentRequired", "not", "top dependentRequired", "top if"}
    assert unserved <= refused <= unserved | {
        "patternProperties", "top maxProperties", "top patternProperties", "top allOf",
    }, refused  # fmt: skip


def test_what_a_form_of_calls_cannot_have_is_refused_or_left_out_and_told(tmp_path):
    """By its path: with Gemma's calls, a name that matches a pattern."""
    names = {"type": "object", "patternProperties": {"^x": INTEGER}, "additionalProperties": False}
    schema = {"type": "object", "properties": {"a": names, "b": {"type": "string", "maxLength": 2}}, "required": ["b"]}
    with scripted("gemma", tmp_path) as model:

        def asked(strict: bool) -> Any:
            tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
            create = model.client.chat.completions.with_raw_response.create
            fields = {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 50}
            model.says(f"<|tool_call>call:f{gemma({'b': 'ab', 'a': {'xy': 1}})}<tool_call|>")
            return create(tools=[tool], tool_choice="required", **fields)

        with pytest.raises(
            openai.BadRequestError, match="#/properties/a/patternProperties cannot be enforced"
        ) as caught:
            asked(strict=True)
        assert caught.value.param == "tools[0].function.parameters"
        answer = asked(strict=False)
        told = "not enforced: tools[0].function.parameters#/properties/a/patternProperties"
        assert answer.headers["x-radixrt-warning"] == told
        (call,) = answer.parse().choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"b": "ab", "a": {"xy": 1}}
