"""One HTTP request in flight.

transport --Delta--> Choice (text, stop strings, calls) --> gathered, or chunks in a mailbox
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from radixrt.client.transports import Answer, RouterTransport
from radixrt.frontend.formats.output import TEXT, Output
from radixrt.frontend.generate.choice import Choice
from radixrt.frontend.generate.logprobs import Offsets, Tokens, Wanted, limited
from radixrt.frontend.generate.reasoning import reasoning_tokens
from radixrt.frontend.http.errors import ApiError
from radixrt.frontend.http.outbox import Outbox
from radixrt.frontend.openai.replies import Reply
from radixrt.frontend.parsing import Content, Piece, Reasoning
from radixrt.messages import TOKEN_BYTES, Cancel, Delta, Error, Generate, Sampling, TokenLogprob, Usage
from radixrt.tokens import TextService

OnAnswer = Callable[[Choice], None]
"""Called with each choice that has ended."""
MAX_INLINE_LOGPROBS = 1024
"""Log-probabilities of more tokens are written in a thread: each takes up to 30 µs, with 20 alternatives."""

MAX_INLINE_IDS = 1 << 16
"""So are more ids of prompts."""


class Exchange(Outbox):
    """All choices of one HTTP request, which may be several requests to the router (one for each prompt)."""

    def __init__(
        self, transport: RouterTransport, service: TextService, reply: Reply, streams: bool, usage: bool
    ) -> None:
        super().__init__()
        self.reply = reply
        self.names: dict[str, str] = {}
        """Maps the router's fields to the caller's names, for errors."""
        self.shows_ids = False
        """Whether the token ids of prompt and choices are reported."""
        self.counts_tokens = False
        """Whether each chunk of a stream has the usage so far."""
        self.wanted: Wanted | None = None
        """Which log-probabilities are reported; None: those that the sampling parameters ask for."""
        self.choices: list[Choice] = []
        self.prompts = 0
        self._transport = transport
        self._service = service
        self._ids: list[int] = []
        self._open = 0
        self._streams = streams
        self._tells_usage = usage
        self.held = True  # until the router has accepted the request: an error status cannot follow an open stream
        if streams:
            reply.begin(usage)

    def begin(self) -> None:
        """Requests will be submitted: the answer is not complete before `begun`."""
        self._open += 1

    def begun(self) -> None:
        """All requests are submitted."""
        self._open -= 1
        if not self._open:
            self._end()

    def submit(
        self, request: Generate, echo: str | None = None, output: Output = TEXT, on_answer: OnAnswer | None = None
    ) -> None:
        """Send one request. Its choices are numbered after those of earlier requests. `echo` is text put before
        each."""
        first = len(self.choices)
        told = self._told_logprobs(request.sampling)
        for index in range(first, first + request.n):
            choice = Choice(index, self._service, request.sampling, output, len(request.prompt.ids) // TOKEN_BYTES)
            self.choices.append(choice)
            if self.shows_ids:
                choice.prompt_ids = request.prompt.ids
            if self.counts_tokens:
                self.reply.count(choice.prompt_tokens, 0)
            if self._streams and (opening := self.reply.opening(index, choice.prompt_ids)):
                self.put(opening)
            if told:
                self._set_up_logprobs(choice, output, request, echo)
            if told and echo is not None:
                choice.echo = echo, memoryview(request.prompt.ids).cast("i")[0]
            elif echo:
                self._echo(choice, echo, None)
        self.prompts += 1
        self._open += request.n
        self._ids.append(self._transport.submit(request, functools.partial(self._take, first, on_answer)))

    def needs_prompt_logprobs(self, sampling: Sampling, echo: str | None) -> bool:
        """Whether the router is to report the prompt's log-probabilities as well."""
        return (echo is not None and self._told_logprobs(sampling)) or self.wanted is not None

    def cancel(self) -> None:
        for request_id in self._ids:
            self._transport.cancel(request_id)

    def fail(self, problem: Exception) -> None:
        """See Outbox. If the stream has begun, the error is sent as its last event."""
        if isinstance(problem, ApiError):
            problem = self.own_error(problem)
            if self._streams and not self.held and self.failure is None and not self.finished:
                self.put(self.error_event(problem))
                self.finished = True
                self.cancel()
                self.wake()
                return
        super().fail(problem)

    def own_error(self, problem: ApiError) -> ApiError:
        """An error in the format of this API."""
        return problem

    def error_event(self, problem: ApiError) -> bytes:
        """The event of an error in a stream."""
        return b"data: " + problem.body() + b"\n\n"

    @property
    def usages(self) -> list[Usage]:
        return [choice.usage for choice in self.choices]

    @property
    def reasoning_tokens(self) -> int:
        """The reasoning tokens of all choices."""
        count = 0
        for choice in self.choices:
            if choice.message.has_thoughts:
                count += reasoning_tokens(self._service.tokenizer, choice.message.thoughts, choice.ids)
        return count

    # ------------------------------------------------------------ from the router

    def _take(self, first: int, on_answer: OnAnswer | None, answer: Answer) -> None:
        if isinstance(answer, Error):
            self.fail(ApiError.of(answer, self.names))
        elif isinstance(answer, Delta):
            self.held = False
            choice = self.choices[first + answer.index]
            if self.wanted is not None:
                self._take_wanted(self.wanted, choice, answer)
            if choice.echo is not None:  # the echoed prompt and its log-probabilities are sent together
                text, token = choice.echo
                choice.echo = None
                self._echo(choice, text, [TokenLogprob(token, math.nan), *(answer.prompt_logprobs or [])])
            ignored = choice.stopping
            pieces, stops = choice.take(answer)
            if stops:
                self._transport.tell(Cancel(answer.id, answer.index, choice.tokens))
            last = answer.finish is not None
            logprobs = None if ignored else answer.logprobs
            if logprobs and choice.unreported:
                logprobs = [one for one in logprobs if one.token not in choice.unreported]
            if choice.content_tokens is not None:
                choice.content_tokens.add(logprobs or ())
                for number, piece in enumerate(pieces, 1):
                    self._add(choice, [piece], choice.content_tokens.of(piece), last and number == len(pieces))
                if last and not pieces:
                    self._add(choice, [], None, last)
            # A token may add no text yet: an empty chunk shows progress.
            elif pieces or last or (answer.ids and not ignored and (logprobs or not choice.parsed)):
                self._add(choice, pieces, logprobs, last)
            if last:
                if on_answer is not None:
                    on_answer(choice)
                self._open -= 1
                if not self._open:
                    self._end()

    def _told_logprobs(self, sampling: Sampling) -> bool:
        """Whether log-probabilities of the answer's tokens are reported."""
        wanted = sampling.logprobs if self.wanted is None else self.wanted.output
        return wanted is not None

    @staticmethod
    def _take_wanted(wanted: Wanted, choice: Choice, delta: Delta) -> None:
        """Keep the prompt's log-probabilities for the reply, and limit those in the delta, of which there are as many
        as either of the two needs."""
        if delta.prompt_logprobs is not None:
            choice.prompt_logprobs = limited(delta.prompt_logprobs, wanted.prompt)
            delta.prompt_logprobs = limited(delta.prompt_logprobs, wanted.output)
        delta.logprobs = limited(delta.logprobs, wanted.output)

    def _set_up_logprobs(self, choice: Choice, output: Output, request: Generate, echo: str | None) -> None:
        """Prepare a choice to report log-probabilities: of all tokens, with their offsets, or only of its content's."""
        tokenizer, sampling = self._service.tokenizer, request.sampling
        skips = tokenizer is not None and sampling.skip_special_tokens
        hidden = tokenizer.special_ids if skips else frozenset()
        if not self.reply.of_content:
            echoed = 0 if echo is None else len(request.prompt.ids) // TOKEN_BYTES
            choice.offsets = Offsets(tokenizer, hidden, echoed)
            return
        choice.logprobs = []
        if output.parses or sampling.stop:
            choice.content_tokens = Tokens(tokenizer, hidden)
        else:
            choice.unreported = hidden

    def _echo(self, choice: Choice, text: str, logprobs: list[TokenLogprob] | None) -> None:
        """Add the prompt as if it had been generated."""
        piece = Content(text)
        choice.message.add(piece)
        self._add(choice, [piece], logprobs, last=False)

    def _add(self, choice: Choice, pieces: list[Piece], logprobs: list[TokenLogprob] | None, last: bool) -> None:
        """Add new pieces of a choice: to the stream, one chunk per piece, or to the whole answer."""
        if not self._streams:
            if logprobs:
                choice.logprobs = (choice.logprobs or []) + logprobs
            return
        if pieces and not self.reply.shows_reasoning:
            pieces = [piece for piece in pieces if not isinstance(piece, Reasoning)]
            if not pieces and not last:
                return
        found, ids = self.reply.logprobs(logprobs, choice.offsets), choice.take_unsent()
        if self.counts_tokens:
            self.reply.count(choice.prompt_tokens, choice.tokens)
        for piece in pieces[:-1]:
            self.put(self.reply.chunk(choice.index, piece, found, ids))
            found = ids = None
        piece = pieces[-1] if pieces else None
        if last:
            self.put(self.reply.last_chunk(choice, piece, found, ids))
        else:
            self.put(self.reply.chunk(choice.index, piece, found, ids))

    def _end(self) -> None:
        if self._streams:
            reasoning = self.reasoning_tokens if self._tells_usage else 0
            self.put(self.reply.end(self.usages, self.prompts, reasoning))
        self.finished = True
        self.wake()

    # ------------------------------------------------------------ to the client

    @property
    def takes_long(self) -> bool:
        """Whether `whole` takes so long that others would have to wait."""
        logprobs = sum(len(c.logprobs or ()) + len(c.prompt_logprobs or ()) for c in self.choices)
        ids = sum(len(c.prompt_ids or b"") for c in self.choices) // TOKEN_BYTES if self.shows_ids else 0
        return logprobs > MAX_INLINE_LOGPROBS or ids > MAX_INLINE_IDS

    def whole(self) -> bytes:
        """The body of the answer, once it is complete. May be called in a thread."""
        choices = [
            self.reply.choice(c.index, c.message, self.reply.logprobs(c.logprobs, c.offsets), c.finish, c.stop_reason)
            for c in self.choices
        ]
        prompt = self.reply.add_ids(choices, self.choices) if self.shows_ids else {}
        if self.wanted is not None:
            prompt |= self.reply.add_prompt_logprobs(choices, self.choices)
        return self.reply.body(choices, self.usages, self.prompts, self.reasoning_tokens, prompt)
