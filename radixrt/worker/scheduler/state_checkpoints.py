"""After which tokens of prompts checkpoints of recurrent states are taken (see `recurrent_states`), and who waits for
them. A checkpoint is worth what it saves the next request, a copy and a slot; so there are few:

    prompt          [ ................................ |  TAIL ]    for forks, n > 1, and next turns without thoughts
    second request  [ ...... cached KV ..... | its own ......  ]    a branching point that nobody knew of
    in the queue    [ ...... common ...... | ...... ]               the others wait for it, and begin there
    pins            [ ..... | ......... | ............ ]

When a request leaves, its live state becomes a checkpoint without a copy. Those closer than MIN_CHECKPOINT_TOKENS
tokens after another are left out: tokens up to there are computed again instead.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from itertools import islice

from radixrt.tree import common_length
from radixrt.worker.cache.page_cache import PageCache
from radixrt.worker.request import Request
from radixrt.worker.scheduler.queue import Waiting
from radixrt.worker.scheduler.running import Running

TAIL = 16
"""Tokens of a prompt that come after its checkpoint: chat templates end prompts with the head of an answer, often one
that asks for thoughts, and have another head in the next turn's history."""
MIN_CHECKPOINT_TOKENS = 64
"""The fewest tokens that a checkpoint has to save."""
NEAR = 8
"""The fewest tokens of a chunk before a checkpoint that it passes: then the last inputs of a short convolution are
tokens of the chunk."""
MAX_COMPARED_REQUESTS = 64
"""The most waiting requests that a request is compared with when it is admitted, the oldest of each tenant."""
COMPARED = 1 << 20
"""The tokens after which a request is compared with no others at a time: half a millisecond."""


def until_checkpoint(request: Request, count: int) -> int:
    """Shorten the next chunk of a request, of `count` tokens, so that it ends at the first of its checkpoints, if that
    is so NEAR that a step cannot pass it."""
    at = bisect_right(request.checkpoints, request.computed)
    near = at < len(request.checkpoints) and request.checkpoints[at] < request.computed + NEAR
    return min(count, request.checkpoints[at] - request.computed) if near else count


def _compared(request: Request, others: Iterable[Request]) -> Iterator[Request]:
    """Of others, those that a request is compared with: until COMPARED tokens are."""
    left = COMPARED
    for other in others:
        yield other
        if other.namespace == request.namespace:
            left -= min(len(other.tokens), len(request.tokens))
            if left <= 0:
                return


class Branching:
    """Sets `Request.checkpoints`."""

    def __init__(self, running: Running, waiting: Waiting, cache: PageCache) -> None:
        self._running = running
        self._waiting = waiting
        self._cache = cache
        self._page_size = cache.page_size

    def admitted(self, request: Request) -> None:
        """Set the checkpoints of a request that was admitted. A state and KV from host memory may be still to come."""
        request.checkpoints = []
        known, start = self._cache.prefixes.find(request.namespace, request.tokens, request.reusable)
        last = request.reusable if request.score_from is not None else request.prompt_len - TAIL
        for at in sorted((last, known, *request.pinned)):
            self._add_checkpoint(request, min(at, last), start)
        for other in _compared(request, islice(self._waiting, MAX_COMPARED_REQUESTS)):
            self._add_common_checkpoint(request, other)

    def arrived(self, request: Request) -> None:
        """Add checkpoints where requests that are being computed part from one that has come."""
        for other in _compared(request, self._running.prefilling):
            self._add_common_checkpoint(other, request)

    def must_wait(self, request: Request) -> bool:
        """Whether a checkpoint that a running request is about to take saves a waiting one MIN_CHECKPOINT_TOKENS
        tokens. The running one has a chunk in every step that has room, so that is soon; if it leaves before, nobody
        waits any more."""
        least = request.hit + MIN_CHECKPOINT_TOKENS
        coming = {}  # the next checkpoint of each that has one
        for other in self._running.prefilling:
            if coming_at := [at for at in other.checkpoints if at > other.computed and at >= least]:
                coming[other] = coming_at[0]
        return any(coming[other] <= self._common(other, request) for other in _compared(request, coming))

    def _add_common_checkpoint(self, running: Request, waiting: Request) -> None:
        common = self._common(running, waiting)
        if common >= waiting.hit + MIN_CHECKPOINT_TOKENS:
            self._add_checkpoint(running, common)

    def _common(self, one: Request, other: Request) -> int:
        """How many tokens of one request, in whole pages, the other can reuse."""
        if one.namespace != other.namespace:
            return 0
        return min(common_length(one.tokens, other.tokens), other.reusable) // self._page_size * self._page_size

    def _add_checkpoint(self, request: Request, at: int, start: int = 0) -> None:
        """`start`: where the request will go on, if that is after what it has `computed`."""
        at -= at % self._page_size
        place = bisect_right(request.checkpoints, at)
        before = request.checkpoints[place - 1] if place else 0
        if at >= max(before, start, request.computed) + MIN_CHECKPOINT_TOKENS:
            insort(request.checkpoints, at)


class NoBranching:
    """In the place of Branching for models without recurrent states: nobody waits for a checkpoint."""

    def admitted(self, request: Request) -> None:
        pass

    def arrived(self, request: Request) -> None:
        pass

    def must_wait(self, request: Request) -> bool:
        return False
