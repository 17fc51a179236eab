"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): one more layer, which guesses the token after
the next one. It drafts tokens (see `speculative.mtp_cost`).

    decoder     token 0 .. i-1  ->  hidden[i-1]  ->  logits of token i

    x[i] = projection(norm_e(embedding(token i)), norm_h(hidden[i-1]))
    guess[i] = norm(layer(x[0] .. x[i]))         head(guess[i]): logits of token i+1

`hidden` are the decoder's hidden states after its final norm. To guess further, guess[i] takes the place of hidden[i].
Embedding and head are the decoder's; copies of them in a checkpoint are ignored, and so are further such layers.

The layer's K and V at position i depend on tokens 0 to i alone, as those of all other layers do, and are kept in the
same pages. (Other implementations count one position less: the layer only sees differences of positions.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from radixrt.worker.model.layers.fp8 import plain
from radixrt.worker.model.layers.layers import DecoderLayer
from radixrt.worker.model.layers.linear import Product
from radixrt.worker.model.layers.mixers import Attend, Attention, Projected
from radixrt.worker.model.layers.norms import Norm
from radixrt.worker.model.layers.ops import Ops
from radixrt.worker.model.spec.spec import ModelSpec, with_features
from radixrt.worker.model.weights.checkpoint import INDEX, SINGLE, read_json
from radixrt.worker.model.weights.weight_loader import WeightLoader

NUMBERED = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
"""Families whose checkpoints have it as one more layer, after all others."""
APART = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""Families whose checkpoints have it under names of its own, OTHER_NAMES."""
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Fields of config.json with the number of such layers. Qwen3-Next's files have none, and there is one layer."""
OTHER_NAMES = (
    ("enorm", "pre_fc_norm_embedding"),
    ("hnorm", "pre_fc_norm_hidden"),
    ("eh_proj", "fc"),
    ("shared_head.norm", "norm"),
)


@dataclass(frozen=True, slots=True)
class Predictor:
    """The layer's weights, and what it shares with the decoder. In all methods, `hidden` [T, hidden] are the states
    before int tokens[T] at int positions[T]."""

    token_norm: Norm
    hidden_norm: Norm
    projection: Product
    """[hidden, 2 hidden], of the normalized embedding and then the normalized hidden state."""
    layer: DecoderLayer
    norm: Norm
    number: int
    """Its place among the layers with attention: the last one."""
    embed: Callable[[torch.Tensor], torch.Tensor]
    rotations: Callable[[torch.Tensor, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]]
    """`Positions.rotations`: it has the RoPE of the decoder's last layer."""
    ops: Ops

    def guess(
        self, tokens: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """[T, hidden], of which `Decoder.logits` makes those of what follows the tokens."""
        residual, heads = self._project(tokens, positions, hidden)
        return plain(self.layer.finish(attend(self.number, heads), residual, self.norm, self.ops))

    def store(
        self, tokens: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor,
        write: Callable[[int, Projected], object],
    ) -> None:  # fmt: skip
        """Only `write` K and V of the tokens, which need no attention."""
        write(self.number, self._project(tokens, positions, hidden)[1])

    def _project(
        self, tokens: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, Projected]:
        """(The layer's residual stream, the input of its attention.)"""
        both = self.token_norm(self.embed(tokens), self.ops), self.hidden_norm(hidden, self.ops)
        residual, layer = self.projection(torch.cat([plain(x) for x in both], dim=1)), self.layer
        cos, sin = self.rotations(positions, residual.dtype)[layer.place.rope]
        assert isinstance(layer.mixer, Attention)
        return residual, layer.mixer.project(layer.attention_norm(residual, self.ops), cos, sin, self.ops)


def has_predictor(config: Mapping[str, Any]) -> bool:
    """Whether models of this config.json have such a layer that is served, if its tensors are there."""
    counts = [config[name] for name in COUNTS if config.get(name) is not None]
    return config.get("model_type") in (*NUMBERED, *APART) and counts[:1] != [0]


def is_stored(folder: Path) -> bool:
    """Whether a checkpoint has tensors of such a layer: some are published without."""
    names = set(read_json(folder / INDEX).get("weight_map") or {})
    if (folder / SINGLE).is_file():
        with (
            suppress(SafetensorError, OSError),
            safe_open(folder / SINGLE, "pt") as file,
        ):  # loading names what is wrong
            names = set(file.keys())
    return any(name.endswith((".eh_proj.weight", "mtp.fc.weight")) for name in names)


def with_predictor(spec: ModelSpec, config: Mapping[str, Any]) -> ModelSpec:
    """The same model with its layer for multi-token prediction. ValueError if it has none that is served."""
    family = config.get("model_type")
    if family not in (*NUMBERED, *APART):
        raise ValueError(
            f"speculative_algorithm: no multi-token prediction is served for models of type {family}, only for "
            f"{', '.join((*NUMBERED, *APART))}"
        )
    if not has_predictor(config):
        raise ValueError("speculative_algorithm: by its config.json the model has no layer for multi-token prediction")
    return dataclasses.replace(spec, predicts=True)


def reading_spec(spec: ModelSpec) -> ModelSpec:
    """The spec by which `WeightLoader` reads the layer: that of a decoder which it is the last layer of. It has full
    attention, and experts if other layers have any."""
    number = spec.num_layers
    at, experts = f"model.layers.{number}.", spec.experts
    names = [(at + name, f"mtp.{other}") for name, other in OTHER_NAMES]
    return with_features(
        spec,
        predicts=False,
        num_layers=number + 1,
        windows=(*spec.windows, None),
        experts=experts and dataclasses.replace(experts, layers=experts.layers | {number}),
        other_names=(*spec.stored.other_names, *names, (at, "mtp.layers.0.")),
    )


def read_predictor(
    reader: WeightLoader, spec: ModelSpec, embed: Callable[[torch.Tensor], torch.Tensor],
    rotations: Callable[[torch.Tensor, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]], ops: Ops,
) -> Predictor:  # fmt: skip
    """Read the layer of a model's `spec` by a reader of its `reading_spec`. ValueError if the checkpoint lacks it."""
    at, hidden = f"layers.{spec.num_layers}.", spec.hidden_size
    try:
        token_norm = reader.norm(at + "enorm")
    except ValueError as error:
        raise ValueError(f"speculative_algorithm mtp: {error}") from error
    return Predictor(
        token_norm=token_norm,
        hidden_norm=reader.norm(at + "hnorm"),
        projection=reader.projection(at + "eh_proj", hidden, 2 * hidden),
        layer=reader.layer(spec.num_layers),
        norm=reader.norm(at + "shared_head.norm"),
        number=len(spec.attention_layers) - 1,
        embed=embed,
        rotations=rotations,
        ops=ops,
    )
