"""DeepSeek Sparse Attention on a GPU against plain torch; in Triton's interpreter where there is no GPU. (What it
generates is tested with other families, in test_runner.py.)"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from radixrt.worker.cuda.attention import attend, variants
from radixrt.worker.cuda.attention.pages import Pages
from radixrt.worker.cuda.attention.variants import Shape
from radixrt.worker.cuda.elementwise.staging import Packer
from radixrt.worker.cuda.latent import index_scores as scoring
from radixrt.worker.cuda.latent import sparse
from radixrt.worker.cuda.latent.index_scores import QUERIES, index_scores, make_tiles
from radixrt.worker.cuda.latent.sparse import Sparse
from radixrt.worker.execution.attention import TorchAttention
from radixrt.worker.execution.kv_pool import DTYPES, KVPool
from radixrt.worker.model.layers import sparse as plainly
from radixrt.worker.plan import Plan
from tests.worker.cuda.test_kernels import error
from tests.worker.pages import make_plan

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # what is not finite is tested

TOP_K = 20
SEQUENCES = [(3, 1), (19, 1), (20, 1), (150, 1), (0, 40), (10, 8), (137, 9), (0, 20)]
"""(cached, new) tokens: of some, all queries attend to all tokens, of others none, of others the first."""


def queries_of(plan, device) -> torch.Tensor:
    positions = np.concatenate([np.arange(a, a + n) for a, n in zip(plan.starts, plan.counts, strict=True)])
    rows = np.repeat(plan.rows, plan.counts)
    found = np.stack([np.arange(len(positions)), rows, positions], axis=1).astype(np.int32)
    return torch.from_numpy(found[positions >= TOP_K]).to(device)


def pages_and_queries(page_size: int, heads: int, dim: int, device):
    plan, table = make_plan(np.random.default_rng(0), page_size, SEQUENCES)
    plan = replace(plan, requests=tuple(map(str, range(len(SEQUENCES)))))
    keys = torch.randn((int(table.max()) + 1) * page_size, dim, device=device)
    q, weights = torch.randn(len(plan.tokens), heads, dim, device=device), torch.randn(len(plan.tokens), heads)
    return plan, table, keys, q, weights.to(device)


def plan_of(tokens: list[tuple[int, int]]) -> Plan:
    plan, _ = make_plan(np.random.default_rng(0), 1, tokens)
    return replace(plan, requests=tuple(map(str, range(len(tokens)))))


def slots_of(table: np.ndarray, row: int, count: int, page_size: int, device) -> torch.Tensor:
    at = np.arange(count)
    return torch.from_numpy(table[row, at // page_size].astype(np.int64) * page_size + at % page_size).to(device)


@pytest.mark.parametrize(("itemsize", "room", "expected"), [(2, 101_376, 2), (4, 232_448, 2), (4, 101_376, 1)])
def test_queries_that_are_multiplied_at_once_fit_in_shared_memory(itemsize, room, expected, monkeypatch):
    """Of 64 heads of 128 elements."""
    monkeypatch.setattr(scoring, "room", lambda: room)
    assert scoring.together(64, 128, itemsize) == expected


@pytest.mark.parametrize(
    ("page_size", "heads", "dim", "together"), [(1, 5, 12, 2), (1, 5, 12, 1), (4, 16, 32, 2), (16, 1, 8, 2)]
)
def test_index_scores(page_size, heads, dim, together, device, monkeypatch):
    monkeypatch.setattr(scoring, "together", lambda *_: together)
    plan, table, keys, q, weights = pages_and_queries(page_size, heads, dim, device)
    queries, on_device = queries_of(plan, device), torch.from_numpy(table).to(device)
    keys[slots_of(table, 3, 60, page_size, device)[55]] = torch.nan
    tiles = make_tiles(queries[:, 1].cpu().numpy(), 11)
    found = torch.full((len(queries), 256), torch.nan, device=device)
    index_scores(q, weights, keys, on_device, queries, torch.from_numpy(tiles).to(device), found, page_size)
    for (token, row, position), scores in zip(queries.tolist(), found, strict=True):
        own = keys[slots_of(table, row, position + 1, page_size, device)]
        expected = plainly._scores(q[token : token + 1], weights[token : token + 1], own)[0]
        expected = expected.nan_to_num(nan=plainly.HIGHEST)
        assert torch.allclose(scores[: position + 1], expected, atol=1e-4)
        assert scores[position + 1 :].isnan().all()
        assert (scores == plainly.HIGHEST).sum() == (row == 3)


def test_tiles():
    """Of 150, 1 and 70 queries, computed 128 at a time."""
    tiles = make_tiles(np.repeat([0, 3, 4], [150, 1, 70]), 2 * QUERIES)
    assert tiles.tolist() == [[0, 64], [64, 64], [128, 22], [150, 1], [151, 64], [215, 6]]
    assert make_tiles(np.zeros(10), 4).tolist() == [[0, 4], [4, 4], [8, 2]]
    rounds = sparse._rounds(np.zeros(200), 130)
    assert [(begin, end, tiles.tolist()) for begin, end, tiles in rounds] == [
        (0, 128, [[0, 64], [64, 64]]),
        (128, 200, [[128, 64], [192, 8]]),
    ]


@pytest.mark.parametrize(("page_size", "kv_dtype", "heads"), [(1, "float32", 4), (4, "fp8_e4m3", 20)])
def test_queries_attend_to_what_is_selected(page_size, kv_dtype, heads, device, monkeypatch):
    """Scores are computed for a few queries at a time."""
    monkeypatch.setattr(sparse, "MAX_SCORES", 7 * 256)
    plan, table, index_keys, q, weights = pages_and_queries(page_size, 16, 12, device)
    rank, rope = 32, 16
    pool = KVPool(1, len(index_keys), 1, rank + rope, DTYPES[kv_dtype], device, rank)
    pool.scales = [(2.0, 2.0)]
    latents = torch.randn(pool.slots, 1, rank + rope, device=device)
    pool.write(0, torch.arange(pool.slots, device=device), latents, latents[..., :rank])
    absorbed = torch.randn(len(plan.tokens), heads, rank + rope, device=device)

    shape = Shape(heads, 1, rank + rope, 1, rank, 0.3)
    variant = variants.decode_variant(shape, pool.dtype.itemsize)
    tiling = attend.best_tiling(variant, shape, pool.dtype, torch.float32, device, causal=True)
    packer = Packer(device)
    step = Sparse(TOP_K, page_size, shape, variant, tiling).step(plan, packer)
    assert step is not None
    step.sent(packer.send())
    keys, values = (x.flatten(0, 1) for x in pool.pages(0, page_size))
    scales = (2.0, 2.0) if "fp8" in kv_dtype else (1.0, 1.0)
    pages = Pages(keys, values, torch.from_numpy(table).to(device), scales, None)
    step.select(SimpleNamespace(queries=lambda: (q, weights)), index_keys, pages.table)
    out = torch.full((len(plan.tokens), heads, rank), torch.nan, device=device)
    step.attend(pages, absorbed.to(torch.float16 if "fp8" in kv_dtype else torch.float32), out)

    reference = TorchAttention(pool, page_size, (None,), 0.3)
    for token, row, position in queries_of(plan, device).tolist():
        slots = slots_of(table, row, position + 1, page_size, device)
        chosen = plainly.select(q[token, None], weights[token, None], index_keys[slots], TOP_K, False)
        expected = reference.of_selected(0, absorbed[token, None], slots[chosen])
        assert error(out[token, None], expected) < (2e-2 if "fp8" in kv_dtype else 1e-2)
    others = step.others.tolist()
    assert out[others].isnan().all() and len(others) + len(queries_of(plan, device)) == len(out)


def test_which_queries_attend_to_all_tokens(device):
    shape = Shape(4, 1, 48, 1, 32, 0.3)
    variant = variants.decode_variant(shape, 4)
    found = Sparse(TOP_K, 1, shape, variant, variants.tiling(variant, shape, 4, single=True))
    assert found.step(plan_of([(3, 1), (19, 1), (0, 20)]), Packer(device)) is None
    step = found.step(plan_of(SEQUENCES), Packer(device))
    assert step.dense_requests.tolist() == [0, 1, 4, 5, 7]
    assert step.dense_plan.counts.tolist() == [1, 1, 20, 8, 20] and step.dense_plan.starts.tolist() == [3, 19, 0, 10, 0]
    assert step.dense_plan.requests == ("0", "1", "4", "5", "7")
    packer = Packer(device)
    step = found.step(plan_of([(20, 1), (30, 5)]), packer)
    step.sent(packer.send())
    assert step.others is None and not step.dense_plan.requests


def test_many_queries_need_no_partial_results(device):
    """Each is written directly: of 8,192 queries with 128 heads, partial results would take 2 GB."""
    shape = Shape(4, 1, 48, 1, 32, 0.3)
    variant = variants.decode_variant(shape, 4)
    for count, partials in ((300, 1), (1, 2)):
        found = Sparse(200, 1, shape, variant, variants.tiling(variant, shape, 4, single=True))
        step = found.step(plan_of([(200, count)]), Packer(device))
        assert step._attention._partials == partials
