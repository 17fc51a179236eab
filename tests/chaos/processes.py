"""What /proc says about the processes of a stack: who they are, and their memory, descriptors and threads over time."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

ROLES = "router", "worker", "frontend"


def family(pid: int) -> dict[str, list[psutil.Process]]:
    """The processes of `radixrt serve` with this pid, by role; `serve` itself, too. Zombies are left out."""
    found: dict[str, list[psutil.Process]] = {"serve": [], **{role: [] for role in ROLES}}
    with contextlib.suppress(psutil.NoSuchProcess):
        serve = psutil.Process(pid)
        found["serve"].append(serve)
        for child in serve.children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                role = next((part for part in child.cmdline() if part in ROLES), "")
                if role and child.status() != psutil.STATUS_ZOMBIE:
                    found[role].append(child)
    return {role: sorted(processes, key=lambda one: one.pid) for role, processes in found.items()}


def zombies(pid: int) -> list[int]:
    """Pids of children, of any depth, that have ended and were not waited for."""
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE:
                found.append(child.pid)
    return found


@dataclass(frozen=True, slots=True)
class Sample:
    """A process at one time: seconds of `time.monotonic`, resident bytes, and numbers of descriptors and threads."""

    at: float
    rss: int
    descriptors: int
    threads: int


@dataclass(slots=True)
class Series:
    """Samples of one process, in order."""

    name: str
    samples: list[Sample] = field(default_factory=list)

    @property
    def peak(self) -> int:
        """The largest resident size seen, in bytes."""
        return max(sample.rss for sample in self.samples)

    def growth(self, since: float) -> float:
        """Resident bytes per second from time `since` on, by least squares; 0.0 for fewer than three samples."""
        late = [sample for sample in self.samples if sample.at >= since]
        if len(late) < 3:
            return 0.0
        middle = sum(sample.at for sample in late) / len(late)
        level = sum(sample.rss for sample in late) / len(late)
        spread = sum((sample.at - middle) ** 2 for sample in late)
        return sum((sample.at - middle) * (sample.rss - level) for sample in late) / spread if spread else 0.0


def sample(process: psutil.Process) -> Sample | None:
    """A process now; None if it has ended."""
    try:
        with process.oneshot():
            return Sample(time.monotonic(), process.memory_info().rss, process.num_fds(), process.num_threads())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None


class Recorder:
    """Samples all processes of the stack with pid `serve()` in a thread, until `stop`."""

    def __init__(self, serve: Callable[[], int], period: float = 0.5) -> None:
        self.series: dict[int, Series] = {}
        """By pid."""
        self._serve = serve
        self._period = period
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._record, name="recorder", daemon=True)
        self._thread.start()

    def _record(self) -> None:
        while not self._stopped.wait(self._period):
            self.look()

    def look(self) -> None:
        """Take a sample of each process."""
        for role, processes in family(self._serve()).items():
            for process in processes:
                if (found := sample(process)) is not None:
                    self.series.setdefault(process.pid, Series(role)).samples.append(found)

    def stop(self) -> dict[int, Series]:
        """Stop sampling. Returns the series of processes that were seen at least twice."""
        self._stopped.set()
        self._thread.join()
        return {pid: one for pid, one in self.series.items() if len(one.samples) > 1}
