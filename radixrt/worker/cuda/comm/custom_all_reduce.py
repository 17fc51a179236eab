"""All-reduce over the GPUs of a tensor-parallel group by one kernel, in which every GPU reads the memory of the others.

A layer computes two partial products on every rank, whose sum over ranks is added to the residual stream. A product is
written into memory that all ranks can read (`CustomAllReduce.buffer`); `CustomAllReduce.add` waits until all ranks have
written, reads all buffers, and adds. Every rank adds the same numbers in the same order, so the residual stream has the
same bits on all.

    one-shot:    barrier -> read all of every rank's buffer, add, round, store
    two-shot:    barrier -> read my share of every rank's buffer, add, round, store, also into my buffer
    (by shares)  barrier -> read the shares of the others from their buffers, store

A barrier is between programs (thread blocks) of the same index on all ranks: each sets a flag in the memory of every
other one, and waits until all have set its own. Flags are never reset. They count: the value that a program sends is
the number of barriers it has passed, which it reads from the flag that it sends to itself. So the arguments of a launch
are the same for every call, as a CUDA graph requires. All ranks make the same calls with the same numbers of rows, so
programs of the same index have the same counts on all ranks. (Programs of different indices need not: small calls have
fewer programs.)

There is no barrier at the end of a call to wait until the others have read this rank's buffer. Instead there are two
buffers, used in turn. A rank writes into the buffer of call k again for call k + 2, after its own kernel of call k + 1
(all are in one stream). That kernel has passed a barrier with at least one program of every other rank's kernel of call
k + 1, and such a program sets no flag before its rank's kernel of call k has ended, with all its reads, whether it was
launched early or not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.elementwise.kernels import norm
from radixrt.worker.cuda.elementwise.launching import launch, wait
from radixrt.worker.cuda.linear.quantize_activations import launch_sizes, result, store_fp8
from radixrt.worker.model.layers.fp8 import LIMIT, Activations, Fp8Scaling

PROGRAMS = 128
"""The most programs of a call. All of them must be resident at once, or a barrier could wait for one that was never
started."""

TILE, SMALL_TILE, LARGE_TILE = 4096, 2048, 8192
"""Values that a program adds at a time: in one shot; by shares, for less than MIN_LARGE_BYTES, and for more."""

MIN_LARGE_BYTES = 16 << 20

SHARED_BYTES = {4: 1 << 20, 8: 256 << 10}
"""By number of ranks: from this many bytes on, each rank adds only its share. It then reads 2 (ranks - 1) / ranks times
the bytes instead of (ranks - 1) times, but has a second barrier, which takes 4 to 5 us. Two ranks would read as much,
and always add in one shot. With 4 H200, 0.5, 1 and 2 MiB take 9.4, 14.1 and 24 us in one shot, 12.0, 13.9 and 19 by
shares (bench.peers); the value for 8 ranks is extrapolated."""

MAX_BYTES = {2: 128 << 20, 4: 128 << 20, 8: 128 << 20}
"""By number of ranks: larger sums are left to NCCL. As far as was measured (up to this size, 2 and 4 ranks), NCCL
without multicast is slower: 2 to 3 times for few rows, by 2/5 (2 ranks) or a tenth (4 ranks) for 8192."""

ALIGNED = 256
"""Alignment in bytes of the parts of the shared memory."""


# ---------------------------------------------------------------- barrier


@triton.jit
def _set_flags(at, value, PTX: tl.constexpr):
    """Store `value` to the int32 at each of the addresses, by the first warp, with release semantics."""
    if PTX:
        tl.inline_asm_elementwise(
            """{
            .reg .u32 thread;
            .reg .pred first;
            mov.u32 thread, %tid.x;
            setp.lt.u32 first, thread, 32;
            @first st.release.sys.global.s32 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [at, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_xchg(at.to(tl.pointer_type(tl.int32)), value, sem="release", scope="sys")


@triton.jit
def _wait_flags(at, value, PTX: tl.constexpr):
    """Wait, in the first warp, until the int32 at each of the addresses is `value` or later, with acquire semantics.
    Compared by difference, because the counts wrap around."""
    if PTX:
        tl.inline_asm_elementwise(
            """{
            .reg .u32 thread;
            .reg .s32 seen;
            .reg .pred again;
            mov.u32 thread, %tid.x;
            setp.ge.u32 again, thread, 32;
            @again bra heard;
            look:
            ld.acquire.sys.global.s32 seen, [$1];
            sub.s32 seen, seen, $2;
            setp.lt.s32 again, seen, 0;
            @again bra look;
            heard:
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [at, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        at = at.to(tl.pointer_type(tl.int32))
        while tl.min(tl.atomic_add(at, 0, sem="acquire", scope="sys") - value, 0) < 0:
            pass


@triton.jit
def _passed(flags, RANK: tl.constexpr, RANKS: tl.constexpr):
    """The number of barriers that this program has passed."""
    return tl.load(flags[RANK] + tl.program_id(0) * RANKS + RANK, cache_modifier=".cg")


@triton.jit
def _barrier(flags, value, RANK: tl.constexpr, RANKS: tl.constexpr, PTX: tl.constexpr):
    """Barrier number `value` with the programs of the same index: what each wrote before is visible to all after it."""
    peer = tl.arange(0, RANKS)
    theirs = tl.zeros([RANKS], tl.int64)
    for p in tl.static_range(RANKS):
        theirs = tl.where(peer == p, flags[p].to(tl.int64), theirs)
    first = tl.program_id(0) * RANKS
    mine = flags[RANK].to(tl.int64) + (first + peer) * 4
    # All threads must have read the count, and written what others read, before the first warp sets flags.
    tl.debug_barrier()
    _set_flags(theirs + (first + RANK) * 4, value, PTX)
    _wait_flags(mine, value, PTX)
    tl.debug_barrier()


# ---------------------------------------------------------------- adding


@triton.jit
def _sum(buffers, residual_ptr, at, inside, RANKS: tl.constexpr):
    """float32 residual[at] + the sum of buffers[rank][at] in the order of ranks. Loads bypass the L1 cache, which is
    not coherent with other GPUs' writes."""
    total = tl.load(buffers[0] + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    for p in tl.static_range(1, RANKS):
        total += tl.load(buffers[p] + at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    return tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32) + total


@triton.jit(do_not_specialize=["rows"])
def _add_kernel(
    buffers, flags, residual_ptr, rows, SIZE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
    SHARES: tl.constexpr, TILE: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    value = _passed(flags, RANK, RANKS) + 1
    _barrier(flags, value, RANK, RANKS, PTX)
    dtype = residual_ptr.dtype.element_ty
    i = tl.arange(0, TILE)
    count = rows * SIZE
    tiles = tl.cdiv(count, TILE)
    if not SHARES:
        for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
            at = tile * TILE + i
            total = _sum(buffers, residual_ptr, at, at < count, RANKS)
            tl.store(residual_ptr + at, total.to(dtype), mask=at < count)
    else:  # a rank's share is every RANKS-th tile; programs of the same index take the same places in every share
        for group in range(tl.program_id(0), tl.cdiv(tiles, RANKS), tl.num_programs(0)):
            at = (group * RANKS + RANK) * TILE + i
            total = _sum(buffers, residual_ptr, at, at < count, RANKS).to(dtype)
            tl.store(residual_ptr + at, total, mask=at < count)
            tl.store(buffers[RANK] + at, total, mask=at < count)  # of this share only this rank has read the summands
        _barrier(flags, value + 1, RANK, RANKS, PTX)
        for group in range(tl.program_id(0), tl.cdiv(tiles, RANKS), tl.num_programs(0)):
            for p in tl.static_range(1, RANKS):
                at = (group * RANKS + (RANK + p) % RANKS) * TILE + i  # each rank starts with a different one
                total = tl.load(buffers[(RANK + p) % RANKS] + at, mask=at < count, cache_modifier=".cg")
                tl.store(residual_ptr + at, total, mask=at < count)


@triton.jit(do_not_specialize=["rows", "stride"])
def _add_norm_kernel(
    buffers, flags, residual_ptr, weight_ptr, out_ptr, scales_ptr, eps, rows, size, stride, RANK: tl.constexpr,
    RANKS: tl.constexpr, GROUP: tl.constexpr, LIMIT: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    dtype = residual_ptr.dtype.element_ty
    i = tl.arange(0, BLOCK)
    inside = i < size
    weight = tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)  # loaded while waiting for others
    wait(EARLY)
    value = _passed(flags, RANK, RANKS) + 1
    _barrier(flags, value, RANK, RANKS, PTX)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        total = _sum(buffers, residual_ptr, row * size + i, inside, RANKS).to(dtype)
        tl.store(residual_ptr + row * size + i, total, mask=inside)
        x = total.to(tl.float32)  # from here on as in kernels.norm
        x = x * tl.rsqrt(tl.sum(x * x, 0) / size + eps)
        x = (x.to(weight_ptr.dtype.element_ty).to(tl.float32) * weight).to(dtype)
        if GROUP > 0:
            store_fp8(x.to(tl.float32), out_ptr, scales_ptr, row, size, stride, LIMIT, GROUP, BLOCK)
        else:
            tl.store(out_ptr + row * size + i, x, mask=inside)


# ---------------------------------------------------------------- the group


def _aligned(size: int) -> int:
    return triton.cdiv(size, ALIGNED) * ALIGNED


def room_bytes(ranks: int, hidden: int, most_rows: int, dtype: torch.dtype) -> int:
    """Bytes of memory of a rank that others access: two buffers, and the flags that are set for it."""
    return 2 * _aligned(most_rows * hidden * dtype.itemsize) + _aligned(PROGRAMS * ranks * 4)


class CustomAllReduce:
    """The shared memory of a group's ranks. All ranks must make the same calls in the same order, each in one
    stream."""

    def __init__(
        self,
        rank: int,
        rooms: Sequence[torch.Tensor],
        hidden: int,
        most_rows: int,
        dtype: torch.dtype,
        keep: Any = None,
    ):
        """`rooms`: the memory of every rank as mapped in this process, uint8[room_bytes], initially zero. `keep` is
        kept alive with this object."""
        if len(rooms) not in MAX_BYTES and len(rooms) != 1:
            raise ValueError(f"a group has {', '.join(map(str, MAX_BYTES))} ranks, not {len(rooms)}")
        size = most_rows * hidden * dtype.itemsize
        self.rank, self.ranks, self.hidden, self.most_rows = rank, len(rooms), hidden, most_rows
        self._buffers = [tuple(room[turn * _aligned(size) :][:size].view(dtype) for room in rooms) for turn in range(2)]
        flags = 2 * _aligned(size)
        self._flags = tuple(room[flags : flags + PROGRAMS * len(rooms) * 4].view(torch.int32) for room in rooms)
        self._bytes = hidden * dtype.itemsize
        self._ptx = rooms[0].device.type == "cuda"
        self._last = 1
        self._keep = keep

    @classmethod
    def meet(cls, group: Any, hidden: int, most_rows: int, dtype: torch.dtype, device: torch.device) -> CustomAllReduce:
        """Set up the memory of a torch.distributed group with one process per GPU, all on one host. A collective."""
        # torch would set up NVLink multicast, which is not used here, and which fails or does harm on some hosts.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        size = room_bytes(group.size(), hidden, most_rows, dtype)
        mine = symmetric.empty(size, dtype=torch.uint8, device=device)
        mine.zero_()
        handle = symmetric.rendezvous(mine, group)
        rooms = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(group.size())]
        assert rooms[group.rank()].data_ptr() == mine.data_ptr()
        torch.cuda.synchronize(device)
        dist.barrier(group, device_ids=[mine.device.index])  # no flag is sent before it is 0
        return cls(group.rank(), rooms, hidden, most_rows, dtype, keep=(mine, handle))

    def fits(self, rows: int) -> bool:
        """Whether sums of `rows` rows fit, and are faster here than by NCCL (MAX_BYTES)."""
        return rows <= self.most_rows and rows * self._bytes <= MAX_BYTES.get(self.ranks, 0)

    def buffer(self, turn: int, rows: int) -> torch.Tensor:
        """The view that this rank's product [rows, hidden] has to be written to before `add` with the same `turn`, 0 or
        1."""
        return self._buffers[turn][self.rank][: rows * self.hidden].view(rows, self.hidden)

    def add(self, turn: int, rows: int, residual: torch.Tensor) -> None:
        """Add the sum over ranks of `buffer(turn, rows)` to residual[rows, hidden], in place: in float32, in the order
        of ranks, then the residual, rounded once. The content of the buffer is undefined afterwards.

        Turns must alternate from call to call."""
        self._add(turn, rows, residual, self._by_shares(rows))

    def _by_shares(self, rows: int) -> bool:
        least = SHARED_BYTES.get(self.ranks)
        return least is not None and rows * self._bytes >= least

    def _add(
        self,
        turn: int,
        rows: int,
        residual: torch.Tensor,
        shares: bool,
        tile: int | None = None,
        programs: int = PROGRAMS,
    ) -> None:
        self._take(turn, rows, residual)
        if tile is None:
            tile = TILE if not shares else SMALL_TILE if rows * self._bytes < MIN_LARGE_BYTES else LARGE_TILE
        groups = triton.cdiv(rows * self.hidden, tile * (self.ranks if shares else 1))
        launch(
            _add_kernel, (min(groups, programs),), None,
            self._buffers[turn], self._flags, residual, rows, self.hidden, self.rank, self.ranks, shares, tile,
            self._ptx, num_warps=max(1, min(16, tile // 256)), num_stages=1,
        )  # fmt: skip

    def add_norm(
        self,
        turn: int,
        rows: int,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        fp8_scaling: Fp8Scaling | None = None,
    ) -> Activations:
        """`add`, and then `kernels.norm` of the sum, with the same bits; in one kernel, unless it is added by
        shares."""
        if self._by_shares(rows):
            self.add(turn, rows, residual)
            return norm(residual, weight, eps, fp8_scaling)
        self._take(turn, rows, residual)
        group, block, warps = launch_sizes(self.hidden, fp8_scaling)
        normed, out, scales, stride = result(residual, rows, self.hidden, fp8_scaling)
        launch(
            _add_norm_kernel, (min(rows, PROGRAMS),), None,
            self._buffers[turn], self._flags, residual, weight, out, scales, eps, rows, self.hidden, stride, self.rank,
            self.ranks, group, LIMIT, block, self._ptx, num_warps=warps, num_stages=1,
        )  # fmt: skip
        return normed

    def _take(self, turn: int, rows: int, residual: torch.Tensor) -> None:
        if turn == self._last:
            raise ValueError(f"turn {turn} twice: others may still read what this rank writes next")
        if not 0 < rows <= self.most_rows or residual.shape != (rows, self.hidden) or not residual.is_contiguous():
            raise ValueError(f"{rows} rows onto {tuple(residual.shape)}; at most ({self.most_rows}, {self.hidden})")
        self._last = turn
