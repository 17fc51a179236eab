"""What the scheduler asks of a runner for one step, and what the runner answers. Integers only.

tokens of a step, concatenated:   d0 d1 d2 | p3 p3 p3 p3 | p4 p4
                                  decodes    prefill chunks
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from radixrt.messages import TokenLogprob
from radixrt.worker.request import Request

FROM_DEVICE = -1
"""In place of a token id: the one that the step before drew for this row of the page table."""


@dataclass(frozen=True, slots=True)
class Draft:
    """`ids` may follow the last token of a request; of the step's requests, it is those from `first` on, one for its
    last token and one for each of the ids."""

    request: Request
    ids: list[int]
    first: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step over B requests and T tokens, decodes (one token each) before chunks.

    All K and V of a step are written to their slots, layer by layer, before that layer's attention reads: a request
    may read pages that another one of the same step fills.
    """

    step: int
    requests: tuple[Request, ...]
    rows: np.ndarray
    """int32[B]: row of the page table."""
    starts: np.ndarray
    """int32[B]: position of the first token computed now; as many tokens are in pages already."""
    counts: np.ndarray
    """int32[B]: tokens computed now."""
    tokens: np.ndarray
    """int32[T]: token ids, or FROM_DEVICE for a decode of a runner that `overlaps`."""
    slots: np.ndarray
    """int32[T]: where K and V go, page * page_size + offset; page 0 is the trash page, for a token whose KV is cached
    already and that is computed for its logits only."""
    wants: np.ndarray
    """int32[B]: at how many of its last positions logits are wanted."""
    samples: np.ndarray
    """bool[B]: a token is drawn from the logits of the last position."""
    table_writes: np.ndarray
    """int32[3, N]: rows, indices and pages of what has changed in the page table since the last plan."""
    drafts: tuple[Draft, ...] = ()
    """Of a request that has one, a decode is planned for its last token and for each that is drafted, side by side."""

    @property
    def wants_logits(self) -> bool:
        """Whether more is asked of logits than which one is the largest."""
        return any(request.draws or request.serial for request in self.requests)

    @property
    def drafted(self) -> range:
        """Which of the B requests are those of drafts."""
        if not self.drafts:
            return range(0)
        last = self.drafts[-1]
        return range(self.drafts[0].first, last.first + 1 + len(last.ids))

    @property
    def ahead(self) -> dict[int, list[int]]:
        """Drafted tokens that stand between what is known of a request and what is drawn, by index, where there are
        any."""
        return {draft.first + n: draft.ids[:n] for draft in self.drafts for n in range(1, 1 + len(draft.ids))}

    def draws_for(self, index: int) -> bool:
        """Whether what is drawn for a request is still wanted when the step before it has been taken in."""
        request = self.requests[index]
        return not request.over and self.step > request.void


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to a Plan, by index of its B requests."""

    tokens: list[int]
    """Sampled token; without meaning where nothing was sampled."""
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    """Of the sampled token, where `sampling.logprobs` is set; empty when nobody asked."""
    scores: dict[int, list[float] | list[TokenLogprob]] = field(default_factory=dict)
    """For requests with `score_from`: natural log-probability of the token that follows each wanted position, for those
    positions that a known token follows; with others, where `sampling.logprobs` is set."""
    failed: dict[int, str] = field(default_factory=dict)
    """Requests whose logits are not finite, with the reason; they fail alone, and what they computed is of no use."""
    stuck: dict[int, str] = field(default_factory=dict)
    """Requests whose grammar lets no token come, with the reason; they fail alone, and what they computed is right."""


class GroupLost(BaseException):
    """From a runner of several ranks: they no longer agree. The worker cannot go on."""


class DeviceLost(BaseException):
    """From the worker's loop: the runner's device computes nothing any more. The worker cannot go on."""


class Runner(Protocol):
    """Computes plans. `num_pages` counts the trash page 0; `max_model_len` is the model's own limit in tokens."""

    page_size: int
    num_pages: int
    vocab_size: int
    eos_ids: frozenset[int]
    max_model_len: int
    plain_keys: int
    read_keys: int
    busy_seconds: float
    """See `messages.Load`."""
    overlaps: bool
    """Step n+1 may be launched before the result of step n is asked for: tokens drawn stay on the device, by row."""

    sparse: bool
    """Not every token takes the same weights: the model has experts."""

    def bind(self, table: np.ndarray) -> None:
        """Called once with the page table, int32[rows, pages], which the host goes on writing."""

    def launch(self, plan: Plan) -> Callable[[], Result]:
        """Start a step. Calling what is returned waits for it; until then the host may plan the next one."""

    def draw(self) -> None:
        """Called when the result of the step before the one launched last is applied: tokens that depend on those
        before (`Request.serial`) are drawn now, if they are not yet."""

    def works(self) -> bool:
        """Called when a step has failed: whether others may do better. Some errors of a device stay."""

    def close(self) -> None:
        """Called when the worker has left its loop."""
