"""Text that follows grammars, from a small model whose own text follows none."""

from __future__ import annotations

import gzip
import json
import re
import sys
import threading
import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import jsonschema
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from radixrt.config import WorkerConfig, resolve
from radixrt.messages import Grammar, GrammarKind, Run, Sampling
from radixrt.requests.schemas.inexact import Inexact
from radixrt.requests.schemas.patterns import in_text
from radixrt.requests.schemas.rewrite import rewrite
from radixrt.worker.execution.fake_runner import EOS
from radixrt.worker.execution.sampler import Masks, TorchSampler
from radixrt.worker.load.runner import load_runner
from radixrt.worker.plan import NONE_ALLOWED
from radixrt.worker.request import Request
from radixrt.worker.structured import compile as module
from radixrt.worker.structured.compile import Grammars, _compile_by
from radixrt.worker.structured.grammar_cache import ENTRY_BYTES
from radixrt.worker.structured.masks import DEAD_END, fill_masks
from radixrt.worker.structured.matcher import STRAYED, Matcher
from radixrt.worker.structured.vocabulary import read_vocabulary
from tests.checkpoints import make_model, make_tokenizer
from tests.worker.engine import Engine, prompts

VOCAB = 540
"""Rows of the model's embedding; the tokenizer has 512."""
GREEDY = Sampling(max_tokens=150, temperature=0.0)
WORDS = Grammar("regex", r"(red|green|blue)( (red|green|blue)){3,5}\.")
ORDER = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "kind": {"enum": ["tea", "coffee"]},
                "cups": {"type": "integer", "minimum": 1, "maximum": 400},
                "note": {"type": "string", "maxLength": 6},
                "hot": {"type": "boolean"},
            },
            "required": ["kind", "cups", "note", "hot"],
            "additionalProperties": False,
        }
    ),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("grammar")
    make_model(path, "llama", vocab_size=VOCAB)
    return make_tokenizer(path)


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def grammars(folder) -> Grammars:
    return Grammars(str(folder), VOCAB, frozenset({EOS}))


@pytest.fixture(scope="module")
def whole(folder) -> dict[int, float]:
    """Biases against parts of characters where they need not be: xgrammar's classes let them be joined to what is no
    Unicode."""
    tokens = read_vocabulary(folder, 512).tokens
    return {i: -100.0 for i, token in enumerate(tokens) if "\ufffd" in token.decode("utf-8", "replace")}


@pytest.fixture(scope="module")
def calm(tokenizer, whole) -> dict[int, float]:
    """Biases that also keep a random model from white space without end."""
    return whole | {i: -100.0 for i in range(512) if not tokenizer.decode([i]).strip()} | {EOS: 5.0}


class Follower(Engine):
    """An Engine whose requests have matchers, as the worker's loop gives them."""

    def __init__(self, grammars: Grammars, runner, **sizes) -> None:
        super().__init__(runner, **sizes)
        self.grammars = grammars

    def prepare(self, request) -> None:
        if request.sampling.grammar is not None:
            request.matcher = Matcher(self.grammars.get(request.sampling.grammar).result(), request)


@pytest.fixture(scope="module")
def load(folder):
    def make(**changes):
        config = {"model": str(folder), "device": "cpu", "max_total_tokens": 4096, "deterministic": True}
        return load_runner(resolve(WorkerConfig(**(config | changes))))

    return make


@pytest.fixture(scope="module")
def engine(grammars, load) -> Follower:
    """Kept warm by all tests that use it."""
    return Follower(grammars, load())


@pytest.fixture
def say(engine, tokenizer):
    """`say(grammar, **sampling)` -> (text without its end, tokens, last output)."""

    def generate(grammar: Grammar | None, prompt=(5, 6, 7), **changes):
        sampling = Sampling(**({"max_tokens": 150, "temperature": 0.0, "grammar": grammar} | changes))
        id = engine.add(list(prompt), sampling)
        engine.finish()
        tokens, last = engine.tokens(id), engine.last(id)
        text = tokenizer.decode(tokens[:-1] if last.stop is not None else tokens, skip_special_tokens=False)
        return text, tokens, last

    return generate


# ---------------------------------------------------------------- what is said


PATTERNS = ["^[a-c]{1,3}$", "^.{1,4}$", "^[^@x]{1,2}@[^@]{1,2}$", r"^(a|.)[.b]{2}$", '^"(a|")$']


def schemas():
    """Of finite languages, so that a random model comes to an end."""
    names = st.sampled_from(["a", "ä", 'q"', "名", "long name", "b\\"])
    numbers = st.integers(-999, 999)
    leaves = st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.builds(lambda x: {"const": x}, st.one_of(numbers, names)),
        st.lists(st.one_of(names, numbers, st.none()), min_size=1, max_size=3).map(lambda x: {"enum": x}),
        st.builds(lambda x, n: {"type": "integer", "minimum": x, "maximum": x + n}, numbers, st.integers(0, 500)),
        st.builds(lambda n, m: {"type": "string", "minLength": n, "maxLength": n + m}, *[st.integers(0, 3)] * 2),
        st.sampled_from(PATTERNS).map(lambda x: {"type": "string", "pattern": x}),
    )

    def inside(children):
        objects = st.dictionaries(names, children, max_size=3).map(
            lambda p: {
                "type": "object",
                "properties": p,
                "required": sorted(p)[: len(p) // 2 + 1],
                "additionalProperties": False,
            }
        )
        arrays = st.builds(
            lambda c, n, m: {"type": "array", "items": c, "minItems": n, "maxItems": n + m},
            children,
            *[st.integers(0, 2)] * 2,
        )
        return st.one_of(objects, arrays, st.lists(children, min_size=1, max_size=2).map(lambda x: {"anyOf": x}))

    return st.recursive(leaves, inside, max_leaves=5)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=schemas(), seed=st.integers(0, 1 << 30))
def test_json_of_random_schemas(schema, seed, say, calm):
    grammar = Grammar("json_schema", json.dumps(schema))
    for temperature in (0.0, 1.5):
        text, _, last = say(grammar, temperature=temperature, seed=seed, logit_bias=calm, max_tokens=400)
        assert last.finish == "stop" and last.stop == EOS, (last, text)
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def matches(grammars: Grammars, grammar: Grammar, text: str) -> bool:
    request = Request(run(grammar), 99, frozenset({EOS}))
    matcher = Matcher(grammars.get(grammar).result(), request).matcher
    return matcher.accept_string(text) and matcher.is_completed()


@pytest.mark.parametrize("pattern", [r"\S{3}", r"\D{3}", r"\W{3}", ".{3}", "[^a]{3}", r'("|\\|\"){3}', r"[^\W]{3}"])
def test_patterns_give_json(pattern, grammars):
    """Whatever characters they let stand, and nothing that a JSON string has to escape."""
    grammar = Grammar("json_schema", json.dumps({"items": {"type": "string", "pattern": pattern}, "type": "array"}))
    for inside in ('"""', "\\\\\\", "\n\n\n", "\r\r\r", '", '):
        assert not matches(grammars, grammar, f'["{inside}"]')
    said = [x for x in ("---", "bcd", "###", '"""', "\\\\\\") if matches(grammars, grammar, json.dumps([x]))]
    assert said == [x for x in said if re.fullmatch(pattern, x, re.ASCII)] and said


@pytest.mark.parametrize("pattern", [r"a\tb", r"a\n+b", r"[\r\n]{2}", r"a\x0ab", r'x"+\\', r"a\v", r"[\"\\]\u0022"])
def test_what_a_string_has_to_escape_may_be_asked_for(pattern, grammars):
    """As JSON writes it, however it is spelled in the pattern."""
    grammar = Grammar("json_schema", json.dumps({"type": "string", "pattern": f"^{pattern}$"}))
    for text in ("a\tb", "a\nb", "a\n\nb", "anb", "\r\n", "\n", 'x"\\', 'x""\\', "x\\", "a\v", "a", '""', '\\"'):
        assert matches(grammars, grammar, json.dumps(text)) is bool(re.fullmatch(pattern, text))
        raw = f'"{text}"'
        assert raw == json.dumps(text) or not matches(grammars, grammar, raw)


def test_a_character_by_its_number_has_two_digits(grammars):
    """Whatever follows them."""
    grammar = Grammar("regex", r"\x41b\xe91[\x30c]\\x41b")
    assert matches(grammars, grammar, r"Abé1c\x41b")
    assert not matches(grammars, grammar, "\u041b\u0e91c" + r"\x41b")


NAMED = {"type": "object", "properties": {"name": {"enum": ["Ada"]}}, "required": ["name"]}
AGED = {"properties": {"age": {"enum": [36]}}, "required": ["age"]}
ALL_OF = {
    "side by side": {"allOf": [NAMED, AGED]},
    "beside others": {**NAMED, "description": "Of a person", "allOf": [AGED]},
    "by reference": {"$defs": {"n/n": NAMED, "a": AGED}, "allOf": [{"$ref": "#/$defs/n~1n"}, {"$ref": "#/$defs/a"}]},
    "with a property by reference": {
        "$defs": {"ada": {"enum": ["Ada"]}},
        "allOf": [NAMED | {"properties": {"name": {"$ref": "#/$defs/ada"}}}, AGED],
    },
    "within each other": {"allOf": [{"title": "t", "allOf": [NAMED]}, {"allOf": [AGED, {}, NAMED]}]},
}


@pytest.mark.parametrize("schema", ALL_OF.values(), ids=ALL_OF)
def test_a_value_is_all_that_it_must_be(schema, grammars):
    """Where xgrammar would take any value at all."""
    grammar = Grammar("json_schema", json.dumps({**schema, "$defs": schema.get("$defs", {})}))
    assert matches(grammars, grammar, '{"name": "Ada", "age": 36}')
    for other in ("null", "{}", '{"name": "Ada"}', '{"age": 36}', '{"name": "Ada", "age": 36, "more": 1}'):
        assert not matches(grammars, grammar, other), other
    inner = Grammar("json_schema", json.dumps({"$defs": schema.get("$defs", {}), "type": "array", "items": schema}))
    assert matches(grammars, inner, '[{"name": "Ada", "age": 36}]') and not matches(grammars, inner, "[null]")


def test_an_object_of_several_may_hold_itself(grammars):
    """However often it is referred to it is there once, by a name that nothing else has."""
    again = {"$ref": "#/$defs/node"}
    following = {"anyOf": [{"allOf": [again, {"title": "t"}, AGED]}, {"type": "null"}]}
    node = {"allOf": [NAMED, {"properties": {"one": {"$ref": "#/$defs/all of 0"}, "next": following}}]}
    schema = {"$defs": {"node": node, "all of 0": {"enum": [1]}}, "type": "array", "items": again, "maxItems": 3}
    assert len(json.dumps(rewrite(schema, in_text))) < 3 * len(json.dumps(schema))
    grammar, inner = Grammar("json_schema", json.dumps(schema)), '{"name": "Ada", "one": 1, "next": null, "age": 36}'
    assert matches(grammars, grammar, f'[{{"name": "Ada"}}, {{"name": "Ada", "next": {inner}}}]')
    assert not matches(grammars, grammar, '[{"name": "Ada", "next": {"name": "Ada"}}]')


def nested_all_of(depth: int, width: int) -> dict:
    """Each level is several times the next one."""
    levels = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * width} for i in range(depth)}
    return {"$defs": levels | {f"d{depth}": NAMED}, "allOf": [NAMED, {"$ref": "#/$defs/d0"}]}


def chained(length: int, depth: int) -> dict:
    """Objects of several, each deep within the one before."""
    defined: dict = {f"d{length}": NAMED}
    for i in range(length):
        inner = {"allOf": [NAMED, {"$ref": f"#/$defs/d{i + 1}"}]}
        for _ in range(depth):
            inner = {"items": inner}
        defined[f"d{i}"] = {"properties": {"y": inner}}
    return {"$defs": defined, "allOf": [AGED, {"$ref": "#/$defs/d0"}]}


def large_parts() -> dict:
    """What many are made of, which is copied to each of them."""
    large = {"properties": {f"p{i}": {"type": "string"} for i in range(300)}}
    return {"anyOf": [{"$ref": f"#/$defs/d{i}"} for i in range(100)], "$defs": {"large": large} | {
        f"d{i}": {"allOf": [{"$ref": "#/$defs/large"}, NAMED, {"title": f"{i}"}]} for i in range(100)
    }}  # fmt: skip


HOSTILE = [nested_all_of(12, 10), nested_all_of(14, 4), chained(40, 25), chained(2, 150), large_parts()]


@pytest.mark.parametrize("schema", HOSTILE)
def test_of_what_has_no_end_little_comes(schema):
    began = time.process_time()
    try:
        assert len(json.dumps(rewrite(schema, in_text))) < 3 * len(json.dumps(schema))
    except Inexact as problem:
        assert re.search("more than|too deeply", str(problem))
    assert time.process_time() - began < 2


def test_control_characters_are_escaped_in_json(say, tokenizer, calm):
    bell, tab = (tokenizer.token_to_id(x) for x in "\u0107\u0109")  # as byte-level BPE spells 7 and 9
    loud = calm | {bell: 50.0, tab: 50.0}
    for schema in ({"type": "string", "minLength": 3, "maxLength": 6}, {"type": "string"}):
        text, _, last = say(Grammar("json_schema", json.dumps(schema)), logit_bias=loud, max_tokens=60)
        assert "\a" not in text and "\t" not in text
    text, _, _ = say(Grammar("regex", "[^a]{3}"), logit_bias=loud)
    assert set(text) <= {"\a", "\t"}, "elsewhere they are as good as any"


def regexes():
    parts = st.one_of(
        st.sampled_from(["a", "the ", "é", "東京", "🙂", r"\.", r"\\", "\n"]),
        st.sampled_from(["[a-f]", r"\d", "[^a-zA-Z]", "[α-ω]", "[0-9é🙂-🙏]", r"\w"]),
    )

    def combine(inner):
        return st.one_of(
            st.lists(inner, min_size=1, max_size=3).map("".join),
            st.lists(inner, min_size=1, max_size=3).map(lambda x: f"({'|'.join(x)})"),
            st.builds(lambda x, n, m: f"({x}){{{n},{n + m}}}", inner, *[st.integers(0, 2)] * 2),
            inner.map(lambda x: f"({x})?"),
        )

    return st.recursive(parts, combine, max_leaves=6)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(regex=regexes(), seed=st.integers(0, 1 << 30))
def test_text_of_random_regular_expressions(regex, seed, say, whole):
    for temperature in (0.0, 1.5):
        text, _, last = say(Grammar("regex", regex), temperature=temperature, seed=seed, logit_bias=whole)
        assert last.finish == "stop" and re.fullmatch(regex, text, re.ASCII), (last, regex, text)


def test_ebnf_and_any_json(say, calm):
    rules = 'root ::= sum\nsum ::= term (" + " term){0,2}\nterm ::= [1-9] | "(" [1-9] " * " [1-9] ")"'
    for seed in range(8):
        text, _, last = say(Grammar("ebnf", rules), temperature=1.0, seed=seed)
        assert last.finish == "stop" and eval(text) > 0, text  # noqa: S307
        text, _, last = say(Grammar("json"), temperature=1.0, seed=seed, logit_bias=calm, max_tokens=60)
        assert last.finish == "length" or json.loads(text) is not ...


def test_a_structural_tag_lets_text_be_free_until_it_begins(say, tokenizer):
    """And only there may a special token be named: elsewhere no grammar allows one."""
    call = {"begin": "<|im_start|>", "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}}, "end": "."}
    tag = {"type": "triggered_tags", "triggers": ["<|im_start|>"], "tags": [call], "at_least_one": True,
           "stop_after_first": True}  # fmt: skip
    start = tokenizer.token_to_id("<|im_start|>")
    grammar = Grammar("structural_tag", json.dumps({"type": "structural_tag", "format": tag}))
    text, tokens, last = say(grammar, logit_bias={start: 50.0})
    assert re.fullmatch(r"<\|im_start\|>[12]\.", text) and last.finish == "stop"
    assert tokens[0] == start
    _, tokens, _ = say(Grammar("regex", "[^z]{60}"), temperature=4.0, seed=1, logit_bias={start: 50.0, 0: 50.0})
    assert len(tokens) > 20 and all(2 < t < 512 and not tokenizer.id_to_token(t).startswith("<|") for t in tokens[:-1])


def test_max_tokens_cuts(say):
    whole, tokens, _ = say(WORDS)
    for count in range(1, len(tokens)):
        cut, _, last = say(WORDS, max_tokens=count)
        assert last.finish == "length" and whole.startswith(cut)


# ---------------------------------------------------------------- in company


def test_neighbours_say_what_they_say_alone(engine, grammars, load):
    asked = prompts(6, 10, 40)
    samplings = [
        Sampling(max_tokens=40, temperature=0.0, ignore_eos=True),
        Sampling(max_tokens=40, temperature=0.0, grammar=WORDS),
        Sampling(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True),
        Sampling(max_tokens=90, temperature=1.0, seed=4, grammar=ORDER),
        Sampling(max_tokens=40, temperature=1.0, seed=5, top_p=0.9, repetition_penalty=1.2, ignore_eos=True),
        Sampling(max_tokens=60, temperature=0.7, seed=6, top_k=20, grammar=WORDS),
    ]
    alone = []
    for prompt, sampling in zip(asked, samplings, strict=True):
        id = engine.add(prompt, sampling)
        engine.finish()
        alone.append(engine.tokens(id))
    for sizes in ({}, {"chunk": 7}, {"rows": 2}):
        cold = Follower(grammars, load(), **sizes)
        for _ in ("cold", "warm"):
            ids = [cold.add(prompt, sampling) for prompt, sampling in zip(asked, samplings, strict=True)]
            cold.finish()
            assert [cold.tokens(id) for id in ids] == alone, sizes


def test_after_preemption(engine, grammars, load):
    asked = prompts(3, 10, 12, seed=8)
    sampling = Sampling(max_tokens=60, temperature=1.0, seed=1, grammar=Grammar("regex", "[a-z]{200}"))
    ids = [engine.add(prompt, sampling) for prompt in asked]
    engine.finish()
    small = Follower(grammars, load(max_total_tokens=120), max_model_len=110)
    found = [small.add(prompt, sampling) for prompt in asked]
    small.finish()
    assert small.scheduler.preemptions
    assert [small.tokens(id) for id in found] == [engine.tokens(id) for id in ids]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_another_worker_goes_on_where_one_has_died(engine, temperature):
    """Its Run holds what was generated beyond the prompt."""
    sampling, prompt = Sampling(max_tokens=150, temperature=temperature, seed=9, grammar=WORDS), [9, 8, 7]
    id = engine.add(prompt, sampling)
    engine.finish()
    tokens = engine.tokens(id)
    assert len(tokens) > 8
    for done in range(1, len(tokens)):
        id = engine.add([*prompt, *tokens[:done]], sampling, prompt_len=len(prompt))
        engine.finish()
        assert engine.tokens(id) == tokens[done:], done


def test_what_cannot_go_on_fails_alone(engine):
    nothing = Sampling(max_tokens=20, temperature=0.0, grammar=Grammar("ebnf", "root ::= root"))
    plain = Sampling(max_tokens=20, temperature=0.0, ignore_eos=True)
    before = engine.generate([[3, 4, 5]], plain)
    stuck, other = engine.add([9, 9, 9], nothing), engine.add([3, 4, 5], plain)
    strayed = engine.add([9, 9, 9, 400], Sampling(max_tokens=20, temperature=0.0, grammar=WORDS), prompt_len=3)
    engine.finish()
    for id, problem in ((stuck, DEAD_END.text), (strayed, STRAYED.text)):
        last = engine.last(id)
        assert (last.finish, last.error, last.field) == ("error", problem, "grammar")
    assert [engine.tokens(other)] == before


# ---------------------------------------------------------------- where it ends


def test_the_end_comes_where_the_grammar_may_end(say, tokenizer):
    loud = {EOS: 100.0}
    text, tokens, last = say(Grammar("regex", "[0-9]{3,9}"), logit_bias=loud)
    assert re.fullmatch("[0-9]{3,9}", text) and (last.finish, last.stop, tokens[-1]) == ("stop", EOS, EOS)
    assert len(text) < 9, "the first chance is taken"
    text, _, last = say(Grammar("regex", "[0-9]{3,9}"), logit_bias=loud, ignore_eos=True)
    assert len(text) == 9 and last.finish == "stop", "eos where nothing else can follow"
    text, tokens, last = say(Grammar("regex", "[0-9]{0,99}"), logit_bias=loud, min_tokens=5)
    assert len(tokens) == 6 and last.finish == "stop"
    text, tokens, last = say(Grammar("regex", "ab"), min_tokens=20)
    assert text == "ab" and last.finish == "stop", "a grammar has the last word"
    text, tokens, last = say(Grammar("regex", ""))
    assert (text, tokens, last.finish) == ("", [EOS], "stop")
    text, _, last = say(Grammar("regex", "[0-9]*"), ignore_eos=True, max_tokens=10, logit_bias=loud)
    assert last.finish == "length" and len(text) >= 10


def test_stop_token_ids(say, tokenizer):
    start, dot = tokenizer.token_to_id("<|im_start|>"), tokenizer.token_to_id(".")
    _, _, last = say(Grammar("regex", "[a-z]{3,9}"), stop_token_ids=(start,), logit_bias={start: 100.0})
    assert (last.finish, last.stop) == ("stop", start), "a special one, where the grammar may end"
    text, _, last = say(Grammar("regex", r"a\.b"), stop_token_ids=(dot,))
    assert (text, last.stop) == ("a", dot), "one of text, wherever it comes"
    _, _, last = say(Grammar("regex", "ab"), stop_token_ids=(VOCAB - 1, 100_000), min_tokens=2)
    assert last.finish == "stop"


def test_without_a_token_that_ends_a_text(folder):
    compiled = Grammars(str(folder), VOCAB, frozenset()).get(WORDS).result()
    with pytest.raises(ValueError, match="no token ends a text"):
        Matcher(compiled, Request(run(WORDS), 9, frozenset()))


def run(grammar: Grammar, *tokens: int, **sampling) -> Run:
    """Of a prompt of one token, and those generated."""
    ids = array("i", [5, *tokens]).tobytes()
    return Run(id=1, namespace="", ids=ids, prompt_len=1, sampling=Sampling(grammar=grammar, **sampling))


# ---------------------------------------------------------------- masks


def test_the_model_is_asked_first(say, tokenizer):
    """Biases and penalties move the choice among what is allowed; log-probabilities are of the raw logits."""
    plus = tokenizer.token_to_id("+")
    banned = tokenizer.token_to_id("a")
    text, tokens, last = say(Grammar("regex", "[a+]{6}"), logit_bias={plus: 50.0})
    assert text == "++++++"
    text, _, _ = say(Grammar("regex", "[ab]{6}"), logit_bias={banned: -100.0, 400: 100.0})
    assert text == "bbbbbb"
    text, tokens, _ = say(Grammar("regex", "[abcd]{4}"), frequency_penalty=2.0, temperature=0.0, logprobs=3)
    free = say(None, logprobs=3, max_tokens=1, ignore_eos=True)[2].logprobs[0]
    bound = say(WORDS, logprobs=3, max_tokens=1)[2].logprobs[0]
    assert bound.top == free.top and bound.token not in [token for token, _ in free.top]
    assert bound.logprob < free.top[-1][1]


def test_masks_are_applied_as_they_read():
    rng = np.random.default_rng(0)
    for vocab in (31, 32, 540, 4096):
        logits = torch.from_numpy(rng.normal(size=(5, vocab)).astype(np.float32))
        bits = rng.integers(-(1 << 31), 1 << 31, (3, -(-vocab // 32)), dtype=np.int64).astype(np.int32)
        expected, rows = logits.clone(), [4, 0, 2]
        for n, row in enumerate(rows):
            for i in range(vocab):
                if not (int(bits[n, i // 32]) >> (i % 32)) & 1:
                    expected[row, i] = -torch.inf
        TorchSampler().mask(logits, Masks(torch.from_numpy(bits), torch.tensor(rows)))
        assert torch.equal(logits, expected)


def test_a_row_a_request(grammars):
    """Also beside one that has strayed, where everything is allowed."""
    matched = []
    for grammar, tokens in ((WORDS, ()), (Grammar("regex", "[0-9]+"), (400,)), (Grammar("regex", "[^z]+"), ())):
        request = Request(run(grammar, *tokens), 50, frozenset({EOS}))
        request.matcher = Matcher(grammars.get(grammar).result(), request)
        matched.append(request)
    for threads in (1, 2):
        out = np.full((3, 17), 77, dtype=np.int32)
        assert fill_masks(matched, out, threads) == {1: STRAYED}
        assert (out[1] == -1).all()
        alone = np.zeros((1, 17), dtype=np.int32)
        assert not fill_masks(matched[:1], alone)
        assert np.array_equal(out[0], alone[0]) and not np.array_equal(out[2], out[0])
        allowed = np.flatnonzero(np.unpackbits(out[[0, 2]].view(np.uint8), axis=1, bitorder="little").any(0))
        assert allowed.max() < 512, "rows of the embedding without a token"


def test_a_dead_end_is_told_from_a_highest_bit(grammars):
    """Where the id that alone may come is the last of its word, no word is above 0."""
    tokens = read_vocabulary(Path(grammars._model), 512).tokens
    last = next(i for i in range(31, 512, 32) if tokens[i].isalnum())
    matched = []
    for grammar in (Grammar("ebnf", f'root ::= "{tokens[last].decode()}"'), Grammar("ebnf", "root ::= root")):
        request = Request(run(grammar), 50, frozenset({EOS}))
        request.matcher = Matcher(grammars.get(grammar).result(), request)
        matched.append(request)
    out = np.zeros((2, 17), dtype=np.int32)
    assert fill_masks(matched, out) == {1: DEAD_END}
    assert (out[1] == -1).all() and out[0, last // 32] < 0


def test_ids_that_leave_nothing_of_a_grammar(engine):
    """The request fails and names the field; others of the step do not."""
    other = engine.add(prompts(1, 9, 9)[0], Sampling(max_tokens=5, temperature=0.0))
    for fields, field in (
        ({"allowed_token_ids": (3, EOS)}, "allowed_token_ids"),
        ({"bad_token_ids": tuple((i,) for i in range(VOCAB))}, "grammar"),
        ({"allowed_token_ids": (3,), "min_tokens": 4}, "allowed_token_ids"),
    ):
        id = engine.add(prompts(1, 9, 9)[0], msgspec.structs.replace(GREEDY, grammar=WORDS, **fields))
        engine.finish()
        last = engine.last(id)
        assert not engine.tokens(id) and (last.finish, last.field) == ("error", field)
        assert last.error == NONE_ALLOWED
    assert engine.last(other).finish == "length"


def test_a_dead_end_of_a_grammar_is_not_the_fault_of_other_fields(engine):
    sampling = msgspec.structs.replace(GREEDY, grammar=Grammar("ebnf", "root ::= root"), allowed_token_ids=(3, 5, EOS))
    id = engine.add(prompts(1, 9, 9)[0], sampling)
    engine.finish()
    last = engine.last(id)
    assert (last.finish, last.field, last.error) == ("error", "grammar", DEAD_END.text)


# ---------------------------------------------------------------- compiling


def test_every_kind_is_compiled():
    compiler = SimpleNamespace(compile_regex=None, compile_grammar=None, compile_structural_tag=None)
    assert _compile_by(compiler).keys() == set(get_args(GrammarKind))


def test_grammars_are_kept_within_bounds(folder):
    grammars = Grammars(str(folder), VOCAB, frozenset({EOS}), limit=300_000)
    first = grammars.get(WORDS)
    assert grammars.get(WORDS) is first and first.result().nbytes > 0
    for n in range(60):
        grammars.get(Grammar("regex", f"[a-z]{{{n}}}[0-9]{{3,5}}( x| y){{2}}")).result()
        grammars.get(WORDS)
    assert grammars.nbytes < 350_000 and 2 < len(grammars._known) < 60
    assert grammars.get(WORDS) is first, "used last, dropped last"


def test_many_small_grammars_cost_little(folder, monkeypatch):
    """What they have in common is there once, each counts for its place, and a new one looks at few of them."""
    grammars = Grammars(str(folder), VOCAB, frozenset({EOS}))
    found = [grammars.get(Grammar("regex", f"a{n}")).result() for n in range(100)]
    assert all(one.ends is found[0].ends and one.silent is found[0].silent for one in found)
    assert grammars.nbytes >= 100 * ENTRY_BYTES
    looked = []
    monkeypatch.setattr(module, "_size", lambda future: looked.append(future) or 0)
    grammars.get(Grammar("regex", "b")).result()
    grammars.get(Grammar("regex", "c")).result()
    assert len(looked) <= 2


def test_what_is_missing_is_named(folder, tmp_path, monkeypatch):
    def said(model: str) -> str:
        return str(Grammars(model, VOCAB, frozenset({EOS})).get(WORDS).exception(timeout=20))

    assert "no checkpoint" in said("")
    assert "tokenizer's files" in said(str(tmp_path))
    bad = Grammars(str(folder), VOCAB, frozenset({EOS})).get(Grammar("regex", "(a")).exception(timeout=20)
    assert str(bad).startswith("grammar: Regex parsing error") and isinstance(bad, ValueError)
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    assert "pip install 'radixrt[grammar]'" in said(str(folder))


def test_a_slow_grammar_is_not_waited_for(folder, monkeypatch):
    grammars = Grammars(str(folder), VOCAB, frozenset({EOS}))
    compile = grammars._compile
    held = threading.Event()
    monkeypatch.setattr(
        grammars, "_compile", lambda g, t: held.wait(20) and compile(g, t) if g.text == "slow" else compile(g, t)
    )
    slow = grammars.get(Grammar("regex", "slow"))
    assert grammars.get(WORDS).result(timeout=20)
    assert not slow.done()
    held.set()
    assert slow.result(timeout=20)


# ---------------------------------------------------------------- the vocabulary


@pytest.mark.parametrize("name", ["made", "falcon-tokenizer", "phi-3-mini", "t5-small", "mistral"])
def test_the_vocabulary_is_what_the_router_decodes(name, folder, shared_data, tmp_path):
    from radixrt.tokens.tokenizer import load_tokenizer

    if name != "made":
        folder = tmp_path
        for path in (shared_data / "tokenizers" / name).iterdir():
            if path.is_file():
                content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
                (folder / path.name.removesuffix(".gz")).write_bytes(content)
    tokenizer = load_tokenizer(folder)
    found = read_vocabulary(folder, tokenizer.vocab_size + 7)
    assert found.special.keys() == tokenizer.special_ids and found.tokens[-7:] == [b""] * 7
    for i in range(tokenizer.vocab_size):
        assert found.tokens[i] == (b"" if i in tokenizer.special_ids else tokenizer.token_bytes(i))
    assert read_vocabulary(folder, 100).tokens == found.tokens[:100], "a model may have fewer"
