"""Kills and stops of the processes of a stack, at random by a seed, while traffic goes on."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field

import psutil

from tests.chaos.stack import WORKER_TIMEOUT, Serve
from tests.waiting import eventually

SHORT = 0.2, 0.8
"""Seconds of a stop that is shorter than a worker's time limit."""
LONG = 1.5 * WORKER_TIMEOUT, 2.5 * WORKER_TIMEOUT
YOUNG_SECONDS = 4.0
"""A process that was started so recently may not serve yet: it is no reason to spare no other."""
MAX_KILLS = 3
"""Kills of a process of each role, for each process of it, between two starts of the stack: a process that ends often
is started again after longer and longer times."""


@dataclass(slots=True)
class Storm:
    """`act` does one event. Some process of each role but the router always serves."""

    serve: Serve
    rng: random.Random
    pace: float = 1.0
    """Seconds between two events, on average."""
    events: Counter[str] = field(default_factory=Counter)
    """Events so far, by what was done."""
    codes: list[int] = field(default_factory=list)
    """Exit codes of stacks that ended as their router was killed."""
    _stopped: dict[int, tuple[float, psutil.Process]] = field(default_factory=dict)
    """Stopped processes by pid, with the time at which each goes on."""
    _kills: Counter[str] = field(default_factory=Counter)

    def blow(self, seconds: float, calm_after: float) -> None:
        """Do events for so many seconds. Each `calm_after` seconds the whole stack ends, and is started again."""
        begun = again = time.monotonic()
        while time.monotonic() - begun < seconds:
            self._let_go_on()
            if time.monotonic() - again > calm_after:
                self.end_stack()
                again = time.monotonic()
            self.act()
            time.sleep(self.pace * self.rng.uniform(0.3, 1.7))
        self.settle()

    def settle(self) -> None:
        """Let all stopped processes go on."""
        self._let_go_on(time.monotonic() + 3600)

    def act(self) -> None:
        """Do one event, if its target can be spared."""
        kind = self.rng.choice(
            ["kill worker"] * 5
            + ["stop worker, short"] * 4
            + ["stop worker, long"] * 3
            + ["kill frontend"] * 2
            + ["stop frontend, short", "stop frontend, long", "stop router, short"]
        )
        verb, _, rest = kind.partition(" ")
        role, _, length = rest.partition(", ")
        running = [one for one in self.serve.processes(role) if one.pid not in self._stopped]
        grown = [one for one in running if role == "router" or _age(one) > YOUNG_SECONDS * self.pace]
        if len(grown) < (1 if role == "router" else 2):
            return
        victim = self.rng.choice(grown)
        if verb == "kill":
            if self._kills[role] >= MAX_KILLS * (len(running) + 1):
                return
            self._kills[role] += 1
            victim.kill()
        else:
            victim.send_signal(signal.SIGSTOP)
            length = SHORT if length == "short" else LONG
            self._stopped[victim.pid] = time.monotonic() + self.rng.uniform(*length), victim
        self.events[kind] += 1

    def end_stack(self) -> None:
        """Kill the router or `serve` itself: all ends, with an error, and is started again."""
        self.settle()
        pids = self.serve.pids()
        if self.rng.random() < 0.7 and (routers := self.serve.processes("router")):
            self.events["kill router"] += 1
            routers[0].kill()
            code = self.serve.wait_ended()
            assert code > 0, f"a stack without its router ended with code {code}"
        else:
            self.events["kill serve"] += 1
            psutil.Process(self.serve.pid).kill()
            code = self.serve.wait_ended()
        self.codes.append(code)
        eventually(lambda: not any(map(lives, pids)), 30)
        self._kills.clear()
        self.serve.start()

    def _let_go_on(self, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        for pid, (until, process) in list(self._stopped.items()):
            if now >= until:
                del self._stopped[pid]
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)


def _age(process: psutil.Process) -> float:
    """Seconds since a process was started; 0.0 if it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return time.time() - process.create_time()
    return 0.0


def lives(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False
