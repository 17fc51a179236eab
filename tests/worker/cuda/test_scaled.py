"""Products in FP8 against the same in plain torch. (Triton's interpreter rounds to FP8 without a carry: what it should
round up to a power of two, a value in 16, becomes half of it.)"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from radixrt.worker.cuda import ops
from radixrt.worker.cuda.elementwise import kernels
from radixrt.worker.cuda.linear import fp8
from radixrt.worker.cuda.linear.fp8 import product, tile_for
from radixrt.worker.cuda.linear.gemm import streaming
from radixrt.worker.cuda.linear.quantize_activations import padded, quantize
from radixrt.worker.model.layers.fp8 import BLOCK, FP8, LIMIT, Fp8Scaling, Fp8Weight, quantize_activations
from radixrt.worker.model.layers.ops import Ops, TorchOps

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what is infinite is divided by infinity


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def weight_of(fp8_scaling: Fp8Scaling, rows: int, columns: int, device: torch.device) -> Fp8Weight:
    wide = 0.02 * torch.randn(rows, columns, device=device) * torch.logspace(-1, 1, rows, device=device)[:, None]
    if fp8_scaling is Fp8Scaling.ROWS:
        return Fp8Weight.of(wide)
    scales = 0.01 + torch.rand(-(-rows // BLOCK), -(-columns // BLOCK), device=device)
    return Fp8Weight.by_blocks((wide * 100).clamp(-LIMIT, LIMIT).to(FP8), scales)


@pytest.mark.parametrize("fp8_scaling", Fp8Scaling)
@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (5, 300), (6, 64)])
def test_quantize(fp8_scaling, rows, columns, device):
    x = (torch.randn(rows, columns, device=device) * torch.logspace(-2, 2, rows, device=device)[:, None]).bfloat16()
    found, expected = quantize(x, fp8_scaling), quantize_activations(x, fp8_scaling)
    assert torch.equal(found.scales, expected.scales)
    one_step = 2**-3 * expected.dequantized().abs() + expected.scales.amax(1, keepdim=True) * 2**-9
    far = ((found.dequantized() - expected.dequantized()).abs() > one_step).float().mean()
    assert far <= (0 if device.type == "cuda" else 0.08)
    assert error(found.dequantized(), x) < (0.04 if device.type == "cuda" else 0.15)


def test_quantize_keeps_nan_and_zeros(device):
    x = torch.zeros(3, 256, device=device)
    x[1, 7], x[2, 9] = torch.nan, torch.inf
    for fp8_scaling in Fp8Scaling:
        found = quantize(x, fp8_scaling).dequantized()
        assert (found[0] == 0).all()
        if device.type == "cuda":  # the interpreter makes 384 of it
            assert found[1].isnan().any() and found[2].isnan().any()


@pytest.mark.parametrize("fp8_scaling", Fp8Scaling)
@pytest.mark.parametrize("size", [96, 256, 640])
def test_what_norm_and_gate_round_is_what_they_give(fp8_scaling, size, device):
    x, weight = torch.randn(3, 2 * size, device=device).bfloat16(), torch.rand(size, device=device).bfloat16()
    for found, wide in (
        (
            kernels.norm(x[:, :size].contiguous(), weight, 1e-5, fp8_scaling),
            kernels.norm(x[:, :size].contiguous(), weight, 1e-5),
        ),
        (kernels.gate(x, "silu", fp8_scaling), kernels.gate(x, "silu")),
    ):
        expected = quantize(wide, fp8_scaling)
        assert torch.equal(found.scales, expected.scales)
        assert torch.equal(found.values.view(torch.uint8), expected.values.view(torch.uint8))


SHAPES = [(1, 48, 256), (5, 200, 384), (20, 144, 128), (70, 256, 256), (5, 72, 1024)]


@pytest.mark.parametrize("fp8_scaling", Fp8Scaling)
@pytest.mark.parametrize(("rows", "columns", "depth"), SHAPES)
def test_product(fp8_scaling, rows, columns, depth, device):
    weight = weight_of(fp8_scaling, columns, depth, device)
    x = quantize(torch.randn(rows, depth, device=device).bfloat16(), fp8_scaling)
    bias = torch.randn(columns, device=device).bfloat16()
    residual = torch.randn(rows, columns, device=device).bfloat16()
    expected = x.dequantized() @ weight.dequantized().t()
    tile = dataclasses.replace(tile_for(min(rows, 64), weight), columns=32)
    for given in (None, bias):
        out = torch.full((rows, columns), torch.nan, device=device).bfloat16()
        product(x, weight, given, out, tile)
        assert error(out, expected if given is None else expected + bias.float()) < 6e-3
    out = residual.clone()
    product(x, weight, bias, out, tile, add=True)
    assert error(out, expected + bias.float() + residual.float()) < 6e-3


@pytest.mark.parametrize("fp8_scaling", Fp8Scaling)
@pytest.mark.parametrize("rows", [1, 3, 66, 130])
def test_all_of_it(fp8_scaling, rows, device):
    """By whatever computes so many rows."""
    torch.manual_seed(rows)
    weight = weight_of(fp8_scaling, 256, 512, device)
    x = torch.randn(rows, 512, device=device).bfloat16()
    bias = torch.randn(256, device=device).bfloat16()
    known = quantize(x, fp8_scaling)
    expected = known.dequantized() @ weight.dequantized().t() + bias.float()
    for given in (x, known):
        found = fp8.scaled(given, weight, bias, torch.bfloat16)
        assert found.dtype == torch.bfloat16 and error(found, expected) < 6e-3
    residual = torch.randn(rows, 256, device=device).bfloat16()
    before = residual.clone()
    assert fp8.scaled(x, weight, bias, torch.bfloat16, residual) is residual
    assert error(residual, expected + before.float()) < 6e-3


def test_nothing_to_multiply(device):
    weight = weight_of(Fp8Scaling.ROWS, 32, 64, device)
    assert fp8.scaled(torch.empty(0, 64, device=device).bfloat16(), weight, None, torch.bfloat16).shape == (0, 32)


@pytest.mark.parametrize(
    ("cuda", "capability", "found"),
    [("12.8", (9, 0), False), ("12.9", (9, 0), True), ("13.0", (9, 0), True), ("13.0", (8, 9), False)],
)
def test_torch_has_products_by_blocks(cuda, capability, found, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert fp8.blocks_by_torch.__wrapped__(torch.device("cuda")) is found


def test_room_behind_the_last_row(device):
    x = quantize(torch.randn(5, 256, device=device), Fp8Scaling.BLOCKS)
    whole = padded(x)
    assert whole.values.shape == (8, 256) and whole.scales.shape == (8, 2)
    assert torch.equal(whole.scales[:5], x.scales) and whole.scales.stride() == (1, 8)
    assert torch.equal(whole.values[:5].float(), x.values.float())


def test_the_reference_has_the_same_face():
    found: Ops = TorchOps()
    for name in ("norm", "gate", "scaled", "experts"):
        assert callable(getattr(found, name)) and callable(getattr(ops, name))


def test_limit_is_that_of_fp8():
    assert torch.finfo(FP8).max == LIMIT


@pytest.mark.parametrize(
    ("fp8_scaling", "rows", "columns", "tile"),
    [
        (Fp8Scaling.ROWS, 1, 6144, streaming(16, 6144, 1, torch.device("cpu"))),
        (Fp8Scaling.ROWS, 16, 28672, streaming(16, 28672, 1, torch.device("cpu"))),
        (Fp8Scaling.ROWS, 17, 4096, fp8.ALONE),
        (Fp8Scaling.ROWS, 64, 4224, fp8.ALONE),
        (Fp8Scaling.ROWS, 32, 4225, fp8.TILE_32),
        (Fp8Scaling.ROWS, 33, 4225, fp8.TILE_64),
        (Fp8Scaling.BLOCKS, 16, 4096, fp8.BLOCKS),
        (Fp8Scaling.BLOCKS, 17, 4096, fp8.BLOCKS_ALONE),
        (Fp8Scaling.BLOCKS, 17, 6144, dataclasses.replace(fp8.BLOCKS, rows=32)),
        (Fp8Scaling.BLOCKS, 64, 4096, dataclasses.replace(fp8.BLOCKS, rows=64)),
        (Fp8Scaling.BLOCKS, 1, 16384, fp8.BLOCKS_WIDE),
        (Fp8Scaling.BLOCKS, 33, 16384, dataclasses.replace(fp8.BLOCKS_WIDE, rows=64)),
        (Fp8Scaling.BLOCKS, 65, 128, dataclasses.replace(fp8.BLOCKS_WIDE, rows=64)),  # where torch has none
    ],
)
def test_tiles(fp8_scaling, rows, columns, tile):
    assert tile_for(rows, weight_like(fp8_scaling, columns, "cpu")) == tile


def weight_like(fp8_scaling: Fp8Scaling, columns: int, device: str) -> Fp8Weight:
    return Fp8Weight(
        torch.empty(columns, 128, dtype=FP8, device=device), torch.empty(columns, 1, device=device), fp8_scaling
    )


@pytest.mark.parametrize(
    ("rows", "columns", "tile"),
    [
        (64, 4096, fp8.ALONE),
        (65, 4096, fp8.LARGE_TILES[0]),
        (128, 4224, fp8.LARGE_TILES[0]),
        (128, 4225, fp8.LARGE_TILES[1]),
        (256, 4096, fp8.LARGE_TILES[1]),
        (129, 8192, None),
        (257, 128, None),
    ],
)
def test_tiles_beside_those_of_torch(rows, columns, tile, monkeypatch):
    monkeypatch.setattr(fp8, "num_sms", lambda device: 132)
    weight = weight_like(Fp8Scaling.ROWS, columns, "meta")
    monkeypatch.setattr(fp8, "_on_gpu", lambda weight: True)
    monkeypatch.setattr(fp8, "of_hopper", lambda device: True)
    assert tile_for(rows, weight) == tile
    monkeypatch.setattr(fp8, "of_hopper", lambda device: False)
    assert rows <= 64 or tile_for(rows, weight) is None  # nobody has looked
