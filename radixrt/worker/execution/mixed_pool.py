"""The KV pool of models whose layers have different heads (`ModelSpec.layers`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radixrt.worker.execution.kv_pool import KVPool, by_page, zeros
from radixrt.worker.model.spec.spec import LayerSpec


class MixedKVPool(KVPool):
    """A KVPool with tensors of K and V for each layer. A slot is the same token in all of them, so that pages are those
    of any model. A layer without K and V of its own reads those of another one, its source."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        sources: Sequence[int],
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`layers` are those with attention; `sources`: see `ModelSpec.kv_sources`."""
        super().__init__(len(layers), 0, 1, layers[0].head_dim, dtype, device)
        stored = self._values.dtype
        self._sources = sources
        self._own = [
            (
                zeros((slots, sizes.kv_heads, sizes.head_dim), stored, device),
                zeros((slots, sizes.kv_heads, sizes.value_dim), stored, device),
            )
            if sources[number] == number
            else None
            for number, sizes in enumerate(layers)
        ]

    @property
    def slots(self) -> int:
        return len(self.stored(0)[0])

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for own in self._own if own is not None for x in own)

    def planes(self, page_size: int) -> list[torch.Tensor]:
        return [by_page(x[None], page_size) for own in self._own if own is not None for x in own]

    def stored(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._own[self._sources[layer]]
        assert found is not None
        return found

    def read(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        return super().read(self._sources[layer], slots, dtype)
