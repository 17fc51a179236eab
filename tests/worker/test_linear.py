"""Products that add to what is there."""

from __future__ import annotations

import pytest
import torch

from radixrt.worker.model import read_spec
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.model.layers.linear import Linear
from radixrt.worker.model.layers.ops import TorchOps
from radixrt.worker.model.weights.checkpoint import SafetensorsWeights, read_json
from tests.checkpoints import make_model
from tests.worker.test_scaled import logits, products_of


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_add(factor, bias, batch_invariant):
    torch.manual_seed(0)
    x, weight, residual = torch.randn(21, 12), torch.randn(10, 12), torch.randn(21, 10)
    offset = torch.randn(10) if bias else None
    expected = residual + factor * (x @ weight.t() + (offset if bias else 0))
    Linear(weight, offset, batch_invariant).add(x, residual, factor)
    assert torch.allclose(residual, expected, atol=1e-5)


class Asked(TorchOps):
    """Says who asks for a product of few rows."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def small_linear(self, x, weight, bias, out=None, add=False):
        self.weights.append(weight)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_all_products_of_layers_may_be_those_of_few_rows(family, tmp_path):
    make_model(tmp_path, family)
    weights = SafetensorsWeights(tmp_path, torch.float32, torch.device("cpu"), progress=False)
    asked = Asked()
    model = Decoder(read_spec(read_json(tmp_path / "config.json")), weights, ops=asked)
    logits(model)
    assert [id(weight) for weight in asked.weights] == [id(product.weight) for product in products_of(model)]
