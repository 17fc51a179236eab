"""How a request ends, and what of it stays in the cache.

it is done, or dropped              all that it computed, kept for a moment from those that wait if it is done
its grammar lets nothing come       all that it computed
its logits are not finite           nothing of its path that no other runs on
the step could not be run           what was there before that step
"""

from __future__ import annotations

from radixrt.messages import Output
from radixrt.worker.cache import PageCache
from radixrt.worker.plan import Plan
from radixrt.worker.request import Request
from radixrt.worker.running import Running
from radixrt.worker.waiting import VirtualTokenCounter, Waiting


class Ending:
    """Of one scheduler, whose `requests` it takes off."""

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

    def end(self, request: Request, keep: bool = False) -> None:
        """Take a request from wherever it is; what it computed stays cached, and is kept for a moment if `keep`."""
        if request.row >= 0:
            self._running.remove(request)
            self._cache.retire(request, keep)
        else:
            self._waiting.remove(request)
            self._cache.kept.left(request)
        self._is_over(request)

    def stop_short(self, request: Request, reason: str) -> Output:
        """A request cannot go on because of what it asks for; what it computed stays cached."""
        self.end(request)
        return _failed(request, reason, "grammar")

    def fail_for_good(self, request: Request, reason: str) -> list[Output]:
        """What a request computed is of no use: nothing of its path stays, whosever it was, that no other runs on."""
        outputs = [] if request.over else [self._fail(request, 0, reason)]
        self._cache.forget(request, len(request.tokens))
        return outputs

    def fail_step(self, plan: Plan, reason: str) -> list[Output]:
        """Every request of a step that could not be run fails; nothing of that step stays cached."""
        outputs: list[Output] = []
        for request in [r for r in self._running.behind if r not in plan.requests]:
            # Admitted, but nothing of it was planned: it may lease what this step was to compute.
            self._running.remove(request)
            self._cache.discard(request, request.lease.length)
            self._waiting.add(request)
        # The last first: they may lease what those before them were to compute.
        for request, start in reversed(list(zip(plan.requests, plan.starts.tolist(), strict=True))):
            start -= start % self._cache.page_size  # a page that was to be filled up is of no use
            sent_back = request.row < 0
            if not request.over:
                outputs.append(self._fail(request, start, reason))
            if sent_back:  # or dropped, while the step ran: what it was to compute went into the tree
                self._cache.forget(request, len(request.tokens), start)
        return outputs

    def _fail(self, request: Request, keep: int, reason: str) -> Output:
        """Of one that runs, nothing beyond `keep` tokens stays."""
        if request.row < 0:
            self.end(request)
        else:
            self._running.remove(request)
            self._cache.discard(request, keep)
            self._is_over(request)
        return _failed(request, reason)

    def _is_over(self, request: Request) -> None:
        request.over = True
        del self._requests[request.id]
        self._counter.go(request.tenant)
        if not self._requests:
            self._cache.kept.clear()


def _failed(request: Request, reason: str, field: str = "") -> Output:
    return Output(request.id, finish="error", cached_tokens=request.cached_tokens, error=reason, field=field)
