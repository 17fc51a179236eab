"""Tests that need a CUDA GPU; without one they are skipped."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

SHARE = 0.88
"""Of the GPU's memory, which processes that run tests beside each other divide; the rest is for their contexts."""


def pytest_configure(config: pytest.Config) -> None:
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if processes > 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(SHARE / processes)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if not torch.cuda.is_available():
        reason = "no CUDA GPU, or hidden from this run (make gpu-test)"
    elif importlib.util.find_spec("flashinfer") is None:
        reason = "FlashInfer is not installed (pip install 'radixrt[cuda]')"
    for item in items:
        if "tests/gpu/" in item.nodeid.replace("\\", "/"):
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.timeout(600))  # kernels are built at first use
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))
