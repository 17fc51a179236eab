"""What distinguishes one decoder from another."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from radixrt.worker.model.spec.delta_spec import DeltaSpec, ShortConvSpec
from radixrt.worker.model.spec.expert_spec import ExpertsSpec
from radixrt.worker.model.spec.index_spec import IndexSpec
from radixrt.worker.model.spec.mamba_spec import MambaSpec
from radixrt.worker.model.spec.norms_spec import NormsSpec

CLAMPED_SWIGLU = 7.0, 1.702
"""(limit, alpha) of the activation `clamped_swiglu` (gpt-oss); see `layers`."""
SQUARED_RELU, XIELU = "relu2", "xielu"
"""Activations of MLPs without a gate."""


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (see `latent`)."""

    q_rank: int | None
    """Size of the latent that queries are projected from (`q_lora_rank`); None: they are projected from the hidden
    states."""
    rank: int
    """Size of the latent that keys and values are projected from (`kv_lora_rank`)."""
    nope_dim: int
    """Elements of a head's query and key that are not rotated (`qk_nope_head_dim`)."""
    rope_dim: int
    """Elements that are rotated (`qk_rope_head_dim`); all heads share those of the key."""
    value_dim: int
    """Elements of a head's value (`v_head_dim`)."""
    scale: float
    """Softmax scale."""
    interleaved: bool
    """RoPE rotates elements 2i and 2i + 1 together, not i and i + rope_dim / 2."""
    bias: bool
    """The projections to latents have biases."""
    index: IndexSpec | None = None
    """DeepSeek Sparse Attention: queries attend to the tokens that an indexer selects."""


@dataclass(frozen=True, slots=True)
class HeadNormsSpec:
    """Norms of each head of q and k that are not those of `AttentionSpec.qk_norm` (see `norms.HeadNorms`)."""

    names: tuple[str, ...]
    """Of q and of k, in `self_attn.`; none: without weights."""
    centered: bool = True
    """LayerNorm, not RMSNorm."""
    per_head: bool = False
    """Each head has a weight of its own: [heads, D]."""
    after_rope: bool = False
    only_with_rope: bool = False
    """Only layers with RoPE have these norms."""


@dataclass(frozen=True, slots=True)
class QueryScaling:
    """The query at position p is multiplied by 1 + beta ln(1 + floor((p + ahead) / tokens)) (arXiv 2501.19399)."""

    beta: float
    tokens: int
    ahead: int = 0
    only_without_rope: bool = False
    """Only in layers without RoPE."""


@dataclass(frozen=True, slots=True)
class GateSpec:
    """A gate on the attention output, computed from the input of attention (see `layers.Gate`)."""

    name: str
    """Name of the projection, in `self_attn.`."""
    in_q: bool = False
    """It is part of the projection of that name to q: its rows follow those of the query, head by head."""
    per_head: bool = False
    """One gate per head instead of one per element."""
    softplus: bool = False
    """Softplus instead of sigmoid."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Sizes of a layer."""

    kv_heads: int
    head_dim: int
    """Elements of a head of q and k."""
    value_dim: int
    """Elements of a head of v."""
    intermediate_size: int
    source: int | None = None
    """The layer whose K and V its attention reads; it has none of its own."""
    tied_values: bool = False
    """There is no projection to v, which is that to k, before norm and RoPE."""
    sinks: bool = False
    value_norm: bool = False
    """RMSNorm of each head of v, without a weight."""
    value_factor: float = 1.0
    """Multiplies v, after that norm."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Attention, where it is not that of Llama."""

    qkv_bias: bool = False
    output_bias: bool = False
    """The output projection of attention (`o_proj`) has a bias."""
    qk_norm: bool = False
    """RMSNorm of each head of q and k, before RoPE."""
    qk_norm_all_heads: bool = False
    """Instead of `qk_norm`: one RMSNorm over all heads of q together, and one over all heads of k."""
    head_norms: HeadNormsSpec | None = None
    """Norms of q and k of another kind."""
    query_scaling: QueryScaling | None = None
    """Not with `qk_norm`, which would undo it."""
    scale_override: float | None = None
    """Softmax scale; None: head_dim^-0.5."""
    score_cap: float | None = None
    """Attention scores x become cap tanh(x / cap), before the softmax (soft-capping)."""
    sinks: bool = False
    """Attention sinks: each query head has a learned logit that takes part in its softmax, without a value (arXiv
    2309.17453)."""
    chunked: bool = False
    """Windows do not slide: a token attends to itself and the tokens before it in its chunk of `window` tokens."""
    gate: GateSpec | None = None
    """Gate on the attention output."""


@dataclass(frozen=True, slots=True)
class FactorsSpec:
    """Factors between the layers, and after the last one."""

    embedding_factor: float = 1.0
    """Multiplies the embeddings, rounded to their dtype."""
    residual_factor: float = 1.0
    """Multiplies what attention and MLP add to the residual stream."""
    logits_factor: float = 1.0
    logits_cap: float | None = None
    """The same for logits, after `logits_factor`."""


@dataclass(frozen=True, slots=True)
class StoredSpec:
    """How a checkpoint stores tensors."""

    other_names: tuple[tuple[str, str], ...] = ()
    """(part of a tensor's name, its replacement in some checkpoints); see `weights.Renamed`."""
    fused_qkv: bool = False
    """The checkpoint stores the q, k and v projections as one matrix, `qkv_proj`."""
    fused_gate_up: bool = False
    """The checkpoint stores the gate and up projections as one matrix, `gate_up_proj`."""
    interleaved: bool = False
    """In the checkpoint's order, RoPE rotates elements 2i and 2i + 1 of a head together (GPT-J style), not i and
    i + rope_dim / 2."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer. The defaults are those of Llama: grouped-query attention, RoPE, gated MLPs. Sizes are
    numbers of elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    norm_eps: float
    rope: dict[str, Any]
    """`rope_type`, `rope_theta` and the parameters of that type (see `rope.frequencies`)."""
    activation: str
    tied: bool
    """The output projection (`lm_head`) is the embedding."""
    windows: tuple[int | None, ...]
    """By layer: the sliding window (a token attends to itself and the `window - 1` tokens before it), or None: full
    attention. A window of at least `max_model_len` is None."""
    mlp_bias: bool = False
    ungated: bool = False
    """MLPs have no gate, whatever the activation."""
    rotary_dim: int | None = None
    """Elements of a head that RoPE rotates: the first ones. None: all."""
    attention: AttentionSpec = AttentionSpec()
    norms: NormsSpec = NormsSpec()
    factors: FactorsSpec = FactorsSpec()
    stored: StoredSpec = StoredSpec()
    experts: ExpertsSpec | None = None
    layer_ropes: tuple[dict[str, Any] | None, ...] = ()
    """By layer, if layers differ: its `rope`, or None: no RoPE. Its key `rotated` is the `rotary_dim` of the layer."""
    latent: LatentSpec | None = None
    """Latent attention: there is one KV head, whose `head_dim` is that of the latent and the shared rotated key
    together. Its V is the latent, the first elements of K."""
    parallel: bool = False
    """Attention and MLP have the same input, the residual stream before both (arXiv 2204.02311, section 2)."""
    recurrent: DeltaSpec | ShortConvSpec | MambaSpec | None = None
    """Some layers have linear attention, short convolutions or Mamba-2 mixers: a recurrent state instead of K and V in
    pages."""
    hybrid_layers: tuple[tuple[int | None, int | None], ...] = ()
    """By layer, if the checkpoint counts mixers and MLPs as layers of their own: the numbers that its mixer and its MLP
    have there; None: it has none (see `layers.hybrid_layers`)."""
    layers: tuple[LayerSpec, ...] = ()
    """By layer, if layers differ in these sizes; they then count instead of those above (see `mixed_heads`)."""
    layer_inputs: int = 0
    """Size of the inputs that each layer has beside the residual stream (see `layer_inputs`); 0: there are none."""
    loader: type | None = None
    """What reads the layers of a family with more of its own than these fields can say: a subclass of `WeightLoader` in
    the family's file."""
    loader_args: object = None
    """What that loader has to know beside this."""
    predicts: bool = False
    """The checkpoint's multi-token prediction layer is used (see `predictor`). It counts as one more layer with
    attention, after all others."""

    def shortened(self, longest: int) -> ModelSpec:
        """The same model for contexts of up to `longest` tokens. ValueError names its own limit if that is shorter."""
        if longest > (most := self.max_model_len):
            raise ValueError(f"--max-model-len {longest}: the model takes at most {most} tokens, by its config.json")
        return dataclasses.replace(self, max_model_len=longest)

    @property
    def kv_elements(self) -> int:
        """Elements of K and V that are stored for one token, all layers."""
        if self.layers:
            own = [self.layers[i] for i in self.attention_layers if self.layers[i].source is None]
            return sum(one.kv_heads * (one.head_dim + one.value_dim) for one in own)
        each = 1 if self.latent else 2
        return each * len(self.attention_layers) * self.num_kv_heads * self.head_dim

    @property
    def index(self) -> IndexSpec | None:
        """See `LatentSpec.index`."""
        return None if self.latent is None else self.latent.index

    @property
    def index_elements(self) -> int:
        """Elements of index keys that are stored for one token, all layers."""
        return len(self.index.layers) * self.index.dim if self.index else 0

    def token_bytes(self, kv_itemsize: int, itemsize: int) -> int:
        """Bytes that a token takes in pages, all layers: elements of K and V have `kv_itemsize` bytes, index keys are
        in the model's dtype of `itemsize` bytes. Layers with a sliding window keep all their tokens."""
        return self.kv_elements * kv_itemsize + self.index_elements * itemsize

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention, at the end that of `predicts`. Others have no K and V, and pools and `Attend`
        count only these."""
        beside = isinstance(self.recurrent, MambaSpec) and self.recurrent.parallel
        others = self.recurrent.layers if self.recurrent and not beside else frozenset()
        without = {i for i, (mixer, _) in enumerate(self.hybrid_layers) if mixer is None}
        layers = range(self.num_layers + self.predicts)
        return tuple(i for i in layers if i not in others and i not in without)

    @property
    def kv_sources(self) -> tuple[int, ...]:
        """By place among the layers with attention: the place of the layer whose K and V it reads, mostly its own."""
        numbers = self.attention_layers
        if not self.layers:
            return tuple(range(len(numbers)))
        return tuple(numbers.index(i if (source := self.layers[i].source) is None else source) for i in numbers)

    def layer(self, number: int) -> LayerSpec:
        """The sizes of a layer."""
        if self.layers:
            return self.layers[number]
        sinks = self.attention.sinks
        return LayerSpec(self.num_kv_heads, self.head_dim, self.head_dim, self.intermediate_size, sinks=sinks)

    @property
    def ends_with_attention(self) -> bool:
        """Whether the last layer has attention, and not linear attention."""
        return self.num_layers - 1 in self.attention_layers

    @property
    def writers(self) -> int:
        """How many layers there are up to the last one that stores something of each token: later ones only read K and
        V of others, so that they need not be computed for tokens whose logits nobody wants."""
        return 1 + max((i for i, own in enumerate(self.layers) if own.source is None), default=self.num_layers - 1)

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        """`windows` of the layers with attention."""
        return tuple(self.windows[i] if i < self.num_layers else None for i in self.attention_layers)

    @property
    def layer_elements(self) -> int:
        """Elements of the weights that a token is multiplied by in a layer, averaged over layers."""
        hidden, heads, latent, gate = self.hidden_size, self.num_heads, self.latent, self.attention.gate
        if self.layers:
            attention = sum(hidden * self._attention_rows(one) for one in self.layers) // self.num_layers
        elif latent is None:
            attention = 2 * hidden * self.head_dim * (heads + self.num_kv_heads)
        else:
            of_q, q_rank = heads * (latent.nope_dim + latent.rope_dim), latent.q_rank
            attention = of_q * (q_rank or hidden) + hidden * ((q_rank or 0) + latent.rank + latent.rope_dim)
            attention += heads * (latent.rank * (latent.nope_dim + latent.value_dim) + latent.value_dim * hidden)
            if (index := latent.index) is not None:
                each = index.heads * (index.dim * (q_rank or 0) + hidden) + index.dim * hidden
                attention += each * len(index.layers) // self.num_layers
        if gate is not None:
            attention += hidden * heads * (1 if gate.per_head else self.head_dim)
        if self.recurrent is not None:
            attention *= len(self.attention_layers) - self.predicts
            attention += self.recurrent.elements(hidden) * len(self.recurrent.layers)
            attention //= self.num_layers
        inner = sum(self.layer(i).intermediate_size for i in range(self.num_layers)) / self.num_layers
        dense = (3 if self.gated else 2) * hidden * inner
        attention += 2 * hidden * self.layer_inputs
        without = sum(mlp is None for _, mlp in self.hybrid_layers) / self.num_layers
        if self.experts is None:
            return attention + int((1 - without) * dense)
        share = len(self.experts.layers) / self.num_layers
        without += 0 if self.experts.parallel else share
        return attention + int(share * self.experts.elements(hidden) + (1 - without) * dense)

    def _attention_rows(self, own: LayerSpec) -> int:
        """Rows of the projections to q, k, v, and columns of that back, of a layer."""
        keys, values = own.kv_heads * own.head_dim, 0 if own.tied_values else own.kv_heads * own.value_dim
        return self.num_heads * (own.head_dim + own.value_dim) + (keys + values if own.source is None else 0)

    @property
    def gated(self) -> bool:
        """Whether MLPs have a gate."""
        return not self.ungated and self.activation not in (SQUARED_RELU, XIELU)

    @property
    def value_dim(self) -> int:
        """Elements of a head of V, and of attention's result for a query head."""
        return self.latent.rank if self.latent else self.head_dim

    @property
    def rope_dim(self) -> int:
        """Elements of a head that RoPE rotates."""
        return self.latent.rope_dim if self.latent else self.rotary_dim or self.head_dim

    @property
    def scale(self) -> float:
        """Softmax scale."""
        if self.latent:
            return self.latent.scale
        override = self.attention.scale_override
        return self.head_dim**-0.5 if override is None else override

    @property
    def ropes(self) -> tuple[dict[str, Any] | None, ...]:
        """RoPE parameters by layer; None: no RoPE."""
        return self.layer_ropes or (self.rope,) * self.num_layers


PARTS = {"attention": AttentionSpec, "factors": FactorsSpec, "stored": StoredSpec}
PART_OF = {one.name: part for part, kind in PARTS.items() for one in dataclasses.fields(kind)}
"""The name of a field of a part -> that of the part."""


def with_features(spec: ModelSpec, **features: Any) -> ModelSpec:
    """A copy with other values of fields, those of its parts among them, which have names of their own."""
    changes = {name: value for name, value in features.items() if name not in PART_OF}
    for part in PARTS:
        if own := {name: value for name, value in features.items() if PART_OF.get(name) == part}:
            changes[part] = dataclasses.replace(getattr(spec, part), **own)
    return dataclasses.replace(spec, **changes)
