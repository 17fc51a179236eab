"""The kernels of latent attention, and the routers that come with it, against plain torch; in Triton's interpreter
where there is no GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton

from radixrt.config import WorkerConfig, resolve
from radixrt.worker.cuda.attention import attend, kernel_checks, variants
from radixrt.worker.cuda.attention.attend import Scratch
from radixrt.worker.cuda.attention.pages import Pages
from radixrt.worker.cuda.attention.variants import Shape, Variant, tiling
from radixrt.worker.cuda.attention.work import Items, make_items, make_merges, sequence_tiles
from radixrt.worker.cuda.latent import latent
from radixrt.worker.cuda.linear import invariant
from radixrt.worker.cuda.moe import routing
from radixrt.worker.execution.attention import TorchAttention
from radixrt.worker.execution.kv_pool import DTYPES, KVPool
from radixrt.worker.load.cuda_runner import find_flashinfer
from radixrt.worker.load.options import look_up
from radixrt.worker.model.layers.latent import LatentHeads, UpProjections
from radixrt.worker.model.layers.linear import HeadLinear, Linear
from radixrt.worker.model.layers.moe import Experts
from radixrt.worker.model.spec.expert_spec import Routing
from tests.checkpoints import make_model
from tests.worker.cuda.test_kernels import SEQUENCES, error
from tests.worker.pages import make_plan

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # exp overflows to infinity, as it should


def pages_of(pool: KVPool) -> Pages:
    keys, values = (x.flatten(0, 1) for x in pool.pages(0, 1))
    return Pages(keys, values, torch.zeros(1, 1), pool.scales[0], None)


# ---------------------------------------------------------------- norm, rotation, pages


@pytest.mark.parametrize("kv_dtype", ["float32", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "nope", "rank", "rope"), [(4, 16, 32, 8), (20, 8, 24, 16), (1, 4, 40, 4)])
def test_append(heads, nope, rank, rope, interleaved, kv_dtype, device):
    """Rows of what it reads lie apart, as those of a part of a product do."""
    torch.manual_seed(3)  # of the largest values a wrongly rounded one is much of the whole
    tokens, slots = 6, torch.tensor([9, 0, 3, 11, 4, 0], dtype=torch.int32, device=device)
    made = torch.randn(tokens, heads * (nope + rope) + rank + rope, device=device)
    made[3, -rope:] *= 1e6  # beyond FP8
    q, both = made[:, : -rank - rope].unflatten(1, (heads, -1)), made[:, -rank - rope :]
    k_up = HeadLinear(torch.randn(heads, nope, rank, device=device).transpose(1, 2))
    norm, (cos, sin) = torch.rand(rank, device=device), torch.randn(2, tokens, 1, rope // 2, device=device)
    made_heads = LatentHeads(q, both, UpProjections(k_up, k_up), norm, 1e-6, cos, sin, interleaved)
    expected_q, k, v = made_heads.split()
    pools = [KVPool(1, 12, 1, rank + rope, DTYPES[kv_dtype], device, rank) for _ in range(2)]
    for pool in pools:
        pool.scales = [(0.5, 0.5)]
    dtype = torch.float16 if "fp8" in kv_dtype else torch.float32
    place = torch.full_like(expected_q, torch.nan, dtype=dtype)
    found = latent.append(pages_of(pools[0]), made_heads, slots, place)
    assert found is place and error(found, expected_q) < (1e-3 if "fp8" in kv_dtype else 1e-6)
    again = latent.append(pages_of(pools[1]), made_heads, slots)
    assert torch.equal(again, found)
    full = torch.full(q.shape, torch.nan, device=device)
    whole = torch.full((3, *found.shape[1:]), torch.nan, dtype=dtype, device=device)
    few = latent.append(pages_of(pools[1]), made_heads, slots, whole[:2], full)
    assert error(few, found[:2]) < (1e-3 if "fp8" in kv_dtype else 1e-6) and whole[2].isnan().all(), "the first alone"
    assert torch.equal(full[..., :nope], q[..., :nope])
    assert error(full[..., nope:], expected_q[..., rank:]) < 1e-6
    expected = KVPool(1, 12, 1, rank + rope, DTYPES[kv_dtype], device, rank)
    scale = 0.5 if "fp8" in kv_dtype else 1.0
    expected.write(0, slots.long(), k / 0.5, v / 0.5)
    real = torch.tensor([9, 3, 11, 4], device=device)
    stored = pages_of(pools[0]).keys[real].float() * scale
    # Triton's interpreter rounds some FP8 values wrongly.
    assert error(stored, expected.read(0, real, torch.float32)[0] * scale) < (2e-2 if "fp8" in kv_dtype else 1e-6)
    assert stored.isfinite().all()


def test_queries_of_float16_saturate(device):
    q, both = torch.tensor([[[1.0, -1.0, 0.0, 0.0]], [[torch.nan, 0.0, 0.0, 0.0]]], device=device), torch.ones(2, 6)
    k_up = HeadLinear(torch.tensor([[[1e6, 0.0], [0.0, 1e6], [1.0, 0.0], [0.0, 0.0]]], device=device))
    ones, none = torch.ones(2, 1, 1, device=device), torch.zeros(2, 1, 1, device=device)
    made = LatentHeads(
        q, both.to(device), UpProjections(k_up, k_up), torch.ones(4, device=device), 1e-6, ones, none, False
    )
    pool = KVPool(1, 4, 1, 6, torch.float8_e4m3fn, device, 4)
    found = latent.append(pages_of(pool), made, torch.tensor([0, 1], dtype=torch.int32, device=device))
    assert found[0, 0, :3].tolist() == [65504.0, -65504.0, 1.0] and found[1].isnan().any()


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize(
    ("kv_dtype", "heads", "rank", "rope", "page_size"),
    [
        ("float32", 8, 32, 16, 1),
        ("fp8_e4m3", 16, 24, 8, 4),
        pytest.param("fp8_e5m2", 1, 16, 16, 1, marks=pytest.mark.slow),
        pytest.param("float32", 128, 32, 16, 1, marks=pytest.mark.slow),
        pytest.param("float32", 20, 40, 4, 16, marks=pytest.mark.slow),
    ],
)
def test_attend(heads, rank, rope, page_size, kv_dtype, device):
    """Chunks and decodes, with many parts and with one, tiles that have some heads of a query and all; the softmax has
    a scale of its own."""
    plan, table = make_plan(np.random.default_rng(0), page_size, SEQUENCES)
    pool = KVPool(1, (int(table.max()) + 1) * page_size, 1, rank + rope, DTYPES[kv_dtype], device, rank)
    pool.scales = [(2.0, 2.0)]
    everything = torch.arange(pool.slots, device=device)
    k = torch.randn(pool.slots, 1, rank + rope, device=device)
    pool.write(0, everything, k, k[..., :rank])
    q = torch.randn(len(plan.tokens), heads, rank + rope, device=device)
    reference = TorchAttention(pool, page_size, (None,), 0.3)
    reference.bind(table)
    expected = reference.begin(plan, device).over_pages(0, q)

    shape = Shape(heads, 1, rank + rope, page_size, rank, 0.3)
    keys, values = (x.flatten(0, 1) for x in pool.pages(0, page_size))
    scales = (2.0, 2.0) if "fp8" in kv_dtype else (1.0, 1.0)
    on_device = torch.from_numpy(table).to(device)
    chunks, decodes = np.flatnonzero(plan.counts > 1), np.flatnonzero(plan.counts == 1)
    for variant, chosen, programs in (
        (Variant(64, 16, 4, 2), chunks, 132),
        (Variant(64, 32, 4, 1), chunks, 1),
        (Variant(max(16, triton.next_power_of_2(shape.group)), 16, 4, 2), decodes, 2),
    ):
        single = chosen is chunks
        cut = tiling(variant, shape, programs, single=single)
        mine = [int(plan.counts[:i].sum()) + j for i in chosen for j in range(plan.counts[i])]
        counts = plan.counts[chosen]
        first = 2 + np.cumsum(counts) - counts
        most = cut.queries if single else 1
        tiles = sequence_tiles(plan.rows[chosen], plan.starts[chosen], counts, first, None, most)
        items, _ = make_items(tiles, cut)
        merges = make_merges([items.items])
        work = tuple(x if x is None else torch.from_numpy(x).to(device) for x in (items.items, items.starts))
        out = torch.full((len(mine) + 2, heads, rank), torch.nan, device=device)
        scratch = Scratch.make(merges.partials, shape, device)
        attend.attend(
            torch.cat((q[:2], q[mine])), keys, values, on_device, work, out, scratch, shape, variant, causal=single,
            scales=scales,
        )  # fmt: skip
        lists = (torch.from_numpy(x).to(device) for x in (merges.queries, merges.entries))
        attend.merge(scratch.partials, *lists, out, shape)
        assert error(out[2:], expected[mine]) < 1e-2
        assert out[:2].isnan().all(), "queries before the first are not its own"


def test_queries_of_many_sequences_by_their_order(device):
    """As those under a shared prefix are read: places in an order; what the table's rows have in common, once."""
    shape = Shape(4, 1, 48, 1, 32)
    pool = KVPool(1, 40, 1, 48, torch.float32, device, 32)
    k = torch.randn(40, 1, 48, device=device)
    pool.write(0, torch.arange(40, device=device), k, k[..., :32])
    q = torch.randn(7, 4, 48, device=device)
    order = torch.tensor([6, 1, 4, 0, 2], dtype=torch.int32, device=device)
    item = torch.tensor([[1, 3, 0, 3, 36, 36, 0, 0]], dtype=torch.int32, device=device)  # of queries 1, 4 and 0
    table = torch.arange(40, dtype=torch.int32, device=device)[None]
    pages, out, scratch = pages_of(pool), torch.zeros(7, 4, 32, device=device), Scratch.make(3, shape, device)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    attend.attend(
        q, pages.keys, pages.values, table, (item, starts), out, scratch, shape, Variant(64, 16, 4, 2),
        order=order, causal=False,
    )  # fmt: skip
    scores = torch.einsum("qhd,kd->qhk", q[[1, 4, 0]], k[3:36, 0]) * 48**-0.5
    assert error(scratch.values, scores.softmax(-1) @ k[3:36, 0, :32]) < 1e-2
    assert error(scratch.lse, scores.logsumexp(-1) / np.log(2)) < 1e-3
    assert not out.any() and len(Items.none(1)) == 0


def test_flashinfer_is_not_for_it(tmp_path):
    make_model(tmp_path, "deepseek_v2")
    for backend in ("flashinfer", "auto"):
        config = resolve(WorkerConfig(model=str(tmp_path), device="cpu", attention_backend=backend))
        loaded = look_up(config)
        if backend == "auto":
            assert find_flashinfer(config, loaded) is None
        else:
            with pytest.raises(ValueError, match="attention_backend: FlashInfer is not used for latent attention"):
                find_flashinfer(config, loaded)


def test_heads_of_a_tile():
    """All heads of a query, or as many as divide them and fit; keys are counted once."""
    for heads, group in ((16, 16), (128, 64), (64, 64), (96, 48), (20, 20), (7, 7)):
        shape = Shape(heads, 1, 576, 1, 512)
        assert (shape.group, shape.blocks) == (group, heads // group)
        assert variants.decode_variant(shape, 1).rows >= group and variants.chunk_variant(shape, 2).queries(group) >= 1
    assert (shape.key_elements, shape.value_dim, Shape(8, 2, 128, 1).key_elements) == (576, 512, 512)
    assert kernel_checks.find_specialised(shape, torch.float8_e4m3fn, torch.bfloat16, torch.device("cuda")) is None


# ---------------------------------------------------------------- products of each head


@pytest.mark.parametrize(("rows", "heads", "columns", "depth"), [(1, 2, 20, 33), (70, 3, 130, 64)])
def test_head_product(rows, heads, columns, depth, device):
    x = torch.randn(rows, heads, depth + 5, device=device)[..., :depth]
    out = torch.zeros(rows, heads, columns + 3, device=device)
    for weight in (
        torch.randn(heads, columns, depth, device=device),
        torch.randn(heads, depth, columns, device=device),
    ):
        turned = weight if weight.shape[1] == columns else weight.transpose(1, 2)
        invariant.head_product(x, turned, out[..., :columns])
        expected = torch.einsum("thk,hnk->thn", x.double(), turned.double())
        assert error(out[..., :columns], expected) < 1e-5 and not out[..., columns:].any()
    invariant.head_product(x[:0], turned, out[:0])


# ---------------------------------------------------------------- routers


ROUTINGS = {
    "scaled": Routing(factor=3.0),
    "groups": Routing(groups=4, kept_groups=2, factor=2.0),
    "sigmoid": Routing(sigmoid=True),
    "pairs": Routing(sigmoid=True, groups=4, kept_groups=2, factor=2.5, float32_logits=True),
    "odd": Routing(sigmoid=True, groups=3, kept_groups=2),
    "biased": Routing(biased=True, min_weight_sum=0.5, float32_logits=True),
    "unbiased": Routing(sigmoid=True, unbiased=True),
    "mixed": Routing(jitter=0.2),
}


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("name", ROUTINGS)
def test_route(name, normalized, device):
    """As the reference; also in the launch that begins a step of experts."""
    ways, chosen = ROUTINGS[name], 5
    normalized &= ways.jitter is None
    count = 8 * ways.groups
    router, none = Linear(torch.randn(count, 16, device=device)), torch.empty(0)
    bias = torch.randn(count, device=device) if ways.has_bias else None
    reference = Experts(router, none, none, chosen, normalized, "silu", False, ways, bias)
    x = torch.randn(12, 16, device=device)
    weights, numbers = routing.route(reference.logits(x), chosen, normalized, ways, bias)
    expected_weights, expected = reference.route(x)
    assert torch.equal(numbers.long(), expected)
    assert error(weights, expected_weights) < 1e-6
    begun, order, _ = routing.begin(reference.logits(x), chosen, normalized, 16, x, None, ways, bias)
    assert torch.equal(begun, weights) and torch.equal(order.places, routing.sort(numbers, count, 16).places)


def test_nan_chooses_experts_that_exist(device):
    logits, bias = torch.randn(3, 16, device=device), torch.zeros(16, device=device)
    logits[1] = torch.nan
    weights, numbers = routing.route(logits, 4, True, ROUTINGS["pairs"], bias)
    assert ((numbers >= 0) & (numbers < 16)).all() and weights.isnan().any(1).tolist() == [False, True, False]
