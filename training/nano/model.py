"""The model in training: a Llama over examples that stand one after the other in one row of tokens.

RMSNorm, rotary positions, grouped queries, SwiGLU, embeddings tied. Weights of all layers are one tensor a kind,
[layers, out, in], so that the optimizer has few of them, in large pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """The default has 12.2M parameters."""

    vocab: int = 2048
    width: int = 384
    layers: int = 8
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    hidden: int = 896
    theta: float = 100_000.0
    positions: int = 8192
    eps: float = 1e-5

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


QUICK = Shape(width=128, layers=4, heads=2, kv_heads=1, hidden=320)

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""q, k, v: [T, heads, head_dim]; starts: int32[n + 1]; the longest example -> [T, heads, head_dim]."""


def attend_flash(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """On a GPU, by the flash attention in PyTorch; its autograd formula is PyTorch's."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return torch.ops.aten._flash_attention_forward(q, k, v, starts, starts, longest, longest, 0.0, True, False)[0]


def attend_each(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Anywhere: example after example."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    sizes = starts.diff().tolist()
    parts = zip(*(x.transpose(0, 1).split(sizes, 1) for x in (q, k, v)), strict=True)
    each = [F.scaled_dot_product_attention(*(x[None] for x in part), is_causal=True)[0] for part in parts]
    return torch.cat(each, 1).transpose(0, 1)


def check_flash(shape: Shape, device: torch.device) -> float:
    """The largest difference of `attend_flash` from `attend_each`, of outputs and gradients. RuntimeError if they do
    not agree."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = (shape.heads, shape.kv_heads, shape.kv_heads)
    draw = [torch.randn(700, n, shape.head_dim, device=device, generator=generator) for n in sizes]
    inputs = [x.bfloat16().requires_grad_() for x in draw]
    starts = torch.tensor([0, 3, 300, 301, 700], dtype=torch.int32, device=device)
    found = []
    for attend in (attend_flash, attend_each):
        out = attend(*inputs, starts, 399)
        found.append([out, *torch.autograd.grad(out.float().square().sum(), inputs)])
    worst = max((a - b).abs().max().item() / b.abs().max().item() for a, b in zip(*found, strict=True))
    if not worst < 0.03:
        raise RuntimeError(f"flash attention differs from the reference by {worst:.3g}")
    return worst


class Model(nn.Module):
    """`dtype`: of what is computed; the weights are float32."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32, attend: Attention = attend_each) -> None:
        super().__init__()
        self.shape, self.dtype, self.attend = shape, dtype, attend
        width, layers = shape.width, shape.layers
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.embedding = nn.Parameter(torch.randn(shape.vocab, width) * 0.02)
        self.attention_norm = nn.Parameter(torch.ones(layers, width))
        self.mlp_norm = nn.Parameter(torch.ones(layers, width))
        self.last_norm = nn.Parameter(torch.ones(width))
        self.q, self.k, self.v = (_matrices(layers, out, width) for out in (queries, keys, keys))
        self.gate, self.up = (_matrices(layers, shape.hidden, width) for _ in range(2))
        self.o = nn.Parameter(torch.zeros(layers, width, queries))
        self.down = nn.Parameter(torch.zeros(layers, width, shape.hidden))
        self.register_buffer("angles", _angles(shape), persistent=False)
        self.before, self.after, self.head = before, after, head

    def matrices(self) -> list[nn.Parameter]:
        return [self.q, self.k, self.v, self.o, self.gate, self.up, self.down]

    def compile(self) -> None:
        """Three functions that all layers share: seconds, not minutes."""
        self.before, self.after, self.head = (torch.compile(f, dynamic=False) for f in (before, after, head))

    def forward(self, tokens: Tensor, positions: Tensor, starts: Tensor, longest: int) -> Tensor:
        """int64[T], int64[T], int32[n + 1] -> the last layer's output, before its norm."""
        shape = self.shape
        x = F.embedding(tokens, self.embedding).to(self.dtype)
        rotation = self.angles[positions]
        layers = zip(
            *(w.unbind(0) for w in (self.attention_norm, self.q, self.k, self.v)),
            *(w.unbind(0) for w in (self.o, self.mlp_norm, self.gate, self.up, self.down)),
            strict=True,
        )
        for norm, q, k, v, o, *mlp in layers:
            mixed = self.before(x, norm, q, k, v, rotation, shape.head_dim, shape.eps)
            attended = self.attend(*mixed, starts, longest)
            x = self.after(x, attended, o, *mlp, shape.eps)
        return x

    def losses(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """float32[T]: the cross-entropy of each target; bool[T]: whether it is the likeliest."""
        return self.head(x, self.last_norm, self.embedding, targets, self.shape.eps)

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(_norm(x, self.last_norm, self.shape.eps), self.embedding.to(x.dtype)).float()


def before(
    x: Tensor, norm: Tensor, q: Tensor, k: Tensor, v: Tensor, rotation: Tensor, head_dim: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, [T, heads, head_dim], rotated."""
    mixed = F.linear(_norm(x, norm, eps), torch.cat([q, k, v]).to(x.dtype)).unflatten(-1, (-1, head_dim))
    heads, kv_heads = q.shape[0] // head_dim, k.shape[0] // head_dim
    queries, keys, values = mixed.split([heads, kv_heads, kv_heads], 1)
    return _rotate(queries, rotation), _rotate(keys, rotation), values.contiguous()


def after(
    x: Tensor, attended: Tensor, o: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor, eps: float
) -> Tensor:
    x = x + F.linear(attended.flatten(1), o.to(x.dtype))
    gated, raised = F.linear(_norm(x, norm, eps), torch.cat([gate, up]).to(x.dtype)).chunk(2, -1)
    return x + F.linear(F.silu(gated) * raised, down.to(x.dtype))


def head(x: Tensor, norm: Tensor, embedding: Tensor, targets: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    logits = F.linear(_norm(x, norm, eps), embedding.to(x.dtype)).float()
    return F.cross_entropy(logits, targets, reduction="none"), logits.detach().argmax(-1) == targets


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """rotation: float32[T, 2, head_dim / 2], cosines and sines; halves are rotated as Llama's are."""
    cos, sin = rotation[:, None, 0], rotation[:, None, 1]
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _angles(shape: Shape) -> Tensor:
    """float32[positions, 2, head_dim / 2]."""
    frequencies = shape.theta ** (-torch.arange(0, shape.head_dim, 2).double() / shape.head_dim)
    angles = torch.arange(shape.positions).double()[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()], 1).float()


def _matrices(layers: int, out: int, width: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(layers, out, width) * (0.5 / math.sqrt(width)))
