"""What attention is compiled for, and how: the heads and pages of a model, and the tiles that are fastest for them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from radixrt.worker.cuda.launching import Again
from radixrt.worker.cuda.work import Tiling
from radixrt.worker.model.spec import ModelSpec

MOST_ROWS = 64
"""Of a tile of latent attention: its results fill half of the registers."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the heads and pages that a kernel is compiled for."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    latent: int | None = None
    """With it V is the first so many elements of K (see `latent`)."""
    stated_scale: float | None = None
    """Of the softmax, where it is another than head_dim^-0.5."""
    sinks: bool = False
    """See `ModelSpec.sinks`; they are float32[heads]."""

    @classmethod
    def of(cls, spec: ModelSpec, page_size: int) -> Shape:
        latent = spec.latent and spec.latent.rank
        return cls(spec.num_heads, spec.num_kv_heads, spec.head_dim, page_size, latent, spec.scale, spec.sinks)

    @property
    def group(self) -> int:
        """Heads of a query that are in one tile: those of a KV head, at most MOST_ROWS of a latent's."""
        if self.latent is None:
            return self.heads // self.kv_heads
        return next(n for n in range(min(self.heads, MOST_ROWS), 0, -1) if self.heads % n == 0)

    @property
    def blocks(self) -> int:
        """Tiles that have the heads of a query."""
        return self.heads // self.group

    @property
    def value_dim(self) -> int:
        """Of what comes out."""
        return self.head_dim if self.latent is None else self.latent

    @property
    def key_elements(self) -> int:
        """Of K and V, a token."""
        return self.head_dim if self.latent is not None else 2 * self.kv_heads * self.head_dim

    @property
    def scale(self) -> float:
        """Of the softmax."""
        return self.head_dim**-0.5 if self.stated_scale is None else self.stated_scale

    def again(self) -> Again | None:
        """For a step's kernels, unless layers' pages are aligned in different ways."""
        return {} if self.kv_heads * self.head_dim % 16 == 0 else None


@dataclass(frozen=True, slots=True)
class Variant:
    """One compilation of the kernel: rows are queries times the heads that share a KV head."""

    rows: int
    keys: int
    warps: int
    stages: int
    specialised: bool = False
    """The kernel of `hopper`."""

    def queries(self, group: int) -> int:
        return max(1, self.rows // group)


def decode_variant(shape: Shape, itemsize: int) -> Variant:
    """For tiles of one query: one warp each, as many at once as fit (bench/attention.py --sweep)."""
    if shape.latent is not None:
        return latent_variant(max(16, triton.next_power_of_2(shape.group)), itemsize)
    rows = max(16, triton.next_power_of_2(shape.group))
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
        return latent_variant(MOST_ROWS, itemsize)
    rows = max(64, triton.next_power_of_2(shape.group))
    return Variant(rows, 128, 4, 3 if itemsize == 1 else 2) if shape.head_dim <= 128 else Variant(rows, 64, 4, 2)


def chunk_variant(shape: Shape, itemsize: int) -> Variant:
    """For tiles of many queries."""
    if shape.latent is not None:
        return latent_variant(MOST_ROWS, itemsize)
    rows = max(64, triton.next_power_of_2(shape.group))
    return Variant(rows, 64, 4, 2 if itemsize == 1 or shape.head_dim > 128 else 3)


def latent_variant(rows: int, itemsize: int) -> Variant:
    """Of so many heads and queries (bench/latent.py --sweep), by the shared memory that there is: 227, 163 or 99 KiB a
    program."""
    if rows == 16:
        return Variant(rows, 64, 4, 2) if itemsize > 1 else Variant(rows, 32, 4, 3)
    return Variant(rows, 64 if room() > 200_000 else 32 if room() > 130_000 else 16, 8, 2)


@functools.cache
def room() -> int:
    """Bytes of shared memory that a program may have; those of Hopper where there is no GPU."""
    if not torch.cuda.is_available():
        return 232_448
    return torch.cuda.get_device_properties(torch.cuda.current_device()).shared_memory_per_block_optin


def find_specialised(shape: Shape, pages: torch.dtype, dtype: torch.dtype, device: torch.device) -> Variant | None:
    """That of `hopper`, for tiles of many queries, where it is to be had."""
    if shape.latent is not None:
        return None
    try:
        from radixrt.worker.cuda import hopper
    except (ImportError, AttributeError):  # a Triton without Gluon, or with another one
        return None
    return hopper.find(shape, pages, dtype, device)


def tiling(variant: Variant, shape: Shape, programs: int, single: bool = False) -> Tiling:
    """Of the work for a variant on a chip that runs so many of its programs, each of one head, at once."""
    programs = max(1, programs // shape.blocks)
    return Tiling(variant.queries(shape.group), variant.keys, 2 * variant.keys, programs, single=single)
