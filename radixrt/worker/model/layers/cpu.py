"""When the kernels for CPUs compute, and what they are given: the addresses of contiguous float32 tensors."""

from __future__ import annotations

import torch

from radixrt.worker.model.layers import _cpu_kernels

ALIGNMENT = 16
"""Rows have to be a multiple of this many elements, where a kernel has no loop for the rest."""
GATES = ("silu", "gelu_pytorch_tanh")
"""Activations of `fused_gate`."""


def for_kernels(*tensors: torch.Tensor) -> bool:
    """Whether the kernels can have these tensors, once they are contiguous. It does not depend on how many rows there
    are, or how they are laid out, which would change results."""
    for x in tensors:  # not by `all`, which takes longer
        if x.dtype != torch.float32 or not x.is_cpu:
            return False
    return True


def fused_gate(x: torch.Tensor, tanh: bool) -> torch.Tensor:
    """[T, I]: SiLU, or GELU by `tanh`, of the first half of x[T, 2 I], times the second."""
    x, width = x.contiguous(), x.shape[-1] // 2
    out = torch.empty((x.shape[0], width))
    _cpu_kernels.gate(x.data_ptr(), out.data_ptr(), x.shape[0], width, tanh, 1)
    return out
