"""Checkpoints with config.json files as they are published, with all their variants, against transformers."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from radixrt.config import WorkerConfig, resolve
from radixrt.worker.load.options import choose_dtype, look_up
from radixrt.worker.model import FAMILIES, read_spec
from radixrt.worker.model.layers.rope import frequencies
from radixrt.worker.model.spec.spec import ModelSpec, QueryScaling
from tests.checkpoints import make_published, require
from tests.worker.engine import Engine, prompts
from tests.worker.families import VISION_CONFIGS, YARN_QUERY_SCALING, make_multimodal
from tests.worker.test_models import all_logits, load

LLAMA3 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
ORIGINAL = {"original_max_position_embeddings": 64}
YARN = {"type": "yarn", "factor": 4.0, **ORIGINAL}
LONG = {"num_key_value_heads": 2, "max_position_embeddings": 512, "rope_theta": 500_000.0}
WINDOW = {"sliding_window": 16, "max_window_layers": 1}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
DEEPSEEK: dict[str, Any] = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
DEEPSEEK |= {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK |= {
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 2.5,
}
DEEPSEEK |= {"num_key_value_heads": 4, "q_lora_rank": 24, "norm_topk_prob": False, "max_position_embeddings": 2560}
DEEPSEEK |= {"rope_scaling": YARN | {"factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32}}
LITE = {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1, "scoring_func": "softmax"}
GLM: dict[str, Any] = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1}
GLM |= {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "partial_rotary_factor": 0.5, "topk_group": 1}
GLM |= {"routed_scaling_factor": 2.5, "norm_topk_prob": True, "num_key_value_heads": 2, "rope_theta": 1e6}
HALF_ROTARY = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
MINIMAX: dict[str, Any] = {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2}
MINIMAX |= {"attn_type_list": [1, 1], "qk_norm_type": "per_layer", "use_qk_norm": True, "use_routing_bias": True}
MINIMAX |= {"scoring_func": "sigmoid", "shared_intermediate_size": 0, "num_key_value_heads": 2, "rope_theta": 5e6}
LONGROPE_FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.5], "long_factor": [1.0, 2.0, 4.0, 8.0]}
PHI: dict[str, Any] = ORIGINAL | {"rope_scaling": LONGROPE_FACTORS | {"type": "longrope"}, "num_key_value_heads": 2}
PHI |= {"pad_token_id": None}
LINEAR = {"rope_type": "linear", "factor": 8.0}
PARTIAL_ROTARY = {"rope_scaling": {name: x[:3] for name, x in LONGROPE_FACTORS.items()} | {"type": "longrope"}}
PARTIAL_ROTARY |= {"partial_rotary_factor": 0.75}
GEMMA: dict[str, Any] = {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 16}
GEMMA |= {"sliding_window_pattern": 3, "query_pre_attn_scalar": 24, "hidden_activation": "gelu_pytorch_tanh"}
GEMMA |= {"attn_logit_softcapping": None, "final_logit_softcapping": None, "cache_implementation": "hybrid"}
GEMMA_2: dict[str, Any] = GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
GEMMA_1 = {"head_dim": 16, "hidden_activation": None, "rope_theta": 1e4, "num_key_value_heads": 1}
GEMMA_4: dict[str, Any] = {"num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 16}
GEMMA_4 |= {"layer_types": ["sliding_attention", "full_attention"] * 2, "global_head_dim": 32, "pad_token_id": 0}
GEMMA_4 |= {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 256, "num_kv_shared_layers": 2}
GEMMA_4 |= {"num_global_key_value_heads": None, "attention_k_eq_v": False, "enable_moe_block": False}
GEMMA_4 |= {"use_double_wide_mlp": True, "final_logit_softcapping": 5.0, "use_bidirectional_attention": None}
GEMMA_4_31B = GEMMA_4 | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True}
GEMMA_4_31B |= {"num_key_value_heads": 4, "num_global_key_value_heads": 2, "use_bidirectional_attention": "vision"}
GEMMA_4_26B = GEMMA_4_31B | {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2}
GEMMA_4_26B |= {"moe_intermediate_size": 16}
SCOUT: dict[str, Any] = {"head_dim": 16, "num_key_value_heads": 2, "attention_chunk_size": 16, "use_qk_norm": True}
SCOUT |= {"attn_scale": 0.1, "attn_temperature_tuning": True, "floor_scale": 32, "no_rope_layers": []}
SCOUT["for_llm_compressor"] = False
SCOUT |= {"interleave_moe_layer_step": 1, "intermediate_size_mlp": 64, "num_experts_per_tok": 1, "num_hidden_layers": 4}
SCOUT |= {"num_local_experts": 4, "rope_theta": 5e5, "router_jitter_noise": 0.0, "pad_token_id": 0}
SCOUT |= {"rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "rope_type": "llama3"}}
SCOUT["rope_scaling"] |= {"original_max_position_embeddings": 64}
MIMO: dict[str, Any] = {"add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True}
MIMO |= {"head_dim": 24, "v_head_dim": 16, "num_key_value_heads": 2, "swa_num_key_value_heads": 4}
MIMO |= {"hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1], "num_hidden_layers": 7, "sliding_window_size": 16}
MIMO |= {"sliding_window": 16, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIMO |= {"routed_scaling_factor": None, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}
MIMO |= {"n_shared_experts": None, "layernorm_epsilon": 1e-5, "attention_value_scale": 0.707, "rope_theta": 5e6}
MIMO |= {"swa_rope_theta": 1e4, "partial_rotary_factor": 0.334, "n_group": 1, "topk_group": 1}
GEMMA_ROPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
GEMMA_ROPE |= {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}
YARN_RENAMED = {"rope_type": "yarn", "factor": 4.0, **ORIGINAL}
PLAIN: dict[str, Any] = {"num_key_value_heads": 2, "pad_token_id": None}
GRANITE = {"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "residual_multiplier": 0.22, "logits_scaling": 8}
GRANITE |= {"tie_word_embeddings": True, "rope_theta": 1e7}
YARN_SCALED_QUERIES = YARN_QUERY_SCALING | ORIGINAL | {"type": "yarn", "factor": 8.0, "llama_4_scaling_beta": 0.1}
DEVSTRAL: dict[str, Any] = {"head_dim": 16, "rope_parameters": YARN_SCALED_QUERIES | {"mscale_all_dim": 1.0}}
V32: dict[str, Any] = DEEPSEEK | {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "q_lora_rank": 24}
V32 |= {"index_head_dim": 12, "index_n_heads": 16, "index_topk": 12, "num_nextn_predict_layers": 1, "ep_size": 1}
GLM_5: dict[str, Any] = V32 | {"rope_scaling": "REMOVED", "rope_interleave": True, "indexer_rope_interleave": True}
GLM_5 |= {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "num_hidden_layers": 6, "head_dim": 8}
GLM_5 |= {"n_group": 1, "topk_group": 1}
FLASH: dict[str, Any] = DEEPSEEK | {"topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "norm_topk_prob": True}
FLASH |= {"rope_scaling": None, "partial_rotary_factor": 1.0, "rope_theta": 1e6, "pad_token_id": None}
DOTS: dict[str, Any] = {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "n_group": 1}
DOTS |= {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "norm_topk_prob": True, "topk_group": 1}
DOTS |= {"routed_scaling_factor": 2.5, "rope_theta": 1e7, "max_window_layers": 2}
SOLAR = GLM | {"first_k_dense_replace": 0, "partial_rotary_factor": 1.0, "routed_scaling_factor": 1.0}
SOLAR |= {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}, "head_dim": 16}
COHERE: dict[str, Any] = {"num_key_value_heads": 2, "layer_norm_eps": 1e-5, "logit_scale": 0.25, "rope_theta": 5e4}
COHERE |= {"hidden_act": "silu", "rope_scaling": None, "pad_token_id": 0, "rms_norm_eps": "REMOVED"}
NORTH: dict[str, Any] = COHERE | {"head_dim": 16, "rms_norm_eps": 1e-6, "sliding_window": 16, "num_hidden_layers": 5}
NORTH |= {"num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 0, "expert_selection_fn": "sigmoid"}
NORTH |= {"norm_topk_prob": False, "first_k_dense_replace": 1, "prefix_dense_intermediate_size": 40}
NORTH |= {"prefix_dense_sliding_window_pattern": 1, "use_parallel_block": True, "use_gated_activation": True}
NORTH_MINIMAL = {k: x for k, x in NORTH.items() if not k.startswith("prefix")} | {"first_k_dense_replace": 2}
NORTH |= {"layer_types": [("sliding_attention", "full_attention")[i % 4 == 0] for i in range(5)]}
A_PLUS: dict[str, Any] = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 2}
A_PLUS |= {"expert_selection_fn": "sigmoid", "norm_topk_prob": True, "shared_expert_combination_strategy": "average"}
A_PLUS |= {"first_k_dense_replace": 0, "rms_norm_eps": None, "sliding_window": 16, "num_hidden_layers": 4}
A_PLUS |= {"use_qk_norm": False, "rotary_pct": 1.0, "position_embedding_type": "rope_gptj"}
LAYER_NORM: dict[str, Any] = {"num_key_value_heads": 2, "rope_theta": 1e5, "pad_token_id": 0}
LAYER_NORM |= {"rms_norm_eps": "REMOVED"}
PHI_MOE: dict[str, Any] = {"num_key_value_heads": 2, "attention_bias": True, "lm_head_bias": True}
PHI_MOE |= {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.1, "input_jitter_noise": 0.01}
PHI_MOE |= {"rope_scaling": LONGROPE_FACTORS | ORIGINAL | {"type": "longrope"}, "rope_theta": 1e4, "pad_token_id": 0}
PHI_MOE |= {"original_max_position_embeddings": 64, "sliding_window": 512}
PHI_MOE["rope_scaling"] |= {"long_mscale": 1.3, "short_mscale": 1.2}
PHI_MOE["rope_scaling"]["short_factor"] = LONGROPE_FACTORS["long_factor"]  # transformers never uses those of long ones
QWEN: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "rope_theta": 1e6}
QWEN |= {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 1, "norm_topk_prob": False}
QWEN |= {"sliding_window": 32_768, "max_window_layers": 21, "use_sliding_window": False, "num_key_value_heads": 2}
OLMOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": None, "norm_topk_prob": False}
OLMOE |= {"attention_bias": False, "rope_scaling": None, "rope_theta": 1e4, "num_key_value_heads": 4}
ERNIE: dict[str, Any] = {"use_bias": False, "rope_theta": 5e5, "tie_word_embeddings": True, "num_key_value_heads": 2}
ERNIE_MOE: dict[str, Any] = {"moe_num_experts": 8, "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_k": 2}
ERNIE_MOE |= {"moe_layer_end_index": 1, "moe_layer_interval": 1, "moe_intermediate_size": 16, "moe_use_aux_free": True}
ALPHA = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
HUNYUAN: dict[str, Any] = {"rope_scaling": ALPHA | {"type": "dynamic"}, "attention_head_dim": 16, "head_dim": 16}
HUNYUAN |= {"use_qk_norm": True, "use_cla": False, "mlp_bias": False, "num_key_value_heads": 2, "pad_token_id": None}
A13B: dict[str, Any] = {"num_experts": 6, "moe_topk": [2, 2], "num_shared_expert": [1, 1], "n_group": False}
A13B |= {"moe_intermediate_size": [48, 48], "use_mixed_mlp_moe": True, "norm_topk_prob": True, "topk_group": False}
A13B |= {"group_limited_greedy": False, "routed_scaling_factor": 1.0, "moe_layer_num_skipped": 0}
EXAONE: dict[str, Any] = LONG | {"rope_scaling": LLAMA3 | ORIGINAL, "num_hidden_layers": 4, "sliding_window": 16}
KEXAONE: dict[str, Any] = EXAONE | EXPERTS | {"num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1}
KEXAONE |= {"routed_scaling_factor": 2.5, "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_group": 1}
KEXAONE |= {"sliding_window_pattern": "LLLG", "is_moe_layer": [False, True, True, True], "topk_method": "noaux_tc"}
KEXAONE |= {"rope_scaling": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
TRINITY: dict[str, Any] = EXAONE | EXPERTS | {"num_shared_experts": 1, "num_dense_layers": 2, "route_scale": 2.448}
TRINITY |= {"route_norm": True, "score_func": "sigmoid", "mup_enabled": True, "global_attn_every_n_layers": 4}
TRINITY |= {"rope_scaling": None, "rope_theta": 1e4, "n_group": 1, "topk_group": 1, "num_expert_groups": 1}
LLLG = [*["sliding_attention"] * 3, "full_attention"]
LAGUNA: dict[str, Any] = EXPERTS | {"shared_expert_intermediate_size": 16, "moe_routed_scaling_factor": 2.5}
LAGUNA |= {"gating": "per-head", "norm_topk_prob": True, "moe_router_logit_softcapping": 0.0, "sliding_window": 16}
LAGUNA |= {"mlp_only_layers": [0], "decoder_sparse_step": 1, "qkv_bias": False, "attention_bias": False}
LAGUNA |= {"moe_apply_router_weight_on_input": False, "num_key_value_heads": 2}
LAGUNA["layer_types"] = ["full_attention", "sliding_attention"]
LAGUNA_4_LAYERS = {"num_attention_heads_per_layer": [4, 8, 8, 8], "num_hidden_layers": 4, "layer_types": LLLG[::-1]}
LAGUNA["rope_parameters"] = {
    "full_attention": YARN | {"rope_type": "yarn", "partial_rotary_factor": 0.5, "rope_theta": 5e5, "beta_fast": 32.0},
    "sliding_attention": {"rope_type": "default", "partial_rotary_factor": 1.0, "rope_theta": 1e4},
}
APERTUS = {"hidden_act": "xielu", "qk_norm": True, "post_norm": False, "mlp_bias": False, "rope_theta": 1.2e7}
CLOVA = {"attention_multiplier": 0.1, "embedding_multiplier": 10.0, "logits_scaling": 0.125, "use_post_norm": True}
CLOVA |= {"residual_multiplier": 1.0, "head_dim": 8, "rope_theta": 1e8, "rope_scaling": None}
HY: dict[str, Any] = EXPERTS | {"num_shared_experts": 1, "router_scaling_factor": 2.826, "route_norm": True}
HY |= {"qk_norm": True, "first_k_dense_replace": 1, "expert_hidden_dim": 16, "num_nextn_predict_layers": 1}
HY |= {"enable_moe_fp32_combine": False, "moe_router_use_sigmoid": True, "rope_parameters": {"rope_theta": 1e7}}
CWM = {"head_dim": 16, "rope_scaling": {"factor": 16.0, "rope_type": "llama3", **ORIGINAL}, "sliding_window": 16}
CWM["rope_scaling"] |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
MELLUM = EXPERTS | {"sliding_window": 16, "rope_parameters": GEMMA_ROPE, "norm_topk_prob": True}
MELLUM |= {"rope_theta": 100.0, "rope_local_base_freq": 50.0}  # which transformers ignores
GRANITE_4 = GRANITE | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 40}
GRANITE_4 |= {"layer_types": ["attention"] * 2, "position_embedding_type": "rope", "mamba_n_heads": 4}
SARVAM: dict[str, Any] = {"num_experts": 8, "num_shared_experts": 1, "num_experts_per_tok": 2, "head_dim": 16}
SARVAM |= {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "n_group": 1}
SARVAM |= {"topk_group": 1, "use_qkv_bias": False, "use_qk_norm": True, "rope_theta": 8e6, "num_key_value_heads": 2}
SARVAM_105B = {name: value for name, value in DEEPSEEK.items() if name not in ("n_routed_experts", "n_shared_experts")}
SARVAM_105B |= {"num_experts": 8, "num_shared_experts": 1, "q_lora_rank": None, "n_group": 1, "topk_group": 1}
SARVAM_105B |= {"rope_scaling": DEEPSEEK["rope_scaling"] | {"type": "deepseek_yarn"}, "head_dim": 32}
SWASH = GRANITE | {"layer_rope_theta": [1e4, 0], "layer_types": ["sliding_attention", "full_attention"]}

HYBRID: dict[str, Any] = {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
HYBRID |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4}
HYBRID |= {"num_key_value_heads": 2, "attention_bias": False, "num_hidden_layers": 4, "hidden_act": "silu"}
HYBRID_MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HYBRID_MOE |= {"shared_expert_intermediate_size": 20}
MAMBA: dict[str, Any] = {"mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 8}
MAMBA |= {"mamba_d_state": 12, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 8, "mamba_proj_bias": False}
MAMBA |= {"num_hidden_layers": 3}
BAMBA = MAMBA | {"attn_layer_indices": [1], "attn_rotary_emb": 4, "attention_bias": False, "mlp_bias": False}
FALCON = MAMBA | {"attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "embedding_multiplier": 5.656}
FALCON |= {"attention_bias": False, "key_multiplier": 0.39, "lm_head_multiplier": 0.25, "mamba_d_ssm": 48}
FALCON |= {"mamba_d_head": 6, "mamba_norm_before_gate": False, "mamba_rms_norm": False, "mamba_use_mlp": True}
FALCON |= {"mlp_bias": False, "mlp_expansion_factor": 8, "mlp_multipliers": [0.88, 0.39], "projectors_bias": False}
FALCON |= {"rope_theta": 1e11, "ssm_in_multiplier": 1.25, "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35]}
FALCON |= {"ssm_out_multiplier": 0.23, "head_dim": 16, "rope_scaling": None}
GRANITE_4_H = GRANITE_4 | MAMBA | {"layer_types": ["mamba", "mamba", "attention"], "position_embedding_type": "nope"}
NEMOTRON_H: dict[str, Any] = {"attention_bias": False, "chunk_size": 256, "conv_kernel": 4, "expand": 2}
NEMOTRON_H |= {"head_dim": 16, "hybrid_override_pattern": "M-*-", "layer_norm_epsilon": 1e-4, "mamba_head_dim": 8}
NEMOTRON_H |= {"mamba_hidden_act": "silu", "mamba_num_heads": 4, "mamba_proj_bias": False, "mlp_bias": False}
NEMOTRON_H |= {"mlp_hidden_act": "relu2", "n_groups": 2, "num_key_value_heads": 2, "ssm_state_size": 12}
NEMOTRON_H |= {"residual_in_fp32": False, "sliding_window": None, "time_step_limit": [0.0, math.inf]}
NEMOTRON_H |= {"time_step_floor": 1e-4, "time_step_max": 0.1, "time_step_min": 1e-3, "use_bias": False}
NEMOTRON_H |= {"use_conv_bias": True, "num_hidden_layers": 4, "rms_norm_eps": "REMOVED", "num_logits_to_keep": 1}
NEMOTRON_3: dict[str, Any] = {"hybrid_override_pattern": "MEM*EME", "num_hidden_layers": 7, "n_group": 1}
NEMOTRON_3 |= {"moe_intermediate_size": 16, "moe_shared_expert_intermediate_size": 24, "n_routed_experts": 8}
NEMOTRON_3 |= {"n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5}
NEMOTRON_3 |= {"topk_group": 1, "partial_rotary_factor": 1.0, "rope_theta": 10_000}
NEMOTRON_4 = {"model_type": "nemotron_h", "hybrid_override_pattern": "M-*-", "num_hidden_layers": 4}
FALCON_2 = {"model_type": "falcon_h1", "mamba_n_heads": 4, "mamba_d_ssm": 96}
GRANITE_2 = {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"], "mamba_n_heads": 4}
QWEN_NEXT = HYBRID | HYBRID_MOE | {"decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": []}
QWEN_NEXT |= {"use_sliding_window": False, "rope_scaling": None, "rope_theta": 1e7, "partial_rotary_factor": 0.5}
QWEN_NEXT |= {"full_attention_interval": 4}

KIMI_LINEAR: dict[str, Any] = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
KIMI_LINEAR |= {"q_lora_rank": None, "head_dim": 8, "num_key_value_heads": 4, "rope_theta": 1e4}
KIMI_LINEAR |= {"model_max_length": 512, "max_position_embeddings": "REMOVED", "mla_use_nope": True}
KIMI_LINEAR |= {"num_experts": 6, "num_experts_per_token": 2, "moe_intermediate_size": 16, "num_shared_experts": 1}
KIMI_LINEAR |= {"first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_renormalize": True, "num_expert_group": 1}
KIMI_LINEAR |= {"topk_group": 1, "use_grouped_topk": True, "moe_router_activation_func": "sigmoid"}
KIMI_LINEAR |= {
    "routed_scaling_factor": 2.446,
    "hidden_act": "silu",
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 0,
}
KIMI_LINEAR["linear_attn_config"] = {"full_attn_layers": [2, 4], "kda_layers": [1, 3], "head_dim": 16, "num_heads": 3}
KIMI_LINEAR["linear_attn_config"] |= {"short_conv_kernel_size": 4}

LFM: dict[str, Any] = {"conv_L_cache": 3, "conv_bias": False, "norm_eps": 1e-5, "num_key_value_heads": 2}
LFM |= {"rope_theta": 1e6, "tie_embedding": True, "block_auto_adjust_ff_dim": True, "block_multiple_of": 16}
LFM |= {"block_ffn_dim_multiplier": 1.0, "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
LFM_MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LFM_MOE |= {"num_dense_layers": 1, "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0}

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama 2": ("llama", {"pretraining_tp": 1, "rope_scaling": None}),
    "llama 3.1": ("llama", LONG | {"rope_scaling": LLAMA3 | ORIGINAL, "eos_token_id": [1, 2, 3]}),
    "llama 3.2": ("llama", LONG | {"rope_scaling": LLAMA3 | ORIGINAL, "head_dim": 16, "tie_word_embeddings": True}),
    "llama 3.1 of transformers 5": ("llama", LONG | {"rope_parameters": LLAMA3 | ORIGINAL | {"rope_theta": 5e5}}),
    "llama3 without original": ("llama", LONG | {"rope_scaling": LLAMA3}),
    "linear": ("llama", LONG | {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "dynamic": ("llama", LONG | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "yarn": ("llama", LONG | {"rope_scaling": YARN | {"finetuned": True}}),
    "yarn without original": ("llama", LONG | {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
    "yarn, original beside it": ("llama", LONG | ORIGINAL | {"rope_scaling": {"type": "yarn", "factor": 4.0}}),
    "yarn without factor": ("llama", LONG | {"rope_scaling": YARN | {"factor": None}}),
    "yarn, sharpened": ("llama", LONG | {"rope_scaling": YARN | {"attention_factor": 1.3, "beta_fast": 16}}),
    "yarn, mscale": ("llama", LONG | {"rope_scaling": YARN | {"factor": 40, "mscale": 0.707, "mscale_all_dim": 1.0}}),
    "yarn, not truncated": ("llama", LONG | {"rope_scaling": YARN | {"truncate": False, "beta_slow": 2}}),
    "both forms": ("llama", LONG | {"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN}),
    "nulls": ("llama", {"head_dim": None, "num_key_value_heads": None, "rope_parameters": None}),
    "another activation": ("llama", {"hidden_act": "gelu_new"}),
    "mistral 0.1": ("mistral", {"num_key_value_heads": 2, "sliding_window": 16}),
    "mistral 0.3": ("mistral", {"num_key_value_heads": 2, "sliding_window": None, "rope_theta": 1e6}),
    "nemo": ("mistral", {"num_key_value_heads": 2, "head_dim": 16, "hidden_size": 40, "sliding_window": None}),
    "mixtral": ("mixtral", {"num_key_value_heads": 2, "num_local_experts": 4, "rope_theta": 1e6}),
    "qwen 2": ("qwen2", {"num_key_value_heads": 2, "use_sliding_window": False} | WINDOW),
    "qwen 2.5, small": ("qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True, "rope_theta": 1e6}),
    "qwen 2.5, yarn": ("qwen2", LONG | {"rope_scaling": YARN} | WINDOW),
    "qwen 2, windows": ("qwen2", {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 16}),
    "qwen 3": ("qwen3", {"num_key_value_heads": 2, "rope_theta": 1e6, "attention_bias": False}),
    "qwen 3, windows": ("qwen3", {"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 16}),
    "qwen 3, biases": ("qwen3", {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True}),
    "qwen 3 moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True, "num_key_value_heads": 2}),
    "qwen 3 moe, steps": ("qwen3_moe", EXPERTS | {"decoder_sparse_step": 2, "num_key_value_heads": 2}),
    "qwen 3 moe, dense": ("qwen3_moe", EXPERTS | {"mlp_only_layers": [1], "attention_bias": True}),
    "deepseek v2 lite": ("deepseek_v2", DEEPSEEK | LITE),
    "deepseek v2": ("deepseek_v2", DEEPSEEK | {"q_lora_rank": 24, "topk_method": "group_limited_greedy"}),
    "deepseek v2, of few words": ("deepseek_v2", {k: x for k, x in DEEPSEEK.items() if k != "n_shared_experts"}),
    "deepseek v3": ("deepseek_v3", DEEPSEEK | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}),
    "deepseek v3.2": ("deepseek_v32", V32),
    "glm 5": ("glm_moe_dsa", GLM_5),
    "glm 5, with shared indexers": ("glm_moe_dsa", GLM_5 | {"index_topk_freq": 3, "index_skip_topk_offset": 2}),
    "glm 4.5": ("glm4_moe", GLM | {"use_qk_norm": True, "attention_bias": True, "head_dim": 16}),
    "glm 4.5 air": ("glm4_moe", GLM | {"use_qk_norm": False, "attention_bias": True, "routed_scaling_factor": 1.0}),
    "glm of transformers 5": ("glm4_moe", GLM | {"rope_parameters": HALF_ROTARY, "partial_rotary_factor": "REMOVED"}),
    "minimax m2": ("minimax_m2", MINIMAX),
    "phi 3 mini 4k": ("phi3", PHI | {"sliding_window": 100, "rope_scaling": None}),
    "phi 3 mini 128k": ("phi3", PHI | {"num_key_value_heads": "REMOVED", "sliding_window": 262_144}),
    "phi 4": ("phi3", PHI | {"rope_theta": 250_000, "original_max_position_embeddings": 512, "rope_scaling": None}),
    "phi 4 mini": ("phi3", PHI | PARTIAL_ROTARY | {"tie_word_embeddings": True}),
    "command r+": ("cohere", COHERE | {"use_qk_norm": True}),
    "starcoder 2": ("starcoder2", LAYER_NORM | {"norm_epsilon": 1e-5, "use_bias": True, "sliding_window": 16}),
    "phi 3.5 moe": ("phimoe", PHI_MOE),
    "nemotron 4": ("nemotron", LAYER_NORM | {"norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5}),
    "gemma 2b": ("gemma", GEMMA_1 | {"hidden_act": "gelu"}),
    "gemma 7b, of few words": ("gemma", GEMMA_1 | {"num_key_value_heads": 4}),
    "gemma 2 9b": ("gemma2", GEMMA_2 | {"hidden_act": "gelu_pytorch_tanh", "sliding_window_size": 16}),
    "llama 4 maverick": ("llama4_text", SCOUT | {"use_qk_norm": False, "interleave_moe_layer_step": 2}),
    "mimo v2 flash": ("mimo_v2_flash", MIMO),
    "gemma 4 e4b": ("gemma4_text", GEMMA_4 | {"use_double_wide_mlp": False}),
    "gemma 3 1b": ("gemma3_text", GEMMA | {"rope_local_base_freq": 100, "rope_theta": 1e6, "rope_scaling": None}),
    "gemma 3 27b": ("gemma3_text", GEMMA | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}),
    "gemma 3, original beside it": (
        "gemma3_text",
        GEMMA | ORIGINAL | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    ),
    "gemma of transformers 5": ("gemma3_text", GEMMA | {"rope_parameters": GEMMA_ROPE, "num_hidden_layers": 3}),
    "seed oss": ("seed_oss", PLAIN | {"head_dim": 16, "rope_scaling": {"rope_type": "default"}, "rope_theta": 1e7}),
    "smollm 3": ("smollm3", PLAIN | {"no_rope_layers": [1, 1, 1, 0, 1], "num_hidden_layers": 5, "rope_theta": 5e6}),
    "smollm 3, longer": ("smollm3", LONG | {"num_hidden_layers": 4, "rope_scaling": YARN, "pad_token_id": None}),
    "smollm 3, windows by name": (
        "smollm3",
        PLAIN | {"num_hidden_layers": 4, "layer_types": LLLG, "sliding_window": 16, "use_sliding_window": False},
    ),
    "olmo 2": ("olmo2", PLAIN | {"num_key_value_heads": 4, "rope_theta": 5e5}),
    "olmo 3": ("olmo3", PLAIN | {"sliding_window": 16, "num_hidden_layers": 5, "rope_scaling": YARN_RENAMED}),
    "olmo 3, with a field of gemma's": ("olmo3", PLAIN | {"rope_local_base_freq": 100.0, "sliding_window": 16}),
    "granite 3": ("granite", PLAIN | GRANITE),
    "devstral 2": ("ministral3", LONG | DEVSTRAL | {"pad_token_id": None}),
    "ministral 3, windows": ("ministral3", LONG | {"sliding_window": 16, "layer_types": LLLG[2:], "head_dim": 16}),
    "glm 4 9b": ("glm", PLAIN | {"head_dim": 16, "rope_theta": 1e4, "attention_bias": True}),
    "glm 4 0414": ("glm4", PLAIN | {"head_dim": 16, "attention_bias": False, "partial_rotary_factor": 0.5}),
    "glm 4.7 flash": ("glm4_moe_lite", FLASH),
    "dots": ("dots1", PLAIN | DOTS | {"sliding_window": None, "use_sliding_window": False}),
    "dots, windows": ("dots1", PLAIN | DOTS | WINDOW | {"use_sliding_window": False}),
    "solar open": ("solar_open", SOLAR),
    "exaone 4 32b": ("exaone4", EXAONE | {"sliding_window_pattern": "LLLG", "layer_types": LLLG}),
    "exaone 4 1.2b": ("exaone4", EXAONE | {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "iquest coder": ("iquestcoder", PLAIN | {"head_dim": 16, "clip_qkv": None, "use_sliding_window": False}),
    "qwen 1.5 moe": ("qwen2_moe", QWEN),
    "qwen 2 moe, windows": (
        "qwen2_moe",
        QWEN | {"use_sliding_window": True, "sliding_window": 16, "num_hidden_layers": 4, "max_window_layers": 3},
    ),
    "olmoe": ("olmoe", PLAIN | OLMOE),
    "flex olmo": ("flex_olmo", PLAIN | {"num_experts": 7, "num_experts_per_tok": 5, "rope_theta": 5e5}),
    "ernie 4.5 0.3b": ("ernie4_5", ERNIE | {"head_dim": 16}),
    "ernie 4.5 21b": ("ernie4_5_moe", ERNIE | ERNIE_MOE),
    "hunyuan 7b": ("hunyuan_v1_dense", HUNYUAN),
    "hunyuan a13b": ("hunyuan_v1_moe", HUNYUAN | A13B),
    "afm 4.5b": ("arcee", LONG | {"hidden_act": "relu2", "mlp_bias": False, "rope_scaling": YARN | {"mscale": 1.0}}),
    "command r": ("cohere", COHERE | {"use_qk_norm": False, "model_max_length": 1024, "rope_theta": 8e6}),
    "command r7b": ("cohere2", COHERE | {"sliding_window": 16, "sliding_window_pattern": 4, "num_hidden_layers": 5}),
    "command r7b, heads": ("cohere2", COHERE | {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": 5}),
    "north mini code": ("cohere2_moe", NORTH),
    "north mini, of few words": ("cohere2_moe", NORTH_MINIMAL),
    "command a plus": ("cohere2_moe", COHERE | A_PLUS),
    "ministral": ("ministral", PLAIN | {"head_dim": 16, "sliding_window": 16, "layer_types": LLLG[2:]}),
    "ministral by its older name": ("mistral", PLAIN | {"head_dim": 8, "sliding_window": 16, "layer_types": LLLG[2:]}),
    "granite 3 1b a400m": ("granitemoe", PLAIN | GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "trinity mini": ("afmoe", TRINITY),
    "laguna xs": ("laguna", PLAIN | LAGUNA | LAGUNA_4_LAYERS),
    "laguna s": ("laguna", PLAIN | LAGUNA | {"num_attention_heads_per_layer": [4, 6]}),
    "laguna m": ("laguna", PLAIN | LAGUNA | {"layer_types": "REMOVED", "rope_parameters": "REMOVED"}),
    "apertus 8b": ("apertus", LONG | APERTUS | {"rope_scaling": LLAMA3 | ORIGINAL | {"type": "llama3"}}),
    "apertus, of few words": ("apertus", PLAIN | {"hidden_act": "xielu"}),
    "hyperclova x seed think": ("hyperclovax", PLAIN | CLOVA),
    "cwm": ("cwm", CWM | {"num_key_value_heads": 2, "layer_types": [*LLLG[2:], *LLLG[2:]], "num_hidden_layers": 4}),
    "cwm, of few words": ("cwm", {"head_dim": 16, "num_key_value_heads": 2, "num_hidden_layers": 5}),
    "youtu 2b": ("youtu", DEEPSEEK | {"rope_scaling": None, "rope_theta": 1.6e6, "tie_word_embeddings": True}),
    "k-exaone": ("exaone_moe", KEXAONE | {"layer_types": LLLG, "mlp_layer_types": ["dense"] + ["sparse"] * 3}),
    "hy 3": ("hy_v3", PLAIN | HY),
    "internlm 3": ("internlm3", PLAIN | {"rope_scaling": {"rope_type": "dynamic", "factor": 6.0}, "qkv_bias": False}),
    "internlm 3, biases": ("internlm3", PLAIN | {"bias": True, "qkv_bias": True, "head_dim": 16}),
    "mellum 2": ("mellum", PLAIN | MELLUM | {"num_hidden_layers": 4, "layer_types": LLLG}),
    "granite 4 micro": ("granitemoehybrid", PLAIN | GRANITE_4),
    "granite 4, experts": (
        "granitemoehybrid",
        PLAIN | GRANITE_4 | {"num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "granite 4 micro, other sizes": (
        "granitemoehybrid",
        PLAIN | GRANITE_4 | {"mamba_n_groups": 3, "mamba_d_state": 7},
    ),
    "granite 4 h micro": ("granitemoehybrid", PLAIN | GRANITE_4_H),
    "granite 4 h tiny": (
        "granitemoehybrid",
        PLAIN | GRANITE_4_H | {"num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "bamba 9b": ("bamba", PLAIN | BAMBA),
    "bamba, of few words": ("bamba", {"mamba_n_heads": 4, "attn_layer_indices": [1], "num_key_value_heads": 2}),
    "nemotron h 8b": ("nemotron_h", NEMOTRON_H),
    "nemotron nano 9b v2": ("nemotron_h", NEMOTRON_H | {"hybrid_override_pattern": "M-MM*", "num_hidden_layers": 5}),
    "nemotron 3 nano": ("nemotron_h", NEMOTRON_H | NEMOTRON_3),
    "nemotron 3 super": ("nemotron_h", NEMOTRON_H | NEMOTRON_3 | {"moe_latent_size": 12}),
    "nemotron by older names": (
        "nemotron_h",
        NEMOTRON_H
        | {"n_groups": 1, "mamba_n_groups": 4, "conv_kernel": 2, "mamba_d_conv": 3, "mamba_dt_limit": [0.0, math.inf]}
        | {"mamba_conv_bias": False, "mamba_expand": 2, "mamba_dt_min": 1e-3, "mamba_chunk_size": 128},
    ),
    "nemotron of transformers 5": (
        "nemotron_h",
        NEMOTRON_H | {"hybrid_override_pattern": "REMOVED", "layers_block_type": ["mamba", "attention"] * 2},
    ),
    "falcon h1 1.5b": ("falcon_h1", PLAIN | FALCON),
    "falcon h1 34b": ("falcon_h1", PLAIN | FALCON | {"mamba_rms_norm": True}),
    "falcon h1, of few words": ("falcon_h1", {"mamba_n_heads": 4, "mamba_d_ssm": 48, "num_key_value_heads": 2}),
    "granite moe, shared": ("granitemoeshared", PLAIN | GRANITE | {"shared_intermediate_size": 40}),
    "granite swash": ("granite_swa", PLAIN | SWASH | {"sliding_window": 16}),
    "granite swash moe": ("granitemoe_swa", PLAIN | SWASH | {"sliding_window": 16, "num_local_experts": 6}),
    "sarvam 30b": ("sarvam_moe", PLAIN | SARVAM),
    "sarvam 105b": ("sarvam_mla", SARVAM_105B),
    "kimi linear 48b a3b": ("kimi_linear", KIMI_LINEAR | {"pad_token_id": None}),
    "lfm2 1.2b": ("lfm2", LFM | {"full_attn_idxs": [1], "block_ff_dim": 72, "layer_types": "REMOVED"}),
    "lfm2 8b a1b": ("lfm2_moe", LFM | LFM_MOE),
    "olmo hybrid 7b": ("olmo_hybrid", PLAIN | {"num_hidden_layers": 4, "rope_parameters": {"rope_theta": None}}),
    "olmo hybrid, of few words": ("olmo_hybrid", PLAIN | {"num_hidden_layers": 2}),
    "qwen 3 next": ("qwen3_next", QWEN_NEXT),
    "qwen 3 next, of few words": (
        "qwen3_next",
        HYBRID | {"num_experts": 6, "moe_intermediate_size": 16, "num_experts_per_tok": 2},
    ),
    "qwen 3 next, yarn": ("qwen3_next", QWEN_NEXT | LONG | {"rope_scaling": YARN}),
    "qwen 3 moe, heads": ("qwen3_moe", EXPERTS | {"head_dim": "REMOVED", "use_sliding_window": True} | WINDOW),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_of_published_configs(tmp_path, name):
    family, changes = PUBLISHED[name]
    model = make_published(tmp_path, family, **changes)
    if family == "minimax_m2" and model.config.rope_parameters.get("partial_rotary_factor") is None:
        pytest.skip("this version of transformers does not read `rotary_dim`")
    prompt = prompts(1, 150, 150, 256)[0]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    assert (all_logits(Engine(load(tmp_path)), prompt) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({"rope_scaling": YARN}, 512),
        ({"rope_scaling": YARN | {"factor": 16.0}}, 1024),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 2048),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 512),
        ({"rope_scaling": LLAMA3 | ORIGINAL}, 512),
        ({}, 512),
    ],
)
def test_max_model_len(changes, tokens):
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = {"model_type": "llama", "num_hidden_layers": 2} | sizes | LONG | changes
    assert read_spec(config).max_model_len == read_spec(config, tokens).max_model_len == tokens
    with pytest.raises(ValueError, match=f"^--max-model-len {tokens + 1}: the model takes at most {tokens} tokens"):
        read_spec(config, tokens + 1)


@pytest.mark.parametrize(("served", "prompt"), [(64, 60), (0, 150), (65, 65)])
def test_longrope_uses_short_factors_up_to_the_original_length(tmp_path, served, prompt, caplog):
    """transformers chooses by the length of each sequence, so that the first keys of a growing one become wrong."""
    model = make_published(tmp_path, "phi3", **PHI)
    ids = prompts(1, prompt, prompt, 256)[0]
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    with caplog.at_level(logging.WARNING):
        runner = load(tmp_path, max_model_len=served)
    assert (all_logits(Engine(runner), ids) - expected).abs().max() < 1e-4
    assert runner.max_model_len == (served or 512)
    assert ("--max-model-len 64 serves" in caplog.text) == (served != 64)


def test_longrope_has_other_names_in_older_files():
    """The current transformers only reads the newest name, so that it is not compared."""
    sizes = {"model_type": "phi3", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48}
    config = sizes | {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512} | PHI
    newest = read_spec(config).rope
    for name in ("su", "yarn"):
        rope = read_spec(config | {"rope_scaling": LONGROPE_FACTORS | {"type": name}}).rope
        assert {key: rope[key] for key in newest} == newest


def test_a_window_as_long_as_the_context_is_none():
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = {"model_type": "phi3", "num_hidden_layers": 2, "max_position_embeddings": 64} | sizes
    assert [read_spec(config | {"sliding_window": size}).windows[1] for size in (63, 64, 999)] == [63, None, None]


WINDOWED = ["afmoe", "cohere2", "cohere2_moe", "cwm", "dots1", "exaone4", "exaone_moe", "gemma2", "gemma3_text"]
WINDOWED += ["gpt_oss", "granite_swa", "granitemoe_swa", "laguna", "mellum", "ministral", "olmo3"]


@pytest.mark.parametrize("family", WINDOWED)
def test_use_sliding_window_is_ignored(family):
    """As in transformers, for these families."""
    config = {"model_type": family, "layer_types": LLLG, "sliding_window": 16, "use_sliding_window": False} | MINIMAL
    assert read_spec(config).windows == (16, 16, 16, None)


def test_rope_theta_is_kept_if_rope_scaling_is_added():
    """transformers loses it, so that it is not compared."""
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    written = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": YARN}
    config = {"model_type": "llama", "num_hidden_layers": 2, "max_position_embeddings": 64} | sizes | written
    assert read_spec(config).rope["rope_theta"] == 1e6


MROPE_SECTIONS = {"type": "mrope", "mrope_section": [1, 1, 2]}
MROPE = {"rope_scaling": MROPE_SECTIONS, "rope_theta": 1e6}
MROPE_3 = {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}
SMALL_EXPERTS = EXPERTS | {"moe_intermediate_size": 20}
IGNORED_FIELDS = {"use_sliding_window": True, "norm_topk_prob": False}
QWEN_3 = {"head_dim": 16, "rope_scaling": MROPE_3, "rope_theta": 5e6, "attention_bias": False}
QWEN_3_5: dict[str, Any] = {"mrope_interleaved": True, "mrope_section": [1, 1, 2], "rope_type": "default"}
QWEN_3_5 |= {"rope_theta": 1e7, "partial_rotary_factor": 0.25}
QWEN_3_5 = HYBRID | {"rope_parameters": QWEN_3_5, "full_attention_interval": 4, "attn_output_gate": True}
QWEN_3_5 |= {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "mamba_ssm_dtype": "float32"}
QWEN_3_5 |= {"mtp_num_hidden_layers": 1}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
GLM_VISION: dict[str, Any] = {"partial_rotary_factor": 0.5, "rope_theta": 1e4, "attention_bias": True}
GLM_VISION |= {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1]}}
MROPE_8 = {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
MISTRAL_4 = DEEPSEEK | {"rope_scaling": None, "rope_parameters": YARN_SCALED_QUERIES, "n_group": 1, "topk_group": 1}
KIMI = DEEPSEEK | {"n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}

MULTIMODAL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma 3": ("gemma3", GEMMA, {"mm_tokens_per_image": 4}),
    "mistral small 3.1": ("mistral3", {"model_type": "mistral", "sliding_window": None, "rope_theta": 1e9}, UNTIED),
    "mistral small, windows": (
        "mistral3",
        {"model_type": "mistral", "sliding_window": 16, "layer_types": LLLG[2:], "num_hidden_layers": 2},
        UNTIED,
    ),
    "llama 4 scout": ("llama4", SCOUT | {"model_type": "llama4_text"}, UNTIED),
    "gemma 4 e2b": ("gemma4", GEMMA_4, {}),
    "gemma 4 31b": ("gemma4", GEMMA_4_31B, {}),
    "gemma 4 26b a4b": ("gemma4", GEMMA_4_26B, {}),
    "gemma 3, tied": ("gemma3", GEMMA | UNTIED, {}),
    "mistral 3, tied": ("mistral3", {"model_type": "mistral", "sliding_window": None} | UNTIED, {}),
    "ministral 3": ("mistral3", DEVSTRAL | {"model_type": "ministral3"}, UNTIED),
    "mistral small 4": ("mistral3", MISTRAL_4 | {"model_type": "mistral4"}, UNTIED),
    "qwen 2 vl": ("qwen2_vl", MROPE | {"use_sliding_window": False, "sliding_window": 16}, {}),
    "qwen 2 vl, heads": ("qwen2_vl", MROPE | {"head_dim": 16}, {}),
    "qwen 2.5 vl 3b": ("qwen2_5_vl", MROPE | {"max_window_layers": 1, "sliding_window": 16}, TIED),
    "qwen 2.5 vl, longer": ("qwen2_5_vl", {"rope_scaling": YARN | {"mrope_section": [1, 1, 2]}}, {}),
    "qwen 2 vl of transformers 5": ("qwen2_vl", {"rope_parameters": MROPE_SECTIONS | {"rope_theta": 1e5}}, {}),
    "qwen 3 vl 4b": ("qwen3_vl", QWEN_3 | TIED, TIED),
    "qwen 3 vl, windows": ("qwen3_vl", QWEN_3 | WINDOW | {"use_sliding_window": True}, {}),
    "qwen 3 vl moe": ("qwen3_vl_moe", SMALL_EXPERTS | QWEN_3 | {"norm_topk_prob": True, "mlp_only_layers": []}, UNTIED),
    "qwen 3 vl moe, otherwise": ("qwen3_vl_moe", SMALL_EXPERTS | WINDOW | IGNORED_FIELDS, UNTIED),
    "qwen 3.5 4b": ("qwen3_5", QWEN_3_5 | {"model_type": "qwen3_5_text"} | TIED, TIED),
    "qwen 3.5 35b a3b": (
        "qwen3_5_moe",
        QWEN_3_5 | HYBRID_MOE | {"model_type": "qwen3_5_moe_text", "intermediate_size": "REMOVED"},
        UNTIED,
    ),
    "glm 4.1v": ("glm4v", GLM_VISION | {"model_type": "glm4v_text"}, UNTIED),
    "glm 4.6v flash": ("glm46v", GLM_VISION | {"model_type": "glm4v_text"}, UNTIED),
    "glm 4.5v": (
        "glm4v_moe",
        GLM | GLM_VISION | {"model_type": "glm4v_moe_text", "head_dim": 16} | MROPE_8,
        UNTIED,
    ),
    "exaone 4.5": ("exaone4_5", EXAONE | {"model_type": "exaone4_5_text", "layer_types": LLLG}, UNTIED),
    "kimi k2.5": ("kimi_k25", KIMI | {"model_type": "kimi_k2"}, UNTIED),
    "kimi k2.5, tied": ("kimi_k25", KIMI | {"model_type": "kimi_k2"} | UNTIED, {}),
}


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("name", MULTIMODAL)
def test_logits_of_multimodal_models(tmp_path, name, original, caplog):
    """With both the published names of tensors and those of transformers 5."""
    family, text, fields = MULTIMODAL[name]
    model = make_multimodal(tmp_path, family, original, text, **fields)
    if family == "llama4":  # transformers 5.24 looks for images in the outputs of the whole
        model = model.language_model
    if family == "kimi_k25" and original:  # transformers renames its layers to blocks, as in the vision encoder
        rewrite(
            tmp_path, lambda weights: {key.replace("model.blocks", "model.layers"): x for key, x in weights.items()}
        )
    prompt = prompts(1, 150, 150, 256)[0]
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    with caplog.at_level(logging.WARNING):
        runner = load(tmp_path)
    assert (all_logits(Engine(runner), prompt) - expected).abs().max() < 1e-4
    assert "images are not served" in caplog.text and "not used" not in caplog.text


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("inner", [20, 16, 32])
def test_fused_experts_may_be_transposed(tmp_path, original, inner):
    """Qwen3-VL is published with [in, out]; transformers 5 writes [out, in]. One of the matrices may be square."""
    make_multimodal(tmp_path, "qwen3_vl_moe", original, EXPERTS | QWEN_3 | {"moe_intermediate_size": inner})
    prompt = prompts(1, 40, 40, 256)[0]
    before = all_logits(Engine(load(tmp_path)), prompt)
    whole = ("experts.gate_up_proj", "experts.down_proj")
    rewrite(tmp_path, lambda weights: {k: x.mT.contiguous() if k.endswith(whole) else x for k, x in weights.items()})
    assert torch.equal(all_logits(Engine(load(tmp_path)), prompt), before)


def test_defaults_of_gemma(shared_data):
    """The published config.json of the 4b lacks fields whose values are the defaults of transformers."""
    numbers = json.loads((shared_data / "model_configs/gemma_numbers.json").read_text())["gemma-3-4b"]
    names = ("hidden_size", "intermediate_size", "num_hidden_layers")
    text = {name: numbers[name] for name in names} | {"model_type": "gemma3_text", "sliding_window": 1024}
    spec = read_spec({"model_type": "gemma3", "text_config": text | {"rope_scaling": LINEAR}})
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 4, 256)
    assert spec.max_model_len == 131_072 and spec.tied and spec.scale == 1 / 16
    assert spec.windows[:7] == (1024,) * 5 + (None, 1024)
    assert [rope["rope_theta"] for rope in spec.ropes[4:6]] == list(numbers["rope_wave_length"].values())
    assert [rope["rope_type"] for rope in spec.ropes[4:6]] == ["default", "linear"]


# ---------------------------------------------------------------- files


@pytest.fixture
def folder(checkpoint, tmp_path) -> Path:
    """A copy that a test may change."""
    shutil.copytree(checkpoint("llama")[0], tmp_path / "model")
    return tmp_path / "model"


def logits(folder: Path) -> torch.Tensor:
    return all_logits(Engine(load(folder)), prompts(1, 40, 40)[0])


def rewrite(folder: Path, change) -> None:
    """Replace all weights by `change(weights)`."""
    path, other = folder / "model.safetensors", folder / "written"
    save_file({name: tensor.clone() for name, tensor in change(load_file(path)).items()}, other, {"format": "pt"})
    other.replace(path)  # a new file, since the old one may be mapped into memory


def edit(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_unneeded_files_and_tensors_are_ignored(folder):
    before = logits(folder)
    noise = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    rewrite(folder, lambda weights: {name: tensor.double() for name, tensor in weights.items()} | noise)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(zeros, folder / "consolidated.safetensors")
    save_file(zeros, folder / "other.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "gone.safetensors"}}')
    assert torch.equal(logits(folder), before)
    (folder / "model.safetensors").rename(folder / "a-1.safetensors")
    for name in ("other.safetensors", "model.safetensors.index.json"):
        (folder / name).unlink()
    assert torch.equal(logits(folder), before), "the files of another library are left alone"
    (folder / "a-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no safetensors of transformers, only consolidated\.safetensors"):
        load(folder)


def test_unused_tensors_are_logged(folder, caplog):
    """They may mean that it is another model. RoPE frequencies, scales and a tied head are not logged."""
    side = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "model.layers.1.mlp.up_proj.input_scale": 1}
    rewrite(folder, lambda weights: weights | {name: torch.as_tensor(value) for name, value in side.items()})
    load(folder)
    edit(folder, tie_word_embeddings=True)
    load(folder)
    assert "not used" not in caplog.text
    rewrite(
        folder, lambda weights: weights | {f"model.layers.{i}.self_attn.o_proj.bias": torch.ones(64) for i in (0, 1)}
    )
    load(folder)
    assert "2 tensors are not used, is it the right model? model.layers.0.self_attn.o_proj.bias, model" in caplog.text


def test_shards_that_are_missing_are_named(checkpoint, tmp_path):
    shutil.copytree(checkpoint("llama", shard_bytes=100_000)[0], tmp_path / "model")
    shards = sorted((tmp_path / "model").glob("model-*.safetensors"))
    shards[1].unlink()
    with pytest.raises(ValueError, match=f"lacks 1 of {len(shards)} shards: {shards[1].name}"):
        load(tmp_path / "model")


@pytest.mark.parametrize("change", ["another shard", "left out", "no map"])
def test_tensors_are_found_wherever_shards_have_them(checkpoint, tmp_path, change):
    """The index may be outdated: as in transformers, it only tells the names of the shards."""
    folder, _ = checkpoint("llama", shard_bytes=100_000)
    shutil.copytree(folder, tmp_path / "model")
    path, name = tmp_path / "model/model.safetensors.index.json", "model.layers.1.mlp.up_proj.weight"
    places = json.loads(path.read_text())["weight_map"]
    if change == "another shard":
        places[name] = next(shard for shard in places.values() if shard != places[name])
    else:
        del places[name]
    path.write_text(json.dumps({"metadata": {}} | ({} if change == "no map" else {"weight_map": places})))
    assert torch.equal(logits(tmp_path / "model"), logits(folder))


def test_a_git_lfs_pointer_is_named(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 5\n")
    with pytest.raises(ValueError, match="git lfs pull"):
        load(folder)
    (folder / "model.safetensors").rename(folder / "other.gguf")
    with pytest.raises(ValueError, match="holds no safetensors; give one of its .gguf files"):
        load(folder)


def test_a_stored_head_of_a_tied_model_is_used_if_it_differs(folder):
    untied = logits(folder)
    edit(folder, tie_word_embeddings=True)
    assert torch.equal(logits(folder), untied)
    rewrite(folder, lambda weights: weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    same = load(folder)
    held = same._model._head.weight.data_ptr(), same._model._embedding.weight.data_ptr()
    assert held[0] == held[1], "it is held once"
    rewrite(folder, lambda weights: {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"})
    assert torch.equal(logits(folder), all_logits(Engine(same), prompts(1, 40, 40)[0]))
    edit(folder, tie_word_embeddings=False)
    with pytest.raises(ValueError, match="no tensor lm_head.weight"):
        load(folder)


FUSED_EXPERTS = ["mixtral", "qwen3_moe", "deepseek_v3", "minimax_m2", "qwen2_moe", "ernie4_5_moe", "hunyuan_v1_moe"]


@pytest.mark.parametrize(
    "family", [*FUSED_EXPERTS, "granitemoe", "hy_v3", "exaone_moe", "afmoe", "laguna", "cohere2_moe", "nemotron_h"]
)
def test_experts_in_one_tensor(checkpoint, tmp_path, family):
    folder, model = checkpoint(family)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert any(
        name.endswith(("experts.gate_up_proj", "experts.up_proj")) for name in load_file(tmp_path / "model.safetensors")
    )
    # Tensors have other addresses, and how a product rounds may depend on their alignment.
    assert torch.allclose(logits(tmp_path), logits(folder), rtol=0, atol=1e-5)


# ---------------------------------------------------------------- FP8

GROUPS = {"group_0": {"weights": {"num_bits": 8, "type": "float"}}, "group_1": {"weights": None}}
METHODS = {
    "tensor": {"quant_method": "fp8", "activation_scheme": "static"},
    "row": {"quant_method": "fbgemm_fp8"},
    "rows": {"quant_method": "compressed-tensors", "config_groups": GROUPS},
    "block": {"quant_method": "fp8", "weight_block_size": [24, 40]},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
}
LIMIT = torch.finfo(torch.float8_e4m3fn).max


def quantized(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, str, torch.Tensor, torch.Tensor]:
    """(FP8 weight, suffix of its scale's name, scale, dequantized weight)."""
    size = {"block": (24, 40), "row": (1, weight.shape[1]), "rows": (1, weight.shape[1])}.get(kind, tuple(weight.shape))
    scale = torch.zeros([-(-n // s) for n, s in zip(weight.shape, size, strict=True)])
    stored, resolved = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), torch.zeros(weight.shape)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(i * size[0], (i + 1) * size[0]), slice(j * size[1], (j + 1) * size[1])
            scale[i, j] = weight[at].abs().max() / LIMIT
            stored[at] = (weight[at] / scale[i, j]).to(stored.dtype)
            resolved[at] = stored[at].float() * scale[i, j]
    shape = {"rows": scale.shape, "block": scale.shape, "row": (len(scale),), "tensor": (), "modelopt": (1,)}[kind]
    return stored, "weight_scale_inv" if kind == "block" else "weight_scale", scale.reshape(shape), resolved


@pytest.mark.parametrize(
    "family", ["llama", "qwen3_moe", "deepseek_v3", "phi3", "glm4", "sarvam_moe", "laguna", "nemotron_h"]
)
@pytest.mark.parametrize("kind", METHODS)
def test_fp8_weights_are_dequantized(checkpoint, tmp_path, family, kind, caplog):
    shutil.copytree(checkpoint(family)[0], tmp_path / "stored")
    plain, stored = load_file(tmp_path / "stored/model.safetensors"), {}
    for name in [name for name in plain if name.endswith(("proj.weight", "query_key_value.weight", "dense.weight"))]:
        weight, suffix, scale, plain[name] = quantized(plain[name], kind)
        stored |= {name: weight, name.replace("weight", suffix): scale}
    shutil.copytree(tmp_path / "stored", tmp_path / "plain")
    rewrite(tmp_path / "plain", lambda _: plain)
    rewrite(tmp_path / "stored", lambda _: plain | stored)
    edit(tmp_path / "stored", quantization_config=METHODS[kind])
    assert torch.equal(logits(tmp_path / "stored"), logits(tmp_path / "plain"))
    assert "dequantized at load" in caplog.text


def test_fp8_experts_of_one_tensor_have_a_scale_each(checkpoint, tmp_path):
    """As in Mistral Small 4."""
    shutil.copytree(checkpoint("mistral4")[0], tmp_path / "stored")
    plain, stored = load_file(tmp_path / "stored/model.safetensors"), {}
    for name in [name for name in plain if "mlp.experts" in name]:
        scale = plain[name].abs().amax((1, 2), keepdim=True) / LIMIT
        stored[name], stored[f"{name}_scale_inv"] = (plain[name] / scale).to(torch.float8_e4m3fn), scale
        plain[name] = stored[name].float() * scale
    shutil.copytree(tmp_path / "stored", tmp_path / "plain")
    rewrite(tmp_path / "plain", lambda _: plain)
    rewrite(tmp_path / "stored", lambda _: plain | stored)
    edit(tmp_path / "stored", quantization_config={"quant_method": "fp8", "weight_block_size": None})
    # Tensors have other addresses, and how a product rounds may depend on their alignment.
    assert torch.allclose(logits(tmp_path / "stored"), logits(tmp_path / "plain"), rtol=0, atol=1e-5)
    blocks = {name: torch.ones(8, 1, 1, 2) for name in stored if name.endswith("_scale_inv")}
    rewrite(tmp_path / "stored", lambda weights: weights | blocks)
    with pytest.raises(ValueError, match=r"scales of shape \[8, 1, 1, 2\] are not served"):
        load(tmp_path / "stored")


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "aqlm", "bits": 4}, "quant_method 'aqlm' is not served; weights in FP8"),
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'"),
        ({"bits": 4}, "quant_method None"),
        ({"quant_method": "awq", "bits": 8}, "weights of 8 bits is not served"),
        ({"quant_method": "awq", "bits": 4, "version": "GEMV"}, "version gemv"),
        ({"quant_method": "gptq", "bits": 3}, "weights of 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 3, "type": "int"}}}},
            r"weights of 3 bits \(int\)",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo W4A8_AWQ"),
    ],
)
def test_other_quantized_weights_are_refused(folder, quantization, words):
    edit(folder, quantization_config=quantization)
    with pytest.raises(ValueError, match=words):
        load(folder)


def test_quantized_weights_without_a_quantization_config_are_refused(folder):
    name, weight = "model.layers.1.mlp.up_proj.weight", {}
    weight[torch.int8] = torch.ones((128, 64), dtype=torch.int8)
    weight[torch.float8_e4m3fn] = weight[torch.int8].to(torch.float8_e4m3fn)
    for dtype, words in ((torch.int8, "stored as int8"), (torch.float8_e4m3fn, "stored in FP8, and")):
        rewrite(folder, lambda weights, dtype=dtype: weights | {name: weight[dtype]})
        with pytest.raises(ValueError, match=f"{name} is {words}"):
            load(folder)
    rewrite(folder, lambda weights: weights | {f"{name}_scale": torch.ones(3, 3)})
    with pytest.raises(ValueError, match=r"scales of shape \[3, 3\]"):
        load(folder)


# ---------------------------------------------------------------- warnings and refusals


def test_what_is_served_differently_is_logged(folder, caplog):
    edit(folder, auto_map={"AutoModelForCausalLM": "modeling.Model"}, rope_scaling={"type": "dynamic", "factor": 2.0})
    with caplog.at_level(logging.WARNING):
        look_up(resolve(WorkerConfig(model=str(folder), device="cpu")))
    assert "auto_map" in caplog.text and "max_position_embeddings only" in caplog.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"type": "mrope", "factor": 2.0}}, "rope_type 'mrope' is not served; default, dyn"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type 'longrope' has no short_factor"),
        ({"rope_scaling": LONGROPE_FACTORS | {"type": "longrope"}}, "short_factor has 4 numbers, not 8"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_type 'llama3' has no low_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn' has no factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ by layer"),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "not served for this model_type"),
        ({"model_type": "glm4_moe", "partial_rotary_factor": 0.05}, "0 of 16 elements cannot be rotated"),
    ],
)
def test_rope_that_is_not_served_is_refused_before_weights_are_read(folder, changes, words):
    (folder / "model.safetensors").unlink()
    edit(folder, **changes)
    with pytest.raises(ValueError, match=words):
        load(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mistral3", "text_config": {"model_type": "llama"}}, "text_config: model_type 'llama'"),
        ({"model_type": "mistral4", "n_group": 2}, "n_group 2 is not served; 1 is"),
        ({"model_type": "mistral4", "topk_group": 2}, "topk_group 2 is not served; 1 is"),
        ({"model_type": "glm4_moe_lite", "mlp_layer_types": ["sparse", "dense"]}, "dense layers behind sparse ones"),
        ({"model_type": "solar_open", "use_qk_norm": True}, "use_qk_norm True is not served"),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, "'LLLG' is not served without layer_types"),
        ({"model_type": "iquestcoder", "clip_qkv": 8.0}, "clip_qkv 8.0 is not served"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv 8.0 is not served"),
        ({"model_type": "ernie4_5_moe", "use_bias": True}, "use_bias True is not served"),
        ({"model_type": "ernie4_5_moe", "moe_norm_min": None}, "moe_norm_min is null"),
        ({"model_type": "hunyuan_v1_dense", "use_qk_norm": False}, "use_qk_norm False is not served"),
        ({"model_type": "hunyuan_v1_moe", "moe_topk": [1, 2]}, r"moe_topk \[1, 2\] is not served; the same"),
        ({"model_type": "hunyuan_v1_moe", "moe_intermediate_size": [64]}, "moe_intermediate_size 64 is not served"),
        ({"model_type": "hunyuan_v1_moe", "num_shared_expert": 2}, "num_shared_expert 2 is not served"),
        ({"model_type": "cohere2", "sliding_window": None}, "sliding_window null is not served"),
        ({"model_type": "arcee", "hidden_act": "silu"}, "hidden_act 'silu' is not served; 'relu2' is"),
        ({"model_type": "apertus"}, "hidden_act 'silu' is not served; 'xielu' is"),
        ({"model_type": "hyperclovax", "residual_multiplier": 0.5}, "residual_multiplier 0.5 is not served"),
        ({"model_type": "laguna", "num_attention_heads_per_layer": [6, 3]}, r"per_layer \[6, 3\] is not served"),
        ({"model_type": "laguna", "num_attention_heads_per_layer": [4]}, r"per_layer \[4\] is not served"),
        ({"model_type": "cohere2_moe", "use_parallel_block": False}, "use_parallel_block False is not served"),
        ({"model_type": "cohere2_moe", "rope_scaling": YARN}, "rope_scaling {.*} is not served; None is"),
        ({"model_type": "cohere2_moe", "expert_selection_fn": "top"}, "expert_selection_fn 'top' with 'average'"),
        ({"model_type": "gemma4_text", "use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is"),
        ({"model_type": "gemma4_text", "num_kv_shared_layers": 2}, "num_kv_shared_layers 2: no layer before them"),
        ({"model_type": "gemma4_text", "num_key_value_heads": 3}, "num_key_value_heads 3 does not divide 4 heads"),
        (
            {"model_type": "gemma4_text", "vocab_size_per_layer_input": 100},
            "vocab_size_per_layer_input 100 is not served",
        ),
        ({"model_type": "phimoe", "num_experts_per_tok": 1}, "num_experts_per_tok 1 is not served; 2 is"),
        ({"model_type": "mimo_v2_flash", "add_full_attention_sink_bias": True}, "sink_bias True is not served"),
        ({"model_type": "mimo_v2_flash", "hybrid_layer_pattern": [1, 0]}, "hybrid_layer_pattern .* is not served"),
        ({"model_type": "mimo_v2_flash", "num_key_value_heads": 4, "head_dim": 24}, "4: twice as many do not divide 4"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention is not served"),
        ({"model_type": "gemma2", "attn_logit_softcapping": 0}, "attn_logit_softcapping is 0, expected a number above"),
        ({"model_type": "laguna", "gating": False}, "gating False is not served"),
        ({"model_type": "laguna", "moe_router_logit_softcapping": 30.0}, "softcapping 30.0 is not served"),
        ({"model_type": "hy_v3", "route_norm": False}, "route_norm False is not served"),
        ({"model_type": "exaone_moe", "scoring_func": "softmax"}, "scoring_func 'softmax' is not served"),
        ({"model_type": "afmoe", "score_func": "softmax"}, "score_func 'softmax' is not served"),
        ({"model_type": "internlm3", "attention_bias": True}, "qkv_bias True with bias False is not served"),
        ({"model_type": "granitemoehybrid"}, "layer_types: none is attention"),
        (GRANITE_2 | {"layer_types": ["mamba", "sliding_attention"]}, "layer_types sliding_attention are not served"),
        (GRANITE_2 | {"layer_types": ["mamba", "attention"] * 2}, "layer_types has 4 layers, num_hidden_layers is 2"),
        (GRANITE_2 | {"mamba_n_groups": 3}, "mamba_n_groups .* 3 does not divide 4 heads"),
        (GRANITE_2 | {"mamba_d_head": 16}, "mamba_n_heads 4 of mamba_d_head 16 are not the 128 elements"),
        (GRANITE_2 | {"mamba_d_state": 0}, "mamba_d_state is 0, expected a number from 1"),
        (GRANITE_2 | {"mamba_d_head": "half"}, "mamba_d_head is 'half', expected auto or a number from 1"),
        (GRANITE_2 | {"time_step_limit": [0.1, "all"]}, "time_step_limit .* is not served"),
        (GRANITE_2 | {"time_step_limit": [0.2, 0.1]}, "time_step_limit .* is not served"),
        (GRANITE_2 | {"hidden_act": "gelu"}, "hidden_act 'gelu' is not served; 'silu' is"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-"}, "hybrid_override_pattern: none is attention"),
        (NEMOTRON_4 | {"hybrid_override_pattern": "*-*E"}, "hybrid_override_pattern: none is mamba"),
        (NEMOTRON_4 | {"hybrid_override_pattern": "M*|-"}, r"hybrid_override_pattern \\| are not served"),
        (NEMOTRON_4 | {"layers_block_type": ["mamba", "attention", "rwkv"]}, "layers_block_type rwkv are not served"),
        (NEMOTRON_4 | {"num_hidden_layers": 5}, "hybrid_override_pattern has 4 layers, num_hidden_layers is 5"),
        (NEMOTRON_4 | {"mlp_hidden_act": "silu"}, "mlp_hidden_act 'silu' is not served; 'relu2' is"),
        (NEMOTRON_4 | {"n_shared_experts": 2}, "n_shared_experts 2 is not served; 1 is"),
        (NEMOTRON_4 | {"residual_in_fp32": True}, "residual_in_fp32 True is not served"),
        (NEMOTRON_4 | {"attention_bias": True}, "attention_bias True is not served"),
        (NEMOTRON_4 | {"n_groups": 3, "mamba_num_heads": 4}, "n_groups.* 3 does not divide 4 heads"),
        (NEMOTRON_4 | {"conv_kernel": 0}, "conv_kernel is 0, expected a number from 1"),
        (
            NEMOTRON_4 | {"hybrid_override_pattern": "ME*-", "moe_latent_size": 8, "mlp_bias": True},
            "mlp_bias True is not served",
        ),
        (FALCON_2 | {"mlp_multipliers": [1.0]}, "mlp_multipliers has 1 numbers, expected 2"),
        (FALCON_2 | {"ssm_multipliers": [1.0, "2"]}, "ssm_multipliers is .*, expected a list of numbers"),
        (FALCON_2 | {"mamba_d_head": 16}, "mamba_n_heads 4 of mamba_d_head 16 are not the 96 elements"),
        (FALCON_2 | {"hidden_act": "gelu"}, "hidden_act 'gelu' is not served"),
        ({"model_type": "bamba", "attn_layer_indices": []}, "layer_types: none is attention"),
        ({"model_type": "bamba", "attn_layer_indices": ["1"]}, "attn_layer_indices is .* expected a number, or a list"),
        ({"model_type": "glm46v", "text_config": {"model_type": "glm"}}, "text_config: model_type 'glm'"),
        ({"hidden_act": "relu2"}, "hidden_act 'relu2' is not served"),
        ({"model_type": "iquestcoder", "use_sliding_window": True}, "use_sliding_window True is not served"),
        ({"text_config": {"quantization_config": {"quant_method": "aqlm"}}}, "quant_method 'aqlm' is not served"),
    ],
)
def test_features_that_are_not_served_are_named(folder, changes, words):
    edit(folder, **changes)
    with pytest.raises(ValueError, match=words):
        load(folder)


MAX_LENGTH = {"max_position_embeddings": 8192}
MINIMAL: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 64, "hidden_size": 1024, "vocab_size": 256}
MINIMAL |= {"intermediate_size": 48} | MAX_LENGTH
DEFAULT_LENGTH = [
    "deepseek_v32",
    "glm_moe_dsa",
    "dots1",
    "exaone4",
    "glm",
    "glm4",
    "glm4_moe_lite",
    "gpt_oss",
    "ministral3",
    "mistral4",
    "phi3",
]
DEFAULT_LENGTH += ["afmoe", "apertus", "cwm", "exaone4_5", "exaone_moe", "glm4v", "glm46v", "glm4v_moe", "granite_swa"]
DEFAULT_LENGTH += ["gemma", "gemma2", "nemotron", "starcoder2", "phimoe"]
DEFAULT_LENGTH += ["llama4", "llama4_text", "mimo_v2_flash"]
DEFAULT_LENGTH += ["bamba", "cohere2_moe", "falcon_h1", "hy_v3", "internlm3", "laguna", "mellum", "youtu"]
DEFAULT_LENGTH += ["lfm2", "lfm2_moe", "olmo_hybrid", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]
REQUIRED_FIELDS = dict.fromkeys(FAMILIES, set(MINIMAL)) | dict.fromkeys(DEFAULT_LENGTH, set(MINIMAL) - set(MAX_LENGTH))
REQUIRED_FIELDS |= dict.fromkeys(("gemma3", "gemma3_text", "gemma4", "gemma4_text"), set())
REQUIRED_FIELDS |= dict.fromkeys(
    ("llama4", "llama4_text", "phimoe"), set(MINIMAL) - {"intermediate_size", "max_position_embeddings"}
)
REQUIRED_FIELDS |= dict.fromkeys(
    ("solar_open", "qwen3_5_moe", "qwen3_5_moe_text"), set(MINIMAL) - {"intermediate_size"}
)
EXTRA_FIELDS = {"deepseek_v2": {"n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6}}
EXTRA_FIELDS["exaone4_5"] = {"model_type": "exaone4"}
EXTRA_FIELDS["granitemoehybrid"] = {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}
REQUIRED_FIELDS["nemotron_h"] = {"vocab_size", "hidden_size", "num_attention_heads"}
EXTRA_FIELDS["bamba"] = {"attn_layer_indices": [2]}
EXTRA_FIELDS["lfm2_moe"] = {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}
EXTRA_FIELDS["kimi_linear"] = {"num_hidden_layers": 5}
REQUIRED_FIELDS["kimi_linear"] = set(MINIMAL) - {"num_hidden_layers", "max_position_embeddings"}
EXTRA_FIELDS["deepseek_v2"] |= {"moe_intermediate_size": 1407}


def minimal_config(family: str) -> dict[str, Any]:
    """The smallest config.json of a family: fields are added as long as errors name a missing one."""
    fields: dict[str, Any] = dict(EXTRA_FIELDS.get(family, {}))
    config = {"text_config": fields} if family in VISION_CONFIGS else fields
    while True:
        try:
            read_spec({"model_type": family} | config)
        except ValueError as error:
            name = str(error).removeprefix("config.json has no ")
            assert name not in fields
            fields[name] = MINIMAL[name]
        else:
            return config


def resolved(config: dict[str, Any]) -> tuple[ModelSpec, list[tuple[list[float], float]]]:
    """(the spec without RoPE parameters, the RoPE frequencies of all layers), to compare two config.json files."""
    spec = read_spec(config)
    found = [frequencies(rope, spec.rope_dim, spec.max_model_len) for rope in spec.ropes]
    tied = spec.tied and config["model_type"] != "qwen3_vl_moe"  # transformers writes contradicting values
    plain = dataclasses.replace(spec, rope={}, layer_ropes=(), tied=tied)
    return plain, [(angles.tolist(), factor) for angles, factor in found]


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family):
    """Fields without a default are named in an error."""
    config = minimal_config(family)
    assert set(config.get("text_config", config)) - set(EXTRA_FIELDS.get(family, {})) == REQUIRED_FIELDS[family]
    known = "deepseek_v3" if family == "kimi_k2" else family
    require(known)
    theirs = AutoConfig.for_model(known, **copy.deepcopy(config)).to_dict()
    assert resolved({"model_type": family} | config) == resolved(theirs)


def test_a_multimodal_model_needs_a_text_config():
    with pytest.raises(ValueError, match="config.json has no text_config"):
        read_spec({"model_type": "mistral3"} | MINIMAL)


def test_mistral_4_has_no_factor_of_the_softmax_scale():
    """With the published RoPE parameters."""
    rope = {"type": "yarn", "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 128.0, "mscale": 1.0}
    rope |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 8192, "llama_4_scaling_beta": 0.1}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "max_position_embeddings": 1_048_576, "partial_rotary_factor": 0.5}
    sizes = {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64}
    spec = read_spec({"model_type": "mistral4", "rope_parameters": rope} | sizes | MINIMAL)
    assert spec.scale == 128**-0.5 and spec.attention.query_scaling == QueryScaling(0.1, 8192)
    assert frequencies(spec.rope, spec.rope_dim, spec.max_model_len)[1] == 1
    assert read_spec({"model_type": "mistral4"} | sizes | MINIMAL).scale == 128**-0.5


@pytest.mark.parametrize("pattern", [None, 4, "LLLG"])
def test_exaone_without_a_window_has_full_attention(pattern):
    spec = read_spec({"model_type": "exaone4", "sliding_window": None, "sliding_window_pattern": pattern} | MINIMAL)
    assert spec.windows == (None,) * 4 and spec.ropes == (spec.rope,) * 4


@pytest.mark.parametrize(
    ("stated", "chosen"),
    [
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "torch.float16"}, torch.float16),
        ({"torch_dtype": "float32"}, torch.bfloat16),
        ({"torch_dtype": "auto"}, torch.bfloat16),
        ({}, torch.bfloat16),
    ],
)
def test_dtype_on_a_gpu(stated, chosen):
    assert choose_dtype("auto", stated, torch.device("cuda", 0)) == chosen


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("meta-llama--Meta-Llama-3.1-8B", (131_072, 128, 8, 32)),
        ("meta-llama--Meta-Llama-3.1-70B", (131_072, 128, 8, 80)),
        ("mistralai--Mixtral-8x7B-v0.1", (32_768, 128, 8, 32)),
        ("Qwen2.5-7B-Instruct", (32_768, 128, 4, 28)),
        ("Qwen--Qwen3-0.6B", (40_960, 128, 8, 28)),
        ("Qwen--Qwen3-32B-FP8", (40_960, 128, 8, 64)),
        ("Qwen--Qwen3-30B-A3B", (40_960, 128, 4, 48)),
        ("deepseek-ai--DeepSeek-V3", (163_840, 576, 1, 61)),
        ("openai--gpt-oss-20b", (131_072, 64, 8, 24)),
    ],
)
def test_real_configs(shared_data, name, sizes):
    config = json.loads((shared_data / f"model_configs/{name}.json").read_text())
    spec = read_spec(config)
    assert (spec.max_model_len, spec.head_dim, spec.num_kv_heads, spec.num_layers) == sizes
    assert set(spec.windows) == ({128, None} if "gpt-oss" in name else {None})
