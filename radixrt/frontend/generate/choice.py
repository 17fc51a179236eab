"""One choice of an answer while it is generated."""

from __future__ import annotations

from typing import Any

import msgspec

from radixrt.formats.message import AssistantMessage
from radixrt.formats.output import Output
from radixrt.formats.parsing import Content, Piece
from radixrt.frontend.generate.logprobs import Offsets, Tokens
from radixrt.messages import Delta, Sampling, TokenLogprob, Usage
from radixrt.tokens import OutputProcessor, TextService


class Choice:
    """The message so far, its token ids, and how it ended."""

    __slots__ = (
        "_output", "_parser", "_stop_ids", "content_tokens", "echo", "finish", "index", "logprobs", "message",
        "offsets", "prompt_ids", "prompt_logprobs", "prompt_tokens", "stop", "stopping", "unreported", "unsent_ids",
        "usage",
    )  # fmt: skip

    def __init__(
        self, index: int, service: TextService, sampling: Sampling, output: Output, prompt_tokens: int = 0
    ) -> None:
        self.index = index
        self.prompt_tokens = prompt_tokens
        self.message = AssistantMessage()
        self.echo: tuple[str, int] | None = None
        """(text of the prompt, its first token id) to be echoed, until that is sent."""
        self.logprobs: list[TokenLogprob] | None = None
        self.offsets: Offsets | None = None
        """Where tokens begin in its text, if that is reported."""
        self.content_tokens: Tokens | None = None
        """Finds the tokens of its content, if only their log-probabilities are reported."""
        self.unreported: frozenset[int] = frozenset()
        """Token ids whose log-probabilities are never reported."""
        self.prompt_ids: bytes | None = None
        """The prompt's token ids, if token ids are reported."""
        self.prompt_logprobs: list[TokenLogprob] | None = None
        """For each prompt token except the first, if they are reported beside the answer."""
        self.unsent_ids: list[bytes] = []
        """If token ids are reported in a stream: those that are in no chunk yet."""
        self.finish: Any = None
        self.stop: str | int | None = None
        self.stopping = False
        """Whether it was ended here; the last Delta, with the usage, is still to come."""
        self.usage = Usage()
        self._output = OutputProcessor(service.tokenizer, output.shown(sampling), output.hidden_ids, quiet=output.quiet)
        self._parser = output.parser()
        self._stop_ids = sampling.stop_token_ids

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or the one of `stop_token_ids` that ended it; None if the model ended its turn."""
        return self.stop if isinstance(self.stop, str) or self.stop in self._stop_ids else None

    @property
    def parsed(self) -> bool:
        """Whether a parser may hold text back, so that a new token need not add text."""
        return self._parser is not None and not self._parser.idle

    @property
    def ids(self) -> bytes:
        """All generated ids, including the one that ended it."""
        return self._output.ids

    @property
    def tokens(self) -> int:
        """Number of tokens so far, up to a complete stop string; later ones, which the worker still sends, are
        dropped."""
        return self._output.tokens

    @property
    def whole(self) -> bool:
        """Whether its message has the same content as its ids: it was not cut at a stop string, or before an additional
        call that was not wanted."""
        return not self.stopping and not isinstance(self.stop, str) and self.finish in ("stop", "length", "tool_calls")

    def take_unsent(self) -> bytes | None:
        """The ids since the last call, if ids are reported."""
        if self.prompt_ids is None:
            return None
        ids = b"".join(self.unsent_ids)
        self.unsent_ids.clear()
        return ids

    def take(self, delta: Delta) -> tuple[list[Piece], bool]:
        """Add a delta, from which what comes after a stop string is cut. Returns (the new pieces, whether the choice
        must be ended at the router)."""
        pieces: list[Piece] = []
        was_stopping, last = self.stopping, delta.finish is not None
        if not was_stopping:
            pieces = self._read(delta)
            if self.prompt_ids is not None:
                self.unsent_ids.append(delta.ids)
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
        """Whether a stop string was found within a call."""
        return isinstance(self.stop, str) and self.message.cut

    def _read(self, delta: Delta) -> list[Piece]:
        """Parse the text of a delta into pieces; may set `stopping`."""
        text = self._output.take(delta)
        found, parser = self._output.stop, self._parser
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
