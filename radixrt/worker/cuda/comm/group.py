"""A tensor-parallel group of GPUs that read each other's memory: small sums by one kernel, large ones by NCCL."""

from __future__ import annotations

import logging
from typing import ClassVar

import torch
from torch import distributed

from radixrt.worker.cuda.comm.custom_all_reduce import MAX_BYTES, CustomAllReduce
from radixrt.worker.model.layers.fp8 import Activations
from radixrt.worker.model.layers.norms import NoNorm, Norm, NormOps
from radixrt.worker.parallel.group import TorchGroup

log = logging.getLogger("radixrt.cuda")


class CustomAllReduceGroup(TorchGroup):
    """A TorchGroup that adds small sums by peer access, where GPUs can read each other's memory."""

    _all_reduce: CustomAllReduce | None = None
    _has_met: ClassVar[bool] = False
    """Symmetric memory can be set up once in a process: torch knows groups by name, all have the same name, and a
    second group would wait for the ranks of the first."""

    def meet(self, hidden: int, rows: int, dtype: torch.dtype) -> None:
        """Set up memory that all ranks can read, for sums of up to `rows` rows of `hidden` elements. A collective."""
        ranks = self.shard.size
        rows = min(rows, MAX_BYTES.get(ranks, 0) // (hidden * dtype.itemsize))
        all_reduce, problem = None, f"{ranks} ranks"
        if not self.smallest(int(not CustomAllReduceGroup._has_met)):
            rows, problem = 0, "this process had such a worker before"
        CustomAllReduceGroup._has_met = True
        try:
            if rows:
                all_reduce = CustomAllReduce.meet(distributed.group.WORLD, hidden, rows, dtype, self._device)
        except (RuntimeError, ValueError) as error:  # no peer access, or a torch without symmetric memory
            problem = str(error)[:500]
        if self.smallest(int(all_reduce is not None)):
            self._all_reduce = all_reduce
        elif self.shard.rank == 0:
            log.warning("GPUs do not read each other's memory (%s): sums by NCCL, slower", problem)

    def _peers_for(self, rows: int) -> CustomAllReduce | None:
        """Those that add so few rows."""
        return self._all_reduce if self._all_reduce is not None and self._all_reduce.fits(rows) else None

    def buffer(self, turn: int, residual: torch.Tensor) -> torch.Tensor:
        if (peers := self._peers_for(len(residual))) is not None:
            return peers.buffer(turn, len(residual))
        return super().buffer(turn, residual)

    def add(
        self, turn: int, part: torch.Tensor, residual: torch.Tensor, norm: Norm | NoNorm, ops: NormOps
    ) -> Activations:
        rows = len(residual)
        if (peers := self._peers_for(rows)) is None:
            return super().add(turn, part, residual, norm, ops)
        if isinstance(norm, NoNorm) or norm.centered:
            peers.add(turn, rows, residual)
            return norm(residual, ops)
        return peers.add_norm(turn, rows, residual, norm.weight, norm.eps, norm.fp8_scaling)
