"""The collectives of a tensor-parallel group (see `sharding` for which rank has what).

A rank writes its part of a sum to a buffer of the group, and the group adds all parts to the residual stream, which
stays the same on all ranks, to the last bit.
"""

from __future__ import annotations

from typing import Protocol

import torch

from radixrt.worker.model.layers.fp8 import Activations
from radixrt.worker.model.layers.norms import NoNorm, Norm, NormOps
from radixrt.worker.model.parallel.sharding import Shard

AFTER_ATTENTION, AFTER_MLP = 0, 1
"""The two buffers of `Group.buffer`, which a forward pass uses alternately."""


class Group(Protocol):
    """A tensor-parallel group. All ranks must make the same calls in the same order."""

    shard: Shard

    def buffer(self, turn: int, residual: torch.Tensor) -> torch.Tensor:
        """An uninitialized tensor [T, hidden] for this rank's part of a sum that is to be added to residual[T, hidden].
        It is valid until the next call with the same `turn`, which is the next but one."""

    def add(
        self, turn: int, part: torch.Tensor, residual: torch.Tensor, norm: Norm | NoNorm, ops: NormOps
    ) -> Activations:
        """Add the sum of all ranks' parts, each in its `buffer`, to the residual, in place. Returns the `norm` of the
        new residual."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All-gather x[S, N] along columns: [S, ranks * N], contiguous."""

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite x with that of rank 0."""
