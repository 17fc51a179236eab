"""DeepSeek Sparse Attention of one layer of DeepSeek V3.2, without its projections: index scores, the selection of the
tokens with the highest, and attention to these.

    python -m bench.sparse [--quick]

Random index queries and keys in bfloat16, K in FP8, all on random slots; in CUDA graphs. Limits: FLOPs over the rate of
matrix products, or bytes over the copy bandwidth, whichever takes longer, both measured in the same run. Bytes: of
scores, those of all index keys that a sequence has, once; of the selection, those of all scores, read once; of
attention, those of the selected K, once for each query. Nothing is timed whose answers are wrong.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench.attention import graph_ms
from bench.common import save, table
from bench.worker import ceilings
from radixrt.worker.cuda.attention import attend, variants
from radixrt.worker.cuda.attention.pages import Pages
from radixrt.worker.cuda.attention.variants import Shape
from radixrt.worker.cuda.elementwise.staging import Packer
from radixrt.worker.cuda.latent import index_scores
from radixrt.worker.cuda.latent.sparse import Sparse
from radixrt.worker.plan import Plan

HEADS, RANK, ROPE, SCALE = 128, 512, 64, 192**-0.5
INDEX_HEADS, INDEX_DIM, TOP_K = 64, 128, 2048
DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Load:
    """`batch` sequences of `cached` tokens followed by `new` ones."""

    batch: int
    new: int
    cached: int

    @property
    def name(self) -> str:
        return f"{self.batch} x {self.new} on {self.cached}"


DECODES = [Load(batch, 1, cached - 1) for batch in (1, 16, 64) for cached in (4096, 32768, 131072)]
CHUNKS = [Load(1, 8192, 0), Load(1, 8192, 16384), Load(1, 8192, 65536), Load(4, 64, 16384)]
QUICK = [Load(1, 1, 131071), Load(64, 1, 32767), Load(1, 8192, 16384)]


class Case:
    """The tensors of a load."""

    def __init__(self, load: Load) -> None:
        self.load, length = load, load.cached + load.new
        slots, tokens = load.batch * length + 1, load.batch * load.new
        generator = torch.Generator(DEVICE).manual_seed(0)

        def drawn(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=DEVICE, dtype=torch.bfloat16)

        self.index_keys, self.q = drawn(slots, INDEX_DIM), drawn(tokens, INDEX_HEADS, INDEX_DIM)
        self.weights = drawn(tokens, INDEX_HEADS).float()
        self.keys = drawn(slots, 1, RANK + ROPE).to(torch.float8_e4m3fn)
        self.absorbed = drawn(tokens, HEADS, RANK + ROPE).half()
        self.out = torch.zeros((tokens, HEADS, RANK), device=DEVICE, dtype=torch.bfloat16)
        self.table = torch.zeros((load.batch, -(-length // 16) * 16), dtype=torch.int32, device=DEVICE)
        self.table[:, :length] = 1 + torch.randperm(slots - 1, generator=generator, device=DEVICE).view(load.batch, -1)
        self.pages = Pages(self.keys, self.keys[..., :RANK], self.table, (1.0, 1.0), None)
        shape = Shape(HEADS, 1, RANK + ROPE, 1, RANK, SCALE)
        variant = variants.decode_variant(shape, 1)
        tiling = attend.best_tiling(variant, shape, self.keys.dtype, torch.bfloat16, DEVICE, causal=True)
        packer = Packer(DEVICE)
        step = Sparse(TOP_K, 1, shape, variant, tiling).step(self.plan(), packer)
        assert step is not None
        step.sent(packer.send())
        self.step = step
        self.queries = step._queries
        positions = self.queries[:, 2].double()
        self.pairs = float((positions + 1).sum())

    def plan(self) -> Plan:
        """What matters here of a plan."""
        load, rows = self.load, np.arange(self.load.batch, dtype=np.int32)
        starts, counts = np.full_like(rows, load.cached), np.full_like(rows, load.new)
        none = np.zeros(0, dtype=np.int32)
        return Plan(1, tuple(rows), rows, starts, counts, none, none, rows, rows > 0, none)

    def scores(self) -> None:
        """Those of all queries, as many at once as `select` computes."""
        step = self.step
        for (begin, end, _), tiles in zip(step._rounds, step._tiles, strict=True):
            out = self.q.new_empty((end - begin, step._columns), dtype=torch.float32)
            index_scores.index_scores(
                self.q, self.weights, self.index_keys, self.table, self.queries, tiles, out, 1, begin
            )

    def select(self) -> None:
        index: Any = SimpleNamespace(queries=lambda: (self.q, self.weights))
        self.step.select(index, self.index_keys, self.table)

    def attend(self) -> None:
        self.step.attend(self.pages, self.absorbed, self.out)

    def check(self) -> dict[str, float]:
        """The largest relative error of attention, and the smallest share of selected tokens that are right: of some
        queries, against float32."""
        self.select()
        self.attend()
        error, right = 0.0, 1.0
        for number in sorted({0, len(self.queries) // 2, len(self.queries) - 1}):
            token, row, position = self.queries[number].tolist()
            slots = self.table[row, : position + 1].long()
            products = (self.q[token].float() @ self.index_keys[slots].float().t()).relu()
            best = slots[(self.weights[token] @ products).topk(TOP_K).indices]
            chosen = self.step._slots[number].long()
            right = min(right, float(torch.isin(chosen, best).float().mean()))
            k = self.keys[chosen, 0].float()
            weights = (self.absorbed[token].float() @ k.t() * SCALE).softmax(-1)
            expected = weights @ k[:, :RANK]
            error = max(error, float((self.out[token].float() - expected).norm() / expected.norm()))
        assert error < 2e-2 and right > 0.995, (self.load, error, right)
        return {"error": error, "right": right}

    def limits_ms(self, limits: dict[str, float]) -> dict[str, float]:
        """Of the scores, the selection alone, and attention."""
        queries, gbs, tflops = len(self.queries), limits["copy_gbs"] * 1e6, limits["tflops"] * 1e9
        read = self.index_keys.nbytes + 4 * self.pairs
        chosen = queries * TOP_K * (RANK + ROPE)
        return {
            "scores": max(2 * self.pairs * INDEX_HEADS * INDEX_DIM / tflops, read / gbs),
            "selection": 4 * self.pairs / gbs,
            "attention": max(2 * queries * TOP_K * HEADS * (2 * RANK + ROPE) / tflops, chosen / gbs),
        }


def measure(load: Load, limits: dict[str, float]) -> dict[str, Any]:
    """A row of the table."""
    case = Case(load)
    found = case.check()
    scores, select, attention = (graph_ms(part) for part in (case.scores, case.select, case.attend))
    times = {"scores": scores, "selection": select - scores, "attention": attention}
    row: dict[str, Any] = {"what": load.name}
    for name, limit in case.limits_ms(limits).items():
        row |= {f"{name}_ms": times[name], f"{name}_limit": limit, f"{name}_x": times[name] / limit}
    return row | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three loads, and no file of results")
    args = parser.parse_args()
    limits = ceilings()
    print(limits, flush=True)
    rows = []
    for load in QUICK if args.quick else DECODES + CHUNKS:
        rows.append(measure(load, limits))
        torch.cuda.empty_cache()
        print(rows[-1] if args.quick else f"{load.name} done", flush=True)
        if not args.quick:
            save("sparse", rows, device=torch.cuda.get_device_name(), **limits)
    print(table(rows))


if __name__ == "__main__":
    main()
