"""FlashInfer where there is no GPU: what it says it cannot do, and what it is given."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from radixrt.config import WorkerConfig, resolve
from radixrt.worker.cuda.attention import attend
from radixrt.worker.cuda.attention.chunks import Sequences
from radixrt.worker.cuda.attention.pages import Pages
from radixrt.worker.cuda.attention.ragged import FlashInfer, RaggedStep
from radixrt.worker.cuda.attention.variants import Shape
from radixrt.worker.cuda.elementwise.staging import Packer
from radixrt.worker.execution.attention import TorchAttention
from radixrt.worker.execution.kv_pool import KVPool
from radixrt.worker.load.cuda_runner import find_flashinfer
from radixrt.worker.load.options import look_up
from tests.worker.cuda.forest import CPU
from tests.worker.cuda.ragged import PlainFlashInfer
from tests.worker.families import make_model
from tests.worker.pages import make_plan


def test_heads_that_fa3_has_no_kernel_for_are_refused_before_anything_is_built():
    with pytest.raises(RuntimeError, match=r"heads of \(64, 128, 256\), not of 80"):
        FlashInfer(Shape(32, 32, 80, 1), torch.bfloat16, torch.device("cpu"), 4096, "fa3")


@pytest.mark.parametrize(("stated", "scale"), [(None, 0.125), (0.3, 0.3)])
def test_the_scale_of_the_softmax_and_the_cap_of_scores_are_the_models(stated, scale):
    found = object.__new__(FlashInfer)
    found._shape, found._dtype, found._planned = Shape(8, 2, 64, 1, scale_override=stated, cap=50.0), torch.bfloat16, {}
    planned = []

    class Wrapper:
        def plan(self, **settings) -> None:
            planned.append((settings["sm_scale"], settings["logits_soft_cap"]))

    found.plan(Wrapper(), np.array([3]), np.array([5]), None)
    assert planned == [(scale, 50.0)]


@pytest.mark.parametrize(
    ("family", "reason"), [("llama4_text", "attention in chunks"), ("gemma4_text", "layers with different heads")]
)
def test_windows_that_are_chunks_and_different_heads_have_no_kernel(family, reason, tmp_path):
    make_model(tmp_path, family)
    refused = pytest.raises(ValueError, match=f"attention_backend: FlashInfer is not used for {reason}")
    for backend, expected in (("flashinfer", refused), ("auto", nullcontext())):
        config = resolve(WorkerConfig(str(tmp_path), device="cpu", dtype="bfloat16", attention_backend=backend))
        with expected:
            assert find_flashinfer(config, look_up(config)) is None


@pytest.mark.parametrize("with_sinks", [False, True])
def test_what_merges_parts_is_compiled_when_it_is_tried_out(with_sinks, monkeypatch):
    """Of partial results in the activations' dtype, as FlashInfer's are, and no others; and what adds sinks."""
    merged, added = [], []
    monkeypatch.setattr(
        attend, "merge", lambda partials, merges, *_, sinks: merged.append((partials, merges, sinks is not None))
    )
    monkeypatch.setattr(
        "radixrt.worker.cuda.attention.ragged.add_sinks", lambda out, lse, sinks: added.append(out.dtype)
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(FlashInfer, "wrapper", lambda *_: SimpleNamespace(run=lambda *_, out: None))
    monkeypatch.setattr(FlashInfer, "plan", lambda *_: None)
    found = object.__new__(FlashInfer)
    found._shape, found._dtype, found._buffer = Shape(8, 2, 64, 1, sinks=with_sinks), torch.bfloat16, torch.empty(0)
    found.workspace = torch.ones(400, 2, 64), torch.ones(400, 2, 64)
    found.try_out({None})
    (((values, lse), merges, sinks),) = merged
    assert sinks == with_sinks and added == [torch.bfloat16] * with_sinks
    assert values.dtype == torch.bfloat16 and values.shape[:2] == lse.shape
    assert merges.tolist() == [[0, 0, 0]], "nothing is written"


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(("window", "gathered"), [(None, 12 + 45 + 77), (8, 12 + 12 + 44), (100, 12 + 45 + 77)])
def test_keys_that_a_window_hides_are_left_where_they_are(page_size, window, gathered):
    """Of sequences with more cached than the window has, some of it, none; in one group and in several."""
    plan, table = make_plan(np.random.default_rng(0), page_size, [(0, 12), (40, 5), (40, 37)])
    pool = KVPool(1, (int(table.max()) + 1) * page_size, 2, 16, torch.float32, CPU)
    pool.write(0, torch.arange(pool.slots), *torch.randn(2, pool.slots, 2, 16))
    q = torch.randn(len(plan.tokens), 4, 16)
    reference = TorchAttention(pool, page_size, (window,))
    reference.bind(table)
    expected = reference.begin(plan, CPU).over_pages(0, q)
    keys, values = (x.flatten(0, 1) for x in pool.pages(0, page_size))
    pages = Pages(keys, values, torch.from_numpy(table), (1.0, 1.0), window)
    sequences = Sequences(plan.rows, plan.starts, plan.counts, np.cumsum(plan.counts) - plan.counts)
    for room in (200, 80):
        packer, out = Packer(CPU), torch.full_like(q, torch.nan)
        flashinfer = PlainFlashInfer(Shape(4, 2, 16, page_size), torch.float32, room)
        step = RaggedStep(sequences, {window}, packer, flashinfer, 0, page_size)
        step.sent(packer.send())
        step.run(q, pages, out)
        assert torch.allclose(out, expected, atol=1e-5)
        if room == 200:
            assert int((~flashinfer.workspace[0].isnan()).all(2).all(1).sum()) == gathered
