"""The decoder of all families: embed, attend, gate, project. It knows nothing of pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional as F

from radixrt.worker.model.checkpoint import Weights
from radixrt.worker.model.linear import Linear, stack
from radixrt.worker.model.moe import Experts, read_experts
from radixrt.worker.model.rope import frequencies, rotate
from radixrt.worker.model.scaled import Rounded, Rounding, Scaled, ScaledLinear, rounded, stack_scaled
from radixrt.worker.model.spec import ModelSpec

_ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class Ops(Protocol):
    """What is fused on a GPU (`cuda.kernels`), and here in plain torch."""

    def norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding | None = None
    ) -> torch.Tensor | Rounded:
        """RMSNorm of x[T, H]; rounded, if asked for."""

    def gate(self, x: torch.Tensor, activation: str, rounding: Rounding | None = None) -> torch.Tensor | Rounded:
        """act(first half) * second half of x[T, 2 I]: [T, I]; rounded, if asked for."""

    def scaled(
        self,
        x: torch.Tensor | Rounded,
        weight: Scaled,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x[T, K], which is rounded first if it is not yet, times the weight, plus bias[N], in `dtype`; added to
        residual[T, N] in place, if that is given."""

    def experts(self, experts: Experts, x: torch.Tensor, residual: torch.Tensor) -> None:
        """Add what a mixture of experts makes of x[T, hidden] to residual[T, hidden], in place."""


class TorchOps:
    """The reference of what is fused."""

    @staticmethod
    def norm(
        x: torch.Tensor, weight: torch.Tensor, eps: float, rounding: Rounding | None = None
    ) -> torch.Tensor | Rounded:
        """RMSNorm (arXiv 1910.07467) in float32, over the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        out = weight * wide.to(x.dtype)
        return out if rounding is None else rounded(out, rounding)

    @staticmethod
    def gate(x: torch.Tensor, activation: str, rounding: Rounding | None = None) -> torch.Tensor | Rounded:
        gate, up = x.chunk(2, dim=-1)
        out = _ACTIVATIONS[activation](gate) * up
        return out if rounding is None else rounded(out, rounding)

    @staticmethod
    def scaled(
        x: torch.Tensor | Rounded,
        weight: Scaled,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        known = x if isinstance(x, Rounded) else rounded(x, weight.rounding)
        out = F.linear(known.wide(), weight.wide(), None if bias is None else bias.float())
        return out.to(dtype) if residual is None else residual.add_(out)

    @staticmethod
    def experts(experts: Experts, x: torch.Tensor, residual: torch.Tensor) -> None:
        experts.one_by_one(x, residual, TorchOps())


@dataclass(frozen=True, slots=True)
class Heads:
    """What a layer gives to its attention: the projections of T tokens, not yet normalized and rotated."""

    qkv: torch.Tensor
    """[T, heads + 2 kv_heads, D]."""
    num_heads: int
    norms: tuple[torch.Tensor, torch.Tensor] | None
    """Weights [D] of the RMSNorm of each head of q and of k, where a model has one."""
    eps: float
    cos: torch.Tensor
    """[T, 1, D / 2], and `sin` as well."""
    sin: torch.Tensor

    def split(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, heads, D], k and v [T, kv_heads, D], normalized and rotated."""
        kv_heads = (self.qkv.shape[1] - self.num_heads) // 2
        q, k, v = self.qkv.split((self.num_heads, kv_heads, kv_heads), dim=1)
        if self.norms is not None:
            q, k = TorchOps.norm(q, self.norms[0], self.eps), TorchOps.norm(k, self.norms[1], self.eps)
        return rotate(q, self.cos, self.sin), rotate(k, self.cos, self.sin), v


HEAD = "lm_head.weight"

Product = Linear | ScaledLinear

Attend = Callable[[int, Heads], torch.Tensor]
"""(layer, its heads) -> [T, heads, D]; stores k and v first."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """Gated; `gate_up` is one matrix, the rows of the gate first."""

    gate_up: Product
    down: Product
    activation: str

    @property
    def rounding(self) -> Rounding | None:
        """Of what it takes."""
        return self.gate_up.rounding

    def add(self, x: torch.Tensor | Rounded, residual: torch.Tensor, ops: Ops) -> None:
        """Add what it makes of x[T, hidden] to residual[T, hidden], in place."""
        self.down.add(ops.gate(self.gate_up(x), self.activation, self.down.rounding), residual)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; q, k and v are one matrix."""

    attention_norm: torch.Tensor
    qkv: Product
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    output: Product
    mlp_norm: torch.Tensor
    mlp: Mlp | Experts


class Decoder:
    """Weights in one dtype on one device, and the forward pass over tokens of any number of sequences."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, batch_invariant: bool = False, ops: Ops | None = None
    ) -> None:
        self.spec = spec
        self._ops = ops or TorchOps()
        reader = _Reader(spec, weights, batch_invariant, self._ops)
        self._embedding = reader.matrix("embed_tokens", spec.vocab_size, spec.hidden_size)
        self._layers = [reader.layer(i) for i in range(spec.num_layers)]
        self._norm = reader.vector("norm", spec.hidden_size)
        self._head = Linear(reader.head(self._embedding), None, batch_invariant)
        angles, self._rope_factor = frequencies(spec.rope, spec.head_dim)
        self._angles = angles.to(self._embedding.device)

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float32 logits [S, vocab] of int tokens[T] at int positions[T], of those at `wanted` int64[S] or of all; in
        `out` where that is given.

        Past its attention, the last layer is computed for what is wanted alone."""
        return self.finish(*self.attend_all(tokens, positions, attend), wanted, out)

    def attend_all(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Up to the last layer's attention: what it gave, [T, heads, D], and the residual stream [T, hidden]."""
        ops, eps = self._ops, self.spec.norm_eps
        residual = F.embedding(tokens, self._embedding)
        turn = positions[:, None, None].float() * self._angles
        cos = (turn.cos() * self._rope_factor).to(residual.dtype)
        sin = (turn.sin() * self._rope_factor).to(residual.dtype)
        for number, layer in enumerate(self._layers):
            qkv = layer.qkv(ops.norm(residual, layer.attention_norm, eps, layer.qkv.rounding))
            heads = qkv.view(len(residual), -1, self.spec.head_dim)
            x = attend(number, Heads(heads, self.spec.num_heads, layer.head_norms, eps, cos, sin))
            if number < len(self._layers) - 1:
                self._after_attention(layer, x, residual)
        return x, residual

    def finish(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        wanted: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The rest of `forward` after `attend_all`."""
        if wanted is not None:
            if not len(wanted):
                return torch.empty((0, self.spec.vocab_size), device=x.device)
            x, residual = x[wanted], residual[wanted]
        self._after_attention(self._layers[-1], x, residual)
        return self._logits(self._ops.norm(residual, self._norm, self.spec.norm_eps), out)

    def _after_attention(self, layer: Layer, x: torch.Tensor, residual: torch.Tensor) -> None:
        layer.output.add(x.flatten(1), residual)
        x = self._ops.norm(residual, layer.mlp_norm, self.spec.norm_eps, layer.mlp.rounding)
        layer.mlp.add(x, residual, self._ops)

    def _logits(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        if x.is_cuda and x.dtype.itemsize == 2 and self._head.batch_invariant:
            from radixrt.worker.cuda.invariant import product

            logits = product(x, self._head.weight, dtype=torch.float32)
            return logits if out is None else out.copy_(logits)
        if not x.is_cuda or x.dtype == torch.float32:
            logits = self._head(x).float()
            return logits if out is None else out.copy_(logits)
        if out is None:
            out = torch.empty((len(x), self.spec.vocab_size), dtype=torch.float32, device=x.device)
        # In float32, for rounding to 8 bits makes ties.
        return torch.ops.aten.mm.dtype_out(x, self._head.weight.t(), torch.float32, out=out)


class _Reader:
    """Takes a decoder's tensors, by the names transformers gives them, from a checkpoint."""

    def __init__(self, spec: ModelSpec, weights: Weights, batch_invariant: bool, ops: Ops) -> None:
        self._spec = spec
        self._weights = weights
        self._batch_invariant = batch_invariant
        self._ops = ops

    def matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        return self._weights.load(f"model.{name}.weight", (rows, columns))

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self._weights.load(f"model.{name}.weight", (size,))

    def head(self, embedding: torch.Tensor) -> torch.Tensor:
        """The output projection. A tied one may be stored again, and counts if it differs: the flag is often stale."""
        if self._spec.tied and HEAD not in self._weights:
            return embedding
        head = self._weights.load(HEAD, embedding.shape)
        return embedding if self._spec.tied and torch.equal(head, embedding) else head

    def linear(self, names: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool) -> Product:
        """Several projections of one input as one, their rows in that order."""
        parts = list(zip(names, rows, strict=True))
        biases = [self._weights.load(f"model.{name}.bias", (size,)) for name, size in parts] if bias else None
        whole = torch.cat(biases) if biases else None
        if weight := self._scaled([(f"model.{name}.weight", (size, columns)) for name, size in parts]):
            return ScaledLinear(weight, whole, self._weights.dtype, self._ops)
        weight = stack([self.matrix(name, size, columns) for name, size in parts])
        return Linear(weight, whole, self._batch_invariant)

    def _scaled(self, parts: list[tuple[str, tuple[int, int]]]) -> Scaled | None:
        """Matrices as one in FP8; None where they are not kept so."""
        found = []
        for name, shape in parts:
            if (part := self._weights.scaled(name, shape)) is None:
                return None
            found.append(part)
        return stack_scaled(found)

    def layer(self, number: int) -> Layer:
        spec, at = self._spec, f"layers.{number}.self_attn."
        q, kv, hidden = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.hidden_size
        norms = None
        if spec.qk_norm:
            norms = self.vector(at + "q_norm", spec.head_dim), self.vector(at + "k_norm", spec.head_dim)
        return Layer(
            attention_norm=self.vector(f"layers.{number}.input_layernorm", hidden),
            qkv=self.linear((at + "q_proj", at + "k_proj", at + "v_proj"), (q, kv, kv), hidden, spec.qkv_bias),
            head_norms=norms,
            output=self.linear((at + "o_proj",), (hidden,), q, spec.output_bias),
            mlp_norm=self.vector(f"layers.{number}.post_attention_layernorm", hidden),
            mlp=self.mlp(number),
        )

    def mlp(self, number: int) -> Mlp | Experts:
        spec, at = self._spec, f"layers.{number}.mlp."
        if spec.experts is not None and number in spec.experts.layers:
            return read_experts(spec, self._weights, number, self._batch_invariant)
        inner, hidden = spec.intermediate_size, spec.hidden_size
        return Mlp(
            gate_up=self.linear((at + "gate_proj", at + "up_proj"), (inner, inner), hidden, spec.mlp_bias),
            down=self.linear((at + "down_proj",), (hidden,), inner, spec.mlp_bias),
            activation=spec.activation,
        )
