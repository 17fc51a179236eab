"""Sums and gathers over the ranks of a tensor-parallel group, as the model sees them (see `sharding` for who has what).

A rank's part of a sum goes where the group wants it, and the group adds all parts to the residual stream, which stays
the same on all ranks, to the last bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from radixrt.worker.model.sharding import Shard

if TYPE_CHECKING:
    from radixrt.worker.model.layers import Norm, Ops
    from radixrt.worker.model.scaled import Rounded

AFTER_ATTENTION, AFTER_MLP = 0, 1
"""The turns of `Group.room`: a forward pass takes them one after the other."""


class Group(Protocol):
    """What ranks do together. All ranks make the same calls in the same order."""

    shard: Shard

    def room(self, turn: int, residual: torch.Tensor) -> torch.Tensor:
        """Uninitialized [T, hidden] for this rank's part of a sum that is added to residual[T, hidden]; it may be used
        until the next call but one, whose `turn` is the same."""

    def add(
        self, turn: int, part: torch.Tensor, residual: torch.Tensor, norm: Norm, ops: Ops
    ) -> torch.Tensor | Rounded:
        """Add the sum of all ranks' parts, each in its `room`, to the residual, in place; the norm of that."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x[S, N] of all ranks side by side: [S, ranks * N], contiguous."""

    def broadcast(self, x: torch.Tensor) -> None:
        """Make x what it is on rank 0, in place."""
