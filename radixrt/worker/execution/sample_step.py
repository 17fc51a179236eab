"""Samples the tokens of a step where penalties, grammars and the like affect them, or log-probabilities are reported.

All device work is launched at once. The results come back as one int32 array (floats by their bits), so that there is
one copy to wait for:

    for each row of logits: is it finite | scores, and the top values and ids there | sampled tokens | their
    log-probabilities, and the top values and ids there
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import numpy as np
import torch

from radixrt.messages import TokenLogprob
from radixrt.worker.execution.sampler import Masks, Sampler, choose, to_device
from radixrt.worker.plan import NONE_ALLOWED, Plan, Result, SampleInputs, may_be_next
from radixrt.worker.stuck import Stuck, StuckCause

T = TypeVar("T")

NOT_FINITE = "the model gave logits that are not finite"


class SampleStep:
    """The sampling of one step. `packed`, int32, is to be copied to the host and given to `read`; `tokens`, int32[S],
    are the sampled ones, for `rows`, int32[S], of the page table."""

    def __init__(self, plan: Plan, logits: torch.Tensor, sampler: Sampler, inputs: SampleInputs) -> None:
        """`logits`, float32[plan.wants.sum(), vocab], may be overwritten."""
        self._plan = plan
        self._inputs = inputs
        self._ends = np.cumsum(plan.wants)
        self._chosen = chosen = np.flatnonzero(plan.samples)
        self._vocab_size = logits.shape[-1]
        self.rows = plan.rows[chosen]
        requests = [plan.requests[b] for b in chosen]
        scores = self._scores(logits)
        every = len(chosen) == len(logits)
        at = None if every else to_device(self._ends[chosen] - 1, logits.device)
        raw = logits if at is None else logits[at]
        self._reported = [row for row, r in enumerate(requests) if r.sampling.logprobs is not None]
        positions = (plan.starts + plan.counts)[chosen].tolist()
        finite = None if every else logits.amax(-1).isfinite()
        free = raw.clone() if self._reported else raw
        places = {b: row for row, b in enumerate(chosen.tolist())}
        tokens, fine = choose(
            free, requests, self.rows, positions, sampler, self._masks(places, logits.device),
            _by_row(plan.ahead, places), _by_row(inputs.gained, places), _by_row(inputs.banned, places),
        )  # fmt: skip
        self.tokens = tokens.int()
        if finite is None:
            finite = fine
        else:  # for sampled positions only logits of allowed tokens count
            finite[at] = fine
        self._parts = [finite.int(), *scores, self.tokens, *self._logprobs(raw)]
        self.packed = torch.cat([part.flatten() for part in self._parts])

    def _masks(self, places: dict[int, int], device: torch.device) -> Masks | None:
        """The masks of requests with a grammar, whose rows of the logits are `places`; None if there are none."""
        inputs = self._inputs
        if not inputs.masked:
            return None
        rows = np.array([places[b] for b in inputs.masked])
        return Masks(torch.from_numpy(inputs.masks).to(device, non_blocking=True), to_device(rows, device))

    def _scores(self, logits: torch.Tensor) -> list[torch.Tensor]:
        """For the requests with `score_from`: log-probabilities of the known tokens after the wanted positions, and the
        top values and ids where `sampling.logprobs` is set. Fills `_scored`."""
        self._scored: list[tuple[int, list[int], int]] = []
        scores = []
        for b, following in self._plan.following.items():
            mine = logits[self._ends[b] - self._plan.wants[b] : self._ends[b]]
            at = to_device(np.array(following, dtype=np.int64), logits.device)[:, None]
            logprobs = torch.log_softmax(mine[: len(following)], -1)
            parts = [_bits(logprobs.gather(-1, at))]
            count = self._plan.requests[b].sampling.logprobs
            if count is not None:
                values, ids = logprobs.topk(min(count, logits.shape[-1]))
                parts += [_bits(values), ids.int()]
            scores += parts
            self._scored.append((b, following, len(parts)))
        return scores

    def _logprobs(self, raw: torch.Tensor) -> list[torch.Tensor]:
        """Log-probabilities of the sampled tokens, and the top values and ids, from the model's raw logits[S, vocab],
        for the rows in `_reported`."""
        if not self._reported:
            return []
        rows = to_device(np.array(self._reported), raw.device)
        logprobs = torch.log_softmax(raw[rows], -1)
        asked = [self._plan.requests[self._chosen[row]].sampling.logprobs or 0 for row in self._reported]
        values, ids = logprobs.topk(min(max(asked), raw.shape[-1]))
        return [_bits(logprobs.gather(-1, self.tokens[rows].long()[:, None])), _bits(values), ids.int()]

    # ------------------------------------------------------------ on the host

    def read(self, packed: np.ndarray) -> Result:
        """The step's Result from `packed` on the host, which may be overwritten afterwards."""
        sizes = [part.shape for part in self._parts]
        cuts = np.cumsum([part.numel() for part in self._parts])[:-1]
        arrays = [array.reshape(size) for array, size in zip(np.split(packed, cuts), sizes, strict=True)]
        finite, *rest = arrays
        scores = {}
        for b, following, count in self._scored:
            scores[b] = _read_scores(following, *rest[:count])
            rest = rest[count:]
        failed, stuck = {}, dict(self._inputs.stuck)
        for row in np.flatnonzero(finite == 0):
            b = int(np.searchsorted(self._ends, row, side="right"))
            if self._allows_none(b):
                stuck[b] = Stuck(StuckCause.RESTRICTION, NONE_ALLOWED)
            else:
                failed[b] = NOT_FINITE
        tokens = np.zeros(len(self._plan.requests), dtype=np.int64)
        tokens[self._chosen] = rest[0]
        return Result(tokens.tolist(), self._read_logprobs(*rest), scores, failed, stuck)

    def _allows_none(self, b: int) -> bool:
        """Whether what the request of an index asks for leaves no token, whatever its logits."""
        request, inputs = self._plan.requests[b], self._inputs
        if not request.adjusted:  # a grammar alone that leaves none is one of `SampleInputs.stuck`
            return False
        left = may_be_next(request, inputs.banned.get(b, ()), self._vocab_size)
        if b in inputs.masked:
            bits = inputs.masks[inputs.masked.index(b)].view(np.uint8)
            left &= np.unpackbits(bits, bitorder="little")[: len(left)].astype(bool)
        return not left.any()

    def _read_logprobs(self, tokens: np.ndarray, *found: np.ndarray) -> list[TokenLogprob | None]:
        if not found:
            return []
        logprobs: list[TokenLogprob | None] = [None] * len(self._plan.requests)
        of_sampled, values, ids = _floats(found[0]).flatten().tolist(), _floats(found[1]).tolist(), found[2].tolist()
        for n, row in enumerate(self._reported):
            b = int(self._chosen[row])
            count = self._plan.requests[b].sampling.logprobs
            top = list(zip(ids[n][:count], values[n][:count], strict=True))
            logprobs[b] = TokenLogprob(int(tokens[row]), of_sampled[n], top)
        return logprobs


def _by_row(given: Mapping[int, T], places: Mapping[int, int]) -> dict[int, T]:
    return {places[b]: one for b, one in given.items()}


def _read_scores(
    following: list[int], own: np.ndarray, values: np.ndarray | None = None, ids: np.ndarray | None = None
) -> list[float] | list[TokenLogprob]:
    logprobs = _floats(own).flatten().tolist()
    if values is None or ids is None:
        return logprobs
    tops = [list(zip(*top, strict=True)) for top in zip(ids.tolist(), _floats(values).tolist(), strict=True)]
    return [TokenLogprob(*one) for one in zip(following, logprobs, tops, strict=True)]


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of float32 values as int32."""
    return x.float().contiguous().view(torch.int32)


def _floats(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.float32)
