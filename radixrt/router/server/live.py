"""What the live page shows: the router's state now, its history, and why requests missed the cache.

Nothing is computed unless somebody asks: front ends do so once a second while a page is open.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

from radixrt.messages import Live
from radixrt.report import Report
from radixrt.report.latency import Latency
from radixrt.report.volatile import Decode
from radixrt.requests.validate import Refused
from radixrt.router.core.core import RouterCore
from radixrt.router.core.request import RunState
from radixrt.router.core.worker import Worker
from radixrt.version import __version__

MAX_RUNS = 100
"""The most requests in flight that are shown."""
MAX_NAME_CHARS = 120
"""Characters of a program's name that are shown."""


class LiveView:
    """Answers a `Live`; `tenant` is whose figures may be seen (None: all)."""

    def __init__(self, core: RouterCore, report: Report, decode: Decode | None) -> None:
        self._core = core
        self._report = report
        self._decode = decode
        self._started = time.monotonic()

    def answer(self, message: Live, tenant: str | None) -> Any:
        """Raises Refused (404) for a request or a node that is not known, or not the tenant's."""
        match message.part:
            case "state":
                return self._state(tenant)
            case "history":
                return {"points": [self._timed(point) for point in self._report.recent.history(tenant)]}
            case "request":
                return self._request(message.of, tenant)
            case _:
                raise Refused("of", "it is not known", 404)

    # ------------------------------------------------------------ the state

    def _state(self, tenant: str | None) -> dict[str, Any]:
        now, report = time.monotonic(), self._report
        return {
            "time": time.time(),
            "uptime": now - self._started,
            "version": __version__,
            "admin": tenant is None,
            "tenant": tenant or "",
            "point": self._timed(report.recent.point(tenant)),
            "totals": report.total_of(tenant).to_json(),
            "requests": [self._run(run, now) for run in self._runs(tenant)],
            "recent": [one.to_json() for one in report.recent.requests(tenant)],
            "tenants": [],
            "conversations": [],
            "volatile": [self._volatile(row) for row in report.volatile(tenant, self._decode)],
            "latency": [
                {"tenant": whose, "model": model} | _quantiles(latency)
                for (whose, model), latency in report.latencies.items()
                if tenant in (None, whose)
            ],
            "workers": list(self._workers(tenant)),
            "failures": [
                {"time": self._unix(one.at), "worker": one.worker, "text": one.text}
                for one in report.recent.failures(tenant)
            ],
        }

    def _unix(self, at: float) -> float:
        return at - time.monotonic() + time.time()

    def _timed(self, point: list[float]) -> list[float]:
        return [round(self._unix(point[0])), *point[1:]]

    def _runs(self, tenant: str | None) -> Iterator[RunState]:
        runs = (run for run in self._core.runs() if tenant in (None, run.request.namespace.tenant))
        return itertools.islice(runs, MAX_RUNS)

    def _run(self, run: RunState, now: float) -> dict[str, Any]:
        namespace = run.request.namespace
        return {
            "id": run.name,
            "tenant": namespace.tenant,
            "program": run.request.origin.program[:MAX_NAME_CHARS],
            "model": namespace.model,
            "worker": run.worker_name,
            "state": "decode" if run.started else "prefill" if run.worker else "waiting",
            "prompt": run.prompt_len,
            "hit": run.cached if run.started else run.hit,
            "bound": run.ideal,
            "generated": len(run.emitted),
            "seconds": now - run.arrived_at,
            "first": run.first_at - run.arrived_at if run.emitted else None,
        }

    @staticmethod
    def _volatile(row: dict[str, Any]) -> dict[str, Any]:
        return {name: row[name] for name in ("tenant", "before", "values", "after", "requests")} | {
            "tokens": row["lost_tokens"],
            "advice": "move it to the end of the prompt, or leave it out",
        }

    def _workers(self, tenant: str | None) -> Iterator[dict[str, Any]]:
        """All workers; a tenant sees of them only what does not depend on others' requests."""
        workers = [(worker, "serving") for worker in self._core.workers]
        for worker, state in workers + [(worker, "lost") for worker in self._core.workers.lost()]:
            row = {"name": worker.name, "state": self._worker_state(worker, state), "stalled_seconds": worker.stalled}
            yield row if tenant is not None else row | _load(worker)

    def _worker_state(self, worker: Worker, state: str) -> str:
        if state != "serving":
            return state
        if self._core.workers.is_closed(worker.name):
            return "draining"
        return "set aside" if worker.record.set_aside else "stuck" if worker.stuck else state

    # ------------------------------------------------------------ a request

    def _request(self, id: str, tenant: str | None) -> dict[str, Any]:
        one = self._report.recent.find(tenant, id)
        if one is None:
            raise Refused("id", f"no request {id!r} has ended lately", 404)
        row = one.to_json()
        found: dict[str, Any] = {name: row[name] for name in ("id", "prompt", "hit", "bound", "misses", "worker")}
        return found | {"diverged": None, "evicted": None, "elsewhere": None, "sentences": [row["why"]]}


def _load(worker: Worker) -> dict[str, Any]:
    load = worker.load
    return {
        "running": load.running,
        "waiting": load.waiting,
        "tokens": load.queued_tokens,
        "pages_total": load.total_pages,
        "pages_used": load.total_pages - load.free_pages,
        "host_used": load.host_tokens,
    }


def _quantiles(latency: Latency) -> dict[str, float | None]:
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    first = {f"first_{name}": latency.first.quantile(share) for name, share in shares.items()}
    return first | {f"token_{name}": latency.each.quantile(share) for name, share in shares.items()}
