"""What strangers can do at the router's sockets: foreign protocols, others' identities."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import uvloop
import zmq

from radixrt import wire
from radixrt.config import RouterConfig
from radixrt.messages import Ask, Generate, Info, Load, Output, Register, Sampling, StepDone, TokenPrompt
from radixrt.process.ports import free_tcp_address
from radixrt.router.server.process import RouterThread
from radixrt.wire.sockets import connect
from tests.waiting import eventually

SIGNATURE = b"\xff" + bytes(7) + b"\x01\x7f"
ABOUT = {"model": "m", "max_model_len": 64, "page_size": 1, "total_pages": 64, "max_running": 1}
EVIL = [wire.encode(Register(name="w0", pid=1, **ABOUT)), wire.encode(StepDone([Output(1, [666])], Load()))]


def old_frame(body: bytes) -> bytes:
    """A frame of ZMTP 1.0, which all bytes are a series of."""
    return (bytes([len(body) + 1]) if len(body) < 254 else b"\xff" + struct.pack(">Q", len(body) + 1)) + b"\0" + body


FRAMES = b"".join(old_frame(body) for body in EVIL)
POST = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n"
PADDED = b"x" * 4096 + FRAMES * 200
GREETINGS = {
    "a web page's request": POST % len(PADDED) + PADDED,
    "a web page's request that fits": POST % len(FRAMES) + FRAMES,
    "ZMTP 1.0": old_frame(b"") + FRAMES,
    "ZMTP 1.0 with an identity": old_frame(b"w0") + FRAMES,
    "ZMTP 1.0 with a signature": SIGNATURE + b"\0\5" + old_frame(b"w0") + FRAMES,
    "ZMTP 2.0": SIGNATURE + b"\1\5" + b"\0\0" + b"".join(b"\0" + bytes([len(body)]) + body for body in EVIL),
    "TLS": b"\x16\x03\x01" + PADDED,
}


def _note(heard: list, name: str, take, who: bytes, payload: bytes) -> None:
    heard.append((name, payload))
    take(who, payload)


@contextmanager
def router(**settings):
    addresses = {"client_address": "tcp://127.0.0.1:*", "worker_address": "tcp://127.0.0.1:*"}
    running = RouterThread(RouterConfig(tokenizer="none", **addresses | settings))
    heard: list[tuple[str, bytes]] = []
    for links, name in ((running.server._clients.socket, "client"), (running.server._workers._socket, "worker")):
        links._on_message = partial(_note, heard, name, links._on_message)
    try:
        yield running.server, heard
    finally:
        running.stop()


def health(address: str) -> dict:
    with wire.Link(address) as link:
        link.send(wire.encode(Ask(id=1, what="health")))
        reply = wire.Decoder(Info).decode(link.recv(10))
        return reply.data


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.mark.parametrize("greeting", GREETINGS)
def test_only_zmtp_3_is_heard(greeting):
    with router() as (server, heard):
        for address in (server.worker_address, server.client_address):
            with socket.create_connection(("127.0.0.1", port_of(address))) as stranger:
                try:
                    stranger.sendall(GREETINGS[greeting])
                    stranger.settimeout(0.1)
                    while stranger.recv(1 << 16):
                        pass
                except OSError:  # the connection is closed, or kept without an answer
                    pass
        assert health(server.client_address)["workers"] == []
        assert len(heard) == 1, "the question just asked"


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_only_own_workers_come_near(transport):
    """By a port of this machine where there are no Unix sockets without a file."""
    near = "ipc://@test-sockets-near" if transport == "ipc" else free_tcp_address()
    with router(worker_address="", near_address=near, near_password="sesame") as (server, heard):
        assert server.worker_address == ""
        for suffix in ("", "#plain:wrong", "#" + "0" * 64):
            with wire.Link(near + suffix, send_timeout=0.2) as stranger:
                with contextlib.suppress(TimeoutError):  # it was refused before
                    stranger.send(EVIL[0])
                time.sleep(0.05)
        with wire.Link(near + "#plain:sesame") as own:
            own.send(wire.encode(Register(name="own", **ABOUT)))
            eventually(lambda: [w["name"] for w in health(server.client_address)["workers"]] == ["own"])
        assert [payload for name, payload in heard if name == "worker"] == [wire.encode(Register(name="own", **ABOUT))]


def run(coroutine, seconds: float = 20.0):
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(coroutine, seconds))


def peer(address: str, identity: bytes, payload: bytes) -> zmq.Socket:
    """A client that calls itself so."""
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    dealer.linger = 0
    if identity:
        dealer.setsockopt(zmq.ROUTING_ID, identity)
    connect(dealer, address)
    dealer.send(payload)
    return dealer


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("transport", ["tcp://127.0.0.1:*", "ipc://@test-identities", "inproc://identities"])
def test_nobody_gets_what_is_another_peers(transport):
    """Be the identity claimed that of a peer that is there, was there, or will be."""

    async def main():
        heard = {}
        server = wire.RouterSocket(transport, lambda who, payload: heard.setdefault(payload, who))
        address = transport if "*" not in transport else server.address
        peers = [peer(address, b"", b"first"), peer(address, b"chosen", b"second")]
        await until(lambda: len(heard) == 2)
        first = heard[b"first"]
        number = struct.unpack(">I", first[1:])[0]
        claims = [first, heard[b"second"], b"chosen", *(b"\0" + struct.pack(">I", number + n) for n in range(1, 12))]
        peers += [peer(address, identity, b"thief %d" % n) for n, identity in enumerate(claims)]
        await until(lambda: len(heard) == 2 + len(claims))
        peers += [peer(address, b"", b"late %d" % n) for n in range(20)]  # one of the numbers may have been theirs
        await until(lambda: len(heard) == 22 + len(claims))
        assert len(set(heard.values())) == len(heard), "each has an identity of its own"
        for payload, who in heard.items():
            assert server.send(who, b"for " + payload)
        names = [b"first", b"second", *(b"thief %d" % n for n in range(len(claims)))]
        names += [b"late %d" % n for n in range(20)]
        for name, one in zip(names, peers, strict=True):
            assert await asyncio.to_thread(one.poll, 5000) and one.recv() == b"for " + name
            assert not one.poll(0)
        for one in peers:
            one.close()
        server.close()

    run(main())


def test_a_thief_reads_no_tenants_answer():
    """As it was: with handover, and an identity that could be guessed."""
    with router() as (server, heard):
        with wire.Link(server.worker_address) as worker, wire.Link(server.client_address) as tenant:
            worker.send(wire.encode(Register(name="w0", **ABOUT)))
            eventually(lambda: health(server.client_address)["workers"])
            secret = Generate(id=1, prompt=TokenPrompt(bytes(8)), sampling=Sampling(max_tokens=3))
            tenant.send(wire.encode(secret))
            eventually(lambda: server.core.runs_in_flight == 1)
            (who,) = server.core._requests
            thief = peer(server.client_address, who, wire.encode(Ask(id=9, what="models")))
            assert thief.poll(10_000) and wire.Decoder(Info).decode(thief.recv()).id == 9
            worker.send(wire.encode(StepDone([Output(1, [5, 6, 7], "length")], Load(), number=1)))
            assert b"deltas" in tenant.recv(10) and not thief.poll(50)
            thief.close()


ABORTS = """
import struct, sys, zmq
from radixrt.wire.sockets import bind, ignore_identities, open_socket
router = open_socket(zmq.ROUTER)
address = bind(router, "tcp://127.0.0.1:*")
if sys.argv[1:]:
    ignore_identities(router)
def connect(identity):
    dealer = open_socket()
    if identity:
        dealer.setsockopt(zmq.ROUTING_ID, identity)
    dealer.connect(address)
    dealer.send(b"x")
    assert router.poll(10_000)
    return router.recv_multipart()[0], dealer
number, first = connect(b"")
number = struct.unpack(">I", number[1:])[0]
peers = [connect(b"\\0" + struct.pack(">I", number + n))[1] for n in (1, 2, 3, 12, 13)]
peers += [connect(b"")[1] for _ in range(20)]
print("alive", flush=True)
for one in (first, *peers, router):
    one.close(0)
"""


def test_no_identity_makes_the_router_abort():
    """libzmq aborts where a peer has called itself what another one is numbered; not where names do not count."""
    named, numbered = (
        subprocess.run([sys.executable, "-c", ABORTS, *more], capture_output=True, timeout=60) for more in ((), ("1",))
    )
    assert (numbered.returncode, numbered.stdout) == (0, b"alive\n"), numbered.stderr
    if named.returncode == 0:
        pytest.skip("this libzmq does not abort")
    assert b"Assertion failed" in named.stderr


# ---------------------------------------------------------------- a browser

PAGE = """<!doctype html><title>page</title><script>
const body = Uint8Array.from(atob("BODY"), c => c.charCodeAt(0))
const send = port => fetch(`http://127.0.0.1:${port}/`, {method: "POST", mode: "no-cors", body}).catch(() => 0)
Promise.race([Promise.all([send(WORKER), send(CLIENT)]), new Promise(r => setTimeout(r, 2000))])
  .then(() => fetch("/sent", {method: "POST"}))
</script>"""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "headless_shell")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_a_web_page_has_no_effect(tmp_path):
    import base64

    with router() as (server, heard):
        page = PAGE.replace("BODY", base64.b64encode(PADDED).decode())
        page = page.replace("WORKER", str(port_of(server.worker_address)))
        (tmp_path / "index.html").write_text(page.replace("CLIENT", str(port_of(server.client_address))))
        sent = threading.Event()

        class Site(SimpleHTTPRequestHandler):
            def do_POST(self) -> None:
                sent.set()
                self.send_error(404)

            def log_message(self, *_args: object) -> None: ...

        site = ThreadingHTTPServer(("127.0.0.1", 0), partial(Site, directory=str(tmp_path)))
        threading.Thread(target=site.serve_forever).start()
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
        browser = subprocess.Popen(
            [*command, f"http://127.0.0.1:{site.server_port}/"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            assert sent.wait(60), "the page was not shown"
            assert heard == [] and health(server.client_address)["workers"] == []
        finally:
            browser.kill()
            browser.wait()
            site.shutdown()
            site.server_close()
