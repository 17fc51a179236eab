"""Weights in FP8 that are multiplied as they are: the reference, and what is read of a checkpoint."""

from __future__ import annotations

import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixrt.config import WorkerConfig, resolve
from radixrt.worker.load.options import choose_products, look_up
from radixrt.worker.load.runner import load_model
from radixrt.worker.model import read_spec
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.model.layers.fp8 import (
    BLOCK,
    FP8,
    LIMIT,
    MAX_COLUMNS,
    Fp8Linear,
    Fp8Scaling,
    Fp8Weight,
    concatenate_fp8,
    quantize_activations,
)
from radixrt.worker.model.layers.linear import Linear
from radixrt.worker.model.layers.ops import TorchOps
from radixrt.worker.model.weights.checkpoint import SafetensorsWeights, read_json
from radixrt.worker.model.weights.quantized import Products, dequantize, read_scaled
from radixrt.worker.model.weights.random_weights import RandomWeights
from tests.checkpoints import make_model

CPU = torch.device("cpu")
STEP = 2**-4
"""Half of FP8's step, relative."""


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def spread(size: tuple[int, int]) -> torch.Tensor:
    """Values of very different rows."""
    return torch.randn(size) * torch.logspace(-3, 3, size[0])[:, None]


# ---------------------------------------------------------------- rounding


@pytest.mark.parametrize("fp8_scaling", Fp8Scaling)
@pytest.mark.parametrize("columns", [64, 128, 300])
def test_each_value_is_within_half_a_step(fp8_scaling, columns):
    x = spread((7, columns))
    found = quantize_activations(x, fp8_scaling)
    groups = -(-columns // BLOCK) if fp8_scaling is Fp8Scaling.BLOCKS else 1
    assert found.values.shape == x.shape and found.scales.shape == (7, groups)
    each = found.scales.repeat_interleave(BLOCK if groups > 1 else columns, 1)[:, :columns]
    assert ((found.dequantized() - x).abs() <= STEP * x.abs() + each * 2**-10).all()
    for group in range(groups):
        part = slice(group * BLOCK, (group + 1) * BLOCK) if fp8_scaling is Fp8Scaling.BLOCKS else slice(None)
        assert (found.values[:, part].float().abs().amax(1) == LIMIT).all()


def test_zeros_stay_zeros_and_nan_stays_nan():
    x = torch.zeros(3, 256)
    x[1, 7], x[2, 9] = torch.nan, torch.inf
    for fp8_scaling in Fp8Scaling:
        found = quantize_activations(x, fp8_scaling).dequantized()
        assert (found[0] == 0).all()
        assert found[1].isnan().any() and found[2].isnan().any()


def test_weights_side_by_side():
    rows = [Fp8Weight.of(spread((n, 64))) for n in (16, 48)]
    assert torch.equal(concatenate_fp8(rows).dequantized(), torch.cat([part.dequantized() for part in rows]))
    blocks = [
        Fp8Weight.by_blocks(spread((n, 256)).clamp(-LIMIT, LIMIT).to(FP8), torch.rand(-(-n // BLOCK), 2))
        for n in (128, 256, 144)
    ]
    whole = concatenate_fp8(blocks)
    assert torch.equal(whole.dequantized(), torch.cat([part.dequantized() for part in blocks]))
    assert whole.scales.shape == (5, 4), "cuBLASLt wants a multiple of four"
    assert concatenate_fp8(blocks[::-1]) is None, "144 rows end within a block"
    assert concatenate_fp8([Fp8Weight.of(spread((16, 256))), blocks[0]]) is None
    assert concatenate_fp8([Fp8Weight.of(spread((24, 64)))]) is None, "24 rows"
    assert concatenate_fp8([Fp8Weight.of(spread((16, 72)))]) is None, "72 columns"
    assert concatenate_fp8([Fp8Weight.of(torch.ones(16, MAX_COLUMNS + 16))]) is None


def test_the_reference_of_a_product():
    x, weight, bias, residual = torch.randn(5, 256), 0.02 * torch.randn(48, 256), torch.randn(48), torch.randn(5, 48)
    expected = x @ weight.t() + bias
    known = Fp8Weight.of(weight)
    found = TorchOps.scaled(x, known, bias, torch.float32)
    assert 1e-3 < error(found, expected) < 0.05
    again = TorchOps.scaled(quantize_activations(x, Fp8Scaling.ROWS), known, bias, torch.float32)
    assert torch.equal(found, again)
    before = residual.clone()
    assert TorchOps.scaled(x, known, bias, torch.float32, residual) is residual
    assert torch.allclose(residual, before + found)
    Fp8Linear(known, bias, torch.float32, TorchOps()).add(x, before, 0.3)
    assert torch.allclose(before, residual - 0.7 * found, atol=1e-5)


# ---------------------------------------------------------------- of a checkpoint


SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 64, "num_hidden_layers": 2, "vocab_size": 512}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    make_model(folder, "qwen2", **SIZES)  # with biases
    return folder


def store(folder, target, scales, names=("proj",), **config):
    """The checkpoint with the matrices of these names in FP8, with the scales that `scales(weight)` says."""
    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    for name in [name for name in tensors if name.endswith("weight") and any(part in name for part in names)]:
        scale, wide = scales(tensors[name].float())
        tensors[name] = (tensors[name].float() / wide).to(torch.float8_e4m3fn)
        tensors[name + ("_scale_inv" if config else "_scale")] = scale
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(
        (target / "config.json").read_text().rstrip().rstrip("}")
        + ', "quantization_config": {"quant_method": "fp8"'
        + "".join(f', "{key}": {value}' for key, value in config.items())
        + "}}"
    )
    return target


def of_tensor(weight):
    scale = weight.abs().max() / LIMIT
    return scale, scale


def of_rows(weight):
    scale = weight.abs().amax(1, keepdim=True) / LIMIT
    return scale, scale


def of_blocks(weight):
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK)
    padded[:rows, :columns] = weight
    scale = padded.view(-(-rows // BLOCK), BLOCK, -1, BLOCK).abs().amax((1, 3)) / LIMIT
    return scale, scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]


KINDS = {"tensor": (of_tensor, {}), "rows": (of_rows, {}), "blocks": (of_blocks, {"weight_block_size": [BLOCK, BLOCK]})}


def decoder(folder, products: Products) -> Decoder:
    weights = SafetensorsWeights(folder, torch.float32, CPU, progress=False, products=products)
    model = Decoder(read_spec(read_json(folder / "config.json")), weights)
    assert not weights.unused()
    return model


def logits(model: Decoder) -> torch.Tensor:
    tokens = torch.arange(1, 20)

    def attend(layer, heads):
        q, k, v = heads.split()
        return q + k.repeat_interleave(2, 1) + v.repeat_interleave(2, 1)

    return model.forward(tokens, torch.arange(len(tokens)), attend)


def products_of(model: Decoder) -> list[object]:
    layers = model._layers
    return [x for y in layers for x in (y.mixer.qkv, y.output.product, y.mlp.gate_up, y.mlp.down.product)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_in_fp8_is_multiplied_so(plain, tmp_path, kind):
    scales, config = KINDS[kind]
    folder = store(plain, tmp_path / "fp8", scales, **config)
    stored, wide = decoder(folder, Products.STORED), decoder(folder, Products.NONE)
    for kept, dequantized in zip(products_of(stored), products_of(wide), strict=True):
        assert isinstance(kept, Fp8Linear) and isinstance(dequantized, Linear)
        assert kept.weight.fp8_scaling is (Fp8Scaling.BLOCKS if kind == "blocks" else Fp8Scaling.ROWS)
        assert torch.equal(kept.weight.dequantized(), dequantized.weight)
        assert (kept.bias is None) == (dequantized.bias is None)
    assert 1e-4 < error(logits(stored), logits(wide)) < 0.1


@pytest.mark.parametrize("family", ["phi3", "olmo2", "gemma3_text", "granite", "hunyuan_v1_dense"])
def test_families_whose_matrices_are_stored_together_or_have_other_norms_or_factors(checkpoint, tmp_path, family):
    folder = store(checkpoint(family, **SIZES)[0], tmp_path / "fp8", of_blocks, weight_block_size=[BLOCK, BLOCK])
    stored, wide = decoder(folder, Products.STORED), decoder(folder, Products.NONE)
    assert all(isinstance(kept, Fp8Linear) for kept in products_of(stored))
    assert 1e-4 < error(logits(stored), logits(wide)) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_an_mlp_without_a_gate(checkpoint, tmp_path, kind):
    """Its inner features are rounded by the product that takes them."""
    scales, config = KINDS[kind]
    folder = store(checkpoint("arcee", **SIZES)[0], tmp_path / "fp8", scales, **config)
    stored, wide = decoder(folder, Products.STORED), decoder(folder, Products.NONE)
    assert stored.is_fp8 and not wide.is_fp8
    for layer in stored._layers:
        assert isinstance(layer.mlp.up, Fp8Linear) and isinstance(layer.mlp.down.product, Fp8Linear)
    assert 1e-4 < error(logits(stored), logits(wide)) < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_heads_that_are_turned_otherwise_take_their_scales_along(checkpoint, tmp_path, kind):
    """Blocks would come apart."""
    scales, config = KINDS[kind]
    folder = store(checkpoint("glm4", **SIZES)[0], tmp_path / "fp8", scales, **config)
    stored, wide = decoder(folder, Products.STORED), decoder(folder, Products.NONE)
    for kept, dequantized in zip(products_of(stored)[::4], products_of(wide)[::4], strict=True):
        assert isinstance(kept, Linear if kind == "blocks" else Fp8Linear)
        weight = kept.weight if kind == "blocks" else kept.weight.dequantized()
        assert torch.equal(weight, dequantized.weight) and torch.equal(kept.bias, dequantized.bias)
    assert 1e-4 < error(logits(stored), logits(wide)) < 0.1


HYBRID: dict[str, Any] = SIZES | {"head_dim": 128, "num_hidden_layers": 2, "full_attention_interval": 2}
HYBRID |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 128}
HYBRID |= {"linear_value_head_dim": 64, "num_experts": 0}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_rows_of_queries_and_gates_that_are_stored_head_by_head_take_their_scales_along(
    checkpoint, tmp_path, family, kind
):
    """As do those of q, k, v and z in Qwen3-Next. Small projections are not in FP8 in published checkpoints."""
    scales, config = KINDS[kind]
    names = ("qkv", "proj_z", "q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "gate_proj", "up_proj", "down_proj")
    folder = store(checkpoint(family, **HYBRID)[0], tmp_path / "fp8", scales, names, **config)
    stored, wide = decoder(folder, Products.STORED), decoder(folder, Products.NONE)
    for kept, dequantized in zip(stored._layers, wide._layers, strict=True):
        pairs = [(kept.output.product, dequantized.output.product)]
        if dequantized.gate is None:
            pairs.append((kept.mixer.qkvz, dequantized.mixer.qkvz))
            assert isinstance(kept.mixer.ba, Linear) and kept.mixer.fp8_scaling is None
        else:
            pairs += [(kept.mixer.qkv, dequantized.mixer.qkv), (kept.gate.product, dequantized.gate.product)]
        for one, other in pairs:
            assert isinstance(one, Fp8Linear) and torch.equal(one.weight.dequantized(), other.weight)


def test_rows_that_are_no_whole_blocks_are_not_picked():
    weight = Fp8Weight.by_blocks(torch.randn(512, 128).to(FP8), torch.rand(4, 1))
    whole = torch.arange(256, 384)
    assert torch.equal(weight.picked(whole).dequantized(), weight.dequantized()[whole])
    for order in (whole.flip(0), whole + 64, whole[:64], torch.arange(0, 256, 2)):
        assert weight.picked(order) is None


@pytest.mark.parametrize("shape", [(), (1,), (256,), (256, 1), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_of_any_dtype_are_kept_in_float32(shape, dtype):
    """Checkpoints of fbgemm and compressed-tensors have them in bfloat16."""
    weight, scale = torch.randn(256, 384).to(FP8), torch.rand(shape).to(dtype)
    found = read_scaled("q_proj", weight, scale, (BLOCK, BLOCK))
    assert found is not None and found.scales.dtype == torch.float32
    assert torch.equal(found.dequantized(), dequantize("q_proj", weight, scale, (BLOCK, BLOCK), torch.float32))


def test_as_many_blocks_as_rows_are_blocks():
    """As every weight of 16,384 columns has."""
    weight, scale = torch.ones(256, 128 * BLOCK).to(FP8), torch.rand(2, 128)
    found = read_scaled("down_proj", weight, scale, (BLOCK, BLOCK))
    assert found is not None and found.fp8_scaling is Fp8Scaling.BLOCKS
    wide = dequantize("down_proj", weight, scale, (BLOCK, BLOCK), torch.float32)
    assert torch.equal(wide[::BLOCK, ::BLOCK], scale) and torch.equal(found.dequantized(), wide)


def test_only_what_is_stored_in_fp8_unless_all_is_asked_for(plain, tmp_path):
    folder = store(plain, tmp_path / "fp8", of_rows, names=("gate_proj", "up_proj", "o_proj", "q_proj"))
    stored, everything = decoder(folder, Products.STORED), decoder(folder, Products.ALL)
    kept = [False, True, True, False] * 2  # of q, k and v only q is in FP8
    assert [isinstance(x, Fp8Linear) for x in products_of(stored)] == kept
    assert all(isinstance(x, Fp8Linear) for x in products_of(everything))
    assert not isinstance(stored._head, Fp8Linear) and not isinstance(everything._head, Fp8Linear)
    assert error(logits(everything), logits(stored)) < 0.2
    assert all(isinstance(x, Linear) for x in products_of(decoder(plain, Products.STORED)))


def test_what_is_not_kept_in_fp8_is_counted_once(plain, tmp_path):
    """Of q, k and v only q is in FP8: they are dequantized."""
    folder = store(plain, tmp_path / "fp8", of_rows, names=("q_proj",))
    weights = SafetensorsWeights(folder, torch.float32, CPU, products=Products.STORED)
    Decoder(read_spec(read_json(folder / "config.json")), weights)
    assert 0 < weights._bar.n <= weights._bar.total


def test_blocks_of_another_size_are_dequantized(plain, tmp_path):
    def halves(weight):
        scale, _ = of_tensor(weight)
        grid = scale.expand(-(-weight.shape[0] // 64), -(-weight.shape[1] // 64)).contiguous()
        return grid, scale

    folder = store(plain, tmp_path / "fp8", halves, weight_block_size=[64, 64])
    weights = SafetensorsWeights(folder, torch.float32, CPU, False, (64, 64), Products.STORED)
    model = Decoder(read_spec(read_json(folder / "config.json")), weights)
    assert all(isinstance(x, Linear) for x in products_of(model))


def test_random_weights(plain):
    spec = read_spec(read_json(plain / "config.json"))
    wide, narrow = (Decoder(spec, RandomWeights(0, torch.float32, CPU, p)) for p in (Products.STORED, Products.ALL))
    assert all(isinstance(x, Linear) for x in products_of(wide))
    for a, b in zip(products_of(narrow), products_of(wide), strict=True):
        assert error(a.weight.dequantized(), b.weight) < 0.05


# ---------------------------------------------------------------- what is chosen


def choose(
    name, capability=(9, 0), dtype=torch.bfloat16, exact=False, kernels=True, device="cuda", hf_config=None,
    monkeypatch=None,
):  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    return choose_products(
        name, SimpleNamespace(device=torch.device(device), dtype=dtype, hf_config=hf_config or {}), exact, kernels
    )


@pytest.mark.parametrize(
    ("without", "words"),
    [
        ({"kernels": False}, "a GPU"),
        ({"device": "cpu"}, "a GPU"),
        ({"capability": (8, 6)}, "capability 8.9"),
        ({"dtype": torch.float16}, "bfloat16"),
        ({"exact": True}, "deterministic"),
    ],
)
def test_products_in_fp8_need_a_gpu_that_has_them(monkeypatch, without, words):
    assert choose("auto", monkeypatch=monkeypatch) is Products.STORED
    assert choose("auto", capability=(8, 9), monkeypatch=monkeypatch) is Products.STORED
    assert choose("fp8", monkeypatch=monkeypatch) is Products.ALL
    assert choose("none", monkeypatch=monkeypatch) is Products.NONE
    assert choose("auto", **without, monkeypatch=monkeypatch) is Products.NONE
    with pytest.raises(ValueError, match=f"quantization fp8 needs .*{words}"):
        choose("fp8", **without, monkeypatch=monkeypatch)


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize(("activations", "products"), [({"num_bits": 8}, Products.STORED), (None, Products.NONE)])
def test_weights_alone_in_fp8_are_dequantized(monkeypatch, key, activations, products):
    """As the checkpoint has it; a group of K and V says nothing of it."""
    group = {"weights": {"type": "float", "num_bits": 8}, "input_activations": activations}
    config = {key: {"quant_method": "compressed-tensors", "config_groups": {"a": group, "b": {"weights": None}}}}
    assert choose("auto", hf_config=config, monkeypatch=monkeypatch) is products
    assert choose("fp8", hf_config=config, monkeypatch=monkeypatch) is Products.ALL


@pytest.mark.parametrize(
    ("family", "quantization", "products", "words"),
    [
        ("qwen3_moe", {"quant_method": "fp8"}, Products.STORED, "experts that are stored in FP8 are dequantized"),
        ("qwen3_moe", {"quant_method": "fp8"}, Products.NONE, "weights that are stored in FP8 are dequantized"),
        ("qwen3_moe", None, Products.ALL, "its experts stay in 16 bits"),
        ("llama", {"quant_method": "fp8"}, Products.STORED, ""),
        ("llama", {"quant_method": "awq"}, Products.STORED, "weights that are stored in AWQ are dequantized"),
        ("llama", {"quant_method": "awq"}, Products.ALL, ""),
        ("mixtral", None, Products.ALL, ""),
        ("llama", None, Products.ALL, ""),
        ("qwen3_moe", None, Products.NONE, ""),
    ],
)
def test_what_takes_16_bits_is_said(checkpoint, monkeypatch, caplog, family, quantization, products, words):
    config = resolve(WorkerConfig(model=str(checkpoint(family)[0]), device="cpu", load_format="dummy"))
    loaded = look_up(config)
    loaded.hf_config.update({"quantization_config": quantization} if quantization else {})
    monkeypatch.setattr("radixrt.worker.load.runner.choose_products", lambda *_: products)
    with caplog.at_level("WARNING"):
        load_model(config, loaded)
    said = [record.message for record in caplog.records if "bits" in record.message]
    assert len(said) == bool(words) and all(words in line for line in said)


def test_on_a_cpu_weights_are_dequantized(plain):
    config = resolve(WorkerConfig(model=str(plain), device="cpu"))
    assert choose_products(config.quantization, look_up(config), exact=False, kernels=False) is Products.NONE
