"""What clients' messages need that takes longer than a turn of the event loop, done in tasks.

    start -> the work answers, or it hands its message on to the core (`leave`), or it fails: an Error
          -> cancel, or the client has vanished: nothing

A message may end a pause of a state. Whatever becomes of the message, the pause is over when its task is at the latest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from radixrt.messages import Error
from radixrt.router.core import RouterCore
from radixrt.router.effects import Effect, Reply
from radixrt.router.errors import FieldError
from radixrt.router.states import Key
from radixrt.router.validate import Refused, refusal

log = logging.getLogger("radixrt.router")

Handler = Callable[[bytes, Any], Coroutine[Any, Any, None]]
"""Takes a client and its message."""


now = time.monotonic
"""The core's clock, seconds."""


class Tasks:
    """Tasks by client and message id, no more than there are places beside what the core has in flight. `perform` is
    told what follows from them."""

    def __init__(self, core: RouterCore, perform: Callable[[list[Effect]], None]) -> None:
        self._core = core
        self._perform = perform
        self._tasks: dict[tuple[bytes, int], tuple[asyncio.Task[None], str]] = {}
        """Each with its tenant."""
        self._tenants: Counter[str] = Counter()
        """Tasks of each."""
        self._resuming: dict[asyncio.Task[None], Key] = {}
        """Tasks that end a pause of a state, unless they have handed that on to the core."""

    def __len__(self) -> int:
        return len(self._tasks)

    def check_id(self, client: bytes, request_id: int) -> None:
        """Refused if a client's message of this id is in flight, here or in the core."""
        if (client, request_id) in self._tasks or self._core.serves(client, request_id):
            raise Refused("id", f"request id {request_id} is in flight already")

    def start(
        self,
        work: Handler,
        client: bytes,
        message: Any,
        tenant: str,
        paused: Key | None = None,
        *,
        always: bool = False,
    ) -> None:
        """Do `work` for a tenant in a task that answers with an Error if it fails. `paused` is the state in which a
        pause is over with the message, also where that is Refused. `always`: also where there is no place, for what
        frees something."""
        try:
            self.check_id(client, message.id)
            if not always and not self._core.has_place(tenant, len(self._tasks), self._tenants[tenant]):
                raise Refused("", "too many requests in flight", 429, retry_after=1.0)
        except Refused:
            if paused:
                self._perform(self._core.resume(paused, now()))
            raise
        task = asyncio.get_running_loop().create_task(self._guard(work, client, message))
        self._tasks[client, message.id] = task, tenant
        self._tenants[tenant] += 1
        if paused:
            self._resuming[task] = paused
            task.add_done_callback(self._resume)  # for one that is cancelled before it has begun

    async def _guard(self, work: Handler, client: bytes, message: Any) -> None:
        request_id = message.id
        try:
            try:
                await work(client, message)
            finally:
                self._resume(asyncio.current_task())
        except FieldError as problem:
            self._perform([Reply(client, refusal(request_id, problem))])
        except Exception:
            log.exception("request %d failed before it reached a worker", request_id)
            error = Error(request_id, 500, "the router failed on this request; its log says why")
            self._perform([Reply(client, error)])
        finally:
            task, _ = self._tasks.get((client, request_id), (None, ""))
            if task is asyncio.current_task():
                self._take_off(client, request_id)

    def _take_off(self, client: bytes, request_id: int) -> asyncio.Task[None]:
        """The task, whose place is free from now on."""
        task, tenant = self._tasks.pop((client, request_id))
        self._tenants[tenant] -= 1
        return task

    def in_flight(self, client: bytes) -> list[int]:
        """Ids of a client's messages that are being worked on."""
        return [request_id for whose, request_id in self._tasks if whose == client]

    # ------------------------------------------------------------ from within the work

    def leave(self, client: bytes, request_id: int) -> None:
        """The message is the core's from now on."""
        self._take_off(client, request_id)

    def hand_on_pause(self) -> bool:
        """Whether the running task ends a pause: the caller sees to that from now on."""
        return bool(self._resuming) and self._resuming.pop(asyncio.current_task(), None) is not None

    def _resume(self, task: asyncio.Task[None]) -> None:
        """End the pause that a task ends, unless that is done or handed on."""
        if (paused := self._resuming.pop(task, None)) is not None:
            self._perform(self._core.resume(paused, now()))

    # ------------------------------------------------------------ to end them

    def cancel(self, client: bytes, request_id: int) -> None:
        if (client, request_id) in self._tasks:
            self._take_off(client, request_id).cancel()

    def cancel_client(self, client: bytes) -> None:
        """Cancel everything of a client."""
        for key in [key for key in self._tasks if key[0] == client]:
            self._take_off(*key).cancel()

    def close(self) -> None:
        """Cancel everything; pauses are left as they are."""
        self._resuming.clear()
        for task, _ in self._tasks.values():
            task.cancel()
