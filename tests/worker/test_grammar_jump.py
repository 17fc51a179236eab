"""Text that a grammar forces is appended and not drawn: less steps, and nothing else that is not allowed."""

from __future__ import annotations

import dataclasses
import json
import random
import re

import numpy as np
import pytest
import torch
import xgrammar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from radixrt.config import WorkerConfig, resolve
from radixrt.messages import Grammar, Sampling
from radixrt.requests.schemas.ebnf import compilable
from radixrt.worker.execution.fake_runner import EOS, FakeRunner
from radixrt.worker.execution.sample_step import SampleStep
from radixrt.worker.execution.sampler import TorchSampler
from radixrt.worker.load.runner import load_runner
from radixrt.worker.plan import FROM_DEVICE, SampleInputs
from radixrt.worker.status import KNOWN_STEPS, Rates
from radixrt.worker.structured.compile import Grammars
from radixrt.worker.structured.jump_forward import Spelling
from radixrt.worker.structured.masks import fill_masks
from radixrt.worker.structured.matcher import Matcher
from radixrt.worker.structured.vocabulary import Vocabulary
from tests.checkpoints import make_model, make_tokenizer
from tests.worker.engine import Engine, prompts
from tests.worker.test_grammar import regexes

BYTES = Vocabulary([b"", b"", b"", *(bytes([b]) for b in range(256))], {})
"""With tokens of a byte each a text has one spelling: what is forced is what would be drawn."""
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Alan", "Grace"]}, "age": {"type": "integer", "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
RECORD = Grammar("json_schema", json.dumps(PERSON))
ZONE = Grammar("regex", "[ab]{4}Zone [0-9]{2,6}")
SLOW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("jump")
    make_model(path, "llama", vocab_size=540)
    return make_tokenizer(path)


@pytest.fixture(scope="module")
def by_bytes() -> Grammars:
    grammars = Grammars("", 259, frozenset({EOS}))
    grammars._vocabulary = BYTES
    return grammars


@pytest.fixture(scope="module")
def by_words(folder) -> Grammars:
    return Grammars(str(folder), 540, frozenset({EOS}))


class Follower(Engine):
    """An Engine whose requests have matchers, which `jumps` or not."""

    def __init__(self, grammars: Grammars, runner, jumps: bool = True, **sizes) -> None:
        super().__init__(runner, **sizes)
        self.grammars, self.jumps = grammars, jumps

    def prepare(self, request) -> None:
        if request.sampling.grammar is not None:
            compiled = self.grammars.get(request.sampling.grammar).result()
            if not self.jumps:
                compiled = dataclasses.replace(compiled, spelling=None)
            request.matcher = Matcher(compiled, request)

    def say(self, prompt, sampling) -> list[int]:
        id = self.add(prompt, sampling)
        self.finish()
        assert self.last(id).finish != "error", self.last(id)
        return self.tokens(id)


def fake(pages: int = 400, vocab_size: int = 259, page_size: int = 1, **options) -> FakeRunner:
    return FakeRunner(pages, page_size, vocab_size, 1024, check=True, **options)


class LateRunner:
    """A TorchRunner that overlaps, as a GPU's does: logits at launch, tokens when those before are known."""

    overlaps = True

    def __init__(self, runner) -> None:
        self._runner, self._sampled, self._late = runner, {}, None

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def launch(self, plan):
        ends = np.cumsum(plan.counts) - 1
        for b in np.flatnonzero(plan.tokens[ends] == FROM_DEVICE):
            plan.tokens[ends[b]] = self._sampled[int(plan.rows[b])]
        late = self._late = [plan, self._runner.logits(plan), None]
        if not plan.needs_host_tokens:
            self.sample_deferred(SampleInputs())
        return lambda: late[2]

    def sample_deferred(self, inputs: SampleInputs) -> None:
        plan, logits, _ = self._late
        with torch.inference_mode():
            sample_step = SampleStep(plan, logits.clone(), TorchSampler(), inputs)
        self._late[2] = result = sample_step.read(sample_step.packed.numpy())
        self._sampled.update(zip(plan.rows.tolist(), result.tokens, strict=True))


# ---------------------------------------------------------------- what is said


def literals():
    """Texts that are forced, long enough to be jumped over, and those that are too short."""
    return st.sampled_from(["ab", "abc", '{"name": "', "the end.", "é東京🙂", "ZZZZZZZZ", "\n\n\n", '", "', "x"])


def escaped(text: str) -> str:
    return re.sub(r"[{}.]", r"\\\g<0>", text)


def mixed():
    """Regular expressions where forced and free texts take turns."""
    part = st.one_of(literals().map(escaped), st.sampled_from(["[a-f]", r"\d{1,3}", "(red|green|rest)", "[é-ü]?"]))
    return st.lists(part, min_size=1, max_size=6).map("".join)


def schemas():
    names = st.lists(
        st.sampled_from(["name", "age", "née", "a b", 'q"', "a\\b\n", "x"]), min_size=1, max_size=3, unique=True
    )
    whole = [{"type": "boolean"}, {"enum": ["tea", "team"]}, {"const": "whole"}]
    kinds = st.sampled_from([*whole, {"type": "integer", "minimum": 1, "maximum": 9}])
    return names.flatmap(
        lambda keys: st.fixed_dictionaries(dict.fromkeys(keys, kinds)).map(
            lambda found: {
                "type": "object",
                "properties": found,
                "required": list(found),
                "additionalProperties": False,
            }
        )
    )


def call_of(schema):
    """A structural tag."""
    content = {"type": "json_schema", "json_schema": schema}
    form = {"type": "tag", "begin": '<call>{"arguments": ', "content": content, "end": "}</call>"}
    return {"type": "structural_tag", "format": form}


def grammar_of():
    return st.one_of(
        mixed().map(lambda text: Grammar("regex", text)),
        regexes().map(lambda text: Grammar("regex", text)),
        schemas().map(lambda schema: Grammar("json_schema", json.dumps(schema))),
        schemas().map(lambda schema: Grammar("structural_tag", json.dumps(call_of(schema)))),
    )


def sampling_of():
    """Everything that could see whether a token was drawn."""
    return st.builds(
        Sampling,
        max_tokens=st.sampled_from([1, 2, 3, 7, 40, 200]),
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 1 << 30),
        min_tokens=st.sampled_from([0, 0, 12]),
        frequency_penalty=st.sampled_from([0.0, 1.5]),
        stop_token_ids=st.sampled_from([(), (), (3 + ord("e"),), (3 + ord('"'), 1)]),
        ignore_eos=st.booleans(),
        grammar=grammar_of(),
    )


@SLOW
@given(asked=st.lists(sampling_of(), min_size=1, max_size=5), data=st.data())
def test_where_a_text_has_one_spelling_nothing_changes(asked, data, by_bytes):
    """Alone and in any company, by any runner: the tokens are those that are drawn one by one."""
    asked.append(Sampling(max_tokens=30, ignore_eos=True))
    texts = prompts(len(asked), 3, 20, vocab_size=259, seed=data.draw(st.integers(0, 99)))
    drawing = Follower(by_bytes, fake(), jumps=False)
    expected = [drawing.say(text, sampling) for text, sampling in zip(texts, asked, strict=True)]
    finishes = [(drawing.last(id).finish, drawing.last(id).stop) for id in drawing.outputs]
    assert drawing.scheduler.forced_tokens == 0
    for overlapped in (False, True):
        for sizes in ({}, {"chunk": 6}, {"rows": 2, "chunk": 9}):
            # One alone may need its prompt of up to 20 tokens and 200 more.
            engine = Follower(by_bytes, fake(pages=250, overlaps=overlapped), **sizes)
            for _ in ("cold", "warm"):
                ids = [engine.add(text, sampling) for text, sampling in zip(texts, asked, strict=True)]
                engine.finish()
                assert [engine.tokens(id) for id in ids] == expected
                assert [(engine.last(id).finish, engine.last(id).stop) for id in ids] == finishes
                cached = [engine.last(id).cached_tokens for id in ids]
                assert all(count <= len(text) for count, text in zip(cached, texts, strict=True)), cached
            assert engine.cache.leased_pages == 0 and engine.scheduler.queued_tokens == 0


@pytest.mark.parametrize("overlapped", [False, True])
def test_by_a_model_too(overlapped, by_bytes, tmp_path_factory):
    """With penalties, which count what is forced, and noise, which depends on the position."""
    path = tmp_path_factory.mktemp("bytes")
    make_model(path, "llama", vocab_size=259)
    runner = load_runner(resolve(WorkerConfig(model=str(path), device="cpu", max_total_tokens=600, deterministic=True)))
    asked = [
        Sampling(max_tokens=90, temperature=0.0, grammar=RECORD),
        Sampling(max_tokens=90, temperature=1.0, seed=3, grammar=RECORD, frequency_penalty=1.0),
        Sampling(max_tokens=30, temperature=1.0, seed=3, ignore_eos=True),
        Sampling(max_tokens=90, temperature=0.7, seed=5, repetition_penalty=1.3, grammar=ZONE),
    ]
    texts = prompts(len(asked), 5, 20, vocab_size=259)
    drawing = Follower(by_bytes, runner, jumps=False)
    expected = [drawing.say(text, sampling) for text, sampling in zip(texts, asked, strict=True)]
    engine = Follower(by_bytes, LateRunner(runner) if overlapped else runner, chunk=16)
    ids = [engine.add(text, sampling) for text, sampling in zip(texts, asked, strict=True)]
    engine.finish()
    assert [engine.tokens(id) for id in ids] == expected
    assert engine.scheduler.forced_tokens > 40 and engine.scheduler.steps < drawing.scheduler.steps / 2


@SLOW
@given(asked=st.lists(sampling_of(), min_size=1, max_size=4), data=st.data())
def test_with_many_spellings_it_is_the_same_in_any_company(asked, data, by_words, folder):
    """Alone, in a batch, in chunks, overlapped, after preemption, and where another worker goes on."""
    texts = prompts(len(asked), 3, 20, seed=data.draw(st.integers(0, 99)))
    alone = Follower(by_words, fake(vocab_size=540))
    expected = [alone.say(text, sampling) for text, sampling in zip(texts, asked, strict=True)]
    for overlapped, sizes in ((False, {"chunk": 6}), (True, {}), (True, {"rows": 2, "chunk": 9})):
        engine = Follower(by_words, fake(250, 540, overlaps=overlapped), **sizes)
        ids = [engine.add(text, sampling) for text, sampling in zip(texts, asked, strict=True)]
        engine.finish()
        assert [engine.tokens(id) for id in ids] == expected
        for id, text, sampling in zip(ids, texts, asked, strict=True):
            done: list[int] = []
            for output in engine.outputs[id][:-1]:
                done += output.tokens
                other = alone.add([*text, *done], sampling, prompt_len=len(text))
                alone.finish()
                assert done + alone.tokens(other) == engine.tokens(id)


def test_what_is_said_follows_the_grammar(by_words, folder):
    decode = Tokenizer.from_file(str(folder / "tokenizer.json")).decode
    engine = Follower(by_words, fake(vocab_size=540, overlaps=True))
    for number in range(20):
        said = engine.say([5 + number, 6], Sampling(max_tokens=90, grammar=RECORD))
        found = json.loads(decode(said[:-1]))
        assert list(found) == ["name", "age"] and said[-1] == EOS
    assert engine.scheduler.forced_tokens > 20 * 10


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("overlapped", [False, True])
def test_random_load(overlapped, page_size, by_bytes):
    """Requests come, are aborted and are sent back for want of pages, whatever their grammars force."""
    rng, aborted = random.Random(7 + overlapped), set()
    grammars = [None, RECORD, Grammar("regex", "(ab|cd){2}Zone [0-9]{2,6}, and so on"), Grammar("regex", "Zone (a|b)")]
    runner = fake(pages=120 // page_size, page_size=page_size, overlaps=overlapped)
    engine = Follower(by_bytes, runner, chunk=12, rows=5, max_model_len=100)
    drawing, asked = Follower(by_bytes, fake(), jumps=False), {}
    trunk = [rng.randrange(3, 259) for _ in range(20)]
    for _ in range(80):
        prompt = trunk[: rng.randint(1, 20)] + [rng.randrange(3, 259) for _ in range(rng.randint(1, 6))]
        sampling = Sampling(max_tokens=rng.randint(1, 60), ignore_eos=True, grammar=rng.choice(grammars))
        asked[engine.add(prompt, sampling)] = prompt, sampling
        for _ in range(rng.randint(0, 6)):
            engine.step()
        if rng.random() < 0.15 and engine.scheduler.abort(victim := rng.choice(list(asked)[-6:])):
            aborted.add(victim)
        waiting = list(engine.scheduler._waiting)
        assert engine.scheduler._waiting.tokens == sum(r.total - r.hit for r in waiting)
    engine.finish()
    assert engine.scheduler.preemptions and engine.scheduler.forced_tokens > 300 and len(aborted) > 3
    assert engine.cache.leased_pages == 0
    for id, (prompt, sampling) in asked.items():
        expected = drawing.say(prompt, sampling)
        assert engine.tokens(id) == (expected[: len(engine.tokens(id))] if id in aborted else expected)


def test_sent_back_while_a_token_is_sampled_that_brings_others(by_bytes):
    sampling = Sampling(max_tokens=90, grammar=Grammar("regex", "[ab]{3}Zone [ab]{2}Zone"))
    expected = Follower(by_bytes, fake(), jumps=False).say([9, 9], sampling)
    brought = []
    for steps in range(1, 7):
        engine = Follower(by_bytes, fake(overlaps=True))
        id = engine.add([9, 9], sampling)
        for _ in range(steps):
            engine.step()
        request, before = engine.scheduler._preempt(), engine.scheduler.forced_tokens
        engine.finish_step()
        brought.append(engine.scheduler.forced_tokens - before)
        assert engine.scheduler._waiting.tokens == request.total - request.hit and not request.in_flight_tokens
        engine.finish()
        assert engine.tokens(id) == expected and engine.scheduler.queued_tokens == 0
        assert engine.scheduler.forced_tokens == 9
    assert max(brought) == 5


def test_the_first_reply_has_what_is_forced_at_the_beginning(by_bytes):
    engine = Follower(by_bytes, fake())
    id = engine.add([9, 9], Sampling(max_tokens=90, grammar=RECORD))
    engine.step()
    first = engine.outputs[id][0]
    assert bytes(t - 3 for t in first.tokens).startswith(b'{"name": "') and len(first.tokens) >= 11
    assert engine.runner.steps == [(1, 2 + 10)], "computed with the prompt"
    engine.finish()
    cut = engine.say([9, 9], Sampling(max_tokens=4, grammar=RECORD))
    assert bytes(t - 3 for t in cut) == b'{"na'


def test_short_runs_are_sampled(by_bytes):
    """They would save less than their chunk costs."""
    engine = Follower(by_bytes, fake())
    engine.say([9, 9], Sampling(max_tokens=90, grammar=Grammar("regex", "[ab]xy[ab]xy[ab]")))
    assert engine.scheduler.forced_tokens == 0
    engine.say([9, 9], Sampling(max_tokens=90, grammar=Grammar("regex", "[ab]xyz[ab]xyz[ab]")))
    assert engine.scheduler.forced_tokens == 6
    engine.say([9, 9], Sampling(max_tokens=90, grammar=Grammar("regex", "xy[ab]xy[ab]")))
    assert engine.scheduler.forced_tokens == 8, "at the beginning they cost nothing"


@pytest.mark.parametrize("changes", [{"logprobs": 2}, {"logit_bias": {50: 1.0}}])
def test_what_asks_for_more_than_the_text_is_sampled(changes, by_bytes):
    engine = Follower(by_bytes, fake())
    id = engine.add([9, 9], Sampling(max_tokens=90, grammar=RECORD, **changes))
    engine.finish()
    assert engine.scheduler.forced_tokens == 0
    assert all(len(output.tokens) == 1 for output in engine.outputs[id])
    id = engine.add([9, 9, 9], Sampling(max_tokens=9, grammar=RECORD), score_from=1)
    engine.finish()
    assert engine.scheduler.forced_tokens == 0 and sum(len(o.scores or ()) for o in engine.outputs[id]) == 2


@pytest.mark.parametrize("overlapped", [False, True])
def test_masks_are_made_for_what_is_sampled_alone(overlapped, by_bytes, monkeypatch):
    """Not for the draw in flight whose place a forced token has taken."""
    made = []

    def fill(requests, out, **_):
        made.extend(requests)
        return fill_masks(requests, out)

    monkeypatch.setattr("radixrt.worker.scheduler.sample_inputs.fill_masks", fill)
    engine = Follower(by_bytes, fake(overlaps=overlapped))
    said = engine.say([9, 9], Sampling(max_tokens=90, grammar=ZONE))
    assert len(made) == len(said) - engine.scheduler.forced_tokens < len(said)


def test_a_long_prompt_is_not_waited_for(by_bytes):
    engine = Follower(by_bytes, fake(pages=2000), chunk=32)
    id = engine.add([9, 9], Sampling(max_tokens=90, grammar=Grammar("regex", "[ab]{4}" + "Z" * 20 + "[ab]{9}")))
    engine.step()
    engine.add(list(range(3, 250)) * 3, Sampling(max_tokens=2, ignore_eos=True))
    for _ in range(8):
        engine.step()
    assert len(engine.tokens(id)) > 24


def test_forced_tokens_are_no_prompt(by_bytes):
    """A step of them counts as one of decodes, for the rates."""
    engine = Follower(by_bytes, fake())
    engine.add([9, 9, 9], Sampling(max_tokens=90, grammar=Grammar("regex", "[ab]ZZZZZZ[ab]")))
    engine.step()
    plan = engine.scheduler.plan()
    assert plan.counts.tolist() == [7]
    rates = Rates()
    for _ in range(KNOWN_STEPS):
        rates.add(plan, 1.0)
    assert (rates.prefill, rates.step) == (0.0, 1.0)


def test_parts_of_characters(by_bytes):
    """Where one may begin as the other: the first byte is forced, and is no text."""
    engine = Follower(by_bytes, fake())
    for names in (["é1", "è2"], ["éa", "éb"], ["xxxxé1", "xxxxè2"]):
        grammar = Grammar("json_schema", json.dumps({"enum": names}))
        said = engine.say([9], Sampling(max_tokens=20, temperature=1.0, grammar=grammar))
        assert json.loads(bytes(t - 3 for t in said[:-1])) in names
    assert engine.scheduler.forced_tokens == 1 + 3 + 5, "up to the last character that is whole"


def test_tokens_that_the_grammar_does_not_take_are_sampled(by_bytes, monkeypatch):
    """A spelling that errs leaves the matcher where it was."""
    drawn = Follower(by_bytes, fake(), jumps=False).say([9], Sampling(max_tokens=90, grammar=RECORD))
    monkeypatch.setattr(Spelling, "before", lambda self, text: (*(3 + b for b in text.encode()[:3]), 4))
    engine = Follower(by_bytes, fake())
    assert engine.say([9], Sampling(max_tokens=90, grammar=RECORD)) == drawn
    assert engine.scheduler.forced_tokens == 0


def test_schemas_of_a_structural_tag_are_on_one_line(by_bytes):
    content = {"type": "json_schema", "json_schema": PERSON}
    style = {**content, "style": "qwen_xml"}
    data = {"type": "json_schema", "json_schema": {"const": content}}
    tag = {"type": "structural_tag", "format": {"type": "or", "elements": [content, style, data]}}
    found = json.loads(compilable(Grammar("structural_tag", json.dumps(tag)), any_space=False))
    first, second, third = found["format"]["elements"]
    assert first["type"] == third["type"] == "grammar" and second["style"] == "qwen_xml"
    tag = {"type": "structural_tag", "format": {"type": "tag", "begin": "<call>", "content": content, "end": "</call>"}}
    engine = Follower(by_bytes, fake())
    said = engine.say([9], Sampling(max_tokens=90, grammar=Grammar("structural_tag", json.dumps(tag))))
    text = bytes(t - 3 for t in said[:-1]).decode()
    assert re.fullmatch(r'<call>\{"name": "(Ada|Alan|Grace)", "age": -?\d+\}</call>', text)


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1), min_size=1, max_size=3))
@SLOW
def test_names_and_values_of_a_structural_tag_stay_as_they_are(by_bytes, texts):
    """Also characters before hexadecimal digits, which EBNF writes as numbers."""
    texts += [f"ca{texts[0][0]}f0", "größe", "España", "\\xf1a"]
    schema = {
        "type": "object",
        "properties": {text: {"enum": [text]} for text in texts},
        "required": [*dict.fromkeys(texts)],
        "additionalProperties": False,
    }
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    compiled = by_bytes.get(Grammar("structural_tag", json.dumps(tag))).result()
    matcher = xgrammar.GrammarMatcher(compiled.grammar, override_stop_tokens=[EOS])
    said = json.dumps({text: text for text in texts}, ensure_ascii=False)
    assert all(matcher.accept_token(byte + 3) for byte in said.encode())


def test_text_that_is_forced_without_end_is_sampled(by_bytes):
    """xgrammar would look for all of it, and never come back."""
    for grammar in (Grammar("ebnf", 'root ::= "ab" root'), Grammar("regex", "(ab){300000}")):
        compiled = by_bytes.get(grammar).result()
        assert compiled.spelling is None
    assert by_bytes.get(ZONE).result().spelling is not None


def test_a_tag_that_names_a_token_is_sampled(by_words):
    name = next(iter(by_words.get(RECORD).result() and by_words._vocabulary.special.values())).decode()
    tag = {"type": "structural_tag", "format": {"type": "token", "token": name}}
    assert by_words.get(Grammar("structural_tag", json.dumps(tag))).result().spelling is None
