"""Norms: of hidden states, in plain torch and by fused kernels, and of heads of q and k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from radixrt.worker.model.layers import _cpu_kernels
from radixrt.worker.model.layers.cpu import for_kernels
from radixrt.worker.model.layers.fp8 import Activations, Fp8Scaling
from radixrt.worker.model.layers.rope import rotate


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, mean: torch.Tensor | None = None) -> torch.Tensor:
    """RMSNorm (arXiv 1910.07467) over the last dimension, in float32. `mean`: the mean of squares, if known. The weight
    is multiplied in its own dtype, that of x or float32."""
    if mean is None and for_kernels(x, weight) and weight.shape == x.shape[-1:]:
        x, weight, width = x.contiguous(), weight.contiguous(), x.shape[-1]
        out = torch.empty_like(x)
        _cpu_kernels.norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps, 1)
        return out
    wide = x.float()
    mean = wide.square().mean(-1, keepdim=True) if mean is None else mean
    return (weight * (wide * torch.rsqrt(mean + eps)).to(weight.dtype)).to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """LayerNorm (arXiv 1607.06450) over the last dimension, in float32; with a float32 weight, rounded once."""
    wide = x.float()
    out = rms_norm(wide - wide.mean(-1, keepdim=True), weight, eps)
    return (out if bias is None else out + bias).to(x.dtype)


class NormOps(Protocol):
    """The part of `ops.Ops` that norms of hidden states need."""

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        fp8_scaling: Fp8Scaling | None = None,
        centered: bool = False,
        bias: torch.Tensor | None = None,
    ) -> Activations:
        """RMSNorm of x[T, H], or LayerNorm if `centered`, maybe with a bias [H]. The weight [H] and the bias have the
        dtype of x, or float32 (see `NormsSpec.float32_weight`)."""

    def add_normed(
        self,
        x: torch.Tensor,
        after: Norm,
        residual: torch.Tensor,
        norm: Norm | NoNorm,
        scalar: torch.Tensor | None = None,
    ) -> Activations:
        """Add the norm `after` of x[T, H] to residual[T, H], and then multiply that by scalar[1], if given, both in
        place. Returns the `norm` of the new residual."""


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm, or LayerNorm if `centered`. `fp8_scaling`: how the result is quantized, as its consumer wants."""

    weight: torch.Tensor
    eps: float
    fp8_scaling: Fp8Scaling | None
    centered: bool = False
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, ops: NormOps) -> Activations:
        return ops.norm(x, self.weight, self.eps, self.fp8_scaling, self.centered, self.bias)


@dataclass(frozen=True, slots=True)
class NoNorm:
    """The identity, for models without a norm in some place."""

    def __call__(self, x: torch.Tensor, ops: NormOps) -> torch.Tensor:
        return x


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """The norm of each head of q, or of k."""

    weight: torch.Tensor
    """[D], or [heads, D]: of each head."""
    eps: float
    centered: bool
    """LayerNorm, not RMSNorm."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Of x[T, heads, D]."""
        if self.centered:
            return layer_norm(x, self.weight, None, self.eps)
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of heads that kernels which store K and V cannot compute."""

    q: HeadNorm
    k: HeadNorm
    after_rope: bool

    def apply(
        self, qkv: torch.Tensor, num_heads: int, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalize q and k of qkv[T, heads + 2 kv_heads, D] in place. Returns cos and sin of the rotation that is left
        to do: by 0 if norms come after RoPE."""
        kv_heads = (qkv.shape[1] - num_heads) // 2
        for heads, norm in zip(qkv.split((num_heads, kv_heads, kv_heads), dim=1), (self.q, self.k), strict=False):
            heads.copy_(norm(rotate(heads, cos, sin) if self.after_rope else heads))
        return (torch.ones_like(cos), torch.zeros_like(sin)) if self.after_rope else (cos, sin)
