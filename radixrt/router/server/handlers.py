"""Handles each message of clients. Token prompts go to the core at once; other prompts are encoded first, in a task.

    Generate, Score            -> [encode, in a task] -> core
    Cancel                     -> the task, or the core
    CalledTool                 -> the core
    Fork, Pause, Forget        -> program states
    ControlCache               -> workers (`cache_control`)
    Share, Recall              -> memory that front ends share
    Tokenize, Detokenize       -> a reply
    Ask, Live                  -> a reply

An invalid message is answered with an Error.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import msgspec

from radixrt.config import RouterConfig
from radixrt.messages import (
    Ask,
    CalledTool,
    Cancel,
    ChangeAdapter,
    ChatPrompt,
    ClearCache,
    ClientReply,
    ClientRequest,
    ControlCache,
    Delta,
    Detokenize,
    Done,
    DrainWorker,
    Forget,
    Forgotten,
    Fork,
    Generate,
    Info,
    Live,
    Namespace,
    Pause,
    Recall,
    Score,
    Share,
    StatePrompt,
    Tokenize,
    TokenPrompt,
    Tokens,
)
from radixrt.messages.namespace import tenant_digest
from radixrt.report import Report
from radixrt.requests.grammar import check_aside
from radixrt.requests.validate import Refused, check_cancel, refusal
from radixrt.router.core.core import RouterCore
from radixrt.router.core.effects import Effect, Reply
from radixrt.router.persistence.store import PersistentStore
from radixrt.router.programs.programs import Programs
from radixrt.router.programs.prompt_builder import State
from radixrt.router.programs.state_store import Key
from radixrt.router.server import status
from radixrt.router.server.cache_control import CacheControl
from radixrt.router.server.explain import Explainer
from radixrt.router.server.kv_store import SharedAnswers, SharedMemory
from radixrt.router.server.live import LiveView
from radixrt.router.server.parsed import ChatFormats, Parsing
from radixrt.router.server.prometheus import render
from radixrt.router.server.streams import TextStreams, core_streams, encode, encode_chat, is_encoded, wants_text
from radixrt.router.server.tasks import Handler, Tasks, now
from radixrt.tokens import Encoded, TextService, Tokenizer
from radixrt.tokens.chat_history import Conversations
from radixrt.tokens.errors import FieldError

KeepIn = Callable[[Namespace, Delta], None]
"""As `streams.Keep`, with the namespace of the request."""
MAX_RECALL_BYTES = 64 << 20
"""The most bytes of the values that one Recall returns, if there are several."""


class Handlers:
    """The handlers of all message types. Replies and orders are passed to `perform`."""

    def __init__(
        self,
        config: RouterConfig,
        core: RouterCore,
        text: TextService,
        streams: TextStreams,
        programs: Programs,
        report: Report,
        perform: Callable[[list[Effect]], None],
        store: PersistentStore | None = None,
    ) -> None:
        self._config = config
        self._core = core
        self._text = text
        self._streams = streams
        self._programs = programs
        self._report = report
        self._perform = perform
        self._store = store
        self._shared = SharedMemory(config.shared_bytes, store)
        self._conversations = Conversations(text, config, SharedAnswers(self._shared) if store else None)
        self._formats = ChatFormats(text, config)
        self._tasks = Tasks(core, perform)
        self._cache = CacheControl(
            core, text, programs, self._conversations, report, self._tasks, perform, self.forget_tenant
        )
        decode = functools.partial(_decoded, text.tokenizer) if text.tokenizer else None
        self._decode = decode
        self.explainer = Explainer(core, report, text.tokenizer)
        self._live = LiveView(core, report, self.explainer, decode)
        self._sharing: set[bytes] = set()
        """Clients that share values: front ends, which have sessions of their own."""
        self._size = 0
        """Of the message that is being handled."""

    def take(self, client: bytes, message: ClientRequest, size: int = 0) -> None:
        """Handle a message of a client, of `size` bytes if they are to be counted."""
        self._size = size
        try:
            match message:
                case Generate() | Score():
                    self._take(client, message)
                case Cancel(index=None):
                    self._cancel(client, message.id)
                case Cancel(index=int(index)):
                    check_cancel(message)
                    self._perform(self._core.end_choice(client, message.id, index, message.tokens))
                case CalledTool():
                    self._perform(self._core.ended.called(client, message.id, message.index, message.name))
                case Tokenize() | Detokenize():
                    self._start(self._translate, client, message)
                case Fork():
                    self._start(self._fork, client, message)
                case Pause():
                    self._pause(client, message)
                case Forget():
                    tenant = self._core.tenant(message.api_key)
                    self._tasks.start(self._forget, client, message, tenant, always=True)
                case ControlCache():
                    self._cache.take(client, message, size)
                case Share():
                    tenant = self._core.tenant(message.api_key)
                    self._sharing.add(client)
                    for key, value in message.entries:
                        self._shared.put(tenant, key, value)
                    self._shared.touch(tenant, message.used)
                    self._answer(client, Done(message.id))
                case Recall():
                    self._recall(client, message)
                case ChangeAdapter():
                    self._perform(self._core.change_adapter(client, message, time.time_ns() // 1_000_000))
                case DrainWorker():
                    self._perform(self._core.drains.ask(client, message, now()))
                case ClearCache():
                    self._clear_cache(client, message)
                case Live():
                    self._answer(client, Info(message.id, self._live.answer(message, self._visible(message.api_key))))
                case Ask():
                    self._answer(client, Info(message.id, self._query(message)))
        except FieldError as problem:
            self._answer(client, refusal(message.id, problem))

    def in_flight(self, client: bytes) -> list[int]:
        """Ids of a client's messages that are not answered yet."""
        return self._tasks.in_flight(client) + self._core.in_flight(client)

    def drop(self, client: bytes) -> list[Effect]:
        """A client has disconnected: cancel everything of it."""
        self._tasks.cancel_client(client)
        self._streams.forget_client(client)
        self._sharing.discard(client)
        return self._core.drop_client(client)

    @property
    def busy(self) -> bool:
        """Whether messages are not answered yet."""
        return len(self._tasks) > 0

    def close(self) -> None:
        """Cancel the tasks."""
        self._tasks.close()

    def _start(self, work: Handler, client: bytes, message: Any) -> None:
        """Run `work` in a task. Raises Refused (401; 429; or if the id is in flight)."""
        tenant, prompt = self._core.tenant(message.api_key), getattr(message, "prompt", None)
        paused = self._programs.key(tenant, prompt) if isinstance(prompt, StatePrompt) and prompt.resumes else None
        self._tasks.start(work, client, message, tenant, paused, self._size)

    def _answer(self, client: bytes, message: ClientReply) -> None:
        self._perform([Reply(client, message)])

    # ------------------------------------------------------------ requests

    def _take(self, client: bytes, request: Generate | Score) -> None:
        """Submit a request of token ids at once; others are encoded first, in a task. Raises Refused (503) while the
        server drains."""
        self._core.drains.check_open()
        if is_encoded(request):
            self._submit(client, request)
        elif isinstance(request.prompt, StatePrompt):
            self._start(self._submit_state_prompt, client, request)
        else:
            self._start(self._encode_and_submit, client, request)

    async def _encode_and_submit(self, client: bytes, request: Generate | Score) -> None:
        keep, parsing = None, None
        tenant, room = self._core.tenant(request.api_key), self._core.room(request)
        if isinstance(request, Generate) and isinstance(prompt := request.prompt, ChatPrompt):
            request, chat = await encode_chat(request, self._conversations, tenant, room)
            request, parsing = await self._formats.prepare(request, prompt.tools, prompt.partial)
            keep = functools.partial(self._remember, chat)
        encoded = await encode(request, self._text, Namespace(tenant, salt=request.cache_salt), room)
        self._tasks.leave(client, request.id)
        self._submit(client, encoded, keep, parsing=parsing)

    def _remember(self, chat: Encoded, _: Namespace, answer: Delta) -> None:
        """Keep the ids of an answer in a chat, unless it ended at a stop string: then they are more than its text. The
        client may send it back as text or parsed."""
        if isinstance(answer.stop, str):
            return
        plain = {"role": "assistant", "content": answer.text}
        self._conversations.remember(chat, plain, answer.ids, chat.tenant)
        if answer.message is not None and (parsed := answer.message.to_openai()) != plain:
            self._conversations.remember(chat, parsed, answer.ids, chat.tenant)

    async def _submit_state_prompt(self, client: bytes, request: Generate | Score) -> None:
        """Submit a request whose prompt continues a program state."""
        prompt, tenant = request.prompt, self._core.tenant(request.api_key)
        assert isinstance(prompt, StatePrompt)
        saving = self._programs.saving(tenant, prompt, request)
        if isinstance(request, Generate) and request.sampling.grammar:
            await check_aside(request.sampling.grammar, owner=request.api_key)
        room = self._core.room(request)
        self._programs.check_room(prompt, room)
        parsing = None
        builder, ids = await self._programs.prompt(tenant, prompt, room)
        keep = functools.partial(self._programs.save, saving, builder) if saving else None
        request = msgspec.structs.replace(request, prompt=TokenPrompt(ids))
        if isinstance(request, Score):
            request = await encode(request, self._text, Namespace(tenant, salt=request.cache_salt))
        elif builder.is_chat:
            request, parsing = await self._formats.prepare(request, builder.tools, builder.is_partial)
        self._tasks.leave(client, request.id)
        self._submit(client, request, keep, self._programs.key(tenant, prompt), parsing)

    def _submit(
        self,
        client: bytes,
        request: Generate | Score,
        keep: KeepIn | None = None,
        state: Key | None = None,
        parsing: Parsing | None = None,
    ) -> None:
        """Submit a request of token ids, which continue `state` if given. `keep` is called with its
        namespace and answers; these are parsed if `parsing` says how."""
        self._tasks.check_id(client, request.id)
        wanted = request
        if isinstance(request, Generate):
            if request.sampling.stop and request.text and not self._text.has_tokenizer:
                raise Refused("stop", "stop strings need a tokenizer, and there is none here")
            if (stream := core_streams(request, self._text, parsing)) != request.stream:
                wanted = msgspec.structs.replace(request, stream=stream)
        effects = self._core.submit(client, wanted, now(), state, resumes=self._tasks.hand_on_pause())
        if (namespace := self._core.namespace(client, request.id)) is not None:
            kept = functools.partial(keep, namespace) if keep else None
            if isinstance(request, Generate) and request.explain:
                self.explainer.want(client, request.id)
            if isinstance(request, Generate) and wants_text(request, self._text):
                self._streams.add(client, request, kept, parsing)
            elif isinstance(request, Score) and kept is not None:
                self._streams.add_score(client, request, kept)
        self._perform(effects)

    def _cancel(self, client: bytes, request_id: int) -> None:
        self._tasks.cancel(client, request_id)
        self._streams.forget(client, request_id)
        self._perform(self._core.cancel(client, request_id))

    # ------------------------------------------------------------ states of programs

    async def _fork(self, client: bytes, message: Fork) -> None:
        tenant = self._core.tenant(message.api_key)
        state = await self._programs.fork(tenant, message)
        self._core.groups.open(state, message.count + 1, now())  # the branches, and the one that was forked
        self._answer(client, Done(message.id))

    def _pause(self, client: bytes, message: Pause) -> None:
        if message.seconds is not None and not message.seconds > 0:
            raise Refused("seconds", "seconds must be above 0")
        key = Key(self._core.tenant(message.api_key), message.scope, message.state)
        states = self._programs.states
        if states.may_find and key.number and not states.holds(key):
            self._start(self._pause_found, client, message)
        else:
            self._pause_in(client, message, key, states.get(key, "state"))

    async def _pause_found(self, client: bytes, message: Pause) -> None:
        """In a state that is not in memory."""
        key = Key(self._core.tenant(message.api_key), message.scope, message.state)
        self._pause_in(client, message, key, await self._programs.states.find(key, "state"))

    def _pause_in(self, client: bytes, message: Pause, key: Key, state: State) -> None:
        if state.namespace:
            self._perform(self._core.pause(key, state.namespace, state.ids, message.seconds, now()))
        self._answer(client, Done(message.id))

    async def _forget(self, client: bytes, message: Forget) -> None:
        """In a task, so that it runs after an earlier Fork has started."""
        tenant = self._core.tenant(message.api_key)
        self._programs.forget(tenant, message.scope)
        self._perform(self._core.pauses.forget(tenant, message.scope))
        self._answer(client, Done(message.id))

    def forget_tenant(self, tenant: str) -> None:
        """Delete all that is kept of a tenant's conversations and programs, in memory and on disk, here and in the
        front ends. What is in flight goes on, and may leave something when it ends."""
        self._perform(self._core.pauses.forget(tenant))
        self._programs.forget(tenant)
        self._shared.forget(tenant)
        self._conversations.forget(tenant.__eq__)
        if self._store is not None:
            self._store.remove_all(tenant)
        told = Forgotten(tenant_digest(tenant))
        self._perform([Reply(client, told) for client in self._sharing])

    def _clear_cache(self, client: bytes, message: ClearCache) -> None:
        """Raises Refused (401, 403) for all keys but the admin's, where there are keys."""
        if self._visible(message.api_key) is not None:
            words = "the cache of all tenants is emptied only with the key of --admin-api-key"
            raise Refused("api_key", words, 403)
        self._perform(self._core.clear_caches())
        self._answer(client, Done(message.id))

    # ------------------------------------------------------------ questions

    async def _translate(self, client: bytes, message: Tokenize | Detokenize) -> None:
        namespace = Namespace(self._core.tenant(message.api_key))
        if isinstance(message, Tokenize):
            ids, text = await self._text.encode_shown(message.prompt, namespace, render_only=message.render_only)
            tokens = Tokens(message.id, ids, text)
        else:
            tokens = Tokens(message.id, text=await self._text.decode(message.ids, namespace=namespace))
        self._answer(client, tokens)

    def _query(self, message: Ask) -> Any:
        match message.what:
            case "health":
                return self._health(message.api_key)
            case "models":
                return status.models(self._core)
            case "model":
                self._core.tenant(message.api_key)
                return self._core.model(message.model)
            case "report":
                return self._report.to_json(self._visible(message.api_key), self._decode)
            case "metrics":
                visible = self._visible(message.api_key)
                return render(self._report, self._core, visible, self._config.peer_metrics)

    def _recall(self, client: bytes, message: Recall) -> None:
        """Raises Refused if the values are too large for one reply."""
        tenant, keys = self._core.tenant(message.api_key), message.keys
        self._sharing.add(client)
        if len(set(keys)) < len(keys):  # the reply could be of any size
            raise Refused("keys", "keys must not hold one twice")
        if self._shared.misses(tenant, keys):
            self._start(self._recall_found, client, message)
        else:
            values = [self._shared.get(tenant, key) for key in keys]
            self._answer(client, Info(message.id, _within_limit(values)))

    async def _recall_found(self, client: bytes, message: Recall) -> None:
        """Of values that are not all in memory."""
        values = await self._shared.find(self._core.tenant(message.api_key), message.keys)
        self._answer(client, Info(message.id, _within_limit(values)))

    def _health(self, api_key: str) -> dict[str, Any]:
        """What a key may see; without a valid one, what load balancers and the launcher need."""
        core, states = self._core, self._programs.states
        try:
            tenant = self._visible(api_key)
        except Refused:
            return status.public_health(core)
        return status.health(core, states) if tenant is None else status.tenant_health(core, states, tenant)

    def _visible(self, api_key: str) -> str | None:
        """The tenant whose figures a key may see; None (all tenants) for the admin's key, and if no keys are
        configured."""
        if self._core.is_admin(api_key):
            return None
        tenant = self._core.tenant(api_key)
        return tenant if self._config.api_key else None


def _within_limit(values: list[bytes | None]) -> list[bytes | None]:
    """The values of a Recall. Raises Refused if they are too large for one reply."""
    if len(values) > 1 and sum(len(value or b"") for value in values) > MAX_RECALL_BYTES:
        raise Refused("keys", f"keys have values of more than {MAX_RECALL_BYTES} bytes in all: ask for fewer at once")
    return values


def _decoded(tokenizer: Tokenizer, ids: bytes) -> str:
    """The text of any ids that workers accept, including ids that the tokenizer does not have."""
    return tokenizer.decode(memoryview(ids).cast("i").tolist())
