"""Reads what some families have in place of plain grouped-query attention, and at the end of layers."""

from __future__ import annotations

import torch

from radixrt.worker.model.layers.layer_inputs import LayerEnd, LayerInputs
from radixrt.worker.model.layers.linear import Linear
from radixrt.worker.model.layers.mixed_heads import Mixed, MixedNorms
from radixrt.worker.model.layers.norms import HeadNorm, HeadNorms, Norm
from radixrt.worker.model.lora.lora_slots import Piece
from radixrt.worker.model.parallel.sharding import Part
from radixrt.worker.model.spec.spec import HeadNormsSpec
from radixrt.worker.model.weights.tensors import TensorLoader


class HeadsWeightLoader(TensorLoader):
    """Heads that differ by layer, norms of each head, inputs of layers."""

    def _mixed(self, number: int, at: str) -> Mixed:
        spec, own, hidden = self._spec, self._spec.layers[number], self._spec.hidden_size
        heads = own.kv_heads

        def rows(name: str, dim: int) -> Piece:
            return Piece(at + name, (heads * dim, hidden), self._shard.kv_rows(heads, dim))

        q = spec.num_heads * own.head_dim
        pieces = [Piece(at + "q_proj", (q, hidden), self._shard.part(0, q)), rows("k_proj", own.head_dim)]
        pieces += [] if own.tied_values else [rows("v_proj", own.value_dim)]
        norms: dict[str, HeadNorm] = {}
        names = zip("qk", spec.qk_norm_names, strict=True) if spec.qk_norm else ()
        for kind, name in names:
            if kind == "q" or own.source is None:
                norms[kind] = HeadNorm(self._norm_weight(at + name, own.head_dim), None, spec.norm_eps, centered=False)
        if spec.value_norm:
            norms["v"] = HeadNorm(self._ones[:1].float(), None, spec.norm_eps, centered=False)
        local = self._shard.spec(spec)
        product = self._linear(pieces[:1] if own.source is not None else pieces, spec.qkv_bias)
        return Mixed(product, local.num_heads, local.layers[number], MixedNorms(**norms), spec.value_factor)

    def _of_each_head(self, name: str, number: int, own: Part | None) -> Piece:
        """The `number`-th of q, k and v, of a matrix with the rows of all three head by head (`qkv_by_head`)."""
        rows, dim = self._spec.num_heads * self._spec.head_dim, self._spec.head_dim
        order = torch.arange(3 * (own.count if own else rows)).view(-1, 3, dim)[:, number].flatten()
        part = self._shard.part(0, 3 * rows)
        return Piece(name, (3 * rows, self._spec.hidden_size), part, rotated=number < 2, order=order)

    def _head_norms(self, at: str, norms: HeadNormsSpec) -> HeadNorms:
        spec = self._spec
        own_heads, own_kv = self._shard.part(0, spec.num_heads), self._shard.kv_rows(spec.num_kv_heads, 1)
        if not norms.names:
            plain = HeadNorm(self._ones[:1], None, spec.norm_eps, norms.centered)
            return HeadNorms(plain, plain, norms.after_rope)
        found: list[HeadNorm] = []
        for name, heads, own in zip(norms.names, (spec.num_heads, spec.num_kv_heads), (own_heads, own_kv), strict=True):
            if norms.per_head:
                weight = self._head_norm(at + name, heads, own)
            else:
                weight = self._norm_weight(at + name, spec.head_dim)
            bias = self._norm_bias(at + name, spec.head_dim) if norms.bias else None
            found.append(HeadNorm(self._deinterleaved_columns(weight), bias, spec.norm_eps, norms.centered))
        return HeadNorms(found[0], found[1], norms.after_rope)

    def _head_norm(self, name: str, heads: int, own: Part | None) -> torch.Tensor:
        """Weights of norms of heads, [heads, D], each in its own tensor or all in one."""
        if f"model.{name}.norms.0.weight" not in self._weights:
            weight = self._weights.load(f"model.{name}.weight", (heads, self._spec.head_dim), own)
        else:
            weight = torch.stack([self._vector(f"{name}.norms.{n}", self._spec.head_dim) for n in range(heads)])
            weight = weight if own is None else weight[own.start : own.stop]
        return weight.float() if self._spec.norms.float32_weight else weight

    def layer_inputs(self) -> LayerInputs:
        """See `ModelSpec.layer_inputs`."""
        spec, name = self._spec, "per_layer_model_projection"
        width = spec.num_layers * spec.layer_inputs
        projection = Linear(self.matrix(name, width, spec.hidden_size), None, self._batch_invariant)
        weight = self._norm_weight("per_layer_projection_norm", spec.layer_inputs)
        norm = Norm(weight, spec.norm_eps, None)
        embedding = self.matrix("embed_tokens_per_layer", spec.vocab_size, width)
        return LayerInputs(embedding, projection, norm, spec.layer_inputs)

    def _layer_end(self, at: str) -> LayerEnd:
        spec, size = self._spec, self._spec.layer_inputs
        scalar = self._weights.load(f"model.{at}layer_scalar", (1,))
        if not size:
            return LayerEnd(scalar)
        shapes = {"per_layer_input_gate": (size, spec.hidden_size), "per_layer_projection": (spec.hidden_size, size)}
        gate, back = (
            Linear(self.matrix(at + name, *shape), None, self._batch_invariant, self._ops)
            for name, shape in shapes.items()
        )
        return LayerEnd(scalar, gate, back, self.norm(at + "post_per_layer_input_norm"), spec.activation)
