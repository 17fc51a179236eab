"""The decoder of all families with a file here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from radixrt.worker.model.layers.fp8 import Activations, Fp8Activations, Fp8Linear, plain
from radixrt.worker.model.layers.hybrid_layers import odd_sums
from radixrt.worker.model.layers.int4 import Int4Linear
from radixrt.worker.model.layers.int_linear import IntLinear
from radixrt.worker.model.layers.layers import DecoderLayer
from radixrt.worker.model.layers.linear import Linear, Product
from radixrt.worker.model.layers.mixers import Attend, ForwardContext, Mix
from radixrt.worker.model.layers.mlp import Mixture
from radixrt.worker.model.layers.norms import NoNorm
from radixrt.worker.model.layers.ops import Ops, TorchOps
from radixrt.worker.model.layers.parallel_experts import MlpWithExperts
from radixrt.worker.model.layers.positions import Positions
from radixrt.worker.model.lora.adapter import Adapter
from radixrt.worker.model.lora.lora import LoraLinear
from radixrt.worker.model.lora.lora_slots import Adapters, Room
from radixrt.worker.model.model import Model
from radixrt.worker.model.parallel.group import AFTER_MLP, Group
from radixrt.worker.model.parallel.sharding import Shard
from radixrt.worker.model.predictor import read_predictor, reading_spec
from radixrt.worker.model.spec.spec import ModelSpec
from radixrt.worker.model.weights.weight_loader import loader_of
from radixrt.worker.model.weights.weights import Weights


class Decoder(Model):
    """`spec` describes the whole model. In a tensor-parallel `group` this rank has a part of it, which `Decoder.spec`
    describes. LoRA `adapters` are numbered in their order; with `room`, others can be put in their place."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        batch_invariant: bool = False,
        ops: Ops | None = None,
        group: Group | None = None,
        adapters: Sequence[Adapter] = (),
        room: Room | None = None,
    ) -> None:
        shard = group.shard if group else Shard()
        self.spec = shard.spec(spec)
        self.own_ids = shard.token_ids(spec.vocab_size)
        self._ops = ops or TorchOps()
        self._group = group
        self._odd_sums = odd_sums(spec.hybrid_layers)
        lora = Adapters(adapters, room, self._ops, weights.dtype, batch_invariant) if adapters or room else None
        kind = loader_of(spec)
        reader = kind(spec, weights, batch_invariant, self._ops, group, lora)
        self._embedding = reader.embedding()
        self._layers = [reader.layer(i) for i in range(spec.num_layers)]
        if lora is not None:
            lora.fill()
        self._lora = lora
        self._adapters = None if lora is None else lora.rows
        self._norm = reader.norm("norm")
        self._head = reader.head(self._embedding)
        self._layer_inputs = reader.layer_inputs()
        self._head_bias = reader.head_bias(self.own_ids, self.own_width)
        self._positions = Positions(spec, self._embedding.device)
        self._embedding_factor = float(torch.tensor(spec.factors.embedding_factor, dtype=self.dtype))
        self.predictor = None
        if spec.predicts:
            loader = kind(reading_spec(spec), weights, batch_invariant, self._ops, group)  # adapters have nothing of it
            self.predictor = read_predictor(loader, spec, self._embed, self._positions.rotations, self._ops)

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def sinks(self) -> tuple[torch.Tensor | None, ...]:
        """By layer with attention: the sinks of this rank's query heads, float32[heads], or None (see
        `AttentionSpec.sinks`)."""
        layers = self._layers if self.predictor is None else [*self._layers, self.predictor.layer]
        return tuple(layers[number].sinks for number in self.spec.attention_layers)

    @property
    def has_unquantized_experts(self) -> bool:
        sparse = Mixture, MlpWithExperts
        mixtures = (layer.mlp.experts for layer in self._layers if isinstance(layer.mlp, sparse))
        return any(not (experts.is_fp8 or experts.is_packed) for experts in mixtures)

    @property
    def is_fp8(self) -> bool:
        """Whether most weights are in FP8, judged by the last layer's MLP or experts."""
        mlp = self._layers[-1].mlp
        if isinstance(mlp, (Mixture, MlpWithExperts)):
            return mlp.experts.is_fp8
        return isinstance(_first_product(mlp), Fp8Linear)

    @property
    def is_int4(self) -> bool:
        """Whether most weights are in INT4, judged by the last layer's MLP; not for experts."""
        return isinstance(_first_product(self._layers[-1].mlp), Int4Linear)

    @property
    def is_int(self) -> bool:
        """Whether most weights are in integers for a CPU, judged by the last layer's MLP."""
        return isinstance(_first_product(self._layers[-1].mlp), IntLinear)

    @property
    def has_adapters(self) -> bool:
        return self._adapters is not None

    @property
    def max_lora_rank(self) -> int:
        return 0 if self._lora is None else self._lora.max_rank

    def put_adapter(self, slot: int, adapter: Adapter) -> None:
        if self._lora is None:
            raise ValueError("there is no room for LoRA adapters")
        self._lora.put(slot, adapter)

    def use_adapters(self, adapters: torch.Tensor | None) -> None:
        if self._adapters is not None:
            self._adapters.use(adapters)

    @property
    def own_width(self) -> int:
        return len(self._head.weight)

    def attend_all(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        mix: Mix | None = None,
        wanted: torch.Tensor | None = None,
    ) -> tuple[Activations, torch.Tensor]:
        """As in `Model`. If the last layer has no attention, the input of its MLP is in place of the output."""
        residual = self._embed(tokens)
        context = self._context(tokens, positions, residual, attend, mix)
        if wanted is None:
            return self._to_last(0, residual, context)
        self._through(self._layers[: self.spec.writers + 1], residual, context)
        residual, tokens, positions = residual[wanted], tokens[wanted], positions[wanted]
        if self._adapters is not None:
            self._adapters.select(wanted)
        if not len(tokens):
            return residual, residual
        context = self._context(tokens, positions, self._embed(tokens), attend, None)
        return self._to_last(self.spec.writers, residual, context)

    def _context(
        self, tokens: torch.Tensor, positions: torch.Tensor, embedded: torch.Tensor, attend: Attend, mix: Mix | None
    ) -> ForwardContext:
        """Of int tokens[T] at int positions[T] with embeddings [T, hidden]."""
        return ForwardContext(
            self._ops,
            attend,
            mix,
            self._positions.rotations(positions, embedded.dtype),
            self._positions.query_factors(positions, embedded.dtype),
            None if self._layer_inputs is None else self._layer_inputs(tokens, embedded, self._ops),
        )

    def _through(self, layers: Sequence[DecoderLayer], residual: torch.Tensor, context: ForwardContext) -> Activations:
        """Run all layers but the last one, of which the input is returned. Changes residual[T, hidden] in place."""
        x = layers[0].attention_norm(residual, self._ops)
        for layer, following in itertools.pairwise(layers):
            x = layer.forward(x, residual, following.attention_norm, context)
        return x

    def _to_last(self, first: int, residual: torch.Tensor, context: ForwardContext) -> tuple[Activations, torch.Tensor]:
        """The layers from `first` on, but of the last one only attention. Returns its output and the residual stream,
        which is changed in place."""
        x = self._through(self._layers[first:], residual, context)
        if self._odd_sums[0]:
            self._sum_nothing(residual)
        return self._layers[-1].mix(x, context), residual

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded = self._embedding(tokens)
        return embedded if self._embedding_factor == 1 else embedded.mul_(self._embedding_factor)

    def hidden(
        self,
        x: Activations,
        residual: torch.Tensor,
        wanted: torch.Tensor | None = None,
        tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if wanted is not None:
            residual, tokens = residual[wanted], None if tokens is None else tokens[wanted]
            if self._adapters is not None:
                self._adapters.select(wanted)
            # Only the input of an MLP without a mixer is quantized, to rows that products need in one piece.
            x = self._layers[-1].attention_norm(residual, self._ops) if isinstance(x, Fp8Activations) else x[wanted]
        last, inputs = self._layers[-1], None
        if self._layer_inputs is not None:
            assert tokens is not None
            inputs = self._layer_inputs(tokens, self._embed(tokens), self._ops, first=last.place.layer)[:, 0]
        x = last.finish(x, residual, self._norm, self._ops, inputs)
        if self._odd_sums[1]:
            self._sum_nothing(residual)
        return plain(x)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if not len(hidden):
            return torch.empty((0, self.own_width), device=hidden.device)
        logits = self._logits(hidden, out)
        if self._head_bias is not None:
            logits.add_(self._head_bias)
        factor, cap = self.spec.factors.logits_factor, self.spec.factors.logits_cap
        if factor != 1:
            logits.mul_(factor)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _sum_nothing(self, residual: torch.Tensor) -> None:
        """One more sum over ranks, so that the next one begins with the first buffer again (see
        `hybrid_layers.turn`)."""
        if self._group is not None:
            one = torch.zeros_like(residual[:1])
            self._group.add(AFTER_MLP, self._group.buffer(AFTER_MLP, one).zero_(), one, NoNorm(), self._ops)

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        if self._group is None:
            return logits
        if not len(logits):
            return logits.new_empty((0, self.spec.vocab_size))
        return self._group.gather(logits)[:, : self.spec.vocab_size]

    def _logits(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        if isinstance(self._head, Linear) and x.is_cuda and x.dtype.itemsize == 2 and self._head.batch_invariant:
            from radixrt.worker.cuda.linear.invariant import product

            logits = product(x, self._head.weight, dtype=torch.float32)
            return logits if out is None else out.copy_(logits)
        if isinstance(self._head, IntLinear) or not x.is_cuda or x.dtype == torch.float32:
            logits = self._head(x).float()
            return logits if out is None else out.copy_(logits)
        if out is None:
            out = torch.empty((len(x), self.own_width), dtype=torch.float32, device=x.device)
        # In float32, because bfloat16 has a significand of 8 bits: many logits would be equal.
        few = self._ops.small_linear(x, self._head.weight, None, out)
        return few if few is not None else torch.ops.aten.mm.dtype_out(x, self._head.weight.t(), torch.float32, out=out)


def _first_product(mlp: object) -> Product | None:
    """The first product of an MLP, without its adapters; None if it has none."""
    product = getattr(mlp, "gate_up", getattr(mlp, "up", None))
    return product.base if isinstance(product, LoraLinear) else product
