"""Runs that have ended just now, of which a front end may still say what their conversations wait for."""

from __future__ import annotations

from collections import OrderedDict

from radixrt.messages import WaitsFor
from radixrt.router.core.effects import Client, Effect, Order
from radixrt.router.core.request import RunState

MAX_RUNS = 4096
MAX_NAME = 64
"""Characters of a tool's name that count."""


class EndedRuns:
    """The last MAX_RUNS runs that have ended by themselves: their workers, by client, request and choice."""

    def __init__(self) -> None:
        self._runs: OrderedDict[tuple[Client, int, int], tuple[str, int]] = OrderedDict()

    def add(self, run: RunState) -> None:
        """A run has ended."""
        if run.worker is not None and not run.request.scores:
            self._runs[run.request.client, run.request.id, run.index] = run.worker_name, run.id
            if len(self._runs) > MAX_RUNS:
                self._runs.popitem(last=False)

    def called(self, client: Client, request_id: int, index: int, name: str) -> list[Effect]:
        """An answer calls a tool of that name: its worker is told, at most once. Nothing if the run is not known any
        more."""
        worker, run = self._runs.pop((client, request_id, index), ("", 0))
        return [Order(worker, WaitsFor(run, name[:MAX_NAME]))] if worker else []
