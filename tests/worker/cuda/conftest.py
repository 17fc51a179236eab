"""Tests of kernels on a CPU, in Triton's interpreter; tests/gpu runs them on a GPU."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch

from tests.interpreter import HAS_TRITON

collect_ignore_glob = [] if HAS_TRITON else ["test_*.py"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class _Numpy(ModuleType):
    def __getattr__(self, name: str) -> object:
        return getattr(np, name)

    @staticmethod
    def matmul(a: np.ndarray, b: np.ndarray, dtype: np.dtype | None = None) -> np.ndarray:
        return (a[..., :, :, None] * b[..., None, :, :]).sum(-2, dtype=dtype)


@pytest.fixture
def steady_products(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter's matrix products round independently of a row's position: on some processors, numpy's do
    not."""
    if device.type == "cpu":
        from triton.runtime import interpreter

        monkeypatch.setattr(interpreter, "np", _Numpy("numpy"))
