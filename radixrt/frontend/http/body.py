"""Reads the bodies of requests within limits: of bytes, and of what JSON holds, before it is parsed."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from radixrt.frontend.http._shape import exceeded
from radixrt.frontend.http.auth import headers_of
from radixrt.frontend.http.errors import ApiError

MAX_DEPTH = 256
"""The most objects and lists of a body within each other."""
MAX_VALUES = 1 << 18
"""The most objects, lists and strings, keys included. A parser takes up to 100 ns for each, while nobody else is
served."""
MAX_NUMBERS = 1 << 20
"""The most numbers and literals, except token ids that are read without a parser."""
MAX_ENTRIES = 1 << 14
"""The most objects or lists in one list: messages, tools, parts of a content."""
MIN_BYTES = 64 << 10
"""Smaller bodies cannot hold so much that it matters, and are parsed at once."""
MIN_THREAD_BYTES = 1 << 20
"""Larger ones are looked through in a thread, at about 1 GB/s and without Python's lock."""
MAX_TENANT_BYTES = 256 << 20
"""The most bytes of a tenant's bodies that are being read, parsed or encoded, unless a single one has more."""
HELD = "radixrt.held"
"""A key of a scope: what gives back the bytes of its body, once."""
SIZE = "radixrt.body_bytes"
"""A key of a scope: the size of the body that was read."""
T = TypeVar("T")
_LIMITS = {"depth": MAX_DEPTH, "values": MAX_VALUES, "numbers": MAX_NUMBERS, "entries": MAX_ENTRIES}
_WORDS = {
    "depth": "is nested more than {} deep",
    "values": "holds more than {} objects, lists and strings",
    "numbers": "holds more than {} numbers",
    "entries": "has more than {} entries",
}


class Bodies:
    """The bytes of bodies by tenant, from when they are read until their requests are sent to the router."""

    def __init__(self) -> None:
        self._tenants: Counter[str] = Counter()

    def add(self, tenant: str, more: int, own: int) -> None:
        """Count `more` bytes of a body, of which `own` are counted. Raises ApiError (429) if the tenant's are too
        many."""
        total = self._tenants[tenant] + more
        if total > MAX_TENANT_BYTES and total > own + more:
            raise ApiError(429, "too many bytes of requests are being read", retry_after=1.0)
        self._tenants[tenant] = total

    def remove(self, tenant: str, size: int) -> None:
        self._tenants[tenant] -= size
        if not self._tenants[tenant]:
            del self._tenants[tenant]


class Held:
    """What is counted of one body."""

    __slots__ = ("_bodies", "_size", "_tenant")

    def __init__(self, bodies: Bodies, tenant: str) -> None:
        self._bodies, self._tenant, self._size = bodies, tenant, 0

    def grow(self, size: int) -> None:
        """The body has so many bytes by now."""
        self._bodies.add(self._tenant, size - self._size, self._size)
        self._size = size

    def release(self) -> None:
        if self._size:
            self._bodies.remove(self._tenant, self._size)
            self._size = 0


def release(request: Request) -> None:
    """The body of a request is not needed any more."""
    if (held := request.scope.pop(HELD, None)) is not None:
        held.release()


async def read_body(
    request: Request, limit: int, too_large: Callable[[int], ApiError], held: Held | None = None
) -> bytes:
    """The body of a request. Raises `too_large(limit)` if it has more than `limit` bytes, before they are read if it
    says so. Long ones are counted in `held`, until `release`."""
    headers = headers_of(request)
    if (coding := headers.get(b"content-encoding", "")) not in ("", "identity"):
        raise ApiError(415, f"content-encoding: {coding} is not served; send the body as it is", "content-encoding")
    length = headers.get(b"content-length", "")
    if length.isdecimal() and int(length) > limit:
        raise too_large(limit)
    parts, size, more = [], 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the body ended early")
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > limit:
            raise too_large(limit)
        if size > MIN_BYTES and held is not None:
            request.scope[HELD] = held
            held.grow(size)
        more = message.get("more_body", False)
    request.scope[SIZE] = size
    return parts[0] if len(parts) == 1 else b"".join(parts)


async def check_shape(body: bytes) -> None:
    """Raise ApiError (400), which names the field, if a body of JSON holds more than is parsed here."""
    if len(body) < MIN_BYTES:
        return
    found = await apart(len(body) >= MIN_THREAD_BYTES, functools.partial(exceeded, body, *_LIMITS.values()))
    if found is not None:
        limit, field = found
        what = _WORDS[limit].format(_LIMITS[limit])
        raise ApiError(400, f"{field or 'the body'}: {what}", field)


def is_large(request: Request) -> bool:
    """Whether the body is so large that what is computed from it takes long."""
    return request.scope.get(SIZE, 0) >= MIN_BYTES


async def apart(large: bool, function: Callable[[], T]) -> T:
    """Call a function; if what it computes from is `large`, in a thread, so that others are served meanwhile."""
    return await asyncio.to_thread(function) if large else function()
