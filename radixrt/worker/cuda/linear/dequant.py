"""Products of many rows with a weight in INT4: a kernel dequantizes some rows of the weight at a time, and torch
multiplies."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.elementwise.launching import KernelCache, launch, wait
from radixrt.worker.cuda.linear.gemm import ALIGNED
from radixrt.worker.cuda.linear.unpack_int4 import by_instructions, load_facts, unpack_int4
from radixrt.worker.model.layers.int4 import MIDDLE, WORDS, Int4

CHUNK = 1 << 24
"""The most weights that are dequantized at a time: they stay in the L2 cache until they are multiplied."""
CHUNK_ROWS = 256
"""A multiple of this many rows: torch's products are slow if theirs are not aligned."""


@triton.jit(do_not_specialize=["first_row", "count"])
def _dequantize_kernel(
    values_ptr, facts_ptr, out_ptr, first_row, count, columns, depth,
    GROUPS: tl.constexpr, ZEROS: tl.constexpr, BITS: tl.constexpr, COLUMNS: tl.constexpr, WORDS: tl.constexpr,
    FACTS: tl.constexpr, MIDDLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    block = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.arange(0, WORDS)
    real = row < count
    at = first_row + tl.where(real, row, 0)
    w = tl.load(values_ptr + (block * columns + at)[:, None] * WORDS + i[None, :])
    facts = load_facts(facts_ptr + block * columns * FACTS + at, columns, GROUPS, ZEROS)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    w0, w1, w2, w3, w4, w5, w6, w7 = unpack_int4(w, facts, dtype, GROUPS, ZEROS, BITS, MIDDLE)
    k = block * WORDS * 8 + i
    to = out_ptr + row.to(tl.int64)[:, None] * depth + k[None, :]
    tl.store(to, w0, mask=real[:, None] & (k < depth)[None, :])
    tl.store(to + WORDS, w1, mask=real[:, None] & (k + WORDS < depth)[None, :])
    tl.store(to + WORDS * 2, w2, mask=real[:, None] & (k + WORDS * 2 < depth)[None, :])
    tl.store(to + WORDS * 3, w3, mask=real[:, None] & (k + WORDS * 3 < depth)[None, :])
    tl.store(to + WORDS * 4, w4, mask=real[:, None] & (k + WORDS * 4 < depth)[None, :])
    tl.store(to + WORDS * 5, w5, mask=real[:, None] & (k + WORDS * 5 < depth)[None, :])
    tl.store(to + WORDS * 6, w6, mask=real[:, None] & (k + WORDS * 6 < depth)[None, :])
    tl.store(to + WORDS * 7, w7, mask=real[:, None] & (k + WORDS * 7 < depth)[None, :])


_kernel_caches: dict[tuple[Any, ...], KernelCache] = {}
"""As that of `gemm`."""


def dequantize(weight: Int4, out: torch.Tensor, first: int = 0) -> None:
    """Write the rows of the weight from `first` on to out[count, K]."""
    columns = 64
    kinds = weight.groups, weight.has_zeros, by_instructions(), columns, WORDS, weight.facts.shape[1], MIDDLE
    cache = None
    if all(pointer.data_ptr() % ALIGNED == 0 for pointer in (weight.values, weight.facts, out)):
        cache = _kernel_caches.setdefault((out.device, out.dtype, weight.rows, weight.columns, *kinds), {})
    launch(
        _dequantize_kernel, (triton.cdiv(len(out), columns), weight.values.shape[0], 1), cache,
        weight.values, weight.facts, out, first, len(out), weight.rows, weight.columns, *kinds, num_warps=4,
    )  # fmt: skip


def by_torch(
    x: torch.Tensor, weight: Int4, out: torch.Tensor, *, bias: torch.Tensor | None = None, add: bool = False
) -> None:  # fmt: skip
    """As `int4.multiply`: at most CHUNK weights are dequantized at a time."""
    parts = triton.cdiv(weight.numel(), CHUNK)
    each = triton.cdiv(triton.cdiv(weight.rows, parts), CHUNK_ROWS) * CHUNK_ROWS
    part = torch.empty((min(each, weight.rows), weight.columns), dtype=weight.dtype, device=x.device)
    for first in range(0, weight.rows, each):
        some, to = part[: weight.rows - first], out[:, first : first + each]
        dequantize(weight, some, first)
        if add:
            to.addmm_(x, some.t())
        else:
            torch.mm(x, some.t(), out=to)
    if bias is not None:
        out.add_(bias)
