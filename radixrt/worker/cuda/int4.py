"""Matrix products with a weight in INT4 (`model.int4`): out[T, N] = x[T, K] times weight[N, K] transposed.

The weight is the left operand, which tensor cores can take from registers. Each of the 8 values of a word belongs to
another slice of 16 columns, so a thread expands its own words, without data of other threads (see `packed_experts`).

With few rows the time is that of reading the weight. Where there are few programs, K is divided among several; the last
of them to end adds their sums, always in the same order:

    weight[64 rows, K]     program 0 | program 1 | program 2 | program 3
                               sums, by way of memory   --> + --> out

With many rows, the weight is dequantized by a kernel of its own, a few rows of it at a time, and torch multiplies.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.invariant import GROUP
from radixrt.worker.cuda.launching import KernelCache, launch, wait
from radixrt.worker.cuda.products import ALIGNED, Tile, _ask, processors
from radixrt.worker.model.int4 import MIDDLE, WIDTH, WORDS, Int4

log = logging.getLogger("radixrt.cuda")

FEW, SOME, MANY = Tile(16, 64, WIDTH, 2, 4), Tile(32, 64, WIDTH, 2, 4), Tile(64, 128, WIDTH, 4, 3)
"""Tiles for up to 16, 32 and 64 rows. The first two are multiplied by instructions of a warp (mma.sync), which take
fewer instructions around them than those of four warps (wgmma)."""
LARGE = Tile(128, 128, WIDTH, 8, 3)
MOST_ROWS = 512
"""The most rows for which the kernel here is used."""
PROGRAMS = 4
"""Programs for each multiprocessor, for which K is divided."""
LEAST = 4
"""The fewest blocks of K for a program, if K is divided."""
MOST_TILES = 1 << 12
"""The most tiles of a product whose K is divided."""
AHEAD = 4
"""Blocks of a weight that are prefetched."""
CHUNK = 1 << 25
"""The most weights that are dequantized at a time: they stay in the L2 cache until they are multiplied."""
ALIKE = 1e-2
"""The largest relative error at which the kernels are used (see `there`)."""


def _expand(one: int, magic: int, kind: str) -> tl.constexpr:
    """PTX that expands two words of w to 8 pairs, each (q - zero) * scale: with an exponent above it, q is the number
    magic + q, exactly, and so is the difference to -(magic + zero). Of the operands, 2 and 3 are those of the values 0
    and 1, and so on: scales, and -(magic + zero)."""
    lines = ["{", ".reg .b32 low, high, q, one, nothing;"]
    lines += [f"mov.b32 one, 0x{one:04X}{one:04X};", "mov.b32 nothing, 0x80008000;"]
    lines += ["prmt.b32 low, $8, $9, 0x5410;", "prmt.b32 high, $8, $9, 0x7632;"]
    for number in range(8):
        half, place = ("low", "high")[number // 4], 4 * (number % 4)
        scale = 10 + 4 * (number // 2)
        if place:
            lines.append(f"shr.b32 q, {half}, {place};")
        lines.append(f"lop3.b32 q, {'q' if place else half}, 0x000F000F, 0x{magic:04X}{magic:04X}, 0xEA;")
        lines.append(f"fma.rn.{kind} q, q, one, ${scale + 2};")
        lines.append(f"fma.rn.{kind} ${number}, q, ${scale}, nothing;")
    return tl.constexpr("\n".join([*lines, "}"]))


LESS16: tl.constexpr = tl.constexpr(0xE400E400 - (1 << 32))
LESS: tl.constexpr = tl.constexpr(0xC300C300 - (1 << 32))
"""-1024 in float16 and -128 in bfloat16, twice, to whose lowest bits a zero is added."""
EXPAND16 = _expand(0x3C00, 0x6400, "f16x2")
EXPAND = _expand(0x3F80, 0x4300, "bf16x2")
REGISTERS: tl.constexpr = tl.constexpr(",".join(["=r"] * 8 + ["r"] * 18))


@triton.jit
def _scale(first, second, number: tl.constexpr, GROUPS: tl.constexpr):
    """The bits of the scale of the columns 32 * number and following."""
    group: tl.constexpr = number * GROUPS // 4
    if group < 2:
        return (first >> (16 * group)) & 0xFFFF
    else:
        return (second >> (16 * group - 32)) & 0xFFFF


@triton.jit
def _zero(zeros, number: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr, MIDDLE: tl.constexpr):
    """Their zero."""
    if GROUPS == 1:
        return (zeros >> 16) & 0xFF
    elif ZEROS:
        return (zeros >> (8 * (number * GROUPS // 4))) & 0xFF
    else:
        return zeros * 0 + MIDDLE


@triton.jit
def _value(w, scale, zero, number: tl.constexpr, dtype: tl.constexpr):
    """The values at place `number` of the words: as by EXPAND, in plain arithmetic."""
    q = ((w >> (4 * number)) & 15) - zero[:, None]
    if dtype == tl.float16:
        factor = scale.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        factor = (scale << 16).to(tl.float32, bitcast=True)
    return (q.to(tl.float32) * factor[:, None]).to(dtype)


@triton.jit
def expanded(
    w, first, second, zeros, dtype: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr, BITS: tl.constexpr,
    MIDDLE: tl.constexpr,
):  # fmt: skip
    """The weights of words w[N, 16]: 8 slices [N, 16], of the columns 0-15, 16-31, ... `first`, `second` and `zeros`:
    int32[N], the facts with the scales of groups 0 and 1, those of groups 2 and 3, and those with zeros."""
    s0, s1 = _scale(first, second, 0, GROUPS), _scale(first, second, 1, GROUPS)
    s2, s3 = _scale(first, second, 2, GROUPS), _scale(first, second, 3, GROUPS)
    z0, z1 = _zero(zeros, 0, GROUPS, ZEROS, MIDDLE), _zero(zeros, 1, GROUPS, ZEROS, MIDDLE)
    z2, z3 = _zero(zeros, 2, GROUPS, ZEROS, MIDDLE), _zero(zeros, 3, GROUPS, ZEROS, MIDDLE)
    if BITS:
        s0, s1, s2, s3 = s0 | (s0 << 16), s1 | (s1 << 16), s2 | (s2 << 16), s3 | (s3 << 16)
        z0, z1, z2, z3 = z0 | (z0 << 16), z1 | (z1 << 16), z2 | (z2 << 16), z3 | (z3 << 16)
        s0, s1, s2, s3 = s0[:, None], s1[:, None], s2[:, None], s3[:, None]
        z0, z1, z2, z3 = z0[:, None], z1[:, None], z2[:, None], z3[:, None]
        if dtype == tl.float16:
            z0, z1, z2, z3 = z0 | LESS16, z1 | LESS16, z2 | LESS16, z3 | LESS16
            return tl.inline_asm_elementwise(
                EXPAND16, REGISTERS,
                [w, s0, z0, s1, z1, s2, z2, s3, z3],
                dtype=(tl.float16,) * 8, is_pure=True, pack=2,
            )  # fmt: skip
        else:
            z0, z1, z2, z3 = z0 | LESS, z1 | LESS, z2 | LESS, z3 | LESS
            return tl.inline_asm_elementwise(
                EXPAND, REGISTERS,
                [w, s0, z0, s1, z1, s2, z2, s3, z3],
                dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2,
            )  # fmt: skip
    else:
        w0, w1 = _value(w, s0, z0, 0, dtype), _value(w, s0, z0, 1, dtype)
        w2, w3 = _value(w, s1, z1, 2, dtype), _value(w, s1, z1, 3, dtype)
        w4, w5 = _value(w, s2, z2, 4, dtype), _value(w, s2, z2, 5, dtype)
        w6, w7 = _value(w, s3, z3, 6, dtype), _value(w, s3, z3, 7, dtype)
        return w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def load_facts(facts_at, stride, GROUPS: tl.constexpr, ZEROS: tl.constexpr):
    """`first`, `second` and `zeros` of `expanded`; words are `stride` apart."""
    first = tl.load(facts_at)
    second, zeros = first, first
    if GROUPS == 4:
        second = tl.load(facts_at + stride)
    if ZEROS and GROUPS > 1:
        zeros = tl.load(facts_at + (GROUPS + 1) // 2 * stride)
    return first, second, zeros


@triton.jit
def _slice(x_at, real, k, depth, WHOLE: tl.constexpr):
    """The columns k of x, transposed: [16, ROWS]. 0 for columns that x does not have."""
    if WHOLE:
        return tl.trans(tl.load(x_at, mask=real[:, None], other=0.0))
    else:
        return tl.trans(tl.load(x_at, mask=real[:, None] & (k < depth)[None, :], other=0.0))


@triton.jit(do_not_specialize=["rows", "splits"])
def _product_kernel(
    x_ptr, values_ptr, facts_ptr, bias_ptr, out_ptr, sums_ptr, counts_ptr, rows, splits, columns, depth, blocks,
    GROUPS: tl.constexpr, ZEROS: tl.constexpr, SPLIT: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    WHOLE: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WORDS: tl.constexpr,
    FACTS: tl.constexpr, MIDDLE: tl.constexpr, AHEAD: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr,
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
    each = tl.cdiv(blocks, splits)
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
    x_at = x_ptr + tl.where(real, m, 0).to(tl.int64)[:, None] * depth + (begin * WORDS * 8 + i)[None, :]
    w_at = values_ptr + begin.to(tl.int64) * columns * WORDS + at[:, None] * WORDS + i[None, :]
    f_at = facts_ptr + begin.to(tl.int64) * columns * FACTS + at
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    for block in range(begin, end):
        k = block * WORDS * 8 + i
        w = tl.load(w_at)
        first, second, zeros = load_facts(f_at, columns, GROUPS, ZEROS)
        x0 = _slice(x_at, real, k, depth, WHOLE)
        x1 = _slice(x_at + WORDS, real, k + WORDS, depth, WHOLE)
        x2 = _slice(x_at + WORDS * 2, real, k + WORDS * 2, depth, WHOLE)
        x3 = _slice(x_at + WORDS * 3, real, k + WORDS * 3, depth, WHOLE)
        x4 = _slice(x_at + WORDS * 4, real, k + WORDS * 4, depth, WHOLE)
        x5 = _slice(x_at + WORDS * 5, real, k + WORDS * 5, depth, WHOLE)
        x6 = _slice(x_at + WORDS * 6, real, k + WORDS * 6, depth, WHOLE)
        x7 = _slice(x_at + WORDS * 7, real, k + WORDS * 7, depth, WHOLE)
        w0, w1, w2, w3, w4, w5, w6, w7 = expanded(w, first, second, zeros, dtype, GROUPS, ZEROS, BITS, MIDDLE)
        acc = tl.dot(w0, x0, acc, input_precision="ieee")
        acc = tl.dot(w1, x1, acc, input_precision="ieee")
        acc = tl.dot(w2, x2, acc, input_precision="ieee")
        acc = tl.dot(w3, x3, acc, input_precision="ieee")
        acc = tl.dot(w4, x4, acc, input_precision="ieee")
        acc = tl.dot(w5, x5, acc, input_precision="ieee")
        acc = tl.dot(w6, x6, acc, input_precision="ieee")
        acc = tl.dot(w7, x7, acc, input_precision="ieee")
        x_at += WORDS * 8
        w_at += columns * WORDS
        f_at += columns * FACTS
    if SPLIT:
        to = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        kept = sums_ptr + tile * (COLUMNS * ROWS) + to
        apart = tl.num_programs(0) * (COLUMNS * ROWS)
        tl.store(kept + split * apart, acc, mask=real[None, :])
        tl.debug_barrier()  # the sums of all threads are there before they are counted
        ended = tl.atomic_add(counts_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if ended != splits - 1:
            return
        acc = tl.zeros([COLUMNS, ROWS], tl.float32)
        for one in range(0, splits):
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


@triton.jit
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
    first, second, zeros = load_facts(facts_ptr + block * columns * FACTS + at, columns, GROUPS, ZEROS)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    w0, w1, w2, w3, w4, w5, w6, w7 = expanded(w, first, second, zeros, dtype, GROUPS, ZEROS, BITS, MIDDLE)
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
    """Whether words are expanded by EXPAND."""
    return not triton.knobs.runtime.interpret


@functools.cache
def _counts(device: torch.device) -> torch.Tensor:
    """Programs of each tile that have ended: all 0 before and after a product."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)


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
        weight.groups, weight.has_zeros, splits > 1, bias is not None, add, depth % WIDTH == 0, by_instructions(),
        tile.rows, tile.columns, WORDS, weight.facts.shape[1], MIDDLE, AHEAD, GROUP,
    )  # fmt: skip
    cache = None
    if all(pointer.data_ptr() % ALIGNED == 0 for pointer in pointers):
        given = x.device, x.dtype, more.dtype, out.dtype, columns, depth, tile
        cache = _kernel_caches.setdefault((*given, *kinds), {})
    launch(
        _product_kernel, (tiles, splits, 1), cache,
        *pointers, rows, splits, columns, depth, blocks, *kinds, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def dequantize(weight: Int4, out: torch.Tensor, first: int = 0) -> None:
    """Write the rows of the weight from `first` on to out[count, K]."""
    columns = 64
    launch(
        _dequantize_kernel, (triton.cdiv(len(out), columns), weight.values.shape[0]), None,
        weight.values, weight.facts, out, first, len(out), weight.rows, weight.columns,
        weight.groups, weight.has_zeros, by_instructions(), columns, WORDS, weight.facts.shape[1], MIDDLE, num_warps=4,
    )  # fmt: skip


def by_torch(
    x: torch.Tensor, weight: Int4, out: torch.Tensor, *, bias: torch.Tensor | None = None, add: bool = False
) -> None:  # fmt: skip
    """As `multiply`: at most CHUNK weights are dequantized at a time."""
    each = min(weight.rows, max(1, CHUNK // weight.columns))
    part = torch.empty((each, weight.columns), dtype=weight.dtype, device=x.device)
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
    (bench/int4.py)."""
    if rows > MOST_ROWS:
        return None
    tile = next((tile for tile in (FEW, SOME, MANY) if rows <= tile.rows), LARGE)
    tiles = triton.cdiv(columns, tile.columns) * triton.cdiv(rows, tile.rows)
    if tile is LARGE or tiles > MOST_TILES:
        return tile, 1
    return tile, max(1, min(PROGRAMS * processors(device) // tiles, triton.cdiv(depth, WIDTH) // LEAST))


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
    if found is None:
        by_torch(x, weight, out, bias=bias, add=add)
    else:
        multiply(x, weight, out, *found, bias=bias, add=add)
    return out


@functools.cache
def there(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels compile for this device and are correct there; otherwise logs why not."""
    try:
        error = max(
            _apart(device, dtype, *kind) for kind in ((FEW, 4, 32, True), (MANY, 1, 128, False), (None, 1, 64, True))
        )
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
    return True


def _apart(
    device: torch.device, dtype: torch.dtype, tile: Tile | None, splits: int, size: int, has_zeros: bool
) -> float:  # fmt: skip
    """The relative error of a product with a random weight, whose groups have `size` columns. No tile: `by_torch`."""
    generator = torch.Generator(device).manual_seed(0)
    rows, columns, depth = 40, 200, 1152
    q = torch.randint(16, (columns, depth), generator=generator, device=device, dtype=torch.int32)
    scales = 0.01 + 0.01 * torch.rand((columns, depth // size), generator=generator, device=device)
    zeros = torch.randint(17, scales.shape, generator=generator, device=device, dtype=torch.int32)
    weight = Int4.of(q, scales.to(dtype), zeros if has_zeros else None, dtype)
    assert weight is not None
    x = torch.randn((rows, depth), generator=generator, device=device).to(dtype)
    out = torch.zeros((rows, columns), dtype=dtype, device=device)
    if tile is None:
        by_torch(x, weight, out)
    else:
        multiply(x, weight, out, tile, splits)
    exact = x.float() @ weight.dequantized().float().t()
    return float((out.float() - exact).norm() / exact.norm())
