"""Builds the Plan of a step: decodes first, then drafts, then chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from radixrt.messages import TOKEN_BYTES
from radixrt.messages.ranks import RequestInfo, TreePath
from radixrt.worker.cache.page_cache import PageCache
from radixrt.worker.plan import FROM_DEVICE, Draft, Plan
from radixrt.worker.request import Request

MAX_SCORED_TOKENS = 256
"""The most prompt tokens that are scored in a step: each takes a row of logits."""


class Decodes:
    """The decodes of a step, as the arrays of a Plan. All but `positions` and `last` stay the same until the batch
    changes. Plans share the arrays, so they are never written to."""

    __slots__ = (
        "adapters", "all_true", "infos", "last", "limits", "needs_host_tokens", "ones", "positions", "requests", "rows",
        "rows32", "wants_logits", "_paths", "_states",
    )  # fmt: skip

    def __init__(self, requests: list[Request]) -> None:
        self.requests = tuple(requests)
        self.infos = infos = tuple(r.info for r in requests)
        self.needs_host_tokens = any(info.needs_host_tokens for info in infos)
        self.wants_logits = _wants_logits(infos)
        self._paths: tuple[TreePath, ...] | None = None
        self.rows = np.array([r.row for r in requests], dtype=np.int64)
        self.rows32 = self.rows.astype(np.int32)
        self._states: np.ndarray | None = None
        self.limits = np.array([r.limit for r in requests], dtype=np.int64)
        self.adapters = _adapters(requests)
        self.ones = np.ones(len(requests), dtype=np.int32)
        self.all_true = np.ones(len(requests), dtype=bool)
        self.positions = np.array([r.computed for r in requests], dtype=np.int64)
        """Positions of the tokens to compute."""
        self.last = np.array([FROM_DEVICE if r.in_flight_tokens else r.tokens[-1] for r in requests], dtype=np.int32)
        """Ids of these tokens."""

    @property
    def states(self) -> np.ndarray:
        """Slots of the requests' recurrent states, int32, if the model has any."""
        if self._states is None:
            self._states = np.array([r.state for r in self.requests], dtype=np.int32)
        return self._states

    @property
    def paths(self) -> tuple[TreePath, ...]:
        """The requests' paths in the tree when they were first asked for: nothing joins a path while it decodes."""
        if self._paths is None:
            self._paths = _paths(self.requests)
        return self._paths

    def proposes(self, most: int) -> np.ndarray:
        """`Plan.proposes` of the decodes, int64: at most `most`, and no more than their limits leave room for."""
        return np.clip(self.limits - self.positions - 3, 0, most)

    def advance(self) -> None:
        """Move on to the next step, whose tokens are those that the planned step samples."""
        self.positions = self.positions + 1
        self.last = np.full(len(self.requests), FROM_DEVICE, dtype=np.int32)

    def set_sampled(self, sampled: list[int]) -> None:
        """Set the ids of the tokens to compute, which the last step sampled."""
        self.last = np.array(sampled[: len(self.requests)], dtype=np.int32)


class StepBuilder:
    """Collects the drafts of a step, then its chunks. The lists are the fields of a Plan. `paths`: whether its runner
    `shares`."""

    def __init__(self, cache: PageCache, paths: bool = False) -> None:
        self.cache = cache
        self._with_paths = paths
        self.requests: list[Request] = []
        self.counts: list[int] = []
        self.tokens: list[np.ndarray] = []
        self.slots: list[np.ndarray] = []
        self.wants: list[int] = []
        self.samples: list[bool] = []
        self.starts: list[int] = []
        self.states: list[int] = []
        """Slots of recurrent states (`StateWork.slots`), and `StateWork.runs`, if the model has any."""
        self.runs: list[int] = []
        self.proposes: list[int] = []
        self.drafts: list[Draft] = []
        """Their entries come before those of chunks."""
        self.following: dict[int, list[int]] = {}
        self.prompt_tokens = 0
        self.scored = 0
        """Prompt tokens that the step scores so far, of MAX_SCORED_TOKENS."""

    def max_count(self, request: Request) -> int:
        """The tokens that a request is behind, as many of them as this step can compute without scoring more than
        MAX_SCORED_TOKENS."""
        if request.score_from is None:
            return request.uncomputed_tokens
        return min(
            request.uncomputed_tokens,
            max(0, request.score_from - 1 - request.computed) + MAX_SCORED_TOKENS - self.scored,
        )

    def add_draft(self, request: Request, ids: list[int], states: list[int], proposes: int = 0) -> None:
        """Plan the last token of a request and the drafted `ids` after it. Their pages must be reserved; they are not
        published to the tree. `states`: slots for the recurrent states after each of `ids`, if the model has any. For
        `proposes` see `Plan`."""
        count, start = 1 + len(ids), request.computed
        self.drafts.append(Draft(ids, len(self.requests)))
        self.requests += [request] * count
        self.counts += [1] * count
        self.tokens.append(np.array([request.tokens[-1], *ids], dtype=np.int32))
        self.slots.append(self.cache.requests.row_slots(request.row, start, start + count))
        self.wants += [1] * count
        self.samples += [True] * count
        self.starts += range(start, start + count)
        self.states += [request.state, *states]
        self.runs += [count, *[0] * len(ids)]
        self.proposes += [proposes, *[0] * len(ids)]

    def add(self, request: Request, count: int, proposes: int = 0) -> None:
        """Plan the next `count` tokens of a request, and publish them to the tree. Their pages must be reserved. For
        `proposes` see `Plan`."""
        start, stop = request.computed, request.computed + count
        slots = self.cache.requests.row_slots(request.row, start, stop)
        if (cached := request.leased - start) > 0:
            slots[:cached] = 0  # cached already: their KV goes to the null page
        self.cache.requests.publish(request, stop)
        for checkpoint in request.checkpoints:
            if start < checkpoint <= stop:
                self.cache.requests.save(request, checkpoint, checkpoint - start if checkpoint < stop else 0)
        self.requests.append(request)
        self.counts.append(count)
        self.tokens.append(np.frombuffer(request.tokens, np.int32, count, start * TOKEN_BYTES).copy())
        self.slots.append(slots)
        total = request.total
        samples = stop == total < request.limit
        scored = 0 if request.score_from is None else stop - max(start, request.score_from - 1)
        if scored > 0:
            self.following[len(self.requests) - 1] = request.tokens[stop - scored + 1 : stop + 1].tolist()
        if count > 1 and start < request.prompt_len:
            self.prompt_tokens += count
        self.wants.append(max(scored, int(samples)))
        self.scored += max(0, scored)
        self.samples.append(samples)
        self.starts.append(start)
        self.states.append(request.state)
        self.runs.append(1)
        self.proposes.append(proposes)

    def build(self, step: int, decodes: Decodes, proposes: int = 0) -> Plan:
        """The decodes and what was collected, as one Plan. `proposes`: the most for each decode."""
        pages = self.cache.requests
        slots, starts = pages.slots(decodes.rows, decodes.positions), decodes.positions.astype(np.int32)
        states = None
        if self.cache.has_states:
            runs = _appended(decodes.ones, self.runs) if self.drafts else np.zeros(0, dtype=np.int32)
            states = self.cache.states.work(_appended(decodes.states, self.states), runs)
        proposed = None
        if proposes or any(self.proposes):
            proposed = _appended(decodes.proposes(proposes).astype(np.int32), self.proposes)
        moves = self.cache.tier.drain()
        if not self.requests:
            return Plan(step, decodes.infos, decodes.rows32, starts, decodes.ones, decodes.last, slots,
                        decodes.ones, decodes.all_true, pages.drain_writes(), states=states,
                        adapters=decodes.adapters, proposes=proposed, moves=moves,
                        paths=decodes.paths if self._with_paths else (),
                        needs_host_tokens=decodes.needs_host_tokens, wants_logits=decodes.wants_logits)  # fmt: skip
        first, requests = len(starts), (*decodes.requests, *self.requests)
        infos = tuple(r.info for r in self.requests)
        return Plan(
            step=step,
            requests=decodes.infos + infos,
            rows=_appended(decodes.rows32, [r.row for r in self.requests]),
            starts=_appended(starts, self.starts),
            counts=_appended(decodes.ones, self.counts),
            tokens=np.concatenate([decodes.last, *self.tokens]),
            slots=np.concatenate([slots, *self.slots]),
            wants=_appended(decodes.ones, self.wants),
            samples=_appended(decodes.all_true, self.samples),
            table_writes=pages.drain_writes(),
            drafts=tuple(replace(draft, first=draft.first + first) for draft in self.drafts),
            states=states,
            adapters=_adapters(requests),
            proposes=proposed,
            moves=moves,
            paths=_paths(requests) if self._with_paths else (),
            following={first + index: ids for index, ids in self.following.items()},
            prompt_tokens=self.prompt_tokens,
            needs_host_tokens=decodes.needs_host_tokens or any(info.needs_host_tokens for info in infos),
            wants_logits=decodes.wants_logits or _wants_logits(infos),
        )


def _paths(requests: Sequence[Request]) -> tuple[TreePath, ...]:
    return tuple(request.tree_path for request in requests)


def _wants_logits(requests: Sequence[RequestInfo]) -> bool:
    return any(not info.greedy or info.needs_host_tokens for info in requests)


def _adapters(requests: Sequence[Request]) -> np.ndarray | None:
    """See `Plan.adapters`."""
    numbers = [request.adapter for request in requests]
    return np.array(numbers, dtype=np.int32) if max(numbers, default=-1) >= 0 else None


def _appended(decodes: np.ndarray, chunks: list[int] | list[bool]) -> np.ndarray:
    return np.concatenate([decodes, np.array(chunks, dtype=decodes.dtype)])
