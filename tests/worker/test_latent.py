"""Latent attention and the routers of DeepSeek: what pages hold, how experts are chosen, what is read of a checkpoint.
(That logits and tokens are those of transformers is tested with the other families, in test_models.py.)"""

from __future__ import annotations

import json
import logging
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from radixrt.worker.execution.kv_pool import DTYPES, KVPool
from radixrt.worker.execution.torch_runner import TorchRunner
from radixrt.worker.load.kv_scales import choose_scales
from radixrt.worker.model import read_spec
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.model.layers.fp8 import Fp8Linear
from radixrt.worker.model.layers.linear import HeadLinear, Linear
from radixrt.worker.model.layers.moe import Experts
from radixrt.worker.model.layers.rope import rotate
from radixrt.worker.model.spec.expert_spec import Routing
from radixrt.worker.model.weights.checkpoint import SafetensorsWeights, read_json
from radixrt.worker.model.weights.quantized import Products
from radixrt.worker.model.weights.random_weights import RandomWeights
from tests.worker.engine import GREEDY, Engine, prompts
from tests.worker.test_models import all_logits, load
from tests.worker.test_scaled import BLOCK, of_blocks, store

CPU = torch.device("cpu")
FAMILIES = ["deepseek_v2", "deepseek_v3"]


def spec_of(folder):
    return read_spec(read_json(folder / "config.json"))


# ---------------------------------------------------------------- pages


@pytest.mark.parametrize("name", DTYPES)
def test_v_is_a_part_of_k(name):
    pool = KVPool(2, 10, 1, 12, DTYPES[name], CPU, latent=8)
    k, slots = torch.randn(3, 1, 12), torch.tensor([7, 2, 5])
    pool.scales = [(1.0, 1.0), (0.5, 0.5)]
    pool.write(1, slots, k, k[..., :8])
    found_k, found_v = pool.read(1, slots, torch.float32)
    assert torch.equal(
        found_k, (k / 0.5).to(DTYPES[name]).float() * 0.5 if "fp8" in name else k.to(DTYPES[name]).float()
    )
    assert torch.equal(found_v, found_k[..., :8])
    assert pool.nbytes == 2 * 10 * 12 * DTYPES[name].itemsize
    keys, values = pool.pages(1, 5)
    assert keys.shape == (2, 5, 1, 12) and values.shape == (2, 5, 1, 8) and values.data_ptr() == keys.data_ptr()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_takes_its_latent_and_its_key_once(checkpoint, family):
    folder, _ = checkpoint(family)
    runner = load(folder, max_total_tokens=100)
    spec = runner._model.spec
    assert spec.kv_elements == spec.num_layers * (32 + 8)
    assert runner.pool.nbytes == runner.num_pages * spec.kv_elements * 4


def test_one_scale_of_both(checkpoint, caplog):
    folder, _ = checkpoint("deepseek_v3")
    weights = SafetensorsWeights(folder, torch.float32, CPU, progress=False)
    model = Decoder(spec_of(folder), weights)
    for layer in model._layers:
        layer.mixer.down.weight[-8:] *= 1000  # keys are the larger part
    with caplog.at_level(logging.INFO):
        scales = choose_scales("auto", weights, model, torch.float8_e4m3fn)
    assert all(k == v for k, v in scales) and "clip" not in caplog.text
    stated = {
        f"model.layers.{i}.self_attn.{x}_scale": torch.tensor(s) for i in (0, 1) for x, s in (("k", 0.5), ("v", 2.0))
    }
    own = SimpleNamespace(get=stated.get)
    assert choose_scales("auto", own, model, torch.float8_e4m3fn) == [(2.0, 2.0)] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_clipped_pages_would_be_seen(checkpoint, family):
    """FP8 pages are used as they are calibrated: logits come near, those of pages that clip do not."""
    folder, _ = checkpoint(family)
    prompt = prompts(1, 200, 200)[0]
    exact = all_logits(Engine(load(folder)), prompt)
    runner = load(folder, kv_cache_dtype="fp8_e4m3")
    error = float((all_logits(Engine(runner), prompt) - exact).norm() / exact.norm())
    assert 0 < error < 0.1
    runner.pool.scales = [(1e-3, 1e-3)] * 2
    assert float((all_logits(Engine(runner), prompt) - exact).norm() / exact.norm()) > 0.2


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("tokens", [1, 16, 37])
def test_a_product_of_each_head(tokens):
    weight, x = torch.randn(3, 20, 8), torch.randn(tokens, 3, 12)[..., :8]
    expected = torch.einsum("thk,hnk->thn", x, weight)
    for product in (HeadLinear(weight), HeadLinear(weight.transpose(1, 2).contiguous().transpose(1, 2), True)):
        out = torch.zeros(tokens, 3, 24)
        product.put(x, out[..., 2:22])
        assert torch.allclose(product(x), expected, atol=1e-5) and torch.allclose(out[..., 2:22], expected, atol=1e-5)
        assert not out[..., :2].any() and not out[..., 22:].any()


def test_a_batch_invariant_one_rounds_alike_wherever_a_row_lies():
    product, x = HeadLinear(torch.randn(3, 20, 64), True), torch.randn(40, 3, 64)
    whole = product(x)
    assert all(torch.equal(product(x[i : i + 3]), whole[i : i + 3]) for i in range(37))


def test_interleaved_positions_give_the_same_products():
    q, k, turn = torch.randn(5, 2, 8), torch.randn(5, 1, 8), torch.randn(5, 1, 4)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    for x in (q, k):
        found = rotate(x, turn.cos(), turn.sin(), interleaved=True)
        assert torch.equal(found, rotate(x[..., order], turn.cos(), turn.sin()))
    first = rotate(q, turn.cos(), turn.sin(), interleaved=True)[..., 0]
    assert torch.allclose(first, q[..., 0] * turn.cos()[..., 0] - q[..., 1] * turn.sin()[..., 0])


# ---------------------------------------------------------------- the router


ROUTERS = {
    "greedy": ("deepseek_v2", {"topk_method": "greedy", "routed_scaling_factor": 3.0}),
    "groups": ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    "one group": ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
    "v3": ("deepseek_v3", {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}),
    "v3, not normalized": ("deepseek_v3", {"n_group": 4, "topk_group": 3, "norm_topk_prob": False}),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_experts_are_chosen_as_by_transformers(name):
    family, changes = ROUTERS[name]
    sizes = {"hidden_size": 16, "n_routed_experts": 16, "num_experts_per_tok": 4, "num_attention_heads": 2}
    config = AutoConfig.for_model(family, **sizes, **changes, num_hidden_layers=5, max_position_embeddings=64)
    spec = read_spec(config.to_dict()).experts
    assert (spec.count, spec.top_k, spec.routing.sigmoid) == (16, 4, family == "deepseek_v3")
    theirs = (DeepseekV3TopkRouter if family == "deepseek_v3" else DeepseekV2TopkRouter)(config)
    torch.nn.init.normal_(theirs.weight)
    bias = None
    if family == "deepseek_v3":
        bias = theirs.e_score_correction_bias.normal_(0, 0.3)
    none = torch.empty(0)
    ours = Experts(Linear(theirs.weight.detach()), none, none, 4, spec.normalized, "silu", False, spec.routing, bias)
    x = torch.randn(200, 16)
    with torch.no_grad():
        _, weights, numbers = theirs(x)
    found_weights, found = ours.route(x)
    order, expected = found.argsort(-1), numbers.argsort(-1)
    assert torch.equal(found.gather(-1, order), numbers.gather(-1, expected))
    assert torch.allclose(found_weights.gather(-1, order), weights.gather(-1, expected), rtol=1e-5)


def test_logits_of_a_router_are_not_rounded():
    """In 16 bits the scores of experts are often equal."""
    router = Linear(torch.randn(16, 64).bfloat16())
    x, none = torch.randn(9, 64).bfloat16(), torch.empty(0)
    wide = Experts(router, none, none, 4, True, "silu", False, Routing(float32_logits=True))
    assert (
        torch.equal(wide.logits(x), x.float() @ router.weight.float().t()) and wide.route(x)[0].dtype == torch.float32
    )
    plain = Experts(router, none, none, 4, True, "silu", False)
    assert plain.logits(x).dtype == torch.bfloat16 and plain.route(x)[0].dtype == torch.bfloat16


def test_the_bias_stays_as_it_is_stored(checkpoint):
    folder, _ = checkpoint("deepseek_v3")
    stored = load_file(folder / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
    weights = SafetensorsWeights(folder, torch.bfloat16, CPU, progress=False)
    found = Decoder(spec_of(folder), weights)._layers[1].mlp.experts.bias
    assert found.dtype == torch.float32 and torch.equal(found, stored.float())


def test_a_router_stays_as_it_is_stored(checkpoint):
    """ERNIE's, whose files have it in float32 beside other weights in bfloat16."""
    folder, _ = checkpoint("ernie4_5_moe")
    stored = load_file(folder / "model.safetensors")["model.layers.1.mlp.gate.weight"]
    weights = SafetensorsWeights(folder, torch.bfloat16, CPU, progress=False)
    mlp, x = Decoder(spec_of(folder), weights)._layers[1].mlp, torch.randn(9, 64).bfloat16()
    assert mlp.experts.down.dtype == mlp.shared.down.weight.dtype == torch.bfloat16
    assert torch.equal(mlp.experts.logits(x), x.float() @ stored.t())


# ---------------------------------------------------------------- a config


V3 = {"model_type": "deepseek_v3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
V3 |= {"num_hidden_layers": 5, "num_attention_heads": 4, "max_position_embeddings": 64, "num_experts_per_tok": 2}
V2 = V3 | {"model_type": "deepseek_v2", "n_routed_experts": 8, "moe_intermediate_size": 16}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (V3 | {"n_routed_experts": 9}, "n_group 8 does not divide 9 experts"),
        (V3 | {"n_routed_experts": 16, "num_experts_per_tok": 9}, "topk_group 4: groups of 2 are too small"),
        (V3 | {"n_routed_experts": 8}, "topk_group 4: groups of 1 are too small"),
        (V3 | {"topk_group": 9}, "topk_group 9 of n_group 8"),
        (V3 | {"scoring_func": "softmax"}, "scoring_func 'softmax' is not served"),
        (V3 | {"topk_method": "greedy"}, "topk_method 'greedy' is not served"),
        (V2 | {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not served; greedy, group_limited_greedy are"),
        (V2 | {"topk_method": "group_limited_greedy"}, "config.json has no n_group"),
    ],
)
def test_what_is_not_served_is_named(config, words):
    with pytest.raises(ValueError, match=words):
        read_spec(config)


def test_which_layers_have_experts():
    assert read_spec(V3).experts.layers == {3, 4}
    assert read_spec(V2 | {"first_k_dense_replace": 1, "moe_layer_freq": 2}).experts.layers == {2, 4}
    assert read_spec(V2 | {"n_routed_experts": None}).experts is None
    assert read_spec(V2).experts.shared_size == 32, "as transformers has it"
    assert read_spec(V2 | {"n_shared_experts": None}).experts.shared_size == 0


def test_the_scale_of_the_softmax_is_the_models():
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert read_spec(V3).scale == pytest.approx(192**-0.5)
    # 0.1 ln 40 + 1, squared (DeepSeek's modeling_deepseek.py)
    assert read_spec(V3 | {"rope_scaling": yarn}).scale == pytest.approx(192**-0.5 * 1.3688879454**2)
    assert read_spec(V3 | {"rope_scaling": yarn | {"mscale_all_dim": 0}}).scale == pytest.approx(192**-0.5)


def test_weights_that_sum_to_1_are_scaled_in_v3_alone():
    scaled = {"routed_scaling_factor": 2.5}
    assert read_spec(V2 | scaled).experts.routing.factor == read_spec(V3 | scaled).experts.routing.factor == 2.5
    assert read_spec(V2 | scaled | {"norm_topk_prob": True}).experts.routing.factor == 1.0


def test_kimi_k2_is_v3_by_another_name(checkpoint, tmp_path):
    folder, _ = checkpoint("deepseek_v3")
    shutil.copytree(folder, tmp_path / "kimi")
    config = read_json(folder / "config.json") | {"model_type": "kimi_k2"}
    (tmp_path / "kimi" / "config.json").write_text(json.dumps(config))
    prompt = prompts(1, 40, 40)[0]
    assert torch.equal(all_logits(Engine(load(tmp_path / "kimi")), prompt), all_logits(Engine(load(folder)), prompt))


# ---------------------------------------------------------------- a checkpoint


def test_layers_that_guess_further_tokens_are_left_out(checkpoint, tmp_path, caplog):
    folder, _ = checkpoint("deepseek_v3")
    shutil.copytree(folder, tmp_path / "more")
    tensors = load_file(folder / "model.safetensors")
    more = {f"model.layers.{layer}.eh_proj.weight": torch.ones(4) for layer in (2, 3)}
    more |= {"mtp.norm.weight": torch.ones(4)}  # as others call them
    save_file(tensors | more, tmp_path / "more" / "model.safetensors", {"format": "pt"})
    load(tmp_path / "more")  # transformers writes num_nextn_predict_layers: 1
    assert "1 tensors are not used, is it the right model? model.layers.3.eh_proj.weight" in caplog.text


@pytest.mark.parametrize("q_rank", [128, None])
def test_blocks_of_fp8(tmp_path, q_rank):
    """As V3 is stored: the absorbed projections are dequantized, all else stays as it is, the experts too."""
    from tests.checkpoints import make_model

    sizes = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "q_lora_rank": q_rank}
    sizes |= {"kv_lora_rank": 112, "qk_rope_head_dim": 16, "qk_nope_head_dim": 48, "v_head_dim": 32, "n_group": 1}
    make_model(tmp_path / "plain", "deepseek_v3", topk_group=1, num_hidden_layers=2, **sizes)
    stored = store(tmp_path / "plain", tmp_path / "fp8", of_blocks, weight_block_size=[BLOCK, BLOCK])
    spec = spec_of(stored)

    def decoder(products: Products) -> Decoder:
        weights = SafetensorsWeights(stored, torch.float32, CPU, progress=False, products=products)
        model = Decoder(spec, weights)
        assert not weights.unused()
        return model

    tokens = torch.arange(1, 20)
    kept, wide = decoder(Products.STORED), decoder(Products.NONE)
    for layer in kept._layers:
        assert all(isinstance(x, Fp8Linear) for x in (*layer.mixer.products, layer.output.product))
    assert not kept.has_unquantized_experts and isinstance(kept._layers[1].mlp.shared.down, Fp8Linear)
    for model in (kept, wide):
        assert torch.equal(model._layers[0].mixer.ups.v.weight, wide._layers[0].mixer.ups.v.weight)
    found, expected = (m.forward(tokens, tokens - 1, attend_plainly(spec.scale)) for m in (kept, wide))
    assert 1e-4 < float((found - expected).norm() / expected.norm()) < 0.4  # another expert, now and then


def attend_plainly(scale: float):
    """An `Attend` of one prompt over itself."""

    def attend(layer, heads):
        q, k, v = heads.split()
        scores = torch.einsum("qhd,kd->hqk", q, k[:, 0]) * scale
        hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return heads.value_projection(torch.einsum("hqk,kd->qhd", weights, v[:, 0]))

    return attend


def test_random_weights_have_every_tensor():
    weights = RandomWeights(0, torch.float32, CPU)
    spec = read_spec(V2 | {"q_lora_rank": None, "kv_lora_rank": 16, "n_shared_experts": 1})
    pool = KVPool(5, 128, 1, 16 + 64, torch.float32, CPU, 16)
    runner = TorchRunner(Decoder(spec, weights), pool, 1)
    assert len(Engine(runner, max_model_len=64).generate([[1, 2, 3]], GREEDY)[0]) == 61
