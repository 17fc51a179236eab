"""Mixture of experts: a router selects the experts of each token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from radixrt.worker.model.layers.fp8 import Activations, Fp8Linear, Fp8Scaling, Fp8Weight, ScaledOps, concatenate_fp8
from radixrt.worker.model.layers.int4 import Int4, concatenate_int4
from radixrt.worker.model.layers.linear import Linear, concatenate
from radixrt.worker.model.layers.mxfp4 import PackedStack
from radixrt.worker.model.parallel.sharding import Part, Shard
from radixrt.worker.model.spec.expert_spec import ExpertsSpec, Routing
from radixrt.worker.model.spec.spec import SQUARED_RELU, ModelSpec
from radixrt.worker.model.weights.weights import Weights

FUSED_AT = "mlp."
"""Prefix, in `model.layers.<i>.`, of a layer's experts as transformers 5 fuses them, whatever the family. It stores
them so only if a model is saved with `save_original_format=False`, which is rare."""


@dataclass(frozen=True, slots=True)
class ScaledStack:
    """The FP8 weights of E experts, stacked (see `fp8.Fp8Weight`): `values` [E, N, K] and float32 `scales`, by row
    [E, N, 1] or by block [E, ceil(N / BLOCK), C], where C is ceil(K / BLOCK) padded to a multiple of SCALE_ALIGNMENT.
    """

    values: torch.Tensor
    scales: torch.Tensor
    fp8_scaling: Fp8Scaling

    @classmethod
    def like(cls, weight: Fp8Weight, count: int) -> ScaledStack:
        """Uninitialized, for `count` weights of the shapes of `weight`."""
        values, scales = (part.new_empty((count, *part.shape)) for part in (weight.values, weight.scales))
        return cls(values, scales, weight.fp8_scaling)

    def put(self, number: int, weight: Fp8Weight) -> bool:
        """Store a weight. Returns False, and does nothing, if its scales are of another kind."""
        if weight.fp8_scaling is not self.fp8_scaling:
            return False
        self.values[number], self.scales[number] = weight.values, weight.scales
        return True

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, number: int) -> Fp8Weight:
        return Fp8Weight(self.values[number], self.scales[number], self.fp8_scaling)

    def numel(self) -> int:
        """Number of weights."""
        return self.values.numel()

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


Stacked = torch.Tensor | ScaledStack | PackedStack | Int4
"""A weight of all E experts."""


class ExpertOps(ScaledOps, Protocol):
    """The part of `ops.Ops` that experts need. `fp8_scaling`: quantize the result to FP8 with scales of that kind;
    None: keep the dtype of x."""

    def gate(
        self, x: torch.Tensor, activation: str, fp8_scaling: Fp8Scaling | None = None, up: torch.Tensor | None = None
    ) -> Activations:
        """act(gate) * up, or another function of both (see `ops._ACTIVATIONS`): [T, I], of x[T, 2 I], gate first, or of
        the gate x[T, I] and up[T, I], whose rows may be apart."""

    def squared_relu(self, x: torch.Tensor, fp8_scaling: Fp8Scaling | None = None) -> Activations:
        """relu(x[T, I])^2 (arXiv 2109.08668), in place unless it is quantized."""

    def experts(
        self, experts: Experts, x: torch.Tensor, residual: torch.Tensor, for_router: torch.Tensor | None = None
    ) -> None:  # fmt: skip
        """Add the output of a mixture of experts for x[T, hidden] to residual[T, hidden], in place. `for_router`: the
        router's input, if that is not x."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The E routed experts of a layer: `gate_up` [E, 2 I, hidden], the rows of the gate first, and `down` [E, hidden,
    I], both of the same type. Without a gate (SQUARED_RELU), `gate_up` is [E, I, hidden]."""

    router: Linear
    gate_up: Stacked
    down: Stacked
    top_k: int
    """Experts of a token."""
    normalized: bool
    """The weights of a token's experts are divided by their sum."""
    activation: str
    batch_invariant: bool
    routing: Routing = Routing()
    bias: torch.Tensor | None = None
    """float32[E]: added to the scores to select experts (see `Routing.has_bias`)."""
    gate_up_bias: torch.Tensor | None = None
    """[E, 2 I], in the order of the rows."""
    down_bias: torch.Tensor | None = None
    """[E, hidden]; in a group, only rank 0 has it."""
    scales: torch.Tensor | None = None
    """float32[E]: factors of the experts' weights, after normalization."""
    latent: tuple[Linear, Linear] | None = None
    """Projections to the space that experts are computed in, which is in place of `hidden` above, and back."""

    fp8_scaling: ClassVar[None] = None
    """The input is not to be quantized, because the router needs it as it is. Experts in FP8 quantize it themselves."""

    @property
    def is_fp8(self) -> bool:
        """Whether the experts are in FP8."""
        return isinstance(self.down, ScaledStack)

    @property
    def is_packed(self) -> bool:
        """Whether the experts are in MXFP4 or INT4."""
        return isinstance(self.down, (PackedStack, Int4))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Router logits [T, E] of x[T, hidden], float32 if `Routing.float32_logits` or the router's weight is."""
        if self.router.weight.dtype == torch.float32:
            return self.router(x.float())
        if not self.routing.float32_logits or x.dtype == torch.float32:
            return self.router(x)
        weight = self.router.weight
        if not x.is_cuda:
            return Linear(weight.float(), None, self.batch_invariant)(x.float())
        if self.batch_invariant:
            from radixrt.worker.cuda.linear.invariant import product

            return product(x, weight, dtype=torch.float32)
        return torch.ops.aten.mm.dtype(x, weight.t(), torch.float32)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights in the dtype of the logits, int64 numbers) of each token's experts, both [T, top_k], those with the
        highest scores for the selection first."""
        logits = self.logits(x)
        if self.routing.jitter is not None:
            weights, experts = sparse_mixer(logits.float(), self.top_k, self.routing.jitter)
            return weights.to(logits.dtype), experts
        scores = sigmoid(logits.float()) if self.routing.sigmoid else logits.float().softmax(-1)
        selection_scores = logits.float() if self.routing.sigmoid else scores  # not the sigmoids: large ones are all 1
        selection = selection_scores if self.bias is None else scores + self.bias
        experts = (self._mask_groups(selection) if self.routing.grouped else selection).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=self.routing.min_weight_sum)
        if self.scales is not None:
            weights = weights * self.scales[experts]
        return (weights * self.routing.factor).to(logits.dtype), experts

    def _mask_groups(self, selection: torch.Tensor) -> torch.Tensor:
        """selection[T, E] with -inf outside of each token's best `kept_groups` groups."""
        groups = selection.unflatten(-1, (self.routing.groups, -1))
        best = groups.topk(2, dim=-1).values.sum(-1) if self.routing.sigmoid else groups.amax(-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(-1, best.topk(self.routing.kept_groups, dim=-1).indices, True)
        return groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)

    def one_by_one(
        self, x: torch.Tensor, residual: torch.Tensor, ops: ExpertOps, for_router: torch.Tensor | None = None
    ) -> None:
        """The reference of `Ops.experts`: loops over the experts on the host. `for_router`: the router's input, if that
        is not x."""
        weights, experts = self.route(x if for_router is None else for_router)
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=len(self.down)).tolist()
        inner, parts = x if self.latent is None else self.latent[0](x), []
        inputs, of_inputs = inner[order // self.top_k], self.routing.scales_inputs
        if of_inputs:
            inputs = inputs * weights.flatten()[order, None].to(inputs.dtype)
        for expert, part in enumerate(inputs.split(counts)):
            if len(part):
                gate_up = self._linear(self.gate_up, self.gate_up_bias, expert, x.dtype, ops)
                down = self._linear(self.down, self.down_bias, expert, x.dtype, ops)
                if self.activation == SQUARED_RELU:
                    parts.append(down(ops.squared_relu(gate_up(part), down.fp8_scaling)))
                else:
                    parts.append(down(ops.gate(gate_up(part), self.activation, down.fp8_scaling)))
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        made = torch.cat(parts)[back].unflatten(0, (-1, self.top_k))
        total = (made if of_inputs else made * weights[..., None]).sum(1)
        residual.add_(total if self.latent is None else self.latent[1](total.to(x.dtype)))

    def _linear(
        self, weights: Stacked, biases: torch.Tensor | None, expert: int, dtype: torch.dtype, ops: ExpertOps
    ) -> Linear | Fp8Linear:
        bias = None if biases is None else biases[expert]
        if isinstance(weights, ScaledStack):
            return Fp8Linear(weights[expert], bias, dtype, ops)
        weight = weights[expert] if isinstance(weights, torch.Tensor) else weights.dequantized(expert, dtype)
        return Linear(weight, bias, self.batch_invariant)


def sparse_mixer(logits: torch.Tensor, top_k: int, jitter: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights, int64 numbers), both [T, top_k], of float32 logits [T, E] (SparseMixer, arXiv 2409.12136, section 2.2).

    The i-th expert is the likeliest of those that are left. Its weight is its softmax among these, but without those
    whose logit x is far from its own y: (y - x) / max(|x|, y) > 2 jitter."""
    left, routed = logits.clone(), []
    for _ in range(top_k):
        peak, chosen = left.max(-1, keepdim=True)
        far = (peak - logits) / torch.maximum(logits.abs(), peak) > 2 * jitter
        routed.append((left.masked_fill(far, -torch.inf).softmax(-1).gather(-1, chosen), chosen))
        left.scatter_(-1, chosen, -torch.inf)
    weights, experts = (torch.cat(parts, dim=-1) for parts in zip(*routed, strict=True))
    return weights, experts


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Sigmoid by a softmax over (x, 0), so that an element's result does not depend on its place: on a CPU, elementwise
    functions compute the last elements of a tensor, which do not fill a vector, in another way, and may round
    differently."""
    return torch.stack((x, torch.zeros_like(x)), dim=-1).softmax(-1)[..., 0]


def softplus(x: torch.Tensor) -> torch.Tensor:
    """ln(1 + exp(x)) by a log-softmax, for the same reason."""
    return -torch.stack((torch.zeros_like(x), x), dim=-1).log_softmax(-1)[..., 0]


def read_experts(spec: ModelSpec, weights: Weights, layer: int, batch_invariant: bool, shard: Shard) -> Experts:
    """The experts of a layer, stored one by one, or fused in one tensor for all, which is dequantized if it is in FP8.
    A rank has the same slice of every expert's intermediate features."""
    moe = spec.experts
    assert moe is not None
    at, hidden, space = f"model.layers.{layer}.{moe.prefix}.", spec.hidden_size, moe.latent_size or spec.hidden_size
    gate_up: Stacked
    down: Stacked
    if (fused := _find_fused(weights, f"model.layers.{layer}.", moe)) is not None:
        name, *both = fused
        router = _read_router(weights, name, moe, hidden)
        gate_up, down = _read_fused(weights, both, moe, space, shard)
        at = f"model.layers.{layer}.{FUSED_AT}"
    else:
        router = _read_router(weights, f"{at}{moe.router}.weight", moe, hidden)
        matrices = list(_matrices(at, moe, space, shard))
        quantized = _read_scaled(weights, matrices) or _read_int4(weights, matrices)
        gate_up, down = quantized or _read_unquantized(weights, matrices)
    return Experts(
        Linear(router, None, batch_invariant), gate_up, down, moe.top_k, moe.normalized, spec.activation,
        batch_invariant, moe.routing, _read_bias(weights, at, moe),
        latent=_read_latent(weights, at, moe, hidden, batch_invariant),
    )  # fmt: skip


def _find_fused(weights: Weights, at: str, moe: ExpertsSpec) -> list[str] | None:
    """Names of the router and of the fused tensors `gate_up` and `down`; None if experts are stored one by one."""
    known = (
        *moe.fused_names,
        (f"{FUSED_AT}{moe.router}.weight", f"{FUSED_AT}experts.gate_up_proj", f"{FUSED_AT}experts.down_proj"),
    )
    return next(([at + name for name in names] for names in known if at + names[1] in weights), None)


def _read_router(weights: Weights, name: str, moe: ExpertsSpec, hidden: int) -> torch.Tensor:
    """In the dtype of the model, or float32 (`Routing.float32_weight`)."""
    loaded = weights.load(name, (moe.count, hidden))
    stored = weights.get(name) if moe.routing.float32_weight else None
    return stored if stored is not None and stored.dtype == torch.float32 else loaded


def _read_bias(weights: Weights, at: str, moe: ExpertsSpec) -> torch.Tensor | None:
    """As float32, from the stored precision and not that of the model, because scores differ by little."""
    if not moe.routing.has_bias:
        return None
    name = next((at + name for name in moe.bias if at + name in weights), at + moe.bias[0])
    loaded, stored = weights.load(name, moe.bias_shape), weights.get(name)
    return (loaded if stored is None else stored).float().flatten()


def _read_latent(
    weights: Weights, at: str, moe: ExpertsSpec, hidden: int, batch_invariant: bool
) -> tuple[Linear, Linear] | None:
    """See `Experts.latent`."""
    if not moe.latent_size:
        return None
    shapes = (moe.latent_size, hidden), (hidden, moe.latent_size)
    loaded = [weights.load(f"{at}{name}.weight", shape) for name, shape in zip(moe.latent, shapes, strict=True)]
    into, back = (Linear(weight, None, batch_invariant) for weight in loaded)
    return into, back


def _read_fused(
    weights: Weights, names: list[str], moe: ExpertsSpec, hidden: int, shard: Shard
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gate_up` and `down` of all experts, from the tensors `names`."""
    inner = moe.intermediate_size
    height = 2 * inner if moe.gated else inner
    ends = [weights.shape(name)[1:] for name in names]
    transposed = moe.maybe_transposed and ends == [(hidden, height), (inner, hidden)]  # one of them may be square
    rows, columns = (2, 1) if transposed else (1, 2)

    def load(name: str, shape: tuple[int, int], part: Part | None) -> torch.Tensor:
        return weights.load(name, (moe.count, *(shape[::-1] if transposed else shape)), part)

    parts = shard.halves(rows, inner) if moe.gated else [shard.part(rows, inner)]
    gate_up = concatenate([load(names[0], (height, hidden), part) for part in parts], rows)
    down = load(names[1], (hidden, inner), shard.part(columns, inner))
    return (gate_up.mT.contiguous(), down.mT.contiguous()) if transposed else (gate_up, down)


Matrix = tuple[str, tuple[int, int], Part | None]
"""Arguments of `Weights.load`: name, shape, part."""


def _matrices(at: str, moe: ExpertsSpec, hidden: int, shard: Shard) -> Iterator[list[Matrix]]:
    """For each expert: its projections, the one back to hidden states last."""
    inner = moe.intermediate_size
    rows, columns = shard.part(0, inner), shard.part(1, inner)
    shapes = *[((inner, hidden), rows)] * (len(moe.names) - 1), ((hidden, inner), columns)
    for expert in range(moe.count):
        names = [f"{at}experts.{expert}.{name}.weight" for name in moe.names]
        yield [(name, *shape) for name, shape in zip(names, shapes, strict=True)]


def _read_unquantized(weights: Weights, matrices: list[list[Matrix]]) -> tuple[torch.Tensor, torch.Tensor]:
    """`gate_up` and `down`, filled expert by expert, so that only one is in memory twice."""
    gate_up = down = torch.empty(0)
    for expert, three in enumerate(matrices):
        *first, last = (weights.load(*matrix) for matrix in three)
        inner, hidden = first[0].shape
        if not expert:
            gate_up = last.new_empty((len(matrices), len(first) * inner, hidden))
            down = last.new_empty((len(matrices), hidden, inner))
        torch.cat(first, out=gate_up[expert])
        down[expert] = last
    return gate_up, down


def _read_scaled(weights: Weights, matrices: list[list[Matrix]]) -> tuple[ScaledStack, ScaledStack] | None:
    """As `_read_unquantized`, in FP8. None if a matrix is not kept in FP8 or has another kind of scales than the first,
    or if a block that shares a scale has rows of both gate and up: then all experts are dequantized."""
    stacks = None
    for expert, three in enumerate(matrices):
        read = [weight for weight in (weights.scaled(*matrix) for matrix in three) if weight is not None]
        if len(read) < len(three):
            return None
        gate_up, down = concatenate_fp8(read[:-1]), concatenate_fp8(read[-1:])
        if gate_up is None or down is None:
            return None
        stacks = stacks or (ScaledStack.like(gate_up, len(matrices)), ScaledStack.like(down, len(matrices)))
        if not (stacks[0].put(expert, gate_up) and stacks[1].put(expert, down)):
            return None
    return stacks


def _read_int4(weights: Weights, matrices: list[list[Matrix]]) -> tuple[Int4, Int4] | None:
    """As `_read_unquantized`, in INT4. None if a matrix is not kept so, or is of another kind than the first."""
    stacks = None
    for expert, three in enumerate(matrices):
        read = [weight for weight in (weights.int4(*matrix) for matrix in three) if weight is not None]
        if len(read) < len(three):
            return None
        gate_up, down = concatenate_int4(read[:2]), read[2]
        if gate_up is None:
            return None
        stacks = stacks or (gate_up.stack(len(matrices)), down.stack(len(matrices)))
        if not (stacks[0].put(expert, gate_up) and stacks[1].put(expert, down)):
            return None
    return stacks
