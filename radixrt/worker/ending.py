"""How a request ends, and what of it stays in the cache.

done, or dropped by its client      all it computed; if it is done, kept for a moment while others wait
its grammar allows no token         all it computed
its logits are not finite           nothing of its path, except what other requests run on
its step could not be run           what was there before that step
"""

from __future__ import annotations

from radixrt.messages import Output
from radixrt.worker.cache import PageCache
from radixrt.worker.plan import Plan
from radixrt.worker.request import Request
from radixrt.worker.running import Running
from radixrt.worker.waiting import VirtualTokenCounter, Waiting


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

    def end(self, request: Request, keep: bool = False) -> None:
        """End a request, waiting or running. What it computed stays cached, and is kept for a moment if `keep`."""
        if request.row >= 0:
            self._running.remove(request)
            self._cache.retire(request, keep)
        else:
            self._waiting.remove(request)
            self._cache.kept.left(request)
        self._is_over(request)

    def stop_short(self, request: Request, reason: str) -> Output:
        """End a request that cannot go on because of what it asks for. What it computed stays cached."""
        self.end(request)
        return _failed(request, reason, "grammar")

    def fail_for_good(self, request: Request, reason: str) -> list[Output]:
        """Fail a request whose results are useless. Nothing of its path stays cached, whoever computed it, except what
        other requests run on."""
        outputs = [] if request.over else [self._fail(request, 0, reason)]
        self._cache.forget(request, len(request.tokens))
        return outputs

    def fail_step(self, plan: Plan, reason: str) -> list[Output]:
        """Fail every request of a step that could not be run. Nothing of that step stays cached."""
        outputs: list[Output] = []
        for request in [r for r in self._running.behind if r not in plan.requests]:
            # Admitted but not planned: it may lease what this step was to compute.
            self._running.remove(request)
            self._cache.discard(request, request.lease.length)
            self._waiting.add(request)
        # In reverse: later ones may lease what earlier ones were to compute.
        for request, start in reversed(list(zip(plan.requests, plan.starts.tolist(), strict=True))):
            start -= start % self._cache.page_size  # a partly filled page is useless
            sent_back = request.row < 0
            if not request.over:
                outputs.append(self._fail(request, start, reason))
            if sent_back:  # preempted or dropped while the step ran: what it was to compute is in the tree
                self._cache.forget(request, len(request.tokens), start)
        return outputs

    def _fail(self, request: Request, keep: int, reason: str) -> Output:
        """Fail a request; if it runs, nothing beyond `keep` tokens of it stays cached."""
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
