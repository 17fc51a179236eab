"""Whose log-probabilities go with a text: the tokens that say it, and where in it they begin."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable

from radixrt.frontend.parsing import Content, Piece, Reasoning
from radixrt.messages import TokenLogprob
from radixrt.router.tokens import Tokenizer

TRIES = 8
"""Places of a text among what tokens say, of which one where a token begins is taken."""


class Tokens:
    """The tokens of an answer, until the text has come that they say.

    tokens   |Yes|.\\n\\n|The| cat|</think>|            a parser gives texts in other pieces than tokens, and later,
    texts    |Yes.   |\\n\\nThe cat|                    and marks not at all
    """

    def __init__(self, tokenizer: Tokenizer | None, hidden: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        """Tokens that never become text."""
        self._waiting: deque[tuple[int, int, TokenLogprob]] = deque()
        """Where the bytes of each begin and end in all that was said."""
        self._said = b""
        """Bytes that no text has come of yet; they begin at `_at`."""
        self._at = 0

    def add(self, tokens: Iterable[TokenLogprob]) -> None:
        """Tokens that are said next. Nothing is known of them without a tokenizer."""
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
        """Those that begin to say the next text. What is said before it says none."""
        if not self._waiting:
            return []
        sure = max(text.split("\ufffd"), key=len).encode()  # U+FFFD stands for bytes that are no character
        place = self._place(sure)
        if place < 0:  # it may begin with white space that a format puts between messages, which no token says
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
        """Those of content; None of what is not."""
        if isinstance(piece, Reasoning):
            self.take(piece.text)
        return self.take(piece.text) if isinstance(piece, Content) else None

    def _place(self, text: bytes) -> int:
        """Where the text stands: where it goes on, else where a token begins, else anywhere; -1 if nowhere."""
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
    """Where in a text, in characters, the tokens begin that say it, one after the other. Those `hidden` have no text,
    nor have special ones among the first `echoed` tokens, those of a prompt; the parts of a character begin where it
    does."""

    def __init__(self, tokenizer: Tokenizer | None, hidden: frozenset[int], echoed: int = 0) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._echoed = echoed
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def take(self, token: int, text: str) -> int:
        """Of the next token; `text` is its own, which counts without a tokenizer."""
        begin = self._at
        hidden = self._hidden
        if self._echoed and self._tokenizer:
            self._echoed -= 1
            hidden = self._tokenizer.special_ids
        if token not in hidden:
            said = self._tokenizer.token_bytes(token) if self._tokenizer else text.encode()
            self._at += len(self._decoder.decode(said))
        return begin
