"""Qwen2-VL: only its language model."""

from typing import Any

from radixrt.worker.model.families import qwen2
from radixrt.worker.model.spec.fields import text_config
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_window_layers": 80}
DEFAULTS |= {"max_position_embeddings": 32_768}


def spec(config: dict[str, Any]) -> ModelSpec:
    """For text, the three positions of M-RoPE are the same, which makes it RoPE. `head_dim` is ignored."""
    text = DEFAULTS | text_config(config) | {"head_dim": None}
    for name in ("rope_scaling", "rope_parameters"):
        rope = dict(text.get(name) or {})
        if rope.get("rope_type", rope.get("type")) == "mrope":
            text[name] = rope | {"rope_type": "default"}
    return qwen2.spec(text)
