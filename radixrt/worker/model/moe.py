"""Mixture of experts: a router picks the experts of each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from radixrt.worker.model.checkpoint import Weights
from radixrt.worker.model.linear import Linear, stack
from radixrt.worker.model.mxfp4 import PackedStack
from radixrt.worker.model.scaled import Rounding, Scaled, ScaledLinear, stack_scaled
from radixrt.worker.model.sharding import Part, Shard
from radixrt.worker.model.spec import ExpertsSpec, ModelSpec, Routing

if TYPE_CHECKING:
    from radixrt.worker.model.layers import Ops

WHOLE = "mlp."
"""Where transformers 5 has all experts of a layer in one tensor, of every family; it seldom writes files so."""


@dataclass(frozen=True, slots=True)
class ScaledStack:
    """A weight of each expert, as `scaled.Scaled` is one: FP8 `values` [E, N, K] and float32 `scales`, [E, N, 1], or of
    blocks [E, ceil(N / BLOCK), ceil(K / BLOCK)] with more behind."""

    values: torch.Tensor
    scales: torch.Tensor
    rounding: Rounding

    @classmethod
    def like(cls, weight: Scaled, count: int) -> ScaledStack:
        """Uninitialized, for so many."""
        values, scales = (part.new_empty((count, *part.shape)) for part in (weight.values, weight.scales))
        return cls(values, scales, weight.rounding)

    def put(self, number: int, weight: Scaled) -> bool:
        """Whether it is of the same kind as the others, and now one of them."""
        if weight.rounding is not self.rounding:
            return False
        self.values[number], self.scales[number] = weight.values, weight.scales
        return True

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, number: int) -> Scaled:
        return Scaled(self.values[number], self.scales[number], self.rounding)

    def numel(self) -> int:
        """Of the values, as a tensor has it."""
        return self.values.numel()

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


@dataclass(frozen=True, slots=True)
class Experts:
    """`gate_up` [E, 2 I, hidden] (the rows of the gate first) and `down` [E, hidden, I] of all E experts of a layer,
    both of the same kind."""

    router: Linear
    gate_up: torch.Tensor | ScaledStack | PackedStack
    down: torch.Tensor | ScaledStack | PackedStack
    chosen: int
    """Experts a token."""
    normalized: bool
    """The weights of a token's experts sum to 1."""
    activation: str
    batch_invariant: bool
    routing: Routing = Routing()
    bias: torch.Tensor | None = None
    """float32[E]: added to scores to choose by them (see `Routing.has_bias`)."""
    gate_up_bias: torch.Tensor | None = None
    """[E, 2 I], in the order of the rows."""
    down_bias: torch.Tensor | None = None
    """[E, hidden]; of a group one of the ranks has it."""

    rounding: ClassVar[None] = None
    """What they take is not rounded: the router wants it as it is. Experts in FP8 round it themselves."""

    @property
    def narrow(self) -> bool:
        """In FP8."""
        return isinstance(self.down, ScaledStack)

    @property
    def packed(self) -> bool:
        """In MXFP4."""
        return isinstance(self.down, PackedStack)

    def add(self, x: torch.Tensor, residual: torch.Tensor, ops: Ops) -> None:
        """Add what they make of x[T, hidden] to residual[T, hidden], in place."""
        ops.experts(self, x, residual)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[T, E] of x[T, hidden], float32 if they are to be `wide`."""
        if self.router.weight.dtype == torch.float32:
            return self.router(x.float())
        if not self.routing.wide or x.dtype == torch.float32:
            return self.router(x)
        weight = self.router.weight
        if not x.is_cuda:
            return Linear(weight.float(), None, self.batch_invariant)(x.float())
        if self.batch_invariant:
            from radixrt.worker.cuda.invariant import product

            return product(x, weight, dtype=torch.float32)
        return torch.ops.aten.mm.dtype(x, weight.t(), torch.float32)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights in the dtype of the logits, int64 numbers) of each token's experts, the likeliest first, both
        [T, chosen]."""
        logits = self.logits(x)
        scores = sigmoid(logits.float()) if self.routing.sigmoid else logits.float().softmax(-1)
        alone = logits.float() if self.routing.sigmoid else scores  # a sigmoid's largest are all 1
        choice = alone if self.bias is None else scores + self.bias
        experts = (self._of_best_groups(choice) if self.routing.grouped else choice).topk(self.chosen, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=self.routing.least)
        return (weights * self.routing.factor).to(logits.dtype), experts

    def _of_best_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """choice[T, E], -inf outside of each token's best groups."""
        groups = choice.unflatten(-1, (self.routing.groups, -1))
        best = groups.topk(2, dim=-1).values.sum(-1) if self.routing.sigmoid else groups.amax(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, best.topk(self.routing.kept_groups, dim=-1).indices, True)
        return groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)

    def one_by_one(self, x: torch.Tensor, residual: torch.Tensor, ops: Ops) -> None:
        """The reference of `Ops.experts`: expert after expert, whose tokens the host counts."""
        weights, experts = self.route(x)
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=len(self.down)).tolist()
        parts = []
        for expert, part in enumerate(x[order // self.chosen].split(counts)):
            if len(part):
                gate_up = self._product(self.gate_up, self.gate_up_bias, expert, x.dtype, ops)
                down = self._product(self.down, self.down_bias, expert, x.dtype, ops)
                parts.append(down(ops.gate(gate_up(part), self.activation, down.rounding)))
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        residual.add_((torch.cat(parts)[back].unflatten(0, (-1, self.chosen)) * weights[..., None]).sum(1))

    def _product(
        self, weights: torch.Tensor | ScaledStack | PackedStack, biases: torch.Tensor | None, expert: int,
        dtype: torch.dtype, ops: Ops,
    ) -> Linear | ScaledLinear:  # fmt: skip
        bias = None if biases is None else biases[expert]
        weight = weights.multiplied_out(expert, dtype) if isinstance(weights, PackedStack) else weights[expert]
        if isinstance(weight, Scaled):
            return ScaledLinear(weight, bias, dtype, ops)
        return Linear(weight, bias, self.batch_invariant)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """By softmax over (x, 0), which rounds alike wherever a row lies: functions of elements take the ends of a tensor
    in another way than the rest."""
    return torch.stack((x, torch.zeros_like(x)), dim=-1).softmax(-1)[..., 0]


def softplus(x: torch.Tensor) -> torch.Tensor:
    """ln(1 + exp(x)), likewise."""
    return -torch.stack((torch.zeros_like(x), x), dim=-1).log_softmax(-1)[..., 0]


def read_experts(spec: ModelSpec, weights: Weights, layer: int, batch_invariant: bool, shard: Shard) -> Experts:
    """The experts of a layer, by the names of the family (`ExpertsSpec`), or all in one tensor, which does not stay in
    FP8; of each the inner features that are this rank's."""
    moe = spec.experts
    assert moe is not None
    at, hidden = f"model.layers.{layer}.{moe.prefix}.", spec.hidden_size
    if (whole := _find_whole(weights, f"model.layers.{layer}.", moe)) is not None:
        name, *both = whole
        router = _read_router(weights, name, moe, hidden)
        gate_up, down = _read_whole(weights, both, moe, hidden, shard)
        at = f"model.layers.{layer}.{WHOLE}"
    else:
        router = _read_router(weights, f"{at}{moe.router}.weight", moe, hidden)
        matrices = list(_matrices(at, moe, hidden, shard))
        found = _read_scaled(weights, matrices)
        gate_up, down = found or _read_plain(weights, matrices)
    return Experts(
        Linear(router, None, batch_invariant), gate_up, down, moe.chosen, moe.normalized, spec.activation,
        batch_invariant, moe.routing, _read_bias(weights, at, moe),
    )  # fmt: skip


def _find_whole(weights: Weights, at: str, moe: ExpertsSpec) -> list[str] | None:
    """Names of the router, and of the tensors of all experts, where there are some."""
    known = *moe.together, (f"{WHOLE}{moe.router}.weight", f"{WHOLE}experts.gate_up_proj", f"{WHOLE}experts.down_proj")
    return next(([at + name for name in names] for names in known if at + names[1] in weights), None)


def _read_router(weights: Weights, name: str, moe: ExpertsSpec, hidden: int) -> torch.Tensor:
    """In the dtype of the model, or see `Routing.wide_weight`."""
    loaded = weights.load(name, (moe.count, hidden))
    stored = weights.get(name) if moe.routing.wide_weight else None
    return stored if stored is not None and stored.dtype == torch.float32 else loaded


def _read_bias(weights: Weights, at: str, moe: ExpertsSpec) -> torch.Tensor | None:
    """In the precision that it is stored in: scores differ by little."""
    if not moe.routing.has_bias:
        return None
    name = next((at + name for name in moe.bias if at + name in weights), at + moe.bias[0])
    loaded, stored = weights.load(name, moe.bias_shape), weights.get(name)
    return (loaded if stored is None else stored).float().flatten()


def _read_whole(
    weights: Weights, names: list[str], moe: ExpertsSpec, hidden: int, shard: Shard
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gate_up` and `down`, each of one tensor."""
    inner = moe.intermediate_size
    ends = [weights.shape(name)[1:] for name in names]
    turned = moe.inputs_first and ends == [(hidden, 2 * inner), (inner, hidden)]  # one of them may be square
    rows, columns = (2, 1) if turned else (1, 2)

    def load(name: str, shape: tuple[int, int], part: Part | None) -> torch.Tensor:
        return weights.load(name, (moe.count, *(shape[::-1] if turned else shape)), part)

    gate_up = stack([load(names[0], (2 * inner, hidden), half) for half in shard.halves(rows, inner)], rows)
    down = load(names[1], (hidden, inner), shard.part(columns, inner))
    return (gate_up.mT.contiguous(), down.mT.contiguous()) if turned else (gate_up, down)


Matrix = tuple[str, tuple[int, int], Part | None]
"""What `Weights.load` takes."""


def _matrices(at: str, moe: ExpertsSpec, hidden: int, shard: Shard) -> Iterator[list[Matrix]]:
    """Of each expert its gate, up and down projections."""
    inner = moe.intermediate_size
    rows, columns = shard.part(0, inner), shard.part(1, inner)
    shapes = ((inner, hidden), rows), ((inner, hidden), rows), ((hidden, inner), columns)
    for expert in range(moe.count):
        names = [f"{at}experts.{expert}.{name}.weight" for name in moe.names]
        yield [(name, *shape) for name, shape in zip(names, shapes, strict=True)]


def _read_plain(weights: Weights, matrices: list[list[Matrix]]) -> tuple[torch.Tensor, torch.Tensor]:
    """`gate_up` and `down`, expert by expert, so that no more than one is held twice."""
    gate_up = down = torch.empty(0)
    for expert, three in enumerate(matrices):
        gate, up, last = (weights.load(*matrix) for matrix in three)
        inner, hidden = gate.shape
        if not expert:
            gate_up = gate.new_empty((len(matrices), 2 * inner, hidden))
            down = gate.new_empty((len(matrices), hidden, inner))
        gate_up[expert, :inner], gate_up[expert, inner:], down[expert] = gate, up, last
    return gate_up, down


def _read_scaled(weights: Weights, matrices: list[list[Matrix]]) -> tuple[ScaledStack, ScaledStack] | None:
    """As `_read_plain`, in FP8. None where one is not kept so or has other scales than the first, or where a block of
    scales has rows of the gate and others: then all are multiplied out."""
    stacks = None
    for expert, three in enumerate(matrices):
        gate, up, down = (weights.scaled(*matrix) for matrix in three)
        if gate is None or up is None or down is None:
            return None
        gate_up, down = stack_scaled([gate, up]), stack_scaled([down])
        if gate_up is None or down is None:
            return None
        stacks = stacks or (ScaledStack.like(gate_up, len(matrices)), ScaledStack.like(down, len(matrices)))
        if not (stacks[0].put(expert, gate_up) and stacks[1].put(expert, down)):
            return None
    return stacks
