"""What distinguishes the norms of one decoder from those of another."""

from __future__ import annotations

from dataclasses import dataclass


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
    """LayerNorm (arXiv 1607.06450) in place of RMSNorm, but for norms of q and k."""
    bias: bool = False
    """These LayerNorms have biases."""
