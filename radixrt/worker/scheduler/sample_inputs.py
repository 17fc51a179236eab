"""Gathers what the sampling of a step depends on beside logits, positions and seeds (see `plan.SampleInputs`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixrt.worker.plan import Gained, MaskRoom, Plan, SampleInputs
from radixrt.worker.request import Request
from radixrt.worker.structured.masks import fill_masks


class InputGatherer:
    """Remembers which tokens one runner was given, so that each is given once."""

    def __init__(self) -> None:
        self._given: dict[int, tuple[int, int]] = {}
        """By row of the page table: `Request.number`, and how many of its tokens were given."""

    def gather(self, plan: Plan, requests: Sequence[Request], mask_room: MaskRoom) -> SampleInputs:
        """The inputs of a plan's `requests`. The result of the step before must be applied."""
        ahead = plan.ahead
        gained: dict[int, Gained] = {}
        banned: dict[int, list[int]] = {}
        masked: list[int] = []
        for index in np.flatnonzero(plan.samples).tolist():
            request = requests[index]
            if request.info.penalized:
                gained[index] = self.gained(int(plan.rows[index]), request)
            if request.info.adjusted:
                banned[index] = list(request.banned(ahead.get(index, ())))
            if request.matcher is not None and request.samples_in(plan.step):
                masked.append(index)
        if not masked:
            return SampleInputs(gained, banned)
        masks = mask_room(len(masked))
        drafted = {n: ahead[index] for n, index in enumerate(masked) if index in ahead}
        problems = fill_masks([requests[index] for index in masked], masks, ahead=drafted)
        return SampleInputs(gained, banned, masked, masks, {masked[n]: problem for n, problem in problems.items()})

    def gained(self, row: int, request: Request) -> Gained:
        """The tokens of the request of a row that were not given before."""
        number, count = self._given.get(row, (-1, 0))
        first = count if number == request.number else 0
        self._given[row] = request.number, len(request.tokens)
        return Gained(first, np.array(request.tokens[first:], dtype=np.int32))
