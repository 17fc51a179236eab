"""Reasoning that the client keeps: `encrypted_content` of reasoning items, where `include` asks for it.

A server that has forgotten an answer, or never saw it, finds its reasoning there. It is signed, not secret: the client
gets the same text in plain. The signature is made with the caller's API key, so that every front end can check it, also
after a restart, and no other tenant's passes.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from radixrt.frontend.http.errors import refuse
from radixrt.messages import Namespace

ENCRYPTED = "reasoning.encrypted_content"
"""What `include` has to hold."""
_FIELD = "encrypted_content"
_PREFIX = "rr1."
_SIGNATURE_BYTES = 16
Item = dict[str, Any]


class Seals:
    """Signs reasoning. `tenants` by API keys: what one key of a tenant has signed is good for its other keys."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        self._keys: dict[str, list[str]] = {}
        for key, tenant in tenants.items():
            self._keys.setdefault(tenant, []).append(key)

    def seal(self, namespace: Namespace, key: str, text: str) -> str:
        """The reasoning `text` as `encrypted_content` for a caller with an API `key`."""
        said = text.encode()
        return _PREFIX + base64.urlsafe_b64encode(_signature(namespace, key, said) + said).decode()

    def opened(self, namespace: Namespace, key: str, sealed: str) -> str | None:
        """The reasoning; None if it was not sealed here for the same tenant and salt, or is damaged."""
        if not sealed.startswith(_PREFIX):
            return None
        try:
            data = base64.b64decode(sealed[len(_PREFIX) :], altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):  # ValueError: other characters than ASCII
            return None
        signature, said = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
        for one in self._keys.get(namespace.tenant, [key]):
            if hmac.compare_digest(signature, _signature(namespace, one, said)):
                return said.decode()
        return None

    def restored(self, namespace: Namespace, key: str, items: Sequence[Item]) -> list[Item]:
        """The input items, with sealed reasoning as content where there is none in plain text. What cannot be opened is
        left out, as a server's that the conversation was begun with. Raises ApiError (400) that names an invalid
        field."""
        return [self._restored(namespace, key, f"input[{i}]", item) for i, item in enumerate(items)]

    def _restored(self, namespace: Namespace, key: str, field: str, item: Item) -> Item:
        if item.get("type") != "reasoning" or (sealed := item.get(_FIELD)) is None:
            return item
        if not isinstance(sealed, str):
            refuse(f"{field}.{_FIELD}", "must be a string")
        if item.get("content") or (text := self.opened(namespace, key, sealed)) is None:
            return item
        return item | {"content": [{"type": "reasoning_text", "text": text}]}


def _signature(namespace: Namespace, key: str, said: bytes) -> bytes:
    """Of a text in a namespace: what is signed for one tenant or salt is of no use for another."""
    secret = blake2b(key.encode(), digest_size=32, person=b"radixrt seal").digest()
    place = blake2b(namespace.key.encode(), digest_size=16).digest()
    return blake2b(place + said, key=secret, digest_size=_SIGNATURE_BYTES).digest()
