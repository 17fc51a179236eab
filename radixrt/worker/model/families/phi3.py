"""Phi-3, 3.5, 4 and 4 mini: q, k and v are stored as one matrix, gate and up as another; LongRoPE."""

from typing import Any

from radixrt.worker.model.spec.fields import common
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"original_max_position_embeddings": 4096, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
OTHER_NAMES = ("su", "yarn")
"""Names of LongRoPE in older files."""


def spec(config: dict[str, Any]) -> ModelSpec:
    """Every layer has the window `sliding_window`, or none if that is null."""
    config = DEFAULTS | config
    for name in ("rope_scaling", "rope_parameters"):
        rope = dict(config.get(name) or {})
        if rope.get("rope_type", rope.get("type")) in OTHER_NAMES:
            config[name] = rope | {"rope_type": "longrope"}
    windows = (config.get("sliding_window"),) * config["num_hidden_layers"]
    return common(config, partial_rotary=True, windows=windows, fused_qkv=True, fused_gate_up=True)
