"""Linear attention by the gated delta rule, for one layer without its projections: decodes and prompts in the shapes of
Qwen3-Next and Qwen3.5, with limits.

    python -m bench.delta [--sweep] [--all]

Random weights, states and inputs in bfloat16, states in float32; decodes in several layers in turn, so that no state
is in the cache, all in CUDA graphs. Limits: the bytes of the states read and written once, and of inputs and results,
over the copy bandwidth; for prompts the FLOPs of chunks (see `cuda/recurrent/delta_chunks.py`, without the inverse)
over the rate of matrix products, if that takes longer. Both are measured in the same run. The error is relative to
float32. With --sweep, all tiles are timed.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from bench.common import save, table
from bench.worker import ceilings, median_ms
from radixrt.worker.cuda.elementwise import launching
from radixrt.worker.cuda.recurrent import convolutions, delta, delta_chunks
from radixrt.worker.cuda.recurrent.cutting import TOKENS, Cut, Runs
from radixrt.worker.cuda.recurrent.delta import DeltaInputs, LayerStates
from radixrt.worker.cuda.recurrent.delta_chunks import Tiles
from radixrt.worker.model.layers.recurrent.delta import gated_delta, gated_norm, short_conv
from radixrt.worker.model.layers.recurrent.delta_net import DeltaNet
from radixrt.worker.model.spec.delta_spec import DeltaSpec
from radixrt.worker.plan import StateWork

SHAPES = {
    "Qwen3-Next 80B, Qwen3.5 9B, 35B": DeltaSpec(frozenset(), 16, 32, 128, 128, 4),
    "Qwen3.5 27B": DeltaSpec(frozenset(), 16, 48, 128, 128, 4),
    "Qwen3.5 397B": DeltaSpec(frozenset(), 16, 64, 128, 128, 4),
    "Kimi Linear 48B": DeltaSpec(frozenset(), 32, 32, 128, 128, 4, rank=128),
    "OLMo Hybrid 7B": DeltaSpec(frozenset(), 30, 30, 96, 192, 4, beta_factor=2.0),
}
DECODES = (1, 16, 64, 256)
PROMPTS = ([8192], [128] * 64, [2048], [512], [64])
"""Tokens of each sequence of a step."""
CACHE = 200 << 20
"""Bytes of states that take turns: more than the cache holds."""
DEVICE = torch.device("cuda")


def drawn(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(size, device=DEVICE, dtype=dtype)


class Case:
    """Layers that take turns, and the inputs of a step."""

    def __init__(self, spec: DeltaSpec, counts: list[int]) -> None:
        self.spec, self.counts = spec, counts
        tokens, heads, wide = sum(counts), spec.value_heads, torch.float32
        decays = spec.keys if spec.rank else heads
        self.net = DeltaNet(
            spec, None, None, drawn(spec.channels, 4) / 2, -drawn(heads, dtype=wide).exp(), drawn(decays, dtype=wide),
            torch.ones(spec.value_dim, device=DEVICE), 1e-6, False, (None, None) if spec.rank else None,
        )  # fmt: skip
        x, z = drawn(tokens, spec.channels + spec.values).split((spec.channels, spec.values), dim=1)
        b, a = drawn(tokens, heads + decays).split((heads, decays), dim=1)
        self.inputs = DeltaInputs(x, z, b, a)
        self.x = drawn(tokens, spec.channels)
        self.out = drawn(tokens, heads, spec.value_dim)
        self.slots = np.arange(1, len(counts) + 1)
        self.bounds = np.cumsum([0, *counts])
        each = 4 * heads * spec.key_dim * spec.value_dim
        layers = max(1, min(CACHE // (each * len(counts)), 64)) if max(counts) == 1 else 1
        self.layers = [
            LayerStates(
                drawn(len(counts) + 1, spec.channels, 3),
                drawn(len(counts) + 1, heads, spec.key_dim, spec.value_dim, dtype=torch.float32) / 8,
            )
            for _ in range(layers)
        ]
        self.there = Runs.of_ones(torch.from_numpy(self.slots.astype(np.int32)).to(DEVICE))
        none = np.zeros((2, 0), dtype=np.int32)
        parts = StateWork(self.slots, none, none).parts(np.array(counts))
        self.lists = Cut.of(parts, DEVICE)

    def decode(self, states: LayerStates, tile: delta.Tile | None = None) -> torch.Tensor:
        tile = tile or delta.decode_tile(self.spec, len(self.counts))
        convolutions.conv_step(self.inputs.x, self.net, states.conv, self.there, self.x)
        delta.by_tokens(self.x, self.inputs, self.net, states, self.there, self.out, tile=tile)
        return self.out

    def by_chunks(self, states: LayerStates, tiles: Tiles | None = None) -> torch.Tensor:
        x = delta_chunks.convolved(self.net, self.inputs.x, states, self.lists)
        delta_chunks.by_chunks(x, self.inputs, self.net, states, self.lists, self.out, tiles=tiles)
        return self.out

    def by_tokens(self, states: LayerStates) -> torch.Tensor:
        convolutions.conv_chunks(self.inputs.x, self.net, states.conv, self.lists, self.x)
        delta.by_tokens(self.x, self.inputs, self.net, states, self.lists, self.out)
        return self.out

    def expected(self, states: LayerStates) -> torch.Tensor:
        """In float32, from the convolution on."""
        spec, net, inputs = self.spec, self.net, self.inputs
        slots, bounds = torch.from_numpy(self.slots), torch.from_numpy(self.bounds)
        x = short_conv(inputs.x, net.conv, None, states.conv, slots, bounds).float()
        q, k, v = x.split((spec.keys, spec.keys, spec.values), dim=1)
        q, k = (part.unflatten(1, (-1, spec.key_dim)) for part in (q, k))
        v, z = (part.unflatten(1, (-1, spec.value_dim)) for part in (v, inputs.z))
        decay = F.softplus(inputs.a.float() + net.dt_bias)
        decay = net.rates[:, None] * decay.unflatten(1, (-1, spec.key_dim)) if spec.rank else net.rates * decay
        beta = spec.beta_factor * inputs.b.float().sigmoid()
        out = gated_delta(q, k, v, decay, beta, states.rule, slots, bounds)
        return gated_norm(out, z, net.norm, net.eps, "sigmoid" if spec.rank else "silu")

    def errors(self, way: Callable[[LayerStates], torch.Tensor]) -> dict[str, float]:
        """Of the results and of the states."""
        found, exact = (LayerStates(self.layers[0].conv.clone(), self.layers[0].rule.clone()) for _ in range(2))
        pairs = {"error": (way(found), self.expected(exact)), "state_error": (found.rule, exact.rule)}
        wrong = {name: float((a.float() - b).norm() / b.norm()) for name, (a, b) in pairs.items()}
        assert torch.equal(found.conv, exact.conv) and max(wrong.values()) < 2e-2, (self.counts[:3], wrong)
        return wrong

    def ms(self, way: Callable[[LayerStates], torch.Tensor]) -> float:
        """Milliseconds per layer."""

        def run() -> None:
            for states in self.layers:
                way(states)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return median_ms(graph.replay) / len(self.layers)

    def parts(self) -> dict[str, float]:
        """Milliseconds of each kernel, launched one by one, none before the one ahead has ended."""
        early, launching.launches_early = launching.launches_early, lambda: False
        try:
            self.way(self.layers[0])
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                for _ in range(5):
                    self.way(self.layers[0])
                torch.cuda.synchronize()
        finally:
            launching.launches_early = early
        found = {event.key.strip("_"): event.device_time_total / 5e3 for event in trace.key_averages()}
        return {name: ms for name, ms in found.items() if ms}

    def limit_ms(self, limits: dict[str, float]) -> float:
        spec, tokens = self.spec, sum(self.counts)
        state = 4 * spec.value_heads * spec.key_dim * spec.value_dim + 2 * 3 * spec.channels
        decays = spec.keys if spec.rank else spec.value_heads
        row = 2 * (spec.channels + 2 * spec.value_heads * spec.value_dim + spec.value_heads + decays)
        moved = 2 * state * len(self.counts) + row * tokens
        flops = 0
        if max(self.counts) > 1:
            square, across = TOKENS * TOKENS, TOKENS * spec.key_dim * spec.value_dim
            within = square * (3 * spec.key_dim + 2 * spec.value_dim)
            flops = 2 * spec.value_heads * len(self.lists.chunks) * (within + 3 * across)
        return max(moved / limits["copy_gbs"] / 1e6, flops / limits["tflops"] / 1e9)

    @property
    def way(self) -> Callable[[LayerStates], torch.Tensor]:
        return self.by_chunks if max(self.counts) > 1 else self.decode

    @property
    def name(self) -> str:
        return f"{len(self.counts)} x {self.counts[0]}"


def swept(spec: DeltaSpec, counts: list[int]) -> None:
    """Print the times of all tiles."""
    case = Case(spec, counts)
    ways: dict[str, Callable[[LayerStates], torch.Tensor]] = {}
    if max(case.counts) == 1:
        tiles = [delta.Tile(columns, warps) for columns in (8, 16, 32, 64) for warps in (1, 2, 4)]
        ways = {str(tile): lambda s, t=tile: case.decode(s, t) for tile in tiles}
    else:
        candidates = [Tiles(), Tiles(block=1), Tiles(within_warps=2), Tiles(within_warps=8)]
        candidates += [Tiles(columns=64, warps=4, stages=stages) for stages in (1, 2, 4)]
        candidates += [Tiles(columns=128, warps=8, stages=2), Tiles(columns=32, warps=2), Tiles(columns=16, warps=1)]
        ways = {str(tiles): lambda s, t=tiles: case.by_chunks(s, t) for tiles in candidates}
    for name, way in ways.items():
        print(f"    {case.name}: {case.ms(way):.4f} {name}", flush=True)


def measure(case: Any, limits: dict[str, float]) -> dict[str, Any]:
    """A row of the table."""
    row: dict[str, Any] = {"step": case.name, "ms": case.ms(case.way), "limit_ms": case.limit_ms(limits)}
    row["of_limit"] = row["ms"] / row["limit_ms"]
    row["by_tokens_ms"] = case.ms(case.by_tokens)
    return row | case.errors(case.way) | {"kernels_ms": case.parts()}


def arguments(text: str | None) -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--all", action="store_true", help="all shapes, and not the first one alone")
    return parser


def run(
    benchmark: str, shapes: dict[str, Any], args: argparse.Namespace, make: Callable[[Any, list[int]], Any],
    measure: Callable[[Any, dict[str, float]], dict[str, Any]], swept: Callable[[Any, list[int]], None],
) -> None:  # fmt: skip
    """Measure the cases that `make` returns, of all steps, or time all tiles; `args` are those of `arguments`."""
    torch.manual_seed(0)
    limits = ceilings()
    print(limits, flush=True)
    rows: list[dict[str, Any]] = []
    names = list(shapes) if args.all else list(shapes)[:1]
    for name, counts in itertools.product(names, (*([1] * n for n in DECODES), *PROMPTS)):
        if args.sweep:
            swept(shapes[name], counts)
            continue
        rows.append({"shape": name} | measure(make(shapes[name], counts), limits))
        print(rows[-1], flush=True)
        save(benchmark, rows, device=torch.cuda.get_device_name(), **limits)
        torch.cuda.empty_cache()
    print(table([{name: value for name, value in row.items() if name != "kernels_ms"} for row in rows]))


def main() -> None:
    run("delta", SHAPES, arguments(__doc__).parse_args(), Case, measure, swept)


if __name__ == "__main__":
    main()
