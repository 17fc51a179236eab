"""Matrix products with a weight in INT4 (`layers.int4`): out[T, N] = x[T, K] times weight[N, K] transposed.

The weight is the left operand, which tensor cores can take from registers: words are expanded there (`unpack_int4`).

With few rows the time is that of reading the weight. Where there are few programs, K is divided among several; the last
of them to end adds their sums, always in the same order:

    weight[64 rows, K]     program 0 | program 1 | program 2 | program 3
                               sums, by way of memory   --> + --> out

With many rows, the weight is dequantized first (`dequant`). In between, there is another kernel for Hopper
(`hopper_int4`).
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.attention.variants import room
from radixrt.worker.cuda.elementwise.launching import KernelCache, launch, num_sms, wait
from radixrt.worker.cuda.linear.dequant import by_torch
from radixrt.worker.cuda.linear.gemm import ALIGNED, Tile, _ask, of_hopper
from radixrt.worker.cuda.linear.invariant import GROUP
from radixrt.worker.cuda.linear.trials import draw_int4
from radixrt.worker.cuda.linear.unpack_int4 import by_instructions, load_facts, unpack_int4
from radixrt.worker.model.layers.int4 import MIDDLE, WIDTH, WORDS, Int4

log = logging.getLogger("radixrt.cuda")

TILE_16, TILE_32, TILE_64 = Tile(16, 64, WIDTH, 2, 3), Tile(32, 64, WIDTH, 4, 3), Tile(64, 64, WIDTH, 4, 3)
"""Tiles for up to 16, 32 and 64 rows (bench/packed_linear.py --sweep). On Hopper, two warps multiply by mma.sync, which
takes fewer instructions for few rows than wgmma, which four warps multiply by."""
WIDE, LARGE = Tile(64, 128, WIDTH, 4, 2), Tile(128, 128, WIDTH, 8, 2)
"""In place of TILE_64, where there is one for each multiprocessor, and for up to MAX_ROWS rows."""
MAX_ROWS = 256
"""The most rows for which the kernel here is used."""
MIN_WEIGHTS = 1 << 25
"""The fewest weights for which it is used with more rows than TILE_64 has: fewer are dequantized in less time than its
few programs take."""
HOPPER = 17, 2048
"""The fewest and the most rows for which the kernel for Hopper is used (`hopper_int4`; bench/packed_linear.py)."""
PROGRAMS = {TILE_16: 7, TILE_32: 1.5, TILE_64: 1.5, WIDE: 1, LARGE: 1}
"""K is divided as long as there are no more programs than this for each multiprocessor."""
MIN_SPLIT_BLOCKS = 2
"""The fewest blocks of K of a program, if K is divided."""
MAX_SPLITS = 4
"""The most programs that K is divided among: the last one adds the sums of all."""
MAX_TILES = 1 << 12
"""The most tiles of a product whose K is divided."""
AHEAD = 4
"""Blocks of a weight that are prefetched."""
ALIKE = 1e-2
"""The largest relative error at which the kernels are used (see `there`)."""


@triton.jit
def _slice(x_at, real, k, depth, WHOLE: tl.constexpr):
    """The columns k of x, transposed: [WORDS, ROWS]. 0 for columns that x does not have."""
    if WHOLE:
        return tl.trans(tl.load(x_at, mask=real, other=0.0))
    else:
        return tl.trans(tl.load(x_at, mask=real & (k < depth), other=0.0))


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x_ptr, values_ptr, facts_ptr, bias_ptr, out_ptr, sums_ptr, counts_ptr, rows, columns, depth, blocks,
    GROUPS: tl.constexpr, ZEROS: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    WHOLE: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WORDS: tl.constexpr, FACTS: tl.constexpr, MIDDLE: tl.constexpr, AHEAD: tl.constexpr, GROUP: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    LINES: tl.constexpr = COLUMNS * WORDS // 32
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    across = tl.cdiv(columns, COLUMNS)
    tile, split = tl.program_id(0), tl.program_id(1)
    group = tile // (GROUP * across)
    within = tile % (GROUP * across)
    high = tl.minimum(tl.cdiv(rows, ROWS) - group * GROUP, GROUP)
    n = within // high * COLUMNS + tl.arange(0, COLUMNS)
    # Lanes past the last column compute another one again, which is not stored.
    at = n % columns
    each = tl.cdiv(blocks, SPLITS)
    begin, end = split * each, tl.minimum(split * each + each, blocks)
    if EARLY and AHEAD > 0:
        line = tl.arange(0, AHEAD * LINES)
        ahead = tl.minimum(begin + line // LINES, blocks - 1) * columns + tl.minimum(
            within // high * COLUMNS + line % LINES * (32 // WORDS), columns - 1
        )
        _ask(values_ptr + ahead.to(tl.int64) * WORDS)
    wait(EARLY)
    m = (group * GROUP + within % high) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, WORDS)
    real = m < rows
    k = begin * WORDS * 8 + i[None, :]
    x_at, wanted = x_ptr + tl.where(real, m, 0).to(tl.int64)[:, None] * depth + k, real[:, None]
    row = begin.to(tl.int64) * columns + at
    w_at = values_ptr + row[:, None] * WORDS + i[None, :]
    f_at = facts_ptr + begin.to(tl.int64) * columns * FACTS + at
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    for _ in range(begin, end):
        w = tl.load(w_at)
        facts = load_facts(f_at, columns, GROUPS, ZEROS)
        x0 = _slice(x_at, wanted, k, depth, WHOLE)
        x1 = _slice(x_at + WORDS, wanted, k + WORDS, depth, WHOLE)
        x2 = _slice(x_at + WORDS * 2, wanted, k + WORDS * 2, depth, WHOLE)
        x3 = _slice(x_at + WORDS * 3, wanted, k + WORDS * 3, depth, WHOLE)
        x4 = _slice(x_at + WORDS * 4, wanted, k + WORDS * 4, depth, WHOLE)
        x5 = _slice(x_at + WORDS * 5, wanted, k + WORDS * 5, depth, WHOLE)
        x6 = _slice(x_at + WORDS * 6, wanted, k + WORDS * 6, depth, WHOLE)
        x7 = _slice(x_at + WORDS * 7, wanted, k + WORDS * 7, depth, WHOLE)
        w0, w1, w2, w3, w4, w5, w6, w7 = unpack_int4(w, facts, dtype, GROUPS, ZEROS, BITS, MIDDLE)
        acc = tl.dot(w0, x0, acc, input_precision="ieee")
        acc = tl.dot(w1, x1, acc, input_precision="ieee")
        acc = tl.dot(w2, x2, acc, input_precision="ieee")
        acc = tl.dot(w3, x3, acc, input_precision="ieee")
        acc = tl.dot(w4, x4, acc, input_precision="ieee")
        acc = tl.dot(w5, x5, acc, input_precision="ieee")
        acc = tl.dot(w6, x6, acc, input_precision="ieee")
        acc = tl.dot(w7, x7, acc, input_precision="ieee")
        k += WORDS * 8
        x_at += WORDS * 8
        w_at += columns * WORDS
        f_at += columns * FACTS
    if SPLITS > 1:
        to = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        kept = sums_ptr + tile * (COLUMNS * ROWS) + to
        apart = tl.num_programs(0) * (COLUMNS * ROWS)
        tl.store(kept + split * apart, acc, mask=real[None, :])
        tl.debug_barrier()  # the sums of all threads are there before they are counted
        ended = tl.atomic_add(counts_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if ended != SPLITS - 1:
            return
        acc = tl.zeros([COLUMNS, ROWS], tl.float32)
        for one in tl.static_range(SPLITS):  # all are loaded before the first one is there
            acc += tl.load(kept + one * apart, mask=real[None, :], other=0.0, cache_modifier=".cg")
        tl.store(counts_ptr + tile, 0)  # for the next product
    acc = tl.trans(acc)
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    out_at = out_ptr + m.to(tl.int64)[:, None] * columns + n[None, :]
    stored = real[:, None] & (n < columns)[None, :]
    if ADD:
        acc += tl.load(out_at, mask=stored, other=0.0).to(tl.float32)
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=stored)


# ---------------------------------------------------------------- launches


_kernel_caches: dict[tuple[Any, ...], KernelCache] = {}
"""As that of `gemm`."""


@functools.cache
def _counts(device: torch.device) -> torch.Tensor:
    """Programs of each tile that have ended: all 0 before and after a product."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def fitting_stages(tile: Tile, words: int, facts: int, weights: int, memory: int, hopper: bool) -> int:
    """Pipeline stages of a tile, no more than fit `memory` bytes of shared memory, with a buffer each for x, and one
    less for `words` words and `facts` words of scales and zeros of each row of `weights` weights. Where x is not read
    from its buffer by tensor cores, as on Hopper, it has one less, too, which is more than scales take."""
    x, w = 16 * tile.rows * words, 4 * weights * tile.columns * (words + (facts if hopper else 0))
    return max(1, min(tile.stages, (memory + w) // (x + w)))


def multiply(
    x: torch.Tensor, weight: Int4, out: torch.Tensor, tile: Tile, splits: int = 1, *,
    bias: torch.Tensor | None = None, add: bool = False,
) -> None:  # fmt: skip
    """Write x[T, K] times weight[N, K] transposed, plus bias[N], to out[T, N], or with `add` add it there. All are
    contiguous, x is in the dtype of the weight. Sums are float32; `splits` programs have a part of K each."""
    (rows, depth), columns, blocks = x.shape, weight.rows, weight.values.shape[0]
    tiles = triton.cdiv(columns, tile.columns) * triton.cdiv(rows, tile.rows)
    sums = counts = out
    if splits > 1:
        sums = torch.empty(splits * tiles * tile.rows * tile.columns, dtype=torch.float32, device=x.device)
        counts = _counts(x.device)
    more = out if bias is None else bias
    pointers = x, weight.values, weight.facts, more, out, sums, counts
    kinds = (
        weight.groups, weight.has_zeros, splits, bias is not None, add, depth % WIDTH == 0, by_instructions(),
        tile.rows, tile.columns, WORDS, weight.facts.shape[1], MIDDLE, AHEAD, GROUP,
    )  # fmt: skip
    cache = None
    if all(pointer.data_ptr() % ALIGNED == 0 for pointer in pointers):
        given = x.device, x.dtype, more.dtype, out.dtype, columns, depth, tile
        cache = _kernel_caches.setdefault((*given, *kinds), {})
    launch(
        _product_kernel, (tiles, splits, 1), cache,
        *pointers, rows, columns, depth, blocks, *kinds,
        num_warps=tile.warps,
        num_stages=fitting_stages(tile, WORDS, weight.facts.shape[1], 1, room(), of_hopper(x.device)),
    )  # fmt: skip


# ---------------------------------------------------------------- where they are used


@functools.cache
def plan_for(rows: int, columns: int, depth: int, device: torch.device) -> tuple[Tile, int] | None:
    """The tile and the number of programs that K is divided among; None where it is faster to dequantize the weight
    (bench/packed_linear.py)."""
    if rows > MAX_ROWS or (rows > TILE_64.rows and columns * depth < MIN_WEIGHTS):
        return None
    tile = next((tile for tile in (TILE_16, TILE_32, TILE_64) if rows <= tile.rows), LARGE)
    if tile is TILE_64 and triton.cdiv(columns, WIDE.columns) >= num_sms(device):
        tile = WIDE
    tiles = triton.cdiv(columns, tile.columns) * triton.cdiv(rows, tile.rows)
    splits = MAX_SPLITS if tiles <= MAX_TILES else 1
    while splits > 1 and (
        tiles * splits > PROGRAMS[tile] * num_sms(device) or depth < splits * MIN_SPLIT_BLOCKS * WIDTH
    ):
        splits //= 2
    return tile, splits


def int4_linear(
    x: torch.Tensor, weight: Int4, bias: torch.Tensor | None, batch_invariant: bool,
    out: torch.Tensor | None = None, add: bool = False,
) -> torch.Tensor:  # fmt: skip
    """See `Ops.int4_linear`."""
    if out is None:
        out = x.new_empty((len(x), weight.rows))
    if not len(x):
        return out
    x = x.contiguous()
    plan = (TILE_64, 1) if batch_invariant else plan_for(len(x), *weight.shape, x.device)
    if not out.is_contiguous():
        result = int4_linear(x, weight, bias, batch_invariant)
        return out.add_(result) if add else out.copy_(result)
    kernel = None if batch_invariant else hopper_kernel(len(x), x.device, x.dtype)
    if kernel is not None and kernel.fits(x, weight, out):
        kernel.multiply(x, weight, out, *kernel.plan(len(x), *weight.shape, num_sms(x.device)), bias=bias, add=add)
    elif plan is None:
        by_torch(x, weight, out, bias=bias, add=add)
    else:
        multiply(x, weight, out, *plan, bias=bias, add=add)
    return out


def hopper_kernel(rows: int, device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """`hopper_int4`, if it is used for this many rows."""
    return _hopper_int4(device, dtype) if HOPPER[0] <= rows <= HOPPER[1] else None


@functools.cache
def _hopper_int4(device: torch.device, dtype: torch.dtype) -> ModuleType | None:
    """`hopper_int4`; None if it cannot be used."""
    if not of_hopper(device):
        return None
    try:
        from radixrt.worker.cuda.linear import hopper_int4
    except (ImportError, AttributeError):  # a Triton without Gluon, or with another version of it
        return None
    return hopper_int4 if hopper_int4.there(device, dtype) else None


@functools.cache
def there(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels compile for this device and are correct there; otherwise logs why not."""
    kinds = (TILE_16, 4, 32, True), (TILE_64, 1, 128, False), (LARGE, 1, 128, True), (None, 1, 64, True)
    try:
        error = max(_apart(device, dtype, *kind) for kind in kinds)
    except Exception as problem:  # another version of the compiler
        log.warning(
            "weights in INT4 are dequantized: their kernel does not work here: %s: %s",
            type(problem).__name__,
            str(problem)[:300],
        )
        return False
    if not error < ALIKE:
        log.warning("weights in INT4 are dequantized: their kernel has a relative error of %.1e here", error)
        return False
    _hopper_int4(device, dtype)  # tried out before graphs are captured
    return True


def _apart(
    device: torch.device, dtype: torch.dtype, tile: Tile | None, splits: int, size: int, has_zeros: bool
) -> float:  # fmt: skip
    """The relative error of a product with a random weight, whose groups have `size` columns. No tile: `by_torch`."""
    rows, columns = 40, 200
    weight, x = draw_int4(device, dtype, columns, 1152, size, has_zeros, rows)
    out = torch.zeros((rows, columns), dtype=dtype, device=device)
    if tile is None:
        by_torch(x, weight, out)
    else:
        multiply(x, weight, out, tile, splits)
    exact = x.float() @ weight.dequantized().float().t()
    return float((out.float() - exact).norm() / exact.norm())
