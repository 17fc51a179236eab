"""A made-up server's state in time: what /v1/live tells, without a server. The same seed gives the same world."""

from __future__ import annotations

import random
from typing import Any

CAUSES = ("never_seen", "elsewhere", "evicted", "page_rounding", "logits")
PROGRAMS = [
    ("platform", "claude-code", "coder-32b"),
    ("platform", "codex", "coder-32b"),
    ("research", "deep-research", "coder-32b"),
    ("support", "triage-bot", "chat-8b"),
    ("support", "", "chat-8b"),
]
TENANTS = ["platform", "research", "support"]
WORKERS = ["worker-0", "worker-1"]
TEXTS = [
    "You are a coding agent. You work in a repository, with the tools that are described below, and you ",
    '{"name": "read_file", "description": "Read a file of the repository", "parameters": {"type": "object"}}',
    "Find out why the nightly build fails on ARM, and mend it. The log of the last run is in ci/log.txt.",
    "def match(self, tokens: bytes) -> Match:\n    node, at = self.root, 0\n    while at < len(tokens):\n ",
    'Traceback (most recent call last):\n  File "bench/replay.py", line 88, in main\nAssertionError: 41 != ',
    "Summarise the three papers on prefix caching, and say where they disagree about eviction.",
]


def empty_misses() -> dict[str, int]:
    return dict.fromkeys(CAUSES, 0)


class World:
    """`step` lets a second pass. `busy`: requests a second."""

    def __init__(
        self, seed: int = 1, now: float = 1_790_000_000.0, busy: float = 2.0, warm_seconds: int = 1800
    ) -> None:
        self.random = random.Random(seed)
        self.now, self.begun, self.busy = now - warm_seconds, now - warm_seconds - 7000, busy
        self.points: list[list[float]] = []
        self.running: list[dict[str, Any]] = []
        self.recent: list[dict[str, Any]] = []
        self.talks: list[dict[str, Any]] = []
        self.totals = {"requests": 0, "prompt_tokens": 0, "hit_tokens": 0, "bound_tokens": 0, "generated_tokens": 0}
        self.misses = empty_misses()
        self.numbers = 0
        for _ in range(warm_seconds):
            self.step()

    def step(self) -> None:
        self.now += 1
        slot = self.now // 5 * 5
        if not self.points or self.points[-1][0] != slot:
            self.points = [*self.points[-359:], [slot, 0, 0, 0]]
        arrivals = self.busy * (0.5 + 0.5 * ((self.now // 200) % 3))
        while self.random.random() < arrivals / (1 + arrivals):
            self._arrive()
        for row in list(self.running):
            self._advance(row)

    def _arrive(self) -> None:
        talk = self._talk()
        last = talk["turns"][-1]["prompt"] if talk["turns"] else 0
        head = {"coder-32b": 9216, "chat-8b": 1536}[talk["model"]]
        prompt = (last or head) + self.random.randrange(120, 2600)
        bound = last + self.random.randrange(40) if last else head
        luck = self.random.random()
        hit = bound // 16 * 16 if luck < 0.8 else int(bound * self.random.random()) // 16 * 16
        misses = empty_misses()
        lost = bound // 16 * 16 - hit
        misses["evicted" if luck < 0.92 else "elsewhere"] = lost
        misses["page_rounding"], misses["logits"] = bound % 16, 1
        misses["never_seen"] = prompt - bound - 1
        talk["turns"] = [*talk["turns"], {"prompt": prompt, "hit": hit, "bound": bound}][-20:]
        talk["last"], talk["count"] = self.now, talk["count"] + 1
        self.numbers += 1
        about = {"tenant": talk["tenant"], "program": talk["program"], "model": talk["model"]}
        self.running.append(
            {
                **{"id": f"r{self.numbers}", **about, "worker": self.random.choice(WORKERS), "state": "waiting"},
                **{"prompt": prompt, "hit": hit, "bound": bound, "generated": 0, "seconds": 0.2, "first": None},
                **{"_misses": misses, "_long": self.random.randrange(4, 20)},
            }
        )
        point = self.points[-1]
        for at, tokens in ((1, prompt), (2, hit), (3, bound)):
            point[at] += tokens
        for name, tokens in (("requests", 1), ("prompt_tokens", prompt), ("hit_tokens", hit), ("bound_tokens", bound)):
            self.totals[name] += tokens
        for cause, tokens in misses.items():
            self.misses[cause] += tokens

    def _talk(self) -> dict[str, Any]:
        alive = [talk for talk in self.talks if len(talk["turns"]) < 18]
        if len(alive) > 12 or (alive and self.random.random() < 0.75):
            return self.random.choice(alive)
        tenant, program, model = self.random.choice(PROGRAMS)
        name = program or self.random.choice(TEXTS)[:50]
        talk = {"id": f"c{self.numbers}", "tenant": tenant, "program": name, "model": model}
        talk |= {"count": 0, "turns": [], "last": self.now}
        self.talks = [*self.talks, talk][-50:]
        return talk

    def _advance(self, row: dict[str, Any]) -> None:
        row["seconds"] += 1
        if row["state"] == "waiting":
            row["state"] = "prefill"
        elif row["state"] == "prefill":
            row["state"], row["first"] = "decode", round(row["seconds"] - self.random.random() * 0.9, 3)
        else:
            row["generated"] += self.random.randrange(30, 70)
            if row["seconds"] > row["_long"]:
                self._end(row)

    def _end(self, row: dict[str, Any]) -> None:
        self.running.remove(row)
        misses, _ = row.pop("_misses"), row.pop("_long")
        self.totals["generated_tokens"] += row["generated"]
        lost = max(("evicted", "elsewhere"), key=misses.__getitem__)
        why = "Only new text was computed."
        if misses[lost]:
            why = {
                "evicted": f"{misses['evicted']:,} tokens were evicted 38 s before.",
                "elsewhere": f"{misses['elsewhere']:,} tokens were on the other worker.",
            }[lost]
        end = self.random.choice(["stop"] * 9 + ["length", "cancelled"])
        self.recent = [{**row, "end": end, "misses": misses, "why": why}, *self.recent][:50]

    def history(self) -> dict[str, Any]:
        return {"points": self.points}

    def state(self) -> dict[str, Any]:
        """As /v1/live sends it each second, for the admin."""
        totals = self.totals
        prompt = max(1, totals["prompt_tokens"])
        rates = {"hit_rate": totals["hit_tokens"] / prompt, "bound_rate": totals["bound_tokens"] / prompt}
        shown = [{name: value for name, value in row.items() if name[0] != "_"} for row in self.running]
        return {
            **{"time": self.now, "uptime": self.now - self.begun, "version": "0.9", "admin": True, "tenant": ""},
            "point": self.points[-1] if self.points else [self.now // 5 * 5, 0, 0, 0],
            "totals": {**totals, **rates, "misses": self.misses},
            "requests": sorted(shown, key=lambda row: row["state"])[:100],
            "recent": self.recent,
            "tenants": self._tenants(),
            "conversations": sorted(self.talks, key=lambda talk: -talk["last"]),
            "volatile": VOLATILE if totals["requests"] else [],
            "latency": LATENCY if totals["requests"] else [],
            "workers": self._workers(),
            "failures": [],
        }

    def _tenants(self) -> list[dict[str, Any]]:
        if not self.totals["requests"]:
            return []
        shares = (("platform", 0.61), ("research", 0.22), ("support", 0.09))
        return [
            {"tenant": name, "cached_tokens": int(share * 1_048_576), "share": share, "requests": int(10 * share)}
            for name, share in shares
        ]

    def _workers(self) -> list[dict[str, Any]]:
        found = []
        for at, name in enumerate(WORKERS):
            mine = [row for row in self.running if row["worker"] == name]
            waiting = sum(row["state"] == "waiting" for row in mine)
            used = min(32768, 400 + self.totals["prompt_tokens"] // 300)
            found.append(
                {
                    **{"name": name, "state": "serving", "running": len(mine) - waiting, "waiting": waiting},
                    **{"tokens": sum(row["prompt"] for row in mine), "pages_total": 32768, "pages_used": used},
                    **{"host_total": 65536, "host_used": min(65536, used * (at + 1) // 2), "restarts": 0},
                    "stalled_seconds": 0.1,
                }
            )
        return found

    def explain(self, number: str) -> dict[str, Any] | None:
        """As /v1/live/requests/{id}."""
        rows = [row for row in [*self.running, *self.recent] if row["id"] == number]
        if not rows:
            return None
        row = rows[0]
        misses = row.get("misses") or row["_misses"]
        sentences = [
            f"{row['hit']:,} of {row['prompt']:,} prompt tokens were reused; a cache that never forgets would have "
            f"reused {row['bound']:,}."
        ]
        found = {name: row[name] for name in ("id", "prompt", "hit", "bound", "worker")}
        found |= {"misses": misses, "sentences": sentences, "diverged": None, "evicted": None, "elsewhere": None}
        if misses["evicted"]:
            found["evicted"] = {"tokens": misses["evicted"], "seconds_ago": 38.0, "by": "research/deep-research"}
            sentences.append(f"{misses['evicted']:,} tokens were evicted 38 s before, for deep-research of research.")
        if misses["elsewhere"]:
            found["elsewhere"] = {"tokens": misses["elsewhere"], "worker": "worker-1"}
            sentences.append(f"{misses['elsewhere']:,} tokens were on worker-1, which had no room for the request.")
        if misses["never_seen"]:
            sentences.append(f"From token {row['bound']:,} on, the text is new: the user's message differs there.")
            found["diverged"] = {
                **{"token": row["bound"], "message": 3, "role": "user", "before": "the repository as it was at "},
                **{"ours": "2026-09-21T10:44:07Z", "theirs": "2026-09-21T10:43:59Z"},
                "after": ". Find out why the nightly build fails on ARM, and mend it. The log of the last run is in ",
            }
        return found


VOLATILE = [
    {
        **{
            "before": "You are a helpful assistant of the support team.\nCurrent time: ",
            "values": ["10:43:59", "10:44:07"],
        },
        **{"after": "\nAnswer in the language of the customer, in at most", "requests": 412, "tokens": 613_220},
        "advice": "move the time to the end of the prompt, or into the user's message.",
    },
    {
        **{"before": "x-trace-id: ", "values": ["5f21c09b", "a77e13d0"], "after": "\nYou are triage-bot. Sort the"},
        **{"requests": 97, "tokens": 88_104, "advice": "leave the id out of the prompt."},
    },
]
LATENCY = [
    {
        **{"tenant": tenant, "model": model, "first_p50": first, "first_p90": first * 2.6, "first_p99": first * 7},
        **{"token_p50": token, "token_p90": token * 1.4, "token_p99": token * 3.3},
    }
    for tenant, model, first, token in (
        ("platform", "coder-32b", 0.31, 0.024),
        ("research", "coder-32b", 0.42, 0.026),
        ("support", "chat-8b", 0.06, 0.0082),
    )
]


class Tree:
    """A tree of about `tokens` cached tokens in several thousand nodes, as the router's index has it."""

    def __init__(self, tokens: int = 1_048_576, seed: int = 2) -> None:
        self.random = random.Random(seed)
        self.nodes: list[dict[str, Any]] = []
        self.age = 1.0
        root = self._add(-1, 0, 0, -1)
        for tenant, head in enumerate((9216, 4096, 1536)):
            top = self._add(root, 0, head, tenant)
            tools = [self._add(top, head, self.random.randrange(900, 5000), tenant) for _ in range(3 - tenant // 2)]
            limit = tokens * (0.62, 0.26, 0.12)[tenant]
            while self._size(top) < limit:
                self._talk(self.random.choice(tools), tenant)
        self._sum()

    def _size(self, top: int) -> int:
        return self.nodes[top]["grown"]

    def _add(self, parent: int, depth: int, tokens: int, tenant: int) -> int:
        used = self.age * self.random.uniform(1, 1.5)
        where = "device" if used < 400 else "host" if used < 1500 else "disk"
        worker = self.random.choice(([WORKERS[0]], [WORKERS[1]], WORKERS))
        self.nodes.append(
            {"parent": parent, "depth": depth, "tokens": tokens, "tenant": tenant, "used": used, "tier": where}
            | {"workers": worker, "grown": 0, "sum": 0, "children": []}
        )
        number = len(self.nodes) - 1
        if parent >= 0:
            self.nodes[parent]["children"].append(number)
        while parent >= 0:
            self.nodes[parent]["grown"] += tokens
            parent = self.nodes[parent]["parent"]
        return number

    def _talk(self, above: int, tenant: int) -> None:
        node, self.age = above, self.random.lognormvariate(5, 2)
        for _ in range(self.random.choice((1, 1, 2, 4, 8, 14))):
            depth = self.nodes[node]["depth"] + self.nodes[node]["tokens"]
            node = self._add(node, depth, int(self.random.lognormvariate(5.8, 1.1)) + 8, tenant)
            for _ in range(self.random.choice((0, 0, 0, 1, 3))):
                depth = self.nodes[node]["depth"] + self.nodes[node]["tokens"]
                self._add(node, depth, int(self.random.lognormvariate(4.6, 1.0)) + 4, tenant)

    def _sum(self) -> None:
        for node in reversed(self.nodes):
            node["sum"] += node["tokens"]
            if node["parent"] >= 0:
                above = self.nodes[node["parent"]]
                above["sum"] += node["sum"]
                above["used"] = min(above["used"], node["used"])
                above["tier"] = min(above["tier"], node["tier"])
                above["workers"] = sorted({*above["workers"], *node["workers"]})

    def answer(self, root: int = 0, most: int = 2000, age: float = 0.0) -> dict[str, Any]:
        """As /v1/live/tree."""
        least, rows, todo = self.nodes[root]["sum"] / most, [], [root]
        while todo:
            number = todo.pop()
            node = self.nodes[number]
            sent = [child for child in node["children"] if self.nodes[child]["sum"] >= least]
            parent = -1 if number == root else str(node["parent"])
            row = [str(number), parent, node["depth"], node["tokens"], node["sum"], node["used"] + age, node["tier"]]
            rows.append([*row, node["workers"], node["tenant"], len(node["children"]) - len(sent)])
            todo += reversed(sent)
        return {"total": self.nodes[0]["sum"], "nodes": rows, "tenants": TENANTS}

    def text(self, number: int) -> dict[str, Any]:
        """As /v1/live/tree/{id}."""
        node = self.nodes[number]
        tenants = [TENANTS[node["tenant"]]] if node["tenant"] >= 0 else TENANTS
        text = TEXTS[number % len(TEXTS)] + (
            " \u2026 " + TEXTS[(number + 1) % len(TEXTS)] if node["tokens"] > 200 else ""
        )
        about = {"tokens": node["tokens"], "depth": node["depth"], "tenants": tenants, "workers": node["workers"]}
        return {"text": text if node["tokens"] else ""} | about
