"""What ends a layer's part where the result of attention or of an MLP is normalized (Gemma, OLMo 2), in one launch:

residual += after(x);     residual *= scalar;     return norm(residual)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.elementwise.launching import launch, wait
from radixrt.worker.cuda.linear.quantize_activations import launch_sizes, result, store_fp8
from radixrt.worker.model.layers.fp8 import LIMIT, Activations
from radixrt.worker.model.layers.norms import NoNorm, Norm
from radixrt.worker.model.layers.ops import TorchOps


@triton.jit
def _normed(x, weight, eps, size):
    """RMSNorm of float32 x, rounded where `norms.rms_norm` rounds, but for the last time."""
    x = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    return x.to(weight.dtype).to(tl.float32) * weight.to(tl.float32)


@triton.jit(do_not_specialize=["stride"])
def _add_normed_kernel(
    x_ptr, after_ptr, residual_ptr, scalar_ptr, weight_ptr, out_ptr, scales_ptr, after_eps, eps, size, stride,
    SCALED: tl.constexpr, NORM: tl.constexpr, GROUP: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < size
    after = tl.load(after_ptr + i, mask=inside, other=0.0)
    weight = after
    if NORM:
        weight = tl.load(weight_ptr + i, mask=inside, other=0.0)
    wait(EARLY)
    dtype = residual_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * size + i, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(residual_ptr + row * size + i, mask=inside, other=0.0).to(tl.float32)
    total = (total + _normed(x, after, after_eps, size).to(dtype).to(tl.float32)).to(dtype)
    if SCALED:
        total = (total.to(tl.float32) * tl.load(scalar_ptr).to(tl.float32)).to(dtype)
    tl.store(residual_ptr + row * size + i, total, mask=inside)
    if NORM:
        out = _normed(total.to(tl.float32), weight, eps, size).to(dtype)
        if GROUP > 0:
            store_fp8(out.to(tl.float32), out_ptr, scales_ptr, row, size, stride, LIMIT, GROUP, BLOCK)
        else:
            tl.store(out_ptr + row * size + i, out, mask=inside)


def add_normed(
    x: torch.Tensor, after: Norm, residual: torch.Tensor, norm: Norm | NoNorm, scalar: torch.Tensor | None = None
) -> Activations:
    """See `Ops.add_normed`; by torch with LayerNorms."""
    followed = norm if isinstance(norm, Norm) else None
    if after.centered or (followed is not None and followed.centered):
        return TorchOps.add_normed(x, after, residual, norm, scalar)
    rows, size = residual.shape
    fp8_scaling = None if followed is None else followed.fp8_scaling
    group, block, warps = launch_sizes(size, fp8_scaling)
    sums: Activations = residual
    values, scales, stride, weight, eps = residual, residual, 0, after.weight, 0.0
    if followed is not None:
        weight, eps = followed.weight, followed.eps
        sums, values, scales, stride = result(residual, rows, size, fp8_scaling)
    launch(
        _add_normed_kernel, (rows,), None,
        x, after.weight, residual, after.weight if scalar is None else scalar, weight, values, scales, after.eps, eps,
        size, stride, scalar is not None, followed is not None, group, LIMIT, block, num_warps=warps,
    )  # fmt: skip
    return sums
