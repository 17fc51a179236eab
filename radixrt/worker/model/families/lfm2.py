"""LFM2: most layers have a gated short convolution, the others attention with norms of q and k."""

from typing import Any

from radixrt.worker.model.spec.delta_spec import ShortConvSpec
from radixrt.worker.model.spec.fields import common
from radixrt.worker.model.spec.norms_spec import NormsSpec
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 128_000, "norm_eps": 1e-5, "rope_theta": 1e6}
DEFAULTS |= {"tie_word_embeddings": True, "conv_bias": False, "conv_L_cache": 3}
FEED_FORWARD = {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256}
NORMS = NormsSpec(before_attention="operator_norm", before_mlp="ffn_norm")
OTHER_NAMES: tuple[tuple[str, str], ...] = (("model.norm.", "model.embedding_norm."), (".o_proj", ".out_proj"))
OTHER_NAMES += ((".q_norm.", ".q_layernorm."), (".k_norm.", ".k_layernorm."))
OTHER_NAMES += tuple(
    (f".mlp.{name}_proj", f".feed_forward.{stored}") for name, stored in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
)
CONV, FULL = "conv", "full_attention"


def spec(config: dict[str, Any]) -> ModelSpec:
    """Without `layer_types`, the layers in `full_attn_idxs` have attention, and without that all layers. With
    `block_auto_adjust_ff_dim`, the intermediate size is two thirds of what config.json says, times a factor, rounded
    up."""
    config = FEED_FORWARD | config
    size = config.get("block_ff_dim") or config["intermediate_size"]
    if config["block_auto_adjust_ff_dim"]:
        size = int(2 * size / 3)
        if (factor := config["block_ffn_dim_multiplier"]) is not None:
            size = -(-int(factor * size) // config["block_multiple_of"]) * config["block_multiple_of"]
    layers = range(config["num_hidden_layers"])
    attention = config.get("full_attn_idxs")
    kinds = config.get("layer_types") or [FULL if attention is None or i in attention else CONV for i in layers]
    return with_convolutions(config | {"layer_types": kinds, "intermediate_size": size})


def with_convolutions(config: dict[str, Any]) -> ModelSpec:
    """The model whose layers are of the kinds that `layer_types` says, without experts."""
    config = DEFAULTS | config
    kinds, layers = config["layer_types"], config["num_hidden_layers"]
    if others := sorted(set(kinds) - {CONV, FULL}):
        raise ValueError(f"layer_types {', '.join(others)} are not served; {CONV} and {FULL} are")
    if FULL not in kinds:
        raise ValueError(f"layer_types: none is {FULL}")
    if len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} layers, num_hidden_layers is {layers}")
    convolutions = ShortConvSpec(
        layers=frozenset(i for i, kind in enumerate(kinds) if kind == CONV),
        channels=config["hidden_size"],
        kernel=config["conv_L_cache"],
        bias=bool(config["conv_bias"]),
    )
    tied = config.get("tie_embedding", config["tie_word_embeddings"])
    return common(
        config | {"tie_word_embeddings": tied, "rms_norm_eps": config["norm_eps"], "hidden_act": "silu"},
        qk_norm=True,
        norms=NORMS,
        recurrent=convolutions if convolutions.layers else None,
        other_names=OTHER_NAMES,
    )
