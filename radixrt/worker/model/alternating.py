"""Experts as gpt-oss stores them: all of a layer in one tensor, the rows of gate and up by turns, with biases.

    gate_up_proj [E, hidden, 2 I], down_proj [E, I, hidden]                           16 or 32 bits, inputs first
    gate_up_proj_blocks [E, 2 I, hidden / 32, 16], ..._scales [E, 2 I, hidden / 32]   MXFP4, outputs first
    down_proj_blocks    [E, hidden, I / 32, 16],   ..._scales [E, hidden, I / 32]

MXFP4 (OCP Microscaling Formats 1.0, section 5.3): 32 values of 4 bits share a power of two. It is multiplied out when
it is read; bfloat16 holds every value exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from radixrt.worker.model.checkpoint import Weights
from radixrt.worker.model.linear import Linear
from radixrt.worker.model.moe import Experts
from radixrt.worker.model.sharding import Part, Shard
from radixrt.worker.model.spec import ModelSpec

BLOCK = 32
"""Values that share a scale; two of them are a byte, the first one its low half."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By the lower three bits; the fourth is the sign."""

Matrices = Callable[[int], torch.Tensor]
"""An expert's matrix [out, in], those of this rank's inner features."""


def read_alternating(spec: ModelSpec, weights: Weights, layer: int, batch_invariant: bool, shard: Shard) -> Experts:
    """The experts of a layer; of each the inner features that are this rank's."""
    moe = spec.experts
    assert moe is not None
    at, hidden = f"model.layers.{layer}.{moe.prefix}.", spec.hidden_size
    count, inner = moe.count, moe.intermediate_size
    own = shard.part(0, inner) or Part(0, 0, inner)
    rows = Part(0, 2 * own.start, 2 * own.stop)
    router = Linear(
        weights.load(f"{at}router.weight", (count, hidden)), weights.load(f"{at}router.bias", (count,)), batch_invariant
    )
    read = _packed if f"{at}experts.gate_up_proj_blocks" in weights else _plain
    pairs = read(weights, f"{at}experts.gate_up_proj", (count, 2 * inner, hidden), rows)
    downs = read(weights, f"{at}experts.down_proj", (count, hidden, inner), Part(1, own.start, own.stop))
    gate_up = router.weight.new_empty((count, 2 * own.count, hidden))
    down = router.weight.new_empty((count, hidden, own.count))
    for expert in range(count):
        gate_up[expert], down[expert] = apart(pairs(expert)), downs(expert)
    bias = weights.load(f"{at}experts.gate_up_proj_bias", (count, 2 * inner), Part(1, rows.start, rows.stop))
    down_bias = weights.load(f"{at}experts.down_proj_bias", (count, hidden))
    return Experts(
        router, gate_up, down, moe.chosen, moe.normalized, spec.activation, batch_invariant,
        gate_up_bias=apart(bias, 1),
        down_bias=None if shard.rank else down_bias,  # one of the ranks adds it
    )  # fmt: skip


def apart(alternating: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """What lies by turns in a dimension, all of the one before all of the other."""
    return alternating.unflatten(dim, (-1, 2)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def _plain(weights: Weights, name: str, shape: tuple[int, int, int], part: Part) -> Matrices:
    """Of a tensor [E, in, out], for a `part` of matrices [out, in] of that `shape`."""
    count, rows, columns = shape
    whole = part.count == (rows, columns)[part.dim]
    stored = Part(2 - part.dim, part.start, part.stop)
    tensor = weights.load(name, (count, columns, rows), None if whole else stored)
    return lambda expert: tensor[expert].t()


def _packed(weights: Weights, name: str, shape: tuple[int, int, int], part: Part) -> Matrices:
    """Of MXFP4, for a `part` of matrices [out, in] of that `shape`."""
    count, rows, columns = shape
    blocks = _stored(weights, f"{name}_blocks", (count, rows, columns // BLOCK, BLOCK // 2))
    scales = _stored(weights, f"{name}_scales", (count, rows, columns // BLOCK))

    def matrix(expert: int) -> torch.Tensor:
        if part.dim == 0:
            own = slice(part.start, part.stop)
            return multiplied_out(blocks[expert, own], scales[expert, own], weights.dtype)
        # A rank's columns may begin within a block.
        first, last = part.start // BLOCK, -(-part.stop // BLOCK)
        found = multiplied_out(blocks[expert, :, first:last], scales[expert, :, first:last], weights.dtype)
        return found.narrow(1, part.start - first * BLOCK, part.count)

    return matrix


def _stored(weights: Weights, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """ValueError unless there are bytes of that shape."""
    tensor = weights.get(name)
    if tensor is None:
        raise ValueError(f"the checkpoint has no tensor {name}")
    if tuple(tensor.shape) != shape or tensor.dtype != torch.uint8:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"{name} is {kind} {list(tensor.shape)}, by config.json it is uint8 {list(shape)}")
    return tensor


def multiplied_out(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[R, C] of uint8 blocks [R, C / 32, 16] of MXFP4 and their scales, uint8[R, C / 32] of E8M0."""
    values = torch.tensor([*E2M1, *(-x for x in E2M1)], device=blocks.device)
    halves = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    powers = scales.contiguous().view(torch.float8_e8m0fnu).float()
    return (values[halves.int()] * powers[..., None]).flatten(1).to(dtype)
