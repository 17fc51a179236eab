"""Reads a rank's parts of a decoder's tensors from a checkpoint, by the names that transformers gives them."""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar

import torch
from torch.nn import functional as F

from radixrt.worker.model.layers.fp8 import FP8, Fp8Linear, Fp8Scaling, Fp8Weight, concatenate_fp8
from radixrt.worker.model.layers.hybrid_layers import HybridLayerNames
from radixrt.worker.model.layers.int4 import Int4, Int4Linear, concatenate_int4
from radixrt.worker.model.layers.int_linear import IntEmbedding, IntLinear, IntWeight, concatenate_ints
from radixrt.worker.model.layers.layers import Output
from radixrt.worker.model.layers.linear import Embedding, Linear, Product, concatenate
from radixrt.worker.model.layers.norms import NoNorm, Norm
from radixrt.worker.model.layers.ops import Ops
from radixrt.worker.model.lora.lora_slots import Adapters, BaseProduct, Piece
from radixrt.worker.model.parallel.group import Group
from radixrt.worker.model.parallel.sharding import Part, Shard
from radixrt.worker.model.spec.spec import ModelSpec
from radixrt.worker.model.weights.interleaved_experts import deinterleave
from radixrt.worker.model.weights.weights import Renamed, Weights

EMBEDDING, HEAD, HEAD_BIAS = "model.embed_tokens.weight", "lm_head.weight", "lm_head.bias"


class TensorLoader:
    """Reads a rank's parts of a decoder's tensors from a checkpoint."""

    takes_adapters: ClassVar[bool] = True
    """Whether LoRA adapters fit what is made of the tensors."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        batch_invariant: bool,
        ops: Ops,
        group: Group | None,
        adapters: Adapters | None = None,
    ) -> None:
        self._spec = spec
        self._weights = self._view(weights)
        self._batch_invariant = batch_invariant
        self._ops = ops
        self._group = group
        self._adapters = adapters
        self._shard = group.shard if group else Shard()

    def _view(self, weights: Weights) -> Renamed:
        """The checkpoint's tensors by the names that are asked for here."""
        spec = self._spec
        return HybridLayerNames(weights, spec) if spec.hybrid_layers else Renamed(weights, spec.stored.other_names)

    def embedding(self) -> Embedding | IntEmbedding:
        """Read before all others."""
        spec = self._spec
        shape = spec.vocab_size, spec.hidden_size
        if (found := self._weights.integers(EMBEDDING, shape)) is not None:
            loaded: Embedding | IntEmbedding = IntEmbedding(found, found.matrix(), self._weights.dtype)
        else:
            loaded = Embedding(self._weights.load(EMBEDDING, shape))
        self._ones = torch.ones(spec.hidden_size, dtype=loaded.dtype, device=loaded.device)
        return loaded

    def matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        return self._weights.load(f"model.{name}.weight", (rows, columns))

    def projection(self, name: str, rows: int, columns: int) -> Product:
        """A projection without a bias, whole on every rank."""
        return self._linear([Piece(name, (rows, columns))], False)

    def _vector(self, name: str, size: int, part: Part | None = None) -> torch.Tensor:
        return self._weights.load(f"model.{name}.weight", (size,), part)

    def head(self, embedding: Embedding | IntEmbedding) -> Linear | IntLinear:
        """The output projection to this rank's token ids, padded with zero rows to the size of rank 0's."""
        vocab_size, known = self._spec.vocab_size, embedding.weight
        ids = self._shard.token_ids(vocab_size)
        missing = len(Shard(0, self._shard.size).token_ids(vocab_size)) - len(ids)
        if not missing and (found := self._int_head(embedding, ids)) is not None:
            return IntLinear.of(found, None, self._batch_invariant)
        whole = known if isinstance(known, torch.Tensor) else known.dequantized().to(embedding.dtype)
        head = self._own_head(whole, ids)
        return Linear(F.pad(head, (0, 0, 0, missing)) if missing else head, None, self._batch_invariant)

    def _int_head(self, embedding: Embedding | IntEmbedding, ids: range) -> IntWeight | None:
        """The head in integers, without padding."""
        part = None if self._group is None else Part(0, ids.start, ids.stop)
        if HEAD in self._weights:
            return self._weights.integers(HEAD, (self._spec.vocab_size, self._spec.hidden_size), part)
        weight = embedding.weight
        if not self._spec.tied or isinstance(weight, torch.Tensor):
            return None
        return weight if part is None else weight.part(part)

    def _own_head(self, embedding: torch.Tensor, ids: range) -> torch.Tensor:
        """Without padding. If a model is tied but also has a stored head that differs, the stored one is used:
        `tie_word_embeddings` is often wrong."""
        tied = embedding[ids.start : ids.stop]
        if self._spec.tied and HEAD not in self._weights:
            return tied
        part = None if self._group is None else Part(0, ids.start, ids.stop)
        head = self._weights.load(HEAD, embedding.shape, part)
        return tied if self._spec.tied and (head.is_meta or torch.equal(head, tied)) else head

    def head_bias(self, ids: range, width: int) -> torch.Tensor | None:
        """float32[width]: the bias of the output projection to this rank's token `ids`, padded with zeros; None if
        there is none."""
        if HEAD_BIAS not in self._weights:
            return None
        whole = self._weights.load(HEAD_BIAS, (self._spec.vocab_size,)).float()[ids.start : ids.stop]
        return F.pad(whole, (0, width - len(ids)))

    def _linear(self, pieces: list[Piece], bias: bool) -> Product:
        """Several projections of the same input as one, their rows in the order of `pieces`, with LoRA adapters."""
        return self._adapted(self._plain_linear(pieces, bias), pieces)

    def _adapted(self, product: BaseProduct, pieces: list[Piece]) -> Product:
        if self._adapters is None:
            return product
        return self._adapters.on(product, pieces, self._other_name, self._deinterleaved)

    def _other_name(self, name: str) -> str:
        """The name that transformers may have for a projection, without what stands before `layers.`."""
        renamed = self._weights.renamed(f"model.{name}.weight").removesuffix(".weight")
        return renamed[renamed.find("layers.") :]

    def _plain_linear(self, pieces: list[Piece], bias: bool) -> BaseProduct:
        """As `_linear`, without adapters."""
        biases = self._biases(pieces) if bias else None
        if scaled := self._scaled(pieces):
            return Fp8Linear(scaled, biases, self._weights.dtype, self._ops)
        if packed := self._int4(pieces):
            return Int4Linear(packed, biases, self._batch_invariant, self._ops)
        if ints := self._integers(pieces):
            return IntLinear.of(ints, biases, self._batch_invariant)
        weight = concatenate([self._weight(p) for p in pieces])
        return Linear(weight, biases, self._batch_invariant, self._ops)

    def _fused(self, name: str, pieces: list[Piece]) -> list[Piece]:
        """This rank's parts of projections that a checkpoint stores as one matrix `name`, with their rows one after the
        other."""
        shape = sum(p.shape[0] for p in pieces), pieces[0].shape[1]
        if self._shard.size == 1:
            return [Piece(name, shape)]
        parts, start = [], 0
        for p in pieces:
            assert p.rows is not None
            parts.append(Piece(name, shape, Part(0, start + p.rows.start, start + p.rows.stop)))
            start += p.shape[0]
        return parts

    def _biases(self, pieces: list[Piece]) -> torch.Tensor:
        """The biases of `pieces` as one; zeros for pieces without a bias."""
        found = [self._bias(p) if p.has_bias else None for p in pieces]
        like = next(bias for bias in found if bias is not None)
        sizes = [len(p.order) if p.order is not None else p.rows.count if p.rows else p.shape[0] for p in pieces]
        return torch.cat([like.new_zeros(n) if bias is None else bias for bias, n in zip(found, sizes, strict=True)])

    def _weight(self, piece: Piece) -> torch.Tensor:
        return self._deinterleaved(piece, self._weights.load(f"model.{piece.name}.weight", piece.shape, piece.part))

    def _bias(self, piece: Piece) -> torch.Tensor:
        return self._deinterleaved(piece, self._weights.load(f"model.{piece.name}.bias", piece.shape[:1], piece.rows))

    def _deinterleaved(self, piece: Piece, rows: torch.Tensor) -> torch.Tensor:
        """Reorder the rows of q and k heads so that RoPE rotates elements i and i + rope_dim / 2 together, if in the
        checkpoint it is 2i and 2i + 1. Dot products of q and k stay the same."""
        spec = self._spec
        if piece.order is not None:
            rows = rows[piece.order.to(rows.device)]
        if not (piece.rotated and spec.stored.interleaved):
            return rows
        numbers = torch.arange(len(rows), device=rows.device).unflatten(0, (-1, spec.head_dim))
        return rows[self._deinterleaved_columns(numbers).flatten()]

    def _deinterleaved_columns(self, x: torch.Tensor) -> torch.Tensor:
        """The same for [..., D] of heads."""
        if not self._spec.stored.interleaved:
            return x
        rotated, others = x[..., : self._spec.rope_dim], x[..., self._spec.rope_dim :]
        return torch.cat((deinterleave(rotated, x.dim() - 1), others), dim=-1)

    def _scaled(self, pieces: list[Piece]) -> Fp8Weight | None:
        """The matrices as one in FP8; None if any is not to be used in FP8."""
        weights = []
        for p in pieces:
            if (weight := self._weights.scaled(f"model.{p.name}.weight", p.shape, p.part)) is None:
                return None
            if p.order is not None and (weight := weight.picked(p.order)) is None:
                return None
            if p.rotated and self._spec.stored.interleaved:
                if weight.fp8_scaling is not Fp8Scaling.ROWS:  # reordered rows would belong to several blocks
                    return None
                values = self._deinterleaved(p, weight.values.view(torch.uint8)).view(FP8)  # torch cannot index FP8
                weight = Fp8Weight.by_rows(values, self._deinterleaved(p, weight.scales))
            weights.append(weight)
        return concatenate_fp8(weights)

    def _int4(self, pieces: list[Piece]) -> Int4 | None:
        """The matrices as one in INT4; None if any is not to be used in INT4, or if they are of different kinds."""
        found = []
        for p in pieces:
            if (weight := self._weights.int4(f"model.{p.name}.weight", p.shape, p.part)) is None:
                return None
            if p.order is not None or (p.rotated and self._spec.stored.interleaved):
                weight = weight.take(self._deinterleaved(p, torch.arange(weight.rows, device=weight.values.device)))
            found.append(weight)
        return concatenate_int4(found)

    def _integers(self, pieces: list[Piece]) -> IntWeight | None:
        """The matrices as one in integers; None if any is not to be used so."""
        found = []
        for p in pieces:
            if (weight := self._weights.integers(f"model.{p.name}.weight", p.shape, p.part)) is None:
                return None
            if p.order is not None or (p.rotated and self._spec.stored.interleaved):
                weight = weight.take(self._deinterleaved(p, torch.arange(len(weight))))
            found.append(weight)
        return concatenate_ints(found)

    def _output(self, name: str, shape: tuple[int, int], bias: bool, turn: int, after: Norm | None = None) -> Output:
        pieces = [Piece(name, shape, self._shard.part(1, shape[1]))]
        product = self._plain_linear(pieces, bias)
        if self._shard.rank:  # one of the ranks adds the bias
            product = dataclasses.replace(product, bias=None)
        return Output(self._adapted(product, pieces), self._group, turn, after, self._spec.factors.residual_factor)

    def _outputs(
        self, names: tuple[str, str], columns: tuple[int, int], biases: tuple[bool, bool], turn: int
    ) -> Output:
        """Two projections back to the residual stream as one, of their inputs one after the other."""
        hidden, sizes = self._spec.hidden_size, zip(names, columns, strict=True)
        pieces = [Piece(name, (hidden, size), self._shard.part(1, size)) for name, size in sizes]
        weight = torch.cat([self._weight(piece) for piece in pieces], dim=1)
        summands = [self._bias(piece) for piece, bias in zip(pieces, biases, strict=True) if bias]
        if self._shard.rank:  # one of the ranks adds the biases
            summands = []
        both = functools.reduce(torch.add, summands) if summands else None
        product = Linear(weight, both, self._batch_invariant, self._ops)
        return Output(product, self._group, turn, None, self._spec.factors.residual_factor)

    def norm(self, name: str, fp8_scaling: Fp8Scaling | None = None) -> Norm:
        size, norms = self._spec.hidden_size, self._spec.norms
        weight = self._norm_weight(name, size)
        bias = self._norm_bias(name, size) if norms.bias else None
        return Norm(weight, self._spec.norm_eps, fp8_scaling, norms.centered, bias)

    def _norm_weight(self, name: str, size: int, part: Part | None = None) -> torch.Tensor:
        weight, norms = self._vector(name, size, part), self._spec.norms
        return weight.float() + norms.offset if norms.float32_weight else weight

    def _norm_bias(self, name: str, size: int) -> torch.Tensor:
        bias = self._weights.load(f"model.{name}.bias", (size,))
        return bias.float() if self._spec.norms.float32_weight else bias

    def _norm_before(self, at: str, name: str | None, fp8_scaling: Fp8Scaling | None) -> Norm | NoNorm:
        return NoNorm() if name is None else self.norm(at + name, fp8_scaling)

    def _norm_after(self, at: str, name: str | None) -> Norm | None:
        return None if name is None else self.norm(at + name)
