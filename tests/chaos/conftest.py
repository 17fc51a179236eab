"""The seed of the runs, and the table of what they did.

CHAOS_SEED      makes a run again (it is printed at the end)
CHAOS_SECONDS   of each storm and soak
CHAOS_MESSAGES  on each socket
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest

from tests.chaos.processes import Series

MEBIBYTE = 1 << 20
SEED = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(1 << 31))
_rows: list[tuple[str, str, str]] = []
"""(test, what, how much) of all runs."""


class Notes:
    """Rows of the table, of one test."""

    def __init__(self, test: str) -> None:
        self._test = test

    def add(self, what: str, value: Any) -> None:
        _rows.append((self._test, what, f"{value:,}" if isinstance(value, int) else str(value)))

    def add_processes(self, series: dict[int, Series], most: int = 100) -> None:
        """Memory of each process, first, last and peak, and its descriptors and threads, first and last; of up to
        `most` processes, those that were seen longest."""
        longest = sorted(series.items(), key=lambda item: -len(item[1].samples))[:most]
        if len(series) > len(longest):
            self.add("processes", f"{len(series)}, of which the oldest are:")
        for pid, one in sorted(longest, key=lambda item: (item[1].name, item[0])):
            first, last = one.samples[0], one.samples[-1]
            rss = f"{first.rss // MEBIBYTE} -> {last.rss // MEBIBYTE} MiB, peak {one.peak // MEBIBYTE}"
            rest = f"{first.descriptors} -> {last.descriptors} files, {first.threads} -> {last.threads} threads"
            self.add(f"{one.name} {pid}", f"{last.at - first.at:5.0f} s, {rss}; {rest}")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    _rows.append((request.node.name, "began", time.strftime("%H:%M:%S")))
    return SEED


@pytest.fixture
def fixed_seed() -> int:
    """For the short forms, which are in `make test`: the same in each run."""
    return int(os.environ.get("CHAOS_SEED") or 1)


@pytest.fixture
def notes(request: pytest.FixtureRequest) -> Notes:
    return Notes(request.node.name)


def seconds(default: float) -> float:
    """How long a storm or soak takes."""
    return float(os.environ.get("CHAOS_SECONDS") or default)


def messages(default: int) -> int:
    """How many mutated messages each socket gets."""
    return int(os.environ.get("CHAOS_MESSAGES") or default)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _rows:
        return
    terminalreporter.section(f"chaos, CHAOS_SEED={SEED}")
    shown = ""
    for test, what, value in _rows:
        if test != shown:
            terminalreporter.write_line(shown := test)
        terminalreporter.write_line(f"  {what:<34} {value}")
