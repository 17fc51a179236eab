"""FlashInfer where there is no GPU: what it says it cannot do."""

from __future__ import annotations

import pytest
import torch

from radixrt.worker.cuda.attend import Shape
from radixrt.worker.cuda.ragged import FlashInfer


def test_heads_that_fa3_has_no_kernel_for_are_refused_before_anything_is_built():
    with pytest.raises(RuntimeError, match=r"heads of \(64, 128, 256\), not of 80"):
        FlashInfer(Shape(32, 32, 80, 1), torch.bfloat16, torch.device("cpu"), 4096, "fa3")
