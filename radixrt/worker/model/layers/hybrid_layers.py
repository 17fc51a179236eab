"""Models whose checkpoints count mixers and MLPs as layers of their own, each with a norm before it (Nemotron-H).

    checkpoint:   M   -   M   -   M   *   -   M   -   -        M: Mamba-2   *: attention   -: an MLP, or experts
    decoder:     (M   -) (M   -) (M) (*   -) (M   -) (-)

A mixer and the MLP that follows it are one layer of the decoder. A layer without an MLP has `layers.NoMlp`, one without
a mixer has `mixers.NoMixer` and `layers.NoOutput`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from radixrt.worker.model.spec.spec import ModelSpec
from radixrt.worker.model.weights.weights import Renamed, Weights

HybridLayers = tuple[tuple[int | None, int | None], ...]
"""See `ModelSpec.hybrid_layers`."""
NORMS = "input_layernorm", "post_attention_layernorm"
PATTERN = re.compile(rf"^model\.layers\.(\d+)\.(?:(self_attn\.|mamba\.|{NORMS[0]})|(mlp\.|{NORMS[1]}))(.*)")
"""Of the name of a mixer's or an MLP's tensor, in other models."""
OTHERS = (("model.embed_tokens.", "model.embeddings."), ("model.norm.", "model.norm_f."))


def paired(mixes: Iterable[bool]) -> HybridLayers:
    """By layer of the decoder: the numbers of its mixer and of its MLP in the checkpoint, given which of the
    checkpoint's layers are mixers."""
    pairs: list[tuple[int | None, int | None]] = []
    for number, is_mixer in enumerate(mixes):
        if is_mixer:
            pairs.append((number, None))
        elif pairs and pairs[-1][1] is None:
            pairs[-1] = pairs[-1][0], number
        else:
            pairs.append((None, number))
    return tuple(pairs)


def turn(blocks: HybridLayers, layer: int, place: int) -> int:
    """On several ranks, the buffer of the sum after a layer's mixer (`place` 0) or its MLP (1): both buffers are used
    in turn (see `parallel.group.Group`). The last layer begins with the first one, as `Decoder` makes the number of
    sums before it even."""
    own = blocks[layer]
    number = own[place]
    assert number is not None
    first = 0 if layer < len(blocks) - 1 else min(n for n in own if n is not None)
    return (number - first) % 2


def odd_sums(blocks: HybridLayers) -> tuple[bool, bool]:
    """Whether the sums before the last layer, and those in it, are odd in number."""
    counts = [sum(number is not None for number in own) for own in blocks]
    return sum(counts[:-1]) % 2 == 1, counts[-1] % 2 == 1 if counts else False


class HybridLayerNames(Renamed):
    """The tensors of such a checkpoint by the names that they have in other models."""

    def __init__(self, weights: Weights, spec: ModelSpec) -> None:
        super().__init__(weights, (("model.", "backbone."), *spec.stored.other_names))
        self._blocks = spec.hybrid_layers

    def _name(self, name: str) -> str:
        return super()._name(self._of_block(name))

    def renamed(self, name: str) -> str:
        return super().renamed(self._of_block(name))

    def _of_block(self, name: str) -> str:
        """The name of a tensor of a mixer or an MLP among the checkpoint's layers."""
        if (match := PATTERN.match(name)) is not None:
            layer, mixer, mlp, rest = match.groups()
            number = self._blocks[int(layer)][0 if mixer else 1]
            inner = "mixer." if (mixer or mlp).endswith(".") else "norm"
            name = f"model.layers.{number}.{inner}{rest}"
        for own, stored in OTHERS:
            name = name.replace(own, stored)
        return name


def named(weights: Weights, spec: ModelSpec) -> Weights:
    """The weights of a model by the names of its decoder's layers."""
    return HybridLayerNames(weights, spec) if spec.hybrid_layers else weights
