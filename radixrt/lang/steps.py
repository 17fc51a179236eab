"""What a trace records: the runs of programs, and their steps."""

from __future__ import annotations

import contextlib
import time
from asyncio import CancelledError
from collections.abc import Iterator
from dataclasses import dataclass, field

from radixrt.lang.errors import ProgramError, Site, Spent, message_of
from radixrt.messages import Usage


@dataclass(slots=True)
class Step:
    """A node of a branch, or a call of a tool or program. Times are in seconds since the trace began."""

    branch: str
    kind: str
    """`text`, `gen`, `select`, `tool`, `fork` or `program` (another program that was called on the branch)."""
    name: str
    """The name of a gen, select, tool or program; the role of a text."""
    site: Site
    began: float
    first: float | None = None
    """When the first token arrived."""
    ended: float | None = None
    usage: Usage = Usage()
    finish: str = ""
    """A gen's finish reason, the kind of error, or ""."""
    failed: bool = False
    """Whether it ended with an error, which `finish` names."""
    said: str = ""
    """The text of a text, gen or select; the result of a tool."""
    forks: tuple[str, ...] = ()
    """Paths of the branches that a fork created."""

    @property
    def seconds(self) -> float:
        return (self.ended or self.began) - self.began

    @property
    def asks(self) -> bool:
        """Whether the step is a request to the server."""
        return self.kind in ("gen", "select")


@dataclass(slots=True)
class Run:
    """The record of one program run."""

    program: str
    origin: float
    """When the trace began, by the clock that `now` reads."""
    began: float
    ended: float | None = None
    steps: list[Step] = field(default_factory=list)

    def now(self) -> float:
        return time.monotonic() - self.origin

    def begin(self, branch: str, kind: str, name: str, site: Site, said: str = "") -> Step:
        """Record a step that begins now."""
        step = Step(branch, kind, name, site, self.now(), said=said)
        self.steps.append(step)
        return step

    def end(self, step: Step, problem: BaseException | None = None) -> None:
        """A step ends now."""
        step.ended = self.now()
        if problem is not None:
            step.failed, step.finish = True, _finish_of(problem)

    @contextlib.contextmanager
    def timed(self, branch: str, kind: str, name: str, site: Site) -> Iterator[Step]:
        """A step that lasts as long as the block."""
        step = self.begin(branch, kind, name, site)
        try:
            yield step
        except BaseException as problem:
            self.end(step, problem)
            raise
        self.end(step)

    @property
    def seconds(self) -> float:
        return (self.now() if self.ended is None else self.ended) - self.began

    def by_branch(self) -> dict[str, list[Step]]:
        """Steps by branch path, parents first, in the order in which they began."""
        found: dict[str, list[Step]] = {"": []}
        for step in self.steps:
            found.setdefault(step.branch, []).append(step)
            for path in step.forks:
                found.setdefault(path, [])
        return found

    def usage(self) -> Usage:
        """The usage of all requests."""
        asked = [step.usage for step in self.steps if step.asks]
        return Usage(*(sum(getattr(u, name) for u in asked) for name in Usage.__struct_fields__[:3]))


def _finish_of(problem: BaseException) -> str:
    while isinstance(problem, ProgramError):
        problem = problem.problem
    if isinstance(problem, Spent):
        return "budget spent"
    return message_of(problem) if isinstance(problem, CancelledError) else f"error: {message_of(problem)}"
