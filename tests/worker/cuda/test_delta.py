"""Kernels of linear attention against the reference in torch; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from radixrt.worker.cuda.recurrent import convolutions, delta, delta_chunks, delta_step
from radixrt.worker.cuda.recurrent.cutting import Cut, Runs, cut
from radixrt.worker.cuda.recurrent.delta import DeltaInputs, LayerStates
from radixrt.worker.execution.kv_pool import StatePool
from radixrt.worker.model.layers.recurrent.delta import gated_delta, gated_norm, short_conv
from radixrt.worker.model.layers.recurrent.delta_net import DeltaNet
from radixrt.worker.model.spec.delta_spec import DeltaSpec, ShortConvSpec
from tests.interpreter import slow_without_gpu
from tests.worker.cuda import recurrent
from tests.worker.cuda.recurrent import BOUNDS, DRAFTED, FEW_TOKENS, SLOTS, assert_alike, limit, parts_of

SMALL = DeltaSpec(frozenset(), 2, 4, 16, 32, 4)
WIDE = DeltaSpec(frozenset(), 1, 3, 32, 16, 3, beta_factor=2.0)
ODD = DeltaSpec(frozenset(), 2, 2, 12, 64, 4, beta_factor=2.0)
EACH = DeltaSpec(frozenset(), 2, 2, 16, 32, 4, rank=8)
ON_GPU = [DeltaSpec(frozenset(), 2, 4, 128, 128, 4), DeltaSpec(frozenset(), 1, 3, 64, 128, 3, beta_factor=2.0)]
ON_GPU.append(DeltaSpec(frozenset(), 2, 2, 96, 192, 4, beta_factor=2.0))
ON_GPU.append(DeltaSpec(frozenset(), 2, 2, 128, 128, 4, rank=128))


def specs(device: torch.device) -> list[DeltaSpec]:
    """The last one has a decay for each element of a key, the one before heads whose width is no power of 2."""
    return ON_GPU if device.type == "cuda" else [SMALL, WIDE, ODD, EACH]


def some(device: torch.device) -> list[DeltaSpec]:
    """For tests that take long in the interpreter: without half of `specs` there."""
    return ON_GPU if device.type == "cuda" else [WIDE, EACH]


class Case:
    """A layer with random weights, states and inputs of some tokens; its rows are parts of longer ones, and states of
    several layers lie side by side."""

    def __init__(self, spec: DeltaSpec, tokens: int, device: torch.device) -> None:
        self.spec = spec
        generator = torch.Generator().manual_seed(tokens)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

        def drawn(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(size, generator=generator).to(device, dtype)

        heads = spec.value_heads
        decays = heads * spec.key_dim if spec.rank else heads
        rates, dt_bias = -drawn(heads, dtype=torch.float32).exp(), drawn(decays, dtype=torch.float32)
        norm = 1 + drawn(spec.value_dim) / 8
        weight, ups = drawn(spec.channels, spec.kernel) / 2, (None, None) if spec.rank else None
        self.net = DeltaNet(spec, None, None, weight, rates, dt_bias, norm, 1e-6, False, ups)
        x, z = drawn(tokens, spec.channels + spec.values).split((spec.channels, spec.values), dim=1)
        b, a = drawn(tokens, heads + decays).split((heads, decays), dim=1)
        self.inputs = DeltaInputs(x, z, b, a)
        convs = drawn(SLOTS, 2, spec.channels, spec.kernel - 1)
        self._states = convs, drawn(SLOTS, 2, *spec.rule_shape, dtype=torch.float32) / 4

    def states(self) -> LayerStates:
        """The first states of each slot, anew."""
        convs, rules = (x.clone() for x in self._states)
        return LayerStates(convs[:, 1], rules[:, 0])

    def expected(self, slots: list[int], bounds: list[int], states: LayerStates) -> torch.Tensor:
        """The layer's results, with the states updated."""
        spec, inputs, net = self.spec, self.inputs, self.net
        where, counts = torch.tensor(slots), torch.tensor(bounds)
        x = short_conv(inputs.x, net.conv, None, states.conv, where, counts)
        q, k, v = x.split((spec.keys, spec.keys, spec.values), dim=1)
        q, k, v = (
            part.unflatten(1, (n, -1)) for part, n in ((q, spec.key_heads), (k, spec.key_heads), (v, spec.value_heads))
        )
        decay = torch.nn.functional.softplus(inputs.a.float() + net.dt_bias)
        decay = net.rates[:, None] * decay.unflatten(1, (-1, spec.key_dim)) if spec.rank else net.rates * decay
        out = gated_delta(
            q, k, v, decay, spec.beta_factor * inputs.b.float().sigmoid(), states.rule, where, counts, exact=True
        )
        z = inputs.z.unflatten(1, out.shape[1:])
        return gated_norm(out, z, net.norm, net.eps, "sigmoid" if spec.rank else "silu")

    def empty(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Places for results of the convolution and of the layer."""
        spec, x = self.spec, self.inputs.x
        return x.new_empty(x.shape), x.new_empty((len(x), spec.value_heads, spec.value_dim))

    def decode(self, runs: Runs, states: LayerStates, tokens: int = 0) -> torch.Tensor:
        """With the tile for so many `tokens`, by default those of `runs`."""
        x, out = self.empty()
        convolutions.conv_step(self.inputs.x, self.net, states.conv, runs, x)
        tile = delta.decode_tile(self.spec, tokens or len(runs.slots))
        delta.by_tokens(x, self.inputs, self.net, states, runs, out, tile=tile)
        return out

    def by_chunks(self, *sequences: list, states: LayerStates) -> torch.Tensor:
        lists, (_, out) = self.lists(*sequences), self.empty()
        x = delta_chunks.convolved(self.net, self.inputs.x, states, lists)
        delta_chunks.by_chunks(x, self.inputs, self.net, states, lists, out)
        return out

    def by_tokens(self, *sequences: list, states: LayerStates) -> torch.Tensor:
        lists, (x, out) = self.lists(*sequences), self.empty()
        convolutions.conv_chunks(self.inputs.x, self.net, states.conv, lists, x)
        delta.by_tokens(x, self.inputs, self.net, states, lists, out)
        return out

    def lists(self, *sequences: list) -> Cut:
        """For what `parts_of` takes."""
        return Cut.of(parts_of(*sequences), self.inputs.x.device)

    def part(self, tokens: slice) -> Case:
        """The same layer with some of the tokens."""
        case, x = copy.copy(self), self.inputs
        case.inputs = DeltaInputs(x.x[tokens], x.z[tokens], x.b[tokens], x.a[tokens])
        return case

    def sent(self, x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x).to(self.inputs.x.device)


@pytest.mark.parametrize("tokens", [most for most, _ in delta.DECODES])
def test_one_token_each(tokens, device):
    """With each kind of tile."""
    for spec in specs(device)[:3]:
        recurrent.check_one_token_each(Case(spec, 6, device), device, tokens=tokens)


WAYS = [("by_chunks", 32), ("by_tokens", 0), pytest.param("by_chunks", 0, marks=pytest.mark.slow)]


@slow_without_gpu
@pytest.mark.parametrize(
    ("way", "few"),
    [("by_chunks", 32), *(pytest.param(*way, marks=pytest.mark.slow) for way in (("by_chunks", 0), ("by_tokens", 0)))],
)
def test_many_tokens(way, few, device, monkeypatch):
    """Of sequences of 1, 2, 64, 65 and 130 tokens. With the convolution of whole chunks and of parts."""
    monkeypatch.setattr(convolutions, "MAX_SPLIT_CHUNKS", few)
    bounds = FEW_TOKENS if way == "by_tokens" and device.type == "cpu" else BOUNDS
    for spec in specs(device):
        recurrent.check_many_tokens(Case(spec, bounds[-1], device), way, bounds, device)


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
    for spec in some(device):
        recurrent.check_tokens_do_not_depend_on_steps(Case(spec, 20, device))


@slow_without_gpu
def test_chunks_give_what_tokens_give_after_steps_that_end_anywhere(device):
    for spec in some(device):
        recurrent.check_chunks_in_several_steps(Case(spec, 200, device), device)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_equal_keys_are_as_exact_as_others(noise, device):
    """A run of one token that is hardly forgotten: products of all corrections would have terms of 10^17."""
    for spec in specs(device)[::3]:
        assert_equal_keys_are_exact(spec, noise, device)


def assert_equal_keys_are_exact(spec, noise, device):
    case = Case(spec, 190, device)
    inputs = case.inputs
    inputs.x.copy_(inputs.x[:1] + noise * inputs.x)
    inputs.a.fill_(-8.0)
    inputs.b.fill_(4.0)
    case.net.dt_bias.zero_()
    found, expected = case.states(), case.states()
    out = case.by_chunks([1], [0, 190], states=found)
    real = case.expected([1], [0, 190], expected)
    assert_alike((out, found), (real, expected), 3 * limit(device))


def test_decays_that_underflow_leave_no_trace(device):
    for spec in specs(device)[::3]:
        case = Case(spec, 100, device)
        case.inputs.a[::7] = 60.0
        found, expected = case.states(), case.states()
        out = case.by_chunks([1, 2], [0, 70, 100], states=found)
        real = case.expected([1, 2], [0, 70, 100], expected)
        assert_alike((out, found), (real, expected), limit(device))


@pytest.mark.parametrize("by_tokens", [False, True])
def test_decodes_beside_chunks(by_tokens, device, monkeypatch):
    """By what a runner calls: decodes come first."""
    for spec in specs(device):
        case = Case(spec, 3 + 12, device)
        monkeypatch.setattr(DeltaInputs, "of", lambda *_, case=case: case.inputs)
        pool = StatePool(replace(spec, layers=frozenset({0, 1})), SLOTS, case.inputs.x.dtype, device)
        found, expected = LayerStates(*pool.layer(1)), case.states()
        found.conv.copy_(expected.conv)
        found.rule.copy_(expected.rule)
        slots, bounds = [3, 1, 6, 2], [0, 1, 2, 3, 15]
        lists = Cut.of(parts_of(slots, bounds).after(3), device)
        first = Runs.of_ones(torch.tensor(slots[:3], dtype=torch.int32, device=device))
        step = delta_step.DeltaStep(pool, first, lists, by_tokens)
        _, out = case.empty()
        step.put(1, case.net, (out, out), out)
        real = case.expected(slots, bounds, expected)
        for rows in (slice(3), slice(3, 15)):
            assert_alike((out[rows], found), (real[rows], expected), limit(device))


@pytest.mark.parametrize("by_tokens", [False, True])
def test_drafted_tokens(by_tokens, device, monkeypatch):
    """With tiles that do not depend on how many tokens a step has."""
    monkeypatch.setattr(delta, "DECODES", delta.DECODES[-1:])
    for spec in some(device):
        case = Case(spec, len(DRAFTED[0]), device)

        def put(step: delta_step.DeltaStep, rows: slice, case: Case = case) -> torch.Tensor:
            part = case.part(rows)
            monkeypatch.setattr(DeltaInputs, "of", lambda *_: part.inputs)
            _, out = part.empty()
            step.put(1, case.net, (out, out), out)
            return out

        recurrent.check_drafts(case, by_tokens, put)


def test_copies_of_states(device):
    """Checkpoints and live states, several at once; from slot 0: zeros."""
    spec = replace(SMALL, layers=frozenset({0, 2}))
    pool = StatePool(spec, SLOTS, torch.float32, device)
    for states in (pool.convs, pool.rules):
        states[1:].copy_(torch.randn(states[1:].shape))
    before = pool.convs.clone(), pool.rules.clone()
    copies = np.array([[3, 0, 3], [1, 2, 6]], dtype=np.int32)
    delta_step.copy(pool, torch.from_numpy(copies).to(device))
    for states, old in zip((pool.convs, pool.rules), before, strict=True):
        assert torch.equal(states[[1, 6, 3]], old[[3, 3, 3]]) and not states[2].any()
        assert torch.equal(states[[0, 4, 5]], old[[0, 4, 5]])


def test_what_has_no_kernels():
    assert [delta_step.no_kernels(spec) for spec in ON_GPU] == [""] * 4
    assert "heads of width 12" in delta_step.no_kernels(replace(ON_GPU[0], value_dim=12))
    assert "convolutions of 8 inputs" in delta_step.no_kernels(replace(ON_GPU[0], kernel=8))
    assert "convolutions of 9 inputs" in delta_step.no_kernels(ShortConvSpec(frozenset(), 64, 9, False))


@pytest.mark.parametrize("changes", [{"key_dim": 32}, {"value_dim": 96}, {"key_dim": 96, "rank": 8}])
def test_what_a_gpu_computes_token_by_token(changes):
    gpu = torch.device("cuda")
    assert not any(delta_step.by_tokens(spec, torch.bfloat16, gpu) for spec in ON_GPU)
    assert delta_step.by_tokens(replace(ON_GPU[0], **changes), torch.bfloat16, gpu)
    assert delta_step.by_tokens(ON_GPU[0], torch.float32, gpu)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_inverses_without_diagonal_blocks(noise, device, monkeypatch):
    """Of the kernel within chunks, as above."""
    tiles = delta_chunks.Tiles(block=1)
    monkeypatch.setattr(delta_chunks, "by_chunks", partial(delta_chunks.by_chunks, tiles=tiles))
    test_equal_keys_are_as_exact_as_others(noise, device)


def test_lists_of_chunks():
    """First token, tokens, slot; first token and end of the sequence; slot to store to. Long sequences come first."""
    parts = parts_of([2, 9, 4], [0, 10, 20, 150])
    chunks, sequences = cut(parts.after(1))
    long = [[at, count, 4, 20, 150, 0] for at, count in ((20, 64), (84, 64), (148, 2))]
    assert chunks.tolist() == [[10, 10, 9, 10, 20, 0], *long]
    assert sequences.tolist() == [[1, 3, 4], [0, 1, 9]]
    assert chunks.dtype == sequences.dtype == np.int32
    assert parts.owners.tolist() == [0, 1, 2] and parts.sources.tolist() == parts.targets.tolist() == [2, 9, 4]


def test_lists_are_cut_where_states_are_stored():
    parts = parts_of([2, 9, 4], [0, 1, 101, 231], [(4, 100, 7), (9, 64, 5), (4, 30, 6)])
    assert parts.owners.tolist() == [0, 1, 1, 2, 2, 2]
    assert parts.bounds.tolist() == [0, 1, 65, 101, 131, 201, 231]
    assert parts.sources.tolist() == [2, 9, 5, 4, 6, 7] and parts.targets.tolist() == [2, 5, 9, 6, 7, 4]
    chunks, sequences = cut(parts.after(1))
    one, other = [9, 1, 101], [4, 101, 231]
    assert chunks.tolist()[:2] == [[1, 64, *one, 5], [65, 36, *one, 0]]
    assert chunks.tolist()[2:] == [
        [101, 30, *other, 6], [131, 64, *other, 0], [195, 6, *other, 7], [201, 30, *other, 0]
    ]  # fmt: skip
    assert sequences.tolist() == [[2, 4, 4], [0, 2, 9]]


@slow_without_gpu
@pytest.mark.usefixtures("steady_products")
@pytest.mark.parametrize(("way", "few"), WAYS)
def test_states_are_stored_within_a_step(way, few, device, monkeypatch):
    monkeypatch.setattr(convolutions, "MAX_SPLIT_CHUNKS", few)
    stops = recurrent.stops(way, device)
    for spec in some(device):
        recurrent.check_states_within_a_step(Case(spec, stops[2] + 5, device), way, stops)


def test_tiles_of_decodes():
    few, some_, many = (tile for _, tile in delta.DECODES)
    wanted = [few, few, some_, some_, many, many]
    assert [delta.decode_tile(ON_GPU[0], tokens) for tokens in (1, 4, 5, 32, 33, 300)] == wanted
    assert delta.decode_tile(replace(ON_GPU[0], value_dim=96), 300) == delta.Tile(32, many.warps)
    assert delta.decode_tile(ON_GPU[3], 300) == delta.decode_tile(replace(ON_GPU[0], key_dim=256), 1) == delta.SLIM
