"""A router and simulated workers in threads, and a blocking client, connected by real ZMQ sockets."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop
from sim_workers import SimWorker, register

from radixrt import wire
from radixrt.config import RouterConfig
from radixrt.messages import ClientReply, Delta, Deltas, Heartbeat, StepDone, Stop, ToWorker
from radixrt.router.server.loop import RouterServer
from radixrt.tokens import TextService
from radixrt.tree import RadixTree
from tests.waiting import eventually

_order = wire.Decoder(ToWorker)
_reply = wire.Decoder(ClientReply)
_names = itertools.count()


class Router:
    """Runs a `RouterServer` on an event loop in a thread."""

    def __init__(self, text: TextService, **config) -> None:
        name = f"inproc://test-router-{next(_names)}"
        addresses = {"client_address": name + "-clients", "worker_address": name + "-workers"}
        self.server = RouterServer(RouterConfig(tokenizer="none", **(addresses | config)), text)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main)
        self._thread.start()
        assert self._ready.wait(5)

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await self.server.run(self._stop, self._ready.set)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(5)
        assert not self._thread.is_alive()


class Worker:
    """Runs a `SimWorker` over a Link in a thread, with a step every `pace` seconds. `die` ends it without a Leave."""

    def __init__(self, address: str, name: str, pace: float = 0.002, **info) -> None:
        self.sim = SimWorker(name, RadixTree(events=True), pool=100_000)
        self._address, self._pace, self._info = address, pace, info
        self._dead = threading.Event()
        self._thread = threading.Thread(target=self._main)
        self._thread.start()

    def _main(self) -> None:
        rng, beat = random.Random(0), time.monotonic()
        with wire.Link(self._address, self.sim.name.encode()) as link:
            link.send(wire.encode(register(self.sim.name, **self._info)))
            while not self._dead.is_set():
                for payload in link.drain():
                    order = _order.decode(payload)
                    if isinstance(order, Stop):
                        return
                    self.sim.obey(order)
                message: StepDone = self.sim.step(rng)
                if message.outputs or message.events or message.resync:
                    link.send(wire.encode(message))
                if time.monotonic() - beat > 0.1:
                    beat = time.monotonic()
                    link.send(wire.encode(Heartbeat(self.sim.name)))
                time.sleep(self._pace)

    def die(self) -> None:
        self._dead.set()
        self._thread.join(5)


class Client:
    """A blocking client."""

    def __init__(self, address: str) -> None:
        self.link = wire.Link(address)

    def send(self, *messages) -> None:
        for message in messages:
            self.link.send(wire.encode(message))

    def receive(self, seconds: float = 30.0):
        """The next message, keep-alives excepted."""
        while True:
            payload = self.link.recv(seconds)
            assert payload is not None, "no answer"
            message = _reply.decode(payload)
            if message != Deltas([]):
                return message

    def ask(self, message):
        self.send(message)
        return self.receive()

    def gather(self, choices: int) -> dict[tuple[int, int], Delta]:
        """Receive Deltas until `choices` choices are finished. Returns one merged Delta by (request, choice)."""
        whole: dict[tuple[int, int], Delta] = {}
        while sum(d.finish is not None for d in whole.values()) < choices:
            message = self.receive()
            assert isinstance(message, Deltas), message
            for delta in message.items:
                mine = whole.setdefault((delta.id, delta.index), Delta(delta.id, delta.index))
                assert mine.finish is None
                mine.ids += delta.ids
                mine.text += delta.text
                mine.finish, mine.usage, mine.stop = delta.finish, delta.usage, delta.stop
        return whole


@contextmanager
def stack(text: TextService | None = None, workers: int = 1, pace: float = 0.002, **config) -> Iterator:
    """Run a router with workers. Yields (router, workers, client)."""
    router = Router(text or TextService.none(), **config)
    members = [Worker(router.server.worker_address, f"w{i}", pace) for i in range(workers)]
    client = Client(router.server.client_address)
    try:
        eventually(lambda: len(router.server.core.workers) == workers)
        yield router, members, client
    finally:
        client.link.close()
        for member in members:
            member.die()
        router.stop()
