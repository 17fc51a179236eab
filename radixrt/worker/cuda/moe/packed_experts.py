"""Matrix products of experts in MXFP4 (`layers.mxfp4.PackedStack`) or INT4 (`layers.int4`), by tiles of rows of one
expert (see `experts`).

The weight is the left operand, which tensor cores can take from registers. Each of the 8 values of a word belongs to
another slice of 16 columns, so a thread expands its own words, without data of other threads:

    w [N, 16] --expand--> values 0 * scale [N, 16]   times x[:, 0:16]
                          values 1 * scale [N, 16]   times x[:, 16:32]
                          ...

With few rows several programs have a part of K each, and the last one to end adds up their sums (as in `gemm`).

Words of both kinds have the same layout, and are expanded by other instructions. Experts in MXFP4 with many rows have
another kernel on Hopper (`hopper_packed_experts`).
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.attention.variants import room
from radixrt.worker.cuda.elementwise.kernels import ACTIVATIONS, gated
from radixrt.worker.cuda.elementwise.launching import launch, num_sms, wait
from radixrt.worker.cuda.linear.gemm import Tile, all_ended, of_hopper, split_counts
from radixrt.worker.cuda.linear.int4 import fitting_stages
from radixrt.worker.cuda.linear.invariant import GROUP
from radixrt.worker.cuda.linear.trials import COUNTS, draw_experts
from radixrt.worker.cuda.linear.unpack_int4 import by_instructions, load_facts, unpack_int4
from radixrt.worker.cuda.moe.routing import TILE_FIELDS, sort
from radixrt.worker.model.layers.int4 import MIDDLE, Int4
from radixrt.worker.model.layers.mxfp4 import WIDTH, PackedStack

if TYPE_CHECKING:
    from radixrt.worker.cuda.moe.routing import Order

log = logging.getLogger("radixrt.cuda")

Pair = tuple[Tile, Tile]
"""The tiles of the product with gate and up and of that with down. `columns`: of gate and of up each."""
TILES_16_NARROW = Tile(16, 64, WIDTH, 4, 4), Tile(16, 64, WIDTH, 4, 6)  # of INT4
TILES_16 = Tile(16, 128, WIDTH, 4, 3), Tile(16, 128, WIDTH, 4, 4)
TILES_32 = Tile(32, 128, WIDTH, 4, 3), Tile(32, 128, WIDTH, 4, 4)
TILES_64 = Tile(64, 64, WIDTH, 4, 3), Tile(64, 128, WIDTH, 4, 3)
TILES_128 = Tile(128, 128, WIDTH, 8, 3), Tile(128, 128, WIDTH, 4, 3)
ALIKE = 2e-2
"""The largest relative error at which the kernel is used (see `there`)."""


MAX_SPLITS, MIN_SPLIT_BLOCKS, PROGRAMS = 6, 3, 6
"""Limits of `splits_for`: splits of a product, blocks of a split, programs per multiprocessor."""


def tiles_for(rows: float, mxfp4: bool = True) -> Pair:
    """The tiles for this number of rows per expert, on average, in MXFP4 or INT4 (bench/packed_experts.py --sweep)."""
    if rows <= 0.25 and not mxfp4:
        return TILES_16_NARROW
    kinds = (8, TILES_16), (24, TILES_32), (96, TILES_64)
    return next((pair for most, pair in kinds if rows <= most), TILES_128)


def splits_for(tiles: int, blocks: int, device: torch.device) -> int:
    """The number of programs that divide the `blocks` of each of about so many tiles of a product of experts in MXFP4
    with few rows (bench/splits.py). The warps of a program wait for the words that they expand, so several programs
    should share a multiprocessor."""
    programs = PROGRAMS * num_sms(device)
    if not 0 < tiles <= programs:
        return 1
    most = max(1, min(max(2, programs // tiles), MAX_SPLITS, blocks // MIN_SPLIT_BLOCKS))
    return triton.cdiv(blocks, triton.cdiv(blocks, most))  # none without blocks


EXPAND: tl.constexpr = tl.constexpr(
    """{
    .reg .b32 low, high, size, sign;
    prmt.b32 low, $8, $9, 0x5410;
    prmt.b32 high, $8, $9, 0x7632;
"""
    + "".join(
        f"""
    {size} size, {half}, {abs(place)};
    {f"shl.b32 sign, {half}, {left}" if left else f"mov.b32 sign, {half}"};
    and.b32 size, size, 0x01C001C0;
    lop3.b32 ${number}, sign, 0x80008000, size, 0xEA;"""
        for number, (half, size, place, left) in enumerate(
            (half, "shl.b32" if 6 > 4 * n else "shr.b32", 6 - 4 * n, 12 - 4 * n)
            for half in ("low", "high")
            for n in range(4)
        )
    )
    + "\n}"
)
"""PTX that expands two words to 8 pairs of bfloat16, each 2**-126 times its value: exponent and mantissa of E2M1 (bits
0 to 2) become the lowest bits of the exponent and the highest bit of the mantissa (bits 6 to 8). This is exact for
subnormal values, too."""


@triton.jit
def _factor(scales, number: tl.constexpr):
    """2**126 times the scale of the columns 32 * number and following, bfloat16[N, 1]."""
    return ((((scales >> (8 * number)) & 255) + 126) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)[:, None]


@triton.jit
def _value(w, scales, number: tl.constexpr, dtype: tl.constexpr):
    """The values at place `number` of the words, times their scale: as by EXPAND and _factor, in plain arithmetic."""
    bits = (w >> (4 * number)) & 15
    bits = ((bits & 7) << 22) | ((bits & 8) << 28)
    factor = ((((scales >> (8 * (number // 2))) & 255) + 126) << 23).to(tl.float32, bitcast=True)
    return (bits.to(tl.float32, bitcast=True) * factor[:, None]).to(dtype)


@triton.jit
def _multiplied(
    w_at, facts_at, height, x0, x1, x2, x3, x4, x5, x6, x7, acc, GROUPS: tl.constexpr, ZEROS: tl.constexpr,
    MIDDLE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """acc[N, ROWS] plus the weight of words [N, 16] times the 8 slices [16, ROWS] of x."""
    dtype: tl.constexpr = x0.dtype
    w = tl.load(w_at)
    if GROUPS > 0:
        facts = load_facts(facts_at, height, GROUPS, ZEROS)
        w0, w1, w2, w3, w4, w5, w6, w7 = unpack_int4(w, facts, dtype, GROUPS, ZEROS, BITS, MIDDLE)
    elif BITS:
        scales = tl.load(facts_at)
        w0, w1, w2, w3, w4, w5, w6, w7 = tl.inline_asm_elementwise(
            EXPAND, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [w], dtype=(tl.bfloat16,) * 8, is_pure=True, pack=2
        )
        s0, s1, s2, s3 = _factor(scales, 0), _factor(scales, 1), _factor(scales, 2), _factor(scales, 3)
        w0, w1, w2, w3, w4, w5, w6, w7 = w0 * s0, w1 * s0, w2 * s1, w3 * s1, w4 * s2, w5 * s2, w6 * s3, w7 * s3
    else:
        scales = tl.load(facts_at)
        w0, w1 = _value(w, scales, 0, dtype), _value(w, scales, 1, dtype)
        w2, w3 = _value(w, scales, 2, dtype), _value(w, scales, 3, dtype)
        w4, w5 = _value(w, scales, 4, dtype), _value(w, scales, 5, dtype)
        w6, w7 = _value(w, scales, 6, dtype), _value(w, scales, 7, dtype)
    acc = tl.dot(w0, x0, acc, input_precision="ieee")
    acc = tl.dot(w1, x1, acc, input_precision="ieee")
    acc = tl.dot(w2, x2, acc, input_precision="ieee")
    acc = tl.dot(w3, x3, acc, input_precision="ieee")
    acc = tl.dot(w4, x4, acc, input_precision="ieee")
    acc = tl.dot(w5, x5, acc, input_precision="ieee")
    acc = tl.dot(w6, x6, acc, input_precision="ieee")
    return tl.dot(w7, x7, acc, input_precision="ieee")


@triton.jit
def _slice(x_at, real, k, depth):
    """The columns k of x, transposed: [16, ROWS]. 0 for columns that x does not have."""
    return tl.trans(tl.load(x_at, mask=real[:, None] & ((k >= 0) & (k < depth))[None, :], other=0.0))


@triton.jit(do_not_specialize=["tiles"])
def _product_kernel(
    x_ptr, rows_ptr, tiles_ptr, values_ptr, facts_ptr, bias_ptr, out_ptr, sums_ptr, counts_ptr, tiles, columns, depth,
    blocks, before, SPLITS: tl.constexpr, GROUPS: tl.constexpr, ZEROS: tl.constexpr, FACTS: tl.constexpr,
    MIDDLE: tl.constexpr, ACTIVATION: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WORDS: tl.constexpr, FIELDS: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    across = tl.cdiv(columns, COLUMNS)
    group = tl.program_id(0) // (GROUP * across)
    within = tl.program_id(0) % (GROUP * across)
    high = tl.minimum(tiles - group * GROUP, GROUP)
    tile = tiles_ptr + (group * GROUP + within % high) * FIELDS
    count = tl.load(tile + 2)
    if count == 0:
        return
    expert = tl.load(tile).to(tl.int64)
    m = tl.arange(0, ROWS)
    n = within // high * COLUMNS + tl.arange(0, COLUMNS)
    i = tl.arange(0, WORDS)
    real = m < count
    # Lanes past the last column compute another one again, which is not stored.
    row = tl.load(tile + 1) + tl.where(real, m, 0)
    source = tl.load(rows_ptr + row) if GATED else row
    x_at = x_ptr + source.to(tl.int64)[:, None] * depth + (i - before)[None, :]
    height = columns * 2 if GATED else columns
    each = tl.cdiv(blocks, SPLITS)
    first = tl.program_id(1) * each
    of_expert = (expert * blocks + first) * height
    w_at = values_ptr + (of_expert + n % columns)[:, None] * WORDS + i[None, :]
    f_at = facts_ptr + of_expert * FACTS + n % columns
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    up = tl.zeros([COLUMNS, ROWS], tl.float32)
    for block in range(first, tl.minimum(first + each, blocks)):
        begin = block * WORDS * 8
        k = begin + i - before
        x0 = _slice(x_at + begin, real, k, depth)
        x1 = _slice(x_at + begin + WORDS, real, k + WORDS, depth)
        x2 = _slice(x_at + begin + WORDS * 2, real, k + WORDS * 2, depth)
        x3 = _slice(x_at + begin + WORDS * 3, real, k + WORDS * 3, depth)
        x4 = _slice(x_at + begin + WORDS * 4, real, k + WORDS * 4, depth)
        x5 = _slice(x_at + begin + WORDS * 5, real, k + WORDS * 5, depth)
        x6 = _slice(x_at + begin + WORDS * 6, real, k + WORDS * 6, depth)
        x7 = _slice(x_at + begin + WORDS * 7, real, k + WORDS * 7, depth)
        acc = _multiplied(w_at, f_at, height, x0, x1, x2, x3, x4, x5, x6, x7, acc, GROUPS, ZEROS, MIDDLE, BITS)
        if GATED:
            u_at, g_at = w_at + columns * WORDS, f_at + columns
            up = _multiplied(u_at, g_at, height, x0, x1, x2, x3, x4, x5, x6, x7, up, GROUPS, ZEROS, MIDDLE, BITS)
        w_at += height * WORDS
        f_at += height * FACTS
    acc, up = tl.trans(acc), tl.trans(up)
    if SPLITS > 1:
        KEPT: tl.constexpr = ROWS * COLUMNS * (2 if GATED else 1)
        kept = sums_ptr + tl.program_id(0) * (SPLITS * KEPT) + m[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        own = kept + tl.program_id(1) * KEPT
        tl.store(own, acc, mask=real[:, None])
        if GATED:
            tl.store(own + ROWS * COLUMNS, up, mask=real[:, None])
        if not all_ended(counts_ptr + tl.program_id(0), SPLITS):
            return
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for split in tl.static_range(SPLITS):  # all are loaded before the first one is there
            one = kept + split * KEPT
            acc += tl.load(one, mask=real[:, None], other=0.0, cache_modifier=".cg")
            if GATED:
                up += tl.load(one + ROWS * COLUMNS, mask=real[:, None], other=0.0, cache_modifier=".cg")
    dtype = out_ptr.dtype.element_ty
    if GATED:  # rounded where the model rounds
        if BIAS:
            of_gate = bias_ptr + expert * 2 * columns + n % columns
            acc += tl.load(of_gate).to(tl.float32)[None, :]
            up += tl.load(of_gate + columns).to(tl.float32)[None, :]
        acc = gated(acc.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), ACTIVATION)
    to = out_ptr + row.to(tl.int64)[:, None] * columns + n[None, :]
    tl.store(to, acc.to(dtype), mask=real[:, None] & (n < columns)[None, :])


def product(
    x: torch.Tensor, order: Order, weight: PackedStack | Int4, tile: Tile, activation: str | None,
    bias: torch.Tensor | None = None, splits: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Rows by expert of `order` times weight[E, N, K] transposed: [T * chosen, N] for x[T * chosen, K]. With an
    activation, x is [T, K] (tokens), bias[E, N] is added if given, and the result [T * chosen, N / 2] is
    `kernels.gated` of gate and up. `splits` programs have a part of K each; None: as many
    as `splits_for`, in MXFP4."""
    if isinstance(weight, Int4):
        facts, before, bits = weight.facts, 0, by_instructions()
        kind = weight.groups, weight.has_zeros, facts.shape[2], MIDDLE
    else:
        facts, before, bits = weight.scales, weight.before, x.dtype == torch.bfloat16 and by_instructions()
        kind = 0, False, 1, 0
    _, blocks, height, words = weight.values.shape
    columns = height if activation is None else height // 2
    out = torch.empty((len(order.tokens), columns), dtype=x.dtype, device=x.device)
    entries, count, across = len(order.tokens), len(weight), triton.cdiv(columns, tile.columns)
    if splits is None:
        few = isinstance(weight, PackedStack) and tile.rows == TILES_16[0].rows
        splits = splits_for(min(entries, count) * across, blocks, x.device) if few else 1
    programs, sums, counts = len(order.tiles) * across, x, x
    if splits > 1:
        kept = splits * programs * tile.rows * tile.columns * (height // columns)
        sums, counts = torch.empty(kept, dtype=torch.float32, device=x.device), split_counts(x.device)
    launch(
        _product_kernel, (programs, splits), None,
        x, order.tokens, order.tiles, weight.values, facts, x if bias is None else bias, out, sums, counts,
        len(order.tiles), columns, weight.columns, blocks, before, splits, *kind,
        ACTIVATIONS.get(activation or "", 0), activation is not None,
        bias is not None, bits, tile.rows, tile.columns, words, TILE_FIELDS, GROUP,
        num_warps=tile.warps,
        num_stages=fitting_stages(tile, words, kind[2], height // columns, room(), of_hopper(x.device)),
    )  # fmt: skip
    return out


# ---------------------------------------------------------------- where it is used


@functools.cache
def there(device: torch.device, int4: torch.dtype | None = None) -> bool:
    """Whether the kernel compiles for this device and is correct there; otherwise logs why not. `int4`: for experts in
    INT4 of that dtype; None: for experts in MXFP4."""
    name = "MXFP4" if int4 is None else "INT4"
    try:
        tried = ((TILES_16, 4 if int4 is None else 1), (TILES_128, 1))
        error = max(_apart(device, tiles[1], int4, splits) for tiles, splits in tried)
    except Exception as problem:  # another version of the compiler
        words = type(problem).__name__, str(problem)[:300]
        log.warning("experts in %s are expanded: their kernel does not work here: %s: %s", name, *words)
        return False
    if not error < ALIKE:
        log.warning("experts in %s are expanded: their kernel has a relative error of %.1e here", name, error)
        return False
    if int4 is None:
        _hopper(device)  # tried out before graphs are captured
    return True


def hopper_kernel(x: torch.Tensor, weight: PackedStack | Int4, inner: int, rows: float) -> ModuleType | None:
    """`hopper_packed_experts`, if it is used for so many rows per expert, on average, of x[T, hidden] and of results
    [T * chosen, inner]."""
    if not isinstance(weight, PackedStack) or x.dtype != torch.bfloat16 or not x.is_cuda:
        return None
    kernel = _hopper(x.device)
    return kernel if kernel and rows >= kernel.MIN_ROWS and kernel.fits(x.shape[1], inner) else None


@functools.cache
def _hopper(device: torch.device) -> ModuleType | None:
    """`hopper_packed_experts`; None if it cannot be used."""
    if not of_hopper(device):
        return None
    try:
        from radixrt.worker.cuda.moe import hopper_packed_experts
    except (ImportError, AttributeError):  # a Triton without Gluon, or with another version of it
        return None
    return hopper_packed_experts if hopper_packed_experts.there(device) else None


def _apart(
    device: torch.device, tile: Tile, int4: torch.dtype | None = None, splits: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> float:  # fmt: skip
    """The relative error of products with a few random experts, in MXFP4 for x in `dtype`, or in INT4."""
    generator = torch.Generator(device).manual_seed(0)
    stack, chosen = draw_experts(generator, device, int4)
    order = sort(chosen, len(COUNTS), tile.rows)
    x = torch.randn((len(chosen), stack.columns), generator=generator, device=device).to(int4 or dtype)
    result = product(x, order, stack, tile, None, splits=splits).float()
    each = zip(x.float().split(COUNTS), range(len(COUNTS)), strict=True)
    exact = torch.cat([a @ stack.dequantized(number, torch.float32).T for a, number in each])
    return float((result - exact).norm() / exact.norm())
