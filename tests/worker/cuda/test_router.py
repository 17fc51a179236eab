"""The router of a single token against `routing.begin`; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from radixrt.worker.cuda.linear import gemm
from radixrt.worker.cuda.moe import experts as fused
from radixrt.worker.cuda.moe import router, routing
from radixrt.worker.model.layers.linear import Linear
from radixrt.worker.model.layers.moe import Experts
from radixrt.worker.model.spec.expert_spec import Routing

DEEPSEEK = Routing(sigmoid=True, groups=4, kept_groups=2, factor=2.5, float32_logits=True)
KINDS = [Routing(), Routing(biased=True, min_weight_sum=0.1), DEEPSEEK, Routing(jitter=0.01)]


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    monkeypatch.setattr(router, "of_hopper", lambda device: True)


def make(count: int, hidden: int, kind: Routing, device: torch.device, biased: bool = False, **changes) -> Experts:
    half = torch.bfloat16 if device.type == "cuda" else torch.float16
    generator = torch.Generator().manual_seed(count + hidden)
    weight, bias, down = (torch.randn(n, generator=generator) for n in ((count, hidden), count, (count, hidden, 8)))
    gate_up = torch.randn((count, 16, hidden), generator=generator)
    weight, gate_up, down = ((hidden**-0.5 * x).to(device, half) for x in (weight, gate_up, down))
    linear = Linear(weight, bias.to(device, half) if biased else None)
    own = 0.1 * bias.flip(0).to(device) if kind.has_bias else None
    given = {"normalized": True, "activation": "silu", "batch_invariant": False, "routing": kind, "bias": own} | changes
    return Experts(linear, gate_up, down, 3, **given)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, for lanes past the last expert
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "hidden", "biased"), [(8, 64, True), (40, 200, False), (4, 4608, True)])
def test_what_is_begun(count, hidden, biased, kind, device):
    experts = make(count, hidden, kind, device, biased)
    x = torch.randn(1, hidden, device=device).to(experts.down.dtype)
    for _ in range(2):  # counts are 0 again
        weights, order = router.begin(experts, x)
        logits = x.float() @ experts.router.weight.float().T
        logits = (logits if experts.router.bias is None else logits + experts.router.bias.float()).to(weights.dtype)
        expected, known, _ = routing.begin(logits, 3, True, 16, x, None, kind, experts.bias)
        assert weights.dtype == (torch.float32 if kind.float32_logits else x.dtype)
        assert torch.allclose(weights.float(), expected.float(), atol=4e-3)
        for name in ("places", "tokens", "tiles", "experts"):
            assert torch.equal(getattr(order, name), getattr(known, name)), name
        assert order.ends is None and not gemm.split_counts(x.device).any()


def test_a_layer_takes_it(device, monkeypatch):
    taken, real = [], router.begin
    monkeypatch.setattr(router, "begin", lambda *args: taken.append(real(*args)) or taken[-1])
    experts = make(8, 64, Routing(), device)
    x = torch.randn(2, 64, device=device).to(experts.down.dtype)
    both, alone = torch.zeros_like(x), torch.zeros_like(x[:1])
    fused.add(experts, x, both)
    fused.add(experts, x[:1].contiguous(), alone)
    assert [one is None for one in taken] == [True, False]
    assert torch.allclose(alone, both[:1], rtol=2e-2, atol=2e-2)


def test_what_is_left_to_others(device, monkeypatch):
    experts = make(8, 64, Routing(), device)
    x = torch.randn(2, 64, device=device).to(experts.down.dtype)
    wide = dataclasses.replace(experts, router=Linear(experts.router.weight.float()))
    exact = dataclasses.replace(experts, batch_invariant=True)
    for kind, given in ((experts, x), (experts, x[:0]), (wide, x[:1]), (exact, x[:1])):
        assert router.begin(kind, given) is None
    assert router.begin(experts, x[:1]) is not None
    monkeypatch.setattr(router, "of_hopper", lambda device: False)
    assert router.begin(experts, x[:1]) is None
