"""Which share of the machine each worker of a stack gets."""

from __future__ import annotations

import contextlib
import os
import socket
from types import SimpleNamespace

import pytest

from radixrt import cli, launch, roles, wire
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig
from radixrt.messages import Leave, ToRouter
from radixrt.worker.status import LIFE


def shares(monkeypatch, gpus: int, workers: int, **worker) -> list[tuple[str, int]]:
    """(device, threads) of each."""
    monkeypatch.setattr(launch, "gpu_count", lambda: gpus)
    monkeypatch.setattr("radixrt.config.gpu_count", lambda: gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    configs = launch.worker_configs(StackConfig(RouterConfig(), WorkerConfig(**worker), FrontendConfig(), workers), "x")
    return [(config.device, config.cpu_threads) for config in configs]


def test_workers_have_gpus_of_their_own(monkeypatch):
    assert shares(monkeypatch, 1, 1) == [("cuda", 0)]
    assert shares(monkeypatch, 4, 2) == [("cuda:0", 0), ("cuda:1", 0)]
    assert shares(monkeypatch, 4, 2, tensor_parallel_size=2) == [("cuda:0", 0), ("cuda:2", 0)]


def test_workers_share_the_cores(monkeypatch):
    assert shares(monkeypatch, 0, 2) == [("cpu", 8)] * 2
    assert shares(monkeypatch, 0, 2, tensor_parallel_size=4) == [("cpu", 2)] * 2, "those of each rank"
    assert shares(monkeypatch, 0, 2, cpu_threads=3) == [("cpu", 3)] * 2


@pytest.mark.parametrize(
    ("gpus", "workers", "ranks", "words"),
    [
        (1, 2, 1, "workers: 2 workers need 2 GPUs, this machine has 1"),
        (4, 2, 4, "workers: 2 workers of 4 GPUs each need 8 GPUs, this machine has 4"),
        (1, 1, 2, "tensor_parallel_size: 1 workers of 2 GPUs each need 2 GPUs"),
        (0, 1, 0, "tensor_parallel_size 0: expected 1 or more"),
    ],
)
def test_too_few_gpus(monkeypatch, gpus, workers, ranks, words):
    with pytest.raises(ValueError, match=words):
        shares(monkeypatch, gpus, workers, tensor_parallel_size=ranks)


@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--tp-size"])
def test_the_flags_of_other_engines(flag):
    args = cli.build_parser().parse_args(["serve", "nano", flag, "2"])
    assert cli.from_args(WorkerConfig, args).tensor_parallel_size == 2


def test_a_free_address_is_given_to_nobody_else():
    """Else two stacks that start at the same time may take each other's ports."""
    given = {int(launch.free_tcp_address().rpartition(":")[2]) for _ in range(50)}
    others = set()
    for _ in range(3000):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            others.add(sock.getsockname()[1])
    assert len(given) == 50 and not given & others
    for port in given:
        socket.create_server(("127.0.0.1", port)).close()


def test_a_worker_that_ends_says_which_process_it_was(monkeypatch):
    """In another container one of its name may have its pid."""
    said = []

    class Link(contextlib.nullcontext):
        def __enter__(self) -> Link:
            return self

        def close(self, linger: float) -> None: ...

        def send(self, payload: bytes) -> None:
            said.append(wire.Decoder(ToRouter).decode(payload))

    monkeypatch.setattr(wire, "Link", Link)
    monkeypatch.setattr(roles, "make_worker", lambda config: SimpleNamespace(run=lambda: None, dismissed=""))
    monkeypatch.setattr(roles, "settle", lambda: None)
    monkeypatch.setattr(roles.signal, "signal", lambda *_: None)
    roles.run_role("worker", WorkerConfig(name="w", router="tcp://127.0.0.1:1"))
    assert said == [Leave("w", "stopped", os.getpid(), LIFE)] and LIFE
