"""Runs a router and workers as threads of this process."""

from __future__ import annotations

import dataclasses
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any, Self

from radixrt import wire
from radixrt.config import FrontendConfig, RouterConfig, StackConfig, WorkerConfig, check, resolve
from radixrt.process.starting import POLL_SECONDS, StartError, ask_health, worker_configs
from radixrt.worker.setup import make_worker

if TYPE_CHECKING:
    from radixrt.worker.loop import Worker


class LocalStack:
    """A context manager that runs a router and workers as threads of this process.

    `address` is the ZMQ address for clients; by default it is inproc, so only threads of this process can connect.
    Raises ValueError or OSError if the configuration cannot be served.
    """

    def __init__(self, config: StackConfig, *, client_address: str = "") -> None:
        for part in (config, config.router, config.worker):
            check(part)
        unique = uuid.uuid4().hex
        self.address = client_address or f"inproc://radixrt-clients-{unique}"
        worker_address = f"inproc://radixrt-workers-{unique}"
        self._router = dataclasses.replace(config.router, client_address=self.address, worker_address=worker_address)
        self._worker_configs = worker_configs(config, worker_address)
        self._ready_timeout = config.ready_timeout
        self._workers: list[Worker] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        from radixrt.router.server.process import RouterThread

        self._router_thread = RouterThread(self._router)
        try:
            for config in self._worker_configs:
                self._workers.append(make_worker(config))
                self._threads.append(threading.Thread(target=self._workers[-1].run, name=config.name))
                self._threads[-1].start()
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _wait(self) -> None:
        deadline = time.monotonic() + self._ready_timeout
        with wire.Link(self.address) as link:
            while True:
                health = ask_health(link, POLL_SECONDS)
                if health and len(health["workers"]) == len(self._workers):
                    return
                if time.monotonic() > deadline:
                    raise StartError("the workers were not ready in time")
                time.sleep(POLL_SECONDS / 20)

    def __exit__(self, *_exc: object) -> None:
        for worker in self._workers:
            worker.stop()
        self._router_thread.stop_workers()  # an idle worker notices `stop` only when a message arrives
        for thread in self._threads:
            thread.join()
        self._router_thread.stop()


def local_stack(model: str, **worker: Any) -> LocalStack:
    """A LocalStack with one worker for the checkpoint folder `model`. Keywords are fields of WorkerConfig."""
    router = resolve(RouterConfig(model=model))
    return LocalStack(StackConfig(router, WorkerConfig(model=model, **worker), FrontendConfig()))
