"""Proposes tokens with a model's multi-token prediction layer (`model.predictor`), on the CPU.

    step      tokens of a request    5 6 7 8 9          hidden   h5 h6 h7 h8 h9          sampled: 10
    store     the layer's K and V of token i and h[i-1], at the slots of the step's tokens
    propose   guess(10, h9) -> 11    guess(11, what the layer made of 10) -> 12    ...

The layer has K and V of every token that is in pages. Where the hidden state before a token is not known, because the
token before was a hit, zeros are in its place: the proposals of the requests that read it may then be worse.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from radixrt.worker.execution.attention import TorchAttention
from radixrt.worker.model.layers.mixers import Projected
from radixrt.worker.model.model import Model
from radixrt.worker.plan import Plan, Result


@dataclass(frozen=True, slots=True)
class LastStates:
    """The hidden states [N, hidden] of a request's last tokens, from position `first` on."""

    number: int
    """See `Request.number`."""
    first: int
    states: torch.Tensor

    def before(self, number: int, position: int) -> torch.Tensor | None:
        """The state before a request's token at a position; None if it is not known."""
        index = position - 1 - self.first
        return self.states[index] if number == self.number and 0 <= index < len(self.states) else None


class Predicting:
    """The layer of one runner, whose `attention` it uses."""

    def __init__(self, model: Model, attention: TorchAttention) -> None:
        assert model.predictor is not None
        self._model = model
        self._predictor = model.predictor
        self._attention = attention
        self._last: dict[int, LastStates] = {}
        """By row of the page table."""

    def store(self, plan: Plan, tokens: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> None:
        """Store K and V of a step's int64 tokens[T] at positions[T], whose hidden states [T, hidden] are given."""
        self._hidden = hidden
        before = torch.cat((torch.zeros_like(hidden[:1]), hidden[:-1]))
        for index, begin, stop, kept in sequences(plan):
            row, number, start = int(plan.rows[index]), plan.requests[index].number, int(plan.starts[index])
            last = self._last.get(row)
            state = None if last is None else last.before(number, start)
            before[begin] = 0 if state is None else state
            self._last[row] = LastStates(number, start + stop - kept - begin, hidden[stop - kept : stop].clone())
        slots = torch.from_numpy(plan.slots).to(hidden.device, torch.int64)

        def write(layer: int, heads: Projected) -> None:
            _, k, v = heads.split()
            assert k is not None and v is not None
            self._attention.pool.write(layer, slots, k, v)

        self._predictor.store(tokens, positions, before, write)

    def propose(self, plan: Plan, result: Result) -> Result:
        """The result of a step with `Result.proposals`, after `store`."""
        if plan.proposes is None:
            return result
        began = time.monotonic()
        asked = [_Proposed.of(plan, result, index) for index in np.flatnonzero(plan.proposes).tolist()]
        asked = [one for one in asked if one.index not in result.failed and one.index not in result.stuck]
        hidden = self._hidden[[one.at for one in asked]]
        passes = max((one.count for one in asked), default=0)
        for number in range(passes):
            going = [n for n, one in enumerate(asked) if one.count > number]
            tokens, hidden[going] = self._guess([asked[n] for n in going], hidden[going])
            for n, token in zip(going, tokens, strict=True):
                asked[n].ids.append(token)
        return dataclasses.replace(
            result,
            proposals={one.index: one.ids[1:] for one in asked},
            proposing_seconds=(time.monotonic() - began) / max(passes, 1),
        )

    def _guess(self, asked: list[_Proposed], hidden: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        """(The most likely tokens after the last ones, what takes the place of their hidden states), given the hidden
        states before them."""
        device, rows = hidden.device, np.array([one.row for one in asked], dtype=np.int32)
        positions = np.array([one.position + len(one.ids) - 1 for one in asked], dtype=np.int32)
        last = np.array([one.ids[-1] for one in asked], dtype=np.int32)
        attend = self._attention.begin(self._singles(rows, positions, last), device)
        tokens, at = (torch.from_numpy(x.astype(np.int64)).to(device) for x in (last, positions))
        guessed = self._predictor.guess(tokens, at, hidden, attend)
        return self._model.logits(guessed).argmax(-1).tolist(), guessed

    def _singles(self, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray) -> Plan:
        """A step of one token of each row."""
        slots = [self._attention.slots(row, at + 1)[-1] for row, at in zip(rows.tolist(), positions, strict=True)]
        ones, none = np.ones(len(rows), dtype=np.int32), np.zeros((3, 0), dtype=np.int32)
        return Plan(0, (), rows, positions, ones, tokens, np.array(slots, np.int32), ones, ones > 0, none)


@dataclass(frozen=True, slots=True)
class _Proposed:
    """What is proposed for a request."""

    index: int
    row: int
    count: int
    """How many tokens."""
    position: int
    """Position of the last token that the step gave."""
    at: int
    """Index of the step's token before that one."""
    ids: list[int]
    """That token, and what is proposed so far."""

    @classmethod
    def of(cls, plan: Plan, result: Result, index: int) -> _Proposed:
        ends = np.cumsum(plan.counts)
        draft = next((draft for draft in plan.drafts if draft.first == index), None)
        last = index if draft is None else index + draft.accepted(result.tokens)
        position = int(plan.starts[last] + plan.counts[last])
        assert plan.proposes is not None
        count = int(plan.proposes[index])
        return cls(index, int(plan.rows[index]), count, position, int(ends[last]) - 1, [result.tokens[last]])


def sequences(plan: Plan) -> Iterator[tuple[int, int, int, int]]:
    """The tokens of each request in a step: (first index in the plan, begin, end, how many of the last ones may be the
    one before the request's next token)."""
    ends, index = np.cumsum(plan.counts).tolist(), 0
    drafted = {draft.first: len(draft.ids) for draft in plan.drafts}
    while index < len(ends):
        last = index + drafted.get(index, 0)
        begin = ends[index - 1] if index else 0
        yield index, begin, ends[last], 1 + last - index
        index = last + 1
