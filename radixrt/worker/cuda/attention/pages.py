"""What attention reads of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Pages:
    """K and V of one layer, [slots, kv_heads, D], the page table int32[rows, pages], and the scales that K and V are
    multiplied by; `sinks` float32[heads], if the model has them."""

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    scales: tuple[float, float]
    window: int | None
    sinks: torch.Tensor | None = None
