"""Who watches knows whether a router is there; who was refused joins the one that comes; who is told to stop waits for
none."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from radixrt import wire
from radixrt.config import WorkerConfig, resolve
from radixrt.process.ports import free_tcp_address
from radixrt.wire import event_loop, keys, monitor, sockets, watch
from radixrt.wire.watch import Watch
from radixrt.worker.setup import make_worker
from tests.test_wire import run, until


@pytest.fixture
def key(tmp_path) -> str:
    path = str(tmp_path / "key")
    keys.make_secret_key(path)
    return path


@contextmanager
def stranger(host: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """Listens, and is no router; to who wants a key it speaks otherwise, so that ZMQ does not try again. Its port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as server:

        def answer(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                while connection.recv(4096):
                    pass

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def test_who_watches_knows_whether_somebody_is_there(key):
    watches = [Watch("tcp://127.0.0.1:1")]

    async def main():
        server = wire.RouterSocket("tcp://127.0.0.1:*", print, key=keys.load_secret_key(key, "clients"))
        suffixes = [keys.public_suffix(key, role) for role in ("clients", "workers")]
        right, *wrong = (Watch(server.address + suffix) for suffix in (*suffixes, ""))
        watches.extend([right, *wrong])
        await until(right.look)
        for each in wrong:
            await until(lambda each=each: each.look() or each.refused)
            assert not each.connected
        server.close()
        await until(lambda: not right.look())
        assert not right.refused

    run(main())
    assert not watches[0].look() and not watches[0].refused
    for each in watches:
        each.close()


def test_who_refused_is_not_there_once_it_is_gone(key, monkeypatch):
    monkeypatch.setattr(monitor, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(watch, "REFUSED_SECONDS", 2.0)
    clients, workers = (keys.load_secret_key(key, role) for role in ("clients", "workers"))
    suffix = keys.public_suffix(key, "clients")
    # What stands behind the address, the key of the router that refuses it, and of the one that takes it.
    cases = [(suffix, workers, clients), ("", clients, None), (suffix, None, clients)]
    places = [free_tcp_address() for _ in cases]
    other = free_tcp_address()

    def listen(place: str, key: tuple[bytes, bytes] | None) -> wire.RouterSocket:
        return wire.RouterSocket(place, print, key=key)

    async def main():
        watches = [Watch(place + case[0]) for place, case in zip(places, cases, strict=True)]
        watches.append(Watch(other + suffix))

        def look(condition: Callable[[Watch], bool]) -> bool:
            for one in watches:
                one.look()
            return all(map(condition, watches))

        refusing = [listen(place, case[1]) for place, case in zip(places, cases, strict=True)]
        with stranger(port=int(other.rpartition(":")[2])):
            await until(lambda: look(lambda one: one.refused))
            over = time.monotonic() + 1.5 * watch.REFUSED_SECONDS
            while time.monotonic() < over:
                await asyncio.sleep(0.05)
                assert look(lambda one: one.refused and not one.connected)
            for server in refusing:
                server.close()
        await until(lambda: look(lambda one: not one.refused))
        assert look(lambda one: not one.connected)
        taking = [listen(place, case[2]) for place, case in zip(places, cases, strict=True)]
        taking.append(listen(other, clients))
        await until(lambda: look(lambda one: one.connected and not one.refused))
        for each in (*watches, *taking):
            each.close()

    run(main(), 60)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_what_was_refused_reaches_the_router_that_comes(host, key, monkeypatch):
    """Also where ZMQ gives up."""
    monkeypatch.setattr(event_loop, "IDLE_SECONDS", 0.1)
    monkeypatch.setattr(monitor, "IDLE_SECONDS", 0.1)

    def sends(link: wire.Link) -> bool:
        try:
            link.send(b"a link")
        except TimeoutError:
            return False
        return True

    async def main():
        here = host.replace("localhost", "127.0.0.1")
        with stranger(here) as port:
            place = f"tcp://{f'[{host}]' if ':' in host else host}:{port}{keys.public_suffix(key, 'workers')}"
            lost, heard = [], set()
            dealer = wire.DealerSocket(place, print, on_lost=lambda: lost.append(1))
            link = wire.Link(place, send_timeout=0.1)
            await until(lambda: not sends(link) and len(lost) > 1)
            assert not any(sends(link) for _ in range(5)), "else it would seem to have joined"
        server = wire.RouterSocket(
            f"tcp://{f'[{here}]' if ':' in here else here}:{port}",
            lambda who, payload: heard.add(payload),
            key=keys.load_secret_key(key, "workers"),
        )
        await until(lambda: sends(link) and b"a link" in heard)
        await until(lambda: dealer.connected)
        dealer.send(b"a socket")
        await until(lambda: b"a socket" in heard)
        for each in (link, dealer, server):
            each.close()

    run(main())


def test_a_link_that_is_to_stop_does_not_wait(monkeypatch):
    monkeypatch.setattr(sockets, "HIGH_WATER", 1)
    stopped = threading.Event()
    with wire.Link("tcp://127.0.0.1:1", stopped=stopped) as link:
        threading.Timer(0.3, stopped.set).start()
        began = time.monotonic()
        for _ in range(2):
            with pytest.raises(TimeoutError):
                while True:
                    link.send(b"x")
        assert 0.2 < time.monotonic() - began < 2.0


@pytest.mark.parametrize("how", ["nobody listens", "no router listens", "the key is wrong"])
def test_a_worker_that_has_no_router_stops_at_once(how, key, monkeypatch):
    monkeypatch.setattr(sockets, "HIGH_WATER", 1)

    async def main():
        async with contextlib.AsyncExitStack() as there:
            address, suffix = "tcp://127.0.0.1:1", keys.public_suffix(key, "clients")
            if how == "no router listens":
                address = f"tcp://127.0.0.1:{there.enter_context(stranger())}"
            if how == "the key is wrong":
                server = wire.RouterSocket("tcp://127.0.0.1:*", print, key=keys.load_secret_key(key, "workers"))
                there.callback(server.close)
                address = server.address
            worker = make_worker(resolve(WorkerConfig(name="w", router=address + suffix, fake="0,0.001")))
            thread = threading.Thread(target=worker.run)
            thread.start()
            await asyncio.sleep(2.5)  # a report and two heartbeats: who sends them waits
            worker.stop()
            await asyncio.to_thread(thread.join, 2.0)
            assert not thread.is_alive()

    run(main())
