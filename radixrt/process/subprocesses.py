"""Child processes, which end when their parent does."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import IO, Any, Protocol

import msgspec

from radixrt.process.shutdown import Pulses

log = logging.getLogger("radixrt.launch")

STOP_SECONDS = 10.0
"""A child that has not exited this long after SIGTERM is killed."""
INSIST_SECONDS, HURRIED_INSIST_SECONDS = 1.0, 0.2
"""After this time it gets another SIGTERM: it may wait for requests in flight, and ends at once then. (Two signals at
the same time would count as one.)"""
HURRIED_STOP_SECONDS = 3.0
"""As STOP_SECONDS, if everything is to end at once."""
SILENT_SECONDS = {"router": 30.0, "frontend": 30.0, "worker": 60.0}
"""A child that has not shown for this long that it makes progress is killed."""
RESTART_CODE = 75
"""Exit code of a worker that was told to end in order to be started again."""
HANG_CODE = 70
"""Exit code of a worker that ends because it makes no progress."""


class Process(Protocol):
    """The part of subprocess.Popen's interface that is used. The process may run on another machine (`ray_workers`)."""

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

    def send_signal(self, sig: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Child:
    """A child process, with its role ("router", "worker", "frontend") and name."""

    role: str
    name: str
    process: Process
    pulses: Pulses | None = None
    """None for a process on another machine."""

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def end_if_silent(self, seconds: float, now: float) -> bool:
        """Kill the process if it makes no progress any more: it has shown some before, and not for `seconds`. Returns
        whether it was killed."""
        silent = None if self.pulses is None else self.pulses.look(now)
        if silent is None or silent <= seconds:
            return False
        log.error("%s (pid %s) has made no progress for %.0f s: killed", self.name, self.process.pid, silent)
        self.process.kill()
        return True


def start_subprocess(role: str, name: str, config: Any, log_level: str = "info", *, pipe: int | None = None) -> Child:
    """Start a process `radixrt ROLE`, which reads its configuration from stdin, and exits when stdin closes. It
    inherits the file descriptor `pipe`, under the same number."""
    ours, theirs = os.pipe()
    pulses = Pulses(ours)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "radixrt", "--log-level", log_level, role, "--config-from-stdin"]
            + ["--pulse", str(theirs)],
            stdin=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(theirs,) if pipe is None else (pipe, theirs),
        )
    finally:
        os.close(theirs)
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        log.warning("%s ended at once", name)
    return Child(role, name, process, pulses)


def stop_subprocesses(children: Iterable[Child], hurry: threading.Event | None = None) -> None:
    """Terminate all children, wait for them up to STOP_SECONDS (HURRIED_STOP_SECONDS once `hurry` is set), and kill
    those that are left."""
    children = list(children)
    began = time.monotonic()
    _terminate(children)
    insisted = False
    while left := [child for child in children if child.alive]:
        passed = time.monotonic() - began
        hurried = hurry is not None and hurry.is_set()
        if passed > (HURRIED_STOP_SECONDS if hurried else STOP_SECONDS):
            for child in left:
                log.warning("%s does not stop: killed", child.name)
                child.process.kill()
                child.process.wait()
            break
        if not insisted and passed > (HURRIED_INSIST_SECONDS if hurried else INSIST_SECONDS):
            insisted = True
            _terminate(left)
        with contextlib.suppress(subprocess.TimeoutExpired):
            left[0].process.wait(0.05)
    for child in children:
        if child.process.stdin is not None:
            child.process.stdin.close()
        if child.pulses is not None:
            child.pulses.close()


def _terminate(children: Iterable[Child]) -> None:
    for child in children:
        if child.alive:
            child.process.terminate()


def tell_parent(pipe: int | None, port: int = 0) -> None:
    """Write to the file descriptor `pipe` (None: nothing to do) that this process listens now: its HTTP port (0: none)
    and a line feed."""
    if pipe is not None:
        with contextlib.suppress(BrokenPipeError), open(pipe, "wb") as parent:
            parent.write(b"%d\n" % port)
