"""Weights of AWQ, GPTQ, compressed-tensors and ModelOpt: written as these do, read as what they stand for."""

from __future__ import annotations

import dataclasses
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from radixrt.config import WorkerConfig, resolve
from radixrt.worker.load import options, runner
from radixrt.worker.model import read_spec
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.model.layers.int4 import Int4, Int4Linear, concatenate_int4
from radixrt.worker.model.layers.layers import DecoderLayer
from radixrt.worker.model.layers.linear import Product
from radixrt.worker.model.layers.mlp import Mixture
from radixrt.worker.model.layers.mxfp4 import E2M1
from radixrt.worker.model.layers.recurrent.delta_net import DeltaNet
from radixrt.worker.model.parallel.sharding import Part
from radixrt.worker.model.weights import integers
from radixrt.worker.model.weights.checkpoint import SafetensorsWeights, read_json
from radixrt.worker.model.weights.integers import Integers
from radixrt.worker.model.weights.quantized import stored_as
from radixrt.worker.model.weights.random_weights import RandomWeights
from tests.worker.test_published import edit, logits, rewrite
from tests.worker.test_sharding import mix
from tests.worker.thread_group import on_ranks

CPU = torch.device("cpu")
GROUP = 16
Tensors = dict[str, torch.Tensor]


def packed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 words of the last dimension's numbers, the first one in the lowest bits, one after the other."""
    many = 32 // bits
    values = torch.nn.functional.pad(values, (0, -values.shape[-1] % many)).long().unflatten(-1, (-1, many))
    words = torch.zeros(values.shape[:-1], dtype=torch.long)
    for place in range(many):
        words |= values[..., place] << place * bits
    return words.to(torch.int32)


def rounded(
    weight: torch.Tensor, bits: int, group: int, even: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(values from 0 to 2**bits - 1 [out, in], scales [out, G], zeros [out, G]); if `even`, zeros are in the middle."""
    parts = weight.unflatten(1, (-1, group))
    low, high = parts.amin(-1), parts.amax(-1)
    if even:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / (2**bits - 1)).to(torch.bfloat16).float()
    zeros = (-low / scales).round().clamp(1, 2**bits - 1) if not even else torch.full_like(low, 1 << bits - 1)
    values = (parts / scales[..., None] + zeros[..., None]).round().clamp(0, 2**bits - 1).flatten(1)
    return values.int(), scales, zeros.int()


def meant(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return (values - zeros[:, groups]) * scales[:, groups]


def awq(weight: torch.Tensor, bits: int = 4) -> tuple[Tensors, torch.Tensor]:
    values, scales, zeros = rounded(weight, bits, GROUP)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def mixed(x: torch.Tensor) -> torch.Tensor:
        return packed(x.t().unflatten(-1, (-1, 8))[..., order].flatten(-2), 4)

    groups = torch.arange(weight.shape[1]) // GROUP
    stored = {"qweight": mixed(values), "qzeros": mixed(zeros), "scales": scales.t()}
    return stored, meant(values, scales, zeros, groups)


def gptq(weight: torch.Tensor, bits: int, ordered: bool = True, less: int = 1) -> tuple[Tensors, torch.Tensor]:
    values, scales, zeros = rounded(weight, bits, GROUP)
    groups = torch.arange(weight.shape[1]) // GROUP
    if not ordered:  # of columns by their activations
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(1))]
        values = torch.randint(0, 2**bits, values.shape, generator=torch.Generator().manual_seed(2))
    stored = {"qweight": packed(values, bits).reshape(len(values), -1).t()}
    stored |= {"qzeros": packed((zeros - less).t(), bits), "scales": scales.t(), "g_idx": groups.int()}
    return stored, meant(values, scales, zeros, groups)


def llm_compressor(weight: torch.Tensor, bits: int, by_row: bool = False, even: bool = False, ordered: bool = True):
    values, scales, zeros = rounded(weight, bits, weight.shape[1] if by_row else GROUP, even)
    groups = torch.zeros(weight.shape[1]).long() if by_row else torch.arange(weight.shape[1]) // GROUP
    stored = {"weight_packed": packed(values, bits), "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}
    if not even:
        stored["weight_zero_point"] = packed(zeros.t(), bits).t()
    if not ordered:
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(1))]
        stored["weight_g_idx"] = groups.int()
    return stored, meant(values, scales, zeros, groups)


def int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scales).round().to(torch.int8)
    return {"weight": values, "weight_scale": scales}, values * scales


def fp4(weight: torch.Tensor, kind: str) -> tuple[Tensors, torch.Tensor]:
    known = torch.tensor([*E2M1, *(-x for x in E2M1)])
    group = 32 if kind == "mxfp4" else 16
    parts = weight.unflatten(1, (-1, group))
    most, whole = parts.abs().amax(-1) / 6, torch.tensor([448 * 6 / weight.abs().max()])
    if kind == "mxfp4":
        powers = most.log2().ceil() + 127
        stored, scales = powers.to(torch.uint8), torch.exp2(powers - 127)
    else:
        stored = (most * whole).to(torch.float8_e4m3fn)
        scales = stored.float() / whole if kind == "nvfp4" else stored.float() * (1 / whole)
    halves = ((parts / scales[..., None])[..., None] - known).abs().argmin(-1).flatten(1)
    both = (halves[:, ::2] | halves[:, 1::2] << 4).to(torch.uint8)
    named = {"weight" if kind == "modelopt" else "weight_packed": both, "weight_scale": stored}
    named |= {"nvfp4": {"weight_global_scale": whole}, "modelopt": {"weight_scale_2": 1 / whole}}.get(kind, {})
    return named, known[halves] * scales.repeat_interleave(group, 1)


def groups_of(kind: str, bits: int) -> dict:
    return {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"type": kind, "num_bits": bits}}}}


FORMS = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, "AWQ"),
    "gptq": (lambda w: gptq(w, 4), {"quant_method": "gptq", "bits": 4}, "GPTQ"),
    "gptq 8": (lambda w: gptq(w, 8), {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq"}, "GPTQ"),
    "gptq, by activations": (lambda w: gptq(w, 4, ordered=False), {"quant_method": "gptq", "bits": 4}, "GPTQ"),
    "gptq v2": (lambda w: gptq(w, 4, less=0), {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}, "GPTQ"),
    "w4a16": (lambda w: llm_compressor(w, 4, even=True), groups_of("int", 4), "INT4"),
    "w4a16, zeros": (lambda w: llm_compressor(w, 4), groups_of("int", 4), "INT4"),
    "w4a16, ordered": (lambda w: llm_compressor(w, 4, ordered=False), groups_of("int", 4), "INT4"),
    "w8a16": (lambda w: llm_compressor(w, 8, by_row=True), groups_of("int", 8), "INT8"),
    "w8a8": (int8, groups_of("int", 8), "INT8"),
    "nvfp4": (lambda w: fp4(w, "nvfp4"), groups_of("float", 4), "FP4"),
    "mxfp4": (lambda w: fp4(w, "mxfp4"), groups_of("float", 4), "FP4"),
    "modelopt": (lambda w: fp4(w, "modelopt"), {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_stored_is_what_is_meant(form):
    weight = torch.randn(24, 96, generator=torch.Generator().manual_seed(0))
    write, quantization, kind = FORMS[form]
    stored, expected = write(weight)
    found = integers.read(stored.get, quantization)
    assert found.shape == weight.shape and torch.allclose(found, expected, rtol=1e-6, atol=1e-7)
    if "activations" not in form and "ordered" not in form:
        assert (found - weight).norm() < 0.25 * weight.norm(), "close to what was rounded"
    assert stored_as({"quantization_config": quantization}) == kind


def store(folder, tmp_path, form: str, ends: tuple[str, ...]):
    """(folder with products of a checkpoint in that form, one with what they stand for). Some may stay plain."""
    write, quantization, _ = FORMS[form]
    shutil.copytree(folder, tmp_path / "stored")
    plain = load_file(tmp_path / "stored/model.safetensors")
    stored = dict(plain)
    for name in [name for name, x in plain.items() if name.endswith(ends) and x.shape[1] % 32 == 0]:
        tensors, plain[name] = write(stored.pop(name))
        stored |= {name.removesuffix("weight") + suffix: x.contiguous() for suffix, x in tensors.items()}
    shutil.copytree(tmp_path / "stored", tmp_path / "plain")
    rewrite(tmp_path / "plain", lambda _: {name: x.contiguous() for name, x in plain.items()})
    rewrite(tmp_path / "stored", lambda _: stored)
    edit(tmp_path / "stored", quantization_config=quantization)
    return tmp_path / "stored", tmp_path / "plain"


@pytest.mark.parametrize(
    ("form", "family"),
    [(form, "llama") for form in FORMS]
    + [("awq", "phi3"), ("w4a16", "phi3"), ("gptq", "qwen3_moe"), ("w4a16", "qwen3_moe"), ("nvfp4", "deepseek_v3")],
)
def test_a_checkpoint_is_dequantized_at_load(checkpoint, tmp_path, form, family, caplog):
    """Also where matrices are stored together, and expert by expert."""
    stored, plain = store(checkpoint(family)[0], tmp_path, form, ("proj.weight",))
    with caplog.at_level(logging.WARNING):
        found = logits(stored)
    assert torch.allclose(found, logits(plain), rtol=0, atol=1e-4)
    assert f"weights that are stored in {FORMS[form][2]} are dequantized at load" in caplog.text
    assert "not used" not in caplog.text


@pytest.mark.parametrize("form", ["awq", "gptq", "w4a16, zeros", "modelopt"])
def test_ranks_have_parts_of_it(checkpoint, tmp_path, form):
    folder, _ = store(checkpoint("llama")[0], tmp_path, form, ("proj.weight",))
    config = read_json(folder / "config.json")
    spec, tokens = read_spec(config), torch.arange(1, 30)

    def run(group=None):
        quantization = config["quantization_config"]
        weights = SafetensorsWeights(folder, torch.float32, CPU, progress=False, quantization=quantization)
        with torch.inference_mode():
            return Decoder(spec, weights, group=group).forward(tokens, tokens - 1, mix)

    expected = run()
    for found in on_ranks(2, run):
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def products_of(model: Decoder) -> list[Product]:
    return [x for layer in model._layers for x in dense(layer)]


def dense(layer: DecoderLayer) -> list[Product]:
    return [*layer.mixer.products, layer.output.product, layer.mlp.gate_up, layer.mlp.down.product]


REORDERED = "gptq, by activations", "w4a16, ordered"
"""Whose columns are not in the order of their groups."""
KEPT = "awq", "gptq", "gptq v2", "w4a16", "w4a16, zeros"


def decoders(folder, group=None):
    """The model of a checkpoint with its weights in INT4 where that is possible, and dequantized."""
    config = read_json(folder / "config.json")
    kinds = {"progress": False, "quantization": config["quantization_config"]}
    for packed in (True, False):
        weights = SafetensorsWeights(folder, torch.bfloat16, CPU, packed=packed, **kinds)
        yield Decoder(read_spec(config), weights, group=group), weights


@pytest.mark.parametrize("size", [32, 64, 128, 256, None])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_what_is_packed_is_what_was_stored(size, has_zeros):
    rows, columns = 21, 2 * (size or 100)
    q, groups = torch.randint(16, (rows, columns)), 2 if size else 1
    scales = (torch.rand(rows, groups) + 0.1).bfloat16()
    zeros = torch.randint(17, (rows, groups), dtype=torch.int32) if has_zeros else None
    expected = Integers(q, scales, zeros, 4).dequantized().bfloat16()
    weight = Int4.of(q, scales, zeros, torch.bfloat16)
    assert torch.equal(weight.dequantized(), expected) and weight.shape == expected.shape
    assert weight.numel() == rows * columns and weight.nbytes == weight.values.nbytes + weight.facts.nbytes
    order = torch.randperm(rows)
    assert torch.equal(weight.take(order).dequantized(), expected[order])
    for part in (Part(0, 3, 10), Part(1, columns // 2, columns), Part(1, columns // 2, columns - 3)):
        of_part = Int4.of(q, scales, zeros, torch.bfloat16, part)
        assert torch.equal(of_part.dequantized(), expected.narrow(part.dim, part.start, part.count))


def test_what_kernels_cannot_have_is_not_packed():
    q, scales = torch.randint(16, (4, 96)), torch.ones(4, 3)
    assert Int4.of(q, scales, None, torch.bfloat16) is not None
    assert Int4.of(q, scales, None, torch.float32) is None
    assert Int4.of(q, torch.ones(4, 2), None, torch.bfloat16) is None, "groups of 48"
    assert Int4.of(q, 1e-8 * scales, None, torch.float16) is None, "scales that are not numbers of 16 bits"
    assert Int4.of(q, scales, None, torch.bfloat16, Part(1, 48, 96)) is None, "a part that begins within a group"
    assert Int4.of(q, torch.ones(4, 1), None, torch.bfloat16, Part(1, 48, 96)) is not None
    for others, zeros in ((torch.ones(3, 3), None), (scales, torch.ones(4, 1))):
        with pytest.raises(ValueError, match="do not fit together"):
            Int4.of(q, others, zeros, torch.bfloat16)


def test_weights_of_different_kinds_are_not_one():
    q, scales = torch.randint(16, (4, 128)), torch.ones(4, 4).bfloat16()
    first, other = Int4.of(q, scales, None, torch.bfloat16), Int4.of(q, scales[:, :1], None, torch.bfloat16)
    both = concatenate_int4([first, first])
    assert torch.equal(both.dequantized(), first.dequantized().repeat(2, 1)) and both.shape == (8, 128)
    assert concatenate_int4([first, other]) is None and concatenate_int4([first]) is first


@pytest.fixture
def wider(monkeypatch):
    """Groups that kernels can have."""
    monkeypatch.setattr("tests.worker.test_integers.GROUP", 32)


@pytest.mark.usefixtures("wider")
@pytest.mark.parametrize(
    ("form", "family"),
    [(form, "llama") for form in KEPT] + [("awq", "phi3"), ("w4a16", "phi3"), ("gptq", "qwen2"), ("w4a16", "cohere")],
)
def test_a_checkpoint_in_int4_may_stay_so(checkpoint, tmp_path, form, family):
    """The same weights, to the last bit; also of matrices that are stored together, and of heads in another order."""
    folder, _ = store(checkpoint(family)[0], tmp_path, form, ("proj.weight",))
    (kept, weights), (wide, others) = decoders(folder)
    assert weights.num_dequantized == 0 and others.num_dequantized > 0 and not weights.unused()
    assert kept.is_int4 and not wide.is_int4
    for ours, expected in zip(products_of(kept), products_of(wide), strict=True):
        assert isinstance(ours, Int4Linear) and torch.equal(ours.weight.dequantized(), expected.weight)
        assert (ours.bias is None) == (expected.bias is None)
    tokens = torch.arange(1, 30)
    with torch.inference_mode():
        found, expected = (model.forward(tokens, tokens - 1, mix) for model in (kept, wide))
    assert torch.allclose(found, expected, rtol=0.1, atol=0.1)


@pytest.mark.usefixtures("wider")
def test_multiplied_weights_are_dequantized(checkpoint, tmp_path):
    """Falcon-H1's factors are part of its weights."""
    folder, _ = store(checkpoint("falcon_h1")[0], tmp_path, "w4a16", ("proj.weight",))
    (kept, _), (wide, _) = decoders(folder)
    for ours, theirs in zip(kept._layers, wide._layers, strict=True):
        assert torch.equal(ours.mixer.recurrent.projection.weight, theirs.mixer.recurrent.projection.weight)
        assert torch.equal(ours.mixer.attention.qkv.weight, theirs.mixer.attention.qkv.weight)


@pytest.mark.usefixtures("wider")
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_linear_attention_in_int4_may_stay_so(checkpoint, tmp_path, family):
    """Also where the rows of q, k, v and z are stored head by head."""
    projections = tuple(f"in_proj_{name}.weight" for name in ("qkvz", "ba", "qkv", "z", "b", "a"))
    folder, _ = store(checkpoint(family)[0], tmp_path, "w4a16", projections)
    (kept, weights), (wide, _) = decoders(folder)
    assert weights.num_dequantized == 0 and not weights.unused()
    nets = [[layer.mixer for layer in model._layers if isinstance(layer.mixer, DeltaNet)] for model in (kept, wide)]
    assert nets[0]
    for ours, theirs in zip(*nets, strict=True):
        for name in ("qkvz", "ba"):
            assert torch.equal(getattr(ours, name).weight.dequantized(), getattr(theirs, name).weight)


@pytest.mark.usefixtures("wider")
@pytest.mark.parametrize(
    ("form", "family"), [("awq", "qwen3_moe"), ("gptq", "qwen3_moe"), ("w4a16", "deepseek_v3"), ("w4a16", "mixtral")]
)
def test_experts_in_int4_may_stay_so(checkpoint, tmp_path, form, family):
    ends = ("proj.weight", "proj_with_mqa.weight", "w1.weight", "w2.weight", "w3.weight")
    sizes = {} if family == "mixtral" else {"moe_intermediate_size": 64}
    folder, _ = store(checkpoint(family, **sizes)[0], tmp_path, form, ends)
    (kept, weights), (wide, _) = decoders(folder)
    assert not kept.has_unquantized_experts and not weights.unused()
    assert weights.num_dequantized == (len(kept._layers) if family == "deepseek_v3" else 0), "kv_b_proj"
    for ours, theirs in zip(kept._layers, wide._layers, strict=True):
        if isinstance(ours.mlp, Mixture):
            ours, theirs = ours.mlp.experts, theirs.mlp.experts
            for number in range(len(ours.down)):
                assert torch.equal(ours.gate_up.dequantized(number), theirs.gate_up[number])
                assert torch.equal(ours.down.dequantized(number), theirs.down[number])


@pytest.mark.usefixtures("wider")
@pytest.mark.parametrize("only", ["3.down_proj.weight", "0.down_proj.weight", "2.up_proj.weight"])
def test_experts_of_which_one_is_different_are_dequantized(checkpoint, tmp_path, only, monkeypatch):
    folder, _ = store(checkpoint("qwen3_moe", moe_intermediate_size=64)[0], tmp_path, "awq", ("proj.weight",))
    real = SafetensorsWeights.int4
    for found in (lambda weight: None, lambda weight: dataclasses.replace(weight, has_zeros=False)):

        def int4(self, name, *more, found=found):
            weight = real(self, name, *more)
            return found(weight) if weight and name.endswith(only) else weight

        monkeypatch.setattr(SafetensorsWeights, "int4", int4)
        (model, weights), (wide, _) = decoders(folder)
        assert model.has_unquantized_experts and weights.num_dequantized > 0
        assert torch.equal(model._layers[0].mlp.experts.down, wide._layers[0].mlp.experts.down)


@pytest.mark.usefixtures("wider")
@pytest.mark.parametrize("form", [form for form in FORMS if form not in KEPT])
def test_other_formats_are_dequantized(checkpoint, tmp_path, form):
    folder, _ = store(checkpoint("llama")[0], tmp_path, form, ("proj.weight",))
    (model, weights), _ = decoders(folder)
    assert weights.num_dequantized > 0 and not any(isinstance(x, Int4Linear) for x in products_of(model))


@pytest.mark.usefixtures("wider")
def test_parts_of_one_matrix_that_are_stored_differently_are_dequantized(checkpoint, tmp_path):
    """As is what only a part of is in INT4."""
    folder, _ = store(checkpoint("llama")[0], tmp_path, "awq", ("v_proj.weight", "gate_proj.weight", "up_proj.weight"))
    (model, weights), (wide, _) = decoders(folder)
    kinds = [isinstance(x, Int4Linear) for x in dense(model._layers[0])]
    assert kinds == [False, False, True, False] and weights.num_dequantized == len(model._layers)
    assert torch.equal(model._layers[0].mixer.qkv.weight, wide._layers[0].mixer.qkv.weight)


@pytest.mark.usefixtures("wider")
@pytest.mark.parametrize("form", ["awq", "gptq", "w4a16, zeros"])
def test_ranks_have_parts_in_int4(checkpoint, tmp_path, form):
    """Where a part begins within a group, it is dequantized."""
    folder, _ = store(checkpoint("llama", intermediate_size=160)[0], tmp_path, form, ("proj.weight",))
    tokens = torch.arange(1, 30)

    def run(group=None):
        model, weights = next(decoders(folder, group))
        kinds = [isinstance(x, Int4Linear) for x in dense(model._layers[0])]
        with torch.inference_mode():
            return model.forward(tokens, tokens - 1, mix), kinds

    expected, kinds = run()
    assert all(kinds)
    found = on_ranks(2, run)
    assert [kinds for _, kinds in found] == [[True] * 4, [True, True, True, False]]
    for logits_, _ in found:
        assert torch.allclose(logits_, expected, rtol=0.1, atol=0.1)


def test_int4_is_kept_where_kernels_for_it_work(checkpoint, tmp_path, monkeypatch):
    folder, _ = store(checkpoint("llama")[0], tmp_path, "awq", ("proj.weight",))
    on_cpu = options.look_up(resolve(WorkerConfig(model=str(folder), device="cpu")))
    on_gpu = dataclasses.replace(on_cpu, device=torch.device("cuda"), dtype=torch.bfloat16)
    works = [True, False]
    monkeypatch.setattr("radixrt.worker.cuda.linear.int4.there", lambda device, dtype: works[0])
    monkeypatch.setattr("radixrt.worker.cuda.moe.packed_experts.there", lambda device, dtype: works[1])
    assert options.keeps_packed("auto", on_gpu, kernels=True)
    assert options.keeps_packed("auto", dataclasses.replace(on_gpu, dtype=torch.float16), kernels=True)
    assert not options.keeps_packed("auto", dataclasses.replace(on_gpu, dtype=torch.float32), kernels=True)
    assert not any(options.keeps_packed(name, on_gpu, kernels=True) for name in ("none", "fp8"))
    assert not options.keeps_packed("auto", on_gpu, kernels=False)
    assert not options.keeps_packed("auto", on_cpu, kernels=True)
    for form, (_, quantization, _) in FORMS.items():
        other = dataclasses.replace(on_gpu, hf_config={"quantization_config": quantization})
        assert options.keeps_packed("auto", other, kernels=True) == (form in KEPT or form in REORDERED), form
    mixture = dataclasses.replace(on_gpu, spec=read_spec(read_json(checkpoint("qwen3_moe")[0] / "config.json")))
    assert not options.keeps_packed("auto", mixture, kernels=True)
    works[1] = True
    assert options.keeps_packed("auto", mixture, kernels=True)
    works[0] = False
    assert not options.keeps_packed("auto", on_gpu, kernels=True)


@pytest.mark.usefixtures("wider")
@pytest.mark.parametrize(("form", "words"), [("awq", ""), ("gptq, by activations", "14 of its matrices in GPTQ are")])
def test_what_is_dequantized_beside_int4_is_said(checkpoint, tmp_path, monkeypatch, caplog, form, words):
    folder, _ = store(checkpoint("llama")[0], tmp_path, form, ("proj.weight",))
    config = resolve(WorkerConfig(model=str(folder), device="cpu"))
    loaded = dataclasses.replace(options.look_up(config), dtype=torch.bfloat16)
    monkeypatch.setattr(runner, "keeps_packed", lambda *_: True)
    with caplog.at_level(logging.WARNING):
        runner.load_model(config, loaded)
    assert ("dequantized at load" in caplog.text) == bool(words) and words in caplog.text


def test_random_weights_are_in_int4_as_a_checkpoint_is(checkpoint):
    spec = read_spec(read_json(checkpoint("llama")[0] / "config.json"))
    for quantization in (FORMS["awq"][1] | {"group_size": 32}, groups_of("int", 4)):
        kinds = {"packed": True, "quantization": quantization}
        models = [Decoder(spec, RandomWeights(0, torch.bfloat16, CPU, **kinds)) for _ in range(2)]
        ours, again = (model._layers[1].mlp.down.product.weight for model in models)
        assert torch.equal(ours.values, again.values) and 0.01 < ours.dequantized().float().std() < 0.04
    model = Decoder(spec, RandomWeights(0, torch.bfloat16, CPU, packed=True, quantization=FORMS["nvfp4"][1]))
    assert not any(isinstance(x, Int4Linear) for x in products_of(model))


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        ("awq", {"scales": None}, "there is no scales"),
        ("awq", {"scales": torch.ones(5, 24)}, "96 columns are not 5 groups"),
        ("gptq", {"qzeros": None}, "there is no qzeros"),
        ("w4a16", {"weight_shape": torch.tensor([24, 50])}, r"weight_packed \[24, 12\] does not hold \[24, 50\]"),
        ("w4a16", {"weight_scale": None}, "there is no weight_scale"),
        ("nvfp4", {"weight_global_scale": None}, "there is no weight_global_scale"),
        ("w8a8", {"weight_scale": None}, "stored in integers, and the checkpoint has no .*weight_scale"),
    ],
)
def test_what_does_not_fit_together_is_named(tmp_path, form, change, words):
    write, quantization, _ = FORMS[form]
    tensors = write(torch.randn(24, 96))[0] | change
    stored = {f"model.up_proj.{name}": x.contiguous() for name, x in tensors.items() if x is not None}
    save_file(stored, tmp_path / "model.safetensors")
    weights = SafetensorsWeights(tmp_path, torch.float32, CPU, progress=False, quantization=quantization)
    assert "model.up_proj.weight" in weights and "model.down_proj.weight" not in weights
    with pytest.raises(ValueError, match=words):
        weights.load("model.up_proj.weight", (24, 96))


def test_a_shape_that_the_file_does_not_say_is_named(tmp_path):
    tensors = awq(torch.randn(24, 96))[0]
    save_file({f"up.{name}": x.contiguous() for name, x in tensors.items()}, tmp_path / "model.safetensors")
    weights = SafetensorsWeights(tmp_path, torch.float32, CPU, progress=False, quantization=FORMS["awq"][1])
    with pytest.raises(ValueError, match=r"up.weight has shape \[24, 96\], config.json says \[24, 95\]"):
        weights.load("up.weight", (24, 95))
