"""The kernels of chunks and decodes against plain torch in float32, over random page tables, at a model's sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from radixrt.worker.cuda.attention import (
    attend,
    kernel_checks,  # noqa: E402
    variants,
)
from radixrt.worker.cuda.attention.attend import Scratch  # noqa: E402
from radixrt.worker.cuda.attention.chunks import PagedStep, Sequences  # noqa: E402
from radixrt.worker.cuda.attention.pages import Pages  # noqa: E402
from radixrt.worker.cuda.attention.ragged import FlashInfer, RaggedStep  # noqa: E402
from radixrt.worker.cuda.attention.segments import Cut, SegmentStep  # noqa: E402
from radixrt.worker.cuda.attention.variants import Shape  # noqa: E402
from radixrt.worker.cuda.attention.work import make_items, make_merges, sequence_tiles  # noqa: E402
from radixrt.worker.cuda.elementwise.staging import Packer  # noqa: E402
from radixrt.worker.execution.attention import TorchAttention  # noqa: E402
from radixrt.worker.execution.kv_pool import DTYPES, KVPool  # noqa: E402
from radixrt.worker.execution.prefix_sharing import Sharing  # noqa: E402
from tests.worker.pages import make_plan  # noqa: E402

HEADS, KV_HEADS, DIM = 8, 2, 128
DEVICE = torch.device("cuda")
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
CHUNKS = [(0, 300), (1000, 1), (37, 200), (700, 513), (0, 1), (2047, 2)]
SPLIT = [(700, 100), (37, 200), (1333, 1), (1024, 129)]
DECODES = [(0, 1), (5, 1), (2047, 1), (130, 1), (8000, 1)]


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("way", ["decode", "chunk", "specialised", "flashinfer", "split"])
def test_as_torch(way, kv_dtype, page_size, window, with_sinks):
    """Relative to the norm; both read the same pages, so that FP8's own rounding is no error."""
    tokens = {"decode": DECODES, "split": SPLIT}.get(way, CHUNKS)
    if way == "split" and window is not None:
        pytest.skip("prefixes are not cut where layers have windows")
    plan, table = make_plan(np.random.default_rng(0), page_size, tokens)
    pool = KVPool(1, (int(table.max()) + 1) * page_size, KV_HEADS, DIM, DTYPES[kv_dtype], DEVICE)
    if pool.dtype.itemsize == 1:
        pool.scales[0] = (0.5, 2.0)
    everything = torch.arange(pool.slots, device=DEVICE)
    pool.write(0, everything, *torch.randn(2, pool.slots, KV_HEADS, DIM, device=DEVICE))
    q = torch.randn(len(plan.tokens), HEADS, DIM, device=DEVICE).bfloat16()
    sinks = 2 * torch.randn(HEADS, device=DEVICE) if with_sinks else None
    reference = TorchAttention(pool, page_size, (window,), sinks=(sinks,))
    reference.bind(table)
    expected = reference.begin(plan, DEVICE).over_pages(0, q.float())

    shape = Shape(HEADS, KV_HEADS, DIM, page_size, sinks=with_sinks)
    keys, values = (x.flatten(0, 1) for x in pool.pages(0, page_size))
    pages = Pages(keys, values, torch.from_numpy(table).to(DEVICE), pool.scales[0], window, sinks)
    packer, out = Packer(DEVICE), torch.full_like(q, torch.nan)
    first = (np.cumsum(plan.counts) - plan.counts).astype(np.int32)
    if way == "decode":
        variant = variants.decode_variant(shape, pool.dtype.itemsize)
        cut = variants.tiling(variant, shape, 8 * 132)
        items, _ = make_items(sequence_tiles(plan.rows, plan.starts, plan.counts, first, window, 1), cut)
        merges = make_merges([items.items])
        lists = [packer.add(x) for x in (items.items, items.starts, merges.queries, merges.entries)]
        sent = packer.send()
        there, starts, queries, entries = (x.of(sent) for x in lists)
        scratch = Scratch.make(merges.partials, shape, DEVICE)
        attend.attend(
            q, keys, values, pages.table, (there, starts), out, scratch, shape, variant, causal=False,
            scales=pages.scales, sinks=sinks,
        )  # fmt: skip
        attend.merge(scratch.partials, queries, entries, out, shape, sinks=sinks)
    else:
        sequences = Sequences(plan.rows, plan.starts, plan.counts, first)
        if way in ("chunk", "specialised"):
            variant = variants.chunk_variant(shape, pool.dtype.itemsize)
            cut = variants.tiling(variant, shape, 2 * 132, single=True)
            if way == "specialised":
                variant = kernel_checks.find_specialised(shape, pool.dtype, torch.bfloat16, DEVICE)
                if variant is None or window is not None:
                    assert pool.dtype.itemsize > 1 or window is not None or CAPABILITY != (9, 0)
                    pytest.skip("this kernel is for FP8 pages on Hopper, without windows")
                cut = variants.tiling(variant, shape, 132)
            step = PagedStep(sequences, {window}, packer, shape, variant, cut)
        elif way == "split":
            flashinfer = FlashInfer(shape, torch.bfloat16, DEVICE, 4096, "fa3")
            places = np.arange(len(sequences))
            segments = np.stack([0 * places, sequences.starts, places, 0 * places + 1], axis=1)
            cut = Cut(places, Sharing(places, segments, sequences.starts.astype(np.int64)), 280)
            step = SegmentStep(sequences, cut, packer, flashinfer, 0, shape)
        else:
            flashinfer = FlashInfer(shape, torch.bfloat16, DEVICE, 2200, "fa3")  # several groups
            step = RaggedStep(sequences, {window}, packer, flashinfer, 0, page_size)
        step.sent(packer.send())
        step.run(q, pages, out)
    error = float((out.float() - expected).norm() / expected.norm())
    print(f"{way} {kv_dtype} page size {page_size} window {window}: relative error {error:.2e}")
    assert error < 1e-2


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(28, 4, 128), (8, 8, 128), (16, 1, 64), (9, 3, 64), (64, 8, 64)]
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_specialised(heads, kv_heads, dim, page_size, with_sinks):
    """Other heads, causal chunks cut anywhere; what pages hold behind the sequences is NaN."""
    shape = Shape(heads, kv_heads, dim, page_size, sinks=with_sinks)
    variant = kernel_checks.find_specialised(shape, torch.float8_e4m3fn, torch.bfloat16, DEVICE)
    if CAPABILITY != (9, 0):
        pytest.skip("this kernel is for Hopper")
    assert variant is not None
    plan, table = make_plan(np.random.default_rng(1), page_size, CHUNKS)
    pool = KVPool(1, (int(table.max()) + 2) * page_size, kv_heads, dim, torch.float8_e4m3fn, DEVICE)
    everything = torch.arange(pool.slots, device=DEVICE)
    pool.write(0, everything, *torch.randn(2, pool.slots, kv_heads, dim, device=DEVICE))
    q = torch.randn(len(plan.tokens), heads, dim, device=DEVICE).bfloat16()
    sinks = 2 * torch.randn(heads, device=DEVICE) if with_sinks else None
    reference = TorchAttention(pool, page_size, (None,), sinks=(sinks,))
    reference.bind(table)
    expected = reference.begin(plan, DEVICE).over_pages(0, q.float())
    used = torch.zeros(pool.slots, dtype=torch.bool)
    for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
        at = np.arange(start + count)
        used[torch.from_numpy(table[row, at // page_size].astype(np.int64) * page_size + at % page_size)] = True
    keys, values = (x.flatten(0, 1) for x in pool.pages(0, page_size))
    for x in (keys, values):
        x.view(torch.uint8)[~used.to(DEVICE)] = 0x7F
    pages = Pages(keys, values, torch.from_numpy(table).to(DEVICE), pool.scales[0], None, sinks)
    first = (np.cumsum(plan.counts) - plan.counts).astype(np.int32)
    sequences = Sequences(plan.rows, plan.starts, plan.counts, first)
    for programs in (kv_heads, 132, 700):
        packer, out = Packer(DEVICE), torch.full_like(q, torch.nan)
        step = PagedStep(sequences, {None}, packer, shape, variant, variants.tiling(variant, shape, programs))
        step.sent(packer.send())
        step.run(q, pages, out)
        error = float((out.float() - expected).norm() / expected.norm())
        assert error < 5e-3, f"{programs} programs: {error}"
