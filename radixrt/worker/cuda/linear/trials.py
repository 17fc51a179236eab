"""Random weights with which kernels are tried out before they are used."""

from __future__ import annotations

import torch

from radixrt.worker.model.layers.int4 import Int4
from radixrt.worker.model.layers.mxfp4 import PackedStack

COUNTS, CHECKED_ROWS, CHECKED_BLOCKS, BEFORE = (40, 0, 150, 1), 200, 9, 8
"""Of the experts that are tried: tokens, rows, blocks of 32 columns, and columns before the first one."""


def draw_int4(
    device: torch.device, dtype: torch.dtype, columns: int, depth: int, size: int, has_zeros: bool, rows: int
) -> tuple[Int4, torch.Tensor]:
    """A random weight whose groups have `size` columns, and x[rows, depth]."""
    generator = torch.Generator(device).manual_seed(0)
    q = torch.randint(16, (columns, depth), generator=generator, device=device, dtype=torch.int32)
    scales = 0.01 + 0.01 * torch.rand((columns, -(-depth // size)), generator=generator, device=device)
    zeros = torch.randint(17, scales.shape, generator=generator, device=device, dtype=torch.int32)
    weight = Int4.of(q, scales.to(dtype), zeros if has_zeros else None, dtype)
    assert weight is not None
    return weight, torch.randn((rows, depth), generator=generator, device=device).to(dtype)


def draw_experts(
    generator: torch.Generator, device: torch.device, int4: torch.dtype | None = None
) -> tuple[PackedStack | Int4, torch.Tensor]:
    """A few random experts, in MXFP4 or in INT4 of a dtype, and the expert of each of some rows, int32[R, 1]."""
    stack = _some_mxfp4(generator, device) if int4 is None else _some_int4(generator, device, int4)
    of_each = [torch.full((count, 1), e, dtype=torch.int32) for e, count in enumerate(COUNTS)]
    return stack, torch.cat(of_each).to(device)


def _some_mxfp4(generator: torch.Generator, device: torch.device) -> PackedStack:
    shape = CHECKED_ROWS, CHECKED_BLOCKS
    stack = PackedStack.empty(len(COUNTS), CHECKED_ROWS, CHECKED_BLOCKS * 32 - BEFORE, BEFORE, device)
    for number in range(len(COUNTS)):
        bits = torch.randint(256, (*shape, 16), generator=generator, device=device, dtype=torch.uint8)
        stack.put(number, bits, torch.randint(110, 121, shape, generator=generator, device=device, dtype=torch.uint8))
    return stack


def _some_int4(generator: torch.Generator, device: torch.device, dtype: torch.dtype) -> Int4:
    shape = CHECKED_ROWS, CHECKED_BLOCKS
    weights: list[Int4] = []
    for _ in COUNTS:
        q = torch.randint(16, (CHECKED_ROWS, CHECKED_BLOCKS * 32), generator=generator, device=device)
        scales = (0.01 + torch.rand(shape, generator=generator, device=device)).to(dtype)
        weight = Int4.of(q, scales, torch.randint(16, shape, generator=generator, device=device), dtype)
        assert weight is not None
        weights.append(weight)
    stack = weights[0].stack(len(weights))
    for number, weight in enumerate(weights):
        stack.put(number, weight)
    return stack
