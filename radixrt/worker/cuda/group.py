"""A tensor-parallel group of GPUs that read each other's memory: small sums by one kernel, large ones by NCCL."""

from __future__ import annotations

import logging
from typing import ClassVar

import torch
from torch import distributed

from radixrt.worker.cuda.peers import MOST_BYTES, Peers
from radixrt.worker.group import TorchGroup
from radixrt.worker.model.layers import Norm, Ops
from radixrt.worker.model.scaled import Rounded

log = logging.getLogger("radixrt.cuda")


class PeerGroup(TorchGroup):
    """As TorchGroup; where the memory of the others cannot be read, nothing but it."""

    _peers: Peers | None = None
    _has_met: ClassVar[bool] = False
    """torch takes a group of the same name, as all are, for the one it knows, and would wait for who has left."""

    def meet(self, hidden: int, rows: int, dtype: torch.dtype) -> None:
        """Lend the others memory for sums of up to so many rows. All ranks call it, or none."""
        ranks = self.shard.size
        rows = min(rows, MOST_BYTES.get(ranks, 0) // (hidden * dtype.itemsize))
        found, problem = None, f"{ranks} ranks"
        if not self.smallest(int(not PeerGroup._has_met)):
            rows, problem = 0, "this process had such a worker before"
        PeerGroup._has_met = True
        try:
            if rows:
                found = Peers.meet(distributed.group.WORLD, hidden, rows, dtype, self._device)
        except (RuntimeError, ValueError) as error:  # no way from GPU to GPU, a torch without it
            problem = str(error)[:500]
        if self.smallest(int(found is not None)):
            self._peers = found
        elif self.shard.rank == 0:
            log.warning("GPUs do not read each other's memory (%s): sums by NCCL, slower", problem)

    def _by_peers(self, rows: int) -> bool:
        return self._peers is not None and self._peers.fits(rows)

    def room(self, turn: int, residual: torch.Tensor) -> torch.Tensor:
        if self._by_peers(len(residual)):
            return self._peers.buffer(turn, len(residual))
        return super().room(turn, residual)

    def add(
        self, turn: int, part: torch.Tensor, residual: torch.Tensor, norm: Norm, ops: Ops
    ) -> torch.Tensor | Rounded:
        rows = len(residual)
        if not self._by_peers(rows):
            return super().add(turn, part, residual, norm, ops)
        return self._peers.add_norm(turn, rows, residual, norm.weight, norm.eps, norm.rounding)
