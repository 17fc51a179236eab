"""Every family against transformers: the same logits, the same tokens, however the work is cut."""

from __future__ import annotations

from array import array

import pytest
import torch

from radixrt.config import WorkerConfig, resolve
from radixrt.messages import Sampling
from radixrt.worker.load.runner import load_runner
from radixrt.worker.model import read_spec
from radixrt.worker.model.weights.checkpoint import read_json
from radixrt.worker.plan import Plan, Result, Runner, SampleInputs
from tests.worker.engine import GREEDY, Engine, prompts
from tests.worker.families import BY_TRANSFORMERS, FAMILIES, GEMMA_4_LARGE, GEMMA_4_MOE, YARN_QUERY_SCALING

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
BY_KIND = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
IN_PART = {kind: rope | {"partial_rotary_factor": 0.5} for kind, rope in BY_KIND.items()}
IN_PART["sliding_attention"]["partial_rotary_factor"] = 0.75
HALF = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0], "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0]}
LONGROPE = FACTORS | {"rope_type": "longrope", "partial_rotary_factor": 0.75}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
ALPHA = {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 50.0, "factor": 1.0}
MSCALE = {"mscale": 0.707, "mscale_all_dim": 0.707}
GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
ATTENTION_ALONE = {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2, "position_embedding_type": "rope"}
NO_FACTORS = {"mlp_multipliers": None, "ssm_multipliers": None, "ssm_in_multiplier": 1.0, "ssm_out_multiplier": 1.0}
NO_FACTORS |= {"attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0, "key_multiplier": 1.0}
NOT_SHARED = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "num_hidden_layers": 3}
NOT_SHARED["layer_types"] = None
MLPS = ["mlp", "mlp", "linear_attention", "full_attention", "mlp", "mlp", "mlp"]
WINDOWED = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
VARIANTS = [
    *((family, {}) for family in FAMILIES),
    *((family, {"tie_word_embeddings": True}) for family in FAMILIES),
    *((family, {}) for family in BY_TRANSFORMERS),
    ("llama", {"shard_bytes": 100_000}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": LINEAR}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 48}),
    ("llama", {"num_key_value_heads": 1, "hidden_act": "gelu"}),
    ("mistral", {"sliding_window": 16}),
    ("qwen2", WINDOWED),
    ("qwen2", {"rope_parameters": YARN}),
    ("qwen3", WINDOWED | {"attention_bias": True}),
    ("qwen3", {"rope_parameters": YARN}),
    ("qwen3_moe", {"norm_topk_prob": False, "mlp_only_layers": [0]}),
    ("mixtral", {"sliding_window": 16}),
    ("deepseek_v2", GROUPS | {"q_lora_rank": 24, "rope_parameters": YARN | MSCALE, "routed_scaling_factor": 4.0}),
    ("deepseek_v2", {"attention_bias": True, "mlp_bias": True, "n_shared_experts": 1, "first_k_dense_replace": 0}),
    ("deepseek_v3", {"rope_parameters": YARN | MSCALE, "attention_bias": True, "norm_topk_prob": False}),
    (
        "deepseek_v3",
        {"rope_parameters": YARN | MSCALE | {"mscale": 1.0}, "q_lora_rank": None, "n_group": 1}
        | {"topk_group": 1, "rope_interleave": False},
    ),
    ("glm4_moe", {"use_qk_norm": False, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0}),
    ("glm4_moe", {"rope_parameters": YARN | {"partial_rotary_factor": 0.25}, "n_shared_experts": 2}),
    ("minimax_m2", {"num_key_value_heads": 1, "rotary_dim": 16}),
    ("phi3", {"sliding_window": 16, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}}),
    ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}),
    ("gemma", {"attention_bias": True, "num_key_value_heads": 1}),
    ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True}),
    ("gemma4_text", GEMMA_4_LARGE),
    ("gemma4_text", GEMMA_4_MOE | {"attention_bias": True}),
    ("gemma4_text", NOT_SHARED),
    ("gemma3_text", {"rope_parameters": {"full_attention": LINEAR}, "attention_bias": True}),
    ("mimo_v2_flash", {"layer_types": None, "mlp_layer_types": ["sparse"] * 3, "n_group": 4, "topk_group": 2}),
    (
        "mimo_v2_flash",
        {"attention_bias": True, "num_key_value_heads": 1, "rope_parameters": IN_PART, "attention_value_scale": None},
    ),
    ("llama4_text", {"use_qk_norm": False, "num_experts_per_tok": 2, "moe_layers": [0, 1, 2], "attention_bias": True}),
    ("llama4_text", {"attn_temperature_tuning": False, "attention_chunk_size": None, "rope_parameters": LLAMA3}),
    ("llama4_text", {"no_rope_layers": None, "num_hidden_layers": 4, "layer_types": None, "moe_layers": []}),
    ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
    ("smollm3", {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 16, "attention_bias": True}),
    ("olmo2", {"num_key_value_heads": 1, "attention_bias": True}),
    ("olmo3", {"rope_parameters": {"full_attention": YARN}}),
    ("granite", {"attention_bias": True, "mlp_bias": True}),
    ("cohere", {"use_qk_norm": True}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False, "rope_parameters": HALF}),
    ("nemotron", {"attention_bias": True, "mlp_bias": True, "rope_parameters": HALF | {"partial_rotary_factor": 1.0}}),
    ("olmo", {"attention_bias": True, "clip_qkv": 0.5, "num_key_value_heads": 1}),
    ("persimmon", {"qk_layernorm": False}),
    ("phi", {"qk_layernorm": True, "hidden_act": "gelu", "rope_parameters": HALF}),
    ("phimoe", {"lm_head_bias": False, "attention_bias": False, "sliding_window": 16, "num_key_value_heads": 1}),
    ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    ("stablelm", {"use_qkv_bias": True, "rope_parameters": HALF, "hidden_act": "gelu"}),
    ("starcoder2", {"use_bias": False, "sliding_window": 16}),
    ("gpt_oss", {"num_key_value_heads": 1, "layer_types": ["full_attention", "sliding_attention"]}),
    ("gpt_oss", {"rope_parameters": YARN | {"truncate": False}, "attention_bias": False}),
    ("ministral3", {"rope_parameters": YARN_QUERY_SCALING | {"llama_4_scaling_beta": 0.0}, "sliding_window": 16}),
    (
        "mistral4",
        {"rope_parameters": YARN_QUERY_SCALING | {"mscale": 0.7}, "rope_interleave": False, "norm_topk_prob": False}
        | {"q_lora_rank": None, "first_k_dense_replace": 1, "attention_bias": True, "routed_scaling_factor": 2.0},
    ),
    ("glm", {"attention_bias": False, "num_key_value_heads": 1}),
    ("glm4", {"rope_parameters": YARN | {"partial_rotary_factor": 1.0}}),
    (
        "glm4_moe_lite",
        {"rope_parameters": YARN | MSCALE, "mlp_layer_types": ["sparse", "sparse"], "n_group": 4, "topk_group": 2},
    ),
    (
        "deepseek_v32",
        {"rope_parameters": YARN | MSCALE, "mlp_layer_types": ["sparse", "dense"], "attention_bias": True}
        | {"norm_topk_prob": False, "index_topk": 1, "index_head_dim": 8},
    ),
    ("deepseek_v32", {"index_topk": 150, "index_n_heads": 1}),
    ("glm_moe_dsa", {"indexer_types": ["full", "shared", "shared", "full"], "n_group": 4, "topk_group": 2}),
    ("glm_moe_dsa", {"index_topk_freq": 4, "index_skip_topk_offset": 1, "num_hidden_layers": 6}),
    ("glm_moe_dsa", {"index_topk_pattern": "FFSS", "rope_parameters": YARN | MSCALE, "index_topk": 40}),
    ("dots1", {"sliding_window": 16, "max_window_layers": 1, "attention_bias": True, "norm_topk_prob": False}),
    ("solar_open", {"attention_bias": True, "rope_parameters": YARN, "n_group": 4, "topk_group": 2}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2, "rope_parameters": LLAMA3}),
    ("iquestcoder", {"attention_bias": True, "mlp_bias": True}),
    ("qwen2_moe", {"norm_topk_prob": True, "mlp_only_layers": [1], "decoder_sparse_step": 1, "qkv_bias": False}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 16}),
    ("olmoe", {"num_key_value_heads": 1, "attention_bias": True, "norm_topk_prob": True}),
    ("flex_olmo", {"norm_topk_prob": True, "attention_bias": True}),
    ("ernie4_5", {"use_bias": True, "rope_parameters": YARN}),
    ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_interval": 2, "moe_norm_min": 0.4}),
    ("ernie4_5_moe", {"moe_layer_start_index": 0, "moe_layer_end_index": 0, "moe_num_shared_experts": 0}),
    ("hunyuan_v1_dense", {"rope_parameters": ALPHA, "attention_bias": True}),
    ("hunyuan_v1_moe", {"rope_parameters": ALPHA, "num_key_value_heads": 1}),
    ("arcee", {"attention_bias": True, "mlp_bias": True, "rope_parameters": YARN}),
    ("ministral", {"layer_types": ["full_attention"] * 2, "rope_parameters": LLAMA3}),
    ("granitemoe", {"attention_bias": True, "residual_multiplier": 1.0}),
    ("cohere", {"attention_bias": True, "num_key_value_heads": 1, "layer_norm_eps": 1e-3}),
    ("cohere2", {"attention_bias": True, "rope_parameters": LLAMA3, "layer_types": ["full_attention"] * 2}),
    ("cohere2_moe", {"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "rms_norm_eps": 1e-5}),
    (
        "cohere2_moe",
        {"expert_selection_fn": "sigmoid", "num_shared_experts": 2, "attention_bias": True}
        | {"mlp_layer_types": ["sparse", "dense"], "prefix_dense_intermediate_size": 56},
    ),
    ("cohere2_moe", {"num_shared_experts": 1, "shared_expert_combination_strategy": "sum", "layer_types": None}),
    ("cwm", {"layer_types": None, "mlp_bias": True, "rope_parameters": LLAMA3}),
    ("afmoe", {"layer_types": None, "sliding_window": 16, "attention_bias": True, "mup_enabled": False}),
    ("afmoe", {"num_dense_layers": 0, "num_shared_experts": 1, "rope_parameters": YARN}),
    ("laguna", {"rope_parameters": IN_PART, "mlp_layer_types": ["sparse", "dense"], "attention_bias": True}),
    ("laguna", {"gating": "per-element", "num_attention_heads_per_layer": [4, 8], "moe_routed_scaling_factor": 2.5}),
    ("laguna", {"num_attention_heads_per_layer": None, "layer_types": None, "num_key_value_heads": 1}),
    ("apertus", {"attention_bias": True, "rope_parameters": YARN, "num_key_value_heads": 1}),
    ("hyperclovax", {"use_post_norm": False, "residual_multiplier": 0.5, "attention_bias": True, "mlp_bias": True}),
    ("youtu", {"rope_parameters": YARN | MSCALE, "attention_bias": True, "q_lora_rank": None}),
    (
        "exaone_moe",
        {"mlp_layer_types": ["sparse", "dense"], "n_group": 4, "topk_group": 2, "norm_topk_prob": False}
        | {"layer_types": None, "num_shared_experts": 2, "rope_parameters": YARN},
    ),
    ("hy_v3", {"attention_bias": True, "mlp_layer_types": ["sparse", "sparse"], "enable_moe_fp32_combine": False}),
    ("internlm3", {"attention_bias": True, "mlp_bias": True, "head_dim": None}),
    ("mellum", {"rope_parameters": BY_KIND, "mlp_layer_types": ["sparse", "dense"], "attention_bias": True}),
    ("sarvam_moe", {"attention_bias": True, "use_qk_norm": False, "rope_parameters": HALF, "n_group": 2}),
    ("sarvam_mla", {"rope_parameters": YARN | MSCALE, "q_lora_rank": 24, "n_group": 4, "topk_group": 2}),
    ("granitemoeshared", {"shared_intermediate_size": 0, "attention_bias": True}),
    ("granitemoehybrid", ATTENTION_ALONE | {"num_local_experts": 0, "attention_bias": True, "rope_parameters": YARN}),
    ("granitemoehybrid", ATTENTION_ALONE | {"position_embedding_type": None, "num_key_value_heads": 1}),
    ("granitemoehybrid", {"num_local_experts": 0, "mamba_proj_bias": True, "mamba_conv_bias": False}),
    ("granitemoehybrid", {"position_embedding_type": "rope", "mamba_n_groups": 1, "time_step_limit": (0.1, 0.9)}),
    ("bamba", {"attn_layer_indices": [0, 2], "mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True}),
    ("bamba", {"mamba_d_conv": 3, "mamba_n_groups": 4, "num_key_value_heads": 1}),
    ("olmo_hybrid", {"rope_parameters": {"rope_theta": None, "rope_type": "default"}, "num_key_value_heads": 4}),
    ("kimi_linear", {"num_expert_group": 4, "topk_group": 2, "q_lora_rank": 24, "moe_renormalize": False}),
    (
        "kimi_linear",
        {"mlp_layer_types": ["sparse", "dense", "sparse"], "num_shared_experts": 2, "linear_conv_kernel_dim": 3},
    ),
    ("lfm2", {"block_auto_adjust_ff_dim": False, "conv_bias": True, "conv_L_cache": 4}),
    ("lfm2", {"layer_types": None, "full_attn_idxs": [0, 2], "block_ffn_dim_multiplier": 1.3, "rope_parameters": YARN}),
    ("lfm2_moe", {"use_expert_bias": False, "routed_scaling_factor": 2.5, "norm_topk_prob": False, "conv_bias": True}),
    ("olmo_hybrid", {"linear_allow_neg_eigval": False, "num_hidden_layers": 4, "layer_types": None}),
    (
        "olmo_hybrid",
        {"rope_parameters": YARN, "linear_num_key_heads": 2, "linear_key_head_dim": 12, "linear_value_head_dim": 10},
    ),
    ("qwen3_next", {"rope_parameters": YARN | {"partial_rotary_factor": 1.0}, "norm_topk_prob": False}),
    ("qwen3_next", {"num_experts": 0, "linear_conv_kernel_dim": 2, "linear_num_value_heads": 2}),
    ("qwen3_5_text", {"layer_types": ["full_attention"] * 3, "num_key_value_heads": 1}),
    ("nemotron_h", {"layers_block_type": ["mamba", "full_attention"], "num_hidden_layers": 2, "use_bias": True}),
    ("nemotron_h", {"layers_block_type": MLPS, "num_hidden_layers": 7, "mlp_bias": True, "use_conv_bias": False}),
    ("nemotron_h", {"moe_latent_size": 24, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "n_groups": 4}),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "attention_bias": True, "mlp_bias": True}),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_d_ssm": None, "projectors_bias": True, "mamba_proj_bias": True}),
    ("falcon_h1", {"attention_bias": True, "projectors_bias": True, "head_dim": 32, "rope_parameters": YARN}),
    ("falcon_h1", NO_FACTORS),
    ("granite_swa", {"layer_types": None, "layer_rope_theta": None, "rope_parameters": YARN, "attention_bias": True}),
    ("granitemoe_swa", {"shared_intermediate_size": 0, "layer_rope_theta": [1e4, 1e6], "num_key_value_heads": 1}),
]
IDS = [f"{family}-{'-'.join(changes) or 'plain'}" for family, changes in VARIANTS]


def load(folder, **settings) -> Runner:
    return load_runner(
        resolve(WorkerConfig(**{"model": str(folder), "device": "cpu", "max_total_tokens": 4096} | settings))
    )


def computed(runner: Runner, plan: Plan) -> tuple[torch.Tensor, Result]:
    """The logits of a step and its result. A step is computed once: it changes recurrent states."""
    seen: list[torch.Tensor] = []
    compute = runner.logits

    def logits(plan: Plan) -> torch.Tensor:
        found = compute(plan)
        seen.append(found.clone())
        return found

    runner.logits = logits
    try:
        wait = runner.launch(plan)
        if plan.needs_host_tokens:  # known tokens are scored
            runner.sample_deferred(SampleInputs())
        return seen[0], wait()
    finally:
        del runner.logits


def all_logits(engine: Engine, prompt: list[int]) -> torch.Tensor:
    """float32[len(prompt), vocab], computed by however many steps the engine's budget takes."""
    engine.add(prompt, GREEDY, score_from=1)
    rows = []
    while (plan := engine.scheduler.plan()) is not None and plan.counts[0] > 0:
        logits, result = computed(engine.runner, plan)
        rows.append(logits)
        engine.scheduler.apply(plan, result)
        if sum(map(len, rows)) >= len(prompt):
            break
    return torch.cat(rows)[: len(prompt)]


def greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=IDS)
@pytest.mark.parametrize(("page_size", "chunk"), [(16, 33), pytest.param(1, 512, marks=pytest.mark.slow)])
def test_logits_are_those_of_transformers(checkpoint, family, changes, page_size, chunk):
    folder, model = checkpoint(family, **changes)
    prompt = prompts(1, 150, 150)[0]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    found = all_logits(Engine(load(folder, page_size=page_size), chunk=chunk), prompt)
    assert (found - expected).abs().max() < 1e-4


def wanted(answers: list[list[int]]) -> Sampling:
    """As many tokens as the answers have."""
    return Sampling(max_tokens=len(answers[0]), temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(checkpoint):
    """`expected(family)` -> (folder, 6 prompts, the 24 tokens that transformers gives after each); of families whose
    tests are slow 20 prompts and 64 tokens."""
    known = {}

    def answer(family):
        if family not in known:
            folder, model = checkpoint(family)
            many, count = (20, 64) if family in ALIKE else (6, 24)
            asked = prompts(many, 5, 80)
            known[family] = folder, asked, [greedy(model, prompt, count) for prompt in asked]
        return known[family]

    return answer


ALIKE = (
    "qwen2",
    "mixtral",
    "deepseek_v2",
    "seed_oss",
    "smollm3",
    "olmo2",
    "olmo3",
    "granite",
    "glm4_moe",
    "minimax_m2",
    "mistral4",
    "glm",
    "glm4",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "dots1",
    "solar_open",
    "exaone4",
    "iquestcoder",
    "qwen2_moe",
    "olmoe",
    "flex_olmo",
    "ernie4_5",
    "ernie4_5_moe",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "arcee",
    "ministral",
    "granitemoe",
    "cohere",
    "cohere2",
    "cwm",
    "youtu",
    "exaone_moe",
    "hy_v3",
    "internlm3",
    "mellum",
    "sarvam_moe",
    "sarvam_mla",
    "granitemoeshared",
    "granitemoehybrid",
    "granite_swa",
    "granitemoe_swa",
    "afmoe",
    "apertus",
    "hyperclovax",
    "laguna",
    "cohere2_moe",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmo_hybrid",
    "bamba",
    "falcon_h1",
    "lfm2_moe",
    "gemma",
    "gpt_neox",
    "nemotron",
    "olmo",
    "persimmon",
    "phi",
    "phimoe",
    "stablelm",
    "starcoder2",
    "gpt2",
    "helium",
    "opt",
    "vaultgemma",
)
"""Families whose logits are tested, and that decode as others do."""


@pytest.mark.parametrize(
    "family",
    [pytest.param(x, marks=pytest.mark.slow) if x in ALIKE else x for x in (*FAMILIES, *BY_TRANSFORMERS)],
)
class TestGreedyTokens:
    """Each prompt's, in any company."""

    def test_alone_cold_and_warm(self, expected, family):
        folder, asked, answers = expected(family)
        engine = Engine(load(folder, max_total_tokens=8192))
        for prompt, answer in zip(asked, answers, strict=True):
            assert engine.generate([prompt], wanted(answers)) == [answer]
        before = engine.cache.prefixes.tree.tokens
        assert engine.generate(asked, wanted(answers)) == answers, "warm"
        assert engine.cache.prefixes.tree.tokens == before, "nothing new was computed"

    @pytest.mark.parametrize(
        ("chunk", "page_size"), [(512, 1), pytest.param(512, 16, marks=pytest.mark.slow), (24, 1), (24, 16)]
    )
    def test_in_one_batch(self, expected, family, chunk, page_size):
        folder, asked, answers = expected(family)
        engine = Engine(load(folder, page_size=page_size), chunk=chunk)
        assert engine.generate(asked, wanted(answers)) == answers

    def test_after_preemption(self, expected, family):
        folder, asked, answers = expected(family)
        engine = Engine(load(folder, max_total_tokens=20 * len(asked)))
        assert engine.generate(asked, wanted(answers)) == answers
        assert engine.scheduler.preemptions > 0

    def test_after_a_fork(self, expected, family):
        """A prompt that branches in the middle of another's generated text."""
        folder, asked, answers = expected(family)
        engine = Engine(load(folder))
        engine.generate(asked[:3], wanted(answers))
        branches = [asked[i] + answers[i][:k] for i in range(3) for k in (1, 10, 20)]
        got = engine.generate(branches, wanted(answers))
        for branch, tokens in zip(branches, got, strict=True):
            i = next(i for i in range(3) if branch[: len(asked[i])] == asked[i])
            known = answers[i][len(branch) - len(asked[i]) :]
            assert tokens[: len(known)] == known


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3", pytest.param("fp8_e5m2", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "deepseek_v3",
        "deepseek_v32",
        "gpt_oss",
        "gemma3_text",
        *(
            pytest.param(family, marks=pytest.mark.slow)
            for family in ("qwen3", "glm4_moe", "minimax_m2", "gemma2", "gemma4_text", "llama4_text", "mimo_v2_flash")
        ),
    ],
)
def test_warm_is_cold_in_quantized_pages(expected, family, kv_dtype):
    folder, asked, answers = expected(family)
    sampling = wanted(answers)
    cold = [Engine(load(folder, kv_cache_dtype=kv_dtype)).generate([prompt], sampling)[0] for prompt in asked]
    engine = Engine(load(folder, kv_cache_dtype=kv_dtype, max_total_tokens=8192), chunk=48)
    assert engine.generate(asked, sampling) == cold, "in a batch, chunked"
    assert engine.generate(asked, sampling) == cold, "warm"
    assert cold != answers or kv_dtype == "bfloat16", "quantized pages are in use"


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("float32", "auto"), pytest.param("float32", "fp8_e5m2", marks=pytest.mark.slow), ("bfloat16", "auto")],
)
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        pytest.param("mistral", {"sliding_window": 16}, marks=pytest.mark.slow),
        pytest.param("qwen3", {}, marks=pytest.mark.slow),
        ("deepseek_v3", {}),
        ("deepseek_v32", {}),
        pytest.param("glm_moe_dsa", {}, marks=pytest.mark.slow),
        pytest.param("gemma2", {}, marks=pytest.mark.slow),
        pytest.param("gemma4_text", {}, marks=pytest.mark.slow),
        pytest.param("mimo_v2_flash", {}, marks=pytest.mark.slow),
        pytest.param("llama4_text", {}, marks=pytest.mark.slow),
        pytest.param("gemma4_text", GEMMA_4_MOE, marks=pytest.mark.slow),
        pytest.param("minimax_m2", {}, marks=pytest.mark.slow),
        pytest.param("afmoe", {}, marks=pytest.mark.slow),
        pytest.param("apertus", {}, marks=pytest.mark.slow),
        pytest.param("laguna", {}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_deterministic_to_the_last_bit(checkpoint, family, changes, dtype, kv_dtype, threads):
    """Logits of a long prompt in one chunk, in many, in company, and after a hit."""
    folder, _ = checkpoint(family, **changes)
    torch.set_num_threads(threads)
    settings = {"dtype": dtype, "kv_cache_dtype": kv_dtype, "deterministic": True, "max_total_tokens": 8192}
    prompt, *others = prompts(5, 150, 150)  # over the end of a block of keys
    whole = all_logits(Engine(load(folder, **settings)), prompt)
    for chunk in (1, 33, 100):
        engine = Engine(load(folder, **settings), chunk=chunk)
        assert torch.equal(all_logits(engine, prompt), whole)
    engine = Engine(load(folder, **settings))
    engine.generate([prompt[:137], prompt[:20] + [3], *others])
    id = engine.add(prompt, GREEDY)
    plan = engine.scheduler.plan()
    assert plan.starts[0] == 137 and torch.equal(engine.runner.logits(plan)[0], whole[-1])
    engine.scheduler.abort(id)
    torch.set_num_threads(1)


@pytest.mark.parametrize(("kv_dtype", "bound"), [("bfloat16", 0.01), ("fp8_e4m3", 0.1), ("fp8_e5m2", 0.2)])
def test_logit_error_of_quantized_pages(checkpoint, record_property, kv_dtype, bound):
    """Relative to the norm of the fp32 logits; the figure goes into the test report."""
    folder, _ = checkpoint("llama")
    prompt = prompts(1, 200, 200)[0]
    exact = all_logits(Engine(load(folder)), prompt)
    error = float((all_logits(Engine(load(folder, kv_cache_dtype=kv_dtype)), prompt) - exact).norm() / exact.norm())
    record_property("relative_logit_error", error)
    print(f"relative logit error of {kv_dtype} pages: {error:.4f}")
    assert 0 < error < bound


@pytest.mark.parametrize(("family", "sparse"), [("llama", False), ("qwen3_moe", True)])
def test_a_runner_says_whether_the_model_has_experts(checkpoint, family, sparse):
    assert load(checkpoint(family)[0]).sparse is sparse


def test_scores_are_log_probabilities(checkpoint):
    folder, model = checkpoint("llama")
    prompt = prompts(1, 60, 60)[0]
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), -1)
    expected = [float(logprobs[i - 1, prompt[i]]) for i in range(40, 60)]
    for chunk in (512, 7):
        engine = Engine(load(folder), chunk=chunk)
        for _ in range(2):  # cold, then warm
            id = engine.add(prompt, GREEDY.__class__(max_tokens=0), score_from=40, prompt_len=60)
            engine.finish()
            scores = [s for output in engine.outputs[id] for s in output.scores or []]
            assert scores == pytest.approx(expected, abs=1e-4)


def test_log_probabilities_of_a_prompt_come_with_the_likeliest(checkpoint):
    """Of all its tokens but the first, once, with the first token that is drawn; then those of what is said."""
    folder, model = checkpoint("llama")
    prompt = prompts(1, 60, 60)[0]
    asked = GREEDY.__class__(max_tokens=3, temperature=0.0, ignore_eos=True, logprobs=2)
    for chunk in (512, 7):
        engine = Engine(load(folder), chunk=chunk)
        for _ in range(2):
            id = engine.add(prompt, asked, score_from=1)
            engine.finish()
            first, *others = engine.outputs[id]
            said = [*prompt, *engine.tokens(id)]
            with torch.inference_mode():
                logprobs = torch.log_softmax(model(torch.tensor([said])).logits[0].float(), -1)
            found = first.prompt_logprobs + [one for output in engine.outputs[id] for one in output.logprobs or []]
            assert [one.token for one in found] == said[1:]
            assert first.scores is None and not any(o.prompt_logprobs or o.scores for o in others)
            for at, one in enumerate(found):
                values, ids = logprobs[at].topk(2)
                assert one.logprob == pytest.approx(float(logprobs[at, said[at + 1]]), abs=1e-4)
                assert [i for i, _ in one.top] == ids.tolist()
                assert [x for _, x in one.top] == pytest.approx(values.tolist(), abs=1e-4)
    alone = engine.add(prompt[:1], asked, score_from=1)  # nothing is known to follow
    engine.finish()
    assert len(engine.tokens(alone)) == 3 and not any(o.prompt_logprobs for o in engine.outputs[alone])


def test_requests_with_poisoned_logits_fail_alone(checkpoint):
    folder, _ = checkpoint("llama")
    runner = load(folder)
    with torch.inference_mode():
        runner._model._embedding.weight[7] = torch.nan
    good = [[t for t in prompt if t != 7] for prompt in prompts(3, 20, 30)]
    answers = Engine(load(folder)).generate(good)
    engine = Engine(runner)
    shared = [5, 6, 8, 9, 10]
    bad = engine.add([*shared, 7, 11], GREEDY)
    ids = [engine.add(prompt, GREEDY) for prompt in good]
    engine.finish()
    assert engine.last(bad).finish == "error" and "not finite" in engine.last(bad).error
    assert [engine.tokens(id) for id in ids] == answers
    assert engine.cache.prefixes.tree.match("", array("i", [*shared, 7, 11])).length <= len(shared)


OTHERS = "gate.weight", "router.weight", "router.proj.weight", "wg.weight", "bias", "A_log"


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "laguna"])
def test_elements_that_a_token_is_multiplied_with(checkpoint, family):
    """As the weights of transformers' layers have them, without norms, biases and the experts' router. (Those of Laguna
    are padded.)"""
    folder, model = checkpoint(family)
    spec = read_spec(read_json(folder / "config.json"))
    weights = {name: p for name, p in model.named_parameters() if ".layers." in name and p.dim() > 1}
    elements = 0
    for name, weight in weights.items():
        if "experts" in name and weight.dim() == 3:  # all experts in one
            elements += weight.numel() * spec.experts.top_k // spec.experts.count
        elif "per_layer" in name or not name.endswith(OTHERS):
            elements += weight.numel()
    assert spec.layer_elements == elements // spec.num_layers
