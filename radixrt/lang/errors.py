"""Errors that point to the program's line."""

from __future__ import annotations

import linecache
import os
from asyncio import CancelledError
from types import FrameType
from typing import NamedTuple


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
