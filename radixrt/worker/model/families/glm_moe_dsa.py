"""GLM-5: DeepSeek V3.2 with other sizes. Some layers attend to the tokens that the indexer of a layer before them has
selected (arXiv 2603.12201)."""

from typing import Any

from radixrt.worker.model.families import deepseek_v2, deepseek_v3, deepseek_v32
from radixrt.worker.model.spec.spec import ModelSpec

DEFAULTS: dict[str, Any] = deepseek_v2.DEFAULTS | deepseek_v3.ROUTED | deepseek_v32.INDEXED
DEFAULTS |= {"q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1}
DEFAULTS |= {"rms_norm_eps": 1e-5, "max_position_embeddings": 202_752, "index_n_heads": 32}


def spec(config: dict[str, Any]) -> ModelSpec:
    """Multi-token prediction layers are ignored."""
    config = DEFAULTS | config
    return deepseek_v32.sparse_decoder(config, _indexers(config), interleaved=True)


def _indexers(config: dict[str, Any]) -> list[int]:
    """The layers with an indexer of their own. `indexer_types` or `index_topk_pattern` name each layer's kind; without
    them it is every `index_topk_freq`-th layer from `index_skip_topk_offset` - 1 on, and those before."""
    layers = range(config["num_hidden_layers"])
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    if kinds:
        if len(kinds) != len(layers):
            raise ValueError(f"the kinds of indexers are {len(kinds)}, num_hidden_layers is {len(layers)}")
        indexers = [layer for layer in layers if kinds[layer] in ("full", "F")]
        if any(kind not in ("full", "F", "shared", "S") for kind in kinds) or layers and indexers[:1] != [0]:
            raise ValueError(f"indexers of the kinds {kinds} are not served; full, and then full or shared are")
        return indexers
    every, offset = max(config.get("index_topk_freq") or 1, 1), config.get("index_skip_topk_offset", 2)
    return [layer for layer in layers if max(layer - offset + 1, 0) % every == 0]
