"""Finds short text that changes with every request near the start of otherwise equal prompts, such as a nonce in a
header or a clock in a system prompt. The cache can never hit the tokens after it.

    the first prompt of a kind   |......head......|cch=abc12|....... many equal tokens .......
    a later one                  |......head......|cch=9f|.......... many equal tokens .......|more
                                                  a span
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from radixrt.messages import TOKEN_BYTES, Namespace
from radixrt.tree import RadixTree, common_length, realigned, resembling

Decode = Callable[[bytes], str]
NEAR = 8192
"""Spans begin within this many tokens of the start of a prompt."""
HEAD = NEAR + 4096
"""Leading tokens that are kept of the first prompt of a kind."""
MAX_SPAN_TOKENS = 128
"""The most tokens of a span."""
MAX_SPANS = 4
"""The most spans in one prompt."""
LONG = 256
"""The fewest tokens that must be equal after spans, in total."""
ANCHOR = 16
"""Tokens that are searched for to align two prompts after a span."""
MIN_SAME_TOKENS = 64
"""The fewest tokens that must be equal after the anchor."""
MIN_CHANGES = 8
"""A span is reported once this many requests have changed it, and at least half of the requests of its kind."""
MAX_KINDS = 3
"""Kinds of prompts that are kept for a namespace: this many with spans, and as many without."""
MAX_NAMESPACES = 64
"""The most namespaces; with 48 KiB for each kind, heads take at most 19 MB."""
TAIL_TOKENS = 2_000_000
"""The most tokens in the tree of tails, of about 5 bytes each."""
SHOWN = 24
"""Tokens of text that are shown before and after a span."""
NO_TEXT = {"before": None, "values": None, "after": None}


class Change(NamedTuple):
    """Tokens [old, old_end) of one prompt are replaced by tokens [new, new_end) of another."""

    old: int
    old_end: int
    new: int
    new_end: int


@dataclass(slots=True)
class Span:
    """Tokens [start, end) of a kind's head, which differ in other prompts of the kind."""

    start: int
    end: int
    tail: int
    """Position in the head from which tails are kept: the largest end of a change so far."""
    changed: int = 0
    """Requests that changed it."""
    lost: int = 0
    """Prompt tokens after it that were computed although they had been computed after another value of it."""
    values: deque[bytes] = field(default_factory=lambda: deque(maxlen=2))
    """Its latest values, as token ids."""


@dataclass(slots=True, eq=False)
class Kind:
    """Prompts that equal the `head` of the first of them, except in `spans`."""

    number: int
    head: bytes
    spans: list[Span] = field(default_factory=list)
    requests: int = 2
    """Prompts of this kind since its first span was found, including the two in which it was found."""

    def has(self, ids: bytes) -> bool:
        """Whether a prompt is of this kind, judged by the text before and after the first span (there must be one)."""
        start, end = self.spans[0].start * TOKEN_BYTES, self.spans[0].end * TOKEN_BYTES
        after = self.head[end : end + ANCHOR * TOKEN_BYTES]
        return (
            ids.startswith(self.head[:start]) and ids.find(after, start, start + 2 * MAX_SPAN_TOKENS * TOKEN_BYTES) >= 0
        )

    def span(self, change: Change) -> Span:
        """The span that a change overlaps or is close to, extended to cover it; a new span if there is none."""
        for span in self.spans:
            if change.old <= span.end + ANCHOR and change.old_end >= span.start - ANCHOR:
                span.start, span.end = min(span.start, change.old), max(span.end, change.old_end)
                return span
        self.spans.append(span := Span(change.old, change.old_end, change.old_end))
        self.spans.sort(key=lambda one: one.start)
        return span

    def reported(self) -> list[Span]:
        """The spans that change often enough to be reported."""
        return [span for span in self.spans if span.changed >= MIN_CHANGES and 2 * span.changed >= self.requests]


class PrefixBreakingTexts:
    """Compares each new prompt with earlier ones. Memory is bounded by the constants above."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[tuple[str, str], list[Kind]] = OrderedDict()
        self._tails = RadixTree(values=False)
        """What followed the last span of prompts, by the number of their kind and position."""
        self._last_kind = 0

    def arrived(self, tenant: str, namespace: str, ids: bytes, known: int) -> None:
        """Record a new prompt, the first `known` tokens of which equal a prefix of earlier ones."""
        if known >= len(ids) // TOKEN_BYTES:  # nothing is new; also so that a request with several choices counts once
            return
        key = tenant, namespace
        kinds = self._kinds.get(key, [])
        of_kind = [kind for kind in kinds if kind.spans and kind.has(ids)]
        for kind in of_kind:
            kind.requests += 1
        if known > NEAR or len(ids) // TOKEN_BYTES - known < LONG:
            return
        if key not in self._kinds:
            self._kinds[key] = kinds
            if len(self._kinds) > MAX_NAMESPACES:
                self._kinds.popitem(last=False)
        self._kinds.move_to_end(key)
        before = max(0, known - MAX_SPAN_TOKENS)
        heads = [kind.head for kind in kinds]
        for at, same in resembling(heads, ids, before, MAX_SPAN_TOKENS, ANCHOR, MIN_SAME_TOKENS):
            kind = kinds[at]
            if same * TOKEN_BYTES == len(kind.head):  # it continues the first prompt
                return
            if changes := aligned(kind.head, ids, same):
                kinds.insert(0, kinds.pop(at))
                self._count(kind, ids, changes, known)
                return
        if of_kind:  # its span has a value that occurred before
            return
        self._last_kind += 1
        kinds.insert(0, Kind(self._last_kind, ids[: HEAD * TOKEN_BYTES]))
        for extra in [kind for kind in kinds if not kind.spans][MAX_KINDS:]:
            kinds.remove(extra)
        for extra in [kind for kind in kinds if kind.spans][MAX_KINDS:]:
            kinds.remove(extra)

    def delete(self, tenant: str) -> None:
        """Forget the texts of a tenant."""
        for key in [key for key in self._kinds if key[0] == tenant]:
            for kind in self._kinds.pop(key):
                self._tails.remove_namespaces(f"{kind.number} ")

    def _count(self, kind: Kind, ids: bytes, changes: list[Change], known: int) -> None:
        spans = [kind.span(change) for change in changes]
        same_until = self._seen_until(kind, ids, spans[-1], changes[-1])
        for span, change in zip(spans, changes, strict=True):
            span.changed += 1
            span.lost += max(0, same_until - max(known, change.new_end))
            begin, end = change.new - (change.old - span.start), change.new_end + (span.end - change.old_end)
            span.values.append(ids[begin * TOKEN_BYTES : end * TOKEN_BYTES])

    def _seen_until(self, kind: Kind, ids: bytes, span: Span, change: Change) -> int:
        """The position in a prompt up to which, apart from its spans, it equals an earlier prompt. `span` is its last
        span, and `change` how it differs there."""
        if change.old_end > span.tail or not span.changed:
            span.tail = max(span.tail, change.old_end)
            self._remember(f"{kind.number} {span.tail}", kind.head, span.tail)
        begin = change.new_end + span.tail - change.old_end
        return begin + self._remember(f"{kind.number} {span.tail}", ids, begin)

    def _remember(self, tail: str, ids: bytes, at: int) -> int:
        """Insert a prompt's tokens from `at` on into the tree of tails. Returns how many of them were there already."""
        known = self._tails.insert(tail, memoryview(ids)[at * TOKEN_BYTES :])
        if (excess := self._tails.tokens - TAIL_TOKENS) > 0:
            self._tails.evict(excess)
        return known

    def rows(self, tenant: str | None, decode: Decode | None) -> Iterator[dict[str, Any]]:
        """Spans that change with most requests, of one tenant or (None) of all; see `Report.to_json`."""
        for (whose, namespace), kinds in self._kinds.items():
            masked = has_salt(namespace)
            for kind in kinds if tenant in (None, whose) else ():
                for span in kind.reported():
                    yield {
                        "tenant": whose,
                        "requests": span.changed,
                        "lost_tokens": span.lost,
                        "at": span.start,
                        "length": len(span.values[-1]) // TOKEN_BYTES,
                        "masked": masked,
                    } | (_text(kind, span, decode) if decode and not masked else NO_TEXT)


def has_salt(namespace: str) -> bool:
    """Whether the namespace of a key has a salt. A salt separates users of one tenant, so the tenant's report must not
    show their text."""
    return bool(Namespace.of(namespace).salt)


def aligned(old: bytes, new: bytes, same: int) -> list[Change]:
    """The changes between two prompts whose longest common prefix has `same` tokens. Empty if fewer than LONG tokens
    are equal after them. Only the first HEAD tokens are compared."""
    changes: list[Change] = []
    agreed, at, to = 0, same, same
    while (
        max(at, to) <= NEAR
        and (ends := realigned(old, new, at, to, MAX_SPAN_TOKENS, ANCHOR, MIN_SAME_TOKENS)) is not None
    ):
        changes.append(Change(at, ends[0], to, ends[1]))
        at, to = ends
        if len(changes) > MAX_SPANS:
            break
        length = _common(old, new, at, to)
        agreed, at, to = agreed + length, at + length, to + length
    return changes if agreed >= LONG else []


def _common(old: bytes, new: bytes, at: int, to: int) -> int:
    """How many tokens of `old` from `at` on equal those of `new` from `to` on, up to token HEAD of `new`."""
    return common_length(memoryview(old)[at * TOKEN_BYTES :], memoryview(new)[to * TOKEN_BYTES : HEAD * TOKEN_BYTES])


def _text(kind: Kind, span: Span, decode: Decode) -> dict[str, Any]:
    """The text around a span, and of its latest values."""
    start, end = span.start * TOKEN_BYTES, span.end * TOKEN_BYTES
    around = SHOWN * TOKEN_BYTES
    before, after = kind.head[max(0, start - around) : start], kind.head[end : end + around]
    return {
        "before": decode(before) if before else "",
        "values": [decode(value) if value else "" for value in span.values],
        "after": decode(after) if after else "",
    }
