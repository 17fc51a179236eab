"""The part of `layers.Ops` for layers with a recurrent state."""

from __future__ import annotations

from typing import Protocol

import torch

from radixrt.worker.model import delta


class RecurrentOps(Protocol):
    """Operations with kernels on a GPU. Tokens of what they take may be any distance apart."""

    def short_conv(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        states: torch.Tensor,
        slots: torch.Tensor,
        bounds: torch.Tensor,
        activation: str | None,
    ) -> torch.Tensor:
        """See `delta.short_conv`."""

    def gated_delta(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
        states: torch.Tensor,
        slots: torch.Tensor,
        bounds: torch.Tensor,
        exact: bool,
    ) -> torch.Tensor:
        """See `delta.gated_delta`."""

    def gated_norm(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, activation: str
    ) -> torch.Tensor:
        """RMSNorm of each head of x[T, heads, D], times weight[D] and the activation (silu or sigmoid) of
        gate[T, heads, D], in float32."""


class TorchRecurrentOps:
    """The reference implementation of RecurrentOps."""

    short_conv = staticmethod(delta.short_conv)
    gated_delta = staticmethod(delta.gated_delta)

    @staticmethod
    def gated_norm(
        x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, activation: str
    ) -> torch.Tensor:
        wide, gate = x.float(), delta.activated(gate.float(), activation)
        normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (normalized * weight.float() * gate).to(x.dtype)
