"""What stacks of processes and of threads share: the configuration of each worker, and the wait until all serve."""

from __future__ import annotations

import dataclasses
import os
import signal
from typing import Any

from radixrt import wire
from radixrt.config import StackConfig, WorkerConfig, gpu_count, resolve
from radixrt.messages import Ask, ClientReply, Info

POLL_SECONDS = 0.1
TOLD_CODE = 2
"""Exit code of a process that could not start, and has written a line that says why."""

_client_reply = wire.Decoder(ClientReply)


class StartError(RuntimeError):
    """The stack could not be started: a process ended, or was not ready in time. `told`: that process has said why."""

    def __init__(self, text: str, *, told: bool = False) -> None:
        super().__init__(text)
        self.told = told


def ended(name: str, code: int | None) -> StartError:
    """What is said of a process that has ended with `code`, as `subprocess` has it, before it served."""
    if code is None or code >= 0:
        return StartError(f"{name} ended with code {code} while starting", told=code == TOLD_CODE)
    number = signal.Signals(-code)
    why = ", as the system does if memory runs out" if number is signal.SIGKILL else ""
    return StartError(f"{name} was ended by {number.name} while starting{why}")


def ask_health(link: wire.Link, seconds: float) -> dict[str, Any] | None:
    """The router's health (see `AsyncClient.health`); None if it does not reply within `seconds`."""
    link.drain()
    link.send(wire.encode(Ask(id=0, what="health")))
    payload = link.recv(seconds)
    if payload is None:
        return None
    reply = _client_reply.decode(payload)
    return reply.data if isinstance(reply, Info) else None


def worker_configs(config: StackConfig, worker_address: str) -> list[WorkerConfig]:
    """The configuration of each worker on this machine: with its name, the router's address, and its GPU or its share
    of the CPU's threads. Raises ValueError if there are too few GPUs."""
    pattern = config.worker
    gpus = 0 if pattern.fake or pattern.device not in ("auto", "cuda") else gpu_count()
    ranks = config.workers * pattern.tensor_parallel_size
    if 0 < gpus < ranks:
        name = "workers" if config.workers > 1 else "tensor_parallel_size"
        each = f" of {pattern.tensor_parallel_size} GPUs each" if pattern.tensor_parallel_size > 1 else ""
        raise ValueError(f"{name}: {config.workers} workers{each} need {ranks} GPUs, this machine has {gpus}")
    configs = []
    for number in range(config.workers):
        changes: dict[str, Any] = {"name": f"worker-{number}", "router": worker_address}
        if gpus > 1:
            changes["device"] = f"cuda:{number * pattern.tensor_parallel_size}"
        if not gpus and not pattern.cpu_threads:
            changes["cpu_threads"] = max(1, len(os.sched_getaffinity(0)) // ranks)
        configs.append(resolve(dataclasses.replace(pattern, **changes)))
    return configs
