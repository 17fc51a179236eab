"""Responses that are kept, so that a request may go on from one without sending its history again.

A response holds its chain: the messages of every turn up to it. Chains share the turns that they have in common, which
are counted once and live as long as one that holds them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

Message = dict[str, Any]

LINK_BYTES = 64
"""That a response costs for each turn of its chain."""
MOST_SHARE = 4
"""One namespace may use a fourth of the memory."""
_encode = msgspec.json.Encoder().encode


class Turn:
    """Messages that one request added, the answer included."""

    __slots__ = ("holders", "messages", "size")

    def __init__(self, messages: Sequence[Message]) -> None:
        self.messages = tuple(messages)
        self.size = len(_encode(messages))
        self.holders = 0


class Kept(msgspec.Struct, gc=False):
    """A response: `body` is its JSON."""

    body: bytes
    turns: tuple[Turn, ...]

    @property
    def messages(self) -> list[Message]:
        """All of its chain."""
        return [message for turn in self.turns for message in turn.messages]

    @property
    def size(self) -> int:
        """Bytes that are its own."""
        return len(self.body) + LINK_BYTES * len(self.turns)


class _Namespace:
    """Responses of one tenant and cache salt, the latest used last."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, Kept] = OrderedDict()
        self.size = 0

    def add(self, response_id: str, kept: Kept) -> int:
        """Bytes gained."""
        before = self.size
        self.size += kept.size
        for turn in kept.turns:
            self.size += 0 if turn.holders else turn.size
            turn.holders += 1
        self.kept[response_id] = kept
        return self.size - before

    def remove(self, response_id: str) -> int:
        """Bytes freed."""
        before, kept = self.size, self.kept.pop(response_id)
        self.size -= kept.size
        for turn in kept.turns:
            turn.holders -= 1
            self.size -= 0 if turn.holders else turn.size
        return before - self.size

    def remove_oldest(self) -> int:
        """Bytes freed."""
        return self.remove(next(iter(self.kept)))


class ResponseStore:
    """At most `max_bytes`; beyond it, or its share, the least recently used response goes, of the namespace that is
    the least recently used."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size = 0
        self._namespaces: OrderedDict[str, _Namespace] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        return self._size

    def get(self, namespace: str, response_id: str) -> Kept | None:
        """A response, if it is kept, and was put there in the same namespace."""
        found = self._namespaces.get(namespace)
        if found is None or response_id not in found.kept:
            return None
        self._namespaces.move_to_end(namespace)
        found.kept.move_to_end(response_id)
        return found.kept[response_id]

    def put(
        self, namespace: str, response_id: str, body: bytes, before: Sequence[Turn], new: Sequence[Message]
    ) -> None:
        """Keep a response that answers to the messages `new` (it is the last of them) after the turns `before`."""
        found = self._namespaces.setdefault(namespace, _Namespace())
        self._namespaces.move_to_end(namespace)
        self._size += found.add(response_id, Kept(body, (*before, Turn(new))))
        while found.size > self._max_bytes // MOST_SHARE:
            self._size -= found.remove_oldest()
        while self._size > self._max_bytes:
            self._size -= next(iter(self._namespaces.values())).remove_oldest()
            self._forget_empty()
        self._forget_empty(namespace)

    def delete(self, namespace: str, response_id: str) -> bool:
        """Whether it was there. Responses that went on from it stay."""
        if self.get(namespace, response_id) is None:
            return False
        self._size -= self._namespaces[namespace].remove(response_id)
        self._forget_empty(namespace)
        return True

    def _forget_empty(self, namespace: str | None = None) -> None:
        """Drop a namespace, the oldest by default, that holds nothing."""
        name = next(iter(self._namespaces), "") if namespace is None else namespace
        if name in self._namespaces and not self._namespaces[name].kept:
            del self._namespaces[name]


class LocalResponses:
    """A ResponseStore that is asked like one that other front ends share."""

    def __init__(self, max_bytes: int) -> None:
        self._store = ResponseStore(max_bytes)

    def put(
        self,
        namespace: str,
        response_id: str,
        body: bytes,
        before: Sequence[Turn],
        new: Sequence[Message],
        api_key: str,
    ) -> None:
        """See ResponseStore."""
        self._store.put(namespace, response_id, body, before, new)

    async def body(self, namespace: str, response_id: str, api_key: str) -> bytes | None:
        """The JSON of a response, if it is kept."""
        kept = self._store.get(namespace, response_id)
        return kept.body if kept else None

    async def before(
        self, namespace: str, response_id: str, api_key: str
    ) -> tuple[tuple[Turn, ...], list[Message]] | None:
        """(turns, messages) that a request goes on from."""
        kept = self._store.get(namespace, response_id)
        return (kept.turns, kept.messages) if kept else None

    async def delete(self, namespace: str, response_id: str, api_key: str) -> bool:
        """See ResponseStore."""
        return self._store.delete(namespace, response_id)
