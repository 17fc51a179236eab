"""Rotary positions: the frequencies of each kind of scaling, and the rotation."""

from __future__ import annotations

import math
from typing import Any

import torch

TYPES = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")


def frequencies(rope: dict[str, Any] | None, head_dim: int, context: int) -> tuple[torch.Tensor, float]:
    """Angles per position, float32[head_dim / 2] in radians, and the factor that cos and sin are scaled by, for
    `head_dim` elements that are rotated, or as many as `rotated` says, and sequences of up to `context` tokens. Without
    a `rope` nothing turns.

    ValueError for a `rope_type` that is not served, or that something is missing of. `dynamic` is `default` up to the
    model's `max_position_embeddings`, and longer contexts are not served with it: keys in the cache would change.
    """
    if rope is None:
        return torch.zeros(head_dim // 2), 1.0
    try:
        return _frequencies(rope, rope.get("rotated", head_dim), context)
    except KeyError as missing:
        raise ValueError(f"rope_scaling of rope_type {rope['rope_type']!r} has no {missing.args[0]}") from None


def _frequencies(rope: dict[str, Any], head_dim: int, context: int) -> tuple[torch.Tensor, float]:
    rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if rotated != head_dim:
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


def _llama3(base: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones stay, those between are blended.

    Source: meta-llama/llama-models, `apply_scaling`.
    """
    factor, context = rope["factor"], rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    waves = 2 * math.pi / base
    share = ((context / waves - low) / (high - low)).clamp(0, 1)
    return base * (share + (1 - share) / factor)


def _longrope(base: torch.Tensor, rope: dict[str, Any], context: int) -> tuple[torch.Tensor, float]:
    """LongRoPE (arXiv 2402.13753, section 3.3): each frequency has a factor of its own, one for contexts as long as
    those of the training, another for longer ones; attention is sharpened (Phi-3, transformers).

    Which of them is taken depends on what is served, not on how long a sequence is: keys in the cache would change."""
    original = rope["original_max_position_embeddings"]
    name = "long_factor" if context > original else "short_factor"
    factors = torch.tensor(rope[name], dtype=torch.float32)
    if factors.shape != base.shape:
        raise ValueError(f"rope_scaling: {name} has {len(factors)} numbers, not {len(base)}")
    stretched = rope.get("factor") or rope["max_position_embeddings"] / original
    sharp = math.sqrt(1 + math.log(stretched) / math.log(original)) if stretched > 1 else 1.0
    return base / factors, rope.get("attention_factor") or sharp


def _yarn(base: torch.Tensor, rope: dict[str, Any], head_dim: int) -> tuple[torch.Tensor, float]:
    """YaRN (arXiv 2309.00071, sections 3.2 and 3.4): as above, blended by dimension, and attention sharpened."""
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
    if rope.get("attention_factor") is not None:
        return rope["attention_factor"]

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return sharpened(factor, rope["mscale"]) / sharpened(factor, rope["mscale_all_dim"])
    return sharpened(factor, 1.0)


def sharpened(factor: float, weight: float) -> float:
    """What YaRN scales queries and keys by, for contexts `factor` times as long (section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Turn x[T, heads, D] by cos, sin[T, 1, R / 2]; element i is paired with element i + R / 2, and the rest stays. If
    `interleaved`, 2i is with 2i + 1 in x, and the result is in the other order: products of two rotated vectors are the
    same in any."""
    if (turned := 2 * cos.shape[-1]) < x.shape[-1]:
        return torch.cat((rotate(x[..., :turned], cos, sin, interleaved), x[..., turned:]), dim=-1)
    first, second = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
