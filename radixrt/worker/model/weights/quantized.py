"""Reads weights that are stored in FP8 with scales. They stay in FP8 if the device has FP8 products (`layers.fp8`);
otherwise they are dequantized at load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from radixrt.worker.model.layers.fp8 import BLOCK, FP8, Fp8Weight
from radixrt.worker.model.parallel.sharding import Part
from radixrt.worker.model.weights import integers

METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors", "modelopt", "awq", "gptq")
SERVED = "weights in FP8, NVFP4, MXFP4, of AWQ, of GPTQ and in integers of 4 or 8 bits are, and plain ones"
KINDS = {("float", 8): "FP8", ("float", 4): "FP4", ("int", 8): "INT8", ("int", 4): "INT4"}
"""By `type` and `num_bits` of compressed-tensors."""
MXFP4 = "mxfp4"
"""The format of gpt-oss' experts (see `interleaved_experts`)."""
SCALES = ("_scale_inv", "_scale")
"""Suffixes of the name of a weight's scale. The weight is multiplied by either, also by `_scale_inv`."""
UNQUANTIZED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Products(Enum):
    """Which matrices are multiplied in FP8."""

    NONE = "none"
    STORED = "stored"
    """Those that are stored in FP8."""
    ALL = "all"
    """All: others are quantized at load, with a scale for each row."""


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The quantization settings of a config.json; {} if weights are not quantized."""
    return config.get("quantization_config") or config.get("compression_config") or {}


def check_quantization(config: Mapping[str, Any]) -> None:
    """ValueError if weights are quantized in a way that is not served."""
    quantization = quantization_of(config)
    method = _method(quantization)
    if method == MXFP4 and config.get("model_type") == "gpt_oss":
        return
    if quantization and method not in METHODS:
        raise ValueError(f"quantization_config: quant_method {method!r} is not served; {SERVED}")
    for words in _refusals(quantization):
        raise ValueError(f"quantization_config: {words} is not served; {SERVED}")


def stored_as(config: Mapping[str, Any]) -> str:
    """The name of the format that weights are stored in; "" if they are not quantized."""
    quantization = quantization_of(config)
    method = _method(quantization)
    if method in ("awq", "gptq", MXFP4):
        return str(method).upper()
    kinds = {KINDS.get(kind, "") for kind in _kinds(quantization)}
    if (quantization.get("quant_algo") or "").startswith("NVFP4"):
        kinds = {"NVFP4"}
    return " and ".join(sorted(kinds)) or ("FP8" if quantization else "")


def has_int4(config: Mapping[str, Any]) -> bool:
    """Whether weights are stored in integers of 4 bits, which may stay so."""
    quantization = quantization_of(config)
    if _method(quantization) in ("awq", "gptq"):
        return quantization.get("bits", quantization.get("w_bit", 4)) == 4
    return ("int", 4) in _kinds(quantization)


def int4_group(quantization: Mapping[str, Any]) -> int | None:
    """The columns that share a scale, if weights are stored in INT4."""
    if not has_int4({"quantization_config": quantization}):
        return None
    groups = quantization.get("config_groups") or {}
    each = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else []
    return next((size for one in (*each, quantization) if (size := one.get("group_size") or 0) > 0), 128)


def is_expanded(config: Mapping[str, Any]) -> bool:
    """Whether weights are in a format that is dequantized at load (see `integers`), unless kernels keep them."""
    return stored_as(config) not in ("", "FP8", "MXFP4")


def _method(quantization: Mapping[str, Any]) -> Any:
    return quantization.get("quant_method", "compressed-tensors" if "config_groups" in quantization else None)


def _refusals(quantization: Mapping[str, Any]) -> Iterator[str]:
    algorithm = quantization.get("quant_algo") or "FP8"
    if not algorithm.startswith(("FP8", "NVFP4")):
        yield f"quant_algo {algorithm}"
    for kind, bits in _kinds(quantization):
        if (kind, bits) not in KINDS:
            yield f"weights of {bits} bits ({kind})"
    if _method(quantization) in ("awq", "gptq"):
        yield from integers.refusals(quantization)


def _kinds(quantization: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """(type, bits) of the groups of weights; those of compressed-tensors are integers of 8 bits unless a file says
    otherwise."""
    groups = quantization.get("config_groups") or {}
    for group in groups.values() if isinstance(groups, dict) else ():
        if weights := group.get("weights"):  # otherwise the group is of K and V, or of activations
            yield weights.get("type", "int"), weights.get("num_bits", 8)


def rounds_activations(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint is meant to be used with activations in FP8, too. Only llm-compressor's files
    (`config_groups`) may say that it is not."""
    groups = quantization_of(config).get("config_groups") or {}
    groups = groups.values() if isinstance(groups, dict) else ()
    return all(group.get("input_activations") for group in groups if group.get("weights"))


def block_size(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of a weight that share a scale, if it has scales for blocks."""
    rows, columns = (config.get("quantization_config") or {}).get("weight_block_size") or (BLOCK, BLOCK)
    return rows, columns


def read_scaled(
    name: str, weight: torch.Tensor, scale: torch.Tensor | None, block: tuple[int, int]
) -> Fp8Weight | None:
    """An FP8 weight [R, C] with its `scale`: one number, [R], [R, 1], or one for each `block` of (rows, columns),
    [ceil(R / rows), ceil(C / columns)]. None if the block is not (BLOCK, BLOCK). ValueError if the weight is not in
    FP8, or the scale is missing or has another shape."""
    scale = _checked_scale(name, weight, scale)
    rows, columns = weight.shape
    if scale.numel() == 1 or _is_by_first_dim(scale, rows):
        return Fp8Weight.by_rows(weight, scale.view(-1, 1).expand(rows, 1).contiguous())
    _check_blocks(name, weight, scale, block)
    return Fp8Weight.by_blocks(weight, scale) if block == (BLOCK, BLOCK) else None


def part_of_scale(scale: torch.Tensor, shape: Sequence[int], block: tuple[int, int], part: Part) -> torch.Tensor | None:
    """The scale of a part of a weight of the given `shape`; None if an end of the part lies within a block. A single
    number, and a scale of an unknown shape, which `dequantize` refuses, are returned as they are."""
    if _is_by_first_dim(scale, shape[0]):
        return scale[part.start : part.stop] if part.dim == 0 else scale
    if tuple(scale.shape) != _grid(shape, block):
        return scale
    each = _block_shape(shape, block)[part.dim]
    if part.start % each or (part.stop % each and part.stop != shape[part.dim]):
        return None
    return scale.narrow(part.dim, part.start // each, -(-part.count // each))


def dequantize(
    name: str, weight: torch.Tensor, scale: torch.Tensor | None, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """A stored weight in `dtype`. One in FP8 is multiplied by its `scale` (see `read_scaled`). For fused experts
    [E, R, C] the scale is one number, one number per expert, or [E, ceil(R / rows), ceil(C / columns)]. ValueError as
    `read_scaled`, and for other quantized dtypes."""
    if weight.dtype in UNQUANTIZED_DTYPES:
        return weight.to(dtype)
    scale = _checked_scale(name, weight, scale)
    if scale.numel() > 1 and not _is_by_first_dim(scale, len(weight)):
        _check_blocks(name, weight, scale, block)
    if scale.numel() == 1 or weight.dim() < 3:
        return _dequantize_matrix(weight, scale, block, dtype)
    whole = torch.empty_like(weight, dtype=dtype)  # expert by expert: all of them in float32 are large
    for out, matrix, matrix_scale in zip(whole, weight, scale, strict=True):
        out.copy_(_dequantize_matrix(matrix, matrix_scale, block, dtype))
    return whole


def _checked_scale(name: str, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if weight.dtype != FP8:
        raise ValueError(f"{name} is stored as {str(weight.dtype).removeprefix('torch.')}, which is not served")
    if scale is None:
        raise ValueError(f"{name} is stored in FP8, and the checkpoint has no {name}{SCALES[0]} or {name}{SCALES[1]}")
    return scale.float()


def _dequantize_matrix(
    weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Multiply by one number, or by a scale for each row or block of a matrix."""
    if scale.numel() > 1:
        rows, columns = len(weight), weight.shape[-1]
        if _is_by_first_dim(scale, rows):
            scale = scale.view(rows, *[1] * (weight.dim() - 1))
        else:
            scale = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (weight.float() * scale).to(dtype)


def _is_by_first_dim(scale: torch.Tensor, count: int) -> bool:
    """Whether there is one scale for each index of the first dimension."""
    return scale.numel() == count and scale.shape[0] == count


def _block_shape(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, ...]:
    """Size of a block in each dimension; a block is within one expert."""
    return (1,) * (len(shape) - 2) + block


def _grid(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, ...]:
    """Number of blocks in each dimension."""
    return tuple(-(-size // each) for size, each in zip(shape, _block_shape(shape, block), strict=False))


def _check_blocks(name: str, weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> None:
    if weight.dim() < 2 or tuple(scale.shape) != _grid(weight.shape, block):
        raise ValueError(f"{name} {list(weight.shape)}: scales of shape {list(scale.shape)} are not served")
