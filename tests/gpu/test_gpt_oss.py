"""What gpt-oss' checkpoints are read by, on the device."""

from __future__ import annotations

import torch

from radixrt.worker.model.mxfp4 import dequantize


def test_mxfp4_is_dequantized_as_on_a_cpu():
    """All bytes, all scales, those of subnormal numbers and of NaN among them."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(256, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    for dtype in (torch.bfloat16, torch.float32):
        expected = dequantize(blocks, scales, dtype)
        found = dequantize(blocks.cuda(), scales.cuda(), dtype).cpu()
        assert torch.equal(found.isnan(), expected.isnan()) and expected[-1].isnan().all()
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())
