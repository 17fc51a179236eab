"""Phi-1, 1.5 and 2: attention and MLP behind one LayerNorm, biases everywhere, RoPE of a part of each head."""

from __future__ import annotations

import dataclasses
from typing import Any

from radixrt.worker.model.families.starcoder2 import NORMS
from radixrt.worker.model.spec.fields import common
from radixrt.worker.model.spec.spec import HeadNormsSpec, ModelSpec

DEFAULTS = {"hidden_act": "gelu_new", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5}
DEFAULTS |= {"partial_rotary_factor": 0.5}
"""Defaults of transformers for fields that config.json lacks."""
HEAD_NORMS = HeadNormsSpec(("q_layernorm", "k_layernorm"), bias=True)
OTHER_NAMES = (("model.norm.", "model.final_layernorm."), (".o_proj.", ".dense."))
OTHER_NAMES += ((".up_proj.", ".fc1."), (".down_proj.", ".fc2."))


def spec(config: dict[str, Any]) -> ModelSpec:
    """The output projection has a bias, too."""
    config = DEFAULTS | config
    return common(
        config | {"rms_norm_eps": config["layer_norm_eps"]},
        partial_rotary=True,
        norms=dataclasses.replace(NORMS, before_mlp="input_layernorm"),
        parallel=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
        ungated=True,
        head_norms=HEAD_NORMS if config.get("qk_layernorm") else None,
        other_names=OTHER_NAMES,
    )
