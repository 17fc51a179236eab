"""gpt-oss: its experts in MXFP4, sinks of attention, what its config.json says."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from radixrt.config import WorkerConfig, resolve
from radixrt.worker.execution.attention import BatchInvariantAttention, TorchAttention, attend
from radixrt.worker.execution.kv_pool import KVPool
from radixrt.worker.load import options
from radixrt.worker.model import read_spec
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.model.layers.mxfp4 import LARGEST, PackedStack, dequantize, fits
from radixrt.worker.model.weights.checkpoint import SafetensorsWeights, read_json
from radixrt.worker.model.weights.random_weights import RandomWeights
from tests.checkpoints import make_model
from tests.worker.engine import Engine, prompts
from tests.worker.packed import pack_experts
from tests.worker.pages import make_plan
from tests.worker.test_models import all_logits, load
from tests.worker.test_sharding import mix
from tests.worker.thread_group import on_ranks

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 96}
"""A half of the inner features ends within a block of 32."""


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """(folder of a checkpoint with experts in MXFP4, as published ones have them; the same model of transformers)."""
    folder = tmp_path_factory.mktemp("mxfp4")
    model = make_model(folder, "gpt_oss", **SIZES)
    pack_experts(folder, model)
    return folder, model


def test_mxfp4_is_dequantized_exactly():
    """All bytes, all scales; 255 is no number."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(254, 1, 1)
    scales = torch.arange(254, dtype=torch.uint8)[:, None].repeat(1, 16)
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].t()
    assert torch.equal(dequantize(blocks, scales, torch.float32), expected)
    some = slice(2, None)  # what is above is as small as bfloat16 gets
    assert torch.equal(dequantize(blocks, scales, torch.bfloat16)[some].float(), expected[some])
    assert dequantize(blocks[:1, :1], torch.full((1, 1), 255, dtype=torch.uint8), torch.float32).isnan().all()


def test_logits_of_a_checkpoint_in_mxfp4(packed, caplog):
    folder, model = packed
    prompt = prompts(1, 150, 150)[0]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    with caplog.at_level(logging.WARNING):
        runner = load(folder)
    assert (all_logits(Engine(runner), prompt) - expected).abs().max() < 1e-4
    assert "experts that are stored in MXFP4 are dequantized" in caplog.text
    assert "not used" not in caplog.text


@pytest.mark.parametrize(("before", "columns"), [(0, 2880), (16, 720), (8, 360), (0, 96), (0, 128), (31, 1)])
def test_what_is_packed_is_what_was_stored(before, columns):
    """Also a part of it that begins within a block."""
    blocks = torch.randint(0, 256, (2, 5, -(-(before + columns) // 32), 16), dtype=torch.uint8)
    scales = torch.randint(2, LARGEST + 1, blocks.shape[:3], dtype=torch.uint8)
    stack = PackedStack.empty(2, 5, columns, before)
    for number in range(2):
        stack.put(number, blocks[number], scales[number])
    for number in range(2):
        whole = dequantize(blocks[number], scales[number], torch.float32)
        assert torch.equal(stack.dequantized(number, torch.float32), whole[:, before : before + columns])
    assert len(stack) == 2 and stack.numel() == 2 * 5 * columns
    assert stack.nbytes == 2 * 5 * 68 * -(-(before + columns) // 128)
    assert fits(scales) and not fits(torch.tensor([LARGEST + 1]))


def test_experts_stay_packed_where_they_are_to(packed, caplog):
    """The same model, to the last bit; a scale that is too large for kernels is dequantized."""
    spec = read_spec(read_json(packed[0] / "config.json"))
    tokens, positions = torch.arange(1, 40), torch.arange(39)
    logits, kinds = [], []
    for keep in (False, True):
        weights = SafetensorsWeights(packed[0], torch.float32, CPU, progress=False, packed=keep)
        model = Decoder(spec, weights)
        assert not weights.unused()
        kinds.append((model.has_unquantized_experts, model.is_fp8))
        with torch.inference_mode():
            logits.append(model.forward(tokens, positions, lambda layer, heads: mix(layer, heads)))
    assert torch.equal(*logits) and kinds == [(True, False), (False, False)]


def test_mxfp4_is_kept_where_kernels_for_it_work(packed, monkeypatch):
    config = resolve(WorkerConfig(model=str(packed[0]), device="cpu"))
    on_cpu = options.look_up(config)
    on_gpu = dataclasses.replace(on_cpu, device=torch.device("cuda"), dtype=torch.bfloat16)
    works = [True]
    monkeypatch.setattr("radixrt.worker.cuda.moe.packed_experts.there", lambda device: works[0])
    assert options.keeps_packed("auto", on_gpu, kernels=True) and options.keeps_packed("fp8", on_gpu, kernels=True)
    assert not options.keeps_packed("none", on_gpu, kernels=True)
    assert not options.keeps_packed("auto", on_gpu, kernels=False)
    assert not options.keeps_packed("auto", dataclasses.replace(on_gpu, dtype=torch.float16), kernels=True)
    assert not options.keeps_packed("auto", on_cpu, kernels=True)
    plain = dataclasses.replace(on_gpu, hf_config={"model_type": "gpt_oss"})
    assert not options.keeps_packed("auto", plain, kernels=True)
    works[0] = False
    assert not options.keeps_packed("auto", on_gpu, kernels=True)


def test_scales_that_kernels_cannot_have_are_dequantized(packed, tmp_path):
    folder = tmp_path / "large"
    shutil.copytree(packed[0], folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 3, 1] = LARGEST + 1
    save_file(tensors, folder / "model.safetensors")
    weights = SafetensorsWeights(folder, torch.float32, CPU, progress=False, packed=True)
    model = Decoder(read_spec(read_json(folder / "config.json")), weights)
    assert [layer.mlp.experts.is_packed for layer in model._layers] == [True, False]
    assert model.has_unquantized_experts


def test_random_weights_are_packed_as_a_checkpoint_is(packed):
    config = read_json(packed[0] / "config.json")
    spec = read_spec(config)
    models = [Decoder(spec, RandomWeights(0, torch.float32, CPU, packed=keep)) for keep in (True, False, True)]
    assert [model.has_unquantized_experts for model in models] == [False, True, False]
    kept, wide, again = (model._layers[1].mlp.experts.down for model in models)
    values = kept.dequantized(3, torch.float32)
    assert values.shape == wide[3].shape and 0.01 < values.std() < 0.04
    assert torch.equal(kept.values, again.values) and not torch.equal(kept.values[0], kept.values[1])


@pytest.mark.parametrize("stored", ["mxfp4", "packed", "plain"])
@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_together_are_the_model(packed, checkpoint, stored, size):
    """Also where a rank's features begin within a block; biases are added once, sinks go with their heads."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    folder = checkpoint("gpt_oss", **SIZES, **heads)[0] if stored == "plain" else packed[0]
    spec = read_spec(read_json(folder / "config.json"))
    tokens, positions = torch.arange(1, 40), torch.arange(39)

    def run(group=None):
        weights = SafetensorsWeights(folder, torch.float32, CPU, progress=False, packed=stored == "packed")
        model = Decoder(spec, weights, group=group)
        assert model.has_unquantized_experts == (stored != "packed")
        assert not weights.unused()
        with torch.inference_mode():
            return model.forward(tokens, positions, with_sinks(model)), torch.stack(model.sinks)

    def with_sinks(model):
        return lambda layer, heads: mix(layer, heads) + model.sinks[layer][:, None]

    expected, sinks = run()
    found = on_ranks(size, run)
    for logits, _ in found:
        assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.cat([own for _, own in found], 1), sinks) and sinks.abs().max() > 0.5


def test_what_config_json_says(shared_data):
    config = read_json(shared_data / "model_configs" / "openai--gpt-oss-20b.json")
    spec = read_spec(config)
    assert (
        spec.windows == (128, None) * 12
        and spec.attention.sinks
        and spec.attention.qkv_bias
        and spec.attention.output_bias
    )
    assert (spec.max_model_len, spec.head_dim, spec.activation) == (131_072, 64, "clamped_swiglu")
    assert (spec.experts.count, spec.experts.top_k, spec.experts.intermediate_size) == (32, 4, 2880)
    assert spec.rope["truncate"] is False and spec.rope["rope_theta"] == 150_000
    few = {name: config[name] for name in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")}
    few |= {"num_attention_heads": 64, "intermediate_size": 2880, "num_local_experts": 32}
    bare = read_spec(few)
    assert (bare.windows, bare.max_model_len, bare.norm_eps) == (spec.windows, spec.max_model_len, spec.norm_eps)
    assert {"truncate": False, "factor": 32.0, "rope_theta": 150_000.0}.items() <= bare.rope.items()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha"),
        ({"model_type": "llama", "quantization_config": {"quant_method": "mxfp4"}}, "'mxfp4' is not served"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "'aqlm' is not served"),
    ],
)
def test_what_is_not_served_is_named(checkpoint, changes, words):
    config = read_json(checkpoint("gpt_oss")[0] / "config.json")
    with pytest.raises(ValueError, match=words):
        read_spec(config | changes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, at: t.pop(f"{at}_scales"), "no tensor .*down_proj_scales"),
        (lambda t, at: t.update({f"{at}_scales": t[f"{at}_scales"][:, :-1]}), "down_proj_scales is uint8 .*63"),
        (lambda t, at: t.update({f"{at}_blocks": t[f"{at}_blocks"].to(torch.int16)}), "down_proj_blocks is int16"),
    ],
)
def test_a_broken_checkpoint_is_named(packed, tmp_path, change, words):
    folder: Path = tmp_path / "broken"
    shutil.copytree(packed[0], folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors, "model.layers.0.mlp.experts.down_proj")
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=words):
        load(folder)


# ---------------------------------------------------------------- sinks


def by_softmax(q, k, v, mask, sinks, scale) -> torch.Tensor:
    """The formula: softmax over scores and sink, of which the sink has no value."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * scale
    scores = torch.cat([scores.masked_fill(~mask, -torch.inf), sinks[:, None, None].expand(-1, len(q), 1)], -1)
    return (scores.softmax(-1)[..., :-1] @ v).transpose(0, 1)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("scale", [None, 0.1])
@pytest.mark.parametrize("kind", [TorchAttention, BatchInvariantAttention])
def test_attention_with_sinks(kind, scale, window):
    """Sinks that take all, some and nothing; chunks of more queries than are masked at once."""
    torch.manual_seed(0)
    plan, table = make_plan(np.random.default_rng(0), 4, [(0, 150), (130, 1), (5, 3)])
    pool = KVPool(1, (int(table.max()) + 1) * 4, 2, 16, torch.float32, CPU)
    pool.write(0, torch.arange(pool.slots), *torch.randn(2, pool.slots, 2, 16))
    q = torch.randn(len(plan.tokens), 8, 16)
    sinks = torch.tensor([-50.0, -3, 0, 1, 2, 4, 8, 500])
    attention = kind(pool, 4, (window,), scale, (sinks,))
    attention.bind(table)
    found = attention.begin(plan, CPU).over_pages(0, q)
    for row, (begin, start, count) in enumerate([(0, 0, 150), (150, 130, 1), (151, 5, 3)]):
        at, keys = torch.arange(start, start + count)[:, None], torch.arange(start + count)
        mask = (keys <= at) & (keys > at - (window or 1 << 20))
        k, v = pool.read(0, torch.from_numpy(attention.slots(row, start + count)), torch.float32)
        expected = by_softmax(q[begin : begin + count], k, v, mask, sinks, scale or 0.25)
        assert torch.allclose(found[begin : begin + count], expected, atol=1e-5)
    assert found[:, 7].abs().max() == 0, "nothing is left beside such a sink"


def test_attention_with_sinks_masks_what_it_is_told():
    q, (k, v), mask = torch.randn(70, 4, 8), torch.randn(2, 9, 2, 8), torch.rand(70, 9) < 0.5
    sinks = torch.randn(4)
    found = attend(q, k, v, mask, 0.2, sinks)
    assert torch.allclose(found, by_softmax(q, k, v, mask, sinks, 0.2), atol=1e-6)
