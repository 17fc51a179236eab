"""A step as it is planned: chunks are collected, and go behind the decodes."""

from __future__ import annotations

import numpy as np

from radixrt.worker.cache import PageCache
from radixrt.worker.plan import Plan
from radixrt.worker.request import Request

MOST_SCORED = 256
"""Tokens of prompts that are scored in a step: each takes a row of logits."""


class StepBuilder:
    """Collects the chunks of a step."""

    def __init__(self, cache: PageCache) -> None:
        self.cache = cache
        self.requests: list[Request] = []
        self.counts: list[int] = []
        self.tokens: list[np.ndarray] = []
        self.slots: list[np.ndarray] = []
        self.wants: list[int] = []
        self.samples: list[bool] = []
        self.scored = 0

    def most(self, request: Request) -> int:
        """Tokens of it that may be computed in this step, by what is scored already."""
        if request.score_from is None:
            return request.behind
        return max(0, request.score_from - 1 - request.computed) + MOST_SCORED - self.scored

    def add(self, request: Request, count: int) -> None:
        """Plan `count` tokens of a request whose pages are reserved, and publish them."""
        start, stop = request.computed, request.computed + count
        slots = self.cache.row_slots(request.row, start, stop)
        slots[: max(0, request.lease.length - start)] = 0
        self.cache.publish(request, stop)
        self.requests.append(request)
        self.counts.append(count)
        self.tokens.append(np.array(request.tokens[start:stop], dtype=np.int32))
        self.slots.append(slots)
        last = stop == request.total
        samples = last and request.total < request.limit
        scored = 0 if request.score_from is None else stop - max(start, request.score_from - 1)
        self.wants.append(max(scored, int(samples)))
        self.scored += max(0, scored)
        self.samples.append(samples)

    def build(
        self, step: int, decoding: list[Request], rows: np.ndarray, positions: np.ndarray, last: np.ndarray
    ) -> Plan:
        """Decodes and chunks as one Plan."""
        ones = np.ones(len(decoding), dtype=np.int32)
        if not self.requests:
            slots = self.cache.slots(rows, positions)
            return Plan(step, tuple(decoding), rows.astype(np.int32), positions.astype(np.int32), ones, last, slots,
                        ones, ones.astype(bool), self.cache.drain_writes())  # fmt: skip
        return Plan(
            step=step,
            requests=(*decoding, *self.requests),
            rows=np.array([*rows, *(r.row for r in self.requests)], dtype=np.int32),
            starts=np.array([*positions, *(r.computed for r in self.requests)], dtype=np.int32),
            counts=np.array([*ones, *self.counts], dtype=np.int32),
            tokens=np.concatenate([last, *self.tokens]),
            slots=np.concatenate([self.cache.slots(rows, positions), *self.slots]),
            wants=np.array([*ones, *self.wants], dtype=np.int32),
            samples=np.array([*ones, *self.samples], dtype=bool),
            table_writes=self.cache.drain_writes(),
        )
