"""The kernel before attention of layers whose heads differ, against plain torch; in Triton's interpreter where there is
no GPU."""

from __future__ import annotations

import pytest
import torch

from radixrt.worker.cuda.attention import mixed_append, variants
from radixrt.worker.cuda.attention.variants import Shape
from radixrt.worker.execution.kv_pool import DTYPES
from radixrt.worker.execution.mixed_pool import MixedKVPool
from radixrt.worker.model.layers.mixed_heads import MixedHeads, MixedNorms
from radixrt.worker.model.layers.norms import HeadNorm
from radixrt.worker.model.spec.spec import LayerSpec
from tests.worker.cuda.test_kernels import error

EPS, HEADS = 1e-5, 10
SLOTS = [3, 0, 17, 9, 4]
LAYERS = {
    "as Gemma 4's": (LayerSpec(2, 32, 32, 1), 16),
    "with tied values": (LayerSpec(1, 48, 48, 1, tied_values=True), 24),
    "of another layer": (LayerSpec(2, 32, 32, 1, source=0), 16),
    "as MiMo's": (LayerSpec(5, 24, 16, 1, value_factor=0.707), 4),
}


def make_heads(name: str, normed: bool, dtype: torch.dtype, device: torch.device) -> MixedHeads:
    own, turned = LAYERS[name]
    generator = torch.Generator().manual_seed(0)

    def norm(size: int) -> HeadNorm:
        weight = 1 + torch.randn(size, generator=generator) / 4
        return HeadNorm(weight.to(device, dtype), EPS, centered=False)

    values = 0 if own.tied_values else own.kv_heads * own.value_dim
    more = 0 if own.source is not None else own.kv_heads * own.head_dim + values
    qkv = torch.randn(len(SLOTS), HEADS * own.head_dim + more, generator=generator)
    cos, sin = torch.randn(2, len(SLOTS), 1, turned, generator=generator).to(device, dtype)
    without = HeadNorm(torch.ones(1, device=device), EPS, centered=False)
    norms = MixedNorms(norm(own.head_dim), norm(own.head_dim), without) if normed else MixedNorms()
    return MixedHeads(qkv.to(device, dtype), HEADS, own, norms, cos, sin)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "normed", "bar"),
    [
        ("float32", "float32", True, 1e-6),
        pytest.param("bfloat16", "bfloat16", True, 1.2e-2, marks=pytest.mark.slow),
        ("bfloat16", "fp8_e4m3", True, 0.1),
        pytest.param("float32", "fp8_e5m2", False, 0.15, marks=pytest.mark.slow),
    ],
)
def test_append(name, dtype, kv_dtype, normed, bar, device):
    """In bfloat16 it rounds less: it rotates in float32. (The interpreter rounds to bfloat16 and FP8 towards zero.)
    Other slots stay as they were."""
    heads = make_heads(name, normed, DTYPES[dtype], device)
    own, slots = heads.sizes, torch.tensor(SLOTS, device=device)
    pool = MixedKVPool([LayerSpec(own.kv_heads, own.head_dim, own.value_dim, 1)], (0,), 20, DTYPES[kv_dtype], device)
    pool.scales = [(0.25, 0.5) if pool.dtype.itemsize == 1 else (1.0, 1.0)]
    keys, values = (x.flatten(0, 1) for x in pool.pages(0, 1))
    out = heads.qkv.new_empty(len(SLOTS), HEADS, own.head_dim)
    assert mixed_append.append(heads, slots.int(), keys, values, pool.scales[0], out) is out
    rest = [slot for slot in range(20) if slot not in SLOTS]
    q, *stored = heads.split()
    assert error(out, q) < max(bar if dtype == "bfloat16" else 0, 1e-6)
    for x, expected in zip(pool.read(0, torch.arange(20, device=device), torch.float32), stored, strict=True):
        if expected is None:
            assert not x.any()
        else:
            assert error(x[slots], expected) < bar and not x[rest].any()


@pytest.mark.parametrize("room", [232_448, 166_912, 101_376])
@pytest.mark.parametrize(
    ("itemsize", "group", "dims"),
    [(1, 8, (512, 256)), (2, 8, (512, 256)), (2, 32, (512, 256)), (4, 8, (512, 256)), (2, 2, (256, 256))],
)
def test_tiles_of_large_heads_fit_in_shared_memory(room, itemsize, group, dims, monkeypatch):
    monkeypatch.setattr(variants, "room", lambda: room)
    shape = Shape(2 * group, 2, dims[0], 1, v_dim=dims[1])
    for choose in (variants.decode_variant, variants.shared_variant, variants.chunk_variant):
        tile = choose(shape, itemsize)
        shared = tile.rows * dims[0] * max(2, itemsize) + tile.stages * tile.keys * sum(dims) * itemsize
        assert shared <= room and tile.rows >= max(16, group) and tile.keys >= 16
