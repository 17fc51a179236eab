"""One choice of an answer while it is generated."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from radixrt.frontend.logprobs import Offsets, Tokens
from radixrt.frontend.message import AssistantMessage
from radixrt.frontend.output import Output
from radixrt.frontend.parsing import Content, Piece
from radixrt.messages import TOKEN_BYTES, Delta, Sampling, TokenLogprob, Usage
from radixrt.router.tokens import TextService, TextStream


class Choice:
    """What it says so far, and how it ended."""

    __slots__ = (
        "_hidden_ids", "_ids", "_parser", "_stream", "echo", "finish", "index", "logprobs", "message", "offsets",
        "said", "stop", "stopping", "tokens", "unsaid", "usage",
    )  # fmt: skip

    def __init__(self, index: int, service: TextService, sampling: Sampling, output: Output) -> None:
        self.index = index
        self.message = AssistantMessage()
        self.echo: tuple[str, int] | None = None
        """The prompt and its first token, until they are told."""
        self.tokens = 0
        """Taken before a stop string was complete: what the worker adds until it hears of that is nobody's."""
        self.logprobs: list[TokenLogprob] | None = None
        self.offsets: Offsets | None = None
        """Where in its text the tokens begin, if that is told."""
        self.said: Tokens | None = None
        """Finds those of its content, where no others are told."""
        self.unsaid: frozenset[int] = frozenset()
        """Tokens of which none are told."""
        self.finish: Any = None
        self.stop: str | int | None = None
        self.stopping = False
        """It was ended here; the last Delta, with the usage, is on its way."""
        self.usage = Usage()
        self._stream = TextStream(service, output.shown(sampling))
        self._parser = output.parser()
        self._hidden_ids = output.hidden_ids
        self._ids: list[bytes] = []

    @property
    def parsed(self) -> bool:
        """A parser holds text back: that a token has come need not show."""
        return self._parser is not None and not self._parser.idle

    @property
    def ids(self) -> bytes:
        """All ids that it generated, the one that ended it included."""
        return b"".join(self._ids)

    @property
    def whole(self) -> bool:
        """Its message says all that its ids do: it was not cut at a stop string or before a call too many."""
        return not self.stopping and not isinstance(self.stop, str) and self.finish in ("stop", "length", "tool_calls")

    def take(self, delta: Delta) -> tuple[list[Piece], bool]:
        """(what it gained, whether it must be ended at the router)."""
        pieces: list[Piece] = []
        was_stopping, last = self.stopping, delta.finish is not None
        if not was_stopping:
            pieces = self._read(delta)
            ids = delta.ids
            if self.stopping:
                ids = self._without_past(ids)
                delta.logprobs = delta.logprobs and delta.logprobs[: len(ids) // TOKEN_BYTES]
            self.tokens += len(ids) // TOKEN_BYTES
            self._ids.append(ids)
        if last:
            self.finish, self.usage = delta.finish, delta.usage or Usage()
            if not self.stopping:
                self.stop = delta.stop
        if self.stopping and last:
            self.finish = "stop"
            self.usage = msgspec.structs.replace(self.usage, completion_tokens=self.tokens)
        if last and self.finish == "stop" and self.message.calls and not self._cut:
            self.finish = "tool_calls"
        return pieces, self.stopping and not was_stopping and not last

    @property
    def _cut(self) -> bool:
        """A stop string came within a call."""
        return isinstance(self.stop, str) and self.message.cut

    def _read(self, delta: Delta) -> list[Piece]:
        """The pieces of a delta; with them it may be found to stop."""
        text = self._stream.take(self._visible(delta) if self._hidden_ids else delta)
        found, parser = self._stream.stop, self._parser
        if parser is None:
            pieces: list[Piece] = [Content(text)] if text else []
        else:
            pieces = parser.push(text)
            if found is not None or parser.full or delta.finish is not None:
                pieces += parser.finish()
        if found is not None or (parser is not None and parser.full):
            self.stop, self.stopping = found, True
        for piece in pieces:
            self.message.add(piece)
        return pieces

    def _without_past(self, ids: bytes) -> bytes:
        """The ids of a delta up to that which completed a stop string."""
        if self._stream.stop is None:
            return ids
        past, found = self._stream.past, memoryview(ids).cast("i")
        while past or (found and found[-1] in self._hidden_ids):
            past -= found[-1] not in self._hidden_ids
            found = found[:-1]
        return found.tobytes()

    def _visible(self, delta: Delta) -> Delta:
        ids = memoryview(delta.ids).cast("i")
        if self._hidden_ids.isdisjoint(ids):
            return delta
        visible = array("i", [i for i in ids if i not in self._hidden_ids])
        return msgspec.structs.replace(delta, ids=visible.tobytes())
