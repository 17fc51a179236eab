"""How much memory of the host is available."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS = (
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)
"""Files with the limit of a container and what it uses, and file and field with how much of that is cached files that
are given up when memory is needed (weights that were read once, say); in versions 2 and 1 of control groups."""


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes that this process could still allocate: what the machine has available, or its container if less."""
    found = [_of_machine(root)]
    folder = root / "sys/fs/cgroup"
    for limit, usage, stat, field in _CGROUPS:
        most, used = (_number(folder / name) for name in (limit, usage))
        if most is not None and used is not None:
            found.append(max(0, most - max(0, used - _field(folder / stat, field))))
    return min(found)


def _of_machine(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _field(path: Path, name: str) -> int:
    """A field of a file with a name and a number in each line; 0 if there is none."""
    try:
        return next(int(value) for key, value in map(str.split, path.read_text().splitlines()) if key == name)
    except (OSError, ValueError, StopIteration):
        return 0


def _number(path: Path) -> int | None:
    """None if there is no such file, or no limit ("max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
