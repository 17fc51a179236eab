"""Which messages of clients are decoded: those with a key, if there are any, and of a size that takes milliseconds.

A decoder makes an object of each value, with Python's lock, so that a small message of many values stops everybody.
"""

from __future__ import annotations

from collections.abc import Iterable

from radixrt.messages import Error
from radixrt.wire.heads import DEPTH, ENTRIES, FINE, MALFORMED, NUMBERS, VALUES, Head, read_head

MAX_KEYLESS_BYTES = 4096
"""The largest message that is decoded without a key where there are keys."""
KEYLESS = (b"cancel", b"called_tool", b"ask")
"""Messages that have no key, or need none: some questions, for which `Handlers` looks at the key."""

MIN_BYTES = 64 << 10
"""Where no keys are needed, smaller messages are decoded unseen: what they can hold takes milliseconds."""
MAX_DEPTH = 272
"""Each limit is a little above that of an HTTP body (`frontend.http.body`), of which a front end makes a message."""
MAX_VALUES = (1 << 18) + (1 << 16)
MAX_NUMBERS = 1 << 19
"""`bad_token_ids` and `allowed_token_ids` may hold 330,000 together."""
MAX_ENTRIES = 1 << 15

_WORDS = {
    VALUES: f"holds more than {MAX_VALUES} objects, lists, strings and byte strings",
    NUMBERS: f"holds more than {MAX_NUMBERS} numbers",
    ENTRIES: f"has more than {MAX_ENTRIES} entries",
    DEPTH: f"is nested more than {MAX_DEPTH} deep",
}


class Gate:
    """Checks payloads. `keys` are those of tenants and the admin's; without any, a key is not needed."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = frozenset(key.encode() for key in keys)
        self._longest = max(map(len, self._keys), default=0)

    def refusal(self, payload: bytes) -> Error | None:
        """The Error for a payload that must not be decoded; None for others."""
        if not self._keys and len(payload) < MIN_BYTES:
            return None
        head = read_head(payload, MAX_VALUES, MAX_NUMBERS, MAX_ENTRIES, MAX_DEPTH)
        if head.verdict == MALFORMED:
            return Error(None, 400, "malformed message: it is not one map in MessagePack")
        if self._keys and not self._is_known(head.key) and not self._is_keyless(head, payload):
            return Error(head.id, 401, "unknown API key", "api_key")
        if head.verdict == FINE:
            return None
        return Error(head.id, 400, f"{head.path or 'the message'} {_WORDS[head.verdict]}", head.path)

    def _is_known(self, key: bytes) -> bool:
        return len(key) <= self._longest and key in self._keys  # to look up a long one takes as long as to hash it

    @staticmethod
    def _is_keyless(head: Head, payload: bytes) -> bool:
        return head.type in KEYLESS and len(payload) <= MAX_KEYLESS_BYTES
