"""Runs traffic in a thread, once without disturbance to know the answers, then for as long as a test disturbs it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Self

from tests.chaos.stack import Serve
from tests.chaos.traffic import Job, Site, Tally, answered, size

AT_ONCE = 8
"""Jobs that run at the same time."""


def undisturbed(serve: Serve, jobs: list[Job], *, formula: bool) -> dict[str, Any]:
    """The answer to each job. `formula`: workers have no model, and the answers are also compared with their truth."""

    async def collect() -> dict[str, Any]:
        async with Site(serve) as site:
            limit, found = asyncio.Semaphore(AT_ONCE), {}

            async def one(job: Job) -> None:
                async with limit:
                    found[job.name] = await answered(job, site)

            async with asyncio.TaskGroup() as group:
                for job in jobs:
                    group.create_task(one(job))
            assert not site.tally.retries, f"nothing was disturbed, but: {site.tally.retries}"
            return found

    found = asyncio.run(collect())
    for job in jobs if formula else ():
        assert job.truth is None or found[job.name] == job.truth, f"{job.name}: not what the formula says"
    return found


class Traffic:
    """Jobs at random, AT_ONCE at a time, each compared with its known answer, in a thread. Leaving the context waits
    until those that have begun are answered, and fails if an answer was wrong, or did not come."""

    def __init__(self, serve: Serve, jobs: list[Job], known: dict[str, Any], seed: int, at_once: int = AT_ONCE) -> None:
        self.tally = Tally()
        self.slowest = 0.0
        """Seconds of the job that took longest."""
        self._serve, self._jobs, self._known, self._seed, self._at_once = serve, jobs, known, seed, at_once
        self._stopped, self._ready = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._main, name="traffic")

    def _main(self) -> None:
        try:
            asyncio.run(self._run())
        except BaseException:
            self.tally.failures.append(traceback.format_exc())
        finally:
            self._ready.set()

    async def _run(self) -> None:
        async with Site(self._serve) as site:
            site.tally = self.tally
            self._ready.set()
            await asyncio.gather(*(self._work(site, random.Random(self._seed + n)) for n in range(self._at_once)))

    async def _work(self, site: Site, rng: random.Random) -> None:
        while not self._stopped.is_set():
            job = rng.choice(self._jobs)
            begun = time.monotonic()
            try:
                answer = await answered(job, site)
            except Exception:
                self.tally.failures.append(f"{job.name}: {traceback.format_exc(limit=-3)}")
                await asyncio.sleep(1.0)
                continue
            self.slowest = max(self.slowest, time.monotonic() - begun)
            self.tally.tokens += size(answer)
            if answer != self._known[job.name]:
                self.tally.failures.append(f"{job.name}: {answer!r}, undisturbed {self._known[job.name]!r}")

    def wait(self, condition: Callable[[Tally], bool], seconds: float = 60.0) -> None:
        """Wait until the tally is as wanted."""
        deadline = time.monotonic() + seconds
        while not condition(self.tally) and time.monotonic() < deadline:
            time.sleep(0.01)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc: object) -> None:
        self._stopped.set()
        self._thread.join()
        if kind is None:
            shown = "\n".join(self.tally.failures[:5])
            assert not self.tally.failures, f"{len(self.tally.failures)} answers were not right:\n{shown}"
            assert self.tally.done, "no job was done"
