"""Quantizes activations to FP8, with a scale for each row or for each BLOCK values of a row (`layers.fp8`): by a
kernel of its own, or at the end of the kernel that computes them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.elementwise.launching import launch, wait
from radixrt.worker.model.layers.fp8 import BLOCK, FP8, LIMIT, Activations, Fp8Activations, Fp8Scaling

PADDED = 4
"""With block scales, cuBLASLt requires a multiple of this many rows."""


@triton.jit
def store_fp8(x, out_ptr, scales_ptr, row, size, stride, LIMIT: tl.constexpr, GROUP: tl.constexpr, ALL: tl.constexpr):
    """Quantize and store a row: float32 x[ALL], of which the first `size` values are real and the others 0, with a
    scale for each GROUP of values."""
    i = tl.arange(0, ALL)
    g = tl.arange(0, ALL // GROUP)
    groups = tl.reshape(x, [ALL // GROUP, GROUP])
    largest = tl.max(tl.abs(groups), 1)
    scales = tl.where(largest > 0, largest / LIMIT, 1.0)
    tl.store(scales_ptr + g * stride + row, scales, mask=g * GROUP < size)
    # NaN stays NaN, and what is divided by an infinite scale is 0 or NaN.
    values = tl.reshape(groups / scales[:, None], [ALL])
    tl.store(out_ptr + row * size + i, values.to(out_ptr.dtype.element_ty), mask=i < size)


@triton.jit(do_not_specialize=["stride"])
def _quantize_kernel(
    x_ptr, out_ptr, scales_ptr, size, stride, LIMIT: tl.constexpr, GROUP: tl.constexpr, ALL: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, ALL)
    x = tl.load(x_ptr + row * size + i, mask=i < size, other=0.0).to(tl.float32)
    store_fp8(x, out_ptr, scales_ptr, row, size, stride, LIMIT, GROUP, ALL)


def room(rows: int, size: int, fp8_scaling: Fp8Scaling, device: torch.device) -> Fp8Activations:
    """Allocate the result for x[rows, size], with memory behind the last row up to a multiple of PADDED rows. The
    scales of neighbouring rows are adjacent in memory."""
    groups = 1 if fp8_scaling is Fp8Scaling.ROWS else triton.cdiv(size, BLOCK)
    most = triton.cdiv(rows, PADDED) * PADDED
    values = torch.empty((most, size), dtype=FP8, device=device)
    return Fp8Activations(values[:rows], torch.empty((groups, most), dtype=torch.float32, device=device).t()[:rows])


def result(
    like: torch.Tensor, rows: int, size: int, fp8_scaling: Fp8Scaling | None
) -> tuple[Activations, torch.Tensor, torch.Tensor, int]:
    """(a new result [rows, size], its values, its scales, their stride): in FP8 with an `fp8_scaling`, otherwise of the
    dtype of `like`; scales then have no meaning."""
    if fp8_scaling is None:
        out = like.new_empty((rows, size))
        return out, out, out, 0
    found = room(rows, size, fp8_scaling, like.device)
    return found, found.values, found.scales, found.scales.stride(1)


def padded(x: Fp8Activations) -> Fp8Activations:
    """Extend a result of `room` to a multiple of PADDED rows, of whatever content."""
    most = triton.cdiv(len(x), PADDED) * PADDED
    values, scales = (part.as_strided((most, part.shape[1]), part.stride()) for part in (x.values, x.scales))
    return Fp8Activations(values, scales)


def launch_sizes(size: int, fp8_scaling: Fp8Scaling | None) -> tuple[int, int, int]:
    """(values that share a scale, 0 without rounding; values of a program; its warps) for rows of `size` values."""
    block = triton.next_power_of_2(size) if fp8_scaling is None else max(BLOCK, triton.next_power_of_2(size))
    group = 0 if fp8_scaling is None else block if fp8_scaling is Fp8Scaling.ROWS else BLOCK
    return group, block, max(1, min(8 if fp8_scaling is None else 16, block // 512))


def quantize(x: torch.Tensor, fp8_scaling: Fp8Scaling) -> Fp8Activations:
    """Quantize x[T, K] to FP8."""
    rows, size = x.shape
    out = room(rows, size, fp8_scaling, x.device)
    group, block, warps = launch_sizes(size, fp8_scaling)
    stride = out.scales.stride(1)
    launch(
        _quantize_kernel, (rows,), None, x, out.values, out.scales, size, stride, LIMIT, group, block, num_warps=warps
    )
    return out
