"""Starts the processes of `radixrt serve`, restarts them, and stops them in order.

    parent --stdin pipe--> router (with the front end, if there is a single one), workers, front ends

A child reads its configuration from the pipe (one line of JSON, so that API keys are in no argument list), and exits
when the pipe closes, however its parent has ended. The router writes to another pipe once it listens; only then are the
other children started. Children are in sessions of their own, so Ctrl-C reaches only the parent. It stops front ends,
then workers, then the router, and kills those that do not exit in time. Before that it lets the router drain (see
`shutdown`). By a third pipe a child shows that it makes progress; one that does not is killed, and started again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Self

from radixrt import wire
from radixrt.config import (
    FrontendConfig,
    RouterConfig,
    StackConfig,
    WorkerConfig,
    check,
    client_address,
    http_url,
    resolve,
)
from radixrt.formats.parsing.detect import check_parsers
from radixrt.launch.process_main import check_address, say_leave
from radixrt.launch.pull import here
from radixrt.process.ports import check_host, free_tcp_address, keep_port
from radixrt.process.shutdown import DRAINED, IDLE, Pulses
from radixrt.process.starting import POLL_SECONDS, StartError, ask_health, ended, worker_configs
from radixrt.process.subprocesses import (
    HANG_CODE,
    RESTART_CODE,
    SILENT_SECONDS,
    Child,
    start_subprocess,
    stop_subprocesses,
)
from radixrt.process.tls import tls_context
from radixrt.wire.addresses import PASSWORD
from radixrt.wire.keys import public_suffix

if TYPE_CHECKING:
    from radixrt.launch.ray_workers import RayWorkers

log = logging.getLogger("radixrt.launch")

RESTART_SECONDS = 1.0
"""A worker or front end that has failed while another one serves is restarted after this long. The delay doubles each
time that it did not run for STEADY_SECONDS, up to MAX_SECONDS."""
STEADY_SECONDS = 600.0
MAX_SECONDS = 60.0


@dataclass(slots=True)
class Incarnation:
    """How a worker or a front end is started, and when it is to be restarted."""

    name: str
    start: Callable[[], Child]
    began: float
    """When it was last started."""
    delay: float = RESTART_SECONDS / 2
    """Delay of the last restart, in seconds."""
    due: float | None = None
    """When it is to be restarted; None while it runs."""
    role: str = "worker"
    replaced: bool = False
    """Until it is restarted: it was ended because it is to be replaced, so it is, even if it was the last one."""


class Stack:
    """The processes of `radixrt serve`. `start` returns when all serve, `watch` when the stack is to be stopped. Raises
    ValueError for invalid settings."""

    def __init__(self, config: StackConfig) -> None:
        check_stack(config)
        config = with_client_address(config)
        router = config.router
        self._client_address, self._worker_address = reachable_addresses(router)
        if config.data_parallel_backend == "mp":
            near, password = near_address(), secrets.token_hex(32)
            self._worker_address = f"{near}#{PASSWORD}{password}"
            router = dataclasses.replace(router, near_address=near, near_password=password)
        self._config = dataclasses.replace(config, router=router)
        self._subprocesses: list[Child] = []
        self._incarnations: dict[str, Incarnation] = {}
        self._stopping = threading.Event()
        self._hurry = threading.Event()
        """Set if the stack is to stop without waiting for requests."""
        self._port = config.frontend.port
        self._port_holder: socket.socket | None = None
        """A bound socket that reserves the port for several front ends."""
        self._ray_workers: RayWorkers | None = None

    def request_stop(self, *_signal: int | FrameType | None) -> None:
        """Make `start` or `watch` return soon; the second time, make `drain` and `stop` do so. May be called in a
        signal handler."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    def start(self) -> None:
        """Start all processes, and wait until every worker and the front ends serve. Raises StartError."""
        config, began = self._config, time.monotonic()
        deadline = began + config.ready_timeout
        workers = self._worker_configs()
        frontend = self._frontend_config()
        # A single front end runs in the router's process, which saves each request two hops between processes.
        http = resolve(frontend) if config.api_server_count == 1 else None
        self._start_router(http, deadline)
        if self._stopping.is_set():
            return
        for worker in workers:
            self._launch("worker", worker.name, functools.partial(self._start_worker, worker))
        for number in range(config.api_server_count if http is None else 0):
            name = f"frontend-{number}"
            start = functools.partial(start_subprocess, "frontend", name, frontend, config.log_level)
            self._launch("frontend", name, start)
        self._wait(deadline)
        if not self._stopping.is_set():
            places = [f"HTTP {http_url(frontend, self._port)}"] if config.api_server_count else []
            places.append(f"ZMQ {config.router.client_address}")
            if config.router.worker_address:
                places.append(f"{config.router.worker_address} for workers")
            log.info("ready after %.1f s: %s", time.monotonic() - began, ", ".join(places))

    def _frontend_config(self) -> FrontendConfig:
        """The configuration of each front end. If there are several, this reserves the port that they share."""
        config = self._config
        several = config.api_server_count > 1
        frontend = dataclasses.replace(
            config.frontend,
            router=self._client_address,
            share_sessions=config.frontend.share_sessions or several or bool(config.router.state_path),
            shares_port=several,
        )
        if several:
            self._port_holder = keep_port(frontend.host, frontend.port)
            self._port = self._port_holder.getsockname()[1]
        return dataclasses.replace(frontend, port=self._port)

    def _start_router(self, http: FrontendConfig | None, deadline: float) -> None:
        """Start the router and wait until it listens. Workers must not start earlier: if the router of another stack
        has the address, they would join that, and replace its workers of the same names."""
        ours, theirs = os.pipe()
        with open(ours, "rb") as ready:
            try:
                config = dataclasses.replace(self._config.router, http=http, tells=theirs)
                child = start_subprocess("router", "router", config, self._config.log_level, pipe=theirs)
            finally:
                os.close(theirs)
            self._subprocesses.append(child)
            poll = select.poll()
            poll.register(ready, select.POLLIN)
            while not self._stopping.is_set():
                if time.monotonic() > deadline:
                    raise StartError("the router did not listen in time")
                if poll.poll(POLL_SECONDS * 1000):
                    if line := ready.readline():
                        self._port = int(line) or self._port
                        return
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.process.wait(1.0)
                    stop_subprocesses([child])
                    raise ended(child.name, child.process.returncode)

    def _launch(self, role: str, name: str, start: Callable[[], Child]) -> None:
        """Start a worker or a front end for the first time."""
        self._incarnations[name] = Incarnation(name, start, time.monotonic(), role=role)
        self._subprocesses.append(start())

    def _worker_configs(self) -> list[WorkerConfig]:
        config = self._config
        if config.data_parallel_backend == "mp":
            return worker_configs(config, self._worker_address)
        from radixrt.launch.ray_workers import RayWorkers

        self._ray_workers = RayWorkers(config)
        return self._ray_workers.configs(config.workers)

    def _start_worker(self, config: WorkerConfig) -> Child:
        if self._ray_workers:
            return self._ray_workers.start(config)
        return start_subprocess("worker", config.name, config, self._config.log_level)

    def _wait(self, deadline: float) -> None:
        """Wait until all workers and the front ends serve. Raises StartError if a process ends before, or after
        `deadline`."""
        serving = 0
        with wire.Link(self._client_address) as link:
            while not self._stopping.is_set():
                for child in self._subprocesses:
                    if not child.alive:
                        raise ended(child.name, child.process.returncode)
                if time.monotonic() > deadline:
                    raise StartError(f"{serving} of {self._config.workers} workers were ready in time")
                health = ask_health(link, POLL_SECONDS)
                serving = len(health["workers"]) if health else 0
                if serving >= self._config.workers and self._listens():
                    return
                self._stopping.wait(POLL_SECONDS)

    def _listens(self) -> bool:
        """Whether HTTP connections are accepted; True without front ends."""
        if not self._config.api_server_count:
            return True
        host = self._config.frontend.host
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
        try:
            socket.create_connection((host, self._port), timeout=1.0).close()
        except OSError:
            return False
        return True

    def watch(self) -> int:
        """Restart workers and front ends that fail while another one serves, or that make no progress. Returns an exit
        code: 0 when asked to stop, 1 when the router, all workers or all front ends have ended."""
        while not self._stopping.wait(POLL_SECONDS):
            self._end_silent(time.monotonic())
            ended = [child for child in self._subprocesses if not child.alive]
            for child in ended:
                self._bury(child)
            roles = {child.role for child in self._subprocesses} | self._replaced_roles()
            wanted = {"router", "worker"} | ({"frontend"} if self._config.api_server_count > 1 else set())
            if missing := wanted - roles:
                log.error("no %s is left: stopping", " and no ".join(sorted(missing)))
                return 1
            now = time.monotonic()
            for child in ended:
                self._expect(child, now)
            self._revive(now)
        return 0

    def _end_silent(self, now: float) -> None:
        """Kill the children that make no progress, and those that were restarted and do not begin to serve."""
        for child in self._subprocesses:
            incarnation = self._incarnations.get(child.name)
            late = incarnation is not None and now - incarnation.began > self._config.ready_timeout
            killed = child.end_if_silent(self._silent_seconds(child), now)
            if late and not killed and child.pulses is not None and not child.pulses.count:
                log.error("%s (pid %s) does not begin to serve: killed", child.name, child.process.pid)
                child.process.kill()
                killed = True
            if killed:
                if incarnation is not None:
                    incarnation.replaced = True
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.process.wait(1.0)

    def _silent_seconds(self, child: Child) -> float:
        if child.role != "worker":
            return SILENT_SECONDS[child.role]
        return min(SILENT_SECONDS["worker"], self._config.worker.watchdog_timeout or math.inf)

    def _replaced_roles(self) -> set[str]:
        """Roles of children that will be back."""
        return {incarnation.role for incarnation in self._incarnations.values() if incarnation.replaced}

    def _bury(self, child: Child) -> None:
        """Remove a child that has ended. For a worker, tell the router, as it may have died without a Leave."""
        code, incarnation = child.process.returncode, self._incarnations.get(child.name)
        log.log(
            logging.INFO if code == RESTART_CODE else logging.ERROR,
            "%s (pid %s) ended with code %s", child.name, child.process.pid, code,
        )  # fmt: skip
        if incarnation is not None and code in (RESTART_CODE, HANG_CODE):
            incarnation.replaced = True
        self._subprocesses.remove(child)
        stop_subprocesses([child])
        if child.role == "worker":
            say_leave(self._worker_address, child.name, f"exit code {child.process.returncode}", child.process.pid)

    def _expect(self, child: Child, now: float) -> None:
        """Schedule the restart of a child that has ended, unless its exit code is 0: it was told to stop then."""
        if child.process.returncode == RESTART_CODE:
            self._incarnations[child.name].due = now
        elif child.process.returncode:
            incarnation = self._incarnations[child.name]
            incarnation.delay = (
                RESTART_SECONDS if now - incarnation.began > STEADY_SECONDS else min(2 * incarnation.delay, MAX_SECONDS)
            )
            incarnation.due = now + incarnation.delay
            log.warning("%s is started again in %.0f s", incarnation.name, incarnation.delay)

    def _revive(self, now: float) -> None:
        """Restart what is due."""
        for incarnation in self._incarnations.values():
            if incarnation.due is not None and now >= incarnation.due:
                incarnation.began, incarnation.due, incarnation.replaced = now, None, False
                self._subprocesses.append(incarnation.start())

    def drain(self) -> None:
        """Let the router refuse new requests, and wait until those in flight are finished and the front ends have sent
        their answers: for up to --shutdown-timeout, and until `request_stop` is called once more."""
        began = time.monotonic()
        (router,) = (child for child in self._subprocesses if child.role == "router")
        fronts = [
            (child, pulses) for child in self._subprocesses if child.role == "frontend" and (pulses := child.pulses)
        ]
        if self._config.router.shutdown_timeout <= 0 or not router.alive or router.pulses is None:
            return
        router.process.send_signal(signal.SIGUSR1)
        counts: list[int] = []
        said = False
        while router.alive and time.monotonic() - began < self._config.router.shutdown_timeout:
            now = time.monotonic()
            for pulses in (router.pulses, *(pulses for _, pulses in fronts)):
                pulses.look(now)
            if router.pulses.state == DRAINED:
                counts = counts or [pulses.count for _, pulses in fronts]
                known = zip(fronts, counts, strict=True)
                if all(self._has_sent(pulses, count) or not child.alive for (child, pulses), count in known):
                    return
            if not said and now - began > 1.0:
                said = True
                log.info("requests are in flight: waiting for them; another signal ends them")
            if self._hurry.wait(POLL_SECONDS / 2):
                return

    @staticmethod
    def _has_sent(pulses: Pulses, count: int) -> bool:
        """Whether a front end was idle after it had shown `count` pulses."""
        return pulses.count > count + 1 and pulses.state == IDLE

    def stop(self) -> None:
        """Stop front ends, then workers, then the router. Returns when all have exited."""
        for role in ("frontend", "worker", "router"):
            stop_subprocesses((child for child in self._subprocesses if child.role == role), hurry=self._hurry)
        self._subprocesses.clear()
        if self._ray_workers is not None:
            self._ray_workers.close()
            self._ray_workers = None
        if self._port_holder is not None:
            self._port_holder.close()
            self._port_holder = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()


def with_client_address(config: StackConfig) -> StackConfig:
    """`config` with the ZMQ address for clients, which by default follows from the HTTP port: a free one for 0."""
    if config.router.client_address:
        return config
    port = config.frontend.port
    address = client_address(port) if port else free_tcp_address()
    return dataclasses.replace(config, router=dataclasses.replace(config.router, client_address=address))


def check_stack(config: StackConfig) -> None:
    """Raise ValueError, with a message of one line, if a setting is invalid."""
    for part in (config, config.router, config.worker, config.frontend):
        check(part)
    check_parsers(config.router.tool_call_parser, config.router.reasoning_parser)
    for name in ("client_address", "worker_address"):
        if address := getattr(config.router, name):
            check_address(name, address)
    tls_context(config.frontend)
    if config.api_server_count:
        check_host(config.frontend)


def reachable_addresses(router: RouterConfig) -> tuple[str, str]:
    """The addresses, with public keys, at which processes of this machine connect to the router: (client socket, worker
    socket or "")."""
    path = router.curve_secret_key
    addresses = []
    for address, role in ((router.client_address, "clients"), (router.worker_address, "workers")):
        if not address:
            addresses.append("")
            continue
        for anywhere in ("tcp://0.0.0.0:", "tcp://*:"):
            if address.startswith(anywhere):
                address = "tcp://127.0.0.1:" + address.removeprefix(anywhere)
        addresses.append(address + (public_suffix(path, role) if path else ""))
    return addresses[0], addresses[1]


def near_address() -> str:
    """An address of this machine for the workers that `serve` starts: a socket in Linux' abstract namespace, which is
    not a file; where there are none, a TCP port. Anybody on the machine can connect to either: it needs a password."""
    if sys.platform == "linux":
        name = f"radixrt-{uuid.uuid4().hex}"
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:  # a sandbox may forbid it
            probe.bind(f"\0{name}")
            return f"ipc://@{name}"
    return free_tcp_address()


def run_stack(config: StackConfig) -> int:
    """`radixrt serve`: start, watch, drain, stop. Returns the exit code: 0 when asked to stop, 1 when something failed,
    2 when it could not start. Models of the hub are downloaded first."""
    check_stack(config)
    with Stack(here(config)) as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, stack.request_stop)
        try:
            stack.start()
        except StartError as error:
            if not error.told:
                log.error("%s", error)
            return 2
        code = stack.watch()
        if code == 0:
            stack.drain()
        return code
