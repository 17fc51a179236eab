"""Chunks and decodes that share prefixes, by FlashInfer's place, against plain torch."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import create_autospec

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixrt.worker.cuda.attention.chunk_plan import ChunkPlanner
from radixrt.worker.cuda.attention.chunks import LastLayers, PagedStep
from radixrt.worker.cuda.attention.decodes import Cuts, SharedPrefixes
from radixrt.worker.cuda.attention.segments import Chip, SegmentStep, cut_alone, cut_segments, cut_shared
from radixrt.worker.cuda.attention.step import Kernels, StepAttention
from radixrt.worker.cuda.attention.variants import Shape, Variant
from radixrt.worker.cuda.attention.work import Tiling
from radixrt.worker.cuda.elementwise.staging import Packer
from radixrt.worker.execution.prefix_sharing import Cost
from tests.worker.cuda.forest import CPU, Forest
from tests.worker.cuda.ragged import PlainFlashInfer


def shape(page_size: int) -> Shape:
    return Shape(4, 2, 16, page_size)


def run(step, batch: Forest, packer: Packer) -> torch.Tensor:
    out = torch.full_like(batch.q, torch.nan)
    step.sent(packer.send())
    step.run(batch.q, batch.pages, out)
    return out


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 1 << 20), st.sampled_from([1, 4]), st.booleans())
def test_chunks_that_share(seed, page_size, sinks):
    """Whatever is chosen is computed as plain attention does, and nothing else is touched."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("MAX_COPIES", 9), ("SHORTEST_PART", 8), ("PART_COST", 2)):
            patch.setattr(f"radixrt.worker.cuda.attention.segments.{name}", value)
        batch = Forest(seed, (1, 3, 17), shape=shape(page_size), sinks=sinks)
        cut = cut_shared(batch.paths, batch.sequences, batch.shape, 64, Chip(4, 12), 3000, 1)  # keys are worth much
        if cut is None:
            return
        packer = Packer(CPU)
        step = SegmentStep(batch.sequences, cut, packer, PlainFlashInfer(batch.shape, torch.float32, 3000), 0,
                           batch.shape)  # fmt: skip
        out = run(step, batch, packer)
    of = np.repeat(np.arange(len(batch.rows)), batch.counts)
    mine = torch.from_numpy(np.isin(of, cut.chosen))
    assert torch.allclose(out[mine], batch.expected()[mine], atol=1e-5)
    assert out[~mine].isnan().all()


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_long_prefix_is_cut(page_size, monkeypatch):
    monkeypatch.setattr("radixrt.worker.cuda.attention.segments.SHORTEST_PART", 8)
    monkeypatch.setattr("radixrt.worker.cuda.attention.segments.PART_COST", 1)
    batch = next(b for b in (Forest(seed, (5,), shape=shape(page_size)) for seed in range(99)) if b.starts.min() >= 20)
    cut = cut_alone(batch.sequences, Chip(4, 64), 3000)
    assert cut is not None and cut.goal < batch.starts.max()
    packer = Packer(CPU)
    step = SegmentStep(batch.sequences, cut, packer, PlainFlashInfer(batch.shape, torch.float32, 3000), 0, batch.shape)
    assert torch.allclose(run(step, batch, packer), batch.expected(), atol=1e-5)
    assert cut_alone(batch.sequences, Chip(4, 64), 30) is None, "the workspace does not hold it"
    assert cut_alone(batch.sequences, Chip(4, 1), 3000) is None, "one processor gains nothing"


def decodes_with_shared_prefixes(seed: int, large: int, sinks: bool) -> bool:
    """Large segments by FlashInfer, the others and what is their own by the kernel over pages, merged; also when the
    plan is kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("radixrt.worker.cuda.attention.decodes.LARGE", large)
        patch.setattr("radixrt.worker.cuda.attention.decodes.SLOWER", 1 << 20)
        batch = Forest(seed, (1,), least=1, sinks=sinks)
        shared_prefixes = SharedPrefixes(Chip(4, 12), 3000)
        cuts = Cuts(Tiling(1, 16, 16, 4), Tiling(2, 16, 16, 4), Cost(10, 1, 2), shared_prefixes)
        kernels = Kernels(batch.shape, Variant(16, 16, 1, 1), Variant(16, 16, 1, 1))
        out, planner, used = batch.decode(cuts, kernels, PlainFlashInfer(batch.shape, torch.float32, 3000))
    assert torch.allclose(out, batch.expected(), atol=1e-2)
    assert planner.read_keys < planner.plain_keys or not used
    return used


@pytest.mark.parametrize("large", [1, 60])
def test_decodes_with_shared_prefixes(large):
    assert sum(decodes_with_shared_prefixes(seed, large, seed % 2 == 1) for seed in range(8)) >= 2


def test_cuts_fill_the_chip():
    """Rounds of 132 tiles: the measured best for one shared prefix (bench/attention.py)."""
    chip = Chip(32, 132)
    for queries, keys, parts in ((256, 16384, 2), (64, 8192, 4), (128, 4096, 4), (8192, 16384, 1)):
        goal, _ = chip.cut(np.array([queries]), np.array([keys]))
        assert -(-keys // goal) == parts, (queries, keys, goal)
    goal, _ = Chip(1, 1000).cut(np.array([1]), np.array([2000]))
    assert goal == 667, "three parts: a fourth would be too short"
    shared_prefixes = SharedPrefixes(chip, 1 << 17)
    assert shared_prefixes.goal(np.array([256]), np.array([16384])) == 8192
    assert shared_prefixes.goal(np.array([64]), np.array([8192])) == 0, "gathering costs more"
    assert SharedPrefixes(chip, 1 << 13).goal(np.array([256]), np.array([16384])) == 0, "the workspace does not hold it"


def test_each_chunk_is_computed_in_one_way(monkeypatch):
    """Two that share a shared prefix together, the third over its pages."""
    taken = []
    for name, note in (("SegmentStep", lambda _, cut, *rest: cut.chosen), ("PagedStep", lambda part, *rest: part.rows)):
        monkeypatch.setattr(
            f"radixrt.worker.cuda.attention.chunk_plan.{name}", lambda *args, note=note: taken.append(note(*args))
        )
    paths = [((1, 9000), (2, 9050)), ((3, 20),), ((1, 9000),)]
    starts, counts = np.array([9050, 20, 9000], dtype=np.int32), np.array([60, 60, 90], dtype=np.int32)
    rows, wants = np.arange(3, dtype=np.int32), counts
    plan = SimpleNamespace(requests=paths, paths=paths, rows=rows, starts=starts, counts=counts, wants=wants)
    flashinfer = PlainFlashInfer(shape(1), torch.float32, 20_000)
    cut = Tiling(16, 64, 128, 8)
    planner = ChunkPlanner(shape(1), 64, (None,), Variant(64, 64, 4, 2), cut, Chip(4, 12), flashinfer, True)
    _, last = planner.plan(plan, 0, Packer(CPU), Packer(CPU), 0)
    assert [x.tolist() for x in taken] == [[0, 2], [1]] and last is None


def test_the_last_layer_is_for_wanted_tokens_alone(monkeypatch):
    taken = []
    monkeypatch.setattr(
        "radixrt.worker.cuda.attention.chunk_plan.PagedStep",
        lambda *args: taken.append(args[0]) or create_autospec(PagedStep),
    )
    plan = SimpleNamespace(
        requests=(), rows=np.array([5, 6, 7]), starts=np.array([3, 10, 0]), counts=np.array([1, 40, 30]),
        wants=np.array([1, 1, 0]),
    )  # fmt: skip
    planner = ChunkPlanner(
        shape(1), 1, (None, 8), Variant(64, 64, 4, 2), Tiling(16, 64, 128, 8), Chip(4, 12), None, False, last=(5, {8})
    )
    steps, last = planner.plan(plan, 1, Packer(CPU), late := Packer(CPU), 0)
    assert len(steps) == 1 and last is not None and last.first == 5
    assert len(taken) == 1 and not late.used, "the last layer is planned when it is launched"
    (step,) = last.steps()
    step.sent.assert_called_once()
    every, ends = taken
    assert every.rows.tolist() == [6, 7] and every.queries.tolist() == [1, 41]
    assert (ends.rows.tolist(), ends.starts.tolist(), ends.counts.tolist()) == ([6], [49], [1])
    assert ends.queries.tolist() == [40]


def test_the_last_layer_has_its_own_chunks():
    """In the last layer they are planned, and take the place of the others."""
    every, ends = (create_autospec(PagedStep, instance=True) for _ in range(2))
    last = LastLayers(1, lambda packer: [ends], Packer(CPU))
    pages = SimpleNamespace(window=None)
    attention = StepAttention(lambda layer: pages, torch.zeros(1), SimpleNamespace(), {}, None, [every], last)
    q = torch.zeros(1, 4, 16)
    attention.over_pages(0, q, torch.empty_like(q))
    assert (every.run.call_count, ends.sent.call_count, ends.run.call_count) == (1, 0, 0)
    attention.over_pages(1, q, torch.empty_like(q))
    assert (every.run.call_count, ends.sent.call_count, ends.run.call_count) == (1, 1, 1)


def test_parts_cover_their_segments():
    sharing = SimpleNamespace(segments=np.array([[0, 10, 0, 3], [10, 31, 1, 2]]), order=np.array([2, 0, 1]))
    parts = cut_segments(sharing, np.array([7, 8, 9]), 8, [0, 1])
    assert parts.tolist() == [
        [9, 0, 5, 0, 3],
        [9, 5, 10, 0, 3],
        [7, 10, 17, 1, 2],
        [7, 17, 24, 1, 2],
        [7, 24, 31, 1, 2],
    ]
