"""Text that a grammar forces is not drawn token by token: its tokens are appended at once, and computed as a chunk.

    the schema says      {"name": "...", "age": ...}
    drawn  {"            appended  name ":          drawn  " Ada ",           appended   " age ":        drawn  ...

Only the text is forced; it has as many spellings as there are ways to cut it into tokens. Taken is the tokenizer's own,
up to where a token may begin that goes on beyond the forced text: there the model chooses.

What is appended depends on the tokens before alone: not on the batch, on chunks, on preemption or on the worker.
"""

from __future__ import annotations

import heapq
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

SHORTEST = 3
"""Tokens. A run saves as many steps of its request less one; but the step with its chunk is not the graph of a batch
of decodes and takes a millisecond or more longer for all the others. At the beginning of a text, where a chunk is
computed anyway, any run will do."""
LONGEST = 2048
"""Characters that are appended at once; what is forced beyond them comes after the next token."""
MOST_FORCED = 1 << 16
"""Bytes: a grammar with a part of which every text is longer is drawn, as xgrammar looks for all that is forced."""
REMEMBERED = 4096
"""Texts whose tokens are kept."""
ANCHOR = "\n"
"""Before a text, for tokenizers that put a space before the first word (SentencePiece)."""


class Spelling:
    """How a tokenizer writes texts: `tokens` are its tokens' bytes by id, b"" for one that no text is made of; `encode`
    gives the ids of a text; without it, the longest token comes first."""

    def __init__(self, tokens: Sequence[bytes], encode: Callable[[str], Sequence[int]] | None = None) -> None:
        self._tokens = tokens
        self._encode = encode
        self._ids = {token: i for i, token in reversed(list(enumerate(tokens))) if token}
        self._sorted = sorted(self._ids)
        self._longest = max(map(len, self._sorted), default=0)
        self._known: dict[str, tuple[int, ...]] = {}

    def before(self, text: str) -> tuple[int, ...]:
        """The tokens that `text` begins with, whatever follows it: up to where one may begin that is longer than the
        rest of it."""
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
        """Whether a token begins with `rest` and goes on."""
        if len(rest) >= self._longest:
            return False
        at = bisect_right(self._sorted, rest)
        return at < len(self._sorted) and self._sorted[at].startswith(rest)

    def _spell(self, text: str) -> list[int]:
        """Ids of tokens that make up `text` to the byte; none if the tokenizer has no such."""
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
        """Bytes of a token; 0 for one that the model does not have."""
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


def certain_text(matcher: Any) -> str:
    """The text that must come next by an xgrammar matcher, LONGEST at most, without a part of a character at its
    end. Only for a grammar that `is_bounded`: else it may not return."""
    try:
        return matcher.find_jump_forward_string()[:LONGEST]
    except UnicodeDecodeError as error:
        return error.object[: error.start].decode()[:LONGEST]


BYTES, CLASS, REF, SEQUENCE, CHOICES, REPEAT = 0, 1, 4, 5, 6, 8
"""Kinds of expressions in xgrammar's JSON; of the others, the empty text is one, or free text that may be empty."""


def is_bounded(grammar: str) -> bool:
    """Whether every part of an xgrammar Grammar, given as JSON, has a text of at most MOST_FORCED bytes. What is
    forced is part of every text that can follow: then it has an end, and soon. `root ::= "ab" root` has none.

    The shortest text of each part in order of length: D. E. Knuth, A Generalization of Dijkstra's Algorithm, 1977."""
    parsed = json.loads(grammar)
    data, begins = parsed["grammar_expr_data"], parsed["grammar_expr_indptr"]
    parts = [(data[at], data[at + 2 : at + 2 + data[at + 1]]) for at in begins]
    bodies = [rule[1] for rule in parsed["rules"]]
    users: dict[int, list[int]] = defaultdict(list)
    missing, length, found, ready = [0] * len(parts), [0] * len(parts), set(), []
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
        if i in found or size > MOST_FORCED:
            continue
        found.add(i)
        for user in users[i]:
            kind, values = parts[user]
            length[user] += size * values[1] if kind == REPEAT else size
            missing[user] -= 1
            if kind == CHOICES:
                heapq.heappush(ready, (size, user))
            elif not missing[user]:
                heapq.heappush(ready, (length[user], user))
    return len(found) == len(parts)


def on_one_line(tag: str, write: Callable[[str], str]) -> str:
    """A structural tag whose JSON schemas are grammars with one way to write each: `write` gives it in EBNF."""
    return json.dumps(_on_one_line(json.loads(tag), write), ensure_ascii=False)


def _on_one_line(value: Any, write: Callable[[str], str]) -> Any:
    if isinstance(value, list):
        return [_on_one_line(inner, write) for inner in value]
    if not isinstance(value, dict):
        return value
    if value.get("type") == "json_schema" and set(value) == {"type", "json_schema"}:
        return {"type": "grammar", "grammar": write(json.dumps(value["json_schema"], ensure_ascii=False))}
    return {key: inner if key == "json_schema" else _on_one_line(inner, write) for key, inner in value.items()}
