"""Tokens that are banned: allowed_token_ids and bad_token_ids, against loops over tokens, and transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixrt.config import WorkerConfig, resolve
from radixrt.messages import Sampling
from radixrt.worker.drafting import Drafter
from radixrt.worker.loading import load_runner
from radixrt.worker.picking import NOT_FINITE
from radixrt.worker.sample import TorchSampler, adjust, choose
from radixrt.worker.structured.allowed import NONE_ALLOWED
from tests.worker.engine import Engine, prompts
from tests.worker.test_sample import logits, request

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
    assert asked.adjusted == asked.serial == bool(allowed or bad)
    assert asked.jumps != asked.adjusted, "tokens that a grammar forces are not sampled"
    adjust(raw, asked, ahead)
    assert torch.equal(raw, expected)


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_no_other_token_is_sampled(temperature):
    allowed = (5, 9, 11)
    sampling = Sampling(allowed_token_ids=allowed, bad_token_ids=((9,),), temperature=temperature, seed=3)
    found = {
        int(choose(logits(1), [request(sampling)], np.arange(1), [position], TorchSampler())[0])
        for position in range(60)
    }
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


def test_if_no_token_is_left_the_request_says_so(runner):
    field = "allowed_token_ids"
    for sampling in (
        Sampling(max_tokens=4, allowed_token_ids=(5,), bad_token_ids=((5,),)),
        Sampling(max_tokens=4, min_tokens=2, allowed_token_ids=(7, 9), stop_token_ids=(7, 9)),
        Sampling(max_tokens=4, allowed_token_ids=(5,), bad_token_ids=((5, 5),)),
    ):
        tokens, last = generated(runner, [5, 6, 7], sampling)
        assert set(tokens) <= {5} and len(tokens) == (sampling.bad_token_ids == ((5, 5),))
        assert (last.finish, last.field, last.error) == ("error", field, f"{field}: {NONE_ALLOWED}")


def test_logits_that_are_not_finite_are_no_fault_of_the_request(runner, monkeypatch):
    """Also not if it allows few tokens."""
    logits = runner.logits
    monkeypatch.setattr(runner, "logits", lambda plan: logits(plan) * torch.nan)
    _, last = generated(runner, [5, 6, 7], Sampling(max_tokens=4, allowed_token_ids=(5, 6)))
    assert (last.finish, last.field, last.error) == ("error", "", NOT_FINITE)
