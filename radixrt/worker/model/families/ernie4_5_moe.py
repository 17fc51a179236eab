"""ERNIE 4.5 with experts, selected by softmax with a load-balancing bias."""

from typing import Any

from radixrt.worker.model.families import ernie4_5
from radixrt.worker.model.spec.expert_spec import ExpertsSpec, Routing
from radixrt.worker.model.spec.fields import check_served, with_experts
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": None, "moe_intermediate_size": 1536}
DEFAULTS |= {"moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1}
DEFAULTS |= {"moe_layer_interval": 1, "moe_norm_min": 1e-12}
BIAS = "moe_statics.e_score_correction_bias"


def spec(config: dict[str, Any]) -> ModelSpec:
    """Every `moe_layer_interval`-th layer from `moe_layer_start_index` to `moe_layer_end_index` (-1: the last one) has
    experts. Routers are computed in float32. Multi-token prediction layers are ignored. `use_bias` is not served: in
    transformers, the head would have a bias, too."""
    check_served(config, {"use_bias": False})
    config = DEFAULTS | config
    inner, every = config["moe_intermediate_size"], config["moe_layer_interval"]
    first, last = config["moe_layer_start_index"], config["moe_layer_end_index"]
    last = config["num_hidden_layers"] - 1 if last == -1 else last
    experts = ExpertsSpec(
        count=config.get("moe_num_experts") or config.get("num_experts") or 64,
        top_k=config.get("moe_k") or config.get("num_experts_per_tok") or 6,
        intermediate_size=inner,
        normalized=True,
        layers=frozenset(i for i in range(config["num_hidden_layers"]) if (i + 1) % every == 0 and first <= i <= last),
        bias=(BIAS, f"gate.{BIAS}"),
        routing=Routing(biased=True, float32_logits=True, float32_weight=True, min_weight_sum=config["moe_norm_min"]),
        shared_size=inner * config["moe_num_shared_experts"],
        bias_is_row=True,
    )
    return with_experts(ernie4_5.spec(config), experts)
