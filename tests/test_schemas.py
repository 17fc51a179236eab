"""JSON schemas against the grammars that are made of them, with jsonschema as the judge."""

from __future__ import annotations

import itertools
import json
import re

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from radixrt.messages import Grammar
from radixrt.requests.schemas.ebnf import compilable
from radixrt.requests.schemas.inexact import Inexact
from radixrt.requests.schemas.patterns import Unsupported, in_json, matches, parsed, within
from radixrt.requests.schemas.rewrite import rewrite
from radixrt.requests.schemas.widen import widened

xgrammar = pytest.importorskip("xgrammar")
from xgrammar.testing import _is_grammar_accept_string as accepts  # noqa: E402

FAST = settings(max_examples=40, deadline=None)


def grammar_of(schema):
    return xgrammar.Grammar.from_ebnf(compilable(Grammar("json_schema", json.dumps(schema)), any_space=True))


def admits(grammar, value) -> bool:
    return accepts(grammar, json.dumps(value, ensure_ascii=False))


# ---------------------------------------------------------------- generated schemas and documents

NAMES = ("a", "b", "c")
TEXTS = ("", "a", "ab", "ba", "abc", 'a"', "\nb", "é", "x1", "😀b", "b" * 6)
PATTERNS = ("^a", "b$", "^[a-c]+$", r"\S", "^(xa+)?b*$", "^a?$|b", r"[^a]", '"', r"^\w\d$", "^.{1,3}$")
COUNTS = st.integers(0, 3)
NUMBERS = st.one_of(st.integers(-12, 12), st.sampled_from([0.5, -1.25, 2.125, 7.0]))
VALUES = st.one_of(
    st.sampled_from(TEXTS), st.integers(-3, 12), st.sampled_from([True, None, 0.5, [], {}, [1], {"a": 1}])
)


def some(**fields):
    """Some of the keywords."""
    return st.fixed_dictionaries({}, optional=fields)


def with_types(*kinds):
    def put(own, kind):
        return own | {"type": kind}

    return lambda own: st.builds(put, own, st.sampled_from(kinds))


TEXT = with_types("string", ["string", "null"])(
    some(pattern=st.sampled_from(PATTERNS), minLength=COUNTS, maxLength=COUNTS, title=st.just("t"))
)
NUMBER = with_types("integer", "number")(
    some(
        minimum=NUMBERS,
        maximum=NUMBERS,
        exclusiveMinimum=NUMBERS,
        exclusiveMaximum=NUMBERS,
        multipleOf=st.integers(1, 4),
    )
)
LEAVES = st.one_of(
    TEXT,
    NUMBER,
    st.sampled_from([{}, True, {"type": "boolean"}, {"type": "null"}, {"type": "object"}, {"type": "array"}]),
    st.builds(lambda values: {"enum": values}, st.lists(VALUES, min_size=1, max_size=4)),
    st.builds(
        lambda value, kind: {"const": value, "type": kind}, VALUES, st.sampled_from(["string", "integer", "object"])
    ),
)


def inside(children):
    named = st.dictionaries(st.sampled_from(NAMES), children, max_size=3)
    objects = with_types("object")(
        some(
            properties=named,
            required=st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
            additionalProperties=children | st.booleans(),
            patternProperties=st.dictionaries(st.sampled_from(["^a", "^x", "b$"]), children, max_size=1),
            propertyNames=st.sampled_from([{"pattern": "^[ab]"}, {"enum": ["a", "c"]}, {"maxLength": 1}]),
            minProperties=COUNTS,
            maxProperties=COUNTS,
        )
    )
    arrays = with_types("array")(
        some(
            items=children,
            prefixItems=st.lists(children, min_size=1, max_size=2),
            minItems=COUNTS,
            maxItems=COUNTS,
            uniqueItems=st.booleans(),
            contains=children,
        )
    )
    several = st.lists(children, min_size=1, max_size=3)
    either = st.sampled_from(["anyOf", "oneOf", "allOf"])
    combined = st.builds(
        lambda key, parts, own: (own if isinstance(own, dict) else {}) | {key: parts}, either, several, children
    )
    return st.one_of(objects, arrays, combined)


SCHEMAS = st.recursive(LEAVES, inside, max_leaves=6)
DOCUMENTS = st.recursive(
    VALUES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from((*NAMES, "x1")), inner, max_size=3),
    max_leaves=5,
)


def ordered(value, names):
    """With the properties in an order."""
    if isinstance(value, dict):
        return {name: ordered(value[name], names) for name in sorted(value, key=names.index)}
    return [ordered(inner, names) for inner in value] if isinstance(value, list) else value


def opened(schema):
    """With `additionalProperties` where properties are named: others are written only if it asks for them."""
    if isinstance(schema, dict):
        made = {key: inner if key in ("const", "enum") else opened(inner) for key, inner in schema.items()}
        return made | (
            {} if "additionalProperties" in made or made.get("type") != "object" else {"additionalProperties": True}
        )
    return [opened(inner) for inner in schema] if isinstance(schema, list) else schema


ORDERS = list(itertools.permutations((*NAMES, "x1")))


@FAST
@given(schema=SCHEMAS, documents=st.lists(DOCUMENTS, min_size=8, max_size=8))
def test_what_a_grammar_admits_is_valid(schema, documents):
    try:
        grammar = grammar_of(schema)
    except Inexact:
        return
    judge = jsonschema.Draft202012Validator(schema)
    for document in documents:
        for names in ORDERS[::7]:
            if admits(grammar, ordered(document, names)):
                judge.validate(document)


@FAST
@given(schema=SCHEMAS.map(opened), documents=st.lists(DOCUMENTS, min_size=8, max_size=8))
def test_what_is_valid_a_grammar_admits(schema, documents):
    """Apart from values that only a property which may be missing tells from those of another branch of `oneOf`."""
    assume('"oneOf"' not in json.dumps(schema))
    judge = jsonschema.Draft202012Validator(schema)
    valid = [document for document in documents if judge.is_valid(document)]
    try:
        grammar = grammar_of(schema)
    except Inexact as problem:
        assert not valid or "satisfied by no value" not in str(problem)
        return
    for document in valid:
        assert any(admits(grammar, ordered(document, names)) for names in ORDERS), document


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [0, False]},
        {"enum": [True, "a", 1]},
        {"anyOf": [{"const": 1}, {"const": True}]},
        {"enum": [[1], [True]]},
    ],
)
def test_numbers_and_booleans_of_an_enum_are_different_values(schema):
    judge, grammar = jsonschema.Draft202012Validator(schema), grammar_of(schema)
    for value in (0, False, 1, True, [1], [True], "a"):
        assert admits(grammar, value) is judge.is_valid(value), value


# ---------------------------------------------------------------- patterns


def pieces():
    one = st.sampled_from(["a", "b", "x", ".", "[ab]", "[^a]", r"\S", r"\d", '"', r"\\", r"\n", "é", "[^é]", "😀"])
    return st.recursive(
        one,
        lambda inner: st.one_of(
            st.builds("{}{}".format, inner, inner),
            st.builds("({}|{})".format, inner, inner),
            st.builds("({}){}".format, inner, st.sampled_from(["?", "*", "+", "{0,2}", "{2}", "{1,}", "??"])),
            st.builds("(?:x({})+|)".format, inner),
        ),
        max_leaves=5,
    )


@FAST
@given(
    pattern=st.builds("{}{}{}".format, st.sampled_from(["", "^"]), pieces(), st.sampled_from(["", r"\Z"])),
    texts=st.lists(st.text('abx1"\\\n é😀', max_size=6), min_size=8, max_size=8),
    bounds=st.tuples(st.integers(0, 2), st.integers(2, 5)),
)
def test_patterns_are_those_of_re(pattern, texts, bounds):
    """Also where xgrammar's automata go wrong: an optional group with a loop in it, and whatever JSON escapes."""
    node = parsed(pattern.replace(r"\Z", "$"))
    schema = {"type": "string", "pattern": pattern.replace(r"\Z", "$")}
    grammar, short = grammar_of(schema), within(node, *bounds)
    for text in texts:
        right = re.search(pattern, text) is not None
        assert admits(grammar, text) is matches(node, text) is right, text
        assert short is None or matches(short, text) is (right and bounds[0] <= len(text) <= bounds[1])


def test_a_pattern_that_is_too_long_for_its_bound_matches_nothing():
    node = within(parsed("^[^a][ab][ab]"), 1, 2)
    assert node is not None and not any(matches(node, text) for text in ("", "x", "xa"))


@pytest.mark.parametrize(
    "pattern", [r"^(?=a)b", r"(?<!a)b", r"(a)\1", r"\bx", r"\p{L}", "(a", "a)", "[a", "*a", "(^a|b$)c", "[]"]
)
def test_patterns_that_are_not_followed_are_refused(pattern):
    with pytest.raises(Unsupported):
        parsed(pattern)


# ---------------------------------------------------------------- what is refused, and what is left out

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
REFUSED = [
    ({"type": "integer", "not": {"const": 5}}, "#/not"),
    (OBJECT | {"if": {"required": ["a"]}, "then": {"required": ["b"]}}, "#/if"),
    (OBJECT | {"dependentRequired": {"a": ["b"]}}, "#/dependentRequired"),
    ({"properties": {"x": {"type": "string", "format": "idn-email"}}}, "#/properties/x/format"),
    ({"type": "string", "format": "email", "maxLength": 6}, "#/maxLength"),
    ({"type": "string", "pattern": "a.*b", "maxLength": 6}, "#/maxLength"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "#/uniqueItems"),
    ({"type": "array", "contains": {"type": "integer"}}, "#/contains"),
    ({"type": "number", "multipleOf": 0.01}, "#/multipleOf"),
    ({"type": "integer", "multipleOf": 5, "minimum": 0}, "#/multipleOf"),
    ({"$ref": "https://x.example/y"}, "#/$ref"),
    ({"items": {"$ref": "#/$defs/a~1b"}}, "#/items/$ref"),
    ({"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 5}]}, "#/oneOf"),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}], "type": "string"}, "#/allOf/1/pattern"),
    ({"type": "object", "patternProperties": {"^x": {"type": "null"}}, "additionalProperties": True}, "#/additional"),
    ({"type": "object", "properties": {"a/b": {"minimum": "3"}}}, "#/properties/a~1b/minimum"),
    ({"type": "array", "contains": {}, "minItems": 2, "maxItems": 1}, "# is satisfied by no value"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "# is satisfied by no value"),
]


@pytest.mark.parametrize(("schema", "said"), REFUSED, ids=[f"{said}-{i}" for i, (_, said) in enumerate(REFUSED)])
def test_what_cannot_be_enforced_is_refused_by_its_path_and_left_out_of_the_wider_schema(schema, said):
    with pytest.raises(Inexact) as caught:
        rewrite(schema, in_json)
    assert str(caught.value).startswith(said)
    wider, dropped = widened(schema)
    assert dropped and (dropped[0].startswith(said) or dropped == ("#",))
    assert grammar_of(wider)


def test_a_wider_schema_keeps_the_rest():
    schema = {"type": "object", "properties": {"a": {"type": "integer", "not": {"const": 1}}, "b": {"oneOf": [{}, {}]}}}
    kept = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"anyOf": [{}, {}]}}}
    assert widened(schema) == (kept, ("#/properties/a/not", "#/properties/b/oneOf"))
    assert widened(kept) == (kept, ())


ADMITTED = [
    (OBJECT | {"properties": {"a": {"not": {}}}, "additionalProperties": {}}, [{"b": 1}, {"ab": 1}], [{"a": 1}]),
    (OBJECT | {"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    (OBJECT | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, [{"a": 1}, {"a": 1, "b": 1}], [{}]),
    ({"type": "string", "minLength": 1}, ['"', "a\n"], [""]),
    ({"type": "string", "minLength": 200}, ["\n" * 200, "a" * 999], ["a" * 199]),
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "2024-04-31"]),
    ({"type": "string", "format": "uri", "minLength": 1, "default": 3, "examples": [3]}, ["http://a.b/c"], ["a b"]),
    ({"type": "string", "format": "phone"}, ["any"], []),
    ({"items": {"enum": ["a", "b"]}, "type": "array", "uniqueItems": True}, [["b", "a"], []], [["a", "a"]]),
    ({"type": "array", "contains": {"type": "null"}, "maxItems": 1}, [[None]], [[], [1], [None, None]]),
    ({"type": "array", "items": [{"type": "null"}], "additionalItems": False}, [[None], []], [[1], [None, 1]]),
    ({"enum": [0.1, {"a": [1]}, 1e3]}, [0.1, {"a": [1]}, 1000], [0.2, {"a": []}]),
    ({"type": "integer", "minimum": 0.5, "multipleOf": 0.5, "maximum": 1e30}, [1], [0]),
    ({"$defs": {"a": {"$anchor": "x", "type": "null"}}, "items": {"$ref": "#x"}, "type": "array"}, [[None]], [[1]]),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), ADMITTED)
def test_what_agents_ask_for_is_enforced(schema, right, wrong):
    grammar = grammar_of(schema)
    assert all(admits(grammar, value) for value in right)
    assert not any(admits(grammar, value) for value in wrong)


@pytest.mark.parametrize(("least", "most"), [(0, 129), (63, 191), (130, 140), (100, 1000), (1000, 1000), (0, 100_000)])
def test_long_strings_are_counted_in_characters(least, most):
    """An escape is one."""
    grammar = grammar_of({"type": "string", "minLength": least, "maxLength": most})
    for length in {0, least - 1, least, least + 1, 127, 128, 192, (least + most) // 2, most - 1, most, most + 1}:
        for char in ("a", "😀", r"\n", r"\"", r"\ud83d\ude00")[: 1 if length > 500 else 5]:
            assert length < 0 or accepts(grammar, f'"{char * length}"') is (least <= length <= most), (length, char)
    assert not accepts(grammar, '"' + "a" * least + '\t"'), "it is escaped in JSON"


def test_recorded_schemas_are_enforced_or_refused(shared_data):
    """A schema that must refuse something may be refused itself."""
    for case in json.loads((shared_data.parent / "cases" / "api" / "schemas.json").read_text()):
        try:
            grammar = grammar_of(case["schema"])
        except Inexact as problem:
            assert case["must_refuse"] or "uniqueItems" in str(problem), case["name"]
            continue
        assert all(admits(grammar, value) for value in case["must_accept"]), case["name"]
        assert not any(admits(grammar, value) for value in case["must_refuse"]), case["name"]


NO_TEXT = (b"\xed\xa0\x80", b"\xe0\x80\x80", b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xc1\x80")
"""A surrogate, characters in more bytes than they need, and what is beyond U+10FFFF."""


@pytest.mark.parametrize("schema", [{"maxLength": 2}, {"pattern": "^[^a]?$"}])
def test_a_character_is_never_of_bytes_that_are_no_text(schema):
    """A decoder would make several of each."""
    info = xgrammar.TokenizerInfo([bytes([i]) for i in range(256)] + [b""], stop_token_ids=[256])
    grammar = xgrammar.GrammarCompiler(info).compile_grammar(grammar_of(schema | {"type": "string"}))

    def takes(text: bytes) -> bool:
        matcher = xgrammar.GrammarMatcher(grammar)
        return all(map(matcher.accept_token, b'"' + text + b'"')) and matcher.accept_token(256)

    assert not any(map(takes, NO_TEXT))
    assert all(takes(char.encode()) for char in "b~\u0080\u07ff\u0800\u1000\ud7ff\ue000\uffff\U00010000\U0010ffff")
