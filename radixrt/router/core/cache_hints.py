"""Hints of clients to the cache, on their way to the worker that they concern, and what became of them.

    ControlCache -> the worker that holds most of the path -> CacheHinted -> reply
        prefetch    to the worker that it names, if any
        share       to the worker that holds most; then `prefetch` to the worker that is to have it
        delete      to all workers; one that is lost is told when it comes back

Nothing waits for them: what a worker does not answer in time is reported as deferred.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from radixrt.messages import TOKEN_BYTES, CacheAction, CacheHint, CacheHinted, CacheResult, Info, Namespace
from radixrt.router.core.effects import Client, Effect, Order, Reply
from radixrt.router.core.worker import Worker
from radixrt.router.core.workers import Workers
from radixrt.router.numbers import fresh_numbers
from radixrt.router.placement.index import Index

if TYPE_CHECKING:
    from radixrt.report import Report

ANSWER_SECONDS = 5.0
"""A worker that has not answered by then is busy, or lost."""
MAX_SECONDS = {"pin": 3600.0, "retain": 86_400.0}
"""The longest time that a client may ask for."""
MAX_PENDING = 1024
"""The most hints that wait for workers."""


@dataclass(slots=True)
class Asked:
    """A client's hint: `left` are the ids of CacheHints that are not answered yet."""

    client: Client
    id: int
    tenant: str
    action: CacheAction
    until: float
    left: dict[int, Worker] = field(default_factory=dict)
    answers: list[tuple[str, CacheHinted]] = field(default_factory=list)
    """(worker, its answer)."""
    path: tuple[str, bytes] = "", b""
    """(namespace, ids), for what is shared."""
    clipped: str = ""
    """Why less is done than was asked for."""


class CacheHints:
    """The hints that wait for workers."""

    def __init__(self, workers: Workers, index: Index, report: Report | None) -> None:
        self._workers = workers
        self._index = index
        self._report = report
        self._asked: dict[int, Asked] = {}
        """By the id of each CacheHint that is not answered yet."""
        self._ids = fresh_numbers()
        self._later: deque[tuple[float, str, CacheHint]] = deque(maxlen=MAX_PENDING)
        """(when, worker, its hint): what is being written to disk for it, and is to be fetched then."""
        self._owed: dict[str, set[str]] = {}
        """The tenants whose cache a lost worker is to delete when it comes back, by its name."""

    def __len__(self) -> int:
        return len(self._asked)

    # ------------------------------------------------------------ from clients

    def ask(
        self,
        client: Client,
        id: int,
        paths: Sequence[tuple[Namespace, bytes]],
        action: CacheAction,
        now: float,
        tail: int = 0,
    ) -> list[Effect]:
        """Give hints for paths, (namespace, int32 ids), of one tenant, of which the last `tail` tokens need not be
        cached. Returns orders, or the reply at once."""
        tenant = paths[0][0].tenant if paths else ""
        asked = Asked(client, id, tenant, action, now + ANSWER_SECONDS)
        most = MAX_SECONDS.get(action.verb)
        if most is not None and (action.seconds is None or action.seconds > most):
            asked.clipped = "" if action.seconds is None else f"it is kept for {most:.0f} seconds at most"
            asked.action = msgspec.structs.replace(action, seconds=most)
        if len(self) >= MAX_PENDING:
            return self._refused(asked, "too many hints wait for workers")
        effects: list[Effect] = []
        for namespace, ids in paths:
            effects += self._send(asked, namespace, ids, tail)
        if asked.left:
            return effects
        return self._reply(asked) if paths else self._refused(asked, "", "missing")

    def delete(self, client: Client, id: int, tenant: str, now: float) -> list[Effect]:
        """Let all workers delete what a tenant has."""
        action = CacheAction("delete")
        asked = Asked(client, id, tenant, action, now + ANSWER_SECONDS)
        namespace = Namespace(tenant).key
        for worker in self._workers.lost():
            self._owed.setdefault(worker.name, set()).add(tenant)
            waits = CacheHinted(0, "deferred", reason="it is lost, and deletes when it comes back")
            asked.answers.append((worker.name, waits))
        effects: list[Effect] = [self._order(asked, worker, namespace, b"", action) for worker in self._workers]
        return effects or self._reply(asked)

    def _send(self, asked: Asked, namespace: Namespace, ids: bytes, tail: int) -> list[Effect]:
        action = asked.action
        held = self._index.match(namespace.key, ids)
        serving = self._workers.serving(namespace.model, namespace.version).workers
        named = next((worker for worker in serving if worker.name == action.destination), None)
        if action.destination and named is None:
            return self._note(asked, "refused", f"no worker of that name serves here: {action.destination}")
        if action.verb == "share" and named is None:
            return self._note(asked, "refused", "destination: the worker that is to have it is needed")
        most = max(serving, key=lambda worker: held.get(worker.number, 0), default=None)
        if most is None or held.get(most.number, 0) <= action.token_start:
            return self._note(asked, "missing")
        if tail:
            ids = ids[: max(TOKEN_BYTES * held[most.number], len(ids) - TOKEN_BYTES * tail)]
        worker = most
        if action.verb == "prefetch" and named is not None:
            worker = named
        elif action.verb == "share" and named is not None:
            if held.get(named.number, 0) >= held[most.number]:
                action = msgspec.structs.replace(action, verb="prefetch")
                worker = named
            asked.path = namespace.key, ids
        return [self._order(asked, worker, namespace.key, ids, action)]

    def _order(self, asked: Asked, worker: Worker, namespace: str, ids: bytes, action: CacheAction) -> Order:
        number = next(self._ids)
        self._asked[number] = asked
        asked.left[number] = worker
        return Order(worker.name, CacheHint(number, namespace, action, ids))

    def _note(self, asked: Asked, result: CacheResult, reason: str = "") -> list[Effect]:
        asked.answers.append(("", CacheHinted(0, result, reason=reason)))
        return []

    def drop_client(self, client: Client) -> None:
        """A client has disconnected: its hints are done, but nobody is told."""
        for number in [number for number, asked in self._asked.items() if asked.client == client]:
            del self._asked[number]

    # ------------------------------------------------------------ from workers

    def answered(self, name: str, message: CacheHinted) -> list[Effect]:
        """A worker has answered a hint."""
        asked = self._asked.pop(message.id, None)
        if asked is None:
            return []
        worker = asked.left.pop(message.id)
        asked.answers.append((name, message))
        if asked.action.verb == "share" and worker.name != asked.action.destination:
            destination = self._workers.worker(asked.action.destination)
            fetch = msgspec.structs.replace(asked.action, verb="prefetch")
            if message.result == "deferred":
                self._later.append(
                    (asked.until, asked.action.destination, CacheHint(0, asked.path[0], fetch, asked.path[1]))
                )
            elif message.result in ("done", "clipped") and destination is not None:
                asked.answers.clear()
                return [self._order(asked, destination, *asked.path, fetch)]
        return [] if asked.left else self._reply(asked)

    def joined(self, worker: Worker) -> list[Effect]:
        """What a worker that comes back is to delete."""
        tenants = self._owed.pop(worker.name, ())
        return [
            Order(worker.name, CacheHint(0, Namespace(tenant).key, CacheAction("delete"))) for tenant in sorted(tenants)
        ]

    def tick(self, now: float) -> list[Effect]:
        """Reply to hints that workers do not answer in time. To be called about once a second."""
        effects: list[Effect] = []
        while self._later and now >= self._later[0][0]:
            _, name, hint = self._later.popleft()
            effects += [Order(name, hint)] if self._workers.worker(name) else []
        known = {worker.name for worker in (*self._workers, *self._workers.lost())}
        self._owed = {name: tenants for name, tenants in self._owed.items() if name in known}
        for asked in {id(asked): asked for asked in self._asked.values()}.values():
            if now >= asked.until:
                for number, worker in asked.left.items():
                    del self._asked[number]
                    late = CacheHinted(number, "deferred", reason="the worker has not answered yet")
                    asked.answers.append((worker.name, late))
                asked.left.clear()
                effects += self._reply(asked)
        return effects

    # ------------------------------------------------------------ replies

    def _refused(self, asked: Asked, reason: str, result: CacheResult = "refused") -> list[Effect]:
        self._note(asked, result, reason)
        return self._reply(asked)

    def _reply(self, asked: Asked) -> list[Effect]:
        result = overall([answer.result for _, answer in asked.answers])
        reasons = [answer.reason for _, answer in asked.answers if answer.reason]
        if asked.clipped and result == "done":
            result, reasons = "clipped", [asked.clipped]
        tokens = sum(answer.tokens for _, answer in asked.answers)
        data: dict[str, Any] = {"result": result, "tokens": tokens}
        data["bytes"] = sum(answer.bytes for _, answer in asked.answers)
        data["worker"] = ",".join(sorted({name for name, _ in asked.answers if name}))
        if reasons:
            data["reason"] = "; ".join(dict.fromkeys(reasons))
        if self._report:
            self._report.hinted(asked.tenant, asked.action.verb, result, tokens)
        return [Reply(asked.client, Info(asked.id, data))]


def overall(results: list[CacheResult]) -> CacheResult:
    """The result of a hint for several paths, or workers."""
    found = set(results)
    if "deferred" in found:
        return "deferred"
    if "done" in found or "clipped" in found:
        return "done" if found == {"done"} else "clipped"
    return "refused" if "refused" in found else "missing" if found else "done"
