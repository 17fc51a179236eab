"""Matrix products with a weight in INT4 (`model.int4`): out[T, N] = x[T, K] times weight[N, K] transposed.

The weight is the left operand, which tensor cores can take from registers. Each of the 8 values of a word belongs to
another slice of WORDS columns, so a thread expands its own words, without data of other threads (see `packed_experts`).

With few rows the time is that of reading the weight. Where there are few programs, K is divided among several; the last
of them to end adds their sums, always in the same order:

    weight[64 rows, K]     program 0 | program 1 | program 2 | program 3
                               sums, by way of memory   --> + --> out

With many rows, the weight is dequantized by a kernel of its own, a few rows of it at a time, and torch multiplies. In
between, there is another kernel for Hopper (`hopper_int4`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.invariant import GROUP
from radixrt.worker.cuda.launching import KernelCache, launch, wait
from radixrt.worker.cuda.products import ALIGNED, Tile, _ask, of_hopper, processors
from radixrt.worker.cuda.variants import room
from radixrt.worker.model.int4 import MIDDLE, WIDTH, WORDS, Int4

log = logging.getLogger("radixrt.cuda")

FEW, SOME, MANY = Tile(16, 64, WIDTH, 2, 3), Tile(32, 64, WIDTH, 4, 3), Tile(64, 64, WIDTH, 4, 3)
"""Tiles for up to 16, 32 and 64 rows (bench/packed_linear.py --sweep). On Hopper, two warps multiply by mma.sync, which
takes fewer instructions for few rows than wgmma, which four warps multiply by."""
WIDE, LARGE = Tile(64, 128, WIDTH, 4, 2), Tile(128, 128, WIDTH, 8, 2)
"""In place of MANY, where there is one for each multiprocessor, and for up to MOST_ROWS rows."""
MOST_ROWS = 256
"""The most rows for which the kernel here is used."""
FEWEST_WEIGHTS = 1 << 25
"""The fewest weights for which it is used with more rows than MANY has: fewer are dequantized in less time than its few
programs take."""
HOPPER = 17, 2048
"""The fewest and the most rows for which the kernel for Hopper is used (`hopper_int4`; bench/packed_linear.py)."""
PROGRAMS = {FEW: 7, SOME: 1.5, MANY: 1.5, WIDE: 1, LARGE: 1}
"""K is divided as long as there are no more programs than this for each multiprocessor."""
LEAST = 2
"""The fewest blocks of K of a program, if K is divided."""
MOST_SPLITS = 4
"""The most programs that K is divided among: the last one adds the sums of all."""
MOST_TILES = 1 << 12
"""The most tiles of a product whose K is divided."""
AHEAD = 4
"""Blocks of a weight that are prefetched."""
CHUNK = 1 << 24
"""The most weights that are dequantized at a time: they stay in the L2 cache until they are multiplied."""
CHUNK_ROWS = 256
"""A multiple of this many rows: torch's products are slow if theirs are not aligned."""
ALIKE = 1e-2
"""The largest relative error at which the kernels are used (see `there`)."""


def _expand(one: int, magic: int, kind: str, select: str, numbers: Sequence[int] = range(4)) -> tl.constexpr:
    """PTX that expands these of the four values in a half of two words of w, each to a pair of (q - zero) * scale: with
    an exponent above it, q is the number magic + q, exactly, and so is its difference to magic + zero. Operands: the
    pairs, the words, and for each value its scale and -(magic + zero), of both words."""
    count = len(numbers)
    lines = ["{", ".reg .b32 half, q, one, nothing;"]
    lines += [
        f"mov.b32 one, 0x{one:04X}{one:04X};",
        "mov.b32 nothing, 0x80008000;",
        f"prmt.b32 half, ${count}, ${count + 1}, {select};",
    ]
    for place, number in enumerate(numbers):
        if number:
            lines.append(f"shr.b32 q, half, {4 * number};")
        lines.append(f"lop3.b32 q, {'q' if number else 'half'}, 0x000F000F, 0x{magic:04X}{magic:04X}, 0xEA;")
        lines.append(f"fma.rn.{kind} q, q, one, ${count + 4 + 4 * place};")
        lines.append(f"fma.rn.{kind} ${place}, q, ${count + 2 + 4 * place}, nothing;")
    return tl.constexpr("\n".join([*lines, "}"]))


LESS16: tl.constexpr = tl.constexpr(0xE400E400 - (1 << 32))
LESS: tl.constexpr = tl.constexpr(0xC300C300 - (1 << 32))
"""-1024 in float16 and -128 in bfloat16, twice, to whose lowest bits a zero is added."""
LOW16, HIGH16 = (_expand(0x3C00, 0x6400, "f16x2", select) for select in ("0x5410", "0x7632"))
LOW, HIGH = (_expand(0x3F80, 0x4300, "bf16x2", select) for select in ("0x5410", "0x7632"))
REGISTERS: tl.constexpr = tl.constexpr(",".join(["=r"] * 4 + ["r"] * 18))


@triton.jit
def load_facts(facts_at, stride, GROUPS: tl.constexpr, ZEROS: tl.constexpr):
    """The words of a row's facts, `stride` apart: four with scales and two with zeros; in place of those that there are
    not, others."""
    f0 = tl.load(facts_at)
    f1, f2, f3, f4, f5 = f0, f0, f0, f0, f0
    if GROUPS >= 4:
        f1 = tl.load(facts_at + stride)
    if GROUPS == 8:
        f2 = tl.load(facts_at + stride * 2)
        f3 = tl.load(facts_at + stride * 3)
    if ZEROS:
        f4 = tl.load(facts_at + stride * (GROUPS // 2))
        if GROUPS == 8:
            f5 = tl.load(facts_at + stride * (GROUPS // 2 + 1))
    return f0, f1, f2, f3, f4, f5


@triton.jit
def _scale(facts, number: tl.constexpr, GROUPS: tl.constexpr):
    """The bits of the scale of the values at place `number` of the words."""
    group: tl.constexpr = number * GROUPS // 8
    return tl.expand_dims((facts[group // 2] >> (16 * (group % 2))) & 0xFFFF, -1)


@triton.jit
def _zero(facts, number: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr, MIDDLE: tl.constexpr):
    """Their zero."""
    group: tl.constexpr = number * GROUPS // 8
    if ZEROS:
        return tl.expand_dims((facts[4 + group // 4] >> (8 * (group % 4))) & 0xFF, -1)
    else:
        return tl.expand_dims(facts[0] * 0 + MIDDLE, -1)


@triton.jit
def _operands(
    facts, number: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr, MIDDLE: tl.constexpr, LESS: tl.constexpr
):  # fmt: skip
    """The scale of the values at place `number`, and -(magic + zero), both twice in a word."""
    s, z = _scale(facts, number, GROUPS), _zero(facts, number, GROUPS, ZEROS, MIDDLE)
    return s | (s << 16), z | (z << 16) | LESS


@triton.jit
def _value(
    w, facts, number: tl.constexpr, dtype: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr,
    MIDDLE: tl.constexpr,
):  # fmt: skip
    """The values at place `number` of the words: as by `_expand`, in plain arithmetic."""
    scale, zero = _scale(facts, number, GROUPS), _zero(facts, number, GROUPS, ZEROS, MIDDLE)
    q = ((w >> (4 * number)) & 15) - zero
    if dtype == tl.float16:
        factor = scale.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        factor = (scale << 16).to(tl.float32, bitcast=True)
    return (q.to(tl.float32) * factor).to(dtype)


@triton.jit
def expanded(
    w, facts, dtype: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr, BITS: tl.constexpr, MIDDLE: tl.constexpr
):  # fmt: skip
    """The weights of words w[N, WORDS], with `load_facts` [N]: 8 slices [N, WORDS], of the block's first WORDS columns,
    the next ones, ..."""
    if BITS:
        less: tl.constexpr = LESS16 if dtype == tl.float16 else LESS
        s0, z0 = _operands(facts, 0, GROUPS, ZEROS, MIDDLE, less)
        s1, z1 = _operands(facts, 1, GROUPS, ZEROS, MIDDLE, less)
        s2, z2 = _operands(facts, 2, GROUPS, ZEROS, MIDDLE, less)
        s3, z3 = _operands(facts, 3, GROUPS, ZEROS, MIDDLE, less)
        s4, z4 = _operands(facts, 4, GROUPS, ZEROS, MIDDLE, less)
        s5, z5 = _operands(facts, 5, GROUPS, ZEROS, MIDDLE, less)
        s6, z6 = _operands(facts, 6, GROUPS, ZEROS, MIDDLE, less)
        s7, z7 = _operands(facts, 7, GROUPS, ZEROS, MIDDLE, less)
        if dtype == tl.float16:
            w0, w1, w2, w3 = tl.inline_asm_elementwise(
                LOW16, REGISTERS, [w, s0, z0, s1, z1, s2, z2, s3, z3], dtype=(tl.float16,) * 4, is_pure=True, pack=2
            )
            w4, w5, w6, w7 = tl.inline_asm_elementwise(
                HIGH16, REGISTERS, [w, s4, z4, s5, z5, s6, z6, s7, z7], dtype=(tl.float16,) * 4, is_pure=True, pack=2
            )
        else:
            w0, w1, w2, w3 = tl.inline_asm_elementwise(
                LOW, REGISTERS, [w, s0, z0, s1, z1, s2, z2, s3, z3], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2
            )
            w4, w5, w6, w7 = tl.inline_asm_elementwise(
                HIGH, REGISTERS, [w, s4, z4, s5, z5, s6, z6, s7, z7], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=2
            )
        return w0, w1, w2, w3, w4, w5, w6, w7
    else:
        w0 = _value(w, facts, 0, dtype, GROUPS, ZEROS, MIDDLE)
        w1 = _value(w, facts, 1, dtype, GROUPS, ZEROS, MIDDLE)
        w2 = _value(w, facts, 2, dtype, GROUPS, ZEROS, MIDDLE)
        w3 = _value(w, facts, 3, dtype, GROUPS, ZEROS, MIDDLE)
        w4 = _value(w, facts, 4, dtype, GROUPS, ZEROS, MIDDLE)
        w5 = _value(w, facts, 5, dtype, GROUPS, ZEROS, MIDDLE)
        w6 = _value(w, facts, 6, dtype, GROUPS, ZEROS, MIDDLE)
        w7 = _value(w, facts, 7, dtype, GROUPS, ZEROS, MIDDLE)
        return w0, w1, w2, w3, w4, w5, w6, w7


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
        w0, w1, w2, w3, w4, w5, w6, w7 = expanded(w, facts, dtype, GROUPS, ZEROS, BITS, MIDDLE)
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
    w0, w1, w2, w3, w4, w5, w6, w7 = expanded(w, facts, dtype, GROUPS, ZEROS, BITS, MIDDLE)
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


# ---------------------------------------------------------------- launches


_kernel_caches: dict[tuple[Any, ...], KernelCache] = {}
"""As that of `products`."""


def by_instructions() -> bool:
    """Whether words are expanded by `_expand`."""
    return not triton.knobs.runtime.interpret


@functools.cache
def _counts(device: torch.device) -> torch.Tensor:
    """Programs of each tile that have ended: all 0 before and after a product."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


def fitting_stages(tile: Tile, words: int, weights: int, memory: int) -> int:
    """Pipeline stages of a tile, no more than fit `memory` bytes of shared memory, with a buffer each for x, and one
    less for `words` words of each row of `weights` weights."""
    x, w = 16 * tile.rows * words, 4 * weights * (tile.columns + 8) * words
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
        num_warps=tile.warps, num_stages=fitting_stages(tile, WORDS, 1, room()),
    )  # fmt: skip


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
    """As `multiply`: at most CHUNK weights are dequantized at a time."""
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


# ---------------------------------------------------------------- where they are used


@functools.cache
def plan_for(rows: int, columns: int, depth: int, device: torch.device) -> tuple[Tile, int] | None:
    """The tile and the number of programs that K is divided among; None where it is faster to dequantize the weight
    (bench/packed_linear.py)."""
    if rows > MOST_ROWS or (rows > MANY.rows and columns * depth < FEWEST_WEIGHTS):
        return None
    tile = next((tile for tile in (FEW, SOME, MANY) if rows <= tile.rows), LARGE)
    if tile is MANY and triton.cdiv(columns, WIDE.columns) >= processors(device):
        tile = WIDE
    tiles = triton.cdiv(columns, tile.columns) * triton.cdiv(rows, tile.rows)
    splits = MOST_SPLITS if tiles <= MOST_TILES else 1
    while splits > 1 and (tiles * splits > PROGRAMS[tile] * processors(device) or depth < splits * LEAST * WIDTH):
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
    found = (MANY, 1) if batch_invariant else plan_for(len(x), *weight.shape, x.device)
    if not out.is_contiguous():
        result = int4_linear(x, weight, bias, batch_invariant)
        return out.add_(result) if add else out.copy_(result)
    kernel = None if batch_invariant else hopper_kernel(len(x), x.device, x.dtype)
    if kernel is not None and kernel.fits(x, weight, out):
        kernel.multiply(x, weight, out, *kernel.plan(len(x), *weight.shape, processors(x.device)), bias=bias, add=add)
    elif found is None:
        by_torch(x, weight, out, bias=bias, add=add)
    else:
        multiply(x, weight, out, *found, bias=bias, add=add)
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
        from radixrt.worker.cuda import hopper_int4
    except (ImportError, AttributeError):  # a Triton without Gluon, or with another version of it
        return None
    return hopper_int4 if hopper_int4.there(device, dtype) else None


@functools.cache
def there(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels compile for this device and are correct there; otherwise logs why not."""
    kinds = (FEW, 4, 32, True), (MANY, 1, 128, False), (LARGE, 1, 128, True), (None, 1, 64, True)
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
    weight, x = drawn(device, dtype, columns, 1152, size, has_zeros, rows)
    out = torch.zeros((rows, columns), dtype=dtype, device=device)
    if tile is None:
        by_torch(x, weight, out)
    else:
        multiply(x, weight, out, tile, splits)
    exact = x.float() @ weight.dequantized().float().t()
    return float((out.float() - exact).norm() / exact.norm())


def drawn(
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
