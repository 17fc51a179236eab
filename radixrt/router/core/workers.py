"""Worker membership: how workers join, are lost, come back and leave.

    register -> serving -> not heard for `timeout` seconds, or unreachable: lost -> heard again: serving again
                        -> leave: forgotten                                      -> FORGET_SECONDS: forgotten

Each time a worker joins or comes back it gets a new Worker, with a number of its own in the index and the runs that
were sent to it. `dispatch` decides where the runs of a lost one continue.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from radixrt.messages import Abort, Adapter, Register, Resync, StepDone
from radixrt.router.core.effects import Effect, Order
from radixrt.router.core.metrics import Counters
from radixrt.router.core.worker import Worker, process
from radixrt.router.placement.index import Index

FORGET_SECONDS = 600.0
"""For how long a lost worker may come back."""
RESYNC_SECONDS = 10.0
"""After this time a resync that has not arrived is requested again: it may have been lost with a connection."""


class Serving(NamedTuple):
    """The workers that serve a model."""

    workers: list[Worker]
    open: list[Worker]
    """Those of them that get new runs: they do not drain."""
    vocab_size: int
    """The largest vocabulary of any of them; 0 if none reports it."""
    token_limit: int
    """The most tokens of a sequence, on the worker with most room."""


class Workers:
    """The serving workers, and the lost ones that may come back, by name."""

    def __init__(self, index: Index, counters: Counters, timeout: float) -> None:
        self._index = index
        self._counters = counters
        self._timeout = timeout
        self._serving: dict[str, Worker] = {}
        self._lost: dict[str, Worker] = {}
        self._by_model: dict[tuple[str, int], Serving] = {}
        """A cache by model and version, cleared when what workers serve changes."""
        self.wanted: dict[str, Adapter] = {}
        """The LoRA adapters that were loaded, or unloaded (path ""), while workers serve. Changed by `want`."""
        self.on_want: Callable[[Adapter], None] = lambda adapter: None
        """Called by `want`."""
        self._closed: set[str] = set()
        """Names of the workers that get no new runs."""
        self._numbers = itertools.count()
        self._last_look: float | None = None

    def __len__(self) -> int:
        return len(self._serving)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._serving.values())

    def known(self, name: str) -> bool:
        """Whether a worker serves, or may come back."""
        return name in self._serving or name in self._lost

    def worker(self, name: str) -> Worker | None:
        """The worker of that name, if it serves."""
        return self._serving.get(name)

    def lost(self) -> Iterator[Worker]:
        """The workers that may come back."""
        return iter(self._lost.values())

    def close(self, name: str) -> None:
        """A worker gets no new runs any more."""
        self._closed.add(name)
        self._by_model.clear()

    def is_closed(self, name: str) -> bool:
        return name in self._closed

    def has_other(self, worker: Worker) -> bool:
        """Whether another worker serves its model, gets new runs, and makes progress."""
        others = (m for m in self if m is not worker and m.name not in self._closed and not m.stuck)
        return any(m.info.model == worker.info.model for m in others)

    def models(self) -> set[str]:
        """Names of the models of all serving workers, and of lost ones that may come back, without adapters."""
        return {m.info.model for m in self._known()}

    def adapters(self) -> set[str]:
        """Names of the LoRA adapters of these workers, and of those that they are to load."""
        wanted = {adapter.name for adapter in self.wanted.values() if adapter.path}
        return wanted | {name for m in self._known() for name, version in m.adapters if version == self.version(name)}

    def is_unloaded(self, model: str) -> bool:
        """Whether this was a LoRA adapter that a client has unloaded."""
        adapter = self.wanted.get(model)
        return adapter is not None and not adapter.path and model not in self.models()

    def version(self, model: str) -> int:
        """The version of a LoRA adapter that new requests get; 0 for models, and for adapters that workers have had
        since their start."""
        adapter = self.wanted.get(model)
        return 0 if adapter is None else adapter.version

    def want(self, adapter: Adapter) -> None:
        """From now on new requests get this version of an adapter; none with path ""."""
        self.wanted[adapter.name] = adapter
        self.on_want(adapter)
        self._by_model.clear()

    def loaded(self, worker: Worker, adapter: Adapter) -> None:
        """A worker has loaded an adapter."""
        if adapter not in worker.info.adapters:
            worker.info.adapters.append(adapter)
        self._by_model.clear()

    def unloaded(self, worker: Worker, name: str, version: int) -> None:
        """A worker was told to unload an adapter."""
        adapters = worker.info.adapters
        adapters[:] = [adapter for adapter in adapters if (adapter.name, adapter.version) != (name, version)]
        self._by_model.clear()

    def _known(self) -> Iterator[Worker]:
        return itertools.chain(self._serving.values(), self._lost.values())

    def serving(self, model: str, version: int | None = None) -> Serving:
        """The workers that serve a model, or a version of an adapter (None: the one that new requests get), now. The
        result must not be modified."""
        key = model, self.version(model) if version is None else version
        serving = self._by_model.get(key)
        if serving is None:
            workers = [worker for worker in self if worker.serves(*key)]
            vocab_size = max((m.info.vocab_size for m in workers), default=0)
            roomy = [worker for worker in workers if worker.name not in self._closed]
            serving = Serving(workers, roomy, vocab_size, max((m.token_limit for m in workers), default=0))
            if workers:  # clients may request any name: others are not cached
                self._by_model[key] = serving
        return serving

    # ------------------------------------------------------------ come and go

    def register(self, info: Register, now: float) -> tuple[list[int], list[Effect]]:
        """A worker joins. If its name is known, it may be another process, whose cache is empty, or the same one, whose
        cache is kept: then its resync is requested. Returns the ids of the former Worker's runs, and orders for the
        worker."""
        before = self._serving.get(info.name)
        again = before is not None and before.process == process(info)
        if known := before or self._lost.get(info.name):
            known.crash_exonerated = known.process == process(info)
        if known is None or not known.crash_exonerated:
            self._closed.discard(info.name)
        take_out = self._take_out if again else self.remove  # a process that joins again does not count as lost
        orphans = take_out(info.name, may_return=False)
        worker = self._join(info, now, fresh=not again)
        if known and known.process == worker.process:
            worker.record = known.record
        if not again:
            return orphans, []
        # The worker has dropped its runs, but some may have reached it after that.
        return orphans, [*_abort(info.name, orphans), *self._ask_resync(worker, now)]

    def revive(self, name: str, now: float) -> list[Effect]:
        """A lost worker was heard again: it serves again, as a new Worker. Returns orders for it, which abort what it
        still computes; empty if it may not come back."""
        lost = self._lost.pop(name, None)
        if lost is None:
            return []
        lost.crash_exonerated = True
        worker = self._join(lost.info, now, fresh=False)
        worker.next_step, worker.record = None, lost.record
        return [*_abort(name, list(lost.runs)), *self._ask_resync(worker, now)]

    def remove(self, name: str, *, may_return: bool, planned: bool = False) -> list[int]:
        """Remove a worker, which is lost if it `may_return`. `planned`: it was told to leave. Returns the ids of its
        runs."""
        if name in self._serving:
            self._counters.workers_lost += 1
            self._serving[name].crash_exonerated = planned
        return self._take_out(name, may_return=may_return)

    def _take_out(self, name: str, *, may_return: bool) -> list[int]:
        worker = self._serving.pop(name, None)
        self._by_model.clear()
        if not may_return:
            self._lost.pop(name, None)
        elif worker is not None:
            self._lost[name] = worker
        if worker is None:
            return []
        self._index.drop_worker(worker.number)
        return list(worker.runs)

    def speaks_for(self, name: str, pid: int, incarnation: int) -> bool:
        """Whether a process is the current one of a name, and not a former one."""
        worker = self._serving.get(name) or self._lost.get(name)
        return worker is None or worker.is_process(pid, incarnation)

    def is_taken(self, info: Register) -> bool:
        """Whether another process serves under the same name, and was heard within the timeout."""
        worker = self._serving.get(info.name)
        return worker is not None and worker.process != process(info)

    def _join(self, info: Register, now: float, *, fresh: bool) -> Worker:
        """Make a new Worker of a name; `fresh` if its cache is empty."""
        worker = self._serving[info.name] = Worker(next(self._numbers), info, now)
        self._by_model.clear()
        self._index.add_worker(worker.number, fresh=fresh, num_states=info.num_states)
        return worker

    # ------------------------------------------------------------ messages of workers

    def hear(self, name: str, now: float, stalled: float | None = None, stuck: bool = False) -> Worker | None:
        """Note that a worker was heard, and what a heartbeat says of its progress; None if it does not serve."""
        worker = self._serving.get(name)
        if worker is not None:
            worker.heard = now
        if stalled is not None and (told := worker or self._lost.get(name)) is not None:
            told.heard, told.stalled, told.stuck = now, stalled, stuck
        return worker

    def mirror(self, worker: Worker, message: StepDone, now: float) -> list[Effect]:
        """Apply a worker's cache events to the index; a gap requests a resync."""
        return [] if self._index.apply(worker.number, message) else self._ask_resync(worker, now)

    def silent(self, now: float) -> list[str]:
        """Names of the workers that were not heard for the timeout; forgets those that were lost long ago. To be called
        about once a second: if it was not, the router itself did not run (suspended, starved), and nobody times out."""
        if self._last_look is not None and now - self._last_look > self._timeout / 2:
            for worker in self:
                worker.heard = now
        self._last_look = now
        for name in [name for name, m in self._lost.items() if now - m.heard > FORGET_SECONDS]:
            del self._lost[name]
        return [m.name for m in self if now - m.heard > self._timeout]

    def ask_again(self, now: float) -> list[Effect]:
        """Request resyncs again that have not arrived in time."""
        orders: list[Effect] = []
        for worker in self:
            if now - worker.asked > RESYNC_SECONDS and self._index.awaits_resync(worker.number):
                orders += self._ask_resync(worker, now)
        return orders

    def _ask_resync(self, worker: Worker, now: float) -> list[Effect]:
        self._counters.snapshots += 1
        worker.asked = now
        return [Order(worker.name, Resync())]


def _abort(name: str, runs: list[int]) -> list[Effect]:
    return [Order(name, Abort(runs))] if runs else []
