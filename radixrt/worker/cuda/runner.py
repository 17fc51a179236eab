"""The Runner of a GPU: a step is packed, sent in one copy and launched, and its tokens come back asynchronously.

    host     pack | copy | launch kernels, or replay the graph of a batch of decodes | ... read the result
    device     update the page table -> tokens (those of the step before by row) -> model -> sample -> copy back

Only reading a step's result waits for the device. Steps of decodes alone run as CUDA graphs.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from radixrt.process import gc_tuning
from radixrt.worker.cuda.attention import attend, variants
from radixrt.worker.cuda.attention.attention_groups import AttentionGroups, PlannedStep, Works
from radixrt.worker.cuda.attention.chunk_plan import few_wanted
from radixrt.worker.cuda.attention.chunks import Pages
from radixrt.worker.cuda.attention.decodes import DecodePlanner, Room
from radixrt.worker.cuda.attention.ragged import FlashInfer
from radixrt.worker.cuda.elementwise import kernels
from radixrt.worker.cuda.elementwise.staging import Packer
from radixrt.worker.cuda.graphs.decode_graphs import DecodeGraphs, graph_sizes
from radixrt.worker.cuda.graphs.piecewise_graphs import PiecewiseGraphs, sizes_up_to
from radixrt.worker.cuda.latent.full_chunks import FullHeads
from radixrt.worker.cuda.latent.sparse import Sparse, SparseAttention
from radixrt.worker.cuda.recurrent.delta_step import PackedCopies, PackedDelta, by_tokens
from radixrt.worker.cuda.sampling.answers import Answer, LastTokens, Launched, PackedSamplingMetadata, make_result
from radixrt.worker.cuda.sampling.mtp import MAX_REQUESTS, Predicting
from radixrt.worker.cuda.sampling.sampler import CudaSampler, Thresholds
from radixrt.worker.execution.kv_pool import KVPool, StatePool
from radixrt.worker.execution.sample_step import SampleStep
from radixrt.worker.execution.sampler import to_device
from radixrt.worker.execution.torch_runner import ModelRunner, ranges, wanted
from radixrt.worker.model.decoder import Decoder
from radixrt.worker.model.parallel.group import Group
from radixrt.worker.plan import NOT_SAMPLED, Plan, Result, SampleInputs

log = logging.getLogger("radixrt.cuda")


@dataclass(slots=True)
class DeferredStep:
    """A launched step whose tokens are sampled only when the host knows the tokens before them
    (`Plan.needs_host_tokens`)."""

    plan: Plan
    step: Launched
    answer: Answer
    sample_step: SampleStep | None = None


class CudaRunner(ModelRunner):
    """The Runner of a GPU. For tests it also runs on a CPU, in Triton's interpreter, without graphs.

    rows            the most requests that run at once
    flashinfer      if given, computes long chunks
    full            if given, computes long chunks of latent attention
    graph_batch     batches of up to this many decodes run as CUDA graphs
    graph_tokens    other steps of up to this many tokens run as piecewise CUDA graphs (`pieces`)
    num_sms         multiprocessors that work is spread over
    tree_attention  whether pages that requests share are read once (`sharing`)
    exact           whether results must not depend on the batch, to the last bit (the model's own must not either):
                    one kernel and one tiling for all attention, nothing shared, no FlashInfer, no full heads;
                    recurrent layers token by token
    thresholds      see CudaSampler
    group           the model's tensor-parallel group
    states          the recurrent states, if the model has recurrent layers
    """

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
        num_sms: int = 1,
        tree_attention: bool = True,
        exact: bool = False,
        thresholds: Thresholds | None = None,
        group: Group | None = None,
        states: StatePool | None = None,
    ) -> None:
        super().__init__(model, pool, page_size, eos_ids, states)
        spec = model.spec
        self._rows = rows
        self._sinks = model.sinks
        dtypes = pool.dtype, model.dtype, self._device
        self._kinds = AttentionGroups(spec, page_size, dtypes, num_sms, flashinfer, full, tree_attention, exact)
        self.shares = any(kind.shares for kind in self._kinds.all)
        self._by_tokens = exact or (spec.recurrent is not None and by_tokens(spec.recurrent, model.dtype, self._device))
        self._sparse = self._make_sparse(page_size, exact) if spec.index else None
        if spec.index:
            graph_batch = graph_tokens = 0  # which queries attend to all tokens, graphs cannot decide
        self._packers = Packer(self._device), Packer(self._device)
        self._deferred: DeferredStep | None = None
        self._answers = (Answer(self._device), Answer(self._device))
        self._sampler = CudaSampler(rows, spec.vocab_size, self._device, thresholds)
        self._steps = 0
        self._graphs_wanted = graph_batch > 0 and self._device.type == "cuda"
        # If exact, a graph of decodes would need room for the parts of the longest context: only piecewise graphs.
        self._graph_sizes = graph_sizes(min(graph_batch, rows)) if self._graphs_wanted and not exact else []
        self._graphs: DecodeGraphs | None = None
        self._piece_sizes = sizes_up_to(graph_tokens)
        self._piecewise_graphs: PiecewiseGraphs | None = None
        self._group = group
        self._leads = group is None or group.shard.rank == 0
        """Whether this is rank 0: only its sampled tokens are used, so other ranks do not sample."""
        self._last_tokens = LastTokens(rows, self._device, group)
        layers = (pool.pages(layer, page_size) for layer in range(len(spec.attention_layers)))
        self._num_sms = num_sms
        self._predicting: Predicting | None = None
        self._layers = [(keys.flatten(0, 1), values.flatten(0, 1)) for keys, values in layers]

    def _make_sparse(self, page_size: int, exact: bool) -> Sparse:
        """For pages of one token, of which each query has a row of its own."""
        top_k, kinds = self._model.spec.index.top_k, (self.pool.dtype, self._model.dtype, self._device)
        shape = dataclasses.replace(self._kinds.all[0].shape, page_size=1)
        variant = variants.decode_variant(shape, self.pool.dtype.itemsize)
        tiling = attend.best_tiling(variant, shape, *kinds, causal=True)
        if exact:
            tiling = dataclasses.replace(tiling, fixed=top_k)
        return Sparse(top_k, page_size, shape, variant, tiling)

    @torch.inference_mode()
    def bind(self, table: np.ndarray) -> None:
        self._table = torch.zeros((self._rows + 1, table.shape[1]), dtype=torch.int32, device=self._device)
        with gc_tuning.held():
            if self._model.predictor is not None:
                most = min(MAX_REQUESTS, self._rows) if self._graphs_wanted else 0
                self._predicting = Predicting(
                    self._model, self._pages, self._table, self.page_size, self._num_sms, graph_sizes(most)
                )
            if self._graphs_wanted:
                self._capture()

    def close(self) -> None:
        """Release the graphs: NCCL cannot destroy its communicators while graphs use them. Does nothing if the device
        is lost."""
        if not self.works():
            return
        for graphs in (self._graphs, self._piecewise_graphs, self._predicting):
            if graphs is not None:
                graphs.close()
        self._graphs = self._piecewise_graphs = self._predicting = None

    @property
    def plain_keys(self) -> int:
        """See `messages.Load`."""
        return self._counted.plain_keys

    @property
    def read_keys(self) -> int:
        """See `messages.Load`."""
        return self._counted.read_keys

    @property
    def _counted(self) -> DecodePlanner:
        """The planner of the first kind with layers without a window, if there is one."""
        kinds = self._kinds.all
        return next((kind for kind in kinds if None in kind.windows), kinds[0]).decodes

    def _pages(self, layer: int) -> Pages:
        keys, values = self._layers[layer]
        window, sinks = self._model.spec.attention_windows[layer], self._sinks[layer]
        return Pages(keys, values, self._table, self.pool.scales[layer], window, sinks)

    # ------------------------------------------------------------ a step

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Callable[[], Result]:
        self._steps += 1
        if self.host is not None:
            self.host.arrive()
        if plan.moves is not None:
            self.host.move(plan.moves, wait=plan.needs_onload)
        packer = self._packers[self._steps % 2]
        packer.clear()
        needs_host_tokens = self._leads and plan.needs_host_tokens
        size = self._graphs.size_for(plan) if self._graphs else 0
        works = self._plan_decodes(plan, len(plan.requests), size) if size else None
        answer = self._answers[self._steps % 2]
        if works is not None and not any(len(work.shared_prefixes) for each in works for work in each.values()):
            step = self._replay(plan, packer, answer, size, works, needs_host_tokens)
        else:
            step = self._run(plan, packer, answer, needs_host_tokens, works)
        if needs_host_tokens:
            self._deferred = deferred = DeferredStep(plan, step, answer)
            return lambda: self._read(deferred)
        answer.fetch(self._propose(step, answer, step.answer[step.logit_rows :], step.answer))
        return lambda: self._proposed(step, answer, make_result(plan, step.logit_rows, self._wait(answer)))

    def _propose(self, step: Launched, answer: Answer, tokens: torch.Tensor, integers: torch.Tensor) -> torch.Tensor:
        """The integers of a step's answer with its proposals, once its `tokens` are sampled."""
        if self._predicting is None or step.asked is None or step.hidden is None:
            return integers
        answer.propose()
        return self._predicting.finish(step.asked, step.sent, step.tokens, step.hidden, tokens, integers)

    def _proposed(self, step: Launched, answer: Answer, result: Result) -> Result:
        """A step's result with its proposals, once the answer is there."""
        if step.asked is None or not step.asked.indices:
            return result
        proposals, seconds = step.asked.proposals(answer.wait()), answer.proposing_seconds / step.asked.passes
        return dataclasses.replace(result, proposals=proposals, proposing_seconds=seconds)

    def _wait(self, answer: Answer) -> np.ndarray:
        found = answer.wait()
        self.busy_seconds += answer.seconds
        return found

    @torch.inference_mode()
    def logits(self, plan: Plan) -> torch.Tensor:
        """Compute a step. Returns float32[plan.wants.sum(), vocab], the logits of the wanted positions in order. Not
        for several ranks."""
        return self._run(plan, Packer(self._device), Answer(self._device), needs_host_tokens=True).logits

    @torch.inference_mode()
    def sample_deferred(self, inputs: SampleInputs) -> None:
        """See `plan.Runner`."""
        deferred, self._deferred = self._deferred, None
        assert deferred is not None
        step = deferred.step
        deferred.sample_step = sample_step = SampleStep(deferred.plan, step.logits, self._sampler, inputs)
        self._last_tokens.store(to_device(sample_step.rows, self._device), sample_step.tokens)
        deferred.answer.fetch(self._propose(step, deferred.answer, sample_step.tokens, sample_step.packed))

    def _read(self, deferred: DeferredStep) -> Result:
        sample_step = deferred.sample_step
        if sample_step is None:  # the step before has failed: only wait, as what this one was sent by is used again
            self._deferred = None
            with torch.inference_mode():
                deferred.answer.fetch(deferred.step.answer)
            self._wait(deferred.answer)
            raise RuntimeError(NOT_SAMPLED)
        answer = self._wait(deferred.answer)
        return self._proposed(deferred.step, deferred.answer, sample_step.read(answer[: len(sample_step.packed)]))

    def _plan_decodes(self, plan: Plan, count: int, size: int) -> list[Works]:
        """The work of the first `count` requests, by kind of layers, which fits the graph of a `size`, if not 0."""
        return [kind.plan_decodes(plan, count, Room.of(size, kind.cuts) if size else None) for kind in self._kinds.all]

    def _replay(
        self, plan: Plan, packer: Packer, answer: Answer, size: int, works: list[Works], needs_host_tokens: bool
    ) -> Launched:
        count = len(plan.requests)
        graph = self._graphs.packed(packer, plan, size, works)
        copies = PackedCopies.pack(packer, plan.states) if plan.states else None
        packed_metadata = (
            PackedSamplingMetadata.pack(packer, plan, np.arange(count), plan.rows)
            if self._leads and not needs_host_tokens
            else None
        )
        asked = self._predicting.pack(packer, plan) if self._predicting else None
        if self.on_planned:
            self.on_planned(plan)
        answer.begin()
        sent = packer.send(graph.integers)
        if copies:
            copies.restore(self.states, sent)
        graph.graph.replay()
        if copies:
            copies.save(self.states, sent)
        logits = self._gathered(plan, graph.logits[:count])
        if packed_metadata:
            self._sample(logits, packed_metadata, sent, graph.answer[size:])
        return Launched(logits, graph.answer, size, graph.tokens, sent, graph.hidden, asked)

    def _run(
        self, plan: Plan, packer: Packer, answer: Answer, needs_host_tokens: bool,
        works: list[Works] | None = None,
    ) -> Launched:  # fmt: skip
        parity = self._steps % 2
        decodes, count = _leading_decodes(plan), len(plan.tokens)
        padded = self._piecewise_graphs.size_for(count) if self._piecewise_graphs else 0
        piecewise_graphs, padded = (self._piecewise_graphs, padded) if padded else (None, count)
        rows = plan.rows[:decodes]
        positions = ranges(plan.starts, plan.counts).astype(np.int32)
        of_tokens = np.zeros((5, padded), dtype=np.int32)
        of_tokens[:3, :count] = plan.tokens, positions, plan.slots
        of_tokens[3, :decodes] = rows
        of_tokens[4, count:] = -1
        of_tokens[4, :count] = -1 if plan.adapters is None else plan.token_adapters
        inputs = packer.add(of_tokens)
        writes = packer.add(plan.table_writes)
        sparse = self._sparse.step(plan, packer) if self._sparse else None
        dense, singles = (plan, decodes) if sparse is None else (sparse.dense_plan, _leading_decodes(sparse.dense_plan))
        if works is None:
            works = self._plan_decodes(dense, singles, 0) if singles else [{} for _ in self._kinds.all]
        narrow = piecewise_graphs is None and self._narrows(plan, decodes)
        planned = [
            PlannedStep(kind, dense, singles, each, packer, parity, narrow)
            for kind, each in zip(self._kinds.all, works, strict=True)
        ]
        copies = delta = mix = None
        if plan.states:
            copies = PackedCopies.pack(packer, plan.states)
            delta = PackedDelta.pack(packer, plan, decodes, self._by_tokens)
        logit_at = packer.add(wanted(plan).astype(np.int32))
        chosen = np.flatnonzero(plan.samples)
        sampled_at = np.cumsum(plan.wants)[chosen] - 1
        sampled = packer.add(sampled_at.astype(np.int32))
        sampled_rows = packer.add(plan.rows[chosen])
        packed_metadata = (
            PackedSamplingMetadata.pack(packer, plan, sampled_at, plan.rows)
            if self._leads and not needs_host_tokens
            else None
        )
        asked = before = hidden = None
        if self._predicting:
            asked = self._predicting.pack(packer, plan)
            before = packer.add(self._predicting.before(plan, padded))
        if self.on_planned:
            self.on_planned(plan)

        answer.begin()
        sent = packer.send()
        kernels.scatter(writes.of(sent), self._table)
        if copies and delta:
            copies.restore(self.states, sent)
            mix = delta.step(self.states, sent)
        tokens, positions_there, slots, rows_there, adapters = inputs.of(sent)
        self._model.use_adapters(None if plan.adapters is None else adapters)
        if piecewise_graphs:  # the device starts while the host prepares the rest
            piecewise_graphs.begin(inputs.of(sent))
        attention = self._kinds.attention([step.sent(self._pages, slots, sent) for step in planned])
        if self._sparse is not None:
            if sparse is not None:
                sparse.sent(sent)
            attention = SparseAttention(self._pages, self.pool.index, slots, attention, sparse)
        at = logit_at.of(sent).long()
        if piecewise_graphs:
            resolved, x, residual = piecewise_graphs.go_on(padded, attention, mix)
        else:
            resolved = self._last_tokens.resolve(tokens, rows_there[:decodes])
            x, residual = self._model.attend_all(resolved, positions_there, attention, mix, at if narrow else None)
        if copies:
            copies.save(self.states, sent)
        if self._predicting and before is not None:
            hidden = self._model.hidden(x, residual, tokens=resolved)
            self._predicting.store(resolved, positions_there, slots, hidden, before.of(sent))
            logits = self._model.logits(hidden[at])
        elif narrow and len(at):
            logits = self._model.finish(x, residual, tokens=resolved[at])
        else:
            logits = self._model.finish(x, residual, at, tokens=resolved)
        picked = self._last_tokens.sample_greedy(
            logits, self._model.own_ids, sampled_rows.of(sent), sampled.of(sent).long()
        )
        logits = self._gathered(plan, logits)
        if packed_metadata:
            self._sample(logits, packed_metadata, sent, picked[len(logits) :])
        return Launched(logits, picked, len(logits), tokens, sent, hidden, asked)

    def _narrows(self, plan: Plan, decodes: int) -> bool:
        """Whether layers after `ModelSpec.writers` are computed only for tokens whose logits are wanted."""
        spec, wants = self._model.spec, plan.wants[decodes:]
        fits = spec.writers < spec.num_layers and len(wants) > 0 and bool((plan.wants[:decodes] == 1).all())
        return fits and few_wanted(plan.counts[decodes:], wants)

    # ------------------------------------------------------------ from logits to tokens

    def _gathered(self, plan: Plan, logits: torch.Tensor) -> torch.Tensor:
        """The logits of all ranks, float32[S, vocab], if the plan needs them; otherwise this rank's. A collective."""
        return self._model.gather(logits) if self._group is not None and plan.wants_logits else logits

    def _sample(
        self, logits: torch.Tensor, packed_metadata: PackedSamplingMetadata, sent: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Sample the tokens that are not greedy; write them to `tokens` and store them as their rows' last tokens."""
        metadata, rows = packed_metadata.metadata(sent), packed_metadata.at.of(sent)
        sampled = self._sampler.sample(logits, rows, metadata).int()
        tokens[packed_metadata.to.of(sent).long()] = sampled
        self._last_tokens.store(packed_metadata.rows.of(sent), sampled)

    # ------------------------------------------------------------ graphs

    def _capture(self) -> None:
        before = torch.cuda.mem_get_info(self._device)[0]
        if sizes := self._graph_sizes:
            self._graphs = DecodeGraphs(
                self._model, self._pages, self._kinds, self._last_tokens, self._table, sizes, self._packers[0],
                shown=self._leads, states=self.states, by_tokens=self._by_tokens, predicting=self._predicting,
            )  # fmt: skip
        if pieces := self._piece_sizes:
            has_full = self._kinds.all[0].chunks.has_full
            self._piecewise_graphs = PiecewiseGraphs(self._model, self._pages, self._last_tokens, pieces, has_full)
        used = before - torch.cuda.mem_get_info(self._device)[0]
        log.info("graphs for up to %d decodes, and for steps of up to %d tokens, in %.2f GB", max(sizes, default=0),
                 max(pieces, default=0), used / 1e9)  # fmt: skip


def _leading_decodes(plan: Plan) -> int:
    """How many of a step's first requests compute a single token."""
    more = np.flatnonzero(plan.counts > 1)
    return int(more[0]) if len(more) else len(plan.counts)
