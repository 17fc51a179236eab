"""Steps go on without requests whose masks are late, and these get the same tokens as in time, or fail alone."""

from __future__ import annotations

import msgspec
import pytest

from radixrt.messages import Grammar, Sampling
from radixrt.worker.execution.fake_runner import EOS, FakeRunner
from radixrt.worker.scheduler import sample_inputs
from radixrt.worker.speculative.ngram import Drafter
from radixrt.worker.structured import matcher, watch
from radixrt.worker.structured.compile import Grammars
from radixrt.worker.structured.matcher import Matcher
from radixrt.worker.structured.vocabulary import Vocabulary
from radixrt.worker.stuck import LATE
from tests.worker.engine import Engine, prompts

WORDS = [bytes([a, b]) for a in b"abcdefgh" for b in b"abcdefgh "]
TOKENS = Vocabulary([b"", b"", b"", *(bytes([b]) for b in range(256)), *WORDS], {})
SIZE = len(TOKENS.tokens)
ZONES = Grammar("regex", "[ab]{3}(Zone [0-9]{2,6}, and so on; ){3}[a-h]{9}")
PLAIN = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
AMBIGUOUS = Grammar("ebnf", "root ::= s\ns ::= s s | [a-h]")


def sampled(grammar: Grammar, **changes) -> Sampling:
    return Sampling(max_tokens=120, temperature=0.0, grammar=grammar, **changes)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    made = Grammars("", SIZE, frozenset({EOS}))
    made._vocabulary = TOKENS
    return made


class Follower(Engine):
    """An Engine whose requests have matchers."""

    def __init__(self, grammars: Grammars, **sizes) -> None:
        self.grammars = grammars
        engine = {name: sizes.pop(name) for name in ("chunk", "rows", "drafter", "max_model_len") if name in sizes}
        super().__init__(FakeRunner(vocab_size=SIZE, check=True, **sizes), **engine)

    def prepare(self, request) -> None:
        if request.sampling.grammar is not None:
            request.matcher = Matcher(self.grammars.get(request.sampling.grammar).result(), request)

    def all(self, count: int = 6) -> list[list[int]]:
        """The tokens of constrained and free requests, some of two tenants."""
        ids = []
        for n, prompt in enumerate(prompts(count, 5, 40, SIZE)):
            grammar = sampled(ZONES) if n % 3 else sampled(AMBIGUOUS, min_tokens=9)
            ids.append(self.add(prompt, PLAIN if n % 4 == 3 else grammar, namespace=f"tenant {n % 2}"))
        self.finish()
        assert all(self.last(id).finish in ("stop", "length") for id in ids), [self.last(id).error for id in ids]
        return [self.tokens(id) for id in ids]


@pytest.fixture
def late(monkeypatch):
    """Nearly every mask is late."""
    monkeypatch.setattr(watch, "LATE_SECONDS", 1e-5)


@pytest.fixture
def slow(monkeypatch):
    """Every mask is slow."""
    monkeypatch.setattr(matcher, "SLOW_SECONDS", 0.0)


SIZES = {
    "plain": {},
    "overlaps": {"overlaps": True},
    "few pages": {"overlaps": True, "num_pages": 260, "page_size": 1},
    "states": {"overlaps": True, "num_states": 40, "page_size": 4},
    "states, step by step": {"num_states": 40, "page_size": 4},
    "drafts": {"drafter": lambda: Drafter(4, False)},
    "drafts that overlap": {"drafter": lambda: Drafter(4, True), "overlaps": True},
    "proposals": {"drafter": lambda: Drafter(4, True, predicts=True), "overlaps": True, "truth": 4},
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    "how", [pytest.param("late", marks=pytest.mark.slow), pytest.param("slow", marks=pytest.mark.slow), "both"]
)
def test_tokens_do_not_depend_on_the_time_that_masks_take(grammars, name, how, request):
    def made() -> Follower:
        sizes = dict(SIZES[name])
        if "drafter" in sizes:
            sizes["drafter"] = sizes["drafter"]()
        return Follower(grammars, chunk=32, rows=4, **sizes)

    expected = made().all()
    for one in ("late", "slow") if how == "both" else (how,):
        request.getfixturevalue(one)
    engine = made()
    assert engine.all() == expected
    assert not engine.scheduler.running.sitting and not engine.scheduler._waiting.parked
    assert engine.scheduler._sitting._strikes


def test_a_failed_step_leaves_those_alone_that_sit_out(grammars, monkeypatch):
    engine = Follower(grammars)
    sitting, other = engine.add([5, 6, 7], sampled(ZONES)), engine.add([8, 9], PLAIN)
    while not engine.tokens(sitting):
        engine.step()
    expected = Follower(grammars)
    id = expected.add([5, 6, 7], sampled(ZONES))
    expected.finish()
    request = engine.scheduler._requests[sitting]
    request.matcher.masked = -1  # as if its mask were late
    engine.scheduler._sitting.sit(request, engine.scheduler.steps, jump=False)
    engine.scheduler._slow.add(request)
    plan = engine.scheduler.plan()
    assert [one.id for one in plan.requests] == [other]
    assert [output.id for output in engine.scheduler.fail(plan, "broken")] == [other]
    engine.cache.check()
    engine.finish()
    assert engine.tokens(sitting) == expected.tokens(id) and engine.last(sitting).finish == "stop"


def test_who_sits_out_gives_way_when_pages_run_out(grammars):
    """It is parked until its mask is there, and then waits for room."""
    engine = Follower(grammars, num_pages=60, page_size=1)
    first = engine.add([5] * 19, PLAIN)
    second = engine.add([6] * 5, msgspec.structs.replace(sampled(ZONES), max_tokens=40))
    while not engine.tokens(second):
        engine.step()
    request = engine.scheduler._requests[second]
    assert not request.in_flight_tokens
    request.matcher.busy = True
    engine.scheduler._sitting.sit(request, engine.scheduler.steps, jump=False)
    engine.scheduler._slow.add(request)
    while engine.scheduler._requests.get(first) and request.row >= 0:
        engine.step()
    assert request.row < 0 and engine.scheduler._waiting.parked and engine.scheduler.preemptions == 1
    request.matcher.busy = False
    engine.finish()
    assert engine.last(first).finish == "length" and engine.last(second).finish in ("length", "stop")


@pytest.mark.parametrize("states", [0, 40])
def test_what_the_step_in_flight_samples_after_a_late_mask_is_discarded(grammars, monkeypatch, states):
    def made() -> tuple[Follower, int]:
        engine = Follower(grammars, overlaps=True, num_states=states)
        id = engine.add([5, 6, 7], sampled(ZONES))
        engine.finish()
        return engine, id

    engine, id = made()
    expected, calls = engine.tokens(id), []
    fill = sample_inputs.fill_masks

    def late(requests, out, **more):
        calls.append(1)
        problems = fill(requests, out, **more)
        return problems if len(calls) % 5 else {n: LATE for n in range(len(requests))}

    monkeypatch.setattr(sample_inputs, "fill_masks", late)
    engine, id = made()
    assert engine.tokens(id) == expected and engine.last(id).finish == "stop" and len(calls) > 10


@pytest.mark.parametrize("states", [0, 40])
@pytest.mark.parametrize("sizes", [{"rows": 1}, {"num_pages": 75, "page_size": 1}])
def test_who_sits_out_keeps_nobody_waiting(grammars, sizes, states):
    """Neither with its row nor with its pages. Without anything else to do, the loop need not look all the time."""
    sampling = msgspec.structs.replace(sampled(ZONES), max_tokens=20)
    expected = Follower(grammars).generate([[5] * 50], sampling)
    engine = Follower(grammars, num_states=states, **sizes)
    first = engine.add([5] * 50, sampling)
    while not engine.tokens(first):
        engine.step()
    request = engine.scheduler._requests[first]
    request.matcher.busy = True
    engine.scheduler._sitting.sit(request, engine.scheduler.steps, jump=False)
    engine.scheduler._slow.add(request)
    second = engine.add([8] * 30, PLAIN)
    for _ in range(60):
        engine.step()
    assert engine.outputs[second] and engine.last(second).finish == "length" and engine.scheduler.all_sit_out
    request.matcher.busy = False
    engine.finish()
    assert [engine.tokens(first)] == expected


@pytest.mark.parametrize("overlaps", [False, True])
def test_another_worker_goes_on_from_what_was_reported_with_the_same_tokens(grammars, slow, overlaps):
    """Whatever was forced after it, although that takes long to be known."""
    sampling, prompt = sampled(Grammar("regex", "([ab]xye [0-9]{2,4}; ){6}")), [5, 6, 7]
    engine, reported = Follower(grammars, overlaps=overlaps), set()
    id = engine.add(prompt, sampling)
    while engine.step():
        reported.add(tuple(engine.tokens(id)))
    expected = engine.tokens(id)
    other = Follower(grammars, overlaps=overlaps)
    ids = {other.add([*prompt, *tokens], sampling, prompt_len=3): tokens for tokens in reported - {tuple(expected)}}
    other.finish()
    assert len(ids) > 10
    assert all([*tokens, *other.tokens(id)] == expected for id, tokens in ids.items())
