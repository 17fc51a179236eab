"""The Runner of a GPU: a step is packed, sent in one copy, launched, and its tokens come back when they are ready.

    host     pack | copy | launch kernels, or replay the graph of a batch of decodes | ... ask for the result
    device     writes of the page table -> tokens (those of the step before by row) -> model -> draw -> copy back

Nothing in a step waits for the device but the question for its result. Batches of decodes alone are CUDA graphs.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tqdm import tqdm

from radixrt import garbage
from radixrt.worker.cuda import attend, drawing, kernels, variants
from radixrt.worker.cuda.answers import Answer, Drawing, Drawn, Launched, make_result
from radixrt.worker.cuda.attend import Scratch
from radixrt.worker.cuda.chunk_plan import ChunkPlanner
from radixrt.worker.cuda.chunks import Pages
from radixrt.worker.cuda.decodes import Cuts, DecodePlanner, DecodeWork, Lists, Room, Trunks, sharing_cost
from radixrt.worker.cuda.full_chunks import FullHeads
from radixrt.worker.cuda.invariant import same_bits
from radixrt.worker.cuda.pieces import Pieces, sizes_up_to
from radixrt.worker.cuda.ragged import FlashInfer
from radixrt.worker.cuda.sampler import CudaSampler, Thresholds
from radixrt.worker.cuda.segments import Chip
from radixrt.worker.cuda.staging import Packer, Piece
from radixrt.worker.cuda.step import DecodeLists, Kernels, StepAttention
from radixrt.worker.cuda.variants import Shape
from radixrt.worker.cuda.work import MERGE_FIELDS, Items
from radixrt.worker.kv import KVPool
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.model.parallel import Group
from radixrt.worker.picking import Picking
from radixrt.worker.plan import Plan, Result
from radixrt.worker.runner import ModelRunner, ranges, wanted
from radixrt.worker.sample import to_device

log = logging.getLogger("radixrt.cuda")

EXACT_PART = 1024
"""Keys of a part where results must not depend on the batch."""
DRAW_INTEGERS = 16
"""A request, at most, for its sampling."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Where the integers of a batch of decodes lie, padded to `size`; padding has a row of its own."""

    size: int
    tokens: Piece
    positions: Piece
    slots: Piece
    rows: Piece
    writes: Piece
    lists: dict[int | None, Lists]


@dataclass(frozen=True, slots=True)
class Graph:
    """A captured step of decodes: it reads `integers`, and leaves logits [size, own_width] and `answer` (`_pick`)."""

    inputs: Inputs
    integers: torch.Tensor
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    answer: torch.Tensor


@dataclass(slots=True)
class Late:
    """A step that draws when the tokens before are known."""

    plan: Plan
    logits: torch.Tensor
    answer: Answer
    picking: Picking | None = None


class CudaRunner(ModelRunner):
    """On a GPU; for tests it also runs on a CPU, in Triton's interpreter, without graphs.

    At most `rows` requests run at once; `flashinfer` computes long chunks where it is given, `full` those of latent
    attention; batches of up to `graph_batch` decodes are graphs, and of other steps up to `graph_tokens` tokens what
    lies between attentions; `processors` is the number of multiprocessors that work is spread over. With
    `tree_attention` decodes read once what they share (`sharing`); `thresholds` are those of CudaSampler. `exact`:
    results do not depend on the batch, to the last bit, if the model's do not: one kernel and one cut for all
    attention, nothing shared, no FlashInfer. The model's `group` is given here, too."""

    overlaps = True

    def __init__(
        self,
        model: Decoder,
        pool: KVPool,
        page_size: int,
        *,
        rows: int,
        eos_ids: frozenset[int] = frozenset(),
        flashinfer: FlashInfer | None = None,
        full: FullHeads | None = None,
        graph_batch: int = 0,
        graph_tokens: int = 0,
        processors: int = 1,
        tree_attention: bool = True,
        exact: bool = False,
        thresholds: Thresholds | None = None,
        group: Group | None = None,
    ) -> None:
        super().__init__(model, pool, page_size, eos_ids)
        spec = model.spec
        self._rows = rows
        self._windows: set[int | None] = set(spec.windows)
        self._sinks = model.sinks
        self._shape = shape = Shape.of(spec, page_size)
        itemsize = pool.dtype.itemsize
        few, many = variants.decode_variant(shape, itemsize), variants.shared_variant(shape, itemsize)
        chunk = variants.chunk_variant(shape, itemsize)
        kinds = pool.dtype, model.dtype, self._device
        special = None if exact else variants.find_specialised(shape, *kinds)
        plain = None
        if special is not None:
            many = special
            if self._windows == {None}:
                chunk = special
            elif None in self._windows:  # it knows no windows
                plain = special, attend.best_tiling(special, shape, *kinds, causal=True)
        chunk_cut = attend.best_tiling(chunk, shape, *kinds, causal=True)
        if exact:
            few = few if same_bits(few, chunk, shape, pool.dtype, model.dtype, self._device) else chunk
            chunk_cut = dataclasses.replace(chunk_cut, fixed=EXACT_PART)
            tree_attention, flashinfer, full = False, None, None
        self._compiled = Kernels(shape, few, many, exact)
        chip = Chip(shape.heads, processors)
        shares = tree_attention and None in self._windows
        self._cuts = Cuts(
            chunk_cut if exact else attend.best_tiling(few, shape, *kinds, causal=False),
            attend.best_tiling(many, shape, *kinds, causal=False),
            sharing_cost(shape, itemsize, many) if shares else None,
            Trunks(chip, flashinfer.tokens) if shares and flashinfer and special is None else None,
        )
        self._decodes = DecodePlanner(self._windows, self._cuts)
        self._chunks = ChunkPlanner(
            shape, itemsize, spec.windows, chunk, chunk_cut, chip, flashinfer, shares, plain, full
        )
        self._packers, self._late_packers = ((Packer(self._device), Packer(self._device)) for _ in range(2))
        self._late: Late | None = None
        self._answers = (Answer(self._device), Answer(self._device))
        self._sampler = CudaSampler(rows, spec.vocab_size, self._device, thresholds)
        self._steps = 0
        self._graphs_wanted = graph_batch > 0 and self._device.type == "cuda"
        # The room for an exact batch's parts would be that of the longest context: it has graphs between attentions.
        self._graph_sizes = graph_sizes(min(graph_batch, rows)) if self._graphs_wanted and not exact else []
        self._graphs: dict[tuple[int, bool], Graph] = {}
        self._piece_sizes = sizes_up_to(graph_tokens)
        self._pieces: Pieces | None = None
        self._scratch: Scratch | None = None
        """Of all graphs, which hold its address alone."""
        self._group = group
        self._leads = group is None or group.shard.rank == 0
        """What other ranks draw is of no use."""
        self._drawn = Drawn(rows, self._device, group)
        layers = (pool.pages(layer, page_size) for layer in range(spec.num_layers))
        self._layers = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in layers]

    @torch.inference_mode()
    def bind(self, table: np.ndarray) -> None:
        self._table = torch.zeros((self._rows + 1, table.shape[1]), dtype=torch.int32, device=self._device)
        if self._graphs_wanted:
            with garbage.held():
                self._capture()

    def close(self) -> None:
        """Graphs go, by which NCCL's part could not be given up."""
        for captured in self._graphs.values():
            captured.graph.reset()
        self._graphs.clear()
        if self._pieces is not None:
            self._pieces.close()
        self._pieces = None

    @property
    def plain_keys(self) -> int:
        """See `messages.Load`."""
        return self._decodes.plain_keys

    @property
    def read_keys(self) -> int:
        """See `messages.Load`."""
        return self._decodes.read_keys

    def _pages(self, layer: int) -> Pages:
        keys, values = self._layers[layer]
        window, sinks = self._model.spec.windows[layer], self._sinks[layer]
        return Pages(keys, values, self._table, self.pool.scales[layer], window, sinks)

    # ------------------------------------------------------------ a step

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Callable[[], Result]:
        self._steps += 1
        packer = self._packers[self._steps % 2]
        packer.clear()
        serial = self._leads and any(request.serial for request in plan.requests)
        size = self._graph_size(plan)
        works = self._plan_decodes(plan, len(plan.requests), Room.of(size, self._cuts)) if size else None
        answer = self._answers[self._steps % 2]
        if works is not None and not any(len(work.trunks) for work in works.values()):
            step = self._replay(plan, packer, answer, size, works, serial)
        else:
            step = self._run(plan, packer, answer, serial, works)
        if serial:
            self._late = late = Late(plan, step.logits, answer)
            return lambda: self._read(late)
        answer.fetch(step.answer)
        return lambda: make_result(plan, step.logit_rows, self._wait(answer))

    def _wait(self, answer: Answer) -> np.ndarray:
        found = answer.wait()
        self.busy_seconds += answer.seconds
        return found

    @torch.inference_mode()
    def logits(self, plan: Plan) -> torch.Tensor:
        """Compute a step: float32[plan.wants.sum(), vocab] at the wanted positions, in order. Of one rank alone."""
        return self._run(plan, Packer(self._device), Answer(self._device), serial=True).logits

    @torch.inference_mode()
    def draw(self) -> None:
        late, self._late = self._late, None
        if late is None:
            return
        late.picking = picking = Picking(late.plan, late.logits, self._sampler)
        self._drawn.note(to_device(picking.rows, self._device), picking.tokens)
        late.answer.fetch(picking.packed)

    def _read(self, late: Late) -> Result:
        if late.picking is None:
            self.draw()
        assert late.picking is not None
        return late.picking.read(self._wait(late.answer))

    def _graph_size(self, plan: Plan) -> int:
        """Of the smallest graph that holds a step of decodes; 0 for other steps."""
        if len(plan.tokens) != len(plan.requests) or not plan.samples.all() or plan.wants.max() > 1:
            return 0
        needed = max(len(plan.tokens), plan.table_writes.shape[1])
        return next((size for size in self._graph_sizes if size >= needed), 0)

    def _plan_decodes(self, plan: Plan, count: int, room: Room | None) -> dict[int | None, DecodeWork]:
        """Of the first `count` requests."""
        return self._decodes.plan(plan.requests[:count], plan.rows[:count], plan.starts[:count], room)

    def _replay(
        self, plan: Plan, packer: Packer, answer: Answer, size: int, works: dict[int | None, DecodeWork], serial: bool
    ) -> Launched:
        count = len(plan.requests)
        self._pack(packer, works, size, plan.tokens, plan.starts, plan.slots, plan.rows, plan.table_writes)
        drawing = Drawing.pack(packer, plan, np.arange(count), plan.rows) if self._leads and not serial else None
        graph = self._graphs[size, _shared(works)]
        if self.planned:
            self.planned(plan, self._decodes.looked_up)
        answer.begin()
        sent = packer.send(graph.integers)
        graph.graph.replay()
        logits = self._gathered(plan, graph.logits[:count])
        if drawing:
            self._draw(logits, drawing, sent, graph.answer[size:])
        return Launched(logits, graph.answer, size)

    def _pack(
        self, packer: Packer, works: dict[int | None, DecodeWork], size: int, tokens: np.ndarray,
        positions: np.ndarray, slots: np.ndarray, rows: np.ndarray, writes: np.ndarray,
    ) -> Inputs:  # fmt: skip
        """Decodes for a graph: every integer lies where the graph of that size, with sharing or without, reads it."""
        padding = np.array([[self._rows], [0], [0]], dtype=np.int32).repeat(size - writes.shape[1], axis=1)
        cuts = self._cuts if _shared(works) else Cuts(self._cuts.few, self._cuts.many, None)
        return Inputs(
            size,
            packer.add(tokens, size),
            packer.add(positions, size),
            packer.add(slots, size),
            packer.add(rows, size, fill=self._rows),
            packer.add(np.concatenate([writes, padding], axis=1)),
            {window: Lists.pack(packer, work, Room.of(size, cuts), size) for window, work in works.items()},
        )

    def _run(
        self, plan: Plan, packer: Packer, answer: Answer, serial: bool,
        works: dict[int | None, DecodeWork] | None = None,
    ) -> Launched:  # fmt: skip
        parity = self._steps % 2
        decodes, count = _leading_decodes(plan), len(plan.tokens)
        padded = self._pieces.size_for(count) if self._pieces else 0
        pieces, padded = (self._pieces, padded) if padded else (None, count)
        rows = plan.rows[:decodes]
        positions = ranges(plan.starts, plan.counts).astype(np.int32)
        of_tokens = np.zeros((4, padded), dtype=np.int32)
        of_tokens[:3, :count] = plan.tokens, positions, plan.slots
        of_tokens[3, :decodes] = rows
        inputs = packer.add(of_tokens)
        writes = packer.add(plan.table_writes)
        if works is None:
            works = self._plan_decodes(plan, decodes, None) if decodes else {}
        lists = {window: Lists.pack(packer, work) for window, work in works.items()}
        trunks = {window: self._chunks.trunks(work, plan, packer, parity) for window, work in works.items()}
        long = self._chunks.by_full_heads(plan, decodes)
        chunks, last = self._chunks.plan(plan, decodes, packer, self._late_packers[parity], parity, long)
        full, absorbed = self._chunks.plan_full(plan, decodes, long, packer) if long.any() else (None, 0)
        logit_at = packer.add(wanted(plan).astype(np.int32))
        chosen = np.flatnonzero(plan.samples)
        sampled_at = np.cumsum(plan.wants)[chosen] - 1
        sampled = packer.add(sampled_at.astype(np.int32))
        sampled_rows = packer.add(plan.rows[chosen])
        drawing = Drawing.pack(packer, plan, sampled_at, plan.rows) if self._leads and not serial else None
        if self.planned:
            self.planned(plan, (self._decodes.looked_up if decodes else {}) | self._chunks.looked_up)

        answer.begin()
        sent = packer.send()
        kernels.scatter(writes.of(sent), self._table)
        if pieces:  # the device begins while the host makes the rest ready
            pieces.begin(inputs.of(sent))
        for chunk in chunks:
            chunk.sent(sent)
        if full:
            full.sent(sent)
        partials = max((w.few.partials + w.many.partials for w in works.values()), default=0)
        scratch = Scratch.make(partials, self._shape, self._device) if decodes else None
        decode_lists = {window: DecodeLists.of(found, sent, trunks[window]) for window, found in lists.items()}
        tokens, positions_there, slots, rows_there = inputs.of(sent)
        attention = StepAttention(
            self._pages, slots, self._compiled, decode_lists, scratch, chunks, last, full, absorbed
        )
        if pieces:
            x, residual = pieces.go_on(padded, attention)
        else:
            resolved = self._drawn.resolve(tokens, rows_there[:decodes])
            x, residual = self._model.attend_all(resolved, positions_there, attention)
        logits = self._model.finish(x, residual, logit_at.of(sent).long())
        picked = self._pick(logits, sampled_rows.of(sent), sampled.of(sent).long())
        logits = self._gathered(plan, logits)
        if drawing:
            self._draw(logits, drawing, sent, picked[len(logits) :])
        return Launched(logits, picked, len(logits))

    # ------------------------------------------------------------ from logits to tokens

    def _pick(self, logits: torch.Tensor, rows: torch.Tensor, at: torch.Tensor | None = None) -> torch.Tensor:
        """int32[S + n]: whether each of float32 logits[S, own_width] is finite; the likeliest token of those `at`
        int64[n] (None: all), which is noted for the `rows`."""
        found = drawing.largest(logits, self._model.own_ids, self._group)
        finite, best = found[: len(logits)], found[len(logits) :]
        if at is not None:
            best = best[at]
            found = torch.cat([finite, best])
        self._drawn.note(rows, best)
        return found

    def _gathered(self, plan: Plan, logits: torch.Tensor) -> torch.Tensor:
        """float32[S, vocab], where somebody wants them; that, too, all ranks do."""
        return self._model.gather(logits) if self._group is not None and plan.wants_logits else logits

    def _draw(self, logits: torch.Tensor, drawing: Drawing, sent: torch.Tensor, tokens: torch.Tensor) -> None:
        """Draw those that are not greedy, and note them in `tokens` and for their rows."""
        draws, rows = drawing.draws(sent), drawing.at.of(sent)
        drawn = self._sampler.draw(logits, rows, draws).int()
        tokens[drawing.to.of(sent).long()] = drawn
        self._drawn.note(drawing.rows.of(sent), drawn)

    # ------------------------------------------------------------ graphs

    def _capture(self) -> None:
        """Capture a graph for each size, with sharing and without, the largest first: the others live in its memory."""
        width, most = self._model.own_width, max(self._graph_sizes, default=0)
        logits = torch.empty((most, width), dtype=torch.float32, device=self._device)
        room = Room.of(most, self._cuts)
        self._scratch = scratch = Scratch.make(room.few + room.entries, self._shape, self._device)
        pool = torch.cuda.graph_pool_handle()
        packer = self._packers[0]
        before = torch.cuda.mem_get_info(self._device)[0]
        kinds = (False, True) if self._cuts.cost else (False,)
        wanted_graphs = [(size, shared) for size in sorted(self._graph_sizes, reverse=True) for shared in kinds]
        for size, shared in tqdm(wanted_graphs, desc="capturing graphs", unit="graph", disable=not self._leads):
            packer.clear()
            none = np.zeros(0, dtype=np.int32)
            works = {window: _nothing(self._cuts, shared and window is None) for window in self._windows}
            inputs = self._pack(packer, works, size, none, none, none, none, np.zeros((3, 0), dtype=np.int32))
            integers = torch.zeros(packer.used + DRAW_INTEGERS * size + 1024, dtype=torch.int32, device=self._device)
            packer.send(integers)
            torch.cuda.synchronize(self._device)
            for _ in range(2):  # kernels are compiled, workspaces made
                self._decode(inputs, integers, logits[:size], scratch)
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            # Other threads use the device as well: those of NCCL.
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                answer = self._decode(inputs, integers, logits[:size], scratch)
            self._graphs[size, shared] = Graph(inputs, integers, graph, logits[:size], answer)
        if sizes := self._piece_sizes:
            self._pieces = Pieces(self._model, self._pages, self._drawn, sizes, self._chunks.has_full)
        used = before - torch.cuda.mem_get_info(self._device)[0]
        log.info("graphs for up to %d decodes, and for steps of up to %d tokens, in %.2f GB", most,
                 max(sizes, default=0), used / 1e9)  # fmt: skip

    def _decode(self, inputs: Inputs, integers: torch.Tensor, logits: torch.Tensor, scratch: Scratch) -> torch.Tensor:
        """The step of a graph; what `_pick` says."""
        rows = inputs.rows.of(integers)
        kernels.scatter(inputs.writes.of(integers), self._table)
        tokens = self._drawn.resolve(inputs.tokens.of(integers), rows)
        lists = {window: DecodeLists.of(found, integers) for window, found in inputs.lists.items()}
        attention = StepAttention(self._pages, inputs.slots.of(integers), self._compiled, lists, scratch, [])
        self._model.finish(*self._model.attend_all(tokens, inputs.positions.of(integers), attention), out=logits)
        return self._pick(logits, rows)


def _shared(works: dict[int | None, DecodeWork]) -> bool:
    return any(work.shared for work in works.values())


def _nothing(cuts: Cuts, shared: bool) -> DecodeWork:
    """The work of no decodes."""
    few, many = Items.none(cuts.few.programs), Items.none(cuts.many.programs)
    none, merges = np.zeros(0, dtype=np.int32), np.zeros((0, MERGE_FIELDS), dtype=np.int32)
    return DecodeWork(few, many, merges, none, none, none, shared, np.zeros((0, 5), dtype=np.int64))


def _leading_decodes(plan: Plan) -> int:
    """How many of a step's first requests compute a single token."""
    more = np.flatnonzero(plan.counts > 1)
    return int(more[0]) if len(more) else len(plan.counts)


def graph_sizes(most: int) -> list[int]:
    """Batch sizes that graphs are captured for: fine steps where padding would cost most, up to `most`."""
    sizes: Sequence[int] = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 32, 32)]
    return sorted({min(size, most) for size in sizes}) if most > 0 else []
