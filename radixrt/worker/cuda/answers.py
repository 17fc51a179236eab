"""From a step's logits back to the host: the tokens that are drawn, and the integers that the host fetches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from radixrt.worker.cuda import drawing, kernels
from radixrt.worker.cuda.staging import Packer, Piece
from radixrt.worker.model.parallel import Group
from radixrt.worker.picking import NOT_FINITE
from radixrt.worker.plan import Plan, Result
from radixrt.worker.sample import Draws


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that was launched."""

    logits: torch.Tensor
    answer: torch.Tensor
    """See `Drawn.pick`."""
    logit_rows: int
    """How many of the answer's first integers say whether logits are finite; tokens follow them."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """The requests whose tokens are drawn rather than the likeliest: their rows of the logits (`at`) and of the page
    table, their places among the step's new tokens (`to`), and the arrays of `Draws`."""

    at: Piece
    rows: Piece
    to: Piece
    pieces: dict[str, Piece]

    @classmethod
    def pack(cls, packer: Packer, plan: Plan, logit_rows: np.ndarray, rows: np.ndarray) -> Drawing | None:
        """`logit_rows`[n] are those of the n requests for which `plan.samples`; `rows` are by request. None if all are
        greedy."""
        chosen = np.flatnonzero(plan.samples)
        drawn = [i for i, b in enumerate(chosen.tolist()) if not plan.requests[b].greedy]
        if not drawn:
            return None
        who = chosen[drawn]
        samplings = [plan.requests[b].sampling for b in who]
        arrays = Draws.arrays(samplings, (plan.starts + plan.counts)[who].tolist())
        pieces = {name: packer.add(array) for name, array in arrays.items()}
        to = np.array(drawn, dtype=np.int32)
        return cls(packer.add(logit_rows[drawn].astype(np.int32)), packer.add(rows[who]), packer.add(to), pieces)

    def draws(self, sent: torch.Tensor) -> Draws:
        return Draws.of({name: piece.of(sent) for name, piece in self.pieces.items()})


class Drawn:
    """The token drawn last for each row of the page table, and for padding, whose row comes after them. In a group, all
    ranks take over those of rank 0 when the next step begins."""

    def __init__(self, rows: int, device: torch.device, group: Group | None = None) -> None:
        self._tokens = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._group = group

    def note(self, rows: torch.Tensor, tokens: torch.Tensor) -> None:
        """Note int32 tokens[n], drawn for int rows[n]."""
        self._tokens[rows.long()] = tokens

    def pick(
        self, logits: torch.Tensor, ids: range, rows: torch.Tensor, at: torch.Tensor | None = None
    ) -> torch.Tensor:
        """int32[S + n]: whether each row of logits is finite (see `drawing.largest`); then the likeliest token of each
        of the rows `at` int64[n] (None: all), which is noted for `rows`. This rank has float32 logits[S, len(ids)], of
        the token `ids`."""
        found = drawing.largest(logits, ids, self._group)
        finite, best = found[: len(logits)], found[len(logits) :]
        if at is not None:
            best = best[at]
            found = torch.cat([finite, best])
        self.note(rows, best)
        return found

    def resolve(self, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See `kernels.resolve`. Every step begins with it."""
        if self._group is not None:
            self._group.broadcast(self._tokens)
        return kernels.resolve(tokens, rows, self._tokens)


class Answer:
    """Integers on their way to the host."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._host = torch.empty(4096, dtype=torch.int32, pin_memory=self._on_gpu)
        self._size = 0
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) if self._on_gpu else None for _ in range(2))

    def begin(self) -> None:
        """The step's time begins: it is launched next."""
        if self._begin:
            self._begin.record()

    @property
    def seconds(self) -> float:
        """Device time of the step, once `wait` has returned; 0 without a GPU."""
        return self._begin.elapsed_time(self._end) / 1e3 if self._begin and self._end else 0.0

    def fetch(self, integers: torch.Tensor) -> None:
        self._size = len(integers)
        if self._size > len(self._host):
            self._host = torch.empty(2 * self._size, dtype=torch.int32, pin_memory=self._on_gpu)
        self._host[: self._size].copy_(integers, non_blocking=True)
        if self._end:
            self._end.record()

    def wait(self) -> np.ndarray:
        """Wait for the integers: int32, valid until the next `fetch`."""
        if self._end:
            self._end.synchronize()
        return self._host[: self._size].numpy()


def make_result(plan: Plan, logit_rows: int, answer: np.ndarray) -> Result:
    """The Result of a step whose tokens were drawn on the device."""
    total = int(plan.wants.sum())
    bad = np.flatnonzero(answer[:total] == 0)
    ends = np.cumsum(plan.wants)
    failed = {int(np.searchsorted(ends, row, side="right")): NOT_FINITE for row in bad}
    tokens = np.zeros(len(plan.requests), dtype=np.int64)
    chosen = np.flatnonzero(plan.samples)
    tokens[chosen] = answer[logit_rows : logit_rows + len(chosen)]
    return Result(tokens.tolist(), [], {}, failed)
