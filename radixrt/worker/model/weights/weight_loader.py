"""Reads the layers of a decoder from a checkpoint, by the names that transformers gives its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from radixrt.worker.model.layers.hybrid_layers import turn
from radixrt.worker.model.layers.indexer import Indexer
from radixrt.worker.model.layers.latent import NORM_EPS, Latent, UpProjections
from radixrt.worker.model.layers.layer_inputs import LayerInputs
from radixrt.worker.model.layers.layers import DecoderLayer, FeedForward, Gate, Grouped, NoMlp, NoOutput
from radixrt.worker.model.layers.linear import HeadLinear, Linear
from radixrt.worker.model.layers.mixers import Attention, HybridMixer, Mixer, NoMixer, RecurrentMixer
from radixrt.worker.model.layers.mlp import UNGATED, Mixture, Mlp, SharedMlp, UngatedMlp, UngatedShared, Xielu
from radixrt.worker.model.layers.moe import Experts, read_experts
from radixrt.worker.model.layers.norms import NoNorm, Norm
from radixrt.worker.model.layers.positions import place_of
from radixrt.worker.model.lora.lora_slots import Piece
from radixrt.worker.model.parallel.group import AFTER_ATTENTION, AFTER_MLP
from radixrt.worker.model.spec.delta_spec import DeltaSpec, ShortConvSpec
from radixrt.worker.model.spec.expert_spec import ExpertsSpec
from radixrt.worker.model.spec.index_spec import IndexSpec
from radixrt.worker.model.spec.mamba_spec import MambaSpec
from radixrt.worker.model.spec.norms_spec import NormsSpec
from radixrt.worker.model.spec.spec import SQUARED_RELU, XIELU, GateSpec, ModelSpec
from radixrt.worker.model.weights.interleaved_experts import read_interleaved_experts
from radixrt.worker.model.weights.recurrent_loader import RecurrentWeightLoader
from radixrt.worker.model.weights.weights import load_float32

XIELU_FIXED = 0.5, -1e-6
"""Defaults of `beta` and `eps`."""


class WeightLoader(RecurrentWeightLoader):
    """Reads the layers of a decoder."""

    def layer(self, number: int) -> DecoderLayer:
        spec, at = self._spec, f"layers.{number}."
        if spec.recurrent is not None and number in spec.recurrent.layers and number not in spec.attention_layers:
            return self._recurrent_layer(number, spec.recurrent)
        if spec.hybrid_layers and spec.hybrid_layers[number][0] is None:
            return self._mlp_alone(number)
        attention, sizes = self._attention(number, at + "self_attn."), spec.layer(number)
        inner = spec.num_heads * (spec.latent.value_dim if spec.latent else sizes.value_dim)
        mlp, norms = self._mlp(number, spec.norms), spec.norms
        shape, after = (spec.hidden_size, inner), self._norm_after(at, norms.after_attention)
        attention_norm = self._norm_before(at, norms.before_attention, attention.fp8_scaling)
        mixer: Mixer = attention
        name = at + "self_attn.o_proj"
        if isinstance(spec.recurrent, MambaSpec) and spec.recurrent.parallel:
            mixer = HybridMixer(attention, self._mamba(at + "mamba.", spec.recurrent))
            both = name, at + "mamba.out_proj"
            biases = spec.attention.output_bias, spec.recurrent.out_bias
            output = self._outputs(both, (inner, spec.recurrent.values), biases, AFTER_ATTENTION)
        else:
            output = self._output(name, shape, spec.attention.output_bias, self._turn(number, AFTER_ATTENTION), after)
        return DecoderLayer(
            place=place_of(spec, number),
            attention_norm=attention_norm,
            mixer=mixer,
            output=output,
            mlp_norm=self._mlp_norm(at, norms, mlp),
            mlp=mlp,
            parallel=spec.parallel,
            sinks=self._sinks(at + "self_attn.sinks") if sizes.sinks else None,
            gate=self._gate(at + "self_attn.", spec.attention.gate, attention_norm) if spec.attention.gate else None,
        )

    def _turn(self, number: int, place: int) -> int:
        """The buffer of a layer's sum after its mixer or its MLP, AFTER_ATTENTION or AFTER_MLP (see
        `hybrid_layers.turn`)."""
        return turn(self._spec.hybrid_layers, number, place) if self._spec.hybrid_layers else place

    def _attention(self, number: int, at: str) -> Attention:
        if self._spec.layers:
            return self._mixed(number, at)
        return self._grouped_query(number, at) if self._spec.latent is None else self._latent(number)

    def _mlp_norm(self, at: str, norms: NormsSpec, mlp: FeedForward) -> Norm | NoNorm:
        return NoNorm() if isinstance(mlp, NoMlp) else self._norm_before(at, norms.before_mlp, mlp.fp8_scaling)

    def _mlp_alone(self, number: int) -> DecoderLayer:
        spec = self._spec
        mlp = self._mlp(number, spec.norms)
        norm = self._mlp_norm(f"layers.{number}.", spec.norms, mlp)
        return DecoderLayer(place_of(spec, number), norm, NoMixer(), NoOutput(), NoNorm(), mlp)

    def _recurrent_layer(self, number: int, delta: DeltaSpec | ShortConvSpec | MambaSpec) -> DecoderLayer:
        net: RecurrentMixer
        spec, at, norms = self._spec, f"layers.{number}.", delta.norms or self._spec.norms
        if isinstance(delta, ShortConvSpec):
            net, name, inner, bias = self._gated_conv(at + "conv.", delta), "conv.out_proj", delta.channels, delta.bias
        elif isinstance(delta, MambaSpec):
            net, name, inner, bias = self._mamba(at + "mamba.", delta), "mamba.out_proj", delta.values, delta.out_bias
        else:
            net, inner, bias = self._delta_net(f"{at}{delta.name}.", delta), delta.values, False
            name = f"{delta.name}.{delta.out}"
        mlp, after = self._mlp(number, norms), self._norm_after(at, norms.after_attention)
        return DecoderLayer(
            place=place_of(spec, number),
            attention_norm=self._norm_before(at, norms.before_attention, net.fp8_scaling),
            mixer=net,
            output=self._output(at + name, (spec.hidden_size, inner), bias, self._turn(number, AFTER_ATTENTION), after),
            mlp_norm=self._mlp_norm(at, norms, mlp),
            mlp=mlp,
            parallel=spec.parallel,
        )

    def _grouped_query(self, number: int, at: str) -> Attention:
        spec, attention, stored = self._spec, self._spec.attention, self._spec.stored
        q, kv, hidden = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.hidden_size
        own_heads, own_kv = self._shard.part(0, q), self._shard.kv_rows(spec.num_kv_heads, spec.head_dim)
        normed = attention.qk_norm or attention.qk_norm_all_heads
        assert not (stored.interleaved and (stored.fused_qkv or normed)), "no family has both"
        norms, q_norm, k_norm = None, at + "q_norm", at + "k_norm"
        if attention.qk_norm_all_heads:
            norms = self._norm_weight(q_norm, q, own_heads), self._norm_weight(k_norm, kv, own_kv)
        elif attention.qk_norm:
            norms = self._norm_weight(q_norm, spec.head_dim), self._norm_weight(k_norm, spec.head_dim)
        query = Piece(at + "q_proj", (q, hidden), own_heads, rotated=True)
        if attention.gate is not None and attention.gate.in_q:
            query = self._half(query, 0)
        pieces = [
            query,
            Piece(at + "k_proj", (kv, hidden), own_kv, rotated=True),
            Piece(at + "v_proj", (kv, hidden), own_kv),
        ]
        if stored.fused_qkv or f"model.{at}qkv_proj.weight" in self._weights:
            pieces = self._fused(at + "qkv_proj", pieces)
        qkv = self._linear(pieces, attention.qkv_bias)
        heads = self._shard.spec(spec).num_heads
        kind, head_norms = attention.head_norms, None
        if kind is not None and not (kind.only_with_rope and spec.ropes[number] is None):
            head_norms = self._head_norms(at, kind)
        across = attention.qk_norm_all_heads
        return Grouped(qkv, heads, spec.head_dim, norms, spec.norm_eps, across, self._group, head_norms)

    def _latent(self, number: int) -> Latent:
        """Heads are divided among ranks; the projections to latents and the indexer are replicated."""
        spec, latent, hidden, at = self._spec, self._spec.latent, self._spec.hidden_size, f"layers.{number}.self_attn."
        assert latent is not None
        heads, width = spec.num_heads, latent.nope_dim + latent.rope_dim
        part = self._shard.part(0, heads * width)
        keys, indexer = Piece(at + "kv_a_proj_with_mqa", (latent.rank + latent.rope_dim, hidden)), None
        if latent.q_rank is None:
            first, q_up, q_norm = Piece(at + "q_proj", (heads * width, hidden), part, has_bias=False), None, None
        else:
            first = Piece(at + "q_a_proj", (latent.q_rank, hidden))
            q_up = self._linear([Piece(at + "q_b_proj", (heads * width, latent.q_rank), part)], False)
            fp8_scaling = q_up.fp8_scaling
            if latent.index is not None and number in latent.index.layers:
                indexer = self._indexer(at + "indexer.", latent.index, latent.q_rank, number)
                fp8_scaling = fp8_scaling if indexer.q.fp8_scaling is fp8_scaling else None  # each quantizes for itself
            q_norm = Norm(self._vector(at + "q_a_layernorm", latent.q_rank), NORM_EPS, fp8_scaling)
        both = latent.nope_dim + latent.value_dim
        rows = self._shard.part(0, heads * both)
        up = self._weights.load(f"model.{at}kv_b_proj.weight", (heads * both, latent.rank), rows).unflatten(
            0, (-1, both)
        )
        k_up, v_up = (x.contiguous() for x in up.split((latent.nope_dim, latent.value_dim), dim=1))
        return Latent(
            down=self._linear([first, keys], latent.bias),
            q_norm=q_norm,
            q_up=q_up,
            k_norm=self._vector(at + "kv_a_layernorm", latent.rank),
            ups=UpProjections(
                HeadLinear(k_up.transpose(1, 2), self._batch_invariant), HeadLinear(v_up, self._batch_invariant)
            ),
            num_heads=len(k_up),
            interleaved=latent.interleaved,
            indexer=indexer,
        )

    def _indexer(self, at: str, index: IndexSpec, q_rank: int, number: int) -> Indexer:
        hidden, name = self._spec.hidden_size, f"model.{at}weights_proj.weight"
        weights, stored = self._weights.load(name, (index.heads, hidden)), self._weights.get(name)
        if stored is not None and stored.dtype == torch.float32:
            weights = stored
        norm = [load_float32(self._weights, f"model.{at}k_norm.{x}", index.dim) for x in ("weight", "bias")]
        return Indexer(
            number=index.layers.index(number),
            q=self._linear([Piece(at + "wq_b", (index.heads * index.dim, q_rank))], False),
            k=self._linear([Piece(at + "wk", (index.dim, hidden))], False),
            weights=Linear(weights.float(), None, self._batch_invariant),
            norm=(norm[0], norm[1]),
            heads=index.heads,
            interleaved=index.interleaved,
        )

    def _shared(self, at: str, experts: ExpertsSpec) -> SharedMlp | UngatedShared | None:
        if not experts.shared_size:
            return None
        if not experts.gated:
            ungated = self._ungated_mlp(f"{at}{experts.shared}.", experts.shared_size)
            return UngatedShared(ungated.up, ungated.down.product)
        mlp, gate = self._gated_mlp(f"{at}{experts.shared}.", experts.shared_size), None
        if experts.shared_gate is not None:
            gate = Linear(self.matrix(at + experts.shared_gate, 1, self._spec.hidden_size), None, self._batch_invariant)
        return SharedMlp(mlp.gate_up, mlp.down.product, mlp.activation, gate)

    def _gate(self, at: str, gate: GateSpec, norm: Norm | NoNorm) -> Gate:
        rows = self._spec.num_heads * (1 if gate.per_head else self._spec.head_dim)
        piece = Piece(at + gate.name, (rows, self._spec.hidden_size), self._shard.part(0, rows))
        if gate.in_q:
            piece = self._half(piece, 1)
        product = self._linear([piece], False)
        if isinstance(norm, Norm):
            norm = dataclasses.replace(norm, fp8_scaling=product.fp8_scaling)
        return Gate(norm, product, gate.softplus)

    def _half(self, piece: Piece, half: int) -> Piece:
        """A projection whose heads are stored together with those of another one: the first or second half of each
        head's rows."""
        rows, columns = piece.shape
        own = piece.rows.count if piece.rows else rows
        order = torch.arange(2 * own).view(-1, 2, self._spec.head_dim)[:, half].flatten()
        shape = 2 * rows, columns
        return dataclasses.replace(piece, shape=shape, part=self._shard.part(0, shape[0]), order=order)

    def _sinks(self, name: str) -> torch.Tensor:
        heads = self._spec.num_heads
        return self._weights.load(f"model.{name}", (heads,), self._shard.part(0, heads)).float()

    def _mlp(self, number: int, norms: NormsSpec) -> FeedForward:
        spec, at = self._spec, f"layers.{number}.mlp."
        if spec.hybrid_layers and spec.hybrid_layers[number][1] is None:
            return NoMlp()
        after, turn = self._norm_after(f"layers.{number}.", norms.after_mlp), self._turn(number, AFTER_MLP)
        if spec.experts is not None and number in spec.experts.layers:
            experts = self._experts(number, spec.experts)
            factor = spec.factors.residual_factor * spec.experts.factor
            return Mixture(experts, self._group, turn, self._shared(at, spec.experts), after, factor)
        inner = spec.layer(number).intermediate_size
        return (self._gated_mlp if spec.gated else self._ungated_mlp)(at, inner, turn, after)

    def _experts(self, number: int, experts: ExpertsSpec) -> Experts:
        read = read_interleaved_experts if experts.interleaved_gate_up else read_experts
        return read(self._spec, self._weights, number, self._batch_invariant, self._shard)

    def layer_inputs(self) -> LayerInputs | None:
        """What reads the inputs that layers have beside the residual stream, if they have any."""
        return None

    def _ungated_mlp(self, at: str, inner: int, turn: int = AFTER_MLP, after: Norm | None = None) -> UngatedMlp:
        spec, hidden = self._spec, self._spec.hidden_size
        up = Piece(at + "up_proj", (inner, hidden), self._shard.part(0, inner))
        down = self._output(at + "down_proj", (hidden, inner), spec.mlp_bias, turn, after)
        activation: Callable[[torch.Tensor], torch.Tensor] | None = None
        if spec.activation == XIELU:
            activation = self._xielu(at + "act_fn.")
        elif spec.activation != SQUARED_RELU:
            activation = UNGATED[spec.activation]
        return UngatedMlp(self._linear([up], spec.mlp_bias), down, activation)

    def _xielu(self, at: str) -> Xielu:
        """`beta` and `eps` are constants, but some checkpoints store them."""
        alphas = [self._weights.load(f"model.{at}{name}", (1,)) for name in ("alpha_p", "alpha_n")]
        stored = [self._weights.get(f"model.{at}{name}") for name in ("beta", "eps")]
        fixed = [alphas[0].new_tensor(x) if s is None else s for x, s in zip(XIELU_FIXED, stored, strict=True)]
        return Xielu.learned(*alphas, *fixed)

    def _gated_mlp(self, at: str, inner: int, turn: int = AFTER_MLP, after: Norm | None = None) -> Mlp:
        spec, hidden = self._spec, self._spec.hidden_size
        part = self._shard.part(0, inner)
        gate_up = [Piece(at + name, (inner, hidden), part) for name in ("gate_proj", "up_proj")]
        if spec.stored.fused_gate_up:
            gate_up = self._fused(at + "gate_up_proj", gate_up)
        return Mlp(
            gate_up=self._linear(gate_up, spec.mlp_bias),
            down=self._output(at + "down_proj", (hidden, inner), spec.mlp_bias, turn, after),
            activation=spec.activation,
        )


def loader_of(spec: ModelSpec) -> type[WeightLoader]:
    """What reads the layers of a model (see `ModelSpec.loader`)."""
    kind = spec.loader or WeightLoader
    assert issubclass(kind, WeightLoader)
    return kind
