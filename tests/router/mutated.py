"""Messages that are almost right: for fuzzing."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import msgspec
from sim_workers import ids, register

from radixrt import wire
from radixrt.messages import (
    Adapter,
    AdapterLoaded,
    Ask,
    Cancel,
    ChangeAdapter,
    ChatPrompt,
    Cleared,
    Detokenize,
    Dropped,
    Forget,
    Fork,
    Generate,
    GeneratedSegment,
    Grammar,
    Heartbeat,
    Leave,
    Load,
    Namespace,
    Output,
    PartsPrompt,
    Pause,
    Recall,
    Removed,
    Sampling,
    Saved,
    Score,
    Share,
    StatePrompt,
    StepDone,
    Stored,
    TextPrompt,
    TextSegment,
    Tokenize,
    TokenLogprob,
    TokenPrompt,
)

PROMPT = TokenPrompt(ids(5, 6, 7))
SCOPE = "scope-of-a-program"
CHAT = ChatPrompt([{"role": "user", "content": "hi"}], [{"type": "function", "function": {"name": "f"}}])
STATE = StatePrompt(SCOPE, 1, [TextSegment("hi"), GeneratedSegment(ids(5), "x", None, Sampling())], save=2)
SAMPLING = Sampling(
    max_tokens=3, logit_bias={5: 1.0}, stop=("x",), seed=1, grammar=Grammar("regex", "a+"), bad_token_ids=((5, 6),)
)
FROM_CLIENTS = [
    Generate(id=1, prompt=PROMPT, sampling=Sampling(max_tokens=4), pin=[(2, 1.0)]),
    Generate(id=2, prompt=CHAT, sampling=SAMPLING, n=2),
    Generate(id=3, prompt=STATE, sampling=Sampling(max_tokens=2)),
    Score(id=4, prompt=TextPrompt("a"), choices=[PROMPT, TextPrompt("b")]),
    Tokenize(id=5, prompt=PartsPrompt([TextPrompt("a"), PROMPT])),
    Detokenize(id=6, ids=ids(5, 6)),
    Cancel(1, 0, 2),
    *(Ask(id=7, what=what) for what in ("health", "models", "model", "report", "metrics")),
    Fork(id=8, prompt=StatePrompt(SCOPE, 0, [TextSegment("hi")], save=1), count=2),
    Pause(id=9, scope=SCOPE, state=1, seconds=1.0),
    Forget(id=10, scope=SCOPE),
    Share(id=11, entries=[(b"k", b"v"), (b"l", None)], used=[b"m"]),
    Recall(id=12, keys=[b"k", b"l"]),
    ChangeAdapter(id=13, name="a", path="/nowhere"),
]
EVENTS = [
    Stored(Namespace("default", "m").key, 1, 0, 0, 0, ids(5, 6)),
    Removed(1, 1),
    Saved(1, 2, 3),
    Dropped(1),
    Cleared(),
]
LOGPROB = TokenLogprob(5, -1.0, [(5, -1.0)])
FROM_WORKERS = [
    register("mutant", model="other", incarnation=5),
    StepDone([Output(1, [5], None, 1, [LOGPROB]), Output(2, [5], "stop", stop=5)], Load(1, 1), 0, EVENTS, number=1),
    StepDone([Output(3, finish="error", error="x", scores=[-1.0])], Load(), 5, EVENTS, True, 2),
    AdapterLoaded(Adapter("a", 1, "/x")),
    Heartbeat("mutant", 1, 5),
    Leave("mutant", "x", 1, 5),
]
ODD = [
    None, True, 0, -1, 1 << 31, 1 << 63, (1 << 64) - 1, -(1 << 63), 0.5, math.nan, math.inf, -math.inf, 1e308, "", "x",
    "\0", "é" * 300, b"", b"\xff", b"\0\0\0\x80", [], [[]], {}, {"a": None}, [None] * 40, {"": {"": []}}, "prompt",
    msgspec.msgpack.Ext(5, b"x"), msgspec.msgpack.Ext(-1, b"\xff" * 12),
]  # fmt: skip


def mutated(messages: list, number: int, seed: int) -> Iterator[bytes]:
    """So many payloads: of each message some bytes, or some values of it, are others."""
    rng = random.Random(seed)
    whole = [wire.encode(message) for message in messages]
    for _ in range(number):
        payload = rng.choice(whole)
        if rng.random() < 0.6:
            payload = msgspec.msgpack.encode(_changed(msgspec.msgpack.decode(payload), rng))
        for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
            payload = _cut(payload, rng.choice(whole), rng)
        yield payload


def _changed(value: Any, rng: random.Random) -> Any:
    """The value with an odd one somewhere in it."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for key in keys:
            places.append((value, key))
            walk(value[key])

    walk(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        container, key = rng.choice(places)
        container[key] = rng.choice(ODD)
    return value


def _cut(payload: bytes, other: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(payload) + 1)
    match rng.randrange(4):
        case 0:
            return payload[:at] + bytes([rng.randrange(256)]) + payload[at + 1 :]
        case 1:
            return payload[:at]
        case 2:
            return payload[:at] + other[rng.randrange(len(other)) :]
        case _:
            return payload[:at] + rng.randbytes(rng.randrange(4)) + payload[at:]
