"""Piecewise CUDA graphs for steps of up to a few thousand tokens: everything but attention is captured.

A small step with chunks takes the device less time than Python needs to launch its three hundred kernels. Attention
depends on lengths and cannot be captured, so the host launches it. What is between two attentions depends only on the
number of tokens:

    graph 0: embed, norm, qkv, append | attention 0 | graph 1: output, mlp, qkv, append | attention 1 | ... | finish

With latent attention, the product that turns sums of latents into heads' values is launched by the host as well,
because chunks that full heads compute do not need it. Linear attention and Mamba-2, which depend on how many tokens
each sequence has, are launched by the host between two graphs as attention is; their projections are captured. Where a
layer has both attention and a mixer, a graph is between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest

import torch

from radixrt.worker.cuda.attention.attention_groups import MixedAttention
from radixrt.worker.cuda.attention.pages import Pages
from radixrt.worker.cuda.attention.step import StepAttention, append
from radixrt.worker.cuda.latent.latent import multiplied
from radixrt.worker.cuda.recurrent.delta_step import DeltaStep, products, projected_widths, result_shape
from radixrt.worker.cuda.sampling.answers import LastTokens
from radixrt.worker.model.layers.fp8 import Activations, Fp8Activations
from radixrt.worker.model.layers.latent import LatentHeads, UpProjections
from radixrt.worker.model.layers.mixers import Mix, Projected, RecurrentMixer
from radixrt.worker.model.model import Model
from radixrt.worker.model.spec.mamba_spec import MambaSpec
from radixrt.worker.model.spec.spec import ModelSpec

SIZES = (
    16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 448, *range(512, 1024, 64), *range(1024, 2048, 128),
    *range(2048, 4096 + 256, 256),
)  # fmt: skip
"""Numbers of tokens that graphs are captured for; a step is padded to the next one."""
MIN_GRAPH_TOKENS = 512
"""Graphs are captured at least up to this many tokens."""
INPUTS_COPIES = 8
"""Tensors of the size of all layers' inputs, of 16 bits, that computing these takes in the memory pool of graphs."""
PRODUCTS = 150 << 30
"""Multiplications per layer from which on a step takes an H200 longer than its host (bench/results/pieces.json)."""


def most_tokens(spec: ModelSpec, narrow: bool) -> int:
    """The most tokens of a step that is worth the memory of graphs: longer ones take the device longer than the host
    anyway. With `narrow` weights, in FP8 or INT4, that is so of twice as many: those in FP8 take the device half the
    time; of those in INT4, which are dequantized a part at a time, the host launches more kernels."""
    longest = PRODUCTS // spec.layer_elements * (2 if narrow else 1)
    return next((size for size in SIZES if size >= max(MIN_GRAPH_TOKENS, longest)), SIZES[-1])


def sizes_up_to(tokens: int) -> list[int]:
    """`tokens` and all SIZES below it; empty for 0."""
    return [*(size for size in SIZES if size < tokens), tokens] if tokens else []


def kept_bytes(spec: ModelSpec, tokens: int, itemsize: int) -> int:
    """Bytes of the tensors that graphs of up to `tokens` tokens keep, beside the memory pool of their kernels: residual
    streams and what comes with them (`ending`), queries, results of attention (with latent attention also heads' values
    and full queries)."""
    sizes = sizes_up_to(tokens)
    heads = sum(widest_heads(spec))
    if latent := spec.latent:
        heads += latent.value_dim + latent.nope_dim + latent.rope_dim
    linear = sum(projected_widths(spec.recurrent)) + math.prod(result_shape(spec.recurrent)) if spec.recurrent else 0
    inputs = INPUTS_COPIES * spec.num_layers * spec.layer_inputs
    each = spec.num_heads * heads + linear + inputs
    return itemsize * (sum(sizes) * (spec.hidden_size + ending(spec)) + tokens * each)


def widest_heads(spec: ModelSpec) -> tuple[int, int]:
    """The most elements of a layer's head of q, and of its result."""
    if not spec.layers:
        return spec.head_dim, spec.value_dim
    return max(own.head_dim for own in spec.layers), max(own.value_dim for own in spec.layers)


def ending(spec: ModelSpec) -> int:
    """Elements of a token that a last graph makes, after the last attention, for `Decoder.finish`: the input of an MLP
    without a mixer, or the results of attention and of a mixer side by side. 0: there is no such graph."""
    if isinstance(spec.recurrent, MambaSpec) and spec.recurrent.parallel:
        return spec.num_heads * spec.value_dim + spec.recurrent.values
    return spec.hidden_size if spec.hybrid_layers and spec.hybrid_layers[-1][0] is None else 0


@dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of a step, padded to a size: int32[size] each. `rows` are used only for tokens that are FROM_DEVICE."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    adapters: torch.Tensor
    """See `Decoder.use_adapters`."""


@dataclass(frozen=True, slots=True)
class Captured:
    """The graphs of one size, and what `Decoder.attend_all` returns: the last attention's output, which the host
    launches (or what a last graph makes of it), and the residual stream that the graphs write. `tokens` int32[size] are
    those of the inputs, with tokens of the step before in place of FROM_DEVICE."""

    inputs: Inputs
    graphs: list[torch.cuda.CUDAGraph]
    tokens: torch.Tensor
    x: Activations
    residual: torch.Tensor


class PiecewiseGraphs:
    """The graphs of all sizes. All use the same buffers for queries and for results of attention."""

    def __init__(
        self,
        model: Model,
        pages: Callable[[int], Pages],
        last_tokens: LastTokens,
        sizes: list[int],
        full: bool = False,
    ) -> None:
        """`full`: whether queries of full heads are computed as well, beside the absorbed ones."""
        spec = model.spec
        most = max(sizes)
        self._model = model
        self._pages = pages
        self._last_tokens = last_tokens
        place = (most, spec.num_heads)
        dtype = multiplied(pages(0).keys.dtype) if spec.latent else model.dtype
        of_q, of_out = widest_heads(spec)
        self._q = torch.empty((*place, of_q), dtype=dtype, device=model.device)
        self._out = torch.zeros((*place, of_out), dtype=model.dtype, device=model.device)
        self._values, self._full = self._out, None
        self._ups: dict[int, UpProjections] = {}
        """With latent attention, by layer. Sums of latents then go to `_out`, and `_values` is a buffer of its own."""
        if spec.latent:
            self._values = self._out.new_zeros((*place, spec.latent.value_dim))
            self._full = self._out.new_empty((*place, spec.latent.nope_dim + spec.rope_dim)) if full else None
        self._projected = self._mixed = None
        """With recurrent layers: what these project, and their results."""
        if delta := spec.recurrent:
            self._projected = tuple(self._out.new_empty((most, width)) for width in projected_widths(delta))
            self._mixed = self._out.new_zeros((most, *result_shape(delta)))
        self._between: list[Callable[[int, StepAttention | MixedAttention, DeltaStep | None], None]] = []
        """By layer: launches what comes before the next graph, for a number of tokens."""
        self._integers = torch.zeros((5, most), dtype=torch.int32, device=model.device)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(model.device)
        self._captured = {size: self._capture(size) for size in sorted(sizes, reverse=True)}

    def size_for(self, tokens: int) -> int:
        """The smallest size that holds `tokens` tokens; 0 if none does."""
        return min((size for size in self._captured if size >= tokens), default=0)

    def close(self) -> None:
        for captured in self._captured.values():
            for graph in captured.graphs:
                graph.reset()
        self._captured.clear()

    def begin(self, inputs: torch.Tensor) -> None:
        """Launch the first graph, up to the first attention, for int32[5, size] of tokens, positions, slots, rows and
        adapters, padded to one of the sizes."""
        size = inputs.shape[1]
        self._integers[:, :size].copy_(inputs)
        self._captured[size].graphs[0].replay()

    def go_on(
        self, size: int, attention: StepAttention | MixedAttention, mix: DeltaStep | None = None
    ) -> tuple[torch.Tensor, Activations, torch.Tensor]:
        """Launch the attentions and the other graphs, after `begin`. Returns the tokens, int32[size], and what
        `Decoder.attend_all` does."""
        captured = self._captured[size]
        for graph, launch in zip_longest(captured.graphs[1:], self._between):
            launch(size, attention, mix)
            if graph is not None:
                graph.replay()
        return captured.tokens, captured.x, captured.residual

    def _heads(self, layer: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers of queries, [size, heads, D], and results, [size, heads, width of V], of a layer."""
        spec = self._model.spec
        if not spec.layers:
            return self._q[:size], self._out[:size]
        sizes, count = spec.layers[spec.attention_layers[layer]], size * spec.num_heads
        q, out = (
            x.flatten()[: count * dim].view(size, -1, dim)
            for x, dim in ((self._q, sizes.head_dim), (self._out, sizes.value_dim))
        )
        return q, out

    def _attend(self, layer: int, size: int, attention: StepAttention | MixedAttention) -> None:
        q, out = self._heads(layer, size)
        if ups := self._ups.get(layer):
            full = None if self._full is None else self._full[:size]
            attention.over_latents(layer, (q, full), ups, out, self._values[:size])
        else:
            attention.over_pages(layer, q, out)

    def _mix(self, number: int, net: RecurrentMixer, size: int, mix: DeltaStep | None) -> None:
        assert mix is not None and self._projected is not None and self._mixed is not None
        mix.put(number, net, tuple(x[:size] for x in self._projected), self._mixed[:size])

    def _capture(self, size: int) -> Captured:
        inputs = Inputs(*(row[:size] for row in self._integers))
        self._through(inputs, self._append(inputs), self._project)  # compiles kernels, makes workspaces
        torch.cuda.synchronize()
        graphs: list[torch.cuda.CUDAGraph] = []
        writes = self._append(inputs)
        self._between = []
        spec = self._model.spec
        most = len(spec.attention_layers) - spec.predicts + (ending(spec) > 0)
        most += len(spec.recurrent.layers) if spec.recurrent else 0

        def next_graph() -> None:
            graphs[-1].capture_end()
            if len(graphs) < most:
                self._begin(graphs)

        def attend(layer: int, heads: Projected) -> torch.Tensor:
            values = writes(layer, heads)
            self._between.append(lambda size, attention, _: self._attend(layer, size, attention))
            next_graph()
            return values

        def mix(number: int, net: RecurrentMixer, x: Activations) -> torch.Tensor:
            mixed = self._project(number, net, x)
            self._between.append(lambda size, _, mix: self._mix(number, net, size, mix))
            next_graph()
            return mixed

        with torch.cuda.stream(self._stream):
            self._begin(graphs)
            tokens, x, residual = self._through(inputs, attend, mix)
            if ending(spec):
                graphs[-1].capture_end()
        torch.cuda.synchronize()
        return Captured(inputs, graphs, tokens, x, residual)

    def _begin(self, graphs: list[torch.cuda.CUDAGraph]) -> None:
        graphs.append(torch.cuda.CUDAGraph())
        graphs[-1].capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def _append(self, inputs: Inputs) -> Callable[[int, Projected], torch.Tensor]:
        """The function that takes the place of attention in capture: it writes K and V to their pages, and queries to
        their buffer."""
        size = len(inputs.tokens)

        def attend(layer: int, heads: Projected) -> torch.Tensor:
            full = None if self._full is None else self._full[:size]
            q, out = self._heads(layer, size)
            append(self._pages(layer), heads, inputs.slots, q, full)
            if isinstance(heads, LatentHeads):
                self._ups[layer] = heads.ups
                return self._values[:size]
            return out

        return attend

    def _project(self, _: int, net: RecurrentMixer, x: Activations) -> torch.Tensor:
        """Takes the place of linear attention in capture: writes what a layer projects to its buffers."""
        assert self._projected is not None and self._mixed is not None
        count = len(x.values if isinstance(x, Fp8Activations) else x)
        for product, out in zip(products(net), self._projected, strict=True):
            product.put(x, out[:count])
        return self._mixed[:count]

    def _through(
        self, inputs: Inputs, attend: Callable[[int, Projected], torch.Tensor], mix: Mix
    ) -> tuple[torch.Tensor, Activations, torch.Tensor]:
        self._model.use_adapters(inputs.adapters)
        tokens = self._last_tokens.resolve(inputs.tokens, inputs.rows)
        return tokens, *self._model.attend_all(tokens, inputs.positions, attend, mix)
