"""Mixtures of experts whose weights are in FP8, multiplied as they are, against the same dequantized."""

from __future__ import annotations

import pytest

from tests.checkpoints import make_model
from tests.gpu.test_models import SIZES, last_logits, load, median_errors
from tests.worker.engine import Engine, prompts
from tests.worker.test_scaled import KINDS, store

FAMILIES = {
    "qwen3_moe": {"moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def make(folder, family: str):
    make_model(folder, family, **(SIZES | FAMILIES[family]))
    return folder


def are_narrow(runner) -> bool:
    kinds = {layer.mlp.experts.is_fp8 for layer in runner._model._layers}
    assert len(kinds) == 1
    return kinds.pop()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_in_fp8(tmp_path, family, kind):
    """As far from the dequantized weights as rounding activations to FP8 makes it; by other chunks no farther from
    itself. (A token whose experts are nearly as likely as others may get these: the median of some prompts.)"""
    scales, config = KINDS[kind]
    folder = store(make(tmp_path / "plain", family), tmp_path / "fp8", scales, ("experts",), **config)
    narrow, wide = (load(folder, kv_cache_dtype="bfloat16", quantization=name) for name in ("auto", "none"))
    assert are_narrow(narrow) and not are_narrow(wide)
    wrong, apart = median_errors(narrow, wide, prompts(5, 20, 900, vocab_size=4096))
    print(f"{family}, {kind}: {wrong:.2e} from the dequantized weights, {apart:.2e} by chunks")
    assert 1e-3 < wrong < 0.3 and apart < 1.5 * wrong


def test_graphs_and_steps_alike(tmp_path):
    folder = store(make(tmp_path / "plain", "qwen3_moe"), tmp_path / "fp8", KINDS["blocks"][0], ("experts",))
    asked = prompts(8, 20, 300, vocab_size=4096)
    runners = [load(folder, enforce_eager=eager, max_num_seqs=8) for eager in (True, False)]
    assert all(are_narrow(runner) for runner in runners)
    eager, graphs = (Engine(runner, max_model_len=4096).generate(asked) for runner in runners)
    assert eager == graphs


def test_all_in_fp8(tmp_path):
    make(tmp_path, "mixtral")
    narrow, wide = load(tmp_path, quantization="fp8"), load(tmp_path)
    assert are_narrow(narrow) and not are_narrow(wide)
    errors = []
    for prompt in prompts(5, 20, 900, vocab_size=4096):
        found, expected = last_logits(narrow, prompt), last_logits(wide, prompt)
        errors.append(float((found - expected).norm() / expected.norm()))
    print("all in FP8:", [f"{error:.2e}" for error in errors])
    assert 1e-3 < sorted(errors)[2] < 0.5
