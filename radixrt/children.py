"""Child processes, which end when their parent does."""

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
"""A child that has not exited this long after SIGTERM is killed."""


class Process(Protocol):
    """The part of subprocess.Popen's interface that is used. The process may run on another machine (`fleet`)."""

    stdin: IO[bytes] | None

    @property
    def pid(self) -> int | None:
        """The process id on its machine; None if it has not started yet."""

    @property
    def returncode(self) -> int | None:
        """The exit code; None while the process runs. Updated by `poll` and `wait`."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Child:
    """A child process, with its role ("router", "worker", "frontend") and name."""

    role: str
    name: str
    process: Process

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


def start_child(role: str, name: str, config: Any, log_level: str = "info", *, pipe: int | None = None) -> Child:
    """Start a process `radixrt ROLE`, which reads its configuration from stdin, and exits when stdin closes. It
    inherits the file descriptor `pipe`, under the same number."""
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
    """Terminate all children, wait for them up to `seconds`, and kill those that are left."""
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
    """Write to the file descriptor `pipe` (None: nothing to do) that this process listens now: its HTTP port (0: none)
    and a line feed."""
    if pipe is not None:
        with contextlib.suppress(BrokenPipeError), open(pipe, "wb") as parent:
            parent.write(b"%d\n" % port)
