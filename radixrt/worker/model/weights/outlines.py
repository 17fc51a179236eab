"""Tensors without memory, of the sizes that a checkpoint's have once they are loaded: a model that is read from them
has the layout of the real one, and can be measured before anything is loaded (`load.weight_bytes`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from radixrt.worker.model.layers.fp8 import BLOCK, FP8, Fp8Weight
from radixrt.worker.model.layers.int4 import Int4
from radixrt.worker.model.parallel.sharding import Part
from radixrt.worker.model.weights import integers
from radixrt.worker.model.weights.checkpoint import stored_name, weight_files
from radixrt.worker.model.weights.quantized import Products, int4_group, part_of_scale, stored_as

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": FP8, "U8": torch.uint8}
"""By the names that safetensors has; of others only the sizes are asked for."""


class Stored(NamedTuple):
    """A tensor in a file."""

    dtype: str
    shape: tuple[int, ...]


def read_headers(folder: Path) -> dict[str, Stored]:
    """The tensors of a folder by name, from the headers of its files alone. ValueError as `weight_files`, and for a
    file that is broken."""
    found: dict[str, Stored] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, "pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}
                found |= {name: Stored(one.get_dtype(), tuple(one.get_shape())) for name, one in slices.items()}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
    return found


class Outlines:
    """`Weights` on the meta device. Which tensors there are, and which of them are quantized, is as in `stored`; {}:
    all that are asked for, none of the optional ones, and the matrices of layers are quantized if any are by
    `quantization` (of config.json)."""

    def __init__(
        self,
        dtype: torch.dtype,
        products: Products,
        packed: bool,
        quantization: Mapping[str, Any],
        stored: Mapping[str, Stored],
    ) -> None:
        self.dtype = dtype
        self.packed = packed
        self._products = products
        self._quantization = quantization
        self._stored = stored
        self._fp8 = "FP8" in stored_as({"quantization_config": quantization})
        self._kept = quantization.get("modules_to_not_convert") or quantization.get("ignore") or ()

    def _find(self, name: str) -> Stored | None:
        return self._stored.get(stored_name(name, self._stored))

    def __contains__(self, name: str) -> bool:
        if self._stored:
            return self._find(name) is not None or self._is_integer(name)
        return self.packed and self._quantization.get("quant_method") == "mxfp4" and name.endswith("_blocks")

    def load(self, name: str, shape: Sequence[int], part: Part | None = None) -> torch.Tensor:
        return _empty(_of_part(shape, part), self.dtype)

    def scaled(self, name: str, shape: Sequence[int], part: Part | None = None) -> Fp8Weight | None:
        stored = self._is_fp8(name)
        if self._products is Products.NONE or (self._products is Products.STORED and not stored):
            return None
        rows, columns = _of_part(shape, part)
        values, block = _empty((rows, columns), FP8), self._quantization.get("weight_block_size")
        if not stored or not block:
            return Fp8Weight.by_rows(values, _empty((rows, 1), torch.float32))
        scales = _empty([-(-size // each) for size, each in zip(shape, block, strict=True)], torch.float32)
        own = scales if part is None else part_of_scale(scales, shape, (block[0], block[1]), part)
        return None if own is None or tuple(block) != (BLOCK, BLOCK) else Fp8Weight.by_blocks(values, own)

    def _is_fp8(self, name: str) -> bool:
        if self._stored:
            found = self._find(name)
            return found is not None and found.dtype == "F8_E4M3"
        return self._fp8 and ".layers." in name and not any(part in name for part in self._kept)

    def _is_integer(self, name: str) -> bool:
        if not self._stored:
            return ".layers." in name
        layer = name.removesuffix("weight")
        return any(self._find(layer + suffix) is not None for suffix in integers.SUFFIXES)

    def integers(self, name: str, shape: Sequence[int], part: Part | None = None) -> None:
        """None: a GPU has them dequantized."""

    def int4(self, name: str, shape: Sequence[int], part: Part | None = None) -> Int4 | None:
        size = int4_group(self._quantization) if self.packed else None
        if size is None or not self._is_integer(name):
            return None
        rows, columns = shape
        scales = _empty((rows, -(-columns // size)), self.dtype)
        zeros = _empty(scales.shape, torch.uint8) if self._has_zeros(name) else None
        return Int4.of(_empty(shape, torch.uint8), scales, zeros, self.dtype, part)

    def _has_zeros(self, name: str) -> bool:
        layer = name.removesuffix("weight")
        if self._stored:
            return any(self._find(layer + suffix) is not None for suffix in ("qzeros", "weight_zero_point"))
        return self._quantization.get("quant_method") in ("awq", "gptq")

    def shape(self, name: str) -> tuple[int, ...]:
        found = self._find(name)
        if found is None:
            raise KeyError(name)
        return found.shape

    def get(self, name: str) -> torch.Tensor | None:
        found = self._find(name)
        return None if found is None else _empty(found.shape, DTYPES.get(found.dtype, self.dtype))

    def bytes(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        return _empty(shape, torch.uint8)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _of_part(shape: Sequence[int], part: Part | None) -> list[int]:
    return [part.count if part is not None and dim == part.dim else size for dim, size in enumerate(shape)]
