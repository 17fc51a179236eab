"""The way from a step's logits back to the host: greedy tokens, the last tokens of each row, and the copy to the
host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from radixrt.worker.cuda.elementwise import kernels
from radixrt.worker.cuda.elementwise.staging import PackedArray, Packer
from radixrt.worker.cuda.sampling import sampling_kernels
from radixrt.worker.cuda.sampling.mtp import PackedRequests
from radixrt.worker.execution.sample_step import NOT_FINITE
from radixrt.worker.execution.sampler import SamplingMetadata
from radixrt.worker.execution.torch_runner import wanted
from radixrt.worker.model.parallel.group import Group
from radixrt.worker.plan import Plan, Result


@dataclass(frozen=True, slots=True)
class Launched:
    """The device tensors of a launched step."""

    logits: torch.Tensor
    answer: torch.Tensor
    """See `LastTokens.sample_greedy`."""
    logit_rows: int
    """How many of the answer's first integers are flags for finite logits; tokens follow them."""
    tokens: torch.Tensor
    """int32[T]: the step's, FROM_DEVICE among them."""
    sent: torch.Tensor
    """What the Packer sent."""
    hidden: torch.Tensor | None = None
    """[T, hidden], if the model's multi-token prediction layer is used, and then `asked`: for `Predicting.finish`."""
    asked: PackedRequests | None = None


@dataclass(frozen=True, slots=True)
class PackedSamplingMetadata:
    """The requests of a step that are not greedy, as packed for the device: their rows of the logits (`at`) and of the
    page table (`rows`), their places among the step's new tokens (`to`), and the arrays of `SamplingMetadata`."""

    at: PackedArray
    rows: PackedArray
    to: PackedArray
    pieces: dict[str, PackedArray]

    @classmethod
    def pack(
        cls, packer: Packer, plan: Plan, logit_rows: np.ndarray, rows: np.ndarray
    ) -> PackedSamplingMetadata | None:
        """Pack the requests of a plan; None if all are greedy. `logit_rows`[n] are the rows of the logits of the n
        requests for which `plan.samples`; `rows`, by request, those of the page table."""
        chosen = np.flatnonzero(plan.samples)
        random_rows = [i for i, b in enumerate(chosen.tolist()) if not plan.requests[b].greedy]
        if not random_rows:
            return None
        who = chosen[random_rows]
        samplings = [plan.requests[b].sampling for b in who]
        arrays = SamplingMetadata.arrays(samplings, (plan.starts + plan.counts)[who].tolist())
        pieces = {name: packer.add(array) for name, array in arrays.items()}
        to = np.array(random_rows, dtype=np.int32)
        return cls(packer.add(logit_rows[random_rows].astype(np.int32)), packer.add(rows[who]), packer.add(to), pieces)

    def metadata(self, sent: torch.Tensor) -> SamplingMetadata:
        return SamplingMetadata.of({name: piece.of(sent) for name, piece in self.pieces.items()})


class LastTokens:
    """The last sampled token of each row of the page table, and of one more row for padding. In a group, all ranks take
    over those of rank 0 when the next step begins."""

    def __init__(self, rows: int, device: torch.device, group: Group | None = None) -> None:
        self._tokens = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._group = group

    def store(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Store int32 tokens[n] for int rows[n]."""
        self._tokens[rows.long()] = tokens

    def sample_greedy(
        self, logits: torch.Tensor, ids: range, rows: torch.Tensor, at: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Find the most likely token of each of the rows `at` int64[n] of logits (None: of all), and store it for
        `rows`. This rank has the float32 logits[S, len(ids)] of the token `ids`. Returns int32[S + n]: whether each row
        of logits is finite (see `sampling_kernels.largest`), then the tokens."""
        largest = sampling_kernels.largest(logits, ids, self._group)
        finite, best = largest[: len(logits)], largest[len(logits) :]
        if at is not None:
            best = best[at]
            largest = torch.cat([finite, best])
        self.store(rows, best)
        return largest

    def resolve(self, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Replace FROM_DEVICE by the last tokens (see `kernels.resolve`). Every step begins with this."""
        if self._group is not None:
            self._group.broadcast(self._tokens)
        return kernels.resolve(tokens, rows, self._tokens)


@dataclass(frozen=True, slots=True)
class PackedSampling:
    """What of a step's tokens becomes logits, and what of these becomes tokens."""

    wanted: PackedArray
    """Indices of the tokens whose logits are wanted."""
    at: PackedArray
    """Rows of the logits, one for each token that is sampled."""
    rows: PackedArray
    """Of the page table, likewise."""
    metadata: PackedSamplingMetadata | None
    """None if all are greedy, or if the host samples later."""

    @classmethod
    def pack(cls, packer: Packer, plan: Plan, metadata: bool) -> PackedSampling:
        """`metadata`: whether tokens that are not greedy are sampled with the step."""
        chosen = np.flatnonzero(plan.samples)
        at = np.cumsum(plan.wants)[chosen] - 1
        return cls(
            packer.add(wanted(plan).astype(np.int32)),
            packer.add(at.astype(np.int32)),
            packer.add(plan.rows[chosen]),
            PackedSamplingMetadata.pack(packer, plan, at, plan.rows) if metadata else None,
        )


class Answer:
    """A copy of a step's integers to the host, and the step's device time."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._host = torch.empty(4096, dtype=torch.int32, pin_memory=self._on_gpu)
        self._size = 0
        self._begin, self._middle, self._end = (
            torch.cuda.Event(enable_timing=True) if self._on_gpu else None for _ in range(3)
        )

    def begin(self) -> None:
        """Record the start of a step's device time. Call before the step is launched."""
        if self._begin:
            self._begin.record()

    @property
    def seconds(self) -> float:
        """Device time of the step, once `wait` has returned; 0 without a GPU."""
        return self._begin.elapsed_time(self._end) / 1e3 if self._begin and self._end else 0.0

    def propose(self) -> None:
        """Record the start of the proposals' device time."""
        if self._middle:
            self._middle.record()

    @property
    def proposing_seconds(self) -> float:
        """Device time from `propose` on, once `wait` has returned; 0 without a GPU."""
        return self._middle.elapsed_time(self._end) / 1e3 if self._middle and self._end else 0.0

    def fetch(self, integers: torch.Tensor) -> None:
        """Start to copy int32 `integers` to the host, and record the end of the step's device time."""
        self._size = len(integers)
        if self._size > len(self._host):
            self._host = torch.empty(2 * self._size, dtype=torch.int32, pin_memory=self._on_gpu)
        self._host[: self._size].copy_(integers, non_blocking=True)
        if self._end:
            self._end.record()

    def wait(self) -> np.ndarray:
        """Wait for the copy. Returns int32, valid until the next `fetch`."""
        if self._end:
            self._end.synchronize()
        return self._host[: self._size].numpy()


def make_result(plan: Plan, logit_rows: int, answer: np.ndarray) -> Result:
    """The Result of a step from its answer (see Launched), on the host."""
    total = int(plan.wants.sum())
    bad = np.flatnonzero(answer[:total] == 0)
    ends = np.cumsum(plan.wants)
    failed = {int(np.searchsorted(ends, row, side="right")): NOT_FINITE for row in bad}
    tokens = np.zeros(len(plan.requests), dtype=np.int64)
    chosen = np.flatnonzero(plan.samples)
    tokens[chosen] = answer[logit_rows : logit_rows + len(chosen)]
    return Result(tokens.tolist(), [], {}, failed)
