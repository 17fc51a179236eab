"""Which chunks go which way: each goes one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from radixrt.worker.cuda.attention import attend, chunk_plan
from radixrt.worker.cuda.attention.attention_groups import EXACT_PART
from radixrt.worker.cuda.attention.chunk_plan import ChunkPlanner, FlashInferOrHopper, FullOrAbsorbed
from radixrt.worker.cuda.attention.chunks import PagedStep, Sequences
from radixrt.worker.cuda.attention.pages import Pages
from radixrt.worker.cuda.attention.segments import Chip
from radixrt.worker.cuda.attention.variants import Shape, Variant, tiling
from radixrt.worker.cuda.elementwise.staging import Packer
from radixrt.worker.cuda.latent.full_chunks import FullHeads
from radixrt.worker.model.families.deepseek_v2 import DEFAULTS, latent_decoder
from radixrt.worker.model.spec.spec import LatentSpec

DEEPSEEK = DEFAULTS | {"num_attention_heads": 16, "num_hidden_layers": 2, "max_position_embeddings": 64}
DEEPSEEK |= {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
SHAPE, VARIANT = Shape(32, 8, 128, 1), Variant(64, 64, 4, 2)
TRUNK = ((1, 16384),)
CHUNKS = {  # row: (path, cached, new)
    3: (TRUNK, 16384, 128),
    5: (((2, 20),), 20, 7),
    6: (TRUNK, 16384, 128),
    9: (((3, 8192),), 8192, 600),
    11: (((4, 30),), 30, 9),
}


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("windows", [(None, None), (None, 64)])
@pytest.mark.parametrize("rows", [(3, 5, 6, 9, 11), (3, 6), (5, 11), (9,), (3, 5, 6)])
def test_each_chunk_goes_one_way(shares, windows, rows, monkeypatch):
    went: list[tuple[str, tuple[int, ...]]] = []

    def segments(chunks: Sequences, cut, *_):
        went.append(("segments", tuple(chunks.rows[cut.chosen])))

    def rest(name: str):
        return lambda chunks, *_: went.append((name, tuple(chunks.rows)))

    monkeypatch.setattr(chunk_plan, "SegmentStep", segments)
    monkeypatch.setattr(chunk_plan, "RaggedStep", rest("ragged"))
    monkeypatch.setattr(chunk_plan, "PagedStep", rest("paged"))
    paths, starts, counts = zip(*(CHUNKS[row] for row in rows), strict=True)
    plan = SimpleNamespace(
        requests=[None] * len(rows),
        paths=paths,
        rows=np.array(rows, np.int32),
        starts=np.array(starts, np.int32),
        counts=np.array(counts, np.int32),
        wants=np.zeros(len(rows), np.int32),
    )
    planner = ChunkPlanner(
        SHAPE, 1, windows, VARIANT, tiling(VARIANT, SHAPE, 264), Chip(32, 132), SimpleNamespace(tokens=1 << 17), shares
    )
    planner.plan(plan, 0, *(Packer(torch.device("cpu")) for _ in range(2)), 0)
    assert sorted(row for _, part in went for row in part) == list(rows)
    ways = {row: name for name, part in went for row in part}
    for row in rows:
        short = CHUNKS[row][2] < 10
        assert (ways[row] == "paged") == short
        if shares and windows == (None, None) and row in (3, 6) and {3, 6} <= {*rows}:
            assert ways[row] == "segments"


@pytest.mark.parametrize(
    ("chunks", "gathered"),
    [  # (chunks, new, cached), and which is faster for them (bench/attention.py)
        ((1, 128, 16384), False),
        ((1, 600, 8192), False),
        ((16, 64, 2048), False),
        ((64, 64, 2048), False),
        ((32, 128, 16384), False),
        ((1, 2048, 8192), True),
        ((8, 1024, 0), True),
        ((1, 8192, 8192), True),
        ((12, 600, 8192), True),
        ((4, 600, 8192), True),
        ((16, 512, 4096), True),
    ],
)
def test_beside_the_kernel_for_hopper_few_queries_a_key_are_not_gathered(chunks, gathered):
    count, new, cached = chunks
    long = FlashInferOrHopper(SHAPE).long(np.full(count, cached), np.full(count, new))
    assert long.tolist() == [gathered] * count


def test_a_short_chunk_beside_a_long_one_stays():
    assert FlashInferOrHopper(SHAPE).long(np.array([16384, 8192]), np.array([128, 4096])).tolist() == [False, True]
    starts, counts = np.array([16384] * 10 + [8192]), np.array([128] * 10 + [2048])
    assert FlashInferOrHopper(SHAPE).long(starts, counts).tolist() == [False] * 10 + [True]


@pytest.mark.parametrize(
    ("shape", "chunks", "gathered"),
    [
        (SHAPE, (12, 600, 8192), True),
        (Shape(32, 32, 128, 1), (12, 600, 8192), False),  # a key is of one head's queries alone
        (SHAPE, (1, 2048, 8192), True),
        (Shape(8, 2, 128, 1), (1, 2048, 8192), False),  # what is computed takes less time than the launch
    ],
)
def test_what_pays_beside_the_kernel_for_hopper_depends_on_the_heads(shape, chunks, gathered):
    count, new, cached = chunks
    assert FlashInferOrHopper(shape).long(np.full(count, cached), np.full(count, new)).tolist() == [gathered] * count


LATENT = LatentSpec(None, 512, 128, 64, 128, 192**-0.5, True, False)


@pytest.mark.parametrize(
    ("heads", "chunks", "full"),
    [  # (chunks, new, cached), and which is faster for them (bench/latent.py)
        (16, (1, 8192, 0), True),
        (16, (1, 8192, 8192), True),
        (16, (1, 1024, 0), True),
        (16, (1, 600, 8192), True),
        (16, (8, 256, 4096), True),
        (16, (1, 512, 2048), True),
        (16, (1, 128, 16384), True),
        (16, (8, 128, 2048), True),
        (16, (1, 32, 16384), False),
        (16, (1, 256, 0), False),
        (16, (1, 32, 0), False),
        (128, (1, 2048, 2048), True),
        (128, (1, 128, 4096), True),
        (128, (1, 32, 4096), False),
    ],
)
def test_few_queries_a_key_of_a_latent_are_absorbed(heads, chunks, full):
    count, new, cached = chunks
    for itemsize in (1, 2):
        long = FullOrAbsorbed(heads, LATENT, itemsize).long(np.full(count, cached), np.full(count, new))
        assert long.tolist() == [full] * count


def test_fp8_pages_are_slower_to_absorb():
    """A chunk of 64 tokens on 16,384 (bench/latent.py)."""
    rules = [FullOrAbsorbed(16, LATENT, itemsize) for itemsize in (1, 2)]
    assert [rule.long(np.array([16384]), np.array([64])).tolist() for rule in rules] == [[True], [False]]


def test_each_chunk_of_a_latent_goes_one_way():
    """What precedes the last absorbed token is absorbed, too; a context that the workspace does not hold, always."""
    spec = latent_decoder(DEEPSEEK, True)
    workspace = FullHeads(spec, 1, torch.float32, torch.device("meta"), 9000, VARIANT, 8)
    shape = Shape.of(spec, 1)
    planner = ChunkPlanner(
        shape,
        2,
        (None, None),
        VARIANT,
        tiling(VARIANT, shape, 264),
        Chip(16, 132),
        None,
        True,
        full=workspace,
        last=(1, {None}),
    )
    rows = [(7, 1), (0, 512), (40, 9), (0, 1024), (8100, 1024), (100, 512)]
    starts, counts = (np.array(x, np.int32) for x in zip(*rows, strict=True))
    ones = np.ones(len(rows), np.int32)
    plan = SimpleNamespace(
        requests=[None] * 6, rows=np.arange(6, dtype=np.int32), starts=starts, counts=counts, wants=ones
    )
    long = planner.by_full_heads(plan, 1)
    assert planner.has_full and long.tolist() == [True, False, True, False, True]
    packers = [Packer(torch.device("cpu")) for _ in range(2)]
    steps, last = planner.plan(plan, 1, *packers, 0, long)
    assert len(steps) == 1 and last is not None
    step, absorbed = planner.plan_full(plan, 1, long, packers[0])
    assert step.chunks == 3 and absorbed == int(counts[:5].sum())
    steps, _ = planner.plan(plan, 1, *packers, 0, np.ones(5, bool))
    assert not steps and planner.plan_full(plan, 1, np.ones(5, bool), packers[0])[1] == 1


@pytest.mark.parametrize("single", [True, False])
def test_items_have_starts_unless_each_has_a_program(single, monkeypatch):
    found = []
    monkeypatch.setattr(attend, "attend", lambda *args, **_: found.append(args[4]))
    monkeypatch.setattr(attend, "merge", lambda *_, **__: None)
    sequences = Sequences(*(np.array(x, np.int32) for x in ([0, 1], [0, 300], [200, 70], [0, 200])))
    packer = Packer(torch.device("cpu"))
    step = PagedStep(sequences, {None}, packer, SHAPE, VARIANT, tiling(VARIANT, SHAPE, 64, single=single))
    step.sent(packer.send())
    none = torch.empty(0)
    step.run(none, Pages(none, none, none, (1.0, 1.0), None), none)
    ((items, starts),) = found
    assert (starts is None) == single and (single or starts[-1] == len(items) > 0)


@pytest.mark.parametrize("shape", [SHAPE, Shape(64, 8, 128, 1), Shape(16, 1, 576, 1, latent=512)])
def test_fixed_parts_of_a_long_context_are_held_some_at_a_time(shape, monkeypatch):
    """A whole step's tokens behind 120,000: what is launched at once fits a grid, and its results the GPU."""
    found = []
    monkeypatch.setattr(attend, "attend", lambda *args, **_: found.append((args[4][0], args[6].values)))
    monkeypatch.setattr(attend, "merge", lambda *_, **__: None)
    cut = replace(tiling(VARIANT, shape, 264, single=True), fixed=EXACT_PART)
    chunk = Sequences(*(np.array([x], np.int32) for x in (0, 120_000, 8000, 0)))
    packer = Packer(torch.device("cpu"))
    step = PagedStep(chunk, {None}, packer, shape, VARIANT, cut)
    with torch.device("meta"):
        step.sent(packer.send().to("meta"))
    none = torch.empty(0)
    step.run(none, Pages(none, none, none, (1.0, 1.0), None), none)
    assert len(found) > 1 and all(0 < len(items) < 1 << 16 for items, _ in found)
    assert sum(len(items) for items, _ in found) == sum(-(-end // EXACT_PART) for end in last_keys(cut.queries))
    assert max(values.nbytes for _, values in found) < 1 << 29


def last_keys(queries: int) -> list[int]:
    """By tile of the chunk above, the key after its last."""
    return [min(120_000 + at + queries, 128_000) for at in range(0, 8000, queries)]


def test_what_flashinfer_cannot_hold_does_not_pay_for_its_launch(monkeypatch):
    """A chunk that gains less than the launch stays, whatever another one that cannot go would gain."""
    went = {}
    for name in ("RaggedStep", "PagedStep"):
        monkeypatch.setattr(
            chunk_plan, name, lambda chunks, *_, name=name: went.update(dict.fromkeys(chunks.rows.tolist(), name))
        )
    variant = Variant(128, 128, 4, 2, specialised=True)
    planner = ChunkPlanner(
        SHAPE, 1, (None, 64), variant, tiling(variant, SHAPE, 132), Chip(32, 132), SimpleNamespace(tokens=1 << 14), True
    )
    plan = SimpleNamespace(
        requests=[None, None],
        paths=((), ()),
        rows=np.array([1, 2], np.int32),
        starts=np.array([1 << 14, 8192], np.int32),
        counts=np.array([4096, 600], np.int32),
        wants=np.zeros(2, np.int32),
    )
    planner.plan(plan, 0, *(Packer(torch.device("cpu")) for _ in range(2)), 0)
    assert went == {1: "PagedStep", 2: "PagedStep"}
