"""Processes that another one starts, and that end with it."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, Any, Protocol

import msgspec

log = logging.getLogger("radixrt.launch")

STOP_SECONDS = 10.0
"""Time that a child has to leave after it was told to, before it is killed."""


class Process(Protocol):
    """What is used of subprocess.Popen; see there. A process may run on another machine (`fleet`)."""

    stdin: IO[bytes] | None

    @property
    def pid(self) -> int | None:
        """On its machine; None while it has none."""

    @property
    def returncode(self) -> int | None:
        """None while it runs, as far as `poll` and `wait` have seen."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Child:
    role: str
    name: str
    process: Process

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


def start_child(role: str, name: str, config: Any, log_level: str = "info", *, pipe: int | None = None) -> Child:
    """A process `radixrt ROLE`, which reads its configuration from stdin and leaves when that closes. It has the file
    descriptor `pipe`, too, under the same number."""
    process = subprocess.Popen(
        [sys.executable, "-m", "radixrt", "--log-level", log_level, role, "--config-from-stdin"],
        stdin=subprocess.PIPE,
        start_new_session=True,
        pass_fds=() if pipe is None else (pipe,),
    )
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        log.warning("%s ended at once", name)
    return Child(role, name, process)


def stop_children(children: Iterable[Child], seconds: float = STOP_SECONDS) -> None:
    """Tell all of them, wait for all of them, kill those that stay."""
    children = list(children)
    for child in children:
        if child.alive:
            child.process.terminate()
    deadline = time.monotonic() + seconds
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("%s does not stop: killed", child.name)
            child.process.kill()
            child.process.wait()
        if child.process.stdin is not None:
            child.process.stdin.close()


def tell_parent(pipe: int | None, port: int = 0) -> None:
    """That this process listens, and on which port for HTTP (0: none), if there is a parent that wants to know."""
    if pipe is not None:
        with contextlib.suppress(BrokenPipeError), open(pipe, "wb") as parent:
            parent.write(b"%d\n" % port)
