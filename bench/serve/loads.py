"""The loads: of which segments of token ids each prompt consists, and after which other request it starts. Pure
functions.

    plain     256 requests at once, 1,024 in, 256 out, nothing shared
    trunk16k  a trunk of 16,384 tokens (1 out), then 256 at once: trunk + 128 own in, 256 out
    trunk4k   a trunk of 4,096 tokens (1 out), then 128 at once: trunk + 256 own in, 256 out
    sessions  64 agents at once on 3 system prompts of 6,000 tokens; 8 turns each: a turn appends 300 to 900 tokens,
              generates 96 and appends 96 other ids in place of the answer; the next turn starts immediately
    tot       8 roots after one prompt of 2,048 tokens, fan-out 4, depth 3: a node appends 200 tokens to its parent's,
              generates 64, then its 4 children start together
    hit       16,384 cached tokens + 128 new, 1 out, one at a time, 20 times
    cold      16,384 new tokens, 1 out, one at a time, 8 times

Further loads, run only if named, for a cache of 320,000 tokens, which holds a half or a third of their tokens:

    pressed   160 agents at once on 3 system prompts of 3,000 tokens, with 1,000 to 3,000 of their own; 5 turns each, as
              in sessions, but with 150 to 500 new tokens and 64 generated ones
    tools     the same with a pause of 2 seconds between turns, for a tool
    returning the same with four turns, and pauses of 10 seconds
    long      48 agents with 15,000 to 20,000 tokens of their own
    paused    32 agents with 14,000 to 18,000 tokens of their own, three turns, and pauses of a minute, for a build: for
              device and host memory that hold a third of them (--max-total-tokens 90000 --kv-offloading-size 5.6 of a
              model of 8B)
    mixed     100 agents as in pressed, with ten turns, and 12 clients that each send ten requests, one after the other,
              of 1,000 to 6,000 tokens that nothing else shares
    tenants   as pressed, but with 32 agents of each of five tenants, which share nothing
    uneven    the same with four tenants, of 120, 30, 9 and 1 agents

A tenant's name is its API key; radixrt must be given the keys: `-- --api-key a:tenant-0 --api-key b:tenant-1`.

Prompts do not contain generated answers: all servers are sent the same tokens, whatever they generate.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

LOWEST_ID, END_OF_IDS = 1_000, 120_000
"""Token ids are chosen from [LOWEST_ID, END_OF_IDS), where models have no special tokens."""
SYSTEM_PROMPTS, TURNS = 3, 8
FAN_OUT, LEVELS = 4, 4
Size = Callable[[int], int]
"""Scales a number of requests or tokens."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Its prompt is the concatenation of the segments `parts`. It starts `pause` seconds after request
    `after` has ended, or (None) immediately. A `tenant` has an API key of its own."""

    parts: tuple[int, ...]
    max_tokens: int
    after: int | None = None
    pause: float = 0.0
    tenant: str = ""


@dataclass(slots=True)
class Load:
    """The requests of a load. `segments` are lengths in tokens; `prepare` is run before timing starts, one by one."""

    name: str
    segments: list[int] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    prepare: list[Ask] = field(default_factory=list)

    def segment(self, tokens: int) -> int:
        """Add a segment of new token ids. Returns its number."""
        self.segments.append(tokens)
        return len(self.segments) - 1

    def ask(
        self, parts: tuple[int, ...], max_tokens: int, after: int | None = None, pause: float = 0.0, tenant: str = ""
    ) -> int:
        self.asks.append(Ask(parts, max_tokens, after, pause, tenant))
        return len(self.asks) - 1

    def prompt_tokens(self, ask: Ask) -> int:
        return sum(self.segments[part] for part in ask.parts)

    def new_prefixes(self) -> set[tuple[int, ...]]:
        """The nodes of the tree of all prompts that `prepare` does not contain: each must be computed at least once."""
        return prefixes(self.asks) - prefixes(self.prepare)

    def shareable(self) -> float:
        """The share of prompt tokens that are hits in a cache of unlimited size, if requests wait for shared tokens
        that are being computed."""
        new = sum(self.segments[path[-1]] for path in self.new_prefixes())
        return 1.0 - new / sum(self.prompt_tokens(ask) for ask in self.asks)


def prefixes(asks: Iterable[Ask]) -> set[tuple[int, ...]]:
    """The nodes of the tree of prompts: each prompt, cut after each segment. A node's last part is the segment it
    adds."""
    return {ask.parts[:end] for ask in asks for end in range(1, len(ask.parts) + 1)}


def segment_ids(load: str, segment: int, tokens: int, *, seed: int, repetition: int, vocab_size: int) -> np.ndarray:
    """The token ids of a segment, which are determined by the arguments, and differ by load, repetition and seed."""
    low, end = min(LOWEST_ID, vocab_size // 2), min(END_OF_IDS, vocab_size)
    key = [seed, repetition, zlib.crc32(load.encode()), segment]
    return np.random.default_rng(key).integers(low, end, tokens, dtype=np.int32)


# ---------------------------------------------------------------- the seven


def plain(load: Load, size: Size) -> None:
    for _ in range(size(256)):
        load.ask((load.segment(size(1024)),), size(256))


def trunk16k(load: Load, size: Size) -> None:
    under_trunk(load, size, trunk=16_384, requests=256, own=128)


def trunk4k(load: Load, size: Size) -> None:
    under_trunk(load, size, trunk=4_096, requests=128, own=256)


def under_trunk(load: Load, size: Size, trunk: int, requests: int, own: int) -> None:
    shared = load.segment(size(trunk))
    first = load.ask((shared,), 1)
    for _ in range(size(requests)):
        load.ask((shared, load.segment(size(own))), size(256), after=first)


def sessions(load: Load, size: Size) -> None:
    # Lengths do not depend on the seed, so that runs differ only in ids.
    draw = np.random.default_rng(0)
    systems = [load.segment(size(6_000)) for _ in range(SYSTEM_PROMPTS)]
    for agent in range(size(64)):
        history, before = (systems[agent % SYSTEM_PROMPTS],), None
        for _ in range(TURNS):
            history = (*history, load.segment(size(int(draw.integers(300, 901)))))
            before = load.ask(history, size(96), after=before)
            history = (*history, load.segment(size(96)))


def tot(load: Load, size: Size) -> None:
    shared = load.segment(size(2_048))
    starts: list[tuple[tuple[int, ...], int | None]] = [((shared,), None)] * size(8)
    for _ in range(LEVELS):
        nodes = []
        for parent, after in starts:
            path = (*parent, load.segment(size(200)))
            nodes.append((path, load.ask(path, size(64), after=after)))
        starts = [node for node in nodes for _ in range(FAN_OUT)]


def hit(load: Load, size: Size) -> None:
    cached = load.segment(size(16_384))
    load.prepare.append(Ask((cached,), 1))
    one_at_a_time(load, [(cached, load.segment(size(128))) for _ in range(size(20))])


def cold(load: Load, size: Size) -> None:
    one_at_a_time(load, [(load.segment(size(16_384)),) for _ in range(size(8))])


def one_at_a_time(load: Load, prompts: list[tuple[int, ...]]) -> None:
    before = None
    for parts in prompts:
        before = load.ask(parts, 1, after=before)


# ---------------------------------------------------------------- run only if named


def pressed(load: Load, size: Size) -> None:
    agents_with_much(load, size, agents=160, own=(1_000, 3_000))


def tools(load: Load, size: Size) -> None:
    agents_with_much(load, size, agents=160, own=(1_000, 3_000), pause=2.0)


def returning(load: Load, size: Size) -> None:
    agents_with_much(load, size, agents=160, own=(1_000, 3_000), turns=4, pause=10.0)


def long(load: Load, size: Size) -> None:
    agents_with_much(load, size, agents=48, own=(15_000, 20_000))


def paused(load: Load, size: Size) -> None:
    agents_with_much(load, size, agents=32, own=(14_000, 18_000), turns=3, pause=60.0)


def mixed(load: Load, size: Size) -> None:
    agents_with_much(load, size, agents=100, own=(1_000, 3_000), turns=10)
    draw = np.random.default_rng(2)
    for _ in range(size(12)):
        before = None
        for _ in range(10):
            before = load.ask((load.segment(size(int(draw.integers(1_000, 6_000)))),), size(64), after=before)


def tenants(load: Load, size: Size) -> None:
    agents_of_tenants(load, size, [32] * 5)


def uneven(load: Load, size: Size) -> None:
    agents_of_tenants(load, size, [120, 30, 9, 1])


def agents_of_tenants(load: Load, size: Size, agents: list[int]) -> None:
    for number, of_tenant in enumerate(agents):
        agents_with_much(load, size, agents=of_tenant, own=(1_000, 3_000), tenant=f"tenant-{number}")


def agents_with_much(
    load: Load, size: Size, agents: int, own: tuple[int, int], turns: int = 5, pause: float = 0.0, tenant: str = ""
) -> None:
    draw = np.random.default_rng(1)
    systems = [load.segment(size(3_000)) for _ in range(SYSTEM_PROMPTS)]
    for agent in range(size(agents)):
        history = (systems[agent % SYSTEM_PROMPTS], load.segment(size(int(draw.integers(*own)))))
        before = None
        for _ in range(turns):
            history = (*history, load.segment(size(int(draw.integers(150, 500)))))
            waits = 0.0 if before is None else pause
            before = load.ask(history, size(64), after=before, pause=waits, tenant=tenant)
            history = (*history, load.segment(size(64)))


# ---------------------------------------------------------------- before the others


def warm_up(load: Load, size: Size) -> None:
    """A short version of the seven: a long prompt, then a full batch, half of which share it, with few tokens each."""
    trunk = load.segment(size(16_384))
    first = load.ask((trunk,), 1)
    for number in range(size(256)):
        own = load.segment(size(1_024))
        load.ask((trunk, own) if number % 2 else (own,), size(32), after=first)


def twice(load: Load, size: Size) -> None:
    """The same short prompt twice. Its length is not scaled, so that caches with large pages also hit."""
    prompt = (load.segment(128),)
    load.ask(prompt, 32, after=load.ask(prompt, 32))


MEASURED = {make.__name__: make for make in (plain, trunk16k, trunk4k, sessions, tot, hit, cold)}
ASKED_FOR = {make.__name__: make for make in (pressed, tools, returning, long, paused, mixed, tenants, uneven)}
OTHERS = {"warm-up": warm_up, "twice": twice}


def make_load(name: str, scale: float = 1.0) -> Load:
    """Make the load `name`, with its numbers of requests and tokens multiplied by `scale` (at least 2, except for
    1)."""

    def size(number: int) -> int:
        return number if number == 1 else max(2, round(number * scale))

    load = Load(name)
    (MEASURED | ASKED_FOR | OTHERS)[name](load, size)
    return load
