"""Shapes of known models, to be served with random weights.   python -m bench.shapes FOLDER [SHAPE]"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "eos_token_id": 128001,
    "bos_token_id": 128000,
}
"""Llama 3.1 8B."""

LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
"""Llama 3.1 and 3.3 70B."""

QWEN3_30B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "tie_word_embeddings": False,
    "eos_token_id": 151645,
    "bos_token_id": 151643,
}
"""Qwen3 30B A3B."""

DEEPSEEK_V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
}
"""DeepSeek V2 Lite, by its sizes."""

DEEPSEEK_V32 = DEEPSEEK_V2_LITE | {
    "model_type": "deepseek_v32",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_hidden_layers": 5,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "vocab_size": 129280,
    "rope_scaling": DEEPSEEK_V2_LITE["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""DeepSeek V3.2: 5 of its 61 layers, of which 2 have experts, which fit on one GPU in bfloat16."""

GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "quantization_config": {"quant_method": "mxfp4"},
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "eos_token_id": 200002,
}
"""gpt-oss 20b; `--quantization none` multiplies its experts out."""

GEMMA3_12B = {
    "model_type": "gemma3_text",
    "hidden_size": 3840,
    "intermediate_size": 15360,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 8,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
"""Gemma 3 12B, its text."""


GEMMA4_E4B = {
    "model_type": "gemma4_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 42,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 18,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 512,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 7,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "final_logit_softcapping": 30.0,
    "vocab_size": 262144,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
"""Gemma 4 E4B, its text: the last 18 layers read K and V of earlier ones, and each layer has inputs of its own."""

GEMMA4_26B = GEMMA4_E4B | {
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 5,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}
"""Gemma 4 26B A4B, its text: experts beside an MLP in every layer."""


QWEN35_9B = {
    "model_type": "qwen3_5_text",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "eos_token_id": 248044,
}
"""Qwen3.5 9B, its text: three of four layers have linear attention."""


NEMOTRON_H_8B = {
    "model_type": "nemotron_h",
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "vocab_size": 131072,
    "max_position_embeddings": 32768,
    "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Nemotron-H 8B: 24 layers with Mamba-2, 4 with attention, 24 MLPs without gates; with a longer context."""


def sized(
    family: str, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int, vocab: int, **others: Any
) -> dict[str, Any]:
    """A model of another family or size, without windows."""
    sizes = {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "pad_token_id": 0,
    }
    return LLAMA_8B | {"max_position_embeddings": 32768, "head_dim": hidden // heads} | sizes | others


TIED = {"tie_word_embeddings": True}

AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}}
GLM_47_FLASH: dict[str, Any] = {
    "model_type": "glm4_moe_lite",
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "num_nextn_predict_layers": 1,
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "rope_theta": 1000000.0,
    "eos_token_id": 154820,
    "bos_token_id": 154820,
}
"""GLM 4.7 Flash, with its layer for multi-token prediction."""

SHAPES = {
    "glm-4.7-flash": GLM_47_FLASH,
    "llama-8b": LLAMA_8B,
    "llama-8b-awq": LLAMA_8B | AWQ,
    "qwen3-30b-awq": QWEN3_30B | AWQ,
    "llama-70b": LLAMA_70B,
    "qwen3-30b": QWEN3_30B,
    "deepseek-v2-lite": DEEPSEEK_V2_LITE,
    "deepseek-v32-5-layers": DEEPSEEK_V32,
    "gpt-oss-20b": GPT_OSS_20B,
    "gemma3-12b": GEMMA3_12B,
    "gemma4-e4b": GEMMA4_E4B,
    "gemma4-26b": GEMMA4_26B,
    "qwen3.5-9b": QWEN35_9B,
    "nemotron-h-8b": NEMOTRON_H_8B,
    "qwen2.5-0.5b": sized("qwen2", 24, 896, 4864, 14, 2, 151936, **TIED),
    "llama-1b": sized("llama", 16, 2048, 8192, 32, 8, 128256, **TIED),
    "llama-3b": sized("llama", 28, 3072, 8192, 24, 8, 128256, **TIED),
    "phi3-mini": sized("phi3", 32, 3072, 8192, 32, 32, 32064, bos_token_id=1, eos_token_id=2),
    "qwen3-4b": sized("qwen3", 36, 2560, 9728, 32, 8, 151936, head_dim=128, **TIED),
    "olmo2-7b": sized("olmo2", 32, 4096, 11008, 32, 32, 100352, bos_token_id=1, eos_token_id=2),
    "qwen2.5-7b": sized("qwen2", 28, 3584, 18944, 28, 4, 152064),
    "qwen2.5-14b": sized("qwen2", 48, 5120, 13824, 40, 8, 152064),
    "mixtral-8x7b": sized("mixtral", 32, 4096, 14336, 32, 8, 32000, bos_token_id=1, eos_token_id=2)
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
}

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[sys.argv[2] if len(sys.argv) > 2 else "llama-8b"], indent=1))
