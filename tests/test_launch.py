"""Which share of the machine each worker of a stack gets."""

from __future__ import annotations

import contextlib
import io
import os
import re
import socket
from types import SimpleNamespace

import pytest

from radixrt import cli, wire
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.frontend.server import listen
from radixrt.launch import launcher, process_main
from radixrt.messages import Leave, ToRouter
from radixrt.process import ports, starting, subprocesses
from radixrt.wire import watch
from radixrt.wire.addresses import is_loopback
from radixrt.worker import setup
from radixrt.worker.plan import DeviceLost, GroupLost
from radixrt.worker.status import INCARNATION
from tests.waiting import eventually


def shares(monkeypatch, gpus: int, workers: int, **worker) -> list[tuple[str, int]]:
    """(device, threads) of each."""
    monkeypatch.setattr(starting, "gpu_count", lambda: gpus)
    monkeypatch.setattr("radixrt.config.gpu_count", lambda: gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    stack = StackConfig(RouterConfig(), WorkerConfig(**worker), FrontendConfig(), workers)
    configs = starting.worker_configs(stack, "x")
    return [(config.device, config.cpu_threads) for config in configs]


def forbidden(*_kind):
    raise PermissionError(1, "Operation not permitted")


def test_own_workers_come_by_a_unix_socket(monkeypatch):
    """Where there are such without a file; else by a port of this machine."""
    monkeypatch.setattr(launcher.sys, "platform", "linux")
    first, second = (launcher.near_address() for _ in range(2))
    assert first != second and first.startswith("ipc://@radixrt-") and second.startswith("ipc://@radixrt-")
    with monkeypatch.context() as patch:
        patch.setattr(launcher, "free_tcp_address", lambda: "tcp://127.0.0.1:7")
        patch.setattr(launcher.socket, "socket", forbidden)
        assert launcher.near_address() == "tcp://127.0.0.1:7"
    monkeypatch.setattr(launcher.sys, "platform", "darwin")
    assert is_loopback(launcher.near_address())


def test_each_start_has_a_secret_for_its_workers():
    """Without --worker-address nobody else can join."""
    config = StackConfig(RouterConfig(), WorkerConfig(fake="0,0"), FrontendConfig())
    first, second = (launcher.Stack(config) for _ in range(2))
    for stack in (first, second):
        (worker,), router = stack._worker_configs(), stack._config.router
        assert worker.router == f"{router.near_address}#plain:{router.near_password}"
        assert not router.worker_address and len(router.near_password) == 64
    assert first._config.router.near_password != second._config.router.near_password


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
    ],
)
def test_too_few_gpus(monkeypatch, gpus, workers, ranks, words):
    with pytest.raises(ValueError, match=words):
        shares(monkeypatch, gpus, workers, tensor_parallel_size=ranks)


def test_the_zmq_port_moves_with_the_http_port():
    """So that two stacks live side by side. Where there is no such port, and of a router alone, it is the usual one."""

    def address(port: int, given: str = "") -> str:
        stack = StackConfig(RouterConfig(client_address=given), WorkerConfig(fake="0,0"), FrontendConfig(port=port))
        return launcher.Stack(stack)._client_address

    usual = "tcp://127.0.0.1:5555"
    assert address(8000) == address(443) == resolve(RouterConfig()).client_address == usual
    assert address(8001) == "tcp://127.0.0.1:5556" and address(7999) == "tcp://127.0.0.1:5554"
    assert address(8100, usual) == usual
    assert address(0) != address(0), "a free one each"


def test_a_free_address_is_given_to_nobody_else():
    """Else two stacks that start at the same time may take each other's ports."""
    given = {int(ports.free_tcp_address().rpartition(":")[2]) for _ in range(50)}
    others = set()
    for _ in range(3000):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            others.add(sock.getsockname()[1])
    assert len(given) == 50 and not given & others
    for port in given:
        socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("dismissed", ["", "another has this name"])
def test_a_worker_that_ends_says_which_process_it_was(monkeypatch, caplog, dismissed):
    """In another container one of its name may have its pid. If it was dismissed, that is a failure."""
    said = []

    class Link(contextlib.nullcontext):
        def __enter__(self) -> Link:
            return self

        def close(self, linger: float) -> None: ...

        def send(self, payload: bytes) -> None:
            said.append(wire.Decoder(ToRouter).decode(payload))

    monkeypatch.setattr(wire, "Link", Link)
    worker = SimpleNamespace(run=lambda: None, dismissed=dismissed, restart=False)
    monkeypatch.setattr(process_main, "make_worker", lambda config: worker)
    monkeypatch.setattr(process_main, "settle", lambda: None)
    monkeypatch.setattr(process_main.signal, "signal", lambda *_: None)
    code = process_main.run_role("worker", WorkerConfig(name="w", router="tcp://127.0.0.1:1"))
    assert code == (1 if dismissed else 0)
    assert said == [Leave("w", "stopped", os.getpid(), INCARNATION, planned=True)] and INCARNATION
    assert ("worker w ends: another" in caplog.text) == bool(dismissed)


@pytest.mark.parametrize("lost", [DeviceLost("illegal access"), GroupLost("rank 1")])
def test_a_worker_that_cannot_go_on_is_started_again(monkeypatch, lost):
    """It ends with a code other than 0, at once: nothing waits for what its GPU does not do."""
    codes = []
    monkeypatch.setattr(process_main.os, "_exit", codes.append)

    def run() -> None:
        raise lost

    process_main._serve(SimpleNamespace(run=run))
    assert codes == [1]


# ---------------------------------------------------------------- settings that cannot be


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--worker-timeout", ["0", "-1", "nan", "inf"]),
        ("--max-num-seqs", ["0"]),
        ("--max-num-batched-tokens", ["-1"]),
        ("--max-queued-requests", ["-1", "0"]),
        ("--port", ["99999", "-1"]),
        ("--host", ["0.0.0.0", "::"]),
        ("--api-server-count", ["-1"]),
        ("--workers", ["0", "-1"]),
        ("--tensor-parallel-size", ["0"]),
        ("--page-size", ["0"]),
        ("--cpu-threads", ["-2"]),
        ("--tokenizer-threads", ["0"]),
        ("--max-total-tokens", ["-5"]),
        ("--max-model-len", ["-1", str(10**30)]),
        ("--gpu-memory-utilization", ["0", "1.1"]),
        ("--device", ["foo", "cuda:", "cuda:x"]),
        ("--dtype", ["foo", "int3"]),
        ("--quantization", ["awq"]),
        ("--kv-cache-dtype", ["int3"]),
        ("--kv-scales", ["dynamic"]),
        ("--attention-backend", ["FLASH_ATTN"]),
        ("--tree-attention", ["maybe"]),
        ("--speculative-algorithm", ["EAGLE"]),
        ("--load-format", ["pt"]),
        ("--generation-config", ["/tmp"]),
        ("--tool-call-parser", ["lisp"]),
        ("--reasoning-parser", ["lisp"]),
        ("--data-parallel-backend", ["slurm"]),
        ("--fake", ["50000", "1,2,3", "a,b"]),
        ("--client-address", ["tcp://127.0.0.1:65536", "tcp://127.0.0.1:*", "tcp://127.0.0.1:0", "inproc://x", "foo"]),
        ("--worker-address", ["tcp://127.0.0.1:-1", "udp://127.0.0.1:1"]),
    ],
)
def test_settings_that_cannot_be_are_named_before_anything_is_started(monkeypatch, capsys, flag, values):
    monkeypatch.setattr(launcher, "start_subprocess", lambda *_, **__: pytest.fail("a child is started"))
    for value in values:
        assert cli.main(["serve", "nano", flag, value]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"radixrt serve: {flag}") and value in line
        assert any(words in line for words in ("expected", "a port is a number", "needs --api-key"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["frontend", "--router", "foo"],
        ["worker", "--router", "inproc://x"],
        ["worker", "--router", "tcp://127.0.0.1:1", "--name", "x" * 300],
        ["worker", "--router", "tcp://127.0.0.1:1", "--name", "a\nb"],
        ["router", "--worker-address", "tcp://127.0.0.1:99999"],
        ["router", "--session-tokens", "-1"],
        ["router", "--worker-address", ""],
    ],
)
def test_so_are_those_of_one_process(monkeypatch, capsys, arguments):
    monkeypatch.setattr(cli, "run_role", lambda *_: pytest.fail("it begins"))
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"radixrt {arguments[0]}: {arguments[-2]}") and len(line) < 200


def test_what_is_set_by_default_may_be():
    launcher.check_stack(StackConfig(RouterConfig(), WorkerConfig(), FrontendConfig()))
    for config in (WorkerConfig(router="ipc:///tmp/x"), RouterConfig(worker_address="tcp://127.0.0.1:*")):
        process_main.check_role(resolve(config))


def test_a_device_that_is_not_there(monkeypatch):
    def load(config: WorkerConfig) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled\nand more")

    monkeypatch.setattr("radixrt.worker.load.runner.load_runner", load)
    monkeypatch.setattr(setup, "gpu_count", lambda: 1)
    with pytest.raises(ValueError, match=r"--device cuda:1: there is none \(Torch not compiled with CUDA enabled\)$"):
        setup.make_runner(WorkerConfig(device="cuda:1"))
    for device in ("cuda:0", "cuda", "cpu"):
        with pytest.raises(AssertionError):
            setup.make_runner(WorkerConfig(device=device))


# ---------------------------------------------------------------- keys, logs


def test_keys_of_a_file(tmp_path, caplog, capsys):
    """What is on a command line anybody can see."""
    file = tmp_path / "keys"
    file.write_text("# ours\n\na:1\n  b:2 \n")
    file.chmod(0o600)
    args = cli.build_parser().parse_args(["serve", "nano", "--api-key", "c:3", "--api-key", f"@{file}"])
    cli.read_keys(args)
    assert cli.from_args(RouterConfig, args).api_key == cli.from_args(FrontendConfig, args).api_key
    assert (
        cli.from_args(RouterConfig, args).api_key == ("c:3", "a:1", "b:2")
        and "can be read by others" not in caplog.text
    )
    file.chmod(0o644)
    cli.read_keys(cli.build_parser().parse_args(["router", "--api-key", f"@{file}"]))
    assert "can be read by others" in caplog.text
    file.write_text("# none\n")
    assert cli.main(["serve", "nano", "--api-key", f"@{file}"]) == 2, "else it would be open to all"
    assert "there is no key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "words", "told"),
    [(2, "code 2", True), (1, "code 1", False), (-9, "by SIGKILL .* memory", False), (-11, "by SIGSEGV", False)],
)
def test_what_is_said_of_a_process_that_ended(code, words, told):
    """Nothing, if it has said why itself."""
    error = starting.ended("worker-0", code)
    assert re.match(f"worker-0 .*{words}", str(error)) and error.told is told


def test_children_log_as_their_parent(monkeypatch):
    run = []
    monkeypatch.setattr(launcher, "run_stack", lambda config: run.append(config) or 0)
    cli.main(["--log-level", "debug", "serve", "nano"])
    assert run[0].log_level == "debug"
    started = []

    def popen(command: list[str], **_more: object) -> SimpleNamespace:
        started.append(command)
        return SimpleNamespace(stdin=io.BytesIO())

    monkeypatch.setattr(subprocesses.subprocess, "Popen", popen)
    subprocesses.start_subprocess("worker", "w", WorkerConfig(), run[0].log_level)
    args = cli.build_parser().parse_args(started[0][3:])
    assert (args.command, args.log_level, args.config_from_stdin) == ("worker", "debug", True)


def test_what_is_said_of_a_router(caplog):
    caplog.set_level("INFO")
    presence = watch.Presence("tcp://10.0.0.1:5#key", 100.0)

    def said(connected: bool, *times: float, refused: bool = False) -> list[str]:
        caplog.clear()
        for now in times:
            presence.look(connected, refused, now)
        return [f"{record.levelname} {record.getMessage()}" for record in caplog.records]

    assert said(False, 101.0, 104.9) == []
    assert said(False, 105.0, 105.5) == ["WARNING no router at tcp://10.0.0.1:5: nobody answers"]
    assert "the key after # is wrong or missing" in said(False, 115.0, refused=True)[0]
    assert len(said(False, *range(116, 10_000))) < 25
    assert said(True, 10_000.0, 10_001.0) == ["INFO the router at tcp://10.0.0.1:5 is there"]
    assert said(False, 10_002.0, 10_003.0) == ["WARNING the router at tcp://10.0.0.1:5 is lost"]
    assert len(said(False, 10_008.0)) == 1
    assert len(said(True, 10_009.0)) == 1


def test_a_worker_without_a_router_says_so(caplog, monkeypatch):
    monkeypatch.setattr(watch, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.02)
    address = ports.free_tcp_address()
    with watch.watched(address):
        eventually(lambda: f"no router at {address}: nobody answers" in caplog.text)


def test_a_kept_port_is_nobody_elses_before_anybody_listens():
    with ports.keep_port("127.0.0.1", 0) as kept:
        port = kept.getsockname()[1]
        with pytest.raises(OSError, match="Address already in use"):
            ports.keep_port("127.0.0.1", port)
        with listen(FrontendConfig(port=port, shares_port=True)) as one:
            assert one.getsockname()[1] == port
