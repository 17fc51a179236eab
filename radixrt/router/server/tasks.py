"""Runs the work for clients' messages that takes longer than a turn of the event loop, in asyncio tasks.

    start -> the work replies, or hands its message on to the core (`leave`), or fails: an Error
          -> cancelled, or the client has disconnected: no reply

A message may end a pause of a state. However the message ends, the pause is over when its task is at the latest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from radixrt.messages import Error
from radixrt.requests.validate import Refused, refusal
from radixrt.router.core.core import RouterCore
from radixrt.router.core.effects import Effect, Reply
from radixrt.router.programs.state_store import Key
from radixrt.tokens.errors import FieldError

log = logging.getLogger("radixrt.router")

MAX_TENANT_BYTES = 256 << 20
"""The most bytes of a tenant's messages that have tasks, unless a single one has more."""
Handler = Callable[[bytes, Any], Coroutine[Any, Any, None]]
"""Takes a client and its message."""


now = time.monotonic
"""The core's clock, seconds."""


class Tasks:
    """The tasks by client and message id. They take places of the queue, like runs in flight. Replies and orders are
    passed to `perform`."""

    def __init__(self, core: RouterCore, perform: Callable[[list[Effect]], None]) -> None:
        self._core = core
        self._perform = perform
        self._tasks: dict[tuple[bytes, int], tuple[asyncio.Task[None], str, int]] = {}
        """(task, tenant, bytes of the message) by client and message id."""
        self._tenants: Counter[str] = Counter()
        """Number of tasks by tenant."""
        self._bytes: Counter[str] = Counter()
        """Bytes of their messages by tenant."""
        self._resuming: dict[asyncio.Task[None], Key] = {}
        """Tasks that are to end a pause of a state, and have not passed that on to the core."""

    def __len__(self) -> int:
        return len(self._tasks)

    def check_id(self, client: bytes, request_id: int) -> None:
        """Raise Refused if a client's message of this id is in flight, here or in the core."""
        if (client, request_id) in self._tasks or self._core.serves(client, request_id):
            raise Refused("id", f"request id {request_id} is in flight already")

    def start(
        self,
        work: Handler,
        client: bytes,
        message: Any,
        tenant: str,
        paused: Key | None = None,
        size: int = 0,
        *,
        always: bool = False,
    ) -> None:
        """Run `work` for a tenant in a task, which replies with an Error if it fails. Raises Refused if the id is in
        flight, or there is no place, or none for `size` bytes more; with `always`, for work that frees resources, a
        place is not needed. `paused` is a state of which the message ends a pause, even if it is refused."""
        try:
            self.check_id(client, message.id)
            if not always and not self._core.has_place(tenant, len(self._tasks), self._tenants[tenant]):
                raise Refused("", "too many requests in flight", 429, retry_after=1.0)
            if size and self._bytes[tenant] and self._bytes[tenant] + size > MAX_TENANT_BYTES:
                raise Refused("", "too many bytes of messages are being worked on", 429, retry_after=1.0)
        except Refused:
            if paused:
                self._perform(self._core.resume(paused, now()))
            raise
        task = asyncio.get_running_loop().create_task(self._guard(work, client, message))
        self._tasks[client, message.id] = task, tenant, size
        self._tenants[tenant] += 1
        self._bytes[tenant] += size
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
            task, *_ = self._tasks.get((client, request_id), (None,))
            if task is asyncio.current_task():
                self._remove(client, request_id)

    def _remove(self, client: bytes, request_id: int) -> asyncio.Task[None]:
        """Remove a task, and free its place."""
        task, tenant, size = self._tasks.pop((client, request_id))
        self._tenants[tenant] -= 1
        self._bytes[tenant] -= size
        return task

    def in_flight(self, client: bytes) -> list[int]:
        """Ids of a client's messages that have a task."""
        return [request_id for owner, request_id in self._tasks if owner == client]

    # ------------------------------------------------------------ called by the work

    def leave(self, client: bytes, request_id: int) -> None:
        """The message has been passed on to the core: free its place here."""
        self._remove(client, request_id)

    def hand_on_pause(self) -> bool:
        """Whether the current task is to end a pause; if so, that is now up to the caller."""
        task = asyncio.current_task() if self._resuming else None
        return task is not None and self._resuming.pop(task, None) is not None

    def _resume(self, task: asyncio.Task[None] | None) -> None:
        """End the pause that a task is to end, unless that was done or passed on."""
        if task is not None and (paused := self._resuming.pop(task, None)) is not None:
            self._perform(self._core.resume(paused, now()))

    # ------------------------------------------------------------ cancellation

    def cancel(self, client: bytes, request_id: int) -> None:
        if (client, request_id) in self._tasks:
            self._remove(client, request_id).cancel()

    def cancel_client(self, client: bytes) -> None:
        """Cancel everything of a client."""
        for key in [key for key in self._tasks if key[0] == client]:
            self._remove(*key).cancel()

    def close(self) -> None:
        """Cancel all tasks. Pauses stay as they are."""
        self._resuming.clear()
        for task, *_ in self._tasks.values():
            task.cancel()
