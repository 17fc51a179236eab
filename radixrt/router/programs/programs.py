"""Program states: turns requests that name a state and what is new since into prompts, and keeps the resulting states.

StatePrompt --PromptBuilder--> ids, Saving ... answer ... --> a state, under a number that the client chose
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakSet

from radixrt.config import RouterConfig
from radixrt.messages import (
    Delta,
    Fork,
    Generate,
    GeneratedSegment,
    Namespace,
    Sampling,
    Score,
    Segment,
    StatePrompt,
)
from radixrt.requests.validate import Refused
from radixrt.router.persistence.store import PersistentStore
from radixrt.router.programs.prompt_builder import FIELD, PromptBuilder, State
from radixrt.router.programs.saved_states import SavedStates
from radixrt.router.programs.state_store import Key, ProgramStateStore
from radixrt.tokens import TextService
from radixrt.tokens.errors import Room
from radixrt.tokens.text import INLINE_CHARS, INLINE_MESSAGES
from radixrt.tokens.turns import Steps, finished

INLINE_CHAT_CHARS = 32_768
"""Chats of up to this many characters are encoded on the event loop: the template may rewrite them from some answer
on."""

LONG_CHARS = 262_144
"""Prompts of more characters are built in the thread for LONG steps."""

Build = Callable[[PromptBuilder, Sequence[Segment], Room | None], Steps[bytes]]


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Saving:
    """That a request is to leave a state under `key`, when it has ended well; the state `before` is then dropped."""

    key: Key
    before: Key | None
    sampling: Sampling | None
    """None for a Score, which generates nothing."""


class Programs:
    """The states of all programs; builds prompts from them. With `store`, states survive this process."""

    def __init__(self, text: TextService, config: RouterConfig, store: PersistentStore | None = None) -> None:
        saved = SavedStates(store, text.fingerprint) if store is not None and config.state_bytes else None
        self.states = ProgramStateStore(config.state_bytes, saved)
        self._text = text
        self._coming: dict[Key, asyncio.Future[None]] = {}
        """States that forks are still building. Clients do not wait for them, but requests that begin with them do."""
        self._savings: WeakSet[Saving] = WeakSet()
        """Those of requests in flight, without the ones whose scope was forgotten."""

    def saving(self, tenant: str, prompt: StatePrompt, request: Generate | Score) -> Saving | None:
        """The Saving of a request with this prompt; None if it saves nothing. Later `forget`s see it. Raises
        Refused."""
        sampling = request.sampling if isinstance(request, Generate) else None
        if prompt.save and isinstance(request, Generate):
            if request.n != 1:
                raise Refused("prompt.save", "prompt.save: one answer is kept, but n is not 1")
            if not request.text:
                raise Refused("prompt.save", "prompt.save: an answer is kept with its text, but text is false")
        if not prompt.save:
            return None
        before = self.key(tenant, prompt) if prompt.replaces else None
        saving = Saving(Key(tenant, prompt.scope, prompt.save), before, sampling)
        self._savings.add(saving)
        return saving

    def check_room(self, prompt: StatePrompt, room: Room | None) -> None:
        """Raise FieldError if a part of a prompt is so long that it cannot fit."""
        tokenizer = self._text.tokenizer
        if room is not None and tokenizer is not None:
            for one in prompt.transcript:
                tokenizer.check_room(getattr(one, "text", "") or getattr(one, "content", ""), room)

    async def prompt(self, tenant: str, prompt: StatePrompt, room: Room | None = None) -> tuple[PromptBuilder, bytes]:
        """Returns (the builder of a prompt, its token ids). Raises Refused for an unknown state, and FieldError for
        what cannot be said (see PromptBuilder), or does not fit into the `room`."""
        coming = self._coming.get(self.key(tenant, prompt))
        return await self._built(tenant, prompt, _build_and_prompt, coming, room)

    def save(self, saving: Saving, builder: PromptBuilder, namespace: Namespace, answer: Delta) -> None:
        """A request in `namespace` has ended with this answer, which is whole, to the builder's prompt."""
        if saving not in self._savings:
            return
        said = None
        if saving.sampling is not None:
            said = GeneratedSegment(answer.ids, answer.text, answer.stop, saving.sampling, answer.message)
        self.states.put(saving.key, builder.state(namespace, said), saving.before)

    async def fork(self, tenant: str, message: Fork) -> Key:
        """Keep the state of a fork; returns its key. Raises as `prompt` does."""
        prompt = message.prompt
        if not prompt.save:
            raise Refused("prompt.save", "prompt.save: branches need a number to begin with, above 0")
        key = Key(tenant, prompt.scope, prompt.save)
        before = self._coming.get(self.key(tenant, prompt))
        coming = self._coming[key] = asyncio.get_running_loop().create_future()
        try:
            builder, _ = await self._built(tenant, prompt, _build_alone, before)
            if self._coming.get(key) is coming:  # otherwise it was forgotten meanwhile
                self.states.put(key, builder.state(), self.key(tenant, prompt) if prompt.replaces else None)
        finally:
            coming.set_result(None)
            if self._coming.get(key) is coming:
                del self._coming[key]
        return key

    def forget(self, tenant: str, scope: str | None = None) -> None:
        """Drop all states of a scope, or of a tenant, also those that are still being built or computed."""

        def is_meant(key: Key) -> bool:
            return key.tenant == tenant and scope in (None, key.scope)

        for key in list(filter(is_meant, self._coming)):
            del self._coming[key]
        for saving in [saving for saving in self._savings if is_meant(saving.key)]:
            self._savings.discard(saving)
        self.states.forget(tenant, scope)

    @staticmethod
    def key(tenant: str, prompt: StatePrompt) -> Key:
        """The key of the state that a prompt begins with."""
        return Key(tenant, prompt.scope, prompt.state)

    async def _built(
        self,
        tenant: str,
        prompt: StatePrompt,
        build: Build,
        coming: asyncio.Future[None] | None,
        room: Room | None = None,
    ) -> tuple[PromptBuilder, bytes]:
        """Build a prompt, after its state is there if it is `coming`; in a thread if there is much to encode."""
        if coming is not None:
            await asyncio.wait([coming])
        state, namespace = await self.states.find(self.key(tenant, prompt)), Namespace(tenant)
        work = self._steps(state, prompt.transcript, namespace, room, build)
        if not self._text.has_tokenizer or _is_short(state, prompt.transcript):
            return finished(work)
        is_long = _chars(state, prompt.transcript) > LONG_CHARS
        return await self._text.run(namespace, work, FIELD, long=is_long)

    def _steps(
        self, state: State, transcript: Sequence[Segment], namespace: Namespace, room: Room | None, build: Build
    ) -> Steps[tuple[PromptBuilder, bytes]]:
        builder = PromptBuilder(state, self._text, namespace)
        ids = yield from build(builder, transcript, room)
        return builder, ids


def _build_alone(builder: PromptBuilder, transcript: Sequence[Segment], room: Room | None) -> Steps[bytes]:
    yield from builder.add_steps(transcript)
    return b""


def _build_and_prompt(builder: PromptBuilder, transcript: Sequence[Segment], room: Room | None) -> Steps[bytes]:
    yield from builder.add_steps(transcript)
    return (yield from builder.prompt_steps(room))


def _is_short(state: State, transcript: Sequence[Segment]) -> bool:
    """Whether there is little to decode, render and encode."""
    answer = state.answer
    if len(state.messages) + len(transcript) > INLINE_MESSAGES or (
        answer and isinstance(answer.stop, str) and len(answer.ids) > INLINE_CHARS
    ):
        return False
    if state.messages and state.chars > INLINE_CHAT_CHARS:
        return False
    if any(isinstance(one, GeneratedSegment) for one in transcript):
        return False
    return sum(len(part.text) for part in state.parts[state.encoded :]) + _transcript_chars(transcript) <= INLINE_CHARS


def _chars(state: State, transcript: Sequence[Segment]) -> int:
    """Characters that may have to be rendered and encoded."""
    before = state.chars if state.messages else sum(len(part.text) for part in state.parts[state.encoded :])
    return before + _transcript_chars(transcript)


def _transcript_chars(transcript: Sequence[Segment]) -> int:
    return sum(len(getattr(one, name, "")) for one in transcript for name in ("text", "role", "content"))
