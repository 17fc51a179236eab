"""Traces of program runs: a tree of branches, with a line for each step and its time.

with trace() as t:
    debate.run(client, "Is tea better?")
print(t.text())
Path("trace.html").write_text(t.html())
"""

from __future__ import annotations

import contextvars
import time
from typing import Self

from radixrt.lang.show import to_html, to_text
from radixrt.lang.steps import Run

_current: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("radixrt trace", default=None)


class Trace:
    """The `runs` of programs that began inside its `with` block. See `trace`."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self._origin = time.monotonic()
        self._token: contextvars.Token[Trace | None] | None = None

    def __enter__(self) -> Self:
        self._token = _current.set(self)
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._token is not None:
            _current.reset(self._token)

    def begin(self, program: str) -> Run:
        run = Run(program, self._origin, time.monotonic() - self._origin)
        self.runs.append(run)
        return run

    def text(self) -> str:
        """The trace as text for a terminal."""
        return to_text(self.runs)

    def html(self) -> str:
        """The trace as a self-contained HTML page."""
        return to_html(self.runs)


def trace() -> Trace:
    """Trace the programs that begin inside `with trace() as t`, in this thread and in the tasks that it creates.

    `t.text()` and `t.html()` show them, also while they run. Traced gens are streamed, to record when their first token
    arrives."""
    return Trace()


def begin_run(program: str) -> Run | None:
    """The record of a run that begins now; None without a trace."""
    current = _current.get()
    return None if current is None else current.begin(program)
