"""The gated product of many rows on Hopper: one persistent warp-specialized kernel computes gate, up and their
activation, so that gate and up are neither written to memory nor read again.

    producer, 1 warp          DEPTH elements of a tile's rows, of gate's and of up's, by the copy engine, STAGES ahead
                                                      |  full            ^  empty
    two consumer warpgroups   64 rows of a tile each, times gate and up; act(gate) * up -> shared memory
                                                      |
    copy engine (TMA)         result -> memory, while the next tile is multiplied

Each multiprocessor runs one program, which computes every n-th of the tiles, for n programs. Programs that run at once
compute the columns of GROUP tiles of rows: these stay in the L2 cache, and the weight is read from memory once for all
of them.
"""

from __future__ import annotations

import torch
from triton import cdiv
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from radixrt.worker.cuda.attention.warpgroups import agrees, copy, copy_back
from radixrt.worker.cuda.elementwise import kernels, launching
from radixrt.worker.cuda.elementwise.kernels import ACTIVATIONS, GATED_TILE, gated
from radixrt.worker.cuda.elementwise.launching import num_sms
from radixrt.worker.cuda.moe.hopper_experts import place
from radixrt.worker.model.layers.fp8 import plain

ROWS, PART = GATED_TILE
"""Rows of a tile, for two warpgroups of 64; and its inner features: rows of gate, and as many of up."""
DEPTH, STAGES, GROUP = 64, 4, 16
MULTIPLY_REGISTERS, FEED_REGISTERS = 240, 24


@gluon.jit
def _feed(
    x_there, w_there, x_smem, w_smem, full, empty, tiles, blocks, columns, depth, ROWS: gl.constexpr,
    PART: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    count = 0
    for index in range(gl.program_id(0), tiles * blocks, gl.num_programs(0)):
        tile, block = place(index, tiles, blocks, GROUP)
        for k in range(0, depth, DEPTH):
            stage = count % STAGES
            bar = full.index(stage)
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, x_there.block_type.nbytes + 2 * w_there.block_type.nbytes)
            copy(x_there, [tile * ROWS, k], bar, x_smem.index(stage))
            copy(w_there, [block * PART, k], bar, w_smem.index(stage).slice(0, PART))
            copy(w_there, [columns + block * PART, k], bar, w_smem.index(stage).slice(PART, PART))
            count += 1


@gluon.jit
def _multiply(
    out_there, x_smem, w_smem, out_smem, full, empty, tiles, blocks, depth, HALF: gl.constexpr,
    ACTIVATION: gl.constexpr, ROWS: gl.constexpr, PART: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """The consumer of rows 64 * HALF to 64 * HALF + 63 of each tile of the program."""
    BOTH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * PART, 16])
    EACH: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    TYPE: gl.constexpr = out_there.dtype
    steps = (depth + DEPTH - 1) // DEPTH
    count = 0
    for index in range(gl.program_id(0), tiles * blocks, gl.num_programs(0)):
        tile, block = place(index, tiles, blocks, GROUP)
        acc = gl.zeros([64, 2 * PART], gl.float32, layout=BOTH)
        for step in range(steps):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            x = x_smem.index(stage).slice(HALF * 64, 64)
            acc = warpgroup_mma(x, w_smem.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])  # the step before
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=step > 0)
            count += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES))
        gate, up = gl.split(acc.reshape([64, 2, PART]).permute((0, 2, 1)))
        gate, up = gl.convert_layout(gate, EACH), gl.convert_layout(up, EACH)
        # Rounded where the model rounds.
        inner = gated(gate.to(TYPE).to(gl.float32), up.to(TYPE).to(gl.float32), ACTIVATION).to(TYPE)
        tma.store_wait(0)  # the tile before has been read from there
        out_smem.store(inner)
        fence_async_shared()
        copy_back(out_there, [tile * ROWS + HALF * 64, block * PART], out_smem)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles"])
def _gated_specialised(
    x_there, w_there, out_there, tiles, blocks, columns, depth, ACTIVATION: gl.constexpr, ROWS: gl.constexpr,
    PART: gl.constexpr, DEPTH: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr, FEED_REGISTERS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    launching.wait(EARLY, NEXT=False)
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    x_smem = gl.allocate_shared_memory(x_there.dtype, [STAGES, ROWS, DEPTH], layout)
    w_smem = gl.allocate_shared_memory(w_there.dtype, [STAGES, 2 * PART, DEPTH], layout)
    out_smem = gl.allocate_shared_memory(out_there.dtype, [2, ROWS // 2, PART], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (
                out_there, x_smem, w_smem, out_smem.index(0), full, empty, tiles, blocks, depth, 0, ACTIVATION, ROWS,
                PART, DEPTH, STAGES, GROUP,
            )),
            (_multiply, (
                out_there, x_smem, w_smem, out_smem.index(1), full, empty, tiles, blocks, depth, 1, ACTIVATION, ROWS,
                PART, DEPTH, STAGES, GROUP,
            )),
            (_feed, (
                x_there, w_there, x_smem, w_smem, full, empty, tiles, blocks, columns, depth, ROWS, PART, DEPTH,
                STAGES, GROUP,
            )),
        ],
        [4, 1],
        [MULTIPLY_REGISTERS, FEED_REGISTERS],
    )  # fmt: skip


def product(x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
    """`kernels.gate` of x[T, K] times weight[2 N, K] transposed, gate first: [T, N]. All are bfloat16, with rows of a
    multiple of 16 bytes."""
    (rows, depth), columns = x.shape, len(weight) // 2
    tiles, blocks = cdiv(rows, ROWS), cdiv(columns, PART)
    out = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    layout = gl.NVMMASharedLayout(128, 16)
    x_there, w_there, out_there = (
        TensorDescriptor(tensor, [*tensor.shape], [*tensor.stride()], box, layout)
        for tensor, box in ((x, [ROWS, DEPTH]), (weight, [PART, DEPTH]), (out, [ROWS // 2, PART]))
    )
    launching.launch(
        _gated_specialised, (min(num_sms(x.device), tiles * blocks),), None,
        x_there, w_there, out_there, tiles, blocks, columns, depth, ACTIVATIONS[activation], ROWS, PART, DEPTH, STAGES,
        GROUP, MULTIPLY_REGISTERS, FEED_REGISTERS, num_warps=4,
    )  # fmt: skip
    return out


# ---------------------------------------------------------------- where it is used


def there(device: torch.device) -> bool:
    """Whether the kernel works on this device."""
    return agrees(lambda: _apart(device), device)


def _apart(device: torch.device) -> float:
    """The relative error to float32, for partly filled tiles, and for several tiles per program."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn((1836, 200), generator=generator, device=device).to(torch.bfloat16)
    weight = torch.randn((2 * 2568, 200), generator=generator, device=device).to(torch.bfloat16)
    exact = plain(kernels.gate((x.float() @ weight.float().T).to(x.dtype), "silu")).float()
    return float((product(x, weight, "silu").float() - exact).norm() / exact.norm())
