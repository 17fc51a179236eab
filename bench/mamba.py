"""Mamba-2 mixers, for one layer without its projections: decodes and prompts in the shapes of published models, with
limits.

    python -m bench.mamba [--sweep] [--all] [--torch]

As `bench.delta`: random weights, states and inputs in bfloat16, states in float32; decodes in several layers in turn,
all in CUDA graphs. The convolution, the state-space model and the gated norm are timed together. Limits: the bytes of
the states read and written once, and of inputs and results, over the copy bandwidth; for prompts the FLOPs of chunks
(see `cuda/recurrent/mamba_chunks.py`) over the rate of matrix products, if that takes longer. With --torch, the time
that torch takes for the same (`model/layers/recurrent/mamba_mixer.py`). With --sweep, all tiles are timed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from bench import delta
from bench.delta import CACHE, DEVICE, drawn
from radixrt.worker.cuda.recurrent import convolutions, mamba, mamba_chunks
from radixrt.worker.cuda.recurrent.cutting import TOKENS, Cut, Runs
from radixrt.worker.cuda.recurrent.delta import LayerStates
from radixrt.worker.cuda.recurrent.mamba import MambaInputs
from radixrt.worker.cuda.recurrent.mamba_chunks import Tiles
from radixrt.worker.model.layers.mixers import Recurrence
from radixrt.worker.model.layers.recurrent.delta import short_conv
from radixrt.worker.model.layers.recurrent.mamba import gated, state_space
from radixrt.worker.model.layers.recurrent.mamba_mixer import Mamba
from radixrt.worker.model.spec.mamba_spec import MambaSpec
from radixrt.worker.plan import StateWork


def shape(heads: int, head_dim: int, groups: int, state: int, norm: str = "after_gate") -> MambaSpec:
    return MambaSpec(frozenset(), heads, head_dim, groups, state, 4, True, False, False, norm=norm)


SHAPES = {
    "Nemotron-H 8B": shape(128, 64, 8, 128),
    "Granite 4 H Small": shape(128, 64, 1, 128),
    "Nemotron 3 Nano": shape(64, 64, 8, 128),
    "Falcon-H1 7B": shape(24, 128, 1, 256, "none"),
}


class Case(delta.Case):
    """Layers that take turns, and the inputs of a step."""

    def __init__(self, spec: MambaSpec, counts: list[int], tokens: int = TOKENS) -> None:
        self.spec, self.counts, self.tokens = spec, counts, tokens
        total, heads, wide = sum(counts), spec.heads, torch.float32
        self.net = Mamba(
            spec, lambda x: x, drawn(spec.channels, 4) / 2, drawn(spec.channels), -drawn(heads, dtype=wide).exp(),
            drawn(heads, dtype=wide), drawn(heads, dtype=wide) - 3,
            None if spec.norm == "none" else torch.ones(spec.values, device=DEVICE, dtype=torch.bfloat16), 1e-5, False,
        )  # fmt: skip
        self.projected = drawn(total, spec.values + spec.channels + heads)
        self.inputs = MambaInputs.of(self.net, self.projected)
        self.x, self.out = drawn(total, spec.channels), drawn(total, spec.values)
        self.slots, self.bounds = np.arange(1, len(counts) + 1), np.cumsum([0, *counts])
        each = 4 * heads * spec.head_dim * spec.state
        layers = max(1, min(CACHE // (each * len(counts)), 64)) if max(counts) == 1 else 1
        self.layers = [
            LayerStates(
                drawn(len(counts) + 1, spec.channels, 3),
                drawn(len(counts) + 1, *spec.rule_shape, dtype=torch.float32) / 8,
            )
            for _ in range(layers)
        ]
        self.there = Runs.of_ones(torch.from_numpy(self.slots.astype(np.int32)).to(DEVICE))
        none = np.zeros((2, 0), dtype=np.int32)
        parts = StateWork(self.slots, none, none).parts(np.array(counts))
        self.lists = Cut.of(parts, DEVICE, tokens)

    def decode(
        self, states: LayerStates, elements: int = mamba.DECODE_ELEMENTS, warps: int = mamba.DECODE_WARPS
    ) -> torch.Tensor:
        convolutions.conv_step(self.inputs.x, self.net, states.conv, self.there, self.x)
        sizes = {"elements": elements, "warps": warps}
        mamba.decode(self.x, self.inputs, self.net, states, self.there, self.out, **sizes)
        mamba.finish(self.inputs, self.net, self.out)
        return self.out

    def by_chunks(self, states: LayerStates, tiles: Tiles | None = None) -> torch.Tensor:
        convolutions.conv_chunks(self.inputs.x, self.net, states.conv, self.lists, self.x)
        mamba_chunks.by_chunks(self.x, self.inputs, self.net, states, self.lists, self.out, tiles=tiles)
        mamba.finish(self.inputs, self.net, self.out)
        return self.out

    def by_tokens(self, states: LayerStates) -> torch.Tensor:
        convolutions.conv_chunks(self.inputs.x, self.net, states.conv, self.lists, self.x)
        mamba.by_tokens(self.x, self.inputs, self.net, states, self.lists, self.out)
        mamba.finish(self.inputs, self.net, self.out)
        return self.out

    def expected(self, states: LayerStates) -> torch.Tensor:
        """In float32, from the convolution on."""
        spec, net, inputs = self.spec, self.net, self.inputs
        slots, bounds = (torch.from_numpy(x).to(DEVICE) for x in (self.slots, self.bounds))
        x = short_conv(inputs.x, net.conv, net.conv_bias, states.conv, slots, bounds).float()
        each = spec.groups * spec.state
        x, b, c = x.split((spec.values, each, each), dim=1)
        x, b, c = x.unflatten(1, (spec.heads, -1)), *(part.unflatten(1, (spec.groups, -1)) for part in (b, c))
        steps = F.softplus(inputs.steps.float() + net.step_bias)
        out = state_space(x, steps, net.rates, b, c, net.skip, states.rule, slots, bounds)
        return gated(out.flatten(1), inputs.z, net.norm, spec.groups, net.eps)

    @property
    def way(self) -> Callable[[LayerStates], torch.Tensor]:
        return self.decode if max(self.counts) == 1 else self.by_chunks

    def torch_ms(self) -> float:
        """Milliseconds that torch takes, its synchronisations and all."""
        states, best = self.layers[0], []
        slots, bounds = (torch.from_numpy(x).to(DEVICE) for x in (self.slots, self.bounds))
        recurrence = Recurrence(lambda _: (states.conv, states.rule), slots, bounds)
        for _ in range(4):
            torch.cuda.synchronize()
            began = time.perf_counter()
            self.net.mix(self.projected, 0, recurrence)
            torch.cuda.synchronize()
            best.append(time.perf_counter() - began)
        return 1e3 * min(best)

    def limit_ms(self, limits: dict[str, float]) -> float:
        spec, tokens = self.spec, sum(self.counts)
        state = 4 * spec.values * spec.state + 2 * 3 * spec.channels
        row = 2 * (spec.channels + 2 * spec.values + spec.heads)
        flops = 0
        if max(self.counts) > 1:
            across, half = 2 * spec.head_dim * spec.state, 64  # FLOPs are fewest with chunks of 64
            within = half * (spec.head_dim * spec.heads + spec.state * spec.groups)
            flops = 2 * tokens * (within + across * spec.heads)
        moved = 2 * state * len(self.counts) + row * tokens
        return max(moved / limits["copy_gbs"] / 1e6, flops / limits["tflops"] / 1e9)


def swept(spec: MambaSpec, counts: list[int]) -> None:
    """Print the times of all tiles."""
    ways: dict[str, tuple[Case, Callable[[LayerStates], torch.Tensor]]] = {}
    case = Case(spec, counts)
    if max(counts) == 1:
        for elements, warps in itertools.product((2048, 4096, 8192), (1, 2, 4, 8)):
            ways[f"{elements} elements, {warps} warps"] = (
                case,
                lambda s, e=elements, w=warps: case.decode(s, e, w),
            )
    else:
        plain = Tiles()
        candidates = [plain, *(replace(plain, stages=n) for n in (2, 4)), replace(plain, columns=32)]
        candidates += [replace(plain, columns=64), replace(plain, warps=8)]
        candidates += [replace(plain, together=n) for n in (1, 2, 8)]
        candidates += [replace(plain, mixed_warps=8)]
        candidates += [replace(plain, mixed_stages=1), replace(plain, mixed_stages=3)]
        cases = {tokens: Case(spec, counts, tokens) for tokens in (64, 128)}
        for (tokens, of), tiles in itertools.product(cases.items(), candidates):
            ways[f"{tokens} tokens, {tiles}"] = of, lambda s, c=of, t=tiles: c.by_chunks(s, t)
    for name, (of, way) in ways.items():
        try:
            print(f"    {of.name}: {of.ms(way):.4f} {name}", flush=True)
        except Exception as error:  # a tile that does not fit
            print(f"    {of.name}: {type(error).__name__} {name}", flush=True)


def main() -> None:
    parser = delta.arguments(__doc__)
    parser.add_argument("--torch", action="store_true", help="also what torch takes")
    args = parser.parse_args()

    def measure(case: Case, limits: dict[str, float]) -> dict[str, Any]:
        row = delta.measure(case, limits)
        return row | {"torch_ms": case.torch_ms()} if args.torch else row

    delta.run("mamba", SHAPES, args, Case, measure, swept)


if __name__ == "__main__":
    main()
