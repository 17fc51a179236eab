"""Jump-forward decoding: the tokens of text that a grammar forces are appended at once and computed as a chunk, instead
of being sampled one by one.

    schema:  {"name": "...", "age": ...}
    sampled  {"          appended  name":          sampled  "Ada",           appended   "age":        sampled  ...

Only the text is forced, not how it is split into tokens. The tokenizer's own split is taken, up to where a token could
begin that reaches beyond the forced text: from there the model chooses.

What is appended depends only on the tokens before: not on the batch, on chunks, on preemption or on the worker.
"""

from __future__ import annotations

import copy
import heapq
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

SHORTEST = 3
"""The fewest tokens that are appended. n tokens save their request n - 1 steps; but a step with a chunk cannot use the
CUDA graph of decodes, and takes all other requests a millisecond or more longer. At the beginning of a text, where a
chunk is computed anyway, one token is enough."""
LONGEST = 2048
"""The most characters that are appended at once; forced text beyond them is appended after the next sampled token."""
MAX_FORCED_BYTES = 1 << 16
"""A grammar whose forced text may be longer than this many bytes is not used for jump-forward: xgrammar always looks
for all of it (see `is_bounded`)."""
REMEMBERED = 4096
"""The most texts whose tokens are cached."""
ANCHOR = "\n"
"""Put before a text for tokenizers that add a space before the first word (SentencePiece)."""


class Spelling:
    """Splits text into tokens as the tokenizer does. `tokens` are the bytes of each id, b"" for an id without text.
    `encode` is the tokenizer; without it, the longest matching token is taken each time."""

    def __init__(self, tokens: Sequence[bytes], encode: Callable[[str], Sequence[int]] | None = None) -> None:
        self._tokens = tokens
        self._encode = encode
        self._ids = {token: i for i, token in reversed(list(enumerate(tokens))) if token}
        self._sorted = sorted(self._ids)
        self._longest = max(map(len, self._sorted), default=0)
        self._known: dict[str, tuple[int, ...]] = {}

    def with_own_cache(self) -> Spelling:
        """The same, with a cache of its own: from the time that a text takes, one can tell whether it was there."""
        other = copy.copy(self)
        other._known = {}
        return other

    def before(self, text: str) -> tuple[int, ...]:
        """The first tokens of `text` that do not depend on what follows it: up to the point where a token could begin
        that reaches beyond the end of `text`."""
        found = self._known.get(text)
        if found is None:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            found = self._known[text] = self._cut(text.encode(), self._spell(text))
        return found

    def _cut(self, text: bytes, ids: Sequence[int]) -> tuple[int, ...]:
        at = 0
        for count, i in enumerate(ids):
            if self._begins_longer(text[at : at + self._longest]):
                return tuple(ids[:count])
            at += self._size(i)
        return tuple(ids)

    def _begins_longer(self, rest: bytes) -> bool:
        """Whether there is a token that begins with `rest` and is longer."""
        if len(rest) >= self._longest:
            return False
        at = bisect_right(self._sorted, rest)
        return at < len(self._sorted) and self._sorted[at].startswith(rest)

    def _spell(self, text: str) -> list[int]:
        """Ids of tokens whose bytes are exactly those of `text`; empty if the tokenizer gives none."""
        data = text.encode()
        if self._encode is None:
            return self._longest_first(data)
        for anchor in ("", ANCHOR):
            ids, left, begin = list(self._encode(anchor + text)), len(data), 0
            for begin in range(len(ids) - 1, -1, -1):
                left -= self._size(ids[begin])
                if left <= 0:
                    break
            ids = ids[begin:]
            if left == 0 and all(map(self._size, ids)) and b"".join(self._tokens[i] for i in ids) == data:
                return ids
        return []

    def _size(self, id: int) -> int:
        """Bytes of a token; 0 for an id that the model does not have."""
        return len(self._tokens[id]) if id < len(self._tokens) else 0

    def _longest_first(self, data: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(data):
            sizes = range(min(self._longest, len(data) - at), 0, -1)
            size = next((n for n in sizes if data[at : at + n] in self._ids), 0)
            if not size:
                return []
            ids.append(self._ids[data[at : at + size]])
            at += size
        return ids


def forced_text(matcher: Any) -> str:
    """The text that an xgrammar matcher forces next, at most LONGEST characters, without an incomplete character at its
    end. For a grammar that is not `is_bounded` this may never return."""
    try:
        return matcher.find_jump_forward_string()[:LONGEST]
    except UnicodeDecodeError as error:
        return error.object[: error.start].decode()[:LONGEST]


BYTES, CLASS, REF, SEQUENCE, CHOICES, REPEAT = 0, 1, 4, 5, 6, 8
"""Kinds of expressions in xgrammar's JSON. All others can match the empty text."""


def is_bounded(grammar: str) -> bool:
    """Whether every expression of an xgrammar Grammar, given as JSON, matches some text of at most MAX_FORCED_BYTES
    bytes. Forced text is part of every text that can follow, so it is then no longer than that. It is endless for `root
    ::= "ab" root`, for example.

    Finds the shortest texts of all expressions in order of length (D. E. Knuth, A Generalization of Dijkstra's
    Algorithm, 1977)."""
    parsed = json.loads(grammar)
    data, begins = parsed["grammar_expr_data"], parsed["grammar_expr_indptr"]
    parts = [(data[at], data[at + 2 : at + 2 + data[at + 1]]) for at in begins]
    bodies = [rule[1] for rule in parsed["rules"]]
    users: dict[int, list[int]] = defaultdict(list)
    missing, length, bounded, ready = [0] * len(parts), [0] * len(parts), set(), []
    for i, (kind, values) in enumerate(parts):
        inner = values if kind in (SEQUENCE, CHOICES) else [bodies[values[0]]] if kind in (REF, REPEAT) else []
        missing[i] = len(inner)
        for one in inner:
            users[one].append(i)
        if not missing[i]:
            ready.append((len(values) if kind == BYTES else int(kind == CLASS), i))
    heapq.heapify(ready)
    while ready:
        size, i = heapq.heappop(ready)
        if i in bounded or size > MAX_FORCED_BYTES:
            continue
        bounded.add(i)
        for user in users[i]:
            kind, values = parts[user]
            length[user] += size * values[1] if kind == REPEAT else size
            missing[user] -= 1
            if kind == CHOICES:
                heapq.heappush(ready, (size, user))
            elif not missing[user]:
                heapq.heappush(ready, (length[user], user))
    return len(bounded) == len(parts)
