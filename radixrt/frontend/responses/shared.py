"""Responses that all front ends of a router share: each is kept as its JSON and the names of its turns, and each turn
is kept once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from radixrt.frontend.generate.shared_store import SharedStore, key_of
from radixrt.messages import Namespace

Message = dict[str, Any]
_encode = msgspec.msgpack.Encoder().encode


class SharedResponse(msgspec.Struct, array_like=True):
    """`body` is the response's JSON; `turns` are named by the response that each ended with."""

    body: bytes
    turns: list[str]


_response = msgspec.msgpack.Decoder(SharedResponse)
_turn = msgspec.msgpack.Decoder(list[Message])


class SharedResponses:
    """Responses in the memory that front ends share; LocalResponses has the same interface for a single process."""

    def __init__(self, shared_store: SharedStore) -> None:
        self._shared_store = shared_store

    def put(
        self,
        namespace: Namespace,
        response_id: str,
        body: bytes,
        before: Sequence[str],
        new: Sequence[Message],
        api_key: str,
    ) -> None:
        """Keep a response that answers to the messages `new` (it is the last of them) after the turns `before`."""
        response = SharedResponse(body, [*before, response_id])
        entries = [
            (key_of("turn", namespace, response_id), _encode(list(new))),
            (key_of("response", namespace, response_id), _encode(response)),
        ]
        self._shared_store.share(entries, api_key)

    async def body(self, namespace: Namespace, response_id: str, api_key: str) -> bytes | None:
        """The JSON of a response, if it is kept."""
        found = await self._find(namespace, response_id, api_key)
        return found.body if found else None

    async def before(
        self, namespace: Namespace, response_id: str, api_key: str
    ) -> tuple[tuple[str, ...], list[Message]] | None:
        """Returns the (turns, messages) that a request continues."""
        found = await self._find(namespace, response_id, api_key)
        if found is None:
            return None
        keys = [key_of("turn", namespace, turn) for turn in found.turns]
        values = await self._shared_store.recall(keys, api_key)
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        try:
            return tuple(found.turns), [message for value in known for message in _turn.decode(value)]
        except msgspec.MsgspecError:
            return None

    async def delete(self, namespace: Namespace, response_id: str, api_key: str) -> bool:
        """Delete a response; returns whether it was there. Responses that continue it stay."""
        if await self._find(namespace, response_id, api_key) is None:
            return False
        self._shared_store.share([(key_of("response", namespace, response_id), None)], api_key)
        await self._shared_store.settled()
        return True

    async def _find(self, namespace: Namespace, response_id: str, api_key: str) -> SharedResponse | None:
        (value,) = await self._shared_store.recall([key_of("response", namespace, response_id)], api_key)
        try:
            return _response.decode(value or b"")
        except msgspec.MsgspecError:  # another client of the tenant may have stored something else under this key
            return None
