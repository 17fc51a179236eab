"""Workers that Ray places: by what stands for Ray here, and on a cluster of two nodes where Ray is installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import psutil
import pytest

from radixrt.client import Client
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, resolve
from radixrt.launch import ray_workers as fleet
from radixrt.launch.launcher import Stack
from radixrt.launch.ray_workers import Host, RayWorkers
from radixrt.messages import Sampling
from radixrt.process.ports import free_tcp_address
from radixrt.process.shutdown import Pulses
from radixrt.process.starting import StartError
from radixrt.process.subprocesses import Child
from radixrt.wire.keys import make_secret_key, public_suffix
from tests.waiting import eventually

GREEDY = Sampling(max_tokens=8, temperature=0.0)
HERE, THERE = "10.0.0.1", "10.0.0.2"


def config(workers: int = 2, *, router: dict | None = None, **worker) -> StackConfig:
    addresses = {"client_address": free_tcp_address(), "worker_address": free_tcp_address()} | (router or {})
    settings = {"fake": "0,0.001", "max_total_tokens": 4096} | worker
    ours = resolve(RouterConfig(tokenizer="none", worker_timeout=2.0, **addresses))
    return StackConfig(
        ours, WorkerConfig(**settings), FrontendConfig(), workers, 0, data_parallel_backend="ray", ready_timeout=60.0
    )


# ---------------------------------------------------------------- what is asked of Ray


class StandIn:
    """Ray without a cluster: resources are what the test says, and actors wait until they are told to end."""

    def __init__(self, machines: list[str], resources: dict[str, float]) -> None:
        self.options: list[dict] = []
        self.killed: list[object] = []
        self.is_open = False
        self._machines, self._resources = machines, resources
        self.exceptions = SimpleNamespace(RayError=LookupError)
        self.util = SimpleNamespace(get_node_ip_address=lambda: HERE)

    def init(self, address: str, **_settings) -> None:
        if address == "nowhere":
            raise ConnectionError("Could not find any running Ray instance.")
        self.is_open = True

    def shutdown(self) -> None:
        self.is_open = False

    def nodes(self) -> list[dict]:
        dead = {"NodeManagerAddress": "10.0.0.9", "Alive": False}
        return [dead, *({"NodeManagerAddress": machine, "Alive": True} for machine in self._machines)]

    def cluster_resources(self) -> dict[str, float]:
        return self._resources

    def remote(self, actor: type) -> StandIn:
        assert actor is Host
        return SimpleNamespace(options=self._options)

    def _options(self, **options) -> SimpleNamespace:
        self.options.append(options)
        return SimpleNamespace(remote=lambda config, log_level: Actor())

    def wait(self, refs: list, timeout: float | None) -> tuple[list, list]:
        assert timeout is not None or refs[0].value is not None, "it would wait for ever"
        return ([refs[0]], []) if refs[0].value is not None else ([], refs)

    def get(self, ref: SimpleNamespace) -> int:
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value

    def kill(self, actor: object) -> None:
        self.killed.append(actor)


class Actor:
    def __init__(self) -> None:
        self.answers = {"pid": SimpleNamespace(value=None), "ended": SimpleNamespace(value=None)}

    def __getattr__(self, name: str) -> SimpleNamespace:
        if name == "terminate":
            return SimpleNamespace(remote=lambda: setattr(self.answers["ended"], "value", 0))
        return SimpleNamespace(remote=lambda: self.answers[name])


@pytest.fixture
def ray(monkeypatch):
    """A cluster of two machines with four GPUs each."""
    found = StandIn([HERE, THERE], {"GPU": 8.0, "CPU": 32.0})
    monkeypatch.setitem(sys.modules, "ray", found)
    return found


@pytest.fixture
def key(tmp_path):
    make_secret_key(str(tmp_path / "key"))
    return str(tmp_path / "key")


def open_to_all(key: str) -> dict[str, str]:
    return {"worker_address": "tcp://0.0.0.0:5556", "curve_secret_key": key}


def test_a_host_ends_a_worker_that_does_not_get_on(monkeypatch):
    """On its machine: its exit code is that of one that failed, so another one is started."""
    ours, theirs = os.pipe()
    os.write(theirs, b".")
    process = subprocess.Popen(["sleep", "60"])
    child = Child("worker", "worker-0", process, Pulses(ours))
    monkeypatch.setattr(fleet, "start_subprocess", lambda *_: child)
    monkeypatch.setattr(fleet, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(fleet, "SILENT_SECONDS", {"worker": 0.1})
    host = Host(WorkerConfig(name="worker-0"), "info")
    assert host.pid() == process.pid and host.ended() == -signal.SIGKILL
    child.pulses.close()
    os.close(theirs)


def test_a_worker_has_its_ranks_gpus(ray, key):
    fleet = RayWorkers(config(3, router=open_to_all(key), fake="", tensor_parallel_size=2))
    first, *_ = configs = fleet.configs(3)
    assert [c.name for c in configs] == ["worker-0", "worker-1", "worker-2"]
    assert first.router == f"tcp://{HERE}:5556" + public_suffix(key, "workers")
    assert first.device == "auto", "which is decided on its machine"
    fleet.start(first)
    assert ray.options[0]["num_gpus"] == 2 and ray.options[0]["num_cpus"] == 1


@pytest.mark.parametrize("settings", [{"fake": "", "device": "cpu"}, {"fake": "0,0"}])
def test_what_needs_no_gpu_holds_none(ray, key, settings):
    fleet = RayWorkers(config(99, router=open_to_all(key), cpu_threads=4, **settings))
    fleet.start(fleet.configs(1)[0])
    assert ray.options[0]["num_gpus"] == 0 and ray.options[0]["num_cpus"] == 4


@pytest.mark.parametrize(
    ("workers", "settings", "words"),
    [
        (5, {"fake": "", "tensor_parallel_size": 2}, "workers: 5 of 2 GPUs each need 10, the Ray cluster has 8"),
        (1, {"device": "cuda:1"}, "device cuda:1: Ray says which GPUs"),
        (1, {"router": {}}, "worker_address tcp://127.0.0.1:.*do not reach it"),
    ],
)
def test_what_the_cluster_has_no_room_for(ray, key, workers, settings, words):
    with pytest.raises(ValueError, match=words):
        RayWorkers(config(workers, **{"router": open_to_all(key)} | settings))
    assert not ray.is_open


def test_a_cluster_of_this_machine_alone_needs_no_key(ray):
    ray._machines = [HERE]
    assert RayWorkers(config(1)).worker_address.startswith("tcp://127.0.0.1:")


def test_no_cluster(ray):
    with pytest.raises(ValueError, match="ray_address nowhere: no cluster is there"):
        RayWorkers(dataclasses.replace(config(), ray_address="nowhere"))


def test_no_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"pip install 'radixrt\[ray\]'"), Stack(config()) as stack:
        stack.start()
    assert not psutil.Process().children()


def test_a_worker_there_is_as_one_here(ray, key):
    fleet = RayWorkers(config(1, router=open_to_all(key)))
    worker = fleet.start(fleet.configs(1)[0])
    answers = worker.process._actor.answers
    assert worker.alive and worker.process.pid is None, "Ray looks for room"
    with pytest.raises(subprocess.TimeoutExpired):
        worker.process.wait(0.1)
    answers["pid"].value = 77
    assert worker.process.pid == 77
    worker.process.terminate()
    assert not worker.alive and worker.process.returncode == 0
    assert len(ray.killed) == 1, "what it held is free again"
    assert worker.process.wait() == 0


def test_what_waits_for_room_ends_at_once(ray, key):
    fleet = RayWorkers(config(1, router=open_to_all(key)))
    worker = fleet.start(fleet.configs(1)[0])
    worker.process.terminate()
    assert not worker.alive and worker.process.wait(0) == 0
    assert len(ray.killed) == 1


def test_a_machine_that_is_gone_ends_its_worker(ray, key, caplog):
    fleet = RayWorkers(config(1, router=open_to_all(key)))
    worker = fleet.start(fleet.configs(1)[0])
    for ref in worker.process._actor.answers.values():
        ref.value = LookupError("The actor died because its node has died.\nmore")
    assert not worker.alive and worker.process.returncode == 1 and worker.process.pid is None
    assert "its node has died" in caplog.text


# ---------------------------------------------------------------- on a cluster


@pytest.fixture(scope="module")
def cluster():
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed (make test-ray)")
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    found.add_node(num_cpus=1)
    yield found
    found.shutdown()


def workers_of(client: Client) -> list[str]:
    return sorted(worker["name"] for worker in client.health()["workers"])


def processes() -> list[psutil.Process]:
    """Workers that run on this machine."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = process.info["cmdline"] or []
        if "radixrt" in line and "worker" in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


@pytest.mark.filterwarnings("default")
def test_workers_on_a_cluster(cluster):
    """They serve; one that is killed is started again; when the stack stops, they end."""
    settings = dataclasses.replace(config(2), ray_address=cluster.address)
    with Stack(settings) as stack:
        stack.start()
        watcher = threading.Thread(target=stack.watch)
        watcher.start()
        try:
            with Client(settings.router.client_address) as client:
                _check_workers(stack, client)
        finally:
            stack.request_stop()
            watcher.join(10)
    eventually(lambda: not processes(), 10)


def _check_workers(stack: Stack, client: Client) -> None:
    def pid_of(name: str) -> int | None:
        return next((child.process.pid for child in stack._subprocesses if child.name == name), None)

    assert workers_of(client) == ["worker-0", "worker-1"]
    assert len(client.generate([1, 2, 3], GREEDY).token_ids) == 8
    eventually(lambda: pid_of("worker-0") and pid_of("worker-1"))
    victim = pid_of("worker-0")
    assert {victim, pid_of("worker-1")} <= {process.pid for process in processes()}
    os.kill(victim, signal.SIGKILL)
    eventually(lambda: pid_of("worker-0") not in (None, victim))
    eventually(lambda: workers_of(client) == ["worker-0", "worker-1"])


@pytest.mark.filterwarnings("default")
def test_no_room_on_a_cluster(cluster):
    """More workers than CPUs: one of them waits for room, and the start ends in time."""
    settings = dataclasses.replace(config(3), ray_address=cluster.address, ready_timeout=15.0)
    with Stack(settings) as stack, pytest.raises(StartError, match="2 of 3 workers were ready in time"):
        stack.start()
    eventually(lambda: not processes(), 10)
