"""Muon: momentum whose direction is made orthogonal before each step, for matrices.

Every step has the same size, whatever the gradient's, so that only the decay bounds the weights: with 0.01 instead of
0.05 and twice the learning rate, each kind's loss rose from step 2,000 on for as long as the rate stayed up.

K. Jordan and others, "Muon: An optimizer for hidden layers in neural networks" (2024),
https://kellerjordan.github.io/posts/muon/ with its Newton-Schulz coefficients.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """[n, rows, columns] -> about U V^T of each matrix U S V^T: singular values between 0.7 and 1.2."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """For parameters of matrices, [n, rows, columns]. A step has spectral norm lr * sqrt(max(1, rows / columns))."""

    def __init__(
        self, params: Iterable[Tensor], lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.05
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                average = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                ahead = p.grad.lerp(average, group["momentum"])
                scale = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(orthogonal(ahead), alpha=-group["lr"] * scale)
