"""Reads weights of 4 or 8 bits in the formats of AWQ, GPTQ, compressed-tensors and ModelOpt.

    AWQ (gemm)          qweight int32[in, out / 8], qzeros int32[G, out / 8], scales [G, out]
    GPTQ                qweight int32[in / n, out], qzeros int32[G, out / n], scales [G, out], g_idx int32[in]
    compressed-tensors  weight_packed int32[out, in / n], weight_scale [out, G], weight_shape; weight_zero_point
                        int32[out / n, G] if zeros differ, weight_g_idx int32[in] if groups are not in order
                        weight int8[out, in], weight_scale [out, G] (W8A8), weight_zero_point int8[out, G]
    NVFP4               weight_packed uint8[out, in / 2], weight_scale e4m3[out, in / 16], weight_global_scale
                        ModelOpt's: weight, weight_scale, weight_scale_2, the inverse of the global scale
    MXFP4               weight_packed uint8[out, in / 2], weight_scale uint8[out, in / 32]

n = 32 / bits values are packed in a word, the first in the lowest bits. Each of the G groups of consecutive columns has
a scale. Activations are not quantized, even if the file says that they should be. Integers of 4 bits may stay so (see
`int4`); others are dequantized.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from radixrt.worker.model.layers.int4 import split
from radixrt.worker.model.layers.mxfp4 import E2M1

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns each 4 bits of a word belong to."""
SUFFIXES = ("qweight", "weight_packed")
"""Names of a packed weight, in place of `weight`."""
Get = Callable[[str], torch.Tensor | None]
"""Returns a layer's tensor by the last part of its name; None if there is no such tensor."""


@dataclass(frozen=True, slots=True)
class Integers:
    """A weight (values - zeros) * scales: values int32[out, in], below 2**bits; scales [out, G] and int32 zeros
    [out, G], of [out, 1] also for all columns."""

    values: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    """None: 2**(bits - 1)."""
    bits: int
    groups: torch.Tensor | None = None
    """int[in]: the group of each column, if they are not in order."""

    def dequantized(self) -> torch.Tensor:
        """float32[out, in]."""
        columns, groups = self.values.shape[1], self.groups
        if groups is None:
            each = _group_size(columns, self.scales.shape[1])
            groups = torch.arange(columns, device=self.values.device) // each
        zeros = 1 << self.bits - 1 if self.zeros is None else self.zeros[:, groups.long()]
        return (self.values - zeros) * self.scales.float()[:, groups.long()]


def read(get: Get, quantization: Mapping[str, Any]) -> torch.Tensor | None:
    """The weight float32[out, in] of a layer; None if it is not stored in one of these forms. ValueError for tensors
    that do not fit together."""
    if (found := read_integers(get, quantization)) is not None:
        return found.dequantized()
    packed = get("weight_packed")
    if packed is None and get("weight_scale_2") is not None and get("weight_scale") is not None:
        packed = get("weight")
    return None if packed is None or packed.dtype != torch.uint8 else _fp4(packed, get)


def read_integers(get: Get, quantization: Mapping[str, Any]) -> Integers | None:
    """As `read`; None also for floating-point formats."""
    if (words := get("qweight")) is not None:
        return _awq(words, get) if quantization.get("quant_method") == "awq" else _gptq(words, get, quantization)
    if (packed := get("weight_packed")) is not None:
        return None if packed.dtype == torch.uint8 else _packed_integers(packed, get)
    weight = get("weight")
    if weight is None or weight.dtype != torch.int8 or get("weight_scale") is None:
        return None
    zeros = get("weight_zero_point")
    zeros = None if zeros is None else _by_row(zeros, len(weight)).int() + 128
    return Integers(weight.int() + 128, _scales(get, len(weight)), zeros, 8, get("weight_g_idx"))


def refusals(quantization: Mapping[str, Any]) -> Iterator[str]:
    """Why weights of AWQ or GPTQ are not served."""
    method, bits = quantization.get("quant_method"), quantization.get("bits", quantization.get("w_bit", 4))
    if bits not in ((4,) if method == "awq" else (4, 8)):
        yield f"weights of {bits} bits"
    version = str(quantization.get("version", "gemm")).lower()
    if method == "awq" and version != "gemm":
        yield f"version {version}"
    if method == "gptq" and _gptq_format(quantization) not in ("gptq", "gptq_v2"):
        yield f"checkpoint_format {_gptq_format(quantization)}"


def _gptq_format(quantization: Mapping[str, Any]) -> str:
    return quantization.get("checkpoint_format") or "gptq"


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32[..., W] -> int32[..., W * 32 / bits], each below 2**bits."""
    return split(words, bits).flatten(-2)


def _awq(words: torch.Tensor, get: Get) -> Integers:
    order = torch.tensor(AWQ_ORDER, device=words.device).argsort()
    both = words, _needed(get, "qzeros")
    values, zeros = (unpacked(x, 4).unflatten(-1, (-1, 8))[..., order].flatten(-2).t() for x in both)
    return Integers(values, _needed(get, "scales").t(), zeros, 4)


def _gptq(words: torch.Tensor, get: Get, quantization: Mapping[str, Any]) -> Integers:
    bits = quantization.get("bits", 4)
    scales, zeros = _needed(get, "scales").t(), unpacked(_needed(get, "qzeros"), bits).t()
    if _gptq_format(quantization) == "gptq":
        zeros = zeros + 1  # this format stores them less 1
    values, groups = unpacked(words.t(), bits), get("g_idx")
    if groups is not None and _are_in_order(groups, scales.shape[1]):
        groups = None
    return Integers(values, scales, zeros, bits, groups)


def _are_in_order(groups: torch.Tensor, count: int) -> bool:
    each, rest = divmod(len(groups), count)
    return not rest and torch.equal(groups.long(), torch.arange(len(groups), device=groups.device) // each)


def _packed_integers(words: torch.Tensor, get: Get) -> Integers:
    rows, columns = (int(n) for n in _needed(get, "weight_shape"))
    bits = next((bits for bits in (4, 8) if words.shape == (rows, -(-columns * bits // 32))), None)
    if bits is None:
        raise ValueError(f"weight_packed {list(words.shape)} does not hold [{rows}, {columns}] of 4 or 8 bits")
    zeros = get("weight_zero_point")
    zeros = None if zeros is None else _by_row(unpacked(zeros.t(), bits).t()[:rows], rows)
    return Integers(unpacked(words, bits)[:, :columns], _scales(get, rows), zeros, bits, get("weight_g_idx"))


def _scales(get: Get, rows: int) -> torch.Tensor:
    return _by_row(_needed(get, "weight_scale"), rows)


def _by_row(x: torch.Tensor, rows: int) -> torch.Tensor:
    """[out, G], of [out, G], [out] or one."""
    return x.reshape(len(x) if x.dim() else 1, -1).expand(rows, -1)


def _fp4(packed: torch.Tensor, get: Get) -> torch.Tensor:
    halves = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    values = torch.tensor([*E2M1, *(-x for x in E2M1)], device=packed.device)[halves.int()]
    scales = _needed(get, "weight_scale")
    if scales.dtype == torch.uint8:
        scales = torch.exp2(scales.float() - 127)
    elif (inverse := get("weight_scale_2")) is not None:
        scales = scales.float() * inverse.float()
    else:
        scales = scales.float() / _needed(get, "weight_global_scale").float()
    return values * scales.repeat_interleave(_group_size(values.shape[1], scales.shape[1]), 1)


def _group_size(columns: int, groups: int) -> int:
    if columns % groups:
        raise ValueError(f"{columns} columns are not {groups} groups of one size")
    return columns // groups


def _needed(get: Get, name: str) -> torch.Tensor:
    if (tensor := get(name)) is None:
        raise ValueError(f"there is no {name}")
    return tensor
