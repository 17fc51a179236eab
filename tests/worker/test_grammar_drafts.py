"""Drafted tokens of text that follows a grammar: what is said is what is said without them."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixrt.config import WorkerConfig, resolve
from radixrt.messages import Grammar, Sampling
from radixrt.worker.execution.fake_runner import EOS
from radixrt.worker.load.runner import load_runner
from radixrt.worker.request import Request
from radixrt.worker.speculative.ngram import MAX_MATCHED_REQUESTS, Drafter
from radixrt.worker.structured.masks import fill_masks
from tests.checkpoints import make_model
from tests.worker.engine import prompts
from tests.worker.test_drafting import Told, repeating, request
from tests.worker.test_grammar_jump import (
    RECORD,
    SLOW,
    ZONE,
    Follower,
    LateRunner,
    by_bytes,
    by_words,
    fake,
    folder,
    sampling_of,
)

pytest.importorskip("xgrammar")
__all__ = ["by_bytes", "by_words", "folder"]


def told(rests: bool, texts: list[list[int]], said: list[list[int]]) -> Told:
    return Told(rests, [text + tokens for text, tokens in zip(texts, said, strict=True)])


@SLOW
@given(asked=st.lists(sampling_of(), min_size=1, max_size=5), data=st.data())
def test_what_is_said_is_the_same(asked, data, by_words):
    """Whatever is forced, by whatever way it may be spelled; in chunks, overlapped, after preemption."""
    asked.append(Sampling(max_tokens=30, ignore_eos=True))
    texts = prompts(len(asked), 3, 20, seed=data.draw(st.integers(0, 99)))
    alone = Follower(by_words, fake(vocab_size=540))
    expected = [alone.say(text, sampling) for text, sampling in zip(texts, asked, strict=True)]
    finishes = [(alone.last(id).finish, alone.last(id).stop) for id in alone.outputs]
    ways = (False, {}, 0), (False, {"chunk": 6}, 60), (True, {}, 60), (True, {"rows": 2, "chunk": 9}, 0)
    for (overlapped, sizes, states), truth in itertools.product(ways, (0, 3)):
        drafter = Drafter(8, overlapped, predicts=True) if truth else told(overlapped, texts, expected)
        runner = fake(250, 540, overlaps=overlapped, num_states=states, truth=truth)
        engine = Follower(by_words, runner, drafter=drafter, **sizes)
        ids = [engine.add(text, sampling) for text, sampling in zip(texts, asked, strict=True)]
        engine.finish()
        assert [engine.tokens(id) for id in ids] == expected
        assert [(engine.last(id).finish, engine.last(id).stop) for id in ids] == finishes
        assert engine.cache.leased_pages == 0 and engine.scheduler.queued_tokens == 0


@pytest.mark.parametrize("jumps", [False, True])
@pytest.mark.parametrize("overlapped", [False, True])
def test_by_a_model_too(overlapped, jumps, by_bytes, tmp_path_factory):
    """With penalties and noise; in fewer steps."""
    path = tmp_path_factory.mktemp("bytes")
    make_model(path, "llama", vocab_size=259)
    runner = load_runner(resolve(WorkerConfig(model=str(path), device="cpu", max_total_tokens=600, deterministic=True)))
    asked = [
        Sampling(max_tokens=90, temperature=0.0, grammar=RECORD),
        Sampling(max_tokens=90, temperature=1.0, seed=3, grammar=RECORD, frequency_penalty=1.0),
        Sampling(max_tokens=30, temperature=1.0, seed=3, ignore_eos=True),
        Sampling(max_tokens=90, temperature=0.7, seed=5, repetition_penalty=1.3, grammar=ZONE, min_tokens=14),
        Sampling(max_tokens=60, temperature=0.0, grammar=Grammar("json", "")),
    ]
    texts = prompts(len(asked), 5, 20, vocab_size=259)
    drawing = Follower(by_bytes, runner, jumps=jumps)
    ids = [drawing.add(text, sampling) for text, sampling in zip(texts, asked, strict=True)]
    drawing.finish()
    expected = [drawing.tokens(id) for id in ids]
    drafter = told(overlapped, texts, expected)
    engine = Follower(by_bytes, LateRunner(runner) if overlapped else runner, jumps=jumps, chunk=16, drafter=drafter)
    ids = [engine.add(text, sampling) for text, sampling in zip(texts, asked, strict=True)]
    engine.finish()
    assert [engine.tokens(id) for id in ids] == expected
    assert engine.scheduler.forced_tokens == drawing.scheduler.forced_tokens
    assert drafter.accepted > 15 and engine.scheduler.steps < 0.8 * drawing.scheduler.steps


@pytest.mark.parametrize("states", [0, 40])
@pytest.mark.parametrize("overlapped", [False, True])
def test_random_load(overlapped, states, by_bytes):
    """Requests come, are aborted and are sent back for want of pages."""
    rng, aborted = random.Random(3 + overlapped), set()
    grammars = [None, RECORD, Grammar("regex", "(ab|cd){2}Zone [0-9]{2,6}, and so on"), Grammar("regex", "[a-d]{30}")]
    trunk = [rng.randrange(3, 259) for _ in range(20)]
    asked = []
    for _ in range(60):
        prompt = trunk[: rng.randint(1, 20)] + [rng.randrange(3, 259) for _ in range(rng.randint(1, 6))]
        asked.append((prompt, Sampling(max_tokens=rng.randint(1, 60), ignore_eos=True, grammar=rng.choice(grammars))))
    alone = Follower(by_bytes, fake(), jumps=False)
    expected = [alone.say(*one) for one in asked]
    drafter = told(overlapped, [prompt for prompt, _ in asked], expected)
    runner = fake(pages=110, overlaps=overlapped, num_states=states)
    engine = Follower(by_bytes, runner, chunk=12, rows=5, max_model_len=100, drafter=drafter)
    ids = []
    for one in asked:
        ids.append(engine.add(*one))
        for _ in range(rng.randint(0, 6)):
            engine.step()
        if rng.random() < 0.15 and engine.scheduler.abort(victim := rng.choice(ids[-6:])):
            aborted.add(victim)
    engine.finish()
    assert engine.scheduler.preemptions and engine.scheduler.forced_tokens > 100 and len(aborted) > 3
    assert drafter.accepted > 60 and engine.cache.leased_pages == 0
    for id, tokens in zip(ids, expected, strict=True):
        assert engine.tokens(id) == (tokens[: len(engine.tokens(id))] if id in aborted else tokens)


def test_a_draft_ends_where_the_grammar_does_not_go_on_so(by_bytes, capfd):
    """Or where it forces what follows: that is not drawn."""
    engine = Follower(by_bytes, fake())

    def ids(text: str) -> list[int]:
        return [3 + byte for byte in text.encode()]

    asked = Sampling(max_tokens=90, grammar=Grammar("regex", "[ab]{9}Zone [ab]{3}"))
    id = engine.add([9, 9], asked)
    for _ in range(3):
        engine.step()
    one = engine.scheduler._requests[id]
    left = 9 - (len(one.tokens) - 2)
    assert 4 < left < 9
    for text, count in (("abxab", 2), ("x", 0), ("", 0), ("a\0b", 1), ("ab" * 9, left - 1)):
        for _ in range(2):  # nothing is taken in
            assert one.matcher.drafted(one, ids(text)) == ids(text)[:count]
    one.stop_ids |= {ids("b")[0]}
    assert one.matcher.drafted(one, ids("aabaa")) == ids("aa")
    engine.finish()
    assert engine.last(id).finish == "stop"
    bytes_of_json = engine.grammars.get(RECORD).result()
    assert ids("\0")[0] in bytes_of_json.silent and 3 + ord("a") not in bytes_of_json.silent
    assert "Warning" not in capfd.readouterr().err


class Refused(Drafter):
    """Drafts what no grammar here allows; notes what comes of it."""

    refused = 0

    def begins(self, request: Request, requests: int) -> bool:
        return request.total + 2 <= request.limit

    def draft(self, request: Request, most: int, requests: int) -> list[int]:
        return [3 + ord("!")] * 4

    def refuse(self, request: Request) -> None:
        self.refused += 1


def test_who_drafts_what_its_grammar_refuses_stops(by_bytes):
    asked = Sampling(max_tokens=60, grammar=Grammar("regex", "[a-z]{50}"))
    drafter = Refused(4, False)
    assert Follower(by_bytes, fake(), drafter=drafter).say([9], asked) == Follower(by_bytes, fake()).say([9], asked)
    assert drafter.refused > 20 and not drafter.drafted
    one, real = request(repeating(9)), Drafter(8, False)
    assert real.begins(one, 1)
    for _ in range(12):
        real.refuse(one)
    assert not real.begins(one, 1)


@pytest.mark.parametrize("how", [{"min_tokens": 4}, {"ignore_eos": True}])
def test_masks_after_a_draft(how, by_bytes):
    """The end is allowed where the text is long enough, drafted tokens counted; nothing of them is taken in."""
    engine = Follower(by_bytes, fake())
    id = engine.add([9], Sampling(max_tokens=60, grammar=Grammar("regex", "[a-d]{2,5}"), **how))
    for _ in range(2):
        engine.step()
    one = engine.scheduler._requests[id]
    assert len(one.tokens) == 3
    a, rows = 3 + ord("a"), [0, 1, 2, 3]
    for _ in range(2):
        out = np.zeros((len(rows), one.matcher.compiled.words), dtype=np.int32)
        assert not fill_masks([one] * len(rows), out, ahead={n: [a] * n for n in rows if n})
        bits = np.unpackbits(out.view(np.uint8), axis=1, bitorder="little")
        assert bits[:, a].tolist() == [1, 1, 1, 0]
        ends = [0, 0, 1, 1] if "min_tokens" in how else [0, 0, 0, 1]
        assert bits[:, EOS].tolist() == ends


def test_among_many_those_with_a_grammar_do_not_draft():
    drafter, one = Drafter(8, False), request(repeating(9))
    assert drafter.begins(one, MAX_MATCHED_REQUESTS + 1)
    one.matcher = object()
    assert drafter.begins(one, MAX_MATCHED_REQUESTS) and not drafter.begins(one, MAX_MATCHED_REQUESTS + 1)
    assert drafter.draft(one, 8, MAX_MATCHED_REQUESTS) and not drafter.draft(one, 8, MAX_MATCHED_REQUESTS + 1)
