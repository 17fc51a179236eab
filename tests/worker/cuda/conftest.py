"""The kernels on a CPU, in Triton's interpreter; on a GPU they run in tests/gpu."""

from __future__ import annotations

import pytest
import torch

from tests.interpreter import HAS_TRITON

collect_ignore_glob = [] if HAS_TRITON else ["test_experts.py", "test_kernels.py", "test_runner.py", "test_segments.py"]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
