"""Adds attention sinks (see `AttentionSpec.sinks`) to the results of kernels that do not support them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.elementwise.launching import LOG2_E

HEADS = 16
"""Heads of a program."""


@triton.jit
def _sink_kernel(
    out_ptr, lse_ptr, sinks_ptr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    query = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, WIDTH)
    real = head < HEADS
    sink = tl.load(sinks_ptr + head, mask=real, other=0.0) * LOG2_E
    share = 1 / (1 + tl.exp2(sink - tl.load(lse_ptr + query * HEADS + head, mask=real, other=0.0)))
    inside = real[:, None] & (d < DIM)[None, :]
    at = out_ptr + ((query * HEADS + head) * DIM)[:, None] + d[None, :]
    out = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    tl.store(at, (out * share[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


def add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Add `sinks` float32[heads] to attention results out[T, heads, D] in place: out / (1 + exp(sink - lse)). `lse`,
    float32[T, heads], is the log-sum-exp of the results, in base 2."""
    tokens, heads, dim = out.shape
    _sink_kernel[(tokens, triton.cdiv(heads, HEADS))](
        out, lse, sinks, heads, dim, HEADS, triton.next_power_of_2(dim),
        num_warps=4,
    )  # fmt: skip
