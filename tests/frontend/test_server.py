"""What the process of a front end says in the log."""

from __future__ import annotations

import logging
import socket

import pytest

from radixrt.config import FrontendConfig, RouterConfig
from radixrt.frontend.server import FrontendThread, listen
from radixrt.router.server.loop import RouterServer
from radixrt.router.server.process import RouterThread
from radixrt.wire.keys import make_secret_key


@pytest.mark.parametrize("level", ["INFO", "DEBUG"])
def test_requests_that_are_none_are_for_those_who_debug(caplog, level):
    caplog.set_level(level)
    front = FrontendThread(FrontendConfig(tokenizer="none", router="inproc://nowhere", port=0))
    try:
        with socket.create_connection(("127.0.0.1", int(front.url.rpartition(":")[2]))) as client:
            client.sendall(b"\0 no request\r\n\r\n")
            assert b" 400 " in client.recv(1000)
    finally:
        front.stop()
    found = [(r.name, r.levelname) for r in caplog.records if "Invalid HTTP request" in r.getMessage()]
    assert found == ([("radixrt.frontend", "DEBUG")] if level == "DEBUG" else [])
    assert not any(r.name.startswith("uvicorn") for r in caplog.records if r.levelno > logging.DEBUG)
    assert not logging.getLogger("uvicorn").handlers and not logging.getLogger("uvicorn.error").handlers


def test_where_it_listens(caplog):
    caplog.set_level("INFO")
    with listen(FrontendConfig(port=0, host="::1")) as sock:
        assert f"listening on http://[::1]:{sock.getsockname()[1]}" in caplog.text


def test_where_a_router_listens_and_who_can_read_its_key(caplog, tmp_path):
    caplog.set_level("INFO")
    key = tmp_path / "key"
    make_secret_key(str(key))
    settings = {"tokenizer": "none", "client_address": "tcp://127.0.0.1:*", "worker_address": "tcp://127.0.0.1:*"}
    for mode, warned in ((0o600, False), (0o640, True)):
        key.chmod(mode)
        router = RouterThread(RouterConfig(curve_secret_key=str(key), **settings))
        server: RouterServer = router.server
        router.stop()
        where = f"listening on {server.client_address} for clients, {server.worker_address} for workers"
        assert where in caplog.text and "*" not in where
        assert ("can be read by others" in caplog.text) == warned
