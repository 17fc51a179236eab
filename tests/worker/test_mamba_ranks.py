"""Mamba-2 on several ranks: what these generate, and their parts of adapters and of quantized weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from radixrt.checkpoint.lora_modules import lora_modules
from radixrt.config import WorkerConfig
from radixrt.worker.load.kv_scales import _states_of_one
from radixrt.worker.model import read_spec
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.model.layers.fp8 import Fp8Linear
from radixrt.worker.model.layers.hybrid_layers import odd_sums, paired, turn
from radixrt.worker.model.layers.int4 import Int4Linear
from radixrt.worker.model.lora.adapter import read_adapter
from radixrt.worker.model.weights.checkpoint import SafetensorsWeights, read_json
from radixrt.worker.model.weights.quantized import Products
from tests.adapters import make_adapter, merged
from tests.worker import test_integers as integers
from tests.worker import test_scaled as scaled
from tests.worker.test_hybrid import check_states_are_followed
from tests.worker.test_lora import causal
from tests.worker.test_models import load
from tests.worker.thread_group import on_ranks

CPU = torch.device("cpu")
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("granitemoehybrid", 2),
        *(pytest.param("nemotron_h", size, marks=SLOW) for size in (2, 4)),
        pytest.param("falcon_h1", 2, marks=SLOW),
        pytest.param("bamba", 4, marks=SLOW),
    ],
)
def test_processes_generate_what_transformers_does(checkpoint, family, size):
    folder, reference = checkpoint(family)
    runner = load(folder, tensor_parallel_size=size, max_mamba_cache_size=12)
    try:
        spec = read_spec(read_json(folder / "config.json")).recurrent
        assert runner.states.rules[0].numel() * size == len(spec.layers) * spec.heads * spec.head_dim * spec.state
        check_states_are_followed(runner, reference)
    finally:
        runner.close()


@given(st.text("M-", min_size=1, max_size=9), st.lists(st.booleans(), min_size=2, max_size=4))
def test_buffers_of_sums_are_used_in_turn(pattern, finished):
    """Whatever layers there are, and whether or not logits are wanted: others may still read what was used last."""
    blocks = paired(kind == "M" for kind in pattern)
    odd, used, last = odd_sums(blocks), [], len(blocks) - 1
    for wanted in finished:
        for layer, own in enumerate(blocks):
            if layer == last:
                used += [1] if odd[0] else []
                if not wanted:
                    break
            used += [turn(blocks, layer, place) for place in (0, 1) if own[place] is not None]
        used += [1] if wanted and odd[1] else []
    assert used == [0, 1] * (len(used) // 2)


@pytest.mark.parametrize(
    "pattern", [["mamba", "attention", "mlp"], ["mamba", "mlp", "attention"], ["mlp", "mamba", "attention"]]
)
def test_an_odd_number_of_sums(checkpoint, pattern):
    folder, _ = checkpoint("nemotron_h", layers_block_type=pattern, num_hidden_layers=len(pattern))
    expected, _ = run(folder)
    for found, turns in on_ranks(2, lambda group: run(folder, group)):
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
        assert turns == [0, 1] * (len(turns) // 2)


def run(folder, group=None, adapters=()) -> tuple[torch.Tensor, list[int]]:
    """(logits of a prompt, the buffers of sums)"""
    weights = SafetensorsWeights(folder, torch.float32, CPU, progress=False)
    model = Decoder(read_spec(read_json(folder / "config.json")), weights, group=group, adapters=adapters)
    tokens = torch.arange(1, 40)
    model.use_adapters(torch.zeros(len(tokens), dtype=torch.int32))
    states = _states_of_one(model, len(tokens))
    with torch.inference_mode():
        out = model.forward(tokens, torch.arange(len(tokens)), causal(model), mix=states)
    return out, group.turns if group else []


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=SLOW)])
@pytest.mark.parametrize("family", ["nemotron_h", pytest.param("bamba", marks=SLOW)])
def test_adapters_are_divided_too(checkpoint, tmp_path, family, size):
    folder, model = checkpoint(family)
    path = make_adapter(tmp_path / "one", model, ("in_proj", "out_proj", "q_proj"), rank=4)
    adapter = read_adapter(lora_modules(WorkerConfig(enable_lora=True, lora_modules=(f"one={path}",)))[0], 16)
    with torch.inference_mode():
        expected = merged(model, path)(torch.arange(1, 40)[None]).logits[0]
    for logits, _ in on_ranks(size, lambda group: run(folder, group, [adapter])):
        assert (logits - expected).abs().max() < 1e-4


# ---------------------------------------------------------------- quantized weights

SIZES = {"hidden_size": 256, "mamba_n_heads": 32, "mamba_d_state": 32, "mamba_n_groups": 2, "num_hidden_layers": 2}
SIZES |= {"attn_layer_indices": [1]}


def parts(whole: torch.Tensor, rank: int) -> torch.Tensor:
    """Rank `rank`'s rows of in_proj of SIZES, of two ranks: half of those of z, x, B, C and steps."""
    return torch.cat([x.chunk(2)[rank] for x in whole.split((512, 512, 64, 64, 32))])


def first_mixers(folder, read) -> list:
    """(in_proj, out_proj) of the first layer: of one process, and of each of two ranks."""

    def found(group=None):
        model = read(folder, group)
        return model._layers[0].mixer.projection, model._layers[0].output.product

    return [found(), *on_ranks(2, found)]


@pytest.mark.parametrize("kind", scaled.KINDS)
def test_parts_in_fp8(checkpoint, tmp_path, kind):
    """Blocks that ranks would cut are dequantized."""
    scales, config = scaled.KINDS[kind]
    folder = scaled.store(checkpoint("bamba", **SIZES)[0], tmp_path / "fp8", scales, ("in_proj", "out_proj"), **config)

    def read(folder, group):
        weights = SafetensorsWeights(folder, torch.float32, CPU, progress=False, products=Products.STORED)
        return Decoder(read_spec(read_json(folder / "config.json")), weights, group=group)

    (whole, back), *ranks = first_mixers(folder, read)
    for rank, (own, own_back) in enumerate(ranks):
        assert isinstance(own_back, Fp8Linear) and isinstance(own, Fp8Linear) == (kind != "blocks")
        weight = own.weight.dequantized() if isinstance(own, Fp8Linear) else own.weight
        assert torch.equal(weight, parts(whole.weight.dequantized(), rank))
        assert torch.equal(own_back.weight.dequantized(), back.weight.dequantized().chunk(2, 1)[rank])


@pytest.mark.usefixtures("wider")
@pytest.mark.parametrize("form", ["awq", "gptq", "w4a16"])
def test_parts_in_int4(checkpoint, tmp_path, form):
    folder, _ = integers.store(checkpoint("bamba", **SIZES)[0], tmp_path, form, ("in_proj.weight", "out_proj.weight"))
    (whole, back), *ranks = first_mixers(folder, lambda folder, group: next(integers.decoders(folder, group))[0])
    for rank, (own, own_back) in enumerate(ranks):
        assert isinstance(own, Int4Linear) and isinstance(own_back, Int4Linear)
        assert torch.equal(own.weight.dequantized(), parts(whole.weight.dequantized(), rank))
        assert torch.equal(own_back.weight.dequantized(), back.weight.dequantized().chunk(2, 1)[rank])


@pytest.fixture
def wider(monkeypatch):
    """Groups that kernels can have."""
    monkeypatch.setattr(integers, "GROUP", 32)
