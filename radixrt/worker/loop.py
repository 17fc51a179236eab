"""The worker's loop: receive, plan, launch, apply, reply.

With a runner that overlaps, a step is planned and launched while the one before runs:

    device   | step n          | step n+1        |
    host       plan n+1, launch | apply n, reply, receive, plan n+2, launch | apply n+1
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from radixrt import messages as m
from radixrt.checkpoint.lora_modules import num_slots
from radixrt.process.watchdog import Watchdog
from radixrt.worker import status
from radixrt.worker.cache.page_cache import PageCache
from radixrt.worker.lora_slots import AdapterSlots
from radixrt.worker.plan import DeviceLost, Plan, Result, Runner
from radixrt.worker.request import from_run
from radixrt.worker.scheduler.scheduler import Limits, Scheduler
from radixrt.worker.speculative.ngram import Drafter
from radixrt.worker.status import Identity, Rates
from radixrt.worker.structured.compile import BadGrammar, Grammars
from radixrt.worker.structured.compile_queue import POLL_SECONDS, Compiling

log = logging.getLogger("radixrt.worker")

HEARTBEAT_SECONDS = 1.0
NO_ROUTER_SECONDS = 2.0
"""A drained worker that has told its router, and has nothing to do, waits for its Stop for this long."""
BUSY_SECONDS = 0.02
"""A gap between two steps that is shorter than this was no wait for work: the loop was busy throughout."""
DISK_SECONDS = 0.01
"""How often the loop looks, while nothing is computed, after what is being written to disk."""
WRITE_OUT_SECONDS = 5.0
"""The longest that the end waits for the disk."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(m.ToWorker).decode
_EVENTS = {"stored": m.Stored, "removed": m.Removed, "cleared": m.Cleared, "saved": m.Saved, "dropped": m.Dropped}


class Link(Protocol):
    """The worker's end of its connection to the router (`radixrt.wire.Link`)."""

    def send(self, payload: bytes) -> None: ...
    def recv(self, timeout: float | None) -> bytes | None: ...
    def broke(self) -> bool: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class InflightStep:
    """A step that was launched and whose result is not applied yet."""

    plan: Plan
    wait: Callable[[], Result]
    launched: float
    """time.perf_counter() at launch, in seconds."""


class Worker:
    """Serves one runner over one link to the router. `connect()` opens a link; the heartbeat thread opens its own.
    Setting `stopped` ends both, even while the router does not read."""

    def __init__(
        self,
        runner: Runner,
        identity: Identity,
        connect: Callable[[], Link],
        *,
        limits: Limits,
        max_model_len: int = 0,
        check: bool = False,
        grammars: Grammars | None = None,
        drafter: Drafter | None = None,
        max_pinned_share: float = 0.25,
        eviction_policy: str = "lru",
        stopped: threading.Event | None = None,
        watchdog_timeout: float = 0.0,
        shutdown_timeout: float = 0.0,
    ) -> None:
        room = (runner.num_pages - 1) * runner.page_size
        self.runner = runner
        self.identity = identity
        longest = min(max_model_len or runner.max_model_len, runner.max_model_len)
        self.max_model_len = min(longest, room)
        if room < longest:
            log.warning(
                "contexts have at most %d tokens, not %d: the KV pool has room for no more (see --max-total-tokens, "
                "--gpu-memory-utilization)", room, longest,
            )  # fmt: skip
        self.cache = PageCache(
            runner.num_pages,
            runner.page_size,
            limits.max_num_seqs,
            self.max_model_len,
            max_pinned_share=max_pinned_share,
            num_states=runner.num_states,
            num_host_pages=runner.num_host_pages,
            num_host_states=runner.num_host_states,
            eviction_policy=eviction_policy,
            disk=runner.disk,
        )
        self.scheduler = Scheduler(self.cache, limits, drafter, runner.shares)
        runner.bind(self.cache.requests.table)
        if check:
            runner.audit(self.scheduler.histories)
        self._registration = status.registration(identity, runner, self.cache, limits, self.max_model_len)
        self._connect = connect
        self._check = check
        self._rates = Rates()
        self._inflight: InflightStep | None = None
        self._last_done = 0.0
        self._seq = 0
        self._number = 0
        """Number of the last StepDone."""
        self._newest_run = 0
        self._stopped = stopped or threading.Event()
        self._last_report = 0.0
        self._refused: list[m.Output] = []
        self._adapters = AdapterSlots(runner, identity.adapters, num_slots(identity.max_loras))
        self._compiling = Compiling(grammars or Grammars("", runner.vocab_size, runner.eos_ids))
        self._resync_wanted = False
        self._joined = False
        """A Register was sent, and no send has timed out since."""
        self.dismissed = ""
        """The reason of the router's Stop; empty if it gave none."""
        self.restart = False
        """Whether the router's Stop said that it is to be started again."""
        self.watchdog = Watchdog(watchdog_timeout)
        self.on_beat: Callable[[], None] | None = None
        """Called about once a second, in the heartbeat thread."""
        self.on_hang: Callable[[], None] | None = None
        """Called in the heartbeat thread when the loop hangs: it is to end the process."""
        self._shutdown_timeout = shutdown_timeout
        self._drain_until: float | None = None
        """While it drains: when it stops in any case, by time.monotonic()."""
        self._drain_told: float | None = None
        """When the router was told; None if it has to be, since this worker has joined."""

    # ------------------------------------------------------------ the loop

    def run(self) -> None:
        """Serve until a Stop arrives or `stop` is called."""
        self._link = self._connect()
        self._send(self._registration)
        if self.runner.disk is not None:
            self._reply([])  # the router is to know what outlived another process before it sends requests
        beat = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        beat.start()
        try:
            while not self._stopped.is_set():
                self._receive()
                outputs = self._load_adapters() + self._step()
                self._keep(outputs)
                self._reply(outputs)
            self._finish_last_step()  # no step may be in flight when the runner is closed
            self._write_out()
        finally:
            self._stopped.set()
            self._link.close()
            beat.join()
            self._adapters.close()
            self.runner.close()

    def stop(self) -> None:
        """Leave the loop after the current step. May be called from another thread."""
        self._stopped.set()

    def drain(self) -> None:
        """Finish all runs, for up to `shutdown_timeout` seconds, then stop; the router sends the others to other
        workers. A second call stops it at once. May be called from another thread."""
        if self._drain_until is not None or self._shutdown_timeout <= 0:
            self.stop()
        else:
            self._drain_until = time.monotonic() + self._shutdown_timeout

    def _look_whether_drained(self, busy: bool, until: float) -> None:
        """The router says when to stop: it knows whether all outputs have arrived, and what else is on its way."""
        now = time.monotonic()
        if self._drain_told is None:
            self._drain_told = now
            self._send(m.Draining(self.identity.name, os.getpid(), status.INCARNATION))
        elif now > until or (not busy and now > self._drain_told + NO_ROUTER_SECONDS):
            self.stop()

    def _step(self) -> list[m.Output]:
        """Launch the next step, if there is one, and apply the result of the step before. If the runner does not
        overlap steps, the result of the launched step is applied as well."""
        outputs = self.scheduler.settle()
        before, self._inflight = self._inflight, None
        plan = self.scheduler.plan()
        if plan is not None:
            outputs += self._launch(plan)
        outputs += self._finish_step(before)
        outputs += self._sample_deferred()
        if not self.runner.overlaps:
            outputs += self._finish_last_step()
        if plan is None:
            self._move()
        if self._check:
            self.cache.check()
        return outputs

    def _move(self) -> None:
        """Copy to host memory what is to be on disk, while no step is in flight."""
        moves = self.cache.tier.drain_idle()
        if moves is None:
            return
        try:
            self.runner.move(moves)
        except Exception as error:
            log.error("copies to host memory failed", exc_info=error)
            if not self.runner.works():
                raise DeviceLost(f"the device is lost: {error}") from error
            self.cache.tier.reset()
        else:
            self.cache.tier.applied()

    def _write_out(self) -> None:
        """Before the end: let that be written to disk which requests have left."""
        tier, until = self.cache.tier, time.monotonic() + WRITE_OUT_SECONDS
        while tier.is_busy and time.monotonic() < until:
            tier.poll()
            self._move()
            time.sleep(POLL_SECONDS)

    def _load_adapters(self) -> list[m.Output]:
        """Put LoRA adapters that have been read into their slots. Before that, the step in flight has to end."""
        outputs = []
        while self._adapters.is_ready(lambda: self.scheduler.adapters | self._compiling.adapters):
            outputs += self._finish_last_step()
            loaded = self._adapters.take()
            self.watchdog.moved()
            self._registration.adapters = self._adapters.loaded
            self._send(loaded)
        return outputs

    def _launch(self, plan: Plan) -> list[m.Output]:
        started = time.perf_counter()
        self.watchdog.launched(len(plan.tokens))
        try:
            self._inflight = InflightStep(plan, self.runner.launch(plan), started)
        except Exception as error:
            return self._fail(plan, error)
        return []

    def _sample_deferred(self) -> list[m.Output]:
        """Let the runner sample those tokens of the step in flight that had to wait for the step before."""
        inflight = self._inflight
        if inflight is None or not inflight.plan.needs_host_tokens:
            return []
        try:
            self.runner.sample_deferred(self.scheduler.sample_inputs(inflight.plan, self.runner.mask_room))
        except Exception as error:
            self._inflight = None
            return self._fail(inflight.plan, error)
        return []

    def _finish_last_step(self) -> list[m.Output]:
        """Apply the result of the step in flight, if there is one."""
        inflight, self._inflight = self._inflight, None
        return self._finish_step(inflight)

    def _finish_step(self, inflight: InflightStep | None) -> list[m.Output]:
        """Wait for a step and apply its result. A later step may be in flight behind it."""
        if inflight is None:
            return []
        try:
            result = inflight.wait()
        except Exception as error:
            return self._fail(inflight.plan, error)
        done = time.perf_counter()
        seconds = done - max(inflight.launched, self._last_done)
        self.watchdog.finished(len(inflight.plan.tokens), seconds)
        if inflight.plan.requests:
            self._rates.add(inflight.plan, seconds)
            self.cache.tier.prefill_cost = self._rates.prefill_cost
            self._time_decodes(inflight, done, result)
        self._last_done = done
        return self.scheduler.apply(inflight.plan, result)

    def _fail(self, plan: Plan, error: Exception) -> list[m.Output]:
        """Fail the requests of a step that could not be run, after those of the step in flight behind it: that one may
        read KV that the failed step was to compute. Raises DeviceLost if no step can be run any more: otherwise this
        worker would look idle, and be sent more requests than the others."""
        log.error("step %d failed", plan.step, exc_info=error)
        self.watchdog.moved()
        if not self.runner.works():
            raise DeviceLost(f"the device is lost: {error}") from error
        reason, outputs = f"the step failed: {error}", []
        behind, self._inflight = self._inflight, None
        if behind is not None:
            with contextlib.suppress(Exception):
                behind.wait()
            outputs += self.scheduler.fail(behind.plan, reason)
        return outputs + self.scheduler.fail(plan, reason)

    def _time_decodes(self, inflight: InflightStep, done: float, result: Result) -> None:
        """Tell the drafter how long a step of decodes took, without its proposals. The time before its launch counts if
        the loop was busy."""
        drafter, plan = self.scheduler.drafter, inflight.plan
        if drafter is not None and len(plan.tokens) == len(plan.requests):
            gap = inflight.launched - self._last_done
            seconds = done - (self._last_done if gap < BUSY_SECONDS else inflight.launched)
            passes = 0 if plan.proposes is None else int(plan.proposes.max())
            drafter.costs.add(len(plan.tokens), max(seconds - passes * result.proposing_seconds, 0.0))

    def _keep(self, outputs: list[m.Output]) -> None:
        """Do with the contexts of requests that have just ended what these asked for, before their pages can be
        evicted, and drop expired pins."""
        pins, hints, now = self.cache.pins, self.cache.hints, time.monotonic()
        hints.take(outputs, now)
        hints.go_on_prefetching()
        if hints.leaving and any(output.finish is not None for output in outputs):
            hints.go_on_deleting(self._has_requests)
        if pins.idle:
            return
        for output in outputs:
            if output.finish == "error":
                pins.drop(output.id)
            elif output.finish is not None:
                pins.settle(output.id, now)
        pins.expire(now)

    # ------------------------------------------------------------ receive

    def _receive(self) -> None:
        """Handle all messages that have arrived; wait for one only when there is nothing to compute or to send."""
        if self._link.broke():
            self._join_again("the connection to the router has broken")
        busy = self.scheduler.has_work and not self.scheduler.all_sit_out or self._inflight
        if not busy:
            self.watchdog.moved()
        if self._drain_until is not None:
            left = bool(self.scheduler.has_work or self._refused or self._compiling)
            self._look_whether_drained(left, self._drain_until)
        idle = not busy and not self._refused and not self._resync_wanted
        soon = self._compiling or self._adapters or self.scheduler.has_work
        timeout = POLL_SECONDS if soon else DISK_SECONDS if self.cache.tier.is_busy else HEARTBEAT_SECONDS / 4
        payload = self._link.recv(timeout if idle else 0)
        while payload is not None:
            self._handle(payload)
            payload = self._link.recv(0)
        if self._compiling:
            self._add_compiled()

    def _handle(self, payload: bytes) -> None:
        try:
            message = _decode(payload)
        except msgspec.MsgspecError as error:
            log.warning("dropped a malformed message of %d bytes: %s", len(payload), error)
            return
        match message:
            case m.Run():
                self._add(message)
            case m.Abort():
                for id in message.ids:
                    if not self._compiling.drop(id):
                        self.scheduler.abort(id)
                    self.cache.pins.settle(id, time.monotonic())
                    self.cache.hints.settle(id, time.monotonic())
                self.cache.hints.go_on_deleting(self._has_requests)
            case m.CacheHint():
                self._take_hint(message)
            case m.Pin():
                self.cache.pins.add(message.namespace, message.ids, message.seconds, time.monotonic(), message.name)
            case m.Unpin():
                self.cache.pins.release(message.name)
            case m.WaitsFor(id=id, name=name):
                if self.cache.order is not None:
                    self.cache.order.waits_for(id, name)
            case m.Clear():
                self.cache.clear()
            case m.LoadAdapter(adapter=adapter):
                self._adapters.load(adapter)
            case m.UnloadAdapter(name=name, version=version):
                self._adapters.unload(name, version)
                self._registration.adapters = self._adapters.loaded
            case m.Resync():
                self._resync_wanted = True
            case m.Unknown():
                self._join_again("the router does not know this worker")
            case m.Stop(reason=reason, restart=restart):
                self.dismissed, self.restart = reason, restart
                self.stop()

    def _take_hint(self, hint: m.CacheHint) -> None:
        hints, tenant = self.cache.hints, m.tenant_of(hint.namespace)
        if hint.action.verb == "delete":
            outcome = hints.delete(tenant, self._has_requests(tenant))
        else:
            outcome = hints.act(hint.namespace, hint.ids, hint.action, time.monotonic())
        size = outcome.tokens * self.runner.page_bytes // self.runner.page_size
        self._send(m.CacheHinted(hint.id, outcome.result, outcome.tokens, size, outcome.reason))

    def _has_requests(self, tenant: str) -> bool:
        return self.scheduler.has_requests(tenant)

    def _join_again(self, why: str) -> None:
        """Register again: the router does not know all requests here, or nothing of them, and dispatches them anew. All
        are dropped here; what is cached stays, and the router asks for a resync of it."""
        log.warning("%s: this worker joins again", why)
        self._joined = False
        self._newest_run = 0
        for id in [*self.scheduler.ids, *self._compiling]:
            self.scheduler.abort(id)
            self.cache.pins.drop(id)
            self.cache.hints.drop(id)
        self._compiling.clear()
        self._refused.clear()
        self._send(self._registration)

    def _send(self, message: m.ToRouter) -> None:
        """Send a message. After a send has timed out, only a Register is sent until one goes through: the router may
        have missed messages, and has to start over with this worker."""
        if not self._joined:
            message = self._registration
        if message is self._registration:
            self._number = 0
        elif isinstance(message, m.StepDone):
            message.number = self._number = self._number + 1
        try:
            self._link.send(_encode(message))
            self._joined = True
            if message is self._registration:
                self._drain_told = None
        except TimeoutError:
            if self._joined and not self._stopped.is_set():
                self._join_again("the router does not read")

    def _add(self, run: m.Run) -> None:
        self._newest_run = run.id
        try:
            if run.id in self._compiling:
                raise ValueError(f"id: request {run.id} exists")
            runner, adapters = self.runner, self._adapters.numbers
            request = from_run(run, self.max_model_len, runner.vocab_size, runner.eos_ids, adapters)
            self.cache.pins.want(run)
            self.cache.hints.want(run)
            if run.sampling.grammar is None:
                self.scheduler.add(request)
            else:
                self._compiling.add(request, time.monotonic())
        except ValueError as error:
            self._refuse(run.id, error)

    def _add_compiled(self) -> None:
        """Schedule the requests whose grammar is ready, and refuse those whose grammar could not be compiled."""
        for request, problem in self._compiling.take(time.monotonic()):
            try:
                if problem:
                    raise problem
                self.scheduler.add(request)
            except ValueError as error:
                self._refuse(request.id, error)

    def _refuse(self, id: int, error: ValueError) -> None:
        self.cache.pins.drop(id)
        self.cache.hints.drop(id)
        field = "grammar" if isinstance(error, BadGrammar) else getattr(error, "field", "")
        self._refused.append(m.Output(id, finish="error", error=str(error), field=field))

    # ------------------------------------------------------------ reply

    def _reply(self, outputs: list[m.Output]) -> None:
        """Send one StepDone if there are outputs, cache events or refusals, and otherwise once a second."""
        if self._refused:
            outputs = self._refused + outputs
            self._refused = []
        events = [_EVENTS[kind](*rest) for kind, *rest in self.cache.prefixes.drain_events()]
        now = time.monotonic()
        if not outputs and not events and not self._resync_wanted and now - self._last_report < HEARTBEAT_SECONDS:
            return
        self._last_report = now
        done = m.StepDone(outputs, self._load(), self._seq, events, began=self.scheduler.take_began())
        self._seq += len(events)
        self._send(done)
        if self._resync_wanted:
            self._send_resync()

    def _send_resync(self) -> None:
        self._resync_wanted = False
        events = [_EVENTS[kind](*rest) for kind, *rest in self.cache.prefixes.resync_events()]
        self._send(m.StepDone([], self._load(), self._seq, events, resync=True))

    def _load(self) -> m.Load:
        return status.load(
            self.scheduler,
            self.cache,
            self.runner,
            self._rates,
            compiling=self._compiling.queued_tokens,
            inflight=self._inflight.plan if self._inflight else None,
            newest_run=self._newest_run,
        )

    def _beat(self) -> None:
        """Send heartbeats, also during a long step. Runs in a thread."""
        link = self._connect()
        try:
            while not self._stopped.wait(HEARTBEAT_SECONDS):
                link.broke()  # reads the monitor's events, which ZMQ would keep; heartbeats may be lost
                stalled = self._watch()
                beat = m.Heartbeat(self.identity.name, os.getpid(), status.INCARNATION, stalled, self.watchdog.stuck)
                with contextlib.suppress(TimeoutError):  # the router does not read, but may again
                    link.send(_encode(beat))
        finally:
            link.close()

    def _watch(self) -> float:
        """Look whether the loop makes progress. Returns the seconds since it last did."""
        watchdog = self.watchdog
        stalled = watchdog.look(time.monotonic())
        if watchdog.hangs and self.on_hang is not None:
            log.error("no step has ended for %.0f s, which is too long: this worker ends", stalled)
            self.on_hang()
        if self.on_beat is not None:
            self.on_beat()
        return stalled
