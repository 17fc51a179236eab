"""Incremental detokenization: token ids to text, as they are generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from radixrt.tokens.pieces import REPLACEMENT, Pieces

CONTEXT = 32
"""The fewest tokens of `WindowStream`'s window before it moves on."""


class Decoding(Protocol):
    """What a Detokenizer needs of a tokenizer."""

    vocab_size: int
    special_ids: frozenset[int]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def pieces(self, skip_special_tokens: bool) -> Pieces | None: ...

    def is_byte(self, token: int) -> bool: ...


class Detokenizer:
    """Text of a growing sequence of token ids (>= 0), integers or int32 bytes.

    `push(ids)` returns the text that is final with these ids, in whole characters. `flush()` returns the
    rest, with U+FFFD for incomplete characters. All returned texts, joined, equal
    `tokenizer.decode(all ids, skip_special_tokens)`. Therefore a run of byte tokens may be held back until
    it ends, if the decoding of its first bytes depends on its last.
    """

    __slots__ = ("flush", "push")

    def __init__(self, tokenizer: Decoding, skip_special_tokens: bool = True) -> None:
        pieces = tokenizer.pieces(skip_special_tokens)
        stream = WindowStream(tokenizer, skip_special_tokens) if pieces is None else pieces.stream()
        self.push: Callable[[Sequence[int] | bytes], str] = stream.push
        self.flush: Callable[[], str] = stream.flush


class WindowStream:
    """For decoders that no table describes: decodes a window of the last ids, and returns the text that was added.

        ids     ..........|======= window =======|
                   anchor ^                      ^ end
        text    emitted............|. gained ....

    The anchor moves only to a position from which decoding gives exactly the end of the longer window's text, so
    that no leading space is lost and no character is split. `flush` decodes everything once and returns what is
    missing.
    """

    def __init__(self, tokenizer: Decoding, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._anchor = 0
        self._seen = ""  # text of the window that was emitted already
        self._emitted: list[str] = []

    def push(self, ids: Sequence[int] | bytes) -> str:
        self._ids.extend(memoryview(ids).cast("i") if isinstance(ids, bytes) else ids)
        if not ids or self._in_run(len(self._ids)):
            return ""  # the text of a run of bytes may change with the next one
        text = self._decode(self._ids[self._anchor :])
        if text.endswith(REPLACEMENT) or not text.startswith(self._seen):
            return ""
        gained = text[len(self._seen) :]
        self._seen = text
        self._emitted.append(gained)
        if len(self._ids) - self._anchor > 2 * CONTEXT:
            self._move_anchor()
        return gained

    def flush(self) -> str:
        emitted = "".join(self._emitted)
        rest = self._decode(self._ids)[len(emitted) :]
        self._emitted = [emitted, rest]
        self._seen = self._decode(self._ids[self._anchor :])
        return rest

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip)

    def _in_run(self, end: int) -> bool:
        """Whether the last token before `end` that is not hidden is a single byte."""
        hidden = self._tokenizer.special_ids if self._skip else frozenset()
        for at in range(end - 1, -1, -1):
            if self._ids[at] not in hidden and self._ids[at] < self._tokenizer.vocab_size:
                return self._tokenizer.is_byte(self._ids[at])
        return False

    def _move_anchor(self) -> None:
        for anchor in range(len(self._ids) - CONTEXT, len(self._ids) - CONTEXT // 2):
            if self._in_run(anchor):
                continue
            text = self._decode(self._ids[anchor:])
            if text.strip() and self._seen.endswith(text.lstrip(" ")):
                self._anchor, self._seen = anchor, text
                return
