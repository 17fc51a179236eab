"""The decoder of all families: embed, attend, gate, project. It knows nothing of pages."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from radixrt.worker.model.checkpoint import Weights
from radixrt.worker.model.layers import Attend, NoNorm, Ops, TorchOps
from radixrt.worker.model.linear import Linear
from radixrt.worker.model.mlp import Mixture
from radixrt.worker.model.parallel import Group
from radixrt.worker.model.reading import Reader
from radixrt.worker.model.rope import frequencies
from radixrt.worker.model.scaled import Rounded
from radixrt.worker.model.sharding import Shard
from radixrt.worker.model.spec import ModelSpec


class Decoder:
    """Weights in one dtype on one device, and the forward pass over tokens of any number of sequences.

    `spec` is that of the whole model; of a `group` this rank has its part, which `Decoder.spec` describes."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        batch_invariant: bool = False,
        ops: Ops | None = None,
        group: Group | None = None,
    ) -> None:
        shard = group.shard if group else Shard()
        self.spec = shard.spec(spec)
        self.own_ids = shard.token_ids(spec.vocab_size)
        """Whose logits this rank computes."""
        self._ops = ops or TorchOps()
        self._group = group
        reader = Reader(spec, weights, batch_invariant, self._ops, group)
        self._embedding = reader.matrix("embed_tokens", spec.vocab_size, spec.hidden_size)
        self._layers = [reader.layer(i) for i in range(spec.num_layers)]
        self._norm = reader.norm("norm")
        self._head = Linear(reader.head(self._embedding), None, batch_invariant)
        self._positions = _Positions(spec, self._embedding.device)
        self._embedding_factor = float(torch.tensor(spec.embedding_factor, dtype=self.dtype))

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def sinks(self) -> tuple[torch.Tensor | None, ...]:
        """By layer: float32[heads] of this rank, or None (see `ModelSpec.sinks`)."""
        return tuple(layer.sinks for layer in self._layers)

    @property
    def wide_experts(self) -> bool:
        """Whether a layer has experts of 16 bits or more."""
        mixtures = (layer.mlp.experts for layer in self._layers if isinstance(layer.mlp, Mixture))
        return any(not (experts.narrow or experts.packed) for experts in mixtures)

    @property
    def narrow(self) -> bool:
        """Whether most of its weights are in FP8."""
        mlp = self._layers[-1].mlp
        return mlp.experts.narrow if isinstance(mlp, Mixture) else mlp.rounding is not None

    @property
    def own_width(self) -> int:
        """Of this rank's logits: `own_ids`, and on a last rank more behind, which mean nothing."""
        return len(self._head.weight)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float32 logits [S, vocab] of int tokens[T] at int positions[T], of those at `wanted` int64[S] or of all.

        Past its attention, the last layer is computed for what is wanted alone."""
        return self.gather(self.finish(*self.attend_all(tokens, positions, attend), wanted))

    def attend_all(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Up to the last layer's attention: what it gave (see `layers.Attend`), and the residual [T, hidden]."""
        residual = F.embedding(tokens, self._embedding)
        if self._embedding_factor != 1:
            residual *= self._embedding_factor
        turns = self._positions.turns(positions, residual.dtype)
        growth = self._positions.growth(positions, residual.dtype)
        x = self._layers[0].attention_norm(residual, self._ops)
        for number, layer in enumerate(self._layers):
            cos, sin = turns[self._positions.kinds[number]]
            heads = layer.heads.project(x, cos, sin, self._ops)
            if growth is not None:
                heads.scale_queries(growth)
            x = attend(number, heads)
            if number < len(self._layers) - 1:
                x = self._after_attention(number, x, residual)
        return x, residual

    def finish(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        wanted: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """After `attend_all`: float32[S, own_width], the logits of this rank's token ids; in `out` if that is given."""
        if wanted is not None:
            if not len(wanted):
                return torch.empty((0, self.own_width), device=x.device)
            x, residual = x[wanted], residual[wanted]
        logits = self._logits(self._after_attention(len(self._layers) - 1, x, residual), out)
        return logits if self.spec.logits_factor == 1 else logits.mul_(self.spec.logits_factor)

    def _after_attention(self, number: int, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor | Rounded:
        """The rest of a layer, which goes onto residual[T, hidden] in place; what the next one begins with."""
        layer, last = self._layers[number], number == len(self._layers) - 1
        norm = self._norm if last else self._layers[number + 1].attention_norm
        attended = layer.heads.gather(x)
        if layer.gate is not None:
            attended = layer.gate(attended, residual, self._ops)
        if self.spec.parallel:
            x = layer.mlp_norm(residual, self._ops)
            layer.output.add(attended, residual, NoNorm(), self._ops)
        else:
            x = layer.output.add(attended, residual, layer.mlp_norm, self._ops)
        return layer.mlp.add(x, residual, norm, self._ops)

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """float32[S, vocab] of what all ranks have of it, from `finish`."""
        if self._group is None:
            return logits
        if not len(logits):
            return logits.new_empty((0, self.spec.vocab_size))
        return self._group.gather(logits)[:, : self.spec.vocab_size]

    def _logits(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        if x.is_cuda and x.dtype.itemsize == 2 and self._head.batch_invariant:
            from radixrt.worker.cuda.invariant import product

            logits = product(x, self._head.weight, dtype=torch.float32)
            return logits if out is None else out.copy_(logits)
        if not x.is_cuda or x.dtype == torch.float32:
            logits = self._head(x).float()
            return logits if out is None else out.copy_(logits)
        if out is None:
            out = torch.empty((len(x), self.own_width), dtype=torch.float32, device=x.device)
        # In float32, for rounding to 8 bits makes ties.
        few = self._ops.few(x, self._head.weight, None, out)
        return few if few is not None else torch.ops.aten.mm.dtype_out(x, self._head.weight.t(), torch.float32, out=out)


class _Positions:
    """The rotations of a model: a few kinds, `kinds` by layer."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        known: list[dict[str, Any] | None] = []
        known.extend(rope for i, rope in enumerate(spec.ropes) if rope not in spec.ropes[:i])
        self.kinds = [known.index(rope) for rope in spec.ropes]
        found = [frequencies(rope, spec.rope_dim, spec.max_model_len) for rope in known]
        self._angles = [(angles.to(device), factor) for angles, factor in found]
        self._growth = spec.query_growth

    def turns(self, positions: torch.Tensor, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """By kind: cos and sin [T, 1, half of what is rotated] of int positions[T]."""
        found = []
        for angles, factor in self._angles:
            turn = positions[:, None, None].float() * angles
            found.append(((turn.cos() * factor).to(dtype), (turn.sin() * factor).to(dtype)))
        return found

    def growth(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """What queries at int positions[T] are times, [T, 1, 1] (see `ModelSpec.query_growth`)."""
        if self._growth is None:
            return None
        beta, tokens = self._growth
        return (1 + beta * torch.log(1 + positions.float().div(tokens).floor()))[:, None, None].to(dtype)
