"""Products of few rows against float32, which tiles they take, and that layers take them."""

from __future__ import annotations

import pytest
import torch

from radixrt.worker.cuda import products
from radixrt.worker.cuda.products import AT_ONCE, FEW, Tile, blocks_at_once, multiply, stages, streaming, tile_for
from radixrt.worker.model.linear import FEW as MOST
from radixrt.worker.model.linear import Linear
from radixrt.worker.model.scaled import BLOCK

SMALL, LARGE = 101_376, 232_448
"""Bytes of shared memory of a program: compute capabilities 8.9 and 9.0."""
CPU = torch.device("cpu")


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@pytest.fixture
def half(device) -> torch.dtype:
    """What the interpreter multiplies: bfloat16 are integers to it."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


@pytest.mark.parametrize("rows", [1, 5, 16, 20])
@pytest.mark.parametrize(("columns", "depth"), [(64, 256), (200, 128), (40, 96)])
def test_multiply(columns, depth, rows, half, device):
    x, weight = (torch.randn(n, depth, device=device).to(half) for n in (rows, columns))
    bias, residual = (torch.randn(n, device=device).to(half) for n in (columns, (rows, columns)))
    expected = x.float() @ weight.float().t()
    for tile in (Tile(16, 64, 128, 4, 3), Tile(64, 32, 64, 4, 3)):
        for given in (None, bias):
            out = torch.full((rows, columns), torch.nan, device=device).to(half)
            multiply(x, weight, out, tile, bias=given)
            assert error(out, expected if given is None else expected + bias.float()) < 4e-3
        out = residual.clone()
        multiply(x, weight, out, tile, bias=bias, add=True)
        assert error(out, expected + bias.float() + residual.float()) < 4e-3
    wide = torch.empty(rows, columns, device=device)
    multiply(x, weight, wide, tile)
    assert error(wide, expected) < 1e-5


def test_nothing_behind_a_row_is_asked_for(monkeypatch):
    found = []
    monkeypatch.setattr(products, "launch", lambda kernel, grid, again, *args, **options: found.append(args))
    names = products._product_kernel.arg_names
    for depth in (32, 96, 128, 1024):
        x, weight = torch.zeros(2, depth, dtype=torch.bfloat16), torch.zeros(64, depth, dtype=torch.bfloat16)
        multiply(x, weight, torch.zeros(2, 64), streaming(16, 64, 2, CPU))
        ahead = found[-1][names.index("AHEAD")]
        assert ahead <= 2 * depth and ahead in (0, products.AHEAD)
    assert ahead == products.AHEAD


@pytest.mark.parametrize(
    ("columns", "depth", "room", "blocks"),
    [(64, 4096, LARGE, AT_ONCE), (64, 4096 + BLOCK, LARGE, 1), (64, 4096, SMALL, 1), (BLOCK, 4096, LARGE, 1)],
)
def test_blocks_at_once(columns, depth, room, blocks):
    assert blocks_at_once(Tile(16, columns, BLOCK, 4, 3), depth, room) == blocks


def test_stages_fit():
    tile = Tile(16, 64, 128, 4, 8)
    each = (16 + 64) * 128 * 2
    assert stages(tile, 2, LARGE) == 8 and stages(tile, 2, SMALL) == SMALL // each == 4
    assert stages(tile, 2, 8 * each) == 8 and stages(tile, 2, 8 * each - 1) == 7
    assert stages(tile, 2, each - 1) == 1


def test_a_program_alone_on_a_multiprocessor_streams_deeper(monkeypatch):
    monkeypatch.setattr(products, "processors", lambda device: 100)
    assert streaming(16, 6400, 2, CPU) == Tile(16, 64, 128, 4, 8)
    assert streaming(32, 6401, 2, CPU) == Tile(32, 64, 128, 4, 4)
    assert streaming(16, 6400, 1, CPU) == Tile(16, 64, 256, 4, 8)


def given(rows: int, columns: int, depth: int, dtype=torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(rows, depth, dtype=dtype), torch.empty(columns, depth, dtype=dtype)


def test_which_products(monkeypatch):
    monkeypatch.setattr(products, "of_hopper", lambda device: True)
    for rows, high in ((1, 16), (16, 16), (17, 32), (32, 32)):
        assert tile_for(*given(rows, 4096, 4096)).rows == high
        assert tile_for(*given(rows, 4096, 4096, torch.float16)).rows == high
    assert FEW[-1] == MOST
    for none in (
        given(0, 4096, 4096),
        given(33, 4096, 4096),
        given(1, 4096, 4096, torch.float32),
        (given(1, 4096, 4096)[0], given(1, 4096, 4096, torch.float16)[1]),
        given(1, 4096, 4096 + 64),
        given(1, 3071, 4096),
        (given(2, 4096, 8192)[0][:, ::2], given(2, 4096, 4096)[1]),
        (given(2, 4096, 4096)[0], given(2, 4096, 8192)[1][:, :4096]),
        (given(2, 4096, 4096)[0][None], given(2, 4096, 4096)[1]),
    ):
        assert tile_for(*none) is None
    assert tile_for(*given(1, 3072, 4096)) and tile_for(*given(1, 64, 2048))
    monkeypatch.setattr(products, "of_hopper", lambda device: False)
    assert tile_for(*given(1, 4096, 4096)) is None


def test_nowhere_but_on_hopper(monkeypatch):
    assert not products.of_hopper.__wrapped__(CPU)
    for capability in ((8, 0), (9, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert products.of_hopper.__wrapped__(torch.device("cuda")) is (capability == (9, 0))


@pytest.mark.parametrize("bias", [False, True])
def test_layers_take_them(bias, half, device, monkeypatch):
    monkeypatch.setattr(Linear, "_tile", lambda self, x: Tile(16, 64, 128, 4, 3))
    taken = []
    monkeypatch.setattr(products, "multiply", lambda *args, **more: (taken.append(more), multiply(*args, **more)))
    x, weight = (torch.randn(n, 128, device=device).to(half) for n in (3, 72))
    linear = Linear(weight, torch.randn(72, device=device).to(half) if bias else None)
    expected = x.float() @ weight.float().t() + (linear.bias.float() if bias else 0)
    assert error(linear(x), expected) < 4e-3
    linear.put(x, out := torch.empty_like(expected))
    assert error(out, expected) < 1e-5
    residual = torch.randn_like(expected).to(half)
    before = residual.clone()
    linear.add(x, residual)
    assert error(residual, expected + before.float()) < 4e-3 and len(taken) == 3
    residual = before.clone()
    linear.add(x, residual, 0.5)
    assert error(residual, 0.5 * expected + before.float()) < 8e-3


def test_on_the_device_at_hand(device):
    """By whatever multiplies so many rows there."""
    weight = torch.randn(4096, 1024, device=device).bfloat16()
    linear = Linear(weight)
    for rows in (1, 16, 17, 32, 33):
        x = torch.randn(rows, 1024, device=device).bfloat16()
        assert error(linear(x), x.float() @ weight.float().t()) < 4e-3
