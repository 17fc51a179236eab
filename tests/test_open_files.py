"""Open files: the limit that processes get, and what goes on when there are no more."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from radixrt.client import Client
from radixrt.config import FrontendConfig, RouterConfig, resolve
from radixrt.launch import process_main
from radixrt.process import open_files
from radixrt.process.open_files import ConnectionLimit, FileWatch
from radixrt.process.ports import free_tcp_address
from tests.checkpoints import make_tokenizer
from tests.waiting import eventually

LIMIT = 160


def test_the_soft_limit_is_raised_to_the_hard_one():
    limited = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 150))"
    code = f"{limited}; from radixrt.process.open_files import raise_file_limit; print(raise_file_limit())"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "150\n"


@pytest.mark.parametrize(("role", "raised"), [("router", 1), ("frontend", 1), ("worker", 0)])
def test_processes_with_connections_raise_their_limit(monkeypatch, role, raised):
    calls = []
    monkeypatch.setattr(process_main, "raise_file_limit", lambda: calls.append(role))
    for name in (
        "radixrt.router.server.process.run",
        "radixrt.frontend.server.run",
        "radixrt.launch.process_main.make_worker",
    ):
        monkeypatch.setattr(name, stop)
    with pytest.raises(InterruptedError):
        process_main.run_role(
            role, resolve(process_main.ROLES[role](router="inproc://x") if role != "router" else RouterConfig())
        )
    assert len(calls) == raised


def stop(*_: object) -> None:
    raise InterruptedError


@pytest.mark.parametrize(
    ("limit", "most"), [(160, 96), (1024, 896), (1 << 20, 917_504), (20, 1), (resource.RLIM_INFINITY, 1 << 30)]
)
def test_connections_leave_files_for_others(monkeypatch, limit, most):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert open_files.max_connections() == most


def test_a_limit_that_is_reached_is_told_once(caplog):
    limit = ConnectionLimit(10)
    assert [limit.admits(count) for count in (9, 10, 11, 10, 12, 11)] == [True, True, False, True, False, False]
    assert len(caplog.records) == 1
    assert limit.admits(5) and not limit.admits(11) and len(caplog.records) == 2


def test_that_files_run_out_is_told_once(caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    watch, dup = FileWatch("it waits"), os.dup

    def none(_: int) -> int:
        raise OSError(24, "Too many open files")

    watch.look()
    monkeypatch.setattr(os, "dup", none)
    watch.look()
    watch.look()
    assert [record.levelname for record in caplog.records] == ["ERROR"] and "it waits" in caplog.text
    monkeypatch.setattr(os, "dup", dup)
    watch.look()
    watch.look()
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


@contextlib.contextmanager
def limited(config: RouterConfig, log: Path) -> Iterator[subprocess.Popen]:
    """A router whose process may open LIMIT files."""
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT}, {LIMIT}))"
    code = f"{limited}; from radixrt import cli; cli.main(['router', '--config-from-stdin'])"
    command = [sys.executable, "-c", code]
    with log.open("wb") as err, subprocess.Popen(command, stdin=subprocess.PIPE, stderr=err) as process:
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
        try:
            yield process
        finally:
            process.terminate()


def test_a_process_without_files_serves_those_who_are_connected(tmp_path):
    """A router with an HTTP front end, at first with too many HTTP connections, then with too many ZMQ ones."""
    folder, log = str(make_tokenizer(tmp_path)), tmp_path / "log"
    clients, workers, port = free_tcp_address(), free_tcp_address(), int(free_tcp_address().rpartition(":")[2])
    config = RouterConfig(model=folder, client_address=clients, worker_address=workers)
    config = dataclasses.replace(config, http=resolve(FrontendConfig(model=folder, port=port)))
    url, zmq_port = f"http://127.0.0.1:{port}", int(clients.rpartition(":")[2])

    def connect(stack: contextlib.ExitStack, port: int, count: int) -> None:
        for _ in range(count):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=1))

    with limited(resolve(config), log) as process, contextlib.ExitStack() as crowd:
        eventually(lambda: "listening" in log.read_text() and is_served(url), 20)
        with Client(clients) as client, httpx.Client(base_url=url) as kept:
            assert kept.get("/version").status_code == 200
            connect(crowd, port, LIMIT - 64)
            answer = httpx.get(url + "/version")
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
            assert kept.get("/version").status_code == 200 and "serving" in client.health()
            with contextlib.suppress(TimeoutError):
                connect(crowd, zmq_port, LIMIT)
            eventually(lambda: "no more files can be opened" in log.read_text(), 10)
            assert kept.get("/version").status_code == 200 and "serving" in client.health()
            crowd.close()
            eventually(lambda: is_served(url), 10)
            assert "serving" in client.health() and process.poll() is None
    said = log.read_text()
    assert said.count("more get status 503") == 1 and said.count("no more files can be opened") == 1


def is_served(url: str) -> bool:
    try:
        return httpx.get(url + "/version").status_code == 200
    except httpx.HTTPError:
        return False
