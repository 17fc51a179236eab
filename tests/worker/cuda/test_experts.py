"""The launches that a mixture of experts takes, against plain torch; in Triton's interpreter where there is no GPU.
(It rounds to FP8 without a carry: see test_scaled.py. What is compared with is rounded by the same kernels.)"""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from radixrt.worker.cuda.elementwise import kernels
from radixrt.worker.cuda.linear import gemm
from radixrt.worker.cuda.linear.invariant import GROUP
from radixrt.worker.cuda.linear.quantize_activations import quantize
from radixrt.worker.cuda.moe import experts as fused
from radixrt.worker.cuda.moe import fp8_experts, routing
from radixrt.worker.model.layers.fp8 import BLOCK, FP8, LIMIT, Fp8Activations, Fp8Scaling, Fp8Weight
from radixrt.worker.model.layers.linear import Linear
from radixrt.worker.model.layers.moe import Experts, ScaledStack
from radixrt.worker.model.layers.ops import TorchOps
from radixrt.worker.model.spec.expert_spec import Routing
from radixrt.worker.model.spec.spec import SQUARED_RELU

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # exp overflows to infinity, as it should


def make(count: int, chosen: int, hidden: int, inner: int, device: torch.device, **changes) -> Experts:
    generator = torch.Generator().manual_seed(count * hidden)
    router, gate_up, down = (
        torch.randn(shape, generator=generator).to(device)
        for shape in ((count, hidden), (count, 2 * inner, hidden), (count, hidden, inner))
    )
    kind = {"normalized": True, "activation": "silu", "batch_invariant": False} | changes
    if kind["activation"] == SQUARED_RELU:
        gate_up = gate_up[:, :inner].contiguous()
    return Experts(Linear(router, None, kind["batch_invariant"]), 0.1 * gate_up, 0.1 * down, chosen, **kind)


def make_clamped(count: int, chosen: int, hidden: int, inner: int, device: torch.device, **changes) -> Experts:
    """As gpt-oss has them: with biases, activations that are clamped."""
    torch.manual_seed(hidden)
    biases = {"gate_up_bias": 4 * torch.randn(count, 2 * inner, device=device)}
    biases["down_bias"] = torch.randn(count, hidden, device=device)
    return make(count, chosen, hidden, inner, device, **(biases | {"activation": "clamped_swiglu"} | changes))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("count", "chosen"), [(4, 1), (6, 2), (60, 7), (8, 8)])
def test_route(count, chosen, normalized, device):
    experts = make(count, chosen, 16, 8, device, normalized=normalized)
    x = torch.randn(9, 16, device=device)
    weights, numbers = routing.route(experts.router(x), chosen, normalized)
    expected_weights, expected = experts.route(x)
    assert torch.equal(numbers.long(), expected)
    assert error(weights, expected_weights) < 1e-6


def test_of_equally_likely_experts_the_first_are_chosen(device):
    weights, numbers = routing.route(torch.tensor([[1.0] * 6, [0, 2, 0, 2, 0, 2]], device=device), 4, True)
    assert numbers.tolist() == [[0, 1, 2, 3], [1, 3, 5, 0]]
    assert weights[0].tolist() == [0.25] * 4


def test_nan_chooses_experts_that_exist(device):
    """What it makes of them is NaN, which fails the request; other tokens know nothing of it."""
    logits = torch.randn(4, 5, device=device)
    logits[1, 3] = torch.nan
    logits[2] = torch.nan
    weights, numbers = routing.route(logits, 2, True)
    assert ((numbers >= 0) & (numbers < 5)).all()
    assert weights.isnan().any(1).tolist() == [False, True, True, False]
    alone, _ = routing.route(logits[:1], 2, True)
    assert torch.equal(weights[:1], alone)


@pytest.mark.parametrize(
    ("rows", "block", "at_once"), [(0, 8, 9999), (2, 8, 9999), (16, 64, 9999), (0, 8, 0), (16, 8, 0)]
)
@pytest.mark.parametrize(("tokens", "count", "chosen"), [(1, 4, 2), (13, 5, 3), (6, 34, 1), (300, 1, 1), (0, 3, 2)])
def test_sort(tokens, count, chosen, rows, block, at_once, device, monkeypatch):
    """Every row is in one place, with its expert's, in the order of the batch, and in one tile of that expert; also
    where an expert has more tiles than are written at a time. In one launch and in three."""
    monkeypatch.setattr(routing, "SORTED", (block,))
    monkeypatch.setattr(routing, "AT_ONCE", at_once)
    monkeypatch.setattr(routing, "BLOCK", block)
    monkeypatch.setattr(routing, "BLOCKS", 2)
    numbers = torch.rand(tokens, count).argsort(1)[:, :chosen].int().to(device)
    if tokens > 10:
        numbers[:, 0] = numbers[:, 0].clamp(max=count // 2)  # some experts have many rows, others none
    order = routing.sort(numbers, count, rows)
    places, of_tokens, ends = (x.cpu() for x in (order.places, order.tokens, order.ends))
    assert sorted(places.flatten().tolist()) == list(range(tokens * chosen))
    assert torch.equal(of_tokens[places.long()], torch.arange(tokens).int()[:, None].expand(-1, chosen))
    counts = numbers.cpu().flatten().long().bincount(minlength=count)
    assert torch.equal(ends, counts.cumsum(0).int())
    owner = torch.repeat_interleave(torch.arange(count), counts)
    assert torch.equal(owner[places.long()].int(), numbers.cpu())
    for expert in range(count):
        mine = of_tokens[owner == expert].tolist()
        assert mine == sorted(mine)
    covered = []
    for expert, first, held in order.tiles.tolist():
        assert held <= rows
        assert (owner[first : first + held] == expert).all()
        covered += range(first, first + held)
    assert covered == (list(range(tokens * chosen)) if rows else [])


def test_what_is_sorted_begins_where_kernels_are_compiled_for(device):
    """At 16 bytes, whatever the number of tokens: else each of them is compiled for each place in which it may begin,
    while all wait."""
    for tokens, count, chosen in ((5, 6, 2), (3, 13, 7), (1, 5, 1)):
        order = routing.sort(torch.rand(tokens, count).argsort(1)[:, :chosen].int().to(device), count, 16)
        for piece in (order.places, order.tokens, order.ends, order.tiles):
            assert piece.data_ptr() % 16 == 0


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    ("tokens", "count", "chosen", "hidden", "inner", "activation"),
    [
        (1, 4, 2, 32, 24, "silu"),
        (7, 6, 2, 40, 24, "gelu"),
        (17, 4, 3, 136, 16, "gelu_pytorch_tanh"),
        (40, 3, 2, 32, 136, "silu"),
        (1, 4, 2, 32, 24, SQUARED_RELU),
        (40, 3, 2, 40, 136, SQUARED_RELU),
    ],
)
def test_all_of_it(tokens, count, chosen, hidden, inner, activation, invariant, device):
    """Added to the residual stream: the kinds of tiles, sizes that tiles divide and that they do not."""
    experts = make(count, chosen, hidden, inner, device, activation=activation, batch_invariant=invariant)
    x, residual = torch.randn(2, tokens, hidden, device=device)
    expected, found = residual.clone(), residual.clone()
    experts.one_by_one(x, expected, TorchOps())
    fused.add(experts, x, found)
    assert error(found - residual, expected - residual) < 1e-5


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("biased", "changes"), [(True, {}), (False, {}), (False, {"batch_invariant": True})])
def test_logits_of_few_tokens(biased, changes, wide, device, monkeypatch):
    """By programs that divide K, in the dtype of the model or in float32."""
    monkeypatch.setattr(gemm, "of_hopper", lambda device: True)
    gemm.tile_for.cache_clear()
    taken, real = [], gemm.multiply
    monkeypatch.setattr(gemm, "multiply", lambda *args, **more: (taken.append(more["splits"]), real(*args, **more)))
    half = torch.bfloat16 if device.type == "cuda" else torch.float16
    experts = make(6, 2, 1024, 8, device, routing=Routing(float32_logits=wide), **changes)
    bias = torch.randn(6, device=device).to(half) if biased and not wide else None
    weight = experts.router.weight.to(half)
    experts = dataclasses.replace(experts, router=Linear(weight, bias, experts.batch_invariant))
    for tokens in (1, 5, 40):
        x = torch.randn(tokens, 1024, device=device).to(half)
        found, expected = fused._logits(experts, x), experts.logits(x)
        assert found.dtype == expected.dtype == (torch.float32 if wide else half)
        assert error(found, expected) < (1e-4 if wide else 4e-3)
    assert taken == ([] if changes else [4, 4])
    gemm.tile_for.cache_clear()


@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_in_a_smaller_space(tokens, device):
    """Without gates, as in the largest models of Nemotron 3; the router sees the hidden states."""
    experts = make(4, 2, 24, 40, device, activation=SQUARED_RELU)
    weights = (torch.randn(shape, device=device) / 4 for shape in ((4, 32), (24, 32), (32, 24)))
    router, into, back = (Linear(weight, None, False) for weight in weights)
    experts = dataclasses.replace(experts, router=router, latent=(into, back))
    x, residual = torch.randn(2, tokens, 32, device=device)
    expected, found = residual.clone(), residual.clone()
    experts.one_by_one(x, expected, TorchOps())
    fused.add(experts, x, found)
    assert error(found - residual, expected - residual) < 1e-5


@pytest.mark.parametrize(("tokens", "count"), [(1, 4), (7, 6), (100, 2)])
def test_experts_with_scaled_inputs(tokens, count, device):
    """Scores are far from 0 and 1."""
    kind = Routing(sigmoid=True, unbiased=True, scales_inputs=True, min_weight_sum=1e-20)
    experts = make(count, 1, 40, 24, device, normalized=False, routing=kind)
    x = 0.2 * torch.randn(tokens, 40, device=device)
    expected, found = torch.zeros_like(x), torch.zeros_like(x)
    experts.one_by_one(x, expected, TorchOps())
    fused.add(experts, x, found)
    assert error(found, expected) < 1e-5


@pytest.mark.parametrize("changes", [{}, {"down_bias": None}, {"batch_invariant": True}])
@pytest.mark.parametrize(("tokens", "count", "hidden", "inner"), [(1, 4, 40, 24), (7, 6, 32, 20), (40, 3, 136, 32)])
def test_experts_with_biases(tokens, count, hidden, inner, changes, device):
    """Of a rank that is not the first, down has none."""
    experts = make_clamped(count, 2, hidden, inner, device, **changes)
    x, residual = 3 * torch.randn(2, tokens, hidden, device=device)
    expected, found = residual.clone(), residual.clone()
    experts.one_by_one(x, expected, TorchOps())
    fused.add(experts, x, found)
    assert error(found - residual, expected - residual) < 1e-5
    gate_up = F.linear(x, experts.gate_up.flatten(0, 1)) + experts.gate_up_bias.flatten()
    assert (gate_up > 7).any() and (gate_up < -7).any(), "something is clamped"


def test_the_kinds_of_tiles_are_all_tried():
    kinds = [fused.tile_for(t * chosen / count) for t, count, chosen in ((1, 4, 2), (7, 6, 2), (17, 4, 3), (40, 3, 2))]
    assert {fused.TILE_16, fused.TILE_32, fused.TILE_64} == set(kinds)
    assert fused.tile_for(1000) is None


@pytest.mark.parametrize(("tokens", "flipped"), [(2, True), (3, False)])
def test_weights_are_on_the_left_where_rows_are_fewest(tokens, flipped, device, monkeypatch):
    """2 tokens choose 2 of 8 experts each: half a row an expert."""
    taken, real = [], fused.launch
    monkeypatch.setattr(
        fused, "launch", lambda kernel, *args, **more: (taken.append(args), real(kernel, *args, **more))
    )
    experts, x = make(8, 2, 32, 24, device), torch.randn(tokens, 32, device=device)
    fused.add(experts, x, torch.zeros_like(x))
    assert [args[-1] for args in taken[:2]] == [flipped, flipped]
    taken.clear()
    fused.add(make(8, 2, 32, 24, device, batch_invariant=True), x, torch.zeros_like(x))
    assert [args[-1] for args in taken[:2]] == [False, False]


def test_rows_of_several_blocks_are_spread_and_combined(device):
    numbers = torch.tensor([[2, 0], [0, 1], [2, 1]], dtype=torch.int32, device=device)
    order = routing.sort(numbers, 3, 0)
    x, weights = torch.randn(3, 2500, device=device), torch.rand(3, 2, device=device)
    rows = fused.spread(x, order)
    assert torch.equal(rows[order.places.long()], x[:, None].expand(-1, 2, -1))
    residual = torch.randn(3, 2500, device=device)
    expected = residual + x * weights.sum(1, keepdim=True)
    fused.combine(rows, weights, order, residual)
    torch.testing.assert_close(residual, expected)


def test_no_rows_at_all(device):
    residual = torch.zeros(0, 32, device=device)
    fused.add(make(4, 2, 32, 24, device), residual, residual)


@pytest.mark.usefixtures("steady_products")
def test_a_row_is_the_same_to_the_last_bit_whatever_the_others_are(device):
    experts = make(2, 2, 136, 8, device, batch_invariant=True)  # deeper than one step of any kind of tile
    x = torch.randn(26, 136, device=device)
    together = torch.zeros_like(x)
    fused.add(experts, x, together)
    for part in (slice(0, 1), slice(5, 15)):
        alone = torch.zeros_like(x[part])
        fused.add(experts, x[part], alone)
        assert torch.equal(alone, together[part])


@pytest.mark.parametrize("made", [make, make_clamped])
def test_many_rows_by_torch(made, device):
    """As where experts have many: sorted without tiles, spread, computed by torch, combined."""
    experts = made(5, 3, 64, 32, device)
    gate_up, down = experts.gate_up.bfloat16(), experts.down.bfloat16()
    x, residual = torch.randn(2, 12, 64, device=device).bfloat16()
    weights, chosen = routing.route(experts.router(x.float()), 3, True)
    order = routing.sort(chosen, 5, 0)
    found = residual.float()
    fused.combine(fused._by_torch(experts, gate_up, down, x, order), weights, order, found, experts.down_bias)
    wide = made(5, 3, 64, 32, device)
    expected = residual.float()
    wide.one_by_one(x.float(), expected, TorchOps())
    assert error(found - residual.float(), expected - residual.float()) < 2e-2


# ---------------------------------------------------------------- in FP8


class Rounds(TorchOps):
    """Products of the reference, with what the kernels round."""

    gate = staticmethod(kernels.gate)
    squared_relu = staticmethod(kernels.squared_relu)

    @staticmethod
    def scaled(x, weight, bias, dtype, residual=None):
        known = x if isinstance(x, Fp8Activations) else quantize(x, weight.fp8_scaling)
        return TorchOps.scaled(known, weight, bias, dtype, residual)


def stack_of(fp8_scaling: Fp8Scaling, count: int, rows: int, columns: int, device: torch.device) -> ScaledStack:
    stack = None
    for number in range(count):
        wide = 0.02 * torch.randn(rows, columns, device=device) * torch.logspace(-1, 1, rows, device=device)[:, None]
        weight = Fp8Weight.of(wide)
        if fp8_scaling is Fp8Scaling.BLOCKS:
            scales = 0.01 + torch.rand(-(-rows // BLOCK), -(-columns // BLOCK), device=device)
            weight = Fp8Weight.by_blocks((wide * 100).clamp(-LIMIT, LIMIT).to(FP8), scales)
        stack = stack or ScaledStack.like(weight, count)
        assert stack.put(number, weight)
    return stack


def in_fp8(gate_up: Fp8Scaling, down: Fp8Scaling, count, chosen, hidden, inner, device, dtype=torch.float32, **changes):
    router = Linear((torch.randn(count, hidden, device=device) / hidden**0.5).to(dtype))
    kind = {"normalized": True, "activation": "silu", "batch_invariant": False} | changes
    height = inner if kind["activation"] == SQUARED_RELU else 2 * inner
    stacks = stack_of(gate_up, count, height, hidden, device), stack_of(down, count, hidden, inner, device)
    return Experts(router, *stacks, chosen, **kind)


@pytest.mark.parametrize("fp8_scaling", [None, *Fp8Scaling])
@pytest.mark.parametrize("tokens", [1, 7])
def test_what_begins_a_layer(tokens, fp8_scaling, device):
    """As `route`, `sort` and `quantize` give it, but that a single token is not sorted."""
    logits, x = torch.randn(tokens, 13, device=device), torch.randn(tokens, 300, device=device).bfloat16()
    weights, order, known = routing.begin(logits, 5, True, 16, x, fp8_scaling)
    expected, numbers = routing.route(logits, 5, True)
    assert torch.equal(weights, expected)
    if fp8_scaling is None:
        assert known is None
    else:
        again = quantize(x, fp8_scaling)
        assert torch.equal(known.scales, again.scales)
        assert torch.equal(known.values.view(torch.uint8), again.values.view(torch.uint8))
    if tokens == 1:
        assert order.places.tolist() == [[0, 1, 2, 3, 4]] and order.tokens.tolist() == [0] * 5
        assert order.tiles.tolist() == [[expert, slot, 1] for slot, expert in enumerate(numbers[0].tolist())]
        pieces = order.places, order.tokens, order.tiles
    else:
        again = routing.sort(numbers, 13, 16)
        pieces = order.places, order.tokens, order.ends, order.tiles
        for piece, other in zip(pieces, (again.places, again.tokens, again.ends, again.tiles), strict=True):
            assert torch.equal(piece, other)
    assert all(piece.data_ptr() % 16 == 0 for piece in pieces)


@pytest.mark.parametrize("fp8_scaling", Fp8Scaling)
@pytest.mark.parametrize(
    "tile", [fp8_experts.TILE_16_DEEP, fp8_experts.TILE_16, fp8_experts.TILE_32, fp8_experts.TILE_64]
)
@pytest.mark.parametrize(("columns", "depth", "of_tokens"), [(256, 512, True), (144, 272, False), (48, 80, True)])
def test_product_in_fp8(columns, depth, of_tokens, tile, fp8_scaling, device):
    """Sizes that tiles divide and that they do not; experts with one tile, with several, and one with no tokens."""
    if fp8_scaling is Fp8Scaling.BLOCKS:
        tile = dataclasses.replace(tile, depth=BLOCK)
    torch.manual_seed(columns)
    weight = stack_of(fp8_scaling, 4, columns, depth, device)
    counts = (tile.rows + 3, 0, 2, 1) if columns == 256 else (1, 0, tile.rows, 2)
    numbers = torch.repeat_interleave(torch.arange(4), torch.tensor(counts)).int()[:, None].to(device)
    numbers = numbers[torch.randperm(len(numbers), device=device)]
    order = routing.sort(numbers, 4, tile.rows)
    x = quantize(torch.randn(len(numbers), depth, device=device).bfloat16(), fp8_scaling)
    found = fp8_experts.product(x, order, weight, tile, torch.float32, of_tokens)
    for token, (place,) in enumerate(order.places.tolist()):
        row = x.dequantized()[token if of_tokens else place]
        assert error(found[place], weight[int(numbers[token])].dequantized() @ row) < 2e-3


def test_more_tiles_than_are_computed_side_by_side(device):
    """And no multiple of them: each is computed, and no other."""
    weight, tile = stack_of(Fp8Scaling.ROWS, 8, 96, 64, device), fp8_experts.TILE_16
    numbers = torch.rand(30, 8, device=device).argsort(1)[:, :2].int()
    order = routing.sort(numbers, 8, tile.rows)
    assert len(order.tiles) > GROUP and len(order.tiles) % GROUP
    x = quantize(torch.randn(30, 64, device=device).bfloat16(), Fp8Scaling.ROWS)
    found = fp8_experts.product(x, order, weight, tile, torch.float32, of_tokens=True)
    expected = (
        torch.stack([weight[number].dequantized() for number in range(8)])[numbers.long()]
        @ x.dequantized()[:, None, :, None]
    )
    assert error(found[order.places.long()], expected.squeeze(-1)) < 2e-3


@pytest.mark.parametrize(
    ("tokens", "count", "kinds", "hidden", "inner", "activation", "dtype"),
    [
        (1, 8, (Fp8Scaling.ROWS, Fp8Scaling.ROWS), 144, 80, "silu", torch.float32),
        (1, 8, (Fp8Scaling.BLOCKS, Fp8Scaling.ROWS), 272, 256, "silu", torch.float32),
        (1, 3, (Fp8Scaling.BLOCKS, Fp8Scaling.BLOCKS), 256, 128, "silu", torch.bfloat16),
        (6, 3, (Fp8Scaling.ROWS, Fp8Scaling.ROWS), 256, 96, "gelu", torch.bfloat16),
        (6, 3, (Fp8Scaling.ROWS, Fp8Scaling.BLOCKS), 272, 256, "silu", torch.float32),
        (20, 3, (Fp8Scaling.BLOCKS, Fp8Scaling.BLOCKS), 144, 128, "gelu_pytorch_tanh", torch.float32),
        (70, 3, (Fp8Scaling.ROWS, Fp8Scaling.ROWS), 128, 80, "silu", torch.float32),
        (6, 3, (Fp8Scaling.ROWS, Fp8Scaling.BLOCKS), 144, 256, SQUARED_RELU, torch.float32),
    ],
)
def test_all_of_it_in_fp8(tokens, count, kinds, hidden, inner, activation, dtype, device):
    """As the reference, with what the kernels round; added to the residual stream."""
    torch.manual_seed(tokens)
    experts = in_fp8(*kinds, count, 2, hidden, inner, device, dtype, activation=activation, normalized=tokens != 6)
    x, residual = torch.randn(tokens, hidden, device=device).to(dtype), torch.randn(tokens, hidden, device=device)
    expected, found = residual.clone(), residual.clone()
    experts.one_by_one(x, expected, Rounds())
    fused.add(experts, x, found)
    assert error(found - residual, expected - residual) < (1e-2 if dtype == torch.float32 else 4e-2)


@pytest.mark.parametrize("fp8_scaling", Fp8Scaling)
def test_no_rows_at_all_in_fp8(fp8_scaling, device):
    residual = torch.zeros(0, 128, device=device)
    fused.add(in_fp8(fp8_scaling, fp8_scaling, 4, 2, 128, 128, device), residual, residual)


def test_what_is_nan_stays_with_its_token(device):
    x, residual = torch.randn(3, 128, device=device), torch.zeros(3, 128, device=device)
    x[1, 7] = torch.nan
    fused.add(in_fp8(Fp8Scaling.ROWS, Fp8Scaling.ROWS, 3, 2, 128, 128, device), x, residual)
    assert residual.isnan().all(1).tolist() == [False, True, False] and not residual[::2].isnan().any()


@pytest.mark.parametrize("fp8_scaling", Fp8Scaling)
def test_the_kinds_of_tiles_in_fp8(fp8_scaling):
    """Where scales are of blocks, they are as deep as a block, and lie within one."""
    weights = [stack_of(each, 1, 128, 128, torch.device("cpu")) for each in (Fp8Scaling.ROWS, fp8_scaling)]
    found = [fp8_experts.tile_for(rows, *weights) for rows in (0.1, 0.3, 6, 7, 24, 25, 64, 65, 5000)]
    if fp8_scaling is Fp8Scaling.ROWS:
        assert found[0] == fp8_experts.TILE_16_DEEP and found[1] == fp8_experts.TILE_16
        assert [tile.rows for tile in found] == [16, 16, 16, 32, 32, 64, 64, 128, 128]
    else:
        assert [tile.rows for tile in found] == [16, 16, 16, 32, 32, 64, 64, 64, 64]
        assert all(tile.depth == BLOCK and BLOCK % tile.columns == 0 for tile in found)


@pytest.mark.parametrize(("hidden", "inner"), [(64, 128), (200, 136), (1032, 264)])
@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu", SQUARED_RELU])
def test_many_rows_on_hopper(hidden, inner, activation, device):
    """By the kernel for it against torch's: experts with no rows, with a whole tile and more; sizes that tiles do not
    divide; more tiles than multiprocessors."""
    if device.type == "cpu" or not (hopper := fused._hopper(device)):
        pytest.skip("no GPU of Hopper")
    made = make_clamped if activation == "clamped_swiglu" else partial(make, activation=activation)
    experts = made(40, 2, hidden, inner, device)
    tensors = ("gate_up", "down", "gate_up_bias", "down_bias")
    halves = {name: t.bfloat16() for name in tensors if (t := getattr(experts, name)) is not None}
    experts = dataclasses.replace(experts, router=Linear(experts.router.weight.bfloat16(), None, False), **halves)
    x = torch.randn(3000, hidden, device=device, dtype=torch.bfloat16)
    numbers = torch.randint(0, 39, (3000, 1), dtype=torch.int32, device=device).clamp(min=12)
    order = routing.sort(numbers, 40, hopper.ROWS)
    rows = fused.spread(x, order)
    inner = fused._inner(experts, hopper.product, rows, order, is_sorted=True)
    expected = F.grouped_mm(rows, experts.gate_up.transpose(1, 2), offs=order.ends)
    if activation == SQUARED_RELU:
        expected = TorchOps.squared_relu(expected)
    elif experts.gate_up_bias is None:
        expected = kernels.gate(expected, activation)
    else:
        expected = fused.biased_gate(expected, experts.gate_up_bias, order, activation)
    assert error(inner, expected) < 1e-2
    down = hopper.product(expected, order, experts.down, None)
    assert error(down, F.grouped_mm(expected, experts.down.transpose(1, 2), offs=order.ends)) < 1e-2
    found, residual = torch.zeros(2, 3000, hidden, device=device, dtype=torch.bfloat16)
    fused.add(experts, x, found)
    experts.one_by_one(x, residual, TorchOps())
    assert error(found, residual) < 2e-2
