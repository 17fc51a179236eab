"""What an MLP lets one kernel do."""

from __future__ import annotations

import pytest
import torch

from radixrt.worker.model.layers.fp8 import Fp8Linear, Fp8Weight
from radixrt.worker.model.layers.layers import Output
from radixrt.worker.model.layers.linear import Linear
from radixrt.worker.model.layers.mlp import Mlp, SharedMlp
from radixrt.worker.model.layers.norms import NoNorm
from radixrt.worker.model.layers.ops import TorchOps


class Fused(TorchOps):
    """Counts what it is asked to do by one kernel."""

    def __init__(self) -> None:
        self.asked = 0

    def gated_linear(self, x, weight, activation):
        self.asked += 1
        return self.gate(x @ weight.t(), activation)


class Never(Fused):
    """Leaves it to two."""

    def gated_linear(self, x, weight, activation):
        self.asked += 1


def linear(rows, columns, ops, **kinds):
    return Linear(torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)), ops=ops, **kinds)


@pytest.mark.parametrize("kind", [Mlp, SharedMlp])
@pytest.mark.parametrize("ops", [Fused(), Never()], ids=["fused", "not"])
def test_product_and_gate_by_one_kernel(kind, ops):
    gate_up, down = linear(32, 8, ops), linear(8, 16, None)
    x, residual = torch.randn(2, 5, 8)
    expected = residual + TorchOps.gate(x @ gate_up.weight.t(), "silu") @ down.weight.t()
    before = ops.asked
    if kind is Mlp:
        Mlp(gate_up, Output(down, None, 0), "silu").add(x, residual, NoNorm(), ops)
    else:
        SharedMlp(gate_up, down, "silu").add(x, residual, ops)
    assert ops.asked == before + 1
    torch.testing.assert_close(residual, expected)


@pytest.mark.parametrize(
    "gate_up",
    [
        linear(32, 8, None),
        linear(32, 8, Fused(), batch_invariant=True),
        linear(32, 8, Fused(), bias=torch.zeros(32)),
    ],
    ids=["no ops", "batch invariant", "bias"],
)
def test_what_one_kernel_does_not_do(gate_up):
    assert gate_up.gated_linear(torch.randn(5, 8), "silu") is None


def test_what_is_rounded_next_is_gated_by_the_kernel_that_rounds():
    ops = Fused()
    down = Fp8Linear(Fp8Weight.of(torch.randn(8, 16)), None, torch.float32, ops)
    x, residual = torch.randn(2, 5, 8)
    Mlp(linear(32, 8, ops), Output(down, None, 0), "silu").add(x, residual, NoNorm(), ops)
    assert ops.asked == 0
