"""Tokens that are banned: allowed_token_ids and bad_token_ids, against loops over tokens, and transformers."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixrt.config import WorkerConfig, resolve
from radixrt.messages import Grammar, Run, Sampling
from radixrt.worker.execution.sample_step import NOT_FINITE
from radixrt.worker.execution.sampler import adjust
from radixrt.worker.load.runner import load_runner
from radixrt.worker.plan import NONE_ALLOWED, Draft, Plan, Result
from radixrt.worker.request import BadSampling, Request, from_run
from radixrt.worker.speculative.ngram import Drafter
from radixrt.worker.stuck import Stuck, StuckCause
from tests.worker.engine import Engine, prompts
from tests.worker.test_sample import chosen, logits, picked, request

NOT_ALLOWED = Stuck(StuckCause.RESTRICTION, NONE_ALLOWED)
FEW = st.integers(3, 5)


def banned(sampling: Sampling, output: list[int], vocab: int) -> set[int]:
    """The ids that may not follow `output`."""
    found = set(range(vocab)) - set(sampling.allowed_token_ids) if sampling.allowed_token_ids else set()
    for sequence in map(list, sampling.bad_token_ids):
        found |= {i for i in range(vocab) if [*output, i][-len(sequence) :] == sequence}
    return found


@given(
    allowed=st.lists(FEW, max_size=6),
    bad=st.lists(st.lists(FEW, min_size=1, max_size=4), max_size=4),
    tokens=st.lists(FEW, min_size=1, max_size=8),
    ahead=st.lists(FEW, max_size=3),
    data=st.data(),
)
def test_which_ids_are_banned(allowed, bad, tokens, ahead, data):
    """After generated tokens, and after drafted ones; those of the prompt begin no sequence."""
    prompt_len = data.draw(st.integers(1, len(tokens)))
    sampling = Sampling(allowed_token_ids=tuple(allowed), bad_token_ids=tuple(map(tuple, bad)), temperature=0.0)
    raw = logits()[0]
    expected = raw.clone()
    expected[sorted(banned(sampling, tokens[prompt_len:] + ahead, len(raw)))] = -torch.inf
    asked = request(sampling, tuple(tokens), prompt_len)
    assert asked.info.adjusted == asked.info.needs_host_tokens == bool(allowed or bad)
    assert asked.jumps != asked.info.adjusted, "tokens that a grammar forces are not sampled"
    adjust(raw, asked.info, list(asked.banned(ahead)))
    assert torch.equal(raw, expected)


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_no_other_token_is_sampled(temperature):
    allowed = (5, 9, 11)
    sampling = Sampling(allowed_token_ids=allowed, bad_token_ids=((9,),), temperature=temperature, seed=3)
    found = {int(chosen(logits(1), [request(sampling)], [position])[0]) for position in range(60)}
    assert found == {5, 11} if temperature else found < {5, 11}


@pytest.fixture(scope="module")
def runner(checkpoint):
    folder, _ = checkpoint("llama")
    settings = {"model": str(folder), "device": "cpu", "max_total_tokens": 4096, "page_size": 16}
    return load_runner(resolve(WorkerConfig(**settings)))


def generated(runner, prompt, sampling, drafter=None):
    engine = Engine(runner, drafter=drafter)
    id = engine.add(prompt, sampling)
    engine.finish()
    return engine.tokens(id), engine.last(id)


@pytest.mark.parametrize("drafts", [False, True])
def test_generation_is_that_of_transformers(checkpoint, runner, drafts):
    _, model = checkpoint("llama")
    prompt = prompts(1, 40, 40)[0]
    plain = generated(runner, prompt, Sampling(max_tokens=24, temperature=0.0, ignore_eos=True))[0]
    allowed = tuple(range(3, 90))
    bad = ((plain[0],), tuple(plain[1:3]))
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    cases = [
        (Sampling(allowed_token_ids=allowed), {"prefix_allowed_tokens_fn": lambda *_: list(allowed)}),
        # transformers looks for the beginnings of sequences in the prompt as well: this one has none of them
        (Sampling(bad_token_ids=bad), {"bad_words_ids": [list(ids) for ids in bad]}),
    ]
    for told, same in cases:
        sampling = Sampling(
            max_tokens=24, temperature=0.0, ignore_eos=True, allowed_token_ids=told.allowed_token_ids,
            bad_token_ids=told.bad_token_ids,
        )  # fmt: skip
        expected = model.generate(torch.tensor([prompt]), **options, **same)[0, len(prompt) :].tolist()
        found, _ = generated(runner, prompt, sampling, Drafter(4, runner.overlaps) if drafts else None)
        assert found == expected != plain


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(
    ("fields", "said", "field"),
    [
        ({"allowed_token_ids": (5,), "bad_token_ids": ((5,),)}, [], "allowed_token_ids"),
        ({"allowed_token_ids": (5,), "bad_token_ids": ((5, 5, 5),)}, [5, 5], "allowed_token_ids"),
        ({"allowed_token_ids": (5, 6), "bad_token_ids": ((5, 5), (5, 6)), "logit_bias": {5: 100.0}}, [5],
         "allowed_token_ids"),
        ({"allowed_token_ids": (2,), "stop_token_ids": (2,), "min_tokens": 3}, [], "allowed_token_ids"),
        ({"bad_token_ids": tuple((id,) for id in range(512))}, [], "bad_token_ids"),
    ],
)  # fmt: skip
def test_a_request_that_leaves_no_token_ends_with_its_field(runner, fields, said, field, drafts):
    """Others of its step go on, and what it computed is right."""
    engine = Engine(runner, drafter=Drafter(4, runner.overlaps) if drafts else None)
    other = engine.add([8, 9, 10], Sampling(max_tokens=6, temperature=0.0, ignore_eos=True))
    id = engine.add([5, 6, 7], Sampling(max_tokens=9, **fields))
    engine.finish()
    last = engine.last(id)
    assert engine.tokens(id) == said and (last.finish, last.error, last.field) == ("error", NONE_ALLOWED, field)
    assert len(engine.tokens(other)) == 6 and engine.last(other).finish == "length"
    again = engine.add([5, 6, 7, *said, 9], Sampling(max_tokens=1))
    engine.finish()
    assert engine.last(again).cached_tokens == 0, "shorter than a page"


def picked_for(asked: Request, raw: torch.Tensor) -> Result:
    ones = np.ones(1, dtype=np.int32)
    plan = Plan(1, (asked.info,), ones, 2 * ones, ones, ones, ones, ones, ones > 0, np.zeros((3, 0)))
    return picked(plan, [asked], raw)


def test_what_a_draft_leaves_no_token_after_is_no_bad_logits():
    asked, ones = request(Sampling(allowed_token_ids=(5,), bad_token_ids=((5, 5),))), np.ones(2, dtype=np.int32)
    plan = Plan(1, (asked.info,) * 2, ones, 2 * ones + [0, 1], ones, ones, ones, ones, ones > 0, np.zeros((3, 0)),
                drafts=(Draft([5], 0),))  # fmt: skip
    result = picked(plan, [asked] * 2, torch.zeros(2, 8))
    assert result.tokens[0] == 5 and not result.failed and result.stuck == {1: NOT_ALLOWED}


def test_bad_logits_are_no_restriction():
    """They are the model's fault, whatever the request allows: then nothing that it computed is right."""
    asked = request(Sampling(allowed_token_ids=(5,), bad_token_ids=((6,),)))
    result = picked_for(asked, torch.full((1, 8), torch.nan))
    assert list(result.failed) == [0] and not result.stuck


@pytest.mark.parametrize(("mask", "stuck"), [(1 << 6, True), (1 << 6 | 1 << 5, False)])
def test_a_grammar_and_allowed_ids_without_a_common_token_are_no_bad_logits(mask, stuck, monkeypatch):
    asked = request(Sampling(allowed_token_ids=(5, 7), bad_token_ids=((7,),), grammar=Grammar("regex", "a")))
    asked.matcher = object()
    monkeypatch.setattr("radixrt.worker.scheduler.sample_inputs.fill_masks", lambda _, out, ahead: out.fill(mask) or {})
    result = picked_for(asked, torch.zeros(1, 8))
    assert not result.failed and result.stuck == ({0: NOT_ALLOWED} if stuck else {})
    assert stuck or result.tokens == [5]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"logit_bias": {50: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (5, 50)}, "allowed_token_ids"),
        ({"bad_token_ids": ((5, 50),)}, "bad_token_ids"),
        ({"stop_token_ids": (50,)}, "stop_token_ids"),
        ({"allowed_token_ids": (2,), "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": (5,), "bad_token_ids": ((5,),)}, "allowed_token_ids"),
        ({"bad_token_ids": tuple((id,) for id in range(50) if id != 2), "min_tokens": 1}, "bad_token_ids"),
    ],
)
def test_a_worker_refuses_what_its_vocabulary_and_eos_do_not_allow(fields, field):
    run = Run(id=1, namespace="", ids=b"\5\0\0\0", prompt_len=1, sampling=Sampling(max_tokens=4, **fields))
    with pytest.raises(BadSampling) as caught:
        from_run(run, 99, 50, frozenset({2}))
    assert caught.value.field == field and str(caught.value).startswith(field)
    assert from_run(msgspec.structs.replace(run, sampling=Sampling(allowed_token_ids=(2,))), 99, 50, frozenset({2}))


def test_logits_that_are_not_finite_are_no_fault_of_the_request(runner, monkeypatch):
    """Also not if it allows few tokens."""
    logits = runner.logits
    monkeypatch.setattr(runner, "logits", lambda plan: logits(plan) * torch.nan)
    _, last = generated(runner, [5, 6, 7], Sampling(max_tokens=4, allowed_token_ids=(5, 6)))
    assert (last.finish, last.field, last.error) == ("error", "", NOT_FINITE)
