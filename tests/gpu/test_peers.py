"""The sum over the GPUs of a group, one process a GPU: against float32, late ranks, graphs."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bench.peers import check, on_every_gpu  # noqa: E402


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sums_over_gpus(ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    print(on_every_gpu(ranks, check))
