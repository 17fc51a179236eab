"""The operations of layers that have fused kernels on a GPU (`Ops`), and their reference in plain torch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional as F

from radixrt.worker.model.layers.cpu import GATES, for_kernels, fused_gate
from radixrt.worker.model.layers.fp8 import (
    Activations,
    Fp8Activations,
    Fp8Scaling,
    Fp8Weight,
    plain,
    quantize_activations,
)
from radixrt.worker.model.layers.int4 import Int4, Int4Ops
from radixrt.worker.model.layers.linear import Linear, LinearOps
from radixrt.worker.model.layers.moe import ExpertOps, Experts
from radixrt.worker.model.layers.norms import NoNorm, Norm, NormOps, layer_norm, rms_norm
from radixrt.worker.model.lora.lora import LoraOps, Rows, Stack, add_by_adapter
from radixrt.worker.model.spec.spec import CLAMPED_SWIGLU


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate), with gate clamped to at most `limit` and up to [-limit, limit] (gpt-oss;
    transformers, `GptOssExperts`)."""
    limit, alpha = CLAMPED_SWIGLU
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * (gate * torch.sigmoid(alpha * gate))


_ACTIVATIONS = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_pytorch_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "clamped_swiglu": _clamped_swiglu,
}


class Ops(LinearOps, Int4Ops, LoraOps, NormOps, ExpertOps, Protocol):
    """Operations with fused kernels on a GPU (`cuda.ops`); `TorchOps` computes them in plain torch. Each kind of layer
    says which ones it needs."""

    def mean_squares(self, qkv: torch.Tensor, num_heads: int, kv_heads: int) -> torch.Tensor:
        """float32[T, 2]: for each token of qkv[T, heads + 2 kv_heads, D], the mean of the squares of all elements of q,
        and that of k."""


class TorchOps:
    """The reference implementation of Ops."""

    @staticmethod
    def norm(
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        fp8_scaling: Fp8Scaling | None = None,
        centered: bool = False,
        bias: torch.Tensor | None = None,
    ) -> Activations:
        out = layer_norm(x, weight, bias, eps) if centered else rms_norm(x, weight, eps)
        return out if fp8_scaling is None else quantize_activations(out, fp8_scaling)

    @staticmethod
    def add_normed(
        x: torch.Tensor,
        after: Norm,
        residual: torch.Tensor,
        norm: Norm | NoNorm,
        scalar: torch.Tensor | None = None,
    ) -> Activations:
        residual.add_(plain(after(x, TorchOps())))
        if scalar is not None:
            residual.mul_(scalar)
        return norm(residual, TorchOps())

    @staticmethod
    def gate(
        x: torch.Tensor, activation: str, fp8_scaling: Fp8Scaling | None = None, up: torch.Tensor | None = None
    ) -> Activations:
        if up is None and fp8_scaling is None and activation in GATES and for_kernels(x) and not x.shape[-1] % 32:
            return fused_gate(x, activation == "gelu_pytorch_tanh")
        gate, up = x.chunk(2, dim=-1) if up is None else (x, up)
        out = _ACTIVATIONS[activation](gate, up)
        return out if fp8_scaling is None else quantize_activations(out, fp8_scaling)

    @staticmethod
    def squared_relu(x: torch.Tensor, fp8_scaling: Fp8Scaling | None = None) -> Activations:
        out = x.relu_().square_()
        return out if fp8_scaling is None else quantize_activations(out, fp8_scaling)

    @staticmethod
    def scaled(
        x: Activations,
        weight: Fp8Weight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        known = x if isinstance(x, Fp8Activations) else quantize_activations(x, weight.fp8_scaling)
        out = F.linear(known.dequantized(), weight.dequantized(), None if bias is None else bias.float())
        return out.to(dtype) if residual is None else residual.add_(out)

    @staticmethod
    def small_linear(*_: object) -> None:
        """Torch's product is always used."""

    @staticmethod
    def gated_linear(*_: object) -> None:
        """The product and `gate` are always separate."""

    @staticmethod
    def int4_linear(
        x: torch.Tensor,
        weight: Int4,
        bias: torch.Tensor | None,
        batch_invariant: bool,
        out: torch.Tensor | None = None,
        add: bool = False,
    ) -> torch.Tensor:
        made = Linear(weight.dequantized().to(x.dtype), bias, batch_invariant)(x)
        return made if out is None else out.add_(made) if add else out.copy_(made)

    @staticmethod
    def lora(
        x: torch.Tensor, stack: Stack, rows: Rows, out: torch.Tensor, factor: float, batch_invariant: bool
    ) -> None:
        add_by_adapter(x, stack, rows, out, factor, batch_invariant)

    @staticmethod
    def experts(
        experts: Experts, x: torch.Tensor, residual: torch.Tensor, for_router: torch.Tensor | None = None
    ) -> None:  # fmt: skip
        experts.one_by_one(x, residual, TorchOps(), for_router)

    @staticmethod
    def mean_squares(qkv: torch.Tensor, num_heads: int, kv_heads: int) -> torch.Tensor:
        q, k, _ = qkv.float().square().split((num_heads, kv_heads, kv_heads), dim=1)
        return torch.stack((q.flatten(1).mean(1), k.flatten(1).mean(1)), dim=1)
