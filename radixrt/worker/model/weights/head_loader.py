"""Reads what some families have in place of plain grouped-query attention."""

from __future__ import annotations

from radixrt.worker.model.layers.mixed_heads import Mixed, MixedNorms
from radixrt.worker.model.layers.norms import HeadNorm, HeadNorms
from radixrt.worker.model.lora.lora_slots import Piece
from radixrt.worker.model.spec.spec import HeadNormsSpec
from radixrt.worker.model.weights.tensors import TensorLoader


class HeadsWeightLoader(TensorLoader):
    """Heads that differ by layer, norms of each head."""

    def _mixed(self, number: int, at: str) -> Mixed:
        spec, sizes, hidden = self._spec, self._spec.layers[number], self._spec.hidden_size
        heads = sizes.kv_heads

        def rows(name: str, dim: int) -> Piece:
            return Piece(at + name, (heads * dim, hidden), self._shard.kv_rows(heads, dim))

        q = spec.num_heads * sizes.head_dim
        pieces = [Piece(at + "q_proj", (q, hidden), self._shard.part(0, q)), rows("k_proj", sizes.head_dim)]
        pieces += [] if sizes.tied_values else [rows("v_proj", sizes.value_dim)]
        norms: dict[str, HeadNorm] = {}
        for kind in "qk" if spec.attention.qk_norm else "":
            if kind == "q" or sizes.source is None:
                norms[kind] = HeadNorm(
                    self._norm_weight(f"{at}{kind}_norm", sizes.head_dim), spec.norm_eps, centered=False
                )
        if sizes.value_norm:
            norms["v"] = HeadNorm(self._ones[:1].float(), spec.norm_eps, centered=False)
        local = self._shard.spec(spec)
        product = self._linear(pieces[:1] if sizes.source is not None else pieces, spec.attention.qkv_bias)
        return Mixed(product, local.num_heads, local.layers[number], MixedNorms(**norms))

    def _head_norms(self, at: str, norms: HeadNormsSpec) -> HeadNorms:
        spec = self._spec
        own_heads, own_kv = self._shard.part(0, spec.num_heads), self._shard.kv_rows(spec.num_kv_heads, 1)
        if not norms.names:
            plain = HeadNorm(self._ones[:1], spec.norm_eps, norms.centered)
            return HeadNorms(plain, plain, norms.after_rope)
        head_norms: list[HeadNorm] = []
        for name, heads, part in zip(
            norms.names, (spec.num_heads, spec.num_kv_heads), (own_heads, own_kv), strict=True
        ):
            if norms.per_head:
                weight = self._weights.load(f"model.{at}{name}.weight", (heads, spec.head_dim), part)
                weight = weight.float() if spec.norms.float32_weight else weight
            else:
                weight = self._norm_weight(at + name, spec.head_dim)
            head_norms.append(HeadNorm(self._deinterleaved_columns(weight), spec.norm_eps, norms.centered))
        return HeadNorms(head_norms[0], head_norms[1], norms.after_rope)
