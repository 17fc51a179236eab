"""Routed experts beside an MLP in every layer, each with norms of its own (Gemma 4).

    residual += after(after_mlp(mlp(before(residual))) + after_experts(experts(before_experts(residual))))

The router's input is the residual stream, normalized and multiplied by a vector. Ranks have to add up both outputs,
2 T rows: a norm of a sum needs the whole sum, so that ranks cannot add the two beforehand."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixrt.worker.model.layers.fp8 import Activations, Fp8Scaling, plain
from radixrt.worker.model.layers.layers import FeedForward
from radixrt.worker.model.layers.mlp import SharedMlp
from radixrt.worker.model.layers.moe import Experts
from radixrt.worker.model.layers.norms import NoNorm, Norm
from radixrt.worker.model.layers.ops import Ops
from radixrt.worker.model.parallel.group import AFTER_MLP, Group


@dataclass(frozen=True, slots=True)
class MlpWithExperts(FeedForward):
    """In place of `mlp.Mlp`. In a `group`, each rank has a part of the intermediate features of both."""

    mlp: SharedMlp
    after_mlp: Norm
    experts: Experts
    before_experts: Norm
    after_experts: Norm
    before_router: Norm
    after: Norm
    group: Group | None

    @property
    def fp8_scaling(self) -> Fp8Scaling | None:
        return self.mlp.gate_up.fp8_scaling

    def add(self, x: Activations, residual: torch.Tensor, norm: Norm | NoNorm, ops: Ops) -> Activations:
        tokens = len(residual)
        both = residual.new_zeros((2 * tokens, residual.shape[1]))  # so that ranks meet once
        part = both if self.group is None else self.group.buffer(AFTER_MLP, both).zero_()
        self.mlp.add(x, part[:tokens], ops)
        for_router = plain(self.before_router(residual, ops))
        ops.experts(self.experts, plain(self.before_experts(residual, ops)), part[tokens:], for_router)
        if self.group is not None:
            self.group.add(AFTER_MLP, part, both, NoNorm(), ops)
        of_mlp, of_experts = both.split(tokens)
        both = plain(self.after_mlp(of_mlp, ops)) + plain(self.after_experts(of_experts, ops))
        return ops.add_normed(both, self.after, residual, norm)
