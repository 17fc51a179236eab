"""Errors that name the line of the program."""

from __future__ import annotations

import linecache
import os
from asyncio import CancelledError
from types import FrameType
from typing import Any, NamedTuple

from radixrt.client import ServerError


class Site(NamedTuple):
    """A line of a program."""

    file: str
    line: int

    @classmethod
    def of(cls, frame: FrameType) -> Site:
        return cls(frame.f_code.co_filename, frame.f_lineno)

    def __str__(self) -> str:
        return f"{os.path.basename(self.file)}:{self.line}"

    @property
    def source(self) -> str:
        return linecache.getline(self.file, self.line).strip()


class ProgramError(Exception):
    """An error at a line of a program. `site` is the line that appended the node, `branch` the branch's path. The
    cause, `problem`, is the original exception: usually a ServerError, or a CancelledError in a branch that was
    cancelled."""

    def __init__(self, site: Site, branch: str, problem: BaseException) -> None:
        where = f" in branch {branch}" if branch else ""
        source = f"\n    {site.source}" if site.source else ""
        super().__init__(f"{site}{where}: {message_of(problem)}{source}")
        self.site = site
        self.branch = branch
        self.problem = problem
        self.__cause__ = problem
        self.seen = False
        """Whether the program was given it already, so that it is not raised again at the program's end."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickling support: `__init__` takes more than the message."""
        return type(self).__new__, (type(self), *self.args), self.__dict__


class Spent(Exception):
    """A budget is spent. `text` is what was generated until then."""

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class BudgetExceeded(ProgramError):
    """A gen, a select or a tool was stopped, or not started, because a budget is spent. `text` is what the gen had
    generated."""

    problem: Spent

    @property
    def text(self) -> str:
        return self.problem.text


class TooManyRounds(Exception):
    """A model has called tools in more rounds than it may."""


class Lost(Exception):
    """The cause of NoWinner if no branch has failed."""


class NoWinner(ProgramError):
    """No branch of a race had an acceptable result. `results` are the rejected ones, and `problems` the errors of the
    other branches, by branch path; the first problem is the cause."""

    def __init__(self, site: Site, results: dict[str, Any], problems: dict[str, BaseException]) -> None:
        said = f"no branch won: {len(results)} results were refused, {len(problems)} branches failed"
        if first := [*problems.values()][:1]:
            said += f", the first with: {message_of(first[0])}"
        super().__init__(site, "", Lost(said))
        self.results = results
        self.problems = problems
        self.__cause__ = first[0] if first else self.problem


def error_at(site: Site, branch: str, problem: BaseException) -> ProgramError:
    """The ProgramError for `problem` at a site."""
    kind = BudgetExceeded if isinstance(problem, Spent) else ProgramError
    return kind(site, branch, problem)


def message_of(problem: BaseException) -> str:
    """The message of a problem, with its type unless that is radixrt's own."""
    if isinstance(problem, CancelledError):
        return "cancelled"
    words, kind = str(problem), type(problem).__name__
    if isinstance(problem, ServerError | ProgramError | Spent | TooManyRounds | Lost):
        return words or kind
    return f"{kind}: {words}" if words else kind
