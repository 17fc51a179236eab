"""OLMo 3: OLMo 2 with sliding windows in three of four layers, where RoPE is not scaled."""

from typing import Any

from radixrt.worker.model.families import olmo2
from radixrt.worker.model.spec.fields import layer_kinds, layer_windows, rope_parameters, ropes_by_kind
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"sliding_window": 4096, "rope_theta": 5e5}


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without `layer_types`, layers 3, 7, 11, ... have full attention."""
    config = DEFAULTS | config
    config["layer_types"] = layer_kinds(config, 4)
    by_kind = ropes_by_kind(config | {"rope_local_base_freq": config["rope_theta"]})  # ignores Gemma's field
    return olmo2.spec(
        by_kind["full_attention"],
        windows=layer_windows(config),
        layer_ropes=tuple(rope_parameters(by_kind[kind]) for kind in config["layer_types"]),
    )
