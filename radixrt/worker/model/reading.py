"""A decoder's layers from a checkpoint, by the names that transformers gives its tensors."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from radixrt.worker.model.alternating import apart, read_alternating
from radixrt.worker.model.checkpoint import Renamed, Weights
from radixrt.worker.model.filling import Filled
from radixrt.worker.model.latent import NORM_EPS, Latent, Ups
from radixrt.worker.model.layers import Gate, Grouped, Layer, NoNorm, Norm, Ops, Output, Product, Projections
from radixrt.worker.model.linear import HeadLinear, Linear, stack
from radixrt.worker.model.mlp import Mixture, Mlp, Plain, Shared, Xielu, squared_relu
from radixrt.worker.model.moe import read_experts
from radixrt.worker.model.parallel import AFTER_ATTENTION, AFTER_MLP, Group
from radixrt.worker.model.scaled import FP8, Rounding, Scaled, ScaledLinear, stack_scaled
from radixrt.worker.model.sharding import Part, Shard
from radixrt.worker.model.spec import XIELU, ExpertsSpec, GateSpec, ModelSpec

HEAD = "lm_head.weight"
XIELU_FIXED = 0.5, -1e-6
"""`beta` and `eps`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A projection [out, in] of a checkpoint, and which part of it is read."""

    name: str
    shape: tuple[int, int]
    part: Part | None = None
    biased: bool = True
    """Where others that it is stacked with are, too."""
    rotated: bool = False
    """It makes q or k."""

    @property
    def rows(self) -> Part | None:
        """Of its bias."""
        return self.part if self.part and self.part.dim == 0 else None


class Reader:
    """Takes a decoder's tensors, by the names transformers gives them, from a checkpoint: a rank's parts of them."""

    def __init__(self, spec: ModelSpec, weights: Weights, batch_invariant: bool, ops: Ops, group: Group | None) -> None:
        self._spec = spec
        self._weights = Filled(weights, spec) if spec.layer_heads else Renamed(weights, spec.other_names)
        self._batch_invariant = batch_invariant
        self._ops = ops
        self._group = group
        self._shard = group.shard if group else Shard()

    def matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        return self._weights.load(f"model.{name}.weight", (rows, columns))

    def _vector(self, name: str, size: int, part: Part | None = None) -> torch.Tensor:
        return self._weights.load(f"model.{name}.weight", (size,), part)

    def head(self, embedding: torch.Tensor) -> torch.Tensor:
        """The output projection, of this rank's token ids, with rows of zeros where it has fewer than others."""
        ids = self._shard.token_ids(len(embedding))
        head = self._own_head(embedding, ids)
        missing = len(Shard(0, self._shard.size).token_ids(len(embedding))) - len(ids)
        return F.pad(head, (0, 0, 0, missing)) if missing else head

    def _own_head(self, embedding: torch.Tensor, ids: range) -> torch.Tensor:
        """A tied one may be stored again, and counts if it differs: the flag is often stale."""
        tied = embedding[ids.start : ids.stop]
        if self._spec.tied and HEAD not in self._weights:
            return tied
        part = None if self._group is None else Part(0, ids.start, ids.stop)
        head = self._weights.load(HEAD, embedding.shape, part)
        return tied if self._spec.tied and torch.equal(head, tied) else head

    def _product(self, pieces: list[Piece], bias: bool) -> Product:
        """Several projections of one input as one, their rows in that order."""
        whole = self._biases(pieces) if bias else None
        if weight := self._scaled(pieces):
            return ScaledLinear(weight, whole, self._weights.dtype, self._ops)
        weight = stack([self._weight(p) for p in pieces])
        return Linear(weight, whole, self._batch_invariant, self._ops)

    def _together(self, name: str, pieces: list[Piece]) -> list[Piece]:
        """Projections whose rows a checkpoint has one after the other, as `name`: of each this rank's part."""
        shape = sum(p.shape[0] for p in pieces), pieces[0].shape[1]
        if self._shard.size == 1:
            return [Piece(name, shape)]
        found, start = [], 0
        for p in pieces:
            assert p.rows is not None
            found.append(Piece(name, shape, Part(0, start + p.rows.start, start + p.rows.stop)))
            start += p.shape[0]
        return found

    def _biases(self, pieces: list[Piece]) -> torch.Tensor:
        """Zeros of those that have none."""
        found = [self._bias(p) if p.biased else None for p in pieces]
        like = next(bias for bias in found if bias is not None)
        sizes = [p.rows.count if p.rows else p.shape[0] for p in pieces]
        return torch.cat([like.new_zeros(n) if bias is None else bias for bias, n in zip(found, sizes, strict=True)])

    def _weight(self, piece: Piece) -> torch.Tensor:
        return self._in_order(piece, self._weights.load(f"model.{piece.name}.weight", piece.shape, piece.part))

    def _bias(self, piece: Piece) -> torch.Tensor:
        return self._in_order(piece, self._weights.load(f"model.{piece.name}.bias", piece.shape[:1], piece.rows))

    def _in_order(self, piece: Piece, rows: torch.Tensor) -> torch.Tensor:
        """Rows of heads so that their elements i and i + half are turned together, where a checkpoint has 2i and
        2i + 1: both of q and k, whose products stay the same."""
        spec = self._spec
        if not (piece.rotated and spec.interleaved):
            return rows
        numbers = torch.arange(len(rows), device=rows.device).unflatten(0, (-1, spec.head_dim))
        turned, others = numbers[:, : spec.rope_dim], numbers[:, spec.rope_dim :]
        return rows[torch.cat((apart(turned, 1), others), dim=1).flatten()]

    def _scaled(self, pieces: list[Piece]) -> Scaled | None:
        """Matrices as one in FP8; None where they are not kept so."""
        found = []
        for p in pieces:
            if (weight := self._weights.scaled(f"model.{p.name}.weight", p.shape, p.part)) is None:
                return None
            if p.rotated and self._spec.interleaved:
                if weight.rounding is not Rounding.ROWS:  # blocks would come apart
                    return None
                values = self._in_order(p, weight.values.view(torch.uint8)).view(FP8)  # torch indexes no FP8
                weight = Scaled.by_rows(values, self._in_order(p, weight.scales))
            found.append(weight)
        return stack_scaled(found)

    def _output(self, name: str, shape: tuple[int, int], bias: bool, turn: int, after: Norm | None = None) -> Output:
        product = self._product([Piece(name, shape, self._shard.part(1, shape[1]))], bias)
        if self._shard.rank:  # one of the ranks adds the bias
            product = dataclasses.replace(product, bias=None)
        return Output(product, self._group, turn, after, self._spec.residual_factor)

    def norm(self, name: str, rounding: Rounding | None = None) -> Norm:
        weight = self._norm_weight(name, self._spec.hidden_size)
        return Norm(weight, self._spec.norm_eps, rounding, self._spec.norms.centered)

    def _norm_weight(self, name: str, size: int, part: Part | None = None) -> torch.Tensor:
        weight, norms = self._vector(name, size, part), self._spec.norms
        return weight.float() + norms.offset if norms.wide else weight

    def _before(self, at: str, name: str | None, rounding: Rounding | None) -> Norm | NoNorm:
        return NoNorm() if name is None else self.norm(at + name, rounding)

    def _after(self, at: str, name: str | None) -> Norm | None:
        return None if name is None else self.norm(at + name)

    def layer(self, number: int) -> Layer:
        spec, at = self._spec, f"layers.{number}."
        heads = self._grouped(at + "self_attn.") if spec.latent is None else self._latent(at + "self_attn.")
        inner = spec.num_heads * (spec.latent.value_dim if spec.latent else spec.head_dim)
        mlp, norms = self._mlp(number), spec.norms
        shape, after = (spec.hidden_size, inner), self._after(at, norms.after_attention)
        attention_norm = self._before(at, norms.before_attention, heads.rounding)
        return Layer(
            attention_norm=attention_norm,
            heads=heads,
            output=self._output(at + "self_attn.o_proj", shape, spec.output_bias, AFTER_ATTENTION, after),
            mlp_norm=self._before(at, norms.before_mlp, mlp.rounding),
            mlp=mlp,
            sinks=self._sinks(at + "self_attn.sinks") if spec.sinks else None,
            gate=self._gate(at + "self_attn.", spec.gate, attention_norm) if spec.gate else None,
        )

    def _grouped(self, at: str) -> Projections:
        spec = self._spec
        q, kv, hidden = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.hidden_size
        own_heads, own_kv = self._shard.part(0, q), self._shard.kv_rows(spec)
        assert not (spec.interleaved and (spec.fused_qkv or spec.qk_norm or spec.qk_norm_whole)), "no family has both"
        norms, (q_norm, k_norm) = None, spec.qk_norms
        if spec.qk_norm_whole:
            norms = self._norm_weight(at + q_norm, q, own_heads), self._norm_weight(at + k_norm, kv, own_kv)
        elif spec.qk_norm:
            norms = self._norm_weight(at + q_norm, spec.head_dim), self._norm_weight(at + k_norm, spec.head_dim)
        pieces = [
            Piece(at + "q_proj", (q, hidden), own_heads, rotated=True),
            Piece(at + "k_proj", (kv, hidden), own_kv, rotated=True),
            Piece(at + "v_proj", (kv, hidden), own_kv),
        ]
        if spec.fused_qkv or f"model.{at}qkv_proj.weight" in self._weights:
            pieces = self._together(at + "qkv_proj", pieces)
        qkv = self._product(pieces, spec.qkv_bias)
        own = self._shard.spec(spec).num_heads
        whole, last = spec.qk_norm_whole, spec.qk_norm_last
        return Grouped(qkv, own, spec.head_dim, norms, spec.norm_eps, whole, self._group, last)

    def _latent(self, at: str) -> Projections:
        """The heads are divided among ranks; latents and what makes them are the same on all."""
        spec, latent, hidden = self._spec, self._spec.latent, self._spec.hidden_size
        assert latent is not None
        heads, width = spec.num_heads, latent.nope_dim + latent.rope_dim
        own = self._shard.part(0, heads * width)
        keys = Piece(at + "kv_a_proj_with_mqa", (latent.rank + latent.rope_dim, hidden))
        if latent.q_rank is None:
            first, q_up, q_norm = Piece(at + "q_proj", (heads * width, hidden), own, biased=False), None, None
        else:
            first = Piece(at + "q_a_proj", (latent.q_rank, hidden))
            q_up = self._product([Piece(at + "q_b_proj", (heads * width, latent.q_rank), own)], False)
            q_norm = Norm(self._vector(at + "q_a_layernorm", latent.q_rank), NORM_EPS, q_up.rounding)
        both = latent.nope_dim + latent.value_dim
        rows = self._shard.part(0, heads * both)
        up = self._weights.load(f"model.{at}kv_b_proj.weight", (heads * both, latent.rank), rows).unflatten(
            0, (-1, both)
        )
        k_up, v_up = (x.contiguous() for x in up.split((latent.nope_dim, latent.value_dim), dim=1))
        return Latent(
            down=self._product([first, keys], latent.bias),
            q_norm=q_norm,
            q_up=q_up,
            k_norm=self._vector(at + "kv_a_layernorm", latent.rank),
            ups=Ups(HeadLinear(k_up.transpose(1, 2), self._batch_invariant), HeadLinear(v_up, self._batch_invariant)),
            num_heads=len(k_up),
            interleaved=latent.interleaved,
        )

    def _shared(self, at: str, experts: ExpertsSpec) -> Shared | None:
        if not experts.shared_size:
            return None
        mlp, gate = self._gated(f"{at}{experts.shared}.", experts.shared_size), None
        if experts.shared_gate is not None:
            gate = Linear(self.matrix(at + experts.shared_gate, 1, self._spec.hidden_size), None, self._batch_invariant)
        return Shared(mlp.gate_up, mlp.down.product, mlp.activation, gate)

    def _gate(self, at: str, gate: GateSpec, norm: Norm | NoNorm) -> Gate:
        rows = self._spec.num_heads * (1 if gate.by_head else self._spec.head_dim)
        piece = Piece(at + gate.name, (rows, self._spec.hidden_size), self._shard.part(0, rows))
        product = self._product([piece], False)
        if isinstance(norm, Norm):
            norm = dataclasses.replace(norm, rounding=product.rounding)
        return Gate(norm, product, gate.softplus)

    def _sinks(self, name: str) -> torch.Tensor:
        heads = self._spec.num_heads
        return self._weights.load(f"model.{name}", (heads,), self._shard.part(0, heads)).float()

    def _mlp(self, number: int) -> Mlp | Plain | Mixture:
        spec, at = self._spec, f"layers.{number}.mlp."
        after = self._after(f"layers.{number}.", spec.norms.after_mlp)
        if spec.experts is not None and number in spec.experts.layers:
            read = read_alternating if spec.experts.alternating else read_experts
            experts = read(spec, self._weights, number, self._batch_invariant, self._shard)
            factor = spec.residual_factor * spec.experts.factor
            return Mixture(experts, self._group, self._shared(at, spec.experts), after, factor)
        return (self._gated if spec.gated else self._plain)(at, spec.intermediate_size, after)

    def _plain(self, at: str, inner: int, after: Norm | None = None) -> Plain:
        spec, hidden = self._spec, self._spec.hidden_size
        up = Piece(at + "up_proj", (inner, hidden), self._shard.part(0, inner))
        down = self._output(at + "down_proj", (hidden, inner), spec.mlp_bias, AFTER_MLP, after)
        activation = self._xielu(at + "act_fn.") if spec.activation == XIELU else squared_relu
        return Plain(self._product([up], spec.mlp_bias), down, activation)

    def _xielu(self, at: str) -> Xielu:
        """What is not learned may be stored, too."""
        alphas = [self._weights.load(f"model.{at}{name}", (1,)) for name in ("alpha_p", "alpha_n")]
        stored = [self._weights.get(f"model.{at}{name}") for name in ("beta", "eps")]
        fixed = [alphas[0].new_tensor(x) if s is None else s for x, s in zip(XIELU_FIXED, stored, strict=True)]
        return Xielu.learned(*alphas, *fixed)

    def _gated(self, at: str, inner: int, after: Norm | None = None) -> Mlp:
        spec, hidden = self._spec, self._spec.hidden_size
        own = self._shard.part(0, inner)
        gate_up = [Piece(at + name, (inner, hidden), own) for name in ("gate_proj", "up_proj")]
        if spec.fused_gate_up:
            gate_up = self._together(at + "gate_up_proj", gate_up)
        return Mlp(
            gate_up=self._product(gate_up, spec.mlp_bias),
            down=self._output(at + "down_proj", (hidden, inner), spec.mlp_bias, AFTER_MLP, after),
            activation=spec.activation,
        )
