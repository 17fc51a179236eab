"""Mutations of messages: of their bytes, and of the values in them. All are drawn from the generator that is given."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import msgspec

BROKEN_TEXT = b"\xff\xfe\xc0\x80"
_PLACE = "\ue000\ue001"[:1] + "Z"  # 3 bytes of UTF-8, and one
assert len(_PLACE.encode()) == len(BROKEN_TEXT)
HUGE_HEADS = (
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\x7f\xff\xff\xff",
    b"\xdc\xff\xff", b"\xde\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xc1", b"\xd9\xff",
)  # fmt: skip
"""Starts of msgpack values that announce more than can follow."""
NUMBERS = (
    -1, 0, 1, 2**31 - 1, 2**31, -(2**31) - 1, 2**32, 2**53, 2**63 - 1, -(2**63), 2**64 - 1,
    1e308, -1e308, 1e-320, 3.5e38, float("inf"), float("-inf"), float("nan"), -0.0, 0.5,
)  # fmt: skip


MAX_PLACES = 5000


def flip(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8)) if data else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.choice((1, 1, 4, 40))) + data[at:]


def repeat(rng: random.Random, data: bytes) -> bytes:
    begin = rng.randrange(len(data) + 1)
    end = rng.randrange(begin, len(data) + 1)
    return data[:end] + data[begin:end] * rng.choice((1, 2, 30)) + data[end:]


def splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def announce(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(HUGE_HEADS) + data[at:]


def garbage(rng: random.Random, data: bytes) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 8, 100, 5000)))


# ---------------------------------------------------------------- values


def odd(rng: random.Random) -> Any:
    """A value that is seldom expected."""
    kind = rng.randrange(9)
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind == 4:
        return rng.choice((None, True, False, [], {}, "", b"", b"abc", {"type": "dance"}, [[]]))
    if kind == 5:
        return rng.choice((_PLACE, "\x00", "\u202e" * 5, "x" * rng.choice((100, 20_000)), "-1", "NaN", "1e999"))
    if kind == 6:
        return nested(rng.choice((5, 200, 2000)), rng.random() < 0.5)
    if kind == 7:
        return [rng.choice(NUMBERS)] * rng.choice((1, 3, 5000))
    return {str(n): n for n in range(rng.choice((1, 20, 2000)))}


def kin(rng: random.Random, value: Any) -> Any:
    """Another value of the same type, so that the message is still one of its type."""
    match value:
        case bool():
            return not value
        case int():
            return rng.choice((value + 1, value - 1, *(n for n in NUMBERS if isinstance(n, int))))
        case float():
            return rng.choice(NUMBERS)
        case str():
            at = rng.randrange(len(value) + 1)
            more = rng.choice(("", _PLACE, "\x00", "<|im_end|>", "\u00e9" * 50, "a" * 3000, " ", "["))
            return value[:at] + more + value[at + rng.choice((0, 0, 1, 99)) :]
        case bytes():
            return rng.choice((flip, truncate, insert, repeat))(rng, value)
        case list() if value:
            one = rng.choice(value)
            return rng.choice(([one], value[1:], [*value, one], value[::-1], value * rng.choice((2, 2, 50))))
        case dict() if value:
            gone = rng.choice([*value])
            return {key: one for key, one in value.items() if key != gone}
    return odd(rng)


def nested(depth: int, maps: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if maps else [value]
    return value


def places(value: Any) -> list[tuple[Any, Any]]:
    """(Container, key or index) of the values within a value, of up to MAX_PLACES."""
    found: list[tuple[Any, Any]] = []
    left = [value]
    while left and len(found) < MAX_PLACES:
        one = left.pop()
        keys = one.keys() if isinstance(one, dict) else range(len(one)) if isinstance(one, list) else ()
        found += [(one, key) for key in keys]
        left += [one[key] for key in keys]
    return found


def change_value(rng: random.Random, value: Any, other: Any) -> Any:
    """Change a value at one to three places: to an odd one, to one of another message, or away."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if not (there := places(value)):
            return odd(rng)
        container, key = rng.choice(there)
        match rng.randrange(8):
            case 0 if isinstance(container, dict):
                del container[key]
            case 0:
                container.pop(key)
            case 1 if isinstance(container, dict):
                container[rng.choice(("id", "type", "zz", _PLACE, "", "n"))] = odd(rng)
            case 1:
                container.insert(key, odd(rng))
            case 2 if theirs := places(other):
                place, name = rng.choice(theirs)
                container[key] = place[name]
            case 3:
                container[key] = odd(rng)
            case _:
                container[key] = kin(rng, container[key])
    return value


def packed(value: Any, rng: random.Random) -> bytes:
    """A value as msgpack; with `_PLACE` made invalid UTF-8, and sometimes a key of the outer map twice."""
    try:
        data = msgspec.msgpack.encode(value)
    except (OverflowError, RecursionError, msgspec.MsgspecError):
        return b"\xc1"
    if isinstance(value, dict) and 0 < len(value) < 15 and rng.random() < 0.1:
        key = rng.choice([*value])
        more = msgspec.msgpack.encode(key) + msgspec.msgpack.encode(rng.choice((value[key], 5, "twice")))
        data = bytes([data[0] + 1]) + data[1:] + more
    return data.replace(_PLACE.encode(), BROKEN_TEXT)


def as_json(value: Any, rng: random.Random) -> bytes:
    """As `packed`, as JSON: with NaN and Infinity as Python writes them, numbers of any length, lone surrogates."""
    try:
        data = json.dumps(value, default=lambda one: one.hex(), ensure_ascii=rng.random() < 0.5).encode()
    except (RecursionError, ValueError, TypeError):
        return b'{"a":' * 3000
    match rng.randrange(30):
        case 0:
            data = data.replace(b"1", b"1" * rng.choice((30, 5000)), 1)
        case 1:
            data = data.replace(b'"', b'"\\ud800', 1)
        case 2:
            data = data.replace(b"{", b'{"model": 7, "id": 1, "messages": [], "prompt": 2,', 1)
        case 3:
            data = b"\xef\xbb\xbf" + data
        case 4:
            data = data.replace(b"4", b"4e999", 1)
        case 5:
            data = b"[" * rng.choice((100, 20_000)) + data
    return data.replace(_PLACE.encode(), BROKEN_TEXT)


class Mutator:
    """Makes mutated messages out of valid ones. `loads` and `dumps` are of their encoding. `gentle`: only values are
    changed, for others of the same type, so that many messages are valid."""

    def __init__(
        self,
        rng: random.Random,
        valid: list[bytes],
        loads: Callable[[bytes], Any] = msgspec.msgpack.decode,
        dumps: Callable[[Any, random.Random], bytes] = packed,
        *,
        gentle: bool = False,
    ) -> None:
        self._rng, self._valid, self._loads, self._dumps, self._gentle = rng, valid, loads, dumps, gentle
        self._last_id = 0

    def mutated(self, data: bytes | None = None) -> bytes:
        """A mutated message: of `data`, or of any."""
        rng = self._rng
        value = self._fresh(rng.choice(self._valid) if data is None else data)
        if self._gentle:
            container, key = rng.choice(places(value))
            container[key] = kin(rng, container[key])
            return self._dumps(value, rng)
        other = rng.choice(self._valid)
        if rng.random() < 0.75:
            return self._dumps(change_value(rng, value, self._loads(other)), rng)
        data = self._dumps(value, rng)
        change = rng.choice((flip, flip, truncate, insert, repeat, announce, garbage, splice))
        return splice(rng, data, other) if change is splice else change(rng, data)

    def _fresh(self, data: bytes) -> Any:
        """The value of a valid message, with an id that no other has, so that it is not refused for that; a Cancel has
        one of the last."""
        value = self._loads(data)
        if isinstance(value, dict) and "id" in value:
            self._last_id += 1
            value["id"] = self._last_id - (self._rng.randrange(20) if value.get("type") == "cancel" else 0)
        return value
