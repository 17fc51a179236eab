"""The router's event loop: the sockets around the core. Receive, encode, decide, decode, send.

    client bytes -> message -> handlers: [encode text, in threads] -> core --Order--> worker
    worker bytes -> message ----------------------------------------> core --Reply--> streams: [decode ids] -> client

No decisions are made here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterator

from radixrt import wire
from radixrt.config import RouterConfig, flag, resolve
from radixrt.messages import (
    AdapterLoaded,
    CacheHinted,
    ClientReply,
    ClientRequest,
    Deltas,
    Draining,
    Error,
    Heartbeat,
    Leave,
    Register,
    Scored,
    StepDone,
    ToRouter,
)
from radixrt.process.open_files import FileWatch
from radixrt.report import Report
from radixrt.requests.validate import malformed
from radixrt.router.core.core import RouterCore
from radixrt.router.core.effects import Effect, Order, Reply
from radixrt.router.core.worker import room_of
from radixrt.router.persistence.adapters import SavedAdapters
from radixrt.router.persistence.store import PersistentStore
from radixrt.router.programs.programs import Programs
from radixrt.router.server.connections import ClientConnections, WorkerConnections
from radixrt.router.server.gate import Gate
from radixrt.router.server.handlers import Handlers
from radixrt.router.server.streams import TextStreams
from radixrt.router.server.tasks import now
from radixrt.router.server.traces import Traces
from radixrt.tokens import TextService
from radixrt.wire.keys import is_private, load_secret_key

log = logging.getLogger("radixrt.router")

NAME_TAKEN = "another worker serves under this name; each needs a --name of its own"

FAILED = "the router failed on this request; its log says why"

_client_message = wire.Decoder(ClientRequest)
_worker_message = wire.Decoder(ToRouter)


class RouterServer:
    """The router of `config`. `text` is made from the configuration if not given.

    `run` serves on the event loop it is called in; the addresses that it listens on are then `client_address`
    and `worker_address`. Raises ValueError or OSError if it cannot listen.

    The router never waits for a client that does not read: when its queue is full its requests are cancelled, and it
    gets one Error for each as soon as it reads again. A disconnected client is forgotten.
    """

    def __init__(self, config: RouterConfig, text: TextService | None = None) -> None:
        self.config = config = resolve(config)
        self.text = text or TextService.load(config)
        self.report = Report(config.report_tokens)
        self._traces = Traces(config.otlp_traces_endpoint) if config.otlp_traces_endpoint else None
        ended = self._traces.ended if self._traces else None
        self.core = RouterCore(config, self.report, vocab_size=self.text.vocab_size, on_ended=ended)
        self._store = PersistentStore(config.state_path, _state_bytes(config)) if config.state_path else None
        if self._store and config.allow_runtime_lora_updating:
            self._restore_adapters(SavedAdapters(self._store))
        self.client_address = config.client_address
        self.worker_address = config.worker_address
        self.programs = Programs(self.text, config, self._store)
        self._streams = TextStreams(self.text, self.core)
        self._handlers = Handlers(
            config, self.core, self.text, self._streams, self.programs, self.report, self._perform, self._store
        )
        self._clients = ClientConnections(self.core.tenant)
        self._gate = Gate(self.core.keys)
        self._files = FileWatch("new connections are not accepted; those that there are go on")

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None] | None = None) -> None:
        """Serve until `stop` is set; `on_ready` is called once it listens."""
        try:
            await self._run(stop, on_ready)
        finally:
            if self._store:
                self._store.close()

    async def _run(self, stop: asyncio.Event, on_ready: Callable[[], None] | None) -> None:
        clients, workers = self._listen()
        self._clients.socket, self._workers = clients, WorkerConnections(workers, self._lost)
        try:
            if on_ready:
                on_ready()
            period = min(1.0, self.config.worker_timeout / 4)
            while not await _is_set_within(stop, period):
                self._perform(self.core.tick(now()))
                self._workers.prune(self.core.workers.known)
                self._files.look()
                self._clients.send_owed()
                for client in self._clients.disconnect_stalled():
                    self._perform(self._handlers.drop(client))
        finally:
            self._handlers.close()
            self._workers.flush()
            clients.close()
            workers.close()
            if self._traces:
                self._traces.close()

    def _restore_adapters(self, saved: SavedAdapters) -> None:
        for adapter in saved.read():
            self.core.workers.want(adapter)
        self.core.workers.on_want = saved.keep

    def _listen(self) -> tuple[wire.RouterSocket, wire.RouterSocket]:
        path = self.config.curve_secret_key
        if path and not is_private(path):
            log.warning("%s, the CURVE secret key, can be read by others than its owner (chmod 600)", path)
        key = {role: load_secret_key(path, role) if path else None for role in ("clients", "workers")}
        limit, config = wire.MAX_CLIENT_BYTES, self.config
        with _for("client_address"):
            clients = wire.RouterSocket(self.client_address, self._from_client, key=key["clients"], max_bytes=limit)
        try:
            with _for("worker_address"):
                workers = wire.RouterSocket(
                    self.worker_address,
                    self._from_worker,
                    key=key["workers"],
                    near=config.near_address,
                    password=config.near_password,
                )
        except BaseException:
            clients.close()
            raise
        self.client_address, self.worker_address = clients.address, workers.address
        others = f", {workers.address} for workers" if workers.address else ""
        log.info("listening on %s for clients%s", self.client_address, others)
        return clients, workers

    def stop_workers(self) -> None:
        """Tell every worker to stop. Call it on the event loop."""
        self._perform(self.core.stop_workers())

    def drain(self) -> None:
        """Take no new requests. Call it on the event loop."""
        self.core.drains.server = True

    @property
    def idle(self) -> bool:
        """Whether no request is in flight."""
        return not self.core.runs_in_flight and not self._handlers.busy

    # ------------------------------------------------------------ from clients

    def attach(self, deliver: Callable[[ClientReply], None]) -> bytes:
        """Add a client on this event loop; returns its identity for `take`. `deliver` is called for each reply, but
        never within `take`."""
        return self._clients.attach(deliver)

    def _from_client(self, client: bytes, payload: bytes) -> None:
        if (refusal := self._gate.refusal(payload)) is not None:
            self._answer(client, refusal)
            return
        try:
            message = _client_message.decode(payload)
        except wire.Malformed as problem:
            self._answer(client, malformed(payload, problem))
            return
        try:
            self._clients.heard(client, message)
            self.take(client, message, len(payload))
        except Exception:
            log.exception("a message of a client failed")
            self._answer(client, Error(message.id, 500, FAILED))

    def take(self, client: bytes, message: ClientRequest, size: int = 0) -> None:
        """Handle a message of a client, of `size` bytes if they are to be counted."""
        self._handlers.take(client, message, size)

    # ------------------------------------------------------------ from workers

    def _from_worker(self, identity: bytes, payload: bytes) -> None:
        try:
            message = _worker_message.decode(payload)
        except wire.Malformed as problem:
            log.warning("worker socket: a message that is none was ignored: %s", problem)
            return
        try:
            self._take_from_worker(identity, message)
        except Exception:
            name = self._workers.name(identity)
            log.exception("a message of worker %s failed", name)
            self._lost([name] if name is not None else [])

    def _take_from_worker(self, identity: bytes, message: ToRouter) -> None:
        match message:
            case StepDone():
                name = self._workers.name(identity)
                if name is None or not self.core.workers.known(name):
                    self._workers.refuse(identity)
                else:
                    self._perform(self.core.step(name, message, now()))
            case AdapterLoaded():
                if (name := self._workers.name(identity)) is not None:
                    self._perform(self.core.adapter_loaded(name, message, now()))
            case CacheHinted():
                if (name := self._workers.name(identity)) is not None:
                    self._perform(self.core.hinted(name, message, now()))
            case Heartbeat() | Leave() | Draining() if not self._is_current(message):
                pass
            case Heartbeat():
                self._perform(self.core.heartbeat(message.name, now(), message.stalled, message.stuck))
            case Draining():
                log.info("worker %s drains", message.name)
                self._perform(self.core.drains.told(message.name, now()))
            case Register() if self.core.workers.is_taken(message) and self._workers.is_there(message.name):
                log.error("a worker %s (pid %d) is refused: %s", message.name, message.pid, NAME_TAKEN)
                self._workers.dismiss(identity, NAME_TAKEN)
            case Register():
                self._workers.bind(message.name, identity)
                about = message.name, message.model, message.device, room_of(message)
                log.info("worker %s serves %s on %s; %s", *about)
                self._perform(self.core.register(message, now()))
            case Leave():
                log.info("worker %s left: %s", message.name, message.reason or "no reason given")
                self._workers.unbind(message.name)
                self._perform(self.core.leave(message.name, now(), planned=message.planned))

    def _is_current(self, message: Heartbeat | Leave | Draining) -> bool:
        return self.core.workers.speaks_for(message.name, message.pid, message.incarnation)

    # ------------------------------------------------------------ to both

    def _perform(self, effects: list[Effect]) -> None:
        """Send messages, and handle what follows if peers are gone."""
        work = deque(effects)
        while work:
            effect = work.popleft()
            if isinstance(effect, Order):
                if lost := self._workers.send(effect.name, effect.message):
                    work.extend(self.core.lose(lost, now()))
                continue
            client, message = effect
            if isinstance(message, Deltas):
                decoded, orders = self._streams.decode(client, message)
                work.extend(orders)
                if message.items and not decoded.items:
                    continue
                message = decoded
                self._handlers.explainer.add_to(client, message)
            elif isinstance(message, Scored):
                self._streams.scored(client, message.id)
            elif isinstance(message, Error) and message.id is not None and not self.core.serves(client, message.id):
                self._streams.forget(client, message.id)
            if not self._clients.send(client, message, self._handlers.in_flight):
                work.extend(self._handlers.drop(client))

    def _answer(self, client: bytes, message: ClientReply) -> None:
        self._perform([Reply(client, message)])

    def _lost(self, names: list[str]) -> None:
        """Called with the names of workers that could not be reached."""
        self._perform(self.core.lose(names, now()))


def _state_bytes(config: RouterConfig) -> int:
    return int(config.state_size * (1 << 30))


@contextlib.contextmanager
def _for(setting: str) -> Iterator[None]:
    """An address that cannot be listened on is named by its setting."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{flag(setting)}: {error.strerror}; give another one") from None


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
