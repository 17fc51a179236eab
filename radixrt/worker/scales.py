"""What FP8 pages divide K and V by, so that they neither clip nor fall among the subnormals: one scale of K and one of
V for each layer."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from radixrt.worker.attention import attend_with_sinks
from radixrt.worker.model.checkpoint import Weights
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.model.layers import Projected

log = logging.getLogger("radixrt.scales")

Scales = list[tuple[float, float]]
"""Of K and of V, by layer."""

SOURCES = ("auto", "none")
NAMES = (
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("kv_scale", "kv_scale"),
    ("attn.kv_scale", "attn.kv_scale"),
)
"""Of a layer's tensors in checkpoints, after `model.layers.0.self_attn.`."""
PROMPTS, TOKENS = 4, 256
HEADROOM = 2.0
"""How often the largest value seen fits into the range."""
SMALLEST = 2.0**-64
"""Its inverse is a float32; smaller values are as good as 0."""


def choose_scales(source: str, weights: Weights, model: Decoder, dtype: torch.dtype, bos_id: object = None) -> Scales:
    """The scales of pages of an FP8 `dtype`, of the `source` that the setting names. They are logged, and what they
    would clip. ValueError names a tensor of the checkpoint that is no scale."""
    layers = model.spec.num_layers
    if source == "auto" and (stated := stated_scales(weights, layers)) is not None:
        stated = [(max(pair),) * 2 for pair in stated] if model.spec.latent else stated  # V is a part of K
        _report_stated(stated)
        return stated
    largest = largest_values(model, bos_id)
    limit = torch.finfo(dtype).max
    scales = [(1.0, 1.0)] * layers
    if source == "auto":
        # V of a latent is a part of K, and is stored with it.
        largest = [(k, k) for k, _ in largest] if model.spec.latent else largest
        scales = [(power_of_two(k, limit), power_of_two(v, limit)) for k, v in largest]
    report([
        Range(layer, name, seen, scale, limit)
        for layer in range(layers)
        for name, seen, scale in zip("KV", largest[layer], scales[layer], strict=True)
    ])  # fmt: skip
    return scales


def power_of_two(largest: float, limit: float) -> float:
    """The smallest power of two s with HEADROOM * largest / s <= limit: it moves the exponents of values and changes
    no mantissa. 1 where `largest` is 0 or not finite."""
    if largest == 0 or not math.isfinite(largest):
        return 1.0
    mantissa, exponent = math.frexp(HEADROOM * largest / limit)  # 0.5 <= mantissa < 1
    return max(math.ldexp(1.0, exponent - (mantissa == 0.5)), SMALLEST)


# ---------------------------------------------------------------- of the checkpoint


def stated_scales(weights: Weights, layers: int) -> Scales | None:
    """None unless the checkpoint has them for every layer. ValueError names a tensor that is no scale."""
    found = [_stated(weights, f"model.layers.{layer}.self_attn.") for layer in range(layers)]
    scales = [pair for pair in found if pair is not None]
    if len(scales) == layers:
        return scales
    if scales:
        lacking = ", ".join(str(layer) for layer, pair in enumerate(found) if pair is None)
        log.warning("the checkpoint's scales of K and V are not used: it has none for layers %s", lacking)
    return None


def _stated(weights: Weights, prefix: str) -> tuple[float, float] | None:
    for names in NAMES:
        k, v = (_positive(weights, prefix + name) for name in names)
        if k is not None and v is not None:
            return k, v
    return None


def _positive(weights: Weights, name: str) -> float | None:
    tensor = weights.get(name)
    if tensor is None:
        return None
    if tensor.numel() != 1 or not math.isfinite(value := float(tensor)) or value <= 0:
        raise ValueError(f"{name} is {tensor.tolist()}: a scale is one positive number")
    return value


# ---------------------------------------------------------------- calibrated


def largest_values(model: Decoder, bos_id: object = None) -> list[tuple[float, float]]:
    """The largest |K| and |V| of each layer over a few prompts of random tokens, the same for every worker.

    Random tokens reach the ranges of text only roughly (what is large comes mostly from weights, single tokens and the
    first position), hence HEADROOM."""
    attend = _Observer(model)
    none = torch.empty(0, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        for ids in calibration_prompts(model.spec.vocab_size, model.spec.max_model_len, bos_id):
            tokens = torch.from_numpy(ids).to(model.device)
            model.forward(tokens, torch.arange(len(ids), device=model.device), attend, wanted=none)
    return [(k, v) for k, v in attend.largest.tolist()]


def calibration_prompts(vocab_size: int, max_model_len: int, bos_id: object = None) -> np.ndarray:
    """int64[PROMPTS, at most TOKENS], each after the beginning-of-sequence token, if the model has one."""
    ids = np.random.default_rng(0).integers(0, vocab_size, (PROMPTS, min(TOKENS, max_model_len)))
    if isinstance(bos_id, int) and 0 <= bos_id < vocab_size:
        ids[:, 0] = bos_id
    return ids


class _Observer:
    """An `Attend` without pages, of one prompt over itself, that notes the largest |K| and |V| by layer."""

    def __init__(self, model: Decoder) -> None:
        self._windows = model.spec.windows
        self._scale = model.spec.scale
        self._sinks = model.sinks
        self.largest = torch.zeros((model.spec.num_layers, 2), device=model.device)

    def __call__(self, layer: int, heads: Projected) -> torch.Tensor:
        q, k, v = heads.split()
        largest = torch.stack((k.abs().amax(), v.abs().amax())).float()
        self.largest[layer] = torch.maximum(self.largest[layer], largest)  # NaN wins
        at = torch.arange(len(q), device=q.device)
        distance = at[:, None] - at
        window = self._windows[layer]
        mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        if (sinks := self._sinks[layer]) is not None:
            return attend_with_sinks(q, k, v, mask, sinks, self._scale)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self._scale, enable_gqa=True)
        return heads.values(out[0].transpose(0, 1))


# ---------------------------------------------------------------- what is said of them


@dataclass(frozen=True, slots=True)
class Range:
    """The largest value seen of K or V of a layer, and what its pages hold: `scale * limit`."""

    layer: int
    name: str
    largest: float
    scale: float
    limit: float

    @property
    def headroom(self) -> float:
        """Times that `largest` fits; below 1 it clips."""
        return self.scale * self.limit / self.largest if self.largest else math.inf


def report(ranges: list[Range]) -> None:
    """One line in all, one a layer for debugging, one warning for all that clips, one for all that is not finite."""
    finite = [r for r in ranges if math.isfinite(r.largest)]
    k, v = (max((r.largest for r in finite if r.name == name), default=math.nan) for name in "KV")
    tightest = sorted(finite, key=lambda r: r.headroom)[:3]
    log.info(
        "FP8 pages: largest K %.4g, V %.4g of random tokens; least headroom: %s",
        k, v, ", ".join(f"layer {r.layer} {r.name} {r.headroom:.2f} x" for r in tightest),
    )  # fmt: skip
    for r in ranges:
        log.debug(
            "layer %d %s: largest %.4g, scale %.4g, headroom %.2f", r.layer, r.name, r.largest, r.scale, r.headroom
        )
    if clipped := [r for r in finite if r.headroom < 1]:
        which = ", ".join(f"layer {r.layer} {r.name} ({r.largest:.4g} > {r.scale * r.limit:.4g})" for r in clipped)
        log.warning("FP8 pages clip: %s", which)
    if lost := [r for r in ranges if not math.isfinite(r.largest)]:
        which = ", ".join(f"layer {r.layer} {r.name}" for r in lost)
        log.warning("values that are not finite, the scale of their FP8 pages is 1: %s", which)


def _report_stated(scales: Scales) -> None:
    k, v = zip(*scales, strict=True)
    log.info("FP8 pages: the checkpoint's scales, of K %.4g to %.4g, of V %.4g to %.4g", min(k), max(k), min(v), max(v))
    for layer, pair in enumerate(scales):
        log.debug("layer %d: scale of K %.4g, of V %.4g", layer, *pair)
