"""The output of one choice while it is generated: its text, up to a stop string, and all there is of it so far.

Delta with ids --take--> the text that it adds; what comes after a stop string is cut from the Delta
               --whole-> with `gathers`, one Delta of everything
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from struct import Struct

import msgspec

from radixrt.messages import TOKEN_BYTES, Delta, Sampling, TokenLogprob
from radixrt.tokens.detok import Detokenizer
from radixrt.tokens.errors import FieldError
from radixrt.tokens.stops import LoudStopFinder, Quiet, StopFinder
from radixrt.tokens.text import NO_TOKENIZER
from radixrt.tokens.tokenizer import Tokenizer

_pack_token = Struct("<i").pack


class OutputProcessor:
    """Detokenizes a choice, ends it at a stop string, and keeps its ids; with `gathers` also its text and
    log-probabilities. Without a tokenizer there is no text, and stop strings raise FieldError.

    With `include_stop` the text ends with the stop string, otherwise before it. Without stop strings text is passed on
    as soon as its characters are complete. `hidden_ids` are ids that never become text. Stop strings are not looked for
    in the `quiet` parts of the text.
    """

    __slots__ = (
        "_detokenizer", "_finder", "_hidden_ids", "_ids", "_include_stop", "_logprobs", "_prompt_logprobs", "_texts",
        "past", "push_plain", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        sampling: Sampling,
        hidden_ids: frozenset[int] = frozenset(),
        *,
        gathers: bool = False,
        quiet: Quiet | None = None,
    ) -> None:
        if tokenizer is None and sampling.stop:
            raise FieldError("stop", f"stop strings need text, but {NO_TOKENIZER}")
        self._detokenizer = Detokenizer(tokenizer, sampling.skip_special_tokens) if tokenizer else None
        finder = StopFinder(sampling.stop, sampling.include_stop) if sampling.stop else None
        self._finder = LoudStopFinder(finder, quiet) if finder and quiet else finder
        self._include_stop = sampling.include_stop
        self._hidden_ids = hidden_ids
        self._ids: list[bytes] = []  # lists: appending to bytes would copy all of them each time
        self._texts: list[str] | None = [] if gathers else None
        self._logprobs: list[TokenLogprob] | None = None
        self._prompt_logprobs: list[TokenLogprob] | None = None
        self.tokens = 0
        """Number of tokens so far, without those cut."""
        self.past = 0
        """Tokens that were cut from the last delta, as they came after a stop string."""
        self.push_plain = self._detokenizer.push if self._detokenizer and not self._finder and not hidden_ids else None
        """Returns the text that ids add, and keeps nothing; None if there may be more to do than that."""

    @property
    def ids(self) -> bytes:
        """All ids so far, including the one that ended the choice."""
        return b"".join(self._ids)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the choice, if one did."""
        return self._finder.found if self._finder else None

    def take(self, delta: Delta) -> str:
        """The text that the next delta adds; with the last delta, the rest of the text. Afterwards `stop` may be set. A
        token that ended the choice is part of the text only with `include_stop`."""
        if self.push_plain is not None and delta.finish is None:
            text = self.push_plain(delta.ids)
        else:
            text = self._decode(delta)
        self._ids.append(delta.ids)
        self.tokens += len(delta.ids) // TOKEN_BYTES
        if self._texts is not None:
            self._texts.append(text)
            if delta.logprobs:
                self._logprobs = self._logprobs or []
                self._logprobs += delta.logprobs
            self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
        return text

    def whole(self, last: Delta) -> Delta:
        """All that was gathered as one delta, with the finish reason, stop, usage and message of the last one."""
        text, logprobs, of_prompt = "".join(self._texts or ()), self._logprobs, self._prompt_logprobs
        return Delta(
            last.id, last.index, self.ids, text, last.finish, last.usage, logprobs, last.stop, of_prompt, last.message
        )

    def push(self, ids: Sequence[int] | bytes) -> str:
        """The text that ids add, ints or int32 bytes, which are not kept; may set `stop`."""
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.push(ids)
        return text if self._finder is None else self._finder.push(text)

    def flush(self) -> str:
        """The rest of the text, at the end of the choice; may set `stop`."""
        if self._detokenizer is None:
            return ""
        text = self._detokenizer.flush()
        return text if self._finder is None else self._finder.push(text) + self._finder.flush()

    def _decode(self, delta: Delta) -> str:
        ids = delta.ids
        if isinstance(delta.stop, int) and not self._include_stop and ids.endswith(_pack_token(delta.stop)):
            ids = ids[:-TOKEN_BYTES]
        text = self._decode_until_stop(delta, ids) if self._finder else self.push(self._visible(ids))
        return text + self.flush() if delta.finish is not None and self.stop is None else text

    def _decode_until_stop(self, delta: Delta, ids: bytes) -> str:
        """The text of ids up to a stop string; one token at a time, so as to know which of the delta come after it, and
        are cut."""
        text, taken = "", 0
        while taken < len(ids) and self.stop is None:
            token = ids[taken : taken + TOKEN_BYTES]
            text += self.push(self._visible(token) if self._hidden_ids else token)
            taken += TOKEN_BYTES
        self.past = (len(delta.ids) - taken) // TOKEN_BYTES if self.stop is not None else 0
        if self.past:
            _cut(delta, self.past)
        return text

    def _visible(self, ids: bytes) -> bytes:
        """The ids that become text."""
        hidden = self._hidden_ids
        if hidden.isdisjoint(found := memoryview(ids).cast("i")):
            return ids
        return array("i", [i for i in found if i not in hidden]).tobytes()


def _cut(delta: Delta, past: int) -> None:
    """Remove the last `past` tokens from a delta, and from its usage."""
    delta.ids = delta.ids[: -TOKEN_BYTES * past]
    delta.logprobs = delta.logprobs and delta.logprobs[:-past]
    if delta.usage is not None:
        count = delta.usage.completion_tokens - past
        delta.usage = msgspec.structs.replace(delta.usage, completion_tokens=count)
