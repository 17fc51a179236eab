"""Hunyuan A13B: Hunyuan with experts in every layer."""

from typing import Any

from radixrt.worker.model.families import hunyuan_v1_dense
from radixrt.worker.model.spec.expert_spec import ExpertsSpec
from radixrt.worker.model.spec.fields import check_served, with_experts
from radixrt.worker.model.spec.spec import ModelSpec

SERVED = {"use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
SERVED |= {"group_limited_greedy": False}


def spec(config: dict[str, Any]) -> ModelSpec:
    """`intermediate_size` is that of an expert, and of the shared expert. Fields that may be lists, by layer, must be
    the same for all layers."""
    check_served(config, SERVED)
    inner = config["intermediate_size"]
    served = {"moe_intermediate_size": inner, "num_shared_expert": 1}
    check_served({name: _uniform(config, name) for name in served if name in config}, served)
    experts = ExpertsSpec(
        count=_uniform(config, "num_experts") or config.get("num_local_experts") or 1,
        top_k=_uniform(config, "moe_topk") or config.get("num_experts_per_tok") or 1,
        intermediate_size=inner,
        normalized=True,
        layers=frozenset(range(config["num_hidden_layers"])),
        router="gate.wg",
        shared_size=inner,
        shared="shared_mlp",
    )
    return with_experts(hunyuan_v1_dense.spec(config), experts)


def _uniform(config: dict[str, Any], name: str) -> int | None:
    """The value of a field that may be a list by layer. ValueError if layers differ."""
    value: Any = config.get(name)
    values: list[Any] = value if isinstance(value, list) and value else [value]
    if any(x != values[0] for x in values) or not (value is None or type(values[0]) is int):
        raise ValueError(f"{name} {value!r} is not served; the same number for all layers is")
    found: int | None = values[0]
    return found
