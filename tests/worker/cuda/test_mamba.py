"""Kernels of Mamba-2 mixers against the reference in torch; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from radixrt.worker.cuda.recurrent import convolutions, delta_step, mamba, mamba_chunks
from radixrt.worker.cuda.recurrent.cutting import TOKENS, Cut, Runs
from radixrt.worker.cuda.recurrent.delta import LayerStates
from radixrt.worker.cuda.recurrent.delta_step import DeltaStep
from radixrt.worker.cuda.recurrent.mamba import MambaInputs
from radixrt.worker.execution.kv_pool import StatePool
from radixrt.worker.model.layers.mixers import Recurrence
from radixrt.worker.model.layers.recurrent.delta import short_conv
from radixrt.worker.model.layers.recurrent.mamba import gated, state_space
from radixrt.worker.model.layers.recurrent.mamba_mixer import Mamba
from radixrt.worker.model.parallel.sharding import Shard
from radixrt.worker.model.spec.delta_spec import DeltaSpec, ShortConvSpec
from radixrt.worker.model.spec.mamba_spec import MambaSpec
from tests.interpreter import slow_without_gpu
from tests.worker.cuda import recurrent
from tests.worker.cuda.recurrent import BOUNDS, DRAFTED, FEW_TOKENS, SLOTS, assert_alike, limit, parts_of

NONE: frozenset[int] = frozenset()
SMALL = MambaSpec(NONE, 4, 8, 2, 16, 4, conv_bias=True, bias=False, out_bias=False)
LIMITED = MambaSpec(NONE, 3, 16, 1, 8, 3, False, False, False, limits=(0.1, 2.0), norm="before_gate")
UNNORMED = MambaSpec(NONE, 4, 16, 1, 8, 2, conv_bias=True, bias=False, out_bias=False, norm="none")
ON_GPU = [
    replace(SMALL, heads=8, head_dim=64, state=128),
    replace(LIMITED, head_dim=64, state=64),
    replace(UNNORMED, heads=6, head_dim=128, groups=3, state=256),
]


def specs(device: torch.device) -> list[MambaSpec]:
    return ON_GPU if device.type == "cuda" else [SMALL, LIMITED, UNNORMED]


def some(device: torch.device) -> list[MambaSpec]:
    """For tests that take long in the interpreter: without one of `specs` there."""
    return ON_GPU if device.type == "cuda" else [SMALL, LIMITED]


class Case:
    """A mixer with random weights, states and projections of some tokens; states of several layers lie side by side."""

    def __init__(self, spec: MambaSpec, tokens: int, device: torch.device) -> None:
        self.spec = spec
        generator = torch.Generator().manual_seed(tokens)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

        def drawn(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(size, generator=generator).to(device, dtype)

        rates, skip, bias = (drawn(spec.heads, dtype=torch.float32) for _ in range(3))
        self.net = Mamba(
            spec, None, drawn(spec.channels, spec.kernel) / 2, drawn(spec.channels) if spec.conv_bias else None,
            -rates.exp(), skip, bias - 1, None if spec.norm == "none" else 1 + drawn(spec.values) / 8, 1e-5, False,
        )  # fmt: skip
        self.projected = drawn(tokens, spec.values + spec.channels + spec.heads)
        convs = drawn(SLOTS, 2, spec.channels, spec.kernel - 1)
        self._states = convs, drawn(SLOTS, 2, *spec.rule_shape, dtype=torch.float32) / 4

    @property
    def inputs(self) -> MambaInputs:
        return MambaInputs.of(self.net, self.projected)

    def states(self) -> LayerStates:
        """The first states of each slot, anew."""
        convs, rules = (x.clone() for x in self._states)
        return LayerStates(convs[:, 1], rules[:, 0])

    def expected(self, slots: list[int], bounds: list[int], states: LayerStates) -> torch.Tensor:
        """The mixer's results, with the states updated; from the convolution on in float32."""
        spec, net, inputs = self.spec, self.net, self.inputs
        where, counts = (torch.tensor(x, device=self.projected.device) for x in (slots, bounds))
        x = short_conv(inputs.x, net.conv, net.conv_bias, states.conv, where, counts).float()
        each = spec.groups * spec.state
        x, b, c = x.split((spec.values, each, each), dim=1)
        x, b, c = x.unflatten(1, (spec.heads, -1)), *(part.unflatten(1, (spec.groups, -1)) for part in (b, c))
        steps = F.softplus(inputs.steps.double() + net.step_bias).float().clamp(*spec.limits)
        out = state_space(x, steps, net.rates, b, c, net.skip, states.rule, where, counts, exact=True)
        return gated(out.flatten(1), inputs.z, net.norm, spec.groups, net.eps, spec.norm == "before_gate")

    def decode(self, runs: Runs, states: LayerStates, elements: int = mamba.DECODE_ELEMENTS) -> torch.Tensor:
        x, out = self.empty()
        convolutions.conv_step(self.inputs.x, self.net, states.conv, runs, x)
        mamba.decode(x, self.inputs, self.net, states, runs, out, elements=elements)
        mamba.finish(self.inputs, self.net, out)
        return out

    def by_chunks(self, *sequences: list, states: LayerStates, tokens: int = TOKENS) -> torch.Tensor:
        return self.by(mamba_chunks.by_chunks, *sequences, states=states, tokens=tokens)

    def by_tokens(self, *sequences: list, states: LayerStates) -> torch.Tensor:
        return self.by(mamba.by_tokens, *sequences, states=states)

    def by(self, way: Callable[..., None], *sequences: list, states: LayerStates, tokens: int = TOKENS) -> torch.Tensor:
        """By one of the two ways, for what `parts_of` takes."""
        lists, (x, out) = Cut.of(parts_of(*sequences), self.projected.device, tokens), self.empty()
        convolutions.conv_chunks(self.inputs.x, self.net, states.conv, lists, x)
        way(x, self.inputs, self.net, states, lists, out)
        mamba.finish(self.inputs, self.net, out)
        return out

    def empty(self) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = len(self.projected)
        return self.projected.new_empty((tokens, self.spec.channels)), self.projected.new_empty(
            (tokens, self.spec.values)
        )

    def part(self, tokens: slice) -> Case:
        """The same mixer with some of the tokens."""
        case = copy.copy(self)
        case.projected = self.projected[tokens]
        return case

    def sent(self, x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x).to(self.projected.device)


@pytest.mark.parametrize("elements", [mamba.DECODE_ELEMENTS, 64])
def test_one_token_each(elements, device):
    """Heads are computed whole and in parts."""
    for spec in specs(device):
        recurrent.check_one_token_each(Case(spec, 6, device), device, elements=elements)


@slow_without_gpu
@pytest.mark.parametrize(
    ("way", "many"), [("by_chunks", 1), pytest.param("by_chunks", 1 << 30, marks=pytest.mark.slow), ("by_tokens", 1)]
)
def test_many_tokens(way, many, device, monkeypatch):
    """Of sequences of 1, 2, 64, 65 and 130 tokens. Heads one by one and together."""
    monkeypatch.setattr(mamba_chunks, "MIN_JOINED_CHUNKS", many)
    bounds = FEW_TOKENS if way == "by_tokens" and device.type == "cpu" else BOUNDS
    for spec in specs(device):
        recurrent.check_many_tokens(Case(spec, bounds[-1], device), way, bounds, device)


def test_chunks_of_another_length(device):
    for spec in specs(device):
        case, bounds = Case(spec, 150, device), [0, 130, 150]
        found, expected = case.states(), case.states()
        out = case.by_chunks([1, 2], bounds, states=found, tokens=128)
        assert_alike((out, found), (case.expected([1, 2], bounds, expected), expected), limit(device))


def test_padding_is_not_stored(device):
    recurrent.check_padding_is_not_stored(Case(specs(device)[0], 40, device))


@slow_without_gpu
@pytest.mark.usefixtures("steady_products")
@pytest.mark.parametrize(
    ("way", "first", "end", "all_"),
    [("by_chunks", 20, 90, 150), pytest.param("by_tokens", 3, 14, 20, marks=pytest.mark.slow)],
)
def test_results_do_not_depend_on_what_else_is_in_the_step(way, first, end, all_, device):
    for spec in some(device):
        recurrent.check_alone_as_in_company(Case(spec, all_, device), way, first, end, all_)


@pytest.mark.slow
def test_token_by_token_it_does_not_matter_where_steps_end(device):
    for spec in specs(device):
        recurrent.check_tokens_do_not_depend_on_steps(Case(spec, 20, device))


@slow_without_gpu
def test_chunks_give_what_tokens_give_after_steps_that_end_anywhere(device):
    for spec in some(device):
        recurrent.check_chunks_in_several_steps(Case(spec, 200, device), device)


def test_decays_that_underflow_leave_no_trace(device):
    """Steps that forget all, between steps that forget nearly nothing, whose softplus is small."""
    for spec in specs(device):
        case = Case(spec, 100, device)
        case.inputs.steps.fill_(-9.0)
        case.inputs.steps[::7] = 60.0
        found, expected = case.states(), case.states()
        out = case.by_chunks([1, 2], [0, 70, 100], states=found)
        real = case.expected([1, 2], [0, 70, 100], expected)
        assert_alike((out, found), (real, expected), 4 * limit(device))


def test_small_time_steps_are_exact(device):
    """Of 1 + exp(-14) a float32 keeps few digits."""
    spec = specs(device)[0]
    case = Case(spec, 6, device)
    case.inputs.steps.copy_(torch.linspace(-14.0, -2.0, 6)[:, None].expand(6, spec.heads))
    case.net.step_bias.zero_()
    found, expected = case.states(), case.states()
    for states in (found, expected):
        states.rule.zero_()
    slots = torch.arange(1, 7, dtype=torch.int32, device=device)
    case.decode(Runs.of_ones(slots), found)
    case.expected(slots.tolist(), list(range(7)), expected)
    for slot in range(1, 7):
        wrong = (found.rule[slot] - expected.rule[slot]).norm() / expected.rule[slot].norm()
        assert wrong < limit(device), slot


@slow_without_gpu
@pytest.mark.usefixtures("steady_products")
@pytest.mark.parametrize("way", ["by_chunks", "by_tokens"])
def test_states_are_stored_within_a_step(way, device):
    stops = recurrent.stops(way, device)
    for spec in some(device):
        recurrent.check_states_within_a_step(Case(spec, stops[2] + 5, device), way, stops)


@slow_without_gpu
def test_a_step_of_a_layer(device):
    """Decodes and parts of sequences, by the kernels that their step has; also where these compute token by token."""
    for spec in specs(device):
        spec = replace(spec, layers=frozenset({0, 1}))
        case = Case(spec, 80, device)
        pools = [StatePool(spec, SLOTS, case.projected.dtype, device) for _ in range(3)]
        for pool in pools:
            pool.convs.copy_(case._states[0])
            pool.rules.copy_(case._states[1])
        parts = parts_of([2, 5, 1, 6], [0, 1, 2, 72, 80], [(1, 30, 4)])
        first = Runs.of_ones(torch.tensor([2, 5], dtype=torch.int32, device=device))
        lists, every = (Cut.of(some, device) for some in (parts.after(2), parts))
        steps = [DeltaStep(pools[0], first, lists), DeltaStep(pools[1], None, every, by_tokens=True)]
        net = replace(case.net, projection=lambda x: x)
        there = (torch.from_numpy(x).to(device) for x in (parts.sources, parts.bounds, parts.targets))
        real = Recurrence(pools[2].layer, *there)(1, net, case.projected)
        for step, pool in zip(steps, pools, strict=False):
            out = step(1, net, case.projected)
            found, expected = LayerStates(*pool.layer(1)), LayerStates(*pools[2].layer(1))
            assert_alike((out, found), (real, expected), 1.5 * limit(device))
            assert torch.equal(pool.rules[:, 0], pools[2].rules[:, 0])
        ones, part = DeltaStep(pools[0], first, by_tokens=True), case.projected[:2]
        two = Cut.of(parts_of([2, 5], [0, 1, 2]), device)
        assert torch.equal(ones(0, net, part), DeltaStep(pools[1], None, two, by_tokens=True)(0, net, part))


@pytest.mark.parametrize("norm", ["after_gate", "before_gate"])
def test_a_norm_over_the_heads_of_several_ranks(norm, device):
    """Four ranks have six heads each, of two groups of twelve."""
    spec, ranks = replace(specs(device)[0], heads=24, groups=2, norm=norm), 4
    case = Case(spec, 9, device)
    out, z = torch.randn_like(case.inputs.z), case.inputs.z
    first = norm == "before_gate"
    expected = gated(out, z, case.net.norm, 2, 1e-5, first)
    whole = out.float() if first else out.float() * F.silu(z.float())
    means = whole.unflatten(1, (ranks, -1)).square().mean(2)
    for rank in range(ranks):

        def gather(mine, rank=rank):
            assert torch.allclose(mine, means[:, rank : rank + 1], rtol=1e-4)
            return means

        part = slice(rank * spec.values // ranks, (rank + 1) * spec.values // ranks)
        own = replace(spec, heads=6, groups=1, group_ranks=2)
        group = SimpleNamespace(shard=Shard(rank, ranks), gather=gather)
        net = replace(case.net, spec=own, norm=case.net.norm[part], group=group)
        found = out[:, part].contiguous()
        mamba.finish(MambaInputs(z[:, part], None, None), net, found)
        assert torch.allclose(found.float(), expected[:, part].float(), rtol=limit(device), atol=limit(device))


@pytest.mark.parametrize("by_tokens", [False, True])
def test_drafted_tokens(by_tokens, device):
    for spec in specs(device):
        case = Case(spec, len(DRAFTED[0]), device)
        net = replace(case.net, projection=lambda x: x)
        recurrent.check_drafts(
            case, by_tokens, lambda step, rows, case=case, net=net: step(1, net, case.projected[rows])
        )


@slow_without_gpu
@pytest.mark.parametrize("counts", [[1, 1, 1], [70, 20]])
def test_the_benchmark_checks_its_answers(counts, device, monkeypatch):
    """With a small shape, in float32; all that it times is run once."""
    if device.type == "cuda":
        pytest.skip("for the interpreter")
    from bench import mamba as bench

    monkeypatch.setattr(bench, "DEVICE", device)
    monkeypatch.setattr(bench, "drawn", lambda *size, dtype=None: torch.randn(size))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for norm in ("after_gate", "none"):
        case = bench.Case(bench.shape(4, 8, 2, 16, norm), counts)
        if case.net.norm is not None:
            case.net = replace(case.net, norm=case.net.norm.float())
        for way in (case.way, case.by_tokens):
            assert max(case.errors(way).values()) < 1e-5
        assert case.limit_ms({"copy_gbs": 3000.0, "tflops": 700.0}) > 0 and case.torch_ms() > 0


def test_what_has_no_kernels():
    assert [delta_step.no_kernels(spec) for spec in ON_GPU] == [""] * 3
    assert "heads of 24 elements" in delta_step.no_kernels(replace(ON_GPU[0], head_dim=24))
    assert "12 in their state" in delta_step.no_kernels(replace(ON_GPU[0], state=12))
    assert "convolutions of 8 inputs" in delta_step.no_kernels(replace(ON_GPU[0], kernel=8))


@pytest.mark.parametrize("changes", [{"head_dim": 32}, {"state": 16}, {"state": 512}])
def test_what_a_gpu_computes_token_by_token(changes):
    gpu = torch.device("cuda")
    assert not any(delta_step.by_tokens(spec, torch.bfloat16, gpu) for spec in ON_GPU)
    assert delta_step.by_tokens(replace(ON_GPU[0], **changes), torch.bfloat16, gpu)
    assert delta_step.by_tokens(ON_GPU[0], torch.float32, gpu)


def test_bytes_of_a_chunk():
    """A state of each chunk; of linear attention the convolution's results and two products of keys."""
    assert delta_step.chunk_bytes(ON_GPU[0], 2) == 2 * 8 * 64 * 128
    assert delta_step.chunk_bytes(DeltaSpec(NONE, 2, 4, 128, 64, 4), 2) == 2 * 64 * (2 * 2 * 128 + 4 * 64 + 2 * 4 * 64)
    assert delta_step.chunk_bytes(ShortConvSpec(NONE, 64, 3, False), 2) == 0


def test_heads_that_are_computed_together():
    """As many as divide a group, where there are enough of them; a power of two."""
    together = partial(mamba_chunks.together, most=8)
    spec = replace(SMALL, heads=128, groups=8)
    assert [together(spec, chunks) for chunks in (1, 15, 16, 500)] == [1, 1, 8, 8]
    assert together(replace(spec, heads=24, groups=1), 500) == 8
    assert together(replace(spec, heads=24, groups=2), 500) == 4
    assert together(replace(spec, heads=25, groups=1), 500) == 1


def test_columns_of_a_program():
    """All of a state's, if one sequence has enough heads for the chip."""
    spec = replace(SMALL, heads=128, head_dim=64, state=128)
    columns = partial(mamba_chunks.columns, most=128)
    assert [columns(spec, n) for n in (1, 2)] == [128, 64]
    assert columns(replace(spec, heads=64), 1) == columns(replace(spec, heads=64, state=64), 1) == 64
    assert columns(replace(spec, heads=24, head_dim=128, state=256), 1) == 64
    assert columns(replace(spec, heads=64, head_dim=128), 1) == 128
    assert mamba_chunks.columns(spec, 1, 32) == 32 and columns(SMALL, 1) == 16
