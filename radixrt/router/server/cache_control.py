"""Hints of clients to the cache: whose they are, what they cost, and which paths of tokens they mean.

ControlCache -> the tenant of its key -> its budget -> paths: of a program state, token ids, or encoded, in a task
             -> core: workers             (or refused)
             delete: also what the router itself has of the tenant
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec

from radixrt.messages import TOKEN_BYTES, ControlCache, Generate, Info, Namespace, StatePrompt, TokenPrompt
from radixrt.report import Report
from radixrt.requests.validate import Refused, check_action, check_token_bytes
from radixrt.router.core.core import RouterCore
from radixrt.router.core.effects import Effect, Reply
from radixrt.router.programs.programs import Programs
from radixrt.router.programs.prompt_builder import State
from radixrt.router.programs.state_store import Key
from radixrt.router.server.tasks import Tasks, now
from radixrt.tokens import TextService
from radixrt.tokens.chat_history import Conversations
from radixrt.tokens.quota import BYTES_PER_TOKEN, MIN_HINT_TOKENS, Budget

MAX_STATES = 64
"""The most states of a session that a hint is for, the latest ones."""
Path = tuple[Namespace, bytes]


class CacheControl:
    """Handles ControlCache messages. Replies and orders are passed to `perform`; `forget` deletes what the router and
    front ends keep of a tenant."""

    def __init__(
        self,
        core: RouterCore,
        text: TextService,
        programs: Programs,
        conversations: Conversations,
        report: Report,
        tasks: Tasks,
        perform: Callable[[list[Effect]], None],
        forget: Callable[[str], None],
    ) -> None:
        self._core = core
        self._text = text
        self._programs = programs
        self._conversations = conversations
        self._forget = forget
        self._report = report
        self._tasks = tasks
        self._perform = perform
        self._budget = Budget()

    def take(self, client: bytes, message: ControlCache, size: int) -> None:
        """Handle a message of `size` bytes. Raises Refused (401; 404; 400; 429)."""
        tenant = self._core.tenant(message.api_key)
        check_action(message.action, "action")
        if message.action.verb == "delete":
            self._delete(client, message, tenant)
            return
        if (message.prompt is None) == (not message.session):
            raise Refused("prompt", "prompt: a hint is for a prompt, or for a session")
        paths = self._known_paths(tenant, message)
        tokens = _cost(message) if paths is None else sum(len(ids) for _, ids in paths) // TOKEN_BYTES
        if wait := self._budget.take(tenant, max(MIN_HINT_TOKENS, tokens), now()):
            refused = {"result": "refused", "tokens": 0, "bytes": 0, "worker": "", "retry_after": wait}
            why = "the tenant has given too many hints for now"
            self._report.hinted(tenant, message.action.verb, "refused", 0)
            self._perform([Reply(client, Info(message.id, refused | {"reason": why}))])
        elif paths is None:
            self._tasks.start(self._encode, client, message, tenant, size=size)
        else:
            self._ask(client, message, paths)

    def _known_paths(self, tenant: str, message: ControlCache) -> list[Path] | None:
        """The paths that a message means, if they need not be encoded."""
        prompt, states = message.prompt, self._programs.states
        if message.session:
            found = [(one.namespace, one.ids) for one in states.of_scope(tenant, message.session) if one.namespace]
            return longest(found)[-MAX_STATES:]
        if isinstance(prompt, StatePrompt):
            if prompt.transcript or prompt.save:
                raise Refused("prompt.said", "prompt.said: a hint is for a state as it is")
            key = Key(tenant, prompt.scope, prompt.state)
            return None if states.may_find and not states.holds(key) else _path_of(states.get(key))
        if isinstance(prompt, TokenPrompt):
            namespace = self._namespace(tenant, message)
            vocab_size = self._core.workers.serving(namespace.model, namespace.version).vocab_size
            check_token_bytes(prompt.ids, "prompt", vocab_size or self._text.vocab_size)
            return [(namespace, prompt.ids)]
        return None

    def _namespace(self, tenant: str, message: ControlCache) -> Namespace:
        model = self._core.model(message.model)
        return Namespace(tenant, model, self._core.workers.version(model), message.cache_salt)

    async def _encode(self, client: bytes, message: ControlCache) -> None:
        prompt, tenant = message.prompt, self._core.tenant(message.api_key)
        assert prompt is not None
        if isinstance(prompt, StatePrompt):
            state = await self._programs.states.find(Key(tenant, prompt.scope, prompt.state))
            self._tasks.leave(client, message.id)
            return self._ask(client, message, _path_of(state))
        namespace = self._namespace(tenant, message)
        room = self._core.room(Generate(id=0, prompt=prompt, model=message.model))
        encoded = await self._conversations.encode(prompt, tenant, message.cache_salt, message.api_key, room)
        self._budget.charge(tenant, len(encoded.ids) // TOKEN_BYTES - _cost(message), now())
        self._tasks.leave(client, message.id)
        self._ask(client, message, [(namespace, encoded.ids)])

    def _ask(self, client: bytes, message: ControlCache, paths: list[Path]) -> None:
        self._tasks.check_id(client, message.id)
        self._perform(self._core.hints.ask(client, message.id, paths, message.action, now(), message.tail))

    def _delete(self, client: bytes, message: ControlCache, tenant: str) -> None:
        if message.prompt is not None or message.session:
            raise Refused("prompt", "prompt: what is deleted is all that a tenant has")
        self._forget(tenant)
        self._report.delete(tenant)
        self._perform(self._core.hints.delete(client, message.id, tenant, now()))


def _path_of(state: State) -> list[Path]:
    return [(state.namespace, state.ids)] if state.namespace else []


def longest(paths: list[Path]) -> list[Path]:
    """The paths that no other one continues, in the given order."""
    by_key = sorted(((namespace.key, ids, n) for n, (namespace, ids) in enumerate(paths)))
    kept = [
        n
        for (key, ids, n), after in itertools.zip_longest(by_key, by_key[1:])
        if after is None or after[0] != key or not after[1].startswith(ids)
    ]
    return [paths[n] for n in sorted(kept)]


def _cost(message: ControlCache) -> int:
    """About the tokens of a prompt that is to be encoded."""
    return len(msgspec.msgpack.encode(message.prompt)) // BYTES_PER_TOKEN
