"""Errors that point to the program's line."""

from __future__ import annotations

import linecache
import os
from asyncio import CancelledError
from types import FrameType
from typing import Any, NamedTuple


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
    """What went wrong at a line of a program. `site` is the line that appended the node, `branch` its fork path; the
    cause, `problem`, is the exception itself: a ServerError as a rule, a CancelledError in a branch that was cancelled.
    """

    def __init__(self, site: Site, branch: str, problem: BaseException) -> None:
        where = f" in branch {branch}" if branch else ""
        source = f"\n    {site.source}" if site.source else ""
        said = "cancelled" if isinstance(problem, CancelledError) else str(problem) or type(problem).__name__
        super().__init__(f"{site}{where}: {said}{source}")
        self.site = site
        self.branch = branch
        self.problem = problem
        self.__cause__ = problem
        self.seen = False
        """The program has been given it: it is not raised once more at the program's end."""


class Spent(Exception):
    """A budget has nothing left. `text` is what was generated until then."""

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.text = text


class BudgetExceeded(ProgramError):
    """A gen, a select or a tool was cut off, or not begun, because a budget has nothing left. `text` is what the gen
    had said."""

    @property
    def text(self) -> str:
        return self.problem.text


class Lost(Exception):
    """What came of a race that nobody won."""


class NoWinner(ProgramError):
    """No branch of a race had a result that would do. `results` are those that came, by branch path."""

    results: dict[str, Any]


def error_at(site: Site, branch: str, problem: BaseException) -> ProgramError:
    """The ProgramError that says where `problem` was."""
    kind = BudgetExceeded if isinstance(problem, Spent) else ProgramError
    return kind(site, branch, problem)
