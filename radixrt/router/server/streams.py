"""The text stage around the core: encodes text before it, decodes ids after it, and ends choices at stop strings.

Only requests with text=True are decoded here; front ends that detokenize themselves do not set it. A reply that is not
streamed is gathered here if stop strings must be found while tokens arrive, and otherwise in the core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from radixrt.messages import (
    NO_TENANT,
    TOKEN_BYTES,
    ChatPrompt,
    Delta,
    Deltas,
    FinishReason,
    Generate,
    Namespace,
    Score,
    StatePrompt,
    TokenPrompt,
)
from radixrt.requests.grammar import check_aside, is_checked
from radixrt.router.core.core import RouterCore
from radixrt.router.core.effects import Client, Effect
from radixrt.router.server.parsed import ParsedChoice, Parsing
from radixrt.tokens import Encoded, OutputProcessor, TextService
from radixrt.tokens.chat_history import Conversations, facts
from radixrt.tokens.errors import Room

Request = TypeVar("Request", bound=Generate | Score)
Keep = Callable[[Delta], None]
"""Called with all of an answer that has ended well, as one Delta."""


ENDED_WELL: tuple[FinishReason, ...] = ("stop", "length")


def is_encoded(request: Generate | Score) -> bool:
    """Whether a request consists of token ids only, and its grammar, if any, is checked already."""
    if not isinstance(request.prompt, TokenPrompt):
        return False
    if isinstance(request, Score):
        return all(isinstance(choice, TokenPrompt) for choice in request.choices)
    return request.sampling.grammar is None or is_checked(request.sampling.grammar, request.api_key)


async def encode(
    request: Request, service: TextService, namespace: Namespace = NO_TENANT, room: Room | None = None
) -> Request:
    """The same request with token ids only, encoded in a namespace. Raises FieldError that names a part that cannot be
    encoded, or compiled, or for which there is no room."""
    if isinstance(request, Generate) and request.sampling.grammar:
        await check_aside(request.sampling.grammar, owner=request.api_key)
    prompt = request.prompt
    assert not isinstance(prompt, StatePrompt), "the states of programs build these"
    changes: dict[str, Any] = {"prompt": TokenPrompt(await service.encode(prompt, namespace, room))}
    if isinstance(request, Score):
        changes["choices"] = await service.encode_choices(request.choices, namespace)
    return msgspec.structs.replace(request, **changes)


async def encode_chat(
    request: Generate, conversations: Conversations, tenant: str, room: Room | None = None
) -> tuple[Generate, Encoded]:
    """Encode a request whose prompt is a chat. Returns it with token ids, and the encoded chat. Raises FieldError that
    names an invalid field."""
    prompt = request.prompt
    assert isinstance(prompt, ChatPrompt)
    chat = await conversations.encode(prompt, tenant, request.cache_salt, tenant, room)
    return msgspec.structs.replace(request, prompt=TokenPrompt(chat.ids), session=facts(chat)), chat


def wants_text(request: Generate, service: TextService) -> bool:
    """Whether the router decodes for the client."""
    return request.text and service.has_tokenizer


def core_streams(request: Generate, service: TextService, parsing: Parsing | None = None) -> bool:
    """Whether the core must pass on tokens as they arrive."""
    ends_here = bool(request.sampling.stop) or (parsing is not None and parsing.output.ends_early)
    return request.stream or (wants_text(request, service) and ends_here)


@dataclass(slots=True)
class _Choice:
    output: OutputProcessor
    gathers: bool
    """Whether it is sent as a whole when it has ended. False for a stream, whose deltas are sent at once."""
    push: Callable[[bytes], str] | None
    """Returns the text that ids add. Only for a stream without stop strings that is neither kept nor parsed (the fast
    path)."""
    parsed: ParsedChoice | None = None


@dataclass(slots=True)
class _OpenRequest:
    choices: list[_Choice]
    keep: Keep | None
    """Called with each answer, if given."""
    open: int = field(init=False)

    def __post_init__(self) -> None:
        self.open = len(self.choices)


class TextStreams:
    """The text of requests in flight, by client and request id."""

    def __init__(self, service: TextService, core: RouterCore) -> None:
        self._service = service
        self._core = core
        self._texts: dict[Client, dict[int, _OpenRequest]] = {}

    def add(self, client: Client, request: Generate, keep: Keep | None = None, parsing: Parsing | None = None) -> None:
        """Decode for a request from now on, and parse if `parsing` says how; `keep` is called with its answers."""
        tokenizer, sampling = self._service.tokenizer, request.sampling
        gathers = not request.stream and core_streams(request, self._service, parsing)
        choices = []
        for _ in range(request.n):
            keeps = gathers or keep is not None
            output = OutputProcessor(tokenizer, sampling, gathers=keeps)
            parsed = parsing.choice(tokenizer, sampling) if parsing else None
            choices.append(_Choice(output, gathers, None if keeps or parsed else output.push_plain, parsed))
        self._texts.setdefault(client, {})[request.id] = _OpenRequest(choices, keep)

    def add_score(self, client: Client, request: Score, keep: Keep) -> None:
        """Call `keep` when a Score has been answered."""
        self._texts.setdefault(client, {})[request.id] = _OpenRequest([], keep)

    def scored(self, client: Client, request_id: int) -> None:
        """A Score has been answered."""
        texts = self._texts.get(client, {}).get(request_id)
        self.forget(client, request_id)
        if texts is not None and texts.keep is not None:
            texts.keep(Delta(request_id))

    def forget(self, client: Client, request_id: int) -> None:
        texts = self._texts.get(client)
        if texts is not None and texts.pop(request_id, None) is not None and not texts:
            del self._texts[client]

    def forget_client(self, client: Client) -> None:
        self._texts.pop(client, None)

    def decode(self, client: Client, deltas: Deltas) -> tuple[Deltas, list[Effect]]:
        """Add text to `deltas`. Returns those to send, and orders that end choices whose stop string was found."""
        texts = self._texts.get(client)
        if texts is None:
            return deltas, []
        items: list[Delta] = []
        effects: list[Effect] = []
        for delta in deltas.items:
            request = texts.get(delta.id)
            if request is None:
                items.append(delta)
                continue
            choice = request.choices[delta.index]
            if choice.push is not None and delta.finish is None:
                delta.text = choice.push(delta.ids)
                items.append(delta)
                continue
            effects += self._add_text(client, choice, delta)
            if delta.finish is not None:
                delta = _whole(choice, delta, request.keep)
                request.open -= 1
                if not request.open:
                    self.forget(client, delta.id)
            if delta.finish is not None or (not choice.gathers and (delta.text or delta.ids)):
                items.append(delta)
        return Deltas(items), effects

    def _add_text(self, client: Client, choice: _Choice, delta: Delta) -> list[Effect]:
        delta.text = choice.output.take(delta)
        if choice.parsed is not None:
            choice.parsed.take(delta)
        stop: str | int | None = choice.output.stop
        ends_here = stop is not None or (delta.finish is None and choice.parsed is not None and choice.parsed.full)
        if not ends_here:
            return []
        effects: list[Effect] = []
        if delta.finish is None:
            delta.usage, effects = self._core.stop_choice(client, delta.id, delta.index, choice.output.past)
            if delta.usage is None:  # the request failed in the same step: its Error follows
                return []
        if stop is None and delta.ids:  # the token after which nothing comes in this format
            stop = int.from_bytes(delta.ids[-TOKEN_BYTES:], "little")
        delta.finish, delta.stop = "stop", stop
        return effects


def _whole(choice: _Choice, last: Delta, keep: Keep | None) -> Delta:
    """A choice has ended: returns the delta to send. If it has ended well, it is kept."""
    if choice.parsed is not None:
        last.message = choice.parsed.end()
    if not choice.gathers and keep is None:
        return last
    whole = choice.output.whole(last)
    if keep is not None and last.finish in ENDED_WELL:
        keep(whole)
    return whole if choice.gathers else last
