"""Models whose weights are in FP8, multiplied as they are, against the same dequantized."""

from __future__ import annotations

import pytest

from radixrt.worker.model.layers.fp8 import Fp8Linear
from radixrt.worker.model.layers.mlp import Mlp
from tests.checkpoints import make_model
from tests.gpu.test_models import SIZES, last_logits, load, median_errors
from tests.worker.engine import Engine, prompts
from tests.worker.test_scaled import KINDS, store

KEPT = {"qwen3_moe": 8}
"""Products of a model in FP8; experts are in stacks of their own."""


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3_moe"])
@pytest.mark.parametrize("kind", KINDS)
def test_products_in_fp8(tmp_path, family, kind):
    """As far from the dequantized weights as rounding activations to FP8 makes it; by other chunks no farther from
    itself, for a bit that differs may be rounded to another step of FP8."""
    make_model(tmp_path / "plain", family, **SIZES)
    scales, config = KINDS[kind]
    folder = store(tmp_path / "plain", tmp_path / "fp8", scales, **config)
    narrow, wide = (load(folder, kv_cache_dtype="bfloat16", quantization=name) for name in ("auto", "none"))
    layers = narrow._model._layers
    products = [x for layer in layers for x in (*layer.mixer.products, layer.output.product, *products_of(layer.mlp))]
    assert sum(isinstance(x, Fp8Linear) for x in products) == KEPT.get(family, 16)
    wrong, apart = median_errors(narrow, wide, prompts(5, 20, 900, vocab_size=4096))
    print(f"{family}, {kind}: {wrong:.2e} from the dequantized weights, {apart:.2e} by chunks")
    assert 1e-3 < wrong < 0.2 and apart < 1.5 * wrong


def products_of(mlp) -> list:
    return [mlp.gate_up, mlp.down.product] if isinstance(mlp, Mlp) else []


def test_graphs_and_steps_alike(tmp_path):
    make_model(tmp_path / "plain", "llama", **SIZES)
    folder = store(tmp_path / "plain", tmp_path / "fp8", KINDS["rows"][0])
    asked = prompts(8, 20, 300, vocab_size=4096)
    eager, graphs = (
        Engine(load(folder, enforce_eager=eager, max_num_seqs=8), max_model_len=4096).generate(asked)
        for eager in (True, False)
    )
    assert eager == graphs


def test_all_in_fp8(tmp_path):
    make_model(tmp_path, "llama", **SIZES)
    narrow, wide = load(tmp_path, quantization="fp8"), load(tmp_path)
    prompt = prompts(1, 300, 301, vocab_size=4096)[0]
    a, b = last_logits(narrow, prompt), last_logits(wide, prompt)
    assert 1e-3 < float((a - b).norm() / b.norm()) < 0.3
