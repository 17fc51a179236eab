"""Granite 4: Mamba-2 mixers in most layers or in none; dense, or with experts."""

import dataclasses
from typing import Any

from radixrt.worker.model.families import granite
from radixrt.worker.model.families.granitemoeshared import with_shared
from radixrt.worker.model.spec.fields import check_served
from radixrt.worker.model.spec.mamba_spec import linear_layers, read_mamba
from radixrt.worker.model.spec.spec import ModelSpec, with_features

OTHER_NAMES = ((".mlp.gate_up_proj", ".shared_mlp.input_linear"), (".mlp.down_proj", ".shared_mlp.output_linear"))


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without experts (`num_local_experts` 0), the MLP is what would be the shared expert. ValueError if no layer is
    attention; without `layer_types`, none is."""
    check_served(config, {"hidden_act": "silu"})
    kinds = config.get("layer_types") or config.get("layers_block_type") or ["mamba"] * config["num_hidden_layers"]
    mamba = read_mamba(config, linear_layers(kinds, config))
    positions = config.get("position_embedding_type")
    shared = config.get("shared_intermediate_size", 1024)
    config = config | {"mlp_bias": False, "shared_intermediate_size": shared}
    if experts := config.get("num_local_experts", 8):
        plain = with_shared(granite.spec(config), config | {"num_local_experts": experts})
    else:
        plain = granite.spec(config | {"intermediate_size": shared})
        plain = with_features(plain, fused_gate_up=True, other_names=OTHER_NAMES)
    plain = dataclasses.replace(plain, recurrent=mamba)
    return plain if positions == "rope" else dataclasses.replace(plain, layer_ropes=(None,) * plain.num_layers)
