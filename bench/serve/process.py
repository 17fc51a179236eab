"""A client in a process of its own, which gets a line of JSON for each piece of work, and answers with one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import msgspec

from bench.serve.endpoint import RunFailed

try:
    from uvloop import run as run_loop
except ImportError:
    from asyncio import run as run_loop

Result = TypeVar("Result")
"""Has a field `error`: why it failed, or an empty string."""


def first_reason(error: BaseException) -> str:
    """The message of an error, or of the first one in a group, which mostly is the cause of the others."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


def work_off(run: Callable[[Any], Awaitable[Any]], work: type, result: type) -> None:
    """The main function of a client's process: run what stdin asks for, of type `work`, until it ends."""
    for line in sys.stdin.buffer:
        try:
            found = run_loop(run(msgspec.json.decode(line, type=work)))
        except Exception as error:
            found = result(error=first_reason(error))
        sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
        sys.stdout.buffer.flush()


class ClientProcess(Generic[Result]):
    """Starts `python -m MODULE`, and sends it work."""

    def __init__(self, module: str, result: type[Result]) -> None:
        root = Path(__file__).resolve().parents[2]
        command = [sys.executable, "-m", module]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root)
        self._result = result

    def run(self, work: Any) -> Result:
        """Run one piece of work, which has a `name`. Raises RunFailed if it or the process fails."""
        self._process.stdin.write(msgspec.json.encode(work) + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        run = msgspec.json.decode(line, type=self._result) if line else self._result(error="the client's process ended")
        if run.error:
            raise RunFailed(f"{work.name}: {run.error}")
        return run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
