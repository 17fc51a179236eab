"""Short text that changes with every request, near the start of prompts that otherwise agree: a nonce in a header, a
clock in a system prompt. Nothing behind it is ever hit.

    the first prompt of a kind   |......head......|cch=abc12|....... the same for long .......
    a later one                  |......head......|cch=9f|.......... the same for long .......|more
                                                  a span
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from radixrt.messages import TOKEN_BYTES
from radixrt.tree import RadixTree, common_length, realigned, resembling

Decode = Callable[[bytes], str]
NEAR = 8192
"""Tokens from the start of a prompt in which spans are looked for."""
HEAD = NEAR + 4096
"""Tokens that are kept of a prompt."""
MOST_SPAN = 128
"""Tokens of a span."""
MOST_SPANS = 4
"""Spans of one prompt."""
LONG = 256
"""Tokens that must be the same again behind spans."""
ANCHOR = 16
"""Tokens by which prompts are aligned again behind a span, and then so many times LEAST_SAME must be the same."""
LEAST_SAME = 64
LEAST_CHANGES = 8
"""Requests that change a span before it is named, and at least half of those of its kind."""
MOST_KINDS = 3
"""Kinds of prompts of a namespace that are remembered with spans, and as many without."""
MOST_NAMESPACES = 64
"""With 48 KiB of each kind: 19 MB at most. The tails behind spans take 5 bytes a token more."""
TAIL_TOKENS = 2_000_000
SHOWN = 24
"""Tokens shown on either side of a span."""
NO_TEXT = {"before": None, "values": None, "after": None}


class Change(NamedTuple):
    """Tokens `old` to `old_end` of one prompt stand where `new` to `new_end` stand in another."""

    old: int
    old_end: int
    new: int
    new_end: int


@dataclass(slots=True)
class Span:
    """Where prompts of a kind differ, in tokens of the first one. `lost`: prompt tokens behind it that were computed
    although they had been computed behind another value of it."""

    start: int
    end: int
    tail: int
    """Where it ended when it was last found to end later: tails are kept from here."""
    changed: int = 0
    lost: int = 0
    values: deque[bytes] = field(default_factory=lambda: deque(maxlen=2))


@dataclass(slots=True, eq=False)
class Kind:
    """Prompts that agree with one of which the `head` is kept. `asked`: since it is known that they differ."""

    number: int
    head: bytes
    spans: list[Span] = field(default_factory=list)
    asked: int = 2

    def has(self, ids: bytes) -> bool:
        """Whether a prompt is of this kind, which has spans, going by what stands around the first of them."""
        start, end = self.spans[0].start * TOKEN_BYTES, self.spans[0].end * TOKEN_BYTES
        behind = self.head[end : end + ANCHOR * TOKEN_BYTES]
        return ids.startswith(self.head[:start]) and ids.find(behind, start, start + 2 * MOST_SPAN * TOKEN_BYTES) >= 0

    def span(self, change: Change) -> Span:
        """The span that a change is of, or is next to, grown to hold it."""
        for span in self.spans:
            if change.old <= span.end + ANCHOR and change.old_end >= span.start - ANCHOR:
                span.start, span.end = min(span.start, change.old), max(span.end, change.old_end)
                return span
        self.spans.append(span := Span(change.old, change.old_end, change.old_end))
        self.spans.sort(key=lambda one: one.start)
        return span

    def named(self) -> list[Span]:
        return [span for span in self.spans if span.changed >= LEAST_CHANGES and 2 * span.changed >= self.asked]


class Volatile:
    """Fed with each prompt; memory is bounded by the constants above."""

    def __init__(self) -> None:
        self._kinds: OrderedDict[tuple[str, str], list[Kind]] = OrderedDict()
        self._tails = RadixTree(values=False)
        self._last_kind = 0

    def arrived(self, tenant: str, namespace: str, ids: bytes, known: int) -> None:
        """A prompt came in, of which the first `known` tokens had come in before."""
        if known >= len(ids) // TOKEN_BYTES:  # the next choice of a request, which counts once
            return
        key = tenant, namespace
        kinds = self._kinds.get(key, [])
        of_kind = [kind for kind in kinds if kind.spans and kind.has(ids)]
        for kind in of_kind:
            kind.asked += 1
        if known > NEAR or len(ids) // TOKEN_BYTES - known < LONG:
            return
        if key not in self._kinds:
            self._kinds[key] = kinds
            if len(self._kinds) > MOST_NAMESPACES:
                self._kinds.popitem(last=False)
        self._kinds.move_to_end(key)
        before = max(0, known - MOST_SPAN)
        heads = [kind.head for kind in kinds]
        for at, same in resembling(heads, ids, before, MOST_SPAN, ANCHOR, LEAST_SAME):
            kind = kinds[at]
            if same * TOKEN_BYTES == len(kind.head):  # it has grown
                return
            if changes := aligned(kind.head, ids, same):
                kinds.insert(0, kinds.pop(at))
                self._count(namespace, kind, ids, changes, known)
                return
        if of_kind:  # with a value that it had before
            return
        self._last_kind += 1
        kinds.insert(0, Kind(self._last_kind, ids[: HEAD * TOKEN_BYTES]))
        for extra in [kind for kind in kinds if not kind.spans][MOST_KINDS:]:
            kinds.remove(extra)
        for extra in [kind for kind in kinds if kind.spans][MOST_KINDS:]:
            kinds.remove(extra)

    def _count(self, namespace: str, kind: Kind, ids: bytes, changes: list[Change], known: int) -> None:
        spans = [kind.span(change) for change in changes]
        same_until = self._behind(namespace, kind, ids, spans[-1], changes[-1])
        for span, change in zip(spans, changes, strict=True):
            span.changed += 1
            span.lost += max(0, same_until - max(known, change.new_end))
            begin, end = change.new - (change.old - span.start), change.new_end + (span.end - change.old_end)
            span.values.append(ids[begin * TOKEN_BYTES : end * TOKEN_BYTES])

    def _behind(self, namespace: str, kind: Kind, ids: bytes, span: Span, change: Change) -> int:
        """Up to which token a prompt had come in before, but for its spans, of which this is the last."""
        if change.old_end > span.tail or not span.changed:
            span.tail = max(span.tail, change.old_end)
            self._remember(f"{namespace}\n{kind.number}\n{span.tail}", kind.head, span.tail)
        begin = change.new_end + span.tail - change.old_end
        return begin + self._remember(f"{namespace}\n{kind.number}\n{span.tail}", ids, begin)

    def _remember(self, tail: str, ids: bytes, at: int) -> int:
        """Put what follows a span into the tree: how many tokens of it had followed it before."""
        known = self._tails.insert(tail, memoryview(ids)[at * TOKEN_BYTES :])
        if (excess := self._tails.tokens - TAIL_TOKENS) > 0:
            self._tails.evict(excess)
        return known

    def rows(self, tenant: str | None, decode: Decode | None) -> Iterator[dict[str, Any]]:
        """Spans that change with the requests, of one tenant or of all; see `Report.to_json`."""
        for (whose, namespace), kinds in self._kinds.items():
            masked = has_salt(namespace)
            for kind in kinds if tenant in (None, whose) else ():
                for span in kind.named():
                    yield {
                        "tenant": whose,
                        "requests": span.changed,
                        "lost_tokens": span.lost,
                        "at": span.start,
                        "length": len(span.values[-1]) // TOKEN_BYTES,
                        "masked": masked,
                    } | (_text(kind, span, decode) if decode and not masked else NO_TEXT)


def has_salt(namespace: str) -> bool:
    """Whether requests of a namespace, which is a tenant, a model and a cache_salt, a line each, have a salt: a wall
    inside the tenant, behind which a reader of the report may not look."""
    return any(namespace.split("\n", 2)[2:])


def aligned(old: bytes, new: bytes, same: int) -> list[Change]:
    """Where two prompts differ that agree for long behind it; nothing if they do not, or not at all. Their first `same`
    tokens agree, and no more; only the first HEAD tokens are looked at."""
    changes: list[Change] = []
    agreed, at, to = 0, same, same
    while max(at, to) <= NEAR and (found := realigned(old, new, at, to, MOST_SPAN, ANCHOR, LEAST_SAME)) is not None:
        changes.append(Change(at, found[0], to, found[1]))
        at, to = found
        if len(changes) > MOST_SPANS:
            break
        length = _common(old, new, at, to)
        agreed, at, to = agreed + length, at + length, to + length
    return changes if agreed >= LONG else []


def _common(old: bytes, new: bytes, at: int, to: int) -> int:
    """How many tokens are the same from `at` and `to` on, up to token HEAD of `new`."""
    return common_length(memoryview(old)[at * TOKEN_BYTES :], memoryview(new)[to * TOKEN_BYTES : HEAD * TOKEN_BYTES])


def _text(kind: Kind, span: Span, decode: Decode) -> dict[str, Any]:
    """What stands around a span, and its latest values."""
    start, end = span.start * TOKEN_BYTES, span.end * TOKEN_BYTES
    around = SHOWN * TOKEN_BYTES
    before, after = kind.head[max(0, start - around) : start], kind.head[end : end + around]
    return {
        "before": decode(before) if before else "",
        "values": [decode(value) if value else "" for value in span.values],
        "after": decode(after) if after else "",
    }
