"""The layers of a model that have a recurrent state in place of K and V: linear attention by the gated delta rule (see
`delta`), or short convolutions."""

from __future__ import annotations

from dataclasses import dataclass

from radixrt.worker.model.spec.norms_spec import NormsSpec


@dataclass(frozen=True, slots=True)
class DeltaSpec:
    """Sizes are numbers of elements. Names of tensors are relative to `model.layers.<i>.`."""

    layers: frozenset[int]
    """Layers with linear attention; the others have attention."""
    key_heads: int
    """Heads of q and k."""
    value_heads: int
    """Heads of v: a multiple of `key_heads`."""
    key_dim: int
    """Elements of a head of q and k."""
    value_dim: int
    """Elements of a head of v."""
    kernel: int
    """Inputs that the short convolution of a channel sees."""
    fused: bool = False
    """The projections are stored as two matrices, `in_proj_qkvz` and `in_proj_ba`, whose rows are grouped by head of k
    (Qwen3-Next), and not as `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`."""
    name: str = "linear_attn"
    """Name of the linear attention, which comes before those that follow."""
    qkv: tuple[str, ...] = ("in_proj_qkv",)
    """Names of the projections to q, k and v."""
    z: str = "in_proj_z"
    b: str = "in_proj_b"
    a: str = "in_proj_a"
    norm: str = "norm"
    out: str = "out_proj"
    norm_eps: float | None = None
    """Of the gated norm, if it differs from other norms'."""
    beta_factor: float = 1.0
    """Multiplies the sigmoid that is beta."""
    rank: int = 0
    """Kimi Delta Attention (arXiv 2510.26692): each element of a key has a decay of its own, z and what decays are made
    of are projected in two steps, by way of so many elements, and the gate is the sigmoid of z. 0: none of this."""
    norms: NormsSpec | None = None
    """Norms of these layers, if they differ from those of layers with attention."""

    @property
    def keys(self) -> int:
        """Elements of all heads of q, or of k."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of all heads of v."""
        return self.value_heads * self.value_dim

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """Elements of all heads of q, of k and of v."""
        return self.keys, self.keys, self.values

    @property
    def channels(self) -> int:
        """Channels of the short convolution: q, k and v."""
        return 2 * self.keys + self.values

    @property
    def rule_shape(self) -> tuple[int, int, int]:
        """Shape of the state of the delta rule in a layer."""
        return self.value_heads, self.key_dim, self.value_dim

    def elements(self, hidden: int) -> int:
        """Elements of the matrices of a layer for `hidden` states, its MLP not counted."""
        gates = hidden * (self.values + 2 * self.value_heads)
        if self.rank:
            gates = hidden * (2 * self.rank + self.value_heads) + self.rank * (self.keys + self.values)
        return hidden * (self.channels + self.values) + gates + self.channels * self.kernel

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of a sequence's states in all layers, for a model's dtype of `itemsize` bytes."""
        conv = self.channels * (self.kernel - 1) * itemsize
        return len(self.layers) * (conv + 4 * self.value_heads * self.key_dim * self.value_dim)


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """Layers with gated short convolutions (LFM2): of the products of two projections, times a third one."""

    layers: frozenset[int]
    channels: int
    """The hidden size."""
    kernel: int
    bias: bool
    """The projections and the convolution have biases."""
    norms: None = None
    rule_shape: tuple[int, int, int] = (0, 0, 0)

    def elements(self, hidden: int) -> int:
        """As `DeltaSpec.elements`."""
        return 4 * hidden * self.channels + self.channels * self.kernel

    def state_bytes(self, itemsize: int) -> int:
        """As `DeltaSpec.state_bytes`."""
        return len(self.layers) * self.channels * (self.kernel - 1) * itemsize
