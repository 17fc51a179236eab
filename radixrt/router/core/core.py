"""The router's decisions: a state machine without sockets, threads or clocks.

Each method takes an event and the time (seconds, monotonic), and returns the messages to send. Prompts are token ids
here; text is encoded before and decoded after (`handlers`, `streams`). Requests are kept here; `workers` knows the
workers, and `dispatch` chooses one of them for each run.

    submit -> dispatched at once to the best worker -> its outputs become Deltas, one message per step and client
    worker fails a run -> it goes to another worker, until all have failed it (`failures`); then it ends with 500
    worker makes no progress -> its runs go to others, if any serve (`suspects`); it serves again when a step ends
    worker lost -> its runs go to other workers, with the tokens emitted so far; streams continue
    a worker's message lost with a connection -> likewise, to any worker, this one included
    no worker left -> runs wait `worker_timeout * 2` for one to join, then fail with 503
"""

from __future__ import annotations

import logging
import random
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from struct import Struct
from typing import TYPE_CHECKING

from radixrt.config import RouterConfig
from radixrt.messages import (
    Abort,
    AdapterLoaded,
    CacheHinted,
    ChangeAdapter,
    Clear,
    Delta,
    Deltas,
    Error,
    Generate,
    Namespace,
    Output,
    Register,
    Score,
    StepDone,
    Stop,
    Usage,
)
from radixrt.requests.validate import Refused, refusal
from radixrt.router.core.admission import Admission
from radixrt.router.core.cache_hints import CacheHints
from radixrt.router.core.dispatch import Dispatcher
from radixrt.router.core.draining import Drains
from radixrt.router.core.effects import Client, Effect, Order, Reply
from radixrt.router.core.ended_runs import EndedRuns
from radixrt.router.core.lora_updates import AdapterChanges
from radixrt.router.core.metrics import Counters, Recorder
from radixrt.router.core.recovery import FAILED, Recovery
from radixrt.router.core.request import OnEnded, Request, RunState
from radixrt.router.core.tool_waits import Pauses
from radixrt.router.core.worker import Worker
from radixrt.router.core.workers import Workers
from radixrt.router.placement.fork_groups import Groups
from radixrt.router.placement.index import Index
from radixrt.router.programs.state_store import Key
from radixrt.tokens.errors import FieldError, Room

if TYPE_CHECKING:
    from radixrt.report import Report

log = logging.getLogger("radixrt.router")

WILDCARDS = frozenset("*?")
"""Characters of aliases that stand for many names."""
KEEPALIVE_SECONDS = 5.0
"""Clients with requests in flight get a message at least this often, so that a disconnected one is noticed."""

Collected = defaultdict[Client, list[Delta]]
"""The Deltas of one worker's message, by client."""
_pack_token = Struct("<i").pack


class RouterCore:
    """See the module. `vocab_size` is the tokenizer's, for workers that do not report theirs (0: unknown). `on_ended`
    is called at the end of each request."""

    def __init__(
        self,
        config: RouterConfig,
        report: Report | None = None,
        *,
        vocab_size: int = 0,
        rng: random.Random | None = None,
        on_ended: OnEnded | None = None,
    ) -> None:
        self._config = config
        self._on_ended = on_ended
        self.counters = Counters()
        self._recorder = Recorder(report, self.counters)
        self.index = Index()
        self.workers = Workers(self.index, self.counters, config.worker_timeout)
        self.adapters = AdapterChanges(self.workers, config.served_model_name)
        self.groups = Groups()
        self.pauses = Pauses(report)
        self.ended = EndedRuns()
        self.hints = CacheHints(self.workers, self.index, report)
        self._admission = Admission(config, self.workers, vocab_size, rng or random.Random())
        self._dispatcher = Dispatcher(self.workers, self.index)
        self._requests: dict[Client, dict[int, Request]] = {}
        self._tenants: Counter[str] = Counter()
        """Unfinished runs by tenant."""
        self._next_keepalive = 0.0
        self._recovery = Recovery(self._dispatcher, self.counters, self._end)
        self.drains = Drains(self.workers, self._admission, config.shutdown_timeout)

    @property
    def aliases(self) -> tuple[str, ...]:
        """Further names of the model that can be listed: those without wildcards."""
        return tuple(name for name in self._config.model_aliases if not WILDCARDS & set(name))

    @property
    def keys(self) -> list[str]:
        """The keys of tenants, and the admin's; empty if a client needs none."""
        return self._admission.keys

    @property
    def runs_in_flight(self) -> int:
        """Runs that are dispatched or wait for a worker."""
        return len(self._dispatcher) + len(self._recovery)

    def runs(self) -> Iterator[RunState]:
        """The runs in flight, those that wait for a worker last."""
        return self._dispatcher.runs()

    def runs_of(self, tenant: str) -> int:
        """Those of one tenant."""
        return self._tenants[tenant]

    # ------------------------------------------------------------ clients

    def is_admin(self, api_key: str) -> bool:
        """Whether this is the admin's key."""
        return self._admission.is_admin(api_key)

    def tenant(self, api_key: str) -> str:
        """The tenant of a key. Raises Refused (401) if keys are configured and this is not one of them."""
        return self._admission.tenant(api_key)

    def model(self, name: str) -> str:
        """The model, or LoRA adapter, that a request for `name` gets. Raises Refused (404, 503) if there is none."""
        return self._admission.model(name)

    def room(self, message: Generate | Score) -> Room | None:
        """What the prompt of a request has to fit into; None if that is not known, or the request will be refused."""
        return self._admission.room(message)

    def change_adapter(self, client: Client, message: ChangeAdapter, at: int) -> list[Effect]:
        """Load, replace or unload a LoRA adapter; `at` is the time in milliseconds since 1970. Raises Refused if the
        key does not allow that."""
        self._admission.check_admin(message.api_key, message.admin_only)
        return self.adapters.add(client, message, at)

    def has_place(self, tenant: str, beside: int, own: int) -> bool:
        """Whether the queue has a place for one more request of a tenant, `beside` requests that are not runs yet,
        `own` of which are the tenant's."""
        return self._admission.has_places(self.runs_in_flight + beside + 1, self._tenants[tenant] + own + 1)

    def submit(
        self,
        client: Client,
        message: Generate | Score,
        now: float,
        state: Key | None = None,
        *,
        resumes: bool = False,
    ) -> list[Effect]:
        """Take a request with a TokenPrompt: returns orders for workers, or one Error that says why it is refused.
        `state` is the program state that its prompt continues; with `resumes` that ends a pause of the state."""
        try:
            if self.serves(client, message.id):
                raise Refused("id", f"request id {message.id} is in flight already")
            request = self._admission.admit(client, message, len(self._dispatcher), self._tenants)
        except FieldError as problem:
            self.counters.refused += 1
            unpins = self.resume(state, now) if resumes and state else []  # the pause ends even so
            return [Reply(client, refusal(message.id, problem)), *unpins]
        self.counters.requests += 1
        if isinstance(message, Generate):
            self._recorder.session(request.namespace.tenant, message.session)
        self._requests.setdefault(client, {})[message.id] = request
        request.number = self.counters.requests
        self._tenants[request.namespace.tenant] += request.open
        request.group = self.groups.join(state, request.open, now)
        request.resumed = self.pauses.end(state, now) if resumes and state else None
        effects: list[Effect] = []
        for run in request.runs:
            run.arrived_at = now
            self._recorder.arrived(run)
            effects += self._dispatcher.send(run, now)
        return effects

    def pause(self, state: Key, namespace: Namespace, ids: bytes, seconds: float | None, now: float) -> list[Effect]:
        """The program of a state waits for something, such as a tool: the worker that holds most of its `ids` pins them
        for up to `seconds` (None: the configured maximum)."""
        held = self.index.match(namespace.key, ids)
        worker = max((m for m in self.workers if held.get(m.number)), key=lambda m: held[m.number], default=None)
        most = self._config.pause_seconds
        seconds = most if seconds is None else min(seconds, most)
        name = worker.name if worker and seconds > 0 else ""
        return self.pauses.begin(state, namespace.key, ids, seconds, name, now)

    def resume(self, state: Key, now: float) -> list[Effect]:
        """End a pause of a state without a request."""
        paused = self.pauses.end(state, now)
        return paused.unpin() if paused else []

    def cancel(self, client: Client, request_id: int) -> list[Effect]:
        """Abort a request with all its choices. Only workers are told, not the client."""
        request = self._requests.get(client, {}).get(request_id)
        if request is None:
            return []
        self.counters.cancelled += 1
        return self._abandon([request])

    def drop_client(self, client: Client) -> list[Effect]:
        """A client has disconnected: cancel all its requests."""
        requests = list(self._requests.get(client, {}).values())
        self.hints.drop_client(client)
        self.counters.cancelled += len(requests)
        return self._abandon(requests)

    def in_flight(self, client: Client) -> list[int]:
        """Ids of a client's unfinished requests."""
        return list(self._requests.get(client, ()))

    def serves(self, client: Client, request_id: int) -> bool:
        return request_id in self._requests.get(client, ())

    def namespace(self, client: Client, request_id: int) -> Namespace | None:
        """The namespace of a request; None if it is not in flight."""
        request = self._requests.get(client, {}).get(request_id)
        return request.namespace if request else None

    def number(self, client: Client, request_id: int) -> int | None:
        """The router's own number of a request (`Request.number`); None if it is not in flight."""
        request = self._requests.get(client, {}).get(request_id)
        return request.number if request else None

    def stop_choice(
        self, client: Client, request_id: int, index: int, past: int = 0
    ) -> tuple[Usage | None, list[Effect]]:
        """End a choice in which a stop string was found; its last `past` tokens come after that, and are dropped.
        Returns its usage (None if it has ended already, or is a Score's) and an Abort for its worker."""
        run = self._open_run(client, request_id, index)
        if run is None:
            return None, []
        if past > 0:
            run.cut(past)
        self._recorder.finished(run)
        self._close(run, "stop", well=True)
        self.counters.finished += not run.request.open
        return run.usage(), [Order(run.worker_name, Abort([run.id]))] if run.worker else []

    def end_choice(self, client: Client, request_id: int, index: int, tokens: int | None = None) -> list[Effect]:
        """As `stop_choice`, for a client that looks for stop strings itself. `tokens`, if given and not negative, is
        the number of tokens up to the stop string. The client gets the choice's last Delta."""
        run = self._open_run(client, request_id, index)
        if run is None:
            return []
        past = 0 if tokens is None or tokens < 0 else len(run.emitted) - tokens
        usage, effects = self.stop_choice(client, request_id, index, past)
        delta = Delta(request_id, index, finish="stop", usage=usage)
        if not run.request.stream:  # nothing of it has left yet
            delta.ids, delta.prompt_logprobs = run.emitted.tobytes(), run.prompt_logprobs
            delta.logprobs = run.logprobs and run.logprobs[: len(run.emitted)]
        return [*effects, Reply(client, Deltas([delta]))]

    def _open_run(self, client: Client, request_id: int, index: int) -> RunState | None:
        """The run of a choice; None if it has ended, or is a Score's."""
        request = self._requests.get(client, {}).get(request_id)
        run = request.runs[index] if request and 0 <= index < len(request.runs) else None
        return None if run is None or run.finished or run.request.scores else run

    # ------------------------------------------------------------ workers

    def register(self, info: Register, now: float) -> list[Effect]:
        """A worker joins, or joins again (see `Workers.register`)."""
        orphans, orders = self.workers.register(info, now)
        orders += self._joined(info.name, now)
        return orders + self._recovery.lost(orphans, now) + self._dispatcher.send_waiting(now)

    def heartbeat(self, name: str, now: float, stalled: float = 0.0, stuck: bool = False) -> list[Effect]:
        """`stalled` and `stuck` as in a Heartbeat. A worker that is stuck is lost, as long as another one serves its
        model: a step that takes long even so only costs the requests their cache."""
        worker = self.workers.hear(name, now, stalled, stuck)
        if worker is None:
            return [] if stuck else self._revive(name, now)
        if not stuck or not self.workers.has_other(worker):
            return []
        log.warning("worker %s makes no progress: no step has ended for %.0f s", name, stalled)
        self._recorder.failed("", name, f"makes no progress: no step has ended for {stalled:.0f} s")
        self.counters.workers_stuck += 1
        return self._recovery.lost(self.workers.remove(name, may_return=True), now, hung=True)

    def leave(self, name: str, now: float, *, planned: bool = False) -> list[Effect]:
        """A worker has left for good: its runs continue on other workers. `planned`: it was told to leave."""
        if not planned:
            self._recorder.failed("", name, "has left")
        orphans = self.workers.remove(name, may_return=False, planned=planned)
        return self._recovery.lost(orphans, now) + self.drains.tick(now)

    def lose(self, names: Iterable[str], now: float) -> list[Effect]:
        """Workers cannot be reached: as `leave`, but a heartbeat brings each back. All are removed before their runs
        are dispatched again, so that no run goes from one of them to another."""
        orphans = [run for name in names for run in self.workers.remove(name, may_return=True)]
        return self._recovery.lost(orphans, now)

    def step(self, name: str, message: StepDone, now: float) -> list[Effect]:
        """Apply a worker's cache events to the index, and return its outputs as one Deltas for each client."""
        worker = self.workers.hear(name, now)
        if worker is None:
            return self._revive(name, now)
        if not worker.follows(message.number):
            return self._restart(worker, now)
        effects = self.workers.mirror(worker, message, now)
        if self.index.removed:
            self._note_evictions(worker, now)
        deltas: Collected = defaultdict(list)
        others: list[Effect] = []
        runs, failed = self._dispatcher.in_flight, []
        for id, seconds in message.began:
            if (run := runs.get(id)) is not None and run.worker is worker:
                run.queued = seconds
        for output in message.outputs:
            run = runs.get(output.id)
            if run is None or run.worker is not worker:
                continue
            request, tokens = run.request, output.tokens
            if request.stream and run.started and output.finish is None and len(tokens) == 1:  # the usual case
                run.emitted.append(tokens[0])
                run.last_at = now
                delta = Delta(request.id, run.index, _pack_token(tokens[0]), logprobs=output.logprobs)
                deltas[request.client].append(delta)
            elif output.finish == "error" and not output.field:
                failed.append((run, output))
                self._recorder.failed(request.namespace.tenant, name, output.error or FAILED)
            else:
                self._take(run, output, deltas, others, now)
        if failed:
            others += self._recovery.failed(worker, failed, now)
        worker.update(message.load, now)
        self._recorder.load(name, message.load)
        effects += [Reply(client, Deltas(items)) for client, items in deltas.items()]
        return effects + others + self._recovery.tick(now)

    def _note_evictions(self, worker: Worker, now: float) -> None:
        """The worker's message has removed parts of its cache: perhaps for the run that it was sent last."""
        newest = self._dispatcher.in_flight.get(next(reversed(worker.runs), -1))
        self._recorder.evicted(worker.name, self.index.removed, newest, now)

    def adapter_loaded(self, name: str, message: AdapterLoaded, now: float) -> list[Effect]:
        """A worker has loaded a LoRA adapter, for which requests may wait, or could not."""
        effects = [] if self.workers.hear(name, now) else self._revive(name, now)
        worker = self.workers.hear(name, now)
        if worker is None:
            return effects
        return effects + self.adapters.answered(worker, message) + self._dispatcher.send_waiting(now)

    def hinted(self, name: str, message: CacheHinted, now: float) -> list[Effect]:
        """A worker has answered a hint."""
        effects = [] if self.workers.hear(name, now) else self._revive(name, now)
        return effects + self.hints.answered(name, message)

    def tick(self, now: float) -> list[Effect]:
        """Handle timeouts: of workers that were not heard, of runs that wait for a worker, of groups and pauses. To be
        called about once a second."""
        self._recorder.tick()
        silent = self.workers.silent(now)
        for name in silent:
            log.warning("worker %s is lost: not heard for %g s", name, self._config.worker_timeout)
            self._recorder.failed("", name, f"is lost: not heard for {self._config.worker_timeout:g} s")
        effects = self.lose(silent, now)
        effects += self.workers.ask_again(now)
        self.groups.expire(now)
        effects += self.pauses.expire(now) + self.hints.tick(now)
        effects += self.adapters.tick(now) + self.drains.tick(now)
        effects += self._recovery.tick(now)
        timeout = self._config.worker_timeout
        for request in self._dispatcher.superseded():
            name = request.namespace.model
            message = f"the LoRA adapter {name!r} was replaced or unloaded, and the worker with it was lost"
            effects += self._fail(request, Error(request.id, 503, message, retry_after=1.0))
        for request in self._dispatcher.waiting_longer_than(now, timeout * 2):
            message = "the worker was lost and no other serves this model"
            effects += self._fail(request, Error(request.id, 503, message, retry_after=timeout))
        if now >= self._next_keepalive:
            self._next_keepalive = now + KEEPALIVE_SECONDS
            effects += [Reply(client, Deltas([])) for client in self._requests]
        return effects

    def clear_caches(self) -> list[Effect]:
        return [Order(worker.name, Clear()) for worker in self.workers]

    def stop_workers(self) -> list[Effect]:
        return [Order(worker.name, Stop()) for worker in self.workers]

    # ------------------------------------------------------------ runs

    def _take(self, run: RunState, output: Output, deltas: Collected, others: list[Effect], now: float) -> None:
        """Apply one output. A stream gets a Delta for each, other requests one with everything at the end."""
        request = run.request
        if not run.started and output.finish != "error":
            self._dispatcher.start(run, now)
            others += request.resumed.unpin() if request.resumed else []
        tokens = output.tokens
        if tokens:
            self._count_time(run, now)
        run.emitted.extend(tokens)
        if run.counts_hits:
            cached, most = output.cached_tokens, run.most_cached
            run.cached = cached if most is None else min(cached, most)
        if output.scores:
            run.scores += output.scores
        if output.prompt_logprobs:
            run.prompt_logprobs = output.prompt_logprobs
        if not request.stream and output.logprobs is not None:
            run.logprobs = run.logprobs or []
            run.logprobs += output.logprobs
        finish = output.finish
        if finish == "length" and (moved := self._dispatcher.move(run, now)) is not None:
            finish = None
            others += moved
        if finish is None:
            if request.stream and tokens:
                delta = Delta(request.id, run.index, array("i", tokens).tobytes(), logprobs=output.logprobs)
                if run.prompt_logprobs:
                    delta.prompt_logprobs, run.prompt_logprobs = run.prompt_logprobs, None
                deltas[request.client].append(delta)
        elif finish == "error":
            self._close(run, "error")
            others += self._fail(request, Error(request.id, 400, output.error or FAILED, output.field))
        else:
            self._finish(run, output, deltas, others)

    def _count_time(self, run: RunState, now: float) -> None:
        """Tokens of a run have arrived, which are not among `emitted` yet."""
        run.last_at = now
        if not run.emitted:
            run.first_at = now
            self._recorder.first_token(run)

    def _finish(self, run: RunState, output: Output, deltas: Collected, others: list[Effect]) -> None:
        request = run.request
        usage = run.usage()
        if request.scores and request.open == 1:
            others.append(Reply(request.client, request.scored()))
        self._recorder.finished(run)
        self._close(run, output.finish or "stop", well=True)
        self.counters.finished += not request.open
        if request.scores:
            return
        fresh = array("i", output.tokens) if request.stream else run.emitted
        logprobs = output.logprobs if request.stream else run.logprobs
        delta = Delta(
            request.id, run.index, fresh.tobytes(), "", output.finish, usage, logprobs, output.stop, run.prompt_logprobs
        )
        deltas[request.client].append(delta)

    def _close(self, run: RunState, end: str, *, well: bool = False) -> None:
        """Forget a run that has ended, `well` if by itself, and its request with the last one."""
        request = run.request
        self._recorder.ended(run, end)
        if well:
            self.ended.add(run)
        self._dispatcher.drop(run, well=well)
        self._recovery.drop(run)
        run.finished = True
        request.open -= 1
        self._tenants[request.namespace.tenant] -= 1
        if request.open == 0:
            requests = self._requests[request.client]
            del requests[request.id]
            if not requests:
                del self._requests[request.client]
            if self._on_ended is not None:
                self._on_ended(request, well)
            request.runs = []  # breaks the reference cycle, so that the prompt is freed at once

    def _abandon(self, requests: list[Request], end: str = "cancelled") -> list[Effect]:
        """Close all open runs of `requests`; one Abort for each worker."""
        aborts: dict[str, list[int]] = {}
        unpins: list[Effect] = []
        for request in requests:
            for run in request.runs:
                if not run.finished:
                    if run.worker is not None:
                        aborts.setdefault(run.worker.name, []).append(run.id)
                    self._close(run, end)
            unpins += request.resumed.unpin() if request.resumed else []
        return [Order(name, Abort(ids)) for name, ids in aborts.items()] + unpins

    def _end(self, run: RunState, reason: str) -> list[Effect]:
        """End a run that cannot go on, with its request."""
        self._close(run, "error")
        return self._fail(run.request, Error(run.request.id, 500, reason))

    def _fail(self, request: Request, error: Error) -> list[Effect]:
        self.counters.failed += 1
        self._recorder.failed(request.namespace.tenant, "", error.message)
        return [Reply(request.client, error), *self._abandon([request], "error")]

    # ------------------------------------------------------------ lost workers

    def _restart(self, worker: Worker, now: float) -> list[Effect]:
        """A message of a worker was lost with a connection: its runs are dispatched again, from the tokens that have
        arrived, as if it had joined again."""
        log.warning("worker %s: one of its messages was lost, its requests are sent again", worker.name)
        effects = self.register(worker.info, now)
        if (again := self.workers.hear(worker.name, now)) is not None:
            again.next_step = worker.next_step
        return effects

    def _joined(self, name: str, now: float) -> list[Effect]:
        """What a worker that serves from now on is to do beside requests."""
        worker = self.workers.hear(name, now)
        return self.adapters.joined(worker) + self.hints.joined(worker) if worker else []

    def _revive(self, name: str, now: float) -> list[Effect]:
        """A worker that does not serve was heard: if it was lost, it serves again."""
        orders = self.workers.revive(name, now)
        if orders:
            log.info("worker %s is heard again, and serves", name)
            orders += self._joined(name, now)
        return orders + self._dispatcher.send_waiting(now) if orders else []
