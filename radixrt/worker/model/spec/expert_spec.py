"""What distinguishes one mixture of experts from another."""

from __future__ import annotations

from dataclasses import dataclass


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
    jitter: float | None = None
    """Experts are selected one after the other, and weighted among those that are about as likely (see
    `moe.sparse_mixer`)."""
    scales_inputs: bool = False
    """The weights multiply the experts' inputs, not their outputs."""
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
    prefix: str = "mlp"
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
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
    parallel: bool = False
    """Layers with experts have an MLP, too (see `parallel_experts`)."""
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
