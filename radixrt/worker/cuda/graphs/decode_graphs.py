"""CUDA graphs of decode steps, for some batch sizes. A graph has the whole step up to the greedy tokens:

    integers, in one copy -> page table updates -> tokens -> model -> greedy tokens, stored by row

Batches are padded to the size of a graph. Padding has a row of the page table of its own, after all others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from radixrt.worker.cuda.attention.attend import Scratch
from radixrt.worker.cuda.attention.attention_groups import AttentionGroups, MixedAttention, Works
from radixrt.worker.cuda.attention.decodes import Cuts, DecodeWork, Lists, Room
from radixrt.worker.cuda.attention.pages import Pages
from radixrt.worker.cuda.attention.step import DecodeLists, StepAttention
from radixrt.worker.cuda.attention.work import MERGE_FIELDS, Items
from radixrt.worker.cuda.elementwise import kernels
from radixrt.worker.cuda.elementwise.staging import PackedArray, Packer
from radixrt.worker.cuda.recurrent.delta_step import DeltaStep, PackedRuns, RecurrentStates
from radixrt.worker.cuda.sampling.answers import LastTokens
from radixrt.worker.cuda.sampling.mtp import INTEGERS as REQUEST_INTEGERS
from radixrt.worker.cuda.sampling.mtp import MAX_REQUESTS, Predicting
from radixrt.worker.model.model import Model
from radixrt.worker.plan import Plan, StateWork

DRAW_INTEGERS = 16
"""The most integers that the sampling parameters of a request take."""
COPY_INTEGERS = 4
"""The most integers that copies of a request's recurrent state take, before a step and after it."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The packed arrays of a batch of decodes, padded to `size`."""

    size: int
    tokens: PackedArray
    positions: PackedArray
    slots: PackedArray
    rows: PackedArray
    writes: PackedArray
    states: PackedRuns | None
    """Slots of recurrent states, if the model has any."""
    adapters: PackedArray | None
    """See `Decoder.use_adapters`; None in graphs for batches without adapters."""
    before: PackedArray | None
    """See `Predicting.before`; None without a multi-token prediction layer."""
    lists: list[dict[int | None, Lists]]
    """By kind of layers, and by window."""


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured step of decodes. It reads `integers`, and writes logits [size, own_width] and `answer`, which is what
    `LastTokens.sample_greedy` returns for `size` rows."""

    inputs: Inputs
    integers: torch.Tensor
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    answer: torch.Tensor
    hidden: torch.Tensor | None
    """[size, hidden], if there is a multi-token prediction layer."""

    @property
    def tokens(self) -> torch.Tensor:
        """int32[size]: as the host sent them."""
        return self.inputs.tokens.of(self.integers)


class DecodeGraphs:
    """The graphs of all sizes, with shared segments and without; if adapters are loaded, also for batches that use any.
    All use the same buffers for partial results and for logits."""

    def __init__(
        self, model: Model, pages: Callable[[int], Pages], kinds: AttentionGroups, last_tokens: LastTokens,
        table: torch.Tensor, sizes: list[int], packer: Packer, shown: bool, recurrent: RecurrentStates,
        predicting: Predicting | None = None,
    ) -> None:  # fmt: skip
        """`table` is the page table, whose last row is for padding. `packer` is used only while capturing. `shown`:
        whether to show a progress bar."""
        most = max(sizes)
        self._model = model
        self._pages = pages
        self._kinds = kinds
        self._last_tokens = last_tokens
        self._table = table
        self._recurrent = recurrent
        self._predicting = predicting
        self._sizes = sizes
        rooms = [Room.of(most, kind.cuts) for kind in kinds.all]
        # Graphs hold only their addresses, so they must be kept alive here.
        self._scratch = [
            Scratch.make(room.few + room.entries, kind.shape, model.device)
            for room, kind in zip(rooms, kinds.all, strict=True)
        ]
        logits = torch.empty((most, model.own_width), dtype=torch.float32, device=model.device)
        self._pool = torch.cuda.graph_pool_handle()
        ways = (False, True) if any(kind.cuts.cost for kind in kinds.all) else (False,)
        adapted = (False, True) if model.has_adapters else (False,)
        # The largest first: the others reuse its memory.
        wanted = list(itertools.product(sorted(sizes, reverse=True), ways, adapted))
        self._graphs = {
            (size, shared, uses): self._capture(size, shared, uses, logits[:size], packer)
            for size, shared, uses in tqdm(wanted, desc="capturing graphs", unit="graph", disable=not shown)
        }

    def size_for(self, plan: Plan) -> int:
        """The size of the smallest graph that fits a step; 0 if none does, or if it is not a step of decodes alone."""
        if len(plan.tokens) != len(plan.requests) or not plan.samples.all() or plan.wants.max() > 1:
            return 0
        needed = max(len(plan.tokens), plan.table_writes.shape[1])
        return next((size for size in self._sizes if size >= needed), 0)

    def packed(self, packer: Packer, plan: Plan, size: int, works: list[Works]) -> Graph:
        """Pack a step's integers, and return its graph. The caller may pack sampling parameters after them."""
        before = self._predicting.before(plan, size) if self._predicting else None
        self._pack(packer, works, size, plan.tokens, plan.starts, plan.slots, plan.rows, plan.table_writes,
                   plan.states, plan.adapters, before)  # fmt: skip
        return self._graphs[size, _shared(works), plan.adapters is not None]

    def close(self) -> None:
        for captured in self._graphs.values():
            captured.graph.reset()
        self._graphs.clear()

    def _pack(
        self, packer: Packer, works: list[Works], size: int, tokens: np.ndarray, positions: np.ndarray,
        slots: np.ndarray, rows: np.ndarray, writes: np.ndarray, states: StateWork | None,
        adapters: np.ndarray | None, before: np.ndarray | None,
    ) -> Inputs:  # fmt: skip
        """Pack the integers at the offsets where the graph of this size, with or without sharing, reads them."""
        row = len(self._table) - 1
        padding = np.array([[row], [0], [0]], dtype=np.int32).repeat(size - writes.shape[1], axis=1)
        cuts = [kind.cuts for kind in self._kinds.all]
        if not _shared(works):
            cuts = [Cuts(cut.few, cut.many, None) for cut in cuts]
        rooms = [Room.of(size, cut) for cut in cuts]
        return Inputs(
            size,
            packer.add(tokens, size),
            packer.add(positions, size),
            packer.add(slots, size),
            packer.add(rows, size, fill=row),
            packer.add(np.concatenate([writes, padding], axis=1)),
            None if states is None else PackedRuns.pack(packer, states, len(tokens), size),
            None if adapters is None else packer.add(adapters, size, fill=-1),
            None if before is None else packer.add(before, size, fill=-1),
            [
                {window: Lists.pack(packer, work, room, size) for window, work in each.items()}
                for each, room in zip(works, rooms, strict=True)
            ],
        )

    def _capture(self, size: int, shared: bool, adapted: bool, logits: torch.Tensor, packer: Packer) -> Graph:
        packer.clear()
        none = np.zeros(0, dtype=np.int32)
        works = [
            {window: _nothing(kind.cuts, shared and window is None) for window in kind.windows}
            for kind in self._kinds.all
        ]
        inputs = self._pack(packer, works, size, none, none, none, none, np.zeros((3, 0), dtype=np.int32),
                            None if self._recurrent.pool is None else StateWork.nothing(),
                            none if adapted else None, none if self._predicting else None)  # fmt: skip
        room = packer.used + (DRAW_INTEGERS + COPY_INTEGERS) * size + 1024
        room += REQUEST_INTEGERS * max(size, MAX_REQUESTS) if self._predicting else 0
        integers = torch.zeros(room, dtype=torch.int32, device=self._model.device)
        packer.send(integers)
        torch.cuda.synchronize(self._model.device)
        for _ in range(2):  # compiles kernels and allocates workspaces, which must not happen during capture
            self._decode(inputs, integers, logits)
        torch.cuda.synchronize(self._model.device)
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's) call CUDA during the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            answer, hidden = self._decode(inputs, integers, logits)
        return Graph(inputs, integers, graph, logits, answer, hidden)

    def _decode(
        self, inputs: Inputs, integers: torch.Tensor, logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Launch the kernels of a graph; returns what `LastTokens.sample_greedy` does, and `Graph.hidden`."""
        rows = inputs.rows.of(integers)
        kernels.scatter(inputs.writes.of(integers), self._table)
        tokens = self._last_tokens.resolve(inputs.tokens.of(integers), rows)
        attention = self._attention(inputs, integers)
        mix, pool = None, self._recurrent.pool
        if pool is not None and inputs.states is not None:
            mix = DeltaStep(pool, inputs.states.of(integers), by_tokens=self._recurrent.by_tokens)
        self._model.use_adapters(None if inputs.adapters is None else inputs.adapters.of(integers))
        positions = inputs.positions.of(integers)
        x, residual = self._model.attend_all(tokens, positions, attention, mix)
        hidden = self._model.hidden(x, residual, tokens=tokens)
        self._model.logits(hidden, logits)
        if self._predicting is None or inputs.before is None:
            return self._last_tokens.sample_greedy(logits, self._model.own_ids, rows), None
        self._predicting.store(tokens, positions, inputs.slots.of(integers), hidden, inputs.before.of(integers))
        return self._last_tokens.sample_greedy(logits, self._model.own_ids, rows), hidden

    def _attention(self, inputs: Inputs, integers: torch.Tensor) -> StepAttention | MixedAttention:
        slots, steps = inputs.slots.of(integers), []
        for kind, found, scratch in zip(self._kinds.all, inputs.lists, self._scratch, strict=True):
            lists = {window: DecodeLists.of(packed, integers) for window, packed in found.items()}
            steps.append(StepAttention(self._pages, slots, kind.compiled, lists, scratch, []))
        return self._kinds.attention(steps)


def _shared(works: list[Works]) -> bool:
    return any(work.shared for each in works for work in each.values())


def _nothing(cuts: Cuts, shared: bool) -> DecodeWork:
    """The work of an empty batch."""
    few, many = Items.none(cuts.few.programs), Items.none(cuts.many.programs)
    none, merges = np.zeros(0, dtype=np.int32), np.zeros((0, MERGE_FIELDS), dtype=np.int32)
    return DecodeWork(few, many, merges, none, none, none, shared, np.zeros((0, 5), dtype=np.int64))


def graph_sizes(most: int) -> list[int]:
    """Batch sizes that graphs are captured for, up to `most`; closer together where padding would cost most."""
    sizes: Sequence[int] = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 32, 32)]
    return sorted({min(size, most) for size in sizes}) if most > 0 else []
