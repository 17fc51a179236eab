"""Penalties and draws of a GPU against the reference; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from radixrt.messages import Run, Sampling
from radixrt.worker.cuda.sampling.sampler import CudaSampler, LateThresholds, _kept, find_thresholds
from radixrt.worker.execution.sampler import Ahead, SamplingMetadata, TorchSampler
from radixrt.worker.plan import Gained
from radixrt.worker.request import Request
from radixrt.worker.scheduler.sample_inputs import InputGatherer

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # exp overflows to infinity, as it should

VOCAB = 5000


class PlainThresholds:
    """`flashinfer.sampling` in plain torch."""

    def softmax(self, logits, temperature):
        return (logits / temperature[:, None]).softmax(-1)

    def top_k_renorm_probs(self, probs, top_k):
        ordered = probs.sort(-1, descending=True).values
        last = ordered.gather(-1, (top_k.long() - 1).clamp(max=probs.shape[-1] - 1)[:, None])
        kept = probs.masked_fill(probs < last, 0)
        return kept / kept.sum(-1, keepdim=True)

    def top_p_renorm_probs(self, probs, top_p, is_deterministic=False):
        ordered = probs.sort(-1, descending=True).values
        needed = ((ordered.cumsum(-1) - ordered) < top_p[:, None]).sum(-1, keepdim=True)
        return probs.masked_fill(probs < ordered.gather(-1, (needed - 1).clamp(min=0)), 0)


def request(number: int, prompt: list[int], said: list[int] = (), **sampling) -> Request:
    ids = array("i", [*prompt, *said]).tobytes()
    run = Run(id=number, namespace="", ids=ids, prompt_len=len(prompt), sampling=Sampling(**sampling))
    return Request(run, 10_000, frozenset())


class Both:
    """A GPU's sampler and the reference, which are given the same."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.sampler = CudaSampler(4, VOCAB, device)
        self._inputs = InputGatherer()

    def check(self, requests: list[Request], rows: list[int], ahead: Ahead | None = None) -> None:
        """One step's penalties are the reference's."""
        logits = 4 * torch.randn(len(requests), VOCAB, device=self.device)
        expected, infos = logits.clone(), [one.info for one in requests]
        everything = {n: Gained(0, np.array(one.tokens)) for n, one in enumerate(requests)}
        TorchSampler().penalize(expected, infos, np.array(rows), everything, ahead or {})
        gained = {n: self._inputs.gained(row, one) for n, (one, row) in enumerate(zip(requests, rows, strict=True))}
        self.sampler.penalize(logits, infos, np.array(rows, dtype=np.int32), gained, ahead or {})
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)


def test_penalties_follow_what_is_said(device):
    """Over steps in which requests say more, by one token and by many at once, come, go, change their rows, and take
    the row of another; some have no penalties."""
    both, rng = Both(device), np.random.default_rng(0)
    kinds = [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": -0.25},
        {},
        {"repetition_penalty": 0.8, "presence_penalty": -0.3, "frequency_penalty": 0.1},
    ]

    some = rng.choice(VOCAB, 40, replace=False)  # in all blocks of the vocabulary

    def more(count: int) -> list[int]:
        return rng.choice(some, count).tolist()

    often = [int(some[0])] * 4 + [int(some[1])] * 8
    a, b, c, d = (request(n, often + more(30), more(4 * (n % 2)), **kind) for n, kind in enumerate(kinds))
    both.check([a, b, c], [0, 1, 2])
    for said in (1, 1, 7, 1):
        for one in (a, b, c):
            one.tokens.extend(more(said))
        both.check([c, a, b], [2, 0, 1])
    both.check([a], [0])
    both.check([d, b], [0, 1])  # d has a's row
    d.tokens.extend(more(3))
    a.tokens.extend(more(2))
    both.check([b, a, d], [3, 1, 0])  # b has moved, a has b's row


def test_tokens_that_are_drafted(device):
    """Rows of one request side by side: what each has ahead is penalized there, and counted nowhere."""
    both, rng = Both(device), np.random.default_rng(1)
    one = request(0, [1, 2, 3, 4000], [5, 5, 6], repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)
    two, three = request(1, [9], [8], repetition_penalty=0.9), request(2, [3], [4])
    requests, rows = [one] * 5 + [two, three, three, two], [2] * 5 + [0, 1, 1, 0]
    for _ in range(3):
        drafted = [5, 7, 7, 4000]
        ahead = {n: drafted[:n] for n in range(1, 5)} | {7: [4], 8: [4999]}
        both.check(requests, rows, ahead)
        both.check([two, one, three], [0, 2, 1])
        for each in (one, two, three):
            each.tokens.extend(rng.integers(0, 12, 2).tolist())


def test_nothing_is_kept_for_those_without(device):
    sampler = CudaSampler(4, VOCAB, device)
    logits = torch.randn(2, VOCAB, device=device)
    before = logits.clone()
    sampler.penalize(logits, [request(1, [1, 2]).info, request(2, [3]).info], np.array([0, 1]), {}, {0: [2]})
    assert torch.equal(logits, before)
    assert sampler._penalties._counts is None


SAMPLINGS = [
    {"top_p": 0.8, "top_k": 20},
    {"top_p": 0.95},
    {"top_k": 1},
    {"min_p": 0.05},
    {"min_p": 0.3, "top_p": 0.6, "top_k": 7},
    {"min_p": 0.4, "top_p": 0.5},
    {},
    {"top_k": 3 * VOCAB, "top_p": 0.5},
    {"min_p": 1.0},
]


@pytest.mark.parametrize("spread", [0.1, 4.0])
@pytest.mark.parametrize("plain", [True, False])
def test_samples_are_those_of_the_reference(plain, spread, device):
    """By seed; with thresholds, FlashInfer's where there is a GPU, and by a sort."""
    if plain:
        sampler = CudaSampler(4, VOCAB, device)
    else:
        found = find_thresholds(VOCAB, device) if device.type == "cuda" else PlainThresholds()
        sampler = CudaSampler(4, VOCAB, device, found)
    logits = spread * torch.randn(9, VOCAB, device=device)
    same = total = 0
    for chosen in [[one] for one in SAMPLINGS] + [SAMPLINGS, SAMPLINGS[:3]]:
        samplings = [Sampling(temperature=0.4 + 0.2 * n, seed=n, **one) for n, one in enumerate(2 * chosen)]
        arrays = SamplingMetadata.arrays(samplings, list(range(len(samplings))))
        metadata = SamplingMetadata.of({name: torch.from_numpy(x).to(device) for name, x in arrays.items()})
        rows = torch.from_numpy(np.random.default_rng(1).integers(0, 9, len(samplings)).astype(np.int32)).to(device)
        expected = TorchSampler().sample(logits, rows, metadata)
        found = sampler.sample(logits, rows, metadata)
        same += int((found == expected).sum())
        total += len(samplings)
    assert same >= total - (0 if plain else 2), "sums that round otherwise may keep one token more or less"


def test_thresholds_that_are_still_compiled_are_used_once_they_are_there(device):
    """Before, the vocabulary is sorted, for the same tokens."""
    ready, found = [], []

    def find():
        found.append(PlainThresholds())
        return found[0]

    late = LateThresholds(lambda: bool(ready), find)
    sampler, plain = CudaSampler(4, VOCAB, device, late), CudaSampler(4, VOCAB, device)
    logits = torch.randn(3, VOCAB, device=device)
    arrays = SamplingMetadata.arrays([Sampling(temperature=1.0, seed=5, top_k=5)] * 3, [1, 2, 3])
    metadata = SamplingMetadata.of({name: torch.from_numpy(x).to(device) for name, x in arrays.items()})
    rows = torch.arange(3, dtype=torch.int32, device=device)
    expected = plain.sample(logits, rows, metadata)
    assert (sampler.sample(logits, rows, metadata) == expected).all() and late() is None and not found
    ready.append(True)
    for _ in range(2):
        assert (sampler.sample(logits, rows, metadata) == expected).all()
    assert found == [late()]


def test_top_p_1_keeps_what_is_next_to_impossible(device):
    """Beside one that is cut: the likeliest token's share rounds to 1."""
    thresholds = find_thresholds(VOCAB, device) if device.type == "cuda" else PlainThresholds()
    logits = torch.full((2, VOCAB), -30.0, device=device)
    logits[:, 7] = 0.0
    ones = torch.ones((2, 1), device=device)
    kept = _kept(
        thresholds, logits, SamplingMetadata(ones, ones.long(), top_p=torch.tensor([[1.0], [0.5]], device=device))
    )
    assert (kept > 0).sum(1).tolist() == [VOCAB, 1]


def test_top_p_is_of_what_min_p_leaves(device):
    """Of 0.3, 0.2 and a half of little shares: 0.6 and 0.4, of which the first is enough."""
    thresholds = find_thresholds(VOCAB, device) if device.type == "cuda" else PlainThresholds()
    shares = torch.full((1, VOCAB), 0.5 / (VOCAB - 2), device=device)
    shares[0, 7], shares[0, 4500] = 0.3, 0.2
    one = torch.ones((1, 1), device=device)
    kept = _kept(thresholds, shares.log(), SamplingMetadata(one, one.long(), min_p=0.4 * one, top_p=0.5 * one))
    assert (kept > 0).nonzero().tolist() == [[0, 7]]


def test_a_vocabulary_without_numbers(device):
    """A row of NaN, or nothing but -inf, gives some token (the request fails for it), and harms no other row."""
    sampler = CudaSampler(
        4, VOCAB, device, find_thresholds(VOCAB, device) if device.type == "cuda" else PlainThresholds()
    )
    logits = torch.randn(3, VOCAB, device=device)
    arrays = SamplingMetadata.arrays([Sampling(temperature=1.0, seed=5, top_k=5, top_p=0.9)] * 3, [1, 2, 3])
    metadata = SamplingMetadata.of({name: torch.from_numpy(x).to(device) for name, x in arrays.items()})
    rows = torch.arange(3, dtype=torch.int32, device=device)
    fine = sampler.sample(logits, rows, metadata)
    logits[0], logits[1] = torch.nan, -torch.inf
    found = sampler.sample(logits, rows, metadata)
    assert found[2] == fine[2]
    assert ((found >= 0) & (found < VOCAB)).all()


def test_extreme_values_draw_tokens_that_are_allowed(device):
    """Logits of -inf are of tokens that are not; others are as large as models have them."""
    thresholds = find_thresholds(VOCAB, device) if device.type == "cuda" else PlainThresholds()
    allowed = torch.tensor([5, 8, 4999], device=device)
    samplings = [
        Sampling(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k, seed=7)
        for temperature in (1e-5, 1.0, 3.4028234663852886e38)
        for top_p, min_p, top_k in ((1e-6, 0.0, 0), (1.0, 1e-45, -1), (1e-6, 1.0, 1), (1.0, 0.0, (1 << 31) - 1))
    ]
    raw = torch.full((len(samplings), VOCAB), -torch.inf, device=device)
    raw[:, allowed] = 1e4 * torch.randn(len(samplings), 3, device=device)
    arrays = SamplingMetadata.arrays(samplings, list(range(len(samplings))))
    metadata = SamplingMetadata.of({name: torch.from_numpy(x).to(device) for name, x in arrays.items()})
    rows = torch.arange(len(samplings), dtype=torch.int32, device=device)
    for sampler in (CudaSampler(4, VOCAB, device), CudaSampler(4, VOCAB, device, thresholds)):
        assert torch.isin(sampler.sample(raw, rows, metadata), allowed).all()
    hot = SamplingMetadata(metadata.temperature[-4:], metadata.keys[-4:])
    assert torch.isin(CudaSampler(4, VOCAB, device).sample(raw, rows[-4:], hot), allowed).all()


def test_extreme_penalties_leave_logits_finite(device):
    sampler = CudaSampler(4, VOCAB, device)
    requests = [
        request(n, [1, 2], [2, 3], repetition_penalty=repetition, presence_penalty=2.0, frequency_penalty=-2.0)
        for n, repetition in enumerate((1e-4, 1e4))
    ]
    logits = 1e6 * torch.randn(2, VOCAB, device=device)
    gained = {n: Gained(0, np.array(one.tokens)) for n, one in enumerate(requests)}
    sampler.penalize(logits, [one.info for one in requests], np.array([0, 1], dtype=np.int32), gained, {})
    assert logits.isfinite().all()
