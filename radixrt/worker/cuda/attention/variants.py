"""Compile-time parameters of attention kernels: a model's heads and pages (Shape), and the fastest tiles for them
(Variant)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from radixrt.worker.cuda.attention.work import Tiling
from radixrt.worker.cuda.elementwise.launching import KernelCache
from radixrt.worker.model.spec.spec import ModelSpec

MAX_ROWS = 64
"""The most rows of a tile of latent attention: its accumulator fills half of the registers."""
WIDE = 256
"""Elements of the largest heads for which tiles need not be smaller."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The heads and pages that a kernel is compiled for."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    latent: int | None = None
    """For latent attention: V is the first `latent` elements of K (see `latent.latent`)."""
    scale_override: float | None = None
    """Scale of the softmax, if it is not head_dim^-0.5."""
    sinks: bool = False
    """Whether there are sinks, float32[heads] (see `AttentionSpec.sinks`)."""
    cap: float = 0.0
    """See `AttentionSpec.score_cap`; 0: there is none."""
    chunked: bool = False
    """See `AttentionSpec.chunked`."""
    v_dim: int | None = None
    """Elements of a head of V, if they are not as many as those of K."""

    @classmethod
    def of(cls, spec: ModelSpec, page_size: int, layer: int = 0) -> Shape:
        """That of the `layer`-th layer with attention."""
        own, latent = spec.layer(spec.attention_layers[layer]), None if spec.latent is None else spec.latent.rank
        v_dim = own.value_dim if own.value_dim != own.head_dim else None
        return cls(
            spec.num_heads, own.kv_heads, own.head_dim, page_size, latent, spec.scale, own.sinks,
            spec.attention.score_cap or 0.0, spec.attention.chunked, v_dim,
        )  # fmt: skip

    @property
    def group(self) -> int:
        """Heads of a query in one tile: those of a KV head. In latent attention, the largest divisor of the number of
        heads that is at most MAX_ROWS."""
        if self.latent is None:
            return self.heads // self.kv_heads
        return next(n for n in range(min(self.heads, MAX_ROWS), 0, -1) if self.heads % n == 0)

    @property
    def blocks(self) -> int:
        """Tiles that the heads of a query take."""
        return self.heads // self.group

    @property
    def value_dim(self) -> int:
        """Width of a head's result."""
        return self.latent or self.v_dim or self.head_dim

    @property
    def key_elements(self) -> int:
        """Elements of K and V of one token."""
        return self.head_dim if self.latent is not None else self.kv_heads * (self.head_dim + self.value_dim)

    @property
    def scale(self) -> float:
        """Scale of the softmax."""
        return self.head_dim**-0.5 if self.scale_override is None else self.scale_override

    def kernel_cache(self) -> KernelCache | None:
        """A new KernelCache for a step's kernels; None if the pages of layers may be aligned differently."""
        return {} if self.v_dim or self.kv_heads * self.head_dim % 16 == 0 else None


@dataclass(frozen=True, slots=True)
class Variant:
    """Tile sizes and launch parameters of a kernel: rows are queries times the heads that share a KV head."""

    rows: int
    keys: int
    warps: int
    stages: int
    specialised: bool = False
    """Whether it is for a kernel of `hopper` or `hopper_full`, with specialized warps."""

    def queries(self, group: int) -> int:
        return max(1, self.rows // group)


def decode_variant(shape: Shape, itemsize: int) -> Variant:
    """For tiles of one query. Few warps each, so that many programs run at once (bench/attention.py --sweep)."""
    if shape.latent is not None:
        return latent_variant(max(16, triton.next_power_of_2(shape.group)), itemsize)
    rows = max(16, triton.next_power_of_2(shape.group))
    if shape.head_dim > WIDE or itemsize > 2:
        return fitting_variant(rows, shape, itemsize)
    if rows > 16:
        return Variant(rows, 32, 4, 2)
    if shape.head_dim > 128:
        return Variant(rows, 32, 1, 3) if itemsize == 1 else Variant(rows, 32, 4, 2)
    if itemsize == 1:
        return Variant(rows, 64, 1, 2)
    return Variant(rows, 64, 2, 3) if shape.head_dim > 64 else Variant(rows, 64, 4, 2)


def shared_variant(shape: Shape, itemsize: int) -> Variant:
    """For tiles of many sequences under one prefix."""
    if shape.latent is not None:
        return latent_variant(MAX_ROWS, itemsize)
    rows = max(64, triton.next_power_of_2(shape.group))
    if not _fits(rows, shape, itemsize):
        return fitting_variant(rows, shape, itemsize)
    return Variant(rows, 128, 4, 3 if itemsize == 1 else 2) if shape.head_dim <= 128 else Variant(rows, 64, 4, 2)


def chunk_variant(shape: Shape, itemsize: int) -> Variant:
    """For tiles of many queries."""
    if shape.latent is not None:
        return latent_variant(MAX_ROWS, itemsize)
    rows = max(64, triton.next_power_of_2(shape.group))
    if not _fits(rows, shape, itemsize):
        return fitting_variant(rows, shape, itemsize)
    return Variant(rows, 64, 4, 2 if itemsize == 1 or shape.head_dim > 128 else 3)


def _fits(rows: int, shape: Shape, itemsize: int) -> bool:
    """Whether tiles of so many rows and 64 keys need not be smaller: with heads of 256 elements, pages of 16 bits and
    99 KiB of shared memory, they do. Beside queries, keys and values there are the weights of values."""
    query, key = _bytes(shape, itemsize)
    wide = shape.head_dim > WIDE or itemsize > 2
    return not wide and rows * query + 64 * key + 2 * 64 * rows <= room()


def _bytes(shape: Shape, itemsize: int) -> tuple[int, int]:
    """Bytes of shared memory that a query takes in a tile, and K and V of a token."""
    dims = triton.next_power_of_2(shape.head_dim), triton.next_power_of_2(shape.value_dim)
    return dims[0] * max(2, itemsize), sum(dims) * itemsize


def fitting_variant(rows: int, shape: Shape, itemsize: int) -> Variant:
    """For large heads, and for float32, in tiles of up to `rows` rows: the most rows, and then the most keys, that the
    chip has shared memory for."""
    query, key = _bytes(shape, itemsize)
    most, least = 32 if rows == 16 else 64, max(16, triton.next_power_of_2(shape.group))
    while True:
        for keys, stages in ((most, 2), (most // 2, 2), (16, 2), (16, 1)):
            if rows * query + keys * stages * key <= room() or (rows, keys, stages) == (least, 16, 1):
                return Variant(rows, keys, 4 if rows == 16 else 8, stages)
        rows //= 2


def latent_variant(rows: int, itemsize: int) -> Variant:
    """For latent attention, in tiles of `rows` heads times queries (bench/latent.py --sweep), by the shared memory of
    the chip: 227, 163 or 99 KiB for a program."""
    if rows == 16:
        return Variant(rows, 64, 4, 2) if itemsize > 1 else Variant(rows, 32, 4, 3)
    return Variant(rows, 64 if room() > 200_000 else 32 if room() > 130_000 else 16, 8, 2)


@functools.cache
def room() -> int:
    """Bytes of shared memory that a program may have; those of Hopper where there is no GPU."""
    if not torch.cuda.is_available():
        return 232_448
    chip = torch.cuda.get_device_properties(torch.cuda.current_device())
    return chip.shared_memory_per_block_optin  # type: ignore[attr-defined]  # torch's stubs lack it


def tiling(variant: Variant, shape: Shape, programs: int, single: bool = False) -> Tiling:
    """The tiling for a variant on a chip that runs `programs` programs at once. Each computes one of `shape.blocks`
    blocks of heads."""
    programs = max(1, programs // shape.blocks)
    return Tiling(variant.queries(shape.group), variant.keys, 2 * variant.keys, programs, 0, single, shape.chunked)
