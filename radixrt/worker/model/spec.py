"""What distinguishes one decoder from another, read from a checkpoint's `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu"}
ACTIVATIONS |= dict.fromkeys(("gelu_pytorch_tanh", "gelu_new"), "gelu_pytorch_tanh")
"""By `hidden_act`: one function has several names."""
CLAMPED_SWIGLU = 7.0, 1.702
"""Of the activation `clamped_swiglu`: what gate and up are clamped to, and what the sigmoid's argument is times."""
SQUARED_RELU, XIELU = "relu2", "xielu"
"""Activations of MLPs without a gate."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How the experts of a token are chosen by its logits, and weighed, where that is not by the softmax of all alone
    (DeepSeek-V2, arXiv 2405.04434, section 2.2; DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""

    sigmoid: bool = False
    """In place of softmax. A group's score is the sum of its two best; else it is its best."""
    biased: bool = False
    """To choose, a bias is added to each expert's score. With `sigmoid` it is, unless that is `unbiased`."""
    unbiased: bool = False
    groups: int = 1
    """Of as many experts each, one after the other."""
    kept_groups: int = 1
    """The best ones, whose experts alone may be chosen."""
    factor: float = 1.0
    """Of the weights, at last."""
    wide: bool = False
    """Logits are float32."""
    wide_weight: bool = False
    """So is what makes them, where it is stored so."""
    least: float = 0.0
    """Of the sum that weights are divided by, where they are."""

    @property
    def has_bias(self) -> bool:
        """Whether scores to choose by have one."""
        return self.biased or (self.sigmoid and not self.unbiased)

    @property
    def grouped(self) -> bool:
        """Whether a group may be left out."""
        return self.kept_groups < self.groups


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The mixture of experts that takes the MLP's place in some layers."""

    count: int
    chosen: int
    """Experts a token."""
    intermediate_size: int
    normalized: bool
    """The weights of a token's experts sum to 1."""
    layers: frozenset[int]
    prefix: str
    """Of the names of a layer's tensors: `model.layers.0.<prefix>.gate`, `...experts.0.<name>`."""
    names: tuple[str, ...]
    """Of an expert's gate, up and down projections."""
    router: str = "gate"
    """Behind the prefix."""
    bias: tuple[str, ...] = ("gate.e_score_correction_bias",)
    """Behind the prefix: the names that what is added to scores may have (`Routing.has_bias`)."""
    routing: Routing = Routing()
    shared_size: int = 0
    """Inner features of what every token takes beside the experts it chooses."""
    shared: str = "shared_experts"
    """Its name, behind `mlp`."""
    factor: float = 1.0
    """Of what all of them and what is shared make together."""
    shared_gate: str | None = None
    """The name, there, of a vector: what is shared is times the sigmoid of its product with the token."""
    alternating: bool = False
    """All experts of a layer are in one tensor, rows of gate and up by turns, with biases (see `alternating`)."""
    inputs_first: bool = False
    """Where all experts of a layer are in one tensor, its matrices may be [in, out]."""
    together: tuple[tuple[str, str, str], ...] = ()
    """Names, behind `model.layers.0`, of a router, and of the gates and ups and the downs of all experts, where each of
    these is one tensor, beside those that transformers has for every family."""
    bias_of_row: bool = False
    """The bias of scores is stored as a row [1, count]."""

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """As it is stored."""
        return (1, self.count) if self.bias_of_row else (self.count,)


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (see `latent`)."""

    q_rank: int | None
    """Queries come of a latent of this size; None: of the hidden state."""
    rank: int
    """Of the latent that keys and values come of."""
    nope_dim: int
    """Of a head's query and key: what is not rotated."""
    rope_dim: int
    """What is; of the key it is the same for all heads."""
    value_dim: int
    """Of a head's values."""
    scale: float
    """Of the softmax."""
    interleaved: bool
    """Elements 2i and 2i + 1 are turned together, not i and i + rope_dim / 2."""
    bias: bool
    """Of the products that make latents."""


@dataclass(frozen=True, slots=True)
class NormsSpec:
    """Which norms a layer has, by the names of their tensors (None: there is none), and how they are computed."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    """Of what attention adds to the residual stream."""
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    wide: bool = False
    """Weights, also those of q and k, are multiplied in float32 with what was not rounded before."""
    offset: float = 0.0
    """That is added to wide weights."""
    centered: bool = False
    """The mean is subtracted first: LayerNorm (arXiv 1607.06450) in place of RMSNorm, but for heads."""


@dataclass(frozen=True, slots=True)
class GateSpec:
    """What attention gives is gated, by a product of what it took (see `layers.Gate`)."""

    name: str
    """Of the matrix."""
    by_head: bool = False
    """All elements of a head have the same gate; else each has its own."""
    softplus: bool = False
    """In place of the sigmoid."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder with grouped-query attention, rotary positions and, as a rule, a gated MLP. Sizes count elements."""

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
    """`rope_type`, `rope_theta` and what that type needs (see `rope.py`)."""
    activation: str
    tied: bool
    """The output projection is the embedding."""
    windows: tuple[int | None, ...]
    """By layer: a token attends to itself and the `window - 1` tokens before it; None: to all before it. (A window that
    a whole context fits in is none.)"""
    qkv_bias: bool = False
    fused_qkv: bool = False
    """The checkpoint has q, k and v as one matrix."""
    fused_gate_up: bool = False
    """It has gate and up as one."""
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm of each head of q and k, before the rotation."""
    qk_norm_whole: bool = False
    """In its place one of all heads of q together, and one of those of k."""
    qk_norm_last: bool = False
    """The norm of each head comes after the rotation."""
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    """Their names."""
    rotated: int | None = None
    """Elements of a head that are rotated, its first ones, where that is not all of them."""
    interleaved: bool = False
    """Elements 2i and 2i + 1 are turned together in the checkpoint, not i and i + rope_dim / 2."""
    query_growth: tuple[float, int] | None = None
    """(beta, tokens): queries at position p are times 1 + beta ln(1 + floor(p / tokens)) (Llama 4's way of looking
    far back). Not for heads that are normalized."""
    experts: ExpertsSpec | None = None
    norms: NormsSpec = NormsSpec()
    layer_ropes: tuple[dict[str, Any] | None, ...] = ()
    """By layer, where not all have `rope`; None: nothing is rotated. With `rotated` one has elements of its own that
    are."""
    stated_scale: float | None = None
    """Of the softmax, where it is another than head_dim^-0.5."""
    embedding_factor: float = 1.0
    """Of embeddings, in their dtype."""
    residual_factor: float = 1.0
    """Of what attention and MLP add to the residual stream."""
    logits_factor: float = 1.0
    latent: LatentSpec | None = None
    """With it there is one KV head, whose `head_dim` is that of the latent and the rotated key together; its V is the
    latent, the first elements of K."""
    parallel: bool = False
    """The MLP takes what attention takes, not what it gives (arXiv 2204.02311, section 2)."""
    sinks: bool = False
    """Each query head has a learned score that takes part in its softmax, and no value (arXiv 2309.17453)."""
    gate: GateSpec | None = None
    """Of what attention gives."""
    layer_heads: tuple[int, ...] = ()
    """By layer: query heads, where some have fewer than `num_heads` (see `filling`)."""
    other_names: tuple[tuple[str, str], ...] = ()
    """Parts of tensors' names, and what some checkpoints have in their place."""

    @property
    def kv_elements(self) -> int:
        """Elements of K and V of one token, all layers."""
        each = 1 if self.latent else 2
        return each * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def layer_elements(self) -> int:
        """Of the weights that a token is multiplied with in a layer, on average."""
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
            attention += hidden * heads * (1 if self.gate.by_head else self.head_dim)
        dense = (3 if self.gated else 2) * hidden * self.intermediate_size
        if self.experts is None:
            return attention + dense
        sparse = 3 * hidden * (self.experts.chosen * self.experts.intermediate_size + self.experts.shared_size)
        share = len(self.experts.layers) / self.num_layers
        return attention + int(share * sparse + (1 - share) * dense)

    @property
    def gated(self) -> bool:
        """Whether MLPs are."""
        return self.activation not in (SQUARED_RELU, XIELU)

    @property
    def value_dim(self) -> int:
        """Of what attention gives for a head."""
        return self.latent.rank if self.latent else self.head_dim

    @property
    def rope_dim(self) -> int:
        """Elements of a head that are rotated."""
        return self.latent.rope_dim if self.latent else self.rotated or self.head_dim

    @property
    def scale(self) -> float:
        """Of the softmax."""
        if self.latent:
            return self.latent.scale
        return self.head_dim**-0.5 if self.stated_scale is None else self.stated_scale

    @property
    def ropes(self) -> tuple[dict[str, Any] | None, ...]:
        """By layer."""
        return self.layer_ropes or (self.rope,) * self.num_layers


def common(config: dict[str, Any], partial_rotary: bool = False, **features: Any) -> ModelSpec:
    """The fields that all families name alike; `features` are the family's own. With `partial_rotary` a file may say
    that a part of each head is not rotated. ValueError names a bad field, KeyError one that is missing."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    head_dim = config.get("head_dim") or hidden // heads
    activation = config.get("hidden_act", "silu")
    longest = context(config)
    windows = features.pop("windows", None) or (None,) * config["num_hidden_layers"]
    rope = rope_parameters(config)
    if partial_rotary:
        features["rotated"] = rotated_part(config, rope, head_dim)
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


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Of the file of a model that also sees: `text_config`, or all of it where it is older than that. Embeddings are
    tied if either says so."""
    text = dict(config.get("text_config") or config)
    if config.get("tie_word_embeddings"):
        text["tie_word_embeddings"] = True
    return text


def rotated_part(config: Mapping[str, Any], rope: dict[str, Any], head_dim: int) -> int | None:
    """By `partial_rotary_factor`, in the file or in its `rope`, from which it is taken: what is left is that of a head
    of the size that is returned. None for all of the head."""
    factor = rope.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1.0
    rotated = int(head_dim * factor)
    if not 0 < rotated <= head_dim or rotated % 2:
        raise ValueError(f"partial_rotary_factor {factor}: {rotated} of {head_dim} elements cannot be rotated")
    return rotated if rotated < head_dim else None


def with_experts(spec: ModelSpec, experts: ExpertsSpec) -> ModelSpec:
    """The same model with experts. ValueError for a choice that cannot be."""
    if not 1 <= experts.chosen <= experts.count:
        raise ValueError(f"num_experts_per_tok {experts.chosen} of {experts.count} experts")
    routing = experts.routing
    if routing.groups < 1 or experts.count % routing.groups:
        raise ValueError(f"n_group {routing.groups} does not divide {experts.count} experts")
    if not 1 <= routing.kept_groups <= routing.groups:
        raise ValueError(f"topk_group {routing.kept_groups} of n_group {routing.groups}")
    size = experts.count // routing.groups
    if experts.chosen > routing.kept_groups * size or (routing.sigmoid and routing.grouped and size < 2):
        raise ValueError(f"topk_group {routing.kept_groups}: groups of {size} are too small")
    return dataclasses.replace(spec, experts=experts)


def sparse_by_kind(config: Mapping[str, Any], dense: int) -> frozenset[int]:
    """The layers with experts, by `mlp_layer_types`; where a file has none, all but the first `dense` ones."""
    layers = range(config["num_hidden_layers"])
    kinds = config.get("mlp_layer_types") or [("dense", "sparse")[i >= dense] for i in layers]
    return frozenset(i for i in layers if kinds[i] == "sparse")


def check_served(config: Mapping[str, Any], served: Mapping[str, Any]) -> None:
    """ValueError where a file says anything else of these fields."""
    for name, value in served.items():
        if config.get(name, value) != value:
            raise ValueError(f"{name} {config[name]!r} is not served; {value!r} is")


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_scaling` (transformers 4, and what users add to a file of 5), or else `rope_parameters`: with `rope_type`,
    `rope_theta`, `max_position_embeddings` and `original_max_position_embeddings`, which stand in several places."""
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
    """A file as if its layers were all of a kind (`layer_types`), by kind: `rope_parameters` may have some for each;
    `rope_scaling` is of full attention alone, `rope_local_base_freq` is the base of layers with windows. What positions
    were made for at first is said there, not beside them."""
    by_kind = config.get("rope_parameters") or {}
    config = config | {"original_max_position_embeddings": None}
    local = {"rope_scaling": None, "rope_theta": config.get("rope_local_base_freq", config["rope_theta"])}
    return {
        "full_attention": config | {"rope_parameters": by_kind.get("full_attention")},
        "sliding_attention": config | local | {"rope_parameters": by_kind.get("sliding_attention")},
    }


def context(config: Mapping[str, Any]) -> int:
    """Tokens that positions are made for: `max_position_embeddings`, which the scalings yarn and linear stretch by
    their factor, where the file does not say the stretched length already."""
    rope, longest = rope_parameters(config), config["max_position_embeddings"]
    factor = rope.get("factor") or 1.0
    match rope["rope_type"]:
        case "yarn":
            return max(longest, int(factor * rope["original_max_position_embeddings"]))
        case "linear":
            return int(factor * longest)
    return longest


def layer_kinds(config: Mapping[str, Any], every: int) -> list[str]:
    """`layer_types`, or, where a file has none: every so many layers attend to all, the others have windows."""
    layers = range(config["num_hidden_layers"])
    return config.get("layer_types") or [("sliding", "full")[(i + 1) % every == 0] + "_attention" for i in layers]


def layer_windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    """By layer, from `layer_types`, or as Qwen's older files say it: the layers from `max_window_layers` on."""
    layers = config["num_hidden_layers"]
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = config["max_window_layers"]
    return tuple(window if layer >= first else None for layer in range(layers))
