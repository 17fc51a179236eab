"""Grammars in the worker's loop: compiled beside it, and what is wrong with one concerns nobody else."""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager

import msgspec
import pytest
from tokenizers import Tokenizer

from radixrt.messages import Abort, Grammar, Register, Sampling, StepDone, Stop, Unknown
from radixrt.worker.execution.fake_runner import EOS, FakeRunner
from radixrt.worker.loop import Identity, Worker
from radixrt.worker.request import Request
from radixrt.worker.scheduler.scheduler import Limits
from radixrt.worker.structured import compile_queue
from radixrt.worker.structured.compile import Grammars
from radixrt.worker.structured.matcher import Matcher
from tests.checkpoints import make_tokenizer
from tests.worker.test_loop import Router, overlaps, run  # noqa: F401  (a fixture)

DIGITS = Sampling(max_tokens=30, temperature=0.0, grammar=Grammar("regex", "[0-9]{12}(abc|abd)"))
ZONES = Grammar("regex", "[ab]Zone [0-9]{4}, and so on")
PLAIN = Sampling(max_tokens=30, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@contextmanager
def worker(folder, hold: threading.Event | None = None):
    """`hold` keeps grammars from being compiled."""
    router, runner = Router(), FakeRunner(num_pages=400, vocab_size=512, check=True)
    runner.overlaps = FakeRunner.OVERLAPS
    grammars = Grammars(str(folder), 512, runner.eos_ids)
    if hold is not None:
        compile = grammars._compile
        grammars._compile = lambda grammar, tenant: hold.wait(20) and compile(grammar, tenant)
    serving = Worker(runner, Identity("w", "m"), router.connect, limits=Limits(64, 8), check=True, grammars=grammars)
    thread = threading.Thread(target=serving.run)
    thread.start()
    try:
        yield router, serving
    finally:
        if hold is not None:
            hold.set()
        serving.stop()
        router.tell(Stop())  # it need not wait until it looks up by itself
        thread.join(5)
        assert not thread.is_alive()


def tokens(router: Router, id: int) -> list[int]:
    return [token for output in router.outputs(id) for token in output.tokens]


def last(router: Router, id: int):
    return router.outputs(id)[-1]


def test_constrained_and_free_side_by_side(folder):
    decode = Tokenizer.from_file(str(folder / "tokenizer.json")).decode
    with worker(folder) as (router, _):
        router.tell(run(1, [5, 6, 7], PLAIN))
        router.finished(1)
        router.tell(run(2, [9, 9], DIGITS))
        router.tell(run(3, [5, 6, 7], PLAIN))
        router.finished(2, 3)
        found = tokens(router, 2)
        assert re.fullmatch("[0-9]{12}(abc|abd)", decode(found[:-1])) and found[-1] == last(router, 2).stop == EOS
        assert tokens(router, 3) == tokens(router, 1)
        for done in (1, 5, len(found) - 1):
            router.tell(run(10 + done, [9, 9, *found[:done]], DIGITS, prompt_len=2))
            router.finished(10 + done)
            assert tokens(router, 10 + done) == found[done:]


def test_others_go_on_while_one_is_compiled(folder):
    hold = threading.Event()
    with worker(folder, hold) as (router, serving):
        router.tell(run(1, [9, 9], DIGITS))
        router.tell(run(2, [5, 6, 7], PLAIN))
        router.finished(2)
        assert not router.outputs(1)
        router.tell(run(1, [9, 9], DIGITS))
        router.finished(1)
        assert "request 1 exists" in last(router, 1).error
        router.messages.clear()
        hold.set()
        router.finished(1)
        assert last(router, 1).finish == "stop"
        assert not serving._compiling


def test_one_that_is_compiled_may_be_aborted(folder):
    hold = threading.Event()
    with worker(folder, hold) as (router, serving):
        router.tell(run(1, [9, 9], DIGITS))
        router.tell(Abort([1]))
        router.tell(run(2, [5, 6, 7], PLAIN))
        router.finished(2)
        hold.set()
        router.tell(run(3, [9, 9], DIGITS))
        router.finished(3)
        assert not router.outputs(1) and not serving._compiling


def test_a_router_that_started_anew_gets_no_answer_to_what_is_compiled(folder):
    hold = threading.Event()
    with worker(folder, hold) as (router, serving):
        router.tell(run(1, [9, 9], DIGITS))
        router.tell(Unknown())
        router.hear(lambda messages: sum(isinstance(m, Register) for m in messages) == 2)
        assert not serving._compiling
        hold.set()
        router.tell(run(2, [9, 9], DIGITS))
        router.finished(2)
        assert not router.outputs(1)


def test_it_is_not_waited_for_without_end(folder, monkeypatch):
    monkeypatch.setattr(compile_queue, "LIMIT_SECONDS", 0.05)
    with worker(folder, threading.Event()) as (router, _):
        router.tell(run(1, [9, 9], DIGITS))
        router.finished(1)
        assert last(router, 1).error.startswith("grammar: it could not be compiled within")
        assert last(router, 1).field == "grammar"


@pytest.mark.parametrize(
    "grammar, said",
    [
        (Grammar("regex", "(a"), "grammar: Regex parsing error"),
        (Grammar("json_schema", '{"type": "integr"}'), "grammar: the schema cannot be enforced: #/type"),
        (Grammar("structural_tag", '{"format": {"type": "token", "token": "<none>"}}'), "grammar: "),
        (Grammar("ebnf", "root ::= root"), "grammar: no token of the vocabulary can come next"),
    ],
)
def test_a_broken_one_fails_alone(folder, grammar, said):
    with worker(folder) as (router, _):
        router.tell(run(1, [9, 9], msgspec.structs.replace(DIGITS, grammar=grammar)))
        router.tell(run(2, [5, 6, 7], PLAIN))
        router.finished(1, 2)
        assert last(router, 1).finish == "error" and last(router, 1).error.startswith(said)
        assert last(router, 1).field == "grammar"
        assert last(router, 2).finish == "length"


def test_without_a_checkpoint(folder):
    with worker("") as (router, _):
        router.tell(run(1, [9, 9], DIGITS))
        router.finished(1)
        assert "needs the tokenizer's files" in last(router, 1).error and not last(router, 1).field


def test_a_known_grammar_is_scheduled_at_once(folder):
    with worker(folder) as (router, serving):
        router.tell(run(1, [9, 9], DIGITS))
        router.finished(1)
        router.messages.clear()
        compiled = serving._compiling._grammars.get(DIGITS.grammar, "n")
        assert compiled.done()
        router.tell(run(2, [9, 9], DIGITS))
        router.finished(2)
        assert serving._compiling._grammars.get(DIGITS.grammar, "n") is compiled
        assert sum(bool(m.outputs) for m in router.messages if isinstance(m, StepDone)) == len(tokens(router, 2))


def test_what_is_forced_is_not_sampled(folder):
    """The worker counts such tokens, and an abort leaves nothing of them."""
    sampling = Sampling(max_tokens=90, temperature=0.0, grammar=ZONES)
    with worker(folder) as (router, serving):
        router.tell(run(1, [9, 9], sampling))
        router.finished(1)
        assert serving.scheduler.forced_tokens == router.messages[-1].load.forced_tokens > 4
        assert len(tokens(router, 1)) > 1 + sum(len(output.tokens) == 1 for output in router.outputs(1))
        router.tell(run(2, [9, 9], sampling))
        router.tell(Abort([2]))
        router.tell(run(3, [9, 9], sampling))
        router.finished(3)
        assert tokens(router, 3) == tokens(router, 1)


def test_a_worker_may_draw_all(folder):
    schema = Grammar("json_schema", '{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}')
    for jumps in (True, False):
        compiled = Grammars(str(folder), 512, frozenset({EOS}), jump_forward=jumps).get(schema).result()
        assert (compiled.spelling is not None) == jumps
        request = Request(run(1, [9], msgspec.structs.replace(PLAIN, grammar=schema)), 99, frozenset({EOS}))
        matcher = Matcher(compiled, request).matcher
        assert matcher.accept_string('{"a": 1}') and not matcher.accept_string(" ")
        matcher.reset()
        assert matcher.accept_string('{ "a" :1}') != jumps
