"""Products of experts with many rows each, on Hopper, by a persistent warp-specialized kernel.

    producer, 1 warp          DEPTH elements of a tile's rows and of the weight's, by the copy engine, STAGES ahead
                                                      |  full            ^  empty
    two consumer warpgroups   64 rows of a tile each, times two parts of the weight: gate and up, or neighbouring rows

Each multiprocessor runs one program, which computes every n-th of the tiles, for n programs, and loads ahead across
tiles. Programs that run at once compute the columns of GROUP tiles of rows, so that these and the weight stay in the L2
cache.
"""

from __future__ import annotations

import functools

import torch
from triton import cdiv
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from radixrt.worker.cuda.attention.warpgroups import agrees, copy
from radixrt.worker.cuda.elementwise import kernels, launching
from radixrt.worker.cuda.elementwise.kernels import ACTIVATIONS, gated
from radixrt.worker.cuda.moe import routing
from radixrt.worker.cuda.moe.routing import TILE_FIELDS, Order
from radixrt.worker.model.layers.fp8 import plain

ROWS = 128
"""Rows of a tile: two warpgroups of 64."""
PART = 128
"""Rows of a weight that are copied at once: two such parts are a tile's columns."""
DEPTH, STAGES, GROUP = 64, 4, 2
MULTIPLY_REGISTERS, FEED_REGISTERS = 240, 24


@gluon.jit
def place(index, tiles, blocks, GROUP: gl.constexpr):
    """Returns (tile of rows, block of columns) of a tile index: column after column of GROUP tiles of rows."""
    first = index // (GROUP * blocks) * GROUP
    within = index - first * blocks
    size = gl.minimum(tiles - first, GROUP)
    return first + within % size, within // size


@gluon.jit
def _feed(
    x_there, w_there, tiles_ptr, x_smem, w_smem, full, empty, tiles, blocks, columns, depth, GATED: gl.constexpr,
    PART: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    count = 0
    for index in range(gl.program_id(0), tiles * blocks, gl.num_programs(0)):
        tile, block = place(index, tiles, blocks, GROUP)
        at = tiles_ptr + tile * FIELDS
        if gl.load(at + 2) > 0:
            row = gl.load(at + 1)
            if GATED:
                one = gl.load(at) * 2 * columns + block * PART
                other = one + columns
            else:
                one = gl.load(at) * columns + block * 2 * PART
                other = one + PART
            for k in range(0, depth, DEPTH):
                stage = count % STAGES
                bar = full.index(stage)
                mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
                mbarrier.expect(bar, 2 * x_there.block_type.nbytes + 2 * w_there.block_type.nbytes)
                copy(x_there, [row, k], bar, x_smem.index(2 * stage))
                copy(w_there, [one, k], bar, w_smem.index(stage).slice(0, PART))
                copy(w_there, [other, k], bar, w_smem.index(stage).slice(PART, PART))
                copy(x_there, [row + 64, k], bar, x_smem.index(2 * stage + 1))
                count += 1


@gluon.jit
def _store(values, out_ptr, row, first, size, columns, HALF: gl.constexpr, PART: gl.constexpr):
    """Store a warpgroup's values [64, PART] from column `first` on, as far as the tile has rows (`size`): 16 bytes per
    thread, four threads per row."""
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]], [], [64, PART],
    )  # fmt: skip
    values = gl.convert_layout(values.to(out_ptr.dtype.element_ty), L)
    m = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, L))
    n = first + gl.arange(0, PART, layout=gl.SliceLayout(0, L))
    at = out_ptr + (row + m).to(gl.int64)[:, None] * columns + n[None, :]
    gl.store(at, values, mask=(m < size)[:, None] & (n < columns)[None, :])


@gluon.jit
def _multiply(
    tiles_ptr, bias_ptr, out_ptr, x_smem, w_smem, full, empty, tiles, blocks, columns, depth, HALF: gl.constexpr,
    GATED: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr, PART: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    """The consumer of rows 64 * HALF to 64 * HALF + 63 of each tile of the program."""
    BOTH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * PART, 16])
    EACH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    TYPE: gl.constexpr = out_ptr.dtype.element_ty
    steps = (depth + DEPTH - 1) // DEPTH
    count = 0
    for index in range(gl.program_id(0), tiles * blocks, gl.num_programs(0)):
        tile, block = place(index, tiles, blocks, GROUP)
        at = tiles_ptr + tile * FIELDS
        size = gl.load(at + 2)
        if size > HALF * 64:
            acc = gl.zeros([64, 2 * PART], gl.float32, layout=BOTH)
            for step in range(steps):
                stage = count % STAGES
                mbarrier.wait(full.index(stage), (count // STAGES) & 1)
                w = w_smem.index(stage).permute((1, 0))
                acc = warpgroup_mma(x_smem.index(2 * stage + HALF), w, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])  # the step before
                mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=step > 0)
                count += 1
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES))
            one, other = gl.split(acc.reshape([64, 2, PART]).permute((0, 2, 1)))
            one, other = gl.convert_layout(one, EACH), gl.convert_layout(other, EACH)
            row = gl.load(at + 1)
            if GATED:  # rounded where the model rounds
                first = block * PART
                if BIAS:
                    n = (first + gl.arange(0, PART, layout=gl.SliceLayout(0, EACH))) % columns
                    of_gate = bias_ptr + gl.load(at).to(gl.int64) * 2 * columns + n
                    one += gl.load(of_gate).to(gl.float32)[None, :]
                    other += gl.load(of_gate + columns).to(gl.float32)[None, :]
                one = gated(one.to(TYPE).to(gl.float32), other.to(TYPE).to(gl.float32), ACTIVATION)
                _store(one, out_ptr, row, first, size, columns, HALF, PART)
            else:
                first = block * 2 * PART
                _store(one, out_ptr, row, first, size, columns, HALF, PART)
                _store(other, out_ptr, row, first + PART, size, columns, HALF, PART)
        elif size > 0:  # only the other warpgroup has rows of this tile
            for _ in range(steps):
                stage = count % STAGES
                mbarrier.wait(full.index(stage), (count // STAGES) & 1)
                mbarrier.arrive(empty.index(stage))
                count += 1


@gluon.jit(do_not_specialize=["tiles"])
def _product_specialised(
    x_there, w_there, tiles_ptr, bias_ptr, out_ptr, tiles, blocks, columns, depth, GATED: gl.constexpr,
    BIAS: gl.constexpr, ACTIVATION: gl.constexpr, PART: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, FIELDS: gl.constexpr, MULTIPLY_REGISTERS: gl.constexpr, FEED_REGISTERS: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    launching.wait(EARLY, NEXT=False)
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    x_smem = gl.allocate_shared_memory(x_there.dtype, [2 * STAGES, 64, DEPTH], layout)
    w_smem = gl.allocate_shared_memory(w_there.dtype, [STAGES, 2 * PART, DEPTH], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                tiles_ptr, bias_ptr, out_ptr, x_smem, w_smem, full, empty, tiles, blocks, columns, depth, 0, GATED,
                BIAS, ACTIVATION, PART, DEPTH, STAGES, GROUP, FIELDS,
            )),
            (_multiply, (
                tiles_ptr, bias_ptr, out_ptr, x_smem, w_smem, full, empty, tiles, blocks, columns, depth, 1, GATED,
                BIAS, ACTIVATION, PART, DEPTH, STAGES, GROUP, FIELDS,
            )),
            (_feed, (
                x_there, w_there, tiles_ptr, x_smem, w_smem, full, empty, tiles, blocks, columns, depth, GATED, PART,
                DEPTH, STAGES, GROUP, FIELDS,
            )),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, FEED_REGISTERS],
    )  # fmt: skip


def product(
    x: torch.Tensor, order: Order, weight: torch.Tensor, activation: str | None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply x[R, K], sorted by expert as `order` says, by each expert's weight[E, N, K] transposed: [R, N]. With an
    activation, bias[E, N] is added if given, and the result [R, N / 2] is `kernels.gated` of both halves. `order` must
    have tiles of ROWS. All are bfloat16, with rows of a multiple of 16 bytes."""
    gate = activation is not None
    columns, depth = weight.shape[1] // (2 if gate else 1), weight.shape[2]
    blocks, tiles = cdiv(columns, PART if gate else 2 * PART), len(order.tiles)
    out = torch.empty((len(x), columns), dtype=x.dtype, device=x.device)
    layout = gl.NVMMASharedLayout(128, 16)
    whole = weight.flatten(0, 1)
    x_there = TensorDescriptor(x, [*x.shape], [*x.stride()], [64, DEPTH], layout)
    w_there = TensorDescriptor(whole, [*whole.shape], [*whole.stride()], [PART, DEPTH], layout)
    launching.launch(
        _product_specialised, (min(_multiprocessors(x.device), tiles * blocks),), None,
        x_there, w_there, order.tiles, x if bias is None else bias, out, tiles, blocks, columns, depth, gate,
        bias is not None, ACTIVATIONS.get(activation or "", 0), PART, DEPTH, STAGES, GROUP, TILE_FIELDS,
        MULTIPLY_REGISTERS, FEED_REGISTERS, num_warps=4,
    )  # fmt: skip
    return out


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


# ---------------------------------------------------------------- where it is used


def there(device: torch.device) -> bool:
    """Whether the kernel works on this device."""
    return agrees(lambda: _apart(device), device)


def _apart(device: torch.device) -> float:
    """The relative error to float32, for a few experts whose rows fill tiles, or do not."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).to(torch.bfloat16)

    counts = (300, 0, 128, 40)
    chosen = torch.cat([torch.full((count, 1), e, dtype=torch.int32) for e, count in enumerate(counts)]).to(device)
    order = routing.sort(chosen, len(counts), ROWS)
    x, gate_up, down = draw(len(chosen), 200), draw(len(counts), 2 * 136, 200), draw(len(counts), 264, 200)
    bias, results, exact = draw(len(counts), 2 * 136), [], []
    for weight, activation in ((gate_up, "silu"), (down, None)):
        results.append(product(x, order, weight, activation, bias if activation else None).float().flatten())
        each = [a.float() @ w.float().T for a, w in zip(x.split(counts), weight, strict=True)]
        if activation:
            made = torch.cat([a + b.float() for a, b in zip(each, bias, strict=True)]).to(x.dtype)
            exact.append(plain(kernels.gate(made, activation)).float().flatten())
        else:
            exact.append(torch.cat(each).flatten())
    a, b = torch.cat(results), torch.cat(exact)
    return float((a - b).norm() / b.norm())
