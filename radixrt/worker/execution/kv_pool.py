"""The KV pool: one slot per token, in the dtype of the pages. The state pool: one slot per sequence or checkpoint."""

from __future__ import annotations

import math

import numpy as np
import torch

from radixrt.worker.model.spec.delta_spec import DeltaSpec, ShortConvSpec
from radixrt.worker.model.spec.mamba_spec import MambaSpec

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


class KVPool:
    """K and V of `slots` tokens for every layer, each `[slots, kv_heads, head_dim]`.

    Attention reads new K and V back from here, as rounded by the pages' dtype, so that a request computes the same
    whether its prefix was cached or not. FP8 pages hold K and V divided by `scales` ((of K, of V) by layer), and values
    beyond their range saturate. With `latent`, V is the first `latent` elements of K: it is not stored, and has K's
    scale. `index`: what the same pages hold besides, if the model has indexers.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        latent: int | None = None,
        index: IndexPool | None = None,
    ) -> None:
        self.dtype = dtype
        self._quantized = dtype.itemsize == 1
        # torch indexes bytes on every device, FP8 only on some.
        stored = torch.uint8 if self._quantized else dtype
        self.scales = [(1.0, 1.0)] * layers
        self.head_dim = head_dim
        self.latent = latent
        self.index = index
        stacked = 2 if latent is None else 1
        self._values = zeros((layers, stacked, slots, kv_heads, head_dim), stored, device)
        self._by_layer = [tuple(layer) for layer in self._values]

    @property
    def slots(self) -> int:
        return self._values.shape[2]

    @property
    def nbytes(self) -> int:
        return self._values.nbytes + (0 if self.index is None else self.index.nbytes)

    @property
    def device(self) -> torch.device:
        return self._values.device

    def pages(self, layer: int, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V of a layer, each [pages, page_size, kv_heads, head_dim] of the pool's dtype. With `latent`,
        V is a view of K's first elements."""
        keys, values = self.stored(layer)
        return tuple(x.unflatten(0, (-1, page_size)).view(self.dtype) for x in (keys, values))

    def stored(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V of a layer, [slots, kv_heads, head_dim], as uint8 if they are FP8."""
        if self.latent is None:
            return self._by_layer[layer]
        keys = self._values[layer, 0]
        return keys, keys[..., : self.latent]

    def planes(self, page_size: int) -> list[torch.Tensor]:
        """Views of all that is stored, each int64[planes, pages, words of 8 bytes]: what a page has in one plane is
        contiguous. Where its size is no multiple of 8 bytes the views are uint8."""
        index = [] if self.index is None else [self.index.keys]
        return [by_page(x, page_size) for x in (self._values.flatten(0, 1), *index)]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k, v [T, kv_heads, head_dim] at int64 slots[T]. If slots are equal, any one of the tokens is stored."""
        keys, values = self.stored(layer)
        k_scale, v_scale = self.scales[layer]
        keys[slots] = self._encode(k, k_scale)
        if self.latent is None:
            values[slots] = self._encode(v, v_scale)

    def read(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V at int64 slots[L], each [L, kv_heads, head_dim] of `dtype`."""
        keys, values = self.stored(layer)
        k_scale, v_scale = self.scales[layer]
        k = self._decode(keys.index_select(0, slots), dtype, k_scale)  # on a CPU 8 times as fast as keys[slots]
        if self.latent is not None:
            return k, k[..., : self.latent]
        return k, self._decode(values.index_select(0, slots), dtype, v_scale)

    def _encode(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        if not self._quantized:
            return x.to(self.dtype)
        limit = torch.finfo(self.dtype).max
        return (x.float() / scale).clamp(-limit, limit).to(self.dtype).view(torch.uint8)

    def _decode(self, x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
        if not self._quantized:
            return x.to(dtype)
        return (x.view(self.dtype).float() * scale).to(dtype)


class IndexPool:
    """The index keys of `slots` tokens for every layer with an indexer (see `layers.indexer`), each `[slots, dim]`.

    They are in the model's dtype even if K and V are in FP8: they decide which tokens are seen at all, and to round
    them to FP8 with little error would take a Hadamard transform and a scale for each token, as in DeepSeek's own
    code. In 16 bits they are 256 of the 832 bytes that a token takes in a layer of DeepSeek V3.2, with K in FP8."""

    def __init__(self, layers: int, slots: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.keys = zeros((layers, slots, dim), dtype, device)
        """[layers, slots, dim]"""

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes

    def layer(self, number: int) -> torch.Tensor:
        """A view of the keys of the `number`-th layer with an indexer, [slots, dim]."""
        return self.keys[number]

    def write(self, number: int, slots: torch.Tensor, keys: torch.Tensor) -> None:
        """Store keys[T, dim] of the `number`-th layer with an indexer at int64 slots[T]."""
        self.keys[number, slots] = keys

    def read(self, number: int, slots: torch.Tensor) -> torch.Tensor:
        """[L, dim]: the keys at int64 slots[L]."""
        return self.keys[number, slots]


class StatePool:
    """The recurrent states of `slots` sequences in all linear layers: the last inputs of their short convolutions, in
    the model's dtype, and what the delta rule or the state-space model has stored, in float32. A slot's states are
    contiguous, so that copying it is fast. Slot 0 is the null slot."""

    def __init__(
        self, spec: DeltaSpec | ShortConvSpec | MambaSpec, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        layers = len(spec.layers)
        self.convs = zeros((slots, layers, spec.channels, spec.kernel - 1), dtype, device)
        self.rules = zeros((slots, layers, *spec.rule_shape), torch.float32, device)

    @property
    def slots(self) -> int:
        return len(self.convs)

    @property
    def nbytes(self) -> int:
        return self.convs.nbytes + self.rules.nbytes

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of the states of the `number`-th linear layer, for `delta.short_conv` and `delta.gated_delta`
        or `mamba.state_space`."""
        return self.convs[:, number], self.rules[:, number]

    def planes(self) -> list[torch.Tensor]:
        """Views of all that is stored, each uint8[slots, bytes]: what a slot has in one is contiguous."""
        return [states.flatten(1).view(torch.uint8) for states in (self.convs, self.rules)]

    def copy(self, copies: np.ndarray) -> None:
        """Copy states, int32[2, N]: (from, to) (see `plan.StateWork`). From slot 0: zeros."""
        if not copies.shape[1]:
            return
        device = self.convs.device
        fresh = copies[0] == 0
        new = torch.from_numpy(copies[1, fresh].astype(np.int64)).to(device)
        source, target = (torch.from_numpy(x.astype(np.int64)).to(device) for x in copies[:, ~fresh])
        for states in (self.convs, self.rules):
            states[new] = 0
            states[target] = states[source]


def by_page(x: torch.Tensor, page_size: int) -> torch.Tensor:
    """[planes, slots, ...] -> [planes, pages, words]"""
    planes, slots = x.shape[:2]
    found = x.view(torch.uint8).view(planes, slots // page_size, -1)
    return found if found.shape[2] % 8 else found.view(torch.int64)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """As torch.zeros. On a CPU, NumPy's zeros are used: their memory is allocated when it is first written, so that a
    large pool takes no time to create."""
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
