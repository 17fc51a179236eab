"""The operations of layers that have fused kernels on a GPU (`Ops`), and their reference in plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional as F

from radixrt.worker.model.layers.fp8 import Fp8Activations, Fp8Scaling, Fp8Weight, quantize_activations
from radixrt.worker.model.layers.int4 import Int4
from radixrt.worker.model.layers.linear import Linear
from radixrt.worker.model.layers.moe import Experts
from radixrt.worker.model.layers.norms import layer_norm, rms_norm
from radixrt.worker.model.lora.lora import Rows, Stack, add_by_adapter
from radixrt.worker.model.spec.spec import CLAMPED_SWIGLU

if TYPE_CHECKING:
    from radixrt.worker.model.layers.layers import NoNorm, Norm


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


class Ops(Protocol):
    """Operations with fused kernels on a GPU (`cuda.ops`); `TorchOps` computes them in plain torch.

    `fp8_scaling`: quantize the result to FP8 with scales of that kind; None: keep the dtype of x."""

    def norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        fp8_scaling: Fp8Scaling | None = None,
        centered: bool = False,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor | Fp8Activations:
        """RMSNorm of x[T, H], or LayerNorm if `centered`, maybe with a bias [H]. The weight [H] and the bias have the
        dtype of x, or float32 (see `NormsSpec.float32_weight`)."""

    def add_normed(
        self,
        x: torch.Tensor,
        after: Norm,
        residual: torch.Tensor,
        norm: Norm | NoNorm,
        scalar: torch.Tensor | None = None,
    ) -> torch.Tensor | Fp8Activations:
        """Add the norm `after` of x[T, H] to residual[T, H], and then multiply that by scalar[1], if given, both in
        place. Returns the `norm` of the new residual."""

    def gate(
        self, x: torch.Tensor, activation: str, fp8_scaling: Fp8Scaling | None = None, up: torch.Tensor | None = None
    ) -> torch.Tensor | Fp8Activations:
        """act(gate) * up, or another function of both (see `_ACTIVATIONS`): [T, I], of x[T, 2 I], gate first, or of the
        gate x[T, I] and up[T, I], whose rows may be apart."""

    def squared_relu(self, x: torch.Tensor, fp8_scaling: Fp8Scaling | None = None) -> torch.Tensor | Fp8Activations:
        """relu(x[T, I])^2 (arXiv 2109.08668), in place unless it is quantized."""

    def scaled(
        self,
        x: torch.Tensor | Fp8Activations,
        weight: Fp8Weight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The product of x[T, K] and an FP8 weight [N, K] transposed, plus bias[N], in `dtype`; x is quantized first if
        it is not yet. If residual[T, N] is given, the result is added to it, in place."""

    def small_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor | None = None,
        add: bool = False,
    ) -> torch.Tensor | None:
        """The product of few rows x[T, K] and weight[N, K] transposed, plus bias[N]: a new tensor, or written to
        out[T, N], or added to it with `add`. None, and nothing is done, if torch's product is to be used."""

    def gated_linear(self, x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor | None:
        """`gate` of the product of many rows x[T, K] and weight[2 I, K] transposed, by one kernel: [T, I]. None, and
        nothing is done, if two kernels are faster."""

    def int4_linear(
        self,
        x: torch.Tensor,
        weight: Int4,
        bias: torch.Tensor | None,
        batch_invariant: bool,
        out: torch.Tensor | None = None,
        add: bool = False,
    ) -> torch.Tensor:
        """The product of x[T, K] and a weight [N, K] in INT4 transposed, plus bias[N]: a new tensor, or written to
        out[T, N], or added to it with `add`. `batch_invariant`: see `linear.Linear`."""

    def lora(
        self, x: torch.Tensor, stack: Stack, rows: Rows, out: torch.Tensor, factor: float, batch_invariant: bool
    ) -> None:
        """Add factor * B(A x) of each row's adapter to out[T, N], in place, for x[T, K]. `batch_invariant`: see
        `linear.Linear`."""

    def experts(
        self, experts: Experts, x: torch.Tensor, residual: torch.Tensor, for_router: torch.Tensor | None = None
    ) -> None:  # fmt: skip
        """Add the output of a mixture of experts for x[T, hidden] to residual[T, hidden], in place. `for_router`: the
        router's input, if that is not x."""

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
    ) -> torch.Tensor | Fp8Activations:
        out = layer_norm(x, weight, bias, eps) if centered else rms_norm(x, weight, eps)
        return out if fp8_scaling is None else quantize_activations(out, fp8_scaling)

    @staticmethod
    def add_normed(
        x: torch.Tensor,
        after: Norm,
        residual: torch.Tensor,
        norm: Norm | NoNorm,
        scalar: torch.Tensor | None = None,
    ) -> torch.Tensor | Fp8Activations:
        residual.add_(after(x, TorchOps()))
        if scalar is not None:
            residual.mul_(scalar)
        return norm(residual, TorchOps())

    @staticmethod
    def gate(
        x: torch.Tensor, activation: str, fp8_scaling: Fp8Scaling | None = None, up: torch.Tensor | None = None
    ) -> torch.Tensor | Fp8Activations:
        gate, up = x.chunk(2, dim=-1) if up is None else (x, up)
        out = _ACTIVATIONS[activation](gate, up)
        return out if fp8_scaling is None else quantize_activations(out, fp8_scaling)

    @staticmethod
    def squared_relu(x: torch.Tensor, fp8_scaling: Fp8Scaling | None = None) -> torch.Tensor | Fp8Activations:
        out = x.relu_().square_()
        return out if fp8_scaling is None else quantize_activations(out, fp8_scaling)

    @staticmethod
    def scaled(
        x: torch.Tensor | Fp8Activations,
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
