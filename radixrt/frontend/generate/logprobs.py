"""Assigns tokens, with their log-probabilities, to parsed text, and finds where in a text they begin."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from radixrt.formats.parsing import Content, Piece, Reasoning
from radixrt.messages import TokenLogprob
from radixrt.tokens import Tokenizer

TRIES = 8
"""The most occurrences of a text in the tokens' bytes that are tried, to find one that begins with a token."""


class Wanted(NamedTuple):
    """The number of alternatives that a request reports for each token of its answers and of its prompt; None: no
    log-probabilities of them."""

    output: int | None
    prompt: int | None


def limited(found: list[TokenLogprob] | None, most: int | None) -> list[TokenLogprob] | None:
    """Log-probabilities with at most so many alternatives; None if they are not wanted at all."""
    if found is None or most is None:
        return None
    return [one if len(one.top) <= most else TokenLogprob(one.token, one.logprob, one.top[:most]) for one in found]


def token_json(tokenizer: Tokenizer | None, found: TokenLogprob, names_ids: bool = False) -> dict[str, Any]:
    """A token with its log-probabilities, in the format of chats and responses. `names_ids`: see `Reported`."""
    tops = [_likelihood(tokenizer, token, logprob, names_ids) for token, logprob in found.top]
    return _likelihood(tokenizer, found.token, found.logprob, names_ids) | {"top_logprobs": tops}


def _likelihood(tokenizer: Tokenizer | None, token: int, logprob: float, names_ids: bool) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token) if tokenizer else b""
    name = token_text(None if names_ids else tokenizer, token)
    return {"token": name, "logprob": finite(logprob), "bytes": list(raw)}


def token_text(tokenizer: Tokenizer | None, token: int) -> str:
    """The text of a single token."""
    return tokenizer.token_text(token) if tokenizer else f"token_id:{token}"


def finite(logprob: float) -> float:
    """Replace infinity, which JSON does not have, by -9999, which OpenAI writes for nearly impossible tokens. (NaN,
    which a prompt's first token has, becomes null.)"""
    return max(logprob, -9999.0)


class Tokens:
    """The tokens of an answer whose text has not been parsed yet.

    tokens   |Yes|.\\n\\n|The| cat|</think>|            a parser returns text in pieces other than tokens, and later,
    texts    |Yes.   |\\n\\nThe cat|                    and leaves out marks
    """

    def __init__(self, tokenizer: Tokenizer | None, hidden: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        """Tokens that never become text."""
        self._waiting: deque[tuple[int, int, TokenLogprob]] = deque()
        """(begin, end) of each token in the bytes of the whole answer, and the token."""
        self._said = b""
        """Bytes whose text was not parsed yet; they begin at `_at`."""
        self._at = 0

    def add(self, tokens: Iterable[TokenLogprob]) -> None:
        """Add the next tokens. Ignored without a tokenizer."""
        if self._tokenizer is None:
            return
        texts = []
        begin = self._at + len(self._said)
        for token in tokens:
            if token.token in self._hidden:
                continue
            texts.append(self._tokenizer.token_bytes(token.token))
            self._waiting.append((begin, begin + len(texts[-1]), token))
            begin += len(texts[-1])
        self._said += b"".join(texts)

    def take(self, text: str) -> list[TokenLogprob]:
        """The tokens that begin in the next `text`. Tokens before it belong to no text."""
        if not self._waiting:
            return []
        sure = max(text.split("\ufffd"), key=len).encode()  # U+FFFD stands for unknown bytes
        place = self._place(sure)
        if place < 0:  # it may begin with white space that a format puts between messages, which is in no token
            sure = sure.lstrip()
            place = self._place(sure)
        if place < 0:
            return []
        begin, end = self._at + place, self._at + place + len(sure)
        told = []
        while self._waiting and self._waiting[0][0] < end:
            _, last, token = self._waiting.popleft()
            if last > begin or "\ufffd" in text:
                told.append(token)
        self._said, self._at = self._said[place + len(sure) :], end
        return told

    def of(self, piece: Piece) -> list[TokenLogprob] | None:
        """The tokens of a piece of content; None for other pieces."""
        if isinstance(piece, Reasoning):
            self.take(piece.text)
        return self.take(piece.text) if isinstance(piece, Content) else None

    def _place(self, text: bytes) -> int:
        """Where the text is: right after the last one, or where a token begins, or anywhere; -1 if nowhere."""
        first = place = self._said.find(text)
        if first <= 0:
            return first
        begins = {begin - self._at for begin, _, _ in self._waiting}
        for _ in range(TRIES):
            if place in begins:
                return place
            place = self._said.find(text, place + 1)
            if place < 0:
                break
        return first


class Offsets:
    """Where tokens begin in a text, in characters, one token after the other. `hidden` tokens have no text, and neither
    have special ones among the first `echoed` tokens, those of a prompt. Tokens that are parts of a character begin
    where that does."""

    def __init__(self, tokenizer: Tokenizer | None, hidden: frozenset[int], echoed: int = 0) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._echoed = echoed
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def take(self, token: int, text: str) -> int:
        """The offset of the next token. `text` is its text, which is used without a tokenizer."""
        begin = self._at
        hidden = self._hidden
        if self._echoed and self._tokenizer:
            self._echoed -= 1
            hidden = self._tokenizer.special_ids
        if token not in hidden:
            said = self._tokenizer.token_bytes(token) if self._tokenizer else text.encode()
            self._at += len(self._decoder.decode(said))
        return begin
