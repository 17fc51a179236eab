"""Graphs on the GPU."""

from __future__ import annotations

import torch

from radixrt.worker.cuda.graphs.piecewise_graphs import PiecewiseGraphs
from tests.checkpoints import make_model
from tests.gpu.test_models import SIZES, load
from tests.worker.engine import Engine, prompts


class Cycle:
    """Gone, with its graph, when the collector comes by."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self.graph, self.itself = graph, self


def test_a_collection_breaks_no_capture(tmp_path, monkeypatch):
    """Of two runners in one process, one that is garbage may be collected when the other one captures."""
    make_model(tmp_path, "llama", **SIZES)
    old = torch.cuda.CUDAGraph()
    with torch.cuda.graph(old):
        torch.zeros(1, device="cuda")
    graphs, young, begin = [old], [], PiecewiseGraphs._begin

    def collected(self, mine):
        begin(self, mine)
        if graphs:
            Cycle(graphs.pop())
            young.extend([] for _ in range(100_000))

    monkeypatch.setattr(PiecewiseGraphs, "_begin", collected)
    del old
    engine = Engine(load(tmp_path, enforce_eager=False), chunk=512, max_model_len=2048)
    assert young and len(engine.generate(prompts(2, 50, 300, vocab_size=4096))) == 2
