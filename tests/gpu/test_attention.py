"""FlashInfer's kernels against plain torch in float32, over random page tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from radixrt.worker.attention import FlashInferAttention, TorchAttention
from radixrt.worker.kv import DTYPES, KVPool
from radixrt.worker.model.spec import ModelSpec
from radixrt.worker.plan import Plan

HEADS, KV_HEADS, DIM = 8, 2, 128


def make_plan(rng: np.random.Generator, page_size: int, tokens: list[tuple[int, int]]) -> tuple[Plan, np.ndarray]:
    """Sequences of (cached, new) tokens on pages drawn at random; (plan, page table)."""
    held = [-(-(start + count) // page_size) for start, count in tokens]
    pages = rng.permutation(np.arange(1, sum(held) + 1)).astype(np.int32)
    table = np.zeros((len(tokens), max(held)), dtype=np.int32)
    slots = []
    for row, ((start, count), n) in enumerate(zip(tokens, held, strict=True)):
        table[row, :n], pages = pages[:n], pages[n:]
        page, offset = np.divmod(np.arange(start, start + count), page_size)
        slots.append(table[row, page] * page_size + offset)
    starts, counts = (np.array(x, dtype=np.int32) for x in zip(*tokens, strict=True))
    rows, ones = np.arange(len(tokens), dtype=np.int32), np.ones(len(tokens), dtype=np.int32)
    ids = np.zeros(counts.sum(), dtype=np.int32)
    plan = Plan(1, (), rows, starts, counts, ids, np.concatenate(slots).astype(np.int32), ones, ones.astype(bool))
    return plan, table


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("kv_dtype", "bound"), [("bfloat16", 1e-2), ("fp8_e4m3", 1e-2)])
def test_as_torch(kv_dtype, bound, page_size, window):
    """Relative to the norm; both read the same pages, so that FP8's own rounding is no error."""
    device, rng = torch.device("cuda"), np.random.default_rng(0)
    spec = ModelSpec(0, 0, 0, 1, HEADS, KV_HEADS, DIM, 0, 0.0, {}, "silu", False, (window,))
    tokens = [(0, 300), (1000, 1), (37, 200), (5, 1), (700, 513), (0, 1), (2047, 1)]
    plan, table = make_plan(rng, page_size, tokens)
    slots = (int(table.max()) + 1) * page_size
    pool = KVPool(1, slots, KV_HEADS, DIM, DTYPES[kv_dtype], device)
    generator = torch.Generator(device).manual_seed(0)
    everything = torch.arange(slots, device=device)
    pool.write(0, everything, *torch.randn(2, slots, KV_HEADS, DIM, device=device, generator=generator))
    total = int(plan.counts.sum())
    q = torch.randn(total, HEADS, DIM, device=device, generator=generator).bfloat16()
    k, v = torch.randn(2, total, KV_HEADS, DIM, device=device, generator=generator).bfloat16()
    reference = TorchAttention(pool, page_size, spec.windows)
    fast = FlashInferAttention(pool, page_size, spec, torch.bfloat16)
    for attention in (reference, fast):
        attention.bind(table)
    expected = reference.begin(plan, device)(0, q.float(), k.float(), v.float())
    found = fast.begin(plan, device)(0, q, k, v)
    error = float((found.float() - expected).norm() / expected.norm())
    print(f"{kv_dtype} page size {page_size} window {window}: relative error {error:.2e}")
    assert error < bound
