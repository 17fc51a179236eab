"""Text that a grammar forces is not drawn token by token: its tokens are appended at once, and computed as a chunk.

    the schema says      {"name": "...", "age": ...}
    drawn  {"            appended  name ":          drawn  " Ada ",           appended   " age ":        drawn  ...

Only the text is forced; it has as many spellings as there are ways to cut it into tokens. Taken is the tokenizer's own,
up to where a token may begin that goes on beyond the forced text: there the model chooses.

What is appended depends on the tokens before alone: not on the batch, on chunks, on preemption or on the worker.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

SHORTEST = 3
"""Tokens. A run saves as many steps of its request less one; but the step with its chunk is not the graph of a batch
of decodes and takes a millisecond or more longer for all the others. At the beginning of a text, where a chunk is
computed anyway, any run will do."""
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
            if self._begins_longer(text[at:]):
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
    """The text that must come next by an xgrammar matcher, without a part of a character at its end."""
    try:
        return matcher.find_jump_forward_string()
    except UnicodeDecodeError as error:
        return error.object[: error.start].decode()


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
