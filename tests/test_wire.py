"""Sockets: delivery in bursts both ways, vanished and unread peers, keys, addresses."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import uvloop
import zmq

from radixrt import wire
from radixrt.process import ports
from radixrt.wire import addresses, keys, sockets


def run(coroutine, seconds: float = 10.0):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(coroutine, seconds))


async def until(condition, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture(params=["tcp", "ipc", "inproc"])
def address(request, tmp_path) -> str:
    return {"tcp": "tcp://127.0.0.1:*", "ipc": f"ipc://{tmp_path}/s", "inproc": f"inproc://{tmp_path}"}[request.param]


def test_ten_thousand_messages_each_way_arrive_in_order(address):
    async def main():
        got = []
        server = wire.RouterSocket(address, lambda who, payload: server.send(who, payload))
        client = wire.DealerSocket(server.address, got.append)
        for start in range(0, 10_000, 500):
            for i in range(start, start + 500):
                assert client.send(b"%d" % i)
            await until(lambda n=start + 500: len(got) == n)
        assert got == [b"%d" % i for i in range(10_000)]
        client.close()
        server.close()
        server.close()

    run(main())


def test_others_are_served_between_large_messages(address):
    async def main():
        loop, turn, heard = asyncio.get_running_loop(), 0, []

        def next_turn() -> None:
            nonlocal turn
            turn += 1
            loop.call_soon(next_turn)

        server = wire.RouterSocket(address, lambda _, payload: heard.append(turn))
        client = wire.DealerSocket(server.address, print)
        for _ in range(8):
            client.send(bytes(2 << 20))
        time.sleep(0.2)  # all of them arrive
        next_turn()
        await until(lambda: len(heard) == 8)
        client.close()
        server.close()
        return heard

    assert len(set(run(main()))) >= 4


def test_an_edge_swallowed_by_a_send_is_not_lost(address):
    """Both ends answer from within callbacks and plain sends interleave: a missed edge would hang this."""

    async def main():
        seen = 0

        def bounce(payload: bytes) -> None:
            nonlocal seen
            seen += 1
            if seen < 2000:
                client.send(payload)

        server = wire.RouterSocket(address, lambda who, payload: server.send(who, payload))
        client = wire.DealerSocket(server.address, bounce)
        client.send(b"ball")
        await until(lambda: seen >= 2000)
        client.close()
        server.close()

    run(main())


@pytest.mark.parametrize("keyed", [False, True])
def test_a_router_is_reached_in_two_ways(tmp_path, keyed):
    """Each peer is answered where it came from; who comes near needs the password, be there a key elsewhere or not."""
    path = tmp_path / "key"
    keys.make_secret_key(path)
    key = keys.load_secret_key(path, "workers") if keyed else None
    suffix = keys.public_suffix(path, "workers") if keyed else ""
    near = f"ipc://{tmp_path}/near"

    async def main():
        got = []
        server = wire.RouterSocket(
            "tcp://127.0.0.1:*", lambda who, said: server.send(who, said), key=key, near=near, password="sesame"
        )
        clients = [wire.DealerSocket(at, got.append) for at in (server.address + suffix, near + "#plain:sesame")]
        for number, client in enumerate(clients):
            assert client.send(b"%d" % number)
        await until(lambda: sorted(got) == [b"0", b"1"])
        strangers = [wire.DealerSocket(near + wrong, got.append) for wrong in ("", "#plain:", "#plain:sesam", suffix)]
        for stranger in strangers:
            stranger.send(b"2")
        await asyncio.sleep(0.2)
        with pytest.raises(OSError, match="cannot listen on inproc://zeromq.zap"):
            wire.RouterSocket("", print, near=f"ipc://{tmp_path}/other", password="sesame")
        for socket in (*clients, *strangers, server):
            socket.close()
        assert len(got) == 2

    run(main())


def test_sending_to_a_vanished_peer_raises(address):
    async def main():
        peers = []
        server = wire.RouterSocket(address, lambda who, _payload: peers.append(who))
        client = wire.DealerSocket(server.address, print)
        client.send(b"hello")
        await until(lambda: peers)
        client.close()
        with pytest.raises(wire.PeerGone):
            for _ in range(500):
                server.send(peers[0], b"x")
                await asyncio.sleep(0.005)
        with pytest.raises(wire.PeerGone):
            server.send(b"nobody", b"x")
        server.close()

    run(main())


def test_a_peer_that_does_not_read_is_refused_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr(sockets, "HIGH_WATER", 10)

    async def main():
        peers, good = [], []
        server = wire.RouterSocket(f"ipc://{tmp_path}/s", lambda who, _payload: peers.append(who))
        with wire.Link(server.address) as deaf:
            deaf.send(b"hello")
            await until(lambda: peers)
            reader = wire.DealerSocket(server.address, good.append)
            reader.send(b"hello")
            await until(lambda: len(peers) == 2)
            assert not all(server.send(peers[0], bytes(100_000)) for _ in range(200))
            assert server.send(peers[1], b"still served")
            await until(lambda: good == [b"still served"])
            reader.close()
        server.close()

    run(main())


def test_messages_of_several_frames_arrive_as_an_empty_payload(address):
    async def main():
        got = []
        server = wire.RouterSocket(address, lambda who, payload: got.append(payload))
        with wire.Link(server.address) as link:
            link._socket.send_multipart([b"a", b"b", b"c"])
            link.send(b"good")
            await until(lambda: len(got) == 2)
        assert got == [b"", b"good"]
        server.close()

    run(main())


def test_link_waits_drains_and_times_out(address):
    async def main():
        server = wire.RouterSocket(address, lambda who, payload: [server.send(who, payload) for _ in range(3)])
        answers = []

        def worker():
            with wire.Link(server.address, b"w0") as link:
                assert link.recv(0) is None
                assert link.recv(0.01) is None
                link.send(b"x")
                answers.append(link.recv(5))
                while len(answers) < 3:
                    answers.extend(link.drain())

        await asyncio.to_thread(worker)
        assert answers == [b"x"] * 3
        server.close()

    run(main())


def test_who_is_woken_for_nothing_goes_on(address):
    """The descriptor is readable for more than messages, or another turn has taken them."""

    async def main():
        got = []
        server = wire.RouterSocket(address, lambda who, payload: server.send(who, payload))
        client = wire.DealerSocket(server.address, got.append)
        for i in range(3):
            for socket in (server, client):
                socket._drain(True)
            client.send(b"%d" % i)
            await until(lambda n=i + 1: len(got) == n)
        client.close()
        client._drain(True)
        server.close()

    run(main())


def test_of_several_frames_from_the_router_the_first_counts(tmp_path):
    """Those of ours send one."""

    async def main():
        got = []
        server = zmq.Context.instance().socket(zmq.ROUTER)
        server.bind(f"ipc://{tmp_path}/s")
        client = wire.DealerSocket(f"ipc://{tmp_path}/s", got.append)
        client.send(b"first")
        who, payload = await asyncio.to_thread(server.recv_multipart)
        server.send_multipart([who, payload, b"more", b"and more"])
        server.send_multipart([who, b"next"])
        await until(lambda: len(got) == 2)
        assert got == [b"first", b"next"]
        client.close()
        server.close()

    run(main())


def test_a_broken_connection_is_told(tmp_path):
    async def main():
        lost, heard = threading.Event(), []
        server = wire.RouterSocket(f"ipc://{tmp_path}/s", lambda who, payload: heard.append(payload))
        client = wire.DealerSocket(server.address, print, on_lost=lost.set)
        client.send(b"x")
        await until(lambda: heard)
        assert not lost.is_set()
        server.close()
        await until(lost.is_set)
        client.close()

    run(main())


def test_a_link_knows_that_its_connection_has_broken(tmp_path):
    """Once for each time, and not before there was one."""

    async def main():
        heard = []
        with wire.Link(f"ipc://{tmp_path}/s", monitored=True) as link, wire.Link(f"ipc://{tmp_path}/s") as other:
            link.send(b"x")
            assert not link.broke()
            for _ in range(2):
                server = wire.RouterSocket(f"ipc://{tmp_path}/s", lambda who, payload: heard.append(payload))
                await until(lambda: heard)
                assert not link.broke()
                server.close()
                await until(link.broke)
                assert not link.broke() and not other.broke()
                heard.clear()
                link.send(b"y")

    run(main())


def test_curve_admits_those_who_know_the_key_and_keeps_roles_apart(tmp_path):
    path = str(tmp_path / "key")
    keys.make_secret_key(path)
    assert (tmp_path / "key").stat().st_mode & 0o77 == 0
    with pytest.raises(FileExistsError):
        keys.make_secret_key(path)
    clients, workers = keys.public_suffix(path, "clients"), keys.public_suffix(path, "workers")
    assert clients != workers

    async def main():
        heard = []
        server = wire.RouterSocket(
            "tcp://127.0.0.1:*", lambda who, payload: heard.append(payload), key=keys.load_secret_key(path, "clients")
        )
        sockets = [wire.DealerSocket(server.address + suffix, print) for suffix in ("", workers, clients)]
        for name, socket in zip([b"plain", b"wrong", b"right"], sockets, strict=True):
            socket.send(name)
        await until(lambda: heard)
        await asyncio.sleep(0.1)
        assert heard == [b"right"]
        for socket in sockets:
            socket.close()
        server.close()

    run(main())


def test_addresses_that_cannot_be_used_say_why(tmp_path):
    async def main():
        for bad, why in [
            ("127.0.0.1:5555", "expected tcp://"),
            ("tcp://127.0.0.1", "HOST:PORT"),
            ("ipc://" + "x" * 120, "107 bytes"),
            ("tcp://127.0.0.1:1#abc", "64 hex digits"),
            ("tcp://127.0.0.1:65536", "a number up to 65535"),
            ("tcp://127.0.0.1:x", "a number up to 65535"),
            ("tcp://127.0.0.1:*", "Invalid argument"),
        ]:
            with pytest.raises(ValueError, match=why):
                wire.DealerSocket(bad, print)
        for open_to_all in ("tcp://0.0.0.0:*", "tcp://*:0", "tcp://10.1.2.3:5", "tcp://[::]:*"):
            with pytest.raises(ValueError, match="curve-secret-key"):
                wire.RouterSocket(open_to_all, print)
        first = wire.RouterSocket("tcp://127.0.0.1:*", print)
        with pytest.raises(OSError, match="cannot listen on"):
            wire.RouterSocket(first.address, print)
        first.close()
        (tmp_path / "bad").write_text("not a key")
        with pytest.raises(ValueError, match="keygen"):
            keys.load_secret_key(str(tmp_path / "bad"), "clients")

    run(main())


def test_an_ipc_path_that_is_served_is_not_taken_over(tmp_path):
    async def main():
        first = wire.RouterSocket(f"ipc://{tmp_path}/s", print)
        with pytest.raises(OSError, match="Address already in use"):
            wire.RouterSocket(first.address, print)
        first.close()
        await asyncio.sleep(0.05)
        (tmp_path / "s").touch()  # what a process that was killed leaves behind
        wire.RouterSocket(f"ipc://{tmp_path}/s", print).close()

    run(main())


def test_a_port_for_http_is_shared_only_by_those_who_agree():
    with ports.bind_http("127.0.0.1", 0, shared=True) as first:
        port = first.getsockname()[1]
        first.listen()
        ports.bind_http("127.0.0.1", port, shared=True).close()
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use; --port"):
            ports.bind_http("127.0.0.1", port)


def test_loopback():
    assert addresses.is_loopback("tcp://127.0.0.9:1") and addresses.is_loopback("tcp://[::1]:1")
    assert addresses.is_loopback("tcp://localhost:1") and addresses.is_loopback("ipc:///tmp/x")
    assert not addresses.is_loopback("tcp://0.0.0.0:1") and not addresses.is_loopback("tcp://example.org:1")
