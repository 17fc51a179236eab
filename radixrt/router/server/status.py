"""The router's replies to questions about its health and its models."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from radixrt.router.core.core import RouterCore
from radixrt.router.core.worker import Worker
from radixrt.router.programs.state_store import ProgramStateStore


def health(core: RouterCore, states: ProgramStateStore) -> dict[str, Any]:
    """For those who may see all figures."""
    return public_health(core) | {
        "runs_in_flight": core.runs_in_flight,
        "index_tokens": core.index.tokens,
        "states": len(states),
        "state_bytes": states.bytes,
        "paused": len(core.pauses),
        "counters": asdict(core.counters),
        "workers": [
            _facts(core, m)
            | {
                "pid": m.info.pid,
                "requests": len(m.runs),
                "running": m.load.running,
                "waiting": m.load.waiting,
                "queued_tokens": m.load.queued_tokens,
                "free_pages": m.load.free_pages,
                "evictable_pages": m.load.evictable_pages,
                "total_pages": m.load.total_pages,
                "failed_share": round(m.record.share, 3),
            }
            for m in core.workers
        ],
    }


def tenant_health(core: RouterCore, states: ProgramStateStore, tenant: str) -> dict[str, Any]:
    """For a tenant: figures of its own, and of workers only what does not depend on others' requests."""
    return public_health(core) | {
        "runs_in_flight": core.runs_of(tenant),
        "states": states.number(tenant),
        "state_bytes": states.bytes_of(tenant),
        "paused": core.pauses.number(tenant),
        "workers": [_facts(core, m) for m in core.workers],
    }


def public_health(core: RouterCore) -> dict[str, Any]:
    """For those without a key: whether and where anything is served. `serving` is True while a worker serves and gets
    on; `draining`: new requests are refused. `max_model_len` is the largest of all workers, 0 without any. `stuck` are
    the names of workers that make no progress; they serve only if there is no other."""
    workers = list(core.workers)
    return {
        "serving": any(not m.stuck for m in workers),
        "draining": core.drains.server,
        "stuck": sorted(m.name for m in (*workers, *core.workers.lost()) if m.stuck),
        "max_model_len": max((m.token_limit for m in workers), default=0),
        "workers": [_progress(core, m) for m in workers],
    }


def _progress(core: RouterCore, worker: Worker) -> dict[str, Any]:
    return {
        "name": worker.name,
        "draining": core.workers.is_closed(worker.name),
        "stalled_seconds": worker.stalled,
        "set_aside": worker.record.set_aside,
    }


def _facts(core: RouterCore, worker: Worker) -> dict[str, Any]:
    info = worker.info
    return _progress(core, worker) | {
        "model": info.model,
        "device": info.device,
        "kv_dtype": info.kv_dtype,
        "page_size": info.page_size,
    }


def models(core: RouterCore) -> list[dict[str, Any]]:
    """The models that workers serve now, with their aliases, and then their LoRA adapters, whose `parent` is their
    model. Each name once: one that is a model of a worker has no parent, whatever it is elsewhere."""
    parents: dict[str, str] = {}
    longest: dict[str, int] = {}
    for worker in core.workers:
        names = [name for name, version in worker.adapters if version == core.workers.version(name)]
        for name in (worker.info.model, *names):
            parent = worker.info.model if worker.adapter(name) else ""
            parents[name] = min(parents.get(name, parent), parent)
            longest[name] = max(longest.get(name, 0), worker.token_limit)
    model = core.model("") if longest else ""
    for alias in core.aliases if model in longest else ():
        if alias not in parents:
            parents[alias], longest[alias] = "", longest[model]
    return [
        {"id": name, "max_model_len": longest[name]} | ({"parent": parents[name]} if parents[name] else {})
        for name in sorted(parents, key=lambda name: (parents[name], name in core.aliases, name))
    ]
