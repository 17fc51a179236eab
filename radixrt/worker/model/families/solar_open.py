"""Solar Open: GLM-4.5 with experts in every layer, and RoPE of whole heads."""

from typing import Any

from radixrt.worker.model.families import glm4_moe
from radixrt.worker.model.spec.fields import check_served
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 1e6, "moe_intermediate_size": 1280}
SERVED = {"first_k_dense_replace": 0, "use_qk_norm": False, "partial_rotary_factor": 1.0}


def spec(config: dict[str, Any]) -> ModelSpec:
    """`intermediate_size` may be missing, since no layer is dense."""
    check_served(config, SERVED)
    config = DEFAULTS | SERVED | config
    return glm4_moe.spec({"intermediate_size": config["moe_intermediate_size"]} | config)
