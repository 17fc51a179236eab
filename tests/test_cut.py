"""Connections between the router and a worker that break while answers are on their way."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import struct
import threading
import time
from array import array

import pytest

from radixrt import wire
from radixrt.config import RouterConfig
from radixrt.messages import ClientReply, Deltas, Generate, Sampling, TokenPrompt
from radixrt.router.server.process import RouterThread
from radixrt.tokens import TextService
from radixrt.worker.execution.fake_runner import FakeRunner, fake_token
from radixrt.worker.loop import Worker
from radixrt.worker.scheduler.scheduler import Limits
from radixrt.worker.status import Identity

_reply = wire.Decoder(ClientReply)
TOKENS = 150


class Wire:
    """A TCP port that leads to another one, until it is cut."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._holds = False
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                theirs = socket.create_connection(("127.0.0.1", self._to))
                self._pairs.append((ours, theirs))
                for one, other in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while found := one.recv(65536):
                while self._holds:
                    time.sleep(0.001)
                other.sendall(found)

    def cut(self, seconds: float) -> None:
        """Break all connections; what was sent in the `seconds` before is lost."""
        self._holds = True
        time.sleep(seconds)
        pairs, self._pairs = self._pairs, []
        for one in itertools.chain(*pairs):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._holds = False

    def close(self) -> None:
        self._listener.close()
        self.cut(0)


@pytest.fixture
def served():
    """(a router, the wire of its worker, a client's link)."""
    config = RouterConfig(client_address="tcp://127.0.0.1:*", worker_address="tcp://127.0.0.1:*", tokenizer="none")
    router, ends = RouterThread(config, TextService.none()), itertools.count()
    line = Wire(int(router.server.worker_address.rpartition(":")[2]))

    def connect() -> wire.Link:
        return wire.Link(f"tcp://127.0.0.1:{line.port}", b"w%d" % next(ends), monitored=True)

    worker = Worker(FakeRunner(20_000, decode_step=0.003), Identity("w", "m"), connect, limits=Limits(512, 64))
    thread = threading.Thread(target=worker.run)
    thread.start()
    while not len(router.server.core.workers):
        time.sleep(0.01)
    with wire.Link(router.server.client_address) as client:
        yield router.server, line, client
    worker.stop()
    thread.join(5)
    router.stop()
    line.close()


def expected(prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(TOKENS):
        tokens.append(fake_token(tokens[-1], len(tokens) - 1, 32_000))
    return tokens[len(prompt) :]


def test_no_token_is_lost_and_no_request_forgotten(served):
    router, line, client = served
    rng = random.Random(0)
    prompts = {id: [rng.randrange(5, 900) for _ in range(20)] for id in range(40)}
    said: dict[int, list[int]] = {id: [] for id in prompts}
    ended: set[int] = set()
    sampling = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    for start in range(0, 40, 10):
        for id in range(start, start + 10):
            prompt = TokenPrompt(array("i", prompts[id]).tobytes())
            client.send(wire.encode(Generate(id=id, prompt=prompt, sampling=sampling)))
        cut = threading.Timer(rng.uniform(0.05, 0.4), line.cut, (rng.choice([0.0, 0.02, 0.05]),))
        cut.start()
        deadline = time.monotonic() + 30
        while len(ended) < start + 10:
            assert time.monotonic() < deadline, f"{start + 10 - len(ended)} requests hang"
            if (payload := client.recv(0.1)) is not None:
                message = _reply.decode(payload)
                assert isinstance(message, Deltas), message
                for delta in message.items:
                    said[delta.id] += array("i", delta.ids)
                    if delta.finish:
                        ended.add(delta.id)
        cut.join()
        while not len(router.core.workers):
            time.sleep(0.01)
    assert {id: tokens == expected(prompts[id]) for id, tokens in said.items()} == dict.fromkeys(prompts, True)
