"""StableLM: LayerNorms with biases, RoPE of a part of each head; StableLM 2 12b has norms of each head of q and k, and
attention and MLP behind one norm."""

from __future__ import annotations

import dataclasses
from typing import Any

from radixrt.worker.model.families.starcoder2 import NORMS
from radixrt.worker.model.spec.fields import common
from radixrt.worker.model.spec.spec import HeadNormsSpec, ModelSpec

DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 4096, "layer_norm_eps": 1e-5}
DEFAULTS |= {"partial_rotary_factor": 0.25}
"""Defaults of transformers for fields that config.json lacks."""
HEAD_NORMS = HeadNormsSpec(("q_layernorm", "k_layernorm"), per_head=True)


def spec(config: dict[str, Any]) -> ModelSpec:
    """With `use_parallel_residual`, attention and MLP have the same input."""
    config = DEFAULTS | config
    parallel = bool(config.get("use_parallel_residual"))
    return common(
        config | {"rms_norm_eps": config["layer_norm_eps"], "head_dim": None},
        partial_rotary=True,
        norms=dataclasses.replace(NORMS, before_mlp="input_layernorm") if parallel else NORMS,
        parallel=parallel,
        qkv_bias=bool(config.get("use_qkv_bias")),
        head_norms=HEAD_NORMS if config.get("qk_layernorm") else None,
    )
