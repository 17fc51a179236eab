"""Each fused kernel against the same in plain torch."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from radixrt.messages import Sampling
from radixrt.worker.cuda.attention import attend
from radixrt.worker.cuda.attention.attend import Scratch
from radixrt.worker.cuda.attention.kernel_checks import find_specialised
from radixrt.worker.cuda.attention.sinks import add_sinks
from radixrt.worker.cuda.attention.variants import Shape, Variant, tiling
from radixrt.worker.cuda.attention.work import make_items, make_merges, sequence_tiles
from radixrt.worker.cuda.elementwise import kernels, residuals
from radixrt.worker.cuda.linear import invariant
from radixrt.worker.cuda.linear.quantize_activations import quantize
from radixrt.worker.cuda.sampling import sampling_kernels
from radixrt.worker.execution import sampler
from radixrt.worker.execution.attention import TorchAttention
from radixrt.worker.execution.kv_pool import DTYPES, KVPool
from radixrt.worker.execution.mixed_pool import MixedKVPool
from radixrt.worker.execution.sampler import SamplingMetadata
from radixrt.worker.model.layers.fp8 import Fp8Activations, Fp8Scaling
from radixrt.worker.model.layers.layers import Heads
from radixrt.worker.model.layers.norms import NoNorm, Norm
from radixrt.worker.model.layers.ops import TorchOps
from radixrt.worker.model.spec.spec import LayerSpec
from tests.worker.pages import make_plan

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # exp overflows to infinity, as it should


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def test_another_gluon_is_done_without(monkeypatch):
    """Whatever the GPU is, and whatever of it is elsewhere in another version."""
    from triton.experimental.gluon import language

    name = "radixrt.worker.cuda.attention.hopper"
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("radixrt.worker.cuda.attention.hopper", raising=False)
    monkeypatch.delattr(language, "shared_memory_descriptor")
    shape = Shape(8, 2, 128, 1)
    assert find_specialised(shape, torch.float8_e4m3fn, torch.bfloat16, torch.device("cuda")) is None


@pytest.mark.parametrize(("rows", "size"), [(1, 64), (5, 96), (3, 1000)])
def test_norm(rows, size, device):
    x = torch.randn(rows, size, device=device)
    weight = torch.rand(size, device=device)
    assert error(kernels.norm(x, weight, 1e-5), F.rms_norm(x, (size,), weight, 1e-5)) < 1e-6
    x += 3 * torch.randn(rows, 1, device=device)
    expected = F.layer_norm(x, (size,), weight, None, 1e-5)
    for ops in (kernels, TorchOps):
        assert error(ops.norm(x, weight, 1e-5, centered=True), expected) < 1e-6
    bias = torch.randn(size, device=device)
    for ops in (kernels, TorchOps):
        found = ops.norm(x, weight, 1e-5, centered=True, bias=bias)
        assert error(found, F.layer_norm(x, (size,), weight, bias, 1e-5)) < 1e-6
    narrow = kernels.norm(x.half(), weight, 1e-5, centered=True)
    once = F.layer_norm(x.half().float(), (size,), weight, None, 1e-5).half()
    assert float((narrow == once).float().mean()) > 0.95, "rounded once, but for sums in another order"


def test_a_wide_weight_multiplies_what_is_not_rounded(device):
    """Of norms, and of those of heads: the result is rounded once."""
    x, weight = torch.randn(5, 96, device=device).half(), 1 + torch.rand(96, device=device)
    found, expected = kernels.norm(x, weight, 1e-5), F.rms_norm(x.float(), (96,), weight, 1e-5).half()
    assert found.dtype == torch.float16
    assert float((found == expected).float().mean()) > 0.99
    assert float((TorchOps.norm(x, weight, 1e-5) == expected).float().mean()) > 0.99
    narrow = kernels.norm(x, weight.half(), 1e-5)
    assert 0.01 < float((narrow != expected).float().mean())
    qkv, slots = torch.randn(5, 4, 96, device=device).half(), torch.arange(1, 6, dtype=torch.int32, device=device)
    one, none = torch.ones(5, 1, 48, device=device), torch.zeros(5, 1, 48, device=device)
    pool = KVPool(1, 6, 1, 96, torch.float16, device)
    keys, values = (x.flatten(0, 1) for x in pool.pages(0, 1))
    q = kernels.append(qkv, one, none, slots, keys, values, 2, (weight, weight), 1e-5)
    for found, x in ((q, qkv[:, :2]), (keys[1:], qkv[:, 2:3])):
        assert float((found == F.rms_norm(x.float(), (96,), weight, 1e-5).half()).float().mean()) > 0.99


@pytest.mark.parametrize("activation", kernels.ACTIVATIONS)
def test_gate(activation, device):
    x = 6 * torch.randn(4, 2 * 300, device=device)
    gate, up = x.chunk(2, -1)
    expected = {
        "silu": F.silu(gate) * up,
        "gelu": F.gelu(gate) * up,
        "gelu_pytorch_tanh": F.gelu(gate, approximate="tanh") * up,
        "clamped_swiglu": (up.clamp(-7, 7) + 1) * gate.clamp(max=7) * torch.sigmoid(1.702 * gate.clamp(max=7)),
    }[activation]
    assert error(kernels.gate(x, activation), expected) < 1e-6
    assert TorchOps.gate(x, activation).sub(expected).abs().max() < 1e-4
    apart = torch.cat((up, up, up), 1).unflatten(1, (3, -1))[:, 1]
    for ops in (TorchOps, kernels):
        assert error(ops.gate(gate.contiguous(), activation, up=apart), expected) < 1e-6
    x[1, 3], x[2, 303] = torch.nan, torch.nan
    assert kernels.gate(x, activation).isnan().nonzero().tolist() == [[1, 3], [2, 3]]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("fp8_scaling", [None, *Fp8Scaling])
@pytest.mark.parametrize("followed", [False, True])
def test_add_normed(followed, fp8_scaling, scaled, device):
    """As the operations one by one, to the last bit but where sums are in another order."""
    after = Norm(1 + torch.rand(300, device=device), 1e-5, None)
    norm = Norm(1 + torch.rand(300, device=device), 1e-6, fp8_scaling) if followed else NoNorm()
    x, residual = (torch.randn(7, 300, device=device) for _ in range(2))
    scalar = torch.tensor([0.7], device=device) if scaled else None
    expected = residual.clone()
    results = (
        TorchOps.add_normed(x, after, expected, norm, scalar),
        residuals.add_normed(x, after, residual, norm, scalar),
    )
    assert error(residual, expected) < 1e-6
    wanted, found = (result.dequantized() if isinstance(result, Fp8Activations) else result for result in results)
    assert error(found, wanted) < (0.1 if isinstance(results[0], Fp8Activations) else 1e-6)
    assert followed or results[1] is residual


def test_add_normed_of_layer_norms(device):
    after = Norm(torch.ones(30, device=device), 1e-5, None, centered=True)
    x, residual = torch.randn(2, 30, device=device), torch.zeros(2, 30, device=device)
    found = residuals.add_normed(x, after, residual, NoNorm())
    assert error(found, F.layer_norm(x, (30,))) < 1e-6 and found is residual


def test_squared_relu(device):
    """In place, or quantized as `quantize` does it; NaN stays NaN."""
    x = 6 * torch.randn(4, 2500, device=device)
    expected = F.relu(x).square()
    for fp8_scaling in Fp8Scaling:
        found, again = kernels.squared_relu(x.clone(), fp8_scaling), quantize(expected, fp8_scaling)
        assert torch.equal(found.dequantized(), again.dequantized())
    x[2, 7] = torch.nan
    assert kernels.squared_relu(x) is x and x.isnan().nonzero().tolist() == [[2, 7]]
    x[2, 7] = expected[2, 7]
    assert torch.equal(x, expected)


@pytest.mark.parametrize("kv_dtype", ["float32", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "turned"),
    [(4, 2, 64, 64), (7, 1, 40, 40), (20, 5, 16, 16), (7, 1, 40, 12), (4, 2, 64, 32)],
)
def test_append(heads, kv_heads, dim, turned, norms, kv_dtype, device):
    """`turned` of a head's elements are rotated."""
    tokens, slots = 6, torch.tensor([9, 0, 3, 11, 4, 0], dtype=torch.int32, device=device)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, device=device)
    qkv[3, heads:] *= 1e6  # beyond FP8
    cos, sin = torch.randn(2, tokens, 1, turned // 2, device=device)
    weights = (torch.rand(dim, device=device), 1e3 * torch.rand(dim, device=device))
    pool = KVPool(1, 12, kv_heads, dim, DTYPES[kv_dtype], device)
    keys, values = (x.flatten(0, 1) for x in pool.pages(0, 1))
    q, k, v = Heads(qkv, heads, weights if norms else None, 1e-6, cos, sin).split()
    found = kernels.append(
        qkv, cos, sin, slots, keys, values, heads, weights if norms else None, 1e-6, scales=(0.5, 2.0)
    )
    assert error(found, q) < 1e-6
    expected = KVPool(1, 12, kv_heads, dim, DTYPES[kv_dtype], device)
    expected.write(0, slots.long(), k / 0.5, v / 2.0)
    real = torch.tensor([9, 3, 11, 4], device=device)
    for a, b in zip(pool.read(0, real, torch.float32), expected.read(0, real, torch.float32), strict=True):
        if kv_dtype == "float32":
            assert error(a, b) < 1e-6
        else:  # Triton's interpreter rounds some FP8 values wrongly
            assert float((a == b).float().mean()) > (0.9 if device.type == "cpu" else 0.99)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "turned"), [(4, 2, 64, 64), (21, 3, 40, 12)])
def test_append_normalizes_all_heads_together(heads, kv_heads, dim, turned, ranks, device):
    """By what all ranks have; V stays."""
    qkv = torch.randn(3, heads + 2 * kv_heads, dim, device=device)
    means = kernels.mean_squares(qkv, heads, kv_heads)
    assert error(means, TorchOps.mean_squares(qkv, heads, kv_heads)) < 1e-6
    assert error(means[:, 0], qkv[:, :heads].flatten(1).square().mean(1)) < 1e-6
    assert error(means[:, 1], qkv[:, heads : heads + kv_heads].flatten(1).square().mean(1)) < 1e-6
    means = torch.stack([means, *torch.rand(ranks - 1, 3, 2, device=device)], 1)
    weights = torch.rand(heads * dim, device=device), torch.rand(kv_heads * dim, device=device)
    cos, sin = torch.randn(2, 3, 1, turned // 2, device=device)
    made = Heads(qkv, heads, weights, 1e-6, cos, sin, means)
    pool, expected = (KVPool(1, 4, kv_heads, dim, torch.float32, device) for _ in range(2))
    slots = torch.tensor([3, 1, 2], dtype=torch.int32, device=device)
    q, k, v = made.split()
    expected.write(0, slots.long(), k, v)
    keys, values = (x.flatten(0, 1) for x in pool.pages(0, 1))
    assert error(kernels.append(qkv, cos, sin, slots, keys, values, heads, weights, 1e-6, means=means), q) < 1e-6
    for a, b in zip(*(p.read(0, slots.long(), torch.float32) for p in (pool, expected)), strict=True):
        assert error(a, b) < 1e-6


def test_append_keeps_nan(device):
    if device.type == "cpu":
        pytest.skip("Triton's interpreter makes a number of NaN in FP8")
    qkv = torch.randn(1, 4, 16, device=device)
    qkv[0, 2, 3] = torch.nan
    pool = KVPool(1, 4, 1, 16, torch.float8_e4m3fn, device)
    keys, values = (x.flatten(0, 1) for x in pool.pages(0, 1))
    cos, sin = torch.randn(2, 1, 1, 8, device=device)
    kernels.append(qkv, cos, sin, torch.tensor([2], dtype=torch.int32, device=device), keys, values, 2)
    assert pool.read(0, torch.tensor([2], device=device), torch.float32)[0].isnan().any()


def test_scatter_and_resolve(device):
    table = torch.zeros(5, 40, dtype=torch.int32, device=device)
    writes = torch.tensor([[1, 1, 4, 4], [0, 39, 7, 7], [5, 6, 7, 7]], dtype=torch.int32, device=device)
    kernels.scatter(writes, table)
    kernels.scatter(writes[:, :0], table)
    assert table.nonzero().tolist() == [[1, 0], [1, 39], [4, 7]]
    assert table[[1, 1, 4], [0, 39, 7]].tolist() == [5, 6, 7]
    drawn = torch.tensor([10, 11, 12], dtype=torch.int32, device=device)
    tokens = torch.tensor([-1, 5, -1, 8, 9], dtype=torch.int32, device=device)
    rows = torch.tensor([2, 1, 0], dtype=torch.int32, device=device)
    assert kernels.resolve(tokens, rows, drawn).tolist() == [12, 5, 10, 8, 9]


@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 7, 33), (70, 130, 64), (3, 256, 200)])
def test_product(rows, columns, depth, device):
    x, weight, bias = (torch.randn(*size, device=device) for size in ((rows, depth), (columns, depth), (columns,)))
    expected = F.linear(x.double(), weight.double(), bias.double())
    assert error(invariant.product(x, weight, bias), expected) < 1e-5
    assert invariant.product(x[:0], weight).shape == (0, columns)


def test_samples_is_that_of_the_reference(device):
    samplings = [Sampling(temperature=0.3 + 0.4 * i, seed=i * 12345 - 3) for i in range(6)]
    arrays = SamplingMetadata.arrays(samplings, list(range(7, 13)))
    metadata = SamplingMetadata.of({name: torch.from_numpy(x).to(device) for name, x in arrays.items()})
    logits = 4 * torch.randn(9, 5000, device=device)
    rows = torch.tensor([8, 0, 3, 3, 1, 5], dtype=torch.int32, device=device)
    expected = sampler.sample_tokens(logits[rows.long()], metadata)
    assert (
        sampling_kernels.sample_tokens(logits, rows, metadata.temperature, metadata.keys).tolist() == expected.tolist()
    )


@pytest.mark.parametrize("vocab", [31, 5000])
def test_a_samples_of_nan_is_a_token_that_there_is(vocab, device):
    logits = torch.randn(3, vocab, device=device)
    ones, keys = torch.ones(3, 1, device=device), torch.arange(3, device=device)[:, None]
    rows = torch.arange(3, dtype=torch.int32, device=device)
    fine = sampling_kernels.sample_tokens(logits, rows, ones, keys)
    logits[0], logits[1] = torch.nan, -torch.inf
    found = sampling_kernels.sample_tokens(logits, rows, ones, keys)
    assert found[2] == fine[2]
    assert ((found >= 0) & (found < vocab)).all()


@pytest.mark.parametrize("vocab", [31, 4096, 9000])
def test_largest(vocab, device):
    logits = torch.randn(9, vocab, device=device)
    logits[1, 3] = logits[1, vocab - 2] = 9.0
    logits[2, 5], logits[3] = torch.nan, torch.nan
    logits[4], logits[5, 7], logits[6, 8] = -torch.inf, torch.inf, -torch.inf
    logits[7, vocab - 1] = 99.0
    found = sampling_kernels.largest(logits)
    assert found.dtype == torch.int32
    assert found[:9].tolist() == [1, 1, 0, 0, 0, 0, 1, 1, 1]
    peaks, best = logits.max(-1)
    right = [0, 1, 6, 7, 8]
    assert best[1] in (3, vocab - 2)
    best[1] = 3
    assert found[9:][right].tolist() == best[right].tolist()
    assert (found[9:] >= 0).all() and (found[9:] < vocab).all()
    assert sampling_kernels.largest(logits[:0]).tolist() == []
    assert sampling_kernels.largest(logits[2:4, : vocab - 1])[2:].max() < vocab


class InTurn:
    """A group whose ranks come one after the other: the first time to leave what they have, then for all of it."""

    def __init__(self) -> None:
        self.left: list[torch.Tensor] = []

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        self.left.append(x)
        return torch.cat(self.left[:3], 1) if len(self.left) > 3 else x


@pytest.mark.parametrize("vocab", [31, 9000, 30_000])
def test_largest_of_all_ranks(vocab, device):
    """What a rank has behind its ids does not count; of equals, on whatever rank, the first does."""
    logits = torch.randn(7, vocab, device=device)
    logits[1, 3] = logits[1, vocab - 2] = 9.0
    logits[2, 5], logits[3, vocab - 1] = torch.nan, torch.inf
    logits[4] = -torch.inf
    width = -(-vocab // 3)
    group = InTurn()
    for _ in range(2):
        for rank in range(3):
            ids = range(rank * width, min(vocab, rank * width + width))
            own = torch.full((7, width), 1e9, device=device)
            own[:, : len(ids)] = logits[:, ids.start : ids.stop]
            found = sampling_kernels.largest(own, ids, group)
    expected = sampling_kernels.largest(logits)
    assert found[:7].tolist() == expected[:7].tolist() == [1, 1, 0, 0, 0, 1, 1]
    assert found[7:][[0, 1, 5, 6]].tolist() == expected[7:][[0, 1, 5, 6]].tolist()
    assert int(found[8]) == 3


@pytest.mark.parametrize("vocab", [31, 5000])
def test_mask(vocab, device):
    logits = torch.randn(5, vocab, device=device)
    rows, words = torch.tensor([4, 0, 1], device=device), -(-vocab // 32)
    allowed = torch.rand(3, 32 * words, device=device) < 0.5
    bits = np.packbits(allowed.cpu().numpy(), axis=1, bitorder="little").view(np.int32)
    expected = logits.clone()
    expected[rows] = expected[rows].masked_fill(~allowed[:, :vocab], -torch.inf)
    sampling_kernels.mask(logits, rows, torch.from_numpy(bits).to(device))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("page_size", [1, 4])
def test_gather(page_size, device):
    pool = KVPool(1, 64, 2, 24, torch.float8_e5m2, device)
    everything = torch.arange(64, device=device)
    pool.write(0, everything, *torch.randn(2, 64, 2, 24, device=device))
    keys, values = (x.flatten(0, 1) for x in pool.pages(0, 1))
    table = torch.randperm(64 // page_size, device=device).int().view(2, -1)
    sequences = torch.tensor([[1, 2, 20, 0], [0, 0, 3, 20], [0, 1, 1, 23]], dtype=torch.int32, device=device)
    out = torch.zeros(2, 24, 2, 24, device=device)
    kernels.gather(keys, values, table, page_size, sequences, 20, (out[0], out[1]), scales=(2.0, 4.0))
    at = torch.arange(64, device=device)
    slots = [table[r, at[f : f + n] // page_size].long() * page_size + at[f : f + n] % page_size
             for r, f, n, _ in sequences.tolist()]  # fmt: skip
    k, v = pool.read(0, torch.cat(slots), torch.float32)
    assert torch.equal(out[0], k * 2) and torch.equal(out[1], v * 4)


SEQUENCES = [(0, 30), (60, 1), (37, 20), (5, 1), (40, 23), (0, 1), (123, 1)]
WAYS = (False, None, False), (True, None, False), (False, 0.5, False), (False, None, True)


@pytest.mark.parametrize(
    ("kv_dtype", "window", "heads", "kv_heads", "dims", "page_size"),
    [
        pytest.param("float32", None, 8, 2, (16, 16), 1, marks=pytest.mark.slow),
        pytest.param("float32", 25, 14, 2, (24, 12), 4, marks=pytest.mark.slow),
        ("bfloat16", None, 8, 2, (16, 16), 1),
        ("fp8_e4m3", None, 4, 4, (24, 32), 16),
        ("fp8_e4m3", 25, 8, 2, (16, 16), 1),
        pytest.param("fp8_e5m2", None, 16, 1, (16, 16), 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(("with_sinks", "cap", "chunked"), WAYS)
def test_attend(heads, kv_heads, dims, page_size, window, kv_dtype, with_sinks, cap, chunked, device):
    """Chunks and decodes, with many parts and with one, with sinks, with capped scores, windows that are chunks,
    values of another size than keys; relative to the norm, both read the same pages."""
    if device.type == "cpu" and kv_dtype == "bfloat16":
        pytest.skip("Triton's interpreter does not multiply bfloat16")
    plan, table = make_plan(np.random.default_rng(0), page_size, SEQUENCES)
    layer, slots = LayerSpec(kv_heads, *dims, 1), (int(table.max()) + 1) * page_size
    pool = MixedKVPool([layer], (0,), slots, DTYPES[kv_dtype], device)
    k, v = (torch.randn(slots, kv_heads, dim, device=device) for dim in dims)
    pool.write(0, torch.arange(slots, device=device), k, v)
    q = torch.randn(len(plan.tokens), heads, dims[0], device=device)
    sinks = torch.randn(heads, device=device).mul(2) if with_sinks else None
    reference = TorchAttention(pool, page_size, (window,), sinks=(sinks,), cap=cap, chunked=chunked)
    reference.bind(table)
    expected = reference.begin(plan, device).over_pages(0, q)

    shape = Shape(heads, kv_heads, dims[0], page_size, sinks=with_sinks, cap=cap or 0.0, chunked=chunked, v_dim=dims[1])
    keys, values = (x.flatten(0, 1) for x in pool.pages(0, page_size))
    on_device = torch.from_numpy(table).to(device)
    for variant, chosen, programs in (
        (Variant(64, 16, 4, 2), np.flatnonzero(plan.counts > 1), 132),
        (Variant(64, 32, 4, 1), np.flatnonzero(plan.counts > 1), 1),
        (Variant(16, 16, 2, 2), np.flatnonzero(plan.counts == 1), 2 * kv_heads),  # some items a program
    ):
        decode = variant.rows == 16
        cut = tiling(variant, shape, programs, single=not decode)
        mine = [int(plan.counts[:i].sum()) + j for i in chosen for j in range(plan.counts[i])]
        counts = plan.counts[chosen]
        first = 2 + np.cumsum(counts) - counts
        tiles = sequence_tiles(
            plan.rows[chosen], plan.starts[chosen], counts, first, window, 1 if decode else cut.queries, chunked
        )
        items, _ = make_items(tiles, cut)
        merges = make_merges([items.items])
        work = tuple(x if x is None else torch.from_numpy(x).to(device) for x in (items.items, items.starts))
        out = torch.full((len(mine) + 2, heads, dims[1]), torch.nan, device=device)
        scratch = Scratch.make(merges.partials, shape, device)
        attend.attend(
            torch.cat((q[:2], q[mine])), keys, values, on_device, work, out, scratch, shape, variant,
            window=window, causal=not decode, sinks=sinks,
        )  # fmt: skip
        lists = (torch.from_numpy(x).to(device) for x in (merges.queries, merges.entries))
        attend.merge(scratch.partials, *lists, out, shape, sinks=sinks)
        assert error(out[2:], expected[mine]) < 1e-2
        assert out[:2].isnan().all(), "queries before the first are not its own"


@pytest.mark.parametrize(("heads", "dim"), [(8, 64), (20, 24), (64, 64)])
def test_sinks_of_results_of_others(heads, dim, device):
    """By the log-sum-exp in base 2: a sink that takes nothing, some, all."""
    out, lse = torch.randn(5, heads, dim, device=device), 3 * torch.randn(5, heads, device=device)
    sinks = torch.randn(heads, device=device)
    sinks[0], sinks[-1] = -1e4, 1e4
    natural = lse.double() * np.log(2)
    whole = torch.logaddexp(natural, sinks.double())
    expected = out.double() * (natural - whole).exp()[..., None]
    assert torch.equal(expected[:, -1], torch.zeros_like(expected[:, -1]))
    add_sinks(out, lse, sinks)
    assert torch.allclose(out.double(), expected, atol=1e-5)
