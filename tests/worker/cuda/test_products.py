"""Products of few rows against float32, which tiles they take, and that layers take them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from radixrt.worker.cuda import ops
from radixrt.worker.cuda.linear import fp8, gemm, invariant
from radixrt.worker.cuda.linear.gemm import (
    AT_ONCE,
    Tile,
    blocks_at_once,
    multiply,
    splits_for,
    stages,
    streaming,
    tile_for,
)
from radixrt.worker.cuda.linear.quantize_activations import quantize
from radixrt.worker.model.layers.fp8 import BLOCK, Fp8Scaling, Fp8Weight
from radixrt.worker.model.layers.linear import Linear
from radixrt.worker.model.layers.ops import TorchOps

SMALL, LARGE = 101_376, 232_448
"""Bytes of shared memory of a program: compute capabilities 8.9 and 9.0."""
CPU = torch.device("cpu")
ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="of the sums that tensor cores make")


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


@pytest.mark.parametrize("splits", [2, 3, 5])
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 200, 640), (20, 64, 512), (5, 40, 352)])
def test_splits_of_a_product(rows, columns, depth, splits, half, device):
    """Parts of K of different lengths, or of none; counts are 0 again for the next product."""
    x, weight, residual = (
        torch.randn(n, device=device).to(half) for n in ((rows, depth), (columns, depth), (rows, columns))
    )
    bias = torch.randn(columns, device=device).to(half)
    expected = x.float() @ weight.float().t()
    for tile in (Tile(16, 64, 128, 4, 3), Tile(64, 32, 64, 4, 3)):
        out = residual.clone()
        multiply(x, weight, out, tile, bias=bias, add=True, splits=splits)
        assert error(out, expected + bias.float() + residual.float()) < 4e-3
        wide = torch.full((rows, columns), torch.nan, device=device)
        multiply(x, weight, wide, tile, splits=splits)
        assert error(wide, expected) < 1e-5
        assert not gemm.split_counts(x.device).any()


def test_nothing_behind_a_row_is_asked_for(monkeypatch):
    found = []
    monkeypatch.setattr(gemm, "launch", lambda kernel, grid, again, *args, **options: found.append(args))
    names = gemm._product_kernel.arg_names
    for depth in (32, 96, 128, 1024):
        x, weight = torch.zeros(2, depth, dtype=torch.bfloat16), torch.zeros(64, depth, dtype=torch.bfloat16)
        multiply(x, weight, torch.zeros(2, 64), streaming(16, 64, 2, CPU))
        ahead = found[-1][names.index("AHEAD")]
        assert ahead <= 2 * depth and ahead in (0, gemm.AHEAD)
    assert ahead == gemm.AHEAD


def test_what_is_launched_again(monkeypatch):
    """Of the same kinds alone, and aligned."""
    found = []
    monkeypatch.setattr(gemm, "_kernel_caches", {})
    monkeypatch.setattr(gemm, "launch", lambda kernel, grid, again, *args, **options: found.append(again))
    tile = streaming(16, 64, 2, CPU)

    def again(rows=2, columns=64, depth=128, half=torch.bfloat16, wide=torch.bfloat16, bias=None, add=False, first=0):
        x = torch.zeros(rows * depth + first, dtype=half)[first:].view(rows, depth)
        out = torch.zeros(rows, columns, dtype=wide)
        bias = None if bias is None else torch.zeros(columns, dtype=bias)
        multiply(x, torch.zeros(columns, depth, dtype=half), out, tile, bias=bias, add=add)
        return found[-1]

    first = again()
    assert again() is first and again(rows=16) is first
    others = [
        again(columns=72), again(depth=256), again(half=torch.float16), again(wide=torch.float32), again(add=True),
        again(bias=torch.bfloat16), again(bias=torch.float32),
    ]  # fmt: skip
    assert len({id(one) for one in (first, *others)}) == 8
    assert again(first=1) is None


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
    monkeypatch.setattr(gemm, "num_sms", lambda device: 100)
    assert streaming(16, 6400, 2, CPU) == Tile(16, 64, 128, 4, 8)
    assert streaming(32, 6401, 2, CPU) == Tile(32, 64, 128, 4, 4)
    assert streaming(16, 6400, 1, CPU) == Tile(16, 64, 256, 4, 8)


@pytest.fixture
def hopper(monkeypatch):
    tile_for.cache_clear()
    monkeypatch.setattr(gemm, "of_hopper", lambda device: True)
    yield
    tile_for.cache_clear()


@pytest.mark.usefixtures("hopper")
def test_which_products(monkeypatch):
    for rows, high in ((1, 16), (16, 16), (17, 32), (32, 32)):
        assert tile_for(rows, 4096, 4096, CPU).rows == high
    for none in ((0, 4096, 4096), (33, 4096, 4096), (1, 4096, 4096 + 32)):
        assert tile_for(*none, CPU) is None
    assert tile_for(1, 2048, 4096, CPU).stages == 8 and tile_for(1, 128, 2048, CPU).stages == 4
    assert tile_for(1, 5120, 2880, CPU) and tile_for(1, 4096, 64, CPU)
    tile_for.cache_clear()
    monkeypatch.setattr(gemm, "of_hopper", lambda device: False)
    assert tile_for(1, 4096, 4096, CPU) is None


@pytest.mark.parametrize(
    ("columns", "depth", "splits"),
    [(2048, 4096, 4), (128, 2048, 8), (32, 2880, 8), (2560, 9728, 3), (2880, 4096, 1), (4096, 14336, 1), (64, 384, 1)],
)
def test_how_many_splits(columns, depth, splits):
    assert splits_for(columns, depth, CPU) == splits


def test_nowhere_but_on_hopper(monkeypatch):
    assert not gemm.of_hopper.__wrapped__(CPU)
    for capability in ((8, 0), (9, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert gemm.of_hopper.__wrapped__(torch.device("cuda")) is (capability == (9, 0))


@pytest.mark.usefixtures("hopper")
def test_what_is_left_to_torch(half, device):
    x, weight, out = (torch.randn(n, device=device).to(half) for n in ((3, 128), (72, 128), (3, 72)))
    wide, twice = torch.randn(3, 256, device=device).to(half), torch.randn(72, 256, device=device).to(half)
    left = [
        (x[None], weight),
        (x.float(), weight),
        (x.float(), weight.float()),
        (x.bfloat16(), weight.half()),
        (wide[:, ::2], weight),
        (x, twice[:, :128]),
        (torch.cat([x] * 11), weight),
        (x[:0], weight),
        (x, weight, out.t().contiguous().t()),
    ]
    assert all(ops.small_linear(x, weight, None, *out) is None for x, weight, *out in left)
    assert ops.small_linear(x, weight, None, out) is out
    assert TorchOps.small_linear(x, weight, None) is None


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("bias", [False, True])
def test_layers_take_them(bias, half, device, monkeypatch):
    taken = []
    monkeypatch.setattr(gemm, "multiply", lambda *args, **more: (taken.append(more), multiply(*args, **more)))
    x, weight = (torch.randn(n, 128, device=device).to(half) for n in (3, 72))
    linear = Linear(weight, torch.randn(72, device=device).to(half) if bias else None, ops=ops)
    expected = x.float() @ weight.float().t() + (linear.bias.float() if bias else 0)
    assert error(linear(x), expected) < 4e-3
    linear.put(x, out := torch.empty_like(expected).to(half))
    assert error(out, expected) < 4e-3
    residual = torch.randn_like(expected).to(half)
    before = residual.clone()
    linear.add(x, residual)
    assert error(residual, expected + before.float()) < 4e-3 and len(taken) == 3
    residual = before.clone()
    linear.add(x, residual, 0.5)
    assert error(residual, 0.5 * expected + before.float()) < 8e-3
    exact = Linear(weight, linear.bias, True, ops)
    count = len(taken)
    for again in (exact, Linear(weight, linear.bias)):
        assert error(again(x), expected) < 4e-3
        again.put(x, torch.empty_like(residual))
        again.add(x, residual)
    assert len(taken) == count


def test_without_kernels_torch_multiplies_on_a_gpu_too():
    """As where Triton is not to be had: nothing of `cuda` is asked for by a model of plain torch."""
    found = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=100)
    assert found.returncode == 0, found.stderr[-2000:]


WITHOUT = """
import sys
sys.modules["triton"] = None
import torch
from radixrt.worker.model.layers.ops import TorchOps
from radixrt.worker.model.layers.linear import Linear

x, weight = torch.randn(3, 128), torch.randn(72, 128)
for ops in (None, TorchOps()):
    assert torch.allclose(Linear(weight, ops=ops)(x), x @ weight.t(), atol=1e-4)
assert not any(name.startswith("radixrt.worker.cuda") for name in sys.modules)
"""


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("columns", "depth"), [(4096, 1024), (9216, 2048)])
def test_on_the_device_at_hand(columns, depth, bias, device):
    """By whatever multiplies so many rows there; the same when it was launched before."""
    weight = torch.randn(columns, depth, device=device).bfloat16()
    linear = Linear(weight, torch.randn(columns, device=device).bfloat16() if bias else None, ops=ops)
    for rows in (1, 16, 17, 32, 33):
        x = torch.randn(rows, depth, device=device).bfloat16()
        expected = x.float() @ weight.float().t() + (linear.bias.float() if bias else 0)
        found = linear(x)
        assert error(found, expected) < 4e-3 and torch.equal(linear(x), found)
        taken = ops.small_linear(x, weight, linear.bias)
        assert (taken is not None) == (gemm.of_hopper(device) and rows <= 32)


@ON_GPU
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("columns", "depth"), [(500, 2048), (9000, 2000), (6144, 4096)])
def test_rows_are_the_same_to_the_last_bit_however_many_there_are(columns, depth, bias, device):
    x, weight = (torch.randn(n, depth, device=device).bfloat16() for n in (70, columns))
    offset = torch.randn(columns, device=device).bfloat16() if bias else None
    whole = invariant.product(x, weight, offset)
    for rows in (1, 16, 17, 32, 33, 64, 65):
        assert torch.equal(invariant.product(x[:rows], weight, offset), whole[:rows]), rows


@ON_GPU
@pytest.mark.parametrize("rows", [1, 32, 64])
def test_sums_of_fp8_are_as_far_as_those_of_torch(rows, device):
    """Over many terms, some of which are large; the outliers of one row and of one column."""
    x, wide = torch.randn(rows, 14336, device=device), 0.02 * torch.randn(4096, 14336, device=device)
    x[:, ::1000] *= 50
    wide[:, ::777] *= 20
    weight, known = Fp8Weight.of(wide), quantize(x.bfloat16(), Fp8Scaling.ROWS)
    expected = known.dequantized() @ weight.dequantized().t()
    out = torch.empty(rows, 4096, dtype=torch.bfloat16, device=device)
    fp8.product(known, weight, None, out, fp8.tile_for(rows, weight))
    ours, torchs = error(out, expected), error(fp8._by_torch(known, weight, None, torch.bfloat16), expected)
    assert ours < 1.2 * torchs + 1e-4, (ours, torchs)


@ON_GPU
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(("rows", "inner", "hidden"), [(8448, 256, 128), (8400, 264, 200), (5000, 1096, 520)])
def test_gated_on_hopper(rows, inner, hidden, activation, device):
    """Whole tiles and parts of them, as many as there are multiprocessors and more; the same each time."""
    if not gemm.of_hopper(device):
        pytest.skip("no GPU of Hopper")
    x = torch.randn(rows, hidden, device=device).bfloat16()
    weight = torch.randn(2 * inner, hidden, device=device).bfloat16()
    found = ops.gated_linear(x, weight, activation)
    assert found is not None, "choose sizes that are worth it"
    assert found.shape == (rows, inner)
    exact = TorchOps.gate(x.float() @ weight.float().t(), activation)
    assert error(found, exact) < 8e-3
    assert torch.equal(found, ops.gated_linear(x, weight, activation))


def test_gated_is_for_many_whole_rows_in_bfloat16(monkeypatch):
    """Each condition alone leaves the product and the gate to two kernels."""

    class Kernel:
        @staticmethod
        def product(x, weight, activation):
            return activation

    monkeypatch.setattr(gemm, "of_hopper", lambda device: True)
    monkeypatch.setattr(gemm, "_hopper_gated", lambda device: Kernel)
    x, weight = torch.zeros(gemm.MIN_GATED_ROWS, 64).bfloat16(), torch.zeros(2 * 2112, 64).bfloat16()
    assert gemm.gated_linear(x, weight, "silu") == "silu"
    assert gemm.gated_linear(x[1:], weight, "silu") is None
    assert gemm.gated_linear(x.half(), weight.half(), "silu") is None
    assert gemm.gated_linear(x.float(), weight, "silu") is None
    assert gemm.gated_linear(x[:, :63].contiguous(), weight[:, :63].contiguous(), "silu") is None
    assert gemm.gated_linear(x, weight[8:], "silu") is None
    assert gemm.gated_linear(x, weight.t().contiguous().t(), "silu") is None
    monkeypatch.setattr(gemm, "gates", lambda *sizes: False)
    assert gemm.gated_linear(x, weight, "silu") is None
    monkeypatch.undo()
    assert gemm.gated_linear(x, weight, "silu") is None, "no GPU of Hopper"


@pytest.mark.parametrize(
    ("rows", "inner", "depth", "worth"),
    [
        (8192, 14336, 4096, True),
        (1536, 14336, 4096, True),
        (512, 14336, 4096, False),  # 448 tiles are 3.4 turns of 132 programs
        (1024, 7168, 8192, False),
        (2048, 7168, 8192, True),
        (1536, 13824, 5120, True),
        (2048, 4864, 896, True),  # 4.6 turns, but little depth: the gate takes a fifth
        (512, 4864, 896, False),
    ],
)
def test_where_one_kernel_is_worth_it(rows, inner, depth, worth):
    """By how full the last turn of the programs is, and how much of a product the gate takes."""
    assert gemm.gates(rows, inner, depth, 132) is worth
