"""Fixtures that run programs against two fake workers in threads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from radixrt.client import Client
from radixrt.client.local import LocalStack
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.frontend.server import FrontendThread
from tests.alike import workers_alike
from tests.checkpoints import make_tokenizer
from tests.waiting import eventually


@pytest.fixture(scope="package", autouse=True)
def _workers_alike() -> Iterator[None]:
    with workers_alike():
        yield


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    path = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    (path / "config.json").write_text(json.dumps({"vocab_size": 512}))
    return path


def stack(folder, fake: str = "0,0", **router) -> LocalStack:
    worker = WorkerConfig(model=str(folder), fake=fake, served_model_name="m")
    config = resolve(RouterConfig(model=str(folder), served_model_name="m", **router))
    return LocalStack(StackConfig(config, worker, FrontendConfig(), workers=2))


@contextmanager
def reached(transport: str, folder, address: str) -> Iterator[str]:
    """Where clients find the router at `address`: over ZMQ itself, over HTTP a front end."""
    if transport == "zmq":
        yield address
        return
    frontend = FrontendThread(resolve(FrontendConfig(model=str(folder), served_model_name="m", router=address, port=0)))
    try:
        yield frontend.url
    finally:
        frontend.stop()


def wait_until_idle(client: Client) -> dict:
    """The server's health when nothing runs there: by the router's count and by the workers' own."""

    def idle() -> dict | None:
        health = client.health()
        return None if health["runs_in_flight"] or any(w["running"] for w in health["workers"]) else health

    return eventually(idle)


@pytest.fixture
def client(folder) -> Iterator[Client]:
    """A client of a new stack, so that each test begins with an empty cache."""
    with stack(folder) as running, Client(running.address) as client:
        yield client


@pytest.fixture
def slow(folder) -> Iterator[Client]:
    """A client of workers that take 5 ms per step."""
    with stack(folder, fake="0,0.005") as running, Client(running.address) as client:
        yield client
