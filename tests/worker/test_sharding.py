"""Which part of a model a rank has, and that all of them together are the model."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from radixrt.worker.load.kv_scales import _states_of_one
from radixrt.worker.model import read_spec
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.model.layers.fp8 import FP8, LIMIT
from radixrt.worker.model.parallel.sharding import Part, Shard
from radixrt.worker.model.spec.delta_spec import DeltaSpec
from radixrt.worker.model.spec.mamba_spec import MambaSpec
from radixrt.worker.model.weights.checkpoint import SafetensorsWeights, read_json
from radixrt.worker.model.weights.quantized import Products, part_of_scale
from radixrt.worker.model.weights.random_weights import RandomWeights
from tests.worker.families import GEMMA_4_MOE
from tests.worker.test_scaled import KINDS, SIZES, store
from tests.worker.thread_group import on_ranks

CPU = torch.device("cpu")
MAMBA = MambaSpec(frozenset({0}), 6, 8, 1, 5, 4, conv_bias=True, bias=False, out_bias=False)
DELTA = DeltaSpec(frozenset({0}), key_heads=6, value_heads=6, key_dim=8, value_dim=8, kernel=4)


# ---------------------------------------------------------------- who has what


def spec_of(checkpoint, family: str = "llama", **changes):
    return read_spec(read_json(checkpoint(family, **changes)[0] / "config.json"))


@given(st.integers(1, 16), st.integers(1, 200_000))
def test_every_token_id_has_one_rank(size, vocab_size):
    ranges = [Shard(rank, size).token_ids(vocab_size) for rank in range(size)]
    assert ranges[0].start == 0 and ranges[-1].stop == vocab_size
    assert all(a.stop == b.start for a, b in zip(ranges, ranges[1:], strict=False))
    assert all(len(r) <= len(ranges[0]) for r in ranges)


@pytest.mark.parametrize(("heads", "size", "expected"), [(8, 2, [0, 4]), (2, 4, [0, 0, 1, 1]), (4, 4, [0, 1, 2, 3])])
def test_a_rank_has_the_kv_heads_that_its_queries_read(checkpoint, heads, size, expected):
    spec = dataclasses.replace(spec_of(checkpoint), num_heads=16, num_kv_heads=heads, head_dim=10)
    for rank, first in enumerate(expected):
        part, local = Shard(rank, size).kv_rows(spec.num_kv_heads, 10), Shard(rank, size).spec(spec)
        assert (part.start, part.count) == (10 * first, 10 * local.num_kv_heads)
        group = spec.num_heads // heads
        queries = range(rank * local.num_heads, (rank + 1) * local.num_heads)
        assert {q // group for q in queries} == set(range(first, first + local.num_kv_heads))


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({"num_heads": 6, "num_kv_heads": 3}, 4, "num_attention_heads, 6"),
        ({"num_heads": 12, "num_kv_heads": 6}, 4, "num_key_value_heads, 6"),
        ({"num_heads": 12, "num_kv_heads": 3}, 4, "no multiple of the model's num_key_value_heads, 3"),
        ({"intermediate_size": 126}, 4, "intermediate_size, 126"),
        ({"recurrent": DELTA}, 4, "linear_num_key_heads, 6"),
        ({"recurrent": dataclasses.replace(DELTA, key_heads=4)}, 4, "linear_num_value_heads, 6"),
        ({"recurrent": MAMBA}, 4, "mamba_n_heads .mamba_num_heads., 6"),
        ({"recurrent": dataclasses.replace(MAMBA, heads=12, groups=3)}, 4, "no multiple of .* mamba_n_groups .*, 3"),
        ({"recurrent": dataclasses.replace(MAMBA, heads=12, groups=6)}, 4, "mamba_n_groups .n_groups., 6"),
    ],
)
def test_what_does_not_divide_is_named(checkpoint, changes, size, words):
    with pytest.raises(ValueError, match=words):
        Shard(0, size).spec(dataclasses.replace(spec_of(checkpoint), **changes))


@pytest.mark.parametrize(
    ("groups", "norm", "expected"),
    [(8, "after_gate", (2, 1)), (4, "after_gate", (1, 1)), (2, "after_gate", (1, 2)), (1, "before_gate", (1, 4)),
     (1, "none", (1, 1))],
)  # fmt: skip
def test_groups_of_heads_are_divided_or_shared(checkpoint, groups, norm, expected):
    """A rank has B and C of the groups of its heads. States are divided as heads are."""
    mamba = dataclasses.replace(MAMBA, heads=24, groups=groups, norm=norm)
    spec = dataclasses.replace(spec_of(checkpoint), recurrent=mamba)
    for rank in range(4):
        own = Shard(rank, 4).spec(spec).recurrent
        assert (own.groups, own.group_ranks) == expected
        assert own.rule_shape == (6, 8, 5) and own.channels == 6 * 8 + 2 * own.groups * 5
        assert own.state_bytes(2) == 2 * 3 * own.channels + 4 * 6 * 8 * 5
        part = Shard(rank, 4).kv_rows(groups, 5)
        wanted = {head * groups // 24 for head in range(6 * rank, 6 * rank + 6)}
        assert wanted == set(range(part.start // 5, part.stop // 5))


# ---------------------------------------------------------------- parts of a checkpoint


PARTS = [Part(0, 128, 256), Part(1, 128, 256), Part(0, 128, 384), Part(1, 0, 128)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [*PARTS, Part(0, 96, 192), Part(1, 64, 192)])
def test_a_part_is_what_the_whole_has_there(checkpoint, tmp_path, kind, part):
    """Also where its ends lie within a block of one scale: then the whole is dequantized, and sliced."""
    scales, config = KINDS[kind]
    folder = store(checkpoint("qwen2", **SIZES)[0], tmp_path / "fp8", scales, **config)
    name, shape = "model.layers.0.mlp.gate_proj.weight", (384, 256)
    weights = SafetensorsWeights(folder, torch.float32, CPU, progress=False, products=Products.STORED)
    cut = (slice(None),) * part.dim + (slice(part.start, part.stop),)
    found = weights.load(name, shape, part)
    assert torch.equal(found, weights.load(name, shape)[cut]) and found.is_contiguous()
    assert found.untyped_storage().nbytes() == found.nbytes, "the whole is not kept"
    scaled = weights.scaled(name, shape, part)
    if kind == "blocks" and part not in PARTS:
        assert scaled is None
    else:
        assert torch.equal(scaled.dequantized(), weights.scaled(name, shape).dequantized()[cut])


def test_the_last_block_may_be_short():
    scale = torch.arange(6.0).view(3, 2)
    assert part_of_scale(scale, (320, 256), (128, 128), Part(0, 256, 320)).tolist() == [[4.0, 5.0]]
    assert part_of_scale(scale, (320, 256), (128, 128), Part(0, 192, 320)) is None
    assert part_of_scale(torch.ones(5, 2), (320, 256), (64, 128), Part(0, 64, 128)).shape == (1, 2)
    experts = torch.stack([scale, 10 * scale])
    shape, block = (2, 320, 256), (128, 128)
    assert torch.equal(part_of_scale(experts, shape, block, Part(2, 128, 256)), experts[..., 1:])
    assert part_of_scale(experts, shape, block, Part(1, 192, 320)) is None
    assert part_of_scale(torch.ones(2), shape, block, Part(1, 192, 320)).shape == (2,), "a scale each"


def test_parts_of_random_weights(checkpoint):
    weights = RandomWeights(3, torch.float32, CPU)
    whole = weights.load("a", (6, 8))
    assert torch.equal(weights.load("a", (6, 8), Part(0, 2, 4)), whole[2:4])
    assert torch.equal(weights.load("a", (6, 8), Part(1, 4, 8)), whole[:, 4:])


# ---------------------------------------------------------------- together


def mix(layer, heads):
    """Stands for attention: each query with the K and V that it reads."""
    q, k, v = heads.split()
    k, v = (q if x is None else x for x in (k, v))  # of another layer
    each = q.shape[1] // k.shape[1]
    q, k = (x[..., : v.shape[-1]] + x[..., -v.shape[-1] :] for x in (q, k))  # V of a latent is the narrower one
    return heads.value_projection(q + k.repeat_interleave(each, 1).cumsum(0) * v.repeat_interleave(each, 1))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 500}),
        ("mistral", {"num_key_value_heads": 4}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("mixtral", {"num_key_value_heads": 4}),
        ("qwen3_moe", {"mlp_only_layers": [0]}),
        ("deepseek_v2", {"attention_bias": True}),
        ("deepseek_v3", {}),
        ("deepseek_v32", {}),
        ("glm_moe_dsa", {}),
        ("glm4_moe", {}),
        ("minimax_m2", {}),
        ("phi3", {}),
        ("gemma", {"num_key_value_heads": 4}),
        ("gemma2", {"num_key_value_heads": 4}),
        ("gemma3_text", {}),
        ("mimo_v2_flash", {}),
        ("llama4_text", {}),
        ("gemma4_text", {}),
        ("gemma4_text", GEMMA_4_MOE),
        ("seed_oss", {"attention_out_bias": True}),
        ("smollm3", {}),
        ("olmo3", {"num_key_value_heads": 4}),
        ("granite", {"attention_bias": True}),
        ("ministral3", {}),
        ("mistral4", {"first_k_dense_replace": 1}),
        ("glm", {}),
        ("glm4", {}),
        ("glm4_moe_lite", {}),
        ("dots1", {}),
        ("solar_open", {}),
        ("exaone4", {}),
        ("qwen2_moe", {}),
        ("olmoe", {}),
        ("flex_olmo", {}),
        ("ernie4_5_moe", {}),
        ("hunyuan_v1_moe", {"attention_bias": True}),
        ("arcee", {"mlp_bias": True}),
        ("granitemoe", {}),
        ("cwm", {}),
        ("afmoe", {}),
        ("apertus", {}),
        ("laguna", {"num_attention_heads_per_layer": [4, 8], "attention_bias": True}),
        ("hyperclovax", {"mlp_bias": True}),
        ("youtu", {}),
        ("exaone_moe", {}),
        ("hy_v3", {}),
        ("mellum", {}),
        ("sarvam_moe", {}),
        ("sarvam_mla", {}),
        ("granitemoeshared", {}),
        ("granitemoehybrid", {"layer_types": ["full_attention"] * 3}),
        ("granite_swa", {}),
        ("granitemoe_swa", {}),
        ("granitemoehybrid", {"num_local_experts": 0, "layer_types": ["full_attention"] * 3}),
        ("qwen3_next", {"linear_num_key_heads": 4, "linear_num_value_heads": 8}),
        ("qwen3_5_text", {"linear_num_key_heads": 4}),
        ("qwen3_5_moe_text", {"linear_num_key_heads": 4}),
        ("kimi_linear", {"linear_num_heads": 4}),
        ("lfm2", {"conv_bias": True}),
        ("lfm2_moe", {}),
        ("nemotron_h", {}),
        ("nemotron_h", {"n_groups": 4}),
        ("granitemoehybrid", {"mamba_proj_bias": True}),
        ("granitemoehybrid", {"mamba_n_heads": 12, "mamba_expand": 3}),
        ("bamba", {}),
        ("falcon_h1", {"attention_bias": True, "projectors_bias": True, "mamba_proj_bias": True}),
        ("falcon_h1", {"mamba_rms_norm": True, "mamba_n_groups": 1}),
        ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_heads": 12}),
        ("cohere", {"use_qk_norm": True, "attention_bias": True}),
        ("cohere2", {}),
        ("cohere2_moe", {"num_shared_experts": 2}),
        ("olmo_hybrid", {"linear_num_key_heads": 4, "linear_num_value_heads": 4}),
        ("nemotron", {}),
        ("phimoe", {"vocab_size": 500}),
        ("starcoder2", {}),
    ],
)
def test_all_ranks_together_are_the_model(checkpoint, family, changes, size):
    folder, _ = checkpoint(family, **changes)
    spec = spec_of(checkpoint, family, **changes)
    tokens, wanted = torch.arange(1, 40), torch.tensor([3, 17, 38])
    positions = torch.arange(39)

    def load(group) -> Decoder:
        weights = SafetensorsWeights(folder, torch.float32, CPU, progress=False)
        model = Decoder(spec, weights, group=group)
        assert not weights.unused()
        return model

    whole = load(None)
    expected = whole.forward(tokens, positions, mix, wanted, _states_of_one(whole, 39))

    def act(group):
        with torch.inference_mode():
            model = load(group)
            out = torch.empty((3, model.own_width))
            states = _states_of_one(model, 39)
            model.finish(*model.attend_all(tokens, positions, mix, states), wanted, out, tokens)
            none = model.forward(tokens, positions, mix, torch.tensor([], dtype=torch.int64), states)
            assert none.shape == (0, spec.vocab_size)
            found = model.gather(out)
            ids = model.own_ids
            assert torch.equal(found[:, ids.start : ids.stop], out[:, : len(ids)])
        return found, group.turns, model.spec, model.own_width

    for found, turns, local, width in on_ranks(size, act):
        assert width == -(-spec.vocab_size // (64 * size)) * 64, "all ranks gather as much"
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
        assert turns == [0, 1] * (2 * spec.num_layers - 1), "a buffer is used again when others have read it"
        assert local.num_heads * size == spec.num_heads
        if spec.experts:
            assert local.experts.shared_size * size == spec.experts.shared_size


def in_blocks(name: str, whole: torch.Tensor, block: tuple[int, int]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Experts of one tensor in FP8, with scales, and what they stand for."""
    count, rows, columns = whole.shape
    scale = 0.001 + 0.01 * torch.rand(count, -(-rows // block[0]), -(-columns // block[1]))
    each = scale[:, torch.arange(rows) // block[0]][:, :, torch.arange(columns) // block[1]]
    stored = (whole / each).clamp(-LIMIT, LIMIT).to(FP8)
    return {name: stored, f"{name}_scale_inv": scale}, stored.float() * each


@pytest.mark.parametrize("block", [None, (20, 20), (24, 16)])
@pytest.mark.parametrize("turned", [False, True])
def test_experts_in_one_tensor_are_divided_too(checkpoint, tmp_path, turned, block):
    """Also where their matrices are [in, out], and in FP8, with blocks that ranks cut and others."""
    torch.manual_seed(0)
    folder, _ = checkpoint("qwen3_moe")
    for name in ("plain", "whole"):
        shutil.copytree(folder, tmp_path / name)
    tensors = load_file(folder / "model.safetensors")
    stored = {}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors.pop(f"{at}{expert}.{name}_proj.weight") for expert in range(6)])
            for name in ("gate", "up", "down")
        )
        for name, whole in (("gate_up_proj", torch.cat([gate, up], 1)), ("down_proj", down)):
            tensors[at + name] = whole.mT.contiguous() if turned else whole
            if block:
                fp8, tensors[at + name] = in_blocks(at + name, tensors[at + name], block)
                stored |= fp8
    save_file(tensors, tmp_path / "plain" / "model.safetensors")
    save_file(tensors | stored, tmp_path / "whole" / "model.safetensors")
    spec = spec_of(checkpoint, "qwen3_moe")
    spec = dataclasses.replace(spec, experts=dataclasses.replace(spec.experts, maybe_transposed=turned))

    def run(where, group=None):
        weights = SafetensorsWeights(where, torch.float32, CPU, False, block or (128, 128), Products.STORED)
        return Decoder(spec, weights, group=group).forward(torch.arange(1, 20), torch.arange(19), mix)

    expected = run(tmp_path / "plain" if block else folder)
    assert torch.equal(run(tmp_path / "whole"), expected)
    for found in on_ranks(2, lambda group: run(tmp_path / "whole", group)):
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)
