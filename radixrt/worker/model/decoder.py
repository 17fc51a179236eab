"""The decoder of all dense families: embed, attend, gate, project. It knows nothing of pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from radixrt.worker.model.checkpoint import Weights
from radixrt.worker.model.rope import frequencies, rotate
from radixrt.worker.model.spec import ModelSpec

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q[T, heads, D], k[T, kv_heads, D], v[T, kv_heads, D]) -> [T, heads, D]; stores k and v first."""

_ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


ROWS = 16
"""Rows of every product when results must not depend on the batch: a product rounds by its shape."""


@dataclass(frozen=True, slots=True)
class Linear:
    """`batch_invariant`: a row's result is the same to the last bit whatever the other rows are."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    batch_invariant: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.batch_invariant:
            return F.linear(x, self.weight, self.bias)
        tiles = F.pad(x, (0, 0, 0, -len(x) % ROWS)).split(ROWS)
        return torch.cat([F.linear(tile, self.weight, self.bias) for tile in tiles])[: len(x)]


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer; q, k and v are one matrix, gate and up another."""

    attention_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Weights in one dtype on one device, and the forward pass over tokens of any number of sequences."""

    def __init__(self, spec: ModelSpec, weights: Weights, batch_invariant: bool = False) -> None:
        self.spec = spec
        reader = _Reader(spec, weights, batch_invariant)
        self._embedding = reader.matrix("embed_tokens", spec.vocab_size, spec.hidden_size)
        self._layers = [reader.layer(i) for i in range(spec.num_layers)]
        self._norm = reader.vector("norm", spec.hidden_size)
        head = self._embedding if spec.tied else weights.load("lm_head.weight", self._embedding.shape)
        self._head = Linear(head, None, batch_invariant)
        angles, self._rope_factor = frequencies(spec.rope, spec.head_dim)
        self._angles = angles.to(self._embedding.device)
        self._activate = _ACTIVATIONS[spec.activation]

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Hidden states [T, hidden] of int64 tokens[T] at int64 positions[T]."""
        x = F.embedding(tokens, self._embedding)
        turn = positions[:, None, None].float() * self._angles
        cos = (turn.cos() * self._rope_factor).to(x.dtype)
        sin = (turn.sin() * self._rope_factor).to(x.dtype)
        for number, layer in enumerate(self._layers):
            x = x + self._attention(number, layer, self._normed(x, layer.attention_norm), cos, sin, attend)
            x = x + self._mlp(layer, self._normed(x, layer.mlp_norm))
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32[S, vocab] of hidden states [S, hidden]."""
        x = self._normed(hidden, self._norm)
        if x.is_cuda and x.dtype != torch.float32 and not self._head.batch_invariant:
            return torch.mm(x, self._head.weight.t(), out_dtype=torch.float32)  # rounding to 8 bits makes ties
        return self._head(x).float()

    def _attention(
        self, number: int, layer: Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        spec = self.spec
        heads = layer.qkv(x).view(len(x), -1, spec.head_dim)
        q, k, v = heads.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)
        mixed = attend(number, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return layer.output(mixed.reshape(len(x), -1))

    def _mlp(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(x).chunk(2, dim=-1)
        return layer.down(self._activate(gate) * up)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm (arXiv 1910.07467) in float32, over the last dimension."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.spec.norm_eps)
        return weight * wide.to(x.dtype)


class _Reader:
    """Takes a decoder's tensors, by the names transformers gives them, from a checkpoint."""

    def __init__(self, spec: ModelSpec, weights: Weights, batch_invariant: bool) -> None:
        self._spec = spec
        self._weights = weights
        self._batch_invariant = batch_invariant

    def matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        return self._weights.load(f"model.{name}.weight", (rows, columns))

    def vector(self, name: str, size: int) -> torch.Tensor:
        return self._weights.load(f"model.{name}.weight", (size,))

    def linear(self, names: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool) -> Linear:
        """Several projections of one input as one, their rows in that order."""
        parts = list(zip(names, rows, strict=True))
        weight = torch.cat([self.matrix(name, size, columns) for name, size in parts])
        biases = [self._weights.load(f"model.{name}.bias", (size,)) for name, size in parts] if bias else None
        return Linear(weight, torch.cat(biases) if biases else None, self._batch_invariant)

    def layer(self, number: int) -> Layer:
        spec, at, mlp = self._spec, f"layers.{number}.self_attn.", f"layers.{number}.mlp."
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        hidden, inner = spec.hidden_size, spec.intermediate_size
        return Layer(
            attention_norm=self.vector(f"layers.{number}.input_layernorm", hidden),
            qkv=self.linear((at + "q_proj", at + "k_proj", at + "v_proj"), (q, kv, kv), hidden, spec.qkv_bias),
            q_norm=self.vector(at + "q_norm", spec.head_dim) if spec.qk_norm else None,
            k_norm=self.vector(at + "k_norm", spec.head_dim) if spec.qk_norm else None,
            output=self.linear((at + "o_proj",), (hidden,), q, spec.output_bias),
            mlp_norm=self.vector(f"layers.{number}.post_attention_layernorm", hidden),
            gate_up=self.linear((mlp + "gate_proj", mlp + "up_proj"), (inner, inner), hidden, spec.mlp_bias),
            down=self.linear((mlp + "down_proj",), (hidden,), inner, spec.mlp_bias),
        )
