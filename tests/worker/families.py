"""Makes small checkpoints of all families: those of `tests.checkpoints`, others, and vision models."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from tests import checkpoints

LATENT: dict[str, Any] = {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16}
LATENT |= {"qk_rope_head_dim": 8, "v_head_dim": 12}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 2}
INDEXED = LATENT | EXPERTS | {"index_topk": 16, "index_n_heads": 16, "index_head_dim": 12, "first_k_dense_replace": 1}
"""With so many index heads that hardly a score is 0, as all negative ones are: equal scores have no order."""
YARN_QUERY_SCALING = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 32}
YARN_QUERY_SCALING |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.4}
"""Without `mscale_all_dim`, since transformers then has another softmax scale for Mistral 4 (see `mistral4`)."""
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}

GEMMA_2 = {"head_dim": 16, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
GEMMA_4: dict[str, Any] = {"num_hidden_layers": 4, "sliding_window": 16, "head_dim": 16, "global_head_dim": 32}
GEMMA_4 |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
GEMMA_4 |= {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 512, "use_double_wide_mlp": True}
GEMMA_4 |= {"final_logit_softcapping": 5.0}
GEMMA_4_LARGE = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "num_global_key_value_heads": 1}
GEMMA_4_LARGE |= {"attention_k_eq_v": True}
GEMMA_4_MOE = GEMMA_4_LARGE | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 3}
GEMMA_4_MOE |= {"moe_intermediate_size": 40}
MIMO: dict[str, Any] = WINDOWS | {"num_hidden_layers": 3, "head_dim": 24, "v_head_dim": 16, "num_key_value_heads": 2}
MIMO |= {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "n_routed_experts": 8}
MIMO |= {"num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_attention_heads": 8}
LLAMA_4: dict[str, Any] = {"num_hidden_layers": 3, "head_dim": 16, "attention_chunk_size": 16, "floor_scale": 20}
LLAMA_4 |= {"no_rope_layers": [1, 0, 1], "interleave_moe_layer_step": 2, "intermediate_size_mlp": 96}
LLAMA_4 |= {"num_local_experts": 6, "intermediate_size": 40}

QWEN_MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
QWEN_MOE |= {"shared_expert_intermediate_size": 72, "decoder_sparse_step": 2}
ERNIE_MOE: dict[str, Any] = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 40}
HUNYUAN_MOE: dict[str, Any] = {"num_experts": 6, "moe_topk": 3, "head_dim": 16}
GRANITE_MOE: dict[str, Any] = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.22}
GRANITE_MOE |= {"logits_scaling": 1.5, "num_local_experts": 6, "num_experts_per_tok": 3}

EXAONE_MOE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_expand": 2}
MAMBA |= {"num_hidden_layers": 3}
ONE_GROUP = MAMBA | {"mamba_n_groups": 1}
"""As published models have. With more, releases of transformers differ: 5.17 normalizes all groups of Bamba and Granite
together, 5.24 each alone, as the models' authors do (mamba_ssm)."""
GRANITE_HYBRID: dict[str, Any] = ONE_GROUP | {"layer_types": ["mamba", "attention", "mamba"]}
GRANITE_HYBRID |= {"shared_intermediate_size": 72}
GRANITE_SWASH = GRANITE_MOE | {"layer_rope_theta": [10_000.0, 0]}

HYBRID: dict[str, Any] = {"head_dim": 16, "num_hidden_layers": 3, "full_attention_interval": 2}
HYBRID |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12}
HYBRID |= {"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}
HYBRID_MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
HYBRID_MOE |= {"shared_expert_intermediate_size": 72}

KIMI_LINEAR = LATENT | {"linear_num_heads": 3, "linear_head_dim": 16, "q_lora_rank": None, "num_hidden_layers": 3}
KIMI_LINEAR |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_experts": 8}
KIMI_LINEAR |= {"moe_intermediate_size": 40, "num_experts_per_token": 3}
LFM = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}
OLMO_HYBRID = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}

FALCON: dict[str, Any] = MAMBA | {"mamba_d_ssm": 96, "num_hidden_layers": 2, "mlp_multipliers": [0.8, 1.2]}
FALCON |= {"ssm_multipliers": [0.5, 1.5, 0.7, 1.3, 0.9], "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.75}
FALCON |= {"attention_in_multiplier": 0.9, "attention_out_multiplier": 1.1, "key_multiplier": 0.6}
FALCON |= {"embedding_multiplier": 2.0, "lm_head_multiplier": 0.4}
NEMOTRON: dict[str, Any] = {"layers_block_type": ["mamba", "mlp", "mamba", "attention", "moe", "mamba", "moe", "mlp"]}
NEMOTRON |= {"num_hidden_layers": 8, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 12}
NEMOTRON |= {"head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
NEMOTRON |= {"moe_shared_expert_intermediate_size": 72, "routed_scaling_factor": 2.5, "time_step_min": 1e-9}
"""transformers limits time steps of prompts by `time_step_min`, and those of answers not at all."""

SIZES: dict[str, dict[str, Any]] = {
    "afmoe": EXAONE_MOE | WINDOWS | {"head_dim": 32, "mup_enabled": True, "route_scale": 2.5},
    "apertus": {},
    "arcee": {"head_dim": 32},
    "bamba": ONE_GROUP | {"attn_layer_indices": [1]},
    "cohere": {"logit_scale": 0.25},
    "cohere2": WINDOWS | {"logit_scale": 0.25},
    "cohere2_moe": WINDOWS | {"num_experts": 6, "num_experts_per_tok": 3, "head_dim": 32, "logit_scale": 0.25},
    "cwm": WINDOWS | {"head_dim": 32},
    "deepseek_v32": INDEXED | {"n_group": 4, "topk_group": 2},
    "dots1": EXPERTS | {"head_dim": 32, "first_k_dense_replace": 1, "norm_topk_prob": True, "n_shared_experts": 1},
    "ernie4_5": {"head_dim": 32},
    "ernie4_5_moe": ERNIE_MOE,
    "exaone4": WINDOWS | {"head_dim": 32},
    "exaone_moe": EXAONE_MOE | WINDOWS | {"head_dim": 32},
    "falcon_h1": FALCON,
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 3},
    "gemma": {"head_dim": 32},
    "gemma2": WINDOWS | GEMMA_2,
    "gemma4_text": GEMMA_4,
    "glm": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "glm4_moe_lite": LATENT | EXPERTS,
    "glm_moe_dsa": INDEXED | {"num_hidden_layers": 4, "index_topk_freq": 2},
    "granite_swa": WINDOWS | GRANITE_SWASH,
    "granitemoe": GRANITE_MOE,
    "granitemoe_swa": WINDOWS | GRANITE_SWASH | {"shared_intermediate_size": 72},
    "granitemoehybrid": GRANITE_MOE | GRANITE_HYBRID,
    "granitemoeshared": GRANITE_MOE | {"shared_intermediate_size": 72},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": HUNYUAN_MOE,
    "hyperclovax": {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "logits_scaling": 0.5},
    "hy_v3": EXAONE_MOE | {"head_dim": 32},
    "internlm3": {"head_dim": 32},
    "iquestcoder": {"head_dim": 32},
    "kimi_linear": KIMI_LINEAR,
    "laguna": EXAONE_MOE
    | WINDOWS
    | {"head_dim": 16, "num_attention_heads_per_layer": [6, 2], "shared_expert_intermediate_size": 72},
    "lfm2": LFM,
    "lfm2_moe": LFM | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_dense_layers": 1},
    "llama4_text": LLAMA_4,
    "mellum": EXAONE_MOE | WINDOWS | {"head_dim": 32},
    "mimo_v2_flash": MIMO,
    "ministral": WINDOWS | {"head_dim": 32},
    "ministral3": {"head_dim": 32, "rope_parameters": YARN_QUERY_SCALING},
    "mistral4": LATENT | EXPERTS | {"rope_parameters": YARN_QUERY_SCALING},
    "olmo_hybrid": OLMO_HYBRID,
    "nemotron": {"hidden_act": "relu2"},
    "nemotron_h": NEMOTRON,
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "phimoe": {"num_local_experts": 6, "router_jitter_noise": 0.2, "attention_bias": True, "lm_head_bias": True},
    "qwen2_moe": QWEN_MOE,
    "qwen3_5_moe_text": HYBRID | HYBRID_MOE,
    "qwen3_5_text": HYBRID,
    "qwen3_next": HYBRID | HYBRID_MOE | {"num_hidden_layers": 4, "mlp_only_layers": [1]},
    "sarvam_mla": LATENT | EXPERTS | {"q_lora_rank": None},
    "sarvam_moe": EXPERTS | {"head_dim": 16},
    "solar_open": EXPERTS | {"head_dim": 16, "routed_scaling_factor": 2.5},
    "starcoder2": {},
    "youtu": LATENT,
}
FAMILIES = (*checkpoints.FAMILIES, *SIZES)

BY_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64},
    "gpt_neox": {},
    "gptj": {"rotary_dim": 8},
    "helium": {"head_dim": 16},
    "olmo": {},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "persimmon": {"hidden_act": "relu2"},
    "phi": {},
    "stablelm": {},
    "vaultgemma": WINDOWS | GEMMA_2,
}
"""Families that transformers computes."""


def make_model(folder: Path | str, family: str, **changes: Any):
    """As `checkpoints.make_model`, for any family that is not multimodal."""
    fields = copy.deepcopy((SIZES | BY_TRANSFORMERS).get(family, {}) | changes)  # transformers modifies nested ones
    return checkpoints.make_model(folder, family, **fields)


VISION = {"hidden_size": 16, "intermediate_size": 16, "image_size": 28, "patch_size": 14}
LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 2}
VISION_CONFIGS = {
    "gemma3": VISION | LAYERS,
    "gemma4": VISION | LAYERS | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
    "kimi_k25": VISION | LAYERS | {"pos_emb_height": 4, "pos_emb_width": 4},
    "llama4": VISION | LAYERS | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    "mistral3": VISION | LAYERS | {"model_type": "pixtral", "head_dim": 8},
    "qwen2_5_vl": VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "fullatt_block_indexes": [0]},
    "qwen2_vl": {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14},
    "qwen3_vl": VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "deepstack_visual_indexes": [0]},
}
VISION_CONFIGS["qwen3_vl_moe"] = VISION_CONFIGS["qwen3_vl"]
VISION_CONFIGS |= dict.fromkeys(
    ("qwen3_5", "qwen3_5_moe"), VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 32}
)
VISION_CONFIGS["exaone4_5"] = VISION_CONFIGS["qwen2_5_vl"] | {"num_key_value_heads": 2}
VISION_CONFIGS |= dict.fromkeys(
    ("glm4v", "glm46v", "glm4v_moe"), VISION | {"depth": 1, "num_heads": 2, "out_hidden_size": 32}
)


def make_multimodal(folder: Path, family: str, original: bool, text: dict[str, Any], **fields: Any):
    """Write a small random multimodal checkpoint into `folder` and return the transformers model, float32.

    `fields` are those of config.json, `text` those of its `text_config`; the oldest families have them side by side.
    transformers makes the model from that file. If `original`, this file and the published names of tensors are kept;
    otherwise the folder is as transformers saves it."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    sizes |= {"num_hidden_layers": 2, "num_key_value_heads": 2, "max_position_embeddings": 512}
    sizes |= {"initializer_range": 0.2, "pad_token_id": None} | text
    sizes = {name: value for name, value in sizes.items() if value != "REMOVED"}
    config = {"model_type": family, "vision_config": VISION_CONFIGS[family], "torch_dtype": "bfloat16"} | fields
    config |= sizes if family.startswith("qwen2") else {"text_config": sizes}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    made = AutoConfig.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_config(made, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        checkpoints.randomize(model)
    model.save_pretrained(folder, save_original_format=original)
    if original:
        (folder / "config.json").write_text(json.dumps(config))
    return model
