"""One request of OpenAI's completions or chat API in flight."""

from __future__ import annotations

from radixrt.formats.parsing import Piece, Reasoning
from radixrt.frontend.generate.choice import Choice
from radixrt.frontend.generate.exchange import Exchange
from radixrt.frontend.http.errors import ApiError
from radixrt.frontend.openai.replies import Reply
from radixrt.messages import TOKEN_BYTES, TokenLogprob

MAX_INLINE_LOGPROBS = 1024
"""Log-probabilities of more tokens are written in a thread: each takes up to 30 µs, with 20 alternatives."""
MAX_INLINE_IDS = 1 << 16
"""So are more ids of prompts."""


class OpenAIExchange(Exchange[Reply]):
    """All choices, of all prompts: in chunks, one for each piece, or as a whole."""

    def error_event(self, problem: ApiError) -> bytes:
        return b"data: " + problem.body() + b"\n\n"

    def _add(self, choice: Choice, pieces: list[Piece], logprobs: list[TokenLogprob] | None, last: bool) -> None:
        if not self._streams:
            if logprobs:
                choice.logprobs = (choice.logprobs or []) + logprobs
            return
        if pieces and not self.reported.reasoning:
            pieces = [piece for piece in pieces if not isinstance(piece, Reasoning)]
            if not pieces and not last:
                return
        found, ids = self.reply.logprobs(logprobs, choice.offsets), choice.take_unsent()
        if self.reported.running_usage:
            self.reply.count(choice.prompt_tokens, choice.tokens)
        for piece in pieces[:-1]:
            self.put(self.reply.chunk(choice.index, piece, found, ids))
            found = ids = None
        newest = pieces[-1] if pieces else None
        if last:
            self.put(self.reply.last_chunk(choice, newest, found, ids))
        else:
            self.put(self.reply.chunk(choice.index, newest, found, ids))

    def _end(self) -> None:
        if self._streams:
            reasoning = self.reasoning_tokens if self.reported.usage else 0
            self.put(self.reply.end(self.usages, self.prompts, reasoning))
        self.finished = True
        self.wake()

    @property
    def takes_long(self) -> bool:
        logprobs = sum(len(c.logprobs or ()) + len(c.prompt_logprobs or ()) for c in self.choices)
        ids = sum(len(c.prompt_ids or b"") for c in self.choices) // TOKEN_BYTES if self.reported.token_ids else 0
        return logprobs > MAX_INLINE_LOGPROBS or ids > MAX_INLINE_IDS

    def whole(self) -> bytes:
        choices = [
            self.reply.choice(c.index, c.message, self.reply.logprobs(c.logprobs, c.offsets), c.finish, c.stop_reason)
            for c in self.choices
        ]
        prompt = self.reply.add_ids(choices, self.choices) if self.reported.token_ids else {}
        if self.reported.logprobs is not None:
            prompt |= self.reply.add_prompt_logprobs(choices, self.choices)
        return self.reply.body(choices, self.usages, self.prompts, self.reasoning_tokens, prompt)
