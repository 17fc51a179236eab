"""Which kernels of attention a device can use for some heads: their results are compared with those of others."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from radixrt.worker.cuda.attention import attend, variants
from radixrt.worker.cuda.attention.attend import Scratch
from radixrt.worker.cuda.attention.variants import Shape, Variant
from radixrt.worker.cuda.attention.work import make_items, sequence_tiles


def find_specialised(shape: Shape, pages: torch.dtype, dtype: torch.dtype, device: torch.device) -> Variant | None:
    """The variant of `hopper`, for tiles of many queries; None if it cannot be used, or gives wrong results here."""
    if shape.latent is not None:
        return None
    try:
        from radixrt.worker.cuda.attention import hopper, warpgroups
    except (ImportError, AttributeError):  # a Triton without Gluon, or with another version of it
        return None
    if not hopper.applies(shape, pages, dtype):
        return None
    special = hopper.VARIANT
    return special if warpgroups.agrees(lambda: _apart(special, shape, pages, dtype, device), device) else None


def _apart(special: Variant, shape: Shape, pages: torch.dtype, dtype: torch.dtype, device: torch.device) -> float:
    """The relative difference to the kernel of `attend`, for a few sequences and causal chunks."""
    starts, counts = np.array([0, 130, 600]), np.array([300, 1, 70])
    generator = torch.Generator(device).manual_seed(0)
    held = -(-int((starts + counts).max()) // shape.page_size)
    size = (held * shape.page_size, shape.kv_heads, shape.head_dim)
    keys, values = (torch.randn(size, generator=generator, device=device).to(pages) for _ in range(2))
    table = torch.arange(held, dtype=torch.int32, device=device)[None]
    first = np.cumsum(counts) - counts
    q = torch.randn((int(counts.sum()), shape.heads, shape.head_dim), generator=generator, device=device).to(dtype)
    sinks = torch.randn(shape.heads, generator=generator, device=device) if shape.sinks else None
    results = []
    for variant in (special, variants.chunk_variant(shape, pages.itemsize)):
        cut = variants.tiling(variant, shape, shape.kv_heads)
        items, _ = make_items(sequence_tiles(0 * starts, starts, counts, first, None, cut.queries), cut)
        scratch, out = Scratch.make(int(items.partials), shape, device), torch.empty_like(q)
        items.items[:, 7] = 1  # with one program no tile is divided: results are written directly
        work = torch.from_numpy(items.items).to(device), torch.from_numpy(items.starts).to(device)
        attend.attend(q, keys, values, table, work, out, scratch, shape, variant, sinks=sinks)
        results.append(out.float())
    return float((results[0] - results[1]).norm() / results[1].norm())


def same_bits(
    few: Variant, chunk: Variant, shape: Shape, pages: torch.dtype, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether the variant `few` computes the attention of single queries with the same bits as that of chunks."""
    if few.keys != chunk.keys or device.type != "cuda":
        return False
    lengths = np.array([1, 63, 64, 65, 700, 1000])
    generator = torch.Generator(device).manual_seed(0)
    held = -(-int(lengths.max()) // shape.page_size)
    size = held * shape.page_size, shape.kv_heads
    keys, values = (
        torch.randn((*size, dim), generator=generator, device=device).to(pages)
        for dim in (shape.head_dim, shape.value_dim)
    )
    table = torch.arange(held, dtype=torch.int32, device=device)[None]
    q = torch.randn((len(lengths), shape.heads, shape.head_dim), generator=generator, device=device).to(dtype)
    places, ones = np.arange(len(lengths)), np.ones(len(lengths), dtype=np.int64)
    tiles = sequence_tiles(np.zeros_like(places), lengths - 1, ones, places, None, 1)
    scratches = []
    for variant in (few, chunk):
        cut = variants.tiling(variant, shape, 1)
        items, _ = make_items(tiles, dataclasses.replace(cut, fixed=1 << 20))
        scratch = Scratch.make(len(items), shape, device)
        there = torch.from_numpy(items.items).to(device), None
        attend.attend(q, keys, values, table, there, q, scratch, shape, variant)
        scratches.append(scratch)
    return all(torch.equal(a, b) for a, b in zip(*(scratch.partials for scratch in scratches), strict=True))
