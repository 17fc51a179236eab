"""Workers on the machines of a Ray cluster. Ray chooses the machines and notices when one is lost; the workers join the
router over ZMQ, as workers on this machine do. radixrt and the model's files must be on each machine.

    this machine             another one
    Stack --- Ray actor ---> Host --stdin pipe--> worker
      router <------------- ZMQ ------------------'
"""

from __future__ import annotations

import logging
import math
import subprocess
import time
from dataclasses import replace
from typing import IO, Any

from radixrt.config import RouterConfig, StackConfig, WorkerConfig
from radixrt.process.subprocesses import SILENT_SECONDS, Child, start_subprocess
from radixrt.wire.addresses import is_loopback
from radixrt.wire.keys import public_suffix

log = logging.getLogger("radixrt.fleet")

ANYWHERE = ("tcp://0.0.0.0:", "tcp://*:")
DEVICES = ("auto", "cpu", "cuda")
POLL_SECONDS = 1.0
"""How often a host looks after its worker."""
WANTED = (
    "--worker-address: workers that Ray places need one; give --worker-address tcp://0.0.0.0:PORT and "
    "--curve-secret-key (radixrt keygen)"
)


class Host:
    """A Ray actor: the parent process of one worker, on the worker's machine. The worker ends when its actor does."""

    def __init__(self, config: WorkerConfig, log_level: str) -> None:
        self._child = start_subprocess("worker", config.name, config, log_level)
        self._process = self._child.process
        self._silent_seconds = min(SILENT_SECONDS["worker"], config.watchdog_timeout or math.inf)

    def pid(self) -> int | None:
        return self._process.pid

    def ended(self) -> int:
        """Wait until the worker ends. Returns its exit code. Kills it if it makes no progress."""
        while True:
            try:
                return self._process.wait(POLL_SECONDS)
            except subprocess.TimeoutExpired:
                self._child.end_if_silent(self._silent_seconds, time.monotonic())

    def terminate(self) -> None:
        self._process.terminate()

    def send_signal(self, sig: int) -> None:
        self._process.send_signal(sig)


class Remote:
    """A worker that Ray places, as a `subprocesses.Process`. While it waits for free resources, it counts as
    running."""

    stdin: IO[bytes] | None = None

    def __init__(self, ray: Any, name: str, actor: Any) -> None:
        self._ray = ray
        self._name = name
        self._actor = actor
        self._pid = actor.pid.remote()
        self._ended = actor.ended.remote()
        self.returncode: int | None = None

    @property
    def pid(self) -> int | None:
        ready, _ = self._ray.wait([self._pid], timeout=0)
        try:
            return self._ray.get(ready[0]) if ready else None
        except self._ray.exceptions.RayError:
            return None

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self._name, timeout or 0.0)
        return code

    def _look(self, seconds: float | None) -> int | None:
        if self.returncode is None:
            ready, _ = self._ray.wait([self._ended], timeout=seconds)
            if ready:
                self.returncode = self._code(ready[0])
                self._ray.kill(self._actor)  # otherwise it would keep its GPUs reserved
        return self.returncode

    def _code(self, ended: Any) -> int:
        try:
            return self._ray.get(ended)
        except self._ray.exceptions.RayError as error:  # the actor or its machine was lost
            log.error("%s: %s", self._name, str(error).strip().splitlines()[0])
            return 1

    def terminate(self) -> None:
        if self.pid is not None:
            self._actor.terminate.remote()
        elif self.returncode is None:  # the actor was not placed yet
            self.kill()
            self.returncode = 0

    def kill(self) -> None:
        self._ray.kill(self._actor)

    def send_signal(self, sig: int) -> None:
        self._actor.send_signal.remote(sig)


class RayWorkers:
    """Starts workers on a Ray cluster. Raises ValueError if Ray is not installed, if there is no cluster, or if it has
    too few GPUs."""

    def __init__(self, config: StackConfig) -> None:
        self._ray = ray = _import_ray()
        self._pattern = pattern = config.worker
        self._log_level = config.log_level
        if pattern.device not in DEVICES:
            raise ValueError(f"device {pattern.device}: Ray says which GPUs a worker has; expected cuda or cpu")
        try:
            ray.init(address=config.ray_address, log_to_driver=True, logging_level=logging.WARNING)
        except ConnectionError as error:
            raise ValueError(
                f"ray_address {config.ray_address}: no cluster is there ({error}); `ray start --head` makes one"
            ) from None
        try:
            self._gpus = _gpus(pattern, config.workers, ray.cluster_resources())
            self.worker_address = _worker_address(config.router, ray)
        except BaseException:
            ray.shutdown()
            raise

    def configs(self, workers: int) -> list[WorkerConfig]:
        """The configurations of the workers. They are not resolved: defaults depend on the worker's machine."""
        names = (f"worker-{number}" for number in range(workers))
        return [replace(self._pattern, name=name, router=self.worker_address) for name in names]

    def start(self, config: WorkerConfig) -> Child:
        """Start a worker on any machine with free resources, as soon as there is one. Ray sets CUDA_VISIBLE_DEVICES."""
        ray = self._ray
        room = {"num_gpus": self._gpus, "num_cpus": 1 if self._gpus else config.cpu_threads or 1}
        host = ray.remote(Host).options(**room, max_concurrency=3, scheduling_strategy="SPREAD", name=None)
        return Child("worker", config.name, Remote(ray, config.name, host.remote(config, self._log_level)))

    def close(self) -> None:
        """Disconnect from the cluster, which ends the remaining actors."""
        self._ray.shutdown()


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ValueError("data_parallel_backend ray: Ray is missing (pip install 'radixrt[ray]')") from None
    return ray


def _gpus(pattern: WorkerConfig, workers: int, resources: dict[str, float]) -> int:
    """The number of GPUs of each worker: one for each rank, or 0 on CPUs. Raises ValueError if the cluster has too
    few."""
    have, each = int(resources.get("GPU", 0)), pattern.tensor_parallel_size
    if pattern.fake or pattern.device == "cpu" or (pattern.device == "auto" and not have):
        return 0
    if have < workers * each:
        raise ValueError(f"workers: {workers} of {each} GPUs each need {workers * each}, the Ray cluster has {have}")
    return each


def _worker_address(router: RouterConfig, ray: Any) -> str:
    """The address, with the public key, at which machines of the cluster connect to the router's worker socket. Raises
    ValueError if they cannot."""
    address, here = router.worker_address, ray.util.get_node_ip_address()
    if not address:
        raise ValueError(WANTED)
    machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    if is_loopback(address) and machines != {here}:
        raise ValueError(
            f"worker_address {address}: the cluster's other machines do not reach it; give "
            "--worker-address tcp://0.0.0.0:PORT and --curve-secret-key (radixrt keygen)"
        )
    for anywhere in ANYWHERE:
        if address.startswith(anywhere):
            address = f"tcp://{here}:{address.removeprefix(anywhere)}"
    path = router.curve_secret_key
    return address + (public_suffix(path, "workers") if path else "")
