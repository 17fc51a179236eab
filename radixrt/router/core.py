"""The router's decisions: a state machine without sockets, threads or clocks.

Each method takes what happened and the time (seconds, monotonic) and returns what to send. Only token prompts
come here; text is encoded before and decoded after (`streams`).

    submit -> place at once with the best worker -> its outputs become Deltas, one message a step and client
    worker lost -> the same runs, with what they have emitted, go to another worker; the stream goes on
    no worker left -> runs wait `worker_timeout * 2` for one to join, then end with 503
"""

from __future__ import annotations

import random
from array import array
from struct import Struct
from typing import TYPE_CHECKING

from radixrt.config import RouterConfig
from radixrt.messages import (
    Abort,
    Delta,
    Deltas,
    Error,
    Generate,
    Output,
    Register,
    Score,
    Snapshot,
    StepDone,
    Stop,
    Usage,
)
from radixrt.router import placement
from radixrt.router.admission import Admission
from radixrt.router.effects import Effect, Order, Reply
from radixrt.router.groups import Groups
from radixrt.router.index import Index
from radixrt.router.members import Member, Members
from radixrt.router.pauses import Pauses
from radixrt.router.record import Counters, Recorder
from radixrt.router.request import Client, Request, RunState
from radixrt.router.states import Key
from radixrt.router.validate import Refused

if TYPE_CHECKING:
    from radixrt.report import Report

MAX_LOSSES = 3
"""Workers that may be lost under one run before it counts as what kills them."""
SNAPSHOT_SECONDS = 10.0
"""Until a snapshot that has not come is asked for again: it was lost with a connection."""
KEEPALIVE_SECONDS = 5.0
"""Clients with requests in flight get a message at least this often, so that a vanished one is noticed."""

_pack_token = Struct("<i").pack


class RouterCore:
    """See the module. `vocab_size` is the tokenizer's, for workers that do not say theirs (0: unknown)."""

    def __init__(
        self,
        config: RouterConfig,
        report: Report | None = None,
        *,
        vocab_size: int = 0,
        rng: random.Random | None = None,
    ) -> None:
        self.members = Members()
        self.index = Index()
        self._config = config
        self._admission = Admission(config, self.members, vocab_size, rng or random.Random())
        self._recorder = Recorder(report)
        self.groups = Groups()
        self.pauses = Pauses(report)
        self._requests: dict[Client, dict[int, Request]] = {}
        self._runs: dict[int, RunState] = {}
        self._waiting: dict[RunState, None] = {}
        self._last_run = 0
        self._last_tick: float | None = None
        self._next_keepalive = 0.0

    @property
    def counters(self) -> Counters:
        return self._recorder.counters

    @property
    def runs_in_flight(self) -> int:
        """Sequences that are placed or wait for a worker."""
        return len(self._runs) + len(self._waiting)

    # ------------------------------------------------------------ clients

    def tenant(self, api_key: str) -> str:
        """The tenant of a key; Refused (401) when keys are configured and this is none of them."""
        return self._admission.tenant(api_key)

    def submit(
        self,
        client: Client,
        message: Generate | Score,
        now: float,
        state: Key | None = None,
        *,
        resumes: bool = False,
    ) -> list[Effect]:
        """Take a request with a TokenPrompt: orders for workers, or one Error that says why not. `state` is what its
        prompt begins with, in which a pause is over if it `resumes`."""
        try:
            if self.serves(client, message.id):
                raise Refused("id", f"request id {message.id} is in flight already")
            request = self._admission.admit(client, message, self.runs_in_flight)
        except Refused as refused:
            self.counters.refused += 1
            over = self.resume(state, now) if resumes and state else []  # it went on all the same
            return [Reply(client, refused.error(message.id)), *over]
        self.counters.requests += 1
        if isinstance(message, Generate):
            self._recorder.session(request.tenant, message.session)
        self._requests.setdefault(client, {})[message.id] = request
        request.group = self.groups.join(state, request.open, now)
        request.resumed = self.pauses.end(state, now) if resumes and state else None
        effects: list[Effect] = []
        for run in request.runs:
            self._recorder.arrived(run)
            effects += self._dispatch(run, now)
        return effects

    def pause(self, state: Key, namespace: str, ids: bytes, seconds: float | None, now: float) -> list[Effect]:
        """Nothing will be asked of a state for a while: the worker that holds most of its `ids` keeps them."""
        held = self.index.match(namespace, ids)
        worker = max((m for m in self.members if held.get(m.number)), key=lambda m: held[m.number], default=None)
        most = self._config.pause_seconds
        seconds = most if seconds is None else min(seconds, most)
        name = worker.name if worker and seconds > 0 else ""
        return self.pauses.begin(state, namespace, ids, seconds, name, now)

    def resume(self, state: Key, now: float) -> list[Effect]:
        """A session that has paused goes on, without a request."""
        paused = self.pauses.end(state, now)
        return paused.unpin() if paused else []

    def cancel(self, client: Client, request_id: int) -> list[Effect]:
        """Stop a request, all its choices, and tell nobody but the workers."""
        request = self._requests.get(client, {}).get(request_id)
        if request is None:
            return []
        self.counters.cancelled += 1
        return self._abandon([request])

    def drop_client(self, client: Client) -> list[Effect]:
        """A client has vanished: cancel everything of it."""
        requests = list(self._requests.get(client, {}).values())
        self.counters.cancelled += len(requests)
        return self._abandon(requests)

    def in_flight(self, client: Client) -> list[int]:
        """Ids of a client's requests that are not finished."""
        return list(self._requests.get(client, ()))

    def serves(self, client: Client, request_id: int) -> bool:
        return request_id in self._requests.get(client, ())

    def namespace(self, client: Client, request_id: int) -> str | None:
        """Where a request is computed; None for one that is not in flight."""
        request = self._requests.get(client, {}).get(request_id)
        return request.namespace if request else None

    def stop_choice(self, client: Client, request_id: int, index: int) -> tuple[Usage | None, list[Effect]]:
        """End one choice where a stop string was found: its usage (None if it has ended already, or is a Score's) and
        an Abort."""
        request = self._requests.get(client, {}).get(request_id)
        run = request.runs[index] if request and 0 <= index < len(request.runs) else None
        if run is None or run.finished or request.scores:
            return None, []
        self._close(run)
        self.counters.finished += not request.open
        return run.usage(), [Order(run.worker, Abort([run.id]))] if run.member else []

    def end_choice(self, client: Client, request_id: int, index: int) -> list[Effect]:
        """`stop_choice` for a client that looks for stop strings itself: it gets the last Delta."""
        usage, effects = self.stop_choice(client, request_id, index)
        if usage is not None:
            delta = Delta(request_id, index, finish="stop", usage=usage)
            effects.append(Reply(client, Deltas([delta])))
        return effects

    # ------------------------------------------------------------ workers

    def register(self, info: Register, now: float) -> list[Effect]:
        """A worker joins. The same name with another pid is a new life of it; with the same pid, its cache lives on."""
        before = self.members.get(info.name)
        again = before is not None and before.info.pid == info.pid
        orphans = self._remove(info.name, may_return=False)
        member = self.members.join(info, now)
        self.index.add_worker(member.number, fresh=not again)
        effects = self._ask_snapshot(member) if again else []
        if again and before.runs:  # it may have taken them after it had let go of all
            effects.insert(0, Order(info.name, Abort(list(before.runs))))
        return effects + self._redispatch(orphans, now) + self._dispatch_waiting(now)

    def heartbeat(self, name: str, now: float) -> list[Effect]:
        member = self.members.get(name)
        if member is None:
            return self._revive(name, now)
        member.heard = now
        return []

    def leave(self, name: str, now: float) -> list[Effect]:
        """A worker is gone for good: its runs go on elsewhere."""
        return self._redispatch(self._remove(name, may_return=False), now)

    def lose(self, name: str, now: float) -> list[Effect]:
        """A worker cannot be reached: as `leave`, but a heartbeat brings it back."""
        return self._redispatch(self._remove(name, may_return=True), now)

    def step(self, name: str, message: StepDone, now: float) -> list[Effect]:
        """Mirror a worker's events, then hand its outputs to the clients, one Deltas each."""
        member = self.members.get(name)
        if member is None:
            return self._revive(name, now)
        member.heard = now
        effects: list[Effect] = []
        if not self.index.apply(member.number, message):
            effects += self._ask_snapshot(member)
        deltas: dict[Client, list[Delta]] = {}
        others: list[Effect] = []
        runs = self._runs
        for output in message.outputs:
            run = runs.get(output.id)
            if run is not None and run.member is member:
                self._take(run, output, deltas, others)
        member.update(message.load)
        self._recorder.load(name, message.load)
        effects += [Reply(client, Deltas(items)) for client, items in deltas.items()]
        return effects + others

    def tick(self, now: float) -> list[Effect]:
        """Time passes: workers are lost by silence, runs give up waiting for one. Call about once a second."""
        effects: list[Effect] = []
        timeout = self._config.worker_timeout
        if self._last_tick is not None and now - self._last_tick > timeout / 2:
            self.members.excuse(now)
        self._last_tick = now
        for member in self.members.silent(now, timeout):
            effects += self.lose(member.name, now)
        for member in self.members:
            if now - member.asked > SNAPSHOT_SECONDS and self.index.awaits_snapshot(member.number):
                effects += self._ask_snapshot(member)
                member.asked = now
        self.groups.expire(now)
        effects += self.pauses.expire(now)
        for request in {run.request: None for run in self._waiting if now - run.waiting_since > timeout * 2}:
            message = "the worker was lost and no other serves this model"
            effects += self._fail(request, Error(request.id, 503, message, retry_after=timeout))
        if now >= self._next_keepalive:
            self._next_keepalive = now + KEEPALIVE_SECONDS
            effects += [Reply(client, Deltas([])) for client in self._requests]
        return effects

    def stop_workers(self) -> list[Effect]:
        return [Order(member.name, Stop()) for member in self.members]

    # ------------------------------------------------------------ runs

    def _dispatch(self, run: RunState, now: float) -> list[Effect]:
        """Send a run to the best worker, or let it wait for one to join."""
        request = run.request
        ids = run.prompt + run.emitted.tobytes() if run.emitted else run.prompt
        tokens = len(ids) // 4
        fits = {m.number: m for m in self.members if m.info.model == request.model and tokens <= m.token_limit}
        if not fits:
            run.waiting_since = now if run.waiting_since is None else run.waiting_since
            self._waiting[run] = None
            return []
        member, hit, best_hit = self._choose(run, ids, tokens, fits)
        if run.losses == 0:
            run.hit, run.best_hit = hit, best_hit
        self._last_run += 1
        run.id, run.member, run.started, run.waiting_since = self._last_run, member, False, None
        self._runs[run.id] = run
        member.dispatched(run.id, tokens - hit)
        self.index.computing(member.number, request.namespace, run.prompt)
        return [Order(member.name, run.order(ids))]

    def _choose(self, run: RunState, ids: bytes, tokens: int, fits: dict[int, Member]) -> tuple[Member, int, int]:
        """The worker, the hit expected there, and the best hit of any worker, in tokens."""
        limit = tokens - 1 if run.score_from is None else min(tokens, run.score_from) - 1
        held = self.index.match(run.request.namespace, ids)
        hits = {n: min(held.get(n, 0), limit) // m.info.page_size * m.info.page_size for n, m in fits.items()}
        group = run.request.group
        if len(fits) == 1 and group is None:  # there is nothing to choose
            ((number, hit),) = hits.items()
            return fits[number], hit, hit
        candidates = [member.candidate(hits[number]) for number, member in fits.items()]
        if group is not None:
            candidates = [group.seen(candidate) for candidate in candidates]
        best, _ = placement.place(tokens, candidates)
        if group is not None:
            group.placed(best, tokens - best.hit_tokens)
        return fits[best.worker], best.hit_tokens, max(c.hit_tokens for c in candidates)

    def _take(self, run: RunState, output: Output, deltas: dict[Client, list[Delta]], others: list[Effect]) -> None:
        """Apply one output: a Delta for a stream, the whole at the end for the rest."""
        request = run.request
        if not run.started:
            self._leave_computing(run)
            others += request.resumed.unpin() if request.resumed else []
        tokens = output.tokens
        run.emitted.extend(tokens)
        if run.counts_hits:
            run.cached = output.cached_tokens
        if output.scores:
            run.scores += output.scores
        if not request.stream and output.logprobs is not None:
            run.logprobs = (run.logprobs or []) + output.logprobs
        finish = output.finish
        if finish is None:
            if request.stream and tokens:
                ids = _pack_token(tokens[0]) if len(tokens) == 1 else array("i", tokens).tobytes()
                delta = Delta(request.id, run.index, ids, logprobs=output.logprobs)
                deltas.setdefault(request.client, []).append(delta)
        elif finish == "error":
            self._close(run)
            others += self._fail(request, Error(request.id, 500, output.error or "the worker failed on this request"))
        else:
            self._finish(run, output, deltas, others)

    def _finish(self, run: RunState, output: Output, deltas: dict[Client, list[Delta]], others: list[Effect]) -> None:
        request = run.request
        usage = run.usage()
        if request.scores and request.open == 1:
            others.append(Reply(request.client, request.scored()))
        self._close(run)
        self.counters.finished += not request.open
        if request.scores:
            return
        fresh = array("i", output.tokens) if request.stream else run.emitted
        logprobs = output.logprobs if request.stream else run.logprobs
        delta = Delta(request.id, run.index, fresh.tobytes(), "", output.finish, usage, logprobs, output.stop)
        deltas.setdefault(request.client, []).append(delta)

    def _leave_computing(self, run: RunState) -> None:
        run.started = True
        if run.member is not None:
            self.index.computed(run.member.number, run.request.namespace, run.prompt)

    def _close(self, run: RunState) -> None:
        """Forget a run that ends here, however it does; the request with its last one."""
        request = run.request
        if run.started:
            self._recorder.ended(run)
        elif run.member is not None:
            self._leave_computing(run)
        self._runs.pop(run.id, None)
        self._waiting.pop(run, None)
        if run.member is not None:
            run.member.runs.pop(run.id, None)
        run.finished = True
        request.open -= 1
        if request.open == 0:
            requests = self._requests[request.client]
            del requests[request.id]
            if not requests:
                del self._requests[request.client]
            request.runs = []  # they refer to it: its prompt would wait for the garbage collector

    def _abandon(self, requests: list[Request]) -> list[Effect]:
        """Close every open run of `requests` and tell their workers, one Abort each."""
        aborts: dict[str, list[int]] = {}
        unpins: list[Effect] = []
        for request in requests:
            for run in request.runs:
                if not run.finished:
                    if run.member is not None:
                        aborts.setdefault(run.member.name, []).append(run.id)
                    self._close(run)
            unpins += request.resumed.unpin() if request.resumed else []
        return [Order(name, Abort(ids)) for name, ids in aborts.items()] + unpins

    def _fail(self, request: Request, error: Error) -> list[Effect]:
        self.counters.failed += 1
        return [Reply(request.client, error), *self._abandon([request])]

    # ------------------------------------------------------------ lost workers

    def _remove(self, name: str, *, may_return: bool) -> list[RunState]:
        """Take a worker out: the runs it leaves behind, which are then nobody's."""
        member = self.members.remove(name, may_return=may_return)
        if member is None:
            return []
        self.counters.workers_lost += 1
        self.index.drop_worker(member.number)
        orphans = [self._runs.pop(run_id) for run_id in member.runs]
        for run in orphans:
            run.member = None
            run.losses += 1
            run.scores.clear()
            run.counts_hits = run.counts_hits and not run.emitted
        return orphans

    def _redispatch(self, orphans: list[RunState], now: float) -> list[Effect]:
        effects: list[Effect] = []
        for run in orphans:
            if run.finished:
                continue
            if run.losses >= MAX_LOSSES:
                message = f"{MAX_LOSSES} workers were lost while they served this request"
                effects += self._fail(run.request, Error(run.request.id, 500, message))
            else:
                self.counters.redispatched += 1
                effects += self._dispatch(run, now)
        return effects

    def _dispatch_waiting(self, now: float) -> list[Effect]:
        """A worker joined: place what waited. What still fits nowhere keeps its place and its patience."""
        waiting, self._waiting = self._waiting, {}
        effects: list[Effect] = []
        for run in waiting:
            effects += self._dispatch(run, now)
        return effects

    def _revive(self, name: str, now: float) -> list[Effect]:
        """One that was lost by silence speaks again: a new life, after what it still computes is stopped."""
        lost = self.members.lost(name)
        if lost is None:
            return []
        member = self.members.join(lost.info, now)
        self.index.add_worker(member.number, fresh=False)
        effects: list[Effect] = [Order(name, Abort(list(lost.runs)))] if lost.runs else []
        return effects + self._ask_snapshot(member) + self._dispatch_waiting(now)

    def _ask_snapshot(self, member: Member) -> list[Effect]:
        self.counters.snapshots += 1
        member.asked = member.heard
        return [Order(member.name, Snapshot())]
