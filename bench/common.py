"""Shared by all benchmarks: timing, a table for the terminal, a JSON file in bench/results."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def machine() -> dict[str, Any]:
    """The processor, the number of its cores and Python's version."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
    cores = sum(line.startswith("processor") for line in Path("/proc/cpuinfo").read_text().splitlines())
    return {"cpu": model, "cores": cores, "python": platform.python_version()}


def median_us(work: Callable[[Any], Any], items: Sequence[Any]) -> tuple[float, float]:
    """Time work(item) for each item. Returns (median, sum) in microseconds."""
    clock = time.perf_counter
    times = []
    for item in items:
        began = clock()
        work(item)
        times.append(clock() - began)
    return statistics.median(times) * 1e6, sum(times) * 1e6


def save(name: str, rows: Any, **facts: Any) -> None:
    """Write bench/results/NAME.json: the machine, facts about the run, and the rows of its table."""
    RESULTS.mkdir(exist_ok=True)
    content = {"benchmark": name, "machine": machine(), **facts, "rows": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as aligned columns; numbers with three significant digits."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns] + [[shown(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in cells
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def shown(value: Any) -> str:
    """The text of a cell."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
