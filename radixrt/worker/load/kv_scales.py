"""Scales of FP8 pages: for each layer, what K and V are divided by so that they neither saturate nor become
subnormal."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from radixrt.worker.execution.attention import attend, first_key
from radixrt.worker.execution.kv_pool import StatePool
from radixrt.worker.model.layers.mixers import Projected, Recurrence
from radixrt.worker.model.model import Model
from radixrt.worker.model.weights.weights import Weights

log = logging.getLogger("radixrt.scales")

Scales = list[tuple[float, float]]
"""(of K, of V) by layer."""
NAMES = (
    ("k_scale", "v_scale"),
    ("attn.k_scale", "attn.v_scale"),
    ("k_proj.k_scale", "v_proj.v_scale"),
    ("kv_scale", "kv_scale"),
    ("attn.kv_scale", "attn.kv_scale"),
)
"""Names of the scales of K and V in checkpoints, after `model.layers.0.self_attn.`."""
PROMPTS, TOKENS = 4, 256
"""Number and length of the calibration prompts."""
HEADROOM = 2.0
"""The range of the pages, as a multiple of the largest value seen in calibration."""
SMALLEST = 2.0**-64
"""The smallest scale; values that would need a smaller one are practically 0."""


def choose_scales(source: str, weights: Weights, model: Model, dtype: torch.dtype, bos_id: object = None) -> Scales:
    """The scales of pages of an FP8 `dtype`, from the `source` that the setting names. Logs them, and warns of layers
    that clip. Raises ValueError that names a tensor of the checkpoint that is no valid scale."""
    numbers = model.spec.attention_layers
    layers = len(numbers)
    sources = [numbers[place] for place in model.spec.kv_sources]
    if model.spec.predicts:  # its layer may have none even where all others do
        sources = sources[:-1]
    if source == "auto" and (stated := stated_scales(weights, sources)) is not None:
        stated = [(max(pair),) * 2 for pair in stated] if model.spec.latent else stated  # V is a part of K
        if model.spec.predicts:
            stated.append((stated_scales(weights, numbers[-1:]) or [stated[-1]])[0])
        _report_stated(stated)
        return stated
    largest = largest_values(model, bos_id)
    limit = torch.finfo(dtype).max
    scales = [(1.0, 1.0)] * layers
    if source == "auto":
        # With a latent, V is a part of K, and has K's scale.
        largest = [(k, k) for k, _ in largest] if model.spec.latent else largest
        scales = [(power_of_two(k, limit), power_of_two(v, limit)) for k, v in largest]
    report([
        Range(numbers[layer], name, seen, scale, limit)
        for layer in range(layers)
        for name, seen, scale in zip("KV", largest[layer], scales[layer], strict=True)
    ])  # fmt: skip
    return scales


def power_of_two(largest: float, limit: float) -> float:
    """The smallest power of two s with HEADROOM * largest / s <= limit; 1 if `largest` is 0 or not finite. Dividing by
    a power of two changes only exponents, so it adds no rounding."""
    if largest == 0 or not math.isfinite(largest):
        return 1.0
    mantissa, exponent = math.frexp(HEADROOM * largest / limit)  # 0.5 <= mantissa < 1
    return max(math.ldexp(1.0, exponent - (mantissa == 0.5)), SMALLEST)


# ---------------------------------------------------------------- from the checkpoint


def stated_scales(weights: Weights, layers: Sequence[int]) -> Scales | None:
    """The checkpoint's scales of the numbered layers; None unless it has them for all of these. Raises ValueError that
    names a tensor that is no valid scale."""
    stated = [_stated(weights, f"model.layers.{layer}.self_attn.") for layer in layers]
    scales = [pair for pair in stated if pair is not None]
    if len(scales) == len(layers):
        return scales
    if scales:
        lacking = ", ".join(str(layer) for layer, pair in zip(layers, stated, strict=True) if pair is None)
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


def largest_values(model: Model, bos_id: object = None) -> list[tuple[float, float]]:
    """The largest |K| and |V| of each layer over a few prompts of random tokens, which are the same for every worker.

    For random tokens the largest values are only roughly those of text (they come mostly from the weights, from single
    tokens and from the first position), hence HEADROOM."""
    attend = _Observer(model)
    none = torch.empty(0, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        for ids in calibration_prompts(model.spec.vocab_size, model.spec.max_model_len, bos_id):
            tokens = torch.from_numpy(ids).to(model.device)
            at = torch.arange(len(ids), device=model.device)
            mix = _states_of_one(model, len(ids))
            if model.predictor is None:
                model.forward(tokens, at, attend, wanted=none, mix=mix)
            else:
                hidden = model.hidden(*model.attend_all(tokens, at, attend, mix))
                before = torch.cat((torch.zeros_like(hidden[:1]), hidden[:-1]))
                model.predictor.guess(tokens, at, before, attend)
    return [(k, v) for k, v in attend.largest.tolist()]


def _states_of_one(model: Model, tokens: int) -> Recurrence | None:
    """Fresh recurrent states for one prompt, if the model has any."""
    if model.spec.recurrent is None:
        return None
    pool = StatePool(model.spec.recurrent, 2, model.dtype, model.device)
    slots, bounds = (torch.tensor(x, device=model.device) for x in ([1], [0, tokens]))
    return Recurrence(pool.layer, slots, bounds)


def calibration_prompts(vocab_size: int, max_model_len: int, bos_id: object = None) -> np.ndarray:
    """int64[PROMPTS, at most TOKENS]; each prompt begins with the beginning-of-sequence token, if the model has one."""
    ids = np.random.default_rng(0).integers(0, vocab_size, (PROMPTS, min(TOKENS, max_model_len)))
    if isinstance(bos_id, int) and 0 <= bos_id < vocab_size:
        ids[:, 0] = bos_id
    return ids


class _Observer:
    """An `Attend` of one prompt without pages, which records the largest |K| and |V| by layer."""

    def __init__(self, model: Model) -> None:
        self._windows = model.spec.attention_windows
        self._scale = model.spec.scale
        self._sinks = model.sinks
        self._cap = model.spec.attention.score_cap
        self._chunked = model.spec.attention.chunked
        self._sources = model.spec.kv_sources
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.largest = torch.zeros((len(self._windows), 2), device=model.device)

    def __call__(self, layer: int, heads: Projected) -> torch.Tensor:
        q, k, v = heads.split()
        if k is None or v is None:
            k, v = self._seen[self._sources[layer]]
        self._seen[layer] = k, v
        largest = torch.stack((k.abs().amax(), v.abs().amax())).float()
        self.largest[layer] = torch.maximum(self.largest[layer], largest)  # propagates NaN
        at = torch.arange(len(q), device=q.device)
        first = first_key(at, self._windows[layer], self._chunked)
        mask = (at <= at[:, None]) & (at >= first[:, None])
        return heads.value_projection(attend(q, k, v, mask, self._scale, self._sinks[layer], self._cap))


# ---------------------------------------------------------------- logging


@dataclass(frozen=True, slots=True)
class Range:
    """The largest value seen of K or V of a layer. Its pages can hold values up to `scale * limit`."""

    layer: int
    name: str
    largest: float
    scale: float
    limit: float

    @property
    def headroom(self) -> float:
        """The range of the pages as a multiple of `largest`; below 1 they clip."""
        return self.scale * self.limit / self.largest if self.largest else math.inf


def report(ranges: list[Range]) -> None:
    """Log a summary, each range at debug level, and warnings of what clips and of what is not finite."""
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
