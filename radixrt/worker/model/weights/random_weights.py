"""Random weights in place of a checkpoint's, to measure speed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from radixrt.worker.model.layers.fp8 import Fp8Weight
from radixrt.worker.model.layers.int4 import Int4
from radixrt.worker.model.parallel.sharding import Part
from radixrt.worker.model.weights.quantized import Products, int4_group
from radixrt.worker.model.weights.weights import copied_part


class RandomWeights:
    """Random weights, to measure speed without a checkpoint: normal with a standard deviation of 0.02, norms 1, biases
    0. They depend on the seed and the tensor's name, not on the order of loading. With `packed`, there are MXFP4
    experts, of the same standard deviation; or, if `quantization` (of config.json) says that weights are in INT4, all
    matrices of layers are."""

    def __init__(
        self,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        products: Products = Products.NONE,
        packed: bool = False,
        quantization: Mapping[str, Any] | None = None,
    ) -> None:
        self._group = int4_group(quantization or {}) if packed else None
        self.num_dequantized = 0
        self._seed = seed
        self.dtype = dtype
        self.packed = packed
        self._device = device
        self._products = products

    def load(self, name: str, shape: Sequence[int], part: Part | None = None) -> torch.Tensor:
        if part is not None:
            return copied_part(self.load(name, shape), part)
        if name.endswith("bias"):
            return torch.zeros(shape, dtype=self.dtype, device=self._device)
        if "norm" in name:
            return torch.ones(shape, dtype=self.dtype, device=self._device)
        values = torch.empty(shape, dtype=self.dtype, device=self._device)
        return values.normal_(0, 0.02, generator=self._generator(name))

    def scaled(self, name: str, shape: Sequence[int], part: Part | None = None) -> Fp8Weight | None:
        return Fp8Weight.of(self.load(name, shape, part)) if self._products is Products.ALL else None

    def integers(self, name: str, shape: Sequence[int], part: Part | None = None) -> None:
        """Only GGUF files have such."""

    def int4(self, name: str, shape: Sequence[int], part: Part | None = None) -> Int4 | None:
        """Uniform 4-bit values, whose standard deviation is 4.6."""
        if self._group is None:
            return None
        values = torch.empty(shape, dtype=torch.uint8, device=self._device)
        values.random_(0, 16, generator=self._generator(name))
        scales = torch.full((shape[0], -(-shape[1] // self._group)), 0.02 / 4.6, dtype=self.dtype, device=self._device)
        return Int4.of(values, scales, None, self.dtype, part)

    def __contains__(self, name: str) -> bool:
        return self.packed and self._group is None and name.endswith("_blocks")

    def bytes(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """MXFP4: uniform 4-bit values, whose standard deviation is 2.8, with a scale of 2**-7."""
        values = torch.empty(shape, dtype=torch.uint8, device=self._device)
        return values.fill_(120) if name.endswith("_scales") else values.random_(generator=self._generator(name))

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(self._seed + zlib.crc32(name.encode()))

    def shape(self, name: str) -> tuple[int, ...]:
        raise KeyError(name)

    def get(self, name: str) -> None:
        return None

    def unused(self) -> list[str]:
        return []

    def close(self) -> None:
        """Nothing to close."""
