"""The router's replies to questions about its health and its models."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from radixrt.router.core import RouterCore
from radixrt.router.states import States


def health(core: RouterCore, states: States) -> dict[str, Any]:
    """`serving` is True while a worker serves and gets on; `draining`: new requests are refused. `max_model_len` is the
    largest of all workers, 0 without any. `stuck` are the names of workers that do not get on; they serve only if there
    is no other."""
    members = list(core.members)
    return {
        "serving": any(not m.stuck for m in members),
        "draining": core.drains.server,
        "stuck": sorted(m.name for m in (*members, *core.members.lost()) if m.stuck),
        "max_model_len": max((m.token_limit for m in members), default=0),
        "runs_in_flight": core.runs_in_flight,
        "index_tokens": core.index.tokens,
        "states": len(states),
        "state_bytes": states.bytes,
        "paused": len(core.pauses),
        "counters": asdict(core.counters),
        "workers": [
            {
                "name": m.name,
                "model": m.info.model,
                "device": m.info.device,
                "pid": m.info.pid,
                "kv_dtype": m.info.kv_dtype,
                "page_size": m.info.page_size,
                "draining": core.members.is_closed(m.name),
                "stalled_seconds": m.stalled,
                "requests": len(m.runs),
                "running": m.load.running,
                "waiting": m.load.waiting,
                "queued_tokens": m.load.queued_tokens,
                "free_pages": m.load.free_pages,
                "evictable_pages": m.load.evictable_pages,
                "total_pages": m.load.total_pages,
                "failed_share": round(m.record.share, 3),
                "set_aside": m.record.set_aside,
            }
            for m in members
        ],
    }


def models(core: RouterCore) -> list[dict[str, Any]]:
    """The models that workers serve now, with their aliases, and then their LoRA adapters, whose `parent` is their
    model. Each name once: one that is a model of a worker has no parent, whatever it is elsewhere."""
    parents: dict[str, str] = {}
    longest: dict[str, int] = {}
    for member in core.members:
        names = [name for name, version in member.adapters if version == core.members.version(name)]
        for name in (member.info.model, *names):
            parent = member.info.model if member.adapter(name) else ""
            parents[name] = min(parents.get(name, parent), parent)
            longest[name] = max(longest.get(name, 0), member.token_limit)
    model = core.model("") if longest else ""
    for alias in core.aliases if model in longest else ():
        if alias not in parents:
            parents[alias], longest[alias] = "", longest[model]
    return [
        {"id": name, "max_model_len": longest[name]} | ({"parent": parents[name]} if parents[name] else {})
        for name in sorted(parents, key=lambda name: (parents[name], name in core.aliases, name))
    ]
