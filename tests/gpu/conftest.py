"""Tests that need a CUDA GPU; without one they are skipped."""

from __future__ import annotations

import importlib.util

import pytest
import torch


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
