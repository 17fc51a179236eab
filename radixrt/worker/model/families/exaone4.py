"""EXAONE 4: norms after attention and MLP instead of before; with sliding windows, only layers with them have RoPE."""

import dataclasses
from typing import Any

from radixrt.worker.model.families import olmo2
from radixrt.worker.model.spec.fields import common, layer_kinds, layer_windows, rope_parameters
from radixrt.worker.model.spec.spec import ModelSpec

NORMS = dataclasses.replace(olmo2.NORMS, float32_weight=False)
DEFAULTS = {"sliding_window": 4096, "sliding_window_pattern": 4, "rms_norm_eps": 1e-5}
DEFAULTS |= {"num_key_value_heads": 32, "max_position_embeddings": 2048}


def spec(config: dict[str, Any], **features: Any) -> ModelSpec:
    """Without `layer_types`, every `sliding_window_pattern`-th layer has full attention; without `sliding_window`, all
    have. `features`: other fields of ModelSpec, for derived families."""
    config = DEFAULTS | config
    every, has_windows = config["sliding_window_pattern"], config["sliding_window"] is not None
    if has_windows and not config.get("layer_types") and not (isinstance(every, int) and every > 0):
        raise ValueError(f"sliding_window_pattern {every!r} is not served without layer_types; a number is")
    kinds = layer_kinds(config, every if has_windows else 1)
    rope = rope_parameters(config)
    fields: dict[str, Any] = {
        "qk_norm": True,
        "norms": NORMS,
        "windows": layer_windows(config | {"layer_types": kinds}),
        "layer_ropes": tuple(None if has_windows and kind == "full_attention" else rope for kind in kinds),
    }
    return common(config, **fields | features)
