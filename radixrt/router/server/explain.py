"""Why a request missed the cache: where its prompt parts from what was known, what was evicted, what others hold."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from radixrt.messages import TOKEN_BYTES, Deltas
from radixrt.report import Report
from radixrt.report.causes import Misses
from radixrt.report.evictions import Eviction
from radixrt.report.recent import Ended
from radixrt.report.volatile import has_salt
from radixrt.router.core.core import RouterCore
from radixrt.router.core.effects import Client
from radixrt.tokens import Tokenizer
from radixrt.tokens.message_marks import MessageMarks

SHOWN = 24
"""Tokens of text that are shown on each side."""
COMPARED = 160
"""Tokens on both sides among which the place is searched at which they agree again."""
AGREE = 8
"""Tokens that have to be equal there."""


MAX_WANTED = 4096
"""The most requests in flight whose explanation is wanted; beyond that the oldest get none."""


class Explainer:
    """Text is shown only if there is a `tokenizer`, and never that of prompts with a salt (see `has_salt`)."""

    def __init__(self, core: RouterCore, report: Report, tokenizer: Tokenizer | None) -> None:
        self._core = core
        self._report = report
        self._tokenizer = tokenizer
        self._wanted: dict[tuple[Client, int], str] = {}
        """Names of the requests that are to be explained."""

    @functools.cached_property
    def _marks(self) -> MessageMarks:
        return MessageMarks(self._tokenizer)

    def want(self, client: Client, request_id: int) -> None:
        """The last Delta of a request's first choice is to be explained."""
        if (number := self._core.number(client, request_id)) is not None:
            self._wanted[client, request_id] = str(number)
            if len(self._wanted) > MAX_WANTED:
                del self._wanted[next(iter(self._wanted))]

    def add_to(self, client: Client, deltas: Deltas) -> None:
        """Add explanations to the last Deltas of requests that want one."""
        for delta in deltas.items if self._wanted else ():
            if delta.finish is None or delta.usage is None or delta.index or (client, delta.id) not in self._wanted:
                continue
            one = self._report.recent.find(None, self._wanted.pop((client, delta.id)))
            if one is not None:
                delta.usage = msgspec.structs.replace(delta.usage, explain=self.explain(one, one.tenant))

    def explain(self, one: Ended, tenant: str | None) -> dict[str, Any]:
        """Of a request that has ended, for those who may see a tenant's figures (None: all)."""
        prompt, misses = one.ids, one.misses or Misses()
        diverged = self._diverged(one, prompt) if prompt and misses.never_seen else None
        eviction = self._eviction(one, prompt, misses) if prompt and misses.evicted else None
        evicted = self._evicted(one, misses, eviction, tenant) if misses.evicted else None
        elsewhere = self._elsewhere(one, prompt, misses) if misses.elsewhere else None
        return {
            "id": one.id,
            "prompt": one.prompt,
            "hit": one.hit,
            "bound": one.bound,
            "misses": misses._asdict() if one.misses else {},
            "worker": one.worker,
            "diverged": diverged,
            "evicted": evicted,
            "elsewhere": elsewhere,
            "sentences": _sentences(one, misses, diverged, evicted, elsewhere),
        }

    # ------------------------------------------------------------ what is new

    def _diverged(self, one: Ended, prompt: bytes) -> dict[str, Any] | None:
        """Where the prompt parts from another one; None if it extends one, or that is forgotten."""
        at = one.bound
        theirs = self._report.seen.continuation(one.namespace, prompt, at, COMPARED)
        if not theirs:
            return None
        begin = at * TOKEN_BYTES
        ours = prompt[begin : begin + COMPARED * TOKEN_BYTES]
        before = prompt[max(0, begin - SHOWN * TOKEN_BYTES) : begin]
        message, role = self._marks.at(prompt, at) or (None, None)
        where = {"token": at, "message": message, "role": role}
        if self._tokenizer is None or has_salt(one.namespace):
            return where | dict.fromkeys(("before", "ours", "theirs", "after"))
        again = _agree_again(ours, theirs)
        mine, other = again or (SHOWN, SHOWN)
        after = ours[mine * TOKEN_BYTES :][: SHOWN * TOKEN_BYTES] if again else b""
        return where | {
            "before": self._text(before),
            "ours": self._text(ours[: min(mine, SHOWN) * TOKEN_BYTES]),
            "theirs": self._text(theirs[: min(other, SHOWN) * TOKEN_BYTES]),
            "after": self._text(after),
        }

    def _text(self, ids: bytes) -> str:
        """With special tokens; without the halves of characters at both ends."""
        assert self._tokenizer is not None
        text = self._tokenizer.decode(memoryview(ids).cast("i").tolist(), skip_special_tokens=False) if ids else ""
        return text.strip("\ufffd")

    # ------------------------------------------------------------ what was not there

    def _eviction(self, one: Ended, prompt: bytes, misses: Misses) -> Eviction | None:
        return self._report.recent.evictions.find(one.namespace, prompt, one.hit, one.bound, one.worker)

    @staticmethod
    def _evicted(one: Ended, misses: Misses, eviction: Eviction | None, tenant: str | None) -> dict[str, Any]:
        """`seconds_ago`: before the request arrived. Whose requests pushed it out is shown to those who may see
        them."""
        ago, by = None, ""
        if eviction is not None:
            ago = max(0.0, one.arrived - eviction.at)
            if eviction.tenant and tenant in (None, eviction.tenant):
                by = eviction.program or eviction.tenant
            elif eviction.tenant:
                by = "another tenant"
        return {"tokens": misses.evicted, "seconds_ago": ago, "by": by}

    def _elsewhere(self, one: Ended, prompt: bytes, misses: Misses) -> dict[str, Any]:
        """The other worker that holds most of the prompt now."""
        held = self._core.index.match(one.namespace, prompt) if prompt else {}
        others = [worker for worker in self._core.workers if worker.name != one.worker and held.get(worker.number)]
        most = max(others, key=lambda worker: held[worker.number], default=None)
        return {"tokens": misses.elsewhere, "worker": most.name if most else ""}


def _agree_again(ours: bytes, theirs: bytes) -> tuple[int, int] | None:
    """The first positions, in tokens of each, from which on AGREE tokens are equal."""
    size = AGREE * TOKEN_BYTES
    places: dict[bytes, int] = {}
    for at in range(len(theirs) // TOKEN_BYTES - AGREE + 1):
        places.setdefault(theirs[at * TOKEN_BYTES : at * TOKEN_BYTES + size], at)
    for at in range(len(ours) // TOKEN_BYTES - AGREE + 1):
        if (there := places.get(ours[at * TOKEN_BYTES : at * TOKEN_BYTES + size])) is not None:
            return at, there
    return None


def _sentences(
    one: Ended,
    misses: Misses,
    diverged: dict[str, Any] | None,
    evicted: dict[str, Any] | None,
    elsewhere: dict[str, Any] | None,
) -> list[str]:
    if one.misses is None:
        return ["It ended before its prompt was computed."]
    said = [f"{one.hit} of {one.prompt} prompt tokens came from the cache."]
    if evicted:
        said.append(_of_evicted(evicted))
    if elsewhere:
        where = f"worker {elsewhere['worker']}" if elsewhere["worker"] else "another worker"
        said.append(f"{elsewhere['tokens']} tokens are cached on {where}; {one.worker} was expected to answer sooner.")
    if diverged:
        said += _of_diverged(diverged, misses)
    elif misses.never_seen:
        how = "they follow what was seen before, as in a next turn" if one.bound else "no earlier prompt begins so"
        said.append(f"{misses.never_seen} tokens are new: {how}.")
    if misses.page_rounding:
        said.append(f"{misses.page_rounding} tokens do not fill a page, and only whole pages are shared.")
    return said


def _of_evicted(evicted: dict[str, Any]) -> str:
    said = f"{evicted['tokens']} tokens had been computed before, and were not cached any more"
    if evicted["seconds_ago"] is None:
        return said + "."
    said += f": they were evicted about {evicted['seconds_ago']:.0f} s before it arrived"
    return said + (f", while requests of {evicted['by']} were admitted." if evicted["by"] else ".")


def _of_diverged(diverged: dict[str, Any], misses: Misses) -> list[str]:
    where = f"token {diverged['token']}"
    if diverged["message"] is not None:
        where += f", in message {diverged['message']} ({diverged['role']})"
    said = f"From {where}, on it differs from all that was seen before: {misses.never_seen} tokens had to be computed."
    if diverged["ours"] is None:
        return [said]
    return [said, f"There it has {diverged['ours']!r}, and an earlier request had {diverged['theirs']!r}."]
