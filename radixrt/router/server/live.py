"""What the live page shows: the router's state now, its history, and why requests missed the cache.

Nothing is computed unless somebody asks: front ends do so once a second while a page is open.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from radixrt.messages import TOKEN_BYTES, Live, Namespace, tenant_of
from radixrt.report import Report
from radixrt.report.conversations import Conversation, turn_json
from radixrt.report.latency import Latency
from radixrt.report.recent import MAX_NAME_CHARS
from radixrt.report.volatile import Decode, has_salt
from radixrt.requests.validate import Refused
from radixrt.router.core.core import RouterCore
from radixrt.router.core.request import RunState
from radixrt.router.core.worker import Worker
from radixrt.router.placement.index import NodeName
from radixrt.router.server.explain import Explainer
from radixrt.version import __version__

MAX_RUNS = 100
"""The most requests in flight that are shown."""
SHOWN_CHARS = 400
"""Characters that are shown of the beginning and the end of a node's text."""
KEPT_SECONDS = 5.0
MAX_VALUES = 256
MIN_OUTLINE_SECONDS = 2.0
MAX_OUTLINE_SHARE = 0.01
"""The most of the router's time that the outline of one page takes."""
MAX_TENANT_SHARE = 0.2
"""Likewise of all that a tenant asks for."""
MAX_OUTLINES = 64
MAX_ID_CHARS = 32


class LiveView:
    """Answers a `Live`; `tenant` is whose figures may be seen (None: all)."""

    def __init__(self, core: RouterCore, report: Report, explainer: Explainer, decode: Decode | None) -> None:
        self._explainer = explainer
        self._core = core
        self._report = report
        self._decode = decode
        self._started = time.monotonic()
        self._outlines: dict[tuple[str, int, str | None], tuple[float, dict[str, Any]]] = {}
        """(until when it is shown, the outline) by node, size and tenant."""
        self._rests: dict[str | None, float] = {}
        """When another outline may be made for a tenant."""
        self._values: dict[str, tuple[float, Any]] = {}
        """See `_kept`."""

    def answer(self, message: Live, tenant: str | None) -> Any:
        """Raises Refused (404) for a request or a node that is not known, or not the tenant's."""
        match message.part:
            case "state":
                return self._state(tenant)
            case "history":
                return {"points": [self._timed(point) for point in self._report.recent.history(tenant)]}
            case "request":
                return self._request(message.of, tenant)
            case "tree":
                return self._tree(message, tenant)
            case "text":
                return self._text(message, tenant)

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
            "requests": self._in_flight(tenant, now),
            "recent": [one.to_json() for one in report.recent.requests(tenant)],
            "tenants": self._tenants(tenant),
            "conversations": [self._conversation(one) for one in report.recent.conversations(tenant)],
            "volatile": self._kept(
                f"volatile {tenant}", lambda: [_volatile(row) for row in report.volatile(tenant, self._decode)]
            ),
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

    def _in_flight(self, tenant: str | None, now: float) -> list[dict[str, Any]]:
        """The first MAX_RUNS. Of those that were sent to a worker and have no token yet the last ones wait there: as
        many as it says, and those that it had not got when it said so."""
        shown: list[RunState] = []
        unstarted: dict[Worker, list[RunState]] = defaultdict(list)
        for run in self._core.runs():
            if run.worker is not None and not run.started:
                unstarted[run.worker].append(run)
            if len(shown) < MAX_RUNS and tenant in (None, run.request.namespace.tenant):
                shown.append(run)
        waiting: set[RunState] = set()
        for worker, runs in unstarted.items():
            late = sum(run.id > worker.load.newest_run for run in runs)
            waiting.update(runs[max(0, len(runs) - late - worker.load.waiting) :])
        return [self._run(run, now, run.worker is None or run in waiting) for run in shown]

    @staticmethod
    def _run(run: RunState, now: float, waits: bool) -> dict[str, Any]:
        namespace = run.request.namespace
        return {
            "id": run.name,
            "tenant": namespace.tenant,
            "program": run.request.origin.program[:MAX_NAME_CHARS],
            "model": namespace.model,
            "worker": run.worker_name,
            "state": "decode" if run.started else "waiting" if waits else "prefill",
            "prompt": run.prompt_len,
            "hit": run.cached if run.started else run.hit,
            "bound": run.ideal,
            "generated": len(run.emitted),
            "seconds": now - run.arrived_at,
            "first": run.first_at - run.arrived_at if run.emitted else None,
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

    # ------------------------------------------------------------ what is cached

    def _tree(self, message: Live, tenant: str | None) -> dict[str, Any]:
        """An outline, which is made again after MIN_OUTLINE_SECONDS, and so much later that it takes little time.
        Raises Refused (429) if a tenant asks for too many different ones."""
        key, now = (message.of, message.most, tenant), time.monotonic()
        until, outline = self._outlines.get(key, (0.0, {}))
        if now < until:
            return outline
        if (wait := self._rests.get(tenant, 0.0) - now) > 0:
            raise Refused("", "the tree is drawn too often", 429, retry_after=wait)
        outline = self._outline(message, tenant)
        took = time.monotonic() - now
        self._outlines[key] = now + max(MIN_OUTLINE_SECONDS, took / MAX_OUTLINE_SHARE), outline
        self._rests[tenant] = now + took / MAX_TENANT_SHARE
        while len(self._outlines) > MAX_OUTLINES:
            del self._outlines[next(iter(self._outlines))]
        return outline

    def _outline(self, message: Live, tenant: str | None) -> dict[str, Any]:
        node = _node(message.of) if message.of else None
        found = self._core.index.icicle(_prefix(tenant), message.most, self._report.seen, node)
        if found is None:
            raise _unknown_node()
        total, rows = found
        names = self._worker_names()
        spaces = {space: tenant_of(space) for space in {row[-1] for row in rows}}
        tenants = sorted(set(spaces.values()))
        ids = [f"{row[0]}.{row[1]}" for row in rows]
        return {
            "total": total,
            "nodes": [
                [
                    id,
                    ids[parent] if parent >= 0 else -1,
                    depth,
                    tokens,
                    below,
                    self._report.seconds_since(last_use),
                    "device" if on_device else "host",
                    [names[owner] for owner in owners if owner in names],
                    tenants.index(spaces[space]),
                    left_out,
                ]
                for id, (_, _, parent, depth, tokens, below, last_use, left_out, on_device, owners, space) in zip(
                    ids, rows, strict=True
                )
            ],
            "tenants": tenants,
        }

    def _text(self, message: Live, tenant: str | None) -> dict[str, Any]:
        edge = self._core.index.edge(_prefix(tenant), SHOWN_CHARS, _node(message.of))
        if edge is None:
            raise _unknown_node()
        space, depth, tokens, first, last, owners = edge
        names = self._worker_names()
        return {
            "text": None if self._decode is None or has_salt(space) else self._shown(tokens, first, last),
            "tokens": tokens,
            "depth": depth,
            "tenants": [tenant_of(space)],
            "workers": [names[owner] for owner in owners if owner in names],
        }

    def _shown(self, tokens: int, first: bytes, last: bytes) -> str:
        """The beginning and the end of an edge; `first` and `last` are all of it if it is short."""
        assert self._decode is not None
        begin = self._decode(first)
        if tokens * TOKEN_BYTES == len(first) and len(begin) <= 2 * SHOWN_CHARS:
            return begin
        return f"{begin[:SHOWN_CHARS]} … {self._decode(last)[-SHOWN_CHARS:]}"

    def _worker_names(self) -> dict[int, str]:
        return {worker.number: worker.name for worker in self._core.workers}

    def _tenants(self, tenant: str | None) -> list[dict[str, Any]]:
        """Who occupies the cache. A tenant is not told how much others do."""
        cached = Counter[str]()
        for space, tokens in self._namespaces().items():
            cached[tenant_of(space)] += tokens
        shown = (
            cached.keys() | {run.request.namespace.tenant for run in self._core.runs()} if tenant is None else [tenant]
        )
        all_tokens = (sum(cached.values()) if tenant is None else cached[tenant]) or 1
        return [
            {
                "tenant": name,
                "cached_tokens": cached[name],
                "share": cached[name] / all_tokens,
                "requests": self._core.runs_of(name),
            }
            for name in sorted(shown)
        ]

    def _namespaces(self) -> dict[str, int]:
        """Cached tokens, as they were at most KEPT_SECONDS ago."""
        return self._kept("namespaces", self._core.index.namespaces)

    def _kept(self, key: str, make: Callable[[], Any]) -> Any:
        """A value that takes milliseconds to make, at most KEPT_SECONDS old."""
        until, value = self._values.get(key, (0.0, None))
        if (now := time.monotonic()) >= until:
            self._values[key] = now + KEPT_SECONDS, (value := make())
            while len(self._values) > MAX_VALUES:
                del self._values[next(iter(self._values))]
        return value

    # ------------------------------------------------------------ requests that have ended

    def _request(self, id: str, tenant: str | None) -> dict[str, Any]:
        one = self._report.recent.find(tenant, id)
        if one is None:
            raise Refused("id", f"no request {id!r} has ended lately", 404)
        return self._explainer.explain(one, tenant)

    def _conversation(self, one: Conversation) -> dict[str, Any]:
        last = one.last
        if one.words is None:
            decode = None if has_salt(last.namespace) else self._decode
            one.words = decode(one.first).strip()[:MAX_NAME_CHARS] if decode else ""
        return {
            "id": str(one.number),
            "tenant": last.tenant,
            "program": last.program or one.words,
            "count": one.count,
            "turns": [turn_json(turn) for turn in one.turns],
            "last": self._unix(last.at),
        }


def _prefix(tenant: str | None) -> str:
    """With what the keys of a tenant's namespaces begin, and no others (None: of all)."""
    return "" if tenant is None else Namespace(tenant).key.partition("\n")[0] + "\n"


def _node(id: str) -> NodeName:
    """The inverse of how nodes are named in outlines. Raises Refused (404)."""
    run, dot, end = id.partition(".")
    if not (dot and len(id) <= MAX_ID_CHARS and run.isascii() and run.isdigit() and end.isascii() and end.isdigit()):
        raise _unknown_node()
    return int(run), int(end)


def _unknown_node() -> Refused:
    return Refused("id", "there is no such node in the tree any more", 404)


def _volatile(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("tenant", "before", "values", "after", "requests")} | {
        "tokens": row["lost_tokens"],
        "advice": "move it to the end of the prompt, or leave it out",
    }


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
