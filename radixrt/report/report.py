"""Sums of what was reused, by tenant, program, fork depth and worker."""

from __future__ import annotations

import operator
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from radixrt.messages import TOKEN_BYTES, Load, Origin, SessionFacts
from radixrt.report.causes import Misses, explain
from radixrt.report.volatile import Decode, Volatile
from radixrt.report.workers import Workers, WorkerState
from radixrt.tree import RadixTree

VERSION = 1
MOST_PROGRAMS = 256
"""Names of programs come from callers: each tenant has so many lines of a program and a depth; the rest of its programs
share one line a depth. (Tenants are named by who runs the router.)"""
MOST_DEPTH = 32
MOST_NAME = 120
"""Characters of a program's name that are kept."""
OTHER = "(other)"
MOST_SPANS = 32
"""Changing texts that are named."""
KEPT, RESPELLED = "kept", "respelled"
"""Counted of a tenant's sessions, beside the reasons why answers were dropped."""


class Place(NamedTuple):
    """What a request is counted under."""

    tenant: str
    program: str
    depth: int
    worker: str


@dataclass(slots=True)
class Tally:
    """Tokens of some requests. A request for n choices counts n times."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    bound_tokens: int = 0
    generated_tokens: int = 0
    predicted_tokens: int = 0
    drift_tokens: int = 0
    misses: list[int] = field(default_factory=lambda: [0] * len(Misses._fields))

    def add(self, *, prompt: int, hit: int, generated: int, predicted: int, misses: Misses) -> None:
        """One request more. The bound is all that had been seen: prompt - never_seen - logits."""
        self.requests += 1
        self.prompt_tokens += prompt
        self.hit_tokens += hit
        self.bound_tokens += prompt - misses.never_seen - misses.logits
        self.generated_tokens += generated
        self.predicted_tokens += predicted
        self.drift_tokens += abs(predicted - hit)
        self._add_misses(misses)

    def merge(self, other: Tally) -> None:
        """Add all of another tally."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self._add_misses(other.misses)

    def _add_misses(self, misses: Iterable[int]) -> None:
        self.misses = list(map(operator.add, self.misses, misses))

    def to_json(self) -> dict[str, Any]:
        row = asdict(self) | {"misses": dict(zip(Misses._fields, self.misses, strict=True))}
        tokens = self.prompt_tokens or 1
        return row | {"hit_rate": self.hit_tokens / tokens, "bound_rate": self.bound_tokens / tokens}


_SUMS = [f.name for f in fields(Tally) if f.name != "misses"]


@dataclass(slots=True)
class Waits:
    """A tenant's sessions that pause while a tool runs. `kept_tokens` of the `tokens` that they had were still cached
    when they went on. `dropped`: pauses that nobody has gone on from, for the program has ended, was not heard of for
    too long, or too many others paused."""

    now: int = 0
    ended: int = 0
    dropped: int = 0
    seconds: float = 0.0
    tokens: int = 0
    kept_tokens: int = 0


class Report:
    """Fed by the router. `token_budget` bounds the memory (about 5 bytes a token) of the infinite cache that the hits
    are compared with: the least recently used prefixes beyond it are forgotten, and the bound is then a lower one."""

    def __init__(self, token_budget: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._budget = token_budget
        self._seen = RadixTree(values=False)
        self._forgotten = 0
        self._tallies: dict[Place, Tally] = defaultdict(Tally)
        self._lines: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self._workers = Workers(clock)
        self._sessions: dict[str, Counter[str]] = defaultdict(Counter)
        self._volatile = Volatile()
        self.waits: dict[str, Waits] = defaultdict(Waits)
        """By tenant."""
        self._started = clock()

    # ------------------------------------------------------------ fed by the router

    def arrived(self, namespace: str, ids: bytes, tenant: str = "") -> int:
        """A prompt came in: the tokens that an infinite cache would give it, which are its leading ones that came in,
        or were generated, before; less one at least, for its last token is computed always. Remembers it."""
        known = self._remember(namespace, ids)
        self._volatile.arrived(tenant, namespace, ids, known)
        return min(known, len(ids) // TOKEN_BYTES - 1)

    def finished(
        self,
        *,
        namespace: str,
        tenant: str,
        origin: Origin,
        worker: str,
        page_size: int,
        prompt: bytes,
        generated: bytes,
        reusable_tokens: int,
        cached_tokens: int,
        bound_tokens: int,
        predicted_tokens: int,
        best_tokens: int,
    ) -> None:
        """A sequence ended. Of the ids `generated` the last one was drawn but not computed; `bound_tokens` is what
        `arrived` said; when it was placed, the index said that its worker held `predicted_tokens` and that no
        worker held more than `best_tokens`."""
        prompt_tokens = len(prompt) // TOKEN_BYTES
        if len(generated) > TOKEN_BYTES:  # else it is the prompt, which is remembered
            self._remember(namespace, prompt + generated[:-TOKEN_BYTES])
        misses = explain(
            prompt=prompt_tokens,
            hit=cached_tokens,
            reusable=reusable_tokens,
            bound=bound_tokens,
            predicted=predicted_tokens,
            best=best_tokens,
            page_size=page_size,
        )
        self._tallies[self._place(tenant, origin, worker)].add(
            prompt=prompt_tokens,
            hit=cached_tokens,
            generated=len(generated) // TOKEN_BYTES,
            predicted=predicted_tokens,
            misses=misses,
        )

    def session(self, tenant: str, facts: SessionFacts) -> None:
        """A chat came in that holds answers which were generated here."""
        self._sessions[tenant].update({KEPT: facts.kept, RESPELLED: facts.respelled}, **facts.dropped)

    def paused(self, tenant: str) -> None:
        """A session waits for a tool."""
        self.waits[tenant].now += 1

    def went_on(self, tenant: str, seconds: float) -> None:
        """One that had waited so long waits no more."""
        waits = self.waits[tenant]
        waits.now, waits.ended, waits.seconds = waits.now - 1, waits.ended + 1, waits.seconds + seconds

    def dropped_pause(self, tenant: str) -> None:
        """One is not waited for any more."""
        waits = self.waits[tenant]
        waits.now, waits.dropped = waits.now - 1, waits.dropped + 1

    def resumed(self, tenant: str, tokens: int, cached: int) -> None:
        """It has asked for more: so many of its tokens could be in a cache, so many were."""
        self.waits[tenant].tokens += tokens
        self.waits[tenant].kept_tokens += cached

    def load(self, worker: str, load: Load) -> None:
        """A worker's state after a step."""
        if worker not in self._workers.states:  # it makes place for itself
            self._forget()
        self._workers.load(worker, load)

    def _forget(self) -> None:
        """Workers that are long gone share a line."""
        if names := self._workers.forget():
            for place in [place for place in self._tallies if place.worker in names]:
                self._tallies[place._replace(worker=OTHER)].merge(self._tallies.pop(place))

    def _remember(self, namespace: str, ids: bytes) -> int:
        """Put a path into the infinite cache: leading tokens of it that were there."""
        known = self._seen.insert(namespace, ids)
        if (excess := self._seen.tokens - self._budget) > 0:
            self._seen.evict(excess)
            self._forgotten += excess
        return known

    def _place(self, tenant: str, origin: Origin, worker: str) -> Place:
        lines = self._lines[tenant]
        line = program, depth = origin.program[:MOST_NAME], max(0, min(origin.depth, MOST_DEPTH))
        if line not in lines:
            if len(lines) < MOST_PROGRAMS:
                lines.add(line)
            else:
                program = OTHER
        return Place(tenant, program, depth, worker)

    # ------------------------------------------------------------ read by everybody

    def to_json(self, tenant: str | None = None, decode: Decode | None = None) -> dict[str, Any]:
        """The report as JSON-like values; of one tenant alone where one is named. `decode` makes text of token ids.

            version, seconds (since start), tenant (or null: all)
            total      requests, prompt_tokens, hit_tokens, hit_rate, bound_tokens, bound_rate, generated_tokens,
                       predicted_tokens, drift_tokens, misses {never_seen, elsewhere, evicted, page_rounding, logits}
            tenants    a list of the same, with `tenant`
            programs   ... with `program` ("" for none, "(other)" beyond the first 256) and `depth` (forks above it)
            workers    ... with `worker` ("" for none, "(other)" for those long gone); for all tenants together also
                       total_pages, used_pages (of them evictable_pages), free_pages, evicted_tokens, preemptions,
                       steps, and what decodes attended to and read of it, plain_keys and read_keys, busy_seconds,
                       forced_tokens, drafted_tokens and accepted_tokens (see `messages.Load`)
            sessions   answers in chats that were generated here: kept_turns (spelled by their ids), respelled_turns (of
                       them, those that the template writes in other words), dropped_turns (ids were lost; by cause)
            pauses     sessions that wait for a tool: now; ended, for they went on, the seconds that these took, the
                       tokens that they had when they went on, and the kept_tokens of them that were still cached;
                       dropped, which did not go on
            volatile   short text near the start of prompts that changed with most requests, so that nothing behind it
                       was hit, the most lost tokens first: tenant, requests (that changed it), lost_tokens (prompt
                       tokens behind it that were computed, and had been behind another value), at (tokens before it),
                       length (tokens of its latest value), masked (the requests had a cache_salt, behind which nobody
                       looks), before, values (the latest two) and after: its text and what is around it, null where it
                       is masked and without `decode`
            bound      exact (else it is a lower one: prompts were forgotten for the budget); for all tenants together
                       tokens (remembered) and forgotten, else null

        `bound_*` is what an infinite cache would have given on the same requests, `predicted_tokens` the hits that the
        index foretold, `drift_tokens` the sum of |predicted - hit|; rates are shares of prompt tokens, 0 to 1.
        The misses sum to prompt_tokens - hit_tokens in every row; see `causes.explain`.
        """
        self._forget()
        tallies = {place: t for place, t in self._tallies.items() if tenant in (None, place.tenant)}
        workers = self._group(tallies, lambda place: {"worker": place.worker})
        if tenant is None:
            known = {row["worker"]: row for row in workers}
            states = dict(self._workers.states)
            if any(self._workers.forgotten.before):
                states[OTHER] = self._workers.forgotten
            empty = Tally().to_json()
            workers = [
                {"worker": name} | known.get(name, empty) | states.get(name, WorkerState()).to_json()
                for name in sorted(known.keys() | states.keys())
            ]
        return {
            "version": VERSION,
            "seconds": self._clock() - self._started,
            "tenant": tenant,
            "total": self.total(tallies.values()).to_json(),
            "tenants": self._group(tallies, lambda place: {"tenant": place.tenant}),
            "programs": self._group(tallies, lambda place: {"program": place.program, "depth": place.depth}),
            "workers": workers,
            "sessions": self._sessions_of(tenant),
            "pauses": self._waits_of(tenant),
            "volatile": sorted(self._volatile.rows(tenant, decode), key=lambda row: -row["lost_tokens"])[:MOST_SPANS],
            "bound": {
                "exact": not self._forgotten,
                "tokens": self._seen.tokens if tenant is None else None,
                "forgotten": self._forgotten if tenant is None else None,
            },
        }

    def total(self, tallies: Iterable[Tally] | None = None) -> Tally:
        """The sum of some tallies, of all by default."""
        total = Tally()
        for tally in self._tallies.values() if tallies is None else tallies:
            total.merge(tally)
        return total

    def _sessions_of(self, tenant: str | None) -> dict[str, Any]:
        total: Counter[str] = Counter()
        for name, counts in self._sessions.items():
            if tenant in (None, name):
                total.update(counts)
        kept, respelled = total.pop(KEPT, 0), total.pop(RESPELLED, 0)
        return {"kept_turns": kept, "respelled_turns": respelled, "dropped_turns": dict(sorted(total.items()))}

    def _waits_of(self, tenant: str | None) -> dict[str, Any]:
        rows = [asdict(waits) for name, waits in self.waits.items() if tenant in (None, name)]
        return {f.name: sum(row[f.name] for row in rows) for f in fields(Waits)}

    @property
    def sessions(self) -> dict[str, dict[str, Any]]:
        """Of each tenant, what `to_json` says."""
        return {tenant: self._sessions_of(tenant) for tenant in self._sessions}

    @property
    def workers(self) -> dict[str, WorkerState]:
        """By name, in the order in which they were heard, also the last that are gone."""
        self._forget()
        return self._workers.states

    def by_tenant(self) -> dict[str, Tally]:
        """Sums by tenant."""
        sums: dict[str, Tally] = defaultdict(Tally)
        for place, tally in self._tallies.items():
            sums[place.tenant].merge(tally)
        return sums

    @staticmethod
    def _group(tallies: dict[Place, Tally], key: Callable[[Place], dict[str, Any]]) -> list[dict[str, Any]]:
        """Sums by a key, in its order; each row begins with it."""
        sums: dict[tuple[Any, ...], Tally] = defaultdict(Tally)
        names: tuple[str, ...] = ()
        for place, tally in tallies.items():
            names = tuple(found := key(place))
            sums[tuple(found.values())].merge(tally)
        return [dict(zip(names, values, strict=True)) | sums[values].to_json() for values in sorted(sums)]
