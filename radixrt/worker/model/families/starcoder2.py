"""StarCoder2: LayerNorms and projections with biases, MLPs without a gate, sliding windows."""

from typing import Any

from radixrt.worker.model.spec.fields import common
from radixrt.worker.model.spec.norms_spec import NormsSpec
from radixrt.worker.model.spec.spec import ModelSpec

NORMS = NormsSpec(float32_weight=True, centered=True, bias=True)
DEFAULTS: dict[str, Any] = {"num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh"}
DEFAULTS |= {"max_position_embeddings": 4096, "norm_epsilon": 1e-5, "use_bias": True, "tie_word_embeddings": True}
OTHER_NAMES = ((".mlp.up_proj.", ".mlp.c_fc."), (".mlp.down_proj.", ".mlp.c_proj."))


def spec(config: dict[str, Any]) -> ModelSpec:
    """Every layer has the window `sliding_window`, or none if that is null."""
    config = DEFAULTS | config
    bias = bool(config["use_bias"])
    return common(
        config | {"rms_norm_eps": config["norm_epsilon"]},
        windows=(config.get("sliding_window"),) * config["num_hidden_layers"],
        norms=NORMS,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        ungated=True,
        other_names=OTHER_NAMES,
    )
