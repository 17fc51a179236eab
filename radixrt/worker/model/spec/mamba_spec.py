"""The layers of a model that have Mamba-2's state-space mixer (see `mamba`) in place of attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """Sizes are numbers of elements. Names of tensors are relative to `model.layers.<i>.mamba.`."""

    layers: frozenset[int]
    """Layers with a mixer; the others have attention (see `parallel`)."""
    heads: int
    head_dim: int
    groups: int
    """Heads are divided into groups of equal size, which share B and C and a norm."""
    state: int
    """Elements of B and C of a group: the columns of a head's state."""
    kernel: int
    """Inputs that the short convolution of a channel sees."""
    conv_bias: bool
    """The short convolution has a bias."""
    bias: bool
    """The first projection has a bias."""
    out_bias: bool
    """The last one has."""
    limits: tuple[float, float] = (0.0, math.inf)
    """Time steps are clamped to these."""
    norm: str = "after_gate"
    """Where the norm is: `after_gate` or `before_gate`; `none`: there is only the gate."""
    parallel: bool = False
    """The mixers are beside attention, in all layers, with the same input, and not in its place."""
    norms: None = None
    """Those of other layers."""
    group_ranks: int = 1
    """In a part of a model: tensor-parallel ranks among which the heads of a group are divided, if a norm is over them.
    Each of these ranks has B and C of the group."""

    @property
    def values(self) -> int:
        """Elements of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Channels of the short convolution: x, B and C."""
        return self.values + 2 * self.groups * self.state

    @property
    def conv_sizes(self) -> tuple[int, int, int]:
        """Elements of all heads of x, and of all groups of B and of C."""
        return self.values, self.groups * self.state, self.groups * self.state

    @property
    def rule_shape(self) -> tuple[int, int, int]:
        """Shape of the state in a layer."""
        return self.heads, self.head_dim, self.state

    def elements(self, hidden: int) -> int:
        """Elements of the matrices of a layer for `hidden` states, its MLP not counted."""
        return hidden * (self.channels + 2 * self.values + self.heads) + self.channels * self.kernel

    def state_bytes(self, itemsize: int) -> int:
        """Bytes of a sequence's states in all layers, for a model's dtype of `itemsize` bytes."""
        conv = self.channels * (self.kernel - 1) * itemsize
        return len(self.layers) * (conv + 4 * math.prod(self.rule_shape))


DEFAULTS: dict[str, Any] = {"mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256}
DEFAULTS |= {"mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False}
"""Defaults of transformers for fields that config.json lacks, in the families that have these names."""
LINEAR, FULL = ("mamba", "linear_attention"), ("attention", "full_attention")
"""The names of both kinds of layers in `layer_types`."""


def read_mamba(config: dict[str, Any], layers: frozenset[int], inner: int | None = None) -> MambaSpec | None:
    """The mixer of these layers, by the names that Bamba's fields have; None if there are none: then these fields may
    say anything. `inner`: elements of all heads, if that is not `mamba_expand` times the hidden states."""
    if not layers:
        return None
    config = DEFAULTS | config
    heads, dim = config["mamba_n_heads"], config["mamba_d_head"]
    inner = int(config["mamba_expand"] * config["hidden_size"]) if inner is None else inner
    if inner % heads or dim not in ("auto", inner // heads):
        raise ValueError(f"mamba_n_heads {heads} of mamba_d_head {dim} are not the {inner} elements of all heads")
    return checked(
        MambaSpec(
            layers=layers,
            heads=heads,
            head_dim=inner // heads,
            groups=config["mamba_n_groups"],
            state=config["mamba_d_state"],
            kernel=config["mamba_d_conv"],
            conv_bias=bool(config["mamba_conv_bias"]),
            bias=bool(config["mamba_proj_bias"]),
            out_bias=bool(config["mamba_proj_bias"]),
            limits=time_step_limit(config),
        )
    )


def checked(found: MambaSpec) -> MambaSpec:
    """ValueError if groups have different sizes."""
    if found.heads % found.groups:
        raise ValueError(f"mamba_n_groups (n_groups) {found.groups} does not divide {found.heads} heads")
    return found


def linear_layers(kinds: list[str], config: Mapping[str, Any]) -> frozenset[int]:
    """The layers with a mixer, by `layer_types`. ValueError if other kinds than are served occur, if none is attention,
    or if there is not one for each layer."""
    if others := sorted(set(kinds) - {*LINEAR, *FULL}):
        raise ValueError(f"layer_types {', '.join(others)} are not served; mamba and attention are")
    if not set(kinds) & set(FULL):
        raise ValueError("layer_types: none is attention")
    if len(kinds) != config["num_hidden_layers"]:
        raise ValueError(f"layer_types has {len(kinds)} layers, num_hidden_layers is {config['num_hidden_layers']}")
    return frozenset(i for i, kind in enumerate(kinds) if kind in LINEAR)


def time_step_limit(config: Mapping[str, Any]) -> tuple[float, float]:
    """`time_step_limit`; by default there is none. transformers writes an infinity as {"__float__": "Infinity"}."""
    given = config.get("time_step_limit") or (0.0, math.inf)
    limits: list[Any] = [value.get("__float__") if isinstance(value, dict) else value for value in given]
    try:
        low, high = map(float, limits)
    except (TypeError, ValueError):
        raise ValueError(f"time_step_limit {given!r} is not served; two numbers are") from None
    if not 0 <= low <= high:
        raise ValueError(f"time_step_limit {given!r} is not served; two numbers from 0 on, in order, are")
    return low, high
