"""Decodes and chunks on random trees, on the device, against float32."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from radixrt.worker.cuda.attention import (
    decodes,
    kernel_checks,  # noqa: E402
    variants,
)
from radixrt.worker.cuda.attention.decodes import Cuts, SharedPrefixes, sharing_cost
from radixrt.worker.cuda.attention.ragged import FlashInfer  # noqa: E402
from radixrt.worker.cuda.attention.segments import Chip, SegmentStep, cut_shared  # noqa: E402
from radixrt.worker.cuda.attention.step import Kernels  # noqa: E402
from radixrt.worker.cuda.attention.variants import Shape  # noqa: E402
from radixrt.worker.cuda.elementwise.staging import Packer  # noqa: E402
from radixrt.worker.execution.kv_pool import DTYPES  # noqa: E402
from tests.worker.cuda.forest import Forest  # noqa: E402

DEVICE = torch.device("cuda")


def forest(seed: int, new: tuple[int, ...], page_size: int, kv_dtype: str) -> Forest:
    fan_out, lengths = (64, (1, 17, 130)) if seed % 3 == 0 else (4, (3, 200, 900))
    return Forest(
        seed, new, shape=Shape(8, 2, 128, page_size), least=1, fan_out=fan_out, depth=6, most=70,
        lengths=tuple(max(1, n // page_size) for n in lengths), dtype=torch.bfloat16, pages=DTYPES[kv_dtype],
        device=DEVICE,
    )  # fmt: skip


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def flashinfer():
    return {size: FlashInfer(Shape(8, 2, 128, size), torch.bfloat16, DEVICE, 1 << 16, "fa3") for size in (1, 16)}


@pytest.mark.parametrize("specialised", [False, True])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_decodes(page_size, kv_dtype, specialised, flashinfer, monkeypatch):
    """50 trees; every other one with all that is large by FlashInfer."""
    if specialised and (kv_dtype == "bfloat16" or torch.cuda.get_device_capability() != (9, 0)):
        pytest.skip("this kernel is for FP8 pages on Hopper")
    monkeypatch.setattr(decodes, "SLOWER", 1 << 20)
    worst, used = 0.0, 0
    for seed in range(50):
        batch = forest(seed, (1,), page_size, kv_dtype)
        monkeypatch.setattr(decodes, "LARGE", 3000 if seed % 2 else 1 << 40)
        size = batch.pool.dtype.itemsize
        few, many = variants.decode_variant(batch.shape, size), variants.shared_variant(batch.shape, size)
        if specialised:
            many = kernel_checks.find_specialised(batch.shape, batch.pool.dtype, torch.bfloat16, DEVICE)
        cuts = Cuts(
            variants.tiling(few, batch.shape, 8 * 132),
            variants.tiling(many, batch.shape, (1 if specialised else 2) * 132),
            sharing_cost(batch.shape, size, many), SharedPrefixes(Chip(8, 132), 1 << 16),
        )  # fmt: skip
        out, _, shared_prefixes = batch.decode(cuts, Kernels(batch.shape, few, many), flashinfer[page_size])
        worst, used = max(worst, error(out, batch.expected())), used + shared_prefixes
    what = f"{kv_dtype}, page size {page_size}, specialised {specialised}"
    print(f"decodes on trees, {what}: {used} with trunks, worst relative error {worst:.2e}")
    assert worst < 1e-2 and used > 10


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_chunks(page_size, kv_dtype, flashinfer, monkeypatch):
    worst, used = 0.0, 0
    for seed in range(25):
        batch = forest(seed, (1, 30, 200), page_size, kv_dtype)
        size = batch.pool.dtype.itemsize
        cut = cut_shared(batch.paths, batch.sequences, batch.shape, 50 * size, Chip(8, 132), 1 << 16, 1)
        if cut is None:
            continue
        packer, out = Packer(DEVICE), torch.full_like(batch.q, torch.nan)
        step = SegmentStep(batch.sequences, cut, packer, flashinfer[page_size], 0, batch.shape)
        step.sent(packer.send())
        step.run(batch.q, batch.pages, out)
        mine = ~out.isnan().any(-1).any(-1)
        assert int(mine.sum()) == int(batch.counts[cut.chosen].sum())
        worst, used = max(worst, error(out[mine], batch.expected()[mine])), used + 1
    print(f"chunks on trees, {kv_dtype}, page size {page_size}: {used} trees, worst relative error {worst:.2e}")
    assert worst < 1e-2 and used > 10
