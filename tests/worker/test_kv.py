"""The pool of K and V: what comes back is what the dtype can hold."""

from __future__ import annotations

import pytest
import torch

from radixrt.worker.execution.kv_pool import DTYPES, KVPool

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", DTYPES)
def test_values_come_back_rounded_to_the_dtype(name):
    dtype = DTYPES[name]
    pool = KVPool(layers=2, slots=10, kv_heads=2, head_dim=4, dtype=dtype, device=CPU)
    k, v = torch.randn(2, 3, 2, 4, generator=torch.Generator().manual_seed(0))
    slots = torch.tensor([7, 2, 5])
    pool.write(1, slots, k, v)
    found_k, found_v = pool.read(1, slots, torch.float32)
    assert torch.equal(found_k, k.to(dtype).float()) and torch.equal(found_v, v.to(dtype).float())
    assert not pool.read(0, slots, torch.float32)[0].any(), "other layers are untouched"
    assert not pool.read(1, torch.tensor([0, 1, 3]), torch.float32)[1].any(), "other slots are untouched"
    assert pool.nbytes == 2 * 2 * 10 * 2 * 4 * dtype.itemsize


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_fp8_saturates(name):
    pool = KVPool(1, 4, 1, 2, DTYPES[name], CPU)
    huge = torch.tensor([[[1e6, -1e6]]])
    pool.write(0, torch.tensor([1]), huge, huge)
    limit = torch.finfo(DTYPES[name]).max
    assert pool.read(0, torch.tensor([1]), torch.float32)[0].flatten().tolist() == [limit, -limit]
