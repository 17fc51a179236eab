"""Sums hits and misses by tenant, program, fork depth, model and worker."""

from __future__ import annotations

import operator
import time
from bisect import bisect_left
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from radixrt.messages import TOKEN_BYTES, Load, Origin, SessionFacts
from radixrt.messages.namespace import namespaces_of
from radixrt.report.causes import Misses, explain
from radixrt.report.latency import Latency
from radixrt.report.recent import MAX_NAME_CHARS, Recent
from radixrt.report.volatile import Decode, PrefixBreakingTexts
from radixrt.report.workers import Workers, WorkerState
from radixrt.tree import RadixTree

VERSION = 1
MAX_PROGRAMS = 256
"""(program, depth) pairs that are counted for a tenant, as clients may send any program name. Further programs are
counted as OTHER, by depth."""
MAX_DEPTH = 32
"""Deeper forks are counted at this depth."""
OTHER = "(other)"
MAX_SPANS = 32
"""The most changing texts (`volatile`) that are reported."""
MAX_USES = 4096
"""The latest seconds with requests, in which last uses are dated."""
KEPT, RESPELLED = "kept", "respelled"
"""Keys of a tenant's session counts. The other keys are the reasons for which answers were dropped."""


class Place(NamedTuple):
    """The key that a request is counted under."""

    tenant: str
    program: str
    depth: int
    worker: str
    model: str = ""
    """The model or the LoRA adapter."""


@dataclass(slots=True)
class Tally:
    """Sums over some requests, in tokens. A request for n choices counts n times."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    bound_tokens: int = 0
    generated_tokens: int = 0
    predicted_tokens: int = 0
    drift_tokens: int = 0
    misses: list[int] = field(default_factory=lambda: [0] * len(Misses._fields))

    def add(self, *, prompt: int, hit: int, generated: int, predicted: int, misses: Misses) -> None:
        """Add one request. Its bound, the hit of an infinite cache, is prompt - never_seen - logits."""
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
    """Counts of a tenant's sessions that pause while a tool runs."""

    now: int = 0
    """Sessions that are paused."""
    ended: int = 0
    """Pauses after which the session was resumed."""
    dropped: int = 0
    """Pauses without a resumption: the program ended, the pause timed out, or there were too many others."""
    seconds: float = 0.0
    """Total duration of the pauses that ended."""
    tokens: int = 0
    """Tokens of the resumed sessions that could have been cached when they were resumed."""
    kept_tokens: int = 0
    """Of them, those that were cached."""


class Report:
    """Collects what the router reports. `token_budget` limits the infinite cache that hits are compared with (about 5
    bytes per token): its least recently used prefixes are dropped beyond that, and its hits are then a lower bound."""

    def __init__(self, token_budget: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._budget = token_budget
        self.seen = RadixTree(values=False)
        """The infinite cache. Must not be modified from outside."""
        self._uses: deque[tuple[int, float]] = deque(maxlen=MAX_USES)
        """(clock of `seen`, time) now and then, so that last uses can be dated."""
        self._forgotten = 0
        self._tallies: dict[Place, Tally] = defaultdict(Tally)
        self._programs: dict[str, set[tuple[str, int]]] = defaultdict(set)
        """By tenant: the (program, depth) pairs that are counted."""
        self._workers = Workers(clock)
        self.latencies: dict[tuple[str, str], Latency] = defaultdict(Latency)
        """By (tenant, model or LoRA adapter)."""
        self._sessions: dict[str, Counter[str]] = defaultdict(Counter)
        self._prefix_breaking = PrefixBreakingTexts()
        self.waits: dict[str, Waits] = defaultdict(Waits)
        """By tenant."""
        self.hints: Counter[tuple[str, str, str]] = Counter()
        """Hints to the cache by (tenant, verb, result)."""
        self.hint_tokens: Counter[tuple[str, str]] = Counter()
        """Tokens for which they were done, by (tenant, verb)."""
        self.recent = Recent(clock)
        self._started = clock()

    # ------------------------------------------------------------ called by the router

    def arrived(self, namespace: str, ids: bytes, tenant: str = "") -> int:
        """Record a new prompt. Returns its hit, in tokens, in an infinite cache: the length of its longest prefix that
        arrived or was generated before, but at most all tokens except the last, which is always computed."""
        known = self._remember(namespace, ids)
        self._prefix_breaking.arrived(tenant, namespace, ids, known)
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
        model: str = "",
    ) -> Misses:
        """Record a sequence that has ended; returns its misses. The last id of `generated` was sampled, but its KV was
        not computed. `bound_tokens` is the return value of `arrived`. `predicted_tokens` is the hit that the index
        predicted for the sequence's worker at dispatch, and `best_tokens` the largest that it predicted for any
        worker."""
        prompt_tokens = len(prompt) // TOKEN_BYTES
        if len(generated) > TOKEN_BYTES:  # else there is nothing more than the prompt, which `arrived` has recorded
            self._remember(namespace, prompt + generated[:-TOKEN_BYTES])
        misses = explain(
            prompt=prompt_tokens,
            hit=cached_tokens,
            reusable=reusable_tokens,
            ideal=bound_tokens,
            predicted=predicted_tokens,
            best=best_tokens,
            page_size=page_size,
        )
        self._tallies[self._place(tenant, origin, worker, model)].add(
            prompt=prompt_tokens,
            hit=cached_tokens,
            generated=len(generated) // TOKEN_BYTES,
            predicted=predicted_tokens,
            misses=misses,
        )
        return misses

    def began(self, tenant: str, model: str, seconds: float) -> None:
        """Record the time until the first token of a sequence."""
        self.latencies[tenant, model].first.add(seconds)

    def took(self, tenant: str, model: str, first: float, last: float, tokens: int) -> None:
        """Record a sequence that has ended well: the seconds until the first and the last of its tokens."""
        self.latencies[tenant, model].ended(first, last, tokens)

    def session(self, tenant: str, facts: SessionFacts) -> None:
        """Record a new chat prompt, with what happened to the answers in it that were generated here."""
        self._sessions[tenant].update({KEPT: facts.kept, RESPELLED: facts.respelled}, **facts.dropped)

    def paused(self, tenant: str) -> None:
        """A session pauses for a tool."""
        self.waits[tenant].now += 1

    def went_on(self, tenant: str, seconds: float) -> None:
        """A session is resumed after a pause of `seconds`."""
        waits = self.waits[tenant]
        waits.now, waits.ended, waits.seconds = waits.now - 1, waits.ended + 1, waits.seconds + seconds

    def dropped_pause(self, tenant: str) -> None:
        """A pause was dropped: the session was not resumed."""
        waits = self.waits[tenant]
        waits.now, waits.dropped = waits.now - 1, waits.dropped + 1

    def resumed(self, tenant: str, tokens: int, cached: int) -> None:
        """The first request after a pause has its hit: `cached` of the `tokens` that could have been cached."""
        self.waits[tenant].tokens += tokens
        self.waits[tenant].kept_tokens += cached

    def hinted(self, tenant: str, verb: str, result: str, tokens: int) -> None:
        """A hint to the cache was answered."""
        self.hints[tenant, verb, result] += 1
        self.hint_tokens[tenant, verb] += tokens

    def delete(self, tenant: str) -> None:
        """Forget the prompts of a tenant; its sums stay."""
        self.seen.remove_namespaces(namespaces_of(tenant))
        self._prefix_breaking.delete(tenant)
        self.recent.delete(tenant)

    def load(self, worker: str, load: Load) -> None:
        """A worker's state after a step."""
        if worker not in self._workers.states:  # a new one may push out one that has gone
            self._forget()
        self._workers.load(worker, load)

    def _forget(self) -> None:
        """Forget workers that have been gone for long; their sums are merged under OTHER."""
        if names := self._workers.forget():
            for place in [place for place in self._tallies if place.worker in names]:
                self._tallies[place._replace(worker=OTHER)].merge(self._tallies.pop(place))

    def _remember(self, namespace: str, ids: bytes) -> int:
        """Insert a path into the infinite cache. Returns how many of its leading tokens were there already."""
        known = self.seen.insert(namespace, ids)
        if (excess := self.seen.tokens - self._budget) > 0:
            self.seen.evict(excess)
            self._forgotten += excess
        return known

    def seconds_since(self, use: int) -> float | None:
        """How long ago a node of `seen` was used last, about; None if that is longer ago than is known, or never."""
        i = bisect_left(self._uses, use, key=lambda one: one[0])
        if not use or (i == 0 and len(self._uses) == MAX_USES):
            return None
        at = self._uses[i][1] if i < len(self._uses) else self._clock()
        return max(0.0, self._clock() - at)

    def date_uses(self) -> None:
        """Note the time of the uses so far. To be called about once a second."""
        if not self._uses or self._uses[-1][0] < self.seen.clock:
            self._uses.append((self.seen.clock, self._clock()))

    def _place(self, tenant: str, origin: Origin, worker: str, model: str) -> Place:
        programs = self._programs[tenant]
        pair = program, depth = origin.program[:MAX_NAME_CHARS], max(0, min(origin.depth, MAX_DEPTH))
        if pair not in programs:
            if len(programs) < MAX_PROGRAMS:
                programs.add(pair)
            else:
                program = OTHER
        return Place(tenant, program, depth, worker, model)

    # ------------------------------------------------------------ output

    def to_json(self, tenant: str | None = None, decode: Decode | None = None) -> dict[str, Any]:
        """The report as JSON-like values, of one tenant or (None) of all. `decode` turns token ids into text.

            version, seconds (since start), tenant (or null: all)
            total      requests, prompt_tokens, hit_tokens, hit_rate, bound_tokens, bound_rate, generated_tokens,
                       predicted_tokens, drift_tokens, misses {never_seen, elsewhere, evicted, page_rounding, logits}
            tenants    a list of the same, with `tenant`
            programs   ... with `program` ("" for none, "(other)" beyond the first 256) and `depth` (number of forks)
            models     ... with `model`: the model, and each LoRA adapter
            workers    ... with `worker` ("" for none, "(other)" for those gone for long); if `tenant` is null, also
                       total_pages, used_pages (including evictable_pages), free_pages, and counters of
                       `messages.Load`: evicted_tokens, preemptions, steps, plain_keys, read_keys, busy_seconds,
                       forced_tokens, drafted_tokens, accepted_tokens, fetched_tokens (from host memory), disk_hits,
                       disk_read_tokens, disk_read_bytes, disk_read_seconds, disk_saved_seconds, disk_written_tokens,
                       disk_written_bytes, disk_lost_tokens, disk_evicted_tokens, disk_early_tokens; and what is there
                       now: host_tokens, disk_tokens, disk_bytes
            sessions   answers in chat prompts that were generated here: kept_turns (encoded by the generated ids),
                       respelled_turns (of them, those that the template renders differently), dropped_turns (generated
                       ids could not be used; by reason)
            pauses     sessions that wait for a tool (`Waits`): now, ended, dropped, seconds, tokens, kept_tokens
            hints      hints to the cache by verb: of each result how many, and the tokens for which they were done
            volatile   short text near the start of prompts that changed with most requests, so that tokens after it
                       were never hit; most lost tokens first: tenant, requests (that changed it), lost_tokens (prompt
                       tokens after it that were computed, but had been computed after another value), at (tokens before
                       it), length (tokens of its latest value), masked (the requests had a cache_salt, so the text is
                       not shown), before, values (the latest two), after (the text around it); these three are null if
                       masked, or without `decode`
            bound      exact (false: prefixes were dropped for the budget, so the bound is a lower one); tokens (kept)
                       and forgotten, null unless `tenant` is null

        `bound_*` is the hit of an infinite cache on the same requests, `predicted_tokens` the hits that the index
        predicted, `drift_tokens` the sum of |predicted - hit|; rates are shares of prompt tokens, 0 to 1.
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
            "models": self._group(tallies, lambda place: {"model": place.model}),
            "workers": workers,
            "sessions": self._sessions_of(tenant),
            "pauses": self._waits_of(tenant),
            "hints": self._hints_of(tenant),
            "volatile": self.volatile(tenant, decode),
            "bound": {
                "exact": not self._forgotten,
                "tokens": self.seen.tokens if tenant is None else None,
                "forgotten": self._forgotten if tenant is None else None,
            },
        }

    def volatile(self, tenant: str | None, decode: Decode | None) -> list[dict[str, Any]]:
        """As in `to_json`."""
        rows = self._prefix_breaking.rows(tenant, decode)
        return sorted(rows, key=lambda row: -row["lost_tokens"])[:MAX_SPANS]

    def total_of(self, tenant: str | None) -> Tally:
        """The sum of a tenant's (None: of all)."""
        return self.total(tally for place, tally in self._tallies.items() if tenant in (None, place.tenant))

    def total(self, tallies: Iterable[Tally] | None = None) -> Tally:
        """The sum of `tallies` (None: of all)."""
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

    def _hints_of(self, tenant: str | None) -> dict[str, dict[str, int]]:
        rows: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for (name, verb, result), count in self.hints.items():
            if tenant in (None, name):
                rows[verb][result] += count
        for (name, verb), tokens in self.hint_tokens.items():
            if tenant in (None, name):
                rows[verb]["tokens"] += tokens
        return {verb: dict(row) for verb, row in sorted(rows.items())}

    @property
    def sessions(self) -> dict[str, dict[str, Any]]:
        """By tenant: `sessions` of `to_json`."""
        return {tenant: self._sessions_of(tenant) for tenant in self._sessions}

    @property
    def workers(self) -> dict[str, WorkerState]:
        """By name, least recently heard first, including those that have gone recently."""
        self._forget()
        return self._workers.states

    def by_tenant_and_model(self) -> dict[tuple[str, str], Tally]:
        """Sums by (tenant, model or LoRA adapter)."""
        sums: dict[tuple[str, str], Tally] = defaultdict(Tally)
        for place, tally in self._tallies.items():
            sums[place.tenant, place.model].merge(tally)
        return sums

    @staticmethod
    def _group(tallies: dict[Place, Tally], key: Callable[[Place], dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows of sums by a key, sorted by it; each row begins with the fields of the key."""
        sums: dict[tuple[Any, ...], Tally] = defaultdict(Tally)
        names: tuple[str, ...] = ()
        for place, tally in tallies.items():
            names = tuple(found := key(place))
            sums[tuple(found.values())].merge(tally)
        return [dict(zip(names, values, strict=True)) | sums[values].to_json() for values in sorted(sums)]
