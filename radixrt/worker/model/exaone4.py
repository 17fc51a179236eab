"""EXAONE 4: norms only after attention and MLP; where some layers have windows, only they know positions."""

from __future__ import annotations

import dataclasses
from typing import Any

from radixrt.worker.model import olmo2
from radixrt.worker.model.spec import ModelSpec, common, layer_kinds, layer_windows, rope_parameters

NORMS = dataclasses.replace(olmo2.NORMS, wide=False)
DEFAULTS = {"sliding_window": 4096, "sliding_window_pattern": 4, "rms_norm_eps": 1e-5}
DEFAULTS |= {"num_key_value_heads": 32, "max_position_embeddings": 2048}
"""Of transformers, in place of what a file leaves out."""


def spec(config: dict[str, Any], **features: Any) -> ModelSpec:
    """By `layer_types`, or every `sliding_window_pattern`-th layer attends to all; all do where there is no
    `sliding_window`. Each head of q and k is normalized. `features` are a successor's."""
    config = DEFAULTS | config
    every, windowed = config["sliding_window_pattern"], config["sliding_window"] is not None
    if windowed and not config.get("layer_types") and not (isinstance(every, int) and every > 0):
        raise ValueError(f"sliding_window_pattern {every!r} is not served without layer_types; a number is")
    kinds = layer_kinds(config, every if windowed else 1)
    rope = rope_parameters(config)
    own = {
        "qk_norm": True,
        "norms": NORMS,
        "windows": layer_windows(config | {"layer_types": kinds}),
        "layer_ropes": tuple(None if windowed and kind == "full_attention" else rope for kind in kinds),
    }
    return common(config, **own | features)
