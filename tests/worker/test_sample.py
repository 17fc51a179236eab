"""Sampling against transformers' processors, against its own formulas, and as a distribution."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from radixrt.messages import Run, Sampling
from radixrt.worker.execution.sample_step import SampleStep
from radixrt.worker.execution.sampler import (
    SamplingMetadata,
    TorchSampler,
    adjust,
    choose,
    gumbel,
    keep_min_p,
    keep_top,
    penalize,
    sample_tokens,
)
from radixrt.worker.plan import Gained, Plan, Result
from radixrt.worker.request import Request
from tests.worker.engine import sample_inputs

VOCAB = 200


def metadata(samplings, positions) -> SamplingMetadata:
    return SamplingMetadata.of(
        {name: torch.from_numpy(x) for name, x in SamplingMetadata.arrays(samplings, positions).items()}
    )


def sampled_by(logits: torch.Tensor, samplings, positions) -> torch.Tensor:
    return sample_tokens(logits, metadata(samplings, positions))


def noise_of(seeds, positions, vocab_size: int) -> torch.Tensor:
    return gumbel(metadata([Sampling(temperature=1.0, seed=seed) for seed in seeds], positions).keys, vocab_size)


def request(sampling: Sampling, tokens=(5, 6, 7), prompt_len: int | None = None, eos=frozenset({2})) -> Request:
    size = len(tokens) if prompt_len is None else prompt_len
    return Request(
        Run(id=1, namespace="", ids=array("i", tokens).tobytes(), prompt_len=size, sampling=sampling), 99, eos
    )


def chosen(raw: torch.Tensor, requests: list[Request], positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """`choose`, with all that it depends on."""
    gained = {n: Gained(0, np.array(r.tokens)) for n, r in enumerate(requests)}
    banned = {n: list(r.banned()) for n, r in enumerate(requests)}
    infos, rows = [r.info for r in requests], np.arange(len(requests))
    return choose(raw, infos, rows, positions, TorchSampler(), gained=gained, banned=banned)


def picked(plan: Plan, requests: Sequence[Request], raw: torch.Tensor) -> Result:
    sample_step = SampleStep(plan, raw, TorchSampler(), sample_inputs(plan, requests))
    return sample_step.read(sample_step.packed.numpy())


def logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def column(value: float) -> torch.Tensor:
    return torch.tensor([[float(value)]])


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 0.01])
@pytest.mark.parametrize("top_k", [1, 3, 50, VOCAB])
@pytest.mark.parametrize("seed", range(3))
def test_top_k_and_top_p_keep_what_transformers_keeps(top_k, top_p, seed):
    raw = logits(seed=seed)
    expected = TopPLogitsWarper(top_p)(None, TopKLogitsWarper(top_k)(None, raw))
    assert torch.equal(keep_top(raw, column(top_k), column(top_p)), expected)


@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.5, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p):
    raw = logits()
    assert torch.equal(keep_min_p(raw, column(min_p)), MinPLogitsWarper(min_p)(None, raw))


def test_top_p_1_keeps_what_is_next_to_impossible():
    raw = torch.full((2, VOCAB), -30.0)
    raw[:, 7] = 0.0
    kept = keep_top(raw, None, torch.tensor([[1.0], [0.5]]))
    assert kept.isfinite().sum(1).tolist() == [VOCAB, 1]


def test_of_equal_tokens_exactly_k_are_kept():
    kept = keep_top(torch.zeros(1, VOCAB), column(7), column(1.0))
    assert kept.isfinite().sum() == 7


def test_repetition_penalty_counts_prompt_and_output():
    raw, tokens = logits()[0], (5, 6, 7, 7, 8)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([tokens]), raw[None].clone())[0]
    penalize(raw, request(Sampling(repetition_penalty=1.7), tokens, prompt_len=3).info, tokens)
    assert torch.equal(raw, expected)


def test_presence_and_frequency_count_the_output_only():
    raw, sampling = logits()[0], Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    expected = raw.clone()
    expected[7] -= 0.5 + 2 * 0.25
    expected[8] -= 0.5 + 0.25
    tokens = (5, 6, 7, 7, 8, 7)
    penalize(raw, request(sampling, tokens, prompt_len=3).info, tokens)
    assert torch.equal(raw, expected)


@pytest.mark.parametrize(
    "penalty", [{"repetition_penalty": 2.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}]
)
def test_a_step_penalizes_what_its_request_generated(penalty):
    asked, ones = request(Sampling(temperature=0.0, **penalty), (5, 6, 7), prompt_len=2), np.ones(1, dtype=np.int32)
    plan = Plan(1, (asked.info,), ones, 2 * ones, ones, ones, ones, ones, ones > 0, np.zeros((3, 0)))
    raw = torch.zeros(1, VOCAB)
    raw[0, 7], raw[0, 9] = 3.0, 2.0
    assert picked(plan, [asked], raw).tokens == [9]


def test_logit_bias_is_added():
    raw = logits()[0]
    expected = raw.clone()
    expected[11] += 4.0
    expected[12] -= 100.0
    adjust(raw, request(Sampling(logit_bias={11: 4.0, 12: -100.0})).info)
    assert torch.equal(raw, expected)


def test_stops_are_banned_below_min_tokens():
    sampling = Sampling(min_tokens=2, stop_token_ids=(9,))
    for generated, banned in ((0, True), (1, True), (2, False)):
        raw = logits()[0]
        one = request(sampling, (5, 6, 7, *range(20, 20 + generated)), prompt_len=3)
        adjust(raw, one.info, list(one.banned()))
        assert [math.isinf(raw[i]) for i in (2, 9, 10)] == [banned, banned, False]


def test_temperature_zero_takes_the_largest_after_what_changes_the_logits():
    raw = logits(2)
    best = int(raw[0].argmax())
    plain, biased = Sampling(temperature=0.0), Sampling(temperature=0.0, logit_bias={best: -100.0})
    expected = int(raw[0].topk(2).indices[1])
    found, finite = chosen(torch.stack([raw[0], raw[0]]), [request(plain), request(biased)], [3, 3])
    assert finite.tolist() == [True, True]
    assert found.tolist() == [best, expected]


def test_a_top_p_of_zero_leaves_the_likeliest_token():
    found, _ = chosen(raw := logits(1), [request(Sampling(top_p=0.0, seed=1))], [3])
    assert found.tolist() == raw.argmax(-1).tolist()


def test_sampled_beside_greedy_each_has_its_own_position_and_noise():
    raw = logits(4, seed=2)
    samplings = [
        Sampling(temperature=t, seed=n, top_k=k) for n, (t, k) in enumerate([(0.0, 0), (2.0, 0), (0.0, 5), (1.5, 90)])
    ]
    positions = [3, 9, 4, 11]
    found, _ = chosen(raw.clone(), [request(s) for s in samplings], positions)
    best = raw.argmax(-1).tolist()
    drawn = [int(sampled_by(raw[n : n + 1], [samplings[n]], [positions[n]])) for n in (1, 3)]
    assert found.tolist() == [best[0], drawn[0], best[2], drawn[1]]


def test_logits_that_are_not_finite_are_told():
    rows = torch.stack([logits(1)[0]] * 4)
    rows[1, 3], rows[2] = torch.nan, -torch.inf
    rows[3, 4] = torch.inf
    _, finite = chosen(rows, [request(Sampling(temperature=0.0))] * 4, [3] * 4)
    assert finite.tolist() == [True, False, False, False]


def test_noise_is_gumbel():
    """Mean 0.5772 (Euler), variance pi^2 / 6, by 2 million values; and no value repeats."""
    noise = noise_of(range(20), [7] * 20, 100_000).double()
    assert float(noise.mean()) == pytest.approx(0.5772157, abs=0.005)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.01)
    assert len(torch.unique(noise_of([1], [1], 1000))) > 990
    correlation = np.corrcoef(noise[:, :-1].flatten(), noise[:, 1:].flatten())[0, 1]
    assert abs(correlation) < 0.005


def test_samples_follow_the_distribution():
    """Chi-square over 20,000 draws with temperature and top_k against the exact probabilities."""
    raw, sampling, count = logits(seed=4), Sampling(temperature=1.3, top_k=12), 20_000
    kept = TopKLogitsWarper(12)(None, TemperatureLogitsWarper(1.3)(None, raw))
    expected = kept.softmax(-1)[0].double().numpy() * count
    many = raw.expand(count, VOCAB)
    drawn = sampled_by(many, [Sampling(temperature=1.3, top_k=12, seed=i) for i in range(count)], [3] * count)
    observed = np.bincount(drawn.numpy(), minlength=VOCAB)
    assert observed[expected == 0].sum() == 0
    at = expected > 0
    chi_square = float(((observed[at] - expected[at]) ** 2 / expected[at]).sum())
    assert chi_square < 33  # 11 degrees of freedom: p = 0.0005
    assert sampling.top_k == 12


def test_noise_depends_on_seed_and_position_alone():
    raw = logits(4, seed=1)
    samplings = [Sampling(seed=i, temperature=2.0) for i in range(4)]
    together = sampled_by(raw, samplings, [10, 11, 12, 13]).tolist()
    assert together == [int(sampled_by(raw[i : i + 1], [samplings[i]], [10 + i])) for i in range(4)]
    by_seed = {int(sampled_by(raw[:1], [Sampling(seed=s, temperature=2.0)], [3])) for s in range(40)}
    by_position = {int(sampled_by(raw[:1], [Sampling(seed=1, temperature=2.0)], [n])) for n in range(40)}
    assert len(by_seed) > 5 and len(by_position) > 5


def test_extreme_seeds():
    for seed in (0, 1, (1 << 63) - 1, (1 << 64) - 1, -1):
        noise = noise_of([seed], [0], 64)
        assert noise.isfinite().all()


def test_reported_logprobs_are_the_models_own():
    raw = logits(3)
    expected = torch.log_softmax(raw, -1)
    asked = [
        Sampling(logprobs=3, temperature=2.0, seed=1),
        Sampling(temperature=2.0),
        Sampling(logprobs=0, logit_bias={0: 50.0}),
    ]
    ones = np.ones(3, dtype=np.int32)
    requests = [request(s) for s in asked]
    infos = tuple(r.info for r in requests)
    plan = Plan(1, infos, ones, 2 * ones, ones, ones, ones, ones, ones.astype(bool), np.zeros((3, 0)))
    result = picked(plan, requests, raw.clone())
    found = result.logprobs
    assert result.tokens[:2] == sampled_by(raw[:2], asked[:2], [3, 3]).tolist()  # after the token at position 2
    assert result.tokens[2] == 0
    assert found[1] is None and not result.failed
    assert [one.token for one in found if one] == [result.tokens[0], result.tokens[2]]
    assert found[0].logprob == pytest.approx(float(expected[0, result.tokens[0]]))
    best = expected[0].topk(3)
    assert [t for t, _ in found[0].top] == best.indices.tolist()
    assert [p for _, p in found[0].top] == pytest.approx(best.values.tolist())
    assert found[2].logprob == pytest.approx(float(expected[2, result.tokens[2]])) and found[2].top == []


@pytest.mark.parametrize("others", [False, True])
def test_whether_logits_are_finite_does_not_depend_on_the_batch(others):
    """What a token that is banned has for its logit is nobody's, also where other positions are wanted beside it."""
    ones = np.ones(2, dtype=np.int32)
    wants, samples = (2 * ones, ones > 1) if others else (ones, ones > 0)
    samples[0] = True
    requests = [request(Sampling(temperature=0.0, min_tokens=n), eos=frozenset({2})) for n in (1, 0)]
    plan = Plan(1, tuple(r.info for r in requests), ones - 1, ones, wants, ones, ones, wants, samples, np.zeros((3, 0)))
    raw = logits(int(wants.sum()))
    raw[wants[0] - 1, 2] = torch.nan
    assert picked(plan, requests, raw.clone()).failed == {}
    for bad in (torch.nan, torch.inf, -torch.inf):
        raw[-1] = bad
        assert list(picked(plan, requests, raw.clone()).failed) == [1]


EXTREMES = {
    "temperature": (5e-324, 1e-5, 1.0, 3.4028234663852886e38),
    "top_p": (0.0, 5e-324, 1e-40, 1e-6, 1.0),
    "min_p": (0.0, 5e-324, 1e-38, 1.0),
    "top_k": (-1, 1, (1 << 31) - 1),
    "repetition_penalty": (1e-4, 1e4),
    "presence_penalty": (-2.0, 2.0),
}


def test_extreme_values_draw_tokens_that_are_allowed():
    """All at once, of logits as large as models have them."""
    allowed = (3, 5, 8, VOCAB - 1)
    samplings = [
        Sampling(**dict(zip(EXTREMES, values, strict=True)), allowed_token_ids=allowed, bad_token_ids=((3,),), seed=n,
                 logit_bias={5: 100.0, 8: -100.0})
        for n, values in enumerate(itertools.product(*EXTREMES.values()))
    ]  # fmt: skip
    requests = [request(sampling, (5, 6, 7, 5), 2) for sampling in samplings]
    raw = 1e4 * logits(1).expand(len(requests), -1).clone()
    tokens, finite = chosen(raw, requests, [4] * len(requests))
    assert finite.all() and set(tokens.tolist()) <= {5, 8, VOCAB - 1}


def test_at_the_highest_temperature_all_that_is_allowed_is_as_likely():
    sampling = Sampling(temperature=3.4e38, allowed_token_ids=(3, 5, 8, 9), logit_bias={5: 100.0}, seed=1)
    asked = [request(sampling)] * 400
    tokens, _ = chosen(logits(400), asked, [*range(400)])
    assert set(tokens.tolist()) == {3, 5, 8, 9} and tokens.bincount().max() < 150
    array = SamplingMetadata.arrays([sampling], [0])["temperature"]
    assert 1 / array > np.finfo(np.float32).tiny, "a normal number: GPUs take others for 0"


@pytest.mark.parametrize("top_p", [0.0, 5e-324, 1e-40, 1e-7])
def test_a_top_p_that_float32_may_not_have_is_greedy(top_p):
    assert request(Sampling(top_p=top_p)).info.greedy and not request(Sampling(top_p=1e-5)).info.greedy
