"""Dispatches each run to the best worker; if it fits none, the run waits until a worker joins.

    send -> a worker fits: in flight there, under a new id  --reclaim, if the worker was lost--> send
                                                            --move, if it has filled the room there--> send
                                                            --retry, if the worker failed it--> send, or it ends
         -> none does: it waits until a worker joins        --send_waiting--> send
    retry -> others failed with it: it is held until a worker has no other such run in trial    --release--> send

`drop` ends a run, wherever it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

from radixrt.messages import TOKEN_BYTES
from radixrt.router.core import failures
from radixrt.router.core.effects import Effect, Order
from radixrt.router.core.request import Request, RunState
from radixrt.router.core.worker import Sent, Worker
from radixrt.router.core.workers import Serving, Workers
from radixrt.router.placement import cost
from radixrt.router.placement.index import Index

MIN_SHARED_TOKENS = 256
"""If workers' hits differ by fewer tokens than this, sharers are not counted (`_sharers`)."""
WINDOW_BYTES = 16 * TOKEN_BYTES
"""Bytes at the end of a part that are compared to decide whether a run shares it. An estimate is good enough."""
MAX_SHARING_RUNS = 64
"""The most runs that are compared: the latest of those that decode."""


class Dispatcher:
    """Chooses workers for runs, and keeps all unfinished runs."""

    def __init__(self, workers: Workers, index: Index) -> None:
        self.in_flight: dict[int, RunState] = {}
        """Dispatched runs by id. Must not be modified from outside."""
        self._workers = workers
        self._index = index
        self._waiting: dict[RunState, None] = {}
        self.held: dict[RunState, None] = {}
        """Runs that failed together with others, which may be the cause, or may be themselves: each worker gets one at
        a time."""
        self._last_id = 0

    def __len__(self) -> int:
        """Runs that are in flight or wait for a worker."""
        return len(self.in_flight) + len(self._waiting) + len(self.held)

    def send(self, run: RunState, now: float, trial: list[Worker] | None = None) -> list[Effect]:
        """Send a run to the best worker, or let it wait until one joins; as a `trial` to one of these workers."""
        request = run.request
        ids = run.prompt + run.emitted.tobytes() if run.emitted else run.prompt
        tokens = len(ids) // TOKEN_BYTES
        fits = self._fitting(run, tokens, now, trial)
        run.on_trial = bool(trial)
        if not fits:
            run.waiting_since = now if run.waiting_since is None else run.waiting_since
            self._waiting[run] = None
            return []
        worker, hit, best_hit = self._choose(run, ids, tokens, fits, now)
        if run.id < 0:  # dispatched for the first time
            run.hit, run.best_hit, run.sent_at = hit, best_hit, now
        else:
            run.most_cached = request.resident.get(worker.record)
        request.resident.setdefault(worker.record, hit)
        self._last_id += 1
        worker.sent_at = now
        run.id, run.worker, run.started, run.waiting_since = self._last_id, worker, False, None
        run.sent, run.served_by = len(run.emitted), worker.name
        self.in_flight[run.id] = run
        worker.dispatched(run.id, Sent(tokens, tokens - hit))
        self._index.computing(worker.number, run.id, request.namespace.key, run.prompt)
        return [Order(worker.name, run.order(ids, worker))]

    def _fitting(self, run: RunState, tokens: int, now: float, trial: list[Worker] | None) -> dict[int, Worker]:
        """By number, the workers with room for all tokens that were requested; if there are none, those with room for
        at least one more. Workers that have failed the run, and those that are set aside, only if there are no others,
        but for a probe. Of those of a `trial`, if there are any."""
        workers = trial or self._able(run)
        if run.tries and not trial:
            workers = failures.next_tries(run, workers) or workers
        if run.request.bounded:
            most = tokens + run.remaining
            workers = [m for m in workers if most <= m.token_limit] or workers
        if any([m.record.incidents for m in workers]):
            workers = self._probed(run, workers, now)
        return {m.number: m for m in workers}

    def _able(self, run: RunState) -> list[Worker]:
        """The workers that get new runs, and have room for at least one more token of this one."""
        least = run.prompt_len + len(run.emitted) + (run.remaining > 0)
        return [m for m in self._serving(run).open if least <= m.token_limit]

    def _probed(self, run: RunState, workers: list[Worker], now: float) -> list[Worker]:
        """Those of `workers` that are not set aside; all, if there are no others. Or one that is to be probed by the
        run, if that has not failed and another worker could go on with it."""
        usable = [m for m in workers if not m.record.set_aside]
        if not run.tries and not run.losses:
            for worker in workers:
                if worker.record.is_due(now) and any(m is not worker for m in usable):
                    worker.record.probe(now)
                    return [worker]
        return usable or workers

    def _serving(self, run: RunState) -> Serving:
        return self._workers.serving(run.request.namespace.model, run.request.namespace.version)

    def move(self, run: RunState, now: float) -> list[Effect] | None:
        """Move a run that ended early because it filled its worker's room to a worker with more. None if that is not
        why it ended, or no worker has more."""
        if run.worker is None or run.remaining <= 0:
            return None
        tokens = run.prompt_len + len(run.emitted)
        if not run.worker.token_limit <= tokens < self._serving(run).token_limit:
            return None
        self._remove(run)
        run.worker, run.counts_hits = None, False
        return self.send(run, now)

    def retry(self, worker: Worker, runs: Sequence[RunState], now: float) -> tuple[list[Effect], list[RunState]]:
        """A worker has failed `runs` in one step, although their requests are valid: the cause may lie with the worker,
        or with one of them. Each goes to a worker that has not failed it, at once or as a trial. Returns orders, and
        the runs that are to end, as there is none."""
        since = worker.record.failed_at
        others = (self.in_flight[id] for id in worker.runs if id in self.in_flight)
        gave_tokens = any(run.started and run.last_at > since for run in others)
        failures.note_failures(worker.record, runs, now, gave_tokens=gave_tokens)
        ending = [run for run in runs if (able := self._able(run)) and not failures.next_tries(run, able)]
        again = [run for run in runs if run not in ending]
        for run in again:
            self._remove(run)
            run.detach()
        effects: list[Effect] = []
        for run in again:
            if failures.needs_trial(run, self._able(run)):
                self.held[run] = None
            else:
                effects += self.send(run, now)
        orders, hopeless = self.release(now)
        return effects + orders, ending + hopeless

    def release(self, now: float) -> tuple[list[Effect], list[RunState]]:
        """Send held runs to workers that have no trial in progress. Returns orders, and the runs that are to end, as it
        has become clear that all workers have failed them."""
        effects: list[Effect] = []
        ending: list[RunState] = []
        trials = (run for run in self.in_flight.values() if run.on_trial and run.incidents)
        busy = {run.worker.number for run in trials if run.worker}
        for run in list(self.held):
            able = self._able(run)
            workers = failures.next_tries(run, able)
            free = [m for m in workers if m.number not in busy]
            if free or not able:
                del self.held[run]
                effects += self.send(run, now, free)
                busy |= {run.worker.number} if run.worker else set()
            elif not workers:
                ending.append(run)
        return effects, ending

    def _choose(
        self, run: RunState, ids: bytes, tokens: int, fits: dict[int, Worker], now: float
    ) -> tuple[Worker, int, int]:
        """Returns (the best worker, the hit expected there, the largest hit on any worker), in tokens."""
        limit = tokens - 1 if run.score_from is None else min(tokens, run.score_from) - 1
        held = self._index.match(run.request.namespace.key, ids, limit)
        # Only full pages are shared, but a page with the last token may be: a worker then computes that token alone.
        hits = {n: min(held.get(n, 0) // m.info.page_size * m.info.page_size, limit) for n, m in fits.items()}
        group = run.request.group
        if len(fits) == 1 and group is None:  # there is nothing to choose
            ((number, hit),) = hits.items()
            return fits[number], hit, hit
        candidates = [worker.candidate(hits[number], now) for number, worker in fits.items()]
        if group is not None:
            candidates = [group.at_arrival(candidate) for candidate in candidates]
        best, _ = cost.place(tokens, candidates, self._sharers(run, ids, hits.values()))
        if group is not None:
            group.placed(best, tokens - best.hit_tokens)
        return fits[best.worker], best.hit_tokens, max(c.hit_tokens for c in candidates)

    def _sharers(self, run: RunState, ids: bytes, hits: Collection[int]) -> list[int]:
        """For `cost.shared_cost`: how many of the latest runs decode behind each part of the largest
        hit."""
        best = max(hits)
        if best - min(hits) < MIN_SHARED_TOKENS:
            return []
        counts = [0] * cost.PARTS
        ends = [TOKEN_BYTES * (best * (i + 1) // cost.PARTS) for i in range(cost.PARTS)]
        parts = [(end - WINDOW_BYTES, end, ids[end - WINDOW_BYTES : end]) for end in ends]
        namespace = run.request.namespace
        decoding = (other for other in reversed(self.in_flight.values()) if other.started)
        for other in itertools.islice(decoding, MAX_SHARING_RUNS):
            if other.request.namespace == namespace:
                prompt = other.prompt
                for i, (begin, end, part) in enumerate(parts):
                    if prompt[begin:end] != part:
                        break
                    counts[i] += 1
        return counts

    def send_waiting(self, now: float) -> list[Effect]:
        """A worker has joined: send the waiting runs. Those that still fit nowhere keep their order and waiting
        time."""
        waiting, self._waiting = self._waiting, {}
        effects: list[Effect] = []
        for run in waiting:
            effects += self.send(run, now)
        return effects

    def waiting_longer_than(self, now: float, seconds: float) -> list[Request]:
        """Requests with a run that has waited for a worker longer than `seconds`."""
        since = ((run.request, run.waiting_since) for run in self._waiting)
        return list({request: None for request, at in since if at is not None and now - at > seconds})

    def superseded(self) -> list[Request]:
        """Requests that wait for a worker with a version of a LoRA adapter that no worker will have again."""
        waiting = {run.request: None for run in self._waiting}
        asked = [(request, request.namespace) for request in waiting]
        return [request for request, of in asked if of.version != self._workers.version(of.model)]

    def reclaim(self, ids: Iterable[int]) -> list[RunState]:
        """Take back runs that their worker no longer serves, to be sent again."""
        runs = [self.in_flight.pop(id) for id in ids]
        for run in runs:
            if run.got_on:
                run.losses.clear()
            if run.worker is not None:
                run.losses.append(run.worker)
            run.detach()
        return runs

    def start(self, run: RunState, now: float) -> None:
        """A run's worker has computed its prompt: from now on the worker's cache events tell what is cached of it."""
        self._start(run)
        if run.incidents:
            failures.got_on(run, now)

    def _start(self, run: RunState) -> None:
        run.started = True
        if run.worker is not None:
            run.worker.started(run.id)
            self._index.computed(run.worker.number, run.id)

    def drop(self, run: RunState, *, well: bool) -> None:
        """Forget a run that has ended, `well` if by itself."""
        self._remove(run)
        if run.incidents:
            failures.ended(run)
        if run.worker is not None and run.worker.record.incidents and (well or run.got_on):
            run.worker.record.succeeded()

    def _remove(self, run: RunState) -> None:
        """Remove a run from its worker, or from those that wait for one."""
        if not run.started and run.worker is not None:
            self._start(run)
        self.in_flight.pop(run.id, None)
        self._waiting.pop(run, None)
        if self.held:
            self.held.pop(run, None)
        if run.worker is not None:
            run.worker.ended(run.id)
