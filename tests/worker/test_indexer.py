"""DeepSeek Sparse Attention: which tokens are selected, what pages hold, what is read of a checkpoint. (That logits and
tokens are those of transformers is tested with the other families, in test_models.py.)"""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from radixrt.config import WorkerConfig, resolve
from radixrt.worker.execution.attention import BatchInvariantAttention, TorchAttention
from radixrt.worker.execution.kv_pool import IndexPool, KVPool
from radixrt.worker.load.kv_scales import _Observer
from radixrt.worker.load.options import look_up
from radixrt.worker.load.pools import pool_tokens
from radixrt.worker.model import read_spec
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.model.layers import sparse
from radixrt.worker.model.layers.fp8 import Fp8Linear
from radixrt.worker.model.weights.checkpoint import SafetensorsWeights, read_json
from radixrt.worker.model.weights.quantized import Products
from tests.worker.engine import GREEDY, Engine, prompts
from tests.worker.pages import make_plan
from tests.worker.test_models import all_logits, load
from tests.worker.test_scaled import BLOCK, of_blocks, store
from tests.worker.thread_group import on_ranks

CPU = torch.device("cpu")


def spec_of(folder):
    return read_spec(read_json(folder / "config.json"))


# ---------------------------------------------------------------- selection


def plainly(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, top_k: int) -> torch.Tensor:
    """`sparse.select`, token by token."""
    found = []
    for i, end in enumerate(range(len(keys) - len(q) + 1, len(keys) + 1)):
        scores = (weights[i] * torch.relu(keys[:end] @ q[i].t())).sum(1)
        order = scores.sort(descending=True, stable=True).indices
        found.append(order[:top_k].sort().values)
    return torch.stack(found)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("count", "length"), [(1, 16), (1, 700), (30, 45), (19, 513)])
def test_the_highest_scores_are_selected(exact, count, length, monkeypatch):
    monkeypatch.setitem(sparse.MAX_ELEMENTS, "cpu", 7 * 5 * length)  # 7 queries at once
    q, weights, keys = torch.randn(count, 5, 12), torch.randn(count, 5), torch.randn(length, 12)
    found = sparse.select(q, weights, keys, 16, exact)
    assert torch.equal(found, plainly(q, weights, keys, 16))


def test_of_equal_scores_the_first_are_selected():
    scores = torch.randint(0, 4, (50, 40)).float()
    for count in (1, 7, 40):
        expected = scores.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(1).values
        assert torch.equal(sparse.highest(scores, count), expected)


def test_exact_selection_does_not_depend_on_what_else_is_computed():
    q, weights, keys = torch.randn(40, 4, 32), torch.randn(40, 4), torch.randn(700, 32)
    whole = [sparse._exact_scores(q[i : i + 8], weights[i : i + 8], keys) for i in range(0, 40, 8)]
    for i in range(40):
        alone = sparse._exact_scores(q[i : i + 1], weights[i : i + 1], keys[: 660 + i + 1])
        assert torch.equal(alone[0], whole[i // 8][i % 8, : 660 + i + 1])


@pytest.mark.parametrize("exact", [False, True])
def test_what_is_not_finite_is_selected(exact):
    """So that what follows a broken token is seen to be broken."""
    q, weights, keys = torch.randn(3, 4, 8), torch.randn(3, 4), torch.randn(50, 8)
    keys[20] = torch.nan
    found = sparse.select(q, weights, keys, 16, exact)
    assert found.shape == (3, 16) and (found == 20).any(1).all()
    assert sparse.select(torch.full_like(q, torch.nan), weights, keys, 16, exact).shape == (3, 16)


def test_requests_with_broken_tokens_fail_alone(checkpoint):
    folder, _ = checkpoint("deepseek_v32")
    runner, good = load(folder), prompts(3, 30, 60)
    answers = Engine(load(folder)).generate(good)
    broken = next(token for token in range(3, 512) if not any(token in x for x in (*good, *answers)))
    with torch.inference_mode():
        runner._model._embedding.weight[broken] = torch.nan
    engine = Engine(runner, chunk=24)
    bad = engine.add([5, 6, broken, *good[1]], GREEDY)
    ids = [engine.add(prompt, GREEDY) for prompt in good]
    engine.finish()
    assert engine.last(bad).finish == "error" and "not finite" in engine.last(bad).error
    assert [engine.tokens(id) for id in ids] == answers


# ---------------------------------------------------------------- what is computed


def test_contexts_within_top_k_are_those_of_v3(checkpoint, tmp_path):
    """To the last bit; and one token more is not."""
    folder, _ = checkpoint("deepseek_v32", index_topk=60)
    shutil.copytree(folder, tmp_path / "v3")
    config = read_json(folder / "config.json") | {"model_type": "deepseek_v3"}
    (tmp_path / "v3/config.json").write_text(json.dumps(config))
    prompt = prompts(1, 100, 100)[0]
    found, dense = (all_logits(Engine(load(x), chunk=20), prompt) for x in (folder, tmp_path / "v3"))
    assert torch.equal(found[:60], dense[:60])
    assert all(not torch.allclose(a, b, atol=1e-3) for a, b in zip(found[60:], dense[60:], strict=True))


def test_layers_share_what_is_selected(checkpoint):
    """A layer without an indexer attends to the tokens of the layer before it, and pages hold no index keys of it."""
    folder, _ = checkpoint("glm_moe_dsa")
    runner = load(folder, max_total_tokens=100)
    model, spec = runner._model, runner._model.spec
    assert spec.index.layers == (0, 1, 3) and spec.index_elements == 3 * 12
    assert [layer.mixer.indexer and layer.mixer.indexer.number for layer in model._layers] == [0, 1, None, 2]
    assert runner.pool.nbytes == runner.num_pages * 4 * (4 * (32 + 8) + 3 * 12)


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"index_topk_freq": 1}, (0, 1, 2, 3, 4, 5)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, (0, 1, 2)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, (0, 2, 4)),
        ({"index_topk_pattern": "FSFSSF"}, (0, 2, 5)),
        ({"index_topk_pattern": ["full", "shared"] * 3}, (0, 2, 4)),
        ({"indexer_types": ["full"] + ["shared"] * 5, "index_topk_freq": 1}, (0,)),
    ],
)
def test_which_layers_have_an_indexer(fields, layers):
    assert read_spec(CONFIG | {"model_type": "glm_moe_dsa", "num_hidden_layers": 6} | fields).index.layers == layers


@pytest.mark.parametrize("kind", [TorchAttention, BatchInvariantAttention])
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_ranks_select_the_same_tokens(checkpoint, family, kind):
    """Each has some of the heads, and the whole indexer."""
    folder, _ = checkpoint(family)
    plan, table = make_plan(np.random.default_rng(0), 4, [(0, 1), (0, 30), (0, 16), (0, 70)])
    tokens, positions = torch.arange(1, 118), torch.cat([torch.arange(count) for count in plan.counts])

    def act(group=None) -> torch.Tensor:
        with torch.inference_mode():
            weights = SafetensorsWeights(folder, torch.float32, CPU, progress=False)
            model = Decoder(spec_of(folder), weights, kind is BatchInvariantAttention, group=group)
            index, slots = model.spec.index, 4 * (int(table.max()) + 1)
            keys = IndexPool(len(index.layers), slots, index.dim, torch.float32, CPU)
            pool = KVPool(model.spec.num_layers, slots, 1, model.spec.head_dim, torch.float32, CPU, 32, keys)
            attention = kind(pool, 4, model.spec.attention_windows, model.spec.scale, None, index.top_k)
            attention.bind(table)
            return model.forward(tokens, positions, attention.begin(plan, CPU))

    expected = act()
    for found in on_ranks(2, act):
        assert torch.allclose(found, expected, atol=1e-4)


# ---------------------------------------------------------------- pages


@pytest.mark.parametrize("kv_dtype", ["auto", "bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_index_keys_have_the_models_dtype(checkpoint, dtype, kv_dtype):
    folder, _ = checkpoint("deepseek_v32")
    settings = {"dtype": dtype, "kv_cache_dtype": kv_dtype}
    loaded = look_up(resolve(WorkerConfig(model=str(folder), device="cpu", **settings)))
    runner, own = load(folder, max_total_tokens=100, **settings), 4 if dtype == "float32" else 2
    each = {"auto": own, "bfloat16": 2, "fp8_e4m3": 1}[kv_dtype]
    assert loaded.token_bytes == 2 * (40 * each + 12 * own)
    assert runner.pool.nbytes == runner.num_pages * loaded.token_bytes


def test_what_a_token_of_deepseek_v3_2_takes():
    """By the defaults, which are its sizes: with K in FP8, 832 bytes in a layer."""
    spec = read_spec(CONFIG | {"num_hidden_layers": 61})
    assert (spec.kv_elements, spec.index_elements) == (61 * 576, 61 * 128)


def test_memory_is_divided_by_all_that_a_token_takes(checkpoint, monkeypatch):
    folder, _ = checkpoint("deepseek_v32")
    loaded = look_up(resolve(WorkerConfig(model=str(folder), device="cpu", kv_cache_dtype="fp8_e4m3")))
    monkeypatch.setattr("radixrt.worker.load.pools._free_bytes", lambda device: 4 * (2 * (40 + 12 * 4) * 1000))
    assert pool_tokens(loaded, 0.9) == 1000


# ---------------------------------------------------------------- a checkpoint


def test_weights_of_index_heads_stay_as_they_are_stored(checkpoint, tmp_path):
    """They are published in float32 by some, beside other weights in bfloat16."""
    folder, _ = checkpoint("deepseek_v32")
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.self_attn.indexer.weights_proj.weight"
    for kind in (torch.float32, torch.bfloat16):
        save_file(tensors | {name: tensors[name].to(kind)}, tmp_path / "model.safetensors")
        weights = SafetensorsWeights(tmp_path, torch.bfloat16, CPU, progress=False)
        indexer = Decoder(spec_of(folder), weights)._layers[0].mixer.indexer
        assert indexer.weights.weight.dtype == indexer.norm[0].dtype == indexer.norm[1].dtype == torch.float32
        assert torch.equal(indexer.weights.weight, tensors[name].to(kind).float())
        assert indexer.q.weight.dtype == indexer.k.weight.dtype == torch.bfloat16


def test_layers_that_predict_further_tokens_are_left_out(checkpoint, tmp_path, caplog):
    folder, _ = checkpoint("deepseek_v32")
    shutil.copytree(folder, tmp_path / "more")
    config = read_json(folder / "config.json") | {"num_nextn_predict_layers": 1}
    (tmp_path / "more/config.json").write_text(json.dumps(config))
    names = ("eh_proj.weight", "self_attn.indexer.wk.weight", "mlp.gate.weight")
    tensors = load_file(folder / "model.safetensors") | {f"model.layers.2.{x}": torch.ones(4) for x in names}
    save_file(tensors, tmp_path / "more" / "model.safetensors", {"format": "pt"})
    load(tmp_path / "more")
    assert "not used" not in caplog.text


@pytest.mark.parametrize("wide", ["", "wq_b", "wk"])
def test_blocks_of_fp8(tmp_path, wide):
    """As V3.2 is stored, the indexer's projections are kept in FP8, too; the weights of its heads are computed from
    hidden states that are not quantized. One of them may be stored in 16 bits."""
    from tests.checkpoints import make_model

    sizes = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "q_lora_rank": 128}
    sizes |= {"kv_lora_rank": 112, "qk_rope_head_dim": 16, "qk_nope_head_dim": 48, "v_head_dim": 32, "n_group": 1}
    sizes |= {"index_n_heads": 8, "index_head_dim": 32, "index_topk": 64, "topk_group": 1}
    make_model(tmp_path / "plain", "deepseek_v32", **sizes)
    names = {"a_proj", "b_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "wq_b", "wk"} - {wide}
    block = {"weight_block_size": [BLOCK, BLOCK]}
    stored = store(tmp_path / "plain", tmp_path / "fp8", of_blocks, names, **block)

    def decoder(products: Products) -> Decoder:
        weights = SafetensorsWeights(stored, torch.float32, CPU, progress=False, products=products)
        model = Decoder(spec_of(stored), weights)
        assert not weights.unused()
        return model

    tokens = torch.arange(1, 20)
    kept, dequantized = decoder(Products.STORED), decoder(Products.NONE)
    for layer in kept._layers:
        in_fp8 = [isinstance(x, Fp8Linear) for x in layer.mixer.products]
        assert in_fp8 == [True, True, wide != "wq_b", wide != "wk"]
        assert layer.mixer.fp8_scaling is None and layer.attention_norm.fp8_scaling is None
    found, expected = (m.forward(tokens, tokens - 1, _Observer(m)) for m in (kept, dequantized))
    assert 1e-4 < float((found - expected).norm() / expected.norm()) < 0.4  # another expert, now and then
    x, (cos, sin) = torch.randn(30, 256), kept._positions.rotations(torch.arange(30), torch.float32)[0]
    ours, theirs = (m._layers[1].mixer.project(x, cos, sin, m._ops).index for m in (kept, dequantized))
    for a, b in zip((ours.keys(), *ours.queries()), (theirs.keys(), *theirs.queries()), strict=True):
        assert float((a - b).norm() / b.norm()) < 0.1
    assert torch.equal(ours.queries()[1], theirs.queries()[1]), "weights of heads"


CONFIG = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
CONFIG |= {"model_type": "deepseek_v32", "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"q_lora_rank": None}, "q_lora_rank null is not served with an indexer"),
        ({"index_topk": 0}, "index_topk is 0, expected a number from 1"),
        ({"index_n_heads": "all"}, "index_n_heads is 'all', expected a number from 1"),
        ({"index_head_dim": 32}, "index_head_dim 32 is less than qk_rope_head_dim"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not served"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not served"),
        ({"model_type": "glm_moe_dsa", "index_topk_pattern": "FSS"}, "kinds of indexers are 3, num_hidden_layers is 2"),
        ({"model_type": "glm_moe_dsa", "index_topk_pattern": "SF"}, "indexers of the kinds SF are not served"),
        ({"model_type": "glm_moe_dsa", "indexer_types": ["full", "half"]}, "kinds .* are not served"),
    ],
)
def test_what_is_not_served_is_named(fields, words):
    with pytest.raises(ValueError, match=words):
        read_spec(CONFIG | fields)


def test_positions_of_index_keys_are_those_that_config_json_says():
    """DeepSeek's are not interleaved, GLM's are."""
    glm = CONFIG | {"model_type": "glm_moe_dsa"}
    for config, expected in ((CONFIG, False), (glm, True), (glm | {"indexer_rope_interleave": False}, False)):
        spec = read_spec(config)
        assert spec.index.interleaved is expected and spec.latent.interleaved
