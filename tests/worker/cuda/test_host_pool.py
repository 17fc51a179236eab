"""Copies between pages and host memory: the kernel, and how copies are divided."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from radixrt.worker.cuda import host_pool
from radixrt.worker.cuda.host_pool import copy_rows


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_pages_become_rows_and_rows_pages(device, dtype):
    """In several planes, whose number and width are no powers of two; also wider than a program."""
    planes = [
        torch.randint(0, 100, (count, 12, words), dtype=dtype, device=device)
        for count, words in ((6, 9), (1, 1), (3, 1500))
    ]
    pages = torch.tensor([7, 2, 11], dtype=torch.int32, device=device)
    expected = torch.cat([x[:, pages.long()].transpose(0, 1).flatten(1) for x in planes], 1)
    rows = torch.zeros((5, expected.shape[1]), dtype=dtype, device=device)
    copy_rows(planes, rows, pages, out=True)
    assert torch.equal(rows[:3], expected) and not rows[3:].any()
    before = [x.clone() for x in planes]
    to = torch.tensor([1, 5, 3], dtype=torch.int32, device=device)
    copy_rows(planes, rows, to, out=False)
    for x, old in zip(planes, before, strict=True):
        old[:, to.long()] = old[:, pages.long()]
        assert torch.equal(x, old)


def test_slots_that_follow_each_other_are_one_copy():
    slots = np.array([3, 4, 5, 9, 11, 12], dtype=np.int32)
    assert host_pool._runs(slots) == [(3, 0, 3), (9, 3, 1), (11, 4, 2)]


def test_copies_go_in_the_order_of_slots_a_part_at_a_time():
    pairs = np.array([[5, 6, 7, 8, 9], [30, 10, 20, 50, 40]], dtype=np.int32)
    parts = [[x.tolist() for x in part] for part in host_pool._parts(pairs, by=1, most=2)]
    assert parts == [[[6, 7], [10, 20]], [[5, 9], [30, 40]], [[8], [50]]]
    assert host_pool._parts(pairs[:, :0], by=0, most=2) == []
