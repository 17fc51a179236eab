"""Workers that are to leave, and a server that is about to end. The workers get no new runs, finish those that they
have, and are then told to stop.

    asked, told -> no runs are left, or the time is over -> Stop -> it leaves: its other runs continue elsewhere
"""

from __future__ import annotations

from dataclasses import dataclass, field

from radixrt.messages import DrainWorker, Info, Stop
from radixrt.requests.validate import Refused
from radixrt.router.core.admission import Admission
from radixrt.router.core.effects import Client, Effect, Order, Reply
from radixrt.router.core.worker import Process, Worker
from radixrt.router.core.workers import Workers

AGAIN_SECONDS = 5.0
"""A worker that has not left after this time is told once more: the message may have been lost with a connection."""
RETRY_SECONDS = 5.0
"""Retry-After of requests that are refused because the server drains."""


@dataclass(slots=True)
class Drain:
    process: Process
    until: float
    """When it is told to stop in any case."""
    restart: bool = False
    told: float | None = None
    """When it was last told to stop."""
    clients: list[tuple[Client, int]] = field(default_factory=list)
    """Those that asked for it, with the ids of their messages."""


class Drains:
    """The workers that drain, by name. `seconds`: how long their runs may take."""

    def __init__(self, workers: Workers, admission: Admission, seconds: float) -> None:
        self.server = False
        """Whether the server as a whole is about to end, and takes no new requests."""
        self._workers = workers
        self._admission = admission
        self._seconds = seconds
        self._drains: dict[str, Drain] = {}

    def ask(self, client: Client, message: DrainWorker, now: float) -> list[Effect]:
        """A client asks for it. Raises Refused if its key does not allow that (401, 403), if there is no such worker
        (404), or no other one (409)."""
        self._admission.check_operator(message.api_key, message.admin_only)
        name = message.worker
        worker = self._workers.worker(name)
        if worker is None:
            names = ", ".join(sorted(m.name for m in self._workers)) or "none"
            raise Refused("worker", f"no worker {name!r} serves; these do: {names}", 404)
        if not message.restart and not self._workers.has_other(worker):
            text = f"worker {name!r} is the only one that serves {worker.info.model!r}: use restart, or stop the server"
            raise Refused("worker", text, 409)
        drain = self._begin(worker, now)
        drain.restart |= message.restart
        drain.clients.append((client, message.id))
        return self._orders(name, drain, now)

    def check_open(self) -> None:
        """Raise Refused (503) if the server takes no new requests."""
        if self.server:
            raise Refused("", "the server is draining: it takes no new requests, and ends soon", 503, RETRY_SECONDS)

    def told(self, name: str, now: float) -> list[Effect]:
        """A worker says that it is to leave."""
        worker = self._workers.worker(name)
        return [] if worker is None else self._orders(name, self._begin(worker, now), now)

    def _begin(self, worker: Worker, now: float) -> Drain:
        """The worker gets no new runs from now on."""
        drain = self._drains.get(worker.name)
        if drain is None or drain.process != worker.process:
            drain = self._drains[worker.name] = Drain(worker.process, now + self._seconds)
            self._workers.close(worker.name)
        return drain

    def tick(self, now: float) -> list[Effect]:
        """To be called about once a second, and when a worker has left."""
        effects: list[Effect] = []
        for name, drain in list(self._drains.items()):
            serves = self._workers.worker(name) is not None
            there = serves or (drain.told is None and self._workers.known(name))  # if it is lost, it may come back
            if there and self._workers.speaks_for(name, *drain.process):
                effects += self._orders(name, drain, now)
            else:  # it has left, or another process has its name
                del self._drains[name]
                reply = {"worker": name, "restart": drain.restart}
                effects += [Reply(client, Info(id, reply)) for client, id in drain.clients]
        return effects

    def _orders(self, name: str, drain: Drain, now: float) -> list[Effect]:
        worker = self._workers.worker(name)
        if worker is None or (worker.runs and now < drain.until):
            return []
        if drain.told is not None and now < drain.told + AGAIN_SECONDS:
            return []
        drain.told = now
        return [Order(name, Stop(restart=drain.restart))]
