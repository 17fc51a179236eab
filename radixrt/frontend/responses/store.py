"""Stored responses, so that a request can continue one without sending its history again.

A response holds its chain: the messages of every turn up to it. Chains share their common turns, which count once, and
live as long as a chain that holds them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from radixrt.frontend.http.codec import encode
from radixrt.messages import Namespace
from radixrt.tokens.quota import Shares

Message = dict[str, Any]
Name = tuple[Namespace, str]
"""(namespace, id) of a response."""

LINK_BYTES = 64
"""About what a response takes for each turn of its chain."""


class Turn:
    """The messages that one request added, including the answer."""

    __slots__ = ("holders", "messages", "size")

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = tuple(messages)
        self.size = len(encode(messages))
        self.holders = 0


class StoredResponse(msgspec.Struct, gc=False):
    """A response: `body` is its JSON."""

    body: bytes
    turns: tuple[Turn, ...]

    @property
    def messages(self) -> list[Message]:
        """The messages of its whole chain."""
        return [message for turn in self.turns for message in turn.messages]

    @property
    def size(self) -> int:
        """Bytes of the response itself, without its turns."""
        return len(self.body) + LINK_BYTES * len(self.turns)


class ResponseStore:
    """Holds at most `max_bytes`. Beyond that the least recently used responses of the tenant with most bytes, over all
    its salts, are dropped."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._tenants: dict[str, OrderedDict[Name, StoredResponse]] = {}
        """By tenant, the last used one last."""
        self._shares = Shares()

    @property
    def num_bytes(self) -> int:
        return self._shares.total

    def get(self, namespace: Namespace, response_id: str) -> StoredResponse | None:
        """A response of this namespace; None if it is not kept."""
        own, name = self._tenants.get(namespace.tenant), (namespace, response_id)
        if own is None or name not in own:
            return None
        own.move_to_end(name)
        return own[name]

    def put(
        self, namespace: Namespace, response_id: str, body: bytes, before: Sequence[Turn], new: Sequence[Message]
    ) -> None:
        """Keep a response that answers to the messages `new` (it is the last of them) after the turns `before`."""
        tenant, kept = namespace.tenant, StoredResponse(body, (*before, Turn(new)))
        self._tenants.setdefault(tenant, OrderedDict())[namespace, response_id] = kept
        self._shares.add(tenant, kept.size + sum(map(_hold, kept.turns)))
        while self.num_bytes > self._max_bytes:
            most = self._shares.largest()
            self._remove(most, next(iter(self._tenants[most])))

    def delete(self, namespace: Namespace, response_id: str) -> bool:
        """Delete a response; returns whether it was there. Responses that continue it stay."""
        if self.get(namespace, response_id) is None:
            return False
        self._remove(namespace.tenant, (namespace, response_id))
        return True

    def forget(self, is_meant: Callable[[str], bool]) -> None:
        """Delete all responses of the tenants that are meant."""
        for tenant in filter(is_meant, tuple(self._tenants)):
            for name in tuple(self._tenants[tenant]):
                self._remove(tenant, name)

    def _remove(self, tenant: str, name: Name) -> None:
        own = self._tenants[tenant]
        kept = own.pop(name)
        self._shares.add(tenant, -kept.size - sum(map(_let_go, kept.turns)))
        if not own:
            del self._tenants[tenant]


def _hold(turn: Turn) -> int:
    """Count one more chain that holds a turn; returns the additional bytes."""
    turn.holders += 1
    return turn.size if turn.holders == 1 else 0


def _let_go(turn: Turn) -> int:
    """The inverse of `_hold`; returns the bytes that are freed."""
    turn.holders -= 1
    return 0 if turn.holders else turn.size


class LocalResponses:
    """A ResponseStore with the interface of SharedResponses, for a single process."""

    def __init__(self, max_bytes: int) -> None:
        self._store = ResponseStore(max_bytes)

    def put(
        self,
        namespace: Namespace,
        response_id: str,
        body: bytes,
        before: Sequence[Turn],
        new: Sequence[Message],
        api_key: str,
    ) -> None:
        """See ResponseStore."""
        self._store.put(namespace, response_id, body, before, new)

    async def body(self, namespace: Namespace, response_id: str, api_key: str) -> bytes | None:
        """The JSON of a response, if it is kept."""
        kept = self._store.get(namespace, response_id)
        return kept.body if kept else None

    async def before(
        self, namespace: Namespace, response_id: str, api_key: str
    ) -> tuple[tuple[Turn, ...], list[Message]] | None:
        """Returns the (turns, messages) that a request continues."""
        kept = self._store.get(namespace, response_id)
        return (kept.turns, kept.messages) if kept else None

    async def delete(self, namespace: Namespace, response_id: str, api_key: str) -> bool:
        """See ResponseStore."""
        return self._store.delete(namespace, response_id)

    def forget(self, is_meant: Callable[[str], bool]) -> None:
        """See ResponseStore."""
        self._store.forget(is_meant)
