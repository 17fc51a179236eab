"""Reads experts as gpt-oss stores them: all experts of a layer in one tensor, gate and up features interleaved (gate 0,
up 0, gate 1, ...), with biases.

    gate_up_proj [E, hidden, 2 I], down_proj [E, I, hidden]                           16 or 32 bits, [in, out]
    gate_up_proj_blocks [E, 2 I, hidden / 32, 16], ..._scales [E, 2 I, hidden / 32]   MXFP4, [out, in]
    down_proj_blocks    [E, hidden, I / 32, 16],   ..._scales [E, hidden, I / 32]

MXFP4 is kept if there are kernels for it (`Weights.packed`); otherwise it is dequantized at load. bfloat16 represents
every value exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from radixrt.worker.model.layers.linear import Linear
from radixrt.worker.model.layers.moe import Experts
from radixrt.worker.model.layers.mxfp4 import BLOCK, PackedStack, dequantize, fits
from radixrt.worker.model.parallel.sharding import Part, Shard
from radixrt.worker.model.spec.expert_spec import ExpertsSpec
from radixrt.worker.model.spec.spec import ModelSpec
from radixrt.worker.model.weights.weights import Weights

NAMES = "gate_up_proj", "down_proj"
Matrices = Callable[[int], torch.Tensor]
"""Expert number -> this rank's part of its matrix [out, in]."""
Blocks = tuple[torch.Tensor, torch.Tensor]
"""MXFP4 of all experts: values uint8[E, out, in / 32, 16], scales uint8[E, out, in / 32]."""


def read_interleaved_experts(
    spec: ModelSpec, weights: Weights, layer: int, batch_invariant: bool, shard: Shard
) -> Experts:
    """The experts of a layer. A rank has the same slice of every expert's intermediate features."""
    moe = spec.experts
    assert moe is not None
    at, hidden = f"model.layers.{layer}.{moe.prefix}.", spec.hidden_size
    count, inner = moe.count, moe.intermediate_size
    part = shard.part(0, inner) or Part(0, 0, inner)
    rows = Part(0, 2 * part.start, 2 * part.stop)
    router = Linear(
        weights.load(f"{at}router.weight", (count, hidden)), weights.load(f"{at}router.bias", (count,)), batch_invariant
    )
    gate_up, down = _read_matrices(weights, f"{at}experts.", moe, hidden, (rows, Part(1, part.start, part.stop)))
    bias = weights.load(f"{at}experts.gate_up_proj_bias", (count, 2 * inner), Part(1, rows.start, rows.stop))
    down_bias = weights.load(f"{at}experts.down_proj_bias", (count, hidden))
    return Experts(
        router, gate_up, down, moe.top_k, moe.normalized, spec.activation, batch_invariant,
        gate_up_bias=deinterleave(bias, 1),
        down_bias=None if shard.rank else down_bias,  # one of the ranks adds it
    )  # fmt: skip


def _read_matrices(
    weights: Weights, at: str, moe: ExpertsSpec, hidden: int, parts: tuple[Part, Part]
) -> tuple[torch.Tensor, torch.Tensor] | tuple[PackedStack, PackedStack]:
    """`gate_up` and `down` of all experts, of each the part of `parts`."""
    names, inner = [f"{at}{name}" for name in NAMES], moe.intermediate_size
    shapes = (moe.count, 2 * inner, hidden), (moe.count, hidden, inner)
    if f"{names[0]}_blocks" not in weights:
        each = zip(names, shapes, parts, strict=True)
        gate_up, down = (_read_unquantized(weights, name, shape, part) for name, shape, part in each)
        return _stack(gate_up, down, moe.count)
    blocks = [_read_blocks(weights, name, shape) for name, shape in zip(names, shapes, strict=True)]
    if weights.packed and all(fits(scales) for _, scales in blocks):
        return _pack_gate_up(blocks[0], parts[0]), _pack_down(blocks[1], parts[1])
    gate_up, down = (_dequantizer(one, part, weights.dtype) for one, part in zip(blocks, parts, strict=True))
    return _stack(gate_up, down, moe.count)


def deinterleave(interleaved: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Reorder a dimension a0 b0 a1 b1 ... as a0 a1 ... b0 b1 ..."""
    return interleaved.unflatten(dim, (-1, 2)).transpose(dim, dim + 1).flatten(dim, dim + 1)


def _read_unquantized(weights: Weights, name: str, shape: tuple[int, int, int], part: Part) -> Matrices:
    """Load a tensor [E, in, out]. `shape` is [E, out, in], and `part` refers to a matrix [out, in]."""
    count, rows, columns = shape
    whole = part.count == (rows, columns)[part.dim]
    stored = Part(2 - part.dim, part.start, part.stop)
    tensor = weights.load(name, (count, columns, rows), None if whole else stored)
    return lambda expert: tensor[expert].t()


def _stack(gate_ups: Matrices, downs: Matrices, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack the matrices of all experts, one after the other, so that only one is in memory twice."""
    first, last = gate_ups(0), downs(0)
    gate_up, down = first.new_empty((count, *first.shape)), last.new_empty((count, *last.shape))
    for expert in range(count):
        gate_up[expert], down[expert] = deinterleave(gate_ups(expert)), downs(expert)
    return gate_up, down


def _read_blocks(weights: Weights, name: str, shape: tuple[int, int, int]) -> Blocks:
    *most, columns = shape
    count = columns // BLOCK
    return weights.bytes(f"{name}_blocks", (*most, count, BLOCK // 2)), weights.bytes(f"{name}_scales", (*most, count))


def _pack_gate_up(stored: Blocks, part: Part) -> PackedStack:
    """`gate_up` with deinterleaved rows: gate, then up."""
    (count, _, num_blocks), own = stored[1].shape, slice(part.start, part.stop)
    stack = PackedStack.empty(count, part.count, num_blocks * BLOCK, device=stored[0].device)
    for expert, (blocks, scales) in enumerate(zip(*stored, strict=True)):
        stack.put(expert, deinterleave(blocks[own]), deinterleave(scales[own]))
    return stack


def _pack_down(stored: Blocks, part: Part) -> PackedStack:
    count, rows, _ = stored[1].shape
    first, last = _block_range(part)
    stack = PackedStack.empty(count, rows, part.count, part.start - first * BLOCK, stored[0].device)
    for expert, (blocks, scales) in enumerate(zip(*stored, strict=True)):
        stack.put(expert, blocks[:, first:last], scales[:, first:last])
    return stack


def _block_range(part: Part) -> tuple[int, int]:
    """[first, end) of the MXFP4 blocks that contain the columns of a part."""
    return part.start // BLOCK, -(-part.stop // BLOCK)


def _dequantizer(stored: Blocks, part: Part, dtype: torch.dtype) -> Matrices:
    """Dequantizes a part of an expert's matrix [out, in] when called."""
    blocks, scales = stored

    def matrix(expert: int) -> torch.Tensor:
        if part.dim == 0:
            rows = slice(part.start, part.stop)
            return dequantize(blocks[expert, rows], scales[expert, rows], dtype)
        first, last = _block_range(part)
        columns = dequantize(blocks[expert, :, first:last], scales[expert, :, first:last], dtype)
        return columns.narrow(1, part.start - first * BLOCK, part.count)

    return matrix
