"""How a request ends, and what of its path stays in the cache:

finished, or aborted by its client    all it computed; if finished while others wait, `retained` protects it for a while
it allows no token to come next       all it computed
its logits are not finite             nothing, except what other requests lease
its step could not be run             what was cached before that step; nothing if the step copied from host memory
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from radixrt.messages import Output
from radixrt.worker.cache.page_cache import PageCache
from radixrt.worker.plan import Plan
from radixrt.worker.request import Request
from radixrt.worker.scheduler.queue import VirtualTokenCounter, Waiting
from radixrt.worker.scheduler.running import Running
from radixrt.worker.stuck import Stuck, StuckCause


class Ending:
    """Ends the requests of one scheduler and removes them from its `requests`."""

    def __init__(
        self,
        requests: dict[int, Request],
        cache: PageCache,
        running: Running,
        waiting: Waiting,
        counter: VirtualTokenCounter,
    ) -> None:
        self._requests = requests
        self._cache = cache
        self._running = running
        self._waiting = waiting
        self._counter = counter

    def end(self, request: Request, keep: bool = False, why: str = "abort") -> None:
        """End a request, waiting or running. What it computed stays cached, protected by `retained` if `keep`. `why` it
        ends is for the order of eviction."""
        computed = request.computed
        if request.row >= 0:
            self._running.remove(request)
            self._cache.requests.retire(request, keep)
        else:
            self._waiting.remove(request)
            self._cache.retained.left(request)
        if self._cache.order is not None:
            ids = request.tokens[:computed]
            generated = len(request.tokens) - request.prompt_len
            self._cache.order.ended(request.id, request.namespace, ids, why, generated, time.monotonic())
        self._is_over(request)

    def stop_short(self, request: Request, stuck: Stuck) -> Output:
        """Fail a request that allows no token to come next, by its grammar or otherwise, or that takes too long to tell
        which. What it computed stays cached."""
        self.end(request)
        restriction = request.restriction if stuck.cause is StuckCause.RESTRICTION else ""
        return _failed(request, stuck.text, restriction or "grammar")

    def fail_for_good(self, request: Request, reason: str) -> list[Output]:
        """Fail a request whose KV is invalid. Nothing of its path stays cached, whoever computed it, except what other
        requests lease."""
        outputs = [] if request.finished else [self._fail(request, 0, reason)]
        self._cache.requests.forget(request, len(request.tokens))
        return outputs

    def fail_step(self, plan: Plan, requests: Sequence[Request], reason: str) -> list[Output]:
        """Fail every one of a step's `requests`: it could not be run. Nothing that it was to compute stays cached."""
        outputs: list[Output] = []
        # What the step was to copy, in both directions, may be missing.
        unfilled = self._cache.tier.reset() or (plan.moves is not None and plan.moves.fills)
        running = self._running
        # Not in this plan, they may lease what this step was to compute or to copy; after a copy they may decode next.
        others = running.prefilling + (running.decoding + running.drafting + running.sitting if unfilled else [])
        for request in [r for r in others if r not in requests]:
            add = self._waiting.park if request in running.sitting else self._waiting.add
            running.remove(request)
            self._cache.requests.discard(request, request.leased)
            add(request)
        # In reverse: later ones may lease what earlier ones were to compute.
        for request, start in reversed(list(zip(requests, plan.starts.tolist(), strict=True))):
            start -= start % self._cache.page_size  # a partly filled page is useless
            had_left = request.row < 0
            if not request.finished:
                outputs.append(self._fail(request, start, reason))
            if had_left:  # preempted or aborted while the step ran: what it was to compute is in the tree
                self._cache.requests.forget(request, len(request.tokens), start)
        if unfilled:  # who needed them may have left or wait again, and others may have found them since
            self._cache.clear_all()
        return outputs

    def _fail(self, request: Request, keep: int, reason: str) -> Output:
        """Fail a request. If it runs, nothing beyond its first `keep` tokens stays cached."""
        if request.row < 0:
            self.end(request)
        else:
            self._running.remove(request)
            self._cache.requests.discard(request, keep)
            self._is_over(request)
        return _failed(request, reason)

    def _is_over(self, request: Request) -> None:
        request.finished = True
        del self._requests[request.id]
        self._counter.remove_request(request.tenant)
        if not self._requests:
            self._cache.retained.clear()


def _failed(request: Request, reason: str, field: str = "") -> Output:
    return Output(request.id, finish="error", cached_tokens=request.cached_tokens, error=reason, field=field)
