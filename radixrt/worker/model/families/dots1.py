"""dots.llm1: attention as in Qwen3, experts as in DeepSeek V3."""

from typing import Any

from radixrt.worker.model.families.deepseek_v2 import with_routed_experts
from radixrt.worker.model.families.deepseek_v3 import sigmoid_routing
from radixrt.worker.model.spec.fields import common, layer_windows
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"sliding_window": 4096, "max_window_layers": 62, "num_key_value_heads": 32}
DEFAULTS |= {"max_position_embeddings": 2048}


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without `layer_types`, layers from `max_window_layers` on have the window `sliding_window`."""
    config = DEFAULTS | config
    plain = common(config, qk_norm=True, attention_bias=True, windows=layer_windows(config))
    return with_routed_experts(plain, config, sigmoid_routing(config), bool(config.get("norm_topk_prob")))
