"""LoRA adapters that clients load, replace and unload while workers serve.

    change -> its turn comes -> refused
                             -> unload: no longer wanted -------------------------------> workers unload it -> answered
                             -> load: all workers with room load the new version
                                        first one has it: new requests get this version
                                        all have answered: workers unload the former one -> answered

What is wanted is `Workers.wanted`. A worker that joins is told to unload what is not, and to load what it lacks; if it
has a newer version than is known here, the router was restarted, and that one is wanted.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import NamedTuple

from radixrt.messages import Adapter, AdapterLoaded, ChangeAdapter, Info, LoadAdapter, UnloadAdapter
from radixrt.requests.validate import Refused
from radixrt.router.core.effects import Client, Effect, Order, Reply
from radixrt.router.core.worker import Worker
from radixrt.router.core.workers import Workers

log = logging.getLogger("radixrt.router")

RETRY_SECONDS = 60.0
"""How often a worker is asked to load what it could not."""
MAX_NAME_CHARS = 256
"""Each namespace, and each error that lists what is served, has names in it."""


class Change(NamedTuple):
    client: Client
    message: ChangeAdapter
    at: int
    """Milliseconds since 1970."""


class AdapterChanges:
    """One change after the other. `default_model`: the name of a model even while no worker serves it ("": none)."""

    def __init__(self, workers: Workers, default_model: str = "") -> None:
        self._workers = workers
        self._default_model = default_model
        self._queue: deque[Change] = deque()
        self._current: Change | None = None
        self._adapter = Adapter("")
        """Of the current change."""
        self._waiting: set[int] = set()
        """Numbers of the workers that have not answered yet."""
        self._errors: dict[str, str] = {}
        self._next_try = 0.0
        self._last_version = 0

    def add(self, client: Client, message: ChangeAdapter, at: int) -> list[Effect]:
        """Make a change when those before it are done. Its client gets an Info or an Error."""
        self._queue.append(Change(client, message, at))
        return self._next()

    def joined(self, worker: Worker) -> list[Effect]:
        """A worker has joined, with what it has loaded."""
        for name, version in worker.adapters:
            if version > self._workers.version(name):
                path = next(one.path for one in worker.info.adapters if (one.name, one.version) == (name, version))
                self._workers.want(Adapter(name, version, path))
        return [effect for one in self._workers for effect in self._sync(one)]

    def answered(self, worker: Worker, message: AdapterLoaded) -> list[Effect]:
        """A worker has loaded an adapter, or has failed to."""
        adapter = message.adapter
        if message.error:
            log.warning("worker %s cannot load adapter %s: %s", worker.name, adapter.name, message.error)
        else:
            self._workers.loaded(worker, adapter)
        if self._current is None or adapter.version != self._adapter.version or worker.number not in self._waiting:
            return self._sync(worker, load=False)
        if message.error:
            self._errors[worker.name] = message.error
        elif self._workers.version(adapter.name) < adapter.version:
            self._workers.want(adapter)
        self._waiting.discard(worker.number)
        return self._check()

    def tick(self, now: float) -> list[Effect]:
        """To be called about once a second. Workers that have left do not answer any more; those that could not load
        what is wanted are asked again now and then."""
        if self._current is not None:
            return self._check()
        if now < self._next_try:
            return []
        self._next_try = now + RETRY_SECONDS
        return [effect for worker in self._workers for effect in self._sync(worker)]

    def _check(self) -> list[Effect]:
        """End the current change if no worker is left that has not answered."""
        serving = {worker.number for worker in self._workers}
        self._waiting &= serving
        return [] if self._waiting else self._end()

    # ------------------------------------------------------------ one change

    def _next(self) -> list[Effect]:
        """Begin with the next changes, unless one is being made."""
        effects: list[Effect] = []
        while self._queue and self._current is None:
            change = self._queue.popleft()
            try:
                effects += self._load(change) if change.message.path else self._unload(change)
            except Refused as refused:
                effects.append(Reply(change.client, refused.error(change.message.id)))
        return effects

    def _load(self, change: Change) -> list[Effect]:
        name, path = change.message.name, change.message.path
        self._check_name(name)
        if self._workers.serving(name).workers and not change.message.in_place:
            raise Refused("name", f"the LoRA adapter {name!r} has already been loaded; load_inplace replaces it")
        able = self._able()
        kept = {m.number: self._names(m) | {adapter.name for adapter in self._missing(m)} for m in able}
        roomy = [m for m in able if len(kept[m.number] | {name}) <= m.info.max_loras]
        if not roomy:
            loaded = ", ".join(sorted(set().union(*kept.values())))
            most = max(m.info.max_loras for m in able)
            raise Refused("name", f"{most} LoRA adapters are loaded ({loaded}), as many as --max-loras allows")
        self._current, self._adapter = change, Adapter(name, self._new_version(name, change.at), path)
        self._waiting, self._errors = {m.number for m in roomy}, {}
        return [Order(m.name, LoadAdapter(self._adapter)) for m in roomy]

    def _unload(self, change: Change) -> list[Effect]:
        name = change.message.name
        self._check_name(name)
        if name not in self._workers.adapters():
            raise Refused("name", f"the LoRA adapter {name!r} cannot be found", 404)
        self._able()
        self._workers.want(Adapter(name, self._new_version(name, change.at)))
        effects = [effect for worker in self._workers for effect in self._sync(worker)]
        return [*effects, Reply(change.client, Info(change.message.id, {}))]

    def _end(self) -> list[Effect]:
        """All workers have answered, or are lost."""
        change, self._current = self._current, None
        assert change is not None
        adapter, id = self._adapter, change.message.id
        effects = [effect for worker in self._workers for effect in self._sync(worker)]
        if self._workers.version(adapter.name) == adapter.version:
            reply = Reply(change.client, Info(id, self._errors))
        elif self._errors:
            reply = Reply(change.client, Refused("path", next(iter(self._errors.values()))).error(id))
        else:
            problem = Refused("", f"the workers were lost that were to load {adapter.name!r}", 503, 1.0)
            reply = Reply(change.client, problem.error(id))
        return [*effects, reply, *self._next()]

    def _check_name(self, name: str) -> None:
        if not name or not name.isprintable():
            raise Refused("name", "the name is empty, or has characters that cannot be printed")
        if len(name) > MAX_NAME_CHARS:
            raise Refused("name", f"the name has {len(name)} characters, more than {MAX_NAME_CHARS}")
        if name == self._default_model or name in self._workers.models():
            raise Refused("name", f"{name!r} is a model, not a LoRA adapter")

    def _able(self) -> list[Worker]:
        """The workers that load adapters. Raises Refused if there are none."""
        if not len(self._workers):
            raise Refused("", "no worker serves now", 503, 1.0)
        if not (able := [worker for worker in self._workers if worker.info.max_loras]):
            raise Refused("", "no worker has --enable-lora and --allow-runtime-lora-updating", 403)
        return able

    def _names(self, worker: Worker) -> set[str]:
        """The adapters of a worker that are wanted."""
        return {name for name, version in worker.adapters if version == self._workers.version(name)}

    def _new_version(self, name: str, at: int) -> int:
        """By time, so that it is new even after a restart of the router, and higher than the last one, as a worker may
        have that although its change failed."""
        self._last_version = max(at, self._last_version + 1, self._workers.version(name) + 1)
        return self._last_version

    # ------------------------------------------------------------ what workers are to have

    def _sync(self, worker: Worker, load: bool = True) -> list[Effect]:
        """Orders for a worker that has not what is wanted."""
        if not worker.info.max_loras:
            return []
        effects: list[Effect] = []
        for name, version in sorted(worker.adapters):
            if version != self._workers.version(name) and not self._is_current(name, version):
                self._workers.unloaded(worker, name, version)
                effects.append(Order(worker.name, UnloadAdapter(name, version)))
        return effects + [Order(worker.name, LoadAdapter(adapter)) for adapter in self._missing(worker) if load]

    def _missing(self, worker: Worker) -> list[Adapter]:
        """The adapters that a worker is to load, as far as it has room."""
        loaded, room = worker.adapters, max(0, worker.info.max_loras - len(self._names(worker)))
        return [a for a in self._workers.wanted.values() if a.path and (a.name, a.version) not in loaded][:room]

    def _is_current(self, name: str, version: int) -> bool:
        """Whether a version is being loaded by the current change."""
        return self._current is not None and (name, version) == (self._adapter.name, self._adapter.version)
