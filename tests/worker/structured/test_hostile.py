"""Grammars that are too expensive: their requests fail and say so, and others hardly notice."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import msgspec
import pytest

from radixrt.messages import Abort, Grammar, Sampling, Stop
from radixrt.worker.execution.fake_runner import FakeRunner
from radixrt.worker.loop import Identity, Worker
from radixrt.worker.scheduler.scheduler import Limits
from radixrt.worker.structured import compile_queue, matcher, sit_out
from radixrt.worker.structured.compile import Grammars
from radixrt.worker.structured.fair import is_at_work
from radixrt.worker.structured.vocabulary import Vocabulary
from tests.waiting import eventually
from tests.worker.test_loop import Router, run

LETTERS = [bytes([a, b, c]) for a in range(97, 117) for b in range(97, 117) for c in range(97, 117)]
TOKENS = Vocabulary([b"", b"", b"", *(bytes([b]) for b in range(256)), *LETTERS], {})
GOOD = Sampling(max_tokens=2000, temperature=0.0, ignore_eos=True)
FRUIT = Sampling(max_tokens=30, temperature=0.0, grammar=Grammar("regex", "two (apple|pear)"))
FORCED = Grammar("regex", "(a?){1500}a{1500}")
"""xgrammar takes half a second to find what it forces."""
AMBIGUOUS = Grammar("regex", "([a-z]{1,20} ?){1,50}")
"""xgrammar takes longer for every mask."""


@pytest.fixture(scope="module", autouse=True)
def ended():
    """What was left behind ends before the process does."""
    yield
    assert not is_at_work(60)


@contextmanager
def worker(overlaps: bool = True):
    """A worker whose steps take 2 ms."""
    router, size = Router(), len(TOKENS.tokens)
    runner = FakeRunner(num_pages=4000, vocab_size=size, decode_step=0.002, overlaps=overlaps)
    grammars = Grammars("", size, runner.eos_ids)
    grammars._vocabulary = TOKENS
    serving = Worker(runner, Identity("w", "m"), router.connect, limits=Limits(512, 32), check=True, grammars=grammars)
    thread = threading.Thread(target=serving.run)
    thread.start()
    try:
        yield router, serving
    finally:
        serving.stop()
        router.tell(Stop())
        thread.join(5)
        assert not thread.is_alive()


def asked(grammar: Grammar, **changes) -> Sampling:
    return Sampling(max_tokens=200, temperature=0.0, grammar=grammar, **changes)


def count(router: Router, id: int) -> int:
    return sum(len(output.tokens) for output in router.outputs(id))


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("grammar, limit", [(FORCED, 0.1), (AMBIGUOUS, 0.05)])
def test_what_takes_too_long_fails_alone(grammar, limit, overlaps, monkeypatch):
    """And says so. Others go on meanwhile, with grammars or without."""
    monkeypatch.setattr(sit_out, "MAX_MASK_SECONDS", limit)
    with worker(overlaps) as (router, serving):
        router.tell(run(1, [5, 6, 7], GOOD, namespace="good"))
        router.hear(lambda _: count(router, 1) > 3)
        before = count(router, 1)
        for n in range(3):
            router.tell(run(10 + n, [9, 9, n], asked(grammar, min_tokens=60), namespace="evil"))
        router.tell(run(2, [9], FRUIT, namespace="good"))
        router.finished(2)
        assert router.outputs(2)[-1].finish == "stop"
        router.finished(10, 11, 12)
        for id in (10, 11, 12):
            last = router.outputs(id)[-1]
            assert last.error.startswith(f"grammar: {sit_out.TOO_SLOW}") and last.field == "grammar"
        assert count(router, 1) - before > 3, "steps went on"
        router.tell(Abort([1]))
        eventually(lambda: not serving.scheduler.has_work)


def test_all_masks_of_a_request_have_a_limit_together(monkeypatch):
    monkeypatch.setattr(matcher, "SLOW_SECONDS", 0.0)
    monkeypatch.setattr(sit_out, "MAX_CPU_SECONDS", 1e-4)
    monkeypatch.setattr(sit_out, "CPU_SECONDS_A_TOKEN", 0.0)
    with worker() as (router, _):
        router.tell(run(1, [9, 9], asked(Grammar("regex", "[a-f]{90}"))))
        router.finished(1)
        last = router.outputs(1)[-1]
        assert last.error.startswith(f"grammar: {sit_out.TOO_SLOW}") and " tokens took " in last.error
        assert last.field == "grammar"


def test_after_a_slow_mask_a_tenants_new_requests_are_planned_with_their_masks(monkeypatch):
    """Each of many requests could delay a step once. Ordinary grammars are not concerned, nor other tenants."""
    monkeypatch.setattr(matcher, "SLOW_SECONDS", 0.0)
    with worker() as (router, serving):
        add, seen = serving.scheduler.add, {}
        serving.scheduler.add = lambda request: (add(request), seen.update({request.id: request.matcher.slow}))
        router.tell(run(1, [9, 9], FRUIT, namespace="evil"))
        router.finished(1)
        monkeypatch.setattr(matcher, "SLOW_SECONDS", 10.0)
        schema = asked(Grammar("json_schema", '{"const": 1}'))
        for id, namespace, sampling in (2, "evil", FRUIT), (3, "evil", schema), (4, "good", FRUIT):
            router.tell(run(id, [9, 9], sampling, namespace=namespace))
            router.finished(id)
        assert [seen[id] for id in (2, 3, 4)] == [True, False, False]


def test_a_request_that_sits_out_can_be_aborted(monkeypatch):
    held = threading.Event()
    compute = matcher.Matcher.compute
    monkeypatch.setattr(matcher.Matcher, "compute", lambda self, *args: (held.wait(20), compute(self, *args)) and None)
    with worker() as (router, serving):
        router.tell(run(1, [9, 9], FRUIT, namespace="a"))
        eventually(lambda: serving.scheduler.all_sit_out)
        assert serving.scheduler.num_waiting == 1
        router.tell(Abort([1]))
        eventually(lambda: not serving.scheduler.has_work)
        held.set()
        router.tell(run(2, [9, 9], FRUIT, namespace="a"))
        router.finished(2)
        assert not router.outputs(1) and router.outputs(2)[-1].finish == "stop"


def test_a_loop_whose_requests_all_sit_out_waits(monkeypatch):
    """It looks once a millisecond whether a mask is there."""
    held = threading.Event()
    monkeypatch.setattr(matcher.Matcher, "compute", lambda *_: held.wait(20))
    monkeypatch.setattr(sit_out, "MAX_MASK_SECONDS", 0.2)
    with worker() as (router, serving):
        looks = []
        ready = serving.scheduler._sitting.ready
        serving.scheduler._sitting.ready = lambda: looks.append(1) or ready()
        router.tell(run(1, [9, 9], FRUIT))
        router.finished(1)
        held.set()
        assert 1 < len(looks) < 300


def test_others_grammars_are_compiled_while_a_tenants_are_hopeless(monkeypatch):
    """What nobody waits for any more is not compiled."""
    held, compiled = threading.Event(), []
    with worker() as (router, serving):
        grammars = serving._compiling._grammars
        compile = grammars._compile

        def hopeless(grammar: Grammar, tenant: str):
            compiled.append(grammar.text)
            assert tenant != "evil" or held.wait(20)
            return compile(grammar, tenant)

        grammars._compile = hopeless
        for n in range(12):
            router.tell(run(10 + n, [9, 9, n], asked(Grammar("regex", f"{n}")), namespace="evil\nsalt"))
        router.tell(run(1, [9], FRUIT, namespace="good"))
        router.finished(1)
        assert router.outputs(1)[-1].finish == "stop" and len(compiled) == 4
        router.tell(Abort([*range(10, 21)]))
        eventually(lambda: len(serving._compiling) == 1)
        held.set()
        router.finished(21)
        assert sorted(compiled) == sorted(["0", "1", "2", "11", FRUIT.grammar.text])


def test_nobody_waits_again_for_a_grammar_that_takes_too_long(monkeypatch):
    monkeypatch.setattr(compile_queue, "LIMIT_SECONDS", 0.1)
    held = threading.Event()
    with worker() as (router, serving):
        grammars = serving._compiling._grammars
        compile = grammars._compile
        grammars._compile = lambda *args: held.wait(20) and compile(*args)
        for id in (1, 2):
            if id == 2:  # it would wait for minutes otherwise
                monkeypatch.setattr(compile_queue, "LIMIT_SECONDS", 1000.0)
                grammars.job(FRUIT.grammar, "n").began -= 2000
            router.tell(run(id, [9], FRUIT))
            router.finished(id)
            last = router.outputs(id)[-1]
            assert "could not be compiled within" in last.error and last.field == "grammar"
        held.set()
        eventually(lambda: grammars.get(FRUIT.grammar, "n").done())
        router.tell(run(3, [9], FRUIT))
        router.finished(3)
        assert router.outputs(3)[-1].finish == "stop"


def test_a_stop_id_that_cannot_end_a_text_is_the_requests_fault():
    with worker() as (router, serving):
        serving.runner.eos_ids = frozenset()
        router.tell(run(1, [9], msgspec.structs.replace(FRUIT, stop_token_ids=(99,))))
        router.finished(1)
        assert "no token ends a text" in router.outputs(1)[-1].error and router.outputs(1)[-1].field == "grammar"
