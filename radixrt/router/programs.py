"""Programs on token state: requests that name a state and say what is new, and the states that they leave.

StatePrompt --draft--> ids, Saving ... answer ... --> a state under the number that the client chose
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from radixrt.config import RouterConfig
from radixrt.messages import Fork, Generate, Said, SaidAnswer, Sampling, Score, StatePrompt
from radixrt.router.said import Draft, State
from radixrt.router.states import Key, States
from radixrt.router.tokens import TextService
from radixrt.router.tokens.text import INLINE_CHARS, INLINE_MESSAGES
from radixrt.router.validate import Refused

INLINE_CHAT_CHARS = 32_768
"""Up to this many of a chat, which its template may write anew from some answer on."""

Work = Callable[[State, Sequence[Said], TextService], tuple[Draft, bytes]]


class Saving:
    """What a request says, to be kept under `key` when it has ended well; `before` is then not needed any more."""

    __slots__ = ("_before", "_draft", "_key", "_sampling", "_states", "namespace")

    def __init__(self, states: States, draft: Draft, key: Key, before: Key | None, sampling: Sampling | None) -> None:
        self._states = states
        self._draft = draft
        self._key = key
        self._before = before
        self._sampling = sampling
        """None for a Score, which generates nothing."""
        self.namespace = ""
        """Where it is computed, set when it is placed."""

    def __call__(self, ids: bytes = b"", text: str = "", stop: str | int | None = None) -> None:
        """It has ended, with this answer."""
        answer = None if self._sampling is None else SaidAnswer(ids, text, stop, self._sampling)
        if self._before is not None:
            self._states.drop(self._before)
        self._states.put(self._key, self._draft.state(self.namespace, answer))


class Programs:
    """The states of all programs, and how they become prompts."""

    def __init__(self, text: TextService, config: RouterConfig) -> None:
        self.states = States(config.state_bytes)
        self._text = text
        self._coming: dict[Key, asyncio.Future[None]] = {}
        """States that forks are putting together: clients do not wait for them, requests that begin with them do."""

    async def prompt(self, tenant: str, request: Generate | Score) -> tuple[bytes, Saving | None]:
        """The ids of a request with a StatePrompt, and what keeps it. Refused; FieldError for what cannot be said."""
        prompt = request.prompt
        sampling = request.sampling if isinstance(request, Generate) else None
        if prompt.save and isinstance(request, Generate):
            if request.n != 1:
                raise Refused("prompt.save", "prompt.save: one answer is kept, but n is not 1")
            if not request.text:
                raise Refused("prompt.save", "prompt.save: an answer is kept with its text, but text is false")
        draft, ids = await self._on_draft(tenant, prompt, _draft_and_prompt)
        if not prompt.save:
            return ids, None
        before = self.key(tenant, prompt) if prompt.replaces else None
        return ids, Saving(self.states, draft, Key(tenant, prompt.scope, prompt.save), before, sampling)

    async def fork(self, tenant: str, message: Fork) -> Key:
        """Keep what was said up to a fork; the state's key. Errors as of `prompt`."""
        prompt = message.prompt
        if not prompt.save:
            raise Refused("prompt.save", "prompt.save: branches need a number to begin with, above 0")
        key = Key(tenant, prompt.scope, prompt.save)
        coming = self._coming[key] = asyncio.get_running_loop().create_future()
        try:
            draft, _ = await self._on_draft(tenant, prompt, _draft_alone)
            if self._coming.get(key) is coming:  # not forgotten meanwhile
                if prompt.replaces:
                    self.states.drop(self.key(tenant, prompt))
                self.states.put(key, draft.state())
        finally:
            coming.set_result(None)
            if self._coming.get(key) is coming:
                del self._coming[key]
        return key

    def forget(self, tenant: str, scope: str) -> None:
        """Drop all states of a scope, and those that are on their way."""
        for key in [key for key in self._coming if key[:2] == (tenant, scope)]:
            del self._coming[key]
        self.states.forget(tenant, scope)

    @staticmethod
    def key(tenant: str, prompt: StatePrompt) -> Key:
        """What a prompt begins with."""
        return Key(tenant, prompt.scope, prompt.state)

    async def _on_draft(self, tenant: str, prompt: StatePrompt, work: Work) -> tuple[Draft, bytes]:
        """In a thread where much is to be encoded."""
        key = self.key(tenant, prompt)
        if (coming := self._coming.get(key)) is not None and prompt.save != prompt.state:
            await asyncio.wait([coming])
        state = self.states.get(key)
        if _is_short(state, prompt.said):
            return work(state, prompt.said, self._text)
        return await asyncio.to_thread(work, state, prompt.said, self._text)


def _draft_alone(state: State, said: Sequence[Said], text: TextService) -> tuple[Draft, bytes]:
    draft = Draft(state, text)
    draft.add(said)
    return draft, b""


def _draft_and_prompt(state: State, said: Sequence[Said], text: TextService) -> tuple[Draft, bytes]:
    draft, _ = _draft_alone(state, said, text)
    return draft, draft.prompt()


def _is_short(state: State, said: Sequence[Said]) -> bool:
    """Little is to be decoded, rendered and encoded."""
    answer = state.answer
    if len(state.turns) + len(said) > INLINE_MESSAGES or (
        answer and isinstance(answer.stop, str) and len(answer.ids) > INLINE_CHARS
    ):
        return False
    if state.turns and state.chars > INLINE_CHAT_CHARS:
        return False
    chars = sum(len(part.text) for part in state.parts[state.encoded :])
    for one in said:
        if isinstance(one, SaidAnswer):
            return False
        chars += sum(len(getattr(one, name, "")) for name in ("text", "role", "content"))
    return chars <= INLINE_CHARS
