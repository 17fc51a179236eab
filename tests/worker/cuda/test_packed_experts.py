"""Experts in MXFP4 and in INT4 against `Experts.one_by_one`; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from radixrt.worker.cuda.linear import gemm, trials
from radixrt.worker.cuda.linear.int4 import fitting_stages
from radixrt.worker.cuda.moe import experts as fused
from radixrt.worker.cuda.moe import packed_experts, routing
from radixrt.worker.model.layers.int4 import Int4
from radixrt.worker.model.layers.linear import Linear
from radixrt.worker.model.layers.moe import Experts
from radixrt.worker.model.layers.mxfp4 import BLOCK, PackedStack
from radixrt.worker.model.layers.ops import TorchOps

TILES = packed_experts.TILES_16, packed_experts.TILES_32, packed_experts.TILES_64, packed_experts.TILES_128


def stack_of(count: int, rows: int, columns: int, before: int, device: torch.device) -> PackedStack:
    generator = torch.Generator().manual_seed(columns + rows)
    stack = PackedStack.empty(count, rows, columns, before, device)
    for number in range(count):
        blocks = torch.randint(256, (rows, -(-(before + columns) // BLOCK), 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 125, blocks.shape[:2], generator=generator, dtype=torch.uint8)
        stack.put(number, blocks.to(device), scales.to(device))
    return stack


def int4_stack(count: int, rows: int, columns: int, size: int, has_zeros: bool, device: torch.device) -> Int4:
    """In INT4, of groups of `size` columns."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
    generator = torch.Generator().manual_seed(columns + rows)
    found = []
    for _ in range(count):
        q = torch.randint(16, (rows, columns), generator=generator)
        scales = (0.02 + 0.1 * torch.rand((rows, -(-columns // size)), generator=generator)).to(device, dtype)
        zeros = torch.randint(16, scales.shape, generator=generator).to(device) if has_zeros else None
        found.append(Int4.of(q.to(device), scales, zeros, dtype))
    stack = found[0].stack(count)
    assert all(stack.put(number, weight) for number, weight in enumerate(found))
    return stack


def make(count: int, hidden: int, inner: int, before: int, device: torch.device, **changes) -> Experts:
    """As gpt-oss has them. On a GPU in bfloat16, whose words are taken apart by instructions of their own."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(hidden)
    router, bias, down_bias = torch.randn(count, hidden), 4 * torch.randn(count, 2 * inner), torch.randn(count, hidden)
    router, bias, down_bias = (x.to(device, dtype) for x in (router, bias, down_bias))
    kind = {"normalized": True, "activation": "clamped_swiglu", "batch_invariant": False, "down_bias": down_bias}
    kind |= {"gate_up_bias": bias} | changes
    gate_up, down = stack_of(count, 2 * inner, hidden, 0, device), stack_of(count, hidden, inner, before, device)
    return Experts(Linear(router, None, kind["batch_invariant"]), gate_up, down, 2, **kind)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


SIZES = [(1, 4, 64, 96, 0), (7, 3, 160, 40, 24), (40, 4, 32, 72, 8), (80, 3, 64, 136, 0), (150, 2, 32, 16, 16)]
PLAIN = {"gate_up_bias": None, "down_bias": None, "activation": "silu"}
FIXED = {"batch_invariant": True}


@pytest.mark.parametrize(
    ("tokens", "count", "hidden", "inner", "before", "changes"),
    [*((*size, {}) for size in SIZES), *((*size, changes) for size in SIZES[1:3] for changes in (PLAIN, FIXED))],
)
def test_all_of_it(tokens, count, hidden, inner, before, changes, device):
    """Added to the residual stream: all kinds of tiles; a rank's part of down that begins within a block."""
    experts = make(count, hidden, inner, before, device, **changes)
    x, residual = torch.randn(2, tokens, hidden, device=device).to(experts.router.weight.dtype)
    expected, found = residual.float().clone(), residual.clone()
    experts.one_by_one(x, expected, TorchOps())
    fused.add(experts, x, found)
    most = 1e-5 if device.type == "cpu" else 1e-2
    assert error(found.float() - residual.float(), expected - residual.float()) < most


@pytest.mark.parametrize(("size", "has_zeros"), [(32, False), (64, True), (128, True)])
@pytest.mark.parametrize(("tokens", "hidden", "inner"), [(1, 128, 256), (7, 256, 128), (100, 128, 128)])
def test_all_of_it_in_int4(tokens, hidden, inner, size, has_zeros, device):
    stacks = [int4_stack(3, *shape, size, has_zeros, device) for shape in ((2 * inner, hidden), (hidden, inner))]
    dtype = stacks[0].dtype
    router = Linear((hidden**-0.5 * torch.randn(3, hidden)).to(device, dtype))
    experts = Experts(router, *stacks, 2, True, "silu", False)
    x, residual = (0.1 * torch.randn(2, tokens, hidden, device=device)).to(dtype)
    expected, found = residual.float().clone(), residual.clone()
    experts.one_by_one(x, expected, TorchOps())
    fused.add(experts, x, found)
    assert experts.is_packed and not experts.is_fp8
    assert error(found.float() - residual.float(), expected - residual.float()) < 1e-2


def test_all_kinds_of_tiles_are_tried():
    rows = [tokens * 2 / count for tokens, count in ((1, 4), (7, 3), (40, 4), (80, 3), (150, 2))]
    assert {packed_experts.tiles_for(n) for n in rows} == set(TILES)
    assert all(first.rows == second.rows for first, second in TILES)


@pytest.mark.parametrize("tile", [tile for pair in TILES for tile in pair])
def test_products_are_exact_sums(tile, device):
    """What is asked of a kernel before it is used."""
    dtype, most = (torch.float32, 1e-6) if device.type == "cpu" else (torch.bfloat16, packed_experts.ALIKE)
    assert packed_experts._apart(device, tile, None, 1, dtype) < most


@pytest.mark.parametrize(
    ("tokens", "count", "chosen", "splits"),
    [(1, 32, 4, 6), (2, 32, 4, 4), (4, 32, 4, 2), (64, 32, 4, 2), (1, 128, 4, 6), (16, 128, 4, 1)],
)
def test_how_many_splits(tokens, count, chosen, splits):
    """Of gpt-oss, whose products have 23 blocks and as many tiles of an expert."""
    tiles = 23 * min(tokens * chosen, count)
    assert packed_experts.splits_for(tiles, 23, torch.device("cpu")) == splits
    assert [packed_experts.splits_for(*one, torch.device("cpu")) for one in ((4, 5), (0, 23))] == [1, 1]


@pytest.mark.parametrize(("splits", "activation"), [(2, None), (4, "clamped_swiglu")])
def test_splits_of_products(splits, activation, device):
    """5 blocks of columns, which no number of splits divides; counts are 0 again for the next product."""
    experts = make(3, 600, 600, 0, device)
    tile, stack, bias = packed_experts.TILES_16[0], experts.down, None
    if activation is not None:
        stack, bias = experts.gate_up, experts.gate_up_bias
    x = torch.randn(8, 600, device=device).to(experts.router.weight.dtype)
    chosen = torch.tensor([[0, 2]] * 4 if activation is None else [[0, 2]] * 8, dtype=torch.int32, device=device)
    order = routing.sort(chosen, 3, tile.rows)
    expected, found = (
        packed_experts.product(x, order, stack, tile, activation, bias, splits=n).float() for n in (1, splits)
    )
    assert error(found, expected) < (1e-5 if device.type == "cpu" else 1e-2)
    assert not gemm.split_counts(x.device).any()


@pytest.mark.parametrize("pair", TILES)
@pytest.mark.parametrize("activation", ["silu", None])
def test_products_in_int4_are_exact_sums(pair, activation, device):
    """Each tile for the product that it is for: with gate and up, or with down."""
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    tile, counts = pair[activation is None], packed_experts.COUNTS
    stack, chosen = trials.draw_experts(torch.Generator(device).manual_seed(0), device, dtype)
    order = routing.sort(chosen, len(counts), tile.rows)
    x = 0.1 * torch.randn((len(chosen), stack.columns), device=device).to(dtype)
    found = packed_experts.product(x, order, stack, tile, activation)
    rows = (x if activation is None else x[order.tokens]).float().split(counts)
    exact = torch.cat([own @ stack.dequantized(n, torch.float32).T for n, own in enumerate(rows)])
    if activation is not None:
        gate, up = exact.chunk(2, 1)
        exact = F.silu(gate) * up
    assert error(found, exact) < packed_experts.ALIKE


def test_stages_that_fit():
    """As compiled for Hopper (Triton 3.6), the tile with down takes 229,376 bytes for three stages, and 1,024 for each
    word of scales and zeros: of 6, there are groups of 32 columns with zeros."""
    stages = partial(fitting_stages, packed_experts.TILES_128[1], 32, weights=1, memory=232_448, hopper=True)
    assert [stages(facts) for facts in (1, 2, 3, 4, 6)] == [3, 3, 3, 2, 2]
    assert fitting_stages(packed_experts.TILES_128[0], 32, 6, 2, 166_912, hopper=False) == 2


@pytest.mark.usefixtures("steady_products")
def test_exact_results_do_not_depend_on_the_batch(device, monkeypatch):
    """One kind of tile computes them all."""
    taken, real = set(), packed_experts.product

    def product(x, order, stack, tile, *rest, **named):
        taken.add(tile)
        return real(x, order, stack, tile, *rest, **named)

    monkeypatch.setattr(packed_experts, "product", product)
    experts = make(4, 64, 96, 0, device, batch_invariant=True)
    x = torch.randn(50, 64, device=device).to(experts.router.weight.dtype)
    together = torch.zeros_like(x)
    fused.add(experts, x, together)
    for some in (slice(0, 1), slice(3, 20)):
        alone = torch.zeros_like(x[some])
        fused.add(experts, x[some].contiguous(), alone)
        assert torch.equal(alone, together[some])
    assert taken == set(packed_experts.TILES_64)


@pytest.mark.parametrize(
    ("rows", "hidden", "inner", "before", "changes"),
    [
        (128, 192, 136, 0, {}),
        (128, 320, 200, 24, {}),
        (256, 192, 136, 0, {}),
        (128, 192, 128, 0, {"gate_up_bias": None, "down_bias": None, "activation": "silu"}),
    ],
)
def test_many_rows_on_hopper(rows, hidden, inner, before, changes, device, monkeypatch):
    """By the kernel for it, with each of its tiles: experts with no rows, with a whole tile and more; sizes that tiles
    do not divide, and columns that begin within a block; more tiles than multiprocessors."""
    if device.type == "cpu" or not (hopper := packed_experts._hopper(device)):
        pytest.skip("no GPU of Hopper")
    kind = next(kind for kind in hopper.KINDS if kind.rows == rows)
    monkeypatch.setattr(hopper, "kind_for", lambda _: kind)
    experts = make(40, hidden, inner, before, device, **changes)
    x = torch.randn(4000, hidden, device=device).bfloat16()
    numbers = torch.randint(0, 39, (4000, 1), dtype=torch.int32, device=device).clamp(min=12)
    order = routing.sort(numbers, 40, rows)
    made = hopper.product(fused.spread(x, order), order, experts.gate_up, None, kind=kind)
    order = routing.sort(numbers, 40, packed_experts.TILES_128[1].rows)
    expected = packed_experts.product(fused.spread(x, order), order, experts.gate_up, packed_experts.TILES_128[1], None)
    assert error(made, expected) < 1e-2
    found, residual = torch.zeros(2, 4000, hidden, device=device, dtype=torch.bfloat16)
    fused.add(experts, x, found)
    experts.one_by_one(x, residual, TorchOps())
    assert error(found, residual) < 2e-2


def test_kinds_of_tiles_on_hopper():
    hopper = pytest.importorskip("radixrt.worker.cuda.moe.hopper_packed_experts")
    assert {hopper.kind_for(rows).rows for rows in (64, 128)} == {128}
    assert {hopper.kind_for(rows).rows for rows in (129, 5000)} == {256}
    assert hopper.fits(2880, 1440) and not hopper.fits(2880, 1444)
    for count, kind in ((32, hopper.TILE_128), (64, hopper.TILE_256)):
        layout = hopper._stored(count, kind.rows)
        bases = [*layout.reg_bases, *layout.lane_bases, *layout.warp_bases]
        assert layout.reg_bases[:3] == [[1, 0], [2, 0], [4, 0]], "16 bytes per thread"
        assert sum(a for a, _ in bases) == count - 1 and sum(b for _, b in bases) == kind.rows - 1


def test_tiles_that_are_left_over_are_not_computed(device):
    stack, x = stack_of(3, 64, 32, 0, device), torch.randn(3, 32, device=device)
    order = routing.sort(torch.ones(3, 1, dtype=torch.int32, device=device), 3, 16)
    assert sorted(order.tiles[:, 2].tolist())[:2] == [0, 0]
    found = packed_experts.product(x, order, stack, packed_experts.TILES_16[1], None)
    assert error(found, x @ stack.dequantized(1, torch.float32).T) < 1e-5


@pytest.mark.parametrize(("int4", "name"), [(None, "MXFP4"), (torch.bfloat16, "INT4")])
def test_a_kernel_that_is_not_what_it_should_be_is_not_used(int4, name, device, monkeypatch, caplog):
    monkeypatch.setattr(packed_experts, "_apart", lambda *_: 0.5)
    packed_experts.there.cache_clear()
    assert not packed_experts.there(device, int4) and "a relative error of 5.0e-01" in caplog.text
    monkeypatch.setattr(packed_experts, "_apart", lambda *_: 1 / 0)
    packed_experts.there.cache_clear()
    assert not packed_experts.there(device, int4) and "ZeroDivisionError" in caplog.text
    assert f"experts in {name} are expanded" in caplog.text
    packed_experts.there.cache_clear()
