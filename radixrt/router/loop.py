"""The router process: sockets around the core. Receive, make tokens, decide, make text, send.

client bytes -> message -> [encode text, in threads] -> core --Order--> worker
worker bytes -> message -----------------------------> core --Reply--> [decode ids] -> client
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from radixrt import wire
from radixrt.config import RouterConfig, resolve
from radixrt.messages import (
    Ask,
    Cancel,
    ChatPrompt,
    ClientReply,
    ClientRequest,
    Deltas,
    Detokenize,
    Done,
    Error,
    Forget,
    Fork,
    Generate,
    Heartbeat,
    Info,
    Leave,
    Pause,
    Recall,
    Register,
    Score,
    Scored,
    Share,
    StatePrompt,
    StepDone,
    Tokenize,
    TokenPrompt,
    Tokens,
    ToRouter,
)
from radixrt.report import Report
from radixrt.report.metrics import render
from radixrt.router import status
from radixrt.router.conversations import Conversations
from radixrt.router.core import RouterCore
from radixrt.router.effects import Effect, Order, Reply
from radixrt.router.errors import FieldError
from radixrt.router.grammar import check_aside
from radixrt.router.links import ClientLinks, WorkerLinks
from radixrt.router.programs import Programs, Saving
from radixrt.router.shared import SharedMemory
from radixrt.router.states import Key
from radixrt.router.streams import Keep, TextStreams, core_streams, encode, encode_chat, is_encoded, wants_text
from radixrt.router.tokens import Encoded, TextService
from radixrt.router.validate import Refused, malformed

log = logging.getLogger("radixrt.router")

Work = Callable[[bytes, Any], Coroutine[Any, Any, None]]
_client_message = wire.Decoder(ClientRequest)
_worker_message = wire.Decoder(ToRouter)


class RouterServer:
    """The router of `config`. `text` and `report` are made from the configuration where not given.

    `run` serves on the event loop it is called in; the addresses that it listens on are then `client_address`
    and `worker_address`. ValueError or OSError where it cannot listen.

    A client that does not read is not waited for: when its queue is full its requests are cancelled, and it gets
    one Error for each as soon as it reads again. One that vanished is forgotten.
    """

    def __init__(self, config: RouterConfig, text: TextService | None = None, report: Report | None = None) -> None:
        self.config = config = resolve(config)
        self.text = text or TextService.load(config)
        self.report = report or Report(config.report_tokens)
        self.core = RouterCore(config, self.report, vocab_size=self.text.vocab_size)
        self.client_address = config.client_address
        self.worker_address = config.worker_address
        self._conversations = Conversations(self.text, config)
        self._shared = SharedMemory(config.shared_bytes)
        self.programs = Programs(self.text, config)
        self._streams = TextStreams(self.text, self.core)
        self._clients = ClientLinks()
        self._tasks: dict[tuple[bytes, int], asyncio.Task[None]] = {}
        self._resuming: dict[asyncio.Task[None], Key] = {}
        """Tasks that end a pause of a state, unless they have handed that on to the core."""

    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None] | None = None) -> None:
        """Serve until `stop` is set; `on_ready` is called once it listens."""
        self._now = asyncio.get_running_loop().time
        clients, workers = self._listen()
        self._clients.socket, self._workers = clients, WorkerLinks(workers, self._lost)
        try:
            if on_ready:
                on_ready()
            period = min(1.0, self.config.worker_timeout / 4)
            while not await _is_set_within(stop, period):
                self._perform(self.core.tick(self._now()))
                self._clients.pay()
        finally:
            self._resuming.clear()
            for task in self._tasks.values():
                task.cancel()
            self._workers.flush()
            clients.close()
            workers.close()

    def _listen(self) -> tuple[wire.RouterSocket, wire.RouterSocket]:
        path = self.config.curve_secret_key
        key = {role: wire.load_secret_key(path, role) if path else None for role in ("clients", "workers")}
        limit = wire.MAX_CLIENT_BYTES
        clients = wire.RouterSocket(self.client_address, self._from_client, key=key["clients"], max_bytes=limit)
        try:
            workers = wire.RouterSocket(self.worker_address, self._from_worker, key=key["workers"])
        except BaseException:
            clients.close()
            raise
        self.client_address, self.worker_address = clients.address, workers.address
        return clients, workers

    def stop_workers(self) -> None:
        """Tell every worker to stop. Call it on the event loop."""
        self._perform(self.core.stop_workers())

    # ------------------------------------------------------------ from clients

    def attach(self, deliver: Callable[[ClientReply], None]) -> bytes:
        """A client on this event loop: its identity for `take`. `deliver` is called for each reply, never within
        `take`."""
        return self._clients.attach(deliver)

    def _from_client(self, client: bytes, payload: bytes) -> None:
        try:
            message = _client_message.decode(payload)
        except (wire.Malformed, RecursionError) as problem:
            self._answer(client, malformed(payload, problem))
            return
        self.take(client, message)

    def take(self, client: bytes, message: ClientRequest) -> None:
        """Act on a message of a client."""
        try:
            match message:
                case Generate() | Score():
                    self._take(client, message)
                case Cancel(index=None):
                    self._cancel(client, message.id)
                case Cancel():
                    self._perform(self.core.end_choice(client, message.id, message.index))
                case Tokenize() | Detokenize():
                    self._start(self._translate, client, message)
                case Fork():
                    self._start(self._fork, client, message)
                case Pause():
                    self._pause(client, message)
                case Forget():
                    self._start(self._forget, client, message)
                case Share():
                    tenant = self.core.tenant(message.api_key)
                    for key, value in message.entries:
                        self._shared.put(tenant, key, value)
                    self._answer(client, Done(message.id))
                case Recall():
                    tenant, keys = self.core.tenant(message.api_key), message.keys
                    if len(set(keys)) < len(keys):  # the answer could be of any size
                        raise Refused("keys", "keys must not hold one twice")
                    self._answer(client, Info(message.id, [self._shared.get(tenant, key) for key in keys]))
                case Ask():
                    self._answer(client, Info(message.id, self._ask(message)))
        except FieldError as problem:
            self._answer(client, _error(message.id, problem))

    def _take(self, client: bytes, request: Generate | Score) -> None:
        """Submit what is token ids already; encode the rest first, off the loop."""
        if is_encoded(request):
            self._submit(client, request)
        elif isinstance(request.prompt, StatePrompt):
            self._start(self._go_on, client, request)
        else:
            self._start(self._encode_and_submit, client, request)

    async def _encode_and_submit(self, client: bytes, request: Generate | Score) -> None:
        keep = None
        if isinstance(request, Generate) and isinstance(request.prompt, ChatPrompt):
            tenant = self.core.tenant(request.api_key)
            request, chat = await encode_chat(request, self._conversations, tenant)
            keep = functools.partial(self._remember, chat)
        encoded = await encode(request, self.text)
        del self._tasks[client, request.id]
        self._submit(client, encoded, keep)

    def _remember(self, chat: Encoded, ids: bytes, text: str, stop: str | int | None) -> None:
        """Keep an answer in a chat, unless it ended at a stop string: then its ids say more than its text."""
        if not isinstance(stop, str):
            self._conversations.remember(chat, {"role": "assistant", "content": text}, ids)

    async def _go_on(self, client: bytes, request: Generate | Score) -> None:
        """Submit what follows a state."""
        prompt, tenant = request.prompt, self.core.tenant(request.api_key)
        if isinstance(request, Generate) and request.sampling.grammar:
            await check_aside(request.sampling.grammar)
        ids, saving = await self.programs.prompt(tenant, request)
        request = msgspec.structs.replace(request, prompt=TokenPrompt(ids))
        if isinstance(request, Score):
            request = await encode(request, self.text)
        del self._tasks[client, request.id]
        self._submit(client, request, saving, self.programs.key(tenant, prompt))

    def _submit(
        self,
        client: bytes,
        request: Generate | Score,
        keep: Keep | None = None,
        state: Key | None = None,
    ) -> None:
        """Place a request of ids, which follow a state if one is named; `keep` is told of its answers."""
        if self._in_flight(client, request.id):
            raise Refused("id", f"request id {request.id} is in flight already")
        wanted = request
        if isinstance(request, Generate):
            if request.sampling.stop and request.text and not self.text.has_tokenizer:
                raise Refused("stop", "stop strings need a tokenizer, and there is none here")
            wanted = msgspec.structs.replace(request, stream=core_streams(request, self.text))
        resumes = self._resuming.pop(asyncio.current_task(), None) is not None
        effects = self.core.submit(client, wanted, self._now(), state, resumes=resumes)
        if (namespace := self.core.namespace(client, request.id)) is not None:
            if isinstance(keep, Saving):
                keep.namespace = namespace
            if isinstance(request, Generate) and wants_text(request, self.text):
                self._streams.add(client, request, keep)
            elif isinstance(request, Score) and keep is not None:
                self._streams.add_score(client, request, keep)
        self._perform(effects)

    def _in_flight(self, client: bytes, request_id: int) -> bool:
        return (client, request_id) in self._tasks or self.core.serves(client, request_id)

    def _start(self, work: Work, client: bytes, message: Any) -> None:
        """Do `work` in a task that answers with an Error if it fails, and that a Cancel ends."""
        paused = self._resumed_by(message)
        try:
            if self._in_flight(client, message.id):
                raise Refused("id", f"request id {message.id} is in flight already")
            if self.core.runs_in_flight + len(self._tasks) >= self.config.max_queued_requests:
                raise Refused("", "too many requests in flight", 429, retry_after=1.0)
        except Refused:
            if paused:
                self._perform(self.core.resume(paused, self._now()))
            raise
        task = asyncio.get_running_loop().create_task(self._guard(work, client, message))
        self._tasks[client, message.id] = task
        if paused:
            self._resuming[task] = paused
            task.add_done_callback(self._resume)  # for one that is cancelled before it has begun

    def _resumed_by(self, message: Any) -> Key | None:
        """The state in which a pause is over with a message, whatever becomes of that. Refused (401)."""
        tenant, prompt = self.core.tenant(message.api_key), getattr(message, "prompt", None)
        return self.programs.key(tenant, prompt) if isinstance(prompt, StatePrompt) and prompt.resumes else None

    def _resume(self, task: asyncio.Task[None]) -> None:
        """End the pause that a task ends, if it has not been ended."""
        if (paused := self._resuming.pop(task, None)) is not None:
            self._perform(self.core.resume(paused, self._now()))

    async def _guard(self, work: Work, client: bytes, message: Any) -> None:
        request_id = message.id
        try:
            try:
                await work(client, message)
            finally:
                self._resume(asyncio.current_task())
        except FieldError as problem:
            self._answer(client, _error(request_id, problem))
        except Exception:
            log.exception("request %d failed before it reached a worker", request_id)
            self._answer(client, Error(request_id, 500, "the router failed on this request; its log says why"))
        finally:
            if self._tasks.get((client, request_id)) is asyncio.current_task():
                del self._tasks[client, request_id]

    async def _fork(self, client: bytes, message: Fork) -> None:
        tenant = self.core.tenant(message.api_key)
        state = await self.programs.fork(tenant, message)
        self._resume(asyncio.current_task())
        self.core.groups.open(state, message.count + 1, self._now())  # with the one that they were forked off
        self._answer(client, Done(message.id))

    def _pause(self, client: bytes, message: Pause) -> None:
        if message.seconds is not None and not message.seconds > 0:
            raise Refused("seconds", "seconds must be above 0")
        key = Key(self.core.tenant(message.api_key), message.scope, message.state)
        state = self.programs.states.get(key, "state")
        if state.namespace:
            self._perform(self.core.pause(key, state.namespace, state.ids, message.seconds, self._now()))
        self._answer(client, Done(message.id))

    async def _forget(self, client: bytes, message: Forget) -> None:
        """In a task, for a Fork that came before must have begun."""
        tenant = self.core.tenant(message.api_key)
        self.programs.forget(tenant, message.scope)
        self._perform(self.core.pauses.forget(tenant, message.scope, self._now()))
        self._answer(client, Done(message.id))

    async def _translate(self, client: bytes, message: Tokenize | Detokenize) -> None:
        if isinstance(message, Tokenize):
            ids, text = await self.text.encode_shown(message.prompt, render_only=message.render_only)
            tokens = Tokens(message.id, ids, text)
        else:
            tokens = Tokens(message.id, text=await self.text.decode(message.ids))
        self._answer(client, tokens)

    def _ask(self, message: Ask) -> Any:
        match message.what:
            case "health":
                return status.health(self.core, self.programs.states)
            case "models":
                return status.models(self.core)
            case "report":
                decode = self._decode if self.text.has_tokenizer else None
                return self.report.to_json(self._visible(message.api_key), decode)
            case "metrics":
                return render(self.report, self.core, self._visible(message.api_key))

    def _decode(self, ids: bytes) -> str:
        """Text of any ids that workers take, also those that the tokenizer does not have."""
        return self.text.tokenizer.decode(memoryview(ids).cast("i").tolist())

    def _visible(self, api_key: str) -> str | None:
        """The tenant whose figures a key may see; None, all of them, where no keys are configured."""
        tenant = self.core.tenant(api_key)
        return tenant if self.config.api_key else None

    def _cancel(self, client: bytes, request_id: int) -> None:
        if task := self._tasks.pop((client, request_id), None):
            task.cancel()
        self._streams.forget(client, request_id)
        self._perform(self.core.cancel(client, request_id))

    # ------------------------------------------------------------ from workers

    def _from_worker(self, identity: bytes, payload: bytes) -> None:
        try:
            message = _worker_message.decode(payload)
        except (wire.Malformed, RecursionError) as problem:
            log.warning("worker socket: a message that is none was ignored: %s", problem)
            return
        now = self._now()
        match message:
            case StepDone():
                name = self._workers.name(identity)
                if name is None or not self.core.members.known(name):
                    self._workers.refuse(identity)
                else:
                    self._perform(self.core.step(name, message, now))
            case Heartbeat():
                self._perform(self.core.heartbeat(message.name, now))
            case Register():
                self._workers.bind(message.name, identity)
                log.info("worker %s serves %s on %s", message.name, message.model, message.device)
                self._perform(self.core.register(message, now))
            case Leave():
                log.info("worker %s left: %s", message.name, message.reason or "no reason given")
                self._workers.unbind(message.name)
                self._perform(self.core.leave(message.name, now))

    # ------------------------------------------------------------ to both

    def _perform(self, effects: list[Effect]) -> None:
        """Send what the core wants sent, and what follows from peers that are gone."""
        work = deque(effects)
        while work:
            effect = work.popleft()
            if isinstance(effect, Order):
                for name in self._workers.send(effect.name, effect.message):
                    work.extend(self.core.lose(name, self._now()))
                continue
            client, message = effect
            if isinstance(message, Deltas):
                decoded, orders = self._streams.decode(client, message)
                work.extend(orders)
                if message.items and not decoded.items:
                    continue
                message = decoded
            elif isinstance(message, Scored):
                self._streams.scored(client, message.id)
            elif isinstance(message, Error) and message.id is not None:
                self._streams.forget(client, message.id)
            if not self._clients.send(client, message, functools.partial(self.core.in_flight, client)):
                work.extend(self._drop(client))

    def _answer(self, client: bytes, message: ClientReply) -> None:
        self._perform([Reply(client, message)])

    def _lost(self, names: list[str]) -> None:
        """Of workers that could not be reached."""
        self._perform([effect for name in names for effect in self.core.lose(name, self._now())])

    def _drop(self, client: bytes) -> list[Effect]:
        for key in [key for key in self._tasks if key[0] == client]:
            self._tasks.pop(key).cancel()
        self._streams.forget_client(client)
        return self.core.drop_client(client)


def _error(request_id: int, problem: FieldError) -> Error:
    return (
        problem.error(request_id)
        if isinstance(problem, Refused)
        else Error(request_id, 400, str(problem), problem.field)
    )


async def _is_set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(event.wait(), seconds)
    except TimeoutError:
        return False
    return True
