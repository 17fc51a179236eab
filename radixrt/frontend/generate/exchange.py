"""One HTTP request in flight.

transport --Delta--> Choice (text, stop strings, calls) --> gathered, or chunks in an outbox
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from radixrt.client.transports import Answer, RouterTransport
from radixrt.formats.output import TEXT, Output
from radixrt.formats.parsing import Content, Piece
from radixrt.frontend.generate.choice import Choice
from radixrt.frontend.generate.logprobs import Offsets, Tokens, Wanted, limited
from radixrt.frontend.generate.reasoning import reasoning_tokens
from radixrt.frontend.generate.reply import BaseReply
from radixrt.frontend.http.errors import ApiError
from radixrt.frontend.http.outbox import Outbox
from radixrt.messages import (
    TOKEN_BYTES,
    CalledTool,
    Cancel,
    Delta,
    Error,
    Generate,
    Sampling,
    TokenLogprob,
    TokenPrompt,
    Usage,
)
from radixrt.tokens import TextService

OnAnswer = Callable[[Choice], None]
"""Called with each choice that has ended."""
R = TypeVar("R", bound=BaseReply)


class Exchange(Outbox, ABC, Generic[R]):
    """All choices of one HTTP request, which may be several requests to the router (one for each prompt)."""

    def __init__(self, transport: RouterTransport, service: TextService, reply: R, streams: bool) -> None:
        super().__init__()
        self.reply = reply
        self.reported = reply.reported
        self.names: dict[str, str] = {}
        """Maps the router's fields to the caller's names, for errors."""
        self.choices: list[Choice] = []
        self.prompts = 0
        self.explains = False
        """Whether the answer says why the first prompt missed the cache."""
        self._transport = transport
        self._service = service
        self._ids: list[int] = []
        self._open = 0
        self._streams = streams
        self.held = True  # until the router has accepted the request: an error status cannot follow an open stream
        if streams:
            reply.begin()

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
        assert isinstance(request.prompt, TokenPrompt)
        ids, first = request.prompt.ids, len(self.choices)
        told = self._told_logprobs(request.sampling)
        for index in range(first, first + request.n):
            choice = Choice(index, self._service, request.sampling, output, len(ids) // TOKEN_BYTES)
            self.choices.append(choice)
            if self.reported.token_ids:
                choice.prompt_ids = ids
            if self.reported.running_usage:
                self.reply.count(choice.prompt_tokens, 0)
            if self._streams and (opening := self.reply.opening(index, choice.prompt_ids)):
                self.put(opening)
            if told:
                self._set_up_logprobs(choice, output, request.sampling, 0 if echo is None else len(ids) // TOKEN_BYTES)
            if told and echo is not None:
                choice.echo = echo, memoryview(ids).cast("i")[0]
            elif echo:
                self._echo(choice, echo, None)
        self.prompts += 1
        self._open += request.n
        self._ids.append(self._transport.submit(request, functools.partial(self._take, first, on_answer)))

    def needs_prompt_logprobs(self, sampling: Sampling, echo: str | None) -> bool:
        """Whether the router is to report the prompt's log-probabilities as well."""
        return (echo is not None and self._told_logprobs(sampling)) or self.reported.logprobs is not None

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

    @abstractmethod
    def error_event(self, problem: ApiError) -> bytes:
        """The event of an error in a stream."""

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
            if self.reported.logprobs is not None:
                self._take_wanted(self.reported.logprobs, choice, answer)
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
                if choice.finish == "tool_calls":
                    self._transport.tell(CalledTool(answer.id, answer.index, choice.message.calls[0].name[:256]))
                if on_answer is not None:
                    on_answer(choice)
                self._open -= 1
                if not self._open:
                    self._end()

    def _told_logprobs(self, sampling: Sampling) -> bool:
        """Whether log-probabilities of the answer's tokens are reported."""
        wanted = self.reported.logprobs
        return (sampling.logprobs if wanted is None else wanted.output) is not None

    @staticmethod
    def _take_wanted(wanted: Wanted, choice: Choice, delta: Delta) -> None:
        """Keep the prompt's log-probabilities for the reply, and limit those in the delta, of which there are as many
        as either of the two needs."""
        if delta.prompt_logprobs is not None:
            choice.prompt_logprobs = limited(delta.prompt_logprobs, wanted.prompt)
            delta.prompt_logprobs = limited(delta.prompt_logprobs, wanted.output)
        delta.logprobs = limited(delta.logprobs, wanted.output)

    def _set_up_logprobs(self, choice: Choice, output: Output, sampling: Sampling, echoed: int) -> None:
        """Prepare a choice to report log-probabilities: of all tokens, with their offsets, or only of its content's.
        `echoed` tokens of the prompt come before."""
        tokenizer = self._service.tokenizer
        hidden = tokenizer.special_ids if tokenizer and sampling.skip_special_tokens else frozenset()
        if not self.reply.of_content:
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

    @abstractmethod
    def _add(self, choice: Choice, pieces: list[Piece], logprobs: list[TokenLogprob] | None, last: bool) -> None:
        """Add new pieces of a choice: to the stream, or to the whole answer."""

    @abstractmethod
    def _end(self) -> None:
        """All choices have ended."""

    # ------------------------------------------------------------ to the client

    @property
    def takes_long(self) -> bool:
        """Whether `whole` takes so long that others would have to wait."""
        return False

    @abstractmethod
    def whole(self) -> bytes:
        """The body of the answer, once it is complete. May be called in a thread."""
