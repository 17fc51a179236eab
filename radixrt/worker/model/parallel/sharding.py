"""Which part of a model each rank of a tensor-parallel group holds (Megatron-LM, arXiv 1909.08053, section 3).

    norm -> qkv, rows by head -> attention of own heads -> output, columns -> sum over ranks -> residual stream
    norm -> gate and up, rows -> their own product      -> down, columns   -> sum over ranks -> residual stream
    norm -> head, rows by token id -> logits of own ids -> gathered

Between two sums, no communication is needed. Norms and the embedding are replicated on all ranks; in latent attention
(`latent`), also the projections to latents and the pages that hold the latents. Recurrent states are divided as heads
are. Where Mamba-2's norm is over heads of several ranks, these exchange one number for each token, the mean of squares.
This file computes with integers only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from radixrt.worker.model.spec.delta_spec import DeltaSpec, ShortConvSpec
from radixrt.worker.model.spec.mamba_spec import MambaSpec
from radixrt.worker.model.spec.spec import LayerSpec, ModelSpec

VOCAB_ALIGNMENT = 64
"""Each rank but the last ones has a multiple of this many token ids."""


@dataclass(frozen=True, slots=True)
class Part:
    """A slice [start, stop) of one dimension of a tensor."""

    dim: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of a tensor-parallel group of `size` ranks."""

    rank: int = 0
    size: int = 1

    def spec(self, whole: ModelSpec) -> ModelSpec:
        """This rank's part of the model as a spec: fewer heads, smaller intermediate sizes; vocabulary and hidden size
        stay. ValueError if sizes are not divisible by the number of ranks."""
        if self.size == 1:
            return whole
        changes: dict[str, Any] = {
            "num_heads": self._share("num_attention_heads", whole.num_heads),
            "num_kv_heads": self._kv_share(whole.num_kv_heads),
            "layers": tuple(self._layer(own) for own in whole.layers),
        }
        if whole.experts is None or len(whole.experts.layers) < whole.num_layers:
            changes["intermediate_size"] = self._share("intermediate_size", whole.intermediate_size)
        if whole.experts is not None:
            inner = self._share("moe_intermediate_size", whole.experts.intermediate_size)
            shared = self._share("shared experts' intermediate size", whole.experts.shared_size)
            changes["experts"] = dataclasses.replace(whole.experts, intermediate_size=inner, shared_size=shared)
        if whole.recurrent is not None:
            changes["recurrent"] = self._recurrent(whole.recurrent)
        return dataclasses.replace(whole, **changes)

    def _recurrent(self, whole: DeltaSpec | ShortConvSpec | MambaSpec) -> DeltaSpec | ShortConvSpec | MambaSpec:
        """Linear attention and Mamba-2 are divided by heads, short convolutions by channels."""
        if isinstance(whole, ShortConvSpec):
            return dataclasses.replace(whole, channels=self._share("hidden_size", whole.channels))
        if isinstance(whole, MambaSpec):
            groups = self._share_or_one("mamba_n_groups (n_groups)", whole.groups)
            shared = 1 if whole.norm == "none" else max(1, self.size // whole.groups)
            heads = self._share("mamba_n_heads (mamba_num_heads)", whole.heads)
            return dataclasses.replace(whole, heads=heads, groups=groups, group_ranks=shared)
        keys = self._share("linear_num_key_heads", whole.key_heads)
        return dataclasses.replace(
            whole, key_heads=keys, value_heads=self._share("linear_num_value_heads", whole.value_heads)
        )

    def _share(self, name: str, total: int) -> int:
        if total % self.size:
            raise ValueError(f"tensor_parallel_size {self.size} does not divide the model's {name}, {total}")
        return total // self.size

    def _layer(self, whole: LayerSpec) -> LayerSpec:
        inner = self._share("intermediate_size", whole.intermediate_size)
        return dataclasses.replace(whole, kv_heads=self._kv_share(whole.kv_heads), intermediate_size=inner)

    def _kv_share(self, kv_heads: int) -> int:
        return self._share_or_one("num_key_value_heads", kv_heads)

    def _share_or_one(self, name: str, total: int) -> int:
        """If there are fewer than ranks, several ranks have the same one."""
        if total >= self.size:
            return self._share(name, total)
        if self.size % total:
            raise ValueError(f"tensor_parallel_size {self.size} is no multiple of the model's {name}, {total}")
        return 1

    def part(self, dim: int, total: int) -> Part | None:
        """This rank's slice of a dimension of `total` elements; None if there is only one rank."""
        if self.size == 1:
            return None
        each = total // self.size
        return Part(dim, self.rank * each, (self.rank + 1) * each)

    def halves(self, dim: int, half: int) -> list[Part | None]:
        """This rank's slices of both halves of a dimension of 2 * `half` elements; [None] if there is only one rank."""
        if self.size == 1:
            return [None]
        each = half // self.size
        own = Part(dim, self.rank * each, (self.rank + 1) * each)
        return [own, Part(dim, half + own.start, half + own.stop)]

    def kv_rows(self, kv_heads: int, dim: int) -> Part | None:
        """This rank's rows of a projection to K or V, of heads of `dim` elements. If there are fewer KV heads than
        ranks, several ranks have the same head: those whose query heads use it. In Mamba-2, B and C are to groups of
        heads what K and V are to those of query heads."""
        if self.size == 1:
            return None
        first = self.rank * kv_heads // self.size
        count = max(1, kv_heads // self.size)
        return Part(0, first * dim, (first + count) * dim)

    def token_ids(self, vocab_size: int) -> range:
        """Token ids whose logits this rank computes: equally many on all ranks but the last ones, which may have fewer
        or none."""
        each = -(-vocab_size // (self.size * VOCAB_ALIGNMENT)) * VOCAB_ALIGNMENT if self.size > 1 else vocab_size
        start = min(self.rank * each, vocab_size)
        return range(start, min(start + each, vocab_size))
