"""What distinguishes one decoder from another, read from a checkpoint's `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from radixrt.worker.model.delta_spec import DeltaSpec, ShortConvSpec
from radixrt.worker.model.mamba_spec import MambaSpec

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu"}
ACTIVATIONS |= dict.fromkeys(("gelu_pytorch_tanh", "gelu_new"), "gelu_pytorch_tanh")
"""`hidden_act` of config.json -> activation of `layers`. Some functions have several names; `gelu_new` is the tanh
approximation."""
CLAMPED_SWIGLU = 7.0, 1.702
"""(limit, alpha) of the activation `clamped_swiglu` (gpt-oss); see `layers`."""
SQUARED_RELU, XIELU = "relu2", "xielu"
"""Activations of MLPs without a gate."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's experts and their weights follow from its router logits. The default is the top-k of a softmax
    over all experts (DeepSeek-V2, arXiv 2405.04434, section 2.2; DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""

    sigmoid: bool = False
    """Scores are the sigmoid of the logits, not their softmax, and a group's score is the sum of its two best experts'
    scores, not the best one."""
    biased: bool = False
    """With softmax: a learned bias is added to the scores to select experts, but not to their weights. With `sigmoid`
    this is the default (see `unbiased`)."""
    unbiased: bool = False
    """With `sigmoid`: there is no such bias."""
    groups: int = 1
    """Number of groups of consecutive experts, of equal size."""
    kept_groups: int = 1
    """A token's experts are selected from its best `kept_groups` groups."""
    factor: float = 1.0
    """Multiplies the weights, after normalization."""
    float32_logits: bool = False
    """The router is computed in float32."""
    float32_weight: bool = False
    """The router's weight stays float32 if it is stored as float32."""
    min_weight_sum: float = 0.0
    """Lower bound of the sum that the weights are divided by (see `ExpertsSpec.normalized`)."""

    @property
    def has_bias(self) -> bool:
        """Whether there is a bias for the selection of experts."""
        return self.biased or (self.sigmoid and not self.unbiased)

    @property
    def grouped(self) -> bool:
        """Whether the selection is limited to some groups."""
        return self.kept_groups < self.groups


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The mixture of experts that replaces the MLP in some layers. Names of tensors are relative to
    `model.layers.<i>.<prefix>.`, unless stated otherwise."""

    count: int
    """Routed experts of a layer."""
    top_k: int
    """Routed experts of a token."""
    intermediate_size: int
    normalized: bool
    """The weights of a token's experts are divided by their sum."""
    layers: frozenset[int]
    """Layers with experts; the others have an MLP."""
    prefix: str
    names: tuple[str, ...]
    """Names of an expert's gate, up and down projections: `experts.<e>.<name>.weight`. Two: there is no gate."""
    router: str = "gate"
    """Name of the router: `<router>.weight`."""
    bias: tuple[str, ...] = ("gate.e_score_correction_bias",)
    """Names that the bias for the selection may have (`Routing.has_bias`)."""
    routing: Routing = Routing()
    shared_size: int = 0
    """Intermediate size of the shared experts together, which every token uses in addition; 0: there are none."""
    shared: str = "shared_experts"
    """Name of the shared experts, in `model.layers.<i>.mlp.`."""
    factor: float = 1.0
    """Multiplies the sum of routed and shared experts."""
    shared_gate: str | None = None
    """Name in `model.layers.<i>.mlp.` of a projection [1, hidden], whose sigmoid scales the shared experts' output."""
    interleaved_gate_up: bool = False
    """Experts are stored as gpt-oss stores them (see `interleaved_experts`)."""
    maybe_transposed: bool = False
    """If all experts of a layer are stored as one tensor, its matrices may be [in, out] instead of [out, in]."""
    fused_names: tuple[tuple[str, str, str], ...] = ()
    """Names, in `model.layers.<i>.`, of the router and of two tensors with `gate_up` and `down` of all experts of a
    layer, as some checkpoints have them; the names of transformers 5 are always tried (`moe.FUSED_AT`)."""
    latent_size: int = 0
    """Routed experts are computed in a space of this size, between two projections; 0: of that of hidden states."""
    latent: tuple[str, ...] = ()
    """Names of these projections, in `model.layers.<i>.mlp.`."""
    bias_is_row: bool = False
    """The bias for the selection is stored as [1, count], not [count]."""

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """Shape of the stored bias for the selection."""
        return (1, self.count) if self.bias_is_row else (self.count,)

    @property
    def gated(self) -> bool:
        """Whether experts have a gate."""
        return len(self.names) != 2

    def elements(self, hidden: int) -> int:
        """Elements of the matrices that a token is multiplied by in a layer, for `hidden` states."""
        each, space = 3 if self.gated else 2, self.latent_size or hidden
        routed = each * space * self.top_k * self.intermediate_size
        return routed + each * hidden * self.shared_size + 2 * hidden * self.latent_size


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


@dataclass(frozen=True, slots=True)
class NormsSpec:
    """Which norms a layer has, by the names of their tensors (None: there is none), and how they are computed."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    """Norm of the attention output, before it is added to the residual stream."""
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    """Norm of the MLP output, before it is added to the residual stream."""
    float32_weight: bool = False
    """The weight, also of q and k norms, is multiplied in float32, before the result is rounded to the model's dtype;
    otherwise after that."""
    offset: float = 0.0
    """Added to the weight; needs `float32_weight`."""
    centered: bool = False
    """LayerNorm without a bias (arXiv 1607.06450) in place of RMSNorm; norms of q and k stay RMSNorm."""


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
    qkv_bias: bool = False
    fused_qkv: bool = False
    """The checkpoint stores the q, k and v projections as one matrix, `qkv_proj`."""
    fused_gate_up: bool = False
    """The checkpoint stores the gate and up projections as one matrix, `gate_up_proj`."""
    output_bias: bool = False
    """The output projection of attention (`o_proj`) has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of each head of q and k, before RoPE."""
    qk_norm_all_heads: bool = False
    """Instead of `qk_norm`: one RMSNorm over all heads of q together, and one over all heads of k."""
    qk_norm_after_rope: bool = False
    """With `qk_norm`: the norm comes after RoPE."""
    qk_norm_names: tuple[str, str] = ("q_norm", "k_norm")
    """Names of the norms of q and k, in `self_attn.`."""
    rotary_dim: int | None = None
    """Elements of a head that RoPE rotates: the first ones. None: all."""
    interleaved: bool = False
    """In the checkpoint's order, RoPE rotates elements 2i and 2i + 1 of a head together (GPT-J style), not i and
    i + rope_dim / 2."""
    query_scaling: tuple[float, int] | None = None
    """(beta, tokens): the query at position p is multiplied by 1 + beta ln(1 + floor(p / tokens)), as in Llama 4. Not
    with norms of q and k."""
    experts: ExpertsSpec | None = None
    norms: NormsSpec = NormsSpec()
    layer_ropes: tuple[dict[str, Any] | None, ...] = ()
    """By layer, if layers differ: its `rope`, or None: no RoPE. Its key `rotated` is the `rotary_dim` of the layer."""
    scale_override: float | None = None
    """Softmax scale; None: head_dim^-0.5."""
    embedding_factor: float = 1.0
    """Multiplies the embeddings, rounded to their dtype."""
    residual_factor: float = 1.0
    """Multiplies what attention and MLP add to the residual stream."""
    logits_factor: float = 1.0
    latent: LatentSpec | None = None
    """Latent attention: there is one KV head, whose `head_dim` is that of the latent and the shared rotated key
    together. Its V is the latent, the first elements of K."""
    parallel: bool = False
    """Attention and MLP have the same input, the residual stream before both (arXiv 2204.02311, section 2)."""
    sinks: bool = False
    """Attention sinks: each query head has a learned logit that takes part in its softmax, without a value (arXiv
    2309.17453)."""
    gate: GateSpec | None = None
    """Gate on the attention output."""
    delta: DeltaSpec | ShortConvSpec | MambaSpec | None = None
    """Some layers have linear attention, short convolutions or Mamba-2 mixers: a recurrent state instead of K and V in
    pages."""
    blocks: tuple[tuple[int | None, int | None], ...] = ()
    """By layer, if the checkpoint counts mixers and MLPs as layers of their own: the numbers that its mixer and its MLP
    have there; None: it has none (see `blocks`)."""
    multipliers: tuple[tuple[str, tuple[tuple[int, float], ...]], ...] = ()
    """Factors of weights (see `multipliers`)."""
    layer_heads: tuple[int, ...] = ()
    """By layer: query heads, if some layers have fewer than `num_heads` (see `padded_heads`)."""
    other_names: tuple[tuple[str, str], ...] = ()
    """(part of a tensor's name, its replacement in some checkpoints); see `checkpoint.Renamed`."""

    @property
    def kv_elements(self) -> int:
        """Elements of K and V that are stored for one token, all layers."""
        each = 1 if self.latent else 2
        return each * len(self.attention_layers) * self.num_kv_heads * self.head_dim

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention. Others have no K and V, and pools and `Attend` count only these."""
        beside = isinstance(self.delta, MambaSpec) and self.delta.beside
        others = self.delta.layers if self.delta and not beside else frozenset()
        without = {i for i, (mixer, _) in enumerate(self.blocks) if mixer is None}
        return tuple(i for i in range(self.num_layers) if i not in others and i not in without)

    @property
    def ends_with_attention(self) -> bool:
        """Whether the last layer has attention, and not linear attention."""
        return self.attention_layers[-1] == self.num_layers - 1

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        """`windows` of the layers with attention."""
        return tuple(self.windows[i] for i in self.attention_layers)

    @property
    def layer_elements(self) -> int:
        """Elements of the weights that a token is multiplied by in a layer, averaged over layers."""
        hidden, heads, latent = self.hidden_size, self.num_heads, self.latent
        if self.layer_heads:
            heads = sum(self.layer_heads) // self.num_layers
        if latent is None:
            attention = 2 * hidden * self.head_dim * (heads + self.num_kv_heads)
        else:
            of_q, q_rank = heads * (latent.nope_dim + latent.rope_dim), latent.q_rank
            attention = of_q * (q_rank or hidden) + hidden * ((q_rank or 0) + latent.rank + latent.rope_dim)
            attention += heads * (latent.rank * (latent.nope_dim + latent.value_dim) + latent.value_dim * hidden)
        if self.gate is not None:
            attention += hidden * heads * (1 if self.gate.per_head else self.head_dim)
        if self.delta is not None:
            attention *= len(self.attention_layers)
            attention += self.delta.elements(hidden) * len(self.delta.layers)
            attention //= self.num_layers
        dense = (3 if self.gated else 2) * hidden * self.intermediate_size
        without = sum(mlp is None for _, mlp in self.blocks) / self.num_layers
        if self.experts is None:
            return attention + int((1 - without) * dense)
        share = len(self.experts.layers) / self.num_layers
        return attention + int(share * self.experts.elements(hidden) + (1 - share - without) * dense)

    @property
    def gated(self) -> bool:
        """Whether MLPs have a gate."""
        return self.activation not in (SQUARED_RELU, XIELU)

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
        return self.head_dim**-0.5 if self.scale_override is None else self.scale_override

    @property
    def ropes(self) -> tuple[dict[str, Any] | None, ...]:
        """RoPE parameters by layer; None: no RoPE."""
        return self.layer_ropes or (self.rope,) * self.num_layers


def common(config: dict[str, Any], partial_rotary: bool = False, **features: Any) -> ModelSpec:
    """A spec from the fields of config.json whose names most families share, and from `features`, other fields of
    ModelSpec. With `partial_rotary`, config.json may have a `partial_rotary_factor`. ValueError names a bad field,
    KeyError a missing one."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    activation = config.get("hidden_act", "silu")
    longest = context(config)
    windows = features.pop("windows", None) or (None,) * config["num_hidden_layers"]
    rope = rope_parameters(config)
    if partial_rotary:
        features["rotary_dim"] = partial_rotary_dim(config, rope, head_dim)
    spec = ModelSpec(
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        max_model_len=longest,
        norm_eps=config.get("rms_norm_eps", 1e-6),
        rope=rope,
        activation=ACTIVATIONS.get(activation, ""),
        tied=bool(config.get("tie_word_embeddings", False)),
        windows=tuple(None if window is None or window >= longest else window for window in windows),
        **features,
    )
    if not spec.activation:
        raise ValueError(f"hidden_act {activation!r} is not served; {', '.join(ACTIVATIONS)} are")
    if spec.num_heads % spec.num_kv_heads:
        raise ValueError(f"num_key_value_heads {spec.num_kv_heads} does not divide {spec.num_heads} heads")
    return spec


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a multimodal model's language model: `text_config`, or in older files, which have none, the whole
    config.json. Embeddings are tied if either of the two says so."""
    text = dict(config.get("text_config") or config)
    if config.get("tie_word_embeddings"):
        text["tie_word_embeddings"] = True
    return text


def partial_rotary_dim(config: Mapping[str, Any], rope: dict[str, Any], head_dim: int) -> int | None:
    """Elements of a head that RoPE rotates, by `partial_rotary_factor` in `rope` or `config`; None: all. Removes the
    factor from `rope`, whose frequencies are then those of a head of the returned size."""
    factor = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    rotary_dim = int(head_dim * factor)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise ValueError(f"partial_rotary_factor {factor}: {rotary_dim} of {head_dim} elements cannot be rotated")
    return rotary_dim if rotary_dim < head_dim else None


def with_experts(spec: ModelSpec, experts: ExpertsSpec) -> ModelSpec:
    """The same model with experts. ValueError if experts cannot be selected that way."""
    if not 1 <= experts.top_k <= experts.count:
        raise ValueError(f"num_experts_per_tok {experts.top_k} of {experts.count} experts")
    routing = experts.routing
    if routing.groups < 1 or experts.count % routing.groups:
        raise ValueError(f"n_group {routing.groups} does not divide {experts.count} experts")
    if not 1 <= routing.kept_groups <= routing.groups:
        raise ValueError(f"topk_group {routing.kept_groups} of n_group {routing.groups}")
    size = experts.count // routing.groups
    if experts.top_k > routing.kept_groups * size or (routing.sigmoid and routing.grouped and size < 2):
        raise ValueError(f"topk_group {routing.kept_groups}: groups of {size} are too small")
    return dataclasses.replace(spec, experts=experts)


def moe_layers(config: Mapping[str, Any], dense: int) -> frozenset[int]:
    """Layers with experts, by `mlp_layer_types`; without it, all but the first `dense` layers."""
    layers = range(config["num_hidden_layers"])
    kinds = config.get("mlp_layer_types") or [("dense", "sparse")[i >= dense] for i in layers]
    return frozenset(i for i in layers if kinds[i] == "sparse")


def check_served(config: Mapping[str, Any], served: Mapping[str, Any]) -> None:
    """ValueError if config.json has one of the fields `served` with another value."""
    for name, value in served.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name} {config[name]!r} is not served; {value!r} is")


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE parameters: `rope_scaling` (transformers 4, or added by users), or else `rope_parameters` (transformers 5).
    `rope_type`, `rope_theta`, `max_position_embeddings` and `original_max_position_embeddings` are added to it; files
    have them in various places. ValueError if the parameters differ by layer type (see `ropes_by_kind`)."""
    given = config.get("rope_parameters") or {}
    parameters = dict(config.get("rope_scaling") or given)
    if any(isinstance(value, dict) for value in parameters.values()):
        raise ValueError("rope_parameters that differ by layer are not served")
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    parameters.setdefault("rope_theta", given.get("rope_theta", config.get("rope_theta", 10_000.0)))
    longest = parameters.setdefault("max_position_embeddings", config["max_position_embeddings"])
    original = config.get("original_max_position_embeddings")
    original = original or parameters.get("original_max_position_embeddings") or longest
    parameters["original_max_position_embeddings"] = original
    return parameters


def ropes_by_kind(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By layer type (`layer_types`): the config as if all layers were of that type, for `rope_parameters` and `common`.

    `rope_parameters` may have an entry for each type. In older files `rope_scaling` is for full attention only, and
    `rope_local_base_freq` is the `rope_theta` of sliding windows. `original_max_position_embeddings` counts only
    within these parameters, not beside them."""
    by_kind = config.get("rope_parameters") or {}
    config = config | {"original_max_position_embeddings": None}
    local = {"rope_scaling": None, "rope_theta": config.get("rope_local_base_freq", config["rope_theta"])}
    return {
        "full_attention": config | {"rope_parameters": by_kind.get("full_attention")},
        "sliding_attention": config | local | {"rope_parameters": by_kind.get("sliding_attention")},
    }


def context(config: Mapping[str, Any]) -> int:
    """The longest context in tokens: `max_position_embeddings`, which linear scaling extends by its factor. With YaRN,
    files have the extended length or the original one there: then the latter times the factor counts."""
    rope, longest = rope_parameters(config), config["max_position_embeddings"]
    factor = rope.get("factor") or 1.0
    match rope["rope_type"]:
        case "yarn":
            return max(longest, int(factor * rope["original_max_position_embeddings"]))
        case "linear":
            return int(factor * longest)
    return longest


def layer_kinds(config: Mapping[str, Any], every: int) -> list[str]:
    """`layer_types`; without it, every `every`-th layer has full attention, the others a sliding window."""
    layers = range(config["num_hidden_layers"])
    return config.get("layer_types") or [("sliding", "full")[(i + 1) % every == 0] + "_attention" for i in layers]


def layer_windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    """By layer: the sliding window or None, by `layer_types`; without it, layers from `max_window_layers` on have one
    (Qwen)."""
    layers = config["num_hidden_layers"]
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = config["max_window_layers"]
    return tuple(window if layer >= first else None for layer in range(layers))
