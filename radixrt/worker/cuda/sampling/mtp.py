"""Proposes tokens with a model's multi-token prediction layer on a GPU (see `execution.mtp`, the same on a CPU).

    launch    ... hidden states | store the layer's K and V | sample | accept | pass | pass | ... | one copy to the host

How many drafted tokens were right is found on the device, so that the host waits once for a step with its proposals.
Positions are then known only there: the work list of a pass's attention is made there, too (`_place_kernel`), each
request's keys in a fixed number of parts. A pass is one CUDA graph, which is replayed for each token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from radixrt.worker.cuda.attention import attend, variants
from radixrt.worker.cuda.attention.attend import Scratch
from radixrt.worker.cuda.attention.pages import Pages
from radixrt.worker.cuda.attention.step import append
from radixrt.worker.cuda.attention.variants import Shape
from radixrt.worker.cuda.attention.work import FIELDS, MERGE_FIELDS
from radixrt.worker.cuda.elementwise.staging import PackedArray, Packer
from radixrt.worker.cuda.sampling import sampling_kernels
from radixrt.worker.execution.mtp import sequences
from radixrt.worker.model.layers.latent import LatentHeads
from radixrt.worker.model.layers.mixers import Projected
from radixrt.worker.model.model import Model
from radixrt.worker.plan import Plan
from radixrt.worker.speculative.ngram import MAX_ROWS

MAX_PARTS = 32
"""The most parts that a request's keys are divided into."""
MAX_REQUESTS = MAX_ROWS // 2
"""The most requests for which a pass is captured."""
INTEGERS = 8
"""Integers that `PackedRequests` takes for each request."""


@triton.jit
def _accept_kernel(
    tokens_ptr, sampled_ptr, at_ptr, index_ptr, drafted_ptr, position_ptr, last_ptr, where_ptr, index_out_ptr
):
    """For each request: the last token that the step gives, its position, and the index of the token before it."""
    r = tl.program_id(0)
    at = tl.load(at_ptr + r)
    index = tl.load(index_ptr + r)
    drafted = tl.load(drafted_ptr + r)
    accepted = 0
    right = 1
    for n in range(drafted):
        same = tl.load(tokens_ptr + index + 1 + n) == tl.load(sampled_ptr + at + n)
        right = tl.where(same, right, 0)
        accepted += right
    tl.store(last_ptr + r, tl.load(sampled_ptr + at + accepted))
    tl.store(where_ptr + r, tl.load(position_ptr + r) + accepted)
    tl.store(index_out_ptr + r, index + accepted)


@triton.jit(do_not_specialize=["stride"])
def _place_kernel(
    row_ptr, position_ptr, count_ptr, table_ptr, slot_ptr, items_ptr, stride, PAGE: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, ITEM: tl.constexpr,
):  # fmt: skip
    """For each request with a `count` above 0: the slot of its token at `position`, and work items for attention to all
    tokens up to it. Others get the null slot and no keys."""
    r = tl.program_id(0)
    active = tl.load(count_ptr + r) > 0
    row = tl.load(row_ptr + r)
    position = tl.load(position_ptr + r)
    page = tl.load(table_ptr + row.to(tl.int64) * stride + position // PAGE, mask=active, other=0)
    tl.store(slot_ptr + r, tl.where(active, page * PAGE + position % PAGE, 0))
    length = tl.where(active, position + 1, 0)
    each = tl.cdiv(tl.cdiv(length, PARTS), KEYS) * KEYS
    part = tl.arange(0, WIDTH)
    real = part < PARTS
    begin = tl.minimum(part * each, length)
    item = items_ptr + (r * PARTS + part) * ITEM
    tl.store(item, r + 0 * part, mask=real)
    tl.store(item + 1, 1 + 0 * part, mask=real)
    tl.store(item + 2, row + 0 * part, mask=real)
    tl.store(item + 3, begin, mask=real)
    tl.store(item + 4, tl.minimum(begin + each, length), mask=real)
    tl.store(item + 5, position + 0 * part, mask=real)
    tl.store(item + 6, r * PARTS + part, mask=real)
    tl.store(item + 7, 0 * part, mask=real)


@dataclass(frozen=True, slots=True)
class PackedRequests:
    """The R requests of a step as packed for the device, those first for which tokens are proposed. int32[R] each,
    which is padded to the size of a pass."""

    indices: list[int]
    """Indices in the plan of those for which tokens are proposed."""
    counts: list[int]
    """How many tokens are proposed for each of these."""
    size: int
    """Of a pass."""
    at: PackedArray
    """Index of the token that is sampled after the request's first token with logits, among all sampled ones."""
    index: PackedArray
    """Index of that first token among the step's."""
    drafted: PackedArray
    """How many drafted tokens follow it."""
    position: PackedArray
    """Position of the token that is sampled after it."""
    row: PackedArray
    """Of the page table."""
    count: PackedArray
    """How many tokens are proposed."""

    @classmethod
    def pack(cls, packer: Packer, plan: Plan, sizes: list[int], padding: int) -> PackedRequests:
        """`padding`: the row of the page table for what pads."""
        ends, sampled = np.cumsum(plan.counts), np.cumsum(plan.samples) - 1
        asked = np.zeros(len(plan.counts), np.int32) if plan.proposes is None else plan.proposes
        entries = [
            (index, max(int(sampled[index]), 0), int(ends[index]) - 1, kept - 1, int(plan.starts[index] + count))
            for (index, _, _, kept), count in ((one, int(plan.counts[one[0]])) for one in sequences(plan))
        ]
        entries.sort(key=lambda one: asked[one[0]] == 0)
        indices = [one[0] for one in entries if asked[one[0]]]
        wanted = len(indices)
        size = next((size for size in sizes if size >= wanted), wanted) if wanted else 0
        room = max(size, len(entries))
        columns = np.array(entries, dtype=np.int32).T
        rows = plan.rows[columns[0]]
        at, index, drafted, position = (packer.add(np.ascontiguousarray(x), room) for x in columns[1:])
        return cls(
            indices, [int(asked[index]) for index in indices], size, at, index, drafted, position,
            packer.add(rows, room, fill=padding), packer.add(asked[columns[0]].astype(np.int32), room),
        )  # fmt: skip

    @property
    def passes(self) -> int:
        return max(self.counts, default=0)

    def proposals(self, integers: np.ndarray) -> dict[int, list[int]]:
        """`Result.proposals`, from what `Predicting.finish` appended to a step's integers."""
        if not self.indices:
            return {}
        found = integers[-self.passes * self.size :].reshape(self.passes, self.size)
        return {
            index: found[:count, n].tolist()
            for n, (index, count) in enumerate(zip(self.indices, self.counts, strict=True))
        }


@dataclass(frozen=True, slots=True)
class PackedProposing:
    """What a step needs for proposals, packed."""

    asked: PackedRequests
    before: PackedArray
    """See `Predicting.before`."""


@dataclass(slots=True)
class Pass:
    """The buffers of a pass for `size` requests, and its graph, if it is captured."""

    row: torch.Tensor
    position: torch.Tensor
    count: torch.Tensor
    token: torch.Tensor
    """int32[size] each; a pass advances all but the rows."""
    hidden: torch.Tensor
    """[size, hidden]."""
    parts: int
    scratch: Scratch
    merges: torch.Tensor
    entries: torch.Tensor
    graph: torch.cuda.CUDAGraph | None = None


class Predicting:
    """The layer of one runner. `table` is its page table, whose last row is for padding; the device has `num_sms`
    multiprocessors. A pass is captured for each number of requests in `sizes`, ascending; for others it runs without a
    graph."""

    def __init__(
        self, model: Model, pages: Callable[[int], Pages], table: torch.Tensor, page_size: int, num_sms: int,
        sizes: list[int],
    ) -> None:  # fmt: skip
        assert model.predictor is not None
        self._model = model
        self._predictor = model.predictor
        self._pages = pages
        self._table = table
        self._num_sms = num_sms
        self._shape = Shape.of(model.spec, page_size, model.predictor.number)
        self._variant = variants.decode_variant(self._shape, pages(model.predictor.number).keys.dtype.itemsize)
        self._padding = len(table) - 1
        # One more row, for requests whose last hidden state is not known: zeros.
        shape = (len(table) + 1, model.spec.hidden_size)
        self._last = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self._known: dict[int, tuple[int, int, int]] = {}
        """By row of the page table: the request (`Request.number`) whose state `_last` has there, and the first and
        last position that its next token may have, by which of its drafted tokens were right."""
        self._sizes = sizes
        self._captured: dict[int, Pass] = {}
        if sizes:
            self._capture()

    # ------------------------------------------------------------ a step

    def before(self, plan: Plan, room: int) -> np.ndarray:
        """int32[room]: for each token of a step where the hidden state before it is found: a row of what is kept, or
        -1: at the token before it in the step."""
        before = np.full(room, -1, dtype=np.int32)
        for index, begin, stop, kept in sequences(plan):
            row, number, start = int(plan.rows[index]), plan.requests[index].number, int(plan.starts[index])
            request, first, last = self._known.get(row, (-1, 0, 0))
            before[begin] = row if request == number and first <= start <= last else len(self._last) - 1
            end = start + stop - begin
            self._known[row] = number, end - kept + 1, end
        return before

    def store(
        self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, hidden: torch.Tensor,
        before: torch.Tensor,
    ) -> None:  # fmt: skip
        """Store the layer's K and V of int32 tokens[T] at int32 slots[T]. `hidden` [T, hidden] are their states, and
        `before` is that of the method."""
        kept = self._last[before.clamp(min=0).long()]
        earlier = torch.where((before >= 0)[:, None], kept, hidden.roll(1, 0))
        self._predictor.store(
            tokens, positions, earlier, lambda number, heads: append(self._pages(number), heads, slots)
        )

    def pack(self, packer: Packer, plan: Plan) -> PackedRequests:
        return PackedRequests.pack(packer, plan, self._sizes, self._padding)

    def pack_all(self, packer: Packer, plan: Plan, room: int) -> PackedProposing:
        """For a step of `room` tokens, with padding, that is no graph."""
        return PackedProposing(self.pack(packer, plan), packer.add(self.before(plan, room)))

    def finish(
        self, packed: PackedRequests, sent: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor,
        sampled: torch.Tensor, integers: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Keep the last hidden state of each request, and propose tokens. `tokens` int32[T] and `hidden` [T, hidden]
        are the step's, `sampled` int32 what it sampled. Returns `integers` with the proposals appended."""
        at, index, drafted, position, row, count = (
            x.of(sent) for x in (packed.at, packed.index, packed.drafted, packed.position, packed.row, packed.count)
        )
        last, where, chosen = torch.empty_like(at), torch.empty_like(at), index
        if len(sampled):
            chosen = torch.empty_like(at)
            _accept_kernel[(len(at),)](tokens, sampled, at, index, drafted, position, last, where, chosen)
        states = hidden[chosen.long()]
        self._last[row.long()] = states
        if not packed.indices:
            return integers
        size = packed.size
        one = self._captured.get(size) or self._make_pass(size)
        for to, source in ((one.row, row), (one.position, where), (one.count, count), (one.token, last)):
            to.copy_(source[:size])
        one.hidden.copy_(states[:size])
        parts = [integers]
        for _ in range(packed.passes):
            if one.graph is not None:
                one.graph.replay()
            else:
                self._pass(one)
            parts.append(one.token.clone())
        return torch.cat(parts)

    def _pass(self, one: Pass) -> None:
        """Propose the next token of each request that still wants any."""
        size, slots, keys = len(one.row), torch.empty_like(one.row), self._variant.keys
        items = torch.empty((size * one.parts, FIELDS), dtype=torch.int32, device=slots.device)
        _place_kernel[(size,)](
            one.row, one.position, one.count, self._table, slots, items, self._table.stride(0), self._shape.page_size,
            one.parts, triton.next_power_of_2(one.parts), keys, FIELDS,
        )  # fmt: skip

        def over_pages(number: int, heads: Projected) -> torch.Tensor:
            pages, dtype = self._pages(number), one.hidden.dtype
            q = append(pages, heads, slots)
            out = q.new_empty((*q.shape[:2], self._shape.value_dim), dtype=dtype)
            attend.attend(
                q, pages.keys, pages.values, pages.table, (items, None), out, one.scratch, self._shape, self._variant,
                causal=False, scales=pages.scales,
            )  # fmt: skip
            attend.merge(one.scratch.partials, one.merges, one.entries, out, self._shape)
            return heads.ups.v(out) if isinstance(heads, LatentHeads) else out

        guessed = self._predictor.guess(one.token, one.position, one.hidden, over_pages)
        best = sampling_kernels.largest(self._model.logits(guessed), self._model.own_ids)[size:]
        one.token.copy_(best)
        one.hidden.copy_(guessed)
        one.position.add_(1)
        one.count.sub_(1)

    # ------------------------------------------------------------ passes

    def _make_pass(self, size: int) -> Pass:
        device, shape = self._model.device, self._shape
        parts = max(1, min(MAX_PARTS, 4 * self._num_sms // (size * shape.blocks)))
        integers = torch.zeros((4, size), dtype=torch.int32, device=device)
        integers[0] = self._padding
        merges = np.zeros((size, MERGE_FIELDS), dtype=np.int32)
        merges[:] = np.arange(size)[:, None] * [1, parts, 0] + [0, 0, parts]
        row, position, count, token = integers
        return Pass(
            row,
            position,
            count,
            token,
            torch.zeros((size, self._model.spec.hidden_size), dtype=self._model.dtype, device=device),
            parts,
            Scratch.make(size * parts, shape, device),
            torch.from_numpy(merges).to(device),
            torch.arange(size * parts, dtype=torch.int32, device=device),
        )

    def _capture(self) -> None:
        """Capture a pass for each size, the largest first: the others reuse its memory."""
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(self._sizes):
            one = self._make_pass(size)
            for _ in range(2):  # compiles kernels and allocates workspaces, which must not happen during capture
                self._pass(one)
            torch.cuda.synchronize()
            one.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(one.graph, pool=pool, capture_error_mode="thread_local"):
                self._pass(one)
            self._captured[size] = one

    def close(self) -> None:
        for one in self._captured.values():
            if one.graph is not None:
                one.graph.reset()
        self._captured.clear()
