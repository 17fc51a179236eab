"""Products with a weight in INT4 against `Int4.dequantized`; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import itertools
from types import ModuleType, SimpleNamespace

import pytest
import torch

from radixrt.worker.cuda import ops
from radixrt.worker.cuda.linear import dequant, hopper_int4, int4
from radixrt.worker.cuda.linear.gemm import of_hopper
from radixrt.worker.model import read_spec
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.model.layers.int4 import Int4, Int4Linear
from radixrt.worker.model.layers.ops import TorchOps
from radixrt.worker.model.weights.checkpoint import SafetensorsWeights, read_json

TILES = int4.TILE_16, int4.TILE_32, int4.TILE_64, int4.WIDE, int4.LARGE
KINDS = [(32, False), (32, True), (64, False), (64, True), (128, False), (128, True)]
"""(columns that share a scale, whether zeros are stored)."""


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def half(request, device) -> torch.dtype:
    if device.type == "cpu" and request.param is torch.bfloat16:
        pytest.skip("bfloat16 are integers to the interpreter")
    return request.param


def make(columns: int, depth: int, size: int, has_zeros: bool, dtype: torch.dtype, device: torch.device) -> Int4:
    generator = torch.Generator().manual_seed(columns + depth)
    q = torch.randint(16, (columns, depth), generator=generator)
    scales = (0.01 + 0.03 * torch.rand((columns, -(-depth // size)), generator=generator)).to(dtype)
    zeros = torch.randint(17, scales.shape, generator=generator) if has_zeros else None
    weight = Int4.of(*(None if x is None else x.to(device) for x in (q, scales, zeros)), dtype)
    assert weight is not None
    return weight


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize(("size", "has_zeros"), KINDS)
def test_every_word_is_expanded_to_what_is_meant(size, has_zeros, half, device):
    """To the last bit; also a part of the rows, and columns that do not fill a block."""
    for columns, depth in ((70, 256), (3, 3 * size)):
        weight = make(columns, depth, size, has_zeros, half, device)
        out = torch.full((columns - 2, depth), torch.nan, dtype=half, device=device)
        dequant.dequantize(weight, out, 2)
        assert torch.equal(out, weight.dequantized()[2:])


def test_a_kernel_that_dequantizes_is_found_again(half, device, monkeypatch):
    """By its cache, whichever rows of a weight it is launched for."""
    caches = []
    monkeypatch.setattr(dequant, "launch", lambda kernel, grid, cache, *_, **__: caches.append(cache))
    for depth in (256, 512):
        weight = make(130, depth, 64, True, half, device)
        for first in (0, 64):
            dequant.dequantize(weight, torch.empty((64, depth), dtype=half, device=device), first)
    assert caches[0] is caches[1] and caches[2] is caches[3]
    assert not any(cache is None for cache in caches) and caches[0] is not caches[2]


@pytest.mark.parametrize(("size", "has_zeros"), KINDS)
def test_multiply(size, has_zeros, half, device):
    weight = make(130, 768, size, has_zeros, half, device)
    x = torch.randn(20, 768, device=device).to(half)
    expected = x.float() @ weight.dequantized().float().t()
    for tile, splits in ((int4.TILE_16, 3), (int4.TILE_64, 1)):
        out = torch.full((20, 130), torch.nan, dtype=half, device=device)
        int4.multiply(x, weight, out, tile, splits)
        assert error(out, expected) < 4e-3


@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("tile", TILES)
def test_all_tiles(tile, splits, half, device):
    """Also if some of the programs that K is divided among have nothing to do."""
    if device.type == "cuda" and half is torch.float16:
        pytest.skip("it takes long to compile them")
    weight = make(130, 768, 64, True, half, device)
    x, bias, residual = (torch.randn(size, device=device).to(half) for size in ((20, 768), 130, (20, 130)))
    expected = x.float() @ weight.dequantized().float().t()
    for _ in range(2):  # the counts of the first time are forgotten
        out = torch.full((20, 130), torch.nan, dtype=half, device=device)
        int4.multiply(x, weight, out, tile, splits)
        assert error(out, expected) < 4e-3
    out = residual.clone()
    int4.multiply(x, weight, out, tile, splits, bias=bias, add=True)
    assert error(out, expected + bias.float() + residual.float()) < 4e-3


@pytest.mark.parametrize("depth", [96, 200, 320, 1280, 2336])
def test_columns_that_do_not_fill_a_block(depth, half, device):
    weight = make(40, depth, depth if depth % 32 else 32, True, half, device)
    x = torch.randn(5, depth, device=device).to(half)
    out = torch.empty(5, 40, dtype=half, device=device)
    for splits in (1, 2):
        int4.multiply(x, weight, out, int4.TILE_16, splits)
        assert error(out, x.float() @ weight.dequantized().float().t()) < 4e-3


@pytest.fixture
def hopper(half, device) -> ModuleType:
    """The kernel for Hopper, which Triton's interpreter does not know."""
    if not of_hopper(device):
        pytest.skip("no Hopper")
    found = int4._hopper_int4(device, half)
    assert found is not None
    return found


@pytest.mark.parametrize(("tokens", "rows"), [(32, 60), (64, 90), (128, 300), (256, 550)])
def test_the_kernel_for_hopper(tokens, rows, hopper, half, device):
    """Of every tile: partly filled ones, several for each program, K in parts, with a bias and added to a residual."""
    if half is torch.float16:
        pytest.skip("it takes long to compile them")
    for columns, depth, programs in ((200, 1160, 132), (264, 3 * 256, 2)):
        weight = make(columns, depth, 128 if depth % 256 == 0 else depth, True, half, device)
        x, bias = torch.randn(rows, depth, device=device).to(half), torch.randn(columns, device=device).to(half)
        residual = torch.randn(rows, columns, device=device).to(half)
        expected = x.float() @ weight.dequantized().float().t()
        kind = next(kind for kind in hopper.KINDS if kind.tokens == tokens)
        for splits in (1, 3):
            out = [torch.full_like(residual, torch.nan) for _ in range(3)]
            for one in out:
                hopper.multiply(x, weight, one, kind, splits, programs=programs)
            assert error(out[0], expected) < 4e-3 and all(torch.equal(one, out[0]) for one in out)
            added = residual.clone()
            hopper.multiply(x, weight, added, kind, splits, bias=bias, add=True, programs=programs)
            assert error(added, expected + bias.float() + residual.float()) < 4e-3
    assert hopper._counts(device).count_nonzero() == 0


def test_some_rows_are_multiplied_by_the_kernel_for_hopper(half, device, monkeypatch):
    """If the copy engine can copy them, and their results may depend on the batch."""
    calls: list[int] = []
    kernel = SimpleNamespace(
        fits=lambda x, weight, out: weight.rows % 8 == 0,
        plan=lambda *_: (int4.TILE_16, 1),
        multiply=lambda x, *more, **options: (calls.append(len(x)), int4.multiply(x, *more, **options)),
    )
    monkeypatch.setattr(int4, "HOPPER", (3, 5))
    monkeypatch.setattr(int4, "_hopper_int4", lambda *_: kernel)
    for columns, batch_invariant in ((72, False), (70, False), (72, True)):
        weight = make(columns, 256, 128, False, half, device)
        for rows in (2, 3, 5, 6):
            x = torch.randn(rows, 256, device=device).to(half)
            found = int4.int4_linear(x, weight, None, batch_invariant)
            assert error(found, x.float() @ weight.dequantized().float().t()) < 4e-3
    assert calls == [3, 5]


def test_what_tiles_the_kernel_for_hopper_takes():
    for rows, columns, depth in itertools.product((1, 16, 17, 100, 256, 300, 2000), (1024, 28672), (256, 1280, 14336)):
        kind, splits = hopper_int4.plan(rows, columns, depth, 132)
        blocks = -(-depth // 256)
        assert kind.tokens < 2 * max(rows, 17) and 1 <= splits <= hopper_int4.MAX_SPLITS
        assert (splits - 1) * -(-blocks // splits) < blocks, "a part of K is empty"
    # As few rounds as possible, of as many tiles as there are multiprocessors.
    assert hopper_int4.plan(128, 28672, 4096, 132)[1] == 1 and hopper_int4.plan(128, 4096, 14336, 132)[1] == 4
    assert hopper_int4.plan(2048, 28672, 4096, 132)[0].tokens == 256


@pytest.mark.parametrize(("size", "has_zeros"), KINDS)
def test_the_kernel_for_hopper_expands_what_is_meant(size, has_zeros, hopper, half, device):
    """To the last bit: each row of x has one column."""
    weight = make(136, 256, size, has_zeros, half, device)
    x, out = torch.eye(256, dtype=half, device=device)[:32], torch.empty(32, 136, dtype=half, device=device)
    for first in range(0, 256, 32):
        hopper.multiply(x.roll(first, 1).contiguous(), weight, out, hopper.KINDS[0], 1)
        assert torch.equal(out, weight.dequantized().t()[first : first + 32])


def test_sums_are_always_added_in_the_same_order(half, device):
    weight, x = make(200, 1024, 64, True, half, device), torch.randn(9, 1024, device=device).to(half)
    out = [torch.empty(9, 200, dtype=half, device=device) for _ in range(5)]
    for one in out:
        int4.multiply(x, weight, one, int4.TILE_16, 4)
    assert all(torch.equal(one, out[0]) for one in out)
    assert int4._counts(x.device).count_nonzero() == 0


def test_a_weight_is_dequantized_a_part_at_a_time(half, device, monkeypatch):
    monkeypatch.setattr(dequant, "CHUNK", 50 * 256)
    monkeypatch.setattr(dequant, "CHUNK_ROWS", 8)
    weight, (x, residual) = make(130, 256, 64, True, half, device), torch.randn(2, 70, 256, device=device).to(half)
    bias, residual = residual[0, :130].clone(), residual[:, :130].clone()
    expected = x.float() @ weight.dequantized().float().t() + bias.float()
    out = torch.empty_like(residual)
    dequant.by_torch(x, weight, out, bias=bias)
    assert error(out, expected) < 4e-3
    dequant.by_torch(x, weight, residual.copy_(out), bias=bias, add=True)
    assert error(residual, 2 * expected) < 4e-3


@pytest.mark.parametrize("rows", [0, 1, 17, 200, *(pytest.param(n, marks=pytest.mark.slow) for n in (16, 60))])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_linear(rows, batch_invariant, half, device, monkeypatch):
    """As torch's reference: the result alone, written to a place, and added to another result."""
    monkeypatch.setattr(int4, "MAX_ROWS", 128)
    weight, bias = make(70, 768, 128, False, half, device), torch.randn(70, device=device).to(half)
    ours, torchs = (Int4Linear(weight, bias, batch_invariant, way) for way in (ops, TorchOps()))
    x, residual = torch.randn(rows, 768, device=device).to(half), torch.randn(rows, 70, device=device).to(half)
    assert ours.fp8_scaling is None
    for factor in (1.0, 0.5):
        both = residual.clone(), residual.clone()
        ours.add(x, both[0], factor)
        torchs.add(x, both[1], factor)
        assert not rows or error(*both) < 4e-3
    wide = torch.zeros(rows, 100, dtype=half, device=device)
    ours.put(x, wide[:, 10:80])
    assert not rows or error(wide[:, 10:80], torchs(x)) < 4e-3
    assert torch.equal(wide[:, 10:80], ours(x)) and wide[:, 80:].count_nonzero() == 0


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_model_in_int4(family, checkpoint, tmp_path, monkeypatch, device):
    """With all kernels of a GPU it computes what torch does."""
    pytest.importorskip("transformers")
    from tests.worker.test_integers import store
    from tests.worker.test_sharding import mix

    monkeypatch.setattr("tests.worker.test_integers.GROUP", 32)
    sizes = {"moe_intermediate_size": 64} if family == "qwen3_moe" else {}
    folder, _ = store(checkpoint(family, **sizes)[0], tmp_path, "awq", ("proj.weight",))
    config = read_json(folder / "config.json")
    kinds = {"progress": False, "packed": True, "quantization": config["quantization_config"]}
    logits = []
    for way in (ops, TorchOps()):
        weights = SafetensorsWeights(folder, torch.float16, device, **kinds)
        model = Decoder(read_spec(config), weights, ops=way)
        assert not weights.num_dequantized and not (model.has_unquantized_experts and family == "qwen3_moe")
        tokens = torch.arange(1, 40, device=device)
        with torch.inference_mode():
            logits.append(model.forward(tokens, tokens - 1, mix))
    assert error(*logits) < 1e-2


@pytest.mark.usefixtures("steady_products")
def test_exact_results_do_not_depend_on_the_batch(half, device):
    linear = Int4Linear(make(70, 768, 64, True, half, device), None, True, ops)
    x = torch.randn(70, 768, device=device).to(half)
    together = linear(x)
    for some in (slice(0, 1), slice(3, 40)):
        assert torch.equal(linear(x[some]), together[some])


def test_plans():
    """K is divided where there would be few programs, and never into less than a few blocks."""
    cpu = torch.device("cpu")
    for rows in (1, 16, 17, 33, 100, int4.MAX_ROWS):
        for columns in (64, 4096, 28672, 1 << 20):
            for depth in (128, 1024, 4096, 14336):
                if (found := int4.plan_for(rows, columns, depth, cpu)) is None:
                    assert rows > int4.TILE_64.rows and columns * depth < int4.MIN_WEIGHTS
                    continue
                tile, splits = found
                assert tile.rows >= min(rows, 128) and splits in (1, 2, 4) and (splits == 1 or depth >= splits * 512)
                tiles = -(-columns // tile.columns) * -(-rows // tile.rows)
                assert splits == 1 or (tiles * splits <= int4.PROGRAMS[tile] * 132 and tiles <= int4.MAX_TILES)
    assert int4.plan_for(1, 4096, 14336, cpu) == (int4.TILE_16, 4)
    assert int4.plan_for(64, 4096, 4096, cpu) == (int4.TILE_64, 2)
    assert int4.plan_for(64, 28672, 4096, cpu) == (int4.WIDE, 1)
    assert int4.plan_for(128, 4096, 14336, cpu) == (int4.LARGE, 4)
    assert int4.plan_for(128, 4096, 4096, cpu) is None
    assert int4.plan_for(int4.MAX_ROWS + 1, 28672, 4096, cpu) is None


@pytest.mark.parametrize("tile", [*TILES, None])
def test_products_are_exact_sums(tile, half, device):
    """What is asked of a kernel before it is used."""
    assert int4._apart(device, half, tile, 2, 64, True) < 4e-3


def test_a_kernel_that_is_not_what_it_should_be_is_not_used(device, monkeypatch, caplog):
    monkeypatch.setattr(int4, "_apart", lambda *_: 0.5)
    int4.there.cache_clear()
    assert not int4.there(device, torch.float16) and "a relative error of 5.0e-01" in caplog.text
    monkeypatch.setattr(int4, "_apart", lambda *_: 1 / 0)
    int4.there.cache_clear()
    assert not int4.there(device, torch.float16) and "ZeroDivisionError" in caplog.text
    int4.there.cache_clear()
    monkeypatch.setattr(int4, "_apart", lambda *_: 1e-3)
    assert int4.there(device, torch.float16)
    int4.there.cache_clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="of CUDA graphs")
def test_a_graph_computes_the_same(device):
    weight = make(4096, 2048, 128, True, torch.bfloat16, device)
    for rows in (1, 20, 64, 200, 600):
        x = torch.randn(rows, 2048, device=device).bfloat16()
        expected = int4.int4_linear(x, weight, None, False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = int4.int4_linear(x, weight, None, False)
        for _ in range(3):
            found.zero_()
            graph.replay()
            assert torch.equal(found, expected)
