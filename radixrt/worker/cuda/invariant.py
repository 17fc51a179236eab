"""Matrix products whose rows do not depend on each other, to the last bit: one tile shape for every size, and the sum
over K in one order, by one program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, COLUMNS, DEPTH = 64, 128, 64


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, columns, depth,
    BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    x_at = x_ptr + m.to(tl.int64)[:, None] * depth + k[None, :]
    w_at = weight_ptr + n.to(tl.int64)[None, :] * depth + k[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, depth, DEPTH):
        inside = begin + k < depth
        x = tl.load(x_at + begin, mask=(m < rows)[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_at + begin, mask=(n < columns)[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < columns)[None, :])


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x[M, K] times weight[N, K] transposed, plus bias[N]: [M, N] in `dtype` (that of x); the sum is float32."""
    x = x.contiguous()
    (rows, depth), columns = x.shape, len(weight)
    out = torch.empty((rows, columns), dtype=dtype or x.dtype, device=x.device)
    if rows:
        grid = (triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS))
        _product_kernel[grid](
            x, weight, x if bias is None else bias, out, rows, columns, depth, bias is not None, ROWS, COLUMNS, DEPTH,
            num_warps=4, num_stages=4,
        )  # fmt: skip
    return out
