"""Compiled grammars: by tenant, within bounds, and which of them are ordinary."""

from __future__ import annotations

import json
from concurrent.futures import Future

import pytest

from radixrt.messages import Grammar
from radixrt.worker.execution.fake_runner import EOS
from radixrt.worker.structured import compile as module
from radixrt.worker.structured.compile import BadGrammar, Grammars
from radixrt.worker.structured.fair import Job
from radixrt.worker.structured.grammar_cache import GrammarCache
from radixrt.worker.structured.ordinary import MAX_ALTERNATIVES, MAX_BYTES, is_ordinary
from tests.worker.structured.test_sitting import SIZE, TOKENS

WORDS = Grammar("regex", "two (apple|pear)")


@pytest.fixture
def grammars() -> Grammars:
    made = Grammars("", SIZE, frozenset({EOS}))
    made._vocabulary = TOKENS
    return made


def test_a_tenant_cannot_tell_from_the_time_what_others_have_sent(grammars):
    first, second = grammars.get(WORDS, "a").result(), grammars.get(WORDS, "b").result()
    assert grammars.get(WORDS, "a").result() is first is not second
    assert first.spelling._known is not second.spelling._known and first.spelling._ids is second.spelling._ids
    compilers = grammars._compilers
    assert compilers["a", "text"][0] is not compilers["b", "text"][0], "they cache rules"
    assert grammars.get(Grammar("json"), "a") is grammars.get(Grammar("json"), "b"), "it has no content"


def test_compilers_of_many_tenants_are_bounded(grammars, monkeypatch):
    monkeypatch.setattr(module, "MAX_COMPILERS", 3)
    for n in range(8):
        grammars.get(WORDS, f"tenant {n}").result()
    assert [tenant for tenant, _ in grammars._compilers] == ["tenant 5", "tenant 6", "tenant 7"]


def test_repetitions_that_xgrammar_cannot_cache_are_served(grammars):
    texts = ["^(ab|c){129,129}$", "^(ab|c){2,256}$", "^(ab|c){0,129}$", "^a{0,130}$", "^.{1,257}$", "^a{1,129}$"]
    for text in (*texts, *texts):
        schema = json.dumps({"type": "string", "pattern": text})
        assert grammars.get(Grammar("json_schema", schema), "a").result().nbytes


def test_a_failure_always_has_a_text(grammars, monkeypatch):
    def fail(*_):
        raise RuntimeError("[17:04:41] /a/b.cc:1: Check failed: (x) is false: ")

    monkeypatch.setattr(module, "_compile_by", lambda *_: {"regex": fail})
    error = grammars.get(WORDS).exception(20)
    assert isinstance(error, BadGrammar) and "xgrammar does not say why (RuntimeError)" in str(error)


def test_a_tenant_has_few_grammars_in_the_queue(grammars, monkeypatch):
    monkeypatch.setattr(module, "MAX_QUEUED", 0)
    with pytest.raises(BadGrammar, match="others of this tenant wait to be compiled"):
        grammars.get(WORDS, "a")


def test_the_tenant_with_the_most_loses_what_it_used_least_recently():
    cache = GrammarCache(20_000, lambda job: job.future.result())

    def add(tenant: str, text: str, size: int) -> None:
        job = Job(tenant, lambda: None)
        job.future = Future()
        job.future.set_result(size)
        cache.add((tenant, Grammar("regex", text)), job)

    add("small", "s", 1000)
    for n in range(9):
        add("large", f"{n}", 4000)
        cache.get(("large", Grammar("regex", "0")))
    assert cache.get(("small", Grammar("regex", "s"))) and cache.get(("large", Grammar("regex", "0")))
    assert not cache.get(("large", Grammar("regex", "1"))) and cache.nbytes < 30_000
    for key in (("large", Grammar("regex", "0")), ("small", Grammar("regex", "s"))):
        cache.drop(key)
        assert cache.get(key) is None


STRING = {"type": "string", "maxLength": 40}
CALL = {"type": "tag", "begin": "<call>", "content": {"type": "json_schema", "json_schema": STRING}, "end": "</call>"}
TAGS = {"type": "triggered_tags", "triggers": ["<call"], "tags": [CALL]}


@pytest.mark.parametrize(
    "kind, value, ordinary",
    [
        ("json", "", True),
        ("regex", "abc", False),
        ("ebnf", 'root ::= "a"', False),
        ("json_schema", {"type": "object", "properties": {"pattern": STRING, "format": STRING}}, True),
        ("json_schema", {"enum": [{"pattern": "a"}], "$defs": {"pattern": {"const": {"format": 1}}}}, True),
        ("json_schema", {"properties": {"a": {"items": {"anyOf": [STRING, {"pattern": "a"}]}}}}, False),
        ("json_schema", {"type": "string", "format": "email"}, False),
        ("json_schema", {"type": "string", "maxLength": 500}, False),
        ("structural_tag", {"format": {"type": "star", "content": CALL}}, True),
        ("structural_tag", {"format": {"type": "star", "content": {"type": "star", "content": CALL}}}, False),
        ("json_schema", {"patternProperties": {"a": STRING}}, False),
        ("json_schema", {"anyOf": [{"oneOf": [STRING] * (MAX_ALTERNATIVES - 1)}]}, True),
        ("json_schema", {"anyOf": [{"oneOf": [STRING] * MAX_ALTERNATIVES}]}, False),
        ("json_schema", {"const": "x" * MAX_BYTES}, False),
        ("structural_tag", {"type": "structural_tag", "format": TAGS}, True),
        ("structural_tag", {"format": {"type": "sequence", "elements": [{"type": "any_text"}, TAGS]}}, True),
        ("structural_tag", {"format": {**CALL, "content": {"type": "regex", "pattern": "a"}}}, False),
        ("structural_tag", {"format": {**CALL, "content": {"type": "json_schema", "json_schema": {"pattern": ""}}}},
         False),
        ("structural_tag", {"structures": [], "triggers": []}, False),
    ],
)  # fmt: skip
def test_which_grammars_are_ordinary(kind, value, ordinary):
    assert is_ordinary(Grammar(kind, value if isinstance(value, str) else json.dumps(value))) == ordinary
