"""The Runner that computes a model with torch."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from radixrt.checkpoint.lora_modules import LoraModule
from radixrt.worker.cache.disk_figures import Disk
from radixrt.worker.execution.attention import BatchInvariantAttention, TorchAttention
from radixrt.worker.execution.host_pool import HostPool
from radixrt.worker.execution.kv_pool import DTYPES, KVPool, StatePool
from radixrt.worker.execution.mtp import Predicting
from radixrt.worker.execution.sample_step import SampleStep
from radixrt.worker.execution.sampler import TorchSampler
from radixrt.worker.model.layers.mixers import Recurrence
from radixrt.worker.model.lora.adapter import Adapter, read_adapter
from radixrt.worker.model.model import Model
from radixrt.worker.plan import NOT_SAMPLED, Histories, Moves, Plan, Result, Runner, SampleInputs

SMALL_WEIGHTS, SMALL_PRODUCT = 4 << 20, 8 << 20
"""Bytes of a weight matrix, and multiplications of a matrix product, below which synchronizing threads takes longer
than they save."""

MOST_ALONE = 16
"""Tokens of a step up to which torch uses one thread, if the large products are not torch's: their kernels have threads
of their own."""


class ModelRunner(Runner):
    """The attributes of a Runner that follow from a model and its pool."""

    def __init__(
        self, model: Model, pool: KVPool, page_size: int, eos_ids: frozenset[int], states: StatePool | None = None
    ) -> None:
        spec = model.spec
        self.num_states = 0 if states is None else states.slots
        self.states = states
        self.host: HostPool | None = None
        """Pages and states in host memory; set before the runner is used, if there are any."""
        self.disk: Disk | None = None
        """The same for what outlives the process."""
        self.num_pages = pool.slots // page_size
        self.page_size = page_size
        self.vocab_size = spec.vocab_size
        self.eos_ids = eos_ids
        self.max_model_len = spec.max_model_len
        self.sparse = spec.experts is not None
        self.predicts = spec.predicts
        self.kv_dtype = next(name for name, dtype in DTYPES.items() if dtype == pool.dtype)
        self.busy_seconds = 0.0
        self.pool = pool
        self.on_planned: Callable[[Plan], None] | None = None
        """Called when the kernels' work of a step is planned and nothing is launched yet."""
        self._model = model
        self._device = pool.device

    def audit(self, histories: Histories) -> None:
        """There is a model: nothing to compare."""
        return

    def mask_room(self, count: int) -> np.ndarray:
        """Pinned, so that a GPU can copy it asynchronously: it is a megabyte for 64 requests."""
        shape = count, -(-self.vocab_size // 32)
        return torch.empty(shape, dtype=torch.int32, pin_memory=self._device.type == "cuda").numpy()

    @property
    def page_bytes(self) -> int:
        return self.pool.nbytes // max(1, self.num_pages)

    @property
    def num_host_pages(self) -> int:
        return 0 if self.host is None else self.host.slots

    @property
    def num_host_states(self) -> int:
        return 0 if self.host is None else self.host.num_states

    @property
    def plain_keys(self) -> int:
        return 0

    @property
    def read_keys(self) -> int:
        return 0

    def _move_pages(self, plan: Plan) -> None:
        """The copies between device and host memory with which a step begins."""
        if self.host is None:
            return
        self.host.arrive()
        if plan.moves is not None:
            self.host.move(plan.moves, wait=plan.needs_onload)

    def _move_alone(self, plan: Plan) -> Callable[[], Result]:
        """A step without requests."""
        if self.on_planned:
            self.on_planned(plan)
        self._move_pages(plan)
        return lambda: Result([])

    def move(self, moves: Moves) -> None:
        assert self.host is not None
        self.host.arrive()
        self.host.move(moves)

    def read_adapter(self, module: LoraModule) -> Adapter:
        return read_adapter(module, self._model.max_lora_rank)

    def put_adapter(self, slot: int, module: LoraModule, adapter: Adapter) -> None:
        self._model.put_adapter(slot, adapter)

    def works(self) -> bool:
        if self._device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize(self._device)  # raises a persistent error again
        except RuntimeError:
            return False
        return True

    def kill(self) -> None:
        """There are no other ranks here; see `tensor_parallel.Leader`."""

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()


class TorchRunner(ModelRunner):
    """Runs a model with plain torch on one device, one step after the other. Of several ranks, only the first, which
    `leads`, samples."""

    overlaps = False
    shares = False

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        page_size: int,
        eos_ids: frozenset[int] = frozenset(),
        batch_invariant: bool = False,
        states: StatePool | None = None,
        leads: bool = True,
    ) -> None:
        super().__init__(model, pool, page_size, eos_ids, states)
        spec = model.spec
        kind = BatchInvariantAttention if batch_invariant else TorchAttention
        self._attention = kind(
            pool, page_size, spec.attention_windows, spec.scale, model.sinks, spec.attention.score_cap,
            spec.attention.chunked, spec.index.top_k if spec.index else 0,
        )  # fmt: skip
        widest = spec.hidden_size * max(spec.intermediate_size, spec.num_heads * spec.head_dim)
        small = pool.device.type == "cpu" and not batch_invariant and widest * model.dtype.itemsize < SMALL_WEIGHTS
        self._alone = SMALL_PRODUCT // widest if small else 0
        if model.is_int and not batch_invariant:
            self._alone = MOST_ALONE
        """Steps of at most this many tokens are computed by one thread."""
        self._threads = torch.get_num_threads()
        self._sampler = TorchSampler()
        self._leads = leads
        self._deferred: tuple[Plan, torch.Tensor] | None = None
        """The step that waits for `sample_deferred`, with its logits."""
        self._result = Result([])
        self._predicting = Predicting(model, self._attention) if model.predictor is not None else None

    def bind(self, table: np.ndarray) -> None:
        self._attention.bind(table)

    def launch(self, plan: Plan) -> Callable[[], Result]:
        if not plan.requests:
            return self._move_alone(plan)
        began = time.monotonic()
        if self.on_planned:
            self.on_planned(plan)
        if self._alone:
            torch.set_num_threads(1 if len(plan.tokens) <= self._alone else self._threads)
        logits = self.logits(plan)
        self.busy_seconds += time.monotonic() - began
        if self._leads:
            self._deferred = plan, logits
            if not plan.needs_host_tokens:
                self.sample_deferred(SampleInputs())
        return self._read

    def sample_deferred(self, inputs: SampleInputs) -> None:
        assert self._deferred is not None
        began = time.monotonic()
        (plan, logits), self._deferred = self._deferred, None
        with torch.inference_mode():
            sample_step = SampleStep(plan, logits, self._sampler, inputs)
            self._result = sample_step.read(sample_step.packed.cpu().numpy())
            if self._predicting is not None:
                self._result = self._predicting.propose(plan, self._result)
        self.busy_seconds += time.monotonic() - began

    def _read(self) -> Result:
        if self._deferred is not None:
            raise RuntimeError(NOT_SAMPLED)
        return self._result

    @torch.inference_mode()
    def logits(self, plan: Plan) -> torch.Tensor:
        """Compute a step. Returns float32[plan.wants.sum(), vocab], the logits of the wanted positions in order."""
        self._move_pages(plan)
        mix, adapters = self._begin_states(plan), plan.token_adapters
        self._model.use_adapters(None if adapters is None else torch.from_numpy(adapters).to(self._device))
        tokens = torch.from_numpy(plan.tokens).to(self._device, torch.int64)
        positions = torch.from_numpy(ranges(plan.starts, plan.counts)).to(self._device)
        at, attend = torch.from_numpy(wanted(plan)).to(self._device), self._attention.begin(plan, self._device)
        if self._predicting is None:
            logits = self._model.forward(tokens, positions, attend, at, mix)
        else:
            hidden = self._model.hidden(*self._model.attend_all(tokens, positions, attend, mix))
            self._predicting.store(plan, tokens, positions, hidden)
            logits = self._model.logits(hidden[at])
        if self.states is not None and plan.states is not None:
            self.states.copy(plan.states.saves)
        return logits

    def _begin_states(self, plan: Plan) -> Recurrence | None:
        """Copy to the step's states. Returns what recurrent layers do with them; None without such layers."""
        if self.states is None or plan.states is None:
            return None
        self.states.copy(plan.states.restores)
        parts = plan.states.parts(plan.counts)
        sources, targets, bounds = (
            torch.from_numpy(x).to(self._device) for x in (parts.sources, parts.targets, parts.bounds)
        )
        in_place = np.array_equal(parts.sources, parts.targets)
        return Recurrence(self.states.layer, sources, bounds, None if in_place else targets)


def wanted(plan: Plan) -> np.ndarray:
    """int64[plan.wants.sum()]: indices of the step's tokens whose logits are wanted."""
    return ranges(np.cumsum(plan.counts) - plan.wants, plan.wants)


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """int64[counts.sum()]: the concatenation of arange(start, start + count) for all starts and counts."""
    starts, counts = starts.astype(np.int64), counts.astype(np.int64)
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


def leading_decodes(plan: Plan) -> int:
    """How many of a step's first requests compute a single token."""
    more = np.flatnonzero(plan.counts > 1)
    return int(more[0]) if len(more) else len(plan.counts)
