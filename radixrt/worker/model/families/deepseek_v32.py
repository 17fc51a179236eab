"""DeepSeek V3.2: DeepSeek V3 with DeepSeek Sparse Attention."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from radixrt.worker.model.families.deepseek_v2 import DEFAULTS, latent_decoder, with_routed_experts
from radixrt.worker.model.families.deepseek_v3 import ROUTED, sigmoid_routing
from radixrt.worker.model.spec.fields import check_served, moe_layers
from radixrt.worker.model.spec.index_spec import IndexSpec
from radixrt.worker.model.spec.spec import ModelSpec

INDEXED = {"index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048, "max_position_embeddings": 163_840}
"""Defaults of transformers for fields that config.json lacks, beside those of DeepSeek V3."""


def spec(config: dict[str, Any]) -> ModelSpec:
    """Multi-token prediction layers are ignored."""
    config = DEFAULTS | ROUTED | INDEXED | config
    return sparse_decoder(config, range(config["num_hidden_layers"]), interleaved=False)


def sparse_decoder(config: dict[str, Any], indexers: range | list[int], interleaved: bool) -> ModelSpec:
    """A spec of a complete config, with an indexer in the layers `indexers`. `interleaved`: see `IndexSpec`."""
    check_served(config, {"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    spec = latent_decoder(config, bool(config["rope_interleave"]))
    assert spec.latent is not None
    spec = dataclasses.replace(
        spec, latent=dataclasses.replace(spec.latent, index=_index(config, tuple(indexers), interleaved))
    )
    layers = moe_layers(config, config["first_k_dense_replace"])
    return with_routed_experts(spec, config, sigmoid_routing(config), bool(config["norm_topk_prob"]), layers)


def _index(config: Mapping[str, Any], layers: tuple[int, ...], interleaved: bool) -> IndexSpec:
    sizes = {name: config[name] for name in ("index_n_heads", "index_head_dim", "index_topk")}
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} is {value!r}, expected a number from 1")
    if not config["q_lora_rank"]:
        raise ValueError("q_lora_rank null is not served with an indexer, whose queries are projected from that latent")
    if sizes["index_head_dim"] < config["qk_rope_head_dim"]:
        raise ValueError(f"index_head_dim {sizes['index_head_dim']} is less than qk_rope_head_dim")
    rotation = bool(config.get("indexer_rope_interleave", interleaved))
    heads, dim, top_k = sizes.values()
    return IndexSpec(heads, dim, top_k, rotation, layers)
