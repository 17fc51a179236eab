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
from radixrt.worker.cuda.attention.attention_groups import AttentionGroups, PackedAttention, Works
from radixrt.worker.cuda.attention.chunk_plan import few_wanted
from radixrt.worker.cuda.attention.decodes import DecodePlanner
from radixrt.worker.cuda.attention.pages import Pages
from radixrt.worker.cuda.attention.ragged import FlashInfer
from radixrt.worker.cuda.elementwise import kernels
from radixrt.worker.cuda.elementwise.staging import PackedArray, Packer
from radixrt.worker.cuda.forward_pass import Eager, ForwardPass, Piecewise
from radixrt.worker.cuda.graphs.decode_graphs import DecodeGraphs, graph_sizes
from radixrt.worker.cuda.graphs.piecewise_graphs import PiecewiseGraphs, sizes_up_to
from radixrt.worker.cuda.latent.full_chunks import FullHeads
from radixrt.worker.cuda.latent.sparse import PackedSparse, Sparse, SparseKinds
from radixrt.worker.cuda.recurrent.delta_step import DeltaStep, RecurrentStates, StepStates, by_tokens
from radixrt.worker.cuda.sampling.answers import (
    Answer,
    LastTokens,
    Launched,
    PackedSampling,
    PackedSamplingMetadata,
    make_result,
)
from radixrt.worker.cuda.sampling.mtp import MAX_REQUESTS, PackedProposing, Predicting
from radixrt.worker.cuda.sampling.sampler import CudaSampler, LateThresholds, Thresholds
from radixrt.worker.execution.kv_pool import KVPool, StatePool
from radixrt.worker.execution.sample_step import SampleStep
from radixrt.worker.execution.sampler import to_device
from radixrt.worker.execution.torch_runner import ModelRunner, leading_decodes, ranges
from radixrt.worker.model.model import Model
from radixrt.worker.model.parallel.group import Group
from radixrt.worker.plan import NOT_SAMPLED, Plan, Result, SampleInputs

log = logging.getLogger("radixrt.cuda")


ADAPTERS = 4
"""Row of `PackedStep.inputs`."""


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step as it is packed for the device: its tokens, and a part for each thing that a step may have."""

    plan: Plan
    forward: ForwardPass
    inputs: PackedArray
    """See `_token_inputs`."""
    writes: PackedArray
    """To the page table."""
    attention: PackedAttention | PackedSparse
    states: StepStates
    sampling: PackedSampling
    proposing: PackedProposing | None
    """None without a multi-token prediction layer."""


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
    graph_tokens    other steps of up to this many tokens run as piecewise CUDA graphs (`piecewise_graphs`)
    num_sms         multiprocessors that work is spread over
    tree_attention  whether pages that requests share are read once (`prefix_sharing`)
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
        model: Model,
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
        thresholds: Thresholds | LateThresholds | None = None,
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
        alone = exact or (spec.recurrent is not None and by_tokens(spec.recurrent, model.dtype, self._device))
        self._recurrent = RecurrentStates(states, alone)
        self._attention: AttentionGroups | SparseKinds = self._kinds
        if spec.index is not None and pool.index is not None:
            sparse = Sparse.of(spec.index.top_k, self._kinds.all[0].shape, dtypes, exact)
            self._attention = SparseKinds(self._kinds, sparse, pool.index)
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
        super().close()
        if not self.works():
            return
        for graphs in (self._graphs, self._piecewise_graphs, self._predicting):
            if graphs is not None:
                graphs.close()
        self._graphs = self._piecewise_graphs = self._predicting = None

    @property
    def plain_keys(self) -> int:
        return self._counted.plain_keys

    @property
    def read_keys(self) -> int:
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
        if not plan.requests:
            return self._move_alone(plan)
        self._steps += 1
        self._move_pages(plan)
        packer = self._packers[self._steps % 2]
        packer.clear()
        needs_host_tokens = self._leads and plan.needs_host_tokens
        size = self._graphs.size_for(plan) if self._graphs else 0
        works = self._kinds.plan_decodes(plan, len(plan.requests), size) if size else None
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

    def _replay(
        self, plan: Plan, packer: Packer, answer: Answer, size: int, works: list[Works], needs_host_tokens: bool
    ) -> Launched:
        """Launch a step of decodes by its graph."""
        assert self._graphs is not None
        count = len(plan.requests)
        graph = self._graphs.packed(packer, plan, size, works)
        states = self._recurrent.pack_copies(packer, plan)
        metadata = self._leads and not needs_host_tokens
        packed_metadata = PackedSamplingMetadata.pack(packer, plan, np.arange(count), plan.rows) if metadata else None
        asked = self._predicting.pack(packer, plan) if self._predicting else None
        if self.on_planned:
            self.on_planned(plan)
        answer.begin()
        sent = packer.send(graph.integers)
        states.begin(sent)
        graph.graph.replay()
        states.end(sent)
        logits = self._sample(plan, graph.logits[:count], packed_metadata, sent, graph.answer[size:])
        return Launched(logits, graph.answer, size, graph.tokens, sent, graph.hidden, asked)

    def _run(
        self, plan: Plan, packer: Packer, answer: Answer, needs_host_tokens: bool, works: list[Works] | None = None
    ) -> Launched:
        """Launch any step. `works` is the work of its decodes, if that is known."""
        step = self._pack(plan, packer, needs_host_tokens, works)
        answer.begin()
        sent, mix = self._send(step, packer)
        logits, hidden = self._forward(step, sent, mix)
        picked = self._pick(step, sent, logits)
        logits = self._sample(plan, logits, step.sampling.metadata, sent, picked[len(logits) :])
        asked = None if step.proposing is None else step.proposing.asked
        return Launched(logits, picked, len(logits), step.inputs.of(sent)[0], sent, hidden, asked)

    def _pack(self, plan: Plan, packer: Packer, needs_host_tokens: bool, works: list[Works] | None) -> PackedStep:
        decodes = leading_decodes(plan)
        forward, narrow = self._forward_pass(plan, decodes)
        step = PackedStep(
            plan,
            forward,
            packer.add(_token_inputs(plan, decodes, forward.size)),
            packer.add(plan.table_writes),
            self._attention.pack(plan, decodes, works, packer, self._steps % 2, narrow),
            self._recurrent.pack(packer, plan, decodes),
            PackedSampling.pack(packer, plan, metadata=self._leads and not needs_host_tokens),
            self._predicting.pack_all(packer, plan, forward.size) if self._predicting else None,
        )
        if self.on_planned:
            self.on_planned(plan)
        return step

    def _forward_pass(self, plan: Plan, decodes: int) -> tuple[ForwardPass, bool]:
        """Piecewise graphs if they are large enough; and whether the last layers are narrow (see `Eager`)."""
        count = len(plan.tokens)
        if self._piecewise_graphs is not None and (size := self._piecewise_graphs.size_for(count)):
            return Piecewise(self._piecewise_graphs, size), False
        narrow = self._narrows(plan, decodes)
        return Eager(self._model, self._last_tokens, count, decodes, narrow), narrow

    def _send(self, step: PackedStep, packer: Packer) -> tuple[torch.Tensor, DeltaStep | None]:
        """Returns the step's integers on the device, and what recurrent layers do."""
        sent = packer.send()
        kernels.scatter(step.writes.of(sent), self._table)
        mix, inputs = step.states.begin(sent), step.inputs.of(sent)
        self._model.use_adapters(None if step.plan.adapters is None else inputs[ADAPTERS])
        step.forward.begin(inputs)
        return sent, mix

    def _forward(
        self, step: PackedStep, sent: torch.Tensor, mix: DeltaStep | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's logits of the wanted tokens and, with multi-token prediction, the hidden states of all."""
        _, positions, slots, *_ = step.inputs.of(sent)
        attention = step.attention.sent(self._pages, slots, sent)
        wanted = step.sampling.wanted.of(sent).long()
        tokens, x, residual, left = step.forward.attend(attention, mix, wanted)
        step.states.end(sent)
        if self._predicting is None or step.proposing is None:
            return self._model.finish(x, residual, left, tokens=tokens), None
        hidden = self._model.hidden(x, residual, tokens=tokens)
        self._predicting.store(tokens, positions, slots, hidden, step.proposing.before.of(sent))
        return self._model.logits(hidden[wanted]), hidden

    def _pick(self, step: PackedStep, sent: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """See `LastTokens.sample_greedy`."""
        rows, at = step.sampling.rows.of(sent), step.sampling.at.of(sent).long()
        return self._last_tokens.sample_greedy(logits, self._model.own_ids, rows, at)

    def _narrows(self, plan: Plan, decodes: int) -> bool:
        """Whether layers after `ModelSpec.writers` are computed only for tokens whose logits are wanted."""
        spec, wants = self._model.spec, plan.wants[decodes:]
        fits = spec.writers < spec.num_layers and len(wants) > 0 and bool((plan.wants[:decodes] == 1).all())
        return fits and few_wanted(plan.counts[decodes:], wants)

    # ------------------------------------------------------------ from logits to tokens

    def _sample(
        self,
        plan: Plan,
        logits: torch.Tensor,
        packed_metadata: PackedSamplingMetadata | None,
        sent: torch.Tensor,
        tokens: torch.Tensor,
    ) -> torch.Tensor:
        """Sample the tokens that are not greedy; write them to `tokens` and store them as their rows' last tokens.
        Returns the logits of all ranks, float32[S, vocab], if the plan needs them (then it is a collective); otherwise
        this rank's."""
        if self._group is not None and plan.wants_logits:
            logits = self._model.gather(logits)
        if packed_metadata is not None:
            sampled = self._sampler.sample(logits, packed_metadata.at.of(sent), packed_metadata.metadata(sent)).int()
            tokens[packed_metadata.to.of(sent).long()] = sampled
            self._last_tokens.store(packed_metadata.rows.of(sent), sampled)
        return logits

    # ------------------------------------------------------------ graphs

    def _capture(self) -> None:
        before = torch.cuda.mem_get_info(self._device)[0]
        if sizes := self._graph_sizes:
            self._graphs = DecodeGraphs(
                self._model, self._pages, self._kinds, self._last_tokens, self._table, sizes, self._packers[0],
                shown=self._leads, recurrent=self._recurrent, predicting=self._predicting,
            )  # fmt: skip
        if pieces := self._piece_sizes:
            has_full = self._kinds.all[0].chunks.has_full
            self._piecewise_graphs = PiecewiseGraphs(self._model, self._pages, self._last_tokens, pieces, has_full)
        used = before - torch.cuda.mem_get_info(self._device)[0]
        log.info("graphs for up to %d decodes, and for steps of up to %d tokens, in %.2f GB", max(sizes, default=0),
                 max(pieces, default=0), used / 1e9)  # fmt: skip


def _token_inputs(plan: Plan, decodes: int, size: int) -> np.ndarray:
    """int32[5, size]: tokens, positions, slots, rows of the page table (those of decodes), adapters; padded."""
    found, count = np.zeros((5, size), dtype=np.int32), len(plan.tokens)
    found[:3, :count] = plan.tokens, ranges(plan.starts, plan.counts).astype(np.int32), plan.slots
    found[3, :decodes] = plan.rows[:decodes]
    found[ADAPTERS] = -1
    if plan.token_adapters is not None:
        found[ADAPTERS, :count] = plan.token_adapters
    return found
