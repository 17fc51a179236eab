"""Rotary position embeddings (RoPE): the frequencies of each `rope_type`, and the rotation."""

from __future__ import annotations

import math
from typing import Any

import torch

from radixrt.worker.model.layers import _cpu_kernels
from radixrt.worker.model.layers.cpu import ALIGNMENT, for_kernels

TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "proportional", "yarn")


def frequencies(rope: dict[str, Any] | None, head_dim: int, context: int) -> tuple[torch.Tensor, float]:
    """(angles per position, float32[head_dim / 2] in radians; the factor of cos and sin), for contexts of up to
    `context` tokens.

    `head_dim` is the number of elements that are rotated, unless `rope` has the key `rotated`. If `rope` is None, all
    angles are 0. ValueError for a `rope_type` that is not served, or if one of its parameters is missing or gives no
    angles. `dynamic` is treated as `default`, which is the same up to the model's `max_position_embeddings`; longer
    contexts are not served with it, since the keys in the cache would change with the length of the sequence.
    """
    if rope is None:
        return torch.zeros(head_dim // 2), 1.0
    try:
        angles, factor = _frequencies(rope, rope.get("rotated", head_dim), context)
    except KeyError as missing:
        raise ValueError(f"rope_scaling of rope_type {rope['rope_type']!r} has no {missing.args[0]}") from None
    except ArithmeticError as error:
        raise ValueError(f"rope_scaling of rope_type {rope['rope_type']!r} cannot be computed: {error}") from None
    if not (torch.isfinite(angles) & (angles >= 0)).all() or not math.isfinite(factor):
        raise ValueError(f"rope_scaling of rope_type {rope['rope_type']!r} gives angles that are negative or infinite")
    return angles, factor


def _frequencies(rope: dict[str, Any], head_dim: int, context: int) -> tuple[torch.Tensor, float]:
    if rope["rope_type"] == "proportional":
        return _proportional(rope, head_dim), 1.0
    rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if rotary_dim != head_dim:
        raise ValueError("partial_rotary_factor other than 1 is not served for this model_type")
    base = 1.0 / rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    match rope["rope_type"]:
        case "default" | "dynamic":
            return base, 1.0
        case "linear":
            return base / rope["factor"], 1.0
        case "llama3":
            return _llama3(base, rope), 1.0
        case "longrope":
            return _longrope(base, rope, context)
        case "yarn":
            return _yarn(base, rope, head_dim)
    raise ValueError(f"rope_type {rope['rope_type']!r} is not served; {', '.join(TYPES)} are")


def _proportional(rope: dict[str, Any], head_dim: int) -> torch.Tensor:
    """Gemma 4: of the pairs of a head, the first `partial_rotary_factor` are rotated, as if all were; the others are
    not."""
    rotated = int(rope.get("partial_rotary_factor", 1.0) * head_dim // 2)
    base = 1.0 / rope["rope_theta"] ** (torch.arange(0, 2 * rotated, 2).float() / head_dim)
    return torch.cat((base, torch.zeros(head_dim // 2 - rotated))) / rope.get("factor", 1.0)


def _llama3(base: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1: long wavelengths are multiplied by `factor`, short ones are kept, those between interpolated.

    Source: meta-llama/llama-models, `apply_scaling`.
    """
    factor, context = rope["factor"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    waves = 2 * math.pi / base
    share = ((context / waves - low) / (high - low)).clamp(0, 1)
    return base * (share + (1 - share) / factor)


def _longrope(base: torch.Tensor, rope: dict[str, Any], context: int) -> tuple[torch.Tensor, float]:
    """LongRoPE (arXiv 2402.13753, section 3.3): each frequency is divided by a factor of its own. There are two lists
    of factors, for contexts up to the original length and for longer ones, and a factor of cos and sin (Phi-3,
    transformers).

    The list is chosen by the longest context that is served, not by the length of each sequence, since the keys in the
    cache would change when a sequence grows."""
    original = rope["original_max_position_embeddings"]
    name = "long_factor" if context > original else "short_factor"
    factors = torch.tensor(rope[name], dtype=torch.float32)
    if factors.shape != base.shape:
        raise ValueError(f"rope_scaling: {name} has {len(factors)} numbers, not {len(base)}")
    stretched = rope.get("factor") or rope["max_position_embeddings"] / original
    sharp = math.sqrt(1 + math.log(stretched) / math.log(original)) if stretched > 1 else 1.0
    stated = rope.get("long_mscale" if name == "long_factor" else "short_mscale")  # Phi-3.5-MoE
    return base / factors, stated or rope.get("attention_factor") or sharp


def _yarn(base: torch.Tensor, rope: dict[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071, sections 3.2 and 3.4): as Llama 3.1, but interpolated by dimension, with a factor of cos
    and sin."""
    context = rope["original_max_position_embeddings"]
    factor = rope["factor"] or rope["max_position_embeddings"] / context

    def dimension(turns: float) -> float:
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)
    share = 1 - ramp.clamp(0, 1)
    return base * (share + (1 - share) / factor), _yarn_attention(rope, factor)


def _yarn_attention(rope: dict[str, Any], factor: float) -> float:
    """YaRN's factor of cos and sin."""
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return yarn_mscale(factor, rope["mscale"]) / yarn_mscale(factor, rope["mscale_all_dim"])
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """YaRN's factor of queries and keys for contexts `factor` times as long as the original (section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first R elements of x[T, heads, D] by cos and sin [T, 1, R / 2]; element i is paired with i + R / 2.

    If `interleaved`, 2i is paired with 2i + 1. The result is then deinterleaved, which does not matter to attention:
    dot products of queries and keys in the same order are the same."""
    if (rotary_dim := 2 * cos.shape[-1]) == x.shape[-1] and not interleaved and _for_kernel(x, cos, sin):
        x, cos, sin = x if x.stride()[1:] == (rotary_dim, 1) else x.contiguous(), cos.contiguous(), sin.contiguous()
        out, (tokens, heads, _) = torch.empty(x.shape), x.shape
        at = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr()
        _cpu_kernels.rotate(*at, tokens, x.stride(0), heads, rotary_dim // 2, 1)
        return out
    if rotary_dim < x.shape[-1]:
        return torch.cat((rotate(x[..., :rotary_dim], cos, sin, interleaved), x[..., rotary_dim:]), dim=-1)
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _for_kernel(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    half = cos.shape[-1]
    whole = half % ALIGNMENT == 0 and cos.shape == sin.shape == (x.shape[0], 1, half)
    return whole and x.dim() == 3 and for_kernels(x, cos, sin)
