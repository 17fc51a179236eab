"""Runs a process of the stack as router, worker or front end. Each role imports only what it needs."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from radixrt import wire
from radixrt.config import FrontendConfig, RouterConfig, WorkerConfig, check, flag
from radixrt.messages import Leave
from radixrt.process.gc_tuning import settle
from radixrt.process.open_files import raise_file_limit
from radixrt.process.shutdown import Pulse
from radixrt.process.subprocesses import HANG_CODE, INSIST_SECONDS, RESTART_CODE
from radixrt.wire.addresses import check_shared
from radixrt.wire.watch import watched
from radixrt.worker.setup import make_worker

if TYPE_CHECKING:
    from radixrt.worker.loop import Worker

log = logging.getLogger("radixrt.roles")

ROLES = {"router": RouterConfig, "worker": WorkerConfig, "frontend": FrontendConfig}
ORPHAN_SECONDS = 10.0
"""A process that has not exited this long after its parent has ended exits at once."""


def read_config(role: str) -> Any:
    """Read the configuration that the parent process has written to stdin."""
    return msgspec.json.decode(sys.stdin.buffer.readline(), type=ROLES[role])


def follow_parent() -> None:
    """From now on, this process ends when its stdin closes: it sends itself SIGTERM, which it takes twice in order to
    wait for nothing, and exits after ORPHAN_SECONDS in any case."""

    def watch() -> None:
        # Not by sys.stdin.read: a daemon thread that holds sys.stdin's lock would abort the interpreter at exit.
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(INSIST_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_SECONDS - INSIST_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def check_role(config: Any) -> None:
    """Raise ValueError, with a message of one line, if a setting of a process is invalid."""
    check(config)
    if isinstance(config, RouterConfig):
        if config.client_address:
            check_address("client_address", config.client_address, listens=True)
        if config.worker_address:
            check_address("worker_address", config.worker_address, listens=True)
        elif not config.near_address:
            raise ValueError("--worker-address: a router needs one for its workers, such as tcp://127.0.0.1:5556")
    else:
        check_address("router", config.router)


def check_address(name: str, address: str, *, listens: bool = False) -> None:
    """Raise ValueError, with the flag of the setting `name`, for an address that cannot connect processes (see
    `check_shared`)."""
    try:
        check_shared(address, listens=listens)
    except ValueError as problem:
        raise ValueError(f"{flag(name)}: {problem}") from None


def run_role(role: str, config: Any, pulse: Pulse | None = None) -> int:
    """Run as a process of `role` until SIGTERM or SIGINT. Returns its exit code. `pulse` shows its parent that it gets
    on."""
    if role != "worker":
        raise_file_limit()
    match role:
        case "router":
            if config.http:
                from radixrt.frontend import server

                server.run_with_router(config, pulse)
            else:
                from radixrt.router.server import process

                process.run(config, pulse)
        case "frontend":
            from radixrt.frontend import server

            with watched(config.router):
                server.run(config, pulse)
        case "worker":
            worker = make_worker(config)
            worker.on_hang = functools.partial(_end_hanging, config, worker)
            worker.on_beat = pulse.beat if pulse else None
            settle()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: worker.drain())
            with watched(config.router):
                _serve(worker)
            for number in (signal.SIGTERM, signal.SIGINT):  # a second signal must not interrupt the exit
                signal.signal(number, signal.SIG_IGN)
            from radixrt.worker.status import INCARNATION

            say_leave(config.router, config.name, "stopped", os.getpid(), INCARNATION, planned=True)
            return _code(config, worker)
    return 0


def _code(config: WorkerConfig, worker: Worker) -> int:
    """The exit code of a worker that has left its loop. Ends the process here if threads are still at work in C++."""
    from radixrt.worker.structured.fair import is_at_work

    code = RESTART_CODE if worker.restart else 0
    if worker.dismissed:  # it did not end as it was told to: whoever has started it is to know
        log.error("worker %s ends: %s", config.name, worker.dismissed)
        code = 1
    if is_at_work():
        logging.shutdown()
        os._exit(code)
    return code


def _end_hanging(config: WorkerConfig, worker: Worker) -> None:
    """End this process, whose main thread may wait on the device for ever, with those of its other ranks. Its log shows
    where the threads are."""
    from radixrt.worker.status import INCARNATION

    with contextlib.suppress(Exception):
        faulthandler.dump_traceback()
        worker.runner.kill()
        say_leave(config.router, config.name, "it makes no progress", os.getpid(), INCARNATION)
    os._exit(HANG_CODE)


def _serve(worker: Worker) -> None:
    """Run until told to stop. If the device is lost, or the ranks no longer agree, the process ends at once: kernels on
    the GPU may wait for ever, for example for a rank that is gone."""
    from radixrt.worker.plan import DeviceLost, GroupLost

    try:
        worker.run()
    except (DeviceLost, GroupLost):
        log.exception("the worker ends")
        os._exit(1)


def say_leave(
    router: str, name: str, reason: str, pid: int | None, incarnation: int = 0, *, planned: bool = False
) -> None:
    """Tell the router that worker `name` has ended, if it is the process with this `pid` (None: any) and `incarnation`
    (0: any). `planned` as in a Leave."""
    with wire.Link(router) as link:
        link.send(wire.encode(Leave(name, reason, pid or 0, incarnation, planned)))
        link.close(linger=1.0)
