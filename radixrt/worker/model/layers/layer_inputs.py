"""What Gemma 3n and 4 do at the end of each layer: they add to the residual stream what a small embedding of the token,
of the layer's own, says about it (per-layer embeddings), and scale it.

    inputs[i] = (norm(projection(embedding) / sqrt(hidden)) + layer_embedding[token] sqrt(size)) / sqrt(2)
    residual += norm(back(act(gate(residual)) * inputs[i]));     residual *= scalar
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from radixrt.worker.model.layers.fp8 import Activations, plain
from radixrt.worker.model.layers.linear import Linear
from radixrt.worker.model.layers.norms import NoNorm, Norm
from radixrt.worker.model.layers.ops import Ops


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The inputs of all layers."""

    embedding: torch.Tensor
    """[vocab, layers * size]."""
    projection: Linear
    """Of hidden states, to [layers * size]."""
    norm: Norm
    size: int

    def __call__(self, tokens: torch.Tensor, embedded: torch.Tensor, ops: Ops, first: int = 0) -> torch.Tensor:
        """[T, layers, size], of the layers from `first` on, for int tokens[T] and their embeddings [T, hidden]."""
        begin, product = first * self.size, self.projection
        factor = float(torch.tensor(self.size**0.5, dtype=embedded.dtype))  # not on a GPU, whose graphs cannot have it
        own = (F.embedding(tokens, self.embedding)[:, begin:] * factor).unflatten(1, (-1, self.size))
        part = Linear(product.weight[begin:], None, product.batch_invariant)
        made = part(embedded) * embedded.shape[1] ** -0.5
        return (plain(self.norm(made.view(-1, self.size), ops)).view_as(own) + own) * math.sqrt(0.5)


@dataclass(frozen=True, slots=True)
class LayerEnd:
    """The end of one layer."""

    scalar: torch.Tensor
    """[1]."""
    gate: Linear | None = None
    """None, as `back` and `norm`: there are no inputs of layers."""
    back: Linear | None = None
    norm: Norm | None = None
    activation: str = ""

    def apply(self, residual: torch.Tensor, inputs: torch.Tensor | None, norm: Norm | NoNorm, ops: Ops) -> Activations:
        """Change residual[T, hidden] in place; returns the `norm` of the new one. `inputs` [T, size] are those of this
        layer."""
        if self.gate is None or self.back is None or self.norm is None:
            return norm(residual.mul_(self.scalar), ops)
        made = self.back(ops.gate(self.gate(residual), self.activation, up=inputs))
        return ops.add_normed(made, self.norm, residual, norm, self.scalar)
