"""Matrix products whose results do not depend on the batch, to the last bit.

The sum over K of each element is computed by one program, in one order, whatever the other rows are. Tensor cores add K
in steps of their own. Where these are the same for all tile shapes, a product may use the shape that is fastest for its
size, and decodes may use a kernel of their own. Whether they are is tested on the device, by comparing bits.
"""

from __future__ import annotations

import functools
import logging

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.elementwise.launching import launch, num_sms, wait
from radixrt.worker.cuda.linear.gemm import STREAMED, Tile, multiply, streaming

log = logging.getLogger("radixrt.cuda")

GROUP = 8
"""Rows of tiles that are computed at the same time, so that the weights they share stay in the L2 cache."""


REFERENCE = Tile(64, 128, 64, 4, 4)
TILES = (Tile(256, 128, 64, 8, 3), Tile(128, 128, 64, 4, 4), REFERENCE, Tile(64, 32, 128, 4, 4))
"""The largest first."""


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, columns, depth,
    BIAS: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    across = tl.cdiv(columns, COLUMNS)
    group = tl.program_id(0) // (GROUP * across)
    within = tl.program_id(0) % (GROUP * across)
    high = tl.minimum(tl.cdiv(rows, ROWS) - group * GROUP, GROUP)
    m = (group * GROUP + within % high) * ROWS + tl.arange(0, ROWS)
    n = within // high * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    # Lanes past the end compute a row or a column again, which is not stored.
    x_at = x_ptr + (m % rows).to(tl.int64)[:, None] * depth + k[None, :]
    w_at = weight_ptr + (n % columns).to(tl.int64)[None, :] * depth + k[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, depth, DEPTH):
        if WHOLE:
            x, w = tl.load(x_at + begin), tl.load(w_at + begin)
        else:
            inside = begin + k < depth
            x = tl.load(x_at + begin, mask=inside[None, :], other=0.0)
            w = tl.load(w_at + begin, mask=inside[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < columns)[None, :])


def product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """x[M, K] times weight[N, K] transposed, plus bias[N]: [M, N] in `dtype` (that of x); the sum is float32."""
    return _product(x, weight, bias, dtype or x.dtype, _choose(len(x), len(weight), x))


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, tile: Tile
) -> torch.Tensor:
    x = x.contiguous()
    (rows, depth), columns = x.shape, len(weight)
    out = torch.empty((rows, columns), dtype=dtype, device=x.device)
    if rows and tile.rows in STREAMED:
        multiply(x, weight, out, tile, bias=bias)
    elif rows:
        launch(
            _product_kernel, (triton.cdiv(columns, tile.columns) * triton.cdiv(rows, tile.rows),), None,
            x, weight, x if bias is None else bias, out, rows, columns, depth, bias is not None,
            depth % tile.depth == 0, tile.rows, tile.columns, tile.depth, GROUP,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out


def _choose(rows: int, columns: int, x: torch.Tensor) -> Tile:
    """The largest tile for which there is still work for nearly all multiprocessors."""
    if not x.is_cuda:
        return REFERENCE
    tiles = agreeing(x.device, x.dtype)
    for few in STREAMED:
        if rows <= few and _streaming(few, x) in tiles:
            return streaming(few, columns, x.itemsize, x.device)
    wanted = 0.9 * num_sms(x.device)
    fitting = [tile for tile in TILES if tile in tiles and (tile.rows < 2 * rows or tile.rows == REFERENCE.rows)]
    for tile in fitting:
        if triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns) >= wanted:
            return tile
    return fitting[-1]


def _streaming(rows: int, x: torch.Tensor) -> Tile:
    """A tile that represents all tiles of `rows` rows of `gemm.streaming`, which differ in their stages only."""
    return streaming(rows, 1, x.itemsize, x.device)


@functools.cache
def agreeing(device: torch.device, dtype: torch.dtype) -> frozenset[Tile]:
    """The tiles whose results on this device are those of the reference, bit for bit."""
    generator = torch.Generator(device).manual_seed(0)
    x, w = (torch.randn(n, 2048, generator=generator, device=device).to(dtype) for n in (300, 500))
    expected = _product(x, w, None, torch.float32, REFERENCE)
    agree, every = {REFERENCE}, {*(_streaming(rows, x) for rows in STREAMED), *TILES}
    for tile in every:
        try:
            if torch.equal(_product(x, w, None, torch.float32, tile), expected):
                agree.add(tile)
        except triton.runtime.errors.OutOfResources:  # a chip with less shared memory
            continue
    if left_out := every - agree:
        log.info("products that do not depend on the batch: tiles left out, for they round otherwise: %s", left_out)
    return frozenset(agree)


@triton.jit(do_not_specialize=["rows", "x_stride", "out_stride"])
def _head_product_kernel(
    x_ptr, weight_ptr, out_ptr, rows, x_stride, out_stride, x_heads, out_heads, columns, depth, heads_apart,
    columns_apart, depth_apart, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    head = tl.program_id(2).to(tl.int64)
    m = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    x_at = x_ptr + head * x_heads + (m % rows).to(tl.int64)[:, None] * x_stride + k[None, :]
    w_at = weight_ptr + head * heads_apart + (n % columns)[None, :] * columns_apart + k[:, None] * depth_apart
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, depth, DEPTH):
        inside = begin + k < depth
        x = tl.load(x_at + begin, mask=inside[None, :], other=0.0)
        w = tl.load(w_at + begin * depth_apart, mask=inside[:, None], other=0.0)
        acc = tl.dot(x, w, acc, input_precision="ieee")
    at = out_ptr + head * out_heads + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < columns)[None, :])


def head_product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """See `linear.HeadLinear.put`; one tile shape is used whatever the number of rows."""
    (rows, heads, depth), columns, tile = x.shape, weight.shape[1], REFERENCE
    if rows:
        launch(
            _head_product_kernel, (triton.cdiv(rows, tile.rows), triton.cdiv(columns, tile.columns), heads), None,
            x, weight, out, rows, x.stride(0), out.stride(0), x.stride(1), out.stride(1), columns, depth,
            *weight.stride(), tile.rows, tile.columns, tile.depth, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
